"""From compiled blocks to a plan with activation memory budgets: which steps are measured, and what compiles when."""

import logging

import pytest
import torch
from cases import make, tokens
from recompute.test_partitions import SPELLINGS, WHOLE, Breaks, Counting, Tower, compiled_as_a_whole
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
    assert backend.budgets == [1.0, *BUDGETS]
    for region in handle.profile.regions:
        if region.name.startswith("layers."):
            assert [each.activation_memory_budget for each in region.points] == BUDGETS
            saved = [each.saved_bytes for each in (region, *region.points)]
            assert saved == sorted(saved, reverse=True)
            assert saved[0] > saved[1] > saved[-1]
    messages = [record.getMessage() for record in caplog.records]
    assert "compiling variants beside the user's own: 4, for 3 regions" in messages
    assert any(message.startswith("compiled variants so far: 4, in ") for message in messages)
    assert "no plan yet: measuring step 9 of 9" in messages
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(12):
            step(model, number)
    assert backend.budgets == [1.0, *BUDGETS]


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
    assert [len(region.points) for region in profile.regions] == [len(BUDGETS)] * 3


# -- a model compiled as a whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", [{"max_slowdown": 0.5}, {"budget": "64GiB", "max_slowdown": None}])
@pytest.mark.parametrize("how", SPELLINGS)
def test_a_model_compiled_as_a_whole_is_planned_over_its_partitions(how, goal, caplog):
    backend = Counting()
    with caplog.at_level(logging.INFO, "ebbtide"):
        call, model, handle = compiled_as_a_whole(how, backend, lambda module: offload(module, **goal))
        losses = [run(call, model, number)[0] for number in range(20)]
        assert not handle.plan.status
    (region,) = handle.profile.regions
    assert region.name == WHOLE
    assert region.budgets == BUDGETS
    saved = [each.saved_bytes for each in (region, *region.points)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[-1]
    # Compiled before ebbtide saw the compiler, in the last spelling, and once at each budget.
    first = [1.0] if how == "offload, model.compile" else []
    assert backend.budgets == [*first, 1.0, *BUDGETS]
    messages = [record.getMessage() for record in caplog.records]
    said = "Tower is compiled as a whole and planned as one region"
    assert [message.partition(":")[0] for message in messages].count(said) == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses += [run(call, model, number)[0] for number in range(20, 30)]
    assert backend.budgets == [*first, 1.0, *BUDGETS]
    plain, twin, _ = compiled_as_a_whole("model.compile", "aot_eager")
    assert_equal(losses, [run(plain, twin, number)[0] for number in range(30)])


def run(call, model, number):
    model.zero_grad()
    loss = call(tokens(CPU, number))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_planned_steps_equal_the_whole_model_at_the_same_partition():
    call, model, handle = compiled_as_a_whole("offload(torch.compile)", "aot_eager", offload)
    for number in range(20):
        run(call, model, number)
    assert not handle.plan.status
    for action in ("keep", "offload"):
        for budget in BUDGETS:
            handle.set_recipe({WHOLE: Recipe(action, activation_memory_budget=budget)})
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = run(call, model, 0)
                for _ in range(5):
                    assert_equal(run(call, model, 0), found)
            with config.patch("activation_memory_budget", budget):
                plain, twin, _ = compiled_as_a_whole("model.compile", "aot_eager")
                assert_equal(found, run(plain, twin, 0))


def test_a_plan_for_the_whole_model_is_saved_and_followed(tmp_path):
    model, backend = make(Tower, CPU), Counting()
    path = tmp_path / "profile.json"
    handle = offload(torch.compile(model, backend=backend), profile=path, budget="64GiB", max_slowdown=None)
    for number in range(20):
        run(handle._attachment.module, model, number)
    handle.plan.save(tmp_path / "plan.json")
    plan = ebbtide.Plan.load(tmp_path / "plan.json")
    assert list(plan.regions) == [WHOLE]
    for settings in ({"profile": path, "budget": "64GiB"}, {"plan": plan}):
        again = torch.compile(make(Tower, CPU), backend=backend)
        handle = ebbtide.offload(again, store="mock", min_bytes=1, **settings)
        assert not handle.plan.status
        assert list(handle.plan.regions) == [WHOLE]
        assert_equal(run(again, again, 3), step(make(Tower, CPU), 3))


@pytest.mark.parametrize("how", SPELLINGS)
def test_regions_inside_of_the_one_graph_are_refused(how):
    message = "regions= names 3 modules .*, and Tower is compiled as a whole.*leave regions= out"
    with pytest.raises(ebbtide.PlanError, match=message):
        call, model, _ = compiled_as_a_whole(how, "aot_eager", lambda module: offload(module, regions="layers.*"))
        for number in range(2):
            run(call, model, number)


def test_a_model_without_blocks_is_planned_as_a_whole():
    model = make(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), CPU)
    backend = Counting()
    model.compile(backend=backend)
    handle = offload(model)
    for _ in range(20):
        model(torch.ones(4, 16)).sum().backward()
    assert not handle.plan.status
    assert [region.name for region in handle.profile.regions] == [WHOLE]
