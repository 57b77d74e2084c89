"""Solves in a separate process, while training goes on by the present plan (law 13).

Note [A process per question]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A thread would hold up training: simulations are Python, and the interpreter runs one thread at a time. A question is
rare (two or three in a run), so a process starts for each and ends with the answer, at the latest a few seconds after
training; nothing is left to end or to restart. The process imports the planner alone, without torch and without the
user's script (a pool of `multiprocessing` would import the script).
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future

from ebbtide._errors import PlanError
from ebbtide._planner import highs
from ebbtide._planner.solve import Answer, Question
from ebbtide._planner.stages import answer_for_stage

_log = logging.getLogger(__name__)

_MARK = b"the answer of ebbtide's solver:"
_NICE = 10  # the process yields to training where cores are few
_CODE = (
    f"import os, sys; os.nice({_NICE}); sys.path[:] = {{path!r}}; from ebbtide._planner.process import serve; serve()"
)


def solve_elsewhere(question: Question) -> "Future[Answer]":
    """The answer to come. The future raises PlanError if no plan fits."""
    future: Future[Answer] = Future()
    threading.Thread(target=_ask, args=(question, future), name="ebbtide-solver", daemon=True).start()
    return future


def solve_here(question: Question) -> "Future[Answer]":
    """The answer, worked out in this thread: for training that waits for plans."""
    future: Future[Answer] = Future()
    try:
        future.set_result(answer_for_stage(question))
    except PlanError as error:
        future.set_exception(error)
    return future


def serve() -> None:
    """Read one question from the standard input, and write the answer, or the error, to the standard output, behind a
    mark: modules may print during their import."""
    found: Answer | PlanError
    highs.use_one_core()
    try:
        found = answer_for_stage(pickle.load(sys.stdin.buffer))  # noqa: S301 (of the parent process)
    except PlanError as error:
        found = error
    sys.stdout.buffer.write(_MARK + pickle.dumps(found))


def _ask(question: Question, future: "Future[Answer]") -> None:
    try:
        found = _answered_by_child(question)
    except BaseException as error:
        future.set_exception(error)
        return
    if isinstance(found, PlanError):
        future.set_exception(found)
    else:
        future.set_result(found)


def _answered_by_child(question: Question) -> Answer | PlanError:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # one core, and little memory
    command = [sys.executable or "python3", "-c", _CODE.format(path=sys.path)]
    try:
        child = subprocess.run(  # noqa: S603 (this interpreter)
            command, input=pickle.dumps(question), capture_output=True, env=environment, check=False
        )
    except OSError as error:  # no such file in an embedded interpreter, no more processes
        why = f"cannot start ({error})"
    else:
        found = child.stdout.partition(_MARK)[2]
        if child.returncode == 0 and found:
            return pickle.loads(found)  # noqa: S301 (of the child process)
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        why = f"ended with {child.returncode} ({lines[-1]})"
    _log.warning("the solver's process %s: solving in a thread instead", why)
    return answer_for_stage(question)
