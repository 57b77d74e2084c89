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
6. Most modules hold scalars and objects alone, the same in every forward: one snapshot then serves all forwards, and
   each look compares the identities of the attributes.
"""

import contextlib
import weakref
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
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
    """Names of attributes of a module by kind, learned once and valid for the same names and types.

    Attributes:
        signature: names and types of all attributes.
        nested: tensors, tuples and containers.
        opaque: objects that cannot be put back.
        generators: random number generators among the opaque objects.
    """

    signature: tuple[tuple[str, ...], tuple[type, ...]]
    nested: list[str]
    opaque: list[str]
    generators: list[str]


class _ModuleSnapshot(NamedTuple):
    """The attributes of a module when forward began, and the names of its parameters then."""

    module: Module
    attributes: dict[str, Any]
    parameters: tuple[str, ...]
    has_contents: bool
    """Whether any attribute has contents that may change without another object in its place."""

    def is_state(self, name: str) -> bool:
        """False for torch's own attributes, and for a stand-in of a parameter that is being gathered."""
        return name not in MODULE_ATTRIBUTES and name not in self.parameters and name not in self.module._parameters


class _Steady:
    """Snapshots of modules without contents, valid as long as `is_current`."""

    def __init__(self, snapshots: list[_ModuleSnapshot]) -> None:
        self.snapshots = snapshots
        self._modules = [snapshot.module for snapshot in snapshots]
        kept = [
            {name: value for name, value in snapshot.attributes.items() if name not in MODULE_ATTRIBUTES}
            for snapshot in snapshots
        ]
        # Nothing holds an opaque object: another object of the type makes no difference.
        self._opaque = [
            (module, name, cast("type[object]", type(module.__dict__[name])))
            for module, attributes in zip(self._modules, kept, strict=True)
            for name, value in attributes.items()
            if value is _OPAQUE
        ]
        # Two names at least: with a single name an itemgetter returns no tuple.
        self._getters = [
            itemgetter("_parameters", "_buffers", *(name for name, value in attributes.items() if value is not _OPAQUE))
            for attributes in kept
        ]
        self._values, self._names, self._counts = self._look()

    def is_current(self) -> bool:
        """Whether all attributes are the same objects as before, and the parameters have the same names."""
        try:
            values, names, counts = self._look()
            return (
                counts == self._counts
                and names == self._names
                and all(map(is_, values, self._values))
                and all(type(module.__dict__[name]) is kind for module, name, kind in self._opaque)
            )
        except KeyError:  # an attribute is gone
            return False

    def _look(self) -> tuple[list[Any], list[str], list[int]]:
        """Values of the attributes, names of the parameters, and how many of each a module has: one pass in C for each,
        at every forward. Raises KeyError if an attribute is gone."""
        owned = [module.__dict__ for module in self._modules]
        values = [get(attributes) for get, attributes in zip(self._getters, owned, strict=True)]
        parameters = [found[0] for found in values]
        counts = [*map(len, owned), *map(len, parameters)]
        return list(chain.from_iterable(values)), list(chain.from_iterable(parameters)), counts


@dataclass
class KnownAttributes:
    """What is known about the attributes of a region's modules from forward to forward.

    Attributes:
        layouts: by the id of the module.
        modules: of the last forward.
        steady: the modules without contents.
        varying: all other modules.
    """

    layouts: dict[int, Layout] = field(default_factory=dict[int, Layout])
    modules: Sequence[Module] = ()
    steady: _Steady = field(default_factory=lambda: _Steady([]))
    varying: list[Module] = field(default_factory=list[Module])


class Attributes:
    """Plain attributes of `modules` at the moment of construction.

    Attributes:
        generators: random number generators held by the modules.
    """

    def __init__(self, modules: Sequence[Module], known: KnownAttributes) -> None:
        self._layouts = known.layouts
        self.generators: list[Any] = []
        memo: dict[int, _WeakTensor] = {}
        if known.modules != modules or not known.steady.is_current():
            snapshots = [self._snapshot(module, memo) for module in modules]
            known.modules = modules
            known.steady = _Steady([snapshot for snapshot in snapshots if not snapshot.has_contents])
            known.varying = [snapshot.module for snapshot in snapshots if snapshot.has_contents]
            self._varying = [snapshot for snapshot in snapshots if snapshot.has_contents]
        else:
            self._varying = [self._snapshot(module, memo) for module in known.varying]
        self._steady = known.steady

    @property
    def are_current(self) -> bool:
        """Whether the modules have no contents, and their attributes are those of forward."""
        return not self._varying and self._steady.is_current()

    def leave_current(self) -> None:
        """Undo changes since `are_current` was true."""
        if not self._steady.is_current():
            for snapshot in self._steady.snapshots:
                _undo(snapshot, snapshot.attributes, set())

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """The attributes of forward inside; the attributes of now again at exit."""
        is_steady = self._steady.is_current()
        snapshots = self._varying if is_steady else [*self._varying, *self._steady.snapshots]
        found = [_attributes_of(snapshot.module, self._layouts) for snapshot in snapshots]
        contents = {
            id(value): (value, items_of(value))
            for attributes, layout in found
            for value in map(attributes.__getitem__, layout.nested)
            if type(value) in CONTAINERS and _is_state(value)
        }
        replaced: set[tuple[int, str]] = set()
        try:
            _put_back(snapshots, replaced)
            yield
        finally:
            for snapshot, (attributes, _) in zip(snapshots, found, strict=True):
                _undo(snapshot, attributes, replaced)
            if is_steady and not self._steady.is_current():
                for snapshot in self._steady.snapshots:
                    _undo(snapshot, snapshot.attributes, replaced)
            for container, items in contents.values():
                if _is_state(container):
                    set_items(container, items)

    def _snapshot(self, module: Module, memo: dict[int, "_WeakTensor"]) -> _ModuleSnapshot:
        attributes, layout = _attributes_of(module, self._layouts)
        has_contents = bool(layout.generators)
        self.generators += map(attributes.__getitem__, layout.generators)
        for name in layout.nested:
            value = attributes[name]
            if _is_state(value):
                attributes[name] = _copied(value, memo)
            else:
                attributes[name] = _OPAQUE
                self.generators += _generators_in(value)
            has_contents |= attributes[name] is not value
        for name in layout.opaque:
            attributes[name] = _OPAQUE
        return _ModuleSnapshot(module, attributes, tuple(module._parameters), has_contents)


def _put_back(snapshots: Sequence[_ModuleSnapshot], replaced: set[tuple[int, str]]) -> None:
    fresh: dict[int, Any] = {}  # two modules with one container share a replacement
    for snapshot in snapshots:
        attributes = snapshot.module.__dict__
        for name, found, now in _changes(snapshot.attributes, attributes):
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


def _attributes_of(module: Module, layouts: dict[int, Layout]) -> tuple[dict[str, Any], Layout]:
    """A copy of the attributes, and the layout."""
    attributes = module.__dict__.copy()
    signature = tuple(attributes), tuple(map(type, attributes.values()))
    layout = layouts.get(id(module))
    if layout is None or layout.signature != signature:
        layout = layouts[id(module)] = _layout_of(*signature)
    return attributes, layout


def _layout_of(names: tuple[str, ...], types: tuple[type, ...]) -> Layout:
    layout = Layout((names, types), [], [], [])
    for name, kind in zip(names, types, strict=True):
        if name in MODULE_ATTRIBUTES:
            continue
        if kind in CONTAINERS or issubclass(kind, tuple | torch.Tensor):
            layout.nested.append(name)
        elif not issubclass(kind, SCALARS):
            layout.opaque.append(name)
            if is_generator_type(cast("type[object]", kind)):
                layout.generators.append(name)
    return layout


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor) or len(value) > _MOST_ITEMS:
        return []
    return [item for item in items_of(value) if is_generator(item)]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, former value and current value of the attributes that refer to another object now."""
    if len(now) == len(before) and all(map(is_, now.values(), before.values())):
        return []
    rows: Iterable[tuple[str, Any, Any]] = zip(before, before.values(), now.values(), strict=False)
    if list(before) != list(now):
        rows = [(name, before.get(name, ABSENT), now.get(name, ABSENT)) for name in {**before, **now}]
    return [row for row in rows if row[1] is not row[2]]


def _undo(snapshot: _ModuleSnapshot, before: dict[str, Any], replaced: set[tuple[int, str]]) -> None:
    """Undo assignments for recomputation, and changes of plain state by recomputation."""
    attributes = snapshot.module.__dict__
    for name, was, now in _changes(before, attributes):
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
