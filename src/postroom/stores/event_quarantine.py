"""Rows of events that cannot be read: their bytes are kept in cells, and a person gets an alert.

Rule 1: a row is kept before the shipper passes it, and before a purge removes it.
"""

from collections.abc import Sequence
from typing import Final

from postroom.message import Event
from postroom.stores.event_runs import UNREADABLE
from postroom.stores.transaction import Transaction

QUARANTINE: Final = "quarantine.events"
"""The kind of the cells. The key is the number of the row."""
ALERT: Final = "EventsQuarantined"


def is_unreadable(event: Event) -> bool:
    """Whether this alert replaces an event that cannot be read."""
    return event.error_type == UNREADABLE and event.kind == "alert" and "row" in event.detail


def quarantine_events(transaction: Transaction, found: Sequence[Event]) -> None:
    """Keep the bytes of each row that cannot be read, and emit one alert for it. Kept rows stay."""
    rows = {event.detail["row"]: event.detail for event in found if is_unreadable(event)}
    for number, facts in rows.items():
        key = f"{number:020}"
        if transaction.cells.get(QUARANTINE, key) is not None:
            continue
        transaction.cells.put(QUARANTINE, key, transaction.events.row(number))
        transaction.alert(
            ALERT,
            f"events {facts['first']} to {facts['last']} cannot be read: {facts['bytes']} stored bytes are "
            f"kept in the cell {QUARANTINE} {key}",
        )
