"""Statistics: what was moved, kept and waited for."""

import threading
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from ebbtide._errors import EbbtideWarning
from ebbtide._events import Listeners
from ebbtide._types import Device, Reason, StoreStats, StreamEvent, Unable
from ebbtide._utils.distributed import rank_of_process
from ebbtide._utils.garbage import full_collections
from ebbtide._utils.sizes import GIB, MIB, format_bytes

_TIMINGS_IN_FLIGHT = 512
_WEIGHTS = (Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER)

# Reading two events costs as much as queueing a small copy: one copy per so many bytes is timed.
TIMED_EVERY_BYTES = 8 * MIB


class StatsSource(Protocol):
    """What statistics need of an engine."""

    @property
    def device(self) -> Device: ...

    def store_stats(self) -> StoreStats: ...


@dataclass
class Count:
    """A number of things, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, count: int = 1) -> None:
        self.count += count
        self.nbytes += nbytes

    def since(self, before: "Count | None") -> "Count":
        return self if before is None else Count(self.count - before.count, self.nbytes - before.nbytes)


@dataclass
class CopyTiming:
    """Bytes and seconds of the copies that were timed."""

    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Sync(NamedTuple):
    """Code in which the host waits for the device.

    Attributes:
        kind: the call: ".item()", "nonzero", "boolean mask", ...; behind it "in backward", also in a recomputation.
        module: name of the innermost module; in backward of the region that recomputes, or "" if unknown.
        line: "file.py:12", with the folder; or the class of the autograd node, where no code of the model runs.
    """

    kind: str
    module: str
    line: str


@dataclass
class Wait:
    """A number of waits of the host, and their seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds


_Stall: TypeAlias = tuple[StreamEvent, StreamEvent, str]
"""Compute's point, the end of the copy waited for, and the copy's region."""


@dataclass(eq=False)
class WatchedCopies:
    """Copies and waits of one step, for a timeline.

    Attributes:
        copies: for each: `ready`, `last` and `end` of `add_copy`, bytes, region, and whether the copy is outbound.
        stalls: for each wait: see `time_stall`.
    """

    copies: list[tuple[StreamEvent, StreamEvent, StreamEvent, int, str, bool]] = field(default_factory=list[Any])
    stalls: list[_Stall] = field(default_factory=list[_Stall])


@dataclass
class Stats:
    """Totals since the first use of the entry point, in bytes and seconds.

    A captured graph counts once, at the capture, without times: replays run without ebbtide and are not counted.

    Attributes:
        parcels: parcels made. Some are never sent: parcels that backward is known to need at once wait on the device.
        out: parcels sent to the store.
        inbound: parcels fetched back.
        shared: saved tensors that added no bytes because a parcel of the storage existed already.
        packed: parcels of masks, made of bits. Bytes as saved: eight times the bytes that travel and that all counts
            but `packed` show.
        forwarded: parcels that backward used from the device, before any release.
        misses: parcels fetched only when backward needed them.
        kept: saved tensors that stayed on the device, by reason. A region that a plan keeps is counted in one forward,
            and each later forward by the plan adds the same.
        freed_nothing: parcels whose device storage was still alive when backward needed the parcel.
        failed: parcels that stayed on the device because the store could not write them.
        recomputed: saved tensors that kept no memory in forward because the region is recomputed in backward.
        derived: saved tensors dropped, and computed again from other saved tensors.
        dropped: outputs of compute-intensive operators that were not saved because saving was useless a step before.
        unable: calls of a region that could not be prepared for recomputation, by reason; tensors saved in the call
            were kept or moved as without a recipe.
        stall_forward_s, stall_backward_s: time compute waited for the lanes (forward: releases, backward: arrivals).
        stall_by_region: the same seconds by the region whose parcels were late; "" outside of all regions.
        syncs: synchronisations of the host by code of the user, with EBBTIDE_SYNCS=1.
        watched_forwards: forwards of the model, or entries into the context, that `syncs` covers.
        full_collections: runs of Python's garbage collector over all objects of the process, since the API object was
            made.
        out_sample, in_sample: timed copies, the basis of the lanes' rates.
        host_bytes, host_reserved_bytes: bytes in the stores of the process, and memory or file space taken for them.
        host_captured_bytes: share of `host_bytes` that captured graphs keep for replays, until release_memory().
        budget_bytes: the user's budget; None without a budget.
        predicted_step_s, predicted_peak_bytes: prediction of the current plan; None for a plan without a prediction. A
            frozen plan whose steps were other than predicted has their median.
        measured_step_s: median of the last steps under the current plan; None without a planner or before any step.
        measured_peak_bytes: peak of a step under the current plan. Before any measured step, and without a budget:
            `torch.accelerator.max_memory_allocated()`. None on the CPU.
        rank, ranks: number of the process in the job, and processes of the job.
    """

    parcels: Count = field(default_factory=Count)
    out: Count = field(default_factory=Count)
    inbound: Count = field(default_factory=Count)
    shared: Count = field(default_factory=Count)
    packed: Count = field(default_factory=Count)
    forwarded: Count = field(default_factory=Count)
    misses: Count = field(default_factory=Count)
    kept: dict[Reason, Count] = field(default_factory=dict[Reason, Count])
    freed_nothing: Count = field(default_factory=Count)
    failed: Count = field(default_factory=Count)
    recomputed: Count = field(default_factory=Count)
    derived: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)
    unable: dict[Unable, int] = field(default_factory=dict[Unable, int])
    stall_forward_s: float = 0.0
    stall_backward_s: float = 0.0
    stall_by_region: dict[str, float] = field(default_factory=dict[str, float])
    syncs: dict[Sync, Wait] = field(default_factory=dict[Sync, Wait])
    watched_forwards: int = 0
    full_collections: Wait = field(default_factory=Wait, compare=False)
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
    rank: int = 0
    ranks: int = 1

    @property
    def out_gb_per_s(self) -> float:
        """Rate of outbound copies in 10**9 bytes per second; 0 before the first timed copy."""
        return self.out_sample.gb_per_s

    @property
    def in_gb_per_s(self) -> float:
        """Rate of inbound copies in 10**9 bytes per second; 0 before the first timed copy."""
        return self.in_sample.gb_per_s

    @property
    def saved_tensors(self) -> int:
        """Calls of the pack hook."""
        return self.parcels.count + self.shared.count + sum(kept.count for kept in self.kept.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of `kept` without weights and buffers. A storage counts once per saved tensor."""
        return sum(kept.nbytes for reason, kept in self.kept.items() if reason not in _WEIGHTS)

    def to_dict(self) -> dict[str, Any]:
        """All attributes and properties, ready for JSON: enums by name, bytes and seconds as numbers:

        Path("stats.json").write_text(json.dumps(handle.stats().to_dict()))
        """
        return {
            **asdict(self),
            "kept": {reason.name: asdict(kept) for reason, kept in self.kept.items()},
            "unable": {why.name: count for why, count in self.unable.items()},
            "syncs": [{**sync._asdict(), **asdict(wait)} for sync, wait in self.syncs.items()],
            "kept_bytes": self.kept_bytes,
            "saved_tensors": self.saved_tensors,
            "out_gb_per_s": self.out_gb_per_s,
            "in_gb_per_s": self.in_gb_per_s,
        }

    def metrics(self, since: "Stats | None" = None) -> dict[str, float]:
        """One flat dict for a logger, with the keys that trainers log: `ebbtide/moved_gib`, `ebbtide/stall_ms`, ...:

        wandb.log(handle.stats().metrics())

        Unknown budgets, predictions and measurements are omitted.

        Args:
            since: earlier stats of the object: TOTALS count from then on.
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
"""Metrics that grow from step to step; all the rest describe the present."""

_USES = ("parcels", "recomputed", "derived")  # counts that grow in a forward that moves or recomputes
_COUNTS = [f.name for f in fields(Stats) if f.type in (Count, CopyTiming)]


class StatsRecorder:
    """Collects the Stats of a HookContext.

    Called under an engine's lock, or without a lock where a lost count is harmless.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.listeners = Listeners()
        self.watched: WatchedCopies | None = None
        self._waits: dict[tuple[Device, bool], deque[_Stall]] = {}
        self._copies: deque[tuple[Device, StreamEvent, StreamEvent, StreamEvent, int, bool]] = deque()
        self._untimed_bytes = 0
        self._draining = threading.Lock()
        self._before_first_step: Stats | None = None
        self._forwards_seen = 0
        self._at_last_forward: tuple[int, list[int]] = (0, [])
        self._was_failure_warned = False
        self._collections_before = full_collections()

    def keep(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        kept = self.stats.kept.get(reason)
        if kept is None:
            kept = self.stats.kept.setdefault(reason, Count())
        kept.count += count
        kept.nbytes += nbytes

    def read(self, engines: Iterable[StatsSource]) -> Stats:
        """A copy of the totals, completed by the present contents of the engines' stores."""
        self.drain()
        engines, (rank, ranks) = list(engines), rank_of_process()
        stores = [engine.store_stats() for engine in engines]
        peaks = [engine.device.memory().peak_bytes for engine in engines if engine.device.tracks_peak]
        (count, seconds), before = full_collections(), self._collections_before
        return replace(
            self.stats,
            **{name: replace(getattr(self.stats, name)) for name in _COUNTS},
            kept=self._copy_of_kept(),
            unable=dict(self.stats.unable),
            stall_by_region=dict(self.stats.stall_by_region),
            syncs={sync: replace(wait) for sync, wait in self.stats.syncs.items()},
            full_collections=Wait(count - before[0], seconds - before[1]),
            host_bytes=sum(store.used_bytes for store in stores),
            host_reserved_bytes=sum(store.reserved_bytes for store in stores),
            host_captured_bytes=sum(store.captured_bytes for store in stores),
            measured_peak_bytes=max(peaks, default=0) or None,
            rank=rank,
            ranks=ranks,
        )

    def _copy_of_kept(self) -> dict[Reason, Count]:
        return {reason: replace(kept) for reason, kept in self.stats.kept.items()}

    def note_sync(self, sync: Sync, seconds: float) -> None:
        """The host has waited for the device."""
        self.stats.syncs.setdefault(sync, Wait()).add(seconds)

    def warn_store_failed(self, error: BaseException) -> None:
        """Warn once: a store that fails costs no step, but nothing moves either."""
        if not self._was_failure_warned:
            self._was_failure_warned = True
            warnings.warn(f"the store failed and tensors stay on the device: {error}", EbbtideWarning, stacklevel=2)

    def note_unable(self, region: str, action: str, why: Unable) -> None:
        """A region's recipe could not be applied."""
        self._count_unable(
            why,
            f"{region} was not prepared for recomputation although its recipe says {action!r}: {why.value}. Its saved "
            "tensors are kept or moved as without a recipe (warned once; see stats().unable)",
        )

    def note_differed(self, region: str, why: str) -> None:
        """The recomputation of a region differed from its forward, and backward read the original saved tensors."""
        self._count_unable(
            Unable.DIFFERED,
            f"{region} is kept from now on, and backward has read what its forward saved: {why} (warned once; see "
            "stats().unable)",
        )

    def note_checkpointed(self, name: str) -> None:
        """A whole model was called inside a checkpoint."""
        self._count_unable(
            Unable.USER_CHECKPOINT,
            f"{name} is called inside of torch.utils.checkpoint, which recomputes all of it: nothing is left to move "
            "or plan (warned once; see stats().unable). Remove the checkpoint: offload() with budget= recomputes as "
            "much as the budget needs",
        )

    def _count_unable(self, why: Unable, text: str) -> None:
        if why not in self.stats.unable:
            warnings.warn(text, EbbtideWarning, stacklevel=3)
        self.stats.unable[why] = self.stats.unable.get(why, 0) + 1

    def first_step_begins(self) -> None:
        """Set the counts of measured steps apart, at the first planned forward. Later calls have no effect."""
        if self._before_first_step is None:
            counts = {name: replace(getattr(self.stats, name)) for name in _USES}
            self._before_first_step = Stats(kept=self._copy_of_kept(), **counts)

    def warn_if_nothing_moved(self, api: str, forward: str = "forward", advice: str = "") -> None:
        """Warn once, after the first forward that could save tensors: never a silent no-op."""
        self._forwards_seen += 1
        if self._forwards_seen > 1:
            return
        before = self._before_first_step or Stats()
        if all(getattr(self.stats, name) == getattr(before, name) for name in _USES):
            text = f"{api} moved nothing in its first {forward}: {self._why(before)}{advice}"
            warnings.warn(text, EbbtideWarning, stacklevel=3)

    def warn_if_window_holds_all(self, api: str) -> None:
        """Warn once, after the third forward, if nothing has been sent since the second: backward needed all of it
        before its memory had been released, and such parcels wait on the device."""
        if self._forwards_seen > 3:
            return
        made = self.stats.parcels.nbytes
        other = [getattr(self.stats, name).count for name in ("out", "failed", "recomputed", "derived")]
        made_before, other_before = self._at_last_forward
        self._at_last_forward = made, other
        if self._forwards_seen == 3 and made > made_before and other == other_before:
            warnings.warn(
                f"{api} moves nothing from its second step on: all of it ({format_bytes(made - made_before)} in a "
                "forward) fits into the window, whose tensors backward needs before they have left. With a smaller "
                "one, such as window='16MiB', tensors above it leave",
                EbbtideWarning,
                stacklevel=3,
            )

    def _why(self, before: Stats) -> str:
        kept = {reason: count.since(before.kept.get(reason)) for reason, count in self.stats.kept.items()}
        kept = {reason: count for reason, count in kept.items() if count.count > 0}
        if not kept:
            return (
                "autograd saved nothing that hooks get to see (everything checkpointed or under other hooks inside, "
                "or nothing needed a gradient)"
            )
        return "; ".join(
            f"{count.count} saved tensors ({format_bytes(count.nbytes)}) {reason.value}"
            for reason, count in sorted(kept.items(), key=lambda row: -row[1].nbytes)
        )

    def time_stall(
        self, device: Device, point: StreamEvent, end: StreamEvent, region: str, *, is_forward: bool
    ) -> None:
        """Compute waits at `point` until `end`, for a parcel of `region`: no stall if `end` passed earlier."""
        if self.watched is not None:
            self.watched.stalls.append((point, end, region))
        waits = self._waits.get((device, is_forward))
        if waits is None:
            waits = self._waits.setdefault((device, is_forward), deque())
        waits.append((point, end, region))
        if len(waits) > _TIMINGS_IN_FLIGHT:
            self.drain()

    def add_copy(
        self,
        device: Device,
        ready: StreamEvent,
        last: StreamEvent,
        end: StreamEvent,
        nbytes: int,
        region: str,
        *,
        is_out: bool,
    ) -> None:
        """Count a copy that runs from `ready`, or the end of the `last` copy if later, until `end`."""
        (self.stats.out if is_out else self.stats.inbound).add(nbytes)
        if self.watched is not None:
            self.watched.copies.append((ready, last, end, nbytes, region, is_out))
        if device.supports_timing:
            self._untimed_bytes += nbytes
            if self._untimed_bytes >= TIMED_EVERY_BYTES:
                self._untimed_bytes = 0
                if last is not None:
                    self._copies.append((device, ready, last, end, nbytes, is_out))

    def drain(self) -> None:
        """Read the timings that have passed, without waiting.

        While the current stream records a graph, no event may be queried, not even an event outside the graph.
        """
        with self._draining:
            for (device, is_forward), waits in list(self._waits.items()):
                seconds = self._passed_seconds(device, waits) if device.matches_capture() else 0.0
                if is_forward:
                    self.stats.stall_forward_s += seconds
                else:
                    self.stats.stall_backward_s += seconds
            while self._copies and _has_passed(self._copies[0][0], self._copies[0][3]):
                device, ready, last, end, nbytes, is_out = self._copies.popleft()
                seconds = min(device.seconds_between(ready, end), device.seconds_between(last, end))
                (self.stats.out_sample if is_out else self.stats.in_sample).add(nbytes, seconds)

    def _passed_seconds(self, device: Device, waits: "deque[_Stall]") -> float:
        """Remove the passed waits and return the sum of their stalls.

        Start and end have to have passed: compute may be far behind the lane. Compute and the lane pass their events in
        order, hence a query of the last wait in a batch answers for the whole batch.
        """
        seconds, by_region = 0.0, self.stats.stall_by_region
        for batch in (_TIMINGS_IN_FLIGHT // 2, 1):
            while len(waits) >= batch and all(map(device.is_done, waits[batch - 1][:2])):
                for _ in range(batch):
                    point, end, region = waits.popleft()
                    stall_s = max(0.0, device.seconds_between(point, end))
                    if stall_s > 0.0:
                        seconds += stall_s
                        by_region[region] = by_region.get(region, 0.0) + stall_s
        return seconds


def _has_passed(device: Device, event: StreamEvent) -> bool:
    return device.matches_capture() and device.is_done(event)
