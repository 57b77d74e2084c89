"""The engine: limits, failures of a store, learning, and bytes on the device."""

import contextlib

import pytest
import torch
from cases import Data, Transformer, finish, gradients, make, tokens
from support import Rig, assert_equal

import ebbtide
from ebbtide._devices.sim import SimDevice
from ebbtide._stores.host import HostStore
from ebbtide._stores.mock import MockStore
from ebbtide._types import Reason

CPU = torch.device("cpu")


def chain(context, length=12, rows=10):
    """Each of `length` saved tensors is a parcel of 40 * rows bytes."""
    x = Data(CPU).leaf(rows, 10)
    with context:
        y = x * 1.5
        for _ in range(length):
            y = y.sin()
        loss = y.sum()
        del y
    return finish(loss, x)


def plain_chain(**settings):
    return chain(contextlib.nullcontext(), **settings)


class Failures:
    """Fails the chosen operation, from the `after`-th time on, `times` times."""

    def __init__(self, operation, after=0, times=10**9):
        self._operation = operation
        self._range = range(after, after + times)
        self.count = 0

    def __call__(self, operation):
        if operation == self._operation:
            self.count += 1
            if self.count - 1 in self._range:
                raise OSError("cable pulled")


def mock_rig(device=None, limit_bytes=None, fail=None, **settings):
    return Rig(device, lambda own: MockStore(own, limit_bytes, fail), **settings)


# -- limits and failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mock", "host"])
def test_what_does_not_fit_the_store_is_kept_and_counted(kind):
    limit = 4 * 400 if kind == "mock" else 2048  # host: blocks of 512, and room is taken in powers of two
    rig = mock_rig(limit_bytes=limit) if kind == "mock" else Rig(None, lambda own: HostStore(own, limit, 512))
    for _ in range(4):
        assert_equal(chain(rig.context), plain_chain())
    assert rig.stats.kept[Reason.STORE_FULL].count >= 4 * 7
    assert rig.stats.inbound.count > 0
    rig.check_at_rest()


def test_a_store_without_any_room_keeps_all_and_says_so():
    rig = mock_rig(limit_bytes=1)
    with pytest.warns(
        ebbtide.EbbtideWarning, match=r"moved nothing.*12 saved tensors \(4.69 KiB\) the store is at its limit"
    ):
        results = chain(rig.context)
    assert_equal(results, plain_chain())
    assert rig.stats.out.count == 0


@pytest.mark.parametrize("operation", ["reserve", "write"])
@pytest.mark.parametrize("device", [None, SimDevice], ids=["cpu", "sim"])
def test_a_store_that_cannot_write_costs_memory_and_nothing_else(operation, device):
    rig = mock_rig(device and device(), fail=Failures(operation))
    with pytest.warns(ebbtide.EbbtideWarning, match=f"stay on the device: {operation} failed: cable pulled") as warned:
        for _ in range(3):
            assert_equal(chain(rig.context), plain_chain())
    assert len(warned) == 1
    assert rig.stats.failed.count >= 11  # all but the newest, never to be released
    assert rig.stats.out.count == 0
    assert rig.stats.inbound.count == 0
    rig.check_at_rest()


@pytest.mark.parametrize("operation", ["reserve", "write"])
def test_a_store_that_recovers_is_used_again(operation):
    rig = mock_rig(fail=Failures(operation, after=2, times=5))
    with pytest.warns(ebbtide.EbbtideWarning, match="cable pulled"):
        for _ in range(3):
            assert_equal(chain(rig.context), plain_chain())
    assert 0 < rig.stats.failed.count < 5
    assert rig.stats.inbound.count > 12
    rig.check_at_rest()


class TornStore(MockStore):
    """Copies fail under way: the lane notices, not the call."""

    def write(self, block, src, stream):
        return self._device.submit(stream, self._tear)

    def _tear(self):
        raise OSError("disk is gone")


def test_a_copy_that_fails_under_way_leaves_the_tensor_on_the_device():
    rig = Rig(None, TornStore)
    with pytest.warns(ebbtide.EbbtideWarning, match="disk is gone"):
        for _ in range(3):
            assert_equal(chain(rig.context), plain_chain())
    assert rig.stats.failed.count >= 11
    assert rig.stats.inbound.count == 0
    rig.check_at_rest()


@pytest.mark.parametrize("device", [None, SimDevice], ids=["cpu", "sim"])
@pytest.mark.parametrize(("after", "is_needed"), [(0, True), (5, True), (0, False), (1, False), (20, False)])
def test_a_parcel_that_cannot_be_read_is_a_clear_error_and_the_next_step_is_right(after, is_needed, device):
    """Without a window reads are needs, otherwise guesses: a failing guess is no error, and the need reads again."""
    fail = Failures("read", after, 1)
    rig = mock_rig(device and device(), fail=fail, **({"prefetch": 1} if is_needed else {}))
    outcomes = [_attempt(rig) for _ in range(4)]
    assert sorted(outcomes) == ["", "", "", "read failed: cable pulled" if is_needed else ""]
    assert fail.count > after + 1
    rig.check_at_rest()
    if device is not None:
        rig.device.finish()
        assert rig.device.faults == []


def _attempt(rig):
    """The error of a step; "" if the step ended with right numbers."""
    try:
        assert_equal(chain(rig.context), plain_chain())
    except ebbtide.StoreError as error:
        return str(error)
    return ""


def test_reading_again_after_a_failure_is_right():
    """The graph lives on: a failed read may be repeated."""
    rig = mock_rig(fail=Failures("read", 3, 2))
    x = Data(CPU).leaf(10, 10)
    for _ in range(2):
        x.grad = None
        with rig.context:
            y = x * 1.5
            for _ in range(12):
                y = y.sin()
            loss = y.sum()
            del y
        for _ in range(3):
            x.grad = None
            with contextlib.suppress(ebbtide.StoreError):
                loss.backward(retain_graph=True)
        assert_equal([loss.detach(), x.grad], plain_chain())
        del loss
    rig.check_at_rest()


# -- what is learned ---------------------------------------------------------------------------------------------------


def deltas(rig, run, steps, *names):
    """Growth of each count in each step."""
    rows = []
    before = [0] * len(names)
    for _ in range(steps):
        run()
        now = [getattr(rig.stats, name).count for name in names]
        rows.append([after - then for after, then in zip(now, before, strict=True)])
        before = now
    return rows


def test_hardly_anything_comes_on_demand():
    """In the first step too: what was saved last is expected first."""
    rig = Rig(prefetch=1200)
    for misses, inbound in deltas(rig, lambda: chain(rig.context), 5, "misses", "inbound"):
        assert misses <= 1
        assert inbound == 11


def test_a_changed_order_is_learned_again():
    rig = Rig(prefetch=1200)
    x = Data(CPU).leaf(10, 10)

    def step(is_reversed):
        with rig.context:
            ends = []
            for _ in range(3):
                y = x * 1.5
                for _ in range(4):
                    y = y.sin()
                ends.append(y.sum())
            del y
        for end in reversed(ends) if is_reversed else ends:
            end.backward()

    forward = deltas(rig, lambda: step(False), 4, "misses")
    backward = deltas(rig, lambda: step(True), 4, "misses")
    assert forward[-1][0] <= 3
    assert backward[-1][0] <= 3
    assert backward[0][0] - sum(row[0] for row in forward) >= backward[-1][0]


def test_what_backward_needs_at_once_is_not_sent_again():
    rig = Rig(window=1200)
    rows = deltas(rig, lambda: chain(rig.context), 4, "out", "forwarded", "parcels")
    assert rows[0] == [12, 3, 12]
    # The three parcels that backward used from the device are no longer sent.
    assert rows[1:] == [[9, 3, 12]] * 3


def test_sites_whose_memory_is_held_are_learned_and_stay():
    rig = Rig()
    table = Data(CPU, 1).tensor(10, 10)

    def step():
        x = Data(CPU).leaf(10, 10)
        with rig.context:
            loss = (x * table).sin().exp().sin().sum()
        return finish(loss, x)

    expected = step()
    rows = deltas(rig, lambda: assert_equal(step(), expected), 4, "freed_nothing")
    assert [row[0] for row in rows[1:]] == [0, 0, 0]
    assert rig.stats.freed_nothing.count == 2  # a single observation could be an accident
    assert rig.stats.kept[Reason.HELD].count == 3


def test_a_held_site_is_looked_into_again_and_moves_once_it_is_free():
    rig, step = Rig(), 0
    while step < 60:
        x, kept_alive = Data(CPU).leaf(10, 10), []
        with rig.context:
            y = x * 1.5
            if step < 10:
                kept_alive.append(y)
            loss = y.sin().exp().sin().sum()
            del y
        loss.backward()
        step += 1
    assert rig.stats.freed_nothing.count == 2
    assert rig.stats.kept[Reason.HELD].count == 31  # tried again, found free, and moved from then on
    assert rig.stats.out.count == 1 + 2 + 27  # the last activation is sent only once


def test_parts_of_one_storage_that_wait_their_turn_do_not_make_each_other_held():
    rig = Rig(window=400)
    for _ in range(4):
        x = Data(CPU).leaf(8, 200)
        with rig.context:
            whole = x * 1.5
            loss = sum(part.sin().sum() for part in whole.split(1))
            del whole
        loss.backward()
    assert Reason.HELD not in rig.stats.kept


# -- how much is on the device -----------------------------------------------------------------------------------------


class Meter:
    """Most bytes of parcels on the device at any unpack: arrived, and waiting to leave."""

    def __init__(self, rig):
        self._rig = rig
        self.arrived = 0
        self.resident = 0

    def read(self, grad):
        tokens = [ref() for refs in self._rig.engine._by_storage.values() for ref in refs]
        alive = [token.parcel for token in tokens if token is not None]
        self.arrived = max(self.arrived, sum(p.nbytes for p in alive if p.arrival is not None))
        self.resident = max(self.resident, sum(p.nbytes for p in alive if p.source is not None))


@pytest.mark.parametrize("prefetch", [1, 900, 2000])
def test_arrivals_stay_within_prefetch_and_a_parcel(prefetch):
    rig = Rig(prefetch=prefetch)
    meter = Meter(rig)
    for _ in range(4):
        x = Data(CPU).leaf(10, 10)
        with rig.context:
            y = x * 1.5
            for _ in range(12):
                y = y.sin()
                y.register_hook(meter.read)
            loss = y.sum()
            del y
        loss.backward()
    assert meter.arrived <= prefetch + 400
    assert (meter.arrived > 0) == (prefetch > 400)  # fetches ahead if the window allows
    assert rig.stats.inbound.count >= 4 * 11


@pytest.mark.parametrize("window", [1, 1000, 3000])
def test_what_waits_to_leave_stays_within_the_window(window):
    rig = Rig(window=window)
    x = Data(CPU).leaf(10, 10)
    with rig.context:
        y = x * 1.5
        for _ in range(20):
            y = y.sin()
            assert rig.engine._outbound.resident_bytes <= max(window, 400)
        loss = y.sum()
        del y
    assert rig.stats.out.count == 20
    loss.backward()
    rig.check_at_rest()


def test_nothing_is_fetched_on_top_of_a_large_activation():
    """The window opens when the node has freed the large tensor."""
    rig = Rig(prefetch=2000)
    for _ in range(4):
        x = Data(CPU).leaf(10, 10)
        with rig.context:
            y = (x * 1.5).sin().sin()
            wide = y.expand(8, 10, 10).exp()  # 3200 bytes, the last save: the first need of backward
            loss = wide.sum()
            del wide, y
        ahead = []
        loss.grad_fn.next_functions[0][0].register_hook(lambda *_, seen=ahead: seen.append(rig.engine._ahead_bytes))
        loss.backward()
        assert ahead == [0]
    assert rig.stats.forwarded.count == 4


def long_chain(rig, run):
    """A hundred parcels of 400 bytes; `run(number)` after the backward of each."""
    x = Data(CPU).leaf(10, 10)
    with rig.context:
        y = x * 1.5
        for number in range(100):
            y = y.sin()
            y.register_hook(lambda _, number=number: run(number))
        loss = y.sum()
        del y
    loss.backward()


def test_looking_ahead_goes_by_all_that_has_not_left():
    """Most parcels may wait to leave when backward begins. Released parcels are fetched when the window has room."""
    rig = Rig(window=80 * 400, prefetch=90 * 400)
    seen = []
    for _ in range(4):
        before = rig.stats.inbound.count
        seen.clear()
        long_chain(rig, lambda _, before=before: seen.append(rig.stats.inbound.count - before))
    assert seen[1] == 10
    # Needs make room for further fetches, in batches: a share of the prefetched bytes, not of the whole window.
    assert seen[6] > 10
    assert seen[20] == 20
    assert rig.stats.misses.count == 0


def test_what_leaves_between_two_backwards_is_looked_at_again():
    """Looking ahead has passed parcels on the device, and another forward releases them."""
    rig = Rig(window=60 * 400, prefetch=120 * 400)

    def forward(length, first=0):
        x = Data(CPU).leaf(10, 10)
        with rig.context:
            for _ in range(first):
                x.sin()  # different numbers than in the second forward, hence different sites
            y = x * 1.5
            for _ in range(length):
                y = y.sin()
            return x, y

    for _ in range(4):
        misses = rig.stats.misses.count
        _, early = forward(60)
        start, late = forward(30)
        late.sum().backward()
        _, other = forward(45, first=30)
        early.backward(start.grad)
        other.sum().backward()
        del early, late, other
    assert rig.stats.forwarded.count > 0
    assert rig.stats.misses.count == misses


def _explode(rig, x):
    with rig.context:
        y = x * 1.5
        for _ in range(12):
            y = y.sin()
        raise ZeroDivisionError


def test_an_exception_of_the_user_costs_no_room():
    rig = mock_rig(limit_bytes=400 * 13)
    x = Data(CPU).leaf(10, 10)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            _explode(rig, x)
        assert_equal(chain(rig.context), plain_chain())
    assert Reason.STORE_FULL not in rig.stats.kept
    rig.check_at_rest()


def test_frozen_parts_and_partial_backwards_leave_nothing():
    rig = Rig()
    model = make(Transformer, CPU)
    model.layers[0].requires_grad_(False)
    twin = make(Transformer, CPU)
    twin.layers[0].requires_grad_(False)
    for step in range(3):
        with rig.context:
            loss = model(tokens(CPU, step))
        plain = twin(tokens(CPU, step))
        wanted = [model.head.weight, model.layers[2].qkv.weight]
        twins = [twin.head.weight, twin.layers[2].qkv.weight]
        assert_equal(list(torch.autograd.grad(loss, wanted)), list(torch.autograd.grad(plain, twins)))
        del loss, plain
        rig.check_at_rest()
    assert gradients(model) == []
    assert rig.stats.inbound.count > 0
