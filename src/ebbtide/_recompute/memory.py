"""Findings about the outputs of expensive calls, by site, kept from step to step."""

import weakref

from ebbtide._engine.timetable import Site
from ebbtide._types import Output


class OutputHistory:
    """Findings about the output of one call.

    Attributes:
        output: why saving the output does not pay, None if unknown.
        compared: operator and number of the call compared last; see Note [Overwritten outputs] in saved_outputs.py.
    """

    __slots__ = ("_times_changed", "compared", "output")

    def __init__(self) -> None:
        self.output: Output | None = None
        self.compared: tuple[object, int] | None = None
        self._times_changed = 0

    def drops_output(self) -> bool:
        """Whether not to save the output. Every 32nd time, an output that was changed in place gets another try."""
        if self.output is Output.CHANGED:
            self._times_changed += 1
            if self._times_changed % 32 == 0:
                self.output = None
        return self.output is not None and self.output is not Output.NEEDED

    def note_use(self) -> None:
        """Recomputation runs the call: save the output in the next step if lack of use was the only reason not to."""
        if self.output is Output.UNUSED:
            self.output = None


# Process-wide, but owned by the sites: a site keeps its history for as long as a handle or context keeps the site, also
# in a user's checkpoint, where no region of ours could own the history.
_HISTORIES: "weakref.WeakKeyDictionary[Site, OutputHistory]" = weakref.WeakKeyDictionary()


def history_of(site: Site) -> OutputHistory:
    history = _HISTORIES.get(site)
    return _HISTORIES.setdefault(site, OutputHistory()) if history is None else history
