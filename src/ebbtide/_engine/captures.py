"""Moving inside a captured graph: the engine of one capture.

Note [Captures]
~~~~~~~~~~~~~~~
While a stream is captured nothing runs: copies and waits become parts of a graph that is replayed later, with the
addresses it was captured with. What that forbids is kept by giving every capture an engine of its own:
1. Own lanes. A recorded event and one of running work must never wait for each other, so no stream, event or parcel
   is shared. A parcel needed on the other side of the border is a CaptureError, never other bytes.
2. Own room (`CapturableStore.arena`): from what the store has free, for nothing may be allocated meanwhile, and never
   given back, for replays go on writing there. Whoever wants to capture runs a step first. Room that was free when
   the capture began has no reader left, for torch.cuda.graph() waits for the device then (who calls capture_begin()
   himself has to): the reader a block remembers is forgotten, and from then on it is only the capture's.
3. No clock. Captured events never pass and must not be asked, so nothing is timed, now or later.
4. Joined. A capture can only end when every stream that took part has been waited for. Releases, arrivals and
   abandoned parcels see to most of it. The rest is what a backward leaves behind (a graph that is kept, a branch
   nobody asked for): at its end the stream that called it waits for both lanes, which costs nothing by then.
5. After the capture all device memory is the graph's pool's, which hands it to nobody but captures: a parcel that
   dies then just lets go.
What eager steps have learned is used and added to: sites are the scope's, not the engine's.
"""

import threading

import torch

from ebbtide._engine.engine import Engine
from ebbtide._engine.parcel import Ticket
from ebbtide._utils.torch_private import at_end_of_backward, graph_task_id
from ebbtide.types import CapturableStore, Device, Reason, Store


class CapturedEngine(Engine):
    """What it moves becomes part of the graph that is being captured."""

    _full = Reason.CAPTURE_FULL
    _misplaced = "was saved while a graph was captured, and is needed outside of that capture"

    def __init__(self, device: Device, store: Store, lock: "threading.RLock") -> None:
        super().__init__(device, store, lock)
        self._joined_task = -1  # the backward at whose end both lanes are waited for

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        t = super().unpack(ticket)
        task = graph_task_id()
        if task not in (-1, self._joined_task):
            self._joined_task = task
            at_end_of_backward(self._join)
        return t

    def _join(self) -> None:
        if not self.device.matches_capture():
            return  # backward was called on a stream outside: torch has its own words for that
        with self.lock:
            reader = self.device.current_stream()
            self._outbound.await_all(reader)
            self._inbound.await_all(reader)


def engine_in_capture(engine: Engine, capture: int) -> CapturedEngine | Reason:
    """An engine for `capture`, with room of `engine`'s store; the reason if nothing can move in it."""
    device = engine.device.for_capture(capture)
    if device is None or not isinstance(engine.store, CapturableStore):
        return Reason.CAPTURING
    return CapturedEngine(device, engine.store.arena(device), engine.lock)
