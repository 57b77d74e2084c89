"""Regions with a differing recomputation: a verified forward finds each, and all steps equal plain training."""

import collections
import contextlib
import copy
import enum
import gc
import itertools
import re
import threading
import types

import numpy as np
import pytest
import torch
from recipe_cases import CASES, RECIPES
from support import assert_equal
from test_offload import offload
from torch import nn
from torch.distributed.fsdp import fully_shard

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, Recipe, RecomputeError
from ebbtide._recompute.verify import Evidence, is_rounding
from ebbtide._types import Reason, Unable
from ebbtide._utils.storage import checksum_of_tensor

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


class ReadsStrides(Region):
    """The same bytes in memory, read in another order."""

    def forward(self, x):
        square = torch.tanh(self.linear(x))[:, :4].contiguous().as_strided((4, 4), (4, 1) if FACTOR == 1.0 else (1, 4))
        return torch.cat((x[:, :4] * square, x[:, 4:]), dim=1)


class ReadsConjugation(Region):
    """The same bytes in memory, conjugated when read."""

    def forward(self, x):
        z = torch.view_as_complex(torch.tanh(self.linear(x)).view(4, 4, 2)).conj()
        z = z if FACTOR == 1.0 else z.conj()
        return torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)) * z).reshape(4, 8)


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
    with pytest.warns(EbbtideWarning, match=r"layers\.\d is kept from now on, and backward has read what its forward"):
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


@pytest.mark.parametrize("kind", [ReadsGlobal, ReadsStrides, ReadsConjugation])
def test_a_change_between_forward_and_backward_is_found_too(kind):
    model, twin = make(kind), make(kind)
    handle = offload(model, recipe="recompute", verify=100)
    with pytest.warns(EbbtideWarning, match="saved other values than its forward"):
        ours = step(model, 0, exchange)
    back()
    assert_equal(ours, step(twin, 0, exchange))
    assert set(handle.stats().unable) == {Unable.DIFFERED}


def test_without_verification_a_differing_shape_is_an_error():
    model = make(SavesLess)
    offload(model, recipe="recompute")
    with pytest.raises(RecomputeError):
        steps(model, 1)


def test_a_later_forward_finds_a_later_difference():
    model, twin = make(ReadsGlobal), make(ReadsGlobal)
    handle = offload(model, recipe="recompute", verify=3)
    for seed in range(3):
        assert_equal(step(model, seed), step(twin, seed))
    assert handle.stats().unable == {}
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = step(model, 3, exchange)
    back()
    assert_equal(ours, step(twin, 3, exchange))


def test_a_planned_region_that_differs_later_is_planned_without_recomputation():
    model, twin = make(ReadsGlobal), make(ReadsGlobal)
    handle = ebbtide.offload(model, budget="64GiB", store="disk", min_bytes=1, verify=4)
    for seed in range(8):
        assert_equal(step(model, seed), step(twin, seed))
    handle.set_recipe("recompute")  # against the plan
    with pytest.warns(EbbtideWarning, match="is kept"):
        ours = step(model, 8, exchange)
    back()
    assert_equal(ours, step(twin, 8, exchange))
    assert set(handle.stats().unable) == {Unable.DIFFERED}


def moved_by_forward(handle, model, rows=4):
    before = handle.stats().out.nbytes
    model(torch.randn(rows, 8)).backward()
    return handle.stats().out.nbytes - before


class Pure(Region):
    def factor(self):
        return 2.0


def test_verified_forwards():
    """Each third, a new size of batch and a new training mode."""
    model = make(Pure)
    handle = offload(model, recipe="recompute", verify=3)
    found = [moved_by_forward(handle, model) for _ in range(5)]
    lean = min(found)  # the inputs alone
    assert [nbytes > lean for nbytes in found] == [True, False, False, True, False]
    assert moved_by_forward(handle, model, rows=64) > 16 * lean
    assert moved_by_forward(handle, model, rows=64) > 16 * lean  # the third forward
    assert moved_by_forward(handle, model, rows=64) == 16 * lean
    model.eval()
    assert moved_by_forward(handle, model) > lean
    assert moved_by_forward(handle, model) > lean  # the third forward
    assert moved_by_forward(handle, model) == lean


@pytest.mark.parametrize("inputs", ["keep", "offload"])
def test_of_a_verified_forward_nothing_but_inputs_comes_back(inputs):
    """Verified tensors in the window of what comes next would take memory and link that the step has no room for."""
    model = make(Pure)
    handle = offload(model, recipe=Recipe("recompute", inputs=inputs), verify=1)
    for _ in range(3):
        before = handle.stats().inbound.count
        moved_by_forward(handle, model)
        assert handle.stats().inbound.count - before == (len(model.layers) if inputs == "offload" else 0)


def test_an_input_that_the_region_before_has_saved_comes_back_early():
    """The parcel is the evidence's, too."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(6)))
    handle = offload(model, recipe="recompute", verify=1)
    for _ in range(3):
        before = handle.stats()
        model(torch.randn(4, 8)).sum().backward()
        after = handle.stats()
        assert after.misses.count == before.misses.count
        assert after.inbound.count - before.inbound.count <= len(model)


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


def test_a_store_without_room_verifies_nothing_and_changes_nothing():
    model = make(Pure)
    handle = offload(model, recipe="recompute", verify=1, host_limit=64)
    assert_equal(steps(model, 3), steps(make(Pure), 3))
    assert handle.stats().kept[Reason.STORE_FULL].count > 0
    assert handle.stats().unable == {}
    differing = make(CountsInArray)
    handle = offload(differing, recipe="recompute", verify=1, host_limit=64)
    steps(differing, 1)
    assert handle.stats().unable == {}  # nothing to fall back to


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


class Rearranges(nn.Module):
    """Its recomputation has the elements in other places, or negated."""

    def __init__(self, rearrange):
        super().__init__()
        self.rearrange = rearrange

    def forward(self, x):
        x = (self.rearrange(x) if FACTOR == 2.0 else x) * 1  # of one kind of node, which is compared too
        return x.tanh() * x


REARRANGED = {
    "samples exchanged": lambda x: x.flip(0),
    "tokens in reverse": lambda x: x.flip(1),
    "tokens shifted": lambda x: x.roll(1, 1),
    "halves exchanged": lambda x: x.roll(x.shape[1] // 2, 1),
    "neighbours exchanged": lambda x: torch.cat([x[:, 1:2], x[:, :1], x[:, 2:]], 1),
    "negated": lambda x: -x,
}


@pytest.mark.parametrize("rearrange", REARRANGED.values(), ids=REARRANGED)
@pytest.mark.parametrize("tokens", [61, 64, 79, 83, 122, 127, 128, 158])
def test_rearranged_elements_are_found(rearrange, tokens):
    """Sums of columns do not see what they add in another order, nor twice half of the range of a word."""
    model, gradients = nn.Sequential(Rearranges(rearrange)), []
    for expects in (contextlib.nullcontext(), pytest.warns(EbbtideWarning, match="is kept")):
        if gradients:
            offload(model, recipe={"0": "recompute"}, verify=100)
        x = torch.randn(2, tokens, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        loss = model(x.requires_grad_()).sum()
        exchange()
        with expects:
            loss.backward()
        back()
        gradients.append(x.grad)
    assert_equal(gradients[1:], gradients[:1])


def test_checksums_of_other_lengths_differ():
    """Together the checksums of both tensors would be the same."""
    evidence = Evidence(types.SimpleNamespace(pack=id, region_call=types.SimpleNamespace(keep_window=id)))
    before = torch.tensor([3.0]).expand(4), torch.tensor([0.0, 0.0, 0.0, 5.0])
    after = torch.tensor([3.0, 0.0, 0.0, 0.0]), torch.tensor([5.0]).expand(4)
    for number in (0, 1, 2):
        evidence.take(number, (*before, torch.ones(3))[number])
        evidence.note_recomputed(number, (*after, torch.ones(3))[number])
    assert evidence.differing() == [0, 1]
    assert evidence.differing() == []


def test_freed_memory_has_no_checksum_and_stays_freed():
    t = torch.ones(300)
    t.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="in freed memory of 0 bytes"):
        checksum_of_tensor(t)
    assert t.untyped_storage().nbytes() == 0


def test_a_second_backward_is_verified_too():
    model, twin = make(ReadsGlobal), make(ReadsGlobal)
    offload(model, recipe="recompute", verify=100)
    results = []
    for each, expects in ((twin, contextlib.nullcontext()), (model, pytest.warns(EbbtideWarning, match="is kept"))):
        loss = each(torch.ones(4, 8))
        loss.backward(retain_graph=True)
        exchange()
        with expects:
            loss.backward()
        back()
        results.append([p.grad for p in each.parameters()])
    assert_equal(results[1], results[0])


def test_regions_with_collectives_are_not_verified(monkeypatch):
    """After a verdict on a single rank, the ranks would recompute different collectives."""
    monkeypatch.setattr("ebbtide._recompute.frame.collective_count", itertools.count().__next__)
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


class ReadsGlobalPath(Region):
    """By a global that changes between forward and backward: sine or tanh, which save equal shapes."""

    def forward(self, x):
        y = self.linear(x)
        return x * (torch.tanh(y) + y.exp() if FACTOR > 0 else torch.exp(y) + y.tanh())


def test_another_path_with_equal_shapes_is_noticed_in_the_first_forward_and_each_17th():
    global FACTOR
    model = nn.Sequential(ReadsGlobalPath(), nn.Linear(8, 1))
    ebbtide.offload(model, recipe={"0": "recompute"}, min_bytes=1)
    noticed = []
    for step in range(36):
        FACTOR = 1.0
        loss = model(torch.randn(2, 8)).sum()
        FACTOR = -1.0
        try:
            loss.backward()
        except RecomputeError:
            noticed.append(step)
    assert noticed == [0, 17, 34]


class Manager:
    """An object with contents that no attribute shows."""

    def __init__(self, x):
        self.value = lambda: x


class Manages(nn.Module):
    """Holds something for the length of a forward, whose last saved tensor comes before the end."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.manager, self.stack, self.tail = kind, None, [], lambda y: y
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if self.kind == "attribute":
            assert self.manager is None
            self.manager = Manager(x)
        else:
            assert not self.stack
            self.stack.append(Manager(x))
        y = self.tail(self.second(self.first(x).tanh()).sin())
        self.manager = None
        self.stack.clear()
        return y


def check_managed(model, recipe, steps=7, tail=None):
    """Every third step is verified. Returns the handle."""
    twin = copy.deepcopy(model)
    handle = ebbtide.offload(model, recipe={"0": recipe}, min_bytes=1, verify=3)
    for each in (model, twin):
        each[0].tail = tail or each[0].tail
    for _ in range(steps):
        x = torch.randn(2, 8)
        for each in (model, twin):
            each.zero_grad()
            each(x).sum().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert model[0].manager is None
        assert not model[0].stack
    return handle


@pytest.mark.parametrize("kind", ["attribute", "container"])
@pytest.mark.parametrize(
    "recipe",
    ["recompute", "selective", Recipe("selective", sites=(0, 1), prune=(0, 1))],
    ids=["recompute", "selective", "pruned"],
)
def test_recomputation_reaches_the_code_that_takes_side_effects_back(kind, recipe):
    torch.manual_seed(0)
    handle = check_managed(nn.Sequential(Manages(kind), nn.Linear(8, 1)), recipe, tail=lambda y: y.add_(1).mul_(2))
    assert handle.stats().recomputed.count > 0
    assert handle.stats().unable == {}


@pytest.mark.filterwarnings("ignore:.* is kept from now on:ebbtide.EbbtideWarning")
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_region_is_kept_if_its_end_cannot_be_reached(error):
    calls = []

    def tail(y):
        calls.append(len(calls))
        if len(calls) == 2:  # the second recomputation of the first step: the first one stops ahead
            raise error("the end of the recomputation")
        return y

    torch.manual_seed(0)
    handle = check_managed(nn.Sequential(Manages("attribute"), nn.Linear(8, 1)), "recompute", tail=tail)
    assert list(handle.stats().unable) == [Unable.DIFFERED]


def test_a_forward_that_raised_is_recomputed_up_to_its_last_saved_tensor():
    """After the error, tensors saved before can still be read."""
    left, should_raise = [], [False]

    def tail(y):
        left[:] = [y]
        if should_raise[0]:
            raise ValueError("behind")
        return y

    torch.manual_seed(0)
    model = nn.Sequential(Manages("attribute"), nn.Linear(8, 1))
    handle = check_managed(model, "recompute", tail=tail)
    twin = copy.deepcopy(model)
    assert handle.stats().unable == {}
    should_raise[0], x = True, torch.randn(2, 8)
    grads = []
    for each in (model, twin):
        each.zero_grad()
        with pytest.raises(ValueError, match="behind"):
            each(x)
        each[0].manager = None
        left.pop().sum().backward()
        grads.append([p.grad for p in each[0].parameters()])
    assert_equal(*grads)
