"""Asks for plans, follows their first steps, and corrects them. Training never waits (law 13).

Note [PlanTuner]
~~~~~~~~~~~~~~~~
1. Each bucket of batch sizes has a plan of its own, from the profile scaled to the size. A question goes to the solver,
   one at a time, and the answer is taken up before a later forward. Until then the size runs by its fallback, by the
   plan of a larger size or, within a budget, by the recipes with the smallest peak; without one by the plan before.
2. A plan is on trial for its first steps (Note [Trials]). After a correction the profile is refitted: the link gets the
   rates of measured copies, the CPU the time of forward if compute waits for the CPU, and compute the time of regions
   without such waiting (speed_scale.py), or else the step without stalls. Compute must not be blamed for a slow CPU.
3. The fallback comes first: within a budget recomputation of the fewest regions that fit, which is found in a moment,
   without one keeping everything. The fallback runs, and is measured, while the solver works: also while it works on a
   correction of a slower plan, so that the two are compared within a minute. A plan whose steps are slower gives way to
   the fallback; without a budget to a plan that moves less before. Where the fallback has not run for long enough, it
   runs for a trial when the plan looks slow.
4. After two corrections the plan is frozen. What wakes it: a peak over the budget, memory from before the step that has
   grown (the state of an optimizer, gradients that accumulate), running out of memory, another batch size, `replan`.
   A plan over the budget runs no further step: the recipes with the smallest peak take over until the answer is there.
5. The durations of steps are compared with predictions without waiting for a step: the CPU may be steps ahead of the
   device, so several monitors are in flight. Overlapping steps (two forwards, then backward) are not compared.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch

from ebbtide._control.speed_scale import ComputeScale, FinishedStep, LinkRates, SpeedScales
from ebbtide._control.trial import THRESHOLDS, Trial, TrialVerdict, bounded, first_margin, margin_after, verdict
from ebbtide._engine.engine import Engine
from ebbtide._engine.stats import StatsRecorder
from ebbtide._errors import EbbtideWarning, add_note
from ebbtide._planner import simulate
from ebbtide._planner.explain import out_of_memory, used_bytes
from ebbtide._planner.process import solve_elsewhere, solve_here
from ebbtide._planner.solve import MAX_SLOWDOWN, Answer, Question
from ebbtide._plans import Plan, RegionPlan
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.step_events import InFlightStep, StepMonitor
from ebbtide._utils.logs import logger_of
from ebbtide._utils.sizes import format_bytes

_log = logger_of(__name__)

_MOST_IN_FLIGHT = 64
_BUCKETS_PER_OCTAVE = 8
_WAITS_FOR_CPU = 0.01  # of a step: the real waiting time is unknown
_UNMEASURED = 0.95  # of the link: times scaled to another batch size are inexact, above all for attention


class PlanTarget(Protocol):
    """Receiver of plans."""

    def apply_plan(self, plan: Plan, size: int = 0) -> None: ...


@dataclasses.dataclass
class _BatchSize:
    """One bucket of batch sizes.

    Attributes:
        tokens: the largest batch of the bucket.
        profile: source of the plan, before scaling to the size.
        margin_bytes: part of the budget left free.
        trial: the plan; None until the first answer.
        wanted: why another plan is wanted; "" if none is.
        version: counts the changes of what is wanted.
        target: the part of the largest slowdown that is planned for.
        baseline: the fastest trial so far, at first of the fallback.
        has_fallback: whether the fallback has been asked for.
        fallback_s: the fastest predicted seconds of the fallback so far.
        has_answer: whether there has been a plan.
        rival: trial of the plan that a comparison is about, while the fallback runs.
        corrections: so far.
        corrected: regions of the plans that were corrected.
        smallest_bytes: the smallest budget, as of the last answer.
        solving_s: seconds that the last answer took.
        is_used: whether a step has followed a plan.
    """

    tokens: int
    profile: Profile
    margin_bytes: int = 0
    trial: Trial | None = None
    wanted: str = ""
    version: int = 0
    target: float = THRESHOLDS.target
    baseline: Trial | None = None
    has_fallback: bool = False
    fallback_s: float = math.inf
    has_answer: bool = False
    rival: Trial | None = None
    corrections: int = 0
    corrected: list[Mapping[str, RegionPlan]] = dataclasses.field(default_factory=list[Mapping[str, RegionPlan]])
    smallest_bytes: int = 0
    solving_s: float = 0.0
    is_used: bool = False
    scales: SpeedScales = dataclasses.field(default_factory=SpeedScales)


class _PlannedStep(NamedTuple):
    """A step in flight. `share`: batch size over the planned batch size."""

    step: InFlightStep[StepMonitor]
    size: _BatchSize
    trial: Trial
    share: float


class _Asked(NamedTuple):
    """A question to the solver, and the answer to come."""

    size: _BatchSize
    why: str
    version: int
    question: Question
    answer: "Future[Answer]"


class PlanTuner:
    """Makes plans from one profile, and corrects the plans by measured steps.

    Args:
        handle: receiver of plans.
        profile: source of all plans; refitted on the way.
        recorder: statistics of the handle: stalls and copy rates.
        budget: returns the peak to stay under in bytes; None: offload without slowing the step.
        engine: engine of the model's device.
        waits: training waits for answers, and needs no fallback meanwhile.
        max_slowdown: without a budget, the largest slowdown of a step; None: the default, by moving alone.
        first: plan of the measured steps. Without a goal everything is kept, otherwise the peak is the smallest.
        replans_on_oom: plan for a smaller peak after the device ran out of memory.
        is_shared: all ranks share one plan for all batch sizes. The plan never changes, because the measurements of one
            rank are unknown to the other ranks.
    """

    def __init__(
        self,
        handle: PlanTarget,
        profile: Profile,
        recorder: StatsRecorder,
        budget: Callable[[], int | None],
        engine: Engine | None,
        *,
        waits: bool,
        max_slowdown: float | None,
        first: Plan,
        replans_on_oom: bool,
        is_shared: bool,
    ) -> None:
        self._handle = handle
        self._profile = profile
        self._budget = budget
        self._waits = waits
        self._only_moves = max_slowdown is None
        self._max_slowdown = MAX_SLOWDOWN if max_slowdown is None else max_slowdown
        self._first = first
        self._replans_on_oom = replans_on_oom
        self._is_shared = is_shared
        self._in_flight: list[_PlannedStep] = []
        self._asked: _Asked | None = None
        self._oom_bytes = 0  # taken off the budget of all sizes, for good
        self._may_keep_all = True  # without a budget, until keeping everything runs out of memory
        self._has_warned_of_peak = False
        self._is_unobserved = False  # the step before
        self._was_cpu_refitted = False
        self._failed_allocations = 0 if engine is None else engine.device.failed_allocations()
        self._link_rates = LinkRates(recorder)
        self._measured_tokens = profile.tokens
        self._sizes: dict[int, _BatchSize] = {}
        self._size = self._new_size(profile.tokens)
        if self._only_moves and self.limit_bytes is None:
            self._size.trial = self._size.baseline = Trial(first, None, is_fallback=True)
        self._ask_next()
        if not self._size.has_answer:
            self._apply()

    # -- figures ---------------------------------------------------------------------------------------------------

    @property
    def has_plan(self) -> bool:
        """Whether the first answer is there."""
        return any(size.has_answer for size in self._sizes.values())

    @property
    def has_stopped_plan(self) -> bool:
        """Whether a plan was stopped, and the recipes with the smallest peak run until there is another."""
        return self._size.has_answer and self._size.trial is None

    @property
    def profile(self) -> Profile:
        """Source of the plans, at the measured speed of compute and CPU for the current batch size (see Note [Speed
        scales])."""
        size = self._size
        if self._is_shared or size.trial is None or size.profile is not self._profile:
            return self._profile  # equal on all ranks; or the last steps were compared with another profile
        cpu, compute = self._cpu_scale(size, size.trial), self._compute_scale(size, size.trial)
        if compute is None:
            waits = size.profile.host is not None and _waits_for_cpu(size.trial.plan)
            scale = 1.0 if waits else size.trial.compute_scale
            compute = ComputeScale(scale, scale)
        if cpu == compute.forward == compute.backward == 1.0:
            return self._profile
        refitted = _with_cpu_times(self._profile, cpu).refitted(compute.forward, compute.backward)
        return refitted if cpu != 1.0 else self._with_launch_ahead(refitted)

    @property
    def tokens(self) -> int:
        """Batch size of the active plan."""
        return self._size.tokens

    @property
    def plans(self) -> dict[int, Plan]:
        """Plans by batch size in tokens."""
        return {tokens: size.trial.plan for tokens, size in self._sizes.items() if size.trial is not None}

    @property
    def measured(self) -> tuple[float, int]:
        """Median seconds of the last steps of the active plan, and measured peak in bytes; 0: unknown."""
        trial = self._size.trial
        return (0.0, 0) if trial is None else (trial.typical_s, trial.peak_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """Limit of a measured peak: the budget less the bytes taken off after running out of memory."""
        budget_bytes = self._budget()
        return None if budget_bytes is None else budget_bytes - self._oom_bytes

    @property
    def budget_bytes(self) -> int | None:
        """Limit of predicted peaks: the budget less the margin."""
        limit_bytes = self.limit_bytes
        return None if limit_bytes is None else limit_bytes - self._size.margin_bytes

    # -- a step ----------------------------------------------------------------------------------------------------

    def step_begins(self, engine: Engine, tokens: int, is_verified: bool = False) -> StepMonitor | None:
        """Apply the plan of the batch size before a forward, and return the monitor of the step; None without a plan.
        The duration of a verified step is ignored. Raises PlanError if no plan fits the budget."""
        if self._is_unobserved or any(each.step.ended is None for each in self._in_flight):
            self._check_failed_allocations(engine)
        self._read_finished()
        bucket = self._bucket(tokens)
        size = self._sizes.get(bucket) or self._new_size(bucket)
        has_changed, self._size = size is not self._size, size
        self._take_answer()
        self._ask_next()
        if has_changed:
            self._apply()
        self._look_at_memory(engine)
        trial = size.trial
        if trial is None:
            return None
        if size.has_answer and not size.is_used:
            size.is_used = True
            other = "" if size.tokens == self._measured_tokens else f" for batches of {size.tokens} tokens"
            self._log_plan(f"plan in force{other}", size, trial.plan)
        trial.begun += 1
        self._is_unobserved = trial.is_frozen and trial.plan.keeps_all and trial.begun % THRESHOLDS.look_every > 0
        if self._is_unobserved:
            return None  # the model rests: no hook tells of backward
        needs_peak = not (self._is_shared or self.limit_bytes is None or trial.is_frozen)
        monitor = StepMonitor(engine.device, reads_peak=needs_peak)
        monitor.is_alone = not is_verified
        for each in self._in_flight:
            other_step = each.step.pending
            if other_step is not None:
                monitor.is_alone = other_step.is_alone = False
        share = tokens / size.tokens if tokens > 0 and size.tokens > 0 else 1.0
        self._in_flight.append(_PlannedStep(InFlightStep(monitor), size, trial, share))
        return monitor

    def wait(self) -> None:
        """Wait for the plan of the current batch size. Raises PlanError if no plan fits the budget."""
        while self._asked is not None and self._size.wanted:
            self._asked.answer.exception()
            self._take_answer()
            self._ask_next()

    def replan(self) -> None:
        """Plan again for every batch size, with all corrections left."""
        self._profile = self.profile
        for size in self._sizes.values():
            size.corrections, size.rival = 0, None
            size.corrected.clear()
            self._mark(size, "asked for", stops_plan=False)
        self._ask_next()

    def _bucket(self, tokens: int) -> int:
        """Planned batch size: at least `tokens`, and one of a few sizes in an octave."""
        measured = self._measured_tokens
        if tokens <= 0 or measured <= 0 or self._is_shared:
            return self._size.tokens  # unknown size; or all ranks share one plan for all batch sizes
        return bucket_of(tokens, measured)

    def _read_finished(self) -> None:
        """Compare all steps that have passed with the predictions."""
        finished: list[tuple[_PlannedStep, StepMonitor]] = []
        left: list[_PlannedStep] = []
        for each in self._in_flight:
            monitor = each.step.ended
            if monitor is not None and monitor.reads_peak and each.trial is each.size.trial:
                each.trial.add_peak(monitor.peak_bytes)  # known before the device has finished the step
                monitor.reads_peak = False
                self._judge(each.size, each.trial)
            if monitor is not None and monitor.is_readable:
                finished.append((each, monitor))
            elif monitor is not None or each.step.pending is not None:
                left.append(each)  # all other graphs were dropped
        self._in_flight = left[-_MOST_IN_FLIGHT:]
        if not finished:
            return
        # Stalls are known in total only: a step gets a share by duration.
        took_s = max(sum(monitor.seconds() for _, monitor in finished), 1e-9)
        forward, backward = (waited_s / took_s for waited_s in self._link_rates.waited_s())
        for each, monitor in finished:
            trial = each.trial
            if trial is not each.size.trial:
                continue  # the plan was replaced
            if monitor.is_alone:
                seconds = monitor.seconds() / each.share
                trial.add_step(seconds, seconds * min(1.0, forward + backward))
                if monitor.launch_times is not None and trial.steps > THRESHOLDS.learning_steps:
                    stalls_s = monitor.seconds() * forward, monitor.seconds() * backward
                    each.size.scales.add_step(FinishedStep(monitor.launch_times, each.share, *stalls_s))
            else:
                trial.count_step()
            self._judge(each.size, trial)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _judge(self, size: _BatchSize, trial: Trial) -> None:
        may_correct = size.corrections < THRESHOLDS.corrections
        found = verdict(trial, self.limit_bytes, size.margin_bytes, may_correct, self._slowdown)
        if self._is_shared or (size.wanted and size.has_answer and found is not TrialVerdict.OVER):
            return
        if found is TrialVerdict.OVER and size.rival is not None:
            self._end_comparison(size, size.rival, f"the fallback had a peak of {format_bytes(trial.peak_bytes)}")
        elif found is TrialVerdict.OVER:
            self._leave_more_free(size, trial.peak_bytes)
        elif not size.has_answer:
            return
        elif size.rival is not None and trial.is_complete:
            self._compare(size, trial, size.rival)
        elif found is TrialVerdict.CORRECT:
            self._correct(size, trial)
        elif found is TrialVerdict.COMPARE:
            self._doubt(size, trial)
        elif found is TrialVerdict.STAY:
            self._freeze(trial)

    def _doubt(self, size: _BatchSize, trial: Trial) -> None:
        """The plan looks slow: compare with the fastest earlier plan, or try the fallback if that has not run."""
        baseline, fallback = trial.baseline, trial.fallback
        best = trial if baseline is None or baseline.typical_s >= trial.typical_s else baseline
        if fallback is not None and trial.fallback_s < best.typical_s:
            size.rival = best
            self._follow(size, Trial(fallback, None, is_fallback=True), f"compared, {_took(trial)}")
            return
        assert baseline is not None
        size.rival = trial
        self._compare(size, baseline, trial)

    def _correct(self, size: _BatchSize, trial: Trial) -> None:
        """Ask for a plan by what was measured: times, and the peak within a budget."""
        size.corrections += 1
        reasons: list[str] = []
        if trial.is_off:
            self._refit(size, trial)
            reasons.append(_took(trial))
        limit_bytes = self.limit_bytes
        if limit_bytes is not None:
            margin_bytes = margin_after(trial, limit_bytes, size.margin_bytes)
            if margin_bytes != size.margin_bytes:
                reasons.append(f"the peak was {format_bytes(trial.peak_bytes)}")
            size.margin_bytes = margin_bytes
        size.corrected.append(trial.plan.regions)
        faster = trial.baseline
        if faster is not None and faster.is_baseline and trial.is_timed and faster.typical_s < trial.typical_s:
            self._follow(size, faster, f"waits for a correction, {_took(trial)}")  # and is measured once more
        self._want(size, " and ".join(reasons))

    def _leave_more_free(self, size: _BatchSize, peak_bytes: int) -> None:
        """A peak over the budget. If no plan is smaller, the plan stays."""
        trial, limit_bytes = size.trial, self.limit_bytes
        assert trial is not None
        assert limit_bytes is not None
        predicted = trial.plan.predicted
        if size.has_answer and (predicted is None or predicted.peak_bytes <= size.smallest_bytes):
            self._warn_of_peak(peak_bytes, limit_bytes)
            trial.is_frozen = True
            return
        size.margin_bytes = margin_after(trial, limit_bytes, size.margin_bytes)
        size.has_fallback = size.has_answer  # the fallback for less is another
        self._want(size, f"the peak was {format_bytes(peak_bytes)}", stops_plan=True)

    def _compare(self, size: _BatchSize, fallback: Trial, slow: Trial) -> None:
        """The fallback has run too: choose, or ask for a plan that moves less."""
        slowdown = slow.fastest_s / fallback.fastest_s - 1 if fallback.is_baseline else 0.0
        if slowdown <= self._slowdown:
            self._end_comparison(size, slow, "no other was faster")
        elif self.limit_bytes is None and size.corrections < THRESHOLDS.corrections:
            size.corrections += 1
            assert size.trial is not None
            self._refit(size, size.trial)
            size.target *= THRESHOLDS.target * self._slowdown / slowdown
            self._want(size, f"keeping everything was faster by {slowdown:.1%}")
        else:
            self._end_comparison(size, fallback, "an earlier plan was faster")

    @property
    def _slowdown(self) -> float:
        """By how much a step may be slower than the fallback's."""
        return THRESHOLDS.slower if self.limit_bytes is not None else self._max_slowdown

    def _end_comparison(self, size: _BatchSize, winner: Trial, why: str) -> None:
        rival, size.rival = size.rival, None
        if winner.is_fallback and winner is not size.trial and rival is not None and rival.fallback is not None:
            # The fallback by what is known now: for more of the budget, and with a prediction. Its peak is to be seen.
            self._follow(size, Trial(rival.fallback, None, is_fallback=True), f"replaced, {why}")
            return
        stays = Trial(_as_measured(winner.plan, winner), None, is_as_measured=True)
        self._follow(size, stays, f"frozen, {why}")
        stays.is_frozen = True

    def _freeze(self, trial: Trial) -> None:
        trial.is_frozen = True
        peak = f", peak {format_bytes(trial.peak_bytes)}" if trial.peak_bytes else ""
        _log.info("plan frozen: steps of %.1f ms%s", trial.typical_s * 1e3, peak)

    def _follow(self, size: _BatchSize, trial: Trial, what: str) -> None:
        size.trial = trial
        size.scales.clear()
        self._log_plan(f"plan {what}", size, trial.plan)
        if size is self._size:
            self._apply()

    # -- questions and answers -------------------------------------------------------------------------------------

    def _new_size(self, tokens: int) -> _BatchSize:
        size = self._sizes[tokens] = _BatchSize(tokens, self._profile, wanted="first")
        limit_bytes = self.limit_bytes
        if limit_bytes is not None:
            known = [each.margin_bytes for each in self._sizes.values()]
            size.margin_bytes = max(first_margin(limit_bytes, self._profile.base_bytes), *known)
        return size

    def _want(self, size: _BatchSize, why: str, *, stops_plan: bool = False) -> None:
        self._mark(size, why, stops_plan)
        self._ask_next()

    def _mark(self, size: _BatchSize, why: str, stops_plan: bool) -> None:
        """Note that another plan is wanted. Answers to earlier questions are void."""
        size.profile, size.wanted = self._profile, why
        size.version += 1
        if stops_plan and size.trial is not None:
            size.trial.is_frozen = True
            size.trial = size.rival = size.baseline = None  # earlier plans fitted other memory
            size.corrected.clear()
            size.fallback_s = math.inf
            if size is self._size:
                self._apply()

    def _ask_next(self) -> None:
        """Send the next question: for the current size first, one at a time."""
        wanting = [size for size in (self._size, *self._sizes.values()) if size.wanted]
        if self._asked is not None or not wanting:
            return
        size, limit_bytes = wanting[0], self.limit_bytes
        profile = size.profile.scaled(size.tokens)
        if limit_bytes is None and size.tokens != self._measured_tokens:
            profile = dataclasses.replace(profile, link=profile.link.times(_UNMEASURED, _UNMEASURED))
        budget_bytes = None if limit_bytes is None else limit_bytes - size.margin_bytes
        # Once training is under way by a plan, an error would stop it: the smallest plan follows instead.
        must_fit = size.tokens == self._measured_tokens and not size.is_used
        question = Question(
            profile,
            budget_bytes,
            limit_bytes if must_fit else None,
            max_slowdown=size.target * self._max_slowdown,
            only_moves=self._only_moves and limit_bytes is None,
            only_fallback=limit_bytes is not None and not self._waits and not size.has_fallback,
        )
        answer = solve_here(question) if self._waits else solve_elsewhere(question)
        self._asked = _Asked(size, size.wanted, size.version, question, answer)
        self._take_answer()

    def _take_answer(self) -> None:
        """Take the answer up, if there is one. Raises PlanError."""
        asked = self._asked
        if asked is None or not asked.answer.done():
            return
        self._asked, size, why = None, asked.size, asked.why
        if size.version != asked.version:
            return  # asked anew meanwhile
        answer = asked.answer.result()
        if asked.question.only_fallback:
            self._take_fallback(size, answer.plan)
        else:
            assert answer.plan is not None
            size.wanted = ""
            self._take(size, why, answer, answer.plan)

    def _take_fallback(self, size: _BatchSize, plan: Plan | None) -> None:
        """Run the fallback until there is a plan: the question stays. No fallback fits the smallest budgets."""
        size.has_fallback = True
        if plan is not None and size.trial is None:
            size.trial = size.baseline = Trial(plan, None, is_fallback=True)
            recomputed = sum(region.recipe.recomputes for region in plan.regions.values())
            _log.info("solving: meanwhile %d of %d regions recompute", recomputed, len(plan.regions))
            if size is self._size:
                self._apply()
        self._ask_next()

    def _take(self, size: _BatchSize, why: str, answer: Answer, plan: Plan) -> None:
        limit_bytes, slow = self.limit_bytes, size.rival
        size.smallest_bytes, size.solving_s, size.rival = answer.smallest_bytes, answer.seconds, None
        if limit_bytes is not None and answer.smallest_bytes > limit_bytes:
            self._warn_too_large(size, limit_bytes)
        has_answer, size.has_answer = size.has_answer, True
        if has_answer and size.trial is not None and size.trial.plan.regions == plan.regions and slow is None:
            self._freeze(size.trial)  # the answer has not changed
            return
        if slow is not None and slow.plan.regions == plan.regions:
            size.rival = slow
            fallback = slow.baseline if slow.baseline is not None else size.trial
            assert fallback is not None
            self._end_comparison(size, fallback, "no other plan is fast enough")
            return
        if size.trial is not None and plan.regions in size.corrected:  # a faster plan runs meanwhile
            found = answer.fallback if size.trial.is_fallback and answer.fallback is not None else size.trial.plan
            self._follow(size, Trial(found, None, is_fallback=size.trial.is_fallback), "stays, no other is faster")
            return
        fallback = answer.fallback if limit_bytes is not None or self._fits(size, answer.fallback) else None
        size.baseline = self._fastest([size.baseline, size.trial])
        if fallback is not None and fallback.predicted is not None:
            # The fastest prediction so far: a refit may blame compute for what the plan itself is slow by.
            size.fallback_s = min(size.fallback_s, fallback.predicted.step_s)
        has_run = fallback is None or (size.baseline is not None and size.baseline.is_fallback)
        fallback_s = math.inf if has_run else size.fallback_s
        trial = Trial(plan, fallback, baseline=size.baseline, fallback_s=fallback_s)
        trial.is_frozen = limit_bytes is not None and answer.smallest_bytes > limit_bytes
        if size.is_used:
            self._follow(size, trial, f"corrected, {why}")
            return
        size.trial = trial
        size.scales.clear()
        if size is self._size:
            self._apply()

    def _fastest(self, trials: Sequence[Trial | None]) -> Trial | None:
        """The fastest of the timed trials. Without a budget fast is no goal: keeping everything counts, if it fits."""
        timed = [trial for trial in trials if trial is not None and trial.is_baseline]
        if self.limit_bytes is None:
            timed = [trial for trial in timed if trial.is_fallback and self._may_keep_all]
        return min(timed, key=lambda trial: trial.typical_s, default=None)

    def _fits(self, size: _BatchSize, fallback: Plan | None) -> bool:
        """Whether everything may be kept: batches up to the measured size have shown it if no region recomputed."""
        if fallback is None or fallback.predicted is None or not self._may_keep_all:
            return False
        if self._only_moves:
            return size.tokens <= self._measured_tokens
        return fallback.predicted.peak_bytes <= THRESHOLDS.device * (self._profile.device_bytes or 0)

    def _apply(self) -> None:
        """Follow the plan of the current size. Without one: of the next larger size, or the smallest recipes."""
        size = self._size
        larger = [each for each in self._sizes.values() if each.trial is not None and each.tokens >= size.tokens]
        found = min(larger, key=lambda each: each.tokens).trial if larger else None
        plan = found.plan if found is not None else self._first if self.limit_bytes is not None else None
        if plan is not None:
            is_first = size.tokens == self._measured_tokens  # continues with the timetable of the measured steps
            self._handle.apply_plan(plan, 0 if is_first else size.tokens)

    def _log_plan(self, what: str, size: _BatchSize, plan: Plan) -> None:
        limit_bytes = self.limit_bytes
        budget = "no budget" if limit_bytes is None else f"budget {format_bytes(limit_bytes)}"
        recomputed = sum(region.recipe.recomputes for region in plan.regions.values())
        does = f"{recomputed} of {len(plan.regions)} regions recompute"
        does = "everything stays on the device" if plan.keeps_all else does
        solved = f"; solving took {size.solving_s:.1f} s" if size.solving_s else ""
        size.solving_s = 0.0
        _log.info("%s (%s): %s; %s%s", what, budget, plan.predicted, does, solved)

    # -- refits ----------------------------------------------------------------------------------------------------

    def _refit(self, size: _BatchSize, trial: Trial) -> None:
        """Refit link, CPU and compute of the profile to measured speeds. Without a change by regions, whole steps give
        the speed of compute."""
        cpu, compute = self._cpu_scale(size, trial), self._compute_scale(size, trial)
        if compute is None or all(math.isclose(each, 1.0, rel_tol=1e-6) for each in (cpu, *compute)):
            ratio = self._ratio_by_steps(size, trial, cpu)
            compute = ComputeScale(ratio, ratio)
        refitted = _with_cpu_times(self._profile, cpu).refitted(compute.forward, compute.backward)
        refitted = dataclasses.replace(refitted, link=self._link_rates.refitted(self._profile.link))
        self._was_cpu_refitted = cpu != 1.0
        self._profile = self._with_launch_ahead(refitted)

    def _ratio_by_steps(self, size: _BatchSize, trial: Trial, cpu: float) -> float:
        """Measured over predicted time of compute, if compute waits for the CPU as long as predicted at scale `cpu`."""
        predicted = trial.plan.predicted
        assert predicted is not None
        host_wait_s = predicted.host_wait_s
        if cpu != 1.0:
            host_wait_s = simulate.host_wait_s(_with_cpu_times(self._scaled(size), cpu), trial.plan)
        return trial.compute_ratio(trial.typical_s, host_wait_s)

    def _with_launch_ahead(self, profile: Profile) -> Profile:
        """Waiting for a CPU measured as slow is not part of the compute times: no launch-ahead compensates for it."""
        return profile if self._was_cpu_refitted else simulate.with_host(profile, profile.host)

    def _cpu_scale(self, size: _BatchSize, trial: Trial) -> float:
        return bounded(size.scales.of_cpu(self._scaled(size), trial.plan))

    def _compute_scale(self, size: _BatchSize, trial: Trial) -> ComputeScale | None:
        """By regions in which compute does not wait for the CPU; None if unknown."""
        scale = size.scales.of_compute(self._scaled(size), trial.plan)
        return None if scale is None else ComputeScale(bounded(scale.forward), bounded(scale.backward))

    def _scaled(self, size: _BatchSize) -> Profile:
        return size.profile.scaled(size.tokens)

    def never_recompute(self, names: Collection[str]) -> None:
        """Plan without recomputing `names`: regions with a recomputation that differed from forward. Ranks never change
        a plan: the saved tensors of the regions are offloaded."""
        if not names or self._is_shared:
            return
        regions = [dataclasses.replace(r, recompute_s=0.0) if r.name in names else r for r in self._profile.regions]
        if tuple(regions) == self._profile.regions:
            return
        self._profile = dataclasses.replace(self._profile, regions=tuple(regions))
        for size in self._sizes.values():
            size.rival = size.baseline = None  # may recompute them
            size.corrected.clear()
            size.fallback_s, size.has_fallback = math.inf, size.has_answer
            self._mark(size, f"{', '.join(names)} cannot recompute", stops_plan=False)
        self._ask_next()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _look_at_memory(self, engine: Engine) -> None:
        """Memory from before the step may grow (the state of an optimizer, gradients that accumulate), and the peak may
        (a longer evaluation): the device's statistics show both, unless somebody resets them."""
        size, limit_bytes = self._size, self.limit_bytes
        if limit_bytes is None or self._is_shared or size.trial is None or not engine.device.tracks_peak:
            return
        if self._is_unobserved:
            return  # backward of the step before may be still to come
        if any(each.step.pending is not None for each in self._in_flight):
            return
        memory = engine.device.memory()
        grown_bytes = memory.allocated_bytes - self._profile.base_bytes
        if grown_bytes > max(size.margin_bytes, THRESHOLDS.room * limit_bytes):
            self._profile = self._profile.with_reserved(grown_bytes)
            for each in self._sizes.values():
                self._mark(each, f"{format_bytes(grown_bytes)} more are allocated before the step", stops_plan=True)
            self._ask_next()
            return
        may_shrink = size.smallest_bytes <= limit_bytes
        trial, is_over = size.trial, may_shrink and memory.peak_bytes > limit_bytes >= size.trial.peak_bytes
        if is_over and trial.is_frozen and not size.wanted and trial.begun % THRESHOLDS.look_every == 0:
            trial.look_again()  # at the peak of steps alone: an evaluation may be the cause

    def _warn_of_peak(self, peak_bytes: int, limit_bytes: int) -> None:
        if not self._has_warned_of_peak:
            self._has_warned_of_peak = True
            warnings.warn(
                f"the step has a peak of {format_bytes(peak_bytes)}, over the budget of {format_bytes(limit_bytes)}, "
                "and no plan lowers the peak: memory outside of the regions is needed (warns once)",
                EbbtideWarning,
                stacklevel=2,
            )

    def _warn_too_large(self, size: _BatchSize, limit_bytes: int) -> None:
        warnings.warn(
            f"a batch with {size.tokens} tokens does not fit the budget of {format_bytes(limit_bytes)}: the plan with "
            f"the smallest peak is used, with a peak of {format_bytes(size.smallest_bytes)}",
            EbbtideWarning,
            stacklevel=2,
        )

    def forward_failed(self, error: BaseException | None, engine: Engine | None) -> None:
        """An exception leaves forward. A note about the plan is added to an out-of-memory error."""
        self._in_flight.clear()
        if engine is not None:
            self._failed_allocations = engine.device.failed_allocations()
        if isinstance(error, torch.OutOfMemoryError):
            add_note(error, self._oom_text(engine))
            self._plan_after_oom()

    def _check_failed_allocations(self, engine: Engine) -> None:
        """A backward that did not end may have run out of memory: no exception passes through ebbtide."""
        failures = engine.device.failed_allocations()
        if failures > self._failed_allocations:
            warnings.warn(self._oom_text(engine), EbbtideWarning, stacklevel=2)
            self._plan_after_oom()
        self._failed_allocations = failures

    def _plan_after_oom(self) -> None:
        size, limit_bytes = self._size, self.limit_bytes
        trial = size.trial
        if self._is_shared or trial is None or trial.plan.predicted is None:
            return
        if limit_bytes is None:
            self._may_keep_all, why = False, "keeping everything ran out of memory"
            if size.rival is not None:
                self._end_comparison(size, size.rival, why)
            elif trial.plan.keeps_all:
                self._want(size, why)
                self.wait()
        elif self._replans_on_oom:
            budget_bytes = limit_bytes - size.margin_bytes
            planned_bytes = used_bytes(budget_bytes, trial.plan.predicted)
            less_bytes = max(int(planned_bytes * (1 - THRESHOLDS.oom)), size.smallest_bytes)
            if less_bytes < planned_bytes:
                self._oom_bytes += budget_bytes - less_bytes
                for each in self._sizes.values():
                    self._mark(each, "the device ran out of memory", stops_plan=True)
                self._ask_next()

    def _oom_text(self, engine: Engine | None) -> str:
        measured_bytes = 0 if engine is None else engine.device.memory().peak_bytes
        trial = self._size.trial
        predicted = None if trial is None else trial.plan.predicted
        what_next = "the next steps use a smaller plan" if self._replans_on_oom else "or write on_oom='replan'"
        if self._is_shared:
            what_next = "a plan shared by ranks never changes"
        return out_of_memory(
            self.budget_bytes, predicted, measured_bytes, THRESHOLDS.oom, self._size.smallest_bytes, what_next
        )


def bucket_of(tokens: int, measured: int = 1) -> int:
    """The smallest bucket of at least `tokens`. An octave has eight buckets, counted from `measured`."""
    steps = math.log2(tokens / measured) * _BUCKETS_PER_OCTAVE
    return round(measured * 2 ** (math.ceil(steps - 1e-9) / _BUCKETS_PER_OCTAVE))


def _as_measured(plan: Plan, trial: Trial) -> Plan:
    """`plan`, with the measured step time of `trial` as the prediction."""
    if plan.predicted is None or not trial.is_timed:
        return plan
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, step_s=trial.typical_s))


def _waits_for_cpu(plan: Plan) -> bool:
    return plan.predicted is not None and plan.predicted.host_wait_s > _WAITS_FOR_CPU * plan.predicted.step_s


def _took(trial: Trial) -> str:
    return f"the last steps took {trial.typical_s * 1e3:.1f} ms"


def _with_cpu_times(profile: Profile, ratio: float) -> Profile:
    return profile if profile.host is None else dataclasses.replace(profile, host=profile.host.times(ratio))
