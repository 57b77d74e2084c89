"""One forward of a region that backward recomputes; see Note [Recomputation] in the package."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._engine.hooks import Packed, SavedTensorHooks
from ebbtide._engine.parcel import Ticket, check_unmodified, check_written
from ebbtide._errors import ModuleError, RecomputeError
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.ops import RefuseRngMode
from ebbtide._recompute.provenance import PrunedTensor
from ebbtide._recompute.replay import ReplayOutputsMode
from ebbtide._recompute.rng_autocast import AutocastRngState
from ebbtide._recompute.saved_outputs import SaveOutputsMode, numbering_paused
from ebbtide._recompute.side_effects import Snapshot
from ebbtide._recompute.state import RegionState, version_of
from ebbtide._recompute.verify import Evidence, is_rounding
from ebbtide._types import RecomputeRecorder, Unable
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import (
    collective_count,
    dispatch_modes,
    graph_task_id,
    has_compiled_code,
    hidden_from_compiler,
    is_in_custom_function,
    keeps_graph,
    nbytes_of,
    sizes_of,
    without_dispatch,
)
from ebbtide._utils.tracing import span

_log = logger_of(__name__)

Pack = Callable[[torch.Tensor], Any]
Around = Callable[[Pack, bool], contextlib.AbstractContextManager[RecomputeRecorder | None]]
"""A context that an entry point puts around region code, from the active pack hook and whether backward recomputes.
The context returns a recorder of the recomputation, or None."""


class Holder:
    """Autograd's object for a saved tensor of a region: a number, and the frame that can recompute the tensor."""

    __slots__ = ("__weakref__", "copy", "frame", "number", "value", "version")

    def __init__(self, frame: "Frame", number: int) -> None:
        self.frame = frame
        self.number = number
        self.value: torch.Tensor | None = None
        self.version = 0
        self.copy: Packed | None = None
        """The forward's saved tensor during verification; see Note [Verification]."""


class Frame:
    """The inputs and surroundings of one forward of a region, and the holders to fill.

    The holders own the frame, and the autograd graph owns the holders.

    Args:
        name: of the region, for errors.
        call: the region's forward.
        hooks: unpack saved outputs and inputs.
        around: see `Around`.
        evidence: of the forward's saved tensors, to verify the recomputation.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        hooks: SavedTensorHooks,
        around: Around,
        evidence: Evidence | None = None,
    ) -> None:
        self._name = name
        self._call = call
        self.hooks = hooks
        self._limits = hooks.region_call.limits
        self._around = around
        self._evidence = evidence
        self._reads_evidence = False  # after a difference: backward reads the forward's tensors
        self._holders: list[weakref.ref[Holder]] = []
        self._metadata: list[_Metadata] = []
        self._lock = threading.RLock()
        self._is_whole = False
        self._was_recomputed = False
        self._dropped_bytes = 0
        self.ends_early = False
        """The forward sets an RNG state that cannot be restored: recomputation has to stop before that place."""
        self._save_mode: SaveOutputsMode | None = None
        self._downstream: dict[int, Any] = {}  # held saved tensors by number; see Note [Pruning]
        self._forward_recorder: RecomputeRecorder | None = None
        self._recorder: RecomputeRecorder | None = None  # of a recomputation, which may be inside of forward
        self._recomputations = 0
        self._may_hand_over = False  # a recomputed tensor to the node that reads
        self._ended_at = -1  # number of the saved tensor that ended the recomputation early, or -1
        self._runs_to_end = False  # while that is tried

    # -- forward ---------------------------------------------------------------------------------------------------

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pack_input: Pack,
        save_mode: SaveOutputsMode | None,
        state: RegionState,
    ) -> Any:
        """Run the forward, with arguments packed by `pack_input` and outputs of expensive calls by `save_mode`.

        Raises:
            ModuleError: the forward changes an argument or a parameter in place, or a buffer for the first time.
            CaptureError: the forward uses random numbers during a graph capture.
        """
        self._state = state
        compares_nodes = state.compares_nodes() or save_mode is not None
        self._metadata_of = _metadata_with_node if compares_nodes else _metadata_of
        self._arguments = Arguments(args, kwargs)
        tensors = self._arguments.take_tensors()
        versions = list(map(version_of, tensors))
        self._inputs = [self._input(t, pack_input) for t in tensors]
        # Prepared before the forward runs: region code may ask for gradients, and after an exception the tensors saved
        # so far may still be read.
        with numbering_paused():  # copies of buffers are not calls of the region around
            self._found = state.snapshot()
        self._devices = {*self._found.devices, *(t.device for t in tensors)}
        is_captured = self.hooks.is_captured(self._devices)
        if is_captured:
            self._evidence = None  # a comparison waits for the device
        generators = [*self._found.generators, *self._arguments.generators]
        self._autocast_rng = AutocastRngState(self._devices, is_captured, generators)
        self._pack_input = pack_input
        self._collectives = None if self._evidence is None else collective_count()
        self._outputs = None if save_mode is None else save_mode.outputs
        pair = saved_tensors_hooks(self.pack, unpack)
        refuse_rng = RefuseRngMode(self._name) if is_captured else contextlib.nullcontext()
        if save_mode is not None:
            save_mode.tracks_rng = not is_captured
            save_mode.recorder.tensor_count = self._holders.__len__
        self._save_mode = save_mode
        is_whole = False
        try:
            around = self._around(pair.pack_hook, False)
            with around as self._forward_recorder, pair, save_mode or contextlib.nullcontext(), refuse_rng:
                output = self._call(*args, **kwargs)
            is_whole = True
        finally:
            self._save_mode = self._forward_recorder = None
            self._autocast_rng.close()
            if save_mode is not None:
                save_mode.close(is_whole, self._metadata)
        self._learn(tensors, versions)
        self._metadata = state.shared_metadata(self._metadata)
        if self._outputs is not None:
            self._outputs.drop_modified()
        self._is_whole = True
        stats = self.hooks.region_call.context.recorder.stats
        stats.recomputed.add(self._dropped_bytes, len(self._holders) - len(self._downstream))
        return output

    def _input(self, t: torch.Tensor, pack_input: Pack) -> "_Input":
        number = self.hooks.region_call.next_index
        # An inference tensor cannot be packed. The owner keeps the tensor alive anyway.
        return _Input(t if t.is_inference() else pack_input(t), t.requires_grad, number)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> "Holder | _SavedAsIs":
        """Pack hook inside the region: a holder in place of `t`."""
        # Past an unknown RNG state a recomputation would draw other numbers, and advance the state of later forwards.
        # Tensors saved before are recomputed by a recomputation that stops in time; later tensors are kept.
        if self.ends_early or self._autocast_rng.has_unknown_state:
            self.ends_early = True
            self._state.unable = Unable.UNKNOWN_RNG
            return _SavedAsIs(self._pack_input(t), self.hooks)
        holder = Holder(self, len(self._holders))
        if self._forward_recorder is not None:
            self._forward_recorder.saved(holder.number, t, is_dead=False)
        if self._evidence is not None:
            with numbering_paused():
                holder.copy = self._evidence.take(holder.number, t)
        packed = None if self._save_mode is None else self._save_mode.pack_downstream(t, holder.number)
        if packed is None:
            self._dropped_bytes += nbytes_of(t)
        else:
            self._downstream[holder.number] = packed
        self._holders.append(weakref.ref(holder))
        self._metadata.append(self._metadata_of(t, dispatch_modes() > 0))
        return holder

    def _learn(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        """Raises ModuleError for changes that rule out recomputation, unless the forward left evidence to read."""
        why = self._why_unverified() if self._evidence is not None and not self._reads_evidence else ""
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
            self._fall_back(error)

    def _why_unverified(self) -> str:
        assert self._evidence is not None
        if not self._evidence.is_whole:
            return "the store has no room for the saved tensors of forward"
        now = collective_count()
        return "ranks communicate inside" if now is None or now != self._collectives else ""

    def _check_inputs(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        for t, version in zip(tensors, versions, strict=True):
            if version_of(t) != version:
                raise ModuleError(
                    f"{self._name} changes a tensor in place that was passed to it ({t.dtype} {tuple(sizes_of(t))}), "
                    "and cannot be recomputed. Give the region the recipe 'keep' or 'offload', or clone the tensor "
                    "before the change"
                )

    # -- recomputation ---------------------------------------------------------------------------------------------

    def value_of(self, holder: Holder) -> torch.Tensor:
        """The saved tensor of `holder`, bit for bit. Raises RecomputeError, ModifiedError."""
        value = holder.value
        if value is None:
            with self._lock:
                if holder.value is None and not self._reads_evidence:
                    self._recompute()
                value = holder.value
        if value is None:
            return self._forward_value(holder)
        if holder.number == self._ended_at:
            check_written(self._name)  # the kernel that writes the tensor has not run
        if self._recorder is not None:
            self._recorder.asked(holder.number)
        if graph_task_id() == -1:
            for each in self._live_holders():
                each.value = None
        elif keeps_graph() or (self._may_hand_over and self._is_large(value) and not is_in_custom_function()):
            # The node that reads owns the tensor from here, and frees the memory before autograd sums up the gradients
            # of broadcast operands, such as biases, in buffers of 100 MiB. A second read is right, but recomputes.
            holder.value = None
        if value._version != holder.version:
            what = f"a tensor saved in {self._name}"
            check_unmodified(value, holder.version, what, value.dtype, value.device, sizes_of(value))
        return value

    def _is_large(self, value: torch.Tensor) -> bool:
        """Whether the memory of `value` is worth a look at the node that reads."""
        return nbytes_of(value) >= self._limits.min_bytes

    def _recompute(self) -> None:
        self._recomputations += 1
        if self._evidence is None:
            self._recompute_pruned()
            return
        try:
            self._recompute_verified()
        except (_EarlyStopError, torch.OutOfMemoryError):
            raise  # the stop of an outer region, or a reason outside of the region
        except Exception as error:  # of any kind: backward can read the evidence
            self._fall_back(error)
        if not self._reads_evidence and graph_task_id() != -1 and not keeps_graph():
            self._drop_evidence()  # no later backward recomputes

    def _recompute_verified(self) -> None:
        """Recompute, to the end of the region if code behind the last saved tensor takes side effects back."""
        try:
            self._recompute_pruned()
            return
        except _SideEffectError as error:
            if self._ended_at < 0 or self.ends_early or not self._is_whole:  # nothing is left to run, or must
                raise
            side_effects = str(error)  # the error itself holds the arguments of the first attempt
        self._runs_to_end = True
        try:
            self._recompute_pruned()
        except _EarlyStopError:
            raise  # the stop of an outer region
        except Exception:  # of any kind, an OutOfMemoryError too: the first attempt has the reason to keep the region
            raise _SideEffectError(side_effects) from None
        finally:
            self._runs_to_end = False
        self._state.runs_to_end = True

    @property
    def runs_to_end(self) -> bool:
        """Whether a recomputation may not stop at the last saved tensor."""
        return (self._runs_to_end or self._state.runs_to_end) and self._is_whole and not self.ends_early

    def _fall_back(self, error: Exception) -> None:
        """Let backward read the forward's tensors, and never recompute the region again."""
        self._reads_evidence = True
        self._state.unable = Unable.DIFFERED
        self.hooks.region_call.context.recorder.note_differed(self._name, str(error) or type(error).__name__)

    def _forward_value(self, holder: Holder) -> torch.Tensor:
        value = self._read_downstream(holder.number)
        if value is not None:
            return value
        assert self._evidence is not None
        assert holder.copy is not None
        return self._evidence.read(holder.copy)

    def _drop_evidence(self) -> None:
        self._evidence = None
        for holder in self._live_holders():
            holder.copy = None

    def _live_holders(self) -> Iterator[Holder]:
        return (holder for ref in self._holders if (holder := ref()) is not None)

    def _check_evidence(self, recomputation: "Recomputation") -> None:
        """Raises RecomputeError for a saved tensor with other bytes than in forward."""
        assert self._evidence is not None
        for number in self._evidence.differing():
            holder, value = self._holders[number](), recomputation.value(number)
            if holder is None or value is None or is_rounding(self._forward_value(holder), value):
                continue
            raise RecomputeError(
                f"the recomputation of {self._name} saved other values than its forward, first in its saved tensor "
                f"{number} ({_described(self._metadata[number])}){_ADVICE}"
            )

    def _recompute_pruned(self) -> None:
        """Recompute without the pruned calls; after a need for their outputs, once more with them."""
        if self._outputs is None:
            self._recompute_with(None)
        elif not self._outputs.has_pruned:
            self._recompute_with(ReplayOutputsMode(self._outputs, self.hooks))
        elif has_compiled_code() or not self._succeeds_pruned(ReplayOutputsMode(self._outputs, self.hooks)):
            self._outputs.unprune()
            self._recompute_with(ReplayOutputsMode(self._outputs, self.hooks))

    def _succeeds_pruned(self, replay: ReplayOutputsMode) -> bool:
        try:
            self._recompute_with(replay)
        except (_EarlyStopError, torch.OutOfMemoryError):
            raise  # the stop of an outer region, or a reason apart from pruning
        except Exception:
            # Code that met a pruned tensor may raise anything. An error of its own comes again without pruning.
            if not replay.met_pruned:
                raise
            return False
        return True

    def _recompute_with(self, replay: ReplayOutputsMode | None) -> None:
        recomputation = Recomputation(self)
        try:
            self._run_again(recomputation, replay)
        finally:
            recomputation.drop_values()

    def _run_again(self, recomputation: "Recomputation", replay: ReplayOutputsMode | None) -> None:
        self.hooks.expect(self._tickets(), self._devices, self._limits)
        tensors = [packed_input.read(self.hooks) for packed_input in self._inputs]
        args, kwargs = self._arguments.rebuild(tensors)
        pair = saved_tensors_hooks(recomputation.pack, recomputation.unpack)
        snapshot = None if self._evidence is None else Snapshot(self._found.modules, (args, kwargs), tensors)
        if replay is not None:
            replay.tensor_count = recomputation.tensor_count
        with (
            span("ebbtide::recompute", self._name),
            contextlib.nullcontext() if snapshot is None else self._undone(snapshot),
            numbering_paused(),
            self._autocast_rng.restored(),
            self._found.restored(),
            replay or contextlib.nullcontext(),
            self._around(pair.pack_hook, True) as recorder,
            pair,
        ):
            self._recorder = recomputation.recorder = recorder
            if recorder is not None:
                for packed_input, t in zip(self._inputs, tensors, strict=True):
                    recorder.given(packed_input.number, t)
            del tensors  # the call may free its arguments
            self._ended_at = -1
            try:
                self._call(*args, **kwargs)
            except _EarlyStopError as stop:
                if stop.recomputation is not recomputation:
                    raise
                self._ended_at = recomputation.count - 1
        # Hooks that read the saved tensors of every node would recompute for each.
        self._may_hand_over = self._recomputations < 2 and self._outputs is None
        if recorder is not None:
            self._may_hand_over = self._may_hand_over and recorder.may_hand_over()
        if replay is not None:
            replay.reads.check(self._name)
        recomputation.check()
        if self._evidence is not None:
            self._check_evidence(recomputation)
        recomputation.publish()
        if graph_task_id() != -1 and not keeps_graph():
            self._downstream.clear()  # the holders own the tensors from here
            if self._outputs is not None and self._is_whole:
                if not self._was_recomputed:
                    self._outputs.drop_unused()
                self._was_recomputed = True

    @contextlib.contextmanager
    def _undone(self, snapshot: Snapshot) -> Generator[None, None, None]:
        """Undo side effects of a verified recomputation. Raises RecomputeError for any that a state does not cover."""
        try:
            yield
        finally:
            changed = snapshot.put_back()
        if changed:
            raise _SideEffectError(
                f"the recomputation of {self._name} changed {', '.join(dict.fromkeys(changed))} once more. Make it a "
                "buffer, or give the region the recipe 'keep' or 'offload'"
            )

    def _read_downstream(self, number: int) -> torch.Tensor | None:
        """Saved tensor `number`, if held for being downstream of a pruned call."""
        packed = self._downstream.get(number)
        return None if packed is None else cast(torch.Tensor, self.hooks.unpack_part(packed))

    def _tickets(self) -> list[Ticket]:
        inputs = [i.packed for i in self._inputs if type(i.packed) is Ticket]
        downstream = [packed for packed in self._downstream.values() if type(packed) is Ticket]
        return inputs + downstream + ([] if self._outputs is None else self._outputs.tickets())


_Metadata: TypeAlias = tuple[torch.dtype, tuple[object, ...], torch.device, str, bool]
"""Properties that a saved tensor shares with the recomputed one: dtype, shape, device, class name of the grad_fn (""
for leaves; a region's inputs are leaves in recomputation), and whether dispatch modes were active (composite operators
then decompose differently). A bare tuple: every saved tensor needs one in forward and in recomputation. Most forwards
go without the name, which takes as long as all the rest: see `RegionState.compares_nodes`."""


def _metadata_of(t: torch.Tensor, has_modes: bool) -> _Metadata:
    try:
        return t.dtype, t.shape, t.device, "", has_modes
    except RuntimeError:  # asking every tensor whether it is nested takes longer
        return t.dtype, sizes_of(t), t.device, "", has_modes


def _metadata_with_node(t: torch.Tensor, has_modes: bool) -> _Metadata:
    dtype, sizes, device, _, _ = _metadata_of(t, has_modes)
    return dtype, sizes, device, "" if t.grad_fn is None else type(t.grad_fn).__name__, has_modes


def _matches(recomputed: _Metadata, saved: _Metadata) -> bool:
    if recomputed == saved:
        return True
    if recomputed[:3] != saved[:3]:
        return False
    is_comparable = recomputed[3] and saved[3] and recomputed[4] == saved[4]
    return not is_comparable or recomputed[3] == saved[3]


def _described(metadata: _Metadata) -> str:
    dtype, shape, device, origin, _ = metadata
    return f"{dtype} {tuple(shape)} on {device}" + (f" from {origin}" if origin else "")


class _Input(NamedTuple):
    """A tensor argument of a region, packed by the hooks around, and its number among their saved tensors."""

    packed: Any
    requires_grad: bool
    number: int

    def read(self, hooks: SavedTensorHooks) -> torch.Tensor:
        t = _read(self.packed, hooks)
        if t.is_inference() or (t.is_leaf and t.requires_grad):
            return t  # the argument itself: a parameter
        return t.detach().requires_grad_(self.requires_grad)


class _SavedAsIs(NamedTuple):
    """A saved tensor excluded from recomputation, as packed by the hooks around the region."""

    packed: Any
    hooks: SavedTensorHooks


class _EarlyStopError(Exception):
    """A recomputation has reached the last saved tensor that is needed."""

    def __init__(self, recomputation: "Recomputation") -> None:
        super().__init__("the recomputation of a region ends here; code inside must not catch this error")
        self.recomputation = recomputation


class _SideEffectError(RecomputeError):
    """A recomputation has changed what it should not."""


class Recomputation:
    """Collects the saved tensors of a recomputation for the holders of equal numbers."""

    def __init__(self, frame: Frame) -> None:
        self._name = frame._name
        self._holders = frame._holders
        self._metadata = frame._metadata
        self._metadata_of = frame._metadata_of
        self._downstream = frame._downstream
        self._read_downstream = frame._read_downstream
        self._evidence = frame._evidence
        self._values: dict[int, tuple[torch.Tensor, int]] = {}
        self.count = 0
        self.recorder: RecomputeRecorder | None = None
        self._wanted = {n for n, ref in enumerate(self._holders) if _lacks_value(ref())}
        self._last = max(self._wanted, default=-1)
        self._runs_to_end = frame.runs_to_end

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> torch.Tensor:
        number = self.count
        self.count += 1
        holder = self._holders[number]() if number < len(self._holders) else None
        # Without a holder the held tensor may have been changed legally; reading it would raise ModifiedError.
        held = self._read_downstream(number) if self._downstream and holder is not None else None
        t = t if held is None else held
        if type(t) is PrunedTensor:
            raise t.reads.refuse(f"a saved tensor of {self._name}")
        has_modes = dispatch_modes() > 0
        alias = _alias(t) if has_modes else t.detach()
        if self._evidence is not None and holder is not None and held is None:
            with numbering_paused():
                self._evidence.note_recomputed(number, t)
        if self.recorder is not None:
            self.recorder.saved(number, t, is_dead=holder is None)
        if number < len(self._holders):
            metadata = self._metadata_of(t, has_modes)
            if not _matches(metadata, self._metadata[number]):
                raise self._mismatch(number, metadata)
            if holder is not None and holder.value is None:
                self._values[number] = alias, t._version
        self._wanted.discard(number)  # last: region code may go on after an error of this call
        if number >= self._last and not self._runs_to_end:
            raise _EarlyStopError(self)
        return alias

    @hidden_from_compiler
    def unpack(self, t: torch.Tensor) -> torch.Tensor:
        """Unpack hook inside a recomputation, for region code that runs a backward of its own."""
        return t

    def tensor_count(self) -> int:
        return self.count

    def value(self, number: int) -> torch.Tensor | None:
        """The recomputed saved tensor `number`, if a holder lacks the value."""
        return self._values[number][0] if number in self._values else None

    def check(self) -> None:
        """Raises RecomputeError if holders still lack a value."""
        # Checks the recomputation's own list: another thread may already have taken and dropped a value.
        missing = sum(_lacks_value(self._holders[number]()) for number in self._wanted)
        if missing:
            raise RecomputeError(
                f"{self._name} saved {len(self._holders)} tensors in forward, and {missing} of them are missing in its "
                f"recomputation{_ADVICE}"
            )

    def publish(self) -> None:
        """Move the values to the holders, once the recomputation is known to equal the forward."""
        for number, (value, version) in self._values.items():
            holder = self._holders[number]()
            if holder is not None and holder.value is None:
                holder.value, holder.version = value, version

    def drop_values(self) -> None:
        """Region code may keep a tensor of the recomputed graph, whose hooks refer to this object."""
        self._values.clear()

    def _mismatch(self, number: int, metadata: _Metadata) -> RecomputeError:
        return RecomputeError(
            f"{self._name} saved {_described(self._metadata[number])} in forward and {_described(metadata)} as saved "
            f"tensor {number} in its recomputation{_ADVICE}"
        )


_ADVICE = (
    ": the region depends on something that has changed in between (a cache it appends to, an object, a global). A "
    "model of transformers keeps a cache unless model.config.use_cache = False. In other cases give the region the "
    "recipe 'keep' or 'offload'"
)


@hidden_from_compiler
def unpack(holder: Holder | _SavedAsIs) -> torch.Tensor:
    """The unpack hook of all frames."""
    if type(holder) is _SavedAsIs:
        return _read(holder.packed, holder.hooks)
    assert isinstance(holder, Holder)
    return holder.frame.value_of(holder)


def _read(packed: Any, hooks: SavedTensorHooks) -> torch.Tensor:
    if type(packed) is Holder or type(packed) is _SavedAsIs:  # an outer region recomputes
        return unpack(packed)
    # A recomputation of an outer region packs tensors as they are.
    return packed if isinstance(packed, torch.Tensor) else hooks.unpack(packed)


def _alias(t: torch.Tensor) -> torch.Tensor:
    if type(t) is not torch.Tensor:
        return t.detach()
    with without_dispatch():  # a call of a mode costs as much as several operators
        return t.detach()


def _lacks_value(holder: Holder | None) -> bool:
    return holder is not None and holder.value is None
