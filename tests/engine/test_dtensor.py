"""Saved tensors of DTensor count and move as the shards of this rank do, under the same numbers."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from cases import Data
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

import ebbtide
from ebbtide import Recipe

CPU = torch.device("cpu")
MOVES = {"store": "mock", "min_bytes": 1}
ROWS, WIDTH = 4, 8


@pytest.fixture(autouse=True, scope="module")
def _one_of_two_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    gc.collect()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x))).sin()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)))


def train(model, steps=2, **settings):
    """The handle, after steps with the same rows on the rank: half of the batch if the model is sharded."""
    handle = ebbtide.offload(model, **MOVES, **settings)
    for step in range(steps):
        x = Data(CPU, step).tensor(ROWS, WIDTH)
        if isinstance(model[0].up.weight, DTensor):
            x = DTensor.from_local(x, model[0].up.weight.device_mesh, [Shard(0)])
        out = model(x)
        (out.to_local() if isinstance(out, DTensor) else out).square().mean().backward()
    return handle


@pytest.fixture
def pair():
    model = plain()
    return model, distribute_module(copy.deepcopy(model), init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "all"},
        {"recipe": "recompute"},
        {"recipe": Recipe("selective", ops="matmul")},
        *({"recipe": Recipe("offload", sites=(site,))} for site in range(6)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:offload.Sequential. moved nothing")
def test_counts_are_those_of_the_shards(pair, settings):
    stats, expected = (train(model, **settings).stats() for model in reversed(pair))
    for name in ("out", "inbound", "recomputed", "dropped", "kept_bytes"):
        assert getattr(stats, name) == getattr(expected, name), name


def test_a_profile_has_the_shards_under_their_numbers(pair):
    sharded, expected = (train(model, 5, budget="1TiB").profile for model in reversed(pair))
    for region, twin in zip(sharded.regions, expected.regions, strict=True):
        for name in ("saved_tensors", "inputs", "expensive_ops"):
            rows, others = ([(row.index, row.nbytes) for row in getattr(each, name)] for each in (region, twin))
            assert rows == others, name
        assert region.not_movable_bytes == twin.not_movable_bytes
