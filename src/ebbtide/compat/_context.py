"""The two context managers."""

import contextlib
import threading
import warnings
from types import TracebackType
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


class _Here(threading.local):
    """Of a thread. `entered`: for each context it is inside of, how many of `kept` were open when it was entered."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.kept: list[NoOpManager] = []


_here = _Here()


class OffloadActivations(StandIn, contextlib.ContextDecorator):
    """A context for forward, or for forward and backward: what autograd saves in it goes to host memory and comes back.

    To be entered again for every step. On a machine without an accelerator, and without a store in `settings`, the
    context does nothing and warns when entered first.

    Args:
        use_pin_memory: host memory is pinned in any case, once and not for every save: False is told of.
        use_streams: False copies nothing beside compute, for looking into what goes wrong.
        min_offload_size: saves of smaller storages stay, in bytes.
        max_fwd_stash_size: how much may wait on its way out before compute does; at least 1. It counts tensors in
            name only: bytes count, 512 MiB for the default of 5, and as many times that as it is larger.

    The settings can be read under TRL's names. Its other attributes (`tracker`, `pack_hook`, ...) raise
    ForeignAttributeError, which says what to use; setting any of them does too.

    Raises:
        ConfigError: a ValueError: `max_fwd_stash_size` below 1, or a size that is none.
    """

    settings: ClassVar[dict[str, Any]] = {}
    """What the originals have no keyword for: `store` and `host_limit` of `ebbtide.offload_activations`."""

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
            warnings.warn(
                "use_pin_memory=False is not followed: ebbtide pins host memory once and uses it again; "
                "host_limit of ebbtide.offload_activations bounds it",
                EbbtideWarning,
                stacklevel=2,
            )
        self._answer(
            use_pin_memory=True,
            use_streams=use_streams,
            min_tensor_size_bytes=min_offload_size,
            max_fwd_stash_size=max_fwd_stash_size,
        )
        waiting_bytes = _WINDOW_BYTES * max_fwd_stash_size // DEFAULT_STASH if use_streams else 1
        self._is_told = self.moves_here()
        self._context = offload_activations(
            mode="all" if self.moves_here() else "off",
            window=waiting_bytes,
            prefetch=waiting_bytes,
            min_bytes=max(1, min_offload_size),
            **self.settings,
        )

    def update_model_params(self, model: torch.nn.Module) -> None:
        """Keep the weights of `model` where they are however they are saved: detached, or what quantised ones are made
        of. Parameters and their views are known without it, gathered ones too."""
        self._context.know_weights(model)

    @classmethod
    def moves_here(cls) -> bool:
        """Whether this machine has an accelerator, or `settings` a store for the CPU."""
        return "store" in cls.settings or torch.accelerator.is_available()

    @staticmethod
    def is_entered() -> bool:
        """Whether the calling thread is inside of one."""
        return bool(_here.entered)

    def __enter__(self) -> "OffloadActivations":
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{type(self).__name__} moves nothing: {WITHOUT_DEVICE} its `settings`", EbbtideWarning, stacklevel=2
            )
        self._context.__enter__()
        _here.entered.append(len(_here.kept))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        before = _here.entered.pop()
        while len(_here.kept) > before:  # an interrupt (not an Exception) leaves a forward without its hooks
            stop_keeping()
        self._context.__exit__(kind, error, trace)

    def stats(self) -> Stats:
        """Totals of all contexts with these settings since the first was entered."""
        return self._context.stats()

    def subscribe(self, listener: Listener) -> Any:
        """As `ebbtide.OffloadActivations.subscribe`."""
        return self._context.subscribe(listener)


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """A context inside of the other one in which saves stay where they are. In-place changes raise here too."""

    def __init__(self) -> None:
        super().__init__(_keep, _kept)


def start_keeping() -> None:
    """Saves stay where they are in the calling thread, until `stop_keeping`, or the end of the context around it."""
    kept = NoOpManager()
    kept.__enter__()
    _here.kept.append(kept)


def stop_keeping() -> None:
    _here.kept.pop().__exit__()


@hidden_from_compiler
def _keep(t: torch.Tensor) -> Any:
    return keep(t, "")


@hidden_from_compiler
def _kept(kept: Any) -> torch.Tensor:
    return kept_tensor(kept)
