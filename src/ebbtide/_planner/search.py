"""Assignments of options to regions that are worth a simulation. Pure; whatever budget is asked for, the same ones.

Note [Budgets]
~~~~~~~~~~~~~~
A larger budget must never give a slower plan. So what is tried does not depend on the budget: the problem is solved for
a fixed row of budgets between the least that any plan needs and what keeping everything needs, and every solution is a
candidate at every budget that it fits.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ebbtide._planner.groups import MOST_ASSIGNMENTS, Model, Unit
from ebbtide._planner.options import Option
from ebbtide._planner.relaxation import Counted, Counts
from ebbtide._planner.simulate import fixed_bytes, least_budget
from ebbtide._profiling.profile import Profile

_BUDGETS = 128
Choices = tuple[int, ...]
"""Per unit, the index of its recipe."""


@dataclass(frozen=True)
class Candidate:
    """An option for every region.

    Attributes:
        choices: of the model's units.
        options: what they mean for each region, in order of forward.
        least_bytes: the budget that it needs.
        kept_bytes, moved_bytes, again_s: of all regions together.
    """

    choices: Choices
    options: tuple[Option, ...]
    least_bytes: int
    kept_bytes: int
    moved_bytes: int
    again_s: float


def candidates_of(model: Model) -> list[Candidate]:
    """All assignments if they are few, else those that a relaxation of the problem and habit suggest.

    Those of a model whose regions never run again are not repeated by one whose regions may: try them too.
    """
    found = _all_choices(model) if model.assignments <= MOST_ASSIGNMENTS else _likely_choices(model)
    return [candidate_from(model, choices) for choices in dict.fromkeys(found)]


def all_kept(model: Model) -> Candidate:
    """Nothing moves, nothing runs again."""
    return candidate_from(model, (0,) * len(model.units))


def candidate_from(model: Model, choices: Choices) -> Candidate:
    """With what `choices` mean for every region of the model's profile."""
    return candidate_of(model.profile, model.options(choices), choices)


def candidate_of(profile: Profile, options: Sequence[Option], choices: Choices = ()) -> Candidate:
    """With an option for every region of `profile`, of whatever model."""
    return Candidate(
        choices,
        tuple(options),
        least_budget(profile, options),
        sum(option.kept_bytes for option in options),
        sum(option.moved_bytes for option in options),
        sum(option.again_s for option in options),
    )


def _all_choices(model: Model) -> Iterator[Choices]:
    return product(*(range(len(unit.recipes)) for unit in model.units))


def _likely_choices(model: Model) -> Iterator[Choices]:
    yield (0,) * len(model.units)
    lean = leanest(model)
    yield lean
    yield from _uniform(model)
    yield from _solved(model, least_budget(model.profile, model.options(lean)))


def _uniform(model: Model) -> Iterator[Choices]:
    """The recipes of one group everywhere; where there is no such recipe, the one of the same place in the list."""
    most = max((len(unit.recipes) for unit in model.units), default=0)
    for index in range(most):
        yield tuple(min(index, len(unit.recipes) - 1) for unit in model.units)


def leanest(model: Model) -> Choices:
    """What needs the smallest budget; exact if no region is visited twice.

    Where two options fit, the one that keeps less is never worse for the regions behind, nor for the other graphs in
    flight: so for a given budget one pass from the first region to the last decides whether it can be held beside what
    others keep, and the budget is found by halving.
    """
    low, high = 0, least_budget(model.profile, model.options((0,) * len(model.units)))
    best = (0,) * len(model.units)
    while low < high:
        middle = (low + high) // 2
        choices = _leanest_within(model, middle)
        if choices is None:
            low = middle + 1
        else:
            high, best = min(middle, least_budget(model.profile, model.options(choices))), choices
    return best


def _leanest_within(model: Model, budget_bytes: int) -> Choices | None:
    """Other graphs keep as much as this one, which is not known before: from nothing upwards, for the less room there
    is, the more has to be kept."""
    profile = model.profile
    room, others_bytes = budget_bytes - fixed_bytes(profile, 0), 0
    while True:
        choices = _leanest_pass(model, room - others_bytes)
        if choices is None:
            return None
        kept_bytes = sum(unit.kept_bytes[choice] for unit, choice in zip(model.units, choices, strict=True))
        if (profile.graphs - 1) * kept_bytes <= others_bytes:
            return _with_a_last_that_fits(model, choices, budget_bytes)
        others_bytes = (profile.graphs - 1) * kept_bytes


def _leanest_pass(model: Model, room: int) -> list[int] | None:
    """Of each region in turn what keeps least, of all that fit behind what the ones before it keep."""
    profile = model.profile
    chosen: dict[int, int] = {}
    unit_of = {v: (number, place) for number, unit in enumerate(model.units) for place, v in enumerate(unit.visits)}
    grads = sum(region.grad_bytes for region in profile.regions)
    for visit, region in enumerate(profile.regions):
        number, place = unit_of[visit]
        unit = model.units[number]
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
    return [chosen[number] for number in range(len(model.units))]


def _with_a_last_that_fits(model: Model, choices: list[int], budget_bytes: int) -> Choices | None:
    """Behind the last region it is not only what it keeps that needs room, but what it still sends too."""
    unit = model.units[-1]
    for choice in [choices[-1], *sorted(range(len(unit.recipes)), key=unit.kept_bytes.__getitem__)]:
        found = (*choices[:-1], choice)
        if least_budget(model.profile, model.options(found)) <= budget_bytes:
            return found
    return None


# -- solved --------------------------------------------------------------------------------------------------------


def budgets_from(model: Model, low: int, count: int) -> list[int]:
    """From the smallest that any plan needs to what keeping everything needs; closer together where it is tight."""
    high = least_budget(model.profile, model.options((0,) * len(model.units)))
    return [low + int((high - low) * (step / count) ** 1.5) for step in range(count + 1)]


def _solved(model: Model, least_bytes: int) -> Iterator[Choices]:
    row = budgets_from(model, least_bytes, _BUDGETS)
    for kind, some in ((_anything, row), (_moves_nothing, row[::2])):
        counts = Counts(model, kind)
        for budget_bytes in some:
            solution = counts.solve(budget_bytes)
            if solution is not None:
                yield from placed(model, solution)


def _anything(unit: Unit, choice: int) -> bool:  # noqa: ARG001
    return True


def _moves_nothing(unit: Unit, choice: int) -> bool:
    return unit.moved_bytes[choice] == 0


def placed(model: Model, solution: Iterable[Counted]) -> Iterator[Choices]:
    """The ways to spread counts over the depth that differ in what the simulator sees: bursts, and what comes last."""
    pieces = list(solution)
    for spread in (_early, _moved_first, _even, _kept_last, _moved_at_the_end):
        choices = [0] * len(model.units)
        for piece in pieces:
            for number, choice in zip(piece.units, spread(model, piece), strict=True):
                choices[number] = choice
        yield tuple(choices)


def _repeated(model: Model, piece: Counted) -> list[int]:
    """Choices as often as they are counted, those that keep least and move most first."""
    unit = model.units[piece.units[0]]
    order = sorted(piece.counts, key=lambda choice: (unit.kept_bytes[choice], -unit.moved_bytes[choice]))
    return [choice for choice in order for _ in range(piece.counts[choice])]


def _early(model: Model, piece: Counted) -> list[int]:
    return _repeated(model, piece)


def _moved_first(model: Model, piece: Counted) -> list[int]:
    """What moves much has the whole of forward to leave."""
    unit = model.units[piece.units[0]]
    return sorted(_repeated(model, piece), key=lambda choice: -unit.moved_bytes[choice])


def _even(model: Model, piece: Counted) -> list[int]:
    return _interleaved(_repeated(model, piece))


def _kept_last(model: Model, piece: Counted) -> list[int]:
    repeated = _repeated(model, piece)
    moving = [choice for choice in repeated if choice != 0]
    return [*_interleaved(moving), *[0] * (len(repeated) - len(moving))]


def _moved_at_the_end(model: Model, piece: Counted) -> list[int]:
    """One that moves comes last: its parcels do not leave, and backward's first look ahead is when it needs them."""
    first, *others = _repeated(model, piece)
    return [*others, first]


def _interleaved(choices: Sequence[int]) -> list[int]:
    """Each kind as evenly over the whole as its count allows."""
    counts, seen = Counter(choices), Counter[int]()
    places: list[tuple[float, int, int]] = []
    for position, choice in enumerate(choices):
        places.append(((seen[choice] + 0.5) / counts[choice], position, choice))
        seen[choice] += 1
    return [choice for _, _, choice in sorted(places)]
