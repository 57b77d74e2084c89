"""Time against memory as a table: what a step takes at each budget, beside plans that only move or only run again."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ebbtide._utils.sizes import format_bytes


@dataclass(frozen=True)
class FrontRow:
    """The fastest plan at a budget. Seconds and bytes of one step.

    Attributes:
        budget_bytes: the peak to stay under.
        step_s, peak_bytes: what is predicted of it.
        moved_bytes: out and back.
        again_s: what second runs take.
        does: with how many regions what is done, in words.
        only_moving_s, only_again_s: of the fastest plan in which nothing runs again, or nothing moves; None: none fits.
    """

    budget_bytes: int
    step_s: float
    peak_bytes: int
    moved_bytes: int
    again_s: float
    does: str
    only_moving_s: float | None
    only_again_s: float | None


def front_table(rows: Sequence[FrontRow], plain_s: float, title: str) -> Table:
    """One line per budget. `plain_s` is the step with everything kept, what "x plain" is of."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("budget", "step", "x plain", "peak", "moved", "run again", "only moving", "only running again"):
        table.add_column(heading, justify="right")
    table.add_column("regions")
    for row in rows:
        table.add_row(
            format_bytes(row.budget_bytes),
            _ms(row.step_s),
            _times(row.step_s, plain_s),
            format_bytes(row.peak_bytes),
            format_bytes(row.moved_bytes),
            _ms(row.again_s),
            _times(row.only_moving_s, plain_s),
            _times(row.only_again_s, plain_s),
            row.does,
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _times(seconds: float | None, plain_s: float) -> str:
    return "none fits" if seconds is None else f"{seconds / plain_s:.3f}"
