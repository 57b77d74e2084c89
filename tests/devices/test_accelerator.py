"""What the device object of an accelerator decides itself. (What needs a GPU to run is in tests/gpu.)"""

import pytest

from ebbtide._errors import StoreError
from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import HostEvent
from ebbtide.types import Wait


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
    return object.__new__(AcceleratorDevice)  # making a real one needs a GPU


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


def test_a_copy_that_failed_is_told_however_often_it_was_asked(device):
    event, stream = HostEvent(), Stream()
    event.finish(error=OSError("broken"))
    assert device.is_done(event)
    with pytest.raises(StoreError, match="broken"):
        device.wait(stream, event, Wait.ARRIVED)
    assert stream.waits == []
