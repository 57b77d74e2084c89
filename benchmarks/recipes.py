"""Recipes against checkpointing: the figures of bars R1 to R4, each workload's modes in one process on one model.

python -m benchmarks.recipes [--workloads A B-32k] [--steps 5] [--out benchmarks/results] [--commit HASH]
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ebbtide
from benchmarks.measure import steps
from benchmarks.modes import HOST_LIMIT, Context, prepared
from benchmarks.workloads import WORKLOADS, Workload, build

Recipes = str | ebbtide.Recipe | Mapping[str, ebbtide.Recipe | str]

_DEAR = ("attention", "matmul")
_PROJECTIONS = ("attention", "matmul@self_attn")
# What waits for the link at most, and what is brought back ahead: about a region's worth at 32k tokens.
_WINDOWS = {"A": "512MiB", "B-32k": "2GiB", "tiny": "1MiB"}


def spread_over(count: int, layers: int) -> list[int]:
    """`count` of `layers` numbers, evenly spread."""
    return sorted({(2 * k + 1) * layers // (2 * count) for k in range(count)})


def with_feed_forward(count: int, layers: int, kept: int = 0) -> dict[str, ebbtide.Recipe]:
    """Attention and its projections everywhere, all matmuls in `count` regions, and in the last `kept` without moving."""
    some = ebbtide.Recipe("selective", ops=_PROJECTIONS)
    every = ebbtide.Recipe("selective", ops=_DEAR)
    stays = ebbtide.Recipe("selective", ops=_DEAR, inputs="keep", outputs="keep")
    chosen = dict.fromkeys(spread_over(count, layers - kept), every) | dict.fromkeys(
        range(layers - kept, layers), stays
    )
    return {"layers.*": some, **{f"layers.{k}": recipe for k, recipe in chosen.items()}}


def recipes_of(workload: Workload) -> dict[str, Recipes]:
    """By the name of the mode."""
    if workload.name == "B-32k":
        return {
            "recompute": "recompute",
            "selective": ebbtide.Recipe("selective", ops=_PROJECTIONS),
            **{
                f"selective+{n}+{k}": with_feed_forward(n, workload.layers, k)
                for n, k in ((8, 1), (9, 1), (10, 1), (12, 1))
            },
        }
    return {
        "recompute": "recompute",
        "recompute, inputs kept": ebbtide.Recipe("recompute", inputs="keep"),
        "selective kept": ebbtide.Recipe("selective", ops=_DEAR, inputs="keep", outputs="keep"),
        "selective": ebbtide.Recipe("selective", ops=_PROJECTIONS),
    }


def torch_selective() -> object:
    """torch's own selective checkpointing with the operators of our classes attention and matmul."""
    aten = torch.ops.aten
    dear = {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }  # fmt: skip

    def policy(_ctx, op, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if op in dear else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def checkpointed(model: torch.nn.Module, context_fn: Callable[[], object] | None = None) -> Iterator[Context]:
    kwargs = {"use_reentrant": False} | ({} if context_fn is None else {"context_fn": context_fn})
    model.gradient_checkpointing_enable(kwargs)
    try:
        yield contextlib.nullcontext
    finally:
        model.gradient_checkpointing_disable()


@contextlib.contextmanager
def offloaded(model: torch.nn.Module, recipe: Recipes, window: str, **settings: object) -> Iterator[Context]:
    handle = ebbtide.offload(model, recipe=recipe, window=window, prefetch=window, host_limit=HOST_LIMIT, **settings)
    try:
        yield contextlib.nullcontext
    finally:
        print(handle.report(), flush=True)
        handle.remove()


def measure_recipes(workload: Workload, device: torch.device, count: int) -> dict[str, object]:
    """Every mode of the workload."""
    model, loss_of = build(workload, device)
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[Context]]] = {}
    if workload.name != "B-32k":
        modes["nothing"] = functools.partial(prepared, "nothing", model)
        modes["torch selective"] = functools.partial(checkpointed, model, torch_selective)
    modes["checkpoint"] = functools.partial(checkpointed, model)
    for name, recipe in recipes_of(workload).items():
        modes[name] = functools.partial(offloaded, model, recipe, "4GiB" if "+" in name else _WINDOWS[workload.name])
    measured: dict[str, object] = {}
    for name, mode in modes.items():
        with mode() as context:
            measured[name] = steps(model, loss_of, context, count).summary()
        print(workload.name, name, measured[name], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return {"modes": measured}


if __name__ == "__main__":
    import sys

    for which in sys.argv[1].split(","):
        measure_recipes(WORKLOADS[which], torch.device("cuda"), int(sys.argv[2]))
        ebbtide.release_memory()
        gc.collect()
        torch.cuda.empty_cache()
