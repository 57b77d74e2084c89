"""Engine of a device, store and capture: makes parcels, decides about releases and fetches.

Note [Windows]
~~~~~~~~~~~~~~
Forward: `window_bytes` bound the parcels that wait on the outbound lane with memory still on the device; beyond the
window compute waits for the oldest. A parcel known to be needed before the release is not sent unless the window
overflows: backward uses the source.
Backward: a site is fetched ahead as long as the bytes on the device that the same backward has not needed yet, plus the
bytes of the present node, stay within `prefetch_bytes`. Nothing is fetched on top of a large last activation (logits,
loss): the window opens when the node has freed the activation.
A recomputed region needs all parcels at once, and no node needs any between two recomputed regions. Hence the parcels
of a region are fetched ahead together, if the window has room for the first, and do not close the window.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from ebbtide._engine.context import Forward, Limits, RegionCall
from ebbtide._engine.geometry import Span, geometry_of, make_dense, span_of, span_of_part
from ebbtide._engine.lane import Inbound, Outbound
from ebbtide._engine.parcel import LifetimeToken, Location, Parcel, Ticket, TokenRef, version_alias
from ebbtide._engine.timetable import Site, Timetable
from ebbtide._errors import CaptureError, StoreError
from ebbtide._events import EventKind
from ebbtide._types import Device, Reason, Store, StoreStats, Stream, StreamEvent
from ebbtide._utils.torch_private import current_node_name, graph_task_id, keeps_graph, share_version_counter

_PendingFree: TypeAlias = tuple[int, int, int, int, TokenRef]
"""Changes of the engine's books at the end of a parcel: key of its storage, bytes queued and the forward that they are
of, bytes ahead, reference."""


class _Farthest(NamedTuple):
    """End of the last look ahead: the last site with a parcel still to be needed, fetched or never released; the site
    before; and the parcel's token, because a later parcel of the site has not been looked at."""

    before: Site
    site: Site
    token: weakref.ref[LifetimeToken]


class Engine:
    """Owner of the lanes, the store and the timetable of a device.

    Args:
        device: streams and events for the copies.
        store: memory for waiting parcels.
        lock: lock of the engine that owns the room of `store`, if there is such an engine.
    """

    # Overridden by the engine of a capture.
    _full = Reason.STORE_FULL
    _misplaced = "was saved outside of the graph that is being captured, and is needed inside"

    def __init__(self, device: Device, store: Store, lock: "threading.RLock | None" = None) -> None:
        self.device = device
        self.store = store
        self._outbound = Outbound(device, store)
        self._inbound = Inbound(device, store)
        self._timetable = Timetable()
        self.lock = threading.RLock() if lock is None else lock
        # Holds the weak references themselves, by id: a collected reference never calls back. A parcel is in the books
        # as long as its reference is here, beyond the parcel's end.
        self._refs: dict[int, TokenRef] = {}
        self._by_storage: dict[int, list[weakref.ref[LifetimeToken]]] = {}
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # referenced elsewhere
        self._has_held = False  # spares most models a look into the set for every saved tensor
        self._ahead_bytes = 0
        self._farthest: _Farthest | None = None
        self._is_through = False  # no further parcel to fetch is expected, until a parcel leaves
        self.newest: Site | None = None  # of the parcel made last
        self._forward = 0  # the number of its forward
        self.keeps_retained = False  # what a retained graph has read stays until the graph is read again
        # Parcels brought back for a retained graph, oldest first: id of the reference, and bytes.
        self._retained: dict[int, int] = {}
        self._retained_bytes = 0
        # Filled by finalisers of any thread: neither a lock nor a plain counter is safe.
        self._pending_frees: deque[_PendingFree] = deque()

    # -- forward ---------------------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor, region_call: RegionCall, index: int) -> Ticket | Reason:
        """A ticket for `t`, saved tensor number `index` of the call, or why `t` stays. `select` has accepted `t`."""
        with self.lock:
            if self._pending_frees:
                self._drain_frees()
            storage = t.untyped_storage()
            if self._has_held and storage in self._held:
                return Reason.HELD
            span = span_of(t, storage.nbytes())
            counter = version_alias(t)
            token = self._find(t, storage, span)
            if token is None:
                span = span_of_part(t, span, storage.nbytes())
                made = self._make(t, storage, span, counter, region_call, region_call.site(index))
                if isinstance(made, Reason):
                    return made
                token = made
            else:
                self._share(t, token.parcel, span, region_call)
            return Ticket(token, geometry_of(t, token.parcel.span), counter, t._version, region_call.limits)

    def join(self, t: torch.Tensor, region_call: RegionCall) -> Ticket | None:
        """A ticket for `t`, which need not leave, if the bytes of `t` leave for another saved tensor: the parcel frees
        no memory as long as anything holds the storage. `select` has accepted `t`.
        """
        storage = t.untyped_storage()
        if storage._cdata not in self._by_storage:
            return None
        with self.lock:
            span = span_of(t, storage.nbytes())
            token = self._find(t, storage, span)
            if token is None:
                return None
            self._share(t, token.parcel, span, region_call)
            return Ticket(token, geometry_of(t, token.parcel.span), version_alias(t), t._version, region_call.limits)

    def _find(self, t: torch.Tensor, storage: torch.UntypedStorage, span: Span) -> LifetimeToken | None:
        """A live parcel with the bytes of `t`, from the unchanged storage. `span`: from `span_of`."""
        version = t._version
        for ref in self._by_storage.get(storage._cdata, ()):
            token = ref()
            if token is None:
                continue
            parcel = token.parcel
            held = parcel.span
            if (
                parcel.source_ref() is storage
                # Two checks: `t` may have another version counter than the parcel's first saved tensor (x and x.data).
                and parcel.counter._version == parcel.version == version
                and (
                    not parcel.extra_version_checks
                    or all(c._version == read for c, read in parcel.extra_version_checks)
                )
                and _has_bytes_of(parcel, t, span)
                # The owner stream gathered or packed the bytes, and no other stream waits for them.
                and (not (held.is_gathered or held.is_bits) or parcel.owner_stream == self.device.current_stream())
                # Equal versions of two counters prove nothing: unsafe_chunk() gives each part a new counter.
                and (version == 0 or share_version_counter(parcel.counter, t))
            ):
                return token
        return None

    def _share(self, t: torch.Tensor, parcel: Parcel, span: Span, region_call: RegionCall) -> None:
        """One more saved tensor, with the bytes of `span`, shares the parcel."""
        self.device.mark_used(t, self.device.current_stream())
        parcel.stands_by &= region_call.stands_by
        region_call.context.recorder.stats.shared.add(min(span.transfer_nbytes, parcel.nbytes))

    def _make(
        self,
        t: torch.Tensor,
        storage: torch.UntypedStorage,
        span: Span,
        counter: torch.Tensor,
        region_call: RegionCall,
        site: Site,
    ) -> LifetimeToken | Reason:
        site.begin(region_call.order)
        if site.should_stay():
            self._held.add(storage)
            self._has_held = True
            return Reason.HELD
        source = storage
        owner_stream = self.device.current_stream()
        # Autograd alone would hold the memory until backward. Now the memory may die before the operator has read it.
        self.device.mark_used(t, owner_stream)
        if span.is_gathered or span.is_bits:
            source, span = self._make_dense(t, storage, span)
        parcel = Parcel(self, region_call, site, storage, source, span, counter, owner_stream)
        token = LifetimeToken(parcel)
        parcel.ref = ref = TokenRef(token, _ended)
        ref.parcel = parcel
        self._refs[id(ref)] = ref
        try:
            if not site.needed_before_release and not self._outbound.send(parcel):
                return self._full
        except StoreError:
            self._outbound.take_back(parcel)  # the copy has not begun; retried when the window overflows
        stats = parcel.recorder.stats
        stats.parcels.add(parcel.nbytes)
        if span.is_bits:
            stats.packed.add(span.nbytes)
        if parcel.span.is_gathered:
            parcel.gathered = geometry_of(t, span)
        self._index(ref, parcel.storage_key, storage)
        site.live = ref
        site.is_recomputed = region_call.recomputes
        # Backward may take forwards in any order: a guess is for the tensors of one.
        newest, number = self.newest, region_call.forward.number
        if newest is not None and newest is not site and number == self._forward:
            site.guess(newest)
        self.newest, self._forward = site, number
        self._outbound.join(parcel)
        self._make_room(region_call.limits.window_bytes, spared=1)
        return token

    def _index(self, ref: TokenRef, key: int, storage: torch.UntypedStorage) -> None:
        # A released storage dies long before the parcel, and a new storage may reuse the key: drop the old parcels.
        refs = self._by_storage.get(key, ())
        self._by_storage[key] = [*(known for known in refs if _is_of(known(), storage)), ref]

    @property
    def resident_bytes(self) -> int:
        """On the device, of parcels that have not left. Takes no lock: another thread's backward may lower it."""
        return self._outbound.resident_bytes

    def release_down_to(self, window_bytes: int) -> None:
        """At a release point of a plan: the oldest parcels leave until `window_bytes` hold the rest."""
        with self.lock:
            if self._pending_frees:
                self._drain_frees()
            self._make_room(window_bytes, spared=0)

    def _make_room(self, window_bytes: int, spared: int) -> None:
        self._look_anew()  # parcels passed by looking ahead, while still on the device, may leave now
        for parcel in self._outbound.make_room(window_bytes, spared):
            parcel.recorder.stats.failed.add(parcel.nbytes)
            parcel.tell(EventKind.NOT_MOVABLE)

    def _make_dense(
        self, t: torch.Tensor, storage: torch.UntypedStorage, span: Span
    ) -> tuple[torch.UntypedStorage, Span]:
        """Dense memory instead of `storage`; the whole storage if the device has no room for the dense memory."""
        try:
            return make_dense(t, span), span
        except torch.OutOfMemoryError:
            return storage, Span(0, storage.nbytes(), False, False)

    # -- backward --------------------------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The tensor as saved, valid on the current stream. Repeatable.

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
            if self._pending_frees:
                self._drain_frees()
            storage, point = self._bring(parcel, ticket.limits)
            if storage is parcel.arrival and (graph_task_id() == -1 or keeps_graph()) and not self.keeps_retained:
                self._bound_retained(parcel)
        if storage is parcel.source:
            return ticket.view(storage, parcel.start)
        if storage is parcel.arrival:
            self._inbound.arrive(parcel, point)  # outside of the lock: on the CPU, blocks until the bytes have come
            if "torch._dynamo" in sys.modules and _is_last_of_compiled(ticket.token):
                parcel.drop_arrival()
                # The node keeps the tickets until the node has run. Looking ahead beyond the end of the step meets the
                # parcel again, and must not fetch after the last read.
                parcel.is_needed = not keeps_graph()
        return ticket.view(storage, 0)

    def expect(self, tickets: Sequence[Ticket], limits: Limits, forward: Forward) -> None:
        """Queue the copies in for tickets about to be read on the current stream, in order, and look ahead.

        `forward`: of the running backward.
        """
        if not self.device.matches_capture():
            return  # reading a ticket raises the error
        with self.lock:
            if self._pending_frees:
                self._drain_frees()
            owner_stream = self.device.current_stream()
            tokens = dict.fromkeys(ticket.token for ticket in tickets)
            sites = [token.parcel.site for token in tokens if not token.parcel.is_needed]
            for site in sites:
                site.batch = sites[0]
            batch = [token for token in tokens if self._may_fetch(token.parcel, owner_stream)]
            for token in batch:
                token.parcel.is_ahead = True
            if batch:
                self._fetch_guessed(batch)
            self._fetch_ahead(owner_stream, limits, forward)

    def forward_ended(self, limits: Limits) -> None:
        """If backward is expected to go on with the graph of an earlier forward, fetch that graph's first tensors."""
        with self.lock:
            at = self._timetable.last
            following = None if at is None else at.expected_after(self._timetable.before_last)
            token = None if following is None or following.live is None else following.live()
            if token is None or token.parcel.is_needed or token.parcel.region_call.forward.number == self._forward:
                return
            self._look_anew()
            self._fetch_ahead(self.device.current_stream(), limits, None)

    def reach(self, mark: Site, limits: Limits) -> None:
        """Backward goes on at `mark`: fetch what is expected behind, as far as `limits` allow."""
        with self.lock:
            if self._pending_frees:
                self._drain_frees()
            if self._timetable.last is not mark:
                self._timetable.needed(mark)
            self._look_anew()
            self._fetch_ahead(self.device.current_stream(), limits, None)

    def _bring(self, parcel: Parcel, limits: Limits) -> tuple[torch.UntypedStorage, StreamEvent | None]:
        """Device memory with the present or future bytes of `parcel`; fetches ahead as far as `limits` allow.

        The second result is the owner stream's present point, if recorded by a fetch.
        """
        # Reads outside of backward (grad_fn._saved_...) are no needs and teach nothing.
        is_first_need = not parcel.is_needed and graph_task_id() != -1
        if is_first_need:
            self._note_need(parcel)
        if parcel.source is not None:
            storage, point = parcel.source, None
        elif (reader := self.device.current_stream()) != parcel.owner_stream:
            return self._inbound.fetch_for(parcel, reader), None
        else:
            point = self._fetch_if_away(parcel)
            assert parcel.arrival is not None
            storage = parcel.arrival
        if is_first_need:
            held_bytes = 0 if parcel.site.is_recomputed else parcel.span.nbytes
            point = self._fetch_ahead(parcel.owner_stream, limits, parcel.region_call.forward, held_bytes) or point
        return storage, point

    def _fetch_if_away(self, parcel: Parcel) -> StreamEvent | None:
        if parcel.location is not Location.AWAY:
            return None
        parcel.recorder.stats.misses.add(parcel.nbytes)
        parcel.tell(EventKind.MISSED)
        return self._inbound.fetch([parcel])

    def _note_need(self, parcel: Parcel) -> None:
        """Learn from backward's first need of `parcel`."""
        parcel.is_needed = True
        parcel.region_call.forward.backward_begins()
        stats = parcel.recorder.stats
        if not self._timetable.needed(parcel.site):
            self._look_anew()
        parcel.site.needed_before_release = parcel.source is not None
        if parcel.source is not None:
            stats.forwarded.add(parcel.nbytes)
            parcel.tell(EventKind.FORWARDED)
            self._outbound.leave(parcel)
        else:
            self._note_freed(parcel)
        if parcel.is_ahead:
            parcel.is_ahead = False
            self._ahead_bytes -= parcel.nbytes
        elif parcel.source is None:
            self._look_anew()

    def _note_freed(self, parcel: Parcel) -> None:
        """Learn whether the release of `parcel` freed memory."""
        was_freed = parcel.source_ref() is None
        if not was_freed and self._has_parts_to_release(parcel):
            return  # further parcels of the storage have not been released
        parcel.site.learn_freed(was_freed)
        if not was_freed:
            parcel.recorder.stats.freed_nothing.add(parcel.nbytes)
            parcel.tell(EventKind.NO_MEMORY_FREED)

    def _has_parts_to_release(self, parcel: Parcel) -> bool:
        storage = parcel.source_ref()
        tokens = [ref() for ref in self._by_storage.get(parcel.storage_key, ())]
        return any(token is not None and token.parcel.source is storage for token in tokens)

    def _fetch_ahead(
        self, owner_stream: Stream, limits: Limits, forward: Forward | None, held_bytes: int = 0
    ) -> StreamEvent | None:
        """Fetch the parcels expected next, as far as the window reaches.

        Parcels of the running backward that have not left are a part of the window: backward needs them first, as a
        rule. Those of a later backward stay if the window reaches them: another forward would release them, and they
        would have to come back.

        Args:
            forward: backward's; None before a backward.
            held_bytes: bytes of the present node.

        Returns:
            The owner stream's present point after a fetch.
        """
        room = limits.prefetch_bytes - held_bytes - self._ahead_bytes - self._outbound.resident_bytes_of(forward)
        # A quarter of the window at least: several small parcels share a wait, and most of the window stays filled.
        is_full = self._is_through or room <= 0 or room < (room + self._ahead_bytes) // 4
        if is_full and forward is not None:
            return None
        batch: list[LifetimeToken] = []
        is_whole = True
        for before, site, token in self._to_come():
            parcel = token.parcel
            is_later = parcel.region_call.forward is not forward
            if self._may_fetch(parcel, owner_stream):
                room -= parcel.nbytes
                if room < 0 and not (before.is_batched_with(site) and _is_present(before)):
                    break
                parcel.is_ahead = True
                batch.append(token)
            elif parcel.may_be_fetched:
                is_whole = False  # another stream's backward has to look at the site again
            elif is_later and parcel.location is Location.LEAVING and parcel.engine is self:
                if room <= 0:
                    break
                room -= parcel.nbytes
                self._outbound.leave(parcel)
                parcel.is_ahead = True
                self._ahead_bytes += parcel.nbytes
            if is_whole:
                assert site.live is not None
                self._farthest = _Farthest(before, site, site.live)
        self._is_through = self._is_through and is_whole
        return self._fetch_guessed(batch) if batch else None

    def _to_come(self) -> Iterator[tuple[Site, Site, LifetimeToken]]:
        """Sites expected to be needed and not looked at yet, in order: the site before, the site, the token."""
        before, at = self._look_from()
        dead = 0
        for _ in range(512):  # bounds the time of a look
            following = None if at is None else at.expected_after(before)
            if at is None or following is None or following.is_to_come:
                break
            token = None if following.live is None else following.live()
            if token is None and following.may_leave_again:
                break
            if token is None or token.parcel.is_needed:
                dead += 1
            else:
                yield at, following, token
            # Stop after a round. A step without any need so far passes the site needed last. Behind backward's end the
            # order continues with the next step, without living parcels: 64 dead sites end the look.
            if following is self._timetable.last or dead == 64:
                break
            before, at = at, following
        else:
            return
        self._is_through = True

    def _look_anew(self) -> None:
        """The next look ahead begins at the present site: the expectation has changed."""
        self._farthest = None
        self._is_through = False

    def _may_fetch(self, parcel: Parcel, owner_stream: Stream) -> bool:
        # Sites outlive captures: the parcel last made at a site may belong to another engine.
        return parcel.may_be_fetched and parcel.owner_stream == owner_stream and parcel.engine is self

    def _fetch_guessed(self, tokens: list[LifetimeToken]) -> StreamEvent | None:
        """Fetch parcels that are not needed yet. A failure is ignored: a later need raises the error."""
        parcels = [token.parcel for token in tokens]
        try:
            return self._inbound.fetch(parcels)
        except (StoreError, torch.OutOfMemoryError):
            self._look_anew()
            return None
        finally:
            for parcel in parcels:
                parcel.is_ahead = parcel.location is not Location.AWAY
                if parcel.is_ahead:
                    self._ahead_bytes += parcel.nbytes
                    parcel.tell(EventKind.FETCHED)

    def _look_from(self) -> tuple[Site | None, Site | None]:
        """Start of the next look ahead: the end of the last look, unless backward has passed the site."""
        table, farthest = self._timetable, self._farthest
        token = None if farthest is None else farthest.token()
        if farthest is None or token is None or token.parcel.is_needed:
            return table.before_last, table.last
        return farthest.before, farthest.site

    def _bound_retained(self, parcel: Parcel) -> None:
        """Drop the oldest arrivals of retained graphs beyond the prefetch window.

        Otherwise a retained graph would collect all parcels on the device again. Memory is dropped in the order of
        the owner stream, and running nodes hold the memory.
        """
        key = id(parcel.ref)
        if key not in self._retained:
            self._retained[key] = parcel.nbytes
            self._retained_bytes += parcel.nbytes
        limit = parcel.region_call.limits.prefetch_bytes
        for _ in range(len(self._retained) - 1):
            if self._retained_bytes <= limit:
                return
            key = next(iter(self._retained))
            nbytes = self._retained.pop(key)
            ref = self._refs[key]
            token = ref()
            if token is None or token.parcel is parcel or token.parcel.location is not Location.BACK:
                self._retained[key] = nbytes  # a dead parcel is removed by the pending free
                continue
            self._retained_bytes -= nbytes
            token.parcel.drop_arrival()
            token.parcel.site = site = token.parcel.site.again
            site.live = ref
            self._look_anew()

    # -- death -----------------------------------------------------------------------------------------------------

    def free(self, parcel: Parcel) -> None:
        """Free the contents of a dead parcel, in a safe order. The next call updates the engine's books.

        Any thread, possibly inside a call of the engine: takes no lock.
        """
        assert parcel.ref is not None
        self._outbound.abandon(parcel)
        self._inbound.abandon(parcel)
        if parcel.block is not None:
            self.store.give_back(parcel.block)
        queued_bytes = parcel.nbytes if parcel.location is Location.LEAVING else 0
        ahead_bytes = parcel.nbytes if parcel.is_ahead else 0
        forward = parcel.region_call.forward.number
        self._pending_frees.append((parcel.storage_key, queued_bytes, forward, ahead_bytes, parcel.ref))

    def _drain_frees(self) -> None:
        while self._pending_frees:
            storage_key, queued_bytes, forward, ahead_bytes, ended = self._pending_frees[0]
            if queued_bytes:
                self._outbound.died(queued_bytes, forward)
            self._ahead_bytes -= ahead_bytes
            self._retained_bytes -= self._retained.pop(id(ended), 0)
            refs = self._by_storage.get(storage_key)
            if refs is not None:
                if len(refs) > 1:
                    refs = self._by_storage[storage_key] = [ref for ref in refs if ref() is not None]
                if not refs or refs[0]() is None:
                    del self._by_storage[storage_key]
            self._refs.pop(id(ended), None)
            self._pending_frees.popleft()
        if not self._refs:
            self._close_books()

    def _close_books(self) -> None:
        """No parcel is left, and so nothing to count: an interrupt may have left an update in the middle."""
        self._outbound.close_books()
        self._ahead_bytes = self._retained_bytes = 0
        self._retained.clear()
        self._by_storage.clear()

    # -- statistics ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[Parcel]:
        """Parcels on the device that wait to leave."""
        with self.lock:
            if self._pending_frees:
                self._drain_frees()
            return self._outbound.waiting()

    def store_stats(self) -> StoreStats:
        with self.lock:
            return self.store.stats()

    def close(self) -> None:
        """Free the store. Parcels that still wait in the store become unreadable."""
        self.store.close()


def _ended(ref: "weakref.ref[LifetimeToken]") -> None:
    # The last ticket of a parcel is gone. (A function: bound methods would each live as long as the parcel.)
    assert isinstance(ref, TokenRef)
    if not hasattr(ref, "parcel"):
        return  # an interrupt came between the reference and its parcel, which holds nothing yet
    parcel, ref.parcel = ref.parcel, None
    if parcel is not None and not sys.is_finalizing():
        parcel.engine.free(parcel)


def _is_of(token: LifetimeToken | None, storage: torch.UntypedStorage) -> bool:
    return token is not None and token.parcel.source_ref() is storage


def _has_bytes_of(parcel: Parcel, t: torch.Tensor, span: Span) -> bool:
    held = parcel.span
    if held.is_gathered:
        return geometry_of(t, held) == parcel.gathered
    return (
        not span.is_gathered
        and held.start <= span.start
        and span.start + span.nbytes <= held.start + held.nbytes
        and (not held.is_bits or span.is_bits)  # bits represent booleans only
    )


def _is_present(site: Site) -> bool:
    """Whether the site's parcel is on the device or being fetched, and not needed yet.

    The site may be the last of the step before: the recompute batch has not begun in that case.
    """
    token = None if site.live is None else site.live()
    if token is None or token.parcel.is_needed:
        return False
    return token.parcel.is_ahead or token.parcel.location is Location.LEAVING


def _is_last_of_compiled(token: LifetimeToken) -> bool:
    """Whether a compiled node reads the parcel's only ticket.

    Compiled backward may overwrite saved tensors in place (donated buffers): sharing would corrupt the parcel.
    """
    is_only_ticket = sys.getrefcount(token) <= 3  # the ticket's, the parameter above and getrefcount's argument
    return is_only_ticket and current_node_name() == "CompiledFunctionBackward"
