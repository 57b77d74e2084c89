"""Times of kernels and gaps in a step: the cost of concurrent copies, which no plan can avoid."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import one_step
from benchmarks.modes import Context

_LONG_NS = 100_000  # longer gaps are waits for the host or for a copy
_STEPS = 3


def kernel_times(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], context: Context) -> dict[str, float]:
    """Measure per step, on the stream with the most kernels: their number, milliseconds busy, milliseconds of gaps."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_STEPS):
            one_step(model, loss_of, context)
    streams: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            streams[event.device_resource_id()].append((event.start_ns(), event.duration_ns()))
    kernels = sorted(max(streams.values(), key=len, default=[]))
    gaps = [after[0] - sum(before) for before, after in pairwise(kernels)]
    short = [gap for gap in gaps if 0 < gap < _LONG_NS]
    return {
        "kernels": len(kernels) / _STEPS,
        "busy_ms": sum(duration for _, duration in kernels) / _STEPS / 1e6,
        "short_gaps_ms": sum(short) / _STEPS / 1e6,
        "long_gaps": (len([gap for gap in gaps if gap >= _LONG_NS]) - (_STEPS - 1)) / _STEPS,
    }
