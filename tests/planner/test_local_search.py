"""Local search on a grid of budgets: never worse, and the same in every run and order of requests."""

import pytest
from planner.workloads import GIB, workload_a

from ebbtide._planner.solve import Solver


@pytest.fixture(scope="module")
def step():
    return workload_a()


def some_budgets(step):
    solver = Solver(step)
    low = solver.smallest_budget()
    return [low + k * GIB for k in range(0, 12, 3)]


@pytest.mark.long(cases=0)
def test_local_search_is_faster_than_the_relaxation_alone(step, monkeypatch):
    ours = [Solver(step).solve(budget).predicted.step_s for budget in some_budgets(step)]
    monkeypatch.setattr("ebbtide._planner.local_search.BudgetGrid.up_to", lambda self, budget: [])
    proposed = [Solver(step).solve(budget).predicted.step_s for budget in some_budgets(step)]
    assert all(mine <= plain for mine, plain in zip(ours, proposed, strict=True))
    assert sum(ours) < sum(proposed)


def test_earlier_requests_change_nothing(step):
    budgets = some_budgets(step)
    upwards, downwards = Solver(step), Solver(step)
    first = [str(upwards.solve(budget)) for budget in budgets]
    second = [str(downwards.solve(budget)) for budget in reversed(budgets)]
    assert first == second[::-1]


def test_more_memory_is_never_slower(step):
    solver = Solver(step)
    low = solver.smallest_budget()
    seconds = [solver.solve(low + k * GIB // 3).predicted.step_s for k in range(40)]
    assert seconds == sorted(seconds, reverse=True)
