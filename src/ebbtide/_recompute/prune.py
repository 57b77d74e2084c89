"""Pruning decisions of one forward (see Note [Pruning] in provenance.py), cached from forward to forward.

Note [Prune cache]
~~~~~~~~~~~~~~~~~~
To follow outputs downstream costs the host as much as a small operator, for every operator of the region. Most forwards
of a region are alike, and the first forward leaves a cache entry: the pruned calls, the records of all skipped
operators and the numbers of the held saved tensors. A later forward whose first pruned call has an equal signature and
equal output metadata only holds the saved tensors of these numbers. At the end, the metadata of all saved tensors and
the pruned calls must equal the entry; otherwise the forward prunes nothing, and the entry is removed.
Differences without an effect on saved tensors show up in recomputation, which compares every skipped call with the
entry's records. Two alternating paths with one first call share one entry, and every second forward is not pruned.
Consumers after the last saved tensor do not matter, because recomputation ends before: a mixture of experts reorders
the experts' outputs after the last saved tensor.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ebbtide._recompute.memory import OutputHistory
from ebbtide._recompute.provenance import CallRecord, OpProvenance, record_of
from ebbtide._types import Output


class PrunedCall(NamedTuple):
    """A call whose downstream saved tensors are held instead of the output, and findings about the output."""

    history: OutputHistory


class _NumberedCall(NamedTuple):
    """`number` counts the calls of the record's operator."""

    record: CallRecord
    number: int


class PrunedForward(NamedTuple):
    """A cache entry: one forward of a region.

    Attributes:
        calls: the pruned calls.
        records: the pruned calls and all skipped operators, in order.
        downstream: numbers of the held saved tensors.
        metadata: tensor metadata of all saved tensors.
    """

    calls: tuple[_NumberedCall, ...]
    records: list[CallRecord]
    downstream: frozenset[int]
    metadata: Sequence[object]


class PruneCache:
    """Pruned forwards of one region by recipe and first call. Keeps the latest 16: batches come in many sizes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, PrunedForward] = {}

    def find(self, recipe: Hashable, first: _NumberedCall) -> PrunedForward | None:
        return self._known.get((recipe, first))

    def add(self, recipe: Hashable, forward: PrunedForward) -> None:
        oldest_first = list(self._known)  # in one step: several threads may run one model
        if len(oldest_first) >= 16:
            self._known.pop(oldest_first[0], None)
        self._known[recipe, forward.calls[0]] = forward

    def remove(self, recipe: Hashable, first: _NumberedCall) -> None:
        self._known.pop((recipe, first), None)


class Pruner(OpProvenance):
    """Finds the saved tensors downstream of pruned calls, during one forward of a region.

    Args:
        calls: calls of the forward so far by operator; pruned calls are written there.
        recipe: a key for which calls are saved and pruned.
        cache: of the region.

    Attributes:
        follows: whether operators have to be passed to `follow`.
        records: the pruned calls and all operators downstream of them, in order.
    """

    def __init__(self, calls: Mapping[Any, list[Any]], recipe: Hashable, cache: PruneCache) -> None:
        super().__init__()
        self._calls = calls
        self._recipe = recipe
        self._cache = cache
        self._known: PrunedForward | None = None
        self._differs = False
        self._pruned: list[_NumberedCall] = []
        self._downstream: set[int] = set()
        self._unprunable = 0  # as of the last saved tensor: later consumers do not matter
        self.follows = False
        self.records: list[CallRecord] = []

    def record(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Any], sequence: type | None
    ) -> None:
        self.records.append(record_of(op, args, kwargs, tensors, sequence))

    def prune(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: torch.Tensor, history: OutputHistory
    ) -> None:
        """Prune the call of `op` counted last, which has returned `out`."""
        number = len(self._calls[op]) - 1
        call, place = _NumberedCall(record_of(op, args, kwargs, [out], None), number), len(self._pruned)
        self._calls[op][number] = PrunedCall(history)
        self._pruned.append(call)
        if place == 0:
            self._known = self._cache.find(self._recipe, call)
            self.follows = self._known is None
            if self._known is not None:
                self.records = self._known.records
        if self._known is None:
            self.begin(place, op, args, kwargs, out)
        elif place >= len(self._known.calls) or self._known.calls[place] != call:
            self._differs = True

    def is_downstream(self, t: torch.Tensor, number: int) -> bool:
        """Whether to hold saved tensor `number`, computed from a pruned call. To be called for every saved tensor."""
        self._unprunable = self.unprunable
        if self._known is not None:
            return number in self._known.downstream
        if not self.follows or not self.of(t):
            return False
        self._downstream.add(number)
        return True

    def close(self, is_whole: bool, metadata: Sequence[object]) -> None:
        """The forward has ended or raised, with saved tensors of `metadata`."""
        if not self._pruned:
            return
        if self._unprunable:
            self._unprune()
        elif self._known is not None:
            expected = self._known.metadata if is_whole else self._known.metadata[: len(metadata)]
            is_short = is_whole and len(self._pruned) < len(self._known.calls)
            if self._differs or is_short or metadata != expected:
                self._cache.remove(self._recipe, self._pruned[0])
                self._unprune()
        elif is_whole:
            forward = PrunedForward(tuple(self._pruned), self.records, frozenset(self._downstream), metadata)
            self._cache.add(self._recipe, forward)

    def _unprune(self) -> None:
        """Prune nothing in this forward, and never again the calls known as unprunable."""
        for place, call in enumerate(self._pruned):
            pruned = self._calls[call.record.op][call.number]
            if not isinstance(pruned, PrunedCall):
                continue  # region code asked for gradients, and a recomputation has needed the call
            self._calls[call.record.op][call.number] = pruned.history
            if self._unprunable >> place & 1:
                pruned.history.output = Output.NEEDED
