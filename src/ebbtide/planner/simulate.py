"""What a plan would make of a step. Pure, and the one judge: planners propose, this decides.

Note [What is simulated]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Compute and the two lanes are channels. A lane copies in order, one parcel after the other, each from when it is
   there; compute goes on meanwhile, and waits only at a release and at an arrival.
2. Releases and fetches go by the engine's own rules (Note [Windows] of the engine): the oldest leave while more than
   the window waits; fetching ahead goes in the order of need as far as the window of the region at hand reaches.
3. What has not left when backward asks for it is used from the device, and is not sent in a steady state.
4. Memory is what was there before, what is kept, what waits to leave, what came back early, and the measured working
   memory of what runs.
5. A second of copying costs compute `Link.interference` seconds: both use the same memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ebbtide.planner.options import Option
from ebbtide.planner.profile import Profile

_BATCHES = 4  # as the engine fills its window


@dataclass(frozen=True)
class Pace:
    """When what travels has to leave, and how early it may come back, in bytes.

    Attributes:
        windows: per region: most that may wait on its way out while the region's forward runs.
        last_window: the same at the peak behind the last region.
        prefetch: per region: most that may be back before backward asks for it, while the region's backward runs.
    """

    windows: tuple[int, ...]
    last_window: int
    prefetch: tuple[int, ...]


class Moment(NamedTuple):
    """A point of the memory curve."""

    seconds: float
    nbytes: int
    what: str
    """The region whose forward or backward runs, and which of them."""


@dataclass(frozen=True)
class Outcome:
    """What a plan would make of a step. `curve` is the memory, with a point per region and way."""

    step_s: float
    forward_s: float
    stall_forward_s: float
    stall_backward_s: float
    peak_bytes: int
    moved_bytes: int
    host_bytes: int
    curve: tuple[Moment, ...]


def pace_within(profile: Profile, choice: Sequence[Option], budget_bytes: int) -> Pace | None:
    """The widest windows with which memory stays below `budget_bytes`; None if even without any it does not."""
    fixed = budget_bytes - profile.base_bytes - profile.around.kept_bytes
    kept = list(accumulate(option.kept_bytes for option in choice))
    grads = _grads_behind(profile)
    windows = [fixed - k - region.forward_work_bytes for k, region in zip(kept, profile.regions, strict=True)]
    last_window = fixed - (kept[-1] if kept else 0) - profile.around.peak_bytes
    room = [fixed - k - g - option.backward_work_bytes for k, g, option in zip(kept, grads, choice, strict=True)]
    if min([*windows, last_window, *room]) < 0:
        return None
    # What a region needs to run again comes together, as soon as there is room for the first of it.
    beyond = list(accumulate((_beyond_first(option) for option in choice), max, initial=0))[:-1]
    prefetch = [max(0, r - b) for r, b in zip(room, beyond, strict=True)]
    return Pace(tuple(windows), last_window, tuple(prefetch))


def _beyond_first(option: Option) -> int:
    return option.moved_bytes - option.moved[0].nbytes if option.comes_together and option.moved else 0


def least_budget(profile: Profile, choice: Sequence[Option]) -> int:
    """The least for which `pace_within` finds a pace."""
    kept = list(accumulate(option.kept_bytes for option in choice))
    grads = _grads_behind(profile)
    work = [
        profile.around.peak_bytes + (kept[-1] if kept else 0),
        *(k + region.forward_work_bytes for k, region in zip(kept, profile.regions, strict=True)),
        *(k + g + option.backward_work_bytes for k, g, option in zip(kept, grads, choice, strict=True)),
    ]
    return profile.base_bytes + profile.around.kept_bytes + max(work)


def _grads_behind(profile: Profile) -> list[int]:
    """Per region: what backward has left allocated when its own has run."""
    behind = list(accumulate(region.grad_bytes for region in reversed(profile.regions)))
    return behind[::-1]


def simulate(profile: Profile, choice: Sequence[Option], pace: Pace) -> Outcome:
    """One step in the steady state: `choice` has an option for every region of `profile`, in order."""
    forward = _Forward(profile, choice, pace)
    forward.run()
    backward = _Backward(profile, choice, pace, forward)
    backward.run()
    moved_bytes = sum(option.moved_bytes for option in choice) - forward.last_resident_bytes
    curve = (*forward.curve, *backward.curve)
    return Outcome(
        step_s=backward.now,
        forward_s=forward.now,
        stall_forward_s=forward.stalled_s,
        stall_backward_s=backward.stalled_s,
        peak_bytes=max(moment.nbytes for moment in curve),
        moved_bytes=moved_bytes,
        host_bytes=moved_bytes,
        curve=curve,
    )


class _Parcel:
    """What travels, with the region it is of, and when its copy out has landed."""

    __slots__ = ("arrived_s", "is_ahead", "is_resident", "landed_s", "nbytes", "needed_s", "region")

    def __init__(self, region: int, nbytes: int, needed_s: float, landed_s: float) -> None:
        self.region = region
        self.nbytes = nbytes
        self.needed_s = needed_s
        self.landed_s = landed_s
        self.is_resident = True
        self.is_ahead = False
        self.arrived_s = 0.0


class _Forward:
    def __init__(self, profile: Profile, choice: Sequence[Option], pace: Pace) -> None:
        self._profile = profile
        self._choice = choice
        self._pace = pace
        self._queue: deque[_Parcel] = deque()
        self._resident_bytes = 0
        self._lane_free_s = 0.0
        self.now = 0.0
        self.stalled_s = 0.0
        self.curve: list[Moment] = []
        self.parcels: list[list[_Parcel]] = []
        self.last_resident_bytes = 0

    def run(self) -> None:
        around = self._profile.around
        fixed = self._profile.base_bytes + around.kept_bytes
        self._pass(around.before_s)
        kept = 0
        for number, (region, option) in enumerate(zip(self._profile.regions, self._choice, strict=True)):
            kept += option.kept_bytes
            most = self._run_region(number, region.forward_s, option)
            self.curve.append(
                Moment(self.now, fixed + kept + most + region.forward_work_bytes, f"{region.name} forward")
            )
        self._pass(around.after_s)
        self._release(self._pace.last_window, spared=0)
        self.last_resident_bytes = self._resident_bytes
        self.curve.append(
            Moment(self.now, fixed + kept + self._resident_bytes + around.peak_bytes, "behind the last region")
        )

    def _run_region(self, number: int, forward_s: float, option: Option) -> int:
        """Returns the most that waits on its way out meanwhile."""
        window = self._pace.windows[number]
        self._release(window, spared=0)
        most = self._resident_bytes
        passed_s = 0.0
        sent: list[_Parcel] = []
        for moved in option.moved:
            self._pass(moved.at_s - passed_s)
            passed_s = moved.at_s
            sent.append(self._send(number, moved.nbytes, moved.needed_s))
            self._release(window, spared=1)
            most = max(most, min(self._resident_bytes, window))  # the newest is part of what its region works with
        self._pass(forward_s - passed_s)
        self.parcels.append(sent)
        return most

    def _pass(self, seconds: float) -> None:
        """Compute runs, a little slower while the lane copies beside it."""
        beside = min(max(0.0, self._lane_free_s - self.now), max(0.0, seconds))
        self.now += max(0.0, seconds) + beside * self._profile.link.interference

    def _send(self, number: int, nbytes: int, needed_s: float) -> _Parcel:
        link = self._profile.link
        self._lane_free_s = max(self._lane_free_s, self.now) + link.latency_s + nbytes / link.out
        parcel = _Parcel(number, nbytes, needed_s, self._lane_free_s)
        self._queue.append(parcel)
        self._resident_bytes += nbytes
        return parcel

    def _release(self, window: int, spared: int) -> None:
        while self._resident_bytes > window and len(self._queue) > spared:
            oldest = self._queue.popleft()
            oldest.is_resident = False
            self._resident_bytes -= oldest.nbytes
            if oldest.landed_s > self.now:
                self.stalled_s += oldest.landed_s - self.now
                self.now = oldest.landed_s


class _Backward:
    def __init__(self, profile: Profile, choice: Sequence[Option], pace: Pace, forward: _Forward) -> None:
        self._profile = profile
        self._choice = choice
        self._pace = pace
        self._regions = [
            parcels if option.comes_together else parcels[::-1]
            for parcels, option in zip(forward.parcels, choice, strict=True)
        ]
        self._in_order = [parcel for parcels in reversed(self._regions) for parcel in parcels]
        self._next = 0  # in that order: what has not been looked at for fetching ahead
        self._resident_bytes = forward.last_resident_bytes
        self._ahead_bytes = 0
        self._lane_free_s = forward.now
        self.now = forward.now
        self.stalled_s = 0.0
        self.curve: list[Moment] = []

    def run(self) -> None:
        around = self._profile.around
        self._pass(around.turn_s)
        kept = sum(option.kept_bytes for option in self._choice)
        grads = 0
        for number in reversed(range(len(self._choice))):
            region, option = self._profile.regions[number], self._choice[number]
            grads += region.grad_bytes
            most = self._run_region(number, region.backward_s, option)
            fixed = self._profile.base_bytes + around.kept_bytes + kept + grads
            self.curve.append(Moment(self.now, fixed + most + option.backward_work_bytes, f"{region.name} backward"))
            kept -= option.kept_bytes
        self._pass(around.end_s)

    def _run_region(self, number: int, backward_s: float, option: Option) -> int:
        """Returns the most that is back early or has not left meanwhile, without what the region has asked for."""
        parcels = self._regions[number]
        prefetch = self._pace.prefetch[number]
        if option.comes_together:
            self._fetch([parcel for parcel in parcels if not parcel.is_resident and not parcel.is_ahead])
            while self._next < len(self._in_order) and self._in_order[self._next].region >= number:
                self._next += 1
            self._look_ahead(prefetch, 0)
        most = 0 if option.comes_together else self._waiting_bytes
        passed_s = 0.0
        for parcel in parcels:
            self._pass(parcel.needed_s - passed_s)
            passed_s = max(passed_s, parcel.needed_s)
            self._need(parcel)
            self._look_ahead(prefetch, 0 if option.comes_together else parcel.nbytes)
            if not option.comes_together:
                most = max(most, self._waiting_bytes)
        self._pass(option.again_s + backward_s - passed_s)
        return max(most, self._waiting_bytes)

    @property
    def _waiting_bytes(self) -> int:
        return self._ahead_bytes + self._resident_bytes

    def _need(self, parcel: _Parcel) -> None:
        if parcel.is_resident:
            self._resident_bytes -= parcel.nbytes
            return
        if not parcel.is_ahead:
            self._fetch([parcel])
        self._ahead_bytes -= parcel.nbytes
        if parcel.arrived_s > self.now:
            self.stalled_s += parcel.arrived_s - self.now
            self.now = parcel.arrived_s

    def _look_ahead(self, prefetch: int, at_hand_bytes: int) -> None:
        room = prefetch - at_hand_bytes - self._waiting_bytes
        if room <= 0 or (room < prefetch // _BATCHES and self._ahead_bytes > 0):
            return
        before: _Parcel | None = None
        while self._next < len(self._in_order):
            parcel = self._in_order[self._next]
            if not parcel.is_resident and not parcel.is_ahead:
                room -= parcel.nbytes
                is_together = (
                    before is not None and before.region == parcel.region and self._choice[parcel.region].comes_together
                )
                if room < 0 and not is_together:
                    return
                self._fetch([parcel])
            before = parcel
            self._next += 1

    def _fetch(self, parcels: Sequence[_Parcel]) -> None:
        link = self._profile.link
        for parcel in parcels:
            self._lane_free_s = max(self._lane_free_s, self.now) + link.latency_s + parcel.nbytes / link.back
            parcel.arrived_s = self._lane_free_s
            parcel.is_ahead = True
            self._ahead_bytes += parcel.nbytes

    def _pass(self, seconds: float) -> None:
        beside = min(max(0.0, self._lane_free_s - self.now), max(0.0, seconds))
        self.now += max(0.0, seconds) + beside * self._profile.link.interference
