"""Parcel and ticket: state and lifetime. Lanes copy and wait (lane.py).

Note [The graph owns]
~~~~~~~~~~~~~~~~~~~~~
1. The pack hook returns a ticket, held by the autograd graph alone. No table of live tensors exists.
2. All tickets of a parcel hold a common lifetime token. The parcel holds a block of the store, and device memory.
3. The end of the last ticket ends the parcel: the node ran, the graph was dropped, an exception unwound. A single path
   cleans up: the callback of the token's weak reference. (Not `__del__`: weak references still answer during
   `__del__`, and another thread could revive the dying parcel.)
4. All references from ebbtide's side (queue of a lane, index by storage, site) are weak. Hold the token while using a
   parcel found through a weak reference.

Note [Version alias]
~~~~~~~~~~~~~~~~~~~~
Stock autograd raises if a saved tensor's version has changed since the save. Under saved-tensor hooks autograd does
not compare, and ebbtide has to. A version alias is a tensor with the version counter of a saved tensor and without
memory: a detached alias, its data replaced by an empty tensor. The alias sees every in-place change as long as the
ticket lives, also after the device memory is gone: the error does not depend on how far a copy had come.
"""

import enum
import weakref
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch.nn import Parameter

from ebbtide._engine.context import Limits, RegionCall
from ebbtide._engine.geometry import Geometry, Span
from ebbtide._engine.stats import StatsRecorder
from ebbtide._engine.timetable import Site
from ebbtide._errors import ModifiedError
from ebbtide._events import EventKind
from ebbtide._types import Block, Device, Stream, StreamEvent
from ebbtide._utils.torch_private import reads_random_slopes, sizes_of

_NOTHING = torch.empty(0)


class ParcelEngine(Protocol):
    """The engine, as parcels know engines."""

    device: Device

    def unpack(self, ticket: "Ticket") -> torch.Tensor: ...

    def free(self, parcel: "Parcel") -> None:
        """Free the contents of a dead parcel. Any thread, takes no lock."""


def version_alias(t: torch.Tensor) -> torch.Tensor:
    """A tensor with the version counter of `t` and without memory."""
    alias = t.detach()
    alias.data = _NOTHING
    return alias


def modified_message(
    dtype: torch.dtype, device: torch.device, sizes: Sequence[object], version: int, expected: int
) -> str:
    """First line of a ModifiedError: the words of stock autograd, for code and tests that match the text.

    Stock autograd also names the node that made the tensor. Tickets hold no node.
    """
    name = torch.empty(0, dtype=dtype, device=device).type()
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name} {list(sizes)}] is at version {version}; expected version {expected} instead.\n"
    )


def check_unmodified(
    counter: torch.Tensor, version: int, what: str, dtype: torch.dtype, device: torch.device, sizes: Sequence[object]
) -> None:
    """Raise ModifiedError, naming `what`, unless the version of `counter` is still `version`."""
    now = counter._version
    if now != version:
        raise ModifiedError(
            modified_message(dtype, device, sizes, now, version)
            + f"A tensor saved for backward was modified in place: {what} was saved at version {version} and is at "
            f"version {now} now. Do not change it between forward and backward, or clone it before the change"
        )


def check_written(region: str) -> None:
    """Raise ModifiedError if the running node reads memory written by the operator after autograd had saved the memory.

    The copy has the bytes from before the write, and no version counter shows the write. The only such operator of
    torch is rrelu with random slopes (see `reads_random_slopes`).
    """
    if reads_random_slopes():
        raise ModifiedError(
            f"rrelu in {region or '<root>'} writes its random slopes when autograd has saved their memory already: "
            "they cannot move or be computed again. Keep them on the device, by exclude= or the recipe 'keep', or "
            "write leaky_relu"
        )


Kept: TypeAlias = tuple[torch.Tensor, int, str]
"""A saved tensor that stays: alias, version at the save, region. A bare tuple: most saved tensors of a step are kept,
and a class would cost three times as much."""


def keep(t: torch.Tensor, region: str) -> Kept:
    # An alias, since an output itself would close a reference cycle. Leaves that collect a gradient and frozen
    # parameters are no outputs and are kept themselves: ZeRO swaps the data of a parameter until backward, and the old
    # memory has to be free meanwhile.
    return t if t.is_leaf and (t.requires_grad or isinstance(t, Parameter)) else t.detach(), t._version, region


def kept_tensor(kept: Kept) -> torch.Tensor:
    """The kept tensor. Raises ModifiedError if the tensor was modified in place."""
    alias, version, region = kept
    if alias._version != version:
        sizes = tuple(sizes_of(alias))
        what = f"{alias.dtype} {sizes} of {region or '<root>'}"
        check_unmodified(alias, version, what, alias.dtype, alias.device, sizes)
    return alias


class Ticket:
    """Result of the pack hook for a saved tensor that travels: geometry and a strong reference to the parcel.

    `limits` belong to the region of the saved tensor. The parcel may have been made by an earlier region.
    """

    __slots__ = ("__weakref__", "counter", "geometry", "limits", "parcel", "token", "version")

    def __init__(
        self, token: "LifetimeToken", geometry: Geometry, counter: torch.Tensor, version: int, limits: Limits
    ) -> None:
        self.token = token
        self.limits = limits
        self.parcel = token.parcel
        self.geometry = geometry
        self.counter = counter
        self.version = version

    def check(self) -> None:
        if self.counter._version != self.version:
            g = self.geometry
            what = f"{g.dtype} {tuple(g.size)} saved at {self.parcel.site}"
            device = self.parcel.engine.device.torch_device
            check_unmodified(self.counter, self.version, what, g.dtype, device, g.size)

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The saved tensor over the bytes of the parcel, from byte `start` of `storage` on.

        The result shares the version counter of the saved tensor: if a node modifies a saved tensor in backward, all
        further readers of the memory have to raise, as without hooks.
        """
        t = self.geometry.view(storage, start)
        if self.geometry.is_gathered or self.geometry.is_bits or t.is_inference():
            return t  # private memory, or no versions
        counted = self.counter.detach()
        counted.data = t
        return counted


class LifetimeToken:
    """Shared by the tickets of a parcel: the end of the token ends the parcel."""

    __slots__ = ("__weakref__", "parcel")

    def __init__(self, parcel: "Parcel") -> None:
        self.parcel = parcel


class TokenRef(weakref.ref[LifetimeToken]):
    """Weak reference to a lifetime token. The callback receives the reference and with it the dead parcel."""

    __slots__ = ("parcel",)
    parcel: "Parcel | None"


class Location(enum.Enum):
    """Location of the bytes of a parcel.

    | location  | device memory | copy in the store   | next                                                       |
    |-----------|---------------|---------------------|------------------------------------------------------------|
    | ON_DEVICE | `source`      | maybe, never needed | LEAVING when queued; otherwise stays to the parcel's end   |
    | LEAVING   | `source`      | queued or not yet   | AWAY; ON_DEVICE if backward is earlier or the copy failed  |
    | AWAY      | none          | valid               | FETCHING                                                   |
    | FETCHING  | `arrival`     | valid               | BACK when compute has waited for `arrived`                 |
    | BACK      | `arrival`     | valid               | AWAY if dropped from a retained graph                      |
    """

    ON_DEVICE = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    FETCHING = enum.auto()
    BACK = enum.auto()


@dataclass(eq=False, repr=False, slots=True)
class Parcel:
    """Bytes of a device storage, or of a range of the storage, that travel together.

    The lanes call the methods; the engine alone writes the flags `is_needed` and `is_ahead`.

    Attributes:
        span: represented bytes of the storage, and the form of travel.
        start, nbytes: travelling bytes, as a range of `source`.
        counter, version: version alias of the first saved tensor, and the version at the save: a later version is
            another parcel.
        owner_stream: compute stream at the save. The parcel's device memory is freed in the order of the stream.
        location: see Location.
        source: the saved device storage, or memory with the gathered or packed bytes; None after the release.
        source_ref: the saved storage. A storage still alive after the release is referenced elsewhere. Gathered or
            packed parcels hold no reference to the storage even before.
        block, landed: room in the store, and the event behind which the store has the bytes. None: not sent.
        arrival, arrived: new device memory for the bytes, and the event behind which the memory is valid.
        ref: weak reference to the lifetime token, for lanes, sites and the index by storage.
        is_needed: backward has needed the parcel, since the last fetch if there was any.
        is_ahead: chosen for a fetch before any need, and counted by the engine until the need.
        stands_by: saved by calls that stand by alone; see `RegionCall`.
        gathered: the gathered view; None if the bytes travel as stored.
        extra_version_checks: further version counters of the bytes, with the versions at the save. A later saved
            tensor shares the parcel only if no version has changed.
    """

    engine: ParcelEngine
    region_call: RegionCall
    site: Site
    storage: InitVar[torch.UntypedStorage]
    source: torch.UntypedStorage | None
    span: Span
    counter: torch.Tensor
    owner_stream: Stream
    location: Location = Location.ON_DEVICE
    block: Block | None = None
    landed: StreamEvent | None = None
    arrival: torch.UntypedStorage | None = None
    arrived: StreamEvent | None = None
    is_needed: bool = False
    is_ahead: bool = False
    ref: TokenRef | None = None
    gathered: Geometry | None = None
    extra_version_checks: tuple[tuple[torch.Tensor, int], ...] = ()
    stands_by: bool = field(init=False)
    recorder: StatsRecorder = field(init=False)
    start: int = field(init=False)
    nbytes: int = field(init=False)
    version: int = field(init=False)
    source_ref: "weakref.ref[torch.UntypedStorage]" = field(init=False)
    storage_key: int = field(init=False)

    def __post_init__(self, storage: torch.UntypedStorage) -> None:
        self.stands_by = self.region_call.stands_by
        self.recorder = self.region_call.context.recorder
        self.start = self.span.start if self.source is storage else 0
        self.nbytes = self.span.transfer_nbytes if self.span.is_bits else self.span.nbytes
        self.version = self.counter._version
        self.source_ref = weakref.ref(storage)
        self.storage_key = storage._cdata

    @property
    def may_be_fetched(self) -> bool:
        """Away, not needed yet and not chosen for fetching, and expected to be needed."""
        is_at_rest = self.location is Location.AWAY and not self.is_needed and not self.is_ahead
        return is_at_rest and not self.stands_by

    def add_version_check(self, counter: torch.Tensor, version: int) -> None:
        """Share the parcel with later saved tensors only while the version of `counter` is `version`."""
        self.extra_version_checks += ((counter, version),)

    def tell(self, kind: EventKind) -> None:
        listeners = self.recorder.listeners
        if listeners.all:
            listeners.tell(kind, self.site, self.nbytes)

    def queue(self) -> None:
        self.location = Location.LEAVING

    def unqueue(self) -> None:
        self.location = Location.ON_DEVICE

    def send(self, landed: StreamEvent) -> None:
        """The copy out has been queued."""
        self.landed = landed
        if self.recorder.listeners.all:
            self.tell(EventKind.SENT)

    def forget_copy(self) -> None:
        """The copy out failed or was never queued. `source` is untouched."""
        self.block = None
        self.landed = None

    def release(self) -> None:
        """Drop the source, behind the `landed` event."""
        self.location = Location.AWAY
        self.source = None
        if self.recorder.listeners.all:
            self.tell(EventKind.RELEASED)

    def fetch(self, arrival: torch.UntypedStorage, arrived: StreamEvent) -> None:
        """The copy in has been queued."""
        self.arrival = arrival
        self.arrived = arrived
        self.location = Location.FETCHING

    def arrive(self) -> None:
        """The owner stream has waited for `arrived`."""
        if self.location is Location.FETCHING:  # another thread may have dropped the arrival meanwhile
            self.location = Location.BACK

    def drop_arrival(self) -> None:
        """Drop the device memory, after the owner stream has waited for it. A later need fetches again."""
        self.location = Location.AWAY
        self.arrival = None
        self.arrived = None
        self.is_needed = False
