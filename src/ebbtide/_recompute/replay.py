"""Outputs that a selective recipe has saved, handed out in recomputation."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._recompute.memory import OutputHistory
from ebbtide._recompute.provenance import PrunedReads, has_pruned, signature_of
from ebbtide._recompute.prune import PrunedCall
from ebbtide._recompute.rng_autocast import set_rng_state
from ebbtide._recompute.saved_outputs import NumberingMode, SavedOutput, SavedOutputs, TensorCount, call_signature
from ebbtide._types import Output
from ebbtide._utils.torch_private import graph_task_id, keeps_graph


class ReplayOutputsMode(NumberingMode):
    """Around a region's recomputation: returns saved outputs in place of expensive calls.

    Attributes:
        tensor_count: part of each call's signature, as in forward.
    """

    def __init__(self, outputs: SavedOutputs, hooks: SavedTensorHooks) -> None:
        super().__init__()
        self._outputs = outputs
        self._hooks = hooks
        self.tensor_count: TensorCount = int
        self._numbers: Counter[Any] = Counter()
        self._skipped = 0
        self.met_pruned = False
        self.reads = PrunedReads()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        calls = None if self.is_paused else self._outputs.calls.get(op)
        if calls is None:
            return self._run(op, args, kwargs)
        number = self._numbers[op]
        self._numbers[op] += 1
        call = calls[number] if number < len(calls) else None
        if isinstance(call, PrunedCall):
            self.met_pruned = True
            return self._skip(op, args, kwargs)
        if isinstance(call, SavedOutput):
            if call.signature != call_signature(self.tensor_count(), args):
                return self._run(op, args, kwargs)  # calls come in another order now
            if call.is_unmodified:
                return self._hand_out(call)
            self._outputs.drop(call, Output.CHANGED)
        elif isinstance(call, OutputHistory):
            call.note_use()
        return self._run(op, args, kwargs)

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.met_pruned and has_pruned(args, kwargs):
            return self._skip(op, args, kwargs)
        return self.run_op(op, args, kwargs)

    def _skip(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        records = self._outputs.records
        record = records[self._skipped] if self._skipped < len(records) else None
        if record is None or record.op is not op or record.signature != signature_of(args, kwargs):
            raise self.reads.refuse(op)  # not the forward's sequence of operators
        self._skipped += 1
        return record.pruned(self.reads)

    def _hand_out(self, saved: SavedOutput) -> Any:
        out = saved.unpack(self._hooks)
        if saved.rng_after is not None:
            set_rng_state(*saved.rng_after)
        if graph_task_id() != -1 and not keeps_graph():
            self._outputs.hand_over(saved)
        return out
