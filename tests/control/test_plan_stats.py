"""What a control makes of steps that are not what was predicted: scripted steps, no model."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from planner.workloads import GIB, MS, layers, outside, profile

from ebbtide import EbbtideWarning
from ebbtide._control.controller import Phase, PlanController
from ebbtide._engine.context import HookContext, Limits
from ebbtide._planner.options import option_for
from ebbtide._planner.simulate import (
    forward_launch_s,
    host_wait_s,
    options_of_plan,
    simulate,
    windows_within,
    with_host,
)
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Host, HostTime
from ebbtide._profiling.step_events import LaunchTimes, StepMonitor
from ebbtide._types import Memory

LINK = profile().link


_PLANS = {}


class RememberingSolver(Solver):
    """Most tests here begin with the same plan, and one takes seconds."""

    def solve(self, budget_bytes):
        key = repr(self.profile), budget_bytes
        if key not in _PLANS:
            _PLANS[key] = super().solve(budget_bytes)
        return _PLANS[key]


@pytest.fixture(autouse=True)
def _remembered(monkeypatch):
    monkeypatch.setattr("ebbtide._control.tuner.Solver", RememberingSolver)


class ScriptedEvent(NamedTuple):
    """Of the step that begins or ends here, or of a region within it."""

    step_s: float
    at_s: float


class ScriptedDevice:
    """A clock and an allocator that say what a test wants them to."""

    supports_timing = True
    is_async = False
    tracks_peak = True
    torch_device = torch.device("cpu")

    def __init__(self):
        self.step_s = 1.0
        self.at_s = 0.0  # how far compute has come within the step
        self.is_behind = False
        self.peak_bytes = 0
        self.peaks_forgotten = 0
        self.failures = 0

    def current_stream(self):
        return None

    def record(self, stream):
        return ScriptedEvent(self.step_s, self.at_s)

    def matches_capture(self):
        return True

    def is_done(self, event):
        return not self.is_behind

    def seconds_between(self, start, end):
        return start.step_s if start.at_s == end.at_s == 0.0 else end.at_s - start.at_s

    def memory(self):
        return Memory(0, self.peak_bytes)

    def reset_peak_stats(self):
        self.peaks_forgotten += 1

    def failed_allocations(self):
        return self.failures

    def total_bytes(self):
        return 100 * GIB


class ScriptedHandle:
    def __init__(self):
        self.device = ScriptedDevice()
        self.plans = []

    def apply_plan(self, plan, size=0):
        self.plans.append(plan)
        self.device.peak_bytes = plan.predicted.peak_bytes  # as long as a test does not say otherwise

    @property
    def plan(self):
        return self.plans[-1]

    def engine(self):
        return SimpleNamespace(device=self.device)

    def made_for(self):
        return {"model": "small", "device": "none"}

    def is_captured(self):
        return False

    def never_recomputed(self):
        return {}

    def waits(self, seconds):
        """Compute waited so long for what comes back."""
        self.scope.recorder.stats.stall_backward_s += seconds

    def copies(self, share):
        """The lanes copied a GiB each, at so much of the rates that were probed."""
        stats = self.scope.recorder.stats
        stats.out_sample.add(GIB, GIB / (LINK.out * share))
        stats.in_sample.add(GIB, GIB / (LINK.back * share))

    def compiled(self):
        return ()

    def memory_before(self):
        return {}, {}


def controller_of(budget_bytes=None, host=None, **settings):
    """A control that was given a profile, and its handle."""
    measured = with_host(profile(*layers(6), outside=outside(after_s=0.001, peak_bytes=500_000_000)), host)
    handle = ScriptedHandle()
    scope = handle.scope = HookContext(Limits(1, 1, 1), lambda _: True)
    budget = None if budget_bytes is None else (lambda total_bytes: budget_bytes)
    names = tuple(region.name for region in measured.regions)
    control = PlanController(handle, names, scope, budget, lambda *_: False, measured, **settings)
    control.start()
    return control, handle


def step(control, tokens=1000):
    """One step that is followed to its end."""
    pulse = control.step_begins(tokens)
    pulse.forward_ended()
    pulse._end()


def steps(control, handle, count, ratio, peak_ratio=1.0):
    """Steps that take `ratio` times what was predicted, of whatever plan is followed then."""
    for _ in range(count):
        predicted = handle.plan.predicted
        handle.device.step_s = predicted.step_s * ratio
        handle.device.peak_bytes = int(predicted.peak_bytes * peak_ratio)
        step(control)
    control.step_begins(1000)


@pytest.mark.parametrize(("budget_bytes", "ratio"), [(None, 1.01), (None, 0.97), (int(2.5 * GIB), 1.015)])
def test_steps_as_predicted_change_nothing(budget_bytes, ratio):
    control, handle = controller_of(budget_bytes)
    steps(control, handle, 40, ratio=ratio)
    assert len(handle.plans) == 1
    assert control.phase is Phase.PLANNED


@pytest.mark.parametrize("ratio", [0.7, 1.5])
def test_steps_that_are_off_are_planned_again_with_what_they_took(ratio):
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    before, predicted = control.profile.plain_s, handle.plan.predicted
    waits_s = predicted.stall_forward_s + predicted.stall_backward_s
    handle.device.step_s = predicted.step_s * ratio
    for _ in range(10):
        handle.waits(waits_s)
        step(control)
    assert len(handle.plans) == 2
    compute_s = predicted.step_s - waits_s
    assert control.profile.plain_s == pytest.approx(before * (handle.device.step_s - waits_s) / compute_s)


@pytest.mark.parametrize("ratio", [0.97, 1.04])
def test_a_plan_within_a_budget_is_made_once_more_when_the_device_is_at_its_pace(ratio):
    """Off by less than is planned again for later. That is not when it began: its first seconds say nothing."""
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    true = control.profile.refitted(ratio, ratio)
    plans, passed_s = [], 0.0
    for _ in range(120):
        outcome = step_by(true, handle.plan)
        handle.device.step_s = outcome.step_s
        handle.waits(outcome.stall_forward_s + outcome.stall_backward_s)
        passed_s += outcome.step_s
        step(control)
        plans.append((len(handle.plans), passed_s))
    assert {count for count, _ in plans} == {1, 2}
    assert 5.0 < next(seconds for count, seconds in plans if count == 2) < 7.0
    assert handle.plan.predicted.step_s == pytest.approx(step_by(true, handle.plan).step_s, rel=0.005)


def test_one_slow_step_is_no_pace_to_settle_at(monkeypatch):
    """However long steps are."""
    monkeypatch.setattr("ebbtide._control.tuner._SETTLES_IN_S", 0.0)
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for k in range(30):
        handle.device.step_s = handle.plan.predicted.step_s * (1.04 if k < 6 else 1.0)
        step(control)
    assert len(handle.plans) == 1


def test_a_plan_whose_step_was_measured_is_settled(monkeypatch):
    monkeypatch.setattr("ebbtide._control.tuner._SETTLES_IN_S", 0.0)
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    control.tuner._size.follow.is_as_measured = True
    steps(control, handle, 30, ratio=1.03)
    assert len(handle.plans) == 1


def test_one_slow_step_is_none_to_plan_again_for():
    control, handle = controller_of()
    for k in range(30):
        handle.device.step_s = handle.plan.predicted.step_s * (3.0 if k % 3 == 0 else 1.0)
        step(control)
    assert len(handle.plans) == 1


def test_steps_that_are_always_off_are_planned_again_a_few_times_only():
    control, handle = controller_of()
    steps(control, handle, 400, ratio=1.2)
    planned = len(handle.plans)
    assert 2 <= planned <= 12
    steps(control, handle, 200, ratio=1.2)
    assert len(handle.plans) == planned


def test_a_peak_beyond_the_budget_is_planned_for():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    first = handle.plan.predicted.peak_bytes
    steps(control, handle, 5, ratio=1.0, peak_ratio=1.1)
    assert handle.plan.predicted.peak_bytes * 1.1 <= 2.5 * GIB * 1.02
    assert handle.plan.predicted.peak_bytes < first
    assert control.budget_bytes < 2.5 * GIB


def test_a_peak_well_below_the_prediction_gives_the_budget_back():
    control, handle = controller_of(budget_bytes=int(2.0 * GIB))
    before = handle.plan.predicted.step_s
    steps(control, handle, 5, ratio=1.0, peak_ratio=0.9)
    assert control.budget_bytes > 2.0 * GIB
    assert handle.plan.predicted.step_s <= before


def test_peaks_are_looked_at_only_when_a_plan_is_new():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    steps(control, handle, 30, ratio=1.0)
    assert handle.device.peaks_forgotten == 2


def test_what_only_one_of_two_steps_allocated_is_not_planned_for():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    handle.device.step_s, predicted_bytes = handle.plan.predicted.step_s, handle.device.peak_bytes
    for peak_ratio in (1.0, 1.0, 1.3, 1.0, 1.0, 1.0, 1.0):  # the third and the fourth are looked at, and differ
        handle.device.peak_bytes = int(predicted_bytes * peak_ratio)
        step(control)
    assert handle.device.peaks_forgotten == 4
    assert len(handle.plans) == 1


def test_what_every_second_step_allocates_is_planned_for():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for k in range(40):
        handle.device.peak_bytes = handle.plan.predicted.peak_bytes + (k % 2) * GIB // 4
        handle.device.step_s = handle.plan.predicted.step_s
        step(control)
    assert handle.plan.predicted.peak_bytes + GIB // 4 <= 2.5 * GIB


def test_what_running_out_of_memory_took_off_the_budget_is_not_given_back():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB), replans_on_oom=True)
    planned_for = []
    for k in range(60):
        handle.device.step_s = handle.plan.predicted.step_s
        handle.device.peak_bytes = handle.plan.predicted.peak_bytes
        if k == 10:
            handle.device.failures += 1  # something else on the device took what was free
            pulse = control.step_begins(1000)
            pulse.forward_ended()
            with pytest.warns(EbbtideWarning, match="would have fitted"):
                control.step_begins(1000)
        step(control)
        planned_for.append(handle.plan.predicted.peak_bytes)
    assert max(planned_for[:10]) > 0.96 * 2.5 * GIB >= max(planned_for[12:])


def test_a_plan_that_makes_most_steps_slow_gives_way():
    control, handle = controller_of()
    plain_s, draw = control.profile.plain_s, random.Random(0)
    for _ in range(100):
        is_slow = handle.plan.predicted.moved_bytes and draw.random() < 0.75
        handle.device.step_s = plain_s * (1.15 if is_slow else 1.0)
        step(control)
    assert handle.plan.predicted.moved_bytes == 0


def test_a_machine_that_became_slower_is_followed_once():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    plain_s, first_s = control.profile.plain_s, handle.plan.predicted.step_s
    for k in range(150):
        handle.device.step_s = first_s if k < 10 else 1.2 * first_s
        step(control)
    assert control.profile.plain_s == pytest.approx(1.2 * plain_s, rel=0.02)


def test_what_was_taken_off_the_budget_and_is_not_needed_is_given_back():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    steps(control, handle, 5, ratio=1.0, peak_ratio=1.3)
    assert control.budget_bytes < 2.2 * GIB
    steps(control, handle, 5, ratio=1.0, peak_ratio=1.02)
    assert 2.4 * GIB < control.budget_bytes < 2.5 * GIB


def test_without_a_budget_nobody_forgets_a_peak():
    control, handle = controller_of()
    steps(control, handle, 30, ratio=1.0)
    assert handle.device.peaks_forgotten == 0


def test_a_peak_that_nothing_smaller_would_lower_is_left_alone():
    control, handle = controller_of(budget_bytes=int(1.75 * GIB))
    with pytest.warns(EbbtideWarning, match="beyond the budget of 1.75 GiB, and no plan lowers it") as told:
        steps(control, handle, 30, ratio=1.0, peak_ratio=3.0)
    assert len(told) == 1
    assert control.phase is Phase.PLANNED
    assert control.budget_bytes == int(1.75 * GIB)


def test_every_size_of_batch_has_a_plan_and_the_largest_of_its_bucket_is_planned_for():
    control, _ = controller_of()
    for tokens in (1000, 500, 501, 2000, 1000, 1990):
        step(control, tokens)
    plans = control.tuner.plans
    assert sorted(plans) == [500, 545, 1000, 2000]  # 545 is an eighth of an octave above 500, 1990 shares 2000
    seconds = [plans[bucket].predicted.step_s for bucket in sorted(plans)]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize("replans", [False, True])
def test_a_backward_that_ran_out_of_memory_is_noticed_in_the_next_step(replans):
    control, handle = controller_of(budget_bytes=int(2.5 * GIB), replans_on_oom=replans)
    control.step_begins(1000).forward_ended()  # its backward never ends
    handle.device.failures = 1
    with pytest.warns(EbbtideWarning, match="would have fitted"):
        step(control)
    assert (control.budget_bytes < 2.5 * GIB) == replans


def test_running_out_of_memory_takes_nothing_off_where_no_plan_needs_less():
    least_bytes = Solver(controller_of(budget_bytes=4 * GIB)[0].profile).smallest_budget()
    control, handle = controller_of(budget_bytes=least_bytes, replans_on_oom=True)
    for _ in range(5):
        control.step_begins(1000).forward_ended()  # its backward never ends
        handle.device.failures += 1
        with pytest.warns(EbbtideWarning, match="are left, and no plan needs less than"):
            step(control)
    assert control.budget_bytes == least_bytes
    assert len(handle.plans) == 1


def test_running_out_of_memory_takes_off_what_was_planned_not_what_was_to_spare():
    """A budget of many times the plan's peak, and the plan keeps everything."""
    control, handle = controller_of(budget_bytes=100 * GIB, replans_on_oom=True)
    peak_bytes = handle.plan.predicted.peak_bytes
    control.step_begins(1000).forward_ended()  # its backward never ends
    handle.device.failures = 1
    with pytest.warns(EbbtideWarning, match=r"go by a plan for less") as told:
        step(control)
    assert handle.plan.predicted.peak_bytes <= 0.95 * peak_bytes
    said = float(str(told[0].message).split("budget='")[1].split("GiB")[0])
    assert said * GIB < peak_bytes


def test_a_backward_that_never_came_is_no_failure():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB), replans_on_oom=True)
    control.step_begins(1000).forward_ended()
    step(control)
    assert len(handle.plans) == 1


# -- what is refitted --------------------------------------------------------------------------------------------------


def test_a_slow_link_is_taken_for_a_slow_link():
    control, handle = controller_of(budget_bytes=int(2.0 * GIB))
    plain_s, moved = control.profile.plain_s, handle.plan.predicted.moved_bytes
    for _ in range(10):
        predicted = handle.plan.predicted
        handle.device.step_s = predicted.step_s * 1.5
        handle.waits(predicted.stall_forward_s + predicted.stall_backward_s + predicted.step_s * 0.5)
        handle.copies(0.4)
        step(control)
    assert len(handle.plans) == 2
    assert control.profile.link.out == pytest.approx(LINK.out * 0.4)
    assert control.profile.plain_s == pytest.approx(plain_s)
    assert handle.plan.predicted.moved_bytes < moved


def test_few_copies_say_nothing_of_the_link():
    control, handle = controller_of(budget_bytes=int(2.0 * GIB))
    handle.scope.recorder.stats.out_sample.add(1000, 1.0)
    steps(control, handle, 8, ratio=1.5)
    assert control.profile.link == LINK


@pytest.fixture
def host_clock(monkeypatch):
    """The host's, for a test to set: seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("ebbtide._profiling.step_events.time.perf_counter", lambda: clock.now)
    return clock


def a_host(forward_ms=8.0):
    times = HostTime(forward_ms * MS, 10 * MS, 5 * MS, ops=10)
    small = {"frame_s": 1 * MS, "op_s": 0.1 * MS, "saved_output_s": 0.2 * MS, "moved_s": 0.1 * MS}
    return Host(
        (times,) * 6,
        before_s=0.0,
        after_s=0.0,
        backward_before_s=0.0,
        launch_ahead_s=0.0,
        steady_launch_ahead_s=0.0,
        **small,
    )


def queued_step(control, handle, clock, launch_overhead_s, is_ahead, compute=1.0, stalls_s=0.0):
    """A step whose regions took the host so long in forward.

    Args:
        is_ahead: of compute; in forward and backward as a pair.
        compute: what it takes for a region by itself, times what the profile says; as a pair too.
        stalls_s: what it waits for copies in backward.
    """
    device, profile = handle.device, control.tuner._profile
    in_forward, in_backward = is_ahead if isinstance(is_ahead, tuple) else (is_ahead, is_ahead)
    forward, backward = compute if isinstance(compute, tuple) else (compute, compute)
    pulse = control.step_begins(1000)
    options = options_of_plan(profile, handle.plan)
    handle.waits(stalls_s)
    device.is_behind = in_forward
    for region in profile.regions:
        pulse.entered(region.name)
        clock.now += launch_overhead_s / 6
        pulse.left(region.name)
        device.at_s += forward * region.forward_s
    pulse.forward_ended()
    device.is_behind = in_backward
    for region, option in zip(reversed(profile.regions), reversed(options), strict=True):
        pulse.launch_times.read(region.name)
        device.at_s += backward * (option.recompute_s + region.backward_s) + stalls_s / 5
    device.is_behind, device.at_s = False, 0.0
    pulse._end()


def refitted(clock, host_ratio, is_ahead, compute=None, host=None):
    """The control behind some steps that were planned again, and the profile before: queueing took so many times what
    was believed, and compute so many times as long.

    Without `compute` the steps take what such a host makes them take.
    """
    control, handle = controller_of(budget_bytes=int(2.0 * GIB), host=host or a_host())
    handle.device.is_async = True
    before, plan = control.profile, handle.plan
    predicted = plan.predicted
    stalls_s = predicted.stall_forward_s + predicted.stall_backward_s
    if compute is None:
        slow = replace(before, host=before.host.times(host_ratio))
        slower_s = host_wait_s(slow, plan) - predicted.host_wait_s
    else:
        slower_s = (compute - 1) * (predicted.step_s - stalls_s - predicted.host_wait_s)
    assert abs(slower_s) > 0.05 * predicted.step_s
    handle.device.step_s = predicted.step_s + slower_s
    launch_overhead_s = host_ratio * forward_launch_s(before, before.host, plan)
    for _ in range(10):
        queued_step(control, handle, clock, launch_overhead_s, is_ahead, compute or 1.0, stalls_s)
    assert len(handle.plans) == 2
    return control.profile, before


def test_a_slow_host_is_taken_for_a_slow_host(host_clock):
    after, before = refitted(host_clock, host_ratio=3.0, is_ahead=False)
    assert after.plain_s == pytest.approx(before.plain_s)
    assert after.host.regions[0].forward_s == pytest.approx(3 * before.host.regions[0].forward_s)
    assert after.host.op_s == pytest.approx(3 * before.host.op_s)


@pytest.mark.parametrize("host_ratio", [1.5, 2.0, 3.0, 5.0])
def test_what_a_slow_host_comes_to_is_what_is_predicted_from_then_on(host_ratio, host_clock):
    """Of the plan that was followed, and of those that come of it."""
    control, handle = controller_of(budget_bytes=int(2.0 * GIB), host=a_host())
    handle.device.is_async = True
    first = control.profile

    def true_steps(host, count):
        true, seen = replace(first, host=host), []
        for _ in range(count):
            plan = handle.plan
            outcome = step_by(true, plan)
            seen.append((plan, outcome.step_s))
            handle.device.step_s = outcome.step_s
            stalls_s = outcome.stall_forward_s + outcome.stall_backward_s
            is_ahead = outcome.host_wait_s < 1e-6
            launch_overhead_s = forward_launch_s(true, host, plan)
            queued_step(control, handle, host_clock, launch_overhead_s, is_ahead, stalls_s=stalls_s)
        return seen

    slow = first.host.times(host_ratio)
    seen = true_steps(slow, 40)
    assert control.profile.plain_s == pytest.approx(first.plain_s, rel=0.02)
    plan, took_s = seen[0]
    assert step_by(control.profile, plan).step_s == pytest.approx(took_s, rel=0.02)
    assert handle.plan.predicted.step_s == pytest.approx(seen[-1][1], rel=0.05)
    assert len(handle.plans) <= 3


def step_by(step, plan):
    options = [option_for(each, plan.recipe_of(each.name) or Recipe("keep")) for each in step.regions]
    return simulate(step, options, windows_within(step, options, 10**15))


def test_a_host_that_waits_for_a_slow_compute_is_none_that_is_slow(host_clock):
    """The device queues so many kernels and no more."""
    after, before = refitted(host_clock, host_ratio=3.0, is_ahead=True, compute=1.4)
    assert after.plain_s == pytest.approx(before.plain_s * 1.4, rel=0.01)
    assert after.host.regions == before.host.regions


@pytest.mark.parametrize("compute", [0.85, 1.2])
@pytest.mark.parametrize("is_ahead", [(False, True), (True, False)])
def test_the_regions_that_were_queued_before_compute_came_to_them_say_its_pace(is_ahead, compute, host_clock):
    """Of one way there are enough; whatever is believed of what compute waits for in the other."""
    host = a_host()
    waits = replace(host, regions=tuple(replace(times, backward_s=40 * MS) for times in host.regions))
    after, before = refitted(host_clock, host_ratio=1.0, is_ahead=is_ahead, compute=compute, host=waits)
    assert after.plain_s == pytest.approx(before.plain_s * compute, rel=0.01)


def test_what_neither_host_nor_regions_explain_is_laid_to_compute(host_clock):
    """Compute is in the last region that was queued all along, and the host takes what was believed: it is what is
    between the regions, or in a hook. It is planned again until that is predicted, not as often as may be."""
    control, handle = controller_of(budget_bytes=int(2.0 * GIB), host=a_host())
    handle.device.is_async = True
    before = control.profile
    true = before.refitted(2.5, 2.5)
    for _ in range(60):
        outcome = step_by(true, handle.plan)
        handle.device.step_s = outcome.step_s
        launch_overhead_s = forward_launch_s(before, before.host, handle.plan)
        queued_step(control, handle, host_clock, launch_overhead_s, is_ahead=False)
    assert handle.plan.predicted.step_s == pytest.approx(outcome.step_s, rel=0.05)
    assert len(handle.plans) <= 4


def test_a_host_that_is_quicker_than_was_believed_is_ahead(host_clock):
    after, before = refitted(host_clock, host_ratio=0.5, is_ahead=True, compute=1.4)
    assert after.host.regions[0].forward_s == pytest.approx(before.host.regions[0].forward_s / 2)


def test_nobody_is_asked_in_a_captured_part():
    device = ScriptedDevice()
    device.matches_capture = lambda: False
    device.is_done = lambda event: pytest.fail("asked")
    device.record = lambda stream: pytest.fail("recorded")
    queueing = LaunchTimes(device)
    for _ in range(3):
        queueing.entered("a")
        queueing.left()
        queueing.read("a")
    assert not queueing.is_cpu_bound


def test_what_comes_behind_its_backward_is_none_of_a_step(monkeypatch):
    """A graph that is kept runs again, or ran in part at first."""
    monkeypatch.setattr("ebbtide._profiling.step_events.graph_task_id", lambda: 1)
    monkeypatch.setattr("ebbtide._profiling.step_events.at_end_of_backward", lambda callback: None)
    device = ScriptedDevice()
    device.is_async = True
    pulse = StepMonitor(device, reads_peak=False)
    for region in ("b", "b", "", "a"):
        pulse.read(region)
    pulse._end()
    for region in ("b", "a"):
        pulse.read(region)
    assert [point.region for point in pulse.launch_times.backward] == ["b", "a"]


@pytest.mark.parametrize("remembers", [True, False])
def test_peaks_are_looked_at_as_often_as_it_takes(remembers, monkeypatch):
    """Once a region; at every read where in between nobody looks."""
    monkeypatch.setattr("ebbtide._profiling.step_events.graph_task_id", lambda: 1)
    monkeypatch.setattr("ebbtide._profiling.step_events.at_end_of_backward", lambda callback: None)
    device = ScriptedDevice()
    device.tracks_peak = remembers
    looks = []
    monkeypatch.setattr(device, "memory", lambda: looks.append(device.peak_bytes) or Memory(0, device.peak_bytes))
    pulse = StepMonitor(device, reads_peak=True)
    for region, peak_bytes in (("b", 3), ("b", 4), ("a", 7), ("", 5), ("", 5)):
        device.peak_bytes = peak_bytes
        pulse.read(region)
    assert looks == ([3, 7, 5] if remembers else [3, 4, 7, 5, 5])
    assert pulse.peak_bytes == 7


# -- the pace of compute -----------------------------------------------------------------------------------------------


def pace_by(control, handle, ratio, count=8):
    """Of compute, as the profile has it behind steps in which compute takes so many times what was predicted."""
    before, predicted = control.profile.plain_s, handle.plan.predicted
    waits_s = predicted.stall_forward_s + predicted.stall_backward_s
    handle.device.step_s = waits_s + (predicted.step_s - waits_s) * ratio
    for _ in range(count):
        handle.waits(waits_s)
        step(control)
    return control.profile.plain_s / before


@pytest.mark.parametrize("ratio", [0.98, 1.03])
def test_the_profile_is_at_the_pace_of_the_last_steps(ratio):
    """Too little to plan again, and what is planned later is compared with what it was planned from."""
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    assert pace_by(control, handle, ratio) == pytest.approx(ratio)
    assert pace_by(control, handle, ratio=1.0) == pytest.approx(1 / ratio)
    assert len(handle.plans) == 1


def test_a_single_step_is_no_pace():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    assert pace_by(control, handle, 1.03, count=3) == 1.0


def test_what_is_planned_again_is_not_at_the_pace_twice():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    before = control.profile
    for slower in (1.04, 1.1):
        true = before.refitted(slower, slower)
        for _ in range(20):
            outcome = step_by(true, handle.plan)
            handle.device.step_s = outcome.step_s
            handle.waits(outcome.stall_forward_s + outcome.stall_backward_s)
            step(control)
        assert control.profile.plain_s == pytest.approx(true.plain_s, rel=0.005)
    assert len(handle.plans) == 2


def test_the_pace_is_that_of_the_size_at_hand():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    before_s = control.profile.plain_s
    for tokens, slower, count in ((1000, 1.04, 20), (500, 0.97, 10)):
        for _ in range(count):
            handle.device.step_s = handle.plan.predicted.step_s * slower
            handle.waits(handle.plan.predicted.stall_forward_s + handle.plan.predicted.stall_backward_s)
            step(control, tokens)
    control.step_begins(500)
    assert control.profile.plain_s < before_s
    control.step_begins(1000)
    assert control.profile.plain_s > before_s


def test_ranks_that_share_a_plan_share_its_profile():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB), agree=lambda answer: [answer])
    assert pace_by(control, handle, 1.03) == 1.0


def test_a_plan_that_was_made_of_another_profile_says_no_pace(monkeypatch):
    control, _ = controller_of()
    monkeypatch.setattr("ebbtide._control.plan_stats.PlanStats.pace_of_compute", 1.02)
    assert control.profile.plain_s == pytest.approx(1.02 * control.tuner._profile.plain_s)
    monkeypatch.setattr(control.tuner, "_profile", control.tuner._profile.refitted(1.1, 1.1))
    assert control.profile is control.tuner._profile


@pytest.mark.parametrize(("forward_ms", "says"), [(6.0, True), (8.4, True), (12.0, False)])
def test_a_pace_is_none_where_compute_waits_for_the_host(forward_ms, says):
    """How long is not measured; a little is believed."""
    control, handle = controller_of(budget_bytes=int(2.0 * GIB), host=a_host(forward_ms))
    predicted, before_s = handle.plan.predicted, control.profile.plain_s
    assert (predicted.host_wait_s <= 0.01 * predicted.step_s) is says
    stalls_s = predicted.stall_forward_s + predicted.stall_backward_s
    for slower, expected in ((1.0, 1.0), (1.03, 1.03 if says else 1.0)):
        compute_s = predicted.step_s - predicted.host_wait_s - stalls_s
        handle.device.step_s = stalls_s + predicted.host_wait_s + compute_s * slower
        for _ in range(12):
            handle.waits(stalls_s)
            step(control)
        assert control.profile.plain_s == pytest.approx(before_s * expected, rel=1e-6)
    assert len(handle.plans) == 1


@pytest.mark.parametrize(
    ("compute", "host_ratio", "is_ahead"),
    [((1.03, 1.03), 1.0, True), ((0.98, 0.98), 1.1, False), ((1.03, 1.03), 2.0, True), ((1.06, 1.01), 1.0, True)],
)
def test_the_profile_is_at_the_pace_of_the_host_and_of_compute(compute, host_ratio, is_ahead, host_clock):
    """Where compute waits for the host in forward, and not in backward. Where it does not, the host is not slow."""
    control, handle = controller_of(budget_bytes=int(2.0 * GIB), host=a_host(12.0))
    handle.device.is_async = True
    before, plan = control.profile, handle.plan
    stalls_s = plan.predicted.stall_forward_s + plan.predicted.stall_backward_s
    handle.device.step_s = 1.04 * plan.predicted.step_s
    launch_overhead_s = host_ratio * forward_launch_s(before, before.host, plan)
    for _ in range(8):
        queued_step(control, handle, host_clock, launch_overhead_s, (is_ahead, True), compute, stalls_s)
    control.step_begins(1000)
    region, was = control.profile.regions[0], before.regions[0]
    assert region.forward_s == pytest.approx(compute[0] * was.forward_s, rel=0.005)
    assert region.backward_s == pytest.approx(compute[1] * was.backward_s, rel=0.005)
    expected = 1.0 if is_ahead else host_ratio
    assert control.profile.host.regions[0].forward_s == pytest.approx(expected * before.host.regions[0].forward_s)
    assert len(handle.plans) == 1


def test_at_any_pace_a_step_with_everything_kept_waits_for_no_host():
    control, handle = controller_of(host=a_host(20.0))
    assert pace_by(control, handle, 0.96) == pytest.approx(0.96, rel=0.001)
    kept = Solver(control.profile).keeping_all()
    assert host_wait_s(control.profile, kept) == pytest.approx(0.0, abs=1e-9)


# -- without a budget, nothing may be slower than with everything kept -------------------------------------------------


def run(control, handle, kept_s, moved_s, count=40):
    """Steps that take so long, whatever is predicted."""
    for _ in range(count):
        handle.device.step_s = moved_s if handle.plan.predicted.moved_bytes else kept_s
        step(control)


def test_a_plan_that_looks_slow_is_weighed_against_keeping_everything():
    control, handle = controller_of()
    first, plain_s = handle.plan, control.profile.plain_s
    assert first.predicted.moved_bytes > 0
    run(control, handle, kept_s=1.1 * plain_s, moved_s=1.1 * plain_s)  # the machine is slow, not the plan
    assert [plan.predicted.moved_bytes > 0 for plan in handle.plans] == [True, False, True]
    assert handle.plan.regions == first.regions
    assert handle.plan.predicted.step_s == pytest.approx(1.1 * plain_s)


@pytest.mark.parametrize("most", [1.06, 1.12])
@pytest.mark.parametrize("seed", range(10))
def test_a_machine_that_is_slow_now_and_then_does_not_end_moving(seed, most):
    """As one H200 was: half of its steps took 2 to 6 % more than the others, whatever the plan."""
    control, handle = controller_of()
    plain_s, draw = control.profile.plain_s, random.Random(seed)
    for _ in range(200):
        slow = draw.uniform(1.02, most) if draw.random() < 0.5 else 1.0
        handle.device.step_s = plain_s * slow * (1.004 if handle.plan.predicted.moved_bytes else 1.0)
        step(control)
    assert handle.plan.predicted.moved_bytes > 0


def test_a_plan_that_is_slower_than_keeping_everything_gives_way():
    control, handle = controller_of()
    plain_s = control.profile.plain_s
    run(control, handle, kept_s=plain_s, moved_s=1.04 * plain_s)
    assert handle.plan.predicted.moved_bytes == 0
    assert all(region.recipe.action == "keep" for region in handle.plan.regions.values())
    before = len(handle.plans)
    run(control, handle, kept_s=plain_s, moved_s=1.04 * plain_s)
    assert len(handle.plans) == before


def test_a_plan_that_a_slow_link_makes_slow_gives_way_to_one_that_moves_less():
    control, handle = controller_of()
    plain_s, first = control.profile.plain_s, handle.plan.predicted.moved_bytes
    for _ in range(40):
        moved = handle.plan.predicted.moved_bytes
        waits_s = 0.1 * plain_s if moved > 0.6 * first else 0.0
        handle.device.step_s = plain_s + waits_s
        handle.waits(waits_s)
        if moved:
            handle.copies(0.5)
        step(control)
    assert 0 < handle.plan.predicted.moved_bytes <= 0.6 * first
    assert control.profile.link.out == pytest.approx(LINK.out * 0.5)


def test_batches_larger_than_the_measured_one_are_not_kept_to_see_what_that_takes():
    control, handle = controller_of()
    for _ in range(40):
        handle.device.step_s = handle.plan.predicted.step_s * (1.2 if len(handle.plans) < 3 else 1.0)
        step(control, tokens=2000)
    assert all(plan.predicted.moved_bytes > 0 for plan in handle.plans)


# -- steps in flight ---------------------------------------------------------------------------------------------------


def test_steps_are_read_as_they_pass_however_far_the_host_is_ahead():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    handle.device.step_s = handle.plan.predicted.step_s * 1.5
    for k in range(12):
        handle.device.is_behind = k % 4 != 3  # several steps pass at once
        step(control)
    assert len(handle.plans) == 2


def test_steps_that_run_beside_each_other_say_nothing():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    handle.device.step_s = handle.plan.predicted.step_s * 1.5
    for _ in range(20):
        pulses = [control.step_begins(1000) for _ in range(2)]
        for pulse in pulses:
            pulse.forward_ended()
        for pulse in reversed(pulses):
            pulse._end()
    assert len(handle.plans) == 1


def test_a_batch_is_compared_with_its_share_of_what_was_predicted():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    step(control, tokens=920)
    bucket = control.tuner.tokens
    assert bucket == 1000
    for _ in range(20):
        handle.device.step_s = handle.plan.predicted.step_s * 0.92
        step(control, tokens=920)
    assert len(handle.plans) == 1


def test_without_a_budget_a_size_that_was_not_measured_leaves_the_link_some_room():
    control, handle = controller_of()
    step(control, tokens=500)
    to_the_last_byte = Solver(control.profile.scaled(500)).solve(None).predicted.moved_bytes
    assert 0.8 * to_the_last_byte < handle.plan.predicted.moved_bytes <= 0.96 * to_the_last_byte


def test_what_one_size_leaves_unused_no_other_size_counts_on():
    control, handle = controller_of(budget_bytes=int(2.0 * GIB))
    steps(control, handle, 5, ratio=1.0, peak_ratio=0.9)
    assert control.budget_bytes > 2.0 * GIB
    step(control, tokens=1500)
    assert control.budget_bytes == int(2.0 * GIB)


def test_what_one_size_is_beyond_its_prediction_all_sizes_are_planned_for():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    steps(control, handle, 5, ratio=1.0, peak_ratio=1.1)
    known = control.budget_bytes
    step(control, tokens=500)
    assert control.budget_bytes == known < 2.5 * GIB


def test_peaks_of_sizes_that_take_turns_are_looked_at():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for k in range(16):
        tokens = (1000, 500)[k % 2]
        handle.device.step_s = control.tuner.plans.get(tokens, handle.plan).predicted.step_s
        step(control, tokens)
    assert handle.device.peaks_forgotten == 4


def test_a_plan_that_gave_way_while_another_size_was_at_hand_is_planned_anew():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for k in range(30):
        handle.device.step_s = handle.plan.predicted.step_s * (1.5 if k < 12 else 1.0)
        step(control, tokens=(1000, 500)[k % 2])
    assert control.tuner.plans[control.tuner.tokens] is handle.plan


def test_a_batch_too_large_for_the_budget_goes_by_what_needs_the_least_and_a_warning():
    control, handle = controller_of(budget_bytes=int(2.0 * GIB))
    with pytest.warns(EbbtideWarning, match="does not fit the budget of 2.00 GiB.*a peak of"):
        step(control, tokens=8000)
    assert handle.plan.predicted.peak_bytes > 2.0 * GIB
    step(control, tokens=1000)
    assert handle.plan.predicted.peak_bytes <= 2.0 * GIB


def test_a_trial_of_one_size_leaves_the_plan_of_another_alone():
    control, handle = controller_of()
    plain_s = control.profile.plain_s
    for k in range(45):
        tokens = (1000, 500, 500)[k % 3]
        handle.device.step_s = plain_s * (1.1 if tokens == 1000 else 0.5)
        handle.device.is_behind = k % 3 == 1  # the step of the large batch is read when the second small one begins
        step(control, tokens)
        assert handle.plan == control.tuner.plans[tokens]
    assert any(plan.predicted.moved_bytes == 0 for plan in handle.plans)  # it was tried


# -- what must end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1000, 500), (1000, 900, 800, 700)])
def test_sizes_that_take_turns_do_not_swing(sizes):
    control, handle = controller_of()
    plain_s = control.profile.plain_s
    slow = 0
    for k in range(600):
        tokens = sizes[k // 10 % len(sizes)]
        pulse = control.step_begins(tokens)
        moves = handle.plan.predicted.moved_bytes > 0
        handle.device.step_s = (1.04 if moves else 1.0) * plain_s * tokens / 1000
        pulse._began = handle.device.record(None)
        pulse.forward_ended()
        pulse._end()
        slow += moves and k >= 400
    assert slow == 0


def test_peaks_are_looked_at_with_several_forwards_under_way():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for _ in range(20):
        handle.device.peak_bytes = int(handle.plan.predicted.peak_bytes * 1.2)
        pulses = [control.step_begins(1000) for _ in range(2)]
        for pulse in reversed(pulses):
            pulse._end()
    assert control.budget_bytes < 2.5 * GIB
    assert handle.plan.predicted.peak_bytes * 1.2 <= 2.5 * GIB * 1.02


def test_a_graph_that_was_dropped_is_not_under_way():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    handle.device.step_s = handle.plan.predicted.step_s * 1.5
    for _ in range(12):
        control.step_begins(1000).forward_ended()
        step(control)
    assert len(handle.plans) == 2


def in_a_trial():
    control, handle = controller_of()
    first, slow_s = handle.plan, 1.1 * control.profile.plain_s
    while not control.tuner._size.follow.is_trial:
        handle.device.step_s = slow_s
        step(control)
    assert handle.plan.predicted.moved_bytes == 0
    return control, handle, first


def test_a_trial_that_runs_out_of_memory_ends():
    control, handle, first = in_a_trial()
    try:
        raise torch.OutOfMemoryError("no memory left")
    except torch.OutOfMemoryError:
        control.forward_failed()
    assert handle.plan == first
    handle.device.step_s = 2 * control.profile.plain_s
    for _ in range(40):
        step(control)
        assert not control.tuner._size.follow.is_trial


def test_a_trial_that_cannot_be_read_ends():
    control, handle, first = in_a_trial()
    held = [control.step_begins(1000) for _ in range(30)]
    assert handle.plan == first
    assert len(held) == 30


def test_the_second_half_of_a_trial_that_cannot_be_read_ends_as_well():
    """With everything kept the steps were quicker, and the plan that moves is tried once more."""
    control, handle, first = in_a_trial()
    handle.device.step_s = control.profile.plain_s
    while handle.plan.predicted.moved_bytes == 0:
        step(control)
    assert control.tuner._size.follow.is_trial
    held = [control.step_begins(1000) for _ in range(30)]
    assert handle.plan == first
    assert not control.tuner._size.follow.is_trial
    assert len(held) == 30


def test_a_machine_that_grows_slower_is_no_reason_to_move_nothing():
    control, handle = controller_of()
    plain_s = control.profile.plain_s
    run(control, handle, kept_s=1.1 * plain_s, moved_s=1.1 * plain_s)
    run(control, handle, kept_s=1.14 * plain_s, moved_s=1.14 * plain_s)
    assert handle.plan.predicted.moved_bytes > 0


def test_what_one_size_waits_says_nothing_of_another():
    control, handle = controller_of(budget_bytes=int(1.9 * GIB))
    before = control.profile.plain_s
    for k in range(60):
        tokens = (2000, 125)[k % 2]
        plan = control.tuner.plans.get(tokens, handle.plan).predicted
        handle.device.step_s = plan.step_s * (1.06 if tokens == 125 else 1.0)
        handle.device.is_behind = k % 2 == 0
        handle.waits(0.2 * before if tokens == 2000 else 0.0)
        step(control, tokens)
    assert control.profile.plain_s > 0.4 * before


def test_memory_that_grows_after_the_peak_was_looked_at_is_planned_for():
    control, handle = controller_of(budget_bytes=int(2.5 * GIB))
    for k in range(60):
        handle.device.step_s = handle.plan.predicted.step_s
        handle.device.peak_bytes = handle.plan.predicted.peak_bytes + (0 if k < 10 else 300_000_000)
        step(control)
    assert handle.plan.predicted.peak_bytes + 300_000_000 <= 2.5 * GIB
