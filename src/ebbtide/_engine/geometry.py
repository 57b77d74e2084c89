"""Geometry of saved tensors: the bytes that travel, and the view on the bytes. Pure: knows no lanes and no parcels."""

import functools
from typing import NamedTuple

import torch

from ebbtide._engine import pack_bits
from ebbtide._utils.storage import as_bytes
from ebbtide._utils.torch_private import neg_view, storage_offset

# Ranges start at multiples of 512 bytes, the allocator's alignment. Restored memory has to be aligned as the original:
# kernels choose a vector width, and hence the order of a reduction, by alignment.
_ALIGN_BYTES = 512


class Geometry(NamedTuple):
    """A view of a parcel's bytes.

    Attributes:
        offset: in elements, from the first byte of the parcel.
        is_gathered: the parcel holds the elements densely, in order of index; the view has gaps (see `span_of`).
        is_bits: the parcel holds a bit for each byte (see Note [Masks as bits]).
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    is_gathered: bool
    is_bits: bool

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The tensor over the bytes of a parcel, from byte `start` of `storage` on."""
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
        n = self.size.numel()
        if self.is_bits:
            return pack_bits.unpack(as_bytes(storage, 0, pack_bits.packed_nbytes(n)))[:n]
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, 0, (n,), (1,))

    def _expand(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The view of booleans in newly allocated memory, no larger than the view spans, aligned as the original."""
        first = self.offset // _ALIGN_BYTES * _ALIGN_BYTES  # a boolean is a byte
        lead = self.offset - first
        packed_nbytes = pack_bits.packed_nbytes(lead + _reach(self.size, self.stride))
        booleans = pack_bits.unpack(as_bytes(storage, first // 8, packed_nbytes))
        return booleans.as_strided(self.size, self.stride, lead)

    def _scatter(self, dense: torch.Tensor) -> torch.Tensor:
        lead = self.offset % (_ALIGN_BYTES // self.dtype.itemsize)  # aligned as the original
        memory = torch.empty(lead + _reach(self.size, self.stride), dtype=self.dtype, device=dense.device)
        t = memory.as_strided(self.size, self.stride, lead)
        # copy_ refuses to write an element twice: along expanded dimensions only the first element is written.
        once = [1 if step == 0 else n for n, step in zip(self.size, self.stride, strict=True)]
        t.as_strided(once, self.stride, lead).copy_(dense[tuple(map(slice, once))])
        return t


class Span(NamedTuple):
    """Bytes of a storage that a saved tensor needs, and the form of travel: unchanged, gathered, bits, gathered bits.

    `nbytes` counts before packing into bits.
    """

    start: int
    nbytes: int
    is_gathered: bool
    is_bits: bool

    @property
    def transfer_nbytes(self) -> int:
        return pack_bits.packed_nbytes(self.nbytes) if self.is_bits else self.nbytes


# Defaults. Chunks of a projection (q, k, v) use more than an eighth of a range and share the parcel of the whole.
# A saved tensor with half of a storage takes the whole storage along, for further views to share.
def span_of(t: torch.Tensor, storage_nbytes: int, sparse: float = 8, most: float = 0.5) -> Span:
    """Bytes that have to travel for `t`: the whole storage, the range of the view, or the gathered elements.

    Booleans travel as bits in all three cases.

    Args:
        t: strided tensor.
        storage_nbytes: bytes of the tensor's storage.
        sparse: a view is gathered if the view's range has more than `sparse` times the bytes of the elements.
        most: the whole storage travels if the view's range has at least the share `most` of the storage.
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
    """`span`, or less if further version counters guard the rest of the storage.

    unsafe_chunk() and unsafe_split() return parts that are no views, with a version counter each. A part changed
    in place shares no parcel with the rest: the whole storage would travel once for each part.
    """
    owner = t if t._base is None else t._base
    if t._version == 0 or span.is_gathered or owner.numel() * owner.element_size() >= storage_nbytes:
        return span
    return span_of(t, storage_nbytes, sparse=1.0, most=1.0)


@functools.lru_cache
def _whole(storage_nbytes: int, is_bits: bool) -> Span:
    # A single object for all parcels of a size: spans live long, and the garbage collector visits every object.
    return Span(0, storage_nbytes, False, is_bits)


def make_dense(t: torch.Tensor, span: Span) -> torch.UntypedStorage:
    """The bytes of `t` that travel, gathered or packed into new memory of the current stream."""
    storage = gather(t) if span.is_gathered else t.untyped_storage()
    return pack_bits.pack(as_bytes(storage, span.start, span.nbytes)) if span.is_bits else storage


def gather(t: torch.Tensor) -> torch.UntypedStorage:
    """The elements of `t` densely, in order of index, as stored: conj and neg bits are not applied."""
    raw = t.conj() if t.is_conj() else t
    raw = neg_view(raw) if raw.is_neg() else raw
    return raw.contiguous().untyped_storage()


def geometry_of(t: torch.Tensor, span: Span) -> Geometry:
    """The view of `t` on a parcel with `span`."""
    offset = storage_offset(t) - span.start // t.element_size()
    return Geometry(t.dtype, t.shape, t.stride(), offset, t.is_conj(), t.is_neg(), span.is_gathered, span.is_bits)


def _reach(size: torch.Size, stride: tuple[int, ...]) -> int:
    """Number of elements from the first to the last of a view, inclusive."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
