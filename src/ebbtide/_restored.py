"""Steps that leave no trace: gradients, buffers and random numbers are put back."""

import contextlib
import random
from collections.abc import Generator, Sequence

import numpy
import torch

from ebbtide._errors import ModuleError
from ebbtide._torch import buffers_of, modules_of, named_buffers, parameters_of


@contextlib.contextmanager
def restored(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> Generator[None]:
    """What runs inside leaves gradients of `leaves`, buffers of `module` and random generators as they were.

    Gradients that are there are put aside, so `grad` is None when it begins. Plain attributes of modules and what hooks
    do are nobody's to put back. Raises ModuleError, before anything runs, for a buffer that cannot be copied.
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
    found = [(inner._buffers, dict(inner._buffers)) for inner in modules_of(module)]
    # On the meta device there are no bytes.
    copies = [(buffer, _copy_of(buffer, name)) for name, buffer in named_buffers(module) if not buffer.is_meta]
    try:
        yield
    finally:
        for registered, buffers in found:
            registered.clear()
            registered.update(buffers)
        for buffer, copy in copies:
            _put_back(buffer, copy)


def _copy_of(buffer: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return _each_once(buffer.detach()).to("cpu", copy=True)
    except (RuntimeError, TypeError) as error:
        raise ModuleError(
            f"buffer {name!r} is a {type(buffer).__name__} ({buffer.layout}) that cannot be copied, and so not be put "
            f"back as it was: {error}"
        ) from error


def _put_back(buffer: torch.Tensor, copy: torch.Tensor) -> None:
    # An inference tensor may be changed in inference mode only.
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.layout in _COMPRESSED:  # copy_ wants as many elements as there were
            buffer.resize_as_sparse_(copy)
        _each_once(buffer).copy_(copy)


def _each_once(t: torch.Tensor) -> torch.Tensor:
    """A view of `t` with one of the elements that expand() repeats, for no element may be written twice."""
    if t.layout is torch.strided and not t.is_nested:
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if stride == 0 and size > 1:
                t = t.narrow(dim, 0, 1)
    return t


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@contextlib.contextmanager
def _draws_put_back(module: torch.nn.Module) -> Generator[None]:
    devices = {t.device for t in (*parameters_of(module), *buffers_of(module)) if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices), device_type=kind):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
