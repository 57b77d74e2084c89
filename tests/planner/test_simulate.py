"""The simulator: cases counted by hand, and properties of every outcome."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.generated import profiles
from planner.workloads import MS, layers, outside, profile, region

from ebbtide import PlanError
from ebbtide._planner.options import option_for, options_of
from ebbtide._planner.simulate import (
    Windows,
    equal_windows,
    least_budget,
    shares_between,
    simulate,
    simulate_below,
    windows_within,
)
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Link, SavedTensor

MB = 1_000_000
WIDE = 10**12


def wide(count, **changes):
    return Windows(**{"forward": (WIDE,) * count, "post_region": (WIDE,), "prefetch": (WIDE,) * count, **changes})


def one_parcel(megabytes, **changes):
    """A region that saves one parcel at its start: 10 ms forward, 20 ms backward."""
    return region(
        saved_tensors=(SavedTensor(0, megabytes * MB, 0.0),), backward_work_bytes=0, forward_work_bytes=0, **changes
    )


def moving(step):
    return [option_for(each, Recipe("offload")) for each in step.regions]


def test_with_everything_kept_it_is_the_plain_step():
    step = profile(
        *layers(3), outside=outside(before_s=1 * MS, after_s=2 * MS, backward_before_s=3 * MS, backward_after_s=4 * MS)
    )
    outcome = simulate(step, [option_for(each, Recipe("keep")) for each in step.regions], wide(3))
    assert outcome.step_s == pytest.approx(step.plain_s) == pytest.approx(100 * MS)
    assert outcome.forward_s == pytest.approx(33 * MS)
    assert (outcome.stall_forward_s, outcome.stall_backward_s, outcome.moved_bytes) == (0, 0, 0)
    assert outcome.peak_bytes == 1000 * MB + 900 * MB + 100 * MB  # base, saved, the last backward's working memory


def test_a_parcel_that_fits_forward_stalls_backward_alone():
    """50 MB are 5 ms each way at 10 GB/s; no earlier need could hide the copy."""
    step = profile(one_parcel(50))
    outcome = simulate(step, moving(step), wide(1, post_region=(0,)))
    assert outcome.stall_forward_s == 0
    assert outcome.stall_backward_s == pytest.approx(5 * MS)
    assert outcome.step_s == pytest.approx(35 * MS)
    assert outcome.moved_bytes == outcome.host_bytes == 50 * MB


def test_compute_waits_at_the_release_until_a_parcel_has_landed():
    """300 MB are 30 ms: 20 more than forward takes."""
    step = profile(one_parcel(300))
    outcome = simulate(step, moving(step), wide(1, post_region=(299 * MB,)))
    assert outcome.stall_forward_s == pytest.approx(20 * MS)
    assert outcome.forward_s == pytest.approx(30 * MS)


def test_parcels_that_have_not_left_are_used_from_the_device():
    step = profile(one_parcel(300))
    outcome = simulate(step, moving(step), wide(1, post_region=(300 * MB,)))
    assert outcome.step_s == pytest.approx(step.plain_s)
    assert (outcome.moved_bytes, outcome.stall_forward_s, outcome.stall_backward_s) == (0, 0, 0)
    assert outcome.tail_bytes(moving(step)) == [300 * MB]


def test_a_lane_copies_in_order():
    """Two parcels of 20 ms: the second begins after the first, 10 ms into the second region."""
    step = profile(one_parcel(200), one_parcel(200))
    outcome = simulate(step, moving(step), wide(2, post_region=(0,)))
    assert outcome.forward_s == pytest.approx(40 * MS)
    assert outcome.stall_forward_s == pytest.approx(20 * MS)


def test_latency_is_paid_per_copy():
    step = profile(one_parcel(50), link=Link(1e10, 1e10, latency_s=10 * MS, interference=0))
    outcome = simulate(step, moving(step), wide(1, post_region=(0,)))
    assert outcome.forward_s == pytest.approx(15 * MS)
    assert outcome.stall_backward_s == pytest.approx(15 * MS)


def test_copies_slow_concurrent_compute():
    """5 ms of the forward pass are concurrent with a copy."""
    step = profile(one_parcel(50), link=Link(1e10, 1e10, latency_s=0, interference=0.1))
    outcome = simulate(step, moving(step), wide(1, post_region=(0,)))
    assert outcome.forward_s == pytest.approx(10.5 * MS)


def test_the_next_parcels_come_while_the_ones_before_are_used():
    """The last region's parcel is a miss of 5 ms; the first region's parcel is prefetched meanwhile."""
    step = profile(one_parcel(50), one_parcel(50))
    outcome = simulate(step, moving(step), wide(2, post_region=(0,)))
    assert outcome.stall_backward_s == pytest.approx(5 * MS)


def test_without_a_window_nothing_is_prefetched():
    step = profile(one_parcel(50), one_parcel(50))
    outcome = simulate(step, moving(step), wide(2, post_region=(0,), prefetch=(0, 0)))
    assert outcome.stall_backward_s == pytest.approx(10 * MS)


def test_a_recompute_batch_is_fetched_when_backward_begins():
    """An input of 20 MB and two outputs of 50 and 100 MB: 17 ms, then 3 ms of recomputation."""
    step = profile(region())
    option = option_for(step.regions[0], Recipe("selective", sites=(0, 1)))
    outcome = simulate(step, [option], wide(1, post_region=(0,)))
    assert option.is_recompute_batch
    assert outcome.stall_backward_s == pytest.approx(17 * MS)
    assert outcome.step_s - outcome.forward_s == pytest.approx((17 + 3 + 20) * MS)


def test_the_memory_curve_has_a_point_per_region_and_way():
    step = profile(*layers(2), outside=outside(kept_bytes=7 * MB, peak_bytes=11 * MB))
    outcome = simulate(step, [option_for(each, Recipe("keep")) for each in step.regions], wide(2))
    assert [(moment.what, moment.nbytes // MB) for moment in outcome.curve] == [
        ("layers.0 forward", 1007 + 300 + 100),
        ("layers.1 forward", 1007 + 600 + 100),
        ("after the last region", 1007 + 600 + 11),
        ("layers.1 backward", 1007 + 600 + 100),
        ("layers.0 backward", 1007 + 300 + 100),
    ]
    assert [moment.seconds for moment in outcome.curve] == sorted(moment.seconds for moment in outcome.curve)


def test_a_small_region_leaves_room_for_the_large_region_before():
    """Windows respect all regions that a waiting parcel passes, not only the current region."""
    step = profile(
        one_parcel(50, name="layers.0"),
        region(
            "layers.1", saved_tensors=(), inputs=(), expensive_ops=(), recompute_s=0.0, backward_work_bytes=500 * MB
        ),
        one_parcel(50, name="layers.2"),
    )
    options = moving(step)
    budget = least_budget(step, options) + 10 * MB
    outcome = simulate(step, options, windows_within(step, options, budget))
    assert outcome.peak_bytes <= budget


def skipping(held_for, **changes):
    """The caller holds the first region's input; the third region needs 500 MB in forward."""
    held = SavedTensor(0, 50 * MB, 0.0, held_for=held_for)
    first = region(saved_tensors=(held,), inputs=(held,), backward_work_bytes=0, forward_work_bytes=0, **changes)
    large = region("layers.2", saved_tensors=(), inputs=(), forward_work_bytes=500 * MB, backward_work_bytes=0)
    return profile(first, one_parcel(20, name="layers.1"), large)


@pytest.mark.parametrize("recipe", [Recipe("offload"), Recipe("recompute")])
def test_what_the_caller_holds_stays_though_it_has_left(recipe):
    freed, held = ([option_for(each, recipe) for each in skipping(k).regions] for k in (1, 2))
    assert least_budget(skipping(2), held) == least_budget(skipping(1), freed) + 50 * MB
    kept = [option_for(each, Recipe("keep")) for each in skipping(2).regions[:1]]
    assert least_budget(skipping(2), kept + held[1:]) == least_budget(skipping(2), held)


@pytest.mark.parametrize("free", [0, 10, 20, 30])
def test_what_the_caller_holds_may_wait_to_leave_without_taking_more(free):
    step = skipping(2)
    options = moving(step)
    budget = least_budget(step, options) + free * MB
    window = windows_within(step, options, budget).forward[2]
    # The newest 20 MB are of the second region: behind them the held 50 MB wait for nothing.
    assert window == (free + (50 if free >= 20 else 0)) * MB
    outcome = simulate(step, options, windows_within(step, options, budget))
    assert outcome.peak_bytes <= budget


def test_an_input_that_the_region_does_not_save_is_held_as_well():
    step = skipping(2)
    first = dataclasses.replace(step.regions[0], saved_tensors=())
    step = dataclasses.replace(step, regions=(first, *step.regions[1:]))
    for recipe in (Recipe("keep"), Recipe("offload"), Recipe("recompute")):
        options = [option_for(first, recipe), *moving(step)[1:]]
        assert least_budget(step, options) == least_budget(skipping(2), moving(skipping(2)))


def test_a_region_called_twice_has_one_window():
    step = profile(*(region("shared") for _ in range(3)))
    options = moving(step)
    windows = windows_within(step, options, 3000 * MB)
    assert len(set(windows.forward)) == len(set(windows.prefetch)) == 1


@given(st.data())
@settings(max_examples=300)
def test_the_peak_stays_within_the_budget(data):
    step = data.draw(profiles(most_regions=5))
    options = [data.draw(st.sampled_from(options_of(each))) for each in step.regions]
    least = least_budget(step, options)
    budget = least + data.draw(st.integers(0, 300)) * MB
    assert simulate(step, options, windows_within(step, options, budget)).peak_bytes <= budget
    assert windows_within(step, options, least) is not None
    assert windows_within(step, options, least - 1) is None


@given(st.data())
@settings(max_examples=300)
def test_more_memory_never_costs_time(data):
    step = data.draw(profiles(most_regions=5))
    options = [data.draw(st.sampled_from(options_of(each))) for each in step.regions]
    small = least_budget(step, options) + data.draw(st.integers(0, 200)) * MB
    large = small + data.draw(st.integers(0, 100)) * MB
    before, after = (simulate(step, options, windows_within(step, options, budget)) for budget in (small, large))
    # Copies for one graph may run beside compute for another, and cost compute, where narrow windows kept them apart.
    moved_bytes = sum(moved.nbytes for option in options for moved in option.moved)
    copies_s = moved_bytes / step.link.out + moved_bytes / step.link.back
    more_s = step.link.interference * copies_s if step.graphs > 1 else 0.0
    assert after.step_s <= before.step_s + more_s + 1e-9


@given(st.data())
@settings(max_examples=300)
def test_only_steps_that_take_longer_are_abandoned(data):
    step = data.draw(profiles(most_regions=5))
    share, rate = data.draw(st.sampled_from([0.0, 0.013, 0.3, 0.9])), data.draw(st.sampled_from([1e9, 1e10]))
    step = dataclasses.replace(step, link=dataclasses.replace(step.link, interference=share, out=rate))
    options = [data.draw(st.sampled_from(options_of(each))) for each in step.regions]
    windows = windows_within(step, options, least_budget(step, options) + data.draw(st.integers(0, 200)) * MB)
    outcome = simulate(step, options, windows)
    assert simulate_below(step, options, windows, outcome.step_s) == outcome
    assert simulate_below(step, options, windows, outcome.step_s * data.draw(st.floats(0.0, 1.0))) in (None, outcome)
    assert simulate_below(step, options, windows, 0.99 * step.plain_s) is None


@given(st.data())
@settings(max_examples=100)
def test_a_step_is_never_faster_than_the_sum_of_its_parts(data):
    step = data.draw(profiles(most_regions=5))
    options = [data.draw(st.sampled_from(options_of(each))) for each in step.regions]
    budget = least_budget(step, options) + data.draw(st.integers(0, 200)) * MB
    outcome = simulate(step, options, windows_within(step, options, budget))
    stalls = outcome.stall_forward_s + outcome.stall_backward_s
    assert outcome.step_s >= step.plain_s + sum(option.recompute_s for option in options) + stalls - 1e-9
    assert sum(outcome.tail_bytes(options)) + outcome.moved_bytes == sum(option.moved_bytes for option in options)


# -- several graphs in flight ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["keep", "offload"])
def test_other_graphs_in_flight_keep_as_much_each(recipe):
    measured = profile(*layers(4), outside=outside(kept_bytes=30_000_000, held_bytes=7_000_000))
    options = [option_for(region, Recipe(recipe)) for region in measured.regions]
    one, three = measured, dataclasses.replace(measured, graphs=3)
    others = 2 * (sum(option.kept_bytes for option in options) + 30_000_000 + 7_000_000)
    assert least_budget(three, options) == least_budget(one, options) + others
    budget = least_budget(one, options) + 50_000_000
    together = simulate(three, options, windows_within(three, options, budget + others))
    assert together.peak_bytes <= budget + others
    assert together.host_bytes <= 3 * sum(option.moved_bytes for option in options)


def test_parcels_of_a_graph_leave_while_others_run_backward():
    """Forward alone is too short for its parcels; with the backward of another graph there is time."""
    step = profile(*layers(4), link=Link(25e9, 25e9, 0.0, 0.0))
    options = [option_for(region, Recipe("offload")) for region in step.regions]
    assert simulate(step, options, equal_windows(step, 0, 0)).stall_forward_s > 0
    turns = dataclasses.replace(step, graphs=2, passes=(0, *(n for at in range(1, 20) for n in (at, at - 1)), 19))
    found = simulate(turns, options, equal_windows(turns, 300 * MB, 300 * MB))
    assert found.moved_bytes > 0.7 * sum(option.moved_bytes for option in options)
    assert found.step_s == pytest.approx(step.plain_s, rel=0.01)
    at_once = dataclasses.replace(step, graphs=20, passes=(*range(20), *range(20)))
    assert simulate(at_once, options, equal_windows(at_once, 300 * MB, 300 * MB)).stall_forward_s > 0


def test_a_graph_that_is_needed_at_once_stays():
    """As on the last rank of a pipeline, besides the graphs of another stage."""
    step = profile(*layers(2), graphs=2, passes=(0, 1, 1, 2, 2, 0), link=Link(1e12, 1e12, 0.0, 0.0))
    options = [option_for(region, Recipe("offload")) for region in step.regions]
    sent = sum(option.moved_bytes for option in options)
    found = simulate(step, options, equal_windows(step, sent, sent))
    assert 3 * found.moved_bytes == sent  # the first graph leaves, the others are needed first
    assert found.step_s == pytest.approx(step.plain_s, rel=0.02)


def test_an_unknown_order_takes_turns():
    assert [profile(*layers(1), graphs=n).order for n in (1, 2)] == [(0, 0), (0, 1, 0, 2, 1, 3, 2, 3)]


def test_a_pass_is_a_forward_or_a_backward():
    with pytest.raises(PlanError, match=r"passes=\(0, 1, 0\): expected each number from 0 on twice"):
        profile(*layers(2), graphs=2, passes=(0, 1, 0))


@given(st.permutations([0, 0, 1, 1, 2, 2, 3, 3]))
def test_shares_of_time_between_passes(passes):
    backwards, forwards = shares_between(passes)
    assert 0 <= backwards < 1
    assert 0 <= forwards < 1
    assert (backwards == 0) == (len(set(passes[:4])) == 4)


def test_a_profile_has_at_least_one_graph():
    with pytest.raises(PlanError, match="graphs=0"):
        dataclasses.replace(profile(*layers(2)), graphs=0)


def test_a_budget_that_is_too_small_for_several_graphs_names_them():
    measured = dataclasses.replace(profile(*layers(4), outside=outside(held_bytes=900_000_000)), graphs=2)
    with pytest.raises(PlanError, match="kept by 1 other graphs in flight"):
        Solver(measured).solve(10**9)
