"""Plain data in attributes of modules: kinds of values, and the contents of containers."""

from collections import OrderedDict, defaultdict, deque
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn import Module, Parameter

MODULE_ATTRIBUTES = frozenset(Module().__dict__)
"""Attributes of every module: no state of a forward, or treated one by one."""
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS: tuple[Any, ...] = (OrderedDict, defaultdict, dict, deque, list, set)
_REFILLABLE: tuple[Any, ...] = (*CONTAINERS, bytearray)


def is_plain(value: object) -> bool:
    """Whether `value` is a scalar, or a tensor that is no parameter and no view of a flat parameter of FSDP1."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, Parameter) and not getattr(value._base, "_is_flat_param", False)
    return isinstance(value, SCALARS)


def items_of(container: Any) -> tuple[Any, ...]:
    """The items of a container; keys and values of a dict alternate."""
    return tuple(chain.from_iterable(container.items())) if issubclass(type(container), dict) else tuple(container)


def set_items(container: Any, items: tuple[Any, ...]) -> None:
    """Exchange the contents of `container`, unless the identical items are inside already."""
    now = items_of(container)
    if len(now) != len(items) or not all(map(is_, now, items)):
        refill(container, items)


def refill(container: Any, items: tuple[Any, ...]) -> None:
    """Exchange the contents of `container`, by the methods of the plain class and not of a subclass."""
    base = base_of(container)
    base.clear(container)
    if issubclass(base, dict):
        base.update(container, zip(items[::2], items[1::2], strict=True))
    elif base is set:
        base.update(container, items)
    else:
        base.extend(container, items)


def base_of(value: object) -> Any:
    """The plain mutable container class that `value` is an instance of; None for other objects."""
    return next((base for base in _REFILLABLE if isinstance(value, base)), None)
