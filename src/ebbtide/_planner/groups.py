"""Groups of regions that get the same recipe, by necessity or to shorten the search. Pure.

Note [Units and groups]
~~~~~~~~~~~~~~~~~~~~~~~
1. A unit is all region calls of one name: plans have one recipe per name.
2. A group is a set of units of the same build (the layers of a transformer). A search that tells such units apart tries
   plans without a difference. So the search counts how many units of a group get a recipe, and spreads the recipes over
   the depth afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import fmean

from ebbtide._planner.options import Option, option_for, options_of
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Profile, RegionProfile

MAX_ASSIGNMENTS = 4096
"""Up to so many assignments, the search tries all."""

_ALIKE_BYTES = 0.02
_ALIKE_SECONDS = 0.2  # equal work, measured once


@dataclass(frozen=True)
class Unit:
    """The calls of one region.

    Attributes:
        name: of the region.
        calls: numbers of the calls in `Profile.regions`.
        recipes: recipes to choose from; the first keeps everything.
        costs: per recipe, an option for each call.
    """

    name: str
    calls: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    costs: tuple[tuple[Option, ...], ...]

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Per recipe, the sum of all calls."""
        return tuple(sum(option.kept_bytes for option in options) for options in self.costs)

    @cached_property
    def moved_bytes(self) -> tuple[int, ...]:
        """Per recipe, the sum of all calls."""
        return tuple(sum(option.moved_bytes for option in options) for options in self.costs)

    @cached_property
    def by_moved_bytes(self) -> tuple[int, ...]:
        """Indices of recipes, in order of bytes moved."""
        return tuple(sorted(range(len(self.recipes)), key=lambda k: (self.moved_bytes[k], self.kept_bytes[k])))

    @cached_property
    def recompute_s(self) -> tuple[float, ...]:
        """Per recipe, the sum of all calls."""
        return tuple(sum(option.recompute_s for option in options) for options in self.costs)


@dataclass(frozen=True)
class Group:
    """Numbers of units with the same recipes at about the same costs; the first unit represents all."""

    units: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.units[0]


class Grouping:
    """The units and groups of a profile, with their recipes.

    Attributes:
        profile: the step.
        only_moves: whether recipes that recompute are left out.
        units: in order of the first call.
        groups: of units.
        assignment_count: number of ways to give each unit a recipe; MAX_ASSIGNMENTS + 1 stands for more.
    """

    def __init__(self, profile: Profile, only_moves: bool) -> None:
        self.profile = profile
        self.only_moves = only_moves
        calls = _calls(profile)
        self.groups = tuple(Group(tuple(group)) for group in _grouped(profile, list(calls.values())))
        recipes = {name: _recipes(profile.regions, numbers, only_moves) for name, numbers in self._few(calls).items()}
        self.assignment_count = prod(map(len, recipes.values())) if len(recipes) == len(calls) else MAX_ASSIGNMENTS + 1
        if self.assignment_count > MAX_ASSIGNMENTS:
            recipes = self._shared_recipes(calls)
        self.units = tuple(_unit(profile, name, numbers, recipes[name]) for name, numbers in calls.items())
        self._is_called_once = len(self.units) == len(profile.regions)

    def options(self, choices: Sequence[int]) -> tuple[Option, ...]:
        """An option for every region, from the index of a recipe for every unit."""
        if self._is_called_once:
            return tuple(unit.costs[choice][0] for unit, choice in zip(self.units, choices, strict=True))
        spread: list[tuple[int, Option]] = []
        for unit, choice in zip(self.units, choices, strict=True):
            spread += zip(unit.calls, unit.costs[choice], strict=True)
        return tuple(option for _, option in sorted(spread, key=lambda pair: pair[0]))

    def _few(self, calls: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Nothing if even two recipes per unit give too many assignments."""
        return calls if 2 ** len(calls) <= MAX_ASSIGNMENTS else {}

    def _shared_recipes(self, calls: dict[str, tuple[int, ...]]) -> dict[str, tuple[Recipe, ...]]:
        """One list of recipes per group: noise in the times of equal calls must not make units differ."""
        names, shared = list(calls), dict[str, tuple[Recipe, ...]]()
        for group in self.groups:
            regions = _mean_regions(self.profile.regions, [calls[names[number]] for number in group.units])
            recipes = _recipes(regions, range(len(regions)), self.only_moves)
            shared.update({names[number]: recipes for number in group.units})
        return shared


def _calls(profile: Profile) -> dict[str, tuple[int, ...]]:
    names: dict[str, list[int]] = {}
    for number, region in enumerate(profile.regions):
        names.setdefault(region.name, []).append(number)
    return {name: tuple(numbers) for name, numbers in names.items()}


def _grouped(profile: Profile, calls: Sequence[tuple[int, ...]]) -> list[list[int]]:
    found: list[list[int]] = []
    for number, own in enumerate(calls):
        group = next((group for group in found if _units_alike(profile.regions, calls[group[0]], own)), None)
        if group is None:
            found.append([number])
        else:
            group.append(number)
    return found


def _units_alike(regions: Sequence[RegionProfile], one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(_alike(regions[a], regions[b]) for a, b in zip(one, other, strict=True))


def _unit(profile: Profile, name: str, calls: tuple[int, ...], recipes: tuple[Recipe, ...]) -> Unit:
    costs = tuple(tuple(option_for(profile.regions[call], recipe) for call in calls) for recipe in recipes)
    return Unit(name, calls, recipes, costs)


def _recipes(regions: Sequence[RegionProfile], calls: Sequence[int], only_moves: bool) -> tuple[Recipe, ...]:
    """Recipes worth considering at any of the calls, and possible at all calls."""
    may_recompute = all(regions[call].recompute_s > 0 for call in calls)
    found = dict.fromkeys(option.recipe for call in calls for option in options_of(regions[call], only_moves))
    return tuple(recipe for recipe in found if may_recompute or not recipe.recomputes)


def _mean_regions(regions: Sequence[RegionProfile], calls: Sequence[tuple[int, ...]]) -> list[RegionProfile]:
    """Per call: the first unit's region, with the mean times of all units' expensive calls."""
    return [_mean_region([regions[numbers[place]] for numbers in calls]) for place in range(len(calls[0]))]


def _mean_region(alike: Sequence[RegionProfile]) -> RegionProfile:
    rows = zip(*(region.expensive_ops for region in alike), strict=True)
    ops = tuple(
        replace(row[0], recompute_s=fmean(d.recompute_s for d in row), downstream_s=fmean(d.downstream_s for d in row))
        for row in rows
    )
    return replace(alike[0], expensive_ops=ops)


def _alike(one: RegionProfile, other: RegionProfile) -> bool:
    times = ((one.forward_s, other.forward_s), (one.backward_s, other.backward_s), (one.recompute_s, other.recompute_s))
    return (
        _shape(one) == _shape(other)
        and all(_near(a, b, _ALIKE_BYTES) for a, b in zip(_sizes(one), _sizes(other), strict=True))
        and all(_near(a, b, _ALIKE_SECONDS) for a, b in times)
    )


def _shape(region: RegionProfile) -> tuple[object, ...]:
    ops = tuple((row.index, row.op, row.downstream, row.users) for row in region.expensive_ops)
    tensors, inputs = (
        tuple((row.index, row.shares, row.derive_s > 0) for row in rows)
        for rows in (region.saved_tensors, region.inputs)
    )
    return tensors, inputs, ops


def _sizes(region: RegionProfile) -> list[int]:
    rows = [*region.saved_tensors, *region.inputs, *region.expensive_ops]
    work = [region.forward_work_bytes, region.backward_work_bytes, region.grad_bytes]
    return [region.not_movable_bytes, region.after_bytes, *work, *(row.nbytes for row in rows)]


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(abs(a), abs(b))
