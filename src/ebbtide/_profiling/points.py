"""Bytes and seconds of compiled regions at other activation memory budgets, from measured steps. Pure.

Note [Points of compiled regions]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. Alike regions are measured at different budgets in the same steps: 16 blocks need one round of steps for five
   budgets. In a kind with fewer regions than budgets, budgets change from round to round.
2. Some regions of each round run as compiled by the user: clocks of a device rise and fall from step to step, and the
   ratio of such regions to the first round corrects the rest.
3. In a round every region recomputes, for the smallest memory. Saved tensors and backward are the same without
   recomputation.
"""

import dataclasses
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from ebbtide._profiling.profile import Profile, RegionProfile

Budgets: TypeAlias = Mapping[str, float | None]
"""Activation memory budgets by region; None: as the user compiled the region."""


def rounds_of(profile: Profile, classes: Mapping[str, Hashable], budgets: Sequence[float]) -> list[Budgets]:
    """Budgets for the regions in `classes`, round by round: each kind is measured at each of `budgets`.

    Args:
        classes: compiled regions, by name, with the class of the module.
    """
    kinds: dict[Hashable, list[str]] = {}
    for region in profile.regions:
        names = kinds.setdefault(_kind(region, classes.get(region.name)), [])
        if region.name in classes and region.name not in names:
            names.append(region.name)
    row = (None, *budgets)
    groups = [names for names in kinds.values() if names]
    count = max((-(-len(row) // len(names)) for names in groups), default=0)
    rounds = [
        {name: row[(k + step * len(names)) % len(row)] for names in groups for k, name in enumerate(names)}
        for step in range(count)
    ]
    return [budgets for budgets in rounds if any(budget is not None for budget in budgets.values())]


def with_points(
    profile: Profile, classes: Mapping[str, Hashable], measured: Sequence[tuple[Budgets, Profile]]
) -> Profile:
    """`profile` with the points of its compiled regions.

    Args:
        measured: the budgets of each round, and the profile measured. A profile of other regions is ignored.
    """
    names = [region.name for region in profile.regions]
    found: dict[tuple[Hashable, float], list[tuple[int, RegionProfile, float]]] = {}
    for budgets, other in measured:
        if [region.name for region in other.regions] != names:
            continue
        speed = _speed(profile, other, budgets)
        for number, (own, region) in enumerate(zip(profile.regions, other.regions, strict=True)):
            budget = budgets.get(own.name)
            if budget is not None and own.name in classes and region.recompute_s > 0:
                key = _kind(own, classes[own.name]), budget
                found.setdefault(key, []).append((number, region, _seconds(region) / speed - _seconds(own)))
    regions = tuple(
        dataclasses.replace(
            own,
            points=tuple(
                _point(number, own, budget, places)
                for (kind, budget), places in found.items()
                if own.name in classes and kind == _kind(own, classes[own.name])
            ),
        )
        for number, own in enumerate(profile.regions)
    )
    return dataclasses.replace(profile, regions=regions)


def _point(
    number: int, own: RegionProfile, budget: float, places: Sequence[tuple[int, RegionProfile, float]]
) -> RegionProfile:
    """The point of the nearest region of the kind, with the typical seconds of all."""
    _, nearest, _ = min(places, key=lambda place: abs(place[0] - number))
    common = dict(zip(_common(nearest), _common(own), strict=False))
    saved = (dataclasses.replace(each, common=common.get(each.common, 0)) for each in nearest.saved_tensors)
    return dataclasses.replace(
        nearest,
        name=own.name,
        saved_tensors=tuple(saved),
        forward_s=own.forward_s,
        backward_s=own.backward_s,
        recompute_s=own.recompute_s,
        inputs=own.inputs,
        grad_bytes=own.grad_bytes,
        after_bytes=own.after_bytes,
        activation_memory_budget=budget,
        partition_s=max(0.0, statistics.median(seconds for _, _, seconds in places)),
    )


def _common(region: RegionProfile) -> list[int]:
    """Numbers of memory that other regions save too: of the region's inputs, and of outputs that the region saves."""
    return list(dict.fromkeys(each.common for each in (*region.inputs, *region.saved_tensors) if each.common))


def _kind(region: RegionProfile, cls: Hashable) -> Hashable:
    """Equal for regions of one class that save tensors of equal sizes."""
    return cls, region.not_movable_bytes, tuple((tensor.index, tensor.nbytes) for tensor in region.saved_tensors)


def _seconds(region: RegionProfile) -> float:
    return region.forward_s + region.backward_s


def _speed(profile: Profile, other: Profile, budgets: Budgets) -> float:
    """Seconds of `other` over seconds of `profile`, by the regions without a budget in both; 1 without any."""
    pairs = zip(profile.regions, other.regions, strict=True)
    alike = [(_seconds(own), _seconds(theirs)) for own, theirs in pairs if budgets.get(own.name) is None]
    ratios = [theirs_s / own_s for own_s, theirs_s in alike if own_s > 0 and theirs_s > 0]
    return statistics.median(ratios) if ratios else 1.0
