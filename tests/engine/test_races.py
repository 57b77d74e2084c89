"""Random programs on the adversarial simulator, and proof that the simulator notices every missing wait.

Each mutation removes a wait, keep-alive or check from the engine. The suite has to fail for every mutation.
"""

import contextlib
import warnings

import pytest
import torch
from capturing import CapturedSim, CapturingSim, IllegalError
from support import explore, explore_captured

from ebbtide._devices.sim import SimDevice
from ebbtide._engine import hooks
from ebbtide._engine.engine import Engine
from ebbtide._engine.lane import Inbound, Outbound
from ebbtide._engine.parcel import Parcel, Ticket
from ebbtide._stores.host import HostStore
from ebbtide._types import Wait

SEEDS = 1200
CHUNK = 100


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny programs move nothing now and then, and reentrant checkpoints grumble
        yield
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SEEDS // 4, CHUNK))
def test_captured_programs_equal_their_plain_twins(first):
    assert [found for seed in range(first, first + CHUNK) if (found := explore_captured(seed))] == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_programs_equal_their_plain_twins_and_race_nowhere(first):
    assert [found for seed in range(first, first + CHUNK) if (found := explore(seed))] == []


# -- mutations ---------------------------------------------------------------------------------------------------------


def no_wait(why):
    def mutate(patch):
        wait = SimDevice.wait
        patch(SimDevice, "wait", lambda self, s, e, w: None if w is why else wait(self, s, e, w))

    mutate.__name__ = f"no wait: {why.name}"
    return mutate


def source_dropped_when_sent(patch):
    join = Outbound.join

    def mutant(self, parcel):
        join(self, parcel)
        if parcel.landed is not None:
            self.leave(parcel)
            parcel.release()

    patch(Outbound, "join", mutant)


def source_dropped_at_death(patch):
    patch(Outbound, "abandon", lambda self, parcel: None)


def arrival_dropped_at_death(patch):
    patch(Inbound, "abandon", lambda self, parcel: None)


def saving_streams_are_not_marked(patch):
    patch(SimDevice, "mark_used", lambda self, t, stream: None)


def block_given_back_when_released(patch):
    release = Outbound._release

    def mutant(self, parcel):
        released = release(self, parcel)
        if released:
            self._store.give_back(parcel.block)
        return released

    patch(Outbound, "_release", mutant)
    free = Engine.free

    def free_without_block(self, parcel):
        parcel.forget_copy()
        free(self, parcel)

    patch(Engine, "free", free_without_block)


def last_reader_forgotten(patch):
    read = HostStore.read

    def mutant(self, block, dst, stream):
        arrived = read(self, block, dst, stream)
        block.extent.reader = None
        return arrived

    patch(HostStore, "read", mutant)


def other_streams_share_the_owners_copy(patch):
    def mutant(self, parcel, reader):
        if parcel.arrival is None:
            self.fetch([parcel])
        self._device.wait(reader, parcel.arrived, Wait.ARRIVED)
        return parcel.arrival

    patch(Inbound, "fetch_for", mutant)


def parcel_shared_whatever_the_version(patch):
    init = Parcel.__init__

    class AnyVersion(int):
        __eq__ = lambda mine, other: True  # noqa: E731
        __hash__ = int.__hash__

    def mutant(self, *args):
        init(self, *args)
        self.version = AnyVersion(self.version)

    patch(Parcel, "__init__", mutant)


def parcel_shared_whatever_the_range(patch):
    find = Engine._find
    patch(Engine, "_find", lambda self, s, v, span: find(self, s, v, span._replace(start=0, nbytes=0)))


def moved_tensors_unchecked(patch):
    patch(Ticket, "check", lambda self: None)


def kept_tensors_unchecked(patch):
    patch(hooks, "kept_tensor", lambda kept: kept[0])


MUTATIONS = [
    *(no_wait(why) for why in Wait if why not in (Wait.ABANDONED, Wait.JOINED)),
    source_dropped_when_sent,
    source_dropped_at_death,
    arrival_dropped_at_death,
    saving_streams_are_not_marked,
    block_given_back_when_released,
    last_reader_forgotten,
    other_streams_share_the_owners_copy,
    parcel_shared_whatever_the_version,
    parcel_shared_whatever_the_range,
    moved_tensors_unchecked,
    kept_tensors_unchecked,
    no_wait(Wait.ABANDONED),
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_caught(mutate, monkeypatch):
    mutate(monkeypatch.setattr)
    caught = None
    for seed in range(SEEDS):
        try:
            caught = explore(seed)
        except (AssertionError, RuntimeError, IndexError) as error:  # the engine's own checks count too
            caught = repr(error)
        if caught:
            break
    assert caught, f"{mutate.__name__} went unnoticed in {SEEDS} programs"


def parcels_of_others_fetched_ahead(patch):
    patch(Engine, "_may_fetch", lambda self, parcel, owner_stream: parcel.may_be_fetched)


def captures_have_no_engine(patch):
    patch(CapturingSim, "matches_capture", lambda self: True)


def captures_use_the_room_of_all(patch):
    patch(HostStore, "arena", lambda self, device: self)


def captures_are_timed(patch):
    patch(CapturedSim, "supports_timing", True)


def what_dies_waits_across_the_border(patch):
    patch(CapturingSim, "free_after", SimDevice.free_after)


def what_dies_late_waits_for_the_capture(patch):
    patch(CapturedSim, "free_after", lambda self, storage, event, owner: self.wait(owner, event, Wait.ABANDONED))


CAPTURE_MUTATIONS = [
    no_wait(Wait.JOINED),
    parcels_of_others_fetched_ahead,
    captures_have_no_engine,
    captures_use_the_room_of_all,
    captures_are_timed,
    what_dies_waits_across_the_border,
    what_dies_late_waits_for_the_capture,
]


@pytest.mark.parametrize("mutate", CAPTURE_MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_mutation_of_captures_is_caught(mutate, monkeypatch):
    mutate(monkeypatch.setattr)
    caught = None
    for seed in range(SEEDS):
        try:
            caught = explore_captured(seed)
        except (AssertionError, RuntimeError, IllegalError) as error:
            caught = repr(error)
        if caught:
            break
    assert caught, f"{mutate.__name__} went unnoticed in {SEEDS} programs"


def test_every_wait_has_a_mutation():
    assert {f"no wait: {why.name}" for why in Wait} <= {m.__name__ for m in (*MUTATIONS, *CAPTURE_MUTATIONS)}


def test_the_checker_sees_a_missing_wait():
    device = SimDevice()
    lane = device.new_stream("lane")
    with contextlib.nullcontext():
        source = torch.ones(8, dtype=torch.uint8)
        target = device.host_bytes(8)
        device.record(device.current_stream())
        device.copy(target, source, lane)
        device.finish()
    assert any("not ordered after" in fault for fault in device.faults)
