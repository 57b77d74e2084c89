"""The store for tests: failures and delays on demand."""

import threading

import pytest
import torch

from ebbtide._devices.cpu import CpuDevice
from ebbtide._errors import StoreError, StoreFullError
from ebbtide._stores import MockStore


def fail_at(operation, error):
    def fail(at):
        if at == operation:
            raise error

    return fail


def walk(store, went_well):
    """Reserve, write and read; append each success to `went_well`."""
    stream = CpuDevice().new_stream("out")
    block = store.reserve(4)
    went_well.append("reserve")
    store.write(block, torch.ones(4, dtype=torch.uint8), stream)
    went_well.append("write")
    store.read(block, torch.zeros(4, dtype=torch.uint8), stream).result()
    went_well.append("read")


@pytest.mark.parametrize(
    ("operation", "before"), [("reserve", []), ("write", ["reserve"]), ("read", ["reserve", "write"])]
)
def test_failures_of_each_operation(operation, before):
    went_well = []
    with pytest.raises(StoreError, match=f"{operation} failed: cable pulled"):
        walk(MockStore(CpuDevice(), fail=fail_at(operation, OSError("cable pulled"))), went_well)
    assert went_well == before


def test_fail_is_called_before_each_operation():
    asked, went_well = [], []
    walk(MockStore(CpuDevice(), fail=asked.append), went_well)
    assert asked == went_well == ["reserve", "write", "read"]


def test_a_full_store_stays_a_full_store():
    store = MockStore(CpuDevice(), fail=fail_at("reserve", StoreFullError("no room")))
    with pytest.raises(StoreFullError, match="no room"):
        store.reserve(1)
    assert store.stats().used_bytes == 0


def test_further_errors_pass_unchanged():
    store = MockStore(CpuDevice(), fail=fail_at("reserve", KeyError("a bug of the test")))
    with pytest.raises(KeyError, match="a bug of the test"):
        store.reserve(1)


def test_a_wait_in_fail_delays_the_store():
    gate = threading.Event()
    store = MockStore(CpuDevice(), fail=lambda operation: gate.wait())
    reserved = []
    thread = threading.Thread(target=lambda: reserved.append(store.reserve(7)))
    thread.start()
    assert reserved == []
    gate.set()
    thread.join()
    assert reserved[0].nbytes == 7


def test_is_closed():
    store = MockStore(CpuDevice(), limit_bytes=10)
    assert not store.is_closed
    store.close()
    assert store.is_closed
    assert store.stats().limit_bytes == 10
