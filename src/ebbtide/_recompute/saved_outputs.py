"""What a selective recipe holds: outputs of dear operators, taken as they come, handed out in the second run.

Note [Overwritten outputs]
~~~~~~~~~~~~~~~~~~~~~~~~~~
An output that the region changes in place cannot be held. Most changes count as versions, those of a kernel that is
given an address do not (Liger rotates q and k where their projections have left them). So the first time that a call's
output is held, its bytes are summed when it comes and when its region ends; what is seen to change is never held again.
Until then it stays on the device, and the host waits for the sums once. Not where a planner chooses: it has looked in
its first step (planner/measure.py), where nothing has to stay for it. Nor where a graph is captured. What is first
overwritten in a later step, or behind the end of its region, is not seen.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ebbtide._engine.hooks import SavedTensorHooks, is_unmodified
from ebbtide._engine.parcel import Ticket, version_alias
from ebbtide._engine.timetable import Site
from ebbtide._recompute.ops import ExpensiveOps, OpKind, is_collective, is_hidden_view, is_wait
from ebbtide._recompute.provenance import (
    Made,
    Reads,
    has_absent,
    is_plain,
    looks_of,
    sequence_type,
)
from ebbtide._recompute.prune import LeavingOut, PruneCache, PrunedTensor
from ebbtide._recompute.rng_autocast import rng_state, set_rng_state
from ebbtide._recompute.rng_ops import draws_on
from ebbtide._utils.storage import sums_of
from ebbtide._utils.torch_private import (
    OperatorMode,
    counting_versions,
    dispatch_mode_stack,
    graph_task_id,
    keeps_graph,
    sizes_of,
    without_dispatch,
)
from ebbtide.types import Output, Reason

RngState: TypeAlias = tuple[torch.device, torch.Tensor]
"""A device, and the state of its generator."""


class SavedOutput:
    """The outputs of one call of a dear operator.

    Attributes:
        asked: where the call was made, and what its arguments looked like.
        parts: each output as the desk packed it; what is no tensor, as it is.
        sequence: tuple or list if the operator returns several, None if one.
        site: where the first was packed; what is learned about the call is written there.
        watched: counters of views of the outputs that count changes for themselves, and what they read.
        rng_after: of a call that drew random numbers: the device, and the generator's state behind it.
        is_overwritten: without a change of versions, see Note [Overwritten outputs].
    """

    __slots__ = ("asked", "is_overwritten", "parts", "rng_after", "sequence", "site", "watched")

    def __init__(self, asked: "_Asked", parts: list[Any], sequence: type | None, site: Site) -> None:
        self.asked = asked
        self.parts = parts
        self.sequence = sequence
        self.site = site
        self.watched: list[tuple[torch.Tensor, int]] = []
        self.rng_after: RngState | None = None
        self.is_overwritten = False

    @property
    def is_unmodified(self) -> bool:
        are_views = all(counter._version == version for counter, version in self.watched)
        return are_views and all(map(is_unmodified, self.parts))

    def watch(self, counter: torch.Tensor, version: int) -> None:
        """Outputs are no longer what they were, nor to be shared with other saves, when `counter` reads otherwise."""
        self.watched.append((counter, version))
        for ticket in self.tickets():
            ticket.parcel.extra_version_checks += ((counter, version),)

    def tickets(self) -> Iterator[Ticket]:
        return (part for part in self.parts if type(part) is Ticket)

    def outputs(self, desk: SavedTensorHooks) -> Any:
        """What the operator returned."""
        # Detached in any case: what stayed is one alias, and autograd writes its history onto what an operator returns.
        with counting_versions():
            outputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in map(desk.unpack_part, self.parts)]
        return outputs[0] if self.sequence is None else self.sequence(outputs)


_Asked: TypeAlias = "tuple[Any, ...]"

SavesSoFar: TypeAlias = Callable[[], int]
"""How many tensors autograd has saved in this run: the same at the same place of both runs."""


Call: TypeAlias = "SavedOutput | PrunedTensor | Site | None"
"""What there is of one call: its outputs; or none, for it is left out; the site where they would be, had it not been
learned that holding them is of no use; None where the call was not dear, or its outputs were taken."""


class SavedOutputs:
    """What one forward of a region holds, by operator and number of its call."""

    def __init__(self) -> None:
        self.calls: dict[Any, list[Call]] = defaultdict(list)
        self.devices: set[torch.device] = set()
        """Of all that was ever held."""
        self.made: list[Made] = []
        """By what is left out, and what that leads to, in order."""
        self._in_order: dict[SavedOutput, None] = {}

    def add(self, held: SavedOutput) -> None:
        self._in_order[held] = None

    def tickets(self) -> list[Ticket]:
        """Of what is held and travels, in the order in which it was produced."""
        return [ticket for held in self._in_order for ticket in held.tickets()]

    def devices_drawn_on(self) -> set[torch.device]:
        """Those whose random numbers calls of what is held have drawn."""
        return {held.rng_after[0] for held in self._in_order if held.rng_after is not None}

    def drop_modified(self) -> None:
        """Let go of what was changed in place or overwritten since: the operator will run again instead."""
        for op, calls in self.calls.items():
            for number, call in enumerate(calls):
                if isinstance(call, SavedOutput) and call.is_overwritten:
                    self.let_go(op, number, Output.OVERWRITTEN)
                elif isinstance(call, SavedOutput) and not call.is_unmodified:
                    self.let_go(op, number, Output.CHANGED)

    def learn_unasked(self) -> None:
        """The second run has ended and did not ask for what is still here: do not hold it the next time."""
        for op, calls in self.calls.items():
            for number, call in enumerate(calls):
                if isinstance(call, SavedOutput):
                    self.let_go(op, number, Output.UNASKED)

    def let_go(self, op: Any, number: int, why: Output) -> None:
        held = self.calls[op][number]
        assert isinstance(held, SavedOutput)
        held.site.output = why
        self.calls[op][number] = held.site
        self.forget(held)

    def forget(self, held: SavedOutput) -> None:
        self._in_order.pop(held, None)

    @property
    def leaves_out(self) -> bool:
        """Whether a second run may go without some of the calls."""
        return any(isinstance(call, PrunedTensor) for calls in self.calls.values() for call in calls)

    def leave_nothing_out(self) -> None:
        """What was left out has to run again, now and in later steps."""
        for calls in self.calls.values():
            for number, call in enumerate(calls):
                if isinstance(call, PrunedTensor):
                    call.site.output = Output.NEEDED
                    calls[number] = call.site


class _Numbering(OperatorMode):
    """Numbers the calls of operators. While another region runs again inside, they are none of its business."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False


def numbering_paused() -> contextlib.AbstractContextManager[object]:
    """Around what is our own doing, inside of the first or second run of another region.

    And around second runs: region code that asks for gradients has one inside of its own first run.
    """
    modes = [mode for mode in dispatch_mode_stack() if isinstance(mode, _Numbering) and not mode.is_paused]
    return _paused(modes) if modes else contextlib.nullcontext()


@contextlib.contextmanager
def _paused(modes: Sequence[_Numbering]) -> Generator[None, None, None]:
    for mode in modes:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in modes:
            mode.is_paused = False


class _Uncompared(NamedTuple):
    """See Note [Overwritten outputs]. `call`: the operator and its number."""

    held: SavedOutput
    call: tuple[Any, int]
    storage: torch.UntypedStorage
    sums: torch.Tensor


class OutputRecorder:
    """Packs outputs of operators as they come, call by call.

    Every call of an operator that may be held has to be counted, one that raises too: it is known by its number.

    Args:
        desk: where they are packed.
        compares: see Note [Overwritten outputs].
    """

    def __init__(self, desk: SavedTensorHooks, *, compares: bool) -> None:
        self.held = SavedOutputs()
        self.saves_so_far: SavesSoFar = _unknown
        self._desk = desk
        self._pending: list[_Pending] = []
        self._by_memory: dict[int, SavedOutput] = {}
        self._compares = compares
        self._uncompared: list[_Uncompared] = []

    def count(self, op: Any) -> None:
        """A call is made: unless `take` follows, it will run again."""
        self.held.calls[op].append(None)

    def take(
        self, op: Any, args: tuple[Any, ...], out: Any, stays: Reason | None, rng_after: RngState | None = None
    ) -> bool:
        """The call counted last returned `out`: hold it, on the device if there is a reason in `stays`. Whether it is,
        or may be when somebody has waited for it."""
        number = len(self.held.calls[op]) - 1
        if is_collective(op):  # its bytes are there when somebody has waited for them
            self._pending.append(_Pending(out, op, number, self._asked(args), stays))
            return True
        held = self._hold(op, number, out, self._asked(args), stays)
        if held is None:
            return False
        held.rng_after = rng_after
        return True

    def leave_out(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, leaving: LeavingOut
    ) -> bool:
        """The call counted last returned `out`: hold what that leads to. False if that is known not to do, or the call
        returned several: it runs again."""
        visit = self._desk.visit
        site = visit.site(visit.next_index)
        if not is_plain(out):
            return False
        self._desk.skip(out)
        if site.output is not None:
            self.held.calls[op][-1] = site
            return False
        leaving.leave_out(op, args, kwargs, out, site)
        self.held.made = leaving.made
        return True

    @property
    def awaits(self) -> bool:
        """A collective was called that nobody has waited for yet: any call may be, or show, that somebody has."""
        return bool(self._pending)

    def follow(self, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """A call returned `out`: it may say more about the output of another one that is held."""
        if self._pending:
            self._note_waits(op, args, out)
        if self._by_memory and is_hidden_view(op):
            held = self._by_memory.get(_memory(args[0]))
            if held is not None:
                for t in [out] if sequence_type(out) is None else out:
                    held.watch(_counter(t), t._version)

    def close(self, is_whole: bool) -> None:
        """The forward has ended, or has raised: from here on only `held` holds outputs, until they are handed out."""
        if is_whole and self._uncompared:
            self._compare()
        self._uncompared.clear()
        self._by_memory.clear()
        self._pending.clear()

    def _compare(self) -> None:
        with without_dispatch():
            differ = [(sums_of(each.storage) != each.sums).any() for each in self._uncompared]
            for each, differs in zip(self._uncompared, differ, strict=True):  # all are queued before the host waits
                each.held.is_overwritten |= bool(differs) and each.held.is_unmodified
                each.held.site.compared = each.call

    def _asked(self, args: tuple[Any, ...]) -> "_Asked":
        return _asked(self.saves_so_far(), args)

    def _hold(self, op: Any, number: int, out: Any, asked: "_Asked", stays: Reason | None) -> SavedOutput | None:
        sequence = sequence_type(out)
        outputs: list[Any] = [out] if sequence is None else list(out)
        visit = self._desk.visit
        site = visit.site(visit.next_index)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        if not all(isinstance(t, torch.Tensor | int | float | None) for t in outputs):
            return None  # lists in lists: no operator of the classes, and run again it is right too
        if site.drops_output():
            for t in tensors:  # numbers stay what they are
                self._desk.skip(t)
            visit.scope.ledger.stats.dropped.add(sum(t.numel() * t.element_size() for t in tensors))
            self.held.calls[op][number] = site
            return None
        with counting_versions():
            parts: list[Any] = [self._desk.pack_as(t, stays) if isinstance(t, torch.Tensor) else t for t in outputs]
        held = SavedOutput(asked, parts, sequence, site)
        for t in tensors:
            self._by_memory[_memory(t)] = held
            self.held.devices.add(t.device)
            if site.compared != (op, number) and self._may_compare(t):
                storage = t.untyped_storage()
                with without_dispatch():
                    self._uncompared.append(_Uncompared(held, (op, number), storage, sums_of(storage)))
        self.held.calls[op][number] = held
        self.held.add(held)
        return held

    def _may_compare(self, t: torch.Tensor) -> bool:
        if not self._compares:
            return False
        has_bytes = type(t) is torch.Tensor and t.layout is torch.strided and self._desk.visit.scope.serves(t.device)
        return has_bytes and not self._desk.is_captured([t.device])

    def _note_waits(self, op: Any, args: tuple[Any, ...], out: Any) -> None:
        """Hold results of collectives that somebody has waited for: by the operator, or a tensor that waits itself."""
        if is_wait(op):
            self._hold_awaited(out)
        for arg in args:
            if type(arg).__name__ == "AsyncCollectiveTensor" and arg.completed:
                self._hold_awaited(arg.elem)

    def _hold_awaited(self, out: torch.Tensor) -> None:
        for entry in self._pending:
            if entry.result is out or _memory(entry.result) == _memory(out):
                self._pending.remove(entry)
                # `out`, not the result: changes from here on are counted there.
                self._hold(entry.op, entry.number, out, entry.asked, entry.stays)
                return


class _Pending(NamedTuple):
    """A collective that nobody has waited for yet."""

    result: torch.Tensor
    op: Any
    number: int
    asked: "_Asked"
    stays: Reason | None


class SaveOutputsMode(_Numbering):
    """Around a region's forward: packs the outputs of dear operators as they come.

    Args:
        desk: where they are packed.
        dear: which operators.
        stays: why outputs stay on the device, None where they may travel.
        sites: the numbers of the dear calls whose outputs are held; None: all.
        beyond: those of which what they lead to is held.
        courses: of the region.
    """

    def __init__(
        self,
        desk: SavedTensorHooks,
        dear: ExpensiveOps,
        stays: Reason | None,
        sites: tuple[int, ...] | None,
        beyond: tuple[int, ...],
        courses: PruneCache,
    ) -> None:
        super().__init__()
        self._desk = desk
        self._intake = OutputRecorder(desk, compares=desk.watch is None)
        self.held = self._intake.held
        self.inside: Counter[str] = Counter()
        """How deep the forward is inside the modules that some of `dear` are limited to."""
        self._dear = dear
        self._stays = stays
        self._sites = None if sites is None else frozenset(sites)
        self._beyond = frozenset(beyond)
        self._leaving = LeavingOut(self.held.calls, (sites, beyond), courses)
        self._dear_calls = 0
        self.follows_draws = True
        """Whether generators can be asked: not inside of a captured graph."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return self.run_op(op, args, kwargs)
        kind = self._dear.kind_of(op)
        if kind.speaks:
            self._leaving.spoil()  # a second run that fails and begins anew would speak twice
        if kind.may_be_dear:
            return self._call(op, args, kwargs, kind)
        out = self.run_op(op, args, kwargs)
        if kind.is_hidden_view or self._intake.awaits:
            self._intake.follow(op, args, out)
        if self._leaving.follows:
            self._leaving.follow(op, args, kwargs, out)
        return out

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: OpKind) -> Any:
        """A call of an operator that is dear, or may be."""
        self._intake.count(op)
        is_dear = kind.is_always_dear or self._dear.is_dear(op, args, kwargs, +self.inside)
        is_held = is_dear and self._is_chosen()
        before = rng_before(op, args, kwargs) if is_held and self.follows_draws else None
        out = self.run_op(op, args, kwargs)
        if is_held and self._dear_calls - 1 in self._beyond:
            is_held = self._intake.leave_out(op, args, kwargs, out, self._leaving)
        elif is_held:
            is_held = self._intake.take(op, args, out, self._stays, rng_after(before))
        if not is_held and self._leaving.follows:
            self._leaving.follow(op, args, kwargs, out)
        self._intake.follow(op, args, out)
        return out

    def pack_led(self, t: torch.Tensor, number: int) -> Any:
        """The save `t` of this number as the desk packs it, if something that is left out leads to it; else None."""
        if not self._leaving.leads_to(t, number):
            return None
        with numbering_paused():
            return self._desk.pack_as(t, self._stays)

    def follow_saves(self, saves_so_far: "SavesSoFar") -> None:
        """From now on calls are known by it too."""
        self._intake.saves_so_far = saves_so_far

    def close(self, is_whole: bool, looks: Sequence[object]) -> None:
        """The forward has ended, or has raised. `looks`: of what it has saved."""
        self._leaving.close(is_whole, looks)
        self._intake.close(is_whole)

    def _is_chosen(self) -> bool:
        self._dear_calls += 1
        return self._sites is None or self._dear_calls - 1 in self._sites


class ReplayOutputsMode(_Numbering):
    """Around a region's second run: hands out what is held instead of running the operator."""

    def __init__(self, held: SavedOutputs, desk: SavedTensorHooks) -> None:
        super().__init__()
        self._held = held
        self._desk = desk
        self._saves_so_far: SavesSoFar = _unknown
        self._numbers: Counter[Any] = Counter()
        self.has_left_out = False
        self.reads = Reads()
        self._made = 0

    def follow_saves(self, saves_so_far: SavesSoFar) -> None:
        """From now on calls are known by it too."""
        self._saves_so_far = saves_so_far

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        calls = None if self.is_paused else self._held.calls.get(op)
        if calls is None:
            return self._run(op, args, kwargs)
        number = self._numbers[op]
        self._numbers[op] += 1
        call = calls[number] if number < len(calls) else None
        if isinstance(call, PrunedTensor):
            self.has_left_out = True
            return self._left_out(op, args, kwargs)
        if isinstance(call, SavedOutput) and call.asked != _asked(self._saves_so_far(), args):
            return self._run(op, args, kwargs)  # it comes in another order now: what is held is of another call
        if isinstance(call, SavedOutput):
            if call.is_unmodified:
                return self._hand_out(call, calls, number)
            self._held.let_go(op, number, Output.CHANGED)
        elif isinstance(call, Site) and call.output is Output.UNASKED:
            call.output = None  # it is asked for, this time
        return self._run(op, args, kwargs)

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.has_left_out and has_absent(args, kwargs):
            return self._left_out(op, args, kwargs)
        return self.run_op(op, args, kwargs)

    def _left_out(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        made = self._held.made[self._made] if self._made < len(self._held.made) else None
        if made is None or made.op is not op or made.given != looks_of(args, kwargs):
            raise self.reads.refuse(op)  # it comes in another order now
        self._made += 1
        return made.absent(self.reads)

    def _hand_out(self, held: SavedOutput, calls: list[Call], number: int) -> Any:
        out = held.outputs(self._desk)
        if held.rng_after is not None:
            set_rng_state(*held.rng_after)
        if graph_task_id() != -1 and not keeps_graph():
            calls[number] = None  # the second run owns it from here
            self._held.forget(held)
        return out


def _asked(saves_so_far: int, args: tuple[Any, ...]) -> _Asked:
    """What tells most calls of an operator apart, without a look at the bytes."""
    looks = [
        (a.dtype, sizes_of(a)) if isinstance(a, torch.Tensor) else a if isinstance(a, int | float | str) else None
        for a in args
    ]
    return saves_so_far, *looks


def _unknown() -> int:
    """In a checkpoint of the user's own: only torch knows how much was saved."""
    return 0


def _memory(t: torch.Tensor) -> int:
    """What two views have in common. After its end it may name another tensor: at worst one is not held then."""
    return t.untyped_storage()._cdata if type(t) is torch.Tensor else id(t)


def _counter(t: torch.Tensor) -> torch.Tensor:
    """A tensor that counts the changes of `t` and holds none of its memory."""
    with counting_versions():
        if type(t) is torch.Tensor:
            return version_alias(t)
        with without_dispatch():
            return torch.Tensor.detach(t)


def rng_before(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RngState | None:
    """The generator that a call about to be made may draw from, as it is now; None if it draws nothing."""
    device = draws_on(op, args, kwargs)
    return None if device is None else (device, rng_state(device))


def rng_after(before: RngState | None) -> RngState | None:
    """The same generator behind the call, if it did draw."""
    if before is None:
        return None
    device, state = before
    after = rng_state(device)
    return None if torch.equal(state, after) else (device, after)
