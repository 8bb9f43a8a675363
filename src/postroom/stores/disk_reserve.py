"""Disk space in reserve: freed on a full disk so that tasks can be completed, and allocated again later."""

import os
from contextlib import suppress
from pathlib import Path

from postroom.errors import WriteFailed
from postroom.system.atomic import open_safely


class DiskReserve:
    """A file of a fixed size beside the database."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self.whole = size == 0

    def fill(self) -> None:
        """Allocate the file; raises `WriteFailed` while there is no space for it."""
        if self.whole:
            return
        try:
            self._fill()
        except OSError as error:
            raise WriteFailed(self._path, error) from error
        self.whole = True

    def _fill(self) -> None:
        fd = open_safely(self._path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(fd).st_size != self._size:
                os.posix_fallocate(fd, 0, self._size)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)

    def free(self) -> bool:
        """Remove the file; False when there was none."""
        self.whole = False
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
