"""Pictures of memory, lanes and times. Needs matplotlib: `pip install 'ebbtide[cli]'`."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import nan
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ebbtide._profiling.timeline import Change, Timeline
from ebbtide._utils.sizes import GIB, MIB, format_bytes

COLOURS: Mapping[str, str] = {
    "ink": "#1b1f24",
    "faint": "#c9ced4",
    "grey": "#828b96",
    "blue": "#0b6fb8",
    "orange": "#d1661f",
    "green": "#3a8f3a",
    "purple": "#8250bf",
    "red": "#c0182b",
}
"""Of all pictures. A page gives each name another value in the dark."""

KINDS: Mapping[str, tuple[str, str]] = {
    "before": ("from before the step", "grey"),
    "kept": ("kept for backward", "blue"),
    "moving": ("on the way out or back", "orange"),
    "gradients": ("gradients of the step", "purple"),
    "working": ("working memory", "green"),
}
"""Kinds of memory: label and colour."""

_WORK: Mapping[str, tuple[str, str]] = {
    "forward": ("forward", "blue"),
    "recompute": ("recompute", "purple"),
    "backward": ("backward", "green"),
    "other": ("outside of regions", "grey"),
    "copy": ("copy", "orange"),
    "stall": ("stall: compute waits", "red"),
}
_LANES = ("back", "out", "compute")
_CURVES = ("blue", "orange", "green")
_SLOWEST = 1.4  # times the plain step: plans that only move may take several times as long, and leave the picture
_WIDEST = 1.25  # times the largest peak: budgets and devices may have much more
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names may hold a $
    "svg.fonttype": "none",
    "svg.hashsalt": "ebbtide",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), COLOURS["ink"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), COLOURS["faint"]),
}

_WIDE, _PAGE, NARROW = 9.0, 11.0, 5.6  # inches; the second fills a page, in letters as large as elsewhere


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


@mpl.rc_context(_STYLE)
def draw_timeline(curves: Sequence[Curve], path: Path, *, title: str, memory: str) -> None:
    """Write the curves into a PNG at `path`.

    Args:
        curves: one per run, the plain run first; times of each start at zero.
        path: the file to write.
        title: of the picture.
        memory: kind of the memory, for the axis: "resident memory".
    """
    figure, axes = _axes(_WIDE, 4.8, title, "time since the first step began (s)", f"{memory} (MiB)")
    for curve, colour in zip(curves, ("grey", *_CURVES), strict=False):
        mib, peak, colour = [nbytes / MIB for nbytes in curve.nbytes], curve.peak_bytes / MIB, COLOURS[colour]
        axes.fill_between(curve.seconds, mib, color=colour, alpha=0.15, linewidth=0)
        axes.plot(curve.seconds, mib, color=colour, linewidth=1.6, label=curve.label)
        _line(axes, peak, f"peak {peak:,.0f} MiB", colour)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    _legend(figure, axes)
    figure.savefig(path)


@mpl.rc_context(_STYLE)
def pareto(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    marks: Mapping[str, tuple[int, float]],
    limits: Mapping[str, int],
    plain: tuple[int, float],
    title: str,
    width: float = _WIDE,
) -> Figure:
    """Time against memory. Steps hold from a budget to the next; what leaves the picture is named below the title.

    Args:
        curves: by label of the actions, the most important first: budgets in bytes, from the smallest possible on, and
            the seconds of the fastest step at each.
        marks: peaks and steps of single plans, by label.
        limits: amounts of memory, by label.
        plain: peak and step with everything kept.
        title: of the picture.
    """
    plain_bytes, plain_s = plain
    most_bytes, most_s = _WIDEST * plain_bytes, _SLOWEST * plain_s
    points = {**{label: [mark] for label, mark in marks.items()}, **curves}
    first = next(iter(curves.values()), ())
    most_s = max([most_s, *(s for _, s in first)])
    outside = [f"{label} ({format_bytes(nbytes)})" for label, nbytes in limits.items() if nbytes > most_bytes]
    outside += [f"slower steps of {label}" for label, row in points.items() if any(s > most_s for _, s in row)]
    note = f"\nbeyond the picture: {', '.join(outside)}" if outside else ""
    unit, scale = unit_of(plain_bytes)
    x_label = f"most device memory allocated at once ({unit})"
    figure, axes = _axes(width, 5 if width == _WIDE else 4, title + note, x_label, "predicted step (ms)")
    for place, (colour, (label, row)) in enumerate(zip(_CURVES, curves.items(), strict=False)):
        at, ms = [nbytes / scale for nbytes, _ in row], [s * 1e3 for _, s in row]
        axes.plot(
            at, ms, color=COLOURS[colour], drawstyle="steps-post", label=label, marker="o", markersize=3.5,
            zorder=5 - place,
        )  # fmt: skip
    shapes = zip("Dsv^P", ("red", "purple", "green", "orange", "blue"), marks.items(), strict=False)
    for shape, colour, (label, (nbytes, seconds)) in shapes:
        axes.plot(
            nbytes / scale, seconds * 1e3, shape, color=COLOURS[colour], markersize=8, label=label, zorder=8,
            markeredgecolor=COLOURS["ink"],
        )  # fmt: skip
    axes.plot(
        plain_bytes / scale, plain_s * 1e3, "*", color=COLOURS["ink"], markersize=11, label="all kept", zorder=9,
        linestyle="none",
    )  # fmt: skip
    for label, nbytes in limits.items():
        if nbytes <= most_bytes:
            axes.axvline(nbytes / scale, color=COLOURS["grey"], linestyle=(0, (4, 3)), linewidth=1)
            axes.annotate(
                f"{label} ",
                (nbytes / scale, 0.98),
                xycoords=("data", "axes fraction"),
                rotation=90,
                ha="right",
                va="top",
            )
    shown_s = [s for row in points.values() for _, s in row if s <= most_s]
    low_s, high_s = min([plain_s, *shown_s]), max([plain_s, *shown_s])
    margin_s = 0.06 * (high_s - low_s) + 1e-3 * plain_s  # more than zero if all steps are equal
    axes.set_ylim((low_s - margin_s) * 1e3, (high_s + margin_s) * 1e3)
    times = axes.twinx()
    times.set_ylim((low_s - margin_s) / plain_s, (high_s + margin_s) / plain_s)
    times.set_ylabel("times the plain step")
    times.spines[["top", "left"]].set_visible(False)
    _legend(figure, axes, columns=4 if width == _WIDE else 2)
    return figure


@mpl.rc_context(_STYLE)
def batch_sizes(
    rows: Sequence[tuple[int, float, int]],
    measured: Sequence[int],
    marks: Mapping[str, int],
    budget_bytes: int,
    title: str,
) -> Figure:
    """Samples per second and peaks over batch sizes, on a scale of powers of two.

    Args:
        rows: batch, samples per second and peak in bytes of each size that fits, in order.
        measured: sizes among the rows that a profile was measured at.
        marks: sizes among the rows, by label.
        budget_bytes: the peak to stay under.
        title: of the picture.
    """
    unit, scale = unit_of(budget_bytes)
    figure, axes = _axes(_WIDE, 5.4, title, "", "samples per second, predicted")
    grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    axes.set_subplotspec(grid[0])
    peaks = figure.add_subplot(grid[1], sharex=axes)
    sizes, speeds = [batch for batch, _, _ in rows], {batch: speed for batch, speed, _ in rows}
    axes.plot(sizes, list(speeds.values()), "o-", color=COLOURS["blue"], markersize=4, label="fastest plan")
    known = [batch for batch in measured if batch in speeds]
    axes.plot(
        known, [speeds[batch] for batch in known], "o", markersize=13, markerfacecolor="none", label="measured batch",
        markeredgecolor=COLOURS["ink"],
    )  # fmt: skip
    for shape, colour, (label, batch) in zip("*Ds", ("orange", "green", "purple"), marks.items(), strict=False):
        axes.plot(
            batch, speeds[batch], shape, color=COLOURS[colour], markersize=11 if shape == "*" else 7, zorder=8,
            markeredgecolor=COLOURS["ink"], linestyle="none", label=f"{label}: {batch}",
        )  # fmt: skip
    peaks.plot(sizes, [nbytes / scale for _, _, nbytes in rows], "o-", color=COLOURS["blue"], markersize=4)
    _line(peaks, budget_bytes / scale, f"budget {format_bytes(budget_bytes)}", COLOURS["ink"])
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    powers = [batch for batch in sizes if batch & (batch - 1) == 0]
    peaks.set_xticks(powers, [f"{batch}" for batch in powers])
    peaks.set_xlabel("samples in a batch")
    peaks.set_ylabel(f"peak memory ({unit})")
    peaks.grid(alpha=0.5)
    peaks.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)
    axes.set_ylim(0, 1.12 * max(speeds.values()))
    peaks.set_ylim(0, 1.2 * budget_bytes / scale)
    _legend(figure, axes, columns=5)
    return figure


@mpl.rc_context(_STYLE)
def memory(
    times: Sequence[float], kinds: Mapping[str, Sequence[int]], limits: Mapping[str, int], most: float, title: str
) -> Figure:
    """Memory over a step, by kind. `times`: borders of the intervals in seconds; `most`: bytes at the upper edge."""
    unit, scale = unit_of(most)
    figure, axes = _axes(NARROW, 3.2, title, "time since the step began (ms)", unit)
    ms = [seconds * 1e3 for seconds in times]
    below = [0.0] * len(times)
    for name, values in kinds.items():
        label, colour = KINDS[name]
        above = [under + nbytes / scale for under, nbytes in zip(below, [*values, values[-1]], strict=True)]
        axes.fill_between(ms, below, above, step="post", color=COLOURS[colour], linewidth=0, label=label)
        below = above
    for label, nbytes in limits.items():
        if nbytes <= most:
            _line(axes, nbytes / scale, f"{label} {format_bytes(nbytes)}", COLOURS["ink"])
    axes.set_xlim(0, ms[-1])
    axes.set_ylim(0, 1.08 * most / scale)
    _legend(figure, axes, columns=2)
    return figure


@mpl.rc_context(_STYLE)
def lanes(timeline: Timeline, title: str) -> Figure:
    """Compute and both lanes of copies over a step, with the stalls of compute marked."""
    figure, axes = _axes(_PAGE, 2.6, title, "time since the step began (ms)", "")
    used = dict.fromkeys(_WORK, False)
    for place, lane in enumerate(_LANES):
        for work, (_, colour) in _WORK.items():
            found = [each for each in timeline.intervals if each.lane == lane and each.work == work]
            bars = [(each.begin_s * 1e3, (each.end_s - each.begin_s) * 1e3) for each in found]
            is_stall = work == "stall"
            rows = (place - 0.4, 0.3) if is_stall else (place - 0.4, 0.8)
            axes.broken_barh(
                bars, rows, facecolors=COLOURS[colour], edgecolors=COLOURS["ink"],
                linewidth=0.3, hatch="////" if is_stall else None,
            )  # fmt: skip
            used[work] = used[work] or bool(found)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_xlim(0, timeline.step_s * 1e3 or 1)
    axes.grid(visible=False, axis="y")
    patches = [
        Patch(facecolor=COLOURS[colour], label=label, hatch="////" if work == "stall" else None)
        for work, (label, colour) in _WORK.items()
        if used[work]
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


@mpl.rc_context(_STYLE)
def steps(
    rows: Sequence[tuple[int, float, float]], changes: Sequence[Change], title: str, unit: str, scale: float
) -> Figure:
    """Steps of a run: number, measured and predicted (0: unknown). What takes several times the median leaves the
    picture, and is counted below the title. `scale`: of the unit."""
    usual = sorted(seen for _, seen, _ in rows)[len(rows) // 2]
    most = max([2 * usual, *(predicted for _, _, predicted in rows)])
    outside = sum(seen > most for _, seen, _ in rows)
    note = f"\nbeyond the picture: {outside} larger" if outside else ""
    figure, axes = _axes(NARROW, 3.2, title + note, "step by a plan", unit)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)  # of a short run: no ticks between steps
    numbers, measured = [number for number, _, _ in rows], [seen / scale for _, seen, _ in rows]
    predicted = [expected / scale if expected else nan for _, _, expected in rows]
    axes.plot(numbers, measured, "o", color=COLOURS["blue"], markersize=3.5, label="measured")
    axes.plot(numbers, predicted, color=COLOURS["orange"], drawstyle="steps-mid", label="predicted")
    for change in changes:
        axes.axvline(change.number + 0.5, color=COLOURS["grey"], linestyle=(0, (1, 2)), linewidth=1)
    shown = [value for _, seen, expected in rows for value in (seen, expected) if value <= most]
    axes.set_ylim(0, 1.1 * max(shown) / scale or 1)
    _legend(figure, axes, columns=2)
    return figure


def unit_of(most_bytes: float) -> tuple[str, int]:
    """Name and bytes of the unit for an axis."""
    return ("GiB", GIB) if most_bytes >= GIB else ("MiB", MIB)


@mpl.rc_context(_STYLE)
def svg(figure: Figure, name: str, text: str) -> str:
    """The figure as SVG inside of HTML, in the colours of the page.

    Args:
        name: of the picture on the page, for ids.
        text: what the picture shows, for readers who do not see it.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    found = file.getvalue()
    found = re.sub(r"<metadata>.*?</metadata>", "", found[found.index("<svg") :], flags=re.DOTALL)
    label = escape(text, quote=True)
    found = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", found)
    found = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', found)
    for name, value in COLOURS.items():
        found = found.replace(value, f"var(--{name})")
    return found


def _axes(width: float, height: float, title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    # Without pyplot no display is needed, and the user's choice of backend stays.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes: Axes, height: float, label: str, colour: str) -> None:
    axes.axhline(height, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        label, (1, height), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points",
        ha="right", color=colour,
    )  # fmt: skip


def _legend(figure: Figure, axes: Axes, columns: int = 4) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
