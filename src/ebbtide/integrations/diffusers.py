"""Diffusion transformers as diffusers and FastVideo train them: one call, and flags for a training script.

Neither package is imported: the arguments are modules, or pipelines of either package.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch

import ebbtide
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideError, ModuleError
from ebbtide._model.regions import called, find_regions
from ebbtide._utils.torch_private import modules_of, parameters_of
from ebbtide.integrations._arguments import OffloadArguments
from ebbtide.integrations._conflicts import check_modules

__all__ = ["OffloadArguments", "OffloadedTransformers", "add_arguments", "offload_transformers", "settings_of"]

_FLAG = "activation-offloading"


class OffloadedTransformers:
    """The handles of several transformers; `offload_transformers` returns one."""

    def __init__(self) -> None:
        self.handles: dict[str, ebbtide.OffloadHandle] = {}
        """Handle of each transformer, by its name in the pipeline, else by its class."""

    def stats(self) -> dict[str, Stats]:
        """Totals since `offload_transformers`, by transformer."""
        return {name: handle.stats() for name, handle in self.handles.items()}

    def report(self) -> str:
        """The figures of `stats` as tables."""
        return "\n".join(f"{name}: {handle.report()}" for name, handle in self.handles.items())

    def profiles(self) -> dict[str, ebbtide.Profile]:
        """Profiles of the measured transformers: bytes and seconds of each block and each saved tensor in a step.

        No transformer is measured if the settings (`mode`, `recipe`, ...) leave nothing to the planner: call
        `ebbtide.measure(model, batch)` then.
        """
        return {name: profile for name, handle in self.handles.items() if (profile := handle.profile) is not None}

    def memory_profile(self) -> str:
        """Tables of the bytes that blocks save and need, and of the plans with predicted peaks; see `profiles`."""
        tables = (f"{name}: {profile}\n{self.handles[name].plan}" for name, profile in self.profiles().items())
        return "\n".join(tables) or "no profile: the planner measures the first three steps, if settings ask for a plan"

    def remove(self) -> None:
        """Undo `offload_transformers`. Graphs under way still run backward."""
        for handle in self.handles.values():
            handle.remove()


def offload_transformers(*transformers: Any, **settings: Any) -> OffloadedTransformers:
    """`ebbtide.offload` for every transformer that trains, each once:

        offloaded = offload_transformers(transformer)               # the smallest peak for a step at most 1 % slower
        offloaded = offload_transformers(pipeline, budget="40GiB")  # every transformer in it that trains
        ...  # train as before
        print(offloaded.report(), offloaded.memory_profile())
        offloaded.remove()

    Call the function after `requires_grad_()`, `add_adapter()` or FastVideo's `set_trainable()`, before or after
    checkpointing is switched on, and before or after DDP, FSDP2 or compile(). Frozen transformers are left alone.

    Args:
        transformers: transformers, modules that only contain some (a ModuleDict, FastVideo's TrainingMethod), or
            pipelines of diffusers or FastVideo.
        settings: of `ebbtide.offload`, for each transformer.

    Raises:
        ConfigError: an argument of another type, a budget beside checkpointed blocks, blocks in torch's
            offload_wrapper, one profile file for several transformers, or an invalid setting.
        ModuleError: no transformer trains, or a training transformer has no repeated blocks or has a handle already.
            No transformer is offloaded then.
        PlanError, DeviceError: as `ebbtide.offload` does.
    """
    found = _without_nested([each for argument in transformers for each in _transformers_in(argument)])
    trained = _by_name([(name, each) for name, each in found if any(p.requires_grad for p in parameters_of(each))])
    if settings.get("mode") != "off":
        _check(trained, [name for name, _ in found], settings)
    offloaded = OffloadedTransformers()
    try:
        for name, module in trained.items():
            offloaded.handles[name] = ebbtide.offload(module, **settings)
    except EbbtideError:
        offloaded.remove()
        raise
    return offloaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--activation-offloading` and the fields of `OffloadArguments`, as `--offload-budget 40GiB`.

    Flags are spelled with dashes or underscores. `settings_of` reads them.
    """
    group = parser.add_argument_group("activation offloading")
    group.add_argument(*_spellings(_FLAG), action="store_true", help="Move activations out of device memory.")
    for each in fields(OffloadArguments):
        group.add_argument(*_spellings(each.name.replace("_", "-")), **each.metadata)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Settings for `offload_transformers` from a parser with `add_arguments`; `{"mode": "off"}` without the flag.

    Raises:
        ConfigError: settings without the flag.
    """
    settings = OffloadArguments(**{each.name: getattr(args, each.name) for each in fields(OffloadArguments)}).settings()
    if args.activation_offloading:
        return settings
    if settings:
        raise ConfigError(f"--offload-{next(iter(settings)).replace('_', '-')} does nothing without --{_FLAG}: add it")
    return {"mode": "off"}


def _spellings(option: str) -> list[str]:
    return [f"--{option}", f"--{option.replace('-', '_')}"]


def _transformers_in(argument: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules in a module or a pipeline, with their names."""
    if isinstance(argument, torch.nn.Module):
        for name, module in called(argument, ""):
            yield name or type(module).__name__, module
        return
    names = ("trainable_transformer_modules", "components")  # of FastVideo's pipelines, of diffusers'
    modules: list[Any] = [getattr(argument, n) for n in names if isinstance(getattr(argument, n, None), Mapping)]
    if not modules:
        raise ConfigError(
            f"{type(argument).__name__} is no module and no pipeline of diffusers or FastVideo: give the transformers"
        )
    for name, module in cast("Mapping[str, Any]", modules[0]).items():
        if isinstance(module, torch.nn.Module):
            yield name, module


def _without_nested(found: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """Each module once, without modules inside of others: DDP(model) stands for model too."""
    once = {module: name for name, module in reversed(found)}
    inside = {inner for module in once for inner in modules_of(module) if inner is not module}
    return [(name, module) for module, name in reversed(once.items()) if module not in inside]


def _by_name(found: list[tuple[str, torch.nn.Module]]) -> dict[str, torch.nn.Module]:
    """Modules by name; a number is added to repeated names."""
    named: dict[str, torch.nn.Module] = {}
    for name, module in found:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        named[next(free for free in itertools.chain([name], numbered) if free not in named)] = module
    return named


def _check(trained: Mapping[str, torch.nn.Module], found: list[str], settings: Mapping[str, Any]) -> None:
    if not trained:
        raise ModuleError(
            f"none of the arguments ({', '.join(found) or 'no module'}) trains: call offload_transformers() after "
            "requires_grad_(), add_adapter() or set_trainable()"
        )
    if len(trained) > 1 and isinstance(settings.get("profile"), str | Path):
        raise ConfigError(
            f"profile={str(settings['profile'])!r} is the file of one transformer, and {len(trained)} train "
            f"({', '.join(trained)}): call offload_transformers() for each of them, with a file of its own"
        )
    for name, module in trained.items():
        if not find_regions(module):
            raise ModuleError(
                f"{name} ({type(module).__name__}) trains and has no repeated blocks (a ModuleList of two or more of "
                "one class, or of a single one): freeze it if it is not to be trained, or use "
                "ebbtide.offload_activations() around its forward"
            )
        check_modules(module, settings, "offload_transformers()")
