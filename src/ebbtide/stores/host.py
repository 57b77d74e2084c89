"""Host memory: pinned slabs of power-of-two size, taken while warming up and kept."""

import torch

from ebbtide._bytes import GIB, MIB
from ebbtide._errors import StoreError
from ebbtide.stores._limits import Budget
from ebbtide.stores._slabs import Extent, Reader, Slabs
from ebbtide.types import Block, Device, StoreStats, Stream, StreamEvent, Wait

_ALIGN_BYTES = 512
_LARGEST_STEP_BYTES = GIB


class HostBlock:
    """Room for one parcel, as the bytes of it."""

    __slots__ = ("bytes", "extent", "nbytes")

    def __init__(self, extent: Extent, data: torch.Tensor, nbytes: int) -> None:
        self.extent = extent
        self.bytes = data
        self.nbytes = nbytes


class HostStore:
    """Parcels in host memory, copied by the device itself.

    Args:
        device: whose copies read and write here; its `host_bytes` make the slabs.
        limit: most bytes to take, or a budget shared with other stores; beyond it `reserve` answers None.
        smallest_slab_bytes: a power of two; slabs grow from it as the store does.
    """

    def __init__(self, device: Device, limit: int | Budget, smallest_slab_bytes: int = 64 * MIB) -> None:
        self._device = device
        self._budget = limit if isinstance(limit, Budget) else Budget(limit)
        self._smallest_slab_bytes = smallest_slab_bytes
        self._memory: list[torch.Tensor] = []
        self._slabs = Slabs(self._grow, _ALIGN_BYTES)
        self._reads = 0
        self._is_closed = False

    def reserve(self, nbytes: int) -> HostBlock | None:
        extent = self._slabs.take(nbytes)
        if extent is None:
            return None
        block = extent.block
        if not isinstance(block, HostBlock) or block.nbytes != nbytes:
            view = self._memory[extent.slab][extent.start : extent.start + nbytes]
            block = extent.block = HostBlock(extent, view, nbytes)
        return block

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, HostBlock)
        if block.extent.reader is not None:
            self._device.wait(stream, block.extent.reader.event, Wait.REUSE)
            block.extent.reader = None
        self._device.copy(block.bytes, src, stream)
        return self._device.record(stream)

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, HostBlock)
        if self._is_closed:
            raise StoreError("the host store was closed (release_memory) while this graph still had parcels in it")
        self._device.copy(dst, block.bytes, stream)
        arrived = self._device.record(stream)
        self._reads += 1
        block.extent.reader = Reader(self._reads, arrived)
        return arrived

    def give_back(self, block: Block) -> None:
        assert isinstance(block, HostBlock)
        self._slabs.give_back(block.extent)

    def stats(self) -> StoreStats:
        slabs = self._slabs
        return StoreStats(slabs.used_bytes, slabs.reserved_bytes, self._budget.limit_bytes, slabs.growths)

    def close(self) -> None:
        if not self._is_closed:
            self._budget.give_back(self._slabs.reserved_bytes)
        self._is_closed = True
        self._memory.clear()
        self._slabs.forget_blocks()

    def _grow(self, nbytes: int) -> int:
        """Take one slab. Powers of two, because torch's pinned allocator rounds every request up to one."""
        usual = max(self._smallest_slab_bytes, min(_LARGEST_STEP_BYTES, self._slabs.reserved_bytes))
        for size in (_power_of_two(max(nbytes, usual)), _power_of_two(nbytes)):
            if self._take(size):
                return size
        return 0

    def _take(self, size: int) -> bool:
        """False if it is over the budget, or the machine refuses: the default budget is an estimate."""
        if not self._budget.take(size):
            return False
        try:
            self._memory.append(self._device.host_bytes(size))
        except (RuntimeError, MemoryError):
            self._budget.refused(size)
            return False
        return True


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
