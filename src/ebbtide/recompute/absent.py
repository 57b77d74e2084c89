"""Operators that a second run leaves out, because what they lead to is held instead of what they return.

Note [Left out]
~~~~~~~~~~~~~~~
Attention saves q and k as their rotations leave them; what is dear about them is their projections. Where a recipe says
so (`Recipe.beyond`), these saves are held and not the projections' outputs, and in the second run nothing runs of what
lies between the projection and them.
1. The first run follows what the output of such a call leads to: the outputs of every operator that is given it, or
   what it leads to, down to operators whose own outputs are held. Saves among these are held.
2. In the second run the call returns an Absent: it looks like the output and has no bytes. So do operators that are
   given one, all as they looked in the first run. Saves that are held come from where they are held.
3. An Absent that is read all the same (by a kernel that takes addresses, as a number, as a save or by an operator that
   the first run did not find there) raises. Then the region runs again with nothing left out, and those calls are not
   left out any more. So a wrong guess costs time, and no bit.
4. What it leads to may not be changed in place, draw random numbers, or become a number: such calls are not left out.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
        absent = next(t for t in _tensors_in(args, kwargs or {}) if isinstance(t, Absent))
        raise absent.reads.refuse(op)

    def data_ptr(self) -> int:
        raise self.reads.refuse("a kernel that takes addresses")


class Made(NamedTuple):
    """What a call has returned in the first run: how it looked.

    Attributes:
        op: the operator.
        looks: of each tensor: size, strides, offset, dtype and device.
        sequence: tuple or list if there were several, None if one.
    """

    op: Any
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


def _made(op: Any, tensors: Sequence[torch.Tensor], out: Any) -> Made:
    looks = ((t.size(), t.stride(), storage_offset(t), t.dtype, t.device) for t in tensors)
    return Made(op, tuple(looks), None if isinstance(out, torch.Tensor) else type(out))


def has_absent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given what was left out."""
    return any(type(t) is Absent for t in _tensors_in(args, kwargs))


def _tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator is given: it takes them alone or in lists."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple | list):
            yield from (t for t in cast("Sequence[object]", arg) if isinstance(t, torch.Tensor))


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

    def begin(self, call: int, op: Any, out: torch.Tensor) -> None:
        """The call of this number has returned `out`."""
        self.made.append(_made(op, (out,), out))
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
            for trace in map(self.trace, _tensors_in(args, kwargs)):
                if trace is not None:
                    trace.is_used = trace.is_used or not _is_view(op)
                    calls |= trace.calls
        return calls

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """An operator that is not held has returned `out`. The calls that lead to that."""
        calls = self.given_to(op, args, kwargs)
        if calls == 0:
            return 0
        outputs = cast("Sequence[object]", out) if isinstance(out, tuple | list) else (out,)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor) and type(t) is torch.Tensor]
        if len(tensors) == len(outputs) and _may_be_left_out(op, args, kwargs):
            self.made.append(_made(op, tensors, out))
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
    schema = getattr(op, "_schema", None)
    return schema is not None and not schema.is_mutable and draws_on(op, args, kwargs) is None
