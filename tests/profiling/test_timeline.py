"""A watched step says what ran when, changes nothing, and leaves nothing on; a history stays small."""

from itertools import pairwise

import pytest
from control.test_controller import SETTINGS, batch, make, step
from support import assert_equal

import ebbtide
from ebbtide import Plan, RegionPlan
from ebbtide._devices.cpu import CpuDevice
from ebbtide._plans import Prediction
from ebbtide._profiling.step_events import TimelineMonitor
from ebbtide._profiling.timeline import Change, History, Step

PLAN = Plan(
    {"layers.0": RegionPlan("offload"), "layers.1": RegionPlan("recompute"), "layers.2": RegionPlan("keep")},
    outside=RegionPlan("keep"),
)


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def watched_step():
    """The third step, equal to the twin's, and the handle."""
    model, twin = make(), make()
    handle = ebbtide.offload(model, plan=PLAN, window=1, **SETTINGS)
    recorder, monitors = handle._attachment.context.recorder, []

    def watch(tokens, verifies):
        monitors.append(TimelineMonitor(CpuDevice(), False, recorder) if len(monitors) == 2 else None)
        return monitors[-1], False

    handle._attachment.plan_step = watch
    before = None
    for k in range(4):
        if k == 2:
            before = handle.stats()
        assert_equal(step(model, k), step(twin, k))
        assert recorder.watched is None
        if k == 2:
            return monitors[2].timeline(), before, handle.stats()
    raise AssertionError


def test_a_watched_step_has_every_region_and_direction():
    line, _, _ = watched_step()
    compute = [each for each in line.intervals if each.lane == "compute" and each.work != "stall"]
    assert [each.region for each in compute if each.work == "forward"] == ["layers.0", "layers.1", "layers.2"]
    assert [each.region for each in compute if each.work == "recompute"] == ["layers.1"]
    backward = [each.region for each in compute if each.work == "backward"]
    assert list(dict.fromkeys(backward)) == ["layers.1", "layers.0"]  # no hook of layers.2 runs
    assert all(one.end_s == other.begin_s for one, other in pairwise(compute))
    assert (compute[0].begin_s, compute[-1].end_s) == (0.0, line.step_s)
    assert line.began_ns > 0


def test_a_watched_step_has_every_copy():
    line, before, after = watched_step()
    for lane, name in (("out", "out"), ("back", "inbound")):
        own = [each for each in line.intervals if each.lane == lane]
        counted = getattr(after, name)
        assert sum(each.nbytes for each in own) == counted.nbytes - getattr(before, name).nbytes > 0
        assert {each.region for each in own} <= {"layers.0", "layers.1"}
        in_order = sorted(own, key=lambda each: each.begin_s)
        assert all(one.end_s <= other.begin_s for one, other in pairwise(in_order))


def test_stalls_of_a_watched_step_are_those_of_the_stats():
    line, before, after = watched_step()
    seen = sum(each.end_s - each.begin_s for each in line.intervals if each.work == "stall")
    counted = [stats.stall_forward_s + stats.stall_backward_s for stats in (before, after)]
    assert seen == pytest.approx(counted[1] - counted[0])
    assert sum(after.stall_by_region.values()) == pytest.approx(counted[1])


def test_a_planned_run_watches_a_step_of_its_plan_and_forgets_one_without_backward():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    controller, recorder = handle._attachment.controller, handle._attachment.context.recorder
    dropped = 0
    for k in range(30):
        loss = model(batch(k))
        if recorder.watched is not None and dropped == 0:
            dropped += 1
            del loss  # the copies of the next step belong to another timeline, or none
            continue
        loss.backward()
        assert recorder.watched is None
        if controller.tuner is not None and controller.tuner.timeline is not None:
            break
    assert dropped == 1
    assert controller.tuner.timeline.step_s > 0
    assert all(each.region in ("", *handle.regions) for each in controller.tuner.timeline.intervals)


def test_without_a_planner_nothing_is_noted():
    model = make()
    handle = ebbtide.offload(model, mode="all", **SETTINGS)
    step(model, 0)
    assert handle._attachment.context.recorder.watched is None
    assert handle.stats().out.count > 0


def test_a_history_of_any_length_has_some_hundred_steps():
    history, predicted = History(), Prediction(2.0, 0.0, 0.0, 7, 0, 0)
    for k in range(10_000):
        history.add(float(k), 5, predicted)
    first = history.steps[0]
    assert first == Step(first.number, first.number - 1.0, 2.0, 5, 7)
    assert 200 < len(history.steps) < 512
    assert {two.number - one.number for one, two in pairwise(history.steps)} == {32}
    for k in range(100):
        history.note(f"change {k}")
    assert history.changes[-1] == Change(10_000, "change 99")
    assert len(history.changes) == 32
