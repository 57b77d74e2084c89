"""Measures how long the device takes to derive saved tensors, between two steps."""

import contextlib
import time
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch

from ebbtide._engine.derive import Expression
from ebbtide._profiling.recorder import Operand, SeenTensor
from ebbtide._types import Device
from ebbtide._utils.torch_private import without_autocast, without_dispatch

_RUNS = 3
_DRAWN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def key_of(seen: SeenTensor) -> Hashable:
    """Equal for tensors that take equally long to derive."""
    assert seen.expression is not None
    return seen.signature, *((each.size, each.stride, each.dtype) for each in _operands(seen.expression))


class DeriveCost(NamedTuple):
    """Cost of an expression.

    Attributes:
        seconds: on the device.
        work_bytes: of results in between.
    """

    seconds: float
    work_bytes: int


def probe_derivations(
    device: Device, tensors: Iterable[SeenTensor], most_bytes: int | None = None
) -> dict[Hashable, DeriveCost]:
    """Costs of deriving `tensors`, by `key_of`, without those that the device has no room for. Waits for the device.

    Operands are random, drawn by a generator of their own.

    Args:
        most_bytes: memory that operands and results may take together; None: what the device has.
    """
    distinct = {key_of(seen): seen.expression for seen in tensors if seen.expression is not None}
    draw = torch.Generator(device.torch_device).manual_seed(0)
    found: dict[Hashable, DeriveCost] = {}
    with torch.no_grad(), without_autocast(), without_dispatch():
        for key, expression in distinct.items():
            with contextlib.suppress(torch.OutOfMemoryError):
                size = _size(expression)
                if most_bytes is None or size.all_bytes <= most_bytes:
                    found[key] = DeriveCost(_seconds(device, expression, draw), size.work_bytes)
    return found


def _operands(expression: Expression) -> list[Operand]:
    found = (operand for each in expression.operators() for operand in each.operands if type(operand) is Operand)
    return sorted(dict.fromkeys(found), key=lambda operand: (operand.tensor, *operand.size))


def _seconds(device: Device, expression: Expression, draw: torch.Generator) -> float:
    values = _values(expression, device.torch_device, draw)
    expression.compute(lambda operand, _: values[operand], {})  # the first run of an operator prepares
    stream = device.current_stream()
    began = device.record(stream)
    for _ in range(_RUNS):
        expression.compute(lambda operand, _: values[operand], {})
    ended = device.record(stream)
    while not device.is_done(ended):
        time.sleep(1e-4)
    return max(device.seconds_between(began, ended) / _RUNS, 1e-9)


class _Size(NamedTuple):
    """Most bytes at once: of results in between, and of operands and all results."""

    work_bytes: int
    all_bytes: int


def _size(expression: Expression) -> _Size:
    """Found without memory. As in `Expression.compute`, shared results live to the end."""
    values = _values(expression, torch.device("meta"), None)
    results: dict[Expression, torch.Tensor] = {}
    alive: list[torch.UntypedStorage] = []  # of operators under way
    moments: list[set[torch.UntypedStorage]] = []

    def run(each: Expression) -> torch.Tensor:
        if each in results:
            return results[each]
        begin = len(alive)
        operands: list[torch.Tensor | None] = []
        for own in each.operands:
            operands.append(own if own is None else run(own) if type(own) is Expression else values[own])
            alive.extend(t.untyped_storage() for t in operands[-1:] if t is not None)
        result = each.operate(*operands, **each.settings)
        moments.append({*alive, result.untyped_storage(), *(t.untyped_storage() for t in results.values())})
        del alive[begin:]
        if each.is_shared:
            results[each] = result
        return result

    given = {t.untyped_storage() for t in values.values()}
    others = {run(expression).untyped_storage(), *given}
    return _Size(
        max(_nbytes(moment - others) for moment in moments), max(_nbytes(moment | given) for moment in moments)
    )


def _nbytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _values(expression: Expression, device: torch.device, draw: torch.Generator | None) -> dict[Operand, torch.Tensor]:
    """Random operands on `device`. Those of one saved tensor share memory, as in training."""
    values: dict[Operand, torch.Tensor] = {}
    first: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for operand in sorted(_operands(expression), key=_nbytes_of, reverse=True):
        if operand.numbers is not None:
            values[operand] = operand.numbers.to(device)
            continue
        shared = first.get((operand.tensor, operand.dtype)) if operand.tensor >= 0 else None
        if shared is None:
            shared = first[operand.tensor, operand.dtype] = _random(operand, device, draw)
        values[operand] = shared.as_strided(operand.size, operand.stride)
    return values


def _nbytes_of(operand: Operand) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(operand.size, operand.stride, strict=True))
    return (reach + 1) * operand.dtype.itemsize


def _random(operand: Operand, device: torch.device, draw: torch.Generator | None) -> torch.Tensor:
    t = torch.empty_strided(operand.size, operand.stride, dtype=operand.dtype, device=device)
    whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,))
    if draw is not None:
        whole.normal_(generator=draw) if t.dtype in _DRAWN else whole.zero_()
    return t
