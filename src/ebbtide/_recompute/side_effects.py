"""Side effects of a verified recomputation on plain data: undone and reported.

Note [Side effects]
~~~~~~~~~~~~~~~~~~~
1. A region with a counter in a NumPy array, an object or a global counts once more in recomputation. Verification (see
   Note [Verification]) puts plain data back afterwards and keeps a region with such changes, so every later step equals
   plain training. A cache refilled with equal data, or in another order, is no change.
2. Plain data are numbers, strings, enums, NumPy arrays, tensors, containers of plain data, and objects with plain
   attributes only. An attribute or global with any other content (modules, parameters, functions, handles) belongs to
   some machinery and stays untouched as a whole, like attributes whose names begin with two underscores.
3. The search covers attributes of the region's modules, globals named by the modules' forward functions, and objects
   among the arguments. Containers among the arguments are rebuilt for each recomputation anyway.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from ebbtide._recompute.containers import MODULE_ATTRIBUTES, SCALARS, base_of, items_of, refill
from ebbtide._utils.storage import checksum_of_tensor
from ebbtide._utils.torch_private import without_dispatch

_ATOMS = (*SCALARS, enum.Enum, np.generic)
_MOST_DEPTH = 100


class Snapshot:
    """Plain data within reach of a region, at the moment of construction.

    Args:
        modules: the modules of the region.
        arguments: args and kwargs of the region's call.
        known: tensors to leave out, the inputs of the call.
    """

    def __init__(self, modules: Sequence[Module], arguments: object, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(t) for t in known}
        self._seen: dict[int, object] = {}  # alive, for a dead object's id may be reused
        self._left_bytes = 64 * 1024**2  # for copies of tensors, while recomputation and backward need memory too
        self._copies: list[tuple[str, _PutBack]] = []
        for value in tree_leaves(arguments):
            if not is_dataclass(value):
                self._add("an argument", value)
        for module in modules:
            kind = type(module).__name__
            for name in list(module.__dict__):
                if name not in MODULE_ATTRIBUTES and not name.startswith("__"):
                    self._add_variable(f"{kind}.{name}", module.__dict__, name)
            function: Any = getattr(type(module).forward, "__func__", type(module).forward)
            code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            for name in () if code is None else code.co_names:
                if name in names:
                    self._add_variable(f"the global {name!r}", names, name)

    def put_back(self) -> list[str]:
        """Undo all changes since construction, and name them."""
        return [name for name, put_back in self._copies if not put_back()]

    def _add_variable(self, label: str, variables: dict[str, Any], name: str) -> None:
        value = variables[name]
        if self._add(label, value):
            self._copies.append((label, partial(_put_back_variable, variables, name, value)))

    def _add(self, label: str, value: object) -> bool:
        """Copy `value` with all contents, if everything is plain data; whether so."""
        found: list[Any] = []
        queue: deque[tuple[Any, int]] = deque([(value, 0)])
        while queue:
            item, depth = queue.popleft()
            if isinstance(item, _ATOMS) or id(item) in self._seen or id(item) in self._known:
                continue
            if depth == _MOST_DEPTH or len(self._seen) + len(found) >= 10_000:  # data sets and vocabularies
                return False
            values = _values_in(item)
            if values is None:
                return False
            found.append(item)
            queue.extend((inner, depth + 1) for inner in values)
        fresh = {id(item): item for item in found}
        self._seen |= fresh
        self._copies += [(label, self._copied(item)) for item in fresh.values() if not isinstance(item, tuple)]
        return True

    def _copied(self, value: Any) -> "_PutBack":
        if isinstance(value, torch.Tensor):
            return partial(_put_back_tensor, value, value._version, self._copy_of(value), _sums_of(value))
        if isinstance(value, np.ndarray):
            array = cast("np.ndarray[Any, Any]", value)
            return partial(_put_back_array, array, array.copy())
        contents = _contents_of(value)
        return partial(_put_back_contents, contents, _ordered_items(contents))

    def _copy_of(self, t: torch.Tensor) -> torch.Tensor | None:
        """None beyond the bytes that may be copied: a change is then reported, and stays."""
        nbytes = t.numel() * t.element_size()
        if nbytes > self._left_bytes:
            return None
        self._left_bytes -= nbytes
        with torch.no_grad(), without_dispatch():
            return t.detach().clone()


_PutBack: TypeAlias = Callable[[], bool]
"""Puts data back, if changed since the snapshot. Returns whether the data were the same."""


def _put_back_variable(variables: dict[str, Any], name: str, value: Any) -> bool:
    """Of a global, or an attribute of a module."""
    is_same = name in variables and _is_same(variables[name], value)
    if not is_same:
        variables[name] = value
    return is_same


def _put_back_array(array: "np.ndarray[Any, Any]", copy: "np.ndarray[Any, Any]") -> bool:
    is_same = array.tobytes() == copy.tobytes()
    if not is_same:
        array[...] = copy
    return is_same


def _put_back_tensor(t: torch.Tensor, version: int, copy: torch.Tensor | None, sums: torch.Tensor) -> bool:
    is_same = t._version == version or torch.equal(_sums_of(t), sums)
    if not is_same and copy is not None:
        with torch.no_grad(), without_dispatch():
            t.copy_(copy)
    return is_same


def _put_back_contents(container: Any, items: tuple[Any, ...]) -> bool:
    """Of a container, or of the `__dict__` of an object."""
    is_same = _is_same(_ordered_items(container), items)
    if not is_same and isinstance(container, dict):
        now = dict(cast("dict[Any, Any]", container).items())
        then = dict(zip(items[::2], items[1::2], strict=True))
        is_same = now.keys() == then.keys() and all(_is_same(now[key], value) for key, value in then.items())
    if not is_same:
        refill(container, items)
    return is_same


def _values_in(value: Any) -> Iterable[Any] | None:
    """All values inside `value`; None for opaque objects."""
    if isinstance(value, torch.Tensor):
        return () if _is_plain_tensor(value) else None
    if isinstance(value, np.ndarray):
        return None if cast("np.ndarray[Any, Any]", value).dtype.hasobject else ()
    if isinstance(value, tuple):
        return cast("tuple[Any, ...]", value)
    contents = _contents_of(value)
    return None if contents is None else items_of(contents)


def _is_plain_tensor(t: torch.Tensor) -> bool:
    is_own = type(t) is torch.Tensor and not isinstance(t, Parameter) and t.layout is torch.strided
    if not is_own or t.is_inference() or t.is_meta or t.is_quantized or t.is_nested or t._is_zerotensor():
        return False
    reach = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
    return t.numel() == 0 or reach * t.element_size() <= t.untyped_storage().nbytes()  # FSDP frees what it has gathered


def _sums_of(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), without_dispatch():
        return checksum_of_tensor(t)


def _contents_of(value: object) -> Any:
    """The container of the contents of `value`; None for opaque objects."""
    kind: type[Any] = type(value)
    base = base_of(value)
    if base is not None:
        return value if kind is base or not getattr(value, "__dict__", None) else None
    # A logger leads to all loggers of the process, in each region anew.
    is_opaque = isinstance(value, type | Module | logging.Logger)
    is_object = not is_opaque and not callable(value) and kind.__module__ != "builtins"
    has_slots = any(vars(cls).get("__slots__") for cls in kind.__mro__)
    return getattr(value, "__dict__", None) if is_object and not has_slots else None


def _ordered_items(contents: Any) -> tuple[Any, ...]:
    items = items_of(contents)
    return tuple(sorted(items, key=id)) if isinstance(contents, set) else items


def _is_same(now: Any, then: Any, depth: int = 0) -> bool:
    """Whether both are one object, or equal data."""
    if now is then:
        return True
    if type(now) is not type(then) or depth == _MOST_DEPTH:
        return False
    if isinstance(now, tuple | list):
        mine, others = cast("Sequence[Any]", now), cast("Sequence[Any]", then)
        pairs = zip(mine, others, strict=False)
        return len(mine) == len(others) and all(_is_same(a, b, depth + 1) for a, b in pairs)
    if isinstance(now, np.ndarray):
        found = cast("np.ndarray[Any, Any]", now)
        return found.shape == then.shape and found.tobytes() == then.tobytes()
    if isinstance(now, torch.Tensor):
        is_alike = now.shape == then.shape and now.dtype == then.dtype and now.device == then.device
        return is_alike and _is_plain_tensor(now) and torch.equal(_sums_of(now), _sums_of(then))
    return isinstance(now, _ATOMS) and bool(now == then or (now != now and then != then))
