"""What a plan would make of a step. Pure, and the one judge: planners propose, this decides.

Note [What is simulated]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Compute and the two lanes are channels. A lane copies in order, one parcel after the other, each from when it is
   there; compute goes on meanwhile, and waits only at a release and at an arrival.
2. Releases and fetches go by the engine's own rules (Note [Windows] of the engine): the oldest leave while more than
   the window waits; fetching ahead goes in the order of need as far as the window of the region at hand reaches.
3. What has not left when backward asks for it is used from the device, and is not sent in a steady state.
   One difference: the engine fills its window for fetching ahead in a few goes, here it is filled as soon as one more
   fits. So more memory never makes a step slower, which the solver's promise about budgets rests on.
4. Memory is what was there before, what is kept, what waits to leave, what came back early, and the measured working
   memory of what runs.
5. A second of copying costs compute `Link.interference` seconds: both use the same memory.
6. The host queues what compute runs, region by region, and what recipes add to it: compute does not end what is not
   queued. How far ahead the host is does not depend on what compute waits for, so memory buys time here too.
7. A step is given up when what has passed and what is left take too long together: of compute, and of what it loses to
   copies still to come. While it waits for one it loses nothing to that, but waits for as long as it takes.
8. Of several graphs in flight one is simulated. Each of the others keeps as much, on the device and in the store. What
   waits on its way out is not more for them: the lane is one, and so is its window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ebbtide._planner.options import Option, queueing_s
from ebbtide._profiling.profile import Host, Link, Profile, RegionProfile

LAST_DIGITS_S = 1e-9
"""Sums of the same times in another order differ by less."""


@dataclass(frozen=True)
class Pace:
    """When what travels has to leave, and how early it may come back, in bytes.

    Attributes:
        windows: per region: most that may wait on its way out while the region's forward runs.
        turns: the same at each place of `Around.turns` where something is saved.
        prefetch: per region: most that may be back before backward asks for it, while the region's backward runs.
    """

    windows: tuple[int, ...]
    turns: tuple[int, ...]
    prefetch: tuple[int, ...]


class Moment(NamedTuple):
    """A point of the memory curve."""

    seconds: float
    nbytes: int
    what: str
    """The region whose forward or backward runs, and which of them."""


@dataclass(frozen=True)
class Outcome:
    """What a plan would make of a step.

    Attributes:
        stall_forward_s, stall_backward_s: what compute waits for the link.
        host_wait_s: what it waits for the host.
        curve: the memory, with a point per region and way.
    """

    step_s: float
    forward_s: float
    stall_forward_s: float
    stall_backward_s: float
    host_wait_s: float
    peak_bytes: int
    moved_bytes: int
    host_bytes: int
    curve: tuple[Moment, ...]

    def tail_bytes(self, choice: Sequence[Option]) -> list[int]:
        """Per region: what is meant to move, and never left before backward asked for it. The last parcels, always."""
        left = sum(option.moved_bytes for option in choice) - self.moved_bytes
        stays: list[int] = []
        for option in reversed(choice):
            stays.append(min(left, option.moved_bytes))
            left -= stays[-1]
        return stays[::-1]


def pace_within(profile: Profile, choice: Sequence[Option], budget_bytes: int) -> Pace | None:
    """The widest windows with which memory stays below `budget_bytes`; None if even without any it does not."""
    room = _Room.within(profile, choice, budget_bytes)
    if room.least < 0:
        return None
    # What a region needs to run again comes together, as soon as there is room for the first of it.
    beyond = accumulate((_beyond_first(option) for option in choice), max, initial=0)
    carried = [room.backward[0], *room.entering] if room.backward else []
    prefetch = [max(0, min(r, c) - b) for r, c, b in zip(room.backward, carried, beyond, strict=False)]
    windows = [*room.windows[:-1], *[min([window, *room.at_the_end]) for window in room.windows[-1:]]]
    return Pace(_same_by_name(profile, windows), tuple(room.at_saves), _same_by_name(profile, prefetch))


def fixed_bytes(profile: Profile, kept_bytes: int) -> int:
    """Allocated all through the step if the regions of a graph keep so much: what was there before it, what is saved
    outside of the regions, and what other graphs in flight keep."""
    around = profile.around
    others = (profile.graphs - 1) * (around.kept_bytes + around.held_bytes + kept_bytes)
    return profile.base_bytes + around.kept_bytes + others


def least_budget(profile: Profile, choice: Sequence[Option]) -> int:
    """The least for which `pace_within` finds a pace."""
    return -_Room.within(profile, choice, 0).least  # all of it grows with the budget, byte for byte


@dataclass(frozen=True)
class _Room:
    """What a budget leaves, in bytes.

    Attributes:
        windows: per region, for what waits on its way out in forward.
        at_saves: the same at the places behind the last region where something is saved, and so may leave.
        at_the_end: the same at the end of the last region's forward, where nothing is saved: what has not left inside
            of it has to fit there, the last parcel too.
        backward: per region, for what has come back early or has not left.
        entering: per region, most that may wait when its backward begins.
    """

    windows: list[int]
    at_saves: list[int]
    at_the_end: list[int]
    backward: list[int]
    entering: list[int]

    @classmethod
    def within(cls, profile: Profile, choice: Sequence[Option], budget_bytes: int) -> "_Room":
        fixed = budget_bytes - fixed_bytes(profile, sum(option.kept_bytes for option in choice))
        kept = list(accumulate(option.kept_bytes for option in choice))
        behind = zip(kept, _grads_behind(profile), choice, strict=True)
        backward = [fixed - k - grads - option.backward_work_bytes for k, grads, option in behind]
        entering = _most_entering(backward, choice)
        all_kept = kept[-1] if kept else 0
        turns = [(turn.save, fixed - all_kept - turn.peak_bytes) for turn in profile.around.turns]
        at_saves = [room for save, room in turns if save >= 0]
        at_the_end = [room for save, room in turns if save < 0] + ([] if at_saves else entering[-1:])
        at_saves[-1:] = [min([room, *entering[-1:]]) for room in at_saves[-1:]]
        last = choice[-1].moved[-1].nbytes if choice and choice[-1].moved else 0
        return cls(
            windows=[fixed - k - region.forward_work_bytes for k, region in zip(kept, profile.regions, strict=True)],
            at_saves=at_saves,
            at_the_end=[room - last for room in at_the_end],
            backward=backward,
            entering=entering,
        )

    @property
    def least(self) -> int:
        """Of all of it; below zero if the budget is not enough."""
        return min([*self.windows, *self.at_saves, *self.at_the_end, *self.backward], default=0)


def _most_entering(room: Sequence[int], choice: Sequence[Option]) -> list[int]:
    """Per region: most that may wait on the device when its backward begins, so that it and all behind it have room.

    What waits is needed in order: a region's own first, and what is left has to fit the region before it.
    """
    entering: list[int] = []
    for own_room, option in zip(room, choice, strict=True):
        # What comes together is part of the region's working memory from its first moment on.
        most = own_room + option.moved_bytes if option.comes_together else own_room
        entering.append(min(most, entering[-1] + option.moved_bytes) if entering else most)
    return entering


def _same_by_name(profile: Profile, values: list[int]) -> tuple[int, ...]:
    """A region that is visited more than once has one window, as a plan goes by name: the narrowest."""
    least: dict[str, int] = {}
    for region, value in zip(profile.regions, values, strict=True):
        least[region.name] = min(value, least.get(region.name, value))
    return tuple(least[region.name] for region in profile.regions)


def _beyond_first(option: Option) -> int:
    return option.moved_bytes - option.moved[0].nbytes if option.comes_together and option.moved else 0


def _grads_behind(profile: Profile) -> list[int]:
    """Per region: what backward has left allocated when its own has run."""
    behind = list(accumulate(region.grad_bytes for region in reversed(profile.regions)))
    return behind[::-1]


def simulate(profile: Profile, choice: Sequence[Option], pace: Pace) -> Outcome:
    """One step in the steady state: `choice` has an option for every region of `profile`, in order."""
    outcome = simulate_below(profile, choice, pace, inf)
    assert outcome is not None
    return outcome


def simulate_below(profile: Profile, choice: Sequence[Option], pace: Pace, most_s: float) -> Outcome | None:
    """The same; None as soon as the step is known to take more than `most_s` seconds."""
    queue = _Queue(profile.host)
    sent_bytes = sum(option.moved_bytes for option in choice)
    forward = _Forward(profile, choice, pace, queue)
    least_bytes = sent_bytes - _most_that_stays(choice, pace)
    if not forward.run(least_bytes, most_s - _least_backward_s(profile, choice, least_bytes)):
        return None
    moved_bytes = sent_bytes - forward.waiting_bytes
    backward = _Backward(profile, choice, pace, queue, forward)
    if not backward.run(moved_bytes, most_s):
        return None
    backward.now = queue.ended(backward.now)
    curve = (*forward.curve, *backward.curve)
    return Outcome(
        step_s=backward.now,
        forward_s=forward.now,
        stall_forward_s=forward.stalled_s,
        stall_backward_s=backward.stalled_s,
        host_wait_s=queue.waited_s,
        peak_bytes=max(moment.nbytes for moment in curve),
        moved_bytes=moved_bytes,
        host_bytes=moved_bytes + (profile.graphs - 1) * sent_bytes,  # what others sent has left by then
        curve=curve,
    )


def _most_that_stays(choice: Sequence[Option], pace: Pace) -> int:
    """Bytes that may be on the device behind the last region, of what was sent."""
    if pace.turns:
        return max(0, pace.turns[-1])
    last = choice[-1].moved[-1].nbytes if choice and choice[-1].moved else 0  # the newest does not leave in its region
    return max(0, *pace.windows[-1:]) + last if pace.windows else 0


def _least_backward_s(profile: Profile, choice: Sequence[Option], back_bytes: int) -> float:
    """With so much that comes back beside compute; where compute waits for that it takes longer."""
    around, link = profile.around, profile.link
    compute_s = around.turn_s + around.end_s + sum(map(_backward_s, profile.regions, choice))
    return compute_s + link.interference * max(0, back_bytes) / link.back


class _Lost:
    """What compute loses to a lane that is busy beside it: so much of each second until it or the lane is done."""

    def __init__(self, link: Link) -> None:
        self._share = link.interference
        self._stretch = 1.0 / (1.0 - link.interference)

    def __call__(self, seconds: float, busy_s: float) -> float:
        return self._share * min(busy_s, seconds * self._stretch)


class _Queue:
    """The host, on compute's clock, and what compute waits for it. Each method takes what compute has come to, and
    gives when compute has run all that the host has queued by then."""

    def __init__(self, host: Host | None) -> None:
        self._host = host
        self._queued_s = 0.0 if host is None else -host.lead_s
        self.waited_s = 0.0

    def ended(self, now: float) -> float:
        """When the step has, with what is left of the lead after many of them."""
        host = self._host
        return now if host is None else self._after(now, host.lead_s - host.steady_lead_s)

    def before(self, now: float) -> float:
        return now if self._host is None else self._after(now, self._host.before_s)

    def forward(self, now: float, number: int, option: Option) -> float:
        host = self._host
        if host is None:
            return now
        return self._after(now, host.regions[number].forward_s + queueing_s(option, host, host.regions[number]))

    def turned(self, now: float) -> float:
        """Behind the last region."""
        return now if self._host is None else self._after(now, self._host.after_s + self._host.turn_s)

    def backward(self, now: float, number: int, option: Option) -> float:
        host = self._host
        if host is None:
            return now
        own = host.regions[number]
        seconds = own.backward_s + (own.again_s if option.recipe.recomputes else 0.0)
        return self._after(now, seconds + queueing_s(option, host, own))

    def _after(self, now: float, seconds: float) -> float:
        self._queued_s += seconds
        late_s = self._queued_s - now
        if late_s <= 0.0:
            return now
        self.waited_s += late_s
        return self._queued_s


class _Forward:
    """Parcels are numbered as they are sent. They leave in that order too: those before `oldest` have."""

    def __init__(self, profile: Profile, choice: Sequence[Option], pace: Pace, queue: _Queue) -> None:
        self._profile = profile
        self._choice = choice
        self._pace = pace
        self._queue = queue
        self._lost = _Lost(profile.link)
        self._lane_free_s = 0.0
        self.sizes: list[int] = []
        self._landed_s: list[float] = []
        self.oldest = 0
        self.waiting_bytes = 0  # on the device, on its way out
        self.now = 0.0
        self.stalled_s = 0.0
        self.curve: list[Moment] = []

    def run(self, least_bytes: int, most_s: float) -> bool:
        """False if it would end later than `most_s`, as at least `least_bytes` have to leave."""
        around, link = self._profile.around, self._profile.link
        fixed = fixed_bytes(self._profile, sum(option.kept_bytes for option in self._choice))
        left_s = around.after_s + sum(region.forward_s for region in self._profile.regions)
        out_s = least_bytes / link.out
        self._pass(around.before_s)
        self.now = self._queue.before(self.now)
        for number, (region, option) in enumerate(zip(self._profile.regions, self._choice, strict=True)):
            if self.now + left_s + link.interference * max(0.0, out_s - self.now) > most_s + LAST_DIGITS_S:
                return False
            left_s -= region.forward_s
            fixed += option.kept_bytes
            most = self._run_region(self._pace.windows[number], region.forward_s, option)
            self.now = self._queue.forward(self.now, number, option)
            self.curve.append(Moment(self.now, fixed + most + region.forward_work_bytes, f"{region.name} forward"))
        self._run_turns(fixed)
        return True

    def _run_turns(self, fixed: int) -> None:
        around = self._profile.around
        windows = iter(self._pace.turns)
        passed_s = 0.0
        for turn in around.turns:
            at_s = min(turn.at_s, around.after_s)  # measured in another step than the times
            self._pass(at_s - passed_s)
            passed_s = max(passed_s, at_s)
            if turn.save >= 0:
                self._release(next(windows), len(self.sizes))
            self.curve.append(Moment(self.now, fixed + self.waiting_bytes + turn.peak_bytes, "behind the last region"))
        self._pass(around.after_s - passed_s)

    def _run_region(self, window: int, forward_s: float, option: Option) -> int:
        """Returns the most that waits on its way out meanwhile."""
        self._release(window, len(self.sizes))
        most = self.waiting_bytes
        passed_s = 0.0
        for moved in option.moved:
            self._pass(moved.at_s - passed_s)
            passed_s = moved.at_s
            self._send(moved.nbytes)
            if self.waiting_bytes > window:
                self._release(window, len(self.sizes) - 1)  # the newest is part of what its region works with
            most = max(most, min(self.waiting_bytes, window))
        self._pass(forward_s - passed_s)
        return most

    def _pass(self, seconds: float) -> None:
        """Compute runs, a little slower while the lane copies beside it."""
        if seconds > 0.0:
            busy_s = self._lane_free_s - self.now
            self.now += seconds if busy_s <= 0.0 else seconds + self._lost(seconds, busy_s)

    def _send(self, nbytes: int) -> None:
        link = self._profile.link
        self._lane_free_s = max(self._lane_free_s, self.now) + link.latency_s + nbytes / link.out
        self.sizes.append(nbytes)
        self._landed_s.append(self._lane_free_s)
        self.waiting_bytes += nbytes

    def _release(self, window: int, end: int) -> None:
        """The oldest leave while more than `window` waits, up to the parcel with the number `end`."""
        while self.waiting_bytes > window and self.oldest < end:
            landed_s = self._landed_s[self.oldest]
            self.waiting_bytes -= self.sizes[self.oldest]
            self.oldest += 1
            if landed_s > self.now:
                self.stalled_s += landed_s - self.now
                self.now = landed_s


class _Backward:
    """Parcels have the numbers that forward gave them."""

    def __init__(
        self, profile: Profile, choice: Sequence[Option], pace: Pace, queue: _Queue, forward: _Forward
    ) -> None:
        self._profile = profile
        self._choice = choice
        self._pace = pace
        self._queue = queue
        self._lost = _Lost(profile.link)
        self._sizes = forward.sizes
        self._stayed = forward.oldest  # from this number on parcels have never left
        self._arrived_s: list[float] = [-1.0] * len(forward.sizes)  # negative: not fetched yet
        self._numbers = _numbers_in_order_of_need(choice)
        self._ahead = [
            (parcel, region) for region in range(len(choice) - 1, -1, -1) for parcel in self._numbers[region]
        ]
        self._next = 0  # in that list: what has not been looked at for fetching ahead
        self._waiting_bytes = forward.waiting_bytes  # on the device before backward asks for it
        self._lane_free_s = forward.now
        self.now = forward.now
        self.stalled_s = 0.0
        self.curve: list[Moment] = []

    def run(self, moved_bytes: int, most_s: float) -> bool:
        """False if it would end later than `most_s`, as `moved_bytes` have to come back."""
        around, link = self._profile.around, self._profile.link
        back_at_s = self.now + moved_bytes / link.back  # not earlier
        left_s = around.end_s + sum(map(_backward_s, self._profile.regions, self._choice))
        self._pass(around.turn_s)
        self.now = self._queue.turned(self.now)
        kept_bytes = sum(option.kept_bytes for option in self._choice)
        fixed = fixed_bytes(self._profile, kept_bytes) + kept_bytes
        for number in range(len(self._choice) - 1, -1, -1):
            region, option = self._profile.regions[number], self._choice[number]
            if self.now + left_s + link.interference * max(0.0, back_at_s - self.now) > most_s + LAST_DIGITS_S:
                return False
            left_s -= _backward_s(region, option)
            fixed += region.grad_bytes
            most = self._run_region(number, region.backward_s, option)
            self.now = self._queue.backward(self.now, number, option)
            self.curve.append(Moment(self.now, fixed + most + option.backward_work_bytes, f"{region.name} backward"))
            fixed -= option.kept_bytes
        self._pass(around.end_s)
        return True

    def _run_region(self, number: int, backward_s: float, option: Option) -> int:
        """Returns the most that is back early or has not left meanwhile, without what the region has asked for."""
        parcels = self._numbers[number]
        prefetch = self._pace.prefetch[number]
        together = option.comes_together
        if together:  # else nobody tells the engine that the region's backward begins
            self._fetch_all(parcels)
            self._look_ahead(prefetch)
        most = 0 if together else self._waiting_bytes
        passed_s = 0.0
        for parcel, moved in zip(parcels, option.moved if together else reversed(option.moved), strict=True):
            if moved.needed_s > passed_s:
                self._pass(moved.needed_s - passed_s)
                passed_s = moved.needed_s
            self._need(parcel)
            self._look_ahead(prefetch if together else prefetch - moved.nbytes)
            if not together:
                most = max(most, self._waiting_bytes)
        self._pass(option.again_s + backward_s - passed_s)
        return max(most, self._waiting_bytes)

    def _need(self, parcel: int) -> None:
        if parcel < self._stayed:
            if self._arrived_s[parcel] < 0.0:
                self._fetch(parcel)
            arrived_s = self._arrived_s[parcel]
            if arrived_s > self.now:
                self.stalled_s += arrived_s - self.now
                self.now = arrived_s
        self._waiting_bytes -= self._sizes[parcel]

    def _look_ahead(self, prefetch: int) -> None:
        before = -1
        while self._next < len(self._ahead):
            parcel, region = self._ahead[self._next]
            if parcel < self._stayed and self._arrived_s[parcel] < 0.0:
                has_room = self._waiting_bytes + self._sizes[parcel] <= prefetch
                if not has_room and not (region == before and self._choice[region].comes_together):
                    return
                self._fetch(parcel)
            before = region
            self._next += 1

    def _fetch_all(self, parcels: Sequence[int]) -> None:
        for parcel in parcels:
            if parcel < self._stayed and self._arrived_s[parcel] < 0.0:
                self._fetch(parcel)

    def _fetch(self, parcel: int) -> None:
        link, nbytes = self._profile.link, self._sizes[parcel]
        self._lane_free_s = max(self._lane_free_s, self.now) + link.latency_s + nbytes / link.back
        self._arrived_s[parcel] = self._lane_free_s
        self._waiting_bytes += nbytes

    def _pass(self, seconds: float) -> None:
        if seconds > 0.0:
            busy_s = self._lane_free_s - self.now
            self.now += seconds if busy_s <= 0.0 else seconds + self._lost(seconds, busy_s)


def _backward_s(region: RegionProfile, option: Option) -> float:
    return region.backward_s + option.again_s


def _numbers_in_order_of_need(choice: Sequence[Option]) -> list[range]:
    """Per region: the numbers of its parcels as its backward asks for them."""
    ends = list(accumulate(len(option.moved) for option in choice))
    ranges = (range(end - len(option.moved), end) for end, option in zip(ends, choice, strict=True))
    return [numbers if option.comes_together else numbers[::-1] for numbers, option in zip(ranges, choice, strict=True)]
