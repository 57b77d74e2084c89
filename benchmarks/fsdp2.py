"""FSDP2 over all devices of a host: plain, checkpointed, and offloaded, for an 8B Llama of 16 layers.

    torchrun --nproc-per-node 2 -m benchmarks.fsdp2 [--tokens 16384 32768] [--steps 6] [--out FILE] [--commit HASH]

Each rank has one sequence. Plain steps are measured of the shorter sequences. With checkpointing's peak as the budget every rank
reports its largest peak of the planned steps, beside the budget.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ebbtide
from benchmarks.facts import facts
from benchmarks.measure import one_step
from benchmarks.modes import HOST_LIMIT
from benchmarks.workloads import B_LONG, build
from ebbtide._utils.sizes import GIB

PLANNED_STEPS = 22  # until plans are made and corrected
MOST_PLAIN = 16384  # tokens of a sequence that fit without recomputation


def measure(tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    model, loss_of = build(replace(B_LONG, tokens=tokens), device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found: dict[str, Any] = {}
    if tokens <= MOST_PLAIN:
        found["plain"] = _timed(model, loss_of, 3, steps)
        with ebbtide.offload(model, host_limit=HOST_LIMIT) as handle:
            found["no budget"] = _timed(model, loss_of, PLANNED_STEPS, steps) | _planned(handle)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["checkpoint"] = _timed(model, loss_of, 3, steps)
    model.gradient_checkpointing_disable()
    base, peak = torch.cuda.memory_allocated(), found["checkpoint"]["peak_gib"] * GIB
    with ebbtide.offload(model, budget=int(base + peak), host_limit=HOST_LIMIT) as handle:
        found["a plan at checkpointing's peak"] = _timed(model, loss_of, PLANNED_STEPS, steps) | _planned(handle)
    ebbtide.release_memory()
    return found


def _timed(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], warm_up: int, steps: int) -> dict[str, Any]:
    rows = []
    for _ in range(warm_up + steps):
        dist.barrier()
        rows.append(one_step(model, loss_of, torch.enable_grad))
    timed = rows[warm_up:]
    return {
        "step_ms": statistics.median(each.step_ms for each in timed),
        "peak_gib": max(each.act_peak_bytes for each in timed) / GIB,
        "peaks_gib": [each.act_peak_bytes / GIB for each in rows],
    }


def _planned(handle: ebbtide.OffloadHandle) -> dict[str, Any]:
    predicted, stats = handle.plan.predicted, handle.stats()
    assert predicted is not None
    return {"predicted_ms": predicted.step_s * 1e3, "moved_gib": predicted.moved_bytes / GIB, "stats": stats.metrics(),
            "recipes": [str(region.recipe) for region in handle.plan.regions.values()]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[16384, 32768])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fsdp2.json")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    command = f"torchrun --nproc-per-node {ranks} -m benchmarks.fsdp2"
    result: dict[str, Any] = facts(command, torch.cuda.get_device_name(), options.commit)
    for tokens in options.tokens:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, measure(tokens, options.steps, device))
        result[f"{ranks} devices, {tokens} tokens"] = found
        if dist.get_rank() == 0:
            print(json.dumps(found, indent=1), flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
