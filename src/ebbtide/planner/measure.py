"""Watches one step and makes a profile of it.

Note [How a step is measured]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A watch writes notes where forward and backward come by: an event of the compute stream each, and in a detailed
   step what is allocated. Nothing waits for an event: the notes are read when the last of them has passed.
2. One step is watched for times, another one for details, because to look at every save and operator takes time.
3. Where every region runs again, a step needs the least memory there is: what a region saves, and what each dear
   operator takes, is seen while it runs again, one region at a time. Where every region keeps, both are seen in
   forward, and second runs are not known.
4. What does not travel because its memory is held by others is not known beforehand; the measured steps correct it.
"""

import contextlib
import enum
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from ebbtide._torch import OperatorMode, at_end_of_backward, graph_task_id
from ebbtide.engine.parcel import span_of
from ebbtide.engine.scope import Scope
from ebbtide.engine.select import why_never
from ebbtide.planner.profile import Around, Dear, Link, Profile, RegionProfile, Save, Turn
from ebbtide.types import Device, Memory, Reason, StreamEvent

OnSave = Callable[[int, torch.Tensor], None]
IsDear = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], bool]


class Place(enum.Enum):
    """Where a step comes by."""

    BEGAN = "the step begins"
    ENTERED = "forward enters a region"
    LEFT = "forward leaves a region"
    FORWARD = "forward has ended"
    READ = "backward reads what was saved in a region, and read of another one before"
    AGAIN = "a region's second run begins"
    AGAIN_ENDED = "a region's second run has ended"
    ENDED = "backward has ended"


class Note(NamedTuple):
    """A place, the region it is of ("" outside of all), when compute was there, and the memory then."""

    place: Place
    region: str
    event: StreamEvent
    memory: Memory


_UNKNOWN = Memory(0, 0)


@dataclass
class _Seen:
    """A save or an output, and the compute stream's point behind it."""

    index: int
    nbytes: int
    event: StreamEvent
    op: str = ""
    before: StreamEvent = None
    shares: int = -1


class _Outside(NamedTuple):
    """A save outside of all regions: its index, when it was made, and the memory since the place before it."""

    save: int
    event: StreamEvent
    memory: Memory


@dataclass
class _Visit:
    """What was seen in one pass through a region."""

    region: str
    began: StreamEvent = None
    saves: list[_Seen] = field(default_factory=list[_Seen])
    inputs: list[_Seen] = field(default_factory=list[_Seen])
    dear: list[_Seen] = field(default_factory=list[_Seen])
    stuck_bytes: int = 0


class _First(NamedTuple):
    """Where a storage was seen first."""

    storage: "weakref.ref[torch.UntypedStorage]"
    visit: _Visit
    save: int


class Watch:
    """One step, watched.

    Args:
        device: where the model computes.
        scope: of the door, by which saves are judged.
        is_detailed: look at saves, operators and memory too.
        runs_again: all regions run again; else all keep.
        is_dear: which calls of operators are dear.
    """

    def __init__(
        self, device: Device, scope: Scope, *, is_detailed: bool, runs_again: bool, is_dear: IsDear | None = None
    ) -> None:
        self.device = device
        self.notes: list[Note] = []
        self.visits: list[_Visit] = []
        self.outside: list[_Outside] = []
        """Saves outside of all regions after the last one."""
        self.again: list[_Visit] = []
        self.is_over = False
        self._scope = scope
        self._is_detailed = is_detailed
        self._runs_again = runs_again
        self._is_dear = is_dear
        self._storages: dict[tuple[int, bool], _First] = {}
        self._region_read: str | None = None
        self._has_callback = False

    # -- where the step comes by -----------------------------------------------------------------------------------

    def began(self) -> None:
        if self._sees_operators:
            with _DearTimes(self.device, _Visit(""), self._is_dear):
                torch.empty(0).detach()  # the first operator that a mode sees imports much, and is not to be timed
        if self._is_detailed:
            self.device.forget_peak()
        self._note(Place.BEGAN, "")

    def entered(self, region: str) -> None:
        self._note(Place.ENTERED, region)
        self.visits.append(_Visit(region, self.notes[-1].event))

    def left(self, region: str) -> None:
        self._note(Place.LEFT, region)
        self.outside.clear()

    def forward_ended(self) -> None:
        self._note(Place.FORWARD, "")

    def read(self, region: str) -> None:
        """Backward reads what was saved in `region`."""
        if graph_task_id() == -1 or region == self._region_read:
            return
        self._backward_began()
        self._region_read = region
        self._note(Place.READ, region)

    @contextlib.contextmanager
    def running_again(self, region: str) -> Generator[OnSave | None, None, None]:
        """Around a second run; gives what is to be told of each of its saves."""
        if graph_task_id() == -1:
            yield None
            return
        self._backward_began()
        self._note(Place.AGAIN, region)
        visit = _Visit(region)
        self.again.append(visit)
        try:
            with _DearTimes(self.device, visit, self._is_dear) if self._sees_operators else contextlib.nullcontext():
                visit.began = self.device.record(self.device.current_stream())  # to push a mode may take its time
                yield (lambda index, t: self._look_at(visit.saves, visit, index, t)) if self._is_detailed else None
        finally:
            self._note(Place.AGAIN_ENDED, region)

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        """The desk was given `t`: of a region that runs again, that is an input."""
        if not self._is_detailed or not self._scope.serves(t.device):
            return
        if not region:
            point = self.device.record(self.device.current_stream())
            self.outside.append(_Outside(index, point, self.device.memory()))
            self.device.forget_peak()
        elif self.visits and self.visits[-1].region == region:
            visit = self.visits[-1]
            self._look_at(visit.inputs if self._runs_again else visit.saves, visit, index, t)

    @property
    def _sees_operators(self) -> bool:
        return self._is_detailed and self._is_dear is not None

    def _look_at(self, seen: list[_Seen], visit: _Visit, index: int, t: torch.Tensor) -> None:
        reason = self._why_never(t)
        if reason in _NOBODYS:
            return
        storage = t.untyped_storage() if reason is None else None
        nbytes = t.numel() * t.element_size() if storage is None else span_of(t, storage.nbytes()).sent_nbytes
        if storage is None:
            visit.stuck_bytes += nbytes
            return
        first = self._first_of(storage, seen is visit.inputs, visit, index)
        point = self.device.record(self.device.current_stream())
        seen.append(_Seen(index, nbytes if first is None else 0, point, shares=-1 if first is None else first))

    def _why_never(self, t: torch.Tensor) -> Reason | None:
        if type(t) is torch.Tensor:  # a leaf is what a region was given, cut off for its second run
            return why_never(t.detach() if t.is_leaf and self._runs_again else t, self._scope)
        return Reason.PARAMETER if isinstance(t, torch.nn.Parameter) else Reason.SUBCLASS

    def _first_of(self, storage: torch.UntypedStorage, is_input: bool, visit: _Visit, index: int) -> int | None:
        """The save that `storage` was seen at before; None at the first one, -1 if that was in another visit.

        A region's input is one of its saves too, should it keep them: those are told apart.
        """
        key = storage._cdata, is_input
        known = self._storages.get(key)
        if known is not None and known.storage() is storage:
            return known.save if known.visit is visit else -1
        self._storages[key] = _First(weakref.ref(storage), visit, index)
        return None

    def _backward_began(self) -> None:
        if not self._has_callback:
            self._has_callback = True
            at_end_of_backward(self._ended)

    def _ended(self) -> None:
        self._note(Place.ENDED, "")
        self.is_over = True

    def _note(self, place: Place, region: str) -> None:
        memory = _UNKNOWN
        if self._is_detailed:
            memory = self.device.memory()
            self.device.forget_peak()
        self.notes.append(Note(place, region, self.device.record(self.device.current_stream()), memory))

    @property
    def is_readable(self) -> bool:
        """Whether all its events have passed. Never waits."""
        return self.is_over and self.device.is_done(self.notes[-1].event)


class Pulse:
    """One step, looked at from the outside: when it began, when forward and backward ended. Costs three events.

    Args:
        device: where the model computes.
        looks_at_peak: find out the most that was allocated too. The device's own record of it begins anew.
    """

    def __init__(self, device: Device, looks_at_peak: bool) -> None:
        self.device = device
        self.looks_at_peak = looks_at_peak
        self.peak_bytes = 0
        if looks_at_peak:
            device.forget_peak()
        self._began = device.record(device.current_stream())
        self._forward_ended: StreamEvent = None
        self._ended: StreamEvent = None
        self._has_callback = False

    def forward_ended(self) -> None:
        self._forward_ended = self.device.record(self.device.current_stream())
        self._look()

    def _look(self) -> None:
        if self.looks_at_peak:
            self.peak_bytes = max(self.peak_bytes, self.device.memory().peak_bytes)

    def entered(self, region: str) -> None:
        pass

    def left(self, region: str) -> None:
        pass

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        pass

    def read(self, region: str) -> None:  # noqa: ARG002 (that it is read is enough)
        if not self._has_callback and graph_task_id() != -1:
            self._has_callback = True
            at_end_of_backward(self._end)

    def running_again(self, region: str) -> contextlib.AbstractContextManager[OnSave | None]:
        self.read(region)
        return contextlib.nullcontext()

    def _end(self) -> None:
        self._ended = self.device.record(self.device.current_stream())
        self._look()

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    @property
    def is_readable(self) -> bool:
        """Whether all its events have passed. Never waits."""
        return self._ended is not None and self.device.is_done(self._ended)

    def seconds(self) -> tuple[float, float]:
        """Of forward, and of the whole step."""
        between = self.device.seconds_between
        return between(self._began, self._forward_ended), between(self._began, self._ended)


# Not activations: nothing is there to be moved, kept or spared.
_NOBODYS = (Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER, Reason.EMPTY, Reason.OTHER_DEVICE)


class _DearTimes(OperatorMode):
    """Times the calls of dear operators."""

    def __init__(self, device: Device, visit: _Visit, is_dear: IsDear | None) -> None:
        super().__init__()
        self._device = device
        self._visit = visit
        self._is_dear = is_dear
        self._calls = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        assert self._is_dear is not None
        if not self._is_dear(op, args, kwargs):
            return op(*args, **kwargs)
        device = self._device
        before = device.record(device.current_stream())
        out = op(*args, **kwargs)
        after = device.record(device.current_stream())
        self._visit.dear.append(_Seen(self._calls, _nbytes_of(out), after, str(op), before))
        self._calls += 1
        device.memory()  # where nobody counts allocations, the peak is what was looked at
        return out


def _nbytes_of(out: Any) -> int:
    outputs = cast("Sequence[object]", out) if isinstance(out, tuple | list) else (out,)
    return sum(t.numel() * t.element_size() for t in outputs if isinstance(t, torch.Tensor))


# -- from notes to a profile -----------------------------------------------------------------------------------------


class Surroundings(NamedTuple):
    """What a profile says beyond what was seen in the steps.

    Attributes:
        grads: bytes of gradients by region that are allocated anew in each backward; "" for those outside.
        compiled: regions whose operators the compiler hides: none of them can be told to be held.
        device_bytes: memory of the device in all.
        time_scale: by how much larger the batch of the detailed step was than that of the timed one.
    """

    made_for: Mapping[str, str]
    link: Link
    base: Mapping[str, int]
    grads: Mapping[str, int]
    host_limit_bytes: int | None
    tokens: int
    compiled: Collection[str]
    device_bytes: int
    time_scale: float = 1.0


def profile_of(times: Watch, details: Watch, names: Collection[str], about: Surroundings) -> Profile | None:
    """The profile of two steps that were watched; None if they were not two of the same kind."""
    if not any(note.place is Place.ENTERED and note.region in names for note in times.notes):
        return None
    clock = _Clock(times, names, about.time_scale)
    memory = _Curve(details, names)
    visits = [visit for visit in details.visits if visit.region in names]
    if not visits or clock.regions != [v.region for v in visits] or memory.regions != clock.regions:
        return None
    again = _by_forward(details.again, visits) if details.again else [None] * len(visits)
    regions = tuple(
        _region(k, visit, second, clock, memory, details.device, about)
        for k, (visit, second) in enumerate(zip(visits, again, strict=True))
    )
    return Profile(
        made_for=dict(about.made_for),
        regions=_with_grads_outside(regions, about.grads.get("", 0)),
        around=_around(clock, memory),
        link=about.link,
        base_bytes=memory.base_bytes,
        base={**about.base, "other": max(0, memory.base_bytes - sum(about.base.values()))},
        host_limit_bytes=about.host_limit_bytes,
        tokens=about.tokens,
        device_bytes=about.device_bytes,
    )


def _region(
    k: int, visit: _Visit, second: _Visit | None, clock: "_Clock", memory: "_Curve", device: Device, about: Surroundings
) -> RegionProfile:
    looked_at = visit if second is None else second
    saves = tuple(_save(seen, looked_at, device) for seen in looked_at.saves)
    stuck_bytes = looked_at.stuck_bytes
    saved_bytes = sum(save.nbytes for save in saves) + stuck_bytes
    is_kept = second is None
    return RegionProfile(
        name=visit.region,
        forward_s=clock.forward_s[k],
        backward_s=clock.backward_s[k],
        again_s=clock.again_s[k],
        saves=saves,
        stuck_bytes=stuck_bytes,
        inputs=tuple(_save(seen, visit, device) for seen in visit.inputs),
        dear=() if visit.region in about.compiled else tuple(_dear(d, looked_at, device) for d in looked_at.dear),
        forward_work_bytes=max(0, memory.forward_work[k] - (saved_bytes if is_kept else 0)),
        backward_work_bytes=memory.backward_work[k] + (saved_bytes if is_kept else 0),
        grad_bytes=about.grads.get(visit.region, 0),
    )


def _save(seen: _Seen, visit: _Visit, device: Device) -> Save:
    return Save(seen.index, seen.nbytes, max(0.0, device.seconds_between(visit.began, seen.event)), seen.shares)


def _dear(seen: _Seen, visit: _Visit, device: Device) -> Dear:
    return Dear(
        seen.index,
        seen.nbytes,
        max(0.0, device.seconds_between(visit.began, seen.event)),
        max(0.0, device.seconds_between(seen.before, seen.event)),
        seen.op,
    )


def _with_grads_outside(regions: tuple[RegionProfile, ...], nbytes: int) -> tuple[RegionProfile, ...]:
    """The gradients of the head are there before the last region's backward begins."""
    last = regions[-1]
    return (*regions[:-1], replace(last, grad_bytes=last.grad_bytes + nbytes))


def _by_forward(again: Sequence[_Visit], visits: Sequence[_Visit]) -> list[_Visit | None]:
    """The second run of each visit: a region's last pass runs again first."""
    left: dict[str, list[_Visit]] = {}
    for visit in again:
        left.setdefault(visit.region, []).append(visit)
    return [left[visit.region].pop() if left.get(visit.region) else None for visit in visits]


class _Clock:
    """Seconds per region, from the notes of a step, in order of forward."""

    def __init__(self, watch: Watch, names: Collection[str], scale: float) -> None:
        self._device = watch.device
        self._scale = scale
        notes = [note for note in watch.notes if not note.region or note.region in names]
        entered = [k for k, note in enumerate(notes) if note.place is Place.ENTERED]
        ends = [*entered[1:], max((k for k, note in enumerate(notes) if note.place is Place.LEFT), default=0)]
        forward_end = next(k for k, note in enumerate(notes) if note.place is Place.FORWARD)
        self.regions = [notes[k].region for k in entered]
        self.forward_s = [self._between(notes[a], notes[b]) for a, b in zip(entered, ends, strict=True)]
        self.before_s = self._between(notes[0], notes[entered[0]]) if entered else 0.0
        self.after_s = self._between(notes[ends[-1]], notes[forward_end])
        spans = list(_backward_spans(notes))
        self.turn_s = self._between(notes[forward_end], spans[0].begin) if spans else 0.0
        self.end_s = self._between(spans[-1].end, notes[-1]) if spans else 0.0
        by_region: dict[str, list[_Span]] = {}
        for span in reversed(spans):  # a region's last pass comes first in backward
            by_region.setdefault(span.region, []).append(span)
        in_order = [by_region[name].pop(0) if by_region.get(name) else None for name in self.regions]
        self.again_s = [0.0 if s is None or s.again is None else self._between(s.begin, s.again) for s in in_order]
        self.backward_s = [0.0 if s is None else self._between(s.again or s.begin, s.end) for s in in_order]

    def _between(self, start: Note, end: Note) -> float:
        return self._scale * max(0.0, self._device.seconds_between(start.event, end.event))


class _Span(NamedTuple):
    """A region's part of backward. `again`: where its second run ended, if it had one."""

    region: str
    begin: Note
    again: Note | None
    end: Note


def _backward_spans(notes: Sequence[Note]) -> Iterator[_Span]:
    """A region's part begins with its second run or, without one, with the first read; and ends where the next one's
    does, or something outside of all regions is read."""
    has_second_runs = any(note.place is Place.AGAIN for note in notes)
    starts = Place.AGAIN if has_second_runs else Place.READ
    region, begin, again = "", None, None
    for note in notes:
        if note.place is Place.AGAIN_ENDED:
            again = note
        is_outside = note.place is Place.READ and not note.region
        if note.place is not starts and note.place is not Place.ENDED and not is_outside:
            continue
        if begin is not None and region:
            yield _Span(region, begin, again, note)
        region, begin, again = note.region, note, None


class _Curve:
    """Bytes per region, from the notes of a detailed step, in order of forward."""

    def __init__(self, watch: Watch, names: Collection[str]) -> None:
        notes = [note for note in watch.notes if not note.region or note.region in names]
        self.base_bytes = notes[0].memory.allocated_bytes
        entered = [k for k, note in enumerate(notes) if note.place is Place.ENTERED]
        self.regions = [notes[k].region for k in entered]
        left = [k for k, note in enumerate(notes) if note.place is Place.LEFT]
        self.kept_bytes = max(0, notes[entered[0]].memory.allocated_bytes - self.base_bytes) if entered else 0
        self.forward_work = [_peak(notes[a + 1 : b + 1], notes[a]) for a, b in zip(entered, left, strict=True)]
        spans = list(_backward_spans(notes))
        first = notes.index(spans[0].begin) if spans else len(notes) - 1
        self.last_left = notes[left[-1]].memory if left else notes[0].memory
        since = notes[left[-1]] if left else notes[0]
        self.turns = list(_turns(watch, since, _peak(notes[left[-1] + 1 : first + 1], since) if left else 0))
        by_region: dict[str, list[int]] = {}
        for span in reversed(spans):
            a, b = notes.index(span.begin), notes.index(span.end)
            by_region.setdefault(span.region, []).append(_peak(notes[a + 1 : b + 1], notes[a]))
        self.backward_work = [by_region[name].pop(0) if by_region.get(name) else 0 for name in self.regions]


def _peak(notes: Sequence[Note], since: Note) -> int:
    """Most beyond what was allocated at `since`; each note has the peak since the one before it."""
    return max(0, max((note.memory.peak_bytes for note in notes), default=0) - since.memory.allocated_bytes)


def _turns(watch: Watch, since: Note, last_peak_bytes: int) -> Iterator[Turn]:
    """Where what is on its way could leave behind the last region, and the most that is allocated from there on."""
    peaks = [max(0, seen.memory.peak_bytes - since.memory.allocated_bytes) for seen in watch.outside]
    yield Turn(-1, 0.0, peaks[0] if peaks else last_peak_bytes)
    for seen, peak_bytes in zip(watch.outside, [*peaks[1:], last_peak_bytes][: len(peaks)], strict=True):
        at_s = max(0.0, watch.device.seconds_between(since.event, seen.event))
        yield Turn(seen.save, at_s, peak_bytes)


def _around(clock: _Clock, memory: _Curve) -> Around:
    return Around(
        before_s=clock.before_s,
        after_s=clock.after_s,
        turn_s=clock.turn_s,
        end_s=clock.end_s,
        kept_bytes=memory.kept_bytes,
        turns=tuple(memory.turns),
    )
