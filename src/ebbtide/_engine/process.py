"""The process-wide engines, and the contexts of `offload_activations`."""

import os
import threading
from collections.abc import Hashable

from ebbtide._config import OffloadConfig
from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.engines import Engines
from ebbtide._stores import factory_for, serves


class Process:
    """Engines by store setting, contexts by all settings.

    The engine's only process-wide object. `with offload_activations():` makes a new object in every step, while pinned
    memory, streams and learned order have to survive and are found by the settings.
    """

    def __init__(self) -> None:
        self._engines: dict[Hashable, Engines] = {}
        self._contexts: dict[OffloadConfig, HookContext] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def engines(self, config: OffloadConfig) -> Engines:
        """The engines of a store setting: all API objects with equal store settings share lanes and memory."""
        with self._lock:
            key = (config.store, config.host_limit_bytes)
            if key not in self._engines:
                self._engines[key] = Engines(factory_for(config.store, config.host_limit_bytes))
            return self._engines[key]

    def new_context(self, config: OffloadConfig) -> HookContext:
        limits = Limits(config.window_bytes, config.prefetch_bytes, config.min_bytes)
        return HookContext(limits, lambda device: serves(config.store, device))

    def context_of(self, config: OffloadConfig) -> HookContext:
        """The shared context of equal settings."""
        with self._lock:
            if config not in self._contexts:
                self._contexts[config] = self.new_context(config)
            return self._contexts[config]

    def close(self) -> None:
        with self._lock:
            for engines in self._engines.values():
                engines.close()  # only emptied: handles and contexts hold the object and fill it again
            self._contexts.clear()

    def _leave_to_parent(self) -> None:
        """In a forked child: see Note [Forks] in _devices/cpu.py."""
        self._lock = threading.Lock()
        for engines in self._engines.values():
            engines.leave_to_parent()


PROCESS = Process()


def release_memory() -> None:
    """Free all host memory and files of ebbtide, for instance between two trainings in one process.

    Existing handles and contexts work again from the next forward on.

    Traps:
        A graph whose backward has not run raises StoreError in backward.
        A `torch.cuda.CUDAGraph` captured with offloading must not be replayed any more: a replay would write into
        memory that has been freed.
    """
    PROCESS.close()
