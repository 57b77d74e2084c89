"""Random number generators besides torch's default ones: read a state, detect a use, put the state back.

Note [Generators]
~~~~~~~~~~~~~~~~~
1. Known generators: Python's `random` and NumPy's `numpy.random`; generators held by modules or passed as arguments
   (torch.Generator, random.Random, NumPy's Generator, RandomState and bit generators); trackers. A tracker keeps
   several states of a device's default generator and sets one state for the length of a `fork()`: Megatron-Core,
   TransformerEngine, DeepSpeed, fairscale, apex, and any object in a module's attribute with the three methods `fork`,
   `get_states` and `set_states`.
2. A copy of a process-wide state costs 20 us (Python, 625 integers) or 90 us (NumPy), and most regions use neither. The
   bytes of the generator object are compared instead, in 0.1 us; a change of the bytes causes a new copy. Regions
   between two uses share a copy. The same holds for torch's default generators: the state of an accelerator's is a
   seed and an offset.
3. random.SystemRandom has no state, so its numbers cannot be repeated.
"""

import abc
import contextlib
import ctypes
import functools
import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, cast

import numpy
import torch


class RngState(abc.ABC):
    """The state of a generator at construction."""

    @abc.abstractmethod
    def was_used(self) -> bool:
        """Whether the state has changed since."""

    @abc.abstractmethod
    def put_back(self) -> None: ...

    @abc.abstractmethod
    def current(self) -> "RngState":
        """The current state of the generator."""

    def seeds(self, device: torch.device) -> set[int]:  # noqa: ARG002
        """Seeds of the states that `put_back` restores and a tracker sets on the default generator of `device`."""
        return set()


@contextlib.contextmanager
def restored(states: Iterable[RngState]) -> Generator[None, None, None]:
    """Put `states` back; restore the current states at exit."""
    states = list(states)
    now = [state.current() for state in states]
    try:
        for state in states:
            state.put_back()
        yield
    finally:
        for state in now:
            state.put_back()


def state_of(generator: object) -> RngState:
    """The state of a generator for which `is_generator` holds."""
    make = _maker_of(type(generator))
    assert make is not None
    return make(generator)


def is_generator(value: object) -> bool:
    """Whether `value` has a random state that can be put back."""
    return _maker_of(type(value)) is not None


def is_generator_type(kind: type[Any]) -> bool:
    """`is_generator` for all instances of `kind`."""
    return _maker_of(kind) is not None


def is_of_host(generator: object) -> bool:
    """Whether the state can be read and set during the capture of a graph."""
    if isinstance(generator, torch.Generator):
        return generator.device.type == "cpu"
    return _maker_of(type(generator)) is not _TrackerState


def process_wide(*, with_trackers: bool) -> list[RngState]:
    """States of Python's and NumPy's generators and of the trackers of known packages."""
    trackers = map(_TrackerState, known_trackers()) if with_trackers else ()
    return [_PYTHON.state(), _NUMPY.state(), *trackers]


# -- one generator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateAccess:
    """The functions that read and write the state of a kind of generator. Equal bytes mean equal states."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    as_bytes: Callable[[Any], bytes] = pickle.dumps


def bytes_of_tensor(state: torch.Tensor) -> bytes:
    # torch.equal is an operator, and too slow for a call per generator and forward.
    return state.numpy().tobytes()


class HeldState(RngState):
    """A state read in full."""

    def __init__(self, access: StateAccess, generator: Any) -> None:
        self._access = access
        self._generator = generator
        self._state = access.read(generator)

    def was_used(self) -> bool:
        as_bytes = self._access.as_bytes
        return as_bytes(self._access.read(self._generator)) != as_bytes(self._state)

    def put_back(self) -> None:
        self._access.write(self._generator, self._state)

    def current(self) -> RngState:
        return HeldState(self._access, self._generator)

    def seeds(self, device: torch.device) -> set[int]:
        generator = self._generator
        is_of_device = isinstance(generator, torch.Generator) and generator.device.type == device.type
        return {generator.initial_seed()} if is_of_device else set()


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


_TORCH = StateAccess(methodcaller("get_state"), lambda g, state: g.set_state(state), bytes_of_tensor)
_RANDOM = StateAccess(methodcaller("getstate"), lambda g, state: g.setstate(state))
_BITS = StateAccess(lambda g: _bits_of(g).state, lambda g, state: setattr(_bits_of(g), "state", state))
# Bits, and the second number of the last pair of normal numbers.
_LEGACY_NUMPY = StateAccess(methodcaller("get_state", legacy=False), lambda g, state: g.set_state(state))

_KINDS: tuple[tuple[type, StateAccess | None], ...] = (
    (torch.Generator, _TORCH),
    (numpy.random.Generator, _BITS),
    (numpy.random.BitGenerator, _BITS),
    (numpy.random.RandomState, _LEGACY_NUMPY),
    (random.SystemRandom, None),
    (random.Random, _RANDOM),
)


@functools.cache
def _maker_of(kind: type[Any]) -> Callable[[Any], RngState] | None:
    """The function from a generator of class `kind` to the state; None for objects without a state to put back."""
    for base, access in _KINDS:
        if issubclass(kind, base):
            return None if access is None else functools.partial(HeldState, access)
    is_tracker = all(callable(getattr(kind, name, None)) for name in ("fork", "get_states", "set_states"))
    return _TrackerState if is_tracker and not issubclass(kind, torch.nn.Module) else None


class _TrackerState(RngState):
    """States of a device's default generator by name: each a tensor, or a generator with the state inside.

    `_current`: the name of the open fork. A tracker of Megatron's family saves the state of an open fork under the
    name when a nested fork begins.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._states = dict(tracker.get_states())
        self._held = [state_of(state) for state in self._states.values() if is_generator(state)]
        self._current: object = getattr(tracker, _CURRENT, None)

    def was_used(self) -> bool:
        now = self._tracker.get_states()
        if now.keys() != self._states.keys() or any(held.was_used() for held in self._held):
            return True
        return not all(_is_same(state, now[name]) for name, state in self._states.items())

    def put_back(self) -> None:
        self._tracker.set_states(dict(self._states))
        for held in self._held:
            held.put_back()
        if self._current is not None:
            setattr(self._tracker, _CURRENT, self._current)

    def current(self) -> RngState:
        return _TrackerState(self._tracker)

    def seeds(self, device: torch.device) -> set[int]:
        probe = torch.Generator(device)
        seeds: set[int] = set()
        for state in self._states.values():
            if isinstance(state, torch.Generator):
                seeds.add(state.initial_seed())
            elif isinstance(state, torch.Tensor) and state.numel() == probe.get_state().numel():
                seeds.add(probe.set_state(state).initial_seed())
        return seeds


_CURRENT = "_current_state_name"


def _is_same(then: Any, now: Any) -> bool:
    return then is now or (isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor) and torch.equal(then, now))


# -- process-wide ------------------------------------------------------------------------------------------------------

_Seen = tuple[Any, ...]


class _ProcessWide(abc.ABC):
    """A generator shared by all code of the process; see Note [Generators], 2."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read = read
        self.write = write
        self._copy: tuple[_Seen, Any] = (), None

    def state(self) -> RngState:
        seen, state = self._copy
        now = self.seen()
        if seen != now:
            seen, state = self._copy = now, self.read()
        return _SeenState(self, seen, state)

    @abc.abstractmethod
    def seen(self) -> _Seen:
        """A value that differs between any two states, and costs less than a copy."""


@dataclass(eq=False)
class _SeenState(RngState):
    generator: _ProcessWide
    seen: _Seen
    state: Any

    def was_used(self) -> bool:
        return self.seen != self.generator.seen()

    def put_back(self) -> None:
        self.generator.write(self.state)

    def current(self) -> RngState:
        return self.generator.state()


class DefaultGenerator(_ProcessWide):
    """torch's default generator of a device."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator.get_state, generator.set_state)
        self.seed: Callable[[], int] = generator.initial_seed
        self._offset = cast("Callable[[], int]", cast(Any, generator).get_offset)
        self._is_seed_and_offset = generator.get_state().numel() == 16

    def seen(self) -> _Seen:
        return (self.seed(), self._offset()) if self._is_seed_and_offset else (bytes_of_tensor(self.read()),)


class _Python(_ProcessWide):
    def __init__(self) -> None:
        super().__init__(random.getstate, random.setstate)
        self._owner: Any = cast(Any, random.getstate).__self__
        self._memory = _memory_of(self._owner, cast("type[object]", random.Random.__base__))

    def seen(self) -> _Seen:
        return self._memory.raw, self._owner.gauss_next


class _Numpy(_ProcessWide):
    """A RandomState over a bit generator; numpy.random.set_bit_generator exchanges the latter."""

    def __init__(self) -> None:
        super().__init__(functools.partial(numpy.random.get_state, legacy=False), numpy.random.set_state)
        self._owner: Any = cast(Any, numpy.random.get_state).__self__
        self._memory = _memory_of(self._owner)
        self._bits: Any = None

    def seen(self) -> _Seen:
        bits = self._owner._bit_generator
        if bits is not self._bits:
            self._bits, self._memory_of_bits = bits, _memory_of(bits)
        if type(bits) not in _NUMPYS_OWN:
            return (pickle.dumps(self.read()),)  # a bit generator of another package: the state may be on the heap
        return self._memory.raw, self._memory_of_bits.raw


_NUMPYS_OWN = {getattr(numpy.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")}
"""Bit generators with the state inside of the object."""


def _memory_of(value: object, kind: type[object] | None = None) -> Any:
    """A view of the fields of `value` declared by the C type `kind`, by default the own type of `value`.

    The header before the fields counts references.
    """
    header = object.__basicsize__
    return (ctypes.c_char * ((kind or type(value)).__basicsize__ - header)).from_address(id(value) + header)


_PYTHON, _NUMPY = _Python(), _Numpy()


# -- trackers of known packages ----------------------------------------------------------------------------------------

_TRACKERS = (
    "megatron.core.tensor_parallel.random",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "fairscale.nn.model_parallel.random",
    "apex.transformer.tensor_parallel.random",
)
"""Modules with a tracker each, by the name `_CUDA_RNG_STATE_TRACKER` in all of them."""


def known_trackers() -> Iterator[Any]:
    """Trackers of imported packages, if the tracker has any state."""
    for name in _TRACKERS:
        tracker = getattr(sys.modules.get(name), "_CUDA_RNG_STATE_TRACKER", None)
        if tracker is not None and tracker.get_states():
            yield tracker
    te = sys.modules.get("transformer_engine.pytorch.distributed")
    if te is not None and hasattr(te, "get_all_rng_states") and te.get_all_rng_states():
        yield _TransformerEngine(te)


class _TransformerEngine:
    """All trackers of the package share a dict of states."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_states(self) -> Mapping[str, Any]:
        return self._module.get_all_rng_states()

    def set_states(self, states: dict[str, Any]) -> None:
        self._module.get_all_rng_states().update(states)
