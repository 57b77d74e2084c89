"""Profiles of batch sizes between and beyond the measured ones."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.generated import profiles
from planner.workloads import MS, layers, outside, profile, region

from ebbtide import PlanError
from ebbtide._profiling.batch_fit import at_tokens, check_comparable, unlike
from ebbtide._profiling.profile import ExpensiveOp, Host, HostTime, SavedTensor

ITEM = 1000  # tokens of a sample


def step(batch, **changes):
    """A step with a fixed and a proportional part in every number: a table beside an activation, a start of 2 ms."""
    table, shared = SavedTensor(0, 5_000, 0.0), SavedTensor(3, 0, 0.0, shares=1)
    one = region(
        forward_s=(2 + batch) * MS,
        backward_s=(3 + 2 * batch) * MS,
        recompute_s=(1 + batch) * MS,
        saved_tensors=(table, SavedTensor(1, 700 * batch, batch * MS), SavedTensor(2, 40 + 3 * batch, 0.0), shared),
        inputs=(SavedTensor(0, 20 * batch, 0.0),),
        expensive_ops=(ExpensiveOp(0, 9 * batch, batch * MS, batch * MS, "aten::mm"),),
        not_movable_bytes=11 + batch,
        forward_work_bytes=1_000 + 100 * batch,
        backward_work_bytes=8_000 + 900 * batch,
        grad_bytes=77,
    )
    values = {
        "outside": outside(before_s=MS, after_s=batch * MS, kept_bytes=64 * batch, peak_bytes=9 + 5 * batch),
        "base_bytes": 600 + 4 * batch,
        "base": {"parameters": 600, "other": 4 * batch},
        "tokens": ITEM * batch,
    }
    return profile(one, **{**values, **changes})


def rounded(value):
    """All fields, seconds without their last digits."""
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    if dataclasses.is_dataclass(value):
        return tuple(rounded(getattr(value, field.name)) for field in dataclasses.fields(value))
    return round(value, 9) if isinstance(value, float) else value


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9, 500])
@pytest.mark.parametrize("measured", [(2, 4), (3, 9), (1, 2, 8)])
def test_fixed_and_proportional_parts_are_told_apart(measured, batch):
    fitted, expected = at_tokens([step(each) for each in measured], ITEM * batch), step(batch)
    assert rounded((fitted.regions, fitted.outside)) == rounded((expected.regions, expected.outside))
    assert (fitted.base_bytes, fitted.base, fitted.tokens) == (expected.base_bytes, expected.base, expected.tokens)


def test_one_profile_is_scaled_in_proportion():
    assert at_tokens([step(4)], 2 * 4 * ITEM) == step(4).scaled(2 * 4 * ITEM)
    assert at_tokens([step(4)], 2 * 4 * ITEM).regions[0].saved_tensors[0].nbytes == 10_000  # a table, taken to grow


def test_between_three_sizes_the_nearest_two_count():
    sizes = [step(2), step(4), step(8, outside=outside(before_s=101 * MS))]
    assert at_tokens(sizes, 3 * ITEM).outside.before_s == pytest.approx(MS)
    assert at_tokens(sizes, 6 * ITEM).outside.before_s == pytest.approx(51 * MS)
    assert at_tokens(sizes, 4 * ITEM).outside.before_s == pytest.approx(MS)


@pytest.mark.parametrize(("at_4", "batch", "expected"), [(9, 16, 9), (9, 1, 10), (90, 16, 360), (90, 1, 5)])
def test_noise_is_not_carried_far(at_4, batch, expected):
    """10 bytes at 2: at 4 fewer, or more than in proportion."""
    low, high = step(2, outside=outside(kept_bytes=10)), step(4, outside=outside(kept_bytes=at_4))
    assert at_tokens([low, high], batch * ITEM).outside.kept_bytes == expected


def test_between_the_measured_sizes_a_number_may_shrink():
    low, high = step(2, outside=outside(kept_bytes=10)), step(4, outside=outside(kept_bytes=6))
    assert at_tokens([low, high], 3 * ITEM).outside.kept_bytes == 8


@given(profiles(), st.sampled_from([1, 3, 500, 999, 1001, 10**6]))
def test_no_memory_vanishes_at_any_size(one, tokens):
    """As of one profile, scaled: 0 bytes are shared memory."""
    other = dataclasses.replace(one.scaled(3000), tokens=2000)
    fitted = at_tokens([one, other], tokens)
    for before, after in zip(one.regions, fitted.regions, strict=True):
        for name in ("saved_tensors", "inputs"):
            assert [t.nbytes > 0 for t in getattr(before, name)] == [t.nbytes > 0 for t in getattr(after, name)]


def test_a_tensor_of_a_few_bytes_does_not_become_shared_memory():
    assert at_tokens([step(2), step(4)], 1).regions[0].inputs[0].nbytes == 1


def test_memory_that_is_shared_at_one_size_alone_has_no_line():
    high = step(4)
    shared = dataclasses.replace(high.regions[0], inputs=(SavedTensor(0, 0, 0.0),))
    high = dataclasses.replace(high, regions=(shared,))
    assert unlike([step(2), high]) == ["layers.0"]
    assert at_tokens([step(2), high], 3 * ITEM).regions[0].inputs[0].nbytes == 60


def test_a_region_with_other_tensors_is_scaled_from_the_nearest():
    high = step(4)
    fewer = dataclasses.replace(high.regions[0], saved_tensors=high.regions[0].saved_tensors[:1])
    high = dataclasses.replace(high, regions=(fewer,))
    assert unlike([step(2), step(4)]) == []
    assert unlike([step(2), high]) == ["layers.0"]
    assert at_tokens([step(2), high], 8 * ITEM).regions == high.scaled(8 * ITEM).regions
    assert at_tokens([step(2), high], ITEM).regions == step(2).scaled(ITEM).regions
    other_points = dataclasses.replace(step(4), outside=outside(tensor_index=9))
    assert unlike([step(2), other_points]) == ["the part outside of the regions"]


def test_the_time_of_the_host_is_of_the_nearest():
    def host(seconds):
        return Host((HostTime(seconds, 0.0, 0.0, 5),), *[0.0] * 9)

    sizes = [step(2, host=host(3.0)), step(6, host=host(4.0))]
    found = [at_tokens(sizes, batch * ITEM).host.seconds for batch in (1, 3, 5, 60)]
    assert found == [3.0, 3.0, 4.0, 4.0]


def test_what_the_optimizer_holds_is_the_most_of_any_profile():
    low, high = (step(b, base={"parameters": 600, "optimizer": n, "other": b}) for b, n in ((2, 70), (4, 60)))
    fitted = at_tokens([low, high], 8 * ITEM)
    assert fitted.base == {"parameters": 600, "optimizer": 70, "other": 8}
    assert fitted.base_bytes == 678


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made_for": {"model": "large", "device": "none"}}, "made for model 'large', not 'small'"),
        ({"regions": layers(2)}, "of other regions"),
        ({"graphs": 2}, "of another order of forwards and backwards"),
        ({"base": {"parameters": 600, "optimizer": 1}}, "measured with optimizer in memory, the other without"),
    ],
)
def test_profiles_that_differ_in_more_than_the_batch_are_refused(changes, message):
    check_comparable([step(2), step(4)])
    with pytest.raises(PlanError, match=message):
        check_comparable([step(2), dataclasses.replace(step(4), **changes)])
