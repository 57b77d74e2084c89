"""Operators that a second run leaves out, because what they lead to is held instead of what they return.

Note [Left out]
~~~~~~~~~~~~~~~
Attention saves q and k as their rotations leave them; what is dear about them is their projections. Where a recipe says
so (`Recipe.beyond`), these saves are held and not the projections' outputs, and in the second run nothing runs of what
lies between the projection and them.
1. The first run follows what the output of such a call leads to: the outputs of every operator that is given it, or
   what it leads to, down to operators whose own outputs are held. Saves among these are held.
2. In the second run the call returns an Absent: it looks like the output and has no bytes. So do operators that are
   given one, all as they looked in the first run: these have to be the same, one by one, and given what looks the same
   and the same numbers. Saves that are held come from where they are held.
3. An Absent that is read all the same (by a kernel that takes addresses, as a number, as a save or by an operator that
   the first run did not find there) raises. Then the region runs again with nothing left out, and those calls are not
   left out any more. So a wrong guess costs time, and no bit.
4. What it leads to may not be changed in place, draw random numbers, become a number, or be of a size that depends on
   bytes: such calls are not left out.
"""

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ebbtide._errors import RecomputeError
from ebbtide._torch import refuse_addresses, storage_offset, wrapper_of
from ebbtide.recompute.dear import is_hidden_view
from ebbtide.recompute.draws import draws_on


class AbsentReadError(RecomputeError):
    """Somebody needs the bytes of what was left out."""


class Reads:
    """Whether somebody has asked for bytes that were left out: region code may have caught what that raised."""

    were_tried = False

    def refuse(self, who: object) -> AbsentReadError:
        self.were_tried = True
        return AbsentReadError(f"{who} needs what was left out of a second run")


class Absent(torch.Tensor):
    """Looks like a tensor that nobody needs, on its device, and has no bytes.

    Attributes:
        reads: to be told of attempts.
    """

    reads: Reads

    __torch_function__: Any = cast(Any, torch._C)._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        absent = next(t for t in _given(args, kwargs or {}) if isinstance(t, Absent))
        raise absent.reads.refuse(op)

    def data_ptr(self) -> int:
        raise self.reads.refuse("a kernel that takes addresses")


class Made(NamedTuple):
    """What a call has returned in the first run: how it looked.

    Attributes:
        op: the operator.
        given: what it was given: numbers and words, of tensors how they looked.
        looks: of each tensor: size, strides, offset, dtype and device.
        sequence: tuple or list if there were several, None if one.
    """

    op: Any
    given: tuple[Any, ...]
    looks: tuple[tuple[Any, ...], ...]
    sequence: type | None

    def absent(self, reads: Reads) -> Any:
        """The same without bytes."""
        absents = [_absent(looks, reads) for looks in self.looks]
        return absents[0] if self.sequence is None else self.sequence(absents)


def _absent(looks: tuple[Any, ...], reads: Reads) -> Absent:
    absent = wrapper_of(Absent, *looks)
    absent.reads = reads
    refuse_addresses(absent)
    return absent


def made_by(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], sequence: type | None
) -> Made:
    looks = [(t.size(), t.stride(), storage_offset(t), t.dtype, t.device) for t in tensors]
    return Made(op, looks_of(args, kwargs), tuple(looks), sequence)


def sequence_type(out: Any) -> type | None:
    """Tuple or list if an operator has returned several, None if one."""
    return tuple if isinstance(out, tuple) else list if isinstance(out, list) else None


def looks_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What there is to tell one call of an operator from another without a look at bytes."""
    return tuple(map(_look, (*args, *kwargs.values())))


def _look(given: object) -> object:
    if isinstance(given, torch.Tensor):
        return given.dtype, given.shape
    return tuple(map(_look, cast("Sequence[object]", given))) if isinstance(given, list | tuple) else given


def has_absent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given what was left out."""
    return any(type(t) is Absent for t in _given(args, kwargs))


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[object]:
    """What an operator is given, lists opened: it takes tensors alone or in lists."""
    given = (*args, *kwargs.values()) if kwargs else args
    if list not in map(type, given) and tuple not in map(type, given):
        return given
    lists = (cast("Sequence[object]", arg) if isinstance(arg, tuple | list) else (arg,) for arg in given)
    return list(itertools.chain.from_iterable(lists))


class Trace:
    """Which calls lead to a storage, and whether an operator was given it that reads bytes."""

    __slots__ = ("calls", "is_used", "storage")

    def __init__(self, storage: torch.UntypedStorage, calls: int) -> None:
        self.storage = weakref.ref(storage)
        self.calls = calls
        self.is_used = False


class Lineage:
    """Which calls lead to which tensors, as a sum of 2**n for the n-th call. By storage, so views need no notes.

    Attributes:
        spoiled: the calls that lead to what cannot be left out, as such a sum.
        made: what they and the operators that they lead to have returned, in order.
    """

    def __init__(self) -> None:
        self._traces: dict[int, Trace] = {}
        self.spoiled = 0
        self.made: list[Made] = []

    def begin(self, call: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: torch.Tensor) -> None:
        """The call of this number has returned `out`."""
        self.made.append(made_by(op, args, kwargs, [out], None))
        self._note(out, 1 << call)

    def of(self, t: torch.Tensor) -> int:
        """The calls that lead to `t`."""
        trace = self.trace(t)
        return 0 if trace is None else trace.calls

    def trace(self, t: torch.Tensor) -> Trace | None:
        if not self._traces or type(t) is not torch.Tensor:
            return None
        storage = t.untyped_storage()
        known = self._traces.get(storage._cdata)
        return known if known is not None and known.storage() is storage else None

    def given_to(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The calls that lead to what an operator is given."""
        calls = 0
        if self._traces:
            for t in _given(args, kwargs):
                trace = self.trace(t) if type(t) is torch.Tensor else None
                if trace is not None:
                    trace.is_used = trace.is_used or not _is_view(op)
                    calls |= trace.calls
        return calls

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """An operator that is not held has returned `out`. The calls that lead to that."""
        calls = self.given_to(op, args, kwargs)
        if calls == 0:
            return 0
        sequence = sequence_type(out)
        outputs: Sequence[object] = (out,) if sequence is None else out
        tensors = [t for t in outputs if isinstance(t, torch.Tensor) and type(t) is torch.Tensor]
        if len(tensors) == len(outputs) and _may_be_left_out(op, args, kwargs):
            self.made.append(made_by(op, args, kwargs, tensors, sequence))
            for t in tensors:
                self._note(t, calls | self.of(t))
        else:
            self.spoiled |= calls
        return calls

    def _note(self, t: torch.Tensor, calls: int) -> None:
        trace = self.trace(t)
        if trace is not None:
            trace.calls = calls  # a view of what was there
            return
        storage = t.untyped_storage()
        self._traces[storage._cdata] = Trace(storage, calls)


@functools.cache
def _is_view(op: Any) -> bool:
    """It reads no bytes."""
    schema = getattr(op, "_schema", None)
    return is_hidden_view(op) or (schema is not None and any(made.alias_info is not None for made in schema.returns))


def _may_be_left_out(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return _looks_follow(op) and draws_on(op, args, kwargs) is None


@functools.cache
def _looks_follow(op: Any) -> bool:
    """It changes nothing, and what it returns looks the same for arguments that do."""
    schema = getattr(op, "_schema", None)
    is_sized_by_bytes = torch.Tag.dynamic_output_shape in getattr(op, "tags", ())
    return schema is not None and not schema.is_mutable and not is_sized_by_bytes
