"""Megatron-Core's checkpoints that discard their outputs: `recompute_modules` layernorm, moe_act and mla_up_proj.

Note [Discarded outputs]
~~~~~~~~~~~~~~~~~~~~~~~~
Megatron sets the storage of such an output to size 0 in forward, after later operators have saved the output, and fills
the same storage again when a gradient arrives. Storages do not count versions.
1. The output stays: a copy out that runs behind the host would read memory that belongs to others already. Megatron has
   freed the memory, so moving the output frees nothing.
2. In a region that ebbtide recomputes, no output is discarded: the region saves none of the tensors, and no gradient
   would reach the tensors of the recomputation to fill the storages. Backward still runs Megatron's checkpoint, because
   the checkpoint adds up gradients in another order than the operators inside would.
"""

import sys
from collections.abc import Callable
from typing import Any

from ebbtide._recompute.frame import Frame, Recomputation
from ebbtide._utils.storage import mark_discarded
from ebbtide._utils.torch_private import top_pack_hook


def install() -> None:
    """Replace Megatron's method if Megatron is imported. Outside of entry points only marks are set."""
    cls: Any = getattr(sys.modules.get("megatron.core.tensor_parallel.random"), "CheckpointWithoutOutput", None)
    if cls is not None and cls.checkpoint.__module__ != __name__:
        cls.checkpoint = _around(cls.checkpoint)


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs: Any = original(self, run_function, *args)
        owner = getattr(top_pack_hook(), "__self__", None)
        if isinstance(owner, Frame | Recomputation):
            self.outputs = ()  # none to discard, and none to fill
        if isinstance(owner, Recomputation):
            self.ctx = None  # ends Megatron's recomputation
        for output in self.outputs or ():  # None while Megatron warms up for a capture, and discards nothing
            mark_discarded(output.untyped_storage())
        return outputs

    return checkpoint
