"""Benchmarks of trainers at a tiny size, and the bars judged from their files."""

import json

import pytest
import torch

from benchmarks import sft
from benchmarks.bars import judge
from benchmarks.trainers import TRAINERS
from ebbtide import compat

FACTS = dict.fromkeys(("command", "device", "versions", "commit", "date"), "none")


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_a_tiny_one_is_measured(name, monkeypatch):
    monkeypatch.setattr(sft, "_ROUNDS", 1)
    monkeypatch.setattr(sft, "_EQUAL_STEPS", 2)
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    result = TRAINERS[name].tiny(torch.device("cpu"), 1)
    assert all(figures["step_ms"]["median"] > 0 for figures in result["modes"].values())
    if name == "T1":
        assert result["equal_losses"] == 2
    if name == "T3":
        plain, auto = (result["modes"][mode] for mode in ("nothing", "auto"))
        assert plain["loss"] == auto["loss"]
        assert plain["grad_checksum"] == auto["grad_checksum"] > 0
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(
    ("ours_ms", "ours_gib", "holds"), [(101.0, 17.0, True), (103.0, 17.0, False), (101.0, 20.0, False)]
)
def test_bars_say_the_step_and_the_peak(tmp_path, ours_ms, ours_gib, holds):
    modes = {
        "nothing": {"step_ms": {"median": 100.0}, "act_peak_gib": 25.0},
        "three quarters": {"step_ms": {"median": 104.0}, "act_peak_gib": 16.0},
        "three quarters, by parts": {"step_ms": {"median": ours_ms}, "act_peak_gib": ours_gib},
    }
    (tmp_path / "T3.json").write_text(json.dumps({**FACTS, "modes": modes, "base_gib": 5.0}))
    bars = judge(tmp_path)
    assert bars["T3"]["figure"] == ours_ms / 100
    assert bars["T3-peak"]["figure"] == round(1 - (5 + ours_gib) / 30, 4)
    assert (bars["T3-blocks"]["figure"], bars["T3-blocks-peak"]["figure"]) == (1.04, 0.3)
    assert (bars["T3"]["holds"] and bars["T3-peak"]["holds"]) == holds


def test_a_ratio_is_of_turns_that_were_near_in_time(tmp_path):
    """The device is a fifth slower in the last two of its turns."""
    plain = {"step_ms": {"median": 100.0}, "turns_ms": [100.0, 100.0, 120.0, 120.0], "act_peak_gib": 25.0}
    ours = {"step_ms": {"median": 122.4}, "turns_ms": [102.0, 102.0, 122.4, 122.4], "act_peak_gib": 17.0}
    modes = {"nothing": plain, "three quarters": ours, "three quarters, by parts": ours}
    (tmp_path / "T3.json").write_text(json.dumps({**FACTS, "modes": modes, "base_gib": 5.0}))
    assert judge(tmp_path)["T3"]["figure"] == 1.02
