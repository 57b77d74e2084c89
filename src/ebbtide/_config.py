"""What a user can set, checked where it is written."""

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch

from ebbtide._errors import ConfigError
from ebbtide._utils.sizes import MIB, parse_bytes
from ebbtide.types import StoreFactory

Mode = Literal["all", "auto", "off"]
Names = str | type[torch.nn.Module]


@dataclass(frozen=True)
class OffloadConfig:
    """Settings of a door. Sizes are bytes: an int, or text like "512MiB".

    Attributes:
        mode: "auto" leaves to the planner what is moved; "all" moves every save that may travel; "off" does nothing.
        include, exclude: FQN patterns ("layers.*.mlp") or module classes. With `include`, only what is saved inside
            these modules' forward travels; what is saved inside `exclude` stays. The innermost match decides.
        keep_last: the saves of the last so many regions stay: backward needs them at once.
        store: see `stores.factory_for`.
        window_bytes: most bytes on their way out whose device memory is not yet released; beyond it compute waits.
        prefetch_bytes: most bytes brought back before backward asks for them.
        min_bytes: saves of smaller storages stay.
        host_limit_bytes: most host memory to take; None: 80 % of what is free, divided among this host's processes.
        verify: compare recomputation with forward in every so many-th forward. None: in a planner's
            first one, 0: never.
    """

    mode: Mode = "all"
    include: tuple[Names, ...] = ()
    exclude: tuple[Names, ...] = ()
    keep_last: int = 0
    store: str | StoreFactory | None = None
    window_bytes: int = 512 * MIB
    prefetch_bytes: int = 512 * MIB
    min_bytes: int = MIB
    host_limit_bytes: int | None = None
    verify: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode={self.mode!r} is not a mode: write one of {', '.join(map(repr, get_args(Mode)))}")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"keep_last={self.keep_last!r}: expected how many of the last regions to keep, 0 or more")
        is_count = isinstance(self.verify, int) and not isinstance(self.verify, bool) and self.verify >= 0
        if self.verify is not None and not is_count:
            raise ConfigError(
                f"verify={self.verify!r}: expected how many forwards lie between two verified ones, such as 1000; 0 "
                "for none, or None for a planner's first one"
            )


def make_config(
    *,
    mode: Mode = "all",
    include: Names | list[Names] | tuple[Names, ...] | None = (),
    exclude: Names | list[Names] | tuple[Names, ...] | None = (),
    keep_last: int = 0,
    store: str | StoreFactory | None = None,
    window: int | str = 512 * MIB,
    prefetch: int | str = 512 * MIB,
    min_bytes: int | str = MIB,
    host_limit: int | str | None = None,
    verify: int | None = None,
) -> OffloadConfig:
    """The config of what a user wrote at a door. Raises ConfigError."""
    return OffloadConfig(
        mode=mode,
        include=as_names("include", include),
        exclude=as_names("exclude", exclude),
        keep_last=keep_last,
        store=store,
        window_bytes=parse_bytes(window, "window"),
        prefetch_bytes=parse_bytes(prefetch, "prefetch"),
        min_bytes=parse_bytes(min_bytes, "min_bytes"),
        host_limit_bytes=None if host_limit is None else parse_bytes(host_limit, "host_limit"),
        verify=verify,
    )


def as_names(option: str, given: Any) -> tuple[Names, ...]:
    """What a user wrote where modules are named. Raises ConfigError."""
    if given is None:
        return ()
    names = tuple(cast("list[Any]", given)) if isinstance(given, list | tuple) else (given,)
    for name in names:
        if not isinstance(name, str) and not (isinstance(name, type) and issubclass(name, torch.nn.Module)):
            raise ConfigError(
                f"{option}={name!r}: expected names or patterns of modules, such as 'layers.*.mlp', or their classes"
            )
    return names
