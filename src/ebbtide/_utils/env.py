"""All environment variables of ebbtide are read in this file.

| variable            | meaning                                             | default              |
|---------------------|-----------------------------------------------------|----------------------|
| EBBTIDE_DISABLE     | 1: entry points do nothing (for a run side by side) | 0                    |
| EBBTIDE_HOST_LIMIT  | most host memory of a process, like "64GiB"         | from free memory     |
| EBBTIDE_DISK_FOLDER | folder of a disk store without a folder of its own  | the system's temp    |
| EBBTIDE_PROFILE     | file to write the profile of the first steps to     | no file              |
| EBBTIDE_PROFILE_END | 1: end the process after writing the profile        | 0                    |
| EBBTIDE_REPORT      | file to write a report of the run to, for           | no file              |
|                     | `ebbtide report`                                    |                      |
| EBBTIDE_SYNCS       | 1: reports name the lines in which the host waits   | 0                    |
|                     | for the device; steps are slower                    |                      |
| EBBTIDE_WAIT        | 1: training waits for plans, and repeats exactly    | 0                    |
| LOCAL_WORLD_SIZE    | processes on the host (set by torchrun)             | as other launchers   |
|                     |                                                     | say, or all ranks    |

With EBBTIDE_PROFILE=profile.json, each planning handle of `offload` writes its profile at the start of step 4. The
first three steps recompute every region, with or without a budget: the profile serves any budget. The last handle wins,
and only the first of the ranks that share a plan writes: a rank other than 0 adds its number to the file's name.
"""

import os
import re
import tempfile
from pathlib import Path

from ebbtide._errors import ConfigError


def is_disabled() -> bool:
    return _is_set("EBBTIDE_DISABLE", "write 1 to switch ebbtide off, 0 or nothing to leave it on")


def profile_path() -> Path | None:
    return _path("EBBTIDE_PROFILE")


def report_path() -> Path | None:
    return _path("EBBTIDE_REPORT")


def _path(name: str) -> Path | None:
    value = os.environ.get(name, "")
    if not value:
        return None
    if not Path(value).parent.is_dir() or Path(value).is_dir():
        raise ConfigError(f"{name}={value!r}: expected a file to write to, in an existing folder")
    return Path(value)


def ends_with_profile() -> bool:
    return _is_set("EBBTIDE_PROFILE_END", "write 1 to end the process with the profile, 0 or nothing to go on")


def waits_for_plans() -> bool:
    return _is_set("EBBTIDE_WAIT", "write 1 to have training wait for plans, 0 or nothing to go on meanwhile")


def watches_syncs() -> bool:
    advice = "write 1 to have synchronisations of the host in reports, 0 or nothing to leave them out"
    return _is_set("EBBTIDE_SYNCS", advice) and not is_disabled()


def profiling_variables(path: Path) -> dict[str, str]:
    """Variables for a process that writes its profile to `path` and ends."""
    return {"EBBTIDE_PROFILE": str(path), "EBBTIDE_PROFILE_END": "1", "EBBTIDE_DISABLE": "0"}


def _is_set(name: str, advice: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name}={value!r}: {advice}")


def host_limit_text() -> str | None:
    return os.environ.get("EBBTIDE_HOST_LIMIT") or None


def disk_folder() -> str:
    return os.environ.get("EBBTIDE_DISK_FOLDER") or tempfile.gettempdir()


def rank_of_launcher() -> tuple[int, int]:
    """Number of this process and processes of the job, as torchrun says; (0, 1) without torchrun."""
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else (0, 1)


def processes_on_host() -> int | None:
    """Number of processes that the launcher has started on this host; None if no launcher says."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):  # torchrun, Open MPI, MPICH
        value = os.environ.get(name, "")
        if value:
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"{name}={value!r}: expected the number of processes on the host, 1 or more")
            return int(value)
    # Slurm lists all hosts of a step, "8(x2),4", and not which of them is this one.
    return max(map(int, re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))), default=None)
