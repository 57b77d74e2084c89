"""Memory over time as a picture. Needs matplotlib: `pip install 'ebbtide[cli]'`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbtide._utils.sizes import MIB

_COLOURS = ("#9a9a9a", "#0b6fb8", "#d1661f", "#3a8f3a")


@dataclass(frozen=True)
class Curve:
    """One line of the picture.

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
        curves: one per run; times of each start at zero.
        path: the file to write.
        title: of the picture.
        memory: kind of the memory, for the axis: "resident memory".
    """
    # Without pyplot no display is needed, and the user's choice of backend stays.
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour in zip(curves, _COLOURS, strict=False):
        _draw_curve(axes, curve, colour)
    _label(axes, title, memory)
    figure.savefig(path)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    mib = [nbytes / MIB for nbytes in curve.nbytes]
    axes.fill_between(curve.seconds, mib, color=colour, alpha=0.15, linewidth=0)
    axes.plot(curve.seconds, mib, color=colour, linewidth=1.6, label=curve.label)
    peak = curve.peak_bytes / MIB
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


def _label(axes: Axes, title: str, memory: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("time since the first step began (s)")
    axes.set_ylabel(f"{memory} (MiB)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(_COLOURS), frameon=False)
