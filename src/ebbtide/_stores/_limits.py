"""The limit of host memory for one process: free memory, control groups, and processes on the same machine."""

import threading
from pathlib import Path
from typing import NamedTuple

import psutil

from ebbtide._utils import env
from ebbtide._utils.distributed import processes_on_host
from ebbtide._utils.sizes import parse_bytes

_CGROUP = Path("/sys/fs/cgroup")


class HostMemoryLimit:
    """A limit of host memory shared by the stores of all devices of one setting.

    Args:
        limit_bytes: the maximum; None: `default_host_limit_bytes` at first use.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()  # stores of several engines, each under a lock of its engine

    @property
    def limit_bytes(self) -> int:
        with self._lock:
            if self._limit_bytes is None:
                self._limit_bytes = default_host_limit_bytes()
            return self._limit_bytes

    def take(self, nbytes: int) -> bool:
        """Take `nbytes`; False beyond the limit."""
        limit_bytes = self.limit_bytes
        with self._lock:
            if self._taken_bytes + nbytes > limit_bytes:
                return False
            self._taken_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken_bytes -= nbytes

    def refused(self, nbytes: int) -> None:
        """The system refused `nbytes` after `take`: lower the limit, an estimate, to below the refused total."""
        with self._lock:
            self._taken_bytes -= nbytes
            self._limit_bytes = min(self._limit_bytes or 0, self._taken_bytes + nbytes - 1)


def default_host_limit_bytes() -> int:
    """Bytes for one process: EBBTIDE_HOST_LIMIT, or 80 % of free memory divided among the processes of the host."""
    text = env.host_limit_text()
    if text is not None:
        return parse_bytes(text, "EBBTIDE_HOST_LIMIT")
    nbytes = min(nbytes for nbytes in free_memory() if nbytes is not None)
    # 20 % stay for the data loader, the page cache and the next program.
    return max(1, int(nbytes * 0.8) // processes_on_host())


class FreeMemory(NamedTuple):
    """Bytes left to the machine, and to the process's control group; None: no group has a limit."""

    machine_bytes: int
    group_bytes: int | None


def free_memory() -> FreeMemory:
    """Host memory that this process can still take."""
    group = cgroup_free_bytes(_CGROUP, Path("/proc/self/cgroup"))
    return FreeMemory(psutil.virtual_memory().available, group)


def cgroup_free_bytes(root: Path, membership: Path) -> int | None:
    """Bytes left to the tightest control group (v1 or v2) above the process; None without a limit."""
    if not membership.exists():
        return None
    left = [free for group in _groups(root, membership) if (free := _free_of(group)) is not None]
    return min(left, default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    groups: list[Path] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root if controllers == "" else root / "memory"
        own = base / path.lstrip("/")
        # A container sees its group mounted as the root; without a container the parents limit too.
        groups += [base, own, *(parent for parent in own.parents if base in parent.parents)]
    return groups


def _free_of(group: Path) -> int | None:
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit = _number(group / limit_name)
        used = _number(group / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used + _page_cache_bytes(group / "memory.stat"))
    return None


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None  # "max": no limit


def _page_cache_bytes(stat: Path) -> int:
    """Bytes that the kernel frees before a refusal of memory."""
    if not stat.exists():
        return 0
    rows = dict(line.split() for line in stat.read_text().splitlines())
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
