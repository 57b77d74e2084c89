"""Steps without a trace: gradients, buffers, carried state and random numbers are put back.

Note [Carried state]
~~~~~~~~~~~~~~~~~~~~
1. A step may leave state for the next step in attributes that are no buffers: the hidden state of a recurrent model, a
   counter, a mask made by the first forward. Numbers, strings, tensors, and tuples, lists, dicts, sets and deques with
   numbers, strings and tensors at any depth are restored: identical objects with their old contents and bytes.
2. Objects of other classes, and containers with an object inside, are resources or registers (a process group, a
   stream, DeepSpeed's gathered parameters). The setup is not undone: the attribute stays as the step left it.
3. Modules of torch.distributed, torch.nn.parallel and DeepSpeed are wrappers. Flags of wrappers record a finished
   setup and stay as the step left them.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from torch.nn import Module

from ebbtide._errors import ModuleError
from ebbtide._recompute import generators
from ebbtide._recompute.containers import CONTAINERS, MODULE_ATTRIBUTES, SCALARS, is_plain, items_of, set_items
from ebbtide._recompute.state import version_of
from ebbtide._utils.torch_private import buffers_of, modules_of, named_buffers, parameters_of


@contextlib.contextmanager
def restored(module: Module, leaves: Sequence[torch.Tensor]) -> Generator[None]:
    """Restores gradients of `leaves`, buffers and carried state of `module`, and random number generators at its end.

    Existing gradients are put aside, so `grad` is None at the start. Effects of hooks are not undone. Raises
    ModuleError, before anything runs, for a buffer or an attribute that cannot be copied.
    """
    with contextlib.ExitStack() as undo:
        for leaf in leaves:
            undo.callback(setattr, leaf, "grad", leaf.grad)
        drop_gradients(leaves)
        _restore_buffers(module, undo)
        for inner in modules_of(module):
            if not type(inner).__module__.startswith(("torch.distributed.", "torch.nn.parallel.", "deepspeed.")):
                undo.callback(_CarriedState(inner).put_back)
        _restore_generators(module, undo)
        yield


def drop_gradients(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _restore_buffers(module: Module, undo: contextlib.ExitStack) -> None:
    """Identical tensors with identical bytes at the end of `undo`. Copies wait in host memory."""
    named = [(name, buffer) for name, buffer in named_buffers(module) if not buffer.is_meta]  # meta has no bytes
    for buffer, copy in [(buffer, _copy_of(buffer, f"buffer {name!r}")) for name, buffer in named]:
        undo.callback(_put_back, buffer, copy)
    for inner in modules_of(module):
        undo.callback(set_items, inner._buffers, items_of(inner._buffers))


def _copy_of(t: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return _each_once(t.detach()).to("cpu", copy=True)
    except (RuntimeError, TypeError) as error:
        raise ModuleError(
            f"{name} is a {type(t).__name__} ({t.layout}) that cannot be copied and restored: {error}"
        ) from error


def _put_back(buffer: torch.Tensor, copy: torch.Tensor) -> None:
    # An inference tensor may be changed in inference mode only.
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            # copy_ demands an equal count of elements
            buffer.resize_as_sparse_(copy)
        _each_once(buffer).copy_(copy)


def _each_once(t: torch.Tensor) -> torch.Tensor:
    """A view of `t` without the repetitions of expand(), for no element may be written twice."""
    if t.layout is torch.strided and not t.is_nested:
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if stride == 0 and size > 1:
                t = t.narrow(dim, 0, 1)
    return t


# -- carried state -----------------------------------------------------------------------------------------------------


class _CarriedState:
    """The carried state of one module.

    Attributes:
        _names: all attributes of the module; later ones are deleted.
        _contents: containers by id, with the items.
        _tensors: tensors by id, with version and bytes on the host.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._names = set(vars(module))
        carried = {name: value for name, value in vars(module).items() if _may_be_carried(name, module)}
        self._attributes = {name: value for name, value in carried.items() if _is_state(value)}
        self._contents: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for name, value in self._attributes.items():
            self._note(value, f"attribute {name!r} of a {type(module).__name__}")

    def put_back(self) -> None:
        attributes = vars(self._module)
        # Written to the dict: __setattr__ and __delattr__ search for parameters, and a class may override both.
        for name in attributes.keys() - self._names:
            if _may_be_carried(name, self._module) and _is_state(attributes[name]):
                del attributes[name]
        attributes.update(self._attributes)
        for container, contents in self._contents.values():
            set_items(container, contents)
        for t, version, content in self._tensors.values():
            if version_of(t) != version or not _has_bytes(t, content):
                _put_back(t, content)

    def _note(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors and not value.is_meta:
                self._tensors[id(value)] = value, version_of(value), _copy_of(value, name)
        elif not isinstance(value, SCALARS):
            items = items_of(value)
            if type(value) in CONTAINERS:
                self._contents[id(value)] = value, items
            for item in items:
                self._note(item, name)


def _may_be_carried(name: str, module: Module) -> bool:
    return name not in MODULE_ATTRIBUTES and name not in module._parameters


def _is_state(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether Note [Carried state] restores `value`. `around`: ids of the containers around `value`; a container inside
    of itself is no state."""
    if not _is_container(value):
        return is_plain(value)
    within = (*around, id(value))
    return id(value) not in around and all(_is_state(item, within) for item in items_of(value))


def _is_container(value: Any) -> bool:
    return type(value) in CONTAINERS or isinstance(value, tuple)


def _has_bytes(t: torch.Tensor, content: torch.Tensor) -> bool:
    """Compares plain strided tensors; True for all other kinds, for versions count every change."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided:
        return True
    return torch.equal(_each_once(t.detach()).cpu(), content)


# -- random numbers ----------------------------------------------------------------------------------------------------


def _restore_generators(module: Module, undo: contextlib.ExitStack) -> None:
    devices = {t.device for t in (*parameters_of(module), *buffers_of(module)) if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    # In attributes of modules, directly or in a container.
    values: list[Any] = [value for inner in modules_of(module) for value in vars(inner).values()]
    values += [item for value in values if _is_container(value) for item in items_of(value)]
    held = [generators.state_of(value) for value in values if generators.is_generator(value)]
    for state in [*generators.process_wide(with_trackers=True), *held]:
        undo.callback(state.put_back)
    indices = sorted(device.index for device in devices)
    undo.enter_context(cast(Any, torch.random.fork_rng)(indices, device_type=kind))
