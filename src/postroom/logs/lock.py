"""The one lock of postroom: exclusive between processes, bounded in time, gone when its holder dies.

flock where it exists, a one-byte msvcrt lock on Windows (not tested there). The lock belongs to the open
file, not to the process: a descriptor inherited over fork does not exclude its parent, so handles are
reopened in the child (see `handles`).
"""

import errno
import os
import sys
import time
from pathlib import Path

from postroom.errors import LockTimeout

SPINS_BEFORE_SLEEP = 20  # a writer holds the lock for microseconds: giving up the slice is often enough
SLEEP_FIRST_S = 0.000_03
SLEEP_LAST_S = 0.001

if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

    def acquire(fd: int, timeout_s: float, path: Path | str) -> None:
        """Take the lock, or raise `LockTimeout` after `timeout_s`."""
        if not _try_lock(fd):
            _acquire_contended(fd, timeout_s, path)

    def release(fd: int) -> None:
        """Give the lock back; harmless when it is not held."""
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
        except OSError:
            pass

    def size_at_rest(fd: int) -> int | None:
        """The file's size while nobody holds the lock; None when somebody does."""
        if not _try_lock(fd):
            return None
        size = os.fstat(fd).st_size
        release(fd)
        return size

    def _yield_slice() -> None:
        time.sleep(0)

else:
    import fcntl

    _EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
    _SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
    _yield_slice = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, _EXCLUSIVE_NOW)
        except BlockingIOError:
            return False
        return True

    def acquire(fd: int, timeout_s: float, path: Path | str) -> None:
        """Take the lock, or raise `LockTimeout` after `timeout_s`."""
        try:
            fcntl.flock(fd, _EXCLUSIVE_NOW)
        except BlockingIOError:
            _acquire_contended(fd, timeout_s, path)

    def release(fd: int) -> None:
        """Give the lock back; harmless when it is not held."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def size_at_rest(fd: int) -> int | None:
        """The file's size while nobody holds the lock; None when somebody does."""
        try:
            fcntl.flock(fd, _SHARED_NOW)
        except BlockingIOError:
            return None
        size = os.fstat(fd).st_size
        fcntl.flock(fd, fcntl.LOCK_UN)
        return size


def _acquire_contended(fd: int, timeout_s: float, path: Path | str) -> None:
    deadline = time.monotonic() + timeout_s
    for _ in range(SPINS_BEFORE_SLEEP):
        _yield_slice()
        if _try_lock(fd):
            return
    pause_s = SLEEP_FIRST_S
    while not _try_lock(fd):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise LockTimeout(path, timeout_s)
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, SLEEP_LAST_S)
