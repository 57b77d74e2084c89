"""What is read from files of plans and profiles, looked at field by field."""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

from ebbtide._errors import EbbtideError, PlanError

_EXPECTED: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number of at least {least}",
    float: "a finite number of at least {least}",
}
_MOST = 1e100  # far beyond what any step has, and far from what floats cannot hold


@contextlib.contextmanager
def reading(path: str | Path, what: str) -> Generator[None, None, None]:
    """Names the file in what goes wrong with it: raises PlanError for all of that."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except EbbtideError as error:
        raise PlanError(f"{path} is no {what} that ebbtide has written: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{path} is no {what} that ebbtide has written: {error!r}") from error


def check_fields(row: Any, least: Mapping[str, int] | None = None, within: str = "") -> None:
    """Looks at a dataclass made of a file, and at those in it: what their annotations say is there.

    Args:
        least: of the numbers in fields of these names; of others it is 0.
        within: where the row is, with a dot behind.

    Raises:
        PlanError: a field holds something else; says which.
    """
    for field in dataclasses.fields(row):
        _check_value(getattr(row, field.name), field.type, f"{within}{field.name}", least or {})


def _check_value(value: Any, kind: Any, at: str, least: Mapping[str, int]) -> None:
    """Other kinds than these are looked at by the classes that have them."""
    origin, of = get_origin(kind), get_args(kind)
    if of[1:] == (NoneType,):
        if value is not None:
            _check_value(value, of[0], at, least)
    elif origin is tuple:
        for number, item in enumerate(value):
            _check_value(item, of[0], f"{at}[{number}]", least)
    elif origin is Mapping:
        if not isinstance(value, Mapping):
            raise PlanError(f"{at} is {value!r}: expected names, with a value for each")
        for name, item in cast("Mapping[str, Any]", value).items():
            _check_value(item, of[1], f"{at}[{name!r}]", least)
    elif dataclasses.is_dataclass(kind):
        check_fields(value, least, f"{at}.")
    elif kind in _EXPECTED:
        lower = least.get(at.rpartition(".")[2], 0)
        if not _fits(value, kind, lower):
            raise PlanError(f"{at} is {value!r}: expected {_EXPECTED[kind].format(least=lower)}")


def _fits(value: Any, kind: Any, least: int) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return is_number and least <= value < _MOST
