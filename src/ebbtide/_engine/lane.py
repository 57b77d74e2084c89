"""The only file that copies, waits and releases.

Note [Compute owns device memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The caching allocator reuses a freed block in the order of the stream it was allocated on, and knows no other stream.
1. Owner stream: every parcel remembers the stream compute ran on when it was saved. Its device memory, before and
   after the journey, is allocated and freed in that stream's order and no other.
2. Release: home waits for `landed`, then our reference is dropped. Whatever reuses the memory runs after the copy.
   With more than one compute stream in use, all of them wait: a tensor saved on one may have been allocated on another.
3. Fetch: the block is allocated on home, and inbound waits for the point home had reached. Whatever used the memory
   before is done when the copy writes.
4. Arrival: the stream that reads waits for `arrived`. If it is not home, it gets a block of its own: memory owned
   by home could be reused while a stranger still reads.
5. A parcel that dies with a copy under way: home waits for that copy, then the reference is dropped.
No record_stream, no resize_, no host synchronisation (a disk behind an accelerator excepted: its copies are queued by
host threads, and to wait for one is to wait for its thread).

Times cost no events of their own. A lane works in order, so a copy began when the one before it had ended and what it
waits for had passed, whichever is later; and compute stalls from the point where it begins to wait until the event.
A capture (engine/captures.py) has no times: there the same waits are made, and nothing is asked or timed.
"""

import weakref
from collections import deque
from collections.abc import Container, Sequence

import torch

from ebbtide._engine.parcel import LifetimeToken, Parcel
from ebbtide._engine.stats import BYTES_A_SAMPLE
from ebbtide._errors import StoreError, StoreFullError
from ebbtide._events import EventKind
from ebbtide._utils.storage import as_bytes
from ebbtide.types import Block, Device, Store, Stream, StreamEvent, Wait

_SPARE_ENTRIES = 64


class Outbound:
    """Device to store, oldest first.

    `resident_bytes` counts what waits here with its memory still on the device: sent but not released, or not even
    sent because backward is known to need it at once.
    """

    def __init__(self, device: Device, store: Store) -> None:
        self._device = device
        self._store = store
        self._stream = device.new_stream("outbound")
        self._queue: deque[weakref.ref[LifetimeToken]] = deque()
        self._resident = 0
        # Every stream that was a parcel's home. torch hands out streams from a small pool, so this stays short.
        self._homes: list[Stream] = []
        self._last: StreamEvent = None  # `landed` of the latest copy
        self._compute_point: StreamEvent = None  # where compute is, if the save at hand had it recorded
        self.resident_bytes = 0

    def join(self, parcel: Parcel) -> None:
        """Queue a parcel that is on the device, to be released in turn."""
        assert parcel.ref is not None
        while self._queue and not _is_waiting(self._queue[0]()):
            self._queue.popleft()
        if len(self._queue) > 2 * self._resident + _SPARE_ENTRIES:  # one that waits long hides the dead behind it
            self._queue = deque(ref for ref in self._queue if _is_waiting(ref()))
        self._queue.append(parcel.ref)
        self._resident += 1
        if parcel.home not in self._homes:
            self._homes.append(parcel.home)
        parcel.is_resident = True
        self.resident_bytes += parcel.nbytes

    def leave(self, parcel: Parcel) -> None:
        """A queued parcel goes, or was needed: its memory is no longer ours to release."""
        if parcel.is_resident:
            parcel.is_resident = False
            self._resident -= 1
            self.resident_bytes -= parcel.nbytes

    def died(self, resident_bytes: int) -> None:
        """A queued parcel has ended."""
        self._resident -= 1
        self.resident_bytes -= resident_bytes

    def send(self, parcel: Parcel) -> bool:
        """Start the copy out; False when the store has no room and the parcel stays. Raises StoreError."""
        assert parcel.source is not None and parcel.landed is None
        parcel.block = self._reserve(parcel.nbytes)
        if parcel.block is None:
            return False
        device = self._device
        ready = self._compute_point = device.record(parcel.home)
        device.wait(self._stream, ready, Wait.READY)
        landed = self._store.write(parcel.block, as_bytes(parcel.source, parcel.start, parcel.nbytes), self._stream)
        ledger = parcel.ledger
        ledger.stats.out.add(parcel.nbytes)
        if device.supports_timing:
            ledger.untimed_bytes += parcel.nbytes
            if ledger.untimed_bytes >= BYTES_A_SAMPLE:
                ledger.time_copy(device, ready, self._last, landed, parcel.nbytes, is_out=True)
        parcel.landed = self._last = landed
        if ledger.listeners.all:
            ledger.listeners.tell(EventKind.SENT, parcel.site, parcel.nbytes)
        return True

    def was_read(self, home: Stream) -> None:
        """Its owner has gathered or packed a save, which nobody holds from now on: other compute streams wait for that.

        Autograd would have held it until backward; now its memory may be freed at once, in the order of any of them.
        """
        point: StreamEvent = None
        for other in self._homes:
            if other != home:
                point = self._device.record(home) if point is None else point
                self._device.wait(other, point, Wait.LANDED)

    def make_room(self, window_bytes: int, spared: int) -> list[Parcel]:
        """Release the oldest until `window_bytes` hold the rest; the `spared` newest stay in any case.

        Returns the parcels that could not leave and now stay on the device.
        """
        stuck: list[Parcel] = []
        released: Parcel | None = None
        point = self._compute_point
        last: StreamEvent = None
        supports_timing, is_late = self._device.supports_timing, False
        while self.resident_bytes > window_bytes and len(self._queue) > spared:
            claim = self._queue.popleft()()
            if claim is None or not claim.parcel.is_resident:
                continue
            parcel = claim.parcel
            point = self._device.record(parcel.home) if point is None else point
            self.leave(parcel)
            if supports_timing:
                is_late = is_late or parcel.landed is None or not self._device.is_done(parcel.landed)
            if self._release(parcel):
                released, last = parcel, parcel.landed
            else:
                stuck.append(parcel)
        self._compute_point = None  # compute goes on from here, also past what a release had to send first
        if released is not None and is_late:
            released.ledger.time_stall(self._device, point, last, is_forward=True)
        return stuck

    def _release(self, parcel: Parcel) -> bool:
        """Compute waits for `landed`, then our reference goes; False if the copy never lands and the source stays."""
        try:
            if parcel.landed is None and not self.send(parcel):
                return False
            for home in self._homes:
                self._device.wait(home, parcel.landed, Wait.LANDED)
        except StoreError as error:
            self.take_back(parcel)
            parcel.ledger.warn_store_failed(error)
            return False
        parcel.source = None
        if parcel.ledger.listeners.all:
            parcel.ledger.listeners.tell(EventKind.RELEASED, parcel.site, parcel.nbytes)
        return True

    def take_back(self, parcel: Parcel) -> None:
        """The copy failed and the source is untouched: forget the copy."""
        if parcel.block is not None:
            self._store.give_back(parcel.block)
        parcel.block = None
        parcel.landed = None

    def _reserve(self, nbytes: int) -> Block | None:
        try:
            return self._store.reserve(nbytes)
        except StoreFullError:
            return None

    def abandon(self, parcel: Parcel) -> None:
        """The parcel died before its release. Any thread, takes no lock."""
        if parcel.source is not None and parcel.landed is not None:
            for home in self._homes:
                self._device.free_after(parcel.source, parcel.landed, home)

    def waiting_bytes(self, but: str, staying: Container[torch.UntypedStorage]) -> int:
        """What waits with its memory still on the device, without what was saved in the region `but`, and without what
        is of a storage that stays."""
        claims = (ref() for ref in self._queue)
        waiting = (claim.parcel for claim in claims if claim is not None and claim.parcel.is_resident)
        leaving = (parcel for parcel in waiting if parcel.site.region != but)
        return sum(parcel.nbytes for parcel in leaving if parcel.source is not None and parcel.source not in staying)

    def await_all(self, stream: Stream) -> None:
        """`stream` waits for every copy so far."""
        if self._last is not None:
            self._device.wait(stream, self._last, Wait.JOINED)


def _is_waiting(claim: LifetimeToken | None) -> bool:
    return claim is not None and claim.parcel.is_resident


class Inbound:
    """Store to device, in the order in which backward is expected to ask."""

    def __init__(self, device: Device, store: Store) -> None:
        self._device = device
        self._store = store
        self._stream = device.new_stream("inbound")
        self._last: StreamEvent = None  # `arrived` of the latest copy

    def fetch(self, parcels: Sequence[Parcel]) -> StreamEvent:
        """Start the copies in of parcels with one home. Returns the point home had reached."""
        device = self._device
        home = parcels[0].home
        blocks = [device.allocate(parcel.nbytes, home) for parcel in parcels]
        room = device.record(home)
        device.wait(self._stream, room, Wait.ROOM)
        for parcel, block in zip(parcels, blocks, strict=True):
            parcel.arrived = self._read(parcel, block, room)
            parcel.arrival = block.untyped_storage()  # not before: if the store raises, nothing is on its way
            parcel.is_awaited = False
        return room

    def fetch_for(self, parcel: Parcel, reader: Stream) -> torch.UntypedStorage:
        """A copy of its own for a stream that is not the parcel's home; nobody else may have it."""
        device = self._device
        own = device.allocate(parcel.nbytes, reader)
        room = device.record(reader)
        device.wait(self._stream, room, Wait.ROOM)
        # What home waited for at the release, a stranger did not.
        device.wait(self._stream, parcel.landed, Wait.WRITTEN)
        device.wait(reader, self._read(parcel, own, room), Wait.ARRIVED)
        return own.untyped_storage()

    def arrive(self, parcel: Parcel, point: StreamEvent | None) -> None:
        """Compute waits until the parcel is back. Raises StoreError if it could not be read.

        `point`: an event just recorded on home, if there is one; from there on compute stalls.
        """
        if parcel.is_awaited:
            return
        device = self._device
        is_late = device.supports_timing and not device.is_done(parcel.arrived)
        if is_late and point is None:
            point = device.record(parcel.home)
        device.wait(parcel.home, parcel.arrived, Wait.ARRIVED)
        if is_late:
            parcel.ledger.time_stall(device, point, parcel.arrived, is_forward=False)
        parcel.is_awaited = True

    def abandon(self, parcel: Parcel) -> None:
        """The parcel died with its copy in under way. Any thread, takes no lock."""
        if parcel.arrival is not None and not parcel.is_awaited:
            self._device.free_after(parcel.arrival, parcel.arrived, parcel.home)

    def await_all(self, stream: Stream) -> None:
        """`stream` waits for every copy so far."""
        if self._last is not None:
            self._device.wait(stream, self._last, Wait.JOINED)

    def _read(self, parcel: Parcel, into: torch.Tensor, room: StreamEvent) -> StreamEvent:
        assert parcel.block is not None
        arrived = self._store.read(parcel.block, into, self._stream)
        ledger = parcel.ledger
        ledger.stats.inbound.add(parcel.nbytes)
        if self._device.supports_timing:
            ledger.untimed_bytes += parcel.nbytes
            if ledger.untimed_bytes >= BYTES_A_SAMPLE:
                ledger.time_copy(self._device, room, self._last, arrived, parcel.nbytes, is_out=False)
        self._last = arrived
        return arrived
