"""torchtitan: a policy for `activation_checkpoint` of its configs, in the place of its own."""

# torchtitan's pins conflict with those of what else is type-checked here, so that its types are not known.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

import ebbtide
from ebbtide._errors import ConfigError
from ebbtide._offload import handle_of
from ebbtide._utils.packages import extra
from ebbtide._utils.torch_private import modules_of, named_modules

with extra("torchtitan"):
    import torch._functorch.config as partitioner
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

_THEIRS = {each.name: each.default for each in fields(ActivationCheckpointing.Config)}
_OF_ALL_RANKS = ("budget", "profile")


class OffloadAC(ActivationCheckpointing):
    """`ebbtide.offload` on each model part, instead of torchtitan's checkpointing::

        config = llama3_8b()
        config.activation_checkpoint = OffloadAC.Config(budget="40GiB")

    Figures are with the handles: `handles(trainer.model_parts)`.

    Raises, while the Trainer is made:
        ConfigError: a setting that cannot be; another policy is on as well; a field of torchtitan's checkpointing is
            set; a budget or a profile in a pipeline.
        ModuleError: a name that means nothing.

    What only the weights can tell is raised in the first step (see `ebbtide.offload`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Settings of `ebbtide.offload`; what is None is left to it. The first three fields are not for this policy."""

        budget: int | float | str | None = None
        """The peak of device memory to stay under, on each rank: "40GiB", or a share such as 0.8."""

        mode: Literal["auto", "all", "off"] | None = None
        recipe: str | dict[str, str] | None = None
        """"keep", "offload", "recompute" or "selective", for all blocks or by name or pattern."""

        include: list[str] | None = None
        exclude: list[str] | None = None
        keep_last: int | None = None
        regions: list[str] | None = None
        profile: str | None = None
        """The path of a profile's file."""

        on_oom: Literal["raise", "replan"] | None = None
        verify: int | None = None
        store: str | None = None
        window: int | str | None = None
        prefetch: int | str | None = None
        min_bytes: int | str | None = None
        host_limit: int | str | None = None
        """Most host memory to take, on each rank: "64GiB"."""

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        given = {each.name: getattr(config, each.name) for each in fields(config)}
        for name, default in _THEIRS.items():
            if given.pop(name) != default:
                raise ConfigError(
                    f"{name}= is of torchtitan's checkpointing, and OffloadAC does not go by it: leave it out"
                )
        self._settings = {name: value for name, value in given.items() if value is not None}
        self._covered: list[torch.nn.Module] = []

    def apply(self, model: torch.nn.Module) -> None:
        """Offload what `model`, one part of the model, saves for backward. It may be on the meta device still."""
        if any(model is inner for outer in self._covered for inner in modules_of(outer)):
            return  # a vision encoder, which torchtitan hands over again beside the model that has it
        _check_alone(model)
        asked = [name for name in _OF_ALL_RANKS if name in self._settings]
        if asked and _is_part(model):
            raise ConfigError(
                f"{asked[0]}= is for ranks that have the same blocks and go by one plan, and each of a pipeline has "
                "others: write recipe= or mode="
            )
        super().apply(model)  # it sets the compiler up for blocks that run again
        ebbtide.offload(model, **self._settings)
        self._covered.append(model)

    def _wrap_block(self, module: torch.nn.Module, *, base_fqn: str | None = None) -> torch.nn.Module:
        return module


def handles(model_parts: Iterable[torch.nn.Module]) -> list[ebbtide.OffloadHandle]:
    """What `ebbtide.offload` has returned for each of a Trainer's `model_parts`; none for parts without `OffloadAC`."""
    found = map(handle_of, model_parts)
    return [handle for handle in found if handle is not None]


def _check_alone(model: torch.nn.Module) -> None:
    wrapped = next((name for name, inner in named_modules(model) if isinstance(inner, CheckpointWrapper)), None)
    if wrapped is not None:
        raise ConfigError(
            f"{wrapped} runs again under torchtitan's own checkpointing, and OffloadAC says what is done with it too: "
            "leave one of them out"
        )
    theirs = partitioner.activation_memory_budget
    if theirs != 1.0:
        raise ConfigError(
            f"torch._functorch.config.activation_memory_budget={theirs}, as MemoryBudgetAC sets it, and OffloadAC says "
            "what runs again too: leave one of them out (1.0 is without)"
        )


def _is_part(model: Any) -> bool:
    """What torchtitan's pipelines take away they leave as None."""
    return any(getattr(model, name, model) is None for name in ("tok_embeddings", "norm", "lm_head"))
