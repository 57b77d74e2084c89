"""Saved outputs of collectives, packed after the wait; and regions of sharded models."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from cases import Data, finish
from support import assert_equal
from test_offload import CPU, offload
from torch import nn

import ebbtide
from ebbtide import Recipe

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


@pytest.fixture(autouse=True, scope="module")
def _alone_in_the_world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


class Gathers(nn.Module):
    """`waits`: the way to wait for the gathered tensor."""

    def __init__(self, waits: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.waits = waits

    def forward(self, x):
        y = collectives.all_gather_tensor_autograd(self.first(x), 0, dist.group.WORLD)
        if self.waits == "operator":
            y = collectives.wait_tensor(y)
        if self.waits == "product":
            return self.second(y).sin() * y + x
        return self.second(y.sin()) * y + x


class Net(nn.Module):
    def __init__(self, waits: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gathers(waits) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make(waits):
    torch.manual_seed(0)
    return Net(waits)


def train(model):
    results = []
    for step in range(3):
        results += [grad.clone() for grad in finish(model(Data(CPU, step).tensor(4, 8)), model)]
        model.zero_grad()
    return results


@pytest.mark.parametrize("waits", ["use", "product", "operator"])
@pytest.mark.parametrize("ops", ["collective", ("collective", "matmul")], ids=str)
@pytest.mark.parametrize("outputs", ["offload", "keep"])
def test_collectives_are_saved_after_the_wait(waits, ops, outputs):
    results, counts = [], []
    for recipe in (None, "recompute", Recipe("selective", ops=ops, outputs=outputs)):
        model = make(waits)
        handle = None if recipe is None else offload(model, recipe=recipe)
        results.append(train(model))
        counts.append(0 if handle is None else handle.stats().saved_tensors + handle.stats().dropped.count)
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    assert counts[2] == counts[1] + 3 * 3 * (1 if ops == "collective" else 3)


@pytest.mark.parametrize("recipe", ["recompute", "selective", {"layers.*": "selective", "layers.0": "keep"}], ids=str)
@pytest.mark.parametrize("order", ["shard first", "offload first"])
def test_fully_sharded(recipe, order):
    from torch.distributed.fsdp import fully_shard

    def run(apply):
        model = make("use")
        if apply and order == "offload first":
            offload(model, recipe=recipe)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if apply and order == "shard first":
            offload(model, recipe=recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        results = []
        for step in range(3):
            loss = model(Data(CPU, step).tensor(4, 8))
            loss.backward()
            results += [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return results

    assert_equal(run(True), run(False))


class FeedForward(nn.Module):
    """Backward reads the input of `down`, which gelu derives from the output of `up`, after `up` was resharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("parts", ["layer", "linear"])
@pytest.mark.parametrize("order", ["shard first", "offload first"])
def test_a_sharded_region_derives_nothing(parts, order):
    """The gathered weights look plain inside of the region, and are gone when another part of it runs backward."""
    from torch.distributed.fsdp import fully_shard

    def run(applies):
        torch.manual_seed(0)
        model = nn.Sequential(*(FeedForward() for _ in range(3)))
        handle = offload(model, recipe=Recipe("offload", derive=True)) if applies and order == "offload first" else None
        for layer in model:
            for part in (layer.up, layer.down) if parts == "linear" else (layer,):
                fully_shard(part)
        fully_shard(model)
        if applies and handle is None:
            handle = offload(model, recipe=Recipe("offload", derive=True))
        results = []
        for step in range(3):
            loss = model(Data(CPU, step).tensor(4, 8)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]
            model.zero_grad()
        assert handle is None or handle.stats().derived.count == 0
        return results

    assert_equal(run(True), run(False))


class Waits(nn.Module):
    """The linear layer saves the pending result of a gather: an operand of no derivation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = collectives.all_gather_tensor_autograd(self.first(x), 0, dist.group.WORLD)
        return x + nn.functional.gelu(self.second(y)).sin()


def test_pending_collectives_are_no_operands():
    def run(**settings):
        torch.manual_seed(0)
        model = nn.Sequential(*(Waits() for _ in range(3)))
        handle = ebbtide.offload(model, store="mock", min_bytes=1, **settings) if settings else None
        results = []
        for step in range(6):
            results += finish(model(Data(CPU, step).tensor(4, 8)).square().mean(), model)
            model.zero_grad()
        assert handle is None or handle.plan.status == ""
        return [t.clone() for t in results]

    assert_equal(run(budget="1TiB"), run())
