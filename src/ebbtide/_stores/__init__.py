"""Stores of parcels, one file per kind."""

from pathlib import Path

import torch

from ebbtide._errors import ConfigError
from ebbtide._stores._limits import HostMemoryLimit
from ebbtide._stores.disk import DiskStore
from ebbtide._stores.host import HostStore
from ebbtide._stores.mock import MockStore
from ebbtide._types import Device, Store, StoreFactory
from ebbtide._utils import env

__all__ = ["DiskStore", "HostStore", "MockStore", "factory_for", "serves"]


def factory_for(store: str | StoreFactory | None, host_limit_bytes: int | None) -> StoreFactory:
    """The function that makes stores for an entry point.

    Args:
        store: "host", "disk" or "disk:/folder", "mock", a factory of your own, or None: host memory for the models
            of an accelerator, disk for models on the CPU.
        host_limit_bytes: maximum of host memory, for all devices together; None: a share of free memory.
    """
    limit = HostMemoryLimit(host_limit_bytes)
    if store is None:
        return lambda device: _make("disk" if device.torch_device.type == "cpu" else "host", device, limit)
    if callable(store):
        return store
    check_store(store)
    return lambda device: _make(store, device, limit)


def serves(store: str | StoreFactory | None, device: torch.device) -> bool:
    """Whether moving saved tensors from `device` to `store` makes sense.

    Host memory frees nothing for a tensor in host memory. By default a machine with an accelerator offloads only from
    the accelerator, and a machine without offloads models on the CPU.
    """
    if device.type != "cpu":
        current = torch.accelerator.current_accelerator(check_available=True)
        return current is not None and current.type == device.type
    if store is None:
        return not torch.accelerator.is_available()
    return callable(store) or store.partition(":")[0] != "host"


def check_store(store: str) -> None:
    """Raise ConfigError for an impossible store, at the entry point, before anything runs."""
    kind, _, folder = store.partition(":")
    if kind not in ("host", "disk", "mock") or (folder and kind != "disk"):
        names = "'host', 'disk', 'disk:/folder', 'mock'"
        raise ConfigError(f"store={store!r} is not a store: write one of {names}, or a function of a device")
    if kind == "disk":
        DiskStore.check_folder(_folder_of(store))


def _folder_of(store: str) -> Path:
    return Path(store.partition(":")[2] or env.disk_folder())


def _make(store: str, device: Device, limit: HostMemoryLimit) -> Store:
    if store == "host":
        return HostStore(device, limit)
    if store == "mock":
        return MockStore(device, limit.limit_bytes)
    return DiskStore(device, _folder_of(store))
