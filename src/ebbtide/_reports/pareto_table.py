"""Time against memory as a table: steps at each budget, beside plans that only move or only recompute."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ebbtide._utils.sizes import format_bytes


@dataclass(frozen=True)
class ParetoRow:
    """The fastest plan at a budget. Seconds and bytes of one step.

    Attributes:
        budget_bytes: the peak to stay under.
        step_s, peak_bytes: predicted.
        moved_bytes: out and back.
        recompute_s: of recomputation.
        actions: numbers of regions by action, "14 selective, 2 keep".
        only_moving_s, only_recomputing_s: of the fastest plan that does nothing else; None: none fits.
    """

    budget_bytes: int
    step_s: float
    peak_bytes: int
    moved_bytes: int
    recompute_s: float
    actions: str
    only_moving_s: float | None
    only_recomputing_s: float | None


def pareto_table(rows: Sequence[ParetoRow], plain_s: float) -> Table:
    """One line per budget. `plain_s`: seconds of the step with everything kept, the unit of "x plain"."""
    table = Table(
        title="Time against memory: the fastest step at each budget", title_justify="left", title_style="bold"
    )
    for heading in ("budget", "step", "x plain", "peak", "moved", "recompute", "only moving", "only recomputing"):
        table.add_column(heading, justify="right")
    table.add_column("regions")
    for row in rows:
        table.add_row(
            format_bytes(row.budget_bytes),
            f"{row.step_s * 1e3:.1f} ms",
            _times(row.step_s, plain_s),
            format_bytes(row.peak_bytes),
            format_bytes(row.moved_bytes),
            f"{row.recompute_s * 1e3:.1f} ms",
            _times(row.only_moving_s, plain_s),
            _times(row.only_recomputing_s, plain_s),
            row.actions,
        )
    return table


def _times(seconds: float | None, plain_s: float) -> str:
    return "none fits" if seconds is None else f"{seconds / plain_s:.3f}"
