"""The threads that read and write the file of a disk store."""

import contextlib
import functools
import itertools
from collections.abc import Callable

import torch

from ebbtide._devices.cpu import HostEvent, HostStream
from ebbtide._errors import StoreError
from ebbtide._stores._scratch import ALIGN_BYTES
from ebbtide._stores._staging import PART_BYTES, Staging, StagingFactory
from ebbtide._utils.sizes import KIB

MovePart = Callable[[Staging, torch.Tensor, int], None]
"""Moves one part of a parcel, given a buffer, the part, and the offset of the part."""


class Workers:
    """Threads with a buffer each that share the parts of one parcel.

    Args:
        name: of the direction.
        count: of threads; a thread starts at the first part.
        make_staging: makes the buffer of a thread, also at the first part.
    """

    def __init__(self, name: str, count: int, make_staging: StagingFactory) -> None:
        self._count = count
        self._workers = tuple(_Worker(f"{name}-{i}", make_staging) for i in range(count))
        self._turns = itertools.count()

    def run(self, memory: torch.Tensor, move: MovePart) -> None:
        """Move all parts of `memory`. Raises StoreError after a failure.

        No thread touches `memory` after the return or the error: every part is over.
        """
        workers = self._workers
        if not workers:
            raise StoreError("the disk store is closed")
        step = self._part_bytes(memory.numel())
        with contextlib.ExitStack() as parts:
            for offset in range(0, memory.numel(), step):
                part = memory[offset : offset + step]
                worker = workers[next(self._turns) % len(workers)]
                parts.callback(worker.submit(move, part, offset).result)

    def close(self) -> None:
        """End the threads after all submitted work."""
        self._workers = ()

    def _part_bytes(self, nbytes: int) -> int:
        share = -(-nbytes // self._count)
        # Below 512 KiB a change of threads costs more than sharing gains (measured with parcels of 1 MiB).
        return min(PART_BYTES, max(512 * KIB, -(-share // ALIGN_BYTES) * ALIGN_BYTES))


class _Worker:
    """A thread with a buffer."""

    def __init__(self, name: str, make_staging: StagingFactory) -> None:
        self._stream = HostStream(name)
        self._make_staging = make_staging
        self._staging: Staging | None = None

    def submit(self, move: MovePart, part: torch.Tensor, offset: int) -> HostEvent:
        return self._stream.submit(functools.partial(self._run, move, part, offset))

    def _run(self, move: MovePart, part: torch.Tensor, offset: int) -> None:
        if self._staging is None:
            self._staging = self._make_staging()
        move(self._staging, part, offset)
