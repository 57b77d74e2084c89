"""The learned order in which sites are needed. Pure: no device, no clock, no lock.

Note [Order is a guess]
~~~~~~~~~~~~~~~~~~~~~~~
1. Succession is learned: after two sites, a third was needed. No mark says where a step begins, hence accumulation,
   pipelines and alternating models need no protocol: each is a longer habit.
2. A wrong guess costs a copy on demand, and the observed successor overwrites the guess.
3. Before anything is known, backward is expected to need first what was saved last.
4. A schedule that knows what comes next puts marks into the order: sites without a tensor, needed where the part of the
   order that the mark stands for begins.
5. A tensor that backward reads again after the tensor has left once more (a retained graph, a split backward) has a
   second site: the order of second needs is another habit. Look-ahead stops before a tensor that may still leave: what
   comes behind would take the room.
6. Recipes decide which tensors are needed, and when: sites learn apart under other recipes, each in an order with a
   number. Another order would fetch too early what is needed late, on top of the memory that the plan counts on. A site
   that has begun another order since is no successor any more, and the site needed last no place to look from.
7. The value of a tensor never depends on the timetable.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

ORDERS = 4  # that are remembered; the oldest is forgotten for another


class Numbers(Protocol):
    """The numbers of a region's calls: `last` is the number taken last."""

    last: int


class _Successor(NamedTuple):
    """A site needed next, and its order at that time."""

    site: Site
    order: int

    @property
    def now(self) -> Site | None:
        return self.site if self.site.order == self.order else None


class _Learned:
    """What a site has learned in one order of needs."""

    __slots__ = ("after", "successor")

    def __init__(self) -> None:
        self.successor: _Successor | None = None
        # Keyed by id: a strong reference would keep the site before alive, also when the model is long gone.
        self.after: dict[int, tuple[weakref.ref[Site], _Successor]] = {}


class Site:
    """The stable name of a saved tensor from step to step, and what was learned about the tensor.

    Attributes:
        region: FQN of the region's module, or "" outside of all regions.
        call: number of the region call, among the calls whose parcels live at the same time.
        index: number of the saved tensor in the call.
        needed_before_release: backward needed the tensor, last time, before the device memory was released.
        live: weak reference to the LifetimeToken of the parcel that was last made at the site. Untyped: parcels know
            sites, and sites nothing of parcels.
        is_recomputed: the region is recomputed, and reads at once all the parcels that the recomputation needs.
        is_derived: a saved tensor of the site was derived.
        not_derived: signature of an expression whose result was not equal to the saved tensor; see derive.py.
        numbers: of the region's calls, if known.
        is_closed: a mark; nothing behind is fetched before something else, a forward, has happened.
        order: number of the order of needs in which the site learns.
        batch: first site of the recompute batch, the sites that one recomputation reads together. A tensor shared by
            several regions belongs to the batch of the region that reads first, which may not have saved the tensor.
    """

    def __init__(self, region: str, call: int, index: int, numbers: Numbers | None = None) -> None:
        self.region = region
        self.call = call
        self.index = index
        self.numbers = numbers
        self._times_held = 0
        self._times_kept = 0
        self.needed_before_release = False
        self.live: weakref.ref[Any] | None = None
        self.is_recomputed = False
        self.batch: Site | None = None
        self.is_derived = False
        self.not_derived: tuple[Any, ...] | None = None
        self.is_closed = False
        self.order: int = 0
        self._again: Site | None = None
        self._first: Site | None = None  # of an `again`: the site of the first need
        self._own = _Learned()
        self._learned = {0: self._own}

    def __str__(self) -> str:
        return f"{self.region or '<root>'}#{self.call}.{self.index}"

    @property
    def again(self) -> Site:
        """The site of the tensor once backward has read the tensor and the tensor has left again."""
        if self._again is None:
            self._again = Site(self.region, self.call, self.index, self.numbers)
            self._again._again, self._again._first = self._again, self
        self._again.is_recomputed = self.is_recomputed
        self._again.begin(self.order)
        return self._again

    @property
    def may_leave_again(self) -> bool:
        """Whether the tensor, expected to be needed again, has not left since the first need."""
        return self._first is not None and self._first.live is not None and self._first.live() is not None

    @property
    def is_to_come(self) -> bool:
        """Whether a forward has to run first: a later call of the region, or one that a schedule knows of. Nothing
        behind is fetched yet: the site, which comes first, would find no room."""
        return self.is_closed or (self.numbers is not None and self.call > self.numbers.last)

    def learn_freed(self, was_freed: bool) -> None:
        """Learn whether a release freed memory, or the storage was referenced elsewhere all along."""
        self._times_held = 0 if was_freed else self._times_held + 1

    def should_stay(self) -> bool:
        """Whether the tensor should stay on the device because moving frees nothing."""
        if self._times_held < 2:  # once may be an accident, like a tensor that was logged
            return False
        self._times_kept += 1
        return self._times_kept % 32 != 0  # tried again now and then: the storage may be free by now

    def is_batched_with(self, other: Site) -> bool:
        """Whether a recomputation reads both sites together."""
        return self.is_recomputed and other.is_recomputed and self.batch is other.batch is not None

    def begin(self, order: int) -> None:
        """Learn in the order with the number `order` from now on."""
        if order == self.order:
            return
        self.order = order
        if order not in self._learned and len(self._learned) == ORDERS:
            del self._learned[next(iter(self._learned))]
        self._own = self._learned.setdefault(order, _Learned())

    def guess(self, following: Site) -> None:
        """Expect `following` behind the site as long as nothing is known in the order of `following`."""
        self.begin(following.order)
        known = self._own.successor
        if known is None or known.now is None:
            self._own.successor = _Successor(following, following.order)

    def follow_with(self, before: Site | None, following: Site) -> None:
        """Learn that `following` was needed after the site, which was needed after `before`."""
        own = self._own
        own.successor = found = _Successor(following, following.order)
        if before is not None:
            number = id(before)
            # Dynamic control flow may put many sites before a site: at 16 habits all are forgotten.
            if len(own.after) == 16 and number not in own.after:
                own.after.clear()
            own.after[number] = weakref.ref(before), found

    def expected_after(self, before: Site | None) -> Site | None:
        """The site expected next when the present site is needed after `before`."""
        known = None if before is None else self._own.after.get(id(before))
        found = known[1] if known is not None and known[0]() is before else self._own.successor
        return None if found is None else found.now


class Timetable:
    """The sites that backward needed last, and the learned successors."""

    def __init__(self) -> None:
        self.before_last: Site | None = None
        self._last: Site | None = None
        self._order = 0  # of the last need

    @property
    def last(self) -> Site | None:
        """The site needed last; None if the site has begun another order since."""
        return self._last if self._last is not None and self._last.order == self._order else None

    def needed(self, site: Site) -> bool:
        """Learn that backward needed `site`. Returns whether `site` was expected."""
        last = self.last
        was_expected = last is not None and last.expected_after(self.before_last) is site
        if last is not None:
            last.follow_with(self.before_last, site)
        self.before_last, self._last, self._order = self._last, site, site.order
        return was_expected
