"""The soak, some steps of it: equal to twins, and nothing left. A wrong step and a growing counter are seen."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from scripts import ROOT

from benchmarks import soak, steady
from ebbtide._stores import disk

pytestmark = pytest.mark.filterwarnings("ignore")  # "moved nothing", as meant; torch and transformers about their work


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    return soak.Place(torch.device("cpu"), tmp_path)


@pytest.mark.long
def test_steps_equal_their_twins_and_leave_nothing(tmp_path, request):
    """In a process of its own, where nothing is left of other tests."""
    steps, path = "400" if request.config.getoption("--all") else "40", tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", steps, "--minutes", "inf", "-o", str(path)]
    search = os.pathsep.join(str(ROOT / each) for each in (".", "src", "tests"))
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": search}, check=True)
    result = json.loads(path.read_text())
    assert result["failures"] == []
    assert result["ended_by"] == "steps"
    assert [result["most"][name] for name in ("parcels", "tickets", "store bytes in use")] == [0, 0, 0]


def test_a_wrong_step_is_counted_and_named(place, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(soak, "gradients", lambda _: [torch.tensor(next(numbers))])
    result = soak.soak(3, float("inf"), 5, place)
    assert result["mismatches"] == result["rounds"] > 0
    assert result["failures"][0].startswith("seed 5, ")


@pytest.mark.parametrize(
    ("counts", "grown"),
    [([9, *range(100)], 1), ([90, 1, 2, 1, 2, 1, 2], 0), ([0, 1, 1, 5, 5], 4), ([3], 0)],
    ids=["leak", "warm-up and noise", "step", "one look"],
)
def test_growth(counts, grown):
    assert steady.growth(counts) == grown
