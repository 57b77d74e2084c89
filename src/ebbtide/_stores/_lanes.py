"""One direction of a disk store: a thread that moves bytes, and the events that order the moves.

Note [Copies behind host work]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An accelerator cannot wait for a file, so a thread reads or writes the file and queues the copies late, by itself.
1. The copies must wait for everything that the engine's stream waited for at the call. An event recorded on that stream
   at the call stands for these waits; by the time of the copy the engine may have queued waits of later parcels.
2. So the copies have a stream of their own, used by no other lane.
3. The call returns a HostEvent. It passes when the thread has queued the last copy (inbound), or when all bytes are in
   the file (outbound). The value of the HostEvent is the device's event behind the last copy.
4. The device cannot hold memory for copies not queued yet: the lane holds the memory until the copies have run.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch

from ebbtide._devices.cpu import CpuDevice, HostEvent, HostStream
from ebbtide._stores._staging import HostStaging, PinnedStaging
from ebbtide._stores._workers import Workers
from ebbtide._types import Device, Stream, StreamEvent, Wait

Move = Callable[[torch.Tensor], None]
"""Moves a whole parcel between its memory and the file."""


class HostLane:
    """A direction for memory of the host: the engine's stream is a thread, and does the work."""

    def __init__(self, device: CpuDevice, name: str, threads: int) -> None:
        self._device = device
        self.workers = Workers(f"disk-{name}", threads, HostStaging)

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        """Work submitted from now on touches the file after `event`, passed or failed."""
        self._device.wait(stream, event, Wait.REUSE)

    def submit(self, stream: HostStream, move: Move, memory: torch.Tensor) -> HostEvent:
        """Run `move(memory)` behind the waits of `stream`; hold `memory` until the end of the last copy."""
        return self._device.submit(stream, functools.partial(move, memory))

    def close(self) -> None:
        """End the threads after all submitted work."""
        self.workers.close()


class StagedLane:
    """A direction for an accelerator: a thread moves parts through pinned memory. See Note [Copies behind host work].

    Args:
        device: the owner of the memory.
        name: of the direction.
        why: reason of the wait at the start of a copy.
        threads: count of threads that read or write the file.
    """

    def __init__(self, device: Device, name: str, why: Wait, threads: int) -> None:
        self._device = device
        self._name = f"disk-{name}"
        self._why = why
        self._copies = device.new_stream(self._name)
        self._host = HostStream(self._name)
        self.workers = Workers(self._name, threads, functools.partial(PinnedStaging, device, self._copies))

    def wait(self, stream: Stream, event: HostEvent) -> None:  # noqa: ARG002 (only the lane's thread touches the file)
        self._host.submit(event.result)

    def submit(self, stream: Stream, move: Move, memory: torch.Tensor) -> HostEvent:
        start = self._device.record(stream)
        queued = self._host.submit(functools.partial(self._queue_copies, start, move, memory))
        self._host.submit(functools.partial(self._hold, memory))
        return queued

    def close(self) -> None:
        self.workers.close()
        self._host = HostStream(self._name)  # the thread of the old stream ends with the stream

    def _queue_copies(self, start: StreamEvent, move: Move, memory: torch.Tensor) -> StreamEvent:
        self._device.wait(self._copies, start, self._why)
        move(memory)
        return self._device.record(self._copies)

    def _hold(self, memory: torch.Tensor) -> None:
        # Also after failed work: some copies may be queued.
        self._device.record(self._copies).synchronize()
        del memory


DiskLane: TypeAlias = "HostLane | StagedLane"
"""One direction of a disk store; HostLane documents the methods."""
