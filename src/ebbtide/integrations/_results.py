"""`offload` over a training: metrics for loggers on the way, and plan, profile and stats after the end."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide._engine.stats import TOTALS, Stats
from ebbtide._offload import OffloadHandle, offload
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._reports.run import Run
from ebbtide._reports.stats_text import stats_text


class Metrics:
    """`Stats.metrics` of all `handles` together.

    Totals since the last call of `read` are added up. Of states the largest counts, because models on one device share
    memory and store.
    """

    def __init__(self, handles: Iterable[OffloadHandle]) -> None:
        self._handles = list(handles)
        self._before = self._stats()

    def read(self) -> dict[str, float]:
        before, self._before = self._before, self._stats()
        merged: dict[str, float] = {}
        for earlier, now in zip(before, self._before, strict=True):
            for name, value in now.metrics(since=earlier).items():
                known = merged.get(name, 0)
                merged[name] = known + value if name in TOTALS else max(known, value)
        return merged

    def _stats(self) -> list[Stats]:
        return [handle.stats() for handle in self._handles]


@dataclass(frozen=True)
class Result:
    """Plan, profile and stats of a training, under the names of a handle. No model is kept alive:

        trainer.train()
        print(callback.result)
        callback.result.save("run.json")  # for `ebbtide report`

    Attributes:
        plan: the last plan of the training.
        profile: measured or written by the user; None without a planner, and for a training too short to measure.
    """

    plan: Plan
    profile: Profile | None
    _stats: Stats
    _run: Run

    @staticmethod
    def of(handle: OffloadHandle) -> "Result":
        """The present state of `handle`."""
        return Result(handle.plan, handle.profile, handle.stats(), handle._run())

    def stats(self) -> Stats:
        """Totals of the whole training."""
        return self._stats

    def report(self) -> str:
        """The figures of `stats` as a table."""
        return stats_text(self._stats)

    def save(self, path: str | Path) -> None:
        """As `handle.save`, for `ebbtide report`. Raises ConfigError if no file can be written there."""
        self._run.save(path)

    def __str__(self) -> str:
        return f"{self.plan}\n{self.report()}"


class OffloadedTraining:
    """Base of callbacks for trainers of one model: a handle from the beginning of a training to the end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.handle: OffloadHandle | None = None
        """Of the present training; None between trainings."""
        self._settings = settings
        self._metrics = Metrics([])
        self._result: Result | None = None

    @property
    def result(self) -> Result | None:
        """Plan, report and stats of the present or the last training; None before the first."""
        return self._result if self.handle is None else Result.of(self.handle)

    def _begin(self, module: torch.nn.Module) -> None:
        self.handle = offload(module, **self._settings)
        self._metrics = Metrics([self.handle])

    def _end(self) -> None:
        """End the present training, if any."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._metrics = Metrics([])
            handle.remove()  # before the result: reading a failed device raises
            self._result = Result.of(handle)
