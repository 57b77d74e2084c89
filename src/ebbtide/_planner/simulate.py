"""The simulator: predicts time, stalls and the memory curve of a step under a plan. Pure.

The only judge of plans: searches propose, the simulator decides.

Note [What is simulated]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Compute and the two lanes are channels. A lane copies one parcel after the other, each as soon as it is ready.
   Compute goes on meanwhile, and waits only at a release and at an arrival.
2. Releases and fetches follow the engine's rules (Note [Windows] of the engine): the oldest parcels leave while more
   than the window waits; prefetching follows the order of need as far as the window of the current region reaches.
3. A parcel that has not left when backward needs it is used from the device, and is not sent in a steady state.
   One difference: the engine fills the prefetch window in a few steps, the simulator as soon as one more parcel fits.
   So more memory never makes a step slower, as the solver's promise about budgets demands.
4. Memory is the sum of: allocated before the step, kept, waiting to leave, prefetched, and the measured working memory
   of the current region.
5. A second of copying costs compute `Link.interference` seconds: both use the same memory.
6. The host launches region by region, recipes' overhead included. Compute cannot end before the launches. How far ahead
   the host is does not depend on compute's stalls, so memory buys time here too.
7. A step is abandoned as soon as elapsed time and remaining time exceed the limit together. Remaining time counts
   compute, and the interference of copies still to come. While compute waits for a copy it loses nothing to
   interference, but waits as long as the copy takes.
8. Of several graphs in flight one is simulated. Each of the others keeps as much, on the device and in the store.
   Parcels on the way out count once: the lane is one, and so is its window.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ebbtide._planner.options import Option, launch_overhead_s, option_for
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Host, Link, Profile, RegionProfile

LAST_DIGITS_S = 1e-9
"""More than the rounding error of a sum of times in another order."""


@dataclass(frozen=True)
class Windows:
    """When parcels have to leave, and how early parcels may come back, in bytes.

    Attributes:
        forward: per region: most that may wait on the way out while the region's forward runs.
        post_region: the same at each point of `Outside.post_region_points` with a saved tensor.
        prefetch: per region: most that may be back early while the region's backward runs.
    """

    forward: tuple[int, ...]
    post_region: tuple[int, ...]
    prefetch: tuple[int, ...]


class Moment(NamedTuple):
    """A point of the memory curve. `what`: the region that runs, and the direction."""

    seconds: float
    nbytes: int
    what: str


@dataclass(frozen=True)
class Outcome:
    """Predicted figures of a step.

    Attributes:
        stall_forward_s, stall_backward_s: compute waits for the link.
        host_wait_s: compute waits for the host.
        curve: memory, with a point per region and direction.
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
        """Per region: bytes meant to move that backward needs before they have left, always the last parcels."""
        left = sum(option.moved_bytes for option in choice) - self.moved_bytes
        stays: list[int] = []
        for option in reversed(choice):
            stays.append(min(left, option.moved_bytes))
            left -= stays[-1]
        return stays[::-1]


def windows_within(profile: Profile, choice: Sequence[Option], budget_bytes: int) -> Windows | None:
    """The widest windows within `budget_bytes`; None if not even windows of 0 bytes fit."""
    room = _Room.within(profile, choice, budget_bytes)
    if room.least < 0:
        return None
    # A recompute batch is fetched as a whole, as soon as its first parcel has room.
    more = accumulate((_bytes_after_first(option) for option in choice), max, initial=0)
    carried = [room.backward[0], *room.entering] if room.backward else []
    prefetch = [max(0, min(r, c) - m) for r, c, m in zip(room.backward, carried, more, strict=False)]
    forward = [*room.forward[:-1], *[min([window, *room.at_the_end]) for window in room.forward[-1:]]]
    return Windows(_same_by_name(profile, forward), tuple(room.at_points), _same_by_name(profile, prefetch))


def fixed_bytes(profile: Profile, kept_bytes: int) -> int:
    """Allocated throughout the step if the regions of a graph keep `kept_bytes`.

    The sum of memory from before the step, tensors saved before the regions, and tensors of other graphs in flight.
    """
    outside = profile.outside
    others = (profile.graphs - 1) * (outside.kept_bytes + outside.held_bytes + kept_bytes)
    return profile.base_bytes + outside.kept_bytes + others


def least_budget(profile: Profile, choice: Sequence[Option]) -> int:
    """The least budget for which `windows_within` finds windows."""
    return -_Room.within(profile, choice, 0).least  # every window grows with the budget, byte for byte


@dataclass(frozen=True)
class _Room:
    """Free bytes under a budget.

    Attributes:
        forward: per region, for parcels on the way out in forward.
        at_points: the same at the post-region points where parcels may leave.
        at_the_end: the same at the end of the last region's forward, where nothing is saved: parcels that have not
            left by then have to fit, the last parcel included.
        backward: per region, for parcels that are back early or have not left.
        entering: per region, most that may wait when the region's backward begins.
    """

    forward: list[int]
    at_points: list[int]
    at_the_end: list[int]
    backward: list[int]
    entering: list[int]

    @classmethod
    def within(cls, profile: Profile, choice: Sequence[Option], budget_bytes: int) -> "_Room":
        fixed = budget_bytes - fixed_bytes(profile, sum(option.kept_bytes for option in choice))
        kept = list(accumulate(option.kept_bytes for option in choice))
        rows = zip(kept, _grads_after(profile), choice, strict=True)
        backward = [fixed - k - grads - option.backward_work_bytes for k, grads, option in rows]
        entering = _most_entering(backward, choice)
        all_kept = kept[-1] if kept else 0
        points = [(p.tensor_index, fixed - all_kept - p.peak_bytes) for p in profile.outside.post_region_points]
        at_points = [room for index, room in points if index >= 0]
        at_the_end = [room for index, room in points if index < 0] + ([] if at_points else entering[-1:])
        at_points[-1:] = [min([room, *entering[-1:]]) for room in at_points[-1:]]
        last = choice[-1].moved[-1].nbytes if choice and choice[-1].moved else 0
        return cls(
            forward=[fixed - k - option.forward_work_bytes for k, option in zip(kept, choice, strict=True)],
            at_points=at_points,
            at_the_end=[room - last for room in at_the_end],
            backward=backward,
            entering=entering,
        )

    @property
    def least(self) -> int:
        """The least free bytes of all places; below zero if the budget is too small."""
        return min([*self.forward, *self.at_points, *self.at_the_end, *self.backward], default=0)


def _most_entering(room: Sequence[int], choice: Sequence[Option]) -> list[int]:
    """Per region: most that may wait on the device when the region's backward begins, so that all later ones fit.

    Parcels are needed in order: first the region's own, and the rest has to fit the region before.
    """
    entering: list[int] = []
    for own_room, option in zip(room, choice, strict=True):
        # A recompute batch is part of the region's working memory from the begin.
        most = own_room + option.moved_bytes if option.is_recompute_batch else own_room
        entering.append(min(most, entering[-1] + option.moved_bytes) if entering else most)
    return entering


def _same_by_name(profile: Profile, values: list[int]) -> tuple[int, ...]:
    """A region with several calls has a single window, the narrowest, as plans have one entry per name."""
    least: dict[str, int] = {}
    for region, value in zip(profile.regions, values, strict=True):
        least[region.name] = min(value, least.get(region.name, value))
    return tuple(least[region.name] for region in profile.regions)


def _bytes_after_first(option: Option) -> int:
    return option.moved_bytes - option.moved[0].nbytes if option.is_recompute_batch and option.moved else 0


def _grads_after(profile: Profile) -> list[int]:
    """Per region: gradients allocated when the region's backward has run."""
    return list(accumulate(region.grad_bytes for region in reversed(profile.regions)))[::-1]


def simulate(profile: Profile, choice: Sequence[Option], windows: Windows) -> Outcome:
    """One step in the steady state. `choice` has an option for every region of `profile`, in order."""
    outcome = simulate_below(profile, choice, windows, math.inf)
    assert outcome is not None
    return outcome


def simulate_below(profile: Profile, choice: Sequence[Option], windows: Windows, most_s: float) -> Outcome | None:
    """As `simulate`; None as soon as the step is known to take more than `most_s` seconds."""
    launches = _Launches(profile.host)
    sent_bytes = sum(option.moved_bytes for option in choice)
    forward = _Forward(profile, choice, windows, launches)
    least_bytes = sent_bytes - _most_that_stays(choice, windows)
    if not forward.run(least_bytes, most_s - _least_backward_s(profile, choice, least_bytes)):
        return None
    moved_bytes = sent_bytes - forward.waiting_bytes
    backward = _Backward(profile, choice, windows, launches, forward)
    if not backward.run(moved_bytes, most_s):
        return None
    backward.now = launches.ended(backward.now)
    curve = (*forward.curve, *backward.curve)
    return Outcome(
        step_s=backward.now,
        forward_s=forward.now,
        stall_forward_s=forward.stalled_s,
        stall_backward_s=backward.stalled_s,
        host_wait_s=launches.waited_s,
        peak_bytes=max(moment.nbytes for moment in curve),
        moved_bytes=moved_bytes,
        host_bytes=moved_bytes + (profile.graphs - 1) * sent_bytes,  # parcels of other graphs have left by then
        curve=curve,
    )


def _most_that_stays(choice: Sequence[Option], windows: Windows) -> int:
    """Bytes of parcels that may still be on the device after the last region."""
    if windows.post_region:
        return max(0, windows.post_region[-1])
    last = choice[-1].moved[-1].nbytes if choice and choice[-1].moved else 0  # the newest parcel stays in its region
    return max(0, *windows.forward[-1:]) + last if windows.forward else 0


def _least_backward_s(profile: Profile, choice: Sequence[Option], back_bytes: int) -> float:
    """A lower bound with `back_bytes` coming back; stalls come on top."""
    outside, link = profile.outside, profile.link
    compute_s = outside.backward_before_s + outside.backward_after_s + sum(map(_backward_s, profile.regions, choice))
    return compute_s + link.interference * max(0, back_bytes) / link.back


class _Interference:
    """Seconds that compute loses to a concurrent copy, until either is done."""

    def __init__(self, link: Link) -> None:
        self._share = link.interference
        self._stretch = 1.0 / (1.0 - link.interference)

    def __call__(self, seconds: float, busy_s: float) -> float:
        return self._share * min(busy_s, seconds * self._stretch)


class _Launches:
    """The host, and compute's waits for the host. Each method takes compute's time, and returns when compute has run
    everything launched so far."""

    def __init__(self, host: Host | None) -> None:
        self._host = host
        self._launched_s = 0.0 if host is None else -host.launch_ahead_s
        self.waited_s = 0.0

    def ended(self, now: float) -> float:
        """The end of the step in a steady state, with the launch-ahead left after many steps."""
        host = self._host
        return now if host is None else self._after(now, host.launch_ahead_s - host.steady_launch_ahead_s)

    def before(self, now: float) -> float:
        return now if self._host is None else self._after(now, self._host.before_s)

    def forward(self, now: float, number: int, option: Option) -> float:
        host = self._host
        if host is None:
            return now
        return self._after(now, host.regions[number].forward_s + launch_overhead_s(option, host, host.regions[number]))

    def after_regions(self, now: float) -> float:
        return now if self._host is None else self._after(now, self._host.after_s + self._host.backward_before_s)

    def backward(self, now: float, number: int, option: Option) -> float:
        host = self._host
        if host is None:
            return now
        own = host.regions[number]
        seconds = own.backward_s + (own.recompute_s if option.recipe.recomputes else 0.0)
        return self._after(now, seconds + launch_overhead_s(option, host, own))

    def _after(self, now: float, seconds: float) -> float:
        self._launched_s += seconds
        late_s = self._launched_s - now
        if late_s <= 0.0:
            return now
        self.waited_s += late_s
        return self._launched_s


class _Forward:
    """Parcels are numbered in the order of sending, and leave in the same order: all before `oldest` have left."""

    def __init__(self, profile: Profile, choice: Sequence[Option], windows: Windows, launches: _Launches) -> None:
        self._profile = profile
        self._choice = choice
        self._windows = windows
        self._launches = launches
        self._interference = _Interference(profile.link)
        self._lane_free_s = 0.0
        self.sizes: list[int] = []
        self._landed_s: list[float] = []
        self.oldest = 0
        self.waiting_bytes = 0  # on the device, on the way out
        self.now = 0.0
        self.stalled_s = 0.0
        self.curve: list[Moment] = []

    def run(self, least_bytes: int, most_s: float) -> bool:
        """False if forward would end later than `most_s`, given that at least `least_bytes` have to leave."""
        outside, link = self._profile.outside, self._profile.link
        fixed = fixed_bytes(self._profile, sum(option.kept_bytes for option in self._choice))
        left_s = outside.after_s + sum(region.forward_s for region in self._profile.regions)
        out_s = least_bytes / link.out
        self._pass(outside.before_s)
        self.now = self._launches.before(self.now)
        for number, (region, option) in enumerate(zip(self._profile.regions, self._choice, strict=True)):
            if self.now + left_s + link.interference * max(0.0, out_s - self.now) > most_s + LAST_DIGITS_S:
                return False
            left_s -= region.forward_s
            fixed += option.kept_bytes
            most = self._run_region(self._windows.forward[number], region.forward_s, option)
            self.now = self._launches.forward(self.now, number, option)
            self.curve.append(Moment(self.now, fixed + most + option.forward_work_bytes, f"{region.name} forward"))
        self._run_post_region(fixed)
        return True

    def _run_post_region(self, fixed: int) -> None:
        outside = self._profile.outside
        windows = iter(self._windows.post_region)
        passed_s = 0.0
        for point in outside.post_region_points:
            at_s = min(point.at_s, outside.after_s)  # measured in another step than the times
            self._pass(at_s - passed_s)
            passed_s = max(passed_s, at_s)
            if point.tensor_index >= 0:
                self._release(next(windows), len(self.sizes))
            nbytes = fixed + self.waiting_bytes + point.peak_bytes
            self.curve.append(Moment(self.now, nbytes, "after the last region"))
        self._pass(outside.after_s - passed_s)

    def _run_region(self, window: int, forward_s: float, option: Option) -> int:
        """Returns the most that waits on the way out meanwhile."""
        self._release(window, len(self.sizes))
        most = self.waiting_bytes
        passed_s = 0.0
        for moved in option.moved:
            self._pass(moved.at_s - passed_s)
            passed_s = moved.at_s
            self._send(moved.nbytes)
            if self.waiting_bytes > window:
                self._release(window, len(self.sizes) - 1)  # the newest parcel is in use by its region
            most = max(most, min(self.waiting_bytes, window))
        self._pass(forward_s - passed_s)
        return most

    def _pass(self, seconds: float) -> None:
        """Compute runs, a little slower during a copy."""
        if seconds > 0.0:
            busy_s = self._lane_free_s - self.now
            self.now += seconds if busy_s <= 0.0 else seconds + self._interference(seconds, busy_s)

    def _send(self, nbytes: int) -> None:
        link = self._profile.link
        self._lane_free_s = max(self._lane_free_s, self.now) + link.latency_s + nbytes / link.out
        self.sizes.append(nbytes)
        self._landed_s.append(self._lane_free_s)
        self.waiting_bytes += nbytes

    def _release(self, window: int, end: int) -> None:
        """The oldest parcels before number `end` leave while more than `window` waits."""
        while self.waiting_bytes > window and self.oldest < end:
            landed_s = self._landed_s[self.oldest]
            self.waiting_bytes -= self.sizes[self.oldest]
            self.oldest += 1
            if landed_s > self.now:
                self.stalled_s += landed_s - self.now
                self.now = landed_s


class _Backward:
    """Parcels have the numbers of forward."""

    def __init__(
        self, profile: Profile, choice: Sequence[Option], windows: Windows, launches: _Launches, forward: _Forward
    ) -> None:
        self._profile = profile
        self._choice = choice
        self._windows = windows
        self._launches = launches
        self._interference = _Interference(profile.link)
        self._sizes = forward.sizes
        self._stayed = forward.oldest  # parcels from this number on have never left
        self._arrived_s: list[float] = [-1.0] * len(forward.sizes)  # negative: not fetched yet
        self._numbers = _numbers_in_order_of_need(choice)
        self._ahead = [
            (parcel, region) for region in range(len(choice) - 1, -1, -1) for parcel in self._numbers[region]
        ]
        self._next = 0  # in `_ahead`: the first parcel not yet considered
        self._waiting_bytes = forward.waiting_bytes  # on the device before backward asks for it
        self._lane_free_s = forward.now
        self.now = forward.now
        self.stalled_s = 0.0
        self.curve: list[Moment] = []

    def run(self, moved_bytes: int, most_s: float) -> bool:
        """False if backward would end later than `most_s`, given that `moved_bytes` have to come back."""
        outside, link = self._profile.outside, self._profile.link
        back_at_s = self.now + moved_bytes / link.back  # not earlier
        left_s = outside.backward_after_s + sum(map(_backward_s, self._profile.regions, self._choice))
        self._pass(outside.backward_before_s)
        self.now = self._launches.after_regions(self.now)
        kept_bytes = sum(option.kept_bytes for option in self._choice)
        fixed = fixed_bytes(self._profile, kept_bytes) + kept_bytes
        for number in range(len(self._choice) - 1, -1, -1):
            region, option = self._profile.regions[number], self._choice[number]
            if self.now + left_s + link.interference * max(0.0, back_at_s - self.now) > most_s + LAST_DIGITS_S:
                return False
            left_s -= _backward_s(region, option)
            fixed += region.grad_bytes
            most = self._run_region(number, region.backward_s, option)
            self.now = self._launches.backward(self.now, number, option)
            self.curve.append(Moment(self.now, fixed + most + option.backward_work_bytes, f"{region.name} backward"))
            fixed -= option.kept_bytes
        self._pass(outside.backward_after_s)
        return True

    def _run_region(self, number: int, backward_s: float, option: Option) -> int:
        """Returns the most that is back early or has not left meanwhile, the region's needed parcels not counted."""
        parcels = self._numbers[number]
        prefetch = self._windows.prefetch[number]
        together = option.is_recompute_batch
        if together:  # otherwise the engine does not see the begin of the region's backward
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
        self._pass(option.recompute_s + backward_s - passed_s)
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
                if not has_room and not (region == before and self._choice[region].is_recompute_batch):
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
            self.now += seconds if busy_s <= 0.0 else seconds + self._interference(seconds, busy_s)


def _backward_s(region: RegionProfile, option: Option) -> float:
    return region.backward_s + option.recompute_s


def _numbers_in_order_of_need(choice: Sequence[Option]) -> list[range]:
    """Per region: the numbers of the parcels as backward needs them."""
    ends = list(accumulate(len(option.moved) for option in choice))
    ranges = (range(end - len(option.moved), end) for end, option in zip(ends, choice, strict=True))
    return [
        numbers if option.is_recompute_batch else numbers[::-1] for numbers, option in zip(ranges, choice, strict=True)
    ]


# -- launch-ahead ----------------------------------------------------------------------------------------------------


def with_host(profile: Profile, host: Host | None) -> Profile:
    """The profile with a host far enough ahead that a step with everything kept never waits for launches.

    The host is slower in a recorded step than in later steps, and without the lead a plan would pay for the difference.
    """
    if host is None:
        return dataclasses.replace(profile, host=None)
    alone = dataclasses.replace(host, launch_ahead_s=0.0, steady_launch_ahead_s=math.inf)
    needed_s = _all_kept(dataclasses.replace(profile, host=alone)).host_wait_s
    late_s = host.seconds - profile.plain_s
    ahead = {"launch_ahead_s": max(host.launch_ahead_s, needed_s), "steady_launch_ahead_s": max(needed_s, late_s)}
    return dataclasses.replace(profile, host=dataclasses.replace(host, **ahead))


def _all_kept(profile: Profile) -> Outcome:
    options = [option_for(region, Recipe("keep")) for region in profile.regions]
    return simulate(profile, options, _equal_windows(profile, 0))


def _equal_windows(profile: Profile, nbytes: int) -> Windows:
    windows = (nbytes,) * len(profile.regions)
    return Windows(windows, (nbytes,) * len(profile.outside.post_region_points), windows)
