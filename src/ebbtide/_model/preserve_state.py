"""Steps that leave no trace: gradients, buffers, carried state and random numbers are put back.

Note [Carried state]
~~~~~~~~~~~~~~~~~~~~
1. A step may leave state for the next step in attributes that are no buffers: the hidden state of a recurrent model, a
   counter, a mask made by the first forward. Numbers, strings, tensors, and tuples, lists, dicts, sets and deques of
   these, at any depth, are restored: identical objects with their old contents and bytes.
2. Objects of other classes, and containers with an object inside, are resources or registers (a process group, a
   stream, DeepSpeed's gathered parameters). The setup is not undone, so the attribute stays as the step left it.
3. Modules of torch.distributed, torch.nn.parallel and DeepSpeed are wrappers. Their flags record a finished setup and
   stay as the step left them.
"""

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Generator, Sequence
from copy import copy
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch.nn import Module, Parameter

from ebbtide._errors import ModuleError
from ebbtide._recompute import generators
from ebbtide._utils.torch_private import buffers_of, modules_of, named_buffers, parameters_of


@contextlib.contextmanager
def restored(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> Generator[None]:
    """Restores gradients of `leaves`, buffers and carried state of `module`, and random number generators at its end.

    Existing gradients are put aside, so `grad` is None at the start. Effects of hooks are not undone. Raises
    ModuleError, before anything runs, for a buffer or an attribute that cannot be copied.
    """
    with _gradients_aside(leaves), _buffers_put_back(module), _carried_put_back(module), _draws_put_back(module):
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
    copies = [
        (buffer, _copy_of(buffer, f"buffer {name!r}")) for name, buffer in named_buffers(module) if not buffer.is_meta
    ]
    try:
        yield
    finally:
        for registered, buffers in found:
            registered.clear()
            registered.update(buffers)
        for buffer, copy in copies:
            _put_back(buffer, copy)


def _copy_of(t: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return _each_once(t.detach()).to("cpu", copy=True)
    except (RuntimeError, TypeError) as error:
        raise ModuleError(
            f"{name} is a {type(t).__name__} ({t.layout}) that cannot be copied, and so not be put back as it was: "
            f"{error}"
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


# -- carried state -----------------------------------------------------------------------------------------------------

_MODULES_OWN = frozenset(Module().__dict__)
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.")
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_WORDS_AND_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@contextlib.contextmanager
def _carried_put_back(module: Module) -> Generator[None]:
    """See Note [Carried state]."""
    modules = [inner for inner in modules_of(module) if not type(inner).__module__.startswith(_WRAPPERS)]
    before = [(inner, _Carried(inner)) for inner in modules]
    try:
        yield
    finally:
        for inner, carried in before:
            carried.put_back(inner)


class _Carried:
    """The carried state of one module.

    Attributes:
        _names: all attributes of the module; later ones are deleted.
        _contents: containers by id, each with a copy.
        _tensors: tensors by id, each with its version and its bytes on the host.
    """

    def __init__(self, module: Module) -> None:
        self._names = set(vars(module))
        carried = {name: value for name, value in vars(module).items() if _may_be_carried(name, module)}
        self._attributes = {name: value for name, value in carried.items() if _is_state(value)}
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for name, value in self._attributes.items():
            self._note(value, f"attribute {name!r} of a {type(module).__name__}")

    def put_back(self, module: Module) -> None:
        attributes = vars(module)
        # Written to the dict: __setattr__ and __delattr__ search for parameters, and a class may override both.
        for name in attributes.keys() - self._names:
            if _may_be_carried(name, module) and _is_state(attributes[name]):
                del attributes[name]
        attributes.update(self._attributes)
        for container, contents in self._contents.values():
            _fill(container, contents)
        for t, version, content in self._tensors.values():
            if _version_of(t) != version or not _has_bytes(t, content):
                _put_back(t, content)

    def _note(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors and not value.is_meta:
                self._tensors[id(value)] = value, _version_of(value), _copy_of(value, name)
        elif not isinstance(value, _WORDS_AND_NUMBERS):
            if type(value) in _CONTAINERS:
                self._contents[id(value)] = value, copy(value)
            for item in _items_of(value):
                self._note(item, name)


def _may_be_carried(name: str, module: Module) -> bool:
    return name not in _MODULES_OWN and name not in module._parameters


def _is_state(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether Note [Carried state] restores `value`. `around`: ids of the containers around `value`; a container inside
    of itself is no state."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, Parameter) and not getattr(value._base, "_is_flat_param", False)  # of FSDP1
    if _is_container(value):
        within = (*around, id(value))
        return id(value) not in around and all(_is_state(item, within) for item in _items_of(value))
    return isinstance(value, _WORDS_AND_NUMBERS)


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS or isinstance(value, tuple)


def _items_of(container: Any) -> list[Any]:
    """Keys and values of a dict, by turns."""
    is_dict = isinstance(container, dict)
    return list(chain.from_iterable(cast("dict[Any, Any]", container).items()) if is_dict else container)


def _fill(container: Any, contents: Any) -> None:
    now, before = _items_of(container), _items_of(contents)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _version_of(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _has_bytes(t: torch.Tensor, content: torch.Tensor) -> bool:
    """Compared for plain strided tensors; the version speaks for all other kinds."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided:
        return True
    return torch.equal(_each_once(t.detach()).cpu(), content)


# -- random numbers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _draws_put_back(module: Module) -> Generator[None]:
    devices = {t.device for t in (*parameters_of(module), *buffers_of(module)) if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    fork = cast(Any, torch.random.fork_rng)(sorted(device.index for device in devices), device_type=kind)
    held = map(generators.state_of, _generators_in(module))
    states = [*generators.process_wide(with_trackers=True), *held]
    with contextlib.ExitStack() as undo:
        for state in states:
            undo.callback(state.put_back)
        undo.enter_context(fork)
        yield


def _generators_in(module: Module) -> list[Any]:
    """Generators that modules hold, directly or in a container."""
    values: list[Any] = [value for inner in modules_of(module) for value in vars(inner).values()]
    values += [item for value in values if _is_container(value) for item in _items_of(value)]
    return [value for value in values if generators.is_generator(cast("type[object]", type(value)))]
