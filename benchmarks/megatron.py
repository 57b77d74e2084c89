"""Megatron-Core: bars N5b, N6 and N7 on one device, M6 on two.

    python -m benchmarks.megatron [--parts gpt waits multihot] [--layers 16] [--out FILE] [--commit HASH]
    torchrun --nproc-per-node 2 -m benchmarks.megatron --parts pipeline ...

- gpt: a GPT of 1B in Megatron's schedule, with Megatron's own fine-grained offloading, and with ebbtide in its place.
- pipeline: the same for a mixture of experts in an interleaved pipeline of two ranks with two chunks each.
- waits: layers of a mixture of experts by Megatron's routing maps, for which the host waits, by `indices_to_multihot`,
  and dense layers; without offloading, and with attention's core and qkv moved.
- multihot: `indices_to_multihot` beside Megatron's method.

Needs megatron-core from 0.19 on, without TransformerEngine.
"""

import argparse
import contextlib
import functools
import gc
import json
import os
import statistics
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

import ebbtide
from benchmarks.facts import facts
from benchmarks.pipelines import HIDDEN, Layer, most_away
from ebbtide._utils.sizes import GIB
from ebbtide.integrations.megatron import indices_to_multihot, offload

TURNS, STEPS = 6, 4
WARM_UP_STEPS = 6  # of every mode, the first of which Megatron's offloading uses to learn the order
MOST_PLANNED = 60  # steps until plans are made, corrected and frozen


@dataclass(frozen=True)
class Sizes:
    """Of the GPT: hidden size, heads, query groups, feed-forward, words, tokens of a sequence, sequences of a
    microbatch; of `waits`: tokens, experts; of `multihot`: tokens, experts, chosen ones, cases compared."""

    hidden: int = 2048
    heads: int = 16
    groups: int = 4
    ffn: int = 8192
    words: int = 32768
    tokens: int = 4096
    sequences: int = 2
    waits: tuple[int, int] = (8192, 8)
    multihot: tuple[int, int, int, int] = (16384, 64, 8, 200)


FULL = Sizes()
TINY = Sizes(64, 4, 2, 128, 64, 32, 1, (64, 4), (32, 8, 2, 20))

ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
MODULES = {"attention": ATTENTION, "attention and norms": ["attn_norm", *ATTENTION, "mlp_norm"]}
# All experts take equally many tokens: the host need not know how many they were given. Few and wide, for without
# grouped products the host would be the bound.
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss", "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}  # fmt: skip
CHUNKS = 2  # of a rank
WINDOWS: dict[str, dict[str, Any]] = {"ebbtide": {}, "ebbtide, 2 GiB on the way out": {"window": "2GiB"}}
# Either way the bytes of a layer of `waits`.
CORE_AND_QKV: dict[str, Any] = {
    "include": ["layers.*.core", "layers.*.qkv"], "window": "256MiB", "prefetch": "256MiB",
}  # fmt: skip


class FlashAttention(nn.Module):
    """Core attention without the matrix of scores, which TransformerEngine would bring along."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.is_grouped = config.num_query_groups != config.num_attention_heads

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """From [tokens, sequences, heads, head's width] to [tokens, sequences, hidden]."""
        heads = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=self.is_grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class Gpt:
    """The chunks of a rank, their data, and steps by Megatron's schedule."""

    def __init__(self, sizes: Sizes, layers: int, microbatches: int, device: torch.device, **settings: Any) -> None:
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        self.sizes = sizes
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        config = TransformerConfig(
            num_layers=layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
            num_query_groups=sizes.groups, ffn_hidden_size=sizes.ffn, gated_linear_unit=True,
            activation_func=functional.silu, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
            attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=virtual, batch_p2p_comm=False,
            deallocate_pipeline_outputs=True, use_cpu_initialization=device.type == "cpu",
            gradient_accumulation_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False,
            masked_softmax_fusion=False, bias_activation_fusion=False, **settings,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = FlashAttention
        self.chunks: list[nn.Module] = [
            GPTModel(
                config, spec, vocab_size=sizes.words, max_sequence_length=sizes.tokens, position_embedding_type="rope",
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=False, vp_stage=stage,
            ).to(device, torch.bfloat16)
            for stage in (range(virtual) if virtual else [None])
        ]  # fmt: skip
        self.words = torch.randint(sizes.words, (microbatches, sizes.sequences, sizes.tokens), device=device)
        self.positions = torch.arange(sizes.tokens, device=device)[None]

    def step(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none=False)
        get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=[iter(self.words) for _ in self.chunks],
            model=self.chunks, num_microbatches=len(self.words), seq_length=self.sizes.tokens,
            micro_batch_size=self.sizes.sequences, forward_only=False,
        )  # fmt: skip

    def gradient_bits(self) -> list[int]:
        """Of a step with deterministic kernels: a sum of the bits for each parameter."""
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.step()
        torch.use_deterministic_algorithms(False)
        grads = (p.grad for chunk in self.chunks for p in chunk.parameters())
        return [int(grad.view(torch.int16).sum(dtype=torch.int64)) for grad in grads if grad is not None]

    def _forward(self, batches: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        words = next(batches)
        losses = model(words, self.positions, None, labels=words)
        return losses, lambda losses: (losses.mean(), {})


def gpt(sizes: Sizes, layers: int, device: torch.device) -> dict[str, Any]:
    """Steps of a GPT without offloading, with Megatron's, and with ebbtide; a model for each mode."""
    make = functools.partial(Gpt, sizes, layers, 2, device)
    found: dict[str, Any] = {}
    for name, words in MODULES.items():
        found[name] = _beside_megatrons(words, make, WINDOWS)
        gc.collect()  # handles and models refer to each other
        ebbtide.release_memory()
    peak_gib = found["attention and norms"]["Megatron"]["peak_active_gib"]
    plain, models = make(), {"no budget": make(), "within Megatron's peak": make()}
    for each in (plain, *models.values()):
        each.step()  # gradients stay
    base = _bytes("current")["active"]
    for name, own in models.items():
        budget = int(base + peak_gib * GIB) if peak_gib and name != "no budget" else None
        with ebbtide.offload(own.chunks[0], budget=budget) as handle:
            for _ in range(MOST_PLANNED):
                own.step()
                if handle.is_plan_frozen:
                    break
            found[name] = _in_turns({"plain": plain.step, "ebbtide": own.step}, {"ebbtide": [handle]})
    return found


def pipeline(sizes: Sizes, layers: int, device: torch.device) -> dict[str, Any]:
    """The same for a mixture of experts in a pipeline, with attention's core and qkv moved: figures of each rank."""
    wide = replace(sizes, hidden=2 * sizes.hidden, heads=2 * sizes.heads, groups=2 * sizes.groups)
    make = functools.partial(Gpt, wide, layers, 8, device, moe_ffn_hidden_size=sizes.ffn, **EXPERTS)
    own = _beside_megatrons(["qkv_linear", "core_attn"], make, {"ebbtide": {}})
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {f"rank {rank}": each for rank, each in enumerate(found)}


def _beside_megatrons(words: list[str], make: Callable[..., Gpt], windows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    # Megatron asks of TransformerEngine this one object.
    transformer_engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    PipelineOffloadManager.reset_instance()
    settings = {"fine_grained_activation_offloading": True, "offload_modules": words}
    models = {"plain": make(), "Megatron": make(**settings), **{name: make(**settings) for name in windows}}
    with contextlib.ExitStack() as undo:
        handles = {
            name: undo.enter_context(offload(models[name].chunks, **options)).handles
            for name, options in windows.items()
        }
        found = _in_turns({name: each.step for name, each in models.items()}, handles)
        manager = PipelineOffloadManager.get_instance()
        # Of the forwards before the first backward: of a microbatch, or of the warm-up of a pipeline.
        found["Megatron"]["first_out_gib"] = manager.offload_summary_total_bytes / GIB
        for name, own in handles.items():
            found[name]["away_gib"] = most_away(models[name].step, models[name].chunks, own) / GIB
        bits = {name: each.gradient_bits() for name, each in models.items()}
        for name, each in bits.items():
            found[name]["gradients are plain's"] = each == bits["plain"]
    return found


class MixtureLayer(Layer):
    """A layer with experts of which each token takes two; `to_map` makes maps of tokens to experts."""

    def __init__(self, experts: int, to_map: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.experts, self.to_map = experts, to_map
        half = self.gate.out_features // 2
        del self.gate, self.up, self.down
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.fc1 = nn.Parameter(torch.randn(experts, HIDDEN, 2 * half) / HIDDEN**0.5)
        self.fc2 = nn.Parameter(torch.randn(experts, half, HIDDEN) / half**0.5)

    def feed_forward(self, y: torch.Tensor) -> torch.Tensor:
        flat = y.flatten(0, -2)
        probs, indices = self.router(flat).float().softmax(-1).topk(2)
        routing, weights = self.to_map(indices, probs, self.experts)
        # Chosen pairs of token and expert first, by experts; their number is known.
        order = routing.T.flatten().logical_not().argsort(stable=True)[: indices.numel()]
        tokens, ends = order % len(flat), routing.sum(0).cumsum(0).int()
        gate, up = torch._grouped_mm(flat[tokens], self.fc1, offs=ends).chunk(2, -1)
        out = torch._grouped_mm(functional.silu(gate) * up, self.fc2, offs=ends)
        out = out * weights.T.flatten()[order].unsqueeze(-1).to(out.dtype)
        return torch.zeros_like(flat).index_add(0, tokens, out).view_as(y)


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _megatrons_map(indices: torch.Tensor, probs: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    manager = types.SimpleNamespace(num_local_experts=experts)
    routing, weights = token_dispatcher._DeepepManager._indices_to_multihot(manager, indices, probs)
    return routing, weights


def waits(sizes: Sizes, layers: int, device: torch.device) -> dict[str, Any]:
    """What a host that waits costs offloading."""
    tokens, experts = sizes.waits
    kinds: dict[str, Callable[[], Layer]] = {
        "dense": Layer,
        "mixture": lambda: MixtureLayer(experts, _megatrons_map),
        "mixture, without waits": lambda: MixtureLayer(experts, indices_to_multihot),
    }
    found: dict[str, Any] = {}
    for name, make in kinds.items():
        torch.manual_seed(0)
        with torch.device(device):
            model = Stack([make() for _ in range(layers)]).bfloat16()
            x = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model.zero_grad(set_to_none=False)
            model(x).float().square().mean().backward()

        turns = {"plain": step, "moved": step}
        found[name] = _in_turns(turns, {}, {"moved": lambda m=model: ebbtide.offload(m, **CORE_AND_QKV)})
        found[name]["waiting lines, by torch"] = _waits_by_torch(step)
        with mock.patch.dict(os.environ, EBBTIDE_SYNCS="1"), ebbtide.offload(model, **CORE_AND_QKV) as handle:
            step()
            found[name]["waits of a step"] = [
                {"kind": sync.kind, "module": sync.module, "line": sync.line, "count": each.count, "s": each.seconds}
                for sync, each in handle.stats().syncs.items()
            ]
        ebbtide.release_memory()
    return found


def _waits_by_torch(step: Callable[[], None]) -> dict[str, int]:
    """Synchronisations of a step, counted by torch, by line; those of backward in the line that calls backward."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = (each for each in caught if "synchronizing CUDA operation" in str(each.message))
    return dict(Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in waits))


def _in_turns(
    steps: dict[str, Callable[[], None]],
    handles: dict[str, list[ebbtide.OffloadHandle]],
    entered: dict[str, Callable[[], contextlib.AbstractContextManager[ebbtide.OffloadHandle]]] | None = None,
) -> dict[str, Any]:
    """Medians of all turns of each mode; `entered`: what is in place for the turns of a mode alone."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    found: dict[str, Any] = {name: {} for name in steps}
    for turn in range(TURNS):
        for name, step in steps.items():
            with contextlib.ExitStack() as undo:
                make = (entered or {}).get(name)
                own = [undo.enter_context(make())] if make else handles.get(name, [])
                for _ in range(WARM_UP_STEPS if make or not turn else 1):
                    step()
                gc.collect()
                before, out, stall_s = _bytes("current"), _out_bytes(own), _stall_s(own)
                for _ in range(STEPS):
                    _restart_peak()
                    began_s = time.perf_counter()
                    step()
                    _synchronize()
                    times[name].append((time.perf_counter() - began_s) * 1e3)
                    for kind, nbytes in _bytes("peak").items():
                        own_peak = (nbytes - before[kind]) / GIB
                        found[name][f"peak_{kind}_gib"] = max(own_peak, found[name].get(f"peak_{kind}_gib", 0.0))
                if own:
                    found[name]["out_gib"] = (_out_bytes(own) - out) / STEPS / GIB
                    found[name]["stall_ms"] = 1e3 * (_stall_s(own) - stall_s) / STEPS
    by_turn = {
        name: [statistics.median(taken[i : i + STEPS]) for i in range(0, len(taken), STEPS)]
        for name, taken in times.items()
    }
    for name, turns in by_turn.items():
        found[name] |= {
            "step_ms": statistics.median(times[name]),
            "turns_ms": turns,
            "of_plain": statistics.median(own / plain for own, plain in zip(turns, by_turn["plain"], strict=True)),
        }
    return found


def _out_bytes(handles: list[ebbtide.OffloadHandle]) -> int:
    return sum(handle.stats().out.nbytes for handle in handles)


def _stall_s(handles: list[ebbtide.OffloadHandle]) -> float:
    return sum(handle.stats().stall_forward_s + handle.stats().stall_backward_s for handle in handles)


def multihot(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """`indices_to_multihot` beside Megatron's method: bits, synchronisations, and milliseconds of forward and
    backward."""
    tokens, experts, chosen, cases = sizes.multihot
    equal = 0
    for seed in range(cases):
        generator = torch.Generator(device).manual_seed(seed)
        indices, probs, weight = _case(1 + seed % tokens, experts, chosen, generator, device)
        results = [_values(function, indices, probs, weight, experts) for function in (_megatrons_map, _quiet_map)]
        equal += all(torch.equal(*pair) for pair in zip(*results, strict=True))
    indices, probs, weight = _case(tokens, experts, chosen, torch.Generator(device).manual_seed(0), device)
    found: dict[str, Any] = {"cases": cases, "equal": equal}
    for name, function in (("Megatron", _megatrons_map), ("ebbtide", indices_to_multihot)):
        taken: list[float] = []
        for _ in range(50):
            _synchronize()
            began_s = time.perf_counter()
            _values(function, indices, probs, weight, experts)
            _synchronize()
            taken.append((time.perf_counter() - began_s) * 1e3)
        found[f"{name}_ms"] = statistics.median(taken[10:])
    return found


def _case(tokens: int, experts: int, chosen: int, generator: torch.Generator, device: torch.device) -> Any:
    """Different experts in each row, some of them masked, and probabilities, and a weight for each entry of a map."""
    random = functools.partial(torch.rand, generator=generator, device=device)
    indices = random(tokens, experts).topk(chosen).indices
    indices = indices.masked_fill(random(tokens, chosen) < 0.2, -1)
    return indices, random(tokens, chosen).requires_grad_(), random(tokens, experts)


def _values(function: Any, indices: torch.Tensor, probs: torch.Tensor, weight: torch.Tensor, experts: int) -> Any:
    routing, chosen = function(indices, probs, experts)
    (grad,) = torch.autograd.grad((chosen * weight).sum(), probs)
    return routing, chosen.detach(), grad


def _quiet_map(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices_to_multihot`; an error if the host waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        return indices_to_multihot(*args)
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bytes(when: str) -> dict[str, int]:
    """Of the device's memory. Memory that a copy on another stream may still read is active, but no longer allocated,
    if its tensor is gone and `Tensor.record_stream` has named the stream: as with Megatron's offloading."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {kind: stats.get(f"{kind}_bytes.all.{when}", 0) for kind in ("active", "allocated")}


def _restart_peak() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
    _synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    sizes = TINY if options.tiny else FULL
    is_pipeline = options.parts == ["pipeline"]
    alone = {} if is_pipeline else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if options.tiny else "nccl", **alone)
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": CHUNKS}
    parallel_state.initialize_model_parallel(**(stages if is_pipeline else {}))
    parts = {
        "gpt": lambda: gpt(sizes, options.layers, device),
        "pipeline": lambda: pipeline(sizes, options.layers, device),
        "waits": lambda: waits(sizes, options.layers // 2, device),
        "multihot": lambda: multihot(sizes, device),
    }
    for name in options.parts:
        yield name, parts[name]()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["gpt", "waits", "multihot"], help="or pipeline alone")
    parser.add_argument("--layers", type=int, default=16, help="of the GPT; half of them in `waits`")
    parser.add_argument("--tiny", action="store_true", help="sizes for a trial without an accelerator")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not options.tiny:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cpu" if options.tiny else "cuda")
    name = "CPU" if options.tiny else torch.cuda.get_device_name()
    is_pipeline = options.parts == ["pipeline"]
    start = "torchrun --nproc-per-node 2" if is_pipeline else "python"
    command = f"{start} -m benchmarks.megatron --parts {' '.join(options.parts)} --layers {options.layers}"
    result: dict[str, Any] = facts(command, name, options.commit)
    for part, found in measure(options, device):
        result[part] = found
        if int(os.environ.get("RANK", 0)) == 0:
            print(part, json.dumps(found, indent=1), flush=True)
            file = options.out / ("megatron-pipeline.json" if is_pipeline else "megatron.json")
            file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
