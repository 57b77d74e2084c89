"""Files of runs, for `ebbtide report`."""

import atexit
import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideError, EbbtideWarning, PlanError
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.timeline import Change, Step, Timeline
from ebbtide._reports.stats_text import stats_text
from ebbtide._utils.serialize import read_file, write_file

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A run up to now, on one rank.

    Attributes:
        made_for: model, device and torch, by name, as far as known.
        rank, ranks: number of the process in the job, and processes of the job.
        metrics: as of `Stats.metrics`.
        stalls: as of `Stats.stall_by_region`.
        report: the figures as text.
        plan: the plan in force; before the first, its status.
        profile: of the batch size of the plan; None without a planner, and before the measurement.
        steps, changes: of the run, by plans.
        timeline: a measured step of the plan, if there is one.
    """

    made_for: Mapping[str, str]
    rank: int
    ranks: int
    metrics: Mapping[str, float]
    stalls: Mapping[str, float]
    report: str
    plan: Plan
    profile: Profile | None = None
    steps: tuple[Step, ...] = ()
    changes: tuple[Change, ...] = ()
    timeline: Timeline | None = None

    @staticmethod
    def of(
        stats: Stats,
        made_for: Mapping[str, str],
        plan: Plan,
        profile: Profile | None = None,
        steps: tuple[Step, ...] = (),
        changes: tuple[Change, ...] = (),
        timeline: Timeline | None = None,
    ) -> "Run":
        """A run with the figures of `stats`."""
        metrics, text = stats.metrics(), stats_text(stats)
        found = metrics, stats.stall_by_region, text, plan, profile, steps, changes, timeline
        return Run(dict(made_for), stats.rank, stats.ranks, *found)

    def save(self, path: str | Path) -> None:
        """Write the run as JSON, for `ebbtide report`.

        Raises:
            ConfigError: no file can be written there.
            PlanError: the plan chooses operators by a function, which a file cannot hold.
        """
        self.plan.check_fits_a_file()
        try:
            write_file(self, path, FORMAT)
        except OSError as error:
            raise ConfigError(f"save({str(path)!r}): the file cannot be written ({error.strerror})") from error

    @staticmethod
    def load(path: str | Path) -> "Run":
        """Read a file that `save` wrote. Raises PlanError for anything else."""
        hint = "give the file of handle.save(...) or EBBTIDE_REPORT instead"
        hints = {"link": f"it is a profile: {hint}", "regions": f"it is a plan or a profile: {hint}"}
        run = read_file(Run, path, "run", (FORMAT,), hints)
        if run is None:
            raise PlanError(f"{path} was written by another version of ebbtide: make the report with that version")
        return run


class RunFile:
    """The file of EBBTIDE_REPORT for one handle or context, written once: at the end of the process or earlier.

    The second handle of a process adds -2 to the name of the file, and rank 1 adds -rank1.

    Args:
        path: of the file.
        read: returns the run up to now; None after the end of the handle.
    """

    _numbers = itertools.count(1)

    def __init__(self, path: Path, read: Callable[[], Run | None]) -> None:
        number = next(self._numbers)
        self._path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        self._read = read
        self._process = os.getpid()
        atexit.register(self.write)

    def write(self, read: Callable[[], Run | None] | None = None) -> None:
        """Write the run up to now, of `read` if given. Later calls do nothing. A failure is a warning."""
        atexit.unregister(self.write)
        is_due, self._process = self._process == os.getpid(), 0  # not in a fork
        run = (read or self._read)() if is_due else None
        if run is None:
            return
        path = self._path if run.rank == 0 else self._path.with_stem(f"{self._path.stem}-rank{run.rank}")
        try:
            run.save(path)
        except EbbtideError as error:
            warnings.warn(f"EBBTIDE_REPORT: the report was not written: {error}", EbbtideWarning, stacklevel=2)
