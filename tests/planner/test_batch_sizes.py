"""Batch sizes under a budget: the largest that fits, the fastest, and predictions against measured bytes."""

import dataclasses

import pytest
import torch
from planner.test_peaks import counted, profile_of  # noqa: F401 (a fixture)
from planner.workloads import GIB, MIB, MS, layers, profile
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import PlanError
from ebbtide._planner.batch_sizes import batch_sizes
from ebbtide._planner.solve import Solver
from ebbtide._profiling.batch_fit import at_tokens
from ebbtide._profiling.profile import Host, HostTime

ITEM = 100  # tokens of a sample
MEASURED = profile(*layers(4), device_bytes=8 * GIB)  # ten samples
BUDGET = 4 * GIB


@pytest.fixture(scope="module")
def found():
    return batch_sizes([MEASURED], ITEM, BUDGET)


def solver(batch):
    return Solver(MEASURED.scaled(batch * ITEM))


def test_the_sizes_are_powers_of_two_and_those_of_interest(found):
    sizes = [row.batch for row in found.rows]
    powers = [1 << k for k in range(found.largest.batch.bit_length() + 1)]
    assert sizes == sorted({*powers, 10, found.largest_kept.batch, found.largest.batch})
    assert [row.batch for row in found.rows if row.is_measured] == [10]
    assert [row.batch for row in found.rows if not row.fits] == sizes[-1:]


def test_one_sample_more_than_the_largest_fits_no_plan(found):
    largest = found.largest.batch
    assert found.largest_kept.batch < largest
    assert solver(largest).smallest_budget() <= BUDGET < solver(largest + 1).smallest_budget()
    kept = found.largest_kept.batch
    peaks = [solver(batch).keeping_all().predicted.peak_bytes for batch in (kept, kept + 1)]
    assert peaks[0] <= BUDGET < peaks[1]


def test_where_no_plan_saves_memory_the_largest_keeps_everything():
    nothing = {"saved_tensors": (), "inputs": (), "expensive_ops": (), "backward_work_bytes": 100_000_000}
    found = batch_sizes([profile(*layers(2, **nothing))], ITEM, BUDGET)
    assert found.largest_kept == found.largest
    assert [row.batch for row in found.rows][-3:] == [256, found.largest.batch, 512]
    assert found.largest.batch == 10 * (BUDGET - MEASURED.base_bytes) // 100_000_000


def test_each_plan_is_the_solvers(found):
    for row in found.rows:
        assert row.smallest_bytes == solver(row.batch).smallest_budget()
        if row.fits:
            assert row.plan == solver(row.batch).solve(BUDGET)
            predicted = row.plan.predicted
            assert (row.step_s, row.peak_bytes, row.moved_bytes) == (
                predicted.step_s, predicted.peak_bytes, predicted.moved_bytes,
            )  # fmt: skip
            assert row.samples_per_s == pytest.approx(row.batch / predicted.step_s)
            assert row.tokens_per_s == pytest.approx(ITEM * row.batch / predicted.step_s)
            assert sum(row.actions.values()) == 4
    assert found.largest.moved_bytes + found.largest.recompute_s > 0
    unfit = found.rows[-1]
    assert (unfit.step_s, unfit.samples_per_s, unfit.actions) == (None, 0.0, {})
    assert unfit.peak_bytes == unfit.smallest_bytes > BUDGET


def test_the_fastest_is_the_smallest_of_the_equally_fast():
    """In proportion, all sizes that keep everything are equally fast; the host makes small ones slower."""
    host = Host((HostTime(5 * MS, 5 * MS, 0.0, 5),) * 4, *[0.0] * 9)
    found = batch_sizes([dataclasses.replace(MEASURED, host=host)], ITEM, BUDGET)
    speeds = {row.batch: row.samples_per_s for row in found.rows}
    assert speeds[1] == pytest.approx(1 / 0.04)  # 4 regions of 10 ms
    assert speeds[2] == pytest.approx(2 / 0.04)
    assert speeds[4] < speeds[8] == pytest.approx(speeds[10]) == pytest.approx(speeds[found.largest_kept.batch])
    assert found.fastest.batch == 8


def test_a_fixed_part_makes_large_batches_faster():
    slower = MEASURED.scaled(20 * ITEM).at_speed(0.75)
    found = batch_sizes([MEASURED, slower], ITEM, 16 * GIB)
    speeds = [row.samples_per_s for row in found.rows if row.batch <= found.largest_kept.batch]
    assert speeds == sorted(speeds)
    assert found.fastest.batch >= found.largest_kept.batch > 20
    assert found.rows[0].step_s == pytest.approx((60 + 6) * MS)


def test_the_table_has_a_line_per_size(found):
    lines = str(found).splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [row.batch for row in found.rows]
    assert lines[-1].split() == ["128", *f"{found.rows[-1].peak_bytes / GIB:.2f} GiB does not fit".split()]
    assert [line for line in lines if "measured" in line] == [line for line in lines if line.split()[0] == "10"]
    assert [line for line in lines if "largest" in line] == [lines[-2]]


def test_a_budget_too_small_for_one_sample_names_the_smallest():
    least = solver(1).smallest_budget()
    with pytest.raises(PlanError, match=r"smallest budget of a batch of 1 is .*'983MiB' or more"):
        batch_sizes([MEASURED], ITEM, least - 1)
    found = batch_sizes([MEASURED], ITEM, least)
    assert [(row.batch, row.fits) for row in found.rows] == [(1, True), (2, False), (10, False)]


def test_memory_that_does_not_grow_is_an_error():
    with pytest.raises(PlanError, match="a batch of 40 takes no more memory than a batch of 20"):
        batch_sizes([MEASURED, dataclasses.replace(MEASURED, tokens=2000)], ITEM, BUDGET)


@pytest.mark.parametrize("budget_gib", [7, 4, 3.5])
def test_between_measured_sizes_memory_may_fall(budget_gib):
    """Memory of a CPU is sampled. At 3.5 GiB the batch of 20 fits, and by these profiles no smaller one."""
    base = {**MEASURED.base, "other": MEASURED.base.get("other", 0) + 3 * GIB}
    one = dataclasses.replace(MEASURED, base=base, base_bytes=sum(base.values()))
    assert batch_sizes([one, MEASURED.scaled(2000)], ITEM, int(budget_gib * GIB)).largest.batch > 20


def test_assumptions_are_said(found):
    assert [text.split(":")[0] for text in found.assumptions] == ["From one profile, of batch 10"]
    bound = dataclasses.replace(MEASURED, host=Host((HostTime(1.0, 1.0, 0.0, 5),) * 4, *[0.0] * 9))
    fewer = [dataclasses.replace(region, inputs=()) for region in MEASURED.regions]
    other = dataclasses.replace(bound.scaled(2000), regions=(*fewer[:1], *MEASURED.scaled(2000).regions[1:]))
    texts = batch_sizes([bound, other], ITEM, BUDGET).assumptions
    assert "batches 10, 20" in texts[0]
    assert "layers.0 saved other tensors" in texts[1]
    assert "In the batch of 10, 20 the host took as long as compute" in texts[2]


# -- against a measurement ---------------------------------------------------------------------------------------------

LENGTH, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, table):
        return x + self.down(functional.gelu(self.up(self.norm(x) * table)))


class Model(nn.Module):
    """The table is saved by every block, and does not grow with the batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x):
        table = torch.arange(LENGTH * WIDTH).float().cos().view(LENGTH, WIDTH)
        for layer in self.layers:
            x = layer(x, table)
        return self.head(x).square().mean()


def test_bytes_of_another_batch_are_those_measured(counted):  # noqa: F811 (the fixture)
    model = Model()
    two, four, eight = (profile_of(model, torch.randn(batch, LENGTH, WIDTH), counted) for batch in (2, 4, 8))
    fitted = at_tokens([two, four], eight.tokens)
    for mine, measured in zip(fitted.regions, eight.regions, strict=True):
        for rows in ("saved_tensors", "inputs", "expensive_ops"):
            assert [t.nbytes for t in getattr(mine, rows)] == [t.nbytes for t in getattr(measured, rows)]
        assert mine.forward_work_bytes == measured.forward_work_bytes
        assert mine.backward_work_bytes == measured.backward_work_bytes
    assert _budgets(fitted) == _budgets(eight)
    assert _budgets(four.scaled(eight.tokens)) != _budgets(eight)  # the table, and the batch itself
    assert _budgets(at_tokens([four, eight], two.tokens)) == _budgets(two)
    found = ebbtide.max_batch([two, four], batch=2, budget=8 * MIB)
    assert next(row.smallest_bytes for row in found.rows if row.batch == 8) == _budgets(eight)[0]


def _budgets(profile):
    """The smallest budget, and the peak with everything kept."""
    solver = Solver(profile)
    return solver.smallest_budget(), solver.keeping_all().predicted.peak_bytes
