"""Geometry of saves: any view of any storage comes back as it was, and no more bytes travel than have to."""

import pytest
import torch
from cases import SaveAll
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import Rig, bits

import ebbtide
from ebbtide.engine.parcel import Span, check_unmodified, condense, geometry_of, keep, kept_tensor, odometer, span_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def storage_of(nbytes):
    """Every byte differs from its neighbours."""
    return torch.arange(nbytes, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8).untyped_storage()


@st.composite
def views(draw):
    """A strided view of a storage: gaps, overlaps, expanded dimensions, any offset, conj and neg bits."""
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.integers(0, 4))
    size = draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    stride = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 64, 200]), min_size=dims, max_size=dims))
    offset = draw(st.integers(0, 700))
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    spare = draw(st.sampled_from([0, 1, 500, 5000]))
    storage = storage_of((offset + reach + spare) * dtype.itemsize)
    t = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if dtype.is_complex and draw(st.booleans()):
        t = t.conj()
    if dtype is not torch.uint8 and draw(st.booleans()):
        t = torch._neg_view(t)
    return t


def raw(t):
    """Bytes of the elements as the memory has them."""
    t = t.conj() if t.is_conj() else t
    t = torch._neg_view(t) if t.is_neg() else t
    return bits(t)


def check_same_view(got, wanted):
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
    assert raw(got) == raw(wanted)


@settings(max_examples=300, deadline=None)
@given(views())
def test_any_view_is_rebuilt_from_the_bytes_of_its_span(t):
    span = span_of(t, t.untyped_storage().nbytes())
    source = condense(t, span)
    travelled = torch.UntypedStorage(span.nbytes)
    travelled.copy_(
        torch.empty(0, dtype=torch.uint8).set_(source, span.start, (span.nbytes,), (1,)).clone().untyped_storage()
    )
    geometry = geometry_of(t, span)
    check_same_view(geometry.view(travelled, 0), t)
    check_same_view(geometry.view(source, span.start), t)  # forwarded: used from where it was


@settings(max_examples=300, deadline=None)
@given(views())
def test_spans_are_small_and_aligned(t):
    storage_nbytes = t.untyped_storage().nbytes()
    span = span_of(t, storage_nbytes)
    dense_nbytes = t.numel() * t.element_size()
    assert span.nbytes > 0
    if span.is_gathered:
        assert span == Span(0, dense_nbytes, True, False)
    else:
        assert span.start % 512 == 0
        assert span.start + span.nbytes <= storage_nbytes
        # The view fills its range, or the range most of the storage; so no more than so much travels in vain.
        assert span.nbytes <= max(2 * 8 * dense_nbytes + 512, 512)


@settings(max_examples=60, deadline=None)
@given(st.lists(views(), min_size=1, max_size=4))
@example([torch.zeros(16, 512)[:, :1].expand(-1, 4)])
@example([torch.zeros(64, 128, dtype=torch.complex64).conj()[:, 3]])
def test_any_views_round_trip_through_the_engine(tensors):
    rig = Rig()
    wanted = [t.clone(memory_format=torch.preserve_format) for t in tensors]
    seen = []
    x = torch.ones(8, requires_grad=True)
    with rig.context:
        loss = SaveAll.apply(x, seen, *tensors).exp().sin().sum()
    loss.backward()
    for got, t, copy in zip(seen, tensors, wanted, strict=True):
        check_same_view(got, t)
        assert bits(got) == bits(copy)
    assert rig.stats.inbound.count > 0
    del got, seen
    rig.check_at_rest()


def test_chunks_share_the_range_of_the_whole():
    qkv = torch.zeros(6, 24)
    for chunk in qkv.chunk(3, -1):
        assert span_of(chunk, qkv.nbytes) == Span(0, qkv.nbytes, False, False)


def test_a_small_part_of_a_large_storage_travels_alone():
    large = torch.zeros(10_000)
    assert span_of(large[1000:1100], large.nbytes) == Span(3584, 4400 - 3584, False, False)
    assert span_of(large[::100], large.nbytes) == Span(0, 400, True, False)
    assert span_of(large[:6000], large.nbytes) == Span(0, 40_000, False, False)


def test_an_odometer_counts_and_holds_nothing():
    t = torch.zeros(1000)
    counter = odometer(t)
    assert counter.untyped_storage().nbytes() == 0
    version = t._version
    check_unmodified(counter, version, "it")
    t[3:].add_(1.0)
    with pytest.raises(ebbtide.ModifiedError, match="it was saved at version 0 and is at version 1 now"):
        check_unmodified(counter, version, "it")


def test_a_kept_tensor_is_an_alias_that_is_checked():
    t = torch.zeros(4, requires_grad=True) * 2.0
    kept = keep(t, "layers.3")
    alias = kept_tensor(kept)
    assert alias is not t
    assert alias.data_ptr() == t.data_ptr()
    assert alias.grad_fn is None
    t.add_(1.0)
    with pytest.raises(ebbtide.ModifiedError, match=r"torch.float32 \(4,\) of layers\.3"):
        kept_tensor(kept)
