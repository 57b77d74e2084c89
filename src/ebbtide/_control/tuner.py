"""Asks for plans, follows their first steps, and corrects them. Training never waits (law 13).

Note [PlanTuner]
~~~~~~~~~~~~~~~~
1. Each bucket of batch sizes has a plan of its own, from the profile scaled to the size. A single question at a
   time goes to the solver, and the answer is taken up before a later forward. Until the answer the size runs by the
   fallback, by the plan of a larger size or by the recipes with the smallest peak; where plans only move, by the plan
   before.
2. A plan is on trial for the first steps (Note [Trials]). A verdict on the observed steps follows: wait, correct, or
   choose among the plans that ran. A single rank judges its own steps before each step. Several ranks judge the worst
   of their observations when they meet, and change plans at no other time (Note [Ranks]): a single batch size, whose
   answers are awaited at the next meeting.
3. A correction refits the profile: the link gets the rates of measured copies, compute and CPU the speed of a step
   without stalls (Note [Trials], 5).
4. The fallback comes first, found in a moment: within a budget recomputation of the fewest regions that fit, and
   without a budget keeping everything, if the device has room. The fallback runs, and is measured, while the solver
   works. While a slow plan is corrected, the fastest earlier plan runs.
5. After two corrections, or earlier if nothing is left to correct, one of the plans that ran is frozen (Note [Turns]).
6. A frozen plan wakes up after a peak over the budget, after growth of the memory from before the step (the state of an
   optimizer, gradients that accumulate), out of memory, for another batch size, and by `replan`. A plan over the budget
   runs no further step: the recipes with the smallest peak take over until the answer arrives.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

import torch

from ebbtide._control.batch_size import EARLIER, BatchSize, bucket_of, run_alike
from ebbtide._control.link_rates import LinkRates, LinkRatios
from ebbtide._control.observer import StepObserver
from ebbtide._control.ranks import Condition, Ranks, Summary
from ebbtide._control.trial import (
    Observation,
    Trial,
    TrialVerdict,
    bounded,
    first_margin,
    margin_after,
    verdict,
)
from ebbtide._engine.engine import Engine
from ebbtide._engine.stats import StatsRecorder
from ebbtide._errors import EbbtideWarning, PlanError, add_note
from ebbtide._planner import simulate
from ebbtide._planner.explain import out_of_memory, used_bytes
from ebbtide._planner.options import choice_of
from ebbtide._planner.process import solve_elsewhere, solve_here
from ebbtide._planner.solve import Answer, Question, Share
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan, Prediction, Recipe
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.step_events import StepMonitor
from ebbtide._profiling.timeline import History, Timeline
from ebbtide._utils.logs import logger_of
from ebbtide._utils.sizes import format_bytes

_log = logger_of(__name__)


class PlanTarget(Protocol):
    """Receiver of plans."""

    def apply_plan(self, plan: Plan, size: int = 0) -> None: ...


@dataclasses.dataclass
class _Asked:
    """A question to the solver, and the answer to come.

    Attributes:
        is_due: the answer is taken up on arrival. Among several ranks only after all ranks have waited for their
            answers: some arrive early.
        is_void: something else is wanted by now.
    """

    size: BatchSize
    why: str
    question: Question
    answer: "Future[Answer]"
    is_due: bool
    is_void: bool = False


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
        ranks: the ranks that share one plan for all batch sizes; None: this rank alone.
        own_tokens: with `ranks`, the batch size that this rank has measured.
        beside: profiles of the other pipeline stages of the rank that share the budget, as in `Question`.
        is_stage: other stages of the rank run between forward and backward.
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
        ranks: Ranks | None = None,
        own_tokens: int = 0,
        beside: tuple[tuple[Profile, ...], tuple[Profile, ...]] = ((), ()),
        is_stage: bool = False,
    ) -> None:
        self._handle = handle
        self._profile = profile
        self._budget = budget
        self._waits = waits
        self._only_moves = max_slowdown is None
        self._max_slowdown = THRESHOLDS.slower if max_slowdown is None else max_slowdown
        self._first = first
        self._replans_on_oom = replans_on_oom
        self._ranks = ranks
        self._own_tokens = own_tokens
        self._beside = beside
        self._sharing = 1 + sum(map(len, beside))
        self._share: Share | None = None  # of the budget, beside other stages
        self._is_stage = is_stage or self._sharing > 1
        self._meeting_interval = 0
        self._ran_out = False  # since the last meeting
        self._is_asked = False  # the same, by the user
        self._asked: _Asked | None = None
        self._oom_bytes = 0  # taken off the budget of all sizes, for good
        self._may_keep_all = True  # without a budget, until keeping everything runs out of memory
        self._has_warned_of_peak = False
        self._link_rates = LinkRates(recorder)
        self.history = History()
        self._device = None if engine is None else engine.device
        self._observer = StepObserver(self._link_rates, recorder, self.history, self._device, is_stage)
        self._agreed_link = LinkRatios()  # of all ranks, as of the last meeting
        self._measured_tokens = profile.tokens
        self._sizes: dict[int, BatchSize] = {}
        self._size = self._new_size(profile.tokens)
        if self._only_moves and self.limit_bytes is None:
            self._size.trial = Trial(first, profile.plain_s, is_fallback=True)
        self._ask_next()
        if self._size.answer is None:
            self._apply()

    # -- figures ---------------------------------------------------------------------------------------------------

    @property
    def has_plan(self) -> bool:
        """Whether the first answer has arrived."""
        return any(size.answer is not None for size in self._sizes.values())

    @property
    def has_stopped_plan(self) -> bool:
        """Whether a plan was stopped, and the recipes with the smallest peak run until there is another."""
        return self._size.answer is not None and self._size.trial is None

    @property
    def is_plan_frozen(self) -> bool:
        """Whether the plan in force stays until something changes."""
        trial = self._size.trial
        is_asked = self._is_asked or self._ran_out or bool(self._size.wanted)
        return trial is not None and trial.is_frozen and not is_asked

    @property
    def profile(self) -> Profile:
        """Source of the plans, at the speed of the last steps of the current batch size (see Note [Trials], 5)."""
        size = self._size
        if self._ranks is not None or size.trial is None:
            return self._profile  # equal on all ranks
        return _at_speed(self._profile, self._ratio(size.trial))

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
        return (0.0, 0) if trial is None else (trial.own.typical_s, trial.own.peak_bytes)

    @property
    def timeline(self) -> Timeline | None:
        """A measured step of the active plan, if any."""
        return self._observer.timeline_of(self._size.trial)

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

    def step_begins(
        self, engine: Engine, tokens: int, is_verified: bool = False, meets: bool = False
    ) -> StepMonitor | None:
        """Apply the plan of the batch size before a forward, and return the monitor of the step; None without a plan.
        The duration of a verified step is ignored. `meets`: all ranks meet before this forward. Raises PlanError if no
        plan fits the budget."""
        if self._observer.ran_out(engine.device):  # no exception of backward passes through ebbtide
            warnings.warn(self._oom_text(engine), EbbtideWarning, stacklevel=2)
            self._has_run_out()
        observed = self._observer.read_finished()
        bucket = self._bucket(tokens)
        size = self._sizes.get(bucket) or self._new_size(bucket)
        has_changed, self._size = size is not self._size, size
        if self._ranks is None:
            self._decide(observed, self._condition(engine))
        elif meets:
            self._meet(self._ranks, engine)
        if has_changed:
            self._apply()
        trial = size.trial
        if trial is None:
            return None
        if size.answer is not None and not size.is_used:
            size.is_used = True
            other = "" if size.tokens == self._measured_tokens else f" for batches of {size.tokens} tokens"
            self._log_plan(f"plan in force{other}", trial.plan, size.answer.seconds)
        trial.begun += 1
        if trial.is_frozen and trial.plan.keeps_all and not self._looks_soon(trial):
            self._observer.rest()
            return None
        planned_tokens = size.tokens if self._ranks is None else self._own_tokens
        share = tokens / planned_tokens if tokens > 0 and planned_tokens > 0 else 1.0
        reads_peak = self.limit_bytes is not None and not trial.is_frozen
        return self._observer.step_begins(engine.device, size, share, reads_peak, is_verified)

    def _looks_soon(self, trial: Trial) -> bool:
        """Whether memory is looked at before the next step."""
        return trial.begun % THRESHOLDS.look_every == 0 if self._ranks is None else self._ranks.meet_next

    def _decide(self, observed: Collection[BatchSize], condition: Condition) -> None:
        """Judge the plans with new observations, take up an answer, and look at the memory."""
        for each in observed:
            self._judge(each)
        self._take_answer()
        self._ask_next()
        self._look_at_memory(condition)

    def _meet(self, ranks: Ranks, engine: Engine) -> None:
        """Decide as all ranks do, by the worst of their observations. All ranks await an answer, early or not."""
        size, trial = self._size, self._size.trial
        own = Observation() if trial is None else trial.own
        worst = ranks.worst(Summary(own, self._condition(engine), self._link_rates.ratios(self._profile.link)))
        self._await_answer()
        self._ran_out = self._is_asked = False
        self._agreed_link = worst.link
        if trial is not None:
            trial.agreed = worst.observation
        if worst.condition.is_asked:
            self._replan()
        if worst.condition.ran_out:
            self._plan_after_oom()
        self._decide([size], worst.condition)
        least = THRESHOLDS.look_every
        interval = max(least, 2 * self._meeting_interval) if self.is_plan_frozen else THRESHOLDS.meet_every
        self._meeting_interval = min(interval, THRESHOLDS.rarest)
        ranks.meet_after(self._meeting_interval)

    def wait(self) -> None:
        """Wait for the plan of the current batch size. Raises PlanError if no plan fits the budget."""
        while self._asked is not None and self._size.wanted:
            self._await_answer()
            self._take_answer(at_once=True)
            self._ask_next()

    def _await_answer(self) -> None:
        if self._asked is not None:
            self._asked.answer.exception()
            self._asked.is_due = True

    def replan(self) -> None:
        """Plan again for every batch size, with all corrections left; among several ranks when they meet next."""
        if self._ranks is None:
            self._replan()
        else:
            self._is_asked = True

    def _replan(self) -> None:
        self._profile, self._share = self.profile, None
        for size in self._sizes.values():
            size.corrections, size.tried = 0, []
            self._mark(size, "asked for", stops_plan=False)
        self._ask_next()

    def _bucket(self, tokens: int) -> int:
        """Planned batch size: at least `tokens`, and one of a few sizes in an octave."""
        measured = self._measured_tokens
        if tokens <= 0 or measured <= 0 or self._ranks is not None:
            return self._size.tokens  # unknown size; or all ranks share one plan for all batch sizes
        return bucket_of(tokens, measured)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _judge(self, size: BatchSize) -> None:
        trial, limit_bytes = size.trial, self.limit_bytes
        if trial is None:
            return
        may_correct = size.corrections < THRESHOLDS.corrections and not size.compares
        found = verdict(trial, limit_bytes, may_correct)
        if found is TrialVerdict.OVER and limit_bytes is not None:
            self._leave_more_free(size, trial, limit_bytes)
        elif size.wanted or size.answer is None:
            return
        elif found is TrialVerdict.CORRECT and limit_bytes is not None:
            self._correct(size, trial, limit_bytes)
        elif found is TrialVerdict.STAY:
            self._choose(size)

    def _correct(self, size: BatchSize, trial: Trial, limit_bytes: int) -> None:
        """Ask for a plan by the measured times and peak."""
        size.corrections += 1
        reasons: list[str] = []
        if trial.is_off:
            self._refit(trial)
            reasons.append(trial.took)
        margin_bytes = margin_after(trial, limit_bytes, size.margin_bytes, self._sharing)
        if margin_bytes != trial.margin_bytes:
            reasons.append(f"the peak was {format_bytes(trial.seen.peak_bytes)}")
        size.margin_bytes = margin_bytes
        fastest = min((trial, *size.measured(limit_bytes)), key=lambda each: each.seen.typical_s)
        if fastest is not trial and trial.is_timed:
            self._follow(size, fastest, f"waits for a correction, {trial.took}")  # and is measured once more
        self._want(size, " and ".join(reasons))

    def _leave_more_free(self, size: BatchSize, trial: Trial, limit_bytes: int) -> None:
        """A peak over the budget. If no plan is smaller, the plan stays."""
        predicted, peak_bytes = trial.plan.predicted, trial.seen.peak_bytes
        if trial.plan is self._first:
            return  # nothing smaller is known, and the answer is to come
        is_least = size.answer is not None and (predicted is None or predicted.peak_bytes <= size.smallest_bytes)
        within = size.measured(limit_bytes)
        if within and size.answer is not None and not size.wanted and (trial.is_fallback or is_least):
            self._choose(size)
            return
        if is_least:
            self._warn_of_peak(peak_bytes, limit_bytes)
            trial.is_frozen = True
            return
        size.margin_bytes = margin_after(trial, limit_bytes, size.margin_bytes, self._sharing)
        size.asks_fallback = self._needs_fallback(size)  # for less memory
        self._mark(size, f"the peak was {format_bytes(peak_bytes)}", stops_plan=True)
        size.tried = within  # unlike where memory has grown
        self._ask_next()

    def _choose(self, size: BatchSize, *, may_correct: bool = True) -> None:
        """No plan is left to ask for: a plan that ran follows (Note [Turns])."""
        trial, limit_bytes = size.trial, self.limit_bytes
        if limit_bytes is not None:
            choice = size.choose_within(limit_bytes)
        else:
            choice = size.choose_without_budget(
                self._max_slowdown, may_keep_all=self._may_keep_all, may_correct=may_correct
            )
        if choice.is_final:
            self._freeze(size, choice.trial, choice.why)
        elif not choice.slowdown:
            self._follow(size, choice.trial, choice.why)
        else:
            assert trial is not None
            size.corrections += 1
            self._refit(trial)
            size.target *= THRESHOLDS.target * self._max_slowdown / choice.slowdown
            if choice.trial is not trial:
                self._follow(size, choice.trial, f"waits for a correction, {trial.took}")  # and is measured once more
            self._want(size, choice.why)

    def _freeze(self, size: BatchSize, best: Trial, why: str = EARLIER) -> None:
        """Have `best` run for good. A plan whose steps are other than predicted carries their time from now on."""
        ran = size.ran
        if best.plan.keeps_all and best.is_off and self.limit_bytes is not None:
            self._refit(best)  # no plan is faster, but other batch sizes may need one
        if self.limit_bytes is None and best.plan.keeps_all and not all(each.plan.keeps_all for each in ran):
            warnings.warn(
                f"offload() moves nothing from now on: {why}. Within a budget, such as '40GiB', what has to leave "
                "does; mode='all' moves everything",
                EbbtideWarning,
                stacklevel=2,
            )
        if best is size.trial:
            peak = f", peak {format_bytes(best.seen.peak_bytes)}" if best.seen.peak_bytes else ""
            reason = f", {why}" if best.is_fallback and len(ran) > 1 else ""
            _log.info("plan frozen%s: steps of %.1f ms%s", reason, best.seen.typical_s * 1e3, peak)
            self.history.note(f"plan frozen{reason}")
            if best.is_off:
                best.plan = _as_measured(best.plan, best)
                if size is self._size:
                    self._apply()
        else:
            newest = size.fallback
            if best.is_fallback and newest is not None and run_alike(newest, best.plan):
                best.predicted, best.plain_s = newest.predicted, size.profile.plain_s  # by the profile of now
                best.plan = _as_measured(newest, best) if best.is_off else newest
            else:
                best.plan, best.is_as_measured = _as_measured(best.plan, best), True
                best.predicted = best.plan.predicted
            self._follow(size, best, f"frozen, {why}")
        best.is_frozen, best.turns = True, 1
        if not best.is_fallback and any(each.is_fallback for each in ran):
            size.fallback = None  # has lost: no later look at the memory tries the fallback again
        size.tried, size.compares = [], False

    def _follow(self, size: BatchSize, trial: Trial, what: str, solving_s: float = 0.0) -> None:
        size.follow(trial)
        if what:
            self._log_plan(f"plan {what}", trial.plan, solving_s)
        if size is self._size:
            self._apply()

    # -- questions and answers -------------------------------------------------------------------------------------

    def _new_size(self, tokens: int) -> BatchSize:
        size = self._sizes[tokens] = BatchSize(tokens, self._profile, wanted="first")
        limit_bytes = self.limit_bytes
        size.asks_fallback = self._needs_fallback(size)
        if limit_bytes is not None:
            known = [each.margin_bytes for each in self._sizes.values()]
            size.margin_bytes = max(first_margin(limit_bytes, self._profile.base_bytes), *known)
        return size

    def _needs_fallback(self, size: BatchSize) -> bool:
        """Whether a fallback is to run until there is a plan. For a stage the budget has to be shared out, which takes
        as long as a plan; and several stages that keep everything may not fit together."""
        if self._waits or self._is_stage or size.answer is not None:
            return False
        if self.limit_bytes is not None:
            return True
        # Where plans only move, everything is kept already. How much a larger batch takes is unknown.
        return not self._only_moves and size.tokens == self._measured_tokens

    def _want(self, size: BatchSize, why: str) -> None:
        self._mark(size, why, stops_plan=False)
        self._ask_next()

    def _mark(self, size: BatchSize, why: str, stops_plan: bool) -> None:
        """Note that another plan is wanted. Answers to earlier questions are void."""
        size.profile, size.wanted, size.compares = self._profile, why, False
        if self._asked is not None and self._asked.size is size:
            self._asked.is_void = True
        if stops_plan:
            size.tried, size.fallback_s = [], math.inf  # earlier plans fitted other memory
        if stops_plan and size.trial is not None:
            size.trial.is_frozen = True
            size.trial = None
            if size is self._size:
                self._apply()

    def _ask_next(self) -> None:
        """Send the next question, for the current size first, unless an answer is to come."""
        wanting = [size for size in (self._size, *self._sizes.values()) if size.wanted]
        if self._asked is not None or not wanting:
            return
        size, limit_bytes = wanting[0], self.limit_bytes
        profile = size.profile.scaled(size.tokens)
        if limit_bytes is None and size.tokens != self._measured_tokens:
            link = profile.link.times(THRESHOLDS.unmeasured, THRESHOLDS.unmeasured)
            profile = dataclasses.replace(profile, link=link)
        budget_bytes = None if limit_bytes is None else limit_bytes - size.margin_bytes
        # Once training is under way by a plan, an error would stop it: the smallest plan follows instead.
        must_fit = size.tokens == self._measured_tokens and not size.is_used
        question = Question(
            profile,
            budget_bytes,
            limit_bytes if must_fit else None,
            max_slowdown=size.target * self._max_slowdown,
            only_moves=self._only_moves and limit_bytes is None,
            only_fallback=size.asks_fallback,
            beside=self._beside,
            share=self._share,
        )
        answer = solve_here(question) if self._waits else solve_elsewhere(question)
        self._asked = _Asked(size, size.wanted, question, answer, is_due=self._waits or self._ranks is None)
        self._take_answer()

    def _take_answer(self, *, at_once: bool = False) -> None:
        """Take the answer up, if there is one. Raises PlanError.

        The recipes with the smallest peak are measured first, as long as they keep to the budget: their steps say
        whether the answer is of use. `at_once`: no step can run meanwhile.
        """
        asked = self._asked
        if asked is None or not (asked.is_due and asked.answer.done()):
            return
        size, first, limit_bytes = asked.size, self._first_trial(asked.size), self.limit_bytes
        may_wait = first is not None and self._ranks is None and size is self._size and not (at_once or asked.is_void)
        if may_wait and first is not None and not first.seen.is_complete:
            return
        is_refused, may_run = isinstance(asked.answer.exception(), PlanError), not (at_once or self._waits)
        if is_refused and may_run and not asked.is_void and size.trial is None and limit_bytes is not None:
            size.trial = Trial(self._first)  # of a stage, which has no fallback: the recipes may fit all the same
            return
        self._asked = None
        if asked.is_void:
            return
        if is_refused and first is not None and first.is_measured(limit_bytes):
            self._learn_from_first(size, first)  # they fit: less is needed than was predicted
            self._want(size, "the recipes with the smallest peak fit")
            return
        answer = asked.answer.result()
        if asked.question.only_fallback:
            self._take_fallback(size, answer.plan)
        else:
            assert answer.plan is not None
            size.wanted, self._share = "", answer.share
            self._take(size, asked, answer, answer.plan)

    def _take_fallback(self, size: BatchSize, plan: Plan | None) -> None:
        """Run the fallback until there is a plan: the question stays. No fallback fits the smallest budgets: there the
        recipes with the smallest peak run on, and are measured, if no plan of a larger size does instead."""
        size.asks_fallback = False
        if self.limit_bytes is None:
            plan = plan if self._fits(size, plan) else None
        elif plan is None and not any(each.trial for each in self._sizes.values() if each.tokens > size.tokens):
            plan = self._first
        if plan is not None and size.trial is None:
            size.trial = Trial(plan) if plan is self._first else size.new_fallback(plan)
            recomputed = sum(region.recipe.recomputes for region in plan.regions.values())
            _log.info("solving: meanwhile %d of %d regions recompute", recomputed, len(plan.regions))
            if size is self._size:
                self._apply()
        self._ask_next()

    def _take(self, size: BatchSize, asked: _Asked, answer: Answer, plan: Plan) -> None:
        limit_bytes, fallback = self.limit_bytes, answer.fallback
        was_first, size.answer = size.answer is None, answer
        is_too_large = limit_bytes is not None and answer.smallest_bytes > limit_bytes
        if limit_bytes is not None and is_too_large:
            self._warn_too_large(size, limit_bytes)
        if limit_bytes is None and not self._fits(size, fallback):
            fallback = None
        if limit_bytes is None and was_first and size.trial is not None:
            size.trial.ran_beside_solver = True
        if limit_bytes is None and fallback is not None and size.trial is not None and size.trial.plan is self._first:
            size.trial.plan = fallback  # the same, with a prediction
        size.fallback = None if fallback is None or run_alike(fallback, plan) else fallback
        if fallback is not None and fallback.predicted is not None:
            # The fastest prediction so far: a refit may blame the machine for what the plan itself is slow by.
            size.fallback_s = min(size.fallback_s, fallback.predicted.step_s)
        first = self._first_trial(size)
        if first is not None and first.is_measured(limit_bytes):
            self._learn_from_first(size, first)
            if plan.predicted is not None and plan.predicted.step_s > first.seen.typical_s:
                size.corrections += 1
                self._want(size, f"would be slower than {first.took}")
                return
        if size.has_run(plan) and not was_first:
            self._choose(size, may_correct=False)
            return
        is_fallback, planned_bytes = limit_bytes is None and plan.keeps_all, asked.question.budget_bytes
        margin_bytes = 0 if limit_bytes is None or planned_bytes is None else limit_bytes - planned_bytes
        trial = Trial(plan, size.profile.plain_s, margin_bytes=margin_bytes, is_fallback=is_fallback)
        if size.is_used:
            self._follow(size, trial, f"corrected, {asked.why}", answer.seconds)
        else:
            size.follow(trial)
            if size is self._size:
                self._apply()
        trial.is_frozen = is_too_large

    def _first_trial(self, size: BatchSize) -> Trial | None:
        """The trial of the recipes with the smallest peak, if they run meanwhile and have kept to the budget so far."""
        trial, limit_bytes = size.trial, self.limit_bytes
        if trial is None or limit_bytes is None or trial.plan is not self._first:
            return None
        return trial if trial.seen.peak_bytes <= limit_bytes else None

    def _learn_from_first(self, size: BatchSize, trial: Trial) -> None:
        """The recipes with the smallest peak have run while the first plan was solved: a plan like any other from now
        on. Their peak tells what recomputation needs at most, and how far predictions are off."""
        seen, profile, limit_bytes = trial.seen, self._profile.scaled(size.tokens), self.limit_bytes
        assert limit_bytes is not None
        recipes = (trial.plan.recipe_of(region.name) or Recipe("keep") for region in profile.regions)
        options = choice_of(profile.regions, recipes)
        moved_bytes = sum(option.moved_bytes for option in options)
        predicted_bytes = simulate.least_budget(profile, options)
        trial.predicted = Prediction(seen.typical_s, 0.0, seen.stall_s, predicted_bytes, moved_bytes, moved_bytes)
        trial.plan, trial.is_as_measured = dataclasses.replace(trial.plan, predicted=trial.predicted), True
        size.margin_bytes = margin_after(trial, limit_bytes, size.margin_bytes, self._sharing)
        if size.tokens == self._measured_tokens and self._ranks is None:
            most_bytes = (seen.peak_bytes - profile.base_bytes) / trial.least_share
            self._profile = self._profile.recomputed_within(profile.base_bytes + math.ceil(most_bytes))

    def _fits(self, size: BatchSize, fallback: Plan | None) -> bool:
        """Whether everything may be kept: batches up to the measured size have shown it if no region recomputed."""
        if fallback is None or fallback.predicted is None or not self._may_keep_all:
            return False
        if self._only_moves:
            return size.tokens <= self._measured_tokens
        room_bytes = self._profile.device_bytes or 0
        if self._device is not None and self._ranks is None:  # ranks decide as one
            room_bytes = min(room_bytes, self._device.available_bytes())
        return fallback.predicted.peak_bytes <= THRESHOLDS.device * room_bytes

    def _apply(self) -> None:
        """Follow the plan of the current size. Without one: of the next larger size, or the smallest recipes."""
        size = self._size
        larger = [each for each in self._sizes.values() if each.trial is not None and each.tokens >= size.tokens]
        found = min(larger, key=lambda each: each.tokens).trial if larger else None
        if found is None and self.limit_bytes is None:
            # Keeping everything may run while a plan is solved, and may not fit a larger batch.
            ran = (trial for each in self._sizes.values() for trial in (each.trial, *reversed(each.tried)))
            found = next((trial for trial in ran if trial is not None and not trial.plan.keeps_all), None)
        plan = None if found is None else found.plan
        if plan is None and (self.limit_bytes is not None or not self._only_moves):
            plan = self._first
        if plan is not None:
            is_first = size.tokens == self._measured_tokens  # with the sites of the measured steps
            self._handle.apply_plan(plan, 0 if is_first else size.tokens)

    def _log_plan(self, what: str, plan: Plan, solving_s: float) -> None:
        limit_bytes = self.limit_bytes
        budget = "no budget" if limit_bytes is None else f"budget {format_bytes(limit_bytes)}"
        recomputed = sum(region.recipe.recomputes for region in plan.regions.values())
        does = f"{recomputed} of {len(plan.regions)} regions recompute"
        does = "everything stays on the device" if plan.keeps_all else does
        solved = f"; solving took {solving_s:.1f} s" if solving_s else ""
        _log.info("%s (%s): %s; %s%s", what, budget, plan.predicted, does, solved)
        self.history.note(what)

    # -- refits ----------------------------------------------------------------------------------------------------

    def _refit(self, trial: Trial) -> None:
        """Refit the profile to measured speeds."""
        link = self._profile.link
        ratios = self._link_rates.ratios(link) if self._ranks is None else self._agreed_link
        self._profile = dataclasses.replace(
            _at_speed(self._profile, self._ratio(trial)), link=link.times(ratios.out, ratios.back)
        )
        self._link_rates.restart()

    def _ratio(self, trial: Trial) -> float:
        """Measured seconds over those of the present profile, whatever profile the plan of the trial is from; 1 if
        unknown."""
        ratio = trial.step_ratio
        return 1.0 if ratio is None else bounded(ratio * trial.plain_s / self._profile.plain_s)

    def never_recompute(self, names: Collection[str]) -> None:
        """Plan without recomputing `names`: regions with a recomputation that differed from forward. Several ranks plan
        on as if they could: the saved tensors of the regions are offloaded."""
        if not names or self._ranks is not None:
            return
        regions = [dataclasses.replace(r, recompute_s=0.0) if r.name in names else r for r in self._profile.regions]
        if tuple(regions) == self._profile.regions:
            return
        self._profile = dataclasses.replace(self._profile, regions=tuple(regions))
        for size in self._sizes.values():
            size.tried, size.fallback_s = [], math.inf  # may recompute them
            size.asks_fallback = self._needs_fallback(size)
            self._mark(size, f"{', '.join(names)} cannot recompute", stops_plan=False)
        self._ask_next()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _condition(self, engine: Engine) -> Condition:
        """Memory from before the step may grow (the state of an optimizer, gradients that accumulate), and the peak may
        (a longer evaluation): the device's statistics show both, unless somebody resets them, or graphs of other stages
        are in flight."""
        can_tell = self.limit_bytes is not None and self._size.trial is not None and engine.device.tracks_peak
        if not can_tell or self._is_stage or self._observer.may_be_in_backward:
            return Condition(ran_out=self._ran_out, is_asked=self._is_asked)
        memory = engine.device.memory()
        grown_bytes = memory.allocated_bytes - self._profile.base_bytes
        return Condition(grown_bytes, memory.peak_bytes, self._ran_out, self._is_asked)

    def _look_at_memory(self, condition: Condition) -> None:
        size, trial, limit_bytes = self._size, self._size.trial, self.limit_bytes
        if limit_bytes is None or trial is None:
            return
        grown_bytes, room_bytes = condition.grown_bytes, max(size.margin_bytes, THRESHOLDS.room * limit_bytes)
        if not trial.is_frozen:
            trial.grown_bytes = max(trial.grown_bytes, grown_bytes)
        elif 0 < trial.seen.peak_bytes <= limit_bytes:
            room_bytes = trial.grown_bytes + limit_bytes - trial.seen.peak_bytes  # nobody reads the peak of later steps
        if grown_bytes > room_bytes:
            self._profile = self._profile.with_reserved(grown_bytes)
            for each in self._sizes.values():
                self._mark(each, f"{format_bytes(grown_bytes)} more are allocated before the step", stops_plan=True)
            self._ask_next()
            return
        may_shrink = size.smallest_bytes <= limit_bytes
        is_over = may_shrink and condition.peak_bytes > limit_bytes >= trial.seen.peak_bytes
        is_due = self._ranks is not None or (trial.begun > 0 and trial.begun % THRESHOLDS.look_every == 0)
        if is_over and is_due and trial.is_frozen and not size.wanted:
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

    def _warn_too_large(self, size: BatchSize, limit_bytes: int) -> None:
        warnings.warn(
            f"a batch with {size.tokens} tokens does not fit the budget of {format_bytes(limit_bytes)}: the plan with "
            f"the smallest peak is used, with a peak of {format_bytes(size.smallest_bytes)}",
            EbbtideWarning,
            stacklevel=2,
        )

    def forward_failed(self, error: BaseException | None, engine: Engine | None) -> None:
        """An exception leaves forward. A note about the plan is added to an out-of-memory error."""
        self._observer.forward_failed(None if engine is None else engine.device)
        if isinstance(error, torch.OutOfMemoryError):
            add_note(error, self._oom_text(engine))
            self._has_run_out()

    def _has_run_out(self) -> None:
        if self._ranks is None:
            self._plan_after_oom()
        else:
            self._ran_out = True

    def _plan_after_oom(self) -> None:
        size, limit_bytes = self._size, self.limit_bytes
        trial = size.trial
        if trial is None or trial.plan.predicted is None:
            return
        if limit_bytes is None:
            self._may_keep_all = False
            if trial.is_fallback and any(not each.is_fallback for each in size.tried):
                self._choose(size)
            elif trial.plan.keeps_all:
                if not size.wanted:
                    self._want(size, "keeping everything ran out of memory")
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
        when = "the next steps use" if self._ranks is None else "from their next meeting on all ranks use"
        what_next = f"{when} a smaller plan" if self._replans_on_oom else "or write on_oom='replan'"
        return out_of_memory(
            self.budget_bytes, predicted, measured_bytes, THRESHOLDS.oom, self._size.smallest_bytes, what_next
        )


def _as_measured(plan: Plan, trial: Trial) -> Plan:
    """`plan`, with the measured step time of `trial` as the prediction."""
    if plan.predicted is None or not trial.is_timed:
        return plan
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, step_s=trial.seen.typical_s))


def _at_speed(profile: Profile, ratio: float) -> Profile:
    """`profile` at another speed, with the launch-ahead that keeping everything needs at that speed."""
    if ratio == 1.0:
        return profile
    scaled = profile.at_speed(ratio)
    return simulate.with_host(scaled, scaled.host)
