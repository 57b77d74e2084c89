"""Plans as data: wrong values are refused with a remedy, and a plan never changes."""

import copy
import dataclasses
import pickle

import pytest
from torch import nn

from ebbtide import ConfigError, Plan, PlanError, Prediction, Recipe, RegionPlan, ReleasePoint

OFFLOAD = Recipe("offload")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RegionPlan("recomput"), "action='recomput': write one of 'keep', 'offload', 'recompute', 'selective'"),
        (lambda: RegionPlan(None), r"None is not a recipe: .*ebbtide\.Recipe\(\.\.\.\)"),
        (lambda: RegionPlan(OFFLOAD, prefetch_bytes=0), "prefetch_bytes=0: expected more than zero bytes, or None"),
        (lambda: RegionPlan(OFFLOAD, prefetch_bytes=-1), "prefetch_bytes=-1: expected"),
        (lambda: RegionPlan(OFFLOAD, prefetch_bytes="1GiB"), "prefetch_bytes='1GiB': expected"),
        (lambda: RegionPlan(OFFLOAD, prefetch_bytes=True), "prefetch_bytes=True: expected"),
        (lambda: Plan({"a": "recompute"}), r"regions\['a'\]='recompute': expected a RegionPlan, such as RegionPlan\("),
        (lambda: Plan({"a": OFFLOAD}), r"regions\['a'\]=Recipe\(action='offload'.*expected a RegionPlan"),
        (lambda: Plan({nn.Linear: RegionPlan("keep")}), r"regions=\{<class .*Linear.*expected the name of a module"),
        (lambda: Plan(None), r"regions=None: expected \{name: RegionPlan\("),
        (lambda: Plan({}, outside=Recipe("keep")), r"outside=Recipe\(action='keep'.*expected a RegionPlan"),
    ],
)
def test_plans_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "points",
    [((-1, 0),), ((0, -1),), ((0, 0, 0),), ((0,),), (3,), (0, 0), 3, None, ReleasePoint(0, 0), ((0, "1GiB"),),
     ((True, 0),), ((0, 1.5),), ("00",)],
    ids=repr,
)  # fmt: skip
def test_release_points_that_cannot_be(points):
    with pytest.raises(
        ConfigError, match=r"release=.*: expected \(\(index of a saved tensor, bytes\), \.\.\.\), whole numbers"
    ):
        RegionPlan(OFFLOAD, release=points)


@pytest.mark.parametrize("points", [((2, 0), (1, 0)), ((1, 5), (1, 0)), ((1, 0), (1, 5)), ((1, 5), (1, 5))], ids=repr)
def test_release_points_ascend(points):
    with pytest.raises(
        ConfigError, match=r"release=.*: expected at most one point per saved tensor, in ascending order"
    ):
        RegionPlan(OFFLOAD, release=points)


def test_release_points_may_be_written_as_pairs():
    region = RegionPlan(OFFLOAD, release=[(0, 100), [3, 0], ReleasePoint(4, 7)])
    assert region.release == (ReleasePoint(0, 100), ReleasePoint(3, 0), ReleasePoint(4, 7))
    assert [(point.tensor_index, point.window_bytes) for point in region.release] == [(0, 100), (3, 0), (4, 7)]
    assert all(type(point) is ReleasePoint for point in region.release)


def test_a_recipe_may_be_written_as_a_word():
    assert RegionPlan("recompute") == RegionPlan(Recipe("recompute"))


@pytest.mark.parametrize("action", ["recompute", "selective"])
def test_tensors_outside_of_regions_cannot_be_recomputed(action):
    with pytest.raises(ConfigError, match=rf"outside={action}.*cannot be recomputed: write Recipe\('keep'\) or "):
        Plan({}, outside=RegionPlan(Recipe(action)))


@pytest.mark.parametrize("action", ["keep", "offload"])
def test_tensors_outside_of_regions_stay_or_move(action):
    assert Plan({}, outside=RegionPlan(action)).outside == RegionPlan(Recipe(action))


def test_the_old_name_of_prune_warns():
    with pytest.warns(FutureWarning, match="write `prune`"):
        recipe = Recipe("selective", sites=(0, 1), beyond=(1,))
    assert recipe == Recipe("selective", sites=(0, 1), prune=(1,)) == dataclasses.replace(recipe)
    with pytest.warns(FutureWarning, match="write `prune`"):
        assert getattr(recipe, "beyond") == (1,)  # noqa: B009
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="one setting"):
        Recipe("selective", sites=(0, 1), beyond=(1,), prune=(0,))


def test_a_file_with_both_names_of_a_field_is_refused(tmp_path):
    recipe = Recipe("selective", sites=(0, 1), prune=(1,))
    path = tmp_path / "plan.json"
    Plan({"layers.0": RegionPlan(recipe)}).save(path)
    path.write_text(path.read_text().replace('"prune"', '"beyond": [0],\n"prune"'))
    with pytest.raises(PlanError, match="given twice"):
        Plan.load(path)


def test_defaults_say_nothing():
    region, plan = RegionPlan(OFFLOAD), Plan({})
    assert (region.release, region.prefetch_bytes, region.reason) == ((), None, "")
    assert (plan.regions, plan.outside, plan.budget_bytes, plan.predicted) == ({}, None, None, None)


def test_recipe_of():
    plan = Plan({"layers.0": RegionPlan("recompute")}, outside=RegionPlan("keep"))
    assert plan.recipe_of("layers.0") == Recipe("recompute")
    assert plan.recipe_of("layers.1") is None
    assert plan.recipe_of("") is None
    assert plan.recipe_of(None) is None


PLANS = [
    Plan({}),
    Plan({"a": RegionPlan("selective", ((1, 2),), 3, "the link is busy")}, RegionPlan("keep", ((0, 0),)), 2**30),
    Plan({"a": RegionPlan("keep")}, predicted=Prediction(1.0, 0.0, 0.1, 4, 3, 2)),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_fields_cannot_be_set(plan):
    for data in (plan, *plan.regions.values(), *filter(None, [plan.outside, plan.predicted])):
        for field in dataclasses.fields(data):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(data, field.name, None)


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_plans_are_compared_copied_and_sent_by_what_they_say(plan):
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == dataclasses.replace(plan) == plan
    assert dataclasses.replace(plan, budget_bytes=1) != plan
    assert [other for other in PLANS if other == plan] == [plan]


def test_arguments_may_change_afterwards():
    points, regions = [(0, 0)], {}
    regions["a"] = RegionPlan(OFFLOAD, release=points)
    plan = Plan(regions)
    points.append((1, 1))
    regions["b"] = RegionPlan("keep")
    assert plan == Plan({"a": RegionPlan(OFFLOAD, release=((0, 0),))})
