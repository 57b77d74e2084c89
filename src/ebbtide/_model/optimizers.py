"""Which optimizers train a model, and what their state takes: torch says when one of them has stepped."""

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ebbtide._model.batches import first_tensors
from ebbtide._utils.torch_private import plain_tensors


class Optimizers:
    """Those that step from `watch` to `end`, of whatever model, also if something is wrapped around them.

    torch's list of hooks is the process's, so nothing in it holds this, a model or an optimizer; what is not ended ends
    with the last reference.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._since_asked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._remover: weakref.finalize[[], Optimizers] | None = None

    def watch(self) -> None:
        if self._remover is None:
            hook = register_optimizer_step_post_hook(functools.partial(_stepped, (self._found, self._since_asked)))
            self._remover = weakref.finalize(self, hook.remove)

    def end(self) -> None:
        if self._remover is not None:
            self._remover()
            self._remover = None

    def have_stepped(self) -> bool:
        """Whether one of them has since this was called last: a step of the training has ended."""
        have_stepped = len(self._since_asked) > 0
        self._since_asked.clear()
        return have_stepped

    def state_bytes(self, parameters: Collection[torch.nn.Parameter], device: torch.device | None) -> int:
        """Of what they hold on `device` for `parameters`: each storage once, of sharded tensors this rank's part."""
        held = {
            storage._cdata: storage.nbytes()
            for t in self._states({id(p) for p in parameters})
            for storage in (part.untyped_storage() for part in plain_tensors(t) if _has_storage(part, device))
        }
        return sum(held.values())

    def _states(self, parameters: Collection[int]) -> Iterator[torch.Tensor]:
        for optimizer in self._found:
            for p, state in optimizer.state.items():
                if id(p) in parameters:
                    yield from first_tensors((state,))


def _stepped(sets: "Iterable[weakref.WeakSet[Optimizer]]", optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for found in sets:
        found.add(optimizer)


def _has_storage(t: torch.Tensor, device: torch.device | None) -> bool:
    return t.layout is torch.strided and t.device == device
