"""Modes of one model by turns, in one process: a device is not the same from minute to minute."""

import contextlib
import gc
from collections.abc import Callable, Collection, Mapping

import torch

from benchmarks.measure import Measured, merged, steps
from benchmarks.modes import Context

_FINELY = 3

Mode = Callable[[], contextlib.AbstractContextManager[Context]]
"""Makes a model ready for a mode's steps, and gives what is around each of their forwards."""


def in_turns(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    modes: Mapping[str, Mode],
    count: int,
    rounds: int,
    finely: Collection[str] = (),
) -> dict[str, dict[str, object]]:
    """At least twice `count` steps of each mode in so many rounds, by its name.

    Args:
        finely: modes that are told apart by thousandths, less than one turn differs from the next: these go on by
            themselves, until they have had three times as many rounds.
    """
    parts: dict[str, list[Measured]] = {key: [] for key in modes}
    for turn in range(_FINELY * rounds if finely else rounds):
        for key, mode in modes.items():
            if turn < rounds or key in finely:
                with mode() as context:
                    parts[key].append(steps(model, loss_of, context, -(-2 * count // rounds)))
                tidy()
    return {key: merged(measured).summary() for key, measured in parts.items()}


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
