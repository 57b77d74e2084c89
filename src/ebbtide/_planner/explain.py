"""Explanations for people: why a region got its recipe, and what a budget is made of. Pure."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil

from ebbtide._planner.options import Option, describe
from ebbtide._planner.simulate import Outcome, fixed_bytes, held_bytes, least_budget
from ebbtide._plans import Prediction
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import GIB, MIB, format_bytes

_FULL = 0.8  # of the time in which parcels may leave: a busier link counts as full


def explanations(profile: Profile, options: Sequence[Option], outcome: Outcome, has_budget: bool) -> list[str]:
    """Why each region got its recipe, in order of forward."""
    if all(option.recipe.keeps_all for option in options):
        cause = "the budget has room for all" if has_budget else "moving anything would make the step slower"
        return [f"{format_bytes(option.kept_bytes)} stay: {cause}" for option in options]
    tail = outcome.tail_bytes(options)
    busy_s = outcome.moved_bytes / profile.link.out
    carrying_s = outcome.forward_s if profile.graphs == 1 else outcome.step_s
    is_full = busy_s >= _FULL * carrying_s or outcome.stall_forward_s > 0 or outcome.stall_backward_s > 0
    room = "the budget has room" if has_budget else "further moves would make the step slower"
    cause = "the link is full with parcels of other regions" if is_full else room
    last_freeing = max(number for number, option in enumerate(options) if not option.recipe.keeps_all)
    return [
        _late(option, stays)
        or _kept(option, "late, needed at once in backward" if number > last_freeing else cause)
        or _freed(profile, number, option, is_full)
        for number, (option, stays) in enumerate(zip(options, tail, strict=True))
    ]


def _late(option: Option, stays_bytes: int) -> str:
    if option.recipe.action != "offload" or 2 * stays_bytes < option.moved_bytes:
        return ""
    return f"late: {format_bytes(stays_bytes)} of {format_bytes(option.moved_bytes)} are needed before leaving"


def _kept(option: Option, cause: str) -> str:
    return f"{format_bytes(option.kept_bytes)} stay: {cause}" if option.recipe.keeps_all else ""


def _freed(profile: Profile, number: int, option: Option, is_full: bool) -> str:
    text = describe(option, profile.regions[number])
    return f"{text}; the link is full" if is_full and option.recipe.recomputes else text


def budget_parts(profile: Profile, options: Sequence[Option]) -> Mapping[str, int]:
    """Parts of the smallest budget for `options`: bytes by name, the largest first."""
    parts = {name: nbytes for name, nbytes in profile.base.items() if nbytes > 0}
    unnamed = profile.base_bytes - sum(parts.values())
    if unnamed > 0:
        parts["other, from before the step"] = unnamed
    parts["saved outside of the regions"] = profile.outside.kept_bytes
    kept_bytes = sum(option.kept_bytes for option in options)
    others = fixed_bytes(profile, kept_bytes) - profile.base_bytes - profile.outside.kept_bytes
    parts[f"kept by {profile.graphs - 1} other graphs in flight"] = others
    parts.update(_at_the_peak(profile, options))
    parts["on the way out when the last region ends"] = least_budget(profile, options) - sum(parts.values())
    return {name: nbytes for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]) if nbytes > 0}


def _at_the_peak(profile: Profile, options: Sequence[Option]) -> Mapping[str, int]:
    kept = list(accumulate(option.kept_bytes for option in options))
    grads = list(accumulate(region.grad_bytes for region in reversed(profile.regions)))[::-1]
    places = [_place(kept[-1] if kept else 0, "peak after the last region (logits, loss)", profile.outside.peak_bytes)]
    all_held = held_bytes([option.all_held for option in options])
    for k, g, held, option, region in zip(kept, grads, all_held, options, profile.regions, strict=True):
        forward = _place(k, f"working memory of {region.name} in forward", option.forward_work_bytes)
        places.append({**forward, "moved, and held by the model for later blocks": held})
        backward = _place(k, f"working memory of {region.name} in backward", option.backward_work_bytes)
        places.append({**backward, "gradients made in backward": g})
    return max(places, key=lambda place: sum(place.values()))


def _place(kept_bytes: int, name: str, work_bytes: int) -> dict[str, int]:
    # Negative work: backward has freed what was saved behind the region.
    return {"activations that stay": kept_bytes + min(0, work_bytes), name: max(0, work_bytes)}


def too_small(budget_bytes: int, least_bytes: int, parts: Mapping[str, int], device: str) -> str:
    """Error text for a budget below the smallest. `device`: as in `Profile.made_for`."""
    listed = ", ".join(
        f"{name} {format_bytes(nbytes)} ({nbytes / max(1, least_bytes):.0%})" for name, nbytes in parts.items()
    )
    return (
        f"budget {format_bytes(budget_bytes)}: no plan fits, the smallest budget is {format_bytes(least_bytes)}, "
        f"held by: {listed}. Write budget={as_budget(least_bytes)!r} or more, or make the batch smaller"
        f"{_WHOLE_PROCESS if device == 'cpu' else ''}"
    )


_WHOLE_PROCESS = (
    ". On the CPU a budget counts the resident memory of the whole process, with freed memory that the C library "
    "retains: glibc returns freed memory if Python starts with MALLOC_MMAP_THRESHOLD_=65536 in the environment"
)


NO_BUDGET = "ebbtide: without a budget only moves that cost no time are made: write budget='40GiB', or 0.8"


def used_bytes(budget_bytes: int, predicted: Prediction) -> int:
    """The part of the budget that the plan uses."""
    return min(budget_bytes, predicted.peak_bytes)


def out_of_memory(
    budget_bytes: int | None,
    predicted: Prediction | None,
    measured_bytes: int,
    margin_share: float,
    least_bytes: int,
    what_next: str,
) -> str:
    """The note on an out-of-memory error: prediction, measurement, and a budget that would have fitted.

    Args:
        measured_bytes: peak of the failed step.
        margin_share: part of the planned bytes to stay free besides.
        least_bytes: the smallest budget of any plan.
        what_next: the next action, of ebbtide or of the user.
    """
    if budget_bytes is None:
        return NO_BUDGET
    if predicted is None:
        return "ebbtide: the plan of this step has no prediction"
    excess_bytes = max(0, measured_bytes - predicted.peak_bytes)
    planned_bytes = used_bytes(budget_bytes, predicted)
    fitting_bytes = max(0, planned_bytes - excess_bytes - int(planned_bytes * margin_share))
    fits = f"budget={as_budget(fitting_bytes)!r} would have fitted; {what_next}"
    if fitting_bytes < least_bytes:
        fits = f"{format_bytes(fitting_bytes)} are left, and no plan needs less than {format_bytes(least_bytes)}"
    return (
        f"ebbtide: a peak of {format_bytes(predicted.peak_bytes)} was predicted for a budget of "
        f"{format_bytes(budget_bytes)}, and {format_bytes(measured_bytes)} were allocated. Something outside of the "
        f"plan needs the rest: {fits}"
    )


def as_budget(nbytes: int) -> str:
    """A budget of at least `nbytes` as a user writes one: "38GiB", "38.5GiB", "700MiB"."""
    if nbytes >= GIB:
        whole, tenth = divmod(-(-nbytes * 10 // GIB), 10)
        return f"{whole}.{tenth}GiB" if tenth else f"{whole}GiB"
    return f"{ceil(nbytes / MIB)}MiB"
