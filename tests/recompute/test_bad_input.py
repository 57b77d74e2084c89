"""Invalid recipes: errors name the finding and the remedy, and change nothing."""

import pytest
import torch
from cases import Transformer, make, tokens
from recipe_cases import Simple
from support import HandleRig
from torch import nn

import ebbtide
from ebbtide import ConfigError, ModuleError, Recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


@pytest.mark.parametrize(
    ("make_recipe", "message"),
    [
        (lambda: Recipe("recomput"), r"action='recomput': write one of 'keep', 'offload', 'recompute', 'selective'"),
        (lambda: Recipe("recompute", inputs="move"), r"inputs='move': write one of 'keep', 'offload'"),
        (lambda: Recipe("selective", outputs="recompute"), r"outputs='recompute': write one of"),
        (
            lambda: Recipe("selective", ops=("matmull",)),
            r"'matmull' is not a class of operators: write one of 'attention'",
        ),
        (lambda: Recipe("selective", ops="gemm@mlp"), "'gemm@mlp' is not a class of operators"),
        (lambda: Recipe("selective", ops=("matmul@",)), "'matmul@' is not a class of operators"),
        (lambda: Recipe("selective", ops=(3,)), "3 is neither a class of operators nor a predicate"),
        (lambda: Recipe("selective", ops=()), r"write Recipe\('recompute'\)"),
        (lambda: Recipe("recompute", sites=(1,)), "'recompute' has none"),
        (lambda: Recipe("keep", sites=(1,)), "'keep' has none"),
        (lambda: Recipe("offload", sites=(-1,)), r"sites=\(-1,\): expected the indices"),
        (lambda: Recipe("selective", sites=(True,)), "expected the indices"),
        (lambda: Recipe("offload", sites=("0",)), "expected the indices"),
        (lambda: Recipe("offload", sites=3), "sites=3: expected a list or a tuple"),
        (lambda: Recipe("selective", ops=None), "ops=None: expected a list or a tuple"),
        (lambda: Recipe("keep", inputs="keep"), "inputs='keep' means nothing to the recipe 'keep'"),
        (lambda: Recipe("offload", outputs="keep"), "outputs='keep' means nothing to the recipe 'offload'"),
        (lambda: Recipe("recompute", ops=("matmul",)), r"ops=\('matmul',\) means nothing to the recipe 'recompute'"),
    ],
)
def test_recipes_that_cannot_be(make_recipe, message):
    with pytest.raises(ConfigError, match=message):
        make_recipe()


BAD = [
    ("recomput", ConfigError, "write one of 'keep', 'offload', 'recompute', 'selective'"),
    (3, ConfigError, "3 is not a recipe"),
    ({"layers.*": None}, ConfigError, "None is not a recipe"),
    ({"layers.*": "recomputed"}, ConfigError, "action='recomputed'"),
    ({"layer.*": "recompute"}, ModuleError, r"recipe='layer\.\*' matches no module.*Near names: 'layers\.\*'"),
    ({"layers.7": "recompute"}, ModuleError, r"'layers\.7' matches no module.*'layers\.\*'"),
    ({nn.Conv2d: "recompute"}, ModuleError, "recipe=Conv2d: Transformer has no module of this class. It has 'Block'"),
    ({Transformer: "recompute"}, ModuleError, "means Transformer itself"),
    ({"": "recompute"}, ModuleError, "means Transformer itself"),
    ({"layers.*": Recipe("selective", ops=("matmul@mpl",))}, ModuleError, r"the recipe of layers\.0: @='mpl'.*'mlp'"),
]


@pytest.mark.parametrize(("recipe", "kind", "message"), BAD)
def test_offload_refuses_and_leaves_the_model_alone(recipe, kind, message):
    model = make(Transformer, CPU)
    with pytest.raises(kind, match=message):
        ebbtide.offload(model, store="mock", recipe=recipe)
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    ebbtide.offload(model, store="mock", recipe="recompute").remove()


@pytest.mark.parametrize(("recipe", "kind", "message"), BAD)
def test_set_recipe_refuses_and_changes_nothing(recipe, kind, message):
    model = make(Transformer, CPU)
    handle = ebbtide.offload(model, store="mock", window=1, min_bytes=1, recipe={"layers.1": "recompute"})
    before, regions = handle.recipes, dict(handle.regions)
    with pytest.raises(kind, match=message):
        handle.set_recipe(recipe)
    assert handle.recipes == before
    assert handle.regions == regions
    model(tokens(CPU)).backward()
    assert handle.stats().recomputed.count > 0


def test_no_blocks_to_give_one_recipe_to():
    with pytest.raises(ModuleError, match=r"Simple has no repeated blocks.*recipe=\{'encoder': 'recompute', ...\}"):
        ebbtide.offload(Simple(), store="mock", recipe="recompute")


def test_not_together_with_keep_last():
    with pytest.raises(ConfigError, match="keep_last= and recipe= both say"):
        ebbtide.offload(make(Transformer, CPU), store="mock", recipe="recompute", keep_last=1)


def test_not_on_a_handle_that_does_nothing():
    model = make(Transformer, CPU)
    handle = ebbtide.offload(model, store="mock")
    handle.remove()
    with pytest.raises(ModuleError, match=r"was removed, or has mode='off': apply offload\(\) again"):
        handle.set_recipe("recompute")
    off = ebbtide.offload(model, mode="off")
    with pytest.raises(ModuleError, match="mode='off'"):
        off.set_recipe("recompute")


def test_later_names_override_earlier_ones_and_names_may_mean_new_regions():
    model = make(Transformer, CPU)
    handle = HandleRig().offload(model, {"layers.*": "recompute", "layers.0": "keep", nn.GELU: "offload"})
    recipes = {name: recipe.action for name, recipe in handle.recipes.items()}
    assert recipes == {
        "layers.0": "keep", "layers.1": "recompute", "layers.2": "recompute",
        "layers.0.mlp.2": "offload", "layers.1.mlp.2": "offload", "layers.2.mlp.2": "offload",
    }  # fmt: skip
    assert str(handle.recipes["layers.1"]) == "recompute, inputs offloaded"
