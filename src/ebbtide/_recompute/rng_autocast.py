"""The surroundings of a forward: random number generators, autocast, attention back ends, defaults, grad mode."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias, cast

import torch

from ebbtide._recompute.generators import (
    DefaultGenerator,
    HeldState,
    RngState,
    StateAccess,
    bytes_of_tensor,
    is_of_host,
    process_wide,
    restored,
    state_of,
)
from ebbtide._utils.torch_private import default_device


class AutocastRngState:
    """Surroundings of a region at the start of its forward, for the recomputation.

    Generators are set back only if forward used them: most regions draw no number, and a set costs more than a check.
    `close` must be called at the end of forward.

    Args:
        used: devices of the region's parameters and inputs.
        is_captured: forward is inside a captured graph, where the generator of a device can neither be read nor set.
            The caller makes sure that the region draws no number on the device.
        held: generators in attributes of the region's modules and among its arguments.
    """

    def __init__(self, used: Iterable[torch.device], is_captured: bool, held: Iterable[Any]) -> None:
        devices = _devices(used)
        kinds = dict.fromkeys(device.type for device in devices)
        self._autocasts = [_Autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)]
        self._attention = _attention_back_ends()
        self._default_device = default_device()
        self._default_dtype = torch.get_default_dtype()
        if is_captured:
            devices = [device for device in devices if device.type == "cpu"]
            held = [generator for generator in held if is_of_host(generator)]
        self._generators: list[RngState] = [
            *map(_default_state, devices),
            *process_wide(with_trackers=not is_captured),
            *map(state_of, {id(generator): generator for generator in held}.values()),
        ]
        known = ((device, _default_generator(device)) for device in devices)
        self._seeds = [(g.seed, g.seed(), device) for device, g in known if g is not None]

    def close(self) -> None:
        """End of forward: drop the generators that forward did not use."""
        self._generators = [generator for generator in self._generators if generator.was_used()]

    @property
    def has_unknown_state(self) -> bool:
        """Whether a device's default generator has a state that `restored` cannot reproduce.

        Random numbers do not change the seed of a generator. A seed that differs from the seed at the start of forward,
        and that no known tracker or held generator has, means a state set by unknown code.
        """
        for seed_of, seed, device in self._seeds:  # any() would take ten times as long, at every saved tensor
            now = seed_of()
            if now != seed and not any(now in state.seeds(device) for state in self._generators):
                return True
        return False

    def restored(self) -> contextlib.AbstractContextManager[object]:
        """The surroundings of forward inside; the surroundings of now again at exit."""
        is_as_found = (
            not self._generators
            and all(autocast.is_off for autocast in self._autocasts)
            and self._attention == _attention_back_ends()
            and self._default_dtype is torch.get_default_dtype()
            and self._default_device == default_device()
        )
        return torch.enable_grad() if is_as_found else self._set_back()

    @contextlib.contextmanager
    def _set_back(self) -> Generator[None, None, None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self._generators))
            for autocast in self._autocasts:
                stack.enter_context(autocast.restored())
            if self._attention != _attention_back_ends():
                stack.callback(_set_attention_back_ends, _attention_back_ends())
                _set_attention_back_ends(self._attention)
            if self._default_dtype is not torch.get_default_dtype():
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            if self._default_device != default_device():
                stack.enter_context(self._default_device or torch.device("cpu"))
            stack.enter_context(torch.enable_grad())
            yield


class _Autocast:
    """The state of autocast for one device type."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._is_enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)
        self._is_cached = torch.is_autocast_cache_enabled()

    @property
    def is_off(self) -> bool:
        """Whether autocast was off in forward, and is now."""
        return not (self._is_enabled or torch.is_autocast_enabled(self._type))

    def restored(self) -> contextlib.AbstractContextManager[object]:
        if self._is_enabled:
            return torch.autocast(self._type, dtype=self._dtype, cache_enabled=self._is_cached)
        if torch.is_autocast_enabled(self._type):
            return torch.autocast(self._type, enabled=False)
        return contextlib.nullcontext()


_generators = {torch.device("cpu"): DefaultGenerator(torch.default_generator)}


def _default_generator(device: torch.device) -> DefaultGenerator | None:
    """The default generator of `device`; None where torch does not expose the object."""
    found = _generators.get(device)
    if found is None:
        exposed = getattr(torch.get_device_module(device.type), "default_generators", ())
        index = cast("int | None", device.index)  # an operator may name a device without an index
        if index is not None and index < len(exposed):
            found = _generators[device] = DefaultGenerator(exposed[index])
    return found


def _default_state(device: torch.device) -> RngState:
    generator = _default_generator(device)
    return HeldState(_DEFAULT, device) if generator is None else generator.state()


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator for operators on `device`."""
    generator = _default_generator(device)
    return torch.get_device_module(device.type).get_rng_state(device) if generator is None else generator.read()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    generator = _default_generator(device)
    if generator is None:
        torch.get_device_module(device.type).set_rng_state(state, device)
    else:
        generator.write(state)


_DEFAULT = StateAccess(rng_state, set_rng_state, bytes_of_tensor)
"""To and from the default generator of a device."""


def _devices(used: Iterable[torch.device]) -> list[torch.device]:
    """The CPU, `used`, and the current accelerator if initialised."""
    devices = [torch.device("cpu"), *(device for device in used if device.type not in ("cpu", "meta"))]
    kind = _accelerator()
    if kind is not None and torch.get_device_module(kind).is_initialized():
        devices.append(torch.device(kind, torch.accelerator.current_device_index()))
    return list(dict.fromkeys(devices))


@functools.cache  # every question for availability goes to the driver
def _accelerator() -> str | None:
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else current.type


_AttentionBackEnds: TypeAlias = tuple[tuple[bool, ...], tuple[int, ...]]
"""The implementations for scaled_dot_product_attention, as set by sdpa_kernel(): enabled ones, and the priority."""

_ATTENTION_BACK_ENDS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_ARE_ENABLED: tuple[Callable[[], bool], ...] = tuple(
    getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _ATTENTION_BACK_ENDS
)


def _attention_back_ends() -> _AttentionBackEnds:
    order = cast(Any, torch._C)._get_sdp_priority_order()
    return tuple([is_enabled() for is_enabled in _ARE_ENABLED]), tuple(order)


def _set_attention_back_ends(back_ends: _AttentionBackEnds) -> None:
    c = cast(Any, torch._C)
    are_enabled, priority = back_ends
    for name, is_enabled in zip(_ATTENTION_BACK_ENDS, are_enabled, strict=True):
        getattr(c, f"_set_sdp_use_{name}")(is_enabled)
    c._set_sdp_priority_order(list(priority))
