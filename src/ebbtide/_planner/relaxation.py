"""How many units of each group get which recipe at a budget: a linear program, rounded to whole numbers. Pure.

Note [LP relaxation]
~~~~~~~~~~~~~~~~~~~~
The program of offloading planners (OffMate, POFO) with a single stage, as a training step has. Moved bytes leave while
forward runs and come back while backward runs; the rest is the tail, and stays. Where the link is too slow, compute
stalls: stalls are variables. The program knows no depth, no parcels and no bursts, so its solutions are proposals for
the simulator. Measured and rejected: an integer program (5 times as slow; more budgets gain as much), and pieces of the
depth with a backlog each (twice as slow, no better).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ebbtide._planner import highs
from ebbtide._planner.groups import Grouping, Unit
from ebbtide._planner.options import launch_overhead_s
from ebbtide._planner.simulate import fixed_bytes
from ebbtide._profiling.profile import Host
from ebbtide._utils.sizes import GIB

_MS = 1e3  # a second
_BUDGET, _TAIL, _FORWARD_STALL, _BACKWARD_STALL, _FORWARD_WAIT, _BACKWARD_WAIT, _RECOMPUTES = range(7)
_OTHERS = 7  # columns that are no recipe of a group

Counts = Mapping[int, int]
"""How many units of a group get the recipe of each index."""

_Row = NDArray[np.float64]


class Relaxation:
    """The program of one profile, for any budget. In GiB and milliseconds.

    Args:
        shares: of other graphs' backward the share in which parcels leave too, and of their forward the share in which
            parcels come back.

    Columns: the tail in GiB; stalls and waits for the host in milliseconds; whether any unit recomputes; and per group
    and recipe the number of units.
    """

    def __init__(self, grouping: Grouping, shares: tuple[float, float] = (0.0, 0.0)) -> None:
        self._grouping = grouping
        self._shares = shares
        self._columns = [
            (group, choice) for group in grouping.groups for choice in range(len(grouping.units[group[0]].recipes))
        ]
        self._rows: list[tuple[_Row, float]] = []  # with the most of the sum
        self._cost = self._add_time()
        self._add_memory()
        of_group = [
            self._row({}, np.array([float(own is group) for own, _ in self._columns])) for group in grouping.groups
        ]
        totals = [float(len(group)) for group in grouping.groups]
        self._program = highs.Program(
            np.array([*(row for row, _ in self._rows), *of_group]),
            [*(-np.inf for _ in self._rows), *totals],
            [*(most for _, most in self._rows), *totals],
        )
        self._program.bound(_RECOMPUTES, 0.0, 1.0)

    def solve(self, budgets: Sequence[int]) -> Iterator[list[Counts]]:
        """Counts per group at each of the ascending `budgets` in bytes that something fits.

        What is best at two budgets is best between them: a larger budget allows whatever a smaller one does.
        """
        last = len(budgets) - 1
        found = {at: self._solved(self._cost, budgets[at] / GIB) for at in (0, last)}
        spans = [(0, last)]
        while spans:
            low, high = spans.pop()
            if high - low > 1 and not _is_same(found[low], found[high]):
                middle = (low + high) // 2
                found[middle] = self._solved(self._cost, budgets[middle] / GIB)
                spans += [(low, middle), (middle, high)]
        yield from (self._rounded(values) for _, values in sorted(found.items()) if values is not None)

    @cached_property
    def smallest_budget(self) -> int:
        """In bytes; smaller than any plan takes."""
        values = self._solved(self._row({_BUDGET: 1.0}, np.zeros(len(self._columns))), None)
        return 0 if values is None else int(values[_BUDGET] * GIB)

    def _solved(self, cost: _Row, budget_gib: float | None) -> _Row | None:
        least_gib, most_gib = (0.0, np.inf) if budget_gib is None else (budget_gib, budget_gib)
        self._program.bound(_BUDGET, least_gib, most_gib)
        return self._program.solve(cost)

    def _row(self, others: Mapping[int, float], counts: _Row) -> _Row:
        row = np.concatenate([np.zeros(_OTHERS), counts])
        for column, value in others.items():
            row[column] = value
        return row

    def _mean(self, of: Callable[[Unit, int], float]) -> _Row:
        """Per column of a group: the mean of the group's units, as times of equal units differ by noise."""
        units = self._grouping.units
        return np.array([sum(of(units[k], choice) for k in group) / len(group) for group, choice in self._columns])

    def _add_time(self) -> _Row:
        """Returns the milliseconds that each column adds to the step."""
        profile, outside = self._grouping.profile, self._grouping.profile.outside
        link, host = profile.link, profile.host
        forward_s = outside.after_s + sum(region.forward_s for region in profile.regions)
        backward_s = sum(region.backward_s for region in profile.regions)
        moved = self._mean(self._moved_gib)
        recompute = self._mean(lambda unit, choice: sum(option.recompute_s for option in unit.costs[choice])) * _MS
        # Moved bytes without the tail pass the link while compute runs or stalls.
        out, back = (rate / GIB / _MS for rate in (link.out, link.back))
        backwards, forwards = self._shares
        counts, while_out_s = moved - out * backwards * recompute, forward_s + backwards * backward_s
        self._rows.append((self._row({_TAIL: -1.0, _FORWARD_STALL: -out}, counts), out * while_out_s * _MS))
        counts, while_back_s = moved - back * recompute, backward_s + forwards * forward_s
        self._rows.append((self._row({_TAIL: -1.0, _BACKWARD_STALL: -back}, counts), back * while_back_s * _MS))
        stalls = {_FORWARD_STALL: 1.0, _BACKWARD_STALL: 1.0, _FORWARD_WAIT: 1.0, _BACKWARD_WAIT: 1.0}
        if host is not None:
            self._add_launches(host, outside.before_s + forward_s, outside.backward_before_s + backward_s, recompute)
        return self._row(stalls, recompute + link.interference * (1 / out + 1 / back) * moved)

    def _add_launches(self, host: Host, forward_s: float, backward_s: float, recompute: _Row) -> None:
        """Compute waits where the host takes longer to launch the step than compute to run."""
        slack_s = host.launch_ahead_s + forward_s
        slack_s -= host.before_s + host.after_s + sum(region.forward_s for region in host.regions)
        added = self._mean(lambda unit, choice: _added_s(host, unit, choice)) * _MS
        self._rows.append((self._row({_FORWARD_WAIT: -1.0}, added), slack_s * _MS))
        slack_s += backward_s - host.backward_before_s - sum(region.backward_s for region in host.regions)
        counts = 2 * added + self._mean(lambda unit, choice: _recompute_s(host, unit, choice)) * _MS - recompute
        self._rows.append((self._row({_FORWARD_WAIT: -1.0, _BACKWARD_WAIT: -1.0}, counts), slack_s * _MS))

    def _add_memory(self) -> None:
        profile = self._grouping.profile
        fixed = fixed_bytes(profile, 0)
        kept = profile.graphs / GIB * self._mean(lambda unit, choice: unit.kept_bytes[choice])
        self._rows.append((self._row({_BUDGET: -1.0, _TAIL: 1.0}, kept), -(fixed + profile.outside.peak_bytes) / GIB))
        # All kept bytes, and the least working memory of the regions that recompute, if any.
        work = self._mean(lambda unit, choice: max(option.backward_work_bytes for option in unit.costs[choice])) / GIB
        recomputes = self._mean(lambda unit, choice: unit.recipes[choice].recomputes)
        without = min(work[recomputes == 0], default=0.0)
        more = max(0.0, min(work[recomputes == 1], default=0.0) - without)
        self._rows.append((self._row({_RECOMPUTES: -float(len(self._grouping.units))}, recomputes), 0.0))
        self._rows.append((self._row({_BUDGET: -1.0, _RECOMPUTES: more}, kept), -fixed / GIB - without))
        if profile.host_limit_bytes is not None:
            moved = self._mean(lambda unit, choice: unit.moved_bytes[choice]) / GIB
            self._rows.append((self._row({_TAIL: -1.0}, moved), profile.host_limit_bytes / profile.graphs / GIB))

    def _moved_gib(self, unit: Unit, choice: int) -> float:
        """With the bytes that the link could have carried during latencies."""
        link = self._grouping.profile.link
        parcels = sum(len(option.moved) for option in unit.costs[choice])
        return (unit.moved_bytes[choice] + parcels * link.latency_s * link.out) / GIB

    def _rounded(self, values: _Row) -> list[Counts]:
        counts: dict[tuple[int, ...], dict[int, float]] = {group: {} for group in self._grouping.groups}
        chosen = values[_OTHERS:]
        for column in np.flatnonzero(chosen):
            group, choice = self._columns[column]
            counts[group][choice] = float(chosen[column])
        return [_whole(counts[group], len(group)) for group in self._grouping.groups]


def _is_same(one: _Row | None, other: _Row | None) -> bool:
    """Whether two solutions differ in the budget alone."""
    return one is not None and other is not None and np.allclose(one[_BUDGET + 1 :], other[_BUDGET + 1 :], 0, 1e-9)


def _added_s(host: Host, unit: Unit, choice: int) -> float:
    pairs = zip(unit.costs[choice], unit.calls, strict=True)
    return sum(launch_overhead_s(option, host, host.regions[call]) for option, call in pairs)


def _recompute_s(host: Host, unit: Unit, choice: int) -> float:
    return sum(host.regions[call].recompute_s for call in unit.calls) if unit.recipes[choice].recomputes else 0.0


def _whole(counts: Mapping[int, float], total: int) -> Counts:
    """Whole numbers of the sum `total`: the largest fractions are rounded up."""
    whole = {choice: int(count + 1e-6) for choice, count in counts.items()}
    missing = total - sum(whole.values())
    for choice in sorted(counts, key=lambda choice: whole[choice] - counts[choice])[:missing]:
        whole[choice] += 1
    return {choice: count for choice, count in whole.items() if count > 0}
