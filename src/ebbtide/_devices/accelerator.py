"""GPUs by streams and events of torch's generic accelerator API: one implementation for CUDA, ROCm and XPU.

Only the folder of devices may name a back end.
"""

import contextlib
import functools
import os
import sys
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import torch

from ebbtide._devices.capture import capture_of, is_captured_in_parts
from ebbtide._devices.cpu import HostEvent, memory_errors
from ebbtide._devices.pinned import pinned_bytes
from ebbtide._devices.sysfs import cpus_near
from ebbtide._types import Memory, Wait
from ebbtide._utils.storage import as_bytes
from ebbtide._utils.torch_private import allocator_is_ready, cuda_is_capturing, current_stream, device_stats


class EventPool:
    """Events for reuse: making and destroying an event costs more than recording an old one.

    An event that only the pool refers to can be neither asked nor waited for any more, and waits already queued keep
    the meaning of the old record. The pool looks at each event once, `age` takes after its own, and drops an event with
    further references. So the pool refers to at most `age` events.
    """

    def __init__(self, make: Callable[[], torch.Event], age: int = 2048) -> None:
        self._make = make
        self._age = age
        self._taken: deque[Any] = deque([object()])
        self._pool_only = self._oldest()[1]  # the count of references to an object of the pool alone

    def take(self) -> torch.Event:
        """An event to record. Any thread."""
        event = None
        if len(self._taken) >= self._age:
            oldest, references = self._oldest()
            event = oldest if references <= self._pool_only else None
        if event is None:
            event = self._make()
        self._taken.append(event)
        return event

    def _oldest(self) -> tuple[Any, int]:
        event = self._taken.popleft()
        return event, sys.getrefcount(event)


HOST_WAITS: list[tuple[Any, str]] = [
    (owner, "synchronize") for owner in (torch.accelerator, torch.cuda, torch.cuda.Event, torch.cuda.Stream)
]
"""Functions in which the host waits for the device, as owner and name. The methods of torch.Stream and torch.Event are
written in C and cannot be wrapped."""


class AcceleratorDevice:
    """One GPU. `host_bytes` are pinned, on the NUMA node of the GPU if the system tells the node."""

    supports_timing = True
    is_async = True
    tracks_peak = True
    _passed: torch.Event | None = None
    """The last event seen to have passed. Later work runs after the event anyway, without a wait."""

    def __init__(self, device: torch.device) -> None:
        named = cast("int | None", device.index)  # None in "cuda", for the current device
        index = torch.accelerator.current_device_index() if named is None else named
        self.torch_device = torch.device(device.type, index)
        self._index = index
        self._asks_for_capture = device.type == "cuda"
        # cudaMallocAsync warns about marks without effect, and refuses memory of others. Other allocators ignore marks.
        self._marks = device.type != "cuda" or torch.cuda.memory.get_allocator_backend() == "native"
        self._near_cpus = cpus_near(self.torch_device)
        self._new_event = functools.partial(torch.Event, self.torch_device, enable_timing=self.supports_timing)
        self._events = EventPool(self._new_event)

    def current_stream(self) -> torch.Stream:
        return current_stream(self._index)

    def new_stream(self, name: str) -> torch.Stream:
        return torch.Stream(device=self.torch_device)

    def record(self, stream: torch.Stream) -> torch.Event:
        event = self._events.take()
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event | HostEvent, why: Wait) -> None:
        if event is not self._passed:
            stream.wait_event(event if type(event) is torch.Event else _device_event(event))

    def is_done(self, event: torch.Event | HostEvent) -> bool:
        if isinstance(event, HostEvent):
            return event.is_done() and (event.error is not None or _device_event(event).query())
        if not event.query():
            return False
        self._passed = event
        return True

    def seconds_between(self, start: torch.Event | HostEvent, end: torch.Event | HostEvent) -> float:
        if type(start) is torch.Event and type(end) is torch.Event:
            return start.elapsed_time(end) / 1e3
        for event in (start, end):
            if isinstance(event, HostEvent) and event.error is not None:
                return 0.0  # a failed copy took no time of the link
        return _device_event(start).elapsed_time(_device_event(end)) / 1e3

    def spin(self, stream: torch.Stream, seconds: float) -> None:
        if self.torch_device.type == "cuda":
            with stream:
                cast(Any, torch.cuda)._sleep(int(seconds * 1.5e9))  # cycles, at about 1.5 GHz

    def allocate(self, nbytes: int, stream: torch.Stream) -> torch.Tensor:
        if stream == self.current_stream():
            return self._empty(nbytes)
        with stream:
            return self._empty(nbytes)

    def _empty(self, nbytes: int) -> torch.Tensor:
        if torch.are_deterministic_algorithms_enabled():  # torch.empty would fill the memory first
            return as_bytes(torch.UntypedStorage(nbytes, device=self.torch_device))
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        with _on_cpus(self._near_cpus), memory_errors():
            pinned = pinned_bytes(nbytes, self.torch_device)
            if pinned is not None:
                return pinned
            # Without device=, torch would refuse to pin memory of a default device set by the user.
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.Stream) -> None:
        with stream:
            dst.copy_(src, non_blocking=True)

    def mark_used(self, t: torch.Tensor, stream: torch.Stream) -> None:
        if self._marks:
            t = as_bytes(t.untyped_storage()) if t.is_conj() or t.is_neg() else t  # torch resolves lazy bits in a copy
            t.record_stream(stream)

    def matches_capture(self) -> bool:
        return not (self._asks_for_capture and cuda_is_capturing())

    def capture_id(self) -> int | None:
        return capture_of(self.current_stream())

    def for_capture(self, capture: int) -> "CapturedDevice | None":
        return None if is_captured_in_parts() else CapturedDevice(self.torch_device, capture)

    def memory(self) -> Memory:
        if not allocator_is_ready():
            return Memory(0, 0)
        nbytes = device_stats(self._index)["allocated_bytes"]["all"]
        return Memory(nbytes["current"], nbytes["peak"])

    def total_bytes(self) -> int:
        return torch.accelerator.memory.get_memory_info(self._index)[1]

    def available_bytes(self) -> int:
        free_bytes, total_bytes = torch.accelerator.memory.get_memory_info(self._index)
        reserved = device_stats(self._index)["reserved_bytes"]["all"]["current"] if allocator_is_ready() else 0
        return min(total_bytes, free_bytes + reserved)

    def failed_allocations(self) -> int:
        return device_stats(self._index)["num_ooms"] if allocator_is_ready() else 0

    def reset_peak_stats(self) -> None:
        torch.accelerator.memory.reset_peak_memory_stats(self._index)

    def free_after(self, storage: torch.UntypedStorage, event: torch.Event | HostEvent, owner: torch.Stream) -> None:
        if isinstance(event, HostEvent):
            return  # a host thread holds the storage until the copy is done
        if self._asks_for_capture and capture_of(owner) is not None:
            return  # the event passed before the capture began, and a graph must not wait for it
        self.wait(owner, event, Wait.ABANDONED)


class CapturedDevice(AcceleratorDevice):
    """One GPU inside a capture: events become parts of a graph, so they have no time and cannot be asked.

    Args:
        device: the GPU.
        capture: the driver's number of the current capture.
    """

    supports_timing = False

    def __init__(self, device: torch.device, capture: int) -> None:
        super().__init__(device)
        self._capture = capture
        self._lanes: list[torch.Stream] = []

    def new_stream(self, name: str) -> torch.Stream:
        """A stream apart from the captured stream and the lanes: torch hands out a few streams in turn."""
        stream = super().new_stream(name)
        while stream in self._lanes or stream == self.current_stream():
            stream = super().new_stream(name)
        self._lanes.append(stream)
        return stream

    def record(self, stream: torch.Stream) -> torch.Event:
        """A new event for each record: the graph keeps its events."""
        event = self._new_event()
        event.record(stream)
        return event

    def matches_capture(self) -> bool:
        return self.capture_id() == self._capture

    def free_after(self, storage: torch.UntypedStorage, event: torch.Event | HostEvent, owner: torch.Stream) -> None:
        """No wait after the capture: the memory belongs to the pool of the graph."""
        if capture_of(owner) == self._capture:
            self.wait(owner, event, Wait.ABANDONED)


def name_of(device: torch.device) -> str:
    """The product ("NVIDIA H200"), or the kind of device ("xpu", "cpu") if torch knows no product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _device_event(event: torch.Event | HostEvent) -> torch.Event:
    """The device's event behind a copy. Blocks until the host thread of a disk store has queued the copy."""
    if not isinstance(event, HostEvent):
        return event
    queued = event.result()
    assert isinstance(queued, torch.Event)
    return queued


@contextlib.contextmanager
def _on_cpus(cpus: set[int]) -> Generator[None, None, None]:
    """Run the calling thread on `cpus`: the kernel places a page on the node of the first thread to touch the page."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
