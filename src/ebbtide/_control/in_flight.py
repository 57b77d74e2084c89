"""Forwards from their beginning until their backward has ended: which are under way, and which were dropped. Pure."""

import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Ends(Protocol):
    """What follows one step."""

    on_end: Callable[[], None] | None
    """Called once, when backward has ended."""


Follows = TypeVar("Follows", bound=Ends)


class InFlightStep(Generic[Follows]):
    """One forward, and what follows it.

    Until its backward has ended only its graph keeps what follows it alive, so that a graph that was dropped can be
    told from one whose backward is still to come.

    Attributes:
        ended: what followed it, once its backward has ended.
    """

    def __init__(self, follows: Follows) -> None:
        self.ended: Follows | None = None
        self._alive = weakref.ref(follows)
        follows.on_end = self._end

    def _end(self) -> None:
        self.ended = self._alive()

    @property
    def under_way(self) -> Follows | None:
        """What follows it, while its backward is to come."""
        return self._alive() if self.ended is None else None
