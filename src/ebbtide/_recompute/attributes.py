"""Plain attributes of a region's modules: recomputation reads the values of forward, and leaves no trace.

Note [Attributes]
~~~~~~~~~~~~~~~~~
1. Plain state means numbers, strings, tensors, and tuples, lists, dicts, sets and deques. Recomputation runs with
   the plain state from before forward, however an attribute changed since: forward itself (a counter, a mask
   made by the first call, the state of an LSTM) or code between forward and backward (a scale that the model sets on
   all layers for the length of a forward).
2. After recomputation every attribute is as it was just before, also without a change by rule 1.
3. Lists, dicts and sets keep the identity, because hooks and further modules may refer to the object: only the contents
   are exchanged. A deleted container is replaced by a new container with the old contents. A container with
   parameters or objects inside is a register of some framework (DeepSpeed's, of gathered parameters) and stays as is.
4. Random number generators in attributes, and in containers in attributes, are collected for the caller
   (Note [Generators]).
5. A snapshot must not tie a graph to itself: an attribute may refer to the graph of the forward, and the graph owns the
   snapshot. Tensors are held by weak references, with a graph-free alias for tensors that die, and containers by
   contents.
"""

import contextlib
import weakref
from collections.abc import Collection, Generator, Iterable, Sequence
from copy import copy
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Module, Parameter

from ebbtide._recompute.containers import CONTAINERS, MODULE_ATTRIBUTES, SCALARS, is_plain, items_of, set_items
from ebbtide._recompute.generators import is_generator, is_generator_type

ABSENT: Any = object()
_OPAQUE: Any = object()
"""Stands for a value that cannot be put back: an object with unknown contents, or a tensor that died."""
_MOST_ITEMS = 4096  # of a container: every forward looks at each item


class Layout(NamedTuple):
    """Positions of attributes in the `__dict__` of a module, learned once and valid for the same names and types.

    Attributes:
        signature: names and types of all attributes.
        nested: tensors, tuples and containers.
        opaque: objects that cannot be put back.
        generators: random number generators among the opaque objects.
    """

    signature: tuple[tuple[str, ...], tuple[type, ...]]
    nested: list[int]
    opaque: list[int]
    generators: list[int]


class _ModuleSnapshot(NamedTuple):
    """The attributes of a module when forward began, and the names of its parameters then."""

    module: Module
    names: tuple[str, ...]
    values: tuple[Any, ...]
    parameters: tuple[str, ...]

    def is_state(self, name: str) -> bool:
        """False for torch's own attributes, and for a stand-in of a parameter that is being gathered."""
        return name not in MODULE_ATTRIBUTES and name not in self.parameters and name not in self.module._parameters


class Attributes:
    """Plain attributes of `modules` at the moment of construction.

    Args:
        layouts: positions of attributes by the id of the module, kept from forward to forward.

    Attributes:
        generators: random number generators held by the modules.
    """

    def __init__(self, modules: Sequence[Module], layouts: dict[int, Layout]) -> None:
        memo: dict[int, _WeakTensor] = {}
        self._layouts = layouts
        self.generators: list[Any] = []
        self._snapshots = [self._snapshot(module, memo) for module in modules]

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """The attributes of forward inside; the attributes of now again at exit."""
        before = [dict(snapshot.module.__dict__) for snapshot in self._snapshots]
        contents = {
            id(value): (value, items_of(value))
            for snapshot in self._snapshots
            for values, layout in [_values_of(snapshot.module, self._layouts)]
            for position in layout.nested
            if type(value := values[position]) in CONTAINERS and _is_state(value)
        }
        replaced: set[tuple[int, str]] = set()
        try:
            self._put_back(replaced)
            yield
        finally:
            for snapshot, attributes in zip(self._snapshots, before, strict=True):
                _undo(snapshot, attributes, replaced)
            for container, items in contents.values():
                if _is_state(container):
                    set_items(container, items)

    def _snapshot(self, module: Module, memo: dict[int, "_WeakTensor"]) -> _ModuleSnapshot:
        values, layout = _values_of(module, self._layouts)
        self.generators += map(values.__getitem__, layout.generators)
        if layout.nested or layout.opaque:
            found = list(values)
            for position in layout.nested:
                value = values[position]
                if _is_state(value):
                    found[position] = _copied(value, memo)
                else:
                    found[position] = _OPAQUE
                    self.generators += _generators_in(value)
            for position in layout.opaque:
                found[position] = _OPAQUE
            values = tuple(found)
        return _ModuleSnapshot(module, layout.signature[0], values, tuple(module._parameters))

    def _put_back(self, replaced: set[tuple[int, str]]) -> None:
        fresh: dict[int, Any] = {}  # two modules with one container share a replacement
        for snapshot in self._snapshots:
            attributes = snapshot.module.__dict__
            for name, found, now in _changes(snapshot.names, snapshot.values, attributes):
                is_changed = found is not _OPAQUE and not _is_unchanged(found, now)
                if not (is_changed and snapshot.is_state(name) and _is_state(now)):
                    continue
                value = found.put_in(now, fresh) if isinstance(found, _ContainerCopy) else _original(found)
                if value is not now and value is not _OPAQUE:
                    replaced.add((id(snapshot.module), name))
                    put_attribute(attributes, name, value)


def put_attribute(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a module's `__dict__`; ABSENT deletes. A module's __setattr__ would search for parameters."""
    if value is ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _values_of(module: Module, layouts: dict[int, Layout]) -> tuple[tuple[Any, ...], Layout]:
    values = tuple(module.__dict__.values())
    signature = tuple(module.__dict__), tuple(map(type, values))
    layout = layouts.get(id(module))
    if layout is None or layout.signature != signature:
        layout = layouts[id(module)] = _layout_of(*signature)
    return values, layout


def _layout_of(names: tuple[str, ...], types: tuple[type, ...]) -> Layout:
    layout = Layout((names, types), [], [], [])
    for position, (name, kind) in enumerate(zip(names, types, strict=True)):
        if name in MODULE_ATTRIBUTES:
            continue
        if kind in CONTAINERS or issubclass(kind, tuple | torch.Tensor):
            layout.nested.append(position)
        elif not issubclass(kind, SCALARS):
            layout.opaque.append(position)
            if is_generator_type(cast("type[object]", kind)):
                layout.generators.append(position)
    return layout


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor) or len(value) > _MOST_ITEMS:
        return []
    return [item for item in items_of(value) if is_generator(item)]


def _changes(names: Collection[str], values: Collection[Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, former value and current value of the attributes that refer to another object now."""
    if len(now) == len(values) and all(map(is_, now.values(), values)):
        return []
    rows: Iterable[tuple[str, Any, Any]]
    if tuple(now) == tuple(names):
        rows = zip(names, values, now.values(), strict=True)
    else:
        before = dict(zip(names, values, strict=True))
        rows = [(name, before.get(name, ABSENT), now.get(name, ABSENT)) for name in {**before, **now}]
    return [row for row in rows if row[1] is not row[2]]


def _undo(snapshot: _ModuleSnapshot, before: dict[str, Any], replaced: set[tuple[int, str]]) -> None:
    """Undo assignments for recomputation, and changes of plain state by recomputation."""
    attributes = snapshot.module.__dict__
    for name, was, now in _changes(before.keys(), before.values(), attributes):
        is_replaced = (id(snapshot.module), name) in replaced
        if snapshot.is_state(name) and (is_replaced or (_is_state(was) and _is_state(now))):
            put_attribute(attributes, name, was)


# -- values ------------------------------------------------------------------------------------------------------------


class _WeakTensor(NamedTuple):
    tensor: "weakref.ref[torch.Tensor]"
    alias: torch.Tensor | None
    """Stands in for a dead tensor."""


class _TupleCopy(NamedTuple):
    """A tuple with tensors inside."""

    kind: Any
    items: tuple[Any, ...]


class _ContainerCopy(NamedTuple):
    """Contents of a container. The id is no reference: a later container with a dead one's id serves as well."""

    empty: Any
    items: tuple[Any, ...]
    identity: int

    def is_original(self, now: Any) -> bool:
        return id(now) == self.identity and type(now) is type(self.empty)

    def put_in(self, now: Any, fresh: dict[int, Any]) -> Any:
        """Refill the current container if `now` is the original object; else reuse the replacement in `fresh`, keyed by
        the id of the original."""
        items = tuple(map(_original, self.items))
        if _is_lost(items):
            return _OPAQUE
        container = now if self.is_original(now) else fresh.setdefault(self.identity, _empty_like(self.empty))
        set_items(container, items)
        return container


def _copied(value: Any, memo: dict[int, _WeakTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = _WeakTensor(weakref.ref(value), _without_graph(value))
        return memo[id(value)]
    if type(value) in CONTAINERS:
        return _ContainerCopy(_empty_like(value), tuple(_copied(item, memo) for item in items_of(value)), id(value))
    if issubclass(type(value), tuple):
        items = tuple(_copied(item, memo) for item in value)
        return value if all(map(is_, items, value)) else _TupleCopy(type(value), items)
    return value


def _original(found: Any) -> Any:
    """The value that `_copied` was called with; _OPAQUE if a tensor is lost."""
    if isinstance(found, _WeakTensor):
        return next((t for t in (found.tensor(), found.alias) if t is not None), _OPAQUE)
    if isinstance(found, _TupleCopy):
        items = tuple(map(_original, found.items))
        make: Any = tuple if found.kind is tuple else found.kind._make
        return _OPAQUE if _is_lost(items) else make(items)
    return found


def _is_lost(items: tuple[Any, ...]) -> bool:
    return any(item is _OPAQUE for item in items)


def _is_unchanged(found: Any, now: Any) -> bool:
    if isinstance(found, _WeakTensor):
        return found.tensor() is now
    if isinstance(found, _TupleCopy):
        return type(now) is found.kind and len(now) == len(found.items) and all(map(_is_unchanged, found.items, now))
    if isinstance(found, _ContainerCopy):
        items = items_of(now) if found.is_original(now) else None
        return items is not None and len(items) == len(found.items) and all(map(_is_unchanged, found.items, items))
    return found is now


def _without_graph(t: torch.Tensor) -> torch.Tensor | None:
    """An alias of `t`; None for leaves without a possible alias."""
    if t.is_leaf and (type(t) is not torch.Tensor or t.is_inference()):
        return None
    if t.is_leaf and isinstance(t._base, Parameter):
        with torch.no_grad():  # a view taken under no_grad requires gradients and gets none; so does the alias
            return t.view_as(t)
    return t.detach().requires_grad_(t.requires_grad)


def _is_state(value: Any) -> bool:
    if type(value) in CONTAINERS:
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, items_of(value)))
    return _is_plain(value) or value is ABSENT


def _is_plain(value: Any) -> bool:
    """Whether `value` is plain, or a tuple of plain data. Tensors inside demand a class with a known constructor."""
    if not issubclass(type(value), tuple):
        return is_plain(value)
    items = cast("tuple[Any, ...]", value)
    if not all(map(_is_plain, items)):
        return False
    can_be_made = type(items) is tuple or hasattr(type(items), "_make")
    return can_be_made or not any(isinstance(item, torch.Tensor | tuple) for item in items)


def _empty_like(container: Any) -> Any:
    """An empty container with the maximal length or default factory of `container`."""
    empty: Any = copy(container)
    empty.clear()
    return empty
