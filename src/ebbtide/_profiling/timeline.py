"""What a step did when, and what the steps of a run took, as plain data. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ebbtide._plans import Prediction

Lane: TypeAlias = Literal["compute", "out", "back"]
Work: TypeAlias = Literal["forward", "recompute", "backward", "other", "copy", "stall"]

_MOST_STEPS = 512
_MOST_CHANGES = 32


class Interval(NamedTuple):
    """A piece of work of one lane.

    Attributes:
        work: "other" is compute outside of all regions. A stall is a wait of compute, beside the compute around it.
        region: name of the region that computes, or whose parcel is copied or waited for; "" outside of all regions.
        begin_s, end_s: time from the begin of the step.
        nbytes: of a copy; otherwise 0.
    """

    lane: Lane
    work: Work
    region: str
    begin_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step. `began_ns`: wall-clock time of the begin in ns since 1970; 0 for a predicted step."""

    intervals: tuple[Interval, ...]
    step_s: float
    began_ns: int = 0


class Step(NamedTuple):
    """A step by a plan. `number` counts forwards by plans; 0 stands for an unknown peak or prediction."""

    number: int
    seconds: float
    predicted_s: float
    peak_bytes: int
    predicted_peak_bytes: int


class Change(NamedTuple):
    """A plan came into force, changed, or was frozen after step `number`."""

    number: int
    what: str


class History:
    """Steps of a run, some hundred of them evenly spread, and the latest changes of the plan."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.changes: deque[Change] = deque(maxlen=_MOST_CHANGES)
        self._count = 0
        self._every = 1

    def add(self, seconds: float, peak_bytes: int, predicted: Prediction | None) -> None:
        self._count += 1
        if self._count % self._every:
            return
        expected = (0.0, 0) if predicted is None else (predicted.step_s, predicted.peak_bytes)
        self.steps.append(Step(self._count, max(0.0, seconds), expected[0], peak_bytes, expected[1]))
        if len(self.steps) == _MOST_STEPS:
            self._every *= 2
            self.steps = self.steps[1::2]

    def note(self, what: str) -> None:
        self.changes.append(Change(self._count, what))
