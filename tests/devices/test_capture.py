"""The number of a capture and the captured view of a GPU, tested without a GPU."""

import ctypes

import pytest
import torch

from ebbtide._devices import accelerator, capture
from ebbtide._devices.accelerator import AcceleratorDevice, CapturedDevice
from ebbtide._types import Device

NONE, ACTIVE, INVALIDATED = range(3)


class Driver:
    """cuStreamGetCaptureInfo of a machine with the streams given, by handle."""

    def __init__(self, streams: dict[int, tuple[int, int]]) -> None:
        self.streams = streams

    def __call__(self, handle, status, number) -> int:
        if handle not in self.streams:
            return 400  # CUDA_ERROR_INVALID_HANDLE
        status._obj.value, number._obj.value = self.streams[handle]
        return 0


class Stream(int):
    """A stream with its number as handle."""


@pytest.fixture
def driver(monkeypatch):
    driver = Driver({})
    monkeypatch.setattr(capture, "_stream_capture_info", lambda: driver)
    monkeypatch.setattr(capture, "_handle", int)
    return driver


def gpu(monkeypatch, current: Stream, kind=AcceleratorDevice, **attributes):
    """A device object with the stream `current`; __init__ needs a GPU."""
    monkeypatch.setattr(accelerator, "current_stream", lambda index: current)
    monkeypatch.setattr(accelerator, "cuda_is_capturing", lambda: capture.capture_of(current) is not None)
    device = object.__new__(kind)
    for name, value in {"_index": 0, "_asks_for_capture": True, **attributes}.items():
        setattr(device, name, value)
    return device


def test_number_of_a_capture(driver):
    number = 2**63 + 5
    driver.streams = {1: (ACTIVE, number), 2: (NONE, 0), 3: (INVALIDATED, 9)}
    assert [capture.capture_of(Stream(at)) for at in range(5)] == [None, number, None, None, None]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build without CUDA")
def test_without_cuda_the_driver_is_not_asked():
    assert capture.capture_of(torch.Stream(device="cpu")) is None


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_machine_without_the_function_cannot_tell(monkeypatch, error):
    def load(name):
        raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", load)
    capture._stream_capture_info.cache_clear()
    try:
        assert capture.capture_of(torch.Stream(device="cpu")) is None
    finally:
        capture._stream_capture_info.cache_clear()


def test_eager_and_captured_views_match_different_streams(monkeypatch, driver):
    stream = Stream(1)
    driver.streams = {1: (NONE, 0)}
    eager = gpu(monkeypatch, stream)
    inside = gpu(monkeypatch, stream, CapturedDevice, _capture=7)
    assert eager.supports_timing
    assert not inside.supports_timing
    assert (eager.matches_capture(), inside.matches_capture()) == (True, False)
    driver.streams = {1: (ACTIVE, 7)}
    assert (eager.matches_capture(), inside.matches_capture()) == (False, True)
    assert eager.capture_id() == 7
    driver.streams = {1: (ACTIVE, 8)}
    assert (eager.matches_capture(), inside.matches_capture()) == (False, False)


def test_the_end_of_a_parcel_never_crosses_the_border(monkeypatch, driver):
    waits = []
    monkeypatch.setattr(AcceleratorDevice, "wait", lambda self, stream, event, why: waits.append((self, stream)))
    driver.streams = {1: (NONE, 0), 2: (ACTIVE, 7), 3: (ACTIVE, 8)}
    eager = gpu(monkeypatch, Stream(2))
    inside = gpu(monkeypatch, Stream(2), CapturedDevice, _capture=7)
    for device in (eager, inside):
        for owner in (1, 2, 3):
            device.free_after(None, object(), Stream(owner))
    assert waits == [(eager, 1), (inside, 2)]


def test_lanes_of_a_capture_are_streams_of_their_own(monkeypatch, driver):
    pool = iter([5, 1, 5, 6])
    monkeypatch.setattr(AcceleratorDevice, "new_stream", lambda self, name: Stream(next(pool)))
    inside = gpu(monkeypatch, Stream(1), CapturedDevice, _lanes=[])
    assert [inside.new_stream("outbound"), inside.new_stream("inbound")] == [5, 6]


def test_two_graphs_for_forward_and_backward_get_no_view(monkeypatch):
    device = gpu(monkeypatch, Stream(1))
    monkeypatch.setattr(accelerator, "CapturedDevice", lambda *args: args)
    device.torch_device = torch.device("cuda", 0)

    def make_graphed_callables():
        return device.for_capture(7)

    assert device.for_capture(7) == (device.torch_device, 7)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed_callables)
    assert torch.cuda.make_graphed_callables() is None


@pytest.mark.parametrize("kind", [AcceleratorDevice, CapturedDevice])
def test_both_views_are_devices(kind):
    methods = {name for name in vars(Device) if not name.startswith("_")} - {
        "torch_device",
        "supports_timing",
        "is_async",
    }
    assert methods <= set(dir(kind))
