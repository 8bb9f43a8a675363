"""Checkpoints: a thread moves pages of the WAL into the database, concurrently with commits.

SQLite itself would checkpoint within the commit that makes the WAL too long, and the caller of that commit
would wait for all pages and two fsyncs. Here writers wait only for the pages written during the checkpoint.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import apsw
import msgspec

from postroom.errors import PostroomError


class CheckpointLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    wal_pages: int = 4_000  # 16 MB: a checkpoint starts
    wal_pages_max: int = 12_000  # 48 MB: the thread falls behind, so the commit itself checkpoints
    look_events: int = 32  # events between two looks at the length of the WAL; a hook would cost more


class Checkpoints:
    """The checkpoints of one file. `alone` keeps all writers out and yields the writing connection."""

    def __init__(
        self,
        path: Path,
        alone: Callable[[], AbstractContextManager[apsw.Connection | None]],
        limits: CheckpointLimits,
    ) -> None:
        self.limits = limits
        self._path = path
        self._alone = alone
        self._pages = 0
        self._next = limits.wal_pages
        self.fresh()

    def fresh(self) -> None:
        """Reset the locks: a forked child does not have the thread."""
        self.under_way = threading.Lock()
        """Held while the thread has its own connection open."""
        self._started = False

    def look(self, connection: apsw.Connection) -> None:
        """Start a checkpoint when the WAL is long. Errors are ignored: the commit has already happened."""
        with suppress(apsw.Error):
            pages, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if pages < self._pages:  # the WAL was reused from its start
                self._next = self.limits.wal_pages
            self._pages = pages
            if pages >= self._next and (pages >= self.limits.wal_pages_max or not self._started):
                self._next = pages + self.limits.wal_pages  # a reader may keep the WAL from being reused
                self._begin(connection, pages)

    def _begin(self, connection: apsw.Connection, pages: int) -> None:
        self._started = self._started or (pages < self.limits.wal_pages_max and self._start())
        if pages >= self.limits.wal_pages_max or not self._started:
            with self.under_way:
                _checkpoint(connection)

    def _start(self) -> bool:
        try:
            # Not a daemon thread: the process waits for the checkpoint before it ends.
            threading.Thread(target=self._run, name="postroom-checkpoint").start()
        except RuntimeError:  # the process is ending, or has too many threads
            return False
        return True

    def _run(self) -> None:
        try:
            with suppress(apsw.Error, PostroomError, OSError):  # a later checkpoint does it
                self._move()
                with self._alone() as connection:
                    if connection is not None:
                        _checkpoint(connection)
        finally:
            self._started = False

    def _move(self) -> None:
        with self.under_way:
            connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                connection.wal_autocheckpoint(0)
                connection.execute("SELECT 1 FROM sqlite_schema").fetchall()  # opens the WAL
                _checkpoint(connection)
            finally:
                connection.close()


def _checkpoint(connection: apsw.Connection) -> None:
    """Move the pages that can be moved without waiting for readers or writers."""
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
