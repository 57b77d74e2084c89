"""Measures the copy rates of an engine's lanes with a few copies of its own, before planning."""

import time
from typing import NamedTuple

from ebbtide._engine.engine import Engine
from ebbtide._types import Block, Device, Stream, StreamEvent, Wait
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
            blocks = [engine.store.reserve(nbytes) for _ in range(2)]
            try:
                if None not in blocks:
                    return _rates(engine, nbytes, *[block for block in blocks if block is not None])
            finally:
                for block in blocks:
                    if block is not None:
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

    def copy_out() -> _Copy:
        return _Copy(device.record(outbound), store.write(first, source, outbound))

    def copy_back() -> _Copy:
        return _Copy(device.record(inbound), store.read(second, target, inbound))

    store.write(second, source, outbound)  # fills the block that `copy_back` reads, and warms up the lane
    return Rates(*(max(_rate(device, compute, nbytes, copy()) for _ in range(3)) for copy in (copy_out, copy_back)))


class _Copy(NamedTuple):
    began: StreamEvent
    ended: StreamEvent


def _rate(device: Device, compute: Stream, nbytes: int, copy: _Copy) -> float:
    device.wait(compute, copy.ended, Wait.ABANDONED)  # the copied memory is freed in the order of `compute`
    while not device.is_done(copy.ended):
        time.sleep(1e-4)
    return nbytes / max(device.seconds_between(copy.began, copy.ended), 1e-9)  # a simulated clock may stand still
