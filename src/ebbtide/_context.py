"""The door that needs no model: a context around forward, or around the whole step."""

import threading
from collections.abc import Callable
from types import TracebackType

import torch

from ebbtide._config import Mode, OffloadConfig, make_config
from ebbtide._engine.context import HookContext
from ebbtide._engine.engines import Engines
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.process import PROCESS
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError
from ebbtide._events import Listener
from ebbtide._recompute import torch_checkpoint
from ebbtide._reports.stats_text import stats_text
from ebbtide._utils import env
from ebbtide._utils.torch_private import parameters_of
from ebbtide.types import StoreFactory


class OffloadActivations:
    """A context in which what autograd saves goes out with the forward and is back before backward needs it.

    Re-enterable and nestable (the innermost applies, as with all saved-tensor hooks). Backward may run inside or
    outside. Threads enter it for themselves.
    """

    def __init__(self, config: OffloadConfig, engines: Engines, scope: HookContext) -> None:
        self._config = config
        self._engines = engines
        self._scope = scope
        self._entered = threading.local()

    def __enter__(self) -> "OffloadActivations":
        hooks = None
        if self._config.mode != "off" and not env.is_disabled():
            torch_checkpoint.install()
            desk = SavedTensorHooks(self._engines, self._scope.visit(""))
            hooks = desk.hooks()
            hooks.__enter__()
        self._stack().append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks = self._stack().pop()
        if hooks is None:
            return
        hooks.__exit__(kind, error, trace)
        if error is None and torch.is_grad_enabled():
            self._scope.ledger.warn_if_nothing_moved("offload_activations()")

    def know_weights(self, model: torch.nn.Module) -> None:
        """Have the weights of `model` stay however they are saved: detached, or what quantised ones are made of."""
        self._scope.know_weights(parameters_of(model))

    def stats(self) -> Stats:
        """Totals of all contexts with these settings since the first was entered."""
        return self._scope.ledger.read(self._engines)

    def report(self) -> str:
        """The figures of `stats` as a table."""
        return stats_text(self.stats())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with an Event for whatever happens to parcels; what is returned ends it.

        Of all contexts with these settings.
        """
        return self._scope.ledger.listeners.add(listener)

    def _stack(self) -> list[torch.autograd.graph.saved_tensors_hooks | None]:
        stack: list[torch.autograd.graph.saved_tensors_hooks | None] | None = getattr(self._entered, "stack", None)
        if stack is None:
            stack = self._entered.stack = []
        return stack


def offload_activations(
    *,
    mode: Mode = "all",
    store: str | StoreFactory | None = None,
    window: int | str = "512MiB",
    prefetch: int | str = "512MiB",
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
) -> OffloadActivations:
    """Move what autograd saves inside the context out of device memory until backward needs it.

    Loss and gradients are those of the plain run, bit for bit. Needs no model and no change to one::

        with ebbtide.offload_activations():
            loss = model(batch).loss
        loss.backward()

    Making a new context each step costs nothing: memory, streams and what was learned are found again by settings.

    Args:
        mode: "all", or "off" for a context that does nothing.
        store: "host" (pinned memory), "disk" or "disk:/folder", "mock", or a function that makes a store for a
            device. Default: host for accelerators; disk where the model is on the CPU of a machine without one.
        window: most bytes on their way out whose device memory is not yet released; beyond it compute waits.
        prefetch: most bytes brought back before backward asks for them.
        min_bytes: saves of smaller storages stay where they are.
        host_limit: most host memory to take; what does not fit stays on the device, counted. Default: 80 % of free
            memory, divided among the processes of this host.

    Raises:
        ConfigError: a setting that cannot be; says what was found and what to write.

    Traps:
        torch.func transforms refuse to run under any saved-tensor hooks, these included.
        Entered inside a compiled function it breaks the graph: enter it outside.
        A tensor changed in place between its save and backward raises ModifiedError, as it does without hooks.
    """
    if mode == "auto":
        raise ConfigError(
            "mode='auto' plans the regions of a model, and a context knows none: write ebbtide.offload(model), or "
            "mode='all' here"
        )
    config = make_config(
        mode=mode, store=store, window=window, prefetch=prefetch, min_bytes=min_bytes, host_limit=host_limit
    )
    return OffloadActivations(config, PROCESS.engines(config), PROCESS.scope_of(config))
