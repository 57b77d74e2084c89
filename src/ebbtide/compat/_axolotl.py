"""Axolotl's `activation_offloading`, each mode as in Axolotl's documentation."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideWarning
from ebbtide._utils.torch_private import modules_of
from ebbtide.compat._context import OffloadActivations, warn_not_followed
from ebbtide.compat._heads import opt_out
from ebbtide.compat._stand_in import StandIn

MIXINS = "axolotl.core.trainers.mixins.activation_checkpointing"
_MODES = (True, "legacy", "disk", "hidden_states")
_torch_checkpoint: Any = import_module("torch.utils.checkpoint")


class _OnDisk(OffloadActivations):
    settings: ClassVar[dict[str, Any]] = {"store": "disk"}


class _CheckpointedInputs(contextlib.ContextDecorator):
    """A context in which the inputs of checkpointed layers go out until the layers are recomputed.

    All other saved tensors stay on the device.
    """

    def __init__(self, context: OffloadActivations) -> None:
        self._context = context
        self._undo = contextlib.ExitStack()
        self._depth = 0

    def __enter__(self) -> "_CheckpointedInputs":
        if self._depth == 0:
            self._begin()
        self._depth += 1
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._undo.close()
        if error is None:
            with self._context:  # an exit warns, once, if nothing has moved in any layer
                pass

    def stats(self) -> Stats:
        """Totals, as of `OffloadActivations.stats`."""
        return self._context.stats()

    def _begin(self) -> None:
        raise NotImplementedError

    def _offload_inputs_of(self, module: Module) -> None:
        attributes = vars(module)
        original: Any = attributes["_gradient_checkpointing_func"]
        attributes["_gradient_checkpointing_func"] = functools.partial(_in_context, self._context, original)
        self._undo.callback(attributes.__setitem__, "_gradient_checkpointing_func", original)


class HiddenStates(_CheckpointedInputs):
    """The context for the checkpointed layers of `model`. Without any, an entry raises ConfigError."""

    def __init__(self, model: Module) -> None:
        super().__init__(OffloadActivations())
        self._model = model

    def _begin(self) -> None:
        # In every step: a Trainer switches checkpointing on at the beginning of a training.
        found = [module for module in modules_of(self._model) if _is_checkpointed(module)]
        if not found:
            raise ConfigError(
                f"activation_offloading: hidden_states offloads what checkpointed layers are given, and no layer of "
                f"{type(self._model).__name__} is checkpointed: write gradient_checkpointing: true"
            )
        for module in found:
            self._offload_inputs_of(module)


class CheckpointHiddenStatesOffload(StandIn, _CheckpointedInputs):
    """The context for every model called inside. The arguments are those of `OffloadActivations`, but for the last."""

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 2,
        max_cpu_buffer_pool_size: int = 64,
    ) -> None:
        if max_cpu_buffer_pool_size != 64:
            warn_not_followed(f"max_cpu_buffer_pool_size={max_cpu_buffer_pool_size}")
        super().__init__(OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size))
        self._answer(use_streams, min_offload_size, max_fwd_stash_size)
        self._seen: set[Module] = set()

    def _begin(self) -> None:
        self._undo.callback(self._seen.clear)
        self._undo.callback(register_module_forward_pre_hook(self._see).remove)

    def _see(self, called: Module, _: object) -> None:
        # With all modules inside: a hook of a layer would run too late if the checkpoint is around the call.
        if called not in self._seen:
            new = [module for module in modules_of(called) if module not in self._seen]
            self._seen.update(new)
            for module in filter(_is_checkpointed, new):
                if not _is_offloaded(module):
                    self._offload_inputs_of(module)


checkpoint_hidden_states_offload = functools.partial(CheckpointHiddenStatesOffload)
"""Axolotl's `get_checkpoint_hidden_states_offloading_ctx_manager`.

A separate object, because `install` finds replaced names by identity.
"""


def _is_checkpointed(module: Module) -> bool:
    return "_gradient_checkpointing_func" in module.__dict__ and bool(getattr(module, "gradient_checkpointing", False))


def _is_offloaded(module: Module) -> bool:
    function: Any = module.__dict__["_gradient_checkpointing_func"]
    return isinstance(function, functools.partial) and function.func is _in_context


def _in_context(context: OffloadActivations, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Enter around the call alone: inside, a checkpoint has saved-tensor hooks of its own, or no grad."""
    context.__enter__()
    try:
        return checkpoint(*args, **kwargs)
    finally:
        with torch.no_grad():  # the forward goes on: too early to warn that nothing has moved
            context.__exit__()


class HiddenStatesOffloadCheckpoint:
    """The stand-in for torch's reentrant checkpoint and for Axolotl's class of the same name: inputs go out."""

    original: ClassVar[Any] = _torch_checkpoint.CheckpointFunction

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return _in_context(OffloadActivations(), cls.original.apply, *args)


def patch_hidden_states_offload() -> None:
    """Replace torch's reentrant checkpoint; Axolotl's call for `hidden_states` with `use_reentrant: true`."""
    if _torch_checkpoint.CheckpointFunction is not HiddenStatesOffloadCheckpoint:
        HiddenStatesOffloadCheckpoint.original = _torch_checkpoint.CheckpointFunction
        _torch_checkpoint.CheckpointFunction = HiddenStatesOffloadCheckpoint


def unpatch_hidden_states_offload() -> None:
    """Put torch's reentrant checkpoint back."""
    if _torch_checkpoint.CheckpointFunction is HiddenStatesOffloadCheckpoint:
        _torch_checkpoint.CheckpointFunction = HiddenStatesOffloadCheckpoint.original


def warning_engine(theirs: Any) -> type:
    """Axolotl's `SacOffloadEngine`; making an engine warns that `install` does not replace the class."""

    class SacOffloadEngine(theirs):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            warnings.warn(
                "ebbtide.compat.install('axolotl') does not replace SacOffloadEngine: Axolotl moves the tensors that "
                "selective_checkpointing saves, and ebbtide neither counts nor bounds their bytes. Write "
                "selective_checkpointing: {offload: false}, or add ebbtide.integrations.axolotl.EbbtidePlugin instead",
                EbbtideWarning,
                stacklevel=2,
            )
            super().__init__(*args, **kwargs)

    return SacOffloadEngine


def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement of `ActivationOffloadingMixin.__init__`."""
    super(import_module(MIXINS).ActivationOffloadingMixin, self).__init__(*args, **kwargs)
    mode: Any = self.args.activation_offloading
    self.activation_offload_context = context_for(self.model, mode) if mode else contextlib.nullcontext()


def context_for(model: Module, mode: bool | str) -> OffloadActivations | HiddenStates:
    """The context around a training step; `legacy`: no copies beside compute. Other modes raise ConfigError."""
    if mode not in _MODES:
        raise ConfigError(f"activation_offloading: {mode!r}: expected true, legacy, disk, hidden_states or false")
    if mode == "hidden_states":
        return HiddenStates(model)
    context = (_OnDisk if mode == "disk" else OffloadActivations)(use_streams=mode != "legacy")
    opt_out(model, warn_if_no_head=True)
    return context
