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

# Measured with parcels of 1 MiB: below it the turns between threads cost more than sharing gains.
_SMALLEST_PART_BYTES = 512 * KIB

MovePart = Callable[[Staging, torch.Tensor, int], None]
"""Moves one part of a parcel, given a buffer, the part, and its offset in the parcel."""


class Workers:
    """Threads with a buffer each, which share out the parts of one parcel.

    Args:
        name: of the direction.
        count: of threads; each starts with its first part.
        make_staging: makes a thread's buffer, also with its first part.
    """

    def __init__(self, name: str, count: int, make_staging: StagingFactory) -> None:
        self._count = count
        self._workers = tuple(_Worker(f"{name}-{i}", make_staging) for i in range(count))
        self._turns = itertools.count()

    def run(self, memory: torch.Tensor, move: MovePart) -> None:
        """Move all parts of `memory`. Raises StoreError if one failed.

        In any case every part is over when this returns or raises: nobody touches `memory` any more.
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
        """The threads end when what they were given is done."""
        self._workers = ()

    def _part_bytes(self, nbytes: int) -> int:
        share = -(-nbytes // self._count)
        return min(PART_BYTES, max(_SMALLEST_PART_BYTES, -(-share // ALIGN_BYTES) * ALIGN_BYTES))


class _Worker:
    """One thread and its buffer."""

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
