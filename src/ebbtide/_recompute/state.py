"""State of a region's modules: recomputation reads what forward read, and changes nothing.

Note [State of a region]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Buffers. Running statistics of BatchNorm are the common case: recomputation would update them twice a step, silently
   until evaluation. The first forward of a mode (training or evaluation) copies all buffers and compares the bytes
   afterwards, because kernels of normalisation and code behind `.data` write without counting a version. An unchanged
   buffer is not copied any more, unless the version of another buffer of the module says so (BatchNorm's count of
   batches): a write without a version may have left the bytes unchanged once (a batch of zeros, a momentum of 0). A
   change of an uncopied buffer, seen by the version, raises: the old content is lost.
2. Plain attributes: see Note [Attributes]. Random number generators: see Note [Generators].
3. Training flags, and the `requires_grad` of parameters.
4. Parameters belong to the user and are not copied. A parameter changed in place before recomputation raises, as in
   stock autograd. A parameter in the place of another (torch.func.functional_call, an average swapped in for
   evaluation) gives way to the parameter of forward.
Out of sight are state in further places (attributes of objects, a list in a list, globals) and in-place changes of
tensors that are no buffers. Note [Verification] finds the effects.
"""

import contextlib
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.nn import Module

from ebbtide._engine.parcel import modified_message
from ebbtide._errors import ModifiedError, ModuleError, RecomputeError
from ebbtide._recompute.attributes import ABSENT, Attributes, KnownAttributes, put_attribute
from ebbtide._types import Unable
from ebbtide._utils.torch_private import modules_of

_Key: TypeAlias = tuple[int, str, bool]
"""A buffer: id of the module, name, and training mode of the module."""


class RegionState:
    """Facts about one region that outlive a forward.

    Attributes:
        is_steady: False for buffers that a forward was seen to change, True for other known buffers.
        unable: reason to keep the region from the next forward on, against its recipe.
        runs_to_end: code behind the last saved tensor takes back what the region changes out of sight (an object in an
            attribute for the length of a forward), so that recomputation may not stop there. Verification finds out.
    """

    def __init__(self, name: str, region: Module) -> None:
        self.name = name
        self.is_steady: dict[_Key, bool] = {}
        self.attributes = KnownAttributes()
        self.unable: Unable | None = None
        self.runs_to_end = False
        self._metadata: list[Any] = []
        self._region = region
        self._forwards = 0

    def compares_nodes(self) -> bool:
        """Whether the recomputation of the forward that begins also compares the classes of autograd nodes: the first,
        and each 17th: paths through the code often alternate, or come once in a power of two of forwards."""
        self._forwards += 1
        return self._forwards % 17 == 1

    def shared_metadata(self, metadata: list[Any]) -> list[Any]:
        """The list of the previous forward, if it equals `metadata`. Thousands of tuples that live until backward would
        slow down every run of Python's garbage collector."""
        if metadata != self._metadata:
            self._metadata = metadata
        return self._metadata

    def snapshot(self) -> "RegionSnapshot":
        """To be called at the start of a forward."""
        return RegionSnapshot(self, modules_of(self._region))


class RegionSnapshot:
    """State of a region at the start of one forward.

    `learn` is called after a forward without an exception; `restored` may be called earlier.
    """

    def __init__(self, state: RegionState, modules: list[Module]) -> None:
        self._state = state
        self.modules = modules
        self._training = self._modes()
        self._buffers = {
            module: {name: self._buffer(module, name, buffer) for name, buffer in module._buffers.items()}
            for module in modules
            if module._buffers
        }
        # items() and no lookup by name: ZeRO-3 gathers a parameter at each lookup. Three flat lists: a tuple for each
        # parameter, living until backward, would slow down every run of Python's garbage collector.
        items = ((module, name, p) for module in modules for name, p in module._parameters.items())
        owned = [(module, name, p) for module, name, p in items if p is not None]
        self._owners = [module for module, _, _ in owned]
        self._names = [name for _, name, _ in owned]
        self._parameters = [p for _, _, p in owned]
        self._versions = versions_of(self._parameters)
        self._are_trained = self._are_trained_now()
        self._attributes = Attributes(modules, state.attributes)

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the parameters."""
        return {p.device for p in self._parameters}

    @property
    def generators(self) -> list[Any]:
        """Random number generators held by the modules."""
        return self._attributes.generators

    def learn(self) -> None:
        """Learn which buffers change. Raises ModuleError for a change by forward that cannot be undone."""
        changed = self._changed_parameter()
        if changed is not None:
            raise ModuleError(
                f"{self._state.name} changes its parameter {changed[0]!r} in place in its forward, so it cannot be"
                " recomputed. Give it the recipe 'keep' or 'offload', or make the parameter a buffer"
            )
        for module, buffers in self._buffers.items():
            may_be_steady = all(buffer.is_same(module._buffers.get(name)) for name, buffer in buffers.items())
            for name, buffer in buffers.items():
                buffers[name] = self._learned(module, name, buffer, may_be_steady)

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """The state of forward inside; the state of now again at exit. Raises ModifiedError, RecomputeError."""
        self._check_parameters()
        exchanged = self._exchanged_parameters()
        modes, are_trained = self._modes(), self._are_trained_now()
        is_as_found = modes == self._training and are_trained == self._are_trained and not exchanged
        if is_as_found and not self._has_buffers() and self._attributes.are_current:  # most regions, at less cost
            try:
                yield
            finally:
                self._leave_as_found()
            return
        with contextlib.ExitStack() as undo:
            # The forward may change both, and stop before it changes them back.
            undo.callback(self._set_modes, modes)
            undo.callback(self._train, are_trained)
            self._set_modes(self._training)
            self._train(self._are_trained)
            for module, name, p in exchanged:
                _set_entry(module._parameters, name, p, undo)
            copies: dict[int, torch.Tensor] = {}  # two modules that share a buffer share the copy
            for module in self.modules:
                if module._buffers or module in self._buffers:
                    buffers = self._buffers.get(module, {})
                    found = {name: self._as_found(name, buffer, copies) for name, buffer in buffers.items()}
                    undo.callback(_set_buffers, module._buffers, dict(module._buffers))
                    _set_buffers(module._buffers, found)
            undo.enter_context(self._attributes.restored())
            yield

    def _leave_as_found(self) -> None:
        """Undo changes by a recomputation that has found everything as forward did; the recomputation may have stopped
        before code that undoes them."""
        self._train(self._are_trained)
        self._set_modes(self._training)
        for module, name, p in self._exchanged_parameters():
            module._parameters[name] = cast("torch.nn.Parameter", p)
        for module in self.modules:
            if module._buffers:
                module._buffers.clear()
        self._attributes.leave_current()

    def _modes(self) -> list[bool]:
        return [module.training for module in self.modules]

    def _set_modes(self, modes: Sequence[bool]) -> None:
        if self._modes() != modes:
            for module, is_training in zip(self.modules, modes, strict=True):
                module.training = is_training

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _has_buffers(self) -> bool:
        """Whether any module has a buffer now, or had one when forward began."""
        return bool(self._buffers) or any(module._buffers for module in self.modules)

    def _buffer(self, module: Module, name: str, buffer: torch.Tensor | None) -> "_Buffer":
        if buffer is None:
            return _Buffer(None, 0, None)
        is_steady = self._state.is_steady.get((id(module), name, module.training), False)
        return _Buffer(buffer, version_of(buffer), None if is_steady else buffer.detach().clone())

    def _learned(self, module: Module, name: str, buffer: "_Buffer", may_be_steady: bool) -> "_Buffer":
        """`buffer` with the copy for recomputation, if one is needed."""
        key = id(module), name, module.training
        is_steady = may_be_steady and self._state.is_steady.get(key, True) and buffer.has_same_bytes()
        self._state.is_steady[key] = is_steady
        if is_steady:
            return buffer._replace(copy=None)
        if buffer.tensor is not None and buffer.copy is None and version_of(buffer.tensor) != buffer.version:
            raise ModuleError(
                f"{self._state.name}: {type(module).__name__} changed its buffer {name!r} in a forward that backward "
                "recomputes. Earlier forwards left the buffer unchanged, so the old content was not copied. Give the "
                "region the recipe 'keep' or 'offload'"
            )
        return buffer

    def _as_found(self, name: str, buffer: "_Buffer", copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if buffer.copy is not None:
            return copies.setdefault(id(buffer.tensor), buffer.copy.clone())
        if buffer.tensor is not None and version_of(buffer.tensor) != buffer.version:
            raise RecomputeError(
                f"buffer {name!r} of {self._state.name} was changed in place after a forward that backward "
                "recomputes: do not change it between forward and backward, or give the region the recipe 'keep' or "
                "'offload'"
            )
        return buffer.tensor

    # -- parameters ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        changed = self._changed_parameter()
        if changed is not None:
            name, p, version = changed
            raise ModifiedError(
                modified_message(p.dtype, p.device, p.shape, p._version, version)
                + f"The parameter {name!r} of {self._state.name} was changed in place between forward and backward, "
                "and the region is recomputed with the old value: call backward before optimizer.step(), or give the "
                "region the recipe 'keep' or 'offload'"
            )

    def _are_trained_now(self) -> list[bool]:
        return list(map(_requires_grad, self._parameters))

    def _train(self, are_trained: Sequence[bool]) -> None:
        if self._are_trained_now() != are_trained:
            for p, is_trained in zip(self._parameters, are_trained, strict=True):
                if p.requires_grad is not is_trained:
                    p.requires_grad_(is_trained)

    def _exchanged_parameters(self) -> list[tuple[Module, str, torch.Tensor]]:
        """Parameters of forward with another in their place now. FSDP exchanges sharded and gathered ones by itself."""
        return [
            (module, name, p)
            for module, name, p in zip(self._owners, self._names, self._parameters, strict=True)
            if (now := module._parameters.get(name)) is not p and type(p) in _PLAIN and type(now) in _PLAIN
        ]

    def _changed_parameter(self) -> tuple[str, torch.Tensor, int] | None:
        """Name, tensor and former version of the first parameter changed in place since the forward began."""
        now = versions_of(self._parameters)
        if now == self._versions:
            return None
        all_of = zip(self._names, self._parameters, self._versions, now, strict=True)
        return next((name, p, before) for name, p, before, after in all_of if before != after)


def version_of(t: torch.Tensor) -> int:
    """How often `t` was changed in place; 0 for an inference tensor, which only inference mode can change."""
    return 0 if t.is_inference() else t._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` of each tensor."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # an inference tensor is among them
        return list(map(version_of, tensors))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_requires_grad: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")


class _Buffer(NamedTuple):
    """A buffer at the start of a forward."""

    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    """None: no forward has changed the buffer so far."""

    def is_same(self, now: torch.Tensor | None) -> bool:
        return now is self.tensor and (now is None or version_of(now) == self.version)

    def has_same_bytes(self) -> bool:
        """Whether the bytes equal the copy; True without a copy. Waits for the device, in the first forward only."""
        if self.tensor is None or self.copy is None or type(self.tensor) is not torch.Tensor:
            return True
        return torch.equal(self.tensor, self.copy)


def _set_entry(entries: dict[str, Any], name: str, value: Any, undo: contextlib.ExitStack) -> None:
    undo.callback(put_attribute, entries, name, entries.get(name, ABSENT))
    put_attribute(entries, name, value)


def _set_buffers(registered: dict[str, torch.Tensor | None], buffers: dict[str, torch.Tensor | None]) -> None:
    registered.clear()
    registered.update(buffers)
