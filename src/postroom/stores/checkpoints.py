"""What the WAL holds moves into the database beside the commits, and not within one of them.

SQLite would do it in the commit that makes the WAL too long, whose caller then waits for two fsyncs and all
the pages. Here a thread moves them while others commit; everybody waits for the few that came meanwhile.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import apsw

from postroom.errors import PostroomError

WAL_PAGES = 4_000  # 16 MB, then its pages move into the database
WAL_PAGES_MAX = 12_000  # 48 MB: the thread does not keep up, and the commit does it after all
LOOK_EVENTS = 32  # so many later, one looks again how long it has become; a hook would cost more


class Checkpoints:
    """The checkpoints of one file. `alone` keeps every writer out, and gives the writing connection."""

    def __init__(
        self, path: Path, alone: Callable[[], AbstractContextManager[apsw.Connection | None]]
    ) -> None:
        self._path = path
        self._alone = alone
        self._pages = 0
        self._next = WAL_PAGES
        self.fresh()

    def fresh(self) -> None:
        """In a forked child, in which the thread does not exist."""
        self.under_way = threading.Lock()
        """Held while a connection of its own is open."""
        self._started = False

    def look(self, connection: apsw.Connection) -> None:
        """See how long the WAL has become. Nothing that fails here changes what was committed before."""
        with suppress(apsw.Error):
            pages, _ = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            if pages < self._pages:  # it has started anew
                self._next = WAL_PAGES
            self._pages = pages
            if pages >= self._next and (pages >= WAL_PAGES_MAX or not self._started):
                self._next = pages + WAL_PAGES  # a reader may keep the WAL from starting anew
                self._begin(connection, pages)

    def _begin(self, connection: apsw.Connection, pages: int) -> None:
        self._started = self._started or (pages < WAL_PAGES_MAX and self._start())
        if pages >= WAL_PAGES_MAX or not self._started:
            with self.under_way:
                _checkpoint(connection)

    def _start(self) -> bool:
        try:
            # No daemon: a process ends when the pages are where they belong.
            threading.Thread(target=self._run, name="postroom-checkpoint").start()
        except RuntimeError:  # the process ends, or has too many
            return False
        return True

    def _run(self) -> None:
        try:
            with suppress(
                apsw.Error, PostroomError, OSError
            ):  # the next one does it: the WAL holds everything
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
                connection.execute("SELECT 1 FROM sqlite_schema").fetchall()  # it sees the WAL from now on
                _checkpoint(connection)
            finally:
                connection.close()


def _checkpoint(connection: apsw.Connection) -> None:
    """Move what can be moved without waiting for anybody."""
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
