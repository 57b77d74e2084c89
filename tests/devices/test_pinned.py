"""Host memory registered with a driver: whole, on huge pages, until the last tensor dies."""

import gc

import pytest
import torch

from ebbtide._devices.pinned import HUGE_PAGE_BYTES, pinned_bytes, registered_bytes


class Driver:
    def __init__(self, agrees=True):
        self.agrees = agrees
        self.known = {}

    def register(self, address, nbytes):
        assert address not in self.known
        if self.agrees:
            self.known[address] = nbytes
        return self.agrees

    def unregister(self, address):
        del self.known[address]


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 7])
def test_all_bytes_are_registered_until_the_last_tensor_dies(nbytes):
    driver = Driver()
    memory = registered_bytes(nbytes, driver.register, driver.unregister)
    assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
    assert driver.known == {memory.data_ptr(): nbytes}
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    memory.fill_(3)
    part = memory[-5:]
    del memory
    gc.collect()
    assert part.tolist() == [3] * 5
    assert len(driver.known) == 1
    del part
    gc.collect()
    assert driver.known == {}


def test_after_a_refusal_no_call_follows():
    driver = Driver(agrees=False)
    assert registered_bytes(HUGE_PAGE_BYTES, driver.register, driver.unregister) is None
    gc.collect()
    assert driver.known == {}


def test_a_machine_without_memory_says_so():
    driver = Driver()
    with pytest.raises(MemoryError):
        registered_bytes(2**55, driver.register, driver.unregister)


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_other_devices_and_small_sizes_are_left_to_torch(device):
    assert pinned_bytes(HUGE_PAGE_BYTES, torch.device(device)) is None
    assert pinned_bytes(HUGE_PAGE_BYTES - 1, torch.device("cuda")) is None
