"""Profiles: to a file and back, scaled and refitted, and refused in the wrong place."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.generated import profiles
from planner.workloads import MS, layers, outside, profile, region, workload_a

from ebbtide import Plan, PlanError
from ebbtide._planner.simulate import with_host
from ebbtide._profiling.profile import Host, HostTime, Link, OtherVersionError, Profile, SavedTensor
from ebbtide._utils.serialize import OLD_KEYS

HOST = Host((HostTime(MS, MS, MS, 3),) * 2, MS, MS, MS, MS, 0.0, MS, MS, MS, MS)


@given(step=profiles())
def test_a_file_holds_all_of_it(tmp_path_factory, step):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    step.save(path)
    assert Profile.load(path) == step


def test_the_file_says_its_format(tmp_path):
    workload_a().save(tmp_path / "profile.json")
    number = json.loads((tmp_path / "profile.json").read_text())["format"]
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text()
    assert f"\n| profile | {number} |" in documented
    assert f" 1 to {number - 1} are read |" in documented


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', '{"format": 1, "regions": 3}', "\x00"])
def test_files_of_other_kinds_are_refused(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(PlanError, match=r"profile\.json is not an ebbtide profile file"):
        Profile.load(tmp_path / "profile.json")


def test_a_file_of_the_format_before_is_read(tmp_path):
    """Without the host, and the working memory of backward."""
    path = tmp_path / "profile.json"
    workload_a().save(path)
    data = json.loads(path.read_text())
    data["format"] = 1
    del data["host"]
    for each in data["regions"]:
        del each["moved_work_bytes"]
    path.write_text(json.dumps(data))
    assert Profile.load(path) == workload_a()


MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "profiles"


DROPPED = ("format", *(name for name, new in OLD_KEYS.items() if new is None))


def leaves(data, dropped=DROPPED):
    """Values in order, whatever the names of fields."""
    if isinstance(data, dict):
        return [leaf for name, value in data.items() if name not in dropped for leaf in leaves(value)]
    return [leaf for value in data for leaf in leaves(value)] if isinstance(data, list | tuple) else [data]


@pytest.mark.parametrize("name", ["A", "MoE", "A-compiled"])
def test_a_file_with_the_old_names_of_fields_is_read(name, tmp_path):
    path = MEASURED / f"{name}.json"
    old = json.loads(path.read_text())
    read = Profile.load(path)
    assert old["format"] == 4
    assert leaves(without(dataclasses.asdict(read), ADDED)) == leaves(old)
    read.save(tmp_path / "profile.json")
    new = json.loads((tmp_path / "profile.json").read_text())
    assert not set(OLD_KEYS) & (names_in(new) - set(new["made_for"]))
    assert Profile.load(tmp_path / "profile.json") == read


OF_TENSORS = {"derive_s", "derive_ops", "derive_work_bytes", "derived_from"}
OF_POINTS = {"points", "activation_memory_budget", "partition_s"}
OF_HOSTS = {"saved", "derived_s", "derived_op_s", "hook_s"}
OF_FORMS = {"is_bits", "is_gathered", "read_at", "read_bytes", "held_for", "common"}
ADDED = {*OF_TENSORS, *OF_POINTS, *OF_HOSTS, *OF_FORMS, "recompute_work_bytes"}
"""Fields of today that no old file has."""


def without(data, names):
    if isinstance(data, dict):
        return {name: without(value, names) for name, value in data.items() if name not in names}
    return [without(each, names) for each in data] if isinstance(data, list | tuple) else data


def names_in(data):
    if isinstance(data, dict):
        return set(data).union(*map(names_in, data.values()))
    return set().union(*map(names_in, data)) if isinstance(data, list) else set()


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
    """A profile file with a wrong value at `place`."""
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
    ("place", "value", "expected_text"),
    [
        (("link", "out"), 0, "link.out is 0: expected more than 0 bytes per second"),
        (("link", "back"), -1e9, "link.back is -1000000000.0: expected a finite number of at least 0"),
        (("link", "back"), math.inf, "link.back is inf: expected a finite number"),
        (("link", "interference"), math.nan, "link.interference is nan"),
        (("link", "latency_s"), 10**400, "link.latency_s is 1000"),
        (("regions", 1, "name"), 7, "regions[1].name is 7: expected text"),
        (("regions", 0, "forward_s"), math.nan, "regions[0].forward_s is nan: expected a finite number of at least 0"),
        (("regions", 0, "has_dead_tensors"), 0, "regions[0].has_dead_tensors is 0: expected true or false"),
        (
            ("regions", 0, "saved_tensors", 2, "nbytes"),
            -5,
            "regions[0].saved_tensors[2].nbytes is -5: expected a whole number",
        ),
        (("regions", 0, "saved_tensors", 2, "index"), -1, "regions[0].saved_tensors[2].index is -1: expected"),
        (
            ("regions", 0, "saved_tensors", 2, "shares"),
            -3,
            "regions[0].saved_tensors[2].shares is -3: expected a whole number of at l",
        ),
        (("regions", 0, "expensive_ops", 0, "op"), None, "regions[0].expensive_ops[0].op is None: expected text"),
        (
            ("outside", "post_region_points", 0, "tensor_index"),
            -2,
            "outside.post_region_points[0].tensor_index is -2: exp",
        ),
        (("host", "regions", 0, "ops"), True, "host.regions[0].ops is True: expected a whole number"),
        (("host", "steady_launch_ahead_s"), math.inf, "host.steady_launch_ahead_s is inf: expected a finite number"),
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
def test_impossible_values_are_refused(tmp_path, place, value, expected_text):
    path = spoiled(tmp_path / "profile.json", with_host(profile(*layers(2)), HOST), *place, value=value)
    with pytest.raises(PlanError, match=rf"profile\.json is not an ebbtide profile file: {re.escape(expected_text)}"):
        Profile.load(path)


def test_whole_numbers_are_seconds_too(tmp_path):
    path = spoiled(tmp_path / "profile.json", profile(*layers(2)), "regions", 0, "forward_s", value=1)
    assert Profile.load(path).regions[0].forward_s == 1


def test_a_file_that_is_not_there_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read: No such file"):
        Profile.load(tmp_path / "nowhere.json")


def test_a_plan_is_no_profile(tmp_path):
    """Not even of another version, which would be overwritten."""
    Plan({}).save(tmp_path / "plan.json")
    with pytest.raises(
        PlanError, match=r"plan\.json is not an ebbtide profile file: it is a plan: give it to offload"
    ) as refused:
        Profile.load(tmp_path / "plan.json")
    assert not isinstance(refused.value, OtherVersionError)


def test_the_plain_step_is_the_sum_of_its_parts():
    assert profile(*layers(2), outside=outside(before_s=1 * MS, backward_before_s=2 * MS)).plain_s == pytest.approx(
        63 * MS
    )


def test_twice_the_tokens_are_twice_the_bytes_and_seconds():
    step = profile(
        *layers(2, grad_bytes=5), outside=outside(before_s=1 * MS, kept_bytes=9, peak_bytes=7, tensor_index=3)
    )
    double = step.scaled(2 * step.tokens)
    one, two = step.regions[0], double.regions[0]
    assert double.plain_s == pytest.approx(2 * step.plain_s)
    assert two.saved_bytes == 2 * one.saved_bytes
    assert two.backward_work_bytes == 2 * one.backward_work_bytes
    assert [op.nbytes for op in two.expensive_ops] == [2 * op.nbytes for op in one.expensive_ops]
    assert [tensor.index for tensor in two.saved_tensors] == [tensor.index for tensor in one.saved_tensors]
    assert (two.grad_bytes, double.outside.post_region_points[0].tensor_index, double.base_bytes) == (
        5,
        3,
        step.base_bytes,
    )
    assert (double.outside.kept_bytes, double.outside.peak_bytes, double.tokens) == (18, 14, 2000)
    assert double.link == step.link
    assert step.scaled(step.tokens) is step


@given(profiles(), st.sampled_from([1, 3, 10, 999, 1001, 10**6]))
def test_no_memory_vanishes_at_any_scale(step, tokens):
    scaled = step.scaled(tokens)
    for before, after in zip(step.regions, scaled.regions, strict=True):
        for name in ("saved_tensors", "inputs", "expensive_ops"):
            rows = list(zip(getattr(before, name), getattr(after, name), strict=True))
            assert [(row.index, row.nbytes > 0) for row, _ in rows] == [(row.index, row.nbytes > 0) for _, row in rows]
    assert [point.tensor_index for point in scaled.outside.post_region_points] == [
        point.tensor_index for point in step.outside.post_region_points
    ]


def test_a_saved_tensor_of_a_few_bytes_does_not_scale_to_shared_memory():
    tensors = (SavedTensor(0, 100, 0.0), SavedTensor(1, 0, 0.0, shares=0), SavedTensor(2, 0, 0.0))
    scaled = profile(region(saved_tensors=tensors, not_movable_bytes=0)).scaled(1).regions[0]
    assert scaled.saved_tensors == (SavedTensor(0, 1, 0.0), SavedTensor(1, 0, 0.0, shares=0), SavedTensor(2, 0, 0.0))
    assert scaled.not_movable_bytes == 0


def test_whole_seconds_are_scaled():
    assert profile(region(forward_s=1)).scaled(300).regions[0].forward_s == pytest.approx(0.3)


def test_another_speed_changes_all_seconds_and_no_bytes():
    around = outside(before_s=1 * MS, backward_after_s=1 * MS, peak_bytes=100)
    step = with_host(profile(*layers(2), outside=around), HOST)
    slow = step.at_speed(2.0)
    assert slow.plain_s == pytest.approx(2 * step.plain_s)
    assert slow.host.seconds == pytest.approx(2 * step.host.seconds)
    assert (slow.host.launch_ahead_s, slow.link) == (step.host.launch_ahead_s, step.link)
    assert slow.outside.peak_bytes == 100
    one, two = step.regions[0], slow.regions[0]
    assert two.recompute_s == pytest.approx(2 * one.recompute_s)
    assert two.backward_work_bytes == one.backward_work_bytes
    assert [tensor.at_s for tensor in two.saved_tensors] == [2 * tensor.at_s for tensor in one.saved_tensors]
    assert [op.recompute_s for op in two.expensive_ops] == [2 * op.recompute_s for op in one.expensive_ops]


@pytest.mark.parametrize("interference", [-0.1, 1.0])
def test_an_interference_that_stops_compute_is_refused(interference):
    with pytest.raises(PlanError, match="expected at least 0 and less than 1"):
        Link(1e10, 1e10, latency_s=0.0, interference=interference)


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(PlanError, match=r"link\.back is 0\.0: expected more than 0"):
        Link(1e10, 0.0, latency_s=0.0, interference=0.0)


def test_made_for_is_checked():
    step = dataclasses.replace(workload_a(), made_for={"model": "a", "device": "H200"})
    step.check_made_for({"model": "a"})
    with pytest.raises(PlanError, match=r"the profile is of device 'H200', not 'B200'; torch 'unknown', not"):
        step.check_made_for({"device": "B200", "torch": "2.11"})


def test_it_prints_as_memory_by_region():
    """Equal neighbours share a line."""
    last = region("layers.2", saved_tensors=(SavedTensor(0, 2**20, 0.0),), not_movable_bytes=2**10, grad_bytes=2**30)
    step = profile(region("layers.0"), region("layers.1"), last, outside=outside(kept_bytes=2**20))
    headline, columns, alike, other = str(step).splitlines()
    assert headline == (
        "profile of small, 1000 tokens: 953.67 MiB before the step (parameters 953.67 MiB), 573.21 MiB saved in "
        "regions, 1.00 MiB outside of them"
    )
    assert columns.split()[:3] == ["regions", "tensors", "saved"]
    assert alike.split()[:4] == ["layers.0-1", "3", "286.10", "MiB"]
    expected = "layers.2 1 1.00 MiB 1.00 MiB 19.07 MiB 143.05 MiB 95.37 MiB 381.47 MiB 1.00 GiB"
    assert " ".join(other.split()) == expected


def test_recomputation_needs_no_more_than_steps_have_shown_that_recomputed_everything():
    """Less what is allocated meanwhile; where recomputation was recorded on its own, nothing changes."""
    held = {"backward_work_bytes": 400, "recompute_work_bytes": 400}
    recorded = {"backward_work_bytes": 400, "recompute_work_bytes": 390}
    step = profile(
        region("a", after_bytes=30, **held), region("b", **held), region("c", **recorded), outside=outside(kept_bytes=5)
    )
    found = step.recomputed_within(step.base_bytes + 5 + 395)
    assert [each.recompute_work_bytes for each in found.regions] == [395, 365, 390]
    assert step.recomputed_within(step.base_bytes + 1000) == step
    assert step.recomputed_within(0) == step
