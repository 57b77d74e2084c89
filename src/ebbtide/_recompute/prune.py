"""What is left out of a region's second run, as its first run goes (see Note [Left out] in absent.py).

Note [PruneCache]
~~~~~~~~~~~~~~
To follow what a call leads to takes the host as long as a small operator does, for every operator of the region, and
most forwards of a region go the same way. So what the first one found is its course: the calls that are left out, what
they and all between have returned, and which saves are held. A later forward whose first such call was given the like
and returned it only holds the saves of these numbers. Where it ends it has to have saved the like of every save, and
left out the same calls; else nothing is left out of its second run, and the course is forgotten. What no save shows,
the second run finds, which has to go by what the course has made. Two ways that begin alike and come by turns have but
one course, and nothing is left out of every other pass.
Behind its last save a second run does not go: what operators there need is not asked (a mixture of experts puts what
its experts return back in order there).
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ebbtide._engine.timetable import Site
from ebbtide._recompute.provenance import Made, Provenance, made_by
from ebbtide.types import Output

_MOST = 16


class PrunedTensor(NamedTuple):
    """A call of which what its output leads to is held.

    Attributes:
        site: where its output would be; that it has to run again is written there.
    """

    site: Site


class _Call(NamedTuple):
    """The one of this number of its operator."""

    made: Made
    number: int


class Course(NamedTuple):
    """How one forward of a region went.

    Attributes:
        calls: that are left out.
        made: by them and the operators that they lead to, in order.
        led: the numbers of the saves that are held.
        looks: of all its saves.
    """

    calls: tuple[_Call, ...]
    made: list[Made]
    led: frozenset[int]
    looks: Sequence[object]


class PruneCache:
    """The courses of one region, by recipe and first call; of batches of many sizes the latest few."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Course] = {}

    def of(self, recipe: Hashable, first: _Call) -> Course | None:
        return self._known.get((recipe, first))

    def add(self, recipe: Hashable, course: Course) -> None:
        oldest_first = list(self._known)  # at once: one model may run in several threads
        if len(oldest_first) >= _MOST:
            self._known.pop(oldest_first[0], None)
        self._known[recipe, course.calls[0]] = course

    def forget(self, recipe: Hashable, first: _Call) -> None:
        self._known.pop((recipe, first), None)


class LeavingOut:
    """Around one forward of a region: finds the saves that calls lead to, which are held instead of their outputs.

    Args:
        calls: of the forward so far, by operator: what is left out is written there.
        recipe: which calls are held and left out.
        courses: of the region.

    Attributes:
        follows: whether operators have to be shown to `follow`.
        made: see `Course`.
    """

    def __init__(self, calls: Mapping[Any, list[Any]], recipe: Hashable, courses: PruneCache) -> None:
        self._calls = calls
        self._recipe = recipe
        self._courses = courses
        self._course: Course | None = None
        self._is_off = False
        self._lineage = Provenance()
        self._left_out: list[_Call] = []
        self._led: set[int] = set()
        self._spoiled = 0
        """The calls that cannot be left out, as far as the last save so far says."""
        self.follows = False
        self.made = self._lineage.made

    def leave_out(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: torch.Tensor, site: Site
    ) -> None:
        """The call of `op` that was counted last returned `out`, which would be at `site`: what it leads to is held."""
        number = len(self._calls[op]) - 1
        call, place = _Call(made_by(op, args, kwargs, [out], None), number), len(self._left_out)
        self._calls[op][number] = PrunedTensor(site)
        self._left_out.append(call)
        if place == 0:
            self._begin(call)
        if self._course is None:
            self._lineage.begin(place, op, args, kwargs, out)
        elif place >= len(self._course.calls) or self._course.calls[place] != call:
            self._is_off = True

    def _begin(self, first: _Call) -> None:
        self._course = self._courses.of(self._recipe, first)
        self.follows = self._course is None
        if self._course is not None:
            self.made = self._course.made

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Another operator, whose output is not held, returned `out`."""
        self._lineage.follow(op, args, kwargs, out)

    def spoil(self) -> None:
        """The region does what may not be done twice: nothing is left out."""
        self._lineage.spoil()

    def leads_to(self, t: torch.Tensor, number: int) -> bool:
        """Whether the save `t` of this number is held itself. Asked at every save."""
        self._spoiled = self._lineage.spoiled
        if self._course is not None:
            return number in self._course.led
        if not self.follows or not self._lineage.of(t):
            return False
        self._led.add(number)
        return True

    def close(self, is_whole: bool, looks: Sequence[object]) -> None:
        """The forward has ended, or has raised. `looks`: of what it has saved."""
        if not self._left_out:
            return
        if self._spoiled:
            self._leave_nothing_out()
        elif self._course is not None:
            expected = self._course.looks if is_whole else self._course.looks[: len(looks)]
            is_short = is_whole and len(self._left_out) < len(self._course.calls)
            if self._is_off or is_short or looks != expected:
                self._courses.forget(self._recipe, self._left_out[0])
                self._leave_nothing_out()
        elif is_whole:
            course = Course(tuple(self._left_out), self.made, frozenset(self._led), looks)
            self._courses.add(self._recipe, course)

    def _leave_nothing_out(self) -> None:
        """In this pass; and what was seen to be needed, in no later one."""
        for place, call in enumerate(self._left_out):
            left_out = self._calls[call.made.op][call.number]
            if not isinstance(left_out, PrunedTensor):
                continue  # region code has asked for gradients, and a second run has met it already
            self._calls[call.made.op][call.number] = left_out.site
            if self._spoiled >> place & 1:
                left_out.site.output = Output.NEEDED
