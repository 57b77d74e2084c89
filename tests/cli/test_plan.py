"""`ebbtide plan`: from a file, a model, a script; what-ifs; the Pareto curve; errors for wrong options."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import matplotlib.image
import pytest
from planner.workloads import GIB, MIB, layers, profile

import ebbtide
from ebbtide import Plan
from ebbtide._cli import main
from ebbtide._cli._plan_pareto import Solvers, recompute_s
from ebbtide._cli._plan_profile import WhatIf
from ebbtide._config import Budget
from ebbtide._planner.explain import as_budget
from ebbtide._planner.solve import Solver
from ebbtide._profiling.profile import Profile
from ebbtide._utils.serialize import from_json
from ebbtide._utils.sizes import parse_bytes

MEASURED = profile(*layers(4), device_bytes=4 * GIB)
LEAST = Solver(MEASURED).smallest_budget()
MIDDLE = (LEAST + Solvers(MEASURED).plain.peak_bytes) // 2

MODULE = """
from control.test_controller import make, batch

def model():
    return make()

def example():
    return {"x": batch(0)}

def of_output(output):
    return output * 2

three = 3
"""

SCRIPT = """
import sys
from control.test_controller import SETTINGS, make, step
import ebbtide

def main(steps):
    model = make()
    ebbtide.offload(model, **SETTINGS)
    for k in range(int(steps)):
        print("step", k, flush=True)
        step(model, k)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "profile.json"
    MEASURED.save(path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module and a script, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(SCRIPT)
    yield tmp_path
    ebbtide.release_memory()


def run(*arguments):
    return main(["plan", *map(str, arguments)])


def saved(file, *arguments):
    path = file.parent / "plan.json"
    assert run(file, *arguments, "--save", path) == 0
    return Plan.load(path)


def solved(profile, budget):
    """The plan for a budget, with the budget as it was written."""
    return dataclasses.replace(Solver(profile).solve(Budget(budget)(0)), budget=str(Budget(f"{budget}")))


# -- from a file -------------------------------------------------------------------------------------------------------


def test_a_plan_is_printed_and_saved(file, capsys):
    planned = saved(file, "--budget", MIDDLE)
    assert planned == solved(MEASURED, MIDDLE)
    printed = capsys.readouterr().out
    assert str(planned) in printed
    assert "small on none, 4 regions, 1000 tokens: 120.0 ms" in printed
    assert "plan.json" in printed


def test_without_a_budget_the_step_gets_no_slower(file):
    assert saved(file) == Solver(MEASURED).solve(None)


@pytest.mark.parametrize(("text", "nbytes"), [("0.5", 2 * GIB), ("2.5GiB", 5 * GIB // 2), ("3000000000", 3 * 10**9)])
def test_budgets_are_bytes_or_shares(file, text, nbytes):
    assert saved(file, "--budget", text).budget_bytes == nbytes


def test_what_ifs_are_planned_with_and_noted(file, capsys):
    what_if = WhatIf(link=5, scale=2, host_limit="100MiB", reserve="1GiB", graphs=2)
    arguments = ["--link", 5, "--scale", 2, "--host-limit", "100MiB", "--reserve", "1GiB", "--graphs", 2]
    planned = saved(file, *arguments, "--budget", "3.5GiB")
    assert planned == solved(what_if.applied_to(MEASURED)[0], "3.5GiB")
    printed = capsys.readouterr().out
    for expected_text in (
        "5 GB/s each way, not 10.0",
        "100.00 MiB",
        "1.00 GiB more",
        "2000 tokens, not 1000",
        "attention",
        "2 forwards",
    ):
        assert expected_text in printed, expected_text


def test_each_what_if_changes_its_figure():
    def changed(**what_if):
        return WhatIf(**what_if).applied_to(MEASURED)[0]

    link = changed(link=20).link
    assert (link.out, link.back) == (20e9, 20e9)
    assert changed(tokens=500) == changed(scale=0.5) == MEASURED.scaled(500)
    assert changed(host_limit="1KiB").host_limit_bytes == 1024
    assert changed(reserve="1KiB").base_bytes == MEASURED.base_bytes + 1024
    assert changed(graphs=3).graphs == 3
    assert WhatIf().applied_to(MEASURED) == WhatIf(tokens=1000).applied_to(MEASURED) == (MEASURED, [])


# -- time against memory -----------------------------------------------------------------------------------------------


def test_the_pareto_curve_is_a_table_and_a_picture(file, capsys):
    picture = file.parent / "curve.png"
    assert run(file, "--pareto", "--points", 5, "--picture", picture) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if re.match(r"\W*\d+\.\d+ GiB", line)]
    assert len(rows) == 5
    assert "1.000" in rows[-1]
    assert "4 keep" in rows[-1]
    assert "only recomputing" in printed
    assert "waiting" not in printed  # of a plan, without --budget or --save
    assert matplotlib.image.imread(picture).std() > 0


def test_json_has_the_plan_and_the_curve(file, capsys):
    assert run(file, "--json", "--pareto", "--points", 3, "--budget", MIDDLE, "--link", 5) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    planned = solved(WhatIf(link=5).applied_to(MEASURED)[0], MIDDLE)
    assert from_json(Plan, result["plan"]) == planned
    assert result["plan"]["predicted"]["step_s"] == planned.predicted.step_s
    assert [row["budget_bytes"] for row in result["curve"]] == [
        row.budget_bytes for row in Solvers(WhatIf(link=5).applied_to(MEASURED)[0]).rows(3)
    ]
    assert (result["smallest_budget_bytes"], result["tokens"], len(result["notes"])) == (LEAST, 1000, 1)
    assert str(planned) in printed.err


def test_a_plan_and_the_pareto_curve_together(file, capsys):
    assert run(file, "--front", "--points", 2, "--budget", MIDDLE) == 0
    printed = capsys.readouterr().out
    assert "x plain" in printed
    assert str(solved(MEASURED, MIDDLE)) in printed


def test_no_restricted_plan_is_faster():
    solvers = Solvers(MEASURED)
    rows = solvers.rows(6)
    assert rows[0].budget_bytes == LEAST
    for row in rows:
        others = [seconds for seconds in (row.only_moving_s, row.only_recomputing_s) if seconds is not None]
        assert all(row.predicted.step_s <= seconds * 1.01 for seconds in others)
        assert row.predicted.peak_bytes <= row.budget_bytes
    assert (rows[-1].predicted.moved_bytes, rows[-1].recompute_s, rows[-1].actions) == (0, 0.0, "4 keep")
    assert any(row.recompute_s > 0 for row in rows)


def test_restricted_plans_only_move_or_only_recompute():
    solvers = Solvers(MEASURED)
    for budget, step_s in solvers.only_recomputing(5):
        planned = solvers.recomputing.solve(budget)
        assert planned.predicted.step_s == step_s
        assert planned.predicted.moved_bytes == 0
    for budget, step_s in solvers.only_moving(5):
        planned = solvers.solver.solve(budget, only_moves=True)
        assert planned.predicted.step_s == step_s
        assert recompute_s(MEASURED, planned) == 0
    assert len(solvers.only_recomputing(5)) == len(solvers.only_moving(5)) == 5


# -- from a model ------------------------------------------------------------------------------------------------------


def test_a_model_is_measured(here, capsys):
    arguments = ["--model", "mine:model", "--batch", "mine:example", "--loss", "mine:of_output"]
    assert run(*arguments, "--store", "disk", "--min-bytes", 1, "--save-profile", "new.json", "--budget", "1.0") == 0
    assert "layers.0" in capsys.readouterr().out
    measured = Profile.load("new.json")
    assert [region.name for region in measured.regions] == ["layers.0", "layers.1", "layers.2"]
    assert measured.has_recomputation
    assert run("new.json") == 0


# -- from a script -----------------------------------------------------------------------------------------------------


def test_a_script_runs_until_its_profile_is_there(here, capfd):
    assert run("--script", "train.py", "--save-profile", "new.json", "--", "9") == 0
    printed = capfd.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("step")] == [f"step {k}" for k in range(4)]
    assert "this run ends here" in printed.err
    assert "layers.0" in printed.out
    assert Profile.load("new.json").has_recomputation


def test_a_script_prints_beside_json(here, capfd):
    assert run("--script", "train.py", "--json", "--", "9") == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["plan"]["regions"].keys() == {"layers.0", "layers.1", "layers.2"}
    assert "step 3" in printed.err


@pytest.mark.parametrize(
    ("how", "expected_text"),
    [("fail", "ended with exit status 7"), ("plain", r"ended before it had a profile: .*offload\(model\)")],
)
def test_a_script_without_a_profile(here, how, expected_text, capfd):
    (here / "train.py").write_text("import sys\nsys.exit(7 if sys.argv[1] == 'fail' else 0)\n")
    assert run("--script", "train.py", "--", how) == 2
    assert re.search(expected_text, capfd.readouterr().err)


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "write one of: the file of a profile"),
        (["{file}", "--model", "mine:model"], "write one of: the file of a profile"),
        (["nowhere.json"], "nowhere.json cannot be read"),
        (["mine.py"], "is not an ebbtide profile file"),
        (["{file}", "--budget", "40 parsecs"], "budget='40 parsecs' is not a size"),
        (["{file}", "--budget", "1.5"], "between 0 and 1"),
        (["{unknown}", "--budget", "1"], "does not say how much memory its device has"),
        (["{unknown}", "--scale", "2"], "does not say how large its batches were"),
        (["{file}", "--budget", str(LEAST - 1)], "smallest budget"),
        (["{unknown}", "--budget", "0.5"], "does not say how much memory its device has"),
        (["{unknown}", "--budget", "50%"], "does not say how much memory its device has"),
        (["{file}", "--budget", "9" * 400], "is more than any device has"),
        (["{file}", "--reserve", "9" * 308 + "TiB"], "is more than any device has"),
        (["{file}", "--scale", "1e9", "--budget", "20GiB"], "budget 20.00 GiB: no plan fits"),
        (["{file}", "--link", "0"], "--link 0.0: expected a finite number more than 0"),
        (["{file}", "--link", "inf"], "--link inf: expected a finite number more than 0"),
        (["{file}", "--scale", "inf"], "--scale inf: expected a finite number more than 0"),
        (["{file}", "--scale", "nan"], "--scale nan: expected a finite number more than 0"),
        (["{file}", "--scale", "1e300"], "--scale 1e+300: expected 1e+15 at most"),
        (["{file}", "--store", "disk"], "--store is for a model that is measured here: write --model"),
        (["{file}", "--regions", "layers.*"], "--regions is for a model that is measured here"),
        (["{file}", "--min-bytes", "1MiB"], "--min-bytes is for a model that is measured here"),
        (["{file}", "--batch", "mine:example"], "--batch is for a model that is measured here"),
        (["{file}", "--loss", "mine:of_output"], "--loss is for a model that is measured here"),
        (["--script", "train.py", "--min-bytes", "1"], "a script's settings belong into its own offload(...)"),
        (["{file}", "--", "--steps", "9"], "no script to take '--steps 9': write --script train.py, or leave it out"),
        (["{file}", "--tokens", "1", "--scale", "1"], "write one of them"),
        (["{file}", "--host-limit", "much"], "--host-limit='much' is not a size"),
        (["{file}", "--points", "1"], "--points 1: expected 2 or more"),
        (["{file}", "--save", "nowhere/plan.json"], "--save nowhere/plan.json: expected a file"),
        (["{file}", "--picture", "front.txt"], "ends in .png"),
        (["--model", "mine:model"], "--model needs --batch"),
        (["--model", "mine", "--batch", "mine:example"], "--model mine: expected package.module:function"),
        (["--model", "yours:model", "--batch", "mine:example"], "there is no module 'yours'"),
        (["--model", "mine:nothing", "--batch", "mine:example"], "has no attribute 'nothing'"),
        (["--model", "mine:three", "--batch", "mine:example"], "is a int: expected a function"),
        (["--model", "mine:example", "--batch", "mine:example"], "gives a dict: expected a torch.nn.Module"),
        (["--script", "nowhere.py"], "there is no such file"),
    ],
)
def test_wrong_options_are_named(here, file, arguments, message, capsys):
    dataclasses.replace(MEASURED, device_bytes=None, tokens=0).save("unknown.json")
    assert run(*(argument.format(file=file, unknown="unknown.json") for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err + printed.out


@pytest.mark.parametrize("nbytes", [1, 700 * MIB, GIB, 38 * GIB + 1, 123456 * GIB + GIB // 3, 10**6 * GIB + 1, 10**19])
def test_a_proposed_budget_can_be_written(nbytes):
    proposed = parse_bytes(as_budget(nbytes), "budget")
    assert nbytes <= proposed <= nbytes + max(MIB, GIB // 10)


@pytest.mark.parametrize(("nbytes", "text"), [(38 * GIB, "38GiB"), (38 * GIB + 1, "38.1GiB"), (MIB + 1, "2MiB")])
def test_a_proposed_budget_is_short(nbytes, text):
    assert as_budget(nbytes) == text


def test_missing_extra_names_the_install_line(file, monkeypatch, capsys):
    loaded = ("matplotlib", "ebbtide._reports.pictures")
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(file, "--picture", file.parent / "curve.png") == 2
    assert "needs matplotlib. Install it with: pip install 'ebbtide[cli]'" in capsys.readouterr().err


def test_a_package_missing_in_a_users_module_is_not_hidden(here):
    (here / "mine.py").write_text("import something_else_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="something_else"):
        run("--model", "mine:model", "--batch", "mine:example")


@pytest.mark.parametrize(
    ("more", "notes"), [((), False), (("--budget", "1TiB"), True), (("--front", "--points", "2"), True)]
)
def test_a_profile_without_recomputation_is_noted(more, notes, tmp_path, capsys):
    regions = [dataclasses.replace(region, recompute_s=0.0) for region in layers(4)]
    step = profile(*regions)
    step.save(tmp_path / "kept.json")
    run(tmp_path / "kept.json", *more)
    assert ("measured without a budget" in capsys.readouterr().out) == notes


RECORDED = sorted((Path(__file__).parents[2] / "benchmarks/results/profiles").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_recorded_profiles_can_be_planned_from(path, capsys):
    """As in the README."""
    assert run(path, "--budget", "0.8") == 0
    assert "plan within" in capsys.readouterr().out
