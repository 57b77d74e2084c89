"""Every environment variable ebbtide reads, and nowhere else.

| variable            | meaning                                             | default              |
|---------------------|-----------------------------------------------------|----------------------|
| EBBTIDE_DISABLE     | 1: both doors do nothing (for a side-by-side run)   | 0                    |
| EBBTIDE_HOST_LIMIT  | host bytes a process may hold, like "64GiB"         | from free memory     |
| EBBTIDE_DISK_FOLDER | folder of the disk store when none is named         | the system's temp    |
| LOCAL_WORLD_SIZE    | processes sharing this host (set by torchrun)       | 1                    |
"""

import os
import tempfile

from ebbtide._errors import ConfigError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def is_disabled() -> bool:
    value = os.environ.get("EBBTIDE_DISABLE", "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"EBBTIDE_DISABLE={value!r}: write 1 to switch ebbtide off, 0 or nothing to leave it on")


def host_limit_text() -> str | None:
    return os.environ.get("EBBTIDE_HOST_LIMIT") or None


def disk_folder() -> str:
    return os.environ.get("EBBTIDE_DISK_FOLDER") or tempfile.gettempdir()


def processes_on_host() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE={value!r}: expected the number of processes on this host, 1 or more")
    return int(value)
