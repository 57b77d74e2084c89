"""A profile counts the state of optimizers, and the search leaves no hook behind."""

import gc
import weakref

import pytest
import torch
from control.test_controller import SETTINGS, a_large_budget, batch, make, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

import ebbtide
from ebbtide import PlanError
from ebbtide._control.controller import Phase
from ebbtide._model.optimizers import Optimizers
from ebbtide._model.placement import memory_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_hook_is_left():
    gc.collect()  # of earlier tests
    before = dict(hooks)
    yield
    gc.collect()
    assert dict(hooks) == before
    ebbtide.release_memory()


def adam(model):
    return torch.optim.Adam(model.parameters())


def train(model, optimizer, steps=4, trains_from=0):
    for k in range(steps):
        step(model, k)
        if k >= trains_from:
            optimizer.step()


def adam_bytes(model):
    """Two moments, and a count on the host, for each parameter."""
    return sum(2 * p.numel() * 4 + 4 for p in model.parameters())


class Wrapped:
    """A wrapper in the manner of accelerate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["plain", "wrapped"])
def test_present_state_is_part_of_the_profile(wrap, settings):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    train(model, wrap(adam(model)))
    base = handle.profile.base
    assert base["optimizer"] == adam_bytes(model)
    assert list(base) == ["parameters", "gradients", "optimizer", "other"]
    assert sum(base.values()) == handle.profile.base_bytes
    handle.remove()


def test_later_state_is_not_part_of_the_profile():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    train(model, adam(model), trains_from=2)  # after the step measured for details
    assert "optimizer" not in handle.profile.base
    handle.remove()


def test_an_optimizer_without_state_is_not_named():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(handle.profile.base) == ["parameters", "gradients", "other"]
    handle.remove()


def test_an_impossible_budget_names_the_state():
    model = make()
    handle = ebbtide.offload(model, budget="1MiB", **SETTINGS)
    with pytest.raises(PlanError, match=r"held by: .*optimizer \d"):
        train(model, adam(model))
    handle.remove()


# -- whose state -------------------------------------------------------------------------------------------------------


def test_state_counts_for_the_model_alone_and_each_storage_once():
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer, others = adam(model), adam(other)
    seen = Optimizers()
    seen.start()
    for each, its in ((model, optimizer), (other, others)):
        each(torch.ones(1, 8)).sum().backward()
        its.step()
    parameters = list(model.parameters())
    assert seen.state_bytes(parameters, CPU) == adam_bytes(model)
    assert seen.state_bytes(parameters, torch.device("meta")) == 0
    state = optimizer.state[model.weight]
    state["views"] = [state["exp_avg"][0], {"inside": (state["exp_avg_sq"].t(), torch.zeros(100))}]
    state["endless"] = state["views"]
    state["views"].append(state["views"])
    assert seen.state_bytes(parameters, CPU) == adam_bytes(model) + 400
    del optimizer, its
    gc.collect()
    assert seen.state_bytes(parameters, CPU) == 0
    seen.stop()


@pytest.fixture
def one_of_two_ranks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_sharded_state_counts_with_the_part_of_the_rank(one_of_two_ranks):
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), one_of_two_ranks, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert memory_of(model, {"": model}, CPU) == ({"parameters": 128, "gradients": 0}, {"": 128})
    model.weight.grad = model.weight.detach().clone()
    assert memory_of(model, {}, CPU) == ({"parameters": 128, "gradients": 128}, {})
    seen = Optimizers()
    seen.start()
    optimizer.step()
    assert seen.state_bytes(list(model.parameters()), CPU) == 128
    seen.stop()


def compiled_steps(is_watched):
    """Graphs and graph breaks of a compiled step, with the reasons."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = Optimizers()
    if is_watched:
        seen.start()
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        compiled()
    seen.stop()
    assert (seen.state_bytes(list(model.parameters()), CPU) > 0) == is_watched
    counters = torch._dynamo.utils.counters
    return dict(counters["graph_break"]), counters["stats"]["calls_captured"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_found_and_has_no_further_graphs():
    plain = compiled_steps(is_watched=False)
    assert compiled_steps(is_watched=True) == plain
    assert plain[1] > 0


# -- how long ----------------------------------------------------------------------------------------------------------


def test_the_watch_ends_with_a_plan():
    model, before = make(), len(hooks)
    handle = ebbtide.offload(model, **SETTINGS)
    optimizer = adam(model)
    for k in range(5):
        assert len(hooks) == before + (k < 4)
        train(model, optimizer, 1)
    assert handle._planning.controller.phase is Phase.PLANNED
    known = handle.profile
    handle.remove()
    ebbtide.offload(model, profile=known, **SETTINGS)
    assert len(hooks) == before


@pytest.mark.parametrize(
    "end",
    [
        lambda handle: handle.remove(),
        lambda handle: handle.set_recipe("recompute"),
        lambda handle: handle.set_plan(ebbtide.Plan({})),
    ],
    ids=["remove", "set_recipe", "set_plan"],
)
def test_the_watch_ends_with_a_plan_of_the_user(end):
    model, before = make(), len(hooks)
    handle = ebbtide.offload(model, **SETTINGS)
    train(model, adam(model), 2)
    assert len(hooks) == before + 1
    end(handle)
    assert len(hooks) == before


def test_the_watch_ends_with_an_error():
    model, before = make(), len(hooks)
    ebbtide.offload(model, budget="1MiB", **SETTINGS)
    with pytest.raises(PlanError):
        train(model, adam(model))
    assert len(hooks) == before


def test_the_watch_ends_if_offload_refuses():
    before = len(hooks)
    with pytest.raises(PlanError):
        ebbtide.offload(nn.Linear(8, 8), **SETTINGS)
    assert len(hooks) == before


def test_the_watch_ends_with_a_dry_run():
    before = len(hooks)
    ebbtide.plan(make(), batch(0), budget=a_large_budget(), **SETTINGS)
    assert len(hooks) == before


def test_the_watch_ends_with_the_model_and_the_optimizer():
    model, before = make(), len(hooks)
    optimizer = adam(model)
    ebbtide.offload(model, **SETTINGS)
    train(model, optimizer, 2)
    living = [weakref.ref(model), weakref.ref(optimizer)]
    del optimizer
    gc.collect()
    assert living[1]() is None
    del model
    gc.collect()
    assert living[0]() is None
    assert len(hooks) == before
