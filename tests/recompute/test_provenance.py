"""Pruned calls: the operators that recomputation skips, and the repetition after a need for skipped outputs."""

import contextlib
import copy
import ctypes

import pytest
import torch
from support import OperatorNames, assert_equal
from test_offload import offload
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import ConfigError, Plan, PlanError, Recipe, RegionPlan
from ebbtide._recompute.provenance import CallRecord, OpProvenance, PrunedReadError, PrunedReads, PrunedTensor
from ebbtide._recompute.prune import PruneCache, PrunedForward

ALL = tuple(range(20))
ROTATED = Recipe("selective", sites=(0, 1, 3), prune=(0, 1))  # q and k after their rotations, and attention's outputs
EVERYTHING = Recipe("selective", sites=ALL, prune=ALL)
BATCH, TOKENS, HEADS, WIDTH = 2, 16, 4, 32


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def rotated(t, table):
    half = t.shape[-1] // 2
    left, right = t[..., :half], t[..., half:]
    return t * table + torch.cat((-right, left), dim=-1) * table


class Attention(nn.Module):
    """`between` is applied to q between projection and attention."""

    def __init__(self, between=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.between = between

    def forward(self, x, table):
        normed = self.norm(x)
        q, k, v = (
            product(normed).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for product in (self.q, self.k, self.v)
        )
        q, k = rotated(q, table), rotated(k, table)
        if self.between is not None:
            q = self.between(q)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)).tanh()


class Layers(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        table = torch.arange(TOKENS * WIDTH // HEADS).view(TOKENS, -1).float().cos()
        for layer in self.layers:
            x = layer(x, table)
        return x.square().mean()


def steps(model, retains=False):
    """Losses, gradients and the operators of backward, for three steps."""
    results, names = [], []
    for number in range(3):
        torch.manual_seed(number)
        model.zero_grad()
        loss = model(torch.randn(BATCH, TOKENS, WIDTH))
        with OperatorNames() as counting:
            if retains:
                loss.backward(retain_graph=True)
            loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        names.append(counting.names)
    return results, names


def compare(make, recipe, **settings):
    """The operators of backward by step. Losses and gradients have to equal the twin's."""
    torch.manual_seed(0)
    model = Layers(make)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=recipe)
    found, names = steps(model, **settings)
    assert_equal(found, steps(twin, **settings)[0])
    stats = handle.stats()
    assert stats.host_bytes == 0
    assert stats.recomputed.count > 0
    return names


def calls(names, op):
    return [run.count(f"aten::{op}") for run in names]


# -- pruned calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["keep", "offload"])
def test_operators_between_projection_and_attention_are_skipped(outputs):
    projections = Recipe("selective", sites=(0, 1, 3), outputs=outputs)
    before = compare(Attention, projections)
    now = compare(Attention, Recipe("selective", sites=(0, 1, 3), prune=(0, 1), outputs=outputs))
    assert calls(before, "cat") == [4, 4, 4]  # two per layer
    assert calls(now, "cat") == [0, 0, 0]
    assert calls(now, "mm") == calls(before, "mm")


def test_pruning_holds_as_many_bytes():
    moved = []
    for recipe in (Recipe("selective", sites=(0, 1, 3)), ROTATED):
        model = Layers(Attention)
        handle = offload(model, recipe=recipe)
        steps(model)
        moved.append(handle.stats().parcels.nbytes)
    assert moved[0] == moved[1]


@pytest.mark.parametrize("recipe", [ROTATED, EVERYTHING], ids=str)
def test_graphs_may_be_kept(recipe):
    assert calls(compare(Attention, recipe, retains=True), "cat") == [0, 0, 0]


def test_all_expensive_calls_may_be_pruned():
    """All saved tensors after the first matrix product are held."""
    assert calls(compare(Attention, EVERYTHING), "_scaled_dot_product_flash_attention_for_cpu") == [0, 0, 0]


def test_an_expensive_call_without_saved_output_is_skipped_downstream():
    """Attention's saved tensors are held, so attention is skipped."""
    names = compare(Attention, Recipe("selective", sites=(0, 1, 2), prune=(0, 1)))
    assert calls(names, "_scaled_dot_product_flash_attention_for_cpu") == [0, 0, 0]


# -- calls that cannot be pruned ---------------------------------------------------------------------------------------


class Numpy(torch.autograd.Function):
    """A kernel invisible to dispatch modes."""

    @staticmethod
    def forward(ctx, t):
        out = torch.empty_like(t)
        out.copy_(torch.from_numpy(t.detach().numpy() * 2))
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Address(torch.autograd.Function):
    """A kernel that takes an address, writes to unrelated memory, and suppresses errors."""

    @staticmethod
    def forward(ctx, t):
        out = torch.zeros(t.shape)
        with contextlib.suppress(Exception):
            dense = t.contiguous()
            ctypes.memmove(out.data_ptr(), dense.data_ptr(), out.untyped_storage().nbytes())
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


def in_place(q):
    return (q * 1.5).add_(1.0)


def as_a_number(q):
    return q * (1.0 if q.sum().item() > 0 else 2.0)


def drawn(q):
    return functional.dropout(q, 0.5)


def chosen(q):
    return q if bool((q > 1e9).any()) else q * 2


NEEDED = {
    "changed in place": in_place,
    "a number": as_a_number,
    "drawn from": drawn,
    "decided by": chosen,
    "a kernel": Numpy.apply,
    "an address": Address.apply,
}


@pytest.mark.parametrize("name", NEEDED)
def test_calls_with_needed_outputs_are_recomputed(name):
    names = compare(lambda: Attention(NEEDED[name]), ROTATED)
    # q's in both layers. A failed recomputation does not know the culprit, and runs k's too.
    assert calls(names[-1:], "cat") == [4 if name == "an address" else 2]


def test_an_operator_only_in_recomputation_is_an_error():
    runs = []

    class Moody(Attention):
        def forward(self, x, table):
            runs.append(self)
            if runs.count(self) % 2 == 0:
                torch.randn_like(self.norm(x)).mul(self.q(self.norm(x)))
            return super().forward(x, table)

    model = Layers(Moody)
    offload(model, recipe=ROTATED)
    with pytest.raises(ebbtide.RecomputeError, match="in its recomputation"):
        steps(model)


def test_errors_of_region_code_reach_the_user():
    runs = []

    def breaks_later(q):
        runs.append(q)
        if len(runs) > 2:
            raise ValueError("broken")
        return q

    model = Layers(lambda: Attention(breaks_later))
    offload(model, recipe=ROTATED)
    loss = model(torch.randn(BATCH, TOKENS, WIDTH))
    with pytest.raises(ValueError, match="broken"):
        loss.backward()


# -- the prune cache ---------------------------------------------------------------------------------------------------


class Turning:
    """Alternates `ways` from step to step: forward and recomputation of a step take one way."""

    turn = 0

    def __init__(self, *ways):
        self.ways = ways

    def __call__(self, q):
        return self.ways[Turning.turn % len(self.ways)](q)


def turns(make):
    """Number of recomputed rotations by step. Gradients have to equal the twin's."""
    torch.manual_seed(0)
    model = Layers(make)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=ROTATED)
    rotations = []
    for Turning.turn in range(6):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        with OperatorNames() as counting:
            model(x).backward()
        rotations.append(counting.names.count("aten::cat") - 4)
        twin(x).backward()
        assert_equal(*([p.grad for p in each.parameters()] for each in (model, twin)))
    assert handle.stats().host_bytes == 0
    return rotations


def plus(q):
    return (q + 1.0).neg()


def minus(q):
    return (q - 1.0).neg()


def other_number(q):
    return (q + 2.0).neg()


def in_place_behind(q):
    return (q + 1.0).mul_(2.0).neg()


def exponential(q):
    return (q + 1.0).exp().neg()


def hyperbolic(q):
    """Saves as many tensors as `exponential`."""
    return (q + 1.0).tanh().neg()


def constant(count):
    return torch.full((WIDTH // HEADS,), float(count))


def part(count):
    """A saved tensor depends on the shape of a slice of q."""

    def between(q):
        return q * constant((q[:, :, :count] + 1.0).shape[2])

    return between


def flat(q):
    return q * constant(len(torch.ops.aten.mean(q.detach(), [2]).shape))


def turned(q):
    """Another operator than in `flat`, with equal arguments and equal metadata of all saved tensors."""
    return q * constant(len(torch.ops.aten.flip(q.detach(), [2]).shape))


def kept_of(share):
    """The size depends on random values."""

    def between(q):
        return q * q[q > share].shape[0]

    return between


def test_downstream_tensors_are_found_once(monkeypatch):
    followed = []
    follow = OpProvenance.follow
    monkeypatch.setattr(OpProvenance, "follow", lambda self, *call: followed.append(self) or follow(self, *call))
    counts = []

    class Counted(Attention):
        def forward(self, x, table):
            counts.append(len(followed))
            return super().forward(x, table)

    assert turns(Counted) == [0] * 6
    assert len(followed) > 0
    assert counts[4] == len(followed)  # the second step and later steps use the cache


@pytest.mark.parametrize("other", [minus, other_number, in_place_behind, exponential])
def test_forwards_of_another_way(other):
    assert turns(lambda: Attention(Turning(plus, other)))[0] == 0


@pytest.mark.parametrize("ways", [(part(3), part(5)), (flat, turned)], ids=["argument", "operator"])
def test_metadata_of_skipped_operators_is_compared(ways):
    assert turns(lambda: Attention(Turning(*ways)))[0] == 0


def test_a_size_that_depends_on_values():
    assert turns(lambda: Attention(Turning(kept_of(0.0), kept_of(0.5))))[-1] == 2  # q's


class ExtraProduct(nn.Linear):
    """Computes one more product in the fourth step, without saved tensors."""

    def forward(self, x):
        if Turning.turn == 3:
            with torch.no_grad():
                super().forward(x[:, :4])
        return super().forward(x)


def attention_with_extra_product():
    attention = Attention()
    attention.k = ExtraProduct(WIDTH, WIDTH, bias=False)
    return attention


@pytest.mark.parametrize(("usual", "other"), [(plus, exponential), (exponential, hyperbolic)])
def test_different_saved_tensors_are_noticed_at_the_end_of_forward(usual, other):
    """The fourth step differs: nothing is pruned there, and later steps prune again."""
    ways = [usual, usual, usual, other, usual, usual]
    assert turns(lambda: Attention(Turning(*ways))) == [0, 0, 0, 4, 0, 0]


def test_different_pruned_calls_are_noticed_at_the_end_of_forward():
    assert turns(attention_with_extra_product) == [0, 0, 0, 4, 0, 0]


def test_the_cache_keeps_the_latest_entries():
    cache = PruneCache()
    for number in range(100):
        cache.add("recipe", PrunedForward((number,), [], frozenset(), []))
    assert cache.find("recipe", 99) is not None
    assert cache.find("other", 99) is None
    assert [number for number in range(100) if cache.find("recipe", number) is not None] == list(range(84, 100))


# -- profiles ----------------------------------------------------------------------------------------------------------


def profile_of(make):
    model = Layers(make)
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    for _ in range(2):
        steps(model)
    assert handle.profile is not None
    return handle.profile


def test_a_profile_lists_tensors_downstream_of_projections():
    q, k, v, attention, _ = profile_of(Attention).regions[0].expensive_ops
    assert (q.users, k.users, v.users, attention.users) == ((3,), (3,), (3,), ())
    assert len(q.downstream) == len(k.downstream) == len(v.downstream) == 1  # saved by attention
    assert q.downstream_ops == k.downstream_ops > v.downstream_ops > 0
    assert q.downstream_s > 0 < k.downstream_s
    assert attention.downstream == ()  # attention has several outputs


@pytest.mark.parametrize("name", ["changed in place", "a number", "drawn from", "decided by", "a kernel"])
def test_a_profile_lists_nothing_downstream_of_a_needed_output(name):
    q, k, *_ = profile_of(lambda: Attention(NEEDED[name])).regions[0].expensive_ops
    assert (q.downstream, q.downstream_s, q.downstream_ops, q.users) == ((), 0.0, 0, ())
    assert len(k.downstream) == 1


class Unseen(torch.autograd.Function):
    """A kernel invisible to dispatch modes that saves two arguments, like attention of another library."""

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        out = torch.zeros(q.shape)
        dense = q.contiguous()
        ctypes.memmove(out.data_ptr(), dense.data_ptr(), out.untyped_storage().nbytes())
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        return grad * k, grad * q


class SavedUnseen(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        return Unseen.apply(self.q(x) * 0.5, self.k(x) * 0.5)


def test_tensors_saved_by_an_invisible_kernel_are_not_downstream():
    for region in profile_of(SavedUnseen).regions:
        assert [call.downstream for call in region.expensive_ops] == [(), ()]


# -- the parts ---------------------------------------------------------------------------------------------------------


def pruned_like(t):
    record = CallRecord(None, (), ((t.size(), t.stride(), t.storage_offset(), t.dtype, t.device),), None)
    return record.pruned(PrunedReads())


def test_a_pruned_tensor_has_the_metadata():
    t = torch.randn(4, 6, dtype=torch.float64)[:, 1:].t()
    pruned = pruned_like(t)
    assert type(pruned) is PrunedTensor
    assert (pruned.shape, pruned.stride(), pruned.storage_offset()) == (t.shape, t.stride(), t.storage_offset())
    assert (pruned.dtype, pruned.device, pruned.requires_grad) == (t.dtype, t.device, False)


@pytest.mark.parametrize("read", [torch.Tensor.sum, torch.Tensor.detach, torch.Tensor.data_ptr, torch.Tensor.item])
def test_a_pruned_tensor_refuses_reads(read):
    pruned = pruned_like(torch.randn(1))
    with pytest.raises((PrunedReadError, RuntimeError)):
        read(pruned)


def test_a_pruned_tensor_gives_no_address_to_native_code():
    with pytest.raises(RuntimeError, match="data pointer"):
        torch._C._to_dlpack(pruned_like(torch.randn(3)))


def test_provenance_follows_storages():
    provenance, op = OpProvenance(), torch.ops.aten.mul.Tensor
    a, b = torch.randn(4), torch.randn(4)
    provenance.begin(0, op, (), {}, a)
    provenance.begin(3, op, (), {}, b)
    assert provenance.of(a.view(2, 2)) == 1
    c = a * b
    assert provenance.follow(op, (a, b), {}, c) == provenance.of(c) == 0b1001
    assert provenance.follow(op, (torch.ones(1),), {}, torch.ones(1)) == 0
    assert provenance.unprunable == 0
    provenance.follow(torch.ops.aten.add_.Tensor, (b, b), {}, b)
    assert provenance.unprunable == 0b1000


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"action": "selective", "prune": (0,)},
        {"action": "selective", "sites": (0, 1), "prune": (2,)},
        {"action": "offload", "sites": (0, 1), "prune": (0,)},
    ],
)
def test_pruned_calls_are_a_subset_of_the_sites(settings):
    with pytest.raises(ConfigError, match="prune="):
        Recipe(**settings)


def test_a_plan_with_pruned_calls_is_saved_and_loaded(tmp_path):
    plan = Plan({"layers.0": RegionPlan(ROTATED)})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "2 pruned" in str(plan)
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace('"prune": [', '"prune": ["x",'))
    with pytest.raises(PlanError, match="prune"):
        Plan.load(tmp_path / "plan.json")
