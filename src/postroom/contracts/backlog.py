"""New messages while the shipper of their events is too far behind: they slow down, or are refused.

The events are never dropped for that. Who ends a task is not held up: it makes the queue shorter.
"""

import logging
import time

from postroom.errors import AuditBehind
from postroom.stores.base import RETRY_AFTER_S, Outbox
from postroom.stores.store import Store

LOOK_EVERY_S = 1.0
SLOW_S = 0.05  # what each enqueue waits then: twenty a second for each caller

_log = logging.getLogger("postroom.audit")


class Backlog:
    """Looks now and then at how many events wait, and holds up who adds to them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.look_at = 0.0
        self.behind: Outbox | None = None
        """The outbox, while too many events wait for it."""
        self.waiting: int | None = None
        """Events that wait for the shipper, at the last look; None when nobody ships."""
        self.held_up = 0
        """Enqueues that were slowed down or refused here."""

    def hold_up(self, *, may_sleep: bool = True) -> None:
        """Return, later when the shipper is behind; raises `AuditBehind` when the outbox asks for that.

        Who is one of many in a commit may not sleep, nor look, and is refused in both cases.
        """
        if may_sleep:
            self.look()
        if self.behind is None:
            return
        self.held_up += 1
        if self.behind.when_behind == "refuse" or not may_sleep:
            raise AuditBehind(self.waiting or 0, self.behind.backlog_max, RETRY_AFTER_S)
        time.sleep(SLOW_S)

    def look(self) -> None:
        """How far behind the shipper is, once a second. Becoming too late is an event of its own."""
        if time.monotonic() < self.look_at:
            return
        self.look_at = time.monotonic() + LOOK_EVERY_S
        outbox = self._store.read(lambda transaction: transaction.outbox())
        self.waiting = None if outbox is None else self._store.newest_event() - outbox.shipped
        was_behind = self.behind is not None
        too_far = outbox is not None and self.waiting is not None and self.waiting > outbox.backlog_max
        self.behind = outbox if too_far else None
        if outbox is not None and too_far and not was_behind:
            self._tell(outbox)

    def _tell(self, outbox: Outbox) -> None:
        said = (
            f"{self.waiting} events wait for the shipper, and at most {outbox.backlog_max} may (backlog_max)"
        )
        _log.warning("%s: new messages %s", said, "are refused" if outbox.when_behind == "refuse" else "wait")
        self._store.write(lambda transaction: transaction.alert("AuditBehind", said), makes_room=True)
