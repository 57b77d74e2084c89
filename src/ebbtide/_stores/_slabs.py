"""Room in a few large slabs: exact in use, handed out best fit first, joined again when given back.

Note [Blocks are reused behind their last reader]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A block goes back as soon as its parcel dies, in host order, while the copy that reads it may still be queued.
2. So free room carries the event of its last reader. Whoever takes the room waits for that event on its own stream,
   never on the host: what is placed where depends on the order of calls alone, not on how fast the link was, and
   the same step finds the same room again (no new pinned memory in steady state).
3. Room of the very size that is asked for is handed out as it came back, unjoined: a step asks for the sizes of the
   step before. Joining happens when no room of that size is left.
4. All readers of a store run on one lane in order, so of two events the later one stands for both when room is joined,
   and a writer that waits for the later one need not wait for the other. (A reader on another lane, as a probe's are,
   waits for the last one of the lane before.)
5. What a captured graph takes (HostStore.lend) never comes back: its replays read and write there unseen. Inside, the
   same rules hold among the capture's own events.
"""

import bisect
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ebbtide.types import StreamEvent


class Reader(NamedTuple):
    """The event after which a block is no longer read; `order` grows along the lane of all readers."""

    order: int
    event: StreamEvent


class Extent:
    """A part of a slab, in bytes."""

    __slots__ = ("block", "nbytes", "reader", "slab", "start")

    def __init__(self, slab: int, start: int, nbytes: int, reader: Reader | None) -> None:
        self.block: object = None
        """What the store made of this room the last time: kept with it, for whoever gets it next."""
        self.slab = slab
        self.start = start
        self.nbytes = nbytes
        self.reader = reader

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Slabs:
    """Best-fit room with joining.

    Args:
        grow: asked for a slab of at least so many bytes; returns the size it took, or 0 when at its limit.
        align_bytes: starts and sizes of blocks are multiples of it.
    """

    def __init__(self, grow: Callable[[int], int], align_bytes: int) -> None:
        self._grow = grow
        self._align_bytes = align_bytes
        self._count = 0
        self._by_size: list[tuple[int, int, int]] = []  # (nbytes, slab, start), sorted
        self._by_start: dict[tuple[int, int], Extent] = {}
        self._by_end: dict[tuple[int, int], Extent] = {}
        self._unjoined: dict[int, list[Extent]] = {}
        # Filled by finalisers of any thread, emptied under the engine's lock: append and popleft are atomic.
        self._returned: deque[Extent] = deque()
        self.reserved_bytes = 0
        self.free_bytes = 0
        self.growths = 0

    @property
    def used_bytes(self) -> int:
        self._take_back()
        return self.reserved_bytes - self.free_bytes

    def take(self, nbytes: int, may_grow: bool = True) -> Extent | None:
        """A block of at least `nbytes`, or None at the limit. Its `reader` has to be waited for before a write."""
        self._take_back()
        wanted = -(-nbytes // self._align_bytes) * self._align_bytes
        same = self._unjoined.get(wanted)
        if same:
            self.free_bytes -= wanted
            return same.pop()
        found = self._joined_fit(wanted) or (self._grown(wanted) if may_grow else None)
        return None if found is None else self._cut(found, wanted)

    def give_back(self, extent: Extent) -> None:
        """Any thread, also from finalisers: only queued here."""
        self._returned.append(extent)

    def forget_blocks(self) -> None:
        """The store has dropped its memory: nor may free room hold on to views of it."""
        for extents in self._unjoined.values():
            for extent in extents:
                extent.block = None

    def _cut(self, room: Extent, nbytes: int) -> Extent:
        self._forget(room)
        if room.nbytes > nbytes:
            self._add(Extent(room.slab, room.start + nbytes, room.nbytes - nbytes, room.reader))
        return Extent(room.slab, room.start, nbytes, room.reader)

    def _joined_fit(self, nbytes: int) -> Extent | None:
        found = self._best_fit(nbytes)
        if found is None and self._unjoined:
            for extents in self._unjoined.values():
                for extent in extents:
                    self.free_bytes -= extent.nbytes
                    self._join(extent)
            self._unjoined.clear()
            found = self._best_fit(nbytes)
        return found

    def _best_fit(self, nbytes: int) -> Extent | None:
        at = bisect.bisect_left(self._by_size, (nbytes, -1, -1))
        if at == len(self._by_size):
            return None
        _, slab, start = self._by_size[at]
        return self._by_start[slab, start]

    def _grown(self, nbytes: int) -> Extent | None:
        taken = self._grow(nbytes)
        if taken == 0:
            return None
        slab = Extent(self._count, 0, taken, None)
        self._count += 1
        self.growths += 1
        self.reserved_bytes += taken
        self._add(slab)
        return slab

    def _take_back(self) -> None:
        while self._returned:
            extent = self._returned.popleft()
            self.free_bytes += extent.nbytes
            self._unjoined.setdefault(extent.nbytes, []).append(extent)

    def _join(self, extent: Extent) -> None:
        before = self._by_end.get((extent.slab, extent.start))
        if before is not None:
            self._forget(before)
            extent = Extent(extent.slab, before.start, before.nbytes + extent.nbytes, _later(before, extent))
        after = self._by_start.get((extent.slab, extent.end))
        if after is not None:
            self._forget(after)
            extent = Extent(extent.slab, extent.start, extent.nbytes + after.nbytes, _later(extent, after))
        self._add(extent)

    def _add(self, extent: Extent) -> None:
        bisect.insort(self._by_size, (extent.nbytes, extent.slab, extent.start))
        self._by_start[extent.slab, extent.start] = extent
        self._by_end[extent.slab, extent.end] = extent
        self.free_bytes += extent.nbytes

    def _forget(self, extent: Extent) -> None:
        at = bisect.bisect_left(self._by_size, (extent.nbytes, extent.slab, extent.start))
        del self._by_size[at]
        del self._by_start[extent.slab, extent.start]
        del self._by_end[extent.slab, extent.end]
        self.free_bytes -= extent.nbytes


def _later(one: Extent, other: Extent) -> Reader | None:
    if one.reader is None or other.reader is None:
        return one.reader or other.reader
    return max(one.reader, other.reader, key=lambda reader: reader.order)
