"""Disk space in reserve: freed on a full disk for work that must succeed, and allocated again later.

Rule 1: a store has a reserve of its own for work that makes room, such as completing a task.
Rule 2: a folder has one for the orders of operators, such as revoking a token. No other work can use it up.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from postroom.errors import UnsafePath, WriteFailed
from postroom.system.atomic import open_safely

T = TypeVar("T")

CONTROL_RESERVE = "control.ballast"
CONTROL_RESERVE_BYTES = 4 * 1024 * 1024
CONTROL_SLICE_BYTES = 256 * 1024  # given up at once: another program may take what is free
BLOCK_BYTES = 4096


class DiskReserve:
    """A file of a fixed size next to the database."""

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
        before = os.fstat(fd).st_size
        try:
            if before != self._size:
                os.posix_fallocate(fd, 0, self._size)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, before)
            raise
        finally:
            os.close(fd)

    def fill_what_fits(self) -> None:
        """Allocate as much of the file as there is space for."""
        fd = open_safely(self._path, os.O_RDWR | os.O_CREAT)
        size, step = os.fstat(fd).st_size, self._size
        try:
            while size < self._size and step >= BLOCK_BYTES:
                more = min(step, self._size - size)
                try:
                    os.posix_fallocate(fd, size, more)
                except OSError:
                    os.ftruncate(fd, size)
                    step //= 2
                else:
                    size += more
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

    def free_slice(self) -> bool:
        """Free a slice of the file; False when nothing is left of it."""
        self.whole = False
        try:
            fd = open_safely(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            before = os.fstat(fd).st_size
            os.ftruncate(fd, max(0, before - CONTROL_SLICE_BYTES))
        finally:
            os.close(fd)
        return before > 0


def keep_control_reserve(folder: Path) -> None:
    """Allocate what is missing of the reserve of a folder, as far as there is space for it."""
    with suppress(OSError, UnsafePath):
        _control_reserve(folder).fill_what_fits()


def with_control_reserve(folder: Path, work: Callable[[], T]) -> T:
    """Run the work of an order. On a full disk, it is repeated with more and more of the folder's reserve."""
    try:
        return work()
    except WriteFailed as error:
        refused = error
    reserve = _control_reserve(folder)
    while refused.errno == errno.ENOSPC and refused.rolled_back and reserve.free_slice():
        try:
            result = work()
        except WriteFailed as error:
            refused = error
        else:
            keep_control_reserve(folder)
            return result
    raise refused


def _control_reserve(folder: Path) -> DiskReserve:
    return DiskReserve(folder / CONTROL_RESERVE, CONTROL_RESERVE_BYTES)
