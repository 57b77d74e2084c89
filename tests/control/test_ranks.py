"""Ranks of one job plan from one profile: equal regions are recomputed on all ranks, or collectives would hang."""

import contextlib
import datetime
import json
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from control.test_controller import SETTINGS, batch, make
from processes import LIMIT_S, RANKS, join, spawn
from support import bits
from torch import nn

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, PlanError
from ebbtide._control.controller import Phase
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


def check_one_plan(folder):
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(result["is_equal"] and result["is_planned"] for result in results)
    assert results[0]["recipes"] == results[1]["recipes"]
    assert results[0]["time"] == results[1]["time"]


def test_two_ranks_have_one_plan(tmp_path):
    spawn(work, str(tmp_path))
    check_one_plan(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("steps_before", "has_file"), [(0, False), (5, False), (5, True)])
def test_ranks_that_meet_after_they_were_offloaded_have_one_plan_too(tmp_path, steps_before, has_file):
    spawn(work_that_joins_late, str(tmp_path), steps_before, has_file)
    check_one_plan(tmp_path)


# -- who votes, and when -----------------------------------------------------------------------------------------------


def uneven_steps(rank: int, folder: str) -> None:
    """Ranks have different numbers of forwards in a step, and gradients of all of them are added up."""
    torch.set_num_threads(1)
    join(rank, folder)
    plain = trained_unevenly(nn.parallel.DistributedDataParallel(make()), rank)
    model = nn.parallel.DistributedDataParallel(make())
    handle = ebbtide.offload(model, **within(), **SETTINGS)
    write_down(rank, folder, handle, trained_unevenly(model, rank) == plain)


def trained_unevenly(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for k in range(STEPS):
        for j in range(rank + 1):
            with contextlib.nullcontext() if j == rank else model.no_sync():
                loss = model(batch(100 * k + 10 * j + rank))
                loss.backward()
            found.append(bits(loss).hex())
        optimizer.step()
        found += [bits(p.grad).hex() for p in model.parameters()]
        optimizer.zero_grad()
    return found


def test_ranks_vote_between_steps_however_many_forwards_each_has(tmp_path):
    spawn(uneven_steps, str(tmp_path))
    check_one_plan(tmp_path)


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
