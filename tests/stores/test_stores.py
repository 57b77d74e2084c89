"""Behaviour of every store on every device."""

import random
import threading
from typing import NamedTuple

import pytest
import torch
from late_device import LateDevice

from ebbtide._devices.cpu import CpuDevice
from ebbtide._devices.sim import SimDevice
from ebbtide._stores import DiskStore, HostStore, MockStore
from ebbtide._stores._scratch import ScratchFile
from ebbtide._types import Device, Store, Wait
from ebbtide._utils.sizes import GIB, KIB, MIB

DEVICES = {
    "cpu": CpuDevice,
    "sim_late": lambda: SimDevice(order="late"),
    "sim_shuffled": lambda: SimDevice(seed=7, order="shuffled"),
    "late": LateDevice,
}
CASES = [
    *(f"{kind}-{device}" for kind in ("host", "mock") for device in ("cpu", "sim_late", "sim_shuffled")),
    *(f"{kind}-{device}" for kind in ("direct", "cached") for device in ("cpu", "late")),
]


class Bench(NamedTuple):
    """A store with the streams of an engine."""

    device: Device
    store: Store
    outbound: object
    inbound: object

    def memory(self, nbytes: int) -> torch.Tensor:
        return self.device.allocate(nbytes, self.device.current_stream())

    def send(self, data: torch.Tensor, block) -> object:
        """Start the copy out of fresh device memory; the memory is freed at once. Returns `landed`."""
        src = self.memory(data.numel()).copy_(data)
        compute = self.device.current_stream()
        self.device.wait(self.outbound, self.device.record(compute), Wait.READY)
        landed = self.store.write(block, src, self.outbound)
        self.device.wait(compute, landed, Wait.LANDED)
        return landed

    def start_fetch(self, block) -> tuple[torch.Tensor, object]:
        dst = self.memory(block.nbytes)
        self.device.wait(self.inbound, self.device.record(self.device.current_stream()), Wait.ROOM)
        return dst, self.store.read(block, dst, self.inbound)

    def fetch(self, block) -> torch.Tensor:
        dst, arrived = self.start_fetch(block)
        self.device.wait(self.device.current_stream(), arrived, Wait.ARRIVED)
        return dst

    def keep(self, data: torch.Tensor):
        """A block with `data` inside."""
        block = self.store.reserve(data.numel())
        assert block is not None
        self.send(data, block)
        return block


@pytest.fixture(params=CASES)
def make_bench(request, folder, monkeypatch):
    """Makes a bench of the case, optionally with a limit."""
    kind, _, device_name = request.param.partition("-")
    device = DEVICES[device_name]()
    made = []

    def make(limit_bytes: int | None = None) -> Bench:
        if kind == "host":
            store = HostStore(device, limit_bytes or GIB)
        elif kind == "mock":
            store = MockStore(device, limit_bytes)
        else:
            if limit_bytes is not None:
                monkeypatch.setattr(ScratchFile, "_spare_bytes", lambda self: limit_bytes - self._nbytes)
            store = DiskStore(device, folder, threads=3)
        made.append(store)
        return Bench(device, store, device.new_stream("out"), device.new_stream("in"))

    if kind == "cached":
        request.getfixturevalue("cached_only")
    yield make
    for store in made:
        store.close()
    if isinstance(device, SimDevice):
        device.finish()
    if not isinstance(device, CpuDevice):
        assert device.faults == []


@pytest.fixture
def bench(make_bench):
    return make_bench()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [1, 511, 512, 4096, 4097, MIB - 1, 4 * MIB, 4 * MIB + 1, 13 * MIB + 4095])
def test_bytes_come_back_as_they_went(bench, nbytes):
    data = pattern(nbytes)
    assert torch.equal(bench.fetch(bench.keep(data)), data)


def test_a_view_with_an_offset_comes_back(bench):
    data = pattern(300 * KIB)
    src = bench.memory(data.numel()).copy_(data)
    block = bench.store.reserve(100_001)
    compute = bench.device.current_stream()
    bench.device.wait(bench.outbound, bench.device.record(compute), Wait.READY)
    landed = bench.store.write(block, src[77 : 77 + 100_001], bench.outbound)
    bench.device.wait(compute, landed, Wait.LANDED)
    assert torch.equal(bench.fetch(block), data[77 : 77 + 100_001])


def test_many_blocks_at_once_do_not_mix(bench):
    sizes = [random.Random(3).choice([1, 600, 5000, 70_000, 700_001]) for _ in range(40)]
    parcels = [pattern(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    blocks = [bench.keep(data) for data in parcels]
    fetched = [bench.start_fetch(block) for block in reversed(blocks)]
    for (dst, arrived), data in zip(fetched, reversed(parcels), strict=True):
        bench.device.wait(bench.device.current_stream(), arrived, Wait.ARRIVED)
        assert torch.equal(dst, data)


def test_reading_is_repeatable(bench):
    data = pattern(2 * MIB + 3)
    block = bench.keep(data)
    assert torch.equal(bench.fetch(block), data)
    assert torch.equal(bench.fetch(block), data)


def test_a_block_can_be_written_again(bench):
    block = bench.keep(pattern(9000, 1))
    bench.fetch(block)
    bench.send(pattern(9000, 2), block)
    assert torch.equal(bench.fetch(block), pattern(9000, 2))


def test_room_given_back_is_reused_behind_its_last_reader(bench):
    first, second = pattern(3 * MIB, 1), pattern(3 * MIB, 2)
    block = bench.keep(first)
    gate = threading.Event()
    if isinstance(bench.device, CpuDevice):
        bench.device.submit(bench.inbound, gate.wait)  # the read is as late as possible
    dst, arrived = bench.start_fetch(block)
    bench.store.give_back(block)
    reused = bench.store.reserve(3 * MIB)
    src = bench.memory(3 * MIB).copy_(second)
    bench.device.wait(bench.outbound, bench.device.record(bench.device.current_stream()), Wait.READY)
    landed = bench.store.write(reused, src, bench.outbound)
    gate.set()
    bench.device.wait(bench.device.current_stream(), landed, Wait.LANDED)
    bench.device.wait(bench.device.current_stream(), arrived, Wait.ARRIVED)
    assert torch.equal(dst, first)
    assert torch.equal(bench.fetch(reused), second)


def test_at_the_limit_there_is_no_room_until_some_comes_back(make_bench):
    bench = make_bench(64 * MIB)
    blocks = [bench.store.reserve(16 * MIB) for _ in range(4)]
    assert None not in blocks
    assert bench.store.reserve(16 * MIB) is None
    bench.store.give_back(blocks[2])
    assert bench.store.reserve(16 * MIB) is not None
    assert bench.store.stats().reserved_bytes <= 64 * MIB


def test_more_than_the_limit_is_refused_and_less_still_taken(make_bench):
    bench = make_bench(64 * MIB)
    assert bench.store.reserve(65 * MIB) is None
    assert bench.store.stats().used_bytes == 0
    data = pattern(5000)
    assert torch.equal(bench.fetch(bench.keep(data)), data)


def test_blocks_are_given_back_by_any_thread(bench):
    blocks = [bench.keep(pattern(10_000)) for _ in range(8)]
    threads = [threading.Thread(target=bench.store.give_back, args=(block,)) for block in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.store.stats().used_bytes == 0


def test_what_is_used_is_counted_and_returns_to_zero(bench):
    assert bench.store.stats().used_bytes == 0
    blocks = [bench.keep(pattern(nbytes)) for nbytes in (1, 4096, 100_000)]
    used_bytes = bench.store.stats().used_bytes
    assert 104_097 <= used_bytes <= 104_097 + 3 * 4096
    assert bench.store.stats().reserved_bytes >= used_bytes
    for block in blocks:
        bench.store.give_back(block)
    assert bench.store.stats().used_bytes == 0


@pytest.mark.parametrize("make_bench", [case for case in CASES if not case.startswith("mock")], indirect=True)
def test_steps_alike_take_no_new_memory(make_bench):
    bench = make_bench()
    choose = random.Random(5)
    sizes = [choose.randrange(1, 200_000) for _ in range(20)]

    def step() -> None:
        blocks = [bench.keep(pattern(nbytes)) for nbytes in sizes]
        for block in reversed(blocks):
            bench.fetch(block)
            bench.store.give_back(block)

    step()
    warm = bench.store.stats()
    for _ in range(3):
        step()
    assert bench.store.stats() == warm


def test_closing_twice_is_closing_once(bench):
    bench.keep(pattern(5000))
    bench.store.close()
    bench.store.close()
    assert bench.store.stats().growths <= 1  # the mock never grows
