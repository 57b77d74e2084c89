"""Buffers between the file and the memory of parcels: reads past the page cache need aligned memory."""

import mmap
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from ebbtide._stores._scratch import ALIGN_BYTES
from ebbtide._types import Device, Stream, StreamEvent
from ebbtide._utils.sizes import MIB

PART_BYTES = 4 * MIB
"""Size of a buffer, and so the largest part of a parcel that a thread moves at once."""


class HostStaging:
    """The buffer of a thread, for memory of the host."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, PART_BYTES), np.uint8)

    def fill(self, src: torch.Tensor) -> memoryview:
        """The bytes of `src`, padded for the file; complete at return."""
        # numpy, not torch: torch would start a team of OpenMP threads for each copying thread.
        np.copyto(self._bytes[: src.numel()], src.numpy())
        return self.space(src.numel())

    def space(self, nbytes: int) -> memoryview:
        """Room for `nbytes`, padded for the file; old contents are no longer needed."""
        return self._bytes[: _padded(nbytes)].data

    def drain(self, dst: torch.Tensor) -> None:
        """Start dst <- the contents of the room."""
        np.copyto(dst.numpy(), self._bytes[: dst.numel()])


class PinnedStaging:
    """The buffer of a thread, for memory of an accelerator, in host memory that the accelerator reaches.

    Args:
        device: the accelerator.
        copies: the stream of all copies from and to the buffer.
    """

    def __init__(self, device: Device, copies: Stream) -> None:
        self._device = device
        self._copies = copies
        self._memory = _aligned(device, PART_BYTES)
        self._bytes = self._memory.numpy()
        # Guards the buffer: the file must not overwrite bytes that a queued copy has yet to read.
        self._drained: StreamEvent | None = None

    def fill(self, src: torch.Tensor) -> memoryview:
        room = self.space(src.numel())
        self._device.copy(self._memory[: src.numel()], src, self._copies)
        self._device.record(self._copies).synchronize()
        return room

    def space(self, nbytes: int) -> memoryview:
        if self._drained is not None:
            self._drained.synchronize()
            self._drained = None
        return self._bytes[: _padded(nbytes)].data

    def drain(self, dst: torch.Tensor) -> None:
        self._device.copy(dst, self._memory[: dst.numel()], self._copies)
        self._drained = self._device.record(self._copies)


Staging: TypeAlias = "HostStaging | PinnedStaging"
StagingFactory: TypeAlias = Callable[[], Staging]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _aligned(device: Device, nbytes: int) -> torch.Tensor:
    """Host memory of `device` that starts at a multiple of ALIGN_BYTES."""
    memory = device.host_bytes(nbytes)
    if memory.data_ptr() % ALIGN_BYTES == 0:  # true of pinned memory, and one byte more would double its size
        return memory
    memory = device.host_bytes(nbytes + ALIGN_BYTES)
    start = -memory.data_ptr() % ALIGN_BYTES
    return memory[start : start + nbytes]
