"""No test depends on how fast the machine is."""

import ast
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

HERE = Path(__file__).parent
CLOCKS = {"time", "timeit"}
PROCESSES = {"communicate", "run"}
"""A limit on these is for ranks that wait for one that has died."""


def looks_at_a_clock(node):
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


def test_no_test_looks_at_a_clock():
    found = [
        f"{path.relative_to(HERE)}:{node.lineno}"
        for path in sorted(HERE.rglob("*.py"))
        if path.parent.name != "gpu" and path.name not in ("conftest.py", "processes.py")  # half an hour for dead ranks
        for node in ast.walk(ast.parse(path.read_text()))
        if looks_at_a_clock(node)
    ]
    assert found == []


def test_properties_hold_on_a_slow_machine(monkeypatch):
    """An hour passes between any two looks at the clock."""
    hours, drawn = itertools.count(0, 3600), []

    @given(st.lists(st.integers(), min_size=1))
    def holds(numbers):
        drawn.append(numbers)

    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: float(next(hours)))
        holds()
    assert len(drawn) > 50
