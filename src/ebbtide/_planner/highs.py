"""Linear programs in HiGHS. Pure."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def empty() -> Any:
    """A `highspy.Highs` without rows and columns, which prints nothing and runs on one core."""
    import highspy

    class Quiet(cast(Any, highspy).Highs):
        def enableCallbacks(self) -> None:  # noqa: N802 (name of HiGHS)
            # 1.16 prints a line when the constructor enables callbacks, before anybody can set an option.
            self.setOptionValue("output_flag", False)

    program = Quiet()
    program.setOptionValue("output_flag", False)
    program.setOptionValue("threads", 1)
    return program


def of_rows(matrix: NDArray[np.float64], least: Sequence[float], most: Sequence[float]) -> Any:
    """A program with columns of at least 0, and rows of `matrix` between `least` and `most`."""
    program, (height, width) = empty(), matrix.shape
    program.addVars(width, np.zeros(width), np.full(width, np.inf))
    entries = matrix != 0
    starts = np.cumsum([0, *entries.sum(axis=1)][:-1], dtype=np.int32)
    columns = entries.nonzero()[1].astype(np.int32)
    program.addRows(height, np.array(least), np.array(most), len(columns), starts, columns, matrix[entries])
    return program


def least(program: Any, cost: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The columns with the least `cost`; None if no columns satisfy all rows. A solution before is the beginning."""
    program.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    program.run()
    return np.array(program.getSolution().col_value) if is_solved(program) else None


def is_solved(program: Any) -> bool:
    """Whether the last run found the best solution."""
    return program.modelStatusToString(program.getModelStatus()) == "Optimal"
