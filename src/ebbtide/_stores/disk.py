"""A store on disk: one unlinked file, read and written by threads, past the page cache if possible."""

import functools
import os
from pathlib import Path

import torch

from ebbtide._devices.cpu import CpuDevice, HostEvent
from ebbtide._errors import ConfigError
from ebbtide._stores._lanes import DiskLane, HostLane, StagedLane
from ebbtide._stores._scratch import ALIGN_BYTES, ScratchFile
from ebbtide._stores._slabs import Extent, Reader, Slabs
from ebbtide._stores._staging import Staging
from ebbtide._types import Block, Device, StoreStats, Stream, StreamEvent, Wait
from ebbtide._utils.sizes import MIB

_MOUNTS = Path("/proc/self/mountinfo")
_ELSEWHERE = "name a folder on a disk, like store='disk:/scratch' or EBBTIDE_DISK_FOLDER=/scratch"


class DiskBlock:
    """Room for one parcel, as a place in the file."""

    __slots__ = ("extent", "landed", "nbytes", "start")

    def __init__(self, extent: Extent, start: int, nbytes: int) -> None:
        self.extent = extent
        self.start = start
        self.nbytes = nbytes
        # Guards a read: each direction has its own threads, and the bytes may not be in the file yet.
        self.landed: HostEvent | None = None


class DiskStore:
    """Parcels in one file without a name, which ends with the process.

    Args:
        device: the owner of the parcels' memory. Threads read RAM directly, and memory of an accelerator through pinned
            buffers.
        folder: a folder on a disk with room; the file grows in steps and keeps the room until `close`.
        threads: count of threads that write the file, and of threads that read the file; each has a buffer of 4 MiB.

    Raises:
        ConfigError: for an unusable folder, see `check_folder`.
    """

    def __init__(self, device: Device, folder: Path, *, threads: int = 4) -> None:
        self.check_folder(folder)
        if threads < 1:
            raise ConfigError(f"threads={threads}: a disk store needs 1 or more")
        self._file = ScratchFile(folder)
        self._slabs = Slabs(self._grow, ALIGN_BYTES)
        self._slab_starts: list[int] = []
        self._reads = 0
        self._outbound = _lane(device, "outbound", Wait.READY, threads)
        self._inbound = _lane(device, "inbound", Wait.ROOM, threads)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._file.is_direct

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise ConfigError unless `folder` is a writable folder outside RAM."""
        if not folder.is_dir():
            found = "is not a folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{str(folder)!r} {found}: make it, or {_ELSEWHERE}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{str(folder)!r} cannot be written to: change its permissions, or {_ELSEWHERE}")
        kind = _file_system_of(folder)
        if kind in ("tmpfs", "ramfs", "devtmpfs", "rootfs"):
            raise ConfigError(f"{str(folder)!r} is on a {kind}, which is RAM: a move frees no memory; {_ELSEWHERE}")

    def reserve(self, nbytes: int) -> DiskBlock | None:
        extent = None
        try:
            extent = self._slabs.take(nbytes)
            return None if extent is None else DiskBlock(extent, self._slab_starts[extent.slab] + extent.start, nbytes)
        except BaseException:  # an interrupt
            if extent is not None:
                self._slabs.give_back(extent)
            raise

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, DiskBlock)
        if block.extent.reader is not None:
            self._outbound.wait(stream, block.extent.reader.event)
            block.extent.reader = None
        block.landed = self._outbound.submit(stream, functools.partial(self._write, block), src)
        return block.landed

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, DiskBlock)
        assert block.landed is not None
        arrived = self._inbound.submit(stream, functools.partial(self._read, block, block.landed), dst)
        self._reads += 1
        block.extent.reader = Reader(self._reads, arrived)
        return arrived

    def give_back(self, block: Block) -> None:
        assert isinstance(block, DiskBlock)
        self._slabs.give_back(block.extent)

    def stats(self) -> StoreStats:
        slabs = self._slabs
        return StoreStats(slabs.used_bytes, slabs.reserved_bytes, None, slabs.growths)

    def close(self) -> None:
        self._file.close()
        self._outbound.close()
        self._inbound.close()

    def _write(self, block: DiskBlock, src: torch.Tensor) -> None:
        self._outbound.workers.run(src, functools.partial(_part_out, self._file, block.start))

    def _read(self, block: DiskBlock, landed: HostEvent, dst: torch.Tensor) -> None:
        landed.result()
        self._inbound.workers.run(dst, functools.partial(_part_in, self._file, block.start))

    def _grow(self, nbytes: int) -> int:
        del self._slab_starts[self._slabs.growths :]  # of a growth that an interrupt has ended
        for size in (max(nbytes, 256 * MIB), nbytes):
            start = self._file.grow(size)
            if start is not None:
                self._slab_starts.append(start)
                return size
        return 0


def _part_out(file: ScratchFile, start: int, staging: Staging, part: torch.Tensor, offset: int) -> None:
    file.write(staging.fill(part), start + offset)


def _part_in(file: ScratchFile, start: int, staging: Staging, part: torch.Tensor, offset: int) -> None:
    file.read(staging.space(part.numel()), start + offset)
    staging.drain(part)


def _lane(device: Device, name: str, why: Wait, threads: int) -> DiskLane:
    if isinstance(device, CpuDevice):
        return HostLane(device, name, threads)
    return StagedLane(device, name, why, threads)


def _file_system_of(folder: Path) -> str | None:
    """Kind of the file system under `folder`, like "ext4"; None if the system does not tell."""
    if not _MOUNTS.exists():
        return None
    number = folder.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in _MOUNTS.read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0]
    return None
