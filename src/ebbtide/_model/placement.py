"""The device of a model, the memory of the model on the device, and the properties stored in a profile."""

import heapq
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

from ebbtide._devices import name_of
from ebbtide._utils.distributed import group_size
from ebbtide._utils.torch_private import class_of, modules_of, parameters_of, plain_tensors


def device_of(module: torch.nn.Module) -> torch.device | None:
    """The device with most of the parameter bytes; None without parameters."""
    nbytes: dict[torch.device, int] = {}
    for p in parameters_of(module):
        if not is_lazy(p):  # no size before the first forward
            nbytes[p.device] = nbytes.get(p.device, 0) + p.numel() * p.element_size()
    return max(nbytes, key=nbytes.__getitem__, default=None)


def is_on_meta(module: torch.nn.Module) -> bool:
    """Whether all parameters are on the meta device: the device to compute on is still unknown."""
    return {p.device.type for p in parameters_of(module)} == {"meta"}


class PlacementCache:
    """The device of a model, as by `device_of`, cheap enough for every step.

    The cache looks at the 8 largest parameters, in their current owners. A move of a good part of the model, or new
    parameters, change at least one of the 8; only after a change the cache walks the model again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._device: torch.device | None = None
        self._largest: list[tuple[weakref.ref[torch.nn.Module], str, torch.device]] = []  # owner, name, last device

    def device(self) -> torch.device | None:
        """The device; None without parameters."""
        self.storages()
        return self._device

    def storages(self) -> tuple[int, ...]:
        """Identities of the storages looked at: new ones after the weights have moved."""
        storages = self._read()
        if storages is None:
            self._device = device_of(self._module)
            largest = heapq.nlargest(8, _owned(self._module), key=lambda owned: owned[2].numel())
            self._largest = [(weakref.ref(owner), name, p.device) for owner, name, p in largest]
            storages = self._read()
        return storages or ()

    def _read(self) -> tuple[int, ...] | None:
        """None if a parameter is gone or has moved, or before the first walk. One pass: compute waits meanwhile."""
        storages: list[int] = []
        for owner_ref, name, device in self._largest:
            owner = owner_ref()
            p = None if owner is None else owner._parameters.get(name)
            if p is None or p.device != device:
                return None
            parts = (p,) if type(p) is torch.nn.Parameter else plain_tensors(p)
            storages += [t.untyped_storage()._cdata for t in parts if t.layout is torch.strided]
        return tuple(storages) if self._largest else None


def _owned(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for owner in modules_of(module):
        if not isinstance(owner, torch.jit.ScriptModule):  # has no dict of parameters
            yield from ((owner, name, p) for name, p in owner._parameters.items() if p is not None and not is_lazy(p))


def made_for(module: torch.nn.Module, device: torch.device | None) -> dict[str, str]:
    """Model, device, ranks and version of torch: a profile with other values is of no use for `module`."""
    parameters = list(parameters_of(module))
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    # Parameters under ZeRO-3 of DeepSpeed are empty, and have the number of elements in `ds_numel`.
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in parameters]
    count, trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    training = "" if trained == count else f", {trained} of them trained"
    return {
        "model": f"{class_of(module).__name__}, {count} parameters in {', '.join(dtypes)}{training}",
        "device": "cpu" if device is None else name_of(device),
        "ranks": str(group_size(None)),  # the class name does not tell: `fully_shard` may come after `offload`
        "torch": torch.__version__.partition("+")[0],
    }


def memory_of(
    module: torch.nn.Module, regions: Mapping[str, torch.nn.Module], device: torch.device | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on `device`: of parameters and gradients, by kind; of gradients to be allocated, by region ("" outside).

    Sharded tensors count with the part of this rank.
    """
    owner = {id(p): name for name, region in regions.items() for p in parameters_of(region)}
    base = {"parameters": 0, "gradients": 0}
    future_grads: dict[str, int] = {}
    for p in parameters_of(module):
        if p.device != device:
            continue
        nbytes = _nbytes(p)
        base["parameters"] += nbytes
        if p.grad is not None:
            base["gradients"] += _nbytes(p.grad)
        elif p.requires_grad:
            name = owner.get(id(p), "")
            future_grads[name] = future_grads.get(name, 0) + nbytes
    return base, future_grads


def _nbytes(t: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in plain_tensors(t))
