"""Profiles in files: a later run of the same model finds them, and the first rank writes for all ranks."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from ebbtide._errors import ConfigError, EbbtideError, EbbtideWarning
from ebbtide._profiling.profile import OtherVersionError, Profile
from ebbtide._types import StoreFactory
from ebbtide._utils import env
from ebbtide._utils.distributed import Value, gather, is_first

_log = logging.getLogger(__name__)


class ProfileWritten(SystemExit):
    """Ends a run under EBBTIDE_PROFILE_END once the profile is written. The exit status is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class ProfileFile:
    """The file in which a profile waits for the next run.

    Args:
        path: where the file is, or will be.
        made_for: circumstances that a profile in the file has to match.
        settings: returns the current settings that influence a profile, by name. A profile without a setting counts as
            measured under the same setting.
        group: the ranks that share the file; None: all ranks of the job.
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

    def find(self, regions: Collection[str], needs_recomputation: bool) -> Profile | None:
        """The first rank's profile if all ranks can use it. Collective: every rank has to call.

        Raises:
            ConfigError: no file could be written at the path.
            PlanError: the file holds something else, and must not be overwritten.
        """
        found = self._of_all(self._look())[0]
        if isinstance(found, EbbtideError):
            raise found
        why_not = "no file yet" if found is None else self._why_not(found, regions, needs_recomputation)
        if found is not None and not any(self._of_all(why_not)):
            return found
        _log.info(
            "the first steps are measured and written to %s: %s", self._path, why_not or "another rank has no profile"
        )
        return None

    def _of_all(self, mine: Value) -> list[Value]:
        return gather(mine, self._group, "the file of a profile")

    def write(self, profile: Profile) -> None:
        """Write the profile on the first rank. A failure is a warning: training continues without the file."""
        if not is_first(self._group):
            return
        try:
            dataclasses.replace(profile, made_for={**profile.made_for, **self._settings()}).save(self._path)
        except OSError as error:
            warnings.warn(f"the profile was not written to {self._path}: {error}", EbbtideWarning, stacklevel=2)

    def _look(self) -> Profile | EbbtideError | None:
        """An error is returned and raised on all ranks: an exception on a single rank would leave the rest waiting."""
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

    def _why_not(self, profile: Profile, regions: Collection[str], needs_recomputation: bool) -> str:
        """Why the profile cannot be used; empty if it can."""
        differences = profile.what_differs({**self._made_for, **self._settings()})
        if differences:
            return f"the profile in the file is of the {differences[0]}"
        if not {region.name for region in profile.regions} <= set(regions):
            return "the profile in the file is of other regions"
        if needs_recomputation and not profile.has_recomputation:
            return "the profile in the file was measured without a budget and has no recomputation times"
        return ""


class Profiles:
    """Source and destination of a handle's profile.

    Args:
        profile: the user's setting: a profile, the path of a file, or None.
        made_for, settings, group: see ProfileFile.

    Raises:
        ConfigError: `profile` is something else, or EBBTIDE_PROFILE is no path.
    """

    def __init__(
        self,
        profile: Profile | str | Path | None,
        made_for: Mapping[str, str],
        settings: Callable[[], Mapping[str, str]],
        group: "torch.distributed.ProcessGroup | None",
    ) -> None:
        if profile is not None and not isinstance(profile, Profile | str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"profile={profile!r}: expected a profile (handle.profile), or a path for its file")
        self._known = profile if isinstance(profile, Profile) else None
        self._own = ProfileFile(Path(profile), made_for, settings, group) if isinstance(profile, str | Path) else None
        requested = env.profile_path()
        self._requested = None if requested is None else ProfileFile(requested, made_for, settings, group)

    @property
    def are_for_any_budget(self) -> bool:
        """Whether EBBTIDE_PROFILE requests a file, which may serve any budget later."""
        return self._requested is not None

    def find(self, regions: Collection[str], needs_recomputation: bool) -> Profile | None:
        """A profile known without measuring. Raises as `ProfileFile.find` does."""
        if self._own is not None:
            self._known = self._own.find(regions, needs_recomputation)
        return self._known

    def keep(self, profile: Profile) -> None:
        """Write the measured profile to its files. Raises ProfileWritten under EBBTIDE_PROFILE_END."""
        if self._own is not None and profile is not self._known:
            self._own.write(profile)
        if self._requested is not None:
            self._requested.write(profile)
            if env.ends_with_profile():
                _log.warning("the profile is measured, and this run ends here, as EBBTIDE_PROFILE_END says")
                raise ProfileWritten


def store_name(store: str | StoreFactory | None) -> str:
    """The name of a store in `Profile.made_for`."""
    if isinstance(store, str):
        return store
    return "default" if store is None else getattr(store, "__qualname__", type(store).__name__)


def count_compiled(regions: Mapping[str, torch.nn.Module]) -> str:
    """The number of compiled regions, for `Profile.made_for`: a compiler saves other tensors at other times."""
    compiled = sum(module._compiled_call_impl is not None for module in regions.values())
    return f"{compiled} of {len(regions)} regions"
