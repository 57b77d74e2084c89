"""Plans without a budget, which must not slow the step: bar P1.

Also the cost of concurrent copies: plain steps, steps with bare copies of equal size, and steps by plans, in turns.
"""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator

import torch

import ebbtide
from benchmarks.kernels import kernel_times
from benchmarks.measure import one_step, spread, steps
from benchmarks.modes import HOST_LIMIT, Context
from benchmarks.planning import LONG_SETTLING_S, SETTLING, planned, settle, steady
from benchmarks.turns import Mode, in_turns, tidy
from benchmarks.workloads import PLANNED, Losses
from ebbtide._planner.solve import Solver
from ebbtide._utils.sizes import GIB

_ROUNDS = 5
_PACKED_ROUNDS = 5
_CHUNK_BYTES = 64 * 2**20
_CHUNKS = 16  # host memory of bare copies, reused in turns
_CARRIED = 0.95  # share of the link's bytes in a forward, as in the bar


def measure_unslowed(
    name: str, device: torch.device, count: int, out_gb_per_s: float
) -> tuple[dict[str, object], ebbtide.Profile]:
    """Measure at least twice `count` steps of each mode. Returns the result, and the profile of all plans.

    Args:
        out_gb_per_s: rate of the link from the device to the host.
    """
    model, losses = PLANNED[name].build(device)
    loss_of = losses(1.0)
    settled = settle(model, loss_of, None, LONG_SETTLING_S)
    plans = {"auto": settled.plan, "all that the link carries": all_carried(settled.profile)}
    first = model.get_submodule(next(iter(settled.plan.regions)))
    forward_s = (
        statistics.median(step.forward_ms for step in steps(model, loss_of, contextlib.nullcontext, 5).steps) / 1e3
    )
    nbytes = {
        "bare copies": _moved_bytes(plans["auto"]),
        "bare copies, 95 %": int(_CARRIED * forward_s * out_gb_per_s * 1e9),
    }
    link = _BareCopies(device)
    # Both modes of a ratio are neighbours in a round: plain steps alone differ by a percent within a minute.
    modes: dict[str, Mode] = {"nothing": lambda: contextlib.nullcontext(contextlib.nullcontext)}
    modes |= {key: functools.partial(planned, model, plan) for key, plan in plans.items()}
    modes |= {key: functools.partial(link.beside, first, moved) for key, moved in nbytes.items()}
    result: dict[str, object] = {"modes": in_turns(model, loss_of, modes, count, _ROUNDS, ("nothing", "auto"))}
    result["copied_gib"] = {key: moved / GIB for key, moved in nbytes.items()}
    result["steady"] = {key: steady(model, loss_of, plan, count) for key, plan in plans.items()}
    result["kernels"] = _kernels(model, loss_of, modes)
    result["packed"] = _packed(model, losses)
    return result, settled.profile


def _moved_bytes(plan: ebbtide.Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.moved_bytes


def all_carried(profile: ebbtide.Profile) -> ebbtide.Plan:
    """Find the plan with the smallest peak that only moves and never stalls, if concurrent copies cost nothing."""
    solver = Solver(profile)
    best = solver.keeping_all()
    assert best.predicted is not None
    low, high = solver.smallest_budget(only_moves=True), best.predicted.peak_bytes
    while high - low > GIB // 64:
        middle = (low + high) // 2
        plan = solver.solve(middle, only_moves=True)
        assert plan.predicted is not None
        if plan.predicted.stall_forward_s + plan.predicted.stall_backward_s > 0:
            low = middle
        else:
            best, high = plan, middle
    return best


class _BareCopies:
    """Pinned copies without any waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(_CHUNKS, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._source, self._target = (torch.empty_like(self._host[:1], device=device)[0] for _ in range(2))
        self._outbound, self._inbound = torch.Stream(device), torch.Stream(device)

    @contextlib.contextmanager
    def beside(self, first: torch.nn.Module, nbytes: int) -> Iterator[Context]:
        """Yield a context around forward: `nbytes` leave from the entry of `first` on, and come back from the end on.

        Copies before `first` would delay values that a model reads on the host.
        """
        chunks = -(-nbytes // _CHUNK_BYTES)

        def leave(*_: object) -> None:
            self._outbound.wait_stream(torch.accelerator.current_stream(self._device))
            with self._outbound:
                for k in range(chunks):
                    self._host[k % _CHUNKS].copy_(self._source, non_blocking=True)

        @contextlib.contextmanager
        def around_forward() -> Iterator[None]:
            yield
            self._inbound.wait_stream(torch.accelerator.current_stream(self._device))
            with self._inbound:
                for k in range(chunks):
                    self._target.copy_(self._host[k % _CHUNKS], non_blocking=True)

        hook = first.register_forward_pre_hook(leave)
        yield around_forward
        hook.remove()
        torch.accelerator.synchronize()


def _kernels(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], modes: dict[str, Mode]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, mode in modes.items():
        with mode() as context:
            for _ in range(3):
                one_step(model, loss_of, context)
            found[key] = kernel_times(model, loss_of, context)
        tidy()
    return found


def _packed(model: torch.nn.Module, losses: Losses) -> dict[str, object]:
    """Measure planned over plain steps, batch by batch. Batch sizes change every step, between half and full."""
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
    """Return milliseconds of each batch, after two steps with each batch."""
    for loss_of in batches * 2:
        one_step(model, loss_of, contextlib.nullcontext)
    return [one_step(model, loss_of, contextlib.nullcontext).step_ms for loss_of in batches]
