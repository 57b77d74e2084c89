"""Verdicts on plans, and margins below budgets: tables."""

import pytest
from planner.workloads import GIB

from ebbtide import Plan, Prediction, RegionPlan
from ebbtide._control.trial import Trial, TrialVerdict, first_margin, margin_after, verdict
from ebbtide._planner.thresholds import THRESHOLDS

LIMIT = 10 * GIB


def plan(step_s, peak_gib, recipe="recompute"):
    moved_bytes = 0 if recipe == "keep" else GIB
    predicted = Prediction(step_s, 0.0, 0.0, int(peak_gib * GIB), moved_bytes, moved_bytes)
    return Plan({"a": RegionPlan(recipe)}, outside=RegionPlan("keep"), predicted=predicted)


def trial(step_s=1.0, peaks=(9.5,), count=6, predicted_peak=9.5, recipe="recompute"):
    """Steps of a plan predicted to take a second."""
    found = Trial(plan(1.0, predicted_peak, recipe))
    for peak_gib in peaks:
        found.add_peak(int(peak_gib * GIB))
    for k in range(count):
        found.begun += 1
        found.add_step(9.0 if k < THRESHOLDS.learning_steps else step_s)
    return found


@pytest.mark.parametrize(
    ("case", "margin_gib", "may_correct", "expected"),
    [
        ({"count": 5}, 0.0, True, TrialVerdict.WAIT),
        ({"count": 1, "peaks": (10.1,)}, 0.0, False, TrialVerdict.OVER),
        ({}, 0.0, True, TrialVerdict.STAY),
        ({"step_s": 1.04}, 0.0, True, TrialVerdict.STAY),
        ({"step_s": 1.06}, 0.0, True, TrialVerdict.CORRECT),
        ({"step_s": 0.9}, 0.0, True, TrialVerdict.CORRECT),
        ({"step_s": 1.06}, 0.0, False, TrialVerdict.STAY),
        ({}, 0.5, True, TrialVerdict.CORRECT),
        ({"recipe": "keep"}, 0.5, True, TrialVerdict.STAY),
        ({"recipe": "keep", "step_s": 1.5}, 0.0, True, TrialVerdict.STAY),
        ({"predicted_peak": 9.2}, 0.5, True, TrialVerdict.STAY),
    ],
)
def test_verdicts_within_a_budget(case, margin_gib, may_correct, expected):
    found = trial(**case)
    found.margin_bytes = int(margin_gib * GIB)
    assert verdict(found, LIMIT, may_correct) is expected


@pytest.mark.parametrize("step_s", [1.5, 0.8])
def test_without_a_budget_no_step_is_too_slow_by_itself(step_s):
    assert verdict(trial(step_s), None, may_correct=True) is TrialVerdict.STAY


def test_a_frozen_plan_has_no_further_verdict():
    frozen = trial(step_s=3.0, peaks=(11.0,))
    frozen.is_frozen = True
    assert verdict(frozen, LIMIT, may_correct=True) is TrialVerdict.WAIT


def test_a_trial_without_timed_steps_ends():
    endless = trial(count=0)
    endless.begun = THRESHOLDS.longest + 1
    assert verdict(endless, LIMIT, may_correct=True) is TrialVerdict.STAY


@pytest.mark.parametrize(
    ("peaks", "margin_gib", "expected_gib"),
    [
        ((), 0.6, 0.6),  # unmeasured
        ((9.5,), 0.6, 0.125),  # as predicted: a quarter of what is left of the budget
        ((9.4,), 0.6, 0.15),  # below the prediction: a quarter of the margin
        ((5.0,), 0.6, 0.15),  # far below the budget: a quarter of the margin
        ((9.7,), 0.6, 0.3 + 0.075),  # the error and half of it again, and a quarter of what is left
        ((9.9,), 0.2, 0.6),  # an error larger than the margin
        ((9.5, 9.5, 9.3, 9.5), 0.6, 0.2 + 0.125),  # peaks that differ
        ((10.4,), 0.6, 0.6 + 2 * 0.4),  # over by 0.4
        ((11.0,), 0.0, 1.5 * 1.5),  # an error of 1.5
    ],
)
def test_margins_follow_measured_peaks(peaks, margin_gib, expected_gib):
    margin_bytes = margin_after(trial(peaks=peaks), LIMIT, int(margin_gib * GIB))
    assert margin_bytes / GIB == pytest.approx(expected_gib, abs=1e-6)


@pytest.mark.parametrize(
    ("peaks_gib", "before_gib"),
    [
        ((9.5, 9.0, 6.5, 6.0), (4.0, 4.0, 1.0, 1.0)),  # garbage collection frees 3 GiB between two steps
        ((9.5, 9.0, 9.5, 9.0), (1.0, 4.0, 1.0, 4.0)),  # two forwards, then two backwards
    ],
)
def test_memory_from_before_a_step_is_no_spread(peaks_gib, before_gib):
    """Routing changes the rest by half a GiB."""
    found = Trial(plan(1.0, 9.5))
    for peak, before in [(9.5, 4.0)] * THRESHOLDS.learning_steps + list(zip(peaks_gib, before_gib, strict=True)):
        found.add_peak(int(peak * GIB), before_bytes=int(before * GIB))
    assert found.seen.peak_bytes == 9.5 * GIB
    assert found.seen.spread_bytes == 0.5 * GIB


def test_a_peak_close_to_the_budget_leaves_hardly_any_margin():
    close = trial(peaks=(9.96,), predicted_peak=9.97)
    assert margin_after(close, LIMIT, int(0.6 * GIB)) / GIB == pytest.approx(0.01, abs=1e-6)


def test_plans_that_share_a_margin_take_up_a_part_each():
    one, two = (margin_after(trial(peaks=(9.5,)), LIMIT, int(0.6 * GIB), sharing) for sharing in (1, 2))
    assert one / GIB == pytest.approx(0.125, abs=1e-6)
    assert two / GIB == pytest.approx(0.125 + 0.475 / 2, abs=1e-6)


@pytest.mark.parametrize(("base_gib", "expected_gib"), [(0, 1.0), (5, 0.5), (12, 0.0)])
def test_the_first_margin_is_of_what_is_not_known_exactly(base_gib, expected_gib):
    assert first_margin(LIMIT, base_gib * GIB) / GIB == pytest.approx(expected_gib)
