"""Profiles: there and back through a file, and refused where they do not belong."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.generated import profiles
from planner.workloads import MS, around, layers, profile, region, workload_a

from ebbtide import Plan, PlanError
from ebbtide._planner.launch_ahead import with_host
from ebbtide._profiling.profile import Host, HostTime, Link, OtherVersionError, Profile, Save

HOST = Host((HostTime(MS, MS, MS, 3),) * 2, MS, MS, MS, MS, 0.0, MS, MS, MS, MS)


@given(step=profiles())
def test_a_file_holds_all_of_it(tmp_path_factory, step):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    step.save(path)
    assert Profile.load(path) == step


def test_the_file_says_its_format(tmp_path):
    workload_a().save(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text())["format"] == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', '{"format": 1, "regions": 3}', "\x00"])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(PlanError, match=r"profile\.json is no profile that ebbtide has written"):
        Profile.load(tmp_path / "profile.json")


def test_a_file_of_the_format_before_is_read(tmp_path):
    """It knows nothing of the host, nor of what backward works with."""
    path = tmp_path / "profile.json"
    workload_a().save(path)
    data = json.loads(path.read_text())
    data["format"] = 1
    del data["host"]
    for each in data["regions"]:
        del each["moved_work_bytes"]
    path.write_text(json.dumps(data))
    assert Profile.load(path) == workload_a()


def test_another_format_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text('{"format": 99}')
    with pytest.raises(PlanError, match=r"profile\.json was written by another version of ebbtide: measure"):
        Profile.load(tmp_path / "profile.json")


def test_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    workload_a().save(path)
    data = json.loads(path.read_text())
    data["regions"][0]["surprise"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="surprise"):
        Profile.load(path)


def spoiled(path, step, *place, value):
    """The file of a profile in which another value stands at `place`."""
    step.save(path)
    data = json.loads(path.read_text())
    row = data
    for key in place[:-1]:
        row = row[key]
    assert place[-1] in row or place[-1] in range(len(row))
    row[place[-1]] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("link", "out"), 0, "link.out is 0: expected more than 0 bytes per second"),
        (("link", "back_duplex"), -1e9, "link.back_duplex is -1000000000.0: expected more than 0 bytes"),
        (("link", "back"), math.inf, "link.back is inf: expected a finite number"),
        (("link", "interference"), math.nan, "interference nan"),
        (("link", "latency_s"), 10**400, "link.latency_s is 1000"),
        (("regions", 1, "name"), 7, "regions[1].name is 7: expected text"),
        (("regions", 0, "forward_s"), math.nan, "regions[0].forward_s is nan: expected a finite number of at least 0"),
        (("regions", 0, "has_dead_saves"), 0, "regions[0].has_dead_saves is 0: expected true or false"),
        (("regions", 0, "saves", 2, "nbytes"), -5, "regions[0].saves[2].nbytes is -5: expected a whole number"),
        (("regions", 0, "saves", 2, "index"), -1, "regions[0].saves[2].index is -1: expected"),
        (("regions", 0, "saves", 2, "shares"), -3, "regions[0].saves[2].shares is -3: expected a whole number of at l"),
        (("regions", 0, "dear", 0, "op"), None, "regions[0].dear[0].op is None: expected text"),
        (("around", "turns", 0, "save"), -2, "around.turns[0].save is -2: expected"),
        (("host", "regions", 0, "ops"), True, "host.regions[0].ops is True: expected a whole number"),
        (("host", "steady_lead_s"), math.inf, "host.steady_lead_s is inf: expected a finite number"),
        (("made_for",), "foo", "made_for is 'foo': expected names, with a value for each"),
        (("made_for", "model"), 3, "made_for['model'] is 3: expected text"),
        (("base",), {"parameters": "x"}, "base['parameters'] is 'x': expected a whole number"),
        (("base_bytes",), "5", "base_bytes is '5': expected a whole number"),
        (("host_limit_bytes",), 1.5, "host_limit_bytes is 1.5: expected a whole number"),
        (("tokens",), "many", "tokens is 'many': expected a whole number"),
        (("graphs",), 1.5, "graphs is 1.5: expected a whole number"),
        (("graphs",), 0, "graphs=0"),
    ],
)
def test_values_that_no_step_has_are_refused(tmp_path, place, value, said):
    path = spoiled(tmp_path / "profile.json", with_host(profile(*layers(2)), HOST), *place, value=value)
    with pytest.raises(PlanError, match=rf"profile\.json is no profile that ebbtide has written: {re.escape(said)}"):
        Profile.load(path)


def test_whole_numbers_are_seconds_too(tmp_path):
    path = spoiled(tmp_path / "profile.json", profile(*layers(2)), "regions", 0, "forward_s", value=1)
    assert Profile.load(path).regions[0].forward_s == 1


def test_a_file_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read: No such file"):
        Profile.load(tmp_path / "nowhere.json")


def test_a_plan_is_no_profile(tmp_path):
    """Nor one of another version, which would be written over."""
    Plan({}).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"plan\.json is no profile .*: it is a plan: give it to offload") as refused:
        Profile.load(tmp_path / "plan.json")
    assert not isinstance(refused.value, OtherVersionError)


def test_the_plain_step_is_the_sum_of_its_parts():
    assert profile(*layers(2), around=around(before_s=1 * MS, turn_s=2 * MS)).plain_s == pytest.approx(63 * MS)


def test_twice_the_tokens_are_twice_the_bytes_and_seconds():
    step = profile(*layers(2, grad_bytes=5), around=around(before_s=1 * MS, kept_bytes=9, peak_bytes=7, save=3))
    double = step.scaled(2 * step.tokens)
    one, two = step.regions[0], double.regions[0]
    assert double.plain_s == pytest.approx(2 * step.plain_s)
    assert two.saved_bytes == 2 * one.saved_bytes
    assert two.backward_work_bytes == 2 * one.backward_work_bytes
    assert [dear.nbytes for dear in two.dear] == [2 * dear.nbytes for dear in one.dear]
    assert [save.index for save in two.saves] == [save.index for save in one.saves]
    assert (two.grad_bytes, double.around.turns[0].save, double.base_bytes) == (5, 3, step.base_bytes)
    assert (double.around.kept_bytes, double.around.peak_bytes, double.tokens) == (18, 14, 2000)
    assert double.link == step.link
    assert step.scaled(step.tokens) is step


@given(profiles(), st.sampled_from([1, 3, 10, 999, 1001, 10**6]))
def test_what_has_memory_of_its_own_has_some_at_every_scale(step, tokens):
    scaled = step.scaled(tokens)
    for before, after in zip(step.regions, scaled.regions, strict=True):
        for name in ("saves", "inputs", "dear"):
            rows = list(zip(getattr(before, name), getattr(after, name), strict=True))
            assert [(row.index, row.nbytes > 0) for row, _ in rows] == [(row.index, row.nbytes > 0) for _, row in rows]
    assert [turn.save for turn in scaled.around.turns] == [turn.save for turn in step.around.turns]


def test_a_save_of_a_few_bytes_does_not_scale_to_one_that_shares():
    saves = (Save(0, 100, 0.0), Save(1, 0, 0.0, shares=0), Save(2, 0, 0.0))
    scaled = profile(region(saves=saves, stuck_bytes=0)).scaled(1).regions[0]
    assert scaled.saves == (Save(0, 1, 0.0), Save(1, 0, 0.0, shares=0), Save(2, 0, 0.0))
    assert scaled.stuck_bytes == 0


def test_whole_seconds_are_scaled_as_others_are():
    assert profile(region(forward_s=1)).scaled(300).regions[0].forward_s == pytest.approx(0.3)


def test_a_refit_changes_times_and_work():
    step = profile(*layers(1), around=around(before_s=1 * MS, end_s=1 * MS, peak_bytes=100))
    fitted = step.refitted(forward=2.0, backward=3.0, memory=1.5)
    one, fit = step.regions[0], fitted.regions[0]
    assert fitted.plain_s == pytest.approx((2 * 11 + 3 * 21) * MS)
    assert fit.again_s == pytest.approx(3 * one.again_s)
    assert fit.backward_work_bytes == 1.5 * one.backward_work_bytes
    assert fitted.around.peak_bytes == 150
    assert [save.at_s for save in fit.saves] == [2 * save.at_s for save in one.saves]


def test_a_refit_makes_dear_outputs_as_much_dearer_as_the_second_run():
    """Else a second run that holds them all would seem to take longer than it does."""
    fit = profile(*layers(1)).refitted(forward=1.0, backward=2.0).regions[0]
    assert [dear.again_s for dear in fit.dear] == pytest.approx([8 * MS, 6 * MS])


@pytest.mark.parametrize("interference", [-0.1, 1.0])
def test_a_link_that_stops_compute_cannot_be(interference):
    with pytest.raises(PlanError, match="stand still"):
        Link(1e10, 1e10, 1e10, 1e10, latency_s=0.0, interference=interference)


def test_a_link_that_carries_nothing_cannot_be():
    with pytest.raises(PlanError, match=r"link\.out_duplex is 0\.0: expected more than 0"):
        Link(1e10, 1e10, 0.0, 1e10, latency_s=0.0)


def test_what_it_was_made_for_is_checked():
    step = dataclasses.replace(workload_a(), made_for={"model": "a", "device": "H200"})
    step.check_made_for({"model": "a"})
    with pytest.raises(PlanError, match=r"the profile is of device 'H200', not 'B200'; torch 'unknown', not"):
        step.check_made_for({"device": "B200", "torch": "2.11"})


def test_it_prints_as_memory_by_region():
    """Like regions that follow each other share a line."""
    last = region("layers.2", saves=(Save(0, 2**20, 0.0),), stuck_bytes=2**10, grad_bytes=2**30)
    step = profile(region("layers.0"), region("layers.1"), last, around=around(kept_bytes=2**20))
    headline, columns, alike, other = str(step).splitlines()
    assert headline == (
        "profile of small, 1000 tokens: 953.67 MiB before the step (parameters 953.67 MiB), 573.21 MiB saved in "
        "regions, 1.00 MiB outside of them"
    )
    assert columns.split()[:3] == ["regions", "saves", "saved"]
    assert alike.split()[:4] == ["layers.0-1", "3", "286.10", "MiB"]
    expected = "layers.2 1 1.00 MiB 1.00 MiB 19.07 MiB 143.05 MiB 95.37 MiB 381.47 MiB 1.00 GiB"
    assert " ".join(other.split()) == expected
