"""Recipes and torch.compile: around compiled blocks, in the compiler's partition, and in one graph of all blocks."""

import pytest
import torch
from cases import finish, make, tokens
from support import assert_equal
from test_compile import BACKENDS, CPU, Tower, check_no_graph_break, compile_blocks, offload, train
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import Recipe
from ebbtide._types import Reason

# The compiler warns about internal actions, and torch about traced checkpoints with a policy.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

RECIPES = {
    "keep": "keep",
    "offload": "offload",
    "recompute": "recompute",
    "recompute, inputs kept": Recipe("recompute", inputs="keep"),
    "selective": "selective",
    "selective, outputs kept": Recipe("selective", outputs="keep"),
    "selective, inputs kept": Recipe("selective", inputs="keep"),
    "mixture": {"layers.*": "selective", "layers.0": "recompute", "layers.2": "keep"},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    ebbtide.release_memory()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RECIPES)
def test_blocks_compiled_one_by_one(backend, name):
    plain = make(Tower, CPU)
    compile_blocks(plain, backend)
    expected = train(plain)
    torch._dynamo.reset()

    model = make(Tower, CPU)
    compile_blocks(model, backend)
    handle = offload(model, recipe=RECIPES[name])
    assert_equal(train(model), expected)
    check_no_graph_break()
    stats = handle.stats()
    assert stats.unable == {}
    assert stats.host_bytes == 0
    assert (Reason.RECIPE in stats.kept) == ("kept" in name or name in ("keep", "mixture"))
    if name != "keep":
        assert stats.inbound.count > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_one_graph_of_all_blocks_is_partitioned_by_the_recipes(backend, recipe):
    plain = make(Tower, CPU)
    plain.compile(backend=backend, fullgraph=True)
    expected = train(plain)
    torch._dynamo.reset()

    moved = []
    for choice in (recipe, None):
        model = make(Tower, CPU)
        model.compile(backend=backend, fullgraph=True)
        handle = offload(model, recipe=choice)
        with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger than its blocks"):
            assert_equal(train(model), expected)
        check_no_graph_break()
        moved.append(handle.stats().parcels.nbytes)
        torch._dynamo.reset()
    assert moved[0] < moved[1]


def test_recipes_change_between_steps():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    plain = make(Tower, CPU)
    compile_blocks(plain, "aot_eager")
    handle = offload(model)
    for recipe in [*RECIPES.values(), None]:
        handle.set_recipe(recipe)
        assert_equal(train(model), train(plain))


class Wide(nn.Module):
    """Two products, each of them needed in a checkpoint's recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.second(functional.gelu(self.first(x)))).exp()


class WideTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_limited_to_modules_in_a_compiled_block(backend):
    saved_tensors = {}
    for name in ("attention", "matmul@first", "matmul@second", "matmul"):
        torch._dynamo.reset()
        model = make(WideTower, CPU)
        compile_blocks(model, backend)
        handle = offload(model, recipe=Recipe("selective", ops=name))
        finish(model(tokens(CPU)), model)
        stats = handle.stats()
        saved_tensors[name] = stats.parcels.count + stats.shared.count
    assert saved_tensors["matmul@first"] == saved_tensors["matmul@second"] == saved_tensors["attention"] + 3
    assert saved_tensors["matmul"] == saved_tensors["attention"] + 6


def test_numbered_calls_are_refused_in_a_compiled_block():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    offload(model, recipe=Recipe("selective", sites=(0,)))
    with pytest.raises(ebbtide.ModuleError, match="this region is compiled: choose with ops="):
        model(tokens(CPU))


def steps_under_compiled_autograd(model, backend="eager"):
    compile_blocks(model, "aot_eager")
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        return train(model)


@pytest.fixture(scope="module")
def plain_steps_under_compiled_autograd():
    found = steps_under_compiled_autograd(make(Tower, CPU))
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("keep", "eager"),
        ("offload", "aot_eager"),
        ("recompute", "eager"),
        ("selective", "eager"),
        ("at a budget", "eager"),
    ],
)
def test_compiled_autograd_runs_backward(name, backend, plain_steps_under_compiled_autograd):
    model = make(Tower, CPU)
    handle = offload(model, recipe=Recipe("offload", activation_memory_budget=0.5) if "budget" in name else name)
    assert_equal(steps_under_compiled_autograd(model, backend), plain_steps_under_compiled_autograd)
    assert (handle.stats().recomputed.count > 0) == (name == "recompute")


def test_no_plan_is_made_under_compiled_autograd():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = ebbtide.offload(model, store="mock", min_bytes=1, budget="64GiB")
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.warns(ebbtide.EbbtideWarning, match=r"no plan was made: .*compiled autograd.*recomputed.*\(recipe=\)"),
    ):
        train(model)
    assert handle.plan.status.startswith("no plan: training keeps its first recipes")
    assert handle.stats().recomputed.count > 0


def test_a_plan_is_made_beside_a_model_under_compiled_autograd():
    other, model = make(Tower, CPU), make(Tower, CPU)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        train(other)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, budget="64GiB")
    model(tokens(CPU))  # a forward without a backward
    train(model)
    train(model)
    assert handle.plan.status == ""
    assert handle.plan.predicted is not None


def test_recipes_of_whole_blocks_share_a_graph():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = offload(model, recipe="recompute")
    train(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for recipe in ("keep", "offload", "recompute"):
            handle.set_recipe(recipe)
            train(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
