"""What the last steps say of compute and of the host: scripted points, no model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planner.workloads import GIB, MS, layers, profile

from ebbtide._control.speed_scale import OfCompute, Paces, Passed
from ebbtide._planner.launch_ahead import options_of_plan, queueing_forward_s
from ebbtide._plans import Plan, Recipe, RegionPlan
from ebbtide._profiling.profile import Host, HostTime
from ebbtide._profiling.step_events import Point, Queueing

COUNT = 6
STEP = profile(*layers(COUNT))
NAMES = [region.name for region in STEP.regions]
KEEPS = Plan({name: RegionPlan("keep") for name in NAMES})
RUNS_AGAIN = Plan({name: RegionPlan(Recipe("recompute", inputs="keep")) for name in NAMES})
MOVES = Plan({name: RegionPlan("offload") for name in NAMES})
OWN = (True,) * COUNT
NOT_OWN = (False,) * COUNT


def points(names, seconds, own):
    """Of regions that take so long; all of a region was queued in time, or not."""
    at, found, was_behind = 0.0, [], False
    for name, took, is_own in zip(names, seconds, own, strict=True):
        found.append(Point(name, at, was_behind))
        at, was_behind = at + took, is_own
    return found


def passed(step=STEP, plan=KEEPS, pace=(1.0, 1.0), own=(OWN, OWN), share=1.0, late=(0.0, 0.0), names=NAMES):
    """A step, `late` by so much in its second region on each way, which it tells to have stalled."""
    queueing = Queueing(SimpleNamespace(seconds_between=lambda start, end: end - start))
    forward = [pace[0] * share * region.forward_s for region in step.regions]
    options = options_of_plan(step, plan)
    backward = [
        pace[1] * share * (option.again_s + region.backward_s)
        for region, option in zip(reversed(step.regions), reversed(options), strict=True)
    ]
    forward[1] += late[0]
    backward[1] += late[1]
    queueing.forward = points(names, forward, own[0])
    queueing.backward = points(list(reversed(names)), backward, own[1])
    return Passed(queueing, share, *late)


def of_compute(one, step=STEP, plan=KEEPS, count=3):
    paces = Paces()
    for _ in range(count):
        paces.saw(one)
    return paces.of_compute(step, plan)


def with_host(step=STEP):
    times = HostTime(8 * MS, 10 * MS, 5 * MS, ops=10)
    small = {"frame_s": 1 * MS, "op_s": 0.1 * MS, "held_s": 0.2 * MS, "moved_s": 0.1 * MS}
    around = {"before_s": 0.0, "after_s": 0.0, "turn_s": 0.0, "lead_s": 0.0, "steady_lead_s": 0.0}
    return replace(step, host=Host((times,) * COUNT, **around, **small))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("plan", [KEEPS, RUNS_AGAIN])
def test_each_way_has_a_pace(plan, share):
    found = of_compute(passed(plan=plan, pace=(1.07, 1.02), share=share), plan=plan)
    assert found == pytest.approx((1.07, 1.02))


@pytest.mark.parametrize("own", [(OWN, NOT_OWN), (NOT_OWN, OWN)])
def test_a_way_that_does_not_say_has_the_pace_of_the_other(own):
    found = of_compute(passed(pace=(1.05, 1.05), own=own))
    assert found == pytest.approx((1.05, 1.05))


def test_only_regions_that_were_queued_in_time_say_a_pace():
    """The others took twice as long."""
    few = (True, False, True, False, True, False)
    queueing = Queueing(SimpleNamespace(seconds_between=lambda start, end: end - start))
    took = [region.forward_s * (1.03 if own else 2.0) for region, own in zip(STEP.regions, few, strict=True)]
    queueing.forward = points(NAMES, took, few)
    assert of_compute(Passed(queueing, 1.0, 0.0, 0.0)) == pytest.approx((1.03, 1.03))


def test_two_steps_are_no_pace():
    assert of_compute(passed(pace=(1.05, 1.05)), count=2) is None


def test_where_the_host_is_waited_for_everywhere_nothing_is_said_of_compute():
    one = passed(pace=(2.0, 2.0), own=(NOT_OWN, NOT_OWN))
    assert of_compute(one, step=with_host()) == OfCompute(1.0, 1.0)
    assert of_compute(one) is None  # there is no host to wait for


def test_another_order_says_nothing():
    assert of_compute(passed(names=[*NAMES[1:], NAMES[0]])) is None


def test_regions_in_front_of_all_that_is_trained_have_no_backward():
    frozen = replace(STEP, regions=(replace(STEP.regions[0], backward_s=0.0, again_s=0.0), *STEP.regions[1:]))
    one = passed(step=frozen, pace=(1.07, 1.02))
    one.queueing.backward.pop()
    assert of_compute(one, step=frozen) == pytest.approx((1.07, 1.02))


def test_a_step_that_waits_for_the_link_says_nothing():
    stall_s = 0.2 * STEP.plain_s
    assert of_compute(passed(late=(stall_s, stall_s))) is None


@pytest.mark.parametrize(
    "own", [OWN, (False, False, True, True, False, False), (False, True, True, False, False, False)]
)
def test_a_little_waiting_changes_a_pace_by_little(own):
    """Whether it was in the regions that say it or in others: they bear their share."""
    late_s = 0.04 * sum(region.forward_s for region in STEP.regions)
    found = of_compute(passed(own=(own, OWN), late=(late_s, 0.0)))
    assert found.forward == pytest.approx(1.0, abs=0.01 if own == OWN else 0.08)
    assert found.backward == pytest.approx(1.0)


def test_copies_beside_compute_are_none_of_its_pace():
    link = replace(STEP.link, interference=0.2)
    step = replace(STEP, link=link)
    moved_bytes = sum(option.moved_bytes for option in options_of_plan(step, MOVES))
    assert moved_bytes > GIB
    lost_s = 0.2 * moved_bytes / link.out, 0.2 * moved_bytes / link.back
    totals = [sum(r.forward_s for r in STEP.regions[:-1]), sum(r.backward_s for r in STEP.regions[1:])]
    pace = tuple(1 + lost / total for lost, total in zip(lost_s, totals, strict=True))
    assert of_compute(passed(step=step, plan=MOVES, pace=pace), step=step, plan=MOVES) == pytest.approx((1.0, 1.0))


def host_pace(queued, step=None):
    """By forwards of (seconds, times what is believed; regions; whether compute waited for the host)."""
    step = step or with_host()
    believed_s = queueing_forward_s(step, step.host, KEEPS)
    paces = Paces()
    for ratio, count, waits in queued:
        one = passed(own=(NOT_OWN if waits else OWN, OWN))
        one.queueing.forward = one.queueing.forward[:count]
        one.queueing.seconds = ratio * believed_s
        paces.saw(one)
    return paces.of_host(step, KEEPS)


@pytest.mark.parametrize(
    ("queued", "pace"),
    [
        ([(1.3, COUNT, True)] * 5, 1.3),
        ([(1.3, COUNT, False)] * 5, 1.0),  # held back, maybe
        ([(0.7, COUNT, False)] * 5, 0.7),
        ([(1.3, COUNT, True)] * 2, 1.0),
        ([(0.5, 3, True)] * 9 + [(1.2, COUNT, True)] * 3, 1.2),  # others came by half of the regions
        ([(1.1, COUNT, True)] * 3 + [(1.6, COUNT, True)] * 2, 1.1),
    ],
)
def test_the_host_has_the_pace_of_most_forwards(queued, pace):
    assert host_pace(queued) == pytest.approx(pace)


def test_another_plan_has_no_pace_yet():
    paces = Paces()
    for _ in range(3):
        paces.saw(passed(pace=(1.1, 1.1)))
    paces.clear()
    assert paces.of_compute(STEP, KEEPS) is None
    assert paces.of_host(with_host(), KEEPS) == 1.0
