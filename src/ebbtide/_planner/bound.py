"""What no plan can beat in the simulator's eyes: a linear program over the depth. Pure.

Options are mixed in any proportion, the link is busy from the first region to the last need, and only the peaks count.
Each row holds for every plan that the simulator lets pass, so the optimum is a lower bound (Checkmate and POFO use
their relaxations likewise).
"""

from collections.abc import Sequence
from typing import Any, cast

from ebbtide._planner.options import Option
from ebbtide._planner.simulate import fixed_bytes
from ebbtide._profiling.profile import Profile

_GIB = 1024**3


def least_step_s(profile: Profile, options: Sequence[Sequence[Option]], budget_bytes: int) -> float:
    """Seconds that forward and backward take at least. `options`: per region, what may be done with it."""
    program = _Program(profile, options, budget_bytes)
    return max(profile.plain_s, program.solve())


class _Program:
    """Columns: the share of each option of each region; kept up to each region; tail, sent, forward and backward."""

    def __init__(self, profile: Profile, options: Sequence[Sequence[Option]], budget_bytes: int) -> None:
        self._profile = profile
        self._flat = [(number, option) for number, choices in enumerate(options) for option in choices]
        self._regions = len(options)
        self._fixed = (budget_bytes - fixed_bytes(profile, 0)) / _GIB
        self._kept = len(self._flat)
        self._tail, self._sent, self._forward, self._backward = (self._kept + self._regions + k for k in range(4))
        self._entries: tuple[list[float], list[int], list[int]] = ([], [], [])
        self._high: list[float] = []

    def solve(self) -> float:
        import numpy as np
        from scipy import optimize
        from scipy.sparse import coo_array

        self._memory()
        self._channels()
        values, rows, columns = self._entries
        width = self._backward + 1
        cost = np.zeros(width)
        cost[self._forward] = cost[self._backward] = 1.0
        shares = coo_array(
            (np.ones(self._kept), ([number for number, _ in self._flat], range(self._kept))),
            shape=(self._regions, width),
        )
        found: Any = cast(Any, optimize).linprog(
            cost,
            A_ub=coo_array((values, (rows, columns)), shape=(len(self._high), width)),
            b_ub=self._high,
            A_eq=shares if self._regions else None,
            b_eq=np.ones(self._regions) if self._regions else None,
            method="highs",
        )
        return float(found.fun) if found.status == 0 else 0.0

    def _at_most(self, high: float, *terms: tuple[int, float]) -> None:
        values, rows, columns = self._entries
        for column, value in terms:
            values.append(value)
            rows.append(len(self._high))
            columns.append(column)
        self._high.append(high)

    def _memory(self) -> None:
        """Kept up to a region, and what works there, forward and backward."""
        grads = sum(region.grad_bytes for region in self._profile.regions)
        options: list[list[tuple[int, Option]]] = [[] for _ in self._profile.regions]
        for column, (number, option) in enumerate(self._flat):
            options[number].append((column, option))
        last = [(self._kept + self._regions - 1, 1.0)] if self._regions else []
        others = [(column, float(self._profile.graphs - 1)) for column, _ in last]  # other graphs keep as much each
        for number, (region, own) in enumerate(zip(self._profile.regions, options, strict=True)):
            kept = self._kept + number
            before = [(kept - 1, 1.0)] if number else []
            self._at_most(0.0, (kept, -1.0), *before, *((column, o.kept_bytes / _GIB) for column, o in own))
            self._at_most(self._fixed - region.forward_work_bytes / _GIB, (kept, 1.0), *others)
            work = ((column, option.backward_work_bytes / _GIB) for column, option in own)
            self._at_most(self._fixed - grads / _GIB, (kept, 1.0), *others, *work)
            grads -= region.grad_bytes
        if self._profile.around.turns:  # else nothing is looked at behind the last region, which what waits is part of
            self._at_most(self._fixed - self._profile.around.peak_bytes / _GIB, *last, *others, (self._tail, 1.0))

    def _channels(self) -> None:
        """What is moved and is not in the tail leaves before forward ends, and comes back before backward does."""
        around, link, regions = self._profile.around, self._profile.link, self._profile.regions
        out_s, back_s = _GIB / link.out, _GIB / link.back
        beside = link.interference  # of a second of copying, unless compute waits for it
        forward_s = around.before_s + around.after_s + sum(region.forward_s for region in regions)
        backward_s = around.turn_s + around.end_s + sum(region.backward_s for region in regions)
        moved = ((column, option.moved_bytes / _GIB) for column, (_, option) in enumerate(self._flat))
        again = ((column, option.again_s) for column, (_, option) in enumerate(self._flat))
        self._at_most(0.0, *moved, (self._tail, -1.0), (self._sent, -1.0))
        self._at_most(-forward_s, (self._forward, -1.0), (self._sent, beside * out_s))
        self._at_most(-around.before_s, (self._forward, -1.0), (self._sent, out_s))
        self._at_most(-backward_s, (self._backward, -1.0), (self._sent, beside * back_s), *again)
        self._at_most(-around.turn_s - around.end_s, (self._backward, -1.0), (self._sent, back_s))
        if self._profile.host_limit_bytes is not None:
            self._at_most(self._profile.host_limit_bytes / _GIB, (self._sent, float(self._profile.graphs)))
