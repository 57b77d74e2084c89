"""Room in a few large slabs: exact in use, handed out best fit first, joined when given back.

Note [Blocks are reused behind their last reader]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A block comes back at the death of its parcel, in host order, while the copy out of the block may still be queued.
2. So free room carries the event of the last reader. The next user of the room waits for the event on a stream, never
   on the host. The place of a parcel depends on the order of calls alone and not on the speed of the link, so equal
   steps find equal room (no new pinned memory in steady state).
3. Room of exactly the requested size is handed out as it came back, unjoined: a step asks for the sizes of the step
   before. Joining happens when no room of the size is left.
4. All readers of a store run on one lane in order, so the later of two events stands for both in joined room, and a
   writer behind the later event need not wait for the earlier one. (A reader on another lane, like a probe's, waits
   for the last reader of the previous lane.)
5. Room of a captured graph (HostStore.lend) never comes back, because replays read and write the room unseen. Inside
   the capture the rules hold among the events of the capture.
6. An exception (an interrupt) may leave a change in the middle. The blocks handed out then say what room is free.
"""

import bisect
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ebbtide._types import StreamEvent


class Reader(NamedTuple):
    """The event after which a block is no longer read; `order` grows along the lane of all readers."""

    order: int
    event: StreamEvent


class Extent:
    """A part of a slab, in bytes."""

    __slots__ = ("block", "nbytes", "reader", "slab", "start")

    def __init__(self, slab: int, start: int, nbytes: int, reader: Reader | None) -> None:
        self.block: object = None
        """The store's object for the room, kept for the next user of the same room."""
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
        grow: takes a slab of at least the given bytes; returns the size of the slab, or 0 at the limit.
        align_bytes: starts and sizes of blocks are multiples of it.
    """

    def __init__(self, grow: Callable[[int], int], align_bytes: int) -> None:
        self._grow = grow
        self._align_bytes = align_bytes
        self._sizes: list[int] = []  # of the slabs
        self._by_size: list[tuple[int, int, int]] = []  # (nbytes, slab, start), sorted
        self._by_start: dict[tuple[int, int], Extent] = {}
        self._by_end: dict[tuple[int, int], Extent] = {}
        self._unjoined: dict[int, list[Extent]] = {}
        # Filled by finalisers of any thread, emptied under the engine's lock: append and popleft are atomic.
        self._returned: deque[Extent] = deque()
        self._out: set[Extent] = set()
        self._last_reader: Reader | None = None  # of all blocks that came back
        self._is_torn = False
        self.reserved_bytes = 0
        self.free_bytes = 0

    @property
    def growths(self) -> int:
        """The count of slabs."""
        return len(self._sizes)

    @property
    def used_bytes(self) -> int:
        self._take_back()
        return self.reserved_bytes - self.free_bytes

    def take(self, nbytes: int, may_grow: bool = True) -> Extent | None:
        """A block of at least `nbytes`, or None at the limit. A write must wait for the `reader` of the block."""
        extent = None
        try:
            self._take_back()
            extent = self._take(-(-nbytes // self._align_bytes) * self._align_bytes, may_grow)
            if extent is not None:
                self._out.add(extent)
            return extent
        except BaseException:
            self._is_torn = True
            if extent is not None:
                self._out.discard(extent)
            raise

    def give_back(self, extent: Extent) -> None:
        """Queue `extent` for reuse. Any thread, also from finalisers."""
        self._returned.append(extent)

    def forget_blocks(self) -> None:
        """Drop the objects kept with free room: the store has dropped the memory."""
        for extents in self._unjoined.values():
            for extent in extents:
                extent.block = None

    def _take(self, wanted: int, may_grow: bool) -> Extent | None:
        exact = self._unjoined.get(wanted)
        if exact:
            self.free_bytes -= wanted
            return exact.pop()
        found = self._joined_fit(wanted) or (self._grown(wanted) if may_grow else None)
        return None if found is None else self._cut(found, wanted)

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
        slab = Extent(len(self._sizes), 0, taken, None)
        self._sizes.append(taken)
        self.reserved_bytes += taken
        self._add(slab)
        return slab

    def _take_back(self) -> None:
        if self._is_torn:
            self._mend()
        while self._returned:
            extent = self._returned[0]
            if extent in self._out:
                self._last_reader = _later(self._last_reader, extent.reader)
                self._out.remove(extent)
                self.free_bytes += extent.nbytes
                self._unjoined.setdefault(extent.nbytes, []).append(extent)
            self._returned.popleft()

    def _mend(self) -> None:
        """All room that is not handed out is free, behind the last reader of all."""
        self.reserved_bytes = sum(self._sizes)
        self.free_bytes = 0
        for entries in (self._by_size, self._by_start, self._by_end, self._unjoined):
            entries.clear()
        out = sorted(self._out, key=lambda extent: (extent.slab, extent.start))
        for slab, nbytes in enumerate(self._sizes):
            start = 0
            for extent in [*(extent for extent in out if extent.slab == slab), Extent(slab, nbytes, 0, None)]:
                if extent.start > start:
                    self._add(Extent(slab, start, extent.start - start, self._last_reader))
                start = extent.end
        self._is_torn = False

    def _join(self, extent: Extent) -> None:
        before = self._by_end.get((extent.slab, extent.start))
        if before is not None:
            self._forget(before)
            extent = Extent(
                extent.slab, before.start, before.nbytes + extent.nbytes, _later(before.reader, extent.reader)
            )
        after = self._by_start.get((extent.slab, extent.end))
        if after is not None:
            self._forget(after)
            extent = Extent(
                extent.slab, extent.start, extent.nbytes + after.nbytes, _later(extent.reader, after.reader)
            )
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


def _later(one: Reader | None, other: Reader | None) -> Reader | None:
    if one is None or other is None:
        return one or other
    return one if one.order > other.order else other
