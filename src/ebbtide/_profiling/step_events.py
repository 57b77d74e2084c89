"""Observers of one training step: start, end of backward, peak memory.

Nothing in this file waits for the device. Times are read from events that have passed.
"""

import abc
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import torch

from ebbtide._engine.stats import StatsRecorder, WatchedCopies
from ebbtide._profiling.profile import in_flight
from ebbtide._profiling.timeline import Interval, Timeline, Work
from ebbtide._types import Device, RecomputeRecorder, StreamEvent
from ebbtide._utils.torch_private import at_end_of_backward, graph_task_id


class BackwardObserver(abc.ABC):
    """Ends with the first backward that reads a tensor saved by the observed forward.

    Attributes:
        is_interrupted: other observed forwards or backwards of the process ran between forward and backward.
    """

    _passes = 0  # observed forwards begun and backwards ended, in all of the process

    def __init__(self) -> None:
        BackwardObserver._passes += 1
        self._passes_before = 0
        self.is_interrupted = False
        self.is_over = False
        self.on_begin: Callable[[], None] | None = None  # of backward
        self.on_end: Callable[[], None] | None = None
        self._is_awaited = False

    def forward_ended(self) -> None:
        """The observed forward has ended."""
        self._passes_before = BackwardObserver._passes

    def _backward_began(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self.is_interrupted = BackwardObserver._passes > self._passes_before > 0
            at_end_of_backward(self._end)
            if self.on_begin is not None:
                self.on_begin()

    def _end(self) -> None:
        self._conclude()
        BackwardObserver._passes += 1
        self.is_over = True
        if self.on_end is not None:
            self.on_end()
            self.on_end = None

    @abc.abstractmethod
    def _conclude(self) -> None:
        """Record the last events: backward has ended."""


Observer = TypeVar("Observer", bound=BackwardObserver)


class InFlightStep(Generic[Observer]):
    """A forward whose backward may still come, and the observer of the step.

    Until backward ends, only the autograd graph keeps the observer alive. A dead reference therefore tells a dropped
    graph from a graph whose backward is pending.

    Attributes:
        ended: observer, set when backward has ended.
    """

    def __init__(self, observer: Observer) -> None:
        self.ended: Observer | None = None
        self._alive = weakref.ref(observer)
        observer.on_end = self._end

    def _end(self) -> None:
        self.ended = self._alive()

    @property
    def pending(self) -> Observer | None:
        """Observer while backward is still to come; None after backward and for a dropped graph."""
        return self._alive() if self.ended is None else None


class GraphOrder:
    """The order in which graphs run forward and backward, from one moment without a graph in flight to the next."""

    def __init__(self) -> None:
        self._passes: tuple[int, ...] = ()
        self._begun: list[int] = []
        self._forwards: list[weakref.ref[BackwardObserver]] = []

    def forward_begins(self, observer: BackwardObserver) -> None:
        """Count the graph that `observer` will follow."""
        self._conclude()
        number = len(self._forwards)
        self._begun.append(number)
        self._forwards.append(weakref.ref(observer))
        observer.on_begin = functools.partial(self._begun.append, number)

    @property
    def passes(self) -> tuple[int, ...]:
        """The last whole order of several graphs in flight, as in `Profile.passes`; empty until there is one."""
        self._conclude()
        return self._passes

    @property
    def in_flight(self) -> int:
        """Graphs whose backward has not ended."""
        found = (reference() for reference in self._forwards)
        return sum(observer is not None and not observer.is_over for observer in found)

    def _conclude(self) -> None:
        if self.in_flight > 0:
            return
        whole = [number for number in self._begun if self._begun.count(number) == 2]  # the rest was dropped
        numbers = {number: at for at, number in enumerate(dict.fromkeys(whole))}
        alive = in_flight(whole)
        if max(alive, default=0) > 1:
            # A longer order repeats itself once as many graphs are in flight as ever.
            enough = 2 * len(set(whole[: alive.index(max(alive)) + 1]))
            self._passes = tuple(numbers[number] for number in whole if numbers[number] < enough)
        self._begun, self._forwards = [], []


class StepMonitor(BackwardObserver):
    """Measures a planned step, for two events.

    Attributes:
        reads_peak: measure peak memory too, which resets the peak statistics of the device.
        is_alone: no other step overlapped. Set by the owner of the monitor.
        peak_bytes: largest peak seen; 0 without `reads_peak`.
        before_bytes: allocated at the begin; 0 without `reads_peak`.
    """

    def __init__(self, device: Device, reads_peak: bool) -> None:
        super().__init__()
        self.device = device
        self.reads_peak = reads_peak
        self.sees_saved_tensors = reads_peak and not device.tracks_peak  # the peak is the largest that was seen
        self.is_alone = True
        self.peak_bytes = 0
        self._region_read: str | None = None
        self.before_bytes = 0
        if reads_peak:
            device.reset_peak_stats()
            self.before_bytes = device.memory().allocated_bytes
        self._began = device.record(device.current_stream())
        self._ended: StreamEvent = None

    def forward_ended(self) -> None:
        super().forward_ended()
        self._read_peak()

    def _read_peak(self) -> None:
        """At the end alone, if the device keeps the peak: asking takes as long as several operators."""
        if self.reads_peak and (self._ended is not None or not self.device.tracks_peak):
            self.peak_bytes = max(self.peak_bytes, self.device.memory().peak_bytes)

    def entered(self, region: str) -> None:  # noqa: ARG002 (protocol of StepRecorder)
        self._read_peak()

    def left(self, region: str) -> None:  # noqa: ARG002 (as in `entered`)
        self._read_peak()

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        pass

    def read(self, region: str) -> None:
        # Recording costs as much as a few operators: once a region is enough if the device tracks peaks by itself.
        is_recorded = region == self._region_read and self.device.tracks_peak
        if not is_recorded and graph_task_id() != -1:
            self._region_read = region
            self._backward_began()
            self._read_peak()

    def running(self, region: str) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:  # noqa: ARG002 (as in `entered`)
        return contextlib.nullcontext()

    def recomputing(self, region: str) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:
        self.read(region)
        return contextlib.nullcontext()

    def _conclude(self) -> None:
        self._ended = self.device.record(self.device.current_stream())
        self._read_peak()

    @property
    def is_readable(self) -> bool:
        return self.is_over and self.device.is_done(self._ended)

    def seconds(self) -> float:
        """Duration of the step, forward and backward, on the compute stream."""
        return self.device.seconds_between(self._began, self._ended)


class TimelineMonitor(StepMonitor):
    """Measures a planned step and its lanes, for two or three events per region. Copies have events in any case.

    The backward of a region at rest counts to the region before, because no hook of a region at rest runs.

    Args:
        recorder: statistics of the handle, which note the copies of the step.
    """

    def __init__(self, device: Device, reads_peak: bool, recorder: StatsRecorder) -> None:
        super().__init__(device, reads_peak)
        self._recorder = recorder
        self._copies = recorder.watched = WatchedCopies()
        self._marks: list[tuple[Work, str, StreamEvent]] = []
        self._has_begun = False
        self._begun_ns = 0
        self._mark("other", "", self._began)

    def _mark(self, work: Work, region: str, event: StreamEvent = None) -> None:
        if not self._has_begun:  # the host is ahead of compute, which begins between two looks
            self._begun_ns, self._has_begun = time.time_ns(), self.device.is_done(self._began)
        self._marks.append((work, region, event or self.device.record(self.device.current_stream())))

    def entered(self, region: str) -> None:
        super().entered(region)
        self._mark("forward", region)

    def left(self, region: str) -> None:
        super().left(region)
        self._mark("other", "")

    def read(self, region: str) -> None:
        before = self._region_read
        super().read(region)
        if self._region_read != before:
            self._mark("backward" if region else "other", region)

    @contextlib.contextmanager
    def recomputing(self, region: str) -> Generator[RecomputeRecorder | None, None, None]:
        with super().recomputing(region) as recorder:
            self._mark("recompute", region)
            yield recorder
            self._mark("backward", region)

    def _conclude(self) -> None:
        super()._conclude()
        if self._recorder.watched is self._copies:
            self._recorder.watched = None

    def timeline(self) -> Timeline:
        """The step, once `is_readable`."""
        ends = [self._at(event) for _, _, event in self._marks[1:]] + [self.seconds()]
        found: list[Interval] = []
        begin_s = 0.0
        for (work, region, _), end_s in zip(self._marks, ends, strict=True):
            if end_s > begin_s:
                found.append(Interval("compute", work, region, begin_s, end_s))
                begin_s = end_s
        for point, end, region in self._copies.stalls:
            if self._at(end) > self._at(point):
                found.append(Interval("compute", "stall", region, self._at(point), self._at(end)))
        for ready, last, end, nbytes, region, is_out in self._copies.copies:
            if not self.device.is_done(end):
                continue  # of a parcel that backward used from the device
            from_s = max(self._at(ready), 0.0 if last is None else self._at(last))
            found.append(Interval("out" if is_out else "back", "copy", region, from_s, self._at(end), nbytes))
        return Timeline(tuple(each for each in found if each.end_s > each.begin_s), self.seconds(), self._begun_ns)

    def _at(self, event: StreamEvent) -> float:
        return max(0.0, self.device.seconds_between(self._began, event))
