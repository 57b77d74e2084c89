"""Replacement of a trainer's names by ebbtide's, in every module that has imported them."""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ebbtide._errors import ConfigError, EbbtideWarning, MissingPackageError
from ebbtide._utils.packages import is_installed, version_of
from ebbtide.compat import _axolotl as axolotl
from ebbtide.compat import _context, _heads, torchtune


@dataclass(eq=False)
class _Target:
    """Names of a trainer's module or class, with their replacements. Installs of several trainers may share a target.

    Attributes:
        module: path of the trainer's module.
        names: replacements by name.
        owner: class with the names, if not the module.
        end: called after the trainer's own are back.
        is_optional: no switch of the trainer uses the names, which only scripts import, in versions with the names.
        are_made: replacements are made, by the values of `names`, from the trainer's own.
        installs: how many are not removed yet; `undo` puts the trainer's own back.
    """

    module: str
    names: Mapping[str, Any]
    owner: str = ""
    end: Callable[[], None] | None = None
    is_optional: bool = False
    are_made: bool = False
    installs: int = 0
    undo: ExitStack = field(default_factory=ExitStack)


def _own(package: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(package, name) for name in names}


_CONTEXTS = ("OffloadActivations", "NoOpManager")
_TRL = _Target(
    "trl.models.activation_offloading",
    {**_own(_context, *_CONTEXTS), **_own(_heads, "get_act_offloading_ctx_manager")},
)
_TARGETS: Mapping[str, tuple[_Target, ...]] = {
    "trl": (_TRL,),
    "torchtune": (
        _Target(
            "torchtune.training._activation_offloading",
            _own(torchtune, *_CONTEXTS, "get_act_offloading_ctx_manager"),
        ),
    ),
    "axolotl": (
        _TRL,
        _Target(axolotl.MIXINS, {"get_lora_act_offloading_ctx_manager": _heads.get_lora_act_offloading_ctx_manager}),
        _Target(axolotl.MIXINS, {"__init__": axolotl.initialize}, owner="ActivationOffloadingMixin"),
        _Target(
            "axolotl.monkeypatch.activation_offload_checkpoint",
            _own(axolotl, "patch_hidden_states_offload", "unpatch_hidden_states_offload"),
            end=axolotl.unpatch_hidden_states_offload,
        ),
        _Target(
            "axolotl.monkeypatch.activation_offload_checkpoint",
            _own(axolotl, "HiddenStatesOffloadCheckpoint"),
            is_optional=True,
        ),
        _Target(
            "axolotl.monkeypatch.checkpoint_activation_offload",
            {
                "CheckpointHiddenStatesOffload": axolotl.CheckpointHiddenStatesOffload,
                "get_checkpoint_hidden_states_offloading_ctx_manager": axolotl.checkpoint_hidden_states_offload,
            },
            is_optional=True,
        ),
        _Target(
            "axolotl.monkeypatch.selective_checkpointing_offload",
            {"SacOffloadEngine": axolotl.warning_engine},
            is_optional=True,
            are_made=True,
        ),
    ),
}


class Installed(AbstractContextManager["Installed"]):
    """A replacement of a trainer's names, undone by `remove` or, as a context, at the end."""

    def __init__(self, targets: Sequence[_Target]) -> None:
        self._targets = list(targets)

    def remove(self) -> None:
        """Put the trainer's own back after the last install is removed. Objects made meanwhile stay ebbtide's."""
        while self._targets:
            target = self._targets.pop()
            target.installs -= 1
            if target.installs == 0:
                target.undo.close()

    def __exit__(self, *_: object) -> None:
        self.remove()


def install(trainer: str) -> Installed:
    """Replace the names of `trainer` for offloading, in all present and later imports, for unmodified scripts.

    Axolotl's `SacOffloadEngine` is not replaced: making an engine warns. On a machine without an accelerator, and
    without a store in `OffloadActivations.settings`, nothing can move, and `install` warns.

    Args:
        trainer: "trl", "axolotl" or "torchtune".

    Raises:
        ConfigError: another trainer, or a version of the trainer without these names.
        MissingPackageError: the trainer or a package of the trainer's is not installed.
    """
    targets = _TARGETS.get(trainer)
    if targets is None:
        raise ConfigError(f"install({trainer!r}): expected one of {', '.join(map(repr, _TARGETS))}")
    found: list[tuple[_Target, Any]] = []
    for target in targets:
        with suppress(ImportError, ConfigError) if target.is_optional else nullcontext():
            found.append((target, _imported(target)))
    for target, place in found:
        if target.end is not None and target.installs == 0:
            target.undo.callback(target.end)
        for name, ours in target.names.items():
            if not target.are_made:
                _replace(target.undo, place, name, ours)
            elif target.installs == 0:  # else an earlier install has made the replacement
                _replace(target.undo, place, name, ours(getattr(place, name)))
        target.installs += 1
    context = targets[0].names["OffloadActivations"]
    if not context.moves_here():
        place = f"{context.__module__.replace('._context', '')}.{context.__name__}.settings"
        warnings.warn(
            f"install({trainer!r}): what {trainer} is to offload stays where it is: {_context.WITHOUT_DEVICE} {place} "
            "before",
            EbbtideWarning,
            stacklevel=2,
        )
    return Installed([target for target, _ in found])


def _imported(target: _Target) -> Any:
    """The module or class of `target`."""
    package = target.module.partition(".")[0]
    if not is_installed(package):
        raise MissingPackageError(f"{package} is not installed. Write: pip install {package}")
    try:
        module = importlib.import_module(target.module)
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0]
        if needed == package:
            raise _unknown(package, f"no module {target.module}") from error
        what = f"another version of {needed}" if is_installed(needed) else f"{needed}. Write: pip install {needed}"
        raise MissingPackageError(f"{package} cannot be imported: it needs {what} ({error})") from error
    place: Any = getattr(module, target.owner, None) if target.owner else module
    missing = [target.owner] if place is None else [name for name in target.names if not hasattr(place, name)]
    if missing:
        raise _unknown(package, f"no {', '.join(missing)} in {target.module}")
    return place


def _unknown(package: str, what: str) -> ConfigError:
    return ConfigError(
        f"{package} {version_of(package)} has {what}: it switches offloading on in another way than the versions that "
        "are known here. Enter ebbtide.offload_activations() around the training step, or call ebbtide.offload(model)"
    )


def _replace(undo: ExitStack, owner: ModuleType | type, name: str, ours: object) -> None:
    """Replace `name` of `owner` in all modules, under all names, until `undo`.

    The trainer's own modules may import `ours` in between: there too.
    """
    theirs = getattr(owner, name)
    if theirs is ours:
        return
    if isinstance(owner, type):
        undo.callback(setattr, owner, name, theirs)
        setattr(owner, name, ours)
        return
    places = list(_places_of(theirs))
    for namespace, key in places:
        namespace[key] = ours

    @undo.callback
    def _put_back() -> None:
        for namespace, key in [*places, *_places_of(ours, owner.__name__.partition(".")[0])]:
            if namespace.get(key) is ours:
                namespace[key] = theirs


def _places_of(thing: object, package: str | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """Namespaces of modules that have `thing`, with its names; of all modules, or of a package."""
    for name, module in list(sys.modules.items()):
        if package is None or name.partition(".")[0] == package:
            namespace: dict[str, Any] = getattr(module, "__dict__", {})
            yield from ((namespace, key) for key in [key for key, value in namespace.items() if value is thing])
