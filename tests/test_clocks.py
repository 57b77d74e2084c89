"""No test depends on the speed of the machine."""

import ast
import itertools
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
CLOCKS = {"time", "timeit"}
PROCESSES = {"communicate", "run"}
"""Functions with a permitted time limit of half an hour or more: ranks may wait for a dead rank."""


def reads_clock(node):
    match node:
        case ast.Import(names=names):
            return any(name.name in CLOCKS for name in names)
        case ast.ImportFrom(module=module):
            return module in CLOCKS
        case ast.Call(func=ast.Attribute(attr=name), keywords=keywords) if name in PROCESSES:
            return any(keyword.arg == "timeout" and ast.literal_eval(keyword.value) < 1800 for keyword in keywords)
        case ast.Call(keywords=keywords):
            return any(keyword.arg in ("timeout", "deadline") for keyword in keywords)
        case _:
            return False


def test_no_test_reads_a_clock():
    found = [
        f"{path.relative_to(HERE)}:{node.lineno}"
        for path in sorted(HERE.rglob("*.py"))
        if path.parent.name != "gpu" and path.name not in ("conftest.py", "processes.py")  # limit for dead ranks
        for node in ast.walk(ast.parse(path.read_text()))
        if reads_clock(node)
    ]
    assert found == []


def test_properties_hold_on_a_slow_machine(monkeypatch):
    """An hour passes between any two readings of the clock."""
    hours, drawn = itertools.count(0, 3600), []

    @given(st.lists(st.integers(), min_size=1))
    def holds(numbers):
        drawn.append(numbers)

    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: float(next(hours)))
        holds()
    assert len(drawn) > settings().max_examples / 2
