"""Plans within budgets against plain steps and checkpointing, each workload in a process: bars P2 to P5."""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import ebbtide
from benchmarks.measure import WARM_UP_S, for_some_steps, one_step, steps
from benchmarks.modes import HOST_LIMIT, Context, prepared
from benchmarks.turns import in_turns, tidy
from benchmarks.workloads import PLANNED, PlannedWorkload
from ebbtide._utils.sizes import GIB

SETTLING = 12  # steps in which a planner measures, plans, checks the peak and replans
LONG_SETTLING_S = 15.0  # long enough for settled clocks and a replan


@dataclass(frozen=True)
class Settled:
    """The final plan of a run, with the profile and the steps before."""

    plan: ebbtide.Plan
    profile: ebbtide.Profile
    steps: list[dict[str, float]]


def measure_plans(name: str, device: torch.device, count: int) -> dict[str, object]:
    """Plain, checkpointed and planned steps of a workload, in turns."""
    workload = PLANNED[name]
    model, losses = workload.build(device)
    loss_of = losses(1.0)
    base = base_bytes(model, loss_of, workload)
    neighbours = {mode: functools.partial(prepared, mode, model) for mode in workload.neighbours}
    budgets = {"checkpoint's peak": checkpoint_bytes(model, loss_of, base)}
    budgets |= {f"{gib} GiB": base + gib * GIB for gib in workload.budgets_gib}
    plans = {key: settle(model, loss_of, nbytes, LONG_SETTLING_S) for key, nbytes in budgets.items()}
    modes = neighbours | {key: functools.partial(planned, model, settled.plan) for key, settled in plans.items()}
    precise = ("nothing", *workload.precise) if workload.precise else ()
    result: dict[str, object] = {"modes": in_turns(model, loss_of, modes, count, workload.rounds, precise)}
    result["plans"] = {key: about(settled, base) for key, settled in plans.items()}
    result["budgets_gib"] = {key: (nbytes - base) / GIB for key, nbytes in budgets.items()}
    result["steady"] = {key: steady(model, loss_of, settled.plan, count) for key, settled in plans.items()}
    for key, settled in plans.items():
        print(name, key, settled.plan, flush=True)
    return result


def base_bytes(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], workload: PlannedWorkload) -> int:
    """Allocated before a step, gradients included."""
    mode = "nothing" if workload.fits_plain else "checkpoint"
    with prepared(mode, model) as context:
        one_step(model, loss_of, context)
    tidy()
    return torch.cuda.memory_allocated()


def checkpoint_bytes(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], base: int) -> int:
    """The peak of checkpointing, memory from before the step included."""
    with prepared("checkpoint", model) as context:
        peak = max(step.act_peak_bytes for step in steps(model, loss_of, context, 2).steps)
    tidy()
    return base + peak


def settle(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    budget_bytes: int | None,
    seconds: float = 0.0,
    **settings: object,
) -> Settled:
    """The plan after the first steps of a run, for at least `seconds`."""
    handle = ebbtide.offload(model, budget=budget_bytes, host_limit=HOST_LIMIT, **settings)
    settling: list[dict[str, float]] = []

    def settling_step() -> None:
        step = one_step(model, loss_of, contextlib.nullcontext)
        predicted = handle.plan.predicted
        settling.append(
            {
                "step_ms": round(step.step_ms, 2),
                "act_peak_gib": round(step.act_peak_bytes / GIB, 3),
                "predicted_ms": 0.0 if predicted is None else round(predicted.step_s * 1e3, 2),
            }
        )

    try:
        for_some_steps(settling_step, SETTLING, seconds * torch.cuda.is_available())
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


def about(settled: Settled, base: int) -> dict[str, object]:
    plan = settled.plan
    predicted = plan.predicted
    assert predicted is not None
    return {
        "predicted_ms": predicted.step_s * 1e3,
        "predicted_act_peak_gib": (predicted.peak_bytes - base) / GIB,
        "moved_gib": predicted.moved_bytes / GIB,
        "recipes": {name: str(region.recipe) for name, region in plan.regions.items()},
        "settling": settled.steps,
    }


def steady(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], plan: ebbtide.Plan, count: int
) -> dict[str, float]:
    """Steady state: bytes released in a forward, seconds of a median forward, and stalls of a step."""
    handle = ebbtide.offload(model, plan=plan, host_limit=HOST_LIMIT)
    released: list[int] = []
    try:
        for_some_steps(
            lambda: one_step(model, loss_of, contextlib.nullcontext), 3, WARM_UP_S * torch.cuda.is_available()
        )
        stop = handle.subscribe(
            lambda event: released.append(event.nbytes) if event.kind is ebbtide.EventKind.RELEASED else None
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
