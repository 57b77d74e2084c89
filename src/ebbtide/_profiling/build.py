"""Makes a profile of the events of two recorded steps. Reads passed events, and changes nothing."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ebbtide._profiling.derive_probe import DeriveCost, key_of
from ebbtide._profiling.launch_overhead import RecipeCosts, host_of
from ebbtide._profiling.profile import (
    OUTSIDE,
    UNSHARED,
    ExpensiveOp,
    Link,
    Outside,
    PostRegionPoint,
    Profile,
    RegionProfile,
    SavedTensor,
    in_flight,
)
from ebbtide._profiling.recorder import (
    Operand,
    ProfilingRecorder,
    RegionRecord,
    SeenTensor,
    StepEvent,
    StepEventKind,
)
from ebbtide._profiling.region_times import RegionTimes, StepParts, by_forward
from ebbtide._types import Device, StreamEvent


class ProfileInputs(NamedTuple):
    """Contents of a profile that are not measured by recorded steps."""

    made_for: Mapping[str, str]  # properties that a user of the profile has to match, by name
    link: Link
    base: Mapping[str, int]  # bytes allocated before the step, by kind
    grads: Mapping[str, int]  # bytes of gradients allocated anew in each backward, by region; "" outside of regions
    host_limit_bytes: int | None
    tokens: int
    compiled: Collection[str]  # regions with operators hidden by the compiler: no output can be saved
    device_bytes: int
    recipe_costs: RecipeCosts | None  # None on a device that computes synchronously
    graphs: int = 1  # forwards in flight at once
    passes: tuple[int, ...] = ()  # the order in which they run, if known
    is_stage: bool = False  # other stages of a pipeline run in between
    overwritten: Collection[tuple[str, int]] = ()  # outputs that cannot be saved, by region and index
    derivations: Mapping[Hashable, DeriveCost] = MappingProxyType({})  # by `key_of`
    time_scale: float = 1.0  # batch size of the detailed step over the batch size of the timed step


def derivable(details: ProfilingRecorder) -> Iterator[SeenTensor]:
    """The saved tensors of a detailed step that can be derived."""
    for record in (*details.records, *details.recomputed):
        yield from (seen for seen in record.saved_tensors if seen.expression is not None)


def profile_of(
    times: ProfilingRecorder, details: ProfilingRecorder, names: Collection[str], inputs: ProfileInputs
) -> Profile | None:
    """Profile of a timed and a detailed step, with the regions that both entered: blocks may be skipped at random. None
    if the steps entered no regions, nested ones, or mostly different ones."""
    names = _entered_by_both(times, details, names)
    if not (_is_sequential(times, names) and _is_sequential(details, names)):
        return None
    seconds_between = times.device.seconds_between
    timed = RegionTimes(
        times.events, names, lambda a, b: inputs.time_scale * seconds_between(a.event, b.event), times.stalls
    )
    numbers = [number for number, record in enumerate(details.records) if record.region in names]
    records = [details.records[number] for number in numbers]
    # Between forward and backward of a graph in flight come passes of others, which are no part of either.
    is_in_flight = inputs.is_stage or inputs.graphs > 1
    is_apart = [is_in_flight and each.is_interrupted for each in (times, details)]
    memory = _MemoryCurve(details, names, sum(map(_saved_bytes, records)), is_apart[1])
    if not timed.regions == memory.regions == [record.region for record in records]:
        return None
    recomputed = by_forward(details.recomputed, timed.regions)
    slowdown = _slowdown(timed, RegionTimes(details.events, names, lambda a, b: seconds_between(a.event, b.event)))
    peaks = _peaks(recomputed, memory.backward_work)
    grad_bytes = _grad_bytes(timed.regions, inputs.grads)
    # Sampled memory is too inexact, and other graphs in flight have memory of their own.
    is_exact = details.device.tracks_peak and max(times.graphs, details.graphs) == 1
    behind = [record.after_bytes for record in records]  # as if it were there until the region's backward has run
    incoming = memory.incoming(records, recomputed, grad_bytes) if is_exact else behind
    held = memory.held(records, recomputed) if is_exact else [0] * len(records)
    builder = _ProfileBuilder(
        timed, memory, details.device, inputs, grad_bytes, slowdown, peaks, incoming, held, numbers
    )
    regions = tuple(builder.region(k, *passes) for k, passes in enumerate(zip(records, recomputed, strict=True)))
    sources = [record if own is None else own for record, own in zip(records, recomputed, strict=True)]
    return Profile(
        made_for=dict(inputs.made_for),
        regions=regions,
        outside=Outside(
            before_s=timed.before_s,
            after_s=timed.after_s,
            backward_before_s=0.0 if is_apart[0] else timed.backward_before_s,
            backward_after_s=timed.backward_after_s,
            kept_bytes=memory.kept_bytes,
            held_bytes=memory.held_bytes,
            post_region_points=memory.points,
        ),
        link=inputs.link,
        base_bytes=memory.base_bytes,
        base={**inputs.base, "other": max(0, memory.base_bytes - sum(inputs.base.values()))},
        host_limit_bytes=inputs.host_limit_bytes,
        tokens=inputs.tokens,
        device_bytes=inputs.device_bytes,
        graphs=max(inputs.graphs, *in_flight(inputs.passes), 1),
        passes=inputs.passes,
        host=host_of(times, names, regions, sources, inputs.recipe_costs, is_apart[0]),
    )


def _entered_by_both(one: ProfilingRecorder, other: ProfilingRecorder, names: Collection[str]) -> Collection[str]:
    """Those of `names` that both steps entered, equally often; all of them if these are less than half."""
    entered = StepEventKind.REGION_ENTERED
    ours, theirs = (
        Counter(each.region for each in step.events if each.kind is entered and each.region in names)
        for step in (one, other)
    )
    both = {name for name, count in ours.items() if theirs[name] == count}
    return both if 2 * len(both) >= len(ours.keys() | theirs.keys()) > 0 else names


def _saved_bytes(record: RegionRecord) -> int:
    """Memory kept by a pass: with recomputation the inputs alone are saved."""
    saved_bytes = sum(seen.nbytes for seen in record.saved_tensors)
    return saved_bytes + (record.not_movable_bytes if record.saved_tensors else 0) + record.after_bytes


def _is_sequential(recorder: ProfilingRecorder, names: Collection[str]) -> bool:
    """Whether forward entered regions, and left each before entering the next: a module may call itself, or another
    region."""
    entered, left = StepEventKind.REGION_ENTERED, StepEventKind.REGION_LEFT
    kinds = [each.kind for each in recorder.events if each.region in names and each.kind in (entered, left)]
    return kinds == [entered, left] * max(1, len(kinds) // 2)


class _Peaks(NamedTuple):
    """Peak of the backward of one pass over the memory at its begin, by the lifetime of recomputed tensors.

    Attributes:
        held_bytes: tensors live until their readers have been released, as kept tensors do.
        handed_bytes: tensors belong to the nodes that read them.
        held: the pass itself if measured with the first lifetime, else the nearest such pass of its kind.
    """

    held_bytes: int
    handed_bytes: int
    held: int


class _ProfileBuilder(NamedTuple):
    times: RegionTimes
    memory: "_MemoryCurve"
    device: Device
    inputs: ProfileInputs
    grad_bytes: Sequence[int]
    slowdown: float
    peaks: Sequence[_Peaks]
    incoming: Sequence[int]
    held: Sequence[int]
    numbers: Sequence[int]  # of the passes among all that were recorded

    def region(self, k: int, record: RegionRecord, recomputed: RegionRecord | None) -> RegionProfile:
        """Profile of pass `k`. Saved tensors were recorded during recomputation, or in forward if the region keeps."""
        source = record if recomputed is None else recomputed
        given, elsewhere = {seen.index: seen for seen in record.inputs}, self._counted_elsewhere(k, record, recomputed)
        saved = _counted_once(
            elsewhere.get(seen.index) or self._saved_tensor(k, seen, source, given.get(seen.input_index))
            for seen in source.saved_tensors
        )
        kept_bytes = sum(each.nbytes for each in saved) + source.not_movable_bytes if recomputed is None else 0
        inputs = tuple(self._saved_tensor(k, seen, record, seen) for seen in record.inputs)
        # Inputs are on the device before recomputation begins, which is where working memory is counted from.
        present_bytes = sum(each.nbytes for each in inputs)
        if recomputed is None:
            present_bytes = kept_bytes + sum(seen.nbytes for seen in source.saved_tensors if seen.index in elsewhere)
        is_hidden = record.region in self.inputs.compiled
        no_output = {index for region, index in self.inputs.overwritten if region == record.region}
        ops = [] if is_hidden else [seen for seen in source.expensive_ops if seen.index not in no_output]
        peaks, begin_bytes = self.peaks[k], present_bytes + self.incoming[k]
        # Parcels on their way belong to the working memory only where the region saved tensors.
        forward_work_bytes = self.memory.forward_work(k, record, saved if recomputed is None else ())
        recompute_work_bytes, read_bytes = 0, dict[int, int]()
        if recomputed is not None:
            recompute_work_bytes = max(1, peaks.handed_bytes + begin_bytes)
            # Tensors that belong to their readers may have the peak at another read.
            own, held = (self.memory.read_work(each, saved, begin_bytes) for each in (k, peaks.held))
            is_alike = list(own) == list(held)
            read_bytes = {index: max(1, nbytes, own[index] if is_alike else 0) for index, nbytes in held.items()}
            reads = {index: (place, nbytes) for place, (index, nbytes) in enumerate(read_bytes.items(), 1)}
            places = [reads.get(each.index, (0, 0)) for each in saved]
            rows = zip(saved, places, strict=True)
            saved = tuple(dataclasses.replace(each, read_at=at, read_bytes=nbytes) for each, (at, nbytes) in rows)
        return RegionProfile(
            name=record.region,
            forward_s=self.times.forward_s[k],
            backward_s=self.times.backward_s[k],
            recompute_s=self.times.recompute_s[k],
            saved_tensors=saved,
            not_movable_bytes=source.not_movable_bytes,
            inputs=inputs,
            expensive_ops=tuple(self._expensive_op(seen, source) for seen in ops),
            # Memory freed during forward makes room that does not belong to the region.
            forward_work_bytes=max(0, max(0, forward_work_bytes + record.freed_bytes - kept_bytes) + self.held[k]),
            backward_work_bytes=max(0, peaks.held_bytes + begin_bytes),
            recompute_work_bytes=recompute_work_bytes,
            grad_bytes=max(self.grad_bytes[k], self.memory.left_bytes[k] if recomputed is not None else 0),
            moved_work_bytes=max(read_bytes.values(), default=0),
            unused_bytes=self.memory.unused(k, saved),
            after_bytes=record.after_bytes,
            has_dead_tensors=source.has_dead_tensors,
        )

    def _counted_elsewhere(
        self, k: int, record: RegionRecord, recomputed: RegionRecord | None
    ) -> dict[int, SavedTensor]:
        """Saved tensors, by index, with the memory of an input of the next region, or saved outside of all regions."""
        source = record if recomputed is None else recomputed
        is_followed = self.numbers[k + 1 : k + 2] == [self.numbers[k] + 1]
        sizes = {seen.index: seen.nbytes for seen in source.saved_tensors}
        found: dict[int, SavedTensor] = {}
        for seen in source.saved_tensors:
            owner = seen.index if seen.shares == UNSHARED else seen.shares
            given, at_s = record.passed_on.get(owner), self._between(source.began, seen.event)
            if recomputed is not None and owner in record.held_outside:
                found[seen.index] = SavedTensor(seen.index, 0, at_s, OUTSIDE)
            elif given is not None and is_followed and sizes[owner] == given.nbytes > 0:
                found[seen.index] = SavedTensor(seen.index, 0, at_s, common=given.common)
        return found

    def _saved_tensor(
        self, k: int, seen: SeenTensor, record: RegionRecord, given: SeenTensor | None = None
    ) -> SavedTensor:
        """`given`: the input with the same memory, if any."""
        at_s = self._between(record.began, seen.event)
        nbytes, common, held_for = seen.nbytes, seen.common, 0
        if given is not None and seen.shares == UNSHARED:
            if given.shares == OUTSIDE:  # saved outside of all regions too, and stays on the device
                return SavedTensor(seen.index, 0, at_s, OUTSIDE)
            nbytes = min(given.nbytes, nbytes or given.nbytes) if given.common else nbytes
            common = given.common
            held_for = sum(number <= given.held_at for number in self.numbers[k + 1 :])
        return SavedTensor(
            seen.index,
            nbytes,
            at_s,
            seen.shares,
            *self._derivation(seen),
            is_bits=seen.is_bits,
            is_gathered=seen.is_gathered,
            held_for=held_for,
            common=common,
        )

    def _derivation(self, seen: SeenTensor) -> tuple[float, int, int, tuple[int, ...]]:
        """Fields of `SavedTensor` from `derive_s` on."""
        found = None if seen.expression is None else self.inputs.derivations.get(key_of(seen))
        if found is None or seen.expression is None or seen.nbytes == 0:
            return 0.0, 0, 0, ()
        operators = seen.expression.operators()
        operands = {o.tensor for each in operators for o in each.operands if type(o) is Operand}
        return found.seconds, len(operators), found.work_bytes, tuple(sorted(operands - {-1}))

    def _expensive_op(self, seen: SeenTensor, record: RegionRecord) -> ExpensiveOp:
        at_s, op_s = self._between(record.began, seen.event), self._between(seen.before, seen.event)
        call = 1 << seen.index
        downstream = _downstream(record, call)
        seconds = [self._between(before, after) for before, after in seen.between]
        return ExpensiveOp(
            index=seen.index,
            nbytes=seen.nbytes,
            at_s=at_s,
            recompute_s=op_s * self.slowdown,
            op=seen.op,
            downstream=downstream,
            downstream_s=sum(seconds) * self.slowdown if downstream else 0.0,
            downstream_ops=len(seconds) if downstream else 0,
            users=tuple(each.index for each in record.expensive_ops if each.calls & call) if downstream else (),
        )

    def _between(self, start: StreamEvent, end: StreamEvent) -> float:
        return max(0.0, self.device.seconds_between(start, end))


def _peaks(recomputed: Sequence[RegionRecord | None], work: Sequence[int]) -> list[_Peaks]:
    """For each pass. `work`: the peak of the pass, with the lifetime of its record.

    The passes of a kind may differ in ways that no record shows, and the first pass in backward begins with more
    allocated than the rest, or less. So the least difference between lifetimes lowers a peak, and the largest raises
    a peak.
    """
    passes: dict[tuple[Hashable, bool], list[int]] = {}
    for k, record in enumerate(recomputed):
        if record is not None:
            passes.setdefault((record.kind, record.hands_over), []).append(k)
    found: list[_Peaks] = []
    for k, record in enumerate(recomputed):
        held, handed = ([] if record is None else passes.get((record.kind, hands), []) for hands in (False, True))
        differences = [0]
        if held and handed:
            longer, shorter = ([work[each] for each in group] for group in (held, handed))
            differences = [of(longer) - of(shorter) for of in (min, statistics.median_low, max)]
        if record is not None and record.hands_over and held:
            nearest = min(held, key=lambda each, k=k: abs(each - k))
            found.append(_Peaks(work[k] + max(0, *differences), work[k], nearest))
        else:
            is_sure = min(len(held), len(handed)) > 1
            found.append(_Peaks(work[k], work[k] - (max(0, min(differences)) if is_sure else 0), k))
    return found


def _counted_once(saved: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
    """Of several tensors of one memory that other regions save too, the first has the bytes."""
    found: list[SavedTensor] = []
    owners: dict[int, int] = {}
    for each in saved:
        owner = owners.setdefault(each.common, each.index) if each.common and each.nbytes > 0 else each.index
        found.append(each if owner == each.index else SavedTensor(each.index, 0, each.at_s, owner))
    return tuple(found)


def _downstream(record: RegionRecord, call: int) -> tuple[int, ...]:
    """Indices of saved tensors derived from an expensive call (a bit). Empty if a derived tensor was read by a kernel
    hidden from dispatch modes: such a kernel needs the bytes."""
    derived = {each.index: each.origin for each in record.saved_tensors if each.origin and each.origin.calls & call}
    is_needed = record.provenance is None or record.provenance.unprunable & call != 0
    return tuple(derived) if not is_needed and all(origin.is_used for origin in derived.values()) else ()


def _slowdown(timed: RegionTimes, detailed: RegionTimes) -> float:
    """Recomputation time in the timed step over the time in the detailed step, between 1 and 1.25.

    A device that waits now and then, as for fetches in the detailed step, saves power and runs faster in between.
    Recording takes time too, hence no ratio below 1. The median over regions ignores a hiccup in a single region.
    """
    pairs = zip(timed.recompute_s, detailed.recompute_s, strict=True)
    ratios = [recompute_s / recorded_s for recompute_s, recorded_s in pairs if recorded_s > 0]
    return min(max(1.0, statistics.median(ratios)), 1.25) if ratios else 1.0


def _grad_bytes(regions: Sequence[str], grads: Mapping[str, int]) -> list[int]:
    """Gradient bytes of each pass. The last pass of a region has the gradient, because backward visits the pass first.
    Gradients of the head, and of regions without a pass, are allocated before the backward of the last region."""
    left = dict(grads)
    found = [left.pop(region, 0) for region in reversed(regions)][::-1]
    return [*found[:-1], found[-1] + sum(left.values())]


class _MemoryCurve(StepParts):
    """Bytes of each region in a detailed step, in which the regions kept `regions_bytes` on the device. `is_apart`:
    other graphs ran between forward and backward."""

    def __init__(
        self, recorder: ProfilingRecorder, names: Collection[str], regions_bytes: int, is_apart: bool = False
    ) -> None:
        super().__init__(recorder.events, names)
        events, left = self.events, self.left[-1]
        self.base_bytes = events[0].memory.allocated_bytes
        self.kept_bytes = max(0, events[self.entered[0]].memory.allocated_bytes - self.base_bytes)
        # Allocated in every simulated step, plus allocations of the measured step that a simulation replaces.
        known_bytes = self.base_bytes + self.kept_bytes + regions_bytes
        known_bytes += recorder.waiting_bytes - recorder.freed_common_bytes
        self.held_bytes = max(0, events[self.forward_end].memory.allocated_bytes - known_bytes)
        first = self.intervals[0].at if self.intervals else len(events) - 1
        first = self.forward_end if is_apart else first
        last_peak_bytes = max((each.memory.peak_bytes for each in events[left + 1 : first + 1]), default=0)
        self.points = _post_region_points(recorder, events[left], known_bytes, last_peak_bytes)
        self.backward_work = [0 if each is None else _peak(each.events, each.begin) for each in self.own]
        self.left_bytes = self._left_bytes([each for each in recorder.records if each.region in names])

    def _left_bytes(self, records: Sequence[RegionRecord]) -> list[int]:
        """Gradients of inputs common to several regions stay allocated to the end: bytes left by the backward of each
        pass, by the memory at the beginning of the next interval. Recomputation begins with the inputs allocated."""
        inputs = [sum(seen.nbytes for seen in record.inputs) for record in records]
        after = [record.after_bytes for record in records]
        most = max((record.common_bytes for record in records), default=0)
        passes = {each.at: k for k, each in enumerate(self.own) if each is not None}
        left = [0] * len(self.own)
        for interval, following in pairwise(each for each in self.intervals if each.at in passes):
            own, other = passes[interval.at], passes[following.at]
            more = following.begin.memory.allocated_bytes - interval.begin.memory.allocated_bytes
            left[own] = min(max(0, more + inputs[own] - inputs[other] + after[other]), most)
        return left

    def held(self, records: Sequence[RegionRecord], recomputed: Sequence[RegionRecord | None]) -> list[int]:
        """Per pass: bytes allocated as forward enters a recomputed pass, beyond a simulated step with equal inputs of
        earlier regions held by the caller: further memory of the caller, passed to no region. Negative once the caller
        has freed the first region's input, part of the memory from before the regions."""
        known = self.base_bytes + self.kept_bytes
        found: list[int] = []
        for record, own, entered in zip(records, recomputed, self.entered, strict=True):
            made_bytes = sum(seen.nbytes for seen in record.inputs if seen.made_in_regions)
            allocated_bytes = self.events[entered].memory.allocated_bytes
            more_bytes = allocated_bytes - known - record.present_bytes - made_bytes
            # Other memory freed since the step began may stay in another step.
            found.append(0 if own is None else max(more_bytes, -record.freed_input_bytes))
            known += _saved_bytes(record) + (0 if record.saved_tensors else record.not_movable_bytes)
        return found

    def incoming(
        self, records: Sequence[RegionRecord], recomputed: Sequence[RegionRecord | None], grads: Sequence[int]
    ) -> list[int]:
        """Bytes that are allocated when a recomputed pass begins beyond what is allocated in a simulated step: memory
        from before the step and before the regions, saved between regions, and gradients of parameters. Above all the
        gradient that the pass receives. Often negative, because the caller of the first region has freed its input,
        which counts among the memory from before the regions."""
        known = self.base_bytes + self.kept_bytes + sum(record.after_bytes for record in records)
        found: list[int] = []
        for record, own, interval, nbytes in reversed(list(zip(records, recomputed, self.own, grads, strict=True))):
            known += nbytes - record.after_bytes  # backward has gone through what follows the region
            more_bytes = 0
            if own is not None and interval is not None:
                input_bytes = sum(seen.nbytes for seen in record.inputs) + record.common_bytes
                more_bytes = interval.begin.memory.allocated_bytes - own.waiting_bytes - input_bytes - known
            found.append(more_bytes)
        return found[::-1]

    def forward_work(self, k: int, record: RegionRecord, saved: Sequence[SavedTensor]) -> int:
        """Working memory of forward, including work after the region, where the last of `saved` stays."""
        own = self.events[self.entered[k] : self.left[k] + 1]
        own_bytes = _peak(own[1:], own[0])
        if record.after_peak_bytes <= own[-1].memory.allocated_bytes:
            return own_bytes
        newest_bytes = next((each.nbytes for each in reversed(saved) if each.nbytes > 0), 0)
        after_bytes = record.after_peak_bytes - record.after_bytes - own[0].memory.allocated_bytes
        after_bytes += max(0, record.after_freed_bytes - record.freed_bytes)
        return max(own_bytes, after_bytes + newest_bytes)

    def unused(self, k: int, saved: Sequence[SavedTensor]) -> int:
        """Bytes of saved tensors that backward does not read; 0 if no read was recorded."""
        read = {owner for _, owner in self._reads(k, saved) if owner >= 0}
        return sum(each.nbytes for each in saved if read and each.index not in read)

    def read_work(self, k: int, saved: Sequence[SavedTensor], begin_bytes: int) -> dict[int, int]:
        """`SavedTensor.read_bytes` of the tensors that backward of pass `k` reads after its recomputation, by index, in
        the order of first reads.

        `begin_bytes`: allocated when the recomputation begins, of what counts. Empty if no read was recorded.
        """
        interval, reads = self.own[k], self._reads(k, saved)
        found = dict.fromkeys((owner for _, owner in reads if owner >= 0), 0)
        if interval is None or not found:
            return {}
        unread = {each.index: each.nbytes for each in saved if each.index in found}  # unused tensors are freed by then
        newest = next(iter(found))
        unread.pop(newest, None)
        for event, owner in reads:
            nbytes = event.memory.peak_bytes - interval.begin.memory.allocated_bytes + begin_bytes
            found[newest] = max(found[newest], nbytes - sum(unread.values()))
            if owner in unread:
                newest = owner
                del unread[owner]
        return found

    def _reads(self, k: int, saved: Sequence[SavedTensor]) -> list[tuple[StepEvent, int]]:
        """Events after the recomputation of pass `k`, each with the index of the saved tensor that owns the memory read
        at the event; -1 for no read, or for a read of another region by a hook."""
        interval = self.own[k]
        if interval is None:
            return []
        owners = {each.index: each.shares for each in saved if each.shares >= 0}
        own = (each.tensor if each.region == interval.region else -1 for each in interval.after_recompute)
        return [(each, owners.get(tensor, tensor)) for each, tensor in zip(interval.after_recompute, own, strict=True)]


def _peak(events: Sequence[StepEvent], since: StepEvent) -> int:
    """Peak over the memory allocated at `since`; each event has the peak since the previous event."""
    return max(0, max((each.memory.peak_bytes for each in events), default=0) - since.memory.allocated_bytes)


def _post_region_points(
    recorder: ProfilingRecorder, left: StepEvent, known_bytes: int, last_peak_bytes: int
) -> tuple[PostRegionPoint, ...]:
    """Points after the last region, left at `left`, at which parcels on their way may be released, and the peak from
    each point on, over `known_bytes`."""
    seconds_between = recorder.device.seconds_between
    points = [PostRegionPoint(-1, 0.0, 0)]
    peaks = [*(seen.memory.peak_bytes for seen in recorder.outside), last_peak_bytes]
    for seen, peak_bytes in zip([None, *recorder.outside], peaks, strict=True):
        # Numbers begin anew after a backward inside of forward: such a place is part of the place before.
        if seen is not None and seen.tensor > points[-1].tensor_index:
            points.append(PostRegionPoint(seen.tensor, max(0.0, seconds_between(left.event, seen.event)), 0))
        nbytes = max(points[-1].peak_bytes, peak_bytes - known_bytes)
        points[-1] = dataclasses.replace(points[-1], peak_bytes=nbytes)
    return tuple(points)
