"""The lanes: queue copies, make streams wait, release device memory.

Note [Compute owns device memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The caching allocator reuses a freed block in the order of the stream that allocated the block, and behind the work of
streams that the block was marked for. It knows no other stream.
1. Owner stream: a parcel remembers the compute stream of the save. Device memory of the parcel, before and after the
   journey, is allocated and freed in the order of the owner stream.
2. Release: the owner stream waits for `landed`, and so does the stream that needs the room; ebbtide's reference is
   dropped. Reuse of the memory runs after the copy. Another stream may have allocated the memory, and knows nothing of
   the copy or of the operator that has saved the memory: hence each saving stream is marked as a user (`record_stream`;
   only by torch's native allocator). Autograd alone would hold the memory until backward. The mark has no effect on
   memory that the saving stream has allocated; in a capture, other memory is not reused before the capture ends.
3. Fetch: the block is allocated on the owner stream, and inbound waits for the owner stream's present point. Earlier
   work on the memory is done when the copy writes.
4. Arrival: the reading stream waits for `arrived`. A reader other than the owner gets a private block: the owner could
   reuse memory during the read.
5. A parcel dies during a copy: the owner stream waits for the copy, and the reference is dropped.
No resize_, no host synchronisation (except a disk behind an accelerator: host threads queue the copies, and waiting for
a copy means waiting for the thread).

Times need no further events. A lane works in order: a copy begins after the end of the copy before and the lane's own
wait; and compute stalls from the point of the wait until the event.
Captures (captures.py) have no times: all waits are made, and no event is queried.
"""

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from ebbtide._engine.context import Forward
from ebbtide._engine.parcel import LifetimeToken, Location, Parcel
from ebbtide._errors import StoreError, StoreFullError
from ebbtide._types import Block, Device, Store, Stream, StreamEvent, Wait
from ebbtide._utils.storage import as_bytes
from ebbtide._utils.tracing import profiler, span


class _Lane:
    def __init__(self, device: Device, store: Store, name: str) -> None:
        self._device = device
        self._store = store
        self._stream = device.new_stream(name)
        self._last: StreamEvent = None  # of the latest copy: `landed` or `arrived`

    def await_all(self, stream: Stream) -> None:
        """`stream` waits for all queued copies."""
        if self._last is not None:
            self._device.wait(stream, self._last, Wait.JOINED)

    def _await_interrupted(self, stream: Stream) -> None:
        """`stream` waits for all queued copies: an exception frees memory that a copy, queued just now, may use."""
        self._device.wait(stream, self._device.record(self._stream), Wait.ABANDONED)


class Outbound(_Lane):
    """Device to store, oldest first.

    `resident_bytes` counts queued parcels, with memory still on the device: parcels sent but not released, and parcels
    not even sent because backward is known to need the source.
    """

    def __init__(self, device: Device, store: Store) -> None:
        super().__init__(device, store, "outbound")
        self._queue: deque[weakref.ref[LifetimeToken]] = deque()
        self._resident = 0
        self._compute_point: StreamEvent = None  # compute's present point, if recorded for the latest saved tensor
        self.resident_bytes = 0
        self._resident_of: dict[int, int] = {}  # the same by the number of the forward

    def resident_bytes_of(self, forward: Forward | None) -> int:
        """The part of `resident_bytes` that a forward has saved."""
        return 0 if forward is None else self._resident_of.get(forward.number, 0)

    def join(self, parcel: Parcel) -> None:
        """Queue a parcel on the device, for release in turn."""
        assert parcel.ref is not None
        while self._queue and not _is_waiting(self._queue[0]()):
            self._queue.popleft()
        if len(self._queue) > 2 * self._resident + 64:  # dead entries collect behind a parcel with a long wait
            self._queue = deque(ref for ref in self._queue if _is_waiting(ref()))
        self._queue.append(parcel.ref)
        self._resident += 1
        parcel.queue()
        self.resident_bytes += parcel.nbytes
        forward = parcel.region_call.forward.number
        self._resident_of[forward] = self._resident_of.get(forward, 0) + parcel.nbytes

    def leave(self, parcel: Parcel) -> None:
        """Remove a released or needed parcel from the queue."""
        if parcel.location is Location.LEAVING:
            parcel.unqueue()
            self.died(parcel.nbytes, parcel.region_call.forward.number)

    def died(self, resident_bytes: int, forward: int) -> None:
        """A queued parcel of the forward with the number `forward` has ended."""
        self._resident -= 1
        self.resident_bytes -= resident_bytes
        left = self._resident_of.pop(forward, 0) - resident_bytes
        if left > 0:
            self._resident_of[forward] = left

    def close_books(self) -> None:
        """No parcel lives."""
        self._queue.clear()
        self._resident = self.resident_bytes = 0
        self._resident_of.clear()

    def send(self, parcel: Parcel) -> bool:
        """Start the copy out; False when the store has no room and the parcel stays. Raises StoreError."""
        if profiler._is_profiler_enabled:
            with span("ebbtide::send", parcel.site.region):
                return self._send(parcel)
        return self._send(parcel)

    def _send(self, parcel: Parcel) -> bool:
        assert parcel.source is not None and parcel.landed is None
        parcel.block = self._reserve(parcel.nbytes)
        if parcel.block is None:
            return False
        device = self._device
        ready = self._compute_point = device.record(parcel.owner_stream)
        device.wait(self._stream, ready, Wait.READY)
        try:
            landed = self._store.write(parcel.block, as_bytes(parcel.source, parcel.start, parcel.nbytes), self._stream)
            parcel.recorder.add_copy(device, ready, self._last, landed, parcel.nbytes, parcel.site.region, is_out=True)
            self._last = landed
            parcel.send(landed)
        except BaseException:
            self._await_interrupted(parcel.owner_stream)
            raise
        return True

    def make_room(self, window_bytes: int, spared: int) -> list[Parcel]:
        """Release the oldest until `window_bytes` hold the rest; the `spared` newest stay in any case.

        Returns the parcels that could not leave and stay on the device.
        """
        not_movable: list[Parcel] = []
        released: Parcel | None = None
        point = self._compute_point
        last: StreamEvent = None
        supports_timing, is_late = self._device.supports_timing, False
        while self.resident_bytes > window_bytes and len(self._queue) > spared:
            token = self._queue.popleft()()
            if token is None or token.parcel.location is not Location.LEAVING:
                continue
            parcel = token.parcel
            point = self._device.record(self._device.current_stream()) if point is None else point
            self.leave(parcel)
            if supports_timing:
                is_late = is_late or parcel.landed is None or not self._device.is_done(parcel.landed)
            if self._release(parcel):
                released, last = parcel, parcel.landed
            else:
                not_movable.append(parcel)
        self._compute_point = None  # compute continues, also past a release that had to send
        if released is not None and is_late:
            released.recorder.time_stall(self._device, point, last, released.site.region, is_forward=True)
        return not_movable

    def _release(self, parcel: Parcel) -> bool:
        """Compute waits for `landed`, and the source is dropped. False if the copy failed and the source stays."""
        if profiler._is_profiler_enabled:
            with span("ebbtide::release", parcel.site.region):
                return self._wait_and_drop(parcel)
        return self._wait_and_drop(parcel)

    def _wait_and_drop(self, parcel: Parcel) -> bool:
        try:
            if parcel.landed is None and not self.send(parcel):
                return False
            for stream in self._streams_of(parcel):
                self._device.wait(stream, parcel.landed, Wait.LANDED)
        except StoreError as error:
            self.take_back(parcel)
            parcel.recorder.warn_store_failed(error)
            return False
        parcel.release()
        return True

    def _streams_of(self, parcel: Parcel) -> tuple[Stream, ...]:
        """The owner stream, and the current stream, which may not run ahead of the window and may end a capture."""
        current = self._device.current_stream()
        return (current,) if current == parcel.owner_stream else (parcel.owner_stream, current)

    def take_back(self, parcel: Parcel) -> None:
        """Forget a failed copy. The source is untouched."""
        if parcel.block is not None:
            self._store.give_back(parcel.block)
        parcel.forget_copy()

    def _reserve(self, nbytes: int) -> Block | None:
        try:
            return self._store.reserve(nbytes)
        except StoreFullError:
            return None

    def abandon(self, parcel: Parcel) -> None:
        """The parcel died before its release. Any thread, takes no lock."""
        if parcel.source is not None and parcel.landed is not None:
            for stream in self._streams_of(parcel):
                self._device.free_after(parcel.source, parcel.landed, stream)

    def waiting(self) -> list[Parcel]:
        """The queued parcels, oldest first."""
        tokens = (ref() for ref in self._queue)
        return [token.parcel for token in tokens if token is not None and token.parcel.location is Location.LEAVING]


def _is_waiting(token: LifetimeToken | None) -> bool:
    return token is not None and token.parcel.location is Location.LEAVING


class Inbound(_Lane):
    """Store to device, in the expected order of needs."""

    def __init__(self, device: Device, store: Store) -> None:
        super().__init__(device, store, "inbound")

    def fetch(self, parcels: Sequence[Parcel]) -> StreamEvent:
        """Start the copies in of parcels with equal owner streams. Returns the present point of the owner stream."""
        device = self._device
        owner_stream = parcels[0].owner_stream
        blocks = [device.allocate(parcel.nbytes, owner_stream) for parcel in parcels]
        room = device.record(owner_stream)
        device.wait(self._stream, room, Wait.ROOM)
        try:
            for parcel, block in zip(parcels, blocks, strict=True):
                arrived = self._read(parcel, block, room)
                parcel.fetch(block.untyped_storage(), arrived)  # last: if the store raises, no copy is under way
        except BaseException:
            self._await_interrupted(owner_stream)
            raise
        return room

    def fetch_for(self, parcel: Parcel, reader: Stream) -> torch.UntypedStorage:
        """A private copy for a stream other than the owner stream."""
        device = self._device
        own = device.allocate(parcel.nbytes, reader)
        room = device.record(reader)
        device.wait(self._stream, room, Wait.ROOM)
        # The reader may not have waited for the copy out, only the owner stream and the stream that needed the room.
        device.wait(self._stream, parcel.landed, Wait.WRITTEN)
        try:
            device.wait(reader, self._read(parcel, own, room), Wait.ARRIVED)
        except BaseException:
            self._await_interrupted(reader)
            raise
        return own.untyped_storage()

    def arrive(self, parcel: Parcel, point: StreamEvent | None) -> None:
        """The owner stream waits until the parcel is back. Raises StoreError if the store could not be read.

        `point`: an event just recorded on the owner stream, or None; the start of the stall.
        """
        if parcel.location is Location.BACK:
            return
        device = self._device
        is_late = device.supports_timing and not device.is_done(parcel.arrived)
        if is_late and point is None:
            point = device.record(parcel.owner_stream)
        device.wait(parcel.owner_stream, parcel.arrived, Wait.ARRIVED)
        if is_late:
            parcel.recorder.time_stall(device, point, parcel.arrived, parcel.site.region, is_forward=False)
        parcel.arrive()

    def abandon(self, parcel: Parcel) -> None:
        """The parcel died with its copy in under way. Any thread, takes no lock."""
        if parcel.location is Location.FETCHING:
            assert parcel.arrival is not None
            self._device.free_after(parcel.arrival, parcel.arrived, parcel.owner_stream)

    def _read(self, parcel: Parcel, into: torch.Tensor, room: StreamEvent) -> StreamEvent:
        assert parcel.block is not None
        if profiler._is_profiler_enabled:
            with span("ebbtide::fetch", parcel.site.region):
                arrived = self._store.read(parcel.block, into, self._stream)
        else:
            arrived = self._store.read(parcel.block, into, self._stream)
        parcel.recorder.add_copy(
            self._device, room, self._last, arrived, parcel.nbytes, parcel.site.region, is_out=False
        )
        self._last = arrived
        return arrived
