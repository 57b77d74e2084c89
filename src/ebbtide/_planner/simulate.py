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
8. With several graphs in flight the passes of a whole step run one after the other, in the order of the measured step.
   The lanes go on between them. All graphs keep and move the same. The time of the step is that of one graph in the
   mean.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from ebbtide._planner.options import Held, Option, launch_overhead_s, option_for
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Host, Profile, are_backward
from ebbtide._profiling.timeline import Interval, Lane, Timeline

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
    if profile.graphs > 1:
        return _shared_out(profile, choice, room.least)
    # A recompute batch is fetched as a whole, as soon as its first parcel has room.
    more = accumulate((_bytes_after_first(option) for option in choice), max, initial=0)
    carried = [room.backward[0], *room.entering] if room.backward else []
    prefetch = [max(0, min(r, c) - m) for r, c, m in zip(room.backward, carried, more, strict=False)]
    forward = [own_room + option.newest_bytes for own_room, option in zip(room.forward, choice, strict=True)]
    forward = _with_held(forward, choice)
    forward[-1:] = [min([window, *room.at_the_end]) for window in forward[-1:]]
    return Windows(_same_by_name(profile, forward), tuple(room.at_points), _same_by_name(profile, prefetch))


def _shared_out(profile: Profile, choice: Sequence[Option], room: int) -> Windows:
    """Equal windows. At any time parcels of one graph wait to leave, and parcels of another are back early.

    Forward makes in a short time what the lane carries until the next forward, and backward needs in a longer time what
    comes since the last: each way has room for what the lane has left to carry when the pass ends.
    """
    forward_s = sum(region.forward_s for region in profile.regions)
    share = 1.0 - forward_s / max(LAST_DIGITS_S, _compute_s(profile, choice))
    out_bytes = int(room * share)
    return equal_windows(profile, out_bytes, max(0, room - out_bytes - max(map(_bytes_after_first, choice), default=0)))


def held_bytes(rows: Sequence[Sequence[Held]]) -> list[int]:
    """Per region: what the caller holds in forward of the region. `rows`: per region, of its inputs."""
    more = [0] * (len(rows) + 1)
    for number, row in enumerate(rows[:-1], 1):
        for held in row:
            more[number] += held.nbytes
            more[min(number + held.held_for, len(rows))] -= held.nbytes
    return list(accumulate(more[:-1]))


def _with_held(room: Sequence[int], choice: Sequence[Option]) -> list[int]:
    """Per region: most that may wait on the way out, where `room` bytes are left by working memory and everything that
    the caller holds. Of the newest parcels those that the caller holds take no room."""
    rows = [_newest_first(number, option) for number, option in enumerate(choice)]
    found = list(room)
    oldest = next((number for number, option in enumerate(choice) if option.has_held_parcels), len(rows))
    for number in range(oldest + 1, len(rows)):
        left = room[number]
        for nbytes, own, until in chain.from_iterable(reversed(rows[oldest : number + 1])):
            if own < number <= until:
                found[number] += nbytes
            elif nbytes <= left:
                left -= nbytes
            else:
                break
    return found


def _newest_first(number: int, option: Option) -> list[tuple[int, int, int]]:
    """Parcels of a region: bytes, the region, and the last region in whose forward the caller holds them."""
    if not option.has_held_parcels:
        return [(option.moved_bytes, number, number)]  # as good as one
    return [(moved.nbytes, number, number + moved.held_for) for moved in reversed(option.moved)]


def fixed_bytes(profile: Profile, kept_bytes: int, others: int | None = None) -> int:
    """Allocated throughout a step if the regions of a graph keep `kept_bytes`.

    The sum of memory from before the step, tensors saved before the regions, and tensors of the `others` graphs in
    flight; None: the most.
    """
    outside = profile.outside
    each = outside.kept_bytes + outside.held_bytes + kept_bytes
    return profile.base_bytes + outside.kept_bytes + (profile.graphs - 1 if others is None else others) * each


def least_budget(profile: Profile, choice: Sequence[Option]) -> int:
    """The least budget for which `windows_within` finds windows."""
    return -_Room.within(profile, choice, 0).least  # every window grows with the budget, byte for byte


@dataclass(frozen=True)
class _Room:
    """Free bytes under a budget.

    Attributes:
        forward: per region, for parcels on the way out in forward besides the newest and what the caller holds.
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
        last = choice[-1].moved[-1].nbytes if choice and choice[-1].moved else 0
        can_leave = any(point.tensor_index >= 0 for point in profile.outside.post_region_points)
        beside = last if profile.graphs > 1 and not can_leave else 0  # of another graph: waits for the next forward
        backward = [fixed - k - grads - option.backward_work_bytes - beside for k, grads, option in rows]
        entering = _most_entering(backward, choice)
        all_kept = kept[-1] if kept else 0
        points = [(p.tensor_index, fixed - all_kept - p.peak_bytes) for p in profile.outside.post_region_points]
        at_points = [room for index, room in points if index >= 0]
        at_the_end = [room for index, room in points if index < 0] + ([] if at_points else entering[-1:])
        at_points[-1:] = [min([room, *entering[-1:]]) for room in at_points[-1:]]
        rows = zip(kept, held_bytes([option.all_held for option in choice]), choice, strict=True)
        return cls(
            forward=[fixed - k - held - option.forward_work_bytes for k, held, option in rows],
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
    return _Simulation(profile, choice, windows, most_s).run()


def timeline(profile: Profile, choice: Sequence[Option], windows: Windows) -> Timeline:
    """What compute and the lanes do when, in the step of `simulate`: all passes, in order."""
    simulation = _Simulation(profile, choice, windows, math.inf)
    simulation.run()
    return simulation.timeline()


def _compute_s(profile: Profile, choice: Sequence[Option]) -> float:
    """Of one graph, without any wait."""
    return profile.plain_s + sum(option.recompute_s for option in choice)


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


class _Graph:
    """The parcels of one forward, numbered in the order of sending."""

    def __init__(self, count: int) -> None:
        self.has_left = [False] * count
        self.landed_s = [0.0] * count
        self.arrived_s = [-1.0] * count  # negative: not fetched
        self.is_ahead = [False] * count  # counted among the bytes that are on the device before backward needs them
        self.has_run = False


class _Simulation:
    """Compute, and the two lanes."""

    def __init__(self, profile: Profile, choice: Sequence[Option], windows: Windows, most_s: float) -> None:
        self._profile = profile
        self._choice = choice
        self._windows = windows
        self._link = profile.link
        self._launches = _Launches(profile.host)
        self._passes = profile.order
        self._sizes = [moved.nbytes for option in choice for moved in option.moved]
        self._count = len(self._passes) // 2
        self._graphs = [_Graph(len(self._sizes)) for _ in range(self._count)]
        self._most_s = most_s * self._count + LAST_DIGITS_S
        self._left_s = self._count * _compute_s(profile, choice)  # without any wait
        self._stretch = 1.0 / (1.0 - profile.link.interference)
        self._kept_bytes = sum(option.kept_bytes for option in choice)
        self._numbers = _numbers_in_order_of_need(choice)
        seen: set[int] = set()
        order = [each for each in self._passes if each in seen or seen.add(each)]
        self._ahead = [
            (graph, parcel, region)
            for graph in order
            for region in range(len(choice) - 1, -1, -1)
            for parcel in self._numbers[region]
        ]
        self._next = 0  # in `_ahead`: the first parcel not yet considered
        self._alive = 0
        # Parcels that have not left, oldest first: when they have landed, graph and number.
        self._queue: deque[tuple[float, _Graph, int]] = deque()
        self._waiting_bytes = 0  # of the parcels in the queue
        # Per parcel: the own region, and the last region in whose forward the caller holds the memory.
        self._spans = [(k, k + moved.held_for) for k, option in enumerate(choice) for moved in option.moved]
        self._no_parcels_held = held_bytes([option.held for option in choice])
        self._left_held: list[int] = []  # parcels of the present forward that have left and are held
        self._held_bytes = 0  # by the caller in forward of the present region, besides the queue
        self._region = 0  # in whose forward the simulation is
        self._ahead_bytes = 0  # on the device before backward needs them, beside the queue
        self._out_free_s = self._back_free_s = 0.0
        self._stalled_out_s = self._stalled_back_s = self._forward_s = 0.0
        self._stored_bytes = self._most_stored_bytes = self._moved_bytes = 0
        self._regions_began_s: list[float] = []  # in each pass
        self._stalls: list[tuple[int, float, float]] = []  # parcel waited for, begin and end
        self._curve: list[Moment] = []
        self.now = 0.0

    def run(self) -> Outcome | None:
        """None if the step takes longer than allowed."""
        for number, following in zip(self._passes, (*self._passes[1:], -1), strict=True):
            graph = self._graphs[number]
            if graph.has_run:
                is_in_time = self._run_backward(graph)
            else:
                if following >= 0 and self._graphs[following].has_run:  # backward of an earlier forward comes next
                    self._look_ahead(min(self._windows.prefetch))
                is_in_time = self._run_forward(graph)
            if not is_in_time:
                return None
        self.now = self._launches.ended(self.now)
        count = self._count
        moved_bytes = self._moved_bytes // count
        return Outcome(
            step_s=self.now / count,
            forward_s=self._forward_s / count,
            stall_forward_s=self._stalled_out_s / count,
            stall_backward_s=self._stalled_back_s / count,
            host_wait_s=self._launches.waited_s / count,
            peak_bytes=max(moment.nbytes for moment in self._curve),
            moved_bytes=moved_bytes,
            host_bytes=moved_bytes if count == 1 else self._most_stored_bytes,
            curve=tuple(self._curve),
        )

    def timeline(self) -> Timeline:
        """Of the step that has run."""
        regions, link = self._profile.regions, self._link
        names = [region.name for region, option in zip(regions, self._choice, strict=True) for _ in option.moved]
        found = [*self._compute()]
        for parcel, from_s, until_s in self._stalls:
            found.append(Interval("compute", "stall", names[parcel], from_s, until_s))
        for graph in self._graphs:
            for parcel, name in enumerate(names):
                if graph.has_left[parcel]:
                    found.append(self._copy("out", name, self._sizes[parcel], link.out, graph.landed_s[parcel]))
                    found.append(self._copy("back", name, self._sizes[parcel], link.back, graph.arrived_s[parcel]))
        return Timeline(tuple(found), self.now)

    def _copy(self, lane: Lane, name: str, nbytes: int, rate: float, end_s: float) -> Interval:
        return Interval(lane, "copy", name, max(0.0, end_s - self._link.latency_s - nbytes / rate), end_s, nbytes)

    def _compute(self) -> Iterator[Interval]:
        """The work of compute, with the waits inside."""
        rows = list(zip(self._profile.regions, self._choice, strict=True))
        moments, from_s = iter(self._curve), 0.0
        for is_backward, began_s in zip(are_backward(self._passes), self._regions_began_s, strict=True):
            yield Interval("compute", "other", "", from_s, began_s)
            from_s = began_s
            for region, option in rows[::-1] if is_backward else rows:
                until_s = next(moments).seconds
                if not is_backward:
                    yield Interval("compute", "forward", region.name, from_s, until_s)
                else:
                    middle_s = min(from_s + option.recompute_s, until_s)
                    if middle_s > from_s:
                        yield Interval("compute", "recompute", region.name, from_s, middle_s)
                    yield Interval("compute", "backward", region.name, middle_s, until_s)
                from_s = until_s
            for _ in () if is_backward else self._profile.outside.post_region_points:
                next(moments)
        yield Interval("compute", "other", "", from_s, self.now)

    def _fixed_bytes(self) -> int:
        """Allocated throughout the present pass."""
        return fixed_bytes(self._profile, self._kept_bytes, self._alive - 1)

    def _is_late(self) -> bool:
        return self.now + self._left_s > self._most_s

    # -- forward -------------------------------------------------------------------------------------------------------

    def _run_forward(self, graph: _Graph) -> bool:
        """False if the step would end too late."""
        outside = self._profile.outside
        began_s = self.now
        self._alive += 1
        fixed = self._fixed_bytes()
        self._pass(outside.before_s)
        self.now = self._launches.before(self.now)
        self._regions_began_s.append(self.now)
        self._left_held.clear()
        sent = 0
        for number, (region, option) in enumerate(zip(self._profile.regions, self._choice, strict=True)):
            if self._is_late():
                return False
            fixed += option.kept_bytes
            self._region = number
            self._left_held = [parcel for parcel in self._left_held if self._spans[parcel][1] >= number]
            self._held_bytes = self._no_parcels_held[number] + sum(self._sizes[parcel] for parcel in self._left_held)
            most = self._run_region_forward(graph, number, sent)
            sent += len(option.moved)
            self.now = self._launches.forward(self.now, number, option)
            nbytes = fixed + most + self._ahead_bytes + option.forward_work_bytes - option.newest_bytes
            self._curve.append(Moment(self.now, nbytes, f"{region.name} forward"))
        self._run_post_region(fixed)
        graph.has_run = True
        self._forward_s += self.now - began_s
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
                self._release(next(windows), spared=0)
            nbytes = fixed + self._waiting_bytes + self._ahead_bytes + point.peak_bytes
            self._curve.append(Moment(self.now, nbytes, "after the last region"))
        self._pass(outside.after_s - passed_s)

    def _run_region_forward(self, graph: _Graph, number: int, sent: int) -> int:
        """Returns the most that waits on the way out meanwhile, with what the caller holds. `sent`: number of the
        region's first parcel."""
        option, window = self._choice[number], self._windows.forward[number]
        self._release(window, spared=0)
        most = max(self._waiting_bytes, option.newest_bytes) + self._held_bytes
        passed_s = 0.0
        for parcel, moved in enumerate(option.moved, sent):
            self._pass(moved.at_s - passed_s)
            passed_s = moved.at_s
            self._send(graph, parcel)
            if self._waiting_bytes > window:
                self._release(window, spared=1)  # the newest parcel is in use by its region
            waiting_bytes = max(min(self._waiting_bytes, window), option.newest_bytes)
            most = max(most, waiting_bytes + self._held_bytes)
        self._pass(self._profile.regions[number].forward_s - passed_s)
        return most

    def _send(self, graph: _Graph, number: int) -> None:
        nbytes = self._sizes[number]
        self._out_free_s = max(self._out_free_s, self.now) + self._link.latency_s + nbytes / self._link.out
        self._queue.append((self._out_free_s, graph, number))
        graph.landed_s[number] = self._out_free_s
        self._waiting_bytes += nbytes
        self._store(nbytes)

    def _store(self, nbytes: int) -> None:
        self._stored_bytes += nbytes
        self._most_stored_bytes = max(self._stored_bytes, self._most_stored_bytes)

    def _release(self, window: int, spared: int) -> None:
        """The oldest parcels leave while more than `window` waits, but not the newest `spared`."""
        while self._waiting_bytes > window and len(self._queue) > spared:
            landed_s, graph, number = self._queue.popleft()
            self._waiting_bytes -= self._sizes[number]
            graph.has_left[number] = True
            self._moved_bytes += self._sizes[number]
            own, until = self._spans[number]
            if own < until and not graph.has_run:
                self._left_held.append(number)
                self._held_bytes += self._sizes[number] if own < self._region <= until else 0
            if landed_s > self.now:
                self._stalls.append((number, self.now, landed_s))
                self._stalled_out_s += landed_s - self.now
                self.now = landed_s

    # -- backward ------------------------------------------------------------------------------------------------------

    def _run_backward(self, graph: _Graph) -> bool:
        """False if the step would end too late."""
        outside = self._profile.outside
        self._keep_the_rest(graph)
        self._pass(outside.backward_before_s)
        self.now = self._launches.after_regions(self.now)
        self._regions_began_s.append(self.now)
        fixed = self._fixed_bytes() + self._kept_bytes
        for number in range(len(self._choice) - 1, -1, -1):
            region, option = self._profile.regions[number], self._choice[number]
            if self._is_late():
                return False
            fixed += region.grad_bytes
            most = self._waiting_bytes + self._run_region_backward(graph, number, region.backward_s, option)
            self.now = self._launches.backward(self.now, number, option)
            nbytes = fixed + most + option.backward_work_bytes
            self._curve.append(Moment(self.now, nbytes, f"{region.name} backward"))
            fixed -= option.kept_bytes
        self._pass(outside.backward_after_s)
        self._alive -= 1
        return True

    def _keep_the_rest(self, graph: _Graph) -> None:
        """What has not left when backward begins is used from the device. In a steady state it was not sent."""
        own = [number for _, each, number in self._queue if each is graph]
        if own:
            self._queue = deque(each for each in self._queue if each[1] is not graph)
            for number in own:
                self._stay(graph, number)
            self._out_free_s = self._queue[-1][0] if self._queue else self.now

    def _stay(self, graph: _Graph, number: int) -> None:
        nbytes = self._sizes[number]
        graph.is_ahead[number] = True
        self._waiting_bytes -= nbytes
        self._ahead_bytes += nbytes
        self._stored_bytes -= nbytes

    def _run_region_backward(self, graph: _Graph, number: int, backward_s: float, option: Option) -> int:
        """Returns the most that is back early or has not left meanwhile, the region's needed parcels not counted."""
        parcels = self._numbers[number]
        prefetch = self._windows.prefetch[number]
        together = option.is_recompute_batch
        if together:  # otherwise the engine does not see the begin of the region's backward
            for parcel in parcels:
                self._fetch_if_away(graph, parcel)
            self._look_ahead(prefetch)
        most = 0 if together else self._ahead_bytes
        passed_s = 0.0
        for parcel, moved in zip(parcels, option.moved if together else reversed(option.moved), strict=True):
            if moved.needed_s > passed_s:
                self._pass(moved.needed_s - passed_s)
                passed_s = moved.needed_s
            self._need(graph, parcel)
            self._look_ahead(prefetch if together else prefetch - moved.nbytes)
            if not together:
                most = max(most, self._ahead_bytes)
        self._pass(option.recompute_s + backward_s - passed_s)
        return max(most, self._ahead_bytes)

    def _need(self, graph: _Graph, parcel: int) -> None:
        if graph.has_left[parcel]:
            self._fetch_if_away(graph, parcel)
            arrived_s = graph.arrived_s[parcel]
            if arrived_s > self.now:
                self._stalls.append((parcel, self.now, arrived_s))
                self._stalled_back_s += arrived_s - self.now
                self.now = arrived_s
            self._stored_bytes -= self._sizes[parcel]
        self._ahead_bytes -= self._sizes[parcel]

    def _look_ahead(self, prefetch: int) -> None:
        """Fetch in order of need, across graphs, but not beyond a graph whose forward has not run."""
        before = None
        while self._next < len(self._ahead):
            number, parcel, region = self._ahead[self._next]
            graph = self._graphs[number]
            if not graph.has_run:
                return
            if not graph.is_ahead[parcel]:
                has_room = self._ahead_bytes + self._sizes[parcel] <= prefetch
                if not has_room and not ((number, region) == before and self._choice[region].is_recompute_batch):
                    return
                if graph.has_left[parcel]:
                    self._fetch_if_away(graph, parcel)
                else:  # not to be brought back at once
                    self._queue = deque(each for each in self._queue if each[1:] != (graph, parcel))
                    self._stay(graph, parcel)
            before = number, region
            self._next += 1

    def _fetch_if_away(self, graph: _Graph, parcel: int) -> None:
        if graph.has_left[parcel] and graph.arrived_s[parcel] < 0.0:
            link, nbytes = self._link, self._sizes[parcel]
            self._back_free_s = max(self._back_free_s, self.now) + link.latency_s + nbytes / link.back
            graph.arrived_s[parcel] = self._back_free_s
            graph.is_ahead[parcel] = True
            self._ahead_bytes += nbytes

    def _pass(self, seconds: float) -> None:
        """Compute runs, a little slower during copies."""
        if seconds > 0.0:
            self._left_s -= seconds
            longest_s, busy_s = seconds * self._stretch, 0.0
            for free_s in (self._out_free_s, self._back_free_s):
                if free_s > self.now:
                    busy_s += min(free_s - self.now, longest_s)
            self.now += seconds + self._link.interference * busy_s


def shares_between(passes: Sequence[int]) -> tuple[float, float]:
    """Of all backwards the share that runs before the last forward, while parcels leave; and of all forwards the share
    that runs behind the first backward, while parcels come back."""
    is_backward = are_backward(passes)
    if not any(is_backward):
        return 0.0, 0.0
    first, last = is_backward.index(True), len(passes) - 1 - is_backward[::-1].index(False)
    count = len(passes) / 2
    return sum(is_backward[:last]) / count, is_backward[first:].count(False) / count


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
    return simulate(profile, options, equal_windows(profile, 0, 0))


def equal_windows(profile: Profile, out_bytes: int, back_bytes: int) -> Windows:
    """Windows of `out_bytes` in all of forward, and of `back_bytes` in all of backward."""
    count = len(profile.regions)
    points = sum(point.tensor_index >= 0 for point in profile.outside.post_region_points)
    return Windows((out_bytes,) * count, (out_bytes,) * points, (back_bytes,) * count)
