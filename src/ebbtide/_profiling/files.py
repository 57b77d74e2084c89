"""Profiles in files: a later run of the same model finds them, and the first rank writes for all ranks."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ebbtide._errors import ConfigError, EbbtideError, EbbtideWarning
from ebbtide._profiling.profile import OtherVersionError, Profile
from ebbtide._types import StoreFactory
from ebbtide._utils import env
from ebbtide._utils.distributed import Group, Value, first_of, gather, is_first

_log = logging.getLogger(__name__)


class ProfileWritten(SystemExit):
    """Ends a run under EBBTIDE_PROFILE_END once the profile is written."""


@dataclass(eq=False)
class Profiles:
    """Source and destination of a handle's profile.

    Attributes:
        profile: the user's setting: a profile, the path of a file that is there or will be, or None.
        made_for: circumstances that a profile in a file has to match.
        settings: returns the current settings that influence a profile, by name. A profile without a setting counts as
            measured under the same setting.
        group: the ranks that share the file.

    Raises:
        ConfigError: `profile` is something else, or EBBTIDE_PROFILE is no path.
    """

    profile: Profile | str | Path | None
    made_for: Mapping[str, str]
    settings: Callable[[], Mapping[str, str]]
    group: Group

    def __post_init__(self) -> None:
        profile = self.profile
        if profile is not None and not isinstance(profile, Profile | str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"profile={profile!r}: expected a profile (handle.profile), or a path for its file")
        self._known = profile if isinstance(profile, Profile) else None
        self._path = Path(profile) if isinstance(profile, str | Path) else None
        self._requested = env.profile_path()

    @property
    def are_for_any_budget(self) -> bool:
        """Whether EBBTIDE_PROFILE requests a file, which may serve any budget later."""
        return self._requested is not None

    def find(self, regions: Collection[str], needs_recomputation: bool) -> Profile | None:
        """A profile known without measuring. With a path the first rank's profile, if all ranks can use it: every rank
        has to call.

        Raises:
            ConfigError: no file could be written at the path.
            PlanError: the file holds something else, and must not be overwritten.
        """
        if self._path is not None:
            self._known = self._in_file(self._of_group(self._path), regions, needs_recomputation)
        return self._known

    def keep(self, profile: Profile) -> None:
        """Write the measured profile to its files. Raises ProfileWritten under EBBTIDE_PROFILE_END."""
        if self._path is not None and profile is not self._known:
            self._write(profile, self._path)
        if self._requested is not None:
            self._write(profile, self._requested)
            if env.ends_with_profile():
                _log.warning("the profile is measured, and this run ends here, as EBBTIDE_PROFILE_END says")
                raise ProfileWritten(0)

    def _of_group(self, path: Path) -> Path:
        """`path`, with the group's first rank in the name unless that is rank 0: stages of a pipeline have profiles of
        their own."""
        first = first_of(self.group)
        return path if first == 0 else path.with_stem(f"{path.stem}-rank{first}")

    def _in_file(self, path: Path, regions: Collection[str], needs_recomputation: bool) -> Profile | None:
        found = self._of_all(_load(path) if is_first(self.group) else None)[0]
        if isinstance(found, EbbtideError):
            raise found
        why_not = "no file yet" if found is None else self._why_not(found, regions, needs_recomputation)
        if found is not None and not any(self._of_all(why_not)):
            return found
        _log.info("the first steps are measured and written to %s: %s", path, why_not or "another rank has no profile")
        return None

    def _of_all(self, mine: Value) -> list[Value]:
        return gather(mine, self.group, "the file of a profile")

    def _why_not(self, profile: Profile, regions: Collection[str], needs_recomputation: bool) -> str:
        """Why the profile cannot be used; empty if it can."""
        differences = profile.what_differs({**self.made_for, **self.settings()})
        if differences:
            return f"the profile in the file is of the {differences[0]}"
        if not {region.name for region in profile.regions} <= set(regions):
            return "the profile in the file is of other regions"
        if needs_recomputation and not profile.has_recomputation:
            return "the profile in the file was measured without a budget and has no recomputation times"
        return ""

    def _write(self, profile: Profile, path: Path) -> None:
        """Write the profile on the first rank. A failure is a warning: training continues without the file."""
        if is_first(self.group):
            path = self._of_group(path)
            try:
                dataclasses.replace(profile, made_for={**profile.made_for, **self.settings()}).save(path)
            except OSError as error:
                warnings.warn(f"the profile was not written to {path}: {error}", EbbtideWarning, stacklevel=2)


def _load(path: Path) -> Profile | EbbtideError | None:
    """The profile in the file; None without a file of this version. An error is returned, to be raised on all ranks: an
    exception on a single rank would leave the rest waiting."""
    if path.is_dir() or not path.parent.is_dir():
        return ConfigError(f"profile={str(path)!r}: expected a file, in a folder that is there")
    try:
        return Profile.load(path) if path.exists() else None
    except OtherVersionError:
        return None
    except EbbtideError as error:
        return error


def store_name(store: str | StoreFactory | None) -> str:
    """The name of a store in `Profile.made_for`."""
    if isinstance(store, str):
        return store
    return "default" if store is None else getattr(store, "__qualname__", type(store).__name__)


def count_compiled(regions: Mapping[str, torch.nn.Module]) -> str:
    """The number of compiled regions, for `Profile.made_for`: a compiler saves other tensors at other times."""
    compiled = sum(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in regions.values())
    return f"{compiled} of {len(regions)} regions"
