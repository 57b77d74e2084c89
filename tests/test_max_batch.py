"""`ebbtide.max_batch`: profiles, batches and budgets as users write them."""

import dataclasses

import pytest
from planner.workloads import GIB, layers, profile

import ebbtide
from ebbtide import ConfigError, PlanError

MEASURED = profile(*layers(2), device_bytes=4 * GIB)  # 1000 tokens
OTHER = MEASURED.scaled(2000)
LARGE = dataclasses.replace(OTHER, made_for={"model": "large"})


def test_a_profile_alone_is_a_list_of_one():
    assert ebbtide.max_batch(MEASURED, batch=10, budget="2GiB") == ebbtide.max_batch(
        [MEASURED], batch=10, budget=2 << 30
    )


def test_the_batch_is_of_the_first_profile_in_any_order():
    found = ebbtide.max_batch([OTHER, MEASURED], batch=20, budget="2GiB")
    assert found == ebbtide.max_batch([MEASURED, OTHER], batch=10, budget="2GiB")
    assert [(row.batch, row.tokens) for row in found.rows if row.is_measured] == [(10, 1000), (20, 2000)]


@pytest.mark.parametrize("budget", [0.5, "50%"])
def test_a_budget_may_be_a_share_of_the_device(budget):
    assert ebbtide.max_batch(MEASURED, batch=10, budget=budget).budget_bytes == 2 * GIB


def test_reserved_memory_leaves_room_for_fewer():
    found = ebbtide.max_batch([MEASURED, OTHER], batch=10, budget="2GiB", reserve="512MiB")
    reserved = [each.with_reserved(GIB // 2) for each in (MEASURED, OTHER)]
    assert found == ebbtide.max_batch(reserved, batch=10, budget="2GiB")
    assert found.largest.batch < ebbtide.max_batch([MEASURED, OTHER], batch=10, budget="2GiB").largest.batch


@pytest.mark.parametrize(
    ("profiles", "settings", "error", "message"),
    [
        ([], {}, ConfigError, "there is no profile"),
        (MEASURED, {"batch": 0}, ConfigError, "batch=0: expected the number of samples"),
        (MEASURED, {"batch": True}, ConfigError, "batch=True: expected the number of samples"),
        (MEASURED, {"batch": 2.0}, ConfigError, "batch=2.0: expected the number of samples"),
        (MEASURED, {"batch": 3}, ConfigError, "batch=3: the first profile is of a batch with 1000 tokens"),
        (MEASURED, {"batch": 2000}, ConfigError, "batch=2000: the first profile is of a batch with 1000 tokens"),
        (dataclasses.replace(MEASURED, tokens=0), {}, ConfigError, "of a batch with 0 tokens"),
        ([MEASURED, MEASURED], {}, ConfigError, r"batches with \[1000, 1000\] tokens: expected each of another"),
        ([MEASURED, MEASURED.scaled(1050)], {}, ConfigError, "1050 tokens has no whole number of samples of 100"),
        (MEASURED, {"budget": "much"}, ConfigError, "budget='much' is not a size"),
        (MEASURED, {"reserve": "much"}, ConfigError, "reserve='much' is not a size"),
        (dataclasses.replace(MEASURED, device_bytes=None), {"budget": 0.5}, ConfigError, "how much memory its device"),
        (MEASURED, {"budget": "1MiB"}, PlanError, "budget 1.00 MiB: no batch fits, and the smallest budget"),
        (
            [MEASURED, LARGE],
            {},
            PlanError,
            "model 'large', not 'small'",
        ),
        (profile(*layers(2, recompute_s=0.0)), {}, PlanError, "has no recomputation times"),
    ],
)
def test_what_cannot_be_answered_is_an_error(profiles, settings, error, message):
    with pytest.raises(error, match=message):
        ebbtide.max_batch(profiles, **{"batch": 10, "budget": "2GiB", **settings})
