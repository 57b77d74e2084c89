"""Megatron-Core's own transformer with dropout and a tracker of random states; in `make test-trainers`.

The CPU stands in for CUDA: for the state of the default generator, and the device of new tensors.
"""

import contextlib

import pytest
import torch
from support import assert_equal

import ebbtide
from ebbtide import Recipe
from ebbtide._types import Unable

pytest.importorskip("megatron.core", reason="make test-trainers installs it", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

TOKENS, WIDTH, LAYERS, WORDS = 12, 32, 3, 64
MOVES = {"store": "mock", "min_bytes": 1}


@pytest.fixture(scope="module", autouse=True)
def _megatron_on_the_cpu():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    def state(*args, **kwargs):
        return torch.get_rng_state()

    def set_state(state, *args, **kwargs):
        torch.default_generator.set_state(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_random, "_get_cuda_rng_state", state)
        patch.setattr(megatron_random, "_set_cuda_rng_state", set_state)
        patch.setattr(torch.cuda, "get_rng_state", state)
        patch.setattr(torch.cuda, "set_rng_state", set_state)
        patch.setattr(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def make(**settings):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, normalization="RMSNorm", **settings,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, vocab_size=WORDS, max_sequence_length=TOKENS, position_embedding_type="rope")


def train(model, around=contextlib.nullcontext, steps=3):
    """Steps of two microbatches, both forwards before the first backward."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    results = []
    mask = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
    positions = torch.arange(TOKENS)[None]
    for step in range(steps):
        losses = []
        for number in range(2):
            words = torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(2 * step + number))
            with around():
                losses.append(model(words, positions, mask, labels=words).mean())
        for loss in losses:
            loss.backward()
            results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return [*results, torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


@pytest.mark.parametrize(
    "recipe",
    ["recompute", "selective", Recipe("selective", outputs="keep", ops=(lambda op, *args, **kwargs: True,)), "offload"],
    ids=["recompute", "selective", "every operator", "offload"],
)
def test_masks_of_the_tracker_are_recomputed(recipe):
    plain = train(make())
    model = make()
    handle = ebbtide.offload(model, recipe=recipe, **MOVES)
    assert len(handle.regions) == LAYERS
    assert_equal(train(model), plain)
    assert handle.stats().unable == {}
    assert handle.stats().recomputed.count > 0 or recipe == "offload"


def test_a_model_inside_of_a_fork_of_the_tracker():
    """As for all layers if the sequence is split among ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    plain = train(make(), lambda: get_cuda_rng_tracker().fork())
    model = make()
    handle = ebbtide.offload(model, recipe="recompute", **MOVES)
    assert_equal(train(model, lambda: get_cuda_rng_tracker().fork()), plain)
    assert handle.stats().unable == {}
    assert handle.stats().recomputed.count > 0


def test_a_budget():
    plain = train(make(), steps=6)
    model = make()
    handle = ebbtide.offload(model, budget="1TiB", **MOVES)
    assert_equal(train(model, steps=6), plain)
    assert handle.stats().unable == {}


def test_measured_steps_leave_the_tracker_as_it_was():
    plain = train(make())
    model = make()
    words = torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(9))
    batch = {
        "input_ids": words,
        "position_ids": torch.arange(TOKENS)[None],
        "attention_mask": torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5,
        "labels": words,
    }
    ebbtide.plan(model, batch, budget="1TiB", **MOVES)
    assert_equal(train(model), plain)


def test_without_the_tracker_no_region_is_recomputed(monkeypatch):
    """As with the tracker of an unknown package."""
    from ebbtide._recompute import generators

    monkeypatch.setattr(generators, "known_trackers", list)
    plain = train(make())
    model = make()
    handle = ebbtide.offload(model, recipe="recompute", **MOVES)
    with pytest.warns(ebbtide.EbbtideWarning, match="was not prepared for recomputation.*random number generator"):
        assert_equal(train(model), plain)
    assert set(handle.stats().unable) == {Unable.UNKNOWN_RNG}
