"""Buckets of batch sizes: plans that run alike, plans that may return, and the choice among plans that ran: tables."""

import dataclasses

import pytest
from planner.workloads import GIB, layers, profile

from ebbtide import Plan, Prediction, RegionPlan
from ebbtide._control.batch_size import BatchSize, run_alike
from ebbtide._control.trial import Trial
from ebbtide._planner.solve import Answer
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Cost, ReleasePoint

REGION = RegionPlan("offload", release=(ReleasePoint(0, 7),), prefetch_bytes=9)
PLAN = Plan({"a": REGION}, outside=RegionPlan("keep"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"reason": "another", "cost": Cost(1, 2, 3.0)}, True),
        ({"recipe": "keep"}, False),
        ({"release": ()}, False),
        ({"prefetch_bytes": 8}, False),
    ],
)
def test_plans_run_alike_whatever_is_predicted(changes, expected):
    predicted = Prediction(1.0, 0.0, 0.0, GIB, 0, 0)
    other = Plan({"a": dataclasses.replace(REGION, **changes)}, outside=RegionPlan("keep"), predicted=predicted)
    assert run_alike(PLAN, other) is expected


def test_plans_of_other_regions_do_not_run_alike():
    assert not run_alike(PLAN, Plan({"b": REGION}, outside=RegionPlan("keep")))
    assert not run_alike(PLAN, Plan({"a": REGION}))


def test_an_earlier_plan_returns_with_its_steps():
    size = BatchSize(1000, profile(*layers(1)))
    first, second = Trial(PLAN), Trial(Plan({}))
    size.follow(first)
    assert size.tried == []
    for _ in range(6):
        first.add_step(1.0)
        first.add_peak(GIB)
    size.follow(second)
    assert size.measured(GIB) == [first]
    assert size.measured(GIB - 1) == []
    size.follow(first)
    assert (size.trial, size.tried) == (first, [second])


# -- the choice among plans that ran -----------------------------------------------------------------------------------

OWN, FALLBACK = PLAN, Plan({"a": RegionPlan("recompute")}, outside=RegionPlan("keep"))


def ran(plan, times, peak_bytes=GIB):
    """A trial with so many timed steps."""
    found = Trial(plan, 1.0, is_fallback=plan is FALLBACK)
    for seconds in (9.0,) * THRESHOLDS.learning_steps + tuple(times):
        found.add_step(seconds)
        found.add_peak(peak_bytes)
    return found


def size_of(own, kept=None, **settings):
    """The plan is in force, and the fallback has run before it, if it has."""
    found = BatchSize(1000, profile(*layers(1)), fallback=FALLBACK, **settings)
    found.tried = [] if kept is None else [kept]
    found.trial = own
    return found


@pytest.mark.parametrize(
    ("own", "other", "winner", "turns"),
    [
        ([1.0] * 4, [1.2] * 4, OWN, 0),  # no step of the fallback was as fast
        ([1.0] * 4, [0.9] * 4, FALLBACK, 0),  # nor a step of the plan
        ([1.0] * 4, [0.995] * 4, OWN, 0),  # a trifle changes nothing
        ([0.9, 1.1, 1.1, 1.1], [1.0] * 4, FALLBACK, 3),
        ([0.9, 1.1, 1.0, 1.0], [0.9, 1.1, 1.1, 1.1], OWN, 3),
    ],
)
def test_within_a_budget_plans_take_turns_that_may_be_faster(own, other, winner, turns):
    size = size_of(ran(OWN, own), ran(FALLBACK, other), answer=Answer(OWN, FALLBACK, 0, 0.0))
    choice, count = size.choose_within(2 * GIB), 0
    while not choice.is_final:
        size.follow(choice.trial)
        for seconds in (9.0,) * THRESHOLDS.learning_steps + tuple(own if choice.trial.plan is OWN else other):
            size.trial.add_step(seconds)
        choice, count = size.choose_within(2 * GIB), count + 1
    assert choice.trial.plan is winner
    assert count == turns


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ([0.99, 1.0, 1.0, 1.0], "others were hardly faster"),
        ([0.99, 0.99, 0.99, 0.99], "no other was faster"),
        ([0.99, 1.02, 1.02, 1.02], "an earlier plan was faster"),
        ([1.01, 1.01, 1.01, 1.01], "an earlier plan was faster"),
    ],
)
def test_of_plans_that_differ_by_less_than_a_percent_the_newest_stays(own, why):
    before = ran(Plan({"a": RegionPlan("offload")}), [0.995] * 4)
    size = size_of(ran(OWN, own), before, answer=Answer(OWN, FALLBACK, 0, 0.0))
    size.fallback = None
    choice = size.choose_within(2 * GIB)
    while not choice.is_final:
        size.follow(choice.trial)
        choice = size.choose_within(2 * GIB)
    assert choice.trial.plan is (before.plan if why.startswith("an earlier") else OWN)
    assert choice.why == why


@pytest.mark.parametrize(("predicted_s", "is_final"), [(0.9, False), (1.04, False), (1.06, True)])
def test_a_fallback_without_steps_has_a_turn_unless_it_is_expected_to_be_slower(predicted_s, is_final):
    size = size_of(ran(OWN, [1.0] * 4), fallback_s=predicted_s)
    choice = size.choose_within(2 * GIB)
    assert choice.is_final == is_final
    assert choice.trial.plan is (OWN if is_final else FALLBACK)


def test_a_fallback_over_the_budget_has_no_turn():
    size = size_of(ran(OWN, [1.0] * 4), ran(FALLBACK, [0.5] * 4, peak_bytes=3 * GIB))
    choice = size.choose_within(2 * GIB)
    assert choice.is_final
    assert choice.trial.plan is OWN


@pytest.mark.parametrize(
    ("own", "kept", "settings", "expected"),
    [
        ([1.005] * 4, [1.0] * 4, {}, (OWN, True)),
        ([1.2] * 4, [1.0] * 4, {}, (FALLBACK, False)),  # and a plan that moves less is asked for
        ([1.2] * 4, [1.0] * 4, {"may_correct": False}, (FALLBACK, True)),
        ([1.2] * 4, [1.0] * 4, {"may_keep_all": False}, (OWN, True)),
        ([1.4] * 4, [1.0, 1.3, 1.3, 1.3], {}, (FALLBACK, False)),  # the fastest steps tell
        ([1.0, 1.2, 1.2, 1.2], [1.0, 1.2, 1.2, 1.2], {}, (OWN, True)),  # a machine that is slow now and then
        ([1.2] * 4, None, {}, (FALLBACK, False)),  # is measured first
        ([1.2] * 4, None, {"may_correct": False}, (OWN, True)),
        ([1.2] * 3, None, {}, (OWN, True)),  # too few steps
        ([1.0] * 4, None, {}, (OWN, True)),
    ],
)
def test_without_a_budget_a_plan_is_compared_with_keeping_everything(own, kept, settings, expected):
    size = size_of(ran(OWN, own), None if kept is None else ran(FALLBACK, kept), fallback_s=1.0)
    choice = size.choose_without_budget(0.01, **{"may_keep_all": True, "may_correct": True, **settings})
    assert (choice.trial.plan, choice.is_final) == expected
    assert (choice.slowdown > 0) == (expected == (FALLBACK, False) and kept is not None)


def test_a_plan_that_may_be_fast_takes_turns_with_keeping_everything():
    size = size_of(ran(OWN, [1.2] * 4), ran(FALLBACK, [1.0, 1.3, 1.3, 1.3]))
    choice = size.choose_without_budget(0.01, may_keep_all=True, may_correct=True)
    assert (choice.trial.plan, choice.is_final, choice.slowdown) == (FALLBACK, False, 0.0)
    assert size.compares
