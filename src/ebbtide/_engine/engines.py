"""Engines of one store setting, one per device and capture, made at the first saved tensor of a device."""

import threading
from collections.abc import Callable, Iterator

import torch

from ebbtide._devices import device_for
from ebbtide._engine.captures import CapturedEngine, engine_in_capture
from ebbtide._engine.engine import Engine
from ebbtide._types import Device, Reason, StoreFactory, Stream


class Engines:
    """Finds or makes the engine of a device.

    Args:
        make_store: makes the store of a new engine.
        make_device: streams and events of a torch device; tests pass a simulated device.
    """

    def __init__(self, make_store: StoreFactory, make_device: Callable[[torch.device], Device] = device_for) -> None:
        self._make_store = make_store
        self._make_device = make_device
        self._engines: dict[torch.device, Engine] = {}
        # Kept until `close`: the lifetime of captured graphs, and hence of possible replays, is unknown.
        self._captures: dict[tuple[torch.device, int], CapturedEngine | Reason] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Engine]:
        """The engines that own a store, which also counts the memory of captures."""
        return iter(list(self._engines.values()))

    def on(self, device: torch.device) -> Engine | Reason:
        """The engine for tensors saved on `device` now; the reason if the running capture cannot hold moves."""
        engine = self._engines.get(device) or self._make(device)
        return engine if engine.device.matches_capture() else self._in_capture(device, engine)

    def running(self) -> list[Engine]:
        """The engines of `on` that are there already: where a graph is captured, those of the capture."""
        found: list[Engine] = []
        for device, engine in list(self._engines.items()):
            own: Engine | Reason | None = engine
            if not engine.device.matches_capture():
                capture = engine.device.capture_id()
                own = None if capture is None else self._captures.get((device, capture))
            if isinstance(own, Engine):
                found.append(own)
        return found

    def current_stream(self, device: torch.device) -> Stream:
        """The calling thread's compute stream on `device`."""
        return (self._engines.get(device) or self._make(device)).device.current_stream()

    def mark_used(self, t: torch.Tensor) -> None:
        """The memory of `t`, which no graph will hold, is not reused before the running operator has read it."""
        device = (self._engines.get(t.device) or self._make(t.device)).device
        device.mark_used(t, device.current_stream())

    def is_captured(self, device: torch.device) -> bool:
        """Whether work queued on `device` now is recorded by a graph capture."""
        engine = self._engines.get(device) or self._make(device)
        return not engine.device.matches_capture()

    def close(self) -> None:
        """Free all stores. Graphs with parcels in a store can no longer run backward or be replayed."""
        with self._lock:
            for captured in self._captures.values():
                if isinstance(captured, CapturedEngine):
                    captured.close()
            self._captures.clear()
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def leave_to_parent(self) -> None:
        """In a forked child: make engines anew. Stores stay open, for they are the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held the lock
        self._captures.clear()
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
