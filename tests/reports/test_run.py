"""Files of runs: what is written comes back, anything else is refused, and EBBTIDE_REPORT finds every end of a run."""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest
from control.test_controller import SETTINGS, make, step
from hypothesis import given
from hypothesis import strategies as st
from planner.workloads import profile, region

import ebbtide
from ebbtide import ConfigError, EbbtideError, EbbtideWarning, Plan, PlanError, Recipe, RegionPlan
from ebbtide._engine.stats import Count, Stats
from ebbtide._planner.solve import Solver
from ebbtide._planner.view import view_of_plan
from ebbtide._profiling.timeline import Change, Step
from ebbtide._reports.run import FORMAT, Run, RunFile
from ebbtide._types import Reason
from ebbtide._utils.sizes import GIB

PROFILE = profile(*(region(f"layers.{k}") for k in range(3)), device_bytes=80 * GIB)
PLAN = dataclasses.replace(Solver(PROFILE).solve(2 * GIB), budget="2GiB")
STATS = Stats(
    out=Count(5, GIB), kept={Reason.SMALL: Count(1, 64)}, stall_by_region={"layers.1": 0.25, "": 0.5},
    budget_bytes=2 * GIB, measured_step_s=0.1, rank=1, ranks=4,
)  # fmt: skip
RUN = Run.of(
    STATS, PROFILE.made_for, PLAN, PROFILE, (Step(1, 0.1, 0.09, GIB, GIB), Step(2, 0.5, 0.09, 0, GIB)),
    (Change(0, "plan in force"),), dataclasses.replace(view_of_plan(PROFILE, PLAN).timeline, began_ns=10**18),
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    RUN.save(tmp_path / "run.json")
    return tmp_path / "run.json"


def test_a_run_comes_back_from_its_file(path):
    assert Run.load(path) == RUN
    assert json.loads(path.read_text())["format"] == FORMAT
    assert (RUN.rank, RUN.ranks, RUN.metrics["ebbtide/moved_gib"]) == (1, 4, 1.0)


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        RUN.save(tmp_path / "missing" / "run.json")
    by_function = Plan({"a": RegionPlan(Recipe("selective", ops=(lambda op: True,)))})
    with pytest.raises(PlanError, match="Python function"):
        dataclasses.replace(RUN, plan=by_function).save(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an ebbtide run file"),
        ("[]", "JSON object"),
        ("{}", "JSON object"),
        ('{"format": 1}', "no field"),
        ('{"format": 99}', "another version"),
        ("[" * 100_000, "not an ebbtide run file"),
        ('{"format":1,"made_for":' * 50_000, "not an ebbtide run file"),
        ("\x00\xff", "not an ebbtide run file"),
        ("1" * 5000, "not an ebbtide run file"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=message):
        Run.load(path)


def test_plans_profiles_later_formats_and_missing_files_are_named(tmp_path, path):
    PLAN.save(tmp_path / "plan.json")
    PROFILE.save(tmp_path / "profile.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}))
    messages = [
        ("plan", "is a plan"),
        ("profile", "is a profile"),
        ("run", "another version"),
        ("none", "cannot be read"),
    ]
    for name, message in messages:
        with pytest.raises(PlanError, match=message):
            Run.load(tmp_path / f"{name}.json")


def test_a_file_too_large_is_refused_unread(path, monkeypatch):
    monkeypatch.setattr("ebbtide._utils.serialize._MOST_BYTES", 100)
    with pytest.raises(PlanError, match="more than"):
        Run.load(path)


def places_in(value, at=()):
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places_in(child, (*at, key))


JSON = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(RUN)}))
ODD = st.sampled_from([None, True, -1, 1e300, float("nan"), "x", [], {}, [[]], {"a": 1}, "<script>", 2**70])


@given(place=st.sampled_from(list(places_in(JSON))[1:]), value=ODD)
def test_a_changed_file_is_a_run_or_an_error_of_ours(tmp_path_factory, place, value):
    found = json.loads(json.dumps(JSON))
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path_factory.mktemp("fuzz") / "run.json"
    path.write_text(json.dumps(found))
    with contextlib.suppress(EbbtideError):
        assert isinstance(Run.load(path), Run)


# -- EBBTIDE_REPORT ----------------------------------------------------------------------------------------------------

SCRIPT = """
import gc, os, sys, torch, ebbtide
from torch import nn
def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
def train(handle, module):
    for _ in range(2):
        module(torch.ones(4, 8)).sum().backward()
SETTINGS = {"mode": "all", "store": "disk", "min_bytes": 1}
"""

TRAIN = "m = model(); h = ebbtide.offload(m, **SETTINGS); train(h, m)"
CONTEXT = """
other = model()
for _ in range(2):
    with ebbtide.offload_activations(store="disk", min_bytes=1):
        loss = other(torch.ones(4, 8)).sum()
    loss.backward()
"""
FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later: the process has threads
if os.fork() == 0:
    sys.exit(0)
os.wait()
if os.listdir("."):
    open("by the child", "w")
"""
ENDS = {
    "the end of a process": (f"{TRAIN}\n{CONTEXT}\nraise SystemExit(3)", ["run-2.json", "run.json"]),
    "the end of a model": (f"{TRAIN}; del m, h; gc.collect(); os._exit(0)", ["run.json"]),
    "the end of a process with a fork": (f"{TRAIN}\n{FORK}", ["run.json"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_report_is_written_at(end, tmp_path):
    code, names = ENDS[end]
    environment = {**os.environ, "EBBTIDE_REPORT": "run.json", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "Warning" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == names, done.stderr
    for name in names:
        assert Run.load(tmp_path / name).metrics["ebbtide/moved_gib"] > 0


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A process that has written no report yet, and is asked for some."""
    monkeypatch.setenv("EBBTIDE_REPORT", str(tmp_path / "run.json"))
    monkeypatch.setattr(RunFile, "_numbers", itertools.count(1))
    return tmp_path


def test_every_handle_and_every_rank_has_a_file_of_its_own(asked, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for seed in range(2):
        model = make()
        handle = ebbtide.offload(model, mode="all", **SETTINGS)
        step(model, seed)
        assert len(list(asked.iterdir())) == seed
        handle.remove()
        handle.remove()
    assert sorted(path.name for path in asked.iterdir()) == ["run-2-rank1.json", "run-rank1.json"]
    run = Run.load(asked / "run-2-rank1.json")
    assert (run.rank, run.ranks) == (1, 2)
    assert run.report.startswith("ebbtide, rank 1 of 2: ")
    assert run.metrics["ebbtide/moved_gib"] > 0


def test_nothing_is_written_if_ebbtide_is_off(asked, monkeypatch):
    ebbtide.offload(make(), mode="off").remove()
    monkeypatch.setenv("EBBTIDE_DISABLE", "1")
    ebbtide.offload(make(), **SETTINGS).remove()
    ebbtide.offload_activations()
    assert list(asked.iterdir()) == []


def test_a_path_that_cannot_be_is_refused_at_once_and_one_that_fails_later_is_a_warning(asked, monkeypatch):
    model = make()
    handle = ebbtide.offload(model, mode="all", **SETTINGS)
    (asked / "run.json").mkdir()
    with pytest.warns(EbbtideWarning, match="EBBTIDE_REPORT: the report was not written"):
        handle.remove()
    for refused in (asked, asked / "missing" / "run.json"):
        monkeypatch.setenv("EBBTIDE_REPORT", str(refused))
        with pytest.raises(ConfigError, match="EBBTIDE_REPORT="):
            ebbtide.offload(model, **SETTINGS)
        with pytest.raises(ConfigError, match="EBBTIDE_REPORT="):
            ebbtide.offload_activations()
    monkeypatch.delenv("EBBTIDE_REPORT")
    ebbtide.offload(model, **SETTINGS).remove()  # no handle was left on the model


def test_save_works_at_any_time(tmp_path):
    model = make()
    handle = ebbtide.offload(model, max_slowdown=0.5, **SETTINGS)
    handle.save(tmp_path / "before.json")
    assert Run.load(tmp_path / "before.json").plan.status == handle.plan.status != ""
    for k in range(8):
        step(model, k)
    handle.remove()
    handle.save(tmp_path / "after.json")
    run = Run.load(tmp_path / "after.json")
    assert (run.profile.regions, run.report) == (handle.profile.regions, handle.report())
    assert len(run.steps) > 0
    assert run.changes[0].what == "plan in force"
    ebbtide.release_memory()
