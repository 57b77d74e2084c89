"""Buffers that a region's forward changes: its second run must read what the first one read, and change nothing.

BatchNorm's running statistics are the common case: without this they would be updated twice a step, and nothing would
say so until evaluation. Which buffers change is seen by their versions. Normalisation layers, whose kernels write
without counting, are known by class.
"""

import contextlib
from collections.abc import Generator
from typing import NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase

from ebbtide._errors import ModuleError


class _Before(NamedTuple):
    """A buffer as a forward found it."""

    owner: torch.nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None: it has never changed so far."""

    @property
    def was_changed(self) -> bool:
        return (
            self.owner._buffers.get(self.name) is not self.buffer
            or self.buffer._version != self.version
            or _is_written_uncounted(self.owner)
        )


class Snapshot:
    """The buffers that one forward has changed, as it found them."""

    def __init__(self, changed: list[_Before]) -> None:
        self._changed = changed

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """In their places stand copies of what they were; they themselves are left alone, and back afterwards."""
        now = [(before, before.owner._buffers[before.name]) for before in self._changed]
        try:
            for before in self._changed:
                assert before.copy is not None
                before.owner._buffers[before.name] = before.copy.clone()
            yield
        finally:
            for before, buffer in now:
                before.owner._buffers[before.name] = buffer


class RegionBuffers:
    """The buffers of one region, and which of them a forward is known to leave alone."""

    def __init__(self, region: torch.nn.Module) -> None:
        self._owners = [module for module in region.modules() if module._buffers]
        self._steady: set[tuple[int, str]] = set()

    def before(self) -> list[_Before]:
        """To be called where a forward begins: what it finds, with copies of what it may change."""
        return [
            _Before(owner, name, buffer, buffer._version, self._copy(owner, name, buffer))
            for owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def after(self, found: list[_Before]) -> Snapshot | None:
        """Where it ends: what its second run has to find again, or None for nothing.

        Raises ModuleError if a buffer was changed that no forward had changed before: what it held is gone.
        """
        changed: list[_Before] = []
        for before in found:
            key = (id(before.owner), before.name)
            if not before.was_changed:
                self._steady.add(key)
                continue
            self._steady.discard(key)
            if before.copy is None:
                raise ModuleError(
                    f"{type(before.owner).__name__} changed its buffer {before.name!r} in a forward that is to run "
                    "again in backward, after leaving it alone in the ones before: what it held is gone. Give its "
                    "region the recipe 'keep' or 'offload'"
                )
            changed.append(before)
        return Snapshot(changed) if changed else None

    def _copy(self, owner: torch.nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor | None:
        is_steady = (id(owner), name) in self._steady and not _is_written_uncounted(owner)
        return None if is_steady else buffer.detach().clone()


def _is_written_uncounted(owner: torch.nn.Module) -> bool:
    """Normalisation in training mode with running statistics: its kernels write them without a version."""
    return isinstance(owner, _NormBase) and owner.training and owner.track_running_stats
