"""Moves inside captured graphs, on a simulator with CUDA's refusals."""

import contextlib
import gc

import pytest
import torch
from capturing import CapturingSim, IllegalError
from support import Rig, assert_equal, leaves

from ebbtide import CaptureError, StoreError
from ebbtide._engine.captures import CapturedEngine
from ebbtide._stores.host import HostArena, HostStore
from ebbtide._stores.mock import MockStore
from ebbtide._types import Reason, Wait
from ebbtide._utils.torch_private import is_called_from

ROOM = 2**20
CPU = torch.device("cpu")


def small_store(device):
    return HostStore(device, ROOM, smallest_slab_bytes=2**14)


@pytest.fixture
def device():
    device = CapturingSim()
    yield device
    gc.collect()
    assert device.faults == []


def forward(context, weights):
    with context:
        x = weights[0] * 1.5
        for weight in weights[1:]:
            x = (x @ weight).tanh()
        return x.square().mean()


def step(context, weights):
    loss = forward(context, weights)
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in weights)]
    for weight in weights:
        weight.grad = None
    return results


def model(seed=0):
    return leaves(seed, *[(16, 16)] * 6)


def captured(rig, weights):
    with rig.device.capture():
        return step(rig.context, weights)


# -- equal bits, and nothing refused by CUDA ---------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2500, 1 << 20])
@pytest.mark.parametrize("window", [1, 2500, 1 << 20])
@pytest.mark.parametrize("order", ["late", "early", "shuffled"])
def test_a_captured_step_moves_and_equals_the_plain_one(order, window, prefetch):
    device = CapturingSim(0, order)
    rig = Rig(device, small_store, window, prefetch)
    weights = model()
    plain = step(contextlib.nullcontext(), weights)
    for _ in range(2):
        assert_equal(step(rig.context, weights), plain)
    moved, growths = rig.stats.out.count, rig.engine.store_stats().growths
    for _ in range(2):
        before = rig.stats.out.count
        assert_equal(captured(rig, weights), plain)
        assert window == 1 << 20 or rig.stats.out.count > before  # a window for everything releases nothing
        assert_equal(step(rig.context, weights), plain)
    assert moved > 0
    assert rig.engine.store_stats().growths == growths
    assert {Reason.CAPTURING, Reason.CAPTURE_FULL, Reason.STORE_FULL} & set(rig.stats.kept) == set()
    device.finish()
    assert device.faults == []
    rig.check_at_rest()


def test_two_forwards_and_two_backwards_in_one_capture(device):
    rig = Rig(device, small_store, prefetch=2500)
    one, other = model(1), model(2)
    plain = [*step(contextlib.nullcontext(), one), *step(contextlib.nullcontext(), other)]
    for _ in range(2):
        step(rig.context, one), step(rig.context, other)
    with device.capture():
        assert_equal([*step(rig.context, one), *step(rig.context, other)], plain)


# -- limits of captures ------------------------------------------------------------------------------------------------


def test_without_a_step_before_nothing_is_allocated_and_the_reason_says_so(device):
    rig = Rig(device, small_store)
    weights = model()
    plain = step(contextlib.nullcontext(), weights)
    with pytest.warns(UserWarning, match="run a step with the same settings before"):
        assert_equal(captured(rig, weights), plain)
    assert rig.stats.kept[Reason.CAPTURE_FULL].count > 0
    assert rig.stats.host_reserved_bytes == 0
    assert rig.stats.out.count == 0


def test_what_finds_no_room_stays(device):
    rig = Rig(device, lambda own: HostStore(own, 2**14, smallest_slab_bytes=2**13))
    weights = leaves(0, *[(16, 16)] * 3)
    step(rig.context, weights)
    reserved = rig.stats.host_reserved_bytes
    wide = leaves(0, *[(16, 16)] * 24)
    plain = step(contextlib.nullcontext(), wide)
    assert_equal(captured(rig, wide), plain)
    assert rig.stats.kept[Reason.CAPTURE_FULL].count > 0
    assert rig.stats.host_reserved_bytes == reserved


def test_figures_may_be_read_in_a_capture_and_ask_no_event(device):
    rig = Rig(device, small_store)
    weights = model()
    forward(rig.context, weights).backward()  # the stalls are not read yet
    with device.capture():
        loss = forward(rig.context, weights)
        assert rig.context.stats().out.count > 0
        loss.backward()
        assert rig.context.stats().inbound.count > 0
    recorder = rig.hook_context.recorder
    events = [event for waits in recorder._waits.values() for pair in waits for event in pair]
    events += [event for _, *three, _, _ in recorder._copies for event in three]
    assert events
    assert [each for each in events if getattr(each, "capture", None) is not None] == []  # names too
    device.finish()
    rig.context.stats()
    assert not any(recorder._waits.values())


def test_large_copies_of_a_capture_are_not_timed(device, monkeypatch):
    monkeypatch.setattr("ebbtide._engine.stats.TIMED_EVERY_BYTES", 1)
    rig = Rig(device, small_store)
    weights = model()
    step(rig.context, weights)
    rig.stats  # noqa: B018 (reads the passed timings)
    eager = len(rig.hook_context.recorder._copies)
    captured(rig, weights)
    assert len(rig.hook_context.recorder._copies) == eager


def test_one_capture_query_per_saved_tensor(device):
    rig = Rig(device, small_store)
    weights = model()
    step(rig.context, weights)
    device.asked = 0
    before = rig.stats.saved_tensors
    device.asked = 0
    loss = forward(rig.context, weights)
    assert device.asked <= rig.hook_context.recorder.stats.saved_tensors - before
    loss.backward()


# -- room --------------------------------------------------------------------------------------------------------------


def test_what_a_capture_has_used_is_nobody_elses(device, monkeypatch):
    owners: dict[int, object] = {}
    used: dict[object, set[int]] = {}

    def watch(store_class):
        plain_write = store_class.write

        def write(self, block, src, stream):
            at = block.bytes.data_ptr()
            assert owners.get(at, self) is self
            used.setdefault(self, set()).add(at)
            if store_class is HostArena:
                owners[at] = self
            return plain_write(self, block, src, stream)

        monkeypatch.setattr(store_class, "write", write)

    watch(HostStore), watch(HostArena)
    rig = Rig(device, small_store)
    weights = model()
    step(rig.context, weights)
    early = set(used[rig.engine.store])
    for _ in range(2):
        captured(rig, weights)
        for _ in range(2):
            step(rig.context, weights)
    assert len(used) == 3
    assert set(owners) & early  # was free when the first capture began


def test_room_of_a_capture_is_used_again_inside_and_counted_for_good(device):
    rig = Rig(device, small_store)
    weights = model()
    for _ in range(2):
        step(rig.context, weights)
    assert rig.stats.host_captured_bytes == 0
    captured(rig, weights)
    once = rig.stats.host_captured_bytes
    with device.capture():
        for _ in range(3):
            step(rig.context, weights)
    stats = rig.stats
    assert stats.host_captured_bytes == stats.host_bytes == 2 * once > 0
    rig.engines.close()
    assert rig.stats.host_bytes == rig.stats.host_captured_bytes == 0
    assert_equal(step(rig.context, weights), step(contextlib.nullcontext(), weights))


def test_room_that_was_read_since_the_capture_began_is_not_lent():
    device = CapturingSim()
    store = small_store(device)
    compute, lane = device.current_stream(), device.new_stream("lane")
    block = store.reserve(2**14)
    arena = store.arena(device)
    store.read(block, device.allocate(2**14, compute), lane)
    store.give_back(block)
    assert arena.reserve(512) is None
    assert store.arena(device).reserve(512) is not None


def test_a_closed_arena_says_so(device):
    rig = Rig(device, small_store)
    weights = model()
    step(rig.context, weights)
    with device.capture():
        loss = forward(rig.context, weights)
        rig.engines.close()
        with pytest.raises(StoreError, match="release_memory"):
            loss.backward()
        del loss


# -- across the border -------------------------------------------------------------------------------------------------


def test_saved_outside_and_needed_inside(device):
    rig = Rig(device, small_store)
    weights = model()
    loss = forward(rig.context, weights)
    with device.capture(), pytest.raises(CaptureError, match=r"saved outside.*capture forward and backward together"):
        loss.backward()
    del loss


def test_saved_inside_and_needed_outside(device):
    rig = Rig(device, small_store)
    weights = model()
    step(rig.context, weights)
    with device.capture():
        loss = forward(rig.context, weights)
        loss.backward(retain_graph=True)
    with pytest.raises(CaptureError, match="needed outside of that capture"):
        loss.backward()
    with device.capture(), pytest.raises(CaptureError, match="needed outside of that capture"):
        loss.backward()


def test_what_outlives_the_capture_dies_without_touching_it(device):
    rig = Rig(device, small_store, window=1 << 20)  # sent and never released
    weights = model()
    with device.capture():
        pass
    forward(rig.context, weights)  # dropped: nothing is tail yet
    with device.capture():
        loss = forward(rig.context, weights)
        loss.backward(retain_graph=True)
        other = forward(rig.context, weights)
        torch.autograd.grad(other, weights[-1:])  # the rest of the branch is not asked for
    device.finish()
    del loss, other
    gc.collect()
    device.finish()
    step(rig.context, weights)
    for engine in rig.engines._captures.values():
        assert engine.store_stats().used_bytes == 0
        engine._drain_frees()
        assert engine._outbound.resident_bytes == 0


def test_a_lane_that_nobody_joined_ends_the_capture():
    """The simulator notices: the test above proves something."""
    device = CapturingSim()
    rig = Rig(device, small_store, window=1 << 20)
    weights = model()
    forward(rig.context, weights)
    with pytest.raises(IllegalError, match="not joined"), device.capture():
        loss = forward(rig.context, weights)
    del loss


@pytest.mark.parametrize("dies", [False, True])
def test_copies_for_another_stream_are_joined_without_a_backward(device, dies):
    """The stream has been joined when its last saved tensors leave, or die with their copies under way."""
    rig = Rig(device, small_store, window=2500)
    for seed in range(3):  # no site is expected to be needed early, or its copy would not begin
        forward(rig.context, model(seed))
    before = rig.stats.parcels.count
    with device.capture():
        with device.compute_on("left"):
            aside = forward(rig.context, model())
        if dies:
            del aside
        else:
            rig.engines.on(CPU).release_down_to(0)
    assert rig.stats.parcels.count > before  # the device refuses a capture with a copy that nobody has joined


def test_running_engines_are_those_of_the_capture_and_none_is_made(device):
    rig = Rig(device, small_store, window=1 << 20)
    weights = model()
    step(rig.context, weights)
    with device.capture():
        assert rig.engines.running() == []
        step(rig.context, weights)
        (engine,) = rig.engines.running()
        assert isinstance(engine, CapturedEngine)
    assert rig.engines.running() == list(rig.engines)


def test_an_eager_graph_may_die_in_a_capture(device):
    rig = Rig(device, small_store, window=1 << 20)
    weights = model()
    loss = forward(rig.context, weights)
    with device.capture():
        del loss
        results = step(rig.context, weights)
    assert_equal(results, step(contextlib.nullcontext(), model()))


def test_fetching_ahead_leaves_the_parcels_of_others_alone(device):
    """After the later graph's backward the earlier graph's is expected, outside of the capture."""
    rig = Rig(device, small_store, prefetch=1 << 20)
    weights = model()
    for _ in range(2):
        earlier, later = forward(rig.context, weights), forward(rig.context, weights)
        later.backward()
        earlier.backward()
    earlier = forward(rig.context, weights)
    with device.capture():
        later = forward(rig.context, weights)
        later.backward()
    earlier.backward()


# -- refused captures --------------------------------------------------------------------------------------------------


def not_told(rig):
    rig.device.can_tell = False


def in_parts(rig):
    rig.device.can_move = False


@pytest.mark.parametrize("prepare", [not_told, in_parts, None])
def test_everything_stays_where_nothing_can_move(device, prepare):
    rig = Rig(device, small_store if prepare else MockStore)
    weights = model()
    plain = step(contextlib.nullcontext(), weights)
    step(rig.context, weights)
    before = rig.stats
    if prepare is not None:
        prepare(rig)
    assert_equal(captured(rig, weights), plain)
    after = rig.stats
    assert after.kept[Reason.CAPTURING].count > 0
    assert after.out == before.out
    assert_equal(step(rig.context, weights), plain)


def test_one_engine_a_capture(device):
    rig = Rig(device, small_store)
    eager = rig.engine
    with device.capture():
        first = rig.engines.on(CPU)
        assert rig.engines.on(CPU) is first
    with device.capture():
        second = rig.engines.on(CPU)
    assert isinstance(first, CapturedEngine)
    assert len({eager, first, second}) == 3
    assert rig.engine is eager
    assert list(rig.engines) == [eager]


# -- the pieces --------------------------------------------------------------------------------------------------------


def test_called_from():
    def inner():
        return is_called_from(outer), is_called_from(other)

    def outer():
        return inner()

    def other():
        return inner()

    assert outer() == (True, False)
    assert other() == (False, True)


def test_the_capturing_simulator_refuses():
    device = CapturingSim()
    compute, lane = device.current_stream(), device.new_stream("lane")
    outside = device.record(compute)
    with device.capture():
        inside = device.record(compute)
        with pytest.raises(IllegalError, match="waits for an event of capture None"):
            device.wait(compute, outside, Wait.READY)
        with pytest.raises(IllegalError, match="asked"):
            device.is_done(outside)
        with pytest.raises(IllegalError, match="pinned"):
            device.host_bytes(1)
    with pytest.raises(IllegalError, match="waits for an event of capture 1"):
        device.wait(lane, inside, Wait.READY)
    with pytest.raises(IllegalError, match="asked"):
        device.is_done(inside)
    assert device.is_done(outside)
