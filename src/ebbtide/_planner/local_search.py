"""Local search: small changes to assignments, judged by the simulator, the same in every run. Pure.

Note [Local search]
~~~~~~~~~~~~~~~~~~~
1. The relaxation knows no bursts, so its proposals are some tenths of a percent from the best nearby: another recipe
   for one region or two, or two regions exchanged.
2. The result must not depend on the requested budget, or a larger budget could give a slower plan (Note [Budgets]). So
   the search runs on a fixed grid of budgets, upwards: each grid point begins with the result of the point below and
   the most promising proposals, and makes a few changes. The results of all lower points are proposals at a budget.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from math import inf

from ebbtide._planner.groups import Grouping
from ebbtide._planner.search import Assignment, Choices, assignment_from
from ebbtide._planner.simulate import LAST_DIGITS_S

GRID_POINTS = 64  # a budget between two grid points gets the result of the lower
# Per grid point. Deep models, whose simulations take longer, get fewer changes and fewer points.
_CHANGES = 96
_REGIONS = 32
_DEEP = 2  # times _REGIONS: from there on a few changes hardly matter, so fewer still
_PROMISING = 2
_ANY = 0.5  # share of changes to any recipe
_NEAR = (-3, -2, -1, 1, 2, 3)
_SLACK = 1.02  # a change that makes recomputation longer than so is not simulated

Judge = Callable[[Assignment, int, float], "float | None"]
"""`judge(assignment, budget_bytes, most_s)`: seconds of a step, or None if the step does not fit or takes longer."""


class BudgetGrid:
    """The results of local search at a grid of budgets, computed on demand.

    Args:
        grouping: units and recipes.
        budgets: grid points in bytes, ascending.
        assignments: proposals to begin with.
        judge: the simulator.
        least_s: lower bound of a step's seconds, from an assignment and a budget.
    """

    def __init__(
        self,
        grouping: Grouping,
        budgets: Sequence[int],
        assignments: Sequence[Assignment],
        judge: Judge,
        least_s: Callable[[Assignment, int], float],
    ) -> None:
        self._grouping = grouping
        depth = max(1.0, len(grouping.units) / _REGIONS)
        self._budgets = budgets[:: round(depth)]
        self._assignments = [assignment for assignment in assignments if assignment.choices]
        self._judge = judge
        self._least_s = least_s
        self._share = min(1.0, (_DEEP / depth) ** 2) / depth
        self._results: list[Assignment | None] = []

    def up_to(self, budget_bytes: int) -> list[Assignment]:
        """The results of all grid points up to `budget_bytes`."""
        count = bisect.bisect_right(self._budgets, budget_bytes)
        while len(self._results) < count:
            self._results.append(self._search(len(self._results)))
        return list({result.choices: result for result in self._results[:count] if result is not None}.values())

    def _search(self, point: int) -> Assignment | None:
        budget_bytes = self._budgets[point]
        below = self._results[point - 1] if point > 0 else None
        best, best_s = None, inf
        for assignment in [*([] if below is None else [below]), *self._promising(budget_bytes)]:
            seconds = self._judge(assignment, budget_bytes, best_s)
            if seconds is not None and seconds < best_s:
                best, best_s = assignment, seconds
        if best is None:
            return below
        draw = random.Random(point)  # noqa: S311 (the same changes every time)
        for _ in range(max(1, int(_CHANGES * self._share))):
            changed = self._changed(best, draw)
            if changed is None or self._least_s(changed, budget_bytes) > best_s + LAST_DIGITS_S:
                continue
            seconds = self._judge(changed, budget_bytes, best_s)
            if seconds is not None and seconds <= best_s:
                best, best_s = changed, seconds  # an equal step may be on the way to a better one
        return best

    def _promising(self, budget_bytes: int) -> list[Assignment]:
        fitting = (assignment for assignment in self._assignments if assignment.least_bytes <= budget_bytes)
        return sorted(fitting, key=lambda assignment: self._least_s(assignment, budget_bytes))[:_PROMISING]

    def _changed(self, assignment: Assignment, draw: random.Random) -> Assignment | None:
        """One small change; None if nothing changed, or a simulation is not worthwhile."""
        choices = list(assignment.choices)
        one, other = draw.randrange(len(choices)), draw.randrange(len(choices))
        kind = draw.random()
        if kind < 1 / 3:
            choices[one], choices[other] = choices[other], choices[one]
        else:
            self._choose(choices, one, draw)
        if kind > 2 / 3:
            self._choose(choices, other, draw)
        if tuple(choices) == assignment.choices or not self._are_possible(choices):
            return None
        changed = assignment_from(self._grouping, tuple(choices))
        return changed if changed.recompute_s <= assignment.recompute_s * _SLACK else None

    def _choose(self, choices: list[int], unit: int, draw: random.Random) -> None:
        """Any recipe, or a recipe that moves about as much: most proposals are off by a little."""
        order = self._grouping.units[unit].by_moved_bytes
        if choices[unit] not in order or draw.random() < _ANY:
            choices[unit] = draw.choice(order)
        else:
            place = order.index(choices[unit]) + draw.choice(_NEAR)
            choices[unit] = order[min(max(place, 0), len(order) - 1)]

    def _are_possible(self, choices: Choices | list[int]) -> bool:
        return all(choice < len(unit.recipes) for choice, unit in zip(choices, self._grouping.units, strict=True))
