"""How fast compute and the host are by now: the last steps of a plan beside the profile that it was made from.

Waits for nothing.

Note [The pace]
~~~~~~~~~~~~~~~
1. A device in its first seconds of work is some percent faster or slower than one that has worked for a while: its
   clocks go up and down after a pause, and fall where it is at its limit of power. The watched steps are among the
   first. And a host is half as fast while another thread has its core, for a second or a tenth of one.
2. What is off by less than REPLAN_AT is no reason to plan again, but what is predicted goes by it.
3. A step says how long compute and host took together, and not which of them. But where the whole of a region had been
   queued when compute came to it, what compute took for it is its own (`Point.was_behind`): these regions say its pace.
   What it waits for the host in the others is what is left, and nothing has to be believed of that.
4. The host's pace is what forward took it. Where compute is behind the host may have been held back by it: then it is
   no slower than was believed.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ebbtide.planner import leads
from ebbtide.planner.options import Option
from ebbtide.planner.profile import Profile, RegionProfile
from ebbtide.planner.pulse import Point, Queueing
from ebbtide.plans import Plan

_STEPS = 8
_LEAST_STEPS = 3
_HOST_STEPS = 32  # its speed comes and goes
_LEAST_SHARE = 0.2  # of the time of all regions is compute's own, or it says nothing
_MOST_STALLED = 0.5  # of what is compute's own


class Passed(NamedTuple):
    """A step that has passed.

    Attributes:
        share: its batch, of the size that was planned for.
        stall_s: what compute waited for the link.
    """

    queueing: Queueing
    share: float
    stall_s: float


class Paces:
    """Of the last steps of one plan: how many times as long as `profile` says compute and the host take."""

    def __init__(self) -> None:
        self._passed: deque[Passed] = deque(maxlen=_STEPS)
        self._forwards: deque[tuple[float, bool]] = deque(maxlen=_HOST_STEPS)

    def clear(self) -> None:
        """Another plan is followed."""
        self._passed.clear()
        self._forwards.clear()

    def saw(self, passed: Passed) -> None:
        self._passed.append(passed)
        self._forwards.append((passed.queueing.seconds, passed.queueing.is_waited_for))

    def of_compute(self, profile: Profile, plan: Plan) -> float | None:
        """1 if compute waited for the host in all but a few regions; None if the steps do not say: they were too few,
        came by the regions in another order, or waited for the link mostly."""
        options = leads.options_of_plan(profile, plan)
        found = [_seen_in(passed, profile, options) for passed in self._passed]
        own = [each.pace for each in found if each is not None and each.share >= _LEAST_SHARE]
        if len(own) >= _LEAST_STEPS:
            return statistics.median(own)
        return 1.0 if sum(each is not None for each in found) >= _LEAST_STEPS else None

    def of_host(self, profile: Profile, plan: Plan) -> float:
        """1 if the steps do not say."""
        if profile.host is None or len(self._forwards) < _LEAST_STEPS:
            return 1.0
        believed_s = max(leads.queueing_forward_s(profile, profile.host, plan), 1e-9)
        took = ((seconds / believed_s, is_waited_for) for seconds, is_waited_for in self._forwards)
        return statistics.median(pace if is_waited_for else min(1.0, pace) for pace, is_waited_for in took)


class _Took(NamedTuple):
    """What compute took for a region on one way, and what it should have taken; `was_own`: without the host."""

    seconds: float
    believed_s: float
    was_own: bool


class _Seen(NamedTuple):
    """In one step, by regions that were queued before compute came to them. `share`: of the time of all regions."""

    pace: float
    share: float


def _seen_in(passed: Passed, profile: Profile, options: Sequence[Option]) -> _Seen | None:
    took = list(_regions(passed.queueing, profile.regions, options))
    own_s = sum(each.seconds for each in took if each.was_own)
    believed_s = sum(each.believed_s for each in took if each.was_own)
    waited_s = passed.stall_s + passed.share * _lost_s(profile, options)
    if not took or waited_s > _MOST_STALLED * sum(each.seconds for each in took):
        return None
    pace = (own_s - waited_s) / (believed_s * passed.share) if believed_s > 0.0 else 1.0
    return _Seen(pace, believed_s / sum(each.believed_s for each in took))


def _regions(queueing: Queueing, regions: Sequence[RegionProfile], options: Sequence[Option]) -> Iterator[_Took]:
    """All but the last one of each way: where that ends nobody looks."""
    ways = (
        (queueing.forward, [region.name for region in regions], [region.forward_s for region in regions]),
        (
            queueing.backward,
            [region.name for region in reversed(regions)],
            [o.again_s + r.backward_s for o, r in zip(reversed(options), reversed(regions), strict=True)],
        ),
    )
    for points, names, believed in ways:
        if [point.region for point in points] == names:
            yield from _way(queueing, points, believed)


def _way(queueing: Queueing, points: Sequence[Point], believed: Sequence[float]) -> Iterator[_Took]:
    for (start, end), believed_s in zip(pairwise(points), believed, strict=False):
        yield _Took(queueing.seconds_between(start, end), believed_s, end.was_behind)


def _lost_s(profile: Profile, options: Sequence[Option]) -> float:
    """What compute loses to the copies beside it."""
    link, moved = profile.link, sum(option.moved_bytes for option in options)
    return link.interference * (moved / link.out + moved / link.back)
