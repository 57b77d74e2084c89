"""Looks after the plans of one profile, step by step.

Note [PlanTuner]
~~~~~~~~~~~~~
1. Each step's time is compared with what was predicted, without waiting for it: the host may be steps ahead of the
   device, so several pulses are in flight. Steps of which two ran at once (two forwards, then backward) say nothing.
2. Off by more than following.REPLAN_AT for a while, the profile is refitted and solved again: the link to what its
   copies were timed at, the host to what forward took it where compute waits for it, and compute to what it took where
   it does not wait (pace.py); if no region says that, to the step without the time that it waited for either. A host
   that shares its cores is slow for seconds: taken for compute's, that would make regions that keep look as slow as
   those that run again. Each time it takes more patience, and a plan that turns out slower than the best one so far
   gives way to that one. All of it, trials too, is done a few times for all sizes together. So it cannot swing. Within
   a budget this is done once for less: when the device is at its pace, which it was not when it was watched, for plans
   at the limit of the link are other ones where compute is a few percent slower.
3. Without a budget no step may be slower than with everything kept. What those take only such steps can say: where a
   plan looks slow, they are tried, a few of them, then a few of its own once more, and what is slower than they are
   moves less, or nothing.
4. The peak is looked at once a plan has run twice, in two steps, and the device's own record of it begins anew then:
   what it is beyond the prediction is taken off the budget that is planned for, what it is below is given back. A few
   times. It is looked at again when that record goes beyond the budget.
5. What is off by less, and not planned again, shows in the profile that is given out: it is at the pace of the last
   steps of the size at hand (pace.py).
6. A batch of another size goes by the profile scaled to it, one plan per bucket.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import torch

from ebbtide._control.budget_margin import BudgetMargin
from ebbtide._control.plan_stats import STEPS_TO_LEARN, MeasuredPlan, PlanStats, bounded
from ebbtide._control.speed_scale import ComputeScale, FinishedStep, LinkRates, SpeedScales
from ebbtide._engine.engine import Engine
from ebbtide._engine.stats import StatsRecorder
from ebbtide._errors import EbbtideWarning, PlanError, add_note
from ebbtide._planner import simulate
from ebbtide._planner.explain import out_of_memory, used_bytes
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.step_events import InFlightStep, StepMonitor
from ebbtide._utils.logs import logger_of
from ebbtide._utils.sizes import format_bytes

_log = logger_of(__name__)

_SETTLES_IN_S = 5.0  # of steps by one plan: a device is at its pace
_SETTLED_AT = 0.02
_MOST_REPLANS = 8  # of all sizes of batches
_MOST_TRIALS = 4  # of all sizes too
_MOST_OF_A_TRIAL = 24  # forwards: what is in flight, and what a trial takes
_MOST_IN_FLIGHT = 64
_LOOK_EVERY = 16  # forwards of one size
_BUCKETS_PER_OCTAVE = 8
_OOM_SHARE = 20  # of the budget is taken off after running out of memory
_LOOKS_SLOW = 1.02  # times the step with everything kept, as it was predicted or measured
_AS_FAST = 1.01  # times the same, measured side by side: the fastest steps
_MOSTLY_AS_FAST = 1.08  # and half of them
_AS_MUCH = 0.95  # of what a plan moved
_WAITS_FOR_HOST = 0.01  # of a step: how long that was nobody knows
_UNSEEN = 0.95  # of what the link carries: times that are scaled to another size are not that exact, attention's least


class PlanTarget(Protocol):
    """Whose plan it is."""

    def apply_plan(self, plan: Plan, size: int = 0) -> None: ...


@dataclasses.dataclass
class _BatchSize:
    """Batches of one bucket. `profile`: what its plans come from, before it was scaled to their size. `is_told`: its
    first plan is in the log."""

    tokens: int
    profile: Profile
    solver: Solver
    follow: PlanStats
    paces: SpeedScales = dataclasses.field(default_factory=SpeedScales)
    is_told: bool = False


class _Step(NamedTuple):
    """In flight. `share`: its batch, of the size that is planned for."""

    flight: InFlightStep[StepMonitor]
    size: _BatchSize
    plan: Plan
    share: float


class PlanTuner:
    """Plans of one profile, and how they turn out.

    Args:
        handle: whose plan it sets.
        profile: what the plans come from; refitted on the way.
        ledger: of the handle's door: what compute waited for, and how fast the lanes were.
        budget: the peak to stay under now, in bytes; None: move what costs no time.
        engine: of the device that the model computes on.
        replans_on_oom: plan for less after the device ran out of memory.
        is_shared: with other ranks, which cannot see what is seen here: one plan for all sizes, never changed.
    """

    def __init__(
        self,
        handle: PlanTarget,
        profile: Profile,
        ledger: StatsRecorder,
        budget: Callable[[], int | None],
        engine: Engine | None,
        *,
        replans_on_oom: bool,
        is_shared: bool,
    ) -> None:
        self._handle = handle
        self._profile = profile
        self._allowance = BudgetMargin(budget)
        self._replans_on_oom = replans_on_oom
        self._is_shared = is_shared
        self._sizes: dict[int, _BatchSize] = {}
        self._in_flight: list[_Step] = []
        self._replans = 0
        self._has_settled = False
        self._trials = 0
        self._was_trial_ended = False  # keeping everything may not fit
        self._kept_was_faster = False
        self._was_host_refitted = False
        self._was_peak_told = False
        self._failed_allocations = 0 if engine is None else engine.device.failed_allocations()
        self._link_times = LinkRates(ledger)
        self._measured_tokens = profile.tokens
        self._size = self._make_size(profile.tokens)
        self._go_by(self._size)

    @property
    def profile(self) -> Profile:
        """What the plans come from, at the pace that compute and host have with batches of the size at hand, where that
        is known (see Note [The pace])."""
        size = self._size
        if self._is_shared or size.profile is not self._profile:
            return self._profile  # the same for all ranks; or the last steps were compared with another one
        host, compute = self._host_pace(size), self._compute_pace(size)
        if compute is None:
            waits = size.solver.profile.host is not None and _waits_for_host(size.follow.plan)
            pace = 1.0 if waits else size.follow.pace_of_compute
            compute = ComputeScale(pace, pace)
        if host == compute.forward == compute.backward == 1.0:
            return self._profile
        refitted = _with_host_times(self._profile, host).refitted(compute.forward, compute.backward)
        return refitted if host != 1.0 else self._with_lead(refitted)

    @property
    def tokens(self) -> int:
        """That are planned for now."""
        return self._size.tokens

    @property
    def plans(self) -> dict[int, Plan]:
        """By the tokens they are for."""
        return {tokens: size.follow.plan for tokens, size in self._sizes.items()}

    @property
    def measured(self) -> tuple[float, int]:
        """Median seconds of the last steps by the current plan, and peak in bytes; 0: unknown as yet."""
        return self._size.follow.typical_s, self._size.follow.peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What is planned for: the budget less what measured peaks were beyond the predicted ones."""
        return self._allowance.planned_bytes(self._size.tokens)

    def never_recompute(self, names: Collection[str]) -> None:
        """Plan without the recomputation of these regions, which was seen to differ from their forward."""
        if not names:
            return
        regions = [dataclasses.replace(r, recompute_s=0.0) if r.name in names else r for r in self._profile.regions]
        if self._is_shared or tuple(regions) == self._profile.regions:
            return  # ranks change no plan on the way: what the regions save moves
        self._profile = dataclasses.replace(self._profile, regions=tuple(regions))
        self._sizes = {}
        self._size = self._make_size(self._size.tokens, self._leanest)
        self._go_by(self._size)

    def step_begins(self, engine: Engine, tokens: int, is_verified: bool = False) -> StepMonitor:
        """Before a forward: sets its plan, and returns what follows it. What is verified takes longer, and says nothing
        of the plan."""
        if any(step.flight.ended is None for step in self._in_flight):
            self._look_for_failure(engine)
        self._read()
        bucket = self._bucket(tokens)
        size = self._sizes.get(bucket) or self._make_size(bucket, self._leanest)
        if size is not self._size:
            self._size = size
            self._go_by(size)
        if not size.is_told:
            size.is_told = True
            other = "" if size.tokens == self._measured_tokens else f" for batches of {size.tokens} tokens"
            self._tell(f"plan in force{other}", size)
        self._bound_trial(size)
        self._look_again(size, engine)
        pulse = StepMonitor(engine.device, reads_peak=self._wants_peak(size.follow))
        pulse.is_alone = not is_verified
        for step in self._in_flight:
            other = step.flight.pending
            if other is not None:
                pulse.is_alone = other.is_alone = False
        share = tokens / size.tokens if tokens > 0 and size.tokens > 0 else 1.0
        self._in_flight.append(_Step(InFlightStep(pulse), size, size.follow.plan, share))
        return pulse

    def _bucket(self, tokens: int) -> int:
        """The size that is planned for instead: no smaller, and one of a few per octave."""
        measured = self._measured_tokens
        if tokens <= 0 or measured <= 0 or self._is_shared:
            return self._size.tokens  # of unknown size; or all ranks go by one plan, whatever batch each of them has
        return bucket_of(tokens, measured)

    # -- how long steps take ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        """What the steps took that have passed by now."""
        passed: list[tuple[_Step, StepMonitor]] = []
        left: list[_Step] = []
        for step in self._in_flight:
            pulse = step.flight.ended
            if pulse is not None and pulse.is_readable:
                passed.append((step, pulse))
            elif pulse is not None or step.flight.pending is not None:
                left.append(step)  # the others' graphs were dropped
        self._in_flight = left[-_MOST_IN_FLIGHT:]
        if not passed:
            return
        # Whose waiting it was nobody knows; the longer the step, the more of it.
        took_s = max(sum(pulse.seconds() for _, pulse in passed), 1e-9)
        forward, backward = (waited_s / took_s for waited_s in self._link_times.waited_s())
        for step, pulse in passed:
            follow = step.size.follow
            if step.plan is not follow.plan or self._sizes.get(step.size.tokens) is not step.size:
                continue  # of a plan that is followed no more
            seconds = pulse.seconds() / step.share
            if pulse.reads_peak:
                if follow.saw_peak(pulse.peak_bytes, step.share):
                    self._fit_peak(step.size)
            elif not pulse.is_alone:
                follow.came_by()
            else:
                is_off = follow.saw(seconds, seconds * min(1.0, forward + backward))
                if pulse.launch_times is not None and follow.steps > STEPS_TO_LEARN:
                    stalls_s = pulse.seconds() * forward, pulse.seconds() * backward
                    step.size.paces.add_step(FinishedStep(pulse.launch_times, step.share, *stalls_s))
                if is_off or self._is_to_settle(follow):
                    self._again(step.size)

    def _is_to_settle(self, follow: PlanStats) -> bool:
        """Once, within a budget, and if that changes enough."""
        is_ready = follow.has_run_for(_SETTLES_IN_S) and self._allowance.limit_bytes is not None
        if not is_ready or self._has_settled or self._is_shared:
            return False
        self._has_settled = True
        return follow.is_off_by(_SETTLED_AT) and not follow.is_as_measured

    def _again(self, size: _BatchSize) -> None:
        """The steps are not what they should be."""
        follow = size.follow
        if self._is_shared:
            return
        if follow.is_trial:
            self._weigh(size)
        elif follow.is_slow:
            self._slower_than_kept(size)
        elif self._replans < _MOST_REPLANS:
            self._replans += 1
            self._plan_anew(size)

    def _plan_anew(self, size: _BatchSize) -> None:
        """With what the steps say. A plan that was tried before comes back if it was faster than what is promised now,
        as it was measured then; if it no longer is, the machine has changed, and what was measured before is void."""
        follow = size.follow
        if follow.is_as_measured:
            follow.best = None
            self._change_to(size, size.solver.solve(self._allowance.planned_bytes(size.tokens)), _off(follow))
            return
        why = _off(follow)
        before = follow.best if follow.best is not None and follow.best.plan is not follow.plan else None
        plan = self._refitted_plan(size)
        if before is None or plan.predicted is None or plan.predicted.step_s <= before.step_s:
            self._change_to(size, plan, why)
        else:
            self._change_to(size, _as_measured(before), f"{why}: an earlier plan was faster", is_as_measured=True)

    def _slower_than_kept(self, size: _BatchSize) -> None:
        """There is no budget, and the steps look slower than with everything kept."""
        follow = size.follow
        kept = follow.kept
        may_keep = size.tokens <= self._measured_tokens and not self._was_trial_ended
        if _moves(follow.plan) and may_keep and self._trials < _MOST_TRIALS:
            self._trials += 1
            self._change_to(size, size.solver.keeping_all(), _off(follow), is_trial=True)
        elif follow.is_as_measured:
            follow.most_s = None  # it was as fast when it was tried: it is the machine
        elif kept is not None:
            follow.most_s = None
            self._change_to(size, _as_measured(kept), "keeping all was faster", is_as_measured=True)
        elif may_keep:  # what trials of other sizes came to, this one is believed to come to as well
            follow.most_s = None
            plan = size.solver.keeping_all() if self._kept_was_faster else follow.plan
            self._change_to(size, plan, "as with batches of another size")
        elif self._replans < _MOST_REPLANS:
            self._replans += 1
            why = _off(follow)
            self._change_to(size, self._refitted_plan(size), why)

    def _weigh(self, size: _BatchSize) -> None:
        """Steps with everything kept were tried: are those of the plan before as fast? That was looked at because some
        of them were slow, and maybe by chance: it is tried too, and gives way if it is slower again."""
        follow, before, now = size.follow, size.follow.before_trial, size.follow.tried()
        assert before is not None
        was_kept = not _moves(now.plan)
        kept, moved = (now, before) if was_kept else (before, now)
        follow.kept = kept
        if _is_as_fast(moved, kept):
            self._change_to(size, _as_measured(moved), "as fast as keeping all", is_as_measured=True)
            follow.most_s = max(kept.fastest_s, moved.fastest_s) * _LOOKS_SLOW
        elif was_kept:
            self._change_to(size, moved.plan, "keeping all was faster: side by side with it", is_trial=True)
        else:
            self._move_less(size, kept, moved)

    def _move_less(self, size: _BatchSize, kept: MeasuredPlan, moved: MeasuredPlan) -> None:
        """The plan is slower than keeping everything."""
        plan = self._refitted_plan(size, kept)
        is_less = _moved_bytes(plan) < _AS_MUCH * _moved_bytes(moved.plan)
        self._kept_was_faster = not is_less
        chosen = plan if is_less else _as_measured(kept)
        self._change_to(size, chosen, "keeping all was faster", is_as_measured=not is_less)
        size.follow.most_s = kept.fastest_s * _LOOKS_SLOW if is_less else None

    def _bound_trial(self, size: _BatchSize) -> None:
        """A trial that cannot be read (steps beside each other, graphs that are dropped) ends all the same."""
        size.follow.begun += 1
        if size.follow.is_trial and size.follow.begun > _MOST_OF_A_TRIAL:
            self._end_trial(size)

    def _end_trial(self, size: _BatchSize) -> None:
        """Back to the plan that moves, and nothing is tried any more."""
        before, plan = size.follow.before_trial, size.follow.plan
        assert before is not None
        self._was_trial_ended = True
        size.follow.most_s = None
        self._change_to(size, plan if _moves(plan) else before.plan, "the trial ended unread")

    def _refitted_plan(self, size: _BatchSize, kept: MeasuredPlan | None = None) -> Plan:
        """From what its steps say of the profile, or those with everything kept, where they were tried."""
        self._refit(size, kept)
        # Of other sizes nothing is known any more, but what was found out by steps with everything kept.
        self._sizes = {tokens: other for tokens, other in self._sizes.items() if other.follow.kept is not None}
        self._sizes[size.tokens] = size
        size.profile, size.solver = self._profile, self._solver_for(size.tokens)
        size.follow.most_s = self._most_s(size.solver)
        return size.solver.solve(self._allowance.planned_bytes(size.tokens))

    def _refit(self, size: _BatchSize, kept: MeasuredPlan | None) -> None:
        """The link to what its copies were timed at, and host and compute to their paces; compute to whole steps if no
        region says its own, or all that regions say is that nothing has changed."""
        host, compute = self._host_pace(size), self._compute_pace(size)
        if compute is None or host == compute.forward == compute.backward == 1.0:
            ratio = self._ratio_by_steps(size, host) if kept is None else bounded(kept.step_s / _step_s(kept.plan))
            compute = ComputeScale(ratio, ratio)
        refitted = _with_host_times(self._profile, host).refitted(compute.forward, compute.backward)
        refitted = dataclasses.replace(refitted, link=self._link_times.refitted(self._profile.link))
        self._was_host_refitted = host != 1.0
        self._profile = self._with_lead(refitted)

    def _ratio_by_steps(self, size: _BatchSize, host: float) -> float:
        """How many times as long as predicted compute takes, where it waits for such a host as long as predicted."""
        follow = size.follow
        predicted = follow.plan.predicted
        assert predicted is not None
        host_wait_s = predicted.host_wait_s
        if host != 1.0:
            host_wait_s = simulate.host_wait_s(_with_host_times(size.solver.profile, host), follow.plan)
        return follow.compute_ratio(follow.typical_s, host_wait_s)

    def _with_lead(self, profile: Profile) -> Profile:
        """What compute waits for a host that was seen to be slow has been taken out of its times: the host gets no lead
        for it."""
        return profile if self._was_host_refitted else simulate.with_host(profile, profile.host)

    def _host_pace(self, size: _BatchSize) -> float:
        """How many times as long as believed the host takes."""
        return bounded(size.paces.of_cpu(size.solver.profile, size.follow.plan))

    def _compute_pace(self, size: _BatchSize) -> ComputeScale | None:
        """The same of compute, by the regions in which it does not wait for the host; None if these do not say."""
        pace = size.paces.of_compute(size.solver.profile, size.follow.plan)
        return None if pace is None else ComputeScale(bounded(pace.forward), bounded(pace.backward))

    # -- plans -----------------------------------------------------------------------------------------------------

    def _make_size(self, tokens: int, instead: Callable[[int, Solver], Plan] | None = None) -> _BatchSize:
        """Raises PlanError if nothing fits the budget and there is nothing to do `instead`."""
        solver = self._solver_for(tokens)
        try:
            plan = solver.solve(self._allowance.planned_bytes(tokens))
        except PlanError:
            if instead is None:
                raise
            plan = instead(tokens, solver)  # training is under way
        size = self._sizes[tokens] = _BatchSize(tokens, self._profile, solver, PlanStats(plan, self._most_s(solver)))
        return size

    def _solver_for(self, tokens: int) -> Solver:
        profile = self._profile.scaled(tokens)
        if self._allowance.limit_bytes is None and tokens != self._measured_tokens:
            profile = dataclasses.replace(profile, link=profile.link.times(_UNSEEN, _UNSEEN))
        return Solver(profile)

    def _most_s(self, solver: Solver) -> float | None:
        """What a step may take at the most where none may be slower than with everything kept."""
        is_limited = self._allowance.limit_bytes is None and not self._was_trial_ended
        return _step_s(solver.keeping_all()) * _LOOKS_SLOW if is_limited else None

    def _leanest(self, tokens: int, solver: Solver) -> Plan:
        """For a batch too large for the budget, in the midst of a training: one that is too small for it is no help."""
        least_bytes, asked_bytes = solver.smallest_budget(), self._allowance.limit_bytes
        if asked_bytes is not None and least_bytes <= asked_bytes:
            return solver.solve(asked_bytes)  # what another size was beyond its prediction does not fit
        warnings.warn(
            f"a batch with {tokens} tokens does not fit the budget of {format_bytes(asked_bytes or 0)}: it goes by the "
            f"plan that needs the least, with a peak of {format_bytes(least_bytes)}",
            EbbtideWarning,
            stacklevel=2,
        )
        return solver.solve(least_bytes)

    def _change_to(
        self, size: _BatchSize, plan: Plan, why: str, *, is_as_measured: bool = False, is_trial: bool = False
    ) -> None:
        size.follow.goes_by(plan, is_as_measured=is_as_measured, is_trial=is_trial)
        size.paces.clear()
        self._go_by(size)
        self._tell(f"plan {'tried' if is_trial else 'corrected'}, {why}", size)

    def _tell(self, what: str, size: _BatchSize) -> None:
        asked_bytes, plan = self._allowance.limit_bytes, size.follow.plan
        budget = "no budget" if asked_bytes is None else f"budget {format_bytes(asked_bytes)}"
        keeps = "; everything stays on the device" if plan.keeps_all else ""
        _log.info("%s (%s): %s%s", what, budget, plan.predicted, keeps)

    def _go_by(self, size: _BatchSize) -> None:
        if size is self._size:
            is_first = size.tokens == self._measured_tokens  # and goes on with what the first steps have learned
            self._handle.apply_plan(size.follow.plan, 0 if is_first else size.tokens)

    # -- peaks -----------------------------------------------------------------------------------------------------

    def _wants_peak(self, follow: PlanStats) -> bool:
        """Until it is known of a plan, when its order has been learned."""
        is_watched = not self._is_shared and self._allowance.limit_bytes is not None
        return is_watched and follow.steps >= STEPS_TO_LEARN and follow.peak_bytes == 0

    def _fit_peak(self, size: _BatchSize) -> None:
        """Plan for less if the peak was beyond the budget, and for more if that leaves room to spare."""
        predicted, peak_bytes = size.follow.plan.predicted, size.follow.peak_bytes
        if predicted is None:
            return
        spare_bytes = self._allowance.corrected(
            size.tokens, peak_bytes, predicted.peak_bytes, size.follow.is_whole_peak
        )
        if spare_bytes is not None:
            self._plan_with(size, f"the measured peak was {format_bytes(peak_bytes)}", spare_bytes)
        else:
            self._tell_if_beyond(peak_bytes)

    def _plan_with(self, size: _BatchSize, why: str, spare_bytes: int, short_bytes: int = 0) -> None:
        """Plan again with so much of the budget left free. If nothing fits then, what is there has to do."""
        asked_bytes = self._allowance.limit_bytes
        assert asked_bytes is not None
        try:
            plan = size.solver.solve(asked_bytes - spare_bytes - short_bytes)
        except PlanError:
            self._tell_if_beyond(size.follow.peak_bytes)
            return
        self._allowance.leave_free(size.tokens, spare_bytes, short_bytes)
        self._sizes = {size.tokens: size}
        size.follow.best = None  # it was made for more
        self._change_to(size, plan, f"{format_bytes(spare_bytes + short_bytes)} of the budget left free: {why}")

    def _look_again(self, size: _BatchSize, engine: Engine) -> None:
        """What a training allocates may grow (an optimizer's first step, a longer evaluation) after the peak was looked
        at: the device's record of it says so, as far as nobody else has it begin anew."""
        follow, asked_bytes = size.follow, self._allowance.limit_bytes
        if asked_bytes is None or self._is_shared or follow.begun % _LOOK_EVERY != 0 or follow.peak_bytes == 0:
            return
        if follow.peak_bytes <= asked_bytes < engine.device.memory().peak_bytes:
            follow.look_again()

    def _tell_if_beyond(self, peak_bytes: int) -> None:
        asked_bytes = self._allowance.limit_bytes
        if asked_bytes is not None and peak_bytes > asked_bytes and not self._was_peak_told:
            self._was_peak_told = True
            warnings.warn(
                f"the step has a peak of {format_bytes(peak_bytes)}, beyond the budget of {format_bytes(asked_bytes)}, "
                "and no plan lowers it: something outside of the regions needs it (told once)",
                EbbtideWarning,
                stacklevel=2,
            )

    # -- out of memory ---------------------------------------------------------------------------------------------

    def forward_failed(self, error: BaseException | None, engine: Engine | None) -> None:
        """An exception leaves the forward. If the device is out of memory, say what was planned."""
        self._in_flight.clear()
        if engine is not None:
            self._failed_allocations = engine.device.failed_allocations()
        if isinstance(error, torch.OutOfMemoryError):
            add_note(error, self._oom_text(engine))
            self._plan_for_less()

    def _look_for_failure(self, engine: Engine) -> None:
        """The last backward did not come to its end: nobody asked us when it failed."""
        failures = engine.device.failed_allocations()
        if failures > self._failed_allocations:
            warnings.warn(self._oom_text(engine), EbbtideWarning, stacklevel=2)
            self._plan_for_less()
        self._failed_allocations = failures

    def _plan_for_less(self) -> None:
        if self._size.follow.is_trial:
            self._end_trial(self._size)
        budget_bytes = self.budget_bytes
        if self._replans_on_oom and budget_bytes is not None and not self._is_shared:
            spare_bytes = self._allowance.margin_bytes(self._size.tokens)
            predicted = self._size.follow.plan.predicted
            assert predicted is not None
            planned_bytes = used_bytes(budget_bytes, predicted)
            less_bytes = max(planned_bytes - planned_bytes // _OOM_SHARE, self._size.solver.smallest_budget())
            if less_bytes < planned_bytes:
                self._plan_with(self._size, "the device ran out of memory", spare_bytes, budget_bytes - less_bytes)

    def _oom_text(self, engine: Engine | None) -> str:
        measured_bytes = 0 if engine is None else engine.device.memory().peak_bytes
        predicted = self._size.follow.plan.predicted
        what_next = "the next steps go by a plan for less" if self._replans_on_oom else "or write on_oom='replan'"
        if self._is_shared:
            what_next = "ranks that share a plan do not change it on the way"
        least_bytes = 0 if self.budget_bytes is None else self._size.solver.smallest_budget()
        return out_of_memory(self.budget_bytes, predicted, measured_bytes, _OOM_SHARE, least_bytes, what_next)


def bucket_of(tokens: int, measured: int = 1) -> int:
    """The smallest of a few sizes an octave, counted from `measured`, that is no smaller than `tokens`."""
    steps = math.log2(tokens / measured) * _BUCKETS_PER_OCTAVE
    return round(measured * 2 ** (math.ceil(steps - 1e-9) / _BUCKETS_PER_OCTAVE))


def _waits_for_host(plan: Plan) -> bool:
    return plan.predicted is not None and plan.predicted.host_wait_s > _WAITS_FOR_HOST * plan.predicted.step_s


def _off(follow: PlanStats) -> str:
    return f"the last steps took {follow.typical_s * 1e3:.1f} ms"


def _with_host_times(profile: Profile, ratio: float) -> Profile:
    return profile if profile.host is None else dataclasses.replace(profile, host=profile.host.times(ratio))


def _as_measured(tried: MeasuredPlan) -> Plan:
    """The plan, with its step as it turned out."""
    assert tried.plan.predicted is not None
    return dataclasses.replace(tried.plan, predicted=dataclasses.replace(tried.plan.predicted, step_s=tried.step_s))


def _is_as_fast(tried: MeasuredPlan, kept: MeasuredPlan) -> bool:
    return tried.fastest_s <= kept.fastest_s * _AS_FAST and tried.middle_s <= kept.middle_s * _MOSTLY_AS_FAST


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def _moved_bytes(plan: Plan) -> int:
    return 0 if plan.predicted is None else plan.predicted.moved_bytes


def _moves(plan: Plan) -> bool:
    return _moved_bytes(plan) > 0
