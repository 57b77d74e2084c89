"""The learned order in which sites are needed. Pure: no device, no clock, no lock.

Note [Order is a guess]
~~~~~~~~~~~~~~~~~~~~~~~
1. What is learned is succession: after these two sites, that one was needed. Nothing marks where a step begins, so
   accumulation, pipelines and alternating models need no protocol: each is just a longer habit.
2. A wrong guess costs a copy on demand and is overwritten by what happened instead.
3. Nothing reads the timetable to decide what a tensor's value is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ebbtide.types import Output

if TYPE_CHECKING:
    from ebbtide._engine.parcel import LifetimeToken

# A site that many others precede (dynamic control flow) keeps this many second-order habits.
_MOST_HABITS = 16

# One sighting may be an accident (a tensor that was logged once); and what was held may be held no longer.
_TIMES_HELD = 2
_TRY_AGAIN_EVERY = 32


class Site:
    """The stable name of a save from step to step, and what was learned about it.

    Attributes:
        region: FQN of the region's module, or "" outside of all regions.
        visit: which of the passes through the region whose parcels live at the same time.
        index: the how-manyth save of the visit.
        needed_before_release: backward needed it, last time, before it had left the device.
        live: the claim to the parcel that was last made here.
        comes_together: its region runs again, and asks for all it needs at once.
        company: who is asked for together, by the first of them. What several regions share is in the company of the
            one that asks for it first, which is not the one that saved it.
        output: of an output of a dear operator: why holding it is of no use; None while that is not known.
        compared: the call whose output was looked at last, at the end of its region, for what has overwritten it: its
            operator and number.
    """

    __slots__ = (
        "__weakref__",
        "_next",
        "_next_after",
        "_times_changed",
        "_times_held",
        "_times_kept",
        "comes_together",
        "company",
        "compared",
        "index",
        "live",
        "needed_before_release",
        "output",
        "region",
        "visit",
    )

    def __init__(self, region: str, visit: int, index: int) -> None:
        self.region = region
        self.visit = visit
        self.index = index
        self._times_held = 0
        self._times_kept = 0
        self._times_changed = 0
        self.needed_before_release = False
        self.live: weakref.ref[LifetimeToken] | None = None
        self.comes_together = False
        self.company: Site | None = None
        self.output: Output | None = None
        self.compared: tuple[object, int] | None = None
        self._next: Site | None = None
        # By the number of the site before, which is not kept alive: it may be of a model that is long gone.
        self._next_after: dict[int, tuple[weakref.ref[Site], Site]] = {}

    def __str__(self) -> str:
        return f"{self.region or '<root>'}#{self.visit}.{self.index}"

    def learn_freed(self, was_freed: bool) -> None:
        """Whether moving from here freed the memory, or somebody else kept the storage all along."""
        self._times_held = 0 if was_freed else self._times_held + 1

    def stays(self) -> bool:
        """Whether a save here should stay, since moving it frees nothing: seen twice, and looked into now and then."""
        if self._times_held < _TIMES_HELD:
            return False
        self._times_kept += 1
        return self._times_kept % _TRY_AGAIN_EVERY != 0

    def drops_output(self) -> bool:
        """Whether an output here is not to be held. One that was changed in place may come unchanged again some day."""
        if self.output is Output.CHANGED:
            self._times_changed += 1
            if self._times_changed % _TRY_AGAIN_EVERY == 0:
                self.output = None
        return self.output is not None and self.output is not Output.NEEDED

    def is_asked_with(self, other: Site) -> bool:
        """Whether one second run of a region asks for both."""
        return self.comes_together and other.comes_together and self.company is other.company is not None

    def follow_with(self, before: Site | None, following: Site) -> None:
        """Learn that `following` was needed after this site, which was needed after `before`."""
        self._next = following
        if before is not None:
            number = id(before)
            if len(self._next_after) == _MOST_HABITS and number not in self._next_after:
                self._next_after.clear()
            self._next_after[number] = weakref.ref(before), following

    def expected_after(self, before: Site | None) -> Site | None:
        """What is expected next when this site is needed after `before`."""
        known = None if before is None else self._next_after.get(id(before))
        return known[1] if known is not None and known[0]() is before else self._next


class Timetable:
    """Where backward is, in terms of sites, and what it is expected to ask for."""

    def __init__(self) -> None:
        self.last: Site | None = None
        self.before_last: Site | None = None

    def needed(self, site: Site) -> bool:
        """Backward asked for `site`: learn it. Whether it was expected."""
        was_expected = self.last is not None and self.last.expected_after(self.before_last) is site
        if self.last is not None:
            self.last.follow_with(self.before_last, site)
        self.before_last, self.last = self.last, site
        return was_expected
