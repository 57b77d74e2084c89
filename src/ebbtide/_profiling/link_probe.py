"""How fast an engine's lanes are: a few copies of its own, timed once. For planners; no training is touched."""

import time
from typing import NamedTuple

from ebbtide._engine.engine import Engine
from ebbtide._utils.sizes import MIB
from ebbtide.types import Block, Device, Stream, StreamEvent, Wait

_SIZES = (64 * MIB, 16 * MIB, 4 * MIB, MIB)  # the largest that the store has room for
_TIMES = 3
_POLL_S = 1e-4
_LEAST_S = 1e-9  # a simulated clock may stand still


class Rates(NamedTuple):
    """Bytes per second out and back, each alone and both at once."""

    out: float
    back: float
    out_duplex: float
    back_duplex: float


def link_rates(engine: Engine) -> Rates | None:
    """Rates of the engine's store, by copies of up to 64 MiB; None if the store has no room for the smallest.

    Waits for its own copies, and needs twice their size of device memory meanwhile.
    """
    with engine.lock:
        for nbytes in _SIZES:
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
    home = device.current_stream()
    there, back = device.new_stream("probe out"), device.new_stream("probe in")
    source, target = device.allocate(nbytes, home), device.allocate(nbytes, home)
    source.zero_()
    ready = device.record(home)
    for stream in (there, back):
        device.wait(stream, ready, Wait.READY)

    def out() -> _Copy:
        return _Copy(device.record(there), store.write(first, source, there))

    def into() -> _Copy:
        return _Copy(device.record(back), store.read(second, target, back))

    store.write(second, source, there)  # something to read, and the lane is warm
    alone = [max(_rate(device, home, nbytes, copy()) for _ in range(_TIMES)) for copy in (out, into)]
    pairs = [(out(), into()) for _ in range(_TIMES)]
    both = [max(_rate(device, home, nbytes, pair[way]) for pair in pairs) for way in range(2)]
    return Rates(alone[0], alone[1], min(alone[0], both[0]), min(alone[1], both[1]))


class _Copy(NamedTuple):
    began: StreamEvent
    ended: StreamEvent


def _rate(device: Device, home: Stream, nbytes: int, copy: _Copy) -> float:
    device.wait(home, copy.ended, Wait.ABANDONED)  # its memory is freed in home's order
    while not device.is_done(copy.ended):
        time.sleep(_POLL_S)
    return nbytes / max(device.seconds_between(copy.began, copy.ended), _LEAST_S)
