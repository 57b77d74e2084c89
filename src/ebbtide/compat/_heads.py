"""The context for a model, without the saved tensors of the output head."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from ebbtide._errors import EbbtideWarning
from ebbtide._utils.torch_private import is_inside_checkpoint, named_modules
from ebbtide.compat._context import DEFAULT_STASH, OffloadActivations, start_keeping, stop_keeping

_HEADS = (
    "output",
    "output.linear",
    "lm_head",
    "decoder.output",
    "decoder.lm_head",
    "final_layer_norm",
    "ln_f",
    "head",
    "score",
    "classifier",
)
"""Names of output heads, in the order of the search."""

_opted_out: "weakref.WeakSet[Module]" = weakref.WeakSet()  # modules with hooks, which each model needs once


def get_act_offloading_ctx_manager(
    model: Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = DEFAULT_STASH,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """`OffloadActivations` for `model`, without the tensors saved by the output head and by Liger's modules.

    Backward needs these tensors at once. The hooks that keep them stay on the model, and do nothing outside of the
    context.

    Args:
        model: also a model in DDP, or a PEFT model.
        use_pin_memory: as of `OffloadActivations`.
        use_streams: as of `OffloadActivations`.
        min_offload_size: as of `OffloadActivations`.
        max_fwd_stash_size: as of `OffloadActivations`.
        warn_if_no_head: whether to warn if no head is found.

    Raises:
        ConfigError: as `OffloadActivations` does.
    """
    context = OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    context.update_model_params(model)
    opt_out(model, warn_if_no_head)
    return context


get_lora_act_offloading_ctx_manager: Callable[..., OffloadActivations] = functools.partial(
    get_act_offloading_ctx_manager
)
"""Axolotl's function for adapters: frozen and quantised weights and their views stay in any case.

A separate object, because `install` finds replaced names by identity.
"""


def opt_out(model: Module, warn_if_no_head: bool) -> None:
    """Keep the tensors saved by the output head and by Liger's modules on the device."""
    inner = _unwrapped(model)
    head = next((module for name in _HEADS if (module := _module_at(inner, name)) is not None), None)
    if head is not None:
        _keep_tensors_of(head)
    elif warn_if_no_head:
        warnings.warn(
            f"no output head was found in {type(inner).__name__} under any of {', '.join(_HEADS)}: its saved "
            "tensors are offloaded, and needed again at once. Name it `output`, or pass warn_if_no_head=False",
            EbbtideWarning,
            stacklevel=3,
        )
    for name, module in named_modules(inner):
        if "liger" in name.lower() or type(module).__module__.startswith("liger_kernel"):
            _keep_tensors_of(module)


def _unwrapped(model: Module) -> Module:
    inner: Any = getattr(model, "module", None)
    model = inner if isinstance(inner, Module) else model
    base: Any = getattr(model, "base_model", None)
    return base if isinstance(base, Module) and hasattr(model, "peft_config") else model


def _module_at(model: Module, path: str) -> Module | None:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Module) else None


def _keep_tensors_of(module: Module) -> None:
    if module in _opted_out:
        return
    _opted_out.add(module)
    hooks = _KeepHooks()
    module.register_forward_pre_hook(hooks.enter, prepend=True)
    module.register_forward_hook(hooks.leave, always_call=True)


class _KeepHooks(threading.local):
    """Hooks around a forward, with state per thread."""

    def __init__(self) -> None:
        self._entered: list[bool] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_KeepHooks":
        return memo.setdefault(id(self), _KeepHooks())  # a copy of the model has forwards of its own

    def enter(self, *_: object) -> None:
        # A checkpoint drops the tensors saved in a checkpointed call, and must see as many in the recomputation, which
        # may be outside of the context or in another thread.
        keeps = OffloadActivations.is_entered() and not is_inside_checkpoint()
        if keeps:
            start_keeping()
        self._entered.append(keeps)

    def leave(self, *_: object) -> None:
        if self._entered.pop():
            stop_keeping()
