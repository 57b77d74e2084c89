"""The profile of a batch size that was not measured, from profiles of the same model at other sizes. Pure.

Note [Profiles of other batch sizes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Bytes and seconds of a region have a fixed part (tables, masks, weights cast by an operator, the start of a kernel)
   and a part in proportion to the batch. One profile does not tell the parts apart: `Profile.scaled` takes activations
   and seconds of the device as proportional, and memory from before the step, gradients and the host's time as fixed.
2. Two profiles do: every number is on the line through the two nearest measurements.
3. Beyond the measured sizes no number shrinks as the batch grows, or grows faster than the batch: the difference of two
   close measurements is mostly noise, which must not be carried far.
4. A region that saves other tensors at one size than at the other (a tensor passes `min_bytes`, another kernel is
   chosen) has no line. The nearest profile counts, as under 1.
5. Launches do not depend on the batch: the host's time is that of the nearest profile.
"""

import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from ebbtide._errors import PlanError
from ebbtide._profiling.profile import Profile, changed

Row = TypeVar("Row")

_POSITIVE = ("nbytes", "common", "recompute_s", "recompute_work_bytes", "moved_work_bytes", "derive_s")
"""Fields with another meaning at 0: shared memory, or not measured."""


def at_tokens(profiles: Sequence[Profile], tokens: int) -> Profile:
    """The step of a batch with `tokens` elements. `profiles`: in ascending order of tokens, and `check_comparable`."""
    if len(profiles) == 1:
        return profiles[0].scaled(tokens)
    sizes = [profile.tokens for profile in profiles]
    above = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
    low, high = profiles[above - 1], profiles[above]
    near = low if 2 * tokens <= low.tokens + high.tokens else high
    line, scaled = _Line(low.tokens, high.tokens, tokens), near.scaled(tokens)
    rows = zip(low.regions, high.regions, scaled.regions, strict=True)
    base = {name: max(profile.base.get(name, 0) for profile in profiles) for name in near.base}
    base["other"] = line.through("bytes", low.base.get("other", 0), high.base.get("other", 0))
    return dataclasses.replace(
        scaled,
        regions=tuple(line.row(*each) for each in rows),
        outside=line.row(low.outside, high.outside, scaled.outside),
        base=base,
        base_bytes=sum(base.values()),
    )


def check_comparable(profiles: Sequence[Profile]) -> None:
    """Raise PlanError unless the profiles differ in the batch size alone."""
    for one, other in pairwise(profiles):
        found = [f"made for {difference}" for difference in other.what_differs(one.made_for)]
        if [region.name for region in one.regions] != [region.name for region in other.regions]:
            found.append("of other regions")
        if one.order != other.order:
            found.append("of another order of forwards and backwards")
        kinds = one.base.keys() | other.base.keys()
        found += [
            f"measured with {name} in memory, the other without: measure both at the same point of a training"
            for name in sorted(kinds - {"other"})
            if (one.base.get(name, 0) > 0) != (other.base.get(name, 0) > 0)
        ]
        if found:
            raise PlanError(f"the profiles are not of one model in batches of two sizes: one is {'; '.join(found)}")


def unlike(profiles: Sequence[Profile]) -> list[str]:
    """Names of the parts of the step that have no line between some two profiles."""
    found: list[str] = []
    for one, other in pairwise(profiles):
        pairs = zip(one.regions, other.regions, strict=True)
        found += [region.name for region, another in pairs if not _are_alike(region, another)]
        found += [] if _are_alike(one.outside, other.outside) else ["the part outside of the regions"]
    return list(dict.fromkeys(found))


class _Line(NamedTuple):
    """Through measurements at `low` and `high` tokens, to `tokens`."""

    low: int
    high: int
    tokens: int

    def row(self, low: Row, high: Row, otherwise: Row) -> Row:
        """A row of measurements on the line; `otherwise` for rows of another build."""
        if not _are_alike(low, high):
            return otherwise
        values = deque[Any]()
        changed(high, lambda _, value: values.append(value))
        return changed(low, lambda name, value: self.through(name, value, values.popleft()))

    def through(self, name: str, low: Any, high: Any) -> Any:
        if not _is_measured(name):
            return low
        slope, value, at = (high - low) / (self.high - self.low), low, self.low
        if not self.low <= self.tokens <= self.high:
            value, at = (low, self.low) if self.tokens < self.low else (high, self.high)
            slope = min(max(slope, 0.0), value / at)
        value += slope * (self.tokens - at)
        return max(int(min(low, high) > 0), round(value)) if name.endswith("bytes") else max(0.0, value)


def _is_measured(name: str) -> bool:
    return name.endswith(("_s", "bytes"))


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two rows differ in their measurements alone."""
    return _build(one) == _build(other)


def _build(row: Any) -> Any:
    return changed(row, lambda n, v: v > 0 if n in _POSITIVE else None if _is_measured(n) else v)
