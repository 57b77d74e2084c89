"""Ours in the place of a trainer's own, wherever it has been imported to."""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from ebbtide._errors import ConfigError, EbbtideWarning, MissingPackageError
from ebbtide._utils.packages import is_installed, version_of
from ebbtide.compat import _context, _heads, axolotl, torchtune


class _MadeOf(NamedTuple):
    """A replacement made of the trainer's own class."""

    make: Callable[[Any], Any]


class _Home(NamedTuple):
    """Where a trainer has its own, by name, and what takes its place.

    Attributes:
        owner: the class that has these names, if it is not the module.
        end: called when the trainer's own has been put back.
        is_optional: no switch of the trainer leads here; scripts may import the names, in versions that have them.
    """

    module: str
    names: Mapping[str, Any]
    owner: str = ""
    end: Callable[[], None] | None = None
    is_optional: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        return self.module, self.owner, *self.names


_TRL = _Home(
    "trl.models.activation_offloading",
    {
        "OffloadActivations": _context.OffloadActivations,
        "NoOpManager": _context.NoOpManager,
        "get_act_offloading_ctx_manager": _heads.get_act_offloading_ctx_manager,
    },
)
_HOMES: Mapping[str, tuple[_Home, ...]] = {
    "trl": (_TRL,),
    "torchtune": (
        _Home(
            "torchtune.training._activation_offloading",
            {
                "OffloadActivations": torchtune.OffloadActivations,
                "NoOpManager": torchtune.NoOpManager,
                "get_act_offloading_ctx_manager": torchtune.get_act_offloading_ctx_manager,
            },
        ),
    ),
    "axolotl": (
        _TRL,
        _Home(axolotl.MIXINS, {"get_lora_act_offloading_ctx_manager": _heads.get_lora_act_offloading_ctx_manager}),
        _Home(axolotl.MIXINS, {"__init__": axolotl.initialize}, owner="ActivationOffloadingMixin"),
        _Home(
            "axolotl.monkeypatch.activation_offload_checkpoint",
            {
                "patch_hidden_states_offload": axolotl.patch_hidden_states_offload,
                "unpatch_hidden_states_offload": axolotl.unpatch_hidden_states_offload,
            },
            end=axolotl.unpatch_hidden_states_offload,
        ),
        _Home(
            "axolotl.monkeypatch.activation_offload_checkpoint",
            {"HiddenStatesOffloadCheckpoint": axolotl.HiddenStatesOffloadCheckpoint},
            is_optional=True,
        ),
        _Home(
            "axolotl.monkeypatch.checkpoint_activation_offload",
            {
                "CheckpointHiddenStatesOffload": axolotl.CheckpointHiddenStatesOffload,
                "get_checkpoint_hidden_states_offloading_ctx_manager": axolotl.checkpoint_hidden_states_offload,
            },
            is_optional=True,
        ),
        _Home(
            "axolotl.monkeypatch.selective_checkpointing_offload",
            {"SacOffloadEngine": _MadeOf(axolotl.warning_engine)},
            is_optional=True,
        ),
    ),
}


@dataclass
class _Ours:
    """Ours in one home: by how many installs, and what puts the trainer's own back."""

    count: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


_ours: dict[tuple[str, ...], _Ours] = {}


class Installed:
    """What was put in place of a trainer's own. `remove` puts that back; as a context, at its end."""

    def __init__(self, homes: Sequence[_Home]) -> None:
        self._homes = list(homes)

    def remove(self) -> None:
        """Put the trainer's own back, unless another install still wants ours. What has been made of ours by then stays
        ours."""
        while self._homes:
            key = self._homes.pop().key
            ours = _ours[key]
            ours.count -= 1
            if ours.count == 0:
                del _ours[key]
                while ours.undo:
                    ours.undo.pop()()

    def __enter__(self) -> "Installed":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install(trainer: str) -> Installed:
    """Have an unmodified script use ours: what `trainer` imports under its own names from now on, or has already.

    Of Axolotl's names, `SacOffloadEngine` stays Axolotl's: making one warns.

    A warning says so where nothing can move: on a machine without an accelerator, if `OffloadActivations.settings` has
    no store yet.

    Args:
        trainer: "trl", "axolotl" or "torchtune".

    Raises:
        ConfigError: another trainer, or a version of it that has nothing under these names.
        MissingPackageError: it is not installed, or what it needs.
    """
    homes = _HOMES.get(trainer)
    if homes is None:
        raise ConfigError(f"install({trainer!r}): expected one of {', '.join(map(repr, _HOMES))}")
    places = [(home, place) for home in homes if (place := _found(home)) is not None]
    for home, place in places:
        ours = _ours.setdefault(home.key, _Ours())
        if home.end is not None and ours.count == 0:
            ours.undo.append(home.end)
        for name, thing in home.names.items():
            if not isinstance(thing, _MadeOf):
                ours.undo.append(_replace(place, name, thing))
            elif ours.count == 0:  # else an earlier install has made the replacement
                ours.undo.append(_replace(place, name, thing.make(getattr(place, name))))
        ours.count += 1
    _warn_without_device(trainer, [home for home, _ in places])
    return Installed([home for home, _ in places])


def _found(home: _Home) -> Any:
    """The module or class with the names of `home`; None if `home` is optional and no script can import the names."""
    try:
        return _imported(home)
    except (ImportError, ConfigError):
        if home.is_optional:
            return None
        raise


def _warn_without_device(trainer: str, homes: Sequence[_Home]) -> None:
    things = [thing for home in homes for thing in home.names.values()]
    contexts = [thing for thing in things if isinstance(thing, type) and issubclass(thing, _context.OffloadActivations)]
    still = [context for context in contexts if not context.moves_here()]
    if still:
        place = f"{still[0].__module__.replace('._context', '')}.{still[0].__name__}.settings"
        warnings.warn(
            f"install({trainer!r}): what {trainer} is to offload stays where it is: {_context.WITHOUT_DEVICE} {place} "
            "before",
            EbbtideWarning,
            stacklevel=3,
        )


def _imported(home: _Home) -> Any:
    package = home.module.partition(".")[0]
    if not is_installed(package):
        raise MissingPackageError(f"{package} is not installed. Write: pip install {package}")
    try:
        module = importlib.import_module(home.module)
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        if needed == package:
            raise _unknown(package, f"no module {home.module}") from error
        what = f"another version of {needed}" if is_installed(needed) else f"{needed}. Write: pip install {needed}"
        raise MissingPackageError(f"{package} cannot be imported: it needs {what} ({error})") from error
    place: Any = getattr(module, home.owner, None) if home.owner else module
    missing = [home.owner] if place is None else [name for name in home.names if not hasattr(place, name)]
    if missing:
        raise _unknown(package, f"no {', '.join(missing)} in {home.module}")
    return place


def _unknown(package: str, what: str) -> ConfigError:
    return ConfigError(
        f"{package} {version_of(package)} has {what}: it switches offloading on in another way than the versions that "
        "are known here. Enter ebbtide.offload_activations() around the training step, or call ebbtide.offload(model)"
    )


def _replace(home: ModuleType | type, name: str, ours: object) -> Callable[[], None]:
    """In its home, and wherever else it has been imported to under whatever name. Gives what puts it back, also where
    the trainer's own modules have found ours in between."""
    theirs = getattr(home, name)
    if theirs is ours:
        return lambda: None
    if isinstance(home, type):
        setattr(home, name, ours)
        return lambda: setattr(home, name, theirs)
    places = list(_places_of(theirs))
    for namespace, key in places:
        namespace[key] = ours

    def put_back() -> None:
        for namespace, key in [*places, *_places_of(ours, home.__name__.partition(".")[0])]:
            if namespace.get(key) is ours:
                namespace[key] = theirs

    return put_back


def _places_of(thing: object, package: str | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """The modules, as namespaces, that have `thing`, and its names there; of all, or only of those of a package."""
    for name, module in list(sys.modules.items()):
        if package is None or name.partition(".")[0] == package:
            namespace: dict[str, Any] = getattr(module, "__dict__", {})
            yield from ((namespace, key) for key in [key for key, value in namespace.items() if value is thing])
