"""Regions that must, or may as well, be treated alike. Pure.

Note [Units and groups]
~~~~~~~~~~~~~~~~~~~~~~~
1. A unit is all visits of regions of one name: a plan goes by name, so they get one recipe.
2. A group is units that are made alike (the layers of a transformer). A solver that tells them apart searches through
   plans that differ by nothing: it says how many of a group get an option, and they are spread over the depth after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ebbtide.plan import Recipe
from ebbtide.planner.options import Option, option_for, options_of
from ebbtide.planner.profile import Profile, RegionProfile

MOST_ASSIGNMENTS = 4096
"""As long as there are no more, all are tried."""

_ALIKE_BYTES = 0.02
_ALIKE_SECONDS = 0.2  # equal work, measured once


@dataclass(frozen=True)
class Unit:
    """The visits of one region.

    Attributes:
        name: of the region.
        visits: numbers of its regions in the profile.
        recipes: what may be done with it; the first keeps everything.
        costs: per recipe, the option that it means at each visit.
    """

    name: str
    visits: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    costs: tuple[tuple[Option, ...], ...]

    def kept_bytes(self, choice: int) -> int:
        return sum(option.kept_bytes for option in self.costs[choice])

    def moved_bytes(self, choice: int) -> int:
        return sum(option.moved_bytes for option in self.costs[choice])

    def again_s(self, choice: int) -> float:
        return sum(option.again_s for option in self.costs[choice])


@dataclass(frozen=True)
class Group:
    """Units, by number, that have the same recipes at about the same costs: those of the first stand for all."""

    units: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.units[0]


class Model:
    """A profile's units and groups, and what may be chosen.

    Attributes:
        profile: the step.
        units: in order of their first visit.
        groups: of those.
        assignments: how many ways there are to choose.
    """

    def __init__(self, profile: Profile, only_moves: bool) -> None:
        self.profile = profile
        self.units = tuple(
            _unit(profile, name, visits, _recipes(profile.regions, visits, only_moves))
            for name, visits in _visits(profile)
        )
        self.groups = tuple(Group(tuple(group)) for group in self._grouped())
        self.assignments = prod(len(unit.recipes) for unit in self.units)
        if self.assignments > MOST_ASSIGNMENTS:
            self._share_recipes(only_moves)

    def options(self, choices: Sequence[int]) -> tuple[Option, ...]:
        """An option for every region, from a choice for every unit."""
        spread: list[tuple[int, Option]] = []
        for unit, choice in zip(self.units, choices, strict=True):
            spread += zip(unit.visits, unit.costs[choice], strict=True)
        return tuple(option for _, option in sorted(spread, key=lambda pair: pair[0]))

    def _grouped(self) -> list[list[int]]:
        found: list[list[int]] = []
        for number, unit in enumerate(self.units):
            group = next((group for group in found if self._are_alike(self.units[group[0]], unit)), None)
            if group is None:
                found.append([number])
            else:
                group.append(number)
        return found

    def _are_alike(self, one: Unit, other: Unit) -> bool:
        regions = self.profile.regions
        pairs = zip(one.visits, other.visits, strict=False)
        return len(one.visits) == len(other.visits) and all(_alike(regions[a], regions[b]) for a, b in pairs)

    def _share_recipes(self, only_moves: bool) -> None:
        """Which of two equal outputs is dearer is noise, and must not make each unit of a group another case."""
        units = list(self.units)
        for group in self.groups:
            regions = _mean_regions(self.profile.regions, [self.units[number].visits for number in group.units])
            recipes = _recipes(regions, range(len(regions)), only_moves)
            for number in group.units:
                units[number] = _unit(self.profile, units[number].name, units[number].visits, recipes)
        self.units = tuple(units)


def _visits(profile: Profile) -> list[tuple[str, tuple[int, ...]]]:
    names: dict[str, list[int]] = {}
    for number, region in enumerate(profile.regions):
        names.setdefault(region.name, []).append(number)
    return [(name, tuple(visits)) for name, visits in names.items()]


def _unit(profile: Profile, name: str, visits: tuple[int, ...], recipes: tuple[Recipe, ...]) -> Unit:
    costs = tuple(tuple(option_for(profile.regions[visit], recipe) for visit in visits) for recipe in recipes)
    return Unit(name, visits, recipes, costs)


def _recipes(regions: Sequence[RegionProfile], visits: Sequence[int], only_moves: bool) -> tuple[Recipe, ...]:
    """What is worth considering at any of the visits and possible at all of them."""
    may_run_again = all(regions[visit].again_s > 0 for visit in visits)
    found = dict.fromkeys(option.recipe for visit in visits for option in options_of(regions[visit], only_moves))
    return tuple(recipe for recipe in found if may_run_again or not recipe.runs_again)


def _mean_regions(regions: Sequence[RegionProfile], visits: Sequence[tuple[int, ...]]) -> list[RegionProfile]:
    """Per visit: the first unit's region, with its dear outputs as dear as the mean of all."""
    return [_mean_region([regions[numbers[place]] for numbers in visits]) for place in range(len(visits[0]))]


def _mean_region(alike: Sequence[RegionProfile]) -> RegionProfile:
    rows = zip(*(region.dear for region in alike), strict=True)
    dear = tuple(replace(row[0], again_s=sum(output.again_s for output in row) / len(row)) for row in rows)
    return replace(alike[0], dear=dear)


def _alike(one: RegionProfile, other: RegionProfile) -> bool:
    times = ((one.forward_s, other.forward_s), (one.backward_s, other.backward_s), (one.again_s, other.again_s))
    return (
        _shape(one) == _shape(other)
        and all(_near(a, b, _ALIKE_BYTES) for a, b in zip(_sizes(one), _sizes(other), strict=True))
        and all(_near(a, b, _ALIKE_SECONDS) for a, b in times)
    )


def _shape(region: RegionProfile) -> tuple[object, ...]:
    dear = tuple((row.index, row.op) for row in region.dear)
    return tuple(save.index for save in region.saves), len(region.inputs), dear


def _sizes(region: RegionProfile) -> list[int]:
    rows = [*region.saves, *region.inputs, *region.dear]
    work = [region.forward_work_bytes, region.backward_work_bytes, region.grad_bytes]
    return [region.stuck_bytes, *work, *(row.nbytes for row in rows)]


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(abs(a), abs(b))
