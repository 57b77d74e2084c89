"""Host cost of a save: what pack and unpack add to forward and backward, in microseconds of the launching threads."""

import contextlib
import time
import warnings

import torch

from benchmarks.modes import Context, ebbtide_context

SAVES = 200
REPEATS = 300


def host_cost_us(device: torch.device) -> dict[str, float]:
    """Least time per save of a chain of `exp`, each saving its result of 4 KiB, minus the same without hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "moved nothing": that is what one of them is for
        plain = _per_save_us(device, contextlib.nullcontext)
        kept = _per_save_us(device, lambda: ebbtide_context(min_bytes="1GiB"))
        moved = _per_save_us(device, lambda: ebbtide_context(min_bytes=1, window="32KiB", prefetch="32KiB"))
    return {"plain_us": plain, "kept_us": kept - plain, "moved_us": moved - plain}


def _per_save_us(device: torch.device, context: Context) -> float:
    start_from = torch.randn(1024, device=device, requires_grad=True)
    return min(_one_pass_us(start_from, context) for _ in range(REPEATS)) / SAVES


def _one_pass_us(start_from: torch.Tensor, context: Context) -> float:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    with context():
        y = start_from * 1
        for _ in range(SAVES):
            y = y.exp()
        loss = y.sum()
    loss.backward()
    return (time.perf_counter() - start) * 1e6
