"""What queueing a step took the host, from the notes of one that was watched for times.

Note [The host]
~~~~~~~~~~~~~~~
1. What recipes make the host do, beyond the model's own code, matters where it is hardly ahead of compute: many small
   kernels, and a loop that looks at each loss. There a selective recipe of a region may take longer to queue than to
   run.
2. The model's own share is measured, and so is what prepares a region to run again. What else recipes add is reckoned
   by operators, outputs and parcels, in a unit: what a bare dispatch mode takes for an operator. All of this is Python
   on one core, so the unit is what fits the measured preparation. A core is half as fast while its other thread is
   busy: what is timed at another time fits less, and is left to steps in which no region runs again.
   The device queues some thousand kernels and no more, so a host that is far ahead is held back: most regions of a
   watched backward take it as long as they take compute. The quickest of those that are alike were not held back.
3. The host is as far ahead of compute as it was seen to be, and far enough that a step with everything kept waits for
   nothing (leads.py). Where it takes longer for a step than compute does, that is used up after some.
"""

import itertools
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ebbtide._profiling.profile import Host, HostTime, RegionProfile
from ebbtide._profiling.recorder import Place, StepWatch
from ebbtide._profiling.region_times import Clock
from ebbtide._utils.torch_private import OperatorMode

# In what a bare dispatch mode takes for an operator: from steps of a ViT on the host of an H200, with batches so small
# that all of it is the host's, where that was 3.8 us. Modes take 0.81 of that since, and looking at an operator 0.84 of
# what it did, by steps of a small Llama on another host; to prepare a region takes 0.82 of what it did, by steps of a
# small ViT there. The figures are those, in today's unit. Steps of the ViT by plans bear them out: where the unit is
# 2.25 us, selective recipes that hold seven outputs of 73 operators take the host 0.6 to 0.7 ms more in forward than
# those that run all again, and 0.69 are reckoned.
_FRAME = 131.0
_LOOKED_AT = 2.5
_HELD = 18.0
_MOVED = 14.0
_MOST_AGAIN = 1.5  # times the forward
_MOST_BACKWARD = 2.5
_CALLS = 64
_TRIES = 5


def host_of(
    watch: StepWatch, names: Collection[str], regions: Sequence[RegionProfile], ops: Sequence[int]
) -> Host | None:
    """The host in the step of `watch`; None where compute has no queue.

    Args:
        regions: of the step's profile, one per pass.
        ops: that each of them calls.
    """
    if not watch.device.is_async:
        return None
    clock = Clock(watch.notes, names, lambda start, end: end.host_s - start.host_s)
    unit_s = _unit_s(clock.prepared_s, regions)
    prepared_s, moved_s = _FRAME * unit_s, _MOVED * unit_s
    runs: list[_Runs] = []
    for k, region in enumerate(regions):
        # Backward prepares the pass that is next there, which is taken to be alike.
        own_s = prepared_s + moved_s * len(region.inputs) if clock.prepared_s[k] > 0 else 0.0
        first_s, backward_s = clock.forward_s[k] - clock.prepared_s[k], max(0.0, clock.backward_s[k] - own_s)
        runs.append(_Runs(first_s, clock.again_s[k], backward_s))
    runs = _steadied(runs, regions, ops)
    graph_s = statistics.median(run.kept_s - run.first_s for run in runs)
    return Host(
        regions=tuple(
            HostTime(run.kept_s, run.backward_s, run.again_s, count) for run, count in zip(runs, ops, strict=True)
        ),
        before_s=clock.before_s,
        after_s=clock.after_s,
        turn_s=clock.turn_s,
        lead_s=_seen_lead_s(watch),
        steady_lead_s=0.0,
        frame_s=max(0.0, prepared_s - graph_s),
        op_s=_LOOKED_AT * unit_s,
        held_s=_HELD * unit_s,
        moved_s=moved_s,
    )


class _Runs(NamedTuple):
    """What the host took for a region, in seconds."""

    first_s: float
    again_s: float
    backward_s: float

    @property
    def kept_s(self) -> float:
        """For a run that keeps: a first run of a region that runs again makes no graph, its second one does. Where that
        one was held back nobody knows."""
        was_held_back = self.again_s >= _MOST_AGAIN * self.first_s
        return self.first_s if was_held_back else max(self.first_s, self.again_s)


def _steadied(runs: Sequence[_Runs], regions: Sequence[RegionProfile], ops: Sequence[int]) -> list[_Runs]:
    """Regions that are made alike take the host the same: what the quicker of them took."""
    alike: dict[tuple[int, ...], list[_Runs]] = {}
    keys = [(count, len(r.saves), len(r.inputs), len(r.dear)) for r, count in zip(regions, ops, strict=True)]
    for key, own in zip(keys, runs, strict=True):
        alike.setdefault(key, []).append(own)
    own = {key: _own(group) for key, group in alike.items()}
    return [own[key] for key in keys]


def _own(runs: Sequence[_Runs]) -> _Runs:
    """Where it was not held back. In forward it seldom is, and its pace is no steady one: the quicker quarter, and the
    second quickest in backward. Where all are held back forward bounds the others."""
    first_s = _from_below(len(runs) // 4, [run.first_s for run in runs])
    return _Runs(
        first_s,
        again_s=min(_MOST_AGAIN * first_s, _from_below(1, [run.again_s for run in runs])),
        backward_s=min(_MOST_BACKWARD * first_s, _from_below(1, [run.backward_s for run in runs])),
    )


def _from_below(number: int, seconds: Sequence[float]) -> float:
    """So many are less than it; no more than half of them."""
    return sorted(seconds)[min(number, (len(seconds) - 1) // 2)]


def _seen_lead_s(watch: StepWatch) -> float:
    """How long after the host compute came to the step's beginning, at least: what compute had not come by when the
    host was at a note, it came by later. Until compute is held back."""
    first, lead_s = watch.notes[0], 0.0
    own = itertools.takewhile(lambda note: note.place is not Place.GOES_ON, watch.notes)
    for note, ahead in ((note, watch.notes[note.passed]) for note in own):
        since_s = watch.device.seconds_between(first.event, ahead.event)
        lead_s = max(lead_s, note.at_s - first.at_s - since_s)
    return lead_s


def _unit_s(prepared_s: Sequence[float], regions: Sequence[RegionProfile]) -> float:
    """By what it took to prepare the passes to run again, with their inputs moved; without any, timed here."""
    seen = zip(prepared_s, regions, strict=True)
    units = [seconds / (_FRAME + _MOVED * len(region.inputs)) for seconds, region in seen if seconds > 0]
    return statistics.median(units) if units else _timed_unit_s()


def _timed_unit_s() -> float:
    """What an operator takes the host longer where a dispatch mode looks at it."""
    t = torch.empty(1)
    with _Looking():
        looked_at_s = min(_seconds_of_calls(t) for _ in range(_TRIES))
    return max(0.0, looked_at_s - min(_seconds_of_calls(t) for _ in range(_TRIES))) / _CALLS


def _seconds_of_calls(t: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        t.detach()
    return time.perf_counter() - start


class _Looking(OperatorMode):
    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run_op(op, args, kwargs or {})
