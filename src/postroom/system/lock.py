"""The one lock of postroom: exclusive between processes, bounded in time, gone when its holder dies.

flock where it exists, a one-byte msvcrt lock on Windows (not tested there). The lock belongs to the open
file, not to the process: a descriptor inherited over fork does not exclude its parent, so handles are
reopened in the child (see `handles`).

A plain flock goes to whoever asks at the right moment, which is mostly the process that just released it.
`take_turn` makes waiting fair between processes of this library: whoever waits for the lock holds a gate, a
second lock on the same file, and whoever comes back after its turn finds the gate taken. Programs that know
only flock are excluded as before.
"""

import errno
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from postroom.errors import LockTimeout, Unavailable
from postroom.system.atomic import open_safely

# A process may take the lock again without waiting for a while: processes that alternate at every append read
# the end of the file anew each time. A turn, times the processes that wait, is what one of them waits.
TURN_S = 0.01

# A writer holds the lock for microseconds, so the first look again is worth it. One process alone waits for
# the lock itself and may look often; those at the gate wait for whole turns.
SPINS_BEFORE_SLEEP = 3
SLEEP_FIRST_S = 0.000_1
LOCK_SLEEP_LAST_S = 0.000_2
GATE_SLEEP_LAST_S = 0.004

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

    def _try_gate(fd: int) -> bool:  # noqa: ARG001 - no second kind of lock to make a gate of
        return True

    def _leave_gate(fd: int) -> None:
        pass

else:
    import fcntl
    from fcntl import flock as flock  # noqa: PLC0414 - for those who spell `acquire` out on a hot path

    EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
    SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
    UNLOCK = fcntl.LOCK_UN
    _yield_slice = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)

    # The gate is a lock of one byte, far behind the end of any file, that belongs to the open file as a flock
    # does. The two kinds know nothing of each other, and the gate needs no file of its own.
    _SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None) if struct.calcsize("P") == struct.calcsize("q") else None
    _GATE_BYTE = 1 << 62
    _CLOSE_GATE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _GATE_BYTE, 1, 0)
    _OPEN_GATE = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, _GATE_BYTE, 1, 0)

    def _try_gate(fd: int) -> bool:
        """Hold the gate; True also where the system or the file system has none."""
        if _SET_LOCK is not None:
            try:
                fcntl.fcntl(fd, _SET_LOCK, _CLOSE_GATE)
            except OSError as error:
                return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def _leave_gate(fd: int) -> None:
        if _SET_LOCK is not None:
            with suppress(OSError):
                fcntl.fcntl(fd, _SET_LOCK, _OPEN_GATE)


def acquire(fd: int, timeout_s: float, path: Path | str) -> None:
    """Take the lock, or raise `LockTimeout` after `timeout_s`."""
    take_turn(fd, timeout_s, path)


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


def take_turn(fd: int, timeout_s: float, path: Path | str) -> float:
    """Take the lock behind those who wait for it, or raise `LockTimeout`.

    Returns the end of the turn, by the monotonic clock: until then, the holder may take the lock again by
    `flock` alone when it finds it free.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if not (
            _wait(_try_gate, fd, deadline, GATE_SLEEP_LAST_S)
            and _wait(_try_lock, fd, deadline, LOCK_SLEEP_LAST_S)
        ):
            raise LockTimeout(path, timeout_s)
    finally:
        _leave_gate(fd)
    return time.monotonic() + TURN_S


def _wait(attempt: Callable[[int], bool], fd: int, deadline: float, sleep_last_s: float) -> bool:
    """Repeat an attempt until it succeeds, or the deadline is over."""
    if attempt(fd):
        return True
    for _ in range(SPINS_BEFORE_SLEEP):
        _yield_slice()
        if attempt(fd):
            return True
    pause_s = SLEEP_FIRST_S
    while not attempt(fd):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, sleep_last_s)
    return True


def _try_lock(fd: int) -> bool:
    try:
        flock(fd, EXCLUSIVE_NOW)
    except BlockingIOError:
        return False
    return True
