"""Dataclasses as JSON files, checked field by field against the types of the fields when a file is read."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from ebbtide._errors import PlanError

Row = TypeVar("Row")

OLD_KEYS: Mapping[str, str | None] = {
    "again_s": "recompute_s",
    "around": "outside",
    "back_duplex": None,
    "behind_bytes": "after_bytes",
    "beyond": "prune",
    "bound_s": None,
    "dear": "expensive_ops",
    "end_s": "backward_after_s",
    "has_dead_saves": "has_dead_tensors",
    "held_s": "saved_output_s",
    "lead_s": "launch_ahead_s",
    "led": "downstream",
    "led_ops": "downstream_ops",
    "led_s": "downstream_s",
    "out_duplex": None,
    "save": "tensor_index",
    "saves": "saved_tensors",
    "steady_lead_s": "steady_launch_ahead_s",
    "stuck_bytes": "not_movable_bytes",
    "turn_s": "backward_before_s",
    "turns": "post_region_points",
    "unasked_bytes": "unused_bytes",
}
"""Field names of plans before format 2 and of profiles before format 5, with the names of today; None: dropped."""

_MOST_BYTES = 256 << 20  # some thousand regions with some thousand saved tensors each

_EXPECTED: Mapping[Any, str] = {
    bool: "true or false",
    str: "text",
    int: "a whole number of at least {least}",
    float: "a finite number of at least {least}",
    list: "a list",
    dict: "names, with a value for each",
}


def write_file(row: Any, path: str | Path, number: int) -> None:
    """Write a dataclass as JSON of the format `number`. A concurrent reader finds the old or the new file, whole."""
    new = Path(f"{path}.{os.getpid()}.new")
    new.write_text(json.dumps({"format": number, **dataclasses.asdict(row)}, indent=1) + "\n")
    new.replace(path)


def read_file(
    kind: type[Row], path: str | Path, name: str, formats: Collection[int], hints: Mapping[str, str]
) -> Row | None:
    """Read a dataclass that `write_file` wrote; None for a format that is not in `formats`.

    Args:
        name: what the file should hold, for messages: "plan".
        hints: by a key that only files of another kind have, the remedy.

    Raises:
        PlanError: the file cannot be read, or holds something else; names the file and the field.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise PlanError(f"the file has more than {_MOST_BYTES >> 20} MiB")
        data = json.loads(text)
        if not isinstance(data, dict) or "format" not in data:
            raise PlanError("a JSON object with a format number was expected")
        found = cast("dict[str, Any]", data)
        for key, hint in hints.items():
            if key in found:
                raise PlanError(hint)
        return from_json(kind, found) if found.pop("format") in formats else None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # of json, a field or a class; too deep
        raise PlanError(f"{path} is not an ebbtide {name} file: {error}") from error


def from_json(kind: Any, data: Any, at: str = "", least: int = 0) -> Any:
    """Make a value of the type `kind` from parsed JSON.

    Types: dataclasses, NamedTuples, tuple[X, ...], Mapping[str, X], Literal, X | None, bool, int, float and str. Of any
    other union the first member counts.

    Args:
        at: path of the value, for messages.
        least: smallest number allowed; a dataclass's field has a "least" in the metadata.

    Raises:
        PlanError: a value does not fit, or a field is missing or unknown.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if data is None and NoneType in args else from_json(args[0], data, at, least)
    if origin is tuple:
        return tuple(from_json(args[0], item, f"{at}[{k}]") for k, item in enumerate(_checked(list, data, at)))
    if origin is Mapping:
        items = _checked(dict, data, at).items()
        return {name: from_json(args[1], item, f"{at}[{name!r}]") for name, item in items}
    if origin is Literal:
        if data not in args:
            raise PlanError(f"{at} is {data!r}: expected one of {', '.join(map(repr, args))}")
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass_from(kind, data, at)
    if hasattr(kind, "_fields"):  # a NamedTuple
        items, types = _checked(list, data, at), get_type_hints(kind)
        if len(items) != len(types):
            raise PlanError(f"{at} is {items!r}: expected {', '.join(types)}")
        return kind(*(from_json(types[name], item, f"{at}.{name}") for name, item in zip(types, items, strict=True)))
    return _checked(kind, data, at, least)


def _dataclass_from(kind: Any, data: Any, at: str) -> Any:
    fields, types = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in _checked(dict, data, at).items():
        name = OLD_KEYS.get(key, key)
        if name is None:
            continue
        if name not in fields:
            raise PlanError(f"{at or 'the file'} has a field {key!r}, which is unknown")
        place = f"{at}.{name}" if at else name
        if name in values:
            raise PlanError(f"{place} is given twice, as {key!r} and under its other name")
        values[name] = from_json(types[name], value, place, fields[name].metadata.get("least", 0))
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise PlanError(f"{at or 'the file'} has no field {name!r}")
    return kind(**values)


def _checked(kind: Any, data: Any, at: str, least: int = 0) -> Any:
    if kind in (int, float):
        is_number = isinstance(data, int if kind is int else int | float) and not isinstance(data, bool)
        fits = is_number and least <= data < 1e100  # far beyond any step, and far below what a float cannot hold
    else:
        fits = isinstance(data, kind)
    if not fits:
        raise PlanError(f"{at or 'the file'} is {data!r}: expected {_EXPECTED[kind].format(least=least)}")
    return data
