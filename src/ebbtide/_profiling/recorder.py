"""Records one training step in detail; build.py makes a profile of the records.

Note [How a step is measured]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
1. A recorder writes step events as forward and backward reach regions: an event of the compute stream, and in a
   detailed step the allocated memory. Nothing waits for an event. Events are read after the last event has passed.
2. One step is recorded for times, and a second step for details, because inspecting saved tensors and operators takes
   time.
3. If every region is recomputed, a step needs the smallest memory. Saved tensors and expensive operators of a region
   are recorded during recomputation, one region at a time. If every region keeps, both are recorded in forward, and the
   times of recomputation are unknown.
4. If compute waits for the CPU, measured times are times of the CPU. The recorder therefore lets the stream spin: in
   the timed step before backward begins, and before each region that compute would reach too early; in a detailed step
   before each recomputation. The CPU gets ahead meanwhile.
5. Some kernels overwrite the output of an expensive operator (see _recompute/saved_outputs.py), and the output cannot
   be saved. The warm-up compares the outputs that are alive at the end of a recomputation. The warm-up also compares
   derived tensors with saved tensors: a comparison needs memory for both, and the first step of a plan has none left.
6. Recomputed tensors belong to the nodes that read them, and die earlier than kept and moved tensors do. Of regions
   that are alike one half is recomputed that way, and the peaks of both lifetimes are known (build.py).
7. Offloaded tensors with memory referenced by somebody else are unknown at first; the tuner corrects for them later.
8. Recomputations of two regions make two memories of what forward saves once: a region's output, saved by its last
   operator and by the first of the next region. So forward notes the storages that each region saves.
"""

import contextlib
import enum
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Collection, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from ebbtide._engine.context import HookContext
from ebbtide._engine.derive import Expression, owner_of
from ebbtide._engine.derive_rules import Deriver, KnownOperands, Signature
from ebbtide._engine.engine import Engine
from ebbtide._engine.geometry import span_of
from ebbtide._engine.parcel import Parcel
from ebbtide._engine.select import why_never
from ebbtide._engine.stats import WatchedCopies
from ebbtide._profiling.derive_check import MAY_BE_OPERAND, DerivationChecks, is_detached_input, is_operand
from ebbtide._profiling.profile import OUTSIDE, UNSHARED
from ebbtide._profiling.step_events import BackwardObserver
from ebbtide._types import (
    CallProvenance,
    Device,
    Memory,
    OpClasses,
    Reason,
    RecomputeRecorder,
    StorageTrace,
    StreamEvent,
)
from ebbtide._utils.garbage import full_collections
from ebbtide._utils.storage import checksum_of
from ebbtide._utils.torch_private import (
    OperatorMode,
    graph_task_id,
    is_pending,
    nbytes_of,
    next_node,
    plain_tensors,
    without_dispatch,
)


class StepEventKind(enum.Enum):
    """Place in a step."""

    STEP_BEGAN = "the step begins"
    REGION_ENTERED = "forward enters a region"
    REGION_RUNS = "a region, prepared for recomputation, begins its own code"
    REGION_RAN = "the region's own code has ended"
    REGION_LEFT = "forward leaves a region"
    FORWARD_ENDED = "forward has ended"
    REGION_READ = "backward reads a saved tensor of a region for the first time after another region"
    RECOMPUTE_BEGAN = "a region's recomputation begins"
    RECOMPUTE_ENDED = "a region's recomputation has ended"
    TENSOR_READ = "backward reads a tensor saved during recomputation"
    TENSOR_SAVED = "forward saves a tensor outside of all regions"
    SPIN_BEGAN = "compute begins to spin"
    SPIN_ENDED = "compute goes on"
    STEP_ENDED = "backward has ended"
    STALL_BEGAN = "compute begins to wait for a copy"
    STALL_ENDED = "the copy has ended"


class StepEvent(NamedTuple):
    """One record of a step."""

    kind: StepEventKind
    region: str  # "" outside of all regions
    event: StreamEvent
    memory: Memory  # allocated now, and the peak since the previous event
    cpu_s: float = 0.0  # on a clock that stands still while the recorder works
    passed: int = 0  # earlier events passed by compute, to relate the CPU clock and the stream
    tensor: int = -1  # index of the saved tensor for TENSOR_READ and TENSOR_SAVED
    at_s: float = 0.0  # on the plain CPU clock


_BACKWARD = 3.0  # CPU time of a region's recomputation and backward, in times of its forward


class _CpuClock:
    """Clock that stands still while the recorder works."""

    def __init__(self) -> None:
        self._excluded_s = 0.0
        self._stopped_s: float | None = None

    def now(self) -> float:
        return (time.perf_counter() if self._stopped_s is None else self._stopped_s) - self._excluded_s

    @contextlib.contextmanager
    def stopped(self) -> Generator[None, None, None]:
        if self._stopped_s is not None:
            yield
            return
        self._stopped_s = time.perf_counter()
        try:
            yield
        finally:
            self._excluded_s += time.perf_counter() - self._stopped_s
            self._stopped_s = None


@dataclass
class SeenTensor:
    """A saved tensor, or the output of an expensive operator."""

    index: int
    nbytes: int
    event: StreamEvent  # after the tensor was made
    op: str = ""  # name of the expensive operator
    before: StreamEvent = None  # before the expensive operator
    calls: int = 0  # expensive calls that the arguments of the expensive operator are derived from, as a bit set
    shares: int = UNSHARED  # as `shares` of the profile's saved tensors
    input_index: int = -1  # of a recomputed tensor: the region's input with an equal storage
    origin: StorageTrace | None = None  # of a recomputed tensor: expensive calls that lead to the tensor
    expression: Expression | None = None  # computes the tensor from others; with operands of type `Operand`
    signature: Signature = ()  # of the expression
    is_bits: bool = False  # travels as bits
    is_gathered: bool = False  # travels as a dense copy
    made_in_regions: bool = False  # of an input: made since forward entered the first region
    tensors: tuple[weakref.ref[torch.Tensor], ...] = ()  # of an input: as passed to the region, and its base
    held_at: int = -1  # of such an input: number of the last pass at whose begin the caller held the tensor; -1: none
    common: int = 0  # as `common` of the profile's saved tensors
    # Events before and after each operator on tensors that are derived from the expensive operator and from no other.
    between: list[tuple[StreamEvent, StreamEvent]] = field(default_factory=list[tuple[StreamEvent, StreamEvent]])


@dataclass
class RegionRecord:
    """Records of one pass through a region."""

    region: str
    began: StreamEvent = None
    saved_tensors: list[SeenTensor] = field(default_factory=list[SeenTensor])
    inputs: list[SeenTensor] = field(default_factory=list[SeenTensor])
    expensive_ops: list[SeenTensor] = field(default_factory=list[SeenTensor])
    not_movable_bytes: int = 0
    common: list[tuple[SeenTensor, int]] = field(default_factory=list[tuple[SeenTensor, int]])  # see `common_bytes`
    ops: int = 0
    saves: int = 0  # saved tensors of any kind
    freed_bytes: int = 0  # inputs of earlier regions, freed during forward of the region
    present: list[SeenTensor] = field(default_factory=list[SeenTensor])  # see `present_bytes`
    other_present_bytes: int = 0
    freed_input_bytes: int = 0  # inputs of the first region that the caller had freed by then
    after_bytes: int = 0  # saved before the next region, outside of all regions, and alive when forward ends
    after_peak_bytes: int = 0  # peak memory before the next region; 0 for the last region
    after_freed_bytes: int = 0  # as `freed_bytes`, by the begin of the next region
    has_dead_tensors: bool = False  # forward freed saved tensors of an unused branch, missing in `saved_tensors`
    passed_on: dict[int, SeenTensor] = field(default_factory=dict[int, SeenTensor])  # saved tensors: inputs of the next
    held_outside: set[int] = field(default_factory=set[int])  # saved tensors that are saved outside of all regions too
    provenance: CallProvenance | None = None  # tensors derived from expensive calls
    first_node: int = 0  # of the pass, as autograd counts nodes
    hands_over: bool = False  # a recomputed tensor belonged to the node that read it
    waiting_bytes: int = 0  # parcels on the device when the recomputation began, as in `ProfilingRecorder`
    known: KnownOperands = field(default_factory=KnownOperands)
    operands: "list[Operand]" = field(default_factory=list["Operand"])  # that `known` refers to

    @property
    def present_bytes(self) -> int:
        """Inputs of earlier regions on the device when forward entered, waiting to leave or held by the caller, without
        what stays in any case."""
        return self.other_present_bytes + sum(seen.nbytes for seen in self.present)

    @property
    def common_bytes(self) -> int:
        """Inputs of earlier regions as well, without what stays in any case."""
        return sum(nbytes for seen, nbytes in self.common if seen.shares != OUTSIDE)

    @property
    def kind(self) -> Hashable:
        """Equal for regions of equal build."""
        saved = tuple((seen.index, seen.nbytes, seen.shares) for seen in self.saved_tensors)
        return saved, self.not_movable_bytes, tuple((op.op, op.nbytes) for op in self.expensive_ops), self.ops


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor from which a saved tensor is derived.

    Attributes:
        tensor: index of the region's saved tensor with the memory; -1 for any other tensor.
        numbers: the tensor itself, if it holds whole numbers: they say what an operator reads.
        is_plain: whether the tensor has strides.
    """

    tensor: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    numbers: torch.Tensor | None
    is_plain: bool = True


class _FirstUse(NamedTuple):
    """First record of a storage, and all later records in other passes."""

    record: RegionRecord
    seen: SeenTensor
    elsewhere: list[SeenTensor]


class ProfilingRecorder(BackwardObserver):
    """Records one step.

    Args:
        context: decides about saved tensors.
        is_detailed: record saved tensors, operators and memory too.
        recomputes: all regions except `kept` are recomputed; otherwise all regions keep.
        op_classes: classes of operators; None without recomputation.
        is_first: look for overwritten outputs of expensive operators.
        cpu_region_s: mean CPU time of a region's forward in an earlier step; 0: unknown.
        limit_bytes: what comparisons may allocate together with everything else; None: what the device has.

    Attributes:
        outside: a TENSOR_SAVED for each tensor saved after the last region, with the peak since the previous event.
        recomputed: records of recomputations, in order of backward.
        graphs: most graphs in flight at once during the step. Set by the owner of the recorder.
        waiting_bytes: parcels on their way out and still allocated when forward left the last region, without inputs
            of the first region: the caller is believed to hold these.
        collecting: share of the step, as long as the host was at it, that Python took for full garbage collections.
        freed_common_bytes: inputs of several regions, freed by the caller during forward. A region that keeps such an
            input prevents the free.
    """

    def __init__(
        self,
        engine: Engine,
        context: HookContext,
        *,
        is_detailed: bool,
        recomputes: bool,
        op_classes: OpClasses | None = None,
        is_first: bool = False,
        cpu_region_s: float = 0.0,
        kept: Collection[str] = (),
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.sees_saved_tensors = True
        self.device = engine.device
        self.events: list[StepEvent] = []
        self.records: list[RegionRecord] = []
        self.outside: list[StepEvent] = []
        self.recomputed: list[RegionRecord] = []
        self.graphs = 1
        self.waiting_bytes = 0
        self.collecting = 0.0
        self.freed_common_bytes = 0
        self._engine = engine
        self._context = context
        self._is_detailed = is_detailed
        self._recomputes = recomputes
        self._kept = kept
        self._timed_by = op_classes if is_detailed else None
        self._compared_by = op_classes if is_first else None
        self._is_for_times = not is_detailed and not is_first
        self._sees_parameters = not self._is_for_times
        self._earlier_s = cpu_region_s
        self._checks = DerivationChecks(context, engine.device, limit_bytes) if is_first else None
        self._compared: list[tuple[str, int, torch.Tensor]] = []
        self._common: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._older: list[tuple[weakref.ref[torch.UntypedStorage], _FirstUse]] = []  # inputs of the first region
        # Of saved tensors, and apart from these of inputs, because a region that keeps saves its input as well.
        self._saved_first: weakref.WeakKeyDictionary[torch.UntypedStorage, _FirstUse] = weakref.WeakKeyDictionary()
        self._given_first: weakref.WeakKeyDictionary[torch.UntypedStorage, _FirstUse] = weakref.WeakKeyDictionary()
        # What the forward of a pass saves, recomputed or kept: number of the pass, and index of the saved tensor.
        self._saved_in: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._commons = itertools.count(1)
        self._alive_at_entry: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        # Saved outside of all regions, with the record of the region before.
        self._after: weakref.WeakKeyDictionary[torch.UntypedStorage, RegionRecord] = weakref.WeakKeyDictionary()
        self._kinds: Counter[Hashable] = Counter()  # recomputations so far
        self._region_read: str | None = None
        self._passed = 0
        self._collected_s = 0.0
        self._cpu_clock = _CpuClock()
        self._copies = WatchedCopies()

    # -- StepRecorder ----------------------------------------------------------------------------------------------

    def began(self) -> None:
        _, self._collected_s = full_collections()
        if self._is_for_times:
            self._context.recorder.watched = self._copies
        if self._timed_by is not None:
            with _ExpensiveOpTimer(self.device, RegionRecord(""), self._timed_by):
                torch.empty(0).detach()  # the first operator seen by a mode triggers imports, which must not be timed
        if self._is_detailed:
            self.device.reset_peak_stats()
        self.add(StepEventKind.STEP_BEGAN, "")

    def entered(self, region: str) -> None:
        with self._cpu_clock.stopped():
            if self._earlier_s > 0:
                kind = StepEventKind.REGION_ENTERED if self.records else StepEventKind.STEP_BEGAN
                self._get_ahead_of(kind, self._earlier_s)
            self.add(StepEventKind.REGION_ENTERED, region)
            if self._sees_parameters and region in self._context.parameters:
                self._context.parameters[region].enter()
            if self.records:
                after = (each.memory.peak_bytes for each in (*self.outside, self.events[-1]))
                self.records[-1].after_peak_bytes = max(after)
                self.records[-1].after_freed_bytes = self._freed_bytes()
            self.records.append(RegionRecord(region, self.events[-1].event, first_node=next_node()))
            if self._is_detailed:
                self._note_held(self.records[-1])
            known = itertools.chain(self._saved_first, self._given_first)
            self._alive_at_entry = [(weakref.ref(storage), storage.nbytes()) for storage in known]

    def _note_held(self, record: RegionRecord) -> None:
        """Which inputs of earlier regions the caller holds as `record` begins: the memory is alive although no parcel
        waits with it and autograd does not save it, or the tensor is, to which the caller alone refers."""
        waiting = {parcel.source: parcel for parcel in self._leaving()}
        inputs = {storage: first for storage, first in self._given_first.items() if storage not in self._after}
        record.present += (inputs[storage].seen for storage in waiting if storage in inputs)
        record.other_present_bytes = sum(parcel.nbytes for storage, parcel in waiting.items() if storage not in inputs)
        for first in (first for ref, first in self._older if ref() is None):
            if first.elsewhere:
                record.other_present_bytes -= first.seen.nbytes  # as if still there: another region may keep the tensor
            else:
                record.freed_input_bytes += first.seen.nbytes
        for storage, first in inputs.items():
            seen = first.seen
            if not seen.made_in_regions or storage in self._saved_first:
                continue
            if storage not in waiting:
                record.present.append(seen)
            elif all(ref() is None for ref in seen.tensors):
                continue
            seen.held_at = len(self.records) - 1

    def left(self, region: str) -> None:
        with self._cpu_clock.stopped():
            self.add(StepEventKind.REGION_LEFT, region)
            if self._sees_parameters and region in self._context.parameters:
                self._context.parameters[region].leave()
            self.records[-1].freed_bytes = self._freed_bytes()
            self.outside.clear()
            self.waiting_bytes = sum(parcel.nbytes for parcel in self._leaving())

    def forward_ended(self) -> None:
        super().forward_ended()
        self.add(StepEventKind.FORWARD_ENDED, "")
        self._count_after_bytes()
        # Where memory is sampled an input that counts twice makes up for the gradient that a region receives.
        for ref, first in self._older if self.device.tracks_peak else ():
            storage = ref()
            # Where code outside of the regions saves the input, autograd may have the tensor, and not the caller.
            is_saved = storage is None or storage in self._after
            if not is_saved and any(each() is not None for each in first.seen.tensors):
                _stays(first)
        self.freed_common_bytes = sum(nbytes for ref, nbytes in self._common.items() if ref() is None)

    def read(self, region: str) -> None:
        if graph_task_id() == -1 or region == self._region_read:
            return
        self._backward_began()
        self._region_read = region
        if region and not self._recomputes:
            self._get_ahead_of(StepEventKind.REGION_READ, _BACKWARD * self.cpu_region_s)
        self.add(StepEventKind.REGION_READ, region)

    @contextlib.contextmanager
    def running(self, region: str) -> Generator[RecomputeRecorder | None, None, None]:
        is_forward = graph_task_id() == -1  # in backward a part of a recomputation
        is_recorded = is_forward and not self._is_detailed
        if is_recorded:
            self.add(StepEventKind.REGION_RUNS, region)
        if self._checks is not None:
            yield self._checks.in_forward(region)
        else:
            yield _SavesInForward(self) if is_forward and self._is_detailed else None
        if is_recorded:
            self.add(StepEventKind.REGION_RAN, region)

    @contextlib.contextmanager
    def recomputing(self, region: str) -> Generator[RecomputeRecorder | None, None, None]:
        if graph_task_id() == -1:
            yield None
            return
        self._backward_began()
        if self._timed_by is not None:
            # A dispatch mode slows the CPU: four times the CPU time of a region's forward. The spin counts as backward
            # of the previous region, with times read from the other step.
            self._spin(4.0 * self.cpu_region_s)
        self._get_ahead_of(StepEventKind.RECOMPUTE_BEGAN, _BACKWARD * self.cpu_region_s)
        self.add(StepEventKind.RECOMPUTE_BEGAN, region)
        record = RegionRecord(region, first_node=next_node())
        if self._is_detailed and self.records:
            record.waiting_bytes = sum(parcel.nbytes for parcel in self._leaving())
        self.recomputed.append(record)
        try:
            with self._mode(region, record), self._recompute_recorder(record) as recorder:
                record.began = self.device.record(self.device.current_stream())  # entering a mode takes time
                yield recorder
        finally:
            self.add(StepEventKind.RECOMPUTE_ENDED, region)

    def _recompute_recorder(self, record: RegionRecord) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:
        if self._checks is not None:
            return self._checks.in_recomputation(record.region)
        return contextlib.nullcontext(_TensorRecorder(self, record) if self._is_detailed else None)

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        if not self._is_detailed or not self._context.serves(t.device):
            return
        if not region:
            if self.records and _has_storage(t) and why_never(t, self._context) not in _NO_ACTIVATION:
                self._after.setdefault(t.untyped_storage(), self.records[-1])
            event = self.device.record(self.device.current_stream())
            memory = self.device.memory()
            self.outside.append(StepEvent(StepEventKind.TENSOR_SAVED, "", event, memory, tensor=index))
            self.device.reset_peak_stats()
        elif self.records and self.records[-1].region == region:
            record = self.records[-1]
            record.saves += 1
            # A region that will be recomputed saves its inputs only.
            is_input = self._recomputes and region not in self._kept
            self.add_tensor(record.inputs if is_input else record.saved_tensors, record, index, t)
            if not is_input:
                self.note_saved(index, t)

    def _mode(self, region: str, record: RegionRecord) -> contextlib.AbstractContextManager[object]:
        if self._timed_by is not None:
            return _ExpensiveOpTimer(self.device, record, self._timed_by)
        if self._compared_by is not None and self._checks is not None:
            return _OverwriteCheck(region, self._compared_by, self._compared, self._checks)
        return contextlib.nullcontext()

    def _freed_bytes(self) -> int:
        return sum(nbytes for ref, nbytes in self._alive_at_entry if ref() is None)

    def _leaving(self) -> Iterator[Parcel]:
        """Parcels on their way out, without inputs of the first region and storages that stay in any case."""
        older = {ref() for ref, _ in self._older}
        for parcel in self._engine.waiting():
            if parcel.source is not None and parcel.source not in older and parcel.source not in self._after:
                yield parcel

    def overwritten(self) -> set[tuple[str, int]]:
        """Region and index of each overwritten output of an expensive operator. Waits for the device."""
        return {(region, index) for region, index, differs in self._compared if bool(differs)}

    def derived(self) -> set[Hashable]:
        """Of the comparisons with derived tensors, those that found equal bytes. Waits for the device."""
        return set() if self._checks is None else self._checks.equal()

    def add_tensor(
        self, seen: list[SeenTensor], record: RegionRecord, index: int, t: torch.Tensor, input_index: int = -1
    ) -> None:
        """Append `t` to `seen`, a list of `record`, or count the bytes if no recipe moves `t`."""
        reason, is_input = self.why_never(t), seen is record.inputs
        if reason is not None:
            record.not_movable_bytes += 0 if reason in _NO_ACTIVATION else nbytes_of(t)
            if not is_input and t.layout is torch.strided and not t.is_nested:
                self._note_operand(record, index, t, holds_numbers=reason not in _NO_ACTIVATION)
            return
        storage = t.untyped_storage()
        span = span_of(t, storage.nbytes())
        event = self.device.record(self.device.current_stream())
        own = SeenTensor(index, span.nbytes, event, input_index=input_index, origin=_origin(record, t))
        own.is_bits, own.is_gathered = span.is_bits, span.is_gathered
        if is_input:
            own.made_in_regions = _made_since(self.records[0].first_node, t)
            own.tensors = weakref.ref(t), weakref.ref(_base(t))
        seen.append(own)
        if not is_input:
            with without_dispatch():
                own.expression, own.signature = self._expression_of(record, index, t)
        uses = self._given_first if is_input else self._saved_first
        first = uses.setdefault(storage, _FirstUse(record, own, []))
        if not is_input:
            self._note_operand(record, index, t)  # finds the index of the tensor by its memory
        if first.seen is own:
            if is_input and record is self.records[0]:
                self._older.append((weakref.ref(storage), first))
            number, saved = self._saved_in.get(storage, (-1, -1))
            # Were other regions in between, they would run beside memory that the region before keeps.
            if is_input and number == len(self.records) - 2 >= 0:
                own.common = next(self._commons)
                self.records[number].passed_on[saved] = own
            return
        own.nbytes = 0
        if first.record is record:
            own.shares = first.seen.index
            return
        first.elsewhere.append(own)
        own.common = first.seen.common = first.seen.common or next(self._commons)
        if is_input:
            record.common.append((own, span.nbytes))
            self._common.setdefault(weakref.ref(storage), span.nbytes)

    def note_saved(self, index: int, t: torch.Tensor) -> None:
        """Forward of the present pass saves `t` as number `index`, whether recomputation frees `t` or not."""
        t = _local(t)
        if _has_storage(t):
            with without_dispatch():
                self._saved_in.setdefault(t.untyped_storage(), (len(self.records) - 1, index))

    def is_to_hand_over(self, kind: Hashable) -> bool:
        """Of the regions of a kind, the third and fourth in backward, and so on. Not every second: blocks of two sorts
        often take turns, and may be of one kind as far as recorded."""
        self._kinds[kind] += 1
        return self._kinds[kind] % 4 in (3, 0)

    def _note_operand(self, record: RegionRecord, index: int, t: torch.Tensor, holds_numbers: bool = True) -> None:
        """`holds_numbers`: of what to copy whole numbers; weights may be whole numbers too, and large."""
        if type(t) in MAY_BE_OPERAND:
            with without_dispatch():
                record.operands.append(self._operand(record, t, holds_numbers))
            record.known.add(t, record.operands[-1], index)

    def _expression_of(self, record: RegionRecord, index: int, t: torch.Tensor) -> tuple[Expression | None, Signature]:
        """Computes `t`. With recomputation only what the warm-up has compared: see Note [How a step is measured], 5."""
        owner, parameters = owner_of(t), self._context.parameters.get(record.region)
        if owner is None or parameters is None:
            return None, ()
        deriver = Deriver(is_operand, record.known, record.first_node, parameters)
        found = deriver.derive(owner.grad_fn)
        if found is None or not all(each.is_plain for each in found.packed() if type(each) is Operand):
            return None, ()
        if self._recomputes and deriver.comparison(index, owner.dtype) not in self._context.derived:
            return None, ()
        return found.with_operands(lambda packed: self._operand(record, packed), {}), deriver.signature

    def _operand(self, record: RegionRecord, packed: Any, holds_numbers: bool = True) -> Operand:
        if type(packed) is Operand:
            return packed
        t = cast("torch.Tensor", packed[0] if isinstance(packed, tuple) else packed)
        if t.layout is not torch.strided:
            return Operand(-1, t.size(), (), t.dtype, None, is_plain=False)
        first = self._saved_first.get(t.untyped_storage())
        index = first.seen.index if first is not None and first.record is record else -1
        has_numbers = holds_numbers and not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
        return Operand(index, t.size(), t.stride(), t.dtype, t.detach().clone() if has_numbers else None)

    def _count_after_bytes(self) -> None:
        """Memory saved outside of regions stays under every plan: a region with the same storage cannot offload it.

        Freed storages belonged to an unused branch. Storages after the last region belong to no region.
        """
        numbers = {id(record): number for number, record in enumerate(self.records)}
        for storage, record in self._after.items():
            number, saved = self._saved_in.get(storage, (-1, -1))
            if number == len(self.records) - 1 >= 0:  # of regions before, the memory outlives the reader outside
                self.records[number].held_outside.add(saved)
            uses = self._saved_first.get(storage), self._given_first.get(storage)
            known = [first for first in uses if first is not None]
            # The inputs of the first region are the caller's, and allocated before the regions.
            is_callers = any(f.record is self.records[0] and f.seen in f.record.inputs for f in known)
            if record is self.records[-1] or is_callers:
                continue
            record.after_bytes += storage.nbytes()
            for first in known:
                # A region before may keep the memory for longer, and counts its bytes too. (-1: of a recomputation in
                # forward.)
                if numbers.get(id(first.record), -1) > numbers[id(record)]:
                    _stays(first)

    def why_never(self, t: torch.Tensor) -> Reason | None:
        if type(t) is torch.Tensor:
            return why_never(t.detach() if self._recomputes and is_detached_input(t) else t, self._context)
        return Reason.PARAMETER if isinstance(_base(t), torch.nn.Parameter) else Reason.SUBCLASS

    def _backward_began(self) -> None:
        has_forward_ended = any(each.kind is StepEventKind.FORWARD_ENDED for each in self.events)
        if not self._is_awaited and self._is_for_times and has_forward_ended:
            self._spin_recorded(_BACKWARD * self.cpu_region_s)
        super()._backward_began()

    def _get_ahead_of(self, kind: StepEventKind, seconds: float) -> None:
        """In the timed step, let compute spin for `seconds` if compute has passed the last event of `kind`: by the time
        the CPU has queued the region that comes now, compute would have waited for the CPU."""
        last = next((each for each in reversed(self.events) if each.kind is kind), None)
        if self._is_for_times and last is not None and self.device.is_done(last.event):
            self._spin_recorded(seconds)

    def _spin_recorded(self, seconds: float) -> None:
        with self._cpu_clock.stopped():
            self.add(StepEventKind.SPIN_BEGAN, "")
            self._spin(seconds)
            self.add(StepEventKind.SPIN_ENDED, "")

    def _spin(self, seconds: float) -> None:
        self.device.spin(self.device.current_stream(), min(seconds, 0.1))  # training must not stop noticeably

    @property
    def cpu_region_s(self) -> float:
        """CPU time from the first event to the end of forward, or to the last event so far, for each region entered."""
        ends = (each.cpu_s for each in self.events if each.kind is StepEventKind.FORWARD_ENDED)
        return (next(ends, self.events[-1].cpu_s) - self.events[0].cpu_s) / max(1, len(self.records))

    def _conclude(self) -> None:
        self.add(StepEventKind.STEP_ENDED, "")
        took_s = max(self.events[-1].at_s - self.events[0].at_s, 1e-9)
        self.collecting = (full_collections()[1] - self._collected_s) / took_s
        if self._context.recorder.watched is self._copies:
            self._context.recorder.watched = None

    @property
    def stalls(self) -> list[tuple[StepEvent, StepEvent]]:
        """Begin and end of each wait of compute for a copy, once `is_readable`; empty but in a step for times."""
        began, ended, none = StepEventKind.STALL_BEGAN, StepEventKind.STALL_ENDED, Memory(0, 0)
        return [
            (StepEvent(began, region, point, none), StepEvent(ended, region, end, none))
            for point, end, region in self._copies.stalls
            if self.device.is_done(end) and self.device.seconds_between(point, end) > 0.0
        ]

    def add(self, kind: StepEventKind, region: str, tensor: int = -1) -> None:
        with self._cpu_clock.stopped():
            memory = Memory(0, 0)
            if self._is_detailed:
                memory = self.device.memory()
                self.device.reset_peak_stats()
            event = self.device.record(self.device.current_stream())
            at_s = time.perf_counter()
            while self._passed < len(self.events) and self.device.is_done(self.events[self._passed].event):
                self._passed += 1
            self.events.append(
                StepEvent(kind, region, event, memory, self._cpu_clock.now(), self._passed, tensor, at_s)
            )

    @property
    def is_readable(self) -> bool:
        return self.is_over and self.device.is_done(self.events[-1].event)


class _SavesInForward(RecomputeRecorder):
    """Notes what the forward of a region saves that will be recomputed."""

    def __init__(self, recorder: ProfilingRecorder) -> None:
        self._recorder = recorder

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:  # noqa: ARG002 (protocol of RecomputeRecorder)
        self._recorder.note_saved(index, t)


class _TensorRecorder:
    """Records the tensors of one recomputation in a detailed step."""

    def __init__(self, recorder: ProfilingRecorder, record: RegionRecord) -> None:
        self._recorder = recorder
        self._record = record
        self._inputs: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def given(self, index: int, t: torch.Tensor) -> None:
        t = _local(t)
        if _has_storage(t):
            self._inputs.setdefault(t.untyped_storage(), index)

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:
        record = self._record
        record.saves += 1
        t = _local(t)
        if not is_dead:
            input_index = self._inputs.get(t.untyped_storage(), -1) if _has_storage(t) else -1
            self._recorder.add_tensor(record.saved_tensors, record, index, t, input_index)
            return
        origin = _origin(record, t)
        if record.provenance is not None and origin is not None:
            record.provenance.unprunable |= origin.calls
        if self._recorder.why_never(t) is None:
            record.has_dead_tensors = True

    def may_hand_over(self) -> bool:
        self._record.hands_over = self._recorder.is_to_hand_over(self._record.kind)
        return self._record.hands_over

    def asked(self, index: int) -> None:
        if not self._recorder.is_over:
            self._recorder.add(StepEventKind.TENSOR_READ, self._record.region, index)


# Saved tensors that no recipe moves, keeps or spares.
_NO_ACTIVATION = (Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER, Reason.EMPTY, Reason.OTHER_DEVICE)


class _ExpensiveOpTimer(OperatorMode):
    """Times the calls of expensive operators, and of operators on derived tensors."""

    def __init__(self, device: Device, record: RegionRecord, op_classes: OpClasses) -> None:
        super().__init__()
        self._device = device
        self._record = record
        self._op_classes = op_classes
        self._calls_of = record.provenance = op_classes.provenance()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        record = self._record
        record.ops += 1
        is_expensive = self._op_classes.is_expensive(op, args, kwargs)
        calls = self._calls_of.of_arguments(op, args, kwargs)
        if not is_expensive and calls == 0:
            return self.run_op(op, args, kwargs)
        device = self._device
        before = device.record(device.current_stream())
        out = self.run_op(op, args, kwargs)
        after = device.record(device.current_stream())
        if not is_expensive:
            self._calls_of.follow(op, args, kwargs, out)
            if calls.bit_count() == 1:
                record.expensive_ops[calls.bit_length() - 1].between.append((before, after))
            return out
        number = len(record.expensive_ops)
        nbytes = sum(map(nbytes_of, _tensors_of(out)))
        record.expensive_ops.append(SeenTensor(number, nbytes, after, str(op), before, calls))
        self._calls_of.begin(number, op, args, kwargs, out)
        device.memory()  # a device that does not track peaks learns of allocations by this call only
        return out


class _OverwriteCheck(OperatorMode):
    """Compares outputs of expensive operators, if still alive at the end of a recomputation, with their first bytes.

    `compared` receives region, index and whether the output differs; nothing if the recomputation raises.
    `checks` learns of every operator.
    """

    def __init__(
        self,
        region: str,
        op_classes: OpClasses,
        compared: list[tuple[str, int, torch.Tensor]],
        checks: DerivationChecks,
    ) -> None:
        super().__init__()
        self._checks = checks
        self._region = region
        self._op_classes = op_classes
        self._compared = compared
        self._calls = 0
        self._seen: list[tuple[int, weakref.ref[torch.UntypedStorage], torch.Tensor]] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._checks.note_operator(self._region, op, args)
        out = self.run_op(op, args, kwargs)
        if self._op_classes.is_expensive(op, args, kwargs):
            plain = filter(_has_storage, _tensors_of(out))
            with without_dispatch():
                for storage in {t.untyped_storage() for t in plain}:
                    self._seen.append((self._calls, weakref.ref(storage), checksum_of(storage)))
            self._calls += 1
        return out

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        alive = ((index, ref(), sums) for index, ref, sums in self._seen if error is None)
        with without_dispatch():
            for index, storage, sums in alive:
                if storage is not None:
                    self._compared.append((self._region, index, (checksum_of(storage) != sums).any()))


def _stays(first: _FirstUse) -> None:
    for seen in (first.seen, *first.elsewhere):
        seen.nbytes, seen.shares, seen.common = 0, OUTSIDE, 0


def _made_since(node: int, t: torch.Tensor) -> bool:
    """Whether an operator recorded by autograd as number `node` or later made the memory of `t`, as far as known."""
    maker = _base(t).grad_fn
    return maker is not None and maker._sequence_nr() >= node


def _origin(record: RegionRecord, t: torch.Tensor) -> StorageTrace | None:
    return None if record.provenance is None else record.provenance.origin_of(t)


def _has_storage(t: torch.Tensor) -> bool:
    """Whether `t` has one storage of its own: subclasses are flattened, and sparse layouts have several storages."""
    return type(t) is torch.Tensor and t.layout is torch.strided


def _base(t: torch.Tensor) -> torch.Tensor:
    return t if t._base is None else t._base


def _local(t: torch.Tensor) -> torch.Tensor:
    """The tensor inside of a wrapper that hooks take apart: the local shard of a DTensor. Else the tensor itself."""
    if type(t) is torch.Tensor or is_pending(t) or isinstance(_base(t), torch.nn.Parameter):
        return t
    parts = list(plain_tensors(t))
    return parts[0] if len(parts) == 1 else t


def _tensors_of(out: Any) -> list[torch.Tensor]:
    outputs = cast("Sequence[object]", out) if isinstance(out, tuple | list) else (out,)
    return [t for t in outputs if isinstance(t, torch.Tensor)]
