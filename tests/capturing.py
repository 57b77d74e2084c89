"""A simulator that records graphs as CUDA does: runs recorded work, and raises if CUDA would refuse."""

import contextlib
from collections.abc import Generator

from ebbtide._devices.sim import Order, SimDevice, SimStream
from ebbtide._types import Wait


class IllegalError(Exception):
    """An error of CUDA; most of them end the capture too."""


class CapturingSim(SimDevice):
    """The eager view of a device on whose compute stream `capture()` records a graph.

    Attributes:
        can_tell: whether `capture_id` knows; False is a machine without the driver's function.
        can_move: whether `for_capture` has a view to give; False is make_graphed_callables.
    """

    def __init__(self, seed: int = 0, order: Order = "late") -> None:
        super().__init__(seed, order)
        self.can_tell = True
        self.can_move = True
        self.asked = 0
        self._captures: dict[SimStream, int] = {}  # of every stream that takes part in a running capture
        self._count = 0
        self._last_copy: dict[SimStream, int] = {}

    @contextlib.contextmanager
    def capture(self) -> Generator[int, None, None]:
        """As torch.cuda.graph(): waits for the device, records, and insists that all streams were joined."""
        origin = self.current_stream()
        self.finish()
        streams = [*self._compute, *self._lanes, *self._sides.values()]
        for stream in streams:
            for other in streams:
                stream.join(other.clock)
        self._count += 1
        self._captures[origin] = capture = self._count
        try:
            yield capture
        finally:
            took_part = list(self._captures)
            self._captures.clear()
        for stream in took_part:
            if origin.clock.get(stream.name, 0) < self._last_copy.get(stream, 0):
                self._refuse(f"the capture ends while {stream.name} is not joined")
        for stream in took_part:
            # Memory of the capture freed from now on stays in the graph's pool; only another capture may receive the
            # memory, after waiting for the device.
            for other in took_part:
                stream.join(other.clock)

    def is_capturing(self, capture: int) -> bool:
        return capture in self._captures.values()

    def capture_on(self, stream: SimStream) -> int | None:
        return self._captures.get(stream)

    # -- the Device protocol ---------------------------------------------------------------------------------------

    def matches_capture(self) -> bool:
        self.asked += 1
        return self.current_stream() not in self._captures

    def capture_id(self) -> int | None:
        return self._captures.get(self.current_stream()) if self.can_tell else None

    def for_capture(self, capture: int):
        return CapturedSim(self, capture) if self.can_move else None

    def record(self, stream):
        event = super().record(stream)
        event.capture = self._captures.get(stream)
        return event

    def wait(self, stream, event, why: Wait) -> None:
        mine = self._captures.get(stream)
        if mine is None and event.capture is not None and self.is_capturing(event.capture):
            self._captures[stream] = event.capture  # a stream joins a capture by waiting
        elif mine != event.capture:
            self._refuse(f"{stream.name} in capture {mine} waits for an event of capture {event.capture} ({why.name})")
        super().wait(stream, event, why)

    def copy(self, dst, src, stream) -> None:
        super().copy(dst, src, stream)
        self._last_copy[stream] = stream.clock[stream.name]

    def is_done(self, event) -> bool:
        self._check_asked(event)
        return super().is_done(event)

    def seconds_between(self, start, end) -> float:
        self._check_asked(start)
        self._check_asked(end)
        return super().seconds_between(start, end)

    def host_bytes(self, nbytes: int):
        if self._captures:
            self._refuse(f"{nbytes} bytes of pinned memory allocated in a capture")
        return super().host_bytes(nbytes)

    def free_after(self, storage, event, owner) -> None:
        if owner not in self._captures:
            super().free_after(storage, event, owner)

    def _check_asked(self, event) -> None:
        if self._captures or event.capture is not None:
            self._refuse("an event is asked in a capture, or is of one")

    def _refuse(self, what: str) -> None:
        self.faults.append(what)  # finalisers cannot raise
        raise IllegalError(what)


class CapturedSim:
    """The view of one capture."""

    supports_timing = False

    def __init__(self, whole: CapturingSim, capture: int) -> None:
        self._whole = whole
        self._capture = capture
        self.torch_device = whole.torch_device
        self.current_stream = whole.current_stream
        self.new_stream = whole.new_stream
        self.allocate = whole.allocate
        self.host_bytes = whole.host_bytes
        self.record = whole.record
        self.wait = whole.wait
        self.copy = whole.copy
        self.mark_used = whole.mark_used
        self.is_done = whole.is_done  # refuses
        self.seconds_between = whole.seconds_between

    def matches_capture(self) -> bool:
        return self.capture_id() == self._capture

    def capture_id(self) -> int | None:
        return self._whole.capture_id()

    def for_capture(self, capture: int) -> None:
        return None

    def free_after(self, storage, event, owner) -> None:
        if self._whole.capture_on(owner) == self._capture:
            self._whole.wait(owner, event, Wait.ABANDONED)
