"""Steps that leave no trace: gradients, buffers and random numbers are put back."""

import contextlib
import random
from collections.abc import Generator, Sequence

import numpy
import torch


@contextlib.contextmanager
def restored(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> Generator[None]:
    """What runs inside leaves gradients of `leaves`, buffers of `module` and random generators as they were.

    Gradients that are there are put aside, so `grad` is None when it begins. Plain attributes of modules and what hooks
    do are nobody's to put back.
    """
    with _gradients_aside(leaves), _buffers_put_back(module), _draws_put_back(module):
        yield


@contextlib.contextmanager
def _gradients_aside(leaves: Sequence[torch.Tensor]) -> Generator[None]:
    grads = [leaf.grad for leaf in leaves]
    drop_gradients(leaves)
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad


def drop_gradients(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


@contextlib.contextmanager
def _buffers_put_back(module: torch.nn.Module) -> Generator[None]:
    """The same tensors with the same bytes; copies wait on the host, where they are in nobody's way."""
    found = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    present = {id(buffer): buffer for _, buffers in found for buffer in buffers.values() if buffer is not None}
    copies = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in present.values()]
    try:
        yield
    finally:
        for registered, buffers in found:
            registered.clear()
            registered.update(buffers)
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


@contextlib.contextmanager
def _draws_put_back(module: torch.nn.Module) -> Generator[None]:
    devices = {t.device for t in (*module.parameters(), *module.buffers()) if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices), device_type=kind):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
