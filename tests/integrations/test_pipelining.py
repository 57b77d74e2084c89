"""Stages of torch's pipelines, processes on gloo: stages compute as their twins do, by recipes and within budgets."""

import gc
import itertools
import json
import os
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from control.test_controller import SETTINGS, WIDTH, Block
from integrations.test_layouts import enlarged
from processes import RANKS, join, spawn
from support import bits
from torch import nn
from torch._functorch import config
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
from ebbtide import ConfigError, EventKind, ModuleError, Plan, PlanError, Profile, Recipe, RegionPlan
from ebbtide._engine.derive import DerivedTicket
from ebbtide._engine.parcel import Parcel, Ticket
from ebbtide._planner.view import view_of_plan
from ebbtide._recompute.frame import Holder
from ebbtide._utils.sizes import GIB

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


def staged_late(rank, folder, ranks, forwards):
    """A stage after some forwards outside of a pipeline; in a mesh the ranks of the stage are unknown."""
    torch.set_num_threads(1)
    join(rank, folder, ranks=ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "pp"))
    at, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    found = []
    module, twin = part(at), part(at)
    handle = ebbtide.offload(module, **within(), **SETTINGS)
    try:
        for each in (twin, module):
            for _ in range(forwards):
                each(torch.ones(4, WIDTH)).sum().backward()
            stage = PipelineStage(each, at, 2, CPU, group=group)
            schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
            found.append(train(schedule, each, at))
        write_down(rank, folder, [found[0] == found[1], handle.plan.status])
    except Exception as error:  # torch raises its own, with ours as the reason
        while error is not None and not isinstance(error, ConfigError):
            error = error.__cause__ or error.__context__
        write_down(rank, folder, [str(error)])
        os._exit(0)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("forwards", [1, 3])
def test_a_module_that_becomes_a_stage_after_some_forwards_plans_alone(tmp_path, forwards):
    spawn(staged_late, str(tmp_path), RANKS, forwards)
    assert read(tmp_path) == [[True, ""]] * RANKS


def test_a_module_that_becomes_a_stage_of_unknown_ranks_is_refused(tmp_path):
    """On the ranks of the first stage, whose end ends the ranks of the second."""
    spawn(staged_late, str(tmp_path), 4, 1, ranks=4)
    for rank, (error,) in enumerate(read(tmp_path, ranks=4)):
        assert rank % 2 == 1 or "Name them with process_group=" in error


# -- schedules that tell what comes next -------------------------------------------------------------------------------

LOOPED = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"ZBVZeroBubble": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
ALL = {**SCHEDULES, **LOOPED, **V_SHAPED}
NEWEST_BYTES = 8192  # of a block, the tensor saved last
GRAPH_BYTES = 60 * 1024  # hardly more than a microbatch saves in a stage of three blocks
STEPS = 20
BATCHES = 4  # weights stay, hence steps of equal batches have equal gradients


class Blocks(Part):
    def __init__(self):
        super().__init__()
        self.layers.extend([Block(), Block()])


def stage_numbers(name, rank, ranks):
    if name in SCHEDULES:
        return [rank]
    return [rank, (2 * ranks - 1 - rank) if name in V_SHAPED else (ranks + rank)]


class Pipeline:
    """The part of a rank. `prepare` is called with each module before the stage is made."""

    def __init__(self, name, rank, ranks, prepare=lambda module: None, **settings):
        self.numbers = stage_numbers(name, rank, ranks)
        self.modules, stages, self.total = [], [], ranks * len(self.numbers)
        for number in self.numbers:
            torch.manual_seed(number)
            self.modules.append(Blocks())
            prepare(self.modules[-1])
            stages.append(PipelineStage(self.modules[-1], number, self.total, CPU))
        self.microbatches = 2 * ranks
        self.rows = 8 * self.microbatches
        self.schedule = ALL[name](
            stages[0] if name in SCHEDULES else stages,
            self.microbatches,
            loss_fn=lambda out, target: (out - target).square().mean(),
        )
        store = {"store": "mock", "min_bytes": 1}
        if not settings.keys() & {"budget", "plan"}:
            store |= {"window": "1KiB", "prefetch": GRAPH_BYTES}
        profiles = settings.pop("profiles", [None] * len(self.modules))
        pairs = zip(self.modules, profiles, strict=True) if settings else ()
        self.handles = [ebbtide.offload(m, **store, **settings, profile=profile) for m, profile in pairs]

    def step(self, k):
        for module in self.modules:
            module.zero_grad()
        seed = torch.Generator().manual_seed(k % BATCHES)
        x, target = torch.randn(2, self.rows, WIDTH, generator=seed)
        losses = []
        last = {"target": target, "losses": losses} if self.total - 1 in self.numbers else {}
        # Otherwise torch keeps the outputs of the last stage, with their graphs, until the next step.
        self.schedule.step(*([x] if 0 in self.numbers else []), **last, return_outputs=False)
        return [bits(t).hex() for m in self.modules for t in (*losses, *(p.grad for p in m.parameters()))]

    def totals(self):
        stats = [handle.stats() for handle in self.handles]
        return [sum(getattr(each, name).nbytes for each in stats) for name in ("out", "inbound", "misses")]


def count(is_counted):
    """Living objects of a kind: of all that no collection has freed yet."""
    kinds = Counter(map(type, gc.get_objects()))
    return sum(count for kind, count in kinds.items() if is_counted(kind))


def is_of_a_graph(kind):
    return kind in (Ticket, DerivedTicket, Holder, Parcel)


def is_ours(kind):
    # Profiles, plans and histories of steps change while plans are corrected, and are bounded.
    parts = tuple(f"ebbtide.{name}" for name in ("_engine", "_stores", "_devices", "_recompute", "_model"))
    return str(kind.__module__).startswith(parts) or issubclass(kind, torch.Tensor)


def half_the_room(name, rank, ranks):
    """A goal with room for half of what the rank saves: something has to move, or to be recomputed."""
    pipeline = Pipeline(name, rank, ranks, **within())
    gc.disable()  # a timed step with a full collection would be repeated
    for k in range(3):
        pipeline.step(k)
    gc.enable()
    profiles = [enlarged(handle._planning.conclude()) for handle in pipeline.handles]  # a plan would take seconds
    for handle in pipeline.handles:
        handle.remove()
    saved_bytes = sum(each.graphs * sum(region.saved_bytes for region in each.regions) for each in profiles)
    return {"budget": GIB + saved_bytes // 2, "profiles": profiles}


def by_every_schedule(rank, folder, ranks, settings, names=tuple(ALL), is_attached=True, keeps_split=True):
    torch.set_num_threads(1)
    join(rank, folder, ranks=ranks)
    gc.freeze()  # imported modules: without them objects are counted in no time
    found = {}
    for name in names:
        twin = Pipeline(name, rank, ranks)
        expected = [twin.step(k) for k in range(BATCHES)]
        pipeline = Pipeline(name, rank, ranks, **(settings or half_the_room(name, rank, ranks)))
        attached = ebbtide.pipeline.attach(pipeline.schedule, keeps_split=keeps_split) if is_attached else None
        is_equal, counts, alive, held, on_demand = True, [], [], [], []
        for k in range(STEPS):
            before = pipeline.totals()  # and reads timings: those not read stay, up to a limit
            gc.collect()
            counts.append(count(is_ours))
            gc.disable()
            is_equal &= pipeline.step(k) == expected[k % BATCHES]
            alive.append(count(is_of_a_graph))
            held.append(sum(handle.stats().host_bytes for handle in pipeline.handles))
            gc.enable()
            out, back, missed = (now - then for now, then in zip(pipeline.totals(), before, strict=True))
            on_demand.append(missed / max(1, back))
        gc.collect()
        counts.append(count(is_ours))
        # Plans that change, and times that are measured, take objects in some steps; a leak takes them in all.
        far = BATCHES if settings is None else STEPS - BATCHES
        grown = min(later - before for before, later in zip(counts[BATCHES:], counts[BATCHES + far :], strict=False))
        stats = [handle.stats() for handle in pipeline.handles]
        moves = [each.out.count + each.recomputed.count > 0 for each in stats]
        plans_to = [not handle.plan.keeps_all for handle in pipeline.handles]  # or to derive
        found[name] = {
            "equal": is_equal, "does": all(moves) if settings else any(plans_to),
            "back": back / max(1, out), "first": on_demand[0], "later": max(on_demand[1:]),
            "settled": max(on_demand[3:]),
            "alive": max(alive), "held": max(held), "grown": max(grown, 0),
        }  # fmt: skip
        if attached is not None:
            attached.remove()
            found[name] |= {
                "out of turn": attached.out_of_turn, "of the stages": all(attached.held_bytes.values()),
            }  # fmt: skip
        for handle in pipeline.handles:
            handle.remove()
    write_down(rank, folder, found)
    dist.barrier()
    os._exit(0)


RECIPES = [{"mode": "all"}, {"recipe": "recompute"}, {"recipe": "selective"}]
AS_ITS_TWIN = {"equal": True, "does": True, "alive": 0, "held": 0, "grown": 0}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("settings", RECIPES, ids=str)
def test_an_attached_schedule_needs_hardly_anything_on_demand_from_the_first_step_on(tmp_path, ranks, settings):
    """With room to fetch one microbatch ahead. Nothing comes back twice, also if backward is split."""
    spawn(by_every_schedule, str(tmp_path), ranks, settings, ranks=ranks)
    for found in read(tmp_path, ranks):
        for name, each in found.items():
            assert each.pop("back") <= 1.02, name
            assert each.pop("first") <= 0.05, name
            assert each == {**AS_ITS_TWIN, "later": 0, "settled": 0, "out of turn": 0, "of the stages": True}, name


@pytest.mark.parametrize("settings", RECIPES, ids=str)
def test_without_attach_hardly_anything_comes_on_demand_once_the_order_is_known(tmp_path, settings):
    """With a split backward too, where much comes back twice."""
    spawn(by_every_schedule, str(tmp_path), RANKS, settings, tuple(ALL), False)
    for found in read(tmp_path):
        for name, each in found.items():
            assert {key: each[key] for key in AS_ITS_TWIN} == AS_ITS_TWIN, name
            assert each["settled"] <= 0.01, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_compute_as_their_twins_within_a_budget(tmp_path, ranks):
    """Of one stage on a rank, or of two that share the budget."""
    spawn(by_every_schedule, str(tmp_path), ranks, None, ranks=ranks)
    for found in read(tmp_path, ranks):
        for name, each in found.items():
            assert {key: each[key] for key in AS_ITS_TWIN} == AS_ITS_TWIN, name
            assert each["out of turn"] == 0, name


def test_a_split_backward_may_bring_tensors_back_twice(tmp_path):
    """For less memory between the halves."""
    names = ("InterleavedZeroBubble", "ZBVZeroBubble")
    spawn(by_every_schedule, str(tmp_path), RANKS, {"mode": "all"}, names, True, False)
    back = []
    for found in read(tmp_path):
        for each in found.values():
            assert {key: each[key] for key in AS_ITS_TWIN} == AS_ITS_TWIN
            assert each["out of turn"] == 0
            back.append(each["back"])
    assert max(back) > 1.1


# -- what plans expect -------------------------------------------------------------------------------------------------


def by_region(copies):
    """Neighbours of one region in a row of (region, bytes) as one."""
    groups = itertools.groupby(copies, key=lambda copy: copy[0])
    return [[region, sum(nbytes for _, nbytes in group)] for region, group in groups]


def beside_the_simulator(rank, folder, name, window, prefetch):
    """Writes down for each stage what leaves and what comes back in a step, by region: measured, and simulated."""
    torch.set_num_threads(1)
    join(rank, folder)
    measured = Pipeline(name, rank, RANKS, **within())
    for k in range(BATCHES):
        measured.step(k)
    profiles = [handle.profile for handle in measured.handles]
    for handle in measured.handles:
        handle.remove()
    moves = RegionPlan(Recipe("offload"), ((0, window),), prefetch)
    stays = RegionPlan(Recipe("keep"), ((0, window),), prefetch)
    # The input of the first block lives in the batch, or in a buffer.
    plan = Plan({"layers.0": stays, "layers.1": moves, "layers.2": moves}, outside=RegionPlan("keep"))
    pipeline = Pipeline(name, rank, RANKS, plan=plan)
    ebbtide.pipeline.attach(pipeline.schedule)
    found = []
    for handle, profile in zip(pipeline.handles, profiles, strict=True):
        copies = view_of_plan(profile, plan).timeline.intervals
        in_a_step = 2 * RANKS // (len(profile.order) // 2)  # the order repeats itself
        rows = {
            lane: [
                (each.region, each.nbytes) for each in sorted(copies, key=lambda each: each.end_s) if each.lane == lane
            ]
            for lane in ("out", "back")
        }
        events = []
        handle.subscribe(events.append)
        found.append([{lane: by_region(row * in_a_step) for lane, row in rows.items()}, events])
    for k in range(STEPS):
        for _, events in found:
            events.clear()
        pipeline.step(k)
    kinds = {"out": (EventKind.RELEASED,), "back": (EventKind.FETCHED, EventKind.MISSED)}
    for each in found:
        rows = {
            lane: [(event.site.partition("#")[0], event.nbytes) for event in each[1] if event.kind in kinds[lane]]
            for lane in kinds
        }
        each[1] = {lane: by_region(row) for lane, row in rows.items()}
    write_down(rank, folder, found)
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("window", [0, 3000])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"])
def test_what_leaves_and_comes_back_is_what_the_simulator_says(tmp_path, name, window):
    """In the same order of graphs and regions. A stage alone on a rank moves the same bytes; of two stages, the newest
    parcel of a forward may leave during the forward of the other stage, which the simulator does not see."""
    spawn(beside_the_simulator, str(tmp_path), name, window, 9000)
    for simulated, measured in itertools.chain(*read(tmp_path)):
        for lane, expected in simulated.items():
            more = [own[1] - each[1] for own, each in zip(measured[lane], expected, strict=True)]
            assert [region for region, _ in measured[lane]] == [region for region, _ in expected]
            assert len(expected) == 2 * 2 * RANKS  # two regions of each microbatch
            assert set(more) <= ({0} if name in SCHEDULES else {0, NEWEST_BYTES})


# -- in one process ----------------------------------------------------------------------------------------------------


def compare(name, settings, steps=3, rows=None, prepare=lambda module: None):
    """Steps of a rank that has all stages, attached, with bytes equal to the twin's. Returns the pipeline."""
    found = []
    for options in ({}, settings):
        pipeline = Pipeline(name, 0, 1, prepare, **options)
        pipeline.rows = rows or pipeline.rows
        attached = ebbtide.pipeline.attach(pipeline.schedule) if options else None
        found.append([pipeline.step(k) for k in range(steps)])
    assert found[0] == found[1]
    assert attached.out_of_turn == 0
    for handle in pipeline.handles:
        handle.remove()
    return pipeline


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, each) for name in ALL for each in RECIPES), *((name, {"budget": "64GiB"}) for name in ALL)],
)
def test_microbatches_of_different_sizes(process_group, name, settings):
    """Of 9 and 8 rows. Between ranks, torch sends tensors of one shape only."""
    pipeline = compare(name, settings, steps=6, rows=17)
    assert all(handle.stats().unable == {} for handle in pipeline.handles)
    assert "budget" in settings or all(handle.stats().out.count for handle in pipeline.handles)


def compile_blocks(module):
    for block in module.layers:
        block.compile(backend="aot_eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of an input
def test_compiled_blocks_under_a_split_backward_are_refused(process_group):
    """torch's own error comes in the middle of the first step."""
    pipeline = Pipeline("InterleavedZeroBubble", 0, 1, compile_blocks, mode="all")
    with pytest.raises(ConfigError, match=r"stage 0 has modules compiled in place.*donated_buffer = False"):
        ebbtide.pipeline.attach(pipeline.schedule)
    with pytest.raises(RuntimeError, match="backward"):
        pipeline.step(0)
    compare("Interleaved1F1B", {"mode": "all"}, prepare=compile_blocks)
    torch._dynamo.reset()
    with config.patch(donated_buffer=False):
        for settings in RECIPES:
            compare("InterleavedZeroBubble", settings, prepare=compile_blocks)


def without_layers(module):
    """The first stage has all blocks, the second passes on what comes."""
    if torch.initial_seed() == 1:
        del module.layers[:]


@pytest.mark.parametrize("name", [*LOOPED, *V_SHAPED])
@pytest.mark.filterwarnings("ignore:offload.Blocks. moved nothing in its first forward. autograd saved nothing")
def test_more_stages_than_layers(process_group, name):
    """Everything moved; a recipe or a goal for such a stage is an error before the first step."""
    first, second = compare(name, {"mode": "all"}, prepare=without_layers).handles
    assert first.stats().out.count > 0
    assert second.stats().out.count == 0
    for settings, error, text in (
        ({"recipe": "recompute"}, ModuleError, "Blocks has no repeated blocks to give recipe='recompute' to"),
        ({"budget": "64GiB"}, PlanError, "Blocks has no parameters"),
        ({}, PlanError, "Blocks has no parameters"),
    ):
        module = Blocks()
        del module.layers[:]
        with pytest.raises(error, match=text):
            ebbtide.offload(module, **settings)


def test_stages_without_offload_are_named(process_group):
    pipeline, twin = Pipeline("ZBVZeroBubble", 0, 1, mode="all"), Pipeline("ZBVZeroBubble", 0, 1)
    pipeline.handles.pop().remove()
    attached = ebbtide.pipeline.attach(pipeline.schedule)
    assert attached.not_offloaded == [1]
    assert [pipeline.step(k) for k in range(2)] == [twin.step(k) for k in range(2)]
    pipeline.handles[0].remove()


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
    assert group_of(owned, None) is group_of(other, None) is ThisRank.ALONE
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
    from torch.distributed.pipelining.schedules import _ComputationType as Type

    schedule.register_custom_function(Type.UNSHARD, lambda *_: None)  # computes nothing
    attached = ebbtide.pipeline.attach(schedule)
    schedule.register_custom_function(Type.RESHARD, lambda *_: None)
    for each in (Type.FORWARD, Type.OVERLAP_F_B):
        with pytest.raises(ConfigError, match=r"is under attach.*functions registered by register_custom_function"):
            schedule.register_custom_function(each, lambda *_: None)
    attached.remove()
    schedule.register_custom_function(Type.FORWARD, lambda *_: None)
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
