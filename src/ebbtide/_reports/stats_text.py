"""Stats as a table in plain text of fixed width."""

from typing import NamedTuple

from ebbtide._engine.stats import Count, Stats
from ebbtide._utils.sizes import format_bytes


class Row(NamedTuple):
    """One line of the report; `number` is empty for times, rates and sizes."""

    label: str
    number: str
    amount: str


Section = tuple[str, list[Row]]


def stats_text(stats: Stats) -> str:
    """The figures of `stats`: every line equally wide, no escape sequences, fit for a log."""
    sections = _sections(stats)
    every_row = [row for _, rows in sections for row in rows]
    label, number, amount = (max(len(row[column]) for row in every_row) for column in range(3))
    width = max(label + number + amount + 6, len(_headline(stats)))
    text = [_headline(stats).ljust(width)]
    for title, rows in sections:
        text.append(title.ljust(width))
        text += [f"  {row.label:<{label}}  {row.number:>{number}}  {row.amount:>{amount}}".ljust(width) for row in rows]
    return "\n".join(text)


def _headline(stats: Stats) -> str:
    return f"ebbtide: {stats.saved_tensors} saved tensors, {format_bytes(stats.out.nbytes)} moved out"


def _sections(stats: Stats) -> list[Section]:
    return [
        ("parcels", _parcels(stats)),
        ("saved tensors kept on the device", _kept(stats)),
        *_regions(stats),
        *_step(stats),
        ("stall", [_time("forward", stats.stall_forward_s), _time("backward", stats.stall_backward_s)]),
        ("link", [_rate("out", stats.out_gb_per_s), _rate("in", stats.in_gb_per_s)]),
        ("store", _store(stats)),
    ]


def _parcels(stats: Stats) -> list[Row]:
    return [
        _count("made", stats.parcels),
        _count("moved out", stats.out),
        _count("fetched back", stats.inbound),
        _count("shared with a parcel on its way", stats.shared),
        _count("masks packed into bits (bytes as saved)", stats.packed),
        _count("used straight from the device", stats.forwarded),
        _count("fetched on demand (misses)", stats.misses),
        _count("offloaded, but memory still referenced", stats.freed_nothing),
        _count("failed to be written", stats.failed),
    ]


def _kept(stats: Stats) -> list[Row]:
    largest_first = sorted(stats.kept.items(), key=lambda kept: -kept[1].nbytes)
    return [_count(reason.value, count) for reason, count in largest_first] or [_count("none", Count())]


def _regions(stats: Stats) -> list[Section]:
    rows = [
        _count("recomputed tensors", stats.recomputed),
        _count("outputs not worth keeping", stats.dropped),
        *(Row(f"not prepared: {why.value}", str(count), "") for why, count in stats.unable.items()),
    ]
    return [("recomputed regions", rows)] if stats.recomputed.count or stats.unable else []


def _step(stats: Stats) -> list[Section]:
    times = {"predicted time": stats.predicted_step_s, "measured time": stats.measured_step_s}
    sizes = {
        "budget": stats.budget_bytes,
        "predicted peak": stats.predicted_peak_bytes,
        "measured peak": stats.measured_peak_bytes,
    }
    rows = [_time(label, seconds) for label, seconds in times.items() if seconds is not None]
    rows += [_size(label, nbytes) for label, nbytes in sizes.items() if nbytes is not None]
    return [("step", rows)] if rows else []


def _store(stats: Stats) -> list[Row]:
    rows = [_size("held now", stats.host_bytes), _size("reserved", stats.host_reserved_bytes)]
    if stats.host_captured_bytes:
        rows.insert(1, _size("kept for captured graphs", stats.host_captured_bytes))
    return rows


def _count(label: str, count: Count) -> Row:
    return Row(label, str(count.count), format_bytes(count.nbytes))


def _time(label: str, seconds: float) -> Row:
    return Row(label, "", f"{seconds * 1e3:.1f} ms")


def _rate(label: str, gb_per_s: float) -> Row:
    return Row(label, "", f"{gb_per_s:.1f} GB/s")


def _size(label: str, nbytes: int) -> Row:
    return Row(label, "", format_bytes(nbytes))
