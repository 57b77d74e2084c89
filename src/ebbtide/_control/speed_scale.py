"""Current speed of compute, CPU and link, relative to the profile, from the last steps of a plan. Never waits.

Note [Speed scales]
~~~~~~~~~~~~~~~~~~~
1. A device in the first seconds of work runs some percent faster or slower than later: clocks rise and fall after a
   pause, and fall at the limit of power. The measured steps come early, and the CPU is kept ahead by idle time of the
   device: the following kernels run on a cool device, up to 7 % faster in forward, and by less in backward. Forward and
   backward therefore have a scale each. A CPU core is half as fast while another thread shares the core.
2. A deviation below `THRESHOLDS.off` is no reason to plan again, but predictions use the scales.
3. The duration of a step is the sum of compute and waiting for the CPU. A region queued entirely before compute arrived
   (`RegionEntry.was_queued_ahead`) has a duration of compute alone: the compute scale comes from these regions. The
   remaining time of the other regions is waiting for the CPU, without further assumptions.
4. The CPU scale comes from the CPU time of forward. If compute is behind, the CPU may have been blocked by the device:
   the scale is then at most 1.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import compress, pairwise
from typing import NamedTuple

from ebbtide._engine.stats import CopyTiming, StatsRecorder
from ebbtide._planner import simulate
from ebbtide._planner.options import Option
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Link, Profile
from ebbtide._profiling.step_events import LaunchTimes, RegionEntry


class FinishedStep(NamedTuple):
    """A measured step.

    Attributes:
        share: batch size over the planned batch size.
        stall_forward_s: seconds of waiting for copies in forward.
        stall_backward_s: seconds of waiting for copies in backward.
    """

    launch_times: LaunchTimes
    share: float
    stall_forward_s: float
    stall_backward_s: float


class ComputeScale(NamedTuple):
    """Measured over profiled time of compute, in forward and in backward (with recomputation)."""

    forward: float
    backward: float


class Speeds(NamedTuple):
    """Measured over profiled figures.

    Attributes:
        cpu: time of the CPU.
        forward, backward: time of compute, as of `ComputeScale`; 0: unknown.
        out, back: rates of the link.
    """

    cpu: float = 1.0
    forward: float = 0.0
    backward: float = 0.0
    out: float = 1.0
    back: float = 1.0

    @property
    def compute(self) -> ComputeScale | None:
        """None if unknown."""
        return ComputeScale(self.forward, self.backward) if self.forward > 0 else None


class _ForwardLaunch(NamedTuple):
    regions: int
    seconds: float
    is_cpu_bound: bool


class SpeedScales:
    """Time of compute and CPU in the last steps of one plan, over the time in the profile."""

    def __init__(self) -> None:
        self._finished: deque[FinishedStep] = deque(maxlen=THRESHOLDS.remembered)
        self._forwards: deque[_ForwardLaunch] = deque(maxlen=THRESHOLDS.remembered_forwards)

    def clear(self) -> None:
        """Forget all steps: the plan has changed."""
        self._finished.clear()
        self._forwards.clear()

    def add_step(self, step: FinishedStep) -> None:
        times = step.launch_times
        self._finished.append(step)
        self._forwards.append(_ForwardLaunch(len(times.forward), times.seconds, times.is_cpu_bound))

    def of_compute(self, profile: Profile, plan: Plan) -> ComputeScale | None:
        """Scale of compute. An unknown direction gets the scale of the known direction.

        1 if compute waited for the CPU in nearly all regions. None if unknown: too few steps, another order of regions
        (or a region twice in a row), or stalls.
        """
        options = simulate.options_of_plan(profile, plan)
        forward, backward = _forward(profile, options), _backward(profile, options)
        seen = (
            [_sample(each, each.launch_times.forward, forward, each.stall_forward_s) for each in self._finished],
            [_sample(each, each.launch_times.backward, backward, each.stall_backward_s) for each in self._finished],
        )
        scales = [_median(samples) for samples in seen]
        known = [scale for scale in scales if scale is not None]
        if known:
            return ComputeScale(*(known[0] if scale is None else scale for scale in scales))
        waited = sum(any(each is not None for each in samples) for samples in zip(*seen, strict=True))
        return ComputeScale(1.0, 1.0) if waited >= THRESHOLDS.measured_steps and profile.host is not None else None

    def of_cpu(self, profile: Profile, plan: Plan) -> float:
        """Scale of the CPU; 1 if unknown."""
        forwards = [each for each in self._forwards if each.regions == len(profile.regions)]
        if profile.host is None or len(forwards) < THRESHOLDS.measured_steps:
            return 1.0
        expected_s = max(simulate.forward_launch_s(profile, profile.host, plan), 1e-9)
        took = ((each.seconds / expected_s, each.is_cpu_bound) for each in forwards)
        return statistics.median(scale if is_cpu_bound else min(1.0, scale) for scale, is_cpu_bound in took)


class _Expected(NamedTuple):
    """Profiled regions in the order of forward or of backward. `lost_s`: compute time lost to concurrent copies."""

    names: list[str]
    seconds: list[float]
    lost_s: float


def _forward(profile: Profile, options: Sequence[Option]) -> _Expected:
    link, moved_bytes = profile.link, sum(option.moved_bytes for option in options)
    names, seconds = [r.name for r in profile.regions], [r.forward_s for r in profile.regions]
    return _Expected(names, seconds, link.interference * moved_bytes / link.out)


def _backward(profile: Profile, options: Sequence[Option]) -> _Expected:
    """Without regions that have no backward (in front of all trained parameters)."""
    link, moved_bytes = profile.link, sum(option.moved_bytes for option in options)
    times = [(r.name, o.recompute_s + r.backward_s) for r, o in zip(profile.regions, options, strict=True)]
    entered = [(name, seconds) for name, seconds in reversed(times) if seconds > 0.0]
    return _Expected([n for n, _ in entered], [s for _, s in entered], link.interference * moved_bytes / link.back)


class _Sample(NamedTuple):
    """Scale of compute in one direction of one step. `share`: profiled time of the regions queued ahead, over all."""

    scale: float
    share: float


def _sample(step: FinishedStep, entries: Sequence[RegionEntry], expected: _Expected, stall_s: float) -> _Sample | None:
    """From all regions but the last, because no event marks the end of the last region."""
    own = _merged(expected, [entry.region for entry in entries])
    if own is None or len(entries) < 2:
        return None
    seconds = [step.launch_times.seconds_between(start, end) for start, end in pairwise(entries)]
    all_s = max(sum(seconds), 1e-9)
    if stall_s > THRESHOLDS.off * all_s:  # stalls cannot be assigned to regions
        return None
    was_ahead = [end.was_queued_ahead for end in entries[1:]]
    ahead_s = sum(compress(seconds, was_ahead))
    expected_s = step.share * sum(compress(own, was_ahead))
    if expected_s <= 0.0:
        return _Sample(1.0, 0.0)
    waited_s = (stall_s + step.share * expected.lost_s) * ahead_s / all_s
    return _Sample((ahead_s - waited_s) / expected_s, expected_s / (step.share * sum(own[:-1])))


def _merged(expected: _Expected, entered: Sequence[str]) -> list[float] | None:
    """Expected seconds from each of the regions `entered` to the next. Backward does not notice regions that rest. None
    for another order."""
    seconds: list[float] = []
    for name, region_s in zip(expected.names, expected.seconds, strict=True):
        if len(seconds) < len(entered) and name == entered[len(seconds)]:
            seconds.append(region_s)
        elif seconds:
            seconds[-1] += region_s
    return seconds if len(seconds) == len(entered) else None


def _median(samples: Sequence[_Sample | None]) -> float | None:
    own = [each.scale for each in samples if each is not None and each.share >= THRESHOLDS.least_compute]
    return statistics.median(own) if len(own) >= THRESHOLDS.measured_steps else None


class LinkRates:
    """Stalls and copy rates since the last question. Never waits for a copy.

    Args:
        recorder: statistics of the entry point whose copies are measured.
    """

    def __init__(self, recorder: StatsRecorder) -> None:
        self._recorder = recorder
        self._waited_s = self._total_waited_s()
        self._copied = self._total_copied()

    def waited_s(self) -> tuple[float, float]:
        """Seconds of waiting for copies since the last call, in forward and in backward."""
        before, self._waited_s = self._waited_s, self._total_waited_s()
        return self._waited_s[0] - before[0], self._waited_s[1] - before[1]

    def ratios(self, link: Link) -> tuple[float, float]:
        """Rates of the copies since `restart` over the rates of `link`, out and back. Few copies, or equal rates: 1."""
        now, before = self._total_copied(), self._copied
        return _ratio_since(now[0], before[0], link.out), _ratio_since(now[1], before[1], link.back)

    def restart(self) -> None:
        """Forget the copies so far: a profile has their rates."""
        self._copied = self._total_copied()

    def _total_waited_s(self) -> tuple[float, float]:
        self._recorder.drain()
        return self._recorder.stats.stall_forward_s, self._recorder.stats.stall_backward_s

    def _total_copied(self) -> tuple[CopyTiming, CopyTiming]:
        stats = self._recorder.stats
        return dataclasses.replace(stats.out_sample), dataclasses.replace(stats.in_sample)


def _ratio_since(now: CopyTiming, before: CopyTiming, known: float) -> float:
    nbytes, seconds = now.nbytes - before.nbytes, now.seconds - before.seconds
    if nbytes < THRESHOLDS.least_copied_bytes or seconds <= 0:
        return 1.0
    ratio = nbytes / seconds / known
    return 1.0 if abs(ratio - 1) < THRESHOLDS.off else ratio
