"""Settings of the entry points, each defined once: type, default, unit and help.

`offload`, `offload_activations`, `plan`, `measure`, the arguments of trainers and the command line repeat `SETTINGS`,
which tests/test_config.py compares. The file imports no torch, because `ebbtide plan` runs without torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from ebbtide._errors import ConfigError
from ebbtide._utils.sizes import GIB, MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from ebbtide._types import StoreFactory

Mode = Literal["all", "auto", "off"]
Names = str | type["torch.nn.Module"]
_Documented = TypeVar("_Documented", bound=type)

MIN_BUDGET_BYTES = MIB // 2
"""Smallest budget in bytes. A smaller number lacks its unit, because no device has 512 GiB (2**19 MiB)."""


@dataclass(frozen=True)
class Setting:
    """Definition of a setting.

    Attributes:
        type: annotation of a value in Python.
        help: one or two sentences for docstrings and command lines.
        default: value of a setting that a user leaves out; None: see `help`.
        unit: "bytes" for sizes, written as an int or as text.
    """

    type: str
    help: str
    default: Any = None
    unit: Literal["", "bytes"] = ""

    def __str__(self) -> str:
        return f"{self.help} Default: {self.default}." if self.default else self.help


_MODULES = "Names | list[Names] | tuple[Names, ...]"
_SIZE = "int | str"

SETTINGS: Mapping[str, Setting] = {
    "mode": Setting("Mode", '"auto": a planner decides what moves. "all": all saved tensors move. "off": none.'),
    "budget": Setting(
        "int | float | str",
        'Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8 or "80%".',
    ),
    "max_slowdown": Setting(
        "float",
        "Largest slowdown of a step as a share, 0.05 for 5 %: the planner keeps, moves and recomputes for the smallest "
        "peak. Default: 0.01, by moving alone; not beside a budget.",
    ),
    "include": Setting(
        _MODULES,
        'Names, patterns ("layers.*.mlp") or classes of modules: only tensors saved in the forward of these move, also '
        "where a later module saves the same memory.",
        default=(),
    ),
    "exclude": Setting(
        _MODULES, "Names, patterns or classes of modules: tensors saved in the forward of these stay.", default=()
    ),
    "keep_last": Setting("int", "Number of last blocks whose saved tensors stay: backward needs these at once.", 0),
    "regions": Setting(
        _MODULES,
        "Names, patterns or classes of the modules to plan for. Default: the repeated blocks and the norm behind.",
        default=(),
    ),
    "recipe": Setting(
        "RecipeLike | Mapping[Names, RecipeLike]",
        '"keep", "offload", "recompute" or "selective", for all repeated blocks or by name or pattern.',
    ),
    "plan": Setting("Plan", "Plan to follow instead of a recipe (as a trainer argument: the path of a plan file)."),
    "profile": Setting(
        "Profile | str | Path",
        "Profile of this model on this device, or the path of a profile file, written if missing or of another model.",
    ),
    "on_oom": Setting(
        'Literal["raise", "replan"]',
        'If the device runs out of memory: "raise" the error, or also "replan" for less than the budget.',
        default="raise",
    ),
    "verify": Setting("int", "Compare recomputation with forward once in so many forwards; 0: never."),
    "process_group": Setting(
        "torch.distributed.ProcessGroup",
        "Ranks that agree on a plan within a budget, or share a profile file. Default: all ranks of the job.",
    ),
    "store": Setting(
        "str | StoreFactory",
        'Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for '
        'accelerators, "disk" for a model on the CPU of a machine without an accelerator.',
    ),
    "window": Setting(
        _SIZE,
        "Most bytes on their way out whose device memory is not released yet; beyond the limit compute waits.",
        default="512MiB",
        unit="bytes",
    ),
    "prefetch": Setting(_SIZE, "Most bytes brought back before backward needs them.", default="512MiB", unit="bytes"),
    "min_bytes": Setting(_SIZE, "Saved tensors of smaller storages stay on the device.", default="1MiB", unit="bytes"),
    "host_limit": Setting(
        _SIZE,
        "Most host memory to take; tensors beyond the limit stay on the device. Default: 80 % of free memory, divided "
        "among the processes of the host.",
        unit="bytes",
    ),
}


def with_settings(cls: _Documented) -> _Documented:
    """Append the settings among the fields of `cls` to the docstring, where `--help` and `help()` look."""
    names = [name for name in SETTINGS if name in cls.__annotations__]
    lines = [f"    {name}: {SETTINGS[name]}" for name in names]
    cls.__doc__ = "\n".join([cls.__doc__ or "", "", "Args:", *lines])
    return cls


@dataclass(frozen=True)
class OffloadConfig:
    """Checked values of the settings for moving tensors: see `SETTINGS`. Sizes are in bytes."""

    mode: Mode = "all"
    include: tuple[Names, ...] = ()
    exclude: tuple[Names, ...] = ()
    keep_last: int = 0
    store: "str | StoreFactory | None" = None
    window_bytes: int = parse_bytes(SETTINGS["window"].default, "window")
    prefetch_bytes: int = parse_bytes(SETTINGS["prefetch"].default, "prefetch")
    min_bytes: int = parse_bytes(SETTINGS["min_bytes"].default, "min_bytes")
    host_limit_bytes: int | None = None
    verify: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode={self.mode!r} is not a mode: write one of {', '.join(map(repr, get_args(Mode)))}")
        if not _is_count(self.keep_last):
            raise ConfigError(f"keep_last={self.keep_last!r}: expected how many of the last regions to keep, 0 or more")
        if self.verify is not None and not _is_count(self.verify):
            raise ConfigError(
                f"verify={self.verify!r}: expected how many forwards lie between two verified ones, such as 1000; 0 "
                "for none, or None for a planner's first one"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def make_config(**settings: Any) -> OffloadConfig:
    """Parse and check settings as a user writes them: None, if allowed, is the default. Raises ConfigError."""
    values: dict[str, Any] = {}
    value: Any
    for name, value in settings.items():
        if name in ("include", "exclude"):
            values[name] = as_names(name, value)
        elif not SETTINGS[name].unit:
            values[name] = value
        elif name == "min_bytes" or value is not None:
            values[f"{name.removesuffix('_bytes')}_bytes"] = parse_bytes(value, name)
    return OffloadConfig(**values)


def as_names(setting: str, value: Any) -> tuple[Names, ...]:
    """Names, patterns and classes of modules as a tuple. Raises ConfigError for other types."""
    from torch.nn import Module  # the command line parses arguments without torch

    if value is None:
        return ()
    names = tuple(cast("list[Any]", value)) if isinstance(value, list | tuple) else (value,)
    for name in names:
        if not isinstance(name, str) and not (isinstance(name, type) and issubclass(name, Module)):
            raise ConfigError(
                f"{setting}={name!r}: expected names or patterns of modules, such as 'layers.*.mlp', or their classes"
            )
    return names


class Budget:
    """A peak to stay under: bytes, text like "40GiB", or a share of the device memory, a float of at most 1 or "80%".

    `str()` gives the budget as written by the user.

    Raises:
        ConfigError: another type, a share above 1, or a number too small to be bytes.
    """

    def __init__(self, value: int | float | str) -> None:
        self._share: float | None = None
        self._nbytes = 0
        if isinstance(value, bool) or not isinstance(value, Integral | float | str):
            raise ConfigError(
                f"budget={value!r}: expected bytes as an int, text like '40GiB', or a share of the device's memory "
                "such as 0.8"
            )
        if isinstance(value, str) and value.rstrip().endswith("%"):
            self._share = _share_of_percent(value)
            self._text = f"{value.strip()} of the device's memory"
        elif isinstance(value, float):
            _check_share(value)
            self._share = value
            self._text = f"{value:g} of the device's memory"
        else:
            _check_not_quoted_share(value)
            self._nbytes = parse_bytes(value, "budget")
            # Text passes: the user wrote bytes.
            if self._nbytes < MIN_BUDGET_BYTES and not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                whole = ", or 1.0 for all of the device's memory" if value == 1 else ""
                raise ConfigError(
                    f"budget={self._nbytes}: an int is bytes, and {self._nbytes} bytes hold nothing: write "
                    f"{_with_unit(self._nbytes)!r}{whole}"
                )
            text = f"{value}".strip()
            self._text = f"{text} bytes ({format_bytes(self._nbytes)})" if text.isdigit() else text

    def __str__(self) -> str:
        return self._text

    @property
    def is_share(self) -> bool:
        """Whether the bytes depend on the memory of the device."""
        return self._share is not None

    def __call__(self, total_bytes: int) -> int:
        """Bytes of the budget on a device with `total_bytes` of memory."""
        return self._nbytes if self._share is None else int(self._share * total_bytes)


def parse_budget(text: str) -> float | str:
    """The value for `budget=` that a command line means: a number is a share, or bytes if large enough."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number < MIN_BUDGET_BYTES else text


def _share_of_percent(text: str) -> float:
    try:
        percent = float(text.rstrip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise ConfigError(
            f"budget={text!r}: expected a share of the device's memory above 0% and at most 100%, such as '80%'"
        )
    return percent / 100


def _check_share(share: float) -> None:
    if 0 < share <= 1:
        return
    found = f"budget={share!r}: a float is a share of the device's memory, between 0 and 1, such as 0.8"
    if MIB <= share < 1e15:  # no device has 1e15 bytes: a larger number was not meant as bytes
        found += f". For bytes write int({share / 1e9:g}e9), '{share / 1e9:g}GB' or '{share / GIB:.1f}GiB'"
    elif share > 1:
        found += f". For bytes write text like {_with_unit(share)!r}"
    raise ConfigError(found)


def _with_unit(count: float) -> str:
    if count >= 1e15:
        return "40GiB"
    return f"{count:g}GiB" if count < GIB / MIB else f"{int(count)}MiB"


def _check_not_quoted_share(value: int | str) -> None:
    """Refuse a share in quotes, which would be a fraction of a byte."""
    try:
        share = float(value) if isinstance(value, str) else 0.0
    except ValueError:
        return  # text with a unit, or no size at all
    if 0 < share <= 1:
        raise ConfigError(
            f"budget={value!r}: text is bytes, like '40GiB'. For a share of the device's memory write {share!r}, "
            "without quotes"
        )


# -- settings that exclude each other ----------------------------------------------------------------------------------


def checked_slowdown(value: float | None) -> float | None:
    """`value`, if a slowdown is possible. Raises ConfigError for another type, and for a share that is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"max_slowdown={value!r}: expected a share of the step above 0, such as 0.05 for 5 %")
    if value >= 1:
        raise ConfigError(
            f"max_slowdown={value!r} allows a step {1 + value:g} times as long: a slowdown is a share, 0.05 for 5 %. "
            "For the least memory at any time write budget="
        )
    return float(value)


def check_one_goal(budget: object, max_slowdown: object) -> None:
    """Raises ConfigError if both goals of a plan are written."""
    if budget is not None and max_slowdown is not None:
        raise ConfigError(
            "budget= asks for the fastest step under a peak, and max_slowdown= for the smallest peak of a step that is "
            "fast enough, two goals: leave one of them out"
        )


def planner_decides(
    mode: Mode | None,
    budget: object,
    max_slowdown: object,
    profile: object,
    regions: object,
    on_oom: object,
    process_group: object,
    **by_hand: object,
) -> bool:
    """Whether a planner decides what moves.

    Args:
        mode, budget, max_slowdown, profile, regions, on_oom, process_group: values as written by a user.
        by_hand: settings for moving tensors by hand, as written by a user.

    Raises:
        ConfigError: contradictory settings, or settings of a planner without a planner.
    """
    manual = [f"{name}=" for name, value in by_hand.items() if value]
    goals = (("budget", budget), ("max_slowdown", max_slowdown))
    wanted = [f"{name}=" for name, value in (*goals, ("profile", profile)) if value is not None]
    check_one_goal(budget, max_slowdown)
    if mode in ("all", "off") and wanted:
        raise ConfigError(f"mode={mode!r} plans nothing, and {wanted[0]} asks for a plan: leave one of them out")
    if mode == "auto":
        wanted.append("mode='auto'")
    if wanted and manual:
        raise ConfigError(
            f"{wanted[0]} leaves it to the planner what is moved and when, and {manual[0]} says it: leave one of them "
            "out"
        )
    is_planned = bool(wanted) or (mode is None and not manual)
    unplanned_by = "" if is_planned else f"mode={mode!r}" if mode else manual[0]
    if on_oom not in ("raise", "replan"):
        raise ConfigError(f"on_oom={on_oom!r}: write 'raise' or 'replan'")
    if unplanned_by and regions not in ((), [], None):
        raise ConfigError(
            f"regions= names the modules that are planned one by one, and with {unplanned_by} nothing is planned: "
            f"leave {unplanned_by} out, or regions= (include=, exclude=, recipe= and plan= take names of modules "
            "themselves)"
        )
    if unplanned_by and on_oom == "replan":
        raise ConfigError(
            f"on_oom='replan' plans for less memory, and with {unplanned_by} nothing is planned: leave {unplanned_by} "
            "out and write a budget, such as budget='40GiB', or leave on_oom= out"
        )
    if budget is None and on_oom == "replan":
        raise ConfigError(
            "on_oom='replan' plans for less than the budget, and there is none: write one, such as budget='40GiB', or "
            "leave on_oom= out"
        )
    if process_group is not None and budget is max_slowdown is None and not isinstance(profile, str | Path):
        raise ConfigError(
            "process_group= names the ranks that agree on a plan for a budget, or share the file of a profile, and "
            "there is neither: write one, such as budget='40GiB', or leave process_group= out"
        )
    return is_planned


def check_recipe_or_plan(recipe: object, plan: object, keep_last: int) -> None:
    """Raises ConfigError if two of the three settings are written."""
    if recipe is not None and plan is not None:
        raise ConfigError("recipe= and plan= both say what is done with the regions: write one of them")
    if recipe is not None or plan is not None:
        check_without_keep_last("recipe" if plan is None else "plan", keep_last)


def check_without_keep_last(setting: str, keep_last: int) -> None:
    """Raises ConfigError if `keep_last` is written beside `setting`."""
    if keep_last:
        raise ConfigError(f"keep_last= and {setting}= both say what the last blocks do: give those the recipe 'keep'")
