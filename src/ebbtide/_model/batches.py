"""Tensors in what a model is given, and how large a batch is."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

MOST_VALUES = 1024
MOST_IN_ONE = 256

_SCALARS = (int, float, str, bytes, type(None))


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How large a batch is: elements of the largest tensor that the model is given; 0 if none is seen.

    Asked before every forward, so it looks at no more than MOST_VALUES values, the outermost first, and at the first
    MOST_IN_ONE of each list, tuple, mapping (ModelOutput and BatchEncoding are some) and dataclass.
    """
    return max((t.numel() for t in first_tensors((*args, *kwargs.values()))), default=0)


def first_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors in `values` and in what is in it, the outermost first; of a large or endless structure not all."""
    containers = deque([values])
    left = MOST_VALUES
    while containers and left > 0:
        for value in itertools.islice(containers.popleft(), min(left, MOST_IN_ONE)):
            left -= 1
            if isinstance(value, torch.Tensor):
                yield value
            else:
                inside = _values_in(value)
                if inside is not None:
                    containers.append(inside)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors in `values`, and in the lists, tuples, mappings and dataclasses in it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_in(_values_in(value) or ())


def _values_in(value: Any) -> Iterable[Any] | None:
    """None for what is no container."""
    if isinstance(value, _SCALARS):
        return None  # at once: it takes longer to find out that something is no mapping
    if isinstance(value, list | tuple):
        return cast("Iterable[Any]", value)
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value).values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None
