"""Options of one region: every recipe worth considering, with its cost. Pure."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypedDict

import numpy as np

from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import OP_CLASSES, Recipe
from ebbtide._profiling.profile import ExpensiveOp, Host, HostTime, RegionProfile, SavedTensor
from ebbtide._utils.sizes import format_bytes


@dataclass(frozen=True)
class Moved:
    """A parcel that leaves in forward and comes back.

    Attributes:
        nbytes: size.
        at_s: time from the begin of the region's forward until the parcel can leave.
        needed_s: time from the begin of the region's backward (or recomputation) until the parcel is needed.
        held_for: number of later regions in whose forward the memory stays although the parcel has left.
    """

    nbytes: int
    at_s: float
    needed_s: float
    held_for: int = 0


class Held(NamedTuple):
    """Memory that the caller holds in forward of `held_for` later regions."""

    nbytes: int
    held_for: int


@dataclass(frozen=True)
class Option:
    """A recipe for one region, with its cost.

    Attributes:
        recipe: as a plan would hold it.
        kept_bytes: on the device from the region's forward to the region's backward, or saved behind the region.
        moved: parcels, in order of forward.
        recompute_s: duration of the recomputation, by ebbtide or in the compiled backward.
        forward_work_bytes: most that forward allocates meanwhile, saved tensors not counted.
        backward_work_bytes: most allocated while the region's backward runs, beyond the kept bytes of all regions:
            tensors already needed, recomputed or short-lived. Less what was saved behind the region, because backward
            has gone through what follows already; may be negative.
        is_recompute_batch: whether backward needs all parcels at its begin.
        newest_bytes: part of `forward_work_bytes` that parcels on the way out may take too: the newest does not leave
            before the next is saved, and recomputed regions send their inputs alone.
        saved_outputs: number of expensive calls whose outputs recomputation reuses.
        pruned_ops: number of further operators that recomputation skips.
        derived: number of derived tensors.
        derived_ops: number of further operators that derive them.
        held: inputs held by the caller that neither stay nor leave as they are.
        keeps: memory that other regions save as well and the option keeps: the number (`SavedTensor.common`), and what
            the memory adds to `kept_bytes`.
        frees: memory that other regions save as well, counted here and freed unless another region keeps the memory.
        shares: numbers of memory that the region saves or is passed, and another region counts.
    """

    recipe: Recipe
    kept_bytes: int
    moved: tuple[Moved, ...]
    recompute_s: float
    forward_work_bytes: int
    backward_work_bytes: int
    is_recompute_batch: bool
    newest_bytes: int = 0
    saved_outputs: int = 0
    pruned_ops: int = 0
    derived: int = 0
    derived_ops: int = 0
    held: tuple[Held, ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()
    frees: tuple[tuple[int, int], ...] = ()
    shares: frozenset[int] = frozenset()

    @cached_property
    def moved_bytes(self) -> int:
        return sum(parcel.nbytes for parcel in self.moved)

    @cached_property
    def has_held_parcels(self) -> bool:
        return any(parcel.held_for > 0 for parcel in self.moved)

    @cached_property
    def all_held(self) -> tuple[Held, ...]:
        """`held`, and the parcels among the inputs that the caller holds."""
        return *self.held, *(Held(parcel.nbytes, parcel.held_for) for parcel in self.moved if parcel.held_for > 0)


Settled: TypeAlias = dict[tuple[int, int, int], Option]
"""Options with shared memory counted: by the identity of the option before, and the bytes kept and in backward."""

_MARKS = tuple(step / 8 for step in range(1, 8))


def options_of(region: RegionProfile, only_moves: bool = False) -> tuple[Option, ...]:
    """All options worth considering, without recomputation if `only_moves`. The first keeps everything."""
    options = [_of_tensors(region, Recipe("keep"))]
    for derived in _derived(region):
        if derived:
            options.append(_of_tensors(region, Recipe("keep", derive=_with_sharing(region, derived)), (), derived))
        options += _offloaded(region, derived, _MARKS)
    if not only_moves and region.recompute_s > 0:
        options += [*_recomputed(region), *_selective(region)]
    for point in () if only_moves else _convex(region):
        options.append(_of_tensors(point, Recipe("keep", activation_memory_budget=point.activation_memory_budget)))
        options += _offloaded(point, (), _MARKS)
    return tuple(_without_dominated(options))


def _convex(region: RegionProfile) -> list[RegionProfile]:
    """The points of a compiled region that no mixture of two others, or of one and the region itself, beats."""
    by_bytes = sorted([region, *region.points], key=lambda each: (each.saved_bytes, each.partition_s))
    hull: list[RegionProfile] = []
    for each in by_bytes:
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], each):
            hull.pop()
        if not hull or each.partition_s < hull[-1].partition_s:
            hull.append(each)
    return [each for each in hull if each is not region]


def _is_above(middle: RegionProfile, left: RegionProfile, right: RegionProfile) -> bool:
    """Whether `middle` takes at least as long as a mixture of the others that saves the same bytes."""
    seconds, nbytes = right.partition_s - left.partition_s, right.saved_bytes - left.saved_bytes
    own_bytes = middle.saved_bytes - left.saved_bytes
    return (middle.partition_s - left.partition_s) * nbytes >= seconds * own_bytes


def _derived(region: RegionProfile) -> Iterator[list[SavedTensor]]:
    """Nothing; and the saved tensors that are cheapest to derive, from few to all."""
    derivable = [tensor for tensor in region.saved_tensors if tensor.derive_s > 0 and tensor.nbytes > 0]
    cheapest_first = sorted(derivable, key=lambda tensor: (tensor.derive_s / tensor.nbytes, tensor.index))
    total = sum(tensor.nbytes for tensor in cheapest_first)
    steps = THRESHOLDS.derive_steps
    marks = [total * step / steps for step in range(steps + 1)]
    taken: list[SavedTensor] = []
    for tensor in cheapest_first:
        if sum(each.nbytes for each in taken) >= marks[0]:
            yield list(taken)
            while sum(each.nbytes for each in taken) >= marks[0]:
                marks.pop(0)
        taken.append(tensor)
    yield taken


def option_for(region: RegionProfile, recipe: Recipe) -> Option:
    """The cost of any recipe in `region`."""
    region = region.at(recipe.activation_memory_budget)
    if not recipe.recomputes:
        derived = [tensor for tensor in region.saved_tensors if _derives(recipe, tensor)]
        movable = [tensor for tensor in region.saved_tensors if tensor.nbytes > 0 and not _derives(recipe, tensor)]
        moved = [tensor for tensor in movable if recipe.action == "offload" and _takes(recipe, tensor)]
        return _of_tensors(region, recipe, moved, derived)
    chosen = [op for op in region.expensive_ops if _takes(recipe, op)] if recipe.action == "selective" else []
    return _recomputing(
        region, recipe, [_pruned(region, op) if op.index in recipe.prune else _outputs(op) for op in chosen]
    )


def _takes(recipe: Recipe, row: SavedTensor | ExpensiveOp) -> bool:
    return recipe.sites is None or row.index in recipe.sites


def _derives(recipe: Recipe, tensor: SavedTensor) -> bool:
    is_chosen = recipe.derive is None or tensor.index in recipe.derive
    return is_chosen and tensor.derive_s > 0 and tensor.nbytes > 0


def _offloaded(region: RegionProfile, derived: Sequence[SavedTensor], at: Sequence[float]) -> Iterator[Option]:
    """All saved tensors but the derived; and the largest of them that make up the shares `at` of the bytes."""
    no_moves = {tensor.index for tensor in derived}
    movable = [tensor for tensor in region.saved_tensors if tensor.nbytes > 0 and tensor.index not in no_moves]
    derive = _with_sharing(region, derived) if derived else ()
    everything = Recipe("offload", derive=derive, activation_memory_budget=region.activation_memory_budget)
    total = sum(tensor.nbytes for tensor in movable)
    largest_first = sorted(movable, key=lambda tensor: (-tensor.nbytes, tensor.at_s))
    taken: list[SavedTensor] = []
    marks = list(at)
    for tensor in largest_first:
        taken.append(tensor)
        if len(taken) < len(movable) and marks and sum(s.nbytes for s in taken) >= marks[0] * total:
            while marks and sum(s.nbytes for s in taken) >= marks[0] * total:
                marks.pop(0)
            yield _of_tensors(region, replace(everything, sites=_with_sharing(region, taken)), taken, derived)
    if movable:
        # Tensors without use in backward are not worth the link.
        sites = _with_sharing(region, movable) if region.has_useless_moves else None
        yield _of_tensors(region, replace(everything, sites=sites), movable, derived)


def _with_sharing(region: RegionProfile, tensors: Sequence[SavedTensor]) -> tuple[int, ...]:
    """Add tensors with shared memory: a single tensor that stays would keep the memory on the device."""
    sites = {tensor.index for tensor in tensors}
    sharing = {each.index for each in region.saved_tensors if each.shares in sites or each.is_of_another_region}
    return tuple(sorted(sites | sharing))


def _of_tensors(
    region: RegionProfile, recipe: Recipe, moved: Sequence[SavedTensor] = (), derived: Sequence[SavedTensor] = ()
) -> Option:
    freed_bytes = sum(tensor.nbytes for tensor in (*moved, *derived))
    scale = region.backward_s / region.forward_s if region.forward_s > 0 else 0.0
    in_order = sorted(moved, key=lambda tensor: (tensor.at_s, tensor.index))
    times = [(tensor, tensor.at_s * region.pace) for tensor in in_order]
    parcels = [_moved(tensor, at_s, max(0.0, region.forward_s - at_s) * scale) for tensor, at_s in times]
    # Where reads were recorded the region saved nothing: the working memory includes the newest tensor until the region
    # saves the next, and later the newest waits with older parcels. Otherwise everything stayed in forward.
    newest_bytes = max((parcel.nbytes for parcel in parcels), default=0) if region.has_reads else 0
    return Option(
        recipe=recipe,
        kept_bytes=region.saved_bytes + region.after_bytes - freed_bytes,
        moved=tuple(parcels),
        recompute_s=region.partition_s + sum(tensor.derive_s for tensor in derived),
        forward_work_bytes=region.forward_work_bytes + newest_bytes + _leaving_bytes(region, moved),
        backward_work_bytes=_backward_work_bytes(region, moved, derived) - region.after_bytes,
        is_recompute_batch=False,
        newest_bytes=newest_bytes,
        derived=len(derived),
        derived_ops=sum(tensor.derive_ops - 1 for tensor in derived),
        held=_held(region, region.saved_tensors, {t.index for t in derived} | {t.index for t in moved if t.is_copied}),
        **_of_several(region, _kept(region, recipe, {tensor.index for tensor in (*moved, *derived)})),
    )


def _kept(region: RegionProfile, recipe: Recipe, freed: Collection[int]) -> Iterator[SavedTensor]:
    """Saved tensors that stay, where indices `freed` leave; a tensor counted in another region leaves by a site too."""
    for tensor in region.saved_tensors:
        leaves = recipe.action == "offload" and tensor.nbytes == 0 and _takes(recipe, tensor)
        if tensor.index not in freed and not leaves:
            yield tensor


class _OfSeveral(TypedDict):
    keeps: tuple[tuple[int, int], ...]
    frees: tuple[tuple[int, int], ...]
    shares: frozenset[int]


def _of_several(region: RegionProfile, kept: Iterable[SavedTensor]) -> _OfSeveral:
    """`Option.keeps`, `frees` and `shares`, if the region keeps the saved tensors or inputs `kept`."""
    common = [tensor for tensor in (*region.saved_tensors, *region.inputs) if tensor.common]
    own = {tensor.common: tensor.nbytes for tensor in common if tensor.nbytes}
    keeps = {tensor.common: own.get(tensor.common, 0) for tensor in kept if tensor.common}
    return {
        "keeps": tuple(keeps.items()),
        "frees": tuple(each for each in own.items() if each[0] not in keeps),
        "shares": frozenset(tensor.common for tensor in common if tensor.common not in own),
    }


def choice_of(regions: Sequence[RegionProfile], recipes: Iterable[Recipe]) -> tuple[Option, ...]:
    """The costs of any recipes, one for each region."""
    return settled([option_for(region, recipe) for region, recipe in zip(regions, recipes, strict=True)])


def settled(choice: Sequence[Option], known: Settled | None = None) -> tuple[Option, ...]:
    """The options of all regions. Memory that several regions save stays if one region keeps it, and is otherwise back
    as soon as backward comes to the last region that needs it.

    `known`: of options that live as long, reused and added to.
    """
    known = {} if known is None else known
    kept = {number for option in choice for number, _ in option.keeps}
    last = {number: place for place, option in enumerate(choice) for number in option.shares}
    stays, is_back = [0] * len(choice), [0] * len(choice)
    for place, option in enumerate(choice):
        for number, nbytes in option.frees:
            if number in kept:
                stays[place] += nbytes
            for behind in range(place + 1, 0 if number in kept else last.get(number, 0) + 1):
                is_back[behind] += nbytes
    found = list(choice)
    for place, (option, more, back) in enumerate(zip(choice, stays, is_back, strict=True)):
        if more or back:
            key = id(option), more, back
            if key not in known:
                work_bytes = option.backward_work_bytes + back
                known[key] = replace(option, kept_bytes=option.kept_bytes + more, backward_work_bytes=work_bytes)
            found[place] = known[key]
    return tuple(found)


def _moved(tensor: SavedTensor, at_s: float, needed_s: float) -> Moved:
    return Moved(tensor.transfer_bytes, at_s, needed_s, 0 if tensor.is_copied else tensor.held_for)


def _held(region: RegionProfile, saved: Sequence[SavedTensor], absent: Collection[int]) -> tuple[Held, ...]:
    """What the caller holds of the inputs for later regions, without those among the `saved` tensors that stay or leave
    as they are. `absent`: indices of saved tensors that do neither."""
    if all(tensor.held_for == 0 for tensor in region.inputs):
        return ()
    nbytes: Counter[int] = Counter()
    for tensor in region.inputs:
        nbytes[tensor.held_for] += tensor.nbytes
    for tensor in saved:
        nbytes[tensor.held_for] -= tensor.nbytes if tensor.index not in absent else 0
    return tuple(Held(most, held_for) for held_for, most in nbytes.items() if held_for > 0 and most > 0)


def _leaving_bytes(region: RegionProfile, moved: Sequence[SavedTensor]) -> int:
    """Most that moved tensors take in forward besides the parcels that wait: the caller holds the region's inputs, and
    some tensors leave as copies."""
    held_bytes = sum(tensor.nbytes for tensor in region.inputs) if moved else 0
    made = (tensor.packing_bytes + (0 if region.has_reads else tensor.nbytes) for tensor in moved)
    return held_bytes + max(made, default=0)


def _backward_work_bytes(region: RegionProfile, moved: Sequence[SavedTensor], derived: Sequence[SavedTensor]) -> int:
    """Most that backward allocates beyond kept tensors, without recomputation of the region, if `moved` and `derived`
    are not on the device. Tensors that are back and not yet needed count as prefetched.

    Operands of a derived tensor are back, or derived, before their own reader asks. The derived tensor is computed
    before its reader allocates: results in between come on top of the tensor and a gradient of the same size, or of the
    gradients on the device.
    """
    absent = {tensor.index: tensor for tensor in (*moved, *derived)}
    if not absent:
        return region.short_lived_bytes
    all_there = region.short_lived_bytes + sum(tensor.nbytes for tensor in absent.values())
    # Without measurement the peak may have been at another time: the largest tensor comes with its gradient. (A node
    # that needs two tensors at once needs more.)
    unmeasured = region.short_lived_bytes + 2 * max(tensor.nbytes for tensor in absent.values())
    at_most = min(region.moved_work_bytes, all_there) if region.moved_work_bytes > 0 else unmeasured
    can_derive = {tensor.index for tensor in derived}
    needed = {tensor.index: _operands(tensor, absent, can_derive) for tensor in derived}
    # An operand read before the tensor derived from the operand stays until the tensor is derived.
    lasting = {k for each in derived for k in needed[each.index] if 0 < absent[k].read_at < each.read_at}
    early, kept_bytes, most = set(lasting), 0, 0
    for tensor in region.in_order_of_reads:
        early -= {tensor.index} - lasting
        early |= needed.get(tensor.index, set())
        early_bytes = sum(absent[each].nbytes for each in early)
        kept_bytes += tensor.nbytes if tensor.index not in absent else 0
        own_bytes = min(tensor.read_bytes - kept_bytes, all_there - early_bytes) if region.has_reads else at_most
        work_bytes = early_bytes + own_bytes
        most = max(most, work_bytes)
        if tensor.index in needed:
            held_bytes = max(early_bytes + 2 * tensor.nbytes, work_bytes)
            most = max(most, held_bytes + tensor.derive_work_bytes)
    return most


def _operands(tensor: SavedTensor, absent: Mapping[int, SavedTensor], can_derive: Collection[int]) -> set[int]:
    """Absent saved tensors needed to derive `tensor`, directly or to derive an operand."""
    found: set[int] = set()
    asked = [tensor]
    while asked:
        new = absent.keys() & set(asked.pop().derived_from) - found
        found |= new
        asked += (absent[index] for index in new if index in can_derive)
    return found


def _recomputed(region: RegionProfile) -> Iterator[Option]:
    yield _recomputing(region, Recipe("recompute", inputs="keep"), ())
    if region.may_move_inputs:
        yield _recomputing(region, Recipe("recompute"), ())


def _selective(region: RegionProfile) -> Iterator[Option]:
    """The expensive calls with the best seconds per byte: the best alone, the best two, and on to all."""
    best_first = _best_per_byte_first(region)
    for count in range(1, len(best_first) + 1):
        reused = _reused(region, best_first[:count])
        everything = Recipe(
            "selective",
            ops=tuple(OP_CLASSES),
            sites=tuple(sorted(each.call for each in reused)),
            prune=tuple(sorted(each.call for each in reused if each.is_pruned)),
            inputs="offload" if region.may_move_inputs else "keep",
        )
        yield _recomputing(region, everything, reused)
        yield _recomputing(region, replace(everything, inputs="keep", outputs="keep"), reused)
        if region.may_move_inputs:
            yield _recomputing(region, replace(everything, outputs="keep"), reused)


@dataclass(frozen=True)
class _Reusable:
    """Tensors saved so that recomputation skips an expensive call: the outputs, or the downstream tensors.

    Attributes:
        call: index of the call.
        nbytes, transfer_bytes: size on the device and on the link.
        at_s: as in `ExpensiveOp`.
        spared_s: recomputation time saved.
        is_pruned: whether the downstream tensors are saved.
        pruned_ops: number of operators skipped besides the call.
    """

    call: int
    nbytes: int
    transfer_bytes: int
    at_s: float
    spared_s: float
    is_pruned: bool = False
    pruned_ops: int = 0

    @property
    def worth(self) -> float:
        """Seconds per byte."""
        return self.spared_s / max(1, self.nbytes)


def _best_per_byte_first(region: RegionProfile) -> list[ExpensiveOp]:
    useful = [op for op in region.expensive_ops if op.nbytes > 0 and op.recompute_s > 0]
    return sorted(useful, key=lambda op: (-_outputs(op).worth, op.index))


def _reused(region: RegionProfile, chosen: Sequence[ExpensiveOp]) -> list[_Reusable]:
    """Of each call the outputs or the downstream tensors, whichever are worth more.

    Downstream tensors are possible only if all users of the tensors in between are chosen too.
    """
    calls = {op.index for op in chosen}
    reused: list[_Reusable] = []
    for op in chosen:
        outputs, pruned = _outputs(op), _pruned(region, op)
        may_be_pruned = bool(op.downstream) and calls >= set(op.users)
        reused.append(pruned if may_be_pruned and pruned.worth > outputs.worth else outputs)
    return reused


def _outputs(op: ExpensiveOp) -> _Reusable:
    return _Reusable(op.index, op.nbytes, op.nbytes, op.at_s, op.recompute_s)


def _pruned(region: RegionProfile, op: ExpensiveOp) -> _Reusable:
    tensors = {tensor.index: tensor for tensor in region.saved_tensors}
    downstream = [tensors[index] for index in op.downstream if index in tensors]
    owners = [tensors[each] for each in {tensor.index if tensor.shares < 0 else tensor.shares for tensor in downstream}]
    nbytes, transfer_bytes = sum(each.nbytes for each in owners), sum(each.transfer_bytes for each in owners)
    at_s = max((tensor.at_s for tensor in downstream), default=op.at_s)
    spared_s = op.recompute_s + op.downstream_s
    return _Reusable(op.index, nbytes, transfer_bytes, at_s, spared_s, True, op.downstream_ops)


def _recomputing(region: RegionProfile, recipe: Recipe, reused: Sequence[_Reusable]) -> Option:
    inputs = [_moved(tensor, 0.0, 0.0) for tensor in region.inputs if tensor.nbytes > 0]
    in_order = sorted(reused, key=lambda each: (each.at_s, each.call))
    outputs = [Moved(each.transfer_bytes, each.at_s * region.pace, 0.0) for each in in_order]
    leaving_inputs = inputs if recipe.inputs == "offload" else []
    leaving_outputs = outputs if recipe.outputs == "offload" else []
    # The caller holds the inputs while the region runs. They are the last to leave unless outputs follow.
    input_bytes = sum(parcel.nbytes for parcel in leaving_inputs)
    kept = (region.inputs if recipe.inputs == "keep" else (), reused if recipe.outputs == "keep" else ())
    kept_bytes = sum(each.nbytes for each in itertools.chain(*kept))
    spared_s = sum(each.spared_s for each in reused)
    work_bytes = region.backward_work_bytes
    if recipe.action == "recompute" and region.recompute_work_bytes > 0:
        work_bytes = region.recompute_work_bytes  # beside saved outputs tensors live longer
    return Option(
        recipe=recipe,
        kept_bytes=kept_bytes + region.after_bytes,
        moved=(*leaving_inputs, *leaving_outputs),
        recompute_s=max(0.0, region.recompute_s - spared_s),  # measured apart, so the sum may be larger
        forward_work_bytes=region.forward_work_bytes + input_bytes,
        backward_work_bytes=max(0, work_bytes - kept_bytes) - region.after_bytes,
        is_recompute_batch=True,
        newest_bytes=0 if leaving_outputs else input_bytes,
        saved_outputs=len(reused),
        pruned_ops=sum(each.pruned_ops for each in reused),
        held=_held(region, region.inputs, {t.index for t in region.inputs if t.is_copied and leaving_inputs}),
        **_of_several(region, kept[0]),
    )


def _without_dominated(options: Sequence[Option]) -> list[Option]:
    """Drop options that another option beats in every respect, but never the first."""
    costs = np.array(
        [
            (each.kept_bytes, each.moved_bytes, each.recompute_s, each.backward_work_bytes, len(each.keeps))
            for each in options
        ]
    )
    one, other = costs[:, None], costs[None]
    is_worse = ((one <= other).all(axis=2) & (one != other).any(axis=2)).any(axis=0)
    return [option for option, worse in zip(options, is_worse, strict=True) if option is options[0] or not worse]


def launch_overhead_s(option: Option, host: Host, region: HostTime) -> float:
    """CPU time that the option adds to the region's launches in forward, and again in backward."""
    seconds = host.moved_s * len(option.moved)
    seconds += host.derived_s * option.derived + host.derived_op_s * option.derived_ops
    if option.recipe.recomputes:
        seconds += host.frame_s
    elif option.recipe.action != "keep" or option.recipe.derives:
        seconds += host.hook_s * region.saved
    if option.saved_outputs:
        # A pruned operator costs about `op_s`, little in forward and twice in backward: measured in steps of a small
        # Llama bound by the host.
        seconds += host.op_s * (region.ops + option.pruned_ops) + host.saved_output_s * option.saved_outputs
    return seconds


def describe(option: Option, region: RegionProfile) -> str:
    """The effect of the option on the region, for people."""
    recipe = option.recipe
    if recipe.derives:
        moved = f", the link carries {format_bytes(option.moved_bytes)} more" if option.moved else ""
        freed = format_bytes(region.saved_bytes + region.after_bytes - option.kept_bytes - option.moved_bytes)
        return f"{freed} freed for {option.recompute_s * 1e3:.1f} ms of derivation{moved}"
    if recipe.activation_memory_budget is not None:
        moved = f", the link carries {format_bytes(option.moved_bytes)}" if option.moved else ""
        freed = format_bytes(region.saved_bytes + region.after_bytes - option.kept_bytes - option.moved_bytes)
        return f"{freed} freed for {option.recompute_s * 1e3:.1f} ms in the compiled backward{moved}"
    if recipe.action == "keep":
        return f"{format_bytes(option.kept_bytes)} stay: a move gains nothing, or the budget has room"
    if recipe.action == "offload":
        return f"the link carries {format_bytes(option.moved_bytes)} of {format_bytes(region.saved_bytes)} meanwhile"
    spared = region.recompute_s - option.recompute_s
    freed = format_bytes(region.saved_bytes + region.after_bytes - option.kept_bytes)
    text = f"{freed} freed for {option.recompute_s * 1e3:.1f} ms of recomputation"
    return text if recipe.action == "recompute" else f"{text}; the saved outputs spare {spared * 1e3:.1f} ms"
