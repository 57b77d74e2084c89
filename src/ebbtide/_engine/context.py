"""What saved tensors have in common: limits, statistics, and the region calls that name saved tensors."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ebbtide._engine.derive_parameters import RegionParameters
from ebbtide._engine.stats import StatsRecorder
from ebbtide._engine.timetable import ORDERS, Site
from ebbtide._plans import ReleasePoint
from ebbtide._utils.torch_private import plain_tensors

_order_numbers = itertools.count(1)

_MOST = 64  # calls of a region that wait for their backward together; graphs without a backward stay alive as well


class Limits(NamedTuple):
    """Limits in bytes: see OffloadConfig."""

    window_bytes: int
    prefetch_bytes: int
    min_bytes: int


class _InFlight:
    """The forwards of the process before backward.

    Attributes:
        waiting: numbers of the forwards. Threads and finalisers add and discard.
        rounds: number of forwards begun while no forward was waiting.
    """

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.numbers = itertools.count(1)
        self.rounds = 0


_in_flight = _InFlight()


class Forward:
    """A forward of a module, or an entry into a context. Lives as long as a tensor saved by the forward.

    Attributes:
        number: of the forward in the process, from 1.
    """

    __slots__ = ("__weakref__", "_has_backward", "number")

    def __init__(self) -> None:
        self.number = next(_in_flight.numbers)
        if not _in_flight.waiting:
            _in_flight.rounds += 1
        self._has_backward = False

    def saves(self) -> None:
        """A saved tensor travels, and backward may come."""
        if not self._has_backward:
            _in_flight.waiting.add(self.number)

    def backward_begins(self) -> None:
        self._has_backward = True
        _in_flight.waiting.discard(self.number)

    def __del__(self, in_flight: _InFlight = _in_flight) -> None:  # at the end of the process the module is empty
        in_flight.waiting.discard(self.number)


class CallNumbers:
    """Numbers of a region's calls in the order of forward, and the sites of each number.

    A call has a number as long as any of the call's parcels lives. Numbers begin again with a forward before which no
    forward of the process waits for backward. Hence a plain loop uses number 0 for ever, a region entered twice in a
    step uses 0 and 1, and the microbatches of a pipeline count through each step, in all stages of a rank: the order of
    needs is the same in every step, without a step boundary. Beside a graph kept alive, numbers begin again at `_MOST`,
    and the graph counts no longer.

    Attributes:
        last: the number taken last.
    """

    def __init__(self, region: str) -> None:
        self.region = region
        self.last = -1
        self._round = 0
        self._sites: list[list[Site]] = []
        self._alive: set[int] = set()
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # filled by finalisers of any thread

    def take(self) -> int:
        with self._lock:
            while self._returned:
                self._alive.discard(self._returned.popleft())
            first = self.last + 1 if self._round == _in_flight.rounds else 0
            self._round = _in_flight.rounds
            if first >= _MOST:
                _in_flight.waiting.clear()
                first = 0
            number = self.last = next(free for free in itertools.count(first) if free not in self._alive)
            self._alive.add(number)
            while len(self._sites) <= number:
                self._sites.append([])
            return number

    def give_back(self, number: int) -> None:
        self._returned.append(number)

    def site(self, number: int, index: int) -> Site:
        sites = self._sites[number]
        while len(sites) <= index:
            sites.append(Site(self.region, number, len(sites), self))
        return sites[index]


class RegionCall:
    """A call of a region. Referenced by the hooks during the call, and by the parcels made in the call.

    Attributes:
        forward: of the module, in which the call was made.
        next_index: number of the next saved tensor.
        limits: of the context, or of the plan for the region.
        points: release points still to come, in order of index.
        sites: numbers of the saved tensors that travel; None: all that may.
        recomputes: the region is recomputed in backward.
        stands_by: backward reads the parcels only if recomputation fails: none comes back early.
        derives: numbers of the saved tensors that are dropped if they can be derived; None: all. See derive.py.
        noticed: numbers of the saved tensors that may do anything but stay, or are operands of derivations, if known.
        operands: those of `noticed` that stay.
        order: number of the order of needs (Note [Order is a guess], 6).
        first_node: autograd's number of the first node of the call, where tensors are derived.
        parameters: of the region, where tensors are derived.
    """

    __slots__ = (
        "_all_points",
        "_number",
        "_numbers",
        "context",
        "derives",
        "first_node",
        "forward",
        "limits",
        "next_index",
        "noticed",
        "operands",
        "order",
        "parameters",
        "points",
        "recomputes",
        "region",
        "sites",
        "stands_by",
    )

    def __init__(self, context: "HookContext", numbers: CallNumbers) -> None:
        self.context = context
        self.forward = context.current_forward()
        self.order = context.order
        self.region = numbers.region
        self.next_index = 0
        self.limits = context.limits
        self.points: tuple[ReleasePoint, ...] = ()
        self._all_points: tuple[ReleasePoint, ...] = ()
        self.sites: frozenset[int] | None = None
        self.recomputes = False
        self.stands_by = False
        self.derives: frozenset[int] | None = frozenset()
        self.noticed: Collection[int] | None = None
        self.operands: Collection[int] = ()
        self.first_node = 0
        self.parameters: RegionParameters | None = None
        self._numbers = numbers
        self._number: int | None = None

    def site(self, index: int) -> Site:
        if self._number is None:
            self._number = self._numbers.take()
            self.forward.saves()
        return self._numbers.site(self._number, index)

    def set_points(self, points: tuple[ReleasePoint, ...], prefetch_bytes: int | None) -> None:
        """Set the plan's release points, in order of index, and the prefetch window if the plan has any."""
        self.points = self._all_points = points
        if prefetch_bytes is not None:
            self.limits = self.limits._replace(prefetch_bytes=prefetch_bytes)

    def reaches_point(self, index: int) -> bool:
        """Whether saved tensor `index` is at or behind the next release point, whose window then applies."""
        if not self.points or index < self.points[0].tensor_index:
            return False
        while self.points and index >= self.points[0].tensor_index:
            self.limits = self.limits._replace(window_bytes=self.points[0].window_bytes)
            self.points = self.points[1:]
        return True

    def keep_window(self, window_bytes: int) -> None:
        """Continue with the window of the region that the forward comes from: windows outlast regions."""
        if window_bytes != self.limits.window_bytes:
            self.limits = self.limits._replace(window_bytes=window_bytes)

    def begin_deriving(self, first_node: int) -> None:
        self.first_node = first_node
        self.parameters = self.context.parameters.get(self.region)
        if self.parameters is not None:
            self.parameters.enter()

    def restart(self) -> "RegionCall":
        """A new call of the region, with the same plan from the first saved tensor on."""
        self.context.forward_begins()
        call = RegionCall(self.context, self._numbers)
        call.limits, call.sites = self.limits, self.sites
        call.recomputes, call.noticed, call.operands = self.recomputes, self.noticed, self.operands
        call.derives, call.first_node, call.parameters = self.derives, self.first_node, self.parameters
        call.points = call._all_points = self._all_points
        return call

    def __del__(self) -> None:
        number = getattr(self, "_number", None)  # an interrupt may come before `__init__` sets the number
        if number is not None:
            self._numbers.give_back(number)


@dataclass
class HookContext:
    """Settings, statistics and names that all saved tensors of one API object share.

    Attributes:
        may_serve: whether saved tensors on a device may be offloaded; called once for each device.
        buffers: `_cdata` of the storages of the module's buffers, which the module keeps alive.
        parameters: by region.
        derived: derivations whose result was equal to a saved tensor: by index, type and signature, the same for equal
            regions. With a norm by region as well.
        microbatch: number of the microbatch whose forward runs, where a schedule tells: its sites are its own.
        order: number of the order of needs of the next calls.
        run_file: of a context, what writes its report at the end of the process, if EBBTIDE_REPORT is set.
    """

    limits: Limits
    may_serve: Callable[[torch.device], bool]
    recorder: StatsRecorder = field(default_factory=StatsRecorder)
    buffers: set[int] = field(default_factory=set[int])
    parameters: dict[str, RegionParameters] = field(default_factory=dict[str, RegionParameters])
    derived: set[Hashable] = field(default_factory=set[Hashable])
    microbatch: int = -1
    order: int = 0
    _forward: "weakref.ref[Forward] | None" = None
    run_file: object = None
    _weights: dict[int, "weakref.ref[torch.UntypedStorage]"] = field(
        default_factory=dict[int, "weakref.ref[torch.UntypedStorage]"]
    )
    _size: int = 0
    _orders: dict[int, list[tuple[Mapping[str, object], int]]] = field(
        default_factory=dict[int, list[tuple[Mapping[str, object], int]]]
    )
    _numbers: dict[tuple[int, int, str], CallNumbers] = field(default_factory=dict[tuple[int, int, str], CallNumbers])
    _serves: dict[torch.device, bool] = field(default_factory=dict[torch.device, bool])

    def forward_begins(self) -> None:
        """A forward of the module begins, or the context was entered."""
        self._forward = None

    def current_forward(self) -> Forward:
        """The latest forward. Calls alone keep a forward alive: without saved tensors no backward will come."""
        found = None if self._forward is None else self._forward()
        if found is None:
            found = Forward()
            self._forward = weakref.ref(found)
        return found

    def set_batch_size(self, size: int) -> None:
        """Use sites of their own for batches of `size`, from the next call on.

        Plans and the order of needs differ between sizes: learned in turns, every guess would be wrong.
        """
        self._size = size

    def follow(self, recipes: Mapping[str, object]) -> None:
        """Run by `recipes`, by region, from the next call on. Batches of one size have an order of needs for each of
        the last recipes."""
        known = self._orders.setdefault(self._size, [])
        number = next((number for former, number in known if former == recipes), None)
        if number is None:
            number = next(_order_numbers)
            known[:] = [*known[1 - ORDERS :], (recipes, number)]
        self.order = number

    def register_weights(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the storages of `parameters` on the device, however they are saved.

        A view names its parameter; a detached alias and the inner tensors of a quantised parameter name none.
        """
        self._weights = {key: known for key, known in self._weights.items() if known() is not None}
        for parameter in parameters:
            for t in plain_tensors(parameter):
                if t.layout is torch.strided and not torch.nn.parameter.is_lazy(t):
                    storage = t.untyped_storage()
                    self._weights[storage._cdata] = weakref.ref(storage)

    def is_weight(self, storage: torch.UntypedStorage) -> bool:
        known = self._weights.get(storage._cdata)
        return known is not None and known() is storage  # a freed weight's address may be reused

    def new_call(self, region: str) -> RegionCall:
        key = self._size, self.microbatch, region
        numbers = self._numbers.get(key)
        if numbers is None:
            numbers = self._numbers.setdefault(key, CallNumbers(region))
        return RegionCall(self, numbers)

    def serves(self, device: torch.device) -> bool:
        known = self._serves.get(device)
        if known is None:
            known = self._serves[device] = self.may_serve(device)
        return known
