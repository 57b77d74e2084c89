"""Tensors among the arguments of a model, and the size of a batch."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

_SCALARS = (int, float, str, bytes, type(None))


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Size of a batch: the number of elements of the largest tensor among the arguments; 0 without a tensor."""
    return max((t.numel() for t in first_tensors((*args, *kwargs.values()))), default=0)


def likeness_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """Sizes of the tensors among the arguments, whether they need gradients, and plain values passed directly. Empty
    without a tensor."""
    values = *args, *kwargs.values()
    sizes = [(t.numel() if t.is_nested else t.shape, t.requires_grad) for t in first_tensors(values)]
    return (*sizes, *(value for value in values if isinstance(value, _SCALARS))) if sizes else ()


def first_tensors(values: Iterable[Any], most_values: int = 1024, most_each: int = 256) -> Iterator[torch.Tensor]:
    """Tensors in `values` and in nested containers, the outermost first.

    A container is a list, tuple, mapping (ModelOutput and BatchEncoding are mappings) or dataclass. The search runs
    before every forward, so at most `most_values` values are visited, and the first `most_each` of each container.
    """
    containers = deque([values])
    left = most_values
    while containers and left > 0:
        for value in itertools.islice(containers.popleft(), min(left, most_each)):
            left -= 1
            if isinstance(value, torch.Tensor):
                yield value
            else:
                inside = _values_in(value)
                if inside is not None:
                    containers.append(inside)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors in `values` and in nested lists, tuples, mappings and dataclasses."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_in(_values_in(value) or ())


def _values_in(value: Any) -> Iterable[Any] | None:
    if isinstance(value, _SCALARS):
        return None  # first: the check for a mapping is slow
    if isinstance(value, list | tuple):
        return cast("Iterable[Any]", value)
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value).values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None
