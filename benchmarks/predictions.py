"""What plans all along the front predict of steps and peaks, and what comes of them: bar P6."""

from collections.abc import Callable

import torch

import ebbtide
from benchmarks.measure import Step, spread, steps
from benchmarks.planning import base_bytes, checkpoint_bytes, planned, settle, tidy
from benchmarks.workloads import PLANNED
from ebbtide._bytes import GIB
from ebbtide.planner.solve import Solver

_ROUNDS = 3


def measure_predictions(name: str, device: torch.device, count: int) -> tuple[list[dict[str, float]], ebbtide.Profile]:
    """A row for each plan, twice `count` steps of each, in turns; and the profile that the plans were made from, which
    is measured within the peak of checkpointing."""
    workload = PLANNED[name]
    model, losses = workload.build(device)
    loss_of = losses(1.0)
    base = base_bytes(model, loss_of, workload)
    profile = settle(model, loss_of, checkpoint_bytes(model, loss_of, base)).profile
    plans = [point.plan for point in Solver(profile).front(workload.predictions)]
    measured: list[list[Step]] = [[] for _ in plans]
    for _ in range(_ROUNDS):  # a host is not the same from minute to minute
        for plan, found in zip(plans, measured, strict=True):
            found += _steps(model, loss_of, plan, -(-2 * count // _ROUNDS))
    return [_row(plan, base, found) for plan, found in zip(plans, measured, strict=True)], profile


def _steps(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], plan: ebbtide.Plan, count: int) -> list[Step]:
    with planned(model, plan) as context:
        found = steps(model, loss_of, context, count).steps
    tidy()
    return found


def _row(plan: ebbtide.Plan, base: int, found: list[Step]) -> dict[str, float]:
    predicted = plan.predicted
    assert predicted is not None
    times = spread([step.step_ms for step in found])
    return {
        "predicted_ms": predicted.step_s * 1e3,
        "predicted_host_wait_ms": predicted.host_wait_s * 1e3,
        "measured_ms": times["median"],
        "measured_q1_ms": times["q1"],
        "measured_q3_ms": times["q3"],
        "predicted_peak_gib": predicted.peak_bytes / GIB,
        "measured_peak_gib": (base + max(step.act_peak_bytes for step in found)) / GIB,
    }
