"""`ebbtide report`: files in, files out, and errors that name the option."""

import dataclasses
import html
import json
import sys

import pytest
from reports.test_run import RUN

from ebbtide._cli import main
from ebbtide._planner.view import view_of_plan
from ebbtide._reports.page import run_page
from ebbtide._utils.sizes import format_bytes

SHORT = dataclasses.replace(RUN, profile=None, steps=())
"""Without a profile: a page without pictures, which takes a moment."""


@pytest.fixture
def file(tmp_path):
    SHORT.save(tmp_path / "run.json")
    return tmp_path / "run.json"


def run(*arguments):
    return main(["report", *map(str, arguments)])


def test_a_page_is_written_beside_the_run_or_where_it_is_wanted(file, capsys):
    assert run(file) == 0
    assert file.with_name("run.html").read_text() == run_page(SHORT)
    assert run(file, "-o", file.with_name("other.html")) == 0
    assert file.with_name("other.html").read_text() == run_page(SHORT)
    assert capsys.readouterr().out.split() == [str(file.with_name(name)) for name in ("run.html", "other.html")]


@pytest.mark.parametrize("has_profile", [True, False])
def test_figures_as_json_are_those_of_the_page(file, capsys, has_profile):
    found, trace = RUN if has_profile else SHORT, file.with_name("trace.json")
    found.save(file)
    assert run(file, "--trace", trace, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    page = file.with_name("run.html")
    assert figures["files"] == {"out": str(page), "trace": str(trace)}
    assert html.escape(figures["verdict"]) in page.read_text()
    assert (figures["metrics"], figures["made_for"]) == (dict(found.metrics), dict(found.made_for))
    assert ("without" in figures) == has_profile
    if has_profile:
        assert f"{format_bytes(figures['without']['peak_bytes'])} without" in page.read_text()
        saved_bytes = sum(region.saved_bytes for region in found.profile.regions)
        assert figures["without"]["peak_bytes"] >= saved_bytes + found.profile.base_bytes
        planned = view_of_plan(found.profile, found.plan).outcome
        assert {key: getattr(planned, key) for key in figures["predicted"]} == figures["predicted"]


def test_a_trace_has_the_measured_and_the_predicted_step(file):
    trace = file.with_name("trace.json")
    RUN.save(file)
    assert run(file, "--trace", trace) == 0
    processes = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert processes == {"ebbtide, measured", "ebbtide, predicted"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "missing.json cannot be read"),
        (["{file}", "-o", "{folder}"], "--out"),
        (["{file}", "-o", "{folder}/none/run.html"], "cannot be written"),
        (["{file}", "--trace", "{folder}/none/t.json"], "--trace"),
        (["{file}", "--torch-trace", "t.json"], "write --trace FILE too"),
        (["{file}", "--trace", "{folder}/t.json", "--torch-trace", "{file}"], "is not a trace of torch.profiler"),
    ],
)
def test_errors_name_what_was_found(file, capsys, arguments, message):
    assert run(*(each.format(file=file, folder=file.parent) for each in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_lanes_has_no_trace(file, capsys):
    dataclasses.replace(SHORT, timeline=None).save(file)
    assert run(file, "--trace", file.with_name("t.json")) == 2
    assert "--trace: this run has no lanes" in capsys.readouterr().err


def test_missing_extra_names_the_install_line(file, monkeypatch, capsys):
    loaded = ("matplotlib", "ebbtide._reports.pictures", "ebbtide._reports.page")
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(file) == 2
    assert "needs matplotlib. Install it with: pip install 'ebbtide[cli]'" in capsys.readouterr().err
