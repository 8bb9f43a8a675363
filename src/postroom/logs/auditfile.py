"""The audit log of the queue: one JSON line per operation, with metadata only.

Lines are written under the session's lock, so they are in the order of the operations. A failed audit write
does not undo the operation: a warning is logged, and the next entry starts on a new line.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from postroom.errors import UnsafePath
from postroom.message import Durability
from postroom.system.atomic import PRIVATE_FILE_MODE, make_folder, open_safely
from postroom.system.log import library_log

REOPEN_EVERY_S = 1.0  # for this long, lines may still go to a file that was moved away

_log = library_log("postroom.queue")
_encode = msgspec.json.Encoder().encode


class AuditFile:
    """An append-only file shared by all sessions; each line is a single O_APPEND write."""

    reopen_every_s = REOPEN_EVERY_S
    _fd = -1

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._durability: Durability = durability
        self._fd = -1
        self._reopen_at = 0.0
        self._torn = False
        # Each session has its own lock. Without this mutex, one thread could close the file during another
        # thread's write, and the line would go to whichever file was opened next.
        self._mutex = threading.Lock()

    def write(self, entry: msgspec.Struct) -> None:
        """Append one line. Errors are only logged, because the operation has already happened."""
        with self._mutex:
            try:
                now = time.monotonic()
                if now >= self._reopen_at:
                    self._reopen(now)
                data = _encode(entry) + b"\n"
                if self._torn:
                    data = b"\n" + data
                    self._torn = False
                if os.write(self._fd, data) != len(data):
                    self._missed("the write was incomplete")
            except OSError as error:
                self._missed(error.strerror or str(error))
            except UnsafePath as error:
                self._missed(str(error))

    def _missed(self, reason: str) -> None:
        self._torn = True
        _log.warning("%s: an audit line is missing: %s", self._path, reason)

    def _reopen(self, now: float) -> None:
        """Open the file that currently has the name."""
        self._drop()
        make_folder(self._path.parent, self._durability)
        self._fd = open_safely(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, PRIVATE_FILE_MODE)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._reopen_at = now + self.reopen_every_s

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next `write` opens it again."""
        with self._mutex:
            self._drop()

    def after_fork(self) -> None:
        """Reset in a forked child, which opens the file itself."""
        self._mutex = threading.Lock()
        self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        self._reopen_at = 0.0
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
