"""The soak, some steps of it: equal to twins, and nothing left. A wrong step and a growing counter are seen."""

import itertools

import pytest
import torch

from benchmarks import soak, steady
from ebbtide._stores import disk

pytestmark = pytest.mark.filterwarnings("ignore")  # "moved nothing", as meant; torch and transformers about their work


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    return soak.Place(torch.device("cpu"), tmp_path)


def test_steps_equal_their_twins_and_leave_nothing(place, request):
    result = soak.soak(400 if request.config.getoption("--all") else 40, float("inf"), 0, place)
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
