"""Messages about plans: the first line, warnings if nothing moves, and the log."""

import dataclasses
import gc
import logging
import re
import warnings

import pytest
import torch
from control.scripted import controller_of, steps
from control.test_controller import SETTINGS, a_large_budget, make, step
from support import assert_equal

import ebbtide
from ebbtide import EbbtideWarning, Plan, PlanError, RegionPlan
from ebbtide._profiling.link_probe import LinkCosts

GIB = 2**30


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    gc.collect()
    ebbtide.release_memory()


@pytest.fixture
def carries_nothing(monkeypatch):
    """The link is probed to be so slow that whatever moves makes the step slower."""
    monkeypatch.setattr("ebbtide._control.controller.probe_link", lambda engine: LinkCosts(1.0, 1.0, 0.0))


def first_line(handle):
    return str(handle.plan).splitlines()[0]


def follow(model, count):
    """Steps that equal the twin's."""
    twin = make()
    for k in range(count):
        assert_equal(step(model, k), step(twin, k))


# -- the first line of a plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "behind"), [({}, ""), ({"budget": "64GiB"}, " (budget 64GiB)")])
def test_before_there_is_a_plan_its_first_line_says_which_step_is_measured(settings, behind):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    lines = [first_line(handle)]
    for k in range(4):
        step(model, k)
        lines.append(first_line(handle))
    steps_measured = [f"no plan yet: measuring step {number} of 3{behind}" for number in (1, 1, 2, 3)]
    assert lines[:4] == steps_measured
    assert lines[4].startswith("plan within 64GiB: step " if settings else "plan: step ")


def test_the_budget_of_a_plan_is_the_users_number_and_not_what_is_left_of_it():
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    follow(model, 4)
    left = dataclasses.replace(handle._attachment.plan, budget_bytes=60 * GIB)
    handle._attachment.apply_plan(left)  # as the planner does if measured peaks are over the predicted peaks
    assert first_line(handle).startswith("plan within 64GiB: step ")
    assert handle.plan.budget_bytes == 60 * GIB


@pytest.mark.parametrize(
    ("budget", "text"),
    [(0.9, "plan within 0.9 of the device's memory: "), (64 * GIB, "plan within 68719476736 bytes (64.00 GiB): ")],
)
def test_shares_and_bytes_are_shown_as_such(budget, text):
    model = make()
    handle = ebbtide.offload(model, budget=budget, **SETTINGS)
    follow(model, 4)
    assert first_line(handle).startswith(text)
    planned = ebbtide.plan(make(), torch.ones(8, 64), budget=budget, profile=handle.profile, **SETTINGS)
    assert str(planned).startswith(text)


def test_a_plan_that_was_given_up_on_is_named_in_the_first_line():
    model = make()
    handle = ebbtide.offload(model, budget="1MiB", **SETTINGS)
    follow(model, 3)
    with pytest.raises(PlanError):
        step(model, 3)
    assert first_line(handle) == "no plan: training keeps its first recipes (budget 1MiB)"


def test_the_first_line_on_the_meta_device():
    model = make().to("meta")
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    assert first_line(handle) == "no plan yet: the weights are on the meta device"


def test_what_a_user_sets_while_steps_are_measured_is_a_plan(tmp_path):
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    measuring = handle.plan
    measuring.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").status == ""
    handle.set_plan(measuring)
    assert first_line(handle) == "plan within 64GiB, 3 regions"
    follow(model, 2)


# -- nothing moved -----------------------------------------------------------------------------------------------------


def test_a_planner_that_moves_nothing_says_so_once_with_its_reasons(carries_nothing):
    model = make()
    ebbtide.offload(model, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(model, 3)  # measured steps are none of the plan's
    expected_text = (
        r"offload\(Stack\) moved nothing in its first planned forward \(moving anything would make the step slower\): "
        r"\d+ saved tensors \(.*\) its region's recipe keeps it; .*budget='40GiB'.*mode='all' moves everything"
    )
    with pytest.warns(EbbtideWarning, match=expected_text) as warned:
        follow(model, 6)
    assert len(warned) == 1


def test_of_the_steps_before_the_plan_nothing_is_counted(carries_nothing):
    model = make()
    ebbtide.offload(model, **SETTINGS)
    follow(model, 3)
    with pytest.warns(EbbtideWarning, match="moved nothing") as warned:
        step(model, 3)
    plain = make()
    ebbtide.offload(plain, plan=Plan({}, outside=RegionPlan("keep")), **SETTINGS)
    with pytest.warns(EbbtideWarning, match="moved nothing in its first forward") as of_one:
        step(plain, 3)
    in_one_forward = str(of_one[0].message).split(" saved tensors (")[0].rsplit(" ", 1)[1]
    assert f": {in_one_forward} saved tensors (" in str(warned[0].message)


def test_a_plan_that_moves_nothing_because_nothing_may_move_says_so():
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    follow(model, 4)
    moving = {name: RegionPlan("offload") for name in handle.regions}
    planned = dataclasses.replace(handle.plan, regions=moving, outside=RegionPlan("keep"))
    handle.remove()
    ebbtide.offload(model, plan=planned, store="disk", min_bytes="1GiB")
    with pytest.warns(
        EbbtideWarning, match=r"first planned forward .*: .* saved tensors \(.*\) smaller than min_bytes"
    ):
        follow(model, 2)


def test_a_plan_that_keeps_all_because_all_fits_says_so_in_the_log_only(caplog):
    caplog.set_level(logging.INFO, "ebbtide")
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(model, 5)
    assert handle.plan.keeps_all
    assert "; everything stays on the device; solving took " in caplog.messages[3]


# -- the log -----------------------------------------------------------------------------------------------------------


def test_the_log_says_what_is_measured_and_what_is_in_force(caplog):
    caplog.set_level(logging.INFO, "ebbtide")
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    follow(model, 4)
    measuring = [f"no plan yet: measuring step {number} of 3" for number in (1, 2, 3)]
    assert caplog.messages[:3] == measuring
    in_force = f"plan in force (budget 64.00 GiB): {handle.plan.predicted}; everything stays on the device; solving"
    assert caplog.messages[3].startswith(in_force)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert all(record.name.startswith("ebbtide.") for record in caplog.records)


@pytest.mark.parametrize(
    ("budget_bytes", "ratios", "expected_text"),
    [
        (
            int(2.5 * GIB),
            {"ratio": 1.5},
            r"plan corrected, the last steps took .* ms and the peak was .* GiB \(budget 2.50 GiB\): step ",
        ),
        (
            int(2.5 * GIB),
            {"ratio": 1.0, "peak_ratio": 1.15},
            r"plan corrected, the peak was .* \(budget 2.50 GiB\): step ",
        ),
        (
            None,
            {"ratio": 1.5},
            r"plan compared, the last steps took .* ms \(no budget\): step ",
        ),
    ],
    ids=["time", "peak", "no budget"],
)
def test_the_log_says_what_was_corrected_and_why(caplog, budget_bytes, ratios, expected_text):
    caplog.set_level(logging.INFO, "ebbtide")
    controller, handle = controller_of(budget_bytes)
    steps(controller, handle, 40, **ratios)
    assert caplog.messages[0].startswith("plan in force")
    assert any(re.match(expected_text, message) for message in caplog.messages)
    assert any(message.startswith("plan frozen") for message in caplog.messages)
    is_recomputed = (region.recipe.recomputes for region in handle.plans[0].regions.values())
    assert f"; {sum(is_recomputed)} of {len(handle.plans[0].regions)} regions recompute; " in caplog.messages[0]


def test_the_log_names_batches_of_another_size_once(caplog):
    caplog.set_level(logging.INFO, "ebbtide")
    controller, _ = controller_of(int(2.5 * GIB))
    for tokens in (1000, 500, 1000, 500):
        controller.step_begins(tokens)
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "plan in force",
        "plan in force for batches of 500 tokens",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_one_speaks(caplog, monkeypatch, rank):
    caplog.set_level(logging.INFO, "ebbtide")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    controller, _ = controller_of(int(2.5 * GIB))
    controller.step_begins(1000)
    assert len(caplog.messages) == 1 - rank


def test_a_plan_that_is_never_used_is_not_in_force(caplog):
    caplog.set_level(logging.INFO, "ebbtide")
    ebbtide.measure(make(), torch.ones(8, 64), **SETTINGS)
    assert {message[:22] for message in caplog.messages} == {"no plan yet: measuring"}


def test_nothing_is_shown_unless_a_program_asks_for_it():
    ours = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "ebbtide"]
    assert len(ours) >= 3
    assert all(logger.handlers == [] and logger.level == logging.NOTSET and logger.propagate for logger in ours)
