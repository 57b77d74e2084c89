"""Settings that go together and settings that do not, said at the door. Pure."""

from numbers import Integral
from pathlib import Path

from ebbtide._config import Mode
from ebbtide._errors import ConfigError
from ebbtide._utils.sizes import GIB, MIB, format_bytes, parse_bytes

LEAST_BYTES = MIB // 2
"""The smallest budget in bytes. A smaller number lacks its unit: no device has this many MiB (512 GiB)."""

_MOST_BYTES = 1e15  # that any device has: what is more was not meant as bytes


class Budget:
    """A peak to stay under: bytes, text like "40GiB", or a share of the device's memory, a float of at most 1.

    `str()` gives the budget as its user wrote it.

    Raises ConfigError for anything else, and for a number too small to be bytes.
    """

    def __init__(self, given: int | float | str) -> None:
        self._share: float | None = None
        self._nbytes = 0
        if isinstance(given, bool) or not isinstance(given, Integral | float | str):
            raise ConfigError(
                f"budget={given!r}: expected bytes as an int, text like '40GiB', or a share of the device's memory "
                "such as 0.8"
            )
        if isinstance(given, float):
            _check_share(given)
            self._share = given
            self._text = f"{given:g} of the device's memory"
        else:
            _check_no_share(given)
            self._nbytes = parse_bytes(given, "budget")
            _check_not_without_unit(given)
            text = f"{given}".strip()
            self._text = f"{text} bytes ({format_bytes(self._nbytes)})" if text.isdigit() else text

    def __str__(self) -> str:
        return self._text

    def __call__(self, total_bytes: int) -> int:
        """In bytes, of a device with so many."""
        return self._nbytes if self._share is None else int(self._share * total_bytes)


def _check_share(given: float) -> None:
    if 0 < given <= 1:
        return
    found = f"budget={given!r}: a float is a share of the device's memory, between 0 and 1, such as 0.8"
    if MIB <= given < _MOST_BYTES:
        found += f". For bytes write int({given / 1e9:g}e9), '{given / 1e9:g}GB' or '{given / GIB:.1f}GiB'"
    elif given > 1:
        found += f". For bytes write text like {_with_unit(given)!r}"
    raise ConfigError(found)


def _check_not_without_unit(given: int | str) -> None:
    """Refuse a count of GiB or MiB without its unit. Text is left alone: the user wrote bytes."""
    if not isinstance(given, str) and int(given) < LEAST_BYTES:
        whole = ", or 1.0 for all of the device's memory" if given == 1 else ""
        raise ConfigError(
            f"budget={int(given)}: an int is bytes, and {int(given)} bytes hold nothing: write "
            f"{_with_unit(int(given))!r}{whole}"
        )


def _with_unit(count: float) -> str:
    """The text to write for a number too small to be bytes."""
    if count >= _MOST_BYTES:
        return "40GiB"
    return f"{count:g}GiB" if count < GIB / MIB else f"{int(count)}MiB"


def _check_no_share(given: int | str) -> None:
    """A share in quotes would be a fraction of one byte."""
    try:
        share = float(given) if isinstance(given, str) else 0.0
    except ValueError:
        return  # it has a unit, or is no size at all
    if 0 < share <= 1:
        raise ConfigError(
            f"budget={given!r}: text is bytes, like '40GiB'. For a share of the device's memory write {share!r}, "
            "without quotes"
        )


def given(**settings: object) -> list[str]:
    """The names of those that the user has written."""
    return [name for name, value in settings.items() if value]


def is_left_to_planner(
    mode: Mode | None,
    budget: object,
    profile: object,
    regions: object,
    on_oom: object,
    process_group: object,
    says_how: list[str],
) -> bool:
    """Whether the planner decides. Raises ConfigError if somebody else does too, and for settings of a planner where
    none decides. `says_how`: the settings that say what is moved and how."""
    is_planned = _decides(mode, budget, profile, says_how)
    nothing_by = f"mode={mode!r}" if mode else f"{says_how[0]}=" if says_how else ""
    _check_for_planner(regions, on_oom, budget, None if is_planned else nothing_by)
    if process_group is not None and budget is None and not isinstance(profile, str | Path):
        raise ConfigError(
            "process_group= names the ranks that agree on a plan for a budget, or share the file of a profile, and "
            "there is neither: write one, such as budget='40GiB', or leave process_group= out"
        )
    return is_planned


def _decides(mode: Mode | None, budget: object, profile: object, says_how: list[str]) -> bool:
    asks = [name for name, value in (("budget", budget), ("profile", profile)) if value is not None]
    if mode in ("all", "off") and asks:
        raise ConfigError(f"mode={mode!r} plans nothing, and {asks[0]}= asks for a plan: leave one of them out")
    if (asks or mode == "auto") and says_how:
        wanted = f"{asks[0]}=" if asks else "mode='auto'"
        raise ConfigError(
            f"{wanted} leaves it to the planner what is moved and when, and {says_how[0]}= says it: leave one of them "
            "out"
        )
    return mode == "auto" or bool(asks) or (mode is None and not says_how)


def check_one_says_what_is_done(recipe: object, plan: object, keep_last: int) -> None:
    if recipe is not None and plan is not None:
        raise ConfigError("recipe= and plan= both say what is done with the regions: write one of them")
    if recipe is not None or plan is not None:
        check_none_kept("recipe" if plan is None else "plan", keep_last)


def check_none_kept(option: str, keep_last: int) -> None:
    if keep_last:
        raise ConfigError(f"keep_last= and {option}= both say what the last blocks do: give those the recipe 'keep'")


def _check_for_planner(regions: object, on_oom: object, budget: object, nothing_by: str | None) -> None:
    """Settings that a planner goes by. `nothing_by`: the setting that leaves nothing to it, None where it decides."""
    if on_oom not in ("raise", "replan"):
        raise ConfigError(f"on_oom={on_oom!r}: write 'raise' or 'replan'")
    if nothing_by is not None and regions not in ((), [], None):
        raise ConfigError(
            f"regions= names the modules that are planned one by one, and with {nothing_by} nothing is planned: leave "
            f"{nothing_by} out, or regions= (include=, exclude=, recipe= and plan= take names of modules themselves)"
        )
    if nothing_by is not None and on_oom == "replan":
        raise ConfigError(
            f"on_oom='replan' plans for less memory, and with {nothing_by} nothing is planned: leave {nothing_by} out "
            "and write a budget, such as budget='40GiB', or leave on_oom= out"
        )
    if budget is None and on_oom == "replan":
        raise ConfigError(
            "on_oom='replan' plans for less than the budget, and there is none: write one, such as budget='40GiB', or "
            "leave on_oom= out"
        )
