"""What queueing takes the host: how it is read from notes, and what the simulator makes of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner.workloads import MS, layers, profile, region, workload_a

from ebbtide import PlanError
from ebbtide._control.ranks import agreed_profile
from ebbtide._planner.launch_ahead import with_host
from ebbtide._planner.options import option_for
from ebbtide._planner.simulate import Pace, simulate
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.launch_overhead import host_of
from ebbtide._profiling.profile import Host, HostTime
from ebbtide._profiling.recorder import Note, Place, _Stopwatch
from ebbtide._profiling.region_times import Clock
from ebbtide.types import Memory

WIDE = 10**12
KEPT = Recipe("recompute", inputs="keep")
HELD = Recipe("selective", ops=("matmul",), inputs="keep", outputs="keep")


def watch(*notes, is_async=True):
    """Notes of (place, region, compute's clock in ms, the host's, passed): events are times here."""
    device = SimpleNamespace(is_async=is_async, seconds_between=lambda start, end: end - start)
    made = [
        Note(place, name, at * MS, Memory(0, 0), host * MS, passed, at_s=host * MS)
        for place, name, at, host, passed in notes
    ]
    return SimpleNamespace(device=device, notes=made)


def step_of_two():
    """Two regions that keep: the host takes 3 and 5 ms for their forward, of which the quicker one counts, 1 for their
    backward; compute takes 5."""
    return watch(
        (Place.BEGAN, "", 0, 0, 0),
        (Place.ENTERED, "a", 1, 1, 1),
        (Place.LEFT, "a", 6, 4, 2),
        (Place.ENTERED, "b", 6, 4, 2),
        (Place.LEFT, "b", 11, 9, 2),
        (Place.FORWARD, "", 12, 10, 2),
        (Place.READ, "b", 13, 11, 2),
        (Place.READ, "a", 18, 12, 2),
        (Place.ENDED, "", 23, 13, 2),
    )


def step_of_one(forward_ms, again_ms, backward_ms, prepared_ms=0):
    """A region that runs again: what the host takes for it, half of what prepares that before and half of it after its
    own code; compute takes 10, 10 and 20 ms."""
    again = forward_ms + again_ms
    return watch(
        (Place.BEGAN, "", 0, 0, 0),
        (Place.ENTERED, "a", 0, 0, 0),
        (Place.RUNS, "a", 0, prepared_ms / 2, 0),
        (Place.RAN, "a", 10, forward_ms - prepared_ms / 2, 0),
        (Place.LEFT, "a", 10, forward_ms, 0),
        (Place.FORWARD, "", 10, forward_ms, 0),
        (Place.AGAIN, "a", 10, forward_ms, 0),
        (Place.AGAIN_ENDED, "a", 20, again, 0),
        (Place.ENDED, "", 40, again + backward_ms, 0),
    )


def two_regions():
    times = {"forward_s": 5 * MS, "backward_s": 5 * MS, "again_s": 0.0, "inputs": (), "dear": ()}
    return region("a", **times), region("b", **times)


def test_what_the_host_took_is_read_by_its_own_clock():
    host = host_of(step_of_two(), ("a", "b"), two_regions(), (7, 7))
    assert [times.forward_s for times in host.regions] == pytest.approx([3 * MS, 3 * MS])
    assert [times.backward_s for times in host.regions] == pytest.approx([1 * MS, 1 * MS])
    assert (host.before_s, host.after_s, host.turn_s) == pytest.approx((1 * MS, 1 * MS, 1 * MS))
    assert [times.ops for times in host.regions] == [7, 7]
    assert 0 < host.op_s < host.moved_s < host.held_s < host.frame_s


def test_where_compute_has_no_queue_there_is_no_host_to_wait_for():
    assert host_of(watch(is_async=False), ("a", "b"), two_regions(), (7, 7)) is None
    step = profile(*two_regions())
    assert with_host(step, None) == step


def test_a_region_that_was_watched_running_again_has_that_taken_off():
    host = host_of(step_of_one(100, 50, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert host.frame_s + host.moved_s == pytest.approx(6 * MS)  # one input
    assert host.regions[0].forward_s == pytest.approx(94 * MS)
    assert host.regions[0].again_s == pytest.approx(50 * MS)
    assert host.regions[0].backward_s == pytest.approx(14 * MS)  # the next region is prepared in it


def test_a_first_run_that_makes_no_graph_is_not_what_keeping_takes():
    """A kept run takes what the second one takes, and preparing a region is what remains of the difference."""
    host = host_of(step_of_one(40, 44, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert host.regions[0].forward_s == host.regions[0].again_s == pytest.approx(44 * MS)
    without = host_of(step_of_one(40, 30, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert without.regions[0].forward_s == pytest.approx(34 * MS)
    assert host.frame_s == 0.0 < without.frame_s  # 10 ms for the graph are more than what prepares it


def test_what_recipes_add_goes_by_what_it_took_to_prepare_the_regions():
    """A host that is twice as slow is so with operators, outputs and parcels too."""
    quick, slow = (host_of(step_of_one(100, 50, 20, prepared_ms=ms), ("a",), [region("a")], (7,)) for ms in (0.5, 1.0))
    for name in ("frame_s", "op_s", "held_s", "moved_s"):
        assert getattr(slow, name) == pytest.approx(2 * getattr(quick, name))
    assert 0 < quick.op_s < quick.moved_s < quick.held_s < quick.frame_s


def of_many(forward_ms, backward_ms):
    """What the host takes for regions that are alike, by what it took for each, in order of forward."""
    names = [f"layers.{k}" for k in range(len(forward_ms))]
    notes, at = [(Place.BEGAN, "", 0, 0, 0)], 0
    for name, ms in zip(names, forward_ms, strict=True):
        notes += [(Place.ENTERED, name, at, at, 0), (Place.LEFT, name, at + ms, at + ms, 0)]
        at += ms
    notes.append((Place.FORWARD, "", at, at, 0))
    for name, ms in zip(reversed(names), reversed(backward_ms), strict=True):
        notes.append((Place.READ, name, at, at, 0))
        at += ms
    regions = [region(name, again_s=0.0, inputs=(), dear=()) for name in names]
    return host_of(watch(*notes, (Place.ENDED, "", at, at, 0)), names, regions, [7] * len(names)).regions


def test_one_region_that_took_the_host_long_says_nothing_of_the_others():
    assert [times.forward_s for times in of_many([3, 4, 40], [1] * 3)] == pytest.approx([3 * MS] * 3)


def test_a_host_that_is_held_back_is_taken_by_what_it_took_before():
    """It is ahead by as many kernels as the device queues when backward has come by three regions."""
    times = of_many([4, 4, 5, 4, 5, 4, 5, 4], [9, 9, 8, 9, 30, 5, 5, 6])
    assert [each.backward_s for each in times] == pytest.approx([5 * MS] * 8)
    assert [each.forward_s for each in times] == pytest.approx([4 * MS] * 8)


def test_the_clock_of_the_host_stands_still_while_it_watches(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("ebbtide._profiling.recorder.time.perf_counter", lambda: now[0])
    clock = _Stopwatch()
    now[0] += 1.0
    with clock.stopped():
        now[0] += 5.0
        with clock.stopped():
            now[0] += 5.0
        assert clock.now() == 11.0
    now[0] += 2.0
    assert clock.now() == 13.0
    with pytest.raises(PlanError, match="halfway"), clock.stopped():
        now[0] += 5.0
        raise PlanError("halfway")
    now[0] += 1.0
    assert clock.now() == 14.0


@pytest.mark.parametrize(("passed", "lead_ms"), [(1, 0), (0, 32)])
def test_the_lead_is_what_compute_was_seen_to_be_behind(passed, lead_ms):
    """The host is there 30 to 32 ms after the beginning; compute has come by the beginning then, or it has not."""
    notes = watch(
        (Place.BEGAN, "", 0, 0, 0),
        (Place.ENTERED, "a", 40, 30, passed),
        (Place.LEFT, "a", 50, 31, passed),
        (Place.FORWARD, "", 50, 31, passed),
        (Place.ENDED, "", 60, 32, passed),
    )
    times = {"again_s": 0.0, "inputs": ()}
    assert host_of(notes, ("a",), [region("a", **times)], (0,)).lead_s == pytest.approx(
        max(lead_ms, 0) * MS, abs=MS * 3
    )


def test_a_compute_that_is_held_back_says_nothing_of_the_lead_nor_of_the_turn():
    """20 ms between the end of forward and the first region's backward, of which it is held back for 15."""
    notes = watch(
        (Place.BEGAN, "", 0, 0, 0),
        (Place.ENTERED, "a", 1, 1, 1),
        (Place.LEFT, "a", 11, 4, 2),
        (Place.FORWARD, "", 11, 4, 2),
        (Place.HELD, "", 12, 5, 2),
        (Place.GOES_ON, "", 27, 5, 2),
        (Place.READ, "", 28, 20, 2),
        (Place.READ, "a", 31, 24, 2),
        (Place.ENDED, "", 41, 30, 2),
    )
    clock = Clock(notes.notes, ("a",), lambda start, end: end.event - start.event)
    assert (clock.after_s, clock.turn_s, *clock.backward_s) == pytest.approx((0.0, 5 * MS, 10 * MS))
    seen = host_of(notes, ("a",), [region("a", again_s=0.0, inputs=())], (0,))
    assert seen.turn_s == pytest.approx(20 * MS)
    assert seen.lead_s == 0.0


def test_a_hold_before_the_first_region_is_no_part_of_the_step():
    """Compute is held back for 15 ms of the 17 before the first region. The host is ahead by that, and would not be."""
    notes = watch(
        (Place.BEGAN, "", 0, 0, 0),
        (Place.HELD, "", 0, 0, 1),
        (Place.GOES_ON, "", 15, 0, 1),
        (Place.ENTERED, "a", 17, 1, 1),
        (Place.LEFT, "a", 27, 4, 1),
        (Place.FORWARD, "", 27, 4, 1),
        (Place.READ, "a", 33, 24, 7),
        (Place.ENDED, "", 43, 30, 7),
    )
    clock = Clock(notes.notes, ("a",), lambda start, end: end.event - start.event)
    assert (clock.before_s, *clock.forward_s, clock.turn_s) == pytest.approx((2 * MS, 10 * MS, 6 * MS))
    assert host_of(notes, ("a",), [region("a", again_s=0.0, inputs=())], (0,)).lead_s == 0.0


def host(count, forward_ms, backward_ms=1.0, **changes):
    times = HostTime(forward_ms * MS, backward_ms * MS, 2 * MS, ops=10)
    given = {"before_s": 0.0, "after_s": 0.0, "turn_s": 0.0, "lead_s": 0.0, "steady_lead_s": 0.0}
    given |= {"frame_s": 1 * MS, "op_s": 0.5 * MS, "held_s": 1 * MS, "moved_s": 0.25 * MS}
    return Host(regions=(times,) * count, **{**given, **changes})


def outcome(step, recipe):
    count = len(step.regions)
    pace = Pace((WIDE,) * count, (WIDE,), (WIDE,) * count)
    return simulate(step, [option_for(each, recipe) for each in step.regions], pace)


def test_a_step_with_everything_kept_waits_for_no_host():
    step = with_host(profile(*layers(3)), host(3, forward_ms=14))
    assert step.host.lead_s == pytest.approx(12 * MS)  # three times 4 ms late
    assert outcome(step, Recipe("keep")).host_wait_s == pytest.approx(0.0)
    assert outcome(step, Recipe("keep")).step_s == pytest.approx(step.plain_s)


def test_compute_waits_for_what_recipes_have_the_host_do():
    """Compute takes 10 ms forward and 20 backward, 10 to run again, 3 with both outputs held."""
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8))
    recomputed = outcome(step, KEPT)
    assert recomputed.host_wait_s == 0.0  # 8 and 1 to prepare it
    assert recomputed.step_s == pytest.approx(2 * 40 * MS)
    held = outcome(step, HELD)
    assert held.host_wait_s == pytest.approx(2 * 6 * MS)  # 8, 1, ten operators of 0.5 and two outputs of 1: 16
    assert held.forward_s == pytest.approx(2 * 16 * MS)
    assert held.step_s == pytest.approx(2 * (16 + 23) * MS)


def test_a_host_that_is_ahead_makes_nobody_wait():
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8, lead_s=12 * MS))
    assert outcome(step, HELD).host_wait_s == pytest.approx(0.0)


def test_compute_waits_in_backward_too():
    """Back, run again, two outputs handed out: 5 + 2 + 1 + 5 + 2 of the host, and compute takes 23."""
    step = replace(profile(*layers(1)), host=host(1, forward_ms=2, backward_ms=25))
    held = outcome(step, HELD)
    assert held.forward_s == pytest.approx(10 * MS)
    assert held.step_s == pytest.approx((2 + 8 + 25 + 2 + 8) * MS)


def test_a_plan_holds_outputs_where_the_host_has_time_for_it():
    step = workload_a(8)
    quick, slow = (with_host(step, host(8, forward_ms=4, op_s=op_ms * MS)) for op_ms in (0.0, 0.5))
    solver = Solver(slow)
    budget = (solver.smallest_budget() + solver.keeping_all().predicted.peak_bytes) // 2
    held = [_holding(Solver(each).solve(budget)) for each in (quick, slow)]
    assert held[1] < held[0]
    assert solver.solve(budget).predicted.step_s < _step_s(slow, Solver(quick).solve(budget))


def _holding(plan):
    return sum(each.recipe.action == "selective" for each in plan.regions.values())


def _step_s(step, plan):
    """What the recipes of `plan` would make of a step with all the room there is."""
    options = [option_for(each, plan.regions[each.name].recipe) for each in step.regions]
    count = len(options)
    return simulate(step, options, Pace((WIDE,) * count, (WIDE,), (WIDE,) * count)).step_s


def test_a_host_that_is_slower_than_compute_uses_its_lead_up():
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8, backward_ms=20, lead_s=1.0))
    held = outcome(step, HELD)  # 8 and 8 forward, 20, 2 and 8 backward: 46 for each region, where compute takes 33
    assert held.step_s == pytest.approx(2 * 46 * MS)
    assert held.host_wait_s == pytest.approx(2 * 13 * MS)
    kept = outcome(with_host(step, step.host), Recipe("keep"))
    assert kept.step_s == pytest.approx(step.plain_s)


def test_at_another_size_moving_is_measured_by_what_keeping_takes_there():
    """Half the batch, and the host takes as long: with everything kept compute waits for it too."""
    step = with_host(workload_a(8), host(8, forward_ms=4, backward_ms=8, moved_s=1e-6))
    smaller = step.scaled(step.tokens // 2)
    kept, plan = Solver(smaller).keeping_all(), Solver(smaller).solve(None)
    assert kept.predicted.step_s > smaller.plain_s
    assert plan.predicted.moved_bytes > 0
    assert plan.predicted.step_s <= kept.predicted.step_s * 1.02


def test_ranks_wait_for_no_host_that_none_of_them_waits_for():
    """One is late and had to be given a lead; the other is early, but sees none."""
    late = with_host(profile(*layers(3)), host(3, forward_ms=14))
    early = with_host(profile(*layers(3)), host(3, forward_ms=2))
    for ranks in ([late, early], [early, late], [late, replace(early, host=None)]):
        merged = agreed_profile(ranks)
        assert outcome(merged, Recipe("keep")).step_s == pytest.approx(merged.plain_s)
        assert merged.host.regions[0].forward_s == pytest.approx(14 * MS)
    assert agreed_profile([replace(early, host=None)] * 2).host is None


def test_a_profile_whose_host_has_other_regions_is_an_error():
    with pytest.raises(PlanError, match="times of the host for 1 of 2 regions"):
        replace(profile(*layers(2)), host=host(1, forward_ms=1))


def test_a_host_that_was_held_back_is_bounded_by_its_forward():
    """What launches far ahead of compute takes as long as compute. The first run took 4 ms."""
    times = host_of(step_of_one(4, 1000, 2000), ("a",), [region("a", inputs=())], (7,)).regions[0]
    assert times.forward_s == pytest.approx(4 * MS)
    assert times.again_s == pytest.approx(1.5 * 4 * MS)
    assert times.backward_s == pytest.approx(2.5 * 4 * MS)
