"""Stats as a table in plain text of fixed width."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from ebbtide._engine.stats import Count, Stats, Sync, Wait
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.text import shortened


class Row(NamedTuple):
    """One line of the report; `number` is empty for times, rates and sizes."""

    label: str
    number: str
    amount: str


_MOST_REGIONS = 4  # with a line of their own: the rest is in `Stats.stall_by_region`

Section = tuple[str, list[Row]]


def stats_text(stats: Stats) -> str:
    """The figures of `stats`: every line equally wide, no escape sequences, fit for a log."""
    sections = list(_sections(stats))
    every_row = [row for _, rows in sections for row in rows]
    label, number, amount = (max(len(row[column]) for row in every_row) for column in range(3))
    rank = f", rank {stats.rank} of {stats.ranks}" if stats.ranks > 1 else ""
    headline = f"ebbtide{rank}: {stats.saved_tensors} saved tensors, {format_bytes(stats.out.nbytes)} moved out"
    width = max(label + number + amount + 6, len(headline))
    text = [headline.ljust(width)]
    for title, rows in sections:
        text.append(title.ljust(width))
        text += [f"  {row.label:<{label}}  {row.number:>{number}}  {row.amount:>{amount}}".ljust(width) for row in rows]
    return "\n".join(text)


def _sections(stats: Stats) -> Iterator[Section]:
    yield (
        "parcels",
        [
            _count("made", stats.parcels),
            _count("moved out", stats.out),
            _count("fetched back", stats.inbound),
            _count("shared with a parcel on its way", stats.shared),
            _count("masks packed into bits (bytes as saved)", stats.packed),
            _count("used straight from the device", stats.forwarded),
            _count("fetched on demand (misses)", stats.misses),
            _count("offloaded, but memory still referenced", stats.freed_nothing),
            _count("failed to be written", stats.failed),
        ],
    )
    largest_first = sorted(stats.kept.items(), key=lambda kept: -kept[1].nbytes)
    kept = [_count(reason.value, count) for reason, count in largest_first]
    yield "saved tensors kept on the device", kept or [_count("none", Count())]
    if stats.derived.count:
        yield "not saved", [_count("derived from other saved tensors", stats.derived)]
    if stats.recomputed.count or stats.unable:
        recomputed = [
            _count("recomputed tensors", stats.recomputed),
            _count("outputs not worth keeping", stats.dropped),
        ]
        unable = [Row(f"not prepared: {why.value}", str(count), "") for why, count in stats.unable.items()]
        yield "recomputed regions", recomputed + unable
    times = {"predicted time": stats.predicted_step_s, "measured time": stats.measured_step_s}
    sizes = {
        "budget": stats.budget_bytes,
        "predicted peak": stats.predicted_peak_bytes,
        "measured peak": stats.measured_peak_bytes,
    }
    step = [_time(label, seconds) for label, seconds in times.items() if seconds is not None]
    step += [_size(label, nbytes) for label, nbytes in sizes.items() if nbytes is not None]
    if step:
        yield "step", step
    longest_first = sorted(stats.stall_by_region.items(), key=lambda stall: -stall[1])
    stalls = [_time(f"for {shortened(name or 'outside', 42)}", s) for name, s in longest_first[:_MOST_REGIONS]]
    yield "stall", [_time("forward", stats.stall_forward_s), _time("backward", stats.stall_backward_s), *stalls]
    if stats.full_collections.count:
        row = _time("full collections", stats.full_collections.seconds)
        yield "Python's garbage collector", [row._replace(number=str(stats.full_collections.count))]
    if stats.watched_forwards:
        yield "synchronisations of the host, per forward", list(_syncs(stats)) or [Row("none", "0", "")]
    rates = {"out": stats.out_gb_per_s, "in": stats.in_gb_per_s}
    yield "link", [Row(label, "", f"{rate:.1f} GB/s") for label, rate in rates.items()]
    captured = [_size("kept for captured graphs", stats.host_captured_bytes)] if stats.host_captured_bytes else []
    yield "store", [_size("held now", stats.host_bytes), *captured, _size("reserved", stats.host_reserved_bytes)]


def _syncs(stats: Stats) -> Iterator[Row]:
    """A row for each line of code, the most frequent first; modules that differ by numbers alone count together."""
    waits: dict[Sync, Wait] = {}
    for sync, wait in stats.syncs.items():
        pattern = re.sub(r"\b\d+\b", "*", sync.module)
        waits.setdefault(sync._replace(module=pattern), Wait()).add(wait.seconds, wait.count)
    for sync, wait in sorted(waits.items(), key=lambda row: -row[1].count):
        count, seconds = wait.count / stats.watched_forwards, wait.seconds / stats.watched_forwards
        yield _time(", ".join(filter(None, sync)), seconds)._replace(number=f"{count:.1f}")


def _count(label: str, count: Count) -> Row:
    return Row(label, str(count.count), format_bytes(count.nbytes))


def _time(label: str, seconds: float) -> Row:
    return Row(label, "", f"{seconds * 1e3:.1f} ms")


def _size(label: str, nbytes: int) -> Row:
    return Row(label, "", format_bytes(nbytes))
