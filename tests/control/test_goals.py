"""Goals of plans on a model: a budget, a largest slowdown; and plans that come while training goes on."""

import pytest
from control.test_controller import SETTINGS, a_large_budget, batch, make, step
from support import assert_equal

import ebbtide
from ebbtide import ConfigError, ModuleError


def follow(model, twin, count, start=0):
    for k in range(start, start + count):
        assert_equal(step(model, k), step(twin, k))


@pytest.mark.parametrize("settings", [{"max_slowdown": 0.05}, {"max_slowdown": 0.9}, {"budget": a_large_budget()}, {}])
def test_training_goes_on_while_a_plan_is_made(monkeypatch, settings):
    monkeypatch.setenv("EBBTIDE_WAIT", "0")
    model, twin = make(), make()
    handle = ebbtide.offload(model, **settings, **SETTINGS)
    follow(model, twin, 4)
    tuner = handle._planning.controller.tuner
    for k in range(4, 10):
        if handle.plan.status:
            assert handle.plan.status == "no plan yet: solving"
            assert "solving" in repr(handle)
            tuner._asked.answer.result()
        follow(model, twin, 1, start=k)
    assert handle.plan.status == ""
    assert handle.plan.predicted is not None


@pytest.mark.parametrize(("settings", "actions"), [({"max_slowdown": 0.05}, {"recompute"}), ({}, {"keep"})])
def test_recomputation_is_measured_if_a_slowdown_is_asked_for(settings, actions):
    model = make()
    handle = ebbtide.offload(model, **settings, **SETTINGS)
    assert {recipe.action for recipe in handle.recipes.values()} == actions
    follow(model, make(), 12)
    predicted, profile = handle.plan.predicted, handle.profile
    assert profile.has_recomputation == bool(settings)
    assert predicted.step_s > 0


def test_a_slowdown_is_planned_for_before_training():
    profile = ebbtide.measure(make(), batch(0), **SETTINGS)
    kept, slower = (
        ebbtide.plan(make(), batch(0), profile=profile, max_slowdown=slowdown).predicted for slowdown in (1e-6, 0.9)
    )
    assert slower.peak_bytes <= kept.peak_bytes
    with pytest.raises(ConfigError, match="two goals"):
        ebbtide.plan(make(), batch(0), profile=profile, max_slowdown=0.1, budget="40GiB")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_slowdown": 0}, "a share of the step above 0"),
        ({"max_slowdown": -0.1}, "a share of the step above 0"),
        ({"max_slowdown": True}, "a share of the step above 0"),
        ({"max_slowdown": "5%"}, "a share of the step above 0"),
        ({"max_slowdown": 5}, "0.05 for 5 %"),
        ({"max_slowdown": 0.1, "budget": "40GiB"}, "leave one of them out"),
        ({"max_slowdown": 0.1, "mode": "all"}, "mode='all' plans nothing, and max_slowdown= asks"),
        ({"max_slowdown": 0.1, "recipe": "keep"}, "max_slowdown= leaves it to the planner"),
        ({"max_slowdown": 0.1, "on_oom": "replan"}, "there is none: write one"),
    ],
)
def test_what_is_no_goal_is_refused(settings, text):
    model = make()
    with pytest.raises(ConfigError, match=text):
        ebbtide.offload(model, **settings, **SETTINGS)
    assert "_ebbtide_handle" not in model.__dict__


def test_a_handle_names_its_goal():
    handle = ebbtide.offload(make(), max_slowdown=0.05, **SETTINGS)
    assert repr(handle) == "<OffloadHandle of Stack, at most 5% slower, measuring step 1 of 3>"


def test_a_frozen_plan_is_made_anew_on_request():
    model, twin = make(), make()
    handle = ebbtide.offload(model, max_slowdown=0.05, **SETTINGS)
    handle.replan()  # nothing to plan from yet
    follow(model, twin, 12)
    handle.replan()
    follow(model, twin, 4, start=12)
    assert handle.plan.predicted is not None
    handle.set_recipe("keep")
    with pytest.raises(ModuleError, match="whose plan the user has set"):
        handle.replan()
