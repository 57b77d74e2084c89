"""`offload` with a plan: effect on each module, refused plans, and changes of the plan."""

import functools
import re

import pytest
import torch
from cases import Block, Transformer, finish, make, tokens
from support import assert_equal
from test_offload import offload, saved_tensors_of, three_steps
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, ModuleError, Plan, Prediction, Recipe, RegionPlan
from ebbtide._types import Reason

CPU = torch.device("cpu")
LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def regions(recipe, *names):
    return dict.fromkeys(names or LAYERS, RegionPlan(recipe))


PLANS = {
    "nothing": Plan({}),
    "keep": Plan(regions("keep"), outside=RegionPlan("offload")),
    "offload": Plan(regions("offload"), outside=RegionPlan("keep")),
    "recompute": Plan(regions("recompute"), outside=RegionPlan("keep")),
    "selective": Plan(regions("selective")),
    "mixture": Plan(
        {
            "layers.0": RegionPlan(Recipe("offload", sites=(0, 2)), release=((1, 0), (4, 2000)), prefetch_bytes=500),
            "layers.1": RegionPlan(Recipe("selective", inputs="keep"), release=((0, 0),)),
            "layers.2": RegionPlan("recompute", prefetch_bytes=1),
        },
        outside=RegionPlan("offload", release=((0, 1000), (2, 0)), prefetch_bytes=300),
    ),
    "nested": Plan(regions("recompute") | regions("selective", "layers.0.mlp") | regions("keep", "layers.1.mlp")),
    "no blocks": Plan(regions("recompute", "layers.1.mlp", "head") | regions("keep", "embedding")),
}


# -- steps by a plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_three_steps_equal_the_plain_run(name):
    model = make(Transformer, CPU)
    handle = offload(model, plan=PLANS[name])
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    stats = handle.stats()
    recomputes = any(region.recipe.recomputes for region in PLANS[name].regions.values())
    assert (stats.recomputed.count > 0) == recomputes
    assert (stats.host_bytes, stats.unable) == (0, {})


def test_plans_change_between_steps():
    model, plain = make(Transformer, CPU), make(Transformer, CPU)
    handle = offload(model)
    assert handle.plan == Plan({})
    for plan in PLANS.values():
        handle.set_plan(plan)
        assert handle.plan is plan
        assert handle.recipes == {name: region.recipe for name, region in plan.regions.items()}
        assert list(handle.regions) == LAYERS + [name for name in plan.regions if name not in LAYERS]
        assert_equal(three_steps(model), three_steps(plain))


def test_recipes_follow_plans_and_plans_follow_recipes():
    model, plain = make(Transformer, CPU), make(Transformer, CPU)
    handle = offload(model, recipe="recompute")
    assert handle.plan == Plan(regions("recompute"))
    handle.set_plan(PLANS["mixture"])
    assert_equal(three_steps(model), three_steps(plain))
    handle.set_recipe({"head": "keep"})
    assert handle.plan == Plan(regions("keep", "head"))
    assert_equal(three_steps(model), three_steps(plain))
    handle.set_recipe(None)
    assert handle.plan == Plan({})


CALLS = []


class Called(Block):
    def forward(self, x):
        CALLS.append(self.number)
        return super().forward(x)


def called_transformer():
    model = Transformer()
    model.layers = nn.ModuleList(Called(16) for _ in range(3))
    for number, layer in enumerate(model.layers):
        layer.number = number
    return model


@pytest.mark.parametrize("then", PLANS)
@pytest.mark.parametrize("first", PLANS)
def test_a_graph_in_flight_follows_the_plan_of_its_forward(first, then):
    model, twin = make(called_transformer, CPU), make(called_transformer, CPU)
    handle = offload(model, plan=PLANS[first])
    recipes = [PLANS[first].recipe_of(name) for name in LAYERS]
    run_again = [number for number, recipe in enumerate(recipes) if recipe is not None and recipe.recomputes]
    for step in range(2):
        plain = finish(twin(tokens(CPU, step)), twin)
        loss = model(tokens(CPU, step))
        handle.set_plan(PLANS[then])
        CALLS.clear()
        assert_equal(finish(loss, model), plain)
        assert sorted(CALLS) == run_again
        handle.set_plan(PLANS[first])
        model.zero_grad()
        twin.zero_grad()
    assert handle.stats().host_bytes == 0


def test_a_graph_in_flight_runs_backward_after_remove():
    model, twin = make(Transformer, CPU), make(Transformer, CPU)
    handle = offload(model, plan=PLANS["nested"])
    loss = model(tokens(CPU))
    handle.remove()
    assert_equal(finish(loss, model), finish(twin(tokens(CPU)), twin))


# -- refused plans -----------------------------------------------------------------------------------------------------


BAD = [
    (Plan(regions("keep", "layer.0")), ModuleError, r"region 'layer\.0' and Transformer has no module.*'layers\.0'"),
    (Plan(regions("keep", "layers.*")), ModuleError, r"region 'layers\.\*' and Transformer .*'layers\.[012]'"),
    (Plan(regions("keep", "layers.7")), ModuleError, r"region 'layers\.7' .*Near names: 'layers\.\d'"),
    (Plan(regions("keep", "xyzzy")), ModuleError, r"Near names: 'embedding', 'layers', 'layers\.0'.*, \.\.\."),
    (Plan(regions("keep", "")), ModuleError, "which is Transformer itself: regions are modules inside.*outside="),
    (
        Plan(regions("keep") | regions(Recipe("selective", ops=("matmul@mpl",)), "head")),
        ModuleError,
        "the recipe of head: @='mpl' matches no module",
    ),
    ({"layers.0": "keep"}, ConfigError, r"plan=\{'layers\.0': 'keep'\}: expected an ebbtide\.Plan; .*for recipe="),
    ("recompute", ConfigError, r"plan='recompute': expected an ebbtide\.Plan"),
]


@pytest.mark.parametrize(("plan", "kind", "message"), BAD)
def test_offload_refuses_and_leaves_the_model_alone(plan, kind, message):
    model = make(Transformer, CPU)
    with pytest.raises(kind, match=message):
        offload(model, plan=plan)
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    offload(model, plan=PLANS["mixture"]).remove()


@pytest.mark.parametrize(("plan", "kind", "message"), BAD)
def test_set_plan_refuses_and_changes_nothing(plan, kind, message):
    model = make(Transformer, CPU)
    handle = offload(model, plan=PLANS["nested"])
    before = dict(handle.regions)
    with pytest.raises(kind, match=message):
        handle.set_plan(plan)
    assert handle.plan is PLANS["nested"]
    assert handle.regions == before
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    assert handle.stats().recomputed.count > 0


def test_a_plan_and_a_recipe_are_refused():
    model = make(Transformer, CPU)
    with pytest.raises(ConfigError, match="recipe= and plan= both say what is done with the regions: write one"):
        offload(model, recipe="keep", plan=Plan({}))
    assert not model._forward_hooks


def test_a_plan_and_keep_last_are_refused():
    model = make(Transformer, CPU)
    with pytest.raises(ConfigError, match="keep_last= and plan= both say what the last blocks do"):
        offload(model, plan=Plan({}), keep_last=1)
    handle = offload(model, keep_last=1)
    with pytest.raises(ConfigError, match="keep_last= and plan= both say what the last blocks do"):
        handle.set_plan(PLANS["offload"])
    with pytest.raises(ConfigError, match="keep_last= and recipe= both say what the last blocks do"):
        handle.set_recipe("offload")
    handle.set_recipe(None)
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    assert handle.stats().kept[Reason.KEEP_LAST].count > 0


@pytest.mark.parametrize("mode", ["all", "off"])
def test_a_plan_on_a_handle_that_is_off_is_refused(mode):
    model = make(Transformer, CPU)
    handle = offload(model, mode=mode)
    handle.remove()
    with pytest.raises(ModuleError, match=re.escape("set_plan() on a handle that was removed, or has mode='off'")):
        handle.set_plan(PLANS["keep"])
    assert "forward" not in model.layers[0].__dict__


# -- effect on each module ---------------------------------------------------------------------------------------------


def moved_by(plan, **settings):
    """Counts of moved tensors and of tensors kept by a recipe in one forward; backward equals the twin's."""
    model, twin = make(Transformer, CPU), make(Transformer, CPU)
    handle = offload(model, plan=plan, **settings)
    assert_equal(finish(model(tokens(CPU)), model), finish(twin(tokens(CPU)), twin))
    return counts(handle)


def counts(handle):
    stats = handle.stats()
    kept = stats.kept.get(Reason.RECIPE)
    return stats.parcels.count + stats.shared.count, 0 if kept is None else kept.count


@pytest.fixture(scope="module")
def all_and_inside():
    """Counts of movable saved tensors: all, and inside the blocks."""
    return saved_tensors_of()[0], saved_tensors_of(include="layers.*")[0]


@pytest.mark.filterwarnings("ignore::ebbtide.EbbtideWarning")  # one plan keeps all
def test_tensors_outside_stay_or_move(all_and_inside):
    total, inside = all_and_inside
    keep, move = RegionPlan("keep"), RegionPlan("offload")
    assert moved_by(Plan(regions("offload"), outside=keep)) == (inside, total - inside)
    assert moved_by(Plan(regions("offload"), outside=move)) == (total, 0)
    assert moved_by(Plan(regions("keep"), outside=move)) == (total - inside, inside)
    assert moved_by(Plan(regions("keep"), outside=keep)) == (0, total)
    assert moved_by(Plan(regions("keep"))) == (total - inside, inside)


def test_some_tensors_outside_may_move(all_and_inside):
    total, inside = all_and_inside
    several = range(100)
    blocks = regions("offload")
    assert moved_by(Plan(blocks, outside=RegionPlan(Recipe("offload", sites=several)))) == (total, 0)
    moved, kept = zip(
        *(moved_by(Plan(blocks, RegionPlan(Recipe("offload", sites=(k,))))) for k in range(12)), strict=True
    )
    assert sum(moved) == (total - inside) + 12 * inside  # each once
    assert [m + k for m, k in zip(moved, kept, strict=True)] == [total] * 12
    assert moved_by(Plan(blocks, RegionPlan(Recipe("offload", sites=())))) == (inside, total - inside)


@pytest.mark.filterwarnings("ignore::ebbtide.EbbtideWarning")  # one plan keeps all
def test_a_block_missing_from_a_plan_with_outside_is_outside(all_and_inside):
    total, inside = all_and_inside
    keep, move = RegionPlan("keep"), RegionPlan("offload")
    one = inside // 3
    assert moved_by(Plan({})) == (total, 0)
    assert moved_by(Plan({}, outside=keep)) == (0, total)
    assert moved_by(Plan({}, outside=move)) == (total, 0)
    assert moved_by(Plan(regions("offload", "layers.1"), outside=keep)) == (one, total - one)
    assert moved_by(Plan(regions("offload", "layers.0"), outside=keep), include="layers.1")[0] == 2 * one
    assert moved_by(Plan({}, outside=keep), include="layers.*.mlp")[0] == saved_tensors_of(include="layers.*.mlp")[0]


def test_a_planned_part_of_a_block_leaves_the_rest_outside(all_and_inside):
    parts = Plan(regions("offload", "layers.1.mlp"), outside=RegionPlan("keep"))
    assert moved_by(parts)[0] == saved_tensors_of(include="layers.1.mlp")[0]


def test_exclude_overrides_a_plan_with_outside(all_and_inside):
    total, inside = all_and_inside
    one = inside // 3
    plan = Plan(regions("offload"), outside=RegionPlan("offload"))
    assert moved_by(plan, include="layers.1")[0] == total
    assert moved_by(plan, exclude="layers.1")[0] == total - one


@pytest.mark.parametrize(
    "way", [{"recipe": {"layers.1": "keep"}}, {"plan": Plan(regions("keep", "layers.1"))}], ids=["recipe", "plan"]
)
def test_include_does_not_move_a_kept_region(way, all_and_inside):
    _, inside = all_and_inside
    assert saved_tensors_of(include="layers.*", **way)[0] == inside - inside // 3


def test_a_plan_makes_regions_of_modules_that_are_no_blocks():
    model = make(Transformer, CPU)
    handle = offload(model, plan=PLANS["no blocks"])
    assert handle.regions["head"] is model.head
    assert handle.regions["layers.1.mlp"] is model.layers[1].mlp
    seen = set()
    handle.subscribe(lambda event: seen.add(event.site.split("#")[0]))
    three_steps(model)
    assert seen == {"<root>", *LAYERS, "layers.1.mlp", "head"}  # an embedding saves token ids, which stay
    handle.set_plan(Plan({}))
    assert list(handle.regions) == LAYERS


def test_regions_of_former_plans_are_no_regions():
    """Otherwise saved tensors of the region around would have other numbers than after a fresh start."""
    plan = Plan({"layers.0": RegionPlan(Recipe("offload", sites=tuple(range(0, 40, 2))))}, outside=RegionPlan("keep"))
    fresh = moved_by(plan)
    model = make(Transformer, CPU)
    handle = offload(model, plan=Plan(regions("offload", "layers.0.mlp", "layers.0.norm", "head")))
    model(tokens(CPU)).backward()
    handle.set_plan(plan)
    before = counts(handle)
    seen = set()
    handle.subscribe(lambda event: seen.add(event.site.split("#")[0]))
    model(tokens(CPU)).backward()
    assert tuple(now - then for now, then in zip(counts(handle), before, strict=True)) == fresh
    assert seen == {"layers.0"}


@pytest.mark.filterwarnings("ignore::ebbtide.EbbtideWarning")  # one plan keeps all
def test_tensors_saved_after_a_backward_inside_a_region_follow_its_plan():
    class Forces(nn.Module):
        def forward(self, x):
            y = x.sin().cos()
            (force,) = torch.autograd.grad((y * y).exp().sum(), y, create_graph=True)
            return force.sin().cos() + x

    def moved(recipe):
        model = nn.Sequential(Forces(), Forces())
        handle = offload(model, plan=Plan({"0": RegionPlan(recipe), "1": RegionPlan(recipe)}, RegionPlan("keep")))
        results = []
        for net in (model, nn.Sequential(Forces(), Forces())):
            x = torch.linspace(-1, 1, 50).requires_grad_()
            results.append(finish((net(x * 1.5) * 2.0).square().sum(), x))
        assert_equal(*results)
        return counts(handle)

    every, _ = moved("offload")
    none, kept = moved(Recipe("offload", sites=()))
    assert (every > 0, none) == (True, 0)
    assert kept == every


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_wrapper_is_the_region_not_the_wrapped_module():
    model = make(Transformer, CPU)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    model.head = checkpoint_wrapper(model.head)
    handle = offload(model)
    blocks = dict(handle.regions)
    handle.set_plan(Plan(regions("keep") | regions("keep", "head")))
    assert handle.regions == {**blocks, "head": model.head}
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_data_parallel(process_group):
    model = make(Transformer, CPU)
    parallel = nn.parallel.DistributedDataParallel(model)
    handle = offload(parallel, plan=PLANS["nested"])
    assert handle.regions["layers.0.mlp"] is model.layers[0].mlp
    assert_equal(three_steps(model, parallel), three_steps(make(Transformer, CPU)))
    assert handle.stats().recomputed.count > 0
    with pytest.raises(ModuleError, match=r"region 'module\.head' and DistributedDataParallel .*Near names: 'head'"):
        handle.set_plan(Plan(regions("keep", "module.head")))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("sizes", [(32, 16), (0, 0)])
def test_alternating_plans_learn_separate_orders(sizes):
    """The order learned under one plan is not overwritten by another plan, for another batch size or for the same."""
    model = nn.Sequential(nn.ModuleList(Feed() for _ in range(6)))
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model[0], x).square().mean()
    moved = ((0, 1, 3), (0, 2, 3, 4))
    plans = [
        Plan(
            {
                f"0.{k}": RegionPlan(
                    "offload" if k in moved[turn] else ("keep", "recompute")[turn], prefetch_bytes=2**16
                )
                for k in range(6)
            },
            outside=RegionPlan("keep"),
        )
        for turn in range(2)
    ]
    handle = offload(model, plan=plans[0])
    missed = []
    for step in range(8):
        before = handle.stats().misses.count
        handle._attachment.apply_plan(plans[step % 2], sizes[step % 2])
        model(torch.randn((32, 16)[step % 2], 64, requires_grad=True)).backward()
        missed.append(handle.stats().misses.count - before)
    assert missed[-2:] == [0, 0]


# -- plans for another model -------------------------------------------------------------------------------------------

PREDICTED = Prediction(0.1, 0.0, 0.0, 2**30, 0, 0)


def test_a_plan_without_some_blocks_warns_of_another_model():
    made = Plan(regions("offload", "layers.0"), outside=RegionPlan("keep"), predicted=PREDICTED)
    with pytest.warns(EbbtideWarning, match=r"nothing of 2 of 3 repeated blocks of Transformer \(layers.1, layers.2"):
        offload(make(Transformer, CPU), plan=made)


@pytest.mark.parametrize("names", [LAYERS, ["layers.0.mlp", "layers.1", "layers.2.mlp"], ["layers"]])
@pytest.mark.parametrize("predicted", [PREDICTED, None])
def test_a_plan_of_all_blocks_or_of_parts_does_not_warn(names, predicted, recwarn):
    offload(make(Transformer, CPU), plan=Plan(regions("offload", *names), RegionPlan("keep"), predicted=predicted))
    assert not recwarn.list


def test_a_plan_by_hand_may_leave_blocks_out(recwarn):
    offload(make(Transformer, CPU), plan=Plan(regions("offload", "layers.0"), outside=RegionPlan("keep")))
    assert not recwarn.list
