"""Outputs that a selective recipe saves: packed during the region's forward, one expensive call at a time.

Note [Overwritten outputs]
~~~~~~~~~~~~~~~~~~~~~~~~~~
An output that the region changes in place cannot be saved. Version counters show most changes, but not those of a
kernel that takes an address (Liger rotates q and k in the memory of their projections). The first time that a call's
output is saved, a checksum is therefore taken at the call and compared at the end of the region; an output seen to
change is never saved again. Until the end the output stays on the device, and the host waits for the checksums once. A
planner compares in the first step instead (_profiling/recorder.py), without keeping anything on the device, and a graph
capture does not compare. A first overwrite in a later step, or after the end of the region, goes unnoticed.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ebbtide._engine.hooks import SavedTensorHooks, is_unmodified
from ebbtide._engine.parcel import Ticket, version_alias
from ebbtide._recompute.memory import OutputHistory, history_of
from ebbtide._recompute.ops import ExpensiveOps, OpKind, is_collective, is_hidden_view, op_name, rng_device
from ebbtide._recompute.provenance import CallRecord, is_plain, sequence_type
from ebbtide._recompute.prune import PruneCache, PrunedCall, Pruner
from ebbtide._recompute.rng_autocast import rng_state
from ebbtide._types import Output, Reason
from ebbtide._utils.storage import checksum_of
from ebbtide._utils.torch_private import (
    OperatorMode,
    dispatch_mode_stack,
    nbytes_of,
    sharing_versions,
    sizes_of,
    without_dispatch,
)

RngState: TypeAlias = tuple[torch.device, torch.Tensor]
"""A device, and the state of its generator."""

TensorCount: TypeAlias = Callable[[], int]
"""Number of tensors that autograd has saved so far: equal at equal places of forward and recomputation. Zero (`int`) in
a checkpoint of the user, where only torch knows the number."""

CallSignature: TypeAlias = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class SavedOutput:
    """The outputs of one expensive call.

    Attributes:
        call: the operator, and the number of the operator's call.
        signature: see `call_signature`.
        parts: the outputs, tensors as the hooks packed them.
        sequence: tuple or list for several outputs, None for a single output.
        history: findings about the call, kept for later steps.
        rng_after: generator state after the call, None for a call without random numbers.
        is_overwritten: changed without a new version; see Note [Overwritten outputs].
    """

    call: tuple[Any, int]
    signature: CallSignature
    parts: list[Any]
    sequence: type | None
    history: OutputHistory
    rng_after: RngState | None = None
    is_overwritten: bool = False
    _watched: tuple[tuple[torch.Tensor, int], ...] = ()  # hidden views, with version counters of their own

    @property
    def is_unmodified(self) -> bool:
        are_views = all(counter._version == version for counter, version in self._watched)
        return are_views and all(map(is_unmodified, self.parts))

    def watch(self, counter: torch.Tensor, version: int) -> None:
        """Treat the outputs as modified, and not to be shared with later saved tensors, once `counter` differs."""
        self._watched += ((counter, version),)
        for ticket in self.tickets():
            ticket.parcel.add_version_check(counter, version)

    def tickets(self) -> Iterator[Ticket]:
        return (part for part in self.parts if type(part) is Ticket)

    def unpack(self, hooks: SavedTensorHooks) -> Any:
        """The result of the operator."""
        # Detached: a kept output is a shared alias, and autograd writes its history onto the result of an operator.
        with sharing_versions():
            outputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in map(hooks.unpack_part, self.parts)]
        return outputs[0] if self.sequence is None else self.sequence(outputs)


Call: TypeAlias = "SavedOutput | PrunedCall | OutputHistory | None"
"""State of one call: saved outputs; pruned; not saved because of the history; None for a call that is not expensive, or
whose outputs were handed out."""


class SavedOutputs:
    """Held outputs of one forward of a region, by operator and number of the operator's call.

    Attributes:
        devices: devices of all outputs ever saved.
        records: the pruned calls and the operators skipped downstream of them, in order.
    """

    def __init__(self) -> None:
        self.calls: dict[Any, list[Call]] = defaultdict(list)
        self.devices: set[torch.device] = set()
        self.records: list[CallRecord] = []
        self._in_order: dict[SavedOutput, None] = {}

    def add(self, saved: SavedOutput) -> None:
        op, number = saved.call
        self.calls[op][number] = saved
        self._in_order[saved] = None

    def tickets(self) -> list[Ticket]:
        """Tickets of all saved outputs, in the order of forward."""
        return [ticket for saved in self._in_order for ticket in saved.tickets()]

    def rng_devices(self) -> set[torch.device]:
        """Devices whose random numbers the calls of saved outputs have used."""
        return {saved.rng_after[0] for saved in self._in_order if saved.rng_after is not None}

    def drop_modified(self) -> None:
        """Drop outputs changed or overwritten since their calls: recomputation runs the calls."""
        for saved in list(self._in_order):
            if saved.is_overwritten:
                self.drop(saved, Output.OVERWRITTEN)
            elif not saved.is_unmodified:
                self.drop(saved, Output.CHANGED)

    def drop_unused(self) -> None:
        """Drop outputs that a complete recomputation did not use, and do not save them in later steps."""
        for saved in list(self._in_order):
            self.drop(saved, Output.UNUSED)

    def drop(self, saved: SavedOutput, why: Output) -> None:
        saved.history.output = why
        self._replace(saved, saved.history)

    def hand_over(self, saved: SavedOutput) -> None:
        """Forget an output that from now on belongs to the recomputation."""
        self._replace(saved, None)

    def _replace(self, saved: SavedOutput, call: Call) -> None:
        op, number = saved.call
        self.calls[op][number] = call
        self._in_order.pop(saved, None)

    @property
    def has_pruned(self) -> bool:
        return any(isinstance(call, PrunedCall) for calls in self.calls.values() for call in calls)

    def unprune(self) -> None:
        """Recompute the pruned calls, now and in later steps."""
        for calls in self.calls.values():
            for number, call in enumerate(calls):
                if isinstance(call, PrunedCall):
                    call.history.output = Output.NEEDED
                    calls[number] = call.history


class NumberingMode(OperatorMode):
    """Numbers the calls of operators, except while paused."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False


def numbering_paused() -> contextlib.AbstractContextManager[object]:
    """Around our own operators inside a region's forward or recomputation.

    Also around recomputation: region code that asks for gradients starts a recomputation inside its own forward.
    """
    modes = [mode for mode in dispatch_mode_stack() if isinstance(mode, NumberingMode) and not mode.is_paused]
    return _paused(modes) if modes else contextlib.nullcontext()


@contextlib.contextmanager
def _paused(modes: Sequence[NumberingMode]) -> Generator[None, None, None]:
    for mode in modes:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in modes:
            mode.is_paused = False


class OutputRecorder:
    """Packs outputs of operators at their calls.

    A call is known by its number, so every call of an expensive operator has to be counted, also a call that raises.

    `compares`: see Note [Overwritten outputs].
    """

    def __init__(self, hooks: SavedTensorHooks, *, compares: bool) -> None:
        self.outputs = SavedOutputs()
        self.tensor_count: TensorCount = int
        self._hooks = hooks
        # Collectives without a wait so far, whose bytes are not there yet: the result, and arguments of `_hold`. With
        # any pending, every call may be, or reveal, the wait.
        self.pending: list[tuple[torch.Tensor, tuple[tuple[Any, int], CallSignature, Reason | None]]] = []
        self._by_memory: dict[int, SavedOutput] = {}
        self._compares = compares
        self._uncompared: list[tuple[SavedOutput, torch.UntypedStorage, torch.Tensor]] = []  # with checksums

    def count(self, op: Any) -> None:
        """Number a call about to be made. Without `save`, the call will be recomputed."""
        self.outputs.calls[op].append(None)

    def save(
        self, op: Any, args: tuple[Any, ...], out: Any, keep_reason: Reason | None, rng_after: RngState | None = None
    ) -> bool:
        """Save `out`, the result of the call counted last; on the device for a `keep_reason`.

        Returns whether the output is saved, or will be after the wait of a collective.
        """
        call = op, len(self.outputs.calls[op]) - 1
        signature = call_signature(self.tensor_count(), args)
        if is_collective(op):
            self.pending.append((out, (call, signature, keep_reason)))
            return True
        return self._hold(out, call, signature, keep_reason, rng_after)

    def prune(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, pruner: Pruner) -> bool:
        """Prune the call counted last, with result `out`. False for a call known as needed or with several results."""
        history = self._next_history()
        if not is_plain(out):
            return False
        self._hooks.skip(out)
        if history.output is not None:
            self.outputs.calls[op][-1] = history
            return False
        pruner.prune(op, args, kwargs, out, history)
        self.outputs.records = pruner.records
        return True

    def follow(self, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """Any call has returned `out`: note waits for collectives, and hidden views of saved outputs."""
        if self.pending:
            self._note_waits(op, args, out)
        if self._by_memory and is_hidden_view(op):
            saved = self._by_memory.get(_memory(args[0]))
            if saved is not None:
                for t in [out] if sequence_type(out) is None else out:
                    saved.watch(_counter(t), t._version)

    def close(self, is_whole: bool) -> None:
        """The forward has ended or raised: from now on `outputs` is the sole owner of saved outputs."""
        if is_whole and self._uncompared:
            self._compare()
        self._uncompared.clear()
        self._by_memory.clear()
        self.pending.clear()

    def _compare(self) -> None:
        with without_dispatch():
            differ = [(saved, (checksum_of(storage) != sums).any()) for saved, storage, sums in self._uncompared]
            for saved, differs in differ:  # the host waits once, after all kernels
                saved.is_overwritten |= bool(differs) and saved.is_unmodified
                saved.history.compared = saved.call

    def _next_history(self) -> OutputHistory:
        call = self._hooks.region_call
        return history_of(call.site(call.next_index))

    def _hold(
        self,
        out: Any,
        call: tuple[Any, int],
        signature: CallSignature,
        keep_reason: Reason | None,
        rng_after: RngState | None = None,
    ) -> bool:
        sequence = sequence_type(out)
        outputs: list[Any] = [out] if sequence is None else list(out)
        if not all(isinstance(t, torch.Tensor | int | float | None) for t in outputs):
            return False  # nested lists, from an operator chosen by a predicate
        history = self._next_history()
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        if history.drops_output():
            for t in tensors:  # the numbers of later saved tensors do not change
                self._hooks.skip(t)
            stats = self._hooks.region_call.context.recorder.stats
            stats.dropped.add(sum(map(nbytes_of, tensors)))
            op, number = call
            self.outputs.calls[op][number] = history
            return False
        with sharing_versions():
            parts: list[Any] = [
                self._hooks.pack_as(t, keep_reason) if isinstance(t, torch.Tensor) else t for t in outputs
            ]
        saved = SavedOutput(call, signature, parts, sequence, history, rng_after)
        for t in tensors:
            self._by_memory[_memory(t)] = saved
            self.outputs.devices.add(t.device)
            if self._compares and history.compared != call and self._may_compare(t):
                storage = t.untyped_storage()
                with without_dispatch():
                    self._uncompared.append((saved, storage, checksum_of(storage)))
        self.outputs.add(saved)
        return True

    def _may_compare(self, t: torch.Tensor) -> bool:
        has_bytes = type(t) is torch.Tensor and t.layout is torch.strided
        is_served = has_bytes and self._hooks.region_call.context.serves(t.device)
        return is_served and not self._hooks.is_captured([t.device])

    def _note_waits(self, op: Any, args: tuple[Any, ...], out: Any) -> None:
        if op_name(op) == "_c10d_functional::wait_tensor":
            self._hold_awaited(out)
        for arg in args:
            if type(arg).__name__ == "AsyncCollectiveTensor" and arg.completed:
                self._hold_awaited(arg.elem)

    def _hold_awaited(self, out: torch.Tensor) -> None:
        for place, (result, call) in enumerate(self.pending):
            if result is out or _memory(result) == _memory(out):
                del self.pending[place]
                self._hold(out, *call)  # `out`, not the pending result: later changes count there
                return


class SaveOutputsMode(NumberingMode):
    """Around a region's forward: packs the outputs of expensive operators.

    Args:
        hooks: pack the outputs.
        ops: which operators.
        keep_reason: why outputs stay on the device, None for outputs that travel.
        sites: numbers of the expensive calls to save, None for all.
        pruned: members of `sites` to prune; see Note [Pruning] in provenance.py.
        cache: of the region.

    Attributes:
        inside: per pattern of `ops.modules`, how many matching modules the forward is inside.
        tracks_rng: whether to record generator states; impossible during a graph capture.
    """

    def __init__(
        self,
        hooks: SavedTensorHooks,
        ops: ExpensiveOps,
        keep_reason: Reason | None,
        sites: tuple[int, ...] | None,
        pruned: tuple[int, ...],
        cache: PruneCache,
    ) -> None:
        super().__init__()
        self._hooks = hooks
        self.recorder = OutputRecorder(hooks, compares=hooks.step_recorder is None)
        self.outputs = self.recorder.outputs
        self.inside: Counter[str] = Counter()
        self.tracks_rng = True
        self._ops = ops
        self._keep_reason = keep_reason
        self._sites = None if sites is None else frozenset(sites)
        self._pruned = frozenset(pruned)
        self._pruner = Pruner(self.outputs.calls, (sites, pruned), cache)
        self._expensive_calls = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return self.run_op(op, args, kwargs)
        kind = self._ops.kind_of(op)
        if kind.communicates:
            self._pruner.invalidate()  # a repeated recomputation would communicate twice
        if kind.conditions:
            return self._call(op, args, kwargs, kind)
        out = self.run_op(op, args, kwargs)
        if kind.is_hidden_view or self.recorder.pending:
            self.recorder.follow(op, args, out)
        if self._pruner.follows:
            self._pruner.follow(op, args, kwargs, out)
        return out

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: OpKind) -> Any:
        """Run an operator with expensive calls."""
        self.recorder.count(op)
        is_expensive = kind.is_always_expensive or self._ops.is_expensive(op, args, kwargs, +self.inside)
        site = self._expensive_calls
        self._expensive_calls += is_expensive
        is_saved = is_expensive and (self._sites is None or site in self._sites)
        before = rng_before(op, args, kwargs) if is_saved and self.tracks_rng else None
        out = self.run_op(op, args, kwargs)
        if is_saved and site in self._pruned:
            is_saved = self.recorder.prune(op, args, kwargs, out, self._pruner)
        elif is_saved:
            is_saved = self.recorder.save(op, args, out, self._keep_reason, rng_after(before))
        if not is_saved and self._pruner.follows:
            self._pruner.follow(op, args, kwargs, out)
        self.recorder.follow(op, args, out)
        return out

    def pack_downstream(self, t: torch.Tensor, number: int) -> Any:
        """Saved tensor `number` packed by the hooks, if downstream of a pruned call; else None."""
        if not self._pruner.is_downstream(t, number):
            return None
        with numbering_paused():
            return self._hooks.pack_as(t, self._keep_reason)

    def close(self, is_whole: bool, metadata: Sequence[object]) -> None:
        """The forward has ended or raised, with saved tensors of `metadata`."""
        self._pruner.close(is_whole, metadata)
        self.recorder.close(is_whole)


def call_signature(tensor_count: int, args: tuple[Any, ...]) -> CallSignature:
    """Properties that tell most calls of an operator apart without reading bytes."""
    described = [
        (a.dtype, sizes_of(a)) if isinstance(a, torch.Tensor) else a if isinstance(a, int | float | str) else None
        for a in args
    ]
    return tensor_count, *described


def _memory(t: torch.Tensor) -> int:
    """A key that views share. A freed key may name another tensor: at worst an output is not saved."""
    return t.untyped_storage()._cdata if type(t) is torch.Tensor else id(t)


def _counter(t: torch.Tensor) -> torch.Tensor:
    """A tensor with the version counter of `t` and without the memory."""
    with sharing_versions():
        if type(t) is torch.Tensor:
            return version_alias(t)
        with without_dispatch():
            return torch.Tensor.detach(t)


def rng_before(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RngState | None:
    """State of the generator that a call about to be made may advance, None for a call without random numbers."""
    device = rng_device(op, args, kwargs)
    return None if device is None else (device, rng_state(device))


def rng_after(before: RngState | None) -> RngState | None:
    """State of the generator after the call, None for an unchanged state."""
    if before is None:
        return None
    device, state = before
    after = rng_state(device)
    return None if torch.equal(state, after) else (device, after)
