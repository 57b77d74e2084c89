"""One engine per device and store: finds or makes parcels, decides when they leave and what is fetched ahead.

Note [Windows]
~~~~~~~~~~~~~~
Forward: `window_bytes` bound what waits on the outbound lane with its memory still on the device; beyond it compute
waits for the oldest. What backward is known to need before it can leave is not sent at all unless the window
overflows: it is simply used from the device.
Backward: a site is fetched ahead as long as what is on the device and not needed yet, plus what the node at hand
holds, stays within `prefetch_bytes`. So nothing is fetched on top of a large last activation (logits, loss): the
window opens when that node has freed it.
"""

import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch

from ebbtide._errors import StoreError
from ebbtide._events import What
from ebbtide._torch import current_node_name, graph_task_id, keeps_graph
from ebbtide.engine.lane import Inbound, Outbound
from ebbtide.engine.parcel import Parcel, Span, Ticket, gather, geometry_of, odometer, span_of
from ebbtide.engine.scope import Visit
from ebbtide.engine.timetable import Site, Timetable
from ebbtide.types import Device, Reason, Store, StoreStats, StreamEvent

# How far a look ahead goes: at the end of backward the habit wraps into the next step, where nothing is live yet.
_MOST_HOPS = 64


class _Death(NamedTuple):
    """What a parcel's end changes in the engine's books."""

    storage_key: int
    resident_bytes: int
    ahead_bytes: int


class Engine:
    """Owner of the lanes, the store and the timetable of one device."""

    def __init__(self, device: Device, store: Store) -> None:
        self.device = device
        self.store = store
        self._outbound = Outbound(device, store)
        self._inbound = Inbound(device, store)
        self._timetable = Timetable()
        self._lock = threading.RLock()
        self._by_storage: dict[int, list[weakref.ref[Parcel]]] = {}
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._has_held = False  # spares most models a look into the set at every save
        self._ahead_bytes = 0
        self._farthest: tuple[Site | None, Site] | None = None  # the last site fetched ahead, and the one before it
        self._retained: deque[weakref.ref[Parcel]] = deque()
        # Filled by finalisers of any thread, so neither a lock nor a plain counter will do.
        self._deaths: deque[_Death] = deque()

    # -- forward ---------------------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor, visit: Visit, index: int) -> Ticket | Reason:
        """A ticket for `t`, the `index`-th save of `visit`, or why it stays. `select` has let `t` pass."""
        with self._lock:
            if self._deaths:
                self._settle_deaths()
            storage = t.untyped_storage()
            if self._has_held and storage in self._held:
                return Reason.HELD
            span = span_of(t, storage.nbytes())
            parcel = self._find(storage, t._version, span)
            if parcel is None:
                made = self._make(t, storage, span, visit, visit.site(index))
                if isinstance(made, Reason):
                    return made
                parcel = made
            else:
                visit.scope.ledger.stats.shared.add(span.nbytes)
            return Ticket(parcel, geometry_of(t, parcel.start, span.is_gathered), odometer(t), t._version)

    def _find(self, storage: torch.UntypedStorage, version: int, span: Span) -> Parcel | None:
        """A live parcel with the bytes of `span`: of this very storage, unchanged since."""
        if span.is_gathered:
            return None
        for ref in self._by_storage.get(storage._cdata, ()):
            parcel = ref()
            if (
                parcel is not None
                and parcel.source_ref() is storage
                and parcel.version == version
                and parcel.start <= span.start
                and span.start + span.nbytes <= parcel.start + parcel.nbytes
            ):
                return parcel
        return None

    def _make(
        self, t: torch.Tensor, storage: torch.UntypedStorage, span: Span, visit: Visit, site: Site
    ) -> Parcel | Reason:
        if site.held_nbytes == span.nbytes:
            self._held.add(storage)
            self._has_held = True
            return Reason.HELD
        source = gather(t) if span.is_gathered else storage
        home = self.device.current_stream()
        parcel = Parcel(self, visit, site, source, span.start, span.nbytes, t._version, home)
        try:
            if not site.is_tail and not self._outbound.send(parcel):
                return Reason.STORE_FULL
        except StoreError:
            self._outbound.take_back(parcel)  # the copy has not begun; tried once more when the window overflows
        visit.scope.ledger.stats.parcels.add(span.nbytes)
        if not span.is_gathered:
            self._by_storage.setdefault(parcel.storage_key, []).append(parcel.ref)
        site.live = parcel.ref
        self._outbound.join(parcel)
        for stuck in self._outbound.make_room(visit.scope.limits.window_bytes):
            stuck.ledger.stats.failed.add(stuck.nbytes)
            _tell(What.STUCK, stuck)
        return parcel

    # -- backward --------------------------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The tensor as it was saved, valid on the current stream. Repeatable. Raises ModifiedError, StoreError."""
        ticket.check()
        parcel = ticket.parcel
        with self._lock:
            if self._deaths:
                self._settle_deaths()
            storage, point = self._bring(parcel)
            if storage is parcel.arrival:
                self._bound_retained(parcel)
        if storage is parcel.source:
            return ticket.geometry.view(storage, parcel.start)
        if storage is parcel.arrival:
            self._inbound.arrive(parcel, point)  # outside of the lock: on the CPU this blocks until the bytes are there
            if parcel.tickets == 1 and _node_owns_what_it_unpacks():
                parcel.forget_arrival()
        return ticket.geometry.view(storage, 0)

    def _bring(self, parcel: Parcel) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        """Device memory with the bytes of `parcel`, or about to have them; fetches what is expected after it too.

        The second is the point home has reached, if a fetch had to know it.
        """
        is_first_need = not parcel.is_needed
        if is_first_need:
            self._note_need(parcel)
        if parcel.source is not None:
            storage, point = parcel.source, None
        elif (reader := self.device.current_stream()) != parcel.home:
            return self._inbound.fetch_for(parcel, reader), None
        else:
            point = self._fetch_if_away(parcel)
            assert parcel.arrival is not None
            storage = parcel.arrival
        if is_first_need:
            point = self._fetch_ahead(parcel) or point
        return storage, point

    def _fetch_if_away(self, parcel: Parcel) -> StreamEvent | None:
        if parcel.arrival is not None:
            return None
        parcel.ledger.stats.misses.add(parcel.nbytes)
        _tell(What.MISSED, parcel)
        return self._inbound.fetch([parcel])

    def _note_need(self, parcel: Parcel) -> None:
        """Learn from the first time backward asks for `parcel`."""
        parcel.is_needed = True
        stats = parcel.ledger.stats
        self._timetable.needed(parcel.site)
        parcel.site.is_tail = parcel.source is not None
        if parcel.source is not None:
            stats.forwarded.add(parcel.nbytes)
            _tell(What.FORWARDED, parcel)
            self._outbound.leave(parcel)
        elif parcel.source_ref() is not None:
            stats.unfreed.add(parcel.nbytes)
            _tell(What.UNFREED, parcel)
            parcel.site.held_nbytes = parcel.nbytes
        if parcel.is_ahead:
            parcel.is_ahead = False
            self._ahead_bytes -= parcel.nbytes
        else:
            self._farthest = None  # not what was expected: look ahead from here again

    def _fetch_ahead(self, at_hand: Parcel) -> StreamEvent | None:
        """Fetch what is expected next, as far as the window reaches; the point home has reached if anything was."""
        limits = at_hand.visit.scope.limits
        room = limits.prefetch_bytes - at_hand.nbytes - self._ahead_bytes - self._outbound.resident_bytes
        if room <= 0:
            return None
        batch: list[Parcel] = []
        before, at = self._look_from()
        for _ in range(_MOST_HOPS):
            following = at.expected_after(before)
            if following is None:
                break
            parcel = None if following.live is None else following.live()
            if parcel is not None and parcel.may_be_fetched and parcel.home == at_hand.home:
                room -= parcel.nbytes
                if room < 0:
                    break
                parcel.is_ahead = True
                batch.append(parcel)
                _tell(What.FETCHED, parcel)
                self._farthest = (at, following)
            before, at = at, following
        if not batch:
            return None
        self._ahead_bytes += sum(parcel.nbytes for parcel in batch)
        return self._inbound.fetch(batch)

    def _look_from(self) -> tuple[Site | None, Site]:
        """Where to look ahead from: the last site fetched ahead while backward is still on its way there."""
        table = self._timetable
        assert table.last is not None
        if self._farthest is not None:
            live = self._farthest[1].live
            parcel = None if live is None else live()
            if parcel is not None and parcel.is_ahead:
                return self._farthest
        return table.before_last, table.last

    def _bound_retained(self, parcel: Parcel) -> None:
        """A graph that is kept would collect all its parcels on the device again: only the last ones read stay.

        Dropping is in home's order, and what a node still reads it holds itself.
        """
        if graph_task_id() != -1 and not keeps_graph():
            return
        self._retained.append(parcel.ref)
        limit = parcel.visit.scope.limits.prefetch_bytes
        held = 0
        for ref in reversed(self._retained):
            other = ref()
            held += 0 if other is None or other.arrival is None else other.nbytes
        while held > limit and len(self._retained) > 1:
            oldest = self._retained.popleft()()
            if oldest is not None and oldest is not parcel and oldest.arrival is not None and oldest.is_awaited:
                held -= oldest.nbytes
                oldest.forget_arrival()

    # -- death -----------------------------------------------------------------------------------------------------

    def bury(self, parcel: Parcel) -> None:
        """Called by `Parcel.__del__` on any thread, possibly inside a call of ours: queues, and takes no lock."""
        self._outbound.abandon(parcel)
        self._inbound.abandon(parcel)
        if parcel.block is not None:
            self.store.give_back(parcel.block)
        self._deaths.append(
            _Death(
                parcel.storage_key,
                parcel.nbytes if parcel.is_resident else 0,
                parcel.nbytes if parcel.is_ahead else 0,
            )
        )

    def _settle_deaths(self) -> None:
        while self._deaths:
            death = self._deaths.popleft()
            self._outbound.resident_bytes -= death.resident_bytes
            self._ahead_bytes -= death.ahead_bytes
            refs = self._by_storage.get(death.storage_key)
            if refs is None:
                continue
            if len(refs) > 1:
                refs[:] = [ref for ref in refs if ref() is not None]
            elif refs[0]() is None:
                refs.clear()
            if not refs:
                del self._by_storage[death.storage_key]

    # -- figures ---------------------------------------------------------------------------------------------------

    def store_stats(self) -> StoreStats:
        with self._lock:
            return self.store.stats()

    def close(self) -> None:
        """Free the store. Parcels that still wait in it become unreadable."""
        self.store.close()


def _tell(what: What, parcel: Parcel) -> None:
    listeners = parcel.ledger.listeners
    if listeners.all:
        listeners.tell(what, parcel.site, parcel.nbytes)


def _node_owns_what_it_unpacks() -> bool:
    """Compiled backward may overwrite its saved tensors in place (donated buffers): they must be nobody else's."""
    return current_node_name() == "CompiledFunctionBackward"
