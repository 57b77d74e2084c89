"""The context managers `OffloadActivations` and `NoOpManager`."""

import contextlib
import threading
import warnings
from typing import Any, ClassVar

import torch

from ebbtide._context import offload_activations
from ebbtide._engine.parcel import keep, kept_tensor
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideWarning
from ebbtide._events import Listener
from ebbtide._utils.sizes import MIB
from ebbtide._utils.torch_private import hidden_from_compiler
from ebbtide.compat._stand_in import StandIn

DEFAULT_STASH = 5
_WINDOW_BYTES = 512 * MIB  # of the default stash

WITHOUT_DEVICE = "this machine has no accelerator. To move from the CPU all the same, write {'store': 'disk'} to"


class _ThreadState(threading.local):
    """`open`: contexts of `start_keeping`. `depths`: length of `open` at each entry of `OffloadActivations`."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.open: list[NoOpManager] = []


_thread = _ThreadState()


class TrlOffloadActivations(StandIn, contextlib.ContextDecorator, name="OffloadActivations"):
    """A context for forward, or for forward and backward, whose saved tensors go to host memory and come back.

    Enter the context in every step. On a machine without an accelerator, and without a store in `settings`, the
    context does nothing and warns at the first entry.

    Args:
        use_pin_memory: False warns, because host memory is pinned once in any case.
        use_streams: False copies nothing beside compute, for debugging.
        min_offload_size: saved tensors of smaller storages stay, in bytes.
        max_fwd_stash_size: limit of the bytes on their way out before compute waits, at least 1. The default of 5
            stands for 512 MiB, other values for bytes in proportion.

    The arguments can be read under TRL's names. TRL's other attributes (`tracker`, `pack_hook`, ...) raise
    ForeignAttributeError, which says what to use, when read and when set.

    Raises:
        ConfigError: a ValueError: `max_fwd_stash_size` below 1, or an invalid size.
    """

    settings: ClassVar[dict[str, Any]] = {}
    """Settings of `ebbtide.offload_activations`, such as `store` and `host_limit`; they come before the arguments."""

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = DEFAULT_STASH,
    ) -> None:
        if max_fwd_stash_size < 1:
            raise ConfigError(f"max_fwd_stash_size={max_fwd_stash_size}: expected at least 1")
        if not use_pin_memory:
            warn_not_followed("use_pin_memory=False")
        self._answer(use_streams, min_offload_size, max_fwd_stash_size)
        waiting_bytes = _WINDOW_BYTES * max_fwd_stash_size // DEFAULT_STASH if use_streams else 1
        self._has_warned = self.moves_here()
        arguments: dict[str, Any] = {
            "mode": "all" if self.moves_here() else "off",
            "window": waiting_bytes,
            "prefetch": waiting_bytes,
            "min_bytes": max(1, min_offload_size),
        }
        self._context = offload_activations(**{**arguments, **self.settings})

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Keep the weights of `model` on the device in every form: detached, or the parts of quantised weights.

        Parameters, their views and gathered parameters stay without this call.
        """
        self._context.register_weights(model)

    @classmethod
    def moves_here(cls) -> bool:
        """Whether this machine has an accelerator, or `settings` a store for the CPU."""
        return "store" in cls.settings or torch.accelerator.is_available()

    @staticmethod
    def is_entered() -> bool:
        """Whether the calling thread is inside of a context."""
        return bool(_thread.depths)

    def __enter__(self) -> "TrlOffloadActivations":
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self).__name__} moves nothing: {WITHOUT_DEVICE} its `settings`", EbbtideWarning, stacklevel=2
            )
        self._context.__enter__()
        _thread.depths.append(len(_thread.open))
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        before = _thread.depths.pop()
        while len(_thread.open) > before:  # an interrupt (not an Exception) ends a forward without its hooks
            stop_keeping()
        self._context.__exit__(kind, error, trace)

    def stats(self) -> Stats:
        """Totals of all contexts with these settings since the first was entered."""
        return self._context.stats()

    def subscribe(self, listener: Listener) -> Any:
        """Call `listener` with events, as `ebbtide.OffloadActivations.subscribe` does."""
        return self._context.subscribe(listener)


OffloadActivations = TrlOffloadActivations


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """A context inside `OffloadActivations` whose saved tensors stay on the device. In-place changes raise too."""

    def __init__(self) -> None:
        super().__init__(_keep, _kept)


def warn_not_followed(argument: str) -> None:
    warnings.warn(
        f"{argument} is not followed: ebbtide pins host memory once and uses it again; host_limit of "
        "ebbtide.offload_activations bounds it",
        EbbtideWarning,
        stacklevel=3,
    )


def start_keeping() -> None:
    """Keep the saved tensors of the calling thread until `stop_keeping`, or the end of the context around."""
    kept = NoOpManager()
    kept.__enter__()
    _thread.open.append(kept)


def stop_keeping() -> None:
    _thread.open.pop().__exit__()


@hidden_from_compiler
def _keep(t: torch.Tensor) -> Any:
    return keep(t, "")


@hidden_from_compiler
def _kept(kept: Any) -> torch.Tensor:
    return kept_tensor(kept)
