"""Host cost of a saved tensor: microseconds that pack and unpack add to forward and backward."""

import contextlib
import time
import warnings

import torch

from benchmarks.modes import Context, ebbtide_context

TENSORS = 200
REPEATS = 300


def host_cost_us(device: torch.device) -> dict[str, float]:
    """Measure the least time per saved tensor in a chain of `exp` with results of 4 KiB, minus the time without hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "moved nothing": intended with min_bytes="1GiB"
        plain = _per_tensor_us(device, contextlib.nullcontext)
        kept = _per_tensor_us(device, lambda: ebbtide_context(min_bytes="1GiB"))
        moved = _per_tensor_us(device, lambda: ebbtide_context(min_bytes=1, window="32KiB", prefetch="32KiB"))
    return {"plain_us": plain, "kept_us": kept - plain, "moved_us": moved - plain}


def _per_tensor_us(device: torch.device, context: Context) -> float:
    start_from = torch.randn(1024, device=device, requires_grad=True)
    return min(_one_pass_us(start_from, context) for _ in range(REPEATS)) / TENSORS


def _one_pass_us(start_from: torch.Tensor, context: Context) -> float:
    torch.accelerator.synchronize()
    start = time.perf_counter()
    with context():
        y = start_from * 1
        for _ in range(TENSORS):
            y = y.exp()
        loss = y.sum()
    loss.backward()
    return (time.perf_counter() - start) * 1e6
