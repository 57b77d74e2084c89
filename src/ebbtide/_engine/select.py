"""May this save travel? Pure: looks at the tensor and its door, changes nothing, names the reason for a no."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide._engine.context import HookContext
from ebbtide._utils.torch_private import graph_task_id
from ebbtide.types import Reason

_STRIDED = torch.strided
_TO_COPY = "ToCopyBackward0"
_ACCUMULATE = "AccumulateGrad"


def select(t: torch.Tensor, scope: HookContext) -> Reason | None:
    """None if `t` (a plain tensor, not a subclass) may travel, else why not."""
    return why_never(t, scope) or (Reason.IN_BACKWARD if graph_task_id() != -1 else None)


def why_never(t: torch.Tensor, scope: HookContext) -> Reason | None:
    """Why `t` may not travel wherever it is saved; None if it may. The cheap and frequent tests first."""
    # `type(...) is` first: isinstance(..., Parameter) runs Python code of torch for everything that is none.
    if type(t) is Parameter or (t.requires_grad and t.is_leaf):
        return Reason.PARAMETER
    base = t._base
    if base is not None and (type(base) is Parameter or _is_parameter(base)):
        return Reason.PARAMETER
    if not scope.serves(t.device):
        return Reason.OTHER_DEVICE
    if t.layout is not _STRIDED:
        return Reason.LAYOUT
    storage = t.untyped_storage()
    storage_nbytes = storage.nbytes()
    if storage_nbytes < scope.limits.min_bytes:
        return Reason.SMALL
    if t.is_quantized or t.is_nested:
        return Reason.LAYOUT
    if t._is_zerotensor():  # of forward-mode AD: bytes that are nowhere
        return Reason.EMPTY
    if t.numel() == 0 or storage_nbytes == 0:
        return Reason.EMPTY
    if storage._cdata in scope.buffers:
        return Reason.BUFFER
    if scope.is_weight(storage):
        return Reason.PARAMETER
    if _is_cast_parameter(t if base is None else base):
        return Reason.AUTOCAST_WEIGHT
    return None


def select_subclass(t: torch.Tensor) -> Reason | None:
    """None if `t`, of a tensor subclass, may be taken apart; its inner tensors are then selected one by one."""
    base = t._base
    if _is_parameter(t) or (base is not None and _is_parameter(base)):
        return Reason.PARAMETER
    if t.is_nested:
        return Reason.LAYOUT  # the ragged size is tied to the identity of the offsets
    # A pending collective's result must not be read before somebody waits for it, and that is not ours to do.
    if not is_traceable_wrapper_subclass(t) or type(t).__name__ == "AsyncCollectiveTensor":
        return Reason.SUBCLASS
    if graph_task_id() != -1:
        return Reason.IN_BACKWARD
    return None


def _is_parameter(t: torch.Tensor) -> bool:
    """A parameter, or any other leaf that collects a gradient: its owner keeps it, moving a copy frees nothing."""
    return isinstance(t, Parameter) or (t.requires_grad and t.is_leaf)


def _is_cast_parameter(t: torch.Tensor) -> bool:
    """Autocast keeps its copies of weights for the whole forward: a cast right behind an accumulating leaf."""
    node: Any = t.grad_fn
    if node is None or type(node).__name__ != _TO_COPY:
        return False
    behind = node.next_functions[0][0]
    return behind is not None and type(behind).__name__ == _ACCUMULATE and isinstance(behind.variable, Parameter)
