"""A fair lock between processes.

A plain flock goes to the process that asks at the right moment, mostly the one that just released it. Here
a process first takes a second lock, the gate, and holds it until it has the lock. A process that returns
after its turn finds the gate taken and waits behind the waiting process.
"""

import os
import time
from pathlib import Path

from postroom.errors import LockTimeout
from postroom.system.lock import EXCLUSIVE_NOW, UNLOCK, flock, open_lock_file

# After passing the gate, a process may take the lock again for this long: processes that alternate at every
# commit would reload their caches each time. A process waits for at most one turn of each other process.
TURN_S = 0.006
INSIDE_PAUSE_FIRST_S = 0.000_1
INSIDE_PAUSE_LAST_S = 0.000_5
GATE_PAUSE_FIRST_S = 0.000_2
GATE_PAUSE_LAST_S = 0.002


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
            self._open()
        lock_fd = self._lock_fd
        if time.monotonic() < self._turn_ends:
            try:
                flock(lock_fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                pass  # the process that holds the gate was faster
            else:
                return
        self._pass_gate(lock_fd, self._gate_fd)
        self._turn_ends = time.monotonic() + TURN_S

    def _pass_gate(self, lock_fd: int, gate_fd: int) -> None:
        try:
            try:
                flock(gate_fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                self._wait(gate_fd, GATE_PAUSE_FIRST_S, GATE_PAUSE_LAST_S)
            try:
                flock(lock_fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                self._wait(lock_fd, INSIDE_PAUSE_FIRST_S, INSIDE_PAUSE_LAST_S)
        finally:
            self._unlock(gate_fd)

    def release(self) -> None:
        """Release the lock; harmless when it is not held."""
        if self._lock_fd >= 0:
            self._unlock(self._lock_fd)

    def _unlock(self, fd: int) -> None:
        try:
            flock(fd, UNLOCK)
        except OSError:
            self.forget()  # a closed file holds no lock

    def _open(self) -> None:
        self._gate_fd = open_lock_file(self._gate_path)
        self._lock_fd = open_lock_file(self._lock_path)

    def _wait(self, fd: int, pause_s: float, last_s: float) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, last_s)
            try:
                flock(fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockTimeout(self._path, self._timeout_s) from None
            else:
                return

    def forget(self) -> None:
        """Close the descriptors; a forked child must not share them."""
        for fd in (self._lock_fd, self._gate_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._gate_fd = -1
        self._turn_ends = 0.0
