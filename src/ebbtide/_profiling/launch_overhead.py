"""CPU launch overhead of a step, from the events of the timed step.

Note [Launch overhead]
~~~~~~~~~~~~~~~~~~~~~~
1. CPU work of recipes, beyond the model's own code, matters if the CPU is hardly ahead of compute: many small kernels,
   and a loop that reads each loss. A selective recipe of a region may then take longer to queue than to run.
2. The model's own CPU time is measured, and the preparation of recomputation as well. Further work of recipes is
   estimated by numbers of operators, saved outputs and parcels, in a unit: the CPU time that a dispatch mode adds to
   an operator. All of the work is Python on one core, so the measured preparation gives the unit. A core is half as
   fast while another thread shares the core, and a unit timed apart fits less: only steps without recomputation use a
   timed unit. The device queues some thousand kernels, so a CPU far ahead is blocked: most regions of a recorded
   backward take as much CPU time as compute time. The fastest of equal regions were not blocked.
3. The CPU is as far ahead of compute as recorded, and far enough that a step that keeps everything waits for nothing
   (launch-ahead). If the CPU is slower than compute over a step, the launch-ahead is used up at some point.
"""

import dataclasses
import itertools
import statistics
import timeit
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ebbtide._profiling.profile import Host, HostTime, RegionProfile
from ebbtide._profiling.recorder import ProfilingRecorder, StepEventKind
from ebbtide._profiling.region_times import RegionTimes
from ebbtide._utils.torch_private import OperatorMode

# In units: from steps of a ViT on the CPU of an H200 machine, with batches of pure CPU time, at 3.8 us a unit. Scaled
# by later measurements: modes take 0.81 of the old time, operators under a mode 0.84 (a small Llama), and preparing a
# region 0.82 (a small ViT). Check with the ViT at 2.25 us a unit: selective recipes that save seven outputs of 73
# operators take 0.6 to 0.7 ms more CPU time in forward than full recomputation; the estimate is 0.69 ms.
_PREPARE_REGION = 131.0
_INSPECT_OP = 2.5
_SAVE_OUTPUT = 18.0
_MOVE_PARCEL = 14.0
_MOST_RECOMPUTE = 1.5  # times forward


def host_of(
    recorder: ProfilingRecorder, names: Collection[str], regions: Sequence[RegionProfile], ops: Sequence[int]
) -> Host | None:
    """CPU times of the timed step; None on a device that computes synchronously.

    `regions` and `ops` have a profile and a number of operators for each pass through one of the regions `names`.
    """
    if not recorder.device.is_async:
        return None
    times = RegionTimes(recorder.events, names, lambda start, end: end.cpu_s - start.cpu_s)
    unit_s = _unit_s(times.prepared_s, regions)
    prepared_s, moved_s = _PREPARE_REGION * unit_s, _MOVE_PARCEL * unit_s
    runs: list[HostTime] = []  # forward without preparation
    for k, region in enumerate(regions):
        # Backward prepares the next pass in backward, taken as equal to pass k.
        own_s = prepared_s + moved_s * len(region.inputs) if times.prepared_s[k] > 0 else 0.0
        first_s, backward_s = times.forward_s[k] - times.prepared_s[k], max(0.0, times.backward_s[k] - own_s)
        runs.append(HostTime(first_s, backward_s, times.recompute_s[k], ops[k]))
    runs = _smoothed(runs, regions)
    kept = [dataclasses.replace(run, forward_s=_kept_s(run)) for run in runs]
    graph_s = statistics.median(k.forward_s - run.forward_s for k, run in zip(kept, runs, strict=True))
    return Host(
        regions=tuple(kept),
        before_s=times.before_s,
        after_s=times.after_s,
        backward_before_s=times.backward_before_s,
        launch_ahead_s=_launch_ahead_s(recorder),
        steady_launch_ahead_s=0.0,
        frame_s=max(0.0, prepared_s - graph_s),
        op_s=_INSPECT_OP * unit_s,
        saved_output_s=_SAVE_OUTPUT * unit_s,
        moved_s=moved_s,
    )


def _kept_s(run: HostTime) -> float:
    """CPU time of a forward that keeps. Recomputation makes a graph and a first run does not, so the longer of the two
    counts, unless recomputation was blocked by the device."""
    was_blocked = run.recompute_s >= _MOST_RECOMPUTE * run.forward_s
    return run.forward_s if was_blocked else max(run.forward_s, run.recompute_s)


def _smoothed(runs: Sequence[HostTime], regions: Sequence[RegionProfile]) -> list[HostTime]:
    """Equal regions take equal CPU time: the time of the faster passes."""
    keys = [
        (run.ops, len(region.saved_tensors), len(region.inputs), len(region.expensive_ops))
        for run, region in zip(runs, regions, strict=True)
    ]
    groups = {key: [run for own, run in zip(keys, runs, strict=True) if own == key] for key in set(keys)}
    smoothed = {key: _unblocked(group) for key, group in groups.items()}
    return [smoothed[key] for key in keys]


def _unblocked(runs: Sequence[HostTime]) -> HostTime:
    """CPU times without blocking by the device: the faster quarter in forward, where blocking is rare but the speed
    varies, and the second fastest in backward. Multiples of forward bound the rest, if all passes were blocked."""
    first_s = _quantile(len(runs) // 4, [run.forward_s for run in runs])
    backward_s = min(2.5 * first_s, _quantile(1, [run.backward_s for run in runs]))
    recompute_s = min(_MOST_RECOMPUTE * first_s, _quantile(1, [run.recompute_s for run in runs]))
    return HostTime(first_s, backward_s, recompute_s, runs[0].ops)


def _quantile(rank: int, seconds: Sequence[float]) -> float:
    """The value of `rank` from below, at most the lower median."""
    return sorted(seconds)[min(rank, (len(seconds) - 1) // 2)]


def _launch_ahead_s(recorder: ProfilingRecorder) -> float:
    """Lower bound of the delay of compute behind the CPU at the beginning of the step. Events not passed when the CPU
    recorded a later event bound the delay, until the first spin."""
    events, ahead_s = recorder.events, 0.0
    for event in itertools.takewhile(lambda each: each.kind is not StepEventKind.SPIN_ENDED, events):
        since_s = recorder.device.seconds_between(events[0].event, events[event.passed].event)
        ahead_s = max(ahead_s, event.at_s - events[0].at_s - since_s)
    return ahead_s


def _unit_s(prepared_s: Sequence[float], regions: Sequence[RegionProfile]) -> float:
    """Unit by the preparation of passes with offloaded inputs, or timed if no pass was prepared."""
    seen = zip(prepared_s, regions, strict=True)
    units = [s / (_PREPARE_REGION + _MOVE_PARCEL * len(region.inputs)) for s, region in seen if s > 0]
    return statistics.median(units) if units else _timed_unit_s()


def _timed_unit_s() -> float:
    """CPU time that a dispatch mode adds to an operator."""
    calls, t = 64, torch.empty(1)
    with _EmptyMode():
        with_mode_s = min(timeit.repeat(t.detach, number=calls))
    return max(0.0, with_mode_s - min(timeit.repeat(t.detach, number=calls))) / calls


class _EmptyMode(OperatorMode):
    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run_op(op, args, kwargs or {})
