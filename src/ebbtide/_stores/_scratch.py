"""A file without a name: room on a disk, unseen by others, and freed by the kernel even after a crash."""

import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from ebbtide._errors import StoreError
from ebbtide._utils.distributed import processes_on_host
from ebbtide._utils.sizes import GIB, format_bytes

ALIGN_BYTES = 4096
"""Memory, offset and length of reads and writes past the page cache are multiples of ALIGN_BYTES."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ScratchFile:
    """An unlinked file in `folder`, read and written past the page cache if the file system allows O_DIRECT.

    The processes of a host have equal shares of the room that was free when each has first grown its file.

    The descriptor is closed at the death of the object and never earlier: a thread with a part left to write must not
    find a new file behind the number of the descriptor.

    Attributes:
        is_direct: whether reads and writes use O_DIRECT.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nbytes = 0
        self._share_bytes: int | None = None
        self._is_closed = False
        self._process = os.getpid()
        try:
            self._fd, self.is_direct = _open_unlinked(folder)
        except OSError as error:
            raise self._failure("opening a file", error) from error
        # Not at exit: threads may still write, and the kernel closes the file after their end.
        weakref.finalize(self, os.close, self._fd).atexit = False

    def grow(self, nbytes: int) -> int | None:
        """The start of `nbytes` of new room, or None if the file system has no room to spare."""
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
        """Write all of `data`, then return. Raises StoreError naming the folder."""
        self._move(lambda rest, start: os.pwrite(self._fd, rest, start), data, at, "writing")

    def read(self, data: memoryview, at: int) -> None:
        """Fill all of `data`, then return. Raises StoreError naming the folder."""
        self._move(lambda rest, start: os.preadv(self._fd, [rest], start), data, at, "reading")

    def close(self) -> None:
        """Free the room. Later reads and writes fail."""
        if not self._is_closed:
            self._is_closed = True
            if self._process == os.getpid():
                os.ftruncate(self._fd, 0)

    def _move(self, move: Callable[[memoryview, int], int], data: memoryview, at: int, what: str) -> None:
        done = 0
        while done < data.nbytes:
            self._check_open()
            try:
                done += self._whole(move(data[done:], at + done))
            except OSError as error:
                raise self._failure(f"{what} {format_bytes(data.nbytes)}", error) from error
        self._forget_cached(at, data.nbytes)

    def _whole(self, nbytes: int) -> int:
        """The part of a short read or write that counts: the rest must start at an offset valid for O_DIRECT."""
        whole = nbytes // ALIGN_BYTES * ALIGN_BYTES if self.is_direct else nbytes
        if whole == 0:
            raise OSError(errno.EIO, f"the file system moved only {nbytes} bytes")
        return whole

    def _forget_cached(self, at: int, nbytes: int) -> None:
        """Start write-back and drop clean pages: the page cache must not fill the memory that offloading frees."""
        if not self.is_direct and sys.platform == "linux":
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)

    def _spare_bytes(self) -> int:
        fs = os.fstatvfs(self._fd)
        # 1 GiB or 2 % of the file system, the lesser of the two, stay free for other programs.
        keep = min(GIB, int(fs.f_blocks * fs.f_frsize * 0.02))
        spare = fs.f_bavail * fs.f_frsize - keep
        processes = processes_on_host()
        if processes == 1:
            return spare
        if self._share_bytes is None:
            self._share_bytes = spare // processes
        return min(spare, self._share_bytes - self._nbytes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"the disk store in {str(self._folder)!r} is closed: no parcel can be read any more")
        if self._process != os.getpid():
            raise StoreError(
                f"the disk store in {str(self._folder)!r} is of the process that forked this one: run backward there"
            )

    def _failure(self, what: str, error: OSError) -> StoreError:
        text = f"the disk store in {str(self._folder)!r} failed {what}: {error.strerror}"
        if error.errno in _FULL:
            text += ". Free some space in the folder, or name a folder on another disk, like store='disk:/scratch'"
        return StoreError(text)


def _open_unlinked(folder: Path) -> tuple[int, bool]:
    """A descriptor of a new file that no path leads to, and whether O_DIRECT works."""
    fd, path = tempfile.mkstemp(prefix="ebbtide-", dir=folder)  # for the user alone (mode 0600)
    os.unlink(path)
    return fd, _set_direct(fd)


def _set_direct(fd: int) -> bool:
    """False if the file system refuses O_DIRECT, at once or at the first write.

    Set on the descriptor: opening the path again might find another file, or a link, that somebody has put there.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(fd, mmap.mmap(-1, ALIGN_BYTES), 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def _allocate(fd: int, start: int, nbytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(fd, start, nbytes)
    else:
        os.ftruncate(fd, start + nbytes)  # no promise of room: a full disk shows at a write
