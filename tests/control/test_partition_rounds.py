"""From compiled blocks to a plan with activation memory budgets: which steps are measured, and what compiles when."""

import logging

import pytest
import torch
from cases import make, tokens
from recompute.test_partitions import Breaks, Counting, Tower
from support import assert_equal
from test_compile import CPU, compile_blocks, train
from torch import nn
from torch._functorch import config

import ebbtide
from ebbtide import Recipe
from ebbtide._dry_run import measure
from ebbtide._planner.thresholds import THRESHOLDS

# The compiler warns about its own work.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

BUDGETS = list(THRESHOLDS.partitions)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert config.activation_memory_budget == 1.0
    torch._dynamo.reset()
    ebbtide.release_memory()


def offload(model, **settings):
    return ebbtide.offload(model, store="mock", min_bytes=1, **{"max_slowdown": 0.5, **settings})


def step(model, number=0):
    model.zero_grad()
    loss = model(tokens(CPU, number))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def until_planned(model, handle, most=20):
    for count in range(most):
        if not handle.plan.status:
            return count
        step(model)
    raise AssertionError(handle.plan.status)


def test_three_blocks_are_measured_in_two_rounds_and_compile_once_for_each_budget(caplog):
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    handle = offload(model)
    with caplog.at_level(logging.INFO, "ebbtide"):
        count = until_planned(model, handle)
    assert count in (9, 10)  # the plan comes in the forward after the last measured one
    assert backend.budgets == [1.0, 0.5, 0.2, 0.0]
    for region in handle.profile.regions:
        if region.name.startswith("layers."):
            assert [each.activation_memory_budget for each in region.points] == BUDGETS
            saved = [each.saved_bytes for each in (region, *region.points)]
            assert saved == sorted(saved, reverse=True)
            assert saved[0] > saved[1] > saved[-1]
    messages = [record.getMessage() for record in caplog.records]
    assert "compiling 3 variants of 3 blocks, beside the user's own" in messages
    assert any(message.startswith("compiled 3 variants in ") for message in messages)
    assert "no plan yet: measuring step 9 of 9" in messages
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(12):
            step(model, number)
    assert backend.budgets == [1.0, 0.5, 0.2, 0.0]


def test_planned_steps_equal_the_compiled_model_at_the_same_partition():
    """With recipes by hand after the measured steps: the planner's choice depends on the host's clock."""
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = offload(model)
    until_planned(model, handle)
    recipes = {"layers.0": Recipe("offload", activation_memory_budget=0.0), "layers.1": "keep"}
    recipes["layers.2"] = Recipe("keep", activation_memory_budget=0.5)
    handle.remove()
    plain = make(Tower, CPU)
    for layer, budget in zip(plain.layers, (0.0, 1.0, 0.5), strict=True):
        torch._dynamo.reset()
        with config.patch("activation_memory_budget", budget):
            layer.compile(backend="aot_eager")
    expected = train(plain)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, recipe=recipes)
    model.zero_grad()
    assert_equal(train(model), expected)
    first = step(model)
    for _ in range(10):
        assert_equal(step(model), first)


@pytest.mark.parametrize("settings", [{"max_slowdown": None}, {"max_slowdown": None, "mode": "auto"}])
def test_plans_that_only_move_compile_nothing(settings):
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    handle = offload(model, **settings)
    until_planned(model, handle)
    assert backend.budgets == [1.0]
    assert all(not region.points for region in handle.profile.regions)


def test_a_profile_with_points_needs_no_round(tmp_path):
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    path = tmp_path / "profile.json"
    until_planned(model, offload(model, profile=path))
    again = make(Tower, CPU)
    compile_blocks(again, backend)
    handle = offload(again, profile=path)
    assert not handle.plan.status
    assert any(region.points for region in handle.profile.regions)


def test_a_block_that_breaks_into_graphs_has_no_points(caplog):
    class Broken(Tower):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Breaks(16) for _ in range(4))

    model = make(Broken, CPU)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    handle = offload(model)
    with caplog.at_level(logging.INFO, "ebbtide"):
        until_planned(model, handle)
    said = "Breaks is compiled into several graphs: no plan gives it an activation memory budget"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    assert all(not region.points for region in handle.profile.regions)
    assert_equal(step(model), step(make(Broken, CPU)))


def test_a_dry_run_measures_the_points():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    profile = measure(model, tokens(CPU, 0), store="mock", min_bytes=1)
    assert [len(region.points) for region in profile.regions] == [3, 3, 3]
