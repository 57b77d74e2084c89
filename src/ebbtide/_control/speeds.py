"""Speed of a step and of the link, relative to the profile, from the last steps of a plan. Never waits.

Note [Speeds]
~~~~~~~~~~~~~
1. Steps later run at another speed than the few measured steps: clocks of a device rise and fall with temperature and
   power, and a CPU core is half as fast while another thread shares the core. The share of each in a slow step cannot
   be told without watching compute region by region, and a wrong guess favours the recipes that use the other. So one
   ratio, measured over predicted duration, multiplies all seconds of compute and CPU alike.
2. Waits for copies take no part in the ratio: the rates of the link are measured apart, from the copies themselves.
3. A deviation below `THRESHOLDS.off` is no reason to plan again, but predictions use the speeds.
"""

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
