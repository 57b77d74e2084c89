"""Errors for trainer settings and module wrappers that offload or recompute what ebbtide does."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

from ebbtide._errors import ConfigError
from ebbtide._utils.torch_private import modules_of


def both_move(theirs: str, ours: str, more: str = "") -> ConfigError:
    """The error for two settings that offload."""
    return ConfigError(f"{theirs} and {ours} move the same: leave one of them out{more}")


def both_recompute(theirs: str) -> ConfigError:
    """The error for a setting that checkpoints, beside a budget."""
    return ConfigError(f"a budget decides what is recomputed, and {theirs} does too: leave one of them out")


def may_recompute(settings: Mapping[str, Any]) -> bool:
    """Whether a planner with these settings of `offload` recomputes regions."""
    return any(settings.get(goal) is not None for goal in ("budget", "max_slowdown"))


def check_modules(module: torch.nn.Module, settings: Mapping[str, Any], caller: str) -> None:
    """Raises ConfigError if blocks of `module` offload, or checkpoint while `settings` have a budget.

    Found are torch's wrappers, and the switch `gradient_checkpointing` of transformers and diffusers.
    """
    inner = modules_of(module)
    if any(isinstance(each, OffloadWrapper) for each in inner):
        raise ConfigError(
            f"the blocks are in offload_wrapper, as activation_checkpointing_offload=True puts them, and {caller} "
            "moves the same: leave one of them out"
        )
    if may_recompute(settings) and any(
        isinstance(each, CheckpointWrapper) or getattr(each, "gradient_checkpointing", False) is True for each in inner
    ):
        raise ConfigError(
            f"a budget decides what is recomputed, and the blocks of {type(module).__name__} are checkpointed: leave "
            "activation_checkpointing= of the FSDP plugin or strategy, activation_checkpointing_enable(), "
            "enable_gradient_checkpointing() and checkpoint_wrapper out, or budget="
        )


def check_deepspeed(plugin: Any, caller: str) -> None:
    """Raises ConfigError if the configuration of accelerate's DeepSpeed `plugin`, if any, offloads."""
    config: Any = getattr(plugin, "deepspeed_config", None)
    section: Any = cast("Mapping[str, Any]", config).get("activation_checkpointing") if config else None
    if isinstance(section, Mapping) and cast("Mapping[str, Any]", section).get("cpu_checkpointing"):
        raise both_move(
            '"cpu_checkpointing": true in the activation_checkpointing of the DeepSpeed configuration', caller
        )


def check_compiled(state: Any, module: torch.nn.Module, settings: Mapping[str, Any], advice: str) -> None:
    """Raises ConfigError with `advice` if accelerate compiles `module` together with a wrapper, or a copy.

    Compiling `module` alone, in place, or before `offload`, is no error. `state`: of accelerate.
    """
    plugin: Any = getattr(state, "dynamo_plugin", None)
    if plugin is None or plugin.backend == "NO" or settings.get("mode") == "off":
        return
    is_regional = plugin.use_regional_compilation
    if state.distributed_type == "DEEPSPEED" or (is_regional and state.distributed_type == "FSDP"):
        return  # in place
    if not is_regional and state.distributed_type == "NO":
        return  # no wrapper is in the graph
    optimized: Any = import_module("torch._dynamo").OptimizedModule  # the import takes a second
    inside = modules_of(module) if is_regional else [module]
    if not any(isinstance(each, optimized) for each in inside):
        raise ConfigError(advice)


def plans_with_others(settings: Mapping[str, Any]) -> bool:
    """Whether a planner with these settings of `offload` meets other ranks."""
    return may_recompute(settings) or isinstance(settings.get("profile"), str | Path)


def check_megatron(config: Any, modules: object, settings: Mapping[str, Any], chunks: int) -> None:
    """Raises ConfigError if Megatron's TransformerConfig, words for `modules` and settings of `offload` for a number of
    `chunks` exclude each other."""
    if config.cpu_offloading:
        raise both_move("cpu_offloading=True of Megatron's config", "ebbtide")
    words = "" if modules is None else "modules="
    if config.fine_grained_activation_offloading:
        if words:
            raise both_move(
                f"fine_grained_activation_offloading of Megatron's config, for {config.offload_modules},",
                "modules=",
                " (without modules= ebbtide moves Megatron's list, and Megatron nothing)",
            )
        words = "offload_modules of Megatron's config"
        delta = getattr(config, "delta_offload_bytes_across_pp_ranks", 0)  # from 0.17 on
        if delta:
            raise ConfigError(
                f"delta_offload_bytes_across_pp_ranks={delta}: ebbtide keeps no bytes by rank. Leave the setting out, "
                "and write a smaller activation_offload_fraction for later stages"
            )
    goal = next((name for name in ("budget", "max_slowdown", "profile") if settings.get(name) is not None), None)
    goal = "mode" if goal is None and settings.get("mode") == "auto" else goal
    if goal and words:
        raise ConfigError(f"{goal}= leaves it to the planner what moves, and {words} says it: leave one of them out")
    if words and settings.get("include"):
        raise ConfigError(f"include= and {words} both name what moves: leave one of them out")
    if goal and chunks > 1:
        raise ConfigError(
            f"{goal}= for {chunks} chunks: a plan knows the memory of one chunk alone. Write modules= or recipe="
        )
