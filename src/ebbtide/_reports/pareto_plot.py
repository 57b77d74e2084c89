"""Time against memory as a picture. Needs matplotlib: `pip install 'ebbtide[cli]'`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbtide._utils.sizes import GIB

_COLOURS = ("#0b6fb8", "#d1661f", "#3a8f3a")


@dataclass(frozen=True)
class ParetoCurve:
    """Steps of one way to stay under a budget.

    Attributes:
        label: the actions of the plans.
        budget_bytes: from the smallest possible budget on.
        step_s: of the fastest plan at each budget.
    """

    label: str
    budget_bytes: Sequence[int]
    step_s: Sequence[float]


def draw_pareto(curves: Sequence[ParetoCurve], plain_bytes: int, plain_s: float, path: Path, *, title: str) -> None:
    """Write the curves into a picture at `path`.

    Args:
        curves: the most important first.
        plain_bytes, plain_s: peak and step with everything kept.
        path: the file to write; its ending says the format.
        title: of the picture.
    """
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot no display is needed
    axes = figure.add_subplot()
    for place, (curve, colour) in enumerate(zip(curves, _COLOURS, strict=False)):
        gib, ms = [nbytes / GIB for nbytes in curve.budget_bytes], [s * 1e3 for s in curve.step_s]
        axes.plot(gib, ms, color=colour, marker="o", markersize=3.5, label=curve.label, zorder=5 - place)
    axes.plot(
        [plain_bytes / GIB], [plain_s * 1e3], "k*", markersize=11, label="plain: all kept", linestyle="none", zorder=9
    )
    _limit(axes, curves, plain_s)
    _label(axes, title)
    figure.savefig(path)


def _limit(axes: Axes, curves: Sequence[ParetoCurve], plain_s: float) -> None:
    everything = max((s for curve in curves for s in curve.step_s), default=plain_s)
    needed = max((s for curve in curves[:1] for s in curve.step_s), default=plain_s)
    # Above 1.4 times plain curves leave the picture: plans that only move may take several times as long.
    span_s = max(needed, min(everything, 1.4 * plain_s)) - plain_s
    margin_s = 0.06 * span_s + 1e-3 * plain_s  # more than zero if all steps are equal
    low_s, high_s = plain_s - margin_s, plain_s + span_s + margin_s
    axes.set_ylim(low_s * 1e3, high_s * 1e3)
    times = axes.twinx()
    times.set_ylim(low_s / plain_s, high_s / plain_s)
    times.set_ylabel("times the plain step")
    times.spines["top"].set_visible(False)


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("budget: most device memory allocated at once (GiB)")
    axes.set_ylabel("predicted step (ms)")
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(_COLOURS) + 1, frameon=False)
