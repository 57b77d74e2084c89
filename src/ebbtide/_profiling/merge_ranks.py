"""One profile for all ranks of a job, so that all ranks follow one plan. Pure.

As a rule, profiles of ranks differ in their numbers alone: equal structures merge by one reduction of the numbers
(`merged_by`), with the result that `slowest` has for whole profiles.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from ebbtide._errors import PlanError
from ebbtide._profiling.profile import (
    ExpensiveOp,
    Host,
    Outside,
    PostRegionPoint,
    Profile,
    RegionProfile,
    SavedTensor,
    changed,
)

Row = TypeVar("Row")

_SMALLEST = ("out", "back", "host_limit_bytes", "device_bytes", "launch_ahead_s")
_ALIKE = (
    "passes", "index", "tensor_index", "read_at", "downstream", "users", "derived_from", "derive_ops",
    "activation_memory_budget",
)  # fmt: skip
_MEASURED = ("recompute_s", "recompute_work_bytes", "moved_work_bytes", "derive_s")  # 0: not measured


def structure_of(profile: Profile) -> tuple[int, int]:
    """A digest of the profile without its numbers; `merged_by` merges profiles with equal digests."""

    parts: list[Any] = [list(profile.base)]

    def add(name: str, value: Any) -> Any:
        if not _is_number(name, value):
            parts.append(value if name != "base" else None)
        else:
            parts.append(value > 0 if name in _MEASURED else type(value).__name__)
        return value

    changed(profile, add)
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big"), int.from_bytes(digest[6:12], "big")


def merged_by(largest: Callable[[Sequence[float]], Sequence[float]], own: Profile, base_bytes: int) -> Profile:
    """`slowest` of the profiles of all ranks, if their structures are equal.

    Args:
        largest: returns the largest of each number over all ranks.
        own: profile of this rank.
        base_bytes: largest of all ranks, known beforehand: ranks with fewer bytes name no parts.
    """
    numbers = [float(value) if own.base_bytes == base_bytes else -inf for value in own.base.values()]

    def add(name: str, value: Any) -> Any:
        if _is_number(name, value):
            numbers.append(-value if name in _SMALLEST else value)
        return value

    regions = tuple(dataclasses.replace(r, backward_work_bytes=_short_lived_bytes(r)) for r in own.regions)
    short_lived = changed(dataclasses.replace(own, regions=regions), add)
    found = iter(largest(numbers))
    base = {name: int(next(found)) for name in own.base}

    def merged(name: str, value: Any) -> Any:
        return type(value)(next(found) * (-1 if name in _SMALLEST else 1)) if _is_number(name, value) else value

    profile: Profile = changed(short_lived, merged)
    regions = tuple(_with_backward_work(region, region.backward_work_bytes) for region in profile.regions)
    return dataclasses.replace(profile, base=base, regions=regions)


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and name not in _ALIKE


def slowest(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles of the same regions: a plan that fits the result fits every rank, and slows no rank further.

    Bytes and seconds are the largest of all ranks; rates of the link, host memory and device memory the smallest.
    Saved tensors, inputs and expensive calls are matched by index. A row of a single rank counts. Memory shared on any
    rank counts as shared, and a tensor movable on any rank as movable. Points after the last region count if common to
    all ranks: elsewhere some rank could not release. `tokens` are from the largest batch, as the figures are. `base` is
    from the rank with the most memory before the step, `made_for` from the first rank, the keeper of the file.

    Raises:
        PlanError: the profiles have different regions.
    """
    first = profiles[0]
    for other in profiles[1:]:
        if [region.name for region in other.regions] != [region.name for region in first.regions]:
            raise PlanError(
                "ranks have different regions: name those that train the same module with process_group=, or give each "
                "rank its own plan=, or the recipes by hand"
            )
    fullest = max(profiles, key=lambda profile: profile.base_bytes)
    links = [p.link for p in profiles]
    return dataclasses.replace(
        fullest,
        made_for=first.made_for,
        regions=tuple(map(_slowest_region, zip(*(p.regions for p in profiles), strict=True))),
        outside=_slowest_outside([p.outside for p in profiles]),
        link=dataclasses.replace(_largest(links), out=min(x.out for x in links), back=min(x.back for x in links)),
        host_limit_bytes=_least(p.host_limit_bytes for p in profiles),
        tokens=max(p.tokens for p in profiles),
        device_bytes=_least(p.device_bytes for p in profiles),
        graphs=max(p.graphs for p in profiles),
        passes=first.passes if len({p.passes for p in profiles}) == 1 else (),
        host=_slowest_host([p.host for p in profiles if p.host is not None]),
    )


def _slowest_region(regions: Sequence[RegionProfile]) -> RegionProfile:
    merged = dataclasses.replace(
        _largest(regions),
        saved_tensors=_merged(_derivable_everywhere(regions), "index"),
        inputs=_merged((tensor for region in regions for tensor in region.inputs), "index"),
        expensive_ops=_merged((op for region in regions for op in _agreed(region, regions)), "index"),
        points=tuple(_slowest_region([region.at(b) for region in regions]) for b in _common_points(regions)),
    )
    for name in ("recompute_s", "recompute_work_bytes", "moved_work_bytes"):
        if not all(getattr(region, name) > 0 for region in regions):
            merged = dataclasses.replace(merged, **{name: type(getattr(merged, name))(0)})
    if len({tuple((tensor.index, tensor.read_at) for tensor in region.saved_tensors) for region in regions}) > 1:
        unread = (dataclasses.replace(tensor, read_at=0, read_bytes=0) for tensor in merged.saved_tensors)
        merged = dataclasses.replace(merged, saved_tensors=tuple(unread))
    return _with_backward_work(merged, max(map(_short_lived_bytes, regions)))


def _common_points(regions: Sequence[RegionProfile]) -> list[float | None]:
    """Activation memory budgets that every rank has measured."""
    return [budget for budget in regions[0].budgets if all(budget in region.budgets for region in regions)]


def _derivable_everywhere(regions: Sequence[RegionProfile]) -> Iterator[SavedTensor]:
    """The saved tensors of all ranks. A tensor that some rank cannot derive is derived by none."""
    kept = {tensor.index for region in regions for tensor in region.saved_tensors if tensor.derive_s == 0.0}
    for tensor in (tensor for region in regions for tensor in region.saved_tensors):
        yield dataclasses.replace(tensor, derive_s=0.0, derive_ops=0) if tensor.index in kept else tensor


def _short_lived_bytes(region: RegionProfile) -> int:
    """Memory of one rank that must not vanish under saved tensors of another rank; negative if the peak comes late."""
    return region.backward_work_bytes - region.saved_bytes + region.unused_bytes


def _with_backward_work(region: RegionProfile, short_lived_bytes: int) -> RegionProfile:
    nbytes = region.saved_bytes - region.unused_bytes + short_lived_bytes
    return dataclasses.replace(region, backward_work_bytes=nbytes)


def _agreed(own: RegionProfile, regions: Sequence[RegionProfile]) -> Iterator[ExpensiveOp]:
    """Downstream tensors of a call count only if equal on all ranks with the call."""
    for op in own.expensive_ops:
        alike = (other for region in regions for other in region.expensive_ops if other.index == op.index)
        is_agreed = all((other.downstream, other.users) == (op.downstream, op.users) for other in alike)
        yield op if is_agreed else dataclasses.replace(op, downstream=(), downstream_s=0.0, downstream_ops=0, users=())


def _slowest_outside(parts: Sequence[Outside]) -> Outside:
    common = set[int].intersection(*({p.tensor_index for p in part.post_region_points} for part in parts))
    points = (point for part in parts for point in _at_places(part.post_region_points, common))
    return dataclasses.replace(_largest(parts), post_region_points=_merged(points, "tensor_index"))


def _at_places(points: Iterable[PostRegionPoint], places: Collection[int]) -> Iterator[PostRegionPoint]:
    """All peaks, each at the last of `places` that forward has passed, or at the end of the last region's forward."""
    at = PostRegionPoint(-1, 0.0, 0)
    for point in points:
        if point.tensor_index in places:
            at = point
        yield dataclasses.replace(at, peak_bytes=point.peak_bytes)


def _slowest_host(hosts: Sequence[Host]) -> Host | None:
    """The steady launch-ahead follows from the merged profile, by `with_host`."""
    if not hosts:
        return None
    regions = tuple(map(_largest, zip(*(host.regions for host in hosts), strict=True)))
    ahead_s = min(host.launch_ahead_s for host in hosts)
    return dataclasses.replace(_largest(hosts), regions=regions, launch_ahead_s=ahead_s)


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _merged(rows: Iterable[Row], number: str) -> tuple[Row, ...]:
    """The rows of each value of the field `number` as one row, in ascending order."""
    by_number = attrgetter(number)
    return tuple(_largest(list(alike)) for _, alike in groupby(sorted(rows, key=by_number), by_number))


def _largest(rows: Sequence[Row]) -> Row:
    """The largest of every number; other fields of the first row."""
    first: Any = rows[0]
    values = {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(first)}
    numbers = {name: max(found) for name, found in values.items() if isinstance(found[0], int | float)}
    return dataclasses.replace(first, **numbers)
