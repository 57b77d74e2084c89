"""Which calls of operators draw random numbers, and what becomes of them where they could not be drawn again."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ebbtide._errors import CaptureError
from ebbtide._recompute.ops import op_name
from ebbtide._utils.torch_private import OperatorMode


def draws_on(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device whose generator this call may draw from; None if it draws none."""
    if not _may_draw(op):
        return None
    schema = op._schema
    # What equals its default is not passed to a mode at all.
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    if values.get("dropout_p") == 0.0:
        return None  # attention, mostly: it can draw, and does not
    tensors = (value.device for value in values.values() if isinstance(value, torch.Tensor))
    return next(tensors, torch.device(values.get("device") or "cpu"))


@functools.cache
def _may_draw(op: Any) -> bool:
    has_schema = getattr(op, "_schema", None) is not None
    return has_schema and (is_tagged(op) or not op_name(op).startswith("aten::"))  # others carry no tag


def is_tagged(op: Any) -> bool:
    """Whether torch says of `op` that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


class NoDraws(OperatorMode):
    """Around a region's first run inside of a captured graph, where a generator cannot be set back."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self._region = region

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = draws_on(op, args, kwargs) if is_tagged(op) else None
        if device is not None and device.type != "cpu":
            raise CaptureError(
                f"{self._region} draws random numbers ({op}) while a graph is captured, and could not draw the same "
                "ones when it runs again: give it the recipe 'keep' or 'offload', or switch its dropout off"
            )
        return self.run_op(op, args, kwargs)
