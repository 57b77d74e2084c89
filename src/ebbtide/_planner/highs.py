"""Linear programs in HiGHS. Pure."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_REFUSED = "HiGHS refuses a program of the planner: the profile has times or sizes out of all range"


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
    """A program with columns of at least 0, and rows of `matrix` between `least` and `most`. Raises ValueError."""
    program, (height, width) = empty(), matrix.shape
    _check(program.addVars(width, np.zeros(width), np.full(width, np.inf)))
    if not np.isfinite(matrix).all():
        raise ValueError(_REFUSED)
    entries = matrix != 0
    starts = np.cumsum([0, *entries.sum(axis=1)][:-1], dtype=np.int32)
    columns = entries.nonzero()[1].astype(np.int32)
    limits = np.array(least), np.array(most)
    _check(program.addRows(height, *limits, len(columns), starts, columns, matrix[entries]))
    return program


def least(program: Any, cost: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The columns with the least `cost`; None if no columns satisfy all rows. A solution before is the beginning."""
    _check(program.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost))
    program.run()
    if _status(program) not in ("Optimal", "Infeasible"):
        program.clearSolver()  # one in 2000 fails from the solution before, and few of these from nothing
        _check(program.run())
    return np.array(program.getSolution().col_value) if is_solved(program) else None


def is_solved(program: Any) -> bool:
    """Whether the last run found the best solution; False if no columns satisfy all rows, or if rounding decides
    whether any do ("Unknown"). Raises ValueError."""
    status = _status(program)
    if status not in ("Optimal", "Infeasible", "Unknown"):
        raise ValueError(f"HiGHS did not solve a program of the planner: {status}")
    return status == "Optimal"


def _status(program: Any) -> str:
    return program.modelStatusToString(program.getModelStatus())


def _check(status: Any) -> None:
    if status.name == "kError":
        raise ValueError(_REFUSED)
