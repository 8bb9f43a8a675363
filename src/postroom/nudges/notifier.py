"""A bell for each queue: rung when there is something new, heard by who waits, in this process and in others.

Between processes it is a file: who waits leaves a mark in it, and is woken by a touch that inotify reports.
Where nobody has left a mark, nothing is touched, so that a ring costs nothing. A ring may be lost, doubled or
late: who waits looks again after a while in any case.
"""

import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from postroom.nudges.watch import ATTRIB, CREATE, EVENTS_BYTES_MAX, inotify_add, inotify_new
from postroom.system.atomic import make_folder, open_safely
from postroom.system.handles import reset_after_fork

OPEN_FILES_MAX = 256  # of queues that were rung last
MARKS = 4096  # bytes of a bell's file
QUIET_S = 0.02  # for how long a bell that is seldom heard does not look for waiters of other processes
_EVENT = struct.Struct("iIII")

Callback = Callable[[], None]


class Notifier:
    """The bells of one store. Without a folder, they are heard in this process alone."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._start()
        reset_after_fork(self)

    def _start(self) -> None:
        self._mutex = threading.Lock()
        self._callbacks: dict[str, set[Callback]] = {}
        self._files: dict[str, int] = {}
        self._quiet_until: dict[str, float] = {}
        self._watching = False
        self._stop_fd = -1

    def notify(self, queue: str) -> bool:
        """Wake whoever waits for this queue; whether another process waits. Never fails: they look again."""
        if queue in self._callbacks:
            self._call(queue)
        if self._folder is not None:
            try:
                fd = self._files.get(queue) or self._open(queue)
                # Its length first: where nobody ever waited it is empty, and that costs a quarter of a read.
                if os.lseek(fd, 0, os.SEEK_END) and b"\1" in os.pread(fd, MARKS, 0):
                    os.utime(fd)
                    return True
            except OSError:  # a ring may be lost; and no `suppress`, since every enqueue comes by
                pass
        return False

    def notify_rarely_awaited(self, queue: str) -> None:
        """As `notify`, for what is rung far more often than it is waited for.

        While nobody waits it looks for waiters of other processes only every `QUIET_S`. Who begins to wait
        looks again after that.
        """
        now = time.monotonic()
        if queue in self._callbacks or now >= self._quiet_until.get(queue, 0.0):
            self._quiet_until[queue] = 0.0 if self.notify(queue) else now + QUIET_S

    def _open(self, queue: str) -> int:
        with self._mutex:
            return self._open_held(queue)

    def _open_held(self, queue: str) -> int:
        fd = self._files.get(queue)
        if fd is None:
            folder = self._folder or Path()
            make_folder(folder, "os")
            while len(self._files) >= OPEN_FILES_MAX:
                os.close(self._files.pop(next(iter(self._files))))
            fd = self._files[queue] = open_safely(folder / queue, os.O_RDWR | os.O_CREAT)
        return fd

    def _mark(self, queue: str, mark: bytes) -> None:
        """Say to other processes that somebody here waits, or that nobody does. One byte for each process."""
        if self._folder is not None:
            with suppress(OSError):
                os.pwrite(self._open_held(queue), mark, os.getpid() % MARKS)

    def _call(self, queue: str) -> None:
        with self._mutex:
            callbacks = list(self._callbacks.get(queue, ()))
        for callback in callbacks:
            callback()

    @contextmanager
    def subscribed(self, queue: str, callback: Callback) -> Iterator[None]:
        """Call `callback`, from any thread, at every ring until the end of the block."""
        with self._mutex:
            self._callbacks.setdefault(queue, set()).add(callback)
            self._mark(queue, b"\1")
            if not self._watching and self._folder is not None:
                self._watch(self._folder)
        try:
            yield
        finally:
            with self._mutex:
                self._callbacks[queue].discard(callback)
                if not self._callbacks[queue]:
                    del self._callbacks[queue]
                    self._mark(queue, b"\0")

    @property
    def hears_other_processes(self) -> bool:
        """Whether a ring of another process is heard; else one has to look often."""
        return self._watching

    # ---- rings of other processes --------------------------------------------------------------

    def _watch(self, folder: Path) -> None:
        make_folder(folder, "os")
        fd = inotify_new()
        if fd < 0 or inotify_add(fd, folder, ATTRIB | CREATE) < 0:
            if fd >= 0:
                os.close(fd)
            return
        self._watching = True
        stopped, self._stop_fd = os.pipe()
        threading.Thread(
            target=self._listen, args=(fd, stopped), name="postroom-notifier", daemon=True
        ).start()

    def _listen(self, fd: int, stopped: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.register(stopped, select.POLLIN)
        try:
            while all(ready != stopped for ready, _ in poller.poll()):
                for queue in set(_names(os.read(fd, EVENTS_BYTES_MAX))):
                    self._call(queue)
        finally:
            os.close(fd)
            os.close(stopped)

    def close(self) -> None:
        """Stop listening, and close the files."""
        with self._mutex:
            if self._stop_fd >= 0:
                os.close(self._stop_fd)
            self._watching, self._stop_fd = False, -1
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def after_fork(self) -> None:
        """A child has no thread that listens, and files of its own."""
        if self._stop_fd >= 0:
            os.close(self._stop_fd)
        for fd in self._files.values():
            os.close(fd)
        self._start()


def _names(data: bytes) -> Iterator[str]:
    """The file names in a block of inotify events."""
    offset = 0
    while offset < len(data):
        *_, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        yield data[offset : offset + length].rstrip(b"\0").decode(errors="replace")
        offset += length
