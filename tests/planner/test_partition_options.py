"""Points of a compiled region's partitioner as options, and in plans."""

from dataclasses import replace

import pytest
from planner.workloads import MS, layers, profile, region

from ebbtide._planner.options import describe, launch_overhead_s, option_for, options_of
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Host, HostTime, Profile, SavedTensor

MB = 1_000_000


def point(budget, saved_bytes, seconds, own=None):
    tensors = (SavedTensor(0, saved_bytes // 4, 10 * MS), SavedTensor(1, saved_bytes - saved_bytes // 4, 10 * MS))
    return replace(
        region() if own is None else own,
        saved_tensors=tensors,
        expensive_ops=(),
        backward_work_bytes=saved_bytes + 50 * MB,
        activation_memory_budget=budget,
        partition_s=seconds,
    )


POINTS = (point(0.5, 150 * MB, 2 * MS), point(0.2, 60 * MB, 5 * MS), point(0.0, 20 * MB, 9 * MS))


def compiled(*points, **changes):
    return region(points=points or POINTS, expensive_ops=(), **changes)


def budgets(each, **settings):
    found = (option.recipe.activation_memory_budget for option in options_of(each, **settings))
    return sorted({budget for budget in found if budget is not None})


def test_each_point_keeps_or_moves_what_it_saves():
    options = [option for option in options_of(compiled()) if option.recipe.activation_memory_budget == 0.2]
    kept, *moving = options
    assert kept.recipe == Recipe("keep", activation_memory_budget=0.2)
    assert (kept.kept_bytes, kept.moved_bytes, kept.recompute_s) == (60 * MB, 0, 5 * MS)
    assert [(option.kept_bytes, option.moved_bytes) for option in moving] == [(15 * MB, 45 * MB), (0, 60 * MB)]
    assert {option.recipe.action for option in moving} == {"offload"}
    assert {option.recompute_s for option in moving} == {5 * MS}
    assert [option.recipe.sites for option in moving] == [(1,), None]


def test_the_cost_of_a_recipe_is_of_its_point():
    for option in options_of(compiled()):
        assert option_for(compiled(), option.recipe) == option


def test_points_that_mixtures_beat_are_no_options():
    assert budgets(compiled()) == [0.0, 0.2, 0.5]
    above = point(0.2, 60 * MB, 8 * MS)  # a mixture of the points beside takes 6.8 ms for as many bytes
    assert budgets(compiled(POINTS[0], above, POINTS[2])) == [0.0, 0.5]
    slower = point(0.5, 400 * MB, 2 * MS)  # more than the region as the user compiled it saves
    assert budgets(compiled(slower, *POINTS[1:])) == [0.0, 0.2]
    free = point(0.0, 20 * MB, 0.0)
    assert budgets(compiled(*POINTS[:2], free)) == [0.0]


def test_nothing_recomputes_where_plans_only_move():
    assert budgets(compiled(), only_moves=True) == []
    step = profile(*(compiled(name=f"layers.{k}") for k in range(4)))
    plan = Solver(step).solve(None)
    assert all(each.recipe.activation_memory_budget is None for each in plan.regions.values())


def test_a_kept_point_costs_the_host_nothing_more():
    host = Host((HostTime(MS, MS, MS, 10, 10),), 0.0, 0.0, 0.0, 0.0, 0.0, MS, MS, MS, MS, hook_s=MS)
    kept = option_for(compiled(), Recipe("keep", activation_memory_budget=0.2))
    assert launch_overhead_s(kept, host, host.regions[0]) == 0.0
    assert not kept.recipe.keeps_all


def test_the_description_names_what_is_freed_and_its_price():
    moved = option_for(compiled(), Recipe("offload", activation_memory_budget=0.2))
    text = describe(moved, compiled())
    assert text == "228.88 MiB freed for 5.0 ms in the compiled backward, the link carries 57.22 MiB"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_plans_mix_points_and_are_faster_than_without(share):
    def step(points):
        own = layers(8, expensive_ops=(), recompute_s=15 * MS)
        return profile(*(replace(each, points=tuple(replace(p, name=each.name) for p in points)) for each in own))

    with_points, without = Solver(step(POINTS)), Solver(step(()))
    low, high = without.smallest_budget(), without.keeping_all().predicted.peak_bytes
    budget_bytes = int(low + share * (high - low))
    plan = with_points.solve(budget_bytes)
    assert plan.predicted.peak_bytes <= budget_bytes
    assert plan.predicted.step_s < without.solve(budget_bytes).predicted.step_s
    chosen = {each.recipe.activation_memory_budget for each in plan.regions.values()}
    assert chosen - {None}


def test_a_profile_with_points_is_saved_scaled_and_loaded(tmp_path):
    step = profile(compiled())
    step.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == step
    half = step.scaled(500).regions[0].at(0.2)
    assert (half.saved_bytes, half.partition_s) == (30 * MB, 2.5 * MS)
    assert step.at_speed(2.0).regions[0].at(0.2).partition_s == 10 * MS


def test_a_region_called_twice_has_the_points_of_both_calls():
    twice = profile(compiled(), compiled(*POINTS[:2]))
    plan = Solver(twice).solve(Solver(twice).smallest_budget())
    assert plan.regions["layers.0"].recipe.activation_memory_budget in (None, 0.5, 0.2)
