"""Why a region got its recipe, and what holds a budget: words for people. Pure."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil

from ebbtide._planner.options import Option, why
from ebbtide._planner.simulate import Outcome, fixed_bytes, least_budget
from ebbtide._plans import Prediction
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes

_FULL = 0.8  # of forward: the link has no room left that would be worth a plan of its own
_GIB = 1024**3
_MIB = 1024**2


def reasons_of(profile: Profile, options: Sequence[Option], outcome: Outcome, has_budget: bool) -> list[str]:
    """Per region."""
    if all(option.recipe.action == "keep" for option in options):
        cause = "the budget has room for all" if has_budget else "moving anything would make the step slower"
        return [f"{format_bytes(option.kept_bytes)} stay: {cause}" for option in options]
    tail = outcome.tail_bytes(options)
    busy_s = outcome.moved_bytes / profile.link.out
    is_full = busy_s >= _FULL * outcome.forward_s or outcome.stall_forward_s > 0 or outcome.stall_backward_s > 0
    room = "the budget has room for them" if has_budget else "moving more would make the step slower"
    cause = "the link is full with what others move" if is_full else room
    last_freeing = max(number for number, option in enumerate(options) if option.recipe.action != "keep")
    return [
        _late(option, stays)
        or _kept(option, "late, needed again at once" if number > last_freeing else cause)
        or _freed(profile, number, option, is_full)
        for number, (option, stays) in enumerate(zip(options, tail, strict=True))
    ]


def _late(option: Option, stays_bytes: int) -> str:
    """Of what is meant to move but is not away before it is needed."""
    if option.recipe.action != "offload" or 2 * stays_bytes < option.moved_bytes:
        return ""
    return f"late: {format_bytes(stays_bytes)} of {format_bytes(option.moved_bytes)} are needed before they could leave"


def _kept(option: Option, cause: str) -> str:
    return f"{format_bytes(option.kept_bytes)} stay: {cause}" if option.recipe.action == "keep" else ""


def _freed(profile: Profile, number: int, option: Option, is_full: bool) -> str:
    text = why(option, profile.regions[number])
    return f"{text}; the link is full" if is_full and option.recipe.recomputes else text


def what_holds(profile: Profile, options: Sequence[Option]) -> Mapping[str, int]:
    """Parts of the least budget that `options` need, by name, in bytes, the largest first."""
    parts = {name: nbytes for name, nbytes in profile.base.items() if nbytes > 0}
    unnamed = profile.base_bytes - sum(parts.values())
    if unnamed > 0:
        parts["other, from before the step"] = unnamed
    parts["saved outside of the regions"] = profile.around.kept_bytes
    kept_bytes = sum(option.kept_bytes for option in options)
    others = fixed_bytes(profile, kept_bytes) - profile.base_bytes - profile.around.kept_bytes
    parts[f"kept by {profile.graphs - 1} other graphs in flight"] = others
    parts.update(_at_the_peak(profile, options))
    parts["not away yet when the last region ends"] = least_budget(profile, options) - sum(parts.values())
    return {name: nbytes for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]) if nbytes > 0}


def _at_the_peak(profile: Profile, options: Sequence[Option]) -> Mapping[str, int]:
    kept = list(accumulate(option.kept_bytes for option in options))
    grads = list(accumulate(region.grad_bytes for region in reversed(profile.regions)))[::-1]
    places = [_place(kept[-1] if kept else 0, "peak behind the last region (logits, loss)", profile.around.peak_bytes)]
    for k, g, option, region in zip(kept, grads, options, profile.regions, strict=True):
        places.append(_place(k, f"working memory of {region.name} in forward", region.forward_work_bytes))
        backward = _place(k, f"working memory of {region.name} in backward", option.backward_work_bytes)
        places.append({**backward, "gradients made in backward": g})
    return max(places, key=lambda place: sum(place.values()))


def _place(kept_bytes: int, name: str, work_bytes: int) -> dict[str, int]:
    return {"activations that stay": kept_bytes, name: work_bytes}


def too_small(budget_bytes: int, least_bytes: int, parts: Mapping[str, int]) -> str:
    """What to tell who asked for a budget that nothing fits."""
    held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items())
    return (
        f"budget {format_bytes(budget_bytes)}: no plan fits, the smallest budget that one does is "
        f"{format_bytes(least_bytes)}. It is held by: {held}. Write budget={as_budget(least_bytes)!r} or more, or make "
        "the batch smaller"
    )


NO_BUDGET = "ebbtide: no budget was given, so only what costs no time was moved: write budget='40GiB', or 0.8"


def used_bytes(budget_bytes: int, predicted: Prediction) -> int:
    """By the plan: of a budget with room to spare, the rest is not."""
    return min(budget_bytes, predicted.peak_bytes)


def out_of_memory(
    budget_bytes: int | None,
    predicted: Prediction | None,
    measured_bytes: int,
    spare_share: int,
    least_bytes: int,
    what_next: str,
) -> str:
    """What to tell whose device ran out of memory.

    Args:
        spare_share: that part of what was planned should stay free besides.
        least_bytes: the smallest budget that a plan fits.
        what_next: what is done about it, or what may be.
    """
    if budget_bytes is None:
        return NO_BUDGET
    if predicted is None:
        return "ebbtide: nothing was predicted of this step"
    beyond_bytes = max(0, measured_bytes - predicted.peak_bytes)
    planned_bytes = used_bytes(budget_bytes, predicted)
    fitting_bytes = max(0, planned_bytes - beyond_bytes - planned_bytes // spare_share)
    fits = f"budget={as_budget(fitting_bytes)!r} would have fitted; {what_next}"
    if fitting_bytes < least_bytes:
        fits = f"{format_bytes(fitting_bytes)} are left, and no plan needs less than {format_bytes(least_bytes)}"
    return (
        f"ebbtide: a peak of {format_bytes(predicted.peak_bytes)} was predicted for a budget of "
        f"{format_bytes(budget_bytes)}, and {format_bytes(measured_bytes)} were allocated. Something outside of the "
        f"plan needs the rest: {fits}"
    )


def as_budget(nbytes: int) -> str:
    """What to write for at least so many bytes: "38GiB", "38.5GiB", "700MiB"."""
    if nbytes >= _GIB:
        whole, tenth = divmod(-(-nbytes * 10 // _GIB), 10)
        return f"{whole}.{tenth}GiB" if tenth else f"{whole}GiB"
    return f"{ceil(nbytes / _MIB)}MiB"
