"""How fast compute and the host are by now: the last steps of a plan beside the profile that it was made from.

Waits for nothing.

Note [The pace]
~~~~~~~~~~~~~~~
1. A device in its first seconds of work is some percent faster or slower than one that has worked for a while: its
   clocks go up and down after a pause, and fall where it is at its limit of power. The watched steps are among the
   first, and held back so that the host is ahead: what comes behind that runs on a cool device, up to 7 % quicker, and
   backward by less. So each way has a pace of its own. And a host is half as fast while another thread has its core,
   for a second or a tenth of one.
2. What is off by less than REPLAN_AT is no reason to plan again, but what is predicted goes by it.
3. A step says how long compute and host took together, and not which of them. But where the whole of a region had been
   queued when compute came to it, what compute took for it is its own (`Point.was_behind`): these regions say its pace.
   What it waits for the host in the others is what is left, and nothing has to be believed of that.
4. The host's pace is what forward took it. Where compute is behind the host may have been held back by it: then it is
   no slower than was believed.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import compress, pairwise
from typing import NamedTuple

from ebbtide._planner import launch_ahead
from ebbtide._planner.options import Option
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.step_events import Point, Queueing

_STEPS = 8
_LEAST_STEPS = 3
_HOST_STEPS = 32  # its speed comes and goes
_LEAST_SHARE = 0.2  # of the time of all regions is compute's own, or it says nothing
_MOST_STALLED = 0.05  # of it compute waits for the link: nobody knows in which regions


class Passed(NamedTuple):
    """A step that has passed.

    Attributes:
        share: its batch, of the size that was planned for.
        stall_forward_s, stall_backward_s: what compute waited for the link.
    """

    queueing: Queueing
    share: float
    stall_forward_s: float
    stall_backward_s: float


class OfCompute(NamedTuple):
    """How many times as long as the profile says it takes: in forward, and in backward with what runs again there."""

    forward: float
    backward: float


class _Queued(NamedTuple):
    """A forward: how many regions it came by, the host's seconds for them, and whether compute waited for that."""

    regions: int
    seconds: float
    is_waited_for: bool


class Paces:
    """Of the last steps of one plan: how many times as long as `profile` says compute and the host take."""

    def __init__(self) -> None:
        self._passed: deque[Passed] = deque(maxlen=_STEPS)
        self._forwards: deque[_Queued] = deque(maxlen=_HOST_STEPS)

    def clear(self) -> None:
        """Another plan is followed."""
        self._passed.clear()
        self._forwards.clear()

    def saw(self, passed: Passed) -> None:
        queueing = passed.queueing
        self._passed.append(passed)
        self._forwards.append(_Queued(len(queueing.forward), queueing.seconds, queueing.is_waited_for))

    def of_compute(self, profile: Profile, plan: Plan) -> OfCompute | None:
        """A way that does not say has the pace of the other one. 1 if compute waited for the host in all but a few
        regions; None if the steps do not say: they were too few, came by the regions in another order (or by one of
        them several times running), or waited for the link."""
        options = launch_ahead.options_of_plan(profile, plan)
        forward, backward = _forward(profile, options), _backward(profile, options)
        seen = (
            [_seen_in(each, each.queueing.forward, forward, each.stall_forward_s) for each in self._passed],
            [_seen_in(each, each.queueing.backward, backward, each.stall_backward_s) for each in self._passed],
        )
        paces = [_median(way) for way in seen]
        known = [pace for pace in paces if pace is not None]
        if known:
            return OfCompute(*(known[0] if pace is None else pace for pace in paces))
        waited = sum(any(each is not None for each in ways) for ways in zip(*seen, strict=True))
        return OfCompute(1.0, 1.0) if waited >= _LEAST_STEPS and profile.host is not None else None

    def of_host(self, profile: Profile, plan: Plan) -> float:
        """1 if the steps do not say."""
        forwards = [each for each in self._forwards if each.regions == len(profile.regions)]
        if profile.host is None or len(forwards) < _LEAST_STEPS:
            return 1.0
        believed_s = max(launch_ahead.queueing_forward_s(profile, profile.host, plan), 1e-9)
        took = ((each.seconds / believed_s, each.is_waited_for) for each in forwards)
        return statistics.median(pace if is_waited_for else min(1.0, pace) for pace, is_waited_for in took)


class _Way(NamedTuple):
    """The regions as forward comes by them, or backward: what compute should take for each.

    Attributes:
        lost_s: what it loses to the copies beside it.
    """

    names: list[str]
    believed_s: list[float]
    lost_s: float


def _forward(profile: Profile, options: Sequence[Option]) -> _Way:
    link, moved_bytes = profile.link, sum(option.moved_bytes for option in options)
    names, believed_s = [r.name for r in profile.regions], [r.forward_s for r in profile.regions]
    return _Way(names, believed_s, link.interference * moved_bytes / link.out)


def _backward(profile: Profile, options: Sequence[Option]) -> _Way:
    """Without the regions that have none (in front of all that is trained)."""
    link, moved_bytes = profile.link, sum(option.moved_bytes for option in options)
    times = [(r.name, o.again_s + r.backward_s) for r, o in zip(profile.regions, options, strict=True)]
    came_by = [(name, seconds) for name, seconds in reversed(times) if seconds > 0.0]
    return _Way([n for n, _ in came_by], [s for _, s in came_by], link.interference * moved_bytes / link.back)


class _Seen(NamedTuple):
    """On one way of one step, by regions that were queued before compute came to them. `share`: of the time of all."""

    pace: float
    share: float


def _seen_in(passed: Passed, points: Sequence[Point], way: _Way, stall_s: float) -> _Seen | None:
    """By all regions but the last one: where that ends nobody looks."""
    if [point.region for point in points] != way.names or len(points) < 2:
        return None
    seconds = [passed.queueing.seconds_between(start, end) for start, end in pairwise(points)]
    all_s = max(sum(seconds), 1e-9)
    if stall_s > _MOST_STALLED * all_s:
        return None
    was_own = [end.was_behind for end in points[1:]]
    own_s = sum(compress(seconds, was_own))
    believed_s = passed.share * sum(compress(way.believed_s, was_own))
    if believed_s <= 0.0:
        return _Seen(1.0, 0.0)
    waited_s = (stall_s + passed.share * way.lost_s) * own_s / all_s
    return _Seen((own_s - waited_s) / believed_s, believed_s / (passed.share * sum(way.believed_s[:-1])))


def _median(seen: Sequence[_Seen | None]) -> float | None:
    own = [each.pace for each in seen if each is not None and each.share >= _LEAST_SHARE]
    return statistics.median(own) if len(own) >= _LEAST_STEPS else None
