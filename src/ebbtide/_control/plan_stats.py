"""Measured steps of a plan, and when to plan again. Pure."""

import dataclasses
import statistics
from typing import NamedTuple

from ebbtide._plans import Plan

STEPS_TO_LEARN = 2  # until the engine's timetable knows the order

# Times
REPLAN_AT = 0.05
PATIENCE = 3
_MOST_REPLANS = 4
_TYPICAL_OF = 3
_FASTEST_OF = 8
_MOSTLY = 1.05  # times `most_s`: half of the steps above that are the plan's fault
_AS_FAST = 1.01  # times the fastest step that keeps everything
_MOSTLY_AS_FAST = 1.08  # times the median step that keeps everything

# Speed of compute
_LEAST_COMPUTE = 0.2  # of a step
_FURTHEST = 5.0  # change of one refit

# Peaks
_LOOKS = 2
_MOST_LOOKS = 4
_SAME_PEAK = 0.02
_WHOLE = 0.98  # of the planned batch size


class MeasuredPlan(NamedTuple):
    """A plan, with the typical, the fastest and the median duration of its last steps in seconds.

    Disturbances make steps slower by some percent, and never faster: the fastest steps tell two plans apart.
    """

    step_s: float
    plan: Plan
    fastest_s: float
    median_s: float

    def is_as_fast_as(self, kept: "MeasuredPlan") -> bool:
        """Whether the plan costs no more time than `kept`, a plan that keeps everything."""
        return self.fastest_s <= kept.fastest_s * _AS_FAST and self.median_s <= kept.median_s * _MOSTLY_AS_FAST

    def as_predicted(self) -> Plan:
        """The plan, with the measured step time as the prediction."""
        assert self.plan.predicted is not None
        return dataclasses.replace(self.plan, predicted=dataclasses.replace(self.plan.predicted, step_s=self.step_s))


class PlanStats:
    """Measurements of the active plan of one batch size.

    Attributes:
        plan: active plan.
        steps: finished steps of the plan.
        seconds: time of the measured steps, without the first few.
        begun: forwards of the plan.
        peak_bytes: measured peak; 0 before the measurement. Two steps are measured, and four if the two differ: the
            largest of four is dropped. Garbage in reference cycles is no fault of the plan, and a peak in every second
            step is.
        is_full_size: whether the steps with measured peaks had batches as large as planned for.
        is_as_measured: whether the predicted step time of the plan is a measured time.
        is_final: the plan is never replaced because of step times.
        compared: the plan that the active plan is compared with; one of the two keeps everything. None otherwise.
        best: plan with the shortest typical step so far.
        most_s: steps are slow, whatever was predicted, if the fastest of the last steps takes longer, or half of them
            take much longer. None: no limit.
    """

    def __init__(self, plan: Plan, most_s: float | None = None) -> None:
        self.plan = plan
        self.steps = 0
        self.seconds = 0.0
        self.begun = 0
        self.peak_bytes = 0
        self.best: MeasuredPlan | None = None
        self.compared: MeasuredPlan | None = None
        self.is_as_measured = False
        self.is_full_size = True
        self.is_final = False
        self.most_s = most_s
        self._deviating = 0
        self._replans = 0
        self._times: list[float] = []
        self._stalls: list[float] = []
        self._peaks: list[int] = []

    def add_step(self, step_s: float, stall_s: float = 0.0) -> bool:
        """Record the duration and the stall of a step. Returns whether to plan again."""
        self.steps += 1
        predicted = self.plan.predicted
        if predicted is None or self.steps <= STEPS_TO_LEARN:
            return False
        self.seconds += step_s
        self._times = [*self._times, step_s][-_FASTEST_OF:]
        self._stalls = [*self._stalls, stall_s][-_TYPICAL_OF:]
        if len(self._times) < _TYPICAL_OF:
            return False
        self._deviating = self._deviating + 1 if self.deviates_by(REPLAN_AT) else 0
        if self.best is None or self.typical_s < self.best.step_s:
            self.best = self.measured
        if self.compared is not None:
            return len(self._times) == _FASTEST_OF
        may_change = not self.is_final and (self.may_replan or self.is_slow)
        return may_change and self._deviating >= PATIENCE * 2**self._replans

    @property
    def was_compared(self) -> bool:
        """Whether the plan is the result of a comparison with keeping everything."""
        return self.is_final or (self.is_as_measured and self.most_s is not None)

    @property
    def may_replan(self) -> bool:
        return self._replans < _MOST_REPLANS

    def add_peak(self, peak_bytes: int, share: float) -> bool:
        """Record the peak of a step with `share` of the planned batch size. Returns whether the peak is known now."""
        if self.peak_bytes > 0:
            return False  # more monitored steps were in flight than needed
        self._peaks = sorted([*self._peaks, peak_bytes])
        self.is_full_size = self.is_full_size and share >= _WHOLE
        if len(self._peaks) < _LOOKS:
            return False
        if len(self._peaks) == _LOOKS and self._peaks[-1] <= self._peaks[0] * (1 + _SAME_PEAK):
            self.peak_bytes = self._peaks[-1]
        elif len(self._peaks) == _MOST_LOOKS:
            self.peak_bytes = self._peaks[-2]
        return self.peak_bytes > 0

    def reset_peak(self) -> None:
        """Measure the peak again."""
        self.peak_bytes = 0
        self.is_full_size = True
        self._peaks.clear()

    def count_step(self) -> None:
        """Count a step without a usable duration."""
        self.steps += 1

    def deviates_by(self, share: float) -> bool:
        """Whether the median of the last steps deviates from the prediction, or the steps are slow."""
        predicted_s = 0.0 if self.plan.predicted is None else self.plan.predicted.step_s
        return self.is_slow or (predicted_s > 0 and abs(_median(self._times) / predicted_s - 1) > share)

    def has_run_for(self, seconds: float) -> bool:
        """Whether the plan ran for `seconds`, and for enough steps to judge."""
        return self.seconds >= seconds and len(self._times) == _FASTEST_OF

    @property
    def is_slow(self) -> bool:
        """Whether the steps exceed `most_s`."""
        return self.most_s is not None and (
            self.measured.fastest_s > self.most_s or self.measured.median_s > self.most_s * _MOSTLY
        )

    @property
    def measured(self) -> MeasuredPlan:
        """The active plan with the durations so far; 0: unknown."""
        return MeasuredPlan(self.typical_s, self.plan, min(self._times, default=0.0), _median(self._times))

    @property
    def typical_s(self) -> float:
        """Median of the last three steps."""
        return _median(self._times[-_TYPICAL_OF:])

    @property
    def stall_s(self) -> float:
        """Stall of a typical step."""
        return _median(self._stalls)

    @property
    def compute_scale(self) -> float:
        """Measured over predicted time of compute, by whole steps; 1 if unknown."""
        predicted = self.plan.predicted
        is_predicted = predicted is not None and not self.is_as_measured and self.compared is None
        if predicted is None or not is_predicted or len(self._times) < _TYPICAL_OF:
            return 1.0
        return self.compute_ratio(_median(self._times), predicted.host_wait_s)

    def compute_ratio(self, step_s: float, host_wait_s: float) -> float:
        """Measured over predicted time of compute, in a step of `step_s` with `host_wait_s` of waiting for the CPU."""
        predicted = self.plan.predicted
        assert predicted is not None
        compute_s = step_s - self.stall_s - host_wait_s
        if compute_s < _LEAST_COMPUTE * step_s:
            return 1.0  # nearly all waiting: compute cannot be judged
        waits_s = predicted.stall_forward_s + predicted.stall_backward_s + predicted.host_wait_s
        return bounded(compute_s / max(predicted.step_s - waits_s, 1e-9))

    def start_plan(
        self,
        plan: Plan,
        *,
        is_as_measured: bool = False,
        is_final: bool = False,
        compared: MeasuredPlan | None = None,
    ) -> None:
        """Replace the active plan, and measure anew."""
        self.plan = plan
        self.compared = compared
        self.steps = 0
        self.seconds = 0.0
        self.begun = 0
        self.reset_peak()
        self.is_as_measured = is_as_measured
        self.is_final = is_final
        self._deviating = 0
        self._replans += 1
        self._times.clear()
        self._stalls.clear()


def bounded(ratio: float) -> float:
    """`ratio`, limited to the change of one refit."""
    return min(max(ratio, 1 / _FURTHEST), _FURTHEST)


def _median(values: list[float]) -> float:
    return statistics.median_high(values) if values else 0.0
