"""Plans against plain steps and checkpointing: what bars P1 to P6 are judged by, each workload in one process."""

import contextlib
import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import ebbtide
from benchmarks.kernels import kernel_times
from benchmarks.measure import Measured, Step, merged, one_step, spread, steps
from benchmarks.modes import HOST_LIMIT, Context, prepared
from benchmarks.workloads import PLANNED, Losses, PlannedWorkload
from ebbtide._bytes import GIB
from ebbtide.planner.solve import Solver

_PACKED_ROUNDS = 4
SETTLING = 12  # steps in which a planner watches, plans, looks at the peak and plans again


@dataclass(frozen=True)
class Settled:
    """A plan that its planner is content with, and the steps that led to it."""

    plan: ebbtide.Plan
    profile: ebbtide.Profile
    steps: list[dict[str, float]]


def measure_plans(name: str, device: torch.device, count: int) -> tuple[dict[str, object], ebbtide.Profile]:
    """Plain, checkpointed and planned steps of one workload in turns, and what the plans had predicted; and the profile
    that they were made from."""
    workload = PLANNED[name]
    model, losses = workload.build(device)
    loss_of = losses(1.0)
    base_bytes = _base_bytes(model, loss_of, workload)
    first = _first_figures(model, loss_of, workload)
    budgets = {"checkpoint's peak": base_bytes + first["checkpoint"]}
    budgets |= {f"{gib} GiB": base_bytes + gib * GIB for gib in workload.budgets_gib}
    plans = {key: settle(model, loss_of, nbytes) for key, nbytes in budgets.items()}
    if workload.fits_plain:
        plans["auto"] = settle(model, loss_of, None)
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[Context]]] = {
        key: functools.partial(planned, model, settled.plan) for key, settled in plans.items()
    }
    modes = {key: functools.partial(prepared, key, model) for key in first} | modes
    parts: dict[str, list[Measured]] = {key: [] for key in modes}
    for _ in range(workload.rounds):  # in turns: a device is not the same from minute to minute
        for key, mode in modes.items():
            with mode() as context:
                parts[key].append(steps(model, loss_of, context, -(-2 * count // workload.rounds)))
            tidy()
    result: dict[str, object] = {"modes": {key: merged(measured).summary() for key, measured in parts.items()}}
    result["plans"] = {key: about(settled, base_bytes) for key, settled in plans.items()}
    result["budgets_gib"] = {key: (nbytes - base_bytes) / GIB for key, nbytes in budgets.items()}
    result["steady"] = {key: _steady(model, loss_of, settled.plan, count) for key, settled in plans.items()}
    if "auto" in plans:
        result["kernels"] = _kernels(model, loss_of, plans)
        result["packed"] = _packed(model, losses)
    profile = next(settled.profile for key, settled in plans.items() if key != "auto")
    row = [point.plan for point in Solver(profile).front(workload.predictions)] if workload.predictions else []
    result["predictions"] = [_predicted(model, loss_of, plan, base_bytes, count) for plan in row]
    for key, settled in plans.items():
        print(name, key, settled.plan, flush=True)
    return result, profile


def _base_bytes(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], workload: PlannedWorkload) -> int:
    """Allocated before a step, gradients there."""
    mode = "nothing" if workload.fits_plain else "checkpoint"
    with prepared(mode, model) as context:
        one_step(model, loss_of, context)
    tidy()
    return torch.cuda.memory_allocated()


def _first_figures(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], workload: PlannedWorkload
) -> dict[str, int]:
    """Activation peaks in bytes of what there is without us, by mode."""
    peaks: dict[str, int] = {}
    for mode in workload.neighbours:
        with prepared(mode, model) as context:
            peaks[mode] = max(step.act_peak_bytes for step in steps(model, loss_of, context, 2).steps)
        tidy()
    return peaks


def settle(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], budget_bytes: int | None, **settings: object
) -> Settled:
    """After the steps that a user's run would begin with."""
    handle = ebbtide.offload(model, budget=budget_bytes, host_limit=HOST_LIMIT, **settings)
    settling: list[dict[str, float]] = []
    try:
        for _ in range(SETTLING):
            step = one_step(model, loss_of, contextlib.nullcontext)
            predicted = handle.plan.predicted
            settling.append(
                {
                    "step_ms": round(step.step_ms, 2),
                    "act_peak_gib": round(step.act_peak_bytes / GIB, 3),
                    "predicted_ms": 0.0 if predicted is None else round(predicted.step_s * 1e3, 2),
                }
            )
        profile = handle.profile
        assert profile is not None
        return Settled(handle.plan, profile, settling)
    finally:
        handle.remove()
        tidy()


@contextlib.contextmanager
def planned(model: torch.nn.Module, plan: ebbtide.Plan, **settings: object) -> Iterator[Context]:
    handle = ebbtide.offload(model, plan=plan, host_limit=HOST_LIMIT, **settings)
    try:
        yield contextlib.nullcontext
    finally:
        handle.remove()


def about(settled: Settled, base_bytes: int) -> dict[str, object]:
    plan = settled.plan
    predicted = plan.predicted
    assert predicted is not None
    return {
        "predicted_ms": predicted.step_s * 1e3,
        "bound_ms": predicted.bound_s * 1e3,
        "predicted_act_peak_gib": (predicted.peak_bytes - base_bytes) / GIB,
        "moved_gib": predicted.moved_bytes / GIB,
        "recipes": {name: str(region.recipe) for name, region in plan.regions.items()},
        "settling": settled.steps,
    }


def _steady(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], plan: ebbtide.Plan, count: int
) -> dict[str, float]:
    """Of the steady state: bytes whose device memory was let go in one forward, seconds of a typical forward, and what
    compute waited for the link in a step."""
    handle = ebbtide.offload(model, plan=plan, host_limit=HOST_LIMIT)
    released: list[int] = []
    try:
        for _ in range(3):
            one_step(model, loss_of, contextlib.nullcontext)
        stop = handle.subscribe(
            lambda event: released.append(event.nbytes) if event.what is ebbtide.What.RELEASED else None
        )
        one_step(model, loss_of, contextlib.nullcontext)
        stop()
        before = handle.stats()
        forward_ms = statistics.median(
            one_step(model, loss_of, contextlib.nullcontext).forward_ms for _ in range(count)
        )
        after = handle.stats()
    finally:
        handle.remove()
        tidy()
    return {
        "released_bytes": sum(released),
        "forward_s": forward_ms / 1e3,
        "stall_forward_ms": (after.stall_forward_s - before.stall_forward_s) * 1e3 / count,
        "stall_backward_ms": (after.stall_backward_s - before.stall_backward_s) * 1e3 / count,
    }


def _kernels(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], plans: dict[str, Settled]
) -> dict[str, dict[str, float]]:
    found = {"nothing": kernel_times(model, loss_of, contextlib.nullcontext)}
    for key, settled in plans.items():
        with planned(model, settled.plan) as context:
            for _ in range(3):
                one_step(model, loss_of, context)
            found[key] = kernel_times(model, loss_of, context)
        tidy()
    return found


def _packed(model: torch.nn.Module, losses: Losses) -> dict[str, object]:
    """Steps of batches that change every time, from half the size on: with a planner over plain, batch by batch."""
    full = losses(1.0)
    shares = (0.5, 0.8, 1.0, 0.65, 0.9, 0.55, 0.75)
    batches = [losses(share) for share in shares]
    handle = ebbtide.offload(model, host_limit=HOST_LIMIT)
    for _ in range(SETTLING // 2):
        one_step(model, full, contextlib.nullcontext)
    profile = handle.profile
    handle.remove()
    times: dict[str, list[float]] = {"plain": [], "planned": []}
    for _ in range(_PACKED_ROUNDS):
        times["plain"] += _timed(model, batches)
        handle = ebbtide.offload(model, host_limit=HOST_LIMIT, profile=profile)
        times["planned"] += _timed(model, batches)
        handle.remove()
    ratios = [ours / plain for ours, plain in zip(times["planned"], times["plain"], strict=True)]
    by_share = {share: round(statistics.median(ratios[k :: len(shares)]), 4) for k, share in enumerate(shares)}
    return {"ratio": spread(ratios), "by_share": by_share}


def _timed(model: torch.nn.Module, batches: list[Callable[[], torch.Tensor]]) -> list[float]:
    """Milliseconds of each batch, when each has been seen twice before."""
    for loss_of in batches * 2:
        one_step(model, loss_of, contextlib.nullcontext)
    return [one_step(model, loss_of, contextlib.nullcontext).step_ms for loss_of in batches]


def _predicted(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], plan: ebbtide.Plan, base_bytes: int, count: int
) -> dict[str, float]:
    with planned(model, plan) as context:
        measured: list[Step] = steps(model, loss_of, context, max(2, count)).steps
    tidy()
    predicted = plan.predicted
    assert predicted is not None
    return {
        "predicted_ms": predicted.step_s * 1e3,
        "measured_ms": spread([step.step_ms for step in measured])["median"],
        "predicted_peak_gib": predicted.peak_bytes / GIB,
        "measured_peak_gib": (base_bytes + max(step.act_peak_bytes for step in measured)) / GIB,
    }


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
