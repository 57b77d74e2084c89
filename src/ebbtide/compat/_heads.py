"""The context for a model, whose output head stays out of it."""

import functools
import threading
import warnings
import weakref
from collections.abc import Iterator
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
"""Where models have their output head, in the order in which they are looked for."""

_opted_out: "weakref.WeakSet[Module]" = weakref.WeakSet()


def get_act_offloading_ctx_manager(
    model: Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = DEFAULT_STASH,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """`OffloadActivations` for `model`: what its output head saves stays on the device, for it is needed at once, and
    so does what Liger's modules save. The hooks for that stay on the model, and do nothing outside of such a context.

    Args:
        model: also one in DDP, or a PEFT model.
        warn_if_no_head: whether to warn if no head is found.

    Raises ConfigError as `OffloadActivations` does.
    """
    context = OffloadActivations(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    context.update_model_params(model)
    opt_out(model, warn_if_no_head)
    return context


get_lora_act_offloading_ctx_manager = functools.partial(get_act_offloading_ctx_manager)
"""Axolotl's, for adapters: frozen and quantised weights and their views stay in any case. A separate object, because
`install` finds replaced names by identity."""


def opt_out(model: Module, warn_if_no_head: bool) -> None:
    """Keep what the head and Liger's modules save where it is."""
    inner = _unwrapped(model)
    head = next((module for name in _HEADS if (module := _module_at(inner, name)) is not None), None)
    if head is not None:
        _keep_saves_of(head)
    elif warn_if_no_head:
        warnings.warn(
            f"no output head was found in {type(inner).__name__} under any of {', '.join(_HEADS)}: what it saves is "
            "offloaded, and needed again at once. Name it `output`, or pass warn_if_no_head=False",
            EbbtideWarning,
            stacklevel=3,
        )
    for module in _of_liger(inner):
        _keep_saves_of(module)


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


def _of_liger(model: Module) -> Iterator[Module]:
    """By the name they have in the model, or by where their class comes from."""
    for name, module in named_modules(model):
        if "liger" in name.lower() or type(module).__module__.startswith("liger_kernel"):
            yield module


def _keep_saves_of(module: Module) -> None:
    """In its forward, once however often it is asked for."""
    if module in _opted_out:
        return
    _opted_out.add(module)
    stays = _Stays()
    module.register_forward_pre_hook(stays.enter, prepend=True)
    module.register_forward_hook(stays.leave, always_call=True)


class _Stays(threading.local):
    """Hooks around a forward, for each thread on its own."""

    def __init__(self) -> None:
        self._entered: list[bool] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Stays":
        """Of a copy of the model: its forwards are its own."""
        return memo.setdefault(id(self), _Stays())

    def enter(self, *_: object) -> None:
        # Inside of a checkpointed call saves are the checkpoint's: it drops them here, and has to see as many when it
        # runs the call again, which may be outside of the context or in another thread.
        keeps = OffloadActivations.is_entered() and not is_inside_checkpoint()
        if keeps:
            start_keeping()
        self._entered.append(keeps)

    def leave(self, *_: object) -> None:
        if self._entered.pop():
            stop_keeping()
