"""Seconds of each region, from the events of one recorded step. Pure.

An event has two clocks: the compute stream's, and the CPU's at the time of queueing.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from ebbtide._profiling.recorder import RegionRecord, StepEvent, StepEventKind

Item = TypeVar("Item", "RegionRecord", "BackwardInterval")

Clock = Callable[[StepEvent, StepEvent], float]
"""Seconds from the first event to the second; negative if the second came first."""


class StepParts:
    """Passes through the regions `names` in one step, at least one.

    Attributes:
        events: those of the named regions and outside of all regions.
        entered, left, forward_end: indices of the events at which forward enters and leaves regions, and ends.
        regions: names, one for each pass, in order of forward.
        intervals: parts of backward, in order.
        own: interval of each pass, in order of forward; None without backward.
    """

    def __init__(self, events: Sequence[StepEvent], names: Collection[str]) -> None:
        self.events = [each for each in events if not each.region or each.region in names]
        self.entered = indices_of(self.events, StepEventKind.REGION_ENTERED)
        self.left = indices_of(self.events, StepEventKind.REGION_LEFT)
        self.forward_end = indices_of(self.events, StepEventKind.FORWARD_ENDED)[0]
        self.regions = [self.events[k].region for k in self.entered]
        self.intervals = list(backward_intervals(self.events))
        self.own = by_forward(self.intervals, self.regions)


class RegionTimes(StepParts):
    """Seconds of each region in one step, in order of forward.

    Args:
        stalls: begin and end of each wait of compute for a copy. They count to no region: a plan has its own.

    Attributes:
        forward_s, recompute_s, backward_s: forward, recomputation and backward of each pass.
        prepared_s: part of `forward_s` that prepares the recomputation; 0 if unknown.
        before_s, after_s: before and after the regions in forward.
        backward_before_s, backward_after_s: before and after the regions in backward.
    """

    def __init__(
        self,
        events: Sequence[StepEvent],
        names: Collection[str],
        clock: Clock,
        stalls: Sequence[tuple[StepEvent, StepEvent]] = (),
    ) -> None:
        super().__init__(events, names)
        self._clock = clock
        self._stalls = [(clock(events[0], begin), clock(events[0], end)) for begin, end in stalls]
        passes = [self.events[a : b + 1] for a, b in pairwise([*self.entered, self.left[-1]])]
        self.forward_s = [self._seconds(each) for each in passes]
        self.prepared_s = [self._preparation(each) for each in passes]
        before, forward_end = self.events[: self.entered[0] + 1], self.events[self.forward_end]
        self.before_s = self._seconds(before)
        self.after_s = self._between(self.events[self.left[-1]], forward_end)
        first = self.intervals[0].at if self.intervals else self.forward_end
        self.backward_before_s = self._seconds(self.events[self.forward_end : first + 1])
        self.backward_after_s = self._between(self.intervals[-1].end, self.events[-1]) if self.intervals else 0.0
        self.recompute_s = [self._between(i.begin, i.recomputed) if i and i.recomputed else 0.0 for i in self.own]
        self.backward_s = [self._backward(each) if each else 0.0 for each in self.own]

    def _preparation(self, events: Sequence[StepEvent]) -> float:
        """Time of one pass before and after the region's own code."""
        at = {each.kind: each for each in events[1:] if each.region == events[0].region}
        runs, ran, left = StepEventKind.REGION_RUNS, StepEventKind.REGION_RAN, StepEventKind.REGION_LEFT
        if not {runs, ran, left} <= at.keys():
            return 0.0
        return self._between(events[0], at[runs]) + self._between(at[ran], at[left])

    def _backward(self, interval: "BackwardInterval") -> float:
        events = [interval.begin, *interval.events]
        if interval.recomputed is not None:
            events = events[events.index(interval.recomputed) :]
        return self._seconds(events)

    def _seconds(self, events: Sequence[StepEvent]) -> float:
        """From the first of consecutive events to the last, without spinning, which only measured steps have. 0 without
        events: a backward inside of forward begins before forward ends."""
        if not events:
            return 0.0
        spun_s = sum(self._between(a, b) for a, b in pairwise(events) if a.kind is StepEventKind.SPIN_BEGAN)
        return max(0.0, self._between(events[0], events[-1]) - spun_s)

    def _between(self, start: StepEvent, end: StepEvent) -> float:
        seconds = self._clock(start, end)
        if self._stalls:
            start_s = self._clock(self.events[0], start)
            end_s = start_s + seconds
            seconds -= sum(max(0.0, min(end_s, until) - max(start_s, since)) for since, until in self._stalls)
        return max(0.0, seconds)


class BackwardInterval(NamedTuple):
    """A region's part of backward.

    Attributes:
        at: index of `begin` among all events.
        begin: start of the recomputation or, without recomputation, the first read of a saved tensor of the region.
        recomputed: end of the recomputation; None without recomputation.
        events: events after `begin`, up to the beginning of the next interval. Work outside of all regions between two
            intervals belongs to the first of the two. The last interval ends with the first read outside of regions.
    """

    region: str
    at: int
    begin: StepEvent
    recomputed: StepEvent | None
    events: Sequence[StepEvent]

    @property
    def end(self) -> StepEvent:
        return self.events[-1]

    @property
    def after_recompute(self) -> Sequence[StepEvent]:
        """Events after the recomputation; empty without recomputation."""
        ended = indices_of(self.events, StepEventKind.RECOMPUTE_ENDED)
        return self.events[ended[-1] + 1 :] if ended else ()


def backward_intervals(events: Sequence[StepEvent]) -> Iterator[BackwardInterval]:
    """Intervals of all regions in order of backward."""
    passes = Counter(each.region for each in events if each.kind is StepEventKind.REGION_ENTERED)
    has_recomputation = any(each.kind is StepEventKind.RECOMPUTE_BEGAN for each in events)
    starts = StepEventKind.RECOMPUTE_BEGAN if has_recomputation else StepEventKind.REGION_READ
    begin, recomputed, outside = 0, None, 0
    for k, each in enumerate(events):
        is_read = each.kind is StepEventKind.REGION_READ
        if each.kind is StepEventKind.RECOMPUTE_ENDED:
            recomputed = each
        if is_read and not each.region:
            outside = outside or k  # end of the current interval, unless another region follows
        elif is_read and each.region == events[begin].region and passes[each.region] == 1:
            outside = 0  # the read outside was in the middle of the region's backward
        elif each.kind in (starts, StepEventKind.STEP_ENDED):
            end = k if each.region else outside or k
            if events[begin].region:
                own = events[begin + 1 : end + 1]
                yield BackwardInterval(events[begin].region, begin, events[begin], recomputed, own)
            begin, recomputed, outside = k, None, 0


def indices_of(events: Sequence[StepEvent], kind: StepEventKind) -> list[int]:
    """Indices of all events of one kind."""
    return [k for k, each in enumerate(events) if each.kind is kind]


def by_forward(backward: Iterable[Item], regions: Sequence[str]) -> list[Item | None]:
    """Items in the order of forward instead of backward, with None for a pass without an item.

    Backward visits the last pass of a region first.
    """
    left: dict[str, list[Item]] = {}
    for item in backward:
        left.setdefault(item.region, []).append(item)
    return [left[region].pop() if left.get(region) else None for region in regions]
