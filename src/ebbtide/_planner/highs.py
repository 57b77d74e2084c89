"""Linear programs in HiGHS. Pure."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ebbtide._errors import PlanError


def empty() -> Any:
    """A `highspy.Highs` without rows and columns, which prints nothing."""
    import highspy

    class Quiet(cast(Any, highspy).Highs):
        def enableCallbacks(self) -> None:  # noqa: N802 (name of HiGHS)
            # 1.16 prints a line when the constructor enables callbacks, before anybody can set an option.
            self.setOptionValue("output_flag", False)

    program = Quiet()
    program.setOptionValue("output_flag", False)
    return program


def use_one_core() -> None:
    """Start no workers for programs of this thread. HiGHS keeps the number of the first run of a thread for good, and
    refuses another: not for a thread of the user."""
    program = empty()
    program.setOptionValue("threads", 1)
    program.run()


class Program:
    """A program with columns of at least 0, and rows of `matrix` between `least` and `most`.

    Raises:
        PlanError: HiGHS refuses the figures.
    """

    def __init__(self, matrix: NDArray[np.float64], least: Sequence[float], most: Sequence[float]) -> None:
        (height, width), entries = matrix.shape, matrix != 0
        self._matrix, self._least, self._most = matrix, np.array(least), np.array(most)
        self._solver = empty()
        self._solver.addVars(width, np.zeros(width), np.full(width, np.inf))
        starts = np.cumsum([0, *entries.sum(axis=1)][:-1], dtype=np.int32)
        columns = entries.nonzero()[1].astype(np.int32)
        status = self._solver.addRows(height, self._least, self._most, len(columns), starts, columns, matrix[entries])
        if status.name == "kError" or not np.isfinite(matrix).all():
            raise PlanError("no plan can be made: the profile has times or sizes out of all range")

    def bound(self, column: int, least: float, most: float) -> None:
        self._solver.changeColBounds(column, least, most)

    def solve(self, cost: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """The columns with the least `cost`, beginning with a solution before; None if no columns satisfy all rows, or
        if rounding decides whether any do."""
        self._solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
        found = self._run()
        if found is None:
            self._solver.clearSolver()  # one in 2000 fails from the solution before, and few of these from nothing
            found = self._run()
        return found

    def _run(self) -> NDArray[np.float64] | None:
        self._solver.run()
        if not is_solved(self._solver):
            return None
        columns = np.array(self._solver.getSolution().col_value)
        rows = self._matrix @ columns
        # From a solution before, HiGHS (1.16) has called columns the best that contradict a row.
        slack = 1e-6 * np.maximum(1.0, np.abs(self._matrix) @ np.abs(columns))
        is_right = (rows >= self._least - slack) & (rows <= self._most + slack)
        return columns if is_right.all() else None


def is_solved(program: Any) -> bool:
    """Whether the last run found the best solution."""
    return program.modelStatusToString(program.getModelStatus()) == "Optimal"
