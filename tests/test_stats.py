"""`stats()`: figures for people, JSON for files, a flat dict for loggers."""

import gc
import json
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from support import Rig, assert_equal
from torch import nn

import ebbtide
from ebbtide._control.trial import Trial
from ebbtide._devices.cpu import CpuDevice
from ebbtide._engine.stats import TOTALS, CopyTiming, Count, Stats
from ebbtide._types import Memory, Reason, Unable
from ebbtide._utils import garbage
from ebbtide._utils.sizes import GIB
from ebbtide.integrations._results import Metrics

SETTINGS = {"store": "disk", "min_bytes": 1}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def step(model, seed):
    model.zero_grad()
    loss = model(torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)))
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()]]


def make():
    torch.manual_seed(0)
    return Stack()


def all_known() -> Stats:
    return Stats(
        parcels=Count(5, 4 * GIB),
        out=Count(4, 3 * GIB),
        kept={Reason.SMALL: Count(2, GIB), Reason.PARAMETER: Count(9, 7 * GIB), Reason.RECIPE: Count(1, GIB)},
        recomputed=Count(8, 6 * GIB),
        misses=Count(2, GIB),
        unable={Unable.NO_GRAD: 3},
        stall_forward_s=0.25,
        stall_backward_s=0.5,
        stall_by_region={"layers.1": 0.75},
        out_sample=CopyTiming(2 * 10**9, 0.5),
        host_bytes=2 * GIB,
        budget_bytes=40 * GIB,
        predicted_step_s=0.125,
        predicted_peak_bytes=39 * GIB,
        measured_step_s=0.0625,
        measured_peak_bytes=38 * GIB,
    )


def test_stats_are_json():
    data = all_known().to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data.keys() >= {each.name for each in fields(Stats)}
    assert data["out"] == {"count": 4, "nbytes": 3 * GIB}
    assert data["kept"]["PARAMETER"] == {"count": 9, "nbytes": 7 * GIB}
    assert data["unable"] == {"NO_GRAD": 3}
    assert (data["stall_forward_s"], data["budget_bytes"], data["saved_tensors"]) == (0.25, 40 * GIB, 17)
    assert data["out_gb_per_s"] == 4.0
    assert json.loads(json.dumps(Stats().to_dict()))["measured_step_s"] is None


def test_metrics_are_one_flat_dict():
    assert all_known().metrics() == {
        "ebbtide/moved_gib": 3,
        "ebbtide/kept_gib": 2,  # weights stay anyway
        "ebbtide/recomputed_gib": 6,
        "ebbtide/misses": 2,
        "ebbtide/stall_ms": 750,
        "ebbtide/stall_forward_ms": 250,
        "ebbtide/stall_backward_ms": 500,
        "ebbtide/host_gib": 2,
        "ebbtide/budget_gib": 40,
        "ebbtide/predicted_peak_gib": 39,
        "ebbtide/measured_peak_gib": 38,
        "ebbtide/predicted_step_ms": 125,
        "ebbtide/measured_step_ms": 62.5,
    }
    assert Stats().metrics().keys() == TOTALS | {"ebbtide/host_gib"}


def test_totals_are_counted_since_earlier_stats():
    earlier, now = all_known(), all_known()
    now.out.add(GIB)
    now.stall_forward_s += 0.5
    metrics = now.metrics(since=earlier)
    assert {name: value for name, value in metrics.items() if name in TOTALS and value} == {
        "ebbtide/moved_gib": 1,
        "ebbtide/stall_ms": 500,
        "ebbtide/stall_forward_ms": 500,
    }
    assert metrics["ebbtide/budget_gib"] == 40


def test_a_handle_knows_budget_prediction_and_measurement():
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    assert handle.stats().budget_bytes == 64 * GIB
    for seed in range(5):
        assert_equal(step(model, seed), step(twin, seed))
    stats, predicted = handle.stats(), handle.plan.predicted
    assert (stats.predicted_step_s, stats.predicted_peak_bytes) == (predicted.step_s, predicted.peak_bytes)
    size = handle._planning.controller.tuner._size
    size.trial = trial = Trial(size.trial.plan)
    assert handle.stats().measured_step_s is None
    assert "measured" not in handle.report()
    for _ in range(5):
        trial.add_step(0.25)
        trial.add_peak(5 * GIB)
    stats = handle.stats()
    assert (stats.measured_step_s, stats.measured_peak_bytes) == (0.25, 5 * GIB)
    handle.remove()
    assert handle.stats().metrics()["ebbtide/measured_peak_gib"] == 5  # it lives on
    for row in ("budget +64.00 GiB", "measured peak +5.00 GiB", "measured time +250.0 ms", "predicted peak"):
        assert re.search(row, handle.report())


def test_a_share_is_a_budget_in_bytes():
    handle = ebbtide.offload(make(), budget=0.5, **SETTINGS)
    assert handle.stats().budget_bytes == CpuDevice().total_bytes() // 2


def test_without_a_plan_nothing_is_promised():
    model = make()
    handle = ebbtide.offload(model, mode="all", **SETTINGS)
    step(model, 0)
    assert handle.stats().metrics().keys() == TOTALS | {"ebbtide/host_gib"}
    assert handle.stats().metrics()["ebbtide/moved_gib"] > 0


@pytest.mark.parametrize(("tracks", "peak"), [(True, 3 * GIB), (False, None)])
def test_the_record_of_a_device_is_the_peak_while_no_step_by_a_plan_is_known(tracks, peak):
    class Device(CpuDevice):
        tracks_peak = tracks

        def memory(self):
            return Memory(1, 3 * GIB)

    rig = Rig(Device())
    with rig.context:
        loss = make()(torch.randn(16, 32))
    loss.backward()
    assert rig.stats.measured_peak_bytes == peak
    assert rig.stats.metrics().get("ebbtide/measured_peak_gib") == (3 if peak else None)


def test_trainers_with_several_models_add_totals_up_and_take_the_largest_states():
    handles = [SimpleNamespace(stats=all_known), SimpleNamespace(stats=lambda: Stats(out=Count(1, GIB)))]
    figures = Metrics(handles)
    handles[1].stats = lambda: Stats(out=Count(3, 6 * GIB), host_bytes=4 * GIB)
    handles[0].stats = lambda: Stats(out=Count(9, 5 * GIB), budget_bytes=40 * GIB)
    metrics = figures.read()
    assert metrics["ebbtide/moved_gib"] == (5 - 3) + (6 - 1)
    assert (metrics["ebbtide/host_gib"], metrics["ebbtide/budget_gib"]) == (4, 40)
    assert figures.read()["ebbtide/moved_gib"] == 0


def test_full_collections_of_python_are_counted_from_the_entry_point_on():
    gc.collect()
    first = ebbtide.offload(Stack(), **SETTINGS)
    gc.collect(0)
    gc.collect()
    second = ebbtide.offload(Stack(), **SETTINGS)
    gc.collect()
    counts = [handle.stats().full_collections.count for handle in (first, second)]
    assert counts[1] >= 1
    assert counts[0] - counts[1] >= 1
    assert gc.callbacks.count(garbage._watch) == 1
    assert first.stats().full_collections.seconds > second.stats().full_collections.seconds > 0
    assert "full collections" in first.report()
