"""Readers of host memory: a wait for the latest reader stands for all earlier readers."""

import contextlib

import pytest
import torch
from faults.lines import Lines
from late_device import LateDevice

from ebbtide._devices.cpu import CpuDevice
from ebbtide._devices.sim import SimDevice
from ebbtide._stores import HostStore
from ebbtide._stores._limits import HostMemoryLimit
from ebbtide._types import Wait
from ebbtide._utils.sizes import KIB, MIB

BLOCKS = 4


def memory(device, nbytes=KIB):
    return device.allocate(nbytes, device.current_stream())


def write(device, store, block, lane):
    """Write fresh device memory to `block` on `lane`. Returns the memory and the event that frees the memory."""
    src = memory(device).fill_(block.extent.start % 251)
    device.wait(lane, device.record(device.current_stream()), Wait.READY)
    return src, store.write(block, src, lane)


def read(device, store, block, lane):
    """Read `block` on `lane`, without a wait for the end."""
    dst = memory(device)
    device.wait(lane, device.record(device.current_stream()), Wait.ROOM)
    store.read(block, dst, lane)
    return dst


def filled(device, out):
    store = HostStore(device, 64 * MIB)
    blocks = [store.reserve(KIB) for _ in range(BLOCKS)]
    release(device, [write(device, store, block, out) for block in blocks])
    return store, blocks


def release(device, written):
    for _, landed in written:
        device.wait(device.current_stream(), landed, Wait.LANDED)


def written_again(device, store, blocks, lanes):
    for block in blocks:
        store.give_back(block)
    release(device, [write(device, store, store.reserve(KIB), lane) for lane in lanes])


def test_a_writer_waits_once_for_readers_in_order():
    device = LateDevice()
    out, back = device.new_stream("out"), device.new_stream("in")
    store, blocks = filled(device, out)
    kept = [read(device, store, block, back) for block in blocks]
    device.waits.clear()
    written_again(device, store, blocks, [out] * BLOCKS)
    assert device.waits.count(("out", Wait.REUSE)) == 1
    assert len(kept) == BLOCKS
    assert device.faults == []


def test_a_writer_waits_for_every_later_reader():
    device = LateDevice()
    out, back = device.new_stream("out"), device.new_stream("in")
    store, blocks = filled(device, out)
    for times in (1, 2, 3):
        kept = [read(device, store, block, back) for block in blocks]
        written_again(device, store, blocks, [out] * BLOCKS)
        blocks = [block for block in blocks if block.extent.reader is None]
        assert device.waits.count(("out", Wait.REUSE)) == times
        assert len(kept) == len(blocks) == BLOCKS


@pytest.mark.parametrize("order", ["late", "early", "shuffled"])
@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_lanes_that_take_turns_do_not_race(order, writers, readers):
    device = SimDevice(seed=3, order=order)
    out, back = ([device.new_stream(f"{name}{at}") for at in range(2)] for name in ("out", "in"))
    store, blocks = filled(device, out[0])
    kept = [read(device, store, block, back[at % readers]) for at, block in enumerate(blocks)]
    written_again(device, store, blocks, [out[at % writers] for at in range(BLOCKS)])
    device.finish()
    assert device.faults == []
    assert [t.tolist() for t in kept] == [[block.extent.start % 251] * KIB for block in blocks]


def test_two_reading_lanes_are_ordered_when_room_is_joined():
    device = SimDevice()
    out, first, second = (device.new_stream(name) for name in ("out", "first", "second"))
    store, blocks = filled(device, out)
    kept = [read(device, store, block, lane) for block, lane in zip(blocks, (first,) * 2 + (second,) * 2, strict=True)]
    for block in blocks:
        store.give_back(block)
    whole = store.reserve(64 * MIB)
    write_all = torch.zeros(64 * MIB, dtype=torch.uint8)
    device.wait(out, device.record(device.current_stream()), Wait.READY)
    device.wait(device.current_stream(), store.write(whole, write_all, out), Wait.LANDED)
    device.finish()
    assert device.faults == []
    assert len(kept) == BLOCKS


def test_an_interrupt_at_any_line_of_a_growth_loses_no_memory():
    def interrupt():
        raise KeyboardInterrupt

    def grown(at):
        limit = HostMemoryLimit(2**20)
        device = CpuDevice()
        store, lane = HostStore(device, limit, 512), device.new_stream("lane")
        lines = Lines({at}, interrupt)
        taken = []
        with contextlib.suppress(KeyboardInterrupt), lines:
            taken.append(store.reserve(512))
        for block in taken:
            store.give_back(block)
        for nbytes in (3000, 700, 5000):
            data = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
            block, back = store.reserve(nbytes), torch.empty_like(data)
            store.write(block, data, lane).result()
            store.read(block, back, lane).result()
            assert torch.equal(back, data)
            store.give_back(block)
        assert store.stats().used_bytes == 0
        assert store.stats().reserved_bytes == sum(map(len, store._memory))
        # An interrupt in the limit itself may cost the size of a slab: nobody knows whether the room was taken.
        assert limit._taken_bytes == store.stats().reserved_bytes or lines.place.startswith("_stores/_limits.py")
        return lines.count

    def closed(at):
        limit = HostMemoryLimit(2**20)
        store = HostStore(CpuDevice(), limit, 512)
        with contextlib.suppress(KeyboardInterrupt), Lines({at}, interrupt) as lines:
            store.reserve(512)
        store.close()
        assert limit._taken_bytes == 0 or lines.place.startswith("_stores/_limits.py")

    lines = grown(10**9)
    assert lines > 30
    for at in range(lines):
        grown(at)
        closed(at)
