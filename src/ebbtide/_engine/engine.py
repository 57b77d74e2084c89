"""One engine per device, store and capture: makes parcels, decides when they leave and what is fetched ahead.

Note [Windows]
~~~~~~~~~~~~~~
Forward: `window_bytes` bound what waits on the outbound lane with its memory still on the device; beyond it compute
waits for the oldest. What backward is known to need before it can leave is not sent at all unless the window
overflows: it is simply used from the device.
Backward: a site is fetched ahead as long as what is on the device and not needed yet, plus what the node at hand
holds, stays within `prefetch_bytes`. So nothing is fetched on top of a large last activation (logits, loss): the
window opens when that node has freed it.
A region that runs again asks for all it needs at once, and no node asks for anything between two such regions. So what
it needs is fetched ahead together, if the window has room for the first of it, and does not close the window itself.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ebbtide._engine.context import Limits, RegionCall
from ebbtide._engine.lane import Inbound, Outbound
from ebbtide._engine.parcel import (
    LifetimeToken,
    Parcel,
    Span,
    Ticket,
    TokenRef,
    geometry_of,
    make_dense,
    span_of,
    span_of_part,
    version_alias,
)
from ebbtide._engine.timetable import Site, Timetable
from ebbtide._errors import CaptureError, StoreError
from ebbtide._events import EventKind
from ebbtide._utils.torch_private import current_node_name, graph_task_id, keeps_graph, share_version_counter
from ebbtide.types import Device, Reason, Store, StoreStats, Stream, StreamEvent

# How many sites one look ahead goes by, and how many of them in vain: at the end of backward the habit wraps into the
# next step, where nothing is live yet.
_MOST_SITES = 512
_MOST_IN_VAIN = 64
# In how many goes what may be ahead is filled again, at least.
_BATCHES = 4


_Death: TypeAlias = tuple[int, int, int, int]
"""What a parcel's end changes in the engine's books: key of its storage, bytes resident, ahead and retained."""


class _Farthest(NamedTuple):
    """How far looking ahead has come: the last site whose parcel is still to be needed, fetched or never gone; the site
    before it; and the parcel's claim, as one that the site makes later has not been looked at."""

    before: Site
    site: Site
    claim: weakref.ref[LifetimeToken]


class Engine:
    """Owner of the lanes, the store and the timetable of one device.

    Args:
        device, store: copies run on the one and end in the other.
        lock: one engine's, for another one that takes its room from the same store.
    """

    # What a capture's engine says otherwise.
    _full = Reason.STORE_FULL
    _misplaced = "was saved outside of the graph that is being captured, and is needed inside"

    def __init__(self, device: Device, store: Store, lock: "threading.RLock | None" = None) -> None:
        self.device = device
        self.store = store
        self._outbound = Outbound(device, store)
        self._inbound = Inbound(device, store)
        self._timetable = Timetable()
        self.lock = threading.RLock() if lock is None else lock
        # Nothing but the weak references themselves: one that nobody holds would never call back.
        self._refs: set[TokenRef] = set()
        self._by_storage: dict[int, list[weakref.ref[LifetimeToken]]] = {}
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._has_held = False  # spares most models a look into the set at every save
        self._ahead_bytes = 0
        self._farthest: _Farthest | None = None
        self._is_through = False  # nothing more is expected that could be fetched, until something leaves
        self._retained: deque[weakref.ref[LifetimeToken]] = deque()
        self._retained_bytes = 0
        # Filled by finalisers of any thread, so neither a lock nor a plain counter will do.
        self._deaths: deque[_Death] = deque()

    # -- forward ---------------------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor, visit: RegionCall, index: int) -> Ticket | Reason:
        """A ticket for `t`, the `index`-th save of `visit`, or why it stays. `select` has let `t` pass."""
        with self.lock:
            if self._deaths:
                self._settle_deaths()
            storage = t.untyped_storage()
            if self._has_held and storage in self._held:
                return Reason.HELD
            span = span_of(t, storage.nbytes())
            counter = version_alias(t)
            claim = self._find(t, storage, span)
            if claim is None:
                span = span_of_part(t, span, storage.nbytes())
                made = self._make(t, storage, span, counter, visit, visit.site(index))
                if isinstance(made, Reason):
                    return made
                claim = made
            else:
                visit.scope.ledger.stats.shared.add(min(span.transfer_nbytes, claim.parcel.nbytes))
            return Ticket(claim, geometry_of(t, claim.parcel.span), counter, t._version, visit.limits)

    def _find(self, t: torch.Tensor, storage: torch.UntypedStorage, span: Span) -> LifetimeToken | None:
        """A live parcel with the bytes of `t`, from the same storage unchanged since. `span`: as `span_of` gives."""
        version = t._version
        for ref in self._by_storage.get(storage._cdata, ()):
            claim = ref()
            if claim is None:
                continue
            parcel = claim.parcel
            held = parcel.span
            if (
                parcel.source_ref() is storage
                # Both: `t` may count with another counter than the parcel's first save (x and x.data).
                and parcel.counter._version == parcel.version == version
                and (
                    not parcel.extra_version_checks
                    or all(c._version == read for c, read in parcel.extra_version_checks)
                )
                and _has_bytes_of(parcel, t, span)
                # The home stream gathered or packed such bytes, and no second compute stream waited.
                and (not (held.is_gathered or held.is_bits) or parcel.home == self.device.current_stream())
                # Equal versions of two counters say nothing: unsafe_chunk() gives each part a new counter.
                and (version == 0 or share_version_counter(parcel.counter, t))
            ):
                return claim
        return None

    def _make(
        self,
        t: torch.Tensor,
        storage: torch.UntypedStorage,
        span: Span,
        counter: torch.Tensor,
        visit: RegionCall,
        site: Site,
    ) -> LifetimeToken | Reason:
        if site.stays():
            self._held.add(storage)
            self._has_held = True
            return Reason.HELD
        source = storage
        home = self.device.current_stream()
        if span.is_gathered or span.is_bits:
            source, span = self._condense(t, storage, span, home)
        parcel = Parcel(self, visit, site, storage, source, span, counter, home)
        claim = LifetimeToken(parcel)
        parcel.ref = ref = TokenRef(claim, _ended)
        ref.parcel = parcel
        self._refs.add(ref)
        try:
            if not site.needed_before_release and not self._outbound.send(parcel):
                return self._full
        except StoreError:
            self._outbound.take_back(parcel)  # the copy has not begun; tried once more when the window overflows
        stats = parcel.ledger.stats
        stats.parcels.add(parcel.nbytes)
        if span.is_bits:
            stats.packed.add(span.nbytes)
        if parcel.span.is_gathered:
            parcel.gathered = geometry_of(t, span)
        self._index(ref, parcel.storage_key, storage)
        site.live = ref
        site.comes_together = visit.recomputes
        self._outbound.join(parcel)
        self._make_room(visit.limits.window_bytes, spared=1)
        return claim

    def _index(self, ref: TokenRef, key: int, storage: torch.UntypedStorage) -> None:
        """Let the parcel of `ref` be found by its storage; those of a storage that had the same key and died, no more.

        A released storage is gone long before its parcel, and its key is soon another one's.
        """
        refs = self._by_storage.get(key)
        if refs is None:
            self._by_storage[key] = [ref]
        else:
            refs[:] = [known for known in refs if _is_of(known(), storage)]
            refs.append(ref)

    def release_down_to(self, window_bytes: int) -> None:
        """At a release point of a plan: the oldest leave until `window_bytes` hold the rest."""
        with self.lock:
            if self._deaths:
                self._settle_deaths()
            self._make_room(window_bytes, spared=0)

    def _make_room(self, window_bytes: int, spared: int) -> None:
        self._look_anew()  # what it went by because it had not left may leave now
        for stuck in self._outbound.make_room(window_bytes, spared):
            stuck.ledger.stats.failed.add(stuck.nbytes)
            _tell(EventKind.STUCK, stuck)

    def _condense(
        self, t: torch.Tensor, storage: torch.UntypedStorage, span: Span, home: Stream
    ) -> tuple[torch.UntypedStorage, Span]:
        """Memory with what travels instead of `storage`; without room on the device to make it, the whole storage."""
        try:
            source = make_dense(t, span)
        except torch.OutOfMemoryError:
            return storage, Span(0, storage.nbytes(), False, False)
        self._outbound.was_read(home)
        return source, span

    # -- backward --------------------------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The tensor as it was saved, valid on the current stream. Repeatable.

        Raises ModifiedError, StoreError, CaptureError.
        """
        ticket.check()
        parcel = ticket.parcel
        if not self.device.matches_capture():
            raise CaptureError(
                f"a tensor saved at {parcel.site} {self._misplaced}: capture forward and backward together in one "
                "graph, or neither of them, or switch offloading off for what is captured in parts"
            )
        with self.lock:
            if self._deaths:
                self._settle_deaths()
            storage, point = self._bring(parcel, ticket.limits)
            if storage is parcel.arrival and (graph_task_id() == -1 or keeps_graph()):
                self._bound_retained(parcel)
        if storage is parcel.source:
            return ticket.view(storage, parcel.start)
        if storage is parcel.arrival:
            self._inbound.arrive(parcel, point)  # outside of the lock: on the CPU this blocks until the bytes are there
            if "torch._dynamo" in sys.modules and _is_last_of_compiled(ticket.claim):
                parcel.forget_arrival()
                # The node keeps its tickets until it has run. A look ahead that goes beyond the end of the step comes
                # by them again, and is not to fetch what has been read for good.
                parcel.is_needed = not keeps_graph()
        return ticket.view(storage, 0)

    def expect(self, tickets: Sequence[Ticket], limits: Limits) -> None:
        """Queue the copies in of what is about to be read on the current stream, in this order, and look ahead."""
        if not self.device.matches_capture():
            return  # whoever reads them is told
        with self.lock:
            if self._deaths:
                self._settle_deaths()
            home = self.device.current_stream()
            claims = dict.fromkeys(ticket.claim for ticket in tickets)
            _note_company([claim.parcel.site for claim in claims if not claim.parcel.is_needed])
            batch = [claim for claim in claims if self._may_fetch(claim.parcel, home)]
            for claim in batch:
                claim.parcel.is_ahead = True
            if batch:
                self._fetch_guessed(batch)
            self._fetch_ahead(home, limits, 0)

    def _bring(self, parcel: Parcel, limits: Limits) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        """Device memory with the bytes of `parcel`, or about to have them; fetches what is expected after it too, as
        far as the `limits` of the region that asks for it allow.

        The second is the point home has reached, if a fetch had to know it.
        """
        # Looked at from outside of backward (grad_fn._saved_...), it was not needed yet and nothing is to be learned.
        is_first_need = not parcel.is_needed and graph_task_id() != -1
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
            at_hand_bytes = 0 if parcel.site.comes_together else parcel.span.nbytes
            point = self._fetch_ahead(parcel.home, limits, at_hand_bytes) or point
        return storage, point

    def _fetch_if_away(self, parcel: Parcel) -> StreamEvent | None:
        if parcel.arrival is not None:
            return None
        parcel.ledger.stats.misses.add(parcel.nbytes)
        _tell(EventKind.MISSED, parcel)
        return self._inbound.fetch([parcel])

    def _note_need(self, parcel: Parcel) -> None:
        """Learn from the first time backward asks for `parcel`."""
        parcel.is_needed = True
        stats = parcel.ledger.stats
        if not self._timetable.needed(parcel.site):
            self._look_anew()
        parcel.site.needed_before_release = parcel.source is not None
        if parcel.source is not None:
            stats.forwarded.add(parcel.nbytes)
            _tell(EventKind.FORWARDED, parcel)
            self._outbound.leave(parcel)
        else:
            self._note_freed(parcel)
        if parcel.is_ahead:
            parcel.is_ahead = False
            self._ahead_bytes -= parcel.nbytes
        elif parcel.source is None:
            self._look_anew()

    def _note_freed(self, parcel: Parcel) -> None:
        """Learn whether the release of `parcel` gave its memory back."""
        was_freed = parcel.source_ref() is None
        if not was_freed and self._has_parts_to_release(parcel):
            return  # we hold it ourselves: other parcels of the storage have still to go
        parcel.site.learn_freed(was_freed)
        if not was_freed:
            parcel.ledger.stats.unfreed.add(parcel.nbytes)
            _tell(EventKind.UNFREED, parcel)

    def _has_parts_to_release(self, parcel: Parcel) -> bool:
        storage = parcel.source_ref()
        claims = [ref() for ref in self._by_storage.get(parcel.storage_key, ())]
        return any(claim is not None and claim.parcel.source is storage for claim in claims)

    def _fetch_ahead(self, home: Stream, limits: Limits, at_hand_bytes: int) -> StreamEvent | None:
        """Fetch what is expected next, as far as the window reaches; the point home has reached if anything was."""
        room = limits.prefetch_bytes - at_hand_bytes - self._ahead_bytes - self._outbound.resident_bytes
        # Not for every little room: a few small parcels at once need one wait, and most of it is filled anyway.
        if self._is_through or room <= 0 or room < (room + self._ahead_bytes) // _BATCHES:
            return None
        batch: list[LifetimeToken] = []
        is_whole = True
        for before, site, claim in self._to_come():
            parcel = claim.parcel
            if self._may_fetch(parcel, home):
                room -= parcel.nbytes
                if room < 0 and not (before.is_asked_with(site) and _is_at_hand(before)):
                    break
                parcel.is_ahead = True
                batch.append(claim)
            elif parcel.may_be_fetched:
                is_whole = False  # by the backward of another stream: it is not to be gone by for good
            if is_whole:
                assert site.live is not None
                self._farthest = _Farthest(before, site, site.live)
        self._is_through = self._is_through and is_whole
        return self._fetch_guessed(batch) if batch else None

    def _to_come(self) -> Iterator[tuple[Site, Site, LifetimeToken]]:
        """What is expected to be needed and has not been looked at yet, in order: the site before it, it, its claim."""
        before, at = self._look_from()
        in_vain = 0
        for _ in range(_MOST_SITES):
            following = None if at is None else at.expected_after(before)
            if at is None or following is None:
                break
            claim = None if following.live is None else following.live()
            if claim is None or claim.parcel.is_needed:
                in_vain += 1
            else:
                yield at, following, claim
            # Once around; where a step has needed nothing yet, with what it needs last.
            if following is self._timetable.last or in_vain == _MOST_IN_VAIN:
                break
            before, at = at, following
        else:
            return
        self._is_through = True

    def _look_anew(self) -> None:
        """What comes next is not what looking ahead went by: the next look begins where backward is."""
        self._farthest = None
        self._is_through = False

    def _may_fetch(self, parcel: Parcel, home: Stream) -> bool:
        # A site outlives captures: the parcel last made there may be another engine's.
        return parcel.may_be_fetched and parcel.home == home and parcel.engine is self

    def _fetch_guessed(self, claims: list[LifetimeToken]) -> StreamEvent | None:
        """Fetch what nobody has asked for yet. If that fails, the need itself will say so, if it comes."""
        parcels = [claim.parcel for claim in claims]
        try:
            return self._inbound.fetch(parcels)
        except (StoreError, torch.OutOfMemoryError):
            self._look_anew()
            return None
        finally:
            for parcel in parcels:
                parcel.is_ahead = parcel.arrival is not None
                if parcel.is_ahead:
                    self._ahead_bytes += parcel.nbytes
                    _tell(EventKind.FETCHED, parcel)

    def _look_from(self) -> tuple[Site | None, Site | None]:
        """Where to look ahead from: as far as it has come while backward is still on its way there."""
        table, farthest = self._timetable, self._farthest
        claim = None if farthest is None else farthest.claim()
        if farthest is None or claim is None or claim.parcel.is_needed:
            return table.before_last, table.last
        return farthest.before, farthest.site

    def _bound_retained(self, parcel: Parcel) -> None:
        """A graph that is kept would collect all its parcels on the device again: only the last ones read stay.

        Dropping is in home's order, and what a node still reads it holds itself.
        """
        if not parcel.is_retained:
            assert parcel.ref is not None
            parcel.is_retained = True
            self._retained.append(parcel.ref)
            self._retained_bytes += parcel.nbytes
        limit = parcel.visit.limits.prefetch_bytes
        for _ in range(len(self._retained) - 1):
            if self._retained_bytes <= limit:
                return
            ref = self._retained.popleft()
            claim = ref()
            if claim is None:
                continue  # its bytes are settled with its death
            oldest = claim.parcel
            if oldest is parcel or not oldest.is_awaited:
                self._retained.append(ref)
                continue
            self._retained_bytes -= oldest.nbytes
            oldest.is_retained = False
            oldest.forget_arrival()

    # -- death -----------------------------------------------------------------------------------------------------

    def bury(self, parcel: Parcel) -> None:
        """Let go of all that `parcel` has, in an order that is safe; the books follow with the next call.

        Any thread, possibly inside a call of ours: takes no lock.
        """
        assert parcel.ref is not None
        self._refs.discard(parcel.ref)
        self._outbound.abandon(parcel)
        self._inbound.abandon(parcel)
        if parcel.block is not None:
            self.store.give_back(parcel.block)
        self._deaths.append(
            (
                parcel.storage_key,
                parcel.nbytes if parcel.is_resident else 0,
                parcel.nbytes if parcel.is_ahead else 0,
                parcel.nbytes if parcel.is_retained else 0,
            )
        )

    def _settle_deaths(self) -> None:
        while self._deaths:
            storage_key, resident_bytes, ahead_bytes, retained_bytes = self._deaths.popleft()
            if resident_bytes:
                self._outbound.died(resident_bytes)
            self._ahead_bytes -= ahead_bytes
            if retained_bytes:
                self._retained_bytes -= retained_bytes
                while self._retained and self._retained[0]() is None:
                    self._retained.popleft()
            refs = self._by_storage.get(storage_key)
            if refs is None:
                continue
            if len(refs) > 1:
                refs[:] = [ref for ref in refs if ref() is not None]
            elif refs[0]() is None:
                refs.clear()
            if not refs:
                del self._by_storage[storage_key]

    # -- figures ---------------------------------------------------------------------------------------------------

    def waiting_bytes(self, but: str, staying: Container[torch.UntypedStorage]) -> int:
        """What waits on its way out and is still on the device, without what was saved in the region `but`, and without
        what is of a storage that stays."""
        with self.lock:
            if self._deaths:
                self._settle_deaths()
            return self._outbound.waiting_bytes(but, staying)

    def store_stats(self) -> StoreStats:
        with self.lock:
            return self.store.stats()

    def close(self) -> None:
        """Free the store. Parcels that still wait in it become unreadable."""
        self.store.close()


def _ended(ref: "weakref.ref[LifetimeToken]") -> None:
    """The last ticket of a parcel is gone. (No method: each bound one would live as long as the parcel.)"""
    assert isinstance(ref, TokenRef)
    parcel, ref.parcel = ref.parcel, None
    if parcel is not None and not sys.is_finalizing():
        parcel.engine.bury(parcel)


def _is_of(claim: LifetimeToken | None, storage: torch.UntypedStorage) -> bool:
    return claim is not None and claim.parcel.source_ref() is storage


def _has_bytes_of(parcel: Parcel, t: torch.Tensor, span: Span) -> bool:
    """Whether `parcel` holds the bytes of `t`. `span`: as `span_of` gives."""
    held = parcel.span
    if held.is_gathered:
        return geometry_of(t, held) == parcel.gathered
    return (
        not span.is_gathered
        and held.start <= span.start
        and span.start + span.nbytes <= held.start + held.nbytes
        and (not held.is_bits or span.is_bits)  # bits serve booleans only
    )


def _tell(what: EventKind, parcel: Parcel) -> None:
    listeners = parcel.ledger.listeners
    if listeners.all:
        listeners.tell(what, parcel.site, parcel.nbytes)


def _is_at_hand(site: Site) -> bool:
    """Whether what was last made there is on the device, or about to be, and not needed yet.

    The site may be where the step before has ended: then its company has not been begun with.
    """
    claim = None if site.live is None else site.live()
    return claim is not None and not claim.parcel.is_needed and (claim.parcel.is_ahead or claim.parcel.is_resident)


def _note_company(sites: list[Site]) -> None:
    """They are asked for together."""
    for site in sites:
        site.company = sites[0]


def _is_last_of_compiled(claim: LifetimeToken) -> bool:
    """Whether a compiled node reads the one save of a parcel.

    Compiled backward may overwrite its saved tensors in place (donated buffers): they must be nobody else's.
    """
    is_only_ticket = sys.getrefcount(claim) <= _REFERENCES_OF_ONE_TICKET
    return is_only_ticket and current_node_name() == "CompiledFunctionBackward"


# Its own, the parameter above and the argument of getrefcount.
_REFERENCES_OF_ONE_TICKET = 3
