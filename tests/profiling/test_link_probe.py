"""The probe of the link, without a GPU: its copies are ordered, and its memory goes back."""

import pytest

from ebbtide._devices.sim import SimDevice
from ebbtide._engine.engine import Engine
from ebbtide._profiling.link_probe import probe_duplex, probe_link
from ebbtide._stores.host import HostStore
from ebbtide._utils.sizes import MIB


class AsyncSim(SimDevice):
    """A device that runs kernels beside copies."""

    is_async = True


@pytest.mark.parametrize("order", ["late", "early", "shuffled"])
def test_copies_beside_kernels_are_ordered(order):
    device = AsyncSim(seed=1, order=order)
    store = HostStore(device, 4 * MIB)
    costs = probe_link(Engine(device, store))
    device.finish()
    assert device.faults == []
    assert costs.interference == 0  # the simulator has no time: nothing is lost
    assert store.stats().used_bytes == 0


@pytest.mark.parametrize("order", ["late", "early", "shuffled"])
def test_copies_in_both_directions_at_once_are_ordered(order):
    device = AsyncSim(seed=1, order=order)
    store = HostStore(device, 4 * MIB)
    assert probe_duplex(Engine(device, store)) > 0
    device.finish()
    assert device.faults == []
    assert store.stats().used_bytes == 0


def test_a_device_that_computes_synchronously_loses_nothing_beside_copies():
    device = SimDevice()
    assert probe_link(Engine(device, HostStore(device, 4 * MIB))).interference == 0


def test_a_store_without_room_has_no_costs():
    device = AsyncSim()
    engine = Engine(device, HostStore(device, MIB))
    assert probe_link(engine) is probe_duplex(engine) is None
