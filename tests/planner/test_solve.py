"""Plans: they hold their budget, nothing that could be tried is faster, and more memory never costs time."""

import pytest
from planner.workloads import GIB, layers, profile, workload_a

from ebbtide import PlanError
from ebbtide.planner.solve import Solver, smallest_budget, solve


def test_with_room_for_all_nothing_moves():
    small = profile(*layers(3))
    plan = solve(small, 10 * GIB)
    assert {region.recipe.action for region in plan.regions.values()} == {"keep"}
    assert plan.predicted.step_s == pytest.approx(small.plain_s)
    assert plan.predicted.moved_bytes == 0


def test_below_the_smallest_budget_it_says_what_holds_it():
    small = profile(*layers(3))
    least = smallest_budget(small)
    assert solve(small, least).predicted.peak_bytes <= least
    with pytest.raises(PlanError, match=r"smallest budget .* held by: parameters .* Write budget='1.2GiB'"):
        solve(small, least - 1)


def test_on_a_long_model_it_comes_close_to_the_bound():
    solver = Solver(workload_a())
    for budget_gib in (13.5, 23, 30):
        predicted = solver.solve(int(budget_gib * GIB)).predicted
        assert predicted.peak_bytes <= budget_gib * GIB
        assert predicted.step_s < 1.01 * predicted.bound_s
