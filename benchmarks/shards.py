"""Models sharded over the devices of a host: plain, checkpointed, and offloaded, for an 8B Llama of 16 layers; and the
link rate of each device while further devices copy.

    torchrun --nproc-per-node 2 -m benchmarks.shards [--layouts link fsdp2 tp] [--tokens 16384 32768] [--steps 6]
        [--tiny] [--out FOLDER] [--commit HASH]

With FSDP2 each rank has one sequence; with tensor and sequence parallelism (tp) all ranks share one. Plain steps are
measured of the shorter sequences. With checkpointing's peak as the budget every rank reports its largest peak of the
planned steps, beside the budget. One file per count of devices: shards-2.json.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ebbtide
from benchmarks.facts import facts
from benchmarks.measure import all_frozen, one_step
from benchmarks.modes import HOST_LIMIT
from benchmarks.workloads import B_LONG, TINY, Workload, build
from ebbtide._utils.sizes import GIB

FEWEST_PLANNED, MOST_PLANNED = 10, 40  # steps until plans are made, corrected and frozen
MOST_PLAIN = 16384  # tokens of a sequence that fit without recomputation
COPIES = 8  # of a GiB, each way

Loss = Callable[[], torch.Tensor]


def _fsdp2(workload: Workload, device: torch.device) -> tuple[torch.nn.Module, Loss]:
    model, loss_of = build(workload, device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, loss_of


def _tp(workload: Workload, device: torch.device) -> tuple[torch.nn.Module, Loss]:
    """Between the layers the sequence is sharded, inside of the layers heads and features are."""
    model, _ = build(workload, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded, whole = Shard(1), Replicate()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=sharded),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sharded}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=sharded),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(sharded,), desired_input_layouts=(whole,)),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=sharded),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=sharded, output_layouts=whole),
    }
    parallelize_module(model, mesh, plan)
    torch.manual_seed(0)
    ids = torch.randint(workload.vocab, (workload.batch, workload.tokens), device=device)
    positions = torch.arange(workload.tokens, device=device)[None]  # a rank's tokens do not tell
    return model, lambda: model(input_ids=ids, labels=ids, position_ids=positions).loss


LAYOUTS = {"fsdp2": _fsdp2, "tp": _tp}


def measure(layout: str, workload: Workload, steps: int, device: torch.device) -> dict[str, Any]:
    model, loss_of = LAYOUTS[layout](workload, device)
    found: dict[str, Any] = {}
    if workload.tokens <= MOST_PLAIN:
        found["plain"] = _timed(model, loss_of, steps)
        found["no budget"] = _planned(model, loss_of, steps, None)
        found["plain again"] = _timed(model, loss_of, steps)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["checkpoint"] = _timed(model, loss_of, steps)
    model.gradient_checkpointing_disable()
    found["a plan at checkpointing's peak"] = _planned(model, loss_of, steps, found["checkpoint"]["peak_gib"] * GIB)
    return found


def _planned(model: torch.nn.Module, loss_of: Loss, steps: int, act_bytes: float | None) -> dict[str, Any]:
    """Steps of the frozen plan within `act_bytes` of activations, or without a budget."""
    before = torch.cuda.memory_allocated()
    budget = None if act_bytes is None else int(before + max(act_bytes, GIB))
    with ebbtide.offload(model, budget=budget, host_limit=HOST_LIMIT) as handle:
        found = _timed(model, loss_of, steps, handle)
        predicted = handle.plan.predicted
        assert predicted is not None
        found |= {"predicted_ms": predicted.step_s * 1e3, "moved_gib": predicted.moved_bytes / GIB,
                  "metrics": handle.stats().metrics(), "recipes": [str(r.recipe) for r in handle.plan.regions.values()]}  # fmt: skip
    ebbtide.release_memory()
    return found


def _timed(model: torch.nn.Module, loss_of: Loss, steps: int, *handles: ebbtide.OffloadHandle) -> dict[str, Any]:
    """`steps` of the model. With a handle once all ranks have a frozen plan."""
    rows: list[Any] = []
    fewest = FEWEST_PLANNED if handles else 3
    while len(rows) < fewest or (len(rows) < MOST_PLANNED and not all_frozen(handles)):
        rows.append(one_step(model, loss_of, torch.enable_grad))
    warm_up = len(rows)
    for _ in range(steps):
        dist.barrier()
        rows.append(one_step(model, loss_of, torch.enable_grad))
    return {
        "step_ms": statistics.median(each.step_ms for each in rows[warm_up:]),
        "peak_gib": max(each.act_peak_bytes for each in rows[warm_up:]) / GIB,
        "steps_ms": [round(each.step_ms, 1) for each in rows],
        "peaks_gib": [each.act_peak_bytes / GIB for each in rows],
        "is_frozen": all_frozen(handles),
    }


def link(device: torch.device) -> dict[str, Any]:
    """GB/s each way of this rank's copies, while so many ranks copy at once: one way, and both ways."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = GIB if device.type == "cuda" else 2**20
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else contextlib.nullcontext() for _ in range(2)]
    for lane in (0, 1):  # the first copy takes long
        there[lane].copy_(host[lane])
    ways = {"out": (0,), "back": (1,), "both": (0, 1)}
    found: dict[str, Any] = {}
    for active in [count for count in (1, 2, 4, 8) if count <= ranks]:
        for way, lanes in ways.items():
            _synchronize(device)
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(COPIES if rank < active else 0):
                for lane in lanes:
                    with streams[lane]:
                        target, source = (host, there) if lane == 0 else (there, host)
                        target[lane].copy_(source[lane], non_blocking=True)
            _synchronize(device)
            seconds = time.perf_counter() - began_s
            if rank < active:
                found[f"{active} at once, {way}"] = COPIES * size / seconds / 1e9
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="*", default=["link", *LAYOUTS], choices=["link", *LAYOUTS])
    parser.add_argument("--tokens", nargs="*", type=int, default=[16384, 32768])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="a trial without accelerators")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.tiny else "nccl", device_id=None if options.tiny else device)
    ranks = dist.get_world_size()
    command = f"torchrun --nproc-per-node {ranks} -m benchmarks.shards"
    name = "CPU" if options.tiny else torch.cuda.get_device_name()
    result: dict[str, Any] = facts(command, name, options.commit)

    def gathered(title: str, own: dict[str, Any]) -> None:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, own)
        if dist.get_rank() == 0:
            result[title] = found
            print(title, json.dumps(found, indent=1), flush=True)
            (options.out / f"shards-{ranks}.json").write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()

    if "link" in options.layouts:
        gathered(f"link, {ranks} devices", link(device))
    for layout in [each for each in options.layouts if each != "link"]:
        for tokens in [TINY.tokens] if options.tiny else options.tokens:
            workload = TINY if options.tiny else replace(B_LONG, tokens=tokens)
            gathered(f"{layout}, {ranks} devices, {tokens} tokens", measure(layout, workload, options.steps, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
