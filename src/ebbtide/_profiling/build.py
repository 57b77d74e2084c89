"""From the notes of two steps to a profile. Reads events that have passed, and changes nothing."""

import dataclasses
import functools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ebbtide._profiling.launch_overhead import host_of
from ebbtide._profiling.profile import NOBODY, OUTSIDE, Around, Dear, Link, Profile, RegionProfile, Save, Turn
from ebbtide._profiling.recorder import Note, Place, Seen, StepWatch, VisitNotes
from ebbtide._profiling.region_times import Clock, Span, backward_spans, by_forward
from ebbtide.types import Device, StreamEvent

_MOST_SLOWDOWN = 1.25


class Surroundings(NamedTuple):
    """What a profile says beyond what was seen in the steps.

    Attributes:
        grads: bytes of gradients by region that are allocated anew in each backward; "" for those outside.
        compiled: regions whose operators the compiler hides: none of them can be told to be held.
        device_bytes: memory of the device in all.
        graphs: forwards that are under way at once.
        overwritten: dear outputs that cannot be held, by region and index.
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
    graphs: int = 1
    overwritten: Collection[tuple[str, int]] = ()
    time_scale: float = 1.0


def profile_of(times: StepWatch, details: StepWatch, names: Collection[str], about: Surroundings) -> Profile | None:
    """The profile of two steps that were watched; None if they were not two of the same kind, or regions nested."""
    if not any(note.place is Place.ENTERED and note.region in names for note in times.notes):
        return None
    if not (_is_one_by_one(times, names) and _is_one_by_one(details, names)):
        return None
    clock = Clock(times.notes, names, lambda start, end: about.time_scale * _seconds(times, start, end))
    visits = [visit for visit in details.visits if visit.region in names]
    memory = _Curve(details, names, sum(map(_saved_bytes, visits)))
    if not visits or clock.regions != [v.region for v in visits] or memory.regions != clock.regions:
        return None
    again = by_forward(((visit.region, visit) for visit in details.again), clock.regions)
    slowdown = _slowdown(clock, Clock(details.notes, names, functools.partial(_seconds, details)))
    step = _Step(clock, memory, details.device, about, _grad_bytes(clock.regions, about.grads), slowdown)
    passes = zip(visits, again, strict=True)
    regions = tuple(step.region(k, visit, second) for k, (visit, second) in enumerate(passes))
    ops = [0 if second is None else second.ops for second in again]
    profile = Profile(
        made_for=dict(about.made_for),
        regions=regions,
        around=_around(clock, memory),
        link=about.link,
        base_bytes=memory.base_bytes,
        base={**about.base, "other": max(0, memory.base_bytes - sum(about.base.values()))},
        host_limit_bytes=about.host_limit_bytes,
        tokens=about.tokens,
        device_bytes=about.device_bytes,
        graphs=about.graphs,
    )
    return dataclasses.replace(profile, host=host_of(times, names, regions, ops))


def _saved_bytes(visit: VisitNotes) -> int:
    """What a pass saved that keeps, with what is behind it; one that runs again saves its inputs alone."""
    return sum(seen.nbytes for seen in visit.saves) + (visit.stuck_bytes if visit.saves else 0) + visit.behind_bytes


def _seconds(watch: StepWatch, start: Note, end: Note) -> float:
    """That compute took from one to the other."""
    return watch.device.seconds_between(start.event, end.event)


def _is_one_by_one(watch: StepWatch, names: Collection[str]) -> bool:
    """Whether forward left each region before it entered the next: a module may call itself, or another region."""
    ways = [note.place for note in watch.notes if note.region in names and note.place in (Place.ENTERED, Place.LEFT)]
    return ways == [Place.ENTERED, Place.LEFT] * (len(ways) // 2)


class _Step(NamedTuple):
    """What there is to read."""

    clock: Clock
    memory: "_Curve"
    device: Device
    about: Surroundings
    grad_bytes: Sequence[int]
    slowdown: float

    def region(self, k: int, visit: VisitNotes, second: VisitNotes | None) -> RegionProfile:
        """The `k`-th pass. Its saves are seen in its `second` run, or without one in forward, where they stay."""
        looked_at = visit if second is None else second
        staying = {seen.index for seen in visit.inputs if seen.shares == OUTSIDE}
        saves = tuple(self._save(seen, looked_at, seen.given in staying) for seen in looked_at.saves)
        kept_bytes = sum(save.nbytes for save in saves) + looked_at.stuck_bytes if second is None else 0
        inputs = tuple(self._save(seen, visit) for seen in visit.inputs)
        # A second run has its inputs before it begins, and what it works with is counted from there.
        at_hand_bytes = kept_bytes if second is None else sum(save.nbytes for save in inputs)
        is_hidden = visit.region in self.about.compiled
        return RegionProfile(
            name=visit.region,
            forward_s=self.clock.forward_s[k],
            backward_s=self.clock.backward_s[k],
            again_s=self.clock.again_s[k],
            saves=saves,
            stuck_bytes=looked_at.stuck_bytes,
            inputs=inputs,
            dear=() if is_hidden else tuple(self._dear(seen, looked_at) for seen in self._holdable(looked_at)),
            # What leaves meanwhile makes room that is no room of the region's own.
            forward_work_bytes=max(0, self._forward_work(k, visit, saves) + visit.freed_bytes - kept_bytes),
            backward_work_bytes=self.memory.backward_work[k] + at_hand_bytes,
            grad_bytes=max(self.grad_bytes[k], self.memory.left_bytes[k] if second is not None else 0),
            moved_work_bytes=0 if second is None else self.memory.moved_work(k, saves, at_hand_bytes),
            unasked_bytes=self.memory.unasked(k, saves),
            behind_bytes=visit.behind_bytes,
            has_dead_saves=looked_at.has_dead_saves,
        )

    def _forward_work(self, k: int, visit: VisitNotes, saves: Sequence[Save]) -> int:
        """With what runs behind it, up to the next region: there what it saved last may still wait to leave."""
        if visit.behind_peak_bytes <= self.memory.when_left_bytes[k]:
            return self.memory.forward_work[k]
        newest_bytes = next((save.nbytes for save in reversed(saves) if save.nbytes > 0), 0)
        behind_bytes = visit.behind_peak_bytes - visit.behind_bytes - self.memory.when_entered_bytes[k]
        return max(self.memory.forward_work[k], behind_bytes + newest_bytes)

    def _save(self, seen: Seen, visit: VisitNotes, stays: bool = False) -> Save:
        """`stays`: it is an input that something outside of all regions has stay."""
        at_s = self._between(visit.began, seen.event)
        if stays and seen.shares == NOBODY:
            return Save(seen.index, 0, at_s, OUTSIDE)
        return Save(seen.index, seen.nbytes, at_s, seen.shares)

    def _holdable(self, visit: VisitNotes) -> list[Seen]:
        return [seen for seen in visit.dear if (visit.region, seen.index) not in self.about.overwritten]

    def _dear(self, seen: Seen, visit: VisitNotes) -> Dear:
        at_s, again_s = self._between(visit.began, seen.event), self._between(seen.before, seen.event)
        alone = 1 << seen.index
        led = _led(visit, alone)
        led_s = [self._between(before, after) for calls, before, after in visit.between if calls == alone]
        return Dear(
            index=seen.index,
            nbytes=seen.nbytes,
            at_s=at_s,
            again_s=again_s * self.slowdown,
            op=seen.op,
            led=led,
            led_s=sum(led_s) * self.slowdown if led else 0.0,
            led_ops=len(led_s) if led else 0,
            users=tuple(sorted(visit.users[seen.index])) if led else (),
        )

    def _between(self, start: StreamEvent, end: StreamEvent) -> float:
        return max(0.0, self.device.seconds_between(start, end))


def _led(visit: VisitNotes, call: int) -> tuple[int, ...]:
    """Indices of the saves that a dear call leads to; none if one of them went to a kernel that no mode sees: that
    would need its bytes."""
    saves = [save for save in visit.saves if save.trace is not None and save.trace.calls & call]
    is_seen = all(save.trace is not None and save.trace.is_used for save in saves)
    is_spoiled = visit.lineage is None or visit.lineage.spoiled & call != 0
    return tuple(save.index for save in saves) if is_seen and not is_spoiled else ()


def _slowdown(clock: Clock, detailed: Clock) -> float:
    """How much longer second runs take where nobody looks into them.

    A device that waits now and then, as it does for what is fetched in the detailed step, is the faster in between: it
    has power to spare. Never less than 1: to look takes time too. Of the regions' ratios the middle one: a hiccup in
    one of them says nothing of the others.
    """
    ratios = [
        again / looked_at for again, looked_at in zip(clock.again_s, detailed.again_s, strict=True) if looked_at > 0
    ]
    return min(max(1.0, statistics.median(ratios)), _MOST_SLOWDOWN) if ratios else 1.0


def _grad_bytes(regions: Sequence[str], grads: Mapping[str, int]) -> list[int]:
    """Per pass. A region's last pass has its gradient, for its backward is the first that makes it; those of the head,
    and of regions that the step did not come by, are there before the last region's backward begins."""
    left = dict(grads)
    found = [left.pop(region, 0) for region in reversed(regions)][::-1]
    return [*found[:-1], found[-1] + sum(left.values())]


class _Curve:
    """Bytes per region, from the notes of a detailed step, in order of forward.

    Args:
        regions_bytes: what the regions kept on the device in it.
    """

    def __init__(self, watch: StepWatch, names: Collection[str], regions_bytes: int) -> None:
        notes = [note for note in watch.notes if not note.region or note.region in names]
        self.base_bytes = notes[0].memory.allocated_bytes
        entered = [k for k, note in enumerate(notes) if note.place is Place.ENTERED]
        self.regions = [notes[k].region for k in entered]
        left = [k for k, note in enumerate(notes) if note.place is Place.LEFT]
        self.kept_bytes = _more(notes[entered[0]], notes[0]) if entered else 0
        self.forward_work = [_peak(notes[a + 1 : b + 1], notes[a]) for a, b in zip(entered, left, strict=True)]
        self.when_entered_bytes = [notes[k].memory.allocated_bytes for k in entered]
        self.when_left_bytes = [notes[k].memory.allocated_bytes for k in left]
        forward_end = next(note for note in notes if note.place is Place.FORWARD)
        # What a simulated step has there anyway, and what the measured one had instead of what is simulated.
        known_bytes = self.base_bytes + self.kept_bytes + regions_bytes + watch.waiting_bytes - watch.freed_common_bytes
        self.held_bytes = max(0, forward_end.memory.allocated_bytes - known_bytes)
        spans = list(backward_spans(notes))
        first = spans[0].at if spans else len(notes) - 1
        behind = [note.memory.peak_bytes for note in notes[left[-1] + 1 : first + 1]] if left else []
        self.turns = list(_turns(watch, notes[left[-1]] if left else notes[0], known_bytes, max(behind, default=0)))
        self._spans = by_forward(((span.region, span) for span in spans), self.regions)
        self.backward_work = [0 if span is None else _peak(span.notes, span.begin) for span in self._spans]
        self.left_bytes = self._left(spans, [visit for visit in watch.visits if visit.region in names])

    def _left(self, spans: Sequence[Span], visits: Sequence[VisitNotes]) -> list[int]:
        """What the backward of each pass leaves allocated of the gradient of what several regions are given, which
        stays to the end: by what is there when the next one begins. With its inputs a second run has begun."""
        inputs = [sum(seen.nbytes for seen in visit.inputs) for visit in visits]
        behind = [visit.behind_bytes for visit in visits]
        most = max((visit.common_bytes for visit in visits), default=0)
        passes = {span.at: k for k, span in enumerate(self._spans) if span is not None}
        left = [0] * len(self._spans)
        for span, following in pairwise(span for span in spans if span.at in passes):
            own, other = passes[span.at], passes[following.at]
            more = following.begin.memory.allocated_bytes - span.begin.memory.allocated_bytes
            left[own] = min(max(0, more + inputs[own] - inputs[other] + behind[other]), most)
        return left

    def unasked(self, k: int, saves: Sequence[Save]) -> int:
        """Bytes of those that backward does not ask for. Where nobody was seen to ask, none."""
        asked = self._asked(k, saves)
        return sum(save.nbytes for save in saves if asked and save.index not in asked)

    def moved_work(self, k: int, saves: Sequence[Save], at_hand_bytes: int) -> int:
        """Most that the backward of the `k`-th pass allocates behind its second run, the inputs that were `at_hand`
        counted, without those of the `saves` that it asked for later. 0 if it was not seen to ask."""
        span, asked = self._spans[k], self._asked(k, saves)
        if span is None or not asked:
            return 0
        untouched = {save.index: save.nbytes for save in saves if save.index in asked}  # the others are gone by then
        most = 0
        for note in span.behind_again:
            beyond = note.memory.peak_bytes - span.begin.memory.allocated_bytes + at_hand_bytes
            most = max(most, beyond - sum(untouched.values()))
            if _asks(note, span):
                untouched.pop(_owner(saves, note.save), None)
        return most

    def _asked(self, k: int, saves: Sequence[Save]) -> set[int]:
        """Indices of the saves that backward asks for, or for what shares their memory."""
        span = self._spans[k]
        asking = () if span is None else (note for note in span.behind_again if _asks(note, span))
        return {_owner(saves, note.save) for note in asking}


def _asks(note: Note, span: Span) -> bool:
    """For a save of the region whose backward it is: in between, those of another may be asked for."""
    return note.place is Place.ASKED and note.region == span.region


def _owner(saves: Sequence[Save], index: int) -> int:
    """The save whose memory the one of this index shares, or itself."""
    return next((save.shares for save in saves if save.index == index and save.shares >= 0), index)


def _more(note: Note, since: Note) -> int:
    """What is allocated at `note` and was not at `since`."""
    return max(0, note.memory.allocated_bytes - since.memory.allocated_bytes)


def _peak(notes: Sequence[Note], since: Note) -> int:
    """Most beyond what was allocated at `since`; each note has the peak since the one before it."""
    return max(0, max((note.memory.peak_bytes for note in notes), default=0) - since.memory.allocated_bytes)


def _turns(watch: StepWatch, left: Note, known_bytes: int, last_peak_bytes: int) -> Iterator[Turn]:
    """Where what is on its way could leave behind the last region, which was `left` then, and the most that is
    allocated from there on, beyond the bytes that are `known`."""
    peaks = [*(seen.memory.peak_bytes for seen in watch.outside), last_peak_bytes]
    times = [max(0.0, watch.device.seconds_between(left.event, seen.event)) for seen in watch.outside]
    places = [(-1, 0.0), *zip((seen.save for seen in watch.outside), times, strict=True)]
    for (save, at_s), peak_bytes in zip(places, peaks, strict=True):
        yield Turn(save, at_s, max(0, peak_bytes - known_bytes))


def _around(clock: Clock, memory: _Curve) -> Around:
    return Around(
        before_s=clock.before_s,
        after_s=clock.after_s,
        turn_s=clock.turn_s,
        end_s=clock.end_s,
        kept_bytes=memory.kept_bytes,
        held_bytes=memory.held_bytes,
        turns=tuple(memory.turns),
    )
