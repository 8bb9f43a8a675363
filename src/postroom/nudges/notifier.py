"""Wake-ups for each queue, in this process and across processes.

Across processes, each queue has a file. A waiting process sets its mark, a byte, in the file. A notification
touches the file, which inotify reports to the waiters. Without a mark, the file is not touched, so a
notification without waiters costs almost nothing. A wake-up may be lost, duplicated or late: waiters also
look again on an interval.
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

OPEN_FILES_MAX = 256  # of the queues opened last
MARKS = 4096  # bytes of a queue's file
QUIET_S = 0.02  # between checks for waiters of other processes on a rarely awaited queue
_EVENT = struct.Struct("iIII")

Callback = Callable[[], None]


class Notifier:
    """The wake-ups of one store. Without a folder, they stay in this process."""

    def __init__(self, folder: Path | None, *, open_files_max: int = OPEN_FILES_MAX) -> None:
        self._folder = folder
        self._open_files_max = open_files_max
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
        """Wake the waiters of a queue. Returns whether another process waits. Never raises."""
        if queue in self._callbacks:
            self._call(queue)
        if self._folder is not None:
            try:
                fd = self._files.get(queue) or self._open(queue)
                # The length first: it is 0 if no process ever waited, and costs a quarter of a read.
                if os.lseek(fd, 0, os.SEEK_END) and b"\1" in os.pread(fd, MARKS, 0):
                    os.utime(fd)
                    return True
            except OSError:
                pass
        return False

    def notify_rarely_awaited(self, queue: str) -> None:
        """Like `notify`, for a queue that is notified far more often than it is awaited.

        Without waiters, other processes are checked only every `QUIET_S`. A new waiter looks again then.
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
            while len(self._files) >= self._open_files_max:
                os.close(self._files.pop(next(iter(self._files))))
            fd = self._files[queue] = open_safely(folder / queue, os.O_RDWR | os.O_CREAT)
        return fd

    def _mark(self, queue: str, mark: bytes) -> None:
        """Set or clear the mark of this process. Each process has one byte."""
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
        """Call `callback`, from any thread, at every wake-up until the end of the block."""
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
        """Whether wake-ups of other processes arrive; otherwise waiters have to poll."""
        return self._watching

    # ---- wake-ups of other processes -----------------------------------------------------------

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
        """Start afresh in a forked child, which has no listening thread."""
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
