"""The engines of one store setting, one per device and capture, made when the first save of it comes by."""

import threading
from collections.abc import Callable, Iterator

import torch

from ebbtide._devices import device_for
from ebbtide._engine.captures import CapturedEngine, engine_in_capture
from ebbtide._engine.engine import Engine
from ebbtide.types import Device, Reason, StoreFactory


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
        # For as long as the graphs may be replayed, and nobody tells us how long that is.
        self._captures: dict[tuple[torch.device, int], CapturedEngine | Reason] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Engine]:
        """Those that own a store: what captures hold is counted there."""
        return iter(list(self._engines.values()))

    def on(self, device: torch.device) -> Engine | Reason:
        """Who moves what is saved on `device` now; the reason while that is in a capture in which nothing can move."""
        engine = self._engines.get(device)
        if engine is None:
            engine = self._make(device)
        return engine if engine.device.matches_capture() else self._in_capture(device, engine)

    def is_captured(self, device: torch.device) -> bool:
        """Whether work given to `device` now goes into a graph that is being captured."""
        engine = self._engines.get(device)
        if engine is None:
            engine = self._make(device)
        return not engine.device.matches_capture()

    def close(self) -> None:
        """Free all stores. Graphs that still have parcels there can no longer run backward or be replayed."""
        with self._lock:
            for captured in self._captures.values():
                if isinstance(captured, CapturedEngine):
                    captured.close()
            self._captures.clear()
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _make(self, device: torch.device) -> Engine:
        with self._lock:
            if device not in self._engines:
                own = self._make_device(device)
                self._engines[device] = Engine(own, self._make_store(own))
            return self._engines[device]

    def _in_capture(self, device: torch.device, engine: Engine) -> CapturedEngine | Reason:
        capture = engine.device.capture_id()
        if capture is None:
            return Reason.CAPTURING
        with self._lock:
            found = self._captures.get((device, capture))
            if found is None:
                found = self._captures[device, capture] = engine_in_capture(engine, capture)
            return found
