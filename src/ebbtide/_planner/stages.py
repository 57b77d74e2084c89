"""One budget for several stages of a pipeline on one rank. Pure.

Note [Several stages]
~~~~~~~~~~~~~~~~~~~~~
Stages of a rank take turns. While a stage runs, other stages hold tensors of graphs in flight. Every stage has a plan
of its own; the budget is shared out before planning.
1. For a row of budgets the fastest plans of every stage are known, with the bytes that graphs in flight hold.
2. Of each stage one of these plans is chosen, for the least time of all stages together, as long as the peak of every
   stage fits beside the bytes held by other stages.
3. A stage plans as if bytes held by other stages were in use from before the step. All stages draw one conclusion from
   equal profiles, and a share is for good: a stage that plans again gets no bytes on which another plan counts.
Stages share the lanes by taking turns as well: a stage counts on the lanes while passes of the stage run. Parcels on
the way out and parcels back early have one limit for all stages, and count for the running stage.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ebbtide._planner import highs
from ebbtide._planner.solve import Answer, Question, Share, Solver, answer
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import GIB, MIB

_OTHERS = "other stages"
_TOLERANCE_BYTES = MIB  # more than the solver's tolerance, a millionth of what a choice takes


class _StagePlan(NamedTuple):
    """A plan of a stage. `peak_bytes` come on top of the memory from before the step, and include `held_bytes`, which
    stay while other stages run."""

    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    step_s: float


def answer_for_stage(question: Question) -> Answer:
    """`answer`, if need be for one of several stages. Raises PlanError."""
    budget_bytes = question.budget_bytes
    if budget_bytes is None or not any(question.beside):
        return answer(question)
    share = question.share or _share_of(question, budget_bytes)
    profile = _with_base(question.profile, share.base_bytes)
    found = answer(dataclasses.replace(question, profile=profile, budget_bytes=budget_bytes - share.spared_bytes))
    return dataclasses.replace(found, smallest_bytes=share.smallest_bytes, share=share)


def _share_of(question: Question, budget_bytes: int) -> Share:
    before, behind = question.beside
    stages, own = (*before, question.profile, *behind), len(before)
    base_bytes = min(profile.base_bytes for profile in stages)  # graphs in flight may have been measured as well
    based = [_with_base(profile, base_bytes) for profile in stages]
    rows = [_choices(profile) for profile in based]
    chosen = _shared_out(rows, budget_bytes - base_bytes)
    others_bytes = sum(row[at].held_bytes for k, (row, at) in enumerate(zip(rows, chosen, strict=True)) if k != own)
    spared_bytes = budget_bytes - rows[own][chosen[own]].budget_bytes - others_bytes
    if not _fits(rows, chosen, budget_bytes - base_bytes):
        spared_bytes = 0  # the smallest plan of some stage does not fit; the question of the stage tells
    smallest_bytes = base_bytes + _needed_bytes([row[0] for row in rows])
    return Share(base_bytes + others_bytes, max(0, spared_bytes), smallest_bytes)


def _with_base(profile: Profile, base_bytes: int) -> Profile:
    more_bytes = base_bytes - profile.base_bytes
    base = {**profile.base, _OTHERS: more_bytes} if more_bytes > 0 else profile.base
    return dataclasses.replace(profile, base_bytes=base_bytes, base=base)


def _choices(profile: Profile) -> list[_StagePlan]:
    """The fastest plans of a stage, smallest first."""
    outside = profile.outside.kept_bytes + profile.outside.held_bytes
    return [
        _StagePlan(
            point.budget_bytes,
            point.outcome.peak_bytes - profile.base_bytes,
            profile.graphs * (point.kept_bytes + outside),
            point.outcome.step_s,
        )
        for point in Solver(profile).pareto_curve()
    ]


def _shared_out(rows: Sequence[Sequence[_StagePlan]], room_bytes: int) -> list[int]:
    """Per stage the number of a choice: the least seconds of all together, by an integer program. A stage gains most
    by a jump over several choices, so no sequence of small gains finds the best."""
    everything = [len(row) - 1 for row in rows]
    if _fits(rows, everything, room_bytes):
        return everything  # as a stage alone: nothing moves for nothing
    smallest = [0] * len(rows)
    program = highs.empty()
    program.setOptionValue("mip_rel_gap", 0.0)
    picks = [[program.addBinary() for _ in row] for row in rows]
    longest_s = max(choice.step_s for row in rows for choice in row) or 1.0

    def total(of: Callable[[_StagePlan], float], row: Sequence[_StagePlan], pick: Sequence[Any]) -> Any:
        return program.qsum([of(choice) * one for choice, one in zip(row, pick, strict=True)])

    most = program.addVariable(lb=0.0)  # while a stage itself runs, beyond what the stage holds
    held, seconds = 0.0, 0.0
    for row, pick in zip(rows, picks, strict=True):
        program.addConstr(program.qsum(pick) == 1)
        program.addConstr(total(lambda choice: (choice.peak_bytes - choice.held_bytes) / GIB, row, pick) <= most)
        held += total(lambda choice: choice.held_bytes / GIB, row, pick)
        seconds += total(lambda choice: choice.step_s / longest_s, row, pick)
    program.addConstr(held + most <= (room_bytes - _TOLERANCE_BYTES) / GIB)
    program.minimize(seconds)
    if not highs.is_solved(program):
        return smallest
    chosen = [max(range(len(pick)), key=lambda at, pick=pick: program.val(pick[at])) for pick in picks]
    return chosen if _fits(rows, chosen, room_bytes) else smallest


def _fits(rows: Sequence[Sequence[_StagePlan]], chosen: Sequence[int], room_bytes: int) -> bool:
    return _needed_bytes([row[at] for row, at in zip(rows, chosen, strict=True)]) <= room_bytes


def _needed_bytes(choices: Sequence[_StagePlan]) -> int:
    """The peak of the rank by `choices`, beside the memory from before the step."""
    held_bytes = sum(choice.held_bytes for choice in choices)
    return max(held_bytes - choice.held_bytes + choice.peak_bytes for choice in choices)
