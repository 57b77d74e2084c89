"""From profile to plan, and looking after it: what a handle asks at the beginning of every step.

Note [Control]
~~~~~~~~~~~~~~
1. The first steps run with what needs the least: every region runs again with its inputs moved if there is a budget,
   every region keeps if there is none. One step warms up, one is watched for times, one for details; then the plan.
2. From then on each step's time is compared with what was predicted, without waiting for it. Off by more than
   REPLAN_AT for PATIENCE steps (following.py), the profile is refitted and solved again; each time it takes more
   patience, and a plan that turns out slower than the best one so far gives way to that one. So it cannot swing.
3. The peak is looked at once a plan has run twice, and the device's own record of it begins anew then: what it is
   beyond the prediction is taken off the budget that is planned for, what it is below is given back. A few times.
4. A batch of another size goes by the profile scaled to it, one plan per bucket.
5. Where a job has several ranks and regions may run again, all ranks go by one plan, from the slowest of their
   profiles, whatever sizes their batches are of. They vote on it at the same forward.
"""

import dataclasses
import enum
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from ebbtide._bytes import format_bytes
from ebbtide._errors import EbbtideWarning, PlanError
from ebbtide.engine.engine import Engine
from ebbtide.engine.probe import link_rates
from ebbtide.engine.scope import Scope
from ebbtide.planner.following import STEPS_TO_LEARN, Follower
from ebbtide.planner.measure import IsDear, Pulse, StepWatch
from ebbtide.planner.profile import Link, Profile
from ebbtide.planner.ranks import Agree, Answer, slowest
from ebbtide.planner.reading import Surroundings, profile_of
from ebbtide.planner.solve import Solver
from ebbtide.plans import Plan, Recipe, RegionPlan
from ebbtide.types import Watch

_MOST_REPLANS = 8  # of all sizes of batches
_VOTE_EVERY = 4  # forwards: one to warm up, two that are watched, and the one that votes
_BUCKETS_PER_OCTAVE = 8
_LATENCY_S = 1e-5
_MOST_FAILURES = 3
_MOST_FITS = 3
_NEAR = 0.02
_OOM_SHARE = 20  # of the budget is taken off after running out of memory
_FORWARDS_TO_WAIT = 24


class Planned(Protocol):
    """The handle, as its control sees it."""

    def go_by(self, plan: Plan) -> None: ...

    def engine(self) -> Engine | None:
        """Of the device that the model computes on; None while nothing can move there."""
        ...

    def made_for(self) -> Mapping[str, str]:
        """What a profile has to be of, by name."""
        ...

    def compiled(self) -> Collection[str]:
        """Regions whose operators the compiler hides."""
        ...

    def memory_before(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by kind (parameters, gradients), and those of gradients that backward will allocate, by region."""
        ...


class Phase(enum.Enum):
    """What the step at hand is for."""

    WARM = "warms up"
    TIMES = "is watched for times"
    DETAILS = "is watched for details"
    PLANNED = "goes by the plan"
    GAVE_UP = "goes by the recipes it began with"


class Control:
    """Plans for one handle.

    Args:
        handle: whose plan it sets.
        names: of its regions.
        scope: its saves' scope.
        budget_bytes: the peak to stay under; None: move what costs no time.
        profile: of this model, measured before; spares the watched steps.
        replans_on_oom: plan for less after the device ran out of memory.
        agree: gives the answers of all ranks for this rank's one; None where there is only one.
        keep: is given the profile as soon as it is measured.
        looks_again: run every region again in the first steps also without a budget, for a profile that serves any.
    """

    def __init__(
        self,
        handle: Planned,
        names: tuple[str, ...],
        scope: Scope,
        budget_bytes: Callable[[int], int] | None,
        is_dear: IsDear,
        profile: Profile | None = None,
        replans_on_oom: bool = False,
        agree: Agree | None = None,
        keep: Callable[[Profile], None] | None = None,
        looks_again: bool = False,
    ) -> None:
        self._handle = handle
        self._names = names
        self._scope = scope
        self._budget_of = budget_bytes
        self._is_dear = is_dear
        self._replans_on_oom = replans_on_oom
        self._agree = agree
        self._keep = keep
        self._looks_again = looks_again
        self._times: StepWatch | None = None
        self._watch: StepWatch | None = None
        self._pulse: Pulse | None = None
        self._unfinished = 0
        self._tokens = 0
        self._solvers: dict[int, Solver] = {}
        self._plans: dict[int, Plan] = {}
        self._follow: Follower | None = None
        self._spare_bytes: int = 0  # of the budget: what measured peaks were beyond the predicted ones
        self._failed_allocations = 0
        self._forwards = 0
        self._replans = 0
        self._tokens_of_times = 0
        self._followers: dict[int, Follower] = {}
        self._peaks_fitted = 0
        self._agreed_bytes: int | None = None  # the smallest budget of all ranks
        self._failures = 0
        self.profile = profile
        self.phase = Phase.WARM

    @property
    def runs_again(self) -> bool:
        """Whether the first steps run every region again."""
        return self._budget_of is not None or self._looks_again

    def start(self) -> None:
        """Set what the first steps go by. Raises PlanError if the profile given is of something else, or none fits."""
        if self.profile is None:
            self._set_first()
            return
        self.profile.check_made_for(self._handle.made_for())
        if self._budget_of is not None and not self.profile.has_second_runs:
            raise PlanError(
                "the profile was measured without a budget, so it does not say what it takes to run a region again: "
                "measure one with a budget, or leave profile= out"
            )
        if self._agree is not None:
            self.profile = self._agreed(self.profile)
            assert self.profile is not None
        self._tokens = self.profile.tokens
        self._plan_for(self.profile.tokens)
        self.phase = Phase.PLANNED

    def _set_first(self, prefetch_bytes: int | None = None) -> None:
        recipe = Recipe("recompute" if self.runs_again else "keep")
        regions = {name: RegionPlan(recipe, prefetch_bytes=prefetch_bytes) for name in self._names}
        self._handle.go_by(Plan(regions, outside=RegionPlan(Recipe("keep"))))

    # -- a step ----------------------------------------------------------------------------------------------------

    def step_begins(self, tokens: int) -> Watch | None:
        """Before a forward that saves: sets the plan it goes by, and returns what follows it."""
        engine = self._handle.engine()
        if engine is None or self.phase is Phase.GAVE_UP:
            return None
        if self.phase is Phase.PLANNED:
            return self._planned_step(engine, tokens)
        return self._watched_step(engine, tokens)

    def _watched_step(self, engine: Engine, tokens: int) -> StepWatch | None:
        if self._agree is not None:
            self._forwards += 1
            if self._forwards % _VOTE_EVERY == 0:
                return self._vote(engine)
        if self._watch is not None:
            if not self._watch.is_over:
                return self._wait_for_backward()
            if not self._watch.is_readable and self._agree is None and self.phase is Phase.DETAILS:
                return None
            self._unfinished = 0
            if self._agree is not None and self.phase is Phase.DETAILS:
                return None  # until all vote
            if self._move_on(self._watch, engine):
                return None
        is_detailed = self.phase is Phase.DETAILS
        self._tokens = tokens
        if self.phase is Phase.TIMES:
            self._tokens_of_times = tokens
        self._set_first(prefetch_bytes=1 if is_detailed and self.runs_again else None)
        self._watch = StepWatch(
            engine.device, self._scope, is_detailed=is_detailed, runs_again=self.runs_again,
            is_dear=self._is_dear if self.runs_again else None,
        )  # fmt: skip
        self._watch.began()
        return self._watch

    def _vote(self, engine: Engine) -> None:
        """Every so many forwards all ranks say whether they have a profile, whatever came between: none may be late."""
        watch = self._watch
        if self.phase is Phase.DETAILS and watch is not None and watch.is_over:
            self._move_on(watch, engine)
        else:
            self._agreed(None)
            self._watch = None
            self._could_not_read()

    def _wait_for_backward(self) -> None:
        """The graph that is watched has not run backward: accumulation, a pipeline, or it was dropped."""
        self._unfinished += 1
        if self._unfinished >= _FORWARDS_TO_WAIT:
            self._watch = None
            self._unfinished = 0

    def _move_on(self, watch: StepWatch, engine: Engine) -> bool:
        """To the next phase; true if there is a plan now."""
        if self.phase is Phase.WARM:
            self.phase = Phase.TIMES
        elif self.phase is Phase.TIMES:
            self.phase, self._times = Phase.DETAILS, watch
        elif self._read(watch, engine):
            self.phase = Phase.GAVE_UP  # if nothing fits; what the first steps went by needs the least
            self._plan_for(self._tokens)
            self.phase = Phase.PLANNED
            return True
        return False

    def _read(self, watch: StepWatch, engine: Engine) -> bool:
        """Whether the two steps that were watched make a profile."""
        assert self._times is not None
        while not watch.is_readable:  # ranks have to come to their plan in the same step
            time.sleep(1e-4)
        self.profile = self._profile(self._times, watch, engine)
        self._times = self._watch = None
        if self.profile is None:
            self._could_not_read()
        elif self._keep is not None:
            self._keep(self.profile)
        return self.profile is not None

    def conclude(self) -> Profile | None:
        """The profile, if the steps so far make one: what the next step would begin with, if there were one."""
        engine, watch = self._handle.engine(), self._watch
        if self.phase is Phase.DETAILS and engine is not None and watch is not None and watch.is_over:
            self._move_on(watch, engine)
        return self.profile

    def _could_not_read(self) -> None:
        """The watched steps came by other regions, or by none: they are watched again, a few times."""
        self._failures += 1
        self.phase = Phase.TIMES
        if self._failures == _MOST_FAILURES:
            self.phase = Phase.GAVE_UP
            done = "run again with their inputs moved" if self.runs_again else "are kept"
            warnings.warn(
                f"no plan was made: the steps came by other regions each time, or by none of {len(self._names)} "
                f"({', '.join(self._names[:4])}, ...). All {done}. Name some that every step comes by: regions=[...]",
                EbbtideWarning,
                stacklevel=2,
            )

    def _profile(self, times: StepWatch, details: StepWatch, engine: Engine) -> Profile | None:
        base, grads = self._handle.memory_before()
        rates = link_rates(engine)
        if rates is None:
            self.phase = Phase.GAVE_UP
            raise PlanError(
                "the store has no room for a single megabyte: give it a larger host_limit, or another store="
            )
        about = Surroundings(
            made_for=self._handle.made_for(),
            link=Link(*rates, _LATENCY_S),
            base=base,
            grads=grads,
            host_limit_bytes=engine.store_stats().limit_bytes,
            tokens=self._tokens,
            compiled=frozenset(self._handle.compiled()),
            time_scale=self._tokens / self._tokens_of_times if self._tokens_of_times > 0 else 1.0,
            device_bytes=engine.device.total_bytes(),
        )
        profile = profile_of(times, details, self._names, about)
        if self._agree is None:
            return profile
        return self._agreed(profile)

    def _agreed(self, profile: Profile | None) -> Profile | None:
        """The slowest of all ranks'; None if one of them has none. Every rank asks, for the others wait for it."""
        assert self._agree is not None
        answers = self._agree(Answer(profile, self.budget_bytes))
        budgets = [answer.budget_bytes for answer in answers if answer.budget_bytes is not None]
        self._agreed_bytes = min(budgets, default=None)
        found = [answer.profile for answer in answers if answer.profile is not None]
        return slowest(found) if len(found) == len(answers) else None

    # -- plans -----------------------------------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int | None:
        """What is planned for: the budget less what measured peaks were beyond the predicted ones."""
        if self._budget_of is None or self._agreed_bytes is not None:
            return self._agreed_bytes
        engine = self._handle.engine()
        return self._budget_of(0 if engine is None else engine.device.total_bytes()) - self._spare_bytes

    def _plan_for(self, tokens: int) -> None:
        if not self._plans:
            engine = self._handle.engine()
            self._failed_allocations = 0 if engine is None else engine.device.failed_allocations()
        plan = self._plans.get(tokens)
        if plan is None:
            plan = self._plans[tokens] = self._solve(tokens)
        follow = self._followers.get(tokens)
        if follow is None or follow.plan is not plan:
            follow = self._followers[tokens] = Follower(plan)
        self._follow = follow
        self._handle.go_by(plan)

    def _solve(self, tokens: int) -> Plan:
        assert self.profile is not None
        solver = self._solvers.get(tokens)
        if solver is None:
            solver = self._solvers[tokens] = Solver(self.profile.scaled(tokens))
        return solver.solve(self.budget_bytes)

    def _planned_step(self, engine: Engine, tokens: int) -> Pulse:
        if self._pulse is not None and not self._pulse.is_over:
            self._look_for_failure(engine)
        self._read_pulse()
        bucket = self._bucket(tokens)
        if bucket != self._tokens:
            self._plan_for(bucket)
            self._tokens = bucket
        self._pulse = Pulse(engine.device, looks_at_peak=self._wants_peak())
        return self._pulse

    def _bucket(self, tokens: int) -> int:
        """The size that is planned for instead: no smaller, and one of a few per octave."""
        assert self.profile is not None
        if tokens <= 0 or self.profile.tokens <= 0 or self._agree is not None:
            return self._tokens  # of unknown size; or all ranks go by one plan, whatever batch each of them has
        steps = math.log2(tokens / self.profile.tokens) * _BUCKETS_PER_OCTAVE
        return round(self.profile.tokens * 2 ** (math.ceil(steps - 1e-9) / _BUCKETS_PER_OCTAVE))

    def _read_pulse(self) -> None:
        pulse, follow = self._pulse, self._follow
        if pulse is None or follow is None or not pulse.is_readable:
            return
        self._pulse = None
        if pulse.looks_at_peak:
            self._fit_peak(follow, pulse.peak_bytes)
        elif follow.saw(pulse.seconds()) and self._replans < _MOST_REPLANS:
            self._replans += 1
            self._replan(follow, pulse.seconds())

    def _replan(self, follow: Follower, step_s: float) -> None:
        """The steps are not what was predicted: refit what was measured, and plan again."""
        assert self.profile is not None
        predicted = follow.plan.predicted
        if predicted is None or self._agree is not None:
            return
        ratio = step_s / predicted.step_s
        self.profile = self.profile.refitted(ratio, ratio)
        self._solvers.clear()
        self._plans.clear()
        best = follow.best
        plan = self._solve(self._tokens)
        if best is not None and plan.predicted is not None and plan.predicted.step_s > best[0]:
            plan = dataclasses.replace(best[1], predicted=dataclasses.replace(predicted, step_s=best[0]))
        self._change_to(plan)

    def _wants_peak(self) -> bool:
        """Once per plan, when its order has been learned."""
        follow = self._follow
        is_watched = self._budget_of is not None and self._agree is None
        return is_watched and follow is not None and follow.steps == STEPS_TO_LEARN and follow.peak_bytes == 0

    def _fit_peak(self, follow: Follower, peak_bytes: int) -> None:
        """Plan for less if the peak was beyond the prediction, and for more if it was well below."""
        follow.peak_bytes = peak_bytes
        predicted, budget_bytes = follow.plan.predicted, self.budget_bytes
        if predicted is None or budget_bytes is None or self._peaks_fitted == _MOST_FITS:
            return
        asked_bytes = budget_bytes + self._spare_bytes
        if asked_bytes * (1 - _NEAR) <= peak_bytes <= asked_bytes:
            return
        beyond = peak_bytes - predicted.peak_bytes
        if peak_bytes <= asked_bytes and -beyond <= _NEAR * asked_bytes:
            return  # what the plan leaves unused on its own account is none of the prediction's fault
        self._peaks_fitted += 1
        over = peak_bytes - asked_bytes
        self._plan_with(beyond if over <= 0 else max(beyond, self._spare_bytes + over))

    def _plan_with(self, spare_bytes: int) -> None:
        """Plan again with so much of the budget taken off. If nothing fits then, what is there has to do."""
        assert self._follow is not None
        before, self._spare_bytes = self._spare_bytes, spare_bytes
        try:
            plan = self._solve(self._tokens)
        except PlanError:
            self._spare_bytes = before
            return
        self._plans.clear()
        self._change_to(plan)

    def _change_to(self, plan: Plan) -> None:
        assert self._follow is not None
        self._plans[self._tokens] = plan
        self._follow.goes_by(plan)
        self._handle.go_by(plan)

    # -- out of memory ---------------------------------------------------------------------------------------------

    def forward_failed(self) -> None:
        """An exception leaves the forward. If the device is out of memory, say what was planned."""
        error = sys.exc_info()[1]
        self._watch = self._pulse = None
        engine = self._handle.engine()
        if engine is not None:
            self._failed_allocations = engine.device.failed_allocations()
        if not isinstance(error, torch.OutOfMemoryError):
            return
        text = self._oom_text()
        if sys.version_info >= (3, 11):
            error.add_note(text)
        else:
            warnings.warn(text, EbbtideWarning, stacklevel=2)
        self._plan_for_less()

    def _look_for_failure(self, engine: Engine) -> None:
        """The last backward did not come to its end: nobody asked us when it failed."""
        failures = engine.device.failed_allocations()
        if failures > self._failed_allocations:
            warnings.warn(self._oom_text(), EbbtideWarning, stacklevel=2)
            self._plan_for_less()
        self._failed_allocations = failures
        self._pulse = None

    def _plan_for_less(self) -> None:
        budget_bytes = self.budget_bytes
        if not self._replans_on_oom or budget_bytes is None or self.phase is not Phase.PLANNED or self._agree:
            return
        self._plan_with(self._spare_bytes + budget_bytes // _OOM_SHARE)

    def _oom_text(self) -> str:
        budget = self.budget_bytes
        if budget is None:
            return "ebbtide: no budget was given, so only what costs no time was moved: write budget='40GiB', or 0.8"
        plan = self._plans.get(self._tokens)
        engine = self._handle.engine()
        if plan is None or plan.predicted is None or engine is None:
            return f"ebbtide: the step {self.phase.value}, which needs the least that recipes can do"
        measured = engine.device.memory().peak_bytes
        fitting = max(0, budget - max(0, measured - plan.predicted.peak_bytes) - budget // _OOM_SHARE)
        return (
            f"ebbtide: a peak of {format_bytes(plan.predicted.peak_bytes)} was predicted for a budget of "
            f"{format_bytes(budget)}, and {format_bytes(measured)} were allocated. Something outside of the plan needs "
            f"the rest: budget={fitting / 2**30:.1f}GiB would have fitted, or write on_oom='replan'"
        )
