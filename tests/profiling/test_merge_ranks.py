"""One profile for all ranks: a plan for the merged profile fits every rank."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.generated import profiles
from planner.workloads import MS, layers, outside, profile, region

from ebbtide import PlanError
from ebbtide._control.ranks import agreed_profile
from ebbtide._planner.options import option_for, options_of
from ebbtide._planner.simulate import least_budget
from ebbtide._planner.solve import Solver
from ebbtide._plans import Recipe
from ebbtide._profiling.merge_ranks import merged_by, slowest, structure_of
from ebbtide._profiling.profile import OUTSIDE, ExpensiveOp, Link, Outside, PostRegionPoint, SavedTensor

MB = 1_000_000


@st.composite
def of_two_ranks(draw):
    one = draw(profiles(most_regions=2))
    names = [region.name for region in one.regions]
    others = profiles(most_regions=2).filter(lambda step: [region.name for region in step.regions] == names)
    other = draw(others)
    limits = st.one_of(st.none(), st.integers(0, 9).map(lambda n: n * MB))
    return [
        dataclasses.replace(step, host_limit_bytes=draw(limits), device_bytes=draw(limits), tokens=draw(st.integers(0)))
        for step in (one, other)
    ]


@st.composite
def of_one_model(draw):
    """Equal saved tensors on two ranks, in different sizes, as with different batches."""
    step = draw(profiles(most_regions=2))

    def stretched(row):
        changed = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        for name, value in changed.items():
            if name.endswith("bytes") and value is not None:
                changed[name] = value * draw(st.integers(1, 3))
            elif isinstance(value, tuple):
                changed[name] = tuple(stretched(inner) if dataclasses.is_dataclass(inner) else inner for inner in value)
        return dataclasses.replace(row, **changed)

    def rank():
        return dataclasses.replace(step, regions=tuple(map(stretched, step.regions)), outside=stretched(step.outside))

    return [rank(), rank()]


def figures(row):
    """Bytes and seconds of a row, and of the rows in it, by where they are."""
    found = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(row, Outside) and isinstance(value, tuple):
            found["peak_bytes",] = row.peak_bytes
        elif isinstance(value, tuple):
            for inner in filter(dataclasses.is_dataclass, value):
                found.update({(field.name, inner.index, *key): each for key, each in figures(inner).items()})
        elif isinstance(value, int | float) and not field.name.startswith(
            "downstream_"
        ):  # known on all ranks or unknown
            found[field.name,] = value
    return found


def all_figures(step):
    found = {("base_bytes",): step.base_bytes, ("tokens",): step.tokens}
    for number, row in enumerate([step.outside, *step.regions]):
        found.update({(number, *key): value for key, value in figures(row).items()})
    return found


@given(profiles(shared_names=True))
def test_equal_profiles_merge_to_an_equal_profile(step):
    assert agreed_profile([step]) == step
    assert agreed_profile([step, step, step]) == step


UNKNOWN_TO_SOME = ("recompute_s", "moved_work_bytes", "read_at", "read_bytes")


@given(of_two_ranks())
def test_no_rank_has_a_larger_figure(steps):
    agreed = all_figures(agreed_profile(steps))
    for step in steps:
        own = {key: value for key, value in all_figures(step).items() if key[-1] not in UNKNOWN_TO_SOME}
        assert not {key: value for key, value in own.items() if agreed[key] < value}


@given(of_two_ranks())
def test_a_region_that_one_rank_never_recomputes_is_recomputed_by_none(steps):
    for k, agreed in enumerate(agreed_profile(steps).regions):
        times = [step.regions[k].recompute_s for step in steps]
        assert agreed.recompute_s == (max(times) if min(times) > 0 else 0)


@given(of_two_ranks())
def test_the_order_of_ranks_does_not_matter(steps):
    assert all_figures(agreed_profile(steps)) == all_figures(agreed_profile(steps[::-1]))


@given(of_two_ranks())
def test_no_rank_has_less_host_or_device_memory_or_a_slower_link(steps):
    agreed = agreed_profile(steps)
    for step in steps:
        for name in ("host_limit_bytes", "device_bytes"):
            limit = getattr(step, name)
            assert limit is None or getattr(agreed, name) <= limit
        for name in ("out", "back"):
            assert getattr(agreed.link, name) <= getattr(step.link, name)
        assert agreed.link.latency_s >= step.link.latency_s
        assert agreed.link.interference >= step.link.interference
        assert sum(agreed.base.values()) <= max(sum(step.base.values()) for step in steps)
    assert any(agreed.base == step.base and agreed.base_bytes == step.base_bytes for step in steps)
    assert agreed.host_limit_bytes is not None or all(step.host_limit_bytes is None for step in steps)


@given(of_one_model(), st.data())
def test_no_rank_needs_a_larger_budget(steps, data):
    agreed = agreed_profile(steps)
    recipes = [data.draw(st.sampled_from(options_of(region))).recipe for region in agreed.regions]
    needed = least_budget(agreed, chosen(agreed, recipes))
    for step in steps:
        assert least_budget(step, chosen(step, recipes)) <= needed


def reduced(steps):
    """What each rank has after a reduction of the numbers of all ranks."""
    sent, base_bytes = [], max(step.base_bytes for step in steps)

    def only_sends(numbers):
        sent.append(numbers)
        return [0.0 if math.isinf(number) else number for number in numbers]

    for step in steps:
        merged_by(only_sends, step, base_bytes)
    largest = [max(numbers) for numbers in zip(*sent, strict=True)]
    return [merged_by(lambda _: largest, step, base_bytes) for step in steps]


@given(of_one_model(), st.integers(0, 9), st.integers(0, 9))
def test_profiles_of_one_structure_merge_by_a_reduction_of_their_numbers(steps, more, faster):
    link = steps[0].link.times(1 + faster, 1.0)
    steps = [dataclasses.replace(steps[0], base_bytes=steps[0].base_bytes + more, link=link), steps[1]]
    assert structure_of(steps[0]) == structure_of(steps[1])
    assert reduced(steps) == [slowest(steps)] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"saved_tensors": (SavedTensor(0, 10, 0.0),)},
        {"recompute_s": 0.0},
        {"saved_tensors": tuple(dataclasses.replace(each, read_at=1) for each in region().saved_tensors)},
        {"moved_work_bytes": 7},
        {"expensive_ops": (ExpensiveOp(0, 7, 0.0, 0.0, "aten::mm", downstream=(0,)),)},
        {"name": "another"},
    ],
)
def test_profiles_that_differ_in_more_than_numbers_have_another_structure(changes):
    one = region()
    assert structure_of(profile(one)) != structure_of(profile(dataclasses.replace(one, **changes)))
    assert structure_of(profile(one)) == structure_of(profile(one, base_bytes=7, base={"parameters": 9}))


def chosen(step, recipes):
    return [option_for(region, recipe) for region, recipe in zip(step.regions, recipes, strict=True)]


def test_a_plan_for_all_fits_the_rank_with_the_least_host_memory():
    step = profile(*layers(4))
    tight = dataclasses.replace(step, host_limit_bytes=150 * MB)
    budget = Solver(step).smallest_budget() + 400 * MB
    assert Solver(step).solve(budget, only_moves=True).predicted.host_bytes > 150 * MB
    for ranks in ([step, tight], [tight, step]):
        predicted = Solver(agreed_profile(ranks)).solve(budget).predicted
        assert predicted.host_bytes <= 150 * MB


def test_rows_of_all_ranks_are_matched_by_index():
    one = region(
        saved_tensors=(SavedTensor(0, 10, 1 * MS), SavedTensor(2, 30, 2 * MS)),
        inputs=(SavedTensor(0, 5, 0.0),),
        expensive_ops=(ExpensiveOp(0, 7, 1 * MS, 3 * MS, "aten::mm"), ExpensiveOp(1, 8, 2 * MS, 1 * MS, "aten::mm")),
    )
    other = region(
        saved_tensors=(SavedTensor(0, 20, 0.5 * MS), SavedTensor(1, 40, 1 * MS), SavedTensor(2, 0, 3 * MS, shares=1)),
        inputs=(SavedTensor(0, 4, 0.0), SavedTensor(1, 9, 0.0)),
        expensive_ops=(ExpensiveOp(0, 6, 2 * MS, 2 * MS, "aten::bmm"),),
    )
    agreed = agreed_profile([profile(one), profile(other)]).regions[0]
    assert agreed.saved_tensors == (
        SavedTensor(0, 20, 1 * MS),
        SavedTensor(1, 40, 1 * MS),
        SavedTensor(2, 30, 3 * MS, shares=1),
    )
    assert agreed.inputs == (SavedTensor(0, 5, 0.0), SavedTensor(1, 9, 0.0))
    assert agreed.expensive_ops == (
        ExpensiveOp(0, 7, 2 * MS, 3 * MS, "aten::mm"),
        ExpensiveOp(1, 8, 2 * MS, 1 * MS, "aten::mm"),
    )


def test_memory_in_use_outside_on_a_single_rank_may_move():
    stays, moves = (
        region(saved_tensors=(tensor,)) for tensor in (SavedTensor(0, 0, 0.0, shares=OUTSIDE), SavedTensor(0, 20, 0.0))
    )
    assert agreed_profile([profile(stays), profile(stays)]).regions[0].saved_tensors == stays.saved_tensors
    for ranks in ([stays, moves], [moves, stays]):
        assert agreed_profile(list(map(profile, ranks))).regions[0].saved_tensors == moves.saved_tensors


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        (
            (PostRegionPoint(-1, 0.0, 5), PostRegionPoint(3, 2 * MS, 9)),
            (
                PostRegionPoint(-1, 0.0, 6),
                PostRegionPoint(1, 1 * MS, 7),
                PostRegionPoint(3, 1 * MS, 1),
                PostRegionPoint(4, 2 * MS, 8),
            ),
            (PostRegionPoint(-1, 0.0, 7), PostRegionPoint(3, 2 * MS, 9)),
        ),
        (
            (PostRegionPoint(-1, 0.0, 5), PostRegionPoint(3, 2 * MS, 9)),
            (PostRegionPoint(-1, 0.0, 6),),
            (PostRegionPoint(-1, 0.0, 9),),
        ),
        ((PostRegionPoint(3, 2 * MS, 9),), (), (PostRegionPoint(-1, 0.0, 9),)),
    ],
)
def test_places_after_the_last_region_are_those_of_all_ranks(one, other, agreed):
    """Parcels leave at common points only, and peaks in between count at the common point before."""
    steps = [profile(*layers(1), outside=outside(post_region_points=points)) for points in (one, other)]
    assert (
        agreed_profile(steps).outside.post_region_points
        == agreed_profile(steps[::-1]).outside.post_region_points
        == agreed
    )


def test_short_lived_memory_adds_to_saved_tensors_of_another_rank():
    """A move of all saved tensors frees no more than the first rank saves."""
    works = region(saved_tensors=(SavedTensor(0, 100, 0.0),), backward_work_bytes=400)
    saves = region(saved_tensors=(SavedTensor(0, 300, 0.0),), backward_work_bytes=400)
    agreed = agreed_profile([profile(works), profile(saves)]).regions[0]
    assert agreed.backward_work_bytes == 600


def test_the_link_is_the_slowest_in_every_respect():
    one = Link(1e10, 4e10, latency_s=1e-5, interference=0.01)
    other = Link(2e10, 2e10, latency_s=2e-5, interference=0.0)
    agreed = agreed_profile([profile(*layers(1), link=one), profile(*layers(1), link=other)])
    assert agreed.link == Link(1e10, 2e10, latency_s=2e-5, interference=0.01)


def test_a_profile_of_other_regions_is_refused():
    with pytest.raises(PlanError, match="different regions"):
        agreed_profile([profile(*layers(2)), profile(*layers(1))])


def test_figures_missing_on_a_rank_are_unknown():
    def read(*reads):
        rows = zip(region().saved_tensors, reads, strict=True)
        tensors = tuple(dataclasses.replace(each, read_at=place, read_bytes=nbytes) for each, (place, nbytes) in rows)
        return region(saved_tensors=tensors, moved_work_bytes=max(nbytes for _, nbytes in reads))

    def agreed(*ranks):
        return agreed_profile([profile(each) for each in ranks]).regions[0]

    seen, other = read((3, 250), (2, 10), (1, 20)), read((3, 240), (2, 30), (1, 10))
    assert agreed(seen, region()) == agreed(region(), seen) == region()
    assert agreed(seen, other) == read((3, 250), (2, 30), (1, 20))
    swapped = read((2, 240), (3, 30), (1, 10))
    assert agreed(seen, swapped) == region(moved_work_bytes=250)
    assert agreed(seen, read((2, 260), (0, 0), (1, 10))) == region(moved_work_bytes=260)


@given(of_one_model())
def test_no_rank_needs_more_than_the_merged_regions(steps):
    """Whatever moves: bytes that stay and working memory together."""
    for ranks in zip(*(step.regions for step in [*steps, agreed_profile(steps)]), strict=True):
        for sites in ((), (0,), (1, 2), None):
            recipe = Recipe("offload", sites=sites)
            *own, merged = (option_for(each, recipe) for each in ranks)
            assert all(_most(each) <= _most(merged) for each in own)


def _most(option):
    return option.kept_bytes + option.backward_work_bytes


def test_short_lived_memory_is_of_each_rank_whatever_is_used():
    one, other = region(unused_bytes=50_000_000), region(backward_work_bytes=420_000_000)
    for ranks in ([one, other], [other, one]):
        merged = agreed_profile([profile(each) for each in ranks]).regions[0]
        assert merged.short_lived_bytes == 150_000_000


@pytest.mark.parametrize("changes", [{"downstream": ()}, {"downstream": (0, 1)}, {"users": (1,)}])
def test_downstream_tensors_are_known_if_equal_on_all_ranks(changes):
    op = ExpensiveOp(0, 7, 1 * MS, 3 * MS, "aten::mm", downstream=(0,), downstream_s=1 * MS, downstream_ops=4)
    mine, others = (profile(region(expensive_ops=(row,))) for row in (op, dataclasses.replace(op, **changes)))
    assert agreed_profile([mine, mine]).regions[0].expensive_ops == (op,)
    assert agreed_profile([mine, others]).regions[0].expensive_ops == (ExpensiveOp(0, 7, 1 * MS, 3 * MS, "aten::mm"),)
    assert agreed_profile([others, mine]).regions[0].expensive_ops == (ExpensiveOp(0, 7, 1 * MS, 3 * MS, "aten::mm"),)
