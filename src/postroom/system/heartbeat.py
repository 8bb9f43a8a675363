"""Heartbeats from a part of `postroom up` to the process that supervises it.

The part writes a byte into a pipe from its own loop. A part that hangs, or is stopped, writes none.
"""

import os
import time
from contextlib import suppress

VARIABLE = "POSTROOM_BEAT_FD"
BEAT_EVERY_S = 2.0
START_S = 15.0  # after the start of a process, until its first beat is missed
BYTES_READ_MAX = 65_536  # what a pipe holds


class HeartbeatSender:
    """The part's end of the pipe. Without a supervisor it does nothing."""

    def __init__(self) -> None:
        number = os.environ.pop(VARIABLE, "")  # of this process, and not of those that it starts
        self._fd = int(number) if number.isdecimal() else -1
        self._due = 0.0

    def beat(self) -> None:
        """Report that the loop is running. Cheap: it writes at most every `BEAT_EVERY_S`."""
        if self._fd < 0 or (now := time.monotonic()) < self._due:
            return
        self._due = now + BEAT_EVERY_S
        with suppress(OSError):  # the pipe is full, or the supervisor is gone
            os.write(self._fd, b".")


class Pulse:
    """The supervisor's end of the pipe of one process."""

    def __init__(self, now: float) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self.writing, False)
        self._heard = now + START_S

    def started(self) -> None:
        """The process has its end: close ours."""
        os.close(self.writing)

    def silent_s(self, now: float) -> float:
        """For how long nothing was heard; negative while the process may still be starting."""
        with suppress(OSError):
            if os.read(self._reading, BYTES_READ_MAX):
                self._heard = now
        return now - self._heard

    def close(self) -> None:
        os.close(self._reading)


HEARTBEAT = HeartbeatSender()
