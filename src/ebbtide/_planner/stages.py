"""One budget for several stages of a pipeline on one rank. Pure.

Note [Several stages]
~~~~~~~~~~~~~~~~~~~~~
Stages of a rank take turns, and while one runs the others hold the tensors of their graphs in flight. Each stage has a
plan of its own; the budget is shared out beforehand.
1. Each stage's fastest plans for a row of budgets are known, with the bytes that graphs in flight hold under each.
2. All stages begin with the smallest plan. Then, again and again, the stage gets more whose step gains the most time
   per byte, as long as every stage's peak fits beside what the others hold.
3. Each stage then plans as if the bytes of the others were in use from before the step. Every stage draws the same
   conclusion from the same profiles.
The lanes are shared by taking turns as well: a stage counts on them while its own passes run. What waits to leave and
what is back early has one limit for all stages, and counts for the stage that runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ebbtide._planner.solve import Answer, Question, Solver, answer
from ebbtide._profiling.profile import Profile

_OTHERS = "other stages"


class _Choice(NamedTuple):
    """A plan of a stage. `peak_bytes` come on top of the memory from before the step; `held_bytes` are the part that
    stays while other stages run."""

    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    step_s: float


def answer_for_stage(question: Question) -> Answer:
    """`answer`, if need be for one of several stages. Raises PlanError."""
    (before, behind), budget_bytes = question.beside, question.budget_bytes
    stages, own = (*before, question.profile, *behind), len(before)
    if budget_bytes is None or len(stages) == 1:
        return answer(question)
    base_bytes = min(profile.base_bytes for profile in stages)  # graphs in flight may have been measured as well
    based = [_with_base(profile, base_bytes) for profile in stages]
    rows = [_choices(profile) for profile in based]
    chosen = _shared_out(rows, budget_bytes - base_bytes)
    others_bytes = sum(row[at].held_bytes for k, (row, at) in enumerate(zip(rows, chosen, strict=True)) if k != own)
    profile = _with_base(based[own], base_bytes + others_bytes)
    share_bytes = rows[own][chosen[own]].budget_bytes + others_bytes
    if not _fits(rows, chosen, budget_bytes - base_bytes):
        share_bytes = budget_bytes  # the smallest plan of some stage does not fit: that stage's question tells
    found = answer(dataclasses.replace(question, profile=profile, budget_bytes=min(share_bytes, budget_bytes)))
    return dataclasses.replace(found, smallest_bytes=base_bytes + _needed_bytes([row[0] for row in rows]))


def _with_base(profile: Profile, base_bytes: int) -> Profile:
    more_bytes = base_bytes - profile.base_bytes
    base = {**profile.base, _OTHERS: more_bytes} if more_bytes > 0 else profile.base
    return dataclasses.replace(profile, base_bytes=base_bytes, base=base)


def _choices(profile: Profile) -> list[_Choice]:
    """The fastest plans of a stage, smallest first."""
    outside = profile.outside.kept_bytes + profile.outside.held_bytes
    return [
        _Choice(
            point.budget_bytes,
            point.outcome.peak_bytes - profile.base_bytes,
            profile.graphs * (point.kept_bytes + outside),
            point.outcome.step_s,
        )
        for point in Solver(profile).pareto_curve()
    ]


def _shared_out(rows: Sequence[Sequence[_Choice]], room_bytes: int) -> list[int]:
    """Per stage the number of a choice."""
    chosen = [0] * len(rows)
    while True:
        best, most = None, 0.0
        for stage, row in enumerate(rows):
            now = row[chosen[stage]]
            for at in range(chosen[stage] + 1, len(row)):
                further = [*chosen[:stage], at, *chosen[stage + 1 :]]
                gained = (now.step_s - row[at].step_s) / max(1, row[at].peak_bytes - now.peak_bytes)
                if gained > most and _fits(rows, further, room_bytes):
                    best, most = further, gained
        if best is None:
            return chosen
        chosen = best


def _fits(rows: Sequence[Sequence[_Choice]], chosen: Sequence[int], room_bytes: int) -> bool:
    return _needed_bytes([row[at] for row, at in zip(rows, chosen, strict=True)]) <= room_bytes


def _needed_bytes(choices: Sequence[_Choice]) -> int:
    """Beside the memory from before the step, if each stage follows its choice."""
    held_bytes = sum(choice.held_bytes for choice in choices)
    return max(held_bytes - choice.held_bytes + choice.peak_bytes for choice in choices)
