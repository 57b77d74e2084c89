"""Ranks of one job plan from one profile: what runs again has to be the same everywhere, or collectives would hang."""

import json
import os
from pathlib import Path

import psutil
import pytest
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


def join(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, folder)
    plain = losses_and_gradients(nn.parallel.DistributedDataParallel(make()), rank)
    model = nn.parallel.DistributedDataParallel(make())
    handle = ebbtide.offload(model, **within(), **SETTINGS)
    write_down(rank, folder, handle, losses_and_gradients(model, rank) == plain)


def work_that_joins_late(rank: int, folder: str, steps_before: int, has_file: bool) -> None:
    """As far as ebbtide can see, the rank is alone until after these steps."""
    torch.set_num_threads(1)
    model = make()
    profile = f"{folder}/profile{rank}.json" if has_file else None
    handle = ebbtide.offload(model, profile=profile, **within(), **SETTINGS)
    for k in range(steps_before):
        model(batch(10 * k + rank)).backward()
    join(rank, folder)
    parallel = nn.parallel.DistributedDataParallel(model)
    ours = losses_and_gradients(parallel, rank)
    write_down(rank, folder, handle, ours == losses_and_gradients(nn.parallel.DistributedDataParallel(make()), rank))


def within():
    return {"budget": psutil.Process().memory_info().rss + 2**34}


def write_down(rank, folder, handle, is_equal):
    recipes = {name: str(region) for name, region in handle.plan.regions.items()}
    is_planned = handle._control.phase is Phase.PLANNED
    result = {"is_equal": is_equal, "is_planned": is_planned, "recipes": recipes, "time": handle.profile.plain_s}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # threads of gloo and reducers of DDP do not always end in good order with the interpreter


def check_one_plan(folder):
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(result["is_equal"] and result["is_planned"] for result in results)
    assert results[0]["recipes"] == results[1]["recipes"]
    assert results[0]["time"] == results[1]["time"]


def test_two_ranks_go_by_one_plan(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
    check_one_plan(tmp_path)


@pytest.mark.parametrize(("steps_before", "has_file"), [(0, False), (5, False), (5, True)])
def test_ranks_that_meet_after_they_were_offloaded_go_by_one_plan_too(tmp_path, steps_before, has_file):
    mp.spawn(work_that_joins_late, (str(tmp_path), steps_before, has_file), nprocs=RANKS)
    check_one_plan(tmp_path)
