"""What trainers log."""

from collections.abc import Iterable

from ebbtide._bytes import GIB
from ebbtide.engine.ledger import Stats
from ebbtide.module import OffloadHandle


class Figures:
    """`ebbtide/moved_gib` and `ebbtide/stall_ms` of all `handles` together, since they were read last, and
    `ebbtide/host_gib` as it is."""

    def __init__(self, handles: Iterable[OffloadHandle]) -> None:
        self._handles = list(handles)
        self._before = _totals(self._stats())

    def read(self) -> dict[str, float]:
        stats = self._stats()
        before, self._before = self._before, _totals(stats)
        moved_bytes, stall_s = (now - then for now, then in zip(self._before, before, strict=True))
        return {
            "ebbtide/moved_gib": moved_bytes / GIB,
            "ebbtide/stall_ms": stall_s * 1e3,
            "ebbtide/host_gib": max((each.host_bytes for each in stats), default=0) / GIB,  # they share a store
        }

    def _stats(self) -> list[Stats]:
        return [handle.stats() for handle in self._handles]


def _totals(stats: list[Stats]) -> tuple[float, float]:
    """Bytes moved out, and seconds of stall."""
    moved_bytes = sum(each.out.nbytes for each in stats)
    return moved_bytes, sum(each.stall_forward_s + each.stall_backward_s for each in stats)
