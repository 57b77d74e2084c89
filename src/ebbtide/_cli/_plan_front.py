"""Plans at many budgets, beside those that only move and those that only run again. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ebbtide._errors import PlanError
from ebbtide._planner.options import option_for
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan, Prediction
from ebbtide._profiling.profile import Profile
from ebbtide._reports.pareto_table import FrontRow


@dataclass(frozen=True)
class Ways:
    """One profile, with solvers for the three ways to stay under a budget."""

    solver: Solver
    again: Solver

    @staticmethod
    def of(profile: Profile) -> "Ways":
        """Where the host has no room nothing can move: what is left is to run again."""
        return Ways(Solver(profile), Solver(replace(profile, host_limit_bytes=0)))

    @property
    def profile(self) -> Profile:
        return self.solver.profile

    def plain(self) -> Prediction:
        """With everything kept."""
        return _predicted(self.solver.keeping_all())

    def rows(self, points: int) -> list[FrontRow]:
        return [self._row(point.plan, point.budget_bytes) for point in self.solver.front(points)]

    def only_moving(self, points: int) -> list[tuple[int, float]]:
        """Budgets and steps, from the smallest budget for it up to what keeping all needs."""
        low, high = self.solver.smallest_budget(only_moves=True), self.plain().peak_bytes
        return _line(lambda budget: self.solver.solve(budget, only_moves=True), low, high, points)

    def only_again(self, points: int) -> list[tuple[int, float]]:
        """The same where nothing moves."""
        return _line(self.again.solve, self.again.smallest_budget(), self.plain().peak_bytes, points)

    def _row(self, plan: Plan, budget_bytes: int) -> FrontRow:
        predicted = _predicted(plan)
        return FrontRow(
            budget_bytes=budget_bytes,
            step_s=predicted.step_s,
            peak_bytes=predicted.peak_bytes,
            moved_bytes=predicted.moved_bytes,
            again_s=again_s(self.profile, plan),
            does=what_is_done(plan),
            only_moving_s=_step_s(lambda: self.solver.solve(budget_bytes, only_moves=True)),
            only_again_s=_step_s(lambda: self.again.solve(budget_bytes)),
        )


def again_s(profile: Profile, plan: Plan) -> float:
    """What the second runs of a step take."""
    recipes = ((region, plan.recipe_of(region.name)) for region in profile.regions)
    return sum(option_for(region, recipe).again_s for region, recipe in recipes if recipe is not None)


def what_is_done(plan: Plan) -> str:
    """ "14 selective, 2 keep" """
    counts = Counter(region.recipe.action for region in plan.regions.values())
    return ", ".join(f"{count} {action}" for action, count in counts.most_common())


def _line(solve: Callable[[int], Plan], low: int, high: int, points: int) -> list[tuple[int, float]]:
    budgets: Sequence[int] = sorted({low + (high - low) * k // max(1, points - 1) for k in range(points)})
    steps = [(budget, _step_s(lambda budget=budget: solve(budget))) for budget in budgets]
    return [(budget, step_s) for budget, step_s in steps if step_s is not None]


def _step_s(make_plan: Callable[[], Plan]) -> float | None:
    """None if none fits."""
    try:
        return _predicted(make_plan()).step_s
    except PlanError:
        return None


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted
