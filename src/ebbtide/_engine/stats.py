"""What was moved, kept and waited for, counted per door."""

import threading
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ebbtide._errors import EbbtideWarning
from ebbtide._events import Listeners
from ebbtide._utils.sizes import GIB, MIB, format_bytes
from ebbtide.types import Device, Reason, StreamEvent, Unable

if TYPE_CHECKING:
    from ebbtide._engine.engine import Engine

_TIMINGS_IN_FLIGHT = 512
BYTES_A_SAMPLE = 8 * MIB
_WEIGHTS = (Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER)


@dataclass
class Count:
    """How many, and how many bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        self.count += count
        self.nbytes += nbytes

    def since(self, before: "Count | None") -> "Count":
        return self if before is None else Count(self.count - before.count, self.nbytes - before.nbytes)


@dataclass
class CopyTiming:
    """Copies that were timed."""

    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass
class Stats:
    """Totals since the door was opened first. Bytes and seconds; see the properties for rates.

    A captured graph is counted when it is captured, without its times. Replays run without us and are not counted.

    Attributes:
        parcels: parcels made. Not all are sent: what backward is known to need at once waits on the device.
        out: parcels sent to the store.
        inbound: parcels fetched back.
        shared: saves that added no bytes because a parcel of the same storage was already on its way.
        packed: parcels of masks, made of bits; bytes as saved, eight times what travels and what all others count.
        forwarded: parcels that backward used straight from the device, not having been released.
        misses: parcels fetched only when backward asked for them.
        kept: saves that stayed on the device, by reason.
        unfreed: parcels whose device storage was still alive when backward needed them: moving them freed nothing.
        failed: parcels that stayed on the device because the store could not write them.
        recomputed: saves that left nothing behind in forward, because their region runs again in backward.
        dropped: outputs of dear operators that were not held, holding them having been of no use in the step before.
        unable: passes through a region that could not be prepared to run again, by why; what they saved went its usual
            way.
        stall_forward_s, stall_backward_s: time compute waited for the lanes (forward: releases, backward: arrivals).
        out_sample, in_sample: copies that were timed, from which the rates of the lanes come.
        host_bytes, host_reserved_bytes: what the stores of this process hold, and the memory or file they took.
        host_captured_bytes: of `host_bytes`, what captured graphs keep for their replays, until release_memory().
        budget_bytes: the budget of the user; None without one.
        predicted_step_s, predicted_peak_bytes: of the current plan; None for a plan without a prediction.
        measured_step_s: median of the last steps by the current plan; None without a planner, and before such steps.
        measured_peak_bytes: the peak of a step by the current plan. Until such a step was measured, and without a
            budget, the device's own record (`torch.accelerator.max_memory_allocated()`); None on the CPU, for lack of
            a record.
    """

    parcels: Count = field(default_factory=Count)
    out: Count = field(default_factory=Count)
    inbound: Count = field(default_factory=Count)
    shared: Count = field(default_factory=Count)
    packed: Count = field(default_factory=Count)
    forwarded: Count = field(default_factory=Count)
    misses: Count = field(default_factory=Count)
    kept: dict[Reason, Count] = field(default_factory=dict[Reason, Count])
    unfreed: Count = field(default_factory=Count)
    failed: Count = field(default_factory=Count)
    recomputed: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)
    unable: dict[Unable, int] = field(default_factory=dict[Unable, int])
    stall_forward_s: float = 0.0
    stall_backward_s: float = 0.0
    out_sample: CopyTiming = field(default_factory=CopyTiming)
    in_sample: CopyTiming = field(default_factory=CopyTiming)
    host_bytes: int = 0
    host_reserved_bytes: int = 0
    host_captured_bytes: int = 0
    budget_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def out_gb_per_s(self) -> float:
        """Rate of the outbound lane while it copied, in 10**9 bytes per second; 0 before the first timed copy."""
        return self.out_sample.gb_per_s

    @property
    def in_gb_per_s(self) -> float:
        """Rate of the inbound lane while it copied, in 10**9 bytes per second; 0 before the first timed copy."""
        return self.in_sample.gb_per_s

    @property
    def saves(self) -> int:
        """Pack calls seen."""
        return self.parcels.count + self.shared.count + sum(tally.count for tally in self.kept.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the saved tensors in `kept` but for weights and buffers. A storage counts once per saved tensor."""
        return sum(tally.nbytes for reason, tally in self.kept.items() if reason not in _WEIGHTS)

    def to_dict(self) -> dict[str, Any]:
        """All attributes and properties as JSON has them: enums by name, bytes and seconds as numbers, None as null::

        Path("stats.json").write_text(json.dumps(handle.stats().to_dict()))
        """
        return {
            **asdict(self),
            "kept": {reason.name: asdict(tally) for reason, tally in self.kept.items()},
            "unable": {why.name: count for why, count in self.unable.items()},
            "kept_bytes": self.kept_bytes,
            "saves": self.saves,
            "out_gb_per_s": self.out_gb_per_s,
            "in_gb_per_s": self.in_gb_per_s,
        }

    def metrics(self, since: "Stats | None" = None) -> dict[str, float]:
        """One flat dict for a logger, the keys that trainers log too: `ebbtide/moved_gib`, `ebbtide/stall_ms`, ...::

        wandb.log(handle.stats().metrics())

        Args:
            since: earlier stats of the same entry point: TOTALS are counted from there on.

        Budget, predictions and measurements are left out where they are unknown.
        """
        before = {} if since is None else since._totals()
        totals = {name: total - before.get(name, 0) for name, total in self._totals().items()}
        gib = {
            "host_gib": self.host_bytes,
            "budget_gib": self.budget_bytes,
            "predicted_peak_gib": self.predicted_peak_bytes,
            "measured_peak_gib": self.measured_peak_bytes,
        }
        ms = {"predicted_step_ms": self.predicted_step_s, "measured_step_ms": self.measured_step_s}
        states = {name: nbytes / GIB for name, nbytes in gib.items() if nbytes is not None}
        states |= {name: seconds * 1e3 for name, seconds in ms.items() if seconds is not None}
        return {f"ebbtide/{name}": value for name, value in {**totals, **states}.items()}

    def _totals(self) -> dict[str, float]:
        return {
            "moved_gib": self.out.nbytes / GIB,
            "kept_gib": self.kept_bytes / GIB,
            "recomputed_gib": self.recomputed.nbytes / GIB,
            "misses": self.misses.count,
            "stall_ms": (self.stall_forward_s + self.stall_backward_s) * 1e3,
            "stall_forward_ms": self.stall_forward_s * 1e3,
            "stall_backward_ms": self.stall_backward_s * 1e3,
        }


TOTALS = frozenset(f"ebbtide/{name}" for name in Stats()._totals())
"""The metrics that grow from step to step; the others are as they are now."""

_USES = ("parcels", "recomputed")
"""Counts that tell whether a forward moved or recomputed something."""

_TALLIES = [f for f in fields(Stats) if f.type in (Count, CopyTiming)]


class StatsRecorder:
    """Counts for one door. Called under an engine's lock, or lock-free where a lost count is harmless."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.listeners = Listeners()
        self._waits: dict[tuple[Device, bool], deque[tuple[StreamEvent, StreamEvent]]] = {}
        self._copies: deque[tuple[Device, StreamEvent, StreamEvent, StreamEvent, int, bool]] = deque()
        self.untimed_bytes = 0
        self._settling = threading.Lock()
        self._before_first_step: Stats | None = None
        self._was_first_step_seen = False
        self._was_failure_told = False

    def keep(self, reason: Reason, nbytes: int) -> None:
        tally = self.stats.kept.get(reason)
        if tally is None:
            tally = self.stats.kept.setdefault(reason, Count())
        tally.count += 1
        tally.nbytes += nbytes

    def read(self, engines: Iterable["Engine"]) -> Stats:
        """A copy of the totals, and what the stores hold now."""
        self.settle()
        engines = list(engines)
        stores = [engine.store_stats() for engine in engines]
        peaks = [engine.device.memory().peak_bytes for engine in engines if engine.device.tracks_peak]
        return replace(
            self.stats,
            **{tally.name: replace(getattr(self.stats, tally.name)) for tally in _TALLIES},
            kept={reason: replace(tally) for reason, tally in self.stats.kept.items()},
            unable=dict(self.stats.unable),
            host_bytes=sum(store.used_bytes for store in stores),
            host_reserved_bytes=sum(store.reserved_bytes for store in stores),
            host_captured_bytes=sum(store.captured_bytes for store in stores),
            measured_peak_bytes=max(peaks, default=0) or None,
        )

    def warn_store_failed(self, error: BaseException) -> None:
        """Once: a store that fails costs no step, but nothing moves either."""
        if not self._was_failure_told:
            self._was_failure_told = True
            warnings.warn(f"the store failed and tensors stay on the device: {error}", EbbtideWarning, stacklevel=2)

    def note_unable(self, region: str, action: str, why: Unable) -> None:
        """A region's recipe could not be followed."""
        self._count_unable(
            why,
            f"{region} was not prepared to run again although its recipe says {action!r}: {why.value}. What it saves "
            "goes its usual way (told once; see stats().unable)",
        )

    def note_differed(self, region: str, why: str) -> None:
        """Recomputation of a region was not its forward over again, and backward read what forward saved."""
        self._count_unable(
            Unable.DIFFERED,
            f"{region} is kept from now on, and backward has read what its forward saved: {why} (told once; see "
            "stats().unable)",
        )

    def note_checkpointed(self, name: str) -> None:
        """A whole model is called inside of a checkpoint."""
        self._count_unable(
            Unable.USER_CHECKPOINT,
            f"{name} is called inside of torch.utils.checkpoint, which runs all of it again: nothing is left to move "
            "or plan (told once; see stats().unable). Leave the checkpoint out: offload() with budget= runs again what "
            "it has to",
        )

    def _count_unable(self, why: Unable, text: str) -> None:
        """Each time; told once."""
        if why not in self.stats.unable:
            warnings.warn(text, EbbtideWarning, stacklevel=3)
        self.stats.unable[why] = self.stats.unable.get(why, 0) + 1

    def first_step_begins(self) -> None:
        """Set the counts of measured steps apart. Only the first planned forward does so; later calls do nothing."""
        if self._before_first_step is None:
            kept = {reason: replace(tally) for reason, tally in self.stats.kept.items()}
            self._before_first_step = Stats(kept=kept, **{name: replace(getattr(self.stats, name)) for name in _USES})

    def warn_if_nothing_moved(self, door: str, forward: str = "forward", advice: str = "") -> None:
        """Once, after the first forward that could save: never a silent no-op."""
        if self._was_first_step_seen:
            return
        self._was_first_step_seen = True
        before = self._before_first_step or Stats()
        if all(getattr(self.stats, name) == getattr(before, name) for name in _USES):
            text = f"{door} moved nothing in its first {forward}: {self._why(before)}{advice}"
            warnings.warn(text, EbbtideWarning, stacklevel=3)

    def _why(self, before: Stats) -> str:
        kept = {reason: tally.since(before.kept.get(reason)) for reason, tally in self.stats.kept.items()}
        kept = {reason: tally for reason, tally in kept.items() if tally.count > 0}
        if not kept:
            return (
                "autograd saved nothing that hooks get to see (everything checkpointed or under other hooks inside, "
                "or nothing needed a gradient)"
            )
        return "; ".join(
            f"{tally.count} saves ({format_bytes(tally.nbytes)}) {reason.value}"
            for reason, tally in sorted(kept.items(), key=lambda row: -row[1].nbytes)
        )

    def time_stall(self, device: Device, point: StreamEvent, end: StreamEvent, is_forward: bool) -> None:
        """Compute waits at `point` until `end`: no time if `end` had passed by then."""
        waits = self._waits.get((device, is_forward))
        if waits is None:
            waits = self._waits.setdefault((device, is_forward), deque())
        waits.append((point, end))
        if len(waits) > _TIMINGS_IN_FLIGHT:
            self.settle()

    def time_copy(
        self, device: Device, ready: StreamEvent, last: StreamEvent, end: StreamEvent, nbytes: int, is_out: bool
    ) -> None:
        """A copy ran from `ready`, or the end of the `last` one if that was later, until `end`.

        Small copies are timed by sample, for reading two events costs as much as queueing the copy: lanes call this
        when `untimed_bytes` have reached BYTES_A_SAMPLE.
        """
        self.untimed_bytes = 0
        if last is not None:
            self._copies.append((device, ready, last, end, nbytes, is_out))

    def settle(self) -> None:
        """Read the timings that have passed; never waits for one that has not.

        While the current stream records a graph no event may be asked, not even one that is none of the graph's.
        """
        with self._settling:
            for (device, is_forward), waits in list(self._waits.items()):
                seconds = _passed_seconds(device, waits) if device.matches_capture() else 0.0
                if is_forward:
                    self.stats.stall_forward_s += seconds
                else:
                    self.stats.stall_backward_s += seconds
            while self._copies and _has_passed(self._copies[0][0], self._copies[0][3]):
                device, ready, last, end, nbytes, is_out = self._copies.popleft()
                seconds = min(device.seconds_between(ready, end), device.seconds_between(last, end))
                (self.stats.out_sample if is_out else self.stats.in_sample).add(nbytes, seconds)


def _has_passed(device: Device, event: StreamEvent) -> bool:
    return device.matches_capture() and device.is_done(event)


def _passed_seconds(device: Device, waits: deque[tuple[StreamEvent, StreamEvent]]) -> float:
    """Take out of `waits` those whose end has passed; the seconds they took.

    Both ends have to have passed: compute may be far behind the lane, and has not come to the point yet then. Each
    passes in order, compute's and the lane's, so of a whole batch only the last ones have to be asked.
    """
    seconds = 0.0
    for batch in (_TIMINGS_IN_FLIGHT // 2, 1):
        while len(waits) >= batch and all(map(device.is_done, waits[batch - 1])):
            for _ in range(batch):
                point, end = waits.popleft()
                seconds += max(0.0, device.seconds_between(point, end))
    return seconds
