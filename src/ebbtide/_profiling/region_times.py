"""When a step came by: seconds per region, from the notes of one step. Pure.

Two clocks stand in a note: when compute was there, and when the host was that queued it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from ebbtide._profiling.recorder import Note, Place

Item = TypeVar("Item")

Between = Callable[[Note, Note], float]
"""Seconds from one note to another; below zero if the second was the first."""


class Clock:
    """Seconds per region, from the notes of a step, in order of forward.

    Args:
        notes: of the step, with those of other regions.
        names: of the regions.
        between: the clock.

    Attributes:
        regions: their names, one per pass.
        forward_s, again_s, backward_s: of each pass.
        prepared_s: what it takes of `forward_s` to prepare the pass to run again; 0 where that was not seen.
        before_s, after_s, turn_s, end_s: outside of them, as `Around` says.
    """

    def __init__(self, notes: Sequence[Note], names: Collection[str], between: Between) -> None:
        self._seconds = between
        notes = [note for note in notes if not note.region or note.region in names]
        entered = [k for k, note in enumerate(notes) if note.place is Place.ENTERED]
        ends = [*entered[1:], max((k for k, note in enumerate(notes) if note.place is Place.LEFT), default=0)]
        forward_end = next(k for k, note in enumerate(notes) if note.place is Place.FORWARD)
        self.regions = [notes[k].region for k in entered]
        self.forward_s = [self._between(notes[a], notes[b]) for a, b in zip(entered, ends, strict=True)]
        self.prepared_s = [self._prepared_s(notes[a : b + 1]) for a, b in zip(entered, ends, strict=True)]
        first = entered[0] if entered else 0
        self.before_s = max(0.0, self._between(notes[0], notes[first]) - self._held_s(notes[:first]))
        self.after_s = self._between(notes[ends[-1]], notes[forward_end])
        spans = list(backward_spans(notes))
        turn_s = self._between(notes[forward_end], spans[0].begin) if spans else 0.0
        self.turn_s = max(0.0, turn_s - self._held_s(notes[forward_end:]))
        self.end_s = self._between(spans[-1].end, notes[-1]) if spans else 0.0
        in_order = by_forward(((span.region, span) for span in spans), self.regions)
        self.again_s = [0.0 if s is None or s.again is None else self._between(s.begin, s.again) for s in in_order]
        self.backward_s = [0.0 if s is None else self._between(s.again or s.begin, s.end) for s in in_order]

    def _prepared_s(self, notes: Sequence[Note]) -> float:
        """Of a pass, from where it was entered on: what is before its own code, and between that and its end."""
        at = {note.place: note for note in notes[1:] if note.region == notes[0].region}
        if not {Place.RUNS, Place.RAN, Place.LEFT} <= at.keys():
            return 0.0
        return self._between(notes[0], at[Place.RUNS]) + self._between(at[Place.RAN], at[Place.LEFT])

    def _held_s(self, notes: Sequence[Note]) -> float:
        """Of what was measured only, and no part of a step."""
        return sum(self._between(a, b) for a, b in pairwise(notes) if a.place is Place.HELD)

    def _between(self, start: Note, end: Note) -> float:
        return max(0.0, self._seconds(start, end))


class Span(NamedTuple):
    """A region's part of backward.

    Attributes:
        at: how many notes are before `begin`.
        begin: its second run begins or, without one, something of it is read first.
        again: where its second run ended, if it had one.
        notes: all behind `begin`, up to the end, which is where the next one's part begins. What is outside of all
            regions between the two is part of it. Behind the last, the end is where something outside is read.
    """

    region: str
    at: int
    begin: Note
    again: Note | None
    notes: Sequence[Note]

    @property
    def end(self) -> Note:
        return self.notes[-1]

    @property
    def behind_again(self) -> Sequence[Note]:
        """The notes behind its second run; none without one."""
        ended = [k for k, note in enumerate(self.notes) if note.place is Place.AGAIN_ENDED]
        return self.notes[ended[-1] + 1 :] if ended else ()


def backward_spans(notes: Sequence[Note]) -> Iterator[Span]:
    """In order of backward."""
    passes = Counter(note.region for note in notes if note.place is Place.ENTERED)
    has_second_runs = any(note.place is Place.AGAIN for note in notes)
    starts = Place.AGAIN if has_second_runs else Place.READ
    begin, again, outside = 0, None, 0
    for k, note in enumerate(notes):
        if note.place is Place.AGAIN_ENDED:
            again = note
        if note.place is Place.READ and not note.region:
            outside = outside or k  # where the part at hand ends, should no other region's follow
        elif note.place is Place.READ and note.region == notes[begin].region and passes[note.region] == 1:
            outside = 0  # what was read in between is inside of its backward
        elif note.place in (starts, Place.ENDED):
            end = k if note.region else outside or k
            if notes[begin].region:
                yield Span(notes[begin].region, begin, notes[begin], again, notes[begin + 1 : end + 1])
            begin, again, outside = k, None, 0


def by_forward(backward: Iterable[tuple[str, Item]], regions: Sequence[str]) -> list[Item | None]:
    """Of each pass, in the order of forward, what `backward` has in its own order: a region's last pass comes first."""
    left: dict[str, list[Item]] = {}
    for region, item in backward:
        left.setdefault(region, []).append(item)
    return [left[region].pop() if left.get(region) else None for region in regions]
