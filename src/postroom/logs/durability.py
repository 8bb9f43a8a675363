"""Group commit: threads that wait for the disk at the same time share one fsync.

Rule 1: a ticket is covered only by an fsync that began after its bytes were written.
Rule 2: a failed fsync is final. The kernel may have dropped the pages and forgotten the error, so a second
        fsync could succeed although the data is lost.
"""

import threading
from collections.abc import Callable


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
