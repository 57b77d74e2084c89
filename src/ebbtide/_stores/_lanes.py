"""One direction of a disk store: where its host work runs, and what that work waits for.

Note [Copies behind host work]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An accelerator cannot wait for a file, so a thread reads or writes it and queues the copies itself, late.
1. What the copies must wait for is what the engine's stream waited for at the call. An event recorded there at the
   call stands for it; by the time of the copy the engine may have queued waits of later parcels on that stream.
2. So the copies have a stream of their own, which only this lane uses.
3. What the call returns is a HostEvent that passes when the thread has queued the last copy (inbound), or when all is
   in the file (outbound); its value is the device's event behind the last copy.
4. The device cannot hold memory for copies it was not given yet: the lane holds it, until they have run.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from ebbtide._devices.cpu import CpuDevice, HostEvent, HostStream
from ebbtide._stores._staging import HostStaging, PinnedStaging
from ebbtide._stores._workers import Workers
from ebbtide.types import Device, Stream, StreamEvent, Wait

Move = Callable[[torch.Tensor], None]
"""Moves a whole parcel between its memory and the file."""


class DiskLane(Protocol):
    """One direction of a disk store."""

    workers: Workers

    def wait(self, stream: Stream, event: HostEvent) -> None:
        """What is submitted from now on touches the file after `event`, however that ended."""
        ...

    def submit(self, stream: Stream, move: Move, memory: torch.Tensor) -> HostEvent:
        """Run `move(memory)` behind what `stream` waits for; `memory` is held until nothing touches it."""
        ...

    def close(self) -> None:
        """The threads end when what they were given is done."""
        ...


class HostLane:
    """Of memory that the host can read: the engine's stream is a thread, and does the work itself."""

    def __init__(self, device: CpuDevice, name: str, threads: int) -> None:
        self._device = device
        self.workers = Workers(f"disk-{name}", threads, HostStaging)

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        self._device.wait(stream, event, Wait.REUSE)

    def submit(self, stream: HostStream, move: Move, memory: torch.Tensor) -> HostEvent:
        return self._device.submit(stream, functools.partial(move, memory))

    def close(self) -> None:
        self.workers.close()


class StagedLane:
    """Of an accelerator: a thread of the store moves parts through pinned memory. See Note [Copies behind host work].

    Args:
        device: whose memory it is.
        name: of the direction.
        why: what its copies wait for at the start.
        threads: that read or write the file.
    """

    def __init__(self, device: Device, name: str, why: Wait, threads: int) -> None:
        self._device = device
        self._name = f"disk-{name}"
        self._why = why
        self._copies = device.new_stream(self._name)
        self._host = HostStream(self._name)
        self.workers = Workers(self._name, threads, functools.partial(PinnedStaging, device, self._copies))

    def wait(self, stream: Stream, event: HostEvent) -> None:  # noqa: ARG002 (the file is touched by our own thread)
        self._host.submit(event.result)

    def submit(self, stream: Stream, move: Move, memory: torch.Tensor) -> HostEvent:
        start = self._device.record(stream)
        queued = self._host.submit(functools.partial(self._queue_copies, start, move, memory))
        self._host.submit(functools.partial(self._hold, memory))
        return queued

    def close(self) -> None:
        self.workers.close()
        self._host = HostStream(self._name)  # the thread of the old one ends with it

    def _queue_copies(self, start: StreamEvent, move: Move, memory: torch.Tensor) -> StreamEvent:
        self._device.wait(self._copies, start, self._why)
        move(memory)
        return self._device.record(self._copies)

    def _hold(self, memory: torch.Tensor) -> None:
        """Also when the work before it failed: copies may be queued all the same."""
        self._device.record(self._copies).synchronize()
        del memory
