"""Lower bounds of a step's time, as an oracle for plans: a linear program over the depth.

Options mix in any proportion, the link is busy from the first region to the last need, and only peaks count. Every row
holds for all plans that the simulator accepts, so the optimum is a lower bound (Checkmate and POFO use relaxations
likewise).
"""

import numpy as np

from ebbtide._planner import highs
from ebbtide._planner.groups import Grouping
from ebbtide._planner.simulate import fixed_bytes
from ebbtide._utils.sizes import GIB as _GIB


def bound_s(profile, budget_bytes, only_moves=False):
    """Seconds that no plan for the budget goes below."""
    grouping = Grouping(profile, only_moves)
    options = [()] * len(profile.regions)
    for unit in grouping.units:
        for place, call in enumerate(unit.calls):
            options[call] = tuple(costs[place] for costs in unit.costs)
    return least_step_s(profile, options, budget_bytes)


def least_step_s(profile, options, budget_bytes):
    """Seconds that forward and backward take at least. `options`: a choice of options per region."""
    return max(profile.plain_s, _Program(profile, options, budget_bytes).solve())


class _Program:
    """Columns: share of each option of each region; kept up to each region; tail, sent, forward, backward."""

    def __init__(self, profile, options, budget_bytes):
        self._profile = profile
        self._flat = [(number, option) for number, choices in enumerate(options) for option in choices]
        self._regions = len(options)
        self._fixed = (budget_bytes - fixed_bytes(profile, 0)) / _GIB
        self._kept = len(self._flat)
        self._tail, self._sent, self._forward, self._backward = (self._kept + self._regions + k for k in range(4))
        self._entries = ([], [], [])
        self._high = []

    def solve(self):
        self._memory()
        self._channels()
        values, rows, columns = self._entries
        cost = np.zeros(self._backward + 1)
        cost[self._forward] = cost[self._backward] = 1.0
        limits = np.zeros((len(self._high), len(cost)))
        np.add.at(limits, (rows, columns), values)
        shares = np.zeros((self._regions, len(cost)))
        for column, (number, _) in enumerate(self._flat):
            shares[number, column] = 1.0
        ones = [1.0] * self._regions
        least = [*(-np.inf for _ in self._high), *ones]
        found = highs.Program(np.vstack([limits, shares]), least, [*self._high, *ones]).solve(cost)
        return 0.0 if found is None else float(cost @ found)

    def _at_most(self, high, *terms):
        values, rows, columns = self._entries
        for column, value in terms:
            values.append(value)
            rows.append(len(self._high))
            columns.append(column)
        self._high.append(high)

    def _memory(self):
        """Kept up to a region, and the working memory, forward and backward."""
        grads = sum(region.grad_bytes for region in self._profile.regions)
        options = [[] for _ in self._profile.regions]
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
        # Without points, parcels on the way out after the last region do not count.
        if self._profile.outside.post_region_points:
            self._at_most(self._fixed - self._profile.outside.peak_bytes / _GIB, *last, *others, (self._tail, 1.0))

    def _channels(self):
        """Moved bytes without the tail leave before forward ends, and come back before backward ends."""
        outside, link, regions = self._profile.outside, self._profile.link, self._profile.regions
        out_s, back_s = _GIB / link.out, _GIB / link.back
        interference = link.interference  # per second of copying, unless compute waits for the copy
        forward_s = outside.before_s + outside.after_s + sum(region.forward_s for region in regions)
        backward_s = outside.backward_before_s + outside.backward_after_s + sum(region.backward_s for region in regions)
        moved = ((column, option.moved_bytes / _GIB) for column, (_, option) in enumerate(self._flat))
        recompute = ((column, option.recompute_s) for column, (_, option) in enumerate(self._flat))
        self._at_most(0.0, *moved, (self._tail, -1.0), (self._sent, -1.0))
        self._at_most(-forward_s, (self._forward, -1.0), (self._sent, interference * out_s))
        self._at_most(-outside.before_s, (self._forward, -1.0), (self._sent, out_s))
        self._at_most(-backward_s, (self._backward, -1.0), (self._sent, interference * back_s), *recompute)
        self._at_most(
            -outside.backward_before_s - outside.backward_after_s, (self._backward, -1.0), (self._sent, back_s)
        )
        if self._profile.host_limit_bytes is not None:
            self._at_most(self._profile.host_limit_bytes / _GIB, (self._sent, float(self._profile.graphs)))
