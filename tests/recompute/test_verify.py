"""Verified forwards find regions that differ in recomputation, leave no trace, and all steps equal plain training."""

import collections
import contextlib
import contextvars
import copy
import enum
import gc
import itertools
import re
import threading
import weakref

import numpy as np
import pytest
import torch
from recipe_cases import CASES, RECIPES, batch
from recipe_cases import Mixed as MixedBlock
from recipe_cases import Stack as Blocks
from support import HandleRig, assert_equal
from test_offload import offload
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, RecomputeError
from ebbtide._devices.sim import SimDevice
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._recompute.verify import VerifiedFrame, is_rounding
from ebbtide._types import Reason, Unable

CPU = torch.device("cpu")
COUNTS = {"runs": 0}
FACTOR = 1.0


@pytest.fixture(autouse=True)
def _fresh_process():
    global FACTOR
    COUNTS["runs"], FACTOR = 0, 1.0
    yield
    gc.collect()
    ebbtide.release_memory()


class Region(nn.Module):
    """x * tanh(linear(x) * factor), with a factor from somewhere."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *args):
        return x * torch.tanh(self.linear(x) * self.factor(*args))


class CountsInGlobal(Region):
    def factor(self):
        COUNTS["runs"] += 1
        return COUNTS["runs"]

    def forward(self, x):
        assert COUNTS is not None  # the global stands in forward's own code
        return super().forward(x)


class ReadsGlobal(Region):
    """The training loop changes the global between forward and backward."""

    def factor(self):
        return FACTOR


class CountsInArray(Region):
    def __init__(self):
        super().__init__()
        self.runs = np.zeros(1)

    def factor(self):
        self.runs += 1
        return float(self.runs[0])


class CountsLater(CountsInArray):
    """Differs while the global is exchanged."""

    def factor(self):
        self.runs += FACTOR - 1
        return 1 + float(self.runs[0])


class CountsInScalar(Region):
    def __init__(self):
        super().__init__()
        self.runs = np.float64(1)

    def factor(self):
        self.runs = self.runs + np.float64(1)
        return float(self.runs)


class CountsInTensor(Region):
    """Neither a buffer nor a parameter, and changed in place."""

    def __init__(self):
        super().__init__()
        self.runs = torch.zeros(())

    def factor(self):
        self.runs.add_(1)
        return self.runs.clone()


class Count:
    def __init__(self):
        self.rows = {"runs": [0]}


class CountsInObject(Region):
    def __init__(self):
        super().__init__()
        self.tally = Count()

    def factor(self):
        self.tally.rows["runs"][0] += 1
        return self.tally.rows["runs"][0]


class CountsInNestedLists(Region):
    def __init__(self):
        super().__init__()
        self.rows = [[0.0], {"runs": [1.0]}]

    def factor(self):
        self.rows[1]["runs"].append(1.0)
        return sum(self.rows[1]["runs"])


class Turn(enum.Enum):
    FIRST = 1
    SECOND = 2


class TurnsEnum(Region):
    def __init__(self):
        super().__init__()
        self.turn = Turn.FIRST

    def factor(self):
        self.turn = Turn.SECOND if self.turn is Turn.FIRST else Turn.FIRST
        return self.turn.value


class CatchesAnException(Region):
    """Takes another path in recomputation."""

    def __init__(self):
        super().__init__()
        self.tally = Count()

    def forward(self, x):
        self.tally.rows["runs"][0] += 1
        try:
            if self.tally.rows["runs"][0] % 2 == 0:
                raise KeyError("a cache without the row")
            return x * torch.tanh(self.linear(x))
        except KeyError:
            return x * torch.sigmoid(self.linear(x)).sin()


class SavesLess(Region):
    def __init__(self):
        super().__init__()
        self.tally = Count()

    def forward(self, x):
        self.tally.rows["runs"][0] += 1
        x = torch.tanh(self.linear(x))
        return x if self.tally.rows["runs"][0] % 2 == 0 else x.sin().cos()


class ChangesItsInput(nn.Module):
    """Refused by recipes: recomputation would need the old input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.mul_(2).tanh())


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x, *args):
        x = x * 1.0
        for layer in self.layers:
            x = layer(x * 1.0, *args)
        return x.square().mean()


KINDS = [
    CountsInGlobal, CountsInArray, CountsInTensor, CountsInObject, CountsInNestedLists, TurnsEnum,
    CatchesAnException, SavesLess, ChangesItsInput,
]  # fmt: skip


def make(kind):
    torch.manual_seed(0)
    return Stack(kind)


def step(model, seed, between=lambda: None, *args):
    model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    loss = model(x, *args)
    between()
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters()]]


def steps(model, count, between=lambda: None):
    COUNTS["runs"] = 0
    return [t for seed in range(count) for t in step(model, seed, between)]


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_differs_is_kept_and_all_steps_are_the_plain_ones(kind, recipe):
    model = make(kind)
    handle = offload(model, recipe=recipe, verify=100)
    with pytest.warns(EbbtideWarning, match=r"layers\.\d is kept from now on, and backward reads what its forward"):
        ours = steps(model, 4)
    assert_equal(ours, steps(make(kind), 4))
    # Found in the first forward, and counted in each of the three later forwards.
    assert handle.stats().unable == {Unable.DIFFERED: 3 + 3 * 3}
    assert handle.stats().host_bytes == 0


@pytest.mark.parametrize("kind", [CountsInArray, SavesLess, ChangesItsInput])
def test_a_budget_keeps_differing_regions_in_the_first_step(kind):
    model = make(kind)
    handle = ebbtide.offload(model, budget="64GiB", store="disk", min_bytes=1)
    with pytest.warns(EbbtideWarning, match="is kept from now on"):
        ours = steps(model, 6)
    assert_equal(ours, steps(make(kind), 6))
    assert all(region.recompute_s == 0 for region in handle.profile.regions)
    assert {recipe.action for name, recipe in handle.recipes.items() if "layers" in name} <= {"keep", "offload"}


class Mixed(nn.Module):
    """A differing region between pure ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Region.__new__(Region), CountsInArray(), Region.__new__(Region)])
        for layer in self.layers[::2]:
            Region.__init__(layer)
            layer.factor = lambda: 2.0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_pure_regions_are_still_recomputed_and_profiled():
    torch.manual_seed(0)
    model = Mixed()
    twin = copy.deepcopy(model)
    handle = ebbtide.offload(model, budget="64GiB", store="disk", min_bytes=1)
    with pytest.warns(EbbtideWarning, match=r"layers\.1 is kept from now on"):
        ours = [t for seed in range(6) for t in step(model, seed)]
    assert_equal(ours, [t for seed in range(6) for t in step(twin, seed)])
    again = {region.name: region.recompute_s > 0 for region in handle.profile.regions}
    assert again == {"layers.0": True, "layers.1": False, "layers.2": True}
    kept = next(region for region in handle.profile.regions if region.name == "layers.1")
    assert kept.saved_bytes > 0


def exchange():
    global FACTOR
    FACTOR *= 2


def back():
    global FACTOR
    FACTOR = 1.0


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_change_between_forward_and_backward_is_found_too(recipe):
    model, twin = make(ReadsGlobal), make(ReadsGlobal)
    handle = offload(model, recipe=recipe, verify=100)
    with pytest.raises(RecomputeError, match=r"layers\.2 in backward .* outside of the module changed"):
        step(model, 0, exchange)
    back()
    assert_equal(step(model, 1), step(twin, 1))  # the error leaves nothing behind
    assert handle.stats().unable == {}


def test_without_verification_a_differing_shape_is_an_error():
    model = make(SavesLess)
    offload(model, recipe="recompute")
    with pytest.raises(RecomputeError):
        steps(model, 1)


def test_a_later_forward_finds_a_later_difference():
    model, twin = make(CountsLater), make(CountsLater)
    handle = offload(model, recipe="recompute", verify=3)
    for seed in range(3):
        assert_equal(step(model, seed), step(twin, seed))
    assert handle.stats().unable == {}
    exchange()
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = step(model, 3)
    assert_equal(ours, step(twin, 3))
    assert_equal(step(model, 4), step(twin, 4))


def test_a_planned_region_that_differs_later_is_planned_without_recomputation():
    model, twin = make(CountsLater), make(CountsLater)
    handle = ebbtide.offload(model, budget="64GiB", store="disk", min_bytes=1, verify=4)
    for seed in range(8):
        assert_equal(step(model, seed), step(twin, seed))
    handle.set_recipe("recompute")  # against the plan
    exchange()
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = step(model, 8)
    assert_equal(ours, step(twin, 8))
    assert set(handle.stats().unable) == {Unable.DIFFERED}


class Pure(Region):
    def factor(self):
        return 2.0


def test_verified_forwards(monkeypatch):
    """Each third, a new size of batch and a new training mode: forward runs the code of each region twice."""
    runs = []
    monkeypatch.setattr(Pure, "factor", lambda self: runs.append(self) or 2.0)
    model = make(Pure)
    offload(model, recipe="recompute", verify=3)

    def is_verified(rows=4):
        runs.clear()
        model(torch.randn(rows, 8))
        assert len(runs) in (3, 6)
        return len(runs) == 6

    assert [is_verified() for _ in range(5)] == [True, False, False, True, False]
    assert [is_verified(rows=64) for _ in range(3)] == [True, True, False]  # the second is the third of three
    model.eval()
    assert [is_verified() for _ in range(3)] == [True, True, False]


def test_a_verified_forward_moves_nothing_but_the_inputs():
    def moved(verify):
        model = make(Pure)
        handle = offload(model, recipe="recompute", verify=verify)
        steps(model, 1)
        return handle.stats().out, handle.stats().kept

    assert moved(1) == moved(0)


@pytest.mark.parametrize("verify", [None, 0])
def test_a_recipe_by_hand_is_verified_only_by_the_option(verify):
    model = make(CountsInArray)
    handle = offload(model, recipe="recompute", verify=verify)
    steps(model, 2)
    assert handle.stats().unable == {}


def test_a_planner_with_verify_0_verifies_nothing():
    model = make(CountsInArray)
    handle = ebbtide.offload(model, budget="64GiB", store="disk", min_bytes=1, verify=0)
    steps(model, 3)
    assert handle.stats().unable == {}


@pytest.mark.parametrize("verify", [-1, True, "often", 1.5])
def test_only_counts_are_accepted(verify):
    with pytest.raises(ConfigError, match=re.escape(f"verify={verify!r}: expected how many forwards")):
        offload(make(Pure), recipe="recompute", verify=verify)


def test_without_room_in_the_store_the_tensors_of_forward_stay(caplog):
    model = make(Pure)
    handle = offload(model, recipe="recompute", verify=1, host_limit=64)
    assert_equal(steps(model, 3), steps(make(Pure), 3))
    assert handle.stats().unable == {}
    differing = make(CountsInArray)
    handle = offload(differing, recipe="recompute", verify=1, host_limit=64)
    with caplog.at_level("INFO", "ebbtide"), pytest.warns(EbbtideWarning, match="is kept"):
        ours = steps(differing, 1)
    assert_equal(ours, steps(make(CountsInArray), 1))
    assert handle.stats().kept[Reason.STORE_FULL].count > 3  # more than the inputs
    assert "layers.2: the store has no room" in caplog.text


def test_iterators_as_arguments_are_found():
    def draw(model):
        numbers = itertools.count(1.0)
        return [t for seed in range(1) for t in step(model, seed, lambda: None, numbers)]

    class Draws(Region):
        def factor(self, numbers):
            return next(numbers)

    model, twin = make(Draws), make(Draws)
    offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = draw(model)
    assert_equal(ours, draw(twin))


@pytest.mark.parametrize("name", ["recompute", "pruned"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_regions_that_reproduce_themselves_pass(case, name):
    handles = []

    def apply(model):
        handles.append(offload(model, recipe=RECIPES[name], verify=1))

    assert_equal(case(apply, CPU), case(lambda model: None, CPU))
    found = [handle.stats().unable.get(Unable.DIFFERED, 0) for handle in handles]
    assert found == [0] * len(handles)


# -- unusual containers, opaque objects, collectives -------------------------------------------------------------------


class Counter(collections.Counter):
    """A container of another class."""


class CountsInSubclass(Region):
    def __init__(self):
        super().__init__()
        self.counts = Counter(runs=0)

    def factor(self):
        self.counts["runs"] += 1
        return self.counts["runs"]


class CountsInBytes(Region):
    def __init__(self):
        super().__init__()
        self.counts = bytearray(1)

    def factor(self):
        self.counts[0] += 1
        return self.counts[0]


@pytest.mark.parametrize("kind", [CountsInSubclass, CountsInBytes])
def test_containers_of_other_classes_are_put_back(kind):
    model = make(kind)
    handle = offload(model, recipe="recompute", verify=100)
    with pytest.warns(EbbtideWarning, match=r"changed \w+\.counts once more"):
        ours = steps(model, 3)
    assert_equal(ours, steps(make(kind), 3))
    assert set(handle.stats().unable) == {Unable.DIFFERED}


MASKS = collections.OrderedDict()


class CachesMasks(Region):
    """Recomputation makes an equal mask once more, and uses the masks in another order."""

    def factor(self):
        MASKS[self.linear.bias.data_ptr()] = torch.full((8,), 1.5)
        MASKS.move_to_end(self.linear.bias.data_ptr())
        return MASKS[self.linear.bias.data_ptr()]

    def forward(self, x):
        assert MASKS is not None
        return super().forward(x)


class NotANumber(Region):
    def __init__(self):
        super().__init__()
        self.box = Count()

    def factor(self):
        self.box.rows["runs"][0] = float("nan")
        return 1.5


class Opaque:
    """With slots, a lock, a mapping that must stay untouched, and a tensor without memory."""

    __slots__ = ("gone", "lock", "rows")

    def __init__(self):
        self.lock, self.rows, self.gone = threading.Lock(), {"runs": 0}, torch.ones(8)
        self.gone.untyped_storage().resize_(0)


class HasMachinery(Region):
    def __init__(self):
        super().__init__()
        self.machine = Opaque()
        self.register = {"machine": self.machine, "gone": self.machine.gone}
        self.deep = []
        for _ in range(2000):
            self.deep = [self.deep]

    def factor(self):
        self.machine.rows["runs"] += 1
        return 1.5


@pytest.mark.parametrize("kind", [CachesMasks, NotANumber, HasMachinery])
def test_changes_without_an_effect_are_no_difference(kind):
    MASKS.clear()
    model = make(kind)
    handle = offload(model, recipe="recompute", verify=1)
    assert_equal(steps(model, 3), steps(make(kind), 3))
    assert handle.stats().unable == {}


class PicksRows(Region):
    """Only an index differs."""

    def __init__(self):
        super().__init__()
        self.tally = Opaque()

    def forward(self, x):
        self.tally.rows["runs"] += 1
        rows = torch.tensor([self.tally.rows["runs"] % 3, 2])
        return self.linear(x).index_select(0, rows).sum() * x


def test_small_indices_are_compared():
    model = make(PicksRows)
    offload(model, recipe="recompute", verify=100)
    with pytest.warns(EbbtideWarning, match="saved other values than its forward"):
        ours = steps(model, 1)
    assert_equal(ours, steps(make(PicksRows), 1))


def test_a_second_backward_is_verified_too():
    model, twin = make(ReadsGlobal), make(ReadsGlobal)
    offload(model, recipe="recompute", verify=100)
    loss = model(torch.ones(4, 8))
    loss.backward(retain_graph=True)
    plain = twin(torch.ones(4, 8))
    plain.backward(retain_graph=True)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    exchange()
    with pytest.raises(RecomputeError, match="changed between forward and backward"):
        loss.backward(retain_graph=True)
    back()
    model.zero_grad()  # the layers behind the error have their gradients
    twin.zero_grad()
    loss.backward()
    plain.backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_regions_with_collectives_are_not_verified(monkeypatch):
    """After a verdict on a single rank, the ranks would recompute different collectives."""
    monkeypatch.setattr("ebbtide._recompute.verify.collective_count", itertools.count().__next__)
    model = make(CountsInArray)
    handle = offload(model, recipe="recompute", verify=1)
    steps(model, 1)
    assert handle.stats().unable == {}


def test_sharded_regions_are_verified(process_group):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))

    def sharded():
        model = make(Pure)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def local_steps(model):
        return [t.to_local() if hasattr(t, "to_local") else t for t in steps(model, 2)]

    model = sharded()
    handle = offload(model, recipe="recompute", verify=1)
    assert_equal(local_steps(model), local_steps(sharded()))
    assert handle.stats().unable == {}


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_rounding_is_distinguished_from_differences(value, monkeypatch):
    monkeypatch.setattr("ebbtide._recompute.verify._is_exact", lambda t: False)
    forward = torch.tensor([1.0, 2.0, value])
    rounded = torch.tensor([1.0, 2.0 + 2e-7, value])
    assert is_rounding(forward, rounded)
    assert not is_rounding(forward, rounded + torch.tensor([0.0, 1e-4, 0.0]))
    assert not is_rounding(forward, torch.tensor([1.0, float("inf"), value]))


def always_rounds(monkeypatch, sampled=1024):
    monkeypatch.setattr("ebbtide._recompute.verify._is_exact", lambda t: False)
    monkeypatch.setattr("ebbtide._recompute.verify._SAMPLED", sampled)


class Rounds(Region):
    """Each run rounds otherwise, or only the runs from `first` on."""

    first = 2

    def __init__(self):
        super().__init__()
        self.tally = Opaque()

    def factor(self):
        self.tally.rows["runs"] += 1
        return 2.0 + 2e-7 * max(0, self.tally.rows["runs"] + 1 - self.first)


class RoundsInBackward(Rounds):
    first = 3


@pytest.mark.parametrize("kind", [Rounds, RoundsInBackward])
def test_unordered_additions_are_no_difference(kind, monkeypatch):
    always_rounds(monkeypatch)
    model = make(kind)
    handle = offload(model, recipe="recompute", verify=1)
    for ours, plain in zip(steps(model, 1), steps(make(Pure), 1), strict=True):
        torch.testing.assert_close(ours, plain)
    assert handle.stats().unable == {}


class Spikes(Rounds):
    def factor(self):
        spike = torch.zeros(4, 8)
        spike[3, 7] = super().factor() - 2.0
        return 2.0 + 1e4 * spike


def test_a_second_trial_compares_all_elements(monkeypatch):
    always_rounds(monkeypatch, sampled=1)
    model = make(Spikes)
    offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match="saved other values than its forward"):
        ours = steps(model, 1)
    assert_equal(ours, steps(make(Spikes), 1))


# -- a trial leaves no trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_trials_on_a_simulated_device(name):
    """Moved inputs and outputs, dropout, batch norms, several kinds of saved tensors: no race, no leak."""
    results = []
    for verify in (1, None):
        torch.manual_seed(0)
        model = Blocks(MixedBlock)
        rig = HandleRig(SimDevice(4, "shuffled"))
        handle = rig.offload(model, RECIPES[name] if verify else None, verify=verify)
        results.append([])
        for number in range(3):
            model(batch(CPU, number)).backward()
            results[-1] += [torch.get_rng_state(), *(p.grad.clone() for p in model.parameters()), *model.buffers()]
        assert handle.stats().unable == {}
        rig.check_no_races()
        rig.check_at_rest()
    assert_equal(*results)


class DrawsOnlyInRecomputation(Region):
    def __init__(self):
        super().__init__()
        self.tally = Opaque()

    def factor(self):
        self.tally.rows["runs"] += 1
        return torch.rand(1) if self.tally.rows["runs"] > 1 else 2.0


def test_random_numbers_of_a_trial_alone_are_put_back():
    model = make(DrawsOnlyInRecomputation)
    offload(model, recipe="recompute", verify=1)
    before = torch.get_rng_state()
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = steps(model, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(ours, steps(make(DrawsOnlyInRecomputation), 1))


class SetsASeed(Region):
    """Saves a tensor before an unknown state of the generator, and more behind."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        torch.manual_seed(3)
        return y.sin() * torch.rand(8)


def test_a_trial_ends_before_an_unknown_state_of_a_generator():
    model = make(SetsASeed)
    handle = offload(model, recipe="recompute", verify=1)
    torch.manual_seed(1)
    with pytest.warns(EbbtideWarning, match="random number generator"):
        ours = [*steps(model, 1), torch.get_rng_state()]
    torch.manual_seed(1)
    assert_equal(ours, [*steps(make(SetsASeed), 1), torch.get_rng_state()])
    assert set(handle.stats().unable) == {Unable.UNKNOWN_RNG}


class WritesDataOfItsInput(Region):
    """Without a new version."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        x.data.mul_(2.0)
        return y.sin() + x


class SavesItsCounter(CountsInTensor):
    """A trial changes a tensor that forward has saved."""

    def factor(self):
        self.runs.add_(1)
        return self.runs


def test_what_forward_saved_is_read_as_saved():
    model = make(SavesItsCounter)
    offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = steps(model, 3)
    assert_equal(ours, steps(make(SavesItsCounter), 3))


def test_an_input_changed_without_a_version_is_not_changed_once_more():
    """Gradients are of the bytes at the save, as of all moved tensors."""
    model = make(WritesDataOfItsInput)
    offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match=r"layers\.0 changes a tensor in place that was passed"):
        ours = model(torch.ones(4, 8))
    assert_equal([ours], [make(WritesDataOfItsInput)(torch.ones(4, 8))])


COLLECTED = contextvars.ContextVar("COLLECTED", default=None)
OUT_OF_SIGHT = []


def store(t):
    OUT_OF_SIGHT.append(t)


class ReadsHooks(Stack):
    """The loss reads what hooks on the regions have stored."""

    def __init__(self, place):
        super().__init__(Pure)
        self.stored = stored = {}
        for number, layer in enumerate(self.layers):
            stored[number] = None
            layer.linear.register_forward_hook(getattr(self, place)(number, stored))
        del self.stored

    def list(self, number, stored):
        rows = stored[number] = []
        return lambda module, args, out: rows.append(out)

    def dict(self, number, stored):
        def hook(module, args, out):
            stored[number] = out

        return hook

    def variable(self, number, stored):
        def hook(module, args, out):
            if COLLECTED.get() is not None:
                COLLECTED.get().append(out)

        return hook

    def forward(self, x):
        token = COLLECTED.set([])
        try:
            loss = super().forward(x)
            for layer in self.layers:
                for hook in layer.linear._forward_hooks.values():
                    for cell in hook.__closure__ or ():
                        loss = loss + self.total(cell.cell_contents)
            return loss + self.total(COLLECTED.get())
        finally:
            COLLECTED.reset(token)

    def total(self, stored):
        if isinstance(stored, torch.Tensor):
            return stored.sin().sum()
        rows = stored.values() if isinstance(stored, dict) else stored if isinstance(stored, list) else ()
        return sum(map(self.total, rows))


@pytest.mark.parametrize(("place", "is_kept"), [("list", True), ("dict", False), ("variable", False)])
def test_hooks_store_the_tensors_of_forward(place, is_kept):
    torch.manual_seed(0)
    model = ReadsHooks(place)
    torch.manual_seed(0)
    twin = ReadsHooks(place)
    handle = offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match="is kept") if is_kept else contextlib.nullcontext():
        ours = step(model, 0)
    assert_equal(ours, step(twin, 0))
    assert bool(handle.stats().unable) is is_kept


class StoresOutOfSight(Pure):
    def forward(self, x):
        y = super().forward(x)
        store(y)
        return y.sin()


def test_a_tensor_stored_out_of_sight_is_reported():
    model = make(StoresOutOfSight)
    handle = offload(model, recipe="recompute", verify=1)
    with pytest.warns(EbbtideWarning, match=r"a tensor of the recomputation of layers\.0 was stored outside"):
        ours = steps(model, 1)
    assert_equal(ours, steps(make(StoresOutOfSight), 1))
    assert handle.stats().unable == {Unable.DIFFERED: 3}
    OUT_OF_SIGHT.clear()


# -- regions in regions, several calls, exceptions, threads ------------------------------------------------------------


class Outer(Region):
    """Calls an inner region twice."""

    def __init__(self, kind):
        super().__init__()
        self.inner = kind()

    def factor(self):
        return 2.0

    def forward(self, x):
        return super().forward(self.inner(self.inner(x.sin()).cos()))


@pytest.mark.parametrize("outer", ["recompute", "selective", "offload"])
@pytest.mark.parametrize("kind", [Pure, CountsInArray, CountsLater])
def test_regions_in_regions(kind, outer):
    model, twin = (make(lambda: Outer(kind)) for _ in range(2))
    handle = offload(model, recipe={"layers.*": outer, "layers.*.inner": "recompute"}, verify=1)
    with pytest.warns(EbbtideWarning, match="is kept") if kind is CountsInArray else contextlib.nullcontext():
        ours = [t for seed in range(3) for t in step(model, seed)]
    assert_equal(ours, [t for seed in range(3) for t in step(twin, seed)])
    assert set(handle.stats().unable) == ({Unable.DIFFERED} if kind is CountsInArray else set())


class Raises(Pure):
    def forward(self, x):
        y = super().forward(x)
        if FACTOR > 1:
            raise KeyError("a batch without the key")
        return y.sin()


def test_a_forward_that_raises_is_not_tried_and_the_next_is():
    model, twin = make(Raises), make(Raises)
    handle = offload(model, recipe="recompute", verify=1)
    exchange()
    with pytest.raises(KeyError):
        step(model, 0)
    back()
    assert_equal(steps(model, 2), steps(twin, 2))
    assert handle.stats().unable == {}


def test_without_grad_nothing_is_tried(monkeypatch):
    runs = []
    monkeypatch.setattr(Pure, "factor", lambda self: runs.append(self) or 2.0)
    model = make(Pure)
    offload(model, recipe="recompute", verify=1)
    with torch.no_grad():
        model(torch.ones(4, 8))
    assert len(runs) == 3


def test_a_captured_forward_is_not_tried(monkeypatch):
    runs = []
    monkeypatch.setattr(Pure, "factor", lambda self: runs.append(self) or 2.0)
    monkeypatch.setattr(SavedTensorHooks, "is_captured", lambda self, devices: True)
    model = make(Pure)
    offload(model, recipe="recompute", verify=1)
    ours = step(model, 0)
    assert len(runs) == 3 + 3
    assert_equal(ours, step(make(Pure), 0))


@pytest.mark.parametrize("end", ["backward", "retained", "dropped"])
@pytest.mark.parametrize("kind", [Pure, CountsInArray])
@pytest.mark.filterwarnings("ignore:.* is kept from now on")
def test_nothing_of_a_verified_forward_outlives_its_graph(kind, end):
    alive = weakref.WeakSet()
    model = make(kind)
    handle = offload(model, recipe="recompute", verify=1)
    gc.collect()
    gc.disable()  # no cycles: all objects end with the graph
    try:
        with pytest.MonkeyPatch.context() as patch:
            init = VerifiedFrame.__init__
            patch.setattr(VerifiedFrame, "__init__", lambda self, *args: init(self, *args) or alive.add(self))
            loss = model(torch.ones(4, 8))
            assert len(alive) == 3
            if end != "dropped":
                loss.backward(retain_graph=end == "retained")
            del loss
            assert len(alive) == 0
    finally:
        gc.enable()
    assert handle.stats().host_bytes == 0


def test_threads_verify_one_model_each():
    def run(model, results):
        results += [t for seed in range(4) for t in step(model, seed)]

    models = [make(Pure) for _ in range(3)]
    plain, ours = [], [[] for _ in models]
    run(make(Pure), plain)
    handles = [offload(model, recipe="recompute", verify=1) for model in models]
    threads = [threading.Thread(target=run, args=pair) for pair in zip(models, ours, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, handle in zip(ours, handles, strict=True):
        assert_equal(results, plain)
        assert handle.stats().unable == {}


class LiveBytes(TorchDispatchMode):
    """Bytes of the results of all operators, while alive, and the peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known:
                storage = t.untyped_storage()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, nbytes):
        self.now -= nbytes


class Saves(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            x = x.sin()
        return self.linear(x)


def test_the_peak_of_a_verified_forward_is_one_region_higher():
    def peak(recipe, verify):
        model = make(Saves)
        offload(model, recipe=recipe, verify=verify)
        x = torch.ones(512, 8)
        with LiveBytes() as live:
            model(x)
        return live.peak / (x.numel() * x.element_size())

    lean = peak("recompute", 0)
    assert peak("recompute", 1) <= lean + 7  # a region saves 7 tensors
    assert peak("keep", 0) > lean + 7
