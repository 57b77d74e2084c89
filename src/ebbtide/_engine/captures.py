"""Moves inside a captured graph: the engine of a capture.

Note [Captures]
~~~~~~~~~~~~~~~
During a capture nothing runs: copies and waits become parts of a graph, replayed later at the captured addresses.
Every capture has an engine of its own, because of five restrictions:
1. Own lanes. A recorded event and running work must never wait for each other: captures share no stream, event or
   parcel with running work. A parcel needed across the border is a CaptureError, never wrong bytes.
2. Own room (`CapturableStore.arena`), taken from the store's free room, since nothing may be allocated meanwhile, and
   never returned, since replays write to the room. Run a step before a capture. Room that was free at the start of the
   capture has no reader left, because torch.cuda.graph() waits for the device (callers of capture_begin() have to):
   the arena forgets the reader of a block, and owns the block from then on.
3. No clock. Captured events never pass and must not be queried: nothing is timed, now or later.
4. Joined. A capture can end only when every participating stream has been waited for. Releases, arrivals and
   abandoned parcels cover most of the streams. A backward may leave copies behind (a retained graph, an unused
   branch): at the end of backward the calling stream waits for the two lanes, at no cost.
5. After the capture all device memory belongs to the graph's pool, reserved for captures: a parcel dying after the
   capture drops the memory without waiting.
Captures use and extend the order learned by eager steps: sites belong to the HookContext, not to the engine.
"""

import threading

import torch

from ebbtide._engine.engine import Engine
from ebbtide._engine.parcel import Ticket
from ebbtide._types import CapturableStore, Device, Reason, Store
from ebbtide._utils.torch_private import at_end_of_backward, graph_task_id


class CapturedEngine(Engine):
    """Engine of a running capture: copies become part of the graph."""

    _full = Reason.CAPTURE_FULL
    _misplaced = "was saved while a graph was captured, and is needed outside of that capture"

    def __init__(self, device: Device, store: Store, lock: "threading.RLock") -> None:
        super().__init__(device, store, lock)
        self._joined_task = -1  # the backward that waits for the lanes at the end

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        t = super().unpack(ticket)
        task = graph_task_id()
        if task not in (-1, self._joined_task):
            self._joined_task = task
            at_end_of_backward(self._join)
        return t

    def _join(self) -> None:
        if not self.device.matches_capture():
            return  # backward was called on a stream outside of the capture: torch raises an error
        with self.lock:
            reader = self.device.current_stream()
            self._outbound.await_all(reader)
            self._inbound.await_all(reader)


def engine_in_capture(engine: Engine, capture: int) -> CapturedEngine | Reason:
    """An engine for `capture`, with room of `engine`'s store; the reason if nothing can move in the capture."""
    device = engine.device.for_capture(capture)
    if device is None or not isinstance(engine.store, CapturableStore):
        return Reason.CAPTURING
    return CapturedEngine(device, engine.store.arena(device), engine.lock)
