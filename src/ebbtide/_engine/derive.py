"""Saved tensors that are dropped, and computed again from other saved tensors when backward reads them.

Note [Derived tensors]
~~~~~~~~~~~~~~~~~~~~~~
1. The autograd node of a tensor often holds all operands: SiluBackward0 the input, MulBackward0 both factors,
   AddmmBackward0 both matrices. The node's operator makes the tensor again. No code of the model runs, no random
   number is drawn, no module has to be in another state: the node says which operator ran, on what.
2. A derivation refers to operands as our hooks packed them: kept, moved or derived in turn. The node stands behind the
   tensor's reader in the graph and runs later in backward, so operands live no longer than without a derivation.
3. An operand not saved by a node is looked for at the node before: a cast or a sum saves nothing. Hooks of others
   are never called: a tensor packed by anybody else is no operand.
4. A site derives only behind a comparison: a tensor of the site, or of the same site in another region, was equal, bit
   for bit, to the derived tensor. The comparison guards against kernels that compute otherwise. All arguments come from
   nodes, edges, and the module that owns a norm's weight: a value seen once says nothing about the next. Under a
   recipe by hand a region derives from the second forward on, if the first left its parameters as they were: sharding
   frees and swaps weights.
5. A tensor changed in place before the save is no result of its node any more, and is saved. Memory that is still alive
   when backward reads is used as it is.
6. As for recomputation, parameters and the modes of arithmetic (TF32, deterministic kernels) have to be the same when
   backward runs. A derivation reads a bias that plain autograd does not save, and operands whose node may not take part
   in the present backward: changed in place after forward, these raise a ModifiedError.
7. Tensors of one storage share a derivation. The first read computes and the end of the last ticket frees: several
   nodes read the input of projections one after another.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch

from ebbtide._engine.parcel import Kept, Ticket, check_unmodified, version_alias
from ebbtide._types import Stream
from ebbtide._utils.storage import checksum_of
from ebbtide._utils.torch_private import (
    casts_arguments,
    graph_task_id,
    keeps_graph,
    storage_offset,
    without_autocast,
)

Results: TypeAlias = dict[object, torch.Tensor]
"""What the present read has computed, by expression or derivation."""

Read: TypeAlias = Callable[[Any, Results], torch.Tensor]
"""Unpacks an operand."""

_DEEPEST = 8  # derivations in a row: a read computes all of them, and each takes a few frames of the stack


class Expression:
    """An operator and its operands: packed tensors, further expressions, and None.

    Attributes:
        settings: keyword arguments of the operator.
        is_shared: several operators of an expression need the result.
    """

    __slots__ = ("is_shared", "operands", "operate", "settings")

    def __init__(
        self,
        operate: Callable[..., torch.Tensor],
        operands: Sequence[Any],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.operate = operate
        self.operands = operands
        self.settings = settings
        self.is_shared = False

    def compute(self, read: Read, results: Results) -> torch.Tensor:
        """The result, on the current stream."""
        if self.is_shared and self in results:
            return results[self]
        operands = [
            each if each is None else each.compute(read, results) if type(each) is Expression else read(each, results)
            for each in self.operands
        ]
        result = self.operate(*operands, **self.settings)
        if self.is_shared:
            results[self] = result
        return result

    def with_operands(self, change: Callable[[Any], Any], done: "dict[Expression, Expression]") -> "Expression":
        """The expression with `change(packed)` in place of each packed operand; shared expressions stay shared."""
        if self not in done:
            operands = [
                each if each is None else each.with_operands(change, done) if type(each) is Expression else change(each)
                for each in self.operands
            ]
            done[self] = Expression(self.operate, operands, self.settings)
            done[self].is_shared = self.is_shared
        return done[self]

    def packed(self) -> "list[Any]":
        """All packed operands."""
        return [o for each in self.operators() for o in each.operands if o is not None and type(o) is not Expression]

    def operators(self) -> "list[Expression]":
        """The expression, and all expressions that it needs, each once. A loop: run for each derived tensor of a
        forward, and a call for each operator would take as long as the rest."""
        found: list[Expression] = [self]
        for each in found:  # and those added meanwhile
            for own in each.operands:
                if type(own) is Expression and own not in found:
                    found.append(own)
        return found


class Derivation:
    """How to compute the memory of saved tensors again. All tensors of a storage share one.

    Args:
        expression: computes `owner`.
        owner: the tensor that was made with the storage.
        read: unpacks the operands.

    Attributes:
        source: the storage. If still alive when backward reads, nothing is computed.
        depth: number of derivations that one read may have to compute.
        is_possible: all operands are as they were saved, in memory, and near.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_expression",
        "_read",
        "_size",
        "_stream",
        "_stride",
        "_value",
        "depth",
        "is_possible",
        "source",
    )

    def __init__(self, expression: Expression, owner: torch.Tensor, read: Read) -> None:
        self._expression = expression
        self.source = weakref.ref(owner.untyped_storage())
        self._size, self._stride, self._dtype = owner.size(), owner.stride(), owner.dtype
        self._read = read
        self._value: torch.Tensor | None = None
        self._stream: Stream = None
        depth, is_possible = 0, True
        for packed in expression.packed():
            is_possible = is_possible and _is_ready(packed)
            if isinstance(packed, DerivedTicket):
                depth = max(depth, packed.derivation.depth)
        self.depth = depth + 1
        self.is_possible = is_possible and depth < _DEEPEST

    @property
    def nbytes(self) -> int:
        return math.prod(self._size) * self._dtype.itemsize

    def value(self, stream: Stream, results: Results | None = None) -> torch.Tensor:
        """A tensor with the memory of the owner, valid on `stream`, the current stream."""
        source = self.source()
        if source is not None:
            return torch.empty(0, dtype=self._dtype, device=source.device).set_(source, 0, self._size, self._stride)
        if self._value is not None and self._stream == stream:
            return self._value
        results = {} if results is None else results
        if self not in results:
            results[self] = self._compute(results)
            if graph_task_id() != -1 and not keeps_graph():
                self._value, self._stream = results[self], stream  # until the last ticket ends
        return results[self]

    def equals(self, owner: torch.Tensor) -> torch.Tensor | bool:
        """Whether the derived bytes are those of `owner`; a tensor on the device unless known at once."""
        value = self._compute({})
        if value.dtype is not owner.dtype or value.device != owner.device:
            return False
        return (checksum_of(value.untyped_storage()) == checksum_of(owner.untyped_storage())).all()

    def _compute(self, results: Results) -> torch.Tensor:
        """New memory with the layout of the owner."""
        if torch.is_grad_enabled() or casts_arguments():
            with torch.no_grad(), without_autocast():
                return self._run(results)
        return self._run(results)

    def _run(self, results: Results) -> torch.Tensor:
        value = self._expression.compute(self._read, results)
        is_alike = value.stride() == self._stride and value.size() == self._size
        if is_alike and value.untyped_storage().nbytes() == self.nbytes:
            return value
        # An operator chooses the layout of its result by the operands, which may be laid out otherwise now.
        dense = torch.empty_strided(self._size, self._stride, dtype=value.dtype, device=value.device)
        return dense.copy_(value)


class DerivedTicket:
    """Result of the pack hook for a derived tensor: geometry and the derivation."""

    __slots__ = ("__weakref__", "_offset", "_size", "_stride", "counter", "derivation", "device", "region", "version")

    def __init__(self, derivation: Derivation, t: torch.Tensor, region: str) -> None:
        self.derivation = derivation
        self.region = region
        self.device = t.device
        self.counter = version_alias(t)
        self.version = t._version
        self._size, self._stride, self._offset = t.size(), t.stride(), storage_offset(t)

    def unpack(self, stream: Stream, results: Results | None = None) -> torch.Tensor:
        """The tensor as saved, valid on `stream`, the current stream, with the version counter of the saved tensor.

        Raises ModifiedError.
        """
        counter = self.counter
        if counter._version != self.version:
            what = f"a tensor saved in {self.region or '<root>'}"
            check_unmodified(counter, self.version, what, counter.dtype, counter.device, self._size)
        value, counted = self.derivation.value(stream, results), counter.detach()
        is_owner = self._size == value.size() and self._stride == value.stride()
        counted.data = value if is_owner else value.as_strided(self._size, self._stride, self._offset)
        return counted


def owner_of(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor that was made with the storage of `t`, unchanged since then; None if unknown."""
    base = t._base
    owner = t if base is None else base
    if owner.grad_fn is None or owner.output_nr or owner._version or type(owner) is not torch.Tensor:
        return None
    if t.dtype is not owner.dtype or owner.layout is not torch.strided or owner.is_nested:
        return None
    is_whole = not storage_offset(owner) and owner.numel() * owner.element_size() == owner.untyped_storage().nbytes()
    return owner if is_whole and not (t.is_conj() or t.is_neg()) else None


def _is_ready(packed: Any) -> bool:
    """Whether an operand is as it was saved, and a plain tensor in memory."""
    if isinstance(packed, DerivedTicket | Ticket):
        return packed.counter._version == packed.version
    if isinstance(packed, torch.Tensor):  # saved by a recomputation; a subclass too, such as a pending collective
        alias, version = packed, packed._version
    else:
        alias, version, _ = cast("Kept", packed)
    is_plain = type(alias) in (torch.Tensor, torch.nn.Parameter) and alias.layout is torch.strided
    return is_plain and alias._version == version and alias.untyped_storage().nbytes() > 0
