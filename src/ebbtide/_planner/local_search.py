"""Assignments made better by small changes, each judged by the simulator. Pure, and the same ones every time.

Note [Polished]
~~~~~~~~~~~~~~~
1. Counting knows no bursts, so what it proposes is some tenths of a percent from what small changes lead to: another
   recipe for one region or two, or two regions that change places.
2. That must not depend on the budget asked for, or a larger one could end with a slower plan (Note [Budgets] of the
   candidates). So it climbs a fixed ladder of budgets: each rung begins with what the one below ended with, and with
   the most promising candidates, and makes a few changes. At any budget all rungs below it are candidates.
"""

import bisect
import random
from collections.abc import Callable, Sequence
from math import inf

from ebbtide._planner.groups import Model
from ebbtide._planner.search import Candidate, Choices, candidate_from
from ebbtide._planner.simulate import LAST_DIGITS_S

RUNGS = 256  # what is between a budget and the rung below it is not made use of
# Per rung; more on the lowest ones, which have nothing better below them, and where choices matter most. Fewer, and
# fewer rungs, for a deep model, whose simulations take longer.
_CHANGES = 24
_CHANGES_BELOW = 96
_RUNGS_BELOW = 48
_REGIONS = 32
_DEEP = 2  # times as deep as that a few changes make no difference any more: fewer still
_PROMISING = 2
_ANY = 0.5  # of the changes are to any recipe
_NEAR = (-3, -2, -1, 1, 2, 3)
_SLACK = 1.02  # changes that make second runs this much longer are not worth a simulation

Judge = Callable[[Candidate, int, float], "float | None"]
"""Seconds of a step at a budget; None if it does not fit, or takes longer than so many."""


class BudgetGrid:
    """What small changes lead to, rung by rung.

    Args:
        model: what may be chosen.
        budgets: of the rungs, ascending, in bytes.
        candidates: what there is already.
        judge: the simulator.
        least_s: what a candidate's step cannot go below at a budget, in seconds.
    """

    def __init__(
        self,
        model: Model,
        budgets: Sequence[int],
        candidates: Sequence[Candidate],
        judge: Judge,
        least_s: Callable[[Candidate, int], float],
    ) -> None:
        self._model = model
        depth = max(1.0, len(model.units) / _REGIONS)
        self._budgets = budgets[:: round(depth)]
        self._candidates = [candidate for candidate in candidates if candidate.choices]
        self._judge = judge
        self._least_s = least_s
        self._share = min(1.0, (_DEEP / depth) ** 2) / depth
        self._rungs: list[Candidate | None] = []

    def up_to(self, budget_bytes: int) -> list[Candidate]:
        """The ends of all rungs that are no higher than `budget_bytes`."""
        count = bisect.bisect_right(self._budgets, budget_bytes)
        while len(self._rungs) < count:
            self._rungs.append(self._climb(len(self._rungs)))
        return list({rung.choices: rung for rung in self._rungs[:count] if rung is not None}.values())

    def _climb(self, rung: int) -> Candidate | None:
        budget_bytes = self._budgets[rung]
        below = self._rungs[rung - 1] if rung > 0 else None
        best, best_s = None, inf
        for candidate in [*([] if below is None else [below]), *self._promising(budget_bytes)]:
            seconds = self._judge(candidate, budget_bytes, best_s)
            if seconds is not None and seconds < best_s:
                best, best_s = candidate, seconds
        if best is None:
            return below
        draw = random.Random(rung)  # noqa: S311 (the same changes every time)
        changes = _CHANGES_BELOW if rung < _RUNGS_BELOW else _CHANGES
        for _ in range(max(1, int(changes * self._share))):
            changed = self._changed(best, draw)
            if changed is None or self._least_s(changed, budget_bytes) > best_s + LAST_DIGITS_S:
                continue
            seconds = self._judge(changed, budget_bytes, best_s)
            if seconds is not None and seconds <= best_s:
                best, best_s = changed, seconds  # an equal one may have what a better one needs
        return best

    def _promising(self, budget_bytes: int) -> list[Candidate]:
        fitting = (candidate for candidate in self._candidates if candidate.least_bytes <= budget_bytes)
        return sorted(fitting, key=lambda candidate: self._least_s(candidate, budget_bytes))[:_PROMISING]

    def _changed(self, candidate: Candidate, draw: random.Random) -> Candidate | None:
        """After one small change; None if that is none, or none that could be worth a simulation."""
        choices = list(candidate.choices)
        one, other = draw.randrange(len(choices)), draw.randrange(len(choices))
        kind = draw.random()
        if kind < 1 / 3:
            choices[one], choices[other] = choices[other], choices[one]
        else:
            self._choose(choices, one, draw)
        if kind > 2 / 3:
            self._choose(choices, other, draw)
        if tuple(choices) == candidate.choices or not self._are_possible(choices):
            return None
        changed = candidate_from(self._model, tuple(choices))
        return changed if changed.again_s <= candidate.again_s * _SLACK else None

    def _choose(self, choices: list[int], unit: int, draw: random.Random) -> None:
        """Any other recipe, or one that moves about as much: what is wrong is more often a little than a lot."""
        order = self._model.units[unit].by_moved_bytes
        if choices[unit] not in order or draw.random() < _ANY:
            choices[unit] = draw.choice(order)
        else:
            place = order.index(choices[unit]) + draw.choice(_NEAR)
            choices[unit] = order[min(max(place, 0), len(order) - 1)]

    def _are_possible(self, choices: Choices | list[int]) -> bool:
        return all(choice < len(unit.recipes) for choice, unit in zip(choices, self._model.units, strict=True))
