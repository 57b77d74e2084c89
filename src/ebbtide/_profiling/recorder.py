"""Watches one step: notes of where it came by, which reading.py makes a profile of.

Note [How a step is measured]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A watch writes notes where forward and backward come by: an event of the compute stream each, and in a detailed
   step what is allocated. Nothing waits for an event: the notes are read when the last of them has passed.
2. One step is watched for times, another one for details, because to look at every save and operator takes time.
3. Where every region runs again, a step needs the least memory there is: what a region saves, and what each dear
   operator takes, is seen while it runs again, one region at a time. Where every region keeps, both are seen in
   forward, and second runs are not known.
4. Where compute waits for the host that queues it, times are the host's. So it is held back once where backward begins,
   and where the first region does if compute has come by the step's beginning (many models look at what they are given
   first, and the host is not ahead then), and in a detailed step before each second run: the host gets ahead, and times
   are compute's own.
5. Some kernels write over what a dear operator has returned (see recompute/outputs.py), which then cannot be held: in
   the step that warms up, outputs that are still there when their region's second run ends are compared.
6. What does not travel because its memory is held by others is not known beforehand; the measured steps correct it.
"""

import contextlib
import enum
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from ebbtide._engine.context import HookContext
from ebbtide._engine.engine import Engine
from ebbtide._engine.parcel import span_of
from ebbtide._engine.select import why_never
from ebbtide._profiling.profile import NOBODY, OUTSIDE
from ebbtide._profiling.step_events import UntilBackwardEnds
from ebbtide._utils.storage import sums_of
from ebbtide._utils.torch_private import OperatorMode, graph_task_id, without_dispatch
from ebbtide.types import Dearness, Device, Memory, Provenance, Reason, StreamEvent, Trace


class Place(enum.Enum):
    """Where a step comes by."""

    BEGAN = "the step begins"
    ENTERED = "forward enters a region"
    RUNS = "the first run of a region that runs again begins, all being prepared"
    RAN = "that run has ended"
    LEFT = "forward leaves a region"
    FORWARD = "forward has ended"
    READ = "backward reads what was saved in a region, and read of another one before"
    AGAIN = "a region's second run begins"
    AGAIN_ENDED = "a region's second run has ended"
    ASKED = "backward asks for a save of a region that ran again"
    HELD = "compute is held back"
    GOES_ON = "compute goes on"
    ENDED = "backward has ended"


class Note(NamedTuple):
    """A place, the region it is of ("" outside of all), when compute was there, and the memory then.

    `host_s`: when the host was there, on a clock of its own, which stands still while it watches; `at_s`: on one that
    does not. `passed`: how many of the notes before it compute had come by then, by which that one and compute's can be
    compared. `save`: its index, where backward asks for one.
    """

    place: Place
    region: str
    event: StreamEvent
    memory: Memory
    host_s: float = 0.0
    passed: int = 0
    save: int = -1
    at_s: float = 0.0


_UNKNOWN = Memory(0, 0)
_HOLD = 0.5  # of what the host took for forward
_HOLD_DETAILED = 4.0  # of what it took for a region's: a mode looks at each operator
_MOST_HOLD_S = 0.1


class _Stopwatch:
    """The host's clock, without what watching takes."""

    def __init__(self) -> None:
        self._aside_s = 0.0
        self._stopped_s: float | None = None

    def now(self) -> float:
        return (time.perf_counter() if self._stopped_s is None else self._stopped_s) - self._aside_s

    @contextlib.contextmanager
    def stopped(self) -> Generator[None, None, None]:
        if self._stopped_s is not None:
            yield
            return
        self._stopped_s = time.perf_counter()
        try:
            yield
        finally:
            self._aside_s += time.perf_counter() - self._stopped_s
            self._stopped_s = None


@dataclass
class Seen:
    """A save or an output, and the compute stream's point behind it.

    Attributes:
        shares: as that of the profile's `Save`.
        given: of a save of a second run: the index of the input of its region that it is; -1 if it is none.
        trace: of a save of a second run: the dear calls that lead to it.
    """

    index: int
    nbytes: int
    event: StreamEvent
    op: str = ""
    before: StreamEvent = None
    shares: int = NOBODY
    given: int = -1
    trace: Trace | None = None


class OutsideSave(NamedTuple):
    """A save outside of all regions: its index, when it was made, and the memory since the place before it."""

    save: int
    event: StreamEvent
    memory: Memory


@dataclass
class VisitNotes:
    """What was seen in one pass through a region.

    Attributes:
        common_bytes: of its inputs, what others were given before it.
        freed_bytes: of inputs of regions in front of it, what left the device while its forward ran.
        behind_bytes: saved outside of all regions between it and the next one, and still there when forward ends.
        behind_peak_bytes: most that was allocated in between; 0 for the last one.
        has_dead_saves: of a branch that nobody uses: gone when forward left the region, and none of `saves`.
        lineage: what its dear calls lead to, if that is looked at.
        between: operators that these lead to: which calls, and compute's points before and behind.
        users: by dear call: the dear calls that are given what it leads to.
    """

    region: str
    began: StreamEvent = None
    saves: list[Seen] = field(default_factory=list[Seen])
    inputs: list[Seen] = field(default_factory=list[Seen])
    dear: list[Seen] = field(default_factory=list[Seen])
    stuck_bytes: int = 0
    common_bytes: int = 0
    ops: int = 0
    freed_bytes: int = 0
    behind_bytes: int = 0
    behind_peak_bytes: int = 0
    has_dead_saves: bool = False
    lineage: Provenance | None = None
    between: list[tuple[int, StreamEvent, StreamEvent]] = field(
        default_factory=list[tuple[int, StreamEvent, StreamEvent]]
    )
    users: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set[int]))


class _First(NamedTuple):
    """Where a storage was seen first, and as what else it was seen in other passes."""

    storage: "weakref.ref[torch.UntypedStorage]"
    visit: VisitNotes
    seen: Seen
    elsewhere: list[Seen]


class StepWatch(UntilBackwardEnds):
    """One step, watched.

    Args:
        engine: of the device that the model computes on.
        scope: of the door, by which saves are judged.
        is_detailed: look at saves, operators and memory too.
        recomputes: all regions run again but those `kept`; else all keep.
        dearness: of operators; None where nothing runs again.
        is_first: look for dear outputs that are overwritten.
        host_forward_s: what a forward took the host in an earlier step, if that is known.
    """

    def __init__(
        self,
        engine: Engine,
        scope: HookContext,
        *,
        is_detailed: bool,
        recomputes: bool,
        dearness: Dearness | None = None,
        is_first: bool = False,
        host_forward_s: float = 0.0,
        kept: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.device = engine.device
        self.notes: list[Note] = []
        self.visits: list[VisitNotes] = []
        self.outside: list[OutsideSave] = []
        """Saves outside of all regions after the last one."""
        self.again: list[VisitNotes] = []
        self.graphs = 1
        """Under way at once, while this one is. For whoever begins forwards to count."""
        self._engine = engine
        self._scope = scope
        self._is_detailed = is_detailed
        self._runs_again = recomputes
        self._kept = kept
        self._timed_by = dearness if is_detailed else None
        self._compared_by = dearness if is_first else None
        self._is_for_times = not is_detailed and not is_first
        self._earlier_s = host_forward_s
        self._compared: list[tuple[str, int, torch.Tensor]] = []
        self.waiting_bytes = 0
        """What was on its way out and still there when the last region was left, without what the first region was
        given: that is the caller's, who is believed to hold it as long as it was there."""
        self.freed_common_bytes = 0
        """What several regions are given and the caller lets go of in forward: it stays where one keeps it."""
        self._common: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._storages: dict[tuple[int, bool], _First] = {}
        self._there: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._behind: list[tuple[VisitNotes, weakref.ref[torch.UntypedStorage]]] = []
        """What is saved outside of all regions, and behind which."""
        self._peak_bytes = 0  # at saves outside of all regions since one was left
        self._staying: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._region_read: str | None = None
        self._passed = 0
        self._stopwatch = _Stopwatch()

    # -- where the step comes by -----------------------------------------------------------------------------------

    def began(self) -> None:
        if self._timed_by is not None:
            with _DearTimes(self.device, VisitNotes(""), self._timed_by):
                torch.empty(0).detach()  # the first operator that a mode sees imports much, and is not to be timed
        if self._is_detailed:
            self.device.reset_peak_stats()
        self._note(Place.BEGAN, "")

    def entered(self, region: str) -> None:
        with self._stopwatch.stopped():
            self._enter(region)

    def _enter(self, region: str) -> None:
        if self._is_for_times and self._earlier_s > 0 and not self.visits and self.device.is_done(self.notes[0].event):
            self._hold_noted(_HOLD * self._earlier_s)
        self._note(Place.ENTERED, region)
        if self.visits:
            self.visits[-1].behind_peak_bytes = max(self._peak_bytes, self.notes[-1].memory.peak_bytes)
        self.visits.append(VisitNotes(region, self.notes[-1].event))
        known = ((first.storage, first.storage()) for first in self._storages.values())
        self._there = [(ref, storage.nbytes()) for ref, storage in known if storage is not None]

    def left(self, region: str) -> None:
        with self._stopwatch.stopped():
            self._leave(region)

    def _leave(self, region: str) -> None:
        self._note(Place.LEFT, region)
        self.visits[-1].freed_bytes = sum(nbytes for ref, nbytes in self._there if ref() is None)
        self.outside.clear()
        self._peak_bytes = 0
        self.waiting_bytes = self._engine.waiting_bytes(self.visits[0].region, self._staying)

    def forward_ended(self) -> None:
        self._note(Place.FORWARD, "")
        self._count_behind()
        self.freed_common_bytes = sum(nbytes for ref, nbytes in self._common if ref() is None)

    def read(self, region: str) -> None:
        """Backward reads what was saved in `region`."""
        if graph_task_id() == -1 or region == self._region_read:
            return
        self._backward_began()
        self._region_read = region
        self._note(Place.READ, region)

    @contextlib.contextmanager
    def running(self, region: str) -> Generator[None, None, None]:
        """Around a first run. In a backward it is part of what runs again."""
        is_noted = not self._is_detailed and graph_task_id() == -1
        if is_noted:
            self._note(Place.RUNS, region)
        yield
        if is_noted:
            self._note(Place.RAN, region)

    @contextlib.contextmanager
    def running_again(self, region: str) -> "Generator[_AgainNotes | None, None, None]":
        """Around a second run; gives what follows its saves."""
        if graph_task_id() == -1:
            yield None
            return
        self._backward_began()
        if (
            self._timed_by is not None
        ):  # it counts to the backward of the region before, which is read of the other step
            self._hold(_HOLD_DETAILED * self.host_forward_s / max(1, len(self.visits)))
        self._note(Place.AGAIN, region)
        visit = VisitNotes(region)
        self.again.append(visit)
        try:
            with self._mode(region, visit):
                visit.began = self.device.record(self.device.current_stream())  # to push a mode may take its time
                yield _AgainNotes(self, visit) if self._is_detailed else None
        finally:
            self._note(Place.AGAIN_ENDED, region)

    def saved_again(self, visit: VisitNotes, index: int, t: torch.Tensor, is_dead: bool, given: int) -> None:
        if not is_dead:
            self._look_at(visit.saves, visit, index, t, given)
        else:
            trace = _trace(visit, t)
            if visit.lineage is not None and trace is not None:
                visit.lineage.spoiled |= trace.calls
            if self._why_never(t) is None:
                visit.has_dead_saves = True

    def asked(self, region: str, index: int) -> None:
        if not self.is_over:
            self._note(Place.ASKED, region, index)

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        """The desk was given `t`: of a region that runs again, that is an input."""
        if not self._is_detailed or not self._scope.serves(t.device):
            return
        if not region:
            if self.visits:
                self._look_behind(t)
            point = self.device.record(self.device.current_stream())
            self.outside.append(OutsideSave(index, point, self.device.memory()))
            self.device.reset_peak_stats()
        elif self.visits and self.visits[-1].region == region:
            visit = self.visits[-1]
            is_input = self._runs_again and region not in self._kept
            self._look_at(visit.inputs if is_input else visit.saves, visit, index, t)

    def _mode(self, region: str, visit: VisitNotes) -> contextlib.AbstractContextManager[object]:
        """Around a second run."""
        if self._timed_by is not None:
            return _DearTimes(self.device, visit, self._timed_by)
        if self._compared_by is not None:
            return _Comparing(region, self._compared_by, self._compared)
        return contextlib.nullcontext()

    def overwritten(self) -> set[tuple[str, int]]:
        """Region and index of dear outputs that others have written over. Waits for the device."""
        return {(region, index) for region, index, differs in self._compared if bool(differs)}

    def _look_at(self, seen: list[Seen], visit: VisitNotes, index: int, t: torch.Tensor, given: int = -1) -> None:
        reason = self._why_never(t)
        if reason in _NOBODYS:
            return
        storage = t.untyped_storage() if reason is None else None
        nbytes = t.numel() * t.element_size() if storage is None else span_of(t, storage.nbytes()).transfer_nbytes
        if storage is None:
            visit.stuck_bytes += nbytes
            return
        point = self.device.record(self.device.current_stream())
        own = Seen(index, nbytes, point, given=given, trace=_trace(visit, t))
        first = self._first_of(storage, seen is visit.inputs, visit, own)
        if first == NOBODY and seen is visit.inputs:
            visit.common_bytes += nbytes
            self._note_common(storage, nbytes)
        if first is not None:
            own.nbytes, own.shares = 0, first
        seen.append(own)

    def _look_behind(self, t: torch.Tensor) -> None:
        self._peak_bytes = max(self._peak_bytes, self.device.memory().peak_bytes)
        if _has_storage(t) and why_never(t, self._scope) not in _NOBODYS:
            storage = t.untyped_storage()
            if storage not in self._staying:
                self._staying.add(storage)
                self._behind.append((self.visits[-1], weakref.ref(storage)))

    def _count_behind(self) -> None:
        """All of its memory stays, whatever is done: regions that were given it, or saved it too, cannot move it. What
        is gone by now was saved in a branch that nobody uses, and what is behind the last region is around all."""
        for visit, ref in self._behind:
            storage = ref()
            if storage is None or visit is self.visits[-1]:
                continue
            known = [self._storages.get((storage._cdata, is_input)) for is_input in (False, True)]
            known = [first for first in known if first is not None and first.storage() is storage]
            if any(first.visit is self.visits[0] and first.seen in first.visit.inputs for first in known):
                continue  # the caller's, and there before the regions
            visit.behind_bytes += storage.nbytes()
            for seen in (seen for first in known for seen in (first.seen, *first.elsewhere)):
                seen.nbytes, seen.shares = 0, OUTSIDE

    def _why_never(self, t: torch.Tensor) -> Reason | None:
        if type(t) is torch.Tensor:
            return why_never(t.detach() if self._runs_again and _is_cut_off(t) else t, self._scope)
        return Reason.PARAMETER if isinstance(t, torch.nn.Parameter) else Reason.SUBCLASS

    def _note_common(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if all(ref() is not storage for ref, _ in self._common):
            self._common.append((weakref.ref(storage), nbytes))

    def _first_of(self, storage: torch.UntypedStorage, is_input: bool, visit: VisitNotes, seen: Seen) -> int | None:
        """The save that `storage` was seen at before; None at the first one, NOBODY if that was in another visit.

        A region's input is one of its saves too, should it keep them: those are told apart.
        """
        key = storage._cdata, is_input
        known = self._storages.get(key)
        if known is not None and known.storage() is storage:
            if known.visit is visit:
                return known.seen.index
            known.elsewhere.append(seen)
            return NOBODY
        self._storages[key] = _First(weakref.ref(storage), visit, seen, [])
        return None

    def _backward_began(self) -> None:
        has_forward_ended = any(note.place is Place.FORWARD for note in self.notes)
        if not self._is_awaited and self._is_for_times and has_forward_ended:
            self._hold_noted(_HOLD * self.host_forward_s)
        super()._backward_began()

    def _hold_noted(self, seconds: float) -> None:
        self._note(Place.HELD, "")
        self._hold(seconds)
        self._note(Place.GOES_ON, "")

    def _hold(self, seconds: float) -> None:
        self.device.hold(self.device.current_stream(), min(seconds, _MOST_HOLD_S))

    @property
    def host_forward_s(self) -> float:
        """What the host took from the first note to the end of forward, or so far."""
        ended_s = next((note.host_s for note in self.notes if note.place is Place.FORWARD), self.notes[-1].host_s)
        return ended_s - self.notes[0].host_s

    def _conclude(self) -> None:
        self._note(Place.ENDED, "")

    def _note(self, place: Place, region: str, save: int = -1) -> None:
        with self._stopwatch.stopped():
            self._write(place, region, save)

    def _write(self, place: Place, region: str, save: int) -> None:
        memory = _UNKNOWN
        if self._is_detailed:
            memory = self.device.memory()
            self.device.reset_peak_stats()
        event = self.device.record(self.device.current_stream())
        at_s = time.perf_counter()
        while self._passed < len(self.notes) and self.device.is_done(self.notes[self._passed].event):
            self._passed += 1
        self.notes.append(Note(place, region, event, memory, self._stopwatch.now(), self._passed, save, at_s))

    @property
    def is_readable(self) -> bool:
        """Whether all its events have passed. Never waits."""
        return self.is_over and self.device.is_done(self.notes[-1].event)


class _AgainNotes:
    """What a detailed step is told of one second run."""

    def __init__(self, watch: StepWatch, visit: VisitNotes) -> None:
        self._watch = watch
        self._visit = visit
        self._given: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def given(self, index: int, t: torch.Tensor) -> None:
        if _has_storage(t):
            self._given.setdefault(t.untyped_storage(), index)

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:
        given = self._given.get(t.untyped_storage(), -1) if _has_storage(t) else -1
        self._watch.saved_again(self._visit, index, t, is_dead, given)

    def asked(self, index: int) -> None:
        self._watch.asked(self._visit.region, index)


# Not activations: nothing is there to be moved, kept or spared.
_NOBODYS = (Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER, Reason.EMPTY, Reason.OTHER_DEVICE)


class _DearTimes(OperatorMode):
    """Times the calls of dear operators, and of those that they lead to."""

    def __init__(self, device: Device, visit: VisitNotes, dearness: Dearness) -> None:
        super().__init__()
        self._device = device
        self._visit = visit
        self._dearness = dearness
        self._lineage = visit.lineage = dearness.lineage()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        visit = self._visit
        visit.ops += 1
        is_dear = self._dearness.is_dear(op, args, kwargs)
        calls = self._lineage.given_to(op, args, kwargs)
        if not is_dear and calls == 0:
            return self.run_op(op, args, kwargs)
        device = self._device
        before = device.record(device.current_stream())
        out = self.run_op(op, args, kwargs)
        after = device.record(device.current_stream())
        if not is_dear:
            self._lineage.follow(op, args, kwargs, out)
            visit.between.append((calls, before, after))
            return out
        number = len(visit.dear)
        visit.dear.append(Seen(number, _nbytes_of(out), after, str(op), before))
        for call in range(number):
            if calls >> call & 1:
                visit.users[call].add(number)
        self._lineage.begin(number, op, args, kwargs, out)
        device.memory()  # where nobody counts allocations, the peak is what was looked at
        return out


class _Comparing(OperatorMode):
    """Whether dear outputs that are still there at the end are what they were.

    Args:
        region: whose second run it is around.
        dearness: of operators.
        compared: to be told of each: the region, the index, and if they differ. Nothing if the run raises.
    """

    def __init__(self, region: str, dearness: Dearness, compared: list[tuple[str, int, torch.Tensor]]) -> None:
        super().__init__()
        self._region = region
        self._dearness = dearness
        self._compared = compared
        self._calls = 0
        self._seen: list[tuple[int, weakref.ref[torch.UntypedStorage], torch.Tensor]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.run_op(op, args, kwargs)
        if self._dearness.is_dear(op, args, kwargs):
            plain = filter(_has_storage, _tensors_of(out))
            with without_dispatch():
                for storage in {t.untyped_storage() for t in plain}:
                    self._seen.append((self._calls, weakref.ref(storage), sums_of(storage)))
            self._calls += 1
        return out

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        there = ((index, ref(), sums) for index, ref, sums in self._seen if error is None)
        with without_dispatch():
            for index, storage, sums in there:
                if storage is not None:
                    self._compared.append((self._region, index, (sums_of(storage) != sums).any()))


def _trace(visit: VisitNotes, t: torch.Tensor) -> Trace | None:
    return None if visit.lineage is None else visit.lineage.trace(t)


def _has_storage(t: torch.Tensor) -> bool:
    """One of its own kind: subclasses are taken apart, and other layouts have several."""
    return type(t) is torch.Tensor and t.layout is torch.strided


def _is_cut_off(t: torch.Tensor) -> bool:
    """Whether `t` is what a region was given, or a view of it: a leaf in its second run."""
    base = t if t._base is None else t._base
    return base.is_leaf and type(base) is torch.Tensor


def _nbytes_of(out: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors_of(out))


def _tensors_of(out: Any) -> list[torch.Tensor]:
    outputs = cast("Sequence[object]", out) if isinstance(out, tuple | list) else (out,)
    return [t for t in outputs if isinstance(t, torch.Tensor)]
