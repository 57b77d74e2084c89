"""The saved-tensor hooks: called by autograd for every saved tensor, and for every read of a saved tensor."""

import weakref
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._engine.context import Limits, RegionCall
from ebbtide._engine.derive import Derivation, DerivedTicket, Results, owner_of
from ebbtide._engine.derive_rules import Deriver, KnownOperands
from ebbtide._engine.engines import Engines
from ebbtide._engine.parcel import Kept, Ticket, check_unmodified, check_written, keep, kept_tensor
from ebbtide._engine.select import select, select_subclass
from ebbtide._engine.stats import Count
from ebbtide._engine.timetable import Site
from ebbtide._plans import RegionPlan
from ebbtide._types import Reason, StepRecorder
from ebbtide._utils.torch_private import (
    dispatch_modes,
    graph_task_id,
    hidden_from_compiler,
    nbytes_of,
    next_node,
    without_dispatch,
)
from ebbtide._utils.tracing import is_tracing, span

Packed: TypeAlias = "Kept | Ticket | DerivedTicket | Flattened"

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Flattened:
    """A saved wrapper subclass: its inner tensors packed individually, and the data to assemble them again.

    In-place changes count on the wrapper only, hence the check of the wrapper's version.
    """

    __slots__ = ("cls", "counter", "inner", "meta", "region", "size", "stride", "version")

    def __init__(self, t: torch.Tensor, inner: dict[str, Any], meta: object, region: str) -> None:
        self.cls: Any = type(t)
        self.inner = inner
        self.meta = meta
        self.size = t.size()
        self.stride = t.stride()
        self.region = region
        self.version = t._version
        # With dispatch off the alias is a bare shell: it shares the counter and holds none of the inner tensors.
        with without_dispatch():
            self.counter = torch.Tensor.detach(t)


class SavedTensorHooks:
    """The pack and unpack hooks of one entry into an API context.

    Both hooks are hidden from the compiler, which would otherwise trace code that runs between two compiled graphs.

    Attributes:
        region_call: call of a region that saved tensors belong to now. Hooks of modules replace the call on entry and
            exit.
        stays: why all saved tensors of the region stay on the device; None if they may travel.
        step_recorder: recorder of the step, if there is any.
        has_lost_operands: a site that could be derived cannot be any more.
        lacks_room: a saved tensor that may travel has stayed for lack of room in the store.
        has_packed: whether any saved tensor has passed.
        has_moved: whether any saved tensor has left or was derived.
        small_bytes: of saved tensors that are too small to move, and that no recipe would keep if they were larger.
        kept: saved tensors kept so far, by reason, if anybody wants the counts.
        apart: numbers of saved tensors that take no part in `kept`.
    """

    def __init__(self, engines: Engines, region_call: RegionCall) -> None:
        self._engines = engines
        self.region_call = region_call
        self.stays: Reason | None = None
        self.step_recorder: StepRecorder | None = None
        self.has_lost_operands = False
        self.lacks_room = False
        self.has_packed = False
        self.has_moved = False
        self.small_bytes = 0
        self.kept: dict[Reason, Count] | None = None
        self.apart = frozenset[int]()
        self._was_read = False
        self._operands = KnownOperands()
        self._derivations: dict[int, weakref.ref[Derivation]] = {}  # by storage, of the present region

    def for_call(self, region_call: RegionCall) -> "SavedTensorHooks":
        """New hooks for `region_call` over the same engines."""
        return SavedTensorHooks(self._engines, region_call)

    def switch_to(self, region_call: RegionCall) -> None:
        """From now on saved tensors belong to another region call."""
        left = self.region_call.parameters
        if left is not None and region_call.parameters is not left:  # a restarted call goes on in the same forward
            left.leave()
        self.region_call = region_call
        self._operands.clear()
        self._derivations.clear()

    @property
    def named_sites(self) -> frozenset[int] | None:
        """Numbers of the saved tensors that the plan of the present call moves or derives; None if all may be."""
        call = self.region_call
        sites = frozenset[int]() if self.stays is Reason.RECIPE else call.sites
        return None if sites is None or call.derives is None else sites | call.derives

    def noticed(self) -> frozenset[int] | None:
        """At the end of a call, numbers of the saved tensors that the plan names, or that derivations have asked for.
        None if the plan names none, or if nothing could be derived: a later call may derive more."""
        sites = self.named_sites
        is_settled = not self.region_call.derives or bool(self._derivations)
        return sites | self._operands.used if sites is not None and is_settled else None

    def hooks(self) -> saved_tensors_hooks:
        """The pair of hooks, as a context for autograd."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def apply_plan(self, plan: RegionPlan) -> None:
        """Apply the plan of the region that the forward has entered."""
        recipe = plan.recipe
        self.region_call.set_points(plan.release, plan.prefetch_bytes)
        self.region_call.derives = recipe.derived_sites
        if recipe.derives:
            self.region_call.begin_deriving(next_node())
        if recipe.action == "keep":
            self.stays = Reason.RECIPE
        elif recipe.action == "offload":
            self.stays = None
            self.region_call.sites = recipe.moved_sites

    def release(self) -> None:
        """The forward enters a region with a release point: parcels leave until the window holds the rest."""
        window_bytes = self.region_call.limits.window_bytes
        for engine in self._engines.running():
            if engine.resident_bytes > window_bytes:
                with without_dispatch():
                    engine.release_down_to(window_bytes)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Packed:
        """Autograd saves `t`. Never fails for lack of room: a tensor that cannot travel is kept, and counted."""
        self.has_packed = True
        call = self.region_call
        if call.noticed is not None and not call.points and not self._was_read and type(t) in _PLAIN:
            index = call.next_index
            if index not in call.noticed:
                call.next_index = index + 1
                return keep(t, call.region)
            if index in call.operands:
                call.next_index = index + 1
                kept = keep(t, call.region)
                self._operands.add(t, kept, index)
                return kept
        if type(t) in _PLAIN:
            return self._pack_plain(t, self.stays)
        return self._pack_subclass(t, self.stays)

    def pack_as(self, t: torch.Tensor, stays: Reason | None) -> Packed:
        """`pack` for a tensor that a region's recomputation needs; kept for the reason `stays` unless None."""
        return self._pack_plain(t, stays) if type(t) in _PLAIN else self._pack_subclass(t, stays)

    def skip(self, t: torch.Tensor) -> None:
        """Do not save `t`, but count its number, and release what a release point at the number says."""
        self._take_number(t)

    @hidden_from_compiler
    def unpack(self, packed: Packed) -> torch.Tensor:
        """Autograd reads a saved tensor: bit for bit the packed tensor, on the current stream."""
        self._was_read = True
        if self.step_recorder is not None:
            self.step_recorder.read(_region_of(packed))
        if type(packed) is tuple:
            # Most reads: what `kept_tensor` does, without a call.
            return packed[0] if packed[0]._version == packed[1] else kept_tensor(packed)
        if type(packed) is DerivedTicket:
            if not dispatch_modes():
                return self._read(packed)
            with without_dispatch():
                return self._read(packed)
        if type(packed) is Ticket:
            region = packed.parcel.site.region
            check_written(region)
            if dispatch_modes() or is_tracing():
                with without_dispatch(), span("ebbtide::unpack", region):
                    return packed.parcel.engine.unpack(packed)
            return packed.parcel.engine.unpack(packed)
        assert isinstance(packed, Flattened)
        return self._unflatten(packed)

    def is_captured(self, devices: Collection[torch.device]) -> bool:
        """Whether work on any of `devices` is recorded by a graph capture."""
        return any(self._engines.is_captured(device) for device in filter(self.region_call.context.serves, devices))

    def expect(self, tickets: Sequence[Ticket], devices: Collection[torch.device], limits: Limits) -> None:
        """Bring back together all absent tickets about to be read on `devices`, in reading order.

        `limits`: limits of the reading region. The forward may be in another region now.
        """
        context = self.region_call.context
        if not tickets and not context.recorder.stats.parcels.count:
            return  # nothing has ever left
        with without_dispatch():
            for device in filter(context.serves, devices):
                engine = self._engines.on(device)
                if not isinstance(engine, Reason):
                    engine.expect([t for t in tickets if t.parcel.engine is engine], limits, self.region_call.forward)

    def unpack_part(self, part: object) -> object:
        """The tensor of a packed tensor; any other object unchanged. Foreign tuples must not be passed."""
        return self.unpack(cast(Packed, part)) if isinstance(part, tuple | Ticket | DerivedTicket | Flattened) else part

    def _pack_subclass(self, t: torch.Tensor, stays: Reason | None) -> Packed:
        reason = select_subclass(t) or stays
        if reason is None:
            return self._flatten(t, stays)
        index = self._take_number(t)  # or the numbers behind would differ from those of a recomputation
        return self._keep(t, reason, index)

    def _pack_plain(self, t: torch.Tensor, stays: Reason | None) -> Kept | Ticket | DerivedTicket:
        index = self._take_number(t)
        call = self.region_call
        if self.step_recorder is not None:
            self.step_recorder.saved(call.region, index, t)
        reason = select(t, call.context)
        if call.derives is not None and not call.derives:
            return self._keep_or_send(t, call, index, reason or stays)
        may_derive = reason is None and stays in (None, Reason.RECIPE)
        may_derive = may_derive and call.parameters is not None and (call.derives is None or index in call.derives)
        packed = self._derive(t, call, index) if may_derive else None
        if packed is None:
            packed = self._keep_or_send(t, call, index, reason or stays)
        else:
            self.has_moved = True
        self._operands.add(t, packed, index)
        return packed

    def _keep_or_send(self, t: torch.Tensor, call: RegionCall, index: int, reason: Reason | None) -> Kept | Ticket:
        if reason is None and call.sites is not None and index not in call.sites:
            reason = Reason.RECIPE
        if reason is None:
            packed = self._send(t, call, index)
            if isinstance(packed, Ticket):
                self.has_moved = True
                return packed
            reason = packed
            self.lacks_room |= reason is not Reason.HELD
        elif reason is Reason.OUTSIDE:
            joined = self._join(t, call)
            if joined is not None:
                return joined
        return self._keep(t, reason, index)

    def _take_number(self, t: torch.Tensor) -> int:
        """Number of saved tensor `t` in its region call. Releases first what a release point at the number says."""
        call = self.region_call
        if self._was_read and graph_task_id() == -1:
            # A context may enclose a whole loop: after a backward, numbers start again.
            self._was_read = False
            call = call.restart()
            self.switch_to(call)
        index = call.next_index  # kept tensors count too: otherwise sites would shift when a tensor is kept
        call.next_index = index + 1
        if call.points and call.context.serves(t.device) and call.reaches_point(index):
            self._release(t.device, call)
        return index

    def _release(self, device: torch.device, call: RegionCall) -> None:
        engine = self._engines.on(device)
        if not isinstance(engine, Reason):
            with without_dispatch():
                engine.release_down_to(call.limits.window_bytes)

    def _send(self, t: torch.Tensor, call: RegionCall, index: int) -> Ticket | Reason:
        engine = self._engines.on(t.device)
        if isinstance(engine, Reason):
            return engine
        if dispatch_modes():  # the user's modes need not see copies
            with without_dispatch():
                return engine.pack(t, call, index)
        return engine.pack(t, call, index)

    def _join(self, t: torch.Tensor, call: RegionCall) -> Ticket | None:
        """A ticket for `t` if a parcel has the bytes; None: `t` stays."""
        if not self.has_moved:
            return None
        engine = self._engines.on(t.device)
        if isinstance(engine, Reason):
            return None
        if dispatch_modes():
            with without_dispatch():
                return engine.join(t, call)
        return engine.join(t, call)

    def _derive(self, t: torch.Tensor, call: RegionCall, index: int) -> DerivedTicket | None:
        """A ticket without memory for `t`; None if no operator known to us can make `t` again."""
        owner = owner_of(t)
        if owner is None:
            return None
        if dispatch_modes():
            with without_dispatch():
                return self._derived(t, owner, call, index)
        return self._derived(t, owner, call, index)

    def _derived(self, t: torch.Tensor, owner: torch.Tensor, call: RegionCall, index: int) -> DerivedTicket | None:
        storage = owner.untyped_storage()
        known = self._derivations.get(storage._cdata)
        derivation = None if known is None else known()
        if derivation is None or derivation.source() is not storage:
            derivation = self._derivation(owner, call.site(index), call)
            if derivation is None:
                return None
            self._derivations[storage._cdata] = weakref.ref(derivation)
            call.context.recorder.stats.derived.add(derivation.nbytes)
        self._engines.mark_used(t)
        return DerivedTicket(derivation, t, call.region)

    def _derivation(self, owner: torch.Tensor, site: Site, call: RegionCall) -> Derivation | None:
        assert call.parameters is not None
        deriver = Deriver(_is_ours, self._operands, call.first_node, call.parameters)
        expression = deriver.derive(owner.grad_fn)
        self.has_lost_operands |= expression is None and site.is_derived
        if expression is None or deriver.signature == site.not_derived:
            return None
        derivation = Derivation(expression, owner, self._read)
        if not derivation.is_possible:
            return None
        key = deriver.comparison(site.index, owner.dtype)
        if key in call.context.derived:
            site.is_derived = True
            return derivation
        if isinstance(self._engines.on(owner.device), Reason):
            return None  # captured: nothing can be compared
        try:
            is_equal = bool(derivation.equals(owner))
        except torch.OutOfMemoryError:
            return None
        if not is_equal:
            site.not_derived = deriver.signature
            return None
        call.context.derived.add(key)
        site.is_derived = True
        return derivation

    def _read(self, packed: "Kept | Ticket | DerivedTicket", results: Results | None = None) -> torch.Tensor:
        """The tensor behind an operand of a derivation, or behind a derived tensor."""
        if isinstance(packed, tuple):
            return kept_tensor(packed)
        if isinstance(packed, DerivedTicket):
            return packed.unpack(self._engines.current_stream(packed.device), results)
        return packed.parcel.engine.unpack(packed)

    def _keep(self, t: torch.Tensor, reason: Reason, index: int = -1) -> Kept:
        call, nbytes = self.region_call, nbytes_of(t)
        if call.noticed is not None and (index not in call.noticed or index in call.operands):
            return keep(t, call.region)  # counted with the whole call
        call.context.recorder.keep(reason, nbytes)
        if self.kept is not None and index not in self.apart:
            self.kept.setdefault(reason, Count()).add(nbytes)
            if reason is Reason.SMALL and self.stays is not Reason.RECIPE:
                self.small_bytes += nbytes
        return keep(t, call.region)

    def _flatten(self, t: Any, stays: Reason | None) -> Flattened:
        names, meta = t.__tensor_flatten__()
        # Some names are no tensors (DTensor's device mesh) and are passed through.
        inner = {name: self._pack_inner(getattr(t, name), stays) for name in names}
        return Flattened(t, inner, meta, self.region_call.region)

    def _pack_inner(self, value: object, stays: Reason | None) -> object:
        return self.pack_as(value, stays) if isinstance(value, torch.Tensor) else value

    def _unflatten(self, packed: Flattened) -> torch.Tensor:
        counter = packed.counter
        if counter._version != packed.version:
            what = f"a {packed.cls.__name__} of {packed.region or '<root>'}"
            check_unmodified(counter, packed.version, what, counter.dtype, counter.device, packed.size)
        inner = {name: self.unpack_part(value) for name, value in packed.inner.items()}
        t: torch.Tensor = packed.cls.__tensor_unflatten__(inner, packed.meta, packed.size, packed.stride)
        return t


def _is_ours(packed: object, unpack: object) -> bool:
    return getattr(unpack, "__func__", None) is SavedTensorHooks.unpack and type(packed) is not Flattened


def _region_of(packed: Packed) -> str:
    if type(packed) is tuple:
        return packed[2]
    if type(packed) is DerivedTicket:
        return packed.region
    return packed.parcel.site.region if isinstance(packed, Ticket) else cast(Flattened, packed).region


def is_unmodified(part: object) -> bool:
    """Whether a packed tensor was not modified in place; True for any other object."""
    if type(part) is tuple:
        alias, version, _ = cast(Kept, part)
        return alias._version == version
    if isinstance(part, Ticket | Flattened):
        return part.counter._version == part.version
    return True
