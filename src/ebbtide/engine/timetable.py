"""The learned order in which sites are needed. Pure: no device, no clock, no lock.

Note [Order is a guess]
~~~~~~~~~~~~~~~~~~~~~~~
1. What is learned is succession: after these two sites, that one was needed. Nothing marks where a step begins, so
   accumulation, pipelines and alternating models need no protocol: each is just a longer habit.
2. A wrong guess costs a copy on demand and is overwritten by what happened instead.
3. Nothing reads the timetable to decide what a tensor's value is.
"""

from collections.abc import Iterator

from ebbtide.types import Site

# Guessed sites in a row that have nothing to fetch before a look ahead gives up: the wrap from one step's end into
# the next one's start would otherwise be walked to its end at every save of the last layers.
_FRUITLESS = 32


class Timetable:
    """Learns which site follows which, which sites never free memory, and which are needed before they have left."""

    def __init__(self) -> None:
        self._after_two: dict[tuple[Site | None, Site], Site] = {}
        self._after_one: dict[Site, Site] = {}
        self._last: Site | None = None
        self._before_last: Site | None = None
        self._held: dict[Site, int] = {}
        self._tail: set[Site] = set()

    def needed(self, site: Site) -> None:
        """Backward asked for `site`."""
        last = self._last
        if last is not None:
            self._after_one[last] = site
            self._after_two[self._before_last, last] = site
        self._before_last, self._last = last, site

    def ahead(self) -> Iterator[Site]:
        """Sites in the order in which they are expected after the last needed one; each once."""
        before, at = self._before_last, self._last
        seen: set[Site] = set()
        while at is not None and at not in seen:
            seen.add(at)
            following = self._after_two.get((before, at)) or self._after_one.get(at)
            if following is None or following in seen:
                return
            yield following
            before, at = at, following

    def ahead_of_live(self, live: "set[Site] | dict[Site, object]") -> Iterator[Site]:
        """`ahead`, only those in `live`; gives up after a stretch with none."""
        fruitless = 0
        for site in self.ahead():
            if site in live:
                fruitless = 0
                yield site
            elif (fruitless := fruitless + 1) == _FRUITLESS:
                return

    def learn_held(self, site: Site, nbytes: int) -> None:
        """Moving `site` freed nothing: somebody else kept its storage."""
        self._held[site] = nbytes

    def is_held(self, site: Site, nbytes: int) -> bool:
        return self._held.get(site) == nbytes

    def learn_tail(self, site: Site, was_still_here: bool) -> None:
        """Whether `site` was needed before it had left the device."""
        if was_still_here:
            self._tail.add(site)
        else:
            self._tail.discard(site)

    def is_tail(self, site: Site) -> bool:
        return site in self._tail
