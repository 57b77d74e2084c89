"""accelerate's own loops: `ebbtide.offload` for a model that an Accelerator prepares or has prepared."""

from typing import Any

import torch

import ebbtide
from ebbtide._utils.packages import extra
from ebbtide.integrations._conflicts import (
    both_move,
    both_recompute,
    check_compiled,
    check_deepspeed,
    check_modules,
    may_recompute,
)

with extra("transformers"):  # accelerate comes with the extra of transformers
    import accelerate as _  # noqa: F401 (an error now if the package is missing)

__all__ = ["offload"]


def offload(accelerator: Any, model: torch.nn.Module, **settings: Any) -> ebbtide.OffloadHandle:
    """`ebbtide.offload` for the module inside of DDP, FSDP or DeepSpeed's engine:

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = offload(accelerator, model, budget="40GiB")

    Args:
        accelerator: an `accelerate.Accelerator`, which prepares `model` before or after this call; before, with a
            dynamo backend.
        model: as `prepare` takes or returns it.
        settings: of `ebbtide.offload`.

    Raises:
        ConfigError: the FSDP plugin or the DeepSpeed configuration offloads activations; the FSDP plugin checkpoints
            beside a budget; `prepare` has yet to compile `model`. Offloaded parameters and optimizers are no error.
        EbbtideError: as `ebbtide.offload` raises.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise both_move("activation_checkpointing_offload=True of the FSDP plugin", "ebbtide")
    if getattr(plugin, "activation_checkpointing", False) and may_recompute(settings):
        raise both_recompute("activation_checkpointing=True of the FSDP plugin")
    check_deepspeed(getattr(accelerator.state, "deepspeed_plugin", None), "ebbtide")
    inner: torch.nn.Module = accelerator.unwrap_model(model)
    check_compiled(
        accelerator.state,
        inner,
        settings,
        "prepare() compiles the model, and what is offloaded before that either does not move or is not compiled: call "
        "offload() after prepare(), with what it returns",
    )
    check_modules(inner, settings, "ebbtide")
    return ebbtide.offload(inner, **settings)
