"""Buffers between the file and the memory of parcels: a file read past the page cache takes aligned memory only."""

import mmap
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import torch

from ebbtide._stores._scratch import ALIGN_BYTES
from ebbtide._utils.sizes import MIB
from ebbtide.types import Device, Stream, StreamEvent

PART_BYTES = 4 * MIB
"""Size of a buffer, so the largest part of a parcel that one thread moves at once."""


class Staging(Protocol):
    """One buffer of one thread."""

    def fill(self, src: torch.Tensor) -> memoryview:
        """The bytes of `src`, padded for the file; they are there when this returns."""
        ...

    def space(self, nbytes: int) -> memoryview:
        """Room for `nbytes`, padded for the file; nobody reads what was there before."""
        ...

    def drain(self, dst: torch.Tensor) -> None:
        """Start dst <- what is in the room."""
        ...


StagingFactory: TypeAlias = Callable[[], Staging]


class HostStaging:
    """For memory that the host can read."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, PART_BYTES), np.uint8)

    def fill(self, src: torch.Tensor) -> memoryview:
        # numpy, not torch: each thread that copies with torch gets a team of OpenMP threads of its own.
        np.copyto(self._bytes[: src.numel()], src.numpy())
        return self.space(src.numel())

    def space(self, nbytes: int) -> memoryview:
        return self._bytes[: _padded(nbytes)].data

    def drain(self, dst: torch.Tensor) -> None:
        np.copyto(dst.numpy(), self._bytes[: dst.numel()])


class PinnedStaging:
    """For the memory of an accelerator, which copies through host memory it reaches.

    Args:
        device: whose memory it is.
        copies: the stream of all copies from and to this buffer.
    """

    def __init__(self, device: Device, copies: Stream) -> None:
        self._device = device
        self._copies = copies
        self._memory = _aligned(device, PART_BYTES)
        self._bytes = self._memory.numpy()
        # Guards the buffer: the file must not overwrite what a copy queued earlier has yet to read.
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


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _aligned(device: Device, nbytes: int) -> torch.Tensor:
    """Host memory of `device` that starts at a multiple of ALIGN_BYTES."""
    memory = device.host_bytes(nbytes)
    if memory.data_ptr() % ALIGN_BYTES == 0:  # pinned memory is, and one byte more would double it
        return memory
    memory = device.host_bytes(nbytes + ALIGN_BYTES)
    start = -memory.data_ptr() % ALIGN_BYTES
    return memory[start : start + nbytes]
