"""The Pareto curve of step time and memory, beside plans that only move and plans that only recompute. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from ebbtide._errors import PlanError
from ebbtide._planner.options import option_for
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan, Prediction
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes

Points = list[tuple[int, float]]
"""Budgets in bytes, with the seconds of a step."""


@dataclass(frozen=True)
class ParetoRow:
    """The fastest plan at a budget.

    Attributes:
        budget_bytes: the peak to stay under.
        plan: with its prediction.
        recompute_s: seconds of recomputation in a step.
        only_moving_s, only_recomputing_s: of the fastest plan that does nothing else; None: none fits.
    """

    budget_bytes: int
    plan: Plan
    recompute_s: float
    only_moving_s: float | None
    only_recomputing_s: float | None

    @property
    def predicted(self) -> Prediction:
        return _predicted(self.plan)

    def figures(self) -> dict[str, Any]:
        """Bytes and seconds, for JSON."""
        own = ("budget_bytes", "recompute_s", "only_moving_s", "only_recomputing_s")
        return {**asdict(self.predicted), **{name: getattr(self, name) for name in own}}

    @property
    def actions(self) -> str:
        """Numbers of regions by action, "14 selective, 2 keep"."""
        actions = Counter(region.recipe.action for region in self.plan.regions.values())
        return ", ".join(f"{count} {action}" for action, count in actions.most_common())


class Solvers:
    """Solvers of one profile: with all recipes, and without moves."""

    def __init__(self, profile: Profile) -> None:
        self.solver = Solver(profile)
        self.recomputing = Solver(replace(profile, host_limit_bytes=0))  # no host memory: nothing moves
        self.plain = _predicted(self.solver.keeping_all())
        """With everything kept."""

    def rows(self, points: int) -> list[ParetoRow]:
        return [
            ParetoRow(
                point.budget_bytes,
                point.plan,
                recompute_s(self.solver.profile, point.plan),
                _step_s(self._moving, point.budget_bytes),
                _step_s(self.recomputing.solve, point.budget_bytes),
            )
            for point in self.solver.pareto_curve(points)
        ]

    def only_moving(self, points: int) -> Points:
        """Steps without recomputation, from the smallest possible budget to the peak of keeping everything."""
        return self._points(self._moving, self.solver.smallest_budget(only_moves=True), points)

    def only_recomputing(self, points: int) -> Points:
        """Steps without moves, over the corresponding budgets."""
        return self._points(self.recomputing.solve, self.recomputing.smallest_budget(), points)

    def _moving(self, budget_bytes: int) -> Plan:
        return self.solver.solve(budget_bytes, only_moves=True)

    def _points(self, solve: Callable[[int], Plan], low: int, points: int) -> Points:
        span = self.plain.peak_bytes - low
        budgets = sorted({low + span * k // max(1, points - 1) for k in range(points)})
        steps = [(budget, _step_s(solve, budget)) for budget in budgets]
        return [(budget, step_s) for budget, step_s in steps if step_s is not None]


def recompute_s(profile: Profile, plan: Plan) -> float:
    """Seconds of recomputation in a step."""
    return sum(option_for(region, plan.regions[region.name].recipe).recompute_s for region in profile.regions)


def pareto_table(rows: Sequence[ParetoRow], plain_s: float) -> Table:
    """One line per budget. `plain_s`: seconds of the step with everything kept, the unit of "x plain"."""
    table = Table(
        title="Time against memory: the fastest step at each budget", title_justify="left", title_style="bold"
    )
    for heading in ("budget", "step", "x plain", "peak", "moved", "recompute", "only moving", "only recomputing"):
        table.add_column(heading, justify="right")
    table.add_column("regions")
    for row in rows:
        times = (row.predicted.step_s, row.only_moving_s, row.only_recomputing_s)
        relative = ["none fits" if seconds is None else f"{seconds / plain_s:.3f}" for seconds in times]
        table.add_row(
            format_bytes(row.budget_bytes),
            f"{row.predicted.step_s * 1e3:.1f} ms",
            relative[0],
            format_bytes(row.predicted.peak_bytes),
            format_bytes(row.predicted.moved_bytes),
            f"{row.recompute_s * 1e3:.1f} ms",
            *relative[1:],
            row.actions,
        )
    return table


def _step_s(solve: Callable[[int], Plan], budget_bytes: int) -> float | None:
    """Seconds of a step, None if no plan fits."""
    try:
        return _predicted(solve(budget_bytes)).step_s
    except PlanError:
        return None


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted
