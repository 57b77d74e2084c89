"""Where parcels wait, one file per kind of place."""

from pathlib import Path

import torch

from ebbtide._errors import ConfigError
from ebbtide._stores._limits import Budget
from ebbtide._stores.disk import DiskStore
from ebbtide._stores.host import HostStore
from ebbtide._stores.mock import MockStore
from ebbtide._utils import env
from ebbtide.types import Device, Store, StoreFactory

__all__ = ["DiskStore", "HostStore", "MockStore", "factory_for", "serves"]

_NAMES = "'host', 'disk', 'disk:/folder', 'mock'"


def factory_for(store: str | StoreFactory | None, host_limit_bytes: int | None) -> StoreFactory:
    """What makes the stores of a door.

    Args:
        store: "host", "disk" or "disk:/folder", "mock", a factory of your own, or None: host memory for the models
            of an accelerator, disk for models on the CPU.
        host_limit_bytes: most host memory to take, for all devices together; None: from what is free.
    """
    budget = Budget(host_limit_bytes)
    if store is None:
        return lambda device: _make("disk" if device.torch_device.type == "cpu" else "host", device, budget)
    if callable(store):
        return store
    check_store(store)
    return lambda device: _make(store, device, budget)


def serves(store: str | StoreFactory | None, device: torch.device) -> bool:
    """Whether moving saves off `device` into `store` makes sense.

    Host memory frees nothing for a tensor that is in it. By default a machine with an accelerator offloads that one,
    and the few saves on the CPU stay; without one, models on the CPU are what there is.
    """
    if device.type != "cpu":
        here = torch.accelerator.current_accelerator(check_available=True)
        return here is not None and here.type == device.type
    if store is None:
        return not torch.accelerator.is_available()
    return callable(store) or store.partition(":")[0] != "host"


def check_store(store: str) -> None:
    """Raise ConfigError for a store that cannot be: at the door, before anything runs."""
    kind, _, folder = store.partition(":")
    if kind not in ("host", "disk", "mock") or (folder and kind != "disk"):
        raise ConfigError(f"store={store!r} is not a store: write one of {_NAMES}, or a function of a device")
    if kind == "disk":
        DiskStore.check_folder(_folder_of(store))


def _folder_of(store: str) -> Path:
    return Path(store.partition(":")[2] or env.disk_folder())


def _make(store: str, device: Device, budget: Budget) -> Store:
    if store == "host":
        return HostStore(device, budget)
    if store == "mock":
        return MockStore(device, budget.limit_bytes)
    return DiskStore(device, _folder_of(store))
