"""A run as an HTML page for offline reading: no script, no link, and all names escaped."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from matplotlib.figure import Figure

from ebbtide._planner.solve import Solver
from ebbtide._planner.view import Memory, StepView, view_of_plan, view_with
from ebbtide._plans import Recipe, short_recipe
from ebbtide._profiling.profile import Profile, RegionProfile
from ebbtide._profiling.timeline import Timeline
from ebbtide._reports import pictures
from ebbtide._reports.html import reason, sizes, table
from ebbtide._reports.run import Run
from ebbtide._utils.sizes import GIB, format_bytes

_POINTS = 16  # of the Pareto curve

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f4f6f8;%s}
@media(prefers-color-scheme:dark){:root{--paper:#0f1318;--card:#1a2027;--ink:#e8ebef;--faint:#3d454f;--grey:#8a95a1;
--blue:#5aa9e6;--orange:#f0914a;--green:#6cc070;--purple:#b794f4;--red:#ff6b7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
header,main{max-width:76rem;margin:auto;padding:0 1rem}
main{padding-bottom:3rem}
h1{font-size:1.15rem;margin:1.2rem 0 .2rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .4rem}
p{max-width:60rem;margin:.4rem 0}
.verdict{font-size:1.5rem;line-height:1.3;font-weight:650}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1rem 0}
dl div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
dt{font-size:.85rem}dd{margin:0;font-size:1.35rem;font-weight:650}
dd small{display:block;font-size:.85rem;font-weight:400}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%%,26rem),1fr));gap:1rem;align-items:start}
.pair>*{min-width:0}
figure{margin:.5rem 0;background:var(--card);border-radius:.5rem;padding:.5rem}
figure.wide{overflow-x:auto}figure.wide svg{min-width:50rem}
figcaption{font-size:.85rem;padding:0 .3rem}
svg{display:block;width:100%%;height:auto}svg text{fill:var(--ink)}
.scroll{overflow:auto;max-height:34rem;border:1px solid var(--faint);border-radius:.5rem}
table{border-collapse:collapse;width:100%%;font-size:.9rem}
caption{text-align:left;padding:.4rem .6rem;font-size:.85rem}
th,td{text-align:right;padding:.3rem .6rem;border-top:1px solid var(--faint);white-space:nowrap;vertical-align:top}
thead th{position:sticky;top:0;background:var(--card)}
tbody th,thead th:first-child,td.text,th.text{text-align:left}
td.wrap{white-space:normal;min-width:22rem}tbody th{font-weight:600}
pre{overflow:auto;background:var(--card);border-radius:.5rem;padding:.8rem;font-size:.8rem}
:focus-visible{outline:2px solid var(--blue)}
"""


_PREDICTED = ("step_s", "peak_bytes", "moved_bytes", "host_bytes", "stall_forward_s", "stall_backward_s")  # in figures


def run_figures(run: Run) -> dict[str, Any]:
    """What the page of a run begins with, as data: bytes, seconds, and the metrics of `Stats.metrics`."""
    found: dict[str, Any] = {"verdict": _without_comparison(run)}
    if (step := _comparison(run)) is not None:
        found = {"verdict": step.verdict, **step.figures()}
    plan = {"budget": run.plan.budget, "status": run.plan.status}
    about = {"made_for": run.made_for, "rank": run.rank, "ranks": run.ranks, **plan}
    return {**about, **found, "metrics": run.metrics, "stall_by_region_s": run.stalls}


def run_page(run: Run) -> str:
    """The page of a run."""
    rank = f", rank {run.rank} of {run.ranks}" if run.ranks > 1 else ""
    title = f"ebbtide: {_title(run.made_for)}{rank}"
    if (step := _comparison(run)) is not None:
        top = step.verdict, f"<dl>{''.join(step.tiles())}</dl>"
        middle = [step.memory(), step.lanes(), _regions(run), step.pareto()]
    else:
        top = _without_comparison(run), ""
        middle = [_regions(run)] if run.plan.regions else []
    sections = [*middle, *([_steps(run)] if run.steps else []), _figures(run)]
    style = _STYLE % "".join(f"--{name}:{value};" for name, value in pictures.COLOURS.items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style}</style></head>
<body><header><h1>{escape(title)}</h1></header>
<main><p class="verdict">{escape(top[0])}</p>{top[1]}
{"".join(sections)}</main></body></html>
"""


def _comparison(run: Run) -> "_Comparison | None":
    if run.profile is None or run.plan.predicted is None or run.profile.plain_s <= 0:
        return None
    return _Comparison(run, run.profile)


class _Comparison:
    """A step by the plan beside a step that keeps everything."""

    def __init__(self, run: Run, profile: Profile) -> None:
        assert run.plan.predicted is not None
        self._run = run
        self._profile = profile
        self._predicted = run.plan.predicted
        self._plain = view_with(profile, Recipe("keep"))
        self._planned = view_of_plan(profile, run.plan)
        budget, device = run.metrics.get("ebbtide/budget_gib", 0.0) * GIB, profile.device_bytes
        limits = {"budget": round(budget), "device": device or 0}
        self._limits = {name: nbytes for name, nbytes in limits.items() if nbytes}
        self._graphs = len(profile.order) // 2  # of the predicted timeline; other figures are means of one

    @cached_property
    def _peak(self) -> tuple[int, str]:
        """Peak bytes of a step by the plan, and their source."""
        last = self._run.changes[-1].number if self._run.changes else 0
        seen = max((step.peak_bytes for step in self._run.steps if step.number > last), default=0)
        return (seen, "measured") if seen else (self._planned.outcome.peak_bytes, "predicted")

    @property
    def verdict(self) -> str:
        plain, planned, peak_bytes = self._plain.outcome, self._planned.outcome, self._peak[0]
        saved, slower = plain.peak_bytes - peak_bytes, planned.step_s / plain.step_s - 1
        kind, most = max(self._planned.peak._asdict().items(), key=lambda row: row[1])
        holds = f"Largest part: {format_bytes(most)} {pictures.KINDS[kind][0]}."
        if saved < 0.01 * plain.peak_bytes:
            return f"ebbtide saves next to nothing here: a peak of {format_bytes(peak_bytes)} either way. {holds}"
        # Of two predictions: measured steps of now say nothing of steps without ebbtide at another time.
        time = f"{slower:.1%} slower" if slower >= 0.0005 else "no slower"
        return (
            f"{format_bytes(saved)} less memory ({saved / plain.peak_bytes:.0%}): a peak of {format_bytes(peak_bytes)} "
            f"instead of {format_bytes(plain.peak_bytes)}, for steps {time}. {holds}"
        )

    def figures(self) -> dict[str, Any]:
        """The measured or predicted peak, and predictions by the plan and with everything kept."""
        peak_bytes, source = self._peak
        steps = {"predicted": self._planned.outcome, "without": self._plain.outcome}
        outcomes = {name: {key: getattr(step, key) for key in _PREDICTED} for name, step in steps.items()}
        return {"peak_bytes": peak_bytes, "peak_is": source, **outcomes}

    def tiles(self) -> Iterable[str]:
        plain, planned, line = self._plain.outcome, self._planned.outcome, self._run.timeline
        peak_bytes, how = self._peak
        base, device = self._profile.base_bytes, self._profile.device_bytes
        yield _tile("peak memory", format_bytes(peak_bytes), f"{how}; {format_bytes(plain.peak_bytes)} without")
        yield _tile(
            "added by a step", format_bytes(peak_bytes - base), f"{format_bytes(plain.peak_bytes - base)} without"
        )
        seen_ms = self._run.metrics.get("ebbtide/measured_step_ms")
        step_s, how = planned.step_s, "predicted"
        if seen_ms is not None:
            step_s, how = seen_ms / 1e3, f"measured; predicted {_ms(planned.step_s)}"
        yield _tile("step", _ms(step_s), f"{how}; {_ms(plain.step_s)} without")
        yield _tile(
            "out and back", format_bytes(planned.moved_bytes), f"{format_bytes(planned.host_bytes)} in the store"
        )
        stall_s, how = planned.stall_forward_s + planned.stall_backward_s, "predicted"
        if line is not None:
            stall_s, how = _seconds(line, "compute", "stall"), "measured"
        yield _tile("stalls", _ms(stall_s), how)
        recompute_s = _seconds(self._planned.timeline, "compute", "recompute") / self._graphs
        yield _tile("recomputation", _ms(recompute_s), "predicted")
        yield _tile(
            "budget", self._run.plan.budget or "none", f"{format_bytes(device)} on the device" if device else ""
        )

    def memory(self) -> str:
        views = {"without ebbtide": self._plain, "with ebbtide": self._planned}
        most = max(view.outcome.peak_bytes for view in views.values())
        drawn = [self._memory(title, view, most) for title, view in views.items()]
        plain, planned = self._plain.peak, self._planned.peak
        labels = [label for label, _ in pictures.KINDS.values()]
        rows = [(label, format_bytes(a), format_bytes(b)) for label, a, b in zip(labels, plain, planned, strict=True)]
        base = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self._profile.base.items() if nbytes > 0)
        caption = f"At the peak, as predicted. Before the step: {base or 'nothing known'}"
        return _section(
            "What holds the memory", _pair(*drawn), _scroll(table(caption, ("kind", "without", "with"), rows))
        )

    def _memory(self, title: str, view: StepView, most: int) -> str:
        kinds = dict(zip(Memory._fields, zip(*view.memory, strict=True), strict=True))
        peak = format_bytes(view.outcome.peak_bytes)
        figure = pictures.memory(view.times, kinds, self._limits, most, f"{title}: peak {peak}")
        return _drawn(
            figure, title, f"Memory over a step {title}, by kind: the peak is {peak}, divided in the table below"
        )

    def lanes(self) -> str:
        intro = "<p>Copies beside compute cost little. A stall is time in which compute waits for a copy.</p>"
        graphs = f" {self._graphs}-graph" if self._graphs > 1 else ""
        lines = {"measured": self._run.timeline, f"predicted{graphs}": self._planned.timeline}
        return _section(
            "Compute and copies", intro, *(_lanes(name, line) for name, line in lines.items() if line is not None)
        )

    def pareto(self) -> str:
        points = Solver(self._profile).pareto_curve(_POINTS)
        plain = self._plain.outcome.peak_bytes, self._plain.outcome.step_s
        marks = {"this plan": (self._predicted.peak_bytes, self._predicted.step_s)}
        if self._profile.has_recomputation:
            outcome = view_with(self._profile, Recipe("recompute", inputs="keep")).outcome
            marks["checkpointing"] = (outcome.peak_bytes, outcome.step_s)
        marks["smallest"] = (points[0].budget_bytes, points[0].outcome.step_s)
        curve = {"fastest plan at a budget": [(point.budget_bytes, point.outcome.step_s) for point in points]}
        title = _title(self._profile.made_for, "\non ")
        figure = pictures.pareto(curve, marks, self._limits, plain, title, width=pictures.NARROW)
        rows = [(name, format_bytes(nbytes), _ms(s)) for name, (nbytes, s) in {**marks, "all kept": plain}.items()]
        drawn = _drawn(
            figure, "pareto", "Step time against memory, with plans marked that are rows of the table beside"
        )
        intro = "<p>Each point is the fastest plan with a peak at most so large.</p>"
        marked = _scroll(table("Marks, as predicted", ("plan", "peak", "step"), rows))
        return _section("Time against memory", intro, _pair(drawn, marked))


def _without_comparison(run: Run) -> str:
    if run.plan.status:
        return f"No comparison: {run.plan.status}"
    moved = format_bytes(run.metrics.get("ebbtide/moved_gib", 0.0) * GIB)
    return (
        f"{moved} moved out over the run. No planner has measured a step, so there is no comparison: write "
        "ebbtide.offload(model), with or without a budget, for one"
    )


def _lanes(name: str, line: Timeline) -> str:
    out, back = (_ms(_seconds(line, lane, "copy")) for lane in ("out", "back"))
    stalls = _ms(_seconds(line, "compute", "stall"))
    what = f"{name} step of {_ms(line.step_s)}: copies out {out}, copies back {back}, stalls {stalls}"
    return _drawn(pictures.lanes(line, what), name, what, f' class="wide" tabindex="0" aria-label="{name} step"')


def _regions(run: Run) -> str:
    measured: dict[str, list[RegionProfile]] = {}
    for region in () if run.profile is None else run.profile.regions:
        measured.setdefault(region.name, []).append(region)
    rows: list[Sequence[str]] = []
    for name, plan in run.plan.regions.items():
        known = measured.get(name, [])
        saved, forward, backward = ("", "", "") if not known else (
            format_bytes(sum(region.saved_bytes for region in known)),
            _ms(sum(region.forward_s for region in known)),
            _ms(sum(region.backward_s for region in known)),
        )  # fmt: skip
        recompute = "" if plan.cost is None else _ms(plan.cost.recompute_s)
        times = forward, backward, recompute, _ms(run.stalls.get(name, 0.0))
        rows.append((name, short_recipe(plan.recipe), saved, *sizes(plan), *times, reason(plan)))
    columns = "region", "recipe", "saved", "kept", "moved", "forward", "backward", "recompute", "stalls", "reason"
    caption = "Bytes and times of one step. Stalls: of the whole run, for late parcels of the region"
    return _section("Regions", _scroll(table(caption, columns, rows)))


def _steps(run: Run) -> str:
    last = run.steps[-1]
    times = [(step.number, step.seconds, step.predicted_s) for step in run.steps]
    peaks = [(step.number, step.peak_bytes, step.predicted_peak_bytes) for step in run.steps if step.peak_bytes]
    rows = [("step", _ms(last.predicted_s), _ms(last.seconds))]
    figures = [pictures.steps(times, run.changes, "time of a step", "ms", 1e-3)]
    if peaks:
        rows.append(("peak", format_bytes(peaks[-1][2]), format_bytes(peaks[-1][1])))
        figures.append(pictures.steps(peaks, run.changes, "peak of a step", *pictures.unit_of(peaks[-1][1])))
    text = "Steps of the run, measured and predicted: the table below has the last"
    drawn = (_drawn(figure, f"steps{number}", text) for number, figure in enumerate(figures))
    last_step = table(f"The last step, number {last.number}", ("figure", "predicted", "measured"), rows)
    changes = "".join(f"<li>after step {number}: {escape(what)}</li>" for number, what in run.changes)
    listed = f"<p>Changes of the plan, dotted in the pictures:</p><ul>{changes}</ul>"
    return _section("Predicted and measured", _pair(*drawn), _scroll(last_step), listed)


def _figures(run: Run) -> str:
    made_for = ", ".join(f"{name} {value}" for name, value in run.made_for.items())
    report = f'<pre tabindex="0" role="region" aria-label="figures">{escape(run.report)}</pre>'
    return _section("All figures of the run", report, f"<p>{escape(made_for)}</p>")


def _title(made_for: Mapping[str, str], between: str = " on ") -> str:
    return between.join(made_for[key] for key in ("model", "device") if key in made_for) or "a run"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _tile(name: str, value: str, note: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"


def _pair(*parts: str) -> str:
    return f'<div class="pair">{"".join(parts)}</div>'


def _drawn(figure: Figure, name: str, text: str, attributes: str = "") -> str:
    return f"<figure{attributes}>{pictures.svg(figure, name.replace(' ', '-'), text)}</figure>"


def _scroll(found: str) -> str:
    return f'<div class="scroll" tabindex="0" role="group" aria-label="table">{found}</div>'


def _seconds(timeline: Timeline, lane: str, work: str) -> float:
    return sum(each.end_s - each.begin_s for each in timeline.intervals if (each.lane, each.work) == (lane, work))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
