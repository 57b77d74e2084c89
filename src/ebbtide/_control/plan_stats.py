"""How the steps of a plan turn out, and when it is time to plan again. Pure."""

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
_STEPS_OF_A_TRIAL = 8
_MOSTLY = 1.05  # times `most_s`: slow steps are the plan's own if half of them are that slow

# The pace of compute
_LEAST_COMPUTE = 0.2  # of a step
_FURTHEST = 5.0  # that one refit goes

# Peaks
_LOOKS = 2
_MOST_LOOKS = 4
_SAME_PEAK = 0.02
_WHOLE = 0.98  # of the size that is planned for


class MeasuredPlan(NamedTuple):
    """A plan, its typical step and its fastest one in seconds.

    What comes in between makes steps slower, by a few percent, and never faster: two plans that differ by less are told
    apart by their fastest steps. `middle_s`: half of the steps take more.
    """

    step_s: float
    plan: Plan
    fastest_s: float
    middle_s: float


class PlanStats:
    """One plan after another, for batches of one size.

    Attributes:
        plan: that is followed now.
        steps: that went by it, as far as they have passed.
        seconds: that those of them took whose time is known, but for the first.
        begun: forwards that went by it.
        peak_bytes: most that one of them allocated, 0 before that was looked at: in two steps, and where these differ,
            in four, of which the largest one is left out. What a reference cycle held until the collector came by is
            none of the plan's; what comes again in every second step is.
        is_whole_peak: of batches as large as is planned for.
        is_as_measured: the plan's step is one that was measured, and not what the profile says.
        best: the plan with the least typical step so far.
        kept: the step with everything kept, if that was tried.
        before_trial: the plan before such a trial.
        is_trial: the plan is followed for a few steps only, to see what they take.
        most_s: if the fastest of the last steps takes more, or half of them much more, they are off, however they were
            predicted; None without such a limit.
    """

    def __init__(self, plan: Plan, most_s: float | None = None) -> None:
        self.plan = plan
        self.steps = 0
        self.seconds = 0.0
        self.begun = 0
        self.peak_bytes = 0
        self.best: MeasuredPlan | None = None
        self.kept: MeasuredPlan | None = None
        self.before_trial: MeasuredPlan | None = None
        self.is_trial = False
        self.is_as_measured = False
        self.is_whole_peak = True
        self.most_s = most_s
        self._off = 0
        self._replans = 0
        self._times: list[float] = []
        self._stalls: list[float] = []
        self._peaks: list[int] = []

    def saw(self, step_s: float, stall_s: float = 0.0) -> bool:
        """A step took so long, of which compute waited for the lanes so long. Whether it is time to plan again."""
        self.steps += 1
        predicted = self.plan.predicted
        if predicted is None or self.steps <= STEPS_TO_LEARN:
            return False  # the timetable has still to learn the order
        self.seconds += step_s
        self._times = [*self._times, step_s][-_FASTEST_OF:]
        self._stalls = [*self._stalls, stall_s][-_TYPICAL_OF:]
        if len(self._times) < _TYPICAL_OF:
            return False
        self._off = self._off + 1 if self.is_off_by(REPLAN_AT) else 0
        if self.best is None or self.typical_s < self.best.step_s:
            self.best = self.tried()
        if self.is_trial:
            return len(self._times) >= _STEPS_OF_A_TRIAL
        return self._off >= PATIENCE * 2**self._replans and self._replans < _MOST_REPLANS

    def saw_peak(self, peak_bytes: int, share: float) -> bool:
        """A step with such a share of the batch allocated so much. Whether that was the last look that it takes."""
        if self.peak_bytes > 0:
            return False  # more such steps were in flight than it takes
        self._peaks = sorted([*self._peaks, peak_bytes])
        self.is_whole_peak = self.is_whole_peak and share >= _WHOLE
        if len(self._peaks) < _LOOKS:
            return False
        if len(self._peaks) == _LOOKS and self._peaks[-1] <= self._peaks[0] * (1 + _SAME_PEAK):
            self.peak_bytes = self._peaks[-1]
        elif len(self._peaks) == _MOST_LOOKS:
            self.peak_bytes = self._peaks[-2]
        return self.peak_bytes > 0

    def look_again(self) -> None:
        """The peak may be another one by now."""
        self.peak_bytes = 0
        self.is_whole_peak = True
        self._peaks.clear()

    def came_by(self) -> None:
        """A step of which only is known that it went by the plan."""
        self.steps += 1

    def is_off_by(self, share: float) -> bool:
        """By the middle one of the last steps: some are slow now and then, and some of slow ones are not."""
        predicted_s = 0.0 if self.plan.predicted is None else self.plan.predicted.step_s
        return self.is_slow or (predicted_s > 0 and abs(_middle(self._times) / predicted_s - 1) > share)

    def has_run_for(self, seconds: float) -> bool:
        """For so long, and for as many steps as it takes to tell."""
        return self.seconds >= seconds and len(self._times) == _FASTEST_OF

    @property
    def is_slow(self) -> bool:
        """Beyond `most_s`."""
        return self.most_s is not None and (
            self.fastest_s > self.most_s or _middle(self._times) > self.most_s * _MOSTLY
        )

    @property
    def typical_s(self) -> float:
        """Of the last few steps."""
        return _middle(self._times[-_TYPICAL_OF:])

    @property
    def fastest_s(self) -> float:
        return min(self._times, default=0.0)

    @property
    def stall_s(self) -> float:
        """What compute waited in a typical step."""
        return _middle(self._stalls)

    @property
    def pace_of_compute(self) -> float:
        """How many times as long as predicted it takes, by whole steps; 1 if they do not say."""
        predicted = self.plan.predicted
        if predicted is None or self.is_trial or self.is_as_measured or len(self._times) < _TYPICAL_OF:
            return 1.0
        return self.compute_ratio(_middle(self._times), predicted.host_wait_s)

    def compute_ratio(self, step_s: float, host_wait_s: float) -> float:
        """How many times as long as predicted compute takes in such a step, in which it waits for the host so long."""
        predicted = self.plan.predicted
        assert predicted is not None
        compute_s = step_s - self.stall_s - host_wait_s
        if compute_s < _LEAST_COMPUTE * step_s:
            return 1.0  # all but waiting: it says nothing of compute
        waits_s = predicted.stall_forward_s + predicted.stall_backward_s + predicted.host_wait_s
        return bounded(compute_s / max(predicted.step_s - waits_s, 1e-9))

    def tried(self) -> MeasuredPlan:
        """The plan that is followed now, and what its steps take."""
        return MeasuredPlan(self.typical_s, self.plan, self.fastest_s, _middle(self._times))

    def goes_by(self, plan: Plan, *, is_trial: bool = False, is_as_measured: bool = False) -> None:
        if is_trial:
            self.before_trial = self.tried()
        self.plan = plan
        self.steps = 0
        self.seconds = 0.0
        self.begun = 0
        self.look_again()
        self.is_trial = is_trial
        self.is_as_measured = is_as_measured
        self._off = 0
        self._replans += 0 if is_trial else 1
        self._times.clear()
        self._stalls.clear()


def bounded(ratio: float) -> float:
    """As far as one refit goes."""
    return min(max(ratio, 1 / _FURTHEST), _FURTHEST)


def _middle(values: list[float]) -> float:
    return statistics.median_high(values) if values else 0.0
