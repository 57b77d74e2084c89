"""What else may move or run again the same, as the modules themselves show it, whoever has put it there."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

from ebbtide._errors import ConfigError
from ebbtide._utils.torch_private import modules_of


def check_alone(module: torch.nn.Module, settings: Mapping[str, Any], ours: str) -> None:
    """Raises ConfigError for torch's wrappers around blocks of `module` that offload or, with a budget in `settings`,
    for those that checkpoint, and for the switches of transformers and diffusers."""
    inner = modules_of(module)
    if any(isinstance(each, OffloadWrapper) for each in inner):
        raise ConfigError(
            f"the blocks are in offload_wrapper, as activation_checkpointing_offload=True puts them, and {ours} moves "
            "the same: leave one of them out"
        )
    if settings.get("budget") is not None and any(map(_is_checkpointed, inner)):
        raise ConfigError(
            f"a budget decides what runs again, and the blocks of {type(module).__name__} are checkpointed: leave "
            "activation_checkpointing= of the FSDP plugin or strategy, activation_checkpointing_enable(), "
            "enable_gradient_checkpointing() and checkpoint_wrapper out, or budget="
        )


def check_deepspeed(plugin: Any, ours: str) -> None:
    """Raises ConfigError if the configuration of accelerate's `plugin` for DeepSpeed, if there is one, offloads."""
    config: Any = getattr(plugin, "deepspeed_config", None)
    section: Any = cast("Mapping[str, Any]", config).get("activation_checkpointing") if config else None
    if isinstance(section, Mapping) and cast("Mapping[str, Any]", section).get("cpu_checkpointing"):
        raise ConfigError(
            '"cpu_checkpointing": true in the activation_checkpointing of the DeepSpeed configuration and '
            f"{ours} move the same: leave one of them out"
        )


def check_compiled(state: Any, module: torch.nn.Module, settings: Mapping[str, Any], advice: str) -> None:
    """Raises ConfigError with `advice` if accelerate, by its `state`, calls something that it compiles around `module`
    or compiles as a copy of it; not if `module` is what it calls, or is compiled in place."""
    plugin: Any = getattr(state, "dynamo_plugin", None)
    if plugin is None or plugin.backend == "NO" or settings.get("mode") == "off":
        return
    is_regional = plugin.use_regional_compilation
    if state.distributed_type == "DEEPSPEED" or (is_regional and state.distributed_type == "FSDP"):
        return  # in place
    optimized: Any = import_module("torch._dynamo").OptimizedModule  # here, for it takes a second
    inside = modules_of(module) if is_regional else [module]
    if not any(isinstance(each, optimized) for each in inside):
        raise ConfigError(advice)


def _is_checkpointed(module: torch.nn.Module) -> bool:
    return isinstance(module, CheckpointWrapper) or getattr(module, "gradient_checkpointing", False) is True
