"""One file that several processes append to; each append is written completely or not at all.

The caller holds the file's lock while it calls `current_size` and `append`.

Group commit: threads that wait for the disk at the same time share one fsync.

Rule 1: a ticket is covered only by an fsync that began after its bytes were written.
Rule 2: a failed fsync is final. The kernel may have dropped the pages and forgotten the error, so a second
        fsync could succeed although the data is lost.
"""

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from postroom.errors import HandleDead, LockTimeout, UnsafePath, WriteFailed
from postroom.message import Durability
from postroom.system import lock
from postroom.system.atomic import make_folder, open_safely, sync_folder, write_all


class GroupSync:
    """Issues a ticket per write; `wait` returns once an fsync has covered the ticket.

    A group that replaces a failed one continues its numbering. A late waiter of the old group therefore
    never mistakes an fsync of the new group for its own.
    """

    def __init__(self, first_ticket: int = 1) -> None:
        self.first_ticket = first_ticket
        self._changed = threading.Condition()
        self._issued = first_ticket - 1
        self._synced = first_ticket - 1
        self._running = False
        self._failure: OSError | None = None

    @property
    def next_ticket(self) -> int:
        """The next ticket number. Read without the lock: in a forked child its holder may no longer exist."""
        return self._issued + 1

    def ticket(self) -> int:
        """Issue a ticket. Call it after the bytes are written."""
        with self._changed:
            self._issued += 1
            return self._issued

    def covers(self, ticket: int) -> bool:
        """Whether an fsync has covered this ticket."""
        with self._changed:
            return ticket <= self._synced

    def flush(self, sync: Callable[[], None]) -> None:
        """Wait until every ticket issued so far is covered."""
        with self._changed:
            newest = self._issued
        self.wait(newest, sync)

    def wait(self, ticket: int, sync: Callable[[], None]) -> None:
        """Return when `ticket` is on disk. One waiter runs `sync` for all; a failure is raised in each."""
        with self._changed:
            while self._running and self._synced < ticket and self._failure is None:
                self._changed.wait()
            if self._synced >= ticket:
                return
            if self._failure is not None:
                raise self._failure
            self._running = True
            covered = self._issued
        self._lead(covered, sync)

    def _lead(self, covered: int, sync: Callable[[], None]) -> None:
        failure: OSError | None = None
        done = False
        try:
            sync()
            done = True
        except OSError as error:
            failure = error
            raise
        finally:
            with self._changed:
                self._running = False
                self._failure = failure or self._failure
                if done:  # after an interrupt, neither done nor failed, the next waiter runs `sync`
                    self._synced = max(self._synced, covered)
                self._changed.notify_all()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor for reading a file; symlinks are refused."""
    fd = open_safely(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def truncated(fd: int, size: int) -> bool:
    """Remove the bytes of a failed write. Returns whether that succeeded."""
    try:
        os.ftruncate(fd, size)
    except OSError:
        return False
    return True


class _Unsynced(NamedTuple):
    """An append that is not yet covered by a group fsync."""

    ticket: int
    start: int
    end: int


class AppendFile:
    """Keeps the descriptor open, notices when the file was replaced, and rolls back failed writes."""

    fd = -1

    def __init__(self, path: Path, durability: Durability, *, file_mode: int, folder_mode: int) -> None:
        self.path = path
        self.fd = -1
        self._device = self._inode = -1
        self.dead = False
        self._name = os.fspath(path)
        self._encoded_name = os.fsencode(path)  # encoded once, because every append calls lstat
        self._durability = durability
        self._file_mode = file_mode
        self._folder_mode = folder_mode
        self._group = GroupSync()
        self._unsynced: deque[_Unsynced] = deque()
        self._group_rolled_back = False
        self._turn_ends = 0.0

    def __del__(self) -> None:
        self._drop()  # as a file object does when it was not closed

    def open(self) -> int:
        """Open the file, and create it if necessary, unless it is open already."""
        if self.dead:
            raise HandleDead(self.path)
        if self.fd >= 0:
            return self.fd
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            self.fd = open_safely(self._name, flags, self._file_mode)
        except FileNotFoundError:
            make_folder(self.path.parent, self._durability, self._folder_mode)
            self.fd = open_safely(self._name, flags, self._file_mode)
        info = os.fstat(self.fd)
        self._device, self._inode = info.st_dev, info.st_ino
        if self._durability != "os":
            try:  # also for a file of another process, which may not have synced the folder yet
                sync_folder(self.path.parent)
            except OSError as error:
                self.dead = True
                self._drop()
                raise WriteFailed(self.path, error) from error
        return self.fd

    def lock_end(self, timeout_s: float) -> int:
        """Take the file's lock. Returns the size, or -1 as `current_size` does, or when no file is open.

        Both steps are inlined, because every append calls this.
        """
        fd = self.fd
        if fd < 0:
            return -1
        if monotonic() < self._turn_ends:
            try:
                lock.flock(fd, lock.EXCLUSIVE_NOW)
            except BlockingIOError:
                self._turn_ends = lock.take_turn(fd, timeout_s, self.path)
        else:
            self._turn_ends = lock.take_turn(fd, timeout_s, self.path)
        try:
            info = os.lstat(self._encoded_name)
        except FileNotFoundError:
            return -1
        same_file = info.st_ino == self._inode and info.st_dev == self._device
        return info.st_size if same_file else self.current_size()

    def current_size(self) -> int:
        """The file's size, or -1 when the path now names another file (after a rotation or replacement)."""
        try:
            info = os.lstat(self._encoded_name)
        except FileNotFoundError:
            return -1
        if info.st_ino == self._inode and info.st_dev == self._device:
            return info.st_size
        if stat.S_ISLNK(info.st_mode):
            msg = f"{self.path} is a symlink, which is refused"
            raise UnsafePath(msg)
        return -1

    def has_name(self) -> bool:
        """Whether the path names a file: it was neither removed nor moved away."""
        return os.access(self._encoded_name, os.F_OK)

    def append(self, data: bytes, size: int) -> int:
        """Write `data` at the end of the file, at offset `size`. Returns a ticket for `settle`, or 0."""
        try:
            if os.write(self.fd, data) != len(data):
                # A short write. On a full disk this second write raises the error.
                write_all(self.fd, data[os.fstat(self.fd).st_size - size :])
            if self._durability == "os":
                return 0
            if self._durability == "fsync":
                self._sync_now()
                return 0
        except OSError as error:
            rolled_back = truncated(self.fd, size)
            if self.dead:
                self._drop()
            raise WriteFailed(self.path, error, rolled_back=rolled_back) from error
        while self._unsynced and self._group.covers(self._unsynced[0].ticket):
            self._unsynced.popleft()
        ticket = self._group.ticket()
        self._unsynced.append(_Unsynced(ticket, size, size + len(data)))
        return ticket

    def _sync_now(self) -> None:
        try:
            os.fsync(self.fd)
        except OSError:
            # The kernel may have dropped the pages and forgotten the error: a second fsync proves nothing.
            self.dead = True
            raise

    def sync(self) -> None:
        """Make the whole file durable, whichever process wrote it. After a failure the handle is dead."""
        try:
            self._sync_now()
        except OSError:
            self._drop()
            raise

    def settle(self, ticket: int) -> None:
        """Return when the append is durable in its class. Call without the lock, so that others can join."""
        if ticket:
            group = self._group
            if ticket < group.first_ticket:
                raise OSError(errno.EIO, "the handle was reopened before this was synced")
            group.wait(ticket, self._sync_now)

    def roll_back_group(
        self, lock_fd: int, timeout_s: float, was_read: Callable[[int], bool] = lambda _offset: False
    ) -> bool:
        """After a failed group fsync: remove the unsynced appends if nothing was written after them.

        `was_read` returns whether a reader has read past an offset; such appends stay.
        """
        if self.fd >= 0 and self.dead:  # not when another thread has reopened it since
            with suppress(LockTimeout):  # another process is writing after them
                lock.acquire(lock_fd, timeout_s, self.path)
                try:
                    self._group_rolled_back = self._remove_unsynced(was_read)
                finally:
                    lock.release(lock_fd)
            self._drop()
        return self._group_rolled_back

    def _remove_unsynced(self, was_read: Callable[[int], bool]) -> bool:
        """Remove only this process's appends that no fsync has covered."""
        unsynced = [append for append in self._unsynced if not self._group.covers(append.ticket)]
        unbroken = all(earlier.end == later.start for earlier, later in pairwise(unsynced))
        if not unsynced or not unbroken or self.current_size() != unsynced[-1].end:
            return False
        start = unsynced[0].start
        return not was_read(start) and truncated(self.fd, start)

    def close(self) -> None:
        """Close the descriptor, after a last group fsync where the durability class requires it."""
        if self.fd < 0:
            return
        if not self.dead:
            with suppress(OSError):  # the group raises it in the threads that wait
                self._group.flush(self._sync_now)
        self._drop()

    def forget(self) -> None:
        """Drop everything that a forked child shares with its parent, and the state of an earlier failure."""
        self._drop()
        self._group = GroupSync(self._group.next_ticket)
        self._unsynced.clear()
        self._group_rolled_back = False
        self.dead = False

    def _drop(self) -> None:
        fd, self.fd = self.fd, -1
        self._inode = -1
        if fd >= 0:
            os.close(fd)
