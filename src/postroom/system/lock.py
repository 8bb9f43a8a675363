"""The one lock of postroom: exclusive between processes, bounded in time, gone when its holder dies.

flock where it exists, a one-byte msvcrt lock on Windows (not tested there). The lock belongs to the open
file, not to the process: a descriptor inherited over fork does not exclude its parent, so handles are
reopened in the child (see `handles`).
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postroom.errors import LockTimeout, Unavailable
from postroom.system.atomic import open_safely

# A writer holds the lock for microseconds, so the first look again is worth it. After that, the longer the
# others sleep, the more often a holder finds itself alone and the less its file changes under it.
SPINS_BEFORE_SLEEP = 3
SLEEP_FIRST_S = 0.000_1
SLEEP_LAST_S = 0.004

if sys.platform == "win32":
    import msvcrt

    EXCLUSIVE_NOW, SHARED_NOW, UNLOCK = msvcrt.LK_NBLCK, msvcrt.LK_NBLCK, msvcrt.LK_UNLCK

    def flock(fd: int, operation: int) -> None:
        """As `fcntl.flock`, by a lock on the first byte. There are no shared locks, so all are exclusive."""
        os.lseek(fd, 0, os.SEEK_SET)
        try:
            msvcrt.locking(fd, operation, 1)
        except OSError as error:
            if operation == UNLOCK:
                return
            if error.errno in (errno.EACCES, errno.EDEADLK):
                raise BlockingIOError(error.errno, error.strerror) from None
            raise

    def _yield_slice() -> None:
        time.sleep(0)

else:
    import fcntl
    from fcntl import flock as flock  # noqa: PLC0414 - for those who spell `acquire` out on a hot path

    EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
    SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
    UNLOCK = fcntl.LOCK_UN
    _yield_slice = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


def acquire(fd: int, timeout_s: float, path: Path | str) -> None:
    """Take the lock, or raise `LockTimeout` after `timeout_s`."""
    try:
        flock(fd, EXCLUSIVE_NOW)
    except BlockingIOError:
        wait(fd, timeout_s, path)


@contextmanager
def alone(path: Path, refused: str) -> Iterator[None]:
    """While this process alone has a lock file; whoever comes meanwhile gets the sentence at once."""
    fd = open_safely(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            flock(fd, EXCLUSIVE_NOW)
        except BlockingIOError:
            raise Unavailable(refused) from None
        yield
    finally:
        os.close(fd)


def release(fd: int) -> None:
    """Give the lock back; harmless when it is not held."""
    flock(fd, UNLOCK)


def size_at_rest(fd: int) -> int | None:
    """The file's size while nobody holds the lock; None when somebody does."""
    try:
        flock(fd, SHARED_NOW)
    except BlockingIOError:
        return None
    size = os.fstat(fd).st_size
    flock(fd, UNLOCK)
    return size


def wait(fd: int, timeout_s: float, path: Path | str) -> None:
    """Take a lock that somebody held a moment ago, or raise `LockTimeout` after `timeout_s`."""
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


def _try_lock(fd: int) -> bool:
    try:
        flock(fd, EXCLUSIVE_NOW)
    except BlockingIOError:
        return False
    return True
