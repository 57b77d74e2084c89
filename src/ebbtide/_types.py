"""Contracts between the packages of ebbtide: enums and protocols. Imports nothing of ebbtide."""

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

Stream: TypeAlias = Any
"""Ordered queue of work on a device. Opaque to everything but devices, stores and lanes."""

StreamEvent: TypeAlias = Any
"""Point in a stream. Opaque: made by `Device.record`, waited for by `Device.wait`."""


class Reason(enum.Enum):
    """Why a saved tensor stays on the device."""

    if not TYPE_CHECKING:
        __hash__ = object.__hash__  # Enum's own hash runs Python code, once for every tensor that is kept

    PARAMETER = "parameter or a view of one"
    AUTOCAST_WEIGHT = "autocast's copy of a parameter"
    BUFFER = "buffer of the module"
    SMALL = "smaller than min_bytes"
    EMPTY = "no bytes, or freed and refilled by its owner"
    LAYOUT = "sparse, nested or quantised layout"
    SUBCLASS = "tensor subclass that cannot be flattened"
    OTHER_DEVICE = "on a device that is not offloaded"
    IN_BACKWARD = "saved during backward (recompute or double backward)"
    OUTSIDE = "outside include"
    EXCLUDED = "inside exclude"
    KEEP_LAST = "in the last blocks, kept by keep_last"
    HELD = "its storage is referenced elsewhere anyway"
    STORE_FULL = "the store is at its limit"
    CAPTURING = "a graph of the accelerator is being captured, and it cannot hold the moves"
    COMPILED_CAPTURE = "its region is compiled into CUDA graphs, which read it at one address"
    CAPTURE_FULL = "host memory cannot grow while a graph is captured: run a step with the same settings before it"
    RECIPE = "its region's recipe keeps it"


class Output(enum.Enum):
    """Why outputs of a compute-intensive operator are not saved although the region's recipe says to save outputs."""

    UNUSED = "recomputation of the region stops earlier, or never needs it"
    CHANGED = "the region changes it in place"
    OVERWRITTEN = "a kernel of the region writes over it"
    NEEDED = "its operator was pruned from the recomputation, and the output is needed"


class Unable(enum.Enum):
    """Why a region's forward was not prepared for recomputation although the region's recipe recomputes."""

    USER_CHECKPOINT = "it is inside a checkpoint of the user's own"
    OTHER_HOOKS = "other saved-tensor hooks stand between it and ebbtide's"
    NO_GRAD = "it runs without grad inside a forward that has it (a reentrant checkpoint, or no_grad)"
    DIFFERED = "its recomputation was seen to differ from its forward"
    CUDA_GRAPHS = "it is compiled into CUDA graphs, which overwrite saved tensors when forward runs in backward"
    UNKNOWN_RNG = "it sets a random number generator to a state that ebbtide cannot put back"


class Wait(enum.Enum):
    """Why a stream waits for another stream: each member is an edge of the happens-before order, and has a mutation
    test that removes the wait."""

    READY = "outbound waits for compute to have written the source"
    LANDED = "compute waits for the copy out before the source may be freed"
    ROOM = "inbound waits for compute to be done with the block it is given"
    ARRIVED = "compute waits for the copy in before it reads"
    WRITTEN = "inbound waits for the copy out, when it fetches for a stream that has not waited for it"
    REUSE = "outbound waits for the last reader of a block of the store"
    ABANDONED = "compute waits for a copy nobody will use, before its memory may be freed"
    JOINED = "the stream that a graph is captured on waits for all copies of the capture"


class Device(Protocol):
    """Streams, events, allocation and copies of a kind of device.

    Attributes:
        torch_device: the device as torch names it.
        supports_timing: `is_done` and `seconds_between` work. False in a capture, where events never pass.
        is_async: the host queues compute and may run ahead of it. Otherwise a step takes as long as the host takes.
        tracks_peak: `memory` reports the highest allocation since `reset_peak_stats`. Otherwise `memory` reports the
            highest allocation that any call of `memory` has found.
    """

    torch_device: torch.device
    supports_timing: bool
    is_async: bool
    tracks_peak: bool

    def current_stream(self) -> Stream:
        """The calling thread's compute stream. Read at each call, never cached."""

    def new_stream(self, name: str) -> Stream: ...

    def record(self, stream: Stream) -> StreamEvent:
        """An event that passes when all work queued on `stream` so far is done."""

    def wait(self, stream: Stream, event: StreamEvent, why: Wait) -> None:
        """Work queued on `stream` from now on starts after `event`.

        Raises:
            StoreError: the copy behind `event` failed.
        """

    def is_done(self, event: StreamEvent) -> bool:
        """Whether the event has passed. Never blocks. Requires `supports_timing`."""
        ...

    def seconds_between(self, start: StreamEvent, end: StreamEvent) -> float:
        """Time between two passed events. Requires `supports_timing`."""
        ...

    def spin(self, stream: Stream, seconds: float) -> None:
        """Keep `stream` busy for about `seconds`, for the host to get ahead. No effect where unsupported."""

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """uint8 device memory of shape (nbytes,), owned by `stream`: freed and reused in the order of `stream`."""
        ...

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """uint8 host memory of shape (nbytes,) that copies of the device reach at full speed.

        Raises:
            MemoryError: the machine has no more memory.
        """
        ...

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Queue dst <- src (uint8, equal shapes) on `stream`. The caller keeps both alive until a later event."""

    def mark_used(self, t: torch.Tensor, stream: Stream) -> None:
        """`stream` uses the memory of `t`: once freed, it is reused behind all work that `stream` has queued by then.

        No effect for the stream that owns the memory, in whose order it is freed anyway.
        """

    def matches_capture(self) -> bool:
        """Whether the current stream may meet streams and events of the object.

        Recorded work and running work must not wait for each other: False while the current stream records a graph,
        unless the object is the view of exactly that capture. Called for every saved tensor, hence cheap.
        """
        ...

    def capture_id(self) -> int | None:
        """Number, never reused, of the capture that the current stream records; None if unknown.

        Called only after `matches_capture` has returned False.
        """

    def for_capture(self, capture: int) -> "Device | None":
        """The device's view of the running capture `capture`; None if nothing can move in that capture."""

    def memory(self) -> "Memory":
        """Allocated bytes now, and the peak since anybody last called `reset_peak_stats`."""
        ...

    def total_bytes(self) -> int:
        """Memory of the device, allocated or not."""
        ...

    def available_bytes(self) -> int:
        """Memory that this process has, or could get beside other processes now."""
        ...

    def failed_allocations(self) -> int:
        """Count of out-of-memory failures so far; 0 where unknown."""
        ...

    def reset_peak_stats(self) -> None:
        """Restart the peak from the present allocation."""

    def free_after(self, storage: torch.UntypedStorage, event: StreamEvent, owner: Stream) -> None:
        """Free `storage` in the order of `owner`, not before `event`. Does not block the host."""


class StepRecorder(Protocol):
    """Records a training step for the planner.

    Attributes:
        sees_saved_tensors: every saved tensor has to pass, also of a region that keeps all.
    """

    sees_saved_tensors: bool

    def entered(self, region: str) -> None:
        """Forward has entered a region."""

    def left(self, region: str) -> None:
        """Forward has left the region."""

    def forward_ended(self) -> None:
        """Forward has ended without an exception."""

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        """The pack hook was called with `t`, saved tensor number `index` of the region."""

    def read(self, region: str) -> None:
        """The unpack hook was called for a tensor saved in the region."""

    def running(self, region: str) -> "AbstractContextManager[RecomputeRecorder | None]":
        """Around the forward of a region that is recomputed, without the preparation for recomputing; yields a recorder
        of its saved tensors, if there is any."""
        ...

    def recomputing(self, region: str) -> "AbstractContextManager[RecomputeRecorder | None]":
        """Around the recomputation of a region; yields the recorder of the recomputation, if there is any."""
        ...


class RecomputeRecorder(Protocol):
    """Records the recomputation of a region and the backward behind the recomputation."""

    def given(self, index: int, t: torch.Tensor) -> None:
        """The recomputation receives `t` as input number `index`."""

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:
        """The recomputation saved `t` as number `index`. `is_dead`: the remaining graph does not need the tensor."""

    def asked(self, index: int) -> None:
        """Backward reads the saved tensor."""

    def may_hand_over(self) -> bool:
        """Whether each recomputed tensor is to belong to the node that reads it, as in steps that nobody records."""
        return False


class StorageTrace(Protocol):
    """Origin of one storage.

    Attributes:
        calls: operator calls that lead to the storage: a bit mask, bit n for call number n.
        is_used: an operator that reads bytes has received the storage.
    """

    calls: int
    is_used: bool


class CallProvenance(Protocol):
    """Records which operator calls lead to which tensors.

    Attributes:
        unprunable: calls whose results have to be recomputed: a bit mask, bit n for call number n.
    """

    unprunable: int

    def begin(self, call: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Call number `call` has returned `out`."""

    def origin_of(self, t: torch.Tensor) -> StorageTrace | None: ...

    def of_arguments(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Bit mask of the calls that lead to the arguments of an operator."""
        ...

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """An operator without a number has returned `out`. Returns the calls that lead to `out`, as a bit mask."""
        ...


class OpClasses(Protocol):
    """Knowledge about operators that profiles need."""

    def is_expensive(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether saving the outputs is worthwhile."""
        ...

    def provenance(self) -> CallProvenance:
        """A new recorder for the expensive calls of a region."""
        ...


class Memory(NamedTuple):
    """Memory of a device, in bytes."""

    allocated_bytes: int
    peak_bytes: int


class Block(Protocol):
    """Room for a parcel in a store."""

    nbytes: int


class Store(Protocol):
    """Memory where parcels wait. The engine's lock is held during all calls but `give_back`."""

    def reserve(self, nbytes: int) -> Block | None:
        """Room for `nbytes`; None when the store is at its limit."""

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        """Queue block <- src behind everything `stream` waits for. `src` is uint8 of shape (nbytes,).

        Returns:
            `landed`: the event behind which the block holds the bytes.
        """

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        """Queue dst <- block and return `arrived`, the event behind which `dst` is valid. Repeatable."""

    def give_back(self, block: Block) -> None:
        """Free the block behind its last reader. Any thread, also finalisers: takes no lock."""

    def stats(self) -> "StoreStats": ...

    def close(self) -> None:
        """Free everything. Parcels that still wait in the store become unreadable."""


@runtime_checkable
class CapturableStore(Store, Protocol):
    """A store whose copies run on the device's own streams and can be captured in a graph."""

    def arena(self, device: Device) -> Store:
        """Room for one capture, in which `device` copies, carved out of present and future free room of the store.

        The arena takes no new memory and never returns room: the graph keeps the addresses for all replays. `reserve`
        and `stats` of the arena are called under the lock of the store's engine.
        """
        ...


class StoreStats(NamedTuple):
    """Contents of a store, in bytes.

    Attributes:
        growths: how often the store took new memory or file space; constant in steady state.
        captured_bytes: share of `used_bytes` that captured graphs keep for replays.
    """

    used_bytes: int
    reserved_bytes: int
    limit_bytes: int | None
    growths: int
    captured_bytes: int = 0


StoreFactory: TypeAlias = Callable[[Device], Store]
"""Makes the store of an engine. `store=` of the API accepts a factory besides the built-in names."""
