"""Stages of torch's pipelines, two processes on gloo: stages compute as their twins do, and a budget is refused."""

import gc
import json
import os
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from control.test_controller import SETTINGS, WIDTH, Block
from processes import RANKS, join, spawn
from support import bits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import ebbtide
from ebbtide import ConfigError

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICROBATCHES = 4


class Part(nn.Module):
    """One block of a list, as in a model taken apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def part(rank):
    torch.manual_seed(rank)
    return Part()


def staged(module, rank, schedule):
    stage = PipelineStage(module, rank, RANKS, CPU)
    return SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean())


def train(schedule, module, rank, steps=5):
    found = []
    for k in range(steps):
        module.zero_grad()
        x, target = torch.randn(2, 4 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(k))
        losses = []
        schedule.step(*([x] if rank == 0 else []), target=target, losses=losses)
        found += [bits(t).hex() for t in (*losses, *(p.grad for p in module.parameters()))]
    return found


def within():
    return {"budget": psutil.Process().memory_info().rss + 2**34}


def write_down(rank, folder, result):
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))


def read(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def as_its_twin(rank, folder, name, settings):
    torch.set_num_threads(1)
    join(rank, folder)
    module, twin = part(rank), part(rank)
    handle = ebbtide.offload(module, **settings, **SETTINGS)
    is_equal = train(staged(module, rank, name), module, rank) == train(staged(twin, rank, name), twin, rank)
    write_down(rank, folder, [is_equal, list(handle.regions), handle.stats().recomputed.count])
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("name", "settings"), [("1F1B", {"recipe": "selective"}), ("GPipe", {"recipe": "recompute"}), ("1F1B", {})]
)
def test_a_stage_of_one_block_computes_as_its_twin(tmp_path, name, settings):
    spawn(as_its_twin, str(tmp_path), name, settings)
    for is_equal, regions, recomputed in read(tmp_path):
        assert is_equal
        assert regions == ["layers.0"]
        assert (recomputed > 0) == ("recipe" in settings)


def with_a_budget(rank, folder, is_staged_first, wrap):
    """Errors of offload(), and of the first step of the schedule."""
    torch.set_num_threads(1)
    join(rank, folder)
    module = nn.Sequential(part(rank)) if wrap == "inner" else part(rank)
    offloaded = module[0] if wrap == "inner" else module
    schedule = staged(module, rank, "1F1B") if is_staged_first else None
    errors = ["", ""]
    try:
        ebbtide.offload(offloaded, **within(), **SETTINGS)
    except ConfigError as error:
        errors[0] = str(error)
    else:
        schedule = schedule or staged(module, rank, "1F1B")
        try:
            train(schedule, module, rank)
        except Exception as error:  # torch raises its own, with ours as the reason
            while error is not None and not isinstance(error, ConfigError):
                error = error.__cause__ or error.__context__
            errors[1] = str(error)
    write_down(rank, folder, errors)
    os._exit(0)


@pytest.mark.parametrize("wrap", ["", "inner"])
def test_a_budget_for_a_stage_is_refused_by_every_rank(tmp_path, wrap):
    spawn(with_a_budget, str(tmp_path), True, wrap)
    for errors, _ in read(tmp_path):
        assert errors.startswith("budget= or max_slowdown= for Part, a stage of a pipeline")
        assert "Write recipe=" in errors


@pytest.mark.parametrize("wrap", ["", "inner"])
def test_a_budget_for_a_later_stage_is_refused_before_its_first_step(tmp_path, wrap):
    """By the first stage. Later stages wait for the first, and end with its process."""
    spawn(with_a_budget, str(tmp_path), False, wrap)
    (at_offload, in_step), (other_at_offload, _) = read(tmp_path)
    assert (at_offload, other_at_offload) == ("", "")
    assert in_step.startswith("budget= or max_slowdown= for Part, a stage of a pipeline")


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_of_two_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    gc.collect()


MEGATRON = """
def forward_backward_pipelining_without_interleaving(step):
    return step()

def forward_backward_no_pipelining(step):
    return step()
"""


@pytest.mark.parametrize(
    ("function", "is_refused"),
    [("forward_backward_pipelining_without_interleaving", True), ("forward_backward_no_pipelining", False)],
)
def test_schedules_of_megatron_are_known_by_name(one_of_two_ranks, function, is_refused):
    from ebbtide._control.ranks import refuse_pipeline

    schedules = {"__name__": "megatron.core.pipeline_parallel.schedules"}
    exec(MEGATRON, schedules)
    module = part(0)

    def step():
        refuse_pipeline(module)
        return "goes on"

    if is_refused:
        with pytest.raises(ConfigError, match="a stage of a pipeline"):
            schedules[function](step)
    else:
        assert schedules[function](step) == "goes on"


def test_a_module_outside_of_stages_may_have_a_budget(one_of_two_ranks):
    from ebbtide._control.ranks import refuse_pipeline

    owned, other = part(0), part(0)
    stage = PipelineStage(owned, 0, 2, CPU)
    refuse_pipeline(other)
    for module in (owned, owned.layers[0], nn.Sequential(owned)):
        with pytest.raises(ConfigError, match="a stage of a pipeline"):
            refuse_pipeline(module)
    del stage
    gc.collect()
    refuse_pipeline(owned)
