"""The first steps of a plan, and the verdict on the plan. Pure.

Note [Trials]
~~~~~~~~~~~~~
1. A plan is on trial for a few steps: two in which the engine learns the order, and four that are measured. A verdict
   follows: the plan is corrected, or gives way to a faster one, or stays for good (law 13).
2. The budget is approached from below (law 12). The first plan leaves a margin, the largest error of a predicted peak
   that is expected. Measured peaks take most of what they show to be unnecessary: another plan has another error, so a
   part of the margin stays, or of what the measured plan leaves of the budget, if that is less. A peak over the limit
   adds to the margin in any case, as often as seen.
3. Medians of the measured steps tell a wrong prediction, and which of two plans is faster (Note [Turns]): a plan that
   keeps the host busy has slow steps more often, and its fastest step says nothing of them.
4. Verdicts read an `Observation` and nothing else of the steps: of one rank, or the worst of all ranks (Note [Ranks]).
5. Later steps run at another speed than the few measured steps: clocks of a device rise and fall with temperature and
   power, and a CPU core is half as fast while another thread shares the core. The share of each in a slow step cannot
   be told without watching compute region by region, and a wrong guess favours recipes that use the other. So one
   ratio, measured over predicted duration, multiplies all seconds of compute and CPU alike. Waits for copies take no
   part: copies tell the rates of the link. A small deviation is no reason to plan again, but predictions use the ratio.
"""

import enum
import statistics
from typing import NamedTuple

from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan


class TrialVerdict(enum.Enum):
    """What to do with a plan on trial."""

    WAIT = "the trial goes on"
    OVER = "the peak is over the budget"
    CORRECT = "steps or peaks are other than predicted"
    STAY = "the plan stays"


class Observation(NamedTuple):
    """The figures of a trial that verdicts read.

    Attributes:
        is_complete: there are enough steps for a verdict, or there never will be.
        timed: steps with a duration, of those that count.
        typical_s: median of the last steps; 0: unknown.
        fastest_s: fastest of the last steps; 0: unknown.
        stall_s: stall of a typical step.
        peak_bytes: largest peak; 0: unknown.
        spread_bytes: how far the peaks of steps with a known order are apart, with or without the memory from before
            each step, whichever is less: routing and packing change both.
    """

    is_complete: bool = False
    timed: int = 0
    typical_s: float = 0.0
    fastest_s: float = 0.0
    stall_s: float = 0.0
    peak_bytes: int = 0
    spread_bytes: int = 0


class Trial:
    """A plan, and what its steps took.

    Attributes:
        plan: the plan.
        predicted: what the planner has predicted for the trial; `plan` may carry the measured time by now.
        plain_s: seconds of a plain step in the profile that the prediction is from, of the measured batch size.
        margin_bytes: part of the budget that the plan leaves free on purpose.
        is_fallback: whether the plan is a fallback.
        is_as_measured: the step time of `plan.predicted` was measured.
        begun: forwards since the plan was put in force.
        steps: steps finished since the plan was put in force.
        turns: in force so far, beside other plans; the first trial counts.
        least_share: the smallest batch so far, over the planned size.
        is_frozen: the verdict is given.
        ran_beside_solver: all steps so far ran while the solver kept the machine busy.
        grown_bytes: most that the memory from before a step with a measured peak had grown by since the profile.
        agreed: the worst of the observations of all ranks, as of the last meeting; None for a single rank.
    """

    def __init__(
        self,
        plan: Plan,
        plain_s: float = 0.0,
        *,
        margin_bytes: int = 0,
        is_fallback: bool = False,
        is_as_measured: bool = False,
    ) -> None:
        self.plan = plan
        self.plain_s = plain_s
        self.margin_bytes = margin_bytes
        self.predicted = plan.predicted
        self.is_fallback = is_fallback
        self.is_as_measured = is_as_measured
        self.begun = 0
        self.steps = 0
        self.turns = 1
        self.least_share = 1.0
        self.is_frozen = False
        self.ran_beside_solver = False
        self.grown_bytes = 0
        self.agreed: Observation | None = None
        self._timed = 0  # since the plan was put in force
        self._times: list[float] = []
        self._stalls: list[float] = []
        self._peaks: list[int] = []
        self._own_peaks: list[int] = []  # above the memory from before the step

    def add_step(self, seconds: float, stall_s: float = 0.0) -> None:
        """Count a step. The first steps, which learn the order, take part in no figure but peaks."""
        self.steps += 1
        if self.steps > THRESHOLDS.learning_steps:
            self._timed += 1
            self._times = [*self._times, seconds][-THRESHOLDS.remembered :]
            self._stalls = [*self._stalls, stall_s][-THRESHOLDS.remembered :]

    def begin_turn(self) -> None:
        """The plan is in force again after another: the engine learns the order anew, and further steps are timed."""
        self.is_frozen = self.ran_beside_solver = False
        self.begun = self.steps = self._timed = 0

    def look_again(self) -> None:
        """Measure the peak of further steps, and give a verdict again."""
        self.is_frozen, self.grown_bytes = False, 0
        self._peaks.clear()
        self._own_peaks.clear()

    def count_step(self) -> None:
        """Count a step whose duration says nothing."""
        self.steps += 1

    def add_peak(self, nbytes: int, share: float = 1.0, before_bytes: int = 0) -> None:
        """Record the peak of a step with `share` of the planned batch size, and the memory from before the step."""
        self._peaks.append(nbytes)
        self._own_peaks.append(nbytes - before_bytes)
        self.least_share = min(self.least_share, share)

    @property
    def own(self) -> Observation:
        """The observation of this rank alone."""
        settled = self._peaks[THRESHOLDS.learning_steps :], self._own_peaks[THRESHOLDS.learning_steps :]
        return Observation(
            is_complete=self._timed >= THRESHOLDS.measured_steps or self.begun > THRESHOLDS.longest,
            timed=len(self._times),
            typical_s=statistics.median(self._times) if self._times else 0.0,
            fastest_s=min(self._times, default=0.0),
            stall_s=statistics.median(self._stalls) if self._stalls else 0.0,
            peak_bytes=max(self._peaks, default=0),
            # A garbage collection between two steps lowers the former, and another graph in flight the latter.
            spread_bytes=min(max(peaks, default=0) - min(peaks, default=0) for peaks in settled),
        )

    @property
    def seen(self) -> Observation:
        """The observation that decides."""
        return self.own if self.agreed is None else self.agreed

    @property
    def took(self) -> str:
        """What the steps took, in words."""
        return f"the last steps took {self.seen.typical_s * 1e3:.1f} ms"

    @property
    def is_timed(self) -> bool:
        """Whether enough steps were timed to compare with the prediction."""
        return self.seen.timed >= THRESHOLDS.measured_steps

    def is_measured(self, limit_bytes: int | None) -> bool:
        """Whether another plan may be compared with the steps of this plan, which stayed within the budget."""
        is_within = limit_bytes is None or 0 < self.seen.peak_bytes <= limit_bytes
        return is_within and self.seen.timed >= THRESHOLDS.baseline_steps

    @property
    def is_off(self) -> bool:
        """Whether the typical step deviates from the prediction."""
        predicted_s = 0.0 if self.predicted is None else self.predicted.step_s
        return self.is_timed and predicted_s > 0 and abs(self.seen.typical_s / predicted_s - 1) > THRESHOLDS.off

    @property
    def step_ratio(self) -> float | None:
        """Measured over predicted seconds of a step, without waits for copies; None if unknown, or if copies alone tell
        the duration."""
        predicted, seen = self.predicted, self.seen
        own_s = seen.typical_s - seen.stall_s
        if (
            predicted is None
            or self.is_as_measured
            or not self.is_timed
            or own_s < THRESHOLDS.least_own * seen.typical_s
        ):
            return None
        return own_s / max(predicted.step_s - predicted.stall_forward_s - predicted.stall_backward_s, 1e-9)


def verdict(trial: Trial, limit_bytes: int | None, may_correct: bool) -> TrialVerdict:
    """The verdict on a plan.

    Args:
        trial: the plan and its steps.
        limit_bytes: the budget; None: none.
        may_correct: whether corrections are left.
    """
    peak_bytes = trial.seen.peak_bytes
    if trial.is_frozen:
        return TrialVerdict.WAIT
    if limit_bytes is not None and peak_bytes > limit_bytes:
        return TrialVerdict.OVER
    waits_for_peak = limit_bytes is not None and peak_bytes == 0 and trial.begun <= THRESHOLDS.longest
    if not trial.seen.is_complete or waits_for_peak:
        return TrialVerdict.WAIT
    is_settled = trial.is_as_measured or trial.plan.keeps_all  # no plan is faster than keeping everything
    if limit_bytes is None or not may_correct or is_settled:
        return TrialVerdict.STAY
    room_bytes = trial.margin_bytes - margin_after(trial, limit_bytes, trial.margin_bytes)
    is_to_correct = trial.is_off or room_bytes > THRESHOLDS.room * limit_bytes
    return TrialVerdict.CORRECT if is_to_correct else TrialVerdict.STAY


def first_margin(limit_bytes: int, base_bytes: int) -> int:
    """Margin below a budget before any peak was measured; memory from before the step is known exactly."""
    return int(THRESHOLDS.margin * max(0, limit_bytes - base_bytes))


def margin_after(trial: Trial, limit_bytes: int, margin_bytes: int, sharing: int = 1) -> int:
    """The margin of the next plan, by the measured peaks of this plan; never negative: the error of another plan may be
    another. Unmeasured peaks leave the margin. `sharing`: plans that take up what one margin leaves free.
    """
    predicted, seen = trial.plan.predicted, trial.seen
    if predicted is None or seen.peak_bytes == 0:
        return margin_bytes
    error_bytes = seen.peak_bytes - predicted.peak_bytes
    over_bytes = seen.peak_bytes - limit_bytes
    if over_bytes > 0:
        return max(int(THRESHOLDS.error_growth * error_bytes), margin_bytes + 2 * over_bytes)
    needed_bytes = int(THRESHOLDS.error_growth * max(0, error_bytes)) + seen.spread_bytes
    more_bytes = int(THRESHOLDS.kept_margin * min(margin_bytes, -over_bytes))
    spare_bytes = max(0, margin_bytes - needed_bytes - more_bytes)
    return max(margin_bytes, needed_bytes) - spare_bytes // sharing


def bounded(ratio: float) -> float:
    """`ratio`, limited to the change of one refit."""
    return min(max(ratio, 1 / THRESHOLDS.furthest), THRESHOLDS.furthest)
