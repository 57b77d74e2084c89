"""A store in host memory: pinned slabs of power-of-two size, taken in warm-up and kept."""

import abc

import torch

from ebbtide._errors import StoreError
from ebbtide._stores._limits import HostMemoryLimit
from ebbtide._stores._slabs import Extent, Reader, Slabs
from ebbtide._types import Block, Device, StoreStats, Stream, StreamEvent, Wait
from ebbtide._utils.sizes import GIB, MIB


class HostBlock:
    """Room for one parcel."""

    __slots__ = ("bytes", "extent", "nbytes")

    def __init__(self, extent: Extent, data: torch.Tensor, nbytes: int) -> None:
        self.extent = extent
        self.bytes = data
        self.nbytes = nbytes


class SlabStore(abc.ABC):
    """Parcels in slabs within reach of the copies of `device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._slabs = Slabs(self._grow, align_bytes=512)
        self._reads = 0
        self._last_reader: Reader | None = None
        self._reads_on: Stream = None  # the lane of the last reader
        self._awaited = 0  # order of the latest reader that `_writes_on` waits for
        self._writes_on: Stream = None
        self._is_closed = False

    def reserve(self, nbytes: int) -> HostBlock | None:
        extent = None
        try:
            extent = self._slabs.take(nbytes)
            if extent is None:
                return None
            block = extent.block
            if not isinstance(block, HostBlock) or block.nbytes != nbytes:
                view = self._memory[extent.slab][extent.start : extent.start + nbytes]
                block = extent.block = HostBlock(extent, view, nbytes)
            return block
        except BaseException:  # an interrupt
            if extent is not None:
                self._slabs.give_back(extent)
            raise

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, HostBlock)
        reader = block.extent.reader
        if reader is not None:
            if reader.order > self._awaited or stream is not self._writes_on:
                self._await_reader(reader, stream)
            block.extent.reader = None
        self._device.copy(block.bytes, src, stream)
        return self._device.record(stream)

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, HostBlock)
        if self._is_closed:
            raise StoreError("the host store was closed (release_memory) while this graph still had parcels inside")
        if stream is not self._reads_on:
            self._read_on(stream)
        self._device.copy(dst, block.bytes, stream)
        arrived = self._device.record(stream)
        self._reads += 1
        self._last_reader = block.extent.reader = Reader(self._reads, arrived)
        return arrived

    def give_back(self, block: Block) -> None:
        assert isinstance(block, HostBlock)
        self._slabs.give_back(block.extent)

    def _await_reader(self, reader: Reader, stream: Stream) -> None:
        self._device.wait(stream, reader.event, Wait.REUSE)
        self._writes_on, self._awaited = stream, reader.order

    def _read_on(self, stream: Stream) -> None:
        """Make `stream` the lane of all later readers, in one order with the earlier ones."""
        if self._last_reader is not None:
            self._device.wait(stream, self._last_reader.event, Wait.REUSE)
        self._reads_on = stream

    @abc.abstractmethod
    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        self._is_closed = True
        self._memory.clear()
        self._slabs.forget_blocks()

    @abc.abstractmethod
    def _grow(self, nbytes: int) -> int:
        """Append a slab of at least `nbytes` to `_memory`; returns the size, or 0 at the limit."""


class HostStore(SlabStore):
    """Parcels in host memory, copied by the device.

    Args:
        device: copies parcels, and makes slabs by `host_bytes`.
        limit: maximum of bytes, or a limit shared with more stores; beyond the limit `reserve` returns None.
        smallest_slab_bytes: size of the first slab, a power of two; slabs grow with the store.
    """

    def __init__(self, device: Device, limit: int | HostMemoryLimit, smallest_slab_bytes: int = 64 * MIB) -> None:
        super().__init__(device)
        self._limit = limit if isinstance(limit, HostMemoryLimit) else HostMemoryLimit(limit)
        self._smallest_slab_bytes = smallest_slab_bytes
        self._captured_bytes = 0

    def arena(self, device: Device) -> "HostArena":
        """Room for one capture of `device`, in use until the store is closed."""
        return HostArena(device, self)

    @property
    def reads(self) -> int:
        """The count of reads so far: the order of the latest reader."""
        return self._reads

    def lend(self, nbytes: int, reads: int) -> torch.Tensor | None:
        """Room for a capture that began after `reads` reads, for good; None without free room.

        A capture gets no room with a later reader (of a thread that trains meanwhile): the read may still run.
        """
        extent = self._slabs.take(nbytes, may_grow=False)
        if extent is None:
            return None
        if extent.reader is not None and extent.reader.order > reads:
            self._slabs.give_back(extent)
            return None
        self._captured_bytes += extent.nbytes
        return self._memory[extent.slab][extent.start : extent.end]

    def stats(self) -> StoreStats:
        slabs = self._slabs
        limit_bytes = self._limit.limit_bytes
        return StoreStats(slabs.used_bytes, slabs.reserved_bytes, limit_bytes, slabs.growths, self._captured_bytes)

    def close(self) -> None:
        if not self._is_closed:
            self._limit.give_back(sum(map(len, self._memory)))  # also of a growth that an interrupt has ended
        super().close()

    def _grow(self, nbytes: int) -> int:
        """Take a slab. The size is a power of two, because torch's pinned allocator rounds every request up."""
        while len(self._memory) > self._slabs.growths:  # of a growth that an interrupt has ended
            self._limit.give_back(self._memory.pop().numel())
        usual = max(self._smallest_slab_bytes, min(GIB, self._slabs.reserved_bytes))
        for size in (_power_of_two(max(nbytes, usual)), _power_of_two(nbytes)):
            if self._take(size):
                return size
        return 0

    def _take(self, size: int) -> bool:
        """False beyond the limit, or if the system refuses: the default limit is an estimate."""
        if not self._limit.take(size):
            return False
        try:
            self._memory.append(self._device.host_bytes(size))
        except MemoryError:
            self._limit.refused(size)
            return False
        except BaseException:  # an interrupt: pinning takes long
            self._limit.give_back(size)
            raise
        return True


class HostArena(SlabStore):
    """Parcels of one capture: room given back is reused in the capture, and never outside."""

    def __init__(self, device: Device, host: HostStore) -> None:
        super().__init__(device)
        self._host = host
        self._reads_before = host.reads

    def stats(self) -> StoreStats:
        slabs = self._slabs
        return StoreStats(slabs.used_bytes, slabs.reserved_bytes, None, slabs.growths, slabs.reserved_bytes)

    def _grow(self, nbytes: int) -> int:
        room = self._host.lend(nbytes, self._reads_before)
        if room is None:
            return 0
        self._memory.append(room)
        return room.numel()


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
