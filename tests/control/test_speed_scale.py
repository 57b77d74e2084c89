"""Speed of compute and CPU in the last steps: scripted region entries, no model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner.workloads import GIB, MS, layers, profile

from ebbtide._control.speed_scale import ComputeScale, FinishedStep, SpeedScales
from ebbtide._planner.simulate import forward_launch_s, options_of_plan
from ebbtide._plans import Plan, Recipe, RegionPlan
from ebbtide._profiling.profile import Host, HostTime
from ebbtide._profiling.step_events import LaunchTimes, RegionEntry

COUNT = 6
STEP = profile(*layers(COUNT))
NAMES = [region.name for region in STEP.regions]
KEEPS = Plan({name: RegionPlan("keep") for name in NAMES})
RUNS_AGAIN = Plan({name: RegionPlan(Recipe("recompute", inputs="keep")) for name in NAMES})
MOVES = Plan({name: RegionPlan("offload") for name in NAMES})
OWN = (True,) * COUNT
NOT_OWN = (False,) * COUNT


def points(names, seconds, own):
    """Entries of regions with these durations; `own`: whether the whole region was queued ahead."""
    at, found, was_queued_ahead = 0.0, [], False
    for name, took, is_own in zip(names, seconds, own, strict=True):
        found.append(RegionEntry(name, at, was_queued_ahead))
        at, was_queued_ahead = at + took, is_own
    return found


def passed(step=STEP, plan=KEEPS, scale=(1.0, 1.0), own=(OWN, OWN), share=1.0, late=(0.0, 0.0), names=NAMES):
    """A step with a stall of `late` seconds in the second region of each direction."""
    launch_times = LaunchTimes(SimpleNamespace(seconds_between=lambda start, end: end - start))
    forward = [scale[0] * share * region.forward_s for region in step.regions]
    options = options_of_plan(step, plan)
    backward = [
        scale[1] * share * (option.recompute_s + region.backward_s)
        for region, option in zip(reversed(step.regions), reversed(options), strict=True)
    ]
    forward[1] += late[0]
    backward[1] += late[1]
    launch_times.forward = points(names, forward, own[0])
    launch_times.backward = points(list(reversed(names)), backward, own[1])
    return FinishedStep(launch_times, share, *late)


def of_compute(one, step=STEP, plan=KEEPS, count=4):
    scales = SpeedScales()
    for _ in range(count):
        scales.add_step(one)
    return scales.of_compute(step, plan)


def with_host(step=STEP):
    times = HostTime(8 * MS, 10 * MS, 5 * MS, ops=10)
    small = {"frame_s": 1 * MS, "op_s": 0.1 * MS, "saved_output_s": 0.2 * MS, "moved_s": 0.1 * MS}
    around = {
        "before_s": 0.0,
        "after_s": 0.0,
        "backward_before_s": 0.0,
        "launch_ahead_s": 0.0,
        "steady_launch_ahead_s": 0.0,
    }
    return replace(step, host=Host((times,) * COUNT, **around, **small))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("plan", [KEEPS, RUNS_AGAIN])
def test_each_direction_has_a_scale(plan, share):
    found = of_compute(passed(plan=plan, scale=(1.07, 1.02), share=share), plan=plan)
    assert found == pytest.approx((1.07, 1.02))


@pytest.mark.parametrize("own", [(OWN, NOT_OWN), (NOT_OWN, OWN)])
def test_an_unknown_direction_has_the_scale_of_the_known_direction(own):
    found = of_compute(passed(scale=(1.05, 1.05), own=own))
    assert found == pytest.approx((1.05, 1.05))


def test_only_regions_queued_ahead_have_a_scale():
    """The others took twice as long."""
    few = (True, False, True, False, True, False)
    launch_times = LaunchTimes(SimpleNamespace(seconds_between=lambda start, end: end - start))
    took = [region.forward_s * (1.03 if own else 2.0) for region, own in zip(STEP.regions, few, strict=True)]
    launch_times.forward = points(NAMES, took, few)
    assert of_compute(FinishedStep(launch_times, 1.0, 0.0, 0.0)) == pytest.approx((1.03, 1.03))


def test_three_steps_have_no_scale():
    assert of_compute(passed(scale=(1.05, 1.05)), count=3) is None


def test_compute_that_always_waits_for_the_cpu_has_scale_one():
    one = passed(scale=(2.0, 2.0), own=(NOT_OWN, NOT_OWN))
    assert of_compute(one, step=with_host()) == ComputeScale(1.0, 1.0)
    assert of_compute(one) is None  # there is no host to wait for


def test_another_order_of_regions_is_ignored():
    assert of_compute(passed(names=[*NAMES[1:], NAMES[0]])) is None


def test_regions_in_front_of_all_that_is_trained_have_no_backward():
    frozen = replace(STEP, regions=(replace(STEP.regions[0], backward_s=0.0, recompute_s=0.0), *STEP.regions[1:]))
    one = passed(step=frozen, scale=(1.07, 1.02))
    one.launch_times.backward.pop()
    assert of_compute(one, step=frozen) == pytest.approx((1.07, 1.02))


def test_a_step_that_waits_for_the_link_is_ignored():
    stall_s = 0.2 * STEP.plain_s
    assert of_compute(passed(late=(stall_s, stall_s))) is None


@pytest.mark.parametrize(
    "own", [OWN, (False, False, True, True, False, False), (False, True, True, False, False, False)]
)
def test_a_little_waiting_changes_a_scale_by_little(own):
    """Whether it was in the regions that say it or in others: they bear their share."""
    late_s = 0.04 * sum(region.forward_s for region in STEP.regions)
    found = of_compute(passed(own=(own, OWN), late=(late_s, 0.0)))
    assert found.forward == pytest.approx(1.0, abs=0.01 if own == OWN else 0.08)
    assert found.backward == pytest.approx(1.0)


def test_concurrent_copies_do_not_change_the_scale():
    link = replace(STEP.link, interference=0.2)
    step = replace(STEP, link=link)
    moved_bytes = sum(option.moved_bytes for option in options_of_plan(step, MOVES))
    assert moved_bytes > GIB
    lost_s = 0.2 * moved_bytes / link.out, 0.2 * moved_bytes / link.back
    totals = [sum(r.forward_s for r in STEP.regions[:-1]), sum(r.backward_s for r in STEP.regions[1:])]
    scale = tuple(1 + lost / total for lost, total in zip(lost_s, totals, strict=True))
    assert of_compute(passed(step=step, plan=MOVES, scale=scale), step=step, plan=MOVES) == pytest.approx((1.0, 1.0))


def cpu_scale(queued, step=None):
    """By forwards of (seconds, times what is believed; regions; whether compute waited for the host)."""
    step = step or with_host()
    believed_s = forward_launch_s(step, step.host, KEEPS)
    scales = SpeedScales()
    for ratio, count, waits in queued:
        one = passed(own=(NOT_OWN if waits else OWN, OWN))
        one.launch_times.forward = one.launch_times.forward[:count]
        one.launch_times.seconds = ratio * believed_s
        scales.add_step(one)
    return scales.of_cpu(step, KEEPS)


@pytest.mark.parametrize(
    ("queued", "scale"),
    [
        ([(1.3, COUNT, True)] * 5, 1.3),
        ([(1.3, COUNT, False)] * 5, 1.0),  # blocked, maybe
        ([(0.7, COUNT, False)] * 5, 0.7),
        ([(1.3, COUNT, True)] * 2, 1.0),
        ([(0.5, 3, True)] * 9 + [(1.2, COUNT, True)] * 4, 1.2),  # the first nine entered half of the regions
        ([(1.1, COUNT, True)] * 4 + [(1.6, COUNT, True)] * 2, 1.1),
    ],
)
def test_the_cpu_has_the_scale_of_most_forwards(queued, scale):
    assert cpu_scale(queued) == pytest.approx(scale)


def test_another_plan_has_no_scale_yet():
    scales = SpeedScales()
    for _ in range(4):
        scales.add_step(passed(scale=(1.1, 1.1)))
    scales.clear()
    assert scales.of_compute(STEP, KEEPS) is None
    assert scales.of_cpu(with_host(), KEEPS) == 1.0
