"""Lifetimes: ends of parcels on any thread, nothing left behind, nothing revived."""

import contextlib
import weakref

import pytest
import torch
from cases import Data
from support import Rig
from torch import nn

import ebbtide
from ebbtide._engine.geometry import geometry_of, span_of
from ebbtide._stores.mock import MockStore
from ebbtide._utils.torch_private import top_pack_hook

CPU = torch.device("cpu")


def chain(rig, x, length=6):
    with rig.context:
        y = x * 1.5
        for _ in range(length):
            y = y.sin()
        return y.sum()


def test_a_dying_parcel_cannot_be_found_again():
    """Another thread may look for the parcel at any point of its end: the store does, in the middle."""
    found = []

    class Curious(MockStore):
        def give_back(self, block):
            found.append([ref() for refs in rig.engine._by_storage.values() for ref in refs])
            super().give_back(block)

    rig = Rig(make_store=Curious)
    kept = Data(CPU).leaf(10, 10) * 2.0  # the test holds the storage: the parcel could be looked up
    with rig.context:
        loss = kept.cos().sum()
    parcels = len(rig.engine._by_storage)
    del loss
    assert parcels == len(found) == 1
    assert found == [[None]]


def test_no_reference_is_left_when_all_have_ended():
    rig, x = Rig(), Data(CPU).leaf(10, 10)
    for _ in range(3):
        chain(rig, x).backward()
    rig.check_at_rest()
    assert rig.engine._refs == {}


def test_a_key_that_storages_had_in_turn_finds_the_parcels_of_the_last_only():
    """Released memory is reused at once, and with the memory the key of a storage."""
    rig, x = Rig(), Data(CPU).leaf(10, 10)
    with rig.context:
        y = x * 1.0
        for _ in range(100):
            y = y.sin()
    known = rig.engine._by_storage.values()
    assert len(rig.engine._refs) >= 100
    assert {len(refs) for refs in known} == {1}
    y.sum().backward()
    del y
    rig.check_at_rest()


def test_two_counters_of_one_storage_do_not_share_a_parcel():
    """x and x.data have separate version counters: a change counts in one of them only."""
    rig = Rig()
    w = Data(CPU).leaf(4, 4)

    def run(context):
        x = Data(CPU, 1).tensor(4, 4) * 1.0
        y = x.data
        with context:
            first = (x * w).sum()
            pushed = (w * 3.0).exp().sin()  # the window overflows: the first copy is made now
            x.add_(100.0)
            second = (y * w).sum()
        del first
        (grad,) = torch.autograd.grad(second, w)
        return grad, pushed

    assert torch.equal(run(contextlib.nullcontext())[0], run(rig.context)[0])


def test_a_parameter_may_change_its_memory_until_backward():
    """As in ZeRO: the weight is freed after forward and gathered again, in new memory, before backward."""
    rig, w, x = Rig(), nn.Parameter(torch.full((4, 4), 2.0)), Data(CPU).leaf(4, 4)
    with pytest.warns(ebbtide.EbbtideWarning, match="2 saved tensors"), rig.context:
        loss = (x * w).sum()
    w.data = torch.empty(0)
    w.data = torch.full((4, 4), 3.0)
    loss.backward()
    assert torch.equal(x.grad, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_a_parameter_gave_away_is_free(is_trained):
    """Between forward and backward ZeRO has each block's weights, also frozen weights, on a single rank."""
    rig, w = Rig(), nn.Parameter(torch.full((4, 4), 2.0), requires_grad=is_trained)
    x = Data(CPU).leaf(4, 4)
    gathered = weakref.ref(w.untyped_storage())
    with pytest.warns(ebbtide.EbbtideWarning, match="saved tensors"), rig.context:
        loss = (x * w).sum()
    w.data = torch.empty(0)
    assert gathered() is None
    w.data = torch.full((4, 4), 3.0)
    loss.backward()
    assert torch.equal(x.grad, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("offset", [0, 1, 3, 7])
def test_a_gathered_view_comes_back_aligned_as_it_was(offset):
    t = torch.randn(64, 1024, dtype=torch.bfloat16)[:, offset : offset + 32]
    span = span_of(t, t.untyped_storage().nbytes())
    assert span.is_gathered
    back = geometry_of(t, span).view(t.contiguous().untyped_storage(), 0)
    assert back.storage_offset() == offset
    assert torch.equal(back, t)
    assert back.stride() == t.stride()


def test_a_graph_kept_for_ever_does_not_grow_with_use():
    """Gradient penalties keep a graph every step: neither the retained list nor a step may grow with the steps."""
    rig, x = Rig(prefetch=1000), Data(CPU).leaf(10, 10)
    for _ in range(30):
        loss = chain(rig, x)
        loss.backward(retain_graph=True)
        loss.backward()
    del loss
    rig.check_at_rest()
    assert len(rig.engine._retained) == 0
    assert rig.engine._retained_bytes == 0


def test_one_long_lived_graph_does_not_make_the_queue_grow():
    rig, x = Rig(window=10**6), Data(CPU).leaf(10, 10)
    kept = chain(rig, x)
    for _ in range(100):
        chain(rig, x).backward()
    assert len(rig.engine._outbound._queue) < 150
    kept.backward()


def test_a_whole_loop_inside_one_context_is_learned_too():
    rig, x = Rig(prefetch=1600), Data(CPU).leaf(10, 10)
    with rig.context:
        for _ in range(6):
            chain(rig, x).backward()
        before = rig.stats.misses.count
        for _ in range(6):
            chain(rig, x).backward()
        assert rig.stats.misses.count - before <= 6  # a miss per step, at the begin of looking ahead
    sites = [site for numbers in rig.hook_context._numbers.values() for call in numbers._sites for site in call]
    assert len(sites) <= 3 * 10


def test_looking_at_a_saved_tensor_teaches_nothing():
    rig, x = Rig(window=10**6), Data(CPU).leaf(10, 10)
    with rig.context:
        y = (x * 2.0).cos()
    resident = rig.engine._outbound.resident_bytes
    assert torch.equal(y.grad_fn._saved_self, x * 2.0)
    assert rig.engine._outbound.resident_bytes == resident > 0
    assert rig.stats.forwarded.count == 0
    y.sum().backward()
    assert rig.stats.forwarded.count == 1


class Interrupted(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_no_hooks_stay_behind_whatever_ends_a_forward(error):
    model = Interrupted(error)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, window=1)
    with pytest.raises(error):
        model(torch.ones(2, 4))
    assert top_pack_hook() is None
    model.error = None
    model(torch.ones(2, 4)).sum().backward()
    handle.remove()


def test_remove_inside_of_a_forward_leaves_no_hooks():
    model = Interrupted(None)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, window=1)
    model.inner.register_forward_hook(lambda *_: handle.remove())
    model(Data(CPU).leaf(2, 4) * 1.5).sum().backward()
    assert top_pack_hook() is None
    assert "_compiled_call_impl" not in model.__dict__


def test_calling_around_the_model_is_told():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)])
    handle = ebbtide.offload(model, store="mock", min_bytes=1, window=1)
    with pytest.warns(ebbtide.EbbtideWarning, match=r"covers model\(...\), not model.forward") as warned:
        for _ in range(2):
            model.forward(torch.ones(2, 3, 8)).sum().backward()
    assert len(warned) == 1
    assert handle.stats().saved_tensors == 0


def test_release_memory_ends_graphs_with_a_clear_error():
    x = Data(CPU).leaf(10, 10)
    with ebbtide.offload_activations(store="mock", min_bytes=1, window=1, prefetch=1):
        loss = (x * 2.0).cos().exp().cos().exp().sum()
    ebbtide.release_memory()
    with pytest.raises(ebbtide.StoreError, match="was closed while this graph"):
        loss.backward()
