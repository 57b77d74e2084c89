"""Processes that are ranks of one job, on gloo. None stands for longer than a limit."""

import datetime

import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
MOST_S = 1800  # no machine is so slow


def spawn(work, *args, ranks=RANKS):
    """As mp.spawn, and fails where processes stand."""
    context = mp.spawn(work, args, nprocs=ranks, join=False)
    try:
        assert any(context.join(timeout=MOST_S) for _ in range(ranks)), "ranks stand"
    finally:
        for process in context.processes:
            process.kill()


def join(rank, folder, ranks=RANKS, limit_s=MOST_S):
    """The store of the job that this process is a rank of from now on."""
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(datetime.timedelta(seconds=limit_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return store
