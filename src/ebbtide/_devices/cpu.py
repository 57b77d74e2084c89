"""Models on the CPU: compute is the calling thread, a lane is a worker thread, an event is finished host work.

Note [Forks]
~~~~~~~~~~~~
A child process has memory, files and locks of its parent, and no thread but the one that has forked.
1. Work queued before the fork is the parent's. In the child its events raise, or a wait would have no end.
2. A stream begins anew in the child, with an empty queue.
3. Engines of the parent take no saved tensors of the child (process.py), and the file of a disk store is the parent's
   alone (_scratch.py): both processes would write the same room.
"""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator

import psutil
import torch

from ebbtide._errors import StoreError
from ebbtide._types import Device, Memory, Stream, StreamEvent, Wait
from ebbtide._utils.storage import as_bytes


class _ThisProcess:
    """The process as its parent's fork has left it: `forks` counts the forks from the first process to this one."""

    def __init__(self) -> None:
        self.forks = 0
        os.register_at_fork(after_in_child=self._count)

    def _count(self) -> None:
        self.forks += 1


_this_process = _ThisProcess()


class HostEvent:
    """Passes when a piece of host work is done. Carries the returned value or the error of the work."""

    __slots__ = ("_done", "_forks", "error", "passed_at", "value")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._forks = _this_process.forks
        self.error: BaseException | None = None
        self.value: object = None
        self.passed_at = 0.0

    def finish(self, value: object = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        self.passed_at = time.perf_counter()
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self) -> object:
        """Block until the work is done; raise StoreError if it failed."""
        if self._forks != _this_process.forks and not self._done.is_set():
            raise StoreError("this process was forked before the copy was done: run backward in the parent process")
        self._done.wait()
        if self.error is not None:
            raise StoreError(str(self.error)) from self.error
        return self.value


_Work = tuple[Callable[[], object], HostEvent]


class HostStream:
    """Host work in order on one thread, which starts with the first piece and ends with the stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._started = False
        # The thread refers to queue and turn alone, so the stream can die and end the thread.
        weakref.finalize(self, self._work.put, None)
        self._forks = _this_process.forks  # last: an interrupted begin is repeated

    def submit(self, work: Callable[[], object]) -> HostEvent:
        self._start()
        event = HostEvent()
        self._work.put((work, event))
        return event

    def _start(self) -> None:
        if self._started and self._forks == _this_process.forks:
            return
        with self._lock:
            if self._forks != _this_process.forks:
                self._begin()
            if self._started:
                return
            arguments = self._work, self._turn
            threading.Thread(target=_drain, args=arguments, name=f"ebbtide-{self.name}", daemon=True).start()
            self._started = True


def _drain(work: "queue.SimpleQueue[_Work | None]", turn: threading.Lock) -> None:
    if not turn.acquire(blocking=False):
        return  # an interrupted start was repeated, and another thread works in order
    while (item := work.get()) is not None:
        done, event = item
        # No local name may keep the memory of a finished piece: the event declares the memory free.
        del item
        value, error = _outcome(done)
        del done
        event.finish(value, error)
        del event, value, error  # not to live until the next piece comes


def _outcome(work: Callable[[], object]) -> tuple[object, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # raised by `result` of the event, in every waiting thread
        return None, error


@contextlib.contextmanager
def memory_errors() -> Generator[None]:
    """Turn a refused allocation of host memory into a MemoryError; any other error passes through."""
    try:
        yield
    except RuntimeError as error:
        # In the words of the driver that pins, and of the allocator of the CPU.
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


class HostDevice:
    """Answers of devices with compute on the calling thread."""

    supports_timing = True
    is_async = False

    def spin(self, stream: Stream, seconds: float) -> None:
        pass

    def mark_used(self, t: torch.Tensor, stream: Stream) -> None:
        pass  # the calling thread is done with `t` before it goes on

    def matches_capture(self) -> bool:
        return True  # a host records no graphs

    def capture_id(self) -> int | None:
        return None

    def for_capture(self, capture: int) -> Device | None:
        return None

    def failed_allocations(self) -> int:
        return 0


class CpuDevice(HostDevice):
    """RAM as the device. A wait of compute blocks the calling thread, and so stalls the host."""

    tracks_peak = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._process = psutil.Process()
        self._peak_bytes = 0

    def current_stream(self) -> Stream:
        return None  # the calling thread itself

    def new_stream(self, name: str) -> HostStream:
        return HostStream(name)

    def record(self, stream: HostStream | None) -> HostEvent:
        if stream is not None:
            return stream.submit(_nothing)
        event = HostEvent()
        event.finish()  # compute is synchronous: all earlier work is done
        return event

    def wait(self, stream: HostStream | None, event: HostEvent, why: Wait) -> None:
        if stream is None:
            event.result()
        elif not event.is_done():
            stream.submit(event.result)

    def is_done(self, event: HostEvent) -> bool:
        return event.is_done()

    def seconds_between(self, start: HostEvent, end: HostEvent) -> float:
        return end.passed_at - start.passed_at

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        return as_bytes(torch.UntypedStorage(nbytes))

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        with memory_errors():
            return as_bytes(torch.UntypedStorage(nbytes))

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: HostStream) -> None:
        stream.submit(lambda: dst.copy_(src))

    def memory(self) -> Memory:
        """Resident memory of the process; the peak is the maximum over all calls."""
        allocated = self._process.memory_info().rss
        self._peak_bytes = max(self._peak_bytes, allocated)
        return Memory(allocated, self._peak_bytes)

    def total_bytes(self) -> int:
        return psutil.virtual_memory().total

    def available_bytes(self) -> int:
        return psutil.virtual_memory().available + psutil.Process().memory_info().rss

    def reset_peak_stats(self) -> None:
        self._peak_bytes = 0

    def submit(self, stream: HostStream, work: Callable[[], object]) -> HostEvent:
        """Queue host work on a lane."""
        return stream.submit(work)

    def free_after(self, storage: torch.UntypedStorage, event: StreamEvent, owner: Stream) -> None:
        """Does nothing: queued work holds the storage until the work has run."""


def _nothing() -> None:
    pass
