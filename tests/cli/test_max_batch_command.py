"""`ebbtide max-batch`: a table, JSON, a picture; errors for wrong options."""

import json

import matplotlib.image
import pytest
from planner.workloads import GIB, layers, profile

import ebbtide
from ebbtide._cli import main

MEASURED = profile(*layers(2), device_bytes=4 * GIB)  # 1000 tokens
FOUND = ebbtide.max_batch([MEASURED, MEASURED.scaled(2000)], batch=10, budget="2GiB")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MEASURED.save("10.json")
    MEASURED.scaled(2000).save("20.json")
    return ["10.json", "20.json"]


def run(*arguments):
    return main(["max-batch", *arguments])


def test_the_table_is_that_of_the_library(files, capsys):
    assert run(*files, "--batch", "10", "--budget", "2GiB") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"small on none, within 2.00 GiB: fastest {FOUND.fastest.batch}, largest {FOUND.largest.batch}, "
        f"largest with everything kept {FOUND.largest_kept.batch}.\n\n{FOUND}\n\n"
    )
    assert printed.endswith("\n".join(FOUND.assumptions) + "\n")


def test_no_batch_may_keep_everything(files, capsys):
    least = FOUND.rows[0].smallest_bytes
    assert run(*files, "--batch", "10", "--budget", f"{least}") == 0
    assert "no batch keeps everything" in capsys.readouterr().out


def test_json_has_the_rows(files, capsys):
    assert run(*files, "--batch", "10", "--budget", "0.5", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    sizes = [FOUND.fastest.batch, FOUND.largest.batch, FOUND.largest_kept.batch]
    assert [data[name] for name in ("fastest", "largest", "largest_kept")] == sizes
    assert (data["budget_bytes"], data["assumptions"]) == (2 * GIB, list(FOUND.assumptions))
    for row, expected in zip(data["rows"], FOUND.rows, strict=True):
        assert row == {name: getattr(expected, name) for name in row}
    assert {"batch", "step_s", "samples_per_s", "peak_bytes", "moved_bytes", "recompute_s", "fits"} <= data["rows"][
        0
    ].keys()


@pytest.mark.parametrize("option", ["-o", "--picture"])
def test_the_picture_is_written(files, option, tmp_path):
    assert run(*files, "--batch", "10", "--budget", "2GiB", option, "sizes.png") == 0
    assert matplotlib.image.imread(tmp_path / "sizes.png").std() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "10", "--budget", "2GiB"], "there is no profile"),
        (["nowhere.json", "--batch", "10", "--budget", "2GiB"], "nowhere.json cannot be read"),
        (["10.json", "--batch", "7", "--budget", "2GiB"], "batch=7"),
        (["10.json", "--batch", "10", "--budget", "1.5"], "between 0 and 1"),
        (["10.json", "--batch", "10", "--budget", "1MiB"], "the smallest budget of a batch of 1 is"),
        (["10.json", "10.json", "--batch", "10", "--budget", "2GiB"], "expected each of another batch size"),
        (["10.json", "--batch", "10", "--budget", "2GiB", "-o", "sizes.txt"], "ends in .png"),
        (["10.json", "--batch", "10", "--budget", "2GiB", "-o", "nowhere/sizes.png"], "in a folder that is there"),
    ],
)
def test_wrong_options_are_named(files, arguments, message, capsys):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
