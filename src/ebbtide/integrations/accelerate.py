"""accelerate's own loops: `ebbtide.offload` for a model that an Accelerator prepares or has prepared."""

from typing import Any

import torch

import ebbtide
from ebbtide._errors import ConfigError
from ebbtide._utils.packages import extra
from ebbtide.integrations._alone import check_alone, check_compiled, check_deepspeed

with extra("transformers"):  # that one brings it
    from accelerate import Accelerator


def offload(accelerator: Accelerator, model: torch.nn.Module, **settings: Any) -> ebbtide.OffloadHandle:
    """`ebbtide.offload` of what is inside of DDP, FSDP or DeepSpeed's engine::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = offload(accelerator, model, budget="40GiB")

    Args:
        accelerator: the one that prepares `model`, before or after it does; after, with a dynamo backend.
        settings: of `ebbtide.offload`.

    Returns the handle, for `stats()`, `report()` and `remove()`.

    Raises ConfigError if the FSDP plugin or the DeepSpeed configuration offloads activations, or the former checkpoints
    them where there is a budget, or `prepare` has yet to compile `model`, and what `ebbtide.offload` raises. Offloaded
    parameters and optimizers are something else, and may be.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise ConfigError(
            "activation_checkpointing_offload=True of the FSDP plugin and ebbtide move the same: leave one of them out"
        )
    if getattr(plugin, "activation_checkpointing", False) and settings.get("budget") is not None:
        raise ConfigError(
            "a budget decides what runs again, and activation_checkpointing=True of the FSDP plugin does too: leave "
            "one of them out"
        )
    check_deepspeed(getattr(accelerator.state, "deepspeed_plugin", None), "ebbtide")
    anyhow: Any = accelerator  # it says nothing of what unwrap_model takes and gives
    inner: torch.nn.Module = anyhow.unwrap_model(model)
    check_compiled(
        accelerator.state,
        inner,
        settings,
        "prepare() compiles the model, and what is offloaded before that either does not move or is not compiled: call "
        "offload() after prepare(), with what it returns",
    )
    check_alone(inner, settings, "ebbtide")
    return ebbtide.offload(inner, **settings)
