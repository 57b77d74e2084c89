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


def of_rows(matrix: NDArray[np.float64], least: Sequence[float], most: Sequence[float]) -> Any:
    """A program with columns of at least 0, and rows of `matrix` between `least` and `most`. Raises PlanError if HiGHS
    refuses the figures."""
    program, (height, width) = empty(), matrix.shape
    program.addVars(width, np.zeros(width), np.full(width, np.inf))
    entries = matrix != 0
    starts = np.cumsum([0, *entries.sum(axis=1)][:-1], dtype=np.int32)
    columns = entries.nonzero()[1].astype(np.int32)
    limits = np.array(least), np.array(most)
    status = program.addRows(height, *limits, len(columns), starts, columns, matrix[entries])
    if status.name == "kError" or not np.isfinite(matrix).all():
        raise PlanError("no plan can be made: the profile has times or sizes out of all range")
    return program


def least(program: Any, cost: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The columns with the least `cost`; None if no columns satisfy all rows, or if rounding decides whether any do. A
    solution before is the beginning."""
    program.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    program.run()
    if not is_solved(program):
        program.clearSolver()  # one in 2000 fails from the solution before, and few of these from nothing
        program.run()
    return np.array(program.getSolution().col_value) if is_solved(program) else None


def is_solved(program: Any) -> bool:
    """Whether the last run found the best solution."""
    return program.modelStatusToString(program.getModelStatus()) == "Optimal"
