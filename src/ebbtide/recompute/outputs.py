"""What a selective recipe holds: outputs of dear operators, taken as they come, handed out in the second run."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide._torch import counting_versions, dispatch_mode_stack, graph_task_id, keeps_graph, without_dispatch
from ebbtide.engine.hooks import Desk, is_unmodified
from ebbtide.engine.parcel import Ticket, odometer
from ebbtide.engine.timetable import Site
from ebbtide.recompute.ambient import rng_state, set_rng_state
from ebbtide.recompute.dear import DearOps, is_collective, is_hidden_view, is_wait, op_name
from ebbtide.types import Output, Reason


class Held:
    """The outputs of one call of a dear operator.

    Attributes:
        asked: what the arguments looked like.
        parts: each output as the desk packed it; what is no tensor, as it is.
        sequence: tuple or list if the operator returns several, None if one.
        site: where the first was packed; what is learned about the call is written there.
        watched: counters of views of the outputs that count changes for themselves, and what they read.
        rng_after: of a call that drew random numbers: the device, and the generator's state behind it.
    """

    __slots__ = ("asked", "parts", "rng_after", "sequence", "site", "watched")

    def __init__(self, asked: "_Asked", parts: list[Any], sequence: type | None, site: Site) -> None:
        self.asked = asked
        self.parts = parts
        self.sequence = sequence
        self.site = site
        self.watched: list[tuple[torch.Tensor, int]] = []
        self.rng_after: tuple[torch.device, torch.Tensor] | None = None

    @property
    def is_unmodified(self) -> bool:
        are_views = all(counter._version == version for counter, version in self.watched)
        return are_views and all(map(is_unmodified, self.parts))

    def tickets(self) -> Iterator[Ticket]:
        return (part for part in self.parts if type(part) is Ticket)

    def outputs(self, desk: Desk) -> Any:
        """What the operator returned."""
        # Detached in any case: what stayed is one alias, and autograd writes its history onto what an operator returns.
        with counting_versions():
            outputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in map(desk.unpack_part, self.parts)]
        return outputs[0] if self.sequence is None else self.sequence(outputs)


_Asked: TypeAlias = "tuple[Any, ...]"

Call: TypeAlias = "Held | Site | None"
"""What there is of one call: its outputs; the site where they would be, had it not been learned that holding them is
of no use; None where the call was not dear, or its outputs were taken."""


class HeldOutputs:
    """What one forward of a region holds, by operator and number of its call."""

    def __init__(self) -> None:
        self.calls: dict[Any, list[Call]] = defaultdict(list)
        self._in_order: list[Held] = []

    def add(self, held: Held) -> None:
        self._in_order.append(held)

    def tickets(self) -> list[Ticket]:
        """Of what is held and travels, in the order in which it was produced."""
        return [ticket for held in self._in_order for ticket in held.tickets()]

    def drop_modified(self) -> None:
        """Let go of what was changed in place since: the operator will run again instead."""
        for op, calls in self.calls.items():
            for number, call in enumerate(calls):
                if isinstance(call, Held) and not call.is_unmodified:
                    self.let_go(op, number, Output.CHANGED)

    def learn_unasked(self) -> None:
        """The second run has ended and did not ask for what is still here: do not hold it the next time."""
        for op, calls in self.calls.items():
            for number, call in enumerate(calls):
                if isinstance(call, Held):
                    self.let_go(op, number, Output.UNASKED)

    def let_go(self, op: Any, number: int, why: Output) -> None:
        held = self.calls[op][number]
        assert isinstance(held, Held)
        held.site.output = why
        self.calls[op][number] = held.site
        self.forget(held)

    def forget(self, held: Held) -> None:
        self._in_order = [other for other in self._in_order if other is not held]


class _Numbering(TorchDispatchMode):
    """Numbers the calls of operators. While another region runs again inside, they are none of its business."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside of a region stays compiled."""
        return True


@contextlib.contextmanager
def numbering_paused() -> Generator[None, None, None]:
    """Around what is our own doing, inside of the first or second run of another region.

    And around second runs: region code that asks for gradients has one inside of its own first run.
    """
    modes = [mode for mode in dispatch_mode_stack() if isinstance(mode, _Numbering) and not mode.is_paused]
    for mode in modes:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in modes:
            mode.is_paused = False


class Holding(_Numbering):
    """Around a region's forward: packs the outputs of dear operators as they come.

    Args:
        desk: where they are packed.
        dear: which operators.
        stays: why outputs stay on the device, None where they may travel.
        sites: the numbers of the dear calls whose outputs are held; None: all.
    """

    def __init__(self, desk: Desk, dear: DearOps, stays: Reason | None, sites: tuple[int, ...] | None) -> None:
        super().__init__()
        self.held = HeldOutputs()
        self.inside: Counter[str] = Counter()
        """How deep the forward is inside the modules that some of `dear` are limited to."""
        self._desk = desk
        self._dear = dear
        self._stays = stays
        self._sites = None if sites is None else frozenset(sites)
        self._dear_calls = 0
        self._pending: list[tuple[torch.Tensor, Any, int, _Asked]] = []
        self._by_memory: dict[int, Held] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return op(*args, **kwargs)
        if not self._dear.may_be(op):
            out = op(*args, **kwargs)
            self._follow(op, args, out)
            return out
        calls = self.held.calls[op]
        number = len(calls)
        calls.append(None)  # also of a call that fails: the region may go on without it
        if not self._dear.is_dear(op, args, kwargs, +self.inside) or not self._is_chosen():
            return op(*args, **kwargs)
        device = _draws_on(op, args, kwargs)
        before = None if device is None else rng_state(device)
        out = op(*args, **kwargs)
        if is_collective(op):
            self._pending.append((out, op, number, _asked(args)))  # the bytes are there when somebody has waited
            return out
        held = self._hold(op, number, out, _asked(args))
        if held is not None and device is not None:
            after = rng_state(device)
            held.rng_after = None if before is None or torch.equal(before, after) else (device, after)
        return out

    def close(self) -> None:
        """The forward has ended: from here on only `held` holds outputs, until they are handed out."""
        self._by_memory.clear()
        self._pending.clear()

    def _follow(self, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """An operator that is not dear may say more about the output of one that is."""
        if self._pending and is_wait(op):
            self._hold_awaited(out)
        elif self._by_memory and is_hidden_view(op):
            held = self._by_memory.get(_memory(args[0]))
            if held is not None:
                held.watched += [(_counter(t), t._version) for t in ([out] if _sequence_type(out) is None else out)]

    def _is_chosen(self) -> bool:
        self._dear_calls += 1
        return self._sites is None or self._dear_calls - 1 in self._sites

    def _hold(self, op: Any, number: int, out: Any, asked: "_Asked") -> Held | None:
        sequence = _sequence_type(out)
        outputs: list[Any] = [out] if sequence is None else list(out)
        visit = self._desk.visit
        site = visit.site(visit.next_index)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        if not all(isinstance(t, torch.Tensor | int | float | None) for t in outputs):
            return None  # lists in lists: no operator of the classes, and run again it is right too
        if site.output is not None:
            visit.next_index += len(tensors)  # numbers stay what they are
            visit.scope.ledger.stats.dropped.add(sum(t.numel() * t.element_size() for t in tensors))
            self.held.calls[op][number] = site
            return None
        with counting_versions():
            parts: list[Any] = [
                self._desk.pack_as(t, self._stays) if isinstance(t, torch.Tensor) else t for t in outputs
            ]
        held = Held(asked, parts, sequence, site)
        self._by_memory.update((_memory(t), held) for t in tensors)
        self.held.calls[op][number] = held
        self.held.add(held)
        return held

    def _hold_awaited(self, out: torch.Tensor) -> None:
        for entry in self._pending:
            result, op, number, asked = entry
            if result is out or result.untyped_storage()._cdata == out.untyped_storage()._cdata:
                self._pending.remove(entry)
                self._hold(op, number, out, asked)  # not `result`: changes from here on are counted there
                return


class Serving(_Numbering):
    """Around a region's second run: hands out what is held instead of running the operator."""

    def __init__(self, held: HeldOutputs, desk: Desk) -> None:
        super().__init__()
        self._held = held
        self._desk = desk
        self._numbers: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        calls = None if self.is_paused else self._held.calls.get(op)
        if calls is None:
            return op(*args, **kwargs)
        number = self._numbers[op]
        self._numbers[op] += 1
        call = calls[number] if number < len(calls) else None
        if isinstance(call, Held) and call.asked != _asked(args):
            return op(*args, **kwargs)  # it comes in another order now: what is held is of another call
        if isinstance(call, Held):
            if call.is_unmodified:
                return self._hand_out(call, calls, number)
            self._held.let_go(op, number, Output.CHANGED)
        elif isinstance(call, Site) and call.output is Output.UNASKED:
            call.output = None  # it is asked for, this time
        return op(*args, **kwargs)

    def _hand_out(self, held: Held, calls: list[Call], number: int) -> Any:
        out = held.outputs(self._desk)
        if held.rng_after is not None:
            set_rng_state(*held.rng_after)
        if graph_task_id() != -1 and not keeps_graph():
            calls[number] = None  # the second run owns it from here
            self._held.forget(held)
        return out


def _asked(args: tuple[Any, ...]) -> _Asked:
    """What tells most calls of an operator apart, without a look at the bytes."""
    return tuple(
        (a.dtype, a.shape) if isinstance(a, torch.Tensor) else a if isinstance(a, int | float | str) else None
        for a in args
    )


def _sequence_type(out: Any) -> type | None:
    return next((kind for kind in (tuple, list) if isinstance(out, kind)), None)


def _memory(t: torch.Tensor) -> int:
    """What two views have in common. After its end it may name another tensor: at worst one is not held then."""
    return t.untyped_storage()._cdata if type(t) is torch.Tensor else id(t)


def _counter(t: torch.Tensor) -> torch.Tensor:
    """A tensor that counts the changes of `t` and holds none of its memory."""
    with counting_versions():
        if type(t) is torch.Tensor:
            return odometer(t)
        with without_dispatch():
            return torch.Tensor.detach(t)


def _draws_on(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device whose generator this call may draw from; None if it draws none."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    # Operators of other packages carry no tag.
    if torch.Tag.nondeterministic_seeded not in op.tags and op_name(op).startswith("aten::"):
        return None
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    if values.get("dropout_p", 1.0) == 0.0:
        return None  # attention, mostly: it can draw, and does not
    tensors = (value.device for value in values.values() if isinstance(value, torch.Tensor))
    return next(tensors, torch.device(values.get("device") or "cpu"))
