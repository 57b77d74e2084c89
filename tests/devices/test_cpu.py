"""RAM as the device: host work in order, and errors raised in waiting threads."""

import gc
import threading
import weakref

import pytest
import torch

from ebbtide._devices.cpu import CpuDevice, HostEvent, HostStream
from ebbtide._errors import StoreError
from ebbtide._types import Wait


@pytest.fixture
def device():
    return CpuDevice()


def fail():
    raise OSError("disk on fire")


def thread_of(stream: HostStream) -> threading.Thread:
    """The worker thread of `stream`."""
    return stream.submit(threading.current_thread).result()


# -- streams -------------------------------------------------------------------------------------------------------


def test_work_runs_in_order_and_one_at_a_time():
    stream, done = HostStream("lane"), []
    for at in range(200):
        stream.submit(lambda at=at: done.append((at, threading.get_ident())))
    stream.submit(lambda: None).result()
    assert [at for at, _ in done] == list(range(200))
    assert len({thread for _, thread in done}) == 1


def test_streams_run_beside_each_other():
    one, other = HostStream("one"), HostStream("other")
    gate = threading.Event()
    waiting = one.submit(gate.wait)
    assert other.submit(gate.is_set).result() is False
    gate.set()
    assert waiting.result() is True


def test_an_event_carries_the_returned_value():
    event = HostStream("lane").submit(lambda: 42)
    assert event.result() == 42
    assert event.is_done()


def test_an_error_is_raised_in_every_wait():
    event = HostStream("lane").submit(fail)
    for _ in range(2):
        with pytest.raises(StoreError, match="disk on fire") as raised:
            event.result()
        assert isinstance(raised.value.__cause__, OSError)


def test_work_behind_an_error_runs():
    stream = HostStream("lane")
    stream.submit(fail)
    assert stream.submit(lambda: "still here").result() == "still here"


def test_a_stream_has_no_thread_before_its_first_work():
    stream = HostStream("idle-in-this-test")
    assert "ebbtide-idle-in-this-test" not in {thread.name for thread in threading.enumerate()}
    assert thread_of(stream).name == "ebbtide-idle-in-this-test"
    assert thread_of(stream).daemon


def test_many_threads_start_one():
    stream, barrier, ran_on = HostStream("lane"), threading.Barrier(8), []

    def submit() -> None:
        barrier.wait()
        ran_on.append(thread_of(stream))

    submitters = [threading.Thread(target=submit) for _ in range(8)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    assert len(ran_on) == 8
    assert len(set(ran_on)) == 1


def test_the_thread_ends_when_the_stream_dies():
    stream = HostStream("lane")
    thread = thread_of(stream)
    assert thread.is_alive()
    del stream
    gc.collect()
    thread.join()
    assert not thread.is_alive()


def test_submitted_work_runs_even_if_the_stream_dies():
    stream, gate = HostStream("lane"), threading.Event()
    stream.submit(gate.wait)
    last = stream.submit(lambda: "done")
    del stream
    gc.collect()
    gate.set()
    assert last.result() == "done"


def test_work_that_has_run_holds_nothing():
    stream, is_freed = HostStream("lane"), threading.Event()
    memory = torch.zeros(8)
    weakref.finalize(memory, is_freed.set).atexit = False
    stream.submit(memory.sum).result()
    del memory
    assert is_freed.wait()


@pytest.mark.parametrize("returned", [None, 42])
def test_memory_of_work_is_free_when_its_event_passes(returned):
    stream, gate, was_done = HostStream("lane"), threading.Event(), []
    memory = torch.zeros(8)
    submitted = {}
    weakref.finalize(memory, lambda: was_done.append(submitted["event"].is_done())).atexit = False

    def work(memory=memory):
        gate.wait()
        assert memory.sum() == 0
        return returned

    submitted["event"] = stream.submit(work)
    del memory, work
    gate.set()
    assert submitted["event"].result() == returned
    assert was_done == [False]


# -- the device ----------------------------------------------------------------------------------------------------


def test_compute_is_the_calling_thread(device):
    stream = device.current_stream()
    assert stream is None
    assert device.is_done(device.record(stream))


def test_an_event_of_a_lane_passes_behind_its_work(device):
    lane, gate = device.new_stream("lane"), threading.Event()
    device.submit(lane, gate.wait)
    event = device.record(lane)
    assert not device.is_done(event)
    gate.set()
    device.wait(None, event, Wait.LANDED)
    assert device.is_done(event)


def test_compute_that_waits_gets_the_error(device):
    failed = device.submit(device.new_stream("lane"), fail)
    with pytest.raises(StoreError, match="disk on fire"):
        device.wait(None, failed, Wait.ARRIVED)


def test_a_lane_waits_for_another(device):
    first, second, done = device.new_stream("first"), device.new_stream("second"), []
    gate = threading.Event()
    device.submit(first, gate.wait)
    written = device.submit(first, lambda: done.append("first"))
    device.wait(second, written, Wait.REUSE)
    reused = device.submit(second, lambda: done.append("second"))
    gate.set()
    reused.result()
    assert done == ["first", "second"]


def test_a_lane_that_waits_for_a_failure_goes_on(device):
    first, second = device.new_stream("first"), device.new_stream("second")
    gate = threading.Event()
    device.submit(first, gate.wait)
    device.wait(second, device.submit(first, fail), Wait.REUSE)
    gate.set()
    assert device.submit(second, lambda: "goes on").result() == "goes on"


def test_copies_run_on_the_lane_and_hold_their_memory(device):
    lane, gate = device.new_stream("lane"), threading.Event()
    src, dst = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    device.submit(lane, gate.wait)
    device.copy(dst, src, lane)
    copied = device.record(lane)
    device.free_after(src.untyped_storage(), copied, None)
    del src
    assert dst.sum() == 0
    gate.set()
    device.wait(None, copied, Wait.ARRIVED)
    assert dst.tolist() == list(range(9))


def test_time_runs_from_event_to_event(device):
    start, end = HostEvent(), HostEvent()
    start.finish()
    end.finish()
    assert device.seconds_between(start, end) == end.passed_at - start.passed_at
    assert device.seconds_between(start, end) >= 0


def test_memory_has_the_size_asked_for(device):
    assert device.allocate(1001, None).shape == (1001,)
    assert device.host_bytes(77).shape == (77,)
    assert device.host_bytes(77).dtype == torch.uint8
