"""All contracts in one place: the words of the design as enums and protocols. Imports nothing of ours."""

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

Stream: TypeAlias = Any
"""A queue of work on one device, in order. Opaque: only devices/, stores/ and engine/lane.py handle one."""

StreamEvent: TypeAlias = Any
"""A point in a stream. Opaque: made by `Device.record`, waited for by `Device.wait`."""


class Reason(enum.Enum):
    """Why a save did not travel."""

    __hash__ = object.__hash__  # members are single; the one of Enum runs Python code, for every save that is kept

    PARAMETER = "parameter or a view of one"
    AUTOCAST_WEIGHT = "autocast's copy of a parameter"
    BUFFER = "buffer of the module"
    SMALL = "smaller than min_bytes"
    EMPTY = "no bytes, or freed and refilled by its owner"
    LAYOUT = "sparse, nested or quantised layout"
    SUBCLASS = "tensor subclass that cannot be flattened"
    OTHER_DEVICE = "on a device this door does not serve"
    IN_BACKWARD = "saved during backward (recompute or double backward)"
    OUTSIDE = "outside include, or inside exclude"
    KEEP_LAST = "in the last blocks, kept by keep_last"
    HELD = "its storage is kept alive by somebody else anyway"
    STORE_FULL = "the store is at its limit"
    CAPTURING = "a graph of the accelerator is being captured, and it cannot hold the moves"
    CAPTURE_FULL = "host memory cannot grow while a graph is captured: run a step with the same settings before it"
    RECIPE = "its region's recipe keeps it"


class Output(enum.Enum):
    """Why the outputs of a dear operator are not held although its region's recipe says so."""

    UNASKED = "the region's second run stops before it, or never needs it"
    CHANGED = "the region changes it in place"
    OVERWRITTEN = "a kernel of the region writes over it"
    NEEDED = "it was to be left out, and somebody needs it"


class Unable(enum.Enum):
    """Why a region ran once and was not prepared to run again, although its recipe says so."""

    USER_CHECKPOINT = "it is inside a checkpoint of the user's own"
    OTHER_HOOKS = "other saved-tensor hooks stand between it and the door"
    NO_GRAD = "it runs without grad inside a forward that has it (a reentrant checkpoint, or no_grad)"
    DIFFERED = "its recomputation was seen to differ from its forward"
    UNKNOWN_RNG = "it sets a random number generator to a state that ebbtide cannot put back"


class Wait(enum.Enum):
    """Why one stream waits for another. Each is one edge of the happens-before order; tests remove them one by one."""

    READY = "outbound waits for compute to have written the source"
    LANDED = "compute waits for the copy out before the source may be freed"
    ROOM = "inbound waits for compute to be done with the block it is given"
    ARRIVED = "compute waits for the copy in before it reads"
    WRITTEN = "inbound waits for the copy out, when it fetches for a stream that has not waited for it"
    REUSE = "outbound waits for the last reader of a block of the store"
    ABANDONED = "compute waits for a copy nobody will use, before its memory may be freed"
    JOINED = "the stream that a graph is captured on waits for all copies of the capture"


class Device(Protocol):
    """Streams, events, allocation and copies of one device. One implementation per kind of device."""

    torch_device: torch.device
    supports_timing: bool
    """Whether events can be asked if they have passed, and when. Those of a capture cannot: they never pass."""
    is_async: bool
    """Whether compute is queued by a host that may be ahead of it, or late. Else a step takes what the host takes."""
    tracks_peak: bool
    """Whether `memory` knows the most that was allocated in between. Else the most that there was when it was asked."""

    def current_stream(self) -> Stream:
        """The stream compute runs on now, in the calling thread. Read at each call, never cached."""
        ...

    def new_stream(self, name: str) -> Stream: ...

    def record(self, stream: Stream) -> StreamEvent:
        """An event that passes when all work given to `stream` so far is done."""
        ...

    def wait(self, stream: Stream, event: StreamEvent, why: Wait) -> None:
        """Work given to `stream` from now on starts after `event`. Raises StoreError if what it stood for failed."""
        ...

    def is_done(self, event: StreamEvent) -> bool:
        """True once the event has passed. Never blocks. Only with a clock."""
        ...

    def seconds_between(self, start: StreamEvent, end: StreamEvent) -> float:
        """Time from one passed event to another of the same stream. Only with a clock."""
        ...

    def hold(self, stream: Stream, seconds: float) -> None:
        """Have `stream` do nothing for about so long, so that whoever queues its work gets ahead of it. Does nothing
        where that cannot be had."""
        ...

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """uint8 device memory of shape (nbytes,), owned by `stream`: freed and reused in that stream's order."""
        ...

    def host_bytes(self, nbytes: int) -> torch.Tensor:
        """uint8 host memory of shape (nbytes,) that copies of this device reach at full speed.

        Raises MemoryError if the machine has no more to give.
        """
        ...

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Queue dst <- src on `stream`; uint8 of one shape. The caller keeps both alive until an event after it."""
        ...

    def matches_capture(self) -> bool:
        """Whether the current stream may meet the streams and events of this object.

        Not while it records a graph, unless this object is the view of that very capture: what is recorded and what
        runs must not wait for each other. Asked at every save, so it has to be cheap.
        """
        ...

    def capture_id(self) -> int | None:
        """The number of the capture that the current stream records, never used again; None if there is none to tell.

        Asked only when `matches_capture` says no.
        """
        ...

    def for_capture(self, capture: int) -> "Device | None":
        """This device as capture `capture`, under way now, sees it; None where nothing may move in that capture."""
        ...

    def memory(self) -> "Memory":
        """What is allocated now, and the most since `reset_peak_stats` was last called (by anybody)."""
        ...

    def total_bytes(self) -> int:
        """What there is of it, allocated or not."""
        ...

    def failed_allocations(self) -> int:
        """How often it ran out of memory so far; 0 where nobody counts."""
        ...

    def reset_peak_stats(self) -> None:
        """Let the peak begin with what is allocated now."""
        ...

    def free_after(self, storage: torch.UntypedStorage, event: StreamEvent, owner: Stream) -> None:
        """Let `storage` be freed in the order of `owner`, not before `event`. Does not block the host."""
        ...


class StepRecorder(Protocol):
    """What follows one step, for a planner."""

    def entered(self, region: str) -> None:
        """Forward enters a region."""
        ...

    def left(self, region: str) -> None:
        """Forward leaves it."""
        ...

    def forward_ended(self) -> None:
        """Forward has come to its end, no exception."""
        ...

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        """The desk was given `t`, the region's save of this index."""
        ...

    def read(self, region: str) -> None:
        """The desk is asked for something that was saved in the region."""
        ...

    def running(self, region: str) -> "AbstractContextManager[None]":
        """Around the first run of a region that is to run again, without what prepares it for that."""
        ...

    def running_again(self, region: str) -> "AbstractContextManager[RecomputeRecorder | None]":
        """Around a region's second run; gives what follows that, if anything does."""
        ...


class RecomputeRecorder(Protocol):
    """What follows a region's second run and the backward behind it."""

    def given(self, index: int, t: torch.Tensor) -> None:
        """The second run is given `t`, the region's input of this index."""
        ...

    def saved(self, index: int, t: torch.Tensor, is_dead: bool) -> None:
        """The second run saved `t`, its save of this index. `is_dead`: nothing that is left of the graph has it."""
        ...

    def asked(self, index: int) -> None:
        """Backward asks for that save."""
        ...


class Trace(Protocol):
    """Of one storage.

    Attributes:
        calls: that lead to it, as a sum of 2**n for the n-th.
        is_used: whether an operator was given it that reads bytes.
    """

    calls: int
    is_used: bool


class Provenance(Protocol):
    """Which calls of operators lead to which tensors.

    Attributes:
        spoiled: calls that lead to what has to be there, as a sum of 2**n for the n-th.
    """

    spoiled: int

    def begin(self, call: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """The call of this number has returned `out`."""
        ...

    def trace(self, t: torch.Tensor) -> Trace | None: ...

    def given_to(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The calls that lead to what an operator is given."""
        ...

    def follow(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """Another operator has returned `out`. The calls that lead to that."""
        ...


class Dearness(Protocol):
    """What a planner has to know of operators."""

    def is_dear(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether its outputs are worth holding."""
        ...

    def lineage(self) -> Provenance:
        """Of a region's dear calls."""
        ...


class Memory(NamedTuple):
    """Of a device, in bytes."""

    allocated_bytes: int
    peak_bytes: int


class Block(Protocol):
    """Room for one parcel in a store."""

    nbytes: int


class Store(Protocol):
    """Where parcels wait. Calls come under the engine's lock, except `give_back`."""

    def reserve(self, nbytes: int) -> Block | None:
        """Room for `nbytes`, or None when the store is at its limit."""
        ...

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        """Queue block <- src behind what `stream` waits for; returns `landed`. `src` is uint8 of shape (nbytes,)."""
        ...

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        """Queue dst <- block; returns `arrived`. Repeatable."""
        ...

    def give_back(self, block: Block) -> None:
        """The block is free again behind its last reader. Any thread, also from finalisers: takes no lock."""
        ...

    def stats(self) -> "StoreStats": ...

    def close(self) -> None:
        """Free everything. Parcels still out become unreadable."""
        ...


@runtime_checkable
class CapturableStore(Store, Protocol):
    """A store whose copies are the device's own, so that a graph can hold them."""

    def arena(self, device: Device) -> Store:
        """Room for one capture, in which `device` copies, carved out of what this store has free now and later.

        It takes no new memory and never gives room back: the graph has the addresses, and is replayed for as long as
        its owner likes. `reserve` and `stats` come under the lock of this store's engine.
        """
        ...


class StoreStats(NamedTuple):
    """What a store holds, in bytes."""

    used_bytes: int
    reserved_bytes: int
    limit_bytes: int | None
    growths: int
    """How often memory or file space was newly taken; constant in steady state."""
    captured_bytes: int = 0
    """Of `used_bytes`, what captured graphs keep for their replays."""


StoreFactory: TypeAlias = Callable[[Device], Store]
"""Makes the store of an engine. `store=` of the doors takes one besides the built-in names."""
