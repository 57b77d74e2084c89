"""Starts the demo's workers and listens to them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, Any

from ebbtide._cli._demo_task import Outcome, Task
from ebbtide._errors import EbbtideError

_LAST_LINES = 15

# For both runs alike.
_ENVIRONMENT = {
    # glibc raises its threshold for blocks of their own to the largest block it has seen freed; what is freed below
    # it stays resident, at the mercy of what lies above. With a fixed one the memory of every large tensor goes back
    # to the system the moment it is freed, and the resident memory is what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # Without it cuBLAS picks its scratch memory, and with it the order of sums, as it comes.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def run_worker(task: Task, tell_step: Callable[[int], None]) -> Outcome:
    """Run `task` in a process of its own. Raises EbbtideError with its last words if it did not finish."""
    # Into a file: a pipe nobody reads would block the worker once it is full.
    with tempfile.TemporaryFile("w+") as errors, _start(task, errors) as worker:
        assert worker.stdout is not None
        try:
            outcome = _listen(worker.stdout, tell_step)
        except BaseException:
            worker.kill()  # we were interrupted: nobody will hear the rest
            raise
        status = worker.wait()
        if outcome is None or status != 0:
            errors.seek(0)
            raise EbbtideError(f"the {task.mode.value} run {_end_of(status)}\n{_last_lines(errors)}".rstrip())
    return outcome


def _start(task: Task, errors: IO[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603 (our own interpreter and module)
        [sys.executable, "-m", "ebbtide._cli._demo_worker", task.to_json()],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )


def _listen(lines: Iterable[str], tell_step: Callable[[int], None]) -> Outcome | None:
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        if "outcome" in message:
            return Outcome.from_dict(message["outcome"])
        tell_step(message["step"])
    return None


def _end_of(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed, most likely for lack of memory: try --small"
    return f"ended with exit status {status}"


def _last_lines(errors: IO[str]) -> str:
    return "".join(errors.readlines()[-_LAST_LINES:])
