"""Recipes on the regions of a model: whatever is kept, moved or run again, the numbers are the plain run's."""

import pytest
import torch
from cases import Transformer, make
from support import assert_equal
from test_offload import CPU, offload, three_steps

import ebbtide
from ebbtide import Recipe
from ebbtide.types import Reason

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


def test_recipes_change_between_steps_without_applying_anything_again():
    plain = make(Transformer, CPU)
    model = make(Transformer, CPU)
    handle = offload(model)
    for recipe in [*RECIPES.values(), None]:
        handle.set_recipe(recipe)
        assert_equal(three_steps(model), three_steps(plain))
    assert list(handle.recipes) == []


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[str(op)] = self.calls.get(str(op), 0) + 1
        return op(*args, **(kwargs or {}))


def matmuls_in_backward(recipe):
    """How many products a step's backward runs in its third step, and how many the plain one does."""
    counts = []
    for handle_recipe in (recipe, None):
        model = make(Transformer, CPU)
        offload(model, recipe=handle_recipe)
        three_steps(model)
        loss = model(torch.zeros(2, 8, dtype=torch.long))
        with Counting() as counting:
            loss.backward()
        counts.append(
            sum(
                n
                for op, n in counting.calls.items()
                if op in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
            )
        )
    return counts


def test_dear_operators_do_not_run_again():
    recomputed, plain = matmuls_in_backward("recompute")
    selective, _ = matmuls_in_backward("selective")
    assert selective == plain
    assert recomputed == plain + 3 * 5  # a block's last product is not needed again


def test_what_the_second_run_never_asks_for_is_no_longer_held():
    model = make(Transformer, CPU)
    handle = offload(model, recipe="selective")
    three_steps(model)
    dropped = handle.stats().dropped.count
    assert dropped == 3 * 2  # the last product of each block, from the second step on
