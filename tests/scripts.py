"""Examples, run with the command of their docstring."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def check_example(path, folder, runner=()):
    """Run the example in `folder` with the first command of the docstring, check the output and return the output.
    `runner`: a script that runs the example, for processes by torchrun too.

    The output must have losses that differ, and a line that bytes moved.
    """
    command = command_of(path)
    launcher = () if command.torchrun is None else ("-m", "torch.distributed.run", *command.torchrun)
    done = subprocess.run(
        [sys.executable, *launcher, *runner, str(path), *command.arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    check_output(done.returncode, done.stdout)
    return done.stdout


class Command(NamedTuple):
    """`torchrun`: its options; None for plain Python."""

    torchrun: list[str] | None
    arguments: list[str]


def command_of(path):
    described = ast.get_docstring(ast.parse(path.read_text()))
    line = re.search(rf"^(python|torchrun (.*)) examples/{re.escape(path.name)}(.*)$", described, re.MULTILINE)
    assert line is not None, f"{path.name} does not say how to run it"
    return Command(None if line[2] is None else shlex.split(line[2]), shlex.split(line[3]))


def environment():
    search = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, search)), "OMP_NUM_THREADS": "1"}


def check_output(code, printed):
    assert code == 0, printed[-4000:]
    assert "EbbtideWarning" not in printed
    losses = re.findall(r"loss:? +(-?\d+\.\d+)", printed)
    assert len(set(losses)) > 2, printed
    moved = re.findall(r"([\d.]+) [KMG]iB moved out", printed)
    assert moved, printed
    assert all(float(each) > 0 for each in moved)
