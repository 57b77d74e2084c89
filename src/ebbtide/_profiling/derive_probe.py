"""Measures how long the device takes to derive saved tensors, between two steps."""

import contextlib
import time
from collections.abc import Hashable, Iterable, Mapping
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
    distinct = {key_of(seen): seen for seen in tensors if seen.expression is not None}
    draw = torch.Generator(device.torch_device).manual_seed(0)
    found: dict[Hashable, DeriveCost] = {}
    with torch.no_grad(), without_autocast(), without_dispatch():
        for key, seen in distinct.items():
            assert seen.expression is not None
            if most_bytes is None or _largest_bytes(seen.expression, seen.nbytes) <= most_bytes:
                with contextlib.suppress(torch.OutOfMemoryError):
                    found[key] = _cost(device, seen.expression, draw)
    return found


def _largest_bytes(expression: Expression, nbytes: int) -> int:
    """Estimate of the memory of operands and all results, before any operator has run: results have as many elements as
    the largest operand or the derived tensor of `nbytes`, in the widest type of operands and casts."""
    operands = [shared[0] for shared in _sharing(expression)]
    casts = (each.settings.get("dtype") for each in expression.operators())
    types = [*(operand.dtype for operand in operands), *(each for each in casts if isinstance(each, torch.dtype))]
    sizes = [each.itemsize for each in types if each.is_floating_point] or [1]  # masks and indices make no results
    largest = max([nbytes, *map(_nbytes_of, operands)]) * max(sizes) // min(sizes)
    return sum(map(_nbytes_of, operands)) + len(expression.operators()) * largest


def _operands(expression: Expression) -> list[Operand]:
    found = (operand for each in expression.operators() for operand in each.operands if type(operand) is Operand)
    return sorted(dict.fromkeys(found), key=lambda operand: (operand.tensor, *operand.size))


def _sharing(expression: Expression) -> list[list[Operand]]:
    """Operands by the memory that they share in training, the largest first: parts of one saved tensor."""
    sharing: dict[Hashable, list[Operand]] = {}
    for operand in sorted(_operands(expression), key=_nbytes_of, reverse=True):
        is_part = operand.tensor >= 0 and operand.numbers is None
        sharing.setdefault((operand.tensor, operand.dtype) if is_part else operand, []).append(operand)
    return list(sharing.values())


def _cost(device: Device, expression: Expression, draw: torch.Generator) -> DeriveCost:
    values: dict[Operand, torch.Tensor] = {}
    for operands in _sharing(expression):
        whole = _random(operands[0], device.torch_device, draw)
        values |= {each: whole.as_strided(each.size, each.stride) for each in operands}
    work_bytes = _work_bytes(expression, values)  # the first run of an operator prepares
    stream = device.current_stream()
    began = device.record(stream)
    for _ in range(_RUNS):
        expression.compute(lambda operand, _: values[operand], {})
    ended = device.record(stream)
    while not device.is_done(ended):
        time.sleep(1e-4)
    return DeriveCost(max(device.seconds_between(began, ended) / _RUNS, 1e-9), work_bytes)


def _work_bytes(expression: Expression, values: Mapping[Operand, torch.Tensor]) -> int:
    """Most bytes of results in between at once."""
    run = _CountedRun(values)
    others = {run.result_of(expression).untyped_storage(), *(t.untyped_storage() for t in values.values())}
    return max(sum(storage.nbytes() for storage in moment - others) for moment in run.moments)


class _CountedRun:
    """Computes as `Expression.compute` does: shared results live to the end. (No function inside of a function: one
    that calls itself is a reference cycle, and would hold the results until Python collects garbage.)

    Attributes:
        moments: the storages alive behind each operator.
    """

    def __init__(self, values: Mapping[Operand, torch.Tensor]) -> None:
        self.moments: list[set[torch.UntypedStorage]] = []
        self._values = values
        self._results: dict[Expression, torch.Tensor] = {}
        self._alive: list[torch.UntypedStorage] = []  # of operators under way

    def result_of(self, each: Expression) -> torch.Tensor:
        """The result of `each`."""
        if each in self._results:
            return self._results[each]
        begin = len(self._alive)
        operands: list[torch.Tensor | None] = []
        for own in each.operands:
            t = own if own is None else self.result_of(own) if type(own) is Expression else self._values[own]
            operands.append(t)
            self._alive += [] if t is None else [t.untyped_storage()]
        result = each.operate(*operands, **each.settings)
        shared = (t.untyped_storage() for t in self._results.values())
        self.moments.append({*self._alive, result.untyped_storage(), *shared})
        del self._alive[begin:]
        if each.is_shared:
            self._results[each] = result
        return result


def _nbytes_of(operand: Operand) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(operand.size, operand.stride, strict=True))
    return (reach + 1) * operand.dtype.itemsize


def _random(operand: Operand, device: torch.device, draw: torch.Generator) -> torch.Tensor:
    if operand.numbers is not None:
        return operand.numbers
    t = torch.empty_strided(operand.size, operand.stride, dtype=operand.dtype, device=device)
    whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,))
    whole.normal_(generator=draw) if t.dtype in _DRAWN else whole.zero_()
    return t
