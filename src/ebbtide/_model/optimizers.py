"""The optimizers that train a model, and the bytes of optimizer state. A hook of torch reports each step."""

import functools
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ebbtide._model.batches import first_tensors
from ebbtide._utils.torch_private import plain_tensors


class Optimizers:
    """All optimizers that step between `start` and `stop`, of any model, also inside a wrapper.

    The hook list of torch belongs to the process, so the hook holds weak references only: no model and no optimizer.
    The hook goes with the last reference to an Optimizers object, at the latest.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since the last `have_stepped`
        self._remover: weakref.finalize[[], Optimizers] | None = None

    def start(self) -> None:
        """Begin; a second call does nothing."""
        if self._remover is None:
            hook = register_optimizer_step_post_hook(functools.partial(_add, (self._found, self._stepped)))
            self._remover = weakref.finalize(self, hook.remove)

    def stop(self) -> None:
        """End the search. Optimizers found so far stay known."""
        if self._remover is not None:
            self._remover()
            self._remover = None

    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last call: a step of the training has ended."""
        have_stepped = len(self._stepped) > 0
        self._stepped.clear()
        return have_stepped

    def state_bytes(self, parameters: Collection[torch.nn.Parameter], device: torch.device | None) -> int:
        """Bytes of optimizer state on `device` for `parameters`: each storage once, the local part of shards."""
        ids = {id(p) for p in parameters}
        states = (state for optimizer in self._found for p, state in optimizer.state.items() if id(p) in ids)
        parts = (part for state in states for t in first_tensors((state,)) for part in plain_tensors(t))
        storages = (t.untyped_storage() for t in parts if t.layout is torch.strided and t.device == device)
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _add(sets: "Iterable[weakref.WeakSet[Optimizer]]", optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for optimizers in sets:
        optimizers.add(optimizer)
