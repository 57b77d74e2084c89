"""torchtune's names, with torchtune's order of keywords."""

import contextlib

import torch

from ebbtide.compat import _context, _heads
from ebbtide.compat._context import DEFAULT_STASH, NoOpManager

__all__ = ["NoOpManager", "OffloadActivations", "get_act_offloading_ctx_manager"]


class TorchtuneOffloadActivations(_context.OffloadActivations, name="OffloadActivations"):
    """`ebbtide.compat.OffloadActivations` with the last two arguments exchanged."""

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = DEFAULT_STASH,
        min_offload_size: int = 1024,
    ) -> None:
        super().__init__(use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)


OffloadActivations = TorchtuneOffloadActivations


def get_act_offloading_ctx_manager(
    model: torch.nn.Module, enable_activation_offloading: bool, use_streams: bool = True
) -> OffloadActivations | contextlib.nullcontext[None]:
    """`OffloadActivations` for `model`, without the output head; a context that does nothing if not enabled."""
    if not enable_activation_offloading:
        return contextlib.nullcontext()
    context = OffloadActivations(use_streams=use_streams)
    context.update_model_params(model)
    _heads.opt_out(model, warn_if_no_head=True)
    return context
