"""Where a model computes, what of it is there, and what a profile of it is of."""

import heapq
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ebbtide._devices import name_of
from ebbtide._utils.torch_private import modules_of, parameters_of, plain_tensors

_SIGNS = 8


def device_of(module: torch.nn.Module) -> torch.device | None:
    """Where most of the parameters are; None without any that have been made."""
    nbytes: dict[torch.device, int] = {}
    for p in parameters_of(module):
        if not is_lazy(p):  # one that its first forward makes has no size yet
            nbytes[p.device] = nbytes.get(p.device, 0) + p.numel() * p.element_size()
    return max(nbytes, key=lambda device: nbytes[device]) if nbytes else None


def is_on_meta(module: torch.nn.Module) -> bool:
    """Whether all of its parameters still are: nothing is known yet of where it will compute."""
    return {p.device.type for p in parameters_of(module)} == {"meta"}


class PlacementCache:
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
        self.storages()
        return self._device

    def storages(self) -> tuple[int, ...]:
        """Of the parameters that are looked at: others if the weights are no longer where they were."""
        found = self._found()
        if found is None:
            self._device = device_of(self._module)
            largest = heapq.nlargest(_SIGNS, _owned(self._module), key=lambda owned: owned[2].numel())
            self._signs = [_Sign(weakref.ref(owner), name, p.device) for owner, name, p in largest]
            found = self._found()
        return found or ()

    def _found(self) -> tuple[int, ...] | None:
        """None if one is gone, or on another device, or if none is known. One pass: compute waits for it."""
        found: list[int] = []
        for sign in self._signs:
            owner = sign.owner()
            p = None if owner is None else owner._parameters.get(sign.name)
            if p is None or p.device != sign.device:
                return None
            parts = (p,) if type(p) is torch.nn.Parameter else plain_tensors(p)
            found += [t.untyped_storage()._cdata for t in parts if t.layout is torch.strided]
        return tuple(found) if self._signs else None


class _Sign(NamedTuple):
    """A parameter, by the module that owns it and its name there, and where it was."""

    owner: "weakref.ref[torch.nn.Module]"
    name: str
    device: torch.device


def _owned(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for owner in modules_of(module):
        if isinstance(owner, torch.jit.ScriptModule):  # its parameters are not in a dict
            continue
        for name, p in owner._parameters.items():
            if p is not None and not is_lazy(p):
                yield owner, name, p


def made_for(module: torch.nn.Module, device: torch.device | None) -> dict[str, str]:
    """What a profile of `module` is of: one of something else says nothing about it."""
    parameters = list(parameters_of(module))
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    count = _count(parameters)
    trained = _count([p for p in parameters if p.requires_grad])
    training = "" if trained == count else f", {trained} of them trained"
    return {
        "model": f"{type(module).__name__}, {count} parameters in {', '.join(dtypes)}{training}",
        "device": "cpu" if device is None else name_of(device),
        "torch": torch.__version__.partition("+")[0],
    }


def _count(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Their elements. Under ZeRO-3 of DeepSpeed they are empty, and say how many they were."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def memory_of(
    module: torch.nn.Module, regions: Mapping[str, torch.nn.Module], device: torch.device | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of parameters and gradients on `device`, and of the gradients to come, by region, "" for others.

    Of what is sharded, this rank's part.
    """
    owner = {id(p): name for name, region in regions.items() for p in parameters_of(region)}
    base = {"parameters": 0, "gradients": 0}
    coming: dict[str, int] = {}
    for p in parameters_of(module):
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
