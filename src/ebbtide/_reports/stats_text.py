"""Stats as a table: for a terminal with rich, or as plain text of fixed width."""

from typing import NamedTuple

from rich.table import Table

from ebbtide._engine.stats import Count, Stats
from ebbtide._utils.sizes import format_bytes


class Row(NamedTuple):
    """One line of the report."""

    label: str
    how_many: str
    """Empty for times, rates and sizes."""
    amount: str


Section = tuple[str, list[Row]]


def stats_table(stats: Stats) -> Table:
    """The totals of a door as a rich table::

    rich.print(stats_table(context.stats()))
    """
    table = Table(title=_headline(stats), title_justify="left")
    table.add_column("since the door was opened")
    table.add_column("count", justify="right")
    table.add_column("amount", justify="right")
    for title, rows in _sections(stats):
        table.add_section()
        table.add_row(title, style="bold")
        for row in rows:
            table.add_row(f"  {row.label}", row.how_many, row.amount)
    return table


def stats_text(stats: Stats) -> str:
    """The same as plain text: every line equally wide, no escape sequences, fit for a log."""
    sections = _sections(stats)
    every_row = [row for _, rows in sections for row in rows]
    label, how_many, amount = (max(len(row[column]) for row in every_row) for column in range(3))
    width = max(label + how_many + amount + 6, len(_headline(stats)))
    text = [_headline(stats).ljust(width)]
    for title, rows in sections:
        text.append(title.ljust(width))
        text += [
            f"  {row.label:<{label}}  {row.how_many:>{how_many}}  {row.amount:>{amount}}".ljust(width) for row in rows
        ]
    return "\n".join(text)


def _headline(stats: Stats) -> str:
    return f"ebbtide: {stats.saves} saves, {format_bytes(stats.out.nbytes)} moved out"


def _sections(stats: Stats) -> list[Section]:
    return [
        ("parcels", _parcels(stats)),
        ("saves kept on the device", _kept(stats)),
        *_regions(stats),
        *_step(stats),
        ("stall", [_time("forward", stats.stall_forward_s), _time("backward", stats.stall_backward_s)]),
        ("link", [_rate("out", stats.out_gb_per_s), _rate("in", stats.in_gb_per_s)]),
        ("store", _store(stats)),
    ]


def _parcels(stats: Stats) -> list[Row]:
    return [
        _tally("made", stats.parcels),
        _tally("moved out", stats.out),
        _tally("fetched back", stats.inbound),
        _tally("shared with a parcel on its way", stats.shared),
        _tally("masks packed into bits (bytes as saved)", stats.packed),
        _tally("used straight from the device", stats.forwarded),
        _tally("fetched on demand (misses)", stats.misses),
        _tally("freed nothing (held by others)", stats.unfreed),
        _tally("failed to be written", stats.failed),
    ]


def _kept(stats: Stats) -> list[Row]:
    largest_first = sorted(stats.kept.items(), key=lambda kept: -kept[1].nbytes)
    return [_tally(reason.value, tally) for reason, tally in largest_first] or [_tally("none", Count())]


def _regions(stats: Stats) -> list[Section]:
    """Of regions that run again, where there are any."""
    rows = [
        _tally("saves that left nothing in forward", stats.recomputed),
        _tally("dear outputs that it is of no use to hold", stats.dropped),
        *(Row(f"not prepared: {why.value}", str(count), "") for why, count in stats.unable.items()),
    ]
    return [("regions that run again", rows)] if stats.recomputed.count or stats.unable else []


def _step(stats: Stats) -> list[Section]:
    """Of a plan and of the steps by that plan, as far as known."""
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
        rows.insert(1, _size("of it kept for captured graphs", stats.host_captured_bytes))
    return rows


def _tally(label: str, tally: Count) -> Row:
    return Row(label, str(tally.count), format_bytes(tally.nbytes))


def _time(label: str, seconds: float) -> Row:
    return Row(label, "", f"{seconds * 1e3:.1f} ms")


def _rate(label: str, gb_per_s: float) -> Row:
    return Row(label, "", f"{gb_per_s:.1f} GB/s")


def _size(label: str, nbytes: int) -> Row:
    return Row(label, "", format_bytes(nbytes))
