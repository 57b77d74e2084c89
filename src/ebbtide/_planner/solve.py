"""The solver: the fastest plan within a budget, from a profile. Pure.

Note [How a plan is found]
~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Assignments do not depend on the budget (Note [Budgets]). At a budget each assignment is simulated with the widest
   windows that fit, and the fastest within the budget wins. Wider windows never make a step slower, so a larger budget
   never does. (With several graphs in flight, by no more than copies cost compute.)
2. Where assignments are few, all are simulated: no plan is faster, as far as the simulator knows.
3. For a largest slowdown, bisection over budgets finds the smallest peak of a plan at most so much slower than a step
   that keeps everything. A larger budget never makes a step slower, but some plans take less than the budget that their
   windows need: at each budget the smallest peak counts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ebbtide._errors import PlanError
from ebbtide._planner.explain import budget_parts, explanations, too_small
from ebbtide._planner.groups import Grouping, costs_of
from ebbtide._planner.options import option_for, settled
from ebbtide._planner.search import Assignment, assignment_of, assignments_of
from ebbtide._planner.simulate import LAST_DIGITS_S, Outcome, Windows, fixed_bytes, simulate_below, windows_within
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Cost, Plan, Prediction, Recipe, RegionPlan, ReleasePoint
from ebbtide._profiling.profile import Profile

_FINE = 1e-3  # relative precision of the budget for a largest slowdown


@dataclass(frozen=True)
class Point:
    """The fastest plan at a budget, and the simulated step. A graph keeps `kept_bytes` in regions."""

    budget_bytes: int
    plan: Plan
    outcome: Outcome
    kept_bytes: int


@dataclass(frozen=True)
class Share:
    """A pipeline stage's share of the budget of a rank.

    Attributes:
        base_bytes: memory from before the step, and of the graphs of other stages in flight.
        spared_bytes: of the budget, left to other stages.
        smallest_bytes: the smallest budget of all stages together.
    """

    base_bytes: int
    spared_bytes: int
    smallest_bytes: int


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        profile: the step.
        budget_bytes: limit of the predicted peak; None: the least peak for a step hardly slower.
        max_slowdown: without a budget, as of `Solver.solve`.
        only_fallback: answer with the fallback as the plan, after a moment; no plan if none fits.
        beside: profiles of the other pipeline stages of the rank, which share the budget: those before this stage, and
            those behind.
        share: the share as of an earlier answer; None: the budget is to be shared out.
        limit_bytes: if nothing fits `budget_bytes`, the smallest plan may take up to so many bytes. None: no error,
            whatever the smallest plan takes.
    """

    profile: Profile
    budget_bytes: int | None
    limit_bytes: int | None = None
    max_slowdown: float | None = None
    only_moves: bool | None = None
    only_fallback: bool = False
    beside: tuple[tuple[Profile, ...], tuple[Profile, ...]] = ((), ())
    share: Share | None = None


@dataclass(frozen=True)
class Answer:
    """A plan, and what to do if its steps are slow.

    Attributes:
        plan: the plan; None if the question was for the fallback only, and none fits.
        fallback: as of `Solver.fallback`.
        smallest_bytes: the smallest budget.
        seconds: that solving took.
        share: of a pipeline stage beside others.
    """

    plan: Plan | None
    fallback: Plan | None
    smallest_bytes: int
    seconds: float
    share: Share | None = None


def answer(question: Question) -> Answer:
    """Solve. Raises PlanError if no plan fits `limit_bytes`."""
    start = time.perf_counter()
    solver, budget_bytes = Solver(question.profile), question.budget_bytes
    if question.only_fallback:
        return Answer(solver.fallback(budget_bytes), None, 0, time.perf_counter() - start)
    smallest_bytes = solver.smallest_budget(only_moves=budget_bytes is None)
    if budget_bytes is not None and budget_bytes < smallest_bytes:
        limit_bytes = question.limit_bytes
        budget_bytes = smallest_bytes if limit_bytes is None else min(limit_bytes, smallest_bytes)
    plan = solver.solve(budget_bytes, max_slowdown=question.max_slowdown, only_moves=question.only_moves)
    return Answer(plan, solver.fallback(budget_bytes), smallest_bytes, time.perf_counter() - start)


@dataclass(frozen=True)
class _Simulated:
    assignment: Assignment
    windows: Windows
    outcome: Outcome

    @property
    def rank(self) -> tuple[float, int, int]:
        seconds = round(self.outcome.step_s, 9)  # sums in another order differ in the last digits
        return seconds, self.assignment.moved_bytes, self.outcome.peak_bytes


class Solver:
    """Plans for one profile. Work that does not depend on the budget is done once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._spaces: dict[bool, _Space] = {}
        self._cost_of = costs_of(profile)

    def solve(
        self, budget_bytes: int | None, *, max_slowdown: float | None = None, only_moves: bool | None = None
    ) -> Plan:
        """The fastest plan within `budget_bytes`; without a budget, the least memory for a step hardly slower.

        Args:
            budget_bytes: most device memory allocated at once, memory from before the step included.
            max_slowdown: without a budget, the largest slowdown as a share of the step that keeps everything. None:
                THRESHOLDS.slower, by moves alone.
            only_moves: exclude recomputation. Default: only if neither is given.

        Raises:
            PlanError: no plan fits the budget; names the smallest budget and its parts.
        """
        if only_moves is None:
            only_moves = budget_bytes is None and (max_slowdown is None or not self.profile.has_recomputation)
        if budget_bytes is None:
            return self._least_peak(THRESHOLDS.slower if max_slowdown is None else max_slowdown, only_moves)
        return _plan(self.profile, self._space(only_moves).fastest(budget_bytes), budget_bytes)

    def _least_peak(self, max_slowdown: float, only_moves: bool) -> Plan:
        space = self._space(only_moves)
        most_s = space.all_kept.outcome.step_s * (1 + max_slowdown)
        return _plan(self.profile, space.smallest(most_s) or space.all_kept, None)

    def keeping_all(self) -> Plan:
        """The plan that moves nothing and recomputes nothing."""
        return _plan(self.profile, self._space(True).all_kept, None)

    def fallback(self, budget_bytes: int | None) -> Plan | None:
        """Within a budget, `fewest_recomputed`, or None if nothing fits; otherwise `keeping_all`."""
        return self.keeping_all() if budget_bytes is None else self.fewest_recomputed(budget_bytes)

    def fewest_recomputed(self, budget_bytes: int) -> Plan | None:
        """Recomputation of the fewest regions that fit `budget_bytes`, evenly spread, with their inputs kept; or of all
        regions, with the fewest inputs moved."""
        space = self._space(False)
        found = (space.simulated(each, budget_bytes) for each in space.evenly_recomputed)
        first = next((simulated for simulated in found if simulated is not None), None)
        return None if first is None else _plan(self.profile, first, budget_bytes)

    def smallest_budget(self, *, only_moves: bool = False) -> int:
        """The smallest budget in bytes that a plan fits."""
        return self._space(only_moves).leanest.least_bytes

    def pareto_curve(self, points: int = 24) -> list[Point]:
        """Time against memory: the fastest plan at each of `points` budgets, from the smallest to keeping all."""
        low, high = self.smallest_budget(), self._space(False).kept.least_bytes
        row = sorted({low + (high - low) * step // max(1, points - 1) for step in range(points)})
        return [self._point(budget_bytes) for budget_bytes in row]

    def _point(self, budget_bytes: int) -> Point:
        simulated = self._space(False).fastest(budget_bytes)
        plan = _plan(self.profile, simulated, budget_bytes)
        return Point(budget_bytes, plan, simulated.outcome, simulated.assignment.kept_bytes)

    def _space(self, only_moves: bool) -> "_Space":
        space = self._spaces.get(only_moves)
        if space is None:
            others = None if only_moves else self._space(True)
            space = self._spaces[only_moves] = _Space(Grouping(self.profile, only_moves, self._cost_of), others)
        return space


class _Space:
    """All assignments of a grouping, and the best of them.

    Args:
        others: assignments without recomputation count too, so that recomputation never makes a plan worse.
    """

    def __init__(self, grouping: Grouping, others: "_Space | None") -> None:
        self._profile = grouping.profile
        self.kept = assignment_of(grouping.profile, grouping.options((0,) * len(grouping.units)))
        self._grouping = grouping
        self._others = others

    @cached_property
    def assignments(self) -> list[Assignment]:
        own = assignments_of(self._grouping)
        return own if self._others is None else [*own, *self._others.assignments, *self.evenly_recomputed]

    @cached_property
    def evenly_recomputed(self) -> list[Assignment]:
        """Recomputation of 0, 1, ... all regions, evenly spread, with inputs kept; then of all regions, with the inputs
        of the first 1, 2, ... moved. Always proposed, because the cost of nothing else is known as well."""
        unmeasured = {region.name for region in self._profile.regions if region.recompute_s <= 0}
        names = list(dict.fromkeys(region.name for region in self._profile.regions if region.name not in unmeasured))
        counts = range(len(names) + 1)
        spread = [{n for k, n in enumerate(names) if (k + 1) * c // len(names) > k * c // len(names)} for c in counts]
        chosen = [*((some, set[str]()) for some in spread), *((set(names), set(names[:c])) for c in counts[1:])]
        recipes = Recipe("keep"), Recipe("recompute", inputs="keep"), Recipe("recompute")
        rows = [(region.name, [option_for(region, recipe) for recipe in recipes]) for region in self._profile.regions]
        return [
            assignment_of(self._profile, settled([options[(name in some) + (name in moved)] for name, options in rows]))
            for some, moved in chosen
        ]

    @cached_property
    def leanest(self) -> Assignment:
        """The assignment with the smallest budget that fits the host."""
        limit = self._profile.host_limit_bytes
        fitting = [c for c in self.assignments if limit is None or self._profile.graphs * c.moved_bytes <= limit]
        return min(fitting, key=lambda each: (each.least_bytes, each.recompute_s, each.moved_bytes))

    @cached_property
    def all_kept(self) -> _Simulated:
        kept = self.simulated(self.kept, self.kept.least_bytes)
        assert kept is not None
        return kept

    def fastest(self, budget_bytes: int) -> _Simulated:
        """Raises PlanError if no assignment fits."""
        found = self.simulated(self.kept, budget_bytes) or self._fastest(budget_bytes, inf)
        if found is None:
            parts = budget_parts(self._profile, self.leanest.options)
            device = self._profile.made_for.get("device", "")
            raise PlanError(too_small(budget_bytes, self.leanest.least_bytes, parts, device))
        return found

    def smallest(self, most_s: float) -> _Simulated | None:
        """About the smallest peak at which the step takes at most `most_s`, and the fastest plan within. None if hardly
        smaller than the peak of keeping everything."""
        peak_bytes = self.all_kept.outcome.peak_bytes
        candidates, best = self.assignments, None
        low, budget_bytes = self.leanest.least_bytes, int(peak_bytes * (1 - THRESHOLDS.worth_moving))
        while best is None or best.outcome.peak_bytes - low > max(1, _FINE * peak_bytes):
            in_time = self._in_time(candidates, budget_bytes, most_s)
            if in_time:
                # The smallest peak is often below the budget that gives the windows.
                best = min(in_time, key=lambda each: (each.outcome.peak_bytes, each.rank))
                candidates = [each.assignment for each in in_time]  # the others are too slow within less, too
            elif best is None:
                return None
            else:
                low = budget_bytes
            budget_bytes = (low + best.outcome.peak_bytes) // 2
        # Windows within the peak may be narrower than those of `best`, and no plan fast enough.
        return self._fastest(best.outcome.peak_bytes, most_s) or best

    def _in_time(self, candidates: Sequence[Assignment], budget_bytes: int, most_s: float) -> list[_Simulated]:
        """Those of the candidates that take at most `most_s` within the budget."""
        fitting = (each for each in candidates if each.least_bytes <= budget_bytes)
        likely = (each for each in fitting if self._least_s(each, budget_bytes) <= most_s + LAST_DIGITS_S)
        found = (self.simulated(assignment, budget_bytes, most_s) for assignment in likely)
        return [each for each in found if each is not None]

    def _fastest(self, budget_bytes: int, most_s: float) -> _Simulated | None:
        """None if no assignment fits `budget_bytes`, or all take longer than `most_s`."""
        best = None
        fitting = (assignment for assignment in self.assignments if assignment.least_bytes <= budget_bytes)
        bounded = [(self._least_s(assignment, budget_bytes), assignment) for assignment in fitting]
        for least_s, assignment in sorted(bounded, key=_most_likely_first):
            if least_s > most_s + LAST_DIGITS_S:
                break
            simulated = self.simulated(assignment, budget_bytes, most_s)
            if simulated is not None and (best is None or simulated.rank < best.rank):
                best, most_s = simulated, simulated.outcome.step_s
        return best

    def _least_s(self, assignment: Assignment, budget_bytes: int) -> float:
        """Lower bound of the simulated step, to skip most simulations."""
        outside, link, kept_bytes = self._profile.outside, self._profile.link, assignment.kept_bytes
        if self._profile.graphs > 1:
            return self._least_of_passes_s(assignment, budget_bytes - assignment.least_bytes)
        room = budget_bytes - fixed_bytes(self._profile, kept_bytes) - kept_bytes - outside.peak_bytes
        sent = max(0, assignment.moved_bytes - max(0, room))  # the rest may stay until backward
        out_s, back_s, lost = sent / link.out, sent / link.back, link.interference
        forward_s = max(self._forward_s + lost * out_s, outside.before_s + out_s)
        backward_s = self._profile.plain_s - self._forward_s + assignment.recompute_s + lost * back_s
        return forward_s + max(backward_s, outside.backward_before_s + outside.backward_after_s + back_s)

    def _least_of_passes_s(self, assignment: Assignment, room: int) -> float:
        """The same with several graphs: `room` holds what waits to leave, and what is back early."""
        link, largest = self._profile.link, max((m.nbytes for o in assignment.options for m in o.moved), default=0)
        sent = max(0, assignment.moved_bytes - room - largest)
        out_s, back_s = sent / link.out, sent / link.back
        compute_s = self._profile.plain_s + assignment.recompute_s
        stalled_s = max(self._forward_s, out_s) + max(compute_s - self._forward_s, back_s)
        return max(stalled_s, compute_s + link.interference * (out_s + back_s))

    @cached_property
    def _forward_s(self) -> float:
        outside = self._profile.outside
        return outside.before_s + outside.after_s + sum(region.forward_s for region in self._profile.regions)

    def simulated(self, assignment: Assignment, budget_bytes: int, most_s: float = inf) -> _Simulated | None:
        """None if the assignment does not fit, or takes longer than `most_s`."""
        windows = windows_within(self._profile, assignment.options, budget_bytes)
        if windows is None:
            return None
        outcome = simulate_below(self._profile, assignment.options, windows, most_s)
        if outcome is None or outcome.step_s > most_s + LAST_DIGITS_S:
            return None
        limit = self._profile.host_limit_bytes
        fits = outcome.peak_bytes <= budget_bytes and (limit is None or outcome.host_bytes <= limit)
        return _Simulated(assignment, windows, outcome) if fits else None


def _most_likely_first(bounded: tuple[float, Assignment]) -> tuple[float, int]:
    """Of equal bounds first the fewest bytes moved: less interference, and later simulations end early."""
    least_s, assignment = bounded
    return round(least_s, 9), assignment.moved_bytes


def _plan(profile: Profile, simulated: _Simulated, budget_bytes: int | None) -> Plan:
    outcome, options = simulated.outcome, simulated.assignment.options
    return Plan(
        regions=_region_plans(profile, simulated, explanations(profile, options, outcome, budget_bytes is not None)),
        outside=_outside(profile, simulated.windows),
        budget_bytes=budget_bytes,
        predicted=Prediction(
            step_s=outcome.step_s,
            stall_forward_s=outcome.stall_forward_s,
            stall_backward_s=outcome.stall_backward_s,
            peak_bytes=outcome.peak_bytes,
            moved_bytes=outcome.moved_bytes,
            host_bytes=outcome.host_bytes,
            host_wait_s=outcome.host_wait_s,
        ),
    )


def _region_plans(profile: Profile, simulated: _Simulated, reasons: list[str]) -> dict[str, RegionPlan]:
    windows, options = simulated.windows, simulated.assignment.options
    before = (None, *windows.forward)
    changes = {
        r.name for r, window, was in zip(profile.regions, windows.forward, before, strict=False) if window != was
    }
    plans: dict[str, RegionPlan] = {}
    tail = simulated.outcome.tail_bytes(options)
    for number, region in enumerate(profile.regions):
        points = (ReleasePoint(0, windows.forward[number]),) if region.name in changes else ()
        prefetch = max(1, windows.prefetch[number])
        option = options[number]
        stays = tail[number]
        cost = Cost(option.kept_bytes + stays, option.moved_bytes - stays, option.recompute_s)
        plans.setdefault(region.name, RegionPlan(option.recipe, points, prefetch, reasons[number], cost))
    return plans


def _outside(profile: Profile, windows: Windows) -> RegionPlan:
    """Tensors saved outside of the regions stay; parcels on the way out leave as memory gets short."""
    indices = [point.tensor_index for point in profile.outside.post_region_points if point.tensor_index >= 0]
    return RegionPlan(
        Recipe("keep"),
        release=tuple(ReleasePoint(*pair) for pair in zip(indices, windows.post_region, strict=True)),
        prefetch_bytes=max(1, *windows.prefetch[-1:]) if windows.prefetch else 1,
        reason="needed at once in backward",
    )
