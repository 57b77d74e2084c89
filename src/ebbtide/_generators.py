"""Random number generators outside of torch's defaults: what each was, whether it drew, and how it is put back.

Note [Generators]
~~~~~~~~~~~~~~~~~
1. Known are Python's `random` and NumPy's `numpy.random`; generators that modules hold or calls are given
   (torch.Generator, random.Random, NumPy's Generator and RandomState); and trackers: objects that keep several states
   of a device's default generator and set one of them for the length of a `fork()` (Megatron-Core, TransformerEngine,
   DeepSpeed, fairscale, apex, and whatever a module holds that has their three methods).
2. The state of a process-wide generator is 625 integers, and a copy costs 20 us (Python) or 90 us (NumPy). Most regions
   draw nothing from either. So the bytes of the object itself are compared, at about 1 us, and the state is copied only
   when the bytes have changed since the last copy. Regions between two draws share one copy.
3. random.SystemRandom has no state: its numbers cannot be drawn again.
"""

import abc
import contextlib
import ctypes
import functools
import pickle
import random
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import numpy
import torch


class RngState(abc.ABC):
    """The state of one generator when this was made."""

    @abc.abstractmethod
    def was_used(self) -> bool:
        """Whether the generator has another state by now."""

    @abc.abstractmethod
    def put_back(self) -> None: ...

    @abc.abstractmethod
    def taken_again(self) -> "RngState":
        """The state of the same generator now."""

    def seeds(self, device: torch.device) -> set[int]:  # noqa: ARG002 (a device's generator is set by few)
        """Of the states that are set on the default generator of `device`, and put back with this one."""
        return set()


@contextlib.contextmanager
def restored(states: Iterable[RngState]) -> Generator[None, None, None]:
    """The generators as they were; as they are now, again, afterwards."""
    states = list(states)
    now = [state.taken_again() for state in states]
    try:
        for state in states:
            state.put_back()
        yield
    finally:
        for state in now:
            state.put_back()


def state_of(generator: Any) -> RngState:
    """Of a generator for which `is_generator` holds."""
    kind = _kind_of(_type(generator))
    assert kind is not None
    return kind(generator)


def is_generator(kind: type[Any]) -> bool:
    """Whether instances of `kind` have a state that can be put back."""
    return _kind_of(kind) is not None


def is_of_host(generator: Any) -> bool:
    """Whether its state can be asked for and set while a graph is captured."""
    if isinstance(generator, torch.Generator):
        return generator.device.type == "cpu"
    return _kind_of(_type(generator)) is not _TrackerState


def process_wide(*, with_trackers: bool) -> list[RngState]:
    """Of Python, NumPy and the trackers of known packages."""
    trackers = map(_TrackerState, known_trackers()) if with_trackers else ()
    return [_PYTHON.state(), _NUMPY.state(), *trackers]


# -- one generator -----------------------------------------------------------------------------------------------------


class _HeldState(RngState):
    """Of a generator whose whole state is read. Two states are equal if their bytes are."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._state = self._read()

    def was_used(self) -> bool:
        return self._bytes(self._read()) != self._bytes(self._state)

    def put_back(self) -> None:
        self._write(self._state)

    def taken_again(self) -> RngState:
        return type(self)(self._generator)

    @abc.abstractmethod
    def _read(self) -> Any: ...

    @abc.abstractmethod
    def _write(self, state: Any) -> None: ...

    @staticmethod
    def _bytes(state: Any) -> bytes:
        return pickle.dumps(state)


class _TorchState(_HeldState):
    def _read(self) -> torch.Tensor:
        return self._generator.get_state()

    def _write(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def seeds(self, device: torch.device) -> set[int]:
        return {self._generator.initial_seed()} if self._generator.device.type == device.type else set()

    @staticmethod
    def _bytes(state: torch.Tensor) -> bytes:
        # Not torch.equal, which is an operator, and slow for one.
        return state.numpy().tobytes()


class _PythonState(_HeldState):
    def _read(self) -> Any:
        return self._generator.getstate()

    def _write(self, state: Any) -> None:
        self._generator.setstate(state)


class _NumpyState(_HeldState):
    """Of a Generator; of a bit generator itself."""

    def _read(self) -> Any:
        return self._bits().state

    def _write(self, state: Any) -> None:
        self._bits().state = state

    def _bits(self) -> Any:
        return getattr(self._generator, "bit_generator", self._generator)


class _LegacyNumpyState(_HeldState):
    """Of a RandomState, which remembers a second normal number besides its bits."""

    def _read(self) -> Any:
        return self._generator.get_state(legacy=False)

    def _write(self, state: Any) -> None:
        self._generator.set_state(state)


class Tracker(Protocol):
    """Several states of a device's default generator, by name: tensors, or generators that hold one each."""

    def get_states(self) -> Mapping[str, Any]: ...

    def set_states(self, states: dict[str, Any]) -> None: ...


class _TrackerState(RngState):
    """`_current`: the name under which a tracker of Megatron's family puts aside what a nested fork interrupts."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._states = dict(tracker.get_states())
        self._held = {name: state_of(state) for name, state in self._states.items() if is_generator(_type(state))}
        self._current: object = getattr(tracker, _CURRENT, None)

    def was_used(self) -> bool:
        now = self._tracker.get_states()
        if now.keys() != self._states.keys() or any(held.was_used() for held in self._held.values()):
            return True
        return not all(_is_same(state, now[name]) for name, state in self._states.items())

    def put_back(self) -> None:
        self._tracker.set_states(dict(self._states))
        for held in self._held.values():
            held.put_back()
        if self._current is not None:
            setattr(self._tracker, _CURRENT, self._current)

    def taken_again(self) -> RngState:
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


def _type(value: object) -> type[object]:
    return type(value)


@functools.cache
def _kind_of(kind: type[Any]) -> type[Any] | None:
    for base, state in _KINDS:
        if issubclass(kind, base):
            return state
    is_tracker = all(callable(getattr(kind, name, None)) for name in ("fork", "get_states", "set_states"))
    return _TrackerState if is_tracker and not issubclass(kind, torch.nn.Module) else None


_KINDS: tuple[tuple[type, type[RngState] | None], ...] = (
    (torch.Generator, _TorchState),
    (numpy.random.Generator, _NumpyState),
    (numpy.random.BitGenerator, _NumpyState),
    (numpy.random.RandomState, _LegacyNumpyState),
    (random.SystemRandom, None),
    (random.Random, _PythonState),
)


# -- process-wide ------------------------------------------------------------------------------------------------------

_Seen = tuple[Any, ...]


class _ProcessWide(abc.ABC):
    """A generator that all code of the process shares; see Note [Generators], 2."""

    def __init__(self) -> None:
        self._copy: tuple[_Seen, Any] = (), None

    def state(self) -> RngState:
        seen, state = self._copy
        now = self.seen()
        if seen != now:
            seen, state = self._copy = now, self.read()
        return _SeenState(self, seen, state)

    @abc.abstractmethod
    def seen(self) -> _Seen:
        """Another value for every other state."""

    @abc.abstractmethod
    def read(self) -> Any: ...

    @abc.abstractmethod
    def write(self, state: Any) -> None: ...


class _SeenState(RngState):
    def __init__(self, generator: _ProcessWide, seen: _Seen, state: Any) -> None:
        self._generator = generator
        self._seen = seen
        self._state = state

    def was_used(self) -> bool:
        return self._seen != self._generator.seen()

    def put_back(self) -> None:
        self._generator.write(self._state)

    def taken_again(self) -> RngState:
        return self._generator.state()


class _Python(_ProcessWide):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = cast(Any, random.getstate).__self__
        self._memory = _memory_of(self._owner, cast("type[object]", random.Random.__base__))

    def seen(self) -> _Seen:
        return self._memory.raw, self._owner.gauss_next

    def read(self) -> Any:
        return random.getstate()

    def write(self, state: Any) -> None:
        random.setstate(state)


class _Numpy(_ProcessWide):
    """A RandomState, and the bits that it draws from: numpy.random.set_bit_generator gives it others."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = cast(Any, numpy.random.get_state).__self__
        self._memory = _memory_of(self._owner, _type(self._owner))
        self._bits: Any = None

    def seen(self) -> _Seen:
        bits = self._owner._bit_generator
        if bits is not self._bits:
            self._bits, self._memory_of_bits = bits, _memory_of(bits, _type(bits))
        if type(bits) not in _NUMPYS_OWN:
            return (pickle.dumps(self.read()),)  # its state may be anywhere
        return self._memory.raw, self._memory_of_bits.raw

    def read(self) -> Any:
        return numpy.random.get_state(legacy=False)

    def write(self, state: Any) -> None:
        numpy.random.set_state(state)


_NUMPYS_OWN = {getattr(numpy.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")}
"""Bit generators with their state in the object itself."""


def _memory_of(value: object, kind: type[object]) -> Any:
    """The fields that `kind`, written in C, gives its instances; the header, which counts references, comes before."""
    header = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - header)).from_address(id(value) + header)


_PYTHON, _NUMPY = _Python(), _Numpy()


# -- trackers of known packages ----------------------------------------------------------------------------------------

_TRACKERS = (
    "megatron.core.tensor_parallel.random",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "fairscale.nn.model_parallel.random",
    "apex.transformer.tensor_parallel.random",
)
"""Modules with one tracker each, all under the name that the first has given to it."""


def known_trackers() -> Iterator[Tracker]:
    """Those of packages that are imported, and in use."""
    for name in _TRACKERS:
        tracker = getattr(sys.modules.get(name), "_CUDA_RNG_STATE_TRACKER", None)
        if tracker is not None and tracker.get_states():
            yield tracker
    te = sys.modules.get("transformer_engine.pytorch.distributed")
    if te is not None and hasattr(te, "get_all_rng_states") and te.get_all_rng_states():
        yield _TransformerEngine(te)


class _TransformerEngine:
    """All its trackers keep their states in one dict, which is in use itself."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_states(self) -> Mapping[str, Any]:
        return self._module.get_all_rng_states()

    def set_states(self, states: dict[str, Any]) -> None:
        self._module.get_all_rng_states().update(states)
