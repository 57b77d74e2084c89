"""Events of parcels, and their listeners."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class EventKind(enum.Enum):
    """Kinds of events, seen from the host: copies run later."""

    SENT = "its copy out was queued"
    RELEASED = "compute was told to wait for the copy out, and the device memory was dropped"
    NOT_MOVABLE = "the store could not take it: it stays on the device"
    FETCHED = "its copy in was queued before backward needed it"
    MISSED = "backward needed it and its copy in was queued only then"
    FORWARDED = "backward used it from the device: it had not been released"
    NO_MEMORY_FREED = "backward needed it and its storage was still alive: moving it freed no memory"


@dataclass(frozen=True)
class Event:
    """An event of a parcel.

    Attributes:
        kind: see EventKind.
        site: name of the saved tensor, "region#call.index".
        nbytes: bytes of the parcel.
        seconds: time of the event by `time.perf_counter()`.
    """

    kind: EventKind
    site: str
    nbytes: int
    seconds: float = field(default_factory=time.perf_counter)


Listener = Callable[[Event], None]


class Listeners:
    """Subscribers of events, called in order, on the thread of the event and under the engine's lock.

    A listener has to be quick and must not call ebbtide.
    """

    def __init__(self) -> None:
        self.all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Subscribe. The returned function ends the subscription."""
        self.all += (listener,)
        return lambda: self._remove(listener)

    def tell(self, kind: EventKind, site: object, nbytes: int) -> None:
        event = Event(kind, str(site), nbytes)
        for listener in self.all:
            listener(event)

    def _remove(self, listener: Listener) -> None:
        self.all = tuple(known for known in self.all if known is not listener)
