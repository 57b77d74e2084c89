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
2. Plain attributes: see Note [Attributes]. Random number generators: see Note [Generators].
3. Training flags, and which parameters are trained.
4. Parameters are the user's, and not copied. One that was changed in place before the second run makes it impossible,
   as stock autograd says too. Others that stand in their places by then (torch.func.functional_call, an average that
   is swapped in for evaluation) give way to those that the first run read.
What a region keeps elsewhere (an object's attributes, a list in a list, a global) is out of sight, and so are tensors
that are no buffers and change in place.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Module

from ebbtide._engine.parcel import modified_as_torch_says
from ebbtide._errors import ModifiedError, ModuleError, RecomputeError
from ebbtide._recompute.attributes import ABSENT, Attributes, Layout, put_attribute
from ebbtide._utils.torch_private import modules_of
from ebbtide.types import Unable

_Key: TypeAlias = tuple[int, str, bool]
"""A buffer: its module, its name, and whether the module is in training mode."""


class RegionState:
    """The modules of one region, and what is known about their buffers and saves."""

    def __init__(self, name: str, region: Module) -> None:
        self.name = name
        self.steady: set[_Key] = set()
        """Buffers that a forward leaves alone."""
        self.changing: set[_Key] = set()
        """Buffers that a forward was seen to change."""
        self._looks: list[Any] = []
        self.layouts: dict[int, Layout] = {}
        """Of the modules' attributes."""
        self.unable: Unable | None = None
        """Reason to keep the region from the next forward on, against its recipe."""
        self._region = region

    def shared_looks(self, looks: list[Any]) -> list[Any]:
        """What the saves of a forward look like, as the list that the forward before made, if that is equal: thousands
        of objects that live until backward are what Python's garbage collector comes by at every step."""
        if looks != self._looks:
            self._looks = looks
        return self._looks

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
        self._parameters = [p for _, owned in self._owned for _, p in owned if p is not None]
        self._versions = versions_of(self._parameters)
        self._are_trained = [p.requires_grad for p in self._parameters]
        self._attributes = Attributes(modules, state.layouts)

    @property
    def modules(self) -> list[Module]:
        """Those of the region."""
        return self._modules

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {p.device for p in self._parameters}

    @property
    def generators(self) -> list[Any]:
        """Random number generators held by the modules."""
        return self._attributes.generators

    def learn(self) -> None:
        """Which buffers change. Raises ModuleError if the forward changed what cannot be put back."""
        changed = self._changed_parameter()
        if changed is not None:
            raise ModuleError(
                f"{self._state.name} changes its parameter {changed[0]!r} in place in its forward: it cannot run again."
                " Give it the recipe 'keep' or 'offload', or make the parameter a buffer"
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
            stack.enter_context(_trained(self._parameters, self._are_trained))
            for module, name, p in self._exchanged_parameters():
                stack.enter_context(_entry_set(module._parameters, name, p))
            copies: dict[int, torch.Tensor] = {}  # of a buffer that two modules share there is one
            for module in self._modules:
                if module._buffers or module in self._buffers:
                    stack.enter_context(_buffers_set(module, self._buffers_as_found(module, copies)))
            stack.enter_context(self._attributes.restored())
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

    # -- parameters ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        changed = self._changed_parameter()
        if changed is not None:
            name, p, version = changed
            raise ModifiedError(
                modified_as_torch_says(p.dtype, p.device, p.shape, p._version, version)
                + f"The parameter {name!r} of {self._state.name} was changed in place between forward and backward, "
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

    def _changed_parameter(self) -> tuple[str, torch.Tensor, int] | None:
        """Name, tensor and former version of the first parameter changed in place since the forward began."""
        now = versions_of(self._parameters)
        if now == self._versions:
            return None
        names = [name for _, owned in self._owned for name, p in owned if p is not None]
        all_of = zip(names, self._parameters, self._versions, now, strict=True)
        return next((name, p, before) for name, p, before, after in all_of if before != after)


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
    now = entries.get(name, ABSENT)
    put_attribute(entries, name, value)
    try:
        yield
    finally:
        put_attribute(entries, name, now)


@contextlib.contextmanager
def _trained(parameters: Sequence[torch.Tensor], are_trained: Sequence[bool]) -> Generator[None, None, None]:
    now = [p.requires_grad for p in parameters]
    try:
        _train(parameters, are_trained)
        yield
    finally:
        _train(parameters, now)


def _train(parameters: Sequence[torch.Tensor], are_trained: Sequence[bool]) -> None:
    for p, is_trained in zip(parameters, are_trained, strict=True):
        if p.requires_grad is not is_trained:
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
