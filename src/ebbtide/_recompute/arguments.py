"""A region's arguments, taken apart: the tensors in them, wherever they are, and how to put the rest together again."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from ebbtide._recompute.generators import is_generator

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


class Arguments:
    """Arguments of one call without their tensors.

    Tensors are found in tuples, lists, dicts and whatever else is registered with torch's pytree, in dataclasses and in
    the bound arguments of functools.partial; anything else is kept as it is, by reference. Each `rebuild` makes new
    containers: a region that appends to a list it was given does so to nobody's list the second time.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._slots: dict[int, _Slot] = {}
        self._open: set[int] = set()  # dataclasses that are being taken apart: one that leads to itself stays whole
        self._tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        """Random number generators among the arguments; the caller puts the states back before a second call."""
        self._found = 0
        """Tensors so far, one that is passed twice counted twice."""
        self._args, self._kwargs = self._take(args), self._take(kwargs)
        self._slots.clear()

    def take_tensors(self) -> list[torch.Tensor]:
        """In order of first appearance; one that is passed twice is listed once. They are the caller's from here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs, with `tensors` in the places of those that were taken."""
        return _whole(self._args, tensors), _whole(self._kwargs, tensors)

    def _take(self, value: Any) -> object:
        """`value` without its tensors. The common kinds go without torch's pytree: this runs at every forward."""
        kind = cast("type[object]", type(value))
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if kind is tuple or kind is list:
            return _Sequence(kind, [self._take(each) for each in value])
        if kind is dict:
            return _Dict({key: self._take(each) for key, each in value.items()})
        if not pytree.tree_is_leaf(value):
            leaves, spec = pytree.tree_flatten(value)
            return _Tree([self._take(leaf) for leaf in leaves], spec)
        return self._take_apart(value)

    def _slot(self, t: torch.Tensor) -> "_Slot":
        self._found += 1
        slot = self._slots.get(id(t))
        if slot is None:
            slot = self._slots[id(t)] = _Slot(len(self._tensors))
            self._tensors.append(t)
        return slot

    def _take_apart(self, leaf: Any) -> object:
        if is_generator(cast("type[object]", type(leaf))):
            self.generators.append(leaf)
            return leaf
        before = self._found
        if self._is_data(leaf):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
            self._open.add(id(leaf))
            parts = self._take(fields)
            self._open.discard(id(leaf))
            return _Dataclass(leaf, parts) if self._found > before else leaf
        if isinstance(leaf, functools.partial):
            partial = cast("functools.partial[Any]", leaf)
            parts = self._take((partial.args, partial.keywords))
            return _Partial(partial.func, parts) if self._found > before else partial
        return leaf

    def _is_data(self, leaf: object) -> bool:
        is_instance = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.nn.Module)
        return is_instance and id(leaf) not in self._open


class _Slot:
    """The place of a tensor."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self._number]


class _Sequence:
    """A tuple or a list."""

    __slots__ = ("_kind", "_parts")

    def __init__(self, kind: type, parts: list[object]) -> None:
        self._kind = kind
        self._parts = parts

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self._kind([_whole(part, tensors) for part in self._parts])


class _Dict:
    __slots__ = ("_parts",)

    def __init__(self, parts: dict[Any, object]) -> None:
        self._parts = parts

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
        return {key: _whole(part, tensors) for key, part in self._parts.items()}


class _Tree:
    """Any other container that pytree knows."""

    __slots__ = ("_parts", "_spec")

    def __init__(self, parts: list[object], spec: pytree.TreeSpec) -> None:
        self._parts = parts
        self._spec = spec

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten([_whole(part, tensors) for part in self._parts], self._spec)


class _Dataclass:
    """What stays of `original` is a shallow copy without its fields."""

    __slots__ = ("_fields", "_shell")

    def __init__(self, original: Any, fields: object) -> None:
        self._fields = fields
        self._shell = copy.copy(original)
        for f in dataclasses.fields(self._shell):
            if hasattr(self._shell, f.name):  # not `in vars(shell)`: one with slots has no such dict
                object.__setattr__(self._shell, f.name, None)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        whole = copy.copy(self._shell)
        for name, value in _whole(self._fields, tensors).items():
            object.__setattr__(whole, name, value)
        return whole


class _Partial:
    __slots__ = ("_bound", "_function")

    def __init__(self, function: Any, bound: object) -> None:
        self._function = function
        self._bound = bound

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        args, keywords = _whole(self._bound, tensors)
        return functools.partial(self._function, *args, **keywords)


_PARTS = (_Slot, _Sequence, _Dict, _Tree, _Dataclass, _Partial)
"""Of arguments: what is no longer as it was passed."""


def _whole(part: object, tensors: Sequence[torch.Tensor]) -> Any:
    return part.rebuild(tensors) if isinstance(part, _PARTS) else part
