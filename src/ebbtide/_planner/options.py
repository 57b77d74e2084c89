"""What may be done with one region, and what each choice would cost. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ebbtide._plans import OP_CLASSES, Recipe
from ebbtide._profiling.profile import Dear, Host, HostTime, RegionProfile, Save
from ebbtide._utils.sizes import format_bytes


@dataclass(frozen=True)
class Moved:
    """Bytes that leave in forward and come back.

    Attributes:
        nbytes: of one parcel.
        at_s: when it is there, after the region's forward began.
        needed_s: when backward asks for it, after the region's backward (its second run, if it has one) began.
    """

    nbytes: int
    at_s: float
    needed_s: float


@dataclass(frozen=True)
class Option:
    """One choice for one region.

    Attributes:
        recipe: what the plan would say.
        kept_bytes: stay on the device from its forward to its backward.
        moved: what travels, in order of forward.
        again_s: what its second run takes.
        backward_work_bytes: most that is allocated while its backward runs, beyond what is kept of this and all other
            regions: what backward has asked for, what is made again, and what is short-lived.
        comes_together: backward asks for all that it moved when it begins.
        held: calls whose outputs its second run is handed.
        left_out: operators that do not run in it beside those.
    """

    recipe: Recipe
    kept_bytes: int
    moved: tuple[Moved, ...]
    again_s: float
    backward_work_bytes: int
    comes_together: bool
    held: int = 0
    left_out: int = 0

    @cached_property
    def moved_bytes(self) -> int:
        return sum(parcel.nbytes for parcel in self.moved)


# In what it takes the host to look at an operator: little in forward, two in backward, by steps of a small Llama whose
# time is the host's.
_LEFT_OUT = 1.0
_MARKS = (0.25, 0.5, 0.75)
_FINE_MARKS = tuple(step / 32 for step in range(1, 32))


def options_of(region: RegionProfile, only_moves: bool = False) -> tuple[Option, ...]:
    """All that is worth considering for `region`; without second runs if `only_moves`. The first keeps everything."""
    options = [_kept(region), *_offloaded(region, _MARKS)]
    if not only_moves and region.again_s > 0:
        options += [*_recomputed(region), *_selective(region)]
    return tuple(_without_dominated(options))


def fine_offloads_of(region: RegionProfile) -> list[Option]:
    """Steps from keeping all to moving all so small that the last of them fills what is left of the link."""
    return sorted(_offloaded(region, _FINE_MARKS), key=lambda option: option.moved_bytes)


def option_for(region: RegionProfile, recipe: Recipe) -> Option:
    """What `recipe` would cost in `region`, be it worth considering or not."""
    if recipe.action == "keep":
        return _of_saves(region, recipe, ())
    if recipe.action == "offload":
        return _of_saves(region, recipe, [save for save in region.saves if save.nbytes > 0 and _takes(recipe, save)])
    chosen = [dear for dear in region.dear if _takes(recipe, dear)] if recipe.action == "selective" else []
    held = [_beyond(region, dear) if dear.index in recipe.beyond else _outputs(dear) for dear in chosen]
    return _running_again(region, recipe, held)


def _takes(recipe: Recipe, row: Save | Dear) -> bool:
    return recipe.sites is None or row.index in recipe.sites


def _kept(region: RegionProfile) -> Option:
    return _of_saves(region, Recipe("keep"), ())


def _offloaded(region: RegionProfile, at: Sequence[float]) -> Iterator[Option]:
    """All saves; and the largest that make up such shares of the bytes. Dead saves are not worth the link."""
    movable = [save for save in region.saves if save.nbytes > 0]
    total = sum(save.nbytes for save in movable)
    largest_first = sorted(movable, key=lambda save: (-save.nbytes, save.at_s))
    taken: list[Save] = []
    marks = list(at)
    for save in largest_first:
        taken.append(save)
        if len(taken) < len(movable) and marks and sum(s.nbytes for s in taken) >= marks[0] * total:
            while marks and sum(s.nbytes for s in taken) >= marks[0] * total:
                marks.pop(0)
            sites = _with_sharing(region, {s.index for s in taken})
            yield _of_saves(region, Recipe("offload", sites=sites), taken)
    if movable:
        sites = _with_sharing(region, {s.index for s in movable}) if region.has_saves_in_vain else None
        yield _of_saves(region, Recipe("offload", sites=sites), movable)


def _with_sharing(region: RegionProfile, sites: set[int]) -> tuple[int, ...]:
    """With the saves that share their memory, or that of another region's save: one that stays would keep it there."""
    sharing = {save.index for save in region.saves if save.shares in sites or save.is_of_another_region}
    return tuple(sorted(sites | sharing))


def _of_saves(region: RegionProfile, recipe: Recipe, moved: Sequence[Save]) -> Option:
    moved_bytes = sum(save.nbytes for save in moved)
    scale = region.backward_s / region.forward_s if region.forward_s > 0 else 0.0
    in_order = sorted(moved, key=lambda save: (save.at_s, save.index))
    parcels = (Moved(s.nbytes, s.at_s, max(0.0, region.forward_s - s.at_s) * scale) for s in in_order)
    return Option(
        recipe=recipe,
        kept_bytes=region.saved_bytes + region.behind_bytes - moved_bytes,
        moved=tuple(parcels),
        again_s=0.0,
        backward_work_bytes=_work_bytes(region, moved),
        comes_together=False,
    )


def _work_bytes(region: RegionProfile, moved: Sequence[Save]) -> int:
    """Without a second run. What is back and was not asked for yet counts as fetched ahead."""
    short_lived = region.short_lived_bytes
    if not moved:
        return short_lived
    if region.moved_work_bytes > 0:
        return region.moved_work_bytes  # counts everything that is at hand, what stays too
    # With the largest comes its gradient: where a region was measured, with everything still there, the peak may have
    # been at another time. (A node that asks for two at once needs more.)
    return short_lived + 2 * max(save.nbytes for save in moved)


def _recomputed(region: RegionProfile) -> Iterator[Option]:
    yield _running_again(region, Recipe("recompute", inputs="keep"), ())
    if region.may_move_inputs:
        yield _running_again(region, Recipe("recompute"), ())


def _selective(region: RegionProfile) -> Iterator[Option]:
    """The dearest per byte, one after the other."""
    dearest_first = _dearest_first(region)
    for count in range(1, len(dearest_first) + 1):
        held = _held(region, dearest_first[:count])
        everything = Recipe(
            "selective",
            ops=tuple(OP_CLASSES),
            sites=tuple(sorted(each.call for each in held)),
            beyond=tuple(sorted(each.call for each in held if each.is_beyond)),
            inputs="offload" if region.may_move_inputs else "keep",
        )
        yield _running_again(region, everything, held)
        yield _running_again(region, replace(everything, inputs="keep", outputs="keep"), held)
        if region.may_move_inputs:
            yield _running_again(region, replace(everything, outputs="keep"), held)


@dataclass(frozen=True)
class _Holdable:
    """What may be held of a dear call: its outputs, or the saves that they lead to.

    Attributes:
        call: its index.
        nbytes, at_s: as those of `Dear`.
        spared_s: what does not run again then.
        count: tensors that are held.
        left_out: operators that do not run again, but the call itself.
    """

    call: int
    nbytes: int
    at_s: float
    spared_s: float
    count: int
    is_beyond: bool = False
    left_out: int = 0

    @property
    def worth(self) -> float:
        """Seconds for each byte."""
        return self.spared_s / max(1, self.nbytes)


def _dearest_first(region: RegionProfile) -> list[Dear]:
    """Per byte of what they return."""
    useful = [dear for dear in region.dear if dear.nbytes > 0 and dear.again_s > 0]
    return sorted(useful, key=lambda dear: (-_outputs(dear).worth, dear.index))


def _held(region: RegionProfile, chosen: Sequence[Dear]) -> list[_Holdable]:
    """Of each what is worth more, outputs or saves, where all that is given what the outputs lead to is chosen too."""
    calls = {dear.index for dear in chosen}
    held: list[_Holdable] = []
    for dear in chosen:
        outputs, beyond = _outputs(dear), _beyond(region, dear)
        may_be_left_out = bool(dear.led) and calls >= set(dear.users)
        held.append(beyond if may_be_left_out and beyond.worth > outputs.worth else outputs)
    return held


def _outputs(dear: Dear) -> _Holdable:
    return _Holdable(dear.index, dear.nbytes, dear.at_s, dear.again_s, 1)


def _beyond(region: RegionProfile, dear: Dear) -> _Holdable:
    saves = {save.index: save for save in region.saves}
    led = [saves[index] for index in dear.led if index in saves]
    owners = {save.index if save.shares < 0 else save.shares for save in led}
    nbytes = sum(saves[owner].nbytes for owner in owners)
    at_s = max((save.at_s for save in led), default=dear.at_s)
    return _Holdable(dear.index, nbytes, at_s, dear.again_s + dear.led_s, len(owners), True, dear.led_ops)


def _running_again(region: RegionProfile, recipe: Recipe, held: Sequence[_Holdable]) -> Option:
    inputs = [Moved(save.nbytes, 0.0, 0.0) for save in region.inputs if save.nbytes > 0]
    outputs = [Moved(each.nbytes, each.at_s, 0.0) for each in sorted(held, key=lambda each: (each.at_s, each.call))]
    moved = (inputs if recipe.inputs == "offload" else []) + (outputs if recipe.outputs == "offload" else [])
    kept = (inputs if recipe.inputs == "keep" else []) + (outputs if recipe.outputs == "keep" else [])
    kept_bytes = sum(parcel.nbytes for parcel in kept)
    return Option(
        recipe=recipe,
        kept_bytes=kept_bytes + region.behind_bytes,
        moved=tuple(moved),
        again_s=max(0.0, region.again_s - sum(each.spared_s for each in held)),  # measured apart, so not to the digit
        backward_work_bytes=max(0, region.backward_work_bytes - kept_bytes),
        comes_together=True,
        held=len(held),
        left_out=sum(each.left_out for each in held),
    )


def _without_dominated(options: Sequence[Option]) -> list[Option]:
    """Without those that another one is at least as good as in every respect. The first always stays."""
    first, *others = options
    return [first, *(option for option in others if not any(_is_better(other, option) for other in options))]


def _costs(option: Option) -> tuple[float, ...]:
    return option.kept_bytes, option.moved_bytes, option.again_s, option.backward_work_bytes


def _is_better(one: Option, other: Option) -> bool:
    mine, yours = _costs(one), _costs(other)
    return mine != yours and all(a <= b for a, b in zip(mine, yours, strict=True))


def queueing_s(option: Option, host: Host, region: HostTime) -> float:
    """What the choice adds to what its region takes the host, in forward and again in backward."""
    seconds = host.moved_s * len(option.moved)
    if option.recipe.recomputes:
        seconds += host.frame_s
    if option.held:
        seconds += host.op_s * (region.ops + _LEFT_OUT * option.left_out) + host.held_s * option.held
    return seconds


def why(option: Option, region: RegionProfile) -> str:
    """What the choice means for the region, in a few words."""
    recipe = option.recipe
    if recipe.action == "keep":
        return f"{format_bytes(option.kept_bytes)} stay: nothing is gained by moving them, or the budget allows it"
    if recipe.action == "offload":
        return f"the link carries {format_bytes(option.moved_bytes)} of {format_bytes(region.saved_bytes)} meanwhile"
    spared = region.again_s - option.again_s
    freed = format_bytes(region.saved_bytes + region.behind_bytes - option.kept_bytes)
    if recipe.action == "recompute":
        return f"{freed} freed for {option.again_s * 1e3:.1f} ms again; inputs {_place(recipe.inputs)}"
    return (
        f"{freed} freed for {option.again_s * 1e3:.1f} ms again; {len(recipe.sites or ())} dear outputs "
        f"{_place(recipe.outputs)} spare {spared * 1e3:.1f} ms"
    )


def _place(place: str) -> str:
    return "stay" if place == "keep" else "travel"
