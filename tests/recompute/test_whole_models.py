"""Whole models with random weights under recipes: three steps equal three plain ones, bit for bit."""

import pytest
import torch
from cases import make
from recipe_cases import EVERY
from support import HandleRig, assert_equal
from test_models import WORKLOADS, Workload, _language_loss, three_steps

from ebbtide import Recipe, RecomputeError

CPU = torch.device("cpu")

# transformers and torch warn about their own code.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


def _bert():
    transformers = pytest.importorskip("transformers")
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def _qwen_moe():
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
            max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


MODELS = {
    **{name: work for name, work in WORKLOADS.items() if work.regions},
    "BERT": Workload(_bert, _language_loss, 2),
    "Qwen-MoE": Workload(_qwen_moe, _language_loss, 2),
}
RECIPES = {
    "recompute": "recompute",
    "selective": Recipe("selective", ops=("attention", "matmul", "convolution", "grouped_matmul")),
    "every operator, kept": Recipe("selective", outputs="keep", ops=EVERY.ops),
}


@pytest.fixture(scope="module")
def plain():
    runs = {}

    def run(name):
        if name not in runs:
            work = MODELS[name]
            runs[name] = three_steps(work, make(work.make, CPU))
        return runs[name]

    return run


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_recipes(name, recipe, plain):
    work = MODELS[name]
    model = make(work.make, CPU)
    rig = HandleRig()
    handle = rig.offload(model, RECIPES[recipe])
    assert_equal(three_steps(work, model), plain(name))
    stats = handle.stats()
    assert len(handle.recipes) == work.regions
    assert stats.recomputed.count > 0
    assert stats.unable == {}
    rig.check_at_rest()


@pytest.mark.filterwarnings("ignore::ebbtide.EbbtideWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_with_the_models_own_checkpointing(use_reentrant, order, plain):
    """The order of the two contexts depends on the version of transformers; results do not."""
    work = MODELS["Llama"]
    model = make(work.make, CPU)
    rig = HandleRig()
    handle = rig.offload(model, "recompute") if order == "after" else None
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    handle = handle or rig.offload(model, "recompute")
    assert_equal(three_steps(work, model), plain("Llama"))
    stats = handle.stats()
    was_unable = sum(stats.unable.values())
    assert was_unable == 3 * 3 or (was_unable == 0 and stats.recomputed.count > 0)
    rig.check_at_rest()


def test_a_cache_that_the_blocks_append_to_is_an_error():
    model = make(MODELS["Llama"].make, CPU)
    HandleRig().offload(model, "recompute")
    batch = torch.randint(64, (2, 16))
    loss = model(input_ids=batch, labels=batch, use_cache=True).loss
    with pytest.raises(RecomputeError, match="a cache it appends to"):
        loss.backward()
