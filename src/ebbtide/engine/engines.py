"""The engines of one store setting, one per device, made when a device's first save comes by."""

import threading
from collections.abc import Callable, Iterator

import torch

from ebbtide.devices import device_for
from ebbtide.engine.engine import Engine
from ebbtide.types import Device, StoreFactory


class Engines:
    """Hands out the engine of a device.

    Args:
        make_store: the store of each new engine.
        make_device: streams and events of a torch device; tests put a simulated one here.
    """

    def __init__(self, make_store: StoreFactory, make_device: Callable[[torch.device], Device] = device_for) -> None:
        self._make_store = make_store
        self._make_device = make_device
        self._engines: dict[torch.device, Engine] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def on(self, device: torch.device) -> Engine:
        engine = self._engines.get(device)
        return engine if engine is not None else self._make(device)

    def close(self) -> None:
        """Free all stores. Graphs that still have parcels there can no longer run backward."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _make(self, device: torch.device) -> Engine:
        with self._lock:
            if device not in self._engines:
                own = self._make_device(device)
                self._engines[device] = Engine(own, self._make_store(own))
            return self._engines[device]
