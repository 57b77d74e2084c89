"""Release points of plans on the simulator: bytes waiting to leave after every saved tensor, and bytes coming back.

All tensors saved in the blocks are parcels of equal size, the unit of all figures.
"""

import pytest
import torch
from cases import Data
from support import HandleRig, assert_equal
from torch import nn

from ebbtide import Plan, Recipe, RegionPlan
from ebbtide._devices.sim import SimDevice
from ebbtide._engine.engine import Engine
from ebbtide._events import EventKind
from ebbtide._types import Wait

CPU = torch.device("cpu")
SHAPE = (6, 8)
UNIT = 4 * 6 * 8
ALL = 100 * UNIT


class Sines(nn.Module):
    """Four saved tensors; calls `note` after each, with a name."""

    def __init__(self, name, note):
        super().__init__()
        self.name = name
        self.note = note

    def forward(self, x):
        for _ in range(4):
            x = x.sin()
            self.note(self.name, x)
        return x


class ScaledSines(Sines):
    """Two saved tensors, of a parameter: kept."""

    def __init__(self, name, note):
        super().__init__(name, note)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SHAPE[1]), requires_grad=False)

    def forward(self, x):
        for _ in range(2):
            x = x * self.weight
            self.note(self.name, x)
        return x


class Tower(nn.Module):
    """Three blocks in `order`; the only saved tensor outside of the blocks comes last."""

    def __init__(self, block, order, note):
        super().__init__()
        self.layers = nn.ModuleList(block(number, note) for number in range(3))
        self.order = order
        self.note = note

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
        x = x.exp()
        self.note(None, x)
        return x.sum()


class Rotated(Sines):
    """Recomputed from two inputs."""

    def forward(self, x, table):
        return super().forward(x * table)


class WithTable(Tower):
    """The blocks share an input, as language models share rotary embeddings."""

    def forward(self, x):
        table = torch.linspace(0.5, 1.5, x.numel()).view(x.shape)
        for layer in self.layers:
            x = layer(x, table)
        x = x.exp()
        self.note(None, x)
        return x.sum()


class Run:
    """A tower with a plan on the simulator, and a twin without.

    Attributes:
        waiting: units waiting to leave, still on the device, after every saved tensor of the last forward.
        events: kinds and sites of the last step.
    """

    def __init__(self, plan, block=Sines, order=(0, 1, 2), late="late", tower=Tower, **limits):
        self.rig = HandleRig(SimDevice(3, late), **{"window": ALL, "prefetch": ALL, **limits})
        self.model, self.twin = tower(block, order, self.note), tower(block, order, lambda name, x: None)
        self.handle = self.rig.offload(self.model)
        self.handle.set_plan(plan)
        self.handle.subscribe(lambda event: self.events.append((event.kind, event.site)))
        self.ahead = []
        self.step()

    def step(self):
        """A step of model and twin, equal in all bits; nothing is left behind."""
        self.waiting, self.events, self.ahead = [], [], []
        assert_equal(*(self._step(model) for model in (self.model, self.twin)))
        self.rig.check_no_races()
        self.rig.check_at_rest()
        return self

    def _step(self, model):
        batch = Data(CPU).leaf(*SHAPE)
        loss = model(batch * 1.5)
        loss.backward()
        return [loss.detach(), batch.grad]

    def note(self, name, x):
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation
        self.waiting.append(self.rig.engine._outbound.resident_bytes // UNIT)
        x.register_hook(lambda grad: self.ahead.append((name, self.rig.engine._ahead_bytes // UNIT)))

    def of(self, what):
        return [site for happened, site in self.events if happened is what]


BLOCKS = {f"layers.{number}": RegionPlan("offload") for number in range(3)}


def planned(*releases, outside=None):
    """A plan with release points in the blocks, by number; None: no points."""
    regions = {
        f"layers.{number}": RegionPlan("offload", release)
        for number, release in enumerate(releases)
        if release is not None
    }
    return Plan(regions) if outside is None else Plan({**BLOCKS, **regions}, outside=RegionPlan("offload", outside))


# -- waiting -----------------------------------------------------------------------------------------------------------

# After each of the four saved tensors of each block, and after the last outside.
WAITING = {
    "no points": (planned((), (), ()), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
    "nothing may wait": (planned((), ((2, 0),)), [1, 2, 3, 4, 5, 6, 1, 1, 1, 1, 1, 1, 1]),
    "two may wait": (planned((), ((2, 2 * UNIT),)), [1, 2, 3, 4, 5, 6, 2, 2, 2, 2, 2, 2, 2]),
    "more may wait than does": (planned((), ((2, 9 * UNIT),)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9]),
    "before the first send": (planned(((0, 0),)), [1] * 13),
    "at the last save": (planned((), (), ((3, 0),)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 1]),
    "never reached": (planned((), ((4, 0),)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
    "several in a block": (
        planned((), ((0, 0), (2, 3 * UNIT), (3, ALL))),
        [1, 2, 3, 4, 1, 1, 2, 3, 4, 5, 6, 7, 8],
    ),
    "several blocks": (
        planned(((3, 0),), ((1, ALL),), ((2, UNIT),)),
        [1, 2, 3, 1, 1, 2, 3, 4, 5, 6, 1, 1, 1],
    ),
    "holds on in blocks without": (planned(((0, 0),), (), ((1, ALL),)), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5]),
    "holds on in blocks not named": (planned(((0, 0),), None, ((1, ALL),)), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5]),
    "outside": (planned((), outside=((0, 0),)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1]),
    "outside, then all may wait": (planned(((0, 0),), outside=((0, ALL),)), [1] * 12 + [2]),
}


@pytest.mark.parametrize("late", ["late", "early", "shuffled"])
@pytest.mark.parametrize("name", WAITING)
def test_what_waits_after_each_saved_tensor(name, late):
    plan, waiting = WAITING[name]
    run = Run(plan, late=late)
    for _ in range(3):
        assert run.waiting == waiting
        released = run.of(EventKind.RELEASED)
        assert len(released) == len(set(released)) == 13 - waiting[-1]
        run.step()


def test_what_waits_leaves_in_the_order_in_which_it_was_sent():
    run = Run(planned((), ((1, 2 * UNIT), (3, 0))))
    sites = [f"layers.{number}#0.{index}" for number in range(3) for index in range(4)]
    assert run.of(EventKind.SENT) == [*sites, "<root>#0.0"]
    assert run.of(EventKind.RELEASED) == sites


def test_the_window_of_a_step_ends_with_it():
    run = Run(planned((), (), ((0, 0),)))
    waiting = run.waiting
    assert waiting[0] < waiting[7] > waiting[8]
    assert run.step().waiting == waiting


def test_a_region_entered_twice_comes_to_its_points_twice():
    run = Run(planned((), ((2, 0), (3, ALL))), order=(0, 1, 0, 1))
    once = [5, 6, 1, 2]
    for _ in range(3):
        assert run.waiting == [1, 2, 3, 4, *once, 3, 4, 5, 6, 7, 8, 1, 2, 3]
        assert {site.split(".")[1] for site in run.of(EventKind.RELEASED)} == {"0#0", "0#1", "1#0", "1#1"}
        run.step()


KEPT = {
    "a region that is kept": RegionPlan("keep", ((1, 0),)),
    "a save that is kept": RegionPlan(Recipe("offload", sites=(0,)), ((1, 0),)),
    "a region whose other saves travel": RegionPlan(Recipe("offload", sites=(0, 2, 3)), ((1, 0),)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_point_on_a_saved_tensor_that_stays_releases_what_waits(name):
    run = Run(Plan({"layers.1": KEPT[name]}))
    sent_there = KEPT[name].recipe.sites or ()
    after = [4 + (0 in sent_there), 0, *(int(2 in sent_there),) * 2]
    for _ in range(3):
        assert run.waiting == [1, 2, 3, 4, *after, 1, 1, 1, 1, 1]
        run.step()


def test_a_point_on_a_parameter_releases_what_waits():
    run = Run(planned((), ((1, 0),)), block=lambda name, note: (ScaledSines if name == 1 else Sines)(name, note))
    assert run.waiting == [1, 2, 3, 4, 4, 0, 1, 1, 1, 1, 1]


def test_points_are_counted_by_the_saved_tensors_of_the_region_itself():
    """An inner region counts its own."""

    class Around(Sines):
        def __init__(self, name, note):
            super().__init__(name, note)
            self.inner = Sines(name, note)

        def forward(self, x):
            return super().forward(self.inner(x))

    inside = {"layers.1.inner": RegionPlan("offload")}
    whole = Run(Plan({"layers.1": RegionPlan("offload", ((1, 0),))}), block=Around)
    apart = Run(Plan({"layers.1": RegionPlan("offload", ((1, 0),)), **inside}), block=Around)
    assert whole.waiting == [*range(1, 10), *[1] * 16]
    assert apart.waiting == [*range(1, 14), *[1] * 12]


def test_a_region_inside_goes_on_with_the_window_around_it_and_the_other_way_round():
    class Around(Sines):
        def __init__(self, name, note):
            super().__init__(name, note)
            self.inner = Sines(name, note)

        def forward(self, x):
            return super().forward(self.inner(super().forward(x)))

    def waiting(outer, inner):
        run = Run(
            Plan({"layers.0": RegionPlan("offload", outer), "layers.0.inner": RegionPlan("offload", inner)}), Around
        )
        return run.waiting[:13]

    assert waiting(((0, 0),), ()) == [1] * 13
    assert waiting(((0, 0), (5, ALL)), ()) == [*[1] * 9, 2, 3, 4, 5]
    assert waiting((), ((1, 0),)) == [1, 2, 3, 4, 5, *[1] * 8]
    assert waiting(((4, ALL),), ((1, 0),)) == [1, 2, 3, 4, 5, 1, 1, 1, 2, 3, 4, 5, 6]


def test_a_new_plan_holds_from_the_next_forward_on():
    run = Run(planned((), ((2, 0),)))
    for plan, waiting in WAITING.values():
        run.handle.set_plan(plan)
        assert run.step().waiting == waiting


def test_a_release_at_a_point_waits_for_the_copy(monkeypatch):
    """Proof that the simulator checks releases at points: the run has no others."""
    kept = {"layers.1": KEPT["a region that is kept"], "layers.2": RegionPlan("keep")}
    plan = Plan({**BLOCKS, **kept}, RegionPlan("keep"))
    assert len(Run(plan).of(EventKind.RELEASED)) == 4
    wait = SimDevice.wait
    monkeypatch.setattr(SimDevice, "wait", lambda self, s, e, w: None if w is Wait.LANDED else wait(self, s, e, w))
    with pytest.raises(AssertionError):
        Run(plan)


# -- stalls ------------------------------------------------------------------------------------------------------------


def test_a_stall_at_a_point_counts_from_there():
    """And not from an earlier release of a parcel that was not sent before."""

    class Watching(Run):
        def note(self, name, x):
            super().note(name, x)
            known_points.append(self.rig.engine._outbound._compute_point)

    known_points = []
    run = Watching(Plan({}))  # everything was used from the device: nothing is sent before the release now
    run.handle.set_plan(planned(((1, 0), (2, ALL)), ((0, 0),)))
    run.step()
    assert run.of(EventKind.SENT) == run.of(EventKind.RELEASED) != []
    assert set(known_points) == {None}


# -- recomputed regions ------------------------------------------------------------------------------------------------

EVERY_SINE = Recipe("selective", ops=(lambda op, *args, **kwargs: "sin" in str(op),))
"""Saves the input of a block, then four outputs. The last is the next block's input, dropped from the second
step on, since backward does not need it."""

RECOMPUTED = {
    "recompute": ("recompute", {}, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]),
    "recompute, at the input": ("recompute", {1: ((0, 0),)}, [1] * 13),
    "recompute, never reached": ("recompute", {1: ((1, 0),)}, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]),
    "recompute, several": ("recompute", {0: ((0, 0),), 2: ((0, ALL),)}, [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3]),
    "selective": (EVERY_SINE, {}, [2, 3, 4, 4, 6, 7, 8, 8, 10, 11, 12, 12, 13]),
    "selective, at an output": (EVERY_SINE, {1: ((2, 0),)}, [2, 3, 4, 4, 6, 1, 1, 1, 1, 1, 1, 1, 1]),
    "selective, at one not held": (EVERY_SINE, {1: ((4, 0),)}, [2, 3, 4, 4, 6, 7, 8, 0, 1, 1, 1, 1, 1]),
    "selective, several": (
        EVERY_SINE,
        {0: ((1, 0), (2, ALL)), 1: ((0, 0), (3, ALL))},
        [1, 2, 3, 3, 1, 1, 2, 2, 4, 5, 6, 6, 7],
    ),
}


@pytest.mark.parametrize("late", ["late", "early", "shuffled"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_waits_after_each_operator_of_regions_that_are_recomputed(name, late):
    recipe, releases, waiting = RECOMPUTED[name]
    run = Run(
        Plan({f"layers.{number}": RegionPlan(recipe, releases.get(number, ())) for number in range(3)}), late=late
    )
    for _ in range(3):
        assert run.step().waiting == waiting
        assert len(run.of(EventKind.FORWARDED)) == waiting[-1]  # the rest had left


# -- fetching ahead ----------------------------------------------------------------------------------------------------


def prefetching(*units, outside=None, recipe="offload"):
    """A plan with prefetch windows in the blocks, by number; None: no window."""
    regions = {
        f"layers.{number}": RegionPlan(recipe, prefetch_bytes=bound * UNIT)
        for number, bound in enumerate(units)
        if bound is not None
    }
    if outside is None:
        return Plan(regions)
    return Plan({**BLOCKS, **regions}, outside=RegionPlan("offload", prefetch_bytes=outside * UNIT))


# Units back and not needed yet, at the gradient of each saved tensor's result: first the tensor outside, next the
# blocks' tensors, last to first. All tensors of the blocks are away, and the tensor outside is not.
MANY = 100
AHEAD = {
    "as the context says": (ALL, prefetching(), [0, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
    "as the context says, nothing": (1, prefetching(), [0] * 13),
    "outside": (1, prefetching(outside=3), [0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    "each block for itself": (1, prefetching(3, 2, 4), [0, 0, 3, 3, 3, 3, 2, 1, 1, 1, 2, 2, 1]),
    "less than the context says": (ALL, prefetching(2, 2, 2, outside=1), [0, 0, *[1] * 11]),
    "in one block": (1, prefetching(None, MANY, None), [0, 0, 0, 0, 0, 0, 7, 6, 5, 4, 3, 2, 1]),
    "in none but one": (ALL, prefetching(None, 1, 1, outside=1), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 2, 1]),
    "run again, as the context says": (
        ALL,
        prefetching(None, None, MANY, recipe="recompute"),
        [0, 9, 8, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1],
    ),
    "run again, more than the context says": (
        1,
        prefetching(MANY, MANY, MANY, recipe="recompute"),
        [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    ),
    "run again, less than the context says": (
        ALL,
        prefetching(None, None, 3, outside=1, recipe=Recipe("recompute", inputs="keep")),
        [0, 0, 3, 3, 3, 3, 7, 6, 5, 4, 3, 2, 1],
    ),
    "run again, all of one block together": (
        ALL,
        prefetching(1, 1, 1, outside=1, recipe=EVERY_SINE),
        [0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("name", AHEAD)
def test_what_comes_back_early(name):
    context, plan, ahead = AHEAD[name]
    run = Run(plan, window=1, prefetch=context).step()  # two steps to learn from: outputs are dropped in the second
    for _ in range(3):
        run.step()
        assert [len(run.of(EventKind.FORWARDED)), *(units for _, units in run.ahead)] == [1, *ahead]
        assert [block for block, _ in run.ahead] == [None, *[2] * 4, *[1] * 4, *[0] * 4]


RUN_AGAIN = Recipe("recompute", inputs="keep")
BEFORE = {
    **{name: plan for name, (_, plan, _) in AHEAD.items() if name.startswith("run again")},
    "the last need is in the middle": ["keep", "offload", "keep"],
    "the last need stays": [Recipe("offload"), Recipe("offload", sites=(0,)), "keep"],
}
NOW = {
    **{name: AHEAD[name][1] for name in ("as the context says", "each block for itself", "in one block")},
    "looked ahead before the first need": ["offload", "offload", RUN_AGAIN],
    "nothing to move at first": ["keep", "offload", RUN_AGAIN],
}


def as_plan(blocks):
    if isinstance(blocks, Plan):
        return blocks
    regions = {f"layers.{k}": RegionPlan(recipe, prefetch_bytes=4 * UNIT) for k, recipe in enumerate(blocks)}
    return Plan(regions, outside=RegionPlan("keep"))


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", NOW)
def test_after_other_recipes_nothing_comes_early_by_their_order(name, before):
    """What an order before would fetch, and backward needs late, comes on top of the memory that the plan counts on."""
    context = AHEAD[name][0] if name in AHEAD else 1
    fresh, other = (Run(as_plan(plan), window=1, prefetch=context) for plan in (NOW[name], BEFORE[before]))
    first = fresh.ahead, fresh.of(EventKind.MISSED)
    second = fresh.step().ahead, fresh.of(EventKind.MISSED)
    other.step().handle.set_plan(as_plan(NOW[name]))
    assert (other.step().ahead, other.of(EventKind.MISSED)) in (first, second)
    for _ in range(2):  # recipes in turns, each with an order of its own
        other.handle.set_plan(as_plan(BEFORE[before]))
        other.step().handle.set_plan(as_plan(NOW[name]))
        assert len(other.step().of(EventKind.MISSED)) <= len(second[1])


def test_what_blocks_share_comes_early_alone():
    """Backward needs the shared input first in block 1. In block 2 the input has room behind the block's own. Block 0
    saved the input and needs it too, but has to wait with the rest."""
    stays, travels = Recipe("recompute", inputs="keep"), Recipe("recompute")
    regions = {"layers.0": (travels, MANY), "layers.1": (travels, 1), "layers.2": (stays, 2)}
    plan = Plan({name: RegionPlan(recipe, prefetch_bytes=room * UNIT) for name, (recipe, room) in regions.items()})
    run = Run(plan, Rotated, tower=WithTable, window=1, prefetch=1)
    for _ in range(4):
        run.step()
    assert [units for name, units in run.ahead if name == 2] == [0, 2, 2, 2]  # fetched by the recomputation
    assert run.of(EventKind.FETCHED) == ["layers.1#0.0", "layers.0#0.1", "layers.0#0.0"]


def test_the_end_of_a_step_and_the_begin_of_the_next_are_no_recompute_batch():
    """Block 0 alone moves: last needed by backward, and first expected in the next step."""
    stays = Recipe("selective", ops=EVERY_SINE.ops, inputs="keep", outputs="keep")
    regions = {"layers.0": (EVERY_SINE, MANY), "layers.1": (stays, MANY), "layers.2": (stays, 1)}
    plan = Plan(
        {name: RegionPlan(recipe, ((0, 0),), room) for name, (recipe, room) in regions.items()},
        outside=RegionPlan("keep"),
    )
    run = Run(plan, window=1, prefetch=1)
    for _ in range(4):
        run.step()
        assert {units for name, units in run.ahead if name == 2} == {0}
        assert run.of(EventKind.FETCHED) == [f"layers.0#0.{index}" for index in range(4)]


def test_what_a_step_needs_last_is_looked_ahead_to_as_well():
    """Block 2 is recomputed first, and needs nothing back: when it looks ahead the step has needed nothing yet, and the
    last site is the last of the step before."""
    moves = RegionPlan(Recipe("offload"), ((0, 0),), ALL)
    stays = RegionPlan(Recipe("recompute", inputs="keep"), ((0, 0),), ALL)
    plan = Plan({"layers.0": moves, "layers.1": moves, "layers.2": stays}, outside=RegionPlan("keep"))
    run = Run(plan, window=1, prefetch=1)
    missed = []
    for _ in range(4):
        run.step()
        missed.append(run.of(EventKind.MISSED))
    assert missed == [["layers.1#0.3"], [], [], []]


class Twice(Run):
    def _step(self, model):
        batch = Data(CPU).leaf(*SHAPE)
        loss = model(batch * 1.5)
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), batch.grad]


def test_what_is_read_twice_is_looked_ahead_to_twice():
    """The first backward leaves as much on the device as may be back early. The rest comes a second time."""
    run = Twice(planned((), (), ()), window=1, prefetch=4 * UNIT)
    for _ in range(3):
        run.step()
        fetched = run.of(EventKind.FETCHED)
        assert run.of(EventKind.MISSED) == []
        assert sorted(fetched.count(site) for site in set(fetched)) == [1] * 4 + [2] * 8


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_a_graph_that_is_seldom_needed_first_is_looked_ahead_in_too(monkeypatch):
    """As a rule the first graph needed has not left. Now and then an older graph, which has left, comes before: every
    region but the first is on the way when recomputed."""
    nbytes = 25 * 16 * 4
    rig = HandleRig(window=11 * nbytes, prefetch=40 * nbytes)
    torch.manual_seed(0)
    often, seldom = Net(12), Net(13)
    for net in (often, seldom):
        rig.offload(net).set_recipe("recompute")
    late = []
    expect = Engine.expect

    def noted(engine, tickets, limits, forward):
        owner_stream = engine.device.current_stream()
        late.append(any(engine._may_fetch(ticket.parcel, owner_stream) for ticket in tickets))
        expect(engine, tickets, limits, forward)

    monkeypatch.setattr(Engine, "expect", noted)
    for number in range(9):
        is_first = number % 3 == 2
        older = seldom(torch.randn(25, 16, requires_grad=True)) if is_first else None
        newer = often(torch.randn(25, 16, requires_grad=True))
        late.clear()
        if older is not None:
            older.backward()
            assert len(late) == 13
            assert number == 2 or sum(late) == 1
        newer.backward()
