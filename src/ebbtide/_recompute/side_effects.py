"""Side effects of a verified recomputation on plain data: undone, and reported.

Note [Side effects]
~~~~~~~~~~~~~~~~~~~
1. A region with a counter in a NumPy array, an object or a global counts once more in recomputation. Verification (see
   Note [Verification]) puts plain data back afterwards and keeps a region with such changes, so every later step equals
   plain training. A cache refilled with equal data, or in another order, is no change.
2. Plain data are numbers, strings, enums, NumPy arrays, tensors, containers of plain data, and objects with plain
   attributes only. An attribute or global with any other content (modules, parameters, functions, handles) belongs to
   some machinery and stays untouched as a whole. So do attributes whose names begin with two underscores.
3. The search covers attributes of the region's modules, globals named by the modules' forward functions, and objects
   among the arguments. Containers among the arguments are rebuilt for each recomputation anyway.
"""

import enum
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from ebbtide._utils.storage import sums_of_tensor
from ebbtide._utils.torch_private import without_dispatch

_ATOMS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, torch.dtype, torch.device)
_CONTAINERS: tuple[Any, ...] = (OrderedDict, defaultdict, dict, deque, list, set, bytearray)
"""A subclass is emptied and filled by the methods of the first of these among its bases."""
_MODULES_OWN = frozenset(Module().__dict__)
_MOST_OBJECTS = 10_000  # per region, a bound for data sets and vocabularies
_MOST_DEPTH = 100
_MOST_COPIED_BYTES = 64 * 1024**2  # per region, as long as recomputation and backward need memory too


class Snapshot:
    """Plain data within reach of a region, at the moment of construction.

    Args:
        modules: the region's.
        given: args and kwargs of the region's call.
        known: tensors to leave out, the inputs of the call.
    """

    def __init__(self, modules: Sequence[Module], given: object, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(t) for t in known}
        self._seen: dict[int, object] = {}  # alive, for a dead object's id may be reused
        self._left_bytes = _MOST_COPIED_BYTES
        self._notes: list[tuple[str, _Note]] = []
        for value in tree_leaves(given):
            if not is_dataclass(value):
                self._note("an argument", value)
        for module in modules:
            kind = type(module).__name__
            for name in [name for name in module.__dict__ if name not in _MODULES_OWN and not name.startswith("__")]:
                self._note_entry(f"{kind}.{name}", module.__dict__, name)
            function: Any = getattr(type(module).forward, "__func__", type(module).forward)
            code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
            for name in () if code is None else code.co_names:
                if name in names:
                    self._note_entry(f"the global {name!r}", names, name)

    def put_back(self) -> list[str]:
        """Undo all changes since construction, and name them."""
        return [name for name, note in self._notes if not note.put_back()]

    def _note_entry(self, label: str, entries: dict[str, Any], name: str) -> None:
        value = entries[name]
        if self._note(label, value):
            self._notes.append((label, _Entry(entries, name, value)))

    def _note(self, label: str, value: object) -> bool:
        """Note `value` and all contents, if all of that is plain data; whether so."""
        found: list[Any] = []
        queue: deque[tuple[Any, int]] = deque([(value, 0)])
        while queue:
            at, depth = queue.popleft()
            if isinstance(at, _ATOMS) or id(at) in self._seen or id(at) in self._known:
                continue
            if depth == _MOST_DEPTH or len(self._seen) + len(found) >= _MOST_OBJECTS:
                return False
            contents = _values_in(at)
            if contents is None:
                return False
            found.append(at)
            queue.extend((item, depth + 1) for item in contents)
        fresh = list({id(at): at for at in found}.values())
        self._seen.update({id(at): at for at in fresh})
        self._notes += [(label, note) for at in fresh if (note := self._note_of(at)) is not None]
        return True

    def _note_of(self, value: Any) -> "_Note | None":
        if isinstance(value, torch.Tensor):
            return _Tensor(value, value._version, self._copy_of(value), _sums_of(value))
        if isinstance(value, np.ndarray):
            array = cast("np.ndarray[Any, Any]", value)
            return _Array(array, array.copy())
        if isinstance(value, tuple):
            return None
        contents = _contents_of(value)
        return _Contents(contents, list(_items_of(contents)))

    def _copy_of(self, t: torch.Tensor) -> torch.Tensor | None:
        """None beyond the bytes that may be copied: a change is then reported, and stays."""
        nbytes = t.numel() * t.element_size()
        if nbytes > self._left_bytes:
            return None
        self._left_bytes -= nbytes
        with torch.no_grad(), without_dispatch():
            return t.detach().clone()


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
    copy: torch.Tensor | None
    sums: torch.Tensor

    def put_back(self) -> bool:
        if self.tensor._version == self.version:
            return True
        is_same = torch.equal(_sums_of(self.tensor), self.sums)
        if not is_same and self.copy is not None:
            with torch.no_grad(), without_dispatch():
                self.tensor.copy_(self.copy)
        return is_same


class _Contents(NamedTuple):
    """Contents of a container, or the `__dict__` of an object."""

    container: Any
    items: list[Any]

    def put_back(self) -> bool:
        now = list(_items_of(self.container))
        if len(now) == len(self.items) and all(map(_is_same, now, self.items)):
            return True
        if isinstance(self.container, dict) and _are_same_entries(dict(now), dict(self.items)):
            return True
        _refill(self.container, self.items)
        return False


_Note = _Entry | _Array | _Tensor | _Contents


def _refill(container: Any, items: list[Any]) -> None:
    base: Any = _base_of(container)
    base.clear(container)
    if issubclass(base, dict | set):
        base.update(container, items)
    else:
        base.extend(container, items)


def _values_in(value: Any) -> Iterable[Any] | None:
    """All values inside of `value`; None for opaque objects."""
    if isinstance(value, torch.Tensor):
        return () if _is_plain_tensor(value) else None
    if isinstance(value, np.ndarray):
        return None if cast("np.ndarray[Any, Any]", value).dtype.hasobject else ()
    if isinstance(value, tuple):
        return cast("tuple[Any, ...]", value)
    contents = _contents_of(value)
    if contents is None:
        return None
    items = _items_of(contents)
    return itertools.chain.from_iterable(items) if isinstance(contents, dict) else items


def _is_plain_tensor(t: torch.Tensor) -> bool:
    is_own = type(t) is torch.Tensor and not isinstance(t, Parameter) and t.layout is torch.strided
    if not is_own or t.is_inference() or t.is_meta or t.is_quantized or t.is_nested or t._is_zerotensor():
        return False
    reach = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
    return t.numel() == 0 or reach * t.element_size() <= t.untyped_storage().nbytes()  # FSDP frees what it has gathered


def _sums_of(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), without_dispatch():
        return sums_of_tensor(t)


def _contents_of(value: object) -> Any:
    """The container of the contents of `value`; None for opaque objects."""
    kind: type[Any] = type(value)
    if _base_of(value) is not None:
        return value if kind in _CONTAINERS or not getattr(value, "__dict__", None) else None
    is_object = not isinstance(value, type | Module) and not callable(value) and kind.__module__ != "builtins"
    has_slots = any(vars(cls).get("__slots__") for cls in kind.__mro__)
    return getattr(value, "__dict__", None) if is_object and not has_slots else None


def _base_of(container: object) -> Any:
    return next((base for base in _CONTAINERS if isinstance(container, base)), None)


def _items_of(contents: Any) -> Iterable[Any]:
    if isinstance(contents, dict):
        return cast("dict[Any, Any]", contents).items()
    return sorted(cast("set[Any]", contents), key=id) if isinstance(contents, set) else contents


def _are_same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return now.keys() == then.keys() and all(_is_same(now[key], value) for key, value in then.items())


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
        looks = now.shape == then.shape and now.dtype == then.dtype and now.device == then.device
        return looks and _is_plain_tensor(now) and torch.equal(_sums_of(now), _sums_of(then))
    return isinstance(now, _ATOMS) and bool(now == then or (now != now and then != then))
