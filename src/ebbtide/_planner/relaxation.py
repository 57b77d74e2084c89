"""How many units of each group get which recipe at a budget: a linear program, rounded to whole numbers. Pure.

Note [LP relaxation]
~~~~~~~~~~~~~~~~~~~~
The program of offloading planners (OffMate, POFO) with a single stage, as a training step has. Moved bytes leave while
forward runs and come back while backward runs; the rest is the tail, and stays. Where the link is too slow, compute
stalls: stalls are variables. The program knows no depth, no parcels and no bursts, so its solutions are proposals for
the simulator. Measured and rejected: an integer program (5 times as slow; more budgets gain as much), and pieces of the
depth with a backlog each (twice as slow, no better).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ebbtide._planner.groups import Grouping, Unit
from ebbtide._planner.options import launch_overhead_s
from ebbtide._planner.simulate import fixed_bytes
from ebbtide._profiling.profile import Host
from ebbtide._utils.sizes import GIB

_MS = 1e3  # a second

Kind = Callable[[Unit, int], bool]
"""Whether a unit may get the recipe of an index."""


@dataclass(frozen=True)
class GroupCounts:
    """How many of the units get the recipe of each index."""

    units: tuple[int, ...]
    counts: Mapping[int, int]


_Row = dict[int, float]  # by column


class Relaxation:
    """The program of one profile and one kind of recipes, for any budget. In GiB and milliseconds."""

    def __init__(self, grouping: Grouping, kind: Kind) -> None:
        self._grouping = grouping
        self._profile = grouping.profile
        self._columns: dict[tuple[int, int] | str, int] = {}
        self._allowed = [self._choices(number, kind) for number in range(len(grouping.groups))]
        self._is_possible = bool(self._allowed) and all(self._allowed)
        self._rows: list[tuple[_Row, float, float]] = []  # with the bounds of the sum
        self._memory: list[tuple[_Row, int]] = []  # with further bytes that have to fit the budget
        if self._is_possible:
            self._make_rows()
            self._program = self._arrays()

    def solve(self, budget_bytes: int) -> Sequence[GroupCounts] | None:
        """Relaxation per group, or None if nothing fits."""
        if not self._is_possible:
            return None
        from scipy import optimize

        solver = cast(Any, optimize)
        matrix, low, high, cost, upper = self._program
        high = high.copy()
        fixed = budget_bytes - fixed_bytes(self._profile, 0)
        high[len(self._rows) :] = [(fixed - more) / GIB for _, more in self._memory]
        found = solver.milp(
            cost,
            constraints=solver.LinearConstraint(matrix, low, high),
            bounds=solver.Bounds(0.0, upper),
        )
        return None if found.x is None else self._rounded(found.x)

    def _choices(self, number: int, kind: Kind) -> dict[int, int]:
        """The column of each allowed choice of a group."""
        unit = self._grouping.units[self._grouping.groups[number].first]
        return {c: self._column((number, c)) for c in range(len(unit.recipes)) if kind(unit, c)}

    def _column(self, name: tuple[int, int] | str) -> int:
        return self._columns.setdefault(name, len(self._columns))

    def _sum(self, of: Callable[[Unit, int], float], factor: float = 1.0) -> _Row:
        return {
            column: factor * of(self._grouping.units[group.first], choice)
            for group, choices in zip(self._grouping.groups, self._allowed, strict=True)
            for choice, column in choices.items()
        }

    # -- rows --------------------------------------------------------------------------------------------------------

    def _make_rows(self) -> None:
        profile, outside = self._profile, self._profile.outside
        for group, choices in zip(self._grouping.groups, self._allowed, strict=True):
            count = float(len(group.units))
            self._rows.append((dict.fromkeys(choices.values(), 1.0), count, count))
        kept = self._sum(lambda unit, choice: profile.graphs * unit.kept_bytes[choice] / GIB)
        tail = self._column("tail")
        forward_s = outside.after_s + sum(region.forward_s for region in profile.regions)
        backward_s = sum(region.backward_s for region in profile.regions)
        self._channel(profile.link.out, forward_s, {}, "forward stall")
        recompute = self._sum(lambda unit, choice: unit.recompute_s[choice] * _MS)
        self._channel(profile.link.back, backward_s, recompute, "backward stall")
        if profile.host is not None:
            self._launches(profile.host, recompute)
        self._memory.append(({**kept, tail: 1.0}, outside.peak_bytes))
        self._deepest_backward(kept)
        if profile.host_limit_bytes is not None:
            everything = self._sum(lambda unit, choice: unit.moved_bytes[choice] / GIB)
            most = profile.host_limit_bytes / profile.graphs / GIB
            self._rows.append(({**everything, tail: -1.0}, -float("inf"), most))

    def _channel(self, bytes_per_s: float, seconds: float, recompute: _Row, stall: str) -> None:
        """Moved bytes without the tail pass the link while compute runs or stalls."""
        rate = bytes_per_s / GIB / _MS
        row = self._sum(self._moved_gib)
        for column, recompute_ms in recompute.items():
            row[column] -= rate * recompute_ms
        row.update({self._column("tail"): -1.0, self._column(stall): -rate})
        self._rows.append((row, -float("inf"), rate * seconds * _MS))

    def _launches(self, host: Host, recompute: _Row) -> None:
        """Compute waits where the host takes longer to launch the step than compute to run."""
        profile, outside = self._profile, self._profile.outside
        forward_s = host.before_s + host.after_s + sum(region.forward_s for region in host.regions)
        backward_s = host.backward_before_s + sum(region.backward_s for region in host.regions)
        slack_s = (
            host.launch_ahead_s
            + outside.before_s
            + outside.after_s
            + sum(r.forward_s for r in profile.regions)
            - forward_s
        )
        added = self._sum(lambda unit, choice: self._added_s(host, unit, choice) * _MS)
        wait = self._column("host forward")
        self._rows.append(({**added, wait: -1.0}, -float("inf"), slack_s * _MS))
        slack_s += outside.backward_before_s + sum(region.backward_s for region in profile.regions) - backward_s
        seconds = self._sum(lambda unit, choice: self._host_recompute_s(host, unit, choice) * _MS)
        row = {column: 2 * added[column] + seconds[column] - recompute[column] for column in added}
        self._rows.append(({**row, wait: -1.0, self._column("host backward"): -1.0}, -float("inf"), slack_s * _MS))

    @staticmethod
    def _added_s(host: Host, unit: Unit, choice: int) -> float:
        pairs = zip(unit.costs[choice], unit.calls, strict=True)
        return sum(launch_overhead_s(option, host, host.regions[call]) for option, call in pairs)

    @staticmethod
    def _host_recompute_s(host: Host, unit: Unit, choice: int) -> float:
        return sum(host.regions[call].recompute_s for call in unit.calls) if unit.recipes[choice].recomputes else 0.0

    def _moved_gib(self, unit: Unit, choice: int) -> float:
        """With the bytes that the link could have carried during latencies."""
        link = self._profile.link
        parcels = sum(len(option.moved) for option in unit.costs[choice])
        return (unit.moved_bytes[choice] + parcels * link.latency_s * link.out) / GIB

    def _deepest_backward(self, kept: _Row) -> None:
        """All kept bytes, and the least working memory of the regions that recompute, if any."""
        work = self._sum(lambda unit, choice: max(option.backward_work_bytes for option in unit.costs[choice]) / GIB)
        recomputes = self._sum(lambda unit, choice: float(unit.recipes[choice].recomputes))
        without = min((work[column] for column, does in recomputes.items() if not does), default=0.0)
        recompute = min((work[column] for column, does in recomputes.items() if does), default=0.0)
        any_recompute = self._column("recomputes")
        self._rows.append(({**recomputes, any_recompute: -float(len(self._grouping.units))}, -float("inf"), 0.0))
        self._memory.append(({**kept, any_recompute: max(0.0, recompute - without)}, int(without * GIB)))

    def _arrays(self) -> Any:
        import numpy as np

        rows = [*(row for row, _, _ in self._rows), *(row for row, _ in self._memory)]
        matrix = np.zeros((len(rows), len(self._columns)))
        for number, row in enumerate(rows):
            for column, value in row.items():
                matrix[number, column] = value
        cost = np.zeros(len(self._columns))
        for column, value in self._costs().items():
            cost[column] = value
        upper = np.full(len(self._columns), np.inf)
        upper[self._column("recomputes")] = 1.0
        open_ended = [np.inf] * len(self._memory)
        low = np.array([*(low for _, low, _ in self._rows), *(-high for high in open_ended)])
        high = np.array([*(high for _, _, high in self._rows), *open_ended])
        return matrix, low, high, cost, upper

    def _costs(self) -> _Row:
        """The step in milliseconds: recomputation, stalls, and interference."""
        link = self._profile.link
        interference = link.interference * GIB * (1 / link.out + 1 / link.back)
        costs = self._sum(lambda u, choice: (u.recompute_s[choice] + interference * self._moved_gib(u, choice)) * _MS)
        costs.update({self._column(stall): 1.0 for stall in ("forward stall", "backward stall")})
        if self._profile.host is not None:
            costs.update({self._column(wait): 1.0 for wait in ("host forward", "host backward")})
        return costs

    # -- solution ----------------------------------------------------------------------------------------------------

    def _rounded(self, values: Any) -> list[GroupCounts]:
        return [
            GroupCounts(
                group.units, _whole({c: float(values[column]) for c, column in choices.items()}, len(group.units))
            )
            for group, choices in zip(self._grouping.groups, self._allowed, strict=True)
        ]


def _whole(counts: Mapping[int, float], total: int) -> dict[int, int]:
    """Whole numbers of the sum `total`: the largest fractions are rounded up."""
    whole = {choice: int(count + 1e-6) for choice, count in counts.items()}
    missing = total - sum(whole.values())
    for choice in sorted(counts, key=lambda choice: whole[choice] - counts[choice])[:missing]:
        whole[choice] += 1
    return {choice: count for choice, count in whole.items() if count > 0}
