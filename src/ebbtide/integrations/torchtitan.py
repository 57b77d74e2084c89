"""torchtitan: `OffloadAC`, a policy for `activation_checkpoint` in the configs, and the `handles` of a Trainer."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

import ebbtide
from ebbtide._config import Mode, with_settings
from ebbtide._errors import ConfigError
from ebbtide._offload import handle_of
from ebbtide._utils.packages import extra
from ebbtide._utils.torch_private import modules_of, named_modules

with extra("torchtitan"):
    import torch._functorch.config as partitioner
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    if TYPE_CHECKING:  # torchtitan's pins conflict with those of the other type-checked packages
        ActivationCheckpointing: Any = None
    else:
        from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

__all__ = ["OffloadAC", "handles"]


class OffloadAC(ActivationCheckpointing):
    """`ebbtide.offload` on each model part, instead of torchtitan's checkpointing:

        config = llama3_8b()
        config.activation_checkpoint = OffloadAC.Config(budget="40GiB")

    The handles have plans and stats: `handles(trainer.model_parts)`.

    Raises, while the Trainer is made:
        ConfigError: an invalid setting; another policy is on as well; a field of torchtitan's checkpointing is set; a
            budget or a profile in a pipeline.
        ModuleError: a name without a module.

    Errors about the weights come in the first step (see `ebbtide.offload`).
    """

    @with_settings
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Settings of `ebbtide.offload`, on each rank; None leaves a setting to `offload`."""

        budget: int | float | str | None = None
        max_slowdown: float | None = None
        mode: Mode | None = None
        recipe: str | dict[str, str] | None = None
        include: list[str] | None = None
        exclude: list[str] | None = None
        keep_last: int | None = None
        regions: list[str] | None = None
        profile: str | None = None
        on_oom: Literal["raise", "replan"] | None = None
        verify: int | None = None
        store: str | None = None
        window: int | str | None = None
        prefetch: int | str | None = None
        min_bytes: int | str | None = None
        host_limit: int | str | None = None

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        settings = {each.name: getattr(config, each.name) for each in fields(config)}
        for each in fields(ActivationCheckpointing.Config):
            if settings.pop(each.name) != each.default:
                raise ConfigError(
                    f"{each.name}= is of torchtitan's checkpointing, and OffloadAC does not use it: leave it out"
                )
        self._settings = {name: value for name, value in settings.items() if value is not None}
        self._covered: list[torch.nn.Module] = []

    def apply(self, model: torch.nn.Module) -> None:
        """Offload the saved tensors of `model`, a part of the trained model, on its device or on the meta device."""
        if any(model is inner for outer in self._covered for inner in modules_of(outer)):
            return  # a vision encoder: torchtitan passes the encoder again after the model around it
        _check_conflicts(model)
        # torchtitan's pipelines replace the modules of other stages by None.
        if "profile" in self._settings and any(getattr(model, name, model) is None for name in _ENDS):
            raise ConfigError(
                "profile= names one file, and the stages of a pipeline have a profile each: leave it out. Each stage "
                "measures its first steps"
            )
        super().apply(model)  # sets the compiler up for recomputed blocks
        ebbtide.offload(model, **self._settings)
        self._covered.append(model)

    def _wrap_block(self, module: torch.nn.Module, *, base_fqn: str | None = None) -> torch.nn.Module:
        return module


_ENDS = ("tok_embeddings", "norm", "lm_head")


def handles(model_parts: Iterable[torch.nn.Module]) -> list[ebbtide.OffloadHandle]:
    """Handles of a Trainer's `model_parts`; parts without `OffloadAC` have none."""
    found = map(handle_of, model_parts)
    return [handle for handle in found if handle is not None]


def _check_conflicts(model: torch.nn.Module) -> None:
    wrapped = next((name for name, inner in named_modules(model) if isinstance(inner, CheckpointWrapper)), None)
    if wrapped is not None:
        raise ConfigError(
            f"{wrapped} is recomputed by torchtitan's own checkpointing, and OffloadAC decides about the block too: "
            "leave one of them out"
        )
    share = partitioner.activation_memory_budget
    if share != 1.0:
        raise ConfigError(
            f"torch._functorch.config.activation_memory_budget={share}, as MemoryBudgetAC sets it, and OffloadAC "
            "decides what is recomputed too: leave one of them out (1.0 is without)"
        )
