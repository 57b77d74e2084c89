"""Costs of derivations: measured once for tensors that are alike, and written to profiles."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import Plan, Recipe, RegionPlan
from ebbtide._devices.cpu import CpuDevice
from ebbtide._engine.derive import Derivation, Expression
from ebbtide._planner.solve import Solver
from ebbtide._profiling.derive_probe import key_of, probe_derivations
from ebbtide._profiling.recorder import Operand, SeenTensor
from ebbtide._types import Memory

ITEM = 4


@pytest.fixture
def device():
    return CpuDevice()


def operand(*size, index=0, dtype=torch.float32, numbers=None):
    t = torch.empty(size, dtype=dtype)
    return Operand(index, t.size(), t.stride(), dtype, numbers)


def seen(expression, signature=("rule",), index=0):
    return SeenTensor(index, 100, None, expression=expression, signature=signature)


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operate):
        self.operate = operate
        self.calls = 0

    def __call__(self, *operands, **settings):
        self.calls += 1
        return self.operate(*operands, **settings)


def test_each_tensor_has_a_positive_time(device):
    tensors = [seen(Expression(torch.sin, (operand(size, 4),))) for size in (1, 3, 1000)]
    found = probe_derivations(device, tensors)
    assert found.keys() == {key_of(each) for each in tensors}
    assert len(found) == 3
    assert all(cost.seconds > 0.0 for cost in found.values())


def test_tensors_that_are_alike_are_measured_once(device):
    operate = Counted(torch.sin)
    alone = Counted(torch.sin)
    probe_derivations(device, [seen(Expression(alone, (operand(3, 4),)))])
    tensors = [seen(Expression(operate, (operand(3, 4, index=k),)), index=k) for k in range(5)]
    assert len(probe_derivations(device, tensors)) == 1
    assert operate.calls == alone.calls


@pytest.mark.parametrize(
    ("expression", "signature"),
    [
        (Expression(torch.sin, (operand(4, 3),)), ("rule",)),
        (Expression(torch.sin, (operand(3, 4, dtype=torch.bfloat16),)), ("rule",)),
        (Expression(torch.cos, (operand(3, 4),)), ("another rule",)),
        (Expression(torch.mul, (operand(3, 4), operand(3, 4))), ("rule",)),
    ],
    ids=["size", "type", "rules", "operands"],
)
def test_keys_tell_apart(expression, signature):
    assert key_of(seen(expression, signature)) != key_of(seen(Expression(torch.sin, (operand(3, 4),))))


def test_nothing_stays_allocated(device):
    """Whether or not Python collects garbage."""
    made = []

    def sine(t):
        result = torch.sin(t)
        made.extend((weakref.ref(t.untyped_storage()), weakref.ref(result.untyped_storage())))
        return result

    gc.disable()
    try:
        probe_derivations(device, [seen(Expression(sine, (Expression(sine, (operand(3, 4),)),)))])
        assert made
        assert not any(ref() for ref in made)
    finally:
        gc.enable()


def test_tensors_without_an_expression_are_left_out(device):
    assert probe_derivations(device, [SeenTensor(0, 100, None)]) == {}
    assert probe_derivations(device, []) == {}


def shared(operate, *operands):
    expression = Expression(operate, operands)
    expression.is_shared = True
    return expression


BETWEEN = shared(torch.exp, operand(8, 4))
WORK = {
    "one operator": (Expression(torch.sin, (operand(8, 4),)), 0),
    "a result in between": (Expression(torch.sin, (Expression(torch.exp, (operand(8, 4),)),)), 8 * 4 * ITEM),
    "a larger result in between": (
        Expression(torch.sum, (Expression(torch.mul, (operand(8, 1), operand(1, 4))),)),
        8 * 4 * ITEM,
    ),
    "two results in between": (
        Expression(torch.sin, (Expression(torch.exp, (Expression(torch.cos, (operand(8, 4),)),)),)),
        2 * 8 * 4 * ITEM,
    ),
    "a shared result": (Expression(torch.mul, (BETWEEN, Expression(torch.t, (Expression(torch.t, (BETWEEN,)),)))), 128),
    "a view of an operand": (Expression(torch.sin, (Expression(torch.t, (operand(8, 4),)),)), 0),
    "a view of a result": (Expression(torch.t, (Expression(torch.exp, (operand(8, 4),)),)), 0),
    "a missing operand": (Expression(lambda t, _: t.sin(), (operand(8, 4), None)), 0),
    "a cast": (Expression(torch.sin, (Expression(torch.Tensor.double, (operand(8, 4),)),)), 8 * 4 * 2 * ITEM),
}


@pytest.mark.parametrize("name", WORK)
def test_results_in_between_count_as_work(name, device):
    expression, work_bytes = WORK[name]
    (cost,) = probe_derivations(device, [seen(expression)]).values()
    assert cost.work_bytes == work_bytes


def test_whole_numbers_are_those_of_the_tensor(device):
    """Indices drawn at random would be out of range."""
    rows = torch.tensor([2, 0, 1])
    read = []

    def index(t, numbers):
        read.append(numbers)
        return t[numbers]

    expression = Expression(index, (operand(3, 4), operand(3, index=1, dtype=torch.int64, numbers=rows)))
    assert len(probe_derivations(device, [seen(expression)])) == 1
    assert len(read) > 0
    assert all(torch.equal(each, rows) for each in read)


def test_masks_are_valid(device):
    expression = Expression(torch.where, (operand(3, 4, dtype=torch.bool), operand(3, 4), operand(3, 4)))
    assert len(probe_derivations(device, [seen(expression)])) == 1


def test_operands_have_the_layout_of_the_tensors(device):
    found = []
    rows = Operand(0, torch.Size((2, 3)), (1, 2), torch.float32, None)
    every_second = Operand(1, torch.Size((2, 3)), (12, 2), torch.bfloat16, None)
    expression = Expression(lambda a, b: found.append((a.stride(), b.stride(), b.dtype)) or a * b, (rows, every_second))
    assert len(probe_derivations(device, [seen(expression)])) == 1
    assert set(found) == {((1, 2), (12, 2), torch.bfloat16)}


def test_what_the_device_has_no_room_for_is_left_out(device):
    def fail(_):
        raise torch.OutOfMemoryError

    large, small = seen(Expression(fail, (operand(9, 4),))), seen(Expression(torch.sin, (operand(3, 4),)))
    assert probe_derivations(device, [large, small]).keys() == {key_of(small)}


@pytest.mark.parametrize(("most_bytes", "count"), [(3 * 32 * ITEM, 1), (3 * 32 * ITEM - 1, 0), (None, 1)])
def test_no_probe_takes_more_memory_than_there_may_be(most_bytes, count, device):
    """An operand, a result in between, and the result."""
    operate = Counted(torch.sin)
    expression = Expression(operate, (Expression(torch.exp, (operand(8, 4),)),))
    assert len(probe_derivations(device, [seen(expression)], most_bytes)) == count
    assert (operate.calls > 0) == (count > 0)


def test_casts_to_wider_types_count(device):
    """16 halves, 16 floats of 64 bytes, and the result: estimated as wide as the floats."""
    wide = Expression(torch.Tensor.to, (operand(16, dtype=torch.bfloat16),), {"dtype": torch.float32})
    narrow = Expression(torch.Tensor.to, (wide,), {"dtype": torch.bfloat16})
    assert probe_derivations(device, [seen(narrow)], 32 + 64 + 32 - 1) == {}
    assert len(probe_derivations(device, [SeenTensor(0, 32, None, expression=narrow, signature=("rule",))], 160)) == 1


def test_operands_of_one_saved_tensor_share_memory(device):
    """The halves of a gated projection are views of one tensor."""
    halves = [Operand(3, torch.Size((8, 2)), stride, torch.float32, None) for stride in ((4, 1), (4, 2))]
    found = []
    expression = Expression(lambda a, b: found.append((a.data_ptr(), b.data_ptr())) or a * b, halves)
    probe_derivations(device, [seen(expression)])
    assert all(a == b for a, b in found)


def test_the_probe_leaves_no_trace(device):
    """Neither random numbers of the user nor gradients nor autocast take part."""
    states = []

    def look(t):
        states.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return t.sin()

    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        probe_derivations(device, [seen(Expression(look, (operand(3, 4),)))])
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert set(states) == {(False, False)}
    assert torch.is_grad_enabled()


# -- profiles ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(functional.silu(self.up(self.norm(x))).square())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def profile():
    torch.manual_seed(0)
    model = Stack()
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    for _ in range(5):
        model(torch.randn(8, 16) * 1.0).backward()
    found = handle.profile
    handle.remove()
    return found


def test_a_profile_tells_what_can_be_derived(profile):
    """Of x, the normed x, what `up` makes, silu and square; saved in the order of their readers."""
    for region in profile.regions:
        x, *others = region.saved_tensors
        owners = [tensor for tensor in others if tensor.nbytes > 0]
        derived = [tensor for tensor in owners if tensor.derive_s > 0]
        assert x.derive_s == 0.0
        assert len(derived) == 4
        indices = {tensor.index for tensor in region.saved_tensors}
        for tensor in derived:
            assert tensor.derive_ops >= 1
            assert tensor.derived_from
            assert set(tensor.derived_from) <= indices - {tensor.index}
            assert max(tensor.derived_from) < tensor.index


def test_equal_blocks_have_equal_derivations(profile):
    rows = [
        [(tensor.derive_s, tensor.derive_ops, tensor.derive_work_bytes, tensor.derived_from) for tensor in tensors]
        for tensors in (region.saved_tensors for region in profile.regions)
    ]
    assert rows[1] == rows[2]
    assert sum(derive_s for derive_s, *_ in rows[1]) > 0


def test_a_profile_that_derives_comes_back_from_its_file(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert type(profile).load(tmp_path / "profile.json") == profile


class Mixer(nn.Module):
    """A linear layer of torch adds the bias in place if its input is no matrix in memory, unless a mode looks on."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.up = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.ones(16))

    def forward(self, x):
        mixed = self.mix(x.transpose(0, 1)) * self.gate
        return x + self.up(functional.silu(self.norm(mixed))).transpose(0, 1)


class Mixers(Stack):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(3))


@pytest.mark.parametrize(("make", "size"), [(Stack, (8, 16)), (Mixers, (4, 8, 16))])
def test_a_plan_derives_all_that_a_profile_calls_derivable_and_compares_nothing(make, size, monkeypatch):
    """A comparison needs memory, and so does a tensor that is kept against the plan."""
    torch.manual_seed(0)
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    for _ in range(5):
        model(torch.randn(size)).backward()
    tensors = {region.name: region.saved_tensors for region in handle.profile.regions}
    derive = {name: tuple(t.index for t in own if t.derive_s > 0) for name, own in tensors.items()}
    assert all(derive.values())
    monkeypatch.setattr(Derivation, "equals", lambda *_: pytest.fail("compared"))
    regions = {name: RegionPlan(Recipe("keep", derive=numbers)) for name, numbers in derive.items()}
    handle.set_plan(Plan(regions, outside=RegionPlan("keep")))
    for steps in (1, 2):
        before = handle.stats().derived.count
        model(torch.randn(size)).backward()
        assert handle.stats().derived.count - before == sum(map(len, derive.values())), steps


@pytest.mark.parametrize(("free_bytes", "can_compare"), [(100, False), (1 << 20, True)])
def test_without_room_to_compare_nothing_is_derivable(free_bytes, can_compare, monkeypatch):
    limit = 1 << 30
    allocated = [limit - free_bytes]
    monkeypatch.setattr(CpuDevice, "tracks_peak", True)
    monkeypatch.setattr(CpuDevice, "memory", lambda _: Memory(allocated[0], allocated[0]))
    model = Stack()
    handle = ebbtide.offload(model, budget=limit, store="mock", min_bytes=1)
    for _ in range(5):
        model(torch.randn(8, 16)).backward()
        allocated[0] = 0
    derivable = [t for region in handle.profile.regions for t in region.saved_tensors if t.derive_s > 0]
    assert bool(derivable) is can_compare


class Quantised(torch.autograd.Function):
    """Saves a weight of whole numbers."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(x, weight, scale)
        return x * weight * scale

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return grad * weight * scale, None, (grad * x * weight).sum(0)


class Odd(Block):
    """Saves what most models do not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("whole", torch.randint(-3, 4, (16,), dtype=torch.int32))
        self.inner = []

    def forward(self, x):
        if self.kind == "whole numbers":
            x = Quantised.apply(x, self.whole, self.scale)
        elif self.kind == "nested":
            halves = torch.nested.as_nested_tensor([x[:4] * 1.5, x[4:]])
            x = halves.sin().cos().to_padded_tensor(0.0).view(8, 16)
        elif self.kind == "sparse":
            x = x + torch.sparse.mm((self.scale.diag() * 2).to_sparse(), x.t()).t()
        elif self.kind == "hooks of others":
            with torch.autograd.graph.save_on_cpu():
                y = functional.silu(x * self.scale)
            x = x + y.square()
        elif self.kind == "changed unseen":
            x = self.up(x) * self.up(x)
            with torch.no_grad():
                x.clamp_(-100.0, 100.0)
            x = self.down(functional.silu(x + 1.0))
        elif self.kind == "asks for gradients":
            y = x.sin()
            x = x + torch.autograd.grad(y.sum(), x, create_graph=True)[0]
            y = x.exp()
            self.inner.append(weakref.ref(y.untyped_storage()))
            x = y.log()
        return super().forward(x)


class OddStack(Stack):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(Odd(kind) for _ in range(2))


ODD = ["whole numbers", "nested", "sparse", "hooks of others", "changed unseen", "asks for gradients"]


@pytest.mark.filterwarnings("error::ebbtide.EbbtideWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("kind", ODD)
def test_odd_saved_tensors_are_measured_and_planned(kind):
    torch.manual_seed(0)
    model = OddStack(kind)
    twin = copy.deepcopy(model)
    handle = ebbtide.offload(model, budget="64GiB", store="mock", min_bytes=1)
    count = sum(type(o) is torch.Tensor and o.dtype is torch.int32 for o in gc.get_objects())
    for number in range(6):
        x = torch.randn(8, 16, requires_grad=True)
        found = []
        for each in (model, twin):
            each.zero_grad()
            loss = each(x)
            if each is model and number < 3:  # measured steps keep nothing
                assert not any(ref() for layer in model.layers for ref in layer.inner)
            loss.backward()
            found.append([loss.detach(), x.grad, *(p.grad for p in each.parameters())])
            x.grad = None
        assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))
        now = sum(type(o) is torch.Tensor and o.dtype is torch.int32 for o in gc.get_objects())
        assert now <= count
    assert handle.profile is not None
    derivable = [t for region in handle.profile.regions for t in region.saved_tensors if t.derive_s > 0]
    assert bool(derivable) == (kind != "changed unseen")


def test_a_plan_from_elsewhere_derives_in_its_first_step(profile):
    derive = {region.name: tuple(t.index for t in region.saved_tensors if t.derive_s > 0) for region in profile.regions}
    regions = {name: RegionPlan(Recipe("keep", derive=numbers)) for name, numbers in derive.items()}
    measured = Solver(profile).keeping_all().predicted
    model = Stack()
    handle = ebbtide.offload(model, budget="64GiB", profile=profile, store="mock", min_bytes=1)
    handle.set_plan(Plan(regions, outside=RegionPlan("keep"), predicted=measured))
    model(torch.randn(8, 16)).backward()
    assert handle.stats().derived.count == sum(map(len, derive.values()))
