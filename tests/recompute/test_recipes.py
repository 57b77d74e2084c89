"""Recipes on the regions of a model: kept, moved or recomputed, results equal the plain run's."""

import pytest
import torch
from cases import Transformer, make
from support import OperatorNames, assert_equal
from test_offload import CPU, offload, three_steps

import ebbtide
from ebbtide import Recipe
from ebbtide._types import Reason

RECIPES = {
    "keep": "keep",
    "offload": "offload",
    "offload two sites": Recipe("offload", sites=(1, 4)),
    "recompute": "recompute",
    "recompute, inputs kept": Recipe("recompute", inputs="keep"),
    "selective": "selective",
    "selective, outputs kept": Recipe("selective", outputs="keep"),
    "selective, all kept": Recipe("selective", inputs="keep", outputs="keep"),
    "selective inside": Recipe("selective", ops=("matmul@mlp",)),
    "selective, every operator": Recipe("selective", ops=(lambda op, *args, **kwargs: True,)),
    "selective, some calls": Recipe("selective", sites=(0, 2)),
    "mixture": {"layers.*": "recompute", "layers.0": "keep", "layers.1": Recipe("offload", sites=(0, 2, 3))},
    "recompute in recompute": {"layers.*": "recompute", "layers.*.mlp": "recompute"},
    "selective in selective": {"layers.*": "selective", "layers.1.mlp": "selective"},
    "selective in recompute": {"layers.*": "recompute", "layers.*.mlp": "selective"},
    "offload in recompute": {"layers.*": "recompute", "layers.*.mlp": "offload"},
    "recompute in offload": {"layers.*": "offload", "layers.*.mlp": "recompute"},
}


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps_equal_the_plain_run(name):
    model = make(Transformer, CPU)
    handle = offload(model, recipe=RECIPES[name])
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    stats = handle.stats()
    assert stats.host_bytes == 0
    assert stats.unable == {}
    assert (stats.recomputed.count > 0) == ("recompute" in name or "selective" in name or name == "mixture")
    assert (Reason.RECIPE in stats.kept) == ("kept" in name or name in ("keep", "offload two sites", "mixture"))


def test_recipes_change_between_steps_without_a_new_handle():
    plain = make(Transformer, CPU)
    model = make(Transformer, CPU)
    handle = offload(model)
    for recipe in [*RECIPES.values(), None]:
        handle.set_recipe(recipe)
        assert_equal(three_steps(model), three_steps(plain))
    assert list(handle.recipes) == []


def matmuls_in_backward(recipe):
    """Number of products in the backward of the third step, and of the plain one."""
    counts = []
    for handle_recipe in (recipe, None):
        model = make(Transformer, CPU)
        offload(model, recipe=handle_recipe)
        three_steps(model)
        loss = model(torch.zeros(2, 8, dtype=torch.long))
        with OperatorNames() as counting:
            loss.backward()
        counts.append(sum(counting.names.count(f"aten::{product}") for product in ("mm", "addmm", "bmm")))
    return counts


def test_expensive_operators_are_not_recomputed():
    recomputed, plain = matmuls_in_backward("recompute")
    selective, _ = matmuls_in_backward("selective")
    assert selective == plain
    assert recomputed == plain + 3 * 5  # recomputation stops before a block's last product


def test_outputs_unused_in_recomputation_are_no_longer_saved():
    model = make(Transformer, CPU)
    handle = offload(model, recipe="selective")
    three_steps(model)
    dropped = handle.stats().dropped.count
    assert dropped == 3 * 2  # the last product of each block, from the second step on


def test_profilers_see_recomputations_by_region():
    model = make(Transformer, CPU)
    offload(model, recipe={"layers.0": "recompute", "layers.2": "selective"})
    loss = model(torch.zeros(2, 8, dtype=torch.long))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    names = [event.name for event in profiler.events() if event.name.startswith("ebbtide::recompute")]
    assert sorted(names) == ["ebbtide::recompute layers.0", "ebbtide::recompute layers.2"]
