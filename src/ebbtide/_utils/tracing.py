"""Named ranges around the phases of offloading, for `torch.profiler` and NVTX."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from ebbtide._utils.torch_private import without_dispatch

_OFF = nullcontext()


class _Range(profiler.record_function):
    # Beginning and ending a range calls operators: hidden from the user's dispatch modes and from ebbtide's own.

    def __enter__(self) -> "_Range":
        with without_dispatch():
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with without_dispatch():
            super().__exit__(*error)


def is_tracing() -> bool:
    """Whether a profiler records now. The engine's lanes read the attribute themselves, for the price of a call."""
    return profiler._is_profiler_enabled


def span(name: str, region: str = "") -> AbstractContextManager[Any]:
    """A range around a phase of offloading, shown by profilers as "ebbtide::send layers.3".

    Without a profiler the result is a shared context that does nothing. On an accelerator the trace repeats the range
    above the copies queued inside, in the row of the copying stream.

    Args:
        name: "ebbtide::" and the phase.
        region: name of the region that the work is for; "" outside of all regions.
    """
    if not profiler._is_profiler_enabled:
        return _OFF
    return _Range(f"{name} {region}" if region else name)
