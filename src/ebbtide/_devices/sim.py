"""An adversarial device over CPU tensors, for tests: finds races without a GPU.

Note [What the simulator models]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Compute runs at once, in host order. Copies on further streams are queued and run as late as the waits allow, as
   early, or at random by seed. A wait forces the awaited event, in the order of each stream.
2. A copy holds none of the memory it reads or writes. A copy from memory that has died reads poison, and the checker
   reports a fault. Fresh blocks and host memory are filled with poison too.
3. A vector clock per stream finds races that values cannot show, above all compute that runs behind the host: waits
   must order every two accesses to the same bytes, one of them a write. An allocation counts as a write by the owner,
   and so does the end of a block, because the memory may belong to a new block from then on: behind all work that the
   streams marked as users of the memory have queued by then.
"""

import contextlib
import random
import weakref
from collections import deque
from collections.abc import Generator
from typing import Literal, NamedTuple

import torch

from ebbtide._devices.cpu import HostDevice
from ebbtide._types import Memory, Wait
from ebbtide._utils.storage import as_bytes
from ebbtide._utils.torch_private import storage_offset

Order = Literal["late", "early", "shuffled"]


class SimStream:
    """A queue of tasks, and a vector clock of the work that the tasks may rely on."""

    def __init__(self, name: str, is_compute: bool) -> None:
        self.name = name
        self.is_compute = is_compute
        self.clock: dict[str, int] = {name: 0}
        self.queue: deque[_StreamTask] = deque()
        self.last_written: _Bytes | None = None  # destination of the latest copy on the stream
        self.ready_from: SimStream | None = None  # the compute stream that the lane has waited for last

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def join(self, clock: dict[str, int]) -> None:
        for name, at in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), at)


class SimEvent:
    """A point in a stream: passed when the tasks before it have run."""

    def __init__(self, stream: SimStream, clock: dict[str, int]) -> None:
        self.stream = stream
        self.clock = clock
        self.has_passed = False
        self.written = stream.last_written


class _Bytes(NamedTuple):
    """A range of a storage, without a reference to the memory."""

    storage: "weakref.ref[torch.UntypedStorage]"
    key: int
    start: int
    nbytes: int


class _StreamTask(NamedTuple):
    """A copy, a wait for an event, or the passing of an event."""

    kind: Literal["copy", "wait", "pass"]
    event: SimEvent | None
    dst: _Bytes | None = None
    src: _Bytes | None = None


class _Access(NamedTuple):
    start: int
    end: int
    stream: str
    at: int
    is_write: bool
    what: str


class SimDevice(HostDevice):
    """Streams with copies that run at the choice of a seeded adversary.

    Args:
        seed: of the choices.
        order: when queued copies run; "late" means not before a wait.

    Attributes:
        faults: findings of the checker, in words; empty after a run without a race.
    """

    tracks_peak = True

    def __init__(self, seed: int = 0, order: Order = "late") -> None:
        self.torch_device = torch.device("cpu")
        self.faults: list[str] = []
        self._random = random.Random(seed)  # noqa: S311 (an adversary, not a key)
        self._order = order
        self._compute = [SimStream("compute", is_compute=True)]
        self._sides: dict[str, SimStream] = {}
        self._lanes: list[SimStream] = []
        self._accesses: dict[int, list[_Access]] = {}
        self._next_key = 0
        self._keys: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._users: dict[int, list[SimStream]] = {}

    # -- the Device protocol ---------------------------------------------------------------------------------------

    def current_stream(self) -> SimStream:
        return self._compute[-1]

    def new_stream(self, name: str) -> SimStream:
        stream = SimStream(f"{name}{len(self._lanes)}", is_compute=False)
        self._lanes.append(stream)
        return stream

    def record(self, stream: SimStream) -> SimEvent:
        stream.tick()
        event = SimEvent(stream, dict(stream.clock))
        if stream.is_compute:
            event.has_passed = True
        else:
            stream.queue.append(_StreamTask("pass", event))
        self._let_some_run()
        return event

    def wait(self, stream: SimStream, event: SimEvent, why: Wait) -> None:
        stream.join(event.clock)
        if stream.is_compute:
            self._force(event)
            if why is Wait.ARRIVED and event.written is not None:  # compute is about to read the copy
                self._check(event.written, stream, stream.tick(), is_write=False, what="compute reads")
        else:
            stream.queue.append(_StreamTask("wait", event))
            if why is Wait.READY:
                stream.ready_from = event.stream
        self._let_some_run()

    def is_done(self, event: SimEvent) -> bool:
        return event.has_passed

    def memory(self) -> Memory:
        return Memory(0, 0)  # memory of the simulator never runs out

    def total_bytes(self) -> int:
        return 0

    def available_bytes(self) -> int:
        return 0

    def reset_peak_stats(self) -> None:
        pass

    def seconds_between(self, start: SimEvent, end: SimEvent) -> float:
        return 0.0  # the simulator orders, it does not time

    def allocate(self, nbytes: int, stream: SimStream) -> torch.Tensor:
        memory = _poison(as_bytes(torch.UntypedStorage(nbytes)))
        self._adopt(memory.untyped_storage(), stream, stream.tick())
        return memory

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        memory = _poison(as_bytes(torch.UntypedStorage(nbytes)))
        self._keys[memory.untyped_storage()] = self._new_key()  # host memory has no owner stream and is never freed
        return memory

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SimStream) -> None:
        at = stream.tick()
        writer = stream.ready_from or self.current_stream()
        task = _StreamTask("copy", None, self._bytes_of(dst, writer), self._bytes_of(src, writer))
        assert task.src is not None and task.dst is not None
        self._check(task.src, stream, at, is_write=False, what="copy reads")
        self._check(task.dst, stream, at, is_write=True, what="copy writes")
        stream.last_written = task.dst
        stream.queue.append(task)
        self._let_some_run()

    def mark_used(self, t: torch.Tensor, stream: SimStream) -> None:
        self._users.setdefault(self._bytes_of(t, stream).key, []).append(stream)

    def free_after(self, storage: torch.UntypedStorage, event: SimEvent, owner: SimStream) -> None:
        self.wait(owner, event, Wait.ABANDONED)

    # -- for tests -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compute_on(self, name: str, after: SimEvent | None = None) -> Generator[SimStream, None, None]:
        """A second compute stream is current inside.

        On entry the stream waits for the outer compute stream, or only for `after`; on exit the outer one waits.
        """
        stream = self._sides.setdefault(name, SimStream(name, is_compute=True))
        outer = self.current_stream()
        self.wait(stream, after or self.record(outer), Wait.READY)
        self._compute.append(stream)
        try:
            yield stream
        finally:
            self._compute.pop()
            self.wait(outer, self.record(stream), Wait.READY)

    def touch(self, t: torch.Tensor) -> None:
        """Compute on the current stream reads the memory of `t`, and has made it if nothing has touched it before."""
        stream = self.current_stream()
        memory = as_bytes(t.untyped_storage())
        self._check(self._bytes_of(memory, stream), stream, stream.tick(), is_write=False, what="compute reads")

    def finish(self) -> None:
        """Run all queued tasks, like a synchronisation at the end of a step."""
        while any(self._run_head(lane) for lane in self._lanes):
            pass
        stuck = [lane.name for lane in self._lanes if lane.queue]
        if stuck:
            self.faults.append(f"deadlock: {stuck} wait for events that never pass")

    # -- the adversary ---------------------------------------------------------------------------------------------

    def _let_some_run(self) -> None:
        if self._order == "late":
            return
        if self._order == "early":
            while any(self._run_head(lane) for lane in self._lanes):
                pass
            return
        for lane in self._random.sample(self._lanes, len(self._lanes)):
            for _ in range(self._random.randrange(3)):
                self._run_head(lane)

    def _force(self, event: SimEvent) -> None:
        while not event.has_passed:
            head = event.stream.queue[0]
            if head.kind == "wait":
                assert head.event is not None
                self._force(head.event)
            self._run_head(event.stream)

    def _run_head(self, lane: SimStream) -> bool:
        """Run the next task of the lane unless the task waits; whether a task ran."""
        if not lane.queue:
            return False
        task = lane.queue[0]
        if task.kind == "wait" and not (task.event is not None and task.event.has_passed):
            return False
        lane.queue.popleft()
        if task.kind == "pass" and task.event is not None:
            task.event.has_passed = True
        elif task.kind == "copy":
            self._run_copy(task, lane)
        return True

    def _run_copy(self, task: _StreamTask, lane: SimStream) -> None:
        assert task.dst is not None and task.src is not None
        dst, src = task.dst.storage(), task.src.storage()
        if dst is None:
            self.faults.append(f"{lane.name} writes {task.dst.nbytes} bytes into freed memory")
            return
        into = as_bytes(dst, task.dst.start, task.dst.nbytes)
        if src is None:
            self.faults.append(f"{lane.name} reads {task.src.nbytes} bytes of freed memory")
            _poison(into)
            return
        into.copy_(as_bytes(src, task.src.start, task.src.nbytes))

    # -- the checker -----------------------------------------------------------------------------------------------

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _bytes_of(self, t: torch.Tensor, writer: SimStream) -> _Bytes:
        storage = t.untyped_storage()
        if storage not in self._keys:  # made by an operator of the model, unseen by the checker so far
            self._adopt(storage, writer, writer.clock[writer.name])
        return _Bytes(weakref.ref(storage), self._keys[storage], storage_offset(t), t.numel())

    def _adopt(self, storage: torch.UntypedStorage, owner: SimStream, at: int) -> None:
        """Register a device block: written by `owner` at time `at`, and freed at the death of `storage`."""
        key = self._keys[storage] = self._new_key()
        nbytes = storage.nbytes()
        self._accesses[key] = [_Access(0, nbytes, owner.name, at, True, "allocated")]
        weakref.finalize(storage, self._free, key, nbytes, owner).atexit = False

    def _free(self, key: int, nbytes: int, owner: SimStream) -> None:
        region = _Bytes(lambda: None, key, 0, nbytes)  # pyright: ignore[reportArgumentType] (dead by definition)
        reuse = SimStream(owner.name, is_compute=True)
        for stream in (owner, *self._users.pop(key, ())):
            reuse.join(stream.clock)
        self._check(region, reuse, owner.clock[owner.name], is_write=True, what="freed")
        del self._accesses[key]

    def _check(self, region: _Bytes, stream: SimStream, at: int, is_write: bool, what: str) -> None:
        """Record an access; report every earlier conflicting access without an order between the two."""
        end = region.start + region.nbytes
        history = self._accesses.setdefault(region.key, [])
        kept: list[_Access] = []
        for earlier in history:
            overlaps = earlier.start < end and region.start < earlier.end
            ordered = stream.clock.get(earlier.stream, 0) >= earlier.at
            if overlaps and (is_write or earlier.is_write) and not ordered:
                self.faults.append(
                    f"race: {what} by {stream.name} is not ordered after: {earlier.what} by {earlier.stream}"
                )
            covered = region.start <= earlier.start and earlier.end <= end
            if not (is_write and covered and ordered):
                kept.append(earlier)
        kept.append(_Access(region.start, end, stream.name, at, is_write, what))
        self._accesses[region.key] = kept


def _poison(memory: torch.Tensor) -> torch.Tensor:
    return memory.fill_(0xFF)  # NaN as a float of any width, -1 as an integer
