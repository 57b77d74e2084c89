"""Modes of one model measured in turns, in one process: the speed of a device varies from minute to minute."""

import contextlib
import gc
from collections.abc import Callable, Collection, Mapping

import torch

from benchmarks.measure import Measured, merged, steps
from benchmarks.modes import Context

Mode = Callable[[], contextlib.AbstractContextManager[Context]]
"""Prepares a model for the steps of a mode, and yields the context around each forward."""


def in_turns(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    modes: Mapping[str, Mode],
    count: int,
    rounds: int,
    precise: Collection[str] = (),
) -> dict[str, dict[str, object]]:
    """Measure at least twice `count` steps of each mode in `rounds` rounds. Returns summaries by name of the mode.

    Args:
        precise: modes whose ratio matters to the thousandth, less than turns differ: measured in three times as many
            rounds.
    """
    parts: dict[str, list[Measured]] = {key: [] for key in modes}
    for turn in range(3 * rounds if precise else rounds):
        for key, mode in modes.items():
            if turn < rounds or key in precise:
                with mode() as context:
                    parts[key].append(steps(model, loss_of, context, -(-2 * count // rounds)))
                tidy()
    return {key: merged(measured).summary() for key, measured in parts.items()}


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
