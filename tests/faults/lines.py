"""Acts at chosen lines of ebbtide's own code: interrupts, collections of garbage."""

import linecache
import sys
from collections.abc import Callable, Container
from pathlib import Path

import ebbtide

_SOURCE = str(Path(ebbtide.__file__).parent)
_FINALISERS = ("_ended", "__del__")
_UNDIVIDED = ("with ", "try:")
_DOUBLES = ("_devices/sim.py", "_stores/mock.py")


class Lines:
    """Counts the lines of ebbtide that the calling thread runs in a `with` block, and calls `act` before some.

    Lines of finalisers do not count: Python drops what a finaliser raises. Neither do `with` and `try`: Python lets no
    interrupt come between a context's block and exit, or before the first line of `try`, and a function that traces
    would. Nor does the first line of `__exit__`, before which nothing of a context's manager runs, whoever wrote the
    manager. Nor do the doubles of tests: only simulated devices and stores break there.

    Args:
        points: numbers of the lines to act before, from 0.
    """

    def __init__(self, points: Container[int] = (), act: Callable[[], object] = lambda: None) -> None:
        self._points = points
        self._act = act
        self.count = 0
        self.place = ""

    def __enter__(self) -> "Lines":
        self._former = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._former)

    def _called(self, frame, _event, _arg):
        return self._line if _is_ours(frame) and not _is_apart(frame) else None

    def _line(self, frame, event, _arg):
        code, number = frame.f_code, frame.f_lineno
        if event == "line" and not _is_undivided(code, number):
            self.count += 1
            if self.count - 1 in self._points:
                self.place = f"{code.co_filename[len(_SOURCE) + 1 :]}:{number} {code.co_name}"
                self._act()
        return self._line


def _is_undivided(code, number) -> bool:
    if linecache.getline(code.co_filename, number).lstrip().startswith(_UNDIVIDED):
        return True
    return code.co_name == "__exit__" and number == sorted({line for *_, line in code.co_lines() if line})[1]


def _is_ours(frame) -> bool:
    return frame.f_code.co_filename.startswith(_SOURCE)


def _is_apart(frame) -> bool:
    """Whether a finaliser or a double runs."""
    while frame is not None and _is_ours(frame):
        if frame.f_code.co_name in _FINALISERS or frame.f_code.co_filename.endswith(_DOUBLES):
            return True
        frame = frame.f_back
    return False
