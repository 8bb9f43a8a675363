"""An fsync that can be held up and made to fail: the system call whose failure must end a handle."""

import errno
import os
import stat
import threading
from collections.abc import Callable

import pytest


class FaultyDisk:
    """Stands in for `os.fsync`, of files and, if asked, of the folders that hold their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = False
        self.with_folders = False
        self.calls = 0
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) and not self.with_folders:
            return
        failing = self.failing
        self.calls += 1
        self.entered.set()
        self.gate.wait()
        if failing or self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def hold(self) -> None:
        """Let the next fsync begin, and not end before `gate` is set."""
        self.entered.clear()
        self.gate.clear()


def in_background(target: Callable[[], object]) -> threading.Thread:
    """A thread that does not keep a failed test's process alive."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
