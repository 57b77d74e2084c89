"""Measures the copy rates of an engine's lanes with a few copies of its own, before planning."""

import time
from collections.abc import Callable
from typing import NamedTuple

from ebbtide._engine.engine import Engine
from ebbtide._types import Block, Stream, StreamEvent, Wait
from ebbtide._utils.sizes import MIB


class Rates(NamedTuple):
    """Bytes per second of each direction alone."""

    out: float
    back: float


def probe_link(engine: Engine) -> Rates | None:
    """Copy rates of the engine's store; None if the store has no room for two copies of 1 MiB.

    Two copies of 64 MiB are timed, or of less in a smaller store. The call waits for the copies, and needs twice the
    size of a copy in device memory.
    """
    with engine.lock:
        for nbytes in (64 * MIB, 16 * MIB, 4 * MIB, MIB):
            blocks = [block for block in (engine.store.reserve(nbytes) for _ in range(2)) if block is not None]
            try:
                if len(blocks) == 2:
                    return _rates(engine, nbytes, *blocks)
            finally:
                for block in blocks:
                    engine.store.give_back(block)
    return None


def _rates(engine: Engine, nbytes: int, first: Block, second: Block) -> Rates:
    device, store = engine.device, engine.store
    compute = device.current_stream()
    outbound, inbound = device.new_stream("probe out"), device.new_stream("probe in")
    source, target = device.allocate(nbytes, compute), device.allocate(nbytes, compute)
    source.zero_()
    ready = device.record(compute)
    for stream in (outbound, inbound):
        device.wait(stream, ready, Wait.READY)

    def rate(lane: Stream, copy: Callable[[], StreamEvent]) -> float:
        began, ended = device.record(lane), copy()
        device.wait(compute, ended, Wait.ABANDONED)  # the copied memory is freed in the order of `compute`
        while not device.is_done(ended):
            time.sleep(1e-4)
        return nbytes / max(device.seconds_between(began, ended), 1e-9)  # a simulated clock may stand still

    store.write(second, source, outbound)  # fills the block that is read below, and warms up the lane
    return Rates(
        out=max(rate(outbound, lambda: store.write(first, source, outbound)) for _ in range(3)),
        back=max(rate(inbound, lambda: store.read(second, target, inbound)) for _ in range(3)),
    )
