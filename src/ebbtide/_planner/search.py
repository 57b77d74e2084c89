"""Proposals: assignments of recipes to regions that are worth a simulation, the same for every budget. Pure.

Note [Budgets]
~~~~~~~~~~~~~~
A larger budget must never give a slower plan. Proposals therefore do not depend on the budget: the problem is
solved for a fixed row of budgets, from the smallest of any plan to the need of keeping everything, and every solution
is a proposal at every budget large enough for the solution. Measured and rejected: local search around the proposals
of a row half as dense (three times as long, no faster plans).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ebbtide._planner.groups import Choices, Grouping, Unit
from ebbtide._planner.options import Option
from ebbtide._planner.relaxation import Counts, Relaxation
from ebbtide._planner.simulate import fixed_bytes, least_budget, shares_between
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._profiling.profile import Profile


@dataclass(frozen=True)
class Assignment:
    """An option for every region.

    Attributes:
        options: in order of forward.
        least_bytes: smallest budget with windows.
        kept_bytes, moved_bytes, recompute_s: sums over all regions.
    """

    options: tuple[Option, ...]
    least_bytes: int
    kept_bytes: int
    moved_bytes: int
    recompute_s: float


def assignment_of(profile: Profile, options: Sequence[Option]) -> Assignment:
    return Assignment(
        tuple(options),
        least_budget(profile, options),
        sum(option.kept_bytes for option in options),
        sum(option.moved_bytes for option in options),
        sum(option.recompute_s for option in options),
    )


def assignments_of(grouping: Grouping) -> list[Assignment]:
    """All assignments if few; otherwise those of the relaxation, a recipe for all regions, and the leanest."""
    is_few = prod(len(unit.recipes) for unit in grouping.units) * len(grouping.profile.order) // 2 <= THRESHOLDS.few
    found = product(*(range(len(unit.recipes)) for unit in grouping.units)) if is_few else _likely_choices(grouping)
    return [assignment_of(grouping.profile, grouping.options(choices)) for choices in dict.fromkeys(found)]


def _likely_choices(grouping: Grouping) -> Iterator[Choices]:
    yield leanest(grouping)
    for index in range(max(len(unit.recipes) for unit in grouping.units)):
        yield tuple(min(index, len(unit.recipes) - 1) for unit in grouping.units)
    high = least_budget(grouping.profile, grouping.options((0,) * len(grouping.units)))
    # Between graphs in flight the link has more time than within one, and less than in all passes together.
    for shares in dict.fromkeys([(0.0, 0.0), shares_between(grouping.profile.order)]):
        relaxation = Relaxation(grouping, shares)
        low = relaxation.smallest_budget
        steps = range(THRESHOLDS.budgets + 1)
        budgets = [low + int((high - low) * (k / THRESHOLDS.budgets) ** 1.5) for k in steps]  # denser near `low`
        for counts in relaxation.solve(budgets):
            yield from placed(grouping, counts)


# -- the smallest budget ---------------------------------------------------------------------------------------------


def leanest(grouping: Grouping) -> Choices:
    """The choices with the smallest budget; exact if every region is called once, the caller holds no input for a later
    region, and no two regions save the same memory. Otherwise an option that keeps less may leave more.

    Of two options that fit, the option that keeps less is never worse for later regions, nor for other graphs in
    flight. So a greedy pass from the first region to the last decides whether a budget is enough, and bisection finds
    the budget.
    """
    low, high = 0, least_budget(grouping.profile, grouping.options((0,) * len(grouping.units)))
    best = (0,) * len(grouping.units)
    while low < high:
        middle = (low + high) // 2
        choices = _leanest_within(grouping, middle)
        if choices is None:
            low = middle + 1
        else:
            high, best = min(middle, least_budget(grouping.profile, grouping.options(choices))), choices
    return best


def _leanest_within(grouping: Grouping, budget_bytes: int) -> Choices | None:
    """Fixed-point iteration: other graphs keep as much as this graph, and bound this graph by the room left."""
    profile = grouping.profile
    room, others_bytes = budget_bytes - fixed_bytes(profile, 0), 0
    while True:
        choices = _leanest_pass(grouping, room - others_bytes)
        if choices is None:
            return None
        kept_bytes = sum(unit.kept_bytes[choice] for unit, choice in zip(grouping.units, choices, strict=True))
        if (profile.graphs - 1) * kept_bytes <= others_bytes:
            return _with_a_last_that_fits(grouping, choices, budget_bytes)
        others_bytes = (profile.graphs - 1) * kept_bytes


def _leanest_pass(grouping: Grouping, room: int) -> list[int] | None:
    """Greedy, in forward order: the feasible option that keeps the fewest bytes given the earlier choices."""
    profile = grouping.profile
    chosen: dict[int, int] = {}
    unit_of = {v: (number, place) for number, unit in enumerate(grouping.units) for place, v in enumerate(unit.calls)}
    grads = sum(region.grad_bytes for region in profile.regions)
    ends: Counter[int] = Counter()  # of what the caller holds: the bytes, by the first region without
    kept = set[int]()  # memory that several regions save: see `SavedTensor.common`
    for call, region in enumerate(profile.regions):
        ends.pop(call, None)
        held = ends.total()
        number, place = unit_of[call]
        unit = grouping.units[number]
        allowed = [chosen[number]] if number in chosen else range(len(unit.recipes))
        options = [unit.costs[choice][place] for choice in range(len(unit.recipes))]
        # Memory that several regions save counts where it is kept first.
        more = [_more_kept(grouping.common_bytes, option, kept) if option.keeps else 0 for option in options]
        fitting = [each for each in allowed if more[each] + _least_room(options[each], grads, held) <= room]
        if not fitting:
            return None
        # Of options that keep as much the one with the fewest parcels: parcels take room at the end of forward.
        least = [(unit.kept_bytes[each] + more[each], unit.moved_bytes[each]) for each in range(len(options))]
        chosen[number] = min(fitting, key=least.__getitem__)
        option = options[chosen[number]]
        for each in option.all_held:
            ends[call + each.held_for + 1] += each.nbytes
        room -= option.kept_bytes + more[chosen[number]]
        kept.update(number for number, _ in option.keeps)
        grads -= region.grad_bytes
    return [chosen[number] for number in range(len(grouping.units))]


def _more_kept(common_bytes: Mapping[int, int], option: Option, kept: Collection[int]) -> int:
    """Bytes that an option keeps besides `kept_bytes`, where the memory of numbers `kept` stays in any case."""
    return sum((0 if number in kept else common_bytes.get(number, 0)) - nbytes for number, nbytes in option.keeps)


def _least_room(option: Option, grads: int, held: int) -> int:
    return option.kept_bytes + max(held + option.forward_work_bytes, grads + option.backward_work_bytes)


def _with_a_last_that_fits(grouping: Grouping, choices: list[int], budget_bytes: int) -> Choices | None:
    """After the last region, parcels of the region still on the way out need room too."""
    unit = grouping.units[-1]
    for choice in [choices[-1], *sorted(range(len(unit.recipes)), key=unit.kept_bytes.__getitem__)]:
        found = (*choices[:-1], choice)
        if least_budget(grouping.profile, grouping.options(found)) <= budget_bytes:
            return found
    return None


# -- the order of recipes --------------------------------------------------------------------------------------------


def placed(grouping: Grouping, counts: Sequence[Counts]) -> Iterator[Choices]:
    """Two ways to spread counts over the depth: large moves first, as all of forward is left for them to leave; and
    each recipe evenly, so that stalls of the link or of the host have time to recover."""
    for spread in (_moved_first, _evenly):
        choices = [0] * len(grouping.units)
        for group, count in zip(grouping.groups, counts, strict=True):
            for number, choice in zip(group, spread(grouping.units[group[0]], count), strict=True):
                choices[number] = choice
        yield tuple(choices)


def _moved_first(unit: Unit, counts: Counts) -> list[int]:
    order = sorted(counts, key=lambda choice: (-unit.moved_bytes[choice], unit.kept_bytes[choice]))
    return [choice for choice in order for _ in range(counts[choice])]


def _evenly(unit: Unit, counts: Counts) -> list[int]:
    places = [((k + 0.5) / counts[choice], choice) for choice in counts for k in range(counts[choice])]
    return [choice for _, choice in sorted(places, key=lambda place: (place[0], unit.kept_bytes[place[1]]))]
