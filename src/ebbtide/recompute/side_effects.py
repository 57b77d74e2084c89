"""Side effects of a verified recomputation on plain data: undone, and reported.

Note [Side effects]
~~~~~~~~~~~~~~~~~~~
1. A region with a counter in a NumPy array, an object or a global counts once more in recomputation. Verification (see
   Note [Verification]) puts plain data back afterwards and keeps a region with such changes, so every later step equals
   plain training.
2. Plain data are numbers, strings, enums, NumPy arrays, tensors, containers of plain data, and objects with plain
   attributes only. Containers and objects with any other content (modules, parameters, functions, handles) belong to
   some machinery and stay untouched.
3. The search covers attributes of the region's modules, globals named by the modules' forward functions, and objects
   among the arguments. Containers among the arguments are rebuilt for each recomputation anyway.
"""

import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from ebbtide._sums import sums_of_tensor
from ebbtide._torch import without_dispatch

_ATOMS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, torch.dtype, torch.device)
_SEQUENCES, _MAPPINGS = (list, deque), (dict, OrderedDict, defaultdict)
_MODULES_OWN = frozenset(Module().__dict__)
_MOST_OBJECTS = 10_000  # per region, a bound for data sets and vocabularies


class Snapshot:
    """Plain data within reach of a region, at the moment of construction.

    Args:
        modules: the region's.
        given: args and kwargs of the region's call.
        known: tensors to leave out, the inputs of the call.
    """

    def __init__(self, modules: Sequence[Module], given: object, known: Iterable[torch.Tensor]) -> None:
        self._plain: dict[int, bool] = {id(t): True for t in known}
        self._alive: list[object] = []  # a dead object's id may be reused
        self._undo: list[tuple[str, Callable[[], bool]]] = []
        for value in tree_leaves(given):
            if not is_dataclass(value):
                self._is_plain(value, "an argument")
        for module in modules:
            kind = type(module).__name__
            own = [name for name in module.__dict__ if name not in _MODULES_OWN]
            self._note_names(module.__dict__, own, f"{kind}.{{}}")
            function: Any = getattr(type(module).forward, "__func__", type(module).forward)
            code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            if code is not None:
                self._note_names(names, [name for name in code.co_names if name in names], "the global {!r}")

    def put_back(self) -> list[str]:
        """Undo all changes since construction, and name them."""
        return [name for name, is_same in self._undo if not is_same()]

    def _note_names(self, entries: dict[str, Any], names: Sequence[str], text: str) -> None:
        """Note the plain values of `entries` under `names`, contents included."""
        for name in names:
            value = entries[name]
            if self._is_plain(value, text.format(name)):
                self._undo.append((text.format(name), _Entry(entries, name, value).put_back))

    def _is_plain(self, value: Any, name: str) -> bool:
        """Whether `value` is plain data; notes the contents."""
        if isinstance(value, _ATOMS):
            return True
        if id(value) in self._plain:
            return self._plain[id(value)]
        if len(self._plain) >= _MOST_OBJECTS:
            return False
        self._plain[id(value)] = True  # ends cycles
        self._alive.append(value)
        is_plain = self._plain[id(value)] = self._note(value, name)
        return is_plain

    def _note(self, value: Any, name: str) -> bool:
        if isinstance(value, torch.Tensor):
            return self._note_tensor(value, name)
        if type(value) is np.ndarray:
            self._undo.append((name, _Array(value, value.copy()).put_back))
            return not value.dtype.hasobject
        if isinstance(value, tuple):
            return self._are_plain(cast("tuple[object, ...]", value), name)
        contents = _contents_of(value)
        if contents is None or not self._are_plain(_values_of(contents), name):
            return False
        self._undo.append((name, _Contents(contents, _copy_of(contents)).put_back))
        return True

    def _are_plain(self, values: Iterable[object], name: str) -> bool:
        found = [self._is_plain(value, name) for value in values]  # all() alone would stop early, and note less
        return all(found)

    def _note_tensor(self, t: torch.Tensor, name: str) -> bool:
        if isinstance(t, Parameter) or type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_inference():
            return False
        with torch.no_grad(), without_dispatch():
            self._undo.append((name, _Tensor(t, t._version, t.detach().clone()).put_back))
        return True


class _Entry(NamedTuple):
    entries: dict[str, Any]
    name: str
    value: Any

    def put_back(self) -> bool:
        is_same = self.name in self.entries and _is_same(self.entries[self.name], self.value)
        if not is_same:
            self.entries[self.name] = self.value
        return is_same


class _Array(NamedTuple):
    array: "np.ndarray[Any, Any]"
    copy: "np.ndarray[Any, Any]"

    def put_back(self) -> bool:
        is_same = self.array.tobytes() == self.copy.tobytes()
        if not is_same:
            self.array[...] = self.copy
        return is_same


class _Tensor(NamedTuple):
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor

    def put_back(self) -> bool:
        if self.tensor._version == self.version:
            return True
        with torch.no_grad(), without_dispatch():
            is_same = torch.equal(sums_of_tensor(self.tensor), sums_of_tensor(self.copy))
            if not is_same:
                self.tensor.copy_(self.copy)
        return is_same


class _Contents(NamedTuple):
    """Contents of a container, or the `__dict__` of an object."""

    container: Any
    copy: Any

    def put_back(self) -> bool:
        now, then = _values_of(self.container), _values_of(self.copy)
        is_same = len(now) == len(then) and all(map(_is_same, now, then))
        if not is_same:
            self.container.clear()
            if isinstance(self.container, _SEQUENCES):
                self.container.extend(self.copy)
            else:
                self.container.update(self.copy)
        return is_same


def _contents_of(value: object) -> Any:
    """The container of the contents of `value`; None for opaque objects."""
    kind: type[Any] = type(value)
    if kind in (*_SEQUENCES, *_MAPPINGS, set):
        return value
    is_object = not isinstance(value, type | Module) and not callable(value) and kind.__module__ != "builtins"
    has_slots = any(vars(cls).get("__slots__") for cls in kind.__mro__)
    return getattr(value, "__dict__", None) if is_object and not has_slots else None


def _values_of(contents: Any) -> list[Any]:
    if isinstance(contents, dict):
        entries = cast("dict[Any, Any]", contents)
        return [*entries.keys(), *entries.values()]
    return sorted(cast("set[Any]", contents), key=id) if isinstance(contents, set) else list(contents)


def _copy_of(contents: Any) -> Any:
    return copy(cast("dict[Any, Any]", contents)) if isinstance(contents, dict | set) else list(contents)


def _is_same(now: Any, then: Any) -> bool:
    """Whether both are one object, or equal data."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, np.ndarray):
        found = cast("np.ndarray[Any, Any]", now)
        return found.shape == then.shape and found.tobytes() == then.tobytes()
    return isinstance(now, _ATOMS) and bool(now == then)
