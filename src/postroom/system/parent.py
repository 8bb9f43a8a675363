"""A process ends with its parent, even when the parent is killed.

Rule 1: a program of postroom ends cleanly: its stdin is a pipe that only the parent writes to. One that does
        not end in time kills itself.
Rule 2: a stopped process reads nothing, so the kernel continues it when the parent dies (Linux).
Rule 3: other programs do not watch the pipe: the kernel kills them (Linux).
"""

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress

GRACE_S = 40.0  # longer than workers need for their messages
_PR_SET_PDEATHSIG = 1


def stop_with_stdin(grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to this process when stdin ends, and SIGKILL `grace_s` later.

    Processes that this one starts get an empty stdin.
    """
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    signal_at_parents_end(signal.SIGCONT)

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="postroom-parent", daemon=True).start()


def signal_at_parents_end(number: int) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent() -> None:
    """What a child does between fork and exec, so that it is killed with its parent."""
    signal_at_parents_end(signal.SIGKILL)
