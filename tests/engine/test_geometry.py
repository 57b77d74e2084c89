"""Geometry: any view of any storage comes back unchanged, and no more bytes travel than necessary."""

import pytest
import torch
from cases import SaveAll
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import Rig, bits

import ebbtide
from ebbtide._engine.geometry import Span, geometry_of, make_dense, span_of
from ebbtide._engine.parcel import check_unmodified, keep, kept_tensor, version_alias

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
    """Bytes of the elements as stored."""
    t = t.conj() if t.is_conj() else t
    t = torch._neg_view(t) if t.is_neg() else t
    return bits(t)


def check_same_view(got, wanted):
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
    assert raw(got) == raw(wanted)


@settings(max_examples=300)
@given(views())
def test_any_view_is_rebuilt_from_the_bytes_of_its_span(t):
    span = span_of(t, t.untyped_storage().nbytes())
    source = make_dense(t, span)
    travelled = torch.UntypedStorage(span.nbytes)
    travelled.copy_(
        torch.empty(0, dtype=torch.uint8).set_(source, span.start, (span.nbytes,), (1,)).clone().untyped_storage()
    )
    geometry = geometry_of(t, span)
    check_same_view(geometry.view(travelled, 0), t)
    check_same_view(geometry.view(source, span.start), t)  # forwarded: used from the device


@settings(max_examples=300)
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
        # The view fills the range, or the range most of the storage: bounds the bytes that travel for nothing.
        assert span.nbytes <= max(2 * 8 * dense_nbytes + 512, 512)


@settings(max_examples=60)
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


def _pair(dtype):
    return torch.complex(torch.randn(16, 24, dtype=dtype), torch.randn(16, 24, dtype=dtype))


CHEAP_VIEWS = {
    "chunks": lambda x: x.chunk(3, -1),
    "splits": lambda x: x.split([4, 12], 0),
    "transposed": lambda x: [x.t()],
    "contiguous again": lambda x: [x.t().t().contiguous()],
    "reshaped": lambda x: [x.view(-1), x.view(4, 4, 24), x.reshape(24, 16)],
    "unsqueezed": lambda x: [x.unsqueeze(1), x[None]],
    "expanded": lambda x: [x.unsqueeze(0).expand(5, 16, 24), x[:1].expand(9, 24)],
    "rows": lambda x: [x[3], x[5:7], x.select(0, 2)],
    "unfolded": lambda x: [x.unfold(0, 4, 2)],
    "detached": lambda x: [x.detach()],
    "of another dtype": lambda x: [x.view(torch.int16), x.view(torch.uint8)[:, 5:]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CHEAP_VIEWS)
def test_views_of_what_travels_add_no_bytes(kind, dtype):
    x = torch.randn(16, 24).to(dtype)
    check_shared(x, list(CHEAP_VIEWS[kind](x)))


def test_parts_of_complex_numbers_add_no_bytes_either():
    z = _pair(torch.float32)
    check_shared(z, [z.real, z.imag, z.conj(), z.conj().imag, torch.view_as_real(z), z.mH, z.view(torch.float32)])
    parts = [z.imag, z, z.real]
    check_shared(parts[0], parts[1:], nbytes=z.nbytes)  # each takes the whole storage along


def check_shared(first, others, nbytes=None):
    rig, seen, x = Rig(), [], torch.ones(8, requires_grad=True)
    with rig.context:
        loss = SaveAll.apply(x, seen, first, *others).exp().sin().sum()
    assert rig.stats.parcels.count == 2  # and the result of exp, which pushes the view out
    assert rig.stats.out.nbytes == (nbytes or first.nbytes) + 32
    assert rig.stats.shared.count == len(others) + 1
    loss.backward()
    assert rig.stats.inbound.count == 1
    for got, wanted in zip(seen, [first, *others], strict=True):
        check_same_view(got, wanted)


def test_a_part_saved_before_the_whole_travels_twice():
    """The span of the first saved tensor is decided before the second is known. Views of half or more avoid that."""
    rig, seen, x = Rig(), [], torch.ones(8, requires_grad=True)
    whole = torch.randn(4096)
    with rig.context:
        loss = SaveAll.apply(x, seen, whole[:1024], whole, whole[512:700]).exp().sin().sum()
    assert rig.stats.out.nbytes == 4096 + 4 * 4096 + 32
    assert rig.stats.shared.count == 2
    loss.backward()


def test_chunks_share_the_range_of_the_whole():
    qkv = torch.zeros(6, 24)
    for chunk in qkv.chunk(3, -1):
        assert span_of(chunk, qkv.nbytes) == Span(0, qkv.nbytes, False, False)


def test_a_small_part_of_a_large_storage_travels_alone():
    large = torch.zeros(10_000)
    assert span_of(large[1000:1100], large.nbytes) == Span(3584, 4400 - 3584, False, False)
    assert span_of(large[::100], large.nbytes) == Span(0, 400, True, False)
    assert span_of(large[:6000], large.nbytes) == Span(0, 40_000, False, False)


def test_a_version_alias_counts_and_holds_nothing():
    t = torch.zeros(1000)
    counter = version_alias(t)
    assert counter.untyped_storage().nbytes() == 0
    version = t._version
    check_unmodified(counter, version, "it", t.dtype, t.device, t.shape)
    t[3:].add_(1.0)
    with pytest.raises(ebbtide.ModifiedError, match="it was saved at version 0 and is at version 1 now"):
        check_unmodified(counter, version, "it", t.dtype, t.device, t.shape)


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
