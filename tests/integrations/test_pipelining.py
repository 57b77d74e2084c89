"""Stages of torch's pipelines, processes on gloo: stages compute as their twins do, by recipes and within budgets."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import ebbtide
from ebbtide import ConfigError, Profile

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


def read(folder, ranks=RANKS):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def as_its_twin(rank, folder, name, settings, has_budget=False):
    torch.set_num_threads(1)
    join(rank, folder)
    module, twin = part(rank), part(rank)
    if has_budget:
        settings = {**settings, **within(), "profile": f"{folder}/profile.json"}
    handle = ebbtide.offload(module, **settings, **SETTINGS)
    is_equal = train(staged(module, rank, name), module, rank) == train(staged(twin, rank, name), twin, rank)
    graphs = None if handle.profile is None or handle.plan.status else handle.profile.graphs
    write_down(rank, folder, [is_equal, list(handle.regions), handle.stats().recomputed.count, graphs])
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("name", "settings"), [("1F1B", {"recipe": "selective"}), ("GPipe", {"recipe": "recompute"}), ("1F1B", {})]
)
def test_a_stage_of_one_block_computes_as_its_twin(tmp_path, name, settings):
    spawn(as_its_twin, str(tmp_path), name, settings)
    for is_equal, regions, recomputed, _ in read(tmp_path):
        assert is_equal
        assert regions == ["layers.0"]
        assert (recomputed > 0) == ("recipe" in settings)


@pytest.mark.parametrize(("name", "graphs"), [("GPipe", [4, 4]), ("1F1B", [2, 1])])
def test_a_stage_alone_on_its_rank_plans_within_a_budget(tmp_path, name, graphs):
    """For all the forwards in flight."""
    spawn(as_its_twin, str(tmp_path), name, {}, True)
    assert [[is_equal, count] for is_equal, _, _, count in read(tmp_path)] == [[True, count] for count in graphs]
    files = [tmp_path / file for file in ("profile.json", "profile-rank1.json")]
    assert [Profile.load(file).graphs for file in files] == graphs


def in_a_mesh(rank, folder, name, names_ranks, is_staged_first, wrap):
    """Two stages on two ranks each. Writes down what training and planning come to, or the error, and where."""
    torch.set_num_threads(1)
    join(rank, folder, ranks=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group, at = mesh["pp"].get_group(), mesh.get_local_rank("pp")

    def whole():
        return nn.Sequential(part(at)) if wrap == "inner" else part(at)

    def pipeline(module):
        stage = PipelineStage(module, at, 2, CPU, group=group)
        return SCHEDULES[name](stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean())

    module, twin = whole(), whole()
    schedule = pipeline(module) if is_staged_first else None
    where = "offload"
    try:
        ranks = {"process_group": mesh["dp"].get_group()} if names_ranks else {}
        handle = ebbtide.offload(module[0] if wrap == "inner" else module, **within(), **ranks, **SETTINGS)
        where = "step"
        found = train(schedule or pipeline(module), module, at, steps=8)
    except Exception as error:  # torch raises its own, with ours as the reason
        while error is not None and not isinstance(error, ConfigError):
            error = error.__cause__ or error.__context__
        write_down(rank, folder, [where, str(error)])
        os._exit(0)
    is_equal = found == train(pipeline(twin), twin, at, steps=8)
    plan = {region: str(each.recipe) for region, each in handle.plan.regions.items()}
    write_down(rank, folder, [is_equal, plan, handle.plan.status])
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("is_staged_first", [True, False])
def test_the_ranks_of_a_stage_plan_together_within_a_budget(tmp_path, name, is_staged_first):
    spawn(in_a_mesh, str(tmp_path), name, True, is_staged_first, "", ranks=4)
    first, second, third, fourth = read(tmp_path, ranks=4)
    assert (first, second) == (third, fourth)
    for is_equal, plan, status in (first, second):
        assert is_equal
        assert plan
        assert status == ""


@pytest.mark.parametrize("wrap", ["", "inner"])
@pytest.mark.parametrize("is_staged_first", [True, False])
def test_a_budget_for_a_stage_of_unknown_ranks_is_refused(tmp_path, is_staged_first, wrap):
    """Before the first step if the stage is made later, by the first stage: later ones wait for it, and end with it."""
    spawn(in_a_mesh, str(tmp_path), "1F1B", False, is_staged_first, wrap, ranks=4)
    for rank, (where, error) in enumerate(read(tmp_path, ranks=4)):
        if is_staged_first or rank % 2 == 0:
            assert where == ("offload" if is_staged_first else "step")
            assert error.startswith("budget= or max_slowdown= for Part, a stage of a pipeline")
            assert "Name them with process_group=" in error


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
    from ebbtide._control.ranks import group_of

    schedules = {"__name__": "megatron.core.pipeline_parallel.schedules"}
    exec(MEGATRON, schedules)
    module = part(0)

    def step():
        assert group_of(module, None) is None
        return "goes on"

    if is_refused:
        with pytest.raises(ConfigError, match="a stage of a pipeline"):
            schedules[function](step)
    else:
        assert schedules[function](step) == "goes on"


def test_a_module_outside_of_stages_belongs_to_all_ranks(one_of_two_ranks):
    from ebbtide._control.ranks import ThisRank, group_of

    owned, other = part(0), part(0)
    stage = PipelineStage(owned, 0, 2, CPU)
    assert group_of(other, None) is None
    for module in (owned, owned.layers[0], nn.Sequential(owned)):
        assert group_of(module, None) is ThisRank.ALONE
        assert group_of(module, dist.group.WORLD) is dist.group.WORLD
        stage.group_size = 1  # of a job of two
        with pytest.raises(ConfigError, match="a stage of a pipeline"):
            group_of(module, None)
        stage.group_size = 2
    second = PipelineStage(other, 2, 4, CPU)
    for group in (None, dist.group.WORLD):
        with pytest.raises(ConfigError, match="one of several pipeline stages on this rank"):
            group_of(owned, group)
    del stage, second
    gc.collect()
    assert group_of(owned, None) is None
