"""`offload_activations`: a context around the forward or the whole step, without a model."""

import contextlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ebbtide._config import Mode, OffloadConfig, make_config
from ebbtide._engine.context import HookContext
from ebbtide._engine.engines import Engines
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.process import PROCESS
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError
from ebbtide._events import Listener
from ebbtide._model.syncs import SyncWatch
from ebbtide._plans import Plan
from ebbtide._recompute import megatron_checkpoint, torch_checkpoint
from ebbtide._reports.run import Run, RunFile
from ebbtide._reports.stats_text import stats_text
from ebbtide._types import StoreFactory
from ebbtide._utils import env
from ebbtide._utils.torch_private import parameters_of

_NO_HOOKS = contextlib.nullcontext()


class _Entered(threading.local):
    """The hooks that the current thread has entered, innermost last. An attribute: an interrupt in a function called on
    exit would leave hooks."""

    def __init__(self) -> None:
        self.stack: list[contextlib.AbstractContextManager[Any]] = []


class OffloadActivations:
    """Context that offloads saved tensors during forward and brings them back before backward needs them.

    Re-enterable and nestable (the innermost applies, as with all saved-tensor hooks). Backward may run inside or
    outside. Every thread has to enter for itself.
    """

    def __init__(self, config: OffloadConfig, engines: Any, context: Any) -> None:
        self._config = config
        self._engines: Engines = engines
        self._context: HookContext = context
        self._entered = _Entered()
        self._watch = SyncWatch(self._context.recorder) if env.watches_syncs() else None

    def __enter__(self) -> "OffloadActivations":
        hooks: contextlib.AbstractContextManager[Any] = _NO_HOOKS
        if self._config.mode != "off" and not env.is_disabled():
            torch_checkpoint.install()
            megatron_checkpoint.install()
            self._context.forward_begins()
            hooks = SavedTensorHooks(self._engines, self._context.new_call("")).hooks()
            if self._watch is not None:
                hooks = _nested(hooks, self._watch.watching())
        self._entered.stack.append(hooks)
        try:
            return (hooks.__enter__(), self)[1]  # one line, as on exit: an interrupt between two would leave hooks
        except BaseException:
            self._entered.stack.remove(hooks)  # Python exits no context that could not be entered
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (hooks := self._entered.stack.pop()).__exit__(kind, error, trace)
        if error is None and torch.is_grad_enabled() and hooks is not _NO_HOOKS:
            self._context.recorder.warn_if_nothing_moved("offload_activations()")
            self._context.recorder.warn_if_window_holds_all("offload_activations()")

    def register_weights(self, model: torch.nn.Module) -> None:
        """Keep the weights of `model` on the device, also as detached aliases or as parts of quantised weights."""
        self._context.register_weights(parameters_of(model))

    def stats(self) -> Stats:
        """Totals of all contexts with equal settings since the first was entered."""
        return self._context.recorder.read(self._engines)

    def report(self) -> str:
        """`stats` as a table."""
        return stats_text(self.stats())

    def save(self, path: str | Path) -> None:
        """Write the figures of `stats` as JSON, for `ebbtide report FILE`. Raises ConfigError if no file can be written
        there."""
        self._run().save(path)

    def _run(self) -> Run:
        return Run.of(self.stats(), {"model": "offload_activations()"}, Plan({}))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with an Event for everything that happens to parcels of contexts with equal settings.

        The returned function ends the subscription.
        """
        return self._context.recorder.listeners.add(listener)


@contextlib.contextmanager
def _nested(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Generator[None, None, None]:
    with outer, inner:
        yield


def offload_activations(
    *,
    mode: Mode = "all",
    store: str | StoreFactory | None = None,
    window: int | str = "512MiB",
    prefetch: int | str = "512MiB",
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
) -> OffloadActivations:
    """Move tensors that autograd saves inside the context out of device memory until backward needs them.

    Loss and gradients equal the plain run's, bit for bit. No change to the model is needed:

        with ebbtide.offload_activations():
            loss = model(batch).loss
        loss.backward()

    A new context in each step costs nothing: memory, streams and learned order are found again by the settings.

    Args:
        mode: "all", or "off" for a context that does nothing.
        store: Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for
            accelerators, "disk" for a model on the CPU of a machine without an accelerator. Also a function that makes
            a store for a device.
        window: Most bytes on their way out whose device memory is not released yet; beyond the limit compute waits.
            Default: 512MiB.
        prefetch: Most bytes brought back before backward needs them. Default: 512MiB.
        min_bytes: Saved tensors of smaller storages stay on the device. Default: 1MiB.
        host_limit: Most host memory to take; tensors beyond the limit stay on the device. Default: 80 % of free memory,
            divided among the processes of the host.

    Raises:
        ConfigError: an invalid setting; the message says what to write instead.

    Traps:
        torch.func transforms refuse to run under any saved-tensor hooks.
        Entered inside a compiled function the context breaks the graph: enter outside.
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
    context = PROCESS.context_of(config)
    activations = OffloadActivations(config, PROCESS.engines(config), context)
    path = env.report_path()
    if path is not None and context.run_file is None and mode != "off" and not env.is_disabled():
        context.run_file = RunFile(path, activations._run)  # contexts with equal settings have one report
    return activations
