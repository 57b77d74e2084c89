"""Tiny models of the zoo: under every entry point and within a tight budget, steps equal plain steps, bit for bit."""

import functools
import json

import pytest
import torch
from planner.test_norm import tight
from support import assert_equal

import ebbtide
from benchmarks.zoo import compare
from benchmarks.zoo.models import ZOO, built

CPU = torch.device("cpu")
NAMES = [name for name in ZOO if name != "Llama B-32k"]  # equal to Llama A when tiny

# transformers, diffusers and torch warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def steps(name, count, **settings):
    """A handle if there are `settings`, and loss and gradients of each of `count` steps, with dropout."""
    model, loss_of = built(name, CPU, tiny=True)
    handle = ebbtide.offload(model, min_bytes=256, **settings) if settings else None
    results = []
    for seed in range(count):
        torch.manual_seed(seed)
        loss = loss_of()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    return handle, results


@functools.cache
def plain(name):
    return steps(name, 5)[1]


def check(name, found):
    for step, twin in zip(found, plain(name), strict=False):
        assert_equal(step, twin)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_everything_moves(name):
    handle, found = steps(name, 2, mode="all", store="mock", window=1, prefetch=10_000)
    check(name, found)
    assert handle.stats().inbound.nbytes > 10_000
    assert handle.stats().host_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_measured_and_planned(name):
    """The measured steps recompute every region; the plan with the smallest peak mixes recipes."""
    handle, found = steps(name, 5, budget="64GiB", store="disk")
    check(name, found)
    assert handle.plan.predicted is not None
    handle, found = steps(name, 2, plan=tight(handle.profile), store="disk")
    check(name, found)
    assert handle.stats().recomputed.count > 0


def test_a_tiny_model_is_measured(monkeypatch):
    monkeypatch.setattr(compare, "FIRST", 4)
    monkeypatch.setattr(compare, "MOST", 4)
    monkeypatch.setattr(compare, "ALONE_STEPS", 1)
    *_, result = compare.measure_model("ViT-L", CPU, (0.0, 0.5), 1, tiny=True)
    assert result["blocks"] == 3
    assert [point["share"] for point in result["points"]] == [0.0, 0.5]
    assert all(point["step_ms"] > 0 and point["steps_over"] == 0 for point in result["points"])
    assert json.loads(json.dumps(result)) == result


def test_checkpointed_blocks_are_spread_evenly():
    blocks = [torch.nn.Identity() for _ in range(6)]
    with compare._some_checkpointed(blocks, 2):
        assert ["forward" in vars(block) for block in blocks] == [False, False, True, False, False, True]
    assert not any("forward" in vars(block) for block in blocks)
