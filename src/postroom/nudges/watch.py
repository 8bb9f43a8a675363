"""Wake up when a file changes: by inotify on Linux, by polling elsewhere or when inotify is exhausted.

Use: `arm()`, read the file, `wait()`, repeat. A change between the read and the wait still wakes. A wait
never exceeds the poll interval, so a lost wake-up causes at most that delay.
"""

import ctypes
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

_IN_MODIFY = 0x002
ATTRIB = 0x004
_IN_MOVED_TO = 0x080
CREATE = 0x100
_IN_MOVE_SELF = 0x800
_FILE_EVENTS = _IN_MODIFY | ATTRIB | _IN_MOVE_SELF
_FOLDER_EVENTS = CREATE | _IN_MOVED_TO
EVENTS_BYTES_MAX = 64 * 1024
_NONE = -1  # no descriptor, no watch

if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)

    def inotify_new() -> int:
        """Return a new inotify instance, or -1 when the user's limit is reached."""
        return int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def inotify_add(fd: int, path: Path, events: int) -> int:
        """Return a watch, the same for the same inode; -1 for a missing path or at a limit."""
        return int(_libc.inotify_add_watch(fd, os.fsencode(path), events))

    def _inotify_remove(fd: int, watch: int) -> None:
        _libc.inotify_rm_watch(fd, watch)

else:

    def inotify_new() -> int:
        return _NONE

    def inotify_add(fd: int, path: Path, events: int) -> int:  # noqa: ARG001 - as on Linux
        return _NONE

    def _inotify_remove(fd: int, watch: int) -> None:
        """Nothing to remove without inotify."""


class Watch:
    """Waits for changes of one file, which need not exist yet."""

    def __init__(self, path: Path, poll_interval_s: float) -> None:
        self._path = path
        self._poll_interval_s = poll_interval_s
        self._fd = inotify_new()
        self._file_watch = _NONE
        self._folder_watch = _NONE

    def arm(self) -> None:
        """Watch the file that has the name now. Call this before reading the file."""
        if self._fd < 0:
            return
        if self._folder_watch < 0:
            self._folder_watch = inotify_add(self._fd, self._path.parent, _FOLDER_EVENTS)
        watch = inotify_add(self._fd, self._path, _FILE_EVENTS)
        if watch != self._file_watch and self._file_watch >= 0:
            _inotify_remove(self._fd, self._file_watch)
        self._file_watch = watch

    def wait(self, timeout_s: float) -> bool:
        """Wait for a change, at most for the poll interval or `timeout_s`, whichever is shorter.

        Returns whether a change was seen. Without inotify, none is.
        """
        pause_s = max(0.0, min(timeout_s, self._poll_interval_s))
        if self._fd < 0 or max(self._file_watch, self._folder_watch) < 0:
            time.sleep(pause_s)
            return False
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(pause_s * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._fd, EVENTS_BYTES_MAX)
        return True

    def close(self) -> None:
        """Close the inotify instance."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = _NONE
