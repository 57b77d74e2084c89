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

from ebbtide.engine.lane import Inbound, Outbound
from ebbtide.engine.parcel import Parcel, Span, Ticket, geometry_of, odometer, span_of
from ebbtide.engine.scope import Visit
from ebbtide.engine.timetable import Timetable
from ebbtide.types import Device, Reason, Site, Store, StoreStats


class _Death(NamedTuple):
    """What a parcel's end changes in the engine's books."""

    site: Site
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
        self._by_site: dict[Site, weakref.ref[Parcel]] = {}
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._ahead_bytes = 0
        self._retained: deque[weakref.ref[Parcel]] = deque()
        # Filled by finalisers of any thread, so neither a lock nor a plain counter will do.
        self._deaths: deque[_Death] = deque()

    # -- forward ---------------------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor, visit: Visit, site: Site) -> Ticket | Reason:
        """A ticket for `t`, or why it stays. `t` is a plain tensor that `select` has let pass."""
        with self._lock:
            self._settle_deaths()
            storage = t.untyped_storage()
            if storage in self._held:
                return Reason.HELD
            span = span_of(t, storage.nbytes())
            parcel = self._find(storage, t._version, span)
            if parcel is None:
                made = self._make(t, storage, span, visit, site)
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
        if self._timetable.is_held(site, span.nbytes):
            self._held.add(storage)
            return Reason.HELD
        source = t.contiguous().untyped_storage() if span.is_gathered else storage
        home = self.device.current_stream()
        parcel = Parcel(self, visit, site, source, span.start, span.nbytes, t._version, home)
        if not self._timetable.is_tail(site) and not self._outbound.send(parcel):
            return Reason.STORE_FULL
        visit.scope.ledger.stats.parcels.add(span.nbytes)
        if not span.is_gathered:
            self._by_storage.setdefault(storage._cdata, []).append(weakref.ref(parcel))
        self._by_site[site] = weakref.ref(parcel)
        self._outbound.join(parcel)
        for stuck in self._outbound.make_room(visit.scope.limits.window_bytes):
            stuck.visit.scope.ledger.stats.failed.add(stuck.nbytes)
        return parcel

    # -- backward --------------------------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The tensor as it was saved, valid on the current stream. Repeatable. Raises ModifiedError, StoreError."""
        ticket.check()
        parcel = ticket.parcel
        with self._lock:
            self._settle_deaths()
            storage = self._bring(parcel)
            if storage is parcel.arrival:
                self._bound_retained(parcel)
        if storage is parcel.source:
            return ticket.geometry.view(storage, parcel.start)
        if storage is parcel.arrival:
            self._inbound.arrive(parcel)  # outside of the lock: on the CPU this blocks until the bytes are there
            if parcel.tickets == 1 and _node_owns_what_it_unpacks():
                parcel.forget_arrival()
        return ticket.geometry.view(storage, 0)

    def _bring(self, parcel: Parcel) -> torch.UntypedStorage:
        """Device memory with the bytes of `parcel`, or about to have them; fetches what is expected after it too."""
        is_first_need = not parcel.is_needed
        if is_first_need:
            self._note_need(parcel)
        if parcel.source is not None:
            storage = parcel.source
        else:
            reader = self.device.current_stream()
            if reader != parcel.home:
                return self._inbound.fetch_for(parcel, reader)
            if parcel.arrival is None:
                parcel.visit.scope.ledger.stats.misses.add(parcel.nbytes)
                self._inbound.fetch([parcel])
            assert parcel.arrival is not None
            storage = parcel.arrival
        if is_first_need:
            self._fetch_ahead(parcel)
        return storage

    def _note_need(self, parcel: Parcel) -> None:
        """Learn from the first time backward asks for `parcel`."""
        parcel.is_needed = True
        stats = parcel.visit.scope.ledger.stats
        self._timetable.needed(parcel.site)
        self._timetable.learn_tail(parcel.site, was_still_here=parcel.source is not None)
        if parcel.source is not None:
            stats.forwarded.add(parcel.nbytes)
            self._outbound.leave(parcel)
        elif parcel.source_ref() is not None:
            stats.unfreed.add(parcel.nbytes)
            self._timetable.learn_held(parcel.site, parcel.nbytes)
        if parcel.is_ahead:
            parcel.is_ahead = False
            self._ahead_bytes -= parcel.nbytes

    def _fetch_ahead(self, at_hand: Parcel) -> None:
        limits = at_hand.visit.scope.limits
        room = limits.prefetch_bytes - at_hand.nbytes - self._ahead_bytes - self._outbound.resident_bytes
        batch: list[Parcel] = []
        for site in self._timetable.ahead_of_live(self._by_site):
            parcel = self._by_site[site]()
            if parcel is None or parcel.is_on_device or parcel.is_needed or parcel.home != at_hand.home:
                continue
            room -= parcel.nbytes
            if room < 0:
                break
            batch.append(parcel)
        if not batch:
            return
        self._inbound.fetch(batch)
        for parcel in batch:
            parcel.is_ahead = True
            self._ahead_bytes += parcel.nbytes

    def _bound_retained(self, parcel: Parcel) -> None:
        """A graph that is kept would collect all its parcels on the device again: only the last ones read stay.

        Dropping is in home's order, and what a node still reads it holds itself.
        """
        if torch._C._current_graph_task_id() != -1 and not torch._C._autograd._get_current_graph_task_keep_graph():
            return
        self._retained.append(weakref.ref(parcel))
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
                parcel.site,
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
            site_ref = self._by_site.get(death.site)
            if site_ref is not None and site_ref() is None:
                del self._by_site[death.site]
            alive = [ref for ref in self._by_storage.get(death.storage_key, ()) if ref() is not None]
            if alive:
                self._by_storage[death.storage_key] = alive
            else:
                self._by_storage.pop(death.storage_key, None)

    # -- figures ---------------------------------------------------------------------------------------------------

    def store_stats(self) -> StoreStats:
        with self._lock:
            return self.store.stats()

    def close(self) -> None:
        """Free the store. Parcels that still wait in it become unreadable."""
        self.store.close()


def _node_owns_what_it_unpacks() -> bool:
    """Compiled backward may overwrite its saved tensors in place (donated buffers): they must be nobody else's."""
    node = torch._C._current_autograd_node()
    return node is not None and type(node).__name__ == "CompiledFunctionBackward"
