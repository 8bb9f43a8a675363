"""The file lock of postroom: exclusive between processes, with a timeout, released when its holder dies.

It is a flock, or a one-byte msvcrt lock on Windows (untested). The lock belongs to the open file, not to the
process: a descriptor inherited through fork does not exclude its parent, so handles are reopened in the
child (see `handles`).

A plain flock goes to the process that asks at the right moment, mostly the one that just released it.
`take_turn` makes waiting fair between processes of this library: the process that waits for the lock holds a
gate, a second lock on the same file, so a process that returns after its turn must wait. Programs that use
only flock are still excluded. `FairLock` does the same with two lock files next to a file that has locks
of its own.
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

# A process may take the lock again without waiting for this long: processes that alternate at every append
# read the end of the file each time. A process waits for at most one turn of each other waiting process.
TURN_S = 0.01

# A writer holds the lock for microseconds, so immediate retries are worth it. Only one process waits for the
# lock itself and may retry often; those at the gate wait for whole turns.
SPINS_BEFORE_SLEEP = 3
SLEEP_FIRST_S = 0.000_1
LOCK_SLEEP_LAST_S = 0.000_2
GATE_SLEEP_LAST_S = 0.004

# The same for a `FairLock`, which a transaction holds for milliseconds: processes that alternate at every
# commit would reload their caches each time.
FAIR_TURN_S = 0.006
FAIR_SLEEP_LAST_S = 0.000_5
FAIR_GATE_SLEEP_LAST_S = 0.002

HOLDER_BYTES = 20  # of a lock file: the digits of a process id

if sys.platform == "win32":
    import msvcrt

    EXCLUSIVE_NOW, SHARED_NOW, UNLOCK = msvcrt.LK_NBLCK, msvcrt.LK_NBLCK, msvcrt.LK_UNLCK

    def flock(fd: int, operation: int) -> None:
        """As `fcntl.flock`, with a lock on the first byte. Shared locks do not exist; all are exclusive."""
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

    def _try_gate(fd: int) -> bool:  # noqa: ARG001 - there is no second kind of lock for a gate
        return True

    def _leave_gate(fd: int) -> None:
        pass

else:
    import fcntl
    from fcntl import flock as flock  # noqa: PLC0414 - for callers that inline `acquire` on a hot path

    EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
    SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
    UNLOCK = fcntl.LOCK_UN
    _yield_slice = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)

    # The gate is a lock on one byte, far beyond the end of any file, that belongs to the open file like a
    # flock. The two kinds of locks are independent, and the gate needs no file of its own.
    _SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None) if struct.calcsize("P") == struct.calcsize("q") else None
    _GATE_BYTE = 1 << 62
    _CLOSE_GATE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _GATE_BYTE, 1, 0)
    _OPEN_GATE = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, _GATE_BYTE, 1, 0)

    def _try_gate(fd: int) -> bool:
        """Try to take the gate; True also where the system or the file system has no such lock."""
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


def open_lock_file(path: Path) -> int:
    """Open or create a lock file. An error names the folder, because no user knows the lock file."""
    try:
        return open_safely(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from error


@contextmanager
def alone(path: Path, refused: str) -> Iterator[None]:
    """Hold a lock file exclusively; `Unavailable(refused)` at once when another process holds it."""
    fd = open_lock_file(path)
    try:
        hold(fd, refused)
        yield
    finally:
        os.close(fd)


def hold(fd: int, refused: str) -> None:
    """Take the lock of a lock file for long; `Unavailable(refused)` at once when another process holds it."""
    try:
        flock(fd, EXCLUSIVE_NOW)
    except BlockingIOError:
        raise Unavailable(f"{refused}{holder(fd)}") from None
    note_holder(fd)


def note_holder(fd: int) -> None:
    """Write the id of this process into a lock file that it holds for long."""
    with suppress(OSError):  # such as a full disk: the lock counts, and not its content
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def forget_holder(fd: int) -> None:
    """Empty a lock file before it is released, so that it names no process that has ended."""
    with suppress(OSError):
        os.ftruncate(fd, 0)


def holder(fd: int) -> str:
    """Who holds a lock file, as the end of a sentence; empty when that is unknown."""
    text = os.pread(fd, HOLDER_BYTES, 0)
    return f" (process {int(text)})" if text.isdigit() else ""


def release(fd: int) -> None:
    """Release the lock; harmless when it is not held."""
    flock(fd, UNLOCK)


def size_at_rest(fd: int) -> int | None:
    """The file's size while the lock is free; None when it is held."""
    try:
        flock(fd, SHARED_NOW)
    except BlockingIOError:
        return None
    size = os.fstat(fd).st_size
    flock(fd, UNLOCK)
    return size


def take_turn(fd: int, timeout_s: float, path: Path | str) -> float:
    """Take the lock after the processes that already wait for it, or raise `LockTimeout`.

    Returns the end of the turn on the monotonic clock. Until then, this process may take a free lock again
    with `flock` alone.
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
    """Repeat an attempt until it succeeds or the deadline has passed."""
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


class FairLock:
    """Exclusive between processes that open `path`.lock. Threads of one process need their own lock."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._gate_path = path.with_name(path.name + ".gate")
        self._timeout_s = timeout_s
        self._lock_fd = -1
        self._gate_fd = -1
        self._turn_ends = 0.0

    def acquire(self) -> None:
        """Take the lock, or raise `LockTimeout`."""
        if self._lock_fd < 0:
            self._gate_fd = open_lock_file(self._gate_path)
            self._lock_fd = open_lock_file(self._lock_path)
        now = time.monotonic()
        if now < self._turn_ends and _try_lock(self._lock_fd):
            return
        deadline, gate_fd = now + self._timeout_s, self._gate_fd
        try:
            if not (
                _wait(_try_lock, gate_fd, deadline, FAIR_GATE_SLEEP_LAST_S)
                and _wait(_try_lock, self._lock_fd, deadline, FAIR_SLEEP_LAST_S)
            ):
                raise LockTimeout(self._path, self._timeout_s)
        finally:
            self._unlock(gate_fd)
        self._turn_ends = time.monotonic() + FAIR_TURN_S

    def release(self) -> None:
        """Release the lock; harmless when it is not held."""
        if self._lock_fd >= 0:
            self._unlock(self._lock_fd)

    def _unlock(self, fd: int) -> None:
        try:
            flock(fd, UNLOCK)
        except OSError:
            self.forget()  # a closed file holds no lock

    def forget(self) -> None:
        """Close the descriptors; a forked child must not share them."""
        for fd in (self._lock_fd, self._gate_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._gate_fd = -1
        self._turn_ends = 0.0
