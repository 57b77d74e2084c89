"""Megatron-Core's own transformer, tracker of random states, schedules and optimizer; in `make test-trainers`."""

import contextlib
import functools
import json
import os
import re
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pages import run_blocks
from processes import RANKS, join, spawn
from scripts import ROOT, check_example
from support import HandleRig, OperatorNames, assert_equal
from tiny_megatron import MICROBATCHES, TOKENS, WIDTH, WORDS, chunks_of, megatron_on_the_cpu, train_chunks, wrapped

import ebbtide
from ebbtide import ConfigError, Recipe
from ebbtide._devices.sim import SimDevice
from ebbtide._types import Unable

pytest.importorskip("megatron.core", reason="make test-trainers installs it", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

LAYERS = 3
MOVES = {"store": "mock", "min_bytes": 1}


@pytest.fixture(scope="module", autouse=True)
def _megatron_on_the_cpu():
    from megatron.core import parallel_state

    with megatron_on_the_cpu():
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


# -- words for modules, and Megatron's schedules -----------------------------------------------------------------------

GPT = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "dense"]
MIXTURE = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
PAIR = {"pipeline_model_parallel_size": RANKS}
VIRTUAL = {**PAIR, "virtual_pipeline_model_parallel_size": 2}
TENSORS = {"tensor_model_parallel_size": RANKS}
EXPERTS = {"expert_model_parallel_size": RANKS}
# Parallel sizes, modules, settings of the model; with BF16 in Megatron's wrappers, by the distributed optimizer.
LAYOUTS = {
    "1F1B": (PAIR, GPT, {"hidden_dropout": 0.1}),
    "interleaved": (VIRTUAL, GPT, {}),
    "dense stage, then experts": (PAIR, ["expert_fc1", "moe_act"], {"moe": True, "moe_layer_freq": [0, 0, 1, 1]}),
    "tensors": (TENSORS, GPT, {}),
    "experts": (EXPERTS, MIXTURE, {"moe": True}),
    "data, optimizer": ({}, GPT, BF16),
    "1F1B, optimizer": (PAIR, GPT, BF16),
    "interleaved, optimizer": (VIRTUAL, GPT, BF16),
    "tensors, optimizer": (TENSORS, GPT, BF16),
    "data of experts, optimizer": ({}, MIXTURE, {"moe": True, **BF16}),
    "1F1B of experts, optimizer": (PAIR, MIXTURE, {"moe": True, **BF16}),
    "interleaved experts, optimizer": (VIRTUAL, MIXTURE, {"moe": True, **BF16}),
    "experts, optimizer": (EXPERTS, MIXTURE, {"moe": True, **BF16}),
    "experts and tensors, optimizer": (TENSORS, MIXTURE, {"moe": True, "sequence_parallel": True, **BF16}),
    "1F1B within a budget": (PAIR, None, BF16),
}


# Where the words for all layers select as many bytes as Megatron does.
SIZES = {
    "1F1B": (PAIR, {}),
    "interleaved": (VIRTUAL, {}),
    "tensors": (TENSORS, {}),
    "experts": (EXPERTS, {"moe": True}),
}


def adapter():
    from ebbtide.integrations import megatron

    return megatron


def chunks_and_optimizer(settings):
    chunks = chunks_of(**settings)
    return wrapped(chunks) if "bf16" in settings else (chunks, None)


def moved_by(offloaded):
    return [handle.stats().parcels.count for handle in offloaded.handles]


def compare(modules, settings, **options):
    """Steps of Megatron alone, and the same steps offloaded. Returns whether all are equal, and parcels by chunk."""
    plain = train_chunks(*chunks_and_optimizer(settings))
    chunks, optimizer = chunks_and_optimizer(settings)
    with adapter().offload(chunks, modules, **MOVES, **options) as offloaded:
        return train_chunks(chunks, optimizer) == plain, moved_by(offloaded)


def all_layouts(rank, folder):
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    join(rank, folder)
    found = {"bytes": {}}
    with megatron_on_the_cpu():
        for name, (sizes, modules, settings) in LAYOUTS.items():
            parallel_state.initialize_model_parallel(**sizes)
            found[name] = compare(modules, settings, **({} if modules else {"budget": "1TiB"}))
            parallel_state.destroy_model_parallel()
        for name, (sizes, settings) in SIZES.items():
            parallel_state.initialize_model_parallel(**sizes)
            sides = counted_by_megatron(GPT[:5], settings), counted_by_ours(GPT[:5], settings)
            found["bytes"][name] = [nbytes for _, nbytes in sides]
            parallel_state.destroy_model_parallel()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of gloo do not always end in good order with the interpreter


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    spawn(all_layouts, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_as_megatron_alone(layouts, name):
    for rank, results in enumerate(layouts):
        is_equal, moved = results[name]
        assert is_equal
        if name.startswith("dense") and rank == 0:
            assert moved == []  # no expert in this stage
        else:
            assert len(moved) == LAYOUTS[name][0].get("virtual_pipeline_model_parallel_size", 1)
            assert all(moved)


@pytest.mark.parametrize(
    ("modules", "settings"),
    [
        (GPT, {"hidden_dropout": 0.1}),
        (GPT, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
        (GPT, NORMS),
        (GPT, BF16),
        (MIXTURE, {"moe": True}),
        (MIXTURE, {"moe": True, **BF16}),
        (
            ["shared_fc1", "shared_fc2", "router_fc1", "router_fc2"],
            {"moe": True, "moe_shared_expert_intermediate_size": 16},
        ),
    ],
    ids=["gpt", "attention again", "norms again", "optimizer", "mixture", "mixture, optimizer", "shared experts"],
)
def test_one_rank_computes_as_megatron_alone(modules, settings):
    is_equal, moved = compare(modules, settings)
    assert is_equal
    assert all(moved)


def test_a_budget_of_the_adapter():
    is_equal, moved = compare(None, {}, budget="1TiB")
    assert is_equal
    assert all(moved)


def test_gradients_added_by_a_fused_kernel(monkeypatch):
    """Megatron's linear layers write `main_grad` of the weight that autograd has saved."""
    from megatron.core.tensor_parallel import layers

    def add(inputs, gradient, main_grad):
        main_grad.add_(gradient.t() @ inputs)

    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    is_equal, moved = compare(GPT, {**BF16, "gradient_accumulation_fusion": True})
    assert is_equal
    assert all(moved)


def test_the_example_trains_and_moves(tmp_path):
    runner = Path(__file__).with_name("on_the_cpu.py")
    check_example(ROOT / "examples" / "megatron_gpt.py", tmp_path, [str(runner)])


class Noop(torch.nn.Module):
    """A layer that a user's stage has in the place of none, to make stages equally long."""

    def forward(self, hidden_states, context=None, **_):
        return hidden_states, context


def test_the_lines_of_the_page(monkeypatch, capsys):
    monkeypatch.setattr(adapter(), "offload", functools.partial(adapter().offload, **MOVES))
    chunks = chunks_of(moe=True)
    names = {"get_model": lambda _: chunks, "model_provider": None}
    run_blocks("docs/trainers/megatron.md", names, train=lambda: train_chunks(chunks))
    assert re.search(r"moved out +[1-9]", capsys.readouterr().out)


def test_layers_without_modules():
    def with_noop():
        chunks = chunks_of()
        chunks[0].decoder.layers[1] = Noop()
        return chunks

    plain, chunks = train_chunks(with_noop()), with_noop()
    with adapter().offload(chunks, GPT, **MOVES) as offloaded:
        assert train_chunks(chunks) == plain
        assert all(moved_by(offloaded))


# -- the selection -----------------------------------------------------------------------------------------------------


def counted_by_megatron(modules, settings):
    """The results of a step, and parcels and bytes that Megatron would move: its own contexts, around which Megatron
    puts hooks of its own, count what is saved inside."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Theirs,
    )

    inside = ebbtide.offload_activations(**MOVES)

    def enter(self):
        if self.offload:
            inside.__enter__()
        return self.tensor

    def leave(self, *error):
        if self.offload:
            inside.__exit__(*error)

    patches = {"__enter__": enter, "__exit__": leave}
    does_nothing = ["init_chunk_handler", "reset"]
    if hasattr(Theirs, "group_commit"):
        patches["group_commit"] = staticmethod(lambda tensor, **_: tensor)
        does_nothing.append("mark_not_offloadable")
    else:  # from 0.17 on
        patches["group_offload"] = lambda self, tensor, **_: tensor
        does_nothing.append("mark_not_offload")
    patches |= {name: staticmethod(lambda *_, **__: None) for name in does_nothing}
    theirs = {"fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 1}
    before = inside.stats().parcels  # equal contexts count together
    with mock.patch.multiple(Theirs, **patches):
        results = train_chunks(chunks_of(**theirs, **settings), steps=1)
    after = inside.stats().parcels
    return results, [after.count - before.count, after.nbytes - before.nbytes]


def counted_by_ours(modules, settings):
    chunks = chunks_of(**settings)
    with adapter().offload(chunks, modules, **MOVES) as offloaded:
        results = train_chunks(chunks, steps=1)
        parcels = [handle.stats().parcels for handle in offloaded.handles]
    return results, [sum(each.count for each in parcels), sum(each.nbytes for each in parcels)]


@pytest.mark.parametrize(
    ("modules", "settings"),
    [
        *[([word], {}) for word in ("attn_norm", "qkv_linear", "core_attn", "mlp_norm")],
        (GPT[:5], {}),
        (["qkv_linear"], {"qk_layernorm": True}),
        (GPT[:5], NORMS),
        (MIXTURE[:5], {"moe": True}),
    ],
)
def test_words_select_the_bytes_that_megatron_selects(modules, settings):
    """Megatron's words for experts need TransformerEngine's experts; see the next test."""
    counted, theirs = counted_by_megatron(modules, settings)
    assert counted_by_ours(modules, settings) == (counted, theirs)
    assert min(theirs) > 0


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_select_the_bytes_that_megatron_selects(layouts, name):
    for results in layouts:
        theirs, ours = results["bytes"][name]
        assert theirs == ours
        assert min(ours) > 0


@pytest.mark.parametrize(
    ("word", "widths"), [("expert_fc1", [WIDTH]), ("moe_act", [WIDTH, WIDTH, 1]), ("router_fc2", [WIDTH])]
)
def test_words_for_experts_select_by_shape(word, widths):
    """With one expert, as with the grouped experts for which Megatron has words, all tokens are one tensor. Behind the
    activation is a product with the weights of the router, which saves the output and the weights."""
    chunks = chunks_of(moe=True, num_moe_experts=1, moe_router_topk=1, moe_router_pre_softmax=True)
    with adapter().offload(chunks, [word], **MOVES) as offloaded:
        train_chunks(chunks, steps=1)
        parcels = offloaded.handles[0].stats().parcels
    assert parcels.nbytes == MICROBATCHES * 4 * TOKENS * sum(widths) * 4  # layers, and bytes of an element
    assert parcels.count == MICROBATCHES * 4 * len(widths)


def test_the_list_and_sizes_of_megatrons_own_arguments():
    theirs = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]}
    plain = train_chunks(chunks_of())
    chunks = chunks_of(**theirs, min_offloaded_tensor_size=TOKENS * WIDTH)
    attention = chunks[0].decoder.layers[0].self_attention
    with adapter().offload(chunks, store="mock") as offloaded:
        assert not chunks[0].config.fine_grained_activation_offloading
        assert not attention.offload_core_attention
        assert train_chunks(chunks) == plain
        assert all(moved_by(offloaded))
        assert offloaded.handles[0]._attachment.config.min_bytes == 4 * TOKENS * WIDTH
        assert "out" in offloaded.report()
    assert chunks[0].config.fine_grained_activation_offloading
    assert attention.offload_core_attention
    chunks[0].config.activation_offload_fraction = 0.5  # a field of later releases
    with adapter().offload(chunks, **MOVES) as offloaded:
        names = list(offloaded.handles[0]._attachment.config.include)
    assert names == [f"decoder.layers.{n}.*_attention.{m}" for n in (0, 1) for m in ("core_attention", "linear_proj")]


@pytest.mark.parametrize(
    ("modules", "options", "settings", "message"),
    [
        (["core"], {}, {}, "'core' is no word for modules: write some of attn_norm, "),
        ([], {}, {}, "no module is named"),
        (["moe_act"], {}, {}, "GPTModel has no module for 'moe_act': write some of attn_norm, .* dense"),
        (["dense"], {}, {"moe": True}, "GPTModel has no module for 'dense'"),
        (["core_attn"], {"budget": "1GiB"}, {}, "budget= leaves it to the planner what moves, and modules= says it"),
        (["core_attn"], {"mode": "auto"}, {}, "mode= leaves it to the planner"),
        (["core_attn"], {"include": ["mlp"]}, {}, "include= and modules= both name what moves"),
        (["core_attn"], {}, "theirs", "modules= move the same: leave one of them out .without modules= ebbtide"),
        (None, {"budget": "1GiB"}, "theirs", "and offload_modules of Megatron's config says it"),
    ],
)
def test_settings_that_are_refused(modules, options, settings, message):
    if settings == "theirs":
        settings = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    chunks = chunks_of(**settings)
    with pytest.raises(ConfigError, match=message):
        adapter().offload(chunks, modules, **options)
    with adapter().offload(chunks, mode="off"):  # nothing of the refused call is left
        pass


def test_models_and_configs_that_are_refused():
    with pytest.raises(ConfigError, match="no module has a TransformerConfig"):
        adapter().offload(torch.nn.Linear(2, 2), ["core_attn"])
    with pytest.raises(ConfigError, match="budget= for 2 chunks"):
        adapter().offload([*chunks_of(), *chunks_of()], budget="1GiB")
    chunks = chunks_of(fine_grained_activation_offloading=True, offload_modules=["core_attn"])
    chunks[0].config.delta_offload_bytes_across_pp_ranks = 1  # a field of later releases
    with pytest.raises(ConfigError, match="delta_offload_bytes_across_pp_ranks=1"):
        adapter().offload(chunks)
    chunks = chunks_of()
    chunks[0].config.cpu_offloading = True
    with pytest.raises(ConfigError, match="cpu_offloading=True of Megatron's config and ebbtide move the same"):
        adapter().offload(chunks, ["core_attn"])


# -- outputs that Megatron discards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [5_000, 20_000, 100_000])
def test_discarded_outputs_of_recomputed_norms_stay(window):
    """On the simulated device, with copies that run as late as waits allow."""
    plain = train_chunks(chunks_of(**NORMS), steps=2)
    rig, chunks = HandleRig(SimDevice(0, "late"), window=window), chunks_of(**NORMS)
    rig.offload(chunks[0])
    assert train_chunks(chunks, steps=2) == plain
    rig.check_no_races()
    assert rig.handles[0].stats().parcels.count > 0


@pytest.mark.parametrize("recipe", ["recompute", "selective", "offload", Recipe("keep", derive=True)], ids=str)
def test_recipes_beside_recomputed_norms(recipe):
    plain = train_chunks(chunks_of(**NORMS), steps=3)
    chunks = chunks_of(**NORMS)
    with ebbtide.offload(chunks[0], recipe=recipe, verify=2, **MOVES) as handle:
        assert train_chunks(chunks, steps=3) == plain
        assert handle.stats().unable == {}


def test_a_context_around_recomputed_norms():
    plain = train_chunks(chunks_of(**NORMS), steps=3)
    context = ebbtide.offload_activations(**MOVES)
    chunks = chunks_of(**NORMS)
    with context:
        assert train_chunks(chunks, steps=3) == plain
    assert context.stats().parcels.count > 0


# -- routing maps ------------------------------------------------------------------------------------------------------


def managers():
    from megatron.core.transformer.moe import token_dispatcher

    classes = [each for each in vars(token_dispatcher).values() if isinstance(each, type)]
    return [each for each in classes if "_indices_to_multihot" in vars(each)]


def routed(seed):
    """Random experts of random tokens, some masked out, and probabilities; and the number of experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    chosen = int(torch.randint(1, experts + 1, (), generator=generator))
    indices = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :chosen]
    indices = indices.masked_fill(torch.rand(tokens, chosen, generator=generator) < 0.4, -1)
    return indices, torch.rand(tokens, chosen, generator=generator), experts


def with_gradient(function, seed):
    indices, probs, experts = routed(seed)
    probs.requires_grad_()
    routing, chosen = function(indices, probs, experts)
    (chosen * torch.randn(chosen.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()
    return [routing, chosen.detach(), probs.grad]


def test_multihot_equals_megatrons():
    (manager,) = managers()

    def theirs(indices, probs, experts):
        return manager._indices_to_multihot(types.SimpleNamespace(num_local_experts=experts), indices, probs)

    for seed in range(200):
        assert_equal(with_gradient(adapter().indices_to_multihot, seed), with_gradient(theirs, seed))
    none = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    assert_equal(adapter().indices_to_multihot(*none, 4), theirs(*none, 4))


def test_multihot_waits_for_nothing():
    (manager,) = managers()
    waiting = ("nonzero", "_local_scalar_dense", "repeat_interleave", "masked_select", "aten::index", "item")
    for function, is_waiting in ((adapter().indices_to_multihot, False), (None, True)):
        indices, probs, experts = routed(3)
        probs.requires_grad_()
        with OperatorNames() as operators:
            if function is None:
                itself = types.SimpleNamespace(num_local_experts=experts)
                manager._indices_to_multihot(itself, indices, probs)[1].sum().backward()
            else:
                function(indices, probs, experts)[1].sum().backward()
        assert any(part in name for name in operators.names for part in waiting) == is_waiting


def test_multihot_replaces_megatrons_method_until_remove():
    (manager,) = managers()
    original = manager._indices_to_multihot
    first, second = (adapter().offload(chunks_of(), ["core_attn"]) for _ in range(2))
    for each in (first, second):
        assert manager._indices_to_multihot is not original
        indices, probs, experts = routed(5)
        itself = types.SimpleNamespace(num_local_experts=experts)
        ours = manager._indices_to_multihot(itself, indices, probs)
        assert_equal(list(ours), list(original(itself, indices, probs)))
        each.remove()
        each.remove()
    assert manager._indices_to_multihot is original


# -- the benchmark -----------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_without_an_accelerator(monkeypatch):
    """Megatron's own offloading leaves tensors of the CPU alone, and ebbtide's default leaves small ones."""
    pytest.importorskip("megatron.core", minversion="0.19", reason="its own offloading calls CUDA before")
    from benchmarks import megatron, pipelines

    for name, value in {"HIDDEN": 64, "HEADS": 4, "KV_HEADS": 2, "FFN": 128}.items():
        monkeypatch.setattr(pipelines, name, value)
    monkeypatch.setattr(megatron, "HIDDEN", 64)
    monkeypatch.setattr(megatron, "TURNS", 1)
    cpu = torch.device("cpu")
    with pytest.warns(ebbtide.EbbtideWarning, match="moved nothing"):
        found = megatron.gpt(megatron.TINY, 2, cpu)
    for words in megatron.MODULES:
        assert set(found[words]) == {"plain", "Megatron", *megatron.WINDOWS}
        assert all(mode["gradients are plain's"] for mode in found[words].values())
    with pytest.warns(ebbtide.EbbtideWarning, match="moved nothing"):
        waits = {name: each["waits of a step"] for name, each in megatron.waits(megatron.TINY, 2, cpu).items()}
    assert [wait["module"] for wait in waits["mixture"]].count("layers.0") == 4  # two masks, one of them both ways
    assert waits["dense"] == waits["mixture, without waits"] == []
    multihot = megatron.multihot(megatron.TINY, cpu)
    assert multihot["equal"] == multihot["cases"] > 0
