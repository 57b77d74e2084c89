"""Measures a machine: copies to a store and back, pinning, host costs. Words and verdicts are the commands'."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ebbtide._devices import device_for, name_of
from ebbtide._devices.sysfs import Lanes, lanes_of, node_of
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._model.recipe_probe import probe_recipes
from ebbtide._profiling.link_probe import probe_duplex, probe_link
from ebbtide._stores import factory_for
from ebbtide._stores._limits import default_host_limit_bytes
from ebbtide._stores.host import HostStore
from ebbtide._types import Device, Store
from ebbtide._utils.sizes import GIB


class CopyRates(NamedTuple):
    """Bytes per second: out alone, back alone, and in each direction while both copy."""

    out: float
    back: float
    duplex: float

    def __str__(self) -> str:
        out, back, duplex = (f"{rate / 1e9:.2f}" for rate in self)
        return f"{out} GB/s out, {back} back, {duplex} each way at once"

    def figures(self) -> dict[str, float | None]:
        return {f"{name}_bytes_per_s": rate for name, rate in self._asdict().items()}


@dataclass(frozen=True)
class MeasuredDevice:
    """An accelerator, and its way to host memory.

    Attributes:
        name: as torch names the device.
        product: "NVIDIA H200".
        free_bytes, total_bytes: of device memory.
        link: None: host memory has no room for the copies.
        lanes: PCIe lanes while the link was measured; None: unknown.
        node: NUMA node; None: unknown.
        pinned_bytes: host memory pinned at once in a test, 0 if refused.
        pin_s_per_gib: seconds to pin 1 GiB; None if refused.
    """

    name: str
    product: str
    free_bytes: int
    total_bytes: int
    link: CopyRates | None
    lanes: Lanes | None
    node: int | None
    pinned_bytes: int
    pin_s_per_gib: float | None


def measure_device(device: torch.device) -> MeasuredDevice:
    """Measure an accelerator. Raises RuntimeError if it is full or its driver fails."""
    own, room_bytes = device_for(device), default_host_limit_bytes()
    free_bytes, total_bytes = torch.accelerator.memory.get_memory_info(device)
    link = link_rates(own, HostStore(own, room_bytes))
    lanes = lanes_of(device)  # at once: an idle GPU switches lanes off
    pinned_bytes = min(GIB, room_bytes)
    try:
        seconds = _pinning_s(own, pinned_bytes)
    except MemoryError:
        pinned_bytes, seconds = 0, None
    return MeasuredDevice(
        name=str(device),
        product=name_of(device),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        link=link,
        lanes=lanes,
        node=node_of(device),
        pinned_bytes=pinned_bytes,
        pin_s_per_gib=None if seconds is None else seconds * GIB / pinned_bytes,
    )


def link_rates(device: Device, store: Store) -> CopyRates | None:
    """Rates between `device` and `store`, which is closed; None if the store has no room for two copies of 1 MiB."""
    engine = Engine(device, store)
    try:
        costs, duplex = probe_link(engine), probe_duplex(engine)
    finally:
        engine.close()
    return None if costs is None or duplex is None else CopyRates(costs.out, costs.back, duplex)


class HostCosts(NamedTuple):
    """Seconds of the host for a saved tensor, in forward and backward: kept by a region that moves others, moved out
    and back, and recomputed."""

    kept: float
    moved: float
    recomputed: float


def host_costs(device: torch.device) -> HostCosts:
    """Measure the costs by a small module on `device`; on the CPU the copies of the small tensors count, too."""
    engines = Engines(factory_for("mock" if device.type == "cpu" else "host", None))
    engine = engines.on(device)
    assert isinstance(engine, Engine)
    try:
        costs = probe_recipes(engines, lambda _: True, engine)
    finally:
        engines.close()
    return HostCosts(2 * costs.hook_s, 2 * (costs.hook_s + costs.move_s), costs.save_s)


def _pinning_s(device: Device, nbytes: int) -> float:
    began = time.perf_counter()
    pinned = device.host_bytes(nbytes)
    seconds = time.perf_counter() - began
    del pinned  # freeing takes time, too
    return seconds
