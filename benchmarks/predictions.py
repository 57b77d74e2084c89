"""Predicted against measured steps and peaks of plans on the Pareto curve: bar P6."""

import functools
from typing import Any

import torch

import ebbtide
from benchmarks.planning import LONG_SETTLING_S, base_bytes, checkpoint_bytes, planned, settle
from benchmarks.turns import in_turns
from benchmarks.workloads import PLANNED
from ebbtide._planner.solve import Solver
from ebbtide._utils.sizes import GIB

_ROUNDS = 5  # the speed of a host varies from moment to moment


def measure_predictions(name: str, device: torch.device, count: int) -> tuple[list[dict[str, float]], ebbtide.Profile]:
    """Measure plans in turns, at least twice `count` steps of each.

    Returns:
        A row for each plan, and the profile of all plans: measured by a planner within the peak of checkpointing.
    """
    workload = PLANNED[name]
    model, losses = workload.build(device)
    loss_of = losses(1.0)
    base = base_bytes(model, loss_of, workload)
    profile = settle(model, loss_of, checkpoint_bytes(model, loss_of, base), LONG_SETTLING_S).profile
    plans = [point.plan for point in Solver(profile).pareto_curve(workload.predictions)]
    modes = {str(number): functools.partial(planned, model, plan) for number, plan in enumerate(plans)}
    found = in_turns(model, loss_of, modes, count, _ROUNDS)
    return [_row(plan, base, measured) for plan, measured in zip(plans, found.values(), strict=True)], profile


def _row(plan: ebbtide.Plan, base: int, measured: dict[str, Any]) -> dict[str, float]:
    predicted = plan.predicted
    assert predicted is not None
    times = measured["step_ms"]
    return {
        "predicted_ms": predicted.step_s * 1e3,
        "predicted_host_wait_ms": predicted.host_wait_s * 1e3,
        "measured_ms": times["median"],
        "measured_q1_ms": times["q1"],
        "measured_q3_ms": times["q3"],
        "measured_issued_ms": measured["issued_ms"]["median"],
        "predicted_peak_gib": predicted.peak_bytes / GIB,
        "measured_peak_gib": base / GIB + measured["act_peak_gib"],
    }
