"""Ranks of one job follow one plan, and correct it together: equal regions are recomputed on all ranks, or collectives
would hang."""

import contextlib
import datetime
import itertools
import json
import os
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from control.scripted import controller_of, remembered, steps
from control.test_controller import SETTINGS, batch, make
from planner.workloads import GIB, layers, profile
from processes import LIMIT_S, RANKS, join, spawn
from support import bits
from torch import nn

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, PlanError
from ebbtide._control import tuner
from ebbtide._control.controller import Phase
from ebbtide._control.link_rates import LinkRatios
from ebbtide._control.ranks import Condition, Ranks, Summary, agreed_profile
from ebbtide._control.trial import Observation
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._profiling.merge_ranks import structure_of
from ebbtide._utils import distributed

STEPS = 6


def losses_and_gradients(model, rank):
    found = []
    for k in range(STEPS):
        model.zero_grad()
        loss = model(batch(10 * k + rank))
        loss.backward()
        found += [bits(loss).hex(), *[bits(p.grad).hex() for p in model.parameters()]]
    return found


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, folder)
    plain = losses_and_gradients(nn.parallel.DistributedDataParallel(make()), rank)
    model = nn.parallel.DistributedDataParallel(make())
    handle = ebbtide.offload(model, **within(), **SETTINGS)
    write_down(rank, folder, handle, losses_and_gradients(model, rank) == plain)


def compiled_work(rank: int, folder: str, is_late: bool) -> None:
    """`is_late`: one rank runs no backward in a measured step, and comes to the next meeting without the last round."""
    torch.set_num_threads(1)
    join(rank, folder)
    model, plain = make(), make()
    for layer in (*model.layers, *plain.layers):
        layer.compile(backend="aot_eager")
    handle = ebbtide.offload(model, **within(), **SETTINGS)
    is_equal = True
    for k in range(16):
        losses = [each(batch(10 * k + rank)) for each in (model, plain)]
        if not (is_late and rank == 1 and k == 6):
            for loss in losses:
                loss.backward()
        is_equal &= bits(losses[0]) == bits(losses[1])
        is_equal &= all(
            bits(p.grad) == bits(q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        )
    budgets = [[point.activation_memory_budget for point in region.points] for region in handle.profile.regions]
    write_down(rank, folder, handle, is_equal and budgets == [[0.75, 0.5] if is_late else [0.75, 0.5, 0.25, 0.0]] * 3)


def work_that_joins_late(rank: int, folder: str, steps_before: int, has_file: bool) -> None:
    """As far as ebbtide can see, the rank is alone until after these steps."""
    torch.set_num_threads(1)
    model = make()
    profile = f"{folder}/profile{rank}.json" if has_file else None
    handle = ebbtide.offload(model, profile=profile, **within(), **SETTINGS)
    for k in range(steps_before):
        model(batch(10 * k + rank)).backward()
    join(rank, folder)
    parallel = nn.parallel.DistributedDataParallel(model)
    ours = losses_and_gradients(parallel, rank)
    write_down(rank, folder, handle, ours == losses_and_gradients(nn.parallel.DistributedDataParallel(make()), rank))


def within():
    return {"budget": psutil.Process().memory_info().rss + 2**34}


def write_down(rank, folder, handle, is_equal):
    recipes = {name: str(region) for name, region in handle.plan.regions.items()}
    is_planned = handle._planning.controller.phase is Phase.PLANNED
    result = {"is_equal": is_equal, "is_planned": is_planned, "recipes": recipes, "time": handle.profile.plain_s}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # threads of gloo and reducers of DDP do not always end in good order with the interpreter


def check_one_plan(folder, ranks=RANKS):
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(result["is_equal"] and result["is_planned"] for result in results)
    assert all(result["recipes"] == results[0]["recipes"] for result in results)
    assert all(result["time"] == results[0]["time"] for result in results)


def test_two_ranks_have_one_plan(tmp_path):
    spawn(work, str(tmp_path))
    check_one_plan(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_with_compiled_blocks_measure_partitions_and_have_one_plan(tmp_path, is_late):
    spawn(compiled_work, str(tmp_path), is_late)
    check_one_plan(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("steps_before", "has_file"), [(0, False), (5, False), (5, True)])
def test_ranks_that_meet_after_they_were_offloaded_have_one_plan_too(tmp_path, steps_before, has_file):
    spawn(work_that_joins_late, str(tmp_path), steps_before, has_file)
    check_one_plan(tmp_path)


# -- who meets, and when -----------------------------------------------------------------------------------------------


def uneven_steps(rank: int, folder: str, ranks: int, steps: int) -> None:
    """Ranks have different numbers of forwards in a step, and gradients of all of them are added up."""
    torch.set_num_threads(1)
    join(rank, folder, ranks)
    plain = trained_unevenly(nn.parallel.DistributedDataParallel(make()), rank, steps)
    model = nn.parallel.DistributedDataParallel(make())
    handle = ebbtide.offload(model, **within(), **SETTINGS)
    write_down(rank, folder, handle, trained_unevenly(model, rank, steps) == plain)


def trained_unevenly(model, rank, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    forwards = 1 + rank % 3
    for k in range(steps):
        for j in range(forwards):
            with contextlib.nullcontext() if j == forwards - 1 else model.no_sync():
                loss = model(batch(100 * k + 10 * j + rank))
                loss.backward()
            found.append(bits(loss).hex())
        optimizer.step()
        found += [bits(p.grad).hex() for p in model.parameters()]
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("ranks", "steps"), [(2, STEPS), (4, 18)])
def test_ranks_meet_between_steps_however_many_forwards_each_has(tmp_path, ranks, steps):
    spawn(uneven_steps, str(tmp_path), ranks, steps, ranks=ranks)
    check_one_plan(tmp_path, ranks)


def some_of_the_ranks(rank: int, folder: str, ranks: int, has_file: bool) -> None:
    """The last rank has something else to do."""
    torch.set_num_threads(1)
    join(rank, folder, ranks)
    group = dist.new_group(list(range(ranks - 1)))
    if rank == ranks - 1:
        dist.barrier()
        os._exit(0)

    def parallel():
        return nn.parallel.DistributedDataParallel(make(), process_group=group)

    model, profile = parallel(), f"{folder}/profile.json" if has_file else None
    handle = ebbtide.offload(model, process_group=group, profile=profile, **within(), **SETTINGS)
    ours = losses_and_gradients(model, rank)
    write_down(rank, folder, handle, ours == losses_and_gradients(parallel(), rank))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "has_file"), [(2, False), (3, False), (3, True)])
def test_the_ranks_of_a_group_agree_without_the_others(tmp_path, ranks, has_file):
    spawn(some_of_the_ranks, str(tmp_path), ranks, has_file, ranks=ranks)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks - 1)]
    assert all(result["is_equal"] and result["is_planned"] for result in results)
    assert len({result["time"] for result in results}) == 1
    assert (tmp_path / "profile.json").exists() == has_file


def only_one_trains(rank: int, folder: str) -> None:
    store = join(rank, folder, limit_s=1.0)
    if rank == 1:
        store.wait(["raised"], datetime.timedelta(seconds=LIMIT_S))
        os._exit(0)
    distributed._WARN_AFTER_S = 0.0
    model = make()
    ebbtide.offload(model, **within(), **SETTINGS)
    with pytest.warns(EbbtideWarning) as warned, pytest.raises(PlanError) as raised:
        losses_and_gradients(model, rank)
    Path(f"{folder}/raised.json").write_text(json.dumps([str(raised.value), *(str(each.message) for each in warned)]))
    store.set("raised", "")
    os._exit(0)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    spawn(only_one_trains, str(tmp_path))
    error, *warned = json.loads((tmp_path / "raised.json").read_text())
    for expected_text in (error, next(each for each in warned if "rank" in each)):
        assert "waits for 1 of 2 ranks to agree on a plan for Stack" in expected_text
        assert "rank 1 has not come" in expected_text
        assert "process_group=" in expected_text


UNEQUAL = {  # on rank 0 and on rank 1
    "max_slowdown": ({"max_slowdown": 0.25}, {"max_slowdown": 0.5}),
    "goals": ({"max_slowdown": 0.25}, {"budget": "64GiB"}),
    "profiles": ({"budget": "64GiB"}, {"budget": "64GiB", "profile": "profile.json"}),
    "regions": ({"budget": "64GiB"}, {"budget": "64GiB", "regions": ["layers.0"]}),
    "blocks": ({"budget": "64GiB", "depth": 2}, {"budget": "64GiB"}),
}


def unequal_options(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, folder)
    os.chdir(folder)
    found = {}
    for name, each in UNEQUAL.items():
        settings = dict(each[rank])
        model = make(settings.pop("depth", 3))
        try:
            ebbtide.offload(model, **settings, **SETTINGS)
            model(batch(rank))
            found[name] = "goes on"
        except PlanError as error:
            found[name] = str(error)
    handle = ebbtide.offload(make(), budget=2**36 * (1 + rank), **SETTINGS)
    losses_and_gradients(handle._attachment.module, rank)
    found["budgets"] = handle.stats().budget_bytes
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def test_options_that_differ_are_an_error_on_all_ranks_before_the_first_step(tmp_path):
    """Of different budgets the smallest holds."""
    spawn(unequal_options, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    assert first == second
    assert first.pop("budgets") == 2**36
    for text in first.values():
        assert text.startswith("ranks differ in")
        assert "process_group=" in text
    assert "max_slowdown= for a plan for Stack: 0.25 on rank 0, 0.5 on rank 1" in first["max_slowdown"]
    assert "budget= for a plan for Stack: none on rank 0, one on rank 1" in first["goals"]
    assert "profile= for a plan for Stack: none on rank 0, a file on rank 1" in first["profiles"]
    assert "regions for a plan for Stack: 2 (layers.0, layers.1) on rank 0, 3 (" in first["blocks"]


# -- corrections, on four ranks with scripted devices ------------------------------------------------------------------

FOUR = 4
BUDGET = int(2.5 * GIB)


class LateAnswer(Future):
    """An answer that is there when a rank waits for it, or, on every other rank, at once."""

    def __init__(self, question, is_early):
        super().__init__()
        self.question = question
        if is_early:
            self.exception()

    def exception(self, timeout=None):
        if not self.done():
            self.set_result(remembered(self.question))
        return super().exception()


class CountedRanks(Ranks):
    """Counts the numbers of each message."""

    def __init__(self, what):
        super().__init__(None, what)
        self.sent = []

    def _largest(self, numbers):
        self.sent.append(len(numbers))
        return super()._largest(numbers)

    def _gather(self, own):
        self.sent.append("a profile")
        return super()._gather(own)


def scripted_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, folder, FOUR)
    os.environ["EBBTIDE_WAIT"] = "0"
    tuner.solve_elsewhere = lambda question: LateAnswer(question, is_early=rank % 2 == 0)
    found = {name: scenario(rank) for name, scenario in SCENARIOS.items()}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def history(
    rank,
    what,
    steps,
    seconds=1.0,
    peaks=1.0,
    forwards=1,
    fails=(),
    before=lambda k, handle: None,
    budget_bytes=BUDGET,
    **settings,
):
    """Follow `steps` steps in which this rank takes `seconds` times as long as predicted, at `peaks` times the peak,
    and runs out of memory in backward of the steps `fails`. Returns the plan, the limit and the margin of each step."""
    ranks = CountedRanks(what)
    controller, handle = controller_of(budget_bytes, slower=1 + rank / 100, ranks=ranks, **settings)
    handle.replan = controller.replan
    rows = []
    for k in range(steps):
        before(k, handle)
        for _ in range(forwards):
            monitor = controller.step_begins(1000)
            predicted = handle.plan.predicted
            if monitor is not None:
                if predicted is not None:
                    handle.device.step_s = predicted.step_s * seconds
                    handle.device.peak_bytes = int(predicted.peak_bytes * (peaks(k) if callable(peaks) else peaks))
                monitor._began = handle.device.record(None)
                monitor.forward_ended()
                handle.device.failures += k in fails
                if k not in fails:
                    monitor._end()
        handle.has_stepped = forwards > 1
        does = {name: str(region.recipe) for name, region in handle.plan.regions.items()}
        figures = None if predicted is None else [predicted.step_s, predicted.peak_bytes]
        margin_bytes = None if budget_bytes is None else controller.tuner.limit_bytes - controller.budget_bytes
        rows.append([does, figures, controller.tuner.limit_bytes, margin_bytes])
    return {"rows": rows, "sent": ranks.sent, "corrections": controller.tuner._size.corrections}


def with_other_figures(rank):
    return history(rank, "other figures", 60, seconds=(1.0, 0.9, 1.2, 1.1)[rank], peaks=(0.99, 1.02, 1.0, 0.97)[rank])


def with_a_rank_over(rank):
    return history(rank, "over", 24, peaks=lambda k: 1.2 if rank == 2 and k >= 5 else 1.0)


def with_a_rank_out_of_memory(rank):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = history(rank, "out of memory", 80, replans_on_oom=True, fails=(30,) if rank == 1 else ())
    return {**found, "warned": [str(each.message) for each in warned]}


def with_grown_memory(rank):
    def grows(k, handle):
        handle.device.allocated_bytes = GIB + 400_000_000 if rank == 3 and k >= 6 else 0

    return history(rank, "grown", 24, before=grows)


def with_a_plan_asked_for(rank):
    return history(rank, "asked", 60, before=lambda k, handle: handle.replan() if (rank, k) == (2, 30) else None)


def with_a_largest_slowdown(rank):
    settings = {"budget_bytes": None, "max_slowdown": 0.1, "device_bytes": (100 - rank) * GIB}
    return history(rank, "slowdown", 60, seconds=1.3 if rank == 1 else 1.0, **settings)


def with_unequal_forwards(rank):
    return history(rank, "forwards", 40, seconds=(1.0, 0.9, 1.2, 1.1)[rank], forwards=1 + rank % 3)


SCENARIOS = {
    each.__name__: each
    for each in (
        with_other_figures,
        with_a_rank_over,
        with_a_rank_out_of_memory,
        with_grown_memory,
        with_a_plan_asked_for,
        with_a_largest_slowdown,
        with_unequal_forwards,
    )
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """By scenario, what each of four ranks has seen."""
    folder = tmp_path_factory.mktemp("scripted")
    spawn(scripted_ranks, str(folder), ranks=FOUR)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(FOUR)]
    return {name: [each[name] for each in found] for name in SCENARIOS}


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_follow_equal_plans_at_equal_steps(scripted, name):
    first, *others = scripted[name]
    for other in others:
        assert other["rows"] == first["rows"]
        assert other["sent"] == first["sent"]
        assert other["corrections"] == first["corrections"]


def changes(rows):
    """The steps that begin with another plan."""
    return [k for k in range(1, len(rows)) if rows[k][:2] != rows[k - 1][:2]]


def test_ranks_correct_plans_by_the_worst_of_their_figures_and_take_the_margin_away(scripted):
    found = scripted["with_other_figures"][0]
    assert 1 <= found["corrections"] <= THRESHOLDS.corrections
    margins = [row[3] for row in found["rows"]]
    assert margins[-1] < margins[0]
    assert all((k + 1) % THRESHOLDS.meet_every == 0 for k in changes(found["rows"]))
    step_s, peak_bytes = found["rows"][-1][1]
    assert peak_bytes * 1.02 <= BUDGET
    assert step_s > found["rows"][0][1][0]  # the slowest rank took a fifth longer than predicted


def test_a_rank_over_the_budget_has_all_ranks_use_the_least_until_a_smaller_plan_is_there(scripted):
    rows = scripted["with_a_rank_over"][0]["rows"]
    stopped = [k for k, (_, figures, _, _) in enumerate(rows) if figures is None]
    assert stopped[0] + 1 == 2 * THRESHOLDS.meet_every
    assert len(stopped) == THRESHOLDS.meet_every  # the answer has as long
    assert all(set(rows[k][0].values()) == {"recompute, inputs offloaded"} for k in stopped)
    assert rows[-1][1][1] * 1.2 <= BUDGET


def test_a_rank_that_runs_out_of_memory_has_all_ranks_plan_for_less(scripted):
    limits = [[row[2] for row in found["rows"]] for found in scripted["with_a_rank_out_of_memory"]]
    assert limits[0][0] == BUDGET > limits[0][-1]
    warned = [found["warned"] for found in scripted["with_a_rank_out_of_memory"]]
    assert [len(each) > 0 for each in warned] == [False, True, False, False]
    assert all("from their next meeting on all ranks use a smaller plan" in text for text in warned[1])


def test_memory_that_grows_on_a_rank_is_planned_for_on_all(scripted):
    rows = scripted["with_grown_memory"][0]["rows"]
    assert rows[-1][1][1] <= BUDGET
    assert None in [figures for _, figures, _, _ in rows]


def test_a_plan_asked_for_on_one_rank_is_made_on_all(scripted):
    found = scripted["with_a_plan_asked_for"]
    assert [each["corrections"] for each in found] == [0] * FOUR  # all are left again
    assert scripted["with_unequal_forwards"][0]["corrections"] > 0


def test_steps_that_are_slow_on_one_rank_are_compared_with_everything_kept_on_all(scripted):
    rows = scripted["with_a_largest_slowdown"][0]["rows"]
    assert all((k + 1) % THRESHOLDS.meet_every == 0 for k in changes(rows))
    assert any(set(does.values()) == {"keep"} for does, _, _, _ in rows)


def test_ranks_meet_ever_more_rarely_with_messages_of_one_size(scripted):
    """The first two messages merge the profiles, of whatever number of ranks."""
    found = scripted["with_other_figures"][0]
    agreed, profile, *summaries = found["sent"]
    assert agreed == 7
    assert profile > 100
    assert set(summaries) == {SUMMARY}
    assert len(summaries) < len(found["rows"]) / THRESHOLDS.meet_every


SUMMARY = len(Observation._fields) + len(Condition._fields) + len(LinkRatios._fields)


def test_a_frozen_plan_is_looked_at_after_intervals_that_double():
    ranks, met = Ranks(None, "a plan"), []
    controller, handle = controller_of(BUDGET, ranks=ranks)
    for _ in range(1200):
        before = ranks._meeting
        steps(controller, handle, 1, ratio=1.0)
        if ranks._meeting != before:
            met.append(before)
    intervals = [later - earlier for earlier, later in itertools.pairwise(met)]
    rare = [each for each in intervals if each > THRESHOLDS.meet_every]
    assert rare[:5] == [16, 32, 64, 128, 256]
    assert set(rare[5:]) <= {THRESHOLDS.rarest}


@pytest.mark.parametrize(
    ("stepped", "meetings"),
    [
        ([False] * 8, [4, 8]),
        ([False, True] * 6, [6, 14]),  # steps of two forwards, from the second one on
    ],
)
def test_forwards_count_until_an_optimizer_steps(stepped, meetings):
    ranks, found = Ranks(None, "a plan"), []
    for number, have_stepped in enumerate([*stepped, *[False, True] * 4][:16], start=1):
        if ranks.forward_begins(have_stepped):
            found.append(number)
            ranks.meet_after(4)
    assert found[:2] == meetings


def test_the_worst_of_a_single_rank_is_its_own():
    observation = Observation(True, 4, 1.5, 1.25, 0.5, 7 * GIB + 1, 3)
    own = Summary(observation, Condition(-5, 9, False, True), LinkRatios(0.25, 4.0))
    worst = Ranks(None, "a plan").worst(own)
    assert worst == own
    assert [type(value) for part in worst for value in part] == [type(value) for part in own for value in part]


def test_profiles_of_other_structures_are_sent_whole():
    class TwoRanks(CountedRanks):
        def _largest(self, numbers):
            return [max(pair) for pair in zip(super()._largest(numbers), other, strict=True)]

        def _gather(self, own):
            return [*super()._gather(own), theirs]

    mine, theirs = profile(*layers(2)), profile(*layers(2), host=None, made_for={"model": "another"})
    other = [0.0, -float(GIB), theirs.base_bytes, *(structure := structure_of(theirs)), *(-part for part in structure)]
    ranks = TwoRanks("a plan")
    assert ranks.agreed(mine, 2 * GIB) == (agreed_profile([mine, theirs]), GIB)
    assert ranks.sent == [7, "a profile"]


# -- meeting, with threads for ranks -----------------------------------------------------------------------------------


def met(store, place, ranks, what="a plan", found=None):
    """The thread of a rank that comes, and what it found."""
    found = [] if found is None else found

    def come():
        try:
            distributed.meet(store, place, ranks, what)
            found.append(None)
        except PlanError as error:
            found.append(str(error))

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    return thread, found


def ended(*meetings):
    for thread, _ in meetings:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return [found[0] for _, found in meetings]


def test_ranks_meet_as_often_as_they_like():
    store = dist.HashStore()
    for _ in range(3):
        assert ended(*(met(store, place, [4, 5, 6]) for place in (2, 0, 1))) == [None] * 3


class Store:
    """Says when a rank has looked twice whether the others are there: it has come, and waits."""

    def __init__(self):
        self.inner, self.looks, self.is_waited_at = dist.HashStore(), 0, threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def check(self, keys):
        self.looks += 1
        if self.looks == 2:
            self.is_waited_at.set()
        return self.inner.check(keys)


def test_a_rank_waits_for_the_last_one():
    store, found = Store(), []
    first = met(store, 0, [0, 1], found=found)
    assert store.is_waited_at.wait(LIMIT_S)
    found.append("the last one comes")
    ended(first, met(store, 1, [0, 1]))
    assert found == ["the last one comes", None]


def test_who_meets_on_something_else_has_not_come():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.5))
    one, other = ended(met(store, 0, [3, 8], "a plan for A"), met(store, 1, [3, 8], "a plan for B"))
    assert "agree on a plan for A" in one
    assert "rank 8 has not come" in one
    assert "rank 3 has not come" in other


def test_a_rank_that_comes_too_late_raises_as_well_and_both_may_come_again():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.1))
    for late, place in ((1, 0), (0, 1)):
        (expected_text,) = ended(met(store, place, [0, 1]))
        assert f"rank {late} has not come" in expected_text
    store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
    assert ended(met(store, 0, [0, 1]), met(store, 1, [0, 1])) == [None] * 2


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "alone"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["dp", -100, [0, 1]])  # -100 is what new_group() returns on the other ranks
def test_what_is_no_group_of_this_rank_is_refused(group, alone):
    with pytest.raises(ConfigError, match=r"expected a torch.distributed.ProcessGroup that this rank is in"):
        ebbtide.offload(make(), process_group=group, **within(), **SETTINGS)


def test_a_group_without_a_job_is_refused():
    with pytest.raises(ConfigError, match=r"expected a torch.distributed.ProcessGroup"):
        ebbtide.offload(make(), process_group=object(), **within(), **SETTINGS)


@pytest.mark.parametrize("settings", [{}, {"recipe": "recompute"}, {"mode": "all"}, {"mode": "off"}], ids=str)
def test_a_group_with_nothing_to_agree_on_is_refused(settings, alone):
    with pytest.raises(ConfigError, match=r"process_group= names the ranks that agree on a plan"):
        ebbtide.offload(make(), process_group=dist.group.WORLD, **settings, **SETTINGS)


def test_a_group_of_one_rank_plans_for_itself(alone):
    model = make()
    handle = ebbtide.offload(model, process_group=dist.group.WORLD, **within(), **SETTINGS)
    assert losses_and_gradients(model, 0) == losses_and_gradients(make(), 0)
    assert handle._planning.controller.phase is Phase.PLANNED
