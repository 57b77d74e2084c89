"""A model of the zoo with checkpointing of every block, of fewer blocks, and with plans within budgets."""

import contextlib
import copy
import fnmatch
import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.checkpoint import checkpoint

import ebbtide
from benchmarks.measure import Step, one_step
from benchmarks.measure import steps as steady_steps
from benchmarks.modes import HOST_LIMIT
from benchmarks.turns import tidy
from benchmarks.zoo.models import ZOO, built
from ebbtide._devices.accelerator import AcceleratorDevice
from ebbtide._planner.solve import Question, answer
from ebbtide._utils.garbage import full_collections
from ebbtide._utils.sizes import GIB

FIRST = 20  # steps from `offload` on that measure, plan, pin and correct
MOST = 90  # steps from `offload` on, if no plan is frozen before
ALONE_STEPS = 12
TURN = 5

Loss = Callable[[], torch.Tensor]


def measure_model(
    name: str, device: torch.device, shares: Sequence[float], count: int, *, tiny: bool = False
) -> Iterator[dict[str, object]]:
    """Plain steps, checkpointed steps, and `count` steps of the final plan within each budget and without a budget.

    Yields all results so far after each budget, and the complete results last.

    Args:
        shares: budgets, as shares of the way from checkpointing's peak to the plain peak.
    """
    model, loss_of = built(name, device, tiny=tiny)
    rival = Rival(model, loss_of, ZOO[name](tiny).blocks)
    one_step(model, loss_of, contextlib.nullcontext)
    tidy()
    base = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    plain, full = rival.alone(0), rival.alone(rival.most)
    plain_peak, least_peak = _peak(plain), _peak(full)
    points: list[dict[str, object]] = []
    result: dict[str, object] = {
        "base_gib": base / GIB,
        "plain_ms": _median(plain),
        "plain_peak_gib": plain_peak / GIB,
        "checkpoint_ms": _median(full),
        "checkpoint_peak_gib": least_peak / GIB,
        "blocks": rival.most,
        "points": points,
    }
    for share in shares:
        act_bytes = int(least_peak + share * (plain_peak - least_peak))
        # Steps without a device have no peaks: every budget fits.
        budget = base + act_bytes if torch.cuda.is_available() else 64 * GIB
        blocks = rival.fewest(act_bytes, plain_peak, least_peak)
        found = _online(model, loss_of, rival, blocks, count, act_bytes, budget=budget)
        points.append({"share": share, "budget_gib": act_bytes / GIB, **found})
        yield result
    result["no budget"] = _online(model, loss_of, rival, 0, count, plain_peak)
    result["at most 5 % slower"] = _online(model, loss_of, rival, 0, count, plain_peak, max_slowdown=0.05)
    yield result


class Rival:
    """Checkpointing of some blocks, by a copy of the model with the same parameters, on the same inputs.

    Args:
        loss_of: runs the model it is called with.
        patterns: of the blocks.

    Attributes:
        most: number of blocks.
    """

    def __init__(
        self, model: torch.nn.Module, loss_of: Callable[[torch.nn.Module], torch.Tensor], patterns: Sequence[str]
    ) -> None:
        shared = itertools.chain(model.parameters(), model.buffers())
        self._model = copy.deepcopy(model, {id(t): t for t in shared})
        self._loss_of = functools.partial(loss_of, self._model)
        named = list(self._model.named_modules())
        self._blocks = [module for pattern in patterns for fqn, module in named if _is_match(fqn, pattern)]
        self.most = len(self._blocks)

    def alone(self, blocks: int) -> list[Step]:
        """Steps at the clocks of training, with `blocks` checkpointed blocks."""
        with _some_checkpointed(self._blocks, blocks):
            steps = steady_steps(self._model, self._loss_of, contextlib.nullcontext, ALONE_STEPS).steps
        tidy()
        return steps

    def turn(self, blocks: int, count: int = TURN) -> list[Step]:
        """Steps between those of a plan: the speed of a host, and the clocks of a GPU, vary from second to second."""
        with _some_checkpointed(self._blocks, blocks):
            return [one_step(self._model, self._loss_of, contextlib.nullcontext) for _ in range(count)]

    def fewest(self, act_bytes: int, plain_peak: int, least_peak: int) -> int:
        """The least number of checkpointed blocks with a peak of at most `act_bytes`."""
        per_block = max(1.0, (plain_peak - least_peak) / self.most)
        blocks = min(self.most, max(0, math.ceil((plain_peak - act_bytes) / per_block)))
        while blocks > 0 and self._fits(blocks - 1, act_bytes):
            blocks -= 1
        while blocks < self.most and not self._fits(blocks, act_bytes):
            blocks += 1
        return blocks

    def _fits(self, blocks: int, act_bytes: int) -> bool:
        """Whether steps stay below `act_bytes`; the first one may allocate what stays."""
        return _peak(self.turn(blocks, 3)[1:]) <= act_bytes


@contextlib.contextmanager
def _some_checkpointed(blocks: Sequence[torch.nn.Module], count: int) -> Iterator[None]:
    """`count` of the blocks, evenly spread, recompute by torch's checkpoint."""
    chosen = [block for k, block in enumerate(blocks) if (k + 1) * count // len(blocks) > k * count // len(blocks)]
    for block in chosen:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in chosen:
            del block.forward


def _is_match(fqn: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(fqn, pattern) and fqn.count(".") == pattern.count(".")


def _online(
    model: torch.nn.Module,
    loss_of: Loss,
    rival: Rival,
    blocks: int,
    count: int,
    act_bytes: int,
    **settings: object,
) -> dict[str, object]:
    """Steps from `offload` on: time, peak over `act_bytes`, and how long the first steps hold training up, with pinning
    apart: a process that has the memory already pins none. Turns of the rival, with `blocks` checkpointed blocks, come
    between those of the final plan. At the end the goal is planned for once more, on one core."""
    handle = ebbtide.offload(model, host_limit=HOST_LIMIT, **settings)
    try:
        with _pinning() as pinned, _log() as lines:
            steps: list[Step] = []
            turns: list[list[Step]] = []  # of the rival
            collecting_ms: list[float] = []  # Python's garbage collector, in each step
            early = None
            while early is None or len(steps) < early + count or (len(steps) - early) % TURN:
                if early is not None and (len(steps) - early) % TURN == 0:
                    turns.append(rival.turn(blocks))
                collected_s = full_collections()[1]
                steps.append(one_step(model, loss_of, contextlib.nullcontext))
                collecting_ms.append((full_collections()[1] - collected_s) * 1e3)
                if early is None and len(steps) >= FIRST and (len(steps) == MOST or handle.is_plan_frozen):
                    early = len(steps)
        is_frozen, predicted = handle.is_plan_frozen, handle.plan.predicted
        solving_s = _solving_s(handle.profile, **settings)
    finally:
        handle.remove()
        tidy()
    steady, rival_steps = steps[early:], list(itertools.chain.from_iterable(turns))
    # Turns side by side: on one machine, steps of 110 ms became steps of 290 ms for seconds, of the rival too.
    of_rival = statistics.median(
        _median(steady[k * TURN : (k + 1) * TURN]) / _median(turn) for k, turn in enumerate(turns)
    )
    typical_ms = _median(steady)
    later_ms = [(step.step_ms, step.step_ms - ms) for step, ms in zip(steps, collecting_ms, strict=True)][FIRST:]
    return {
        "step_ms": typical_ms,
        "issued_ms": statistics.median(step.issued_ms for step in steady),
        "of_rival": of_rival,
        "rival": {
            "blocks": blocks,
            "step_ms": _median(rival_steps),
            "issued_ms": statistics.median(step.issued_ms for step in rival_steps),
            "peak_gib": _peak(rival_steps) / GIB,
        },
        "rival_steps_ms": [round(step.step_ms, 1) for step in rival_steps],
        "peak_gib": _peak(steady) / GIB,
        "predicted_ms": None if predicted is None else predicted.step_s * 1e3,
        "predicted_peak_bytes": None if predicted is None else predicted.peak_bytes,
        "moved_gib": 0.0 if predicted is None else predicted.moved_bytes / GIB,
        "steps_over": sum(step.act_peak_bytes > act_bytes for step in steps),
        "most_over": _peak(steps) / max(1, act_bytes),
        "first_steps_cost_s": sum(step.step_ms - typical_ms for step in steps[:FIRST]) / 1e3,
        "pinning_s": sum(seconds for seconds, _ in pinned),
        "pinned_gib": sum(nbytes for _, nbytes in pinned) / GIB,
        "frozen_after": early if is_frozen else None,
        "solving_s": solving_s,
        "log": lines,
        "cost_until_frozen_s": sum(step.step_ms - typical_ms for step in steps[:early]) / 1e3,
        "slowest_later": max(ms for ms, _ in later_ms) / typical_ms,
        "slowest_later_without_collections": max(ms for _, ms in later_ms) / typical_ms,
        "steps_ms": [round(step.step_ms, 1) for step in steps],
        "peaks_gib": [round(step.act_peak_bytes / GIB, 3) for step in steps],
    }


def _solving_s(profile: ebbtide.Profile, budget: int | None = None, max_slowdown: float | None = None) -> float:
    """CPU seconds to plan for a goal."""
    only_moves = budget is None and max_slowdown is None
    began_s = time.process_time()
    answer(Question(profile, budget, budget, max_slowdown=max_slowdown, only_moves=only_moves))
    return time.process_time() - began_s


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    """What ebbtide logs inside."""
    lines: list[str] = []
    logger, handler = logging.getLogger("ebbtide"), logging.Handler(logging.INFO)
    level, handler.emit = logger.level, lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _pinning() -> Iterator[list[tuple[float, int]]]:
    """Seconds and bytes of each allocation of pinned memory inside."""
    pinned: list[tuple[float, int]] = []
    host_bytes = AcceleratorDevice.host_bytes

    def timed(device: AcceleratorDevice, nbytes: int) -> torch.Tensor:
        began_s = time.perf_counter()
        memory = host_bytes(device, nbytes)
        pinned.append((time.perf_counter() - began_s, nbytes))
        return memory

    AcceleratorDevice.host_bytes = timed
    try:
        yield pinned
    finally:
        AcceleratorDevice.host_bytes = host_bytes


def _median(steps: Sequence[Step]) -> float:
    return statistics.median(step.step_ms for step in steps)


def _peak(steps: Sequence[Step]) -> int:
    return max(step.act_peak_bytes for step in steps)
