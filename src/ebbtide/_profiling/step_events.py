"""Follows one step from the outside: when it began, when backward ended, its peak, and whether the host kept ahead."""

import abc
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ebbtide._utils.torch_private import at_end_of_backward, graph_task_id
from ebbtide.types import Device, RecomputeRecorder, StreamEvent


class UntilBackwardEnds(abc.ABC):
    """Ends with the backward that is the first to read what its forward saved."""

    def __init__(self) -> None:
        self.is_over = False
        self.on_end: Callable[[], None] | None = None
        self._is_awaited = False

    def _backward_began(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self._conclude()
        self.is_over = True
        if self.on_end is not None:
            self.on_end()
            self.on_end = None

    @abc.abstractmethod
    def _conclude(self) -> None:
        """Backward has ended: take the last notes."""


class Point(NamedTuple):
    """Where a step comes to a region.

    Attributes:
        was_behind: compute had not come to the point before by then: all that lies between the two was queued when
            compute began with it.
    """

    region: str
    event: StreamEvent
    was_behind: bool


class Queueing:
    """How one step was queued. In a captured part of it nobody is asked.

    Attributes:
        forward, backward: the points where it came to its regions, in order. In backward that is where something of
            them is read first, or their second run begins.
        seconds: that the host took for its forward, from its first region to the end of its last one; where compute
            does not wait for it, the host may wait for compute there: the device queues so many kernels and no more.
            (About a thousand: regions of more look as if compute waited for the host.)
    """

    def __init__(self, device: Device) -> None:
        self.forward: list[Point] = []
        self.backward: list[Point] = []
        self.seconds = 0.0
        self._device = device
        self._began_s: float | None = None

    def entered(self, region: str) -> None:
        if self._began_s is None:
            self._began_s = time.perf_counter()
        self._come_to(region, self.forward)

    def left(self) -> None:
        if self._began_s is not None:
            self.seconds = time.perf_counter() - self._began_s

    def read(self, region: str) -> None:
        if not self.backward or self.backward[-1].region != region:
            self._come_to(region, self.backward)

    def _come_to(self, region: str, points: list[Point]) -> None:
        if self._device.matches_capture():
            was_behind = bool(points) and not self._device.is_done(points[-1].event)
            points.append(Point(region, self._device.record(self._device.current_stream()), was_behind))

    def seconds_between(self, start: Point, end: Point) -> float:
        """Of compute, which has passed both."""
        return self._device.seconds_between(start.event, end.event)

    @property
    def is_waited_for(self) -> bool:
        """Compute was in the last region that was queued, or through with it, when the host came to most others."""
        caught_up = [not point.was_behind for point in self.forward[1:]]
        return 2 * sum(caught_up) > len(caught_up)


class StepMonitor(UntilBackwardEnds):
    """One step, looked at from the outside. Costs two events, and two for each region.

    Args:
        device: where the model computes.
        looks_at_peak: find out the most that was allocated too. The device's own record of it begins anew.
    """

    def __init__(self, device: Device, looks_at_peak: bool) -> None:
        super().__init__()
        self.device = device
        self.looks_at_peak = looks_at_peak
        self.is_alone = True
        """No other step ran beside it. For whoever knows to say."""
        self.queueing = Queueing(device) if device.is_async else None
        self.peak_bytes = 0
        self._region_read: str | None = None
        if looks_at_peak:
            device.reset_peak_stats()
        self._began = device.record(device.current_stream())
        self._ended: StreamEvent = None

    def forward_ended(self) -> None:
        self._look()

    def _look(self) -> None:
        if self.looks_at_peak:
            self.peak_bytes = max(self.peak_bytes, self.device.memory().peak_bytes)

    def entered(self, region: str) -> None:
        self._look()
        if self.queueing is not None:
            self.queueing.entered(region)

    def left(self, region: str) -> None:  # noqa: ARG002 (which one does not matter)
        self._look()
        if self.queueing is not None:
            self.queueing.left()

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        pass

    def read(self, region: str) -> None:
        # To look takes as long as a few operators: where that misses nothing, once a region.
        is_seen = region == self._region_read and self.device.tracks_peak
        if not is_seen and graph_task_id() != -1:
            self._region_read = region
            self._backward_began()
            self._look()
            # What comes behind its backward (a graph that is kept, or ran in part) is none of the step.
            if self.queueing is not None and region and not self.is_over:
                self.queueing.read(region)

    def running(self, region: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 (one is like the others)
        return contextlib.nullcontext()

    def running_again(self, region: str) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:
        self.read(region)
        return contextlib.nullcontext()

    def _conclude(self) -> None:
        self._ended = self.device.record(self.device.current_stream())
        self._look()

    @property
    def is_readable(self) -> bool:
        """Whether all its events have passed. Never waits."""
        return self.is_over and self.device.is_done(self._ended)

    def seconds(self) -> float:
        """Of the whole step, forward and backward."""
        return self.device.seconds_between(self._began, self._ended)
