"""Provenance of tensors: the expensive calls that a tensor is computed from, and stand-ins for pruned tensors.

Note [Pruning]
~~~~~~~~~~~~~~
Attention saves q and k after their rotations; the expensive part of q and k is the projections. A recipe may therefore
prune a projection (`Recipe.prune`): the saved tensors downstream of the projection are held instead of the output,
and recomputation skips every operator from the projection to the held tensors.
1. The forward follows the output of a pruned call downstream: the outputs of every operator with a followed argument,
   up to operators whose own outputs are saved. Saved tensors among the followed tensors are held.
2. In recomputation a pruned call returns a PrunedTensor: the metadata of the output without bytes. Every operator with
   a pruned argument is skipped, and returns pruned tensors with the metadata recorded in forward. The sequence of
   operators and the call signatures have to equal the forward's. Held tensors take the places of pruned saved tensors.
3. A PrunedTensor raises when read: by a kernel that takes addresses, as a number, as a saved tensor, or by an operator
   that the forward did not record. A PrunedTensor alive at the end may be read later. In either case the region
   recomputes again with nothing pruned, and later forwards do not prune the calls. A wrong guess costs time, never a
   bit.
4. Skipped operators must not mutate, must not use random numbers, and must return metadata that follows from the
   arguments: an allow list names such operators. Calls followed by any operator off the list are not pruned.
5. A region that communicates with other ranks before its last saved tensor is not pruned: a repeated recomputation
   would communicate twice. Nor is anything pruned in a process with compiled code: stand-ins can trigger a new
   compilation, with other roundings.
6. Not detected: code that branches on the type of a tensor, and native code that reads behind the dispatcher through a
   constant pointer or through to_dlpack with errors suppressed. TorchScript that met a PrunedTensor may save
   otherwise in the repeated recomputation, which is an error.
"""

import functools
import itertools
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ebbtide._errors import RecomputeError
from ebbtide._plans import OP_CLASSES
from ebbtide._recompute.ops import ExpensiveOps, classes_of, communicates, is_view, op_name, rng_device
from ebbtide._utils.torch_private import forbid_data_ptr, has_compiled_code, storage_offset, wrapper_of


class PrunedReadError(RecomputeError):
    """Code needs the bytes of a pruned tensor."""


class PrunedReads:
    """Reads of the pruned tensors of one recomputation, so far and possible later.

    Region code may suppress the error of a read, and a hook that stores the output of a module may read later.
    """

    def __init__(self) -> None:
        self._was_read = False
        self._tensors: list[weakref.ref[PrunedTensor]] = []

    def track(self, pruned: "PrunedTensor") -> None:
        pruned.reads = self
        self._tensors.append(weakref.ref(pruned))

    def refuse(self, reader: object) -> PrunedReadError:
        """Record a read, and return the error to raise."""
        self._was_read = True
        return PrunedReadError(f"{reader} needs a tensor that recomputation pruned")

    def check(self, region: str) -> None:
        """Raises PrunedReadError after a read, and for a tensor still alive after the recomputation."""
        if self._was_read or any(tensor() is not None for tensor in self._tensors):
            raise self.refuse(f"code of {region} (which stores the tensor or suppressed the error)")


class PrunedTensor(torch.Tensor):
    """The metadata of a tensor on its device, without bytes. Every read raises PrunedReadError."""

    reads: PrunedReads

    __torch_function__: Any = cast(Any, torch._C)._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        pruned = next(t for t in _flattened(args, kwargs or {}) if isinstance(t, PrunedTensor))
        raise pruned.reads.refuse(op)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise self.reads.refuse("code that reads memory")

    data_ptr = untyped_storage = storage = tolist = numpy = __array__ = __dlpack__ = _refuse


class CallRecord(NamedTuple):
    """One call of the forward, without bytes.

    Attributes:
        signature: see `signature_of`.
        outputs: size, strides, storage offset, dtype and device of each output.
        sequence: tuple or list for several outputs, None for a single tensor.
    """

    op: Any
    signature: tuple[Any, ...]
    outputs: tuple[tuple[Any, ...], ...]
    sequence: type | None

    def pruned(self, reads: PrunedReads) -> Any:
        """The outputs as pruned tensors."""
        tensors = [wrapper_of(PrunedTensor, *metadata) for metadata in self.outputs]
        for t in tensors:
            reads.track(t)
            forbid_data_ptr(t)
        return tensors[0] if self.sequence is None else self.sequence(tensors)


def record_of(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], sequence: type | None
) -> CallRecord:
    metadata = [(t.size(), t.stride(), storage_offset(t), t.dtype, t.device) for t in tensors]
    return CallRecord(op, signature_of(args, kwargs), tuple(metadata), sequence)


def sequence_type(out: Any) -> type | None:
    """Tuple or list for an operator result of several values, else None."""
    return tuple if isinstance(out, tuple) else list if isinstance(out, list) else None


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments as comparable values, with metadata in place of tensors."""
    return (*map(_describe, args), *((name, _describe(value)) for name, value in kwargs.items()))


def _describe(value: object) -> object:
    if isinstance(value, torch.Tensor):
        # Layouts without strides never compare equal.
        return (value.dtype, value.size(), value.stride(), value.device) if _is_strided(value) else object()
    if isinstance(value, list | tuple):
        return tuple(map(_describe, cast("Sequence[object]", value)))
    return type(value), value  # 1 == 1.0


def is_plain(t: object) -> bool:
    """Whether size, strides and storage offset describe the tensor `t` completely."""
    return isinstance(t, torch.Tensor) and _has_memory(t) and not (t.is_quantized or t.is_conj() or t.is_neg())


def _has_memory(t: torch.Tensor) -> bool:
    return type(t) is torch.Tensor and _is_strided(t)  # a subclass may wrap several storages, or none


def _is_strided(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


def has_pruned(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument is a pruned tensor."""
    return any(type(t) is PrunedTensor for t in _flattened(args, kwargs))


def _flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[object]:
    """All arguments, with lists opened: operators take tensors singly or in lists."""
    values = (*args, *kwargs.values()) if kwargs else args
    if list not in map(type, values) and tuple not in map(type, values):
        return values
    lists = (cast("Sequence[object]", value) if isinstance(value, tuple | list) else (value,) for value in values)
    return list(itertools.chain.from_iterable(lists))


@dataclass(slots=True)
class _Origin:
    """Provenance of one storage. `is_used`: an operator has read the bytes."""

    storage: "weakref.ref[torch.UntypedStorage]"
    calls: int
    is_used: bool = False


class OpProvenance:
    """The numbered calls that each tensor of a forward is computed from, as a bit mask: 1 << n for call n.

    Kept by storage: views need no entry.

    Attributes:
        unprunable: calls with a consumer that cannot be skipped, as a bit mask; -1 for all calls.
    """

    def __init__(self) -> None:
        self._origins: dict[int, _Origin] = {}
        self.unprunable = 0

    def record(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Any], sequence: type | None
    ) -> None:
        """Called for each numbered call and each operator downstream, in order, by `begin` and `follow`."""

    def begin(self, call: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Call number `call` has returned `out`."""
        if has_compiled_code():
            self.invalidate()
        elif is_plain(out) and may_be_skipped(op, args, kwargs):
            self.record(op, args, kwargs, [out], None)
            self._note(out, 1 << call)
        else:
            self.unprunable |= 1 << call

    def invalidate(self) -> None:
        """No call can be pruned; see Note [Pruning], point 5."""
        self.unprunable = -1

    def of(self, t: torch.Tensor) -> int:
        """Calls that `t` is computed from."""
        origin = self.origin_of(t)
        return 0 if origin is None else origin.calls

    def origin_of(self, t: torch.Tensor) -> _Origin | None:
        if not self._origins or not _has_memory(t):
            return None
        storage = t.untyped_storage()
        known = self._origins.get(storage._cdata)
        return known if known is not None and known.storage() is storage else None

    def of_arguments(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Calls that the arguments of an operator are computed from."""
        calls = 0
        if communicates(op):
            self.invalidate()
        if self._origins:
            for t in _flattened(args, kwargs):
                origin = self.origin_of(t) if isinstance(t, torch.Tensor) else None
                if origin is not None:
                    origin.is_used = origin.is_used or not is_view(op)
                    calls |= origin.calls
        return calls

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """An operator without saved outputs has returned `out`. Returns the calls that `out` is computed from."""
        calls = self.of_arguments(op, args, kwargs)
        if calls == 0:
            return 0
        sequence = sequence_type(out)
        tensors: Sequence[Any] = (out,) if sequence is None else out
        if all(map(is_plain, tensors)) and may_be_skipped(op, args, kwargs):
            self.record(op, args, kwargs, tensors, sequence)
            for t in tensors:
                self._note(t, calls | self.of(t))
        else:
            self.unprunable |= calls
        return calls

    def _note(self, t: torch.Tensor, calls: int) -> None:
        origin = self.origin_of(t)
        if origin is not None:
            origin.calls = calls  # `t` is a view
            return
        storage = t.untyped_storage()
        self._origins[storage._cdata] = _Origin(weakref.ref(storage), calls)


class AnyExpensiveOp(ExpensiveOps):
    """Classifies operators for a planner: the op classes whose outputs a plan may save."""

    def __init__(self) -> None:
        super().__init__(tuple(OP_CLASSES))

    def provenance(self) -> OpProvenance:
        return OpProvenance()


# Operators that models apply to q and k between projection and attention, besides pointwise operators, views and
# expensive operators.
_SKIPPABLE = re.compile(
    r"aten::(_fused_rms_norm|_to_copy|cat|clone|constant_pad_nd|flip|mean|native_layer_norm|repeat|roll|stack|sum)"
)


def may_be_skipped(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call mutates nothing, uses no random numbers, and has output metadata that follows from arguments."""
    return _is_skippable(op) and rng_device(op, args, kwargs) is None


@functools.cache
def _is_skippable(op: Any) -> bool:
    name = op_name(op)
    if not name.startswith("aten::") or op._schema.is_mutable:
        return False
    is_listed = _SKIPPABLE.fullmatch(name) is not None or bool(classes_of(op))
    return is_listed or is_view(op) or torch.Tag.pointwise in op.tags
