"""Masks travel as bits: every truth value and geometry comes back, an eighth of the bytes moves, no mask is held."""

import contextlib
import gc
import weakref

import pytest
import torch
from cases import Data, SaveAll, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Rig, assert_equal

import ebbtide
from ebbtide._devices.cpu import CpuDevice
from ebbtide._devices.sim import SimDevice
from ebbtide._engine import engine as engine_module
from ebbtide._engine import pack_bits
from ebbtide._engine.geometry import geometry_of, make_dense, span_of
from ebbtide._stores.mock import MockStore
from ebbtide._types import Reason

CPU = torch.device("cpu")
DEVICES = {"cpu": CpuDevice, "sim": lambda: SimDevice(3, "shuffled")}


@pytest.fixture(params=list(DEVICES))
def rig(request):
    rig = Rig(DEVICES[request.param]())
    yield rig
    if isinstance(rig.device, SimDevice):
        rig.device.finish()
        assert rig.device.faults == []
    rig.check_at_rest()


def mask_of(*shape, seed=0):
    return Data(CPU, seed).tensor(*shape) > 0.2


def save(context, *tensors):
    """The sum at the end of a graph with the saved tensors, the list filled by backward, and the leaf.

    What follows pushes them out where the window is small.
    """
    x, seen = Data(CPU, 9).leaf(64), []
    with context:
        loss = SaveAll.apply(x, seen, *tensors).exp().sin().sum()
    return loss, seen, x


PUSHED_BY_NBYTES = 64 * 4


def sent_and_shared(stats):
    """Bytes of the parcels and number of tensors sharing a parcel, without the result of exp, saved by exp and sin."""
    return stats.parcels.nbytes - PUSHED_BY_NBYTES, stats.shared.count - 1


# -- bytes to bits and back --------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.sampled_from([8, 64, 4096]))
def test_any_bytes_come_back_as_their_truth_values(data, chunk_bytes):
    memory = torch.tensor(list(data), dtype=torch.uint8)
    packed = pack_bits.pack(memory, chunk_bytes)
    assert packed.nbytes() == pack_bits.packed_nbytes(len(data)) == -(-len(data) // 8)
    back = pack_bits.unpack(torch.tensor(packed.tolist(), dtype=torch.uint8))
    assert back.dtype is torch.bool
    assert back.view(torch.uint8).tolist() == [int(byte != 0) for byte in data] + [0] * (-len(data) % 8)


@pytest.mark.parametrize("first", range(0, 256, 64))
def test_every_pattern_of_eight(first):
    packed = torch.arange(first, first + 64).to(torch.uint8)
    wanted = [[pattern >> bit & 1 for bit in range(8)] for pattern in range(first, first + 64)]
    assert pack_bits.unpack(packed).view(-1, 8).tolist() == wanted
    assert pack_bits.pack(pack_bits.unpack(packed).view(torch.uint8)).tolist() == packed.tolist()


def test_it_is_allowed_among_deterministic_algorithms():
    memory = mask_of(1003).view(torch.uint8)
    torch.use_deterministic_algorithms(True)
    try:
        packed = pack_bits.pack(memory)
        back = pack_bits.unpack(torch.tensor(packed.tolist(), dtype=torch.uint8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(back[:1003].view(torch.uint8), memory)


def test_packing_a_large_mask_takes_little_room(monkeypatch):
    """Packing lowers the peak: no more than a chunk is alive besides the mask and the bits."""
    alive, most = {}, [0]
    memory = pack_bits._memory

    def watched(nbytes, device):
        t = memory(nbytes, device)
        key = len(alive), nbytes
        alive[key] = nbytes
        weakref.finalize(t.untyped_storage(), alive.pop, key)
        most[0] = max(most[0], sum(alive.values()))
        return t

    monkeypatch.setattr(pack_bits, "_memory", watched)
    packed = pack_bits.pack(torch.ones(10_001, dtype=torch.uint8), chunk_bytes=800)
    assert most[0] == packed.nbytes() + 800
    assert pack_bits.PACKING_BYTES <= 64 * 2**20


# -- geometry ----------------------------------------------------------------------------------------------------------


@st.composite
def masks(draw):
    """A view of booleans: gaps, overlaps, expanded and permuted dimensions, any offset, any bytes."""
    dims = draw(st.integers(0, 4))
    size = draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims))
    stride = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 64, 200, 1000]), min_size=dims, max_size=dims))
    offset = draw(st.sampled_from([0, 1, 7, 8, 100, 511, 512, 513, 700]))
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    spare = draw(st.sampled_from([0, 1, 500, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    memory = torch.randint(0, draw(st.sampled_from([2, 4])), (offset + reach + spare,), generator=generator)
    storage = memory.clamp(max=2).to(torch.uint8).untyped_storage()
    return torch.empty(0, dtype=torch.bool).set_(storage, offset, size, stride).data  # as if never changed


def truth(t):
    return t.as_strided(t.shape, t.stride()).view(torch.uint8).ne(0).tolist()


@settings(max_examples=300)
@given(masks())
def test_any_view_is_rebuilt_from_its_bits(t):
    span = span_of(t, t.untyped_storage().nbytes())
    assert span.is_bits
    packed = make_dense(t, span)
    assert packed.nbytes() == span.transfer_nbytes == -(-span.nbytes // 8)
    back = geometry_of(t, span).view(packed, 0)
    assert (back.dtype, back.shape, back.stride()) == (t.dtype, t.shape, t.stride())
    assert truth(back) == truth(t)
    assert back.storage_offset() % 512 == t.storage_offset() % 512  # aligned as before
    assert back.untyped_storage().nbytes() < 512 + 8 + 1 + sum(
        (n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)
    )


@settings(max_examples=100)
@given(st.lists(masks(), min_size=1, max_size=3), st.sampled_from(list(DEVICES)))
def test_any_masks_round_trip_through_the_engine(tensors, device):
    rig = Rig(DEVICES[device]())
    loss, seen, _ = save(rig.context, *tensors)
    loss.backward()
    for got, t in zip(seen, tensors, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (t.dtype, t.shape, t.stride())
        assert truth(got) == truth(t)
    assert rig.stats.out.nbytes - PUSHED_BY_NBYTES == sum(
        -(-span_of(t, t.untyped_storage().nbytes()).nbytes // 8) for t in tensors
    )
    del got, seen
    rig.check_at_rest()


# -- bytes that travel -------------------------------------------------------------------------------------------------


def test_an_eighth_of_the_bytes_goes_out_and_comes_back(rig):
    mask = mask_of(40, 80)
    loss, seen, _ = save(rig.context, mask)
    stats = rig.stats
    assert (stats.packed.count, stats.packed.nbytes) == (1, 3200)
    assert (stats.out.count, stats.out.nbytes) == (2, 400 + PUSHED_BY_NBYTES)
    assert stats.host_bytes <= 512 + 512  # blocks of the store
    loss.backward()
    assert torch.equal(seen[0], mask)
    assert (rig.stats.inbound.count, rig.stats.inbound.nbytes) == (1, 400)  # the second was used from the device


def test_saved_tensors_of_one_mask_are_one_parcel(rig):
    mask = mask_of(40, 80)
    loss, seen, _ = save(rig.context, mask, mask.t(), mask[3:30], mask.view(-1)[17:], mask[:, 2:].unsqueeze(1))
    assert rig.stats.packed.count == 1
    assert sent_and_shared(rig.stats) == (400, 4)
    loss.backward()
    views = (mask, mask.t(), mask[3:30], mask.view(-1)[17:], mask[:, 2:].unsqueeze(1))
    assert_equal(seen, list(views))
    assert (rig.stats.inbound.count, rig.stats.inbound.nbytes) == (1, 400)


def test_an_expanded_mask_is_not_blown_up(rig):
    mask = mask_of(1, 64)
    loss, seen, _ = save(rig.context, mask.expand(100, 64), mask)
    assert sent_and_shared(rig.stats) == (8, 1)
    loss.backward()
    assert seen[0].stride() == (0, 1)
    assert seen[0].untyped_storage().nbytes() == 64
    assert torch.equal(seen[0], mask.expand(100, 64))


def test_a_mask_inside_of_what_travels_anyway_adds_nothing(rig):
    memory = mask_of(800).view(torch.uint8) * 3
    mask = memory.view(torch.bool)
    loss, seen, _ = save(rig.context, memory, mask)
    assert sent_and_shared(rig.stats) == (800, 1)
    assert rig.stats.packed.count == 0
    loss.backward()
    assert torch.equal(seen[0], memory)
    assert torch.equal(seen[1], memory != 0)


def test_bits_do_not_serve_a_saved_tensor_that_needs_the_bytes(rig):
    memory = mask_of(800).view(torch.uint8) * 3
    loss, seen, _ = save(rig.context, memory.view(torch.bool), memory)
    assert sent_and_shared(rig.stats) == (100 + 800, 0)
    loss.backward()
    assert torch.equal(seen[0], memory != 0)
    assert torch.equal(seen[1], memory)


def test_bytes_other_than_one_come_back_as_true(rig):
    mask = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(torch.bool)
    loss, seen, _ = save(rig.context, mask)
    loss.backward()
    assert seen[0].view(torch.uint8).tolist() == [0] + [1] * 255


def test_a_mask_that_stays_because_the_store_is_full_is_kept_whole():
    rig = Rig(make_store=lambda own: MockStore(own, PUSHED_BY_NBYTES))
    mask = mask_of(40, 80)
    loss, seen, _ = save(rig.context, mask)
    assert rig.stats.packed.count == 0
    assert rig.stats.kept[Reason.STORE_FULL].nbytes == 3200
    loss.backward()
    assert seen[0].data_ptr() == mask.data_ptr()


def test_without_room_on_the_device_to_pack_it_travels_as_it_is(rig, monkeypatch):
    def no_room(t, span):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine_module, "make_dense", no_room)
    mask, wide = mask_of(40, 80), Data(CPU).tensor(64, 128)
    loss, seen, _ = save(rig.context, mask, wide[:, 5], mask)
    assert sent_and_shared(rig.stats) == (3200 + wide.nbytes, 1)
    assert rig.stats.packed.count == 0
    loss.backward()
    assert_equal(seen, [mask, wide[:, 5], mask])


# -- lifetimes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 10**9])
def test_the_mask_is_freed_as_soon_as_nobody_else_holds_it(window):
    """Also while the bits wait on the device, to leave or to be used."""
    rig = Rig(window=window)
    for _ in range(3):
        mask = mask_of(40, 80)
        storage = weakref.ref(mask.untyped_storage())
        wanted = mask.tolist()
        loss, seen, _ = save(rig.context, mask)
        del mask
        gc.collect()
        assert storage() is None
        loss.backward()
        assert seen[0].tolist() == wanted
        del seen
    stats = rig.stats
    assert stats.freed_nothing.count == 0
    assert stats.inbound.count == (3 if window == 1 else 0)
    rig.check_at_rest()


def test_a_dead_mask_is_not_mistaken_for_one_at_its_place(rig):
    graphs = []
    for seed in range(20):
        mask = mask_of(40, 80, seed=seed)
        graphs.append((*save(rig.context, mask), mask.tolist()))
        del mask
    assert rig.stats.packed.count == 20
    for loss, seen, _, wanted in graphs:
        loss.backward()
        assert seen[0].tolist() == wanted


def test_a_mask_that_somebody_holds_is_learned_and_stays(rig):
    mask = mask_of(40, 80)
    for _ in range(4):
        loss, seen, _ = save(rig.context, mask)
        loss.backward()
        assert torch.equal(seen[0], mask)
    assert rig.stats.packed.count == rig.stats.freed_nothing.count == 2  # a single observation could be an accident
    assert rig.stats.kept[Reason.HELD].count == 2


def test_a_column_that_somebody_holds_is_learned_and_stays(rig):
    wide = Data(CPU).tensor(64, 128)
    for _ in range(4):
        loss, seen, _ = save(rig.context, wide[:, 5])
        loss.backward()
        assert torch.equal(seen[0], wide[:, 5])
    assert rig.stats.freed_nothing.count == 2
    assert rig.stats.kept[Reason.HELD].count == 2


def test_what_is_read_belongs_to_the_reader(rig):
    mask = mask_of(40, 80)
    x = Data(CPU).leaf(40, 80)
    with rig.context:
        y = x.masked_fill(mask, 1.0)
        loss = y.exp().sin().sum()
    first, second = y.grad_fn._saved_mask, y.grad_fn._saved_mask
    first.logical_not_()
    assert torch.equal(second, mask)
    assert torch.equal(y.grad_fn._saved_mask, mask)
    del y
    loss.backward()


def test_a_kept_graph_runs_twice(rig):
    mask = mask_of(6, 8)
    w = Data(CPU, 1).leaf(8, 8)

    def run(context):
        x = Data(CPU).leaf(6, 8)
        with context:
            loss = (torch.where(mask, x, 0.0) @ w).masked_fill(mask, 0.1).exp().sin().sum()
        loss.backward(retain_graph=True)
        return finish(loss, x)

    for _ in range(3):
        assert_equal(run(rig.context), run(contextlib.nullcontext()))


# -- changed after the save --------------------------------------------------------------------------------------------


def test_a_mask_changed_after_being_saved_raises(rig):
    mask = mask_of(40, 80)
    loss, _, _ = save(rig.context, mask)
    mask[3].logical_not_()
    with pytest.raises(ebbtide.ModifiedError, match=r"torch.bool \(40, 80\).*version 0.*version 1"):
        loss.backward()


def test_a_mask_changed_between_two_uses_is_two_parcels(rig):
    mask = mask_of(40, 80)
    x = Data(CPU).leaf(40, 80)
    with rig.context:
        unused = x.masked_fill(mask, 1.0)
        mask.logical_not_()
        loss = x.masked_fill(mask, 1.0).exp().sin().sum()
    assert rig.stats.packed.count == 2
    loss.backward()
    twin = x.detach().clone().requires_grad_()
    twin.masked_fill(mask, 1.0).exp().sin().sum().backward()
    assert torch.equal(x.grad, twin.grad)
    with pytest.raises(ebbtide.ModifiedError):
        unused.sum().backward()


# -- several compute streams -------------------------------------------------------------------------------------------


SAVES = {"mask": lambda: mask_of(40, 80), "column": lambda: Data(CPU).tensor(64, 128)[:, 5]}


def _faults_of_dropping_at_once(kind):
    """A stream packs or gathers what another has made; the memory dies before the two are ordered."""
    device = SimDevice()
    rig = Rig(device)
    t = SAVES[kind]()
    device.touch(t)
    with device.compute_on("left"):
        loss, seen, _ = save(rig.context, t)
        device.touch(t)
        del t, loss, seen
    return device.faults


@pytest.mark.parametrize("kind", SAVES)
def test_memory_is_not_reused_before_another_stream_has_packed_or_gathered_it(kind):
    """Autograd would have held the tensor until backward; now its owner may reuse the memory at once."""
    assert _faults_of_dropping_at_once(kind) == []


@pytest.mark.parametrize("kind", SAVES)
def test_a_missing_mark_is_seen(kind, monkeypatch):
    monkeypatch.setattr(SimDevice, "mark_used", lambda self, t, stream: None)
    assert "freed by compute is not ordered after" in str(_faults_of_dropping_at_once(kind))


def test_bits_are_shared_within_a_stream_only():
    device = SimDevice()
    rig = Rig(device)
    mask = mask_of(40, 80)
    first, *_ = save(rig.context, mask)
    with device.compute_on("left"):
        second, seen, _ = save(rig.context, mask)
        assert rig.stats.packed.count == 2
        third, *_ = save(rig.context, mask)
        assert rig.stats.packed.count == 2
    for loss in (first, second, third):
        loss.backward()
    assert torch.equal(seen[0], mask)
    del first, second, third, loss
    rig.check_at_rest()
    assert device.faults == []


def test_a_gathered_view_is_shared_within_a_stream_only():
    device = SimDevice()
    rig = Rig(device)
    column = Data(CPU).tensor(64, 128)[:, 5]
    first, *_ = save(rig.context, column)
    assert sent_and_shared(rig.stats) == (256, 0)
    with device.compute_on("left"):
        second, seen, _ = save(rig.context, column)
        third, *_ = save(rig.context, column)
    # The two `left` tensors share a parcel, and the two saved results of each exp share a parcel.
    assert (rig.stats.parcels.count, rig.stats.shared.count) == (2 + 3, 1 + 3)
    for loss in (first, second, third):
        loss.backward()
    assert torch.equal(seen[0], column)
    del first, second, third, loss
    rig.check_at_rest()
    assert device.faults == []


def test_another_view_of_as_many_elements_is_gathered_again(rig):
    wide = Data(CPU).tensor(64, 128)
    views = [wide[:, 5], wide[:, 6], wide[:, 5], wide[:, 5:6], wide[::2, 5:7].t()]
    loss, seen, _ = save(rig.context, *views)
    assert sent_and_shared(rig.stats) == (4 * 256, 1)
    loss.backward()
    assert_equal(seen, views)
