"""torch.utils.checkpoint called by the user inside an entry point: retained tensors travel, and policies hold."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import threading
import weakref

import pytest
import torch
from cases import Data, Transformer, finish, make, tokens
from support import Boom, OneStream, Rig, SideStreams, assert_equal
from test_offload import offload
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ebbtide
from ebbtide._devices.sim import SimDevice
from ebbtide._recompute import torch_checkpoint as adapter
from ebbtide._stores.host import HostStore
from ebbtide._types import Reason

CPU = torch.device("cpu")
SPREAD, BUNDLED = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
NAME = BUNDLED if hasattr(torch_checkpoint, BUNDLED) else SPREAD
"""The function that this release's checkpoint calls: the second since torch 2.14."""
MM = torch.ops.aten.mm.default


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


ckpt = functools.partial(checkpoint, use_reentrant=False)
"""A reference from before the first entry point, as in transformers."""


def something_moves():
    """A first forward without moved tensors would warn."""
    (torch.ones(64, requires_grad=True) * 2.0).sin().exp()


# -- inputs ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, hidden, mask=None):
        y = torch.tanh(self.up(hidden))
        y = self.down(y if mask is None else y * mask)
        return hidden + nn.functional.dropout(y, 0.2)


@dataclasses.dataclass
class Pair:
    hidden: torch.Tensor
    mask: torch.Tensor | None
    name: str = "pair"


@dataclasses.dataclass(frozen=True)
class Frozen:
    mask: torch.Tensor
    inner: Pair


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: torch.Tensor
    mask: torch.Tensor


def _unpack(layer):
    return lambda parts: layer(*parts)


def _of_pair(layer):
    return lambda pair: layer(pair.hidden, pair.mask)


def _early(layer, hidden, mask):
    return ckpt(layer, hidden=hidden, mask=mask, early_stop=False)


WAYS = {
    "position": lambda layer, h, mask: ckpt(layer, h, mask),
    "keyword": lambda layer, h, mask: ckpt(layer, hidden=h, mask=mask),
    "position and keyword": lambda layer, h, mask: ckpt(layer, h, mask=mask),
    "tuple": lambda layer, h, mask: ckpt(_unpack(layer), (h, mask)),
    "list by keyword": lambda layer, h, mask: ckpt(_unpack(layer), parts=[h, mask]),
    "dict": lambda layer, h, mask: ckpt(lambda d: layer(**d), {"hidden": h, "mask": mask}),
    "nested": lambda layer, h, mask: ckpt(lambda d, x: layer(d["a"][0][1], x[0]), {"a": [(3, h)]}, x=(mask, None)),
    "dataclass": lambda layer, h, mask: ckpt(_of_pair(layer), Pair(h, mask)),
    "frozen": lambda layer, h, mask: ckpt(lambda f: _of_pair(layer)(f.inner), f=Frozen(mask, Pair(h, mask))),
    "slots": lambda layer, h, mask: ckpt(_of_pair(layer), Slotted(h, mask)),
    "partial": lambda layer, h, mask: ckpt(functools.partial(layer, mask=mask, hidden=h)),
    "partial, rest by position": lambda layer, h, mask: ckpt(functools.partial(layer, mask=mask), h),
    "partial of partial": lambda layer, h, mask: ckpt(functools.partial(functools.partial(layer, h), mask=mask)),
    "partial as an argument": lambda layer, h, mask: ckpt(lambda call: call(), functools.partial(layer, h, mask)),
    "bound method": lambda layer, h, mask: ckpt(layer.forward, hidden=h, mask=mask),
    "view": lambda layer, h, mask: ckpt(lambda *, t: layer(t.view(6, 8), mask), t=h.view(-1)),
    "twice": lambda layer, h, mask: ckpt(lambda a, *, b, c: layer(a, mask) + b[0] * c, h, b=[h], c=h),
    "without early stop": _early,
}


def tower(entry, way, steps=3):
    """Losses and gradients of some steps through four checkpointed layers, and which inputs the last forward freed."""
    layers = make(lambda: nn.ModuleList(Layer() for _ in range(4)), CPU)
    data = Data(CPU)
    batch, mask = data.leaf(6, 8), data.tensor(6, 12) > 0
    results, storages = [], []
    torch.manual_seed(0)
    for _ in range(steps):
        batch.grad = None
        layers.zero_grad()
        storages.clear()
        with entry:
            x = batch * 1.5
            for layer in layers:
                storages.append(weakref.ref(x.untyped_storage()))
                x = way(layer, x, mask)
            loss = x.square().mean()
            del x
            freed = [ref() is None for ref in storages]
        results += [t.clone() for t in finish(loss, batch, layers)]
        results.append(torch.rand(1))
    return results, freed


@pytest.mark.parametrize("name", WAYS)
def test_arguments_travel_however_passed(name):
    rig = Rig()
    ours, freed = tower(rig.context, WAYS[name])
    plain, retained = tower(contextlib.nullcontext(), WAYS[name])
    assert_equal(ours, plain)
    assert freed == [True] * 4
    assert retained == [False] * 4
    assert rig.stats.inbound.count > 0
    rig.check_at_rest()


class Tower(nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.way = way
        self.storages = []

    def forward(self, batch):
        x = self.embedding(batch).flatten(0, 1).sin()
        mask = torch.ones(6, 12)
        self.storages.clear()
        for layer in self.layers:
            self.storages.append(weakref.ref(x.untyped_storage()))
            x = self.way(layer, x, mask)
        return x.square().mean()


@pytest.mark.parametrize("name", WAYS)
def test_arguments_travel_in_a_module(name):
    model, twin = (make(lambda: Tower(WAYS[name]), CPU) for _ in range(2))
    handle = offload(model)
    results = {}
    for module in (model, twin):
        torch.manual_seed(0)
        results[module] = []
        for step in range(3):
            module.zero_grad()
            loss = module(tokens(CPU, step, 2, 3))
            freed = [ref() is None for ref in module.storages]
            assert freed == [module is model] * 3
            results[module] += [t.clone() for t in finish(loss, module)]
    assert_equal(results[model], results[twin])
    assert handle.stats().inbound.count > 0
    assert handle.stats().host_bytes == 0


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("kind", ["context", "module"])
def test_gradient_checkpointing_of_transformers(kind, by_keyword):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False, attention_dropout=0.1,
    )  # fmt: skip

    def model_of(storages):
        model = make(lambda: transformers.LlamaForCausalLM(config), CPU).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in model.model.layers:
            forward = layer.forward

            def noting(hidden_states, *args, _forward=forward, **kwargs):
                storages.append(weakref.ref(hidden_states.untyped_storage()))
                if by_keyword:
                    return _forward(hidden_states=hidden_states, *args, **kwargs)  # noqa: B026
                return _forward(hidden_states, *args, **kwargs)

            layer.forward = noting
        return model

    def run(model, entry, storages):
        results = []
        torch.manual_seed(1)
        for step in range(3):
            model.zero_grad()
            storages.clear()
            batch = tokens(CPU, step, 2, 16, 64)
            with entry:
                loss = model(input_ids=batch, labels=batch).loss
            freed = [ref() is None for ref in storages]
            results += [t.clone() for t in finish(loss, model)]
        return results, freed

    storages = []
    model = model_of(storages)
    rig = Rig(min_bytes=256)
    handle = ebbtide.offload(model, store="mock", window=1, min_bytes=256) if kind == "module" else None
    ours, freed = run(model, rig.context if handle is None else contextlib.nullcontext(), storages)
    plain, retained = run(model_of(storages), contextlib.nullcontext(), storages)
    assert_equal(ours, plain)
    assert freed == [True] * 4
    assert retained == [False] * 4
    stats = rig.stats if handle is None else handle.stats()
    assert stats.inbound.count > 0
    assert stats.host_bytes == 0


def test_kept_arguments_are_the_original_objects():
    """Containers without a tensor that travels, parameters, small tensors; in forward and recomputation."""
    seen = []
    small, weight = torch.ones(2), nn.Parameter(torch.ones(64))
    empty, pair, notes = [], (small, 1), {"w": weight}

    def region(x, empty, *, pair, notes):
        seen.append((empty, pair, pair[0], notes, notes["w"]))
        return (x[0] * notes["w"]).sin()

    rig = Rig(min_bytes=100)
    with rig.context:
        x = torch.ones(64) * 2.0
        loss = ckpt(region, [x], empty, pair=pair, notes=notes).sum()
    loss.backward()
    assert len(seen) == 2
    for values in seen:
        assert all(mine is passed for mine, passed in zip(values, (empty, pair, small, notes, weight), strict=True))
    assert rig.stats.parcels.count == 1


def test_recomputation_gets_new_containers():
    def region(x, notes):
        notes.append(x.sin())
        return (notes[0] * notes[-1]).cos()

    def run(entry):
        x = torch.ones(64, requires_grad=True)
        with entry:
            notes = [x * 2.0]
            loss = ckpt(region, x, notes).sum()
            assert len(notes) == 2
        notes.append(None)
        loss.backward()
        assert len(notes) == 3
        return [x.grad]

    def plain(x):
        return ((x * 2.0) * x.sin()).cos().sum()

    x = torch.ones(64, requires_grad=True)
    plain(x).backward()
    assert_equal(run(Rig().context), [x.grad])


def test_in_place_changes_of_a_region_are_visible_as_in_torch():
    def run(entry):
        x = Data(CPU).leaf(64)
        with entry:
            counter = torch.zeros(64) + 1.0

            def region(x, counts):
                counts[0].add_(1.0)
                return (x * 2.0).sin()

            loss = ckpt(region, x, counts=(counter,)).sum()
        assert counter[0] == 2.0
        loss.backward()
        return [x.grad, counter]

    assert_equal(run(Rig().context), run(contextlib.nullcontext()))


def test_keyword_tensors_changed_after_forward_raise_like_positional():
    x = Data(CPU).leaf(64)
    with Rig().context:
        y = x * 2.0
        loss = ckpt(lambda *, y: y.sin(), y=y).sum()
    y.add_(1.0)
    with pytest.raises(ebbtide.ModifiedError):
        loss.backward()


def test_closures_stay():
    """Tensors in a function's cells cannot be replaced: they stay on the device, with correct results."""

    def times(y):
        return lambda z: (y * z).sin()

    def run(entry):
        x = Data(CPU).leaf(64)
        with entry:
            y = x * 2.0
            storage = weakref.ref(y.untyped_storage())
            loss = ckpt(times(y), x.cos()).sum()
            del y
            assert storage() is not None
        loss.backward()
        return [x.grad]

    assert_equal(run(Rig().context), run(contextlib.nullcontext()))


@dataclasses.dataclass(eq=False)
class Scaling(nn.Module):
    scale: torch.Tensor

    def __new__(cls, *args):
        part = super().__new__(cls)
        nn.Module.__init__(part)  # the generated __init__ does not call __setattr__
        return part

    def forward(self, pair):
        assert self.is_itself
        return (pair[0] * self.scale + pair[1]).sin()


def test_modules_that_are_dataclasses_are_not_taken_apart():
    part = Scaling(torch.ones(64))
    part.__dict__["is_itself"] = True
    x = torch.ones(64, requires_grad=True)
    with Rig().context:
        y = x * 2.0
        loss = ckpt(part, (y, y)).sum()
    copies = [thing for thing in gc.get_objects() if type(thing) is Scaling]
    assert len(copies) == 1
    loss.backward()
    assert x.grad is not None


def test_inference_tensors_stay():
    """Inference tensors have no version counter."""
    with torch.inference_mode():
        offset = torch.ones(64)
    seen = []

    def region(x, *, parts):
        seen.append(parts[0])
        return (x + parts[0]).sin()

    x = torch.ones(64, requires_grad=True)
    with Rig().context:
        loss = ckpt(region, x * 2.0, parts=[offset, x * 3.0]).sum()
    loss.backward()
    assert all(argument is offset for argument in seen)
    assert len(seen) == 2


def test_without_grad_nothing_is_kept():
    rig = Rig()
    with torch.no_grad(), rig.context:
        ckpt(lambda *, y: y.sin(), y=torch.ones(64) * 2.0)
    assert rig.stats.saved_tensors == 0


def test_traced_it_is_as_torch_has_it():
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x):
        return ckpt(lambda pair: (pair[0] * pair[1]).sin(), (x * 2.0, x * 3.0)).sum()

    x = torch.ones(64)
    plain = make_fx(function)(x)
    rig = Rig()
    with rig.context:
        something_moves()
        ours = make_fx(function)(x)
    assert ours.code == plain.code
    assert rig.stats.parcels.count == 2  # of the moved tensors


def test_double_backward_retain_graph_and_partial_backward():
    def run(entry):
        data = Data(CPU)
        x, w = data.leaf(6, 8), data.leaf(8, 8)
        results = []
        with entry:
            y, z = ckpt(lambda *, h, w: ((h @ w).sin(), (h * 2.0).cos()), h=x + 1.5, w=w + 0.1)
            loss = (y.exp() * z).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        results += [first.detach()]
        results += [t.detach() for t in torch.autograd.grad(first.square().sum(), [x, w], retain_graph=True)]
        loss.backward(retain_graph=True)
        loss.backward()
        with entry:
            y, z = ckpt(lambda *, h, w: ((h @ w).sin(), (h * 2.0).cos()), h=x + 1.5, w=w + 0.1)
        y.sum().backward()
        z.sum().backward()
        return [*results, x.grad, w.grad]

    rig = Rig()
    assert_equal(run(rig.context), run(contextlib.nullcontext()))
    rig.check_at_rest()


def test_nested_checkpoints():
    def run(entry):
        layers = make(lambda: nn.ModuleList(Layer() for _ in range(3)), CPU)
        batch = Data(CPU).leaf(6, 8)
        torch.manual_seed(0)

        def outer(*, hidden):
            return ckpt(lambda pair: layers[1](ckpt(layers[0], hidden=pair[0])), (hidden,))

        with entry:
            loss = ckpt(layers[2], hidden=ckpt(outer, hidden=batch * 1.5)).square().mean()
        return finish(loss, batch, layers)

    rig = Rig()
    assert_equal(run(rig.context), run(contextlib.nullcontext()))
    assert rig.stats.inbound.count > 0
    rig.check_at_rest()


def test_reentrant_checkpoint_is_left_alone():
    def run(entry):
        layer = make(Layer, CPU)
        batch = Data(CPU).leaf(6, 8)
        torch.manual_seed(0)
        with entry:
            x = batch * 1.5
            storage = weakref.ref(x.untyped_storage())
            loss = checkpoint(layer, x, use_reentrant=True)
            del x
            loss = loss.exp().sin().sum()
            freed = storage() is None
        return finish(loss, batch, layer), freed

    ours, freed = run(Rig().context)
    assert_equal(ours, run(contextlib.nullcontext())[0])
    assert freed


# Has the function by name, whether imported before or after the first entry point.
def test_composable_checkpoint():
    from torch.distributed._composable import checkpoint as composable

    def run(entry):
        layers = make(lambda: nn.ModuleList(Layer() for _ in range(3)), CPU)
        for layer in layers:
            composable(layer)
        batch, storages = Data(CPU).leaf(6, 8), []
        torch.manual_seed(0)
        with entry:
            x = batch * 1.5
            for layer in layers:
                storages.append(weakref.ref(x.untyped_storage()))
                x = layer(hidden=x)
            loss = x.square().mean()
            del x
            freed = [ref() is None for ref in storages]
        return finish(loss, batch, layers), freed

    adapter.undo()
    ours, freed = run(Rig().context)
    plain, retained = run(contextlib.nullcontext())
    assert_equal(ours, plain)
    assert freed == [True] * 3
    assert retained == [False] * 3


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_compiled_layers_inside():
    def way(layer, hidden, mask):
        return ckpt(layer, hidden=hidden, mask=mask.float())

    def run(entry):
        layers = make(lambda: nn.ModuleList(Layer() for _ in range(3)), CPU)
        for layer in layers:
            layer.compile(backend="aot_eager")
        batch, storages = Data(CPU).leaf(6, 8), []
        mask = torch.ones(6, 12)
        for _ in range(2):
            batch.grad = None
            layers.zero_grad()
            storages.clear()
            torch.manual_seed(0)
            with entry:
                x = batch * 1.5
                for layer in layers:
                    storages.append(weakref.ref(x.untyped_storage()))
                    x = ckpt(layer, hidden=x, mask=mask)
                loss = x.square().mean()
                del x
                freed = [ref() is None for ref in storages]
            results = finish(loss, batch, layers)
        return results, freed

    ours, freed = run(Rig().context)
    assert_equal(ours, run(contextlib.nullcontext())[0])
    assert freed == [True] * 3
    torch._dynamo.reset()


# -- policies ----------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts calls by operator."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op] = self.calls.get(op, 0) + 1
        return op(*args, **(kwargs or {}))


def selective(policy, **options):
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def on(ops, member, other=CheckpointPolicy.PREFER_RECOMPUTE):
    """A policy with the answer `member` for calls of `ops`."""
    return lambda ctx, op, *args, **kwargs: member if op in ops else other


def products(x, *weights):
    for weight in weights:
        x = (x @ weight).sigmoid()
    return x.tanh()


def selected(entry, contexts, region=products, steps=3, **options):
    """Losses and gradients of some steps, the products of the last backward, and which outputs were freed before."""
    data = Data(CPU)
    batch, *weights = data.leaf(6, 8), data.leaf(8, 8), data.leaf(8, 8), data.leaf(8, 8)
    leaves = [batch, *weights]
    results = []
    torch.manual_seed(0)
    for _ in range(steps):
        for leaf in leaves:
            leaf.grad = None
        with entry:
            y = region(batch * 1.5, *weights) if contexts is None else ckpt(
                region, batch * 1.5, *weights, context_fn=contexts, **options
            )  # fmt: skip
            loss = y.square().mean()
            del y
        torch.rand(1)
        before = torch.get_rng_state()
        with Counting() as counting:
            loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        results += [loss.detach(), *(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)]
    return results, counting.calls.get(MM, 0)


@pytest.mark.parametrize("member", CheckpointPolicy)
def test_policies_of_each_kind(member):
    rig = Rig()
    ours, ran = selected(rig.context, selective(on([MM], member)))
    plain, least = selected(contextlib.nullcontext(), None)
    assert_equal(ours, plain)
    assert ran == least + (3 if "RECOMPUTE" in member.name else 0)
    assert rig.stats.parcels.count == 3 * (1 + 1 + ("OFFLOAD" in member.name) * 3)  # the input, tanh's, the products
    assert rig.stats.recomputed.count == 0
    rig.check_at_rest()


def test_policies_outside_of_entry_points_are_torchs():
    _, ran = selected(contextlib.nullcontext(), selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD)))
    _, least = selected(contextlib.nullcontext(), None)
    assert ran == least + 3


MIXTURES = {
    "products away, sigmoid kept": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_CPU_OFFLOAD if op is MM
        else CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.sigmoid.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "sigmoid away, products kept": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.PREFER_CPU_OFFLOAD if op is torch.ops.aten.sigmoid.default
        else CheckpointPolicy.PREFER_SAVE if op is MM
        else CheckpointPolicy.MUST_RECOMPUTE
    ),
    "everything away": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD,
    "booleans and members": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_CPU_OFFLOAD if op is MM else op is torch.ops.aten.sigmoid.default
    ),
}  # fmt: skip


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name, early_stop):
    rig = Rig()
    ours, ran = selected(rig.context, selective(MIXTURES[name]), early_stop=early_stop)
    plain, least = selected(contextlib.nullcontext(), None)
    assert_equal(ours, plain)
    assert ran == least
    rig.check_at_rest()


def by_number(members):
    """A policy for products by the number of the call, counted separately in forward and recomputation."""
    counts = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs):
        if op is not MM:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[ctx.is_recompute] += 1
        return members[(counts[ctx.is_recompute] - 1) % len(members)]

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("first", CheckpointPolicy)
@pytest.mark.parametrize("second", CheckpointPolicy)
def test_calls_of_one_operator_may_be_treated_differently(first, second):
    members = [first, second, CheckpointPolicy.MUST_CPU_OFFLOAD]
    rig = Rig()
    ours, ran = selected(rig.context, functools.partial(by_number, members))
    plain, least = selected(contextlib.nullcontext(), None)
    assert_equal(ours, plain)
    assert ran == least + sum("RECOMPUTE" in member.name for member in members)
    rig.check_at_rest()


def test_list_of_operators_and_booleans_stay_torchs():
    for contexts in (selective([MM]), selective(lambda ctx, op, *args, **kwargs: op is MM)):
        rig = Rig()
        ours, ran = selected(rig.context, contexts)
        plain, least = selected(contextlib.nullcontext(), None)
        assert_equal(ours, plain)
        assert ran == least
        assert rig.stats.parcels.count == 3 * 2


def test_policies_receive_the_calls_torch_shows():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append((op, type(ctx), ctx.is_recompute, getattr(ctx, "op_output", None) is None, len(args), set(kwargs)))
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op is MM else CheckpointPolicy.PREFER_RECOMPUTE

    selected(contextlib.nullcontext(), selective(policy), steps=1)
    torchs, seen = seen, []
    selected(Rig().context, selective(policy), steps=1)
    assert seen == torchs


def test_outputs_are_freed_in_forward():
    storages = []

    def region(x, *weights):
        for weight in weights:
            x = x @ weight
            if torch._C._current_graph_task_id() == -1:
                storages.append(weakref.ref(x.untyped_storage()))
            x = x.sigmoid()
        return x.tanh()

    with Rig().context:
        data = Data(CPU)
        weights = [data.leaf(8, 8) for _ in range(3)]
        contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
        y = ckpt(region, data.tensor(6, 8) * 1.0, *weights, context_fn=contexts)
        loss = y.exp().exp().sum()
        assert [ref() is None for ref in storages] == [True] * 3
    loss.backward()


@pytest.mark.parametrize("may_change", [False, True])
def test_outputs_changed_in_place_are_recomputed(may_change):
    """torch raises for saved outputs changed in place, or hands out the changed values."""

    def region(x, *weights):
        for weight in weights:
            x = (x @ weight).mul_(0.5).add_(0.1).sigmoid()
        return x.tanh()

    rig = Rig()
    contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD), allow_cache_entry_mutation=may_change)
    ours, ran = selected(rig.context, contexts, region)
    plain, least = selected(contextlib.nullcontext(), None, region)
    assert_equal(ours, plain)
    assert ran == least + 3
    assert rig.stats.dropped.count == 2 * 3  # learned in the first step


def test_outputs_changed_in_place_do_not_wait_for_backward():
    rig = Rig()
    x = torch.ones(8, 8, requires_grad=True)
    with rig.context:
        contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
        loss = ckpt(lambda x: (x @ x).add_(1.0).sin(), x, context_fn=contexts)
    rig.engine._drain_frees()
    assert rig.stats.parcels.count == 1
    assert rig.engine.store_stats().used_bytes == 0
    assert not rig.engine._by_storage
    del loss


def test_saved_outputs_changed_in_place_raise_as_in_torch():
    def region(x, *weights):
        return (x @ weights[0]).relu_().sigmoid()

    for entry in (Rig().context, contextlib.nullcontext()):
        with pytest.raises(RuntimeError, match="has been mutated"):
            selected(entry, selective(on([MM], CheckpointPolicy.MUST_SAVE)), region)


def noisy(x, *weights):
    x = nn.functional.dropout(x @ weights[0], 0.3)
    x = (x + torch.rand_like(x)) @ weights[1]
    x = nn.functional.dropout(x.sigmoid(), 0.3)
    return (torch.rand_like(x).sin() * x @ weights[2]).tanh()


DRAWN = [torch.ops.aten.rand_like.default, torch.ops.aten.native_dropout.default]


@pytest.mark.parametrize(
    "contexts",
    [
        selective(on(DRAWN, CheckpointPolicy.MUST_CPU_OFFLOAD)),
        selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD)),
        selective(on([*DRAWN, MM], CheckpointPolicy.MUST_CPU_OFFLOAD)),
        selective(MIXTURES["everything away"]),
    ],
)
def test_random_numbers(contexts):
    rig = Rig()
    ours, _ = selected(rig.context, contexts, noisy)
    plain, _ = selected(contextlib.nullcontext(), None, noisy)
    assert_equal(ours, plain)
    rig.check_at_rest()


def test_random_numbers_that_are_not_preserved_are_left_alone():
    """Random outputs come back, and backward advances no generator, as without an entry point."""

    def region(x, *weights):
        return ((x + torch.rand_like(x)) @ weights[0]).tanh()

    contexts = selective(on(DRAWN, CheckpointPolicy.MUST_CPU_OFFLOAD))
    ours, _ = selected(Rig().context, contexts, region, preserve_rng_state=False, steps=1)
    plain, _ = selected(contextlib.nullcontext(), None, region, steps=1)
    assert_equal(ours, plain)

    def with_more(x, *weights):
        return nn.functional.dropout(region(x, *weights), 0.5)

    x, w = Data(CPU).leaf(6, 8), Data(CPU, 1).leaf(8, 8)
    with Rig().context:
        loss = ckpt(with_more, x * 2.0, w, context_fn=contexts, preserve_rng_state=False).sum()
    before = torch.get_rng_state()
    loss.backward()
    assert not torch.equal(torch.get_rng_state(), before)


def test_retained_graph_with_outputs_away():
    """torch frees its saved outputs in the first backward, and raises; offloaded outputs come back once more."""
    data = Data(CPU)

    def run(entry, contexts):
        x, w, v = Data(CPU).leaf(6, 8), Data(CPU, 1).leaf(8, 8), Data(CPU, 2).leaf(8, 8)
        with entry:
            y = products(x * 2.0, w, v) if contexts is None else ckpt(products, x * 2.0, w, v, context_fn=contexts)
            loss = y.exp().sum()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        return [x.grad, w.grad, v.grad]

    del data
    rig = Rig()
    contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
    assert_equal(run(rig.context, contexts), run(contextlib.nullcontext(), None))
    rig.check_at_rest()
    with pytest.raises(RuntimeError, match="backward an extra time"):
        run(Rig().context, selective(MIXTURES["products away, sigmoid kept"]))


def test_two_backwards_through_one_region():
    def region(x, w):
        y = x @ w
        return y.sin(), (y @ w).cos()

    def run(entry, call):
        x, w = Data(CPU).leaf(6, 8), Data(CPU, 1).leaf(8, 8)
        with entry:
            y, z = call(region, x * 2.0, w)
            y, z = y.exp().sum(), z.exp().sum()
        (first,) = torch.autograd.grad(y, [x], retain_graph=True)
        z.backward()
        return [first, x.grad, w.grad]

    contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
    plain = run(contextlib.nullcontext(), lambda region, *args: region(*args))
    assert_equal(run(Rig().context, functools.partial(ckpt, context_fn=contexts)), plain)


def test_outputs_unused_in_recomputation_are_no_longer_sent():
    def region(x, *weights):
        return products(x, *weights) @ weights[0]

    rig = Rig()
    contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
    ours, ran = selected(rig.context, contexts, region)
    plain, least = selected(contextlib.nullcontext(), None, region)
    assert_equal(ours, plain)
    assert ran == least
    assert rig.stats.dropped.count == 2


def test_small_outputs_stay_on_the_device_and_are_served_all_the_same():
    rig = Rig(min_bytes=10_000)
    with pytest.warns(ebbtide.EbbtideWarning, match="smaller than min_bytes"):
        ours, ran = selected(rig.context, selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD)), steps=1)
    plain, least = selected(contextlib.nullcontext(), None, steps=1)
    assert_equal(ours, plain)
    assert ran == least
    assert rig.stats.kept[Reason.SMALL].count == 5
    assert rig.stats.parcels.count == 0


def test_contexts_of_the_users_own_are_entered_and_left():
    """Wraps the context of a selective mode, which is still found, or any context."""
    noted = []

    @contextlib.contextmanager
    def noting(name, inner):
        noted.append(f"{name} entered")
        with inner:
            yield
        noted.append(f"{name} left")

    def contexts():
        forward, second = create_selective_checkpoint_contexts(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
        return noting("forward", forward), noting("second", second)

    def bare():
        return noting("forward", contextlib.nullcontext()), noting("second", contextlib.nullcontext())

    plain, least = selected(contextlib.nullcontext(), None, steps=1)
    for pair, more in ((contexts, 0), (bare, 3)):
        noted.clear()
        ours, ran = selected(Rig().context, pair, steps=1, early_stop=False)
        assert_equal(ours, plain)
        assert ran == least + more
        assert noted == ["forward entered", "forward left", "second entered", "second left"]


@contextlib.contextmanager
def entering(context):
    """Hides a context's class."""
    with context:
        yield


def hidden(contexts):
    return lambda: tuple(map(entering, contexts()))


RESPECTS = [None, False, True] if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters else [None]
"""What a user may say of hooks: nothing before torch 2.14."""


def respecting(respects):
    return {} if respects is None else {"respect_saved_tensors_hooks": respects}


@pytest.mark.parametrize("respects", RESPECTS)
@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("member", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True])
def test_saved_outputs_travel_if_the_user_says_so(member, is_hidden, respects):
    """From torch 2.14 on, a user can choose. torch does not warn in either case."""
    rig = Rig()
    contexts = selective(on([MM], member, other=CheckpointPolicy.PREFER_RECOMPUTE))
    contexts = hidden(contexts) if is_hidden else contexts
    ours, ran = selected(rig.context, contexts, **respecting(respects))
    plain, least = selected(contextlib.nullcontext(), None)
    assert_equal(ours, plain)
    assert ran == least
    assert rig.stats.parcels.count == 3 * (2 + (3 if respects else 0))
    rig.check_at_rest()


@pytest.mark.parametrize("respects", RESPECTS)
def test_mixtures_with_saved_outputs(respects):
    for contexts in [*map(selective, MIXTURES.values()), selective(lambda ctx, op, *args, **kwargs: True)]:
        rig = Rig()
        ours, ran = selected(rig.context, contexts, **respecting(respects))
        plain, least = selected(contextlib.nullcontext(), None)
        assert_equal(ours, plain)
        assert ran == least
        rig.check_at_rest()


@pytest.mark.skipif(True not in RESPECTS, reason="torch hands no saved outputs to hooks")
def test_saved_outputs_that_travel_and_change_are_recomputed():
    """A copy may be in flight during the change."""

    def region(x, *weights):
        for weight in weights:
            x = (x @ weight).mul_(0.5).add_(0.1).sigmoid()
        return x.tanh()

    contexts = selective([MM])
    ours, ran = selected(Rig().context, contexts, region, respect_saved_tensors_hooks=True)
    plain, least = selected(contextlib.nullcontext(), None, region)
    assert_equal(ours, plain)
    assert ran == least + 3


@pytest.mark.parametrize("respects", RESPECTS)
def test_saved_random_numbers_that_are_not_preserved_are_torchs(respects):
    """Recomputed random outputs would differ, so a change in place raises in every case."""

    def region(x, *weights):
        return ((x + torch.rand_like(x)) @ weights[0]).tanh()

    def changed(x, *weights):
        return (torch.native_dropout(x, 0.3, True)[0].mul_(2.0) @ weights[0]).tanh()

    options = {"steps": 1, "preserve_rng_state": False, **respecting(respects)}
    ours, _ = selected(Rig().context, selective(DRAWN), region, **options)
    plain, _ = selected(contextlib.nullcontext(), None, region, steps=1)
    assert_equal(ours, plain)
    with pytest.raises(RuntimeError, match="has been mutated"):
        selected(Rig().context, selective(DRAWN), changed, **options)


@pytest.mark.parametrize("respects", RESPECTS)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_saved_outputs_in_nested_checkpoints_stay(is_hidden, respects):
    def run(entry, contexts):
        x, w = Data(CPU).leaf(6, 8), Data(CPU, 1).leaf(8, 8)

        def inner(x):
            return ckpt(products, x, w, w, context_fn=contexts, **respecting(respects))

        with entry:
            loss = ckpt(lambda *, h: inner(h.sin()).exp(), h=x * 2.0).sum()
            loss.backward()  # recomputation has hooks too
        return [loss.detach(), x.grad, w.grad]

    for member in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD):
        contexts = selective(on([MM], member))
        contexts = hidden(contexts) if is_hidden else contexts
        rig = Rig()
        ours = run(rig.context, contexts)
        assert_equal(ours, run(contextlib.nullcontext(), contexts))
        assert rig.stats.parcels.count == 1  # the input of the outer checkpoint
        rig.check_at_rest()


@pytest.mark.parametrize("respects", RESPECTS)
@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("recipe", ["keep", "offload", "recompute", "selective"])
def test_saved_outputs_in_regions_with_recipes(recipe, is_hidden, respects):
    contexts = selective([torch.ops.aten.addmm.default])
    contexts = hidden(contexts) if is_hidden else contexts

    class Checkpointed(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return ckpt(self.part, x, context_fn=contexts, **respecting(respects))

    class Tower(Transformer):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.mlp = Checkpointed(layer.mlp)

    model, twin = make(Tower, CPU), make(Tower, CPU)
    handle = offload(model, recipe=recipe)
    for step in range(3):
        model.zero_grad()
        twin.zero_grad()
        assert_equal(finish(model(tokens(CPU, step)), model), finish(twin(tokens(CPU, step)), twin))
    assert handle.stats().host_bytes == 0


def test_composable_checkpoint_with_saved_outputs():
    """The context does not tell torch about hooks."""
    from torch.distributed._composable import checkpoint as composable

    def run(entry):
        layers = make(lambda: nn.ModuleList(Layer() for _ in range(3)), CPU)
        for layer in layers:
            composable(layer, context_fn=selective([torch.ops.aten.addmm.default]))
        batch = Data(CPU).leaf(6, 8)
        torch.manual_seed(0)
        with entry:
            x = batch * 1.5
            for layer in layers:
                x = layer(x)
            loss = x.square().mean()
        return finish(loss, batch, layers)

    rig = Rig()
    assert_equal(run(rig.context), run(contextlib.nullcontext()))
    rig.check_at_rest()


@pytest.mark.skipif(not hasattr(torch_checkpoint, "_is_cacheable_effect"), reason="torch recomputes all effects")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_effects_are_not_had_twice(order):
    """torch saves outputs of operators with effects, even if a policy offloads them."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    had = []
    with torch.library._scoped_library("ebbtide_tests", "FRAGMENT") as library:
        library.define("noted(Tensor x) -> Tensor")
        library.impl("noted", lambda x: had.append(None) or x * 2.0, "CompositeExplicitAutograd")
        noted = torch.ops.ebbtide_tests.noted.default
        effect = _register_effectful_op(noted, _EffectType.ORDERED)
        members = [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.MUST_RECOMPUTE]
        members = [members[number] for number in order]

        def region(x, w):
            x = x + noted(x.detach() + 1.0).sin() * w
            return x.sin() * noted(x.detach()).cos()

        def run(entry, contexts):
            had.clear()
            x, w = Data(CPU).leaf(6, 8), Data(CPU, 1).leaf(6, 8)
            with entry:
                loss = ckpt(region, x * 2.0, w, context_fn=contexts).sum()
            loss.backward()
            return [loss.detach(), x.grad, w.grad], len(had)

        def contexts():
            left = list(members)

            def policy(ctx, op, *args, **kwargs):
                return left.pop(0) if op is noted else CheckpointPolicy.PREFER_RECOMPUTE

            return create_selective_checkpoint_contexts(policy)

        rig = Rig()
        ours, times = run(rig.context, contexts)
        plain, without = run(contextlib.nullcontext(), contexts)
        assert_equal(ours, plain)
        assert times == without == 3
        rig.check_at_rest()
        effect.destroy()


def test_calls_that_fail_are_counted():
    """The region of a recipe first tries its recipe without success."""

    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 64).view(8, 8))

        def forward(self, x):
            for _ in range(2):
                with contextlib.suppress(RuntimeError):
                    x = torch.ones(3, 3) @ x
                x = (x @ self.weight).sin()
            return x

    def run(entry):
        model = make(lambda: nn.Sequential(Trying(), Trying()), CPU)
        if entry:
            offload(model, recipe={"0": "selective", "1": "selective"})
        return finish(model(Data(CPU).tensor(6, 8)).square().mean(), model)

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("recipe", ["keep", "offload", "recompute", "selective"])
def test_in_regions_with_recipes(recipe):
    """A checkpoint inside a region, which may be recomputed too."""

    class Tower(Transformer):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.mlp = Checkpointed(layer.mlp)

    class Checkpointed(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            contexts = selective(on([torch.ops.aten.addmm.default], CheckpointPolicy.MUST_CPU_OFFLOAD))
            y = ckpt(lambda pair, *, z: self.part(pair[0]) * z, (x, None), z=x.cos(), context_fn=contexts)
            return y + ckpt(self.part, x)

    model, twin = make(Tower, CPU), make(Tower, CPU)
    handle = offload(model, recipe=recipe)
    for step in range(3):
        model.zero_grad()
        twin.zero_grad()
        assert_equal(finish(model(tokens(CPU, step)), model), finish(twin(tokens(CPU, step)), twin))
    assert handle.stats().host_bytes == 0


def test_sequences_and_collectives_are_saved(process_group):
    collectives = torch.ops._c10d_functional
    gather, topk = collectives.all_gather_into_tensor.default, torch.ops.aten.topk.default

    def region(x, w):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(x.detach() @ w, 1, "0"))
        top, indices = (x * gathered).topk(3, -1)
        return top.sin() * indices.to(x.dtype).cos()

    def run(entry, contexts):
        x, w = Data(CPU).leaf(6, 8), Data(CPU, 1).tensor(8, 8)
        with entry:
            loss = ckpt(region, x * 2.0, w, context_fn=contexts).sum()
        with Counting() as counting:
            loss.backward()
        return [loss.detach(), x.grad], counting.calls.get(gather, 0), counting.calls.get(topk, 0)

    contexts = selective(on([gather, topk], CheckpointPolicy.MUST_CPU_OFFLOAD))
    rig = Rig()
    ours, *ran = run(rig.context, contexts)
    plain, *without = run(contextlib.nullcontext(), contexts)
    assert_equal(ours, plain)
    assert ran == [0, 0]
    assert without == [1, 1]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_exceptions_in_forward_and_in_recomputation():
    explodes = {"in": 0}

    def region(*, hidden, weights):
        explodes["in"] -= 1
        y = hidden @ weights[0]
        if explodes["in"] == 0:
            raise Boom
        return products(y, *weights)

    def run(entry, when):
        explodes["in"] = when
        x, weights = Data(CPU).leaf(6, 8), [Data(CPU, n).leaf(8, 8) for n in range(2)]
        contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
        with entry:
            loss = ckpt(region, hidden=x * 2.0, weights=weights, context_fn=contexts).sum()
        loss.backward()
        return [x.grad, *(w.grad for w in weights)]

    rig = Rig()
    for when in (1, 2):
        with contextlib.suppress(Boom):
            run(rig.context, when)
        rig.check_at_rest()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert_equal(run(rig.context, 0), run(contextlib.nullcontext(), 0))


def test_dropped_graphs_free_everything():
    rig = Rig()
    data = Data(CPU)
    x, w = data.leaf(6, 8), data.leaf(8, 8)
    with rig.context:
        contexts = selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
        y = ckpt(lambda pair: products(*pair), (x * 2.0, w), context_fn=contexts).sum()
    del y
    rig.check_at_rest()


def test_debug_and_contexts_exclude_each_other_as_in_torch():
    with pytest.raises(ValueError, match="incompatible"), Rig().context:
        ckpt(products, torch.ones(2, 2), context_fn=selective([MM]), debug=True)


# -- scope -------------------------------------------------------------------------------------------------------------


def passed_on():
    """The keyword arguments of a checkpointed function, in forward and recomputation."""
    seen = []

    def region(x, *, parts):
        seen.append(parts)
        return (x * parts[0]).sin()

    x = torch.ones(64, requires_grad=True) * 2.0
    parts = [x * 3.0]
    ckpt(region, x, parts=parts).sum().backward()
    return [given is parts for given in seen]


def test_nothing_changes_outside_of_entry_points_and_in_threads():
    assert passed_on() == [True, True]
    found = []
    with Rig().context:
        assert passed_on() == [True, False]
        thread = threading.Thread(target=lambda: found.extend(passed_on()))
        thread.start()
        thread.join()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert passed_on() == [True, True]
    assert found == [True, True]
    assert passed_on() == [True, True]
    model = make(Transformer, CPU)
    offload(model)
    model(tokens(CPU))
    assert passed_on() == [True, True]


def test_undone_it_is_as_it_was():
    adapter.undo()
    original = getattr(torch_checkpoint, NAME)
    assert original.__module__ == "torch.utils.checkpoint"
    with Rig().context:
        assert getattr(torch_checkpoint, NAME) is not original
        x = torch.ones(64, requires_grad=True)
        loss = ckpt(lambda *, y: y.sin(), y=x * 2.0).sum()
        adapter.undo()
        assert getattr(torch_checkpoint, NAME) is original
        assert passed_on() == [True, True]
    loss.backward()
    assert x.grad is not None
    with Rig().context:
        assert passed_on() == [True, False]


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        (NAME, lambda fn, context_fn, *args, **kwargs: iter(())),
        (NAME, None),
        ("_CachingTorchDispatchMode", object),
        ("_StopRecomputationError", None),
    ],
)
def test_unknown_releases_of_torch_are_left_alone_with_a_warning(monkeypatch, name, replacement):
    adapter.undo()
    monkeypatch.setattr(torch_checkpoint, name, replacement)
    before = getattr(torch_checkpoint, NAME)
    with pytest.warns(ebbtide.EbbtideWarning, match=r"by keyword or in containers stay on the device") as warned:
        for _ in range(2):
            with Rig().context:
                something_moves()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert getattr(torch_checkpoint, NAME) is before
    adapter.undo()


def test_signature_is_torchs():
    adapter.undo()
    original = getattr(torch_checkpoint, NAME)
    with Rig().context:
        something_moves()
        theirs, ours = inspect.signature(original), inspect.signature(getattr(torch_checkpoint, NAME))
    if NAME is SPREAD:
        assert list(ours.parameters) == list(theirs.parameters)
    else:
        assert [*ours.parameters.values()].pop().kind is inspect.Parameter.VAR_KEYWORD  # options
    for name, parameter in ours.parameters.items():
        if name == "options":
            continue
        assert theirs.parameters[name].default == parameter.default, name
        assert theirs.parameters[name].kind is parameter.kind, name


@pytest.mark.parametrize("options", [{}, {"novelty": 3}, {"respect_saved_tensors_hooks": True, "early_stop": False}])
def test_options_of_later_releases_are_handed_on(monkeypatch, options):
    """All options of `checkpoint` reach a function of the bundled form; respect_saved_tensors_hooks is always False."""
    arrived = []

    def later(
        fn, args, kwargs, *, preserve_rng_state=True, context_fn=torch_checkpoint.noop_context_fn, early_stop=True,
        respect_saved_tensors_hooks=None, novelty=0,
    ):  # fmt: skip
        arrived.append((fn(*args, **kwargs), early_stop, respect_saved_tensors_hooks, novelty))
        yield

    adapter.undo()
    monkeypatch.setattr(torch_checkpoint, BUNDLED, later, raising=False)
    with Rig().context:
        something_moves()
        run = getattr(torch_checkpoint, BUNDLED)(lambda a, b: (a, b), (1,), {"b": [2]}, **options)
        assert list(run) == [None]
    assert run.__name__ == "later"
    assert arrived == [((1, [2]), options.get("early_stop", True), False, options.get("novelty", 0))]
    adapter.undo()
    assert getattr(torch_checkpoint, BUNDLED) is later


# -- under all orders of copies ----------------------------------------------------------------------------------------


def _program(entry, side, seed):
    data = Data(CPU, seed)
    layers = make(lambda: nn.ModuleList(Layer() for _ in range(3)), CPU, seed)
    batch, *weights = data.leaf(6, 8), data.leaf(8, 8), data.leaf(8, 8), data.leaf(8, 8)
    contexts = [selective(MIXTURES[name]) for name in MIXTURES] + [
        selective(on([MM], CheckpointPolicy.MUST_CPU_OFFLOAD))
    ]
    results = []
    torch.manual_seed(seed)
    for step in range(3):
        with entry:
            x = batch * 1.5
            for number, layer in enumerate(layers):
                x = ckpt(layer, hidden=x)
                pair = (x * 2.0, [weights[number]])
                x = ckpt(
                    lambda pair, *, x: products(pair[0], *pair[1]) + x, pair, x=x,
                    context_fn=contexts[(seed + number + step) % len(contexts)],
                )  # fmt: skip
                del pair
            loss = x.square().mean()
            del x
        with side() if (seed + step) % 3 == 0 else contextlib.nullcontext():
            results += [t.clone() for t in finish(loss, batch, *weights, layers)]
    return results


@pytest.mark.parametrize("mode", ["late", "early", "shuffled"])
@pytest.mark.parametrize("seed", range(20))
def test_on_the_simulator(seed, mode):
    device = SimDevice(seed, mode)
    window, prefetch = [1, 300, 10**6][seed % 3], [1, 500, 10**6][seed // 3 % 3]
    rig = Rig(device, lambda own: HostStore(own, 2**24, smallest_slab_bytes=2**14), window, prefetch)
    ours = _program(rig.context, SideStreams(device), seed)
    device.finish()
    assert device.faults == []
    assert_equal(ours, _program(contextlib.nullcontext(), OneStream(), seed))
    rig.check_at_rest()
