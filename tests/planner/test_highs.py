"""Linear programs in HiGHS: solutions, and programs without one."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from ebbtide import PlanError
from ebbtide._planner import highs

COST = np.array([1.0, 2.0])


def program(least=1.0, most=np.inf, entry=1.0):
    """The sum of two columns between `least` and `most`."""
    return highs.Program(np.array([[entry, 1.0]]), [least], [most])


def test_the_cheapest_columns_are_found_and_nothing_is_printed(capfd):
    own = program()
    assert own.solve(COST).tolist() == [1.0, 0.0]
    assert own.solve(COST[::-1]).tolist() == [0.0, 1.0]  # from the solution before
    own.bound(1, 0.0, 0.25)
    assert own.solve(COST[::-1]).tolist() == [0.75, 0.25]
    assert capfd.readouterr() == ("", "")


def test_no_columns_satisfy_rows_that_contradict():
    own = program(least=-2.0, most=-1.0)
    assert own.solve(COST) is None
    own.bound(0, -5.0, 0.0)
    assert own.solve(COST).tolist() == [-2.0, 0.0]


def test_columns_that_contradict_a_row_are_solved_for_again(monkeypatch):
    own, found = program(), [[0.0, 0.0]]
    honest = own._solver.getSolution

    def solution():
        return SimpleNamespace(col_value=found.pop()) if found else honest()

    monkeypatch.setattr(own._solver, "getSolution", solution)
    assert own.solve(COST).tolist() == [1.0, 0.0]
    assert not found


@pytest.mark.parametrize("entry", [np.nan, np.inf, 1e16])
def test_figures_out_of_range_are_refused(entry):
    with pytest.raises(PlanError, match="out of all range"):
        program(entry=entry)


def test_a_thread_in_which_the_user_has_solved_solves_on():
    def solved():
        users = highs.empty()
        users.setOptionValue("threads", 2)
        users.run()
        return program().solve(COST).tolist()

    with ThreadPoolExecutor(1) as threads:  # HiGHS keeps the number of workers by thread
        assert threads.submit(solved).result() == [1.0, 0.0]
