"""The audit log of the queue: one JSON line an operation, metadata only.

It is written while the session's lock is held, so its order is the order of what happened. A failed audit
write does not undo the operation that it describes: it is logged, and the next line starts afresh.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from postroom.errors import UnsafePath
from postroom.message import Durability
from postroom.system.atomic import PRIVATE_FILE_MODE, make_folder, open_safely

LOOK_EVERY_S = 1.0  # how long lines may still go to a file that was moved away

_log = logging.getLogger("postroom.queue")
_encode = msgspec.json.Encoder().encode


class AuditFile:
    """An append-only file that every session writes to with single O_APPEND writes."""

    _fd = -1

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._durability: Durability = durability
        self._fd = -1
        self._look_again = 0.0
        self._torn = False
        # Sessions have locks of their own: without this one, a thread could close the file under another's
        # write, whose line would go to whatever was opened next.
        self._mutex = threading.Lock()

    def write(self, entry: msgspec.Struct) -> None:
        """Add one line. Nothing is raised: what it describes has happened."""
        with self._mutex:
            try:
                now = time.monotonic()
                if now >= self._look_again:
                    self._look(now)
                data = _encode(entry) + b"\n"
                if self._torn:
                    data = b"\n" + data
                    self._torn = False
                if os.write(self._fd, data) != len(data):
                    self._missed("it was cut short")
            except OSError as error:
                self._missed(error.strerror or str(error))
            except UnsafePath as error:
                self._missed(str(error))

    def _missed(self, reason: str) -> None:
        self._torn = True
        _log.warning("%s: an audit line is missing: %s", self._path, reason)

    def _look(self, now: float) -> None:
        """Open the file that has the name now."""
        self._drop()
        make_folder(self._path.parent, self._durability)
        self._fd = open_safely(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, PRIVATE_FILE_MODE)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._look_again = now + LOOK_EVERY_S

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        with self._mutex:
            self._drop()

    def after_fork(self) -> None:
        """A child opens its own."""
        self._mutex = threading.Lock()
        self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        self._look_again = 0.0
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)
