"""Buffers, attributes and weights that change: recomputation reads the values of forward, or raises."""

import collections
import contextlib
import copy
from collections import deque

import pytest
import torch
from cases import make
from recipe_cases import WIDTH, Mixed, Simple, Stack, batch, observed
from support import HandleRig, assert_equal
from torch.nn import functional

import ebbtide
from ebbtide import ModifiedError, ModuleError, RecomputeError

CPU = torch.device("cpu")


@pytest.fixture
def rig():
    rig = HandleRig()
    yield rig
    rig.check_at_rest()


def both(kind):
    return make(lambda: Stack(kind), CPU), make(lambda: Stack(kind), CPU)


def steps(model, count=3):
    torch.manual_seed(5)
    results = []
    for number in range(count):
        loss = model(batch(CPU, number))
        loss.backward()
        results += [loss.detach(), *observed(model, CPU)]
    return results


class ChangesLate(Simple):
    """The third forward changes the buffer for the first time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= 3:
            self.scale.mul_(1.5)
        return self.second(self.first(x).sin() * self.scale)


def test_a_buffer_that_changes_late_is_an_error_once_and_correct_afterwards(rig):
    model, twin = both(ChangesLate)
    rig.offload(model, "recompute")
    assert_equal(steps(model, 2), steps(twin, 2))
    with pytest.raises(ModuleError, match=r"layers\.0: ChangesLate changed its buffer 'scale'.*'keep' or 'offload'"):
        model(batch(CPU))
    for layer in [*model.layers, *twin.layers]:
        layer.calls = 10
        layer.scale.fill_(2.0)
    for layer in model.layers[1:]:
        with pytest.raises(ModuleError, match="changed its buffer"):
            model(batch(CPU))
        layer.scale.fill_(2.0)
    for layer in model.layers:
        layer.scale.fill_(2.0)
    model.zero_grad()
    twin.zero_grad()
    assert_equal(steps(model), steps(twin))


def test_a_buffer_changed_between_forward_and_backward(rig):
    class Scaled(ChangesLate):
        def forward(self, x):
            return self.second(self.first(x).sin()) * self.scale.exp() + x

    model, _ = both(Scaled)
    rig.offload(model, "recompute")
    for _ in range(2):
        loss = model(batch(CPU))
        model.layers[1].scale.add_(1.0)
        with pytest.raises(RecomputeError, match=r"buffer 'scale' of layers\.1 was changed in place after"):
            loss.backward()
        del loss


def test_a_buffer_replaced_between_forward_and_backward(rig):
    class Scaled(ChangesLate):
        def forward(self, x):
            return self.second(self.first(x).sin()) * self.scale.exp() + x

    results = []
    for model in both(Scaled):
        if not results:
            rig.offload(model, "recompute")
        results.append([])
        for number in range(3):
            loss = model(batch(CPU, number))
            model.layers[1].scale = model.layers[1].scale + 1.0
            loss.backward()
            results[-1] += observed(model, CPU)
    assert_equal(*results)


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_weight_changed_between_forward_and_backward(rig, recipe):
    model, _ = both(Mixed)
    rig.offload(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch(CPU))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(ModifiedError, match=r"layers\.2.*was changed in place between forward and backward") as caught:
        loss.backward()
    torchs, _ = str(caught.value).split("\n")
    assert "variables needed for gradient computation has been modified by an inplace operation: [torch." in torchs
    assert torchs.endswith("]] is at version 2; expected version 1 instead.")


def test_a_weight_changed_in_forward(rig):
    class Clamps(Simple):
        def forward(self, x):
            with torch.no_grad():
                self.first.weight.mul_(0.5)
            return self.second(self.first(x).sin())

    model, _ = both(Clamps)
    rig.offload(model, "recompute")
    with pytest.raises(ModuleError, match=r"layers\.0 changes its parameter .weight."):
        model(batch(CPU))


class LookedUp(collections.OrderedDict):
    """A dict of parameters like ZeRO-3's, which gathers a parameter at each lookup."""

    def __init__(self, parameters, names):
        super().__init__(parameters)
        self.names = names

    def __getitem__(self, name):
        self.names.append(name)
        return super().__getitem__(name)


def test_parameters_are_looked_up_by_the_region_alone(rig):
    model, twin = both(Mixed)
    rig.offload(model, "recompute")
    lookups = []
    for each in (twin, model):
        names = []
        for layer in each.modules():
            layer.__dict__["_parameters"] = LookedUp(layer._parameters.items(), names)
        loss = each(batch(CPU))
        lookups.append(names.copy())
        loss.backward()
    plain, in_forward, in_all = *lookups, names
    assert plain
    assert in_forward == plain
    assert len(in_all) <= 2 * len(plain)


def test_recomputation_has_the_training_mode_of_forward(rig):
    results = []
    for model in both(Mixed):
        if not results:
            rig.offload(model, "recompute")
        torch.manual_seed(5)
        results.append([])
        for number in range(4):
            model.train(number != 2)
            loss = model(batch(CPU, number))
            model.train(number == 2)
            loss.backward()
            assert all(module.training is (number == 2) for module in model.modules())
            results[-1] += observed(model, CPU)
    assert_equal(*results)


class Remembers(Simple):
    """Computes from the count of calls, a mask of the first call and the output of the last call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.last = None
        self.name = ""

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "mask"):
            self.mask = (self.first.weight.detach() @ x.detach().t())[:, :1].t() > 0.0
        y = self.first(x) * self.calls
        if self.last is not None:
            y = y + self.last.detach().mean(0)
        self.last = self.second(y.sin()).masked_fill(self.mask, 0.1)
        self.name += "x"
        return functional.dropout(self.last, 0.1) * len(self.name) + x


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_attributes_that_a_forward_sets(rig, recipe):
    model, twin = both(Remembers)
    rig.offload(model, recipe)
    assert_equal(steps(model, 4), steps(twin, 4))
    for mine, other in zip(model.layers, twin.layers, strict=True):
        assert (mine.calls, mine.name) == (other.calls, other.name) == (4, "xxxx")
        assert_equal([mine.last, mine.mask], [other.last, other.mask])
        assert mine.last.grad_fn is not None
        mine.last = None  # the graph of the last forward


class Forgets(Simple):
    """Forward deletes attributes, and sets one anew at another position."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = 1.0, 2.0

    def forward(self, x):
        scale = self.scale
        del self.scale
        self.scale = scale + 1.0
        bias = self.__dict__.pop("bias", 0.5)
        return self.second(self.first(x).sin() * self.scale + bias) * self.shift


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_attributes_that_a_forward_takes_away(rig, recipe):
    model, twin = both(Forgets)
    rig.offload(model, recipe)
    results = []
    for each in (model, twin):
        for layer in each.layers:
            layer.bias = torch.full((WIDTH,), 0.25)
        results.append(steps(each))
        assert all((layer.scale, layer.shift, hasattr(layer, "bias")) == (4.0, 2.0, False) for layer in each.layers)
    assert_equal(*results)


Pair = collections.namedtuple("Pair", ["hidden", "cell"])


class Recurrent(Simple):
    """Continues from the state of the last call; `keep` makes the container of the state."""

    def __init__(self, keep):
        super().__init__()
        self.state = keep(torch.zeros(WIDTH), torch.ones(WIDTH))
        self.keep = keep

    def forward(self, x):
        hidden, cell = self.state.values() if isinstance(self.state, dict) else self.state
        cell = (self.first(x) * hidden.tanh() + cell).sin()
        hidden = self.second(cell).tanh() * cell
        last = hidden.mean(0).detach(), cell.mean(0).detach()
        if isinstance(self.state, dict):
            self.state.update(zip("hc", last, strict=True))
        elif isinstance(self.state, tuple):
            self.state = self.keep(*last)
        else:
            self.state.clear()
            self.state.extend(last)
        return hidden + x


KEPT = {
    "tuple": lambda *pair: pair,
    "named tuple": Pair,
    "list": lambda *pair: [*pair],
    "dict": lambda *pair: dict(zip("hc", pair, strict=True)),
    "deque": lambda *pair: deque(pair, maxlen=2),
}


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_state_that_is_carried_from_call_to_call(rig, keep, recipe):
    model, twin = both(lambda: Recurrent(keep))
    rig.offload(model, recipe)
    assert_equal(steps(model, 4), steps(twin, 4))
    for mine, other in zip(model.layers, twin.layers, strict=True):
        assert type(mine.state) is type(other.state)
        states = [list(s.values()) if isinstance(s, dict) else list(s) for s in (mine.state, other.state)]
        assert_equal(*states)


class Unrolled(Simple):
    """State with a graph: backward goes through all calls of a step."""

    def __init__(self):
        super().__init__()
        self.states = []

    def forward(self, x):
        y = self.first(x).sin()
        if self.states:
            y = y * self.states[-1]
        self.states.append(self.second(y).cos())
        return self.states[-1] + x


class Unrolls(Stack):
    def forward(self, x):
        for layer in self.layers:
            layer.states.clear()
        for _ in range(3):
            x = super().forward(x) * x
        return x.sum()


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_state_with_a_graph(rig, recipe):
    model, twin = (make(lambda: Unrolls(Unrolled), CPU) for _ in range(2))
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))
    for layer in model.layers:
        assert len(layer.states) == 3
        layer.states.clear()


class Holds(Simple):
    """Keeps a value with a graph, and reads the value without."""

    def __init__(self, what):
        super().__init__()
        self.last, self.what = [], what

    def forward(self, x):
        y = self.first(x).sin()
        for state in self.last:
            y = y + state.detach()
        y = self.second(y).cos()
        self.last = self.what(y)
        return y


class Elsewhere:
    """An opaque object."""

    def __init__(self, t):
        self.held = t

    def __iter__(self):
        return iter([self.held])


@pytest.mark.parametrize("what", [lambda y: [y], lambda y: (y,), lambda y: deque([y]), Elsewhere])
def test_graphs_in_containers_and_objects_do_not_pile_up(rig, what):
    model, _ = both(lambda: Holds(what))
    rig.offload(model, "recompute")
    held = []
    for _ in range(4):
        model(batch(CPU))  # and no backward
        held.append(rig.engine.store_stats().used_bytes)
    assert held[1] == held[3] > 0
    for layer in model.layers:
        layer.last = []


class Scaled(Simple):
    """A factor in an attribute and in a dict, like those of adapters."""

    def __init__(self):
        super().__init__()
        self.scale, self.scales = 1.0, {"default": 1.0}

    def forward(self, x):
        y = self.first(x).sin() * self.scale
        return self.second(y).cos() * self.scales["default"] + x


class Scales(Stack):
    """Sets the factors for the length of a forward."""

    def forward(self, x):
        for layer in self.layers:
            layer.scale, layer.extra = 0.25, True
            layer.scales["default"] *= 3.0
        loss = super().forward(x)
        for layer in self.layers:
            layer.scale = 1.0
            layer.scales["default"] /= 3.0
            del layer.extra
        return loss


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_attributes_that_the_model_sets_and_takes_back(rig, recipe):
    model, twin = (make(lambda: Scales(Scaled), CPU) for _ in range(2))
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))
    assert all(
        (layer.scale, layer.scales, hasattr(layer, "extra")) == (1.0, {"default": 1.0}, False) for layer in model.layers
    )


class Tells(Simple):
    """A module leaves a note for another in a shared list."""

    def __init__(self):
        super().__init__()
        self.first.notes = self.second.notes = []
        self.first.register_forward_hook(lambda module, args, y: module.notes.append(y.detach().mean()))

    def forward(self, x):
        y = self.first(x).sin()
        return self.second(y * self.second.notes[-1] * len(self.second.notes)) + x


def test_a_list_that_two_modules_share(rig):
    model, twin = both(Tells)
    rig.offload(model, "recompute")
    assert_equal(steps(model), steps(twin))
    assert all(layer.first.notes is layer.second.notes and len(layer.first.notes) == 3 for layer in model.layers)


class Auxiliary(Simple):
    """Leaves an auxiliary loss in an attribute or a list, like a mixture of experts."""

    def __init__(self, keep):
        super().__init__()
        self.loss, self.losses, self.count, self.keep = None, [], 0, keep

    def forward(self, x):
        y = self.first(x).sin()
        loss = y.square().mean() * (1.0 + self.count)
        self.count += 1
        if self.keep == "list":
            self.losses.append(loss)
        else:
            self.loss = loss if self.loss is None else self.loss + loss
        return self.second(y).cos() + x


class TakesLosses(Stack):
    """Clears the losses before backward: the blocks are as before forward."""

    def forward(self, x):
        loss = super().forward(x)
        for layer in self.layers:
            for one in [*layer.losses, *([] if layer.loss is None else [layer.loss])]:
                loss = loss + one
            layer.losses.clear()
            layer.loss, layer.count = None, 0
        return loss


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
@pytest.mark.parametrize("keep", ["list", "attribute"])
def test_changes_by_recomputation_alone_are_put_back(rig, keep, recipe):
    model, twin = (make(lambda: TakesLosses(lambda: Auxiliary(keep)), CPU) for _ in range(2))
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))
    assert all((layer.loss, layer.losses, layer.count) == (None, [], 0) for layer in model.layers)


class ReadsShared(Simple):
    """A tensor of the model with a graph: in two attributes, in a named tuple, and as a key."""

    def forward(self, x):
        assert self.key is self.value is self.pair[0]
        return self.second(self.first(x).sin() * self.key * self.scales[self.key] + self.top.values).cos() + x


class SharesTensors(Stack):
    def __init__(self, block):
        super().__init__(block)
        self.own = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        made = self.own(x)
        for layer in self.layers:
            layer.key = layer.value = made
            layer.pair, layer.scales, layer.top = (made, made), {made: 2.0}, torch.topk(made, 1)
        return super().forward(x)


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_objects_shared_by_blocks_stay_shared(rig, recipe):
    model, twin = (make(lambda: SharesTensors(ReadsShared), CPU) for _ in range(2))
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))
    for layer in model.layers:
        assert layer.key is layer.value is layer.pair[1] is next(iter(layer.scales))
        del layer.key, layer.value, layer.pair, layer.scales, layer.top


class Filled(Simple):
    """Writes into a tensor in an attribute."""

    def forward(self, x):
        self.cache[:] = self.first(x).sin()
        return self.second(self.cache * 2.0).cos() + x


def test_tensors_that_are_written_into_do_not_pile_up(rig):
    model, _ = both(Filled)
    rig.offload(model, "recompute")
    held = []
    for _ in range(4):
        for layer in model.layers:
            layer.cache = torch.zeros(batch(CPU).shape)
        model(batch(CPU))  # and no backward
        held.append(rig.engine.store_stats().used_bytes)
    assert held[1] == held[3] > 0
    for layer in model.layers:
        layer.cache = None


class Row(Simple):
    """Carries a view of the weight to the next call."""

    def __init__(self):
        super().__init__()
        self.row, self.number = None, 0

    def forward(self, x):
        y = self.first(x).sin()
        if self.row is not None:
            y = y * self.row
        with torch.no_grad():
            self.row = self.first.weight[self.number]
        self.number += 1
        return self.second(y).cos() + x


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_view_of_a_parameter_that_is_carried(rig, recipe):
    model, twin = both(Row)
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))


class Noted(Simple):
    """A hook shares a list with the module."""

    def __init__(self):
        super().__init__()
        notes = self.notes = []
        self.first.register_forward_hook(lambda module, args, y: notes.append(y))

    def forward(self, x):
        self.notes.clear()
        y = self.first(x).sin()
        return self.second(self.notes[-1] * y).cos() + x


def test_a_list_shared_with_a_hook(rig):
    model, twin = both(Noted)
    rig.offload(model, "recompute")
    assert_equal(steps(model), steps(twin))
    for layer in model.layers:
        layer.notes.clear()


class Registers(Simple):
    """Registers gathered parameters in recomputation, like DeepSpeed."""

    def __init__(self):
        super().__init__()
        self.gathered = set()

    def forward(self, x):
        if torch._C._current_graph_task_id() != -1:
            self.gathered.add(self.first.weight)
        return self.second(self.first(x).sin()).cos() + x


def test_registers_of_parameters_are_left_alone(rig):
    model, _ = both(Registers)
    rig.offload(model, "recompute")
    model(batch(CPU)).backward()
    assert all(layer.gathered == {layer.first.weight} for layer in model.layers)


class Plain(Simple):
    def forward(self, x):
        return self.second(self.first(x).sin()).cos() + x


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
@pytest.mark.parametrize("is_frozen", [True, False], ids=["thawed", "frozen"])
def test_requires_grad_changes_between_forward_and_backward(rig, recipe, is_frozen):
    results = []
    for model in both(Plain):
        if not results:
            rig.offload(model, recipe)
        results.append([])
        for number in range(2):
            for layer in model.layers:
                layer.second.requires_grad_(not is_frozen)
            loss = model(batch(CPU, number))
            for layer in model.layers:
                layer.second.requires_grad_(is_frozen)
            loss.backward()
            assert all(p.requires_grad is is_frozen for layer in model.layers for p in layer.second.parameters())
            results[-1] += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert_equal(*results)


class Norms(Simple):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.first(x).sin()) + x


@pytest.mark.parametrize("momentum", [0.0, 0.1])
def test_statistics_unchanged_once_are_not_written_twice_later(rig, momentum):
    """With a momentum of zero, and with a batch equal to the initial statistics."""
    model, twin = both(Norms)
    rig.offload(model, "recompute")
    results = []
    for each in (model, twin):
        for layer in each.layers:
            layer.norm.momentum = momentum
            layer.norm.running_var.fill_(0.0)
            torch.nn.init.zeros_(layer.first.weight)
            torch.nn.init.zeros_(layer.first.bias)
        results.append(steps(each, 1))
        for layer in each.layers:
            layer.norm.momentum = 0.1
            torch.nn.init.ones_(layer.first.weight)
        results[-1] += steps(each)
    assert_equal(*results)


def test_graphs_in_attributes_do_not_pile_up(rig):
    model, _ = both(Remembers)
    rig.offload(model, "recompute")
    held = []
    for number in range(4):
        model(batch(CPU, number))  # and no backward
        held.append(rig.engine.store_stats().used_bytes)
    assert held[1] == held[3] > 0
    for layer in model.layers:
        layer.last = None


# -- out of sight ------------------------------------------------------------------------------------------------------


class Changeable(Simple):
    """Computes from a number out of sight."""

    def __init__(self):
        super().__init__()
        self.mode = collections.UserList([0])

    def forward(self, x):
        y = self.first(x)
        if self.mode[0] == 1:
            y = y.sin()  # saves more
        elif self.mode[0] == 2:
            return y  # saves less
        elif self.mode[0] == 3:
            y = torch.cat([y, y])[: len(y) + 1]  # saves another shape
        elif self.mode[0] == 4:
            y = y.double().float()  # equal saved tensors by count and shape
        elif self.mode[0] == 5:
            y = y.exp()
        return self.second(y.cos()).sum() + x.sum()


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
@pytest.mark.parametrize(("before", "now"), [(1, 0), (0, 2), (1, 2), (0, 3), (3, 0), (0, 1), (1, 5)])
def test_a_recomputation_on_another_path_is_an_error(rig, recipe, before, now):
    class One(Stack):
        def forward(self, x):
            return self.layers[0](x * 2.0)

    model = make(lambda: One(Changeable), CPU)
    rig.offload(model, recipe)
    model.layers[0].mode[0] = before
    loss = model(batch(CPU))
    model.layers[0].mode[0] = now
    with pytest.raises(RecomputeError, match=r"layers\.0 saved .*'keep' or 'offload'"):
        loss.backward()


class Sloped(Simple):
    """Random slopes: autograd saves the memory before the kernel fills it."""

    is_last = False
    is_random = True

    def forward(self, x):
        y = functional.rrelu(self.first(x), training=self.is_random)
        return y if self.is_last else self.second(y).sin()


def test_slopes_written_late_are_correct_if_recomputation_goes_on(rig):
    model, twin = both(Sloped)
    rig.offload(model, "recompute")
    assert_equal(steps(model), steps(twin))


def test_slopes_never_written_are_correct_if_recomputation_ends(rig, monkeypatch):
    monkeypatch.setattr(Sloped, "is_last", True)
    monkeypatch.setattr(Sloped, "is_random", False)
    model, twin = both(Sloped)
    rig.offload(model, "recompute")
    assert_equal(steps(model), steps(twin))


def test_slopes_written_late_are_an_error_if_recomputation_ends(rig, monkeypatch):
    # Recomputation ends before the kernel.
    monkeypatch.setattr(Sloped, "is_last", True)
    model, _ = both(Sloped)
    rig.offload(model, "recompute")
    loss = model(batch(CPU))
    with pytest.raises(ModifiedError, match=r"rrelu in layers\.2 writes its random slopes"):
        loss.backward()
    del loss


class TwoScales(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)
        self.first, self.second = torch.nn.Module(), torch.nn.Module()
        self.first.scale = self.second.other = 2.5

    def forward(self, x):
        scale = getattr(self.first, "scale", 1.0) - getattr(self.second, "scale", 0.5)
        return x + self.mix((scale * x).tanh()) * self.first.__dict__.get("gain", 1.0)


def move(block):
    block.second.scale = block.first.__dict__.pop("scale")


def exchange_all(block):
    block.first.__dict__ = {**block.first.__dict__, "scale": 7.5}


def add(block):
    block.first.gain = 3.0


def exchange_object(block):
    block.first.scale = torch.tensor(4.5)


@pytest.mark.parametrize("change", [move, exchange_all, add, exchange_object])
def test_attributes_changed_after_some_steady_forwards(change):
    """Snapshots of attributes serve many forwards: any change between forward and backward has to be noticed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(TwoScales(), TwoScales())
    twin = copy.deepcopy(model)
    handle = ebbtide.offload(model, recipe="recompute", min_bytes=1, verify=0)
    for count in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(count))
        for each in (model, twin):
            each.zero_grad()
            loss = each(x).square().mean()
            if count == 3:
                for block in each:
                    change(block)
            loss.backward()
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)
    assert handle.stats().recomputed.count > 0


class UndoesALastChange(torch.nn.Module):
    """Changes its state for the length of a forward, and saves the last tensor before the state is back."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.scale = kind, 1.0
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        kept = self.first._parameters["weight"]
        if self.kind == "training":
            self.first.eval()
        elif self.kind == "requires_grad":
            self.second.requires_grad_(False)
        elif self.kind == "parameter":
            self.first._parameters["weight"] = torch.nn.Parameter(kept.detach() * 2)
        elif self.kind == "buffer":
            self.register_buffer("mask", torch.ones(8))
        else:
            self.scale = 2.0
        y = self.second(self.first(x).tanh() * self.scale).sin()
        self.first.train()
        self.second.requires_grad_(True)
        self.first._parameters["weight"] = kept
        self.scale = 1.0
        if self.kind == "buffer":
            del self.mask
        return y


@pytest.mark.parametrize("kind", ["training", "requires_grad", "parameter", "buffer", "attribute"])
def test_a_change_that_the_end_of_forward_undoes_is_undone_without_the_end(kind):
    """Recomputation stops at the last saved tensor."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(UndoesALastChange(kind), torch.nn.Linear(8, 1))
    twin, region = copy.deepcopy(model), model[0]
    ebbtide.offload(model, recipe={"0": "recompute"}, min_bytes=1)
    weight = region.first.weight
    for _ in range(3):
        x = torch.randn(2, 8)
        for each in (model, twin):
            each.zero_grad()
            each(x).sum().backward()
        assert all(
            one.grad is other.grad is None or torch.equal(one.grad, other.grad)
            for one, other in zip(model.parameters(), twin.parameters(), strict=True)
        )
        assert region.first.training
        assert region.first.weight is weight
        assert all(p.requires_grad for p in region.parameters())
        assert (not region._buffers, region.scale) == (True, 1.0)


class ReadsSurroundings(torch.nn.Module):
    """Makes a tensor of the default type, and takes another path with a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        factor = (torch.full((8,), 1.0 / 3.0) * 1e6).sin()
        mask = self._buffers.get("mask")
        y = self.first(x).tanh() * factor.float()
        y = y if mask is None else (y * mask).exp()
        return self.second(y).sin() * factor.sum().item()


@contextlib.contextmanager
def other_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "dtype": lambda region: other_dtype(),
    "autocast": lambda region: torch.autocast("cpu", torch.bfloat16),
    "buffer added": lambda region: region.register_buffer("mask", torch.full((8,), 2.0)),
    "buffer deleted": lambda region: delattr(region, "mask"),
}


@pytest.mark.parametrize("kind", SURROUNDINGS)
def test_recomputation_has_the_surroundings_of_forward(kind):
    """Backward runs in others, and finds them as they were."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(ReadsSurroundings(), torch.nn.Linear(8, 1))
    if kind == "buffer deleted":
        model[0].register_buffer("mask", torch.full((8,), 2.0))
    twin = copy.deepcopy(model)
    ebbtide.offload(model, recipe={"0": "recompute"}, min_bytes=1)
    x = torch.randn(2, 8)
    losses = [each(x).sum() for each in (model, twin)]
    with SURROUNDINGS[kind](model[0]) or contextlib.nullcontext():
        before = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
        for loss in losses:
            loss.backward(torch.ones((), dtype=torch.float32))
        assert (torch.get_default_dtype(), torch.is_autocast_enabled("cpu")) == before
    assert ("mask" in model[0]._buffers) == (kind == "buffer added")
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
