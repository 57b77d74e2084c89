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
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import ebbtide
from ebbtide import ConfigError, Profile
from ebbtide._engine.timetable import Site

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


# -- schedules that tell what comes next -------------------------------------------------------------------------------

LOOPED = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"ZBVZeroBubble": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
ALL = {**SCHEDULES, **LOOPED, **V_SHAPED}
GRAPH_BYTES = 60 * 1024  # hardly more than a microbatch saves in a stage of three blocks


class Blocks(Part):
    def __init__(self):
        super().__init__()
        self.layers.extend([Block(), Block()])


def stage_numbers(name, rank, ranks):
    if name in SCHEDULES:
        return [rank]
    return [rank, (2 * ranks - 1 - rank) if name in V_SHAPED else (ranks + rank)]


class Pipeline:
    """The part of a rank."""

    def __init__(self, name, rank, ranks, **settings):
        self.numbers = stage_numbers(name, rank, ranks)
        self.modules, stages, self.total = [], [], ranks * len(self.numbers)
        for number in self.numbers:
            torch.manual_seed(number)
            self.modules.append(Blocks())
            stages.append(PipelineStage(self.modules[-1], number, self.total, CPU))
        self.microbatches = 2 * ranks
        self.schedule = ALL[name](
            stages[0] if name in SCHEDULES else stages,
            self.microbatches,
            loss_fn=lambda out, target: (out - target).square().mean(),
        )
        store = {"store": "mock", "min_bytes": 1, "window": "1KiB", "prefetch": GRAPH_BYTES}
        self.handles = [ebbtide.offload(m, **store, **settings) for m in self.modules] if settings else []

    def step(self, k):
        for module in self.modules:
            module.zero_grad()
        x, target = torch.randn(2, 8 * self.microbatches, WIDTH, generator=torch.Generator().manual_seed(k))
        losses = []
        last = {"target": target, "losses": losses} if self.total - 1 in self.numbers else {}
        # Otherwise torch keeps the outputs of the last stage, with their graphs, until the next step.
        self.schedule.step(*([x] if 0 in self.numbers else []), **last, return_outputs=False)
        return [bits(t).hex() for m in self.modules for t in (*losses, *(p.grad for p in m.parameters()))]

    def totals(self):
        stats = [handle.stats() for handle in self.handles]
        return [sum(getattr(each, name).nbytes for each in stats) for name in ("out", "inbound", "misses")]


def sites():
    gc.collect()
    return sum(type(each) is Site for each in gc.get_objects())


def by_every_schedule(rank, folder, ranks, settings, names=tuple(ALL), keeps_split=True):
    torch.set_num_threads(1)
    join(rank, folder, ranks=ranks)
    found = {}
    for name in names:
        pipeline, twin = Pipeline(name, rank, ranks, **settings), Pipeline(name, rank, ranks)
        attached = ebbtide.pipeline.attach(pipeline.schedule, keeps_split=keeps_split)
        is_equal, held, on_demand = True, [], []
        for k in range(6):
            before = pipeline.totals()
            if k == 3:
                known = sites()
            gc.disable()
            is_equal &= pipeline.step(k) == twin.step(k)
            held.append(sum(handle.stats().host_bytes for handle in pipeline.handles))
            gc.enable()
            out, back, missed = (now - then for now, then in zip(pipeline.totals(), before, strict=True))
            on_demand.append(missed / back)
        attached.remove()
        found[name] = {
            "equal": is_equal, "moved": out > 0, "back": back / out, "first": on_demand[0], "later": max(on_demand[1:]),
            "held": max(held),
            "grown": sites() - known, "out of turn": attached.out_of_turn,
            "of the stages": all(attached.held_bytes.values()),
        }  # fmt: skip
        for handle in pipeline.handles:
            handle.remove()
    write_down(rank, folder, found)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {"mode": "all"}), (4, {"mode": "all"}), (2, {"recipe": "recompute"}), (2, {"recipe": "selective"})],
)
def test_an_attached_schedule_needs_hardly_anything_on_demand_from_the_first_step_on(tmp_path, ranks, settings):
    """With room to fetch one microbatch ahead. Nothing comes back twice, also if backward is split."""
    spawn(by_every_schedule, str(tmp_path), ranks, settings, ranks=ranks)
    for found in read(tmp_path, ranks):
        for name, each in found.items():
            assert each.pop("back") <= 1.02, name
            assert each.pop("first") <= 0.05, name
            assert each == {
                "equal": True, "moved": True, "later": 0, "held": 0, "grown": 0, "out of turn": 0,
                "of the stages": True,
            }, name  # fmt: skip


def test_a_split_backward_may_bring_tensors_back_twice(tmp_path):
    """For less memory between the halves."""
    names = ("InterleavedZeroBubble", "ZBVZeroBubble")
    spawn(by_every_schedule, str(tmp_path), 2, {"mode": "all"}, names, False)
    back = []
    for found in read(tmp_path):
        for each in found.values():
            assert each["equal"]
            assert (each["held"], each["grown"], each["out of turn"]) == (0, 0, 0)
            back.append(each["back"])
    assert max(back) > 1.1


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


# -- errors of attach --------------------------------------------------------------------------------------------------


def two_stages(module=None):
    stage = PipelineStage(module or part(0), 0, 2, CPU)
    return stage, Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)


def test_attach_names_what_it_needs(one_of_two_ranks):
    stage, schedule = two_stages()
    with pytest.raises(ConfigError, match=r"attach\(Part\): expected a schedule"):
        ebbtide.pipeline.attach(stage.submod)
    with pytest.raises(ConfigError, match=r"no stage is under offload\(\); write ebbtide.offload\(stage.submod\)"):
        ebbtide.pipeline.attach(schedule)
    handle = ebbtide.offload(stage.submod, recipe="offload", **SETTINGS)
    attached = ebbtide.pipeline.attach(schedule)
    with pytest.raises(ConfigError, match="attached already"):
        ebbtide.pipeline.attach(schedule)
    attached.remove()
    attached.remove()
    assert not {"forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"} & vars(stage).keys()
    ebbtide.pipeline.attach(schedule).remove()
    handle.remove()


def test_functions_of_the_user_in_place_of_actions_are_refused(one_of_two_ranks):
    stages = [PipelineStage(part(k), k, 4, CPU) for k in (0, 2)]
    handle = ebbtide.offload(stages[0].submod, recipe="offload", **SETTINGS)
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    from torch.distributed.pipelining.schedules import _ComputationType

    schedule.register_custom_function(_ComputationType.FORWARD, lambda *_: None)
    with pytest.raises(ConfigError, match="functions registered by register_custom_function"):
        ebbtide.pipeline.attach(schedule)
    handle.remove()


def test_an_unknown_schedule_goes_without_attach(one_of_two_ranks):
    class Mine(Schedule1F1B):
        pass

    stage, _ = two_stages()
    handle = ebbtide.offload(stage.submod, recipe="offload", **SETTINGS)
    with pytest.raises(ConfigError, match=r"attach\(Mine\): expected a schedule .* that tells its order"):
        ebbtide.pipeline.attach(Mine(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss))
    handle.remove()


def test_actions_out_of_turn_are_counted_and_right(one_of_two_ranks, caplog):
    """In an order that no schedule has, of a stage with methods of its own."""
    module, twin = Blocks(), Blocks()
    twin.load_state_dict(module.state_dict())
    inputs = [torch.randn(4, WIDTH) for _ in range(3)]
    (stage, schedule), (other, _) = two_stages(module), two_stages(twin)

    def own(each, part, outputs):
        each.has_backward = True
        each.forward_one_chunk = lambda fwd_chunk_id: outputs.update({fwd_chunk_id: part(inputs[fwd_chunk_id])})
        each.backward_one_chunk = lambda bwd_chunk_id: outputs.pop(bwd_chunk_id).sum().backward()
        return each.forward_one_chunk

    first = own(stage, module, {})
    own(other, twin, {})
    handle = ebbtide.offload(module, mode="all", **SETTINGS)
    attached = ebbtide.pipeline.attach(schedule)
    for each in (stage, other):
        for kind, k in [("F", 2), ("F", 0), ("B", 0), ("F", 1), ("B", 2), ("B", 1)]:
            each.forward_one_chunk(k) if kind == "F" else each.backward_one_chunk(k)
    assert attached.out_of_turn > 0
    assert caplog.text.count("came where the schedule has") == 1
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert bits(mine.grad) == bits(its.grad)
    attached.remove()
    assert stage.forward_one_chunk is first
    handle.remove()
