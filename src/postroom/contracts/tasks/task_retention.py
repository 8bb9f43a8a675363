"""Retention of `Tasks`: ended tasks, events and idempotency keys are removed after their time.

Rule 1: a purge works in small batches and remembers where it stopped, so no commit takes long.
Rule 2: no waiting task is ever removed.
"""

import time

import msgspec

from postroom.contracts.tasks import task_storage
from postroom.contracts.tasks.task_input import NUMBER_MAX
from postroom.core.lifecycle import lifecycle
from postroom.message import Record, State
from postroom.stores.base import PURGE_BATCH_MAX, Listing
from postroom.stores.purge import purge_events, purge_keys, purge_tasks
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

PURGE_EVERY_CALLS = 1_000
PURGE_EVERY_S = 60.0
KEEP_FINISHED_S = 7 * 86_400.0
KEEP_DEAD_S = 90 * 86_400.0
KEEP_KEYS_S = 30 * 86_400.0


class Retention(msgspec.Struct, frozen=True):
    """How long ended tasks, events and idempotency keys are kept."""

    finished_s: float = KEEP_FINISHED_S
    dead_s: float = KEEP_DEAD_S
    events_s: float = KEEP_FINISHED_S
    """Of events that no shipper has taken."""
    keys_s: float = KEEP_KEYS_S


class Purge:
    """Removes what has passed its retention from one store."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._calls = 0
        self._last = time.monotonic()
        self._tasks_after = 0
        self._keys_after = ""

    def count(self, calls: int) -> None:
        """Count calls that bring the next purge nearer."""
        self._calls += calls

    def run_if_due(self, calls: int) -> None:
        """Count `calls`, and purge after `PURGE_EVERY_CALLS` of them or `PURGE_EVERY_S`."""
        self._calls += calls
        now = time.monotonic()
        is_late = now >= self._last + PURGE_EVERY_S
        if self._calls < PURGE_EVERY_CALLS and not is_late:
            return
        # Many calls alone are no reason: a purge is worth it when the oldest task has expired.
        is_worth_it = is_late or self._has_expired(self._store.find(Listing(limit=1)))
        self._calls, self._last = 0, now
        if is_worth_it:
            self.run()

    def _has_expired(self, oldest: list[Record]) -> bool:
        now_us = self._store.read(lambda transaction: transaction.wall_us)
        expired_us = now_us - round(self._retention.finished_s * 1e6)
        return any(record.ended_us and record.ended_us < expired_us for record in oldest)

    def run(self, rounds: int = 4) -> None:
        """Remove at most `rounds` batches of tasks, and one batch of events and of keys."""
        keep = self._retention
        kept_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, round(keep.finished_s * 1e6))
        kept_us["DEAD_LETTER"] = kept_us["QUARANTINED"] = round(keep.dead_s * 1e6)

        def purge_some(transaction: Transaction) -> int:
            gone, after = purge_tasks(transaction, self._tasks_after, kept_us, PURGE_BATCH_MAX)
            task_storage.forget(transaction, gone)
            return after

        for _ in range(rounds):
            self._tasks_after = self._store.write(purge_some, makes_room=True)
            if self._tasks_after == 0:
                break
        self._keys_after = self._store.write(self._purge_keys_and_events, makes_room=True)

    def _purge_keys_and_events(self, transaction: Transaction) -> str:
        keep, now_us = self._retention, transaction.wall_us
        purge_events(transaction, NUMBER_MAX, now_us - round(keep.events_s * 1e6), PURGE_BATCH_MAX)
        keys_before_us = now_us - round(keep.keys_s * 1e6)
        return purge_keys(transaction, self._keys_after, keys_before_us, PURGE_BATCH_MAX)
