"""Axolotl's `activation_offloading`, each mode as its documentation has it."""

import contextlib
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch.nn import Module

from ebbtide._errors import ConfigError
from ebbtide._torch import modules_of
from ebbtide.compat._context import OffloadActivations
from ebbtide.compat._heads import opt_out
from ebbtide.engine.ledger import Stats

MIXINS = "axolotl.core.trainers.mixins.activation_checkpointing"
_MODES = (True, "legacy", "disk", "hidden_states")
_torch_checkpoint: Any = import_module("torch.utils.checkpoint")


class _OnDisk(OffloadActivations):
    settings: ClassVar[dict[str, Any]] = {"store": "disk"}


class HiddenStates(contextlib.ContextDecorator):
    """While it is entered, what checkpointed layers of `model` are given goes out until they run again. All else stays.

    Raises ConfigError when it is entered and no layer is checkpointed.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._context = OffloadActivations()
        self._originals: list[tuple[Module, Any]] = []
        self._depth = 0

    def __enter__(self) -> "HiddenStates":
        self._depth += 1
        if self._depth > 1:
            return self
        # At each step anew: a Trainer switches checkpointing on when its training begins.
        found = [module for module in modules_of(self._model) if _is_checkpointed(module)]
        if not found:
            self._depth = 0
            raise ConfigError(
                f"activation_offloading: hidden_states offloads what checkpointed layers are given, and no layer of "
                f"{type(self._model).__name__} is checkpointed: write gradient_checkpointing: true"
            )
        for module in found:
            original: Any = module.__dict__["_gradient_checkpointing_func"]
            self._originals.append((module, original))
            module.__dict__["_gradient_checkpointing_func"] = functools.partial(_in_context, self._context, original)
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        while self._originals:
            module, original = self._originals.pop()
            module.__dict__["_gradient_checkpointing_func"] = original
        if error is None:
            with self._context:  # it warns, once, if nothing has moved in any layer
                pass

    def stats(self) -> Stats:
        """As `OffloadActivations.stats`."""
        return self._context.stats()


def _is_checkpointed(module: Module) -> bool:
    return "_gradient_checkpointing_func" in module.__dict__ and bool(getattr(module, "gradient_checkpointing", False))


def _in_context(context: OffloadActivations, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the call alone: a checkpoint has hooks of its own, or no grad, for what its function saves."""
    context.__enter__()
    try:
        return checkpoint(*args, **kwargs)
    finally:
        with torch.no_grad():  # the forward goes on: it is too early to ask whether anything has moved in it
            context.__exit__()


class _Reentrant:
    """In the place of torch's reentrant checkpoint, of whichever trainer."""

    original: ClassVar[Any] = None

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return _in_context(OffloadActivations(), cls.original.apply, *args)


def patch_hidden_states_offload() -> None:
    """Axolotl calls it for `hidden_states` with `use_reentrant: true`."""
    if _torch_checkpoint.CheckpointFunction is not _Reentrant:
        _Reentrant.original = _torch_checkpoint.CheckpointFunction
        _torch_checkpoint.CheckpointFunction = _Reentrant


def unpatch_hidden_states_offload() -> None:
    """Put torch's own back."""
    if _torch_checkpoint.CheckpointFunction is _Reentrant:
        _torch_checkpoint.CheckpointFunction = _Reentrant.original


def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Of `ActivationOffloadingMixin`."""
    super(import_module(MIXINS).ActivationOffloadingMixin, self).__init__(*args, **kwargs)
    mode: Any = self.args.activation_offloading
    self.activation_offload_context = context_for(self.model, mode) if mode else contextlib.nullcontext()


def context_for(model: Module, mode: bool | str) -> OffloadActivations | HiddenStates:
    """What a training step is run in.

    Args:
        mode: True: what is saved goes to host memory. "legacy": the same, and nothing is copied beside compute.
            "disk": to files, in EBBTIDE_DISK_FOLDER. "hidden_states": what checkpointed layers are given, to host
            memory.

    Raises ConfigError for another mode.
    """
    if mode not in _MODES:
        raise ConfigError(f"activation_offloading: {mode!r}: expected true, legacy, disk, hidden_states or false")
    if mode == "hidden_states":
        return HiddenStates(model)
    context = (_OnDisk if mode == "disk" else OffloadActivations)(use_streams=mode != "legacy")
    opt_out(model, warn_if_no_head=True)
    return context
