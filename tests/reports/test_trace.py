"""A trace has the lanes under the names and by the clock of torch.profiler."""

import json

import pytest
import torch
from reports.test_run import RUN

from ebbtide import PlanError
from ebbtide._profiling.timeline import Interval, Timeline
from ebbtide._reports.trace import write_trace

LINE = Timeline(
    (
        Interval("compute", "forward", "layers.0", 0.0, 0.25),
        Interval("out", "copy", "layers.0", 0.1, 0.3, 4096),
        Interval("compute", "stall", "layers.0", 0.25, 0.3),
        Interval("compute", "recompute", "layers.0", 0.3, 0.4),
        Interval("back", "copy", "layers.0", 0.3, 0.4, 4096),
        Interval("compute", "other", "", 0.4, 0.5),
    ),
    0.5,
    1_700_000_000_000_000_000,
)


def written(path, *other):
    write_trace({"ebbtide, measured": LINE}, path, *other)
    return json.loads(path.read_text())


def test_lanes_have_the_names_of_the_ranges(tmp_path):
    trace = written(tmp_path / "out.json")
    lanes = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found = [(lanes[e["tid"]], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert found == [
        ("compute", "forward layers.0"),
        ("out", "ebbtide::send layers.0"),
        ("stalls", "stall layers.0"),
        ("compute", "ebbtide::recompute layers.0"),
        ("back", "ebbtide::fetch layers.0"),
        ("compute", "other"),
    ]


def test_events_stand_beside_those_of_the_profiler_by_its_clock(tmp_path):
    with torch.profiler.profile() as profiler, torch.profiler.record_function("theirs"):
        pass
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    trace = written(tmp_path / "out.json", tmp_path / "torch.json")
    assert trace["traceEvents"][: len(theirs["traceEvents"])] == theirs["traceEvents"]
    copy = next(e for e in trace["traceEvents"] if e["name"] == "ebbtide::send layers.0")
    assert trace["baseTimeNanoseconds"] + copy["ts"] * 1e3 == pytest.approx(LINE.began_ns + 0.1e9, abs=1e6)
    assert copy["dur"] == pytest.approx(0.2e6)
    assert copy["args"] == {"bytes": 4096}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', "[" * 100_000])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "torch.json").write_text(text)
    with pytest.raises(PlanError, match=r"torch\.json is not a trace of torch\.profiler"):
        written(tmp_path / "out.json", tmp_path / "torch.json")
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(PlanError, match="cannot be read"):
        written(tmp_path / "out.json", tmp_path / "missing.json")


def test_a_predicted_step_begins_with_the_measured_one(tmp_path):
    predicted = Timeline(RUN.timeline.intervals, RUN.timeline.step_s)
    write_trace({"measured": LINE, "predicted": predicted}, tmp_path / "out.json")
    events = [e for e in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if e["ph"] == "X"]
    first = {name: min(e["ts"] for e in events if e["pid"] == name) for name in ("measured", "predicted")}
    assert first["measured"] == first["predicted"] == LINE.began_ns / 1e3
