"""The steady state: no pinned allocation, no host synchronisation, equal memory after every step, no growth."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import psutil
import torch

from benchmarks.modes import Context
from ebbtide._engine.derive import DerivedTicket
from ebbtide._engine.parcel import Parcel, Ticket
from ebbtide._engine.process import PROCESS

STEPS = 5


def steady_state(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], context: Context) -> dict[str, object]:
    """Run steps after a warm-up of two and report changes. `is_quiet`: no call synchronised the host."""
    for _ in range(2):
        _step(loss_of, context)
    torch.cuda.synchronize()
    pinned = _pinned_allocations()
    allocated: list[int] = []
    is_quiet = True
    with without_packing_check():
        for _ in range(STEPS):
            is_quiet = is_quiet and _is_quiet(loss_of, context)
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    return {
        "new_pinned_allocations": _pinned_allocations() - pinned,
        "is_quiet": is_quiet,
        "memory_drift_bytes": max(allocated) - min(allocated),
    }


def counters(device: torch.device) -> dict[str, int]:
    """What the process holds. The caller has no graph alive."""
    torch.ones((), requires_grad=True).exp().backward()  # torch owns the graph of a failed backward until the next
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    engines = [engine for engines in PROCESS._engines.values() for engine in engines]
    process = psutil.Process()
    return {
        "parcels": kinds.count(Parcel),
        "tickets": kinds.count(Ticket) + kinds.count(DerivedTicket),
        "store bytes in use": sum(engine.store_stats().used_bytes for engine in engines),
        "threads": threading.active_count(),
        "open files": process.num_fds(),
        "resident bytes": process.memory_info().rss,
        "device bytes": 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device),
    }


def growth(counts: Sequence[int]) -> int:
    """By how much the least of the last half is above the largest of the half before, without a tenth of warm-up."""
    counts = counts[-(-len(counts) // 10) :]
    middle = len(counts) // 2
    return max(0, min(counts[middle:]) - max(counts[:middle])) if middle else 0


def _step(loss_of: Callable[[], torch.Tensor], context: Context) -> None:
    with context():
        loss = loss_of()
    loss.backward()


def _is_quiet(loss_of: Callable[[], torch.Tensor], context: Context) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(loss_of, context)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@contextlib.contextmanager
def without_packing_check() -> Iterator[None]:
    """Skip a check of transformers for packed sequences, which synchronises the host once per forward.

    Also keep attention causal in a capture: with tracing detected, transformers computes attention with an explicit mask.
    """
    with (
        mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None),
        mock.patch("transformers.masking_utils.is_tracing", lambda *_: False),
    ):
        yield


def _pinned_allocations() -> int:
    return torch.cuda.host_memory_stats()["num_host_alloc"]
