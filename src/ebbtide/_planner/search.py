"""Proposals: assignments of recipes to regions that are worth a simulation, the same for every budget. Pure.

Note [Budgets]
~~~~~~~~~~~~~~
A larger budget must never give a slower plan. So proposals do not depend on the budget: the problem is solved for a
fixed row of budgets, from the smallest of any plan to the need of keeping everything, and every solution is a proposal
at every budget that the solution fits.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ebbtide._planner.groups import MAX_ASSIGNMENTS, Grouping, Unit
from ebbtide._planner.options import Option
from ebbtide._planner.relaxation import GroupCounts, Relaxation
from ebbtide._planner.simulate import fixed_bytes, least_budget
from ebbtide._profiling.profile import Profile

_BUDGETS = 48
Choices = tuple[int, ...]
"""Per unit, the index of a recipe."""


@dataclass(frozen=True)
class Assignment:
    """An option for every region.

    Attributes:
        choices: recipes of the units; empty for options that no grouping offers.
        options: in order of forward.
        least_bytes: smallest budget with windows.
        kept_bytes, moved_bytes, recompute_s: sums over all regions.
    """

    choices: Choices
    options: tuple[Option, ...]
    least_bytes: int
    kept_bytes: int
    moved_bytes: int
    recompute_s: float


def assignments_of(grouping: Grouping) -> list[Assignment]:
    """All assignments if few, otherwise those of the relaxation and of common sense.

    A grouping with recomputation does not repeat the assignments of a grouping without: simulate both.
    """
    found = _all_choices(grouping) if grouping.assignment_count <= MAX_ASSIGNMENTS else _likely_choices(grouping)
    return [assignment_from(grouping, choices) for choices in dict.fromkeys(found)]


def all_kept(grouping: Grouping) -> Assignment:
    return assignment_from(grouping, (0,) * len(grouping.units))


def assignment_from(grouping: Grouping, choices: Choices) -> Assignment:
    return assignment_of(grouping.profile, grouping.options(choices), choices)


def assignment_of(profile: Profile, options: Sequence[Option], choices: Choices = ()) -> Assignment:
    return Assignment(
        choices,
        tuple(options),
        least_budget(profile, options),
        sum(option.kept_bytes for option in options),
        sum(option.moved_bytes for option in options),
        sum(option.recompute_s for option in options),
    )


def _all_choices(grouping: Grouping) -> Iterator[Choices]:
    return product(*(range(len(unit.recipes)) for unit in grouping.units))


def _likely_choices(grouping: Grouping) -> Iterator[Choices]:
    yield (0,) * len(grouping.units)
    lean = leanest(grouping)
    yield lean
    yield from _uniform(grouping)
    yield from _solved(grouping, least_budget(grouping.profile, grouping.options(lean)))


def _uniform(grouping: Grouping) -> Iterator[Choices]:
    """One recipe everywhere, by its index; a unit with fewer recipes gets the last."""
    most = max((len(unit.recipes) for unit in grouping.units), default=0)
    for index in range(most):
        yield tuple(min(index, len(unit.recipes) - 1) for unit in grouping.units)


def leanest(grouping: Grouping) -> Choices:
    """The choices with the smallest budget; exact if every region is called once.

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
    """Fixed-point iteration: other graphs keep as much as this graph, which in turn depends on the room they leave."""
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
    for call, region in enumerate(profile.regions):
        number, place = unit_of[call]
        unit = grouping.units[number]
        allowed = [chosen[number]] if number in chosen else range(len(unit.recipes))
        fitting = [
            choice
            for choice in allowed
            if unit.costs[choice][place].kept_bytes
            + max(region.forward_work_bytes, grads + unit.costs[choice][place].backward_work_bytes)
            <= room
        ]
        if not fitting:
            return None
        chosen[number] = min(fitting, key=unit.kept_bytes.__getitem__)
        room -= unit.costs[chosen[number]][place].kept_bytes
        grads -= region.grad_bytes
    return [chosen[number] for number in range(len(grouping.units))]


def _with_a_last_that_fits(grouping: Grouping, choices: list[int], budget_bytes: int) -> Choices | None:
    """After the last region its parcels still on the way out need room too."""
    unit = grouping.units[-1]
    for choice in [choices[-1], *sorted(range(len(unit.recipes)), key=unit.kept_bytes.__getitem__)]:
        found = (*choices[:-1], choice)
        if least_budget(grouping.profile, grouping.options(found)) <= budget_bytes:
            return found
    return None


# -- rounding --------------------------------------------------------------------------------------------------------


def budgets_from(grouping: Grouping, low: int, count: int) -> list[int]:
    """Budgets from `low` to the need of keeping everything, denser near `low`."""
    high = least_budget(grouping.profile, grouping.options((0,) * len(grouping.units)))
    return [low + int((high - low) * (step / count) ** 1.5) for step in range(count + 1)]


def _solved(grouping: Grouping, least_bytes: int) -> Iterator[Choices]:
    row = budgets_from(grouping, least_bytes, _BUDGETS)
    for kind, some in ((_anything, row), (_moves_nothing, row[::2])):
        counts = Relaxation(grouping, kind)
        for budget_bytes in some:
            solution = counts.solve(budget_bytes)
            if solution is not None:
                yield from placed(grouping, solution)


def _anything(unit: Unit, choice: int) -> bool:  # noqa: ARG001
    return True


def _moves_nothing(unit: Unit, choice: int) -> bool:
    return unit.moved_bytes[choice] == 0


def placed(grouping: Grouping, solution: Iterable[GroupCounts]) -> Iterator[Choices]:
    """Ways to spread counts over the depth that differ to the simulator: by bursts, and by the last region."""
    pieces = list(solution)
    for spread in (_early, _moved_first, _even, _kept_last, _moved_at_the_end):
        choices = [0] * len(grouping.units)
        for piece in pieces:
            for number, choice in zip(piece.units, spread(grouping, piece), strict=True):
                choices[number] = choice
        yield tuple(choices)


def _repeated(grouping: Grouping, piece: GroupCounts) -> list[int]:
    """Choices as often as counted, in order of bytes kept, then of most bytes moved."""
    unit = grouping.units[piece.units[0]]
    order = sorted(piece.counts, key=lambda choice: (unit.kept_bytes[choice], -unit.moved_bytes[choice]))
    return [choice for choice in order for _ in range(piece.counts[choice])]


def _early(grouping: Grouping, piece: GroupCounts) -> list[int]:
    return _repeated(grouping, piece)


def _moved_first(grouping: Grouping, piece: GroupCounts) -> list[int]:
    """Large moves first: all of forward is left for them to leave."""
    unit = grouping.units[piece.units[0]]
    return sorted(_repeated(grouping, piece), key=lambda choice: -unit.moved_bytes[choice])


def _even(grouping: Grouping, piece: GroupCounts) -> list[int]:
    return _interleaved(_repeated(grouping, piece))


def _kept_last(grouping: Grouping, piece: GroupCounts) -> list[int]:
    repeated = _repeated(grouping, piece)
    moving = [choice for choice in repeated if choice != 0]
    return [*_interleaved(moving), *[0] * (len(repeated) - len(moving))]


def _moved_at_the_end(grouping: Grouping, piece: GroupCounts) -> list[int]:
    """A move comes last: its parcels stay, and the engine first prefetches when backward needs them."""
    first, *others = _repeated(grouping, piece)
    return [*others, first]


def _interleaved(choices: Sequence[int]) -> list[int]:
    """Each choice spread evenly."""
    counts, seen = Counter(choices), Counter[int]()
    places: list[tuple[float, int, int]] = []
    for position, choice in enumerate(choices):
        places.append(((seen[choice] + 0.5) / counts[choice], position, choice))
        seen[choice] += 1
    return [choice for _, _, choice in sorted(places)]
