"""What a region's modules hold and a forward may change: its second run reads what the first one read, changes nothing.

Note [State of a region]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Buffers. BatchNorm's running statistics are the common case: without this they would be updated twice a step, and
   nothing would say so until evaluation. Which buffers change is learned. In the first forward of a mode (training or
   not) all are copied and compared afterwards, bytes and all: kernels of normalisation write without counting a
   version, and so does code that goes through `.data`. One that did not change is not copied any more, unless another
   of its module's did and says so by its version, as BatchNorm's count of batches: what changes without a version may
   once have stayed the same (batches of zeros, a momentum of 0). Should one that is not copied change later, which its
   version tells, what it held is gone and the user is told.
2. Plain attributes: numbers, words, tensors, and tuples, lists, dicts and sets of these. What has been set, taken away,
   added or removed since forward began is put back for the second run: by the forward itself (a counter, what it made
   at its first call, the state of an LSTM), and by anybody else between then and backward (a scale that the model sets
   on its layers and takes back). Of lists, dicts and sets the second run is given copies, and may change them too.
3. Training flags, and which parameters are trained.
4. Parameters are the user's, and not copied. One that was changed in place before the second run makes it impossible,
   as stock autograd says too. Others that stand in their places by then (torch.func.functional_call, an average that
   is swapped in for evaluation) give way to those that the first run read.
What a region keeps elsewhere (an object's attributes, a list in a list, a global) is out of sight, and so are tensors
that are no buffers and change in place.
"""

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module, Parameter

from ebbtide._errors import ModifiedError, ModuleError, RecomputeError
from ebbtide._torch import modules_of

_Key: TypeAlias = tuple[int, str, bool]
"""A buffer: its module, its name, and whether the module is in training mode."""

_ABSENT: Any = object()
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_MODULES_OWN = frozenset(Module().__dict__)
"""Attributes that every module has: they are no state of its forward, or looked after one by one."""
_OUT_OF_SIGHT: Any = object()
"""Stands for an object that may be anything, and hold anything."""


class RegionState:
    """The modules of one region, and what is known about their buffers and saves."""

    def __init__(self, name: str, region: Module) -> None:
        self.name = name
        self.steady: set[_Key] = set()
        """Buffers that a forward leaves alone."""
        self.changing: set[_Key] = set()
        """Buffers that a forward was seen to change."""
        self._looks: list[Any] = []
        self._layouts: dict[int, _Layout] = {}
        self._region = region

    def shared_looks(self, looks: list[Any]) -> list[Any]:
        """What the saves of a forward look like, as the list that the forward before made, if that is equal: thousands
        of objects that live until backward are what Python's garbage collector comes by at every step."""
        if looks != self._looks:
            self._looks = looks
        return self._looks

    def snapshots(self, module: Module) -> tuple[Any, ...]:
        """The values of its attributes, as they can be put back."""
        values = tuple(module.__dict__.values())
        looks = tuple(module.__dict__), tuple(map(type, values))
        layout = self._layouts.get(id(module))
        if layout is None or layout.looks != looks:
            layout = self._layouts[id(module)] = _layout_of(*looks)
        if not layout.to_copy and not layout.out_of_sight:
            return values
        copied = list(values)
        for place in layout.to_copy:
            copied[place] = _snapshot(values[place])
        for place in layout.out_of_sight:
            copied[place] = _OUT_OF_SIGHT
        return tuple(copied)

    def find(self) -> "Found":
        """To be called where a forward begins."""
        return Found(self, modules_of(self._region))


class Found:
    """What one forward found in its region. `learn` is called where that has ended well; `restored` may be called
    before."""

    def __init__(self, state: RegionState, modules: list[Module]) -> None:
        self._state = state
        self._modules = modules
        self._training = [module.training for module in modules]
        self._buffers = {
            module: {name: self._buffer(module, name, buffer) for name, buffer in module._buffers.items()}
            for module in modules
            if module._buffers
        }
        # Not by name: ZeRO-3 gathers a parameter that somebody looks up.
        self._owned = [(module, list(module._parameters.items())) for module in modules if module._parameters]
        self._owned_names = {module: {name for name, _ in owned} for module, owned in self._owned}
        self._parameters = [p for _, owned in self._owned for _, p in owned if p is not None]
        self._versions = versions_of(self._parameters)
        self._are_trained = [p.requires_grad for p in self._parameters]
        self._names: list[tuple[str, ...]] = [tuple(module.__dict__) for module in modules]
        self._values: list[tuple[Any, ...]] = [state.snapshots(module) for module in modules]

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {p.device for p in self._parameters}

    def learn(self) -> None:
        """Which buffers change. Raises ModuleError if the forward changed what cannot be put back."""
        changed = self._changed_parameter()
        if changed is not None:
            raise ModuleError(
                f"{self._state.name} changes its parameter {changed!r} in place in its forward: it cannot run again. "
                "Give it the recipe 'keep' or 'offload', or make the parameter a buffer"
            )
        for module, buffers in self._buffers.items():
            may_be_steady = all(buffer.is_same(module._buffers.get(name)) for name, buffer in buffers.items())
            for name, buffer in buffers.items():
                buffers[name] = self._learned(module, name, buffer, may_be_steady)

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """The modules as they were found; as they are now, again, afterwards. Raises ModifiedError, RecomputeError."""
        self._check_parameters()
        with contextlib.ExitStack() as stack:
            for module, was_training in zip(self._modules, self._training, strict=True):
                if module.training is not was_training:
                    stack.enter_context(_entry_set(module.__dict__, "training", was_training))
            if [p.requires_grad for p in self._parameters] != self._are_trained:
                stack.enter_context(_all_trained(self._parameters, self._are_trained))
            for module, name, p in self._exchanged_parameters():
                stack.enter_context(_entry_set(module._parameters, name, p))
            copies: dict[int, torch.Tensor] = {}  # of a buffer that two modules share there is one
            for module in self._modules:
                if module._buffers or module in self._buffers:
                    stack.enter_context(_buffers_set(module, self._buffers_as_found(module, copies)))
            for module, name, value in self._changed_attributes():
                stack.enter_context(_entry_set(module.__dict__, name, value))
            yield

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _buffer(self, module: Module, name: str, buffer: torch.Tensor | None) -> "_Buffer":
        if buffer is None:
            return _Buffer(None, 0, None)
        is_steady = (id(module), name, module.training) in self._state.steady
        return _Buffer(buffer, version_of(buffer), None if is_steady else buffer.detach().clone())

    def _learned(self, module: Module, name: str, buffer: "_Buffer", may_be_steady: bool) -> "_Buffer":
        """`buffer` with the copy that the second run needs, if any."""
        key = id(module), name, module.training
        if may_be_steady and key not in self._state.changing and buffer.has_same_bytes():
            self._state.steady.add(key)
            return buffer._replace(copy=None)
        self._state.steady.discard(key)
        self._state.changing.add(key)
        if buffer.tensor is not None and buffer.copy is None and version_of(buffer.tensor) != buffer.version:
            raise ModuleError(
                f"{self._state.name}: {type(module).__name__} changed its buffer {name!r} in a forward that is to run "
                "again in backward, after leaving it alone in the ones before: what it held is gone. Give its "
                "region the recipe 'keep' or 'offload'"
            )
        return buffer

    def _buffers_as_found(self, module: Module, copies: dict[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        return {name: self._as_found(name, buffer, copies) for name, buffer in self._buffers.get(module, {}).items()}

    def _as_found(self, name: str, buffer: "_Buffer", copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if buffer.copy is not None:
            return copies.setdefault(id(buffer.tensor), buffer.copy.clone())
        if buffer.tensor is not None and version_of(buffer.tensor) != buffer.version:
            raise RecomputeError(
                f"buffer {name!r} of {self._state.name} was changed in place after a forward that has to run again "
                "now: do not change it between forward and backward, or give the region the recipe 'keep' or 'offload'"
            )
        return buffer.tensor

    # -- parameters and attributes ---------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        changed = self._changed_parameter()
        if changed is not None:
            raise ModifiedError(
                f"the parameter {changed!r} of {self._state.name} was changed in place between forward and backward, "
                "and the region has to run again with what it was: call backward before optimizer.step(), or give the "
                "region the recipe 'keep' or 'offload'"
            )

    def _exchanged_parameters(self) -> list[tuple[Module, str, torch.Tensor]]:
        """Those in whose places others stand now. Sharded and gathered ones FSDP exchanges itself, as each run needs
        them."""
        return [
            (module, name, p)
            for module, owned in self._owned
            for name, p in owned
            if p is not None
            and (now := module._parameters.get(name)) is not p
            and type(p) in _PLAIN
            and type(now) in _PLAIN
        ]

    def _changed_parameter(self) -> str | None:
        """The name of one that was changed in place since."""
        now = versions_of(self._parameters)
        if now == self._versions:
            return None
        names = [name for _, owned in self._owned for name, p in owned if p is not None]
        return next(name for name, a, b in zip(names, self._versions, now, strict=True) if a != b)

    def _changed_attributes(self) -> list[tuple[Module, str, Any]]:
        """What has been set since, with the value it had before."""
        changed: list[tuple[Module, str, Any]] = []
        copies: dict[int, Any] = {}  # of a list that two modules share there is one
        for module, names, values in zip(self._modules, self._names, self._values, strict=True):
            for name, value, current in _differing(names, values, module.__dict__):
                if not self._is_anothers(module, name) and _has_changed(value, current):
                    if isinstance(value, _Contents):
                        value = copies.setdefault(value.identity, copy(value.held))
                    changed.append((module, name, value))
        return changed

    def _is_anothers(self, module: Module, name: str) -> bool:
        """Whether an attribute is no state of the forward: torch's own, or what stands in a parameter's place while it
        is gathered."""
        return name in _MODULES_OWN or name in module._parameters or name in self._owned_names.get(module, ())


def _differing(names: tuple[str, ...], values: tuple[Any, ...], now: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """Name, value and what is there now, of those that may not be the same any more."""
    if len(now) == len(values) and all(map(is_, now.values(), values)):
        return ()
    if tuple(now) == names:
        rows = zip(names, values, now.values(), strict=True)
        return [row for row in rows if row[1] is not row[2] and row[1] is not _OUT_OF_SIGHT]
    before = dict(zip(names, values, strict=True))
    return [(name, before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in {**before, **now}]


class _Contents(NamedTuple):
    """Of a list, dict, set or their like: what it held, without graphs, and which one it was. Not the container itself:
    by now it may hold what this forward returned, which would live as long as this forward then, and the other way."""

    held: Any
    identity: int

    def is_same(self, now: Any) -> bool:
        if type(now) is not type(self.held) or len(now) != len(self.held):
            return False
        return all(map(is_, _items_of(now), _items_of(self.held)))


def _contents(container: Any) -> _Contents:
    held: Any = copy(container)
    items = _items_of(container)
    without_graphs = tuple(map(_without_graph, items))
    if not all(map(is_, items, without_graphs)):
        held.clear()
        _fill(held, without_graphs)
    return _Contents(held, id(container))


def _fill(container: Any, items: tuple[Any, ...]) -> None:
    if issubclass(type(container), dict):
        container.update(zip(items[::2], items[1::2], strict=True))
    elif type(container) is set:
        container.update(items)
    else:
        container.extend(items)


class _Layout(NamedTuple):
    """Of a module's attributes: by place, those that hold others, and those that cannot be put back.

    Attributes:
        looks: their names and types.
    """

    looks: tuple[tuple[str, ...], tuple[type, ...]]
    to_copy: list[int]
    out_of_sight: list[int]


def _layout_of(names: tuple[str, ...], types: tuple[type, ...]) -> _Layout:
    layout = _Layout((names, types), [], [])
    for place, (name, kind) in enumerate(zip(names, types, strict=True)):
        if name in _MODULES_OWN:
            continue
        if kind in _CONTAINERS or issubclass(kind, tuple | torch.Tensor):
            layout.to_copy.append(place)
        elif not issubclass(kind, _PLAIN_VALUES):
            layout.out_of_sight.append(place)
    return layout


def _snapshot(value: Any) -> Any:
    """The graph that a tensor of the last forward holds must not live as long as this one's."""
    if not _is_state(value):
        return _OUT_OF_SIGHT
    if type(value) in _CONTAINERS:
        return _contents(value)
    return _without_graph(value)


def _items_of(container: Any) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(container.items())) if issubclass(type(container), dict) else tuple(container)


def _has_changed(found: Any, now: Any) -> bool:
    """Whether there was something else than is there now, and both are a forward's state."""
    is_same = found.is_same(now) if isinstance(found, _Contents) else found is now
    return not is_same and found is not _OUT_OF_SIGHT and _is_state(now)


def _is_state(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return all(map(_is_plain, _items_of(value)))
    return value is _ABSENT or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if issubclass(type(value), tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN_VALUES) and not (isinstance(value, torch.Tensor) and _is_of_parameter(value))


def _is_of_parameter(t: torch.Tensor) -> bool:
    """A parameter, or a view of one: FSDP1 has these in the places of parameters while they are gathered."""
    return isinstance(t, Parameter) or isinstance(t._base, Parameter)


def version_of(t: torch.Tensor) -> int:
    """How often `t` was changed in place; an inference tensor does not say, and cannot be outside of its mode."""
    return 0 if t.is_inference() else t._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The same of several."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # inference tensors are among them
        return list(map(version_of, tensors))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Buffer(NamedTuple):
    """A buffer as a forward found it."""

    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    """None: no forward has changed it so far."""

    def is_same(self, now: torch.Tensor | None) -> bool:
        return now is self.tensor and (now is None or version_of(now) == self.version)

    def has_same_bytes(self) -> bool:
        """Where that is not known already. Waits for the device: in the first forward only."""
        if self.tensor is None or self.copy is None or type(self.tensor) is not torch.Tensor:
            return True
        return torch.equal(self.tensor, self.copy)


@contextlib.contextmanager
def _entry_set(entries: dict[str, Any], name: str, value: Any) -> Generator[None, None, None]:
    """Of a module: without its __setattr__, which looks for parameters in the value."""
    now = entries.get(name, _ABSENT)
    _put(entries, name, value)
    try:
        yield
    finally:
        _put(entries, name, now)


def _put(entries: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value


@contextlib.contextmanager
def _all_trained(parameters: Sequence[torch.Tensor], are_trained: Sequence[bool]) -> Generator[None, None, None]:
    now = [p.requires_grad for p in parameters]
    try:
        _train(parameters, now, are_trained)
        yield
    finally:
        _train(parameters, are_trained, now)


def _train(parameters: Sequence[torch.Tensor], before: Sequence[bool], after: Sequence[bool]) -> None:
    for p, was_trained, is_trained in zip(parameters, before, after, strict=True):
        if is_trained is not was_trained:
            p.requires_grad_(is_trained)


@contextlib.contextmanager
def _buffers_set(module: Module, found: dict[str, torch.Tensor | None]) -> Generator[None, None, None]:
    buffers = module._buffers
    now = dict(buffers)
    try:
        buffers.clear()
        buffers.update(found)
        yield
    finally:
        buffers.clear()
        buffers.update(now)


def _without_graph(value: Any) -> Any:
    """The same of the tensors in a tuple; what has no graph is itself."""
    if issubclass(type(value), torch.Tensor):
        return value if value.is_leaf else value.detach().requires_grad_()
    return _tuple_without_graphs(value) if issubclass(type(value), tuple) else value


def _tuple_without_graphs(values: Any) -> Any:
    items = tuple(map(_without_graph, values))
    if all(map(is_, items, values)):
        return values
    return values._make(items) if hasattr(values, "_make") else items
