"""Backpressure of the audit stream: new messages are delayed or refused while the shipper is too far behind.

No event is dropped. Calls that end a task are not delayed, because they make the queue shorter.
"""

import time

from postroom.errors import AuditBehind
from postroom.stores.base import RETRY_AFTER_S, Outbox
from postroom.stores.store import Store
from postroom.system.log import library_log

CHECK_EVERY_S = 1.0
SLOW_S = 0.05  # the delay of an enqueue: twenty a second for each caller

_log = library_log("postroom.audit")


class Backlog:
    """Checks how many events wait for the shipper, and delays or refuses new messages."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.look_at = 0.0
        self.behind: Outbox | None = None
        """The outbox, while too many events wait in it."""
        self.waiting: int | None = None
        """Events that waited at the last check; None without a shipper."""
        self.held_up = 0
        """Enqueues that were delayed or refused."""

    def hold_up(self, *, may_sleep: bool = True) -> None:
        """Sleep while the shipper is behind, or raise `AuditBehind` when the outbox is set to refuse.

        With `may_sleep` false (an event loop), nothing is checked, and both cases raise.
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
        """Check the backlog, at most once a second. When the shipper falls behind, an alert is emitted."""
        if time.monotonic() < self.look_at:
            return
        self.look_at = time.monotonic() + CHECK_EVERY_S
        outbox = self._store.read(lambda transaction: transaction.outbox())
        self.waiting = None if outbox is None else self._store.newest_event() - outbox.shipped
        was_behind = self.behind is not None
        too_far = outbox is not None and self.waiting is not None and self.waiting > outbox.backlog_max
        self.behind = outbox if too_far else None
        if outbox is not None and too_far and not was_behind:
            limit = f"the limit is {outbox.backlog_max} (backlog_max)"
            text = f"{self.waiting} events wait for the shipper, and {limit}"
            effect = "are refused" if outbox.when_behind == "refuse" else "are delayed"
            _log.warning("%s: new messages %s", text, effect)
            self._store.write(lambda transaction: transaction.alert("AuditBehind", text), makes_room=True)
