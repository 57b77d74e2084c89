"""Profiles in files: the next run of the same model finds them, and one rank writes for all."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from ebbtide._errors import ConfigError, EbbtideError, EbbtideWarning
from ebbtide._profiling.profile import OtherVersionError, Profile
from ebbtide._utils import env
from ebbtide._utils.distributed import Value, gather, is_first
from ebbtide.types import StoreFactory

_log = logging.getLogger(__name__)


class ProfileWritten(SystemExit):
    """Ends a run that was for its profile only, as EBBTIDE_PROFILE_END says. The exit status is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class ProfileFile:
    """Where a profile waits for the next run.

    Args:
        path: of the file; it need not be there yet.
        made_for: what a profile has to be of.
        settings: what else figures in it, by name, as it is when called. A profile that does not say is believed.
        group: the ranks that share the file; None: all of the job.
    """

    def __init__(
        self,
        path: Path,
        made_for: Mapping[str, str],
        settings: Callable[[], Mapping[str, str]],
        group: "torch.distributed.ProcessGroup | None",
    ) -> None:
        self._path = path
        self._made_for = made_for
        self._settings = settings
        self._group = group

    def find(self, regions: Collection[str], needs_second_runs: bool) -> Profile | None:
        """The first rank's profile, if it is of use to all ranks; all of them have to ask.

        Raises:
            ConfigError: nothing could be written there.
            PlanError: the file is something else, and is not to be written over.
        """
        found = self._of_all(self._look())[0]
        if isinstance(found, EbbtideError):
            raise found
        why_not = "there is none yet" if found is None else self._why_not(found, regions, needs_second_runs)
        if found is not None and not any(self._of_all(why_not)):
            return found
        _log.info("the first steps are measured and written to %s: %s", self._path, why_not or "another rank has none")
        return None

    def _of_all(self, mine: Value) -> list[Value]:
        return gather(mine, self._group, "the file of a profile")

    def write(self, profile: Profile) -> None:
        """Writes it, on the first rank. Training goes on without the file if that fails, with a warning."""
        if not is_first(self._group):
            return
        try:
            dataclasses.replace(profile, made_for={**profile.made_for, **self._settings()}).save(self._path)
        except OSError as error:
            warnings.warn(f"the profile was not written to {self._path}: {error}", EbbtideWarning, stacklevel=2)

    def _look(self) -> Profile | EbbtideError | None:
        """An error is handed to all ranks: none may go on alone."""
        try:
            return self._load() if is_first(self._group) else None
        except EbbtideError as error:
            return error

    def _load(self) -> Profile | None:
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise ConfigError(f"profile={str(self._path)!r}: expected a file, in a folder that is there")
        if not self._path.exists():
            return None
        try:
            return Profile.load(self._path)
        except OtherVersionError:
            return None

    def _why_not(self, profile: Profile, regions: Collection[str], needs_second_runs: bool) -> str:
        """In words; empty if it fits."""
        others = profile.what_differs({**self._made_for, **self._settings()})
        if others:
            return f"the one there is of the {others[0]}"
        if not {region.name for region in profile.regions} <= set(regions):
            return "the one there is of other regions"
        if needs_second_runs and not profile.has_second_runs:
            return "the one there was made without a budget, and says nothing of second runs"
        return ""


class Profiles:
    """Where a handle's profile comes from, and where it goes.

    Args:
        given: what the user wrote: a profile, the path of a file, or None.
        made_for, settings, group: see ProfileFile.

    Raises:
        ConfigError: `given` is something else, or EBBTIDE_PROFILE is no path.
    """

    def __init__(
        self,
        given: Profile | str | Path | None,
        made_for: Mapping[str, str],
        settings: Callable[[], Mapping[str, str]],
        group: "torch.distributed.ProcessGroup | None",
    ) -> None:
        if given is not None and not isinstance(given, Profile | str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"profile={given!r}: expected a profile (handle.profile), or the path of a file for one")
        self._known = given if isinstance(given, Profile) else None
        self._own = ProfileFile(Path(given), made_for, settings, group) if isinstance(given, str | Path) else None
        asked_for = env.profile_path()
        self._asked_for = None if asked_for is None else ProfileFile(asked_for, made_for, settings, group)

    @property
    def are_for_any_budget(self) -> bool:
        """Whoever asks for a file does not say what it is for."""
        return self._asked_for is not None

    def find(self, regions: Collection[str], needs_second_runs: bool) -> Profile | None:
        """What is known without measuring. Raises as ProfileFile does."""
        if self._own is not None:
            self._known = self._own.find(regions, needs_second_runs)
        return self._known

    def keep(self, profile: Profile) -> None:
        """There is one. Raises ProfileWritten if that is all the run was for."""
        if self._own is not None and profile is not self._known:
            self._own.write(profile)
        if self._asked_for is not None:
            self._asked_for.write(profile)
            if env.ends_with_profile():
                _log.warning("the profile is measured, and this run ends here, as EBBTIDE_PROFILE_END says")
                raise ProfileWritten


def store_name(store: str | StoreFactory | None) -> str:
    """As a profile names it."""
    if isinstance(store, str):
        return store
    return "default" if store is None else getattr(store, "__qualname__", type(store).__name__)


def count_compiled(regions: Mapping[str, torch.nn.Module]) -> str:
    """What the compiler makes of a region saves other things, at other times."""
    compiled = sum(module._compiled_call_impl is not None for module in regions.values())
    return f"{compiled} of {len(regions)} regions"
