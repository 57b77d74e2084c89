"""Processes as ranks of one job on gloo, with a limit on time."""

import datetime
import multiprocessing

import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
LIMIT_S = 1800  # far above the time on any machine
SLOW_IMPORTS = ["torch.distributed.fsdp", "torch.distributed.pipelining", "ebbtide"]


def spawn(work, *args, ranks=RANKS):
    """Call `work` in new processes, and fail if a process hangs. A server with the slow imports forks them all."""
    multiprocessing.set_forkserver_preload(SLOW_IMPORTS)
    context = mp.start_processes(work, args, nprocs=ranks, join=False, start_method="forkserver")
    try:
        assert any(context.join(timeout=LIMIT_S) for _ in range(ranks)), "ranks hang"
    finally:
        for process in context.processes:
            process.kill()


def join(rank, folder, ranks=RANKS, limit_s=LIMIT_S):
    """Make this process a rank of the job and return the job's store."""
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(datetime.timedelta(seconds=limit_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return store
