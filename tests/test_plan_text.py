"""Plans as text and as files."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from planner.workloads import workload_a

from ebbtide import Plan, PlanError, Recipe, RegionPlan
from ebbtide._plans import OP_CLASSES, Cost, Prediction, ReleasePoint
from ebbtide._reports.html import plan_table
from ebbtide._utils.text import as_range, counts_up, plain_table

MIB = 1024**2

MOVED = RegionPlan(
    Recipe("selective", ops=tuple(OP_CLASSES), sites=(0, 3)),
    release=((0, 64 * MIB),),
    prefetch_bytes=32 * MIB,
    reason="the link is full",
    cost=Cost(0, 48 * MIB, 0.004),
)
PLAN = Plan(
    {
        "layers.0": MOVED,
        "layers.1": RegionPlan(MOVED.recipe, (), 16 * MIB, "the link is full", MOVED.cost),
        "layers.2": RegionPlan(Recipe("keep"), ((0, 48 * MIB),), 1, "late", Cost(300 * MIB, 0, 0.0)),
        "head": RegionPlan(Recipe("recompute", inputs="keep")),
    },
    outside=RegionPlan(Recipe("keep"), ((7, 8 * MIB),), 1),
    budget_bytes=1024 * MIB,
    predicted=Prediction(0.1, 0.001, 0.002, 1000 * MIB, 96 * MIB, 90 * MIB),
)


def cells(line):
    return re.split(r" {2,}", line)


def rows_of(plan):
    """The lines of the table without the indented reasons."""
    return [line for line in str(plan).splitlines() if not line.startswith(" ")][2:]


def test_text_folds_equal_regions():
    assert str(PLAN).splitlines() == [
        "plan within 1.00 GiB: step 100.0 ms, waiting 1.0 ms forward and 2.0 ms backward; peak 1000.00 MiB,",
        "  96.00 MiB out and back, 90.00 MiB on the host",
        "regions     recipe                      kept      moved  recompute",
        "layers.0-1  selective, 2 outputs         0 B  96.00 MiB     8.0 ms",
        "    outputs offloaded, inputs offloaded; each: the link is full",
        "layers.2    keep                  300.00 MiB        0 B     0.0 ms",
        "    late",
        "head        recompute",
        "    inputs kept",
        "outside     keep",
    ]


def test_text_folds_reasons_that_differ_in_figures():
    reasons = ["late: 64.00 MiB of 1.00 GiB", "late: 1.00 GiB of 1.00 GiB", "the link carries 1.00 GiB"]
    regions = {f"layers.{k}": dataclasses.replace(MOVED, reason=reason) for k, reason in enumerate(reasons)}
    assert [cells(row)[0] for row in rows_of(Plan(regions))] == ["layers.0-1", "layers.2"]


def test_figures_of_the_first_region_are_said_to_be():
    reasons = ["late: 64.00 MiB of 1.00 GiB", "late: 1.00 GiB of 1.00 GiB"]
    regions = {f"layers.{k}": RegionPlan(Recipe("keep"), reason=reason) for k, reason in enumerate(reasons)}
    assert str(Plan(regions)).splitlines()[3] == "    first: late: 64.00 MiB of 1.00 GiB"


def test_text_fits_100_columns():
    recipe = Recipe("selective", ops=("attention", "matmul@self_attn", "matmul@mlp"), outputs="keep")
    pruned = dataclasses.replace(MOVED.recipe, sites=tuple(range(128)), prune=(0,))
    cost = Cost(999 * 2**30, 999 * 2**30, 99.0)
    names = [
        f"{part}_blocks.{k}.attentions.0.transformer_blocks.0.feed_forward" for part in ("down", "up") for k in (1, 3)
    ]
    regions = {name: RegionPlan(recipe, reason="the link is full; " * 20, cost=cost) for name in names}
    regions["x"] = RegionPlan(pruned, cost=cost)
    lines = str(dataclasses.replace(PLAN, regions=regions, budget="42949672960 bytes (40.00 GiB)")).splitlines()
    assert max(map(len, lines)) <= 100
    shown = {cells(line)[0] for line in lines if "_blocks" in line}
    assert len(shown) == 4
    assert all("..." in name for name in shown)
    assert lines[4].startswith("    selective (attention, matmul@self_attn, matmul@mlp) kept, inputs offloaded; the ")
    assert "    outputs offloaded, 1 pruned, inputs offloaded" in lines


def test_text_keeps_numbers_and_units_together():
    for width in range(30):
        lines = str(dataclasses.replace(PLAN, budget="x" * width)).splitlines()
        assert not any(re.search(r"[0-9]$", line) for line in lines[:2])


def test_text_names_the_operators_of_a_recipe_by_hand():
    plan = Plan({"layers.0": RegionPlan(Recipe("selective", ops=("matmul",), sites=(3,)))})
    assert str(plan).splitlines()[2:] == [
        "layers.0  selective, 1 output",
        "    selective (matmul) offloaded, inputs offloaded",
    ]


def test_a_notebook_shows_the_whole_headline():
    html = plan_table(PLAN)
    assert "peak 1000.00 MiB, 96.00 MiB out and back, 90.00 MiB on the host</caption>" in html
    assert (
        '<td class="text">selective, 2 outputs</td><td>0 B</td><td>48.00 MiB</td><td class="text wrap">outputs off'
        in html
    )


def test_text_says_what_waits_for_the_host():
    slow = dataclasses.replace(PLAN.predicted, host_wait_s=0.004)
    text = " ".join(str(dataclasses.replace(PLAN, predicted=slow)).split())
    assert "waiting 1.0 ms forward and 2.0 ms backward, 4.0 ms for the host; peak" in text


def test_text_begins_with_the_budget_as_it_was_written():
    planned = dataclasses.replace(PLAN, budget="40GiB")
    assert str(planned).startswith("plan within 40GiB: step 100.0 ms")
    waiting = dataclasses.replace(planned, status="no plan yet: measuring step 2 of 3")
    assert str(waiting).splitlines()[0] == "no plan yet: measuring step 2 of 3 (budget 40GiB)"
    assert str(dataclasses.replace(Plan({}), status="no plan yet")).splitlines()[0] == "no plan yet"


def test_a_file_holds_the_budget_as_it_was_written_and_no_status(tmp_path):
    dataclasses.replace(PLAN, budget="40GiB", status="no plan yet").save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.budget, loaded.status, loaded.predicted) == ("40GiB", "", PLAN.predicted)


def test_a_file_without_budget_and_status_is_read(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["budget"], data["status"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_text_of_a_plan_written_by_hand():
    assert str(Plan({"layers.0": RegionPlan(Recipe("offload"))})).splitlines() == [
        "plan, 1 regions",
        "regions   recipe   kept  moved  recompute",
        "layers.0  offload",
    ]


def test_a_file_holds_all_of_it(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == 2


def test_a_file_with_the_old_names_of_fields_is_read(tmp_path):
    path = Path(__file__).parent / "planner" / "plan_format_1.json"
    plan = Plan.load(path)
    selective = Recipe("selective", ops=tuple(OP_CLASSES), sites=(0, 3), prune=(3,))
    assert plan.regions["layers.0"] == dataclasses.replace(MOVED, recipe=selective)
    assert (plan.regions["head"], plan.outside) == (PLAN.regions["head"], PLAN.outside)
    assert (plan.predicted, plan.budget, plan.budget_bytes) == (PLAN.predicted, "1GiB", PLAN.budget_bytes)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_of_a_plan_without_anything(tmp_path):
    Plan({}).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan({})


def test_a_release_point_is_one_again(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").regions["layers.2"].release[0].window_bytes == 48 * MIB
    assert type(Plan.load(tmp_path / "plan.json").outside.release[0]) is ReleasePoint


def test_a_function_cannot_be_saved(tmp_path):
    plan = Plan({"layers.0": RegionPlan(Recipe("selective", ops=(lambda op, *args, **kwargs: True,)))})
    with pytest.raises(PlanError, match=r"layers\.0: the recipe chooses operators by a Python function"):
        plan.save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


BAD_REGION = '{"format": 1, "regions": {"a": {"recipe": {"action": "fly", "sites": null}, "cost": null}}}'


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"format": 1}', '{"format": 1, "regions": []}', BAD_REGION])
def test_files_of_other_kinds_are_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json is not an ebbtide plan file"):
        Plan.load(tmp_path / "plan.json")


def test_another_format_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 99}')
    with pytest.raises(PlanError, match=r"plan\.json was written by another version of ebbtide: make the plan again"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_unreadable_files_are_refused(tmp_path, name):
    with pytest.raises(PlanError, match="cannot be read: "):
        Plan.load(tmp_path / name)


@pytest.mark.parametrize(
    ("place", "value", "expected_text"),
    [
        (("predicted", "step_s"), "x", r"predicted\.step_s is 'x': expected a finite number of at least 0"),
        (("predicted", "step_s"), None, r"predicted\.step_s is None: expected a finite number"),
        (("predicted", "peak_bytes"), 0.5, r"predicted\.peak_bytes is 0\.5: expected a whole number"),
        (("budget_bytes",), "20GiB", "budget_bytes is '20GiB': expected a whole number of at least 0"),
        (("budget_bytes",), -1, "budget_bytes is -1: expected"),
        (("regions", "layers.2", "cost", "kept_bytes"), "x", r"regions\['layers\.2'\]\.cost\.kept_bytes is 'x': exp"),
        (("regions", "layers.0", "reason"), 5, r"regions\['layers\.0'\]\.reason is 5: expected text"),
        (("outside", "reason"), None, r"outside\.reason is None: expected text"),
        (("outside", "prefetch_bytes"), -3, r"outside\.prefetch_bytes is -3: expected"),
    ],
)
def test_values_that_no_plan_has_are_refused(tmp_path, place, value, expected_text):
    PLAN.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    row = data
    for key in place[:-1]:
        row = row[key]
    assert place[-1] in row
    row[place[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"plan\.json is not an ebbtide plan file: {expected_text}"):
        Plan.load(tmp_path / "plan.json")


def test_a_profile_is_no_plan(tmp_path):
    workload_a().save(tmp_path / "profile.json")
    with pytest.raises(
        PlanError, match=r"profile\.json is not an ebbtide plan file: it is a profile: give it to offload\(model, pro"
    ):
        Plan.load(tmp_path / "profile.json")


def test_names_that_count_up():
    assert counts_up("layers.3.mlp", "layers.4.mlp")
    assert not counts_up("layers.3.mlp", "layers.5.mlp")
    assert not counts_up("layers.3.mlp", "layers.4.norm")
    assert not counts_up("a.0.b.9", "a.1.b.0")
    assert not counts_up("layers.3", "layers.3")
    assert not counts_up("head", "head")


def test_ranges_of_names():
    assert as_range("encoder.3.mlp", "encoder.12.mlp") == "encoder.3-12.mlp"
    assert as_range("a.1.b.2", "a.1.b.7") == "a.1.b.2-7"
    assert as_range("head", "head") == "head"


def test_a_table_is_as_wide_as_it_has_to_be():
    assert plain_table([["a", "bb"], ["ccc", "d"]], right=(1,)) == "a    bb\nccc   d"
