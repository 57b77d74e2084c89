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
3. The host is as far ahead of compute as it was seen to be, and far enough that a step with everything kept waits for
   nothing (leads.py). Where it takes longer for a step than compute does, that is used up after some.
"""

import itertools
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ebbtide._torch import OperatorMode
from ebbtide.planner.clock import Clock
from ebbtide.planner.measure import Place, StepWatch
from ebbtide.planner.profile import Host, HostTime, RegionProfile

# In what a bare dispatch mode takes for an operator: from steps of a ViT on the host of an H200, with batches so small
# that all of it is the host's, where that was 3.8 us. Modes take 0.81 of that since, and looking at an operator 0.84 of
# what it did, by steps of a small Llama on another host; to prepare a region takes 0.82 of what it did, by steps of a
# small ViT there. The figures are those, in today's unit.
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
    if not watch.device.has_queue:
        return None
    clock = Clock(watch.notes, names, lambda start, end: end.host_s - start.host_s)
    unit_s = _unit_s(clock.prepared_s, regions)
    frame_s, moved_s = _FRAME * unit_s, _MOVED * unit_s
    times: list[HostTime] = []
    for k, region in enumerate(regions):
        prepared_s = clock.prepared_s[k]
        # Backward prepares the pass that is next there, which is taken to be alike.
        own_s = frame_s + moved_s * len(region.inputs) if prepared_s > 0 else 0.0
        forward_s, backward_s = clock.forward_s[k] - prepared_s, max(0.0, clock.backward_s[k] - own_s)
        times.append(HostTime(forward_s, backward_s, clock.again_s[k], ops[k]))
    times = _steadied(times, regions)
    return Host(
        regions=tuple(times),
        before_s=clock.before_s,
        after_s=clock.after_s,
        turn_s=clock.turn_s,
        lead_s=_seen_lead_s(watch),
        steady_lead_s=0.0,
        frame_s=frame_s,
        op_s=_LOOKED_AT * unit_s,
        held_s=_HELD * unit_s,
        moved_s=moved_s,
    )


def _steadied(times: Sequence[HostTime], regions: Sequence[RegionProfile]) -> list[HostTime]:
    """Regions that are made alike take the host the same: the middle of what they took."""
    alike: dict[tuple[int, ...], list[HostTime]] = {}
    keys = [(t.ops, len(r.saves), len(r.inputs), len(r.dear)) for t, r in zip(times, regions, strict=True)]
    for key, own in zip(keys, times, strict=True):
        alike.setdefault(key, []).append(own)
    return [_middle(alike[key]) for key in keys]


def _middle(times: Sequence[HostTime]) -> HostTime:
    """A host that is far ahead is held back where it launches more: that is none of its own time, and as it was not yet
    so in forward, this bounds the others."""
    forward_s = statistics.median(own.forward_s for own in times)
    return HostTime(
        forward_s=forward_s,
        backward_s=min(_MOST_BACKWARD * forward_s, statistics.median(own.backward_s for own in times)),
        again_s=min(_MOST_AGAIN * forward_s, statistics.median(own.again_s for own in times)),
        ops=times[0].ops,
    )


def _seen_lead_s(watch: StepWatch) -> float:
    """How long after the host compute came to the step's beginning, at least: what compute had not come by when the
    host was at a note, it came by later. Until compute is held back."""
    first, lead_s = watch.notes[0], 0.0
    own = itertools.takewhile(lambda note: note.place is not Place.GOES_ON, watch.notes)
    for note, ahead in ((note, watch.notes[note.passed]) for note in own):
        since_s = watch.device.seconds_between(first.event, ahead.event)
        lead_s = max(lead_s, note.host_s - first.host_s - since_s)
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
        return op(*args, **(kwargs or {}))
