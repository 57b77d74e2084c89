"""Times and peaks of steps: medians and quartiles of one mode on one model."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import ebbtide
from benchmarks.modes import Context

WARM_UP_STEPS = 2
# After a pause a GPU exceeds its power limit for a second, and is slower for another second: training has no pauses.
# Later the clocks go up and down about once a second.
WARM_UP_S = 2.5
LEAST_S = 1.5


@dataclass
class Step:
    """Times and peak of one step.

    Attributes:
        issued_ms: time until the host has queued the step. If about as long as the step, the host limits the step.
        act_peak_bytes: peak of device memory above the memory allocated before the step.
    """

    step_ms: float
    forward_ms: float
    issued_ms: float
    act_peak_bytes: int
    loss: float


@dataclass
class Measured:
    """Steps of one mode after the warm-up. `turns_ms`: the median of each turn, if the mode had several turns."""

    steps: list[Step]
    grad_checksum: float
    turns_ms: list[float] = field(default_factory=list[float])

    def summary(self) -> dict[str, object]:
        return {
            "step_ms": spread([step.step_ms for step in self.steps]),
            "turns_ms": self.turns_ms,
            "forward_ms": spread([step.forward_ms for step in self.steps]),
            "issued_ms": spread([step.issued_ms for step in self.steps]),
            "act_peak_gib": max(step.act_peak_bytes for step in self.steps) / 2**30,
            "loss": self.steps[-1].loss,
            "grad_checksum": self.grad_checksum,
        }


def all_frozen(handles: Sequence[ebbtide.OffloadHandle]) -> bool:
    """Whether the plans of `handles` are frozen, on all ranks if there are several."""
    frozen: list[Any] = [all(handle.is_plan_frozen for handle in handles)]
    if "WORLD_SIZE" in os.environ:
        frozen *= dist.get_world_size()
        dist.all_gather_object(frozen, frozen[0])
    return all(frozen)


def merged(parts: Sequence[Measured]) -> Measured:
    """Join several turns of one mode."""
    turns_ms = [statistics.median(step.step_ms for step in part.steps) for part in parts]
    return Measured([step for part in parts for step in part.steps], parts[-1].grad_checksum, turns_ms)


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def one_step(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], context: Context) -> Step:
    """Run and time forward and backward. Gradients stay allocated between steps and are zeroed first."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    clock = _Clock()
    with context():
        loss = loss_of()
    clock.forward_ends()
    loss.backward()
    return clock.step_ends(loss)


class _Clock:
    """Clock started at the begin of a step. Without an accelerator: the host's clock, and no bytes."""

    def __init__(self) -> None:
        self._has_device = torch.cuda.is_available()
        self._before = 0
        self._forward: list[torch.cuda.Event] = []
        if self._has_device:
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._forward = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._start = time.perf_counter()
        if self._has_device:
            self._forward[0].record()

    def forward_ends(self) -> None:
        self._forward_ms = self._ms()
        if self._has_device:
            self._forward[1].record()

    def step_ends(self, loss: torch.Tensor) -> Step:
        issued_ms = self._ms()
        if not self._has_device:
            return Step(issued_ms, self._forward_ms, issued_ms, 0, loss.item())
        torch.cuda.synchronize()
        step_ms = self._ms()
        peak = torch.cuda.max_memory_allocated() - self._before
        return Step(step_ms, self._forward[0].elapsed_time(self._forward[1]), issued_ms, peak, loss.item())

    def _ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3


def steps(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], context: Context, count: int) -> Measured:
    """Measure `count` steps after the warm-up, on an accelerator for at least `LEAST_S`."""
    has_clocks = torch.cuda.is_available()
    measured: list[Step] = []
    for_some_steps(lambda: one_step(model, loss_of, context), WARM_UP_STEPS, WARM_UP_S * has_clocks)
    for_some_steps(lambda: measured.append(one_step(model, loss_of, context)), count, LEAST_S * has_clocks)
    return Measured(measured, checksum(model))


def for_some_steps(step: Callable[[], object], count: int, seconds: float) -> None:
    """Repeat `step` at least `count` times and for at least `seconds`."""
    start = time.perf_counter()
    done = 0
    while done < count or time.perf_counter() - start < seconds:
        step()
        done += 1


def checksum(model: torch.nn.Module) -> float:
    """Return a number that a changed gradient bit almost always changes."""
    total = 0.0
    for p in model.parameters():
        if p.grad is not None:
            total += p.grad.double().sum().item() + p.grad.double().abs().sum().item()
    return total


def link_rate(nbytes: int = 2**30, repeats: int = 5) -> dict[str, float]:
    """Measure GB/s of one pinned copy of `nbytes` in each direction."""
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
