"""Profile values that are more than a difference of two event times."""

from types import SimpleNamespace

import pytest

from ebbtide._profiling.build import _MemoryCurve, _slowdown
from ebbtide._profiling.profile import SavedTensor
from ebbtide._profiling.recorder import RegionRecord, SeenTensor, StepEvent
from ebbtide._profiling.recorder import StepEventKind as Kind
from ebbtide._profiling.region_times import RegionTimes
from ebbtide._types import Memory


@pytest.mark.parametrize(
    ("recompute_s", "detailed_s", "expected"),
    [
        ([0.011, 0.011], [0.010, 0.010], 1.1),  # the device saved power in the detailed step
        ([0.010, 0.010], [0.013, 0.013], 1.0),  # recording took time: no correction
        ([0.0, 0.0], [0.0, 0.0], 1.0),  # no recomputation
    ],
)
def test_expensive_operators_are_scaled_to_the_timed_step(recompute_s, detailed_s, expected):
    step = _slowdown(SimpleNamespace(recompute_s=recompute_s), SimpleNamespace(recompute_s=detailed_s))
    assert step == pytest.approx(expected)


def events_of(events):
    return [StepEvent(kind, region, 0, Memory(now, peak), tensor=tensor) for kind, region, now, peak, tensor in events]


def curve_of(events):
    return _MemoryCurve(recorder_of(events_of(events)), ("a", "b"), 0)


def times_of(events, names):
    """Compute passes event k at 2**k: a difference identifies two events."""
    made = [StepEvent(kind, region, 2**k, Memory(0, 0)) for k, (kind, region) in enumerate(events)]
    return RegionTimes(made, names, lambda start, end: end.event - start.event)


def recorder_of(events, records=(), outside=(), waiting_bytes=0, freed_common_bytes=0):
    device = SimpleNamespace(seconds_between=lambda start, end: 0.0)
    return SimpleNamespace(
        events=events,
        records=list(records),
        outside=list(outside),
        waiting_bytes=waiting_bytes,
        freed_common_bytes=freed_common_bytes,
        device=device,
    )


def read_work(events, saves, begin_bytes=50):
    return curve_of(events).read_work(0, saves, begin_bytes)


FORWARD = [
    (Kind.STEP_BEGAN, "", 0, 0, -1),
    (Kind.REGION_ENTERED, "a", 0, 0, -1),
    (Kind.REGION_LEFT, "a", 0, 0, -1),
    (Kind.FORWARD_ENDED, "", 0, 0, -1),
    (Kind.RECOMPUTE_BEGAN, "a", 1000, 1000, -1),
    (Kind.RECOMPUTE_ENDED, "a", 1500, 1900, -1),  # peak of the recomputation
]
SAVES = (SavedTensor(0, 400, 0.0), SavedTensor(1, 100, 0.0), SavedTensor(2, 0, 0.0, shares=0))
END = None


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        # Number 1 of 100 is read first, which counts from the begin, and 0 of 400 is not there until its read. With
        # 50 that were there before.
        ([(1500, 1520, 1), (1500, 1700, 2), (1400, 1450, 0), (1000, 1650, END)], {1: 700 - 400 + 50, 0: 650 + 50}),
        ([(1500, 1520, 1), (1500, 1700, 2), (1400, 1450, 0), (1000, 1400, END)], {1: 700 - 400 + 50, 0: 450 + 50}),
        ([(1500, 1520, 0), (1500, 1700, 2), (1400, 1450, 1), (1000, 1400, END)], {0: 700 - 100 + 50, 1: 400 + 50}),
        ([(1500, 1520, 1), (1000, 1500, END)], {1: 520 + 50}),  # what nobody asks for is no part of it
        ([(1000, 1500, END)], {}),
    ],
)
def test_working_memory_of_backward_excludes_tensors_read_later(backward, expected):
    asked = [(Kind.TENSOR_READ, "a", now, peak, save) for now, peak, save in backward[:-1]]
    now, peak, _ = backward[-1]
    found = read_work([*FORWARD, *asked, (Kind.STEP_ENDED, "", now, peak, -1)], SAVES)
    assert list(found.items()) == list(expected.items())  # in the order of reads


def test_reads_of_another_region_are_ignored():
    """As by a hook that looks at a node of a region in front."""
    events = [
        *FORWARD,
        (Kind.TENSOR_READ, "b", 1500, 1520, 0),
        (Kind.TENSOR_READ, "a", 1500, 1520, 1),
        (Kind.TENSOR_READ, "a", 1500, 1700, 0),
        (Kind.TENSOR_READ, "b", 1500, 1520, 7),
        (Kind.STEP_ENDED, "", 1000, 1400, -1),
    ]
    assert read_work(events, SAVES) == {1: 700 - 400 + 50, 0: 520 + 50}


def test_unused_tensors_are_told_apart():
    """The third shares the memory of the first, and is the only read of the memory."""
    ended = (Kind.STEP_ENDED, "", 1000, 1400, -1)
    assert curve_of([*FORWARD, (Kind.TENSOR_READ, "a", 1500, 1520, 2), ended]).unused(0, SAVES) == 100
    assert curve_of([*FORWARD, (Kind.TENSOR_READ, "a", 1500, 1520, 1), ended]).unused(0, SAVES) == 400
    assert curve_of([*FORWARD, ended]).unused(0, SAVES) == 0


def test_a_backward_leaves_the_memory_that_the_next_backward_begins_with():
    """Inputs of 100 and 50 are allocated when a recomputation begins; and a gradient of 700 stays."""
    events = [
        *FORWARD[:3],
        (Kind.REGION_ENTERED, "b", 0, 0, -1),
        (Kind.REGION_LEFT, "b", 0, 0, -1),
        (Kind.FORWARD_ENDED, "", 0, 0, -1),
        (Kind.RECOMPUTE_BEGAN, "b", 1100, 1100, -1),
        (Kind.RECOMPUTE_ENDED, "b", 1500, 1900, -1),
        (Kind.RECOMPUTE_BEGAN, "a", 1750, 1900, -1),
        (Kind.RECOMPUTE_ENDED, "a", 2000, 2000, -1),
        (Kind.STEP_ENDED, "", 900, 2500, -1),
    ]
    recorded = events_of(events)
    for common_bytes, expected in ((800, 700), (600, 600), (0, 0)):  # at most the common inputs
        visits = [RegionRecord("a", inputs=[SeenTensor(0, 50, None)])]
        common = [(SeenTensor(1, 0, None), common_bytes)]
        visits.append(RegionRecord("b", inputs=[SeenTensor(0, 100, None)], common=common))
        curve = _MemoryCurve(recorder_of(recorded, visits), ("a", "b"), 0)
        assert curve.left_bytes == [0, expected]


def test_work_between_two_regions_is_part_of_the_first():
    """In forward and in backward, or it would be part of nothing, and plans would be for a shorter step."""
    events = [
        (Kind.STEP_BEGAN, ""), (Kind.REGION_ENTERED, "a"), (Kind.REGION_LEFT, "a"), (Kind.REGION_ENTERED, "b"),
        (Kind.REGION_LEFT, "b"), (Kind.FORWARD_ENDED, ""), (Kind.REGION_READ, ""), (Kind.RECOMPUTE_BEGAN, "b"),
        (Kind.RECOMPUTE_ENDED, "b"), (Kind.REGION_READ, ""), (Kind.RECOMPUTE_BEGAN, "a"),
        (Kind.RECOMPUTE_ENDED, "a"), (Kind.REGION_READ, ""), (Kind.STEP_ENDED, ""),
    ]  # fmt: skip
    times = times_of(events, ("a", "b"))
    assert times.forward_s == [2**3 - 2**1, 2**4 - 2**3]
    assert times.recompute_s == [2**11 - 2**10, 2**8 - 2**7]
    assert times.backward_s == [2**12 - 2**11, 2**10 - 2**8]
    around = [times.before_s, times.after_s, times.backward_before_s, times.backward_after_s]
    assert around == [2**1 - 2**0, 2**5 - 2**4, 2**7 - 2**5, 2**13 - 2**12]
    assert sum(around) + sum(times.forward_s + times.recompute_s + times.backward_s) == 2**13 - 2**0


def test_a_read_outside_in_the_middle_of_a_region_is_part_of_the_backward():
    events = [
        (Kind.STEP_BEGAN, ""), (Kind.REGION_ENTERED, "a"), (Kind.REGION_LEFT, "a"), (Kind.FORWARD_ENDED, ""),
        (Kind.REGION_READ, "a"), (Kind.REGION_READ, ""), (Kind.REGION_READ, "a"), (Kind.REGION_READ, ""),
        (Kind.STEP_ENDED, ""),
    ]  # fmt: skip
    times = times_of(events, ("a",))
    assert times.backward_s == [2**7 - 2**4]
    assert times.backward_after_s == 2**8 - 2**7


def test_memory_after_the_regions_excludes_what_plans_decide():
    """At its peaks: 40 that were there before the step, 60 in front of the regions, 300 that these keep, 70 on their
    way out. The caller has let go of 20 that two regions share, and each plan may have one that keeps them."""
    recorded = events_of(
        [
            (Kind.STEP_BEGAN, "", 40, 40, -1),
            (Kind.REGION_ENTERED, "a", 100, 100, -1),
            (Kind.REGION_LEFT, "a", 200, 900, -1),
            (Kind.REGION_ENTERED, "b", 200, 200, -1),
            (Kind.REGION_LEFT, "b", 500, 900, -1),
            (Kind.FORWARD_ENDED, "", 480, 700, -1),
            (Kind.REGION_READ, "b", 480, 800, -1),
            (Kind.STEP_ENDED, "", 40, 900, -1),
        ]
    )
    outside = [
        StepEvent(Kind.TENSOR_SAVED, "", 0, Memory(490, 510), tensor=3),
        StepEvent(Kind.TENSOR_SAVED, "", 0, Memory(600, 650), tensor=5),
    ]
    curve = _MemoryCurve(recorder_of(recorded, (), outside, 70, 20), ("a", "b"), 300)
    assert [(turn.tensor_index, turn.peak_bytes) for turn in curve.points] == [(-1, 60), (3, 200), (5, 350)]
    assert curve.held_bytes == 30
    assert (curve.base_bytes, curve.kept_bytes) == (40, 60)
