"""Ranks of one job plan from one profile: what runs again has to be the same everywhere, or collectives would hang."""

import json
import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import bits
from test_control import SETTINGS, batch, make
from torch import nn

import ebbtide
from ebbtide.planner.control import Phase

RANKS = 2
STEPS = 6


def losses_and_gradients(model, rank):
    found = []
    for k in range(STEPS):
        model.zero_grad()
        loss = model(batch(10 * k + rank))
        loss.backward()
        found += [bits(loss).hex(), *[bits(p.grad).hex() for p in model.parameters()]]
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    plain = losses_and_gradients(nn.parallel.DistributedDataParallel(make()), rank)
    model = nn.parallel.DistributedDataParallel(make())
    handle = ebbtide.offload(model, budget=psutil.Process().memory_info().rss + 2**34, **SETTINGS)
    ours = losses_and_gradients(model, rank)
    recipes = {name: str(region) for name, region in handle.plan.regions.items()}
    is_planned = handle._control.phase is Phase.PLANNED
    result = {"is_equal": ours == plain, "is_planned": is_planned, "recipes": recipes, "time": handle.profile.plain_s}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # threads of gloo and reducers of DDP do not always end in good order with the interpreter


def test_two_ranks_go_by_one_plan(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(result["is_equal"] and result["is_planned"] for result in results)
    assert results[0]["recipes"] == results[1]["recipes"]
    assert results[0]["time"] == results[1]["time"]
