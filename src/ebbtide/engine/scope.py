"""What a door hands to the engine: its limits and counts, and the visits that give saves their names."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ebbtide.engine.ledger import Ledger
from ebbtide.types import Site


@dataclass(frozen=True)
class Limits:
    """In bytes: see OffloadConfig for what each one bounds."""

    window_bytes: int
    prefetch_bytes: int
    min_bytes: int


class Slots:
    """The smallest numbers not in use.

    A visit has its number for as long as anything saved in it lives. So a plain loop uses number 0 for ever, a region
    entered twice in a step uses 0 and 1, a pipeline as many as it has in flight; nobody has to say where a step ends.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0
        self._returned: deque[int] = deque()  # by finalisers of any thread

    def take(self) -> int:
        while self._returned:
            heapq.heappush(self._free, self._returned.popleft())
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        self._returned.append(number)


class Visit:
    """One pass through a region. Held by the door while it lasts and by the parcels made in it."""

    __slots__ = ("_slots", "next_index", "number", "region", "scope")

    def __init__(self, scope: "Scope", region: str, slots: Slots) -> None:
        self.scope = scope
        self.region = region
        self.next_index = 0
        self._slots = slots
        self.number = slots.take()

    def name_save(self) -> Site:
        site = Site(self.scope.name, self.region, self.number, self.next_index)
        self.next_index += 1
        return site

    def __del__(self) -> None:
        self._slots.give_back(self.number)


@dataclass
class Scope:
    """What the saves of one door have in common."""

    name: str
    limits: Limits
    serves: Callable[[torch.device], bool]
    """Whether saves on a device are this door's business."""
    ledger: Ledger = field(default_factory=Ledger)
    buffers: set[int] = field(default_factory=set[int])
    """`_cdata` of the storages of the module's buffers, which the module keeps alive."""
    _slots: dict[str, Slots] = field(default_factory=dict[str, Slots])

    def visit(self, region: str) -> Visit:
        return Visit(self, region, self._slots.setdefault(region, Slots()))
