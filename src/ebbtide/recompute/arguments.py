"""A region's arguments, taken apart: the tensors in them, wherever they are, and how to put the rest together again."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree


class Arguments:
    """Arguments of one call without their tensors.

    Tensors are found in tuples, lists, dicts and whatever else is registered with torch's pytree, in dataclasses and in
    the bound arguments of functools.partial; anything else is kept as it is, by reference. Each `rebuild` makes new
    containers: a region that appends to a list it was given does so to nobody's list the second time.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._slots: dict[int, int] = {}
        self._open: set[int] = set()  # dataclasses that are being taken apart: one that leads to itself stays whole
        self._tensors: list[torch.Tensor] = []
        self._skeleton = self._take_apart((args, kwargs))
        self._slots.clear()

    def take_tensors(self) -> list[torch.Tensor]:
        """In order of first appearance; one that is passed twice is listed once. They are the caller's from here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs, with `tensors` in the places of those that were taken."""
        return cast("tuple[tuple[Any, ...], dict[str, Any]]", self._skeleton.rebuild(tensors))

    def _take_apart(self, value: object) -> "_Tree":
        leaves, spec = pytree.tree_flatten(value)
        return _Tree([self._part(leaf) for leaf in leaves], spec)

    def _part(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            slot = self._slots.setdefault(id(leaf), len(self._tensors))
            if slot == len(self._tensors):
                self._tensors.append(leaf)
            return _Slot(slot)
        if self._is_data(leaf):
            fields = {
                f.name: getattr(leaf, f.name) for f in dataclasses.fields(cast(Any, leaf)) if hasattr(leaf, f.name)
            }
            self._open.add(id(leaf))
            tree = self._take_apart(fields)
            self._open.discard(id(leaf))
            return _Dataclass(leaf, tree) if tree.has_tensors else leaf
        if isinstance(leaf, functools.partial):
            partial = cast("functools.partial[Any]", leaf)
            tree = self._take_apart((partial.args, partial.keywords))
            return _Partial(partial.func, tree) if tree.has_tensors else partial
        return leaf

    def _is_data(self, leaf: object) -> bool:
        is_instance = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.nn.Module)
        return is_instance and id(leaf) not in self._open


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a tensor."""

    number: int


class _Tree:
    def __init__(self, parts: list[object], spec: pytree.TreeSpec) -> None:
        self._parts = parts
        self._spec = spec
        self.has_tensors = any(isinstance(part, _Slot | _Dataclass | _Partial) for part in parts)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten([_whole(part, tensors) for part in self._parts], self._spec)


@dataclasses.dataclass(frozen=True)
class _Dataclass:
    original: Any
    """Its tensors are in the slots; a shallow copy without them is what stays."""
    tree: _Tree

    def __post_init__(self) -> None:
        shell = copy.copy(self.original)
        for f in dataclasses.fields(shell):
            if hasattr(shell, f.name):  # not `in vars(shell)`: one with slots has no such dict
                object.__setattr__(shell, f.name, None)
        object.__setattr__(self, "original", shell)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        whole = copy.copy(self.original)
        for name, value in self.tree.rebuild(tensors).items():
            object.__setattr__(whole, name, value)
        return whole


@dataclasses.dataclass(frozen=True)
class _Partial:
    function: Any
    tree: _Tree

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        args, keywords = self.tree.rebuild(tensors)
        return functools.partial(self.function, *args, **keywords)


def _whole(part: object, tensors: Sequence[torch.Tensor]) -> object:
    if isinstance(part, _Slot):
        return tensors[part.number]
    if isinstance(part, _Dataclass | _Partial):
        return part.rebuild(tensors)
    return part
