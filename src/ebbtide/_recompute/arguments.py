"""Arguments of a region, separated into tensors and everything without tensors."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from ebbtide._recompute.containers import SCALARS
from ebbtide._recompute.generators import is_generator

_SCALARS = frozenset(SCALARS)


class Arguments:
    """Arguments of one call without the tensors.

    Tensors are found in tuples, lists, dicts, all containers registered with torch's pytree, dataclasses, and the bound
    arguments of functools.partial. Further objects are kept by reference. Each `rebuild` makes new containers: a
    region that appends to a list among the arguments does not append twice to the list of the caller.

    Attributes:
        generators: random number generators among the arguments; the caller puts the states back before a new call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._numbers: dict[int, _TensorNumber] = {}
        self._open: set[int] = set()  # dataclasses on the way down: a dataclass inside of itself stays whole
        self._tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self._occurrences = 0  # of tensors, repeated ones included
        self._args, self._kwargs = self._take(args), self._take(kwargs)
        self._numbers.clear()

    def take_tensors(self) -> list[torch.Tensor]:
        """The tensors in order of first appearance, each once. Afterwards only the caller refers to them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs, with `tensors` in place of the tensors of `take_tensors`."""
        return _rebuilt(self._args, tensors), _rebuilt(self._kwargs, tensors)

    def _take(self, value: Any) -> object:
        """`value` without tensors. Common kinds bypass torch's pytree, because every forward runs this."""
        kind = cast("type[object]", type(value))
        if kind in _SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            return self._number(value)
        if kind is tuple or kind is list:
            return _Parts([self._take(each) for each in value], kind)
        if kind is dict:
            return _Dict({key: self._take(each) for key, each in value.items()})
        if not pytree.tree_is_leaf(value):
            leaves, spec = pytree.tree_flatten(value)
            parts = [self._take(leaf) for leaf in leaves]
            return _Parts(parts, functools.partial(pytree.tree_unflatten, treespec=spec))
        return self._take_apart(value)

    def _number(self, t: torch.Tensor) -> "_TensorNumber":
        self._occurrences += 1
        number = self._numbers.get(id(t))
        if number is None:
            number = self._numbers[id(t)] = _TensorNumber(len(self._tensors))
            self._tensors.append(t)
        return number

    def _take_apart(self, leaf: Any) -> object:
        if is_generator(leaf):
            self.generators.append(leaf)
            return leaf
        before = self._occurrences
        if self._is_data(leaf):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
            self._open.add(id(leaf))
            parts = self._take(fields)
            self._open.discard(id(leaf))
            if self._occurrences > before:
                return _Parts([parts], functools.partial(_filled, _shell_of(leaf)))
        elif isinstance(leaf, functools.partial):
            partial = cast("functools.partial[Any]", leaf)
            bound = [self._take(partial.args), self._take(partial.keywords)]
            if self._occurrences > before:
                return _Parts(bound, functools.partial(_bound, partial.func))
        return cast(object, leaf)

    def _is_data(self, leaf: object) -> bool:
        is_instance = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.nn.Module)
        return is_instance and id(leaf) not in self._open


@dataclasses.dataclass(slots=True)
class _TensorNumber:
    """Stands for a tensor: the position in the list of `take_tensors`."""

    number: int


@dataclasses.dataclass(slots=True)
class _Dict:
    parts: dict[Any, object]


@dataclasses.dataclass(slots=True)
class _Parts:
    """The parts of any container but a dict, and the function from a list of parts to a new container."""

    parts: list[object]
    make: Callable[[list[Any]], Any]


def _rebuilt(part: object, tensors: Sequence[torch.Tensor]) -> Any:
    if type(part) is _Parts:
        return part.make([_rebuilt(each, tensors) for each in part.parts])
    if type(part) is _Dict:
        return {key: _rebuilt(each, tensors) for key, each in part.parts.items()}
    return tensors[part.number] if type(part) is _TensorNumber else part


def _shell_of(original: Any) -> Any:
    """A shallow copy of a dataclass without the fields."""
    shell = copy.copy(original)
    for f in dataclasses.fields(shell):
        if hasattr(shell, f.name):  # not `in vars(shell)`, for slots have no dict
            object.__setattr__(shell, f.name, None)
    return shell


def _filled(shell: Any, parts: list[Any]) -> Any:
    whole = copy.copy(shell)
    for name, value in parts[0].items():
        object.__setattr__(whole, name, value)
    return whole


def _bound(function: Any, parts: list[Any]) -> "functools.partial[Any]":
    args, keywords = parts
    return functools.partial(function, *args, **keywords)
