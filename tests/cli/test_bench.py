"""`ebbtide bench` on a tiny model: three trainings with equal bits, figures as a table and as JSON."""

import dataclasses
import json
import statistics

import pytest
import torch
from cli.test_doctor import GPU

from ebbtide._cli import _machine, bench, main
from ebbtide._cli._machine import HostCosts
from ebbtide._cli.demo import Size, Task, run_worker
from ebbtide._utils.sizes import GIB, KIB

TINY = Size(32, 4, 2, 64, 4, window_bytes=64 * KIB, min_bytes=4 * KIB, sample_s=0.005)
STEPS = 5  # three are measured by a handle, two follow its plan


def trained(task, mode):
    return run_worker(task, mode, lambda number: None)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Figures of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "SMALL", TINY)
        return bench._on_cpu(trained, STEPS, tmp_path_factory.mktemp("disk"))


def run(monkeypatch, figures, *arguments):
    monkeypatch.setattr(bench, "_on_cpu", lambda run, steps, folder: figures)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    return main(["bench", *arguments])


def test_three_trainings_have_the_same_bits(measured):
    assert list(measured.runs) == ["plain", "checkpointed", "offloaded"]
    assert measured.has_same_bits
    assert all(len(each.losses) == STEPS for each in measured.runs.values())
    assert measured.runs["offloaded"].moved.out_bytes > 0
    assert measured.runs["checkpointed"].moved.out_bytes == 0


def test_link_and_host_costs_are_measured(measured):
    assert all(rate > 0 for rate in measured.link)
    assert measured.costs.moved >= measured.costs.kept >= 0


def test_a_plan_trains_with_the_same_bits(measured):
    planned = trained(dataclasses.replace(measured.task, budget_bytes=100 * GIB), "planned")
    assert planned.loss_bits == measured.runs["plain"].loss_bits
    assert planned.parameters_sha256 == measured.runs["plain"].parameters_sha256
    assert planned.moved.activation_bytes > 0  # recorded by a handle


def test_on_an_accelerator_the_plan_has_the_peak_of_checkpointing(measured, monkeypatch):
    monkeypatch.setattr(_machine, "measure_device", lambda device: GPU)
    monkeypatch.setattr(_machine, "host_costs", lambda device: HostCosts(1e-6, 1e-4, 1e-6))
    budgets = {}

    def run(task: Task, mode: str):
        budgets[mode] = task.budget_bytes
        return measured.runs["plain" if mode == "plain" else "checkpointed"]

    figures = bench._on_accelerator(run, torch.device("cuda", 0), 40)
    assert budgets == {"plain": None, "checkpointed": None, "planned": measured.runs["checkpointed"].peak_bytes}
    assert (figures.device, figures.link, figures.task.store) == ("NVIDIA H200", GPU.link, "host")


def test_json_has_seconds_and_bytes(measured, monkeypatch, capsys):
    assert run(monkeypatch, measured, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["has_same_bits"] is True
    assert result["device"] == "CPU"
    assert result["link"].keys() == {"out_bytes_per_s", "back_bytes_per_s", "duplex_bytes_per_s"}
    assert result["host_s_per_saved_tensor"].keys() == {"kept", "moved", "recomputed"}
    for mode, each in measured.runs.items():
        assert result["runs"][mode]["peak_bytes"] == each.peak_bytes
        assert result["runs"][mode]["step_s"] == statistics.median(each.step_s[2:])  # of the later half


def test_the_table_says_that_it_is_of_a_cpu(measured, monkeypatch, capsys):
    assert run(monkeypatch, measured) == 0
    printed = capsys.readouterr().out
    for expected_text in ("checkpointed", "ebbtide, all on disk", "GB/s out", "us moved", "nothing about a GPU"):
        assert expected_text in printed, expected_text


def test_a_differing_bit_is_the_exit_status(measured, monkeypatch, capsys):
    other = dataclasses.replace(measured.runs["offloaded"], parameters_sha256="0")
    figures = dataclasses.replace(measured, runs={**measured.runs, "offloaded": other})
    assert run(monkeypatch, figures) == 1
    assert "FAILED" in capsys.readouterr().out


def test_wrong_options_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(["bench", "--steps", "1"]) == 2
    assert main(["bench", "--disk-dir", str(tmp_path / "nowhere")]) == 2
    printed = capsys.readouterr().err
    assert "--steps 1: expected 2 or more" in printed
    assert "does not exist" in printed
