"""CPU launch overhead: read from step events, and used by the simulator."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner.workloads import MS, layers, profile, region, workload_a

from ebbtide import PlanError
from ebbtide._control.ranks import agreed_profile
from ebbtide._planner.options import option_for
from ebbtide._planner.simulate import Windows, simulate, with_host
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.launch_overhead import RecipeCosts
from ebbtide._profiling.launch_overhead import host_of as host_with
from ebbtide._profiling.profile import Host, HostTime
from ebbtide._profiling.recorder import RegionRecord, StepEvent, _CpuClock
from ebbtide._profiling.recorder import StepEventKind as Kind
from ebbtide._profiling.region_times import RegionTimes
from ebbtide._types import Memory

WIDE = 10**12
COSTS = RecipeCosts(
    prepare_s=1e-4, save_s=0.0, inspect_op_s=5e-6, save_output_s=3e-5, move_s=2e-5, derive_s=1e-5, op_s=1e-5, hook_s=0.0
)
KEPT = Recipe("recompute", inputs="keep")
HELD = Recipe("selective", ops=("matmul",), inputs="keep", outputs="keep")


def recorder_of(*events):
    """A recorder with events (kind, region, compute's clock in ms, the CPU's, passed): events are times here."""
    device = SimpleNamespace(seconds_between=lambda start, end: end - start)
    made = [
        StepEvent(kind, name, at * MS, Memory(0, 0), host * MS, passed, at_s=host * MS)
        for kind, name, at, host, passed in events
    ]
    return SimpleNamespace(device=device, events=made)


def host_of(recorder, names, regions, ops, costs=COSTS):
    return host_with(recorder, names, regions, [RegionRecord("", ops=each) for each in ops], costs)


def step_of_two():
    """Two regions that keep: the CPU takes 3 and 5 ms for forward, of which the smaller counts, and 1 for backward;
    compute takes 5."""
    return recorder_of(
        (Kind.STEP_BEGAN, "", 0, 0, 0),
        (Kind.REGION_ENTERED, "a", 1, 1, 1),
        (Kind.REGION_LEFT, "a", 6, 4, 2),
        (Kind.REGION_ENTERED, "b", 6, 4, 2),
        (Kind.REGION_LEFT, "b", 11, 9, 2),
        (Kind.FORWARD_ENDED, "", 12, 10, 2),
        (Kind.REGION_READ, "b", 13, 11, 2),
        (Kind.REGION_READ, "a", 18, 12, 2),
        (Kind.STEP_ENDED, "", 23, 13, 2),
    )


def step_of_one(forward_ms, again_ms, backward_ms, prepared_ms=0):
    """CPU times of a recomputed region, with half of the preparation before and half after the region's own code;
    compute takes 10, 10 and 20 ms."""
    again = forward_ms + again_ms
    return recorder_of(
        (Kind.STEP_BEGAN, "", 0, 0, 0),
        (Kind.REGION_ENTERED, "a", 0, 0, 0),
        (Kind.REGION_RUNS, "a", 0, prepared_ms / 2, 0),
        (Kind.REGION_RAN, "a", 10, forward_ms - prepared_ms / 2, 0),
        (Kind.REGION_LEFT, "a", 10, forward_ms, 0),
        (Kind.FORWARD_ENDED, "", 10, forward_ms, 0),
        (Kind.RECOMPUTE_BEGAN, "a", 10, forward_ms, 0),
        (Kind.RECOMPUTE_ENDED, "a", 20, again, 0),
        (Kind.STEP_ENDED, "", 40, again + backward_ms, 0),
    )


def two_regions():
    times = {"forward_s": 5 * MS, "backward_s": 5 * MS, "recompute_s": 0.0, "inputs": (), "expensive_ops": ()}
    return region("a", **times), region("b", **times)


def test_cpu_times_are_read_by_the_cpu_clock():
    host = host_of(step_of_two(), ("a", "b"), two_regions(), (7, 7))
    assert [times.forward_s for times in host.regions] == pytest.approx([3 * MS, 3 * MS])
    assert [times.backward_s for times in host.regions] == pytest.approx([1 * MS, 1 * MS])
    assert (host.before_s, host.after_s, host.backward_before_s) == pytest.approx((1 * MS, 1 * MS, 1 * MS))
    assert [times.ops for times in host.regions] == [7, 7]
    figures = host.frame_s, host.op_s, host.saved_output_s, host.moved_s
    assert figures == pytest.approx((1e-4, 5e-6, 3e-5, 2e-5))  # no preparation was seen


def test_a_synchronous_device_has_no_cpu_to_wait_for():
    assert host_of(recorder_of(), ("a", "b"), two_regions(), (7, 7), None) is None
    step = profile(*two_regions())
    assert with_host(step, None) == step


def test_preparation_of_recomputation_is_subtracted():
    host = host_of(step_of_one(100, 50, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert host.frame_s + host.moved_s == pytest.approx(6 * MS)  # one input
    assert host.regions[0].forward_s == pytest.approx(94 * MS)
    assert host.regions[0].recompute_s == pytest.approx(50 * MS)
    assert host.regions[0].backward_s == pytest.approx(14 * MS)  # the next region is prepared in it


def test_a_forward_without_a_graph_is_cheaper_than_keeping():
    """A kept run takes what the second one takes, and preparing a region is what remains of the difference."""
    host = host_of(step_of_one(40, 44, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert host.regions[0].forward_s == host.regions[0].recompute_s == pytest.approx(44 * MS)
    without = host_of(step_of_one(40, 30, 20, prepared_ms=6), ("a",), [region("a")], (7,))
    assert without.regions[0].forward_s == pytest.approx(34 * MS)
    assert host.frame_s == 0.0 < without.frame_s  # 10 ms for the graph are more than what prepares it


def test_cpu_time_of_recipes_scales_with_the_preparation():
    """A host that is twice as slow is so with operators, outputs and parcels too."""
    quick, slow = (host_of(step_of_one(100, 50, 20, prepared_ms=ms), ("a",), [region("a")], (7,)) for ms in (0.5, 1.0))
    for name in ("frame_s", "op_s", "saved_output_s", "moved_s"):
        assert getattr(slow, name) == pytest.approx(2 * getattr(quick, name))


def test_kept_regions_do_not_pay_for_saving_to_recompute():
    """And recomputation pays once. Preparing took 10 times as long as in the probe, so saving does too."""
    costs = COSTS._replace(prepare_s=0.5 * MS, save_s=0.2 * MS, inspect_op_s=0.0, save_output_s=0.0, move_s=0.1 * MS)
    regions = [region("a")]
    saved_s = len(regions[0].saved_tensors) * 2 * MS
    recorder = step_of_one(100, 90, 20, prepared_ms=6)
    without, host = (host_of(recorder, ("a",), regions, (7,), each) for each in (costs._replace(save_s=0.0), costs))
    assert without.regions[0].forward_s - host.regions[0].forward_s == pytest.approx(saved_s)
    assert host.frame_s - without.frame_s == pytest.approx(saved_s)
    assert without.regions[0].recompute_s - host.regions[0].recompute_s == pytest.approx(saved_s)


def of_many(forward_ms, backward_ms):
    """What the host takes for regions that are alike, by what it took for each, in order of forward."""
    names = [f"layers.{k}" for k in range(len(forward_ms))]
    events, at = [(Kind.STEP_BEGAN, "", 0, 0, 0)], 0
    for name, ms in zip(names, forward_ms, strict=True):
        events += [
            (Kind.REGION_ENTERED, name, at, at, 0),
            (Kind.REGION_LEFT, name, at + ms, at + ms, 0),
        ]
        at += ms
    events.append((Kind.FORWARD_ENDED, "", at, at, 0))
    for name, ms in zip(reversed(names), reversed(backward_ms), strict=True):
        events.append((Kind.REGION_READ, name, at, at, 0))
        at += ms
    regions = [region(name, recompute_s=0.0, inputs=(), expensive_ops=()) for name in names]
    return host_of(recorder_of(*events, (Kind.STEP_ENDED, "", at, at, 0)), names, regions, [7] * len(names)).regions


def test_one_slow_region_does_not_change_the_others():
    assert [times.forward_s for times in of_many([3, 4, 40], [1] * 3)] == pytest.approx([3 * MS] * 3)


def test_a_blocked_cpu_has_the_times_before_blocking():
    """The queue of the device is full after the backward of three regions."""
    times = of_many([4, 4, 5, 4, 5, 4, 5, 4], [9, 9, 8, 9, 30, 5, 5, 6])
    assert [each.backward_s for each in times] == pytest.approx([5 * MS] * 8)
    assert [each.forward_s for each in times] == pytest.approx([4 * MS] * 8)


def test_the_cpu_clock_stands_still_while_the_recorder_works(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("ebbtide._profiling.recorder.time.perf_counter", lambda: now[0])
    clock = _CpuClock()
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
def test_launch_ahead_is_the_measured_delay_of_compute(passed, lead_ms):
    """The CPU arrives 30 to 32 ms after the beginning; compute has passed the beginning by then, or not."""
    recorder = recorder_of(
        (Kind.STEP_BEGAN, "", 0, 0, 0),
        (Kind.REGION_ENTERED, "a", 40, 30, passed),
        (Kind.REGION_LEFT, "a", 50, 31, passed),
        (Kind.FORWARD_ENDED, "", 50, 31, passed),
        (Kind.STEP_ENDED, "", 60, 32, passed),
    )
    times = {"recompute_s": 0.0, "inputs": ()}
    assert host_of(recorder, ("a",), [region("a", **times)], (0,)).launch_ahead_s == pytest.approx(
        max(lead_ms, 0) * MS, abs=MS * 3
    )


def test_spinning_compute_changes_neither_launch_ahead_nor_times():
    """20 ms between the end of forward and the first region's backward, 15 of them spinning."""
    recorder = recorder_of(
        (Kind.STEP_BEGAN, "", 0, 0, 0),
        (Kind.REGION_ENTERED, "a", 1, 1, 1),
        (Kind.REGION_LEFT, "a", 11, 4, 2),
        (Kind.FORWARD_ENDED, "", 11, 4, 2),
        (Kind.SPIN_BEGAN, "", 12, 5, 2),
        (Kind.SPIN_ENDED, "", 27, 5, 2),
        (Kind.REGION_READ, "", 28, 20, 2),
        (Kind.REGION_READ, "a", 31, 24, 2),
        (Kind.STEP_ENDED, "", 41, 30, 2),
    )
    times = RegionTimes(recorder.events, ("a",), lambda start, end: end.event - start.event)
    assert (times.after_s, times.backward_before_s, *times.backward_s) == pytest.approx((0.0, 5 * MS, 10 * MS))
    seen = host_of(recorder, ("a",), [region("a", recompute_s=0.0, inputs=())], (0,))
    assert seen.backward_before_s == pytest.approx(20 * MS)
    assert seen.launch_ahead_s == 0.0


def test_spinning_before_the_first_region_is_no_part_of_the_step():
    """Compute spins for 15 ms of the 17 before the first region. The spin alone puts the CPU ahead."""
    recorder = recorder_of(
        (Kind.STEP_BEGAN, "", 0, 0, 0),
        (Kind.SPIN_BEGAN, "", 0, 0, 1),
        (Kind.SPIN_ENDED, "", 15, 0, 1),
        (Kind.REGION_ENTERED, "a", 17, 1, 1),
        (Kind.REGION_LEFT, "a", 27, 4, 1),
        (Kind.FORWARD_ENDED, "", 27, 4, 1),
        (Kind.REGION_READ, "a", 33, 24, 7),
        (Kind.STEP_ENDED, "", 43, 30, 7),
    )
    times = RegionTimes(recorder.events, ("a",), lambda start, end: end.event - start.event)
    assert (times.before_s, *times.forward_s, times.backward_before_s) == pytest.approx((2 * MS, 10 * MS, 6 * MS))
    assert host_of(recorder, ("a",), [region("a", recompute_s=0.0, inputs=())], (0,)).launch_ahead_s == 0.0


def test_waits_for_copies_count_to_no_region():
    """Compute waits for 6 ms of the first forward, for 3 around the border of two, and for 4 of a backward in which it
    spins too."""
    recorder = recorder_of(
        (Kind.STEP_BEGAN, "", 100, 0, 0),
        (Kind.REGION_ENTERED, "a", 101, 1, 1),
        (Kind.REGION_LEFT, "a", 119, 4, 1),
        (Kind.REGION_ENTERED, "b", 120, 4, 1),
        (Kind.REGION_LEFT, "b", 130, 6, 1),
        (Kind.FORWARD_ENDED, "", 130, 6, 1),
        (Kind.REGION_READ, "b", 131, 8, 1),
        (Kind.SPIN_BEGAN, "", 132, 8, 1),
        (Kind.SPIN_ENDED, "", 142, 8, 1),
        (Kind.REGION_READ, "a", 151, 9, 1),
        (Kind.STEP_ENDED, "", 161, 10, 1),
    )
    made = {(since, until): recorder_of((Kind.STALL_BEGAN, "", since, 0, 0), (Kind.STALL_ENDED, "", until, 0, 0)).events
            for since, until in [(105, 111), (118, 121), (131, 135), (160, 160)]}  # fmt: skip
    stalls = list(map(tuple, made.values()))
    times = RegionTimes(recorder.events, ("a", "b"), lambda start, end: end.event - start.event, stalls)
    assert times.forward_s == pytest.approx([19 * MS - 8 * MS, 10 * MS - 1 * MS])
    # Of the wait in backward 1 ms is before the spin, and 3 of the spin are a wait.
    assert times.backward_s == pytest.approx([10 * MS, 20 * MS - 1 * MS - 10 * MS])


def host(count, forward_ms, backward_ms=1.0, **changes):
    times = HostTime(forward_ms * MS, backward_ms * MS, 2 * MS, ops=10)
    given = {
        "before_s": 0.0,
        "after_s": 0.0,
        "backward_before_s": 0.0,
        "launch_ahead_s": 0.0,
        "steady_launch_ahead_s": 0.0,
    }
    given |= {"frame_s": 1 * MS, "op_s": 0.5 * MS, "saved_output_s": 1 * MS, "moved_s": 0.25 * MS}
    return Host(regions=(times,) * count, **{**given, **changes})


def outcome(step, recipe):
    count = len(step.regions)
    windows = Windows((WIDE,) * count, (WIDE,), (WIDE,) * count)
    return simulate(step, [option_for(each, recipe) for each in step.regions], windows)


def test_a_step_that_keeps_everything_waits_for_no_cpu():
    step = with_host(profile(*layers(3)), host(3, forward_ms=14))
    assert step.host.launch_ahead_s == pytest.approx(12 * MS)  # three times 4 ms late
    assert outcome(step, Recipe("keep")).host_wait_s == pytest.approx(0.0)
    assert outcome(step, Recipe("keep")).step_s == pytest.approx(step.plain_s)


def test_compute_waits_for_cpu_work_of_recipes():
    """Compute takes 10 ms forward and 20 backward, 10 to recompute, 3 with both outputs saved."""
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8))
    recomputed = outcome(step, KEPT)
    assert recomputed.host_wait_s == 0.0  # 8 and 1 to prepare it
    assert recomputed.step_s == pytest.approx(2 * 40 * MS)
    held = outcome(step, HELD)
    assert held.host_wait_s == pytest.approx(2 * 6 * MS)  # 8, 1, ten operators of 0.5 and two outputs of 1: 16
    assert held.forward_s == pytest.approx(2 * 16 * MS)
    assert held.step_s == pytest.approx(2 * (16 + 23) * MS)


def test_a_cpu_ahead_causes_no_waiting():
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8, launch_ahead_s=12 * MS))
    assert outcome(step, HELD).host_wait_s == pytest.approx(0.0)


def test_compute_waits_in_backward_too():
    """Fetch, recompute, two saved outputs: 5 + 2 + 1 + 5 + 2 of the CPU, and compute takes 23."""
    step = replace(profile(*layers(1)), host=host(1, forward_ms=2, backward_ms=25))
    held = outcome(step, HELD)
    assert held.forward_s == pytest.approx(10 * MS)
    assert held.step_s == pytest.approx((2 + 8 + 25 + 2 + 8) * MS)


def test_a_plan_saves_outputs_if_the_cpu_has_time():
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
    return simulate(step, options, Windows((WIDE,) * count, (WIDE,), (WIDE,) * count)).step_s


def test_a_cpu_slower_than_compute_uses_up_the_launch_ahead():
    step = replace(profile(*layers(2)), host=host(2, forward_ms=8, backward_ms=20, launch_ahead_s=1.0))
    held = outcome(step, HELD)  # 8 and 8 forward, 20, 2 and 8 backward: 46 for each region, where compute takes 33
    assert held.step_s == pytest.approx(2 * 46 * MS)
    assert held.host_wait_s == pytest.approx(2 * 13 * MS)
    kept = outcome(with_host(step, step.host), Recipe("keep"))
    assert kept.step_s == pytest.approx(step.plain_s)


def test_at_another_size_offloading_is_compared_with_keeping():
    """Half the batch, and the host takes as long: with everything kept compute waits for it too."""
    step = with_host(workload_a(8), host(8, forward_ms=4, backward_ms=8, moved_s=1e-6))
    smaller = step.scaled(step.tokens // 2)
    kept, plan = Solver(smaller).keeping_all(), Solver(smaller).solve(None)
    assert kept.predicted.step_s > smaller.plain_s
    assert plan.predicted.moved_bytes > 0
    assert plan.predicted.step_s <= kept.predicted.step_s * 1.02


def test_merged_ranks_wait_for_no_cpu_that_no_rank_waits_for():
    """One rank is late and needs a launch-ahead; the other rank is early."""
    late = with_host(profile(*layers(3)), host(3, forward_ms=14))
    early = with_host(profile(*layers(3)), host(3, forward_ms=2))
    for ranks in ([late, early], [early, late], [late, replace(early, host=None)]):
        merged = agreed_profile(ranks)
        assert outcome(merged, Recipe("keep")).step_s == pytest.approx(merged.plain_s)
        assert merged.host.regions[0].forward_s == pytest.approx(14 * MS)
    assert agreed_profile([replace(early, host=None)] * 2).host is None


def test_a_profile_with_cpu_times_of_other_regions_is_an_error():
    with pytest.raises(PlanError, match="times of the host for 1 of 2 regions"):
        replace(profile(*layers(2)), host=host(1, forward_ms=1))


def test_a_blocked_cpu_is_bounded_by_forward():
    """What launches far ahead of compute takes as long as compute. The first run took 4 ms."""
    times = host_of(step_of_one(4, 1000, 2000), ("a",), [region("a", inputs=())], (7,)).regions[0]
    assert times.forward_s == pytest.approx(4 * MS)
    assert times.recompute_s == pytest.approx(1.5 * 4 * MS)
    assert times.backward_s == pytest.approx(2.5 * 4 * MS)
