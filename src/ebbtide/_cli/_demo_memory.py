"""How much memory a run takes: of the process or of an accelerator, at its peak and over time."""

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
import torch

from ebbtide._utils.sizes import KIB

_STATUS = Path("/proc/self/status")


class Memory(Protocol):
    """Memory that is filled by training, in bytes."""

    def now_bytes(self) -> int: ...

    def peak_bytes(self) -> int:
        """The most so far, counted by whoever hands it out: sampling would miss what is short."""
        ...


class ResidentMemory:
    """What the process has in RAM. Pages of files it wrote are the system's cache and not counted."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def now_bytes(self) -> int:
        return self._process.memory_info().rss

    def peak_bytes(self) -> int:
        if _STATUS.exists():
            rows = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
            return int(rows["VmHWM"].split()[0]) * KIB
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * KIB


class AcceleratorMemory:
    """What the accelerator's allocator has handed out."""

    def __init__(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def now_bytes(self) -> int:
        return torch.accelerator.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated()


class Sampler:
    """A context in which a thread of its own notes the memory every `interval_s`, first and last moment included."""

    def __init__(self, memory: Memory, interval_s: float) -> None:
        self.seconds: list[float] = []
        self.nbytes: list[int] = []
        self._memory = memory
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ebbtide-demo-sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        self._note()
        while not self._over.wait(self._interval_s):
            self._note()
        self._note()

    def _note(self) -> None:
        self.seconds.append(round(time.perf_counter() - self._began, 4))
        self.nbytes.append(self._memory.now_bytes())
