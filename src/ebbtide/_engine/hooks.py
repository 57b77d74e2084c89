"""The desk: what autograd calls for every save, and for every read of one."""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from ebbtide._engine.context import Limits, RegionCall
from ebbtide._engine.engines import Engines
from ebbtide._engine.parcel import Kept, Ticket, check_unmodified, check_written, keep, kept_tensor
from ebbtide._engine.select import select, select_subclass
from ebbtide._plans import RegionPlan
from ebbtide._utils.torch_private import dispatch_modes, graph_task_id, hidden_from_compiler, without_dispatch
from ebbtide.types import Reason, StepRecorder

Packed: TypeAlias = "Kept | Ticket | Flattened"

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Flattened:
    """A save of a wrapper subclass: its inner tensors packed one by one, and how to put it together again.

    In-place changes count on the wrapper only, so the wrapper's version is the one to watch.
    """

    __slots__ = ("cls", "counter", "inner", "meta", "size", "stride", "version", "where")

    def __init__(self, t: torch.Tensor, inner: dict[str, Any], meta: object, where: str) -> None:
        self.cls: Any = type(t)
        self.inner = inner
        self.meta = meta
        self.size = t.size()
        self.stride = t.stride()
        self.where = where
        self.version = t._version
        # With dispatch off the alias is a bare shell: it shares the counter and holds none of the inner tensors.
        with without_dispatch():
            self.counter = torch.Tensor.detach(t)


class SavedTensorHooks:
    """pack and unpack for one entry of a door.

    Both are hidden from the compiler, which else traces what runs between two compiled graphs.

    Attributes:
        visit: the pass through a region that saves belong to now. Doors that know regions change it as they go.
        stays: why saves stay on the device at this place, whatever they are; None where they may travel.
        watch: what follows this step, if anything does.
        lacks_room: whether a save that may travel stayed, for the store had no room.
    """

    def __init__(self, engines: Engines, visit: RegionCall) -> None:
        self._engines = engines
        self.visit = visit
        self.stays: Reason | None = None
        self.watch: StepRecorder | None = None
        self.lacks_room = False
        self._was_read = False

    def beside(self, visit: RegionCall) -> "SavedTensorHooks":
        """Another one for `visit`, with the same engines."""
        return SavedTensorHooks(self._engines, visit)

    def hooks(self) -> saved_tensors_hooks:
        """The pair to push."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def follow(self, said: RegionPlan) -> None:
        """What a plan says about the place where the forward is now: what travels from here, and when."""
        recipe = said.recipe
        self.visit.follow(said.release, said.prefetch_bytes)
        if recipe.action == "keep":
            self.stays = Reason.RECIPE
        elif recipe.action == "offload":
            self.stays = None
            self.visit.sites = None if recipe.sites is None else frozenset(recipe.sites)

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Packed:
        """Autograd saves `t`. Never fails for lack of room: what cannot travel is kept, counted by Reason."""
        if type(t) in _PLAIN:
            return self._pack_plain(t, self.stays)
        return self._pack_subclass(t, self.stays)

    def pack_as(self, t: torch.Tensor, stays: Reason | None) -> Packed:
        """The same for a tensor that a region has to have again, kept for the reason `stays` if there is one."""
        return self._pack_plain(t, stays) if type(t) in _PLAIN else self._pack_subclass(t, stays)

    def skip(self, t: torch.Tensor) -> None:
        """What would be the next save is of no use. It has its number all the same, and a release point may be here."""
        self._take_number(t)

    @hidden_from_compiler
    def unpack(self, packed: Packed) -> torch.Tensor:
        """Autograd reads a save: bit for bit what was packed, on the current stream."""
        self._was_read = True
        if self.watch is not None:
            self.watch.read(_region_of(packed))
        if type(packed) is tuple:
            return kept_tensor(packed)
        if type(packed) is Ticket:
            check_written(packed.parcel.site.region)
            if dispatch_modes():
                with without_dispatch():
                    return packed.parcel.engine.unpack(packed)
            return packed.parcel.engine.unpack(packed)
        assert isinstance(packed, Flattened)
        return self._unflatten(packed)

    def is_captured(self, devices: Collection[torch.device]) -> bool:
        """Whether work on one of `devices` goes into a graph that is being captured."""
        return any(self._engines.is_captured(device) for device in filter(self.visit.scope.serves, devices))

    def expect(self, tickets: Sequence[Ticket], devices: Collection[torch.device], limits: Limits) -> None:
        """These are about to be read, in this order, on `devices`: bring back together what is away.

        `limits`: of the place that reads them. Where the forward is now says nothing about that.
        """
        scope = self.visit.scope
        with without_dispatch():
            for device in filter(scope.serves, devices):
                engine = self._engines.on(device)
                if not isinstance(engine, Reason):
                    engine.expect([t for t in tickets if t.parcel.engine is engine], limits)

    def unpack_part(self, part: object) -> object:
        """The tensor, if `part` is a packed one, and else `part` itself: never a tuple that is not ours."""
        return self.unpack(cast(Packed, part)) if isinstance(part, tuple | Ticket | Flattened) else part

    def _pack_subclass(self, t: torch.Tensor, stays: Reason | None) -> Packed:
        reason = select_subclass(t) or stays
        return self._flatten(t, stays) if reason is None else self._keep(t, reason)

    def _pack_plain(self, t: torch.Tensor, stays: Reason | None) -> Kept | Ticket:
        index = self._take_number(t)
        visit = self.visit
        if self.watch is not None:
            self.watch.saved(visit.region, index, t)
        reason = select(t, visit.scope) or stays
        if reason is None and visit.sites is not None and index not in visit.sites:
            reason = Reason.RECIPE
        if reason is None:
            packed = self._send(t, visit, index)
            if isinstance(packed, Ticket):
                return packed
            reason = packed
            self.lacks_room |= reason is not Reason.HELD
        return self._keep(t, reason)

    def _take_number(self, t: torch.Tensor) -> int:
        """The number that the save of `t` has in its visit, once what leaves before it is released."""
        visit = self.visit
        if self._was_read and graph_task_id() == -1:
            # A whole loop runs inside of one entry: after a backward, saves are counted from the start again.
            self._was_read = False
            visit = self.visit = visit.again()
        index = visit.next_index  # every save has a number, kept or not, or sites would shift when one is kept
        visit.next_index = index + 1
        if visit.points and visit.scope.serves(t.device) and visit.comes_to_point(index):
            self._release(t.device, visit)
        return index

    def _release(self, device: torch.device, visit: RegionCall) -> None:
        engine = self._engines.on(device)
        if not isinstance(engine, Reason):
            with without_dispatch():
                engine.release_down_to(visit.limits.window_bytes)

    def _send(self, t: torch.Tensor, visit: RegionCall, index: int) -> Ticket | Reason:
        engine = self._engines.on(t.device)
        if isinstance(engine, Reason):
            return engine
        if dispatch_modes():  # modes of the user need not see our copies
            with without_dispatch():
                return engine.pack(t, visit, index)
        return engine.pack(t, visit, index)

    def _keep(self, t: torch.Tensor, reason: Reason) -> Kept:
        visit = self.visit
        visit.scope.ledger.keep(reason, t.numel() * t.element_size())
        return keep(t, visit.region)

    def _flatten(self, t: Any, stays: Reason | None) -> Flattened:
        names, meta = t.__tensor_flatten__()
        # Some names are no tensors (DTensor's device mesh): they are handed through.
        inner = {name: self._pack_inner(getattr(t, name), stays) for name in names}
        return Flattened(t, inner, meta, self.visit.region)

    def _pack_inner(self, value: object, stays: Reason | None) -> object:
        return self.pack_as(value, stays) if isinstance(value, torch.Tensor) else value

    def _unflatten(self, packed: Flattened) -> torch.Tensor:
        counter = packed.counter
        if counter._version != packed.version:
            what = f"a {packed.cls.__name__} of {packed.where or '<root>'}"
            check_unmodified(counter, packed.version, what, counter.dtype, counter.device, packed.size)
        inner = {name: self.unpack_part(value) for name, value in packed.inner.items()}
        t: torch.Tensor = packed.cls.__tensor_unflatten__(inner, packed.meta, packed.size, packed.stride)
        return t


def _region_of(packed: Packed) -> str:
    if type(packed) is tuple:
        return packed[2]
    return packed.parcel.site.region if isinstance(packed, Ticket) else cast(Flattened, packed).where


def is_unmodified(part: object) -> bool:
    """Whether a packed tensor still is what it was; true for what is no packed tensor."""
    if type(part) is tuple:
        alias, version, _ = cast(Kept, part)
        return alias._version == version
    if isinstance(part, Ticket | Flattened):
        return part.counter._version == part.version
    return True
