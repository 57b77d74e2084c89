"""CPU launch overhead of a step, from the events of the timed step.

Note [Launch overhead]
~~~~~~~~~~~~~~~~~~~~~~
1. CPU work of recipes, beyond the model's own code, matters if the CPU is hardly ahead of compute: many small kernels,
   and a loop that reads each loss. A selective recipe of a region may then take longer to queue than to run.
2. The model's own CPU time is measured, and the preparation of recomputation as well. Further work of recipes is what
   a small module shows (_model/recipe_probe.py), times the ratio of preparations: a small module finds the caches of a
   core full of its own code, a model does not, and a core is half as fast while another thread shares the core. The
   device queues some thousand kernels, so a CPU far ahead is blocked: most regions of a recorded backward take as much
   CPU time as compute time. The fastest of equal regions were not blocked.
3. The CPU is as far ahead of compute as recorded, and far enough that a step that keeps everything waits for nothing
   (launch-ahead). If the CPU is slower than compute over a step, the launch-ahead is used up at some point.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ebbtide._profiling.profile import Host, HostTime, RegionProfile
from ebbtide._profiling.recorder import ProfilingRecorder, RegionRecord, StepEventKind
from ebbtide._profiling.region_times import RegionTimes

_MOST_RECOMPUTE = 1.5  # times forward


class RecipeCosts(NamedTuple):
    """CPU seconds that recipes add to the code of a region, as measured with a small module.

    Attributes:
        prepare_s: once where a region prepares for recomputation.
        save_s: for each tensor saved by a forward that will be recomputed.
        inspect_op_s: for each operator under a selective recipe.
        save_output_s: for each output that a selective recipe saves.
        move_s: for each parcel on the way out, and again on the way back.
        derive_s: for each derived tensor, and again when backward computes the tensor.
        op_s: for each operator of a forward that keeps.
        hook_s: for each saved tensor of a region that moves or derives some, in forward and in backward.
    """

    prepare_s: float
    save_s: float
    inspect_op_s: float
    save_output_s: float
    move_s: float
    derive_s: float
    op_s: float
    hook_s: float


def host_of(
    recorder: ProfilingRecorder,
    names: Collection[str],
    regions: Sequence[RegionProfile],
    details: Sequence[RegionRecord],
    costs: RecipeCosts | None,
    is_apart: bool = False,
) -> Host | None:
    """CPU times of the timed step; None on a device that computes synchronously, without `costs`.

    `regions` and `details` have a profile and a detailed record for each pass through one of the regions `names`.
    `is_apart`: other graphs ran between forward and backward.
    """
    if costs is None:
        return None
    times = RegionTimes(recorder.events, names, lambda start, end: end.cpu_s - start.cpu_s)
    costs = _scaled(costs, times.prepared_s, regions)
    prepared_s, moved_s = costs.prepare_s, costs.move_s
    runs: list[HostTime] = []  # forward without preparation
    for k, region in enumerate(regions):
        # Backward prepares the next pass in backward, taken as equal to pass k.
        own_s = prepared_s + moved_s * len(region.inputs) if times.prepared_s[k] > 0 else 0.0
        first_s, backward_s = times.forward_s[k] - times.prepared_s[k], max(0.0, times.backward_s[k] - own_s)
        runs.append(HostTime(first_s, backward_s, times.recompute_s[k], details[k].ops, details[k].saves))
    runs = _smoothed(runs, regions)
    # The recorded forward saved its tensors for a recomputation. Where a region keeps, no hook of ours runs.
    saved = [costs.save_s * len(region.saved_tensors) if any(times.prepared_s) else 0.0 for region in regions]
    kept = [
        dataclasses.replace(
            run, forward_s=max(0.0, _kept_s(run) - own_s), recompute_s=max(0.0, run.recompute_s - own_s)
        )
        for run, own_s in zip(runs, saved, strict=True)
    ]
    graph_s = statistics.median(k.forward_s - run.forward_s for k, run in zip(kept, runs, strict=True))
    return Host(
        regions=tuple(kept),
        before_s=times.before_s,
        after_s=times.after_s,
        backward_before_s=0.0 if is_apart else times.backward_before_s,
        launch_ahead_s=_launch_ahead_s(recorder),
        steady_launch_ahead_s=0.0,
        frame_s=max(0.0, prepared_s - graph_s),
        op_s=costs.inspect_op_s,
        saved_output_s=costs.save_output_s,
        moved_s=moved_s,
        derived_s=costs.derive_s,
        derived_op_s=costs.op_s,
        hook_s=costs.hook_s,
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
    return HostTime(first_s, backward_s, recompute_s, runs[0].ops, runs[0].saved)


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


def _scaled(costs: RecipeCosts, prepared_s: Sequence[float], regions: Sequence[RegionProfile]) -> RecipeCosts:
    """Costs in the step, by the preparation of passes with offloaded inputs; as they are if no pass was prepared."""
    seen = zip(prepared_s, regions, strict=True)
    ratios = [s / max(costs.prepare_s + costs.move_s * len(region.inputs), 1e-9) for s, region in seen if s > 0]
    return RecipeCosts(*(seconds * (statistics.median(ratios) if ratios else 1.0) for seconds in costs))
