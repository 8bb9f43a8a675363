"""Purging: which records, idempotency keys and events a store forgets.

Rule 1: a step looks at a limited number, so that a purge is many short transactions.
Rule 2: events that are not shipped yet stay, and so do the bytes of events that cannot be read.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from postroom.message import Event, Record, State, org_of
from postroom.stores.base import KEY, Listing
from postroom.stores.event_quarantine import quarantine_events
from postroom.stores.transaction import SeenKey, Transaction

EVENTS_LOOKED_MAX: Final = 1_000_000  # events that one purge looks at


def purge_tasks(
    transaction: Transaction, after: int, keep_us: Mapping[State, int], limit: int
) -> tuple[list[Record], int]:
    """Look at `limit` records after `after`, and forget tasks whose retention is over.

    Returns the forgotten records in the order of their numbers, and the `seq` to continue from; 0 at the end
    of the records.
    """
    seen = transaction.records.find(Listing(after=after, limit=limit))
    gone = [
        record
        for record in seen
        if not org_of(record.queue)
        and record.ended_us
        and record.ended_us < transaction.wall_us - keep_us[record.state]
    ]
    if gone:
        transaction.records.forget(gone)
        transaction.note_purged(len(gone))
    return gone, seen[-1].seq if len(seen) == limit else 0


def purge_keys(transaction: Transaction, after: str, before_us: int, limit: int) -> str:
    """Look at `limit` idempotency keys after `after`, and forget those accepted before `before_us`.

    Returns the key to continue from; empty at the end of the keys.
    """
    seen = transaction.cells.page(KEY, after, limit)
    for key, value in seen:
        if msgspec.json.decode(value, type=SeenKey).seen_us < before_us:
            transaction.cells.put(KEY, key, None)
    return seen[-1][0] if len(seen) == limit else ""


def purge_events(transaction: Transaction, up_to: int, before_us: int, limit: int) -> None:
    """Forget up to `limit` events up to a position and before a time, except events not yet shipped."""
    outbox, events = transaction.outbox(), transaction.events
    if outbox is not None:
        up_to = min(up_to, outbox.shipped)

    def oldest(limit: int) -> list[Event]:
        old = [event for event in events.read(0, limit) if event.seq <= up_to]
        young = next((index for index, event in enumerate(old) if event.ts_us >= before_us), len(old))
        return old[:young]

    old = oldest(limit)
    while old:
        quarantine_events(transaction, old)
        events.forget(old[-1].seq)
        is_stuck = len(old) == limit <= EVENTS_LOOKED_MAX and events.read(0, 1) == old[:1]
        if not is_stuck:
            return
        limit *= 4  # the events of one commit may be stored together: they go only as a whole
        old = oldest(limit)
