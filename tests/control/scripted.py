"""A controller with a scripted device: steps take what a test wants them to."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from planner.workloads import GIB, layers, outside, profile

from ebbtide._control.controller import PlanController
from ebbtide._engine.context import HookContext, Limits
from ebbtide._planner.simulate import with_host
from ebbtide._planner.solve import answer
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._types import Memory

LINK = profile().link


_ANSWERS = {}


def remembered(question):
    """Most tests begin with the same question, and an answer takes a second."""
    key = repr(question)
    if key not in _ANSWERS:
        _ANSWERS[key] = answer(question)
    return _ANSWERS[key]


class ScriptedDevice:
    """A clock and an allocator that say what a test wants them to. An event is the duration of its step."""

    supports_timing = True
    is_async = False
    tracks_peak = True
    torch_device = torch.device("cpu")

    def __init__(self):
        self.step_s = 1.0
        self.is_behind = False
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.peak_resets = 0
        self.failures = 0
        self.others_bytes = 0  # of other processes

    def current_stream(self):
        return None

    def record(self, stream):
        return self.step_s

    def matches_capture(self):
        return True

    def is_done(self, event):
        return not self.is_behind

    def seconds_between(self, start, end):
        return start

    def memory(self):
        return Memory(self.allocated_bytes, self.peak_bytes)

    def reset_peak_stats(self):
        self.peak_resets += 1

    def failed_allocations(self):
        return self.failures

    def total_bytes(self):
        return 100 * GIB

    def available_bytes(self):
        return self.total_bytes() - self.others_bytes


class ScriptedHandle:
    def __init__(self):
        self.device = ScriptedDevice()
        self.plans = []
        self.has_stepped = False  # an optimizer, since the last question

    def apply_plan(self, plan, size=0):
        self.plans.append(plan)
        if plan.predicted is not None:  # as long as a test does not say otherwise
            self.device.peak_bytes = plan.predicted.peak_bytes

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

    def partitionable(self):
        return {}

    def compilations(self):
        return 0, 0.0

    def have_stepped(self):
        have_stepped, self.has_stepped = self.has_stepped, False
        return have_stepped

    def memory_before(self):
        return {}, {}


def controller_of(budget_bytes=None, host=None, link=1.0, slower=1.0, device_bytes=None, starts=True, **settings):
    """A controller with a profile, and the handle."""
    measured = with_host(profile(*layers(6), outside=outside(after_s=0.001, peak_bytes=500_000_000)), host)
    measured = replace(measured, link=measured.link.times(link, link)).at_speed(slower)
    measured = replace(measured, device_bytes=device_bytes)
    handle = ScriptedHandle()
    scope = handle.scope = HookContext(Limits(1, 1, 1), lambda _: True)
    budget = None if budget_bytes is None else (lambda total_bytes: budget_bytes)
    names = tuple(region.name for region in measured.regions)
    controller = PlanController(handle, names, scope, budget, lambda *_: False, measured, **settings)
    if starts:
        controller.start()
    return controller, handle


def without_corrections(controller):
    """For tests of one plan's figures."""
    controller.tuner._size.corrections = THRESHOLDS.corrections


def step(controller, tokens=1000):
    """One step that is followed to its end."""
    monitor = controller.step_begins(tokens)
    if monitor is not None:
        monitor.forward_ended()
        monitor._end()


def steps(controller, handle, count, ratio, peak_ratio=1.0):
    """Steps that take `ratio` times what was predicted, of whatever plan is followed then."""
    for _ in range(count):
        predicted = handle.plan.predicted
        if predicted is not None:
            handle.device.step_s = predicted.step_s * ratio
            handle.device.peak_bytes = int(predicted.peak_bytes * peak_ratio)
        step(controller)
    controller.step_begins(1000)
