"""Memory over time and time against memory as pictures. Needs matplotlib: `pip install 'ebbtide[cli]'`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebbtide._utils.sizes import GIB, MIB

_COLOURS = ("#0b6fb8", "#d1661f", "#3a8f3a")
_PLAIN_COLOUR = "#9a9a9a"


@dataclass(frozen=True)
class Curve:
    """Memory during a run.

    Attributes:
        label: name of the run.
        seconds: time of each sample, from the start of the run.
        nbytes: memory at the time of each sample.
        peak_bytes: counted by the system, which sees peaks between two samples.
    """

    label: str
    seconds: Sequence[float]
    nbytes: Sequence[int]
    peak_bytes: int


def draw_timeline(curves: Sequence[Curve], path: Path, *, title: str, memory: str) -> None:
    """Write the curves into a PNG at `path`.

    Args:
        curves: one per run, the plain run first; times of each start at zero.
        path: the file to write.
        title: of the picture.
        memory: kind of the memory, for the axis: "resident memory".
    """
    figure, axes = _axes(4.8, title, "time since the first step began (s)", f"{memory} (MiB)")
    for curve, colour in zip(curves, (_PLAIN_COLOUR, *_COLOURS), strict=False):
        mib, peak = [nbytes / MIB for nbytes in curve.nbytes], curve.peak_bytes / MIB
        axes.fill_between(curve.seconds, mib, color=colour, alpha=0.15, linewidth=0)
        axes.plot(curve.seconds, mib, color=colour, linewidth=1.6, label=curve.label)
        axes.axhline(peak, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"peak {peak:,.0f} MiB",
            (1, peak),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=colour,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.spines["right"].set_visible(False)
    _save(figure, axes, -0.14, path)


def draw_pareto(
    curves: Mapping[str, Sequence[tuple[int, float]]], plain_bytes: int, plain_s: float, path: Path, *, title: str
) -> None:
    """Write time against memory into a picture at `path`.

    Args:
        curves: by label of the actions, the most important first: budgets in bytes, from the smallest possible on, and
            the seconds of the fastest step at each.
        plain_bytes, plain_s: peak and step with everything kept.
        path: the file to write; its ending says the format.
        title: of the picture.
    """
    figure, axes = _axes(5, title, "budget: most device memory allocated at once (GiB)", "predicted step (ms)")
    for place, (colour, (label, points)) in enumerate(zip(_COLOURS, curves.items(), strict=False)):
        gib, ms = [nbytes / GIB for nbytes, _ in points], [s * 1e3 for _, s in points]
        axes.plot(gib, ms, color=colour, marker="o", markersize=3.5, label=label, zorder=5 - place)
    plain = ([plain_bytes / GIB], [plain_s * 1e3])
    axes.plot(*plain, "k*", markersize=11, label="plain: all kept", linestyle="none", zorder=9)
    slowest_s = [max((s for _, s in points), default=plain_s) for points in curves.values()]
    # Above 1.4 times plain curves leave the picture: plans that only move may take several times as long.
    span_s = max(slowest_s[0], min(max(slowest_s), 1.4 * plain_s)) - plain_s
    margin_s = 0.06 * span_s + 1e-3 * plain_s  # more than zero if all steps are equal
    low_s, high_s = plain_s - margin_s, plain_s + span_s + margin_s
    axes.set_ylim(low_s * 1e3, high_s * 1e3)
    times = axes.twinx()
    times.set_ylim(low_s / plain_s, high_s / plain_s)
    times.set_ylabel("times the plain step")
    times.spines["top"].set_visible(False)
    _save(figure, axes, -0.12, path)


def _axes(height: float, title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    # Without pyplot no display is needed, and the user's choice of backend stays.
    figure = Figure(figsize=(9, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    return figure, axes


def _save(figure: Figure, axes: Axes, legend_y: float, path: Path) -> None:
    columns = len(_COLOURS) + 1
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, legend_y), ncols=columns, frameon=False)
    figure.savefig(path)
