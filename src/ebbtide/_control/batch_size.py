"""Buckets of batch sizes, each with a plan of its own. Pure."""

import dataclasses
import math

from ebbtide._control.trial import Trial
from ebbtide._planner.solve import Answer
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile


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

    def measured(self, limit_bytes: int | None) -> list[Trial]:
        """Earlier trials that may be compared with."""
        return [each for each in self.tried if each.is_measured(limit_bytes)]

    def has_run(self, plan: Plan) -> bool:
        """Whether `plan` is in force, or among the earlier plans."""
        return any(each is not None and run_alike(each.plan, plan) for each in (self.trial, *self.tried))


def run_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same, whatever is predicted of them."""
    parts = [{n: (r.recipe, r.release, r.prefetch_bytes) for n, r in plan.regions.items()} for plan in (one, other)]
    return parts[0] == parts[1] and getattr(one.outside, "recipe", None) == getattr(other.outside, "recipe", None)


def bucket_of(tokens: int, measured: int = 1) -> int:
    """The smallest bucket of at least `tokens`. An octave has eight buckets, counted from `measured`."""
    steps = math.log2(tokens / measured) * THRESHOLDS.buckets
    return round(measured * 2 ** (math.ceil(steps - 1e-9) / THRESHOLDS.buckets))
