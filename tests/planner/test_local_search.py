"""Small changes on a ladder of budgets: never worse, the same every time, whatever was asked before."""

import pytest
from planner.workloads import GIB, workload_a

from ebbtide._planner.solve import Solver


@pytest.fixture(scope="module")
def step():
    return workload_a()


def rungs(step):
    solver = Solver(step)
    low = solver.smallest_budget()
    return [low + k * GIB for k in range(0, 12, 3)]


def test_polished_plans_are_faster_than_what_counting_proposes(step, monkeypatch):
    ours = [Solver(step).solve(budget).predicted.step_s for budget in rungs(step)]
    monkeypatch.setattr("ebbtide._planner.local_search.BudgetGrid.up_to", lambda self, budget: [])
    counted = [Solver(step).solve(budget).predicted.step_s for budget in rungs(step)]
    assert all(mine <= plain for mine, plain in zip(ours, counted, strict=True))
    assert sum(ours) < sum(counted)


def test_what_was_asked_before_changes_nothing(step):
    budgets = rungs(step)
    upwards, downwards = Solver(step), Solver(step)
    first = [str(upwards.solve(budget)) for budget in budgets]
    second = [str(downwards.solve(budget)) for budget in reversed(budgets)]
    assert first == second[::-1]


def test_more_memory_is_never_slower(step):
    solver = Solver(step)
    low = solver.smallest_budget()
    seconds = [solver.solve(low + k * GIB // 3).predicted.step_s for k in range(40)]
    assert seconds == sorted(seconds, reverse=True)
