"""What several ranks of one job have to agree on before they go by one plan. Pure."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ebbtide._errors import PlanError
from ebbtide.planner.profile import Around, Profile, RegionProfile

Row = TypeVar("Row", RegionProfile, Around)


class Answer(NamedTuple):
    """What a rank has to say before all go by one plan. `profile`: None if it could not make one."""

    profile: Profile | None
    budget_bytes: int | None


Agree = Callable[[Answer], list[Answer]]
"""Gives the answers of all ranks for this rank's one. Every rank has to call it."""


def slowest(profiles: list[Profile]) -> Profile:
    """One profile for all ranks: of every figure the largest. Raises PlanError if they are of different regions."""
    first = profiles[0]
    for other in profiles[1:]:
        if [region.name for region in other.regions] != [region.name for region in first.regions]:
            raise PlanError("ranks have different regions: give each rank its own plan=, or the recipes by hand")
    regions = tuple(_largest([p.regions[k] for p in profiles]) for k in range(len(first.regions)))
    link = dataclasses.replace(
        first.link, **{name: min(getattr(p.link, name) for p in profiles) for name in ("out", "back")}
    )
    return dataclasses.replace(
        first,
        regions=regions,
        around=_largest([p.around for p in profiles]),
        base_bytes=max(p.base_bytes for p in profiles),
        link=link,
    )


def _largest(rows: "list[Row]") -> "Row":
    """Of each number the largest; what is no number, of the first."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if isinstance(values[0], int | float):
            changed[field.name] = max(values)
    return dataclasses.replace(rows[0], **changed)
