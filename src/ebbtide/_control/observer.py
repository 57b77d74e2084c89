"""What one rank sees of its steps. Never waits: the CPU may be steps ahead of the device."""

from typing import NamedTuple

from ebbtide._control.batch_size import BatchSize
from ebbtide._control.link_rates import LinkRates
from ebbtide._control.trial import Trial
from ebbtide._engine.stats import StatsRecorder
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._profiling.step_events import InFlightStep, StepMonitor, TimelineMonitor
from ebbtide._profiling.timeline import History, Timeline
from ebbtide._types import Device

_MOST_IN_FLIGHT = 64


class _PlannedStep(NamedTuple):
    """A step in flight. `share`: batch size over the planned batch size."""

    step: InFlightStep[StepMonitor]
    size: BatchSize
    trial: Trial
    share: float


class StepObserver:
    """Monitors the steps of plans, and adds the figures of finished steps to the trials.

    The durations of steps are compared with predictions without waiting for a step, so several monitors are in flight.
    Overlapping steps (two forwards, then backward) are not compared.

    Of each plan the first step in a known order is measured for a timeline, for a few events per region.

    Args:
        link_rates: tells the stalls.
        recorder: statistics of the handle.
        history: gets the finished steps.
        device: device of the model, if known.
        is_stage: of a pipeline, beside others on the rank: steps that other graphs interrupt are not compared either.
    """

    def __init__(
        self,
        link_rates: LinkRates,
        recorder: StatsRecorder,
        history: History,
        device: Device | None,
        is_stage: bool = False,
    ) -> None:
        self._link_rates = link_rates
        self._recorder = recorder
        self._history = history
        self._is_stage = is_stage
        self._timeline: tuple[Trial, Timeline] | None = None
        self._in_flight: list[_PlannedStep] = []
        self._rests = False  # in the step before: no hook tells of its backward
        self._failed_allocations = 0 if device is None else device.failed_allocations()

    @property
    def may_be_in_backward(self) -> bool:
        """Whether backward of a step may be still to come."""
        return self._rests or any(each.step.pending is not None for each in self._in_flight)

    def rest(self) -> None:
        """A step begins that nothing observes."""
        self._rests = True
        self._recorder.watched = None

    def timeline_of(self, trial: Trial | None) -> Timeline | None:
        """The measured step of the trial, if there is one."""
        return self._timeline[1] if self._timeline is not None and self._timeline[0] is trial else None

    def step_begins(
        self, device: Device, size: BatchSize, share: float, reads_peak: bool, is_verified: bool
    ) -> StepMonitor:
        """The monitor of a step by the plan of `size`. The duration of a verified step is ignored."""
        assert size.trial is not None
        self._rests = False
        self._recorder.watched = None  # of a graph that was dropped
        has_known_order = size.trial.steps >= THRESHOLDS.learning_steps
        if has_known_order and not is_verified and self.timeline_of(size.trial) is None:
            monitor = TimelineMonitor(device, reads_peak, self._recorder)
        else:
            monitor = StepMonitor(device, reads_peak)
        monitor.is_alone = not is_verified
        for each in self._in_flight:
            other = each.step.pending
            if other is not None:
                monitor.is_alone = other.is_alone = False
        self._in_flight.append(_PlannedStep(InFlightStep(monitor), size, size.trial, share))
        return monitor

    def ran_out(self, device: Device) -> bool:
        """Whether the device ran out of memory in a backward that did not end, since the last call."""
        if not (self._rests or any(each.step.ended is None for each in self._in_flight)):
            return False
        before, self._failed_allocations = self._failed_allocations, device.failed_allocations()
        return self._failed_allocations > before

    def forward_failed(self, device: Device | None) -> None:
        """An exception leaves forward."""
        self._in_flight.clear()
        if device is not None:
            self._failed_allocations = device.failed_allocations()

    def read_finished(self) -> list[BatchSize]:
        """Add all steps that have passed to the trials of their plans. Returns the sizes with new observations."""
        observed: list[BatchSize] = []
        finished: list[tuple[_PlannedStep, StepMonitor]] = []
        left: list[_PlannedStep] = []
        for each in self._in_flight:
            monitor = each.step.ended
            if monitor is not None and monitor.reads_peak and each.trial is each.size.trial:
                # Known before the device has finished the step.
                each.trial.add_peak(monitor.peak_bytes, each.share, monitor.before_bytes)
                monitor.reads_peak = False
                observed.append(each.size)
            if monitor is not None and monitor.is_readable:
                finished.append((each, monitor))
            elif monitor is not None or each.step.pending is not None:
                left.append(each)  # all other graphs were dropped
        self._in_flight = left[-_MOST_IN_FLIGHT:]
        if not finished:
            return observed
        # Stalls are known in total only: a step gets a share by duration.
        took_s = max(sum(monitor.seconds() for _, monitor in finished), 1e-9)
        waited = min(1.0, self._link_rates.waited_s() / took_s)
        for each, monitor in finished:
            trial = each.trial
            is_alone = monitor.is_alone and not (self._is_stage and monitor.is_interrupted)
            if is_alone:
                self._history.add(monitor.seconds(), monitor.peak_bytes, trial.predicted)
                if isinstance(monitor, TimelineMonitor):
                    self._timeline = trial, monitor.timeline()
            if trial is not each.size.trial:
                continue  # the plan was replaced
            observed.append(each.size)
            if not is_alone:
                trial.count_step()
                continue
            seconds = monitor.seconds() / each.share
            trial.add_step(seconds, seconds * waited)
        return observed
