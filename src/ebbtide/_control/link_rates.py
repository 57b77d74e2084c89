"""Waits for copies, and rates of copies over those of the profile. Never waits."""

import dataclasses
from typing import NamedTuple

from ebbtide._engine.stats import CopyTiming, StatsRecorder
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._profiling.profile import Link


class LinkRatios(NamedTuple):
    """Measured over profiled rates of the link."""

    out: float = 1.0
    back: float = 1.0


class LinkRates:
    """Stalls and copy rates since the last question. Never waits for a copy.

    Args:
        recorder: statistics of the entry point whose copies are measured.
    """

    def __init__(self, recorder: StatsRecorder) -> None:
        self._recorder = recorder
        self._waited_s = self._total_waited_s()
        self._copied = self._total_copied()

    def waited_s(self) -> float:
        """Seconds of waiting for copies since the last call."""
        before, self._waited_s = self._waited_s, self._total_waited_s()
        return self._waited_s - before

    def ratios(self, link: Link) -> LinkRatios:
        """Rates of the copies since `restart` over the rates of `link`, out and back. Few copies, or equal rates: 1."""
        now, before = self._total_copied(), self._copied
        return LinkRatios(_ratio_since(now[0], before[0], link.out), _ratio_since(now[1], before[1], link.back))

    def restart(self) -> None:
        """Forget the copies so far: a profile has their rates."""
        self._copied = self._total_copied()

    def _total_waited_s(self) -> float:
        self._recorder.drain()
        return self._recorder.stats.stall_forward_s + self._recorder.stats.stall_backward_s

    def _total_copied(self) -> tuple[CopyTiming, CopyTiming]:
        stats = self._recorder.stats
        return dataclasses.replace(stats.out_sample), dataclasses.replace(stats.in_sample)


def _ratio_since(now: CopyTiming, before: CopyTiming, known: float) -> float:
    nbytes, seconds = now.nbytes - before.nbytes, now.seconds - before.seconds
    if nbytes < THRESHOLDS.least_copied_bytes or seconds <= 0:
        return 1.0
    ratio = nbytes / seconds / known
    return 1.0 if abs(ratio - 1) < THRESHOLDS.off else ratio
