"""What may be done with a region, and what it costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from planner.generated import profiles
from planner.workloads import MS, region, workload_a

from ebbtide._planner.options import describe, launch_overhead_s, option_for, options_of
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import OUTSIDE, ExpensiveOp, Host, HostTime, SavedTensor

MB = 1_000_000


def recipes(each, **changes):
    return [option.recipe for option in options_of(each, **changes)]


def test_keeping_is_first_and_keeps_all():
    kept = options_of(region(not_movable_bytes=5))[0]
    assert kept.recipe == Recipe("keep")
    assert (kept.kept_bytes, kept.moved_bytes, kept.recompute_s) == (300 * MB + 5, 0, 0.0)


def test_keeping_stays_even_where_recomputation_seems_free():
    ops = (ExpensiveOp(0, 1 * MB, 0.0, 11 * MS, "aten::mm"),)
    options = options_of(region(expensive_ops=ops))
    assert options[0].recipe == Recipe("keep")
    assert min(option.recompute_s for option in options) == 0.0


def test_offloading_moves_the_largest_first():
    """The fourth shares memory with the first, the fifth with a tensor of another region."""
    tensors = (
        SavedTensor(0, 10 * MB, 0.0),
        SavedTensor(1, 80 * MB, 5 * MS),
        SavedTensor(2, 30 * MB, 8 * MS),
        SavedTensor(3, 0, 9 * MS, shares=0),
        SavedTensor(4, 0, 9 * MS),
    )
    moves = [recipe for recipe in recipes(region(saved_tensors=tensors), only_moves=True) if recipe.action == "offload"]
    assert [recipe.sites for recipe in moves] == [(1, 4), (1, 2, 4), None]


def test_moving_all_excludes_dead_tensors():
    tensors = (SavedTensor(0, 10 * MB, 0.0), SavedTensor(3, 80 * MB, 5 * MS), SavedTensor(4, 0, 6 * MS, shares=3))
    recipe = recipes(region(saved_tensors=tensors, has_dead_tensors=True), only_moves=True)[-1]
    assert recipe == Recipe("offload", sites=(0, 3, 4))


def test_memory_used_outside_of_the_regions_never_moves():
    """The first saved tensor and the first input are in use outside of the regions: a move frees nothing."""
    tensors = (
        SavedTensor(0, 0, 0.0, shares=OUTSIDE),
        SavedTensor(1, 80 * MB, 5 * MS),
        SavedTensor(2, 0, 6 * MS, shares=0),
    )
    for inputs in (
        (SavedTensor(0, 0, 0.0, shares=OUTSIDE),),
        (SavedTensor(0, 0, 0.0, shares=OUTSIDE), SavedTensor(1, 0, 0.0, shares=0)),
    ):
        options = options_of(region(saved_tensors=tensors, inputs=inputs))
        assert [each.recipe.sites for each in options if each.recipe.action == "offload"] == [(1,)]
        recomputing = [each.recipe for each in options if each.recipe.recomputes]
        assert {recipe.action for recipe in recomputing} == {"recompute", "selective"}
        assert {recipe.inputs for recipe in recomputing} == {"keep"}


@pytest.mark.parametrize("other", [SavedTensor(1, 10 * MB, 0.0), SavedTensor(1, 0, 0.0)])
def test_other_inputs_of_a_region_move(other):
    """Own memory, or memory of another region's saved tensor."""
    inputs = (SavedTensor(0, 0, 0.0, shares=OUTSIDE), other)
    recomputing = [recipe for recipe in recipes(region(inputs=inputs)) if recipe.recomputes]
    assert {recipe.inputs for recipe in recomputing} == {"keep", "offload"}


ROTATED = (
    ExpensiveOp(
        0, 64 * MB, 1 * MS, 2 * MS, "aten::mm", downstream=(1,), downstream_s=1.5 * MS, downstream_ops=9, users=(1,)
    ),
    ExpensiveOp(1, 64 * MB, 2 * MS, 5 * MS, "aten::attention"),
)
ROTATED_TENSORS = (SavedTensor(0, 10 * MB, 0.0), SavedTensor(1, 64 * MB, 4 * MS), SavedTensor(2, 0, 5 * MS, shares=1))


def selective(each, calls):
    """The option that saves the outputs of so many calls, and moves all."""
    options = options_of(each)
    found = [option for option in options if option.saved_outputs == calls and option.kept_bytes == 0]
    assert len(found) == 1
    return found[0]


def test_downstream_tensors_replace_outputs_of_less_worth():
    each = region(saved_tensors=ROTATED_TENSORS, expensive_ops=ROTATED)
    assert selective(each, 1).recipe.prune == ()
    option = selective(each, 2)
    assert (option.recipe.sites, option.recipe.prune) == ((0, 1), (0,))
    assert option.recompute_s == pytest.approx(10 * MS - (2 + 1.5 + 5) * MS)
    assert sorted(parcel.nbytes for parcel in option.moved) == [20 * MB, 64 * MB, 64 * MB]
    assert max(parcel.at_s for parcel in option.moved) == 4 * MS  # when the saved tensor exists
    assert option.pruned_ops == 9
    assert option_for(each, option.recipe) == option


@pytest.mark.parametrize(
    "changes",
    [
        {"downstream": ()},  # the outputs themselves are needed
        {"downstream": (0, 1)},  # 10 MB more, of tensors in between
        {"downstream_s": 0.0},
        {"users": (1, 2)},  # a call whose outputs are not saved reads a tensor in between
    ],
)
def test_otherwise_outputs_are_saved(changes):
    ops = (replace(ROTATED[0], **changes), ROTATED[1], ExpensiveOp(2, 900 * MB, 6 * MS, 1 * MS, "aten::mm"))
    tensors = (SavedTensor(0, 64 * MB, 0.0), *ROTATED_TENSORS[1:], SavedTensor(3, 500 * MB, 6 * MS))
    option = selective(region(saved_tensors=tensors, expensive_ops=ops), 2)
    assert (option.recipe.sites, option.recipe.prune, option.pruned_ops) == ((0, 1), (), 0)


def test_a_tensor_downstream_twice_is_saved_once():
    ops = (replace(ROTATED[0], downstream=(1, 2)), ROTATED[1])
    assert selective(region(saved_tensors=ROTATED_TENSORS, expensive_ops=ops), 2).moved_bytes == (20 + 64 + 64) * MB


def test_pruning_takes_the_host_time():
    each = region(saved_tensors=ROTATED_TENSORS, expensive_ops=ROTATED)
    host = Host((), 0.0, 0.0, 0.0, 0.0, 0.0, frame_s=0.0, op_s=1.0, saved_output_s=0.0, moved_s=0.0)
    pruned = selective(each, 2)
    outputs = option_for(each, replace(pruned.recipe, prune=()))
    times = HostTime(0.0, 0.0, 0.0, ops=100)
    assert launch_overhead_s(outputs, host, times) == 100
    assert launch_overhead_s(pruned, host, times) == pytest.approx(100 + 9)


def test_parcels_are_needed_in_mirrored_order():
    option = option_for(region(), Recipe("offload"))
    assert [(parcel.at_s, parcel.needed_s) for parcel in option.moved] == [
        (0.0, pytest.approx(20 * MS)),
        (5 * MS, pytest.approx(10 * MS)),
        (10 * MS, pytest.approx(0.0)),
    ]
    assert not option.is_recompute_batch


def test_offloading_needs_room_for_the_largest_tensor_and_its_gradient():
    """400 MB measured are 300 saved and 100 short-lived. The largest tensor has 100, and its gradient too."""
    each = region()
    assert option_for(each, Recipe("keep")).backward_work_bytes == 100 * MB
    assert option_for(each, Recipe("offload")).backward_work_bytes == 300 * MB


def test_unused_tensors_are_gone_in_backward():
    """400 MB measured are 300 saved, 50 of them unused and gone: the rest is short-lived."""
    kept = option_for(region(unused_bytes=50 * MB), Recipe("keep"))
    assert kept.backward_work_bytes == 150 * MB
    moved = option_for(region(unused_bytes=50 * MB), Recipe("offload"))
    assert moved.backward_work_bytes == 350 * MB


def with_reads(*reads, **changes):
    """Of each saved tensor: the place of its read, and MB."""
    tensors = zip(region().saved_tensors, reads, strict=True)
    read = (replace(tensor, read_at=place, read_bytes=n * MB) for tensor, (place, n) in tensors)
    return region(saved_tensors=tuple(read), moved_work_bytes=max(n for _, n in reads) * MB, **changes)


@pytest.mark.parametrize(
    ("reads", "sites", "expected"),
    [
        ([(3, 250), (2, 120), (1, 110)], None, 250),
        ([(3, 120), (2, 250), (1, 110)], None, 250),
        ([(3, 900), (2, 120), (1, 110)], None, 400),  # everything there: 300 saved and 100 short-lived
        ([(3, 250), (2, 210), (1, 130)], (0,), 50),  # of 100 each the others stay, which counts as kept
        ([(3, 390), (2, 210), (1, 190)], (0,), 190),
        ([(3, 250), (2, 240), (1, 130)], (0, 1), 150),
        ([(2, 250), (0, 0), (1, 130)], (0,), 150),  # backward does not read number 1, which stays
        ([(1, 150), (2, 230), (3, 340)], (0,), 150),
        ([(1, 150), (2, 230), (3, 340)], (2,), 140),
    ],
)
def test_recorded_reads_of_backward_replace_the_estimate(reads, sites, expected):
    each = with_reads(*reads)
    assert option_for(each, Recipe("offload", sites=sites)).backward_work_bytes == expected * MB
    assert option_for(each, Recipe("keep")).backward_work_bytes == 100 * MB


def test_measured_work_of_backward_replaces_the_estimate():
    """In files of earlier versions, and of ranks whose backwards read other tensors."""
    measured = [option_for(region(moved_work_bytes=n), Recipe("offload")) for n in (0, 250_000_000, 900_000_000)]
    all_present = 100_000_000 + 300_000_000
    assert [option.backward_work_bytes for option in measured] == [300_000_000, 250_000_000, all_present]
    kept = option_for(region(moved_work_bytes=50_000_000), Recipe("keep"))
    assert kept.backward_work_bytes == 100_000_000


def test_the_newest_parcel_waits_in_forward_or_is_part_of_the_work():
    """Measured while everything stayed, the work of 50 MB is without the newest tensor. Inputs of 20 MB are held."""
    each, read = region(forward_work_bytes=50 * MB), with_reads((3, 1), (2, 1), (1, 1), forward_work_bytes=50 * MB)
    kept, moved = (option_for(read, Recipe(action)) for action in ("keep", "offload"))
    assert (kept.forward_work_bytes, kept.newest_bytes) == (50 * MB, 0)
    assert (moved.forward_work_bytes, moved.newest_bytes) == (170 * MB, 100 * MB)
    unread = option_for(each, Recipe("offload"))
    assert (unread.forward_work_bytes, unread.newest_bytes) == (170 * MB, 0)


@pytest.mark.parametrize(
    ("forms", "newest", "beside"),
    [
        (("is_gathered",), 100, 100),
        (("is_bits",), 12.5, 12.5 + 32 * 1.048576),
        (("is_gathered", "is_bits"), 12.5, 100 + 12.5 + 32 * 1.048576),
    ],
)
def test_a_tensor_that_leaves_as_a_copy_takes_room_beside_older_parcels(forms, newest, beside):
    each = with_reads((3, 1), (2, 1), (1, 1), forward_work_bytes=50 * MB)
    as_copies = dict.fromkeys(forms, True)
    copied = replace(each, saved_tensors=tuple(replace(tensor, **as_copies) for tensor in each.saved_tensors))
    moved = option_for(copied, Recipe("offload"))
    assert moved.newest_bytes == newest * MB
    assert moved.forward_work_bytes == pytest.approx((50 + 20 + newest + beside) * MB)


def test_recomputation_keeps_or_moves_inputs_and_outputs():
    each = region()
    dropped = option_for(each, Recipe("recompute", inputs="keep"))
    assert (dropped.kept_bytes, dropped.moved_bytes, dropped.recompute_s) == (20 * MB, 0, 10 * MS)
    assert dropped.backward_work_bytes == 380 * MB  # the inputs count as kept
    handed = replace(each, recompute_work_bytes=350 * MB)
    assert option_for(handed, Recipe("recompute", inputs="keep")).backward_work_bytes == 330 * MB
    saved = option_for(each, Recipe("selective", sites=(0, 1)))
    assert saved.backward_work_bytes == option_for(handed, Recipe("selective", sites=(0, 1))).backward_work_bytes
    assert (saved.kept_bytes, saved.moved_bytes) == (0, 170 * MB)
    assert saved.recompute_s == pytest.approx(3 * MS)
    assert saved.is_recompute_batch
    mixed = option_for(each, Recipe("selective", sites=(1,), outputs="keep"))
    assert (mixed.kept_bytes, mixed.moved_bytes) == (100 * MB, 20 * MB)


def test_the_best_seconds_per_byte_are_saved_first():
    assert {recipe.sites for recipe in recipes(region()) if recipe.action == "selective"} == {(0,), (0, 1)}


def test_outputs_that_cost_nothing_are_not_saved():
    ops = (ExpensiveOp(0, 0, 0.0, 1 * MS, "aten::mm"), ExpensiveOp(1, 5 * MB, 0.0, 0.0, "aten::mm"))
    assert not [recipe for recipe in recipes(region(expensive_ops=ops)) if recipe.action == "selective"]


def test_no_recomputation_where_excluded_or_not_measured():
    assert {recipe.action for recipe in recipes(region(), only_moves=True)} == {"keep", "offload"}
    assert {recipe.action for recipe in recipes(region(recompute_s=0.0))} == {"keep", "offload"}


def test_a_region_that_saves_nothing_is_kept():
    assert recipes(region(saved_tensors=(), inputs=(), expensive_ops=(), recompute_s=0.0)) == [Recipe("keep")]


@given(profiles())
def test_no_option_is_dominated(step):
    for each in step.regions:
        first, *others = options_of(each)
        costs = [(o.kept_bytes, o.moved_bytes, o.recompute_s, o.backward_work_bytes) for o in others]
        assert first.recipe == Recipe("keep")
        for one in costs:
            assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in costs)


@given(profiles())
def test_a_recipe_determines_the_cost_of_an_option(step):
    for each in step.regions:
        for option in options_of(each):
            assert option_for(each, option.recipe) == option


def test_the_reasons_name_bytes_and_milliseconds():
    each = workload_a().regions[0]
    texts = [describe(option, each) for option in options_of(each)]
    assert texts[0].startswith("1.73 GiB stay")
    assert "1.67 GiB freed for 4.7 ms of recomputation" in texts
    assert any(text.endswith("; the saved outputs spare 2.7 ms") for text in texts)
