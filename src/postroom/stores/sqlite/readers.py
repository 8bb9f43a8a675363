"""The reading connections of a SQLite store.

Rule 1: reads do not wait for each other while there are fewer than `READS_AT_ONCE_MAX`. A long read of one
        caller would stop all others otherwise.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import apsw

from postroom.stores.sqlite.file import connect
from postroom.stores.sqlite.known import SqliteKnown
from postroom.system.handles import leak

READS_AT_ONCE_MAX = 4


class SqliteReaders:
    """Reading connections, opened when they are needed. To hold the object itself keeps all reads out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.counts: dict[apsw.Connection, SqliteKnown] = {}
        """The counters as each connection read them last. One whose read of them failed has none."""
        self._open: list[apsw.Connection] = []
        self._idle: list[apsw.Connection] = []
        self.fresh()

    def fresh(self) -> None:
        """Drop the connections of the parent process: a child must neither use nor close them."""
        for connection in self._open:
            leak(connection)
        self._open, self._idle = [], []
        self.counts.clear()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item for each further read. A semaphore takes 2 us more, because it is written in Python."""
        self._allow(READS_AT_ONCE_MAX)
        self._stopping = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[apsw.Connection]:
        """A connection that no other thread uses meanwhile."""
        self._free.get()
        try:
            connection = self._idle.pop() if self._idle else self._opened()
            try:
                yield connection
            finally:
                self._idle.append(connection)
        finally:
            self._free.put(None)

    def _allow(self, reads: int) -> None:
        for _ in range(reads):
            self._free.put(None)

    def _opened(self) -> apsw.Connection:
        connection = connect(self._path)
        self._open.append(connection)
        return connection

    def close(self) -> None:
        """Close all connections. The caller keeps reads out."""
        for connection in self._open:
            with suppress(apsw.Error):
                connection.close(True)  # noqa: FBT003 - the API has no name for it
        self._open, self._idle = [], []
        self.counts.clear()

    # ---- keeping reads out ---------------------------------------------------------------------

    def acquire(self, timeout: float = -1) -> bool:
        """Wait until no read is under way, and let none begin. As `Lock.acquire`."""
        if not self._stopping.acquire(timeout=timeout):  # two callers would each wait for the other's part
            return False
        for taken in range(READS_AT_ONCE_MAX):
            try:
                self._free.get(timeout=None if timeout < 0 else timeout)
            except queue.Empty:
                self._allow(taken)
                self._stopping.release()
                return False
        return True

    def release(self) -> None:
        """Let reads begin again."""
        self._allow(READS_AT_ONCE_MAX)
        self._stopping.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
