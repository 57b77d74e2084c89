"""Steps, timed and weighed: medians and quartiles of what one mode does on one model."""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

WARM_UP_STEPS = 2


@dataclass
class Measured:
    """Per step: milliseconds, and bytes above what was allocated before the step."""

    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    act_peak_bytes: list[int] = field(default_factory=list)
    after_bytes: list[int] = field(default_factory=list)
    loss: float = 0.0
    grad_checksum: float = 0.0

    def summary(self) -> dict[str, object]:
        return {
            "step_ms": spread(self.step_ms),
            "forward_ms": spread(self.forward_ms),
            "act_peak_gib": max(self.act_peak_bytes) / 2**30,
            "loss": self.loss,
            "grad_checksum": self.grad_checksum,
        }


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def steps(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    context: Callable[[], contextlib.AbstractContextManager[object]],
    count: int,
) -> Measured:
    """`count` steps of forward and backward after the warm-up; gradients are kept allocated from step to step."""
    measured = Measured()
    for step in range(WARM_UP_STEPS + count):
        is_timed = step >= WARM_UP_STEPS
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        forward_start, forward_end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        forward_start.record()
        with context():
            loss = loss_of()
        forward_end.record()
        loss.backward()
        torch.cuda.synchronize()
        if is_timed:
            measured.step_ms.append((time.perf_counter() - start) * 1e3)
            measured.forward_ms.append(forward_start.elapsed_time(forward_end))
            measured.act_peak_bytes.append(torch.cuda.max_memory_allocated() - before)
            measured.loss = loss.item()
        del loss
        measured.after_bytes.append(torch.cuda.memory_allocated())
    measured.grad_checksum = checksum(model)
    return measured


def checksum(model: torch.nn.Module) -> float:
    """A number that any changed gradient bit is all but sure to change."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.double().sum().item() + p.grad.double().abs().sum().item()
    return total


def link_rate(nbytes: int = 2**30, repeats: int = 5) -> dict[str, float]:
    """GB/s of one pinned copy of `nbytes` each way."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, dst, src in (("out_gb_per_s", host, device), ("in_gb_per_s", device, host)):
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            dst.copy_(src, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        rates[name] = nbytes / statistics.median(times) / 1e9
    return rates
