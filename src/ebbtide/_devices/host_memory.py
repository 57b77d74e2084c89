"""How torch says that the machine has no host memory left."""

import contextlib
from collections.abc import Generator

_SAID = ("out of memory", "can't allocate memory")  # by the driver that pins, and by the allocator of the CPU


@contextlib.contextmanager
def memory_errors() -> Generator[None]:
    """Around an allocation: what is refused for lack of memory is a MemoryError, and any other error is what it is."""
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in _SAID):
            raise MemoryError(str(error)) from error
        raise
