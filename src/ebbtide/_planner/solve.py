"""The plan that makes the best of a budget, from a profile. Pure.

Note [How a plan is found]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Candidates do not depend on the budget (Note [Budgets]). At a budget each of them is simulated with the widest
   windows that its memory leaves, and the fastest that holds the budget wins. Wider windows never make a step slower,
   so a larger budget never does.
2. Where the ways to choose are few, all are candidates: then nothing is faster, in the simulator's eyes.
3. Without a budget only what moves is considered, and the plan with the smallest peak is taken that slows the step by
   next to nothing: _NO_SLOWER where compute waits, _BESIDE where copies beside it are all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ebbtide._errors import PlanError
from ebbtide._planner.bound import least_step_s
from ebbtide._planner.explain import reasons_of, too_small, what_holds
from ebbtide._planner.groups import MOST_ASSIGNMENTS, Model, Unit
from ebbtide._planner.local_search import RUNGS, BudgetGrid
from ebbtide._planner.options import Option, fine_offloads_of, option_for
from ebbtide._planner.search import Candidate, all_kept, budgets_from, candidate_of, candidates_of
from ebbtide._planner.simulate import LAST_DIGITS_S, Outcome, Pace, fixed_bytes, pace_within, simulate_below
from ebbtide._plans import Cost, Plan, Prediction, Recipe, RegionPlan, ReleasePoint
from ebbtide._profiling.profile import Profile

_NO_SLOWER = 1.002  # of the plain step, that of a plan without a budget
_BESIDE = 1.003  # the same, if compute never waits and is only slowed by the copies beside it
_WORTH_MOVING = 0.005  # of the peak: less is not worth the copies
_TRIFLE = 0.05  # of the memory that moving frees
_SPARSER = 16  # fewer rungs where nothing runs again: there is less to choose
_TINY_S = 1e-6  # of waiting for the host: sums of the same times differ in the last digits
_ENOUGH = 4  # regions in a row that have nothing to add: the link is full
_FINE = 1e-4  # how closely the smallest budget is looked for
_POINTS = 24


@dataclass(frozen=True)
class Point:
    """The fastest plan at a budget, and what it makes of the step."""

    budget_bytes: int
    plan: Plan
    outcome: Outcome


@dataclass(frozen=True)
class _Tried:
    candidate: Candidate
    pace: Pace
    outcome: Outcome

    @property
    def rank(self) -> tuple[float, int, int]:
        seconds = round(self.outcome.step_s, 9)  # sums of the same times in another order differ in the last digits
        return seconds, self.candidate.moved_bytes, self.outcome.peak_bytes


def solve(profile: Profile, budget_bytes: int | None, *, only_moves: bool | None = None) -> Plan:
    """The fastest plan that stays under `budget_bytes`; without one, what moves without making the step slower.

    Args:
        budget_bytes: most device memory allocated at once, with all that was allocated before the step.
        only_moves: no region runs again. By default only if there is no budget.

    Raises:
        PlanError: nothing fits the budget; says what does, and what holds it.
    """
    return Solver(profile).solve(budget_bytes, only_moves=only_moves)


def front(profile: Profile, points: int = _POINTS) -> list[Point]:
    """Time against memory: the fastest plan at each of some budgets from the smallest to what keeping all needs."""
    return Solver(profile).front(points)


def smallest_budget(profile: Profile) -> int:
    """Bytes that some plan needs, and less than which none does."""
    return Solver(profile).smallest_budget()


class Solver:
    """Plans for one profile; what does not depend on the budget is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._spaces: dict[bool, _Space] = {}

    def solve(self, budget_bytes: int | None, *, only_moves: bool | None = None) -> Plan:
        """As the function of this name."""
        space = self._space(only_moves if only_moves is not None else budget_bytes is None)
        if budget_bytes is None:
            return _plan(self.profile, space.unslowed(), None, self.profile.plain_s)
        return _plan(self.profile, space.fastest(budget_bytes), budget_bytes, space.bound_s(budget_bytes))

    def keeping_all(self) -> Plan:
        """That moves nothing, whatever memory it takes."""
        space = self._space(True)
        return _plan(self.profile, space.all_kept, None, self.profile.plain_s)

    def front(self, points: int = _POINTS) -> list[Point]:
        """As the function of this name."""
        low, high = self.smallest_budget(), self._space(False).kept.least_bytes
        row = sorted({low + (high - low) * step // max(1, points - 1) for step in range(points)})
        return [self._point(budget_bytes) for budget_bytes in row]

    def _point(self, budget_bytes: int) -> Point:
        space = self._space(False)
        tried = space.fastest(budget_bytes)
        plan = _plan(self.profile, tried, budget_bytes, space.bound_s(budget_bytes))
        return Point(budget_bytes, plan, tried.outcome)

    def smallest_budget(self, *, only_moves: bool = False) -> int:
        """As the function of this name."""
        return self._space(only_moves).leanest.least_bytes

    def held(self, *, only_moves: bool = False) -> Mapping[str, int]:
        """What the smallest budget is made of, by name, in bytes, the largest first."""
        return what_holds(self.profile, self._space(only_moves).leanest.options)

    def _space(self, only_moves: bool) -> "_Space":
        space = self._spaces.get(only_moves)
        if space is None:
            others = None if only_moves else self._space(True)
            space = self._spaces[only_moves] = _Space(Model(self.profile, only_moves), others)
        return space


class _Space:
    """What may be chosen, and the best of it.

    Args:
        others: whose candidates are also ones here, so that what may do more is never worse.
    """

    def __init__(self, model: Model, others: "_Space | None") -> None:
        self._model = model
        self._others = others
        self._profile = model.profile
        self.kept = all_kept(model)

    @cached_property
    def candidates(self) -> list[Candidate]:
        return self._own if self._others is None else [*self._own, *self._others.candidates]

    @cached_property
    def _own(self) -> list[Candidate]:
        return candidates_of(self._model)

    @cached_property
    def _ladder(self) -> BudgetGrid:
        # Where all there is are candidates, nothing is left to be made better.
        is_whole = self._model.assignments <= MOST_ASSIGNMENTS
        rungs = RUNGS // _SPARSER if self._model.only_moves else RUNGS
        budgets = [] if is_whole else budgets_from(self._model, self.leanest.least_bytes, rungs)
        return BudgetGrid(self._model, budgets, self._own, self._step_s, self._least_s)

    def _polished(self, budget_bytes: int) -> list[Candidate]:
        others = [] if self._others is None else self._others._polished(budget_bytes)
        return [*self._ladder.up_to(budget_bytes), *others]

    def _step_s(self, candidate: Candidate, budget_bytes: int, most_s: float) -> float | None:
        tried = None if candidate.least_bytes > budget_bytes else self._try(candidate, budget_bytes, most_s)
        return None if tried is None else tried.outcome.step_s

    @cached_property
    def leanest(self) -> Candidate:
        """Of those that the host has room for, what needs the smallest budget."""
        limit = self._profile.host_limit_bytes
        fitting = [c for c in self.candidates if limit is None or self._profile.graphs * c.moved_bytes <= limit]
        return min(fitting, key=lambda candidate: (candidate.least_bytes, candidate.again_s, candidate.moved_bytes))

    def fastest(self, budget_bytes: int) -> _Tried:
        """Raises PlanError if nothing fits."""
        best = self._try(self.kept, budget_bytes)
        if best is not None:
            return best
        polished = self._polished(budget_bytes)
        fitting = (candidate for candidate in (*polished, *self.candidates) if candidate.least_bytes <= budget_bytes)
        bounded = [(self._least_s(candidate, budget_bytes), candidate) for candidate in fitting]
        for least_s, candidate in sorted(bounded, key=_most_likely_first):
            if best is not None and least_s > best.outcome.step_s + LAST_DIGITS_S:
                break
            tried = self._try(candidate, budget_bytes, inf if best is None else best.outcome.step_s)
            if tried is not None and (best is None or tried.rank < best.rank):
                best = tried
        if best is None:
            held = what_holds(self._profile, self.leanest.options)
            raise PlanError(too_small(budget_bytes, self.leanest.least_bytes, held))
        return best

    @cached_property
    def all_kept(self) -> _Tried:
        kept = self._try(self.kept, self.kept.least_bytes)
        assert kept is not None
        return kept

    def unslowed(self) -> _Tried:
        """Of what does not make the step slower, about the smallest peak; nothing moves if none is worth it."""
        kept = self.all_kept
        best = self._least_peak(kept, int(kept.outcome.peak_bytes * (1 - _WORTH_MOVING)))
        if best is kept:
            return kept
        filled = self._filled(best)
        return self._tidied(filled, kept.outcome.peak_bytes) or filled

    def _filled(self, best: _Tried) -> _Tried:
        """With as much more as the link has room for, by small steps: what was counted went by large ones."""
        in_vain = 0
        for unit in self._model.units:
            first = unit.visits[0]
            moved_bytes = best.candidate.options[first].moved_bytes
            steps = fine_offloads_of(self._profile.regions[first])
            for step in (step for step in steps if step.moved_bytes > moved_bytes):
                tried = self._with_step(best, unit, step)
                in_vain = 0 if tried is not best else in_vain + 1
                if tried is best:
                    break
                best = tried
            if in_vain == _ENOUGH:
                break
        return best

    def _with_step(self, best: _Tried, unit: Unit, step: Option) -> _Tried:
        """If the regions move more with `step`, and the peak is lower then and the step no slower; else `best`."""
        options = list(best.candidate.options)
        for visit in unit.visits:
            options[visit] = option_for(self._profile.regions[visit], step.recipe)
        candidate = candidate_of(self._profile, options)
        least_bytes = self._least_unslowed_bytes(candidate)
        most = best.outcome.peak_bytes - 1
        return (self._least_unslowed(candidate, least_bytes, most) if least_bytes <= most else None) or best

    def _tidied(self, best: _Tried, most: int) -> _Tried | None:
        """The same without sending what is used before it could leave, if it does as well but for a trifle.

        The last region still moves: its backward is where the engine first looks ahead.
        """
        tail = best.outcome.tail_bytes(best.candidate.options)
        options = list(best.candidate.options)
        for unit in self._model.units:
            if all(tail[visit] == options[visit].moved_bytes and visit < len(options) - 1 for visit in unit.visits):
                for visit, kept in zip(unit.visits, unit.costs[0], strict=True):
                    options[visit] = kept
        peak_bytes = best.outcome.peak_bytes
        candidate = candidate_of(self._profile, options)
        return self._try_unslowed(candidate, peak_bytes + int(_TRIFLE * (most - peak_bytes)))

    def _least_peak(self, best: _Tried, most: int) -> _Tried:
        bounded = [(self._least_unslowed_bytes(candidate), candidate) for candidate in self.candidates]
        for least_bytes, candidate in sorted(bounded, key=lambda pair: pair[0]):
            if least_bytes > most:
                break
            tried = self._least_unslowed(candidate, least_bytes, most)
            if tried is not None:
                best = tried
                most = tried.outcome.peak_bytes - 1
        return best

    def _least_unslowed(self, candidate: Candidate, low: int, high: int) -> _Tried | None:
        """With the smallest budget between the two at which it does not slow the step, found by halving."""
        best = self._try_unslowed(candidate, high)
        while best is not None and high - low > _FINE * high:
            middle = (low + high) // 2
            tried = self._try_unslowed(candidate, middle)
            if tried is None:
                low = middle
            else:
                best, high = tried, middle
        return best

    def _try_unslowed(self, candidate: Candidate, budget_bytes: int) -> _Tried | None:
        tried = self._try(candidate, budget_bytes)
        if tried is None:
            return None
        outcome = tried.outcome
        host_wait_s = outcome.host_wait_s - self.all_kept.outcome.host_wait_s
        waits = outcome.stall_forward_s > 0 or outcome.stall_backward_s > 0 or host_wait_s > _TINY_S
        return tried if outcome.step_s <= self._limit_s(waits) else None

    def _limit_s(self, waits: bool) -> float:
        return self._kept_s * (_NO_SLOWER if waits else _BESIDE)

    @property
    def _kept_s(self) -> float:
        """A step with everything kept, which at another size than the measured one may wait for the host."""
        return self.all_kept.outcome.step_s

    def _least_unslowed_bytes(self, candidate: Candidate) -> int:
        """With less, more would have to leave than the link can carry while forward runs, slowed down by it or not."""
        link, around = self._profile.link, self._profile.around
        host_wait_s = self.all_kept.outcome.host_wait_s
        most_s = self._forward_s / (1 - link.interference) + host_wait_s + (_NO_SLOWER - 1) * self._kept_s
        tail_bytes = candidate.moved_bytes - int((most_s - around.before_s) * link.out)
        return max(candidate.least_bytes, self._fixed_bytes(candidate) + tail_bytes)

    def _sent(self, candidate: Candidate, budget_bytes: int) -> int:
        """Bytes that have to leave: what does not fit beside the peak behind the last region."""
        return max(0, candidate.moved_bytes - max(0, budget_bytes - self._fixed_bytes(candidate)))

    def _fixed_bytes(self, candidate: Candidate) -> int:
        """Most that is allocated behind the last region, without what is on its way."""
        kept_bytes = candidate.kept_bytes
        return fixed_bytes(self._profile, kept_bytes) + kept_bytes + self._profile.around.peak_bytes

    def bound_s(self, budget_bytes: int) -> float:
        """No plan of these is faster."""
        options: list[tuple[Option, ...]] = [()] * len(self._profile.regions)
        for unit in self._model.units:
            for place, visit in enumerate(unit.visits):
                options[visit] = tuple(costs[place] for costs in unit.costs)
        return least_step_s(self._profile, options, budget_bytes)

    def _least_s(self, candidate: Candidate, budget_bytes: int) -> float:
        """What the simulator could not go below: for leaving most candidates out."""
        around, link = self._profile.around, self._profile.link
        sent = self._sent(candidate, budget_bytes)
        out_s, back_s, lost = sent / link.out, sent / link.back, link.interference
        forward_s = max(self._forward_s + lost * out_s, around.before_s + out_s)
        backward_s = self._backward_s + candidate.again_s + lost * back_s
        return forward_s + max(backward_s, around.turn_s + around.end_s + back_s)

    @cached_property
    def _forward_s(self) -> float:
        regions = self._profile.regions
        return self._profile.around.before_s + self._profile.around.after_s + sum(r.forward_s for r in regions)

    @cached_property
    def _backward_s(self) -> float:
        return self._profile.plain_s - self._forward_s

    def _try(self, candidate: Candidate, budget_bytes: int, most_s: float = inf) -> _Tried | None:
        """None if it does not fit, or takes longer than `most_s`."""
        pace = pace_within(self._profile, candidate.options, budget_bytes)
        if pace is None:
            return None
        outcome = simulate_below(self._profile, candidate.options, pace, most_s)
        if outcome is None:
            return None
        limit = self._profile.host_limit_bytes
        fits = outcome.peak_bytes <= budget_bytes and (limit is None or outcome.host_bytes <= limit)
        return _Tried(candidate, pace, outcome) if fits else None


def _most_likely_first(bounded: tuple[float, Candidate]) -> tuple[float, int]:
    """Of what must send as much, what sends least slows compute least: what comes behind it is soon given up."""
    least_s, candidate = bounded
    return round(least_s, 9), candidate.moved_bytes


def _plan(profile: Profile, tried: _Tried, budget_bytes: int | None, bound_s: float) -> Plan:
    outcome, options = tried.outcome, tried.candidate.options
    if all(option.recipe.action == "keep" for option in options):
        bound_s = outcome.step_s
    return Plan(
        regions=_region_plans(profile, tried, reasons_of(profile, options, outcome, budget_bytes is not None)),
        outside=_outside(profile, tried.pace),
        budget_bytes=budget_bytes,
        predicted=Prediction(
            step_s=outcome.step_s,
            bound_s=min(bound_s, outcome.step_s),  # they differ in the last digits where they are equal
            stall_forward_s=outcome.stall_forward_s,
            stall_backward_s=outcome.stall_backward_s,
            peak_bytes=outcome.peak_bytes,
            moved_bytes=outcome.moved_bytes,
            host_bytes=outcome.host_bytes,
            host_wait_s=outcome.host_wait_s,
        ),
    )


def _region_plans(profile: Profile, tried: _Tried, reasons: list[str]) -> dict[str, RegionPlan]:
    pace, options = tried.pace, tried.candidate.options
    before = (None, *pace.windows)
    changes = {r.name for r, window, was in zip(profile.regions, pace.windows, before, strict=False) if window != was}
    plans: dict[str, RegionPlan] = {}
    tail = tried.outcome.tail_bytes(options)
    for number, region in enumerate(profile.regions):
        points = (ReleasePoint(0, pace.windows[number]),) if region.name in changes else ()
        prefetch = max(1, pace.prefetch[number])
        option = options[number]
        stays = tail[number]
        cost = Cost(option.kept_bytes + stays, option.moved_bytes - stays, option.again_s)
        plans.setdefault(region.name, RegionPlan(option.recipe, points, prefetch, reasons[number], cost))
    return plans


def _outside(profile: Profile, pace: Pace) -> RegionPlan:
    """What is saved outside of the regions stays; what is on its way from them leaves as memory gets short."""
    saves = [turn.save for turn in profile.around.turns if turn.save >= 0]
    return RegionPlan(
        Recipe("keep"),
        release=tuple(ReleasePoint(save, window) for save, window in zip(saves, pace.turns, strict=True)),
        prefetch_bytes=max(1, *pace.prefetch[-1:]) if pace.prefetch else 1,
        reason="needed again at once",
    )
