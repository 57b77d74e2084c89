"""Parcel, ticket, and the geometry of a view: state and lifetime. Copies and waits are the lanes' (lane.py).

Note [The graph owns]
~~~~~~~~~~~~~~~~~~~~~
1. pack returns a ticket and the autograd graph is the only one to hold it. There is no table of live tensors.
2. All tickets of a parcel hold one claim to it; the parcel holds its block of the store, and its device memory while
   it has any.
3. So what ends a parcel is the end of its last ticket: its node ran, the graph was dropped, an exception unwound.
   One path cleans up after all of them: the callback of the claim's weak reference. (Not `__del__`: while that runs,
   weak references still answer, and another thread could bring the dying back.)
4. Every reference from our side (queue of a lane, index by storage, site) is that weak one. To use a parcel found
   through it, hold the claim meanwhile.

Note [Version alias]
~~~~~~~~~~~~~~~
Stock autograd compares a saved tensor's version with the one it had when saved, and raises. With hooks installed it
does not, so we do. An version_alias is a tensor that shares the version counter of a save but none of its memory:
a detached alias whose data was replaced by an empty tensor. It sees every in-place change for as long as the ticket
lives, also after the device memory is gone, so the error does not depend on how far a copy had come.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn import Parameter

from ebbtide._engine import pack_bits
from ebbtide._engine.timetable import Site
from ebbtide._errors import ModifiedError
from ebbtide._utils.storage import as_bytes
from ebbtide._utils.torch_private import neg_view, reads_random_slopes, sizes_of, storage_offset
from ebbtide.types import Block, Stream, StreamEvent

if TYPE_CHECKING:
    from ebbtide._engine.context import Limits, RegionCall
    from ebbtide._engine.engine import Engine

_NOTHING = torch.empty(0)


def version_alias(t: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of `t` and holds none of its memory."""
    alias = t.detach()
    alias.data = _NOTHING
    return alias


def modified_as_torch_says(
    dtype: torch.dtype, device: torch.device, sizes: Sequence[object], version: int, expected: int
) -> str:
    """The first line of a ModifiedError: the words of stock autograd, for code and tests that match them.

    Stock autograd also names the node that made the tensor. Tickets hold no node.
    """
    name = torch.empty(0, dtype=dtype, device=device).type()
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name} {list(sizes)}] is at version {version}; expected version {expected} instead.\n"
    )


def check_unmodified(
    counter: torch.Tensor,
    version: int,
    what: str,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[object],
) -> None:
    """Raise ModifiedError, naming `what`, unless `counter` still reads `version`."""
    now = counter._version
    if now != version:
        raise ModifiedError(
            modified_as_torch_says(dtype, device, sizes, now, version)
            + f"A tensor saved for backward was modified in place: {what} was saved at version {version} and is at "
            f"version {now} now. Do not change it between forward and backward, or clone it before the change"
        )


def check_written(where: str) -> None:
    """Raise ModifiedError if the node that runs reads memory that its operator wrote after autograd had saved it.

    The copy is of the bytes before that write, and no version counter says so. Of torch's own operators rrelu is one,
    where its slopes are random (see `reads_random_slopes`).
    """
    if reads_random_slopes():
        raise ModifiedError(
            f"rrelu in {where or '<root>'} writes its random slopes when autograd has saved their memory already: they "
            "cannot move or be computed again. Have it stay where it is, by exclude= or the recipe 'keep', or write "
            "leaky_relu"
        )


class Geometry(NamedTuple):
    """A view of a parcel's bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements, from the first byte of the parcel."""
    is_conj: bool
    is_neg: bool
    is_gathered: bool
    """The parcel holds the elements densely, in order of index; the view has gaps (see `span_of`)."""
    is_bits: bool
    """The parcel holds one bit for each byte (see Note [Masks as bits])."""

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The tensor of this geometry over the bytes of a parcel, which begin at byte `start` of `storage`."""
        if self.is_gathered:
            t = self._scatter(self._dense(storage).view(self.size))
        elif self.is_bits:
            t = self._expand(storage)
        else:
            t = torch.empty(0, dtype=self.dtype, device=storage.device)
            t.set_(storage, start // self.dtype.itemsize + self.offset, self.size, self.stride)
        if self.is_conj:
            t = t.conj()
        return neg_view(t) if self.is_neg else t

    def _dense(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The elements in order of index, of a parcel that was gathered."""
        n = self.size.numel()
        if self.is_bits:
            return pack_bits.unpack(as_bytes(storage, 0, pack_bits.packed_nbytes(n)))[:n]
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, (n,), (1,))

    def _expand(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The view in memory of its own, no more than it spans, aligned as the original was."""
        first = self.offset // _ALIGN_BYTES * _ALIGN_BYTES  # a boolean is a byte
        lead = self.offset - first
        packed_nbytes = pack_bits.packed_nbytes(lead + _reach(self.size, self.stride))
        booleans = pack_bits.unpack(as_bytes(storage, first // 8, packed_nbytes))
        return booleans.as_strided(self.size, self.stride, lead)

    def _scatter(self, dense: torch.Tensor) -> torch.Tensor:
        """The view with gaps that `dense` was gathered from. What expand() repeats is written once: copy_ insists."""
        lead = self.offset % (_ALIGN_BYTES // self.dtype.itemsize)  # aligned as the original was
        memory = torch.empty(lead + _reach(self.size, self.stride), dtype=self.dtype, device=dense.device)
        t = memory.as_strided(self.size, self.stride, lead)
        once = [1 if step == 0 else n for n, step in zip(self.size, self.stride, strict=True)]
        t.as_strided(once, self.stride, lead).copy_(dense[tuple(map(slice, once))])
        return t


Kept: TypeAlias = tuple[torch.Tensor, int, str]
"""A save that stays: an alias, its version when saved, and the region. A bare tuple, because most saves of a step are
kept ones and a class costs three times as much."""


def keep(t: torch.Tensor, region: str) -> Kept:
    # An alias, for an output itself would close a reference cycle. A leaf that collects a gradient is no output, nor is
    # a frozen parameter, and both have to be themselves: their owner may swap their data for other memory until
    # backward, as ZeRO does, and what it gives away has to be free.
    return t if t.is_leaf and (t.requires_grad or isinstance(t, Parameter)) else t.detach(), t._version, region


def kept_tensor(kept: Kept) -> torch.Tensor:
    """The alias, unless it was modified: ModifiedError."""
    alias, version, region = kept
    if alias._version != version:
        sizes = tuple(sizes_of(alias))
        what = f"{alias.dtype} {sizes} of {region or '<root>'}"
        check_unmodified(alias, version, what, alias.dtype, alias.device, sizes)
    return alias


class Ticket:
    """What pack returns for a save that travels: its geometry and a strong reference to its parcel.

    `limits`: those of the region it was saved in. What several regions save has one parcel, of the first of them.
    """

    __slots__ = ("claim", "counter", "geometry", "limits", "parcel", "version")

    def __init__(
        self, claim: "LifetimeToken", geometry: Geometry, counter: torch.Tensor, version: int, limits: "Limits"
    ) -> None:
        self.claim = claim
        self.limits = limits
        self.parcel = claim.parcel
        self.geometry = geometry
        self.counter = counter
        self.version = version

    def check(self) -> None:
        if self.counter._version != self.version:
            g = self.geometry
            what = f"{g.dtype} {tuple(g.size)} saved at {self.parcel.site}"
            device = self.parcel.engine.device.torch_device
            check_unmodified(self.counter, self.version, what, g.dtype, device, g.size)

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The save over the bytes of its parcel, which begin at byte `start` of `storage`.

        It counts its versions with the save: a node that changes in backward what it saved changes it for all that read
        this memory, and they are to raise, as they do without hooks.
        """
        t = self.geometry.view(storage, start)
        if self.geometry.is_gathered or self.geometry.is_bits or t.is_inference():
            return t  # in memory of its own, or where nothing counts versions
        counted = self.counter.detach()
        counted.data = t
        return counted


class LifetimeToken:
    """What the tickets of a parcel hold in common: its end is the parcel's."""

    __slots__ = ("__weakref__", "parcel")

    def __init__(self, parcel: "Parcel") -> None:
        self.parcel = parcel


class TokenRef(weakref.ref[LifetimeToken]):
    """The weak reference to a claim. Its callback gets it, and through it the parcel to bury."""

    __slots__ = ("parcel",)
    parcel: "Parcel | None"


class Parcel:
    """The bytes of one device storage (or one range of it) that travel together.

    Attributes:
        span: the bytes of the storage that it stands for, and how they travel.
        start, nbytes: what travels, as a range of `source`, in bytes.
        counter, version: version_alias of the first save, and what it read then: a later version is another parcel.
        home: the stream compute ran on at the save. Device memory of the parcel is freed in its order.
        source: the device storage as saved, or the memory it was gathered or packed into, until released.
        source_ref: the storage as saved. It outlives `source`; alive after the release means somebody else holds the
            memory. What was gathered or packed out of it does not hold it, not even until then.
        block, landed: room in the store, and the event after which it holds the bytes. None: not sent.
        arrival, arrived: device memory with the bytes again, and the event after which it does.
        is_awaited: compute already waits for `arrived`.
        ref: the weak reference to the claim, by which lanes, sites and the index by storage know the parcel.
        is_needed: backward asked for it since it last came to the device.
        is_resident: counted among what waits on the outbound lane.
        is_ahead: counted among what was fetched before anybody asked.
        is_retained: listed among what a graph that is kept has brought back.
        gathered: the view that the elements were gathered from; None for bytes as the storage has them.
        extra_version_checks: further counters of the same bytes, with what they read when the parcel was made: a later
            save shares it only if all of them still do.
    """

    __slots__ = (
        "arrival",
        "arrived",
        "block",
        "counter",
        "engine",
        "extra_version_checks",
        "gathered",
        "home",
        "is_ahead",
        "is_awaited",
        "is_needed",
        "is_resident",
        "is_retained",
        "landed",
        "ledger",
        "nbytes",
        "ref",
        "site",
        "source",
        "source_ref",
        "span",
        "start",
        "storage_key",
        "version",
        "visit",
    )

    def __init__(
        self,
        engine: "Engine",
        visit: "RegionCall",
        site: Site,
        storage: torch.UntypedStorage,
        source: torch.UntypedStorage,
        span: "Span",
        counter: torch.Tensor,
        home: Stream,
    ) -> None:
        self.engine = engine
        self.visit = visit
        self.ledger = visit.scope.ledger
        self.site = site
        self.span = span
        self.start = span.start if source is storage else 0
        self.nbytes = span.transfer_nbytes if span.is_bits else span.nbytes
        self.counter = counter
        self.version = counter._version
        self.home = home
        self.source: torch.UntypedStorage | None = source
        self.source_ref = weakref.ref(storage)
        self.storage_key = storage._cdata
        self.block: Block | None = None
        self.landed: StreamEvent | None = None
        self.arrival: torch.UntypedStorage | None = None
        self.arrived: StreamEvent | None = None
        self.is_awaited = False
        self.is_needed = False
        self.is_resident = False
        self.is_ahead = False
        self.is_retained = False
        self.ref: TokenRef | None = None
        self.gathered: Geometry | None = None
        self.extra_version_checks: tuple[tuple[torch.Tensor, int], ...] = ()

    @property
    def may_be_fetched(self) -> bool:
        """Away, and nobody has asked for it or is about to fetch it."""
        return self.source is None and self.arrival is None and not self.is_needed and not self.is_ahead

    def forget_arrival(self) -> None:
        """Drop our reference to device memory that home has waited for; a later need fetches again."""
        self.arrival = None
        self.arrived = None
        self.is_awaited = False
        self.is_needed = False


class Span(NamedTuple):
    """The bytes of a storage that a save needs, and how they travel: as they are, gathered, as bits, or both."""

    start: int
    nbytes: int
    """Before they are packed into bits."""
    is_gathered: bool
    is_bits: bool

    @property
    def transfer_nbytes(self) -> int:
        return pack_bits.packed_nbytes(self.nbytes) if self.is_bits else self.nbytes


# Ranges start at a multiple of it, so that restored memory is aligned as the original was: kernels choose their
# vector width, and with it the order of a reduction, by alignment.
_ALIGN_BYTES = 512
# A view that uses less than one part in so many of its range travels gathered; chunks of one projection (q, k, v)
# use more and share the parcel of the whole.
_SPARSE = 8
# A save that uses this share of its storage takes all of it along, for the other views to share.
_MOST = 0.5


def span_of(t: torch.Tensor, storage_nbytes: int, sparse: float = _SPARSE, most: float = _MOST) -> Span:
    """What has to travel for `t`: all of its storage, the range its view spans, or its elements gathered.

    Of booleans as bits, whichever it is.

    Args:
        sparse: elements of a view are gathered if its range has more than this many times their bytes.
        most: the whole storage travels if the range is at least this share of the storage.
    """
    item = t.element_size()
    is_bits = item == 1 and t.dtype is torch.bool
    dense_nbytes = t.numel() * item
    range_nbytes = dense_nbytes if t.is_contiguous() else _reach(t.shape, t.stride()) * item
    if dense_nbytes * sparse < range_nbytes:
        return Span(0, dense_nbytes, True, is_bits)
    if range_nbytes >= most * storage_nbytes:
        return _whole(storage_nbytes, is_bits)
    first = storage_offset(t) * item
    start = first // _ALIGN_BYTES * _ALIGN_BYTES
    return Span(start, first + range_nbytes - start, False, is_bits)


def span_of_part(t: torch.Tensor, span: Span, storage_nbytes: int) -> Span:
    """`span`, or less if other version counters watch the rest of the storage.

    unsafe_chunk() and unsafe_split() return parts that are no views, each with a version counter of its own. A part
    changed in place shares no parcel with the rest, so the whole storage would travel once for each part.
    """
    owner = t if t._base is None else t._base
    if t._version == 0 or span.is_gathered or owner.numel() * owner.element_size() >= storage_nbytes:
        return span
    return span_of(t, storage_nbytes, sparse=1.0, most=1.0)


@functools.lru_cache
def _whole(storage_nbytes: int, is_bits: bool) -> Span:
    """One object for all parcels of a size: they live long, and each one would be the garbage collector's to visit."""
    return Span(0, storage_nbytes, False, is_bits)


def make_dense(t: torch.Tensor, span: Span) -> torch.UntypedStorage:
    """What travels of `t`, gathered or packed into memory of its own, by and for the current stream."""
    storage = gather(t) if span.is_gathered else t.untyped_storage()
    return pack_bits.pack(as_bytes(storage, span.start, span.nbytes)) if span.is_bits else storage


def gather(t: torch.Tensor) -> torch.UntypedStorage:
    """The elements of `t` densely, in order of index, as the memory has them: without what conj and neg bits mean."""
    raw = t.conj() if t.is_conj() else t
    raw = neg_view(raw) if raw.is_neg() else raw
    return raw.contiguous().untyped_storage()


def geometry_of(t: torch.Tensor, span: Span) -> Geometry:
    """The view `t` has of a parcel that stands for `span`."""
    offset = storage_offset(t) - span.start // t.element_size()
    return Geometry(t.dtype, t.shape, t.stride(), offset, t.is_conj(), t.is_neg(), span.is_gathered, span.is_bits)


def _reach(size: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a view, inclusive."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
