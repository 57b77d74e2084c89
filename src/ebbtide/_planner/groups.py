"""Units and groups of regions, and the recipes to choose from. Pure.

Note [Units and groups]
~~~~~~~~~~~~~~~~~~~~~~~
1. A unit is all region calls of one name: plans have one recipe per name.
2. A group is a set of units of the same build (the layers of a transformer), which have one list of recipes. A search
   that tells such units apart tries plans without a difference. So the search counts how many units of a group get a
   recipe, and spreads the recipes over the depth afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

from ebbtide._planner.options import Option, Settled, option_for, options_of, settled
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Recipe
from ebbtide._profiling.profile import Profile, RegionProfile

Choices = tuple[int, ...]
"""Per unit, the index of a recipe."""

CostOf: TypeAlias = Callable[[int, Recipe], Option]
"""The option of a recipe for a call of a region, by the number of the call in the profile."""


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


class Grouping:
    """The units and groups of a profile, with their recipes.

    Attributes:
        profile: the step.
        units: in order of the first call.
        groups: numbers of the units with the same recipes at about the same costs.

    Args:
        cost_of: from `costs_of`, for several groupings of one profile.
    """

    def __init__(self, profile: Profile, only_moves: bool, cost_of: CostOf | None = None) -> None:
        self.profile = profile
        cost_of = cost_of or costs_of(profile)
        calls: dict[str, list[int]] = {}
        for number, region in enumerate(profile.regions):
            calls.setdefault(region.name, []).append(number)
        self.groups = _grouped(profile.regions, list(calls.values()))
        names, recipes = list(calls), dict[int, tuple[Recipe, ...]]()
        for group in self.groups:
            recipes.update(dict.fromkeys(group, _recipes(profile.regions, calls[names[group[0]]], only_moves)))
        self.units = tuple(_unit(cost_of, name, calls[name], recipes[unit]) for unit, name in enumerate(names))
        self._settled: Settled = {}

    @cached_property
    def common_bytes(self) -> dict[int, int]:
        """Bytes of the memory that several regions save, by number."""
        rows = (row for region in self.profile.regions for row in (*region.saved_tensors, *region.inputs))
        return {row.common: row.nbytes for row in rows if row.common and row.nbytes}

    def options(self, choices: Choices) -> tuple[Option, ...]:
        """An option for every region."""
        spread: list[tuple[int, Option]] = []
        for unit, choice in zip(self.units, choices, strict=True):
            spread += zip(unit.calls, unit.costs[choice], strict=True)
        return settled([option for _, option in sorted(spread, key=lambda pair: pair[0])], self._settled)


def _grouped(regions: Sequence[RegionProfile], calls: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = []
    for number, own in enumerate(calls):
        group = next((group for group in found if _units_alike(regions, calls[group[0]], own)), None)
        if group is None:
            found.append([number])
        else:
            group.append(number)
    return tuple(map(tuple, found))


def _units_alike(regions: Sequence[RegionProfile], one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(_alike(regions[a], regions[b]) for a, b in zip(one, other, strict=True))


def costs_of(profile: Profile) -> CostOf:
    """`option_for` by the number of the region's call, each worked out once."""

    @cache
    def cost_of(call: int, recipe: Recipe) -> Option:
        return option_for(profile.regions[call], recipe)

    return cost_of


def _unit(cost_of: CostOf, name: str, calls: Sequence[int], recipes: tuple[Recipe, ...]) -> Unit:
    costs = tuple(tuple(cost_of(call, recipe) for call in calls) for recipe in recipes)
    return Unit(name, tuple(calls), recipes, costs)


def _recipes(regions: Sequence[RegionProfile], calls: Sequence[int], only_moves: bool) -> tuple[Recipe, ...]:
    """Recipes worth considering at any of the calls, and possible at all calls."""
    may_recompute = all(regions[call].recompute_s > 0 for call in calls)
    found = dict.fromkeys(option.recipe for call in calls for option in options_of(regions[call], only_moves))
    of_first = regions[calls[0]].budgets
    budgets = [None, *(budget for budget in of_first if all(budget in regions[call].budgets for call in calls))]
    possible = (recipe for recipe in found if recipe.activation_memory_budget in budgets)
    return tuple(recipe for recipe in possible if may_recompute or not recipe.recomputes)


def _alike(one: RegionProfile, other: RegionProfile) -> bool:
    times = [(one.forward_s, other.forward_s), (one.backward_s, other.backward_s)]
    if one.recompute_s > 0:
        times.append((one.recompute_s, other.recompute_s))
    return (
        (one.recompute_s > 0) == (other.recompute_s > 0)  # 0: cannot recompute
        and _shape(one) == _shape(other)
        and all(_near(a, b, THRESHOLDS.alike_bytes) for a, b in zip(_sizes(one), _sizes(other), strict=True))
        # A hiccup of the timed step lengthens a single time, and regions of unequal work differ in all three.
        and any(_near(a, b, THRESHOLDS.alike_seconds) for a, b in times)
    )


def _shape(region: RegionProfile) -> tuple[object, ...]:
    ops = tuple((row.index, row.op, row.downstream, row.users) for row in region.expensive_ops)
    tensors, inputs = (
        tuple((row.index, row.shares, row.derive_s > 0, row.common > 0) for row in rows)
        for rows in (region.saved_tensors, region.inputs)
    )
    return tensors, inputs, ops, tuple((point.activation_memory_budget, _shape(point)) for point in region.points)


def _sizes(region: RegionProfile) -> list[int]:
    rows = [*region.saved_tensors, *region.inputs, *region.expensive_ops]
    work = [region.forward_work_bytes, region.backward_work_bytes, region.grad_bytes]
    own = [region.not_movable_bytes, region.after_bytes, *work, *(row.nbytes for row in rows)]
    return own + [nbytes for point in region.points for nbytes in _sizes(point)]


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(abs(a), abs(b))
