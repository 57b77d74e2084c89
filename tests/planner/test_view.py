"""A view of a step divides what the simulator predicts, and adds nothing."""

import dataclasses
from itertools import pairwise

import pytest
from planner.workloads import profile, region, workload_a, workload_b

from ebbtide import Recipe
from ebbtide._planner.solve import Solver
from ebbtide._planner.view import view_of_plan, view_with

SMALL = profile(*(region(f"layers.{k}", grad_bytes=10_000_000) for k in range(4)))
PROFILES = {
    "small": SMALL,
    "two graphs": dataclasses.replace(SMALL, graphs=2),
    "last first": dataclasses.replace(SMALL, graphs=2, passes=(0, 1, 1, 0)),
    "saved behind": profile(region("a", after_bytes=600_000_000, grad_bytes=2_000_000_000), *SMALL.regions[1:]),
    "a": workload_a(),
    "b": workload_b(),
}


def plans_of(found):
    solver = Solver(found)
    low, high = solver.smallest_budget(), solver.keeping_all().predicted.peak_bytes
    return [solver.keeping_all(), *(solver.solve(low + (high - low) * k // 4) for k in range(4))]


def seconds(view, lane, work):
    return sum(e.end_s - e.begin_s for e in view.timeline.intervals if (e.lane, e.work) == (lane, work))


@pytest.mark.parametrize("name", PROFILES)
def test_the_view_of_a_plan_is_what_the_plan_predicts(name):
    for plan in plans_of(PROFILES[name]):
        view, predicted = view_of_plan(PROFILES[name], plan), plan.predicted
        graphs = len(PROFILES[name].order) // 2
        assert view.outcome.step_s == view.timeline.step_s / graphs == predicted.step_s
        assert sum(view.peak) == view.outcome.peak_bytes == predicted.peak_bytes
        sent = sum(each.nbytes for each in view.timeline.intervals if each.lane == "out")
        back = sum(each.nbytes for each in view.timeline.intervals if each.lane == "back")
        assert sent == back
        assert sent // graphs == predicted.moved_bytes
        stalls = graphs * (predicted.stall_forward_s + predicted.stall_backward_s)
        assert seconds(view, "compute", "stall") == pytest.approx(stalls)


@pytest.mark.parametrize("name", PROFILES)
def test_memory_adds_up_to_the_curve(name):
    for plan in plans_of(PROFILES[name]):
        view = view_of_plan(PROFILES[name], plan)
        assert [sum(each) for each in view.memory[1:-1]] == [moment.nbytes for moment in view.outcome.curve]
        assert all(min(each) >= 0 for each in view.memory)
        assert len(view.times) == len(view.memory) + 1
        assert view.times[-1] == view.timeline.step_s


@pytest.mark.parametrize("name", PROFILES)
def test_a_lane_does_one_thing_at_a_time_and_compute_fills_the_step(name):
    found = PROFILES[name]
    for plan in plans_of(found):
        view = view_of_plan(found, plan)
        for lane in ("compute", "out", "back"):
            own = sorted(e[3:5] for e in view.timeline.intervals if e.lane == lane and e.work != "stall")
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(own))
            if lane == "compute":
                assert sum(end - begin for begin, end in own) == pytest.approx(view.timeline.step_s)


def test_stalls_lie_in_the_step_and_name_the_region_waited_for():
    narrow = dataclasses.replace(SMALL, link=dataclasses.replace(SMALL.link, out=2e9, back=2e9))
    view = view_of_plan(narrow, Solver(narrow).solve(Solver(narrow).smallest_budget(only_moves=True), only_moves=True))
    stalls = [each for each in view.timeline.intervals if each.work == "stall"]
    assert {each.region for each in stalls} <= {f"layers.{k}" for k in range(4)}
    assert len(stalls) > 1
    assert all(0 <= each.begin_s < each.end_s <= view.outcome.step_s for each in stalls)


def test_checkpointing_recomputes_every_region_that_can():
    cannot = dataclasses.replace(
        SMALL, regions=(dataclasses.replace(SMALL.regions[0], recompute_s=0.0), *SMALL.regions[1:])
    )
    view = view_with(cannot, Recipe("recompute", inputs="keep"))
    assert {each.region for each in view.timeline.intervals if each.work == "recompute"} == {
        "layers.1", "layers.2", "layers.3",
    }  # fmt: skip
    assert view.outcome.moved_bytes == 0
    assert view.outcome.peak_bytes < view_with(cannot, Recipe("keep")).outcome.peak_bytes
