"""The lanes of a step as a trace for Perfetto and chrome://tracing, with the names and the clock of torch.profiler."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from ebbtide._errors import PlanError
from ebbtide._profiling.timeline import Interval, Timeline

_LANES = {"compute": 0, "out": 1, "back": 2}
_STALLS = 3


def write_trace(timelines: dict[str, Timeline], path: Path, other: Path | None = None) -> None:
    """Write the timelines as processes of one trace. Predicted steps begin with the measured step.

    Args:
        timelines: by name of the process.
        other: a trace of torch.profiler, to be joined.

    Raises:
        PlanError: `other` is no trace of torch.profiler.
        OSError: `path` cannot be written.
    """
    trace: dict[str, Any] = {"traceEvents": [], "baseTimeNanoseconds": 0, "displayTimeUnit": "ms"}
    if other is not None:
        trace = _load(other)
    began_ns = max((line.began_ns for line in timelines.values()), default=0)
    begin_us = (began_ns - trace["baseTimeNanoseconds"]) / 1e3
    for name, line in timelines.items():
        trace["traceEvents"] += _events(name, line, begin_us)
    path.write_text(json.dumps(trace))


def _load(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        found = None
    trace = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not isinstance(trace.get("traceEvents"), list) or not isinstance(trace.get("baseTimeNanoseconds"), int):
        raise PlanError(f"{path} is not a trace of torch.profiler: expected the file of export_chrome_trace(...)")
    return trace


def _events(process: str, timeline: Timeline, begin_us: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": process}}
    for lane, number in {**_LANES, "stalls": _STALLS}.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}}
    for each in timeline.intervals:
        yield {
            "ph": "X",
            "cat": each.work,
            "name": _name(each),
            "pid": process,
            "tid": _STALLS if each.work == "stall" else _LANES[each.lane],
            "ts": begin_us + each.begin_s * 1e6,
            "dur": (each.end_s - each.begin_s) * 1e6,
            "args": {"bytes": each.nbytes} if each.nbytes else {},
        }


def _name(each: Interval) -> str:
    """Copies and recomputation have the names of ebbtide's ranges in torch.profiler."""
    phases = {"out": "ebbtide::send", "back": "ebbtide::fetch", "recompute": "ebbtide::recompute"}
    phase = phases.get(each.lane if each.work == "copy" else each.work, each.work)
    return f"{phase} {each.region}".rstrip()
