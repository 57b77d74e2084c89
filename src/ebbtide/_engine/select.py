"""Whether a saved tensor may travel. Pure: looks at the tensor and its HookContext, changes nothing."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide._engine.context import HookContext
from ebbtide._types import Reason
from ebbtide._utils.storage import is_discarded
from ebbtide._utils.torch_private import graph_task_id

_STRIDED = torch.strided


def select(t: torch.Tensor, context: HookContext) -> Reason | None:
    """Why `t`, a plain tensor and no subclass, stays on the device; None if `t` may travel."""
    return why_never(t, context) or (Reason.IN_BACKWARD if graph_task_id() != -1 else None)


def why_never(t: torch.Tensor, context: HookContext) -> Reason | None:
    """Why `t` may not travel, in forward or backward; None if `t` may. Cheap and frequent tests come first."""
    if type(t) is Parameter or (t.requires_grad and t.is_leaf):
        return Reason.PARAMETER
    base = t._base
    if base is not None and (type(base) is Parameter or _is_parameter(base)):
        return Reason.PARAMETER
    if not context.serves(t.device):
        return Reason.OTHER_DEVICE
    if t.layout is not _STRIDED:
        return Reason.LAYOUT
    storage = t.untyped_storage()
    storage_nbytes = storage.nbytes()
    if storage_nbytes < context.limits.min_bytes:
        return Reason.SMALL
    if t.is_quantized or t.is_nested:
        return Reason.LAYOUT
    if t._is_zerotensor():  # of forward-mode AD: has no bytes
        return Reason.EMPTY
    if t.numel() == 0 or storage_nbytes == 0 or is_discarded(storage):
        return Reason.EMPTY
    if storage._cdata in context.buffers:
        return Reason.BUFFER
    if context.is_weight(storage):
        return Reason.PARAMETER
    if _is_cast_parameter(t if base is None else base):
        return Reason.AUTOCAST_WEIGHT
    return None


def select_subclass(t: torch.Tensor) -> Reason | None:
    """Why `t`, of a tensor subclass, stays whole on the device; None if its inner tensors are selected one by one."""
    base = t._base
    if _is_parameter(t) or (base is not None and _is_parameter(base)):
        return Reason.PARAMETER
    if t.is_nested:
        return Reason.LAYOUT  # the ragged size is tied to the identity of the offsets
    # The result of a pending collective must not be read before the user waits.
    if not is_traceable_wrapper_subclass(t) or type(t).__name__ == "AsyncCollectiveTensor":
        return Reason.SUBCLASS
    if graph_task_id() != -1:
        return Reason.IN_BACKWARD
    return None


def _is_parameter(t: torch.Tensor) -> bool:
    """A parameter, or a leaf that collects a gradient: the owner keeps the memory, and moving a copy frees nothing."""
    # `isinstance(..., Parameter)` runs Python code of torch for every other object: asked of leaves alone.
    return t.is_leaf and (t.requires_grad or isinstance(t, Parameter))


def _is_cast_parameter(t: torch.Tensor) -> bool:
    """A cast right behind an accumulating leaf: autocast keeps its copies of weights for the whole forward."""
    node: Any = t.grad_fn
    if node is None or type(node).__name__ != "ToCopyBackward0":
        return False
    behind = node.next_functions[0][0]
    return behind is not None and type(behind).__name__ == "AccumulateGrad" and isinstance(behind.variable, Parameter)
