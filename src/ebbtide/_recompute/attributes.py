"""Plain attributes of a region's modules: a second run finds what the first one found, and leaves what was there.

Note [Attributes]
~~~~~~~~~~~~~~~~~
1. State is numbers, words, tensors, and tuples, lists, dicts, sets and deques of these. What was state when the first
   run began, and is something else by now, is put back for the second run, whoever has changed it: the forward itself
   (a counter, what it made at its first call, the state of an LSTM), or anybody between then and backward (a scale that
   the model sets on its layers and takes back).
2. After the second run the attributes are what they were before it, also those for which nothing had to be put back.
3. Lists, dicts and sets stay the same objects, for hooks and other modules may have them too: what they hold is
   exchanged. One that is not there any more is given as another with the same contents. Where parameters or objects are
   in one it is somebody's register (DeepSpeed's of what a second run has gathered), and left alone.
4. Random number generators are collected from attributes and from containers in attributes, for the caller to put
   back (Note [Generators]).
5. Nothing that was found may tie a graph to itself: what an attribute holds may have this forward's graph by its end,
   and that graph has what was found. So tensors are held weakly, with an alias that has no graph for those that die,
   and containers by what they held.
"""

import contextlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Module, Parameter

from ebbtide._recompute.generators import is_generator

ABSENT: Any = object()
_OUT_OF_SIGHT: Any = object()
"""Stands for an object that may be anything, and hold anything."""
_WORDS_AND_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_MOST_ITEMS = 4096  # of a container: more are looked through at every forward for too long
_MODULES_OWN = frozenset(Module().__dict__)
"""Attributes that every module has: they are no state of its forward, or looked after one by one."""


class Layout(NamedTuple):
    """Of a module's attributes: by place, those that hold others, those that cannot be put back, and generators.

    Attributes:
        looks: their names and types.
    """

    looks: tuple[tuple[str, ...], tuple[type, ...]]
    to_look_into: list[int]
    out_of_sight: list[int]
    generators: list[int]


class _Then(NamedTuple):
    """A module's attributes when the first run began, and the names that its parameters had."""

    module: Module
    names: tuple[str, ...]
    values: tuple[Any, ...]
    parameters: tuple[str, ...]

    def is_of_forward(self, name: str) -> bool:
        """Neither torch's own, nor what stands in a parameter's place while that is gathered."""
        return name not in _MODULES_OWN and name not in self.parameters and name not in self.module._parameters


class Attributes:
    """Of some modules, as they are when this is made.

    Args:
        layouts: what was learned of the modules' attributes, by id; kept from forward to forward.
    """

    def __init__(self, modules: Sequence[Module], layouts: dict[int, Layout]) -> None:
        memo: dict[int, _Tensor] = {}
        self._layouts = layouts
        self.generators: list[Any] = []
        """Random number generators held by the modules."""
        self._then = [self._found(module, memo) for module in modules]

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """The attributes as they were; as they are now, again, afterwards."""
        before = [dict(then.module.__dict__) for then in self._then]
        held = _held_by((then.module for then in self._then), self._layouts)
        put: set[tuple[int, str]] = set()
        try:
            self._put_back(put)
            yield
        finally:
            for then, attributes in zip(self._then, before, strict=True):
                _leave(then, attributes, put)
            for container, items in held.values():
                if _is_state(container):
                    _hold(container, items)

    def _found(self, module: Module, memo: dict[int, "_Tensor"]) -> _Then:
        values, layout = _look_at(module, self._layouts)
        self.generators += map(values.__getitem__, layout.generators)
        if layout.to_look_into or layout.out_of_sight:
            found = list(values)
            for place in layout.to_look_into:
                value = values[place]
                if _is_state(value):
                    found[place] = _snapshot(value, memo)
                else:
                    found[place] = _OUT_OF_SIGHT
                    self.generators += _generators_in(value)
            for place in layout.out_of_sight:
                found[place] = _OUT_OF_SIGHT
            values = tuple(found)
        return _Then(module, layout.looks[0], values, tuple(module._parameters))

    def _put_back(self, put: set[tuple[int, str]]) -> None:
        fresh: dict[int, Any] = {}  # of a list that two modules shared there is one
        for then in self._then:
            attributes = then.module.__dict__
            for name, found, now in _differing(then, attributes):
                if not then.is_of_forward(name) or not _is_state(now):
                    continue
                value = found.put_in(now, fresh) if isinstance(found, _Contents) else _again(found)
                if value is not now and value is not _OUT_OF_SIGHT:
                    put.add((id(then.module), name))
                    put_attribute(attributes, name, value)


def put_attribute(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Of a module: without its __setattr__, which looks for parameters in the value. ABSENT: takes it away."""
    if value is ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value


def _look_at(module: Module, layouts: dict[int, Layout]) -> tuple[tuple[Any, ...], Layout]:
    """The values of its attributes, and where among them is what."""
    values = tuple(module.__dict__.values())
    looks = tuple(module.__dict__), tuple(map(type, values))
    layout = layouts.get(id(module))
    if layout is None or layout.looks != looks:
        layout = layouts[id(module)] = _layout_of(*looks)
    return values, layout


def _layout_of(names: tuple[str, ...], types: tuple[type, ...]) -> Layout:
    layout = Layout((names, types), [], [], [])
    for place, (name, kind) in enumerate(zip(names, types, strict=True)):
        if name in _MODULES_OWN:
            continue
        if kind in _CONTAINERS or issubclass(kind, tuple | torch.Tensor):
            layout.to_look_into.append(place)
        elif not issubclass(kind, _WORDS_AND_NUMBERS):
            layout.out_of_sight.append(place)
            if is_generator(cast("type[object]", kind)):
                layout.generators.append(place)
    return layout


def _generators_in(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor) or len(value) > _MOST_ITEMS:
        return []
    return [item for item in _items_of(value) if is_generator(cast("type[object]", type(item)))]


def _differing(then: _Then, now: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """Name, what was found and what is there now, of those that are not the same any more."""
    if len(now) == len(then.values) and all(map(is_, now.values(), then.values)):
        return []
    if tuple(now) == then.names:
        rows = list(zip(then.names, then.values, now.values(), strict=True))
    else:
        before = dict(zip(then.names, then.values, strict=True))
        rows = [(name, before.get(name, ABSENT), now.get(name, ABSENT)) for name in {**before, **now}]
    changed = (row for row in rows if row[1] is not row[2] and row[1] is not _OUT_OF_SIGHT)
    return [(name, found, current) for name, found, current in changed if not _is_same(found, current)]


def _held_by(modules: Iterable[Module], layouts: dict[int, Layout]) -> dict[int, tuple[Any, tuple[Any, ...]]]:
    """The containers among the attributes, by id, and their items."""
    held: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    for module in modules:
        values, layout = _look_at(module, layouts)
        for value in map(values.__getitem__, layout.to_look_into):
            if type(value) in _CONTAINERS and _is_state(value):
                held[id(value)] = value, _items_of(value)
    return held


def _leave(then: _Then, before: dict[str, Any], put: set[tuple[int, str]]) -> None:
    """Takes back what was put there for the second run, and what that changed itself."""
    attributes = then.module.__dict__
    if len(before) == len(attributes) and all(map(is_, before.values(), attributes.values())):
        return
    for name in {**before, **attributes}:
        was, now = before.get(name, ABSENT), attributes.get(name, ABSENT)
        if was is now or not then.is_of_forward(name):
            continue
        if (id(then.module), name) in put or (_is_state(was) and _is_state(now)):
            put_attribute(attributes, name, was)


# -- values ------------------------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """As it was found; the alias stands for it if it has died."""

    tensor: "weakref.ref[torch.Tensor]"
    alias: torch.Tensor | None


class _Tuple(NamedTuple):
    """One that holds tensors, as they were found."""

    kind: Any
    items: tuple[Any, ...]


class _Contents(NamedTuple):
    """Of a container. Its id is no reference: another may have it by now, which does as well."""

    empty: Any
    items: tuple[Any, ...]
    identity: int

    def is_still(self, now: Any) -> bool:
        return id(now) == self.identity and type(now) is type(self.empty)

    def put_in(self, now: Any, fresh: dict[int, Any]) -> Any:
        """In what is there now, if that is the same one; else in one of `fresh`, which are by what they stand for."""
        items = tuple(map(_again, self.items))
        if _is_lost(items):
            return _OUT_OF_SIGHT
        container = now if self.is_still(now) else fresh.setdefault(self.identity, _empty_like(self.empty))
        _hold(container, items)
        return container


def _snapshot(value: Any, memo: dict[int, _Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = _Tensor(weakref.ref(value), _without_graph(value))
        return memo[id(value)]
    if type(value) in _CONTAINERS:
        return _Contents(_empty_like(value), tuple(_snapshot(item, memo) for item in _items_of(value)), id(value))
    if issubclass(type(value), tuple):
        items = tuple(_snapshot(item, memo) for item in value)
        return value if all(map(is_, items, value)) else _Tuple(type(value), items)
    return value


def _again(found: Any) -> Any:
    """What was found."""
    if isinstance(found, _Tensor):
        return next((t for t in (found.tensor(), found.alias) if t is not None), _OUT_OF_SIGHT)
    if isinstance(found, _Tuple):
        items = tuple(map(_again, found.items))
        make: Any = tuple if found.kind is tuple else found.kind._make
        return _OUT_OF_SIGHT if _is_lost(items) else make(items)
    return found


def _is_lost(items: tuple[Any, ...]) -> bool:
    return any(item is _OUT_OF_SIGHT for item in items)


def _is_same(found: Any, now: Any) -> bool:
    """Whether what was found is there still."""
    if isinstance(found, _Tensor):
        return found.tensor() is now
    if isinstance(found, _Tuple):
        return type(now) is found.kind and len(now) == len(found.items) and all(map(_is_same, found.items, now))
    if isinstance(found, _Contents):
        items = _items_of(now) if found.is_still(now) else ()
        return found.is_still(now) and len(items) == len(found.items) and all(map(_is_same, found.items, items))
    return found is now


def _without_graph(t: torch.Tensor) -> torch.Tensor | None:
    """None of what has no graph and makes its own aliases: it is lost if it dies."""
    if t.is_leaf and (type(t) is not torch.Tensor or t.is_inference()):
        return None
    if t.is_leaf and isinstance(t._base, Parameter):
        with torch.no_grad():  # where it comes from too: what requires gradients and gets none
            return t.view_as(t)
    return t.detach().requires_grad_(t.requires_grad)


def _is_state(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, _items_of(value)))
    return value is ABSENT or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, Parameter) and not getattr(value._base, "_is_flat_param", False)  # of FSDP1
    if not issubclass(type(value), tuple):
        return isinstance(value, _WORDS_AND_NUMBERS)
    return all(map(_is_plain, value)) and (_can_be_made(type(value)) or not _has_tensors(value))


def _can_be_made(kind: Any) -> bool:
    return kind is tuple or hasattr(kind, "_make")


def _has_tensors(values: Any) -> bool:
    """Others than named tuples are not made anew: nobody knows how."""
    return any(isinstance(value, torch.Tensor | tuple) for value in values)


def _items_of(container: Any) -> tuple[Any, ...]:
    """Of a dict keys and values by turns."""
    return tuple(chain.from_iterable(container.items())) if issubclass(type(container), dict) else tuple(container)


def _hold(container: Any, items: tuple[Any, ...]) -> None:
    now = _items_of(container)
    if len(now) != len(items) or not all(map(is_, now, items)):
        container.clear()
        _fill(container, items)


def _fill(container: Any, items: tuple[Any, ...]) -> None:
    if issubclass(type(container), dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    elif type(container) is set:
        container.update(items)
    else:
        container.extend(items)


def _empty_like(container: Any) -> Any:
    """With its length or its factory, too."""
    empty: Any = copy(container)
    empty.clear()
    return empty
