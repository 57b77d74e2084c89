"""Compares derived tensors with saved tensors in the warm-up: planners count on equal bytes alone.

A comparison needs memory for both tensors. A recomputation has the operands of a region at hand, and a warm-up has
memory to spare; the first forward of a plan within a budget has neither.
"""

import contextlib
from collections.abc import Generator, Hashable, Sequence
from typing import Any, cast

import torch

from ebbtide._engine.context import HookContext
from ebbtide._engine.derive import Derivation, Expression, owner_of
from ebbtide._engine.derive_rules import Deriver, KnownOperands
from ebbtide._engine.parcel import Kept, keep
from ebbtide._engine.select import why_never
from ebbtide._types import Device, RecomputeRecorder
from ebbtide._utils.torch_private import next_node, without_dispatch

MAY_BE_OPERAND = (torch.Tensor, torch.nn.Parameter)


class DerivationChecks:
    """The comparisons of one step in which every region is recomputed.

    Args:
        context: the parameters of regions, and the choice of saved tensors to move.
        limit_bytes: limit of the allocated memory, comparisons included; None: the memory of the device.
    """

    def __init__(self, context: HookContext, device: Device, limit_bytes: int | None) -> None:
        self._context = context
        self._device = device
        self._limit_bytes = limit_bytes
        self._are_equal: dict[Hashable, torch.Tensor | bool] = {}
        self._comparisons: dict[str, set[Hashable]] = {}  # by region
        self._changed: set[tuple[str, int]] = set()  # region and index, changed by forward before the save
        self._changed_unseen: set[str] = set()  # regions with changes in place unknown to autograd

    def equal(self) -> set[Hashable]:
        """The comparisons with equal bytes, as `Deriver.comparison`. None of regions with changes unknown to autograd:
        bytes may be equal by chance. Waits for the device."""
        unsafe = set[Hashable]().union(*(self._comparisons.get(region, ()) for region in self._changed_unseen))
        return {each for each, is_equal in self._are_equal.items() if each not in unsafe and bool(is_equal)}

    def in_forward(self, region: str) -> RecomputeRecorder:
        """Recorder of the region's forward."""
        return _InForward(region, self._changed)

    @contextlib.contextmanager
    def in_recomputation(self, region: str) -> Generator[RecomputeRecorder, None, None]:
        """Recorder of the region's recomputation."""
        recorder = _InRecomputation(self, region)
        try:
            yield recorder
        finally:
            recorder.kept.clear()  # the recorder lives on until backward is over

    def note_operator(self, region: str, op: Any, args: Sequence[Any]) -> None:
        """An operator of the region's recomputation is about to run."""
        if op._schema.is_mutable and args and not torch.is_grad_enabled():
            changed = cast("Sequence[object]", args[0] if isinstance(args[0], list | tuple) else args[:1])
            if any(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in changed):
                self._changed_unseen.add(region)

    def compare(self, region: str, index: int, t: torch.Tensor, first_node: int, known: KnownOperands) -> None:
        """Compare `t`, recomputed saved tensor number `index`, with the tensor derived from others."""
        parameters = self._context.parameters.get(region)
        if parameters is None or type(t) is not torch.Tensor or (region, index) in self._changed:
            return
        if why_never(t.detach() if is_detached_input(t) else t, self._context) is not None:
            return
        owner = owner_of(t)
        if owner is None:
            return
        deriver = Deriver(is_operand, known, first_node, parameters)
        expression = deriver.derive(owner.grad_fn)
        comparison = deriver.comparison(index, owner.dtype)
        self._comparisons.setdefault(region, set()).add(comparison)
        if expression is None or comparison in self._are_equal or not self._has_room_for(expression, owner):
            return
        derivation = Derivation(expression, owner, _plain)
        if derivation.is_possible:
            with contextlib.suppress(torch.OutOfMemoryError):
                self._are_equal[comparison] = derivation.equals(owner)

    def _has_room_for(self, expression: Expression, owner: torch.Tensor) -> bool:
        """Whether all results fit the limit, if each has at most as many elements as the largest operand, in four bytes
        or more. (A product of broadcast tensors may have more.)"""
        if self._limit_bytes is None:
            return True
        largest = max(owner.numel(), *(_plain(packed).numel() for packed in expression.packed()))
        result_bytes = largest * max(owner.element_size(), 4)
        return self._device.memory().allocated_bytes + len(expression.operators()) * result_bytes <= self._limit_bytes


class _InForward(RecomputeRecorder):
    """Notes which saved tensors were changed in place before the save: nothing derives them. A dispatch mode, as around
    the recomputation of the warm-up, has a linear layer add its bias to a new tensor instead."""

    def __init__(self, region: str, changed: set[tuple[str, int]]) -> None:
        self._region = region
        self._changed = changed

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:  # noqa: ARG002 (protocol of RecomputeRecorder)
        if t._version:
            self._changed.add((self._region, index))


class _InRecomputation(RecomputeRecorder):
    """Compares derived tensors. `kept`: operands, because `KnownOperands` keeps no memory alive."""

    def __init__(self, checks: DerivationChecks, region: str) -> None:
        self.kept: list[Kept] = []
        self._checks = checks
        self._region = region
        self._first_node = next_node()
        self._known = KnownOperands()

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:
        if is_dead or type(t) not in MAY_BE_OPERAND:
            return
        with without_dispatch():
            self._checks.compare(self._region, index, t, self._first_node, self._known)
            self.kept.append(keep(t, self._region))
            self._known.add(t, self.kept[-1], index)


def is_operand(packed: object, unpack: object) -> bool:
    """Whether a packed tensor is on the device: kept, or saved by a recomputation. Hooks of others are never called."""
    is_ours = (getattr(unpack, "__module__", None) or "").startswith("ebbtide.")
    return is_ours and isinstance(packed, tuple | torch.Tensor)


def is_detached_input(t: torch.Tensor) -> bool:
    """Whether `t` is an input of a recomputed region, or a view: a leaf during recomputation."""
    base = t if t._base is None else t._base
    return base.is_leaf and type(base) is torch.Tensor


def _plain(packed: Any, _results: object = None) -> torch.Tensor:
    """The tensor of an operand that was kept, or saved by a recomputation."""
    return cast("torch.Tensor", packed[0] if isinstance(packed, tuple) else packed)
