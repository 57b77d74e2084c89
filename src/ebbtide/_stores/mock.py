"""A store for tests: ordinary memory, with failures and delays on demand. Ships with the package."""

from collections import deque
from collections.abc import Callable

import torch

from ebbtide._errors import StoreError, StoreFullError
from ebbtide._types import Block, Device, StoreStats, Stream, StreamEvent
from ebbtide._utils.storage import as_bytes


class MockBlock:
    """Room for one parcel, a separate allocation."""

    __slots__ = ("bytes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = as_bytes(torch.UntypedStorage(nbytes))


class MockStore:
    """Parcels in ordinary memory, one allocation each.

    Args:
        device: copies the parcels.
        limit_bytes: beyond the limit `reserve` returns None; None: no limit.
        fail: called with "reserve", "write" or "read" before each operation; an exception of `fail` is the failure of
            the store, and a wait in `fail` the delay.

    Example::

        def store(device):  # defined once, outside the loop: the function is the key of its engines
            return MockStore(device, fail=my_failure)

        with ebbtide.offload_activations(store=store): ...
    """

    def __init__(
        self, device: Device, limit_bytes: int | None = None, fail: Callable[[str], None] | None = None
    ) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._fail = fail
        self._used_bytes = 0
        self._returned: deque[int] = deque()  # by finalisers of any thread
        self.is_closed = False

    def reserve(self, nbytes: int) -> MockBlock | None:
        self._maybe_fail("reserve")
        self._take_back()
        if self._limit_bytes is not None and self._used_bytes + nbytes > self._limit_bytes:
            return None
        self._used_bytes += nbytes
        return MockBlock(nbytes)

    def write(self, block: Block, src: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, MockBlock)
        self._maybe_fail("write")
        self._device.copy(block.bytes, src, stream)
        return self._device.record(stream)

    def read(self, block: Block, dst: torch.Tensor, stream: Stream) -> StreamEvent:
        assert isinstance(block, MockBlock)
        if self.is_closed:
            raise StoreError("the mock store was closed while this graph still had parcels inside")
        self._maybe_fail("read")
        self._device.copy(dst, block.bytes, stream)
        return self._device.record(stream)

    def give_back(self, block: Block) -> None:
        self._returned.append(block.nbytes)

    def stats(self) -> StoreStats:
        self._take_back()
        # One allocation per parcel, and no reserve: no growth to count.
        return StoreStats(self._used_bytes, self._used_bytes, self._limit_bytes, growths=0)

    def close(self) -> None:
        self.is_closed = True

    def _take_back(self) -> None:
        while self._returned:
            self._used_bytes -= self._returned.popleft()

    def _maybe_fail(self, operation: str) -> None:
        if self._fail is None:
            return
        try:
            self._fail(operation)
        except StoreFullError:
            raise
        except OSError as error:
            raise StoreError(f"{operation} failed: {error}") from error
