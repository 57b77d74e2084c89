"""How many units of each group get which option, at a budget: a small linear program, rounded. Pure.

Note [The fluid model]
~~~~~~~~~~~~~~~~~~~~~~
The one of offloading planners (OffMate, POFO), with a single stage, as a training step has. What is moved leaves while
forward runs, comes back while backward does, or is the tail, which stays. Compute waits (the stalls are variables)
where the link is too slow for that. It knows no depth, no parcels and no bursts, so its answers are proposals: the
simulator judges. Tried, and not worth it: whole numbers from an integer program (5 times as slow; what it gains at a
budget, more budgets gain as well), and cutting the depth into pieces with a backlog each (as slow again, no better).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ebbtide._planner.groups import Model, Unit
from ebbtide._planner.options import queueing_s
from ebbtide._planner.simulate import fixed_bytes
from ebbtide._profiling.profile import Host

_GIB = 1024**3
_MS = 1e3  # a second

Kind = Callable[[Unit, int], bool]
"""Whether a choice of a unit is allowed."""


@dataclass(frozen=True)
class Counted:
    """Of these units, so many get each choice."""

    units: tuple[int, ...]
    counts: Mapping[int, int]


_Row = dict[int, float]  # by column


class Counts:
    """The program of one profile and one kind of choices, with the budget left open. In GiB and milliseconds."""

    def __init__(self, model: Model, kind: Kind) -> None:
        self._model = model
        self._profile = model.profile
        self._columns: dict[tuple[int, int] | str, int] = {}
        self._allowed = [self._choices(number, kind) for number in range(len(model.groups))]
        self._is_possible = bool(self._allowed) and all(self._allowed)
        self._rows: list[tuple[_Row, float, float]] = []  # with the least and the most of its sum
        self._memory: list[tuple[_Row, int]] = []  # with what has to fit the budget beside its sum
        if self._is_possible:
            self._make_rows()
            self._program = self._arrays()

    def solve(self, budget_bytes: int) -> Sequence[Counted] | None:
        """Counts per group, or None if nothing fits."""
        if not self._is_possible:
            return None
        from scipy import optimize

        solver = cast(Any, optimize)
        matrix, low, high, cost, upper = self._program
        high = high.copy()
        fixed = budget_bytes - fixed_bytes(self._profile, 0)
        high[len(self._rows) :] = [(fixed - beside) / _GIB for _, beside in self._memory]
        found = solver.milp(
            cost,
            constraints=solver.LinearConstraint(matrix, low, high),
            bounds=solver.Bounds(0.0, upper),
        )
        return None if found.x is None else self._counted(found.x)

    def _choices(self, number: int, kind: Kind) -> dict[int, int]:
        """The column of each allowed choice of a group."""
        unit = self._model.units[self._model.groups[number].first]
        return {c: self._column((number, c)) for c in range(len(unit.recipes)) if kind(unit, c)}

    def _column(self, name: tuple[int, int] | str) -> int:
        return self._columns.setdefault(name, len(self._columns))

    def _sum(self, of: Callable[[Unit, int], float], factor: float = 1.0) -> _Row:
        return {
            column: factor * of(self._model.units[group.first], choice)
            for group, choices in zip(self._model.groups, self._allowed, strict=True)
            for choice, column in choices.items()
        }

    # -- rows --------------------------------------------------------------------------------------------------------

    def _make_rows(self) -> None:
        profile, around = self._profile, self._profile.around
        for group, choices in zip(self._model.groups, self._allowed, strict=True):
            count = float(len(group.units))
            self._rows.append((dict.fromkeys(choices.values(), 1.0), count, count))
        kept = self._sum(lambda unit, choice: profile.graphs * unit.kept_bytes[choice] / _GIB)
        tail = self._column("tail")
        forward_s = around.after_s + sum(region.forward_s for region in profile.regions)
        backward_s = sum(region.backward_s for region in profile.regions)
        self._channel(profile.link.out, forward_s, {}, "forward stall")
        again = self._sum(lambda unit, choice: unit.again_s[choice] * _MS)
        self._channel(profile.link.back, backward_s, again, "backward stall")
        if profile.host is not None:
            self._queue(profile.host, again)
        self._memory.append(({**kept, tail: 1.0}, around.peak_bytes))
        self._deepest_backward(kept)
        if profile.host_limit_bytes is not None:
            everything = self._sum(lambda unit, choice: unit.moved_bytes[choice] / _GIB)
            most = profile.host_limit_bytes / profile.graphs / _GIB
            self._rows.append(({**everything, tail: -1.0}, -float("inf"), most))

    def _channel(self, bytes_per_s: float, seconds: float, again: _Row, stall: str) -> None:
        """What is moved and is not the tail passes the link while compute runs or waits."""
        rate = bytes_per_s / _GIB / _MS
        row = self._sum(self._moved_gib)
        for column, again_ms in again.items():
            row[column] -= rate * again_ms
        row.update({self._column("tail"): -1.0, self._column(stall): -rate})
        self._rows.append((row, -float("inf"), rate * seconds * _MS))

    def _queue(self, host: Host, again: _Row) -> None:
        """Compute waits where the host needs longer to queue the step than compute to run it."""
        profile, around = self._profile, self._profile.around
        forward_s = host.before_s + host.after_s + sum(region.forward_s for region in host.regions)
        backward_s = host.turn_s + sum(region.backward_s for region in host.regions)
        spare_s = host.lead_s + around.before_s + around.after_s + sum(r.forward_s for r in profile.regions) - forward_s
        added = self._sum(lambda unit, choice: self._added_s(host, unit, choice) * _MS)
        wait = self._column("host forward")
        self._rows.append(({**added, wait: -1.0}, -float("inf"), spare_s * _MS))
        spare_s += around.turn_s + sum(region.backward_s for region in profile.regions) - backward_s
        seconds = self._sum(lambda unit, choice: self._again_host_s(host, unit, choice) * _MS)
        row = {column: 2 * added[column] + seconds[column] - again[column] for column in added}
        self._rows.append(({**row, wait: -1.0, self._column("host backward"): -1.0}, -float("inf"), spare_s * _MS))

    @staticmethod
    def _added_s(host: Host, unit: Unit, choice: int) -> float:
        pairs = zip(unit.costs[choice], unit.visits, strict=True)
        return sum(queueing_s(option, host, host.regions[visit]) for option, visit in pairs)

    @staticmethod
    def _again_host_s(host: Host, unit: Unit, choice: int) -> float:
        return sum(host.regions[visit].again_s for visit in unit.visits) if unit.recipes[choice].recomputes else 0.0

    def _moved_gib(self, unit: Unit, choice: int) -> float:
        """With the bytes that the link could have carried while it began."""
        link = self._profile.link
        parcels = sum(len(option.moved) for option in unit.costs[choice])
        return (unit.moved_bytes[choice] + parcels * link.latency_s * link.out) / _GIB

    def _deepest_backward(self, kept: _Row) -> None:
        """All that is kept, and the working memory of a region that runs again if any does, the least of them."""
        work = self._sum(lambda unit, choice: max(option.backward_work_bytes for option in unit.costs[choice]) / _GIB)
        recomputes = self._sum(lambda unit, choice: float(unit.recipes[choice].recomputes))
        without = min((work[column] for column, again in recomputes.items() if not again), default=0.0)
        again = min((work[column] for column, again in recomputes.items() if again), default=0.0)
        any_again = self._column("runs again")
        self._rows.append(({**recomputes, any_again: -float(len(self._model.units))}, -float("inf"), 0.0))
        self._memory.append(({**kept, any_again: max(0.0, again - without)}, int(without * _GIB)))

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
        upper[self._column("runs again")] = 1.0
        open_ended = [np.inf] * len(self._memory)
        low = np.array([*(low for _, low, _ in self._rows), *(-high for high in open_ended)])
        high = np.array([*(high for _, _, high in self._rows), *open_ended])
        return matrix, low, high, cost, upper

    def _costs(self) -> _Row:
        """The step in milliseconds: second runs, stalls, and what copies take from compute beside them."""
        link = self._profile.link
        beside = link.interference * _GIB * (1 / link.out + 1 / link.back)
        costs = self._sum(lambda unit, choice: (unit.again_s[choice] + beside * self._moved_gib(unit, choice)) * _MS)
        costs.update({self._column(stall): 1.0 for stall in ("forward stall", "backward stall")})
        if self._profile.host is not None:
            costs.update({self._column(wait): 1.0 for wait in ("host forward", "host backward")})
        return costs

    # -- solution ----------------------------------------------------------------------------------------------------

    def _counted(self, values: Any) -> list[Counted]:
        return [
            Counted(group.units, _whole({c: float(values[column]) for c, column in choices.items()}, len(group.units)))
            for group, choices in zip(self._model.groups, self._allowed, strict=True)
        ]


def _whole(counts: Mapping[int, float], total: int) -> dict[int, int]:
    """Whole numbers with the sum `total`: the largest rests are rounded up."""
    whole = {choice: int(count + 1e-6) for choice, count in counts.items()}
    missing = total - sum(whole.values())
    for choice in sorted(counts, key=lambda choice: whole[choice] - counts[choice])[:missing]:
        whole[choice] += 1
    return {choice: count for choice, count in whole.items() if count > 0}
