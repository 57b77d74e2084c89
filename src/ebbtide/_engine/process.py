"""What outlives a door: the engines of this process and the scopes of contexts that are written anew every step.

`with offload_activations():` makes a new object each step, but pinned memory, streams and what was learned must not be
made anew. So they belong to the process, found again by what was asked for. The one such object of the package.
"""

import threading
from collections.abc import Hashable

from ebbtide._config import OffloadConfig
from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.engines import Engines
from ebbtide._stores import factory_for, serves


class Process:
    """Engines by store setting, scopes by all settings."""

    def __init__(self) -> None:
        self._engines: dict[Hashable, Engines] = {}
        self._scopes: dict[OffloadConfig, HookContext] = {}
        self._lock = threading.Lock()

    def engines(self, config: OffloadConfig) -> Engines:
        """All doors with one store setting share lanes and memory."""
        with self._lock:
            key = (config.store, config.host_limit_bytes)
            if key not in self._engines:
                self._engines[key] = Engines(factory_for(config.store, config.host_limit_bytes))
            return self._engines[key]

    def new_scope(self, config: OffloadConfig) -> HookContext:
        limits = Limits(config.window_bytes, config.prefetch_bytes, config.min_bytes)
        return HookContext(limits, lambda device: serves(config.store, device))

    def scope_of(self, config: OffloadConfig) -> HookContext:
        """The scope of all contexts with equal settings."""
        with self._lock:
            if config not in self._scopes:
                self._scopes[config] = self.new_scope(config)
            return self._scopes[config]

    def close(self) -> None:
        with self._lock:
            for engines in self._engines.values():
                engines.close()  # empties it; handles and contexts made before keep it and fill it again
            self._scopes.clear()


PROCESS = Process()


def release_memory() -> None:
    """Give back all host memory and files that ebbtide holds.

    Between two trainings in one process. Graphs whose backward has not run yet can no longer run it: a StoreError
    says so. Handles and contexts made before work again from their next forward on.

    Also what captured graphs copy to is given back. A graph (torch.cuda.CUDAGraph) that was captured with offloading
    must not be replayed after it: it would write into memory that is somebody else's by then.
    """
    PROCESS.close()
