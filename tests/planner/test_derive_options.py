"""Options that derive saved tensors: what they free, and what they cost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.generated import regions
from planner.workloads import MS, region

from ebbtide._planner.options import describe, launch_overhead_s, option_for, options_of
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Host, HostTime, SavedTensor

MB = 1_000_000
EVERYTHING = Recipe("keep", derive=True)


def derived(index, nbytes, derive_s=1 * MS, *, of=(), work=0, ops=1, **changes):
    fields = {"derive_s": derive_s, "derive_ops": ops, "derive_work_bytes": work, "derived_from": of}
    return SavedTensor(index, nbytes, index * MS, **fields, **changes)


TENSORS = (
    SavedTensor(0, 100 * MB, 0.0),
    derived(1, 40 * MB, 0.1 * MS, of=(0,)),
    derived(2, 60 * MB, 0.6 * MS, of=(0, 1), ops=3),
    SavedTensor(3, 0, 3 * MS, shares=1),
)
REGION = region(saved_tensors=TENSORS, not_movable_bytes=5 * MB, after_bytes=7 * MB)


@pytest.fixture
def kept():
    return option_for(REGION, Recipe("keep"))


@pytest.mark.parametrize(
    ("derive", "chosen"), [(True, (1, 2)), ((1, 2, 3), (1, 2)), ((1,), (1,)), ((2,), (2,)), ((0, 3), ()), ((), ())]
)
def test_kept_and_freed_bytes_add_up(derive, chosen, kept):
    """The first tensor cannot be derived, and the last has the memory of another."""
    option = option_for(REGION, Recipe("keep", derive=derive))
    freed = [tensor for tensor in TENSORS if tensor.index in chosen]
    assert option.kept_bytes + sum(tensor.nbytes for tensor in freed) == kept.kept_bytes
    assert option.recompute_s == pytest.approx(sum(tensor.derive_s for tensor in freed))
    assert (option.derived, option.derived_ops) == (len(freed), sum(tensor.derive_ops - 1 for tensor in freed))
    assert option.moved == ()
    assert not option.is_recompute_batch


@pytest.mark.parametrize(
    ("sites", "derive", "moved", "freed"),
    [
        (None, True, [100], [40, 60]),  # a derived tensor does not move
        (None, (2,), [100, 40], [60]),
        ((0, 1), (1,), [100], [40]),
        ((1, 3), (2,), [40], [60]),
        ((0,), (), [100], []),
    ],
)
def test_moved_and_derived_tensors_are_apart(sites, derive, moved, freed, kept):
    option = option_for(REGION, Recipe("offload", sites=sites, derive=derive))
    assert [parcel.nbytes for parcel in option.moved] == [n * MB for n in moved]
    assert option.kept_bytes == kept.kept_bytes - sum(moved + freed) * MB


def test_a_region_is_offered_little_to_all_derived():
    recipes = [option.recipe for option in options_of(REGION, only_moves=True)]
    deriving = [recipe.derive for recipe in recipes if recipe.action == "keep" and recipe.derives]
    assert deriving == [(1, 3), (1, 2, 3)]  # the cheapest by size first, with what shares its memory
    together = [recipe for recipe in recipes if recipe.action == "offload" and recipe.derives]
    assert {recipe.derive for recipe in together} == {(1, 3), (1, 2, 3)}
    assert recipes[0] == Recipe("keep")


def test_tensors_that_cannot_be_derived_give_no_option():
    plain = [replace(tensor, derive_s=0.0) for tensor in TENSORS]
    assert not [each for each in options_of(region(saved_tensors=tuple(plain))) if each.recipe.derives]
    assert not [each for each in options_of(region(saved_tensors=(derived(0, 0),))) if each.recipe.derives]


@pytest.mark.parametrize(
    ("tensors", "early_bytes"),
    [
        ([derived(1, 20), derived(2, 30)], 0),  # of kept tensors
        ([derived(1, 20), derived(2, 30, of=(1,))], 20),
        ([derived(1, 20), derived(2, 30, of=(0, 1))], 20),  # number 0 stays
        ([derived(1, 20), derived(2, 30, of=(1,)), derived(3, 70, of=(2,))], 50),
        ([derived(1, 20), derived(2, 30, of=(1,)), derived(3, 70, of=(1, 2))], 50),  # each counts once
        ([derived(1, 20), derived(2, 30), derived(3, 70, of=(1,))], 20),  # waits for its own reader
        ([derived(1, 20), derived(2, 30, of=(1,)), derived(3, 70)], 20),
    ],
)
def test_operands_that_are_early_take_room_in_backward(tensors, early_bytes):
    """A reader asks for a derived operand before the operand's own reader does."""
    tensors = [replace(tensor, nbytes=tensor.nbytes * MB) for tensor in tensors]
    each = region(saved_tensors=(SavedTensor(0, 10 * MB, 0.0), *tensors))
    apart = replace(each, saved_tensors=tuple(replace(tensor, derived_from=()) for tensor in each.saved_tensors))
    with_operands, without = (option_for(one, EVERYTHING).backward_work_bytes for one in (each, apart))
    assert with_operands - without == early_bytes * MB


@pytest.mark.parametrize("of", [(0,), (0, 1)])
def test_results_in_between_take_room_in_backward(of):
    works = [0, 600 * MB, 700 * MB]
    chains = [(TENSORS[0], derived(1, 40 * MB), derived(2, 60 * MB, of=of, work=work)) for work in works]
    rooms = [option_for(region(saved_tensors=chain), EVERYTHING).backward_work_bytes for chain in chains]
    assert rooms[0] < rooms[1] == rooms[2] - 100 * MB


@pytest.mark.parametrize(("sites", "early_bytes"), [((), 0), ((0,), 100), (None, 100)])
def test_operands_that_moved_are_early_too(sites, early_bytes):
    tensors = (SavedTensor(0, 100 * MB, 0.0), derived(1, 40 * MB, of=(0,)))
    each = region(saved_tensors=tensors)
    apart = replace(each, saved_tensors=(tensors[0], replace(tensors[1], derived_from=())))
    recipe = Recipe("offload", sites=sites, derive=True)
    assert (
        option_for(each, recipe).backward_work_bytes - option_for(apart, recipe).backward_work_bytes == early_bytes * MB
    )


def test_operands_that_stay_take_no_room():
    """A part of a chain is derived: the rest is on the device."""
    chain = (SavedTensor(0, 10 * MB, 0.0), derived(1, 20 * MB, of=(0,)), derived(2, 30 * MB, of=(1,)))
    each = region(saved_tensors=chain)
    last, all_of_it = (option_for(each, Recipe("keep", derive=chosen)) for chosen in ((2,), (1, 2)))
    assert last.backward_work_bytes == all_of_it.backward_work_bytes - 20 * MB


def test_the_host_pays_for_each_derived_tensor():
    times = HostTime(0.0, 0.0, 0.0, ops=100, saved=50)
    nothing = dict.fromkeys(
        ("before_s", "after_s", "backward_before_s", "launch_ahead_s", "steady_launch_ahead_s"), 0.0
    )
    nothing |= dict.fromkeys(("frame_s", "op_s", "saved_output_s", "moved_s"), 0.0)
    host = Host((), **nothing, derived_s=1.0, derived_op_s=0.25, hook_s=0.01)
    costs = [launch_overhead_s(option_for(REGION, recipe), host, times) for recipe in (Recipe("keep"), EVERYTHING)]
    assert costs == pytest.approx([0.0, 2 * 1.0 + 2 * 0.25 + 50 * 0.01])


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (EVERYTHING, "95.37 MiB freed for 0.7 ms of derivation"),
        (Recipe("offload", derive=(2,)), "57.22 MiB freed for 0.6 ms of derivation, the link carries 133.51 MiB more"),
    ],
    ids=str,
)
def test_the_reason_names_bytes_and_milliseconds(recipe, text):
    assert describe(option_for(REGION, recipe), REGION) == text


@st.composite
def deriving_regions(draw):
    drawn = draw(regions("layers.0"))
    tensors = []
    for tensor in drawn.saved_tensors:
        before = [each.index for each in tensors]
        operands = draw(st.sets(st.sampled_from(before))) if before else ()
        fields = {"derived_from": tuple(sorted(operands)), "derive_work_bytes": draw(st.integers(0, 20)) * MB}
        derive_s = draw(st.sampled_from([0.0, 0.1 * MS, 2 * MS]))
        tensors.append(replace(tensor, derive_s=derive_s, derive_ops=draw(st.integers(1, 3)), **fields))
    return replace(drawn, saved_tensors=tuple(tensors))


@given(deriving_regions())
def test_every_option_that_derives_adds_up(each):
    tensors = {tensor.index: tensor for tensor in each.saved_tensors}
    first, *others = options_of(each)
    assert first.recipe == Recipe("keep")
    for option in others:
        again = option_for(each, option.recipe)
        assert again.recompute_s == pytest.approx(option.recompute_s)  # a sum in another order
        assert replace(again, recompute_s=option.recompute_s) == option
        if option.recipe.recomputes:
            assert option.derived == 0
            continue
        chosen = [tensors[index] for index in option.recipe.derive if tensors[index].derive_s > 0]
        freed = [tensor for tensor in chosen if tensor.nbytes > 0]
        assert option.derived == len(freed)
        freed_bytes = sum(tensor.nbytes for tensor in freed) + option.moved_bytes
        assert option.kept_bytes + freed_bytes == first.kept_bytes
        assert option.recompute_s == pytest.approx(sum(tensor.derive_s for tensor in freed))
        assert option.backward_work_bytes >= first.backward_work_bytes


@given(deriving_regions())
def test_all_that_can_be_derived_may_be(each):
    most = option_for(each, EVERYTHING)
    least_kept = min(option.kept_bytes for option in options_of(each) if option.moved == ())
    assert least_kept <= most.kept_bytes
