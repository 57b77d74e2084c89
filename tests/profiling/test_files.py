"""Profiles in files: found by the next run, measured again after a change, written by the first rank."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from control.test_controller import ROWS, SETTINGS, follow, make, step

import ebbtide
from ebbtide import ConfigError, PlanError
from ebbtide._control.controller import Phase
from ebbtide._profiling.files import ProfileWritten
from ebbtide._profiling.profile import Profile

BUDGET = "1TiB"
WATCHED = 3


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The text of a file that a handle with a budget has written."""
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    model = make()
    handle = ebbtide.offload(model, budget=BUDGET, profile=path, **SETTINGS)
    follow(model, WATCHED)
    assert not path.exists()
    follow(model, 1)
    assert Profile.load(path).regions == handle.profile.regions
    return path.read_text()


@pytest.fixture
def path(measured, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(measured)
    return path


def phase_of(handle):
    return handle._planning.controller.phase


@pytest.mark.parametrize("kind", [str, Path])
def test_the_next_run_goes_by_a_plan_from_its_first_step_on(path, kind):
    before = path.read_text()
    model = make()
    handle = ebbtide.offload(model, budget=BUDGET, profile=kind(path), **SETTINGS)
    assert handle.plan.predicted is not None
    assert set(follow(model, 2)) == {Phase.PLANNED}
    assert path.read_text() == before


def test_without_a_budget_it_serves_too(path):
    handle = ebbtide.offload(make(), profile=path, **SETTINGS)
    assert phase_of(handle) is Phase.PLANNED


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"model": "Stack, 7 parameters in float32"}, {}),
        ({"device": "another"}, {}),
        ({"torch": "1.0"}, {}),
        ({"ranks": "8"}, {}),
        ({"compiled": "3 of 3 regions"}, {}),
        ({}, {"min_bytes": 2}),
        ({}, {"store": "mock"}),
        ({}, {"regions": ["layers.0", "layers.1"]}),
    ],
    ids=["model", "device", "torch", "ranks", "compiled", "min_bytes", "store", "regions"],
)
def test_a_profile_of_something_else_is_measured_again_and_replaced(path, change, settings, caplog):
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "made_for": {**raw["made_for"], **change}}))
    before = path.read_text()
    model = make()
    with caplog.at_level(logging.INFO, "ebbtide"):
        handle = ebbtide.offload(model, budget=BUDGET, profile=path, **{**SETTINGS, **settings})
    assert "the profile in the file is of" in caplog.text
    assert handle.profile is None
    if "model" in change:  # settings alone need no further steps
        follow(model, WATCHED + 1)
        assert path.read_text() != before
        assert Profile.load(path).regions == handle.profile.regions


def test_a_profile_without_settings_is_used(path):
    profile = Profile.load(path)
    made_for = {name: profile.made_for[name] for name in ("model", "device", "torch")}
    dataclasses.replace(profile, made_for=made_for).save(path)
    assert phase_of(ebbtide.offload(make(), budget=BUDGET, profile=path, **SETTINGS)) is Phase.PLANNED


def test_a_profile_without_a_budget_does_not_serve_a_budget(tmp_path):
    path = tmp_path / "profile.json"
    model = make()
    handle = ebbtide.offload(model, profile=path, **SETTINGS)
    follow(model, WATCHED + 1)
    handle.remove()
    assert not Profile.load(path).has_recomputation
    assert phase_of(ebbtide.offload(make(), profile=path, **SETTINGS)) is Phase.PLANNED
    second = make()
    handle = ebbtide.offload(second, budget=BUDGET, profile=path, **SETTINGS)
    assert phase_of(handle) is Phase.WARM
    follow(second, WATCHED + 1)
    assert Profile.load(path).has_recomputation


def test_a_profile_of_another_version_is_measured_again(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))
    assert phase_of(ebbtide.offload(make(), budget=BUDGET, profile=path, **SETTINGS)) is Phase.WARM


def test_a_file_that_is_something_else_is_not_written_over(tmp_path):
    path = tmp_path / "training.json"
    path.write_text('{"lr": 1}')
    model = make()
    with pytest.raises(PlanError, match="is not an ebbtide profile file"):
        ebbtide.offload(model, budget=BUDGET, profile=path, **SETTINGS)
    assert "_ebbtide_handle" not in model.__dict__
    assert path.read_text() == '{"lr": 1}'


@pytest.mark.parametrize("place", ["", "nowhere/profile.json", "."])
def test_a_path_that_cannot_be_written_is_named_at_once(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected a file, in a folder that is there"):
        ebbtide.offload(make(), profile=place, **SETTINGS)


def test_other_profile_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"profile=\{\}: expected a profile"):
        ebbtide.offload(make(), profile={}, **SETTINGS)


def test_training_goes_on_if_it_cannot_be_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    model, twin = make(), make()
    ebbtide.offload(model, budget=BUDGET, profile=folder / "profile.json", **SETTINGS)
    follow(model, WATCHED)
    folder.rmdir()
    with pytest.warns(ebbtide.EbbtideWarning, match="was not written"):
        mine = step(model, 7)
    assert all(torch.equal(a, b) for a, b in zip(mine, step(twin, 7), strict=True))


def test_the_first_rank_writes(tmp_path, process_group, monkeypatch):
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, rank=rank: rank)
        model = make()
        ebbtide.offload(model, budget=BUDGET, profile=tmp_path / "profile.json", **SETTINGS)
        follow(model, WATCHED + 1)
        assert (tmp_path / "profile.json").exists() == (rank == 0)


_RANK = """
import sys, torch
from control.test_controller import SETTINGS, make, step
import ebbtide
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
store = torch.distributed.FileStore(folder + "/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
for run in range(2):  # the second rank has an own folder, always empty
    model = make()
    handle = ebbtide.offload(model, budget="1TiB", profile=f"{folder}/of{rank}/profile.json", **SETTINGS)
    print(handle._planning.controller.phase.name, end=" ")
    for k in range(4):
        step(model, k)
    handle.remove()
"""


def test_all_ranks_go_by_the_file_of_the_first(tmp_path):
    for rank in range(2):
        (tmp_path / f"of{rank}").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = ([sys.executable, "-c", _RANK, str(rank), str(tmp_path)] for rank in range(2))
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for command in commands]
    assert [rank.communicate()[0].split() for rank in ranks] == [["WARM", "PLANNED"]] * 2
    assert [file.name for file in (tmp_path / "of1").iterdir()] == []


# -- EBBTIDE_PROFILE ---------------------------------------------------------------------------------------------------


def test_the_variable_has_the_profile_written(tmp_path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_PROFILE", str(tmp_path / "profile.json"))
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    assert set(follow(model, WATCHED + 2)[WATCHED:]) == {Phase.PLANNED}
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.has_recomputation  # without a budget too: the file may serve any budget
    assert profile.regions == handle.profile.regions
    assert all(region.recipe.action in ("keep", "offload") for region in handle.plan.regions.values())


def test_the_variable_has_a_known_profile_written(path, tmp_path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_PROFILE", str(tmp_path / "copy.json"))
    ebbtide.offload(make(), budget=BUDGET, profile=path, **SETTINGS)
    assert Profile.load(tmp_path / "copy.json") == Profile.load(path)


def test_the_run_ends_there_if_asked_to(tmp_path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.setenv("EBBTIDE_PROFILE_END", "1")
    model = make()
    ebbtide.offload(model, **SETTINGS)
    follow(model, WATCHED)
    with pytest.raises(ProfileWritten) as ended:
        step(model, 0)
    assert ended.value.code == 0
    assert Profile.load(tmp_path / "profile.json").tokens == ROWS * 64


@pytest.mark.parametrize(
    ("name", "value", "expected_text"),
    [
        ("EBBTIDE_PROFILE", "/nowhere/at/all.json", "EBBTIDE_PROFILE='/nowhere/at/all.json': expected a file"),
        ("EBBTIDE_PROFILE_END", "perhaps", "EBBTIDE_PROFILE_END='perhaps': write 1"),
    ],
)
def test_variables_with_wrong_values(name, value, expected_text, tmp_path, path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_PROFILE", str(tmp_path / "copy.json"))
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected_text):
        ebbtide.offload(make(), profile=path, **SETTINGS)
