"""An adversarial device over CPU tensors, for tests: finds races without a GPU.

Note [What the simulator models]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Compute runs at once, in host order; copies on other streams are queued and run as late as the waits allow, as
   early, or at random, by seed. A wait forces what it waits for, in each stream's order.
2. A copy holds none of the memory it reads or writes. If the memory has died by the time it runs, it reads poison
   and the checker says so. Fresh blocks and host memory are filled with poison too.
3. A vector clock per stream finds what values cannot show, above all compute running behind the host: every two
   accesses of the same bytes, one of them a write, must be ordered by waits. An allocation counts as a write by its
   owner, and so does the end of a block: its memory may be somebody else's from then on.
"""

import contextlib
import random
import weakref
from collections import deque
from collections.abc import Generator
from typing import Literal, NamedTuple

import torch

from ebbtide._utils.storage import as_bytes
from ebbtide._utils.torch_private import storage_offset
from ebbtide.types import Device, Memory, Wait

Order = Literal["late", "early", "shuffled"]

_POISON = 0xFF  # NaN as a float of any width, -1 as an integer


class SimStream:
    """A queue of tasks and the clock of what they may rely on."""

    def __init__(self, name: str, is_compute: bool) -> None:
        self.name = name
        self.is_compute = is_compute
        self.clock: dict[str, int] = {name: 0}
        self.queue: deque[_Task] = deque()
        self.last_written: _Region | None = None  # what the latest copy on this stream writes
        self.ready_from: SimStream | None = None  # the compute stream whose work this lane waited for last

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


class _Region(NamedTuple):
    """Bytes of a storage; holds none of them."""

    storage: "weakref.ref[torch.UntypedStorage]"
    key: int
    start: int
    nbytes: int


class _Task(NamedTuple):
    """A copy, a wait for an event, or the passing of one."""

    kind: Literal["copy", "wait", "pass"]
    event: SimEvent | None
    dst: _Region | None = None
    src: _Region | None = None


class _Access(NamedTuple):
    start: int
    end: int
    stream: str
    at: int
    is_write: bool
    what: str


class SimDevice:
    """Streams whose copies run when a seeded adversary lets them.

    Args:
        seed: of the adversary's choices.
        order: when queued copies run. "late": only when something waits for them.

    Attributes:
        faults: what the checker found, in words; empty after a run without a race.
    """

    supports_timing = True
    is_async = False
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
            stream.queue.append(_Task("pass", event))
        self._let_some_run()
        return event

    def wait(self, stream: SimStream, event: SimEvent, why: Wait) -> None:
        stream.join(event.clock)
        if stream.is_compute:
            self._force(event)
            if why is Wait.ARRIVED and event.written is not None:  # compute is about to read it
                self._check(event.written, stream, stream.tick(), is_write=False, what="compute reads")
        else:
            stream.queue.append(_Task("wait", event))
            if why is Wait.READY:
                stream.ready_from = event.stream
        self._let_some_run()

    def is_done(self, event: SimEvent) -> bool:
        return event.has_passed

    def memory(self) -> Memory:
        return Memory(0, 0)  # nothing is short here

    def total_bytes(self) -> int:
        return 0

    def failed_allocations(self) -> int:
        return 0

    def reset_peak_stats(self) -> None:
        pass

    def seconds_between(self, start: SimEvent, end: SimEvent) -> float:
        return 0.0  # the simulator orders, it does not time

    def hold(self, stream: SimStream, seconds: float) -> None:
        pass

    def allocate(self, nbytes: int, stream: SimStream) -> torch.Tensor:
        memory = as_bytes(torch.UntypedStorage(nbytes)).fill_(_POISON)
        self._adopt(memory.untyped_storage(), stream, stream.tick())
        return memory

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        memory = as_bytes(torch.UntypedStorage(nbytes)).fill_(_POISON)
        self._keys[memory.untyped_storage()] = self._new_key()  # host memory has no owner stream and is never freed
        return memory

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SimStream) -> None:
        at = stream.tick()
        writer = stream.ready_from or self.current_stream()
        task = _Task("copy", None, self._region(dst, writer), self._region(src, writer))
        assert task.src is not None and task.dst is not None
        self._check(task.src, stream, at, is_write=False, what="copy reads")
        self._check(task.dst, stream, at, is_write=True, what="copy writes")
        stream.last_written = task.dst
        stream.queue.append(task)
        self._let_some_run()

    def matches_capture(self) -> bool:
        return True  # nothing here records graphs

    def capture_id(self) -> int | None:
        return None

    def for_capture(self, capture: int) -> Device | None:
        return None

    def free_after(self, storage: torch.UntypedStorage, event: SimEvent, owner: SimStream) -> None:
        self.wait(owner, event, Wait.ABANDONED)

    # -- for tests -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compute_on(self, name: str, after: SimEvent | None = None) -> Generator[SimStream, None, None]:
        """A second compute stream is current inside.

        It waits for the outer one on entry, or just for `after`; the outer one waits for it on exit.
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

    def finish(self) -> None:
        """Run everything that is queued: the end of a step with a synchronisation."""
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
        """Run the lane's next task if it may; True if it did."""
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

    def _run_copy(self, task: _Task, lane: SimStream) -> None:
        assert task.dst is not None and task.src is not None
        dst, src = task.dst.storage(), task.src.storage()
        if dst is None:
            self.faults.append(f"{lane.name} writes {task.dst.nbytes} bytes into memory that was freed")
            return
        into = as_bytes(dst, task.dst.start, task.dst.nbytes)
        if src is None:
            self.faults.append(f"{lane.name} reads {task.src.nbytes} bytes of memory that was freed")
            into.fill_(_POISON)
            return
        into.copy_(as_bytes(src, task.src.start, task.src.nbytes))

    # -- the checker -----------------------------------------------------------------------------------------------

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _region(self, t: torch.Tensor, writer: SimStream) -> _Region:
        storage = t.untyped_storage()
        if storage not in self._keys:  # made by an operation of the model, which the checker sees here first
            self._adopt(storage, writer, writer.clock[writer.name])
        return _Region(weakref.ref(storage), self._keys[storage], storage_offset(t), t.numel())

    def _adopt(self, storage: torch.UntypedStorage, owner: SimStream, at: int) -> None:
        """StepRecorder a device block: written by its owner `at` that time, and free for others when it dies."""
        key = self._keys[storage] = self._new_key()
        nbytes = storage.nbytes()
        self._accesses[key] = [_Access(0, nbytes, owner.name, at, True, "allocated")]
        weakref.finalize(storage, self._free, key, nbytes, owner).atexit = False

    def _free(self, key: int, nbytes: int, owner: SimStream) -> None:
        region = _Region(lambda: None, key, 0, nbytes)  # pyright: ignore[reportArgumentType] (dead by definition)
        self._check(region, owner, owner.clock[owner.name], is_write=True, what="freed")
        del self._accesses[key]

    def _check(self, region: _Region, stream: SimStream, at: int, is_write: bool, what: str) -> None:
        """Record an access; complain about every earlier one it conflicts with and is not ordered after."""
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
