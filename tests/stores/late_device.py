"""A device like an accelerator, with copies as late as possible: at a wait."""

import threading
import weakref
from collections import deque

import torch

from ebbtide._devices.cpu import HostEvent
from ebbtide._utils.storage import as_bytes


class LateStream:
    """Copies and waits in order, run by the first synchronisation with a later point."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue = deque()
        self._queued = 0
        self._ran = 0
        self._lock = threading.RLock()

    def put(self, task) -> None:
        with self._lock:
            self._queue.append(task)
            self._queued += 1

    def point(self) -> int:
        with self._lock:
            return self._queued

    def run_to(self, point: int) -> None:
        with self._lock:
            while self._ran < point:
                self._queue.popleft()()
                self._ran += 1


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self._point = stream.point()

    def synchronize(self) -> None:
        self.stream.run_to(self._point)


class LateDevice:
    """Holds no memory of a queued copy, like a GPU; a copy with dead memory is a fault.

    Attributes:
        faults: copies from or into freed memory.
        waits: (name of the stream, why) in order.
        gate: no copy runs while a test holds the lock.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.faults = []
        self.waits = []
        self.gate = threading.Lock()
        self._compute = LateStream("compute")

    def current_stream(self):
        return self._compute

    def new_stream(self, name):
        return LateStream(name)

    def record(self, stream):
        return LateEvent(stream)

    def wait(self, stream, event, why):
        self.waits.append((stream.name, why))
        queued = event.result() if isinstance(event, HostEvent) else event
        if stream is self._compute:
            queued.synchronize()
        else:
            stream.put(queued.synchronize)

    def allocate(self, nbytes, stream):
        return as_bytes(torch.UntypedStorage(nbytes))

    def host_bytes(self, nbytes):
        return as_bytes(torch.UntypedStorage(nbytes))

    def copy(self, dst, src, stream):
        into, out_of = _place(dst), _place(src)
        stream.put(lambda: self._run_copy(into, out_of))

    def _run_copy(self, into, out_of):
        with self.gate:
            dst, src = into(), out_of()
            if dst is None or src is None:
                self.faults.append("a copy ran after its memory was freed")
                return
            dst.copy_(src)


def _place(t):
    """A function for the bytes of `t`; returns None after the death of the memory."""
    storage, start, nbytes = weakref.ref(t.untyped_storage()), t.storage_offset(), t.numel()

    def bytes_of():
        alive = storage()
        return None if alive is None else as_bytes(alive, start, nbytes)

    return bytes_of
