"""Profiles as plain data: measurements of one training step, to and from JSON. Seconds and bytes."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from ebbtide._errors import PlanError
from ebbtide._utils.serialize import read_file, write_file
from ebbtide._utils.sizes import PACKING_BYTES, format_bytes
from ebbtide._utils.text import as_range, consecutive, plain_table

FORMAT = 9
UNSHARED, OUTSIDE = -1, -2
"""Values of `SavedTensor.shares` besides an index."""


class OtherVersionError(PlanError):
    """A profile file of another version of ebbtide."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a region saves or is passed, in bytes that may move and that backward needs.

    Attributes:
        index: number of the saved tensor in the region, as counted by `Recipe.sites`.
        nbytes: size on the device; 0 if another saved tensor's parcel holds the memory, or a tensor saved outside of
            the regions keeps the memory alive.
        at_s: time from the begin of the region's forward until the tensor exists.
        shares: index of the saved tensor of this region with the same memory: both have to move to free any. OUTSIDE
            if a tensor saved outside of the regions keeps the memory alive: a move would free nothing. UNSHARED if no
            saved tensor of the region has the same memory.
        derive_s: time to compute the tensor from other saved tensors (see `Recipe.derive`); 0 if impossible.
        derive_ops: number of operators that do.
        derive_work_bytes: results in between, allocated meanwhile.
        derived_from: indices of the region's saved tensors among the operands.
        is_bits: whether the tensor is boolean, and travels as bits: an eighth of `nbytes`.
        is_gathered: whether the tensor travels as a dense copy, because it reaches over many times its bytes.
        read_at: place of the tensor's first read among those of backward, from 1 on; 0 if another saved tensor's parcel
            holds the memory, if backward never reads the tensor, or if no read was recorded.
        read_bytes: most that backward allocates from then to the next first read, without those of the region's saved
            tensors that it has not read yet. The first also counts what is allocated before. 0 where `read_at` is.
        held_for: number of later regions in whose forward the caller still holds an input, made in forward of the
            regions: a skip connection. The memory stays until then, whether the parcel has left or not.
        common: number of the memory among those that several regions save or are passed, from 1 on; 0: this region
            alone. One region counts the bytes. The memory stays if any of the regions keeps it.
    """

    index: int
    nbytes: int
    at_s: float
    shares: int = dataclasses.field(default=UNSHARED, metadata={"least": OUTSIDE})
    derive_s: float = 0.0
    derive_ops: int = 0
    derive_work_bytes: int = 0
    derived_from: tuple[int, ...] = ()
    is_bits: bool = False
    is_gathered: bool = False
    read_at: int = 0
    read_bytes: int = 0
    held_for: int = 0
    common: int = 0

    @property
    def transfer_bytes(self) -> int:
        """Size of the parcel on the link, and on the device on the way."""
        return -(-self.nbytes // 8) if self.is_bits else self.nbytes

    @property
    def packing_bytes(self) -> int:
        """Allocated while the tensor leaves: a parcel other than the tensor's memory, and what is made on the way."""
        dense_bytes = self.nbytes if self.is_gathered else 0
        return dense_bytes + (self.transfer_bytes + min(self.nbytes, PACKING_BYTES) if self.is_bits else 0)

    @property
    def is_copied(self) -> bool:
        """Whether a copy leaves on the device already, in another form than the tensor's memory."""
        return self.is_bits or self.is_gathered

    @property
    def is_of_another_region(self) -> bool:
        """Whether the memory moves with a saved tensor of another region."""
        return self.nbytes == 0 and self.shares == UNSHARED


@dataclass(frozen=True)
class ExpensiveOp:
    """One call of an expensive operator in a region.

    Attributes:
        index: number of the call in the region, as counted by `Recipe.sites` of a selective recipe.
        nbytes: size of the outputs.
        at_s: time from the begin of the region's forward (or recomputation) until the outputs exist.
        recompute_s: duration of the call.
        op: name of the operator, "aten::mm".
        downstream: indices of the saved tensors computed from the outputs by operators that are not expensive; empty
            if the outputs themselves have to be there (see `Recipe.prune`).
        downstream_s: duration of the operators in between that serve nothing else.
        downstream_ops: number of the operators in between.
        users: indices of the expensive calls that read the tensors in between.
    """

    index: int
    nbytes: int
    at_s: float
    recompute_s: float
    op: str
    downstream: tuple[int, ...] = ()
    downstream_s: float = 0.0
    downstream_ops: int = 0
    users: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegionProfile:
    """One pass through a region.

    Attributes:
        name: FQN of the region's module.
        forward_s, backward_s: durations, backward without recomputation. Each includes the operators outside of all
            regions that follow, up to the next region.
        recompute_s: duration of the recomputation with no outputs saved; 0 if never measured.
        saved_tensors: tensors that autograd saves in the region and that may move.
        not_movable_bytes: saved in the region, but not movable (small, or of an unknown kind). Recomputation frees
            these bytes too.
        inputs: tensors passed to the region.
        expensive_ops: calls of expensive operators in the recomputation; empty if a compiler hides the operators.
        forward_work_bytes: most that forward allocates beyond the memory at its begin, saved tensors not counted, with
            what the caller holds then and no region saves or is passed.
        backward_work_bytes: most that recomputation and backward allocate together, inputs included, where saved
            tensors live as long as kept ones.
        recompute_work_bytes: the same where each recomputed tensor belongs to the node that reads it; 0 if not
            measured.
        grad_bytes: memory that backward leaves allocated.
        moved_work_bytes: the largest `read_bytes`; 0 if not measured.
        unused_bytes: part of `saved_tensors` that backward never asks for.
        after_bytes: saved outside of all regions between this region and the next. Stays on the device in any case.
        has_dead_tensors: whether the region saves further tensors in a branch without use, freed when forward ends.
        points: a compiled region at other activation memory budgets (see `Recipe`), as far as measured. `forward_s`,
            `backward_s` and `recompute_s` of a point are those of the region itself.
        activation_memory_budget: of a point; None: the region as the user compiled it.
        partition_s: of a point: forward and backward take so much longer than those of the region itself.
    """

    name: str
    forward_s: float
    backward_s: float
    recompute_s: float
    saved_tensors: tuple[SavedTensor, ...]
    not_movable_bytes: int
    inputs: tuple[SavedTensor, ...]
    expensive_ops: tuple[ExpensiveOp, ...]
    forward_work_bytes: int
    backward_work_bytes: int
    grad_bytes: int
    recompute_work_bytes: int = 0
    moved_work_bytes: int = 0
    unused_bytes: int = 0
    after_bytes: int = 0
    has_dead_tensors: bool = False
    points: "tuple[RegionProfile, ...]" = ()
    activation_memory_budget: float | None = None
    partition_s: float = 0.0

    def at(self, activation_memory_budget: float | None) -> "RegionProfile":
        """The region at a measured budget; None: the region itself."""
        if activation_memory_budget is None:
            return self
        return next(each for each in self.points if each.activation_memory_budget == activation_memory_budget)

    @property
    def budgets(self) -> list[float | None]:
        """Activation memory budgets of the points."""
        return [point.activation_memory_budget for point in self.points]

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.saved_tensors) + self.not_movable_bytes

    @property
    def has_useless_moves(self) -> bool:
        """Whether some saved tensors free no memory when moved."""
        return self.has_dead_tensors or any(tensor.shares == OUTSIDE for tensor in self.saved_tensors)

    @property
    def may_move_inputs(self) -> bool:
        """Whether a move of the inputs frees memory, of this region or of another region."""
        return any(tensor.nbytes > 0 or tensor.is_of_another_region for tensor in self.inputs)

    @cached_property
    def pace(self) -> float:
        """What to multiply each `at_s` by. A watched step, which takes longer where the host is slow, gives `at_s`; a
        step without a watch gives `forward_s`."""
        last_s = max((row.at_s for row in (*self.saved_tensors, *self.expensive_ops)), default=0.0)
        return self.forward_s / last_s if last_s > self.forward_s else 1.0

    @cached_property
    def has_reads(self) -> bool:
        """Whether the region was measured by a recomputation, and the reads of backward were recorded."""
        return any(tensor.read_at > 0 for tensor in self.saved_tensors)

    @cached_property
    def in_order_of_reads(self) -> tuple[SavedTensor, ...]:
        """The saved tensors that backward reads; if no read was recorded, all, in the reverse order of forward."""
        read = [tensor for tensor in self.saved_tensors if tensor.read_at > 0]
        in_order = sorted(read, key=lambda tensor: tensor.read_at)
        return tuple(in_order or sorted(self.saved_tensors, key=lambda tensor: tensor.index, reverse=True))

    @property
    def short_lived_bytes(self) -> int:
        """Most that recomputation and backward together allocate beyond the saved tensors."""
        return max(0, self.backward_work_bytes - self.saved_bytes + self.unused_bytes)


@dataclass(frozen=True)
class PostRegionPoint:
    """A place between the last region's forward and the last region's backward.

    Attributes:
        tensor_index: index of the tensor saved at the place, outside of all regions, where parcels may leave; -1 for
            the end of the last region's forward, where nothing is saved.
        at_s: time from the end of the last region's forward.
        peak_bytes: most allocated from here to the next place (or to the last region's backward), beyond the memory
            before the first region, the memory that regions keep and the parcels on the way out.
    """

    tensor_index: int = dataclasses.field(metadata={"least": -1})
    at_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Outside:
    """The step before, after and between forward and backward of the regions.

    Attributes:
        before_s, after_s: forward before the first region and after the last region.
        backward_before_s, backward_after_s: backward before the last region's (loss, logits) and after the first's.
        kept_bytes: saved before the first region, and on the device until backward.
        post_region_points: places after the last region, in order, beginning with the end of its forward.
        held_bytes: saved after the last region, and on the device until backward.
    """

    before_s: float
    after_s: float
    backward_before_s: float
    backward_after_s: float
    kept_bytes: int
    post_region_points: tuple[PostRegionPoint, ...]
    held_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most allocated after the last region, beyond the memory at the end of the last region's forward."""
        return max((point.peak_bytes for point in self.post_region_points), default=0)


@dataclass(frozen=True)
class HostTime:
    """CPU time to launch one pass through a region with everything kept, and its recomputation with no outputs saved.

    Attributes:
        ops: number of operators called.
        saved: number of tensors saved, whether they may move or not.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    ops: int
    saved: int = 0


@dataclass(frozen=True)
class Host:
    """CPU launch overhead of a step: the host launches ahead of compute, or compute waits for the host.

    Attributes:
        regions: launch times, one for each region of the profile.
        before_s, after_s, backward_before_s: launch times of the parts of `Outside` of the same names.
        launch_ahead_s: how far the host is ahead of compute at the begin of a step, at least.
        steady_launch_ahead_s: the same where a step takes the host longer than compute.
        frame_s: added where a region prepares for recomputation, and again where recomputation begins.
        op_s: added for each operator under a selective recipe, in forward and in recomputation.
        saved_output_s: added for each saved output, and again when recomputation reuses the output.
        moved_s: added for each parcel on the way out, and again on the way back.
        derived_s: added for each derived tensor in forward, and again when backward computes the tensor.
        derived_op_s: the same for each further operator that takes part.
        hook_s: added for each saved tensor of a region that moves or derives some, in forward and in backward.
    """

    regions: tuple[HostTime, ...]
    before_s: float
    after_s: float
    backward_before_s: float
    launch_ahead_s: float
    steady_launch_ahead_s: float
    frame_s: float
    op_s: float
    saved_output_s: float
    moved_s: float
    derived_s: float = 0.0
    derived_op_s: float = 0.0
    hook_s: float = 0.0

    def times(self, ratio: float) -> "Host":
        """All launch times multiplied by `ratio`; the launch-ahead stays."""
        is_time = re.compile(r"(?!.*ahead).*_s").fullmatch
        return changed(self, lambda name, value: value * ratio if is_time(name) else value)

    @property
    def seconds(self) -> float:
        """CPU time of a step with everything kept."""
        outside = self.before_s + self.after_s + self.backward_before_s
        return outside + sum(region.forward_s + region.backward_s for region in self.regions)


@dataclass(frozen=True)
class Link:
    """Rates of the lanes, each alone.

    Attributes:
        out, back: bytes per second to the store and from the store.
        latency_s: duration of an empty copy. Assumed, not measured, in a profile made by a handle.
        interference: seconds that compute loses per second of copying; less than 1.

    Raises:
        PlanError: a rate of 0, or an interference outside of 0 to 1.
    """

    out: float
    back: float
    latency_s: float
    interference: float

    def __post_init__(self) -> None:
        for name in ("out", "back"):
            if not getattr(self, name) > 0:
                raise PlanError(f"link.{name} is {getattr(self, name)!r}: expected more than 0 bytes per second")
        if not 0.0 <= self.interference < 1.0:
            raise PlanError(f"link.interference is {self.interference}: expected at least 0 and less than 1")

    def times(self, out: float, back: float) -> "Link":
        """The rates multiplied by `out` and `back`."""
        return dataclasses.replace(self, out=self.out * out, back=self.back * back)


@dataclass(frozen=True)
class Profile:
    """Measurements of one step. `str()` gives a table of memory by region.

    Attributes:
        made_for: circumstances of the measurement, by name: model, device, version of torch, min_bytes. A profile is
            refused under other circumstances; another batch size is scaled to.
        regions: in the order of forward.
        outside: everything outside of the regions.
        link: the lanes.
        base_bytes: allocated at the begin of the step.
        base: parts of `base_bytes`, by name: parameters, gradients, optimizer, other.
        host_limit_bytes: capacity of the store; None: no limit.
        tokens: elements of the tensors passed to the model, the measure of a batch's size.
        device_bytes: capacity of the device; None if unknown.
        graphs: most forwards at once whose backward is still to come, the current forward included: 1 in a plain loop,
            more in a pipeline or where several forwards make one loss.
        passes: the order in which the graphs of a step run, by number: first each forward, later each backward. Empty:
            unknown, `order` has a likely one.
        host: CPU launch overhead; None where compute is synchronous, or nothing was measured.

    Raises:
        PlanError: `graphs` below 1, or `host` of another number of regions.
    """

    made_for: Mapping[str, str]
    regions: tuple[RegionProfile, ...]
    outside: Outside
    link: Link
    base_bytes: int
    base: Mapping[str, int]
    host_limit_bytes: int | None
    tokens: int
    device_bytes: int | None = None
    graphs: int = 1
    host: Host | None = None
    passes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.graphs < 1:
            raise PlanError(f"graphs={self.graphs}: expected at least 1, the forward of the backward")
        if sorted(self.passes) != [number for number in range(len(self.passes) // 2) for _ in range(2)]:
            raise PlanError(f"passes={self.passes}: expected each number from 0 on twice, for forward and backward")
        if self.host is not None and len(self.host.regions) != len(self.regions):
            raise PlanError(f"times of the host for {len(self.host.regions)} of {len(self.regions)} regions")

    @property
    def order(self) -> tuple[int, ...]:
        """`passes`, or without: `graphs` forwards first, then a backward and a forward in turns, as in 1F1B."""
        if self.passes:
            return self.passes
        ahead = self.graphs
        turns = (number for at in range(ahead) for number in (at, ahead + at))
        return (0, 0) if ahead == 1 else (*range(ahead), *turns, *range(ahead, 2 * ahead))

    @property
    def has_recomputation(self) -> bool:
        """Whether recomputation was measured. Otherwise a planner can only keep and offload."""
        return any(region.recompute_s > 0 for region in self.regions)

    def check_has_recomputation(self) -> None:
        """Raise PlanError for a profile that cannot serve a budget."""
        if not self.has_recomputation:
            raise PlanError(
                "the profile was measured without a budget and has no recomputation times: measure a profile with a "
                "budget, or omit profile="
            )

    @property
    def plain_s(self) -> float:
        """Forward and backward with everything kept."""
        out = self.outside
        outside_s = out.before_s + out.after_s + out.backward_before_s + out.backward_after_s
        return outside_s + sum(region.forward_s + region.backward_s for region in self.regions)

    def scaled(self, tokens: int) -> "Profile":
        """The step of a batch with `tokens` elements: bytes and seconds in proportion, `base_bytes` unchanged.

        Attention grows faster than in proportion; measured steps correct the error.
        """
        if tokens == self.tokens or self.tokens <= 0:
            return self
        k = tokens / self.tokens

        def scaled(name: str, value: Any) -> Any:
            if name.endswith("bytes") and name != "grad_bytes" and value > 0:  # gradients are of parameters
                return max(1, round(value * k))  # 0 would mean that the memory is shared
            return value * k if name.endswith("_s") else value

        regions, outside = changed((self.regions, self.outside), scaled)
        return dataclasses.replace(self, regions=regions, outside=outside, tokens=tokens)

    def recomputed_within(self, peak_bytes: int) -> "Profile":
        """The step, in view of others that recomputed every region that may be, and had a peak of `peak_bytes`.

        Where a pass was recorded with the lifetime of kept tensors alone, recomputation may need less. Whatever else
        is allocated meanwhile, the memory from before the step, from before the regions and from behind the earlier
        regions is.
        """
        most_bytes = peak_bytes - self.base_bytes - self.outside.kept_bytes
        regions: list[RegionProfile] = []
        for region in self.regions:
            work_bytes = region.recompute_work_bytes
            if most_bytes > 0 and work_bytes == region.backward_work_bytes:
                region = dataclasses.replace(region, recompute_work_bytes=min(work_bytes, most_bytes))
            most_bytes -= region.after_bytes
            regions.append(region)
        return dataclasses.replace(self, regions=tuple(regions))

    def with_reserved(self, nbytes: int) -> "Profile":
        """The step with `nbytes` more allocated before the begin, such as the state of an optimizer yet to come."""
        if nbytes == 0:
            return self
        base = {**self.base, "reserved": self.base.get("reserved", 0) + nbytes}
        return dataclasses.replace(self, base_bytes=self.base_bytes + nbytes, base=base)

    def at_speed(self, ratio: float) -> "Profile":
        """The step with all seconds of compute and host multiplied by `ratio`. The link stays, and so does the
        launch-ahead."""
        regions, outside = changed((self.regions, self.outside), lambda n, v: v * ratio if n.endswith("_s") else v)
        host = None if self.host is None else self.host.times(ratio)
        return dataclasses.replace(self, regions=regions, outside=outside, host=host)

    def __str__(self) -> str:
        lines = [(region.name, *_cells(region)) for region in self.regions]
        runs = consecutive(lines, lambda one, other: one[1:] == other[1:])
        rows = [(as_range(run[0][0], run[-1][0]), *run[0][1:]) for run in runs]
        return "\n".join([_headline(self), plain_table([_COLUMNS, *rows], right=range(1, len(_COLUMNS)))])

    def what_differs(self, wanted: Mapping[str, str]) -> list[str]:
        """Describe the entries of `wanted` that differ from `made_for`. Settings missing in `made_for` are ignored."""
        settings = ("store", "min_bytes", "compiled", "ranks")  # profiles made by hand may lack these
        known = {key: value for key, value in wanted.items() if key in settings} | dict(self.made_for)
        return [
            f"{key} {known.get(key, 'unknown')!r}, not {value!r}"
            for key, value in wanted.items()
            if known.get(key) != value
        ]

    def check_made_for(self, wanted: Mapping[str, str]) -> None:
        """Raise PlanError unless the profile was measured under the circumstances `wanted`."""
        differences = self.what_differs(wanted)
        if differences:
            raise PlanError(f"the profile is of {'; '.join(differences)}: measure one here, or omit profile=")

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, for `Profile.load`. A concurrent reader finds the old or the new file, whole."""
        write_file(self, path, FORMAT)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Read a file that `save` wrote, of this version of ebbtide or an earlier version.

        Raises:
            PlanError: the file cannot be read, or is not a profile.
            OtherVersionError: a later version wrote the file.
        """
        hint = "it is a plan: give it to offload(model, plan=Plan.load(file))"
        profile = read_file(Profile, path, "profile", range(1, FORMAT + 1), {"predicted": hint})
        if profile is None:
            raise OtherVersionError(f"{path} was written by another version of ebbtide: measure the profile again")
        return profile


def are_backward(passes: Sequence[int]) -> list[bool]:
    """Of each pass of an order as of `Profile.passes`: whether a backward."""
    return [number in passes[:at] for at, number in enumerate(passes)]


def in_flight(passes: Sequence[int]) -> list[int]:
    """Graphs in flight during each pass of an order as of `Profile.passes`."""
    is_backward = are_backward(passes)
    begun = accumulate(1 - each for each in is_backward)
    return [count - sum(is_backward[:at]) for at, count in enumerate(begun)]


_COLUMNS = ("regions", "tensors", "saved", "movable", "inputs", "expensive ops", "forward", "backward", "gradients")


def _headline(profile: Profile) -> str:
    outside = profile.outside
    outside_bytes = outside.kept_bytes + sum(region.after_bytes for region in profile.regions) + outside.held_bytes
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in profile.base.items() if nbytes > 0]
    return (
        f"profile of {profile.made_for.get('model', 'a model')}, {profile.tokens} tokens: "
        f"{format_bytes(profile.base_bytes)} before the step ({', '.join(parts)}), "
        f"{format_bytes(sum(region.saved_bytes for region in profile.regions))} saved in regions, "
        f"{format_bytes(outside_bytes)} outside of them"
    )


def _cells(region: RegionProfile) -> tuple[str, ...]:
    sums = (
        region.saved_bytes,
        region.saved_bytes - region.not_movable_bytes,
        sum(tensor.nbytes for tensor in region.inputs),
        sum(op.nbytes for op in region.expensive_ops),
        region.forward_work_bytes,
        region.backward_work_bytes,
        region.grad_bytes,
    )
    return str(len(region.saved_tensors)), *map(format_bytes, sums)


def changed(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A row, or a tuple of rows, with `change(name, value)` for every field, in order. `name`: of the field with
    the tuple."""
    if isinstance(value, tuple):
        return tuple(changed(item, change, name) for item in cast("tuple[Any, ...]", value))
    if not dataclasses.is_dataclass(value):
        return change(name, value)
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(cast("Any", value), **{name: changed(v, change, name) for name, v in values.items()})
