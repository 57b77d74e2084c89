"""Regions that must, or may as well, be treated alike. Pure.

Note [Units and groups]
~~~~~~~~~~~~~~~~~~~~~~~
1. A unit is all visits of regions of one name: a plan goes by name, so they get one recipe.
2. A group is units that are made alike (the layers of a transformer). A solver that tells them apart searches through
   plans that differ by nothing: it says how many of a group get an option, and they are spread over the depth after.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import fmean

from ebbtide._planner.options import Option, option_for, options_of
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Profile, RegionProfile

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

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Per recipe, of all visits."""
        return tuple(sum(option.kept_bytes for option in options) for options in self.costs)

    @cached_property
    def moved_bytes(self) -> tuple[int, ...]:
        """Per recipe, of all visits."""
        return tuple(sum(option.moved_bytes for option in options) for options in self.costs)

    @cached_property
    def by_moved_bytes(self) -> tuple[int, ...]:
        """The choices, those that move the least first."""
        return tuple(sorted(range(len(self.recipes)), key=lambda k: (self.moved_bytes[k], self.kept_bytes[k])))

    @cached_property
    def again_s(self) -> tuple[float, ...]:
        """Per recipe, of all visits."""
        return tuple(sum(option.again_s for option in options) for options in self.costs)


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
        self.only_moves = only_moves
        visits = _visits(profile)
        self.groups = tuple(Group(tuple(group)) for group in _grouped(profile, list(visits.values())))
        recipes = {name: _recipes(profile.regions, numbers, only_moves) for name, numbers in self._few(visits).items()}
        self.assignments = prod(map(len, recipes.values())) if len(recipes) == len(visits) else MOST_ASSIGNMENTS + 1
        if self.assignments > MOST_ASSIGNMENTS:
            recipes = self._shared_recipes(visits)
        self.units = tuple(_unit(profile, name, numbers, recipes[name]) for name, numbers in visits.items())
        self._is_visited_once = len(self.units) == len(profile.regions)

    def options(self, choices: Sequence[int]) -> tuple[Option, ...]:
        """An option for every region, from a choice for every unit."""
        if self._is_visited_once:
            return tuple(unit.costs[choice][0] for unit, choice in zip(self.units, choices, strict=True))
        spread: list[tuple[int, Option]] = []
        for unit, choice in zip(self.units, choices, strict=True):
            spread += zip(unit.visits, unit.costs[choice], strict=True)
        return tuple(option for _, option in sorted(spread, key=lambda pair: pair[0]))

    def _few(self, visits: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """None of them if already two recipes each were more ways to choose than can be tried."""
        return visits if 2 ** len(visits) <= MOST_ASSIGNMENTS else {}

    def _shared_recipes(self, visits: dict[str, tuple[int, ...]]) -> dict[str, tuple[Recipe, ...]]:
        """Which of two equal outputs is dearer is noise, and must not make each unit of a group another case."""
        names, shared = list(visits), dict[str, tuple[Recipe, ...]]()
        for group in self.groups:
            regions = _mean_regions(self.profile.regions, [visits[names[number]] for number in group.units])
            recipes = _recipes(regions, range(len(regions)), self.only_moves)
            shared.update({names[number]: recipes for number in group.units})
        return shared


def _visits(profile: Profile) -> dict[str, tuple[int, ...]]:
    names: dict[str, list[int]] = {}
    for number, region in enumerate(profile.regions):
        names.setdefault(region.name, []).append(number)
    return {name: tuple(numbers) for name, numbers in names.items()}


def _grouped(profile: Profile, visits: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Numbers of units that are alike."""
    found: list[list[int]] = []
    for number, own in enumerate(visits):
        group = next((group for group in found if _units_alike(profile.regions, visits[group[0]], own)), None)
        if group is None:
            found.append([number])
        else:
            group.append(number)
    return found


def _units_alike(regions: Sequence[RegionProfile], one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(_alike(regions[a], regions[b]) for a, b in zip(one, other, strict=True))


def _unit(profile: Profile, name: str, visits: tuple[int, ...], recipes: tuple[Recipe, ...]) -> Unit:
    costs = tuple(tuple(option_for(profile.regions[visit], recipe) for visit in visits) for recipe in recipes)
    return Unit(name, visits, recipes, costs)


def _recipes(regions: Sequence[RegionProfile], visits: Sequence[int], only_moves: bool) -> tuple[Recipe, ...]:
    """What is worth considering at any of the visits and possible at all of them."""
    may_run_again = all(regions[visit].again_s > 0 for visit in visits)
    found = dict.fromkeys(option.recipe for visit in visits for option in options_of(regions[visit], only_moves))
    return tuple(recipe for recipe in found if may_run_again or not recipe.recomputes)


def _mean_regions(regions: Sequence[RegionProfile], visits: Sequence[tuple[int, ...]]) -> list[RegionProfile]:
    """Per visit: the first unit's region, with its dear outputs as dear as the mean of all."""
    return [_mean_region([regions[numbers[place]] for numbers in visits]) for place in range(len(visits[0]))]


def _mean_region(alike: Sequence[RegionProfile]) -> RegionProfile:
    rows = zip(*(region.dear for region in alike), strict=True)
    dear = tuple(
        replace(row[0], again_s=fmean(d.again_s for d in row), led_s=fmean(d.led_s for d in row)) for row in rows
    )
    return replace(alike[0], dear=dear)


def _alike(one: RegionProfile, other: RegionProfile) -> bool:
    times = ((one.forward_s, other.forward_s), (one.backward_s, other.backward_s), (one.again_s, other.again_s))
    return (
        _shape(one) == _shape(other)
        and all(_near(a, b, _ALIKE_BYTES) for a, b in zip(_sizes(one), _sizes(other), strict=True))
        and all(_near(a, b, _ALIKE_SECONDS) for a, b in times)
    )


def _shape(region: RegionProfile) -> tuple[object, ...]:
    dear = tuple((row.index, row.op, row.led, row.users) for row in region.dear)
    saves, inputs = (tuple((row.index, row.shares) for row in rows) for rows in (region.saves, region.inputs))
    return saves, inputs, dear


def _sizes(region: RegionProfile) -> list[int]:
    rows = [*region.saves, *region.inputs, *region.dear]
    work = [region.forward_work_bytes, region.backward_work_bytes, region.grad_bytes]
    return [region.stuck_bytes, region.behind_bytes, *work, *(row.nbytes for row in rows)]


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(abs(a), abs(b))
