"""What happens to parcels, as it happens: one Event, and those who listen."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class EventKind(enum.Enum):
    """What happened to a parcel, from the host's point of view: copies run behind it."""

    SENT = "its copy out was queued"
    RELEASED = "compute was told to wait for the copy out, and the device memory was dropped"
    STUCK = "the store could not take it: it stays on the device"
    FETCHED = "its copy in was queued before anybody asked"
    MISSED = "backward asked for it and its copy in was queued only then"
    FORWARDED = "backward used it from the device: it had not been released"
    UNFREED = "backward asked for it and its storage had never died: moving it freed nothing"


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        what: the thing.
        site: name of the save, "region#visit.index".
        nbytes: of the parcel.
        seconds: when, on the clock of time.perf_counter().
    """

    what: EventKind
    site: str
    nbytes: int
    seconds: float = field(default_factory=time.perf_counter)


Listener = Callable[[Event], None]


class Listeners:
    """Called in order, on the thread where it happens, under the engine's lock: be quick, and call nothing of ours."""

    def __init__(self) -> None:
        self.all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Listen from now on; what is returned ends it."""
        self.all += (listener,)
        return lambda: self._remove(listener)

    def tell(self, what: EventKind, site: object, nbytes: int) -> None:
        event = Event(what, str(site), nbytes)
        for listener in self.all:
            listener(event)

    def _remove(self, listener: Listener) -> None:
        self.all = tuple(other for other in self.all if other is not listener)
