"""Questions are answered in a process of their own, as in this one."""

import logging
from pathlib import Path

import pytest

from ebbtide import PlanError
from ebbtide._planner.process import solve_elsewhere, solve_here
from ebbtide._planner.solve import Question, Solver
from ebbtide._profiling.profile import Profile

PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "profiles" / "A-compiled.json"


@pytest.fixture(scope="module")
def question():
    profile = Profile.load(PROFILE)
    return Question(profile, int(1.2 * Solver(profile).smallest_budget()))


def test_the_answer_is_that_of_this_process(question):
    ours, elsewhere = solve_here(question).result(), solve_elsewhere(question).result()
    assert elsewhere.plan == ours.plan
    assert elsewhere.fallback == ours.fallback
    assert ours.plan.predicted.step_s <= ours.fallback.predicted.step_s


def test_an_error_comes_back(question):
    with pytest.raises(PlanError, match="the smallest budget is"):
        solve_elsewhere(Question(question.profile, 2**20, 2**20)).result()


@pytest.mark.parametrize("limit_gib", [None, 60])
def test_what_does_not_fit_has_the_smallest_plan(question, limit_gib):
    limit_bytes = None if limit_gib is None else limit_gib * 2**30
    answer = solve_here(Question(question.profile, 2**20, limit_bytes)).result()
    assert answer.plan.predicted.peak_bytes <= answer.smallest_bytes


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise SystemExit('no room {path!r:.0}')", "1 (no room"),
        ("import os, sys; sys.stdin.buffer.read(9); os.kill(os.getpid(), 9)  # {path!r}", "-9 (no message"),
    ],
    ids=["error", "killed"],
)
def test_a_process_that_dies_is_named_in_the_log_and_the_question_answered_here(
    question, monkeypatch, caplog, code, end
):
    monkeypatch.setattr("ebbtide._planner.process._CODE", code)
    answer = solve_elsewhere(question).result()
    assert answer.plan.predicted is not None
    assert caplog.record_tuples[0][1] == logging.WARNING
    assert f"the solver's process ended with {end}" in caplog.text


@pytest.mark.parametrize("executable", ["/no/such/python", "/"])
def test_a_process_that_cannot_start_is_named_in_the_log_too(question, monkeypatch, caplog, executable):
    monkeypatch.setattr("sys.executable", executable)
    assert solve_elsewhere(question).result().plan.predicted is not None
    assert "the solver's process cannot start" in caplog.text


def test_what_is_printed_while_modules_are_imported_is_no_answer(question, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert solve_elsewhere(question).result().plan == solve_here(question).result().plan
