"""Recipes against checkpointing (bars R1 to R5), all modes of a workload in one process on one model."""

import contextlib
import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ebbtide
from benchmarks.measure import one_step, spread
from benchmarks.modes import HOST_LIMIT, Context, prepared
from benchmarks.steady import without_packing_check
from benchmarks.turns import Mode, in_turns
from benchmarks.workloads import Workload, build
from ebbtide._utils.sizes import MIB

# Outside of the blocks a Llama saves token ids, the head's weight and input, float logits, and the log-softmax. The last
# norm is recomputed and saves nothing.
_LOGITS = 1
_LOG_SOFTMAX = 4
Recipes = str | ebbtide.Plan | ebbtide.Recipe | Mapping[str, ebbtide.Recipe | str]

EXPENSIVE = ("attention", "matmul")
PROJECTIONS = ("attention", "matmul@self_attn")
CAPTURED = ("recompute", "selective")


@dataclass(frozen=True)
class Offloaded:
    """A mode with ebbtide: recipe or plan, and settings."""

    recipe: Recipes
    settings: dict[str, object] = field(default_factory=dict[str, object])


def spread_over(count: int, layers: int) -> list[int]:
    """Choose `count` of `layers` indices, evenly spread."""
    return sorted({(2 * k + 1) * layers // (2 * count) for k in range(count)})


def with_feed_forward(count: int, layers: int) -> dict[str, ebbtide.Recipe]:
    """Save attention and its projections in all regions, and all matmuls in `count` regions spread over the depth.

    The link has capacity for one more matmul, in the first remaining region.
    """
    some = ebbtide.Recipe("selective", ops=PROJECTIONS)
    more = ebbtide.Recipe("selective", ops=(*PROJECTIONS, "matmul@mlp.gate_proj"))
    every = ebbtide.Recipe("selective", ops=EXPENSIVE)
    full = spread_over(count, layers)
    remaining = next(k for k in range(layers) if k not in full)
    return {"layers.*": some, f"layers.{remaining}": more, **{f"layers.{k}": every for k in full}}


def moved_with_feed_forward(count: int, layers: int) -> ebbtide.Plan:
    """Make a plan of `with_feed_forward`. The peak is at logits and loss: fewer bytes may wait at the peak than in blocks."""
    recipes = with_feed_forward(count, layers)
    every = recipes.pop("layers.*")
    regions = {f"model.layers.{k}": ebbtide.RegionPlan(recipes.get(f"layers.{k}", every)) for k in range(layers)}
    # Recomputing the norm takes half a GiB off the peak: room for the window.
    regions["model.norm"] = ebbtide.RegionPlan(ebbtide.Recipe("recompute", inputs="keep"))
    release = ebbtide.ReleasePoint(_LOGITS, 6400 * MIB), ebbtide.ReleasePoint(_LOG_SOFTMAX, 4500 * MIB)
    return ebbtide.Plan(regions, outside=ebbtide.RegionPlan(ebbtide.Recipe("keep"), release=release))


def modes_of(workload: Workload) -> dict[str, Offloaded]:
    """Return the modes of `workload` by name.

    Tensors saved outside of the blocks (logits, loss) stay, as with checkpointing: backward needs them at once. At 32k
    tokens one region saves 1 to 3 GiB of outputs of expensive operators: the window is as large.
    """
    some = ebbtide.Recipe("selective", ops=PROJECTIONS)
    if workload.is_long:
        more = moved_with_feed_forward(3 * workload.layers // 4, workload.layers)
        return {
            "recompute": Offloaded("recompute", {"window": "512MiB"}),
            "selective": Offloaded(some, {"window": "1280MiB", "prefetch": "1GiB"}),
            "selective, feed-forward too": Offloaded(more, {"window": "7GiB", "prefetch": "4GiB"}),
        }
    return {
        "recompute": Offloaded("recompute", {"window": "64MiB"}),
        "recompute, inputs kept": Offloaded(ebbtide.Recipe("recompute", inputs="keep")),
        "selective kept": Offloaded(ebbtide.Recipe("selective", ops=EXPENSIVE, inputs="keep", outputs="keep")),
        "selective": Offloaded(some, {"window": "1GiB"}),
    }


def torch_selective() -> object:
    """Make contexts of torch's selective checkpointing for the operators of ebbtide's classes attention and matmul."""
    aten = torch.ops.aten
    expensive = {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }  # fmt: skip

    def policy(_ctx, op, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if op in expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def checkpointed(model: torch.nn.Module, context_fn: Callable[[], object] | None = None) -> Iterator[Context]:
    """Checkpoint every layer with torch's checkpoint."""
    kwargs = {"use_reentrant": False} | ({} if context_fn is None else {"context_fn": context_fn})
    model.gradient_checkpointing_enable(kwargs)
    try:
        yield contextlib.nullcontext
    finally:
        model.gradient_checkpointing_disable()


@contextlib.contextmanager
def offloaded(model: torch.nn.Module, mode: Offloaded) -> Iterator[Context]:
    if isinstance(mode.recipe, ebbtide.Plan):
        handle = ebbtide.offload(model, plan=mode.recipe, host_limit=HOST_LIMIT, **mode.settings)
    else:
        handle = ebbtide.offload(model, recipe=mode.recipe, include="layers.*", host_limit=HOST_LIMIT, **mode.settings)
    try:
        yield contextlib.nullcontext
    finally:
        print(handle.report(), flush=True)
        handle.remove()


def measure_recipes(workload: Workload, device: torch.device, count: int) -> dict[str, object]:
    """Measure every mode of the workload, and some modes captured in a graph."""
    model, loss_of = build(workload, device)
    modes: dict[str, Mode] = {}
    if not workload.is_long:
        modes["nothing"] = functools.partial(prepared, "nothing", model)
        modes["torch selective"] = functools.partial(checkpointed, model, torch_selective)
    modes["checkpoint"] = functools.partial(checkpointed, model)
    for name, mode in modes_of(workload).items():
        modes[name] = functools.partial(offloaded, model, mode)
    measured = in_turns(model, loss_of, modes, count, rounds=2 if workload.is_long else 5)
    for name, summary in measured.items():
        print(workload.name, name, summary, flush=True)
    inputs_gib = workload.input_bytes / 2**30
    result: dict[str, object] = {"modes": measured, "inputs_but_the_last_gib": inputs_gib * (1 - 1 / workload.layers)}
    if not workload.is_long:
        for name in CAPTURED:
            mode = modes_of(workload)[name]
            result[f"captured, {name}"] = measure_captured(mode, model, loss_of, count)
            print(workload.name, "captured", name, result[f"captured, {name}"], flush=True)
            ebbtide.release_memory()
            gc.collect()
            torch.cuda.empty_cache()
    return result


def measure_captured(
    mode: Offloaded, model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], count: int
) -> dict[str, object]:
    """Measure eager steps of one recipe and replays of one graph of the step, in turns."""
    with without_packing_check(), offloaded(model, mode) as context:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                one_step(model, loss_of, context)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = loss_of()
            loss.backward()
        times: dict[str, list[float]] = {"eager": [], "replayed": []}
        for _ in range(2 * count):
            times["eager"].append(one_step(model, loss_of, context).step_ms)
            times["replayed"].append(_replay(model, graph))
        eager_loss = one_step(model, loss_of, context).loss
        return {
            **{f"{name}_ms": spread(values[2:]) for name, values in times.items()},
            "ratio": statistics.median(times["replayed"][2:]) / statistics.median(times["eager"][2:]),
            "losses": [eager_loss, loss.item()],
        }


def _replay(model: torch.nn.Module, graph: torch.cuda.CUDAGraph) -> float:
    return one_step(model, lambda: _Replayed(graph), contextlib.nullcontext).step_ms


class _Replayed:
    """Imitates a loss. One replay runs forward and backward."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def backward(self) -> None:
        pass

    def item(self) -> float:
        return 0.0
