"""Decisions of the device object of an accelerator. (Tests on a GPU are in tests/gpu.)"""

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ebbtide._devices import accelerator
from ebbtide._devices.accelerator import AcceleratorDevice, CapturedDevice, EventPool
from ebbtide._devices.cpu import HostEvent
from ebbtide._errors import StoreError
from ebbtide._types import Wait


class Event:
    def __init__(self, has_passed=False):
        self.has_passed = has_passed
        self.recorded = []

    def record(self, stream):
        self.recorded.append(stream)

    def query(self):
        return self.has_passed


class Stream:
    def __init__(self):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)


@pytest.fixture
def device():
    return object.__new__(AcceleratorDevice)  # __init__ needs a GPU


@pytest.mark.parametrize("has_passed", [True, False])
def test_only_an_event_that_was_seen_to_have_passed_needs_no_wait(device, has_passed):
    seen, unseen = Event(has_passed), Event(True)
    stream = Stream()
    assert device.is_done(seen) is has_passed
    device.wait(stream, seen, Wait.ARRIVED)
    device.wait(stream, unseen, Wait.ARRIVED)
    assert stream.waits == ([unseen] if has_passed else [seen, unseen])


def test_an_event_that_passes_later_is_waited_for(device):
    event, other, stream = Event(False), Event(True), Stream()
    assert not device.is_done(event)
    assert device.is_done(other)
    event.has_passed = True
    device.wait(stream, event, Wait.LANDED)
    assert stream.waits == [event]


def test_a_failed_copy_raises_also_after_queries(device):
    event, stream = HostEvent(), Stream()
    event.finish(error=OSError("broken"))
    assert device.is_done(event)
    with pytest.raises(StoreError, match="broken"):
        device.wait(stream, event, Wait.ARRIVED)
    assert stream.waits == []


def test_an_event_without_references_is_recorded_again():
    pool = EventPool(Event, age=4)
    made = {id(pool.take()) for _ in range(4)}
    assert {id(pool.take()) for _ in range(40)} <= made


def test_an_event_with_references_is_never_recorded_again():
    pool = EventPool(Event, age=4)
    held = [pool.take() for _ in range(3)]
    taken = [id(pool.take()) for _ in range(40)]
    assert not {id(event) for event in held} & set(taken)
    assert len(set(taken)) <= 4


def test_a_device_holds_the_event_seen_to_have_passed(device):
    device._events = EventPool(Event, age=2)
    event = device.record("lane")
    event.has_passed = True
    assert device.is_done(event)
    seen = id(event)
    del event
    assert seen not in [id(device.record("lane")) for _ in range(10)]


def test_a_pool_keeps_no_more_events_than_its_age():
    pool = EventPool(Event, age=4)
    held = [pool.take() for _ in range(10)]
    alive = [weakref.ref(event) for event in held]
    del held
    assert sum(ref() is not None for ref in alive) <= 4


def test_no_two_threads_get_one_event():
    pool = EventPool(Event, age=16)
    twice = []

    def take():
        for _ in range(3000):
            event = pool.take()
            event.record(threading.get_ident())
            before = len(event.recorded)
            other = pool.take()
            if other is event or len(event.recorded) != before:
                twice.append(event)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []


def test_a_capture_records_each_event_once():
    device = object.__new__(CapturedDevice)
    device._new_event = Event
    events = [id(event) for event in [device.record("lane") for _ in range(3)]]
    assert len(set(events)) == 3


def test_threads_that_touch_host_memory_run_near_the_gpu(device, monkeypatch):
    """The kernel places a page where the first thread to touch the page runs, and threads inherit their CPUs."""
    before = os.sched_getaffinity(0)
    device.torch_device, device._near_cpus = torch.device("cuda", 0), {min(before)}

    def pinned_bytes(nbytes, device):
        with ThreadPoolExecutor(1) as pool:
            return [os.sched_getaffinity(0), pool.submit(os.sched_getaffinity, 0).result()]

    monkeypatch.setattr(accelerator, "pinned_bytes", pinned_bytes)
    assert device.host_bytes(8) == [{min(before)}] * 2
    assert os.sched_getaffinity(0) == before
