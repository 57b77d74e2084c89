"""What a control makes of steps that are not what was predicted: scripted steps, no model."""

from types import SimpleNamespace

import pytest
import torch
from workloads import GIB, layers, profile
from workloads import around as turn_around

from ebbtide import EbbtideWarning
from ebbtide.engine.scope import Limits, Scope
from ebbtide.planner.control import Control, Phase
from ebbtide.types import Memory


class ScriptedDevice:
    """A clock and an allocator that say what a test wants them to."""

    has_clock = True
    torch_device = torch.device("cpu")

    def __init__(self):
        self.step_s = 1.0
        self.peak_bytes = 0
        self.peaks_forgotten = 0
        self.failures = 0

    def current_stream(self):
        return None

    def record(self, stream):
        return "point"

    def is_done(self, event):
        return True

    def seconds_between(self, start, end):
        return self.step_s

    def memory(self):
        return Memory(0, self.peak_bytes)

    def forget_peak(self):
        self.peaks_forgotten += 1

    def failed_allocations(self):
        return self.failures

    def total_bytes(self):
        return 100 * GIB


class ScriptedHandle:
    def __init__(self):
        self.device = ScriptedDevice()
        self.plans = []

    def go_by(self, plan):
        self.plans.append(plan)

    @property
    def plan(self):
        return self.plans[-1]

    def engine(self):
        return SimpleNamespace(device=self.device)

    def made_for(self):
        return {"model": "small", "device": "none"}

    def compiled(self):
        return ()

    def memory_before(self):
        return {}, {}


def control_of(budget_bytes=None, **settings):
    """A control that was given a profile, and its handle."""
    measured = profile(*layers(6), around=turn_around(after_s=0.001, peak_bytes=500_000_000))
    handle = ScriptedHandle()
    scope = Scope(Limits(1, 1, 1), lambda _: True)
    budget = None if budget_bytes is None else (lambda total_bytes: budget_bytes)
    names = tuple(region.name for region in measured.regions)
    control = Control(handle, names, scope, budget, lambda *_: False, measured, **settings)
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


def test_steps_as_predicted_change_nothing():
    control, handle = control_of()
    steps(control, handle, 40, ratio=1.03)
    assert len(handle.plans) == 1
    assert control.phase is Phase.PLANNED


def test_steps_that_are_off_are_planned_again_with_what_they_took():
    control, handle = control_of()
    before = control.profile.plain_s
    handle.device.step_s = handle.plan.predicted.step_s * 1.5
    for _ in range(8):
        step(control)
    assert len(handle.plans) == 2
    assert control.profile.plain_s == pytest.approx(before * 1.5)
    assert handle.plan.predicted.step_s == pytest.approx(handle.device.step_s, rel=0.01)


def test_one_slow_step_is_none_to_plan_again_for():
    control, handle = control_of()
    for k in range(30):
        handle.device.step_s = handle.plan.predicted.step_s * (3.0 if k % 3 == 0 else 1.0)
        step(control)
    assert len(handle.plans) == 1


def test_steps_that_are_always_off_are_planned_again_a_few_times_only():
    control, handle = control_of()
    steps(control, handle, 400, ratio=1.2)
    assert 2 <= len(handle.plans) <= 6


def test_a_peak_beyond_the_budget_is_planned_for():
    control, handle = control_of(budget_bytes=int(2.5 * GIB))
    first = handle.plan.predicted.peak_bytes
    steps(control, handle, 5, ratio=1.0, peak_ratio=1.1)
    assert handle.plan.predicted.peak_bytes * 1.1 <= 2.5 * GIB * 1.02
    assert handle.plan.predicted.peak_bytes < first
    assert control.budget_bytes < 2.5 * GIB


def test_a_peak_well_below_the_prediction_gives_the_budget_back():
    control, handle = control_of(budget_bytes=int(2.0 * GIB))
    before = handle.plan.predicted.step_s
    steps(control, handle, 5, ratio=1.0, peak_ratio=0.9)
    assert control.budget_bytes > 2.0 * GIB
    assert handle.plan.predicted.step_s <= before


def test_peaks_are_looked_at_only_when_a_plan_is_new():
    control, handle = control_of(budget_bytes=int(2.5 * GIB))
    steps(control, handle, 30, ratio=1.0)
    assert handle.device.peaks_forgotten == 1


def test_without_a_budget_nobody_forgets_a_peak():
    control, handle = control_of()
    steps(control, handle, 30, ratio=1.0)
    assert handle.device.peaks_forgotten == 0


def test_a_peak_that_nothing_smaller_would_lower_is_left_alone():
    control, handle = control_of(budget_bytes=int(1.75 * GIB))
    steps(control, handle, 30, ratio=1.0, peak_ratio=3.0)
    assert control.phase is Phase.PLANNED
    assert control.budget_bytes == int(1.75 * GIB)


def test_every_size_of_batch_has_a_plan_and_the_largest_of_its_bucket_is_planned_for():
    control, _ = control_of()
    for tokens in (1000, 500, 501, 2000, 1000, 1990):
        step(control, tokens)
    assert sorted(control._plans) == [500, 545, 1000, 2000]  # 545 is an eighth of an octave above 500, 1990 shares 2000
    seconds = [control._plans[bucket].predicted.step_s for bucket in sorted(control._plans)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("replans", [False, True])
def test_a_backward_that_ran_out_of_memory_is_noticed_in_the_next_step(replans):
    control, handle = control_of(budget_bytes=int(2.5 * GIB), replans_on_oom=replans)
    control.step_begins(1000).forward_ended()  # its backward never ends
    handle.device.failures = 1
    with pytest.warns(EbbtideWarning, match="would have fitted"):
        step(control)
    assert (control.budget_bytes < 2.5 * GIB) == replans


def test_a_backward_that_never_came_is_no_failure():
    control, handle = control_of(budget_bytes=int(2.5 * GIB), replans_on_oom=True)
    control.step_begins(1000).forward_ended()
    step(control)
    assert len(handle.plans) == 1
