"""`ebbtide demo` end to end on a tiny model: same bits, less memory, results in files, errors for wrong options."""

import json
import struct
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace

import matplotlib.image
import pytest
import torch

from ebbtide._cli import main
from ebbtide._cli.demo import SMALL, Task, run_worker
from ebbtide._errors import EbbtideError

STEPS = 2
TASK = Task("cpu", "mock", steps=1, seed=5, threads=1, size=SMALL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of results, text and JSON of one run."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "ebbtide._cli", "demo", "--small", "--steps", str(STEPS), "--json"]
    ran = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out, ran.stderr, json.loads(ran.stdout)


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished[0] / "demo.json").read_text())


def test_every_loss_is_equal_to_the_bit(results):
    plain, offloaded = results["runs"]["plain"], results["runs"]["offloaded"]
    assert len(plain["loss_bits"]) == STEPS
    assert plain["loss_bits"] == offloaded["loss_bits"]
    assert plain["parameters_sha256"] == offloaded["parameters_sha256"]


def test_bits_are_those_of_the_losses(results):
    run = results["runs"]["plain"]
    assert [struct.unpack(">f", bytes.fromhex(bits[2:]))[0] for bits in run["loss_bits"]] == run["losses"]


def test_json_has_the_moved_and_saved_bytes(results):
    moved, verdict = results["runs"]["offloaded"]["moved"], results["verdict"]
    assert moved["out_bytes"] >= moved["in_bytes"] > 0
    assert verdict["activation_bytes"] == moved["activation_bytes"] // STEPS
    assert verdict["saved_bytes"] >= verdict["activation_bytes"] / 2
    assert verdict["faults"] == []


def test_json_is_printed_as_in_the_file(finished, results):
    assert finished[2] == results


def test_plain_run_moved_nothing(results):
    assert set(results["runs"]["plain"]["moved"].values()) == {0}


@pytest.mark.parametrize("mode", ["plain", "offloaded"])
def test_json_has_a_curve_below_the_peak(results, mode):
    run = results["runs"][mode]
    assert len(run["curve_s"]) == len(run["curve_bytes"]) >= 2
    assert run["base_bytes"] < max(run["curve_bytes"]) <= run["peak_bytes"] * 1.01  # the kernel counts in batches
    assert run["curve_s"] == sorted(run["curve_s"])


def test_the_picture_shows_something(finished):
    picture = matplotlib.image.imread(finished[0] / "memory.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 600
    assert picture.std() > 0


def test_table_shows_both_runs_and_the_bits(finished, results):
    printed = finished[1]
    assert "plain" in printed
    assert "offloaded" in printed
    assert printed.count(results["runs"]["plain"]["loss_bits"][-1]) == 2
    assert "equal to the bit" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: expected 1 or more"),
        (["--out", "{file}"], "cannot be made a folder"),
        (["--folder", "{file}/below"], "cannot be made a folder"),
    ],
    ids=["steps", "out", "folder"],
)
def test_wrong_options_are_named(arguments, message, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    filled = [argument.format(file=file) for argument in arguments]
    assert main(["demo", "--small", "--out", str(tmp_path / "out"), *filled]) == 2
    assert message in capsys.readouterr().err


def test_unreadable_arguments_end_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--steps", "many"])
    assert ended.value.code == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "matplotlib"])
def test_missing_extra_names_the_install_line(package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("ebbtide._cli.demo", "ebbtide._reports.pictures"))]:
        monkeypatch.delitem(sys.modules, name)
        package_name, _, module_name = name.rpartition(".")
        # `from package import module` takes the attribute, if there is one, and imports nothing.
        monkeypatch.delattr(sys.modules[package_name], module_name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--small"]) == 2
    assert f"needs {package}. Install it with: pip install 'ebbtide[cli]'" in capsys.readouterr().err


def test_a_failed_worker_is_quoted():
    with pytest.raises(EbbtideError, match=r"(?s)the offloaded run ended with exit status 1.*is not a store"):
        run_worker(replace(TASK, store="cloud"), "offloaded", lambda number: None)


def test_tasks_and_outcomes_pass_between_processes():
    assert Task.from_json(json.dumps(asdict(TASK))) == TASK
    steps = []
    outcome = run_worker(replace(TASK, steps=2), "offloaded", steps.append)
    assert steps == [1, 2]
    assert len(outcome.losses) == 2
    assert isinstance(outcome.moved.out_bytes, int)


def test_same_seed_same_model_and_text():
    from ebbtide._cli._demo_worker import Training

    losses = []
    for _ in range(2):
        torch.manual_seed(TASK.seed)
        losses.append(Training(TASK).step(nullcontext(), rows=2))
    assert torch.equal(*losses)
