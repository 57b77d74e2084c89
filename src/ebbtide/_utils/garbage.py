"""Full collections of Python's garbage collector: training waits while the collector looks at all objects."""

import gc
import time


class _Watch:
    """A callback of the collector."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._began_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._began_s:  # a finaliser may have added the callback during a collection
            self.count += 1
            self.seconds += time.perf_counter() - self._began_s
            self._began_s = 0.0


_watch = _Watch()


def full_collections() -> tuple[int, float]:
    """Number and seconds of those in this process since the first call."""
    if _watch not in gc.callbacks:
        gc.callbacks.append(_watch)
    return _watch.count, _watch.seconds
