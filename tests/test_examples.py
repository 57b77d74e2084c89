"""Every script in examples/ trains, and something moves."""

import ast
import importlib.util
import json
import subprocess
import sys

import pytest
from scripts import EXAMPLES, ROOT, check_output, command_of, environment

TRAINERS = {path.stem for path in (ROOT / "tests" / "trainers").glob("*.txt")}  # in separate environments


def packages(path):
    """Packages imported anywhere in the script."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def apart(path):
    """Imported packages of separate environments that are not installed."""
    return [each for each in packages(path) & TRAINERS if importlib.util.find_spec(each) is None]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder of each run example."""
    folders = {path: tmp_path_factory.mktemp(path.stem) for path in EXAMPLES if not apart(path)}
    lines = [json.dumps([str(folder), str(path), *command_of(path)]) for path, folder in folders.items()]
    runner = [sys.executable, str(ROOT / "tests" / "run_examples.py")]
    subprocess.run(runner, input="\n".join(lines), env=environment(), text=True, check=True)
    return folders


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_trains_and_moves(path, ran):
    if path not in ran:
        pytest.skip(f"make test-trainers runs it, in tests/trainers/test_{apart(path)[0]}.py")
    check_output(int((ran[path] / "code").read_text()), (ran[path] / "out").read_text())
