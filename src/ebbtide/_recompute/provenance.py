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
   the first run did not find there) raises, and one that is there when the run is over may be read later. Then the
   region runs again with nothing left out, and those calls are not left out any more. So a wrong guess costs time, and
   no bit.
4. What lies between may change nothing, draw nothing, and return what looks as its arguments say: it is made of
   operators that are known to. Other calls are not left out.
5. Nothing is left out of a region that speaks with other ranks before its last save, for running again once more would
   speak twice. Nor in a process with compiled code: given what is not there, a function is compiled anew, or not, and
   rounds otherwise.
6. Out of sight is code that asks for the type of a tensor, and native code that reads one behind the dispatcher's back
   by a constant pointer, or by to_dlpack where what that raises is caught. TorchScript that has met an Absent may save
   otherwise when it runs once more, which is an error.
"""

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ebbtide._errors import RecomputeError
from ebbtide._recompute.ops import classes_of, is_hidden_view, op_name, speaks
from ebbtide._recompute.rng_ops import draws_on
from ebbtide._utils.torch_private import has_compiled_code, refuse_addresses, storage_offset, wrapper_of


class AbsentReadError(RecomputeError):
    """Somebody needs the bytes of what was left out."""


class Reads:
    """Whether somebody has asked for bytes that were left out: region code may have caught what that raised. Or may ask
    for them yet: a hook that keeps what a module returns."""

    def __init__(self) -> None:
        self._were_tried = False
        self._absents: list[weakref.ref[Absent]] = []

    def hand_out(self, absent: "Absent") -> None:
        absent.reads = self
        self._absents.append(weakref.ref(absent))

    def refuse(self, who: object) -> AbsentReadError:
        self._were_tried = True
        return AbsentReadError(f"{who} needs what was left out of a second run")

    def check(self, region: str) -> None:
        """The run is over, and what it went by is gone. Raises AbsentReadError."""
        if self._were_tried or any(absent() is not None for absent in self._absents):
            raise self.refuse(f"code of {region}, which keeps it or has caught this,")


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

    def _refuse(self, *_: object, **__: object) -> Any:
        raise self.reads.refuse("code that goes by memory")

    data_ptr = untyped_storage = storage = tolist = numpy = __array__ = __dlpack__ = _refuse


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
    reads.hand_out(absent)
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
    return (*map(_look, args), *((name, _look(value)) for name, value in kwargs.items()))


def _look(given: object) -> object:
    if isinstance(given, torch.Tensor):
        return (given.dtype, given.size(), given.stride(), given.device) if _is_strided(given) else object()  # no other
    if isinstance(given, list | tuple):
        return tuple(map(_look, cast("Sequence[object]", given)))
    return type(given), given  # 1 and 1.0 are equal


def is_plain(t: object) -> bool:
    """Whether `t` is a tensor that size, strides and offset say it all of."""
    return isinstance(t, torch.Tensor) and _has_memory(t) and not (t.is_quantized or t.is_conj() or t.is_neg())


def _has_memory(t: torch.Tensor) -> bool:
    """Of its own: subclasses may have others inside, or none."""
    return type(t) is torch.Tensor and _is_strided(t)


def _is_strided(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


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


class Provenance:
    """Which calls lead to which tensors, as a sum of 2**n for the n-th call. By storage, so views need no notes.

    Attributes:
        spoiled: the calls that lead to what cannot be left out, as such a sum; -1 is all there are.
        made: what they and the operators that they lead to have returned, in order.
    """

    def __init__(self) -> None:
        self._traces: dict[int, Trace] = {}
        self.spoiled = 0
        self.made: list[Made] = []

    def begin(self, call: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """The call of this number has returned `out`."""
        if has_compiled_code():
            self.spoil()
        elif is_plain(out) and may_be_left_out(op, args, kwargs):
            self.made.append(made_by(op, args, kwargs, [out], None))
            self._note(out, 1 << call)
        else:
            self.spoiled |= 1 << call

    def spoil(self) -> None:
        """No call can be left out (see point 5 of the note)."""
        self.spoiled = -1

    def of(self, t: torch.Tensor) -> int:
        """The calls that lead to `t`."""
        trace = self.trace(t)
        return 0 if trace is None else trace.calls

    def trace(self, t: torch.Tensor) -> Trace | None:
        if not self._traces or not _has_memory(t):
            return None
        storage = t.untyped_storage()
        known = self._traces.get(storage._cdata)
        return known if known is not None and known.storage() is storage else None

    def given_to(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The calls that lead to what an operator is given."""
        calls = 0
        if speaks(op):
            self.spoil()
        if self._traces:
            for t in _given(args, kwargs):
                trace = self.trace(t) if isinstance(t, torch.Tensor) else None
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
        tensors: Sequence[Any] = (out,) if sequence is None else out
        if all(map(is_plain, tensors)) and may_be_left_out(op, args, kwargs):
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


# What models do with q and k between projecting and saving them. Beside these, pointwise operators, views, and what is
# dear.
_BETWEEN = {
    "aten::_fused_rms_norm",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::flip",
    "aten::mean",
    "aten::native_layer_norm",
    "aten::repeat",
    "aten::roll",
    "aten::stack",
    "aten::sum",
}


def may_be_left_out(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call changes nothing, draws nothing, and returns what looks as its arguments say."""
    return _is_known(op) and draws_on(op, args, kwargs) is None


@functools.cache
def _is_known(op: Any) -> bool:
    name = op_name(op)
    if not name.startswith("aten::") or op._schema.is_mutable:
        return False
    return name in _BETWEEN or bool(classes_of(op)) or _is_view(op) or torch.Tag.pointwise in op.tags


@functools.cache
def _is_view(op: Any) -> bool:
    """It reads no bytes."""
    schema = getattr(op, "_schema", None)
    return is_hidden_view(op) or (schema is not None and any(made.alias_info is not None for made in schema.returns))
