"""The Pareto curve of step time and memory, beside plans that only move and plans that only recompute. Pure."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide._errors import PlanError
from ebbtide._planner.options import option_for
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan, Prediction
from ebbtide._profiling.profile import Profile
from ebbtide._reports.pareto_table import ParetoRow

Points = list[tuple[int, float]]
"""Budgets in bytes, with the seconds of a step."""


@dataclass(frozen=True)
class Solvers:
    """Solvers of one profile: with all recipes, and without moves."""

    solver: Solver
    recomputing: Solver

    @staticmethod
    def of(profile: Profile) -> "Solvers":
        return Solvers(Solver(profile), Solver(replace(profile, host_limit_bytes=0)))  # no host memory: nothing moves

    def plain(self) -> Prediction:
        """With everything kept."""
        return _predicted(self.solver.keeping_all())

    def rows(self, points: int) -> list[ParetoRow]:
        return [self._row(point.plan, point.budget_bytes) for point in self.solver.pareto_curve(points)]

    def only_moving(self, points: int) -> Points:
        """Steps without recomputation, from the smallest possible budget to the peak of keeping everything."""
        low, high = self.solver.smallest_budget(only_moves=True), self.plain().peak_bytes
        return _points(lambda budget: self.solver.solve(budget, only_moves=True), low, high, points)

    def only_recomputing(self, points: int) -> Points:
        """Steps without moves, over the corresponding budgets."""
        return _points(self.recomputing.solve, self.recomputing.smallest_budget(), self.plain().peak_bytes, points)

    def _row(self, plan: Plan, budget_bytes: int) -> ParetoRow:
        predicted = _predicted(plan)
        actions = Counter(region.recipe.action for region in plan.regions.values())
        return ParetoRow(
            budget_bytes=budget_bytes,
            step_s=predicted.step_s,
            peak_bytes=predicted.peak_bytes,
            moved_bytes=predicted.moved_bytes,
            recompute_s=recompute_s(self.solver.profile, plan),
            actions=", ".join(f"{count} {action}" for action, count in actions.most_common()),
            only_moving_s=_step_s(lambda: self.solver.solve(budget_bytes, only_moves=True)),
            only_recomputing_s=_step_s(lambda: self.recomputing.solve(budget_bytes)),
        )


def recompute_s(profile: Profile, plan: Plan) -> float:
    """Seconds of recomputation in a step."""
    recipes = ((region, plan.recipe_of(region.name)) for region in profile.regions)
    return sum(option_for(region, recipe).recompute_s for region, recipe in recipes if recipe is not None)


def _points(solve: Callable[[int], Plan], low: int, high: int, points: int) -> Points:
    budgets = sorted({low + (high - low) * k // max(1, points - 1) for k in range(points)})
    steps = [(budget, _step_s(lambda budget=budget: solve(budget))) for budget in budgets]
    return [(budget, step_s) for budget, step_s in steps if step_s is not None]


def _step_s(make_plan: Callable[[], Plan]) -> float | None:
    """Seconds of a step, None if no plan fits."""
    try:
        return _predicted(make_plan()).step_s
    except PlanError:
        return None


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted
