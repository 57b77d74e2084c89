"""How many units of each group get which option, at a budget: a small integer program. Pure.

Note [The fluid model]
~~~~~~~~~~~~~~~~~~~~~~
The one of offloading planners (OffMate, POFO), with a single stage, as a training step has. The depth is cut into a
few pieces. In each, bytes join a backlog that the link works off; what has not left when forward ends stays; in
backward the link brings back what the pieces before need. Compute waits (the stalls are variables) where the link is
too slow.
It knows no order inside of a piece, no parcels and no bursts, so its answers are proposals: the simulator judges.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ebbtide.planner.groups import Model, Unit

_PIECES = 3
_NODES = 200  # a bound that, unlike one in seconds, gives the same plan on a busy machine
_GAP = 5e-4  # of the step
_GIB = 1024**3

Kind = Callable[[Unit, int], bool]
"""Whether a choice of a unit is allowed."""


@dataclass(frozen=True)
class Counted:
    """Of these units, which follow each other in depth, so many get each choice."""

    units: tuple[int, ...]
    counts: Mapping[int, int]


@dataclass(frozen=True)
class _Block:
    """The units of one group in one piece, and the columns of their choices."""

    piece: int
    units: tuple[int, ...]
    columns: Mapping[int, int]  # choice -> column


class Counts:
    """The program of one profile and one kind of choices, with the budget left open. In GiB and seconds."""

    def __init__(self, model: Model, kind: Kind, pieces: int = _PIECES) -> None:
        self._model = model
        self._profile = model.profile
        self._pieces = max(1, min(pieces, len(model.units)))
        self._blocks: list[_Block] = []
        self._names: dict[object, int] = {}
        self._rows: list[tuple[dict[int, float], float, float, bool]] = []  # columns, low, high, high grows with budget
        self._cost: dict[int, float] = {}
        self._make_blocks(kind)
        self._is_possible = all(block.columns for block in self._blocks)
        self._make_rows()
        self._matrix: Any = None

    # -- columns -----------------------------------------------------------------------------------------------------

    def _column(self, *name: object) -> int:
        return self._names.setdefault(name, len(self._names))

    def _make_blocks(self, kind: Kind) -> None:
        piece_of = [number * self._pieces // len(self._model.units) for number in range(len(self._model.units))]
        for group in self._model.groups:
            for piece in range(self._pieces):
                units = tuple(number for number in group.units if piece_of[number] == piece)
                if units:
                    unit = self._model.units[units[0]]
                    allowed = [choice for choice in range(len(unit.recipes)) if kind(unit, choice)]
                    columns = {choice: self._column(piece, units[0], choice) for choice in allowed}
                    self._blocks.append(_Block(piece, units, columns))
        self._integers = len(self._names)

    def _sum(self, piece: int, of: Callable[[Unit, int], float]) -> dict[int, float]:
        return {
            column: of(self._model.units[block.units[0]], choice)
            for block in self._blocks
            if block.piece == piece
            for choice, column in block.columns.items()
        }

    # -- rows --------------------------------------------------------------------------------------------------------

    def _at_most(self, high: float, *terms: tuple[float, dict[int, float]], grows: bool = False) -> None:
        row: dict[int, float] = {}
        for factor, columns in terms:
            for column, value in columns.items():
                row[column] = row.get(column, 0.0) + factor * value
        self._rows.append((row, float("-inf"), high, grows))

    def _make_rows(self) -> None:
        for block in self._blocks:
            count = float(len(block.units))
            self._rows.append((dict.fromkeys(block.columns.values(), 1.0), count, count, False))
        self._kept = [self._sum(piece, lambda unit, choice: unit.kept_bytes(choice) / _GIB) for piece in self._range]
        self._moved = [self._sum(piece, self._moved_gib) for piece in self._range]
        self._again = [self._sum(piece, lambda unit, choice: unit.again_s(choice)) for piece in self._range]
        self._forward()
        self._backward()
        self._cost_of_all()

    @property
    def _range(self) -> range:
        return range(self._pieces)

    def _moved_gib(self, unit: Unit, choice: int) -> float:
        """With the bytes that the link could have carried while it began."""
        link = self._profile.link
        parcels = sum(len(option.moved) for option in unit.costs[choice])
        return (unit.moved_bytes(choice) + parcels * link.latency_s * link.out) / _GIB

    def _one(self, *name: object) -> dict[int, float]:
        return {self._column(*name): 1.0}

    def _kept_before(self, end: int) -> list[tuple[float, dict[int, float]]]:
        return [(1.0, kept) for kept in self._kept[:end]]

    def _forward(self) -> None:
        rate = self._profile.link.out / _GIB
        around = self._profile.around
        backlog: dict[int, float] = {}
        for piece in self._range:
            after = self._one("backlog", piece)
            forward_s, work = self._in_piece(piece, "forward_s", "forward_work_bytes")
            stall = self._one("forward stall", piece)
            self._at_most(rate * forward_s, (1.0, backlog), (1.0, self._moved[piece]), (-1.0, after), (-rate, stall))
            self._at_most(-work / _GIB, *self._kept_before(piece + 1), (1.0, after), grows=True)
            backlog = after
        tail, stall = self._one("tail"), self._one("forward stall", "last")
        self._at_most(rate * around.after_s, (1.0, backlog), (-1.0, tail), (-rate, stall))
        self._at_most(-around.peak_bytes / _GIB, *self._kept_before(self._pieces), (1.0, tail), grows=True)
        if self._profile.host_limit_bytes is not None:
            everything = [(1.0, moved) for moved in self._moved]
            self._at_most(self._profile.host_limit_bytes / _GIB, *everything, (-1.0, tail))

    def _backward(self) -> None:
        rate = self._profile.link.back / _GIB
        ahead = self._one("tail")
        grads = 0
        for piece in reversed(self._range):
            backward_s, _ = self._in_piece(piece, "backward_s", "backward_work_bytes")
            before = self._one("ahead", piece)
            stall = self._one("backward stall", piece)
            grads += sum(self._profile.regions[visit].grad_bytes for visit in self._visits(piece))
            # What is ahead behind the piece: what was before it and what the link brought, less what it needed.
            self._at_most(
                rate * backward_s,
                (1.0, before), (1.0, self._moved[piece]), (-1.0, ahead), (-rate, self._again[piece]), (-rate, stall),
            )  # fmt: skip
            least, again = self._work(piece)
            runs_again = self._one("runs again", piece)
            self._link_runs_again(piece, runs_again)
            more = (max(0.0, again - least), runs_again)
            self._at_most(-least - grads / _GIB, *self._kept_before(piece + 1), more, (1.0, before), grows=True)
            ahead = before

    def _in_piece(self, piece: int, seconds: str, work: str) -> tuple[float, int]:
        regions = [self._profile.regions[visit] for visit in self._visits(piece)]
        return sum(getattr(region, seconds) for region in regions), max(getattr(region, work) for region in regions)

    def _visits(self, piece: int) -> list[int]:
        units = (number for block in self._blocks if block.piece == piece for number in block.units)
        return [visit for number in units for visit in self._model.units[number].visits]

    def _work(self, piece: int) -> tuple[float, float]:
        """GiB that backward needs where nothing, and where something runs again; the least of the options each."""
        work: dict[bool, list[int]] = {False: [], True: []}
        for block in self._blocks:
            if block.piece == piece:
                unit = self._model.units[block.units[0]]
                for choice in block.columns:
                    bytes_at_work = max(option.backward_work_bytes for option in unit.costs[choice])
                    work[unit.recipes[choice].runs_again].append(bytes_at_work)
        again = min(work[True], default=0) / _GIB
        return min(work[False], default=min(work[True], default=0)) / _GIB, again

    def _link_runs_again(self, piece: int, runs_again: dict[int, float]) -> None:
        counted = self._sum(piece, lambda unit, choice: float(unit.recipes[choice].runs_again))
        units = sum(len(block.units) for block in self._blocks if block.piece == piece)
        self._at_most(0.0, (1.0, counted), (-float(units), runs_again))

    def _cost_of_all(self) -> None:
        link = self._profile.link
        beside = link.interference * _GIB * (1 / link.out + 1 / link.back)
        for piece in self._range:
            for column, value in self._again[piece].items():
                self._cost[column] = value + beside * self._moved[piece][column]
        for name, column in self._names.items():
            if isinstance(name, tuple) and isinstance(name[0], str) and name[0].endswith("stall"):
                self._cost[column] = 1.0
        # So that the gap which ends the search is one of the whole step.
        self._cost[self._column("plain step")] = self._profile.plain_s
        self._rows.append((self._one("plain step"), 1.0, 1.0, False))

    # -- solution ----------------------------------------------------------------------------------------------------

    def solve(self, budget_bytes: int) -> Sequence[Counted] | None:
        """Counts per group and piece, or None if nothing fits or none was found in time."""
        if not self._is_possible or not self._blocks:
            return None
        import numpy as np
        from scipy import optimize

        if self._matrix is None:
            self._matrix = self._dense()
        matrix, low, high, grows, cost, upper, integrality = self._matrix
        fixed = (budget_bytes - self._profile.base_bytes - self._profile.around.kept_bytes) / _GIB
        solver: Any = cast(Any, optimize)
        found = solver.milp(
            cost,
            constraints=solver.LinearConstraint(matrix, low, high + grows * fixed),
            bounds=solver.Bounds(np.zeros(len(cost)), upper),
            integrality=integrality,
            options={"mip_rel_gap": _GAP, "node_limit": _NODES},
        )
        return None if found.x is None else self._counted(found.x)

    def _dense(self) -> Any:
        import numpy as np

        width = len(self._names)
        matrix = np.zeros((len(self._rows), width))
        for number, (row, _, _, _) in enumerate(self._rows):
            for column, value in row.items():
                matrix[number, column] = value
        cost, upper, integrality = np.zeros(width), np.full(width, np.inf), np.zeros(width)
        for column, value in self._cost.items():
            cost[column] = value
        integrality[: self._integers] = 1
        for name, column in self._names.items():
            if isinstance(name, tuple) and name[0] == "runs again":
                integrality[column], upper[column] = 1, 1
        low, high, grows = (np.array([row[place] for row in self._rows], dtype=float) for place in (1, 2, 3))
        return matrix, low, high, grows, cost, upper, integrality

    def _counted(self, values: Any) -> list[Counted]:
        return [
            Counted(block.units, _whole({c: float(values[column]) for c, column in block.columns.items()}, block.units))
            for block in self._blocks
        ]


def _whole(counts: Mapping[int, float], units: Sequence[int]) -> dict[int, int]:
    """Whole numbers with the right sum: the largest rests are rounded up."""
    whole = {choice: int(count + 1e-6) for choice, count in counts.items()}
    missing = len(units) - sum(whole.values())
    for choice in sorted(counts, key=lambda choice: whole[choice] - counts[choice])[:missing]:
        whole[choice] += 1
    return {choice: count for choice, count in whole.items() if count > 0}
