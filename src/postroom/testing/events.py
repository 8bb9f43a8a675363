"""The state of messages as derived from the events of a store, for comparison with its records."""

from collections.abc import Iterable
from typing import NamedTuple

from postroom.core.lifecycle import lifecycle
from postroom.message import Event, EventKind, State, org_of
from postroom.stores.base import Counted, Listing
from postroom.stores.store import Store

CHECKED_MAX = 100_000  # records and events that `check_consistency` reads


class DerivedState(NamedTuple):
    """The state of a message, derived from its events alone."""

    queue: str
    state: State
    priority: int
    attempt: int
    retries: int
    lease: int


_LEGAL = {(arrow.source, arrow.kind, arrow.target) for arrow in lifecycle.TRANSITIONS}
_WITHOUT_EFFECT: frozenset[EventKind] = frozenset(
    {"duplicate", "deleted", "promoted", "tokens_reserved", "tokens_returned", "tokens_refused",
     "tokens_borrowed"}
)  # fmt: skip
_UNDER_LEASE: frozenset[EventKind] = frozenset(
    {"execution_started", "heartbeat", "execution_completed", "execution_failed", "released"}
)
_ENDS_LEASE: frozenset[EventKind] = frozenset(
    {"lease_lapsed", "cancelled", "expired", "quarantined", "replayed", "deferred"}
)
_COUNTS: frozenset[EventKind] = frozenset({"execution_failed", "lease_lapsed"})


def explained(events: Iterable[Event]) -> dict[str, DerivedState]:
    """The state of every message, derived from all events of a store since its creation.

    Raises `ValueError` at an event that does not follow from those before it.
    """
    derived: dict[str, DerivedState] = {}
    last_kind: dict[str, EventKind] = {}
    for event in events:
        if event.kind in _WITHOUT_EFFECT or not event.message_id:
            continue
        before = derived.get(event.message_id)
        derived[event.message_id] = _after(event, before, last_kind.get(event.message_id))
        last_kind[event.message_id] = event.kind
    return derived


def _after(event: Event, before: DerivedState | None, last_kind: EventKind | None) -> DerivedState:
    if event.kind == "created":  # possibly of an id whose earlier record was purged
        return DerivedState(event.queue, event.state, event.priority, 0, 0, 0)
    if before is None:
        raise ValueError(f"event {event.seq} ({event.kind}) is about a message that was never created")
    repeats_state = event.kind == "enqueued" and last_kind in ("created", "replayed")
    if not repeats_state and (before.state, event.kind, event.state) not in _LEGAL:
        raise ValueError(f"event {event.seq} ({event.kind}) leads from {before.state} to {event.state}")
    if event.kind in _UNDER_LEASE and before.state == "PROCESSING" and event.lease != before.lease:
        raise ValueError(f"event {event.seq} ({event.kind}) shows lease {event.lease}, not {before.lease}")
    lease = event.lease if event.kind == "dequeued" else before.lease
    if event.kind == "released":
        lease = -lease
    counts = event.kind in _COUNTS and not (event.kind == "lease_lapsed" and org_of(event.queue))
    retries = 0 if event.kind == "replayed" else before.retries + counts
    return DerivedState(
        event.queue,
        event.state,
        event.priority,
        event.attempt,
        retries,
        0 if event.kind in _ENDS_LEASE else lease,
    )


def check_consistency(store: Store) -> None:
    """Assert that the events of a store have no gap and explain its records, and that its counters fit.

    Only for a store whose events were never purged.
    """
    events = store.events(limit=CHECKED_MAX)
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "the events have a gap"
    records = store.find(Listing(limit=CHECKED_MAX))
    derived = explained(events)
    for record in records:
        stored = DerivedState(
            record.queue, record.state, record.lane, record.attempt, record.retries, record.lease
        )  # fmt: skip
        assert derived[record.message_id] == stored, "the record differs from the state that the events imply"
    recount: dict[str, dict[Counted, int]] = {}
    for record in records:
        counts = recount.setdefault(record.queue, {})
        counts[record.state] = counts.get(record.state, 0) + 1
    for event in events:
        if event.kind == "lease_lapsed":
            counts = recount.setdefault(event.queue, {})
            counts["LAPSES"] = counts.get("LAPSES", 0) + 1
    counted = {queue: counts for queue, counts in store.count().items() if counts}
    assert counted == recount, "the counters differ from a recount"
