"""What a handle tells its control: the memory it found, what a profile has to be of, and how large a batch is."""

import dataclasses
import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ebbtide._bytes import GIB, MIB, parse_bytes
from ebbtide._errors import ConfigError
from ebbtide._regions import clean_name
from ebbtide._torch import named_modules, plain_tensors
from ebbtide.devices import name_of
from ebbtide.planner.ranks import Agree
from ebbtide.plans import OP_CLASSES
from ebbtide.recompute.dear import DearOps

Value = TypeVar("Value")

MOST_VALUES = 1024
MOST_IN_ONE = 256

_SIGNS = 8
_SCALARS = (int, float, str, bytes, type(None))

_MOST_BYTES = 1e15  # that any device has: what is more was not meant as bytes


class Budget:
    """A peak to stay under: bytes, text like "40GiB", or a share of the device's memory, a float of at most 1.

    Raises ConfigError for anything else.
    """

    def __init__(self, given: int | float | str) -> None:
        self._share: float | None = None
        self._nbytes = 0
        if isinstance(given, bool) or not isinstance(given, int | float | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"budget={given!r}: expected bytes as an int, text like '40GiB', or a share of the device's memory "
                "such as 0.8"
            )
        if isinstance(given, float):
            _check_share(given)
            self._share = given
        else:
            _check_no_share(given)
            self._nbytes = parse_bytes(given, "budget")

    def __call__(self, total_bytes: int) -> int:
        """In bytes, of a device with so many."""
        return self._nbytes if self._share is None else int(self._share * total_bytes)


def _check_share(given: float) -> None:
    if 0 < given <= 1:
        return
    found = f"budget={given!r}: a float is a share of the device's memory, between 0 and 1, such as 0.8"
    if MIB <= given < _MOST_BYTES:
        found += f". For bytes write int({given / 1e9:g}e9), '{given / 1e9:g}GB' or '{given / GIB:.1f}GiB'"
    elif given > 1:
        found += ". For bytes write text like '40GiB'"
    raise ConfigError(found)


def _check_no_share(given: int | str) -> None:
    """A share in quotes would be a fraction of one byte."""
    try:
        share = float(given) if isinstance(given, str) else 0.0
    except ValueError:
        return  # it has a unit, or is no size at all
    if 0 < share <= 1:
        raise ConfigError(
            f"budget={given!r}: text is bytes, like '40GiB'. For a share of the device's memory write {share!r}, "
            "without quotes"
        )


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


def device_of(module: torch.nn.Module) -> torch.device | None:
    """Where most of the parameters are; None without any."""
    nbytes: dict[torch.device, int] = {}
    for p in module.parameters():
        nbytes[p.device] = nbytes.get(p.device, 0) + p.numel() * p.element_size()
    return max(nbytes, key=lambda device: nbytes[device]) if nbytes else None


class Home:
    """Where a model computes, as `device_of` says. Asked at every step, so it walks the model only if that has moved.

    The largest few parameters are looked at, in the modules that own them now: whatever moves a good part of the model,
    or puts other parameters in their places, moves one of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._device: torch.device | None = None
        self._signs: list[_Sign] = []

    def device(self) -> torch.device | None:
        """None without any parameter."""
        if not self._signs or any(sign.has_changed() for sign in self._signs):
            self._device = device_of(self._module)
            largest = heapq.nlargest(_SIGNS, _owned(self._module), key=lambda owned: owned[2].numel())
            self._signs = [_Sign(weakref.ref(owner), name, p.device) for owner, name, p in largest]
        return self._device


class _Sign(NamedTuple):
    """A parameter, by the module that owns it and its name there, and where it was."""

    owner: "weakref.ref[torch.nn.Module]"
    name: str
    device: torch.device

    def has_changed(self) -> bool:
        owner = self.owner()
        p = None if owner is None else owner._parameters.get(self.name)
        return p is None or p.device != self.device


def _owned(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                yield owner, name, p


def made_for(module: torch.nn.Module, device: torch.device | None) -> dict[str, str]:
    """What a profile of `module` is of: one of something else says nothing about it."""
    parameters = list(module.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return {
        "model": f"{type(module).__name__}, {sum(p.numel() for p in parameters)} parameters in {', '.join(dtypes)}",
        "device": "cpu" if device is None else name_of(device),
        "torch": torch.__version__.partition("+")[0],
    }


def memory_of(
    module: torch.nn.Module, regions: Mapping[str, torch.nn.Module], device: torch.device | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of parameters and gradients on `device`, and of the gradients to come, by region, "" for others.

    Of what is sharded, this rank's part.
    """
    owner = {id(p): name for name, region in regions.items() for p in region.parameters()}
    base = {"parameters": 0, "gradients": 0}
    coming: dict[str, int] = {}
    for p in module.parameters():
        if p.device != device:
            continue
        nbytes = _nbytes(p)
        base["parameters"] += nbytes
        if p.grad is not None:
            base["gradients"] += _nbytes(p.grad)
        elif p.requires_grad:
            name = owner.get(id(p), "")
            coming[name] = coming.get(name, 0) + nbytes
    return base, coming


def _nbytes(t: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in plain_tensors(t))


class AnyDear:
    """Whether a call is of one of the classes of operators that a planner may hold the outputs of."""

    def __init__(self) -> None:
        self._ops = DearOps(tuple(OP_CLASSES))

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return self._ops.is_dear(op, args, kwargs, ())


def agreement() -> Agree | None:
    """What gives the answers of all ranks for this rank's one; None where there is only one rank."""
    return None if _ranks() == 1 else gather


def gather(mine: Value) -> list[Value]:
    """What all ranks have, in order; every one of them has to call it."""
    if _ranks() == 1:
        return [mine]
    found: list[Any] = [None] * _ranks()
    torch.distributed.all_gather_object(found, mine)
    return found


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def names_of(root: torch.nn.Module, modules: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """`modules` of `root` by name, in order."""
    return {clean_name(fqn): module for fqn, module in named_modules(root) if module in modules}
