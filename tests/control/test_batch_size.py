"""Buckets of batch sizes: plans that run alike, and plans that may return."""

import dataclasses

import pytest
from planner.workloads import GIB, layers, profile

from ebbtide import Plan, Prediction, RegionPlan
from ebbtide._control.batch_size import BatchSize, run_alike
from ebbtide._control.trial import Trial
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
