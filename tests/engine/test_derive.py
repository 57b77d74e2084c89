"""Derived tensors: dropped in forward, computed in backward, and bit for bit as without ebbtide."""

import contextlib
import copy
import gc
import random
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases import CASES, Data
from support import Boom, Explode, Rig, assert_equal, explore, explore_captured, same
from torch import nn
from torch.autograd import forward_ad as fwd
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import ConfigError, ModifiedError, Plan, Recipe, RegionPlan
from ebbtide._devices.sim import SimDevice
from ebbtide._engine import derive_rules
from ebbtide._engine import hooks as engine_hooks
from ebbtide._engine.context import HookContext
from ebbtide._engine.derive import Derivation, Expression
from ebbtide._engine.derive_parameters import RegionParameters
from ebbtide._types import Reason
from ebbtide._utils.torch_private import next_node

CPU = torch.device("cpu")
NOTHING = "ignore:offload.* moved nothing in its first forward"
DERIVED = {"keep": Recipe("keep", derive=True), "offload": Recipe("offload", derive=True)}
WIDTH = 8


@pytest.fixture(params=list(DERIVED))
def recipe(request):
    return DERIVED[request.param]


class Block(nn.Module):
    """Parts that rows of tables use. The row is a function of the block and its input."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, *args):
        return self.run(self, *args)


class Layers(nn.Module):
    def __init__(self, *runs):
        super().__init__()
        self.layers = nn.ModuleList(map(Block, runs))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(*runs):
    torch.manual_seed(0)
    return Layers(*runs)


def batches(*shape, steps=3):
    return [Data(CPU, seed).tensor(*shape) for seed in range(steps)]


BATCHES = batches(4, WIDTH)
DERIVING = len(BATCHES) - 1
"""Forwards that derive: in the first one a region learns whether its parameters stay as they are."""


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def forward(model, x=BATCHES[0]):
    return model(x.clone().requires_grad_() * 1.0).square().mean()


def step(model, x, loss_of=lambda y: y.square().mean()):
    """One training step: loss and gradients, of the input too. Parameters change a little."""
    x = x.clone().requires_grad_()
    loss = loss_of(model(x * 1.0))
    loss.backward()
    results = [loss.detach(), x.grad, *gradients(model)]
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
    model.zero_grad()
    return results


def train(model, inputs=BATCHES, **changes):
    torch.manual_seed(1)
    return [result for x in inputs for result in step(model, x, **changes)]


@contextlib.contextmanager
def offloaded(model, recipe=DERIVED["keep"], *, min_bytes=1, **changes):
    handle = ebbtide.offload(model, recipe=recipe, store="mock", min_bytes=min_bytes, **changes)
    try:
        yield handle
    finally:
        handle.remove()


def learn(model):
    """The first forward, which derives nothing, and its backward. Leaves parameters and random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        forward(model).backward()
    model.zero_grad()


def check_as_twin(model, recipe, inputs=BATCHES, train=train, has_derived=True, **changes):
    """Training of `model` equals that of a twin, bit for bit. Returns the accepted derivations' signatures, joined."""
    twin = copy.deepcopy(model)
    with offloaded(model, recipe, **changes) as handle:
        torch.manual_seed(1)
        ours = train(model, inputs)
        torch.manual_seed(1)
        assert_equal(ours, train(twin, inputs))
        assert (handle.stats().derived.count > 0) == has_derived
        return {rule for *_, signature in handle._attachment.context.derived for rule in signature}


# -- rules -------------------------------------------------------------------------------------------------------------


def heads(x):
    return x.unflatten(-1, (2, -1))


def image(x):
    """Four channels of two by two."""
    return x.reshape(-1, 2, 2, 2)


def flat(x):
    return x.reshape(-1, WIDTH)


def grouped(block, x):
    rows, ends = x.sin().bfloat16(), torch.tensor([1, 4], dtype=torch.int32)
    weights = torch.stack([block.weight, block.weight.t()]).bfloat16()
    return torch._grouped_mm(rows, weights, offs=ends).float().square()


ROWS = {
    "AbsBackward0": lambda block, x: x.sin().abs().square(),
    "AddBackward0": lambda block, x: (x.sin() + x.cos()).square() + x.square(),
    "AddmmBackward0": lambda block, x: functional.silu(block.linear(x)).square(),
    "BmmBackward0": lambda block, x: torch.cat(
        [torch.bmm(heads(x).sin(), heads(x).transpose(1, 2)).square().flatten(1)] * 2, -1
    ),
    "CatBackward0": lambda block, x: torch.cat([x.sin().square(), x.cos().square()], -1).square().chunk(2, -1)[0],
    "ClampBackward1": lambda block, x: x.sin().clamp(-0.5, 0.75).square(),
    "CloneBackward0": lambda block, x: heads(x.sin()).transpose(0, 1).contiguous().square().transpose(0, 1).flatten(1),
    "ConvolutionBackward0": lambda block, x: functional.silu(block.conv(x[..., None].sin())).square()[..., 0],
    "CosBackward0": lambda block, x: x.cos().square(),
    "DivBackward0": lambda block, x: (x.sin() / (2.0 + x.square())).square(),
    "EluBackward0": lambda block, x: functional.elu(x, 0.7).square(),
    "ExpandBackward0": lambda block, x: x * block.scale.sigmoid().expand(4, WIDTH).neg().square(),
    "GeluBackward0": lambda block, x: functional.gelu(x, approximate="tanh").square(),
    "GluBackward0": lambda block, x: torch.cat([functional.glu(x.sin(), -1).square()] * 2, -1),
    "GroupedMmBackward0": grouped,
    "HardswishBackward0": lambda block, x: functional.hardswish(x).square(),
    "LeakyReluBackward0": lambda block, x: functional.leaky_relu(x, 0.2).square(),
    "MishBackward0": lambda block, x: functional.mish(x).square(),
    "MmBackward0": lambda block, x: (x.sin() @ block.weight).square(),
    "MulBackward0": lambda block, x: (x.sin() * block.scale).square(),
    "NativeGroupNormBackward0": lambda block, x: block.groups(x[..., None]).square()[..., 0],
    "NativeLayerNormBackward0": lambda block, x: block.out(block.norm(x)),
    "NegBackward0": lambda block, x: (-x.square().square()).square(),
    "PermuteBackward0": lambda block, x: heads(x.square()).permute(-1, 0, 1).neg().square().permute(1, 2, 0).flatten(1),
    "PowBackward0": lambda block, x: x.square().square(),
    "ReshapeAliasBackward0": lambda block, x: torch.ops.aten._reshape_alias(x.square(), [32], [1]).neg().square(),
    "SelectBackward0": lambda block, x: torch.stack([x.square().select(-1, -2).neg().square()] * WIDTH, -1),
    "SiluBackward0": lambda block, x: functional.silu(x).square(),
    "SinBackward0": lambda block, x: x.sin().square(),
    "SliceBackward0": lambda block, x: torch.cat([x.square()[:, 1:5].neg().square()] * 2, -1),
    "SoftplusBackward0": lambda block, x: functional.softplus(x, 2.0, 10.0).square(),
    "SplitBackward0": lambda block, x: torch.cat([part.neg().square() for part in x.square().split(3, -1)], -1),
    "SplitWithSizesBackward0": lambda block, x: torch.cat(
        [part.neg().square() for part in x.square().split([1, 7], -1)], -1
    ),
    "SqueezeBackward1": lambda block, x: x.square().unsqueeze(1).neg().squeeze(1).neg().square(),
    "SubBackward0": lambda block, x: torch.sub(x.sin().square(), x.cos().square(), alpha=3).square(),
    "TBackward0": lambda block, x: (x.square().square().t().neg().square()).t(),
    "ToCopyBackward0": lambda block, x: x.sin().square().double().square().float(),
    "TransposeBackward0": lambda block, x: x.square().transpose(-1, -2).neg().square().transpose(0, 1),
    "UnbindBackward0": lambda block, x: torch.stack([part.neg().square() for part in x.square().unbind(-1)], -1),
    "UnsafeViewBackward0": lambda block, x: functional.silu(heads(x.square()) @ block.weight[:4, :4]).flatten(1),
    "UnsqueezeBackward0": lambda block, x: x.square().unsqueeze(1).neg().square().squeeze(1),
    "UpsampleNearest2DBackward0": lambda block, x: flat(
        functional.interpolate(image(x).square().square(), scale_factor=2.0).square()[..., :2, :2]
    ),
    "ViewBackward0": lambda block, x: x.square().view(2, -1).neg().square().view(-1, WIDTH),
}  # fmt: skip
ON_ACCELERATORS = {}
"""Rules that no operator of a CPU reaches, with the reason."""


def test_the_table_covers_every_rule():
    assert ROWS.keys() | ON_ACCELERATORS.keys() == derive_rules._RULES.keys()
    assert not ROWS.keys() & ON_ACCELERATORS.keys()


@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("rule", ROWS)
def test_what_a_rule_derives_is_bit_for_bit_the_tensor(rule, action):
    signatures = check_as_twin(model_of(ROWS[rule], ROWS[rule]), DERIVED[action])
    assert derive_rules._RULES[rule] in signatures


NEGATIVE = {
    "the last of a row": lambda block, x: torch.cat([x.square()[..., -3:].neg().square(), x[..., :5]], -1),
    "all but the last of a row": lambda block, x: torch.cat([x.square()[..., :-3].neg().square(), x[..., :3]], -1),
    "one by a number from the end": lambda block, x: x * x.square().select(-2, -1).neg().square(),
    "permuted from the end": lambda block, x: heads(x.square()).permute(-2, -3, -1).neg().square().flatten(1),
    "split from the end": lambda block, x: torch.cat([p.neg().square() for p in x.square().split(4, -2)], -2),
    "joined from the end": lambda block, x: torch.cat([x.square(), x.sin()], -2).square()[:4],
}


@pytest.mark.parametrize("row", NEGATIVE)
def test_numbers_below_zero_are_read_from_nodes_as_given(row):
    check_as_twin(model_of(NEGATIVE[row], NEGATIVE[row]), DERIVED["keep"])


def as_complex(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


WITHOUT_RULES = {
    "padding": lambda block, x: functional.pad(x.square(), (1, 2), value=3.0).square()[..., :WIDTH],
    "padded by less than nothing": lambda block, x: functional.pad(x.square(), (-1, 1)).square(),
    "padded by less than nothing in front": lambda block, x: functional.pad(x.square(), (2, -2, -1, 1)).square(),
    "dropout": lambda block, x: torch.native_dropout(x.square(), 0.3, True)[0].square(),
    "dropout that is not in training": lambda block, x: torch.native_dropout(x.square(), 0.3, False)[0].square(),
    "indexing": lambda block, x: x.square()[torch.tensor([2, 0, 1, 3])].square(),
    "numbers of a complex product": lambda block, x: torch.view_as_real(as_complex(x) * as_complex(x * 2.0)).square(),
    "complex view of a product": lambda block, x: torch.view_as_real(as_complex(x * 2.0).square()),
    "real part": lambda block, x: (as_complex(x * 2.0) * as_complex(x)).real.square().repeat(1, 2),
    "imaginary part": lambda block, x: (as_complex(x * 2.0) * as_complex(x)).imag.square().repeat(1, 2),
    "conjugate": lambda block, x: torch.view_as_real((as_complex(x) * as_complex(x * 2.0)).conj() * as_complex(x)),
}
"""Nodes that do not tell all arguments, and views of another type than their memory."""


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("row", WITHOUT_RULES)
def test_what_no_rule_makes_is_kept(row, action):
    def run(block, x):
        return WITHOUT_RULES[row](block, x).reshape(4, WIDTH)

    check_as_twin(model_of(run, run), DERIVED[action], has_derived=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_other_types(dtype):
    def run(block, x):
        return x.to(dtype).sin().square().square().float()

    check_as_twin(model_of(run, run), DERIVED["keep"])


# -- comparisons -------------------------------------------------------------------------------------------------------


OF_OTHERS = {
    "another operator": derive_rules._of_saved(torch.ops.aten.sigmoid.default),
    "another type": derive_rules._of_saved(torch.Tensor.double),
    "as many numbers": derive_rules._of_saved(torch.zeros_like),
}


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("rule", OF_OTHERS)
def test_a_tensor_that_would_differ_is_kept(rule, recipe, monkeypatch):
    monkeypatch.setattr(derive_rules, "_RULES", {"SiluBackward0": OF_OTHERS[rule]})
    check_as_twin(model_of(*[ROWS["SiluBackward0"]] * 2), recipe, has_derived=False)


@pytest.mark.filterwarnings(NOTHING)
def test_a_tensor_that_would_differ_is_compared_once(monkeypatch):
    rules = {"SiluBackward0": derive_rules._of_saved(torch.ops.aten.sigmoid.default)}
    monkeypatch.setattr(derive_rules, "_RULES", rules)
    compared = []
    monkeypatch.setattr(Derivation, "equals", lambda self, owner: compared.append(owner.shape) or False)
    model = model_of(ROWS["SiluBackward0"])
    with offloaded(model) as handle:
        train(model)
        assert handle.stats().derived.count == 0
    assert len(compared) == 1


def with_epsilons(*epsilons):
    model = model_of(*[ROWS["NativeLayerNormBackward0"]] * len(epsilons))
    for layer, epsilon in zip(model.layers, epsilons, strict=True):
        layer.norm.eps = epsilon
    return model


@pytest.mark.parametrize("epsilons", [(1e-5, 1e-5), (0.0123, 0.0123), (1e-5, 1e-2), (0.3, 1e-12, 0.7)], ids=str)
def test_epsilons_of_norms_are_found(epsilons, recipe):
    model = with_epsilons(*epsilons)
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        assert_equal(train(model), train(twin))
        assert handle.stats().derived.count == len(epsilons) * DERIVING


@pytest.mark.filterwarnings(NOTHING)
def test_a_norm_with_an_epsilon_of_its_caller_is_kept():
    def run(block, x):
        return block.out(functional.layer_norm(x, (WIDTH,), block.scale, block.scale, 0.0123))

    check_as_twin(model_of(run, run), DERIVED["keep"], has_derived=False)


def with_bare_norms(*runs):
    """Each block has two norms without a weight, too."""
    model = model_of(*runs)
    for layer in model.layers:
        layer.bare, layer.other = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
    return model


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_norm_with_another_epsilon_than_its_module_is_kept(has_weight):
    def run(block, x):
        weights = (block.norm.weight, block.norm.bias) if has_weight else (None, None)
        return block.out(functional.layer_norm(x, (WIDTH,), *weights, 0.0123))

    check_as_twin(with_bare_norms(run, run), DERIVED["keep"], has_derived=False)


@pytest.mark.parametrize("epsilons", [(1e-5, 0.3), (0.3, 1e-5)], ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_the_epsilon_of_a_functional_norm_may_differ_between_regions(has_weight, epsilons):
    """One region's epsilon is that of its module."""

    def run(block, x):
        weights = (block.norm.weight, block.norm.bias) if has_weight else (None, None)
        return block.out(functional.layer_norm(x, (WIDTH,), *weights, block.epsilon))

    model = with_bare_norms(run, run)
    twin = copy.deepcopy(model)
    for layer, other, epsilon in zip(model.layers, twin.layers, epsilons, strict=True):
        layer.epsilon = other.epsilon = epsilon
    with offloaded(model) as handle:
        assert_equal(train(model), train(twin))
        assert {region for region, *_ in handle._attachment.context.derived} == {f"layers.{epsilons.index(1e-5)}"}
        assert handle.stats().derived.count == DERIVING


@pytest.mark.parametrize("attribute", ["norm", "bare"])
def test_an_epsilon_may_change_from_step_to_step(attribute, recipe):
    def run(block, x):
        return block.out(getattr(block, attribute)(x))

    def changing(model, inputs):
        results = []
        for epsilon, x in zip((1e-5, 1e-5, 0.3, 1e-5), inputs, strict=True):
            for layer in model.layers:
                getattr(layer, attribute).eps = epsilon
                layer.other.eps = epsilon
            results += step(model, x)
        return results

    model = with_bare_norms(run, run)
    twin = copy.deepcopy(model)
    inputs = batches(4, WIDTH, steps=4)
    with offloaded(model, recipe) as handle:
        assert_equal(changing(model, inputs), changing(twin, inputs))
        assert handle.stats().derived.count == len(model.layers) * (len(inputs) - 1)


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize(("epsilon", "has_derived"), [(1e-5, True), (0.3, False)])
def test_norms_without_a_weight_are_derived_if_their_epsilons_are_equal(epsilon, has_derived, recipe):
    def run(block, x):
        return block.out(block.bare(x))

    model = with_bare_norms(run, run)
    for layer in model.layers:
        layer.other.eps = epsilon
    check_as_twin(model, recipe, has_derived=has_derived)


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("change", ["an int", "one weight"])
def test_norms_whose_epsilon_is_not_known_are_kept(change, recipe):
    def run(block, x):
        return block.out(block.norm(x))

    model = with_bare_norms(run, run)
    for layer in model.layers:
        if change == "an int":
            layer.norm.eps = 1
        else:
            layer.other.weight, layer.other.eps = layer.norm.weight, 0.3
    check_as_twin(model, recipe, has_derived=False)


def padded(block, x):
    return functional.pad(x.square(), (1, 0), value=block.value)[..., :WIDTH] * block.scale


def convolved(block, x):
    return functional.silu(functional.conv1d(x[..., None].sin(), block.conv.weight, block.bias, padding=1))[..., 0]


def grouped_norm(block, x):
    return block.out(functional.group_norm(x, 2, block.scale, block.bias))


def bare_grouped_norm(block, x):
    return block.out(functional.group_norm(x, 2, None, block.bias))


def normed(block, x):
    return block.out(functional.layer_norm(x, (WIDTH,), block.scale, None, block.value))


UNSAVED = {
    "value of a padding": (padded, "value", (0.0, 2.0), False),
    "frozen bias of a convolution": (convolved, "bias", (torch.zeros(WIDTH), torch.ones(WIDTH)), True),
    "a convolution's bias": (convolved, "bias", (None, torch.ones(WIDTH)), True),
    "frozen bias of a group norm": (grouped_norm, "bias", (torch.zeros(WIDTH), torch.ones(WIDTH)), False),
    "a group norm's bias": (grouped_norm, "bias", (None, torch.ones(WIDTH)), False),
    "bias of a group norm without a weight": (bare_grouped_norm, "bias", (None, torch.ones(WIDTH)), False),
    "epsilon of a layer norm": (normed, "value", (1e-5, 1e-2), False),
}
"""What an operator reads and its node does not hold: the attribute of the block, a value that derivations could guess,
another, and whether other tensors are derived."""


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("row", UNSAVED)
def test_what_no_node_holds_may_differ_between_regions(row):
    run, attribute, values, has_derived = UNSAVED[row]
    model = model_of(run, run)
    for layer, value in zip(model.layers, values, strict=True):
        setattr(layer, attribute, value)
    check_as_twin(model, DERIVED["keep"], has_derived=has_derived)


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("row", UNSAVED)
def test_what_no_node_holds_may_change_from_step_to_step(row):
    run, attribute, values, has_derived = UNSAVED[row]

    def changing(model, inputs):
        results = []
        for value, x in zip((values[0], values[0], *values), inputs, strict=True):
            for layer in model.layers:
                setattr(layer, attribute, value)
            results += step(model, x)
        return results

    check_as_twin(model_of(run, run), DERIVED["keep"], batches(4, WIDTH, steps=4), changing, has_derived=has_derived)


def test_comparisons_do_not_grow_with_shapes_that_change(recipe):
    model = model_of(mlp, mlp, mlp)
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        derived = handle._attachment.context.derived
        assert_equal(train(model), train(twin))
        known = set(derived)
        inputs = [Data(CPU, rows).tensor(rows, WIDTH) for rows in (3, 9, 2, 5, 1, 4, 40)]
        assert_equal(train(model, inputs), train(twin, inputs))
        assert derived == known
        assert len(known) > 0


@pytest.mark.parametrize(("row", "count"), [("SiluBackward0", 1), ("NativeLayerNormBackward0", 5)])
def test_equal_regions_share_a_comparison_without_a_norm(row, count, monkeypatch):
    """Each region calls its norm with an epsilon of its own."""
    compared = []
    equals = Derivation.equals
    monkeypatch.setattr(Derivation, "equals", lambda self, owner: compared.append(owner.shape) or equals(self, owner))
    with offloaded(model := model_of(*[ROWS[row]] * 5)) as handle:
        train(model)
        assert handle.stats().derived.count == 5 * DERIVING
    assert len(compared) == count


# -- lifetimes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def values(monkeypatch):
    """Weak references to the memory of each value computed."""
    found = []
    compute = Derivation._compute

    def noted(self, results):
        value = compute(self, results)
        found.append(weakref.ref(value.untyped_storage()))
        return value

    monkeypatch.setattr(Derivation, "_compute", noted)
    return found


def alive(references):
    return sum(reference() is not None for reference in references)


def storage(t):
    return weakref.ref(t.untyped_storage())


def read_twice(block, x):
    """A derived tensor with two readers. `kept` and `dropped` tell which memory lives."""
    own = x.sin()
    shared = functional.silu(own)
    block.kept, block.dropped = storage(own), storage(shared)
    return block.linear(shared) + block.out(shared)


@pytest.fixture
def model():
    """Two blocks that have compared: no forward computes any more."""
    model = model_of(read_twice, read_twice)
    with offloaded(model):
        train(model)
        yield model


def kept(model):
    return [layer.kept for layer in model.layers]


def dropped(model):
    return [layer.dropped for layer in model.layers]


def test_dropped_memory_is_free_in_forward(model, values, no_collector):
    loss = forward(model)
    assert alive(dropped(model)) == 0
    assert alive(kept(model)) == 0  # sines are derived too, of the input of the block
    assert values == []
    loss.backward()


def test_a_tensor_with_several_readers_is_computed_once_and_freed_after_the_last(model, values, no_collector):
    left = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, x: x[0].register_hook(lambda _: left.append(alive(values))) and None)
    forward(model).backward()
    assert left == [0, 0]  # when a block's gradient is ready
    assert len(values) == 2 * 2  # sine and silu


def test_nothing_derived_outlives_backward(model, values, no_collector):
    loss = forward(model)
    loss.backward()
    assert len(values) > 0
    assert alive(values) == 0


def test_a_dropped_graph_frees_what_it_kept(model, values, no_collector):
    x = BATCHES[0].clone().requires_grad_() * 1.0
    own = storage(x)
    loss = model(x).sum()
    del x
    assert alive([own]) == 1  # the operand of a sine
    del loss
    assert alive([own]) == 0
    assert values == []


def test_values_of_a_retained_graph_are_computed_again(values, no_collector):
    model, twin = model_of(read_twice, read_twice), model_of(read_twice, read_twice)

    def twice(model):
        loss = forward(model)
        loss.backward(retain_graph=True)
        between, count = gradients(model), len(values)
        assert alive(values) == 0
        loss.backward()
        return [loss.detach(), *between, *gradients(model)], count

    with offloaded(model):
        train(model)
        train(twin)
        values.clear()
        ours, count = twice(model)
    assert_equal(ours, twice(twin)[0])
    assert 0 < count < len(values)
    assert alive(values) == 0


@pytest.mark.parametrize("names", [["layers.1.out.weight"], ["layers.0.linear.weight", "layers.1.out.bias"]], ids=str)
def test_gradients_of_some_inputs(names, values, no_collector):
    model, twin = model_of(read_twice, read_twice), model_of(read_twice, read_twice)

    def some(model):
        loss = forward(model)
        return torch.autograd.grad(loss, [model.get_parameter(name) for name in names])

    with offloaded(model) as handle:
        for _ in range(3):
            assert_equal(some(model), some(twin))
        assert handle.stats().derived.count > 0
    assert alive(values) == 0


def exploding(block, x):
    x = read_twice(block, x)
    return Explode.apply(x) if block.explodes else x


def test_an_error_in_backward_leaves_nothing(values):
    model, twin = model_of(exploding, exploding), model_of(exploding, exploding)
    for layer in (*model.layers, *twin.layers):
        layer.explodes = False
    with offloaded(model):
        assert_equal(train(model), train(twin))
        model.layers[0].explodes = True
        loss = forward(model)
        with pytest.raises(Boom):
            loss.backward()
        del loss
        gc.collect()  # the traceback has held frames
        assert alive(values) == 0
        model.layers[0].explodes = False
        model.zero_grad()
        assert_equal(train(model), train(twin))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_several_forwards_before_a_backward(order, recipe, values):
    model, twin = model_of(read_twice, read_twice), model_of(read_twice, read_twice)

    def together(model):
        losses = [forward(model, x) for x in BATCHES]
        results = [loss.detach() for loss in losses]
        for k in order:
            losses[k].backward()
            losses[k] = None
            results += gradients(model)
        model.zero_grad()
        return results

    with offloaded(model, recipe) as handle:
        for _ in range(3):
            assert_equal(together(model), together(twin))
        assert handle.stats().derived.count > 0
    assert alive(values) == 0


def test_memory_that_is_alive_is_used_as_it_is(model, values):
    seen = []
    twin = copy.deepcopy(model)
    for layer in model.layers:
        layer.register_forward_hook(lambda _, x, y: seen.append((x[0].detach(), y.detach())))
    layer = model.layers[0]
    layer.run = lambda block, x: seen.append(made := functional.silu(x.sin())) or block.linear(made)
    twin.layers[0].run = lambda block, x: block.linear(functional.silu(x.sin()))
    assert_equal(train(model), train(twin))
    values.clear()
    seen.clear()
    loss = forward(model)
    known = {t.untyped_storage()._cdata for t in seen if isinstance(t, torch.Tensor)}
    loss.backward()
    assert len(known) == 1
    assert len(values) == 2 + 1  # of the second block, and the sine of the first


# -- changed in place --------------------------------------------------------------------------------------------------


def changed_result(block, x):
    y = functional.silu(x)
    z = y.square()
    y.add_(1.0)
    return z


def changed_view(block, x):
    y = functional.silu(x)
    z = y[1:].square()
    y[:1].zero_()
    return functional.pad(z, (0, 0, 0, 1))


def changed_operand(block, x):
    own = x * 2.0
    z = functional.silu(own).square()
    own.add_(1.0)
    return z


def changed_far_operand(block, x):
    own = x * 2.0
    z = functional.silu(own.sin()).square()
    own.add_(1.0)
    return z


@pytest.mark.parametrize("run", [changed_result, changed_view, changed_operand, changed_far_operand])
def test_a_change_after_the_save_raises_as_it_does_without_us(run, recipe):
    model = model_of(run)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(copy.deepcopy(model))
    with offloaded(model, recipe) as handle:
        for x in BATCHES:
            with pytest.raises(ModifiedError, match="modified by an inplace operation"):
                step(model, x)
        assert handle.stats().derived.count > 0


def changed_before(block, x):
    y = x.sin()
    y.mul_(2.0)
    return y.square() * functional.silu(x)


def changed_between(block, x):
    y = x.sin()
    z = block.scale.sigmoid() * y.neg()
    y.mul_(2.0)
    return z + y.square() * functional.silu(x)


def relus(block, x):
    y = functional.silu(x).square()
    return torch.relu_(block.linear(torch.relu_(block.out(y)))) * functional.silu(x)


def activated_in_place(block, x):
    for change in (torch.sigmoid_, functional.elu_, functional.leaky_relu_, torch.exp_, torch.neg_):
        x = block.linear(change(block.out(x) * 1.0)) * functional.silu(x)
    return x


def parts_changed(block, x):
    y = functional.silu(x) * 1.5
    y[:2] *= 2.0
    return y.square() * functional.silu(x)


def changed_residual(block, x):
    y = block.linear(x)
    y += x
    return functional.silu(y).square()


@pytest.mark.parametrize(
    "run", [changed_before, changed_between, relus, activated_in_place, parts_changed, changed_residual]
)
def test_a_change_before_the_save_is_no_change(run, recipe):
    check_as_twin(model_of(run, run), recipe)


def changed_known_operand(block, x):
    """`own` is saved by a node that takes no part in backward."""
    own = x * 2.0
    block.side = own.square()
    y = own + x
    own.add_(1.0)
    return functional.silu(y).square()


def test_an_operand_changed_before_the_save_is_no_operand(recipe):
    check_as_twin(model_of(changed_known_operand, changed_known_operand), recipe)


def test_an_operand_changed_after_forward_raises_though_plain_backward_would_not_read_it():
    def run(block, x):
        block.own = block.linear(x)
        return functional.silu(block.own) * block.scale

    def of_scales(model, change):
        y = model(BATCHES[0].clone().requires_grad_() * 1.0)
        change(model.layers[-1].own)
        results = torch.autograd.grad(y.square().sum(), [model.layers[-1].scale])
        return [y.detach(), *results]

    model, twin = model_of(run), model_of(run)
    assert len(of_scales(copy.deepcopy(twin), through_step)) == 2
    with offloaded(model) as handle:
        learn(model)
        for _ in range(2):
            with pytest.raises(ModifiedError, match="modified by an inplace operation"):
                of_scales(model, through_step)
        assert_equal(of_scales(model, torch.clone), of_scales(twin, torch.clone))
        assert handle.stats().derived.count > 0


def only_biases(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


def through_step(t):
    with torch.no_grad():
        t.add_(1.0)


def test_a_bias_changed_between_forward_and_backward_raises():
    def run(block, x):
        return x.sin() + block.out(functional.silu(block.linear(x)))

    def late(model):
        loss = forward(model)
        for layer in model.layers:
            through_step(layer.linear.bias)
        loss.backward()

    model, twin = only_biases(model_of(run, run)), only_biases(model_of(run, run))
    late(copy.deepcopy(twin))
    with offloaded(model) as handle:
        learn(model)
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            late(model)
        assert handle.stats().derived.count > 0
        model.zero_grad()
        for layer in twin.layers:
            through_step(layer.linear.bias)
        assert_equal(train(model), train(twin))


OPERATORS = {
    "numbers of Python": lambda block, x: (x.sin() * 0.1).square() + (0.3 * x.cos() / 3.0).square(),
    "numbers of Python, half": lambda block, x: ((x.bfloat16().sin() * 0.1).square() / 3.0).square().float(),
    "tensor without dimensions": lambda block, x: (x.sin() * block.scale.sum()).square(),
    "nothing": lambda block, x: torch.cat([x[:0].sin().square(), x.sin().square()]),
    "constants in between": lambda block, x: torch.cat([x.sin()[:, :4], torch.zeros(4, 4)], -1).square(),
    "one bound": lambda block, x: x.sin().clamp(min=0.1).square() + x.clamp(max=0.2).square(),
    "powers": lambda block, x: x.pow(3).square() + (x.abs() + 0.1).pow(-1.5).square(),
    "strides by hand": lambda block, x: x.sin().as_strided((4, WIDTH), (1, 4)).square(),
    "overlapping views": lambda block, x: x.sin().unfold(-1, 2, 1).square().sum(-1).repeat(1, 2)[:, :WIDTH],
    "transposed in between": lambda block, x: x.sin().t().square().t().contiguous().square(),
    "two casts": lambda block, x: (x.double().sin().float() * x.half().float().cos()).square(),
    "rotation": lambda block, x: functional.silu(
        heads(block.linear(x)) * block.scale[:4] + torch.cat([-heads(x.sin())[..., 2:], heads(x.cos())[..., :2]], -1)
    ).flatten(1),
    "vmap": lambda block, x: torch.vmap(lambda row: functional.silu(block.linear(row)).square())(x) * x.sin(),
    "a look at the graph": lambda block, x: (y := functional.silu(x).square()) + y.grad_fn._saved_self + x.sin(),
    "einsum": lambda block, x: torch.einsum("bi,ij->bj", x.sin(), block.weight).square(),
    "values of a sparse tensor": lambda block, x: x + x.sin().to_sparse().coalesce().values().square().sum(),
    "values of a nested tensor": lambda block, x: (
        x + torch.nested.as_nested_tensor([x.sin()[:2], x.sin()[2:]]).sin().values().square().sum()
    ),
}


@pytest.mark.filterwarnings(NOTHING, "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("row", OPERATORS)
def test_unusual_operands(row, action):
    model = model_of(OPERATORS[row], OPERATORS[row])
    twin = copy.deepcopy(model)
    with offloaded(model, DERIVED[action]):
        assert_equal(train(model), train(twin))


def with_zeros_without_memory(block, x):
    """Forward-mode AD makes tangents of zeros that have sizes and no memory."""
    with fwd.dual_level():
        y = torch.addcdiv(fwd.make_dual(x.sin(), torch.ones_like(x)), x.sin(), x.cos() + 2.0, value=3)
        value, tangent = fwd.unpack_dual(y)
        return value + tangent * x.sin()


def with_casts_of_weights(block, x):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.gelu(functional.gelu(x @ block.weight) @ block.weight).float()


REFUSED = {
    "zeros without memory": (with_zeros_without_memory, 1),
    "casts of weights": (with_casts_of_weights, 1),
    "small": (lambda block, x: functional.silu(x.sin() * x.cos()), "1MiB"),
    "empty": (lambda block, x: x + x.sin()[:0].clone().square().sum(), 1),
}


@pytest.mark.filterwarnings(NOTHING, "ignore:.torch.jit.script. is deprecated")  # forward-mode AD calls it
@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("row", REFUSED)
def test_what_may_not_travel_is_not_derived_by_its_number_either(row, action):
    """A plan names sites by the tensors of measured steps. Later steps may save others there."""
    run, min_bytes = REFUSED[row]
    twin = model_of(run, run)
    counts = []
    for derive in (None, tuple(range(40))):
        model = copy.deepcopy(twin)
        with offloaded(model, replace(DERIVED[action], derive=derive), min_bytes=min_bytes) as handle:
            assert_equal(train(model), train(copy.deepcopy(twin)))
            counts.append((handle.stats().derived, handle.stats().kept.get(Reason.AUTOCAST_WEIGHT)))
    assert counts[0] == counts[1]


# -- parameters --------------------------------------------------------------------------------------------------------


def halved_in_place(p):
    with torch.no_grad():
        p.mul_(0.5)


def with_new_memory(p):
    p.data = p.data * 0.5


CHANGES = [halved_in_place, with_new_memory]


def changed_last(block, x):
    """The parameter changes in forward, after its last use and the save."""
    y = functional.silu(x.sin() + block.scale).square()
    block.change(block.scale)
    return y


def changed_before_the_save(block, x):
    y = x.sin() + block.scale
    block.change(block.scale)
    return functional.silu(y).square()


def changed_first(block, x):
    block.change(block.scale)
    return functional.silu(x.sin() + block.scale).square()


def changing(change, steps):
    """Training in which `change` is called in the forward of each of `steps`."""

    def run(model, inputs):
        results = []
        for k, x in enumerate(inputs):
            for layer in model.layers:
                layer.change = change if k in steps else id
            results += step(model, x)
        return results

    return run


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [(0, 1, 2), (0,)], ids=str)
@pytest.mark.parametrize("run", [changed_last, changed_before_the_save, changed_first])
def test_a_region_whose_first_forward_changes_a_parameter_derives_nothing(run, steps, change, recipe):
    check_as_twin(model_of(run, run), recipe, train=changing(change, steps), has_derived=False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("run", [changed_before_the_save, changed_first])
def test_a_parameter_changed_before_the_save_in_a_later_forward_is_no_operand(run, change, recipe):
    check_as_twin(model_of(run, run), recipe, BATCHES * 2, changing(change, [2, 4]))


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_inside_of_the_first_forward_does_not_end_it(change, recipe):
    def run(block, x):
        return changed_last(block, in_forward_of_a_graph(block, x))

    check_as_twin(model_of(run, run), recipe, train=changing(change, [0]), has_derived=False)


def test_a_parameter_changed_in_a_later_forward_after_the_save_raises_once(recipe):
    model = model_of(changed_last, changed_last)
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        assert_equal(changing(halved_in_place, [])(model, BATCHES), changing(halved_in_place, [])(twin, BATCHES))
        for layer in (*model.layers, *twin.layers):
            layer.change = halved_in_place
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            step(model, BATCHES[0])
        count = handle.stats().derived.count
        model.zero_grad()
        forward(twin)
        assert_equal(train(model), train(twin))
        assert handle.stats().derived.count == count > 0


class Special(nn.Parameter):
    pass


def of_a_flat_parameter(p):
    flat = torch.cat([p.detach().flatten(), torch.zeros(3)])
    p.data = flat[: p.numel()].view(p.shape)
    return p


def with_shard(p):
    p.ds_id = 0
    return p


NOT_PLAIN = {"a subclass": lambda p: Special(p.detach().clone()), "a part": of_a_flat_parameter, "a shard": with_shard}


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_region_with_parameters_that_are_not_plain_derives_nothing(kind):
    models = [model_of(mlp, mlp) for _ in range(2)]
    for model in models:
        for layer in model.layers:
            layer.linear.weight = NOT_PLAIN[kind](layer.linear.weight)
    model, twin = models
    with offloaded(model) as handle:
        assert_equal(train(model), train(twin))
        assert handle.stats().derived.count == 0


def by_swap(p):
    """Free the memory of a parameter. Returns a function that brings it back."""
    own, p.data = p.data, torch.empty(0)

    def bring_back():
        p.data = own.clone()

    return bring_back


def by_size(p):
    own, storage = p.data.clone(), p.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)

    def bring_back():
        storage.resize_(nbytes)
        p.data.copy_(own)

    return bring_back


def frees_weights(module, free):
    """The weights are in memory while the module or its backward runs, as with sharding. Outputs are single tensors."""
    away = {}

    def bring_back(*_):
        while away:
            away.popitem()[1]()

    def leave(_module, _args, result):
        for p in module.parameters():
            away[p] = free(p)
        if result.requires_grad:
            result.register_hook(bring_back)

    module.register_forward_pre_hook(bring_back)
    module.register_forward_hook(leave)
    return bring_back


def deep(block, x):
    """The input of the last product is derived from derived tensors, down to the weights of `linear`."""
    return x + block.out(functional.silu(functional.silu(block.linear(x)).square()).neg().square())


def of_parts(block, x):
    """The square is derived from the input of `silu`, which is derived from weights that are away by now."""
    return x + block.out(block.part(x).square().neg().square())


def read_in_and_out(block, x):
    """The result of a part is saved inside, where its weights are in memory, and outside, where they are away."""
    return x + block.out(block.part(x)) + block.part.square


class Part(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        y = functional.silu(self.linear(x))
        self.square = y.square()
        return y


FREED = {
    "regions": (lambda block, x: mlp(block, x), [""]),
    "regions of attention": (lambda block, x: plain_attention(block, x), [""]),
    "deep regions": (deep, [""]),
    "layers": (lambda block, x: mlp(block, x), ["linear", "out", "norm"]),
    "layers of attention": (lambda block, x: plain_attention(block, x), ["linear", "out"]),
    "deep layers": (deep, ["linear", "out"]),
    "parts": (of_parts, ["part"]),
    "parts whose result has two readers": (read_in_and_out, ["part"]),
}
"""The run of a block, and the modules in it whose weights are away most of the time."""


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("row", FREED)
@pytest.mark.parametrize("free", [by_swap, by_size])
def test_weights_may_be_freed_after_their_module_ran(row, free, recipe):
    run, names = FREED[row]
    models = [model_of(*[run] * 3) for _ in range(2)]
    back = [[], []]
    for model, own in zip(models, back, strict=True):
        for layer in model.layers:
            layer.part = Part(layer.linear)
            own += [frees_weights(layer.get_submodule(name), free) for name in names]

    def steps(model, own):
        results = []
        for x in BATCHES * 2:
            x = x.clone().requires_grad_()
            loss = model(x * 1.0).square().mean()
            loss.backward()
            for bring_back in own:
                bring_back()
            results += [loss.detach(), x.grad, *gradients(model)]
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.01)
            model.zero_grad()
        return results

    plain = steps(models[1], back[1])
    with offloaded(models[0], recipe) as handle:
        assert_equal(steps(models[0], back[0]), plain)
        assert handle.stats().derived.count == 0  # where weights come and go


# -- chains ------------------------------------------------------------------------------------------------------------


def links(count):
    def run(block, x):
        for _ in range(count):
            x = x * block.scale
        return x

    return run


def near_one(model):
    with torch.no_grad():
        for layer in model.layers:
            layer.scale.mul_(0.01).add_(1.0)
    return model


def test_a_long_chain_is_kept_in_places(recipe):
    model = near_one(model_of(links(160)))
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        assert_equal(train(model), train(twin))
        derived = handle.stats().derived.count
    # The input is kept, then every ninth product: a read computes eight at most.
    assert derived == DERIVING * (159 - 159 // 9)


def residuals(block, x):
    for _ in range(14):
        x = x + functional.silu(x * block.scale)
    return x


def test_each_derivation_is_computed_once_in_backward(recipe, values):
    model = model_of(residuals)
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        assert_equal(train(model), train(twin))
        before = handle.stats().derived.count
        loss = forward(model)
        derived = handle.stats().derived.count - before
        values.clear()
        loss.backward()
        assert derived >= 14
        assert 0 < len(values) <= derived
        forward(twin).backward()
        assert_equal(gradients(model), gradients(twin))
    assert alive(values) == 0


def test_a_retained_graph_computes_each_derivation_a_few_times(recipe, values):
    model = model_of(residuals)
    twin = copy.deepcopy(model)
    with offloaded(model, recipe) as handle:
        assert_equal(train(model), train(twin))
        before = handle.stats().derived.count
        loss = forward(model)
        derived = handle.stats().derived.count - before
        values.clear()
        loss.backward(retain_graph=True)
        assert 0 < len(values) <= 8 * derived  # a read computes eight in a row at most
        assert alive(values) == 0
        forward(twin).backward()
        assert_equal(gradients(model), gradients(twin))


# -- settling ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("sites", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("action", list(DERIVED))
def test_forwards_that_derive_nothing_do_not_stop_the_next(action, sites):
    def run(block, x):
        y = functional.silu(x) if block.derives else functional.pad(x.square(), (0, 0))
        return y.square()

    models = [model_of(run, run) for _ in range(2)]
    results, counts = [], []
    with offloaded(models[0], replace(DERIVED[action], derive=sites)) as handle:
        for derives, x in zip((False, False, True, True, False, True), BATCHES * 2, strict=True):
            for layer in (*models[0].layers, *models[1].layers):
                layer.derives = derives
            results.append([step(model, x) for model in models])
            counts.append(handle.stats().derived.count)
    for ours, plain in results:
        assert_equal(ours, plain)
    assert counts == [0, 0, 2, 4, 4, 6]


@pytest.mark.parametrize("change", [lambda handle: handle.remove(), lambda handle: handle.set_recipe("keep")])
def test_backward_needs_neither_handle_nor_recipe(change, recipe):
    model, twin = model_of(read_twice, read_twice), model_of(read_twice, read_twice)
    with offloaded(model, recipe) as handle:
        learn(model)
        loss = forward(model)
        assert handle.stats().derived.count > 0
        change(handle)
        loss.backward()
    forward(twin).backward()
    assert_equal(gradients(model), gradients(twin))


# -- programs of users -------------------------------------------------------------------------------------------------


def mlp(block, x):
    return x + block.out(functional.silu(block.linear(block.norm(x))) * block.linear(x).sigmoid())


def attention(block, x):
    q, k, v = (heads(part).transpose(0, 1)[None] for part in (block.linear(x), block.out(x), x.sin() @ block.weight))
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return x + block.out(mixed[0].transpose(0, 1).flatten(1))


def plain_attention(block, x):
    with sdpa_kernel(SDPBackend.MATH):
        return attention(block, x)


def with_dropout(block, x):
    y = torch.native_dropout(block.linear(x), 0.2, True)[0]
    return x + block.out(functional.dropout(functional.gelu(y), 0.3).square())


def checkpointed_inside(block, x):
    y = functional.silu(block.linear(x))
    return block.out(checkpoint(lambda y: functional.gelu(block.linear(y)).square(), y, use_reentrant=False)) + y.sin()


def skipped_at_random(block, x):
    if random.random() < 0.4:
        return x
    y = functional.silu(block.linear(x)) if random.random() < 0.5 else x.sin()
    return x + block.out(y.square())


def with_leaf_of_its_own(block, x):
    noise = torch.zeros_like(x).normal_()
    y = x * noise
    del noise
    shift = torch.full_like(x, 0.1).requires_grad_()
    return functional.silu(y + shift).square()


def with_own_hooks(block, x):
    y = block.linear(x).sin()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.0, lambda t: t):
        z = functional.silu(y).square()
    return block.out(z.square() * y)


def in_forward_of_a_graph(block, x):
    """A gradient inside of the forward."""
    with torch.enable_grad():
        own = x.detach().requires_grad_()
        (direction,) = torch.autograd.grad(functional.silu(block.linear(own)).square().sum(), own)
    return block.out(functional.silu(x + direction).square())


BLOCKS = {
    "gated": mlp, "attention": attention, "plain attention": plain_attention, "dropout": with_dropout,
    "checkpoint inside": checkpointed_inside, "skipped at random": skipped_at_random,
    "leaf inside": with_leaf_of_its_own, "hooks inside": with_own_hooks, "gradient inside": in_forward_of_a_graph,
}  # fmt: skip


def seeded(model, inputs=BATCHES):
    random.seed(2)
    return train(model, inputs)


@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_train_as_without_us(name, action):
    check_as_twin(model_of(*[BLOCKS[name]] * 3), DERIVED[action], BATCHES * 2, seeded)


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("sites", [(0,), (1, 2, 4), tuple(range(3, 60))], ids=len)
@pytest.mark.parametrize("name", BLOCKS)
def test_chosen_tensors_are_derived(name, sites):
    """From the second forward on tensors that are neither derived nor operands are not looked at."""
    model = model_of(*[BLOCKS[name]] * 3)
    twin = copy.deepcopy(model)
    every = replace(DERIVED["keep"], derive=None)
    counts = []
    for chosen in (every, replace(every, derive=sites)):
        ours = copy.deepcopy(twin)
        with offloaded(ours, chosen) as handle:
            assert_equal(seeded(ours, BATCHES * 2), seeded(copy.deepcopy(twin), BATCHES * 2))
            counts.append(handle.stats().derived.count)
    assert counts[0] >= counts[1]


def one_activation(block, x):
    """The node of the activation function has saved its operand: the derivation asks for no other saved tensor."""
    return block.out(functional.gelu(block.linear(x)))


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("run", [mlp, one_activation])
def test_tensors_that_stay_are_not_looked_at_again(run, monkeypatch):
    """Looking costs the host several times what keeping does."""
    looked_at = []
    select = engine_hooks.select
    monkeypatch.setattr(engine_hooks, "select", lambda t, context: looked_at.append(t) or select(t, context))
    derives_any = False
    for site in range(8):
        model, counts = model_of(*[run] * 3), []
        with offloaded(model, Recipe("keep", derive=[site])) as handle:
            train(model, BATCHES[:1])  # settles whether parameters stay as they are
            for x in BATCHES[:1] * 2:
                looked_at.clear()
                train(model, [x])
                counts.append(len(looked_at))
            if handle.stats().derived.count:
                derives_any = True
                assert counts[1] < counts[0]
    assert derives_any


@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.parametrize("moved", [None, (0, 4)])
def test_every_saved_tensor_counts_once_in_each_forward(moved):
    def total(handle):
        stats = handle.stats()
        return stats.saved_tensors + stats.derived.count  # of this model each derivation is of one tensor

    derives_any = False
    for site in range(8):
        model, totals = model_of(mlp, mlp, mlp), [0]
        recipe = Recipe("keep", derive=[site]) if moved is None else Recipe("offload", sites=moved, derive=[site])
        with offloaded(model, recipe) as handle:
            for x in BATCHES[:1] * 5:
                train(model, [x])
                totals.append(total(handle))
            derives_any |= handle.stats().derived.count > 0
        assert len({after - before for before, after in pairwise(totals)}) == 1, site
    assert derives_any


def test_parameters_without_memory_are_no_operands():
    """A lazy module has no addresses to compare before its first forward."""
    lazy = RegionParameters("lazy", nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))
    lazy.trust()
    lazy.enter()
    assert not lazy.is_steady
    lazy.leave()
    assert not lazy.is_steady


def under_autocast(model, inputs):
    def loss_of(y):
        return y.float().square().mean()

    results = []
    for x in inputs:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x * 1.0))
        loss.backward()
        results += [loss.detach(), x.grad, *gradients(model)]
        model.zero_grad()
    return results


def backward_under_autocast(model, inputs):
    results = []
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16):
            results += step(model, x, lambda y: y.float().square().mean())
    return results


def frozen(model, inputs):
    model.layers[0].requires_grad_(False)
    model.layers[1].linear.bias.requires_grad_(False)
    model.layers[1].norm.requires_grad_(False)
    return seeded(model, inputs)


def thawed(model, inputs):
    results = []
    for is_trained, x in zip((True, False, True), inputs, strict=True):
        model.layers[0].requires_grad_(is_trained)
        results += step(model, x)
    return results


def unlike_shapes(model, inputs):
    return [result for rows in (4, 2, 7, 4, 2) for result in step(model, Data(CPU, rows).tensor(rows, WIDTH))]


def without_gradients_between(model, inputs):
    results = []
    for x in inputs:
        with torch.no_grad():
            results.append(model(x))
        results += step(model, x)
        with torch.inference_mode():
            results.append(model(x).clone())
    return results


def hooks_around(model, inputs):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.0, lambda t: t):
        return seeded(model, inputs)


def on_cpu_around(model, inputs):
    with torch.autograd.graph.save_on_cpu():
        return seeded(model, inputs)


def checkpoint_around(model, inputs):
    model.call = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    return seeded(model, inputs)


def reentrant_checkpoint_around(model, inputs):
    model.call = lambda layer, x: checkpoint(layer, x, use_reentrant=True)
    return seeded(model, inputs)


def called_twice(model, inputs):
    model.call = lambda layer, x: layer(layer(x))
    return seeded(model, inputs)


class Called(Layers):
    """Layers that `call` calls."""

    call = staticmethod(lambda layer, x: layer(x))

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def second_order(model, inputs):
    results = []
    for x in inputs:
        x = x.clone().requires_grad_()
        loss = model(x * 1.0).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        results += [loss.detach(), grad.detach(), x.grad, *gradients(model)]
        model.zero_grad()
    return results


def accumulated(model, inputs):
    for x in inputs:
        forward(model, x).backward()
    return gradients(model)


def evaluated_between(model, inputs):
    results = []
    for x in inputs:
        results += step(model, x)
        results.append(model.eval()(x).detach())
        model.train()
    return results


WAYS = [
    under_autocast, backward_under_autocast, frozen, thawed, unlike_shapes, without_gradients_between, hooks_around,
    on_cpu_around, checkpoint_around, reentrant_checkpoint_around, called_twice, second_order, accumulated,
    evaluated_between,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("action", list(DERIVED))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", [mlp, plain_attention, with_dropout])
def test_ways_to_train(run, way, action):
    torch.manual_seed(0)
    model = Called(run, run)
    is_ours = way not in (checkpoint_around, reentrant_checkpoint_around)
    check_as_twin(model, DERIVED[action], train=way, has_derived=is_ours)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.batch_norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = functional.silu(self.norm(self.conv(x)))
        y = functional.interpolate(y, scale_factor=2.0)
        y = functional.hardswish(self.batch_norm(functional.avg_pool2d(y, 2)))
        return torch.cat([x[:, :2], y[:, 2:].square()], 1)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_images(layout, recipe):
    torch.manual_seed(0)
    model = Layers()
    model.layers.extend(Convolutions() for _ in range(3))
    inputs = [x.contiguous(memory_format=layout) for x in batches(2, 4, 6, 6)]
    check_as_twin(model.to(memory_format=layout), recipe, inputs)


def test_layouts_may_change_from_step_to_step(recipe):
    torch.manual_seed(0)
    model = Layers()
    model.layers.extend(Convolutions() for _ in range(2))
    layouts = [torch.contiguous_format, torch.channels_last] * 2
    images = batches(2, 4, 6, 6, steps=4)
    check_as_twin(model, recipe, [x.contiguous(memory_format=each) for x, each in zip(images, layouts, strict=True)])


# -- every case of the suite -------------------------------------------------------------------------------------------


@pytest.fixture
def everything_derived(monkeypatch):
    """Contexts derive at once what regions with the recipe do later. No parameter is an operand: regions own them."""
    new_call = HookContext.new_call

    def deriving(self, region):
        call = new_call(self, region)
        call.derives, call.first_node = None, next_node()
        call.parameters = RegionParameters("", nn.Module())
        call.parameters.enter()
        call.parameters.leave()
        return call

    monkeypatch.setattr(HookContext, "new_call", deriving)


NOT_DERIVED = {
    "adversaries", "channels_last", "checkpoint_inside", "checkpoint_of_containers", "checkpoint_with_outputs_away",
    "in_place_operations", "one_input_of_three", "reentrant_checkpoint_inside", "second_order_outside",
}  # fmt: skip
"""Cases in which others pack, or tensors change, or their operands are not saved, or parameters of no region."""

DEVICES = {"late": lambda: SimDevice(1, "late"), "shuffled": lambda: SimDevice(2, "shuffled")}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case_with_derivations_equals_its_plain_twin(case, device, everything_derived):
    rig = Rig(DEVICES[device]())
    same(lambda context: case(context, CPU), rig)
    rig.device.finish()
    assert rig.device.faults == []
    assert rig.stats.derived.count > 0 or case.__name__ in NOT_DERIVED


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", NOTHING)
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_with_derivations(seed, everything_derived):
    assert explore(seed) is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", NOTHING)
@pytest.mark.parametrize("seed", range(10))
def test_captured_programs_with_derivations(seed, everything_derived):
    assert explore_captured(seed) is None


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "derive"),
    [(True, None), (None, None), (False, ()), ((), ()), ([], ()), ((2, 0), (2, 0)), ([3], (3,)), (range(2), (0, 1))],
    ids=repr,
)
@pytest.mark.parametrize("action", ["keep", "offload"])
def test_ways_to_write_what_is_derived(action, given, derive):
    recipe = Recipe(action, derive=given)
    assert recipe.derive == derive
    assert recipe.derives == (derive != ())
    assert str(recipe) == (f"{action}, derive" if recipe.derives else action)
    assert recipe.keeps_all == (recipe == Recipe("keep"))
    assert replace(recipe) == recipe
    assert hash(replace(recipe)) == hash(recipe)


@pytest.mark.parametrize("given", [3, "all", 1.5, (True,), (-1,), ("0",), ((0,),), [None], {1.0}], ids=repr)
def test_what_cannot_be_derived(given):
    with pytest.raises(ConfigError, match=r"derive=.*: expected"):
        Recipe("keep", derive=given)


@pytest.mark.parametrize("given", [True, None, (0,)], ids=repr)
@pytest.mark.parametrize("action", ["recompute", "selective"])
def test_recipes_that_recompute_do_not_derive(action, given):
    with pytest.raises(ConfigError, match=f"means nothing to the recipe '{action}', which recomputes: omit it"):
        Recipe(action, derive=given)
    assert Recipe(action, derive=False) == Recipe(action)


@pytest.mark.parametrize("derive", [True, False, (), (0, 4)], ids=repr)
@pytest.mark.parametrize("action", ["keep", "offload"])
def test_a_plan_that_derives_comes_back_from_its_file(action, derive, tmp_path):
    plan = Plan({"layers.0": RegionPlan(Recipe(action, derive=derive))}, outside=RegionPlan("keep"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.keeps_all == (action == "keep" and derive in (False, ()))
    assert ("derive" in str(plan)) == plan.regions["layers.0"].recipe.derives


def test_a_plan_names_what_each_region_derives():
    model = model_of(*[ROWS["SiluBackward0"]] * 3)
    twin = copy.deepcopy(model)
    plan = Plan(
        {
            "layers.0": RegionPlan(Recipe("keep", derive=True)),
            "layers.1": RegionPlan("offload"),
            "layers.2": RegionPlan(Recipe("keep")),
        },
        outside=RegionPlan("keep"),
    )
    handle = ebbtide.offload(model, plan=plan, store="mock", min_bytes=1)
    assert_equal(train(model), train(twin))
    assert handle.stats().derived.count == DERIVING
    assert handle.stats().parcels.count > 0
    handle.remove()


def test_an_expression_keeps_shared_parts_shared():
    shared = Expression(torch.sin, ("x",))
    shared.is_shared = True
    whole = Expression(torch.mul, (shared, Expression(torch.add, (shared, None)))).with_operands(str.upper, {})
    assert len(whole.operators()) == 3
    inner, added = whole.operands
    assert inner.is_shared
    assert inner.operands == ["X"]
    assert added.operands == [inner, None]
