"""A simulated step for pictures: the work of each lane over time, and memory by kind. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ebbtide._planner.options import Option, choice_of
from ebbtide._planner.simulate import Outcome, Windows, fixed_bytes, least_budget, simulate, timeline, windows_within
from ebbtide._plans import Plan, Recipe
from ebbtide._profiling.profile import Profile, are_backward, in_flight
from ebbtide._profiling.timeline import Timeline


class Memory(NamedTuple):
    """Most bytes allocated at once in an interval of a step, by kind.

    Attributes:
        before: from before the step: parameters, gradients, the state of the optimizer.
        kept: saved tensors on the device until backward.
        moving: parcels on the way out, and back early.
        gradients: made by the backward of the step.
        working: memory of the running operators, recomputed tensors included.
    """

    before: int
    kept: int
    moving: int
    gradients: int
    working: int


@dataclass(frozen=True)
class StepView:
    """A simulated step. With several graphs in flight `timeline` and `memory` show the passes of all, in order.

    Attributes:
        times: borders of the intervals of `memory`, in seconds.
        memory: one for each interval.
    """

    outcome: Outcome
    timeline: Timeline
    times: tuple[float, ...]
    memory: tuple[Memory, ...]

    @property
    def peak(self) -> Memory:
        """At the peak of the step."""
        return max(self.memory, key=sum)


def view_of_plan(profile: Profile, plan: Plan) -> StepView:
    """The step of a planner's plan, for regions of `profile`."""
    recipes = (_recipe(plan, region.name) for region in profile.regions)
    return _view(profile, choice_of(profile.regions, recipes), plan)


def view_with(profile: Profile, recipe: Recipe) -> StepView:
    """The step with one recipe for all regions. Regions without recomputation times keep instead of recomputing."""
    found = [Recipe("keep") if recipe.recomputes and region.recompute_s == 0 else recipe for region in profile.regions]
    return _view(profile, choice_of(profile.regions, found))


def _view(profile: Profile, choice: Sequence[Option], plan: Plan | None = None) -> StepView:
    windows = windows_within(profile, choice, least_budget(profile, choice)) if plan is None else _of(profile, plan)
    assert windows is not None
    outcome = simulate(profile, choice, windows)
    line = timeline(profile, choice, windows)
    return StepView(outcome, line, *_memory(profile, choice, outcome, line.step_s))


def _recipe(plan: Plan, name: str) -> Recipe:
    return plan.recipe_of(name) or Recipe("keep")


def _of(profile: Profile, plan: Plan) -> Windows:
    """Windows of a planner's plan."""
    forward: list[int] = []
    prefetch: list[int] = []
    for region in profile.regions:
        planned = plan.regions.get(region.name)
        points = () if planned is None else planned.release
        forward.append(points[0].window_bytes if points else forward[-1] if forward else 0)
        prefetch.append((planned and planned.prefetch_bytes) or 0)
    outside = () if plan.outside is None else plan.outside.release
    windows = {point.tensor_index: point.window_bytes for point in outside}
    places = [point.tensor_index for point in profile.outside.post_region_points if point.tensor_index >= 0]
    return Windows(tuple(forward), tuple(windows.get(place, 0) for place in places), tuple(prefetch))


def _memory(
    profile: Profile, choice: Sequence[Option], outcome: Outcome, step_s: float
) -> tuple[tuple[float, ...], tuple[Memory, ...]]:
    """Borders and memory of the intervals: each ends with a moment of the curve, and divides the moment's bytes."""
    before, passes = profile.base_bytes, profile.order
    all_kept = sum(option.kept_bytes for option in choice)
    grads = list(accumulate(region.grad_bytes for region in reversed(profile.regions)))
    rows: list[tuple[int, int, int]] = []
    for alive, is_backward in zip(in_flight(passes), are_backward(passes), strict=True):
        fixed = fixed_bytes(profile, all_kept, alive - 1) - before
        kept = [fixed + own for own in accumulate(option.kept_bytes for option in choice)]
        if is_backward:
            backward = zip(kept[::-1], grads, choice[::-1], strict=True)
            # Negative work: backward has freed what was saved behind the region.
            works = ((own, grad_bytes, option.backward_work_bytes) for own, grad_bytes, option in backward)
            rows += [(own + min(0, work), grad_bytes, max(0, work)) for own, grad_bytes, work in works]
        else:
            rows += [(own, 0, o.forward_work_bytes - o.newest_bytes) for own, o in zip(kept, choice, strict=True)]
            rows += [(fixed + all_kept, 0, point.peak_bytes) for point in profile.outside.post_region_points]
    alone = profile.outside.kept_bytes
    memory = [Memory(before, alone, 0, 0, 0)]
    for moment, (own, grad_bytes, work_bytes) in zip(outcome.curve, rows, strict=True):
        moving = moment.nbytes - before - own - grad_bytes - work_bytes
        memory.append(Memory(before, own, max(0, moving), grad_bytes, work_bytes + min(0, moving)))
    memory.append(Memory(before, alone, 0, grads[-1] if grads else 0, 0))
    times = [0.0, profile.outside.before_s, *(moment.seconds for moment in outcome.curve), step_s]
    assert all(early <= late + 1e-9 for early, late in pairwise(times[1:]))
    return tuple(times), tuple(memory)
