"""One forward of a region that runs again in backward (see Note [Run again])."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._engine.hooks import Packed, SavedTensorHooks
from ebbtide._engine.parcel import Ticket, check_unmodified, check_written
from ebbtide._errors import ModuleError, RecomputeError
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.provenance import Absent
from ebbtide._recompute.rng_autocast import AutocastRngState
from ebbtide._recompute.rng_ops import NoDraws
from ebbtide._recompute.saved_outputs import ReplayOutputsMode, SaveOutputsMode, numbering_paused
from ebbtide._recompute.side_effects import Snapshot
from ebbtide._recompute.state import RegionState, version_of
from ebbtide._recompute.verify import Evidence, is_rounding
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import (
    collectives_so_far,
    dispatch_modes,
    graph_task_id,
    has_compiled_code,
    hidden_from_compiler,
    keeps_graph,
    sizes_of,
)
from ebbtide.types import RecomputeRecorder, Unable

_log = logger_of(__name__)

Pack = Callable[[torch.Tensor], Any]
Around = Callable[[Pack, bool], contextlib.AbstractContextManager[RecomputeRecorder | None]]
"""What a door puts around region code: given the pack hook that is active inside, and whether this is a second run.
Gives what follows a second run, if anything does."""


class Holder:
    """What autograd keeps of a save inside a region: a number, and the frame that can make its value again."""

    __slots__ = ("__weakref__", "copy", "frame", "number", "value", "version")

    def __init__(self, frame: "Frame", number: int) -> None:
        self.frame = frame
        self.number = number
        self.value: torch.Tensor | None = None
        self.version = 0
        self.copy: Packed | None = None
        """The forward's saved tensor, where recomputation is verified; see Note [Verification]."""


class Frame:
    """What a region's second run needs, and the holders it fills. Owned by the holders, and so by the graph.

    Args:
        name: of the region, for errors.
        call: the region's forward.
        desk: where held outputs and inputs are read.
        around: see `Around`.
        evidence: of what this forward saves, if the recomputation is to be verified.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        desk: SavedTensorHooks,
        around: Around,
        evidence: Evidence | None = None,
    ) -> None:
        self._name = name
        self._call = call
        self.desk = desk
        self._limits = desk.visit.limits
        self._around = around
        self._evidence = evidence
        self._is_kept = False  # backward reads what forward saved, from the evidence
        self._holders: list[weakref.ref[Holder]] = []
        self._looks: list[_Looks] = []
        self._lock = threading.RLock()
        self._is_whole = False
        self._was_run_again = False
        self._dropped_bytes = 0
        self.ends_early = False
        """A random state was set that cannot be put back: a second run has to stop before."""
        self._holding: SaveOutputsMode | None = None
        self._led: dict[int, Any] = {}
        """Saves that are held themselves, by number."""
        self._watch: RecomputeRecorder | None = None
        self._ended_at = -1
        """The number of the save at which its second run ended before the region did; -1 if it did not."""

    # -- the first run ---------------------------------------------------------------------------------------------

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pack_input: Pack,
        holding: SaveOutputsMode | None,
        state: RegionState,
    ) -> Any:
        """The region's output. `pack_input` takes the tensors passed to it; `holding` the dear outputs, if any.

        Raises ModuleError if the region changes what it was given in place, a parameter, or a buffer for the first
        time, and CaptureError if it draws random numbers inside of a captured graph: it could not run again.
        """
        self._state = state
        self._arguments = Arguments(args, kwargs)
        tensors = self._arguments.take_tensors()
        versions = list(map(version_of, tensors))
        self._inputs = [self._input(t, pack_input) for t in tensors]
        # All that a second run needs, before the first: region code may ask for gradients, and what it has saved before
        # it fails may be all that somebody wants.
        with numbering_paused():  # copies of buffers are no calls of the region around this one
            self._found = state.find()
        self._devices = {*self._found.devices, *(t.device for t in tensors)}
        is_captured = self.desk.is_captured(self._devices)
        if is_captured:
            self._evidence = None  # to compare waits for the device
        generators = [*self._found.generators, *self._arguments.generators]
        self._ambient = AutocastRngState(self._devices, is_captured, generators)
        self._pack_input = pack_input
        self._collectives = None if self._evidence is None else collectives_so_far()
        self._held = None if holding is None else holding.held
        hooks = saved_tensors_hooks(self.pack, unpack)
        no_draws = NoDraws(self._name) if is_captured else contextlib.nullcontext()
        if holding is not None:
            holding.follows_draws = not is_captured
            holding.follow_saves(self._holders.__len__)
        self._holding = holding
        is_whole = False
        try:
            with self._around(hooks.pack_hook, False), hooks, holding or contextlib.nullcontext(), no_draws:
                output = self._call(*args, **kwargs)
            is_whole = True
        finally:
            self._holding = None
            self._ambient.close()
            if holding is not None:
                holding.close(is_whole, self._looks)
        self._learn(tensors, versions)
        self._looks = state.shared_looks(self._looks)
        if self._held is not None:
            self._held.drop_modified()
        self._is_whole = True
        self.desk.visit.scope.ledger.stats.recomputed.add(self._dropped_bytes, len(self._holders) - len(self._led))
        return output

    def _input(self, t: torch.Tensor, pack_input: Pack) -> "_Input":
        number = self.desk.visit.next_index
        # An inference tensor cannot be saved. Its owner keeps it, and so may we.
        return _Input(t if t.is_inference() else pack_input(t), t.requires_grad, number)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> "Holder | _SavedAsIs":
        """Autograd saves `t` inside of the region: only its place is noted."""
        # A second run beyond this place would draw different numbers, and advance a state of later forwards. Saves
        # before the place are recomputed by a second run that stops at the last of them; later saves are kept.
        if self.ends_early or self._ambient.has_unknown_state:
            self.ends_early = True
            self._state.unable = Unable.UNKNOWN_RNG
            return _SavedAsIs(self._pack_input(t), self.desk)
        holder = Holder(self, len(self._holders))
        if self._evidence is not None:
            with numbering_paused():
                holder.copy = self._evidence.take(holder.number, t)
        led = None if self._holding is None else self._holding.pack_led(t, holder.number)
        if led is None:
            self._dropped_bytes += t.numel() * t.element_size()
        else:
            self._led[holder.number] = led
        self._holders.append(weakref.ref(holder))
        self._looks.append(_looks(t))
        return holder

    def _learn(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        """What the forward changed. Raises ModuleError for what rules recomputation out, if nothing is kept for it."""
        why = self._why_unverified() if self._evidence is not None and not self._is_kept else ""
        if why:
            _log.info("%s: recomputation is not verified, %s", self._name, why)
            self._drop_evidence()
        try:
            with numbering_paused():
                self._found.learn()
            self._check_inputs(tensors, versions)
        except ModuleError as error:
            if self._evidence is None:
                raise
            self._keep(error)

    def _why_unverified(self) -> str:
        assert self._evidence is not None
        if not self._evidence.is_whole:
            return "the store has no room for what forward saves"
        now = collectives_so_far()
        return "ranks speak with each other inside" if now is None or now != self._collectives else ""

    def _check_inputs(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        for t, version in zip(tensors, versions, strict=True):
            if version_of(t) != version:
                raise ModuleError(
                    f"{self._name} changes a tensor in place that was passed to it ({t.dtype} {tuple(sizes_of(t))}): it"
                    " cannot run again. Give it the recipe 'keep' or 'offload', or clone the tensor before the change"
                )

    # -- the second run --------------------------------------------------------------------------------------------

    def value_of(self, holder: Holder) -> torch.Tensor:
        """What was saved there, bit for bit. Raises RecomputeError, ModifiedError."""
        value = holder.value
        if value is None:
            with self._lock:
                if holder.value is None and not self._is_kept:
                    self._run_again()
                value = holder.value
        if value is None:
            return self._kept_value(holder)
        if holder.number == self._ended_at:
            check_written(self._name)  # whose kernel has not run
        if self._watch is not None:
            self._watch.asked(holder.number)
        if graph_task_id() == -1:
            self._forget_values()
        elif keeps_graph():
            holder.value = None
        if value._version != holder.version:
            what = f"a tensor saved in {self._name}"
            check_unmodified(value, holder.version, what, value.dtype, value.device, sizes_of(value))
        return value

    def _run_again(self) -> None:
        if self._evidence is None:
            self._recompute()
            return
        try:
            self._recompute()
        except (_EnoughError, torch.OutOfMemoryError):
            raise  # of a region around this one; or no fault of the region's
        except Exception as error:  # whatever the region raises: backward needs nothing of it
            self._keep(error)
        if not self._is_kept and graph_task_id() != -1 and not keeps_graph():
            self._drop_evidence()  # no backward recomputes the graph once more

    def _keep(self, error: Exception) -> None:
        """Backward reads what forward saved, and the region is not recomputed any more."""
        self._is_kept = True
        self._state.unable = Unable.DIFFERED
        self.desk.visit.scope.ledger.note_differed(self._name, str(error) or type(error).__name__)

    def _kept_value(self, holder: Holder) -> torch.Tensor:
        led = self._read_led(holder.number)
        if led is not None:
            return led
        assert self._evidence is not None
        assert holder.copy is not None
        return self._evidence.read(holder.copy)

    def _drop_evidence(self) -> None:
        self._evidence = None
        for ref in self._holders:
            holder = ref()
            if holder is not None:
                holder.copy = None

    def _check_evidence(self, again: "Recomputation") -> None:
        """Raises RecomputeError if the recomputation has saved other bytes than forward."""
        assert self._evidence is not None
        for number in self._evidence.differing():
            holder, value = self._holders[number](), again.value(number)
            if holder is None or value is None or is_rounding(self._kept_value(holder), value):
                continue
            raise RecomputeError(
                f"the recomputation of {self._name} saved other values than its forward, first in its saved tensor "
                f"{number} ({_described(self._looks[number])}){_ADVICE}"
            )

    def _recompute(self) -> None:
        if self._held is None:
            self._run_with(None)
        elif not self._held.leaves_out:
            self._run_with(ReplayOutputsMode(self._held, self.desk))
        elif has_compiled_code() or not self._runs_without(ReplayOutputsMode(self._held, self.desk)):
            self._held.leave_nothing_out()
            self._run_with(ReplayOutputsMode(self._held, self.desk))

    def _runs_without(self, serving: ReplayOutputsMode) -> bool:
        """Have the region run again without what is left out. False if somebody needs it: whoever met it may have
        raised anything, and with nothing left out it raises again, or is fine."""
        try:
            self._run_with(serving)
        except (_EnoughError, torch.OutOfMemoryError):
            raise  # of a region around this one; or no fault of what is left out
        except Exception:
            if not serving.has_left_out:
                raise
            return False
        return True

    def _run_with(self, serving: ReplayOutputsMode | None) -> None:
        again = Recomputation(self._name, self._holders, self._looks, self._read_led, self._evidence)
        self.desk.expect(self._tickets(), self._devices, self._limits)
        tensors = [packed_input.read(self.desk) for packed_input in self._inputs]
        args, kwargs = self._arguments.rebuild(tensors)
        hooks = saved_tensors_hooks(again.pack, again.unpack)
        effects = None if self._evidence is None else Snapshot(self._found.modules, (args, kwargs), tensors)
        with (
            self._undone(effects),
            self._surroundings(again, serving),
            self._around(hooks.pack_hook, True) as watch,
            hooks,
        ):
            self._watch = again.watch = watch
            self._tell_given(watch, tensors)
            del tensors  # the call may let go of what it was given
            self._ended_at = -1
            try:
                self._call(*args, **kwargs)
            except _EnoughError as enough:
                if enough.run is not again:
                    raise
                self._ended_at = again.count - 1
        if serving is not None:
            serving.reads.check(self._name)
        again.check()
        if self._evidence is not None:
            self._check_evidence(again)
        again.give()
        if graph_task_id() != -1 and not keeps_graph():
            self._led.clear()  # their holders own them from here
        if self._held is not None and self._is_whole and graph_task_id() != -1 and not keeps_graph():
            if not self._was_run_again:
                self._held.learn_unasked()
            self._was_run_again = True

    @contextlib.contextmanager
    def _undone(self, effects: Snapshot | None) -> Generator[None, None, None]:
        """Around a recomputation. Raises RecomputeError if it changed plain data that no first run's state covers."""
        changed: list[str] = []
        try:
            yield
        finally:
            if effects is not None:
                changed = effects.put_back()
        if changed:
            raise RecomputeError(
                f"the recomputation of {self._name} changed {', '.join(dict.fromkeys(changed))} once more. Make it a "
                "buffer, or give the region the recipe 'keep' or 'offload'"
            )

    def _tell_given(self, watch: RecomputeRecorder | None, tensors: list[torch.Tensor]) -> None:
        if watch is not None:
            for packed_input, t in zip(self._inputs, tensors, strict=True):
                watch.given(packed_input.number, t)

    @contextlib.contextmanager
    def _surroundings(self, again: "Recomputation", serving: ReplayOutputsMode | None) -> Generator[None, None, None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(numbering_paused())
            stack.enter_context(self._ambient.restored())
            stack.enter_context(self._found.restored())
            if serving is not None:
                serving.follow_saves(lambda: again.count)
                stack.enter_context(serving)
            yield

    def _read_led(self, number: int) -> torch.Tensor | None:
        """The save of this number, if it is held itself."""
        led = self._led.get(number)
        return None if led is None else cast(torch.Tensor, self.desk.unpack_part(led))

    def _tickets(self) -> list[Ticket]:
        inputs = [i.packed for i in self._inputs if type(i.packed) is Ticket]
        led = [part for part in self._led.values() if type(part) is Ticket]
        return inputs + led + ([] if self._held is None else self._held.tickets())

    def _forget_values(self) -> None:
        for ref in self._holders:
            holder = ref()
            if holder is not None:
                holder.value = None


_Looks: TypeAlias = tuple[torch.dtype, tuple[object, ...], torch.device, str, bool]
"""What a save has in common with the one of the second run: how it looks, the class of the node that made it ("" for
leaves, and the region's inputs are leaves in its second run), and whether dispatch modes were active, under which
composite operators take other ways. A bare tuple: there is one for every save of either run."""


def _looks(t: torch.Tensor) -> _Looks:
    node = t.grad_fn
    return t.dtype, sizes_of(t), t.device, "" if node is None else type(node).__name__, dispatch_modes() > 0


def _fits(second: _Looks, first: _Looks) -> bool:
    if second == first:
        return True
    if second[:3] != first[:3]:
        return False
    is_comparable = second[3] and first[3] and second[4] == first[4]
    return not is_comparable or second[3] == first[3]


def _described(looks: _Looks) -> str:
    dtype, shape, device, origin, _ = looks
    return f"{dtype} {tuple(shape)} on {device}" + (f" from {origin}" if origin else "")


class _Input(NamedTuple):
    """A tensor passed to a region, as the hooks outside of it packed it; there it has a number, if it is saved."""

    packed: Any
    requires_grad: bool
    number: int

    def read(self, desk: SavedTensorHooks) -> torch.Tensor:
        t = _read(self.packed, desk)
        if t.is_inference() or (t.is_leaf and t.requires_grad):
            return t  # itself: a parameter passed as an argument
        return t.detach().requires_grad_(self.requires_grad)


class _SavedAsIs(NamedTuple):
    """A save excluded from recomputation, as packed by the hooks around the region."""

    packed: Any
    desk: SavedTensorHooks


class _EnoughError(Exception):
    """The second run has come to the last save that anybody needs."""

    def __init__(self, run: "Recomputation") -> None:
        super().__init__("a region's second run ends here; code inside of it must not catch this")
        self.run = run


class Recomputation:
    """Gives the saves of a second run to the holders with the same numbers.

    Args:
        read_led: gives the save of a number if it is held itself.
        evidence: to be told of each save, where there is any.
    """

    def __init__(
        self,
        name: str,
        holders: list[weakref.ref[Holder]],
        looks: list[_Looks],
        read_led: Callable[[int], torch.Tensor | None],
        evidence: Evidence | None,
    ) -> None:
        self._name = name
        self._holders = holders
        self._looks = looks
        self._read_led = read_led
        self._evidence = evidence
        self._values: dict[int, tuple[torch.Tensor, int]] = {}
        self.count = 0
        self.watch: RecomputeRecorder | None = None
        self._wanted = {n for n, ref in enumerate(holders) if _lacks_value(ref())}
        self._last = max(self._wanted, default=-1)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> torch.Tensor:
        number = self.count
        self.count += 1
        holder = self._holders[number]() if number < len(self._holders) else None
        # What is dead may have been changed since, and nobody is to hear of that.
        led = None if holder is None else self._read_led(number)
        t = t if led is None else led
        if type(t) is Absent:
            raise t.reads.refuse(f"a save of {self._name}")
        alias = t.detach()
        if self._evidence is not None and holder is not None and led is None:
            with numbering_paused():
                self._evidence.compare(number, t)
        if self.watch is not None:
            self.watch.saved(number, t, is_dead=holder is None)
        self._wanted.discard(number)
        if number < len(self._holders):
            looks = _looks(t)
            if not _fits(looks, self._looks[number]):
                raise self._other_save(number, looks)
            if holder is not None and holder.value is None:
                self._values[number] = alias, t._version
        if number >= self._last:
            raise _EnoughError(self)
        return alias

    @hidden_from_compiler
    def unpack(self, t: torch.Tensor) -> torch.Tensor:
        """Region code that runs a backward of its own reads what it has saved."""
        return t

    def value(self, number: int) -> torch.Tensor | None:
        """Of the saved tensor of this number, if a holder lacks it."""
        return self._values[number][0] if number in self._values else None

    def check(self) -> None:
        # Not of all holders: another thread may have taken a value that came, and dropped it, by now.
        if any(_lacks_value(self._holders[number]()) for number in self._wanted):
            raise RecomputeError(
                f"{self._name} saved {len(self._holders)} tensors in forward and only {self.count} when it ran again "
                f"in backward{_ADVICE}"
            )

    def give(self) -> None:
        """To the holders, what the run has saved: not before it is known that it went as the first one did."""
        for number, (value, version) in self._values.items():
            holder = self._holders[number]()
            if holder is not None and holder.value is None:
                holder.value, holder.version = value, version
        self._values.clear()

    def _other_save(self, number: int, looks: _Looks) -> RecomputeError:
        return RecomputeError(
            f"{self._name} saved {_described(self._looks[number])} in forward and {_described(looks)} in its place "
            f"when it ran again in backward{_ADVICE}"
        )


_ADVICE = (
    ": it depends on something that has changed in between (a cache it appends to, an object, a global). A model of "
    "transformers keeps a cache unless model.config.use_cache = False; else give the region the recipe 'keep' or "
    "'offload'"
)


@hidden_from_compiler
def unpack(holder: Holder | _SavedAsIs) -> torch.Tensor:
    """The unpack hook of all frames."""
    if type(holder) is _SavedAsIs:
        return _read(holder.packed, holder.desk)
    assert isinstance(holder, Holder)
    return holder.frame.value_of(holder)


def _read(packed: Any, desk: SavedTensorHooks) -> torch.Tensor:
    if type(packed) is Holder or type(packed) is _SavedAsIs:  # the region is inside of another that runs again
        return unpack(packed)
    # In that one's second run, the inner one is given tensors.
    return packed if isinstance(packed, torch.Tensor) else desk.unpack(packed)


def _lacks_value(holder: Holder | None) -> bool:
    return holder is not None and holder.value is None
