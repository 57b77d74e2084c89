"""The device of a model: known without a walk, and never out of date."""

import copy
import gc

import pytest
import torch
from control.test_controller import SETTINGS, Stack, make
from torch import nn

import ebbtide
from ebbtide._model.placement import PlacementCache, device_of, made_for

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


class Walked(Stack):
    """Counts the walks over all modules."""

    walks = 0

    def named_modules(self, *args, **kwargs):
        self.walks += 1
        return super().named_modules(*args, **kwargs)


def small_and_large():
    return nn.ModuleList([nn.Linear(8, 8), nn.ModuleList(nn.Linear(64, 64) for _ in range(20))])


def test_a_model_that_stays_is_walked_once():
    model = Walked()
    placement = PlacementCache(model)
    assert {placement.device() for _ in range(100)} == {CPU}
    assert model.walks == 1


def test_a_handle_does_not_walk_its_model_to_find_its_engine():
    model = Walked()
    handle = ebbtide.offload(model, **SETTINGS)
    engine = handle._attachment.engine()
    before = model.walks
    assert [handle._attachment.engine() for _ in range(10)] == [engine] * 10
    assert engine is not None
    assert model.walks == before


MOVES = {
    "all of it": lambda model: model.to(META),
    "most of it": lambda model: model[1].to(META),
    "what is small": lambda model: model[0].to(META),
    "nearly half of it": lambda model: [layer.to(META) for layer in model[1][:8]],
    "modules put in the place of others": lambda model: model.insert(1, model[1].__class__(
        [copy.deepcopy(layer).to(META) for layer in model.pop(1)]
    )),
    "parameters put in the place of others": lambda model: model.load_state_dict(
        copy.deepcopy(model).to(META).state_dict(), assign=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", MOVES)
def test_a_move_is_noticed(how):
    model = small_and_large()
    placement = PlacementCache(model)
    assert placement.device() == CPU
    MOVES[how](model)
    gc.collect()
    assert placement.device() == device_of(model)
    model.to_empty(device=CPU)
    assert placement.device() == CPU


def test_later_parameters_are_seen():
    model = nn.ModuleList([nn.ReLU()])
    placement = PlacementCache(model)
    assert placement.device() is None
    model.append(nn.Linear(8, 8, device=META))
    assert placement.device() == META


def test_the_device_is_the_one_with_most_bytes():
    model = nn.ModuleList([nn.Linear(64, 64), *(nn.Linear(60, 60, device=META) for _ in range(2))])
    assert PlacementCache(model).device() == META


def test_a_handle_notices_a_move():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    assert handle._attachment.engine() is not None
    model.to(META)
    assert handle._attachment.engine() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_parts_of_torch_script_are_skipped():
    model = make()
    model.scripted = torch.jit.script(nn.Linear(2, 2))
    assert PlacementCache(model).device() == CPU
    assert PlacementCache(model.scripted).device() == CPU


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_a_profile_serves_a_model_offloaded_before_and_after_it_is_sharded(process_group):
    """`fully_shard` replaces the class, FSDP1 wraps the module."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = make()
    before = made_for(model, CPU)
    fully_shard(model)
    assert type(model).__name__ == "FSDPStack"
    assert made_for(model, CPU) == before
    assert before["model"].startswith("Stack, ")
    assert before["ranks"] == "1"
    wrapped = FullyShardedDataParallel(make(), device_id=CPU)
    assert made_for(wrapped, CPU)["model"].startswith("FullyShardedDataParallel, ")
