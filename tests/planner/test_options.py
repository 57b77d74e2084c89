"""What may be done with a region, and what it costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from planner.generated import profiles
from planner.workloads import MS, region, workload_a

from ebbtide._planner.options import option_for, options_of, queueing_s, why
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import OUTSIDE, Dear, Host, HostTime, Save

MB = 1_000_000


def recipes(each, **changes):
    return [option.recipe for option in options_of(each, **changes)]


def test_keeping_is_first_and_keeps_all():
    kept = options_of(region(stuck_bytes=5))[0]
    assert kept.recipe == Recipe("keep")
    assert (kept.kept_bytes, kept.moved_bytes, kept.again_s) == (300 * MB + 5, 0, 0.0)


def test_keeping_stays_even_where_a_second_run_seems_to_be_free():
    dear = (Dear(0, 1 * MB, 0.0, 11 * MS, "aten::mm"),)
    options = options_of(region(dear=dear))
    assert options[0].recipe == Recipe("keep")
    assert min(option.again_s for option in options) == 0.0


def test_offloading_moves_the_largest_first():
    """The fourth shares the memory of the first, the fifth that of another region's save, which takes it along."""
    saves = (
        Save(0, 10 * MB, 0.0),
        Save(1, 80 * MB, 5 * MS),
        Save(2, 30 * MB, 8 * MS),
        Save(3, 0, 9 * MS, shares=0),
        Save(4, 0, 9 * MS),
    )
    moves = [recipe for recipe in recipes(region(saves=saves), only_moves=True) if recipe.action == "offload"]
    assert [recipe.sites for recipe in moves] == [(1, 4), (1, 2, 4), None]


def test_moving_all_leaves_out_the_saves_that_nobody_has_in_backward():
    saves = (Save(0, 10 * MB, 0.0), Save(3, 80 * MB, 5 * MS), Save(4, 0, 6 * MS, shares=3))
    recipe = recipes(region(saves=saves, has_dead_saves=True), only_moves=True)[-1]
    assert recipe == Recipe("offload", sites=(0, 3, 4))


def test_what_stays_for_others_is_sent_by_no_recipe():
    """Outside of the regions somebody has the first save and the first input stay: to send them frees nothing."""
    saves = (Save(0, 0, 0.0, shares=OUTSIDE), Save(1, 80 * MB, 5 * MS), Save(2, 0, 6 * MS, shares=0))
    for inputs in ((Save(0, 0, 0.0, shares=OUTSIDE),), (Save(0, 0, 0.0, shares=OUTSIDE), Save(1, 0, 0.0, shares=0))):
        options = options_of(region(saves=saves, inputs=inputs))
        assert [each.recipe.sites for each in options if each.recipe.action == "offload"] == [(1,)]
        again = [each.recipe for each in options if each.recipe.recomputes]
        assert {recipe.action for recipe in again} == {"recompute", "selective"}
        assert {recipe.inputs for recipe in again} == {"keep"}


@pytest.mark.parametrize("other", [Save(1, 10 * MB, 0.0), Save(1, 0, 0.0)])
def test_what_else_is_passed_to_a_region_travels_all_the_same(other):
    """It has memory of its own, or that of another region's save: one that stays would keep it there."""
    inputs = (Save(0, 0, 0.0, shares=OUTSIDE), other)
    again = [recipe for recipe in recipes(region(inputs=inputs)) if recipe.recomputes]
    assert {recipe.inputs for recipe in again} == {"keep", "offload"}


ROTATED = (
    Dear(0, 64 * MB, 1 * MS, 2 * MS, "aten::mm", led=(1,), led_s=1.5 * MS, led_ops=9, users=(1,)),
    Dear(1, 64 * MB, 2 * MS, 5 * MS, "aten::attention"),
)
ROTATED_SAVES = (Save(0, 10 * MB, 0.0), Save(1, 64 * MB, 4 * MS), Save(2, 0, 5 * MS, shares=1))


def selective(each, calls):
    """The one that holds so many calls, and moves all of it."""
    options = options_of(each)
    found = [option for option in options if option.held == calls and option.kept_bytes == 0]
    assert len(found) == 1
    return found[0]


def test_saves_are_held_instead_of_outputs_where_that_is_worth_more():
    each = region(saves=ROTATED_SAVES, dear=ROTATED)
    assert selective(each, 1).recipe.beyond == ()
    option = selective(each, 2)
    assert (option.recipe.sites, option.recipe.beyond) == ((0, 1), (0,))
    assert option.again_s == pytest.approx(10 * MS - (2 + 1.5 + 5) * MS)
    assert sorted(parcel.nbytes for parcel in option.moved) == [20 * MB, 64 * MB, 64 * MB]
    assert max(parcel.at_s for parcel in option.moved) == 4 * MS  # when the save is there
    assert option.left_out == 9
    assert option_for(each, option.recipe) == option


@pytest.mark.parametrize(
    "changes",
    [
        {"led": ()},  # somebody needs what is in between
        {"led": (0, 1)},  # 10 MB more, of saves that lie in between
        {"led_s": 0.0},
        {"users": (1, 2)},  # a call that is not held is given it
    ],
)
def test_else_outputs_are_held(changes):
    dear = (replace(ROTATED[0], **changes), ROTATED[1], Dear(2, 900 * MB, 6 * MS, 1 * MS, "aten::mm"))
    saves = (Save(0, 64 * MB, 0.0), *ROTATED_SAVES[1:], Save(3, 500 * MB, 6 * MS))
    option = selective(region(saves=saves, dear=dear), 2)
    assert (option.recipe.sites, option.recipe.beyond, option.left_out) == ((0, 1), (), 0)


def test_what_is_saved_once_and_led_to_twice_is_held_once():
    dear = (replace(ROTATED[0], led=(1, 2)), ROTATED[1])
    assert selective(region(saves=ROTATED_SAVES, dear=dear), 2).moved_bytes == (20 + 64 + 64) * MB


def test_to_leave_out_takes_the_host_time():
    each = region(saves=ROTATED_SAVES, dear=ROTATED)
    host = Host((), 0.0, 0.0, 0.0, 0.0, 0.0, frame_s=0.0, op_s=1.0, held_s=0.0, moved_s=0.0)
    beyond = selective(each, 2)
    outputs = option_for(each, replace(beyond.recipe, beyond=()))
    times = HostTime(0.0, 0.0, 0.0, ops=100)
    assert queueing_s(outputs, host, times) == 100
    assert queueing_s(beyond, host, times) == pytest.approx(100 + 9)


def test_what_moves_is_there_and_needed_in_mirrored_order():
    option = option_for(region(), Recipe("offload"))
    assert [(parcel.at_s, parcel.needed_s) for parcel in option.moved] == [
        (0.0, pytest.approx(20 * MS)),
        (5 * MS, pytest.approx(10 * MS)),
        (10 * MS, pytest.approx(0.0)),
    ]
    assert not option.comes_together


def test_offloading_needs_room_for_what_is_at_hand():
    """400 MB measured are 300 saved and 100 short-lived. The largest save is 100, and so is its gradient."""
    each = region()
    assert option_for(each, Recipe("keep")).backward_work_bytes == 100 * MB
    assert option_for(each, Recipe("offload")).backward_work_bytes == 300 * MB


def test_what_nobody_asks_for_is_not_there_in_backward():
    """400 MB measured are 300 saved, of which 50 are gone by then: the rest is short-lived."""
    kept = option_for(region(unasked_bytes=50 * MB), Recipe("keep"))
    assert kept.backward_work_bytes == 150 * MB
    moved = option_for(region(unasked_bytes=50 * MB), Recipe("offload"))
    assert moved.backward_work_bytes == 350 * MB


def test_what_was_seen_of_backward_is_what_moving_needs():
    measured = [option_for(region(moved_work_bytes=n), Recipe("offload")) for n in (0, 250_000_000, 900_000_000)]
    assert [option.backward_work_bytes for option in measured] == [300_000_000, 250_000_000, 900_000_000]
    kept = option_for(region(moved_work_bytes=50_000_000), Recipe("keep"))
    assert kept.backward_work_bytes == 100_000_000


def test_running_again_keeps_or_moves_inputs_and_outputs():
    each = region()
    dropped = option_for(each, Recipe("recompute", inputs="keep"))
    assert (dropped.kept_bytes, dropped.moved_bytes, dropped.again_s) == (20 * MB, 0, 10 * MS)
    assert dropped.backward_work_bytes == 380 * MB  # the inputs count as kept
    held = option_for(each, Recipe("selective", sites=(0, 1)))
    assert (held.kept_bytes, held.moved_bytes) == (0, 170 * MB)
    assert held.again_s == pytest.approx(3 * MS)
    assert held.comes_together
    mixed = option_for(each, Recipe("selective", sites=(1,), outputs="keep"))
    assert (mixed.kept_bytes, mixed.moved_bytes) == (100 * MB, 20 * MB)


def test_the_dearest_per_byte_are_held_first():
    assert {recipe.sites for recipe in recipes(region()) if recipe.action == "selective"} == {(0,), (0, 1)}


def test_what_is_free_to_make_again_is_not_held():
    dear = (Dear(0, 0, 0.0, 1 * MS, "aten::mm"), Dear(1, 5 * MB, 0.0, 0.0, "aten::mm"))
    assert not [recipe for recipe in recipes(region(dear=dear)) if recipe.action == "selective"]


def test_nothing_runs_again_where_that_is_not_wanted_or_not_known():
    assert {recipe.action for recipe in recipes(region(), only_moves=True)} == {"keep", "offload"}
    assert {recipe.action for recipe in recipes(region(again_s=0.0))} == {"keep", "offload"}


def test_a_region_that_saves_nothing_is_kept():
    assert recipes(region(saves=(), inputs=(), dear=(), again_s=0.0)) == [Recipe("keep")]


@given(profiles())
def test_none_is_worse_than_another_in_every_respect(step):
    for each in step.regions:
        first, *others = options_of(each)
        costs = [(o.kept_bytes, o.moved_bytes, o.again_s, o.backward_work_bytes) for o in others]
        assert first.recipe == Recipe("keep")
        for one in costs:
            assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in costs)


@given(profiles())
def test_a_recipe_alone_says_what_an_option_costs(step):
    for each in step.regions:
        for option in options_of(each):
            assert option_for(each, option.recipe) == option


def test_the_reasons_name_bytes_and_milliseconds():
    each = workload_a().regions[0]
    texts = [why(option, each) for option in options_of(each)]
    assert texts[0].startswith("1.73 GiB stay")
    assert "1.67 GiB freed for 4.7 ms again; inputs stay" in texts
    assert any(text.endswith("7 dear outputs travel spare 2.7 ms") for text in texts)
