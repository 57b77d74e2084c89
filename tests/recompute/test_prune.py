"""Region code that is hard to prune: every bit equals the twin's."""

import copy
import ctypes
import sys
import threading
import weakref

import numpy
import pytest
import torch
from support import OperatorNames, assert_equal
from test_offload import offload
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional

import ebbtide
from ebbtide import Recipe
from ebbtide._recompute.provenance import OpProvenance
from ebbtide._recompute.prune import PruneCache, PrunedForward

BATCH, TOKENS, WIDTH = 2, 16, 32
STEPS = 4
PRUNED = Recipe("selective", sites=(0,), prune=(0,))


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


class Step:
    now = 0

    @classmethod
    def is_late(cls):
        """Whether the prune cache has an entry."""
        return cls.now >= 2


class Layer(nn.Module):
    """The first product is pruned; `between` receives its output and the input."""

    def __init__(self, between):
        super().__init__()
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.between = between

    def forward(self, x):
        return x + self.out(self.between(self, self.q(x), x)).tanh()


def layers(between, layer=Layer):
    torch.manual_seed(0)
    return nn.Sequential(*(layer(between) for _ in range(2)))


def recomputes(between, recipe=PRUNED, layer=Layer):
    """How often exp runs in the backward of each step. Gradients and buffers have to equal the twin's."""
    model = layers(between, layer)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=recipe)
    counts = []
    for Step.now in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        results = []
        for each in (model, twin):
            torch.manual_seed(Step.now)
            each.zero_grad()
            loss = each(x).square().mean()
            with OperatorNames() as counting:
                loss.backward()
            results.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None), *each.buffers()])
            counts.append(counting.names.count("aten::exp"))
        assert_equal(*results)
    assert handle.stats().host_bytes == 0
    return counts[::2]


def constant(number):
    return torch.full((WIDTH,), float(number))


def read(reader):
    """A saved tensor depends on `reader(q)`, with 1 for an exception."""

    def between(_layer, q, _x):
        try:
            number = reader(q.detach())
        except Exception:
            number = 1.0
        return (q * constant(number)).exp()

    return between


def as_conjugated(q):
    return 1.0 + q.to(torch.complex64).conj().is_conj()


@pytest.mark.parametrize(
    "reader",
    [
        lambda q: q[0].untyped_storage().nbytes(),
        lambda q: q.untyped_storage()._cdata == q.view(-1).untyped_storage()._cdata,
        lambda q: q.tolist()[0][0][0],
        lambda q: float(q.numpy().sum()),
        lambda q: float(numpy.asarray(q).sum()),
        lambda q: float(numpy.from_dlpack(q).sum()),
        as_conjugated,
    ],
    ids=["size of memory", "its address", "tolist", "numpy", "asarray", "dlpack", "conjugated"],
)
def test_reads_of_a_pruned_tensor_have_the_result_of_forward(reader):
    assert recomputes(read(reader)) == [2, 2, 2, 2]


def strides(_layer, q, _x):
    other = torch.zeros(WIDTH, TOKENS, BATCH).permute(2, 1, 0) if Step.is_late() else torch.zeros(BATCH, TOKENS, WIDTH)
    return (q * constant(torch.add(other, q.detach()).stride(0))).exp()


def types(_layer, q, _x):
    factor = 1.0 if Step.is_late() else 1
    return (q * constant(((q.detach() > 0) * factor).element_size())).exp()


def packed(_layer, q, _x):
    lengths = torch.tensor([16, 4] if Step.is_late() else [16, 8])
    return (q * constant(nn.utils.rnn.pack_padded_sequence(q.detach(), lengths, batch_first=True).data.shape[0])).exp()


@pytest.mark.parametrize(
    ("between", "counts"), [(strides, [0, 0, 2, 2]), (types, [0, 0, 2, 2]), (packed, [2, 2, 2, 2])]
)
def test_a_cache_entry_with_other_metadata_is_not_used(between, counts):
    assert recomputes(between) == counts


class Tailed(Layer):
    """The last saved tensor is the result of `between`; the operator after it cannot be skipped."""

    def forward(self, x):
        return self.between(self, self.q(x), x).cumsum(1)


@pytest.mark.parametrize(
    ("between", "counts"),
    [(lambda _layer, q, _x: q.exp(), [0] * STEPS), (lambda _layer, q, _x: q.cumsum(1).exp(), [2] * STEPS)],
    ids=["behind", "before"],
)
def test_operators_after_the_last_saved_tensor_do_not_matter(between, counts):
    assert recomputes(between, layer=Tailed) == counts


def changed_and_dead(_layer, q, x):
    y = q.exp()  # the saved tensor is downstream, and unused after the region
    with torch.no_grad():
        y.mul_(2.0)
    return x * y.detach() + q.sin()


@pytest.mark.parametrize("outputs", ["keep", "offload"])
def test_a_changed_saved_tensor_without_holder_is_no_error(outputs):
    recipe = Recipe("selective", sites=(0,), prune=(0,), outputs=outputs)
    assert recomputes(changed_and_dead, recipe=recipe) == [2] * STEPS


def test_running_statistics_are_written():
    """The operator's schema does not declare the writes."""

    def between(layer, q, x):
        normed = layer.norm(q.flatten(0, 1)).view_as(x).exp()
        return normed * functional.batch_norm(x.flatten(0, 1), layer.norm.running_mean, layer.norm.running_var).view_as(
            x
        )

    assert recomputes(between) == [2] * STEPS


def test_a_call_with_random_numbers_is_not_pruned():
    """Later random numbers would differ."""

    def is_bernoulli(op, *args, **kwargs):
        return "bernoulli" in str(op)

    def between(_layer, q, x):
        mask = torch.bernoulli(q.detach().sigmoid())
        return q * mask * functional.dropout(x, 0.5).exp()

    recipe = Recipe("selective", ops=(is_bernoulli,), sites=(0,), prune=(0,))
    assert recomputes(between, recipe=recipe) == [2, 2, 2, 2]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_nothing_is_pruned_with_compressed_rows():
    rows = torch.eye(WIDTH).to_sparse_csr()

    def between(_layer, q, x):
        return (q * 2.0 + torch.mm(rows, q.flatten(0, 1).mT).mT.reshape(x.shape)).exp()

    assert recomputes(between) == [2, 2, 2, 2]
    assert recomputes(between, recipe=Recipe("selective", sites=(0, 1), prune=(1,))) == [2, 2, 2, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nothing_is_pruned_with_sparse_or_nested_results():
    def between(_layer, q, x):
        rows = torch.nested.nested_tensor(list(q.detach().unbind()), layout=torch.strided)
        dense = torch.nested.to_padded_tensor(rows * 2.0, 0.0)
        return torch.sparse.mm(torch.eye(TOKENS).to_sparse(), q[0] * dense[0]).expand_as(x).exp()

    assert recomputes(between) == [2, 2, 2, 2]


def test_a_profile_with_sparse_operands():
    identity = torch.eye(BATCH * TOKENS).to_sparse()

    def between(_layer, q, x):
        return torch.sparse.mm(identity, q.flatten(0, 1)).view_as(x)

    model = layers(between)
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    for _ in range(6):
        model(torch.randn(BATCH, TOKENS, WIDTH)).sum().backward()
    assert handle.profile is not None
    assert [
        call.downstream for region in handle.profile.regions for call in region.expensive_ops if "addmm" in call.op
    ] == []


def test_a_stored_output_is_recomputed():
    """A hook stores activations, and reads them during and after backward."""
    kept, seen = {}, []

    def between(layer, q, _x):
        kept[layer] = q.detach()
        return q.exp()

    model = layers(between)
    model[0].register_full_backward_hook(lambda layer, *_: seen.append(kept[layer].clone()))
    offload(model, recipe=PRUNED)
    for _ in range(2):
        x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
        model(x).square().mean().backward()
        for q in (seen[-1], kept[model[0]]):
            assert torch.equal(q, x @ model[0].q.weight.T)


def crossed(q, x):
    """A compiled graph saves in another order than the code, with equal metadata."""
    down, along = x.cumsum(-1), x.cumsum(0)
    return q + along.sin() + down.sin()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nothing_is_pruned_with_compiled_code(backend):
    compiled = torch.compile(crossed, backend=backend)
    assert recomputes(lambda _layer, q, x: compiled(q, x).exp()) == [2, 2, 2, 2]
    torch._dynamo.reset()
    assert recomputes(lambda _layer, q, x: crossed(q, x).exp()) == [0, 0, 0, 0]


class Copied(torch.autograd.Function):
    """A kernel that takes addresses."""

    @staticmethod
    def forward(ctx, t):
        out = torch.zeros(t.shape)
        ctypes.memmove(out.data_ptr(), t.data_ptr(), out.untyped_storage().nbytes())
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_failed_recomputation_is_freed_before_the_next():
    works = []

    def between(_layer, q, _x):
        work = torch.zeros(BATCH, TOKENS, WIDTH)
        alive = sum(earlier() is not None for earlier in works)
        works.append(weakref.ref(work))
        assert alive == 0
        return (q * Copied.apply(q.detach().sin()) + work).exp()

    model = layers(between)
    offload(model, recipe=PRUNED)
    model(torch.randn(BATCH, TOKENS, WIDTH)).sum().backward()
    assert len(works) == 6  # two layers: forward, failed recomputation, repeated recomputation


def test_out_of_memory_does_not_unprune():
    fails = []

    def between(_layer, q, _x):
        if fails:
            raise fails.pop()
        return q.exp().cos()

    model = layers(between)
    offload(model, recipe=PRUNED)
    loss = model(torch.randn(BATCH, TOKENS, WIDTH)).sum()
    fails.append(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        loss.backward()
    loss = model(torch.randn(BATCH, TOKENS, WIDTH)).sum()
    with OperatorNames() as counting:
        loss.backward()
    assert counting.names.count("aten::exp") == 0  # still skipped


class Fewer(Layer):
    """The third step lacks an unused product, so the last pruned call moves, and is missing. The metadata of saved
    tensors are equal in all steps."""

    def forward(self, x):
        q = self.q(x)
        if Step.now != 2:
            with torch.no_grad():
                self.q(x[:, :4])
        other = self.out(x).detach()
        return x + (q.exp() * self.q(x.sin()).exp()).tanh() * other


def test_fewer_pruned_calls_are_noticed_at_the_end_of_forward():
    recipe = Recipe("selective", sites=(0, 3), prune=(0, 3))
    assert recomputes(None, recipe=recipe, layer=Fewer) == [0, 0, 4, 0]


def with_c10d(t):
    torch.distributed.all_reduce(t)
    return t


def with_functional_collectives(t):
    return funcol.wait_tensor(funcol.all_reduce(t, "sum", torch.distributed.group.WORLD))


class First(Layer):
    """Communicates before the pruned call."""

    def forward(self, x):
        return super().forward(x + self.communicate(x.detach().clone()))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("layer", [Layer, First])
@pytest.mark.parametrize("communicate", [with_c10d, with_functional_collectives])
@pytest.mark.parametrize("ops", [("attention", "matmul"), ("matmul", "collective")])
def test_nothing_is_pruned_where_ranks_communicate(layer, communicate, ops, monkeypatch):
    """A repeated recomputation would communicate twice on one rank."""

    def between(_layer, q, x):
        return q.exp() + (communicate(x.detach().clone()) if layer is Layer else x)

    monkeypatch.setattr(First, "communicate", staticmethod(communicate), raising=False)
    sites = (1,) if layer is First and communicate is with_functional_collectives and "collective" in ops else (0,)
    recipe = Recipe("selective", ops=ops, sites=sites, prune=sites)
    assert recomputes(between, recipe=recipe, layer=layer) == [2, 2, 2, 2]


class Last(Layer):
    """Communicates after the last saved tensor."""

    def forward(self, x):
        y = self.q(x).exp()
        self.communicate(x.detach().clone())
        return y


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("communicate", [with_c10d, with_functional_collectives])
def test_ranks_communicate_once_after_the_last_saved_tensor(communicate, monkeypatch):
    """Recomputation ends earlier."""
    monkeypatch.setattr(Last, "communicate", staticmethod(communicate), raising=False)
    assert recomputes(None, layer=Last) == [0] * STEPS


def test_communication_invalidates_provenance():
    q = torch.randn(4, 4)
    provenance = OpProvenance()
    provenance.begin(0, torch.ops.aten.mm.default, (q, q), {}, q)
    provenance.of_arguments(torch.ops.c10d.barrier.default, (), {})
    assert provenance.unprunable & 1


def test_the_cache_is_thread_safe():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads at every bytecode
    cache, raised = PruneCache(), []

    def add(thread):
        try:
            for number in range(2000):
                cache.add(thread, PrunedForward((number,), [], frozenset(), []))
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=add, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert raised == []
