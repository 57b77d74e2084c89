"""Measures an engine's lanes with a few copies of its own, before planning: their rates, and what they cost compute."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from ebbtide._engine.engine import Engine
from ebbtide._types import Block, Stream, StreamEvent, Wait
from ebbtide._utils.sizes import MIB

_TURNS = 5
_FEW = 10  # kernels, to learn how long one takes
_MOST = 1000  # kernels beside copies: a store may be slow
_QUEUEING_S = 2e-3  # of a spin, in which the host queues two copies and the first kernels


class LinkCosts(NamedTuple):
    """Bytes per second of each direction alone, and seconds that compute loses per second of copying."""

    out: float
    back: float
    interference: float


def probe_link(engine: Engine) -> LinkCosts | None:
    """Costs of copies to and from the engine's store; None if the store has no room for two copies of 1 MiB.

    Copies of 64 MiB are timed, or of less in a smaller store. The call waits for the copies, and needs three times the
    size of a copy in device memory.
    """
    with _probe_of(engine) as probe:
        return None if probe is None else probe.costs()


def probe_duplex(engine: Engine) -> float | None:
    """Bytes per second of each direction while both copy; None, sizes and memory as for `probe_link`."""
    with _probe_of(engine) as probe:
        return None if probe is None else probe.duplex()


@contextlib.contextmanager
def _probe_of(engine: Engine) -> "Generator[_Probe | None]":
    """A probe that holds two blocks of the engine's store, as large as fit; None without room."""
    with engine.lock:
        for nbytes in (64 * MIB, 16 * MIB, 4 * MIB, MIB):
            blocks = [block for block in (engine.store.reserve(nbytes) for _ in range(2)) if block is not None]
            try:
                if len(blocks) == 2:
                    yield _Probe(engine, nbytes, *blocks)
                    return
            finally:
                for block in blocks:
                    engine.store.give_back(block)
        yield None


class _Probe:
    """Copies of `nbytes` to the block `first` and from the block `second`."""

    def __init__(self, engine: Engine, nbytes: int, first: Block, second: Block) -> None:
        self._device, self._store, self._nbytes = engine.device, engine.store, nbytes
        self._first, self._second = first, second
        self._compute = engine.device.current_stream()
        self._outbound, self._inbound = engine.device.new_stream("probe out"), engine.device.new_stream("probe in")
        self._source, self._target, self._work = (engine.device.allocate(nbytes, self._compute) for _ in range(3))

        self._source.zero_()
        self._device.wait(self._outbound, self._device.record(self._compute), Wait.READY)
        filled = self._store.write(self._second, self._source, self._outbound)  # warms up the lane, too
        self._device.wait(self._inbound, filled, Wait.READY)

    def costs(self) -> LinkCosts:
        out_s = min(self._seconds(self._outbound, self._write) for _ in range(3))
        back_s = min(self._seconds(self._inbound, self._read) for _ in range(3))
        lost = self._interference(min(out_s, back_s)) if self._device.is_async else 0.0
        return LinkCosts(self._nbytes / out_s, self._nbytes / back_s, lost)

    def duplex(self) -> float:
        return self._nbytes / min(self._seconds(self._compute, self._write_and_read) for _ in range(_TURNS))

    def _write_and_read(self) -> StreamEvent:
        for landed in (self._write(), self._read()):
            self._device.wait(self._compute, landed, Wait.ABANDONED)
        return self._device.record(self._compute)

    def _write(self) -> StreamEvent:
        return self._store.write(self._first, self._source, self._outbound)

    def _read(self) -> StreamEvent:
        return self._store.read(self._second, self._target, self._inbound)

    def _seconds(self, stream: Stream, *do: Callable[[], StreamEvent]) -> float:
        """Time on `stream` from now to the end of the last of `do`. Waits for all of them."""
        began = self._device.record(stream)
        ended = [each() for each in do]
        for event in ended:
            self._device.wait(self._compute, event, Wait.ABANDONED)  # the memory is freed in the order of compute
        while not all(map(self._device.is_done, ended)):
            time.sleep(1e-4)
        return max(self._device.seconds_between(began, ended[-1]), 1e-9)  # a simulated clock may stand still

    def _interference(self, copy_s: float) -> float:
        """What a kernel bound by memory loses per second of either lane, while both copy. A kernel bound by arithmetic
        loses less, so plans err on the slow side.

        The kernels take as long as a copy: most of a copy to a slow store does not touch the device.
        """
        self._work.zero_()
        once_s = self._kernels_s(_FEW) / _FEW
        count = min(max(1, round(copy_s / once_s)), _MOST)
        self._kernels_s(count, self._write, self._read)  # clocks rise
        turns = [(self._kernels_s(count), self._kernels_s(count, self._write, self._read)) for _ in range(_TURNS)]
        alone_s, beside_s = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
        return max(0.0, beside_s - alone_s) / (2 * beside_s)

    def _kernels_s(self, count: int, *copies: Callable[[], StreamEvent]) -> float:
        """Duration of `count` kernels beside `copies`, all queued before the first one starts."""
        self._device.spin(self._compute, _QUEUEING_S)
        begins = self._device.record(self._compute)
        for stream in (self._outbound, self._inbound):
            self._device.wait(stream, begins, Wait.READY)
        return self._seconds(self._compute, *copies, functools.partial(self._kernels, count))

    def _kernels(self, count: int) -> StreamEvent:
        for _ in range(count):
            self._work.add_(1)
        return self._device.record(self._compute)
