"""A file without a name: room on a disk that nobody else sees and that no process can leave behind."""

import errno
import mmap
import os
import sys
import tempfile
import weakref
from pathlib import Path

from ebbtide._errors import StoreError
from ebbtide._utils.sizes import GIB, format_bytes

ALIGN_BYTES = 4096
"""Memory, offset and length of what goes past the page cache are multiples of it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What stays free for everybody else on the file system: the lesser of the two.
_KEEP_FREE_BYTES = GIB
_KEEP_FREE_SHARE = 0.02


class ScratchFile:
    """An unlinked file in `folder`, read and written past the page cache where the file system allows it.

    The descriptor is closed when the last holder drops the object, never earlier: a thread that still has a part to
    write must not find a stranger's file behind its number.

    Attributes:
        is_direct: O_DIRECT works here, so the page cache is passed by.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nbytes = 0
        self._is_closed = False
        try:
            self._fd, self.is_direct = _open_unlinked(folder)
        except OSError as error:
            raise self._failure("opening a file", error) from error
        # Not at exit: threads may still be writing, and the kernel closes it after them.
        weakref.finalize(self, os.close, self._fd).atexit = False

    def grow(self, nbytes: int) -> int | None:
        """Where `nbytes` of new room start, or None when the file system has none to spare."""
        self._check_open()
        start = self._nbytes
        try:
            if nbytes > self._spare_bytes():
                return None
            _allocate(self._fd, start, nbytes)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise self._failure(f"taking {format_bytes(nbytes)}", error) from error
        self._nbytes += nbytes
        return start

    def write(self, data: memoryview, at: int) -> None:
        """Returns when all of `data` is in the file. Raises StoreError naming the folder."""
        done = 0
        while done < data.nbytes:
            self._check_open()
            try:
                done += self._whole(os.pwrite(self._fd, data[done:], at + done))
            except OSError as error:
                raise self._failure(f"writing {format_bytes(data.nbytes)}", error) from error
        self._forget_cached(at, data.nbytes)

    def read(self, data: memoryview, at: int) -> None:
        """Returns when `data` is full. Raises StoreError naming the folder."""
        done = 0
        while done < data.nbytes:
            self._check_open()
            try:
                done += self._whole(os.preadv(self._fd, [data[done:]], at + done))
            except OSError as error:
                raise self._failure(f"reading {format_bytes(data.nbytes)}", error) from error
        self._forget_cached(at, data.nbytes)

    def close(self) -> None:
        """Free the room. What is still to be read or written fails."""
        if not self._is_closed:
            self._is_closed = True
            os.ftruncate(self._fd, 0)

    def _whole(self, nbytes: int) -> int:
        """What counts of a short read or write: it must go on at an offset that O_DIRECT takes."""
        whole = nbytes // ALIGN_BYTES * ALIGN_BYTES if self.is_direct else nbytes
        if whole == 0:
            raise OSError(errno.EIO, f"the file system moved only {nbytes} bytes")
        return whole

    def _forget_cached(self, at: int, nbytes: int) -> None:
        """Parcels left memory to free it, so the page cache should not keep them: start write-back, drop the clean."""
        if not self.is_direct and sys.platform == "linux":
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)

    def _spare_bytes(self) -> int:
        fs = os.fstatvfs(self._fd)
        keep = min(_KEEP_FREE_BYTES, int(fs.f_blocks * fs.f_frsize * _KEEP_FREE_SHARE))
        return fs.f_bavail * fs.f_frsize - keep

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the disk store in {str(self._folder)!r} is closed: its parcels cannot be read any more")

    def _failure(self, what: str, error: OSError) -> StoreError:
        text = f"the disk store in {str(self._folder)!r} failed {what}: {error.strerror}"
        if error.errno in _FULL:
            text += ". Free some space there, or name a folder on another disk, like store='disk:/scratch'"
        return StoreError(text)


def _open_unlinked(folder: Path) -> tuple[int, bool]:
    """A descriptor of a new file without a name, and whether it passes the page cache by."""
    cached, path = tempfile.mkstemp(prefix="ebbtide-", dir=folder)
    try:
        direct = _open_direct(path)
    finally:
        os.unlink(path)
    if direct is None:
        return cached, False
    os.close(cached)
    return direct, True


def _open_direct(path: str) -> int | None:
    """None where the file system refuses: some do at open, some at the first write."""
    if sys.platform != "linux":
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:  # whatever it was: if it is more than a refusal, the cached descriptor will say so
        return None
    try:
        os.pwrite(fd, mmap.mmap(-1, ALIGN_BYTES), 0)
    except OSError:
        os.close(fd)
        return None
    return fd


def _allocate(fd: int, start: int, nbytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(fd, start, nbytes)
    else:
        os.ftruncate(fd, start + nbytes)  # promises no room: a full disk shows when it is written to
