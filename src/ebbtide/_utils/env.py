"""Every environment variable ebbtide reads, and nowhere else.

| variable            | meaning                                             | default              |
|---------------------|-----------------------------------------------------|----------------------|
| EBBTIDE_DISABLE     | 1: both doors do nothing (for a side-by-side run)   | 0                    |
| EBBTIDE_HOST_LIMIT  | host bytes a process may hold, like "64GiB"         | from free memory     |
| EBBTIDE_DISK_FOLDER | folder of the disk store when none is named         | the system's temp    |
| EBBTIDE_PROFILE     | write the first steps' profile here, see below      | nowhere              |
| EBBTIDE_PROFILE_END | 1: end the process when that is written             | 0                    |
| LOCAL_WORLD_SIZE    | processes sharing this host (set by torchrun)       | 1                    |

With EBBTIDE_PROFILE=profile.json each handle of `offload` that plans for itself writes what it measured there, as soon
as there is something: when its fourth step begins. The first three run every region again, also without a budget, for
a profile that serves any budget. Of several handles the last one's stays, of several ranks the first one writes.
"""

import os
import tempfile
from pathlib import Path

from ebbtide._errors import ConfigError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def is_disabled() -> bool:
    return _is_set("EBBTIDE_DISABLE", "write 1 to switch ebbtide off, 0 or nothing to leave it on")


def profile_path() -> Path | None:
    value = os.environ.get("EBBTIDE_PROFILE", "")
    if not value:
        return None
    if not Path(value).parent.is_dir() or Path(value).is_dir():
        raise ConfigError(f"EBBTIDE_PROFILE={value!r}: expected a file to write to, in a folder that is there")
    return Path(value)


def ends_with_profile() -> bool:
    return _is_set("EBBTIDE_PROFILE_END", "write 1 to end the process with the profile, 0 or nothing to go on")


def of_a_run_for_its_profile(path: Path) -> dict[str, str]:
    """What the environment of a process says that is to end as soon as its profile is at `path`."""
    return {"EBBTIDE_PROFILE": str(path), "EBBTIDE_PROFILE_END": "1", "EBBTIDE_DISABLE": "0"}


def _is_set(name: str, what_to_write: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={value!r}: {what_to_write}")


def host_limit_text() -> str | None:
    return os.environ.get("EBBTIDE_HOST_LIMIT") or None


def disk_folder() -> str:
    return os.environ.get("EBBTIDE_DISK_FOLDER") or tempfile.gettempdir()


def processes_on_host() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE={value!r}: expected the number of processes on this host, 1 or more")
    return int(value)
