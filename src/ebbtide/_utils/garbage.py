"""Full collections of Python's garbage collector: training stands still while it looks at all objects of the process."""

import gc
import time
from typing import NamedTuple


class Collections(NamedTuple):
    """A number of full collections, and their seconds."""

    count: int
    seconds: float


class _Watch:
    """A callback of the collector."""

    def __init__(self) -> None:
        self.total = Collections(0, 0.0)
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            count, seconds = self.total
            self.total = Collections(count + 1, seconds + time.perf_counter() - self._began_s)


_watch = _Watch()


def full_collections() -> Collections:
    """Those of the process since the first call."""
    if _watch not in gc.callbacks:
        gc.callbacks.append(_watch)
    return _watch.total
