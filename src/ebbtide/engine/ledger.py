"""What was moved, kept and waited for, counted per door."""

import threading
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from ebbtide._bytes import format_bytes
from ebbtide._errors import EbbtideWarning
from ebbtide.types import Device, Reason, StreamEvent

if TYPE_CHECKING:
    from ebbtide.engine.engine import Engine

_TIMINGS_IN_FLIGHT = 512


@dataclass
class Tally:
    """How many, and how many bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        self.count += count
        self.nbytes += nbytes


@dataclass
class Stats:
    """Totals since the door was opened first. Bytes and seconds; see the properties for rates.

    Attributes:
        parcels: parcels made. Not all are sent: what backward is known to need at once waits on the device.
        out: parcels sent to the store.
        inbound: parcels fetched back.
        shared: saves that added no bytes because a parcel of the same storage was already on its way.
        forwarded: parcels that backward used straight from the device, not having been released.
        misses: parcels fetched only when backward asked for them.
        kept: saves that stayed on the device, by reason.
        unfreed: parcels whose device storage was still alive when backward needed them: moving them freed nothing.
        failed: parcels that stayed on the device because the store could not write them.
        stall_forward_s, stall_backward_s: time compute waited for the lanes (forward: releases, backward: arrivals).
        out_s, in_s: time the lanes were busy copying.
        host_bytes, host_reserved_bytes: what the stores of this process hold, and the memory or file they took.
    """

    parcels: Tally = field(default_factory=Tally)
    out: Tally = field(default_factory=Tally)
    inbound: Tally = field(default_factory=Tally)
    shared: Tally = field(default_factory=Tally)
    forwarded: Tally = field(default_factory=Tally)
    misses: Tally = field(default_factory=Tally)
    kept: dict[Reason, Tally] = field(default_factory=dict)
    unfreed: Tally = field(default_factory=Tally)
    failed: Tally = field(default_factory=Tally)
    stall_forward_s: float = 0.0
    stall_backward_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    host_bytes: int = 0
    host_reserved_bytes: int = 0

    @property
    def out_gb_per_s(self) -> float:
        """Rate of the outbound lane while it copied, in 10**9 bytes per second; 0 before the first copy."""
        return self.out.nbytes / self.out_s / 1e9 if self.out_s else 0.0

    @property
    def in_gb_per_s(self) -> float:
        """Rate of the inbound lane while it copied, in 10**9 bytes per second; 0 before the first copy."""
        return self.inbound.nbytes / self.in_s / 1e9 if self.in_s else 0.0

    @property
    def saves(self) -> int:
        """Pack calls seen."""
        return self.parcels.count + self.shared.count + sum(tally.count for tally in self.kept.values())


_TALLIES = [f for f in fields(Stats) if f.type is Tally]


class _Timing(NamedTuple):
    device: Device
    starts: tuple[StreamEvent, ...]
    end: StreamEvent
    into: str

    def seconds(self) -> float:
        """From the latest of the starts to the end; nothing if the end came first."""
        return max(0.0, min(self.device.seconds_between(start, self.end) for start in self.starts))


class Ledger:
    """Counts for one door. Called under an engine's lock, or lock-free where a lost count is harmless."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._timings: deque[_Timing] = deque()
        self._settling = threading.Lock()
        self._was_first_step_seen = False

    def keep(self, reason: Reason, nbytes: int) -> None:
        tally = self.stats.kept.get(reason)
        if tally is None:
            tally = self.stats.kept.setdefault(reason, Tally())
        tally.count += 1
        tally.nbytes += nbytes

    def read(self, engines: Iterable["Engine"]) -> Stats:
        """A copy of the totals, and what the stores hold now."""
        self.settle()
        stores = [engine.store_stats() for engine in engines]
        return replace(
            self.stats,
            **{tally.name: replace(getattr(self.stats, tally.name)) for tally in _TALLIES},
            kept={reason: replace(tally) for reason, tally in self.stats.kept.items()},
            host_bytes=sum(store.used_bytes for store in stores),
            host_reserved_bytes=sum(store.reserved_bytes for store in stores),
        )

    def warn_if_nothing_moved(self, door: str) -> None:
        """Once, after the first forward that could save: never a silent no-op."""
        if self._was_first_step_seen:
            return
        self._was_first_step_seen = True
        if self.stats.parcels.count == 0:
            warnings.warn(f"{door} moved nothing in its first forward: {self._why()}", EbbtideWarning, stacklevel=3)

    def _why(self) -> str:
        if not self.stats.kept:
            return (
                "autograd saved nothing that hooks get to see (everything checkpointed or under other hooks inside, "
                "or nothing needed a gradient)"
            )
        return "; ".join(
            f"{tally.count} saves ({format_bytes(tally.nbytes)}) {reason.value}"
            for reason, tally in sorted(self.stats.kept.items(), key=lambda row: -row[1].nbytes)
        )

    def time(self, device: Device, starts: tuple[StreamEvent, ...], end: StreamEvent, into: str) -> None:
        """Add the seconds from the latest of `starts` to `end` to the field `into`, once `end` has passed."""
        self._timings.append(_Timing(device, starts, end, into))
        if len(self._timings) > _TIMINGS_IN_FLIGHT:
            self.settle()

    def settle(self) -> None:
        """Read the timings that have passed; never waits for one that has not."""
        with self._settling:
            while self._timings and self._timings[0].device.is_done(self._timings[0].end):
                timing = self._timings.popleft()
                setattr(self.stats, timing.into, getattr(self.stats, timing.into) + timing.seconds())
