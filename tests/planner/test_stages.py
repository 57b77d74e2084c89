"""Stages of one rank that share a budget."""

import dataclasses
import itertools
import random

import pytest
from planner.workloads import MS, layers, outside, profile

from ebbtide import PlanError
from ebbtide._planner.options import option_for
from ebbtide._planner.solve import Question, Solver, answer
from ebbtide._planner.stages import _shared_out as shared_out
from ebbtide._planner.stages import _StagePlan as StagePlan
from ebbtide._planner.stages import answer_for_stage

MB = 1_000_000


def stage(count=4, graphs=3, **changes):
    return profile(*layers(count, **changes), graphs=graphs)


def answers(stages, budget_bytes):
    return [
        answer_for_stage(Question(each, budget_bytes, budget_bytes, beside=(tuple(stages[:k]), tuple(stages[k + 1 :]))))
        for k, each in enumerate(stages)
    ]


def smallest_budget(stages):
    """Of all together, which the answer for any of them tells."""
    return answer_for_stage(Question(stages[0], 10**12, beside=((), tuple(stages[1:])))).smallest_bytes


@pytest.fixture(scope="module")
def three():
    """Stages, and the smallest budget for them."""
    stages = [stage(), stage(3, 2, backward_s=40 * MS), stage(2, 1)]
    return stages, smallest_budget(stages)


def held_bytes(step, plan):
    """Of all graphs in flight, while another stage runs."""
    kept = sum(option_for(each, plan.regions[each.name].recipe).kept_bytes for each in step.regions)
    return step.graphs * (kept + step.outside.kept_bytes)


def test_a_stage_alone_gets_the_whole_budget():
    step, budget_bytes = stage(), 4000 * MB
    alone = answer(Question(step, budget_bytes, budget_bytes))
    shared = answer_for_stage(Question(step, budget_bytes, budget_bytes))
    assert shared.plan == alone.plan


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_stages_fit_the_budget_together(share, three):
    stages, least = three
    most = 2000 * MB + sum(each.graphs * len(each.regions) * 300 * MB for each in stages)
    budget_bytes = int(least + share * (most - least))
    plans = [each.plan for each in answers(stages, budget_bytes)]
    held = [held_bytes(step, plan) for step, plan in zip(stages, plans, strict=True)]
    for step, plan in zip(stages, plans, strict=True):
        assert step.base_bytes + sum(held) <= plan.predicted.peak_bytes <= budget_bytes


def test_more_goes_to_the_stage_that_gains_more():
    """Recomputation of the second takes four times as long."""
    stages = [stage(), stage(recompute_s=40 * MS)]
    link = dataclasses.replace(stages[0].link, out=1e8, back=1e8)  # nothing to be won by moves
    stages = [dataclasses.replace(each, link=link) for each in stages]
    least = smallest_budget(stages)
    first, second = (each.plan for each in answers(stages, least + 1500 * MB))
    assert held_bytes(stages[0], first) < held_bytes(stages[1], second)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_takes_less_time(seed):
    numbers = random.Random(seed)
    rows = []
    for _ in range(3):
        held = sorted(numbers.randint(0, 40_000 * MB) for _ in range(6))
        seconds = sorted((numbers.uniform(0.1, 1.0) for _ in held), reverse=True)
        pairs = zip(held, seconds, strict=True)
        rows.append([StagePlan(0, each + numbers.randint(0, 5000 * MB), each, s) for each, s in pairs])

    def fits(choices):
        held = sum(choice.held_bytes for choice in choices)
        return max(held - choice.held_bytes + choice.peak_bytes for choice in choices) <= room_bytes

    room_bytes = int(sum(row[0].peak_bytes for row in rows) + numbers.uniform(0, 60_000 * MB))
    fastest = min(sum(choice.step_s for choice in each) for each in itertools.product(*rows) if fits(each))
    chosen = [row[at] for row, at in zip(rows, shared_out(rows, room_bytes), strict=True)]
    assert fits(chosen)
    assert sum(choice.step_s for choice in chosen) == pytest.approx(fastest)


@pytest.mark.parametrize("missing_bytes", [1, 1000, 50_000])
def test_room_that_a_better_choice_misses_by_little_is_used_all_the_same(missing_bytes):
    """The tolerance of the solver is larger."""
    rows = [
        [StagePlan(0, k * 1000 * MB, k * 1000 * MB, 1.0 - 0.1 * k - 0.001 * k * k) for k in range(5)] for _ in range(3)
    ]
    chosen = shared_out(rows, 6000 * MB - missing_bytes)
    assert sum(chosen) == 5


def test_a_share_is_for_good():
    stages = [stage(), stage(3, 2, backward_s=40 * MS)]
    least = smallest_budget(stages)
    question = Question(stages[0], least + 1500 * MB, beside=((), (stages[1],)))
    share = answer_for_stage(question).share
    again = answer_for_stage(dataclasses.replace(question, budget_bytes=least + 1600 * MB, share=share))
    assert again.share == share
    assert again.plan.predicted.peak_bytes <= least + 1600 * MB - share.spared_bytes


def test_memory_measured_beside_other_stages_counts_once():
    """The second stage was measured while graphs of the first were in flight."""
    first = stage()
    second = dataclasses.replace(first, base_bytes=first.base_bytes + 500 * MB)
    budget_bytes = 6000 * MB
    plans = [each.plan for each in answers([first, second], budget_bytes)]
    assert plans[0].predicted == plans[1].predicted


def test_a_budget_too_small_for_all_together_names_the_others():
    step = dataclasses.replace(stage(), outside=outside(kept_bytes=200 * MB))
    alone = Solver(step).smallest_budget()
    assert smallest_budget([step, step]) == alone + 3 * 200 * MB
    with pytest.raises(PlanError, match="other stages"):
        answers([step, step], alone)


def test_keeping_everything_where_everything_fits():
    stages = [stage(), stage()]
    assert all(each.plan.keeps_all for each in answers(stages, 10**12))
