"""The plan's walk in docs/internals/plan.md is the walk of the code: existing files, imported in one direction."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/ebbtide"
WALK = (
    "_profiling/recorder.py",
    "_profiling/build.py",
    "_planner/options.py",
    "_planner/solve.py",
    "_planner/simulate.py",
    "_control/controller.py",
    "_model/hooks.py",
)
CALLED_BY_EARLIER = {("_planner/solve.py", "_planner/simulate.py")}  # a solver asks the simulator, and is answered


def imports_of(path):
    """Files of ebbtide imported anywhere in `path`, relative to the package."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("ebbtide.").replace(".", "/") + ".py" for name in names if "ebbtide." in name}
    return found


def test_the_walk_of_the_documentation_is_this_one():
    text = (ROOT / "docs/internals/plan.md").read_text()
    section = re.search(r"^#+ A plan's walk$(.*?)(?=^#+ )", text, re.DOTALL | re.MULTILINE)
    if section is None:
        pytest.fail("docs/internals/plan.md has no section 'A plan's walk'")
    files = re.findall(r"\b_?\w+/\w+\.py\b", section[1])
    assert [f"_{name.lstrip('_')}" for name in dict.fromkeys(files)] == list(WALK)


def test_the_walk_has_seven_files_that_exist():
    assert len(WALK) == len(set(WALK)) == 7
    assert all((SOURCE / path).is_file() for path in WALK)


@pytest.mark.parametrize("path", WALK)
def test_no_file_of_the_walk_imports_a_later_file(path):
    later = set(WALK[WALK.index(path) + 1 :])
    assert {(path, each) for each in imports_of(path) & later} <= CALLED_BY_EARLIER


def test_imports_inside_of_functions_are_seen():
    assert "_planner/simulate.py" in imports_of("_planner/solve.py") | imports_of("_planner/search.py")
