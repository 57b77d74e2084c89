"""Buckets of batch sizes, each with a plan of its own, and the choice among the plans that ran. Pure.

Note [Turns]
~~~~~~~~~~~~
The speed of a machine changes within seconds, and a plan that keeps the host busy suffers more than another: steps of
two plans compare if the plans ran in turns. Before a plan is frozen, the plans that may be the fastest take turns. The
plan with the faster steps in all turns stays, whatever was predicted. A difference within a percent says nothing: the
newest plan stays, which was made by the most measurements.

1. Within a budget the fallback and every plan that ran take part, if a step was as fast as a typical step of the
   fastest plan. A fallback that never ran takes part unless it is predicted to be slower than the fastest plan by more
   than predictions err.
2. Without a budget, speed is no goal. A plan whose steps look slower than with everything kept takes turns with keeping
   everything. After a plan that is slower indeed the next plan moves less, and the last resort is keeping everything.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple

from ebbtide._control.trial import Trial
from ebbtide._planner.solve import Answer
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile

EARLIER = "an earlier plan was faster"
ALIKE = "others were hardly faster"
NONE_FASTER = "no other was faster"


class Choice(NamedTuple):
    """The plan to run next.

    Attributes:
        trial: the plan, and what its steps took so far.
        why: the reason; "" for a further turn.
        is_final: the plan is frozen.
        slowdown: share by which the steps before were slower: a plan that moves less is wanted; 0: no plan is wanted.
    """

    trial: Trial
    why: str
    is_final: bool = False
    slowdown: float = 0.0


@dataclasses.dataclass
class BatchSize:
    """One bucket of batch sizes.

    Attributes:
        tokens: the largest batch of the bucket.
        profile: source of the plan, before scaling to the size.
        margin_bytes: part of the budget left free.
        trial: the plan in force; None until the first answer, and after a plan was stopped.
        tried: trials of earlier plans since the last frozen plan; the memory before the step has not grown since.
        fallback: the fallback of the last answer; None: none fits, or the answer is the fallback.
        fallback_s: the fastest predicted seconds of the fallback so far.
        asks_fallback: whether the next question is for the fallback alone.
        wanted: why another plan is wanted; "" if none is.
        target: the part of the largest slowdown that is planned for.
        compares: whether the plans take turns.
        answer: the last answer with a plan; None before the first.
        corrections: so far.
        is_used: whether a step has followed a plan.
    """

    tokens: int
    profile: Profile
    margin_bytes: int = 0
    trial: Trial | None = None
    tried: list[Trial] = dataclasses.field(default_factory=list[Trial])
    fallback: Plan | None = None
    fallback_s: float = math.inf
    asks_fallback: bool = False
    wanted: str = ""
    target: float = THRESHOLDS.target
    compares: bool = False
    answer: Answer | None = None
    corrections: int = 0
    is_used: bool = False

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget, as of the last answer."""
        return 0 if self.answer is None else self.answer.smallest_bytes

    def follow(self, trial: Trial) -> None:
        """Put `trial` in force. The plan before joins those that may return."""
        if trial in self.tried:
            trial.begin_turn()
        others = [each for each in (*self.tried, self.trial) if each is not None and each is not trial]
        self.trial, self.tried = trial, others

    @property
    def ran(self) -> list[Trial]:
        """All plans since the last frozen plan: the plan in force, then the others, the earliest first."""
        return [each for each in (self.trial, *self.tried) if each is not None]

    def measured(self, limit_bytes: int) -> list[Trial]:
        """Earlier plans that a plan within the budget may be compared with."""
        return [each for each in self.tried if each.is_measured(limit_bytes)]

    def new_fallback(self, plan: Plan) -> Trial:
        """A trial of `plan`, the fallback."""
        return Trial(plan, self.profile.plain_s, is_fallback=True)

    @property
    def newest(self) -> Trial | None:
        """The trial of the last answer's plan; None before it runs."""
        plan = None if self.answer is None else self.answer.plan
        return None if plan is None else next((each for each in self.ran if run_alike(each.plan, plan)), None)

    def has_run(self, plan: Plan) -> bool:
        """Whether `plan` is in force, or among the earlier plans."""
        return any(run_alike(each.plan, plan) for each in self.ran)

    def choose_within(self, limit_bytes: int) -> Choice:
        """The fastest plan that keeps to the budget, after turns (Note [Turns], 1)."""
        if not self.compares and self.fallback is not None and not self.has_run(self.fallback):
            self.tried.append(self.new_fallback(self.fallback))
        measured = [each for each in self.ran if each.is_measured(limit_bytes)]
        best = min(measured, key=lambda each: each.seen.typical_s, default=self.trial)
        assert best is not None
        waiting = [each for each in self.ran if each is best or self._may_be_faster(each, best, limit_bytes)]
        turn = self._next_turn(waiting, best)
        if turn is not None:
            return turn
        newest = self.newest
        if newest in measured and newest.seen.typical_s <= best.seen.typical_s * (1 + THRESHOLDS.slower):
            return Choice(newest, NONE_FASTER if newest is best else ALIKE, is_final=True)
        return Choice(best, "recomputation alone was faster" if best.is_fallback else EARLIER, is_final=True)

    def _may_be_faster(self, other: Trial, best: Trial, limit_bytes: int) -> bool:
        """Whether a step of `other` was faster than those of `best`, or may be before there was any."""
        if other.seen.peak_bytes > limit_bytes:
            return False
        if other.seen.timed >= THRESHOLDS.baseline_steps:
            return other.seen.fastest_s < best.seen.typical_s
        # Fallbacks for less memory recompute more, and an early prediction is of a fast machine.
        earlier = (each.seen.fastest_s for each in self.tried if each.is_fallback and each.seen.timed)
        # A prediction that is off by so little decides nothing.
        return other.is_fallback and min([self.fallback_s / (1 + THRESHOLDS.off), *earlier]) < best.seen.typical_s

    def choose_without_budget(self, max_slowdown: float, *, may_keep_all: bool, may_correct: bool) -> Choice:
        """The last plan, if its steps are not much slower than with everything kept, as far as the spread of the latter
        lets a difference be seen (Note [Turns], 2)."""
        assert self.trial is not None
        latest_first = [self.trial, *reversed(self.tried)]
        kept = next((each for each in latest_first if each.is_fallback), None)
        slow = next((each for each in latest_first if not each.is_fallback), self.trial)
        own = slow.seen
        if not may_keep_all:
            return Choice(slow, NONE_FASTER, is_final=True)
        if kept is None or not kept.is_measured(None):
            looks_slow = slow.is_timed and own.typical_s > self.fallback_s * (1 + max_slowdown)
            if self.fallback is None or kept is self.trial or not (may_correct and looks_slow):
                return Choice(slow, NONE_FASTER, is_final=True)
            return Choice(self.new_fallback(self.fallback), f"compared, {slow.took}")
        other = kept.seen
        # Steps of some machines differ, whatever the plan. The fastest then tell whether the plan is a cause.
        unresolved = other.typical_s / other.fastest_s - 1
        slowdown = max(own.typical_s / other.typical_s - 1 - unresolved, own.fastest_s / other.fastest_s - 1)
        if slowdown <= max_slowdown:
            if kept.ran_beside_solver:  # perhaps slower than alone
                return Choice(kept, f"compared, {slow.took}")
            return Choice(slow, NONE_FASTER, is_final=True)
        may_be_fast = own.fastest_s <= other.typical_s * (1 + max_slowdown)
        turn = self._next_turn((slow, kept), slow) if may_be_fast else None
        if turn is not None:
            return turn
        if may_correct and self.corrections < THRESHOLDS.corrections:
            return Choice(kept, f"keeping everything was faster by {slowdown:.1%}", slowdown=slowdown)
        return Choice(kept, "keeping everything was faster", is_final=True)

    def _next_turn(self, trials: Collection[Trial], best: Trial) -> Choice | None:
        """That one of `trials` which had the fewest turns; None if all have had theirs."""
        begins, self.compares = not self.compares, True
        for each in self.tried if begins else ():  # may have run while the solver kept the machine busy
            each.turns = 0
        following = min(trials, key=lambda each: (each.turns, each is self.trial))
        if len(trials) < 2 or following.turns >= THRESHOLDS.turns:
            return None
        following.turns += 1
        return Choice(following, f"compared, {best.took}" if begins else "")


def run_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same, whatever is predicted of them."""
    if one.keeps_all and other.keeps_all:
        return True  # no window matters
    parts = [{n: (r.recipe, r.release, r.prefetch_bytes) for n, r in plan.regions.items()} for plan in (one, other)]
    return parts[0] == parts[1] and getattr(one.outside, "recipe", None) == getattr(other.outside, "recipe", None)


def bucket_of(tokens: int, measured: int = 1) -> int:
    """The smallest bucket of at least `tokens`. An octave has eight buckets, counted from `measured`."""
    steps = math.log2(tokens / measured) * THRESHOLDS.buckets
    return round(measured * 2 ** (math.ceil(steps - 1e-9) / THRESHOLDS.buckets))
