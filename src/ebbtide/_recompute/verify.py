"""Verification: right after the forward of a region, a recomputation has to save the bytes of the forward.

Note [Verification]
~~~~~~~~~~~~~~~~~~~
1. A planner chooses recomputation unasked, and a region may depend on anything: globals, objects, private generators.
   The first measured forward, and every N-th forward under `verify=N`, therefore recomputes each region once, in a
   *trial* right after the region's own forward. Until the verdict the saved tensors of forward stay on the device. The
   trial keeps no saved tensor, only fingerprints: checksums, and samples for point 5.
2. After a trial with equal bytes the saved tensors of forward are dropped, and backward recomputes the region as ever.
   The recomputation in backward has to match the fingerprints again.
3. After different bytes, an error or a side effect, the saved tensors of forward move to the store, as far as there is
   room, and backward reads these tensors. The handle never recomputes the region again, counts the reason, and warns
   once with the region's name.
4. A difference in backward after an equal trial comes from a change outside of the module, made between forward and
   backward. No tensor of forward is left to fall back to: backward raises RecomputeError.
5. Kernels with unordered additions (atomics of an accelerator) differ by rounding in plain training too. Verification
   demands every bit of them only under torch.use_deterministic_algorithms. If a sample of the elements differs by
   rounding at most, a second trial compares all elements. The recomputation in backward of a region that was seen to
   round is not compared; for all others the sample decides.
6. A collective inside the region leaves the region unverified, and the log says so: a verdict of one rank would have
   the ranks recompute different collectives. A captured graph is not verified either, because the host waits for each
   verdict.
"""

import contextvars
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Parameter

from ebbtide._engine.context import HookContext
from ebbtide._engine.hooks import Packed, SavedTensorHooks
from ebbtide._engine.parcel import Kept, keep
from ebbtide._engine.select import select_subclass, why_never
from ebbtide._errors import RecomputeError
from ebbtide._recompute.frame import ADVICE, Around, Frame, Holder, Pack, Recomputation, described, unpack
from ebbtide._recompute.provenance import PrunedTensor
from ebbtide._recompute.saved_outputs import numbering_paused
from ebbtide._recompute.side_effects import Snapshot
from ebbtide._types import Unable
from ebbtide._utils.logs import logger_of
from ebbtide._utils.storage import checksum_of_tensor, in_memory_order
from ebbtide._utils.torch_private import collective_count, hidden_from_compiler, plain_tensors, without_dispatch

_log = logger_of(__name__)

_SAMPLED = 1024
"""Elements of a sample, at least, where a tensor has as many: some kilobytes for each saved tensor of a model."""


class Schedule:
    """Chooses the forwards to verify, besides a planner's first one.

    Args:
        every: N verifies each N-th forward, and the first of each batch size and training mode. 0 switches all
            verification off, None leaves the planner's first forward.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._forwards = 0
        self._kinds: set[object] = set()

    @property
    def is_off(self) -> bool:
        """Whether no forward is verified, a planner's first one included."""
        return self._every == 0

    def is_due(self, kind: object) -> bool:
        """Whether to verify the forward about to begin, of a hashable `kind`: batch size and training mode."""
        if not self._every:
            return False
        is_due = kind not in self._kinds or self._forwards % self._every == 0
        self._forwards += 1
        self._kinds.add(kind)
        return is_due


class VerifiedFrame(Frame):
    """A frame that tries its recomputation right after the forward; see Note [Verification].

    Attributes:
        fingerprints: of the saved tensors of forward, by number.
        has_rounding: a recomputation was seen to differ by rounding.
        judges: the running trial is the second and compares all elements.
    """

    def __init__(self, name: str, call: Callable[..., Any], hooks: SavedTensorHooks, around: Around) -> None:
        super().__init__(name, call, hooks, around)
        self.fingerprints: dict[int, list[Fingerprint]] = {}
        self.has_rounding = False
        self.judges = False
        self._collectives = collective_count()
        self._inputs_before: list[list[Fingerprint]] = []
        self._at_hand: list[torch.Tensor] | None = None
        """The arguments of forward during a trial."""
        # The graph owns the holders, and a holder owns the saved tensor of forward.
        self._forward_tensors: weakref.WeakKeyDictionary[Holder, Packed] = weakref.WeakKeyDictionary()
        self._movable: set[int] = set()
        self._trials: weakref.WeakSet[TrialRecomputation] = weakref.WeakSet()
        self._forward_hooks = hooks.for_call(hooks.region_call)

    def _input(self, t: torch.Tensor, pack_input: Pack) -> Any:
        if not self._is_captured:
            with numbering_paused():
                self._inputs_before.append(_fingerprints_of(t))
        return super()._input(t, pack_input)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Any:
        """Pack hook inside the region: a holder in place of `t`, which stays on the device until the verdict."""
        packed = super().pack(t)
        if isinstance(packed, Holder) and not self._is_captured:
            with numbering_paused():
                self.fingerprints[packed.number] = _fingerprints_of(t)
                self._forward_tensors[packed] = keep(t, self._name)
            if _may_travel(t, self.hooks.region_call.context):
                self._movable.add(packed.number)
        return packed

    def value_of(self, holder: Holder) -> torch.Tensor:
        """The saved tensor of `holder`, as saved by forward if still there. Raises RecomputeError, ModifiedError."""
        packed = self._forward_tensors.get(holder)
        return super().value_of(holder) if packed is None else self._forward_hooks.unpack(packed)

    def _learn(self, tensors: list[torch.Tensor], versions: list[int]) -> None:
        """The forward has ended. Raises ModuleError only for a region without a verdict."""
        communicates = collective_count() is None or collective_count() != self._collectives
        if self._is_captured or communicates:
            if communicates:
                _log.info("%s: recomputation is not verified, ranks communicate inside", self._name)
            self.fingerprints.clear()
            self._forward_tensors.clear()
            super()._learn(tensors, versions)
            return
        try:
            super()._learn(tensors, versions)
            self._at_hand = tensors
            with numbering_paused():
                self._verify(tensors)
        except torch.OutOfMemoryError:
            raise  # a reason outside of the region
        except Exception as error:  # of any kind: backward can read the tensors of forward
            self._fall_back(error)
        else:
            self._forward_tensors.clear()
        finally:
            self._at_hand = None

    def _verify(self, tensors: list[torch.Tensor]) -> None:
        for t, before in zip(tensors, self._inputs_before, strict=True):
            if not _are_equal(before, _fingerprints_of(t)):
                raise self._changed_input(t)
        if next(self._live_holders(), None) is None:
            return  # backward needs nothing
        self._try(tensors)
        if self.has_rounding:
            self.judges = True
            self._try(tensors)
        self._check_leaks()
        if self.has_rounding:
            _log.info("%s adds in no fixed order: its recomputation in backward is not compared", self._name)
            self.fingerprints.clear()

    def _try(self, tensors: list[torch.Tensor]) -> None:
        """Recompute and compare, and leave no trace. Raises RecomputeError, and all that the region raises."""
        snapshot = Snapshot(self._found.modules, self._arguments.rebuild(tensors), tensors)
        if snapshot.iterators:
            raise RecomputeError(
                f"{self._name} can reach an iterator ({snapshot.iterators[0]}), which a recomputation would advance "
                "once more. Pass the next value, or give the region the recipe 'keep' or 'offload'"
            )
        try:
            with self._surroundings().restored():  # also of generators used by the recomputation alone
                # Backward of an accelerator runs in another thread, without the forward's context variables.
                contextvars.Context().run(self._recompute)
        except RecomputeError:
            self._put_back(snapshot)  # a side effect is the reason of the difference, and better to name
            raise
        except BaseException:
            snapshot.put_back()
            raise
        self._put_back(snapshot)

    def _put_back(self, snapshot: Snapshot) -> None:
        """Undo side effects of a trial. Raises RecomputeError for any."""
        changed = snapshot.put_back()
        if changed:
            raise RecomputeError(
                f"the recomputation of {self._name} changed {', '.join(dict.fromkeys(changed))} once more. Make it a "
                "buffer, or give the region the recipe 'keep' or 'offload'"
            )

    def _check_leaks(self) -> None:
        """Raises RecomputeError if code has stored a tensor of a trial: its graph lacks the rest of the model.

        Every saved tensor of the graph refers to the trial.
        """
        for generation in (1, 2):  # region code may leave cycles behind
            if len(self._trials) > 0:
                gc.collect(generation)
        if len(self._trials) > 0:
            raise RecomputeError(
                f"a tensor of the recomputation of {self._name} was stored outside of the region, in the place of the "
                "forward's or besides, and gradients through it end at the region. If the rest of the model reads it, "
                "write verify=0, or give the region the recipe 'keep' or 'offload'"
            )

    def _fall_back(self, error: Exception) -> None:
        """Let backward read the tensors of forward, from the store if possible, and never recompute the region again.

        The tensors leave one by one, or all of them would wait on the way out at once.
        """
        self._state.unable = Unable.DIFFERED
        context = self.hooks.region_call.context
        hooks = self._forward_hooks
        hooks.region_call = context.new_call(hooks.region_call.region)
        hooks.region_call.keep_window(0)
        for holder in list(self._forward_tensors):
            t, version, name = cast(Kept, self._forward_tensors[holder])
            # A trial may have changed the tensor, and the snapshot may have put the bytes back.
            if t._version != version and not _are_equal(self.fingerprints[holder.number], _fingerprints_of(t)):
                continue  # backward raises
            is_movable = holder.number in self._movable
            self._forward_tensors[holder] = hooks.pack(t) if is_movable else (t, t._version, name)
        self._inputs, self._outputs = [], None
        self._downstream.clear()
        if hooks.lacks_room:
            _log.info("%s: the store has no room for all saved tensors of forward, the rest stays", self._name)
        context.recorder.note_differed(self._name, str(error) or type(error).__name__)

    def _new_recomputation(self) -> Recomputation:
        if self._at_hand is None:
            return ComparedRecomputation(self)
        trial = TrialRecomputation(self)
        self._trials.add(trial)
        return trial

    def _read_inputs(self) -> list[torch.Tensor]:
        if self._at_hand is None:
            return super()._read_inputs()
        return [self._inputs[number].detached(t) for number, t in enumerate(self._at_hand)]

    def _publish(self, recomputation: Recomputation) -> None:
        if self._at_hand is None:
            super()._publish(recomputation)


class ComparedRecomputation(Recomputation):
    """A recomputation in backward that has to match the fingerprints of forward."""

    def __init__(self, frame: VerifiedFrame) -> None:
        super().__init__(frame)
        self._frame = frame
        self._found: dict[int, list[Fingerprint]] = {}

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Any:
        holder = self.holder(self.count)
        if holder is not None and self.count in self._frame.fingerprints and type(t) is not PrunedTensor:
            with numbering_paused():
                self._compare(holder, t)
        return super().pack(t)

    def _compare(self, holder: Holder, t: torch.Tensor) -> None:
        """Note a saved tensor for `check`. Does not wait for the device."""
        self._found[holder.number] = _fingerprints_of(t)

    def check(self) -> None:
        """Raises RecomputeError if a saved tensor is missing or differs. Waits for the device."""
        super().check()
        for number, found in self._found.items():
            known = self._frame.fingerprints[number]
            if _are_equal(known, found):
                continue
            if self._frame.judges or not all(map(_may_be_rounding, known, found)):
                raise RecomputeError(self._difference(f"{number} ({described(self._metadata[number])})"))
            self._frame.has_rounding = True

    def _difference(self, saved_tensor: str) -> str:
        return (
            f"the recomputation of {self._name} in backward saved other values than its forward, first in its saved "
            f"tensor {saved_tensor}. A recomputation right after the forward saved equal values: something outside of "
            "the module changed between forward and backward (a global, an object). Change it after backward, or give "
            "the region the recipe 'keep' or 'offload', or leave it out of regions="
        )


class TrialRecomputation(ComparedRecomputation):
    """A recomputation right after the forward, while the saved tensors of forward are there: keeps none of its own."""

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Any:
        number, holder = self.count, self.holder(self.count)
        alias = super().pack(t)
        self._values.pop(number, None)
        return alias if holder is None else holder

    @hidden_from_compiler
    def unpack(self, t: Any) -> torch.Tensor:
        """Unpack hook for region code that runs a backward of its own: reads the tensors of forward."""
        return unpack(t) if isinstance(t, Holder) else t

    def _compare(self, holder: Holder, t: torch.Tensor) -> None:
        """In a second trial, pass over a tensor that differs by rounding at most. Waits for the device then."""
        if self._frame.judges and all(map(is_rounding, _parts_of(unpack(holder)), _parts_of(t))):
            return
        super()._compare(holder, t)

    def _difference(self, saved_tensor: str) -> str:
        return (
            f"the recomputation of {self._name} saved other values than its forward, first in its saved tensor "
            f"{saved_tensor}{ADVICE}"
        )


class Fingerprint(NamedTuple):
    """What is noted about a plain tensor.

    Attributes:
        sums: checksums of the bytes.
        sample: some of the elements, if kernels may round the tensor otherwise the next time; else None.
        largest: largest magnitude of the tensor, as a tensor of double precision.
    """

    sums: torch.Tensor
    sample: torch.Tensor | None = None
    largest: torch.Tensor | None = None


def _fingerprints_of(t: torch.Tensor) -> list[Fingerprint]:
    """Of the comparable plain tensors inside `t`. Does not wait for the device."""
    with torch.no_grad(), without_dispatch():
        return list(map(_fingerprint_of, _parts_of(t)))


def _fingerprint_of(t: torch.Tensor) -> Fingerprint:
    elements = in_memory_order(t)
    sums = checksum_of_tensor(elements)
    # A type of one byte has no kernels for the comparison.
    if _is_exact(t) or not t.is_floating_point() or t.element_size() == 1 or t.numel() == 0:
        return Fingerprint(sums)
    smallest, largest = elements.aminmax()
    magnitude = torch.maximum(smallest.abs(), largest.abs()).double()
    sample = elements.view(-1)[:: max(1, elements.numel() // _SAMPLED)].clone()
    return Fingerprint(sums, sample, magnitude.nan_to_num(torch.inf))


def _are_equal(forward: list[Fingerprint], recomputed: list[Fingerprint]) -> bool:
    """Waits for the device."""
    pairs = zip(forward, recomputed, strict=False)
    return len(forward) == len(recomputed) and all(torch.equal(a.sums, b.sums) for a, b in pairs)


def _may_be_rounding(forward: Fingerprint, recomputed: Fingerprint) -> bool:
    """Whether the fingerprints are equal, or the samples differ by rounding at most. Waits for the device."""
    if torch.equal(forward.sums, recomputed.sums):
        return True
    if forward.sample is None or recomputed.sample is None:
        return False
    return is_rounding(forward.sample, recomputed.sample, forward.largest)


def is_rounding(forward: torch.Tensor, recomputed: torch.Tensor, largest: torch.Tensor | None = None) -> bool:
    """Whether reordered additions explain the difference of two saved tensors. Waits for the device.

    `largest`: largest magnitude of the whole tensor if `forward` is a sample.
    """
    if _is_exact(forward) or not forward.is_floating_point():
        return False
    with torch.no_grad(), without_dispatch():
        differ = forward != recomputed
        differ &= ~(forward.isnan() & recomputed.isnan())
        if largest is None:
            largest = forward.nan_to_num(0.0, 0.0, 0.0).abs().max()
        difference = (forward[differ].double() - recomputed[differ].double()).abs()
        # 16 units in the last place of the largest element: room for a few reordered additions, and not for inf or nan.
        return bool((difference <= 16 * torch.finfo(forward.dtype).eps * largest).all())


def _is_exact(t: torch.Tensor) -> bool:
    """Whether kernels of the device of `t` add in a fixed order."""
    return t.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _may_travel(t: torch.Tensor, context: HookContext) -> bool:
    """Judges `t` itself: an alias of a view of a parameter names no parameter."""
    is_plain = type(t) is torch.Tensor or type(t) is Parameter
    return (why_never(t, context) if is_plain else select_subclass(t)) is None


def _parts_of(t: torch.Tensor) -> list[torch.Tensor]:
    """The comparable plain tensors inside `t`; none of a collective that may be running."""
    is_pending = type(t).__name__ == "AsyncCollectiveTensor"
    return [] if is_pending else [part for part in plain_tensors(t) if _has_meaning(part)]


def _has_meaning(t: torch.Tensor) -> bool:
    is_strided = t.layout is torch.strided and not (t.is_quantized or t.is_nested or t._is_zerotensor())
    is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
    # Kernels save workspaces as bytes, partly unwritten (RNNs of cuDNN and oneDNN), and attention saves seed and offset
    # of a generator, unwritten without dropout.
    is_opaque = t.dtype in (torch.uint8, torch.uint64) or (is_integer and t.dim() == 0)
    return is_strided and not is_opaque
