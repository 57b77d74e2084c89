"""Compiled regions at activation memory budgets: which step measures which, and what a profile makes of the steps."""

from dataclasses import replace

from planner.workloads import MS, layers, profile

from ebbtide._profiling.merge_ranks import merged_by, slowest, structure_of
from ebbtide._profiling.points import rounds_of, with_points
from ebbtide._profiling.profile import SavedTensor

BUDGETS = (0.5, 0.0)
STEP = profile(*layers(6))
CLASSES = {f"layers.{k}": "Block" for k in range(6)}


def measured(budgets, speed=1.0, extra_s=None, step=STEP):
    """A step in which regions at a budget save a tensor of their own, and take `extra_s` longer."""
    extra_s = extra_s or {0.5: 2 * MS, 0.0: 6 * MS}
    regions = [
        each
        if budgets.get(each.name) is None
        else replace(
            each,
            saved_tensors=(SavedTensor(0, int(100_000_000 * budgets[each.name]) + k, 0.0),),
            backward_s=each.backward_s + extra_s[budgets[each.name]],
        )
        for k, each in enumerate(step.regions)
    ]
    return replace(step, regions=tuple(regions)).at_speed(speed)


def test_regions_of_a_kind_share_a_round():
    (only,) = rounds_of(STEP, CLASSES, BUDGETS)
    assert list(only.values()) == [None, 0.5, 0.0, None, 0.5, 0.0]


def test_a_kind_with_few_regions_takes_several_rounds():
    classes = {"layers.0": "Block", "layers.1": "Other", "layers.2": "Other"}
    rounds = rounds_of(STEP, classes, BUDGETS)
    assert [budgets["layers.0"] for budgets in rounds] == [None, 0.5, 0.0]
    assert [(budgets["layers.1"], budgets["layers.2"]) for budgets in rounds[:2]] == [(None, 0.5), (0.0, None)]
    assert all(set(budgets) == set(classes) for budgets in rounds)


def test_no_round_without_compiled_regions_and_none_without_a_budget():
    assert rounds_of(STEP, {}, BUDGETS) == []
    assert rounds_of(STEP, {"layers.0": "Block"}, BUDGETS)[0]["layers.0"] == 0.5


def test_regions_of_unequal_sizes_are_of_different_kinds():
    large = replace(STEP.regions[0], saved_tensors=(SavedTensor(0, 999, 0.0),))
    rounds = rounds_of(replace(STEP, regions=(large, *STEP.regions[1:])), CLASSES, BUDGETS)
    assert [budgets["layers.0"] for budgets in rounds] == [None, 0.5, 0.0]


def test_every_region_has_the_points_of_its_kind():
    (budgets,) = rounds_of(STEP, CLASSES, BUDGETS)
    found = with_points(STEP, CLASSES, [(budgets, measured(budgets))])
    for number, (own, region) in enumerate(zip(STEP.regions, found.regions, strict=True)):
        assert replace(region, points=()) == own
        assert [each.activation_memory_budget for each in region.points] == [0.5, 0.0]
        assert [round(each.partition_s / MS, 6) for each in region.points] == [2.0, 6.0]
        assert {(each.name, each.forward_s, each.backward_s) for each in region.points} == {
            (own.name, own.forward_s, own.backward_s)
        }
        nearest = min((1, 4), key=lambda each, number=number: abs(each - number))
        assert region.at(0.5).saved_bytes == 50_000_000 + nearest


def test_a_point_has_its_regions_own_numbers_of_common_memory():
    """Each region receives memory k, and passes on memory k + 1. The nearest measured region has other numbers."""
    chained = replace(
        STEP,
        regions=tuple(
            replace(
                each,
                inputs=(SavedTensor(0, 1000, 0.0, common=k),),
                saved_tensors=(SavedTensor(90, 1000, 0.0, common=k), SavedTensor(91, 0, 0.0, common=k + 1)),
            )
            for k, each in enumerate(STEP.regions, 1)
        ),
    )
    (budgets,) = rounds_of(chained, CLASSES, BUDGETS)
    other = measured(budgets, step=chained)
    changed = [
        replace(each, saved_tensors=(replace(each.saved_tensors[0], common=each.inputs[0].common + 1, nbytes=0),))
        if budgets[each.name] is not None
        else each
        for each in other.regions
    ]
    found = with_points(chained, CLASSES, [(budgets, replace(other, regions=tuple(changed)))])
    assert [[point.saved_tensors[0].common for point in each.points] for each in found.regions] == [
        [k + 1, k + 1] for k in range(1, 7)
    ]


def test_a_step_at_another_clock_speed_is_corrected_by_the_regions_without_a_budget():
    (budgets,) = rounds_of(STEP, CLASSES, BUDGETS)
    found = with_points(STEP, CLASSES, [(budgets, measured(budgets, speed=1.25))])
    assert [round(each.partition_s / MS, 6) for each in found.regions[0].points] == [2.0, 6.0]


def test_a_point_is_never_faster_than_the_region_itself():
    (budgets,) = rounds_of(STEP, CLASSES, BUDGETS)
    found = with_points(STEP, CLASSES, [(budgets, measured(budgets, extra_s={0.5: -1 * MS, 0.0: 6 * MS}))])
    assert found.regions[0].at(0.5).partition_s == 0.0


def test_a_step_of_other_regions_and_a_class_left_out_give_no_points():
    (budgets,) = rounds_of(STEP, CLASSES, BUDGETS)
    other = replace(measured(budgets), regions=STEP.regions[:4])
    assert with_points(STEP, CLASSES, [(budgets, other)]) == STEP
    assert with_points(STEP, {}, [(budgets, measured(budgets))]) == STEP


def test_ranks_merge_the_points_that_all_have():
    (budgets,) = rounds_of(STEP, CLASSES, BUDGETS)
    own = with_points(STEP, CLASSES, [(budgets, measured(budgets))])
    other = with_points(STEP, CLASSES, [(budgets, measured(budgets, extra_s={0.5: 3 * MS, 0.0: 5 * MS}))])
    assert structure_of(own) == structure_of(other) != structure_of(STEP)
    merged = slowest([own, other])
    assert [round(each.partition_s / MS, 6) for each in merged.regions[0].points] == [3.0, 6.0]
    assert slowest([own, STEP]).regions[0].points == ()

    def largest(numbers):
        rows = []

        def collect(row):
            rows.extend(row)
            return row

        merged_by(collect, other, other.base_bytes)
        return [max(pair) for pair in zip(numbers, rows, strict=True)]

    assert merged_by(largest, own, own.base_bytes) == merged
