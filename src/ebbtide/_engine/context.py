"""What a door hands to the engine: its limits and counts, and the visits that give saves their names."""

import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from ebbtide._engine.stats import StatsRecorder
from ebbtide._engine.timetable import Site
from ebbtide._plans import ReleasePoint
from ebbtide._utils.torch_private import plain_tensors


@dataclass(frozen=True)
class Limits:
    """In bytes: see OffloadConfig for what each one bounds."""

    window_bytes: int
    prefetch_bytes: int
    min_bytes: int


class CallNumbers:
    """The visits of one region: the smallest numbers not in use, and the sites of each.

    A visit has its number for as long as anything saved in it lives. So a plain loop uses number 0 for ever, a region
    entered twice in a step uses 0 and 1, a pipeline as many as it has in flight; nobody has to say where a step ends.
    """

    def __init__(self, region: str) -> None:
        self.region = region
        self._sites: list[list[Site]] = []
        self._free: list[int] = []
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # by finalisers of any thread

    def take(self) -> int:
        with self._lock:
            while self._returned:
                heapq.heappush(self._free, self._returned.popleft())
            if self._free:
                return heapq.heappop(self._free)
            self._sites.append([])
            return len(self._sites) - 1

    def give_back(self, number: int) -> None:
        self._returned.append(number)

    def site(self, number: int, index: int) -> Site:
        sites = self._sites[number]
        while len(sites) <= index:
            sites.append(Site(self.region, number, len(sites)))
        return sites[index]


class RegionCall:
    """One pass through a region. SavedOutput by the door while it lasts and by the parcels made in it.

    Attributes:
        next_index: of the save that comes next.
        limits: of the door, or what a plan says for this region.
        points: release points that are still to come, in order of index.
        sites: the indices of the saves that travel; None: all that may.
        recomputes: the region will run again in backward.
    """

    __slots__ = (
        "_all_points",
        "_slots",
        "limits",
        "next_index",
        "number",
        "points",
        "recomputes",
        "region",
        "scope",
        "sites",
    )

    def __init__(self, scope: "HookContext", slots: CallNumbers) -> None:
        self.scope = scope
        self.region = slots.region
        self.next_index = 0
        self.limits = scope.limits
        self.points: tuple[ReleasePoint, ...] = ()
        self._all_points: tuple[ReleasePoint, ...] = ()
        self.sites: frozenset[int] | None = None
        self.recomputes = False
        self._slots = slots
        self.number = slots.take()

    def site(self, index: int) -> Site:
        return self._slots.site(self.number, index)

    def follow(self, points: tuple[ReleasePoint, ...], prefetch_bytes: int | None) -> None:
        """What a plan says: `points` in order of index, and what may be brought back early from here on."""
        self.points = self._all_points = points
        if prefetch_bytes is not None:
            self.limits = replace(self.limits, prefetch_bytes=prefetch_bytes)

    def comes_to_point(self, index: int) -> bool:
        """Whether the save at hand is at a release point or behind it; the window is that point's from now on."""
        if not self.points or index < self.points[0].save:
            return False
        while self.points and index >= self.points[0].save:
            self.limits = replace(self.limits, window_bytes=self.points[0].window_bytes)
            self.points = self.points[1:]
        return True

    def hold(self, window_bytes: int) -> None:
        """Go on with the window that holds when the forward comes here: regions begin and end, it does not."""
        if window_bytes != self.limits.window_bytes:
            self.limits = replace(self.limits, window_bytes=window_bytes)

    def again(self) -> "RegionCall":
        """Another one of the same region, by the same plan from its first save on."""
        visit = RegionCall(self.scope, self._slots)
        visit.limits, visit.sites, visit.recomputes = self.limits, self.sites, self.recomputes
        visit.points = visit._all_points = self._all_points
        return visit

    def __del__(self) -> None:
        self._slots.give_back(self.number)


@dataclass
class HookContext:
    """What the saves of one door have in common."""

    limits: Limits
    may_serve: Callable[[torch.device], bool]
    """Whether saves on a device are this door's business; asked once a device."""
    ledger: StatsRecorder = field(default_factory=StatsRecorder)
    buffers: set[int] = field(default_factory=set[int])
    """`_cdata` of the storages of the module's buffers, which the module keeps alive."""
    _weights: dict[int, "weakref.ref[torch.UntypedStorage]"] = field(
        default_factory=dict[int, "weakref.ref[torch.UntypedStorage]"]
    )
    _size: int = 0
    _slots: dict[tuple[int, str], CallNumbers] = field(default_factory=dict[tuple[int, str], CallNumbers])
    _serves: dict[torch.device, bool] = field(default_factory=dict[torch.device, bool])

    def turn_to(self, size: int) -> None:
        """Name the saves of batches of this size, from the next visit on, apart from those of others.

        Their plans differ, and so does what is needed after what: learned in turns, the order would be wrong each time.
        """
        self._size = size

    def know_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        """These stay however they are saved. A view names the parameter that it is of; its data, what was detached from
        it, and what a quantised one is made of do not."""
        self._weights = {place: known for place, known in self._weights.items() if known() is not None}
        for parameter in parameters:
            for t in plain_tensors(parameter):
                if t.layout is torch.strided and not torch.nn.parameter.is_lazy(t):
                    storage = t.untyped_storage()
                    self._weights[storage._cdata] = weakref.ref(storage)

    def is_weight(self, storage: torch.UntypedStorage) -> bool:
        known = self._weights.get(storage._cdata)
        return known is not None and known() is storage  # another one may have its address since

    def visit(self, region: str) -> RegionCall:
        key = self._size, region
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots.setdefault(key, CallNumbers(region))
        return RegionCall(self, slots)

    def serves(self, device: torch.device) -> bool:
        known = self._serves.get(device)
        if known is None:
            known = self._serves[device] = self.may_serve(device)
        return known
