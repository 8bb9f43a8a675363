"""Reading events of several sources: in the order of time, and as the tree of one request with its times.

Shippers write source by source, so the order of writing says nothing about events of different sources.
"""

import heapq
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from postroom.core.formats.events import AuditEvent
from postroom.core.times import SECONDS_MAX
from postroom.message import EventKind

Timed: TypeAlias = tuple[int, int, AuditEvent]
"""The time, the number of events seen before, and the event: sortable."""


class Timeline:
    """Gives every event a time. An event without one (an unreadable line) gets that of its predecessor."""

    def __init__(self) -> None:
        self._last_us: dict[str, int] = {}
        self._seen = 0

    def timed(self, events: Iterable[AuditEvent]) -> list[Timed]:
        found = []
        for event in events:
            ts_us = event.ts_us or self._last_us.get(event.source, 0)
            self._last_us[event.source] = ts_us
            self._seen += 1
            found.append((ts_us, self._seen, event))
        return found


class Latest:
    """Keeps the `count` latest of many events."""

    def __init__(self, count: int, timeline: Timeline) -> None:
        self._count = count
        self._timeline = timeline
        self._heap: list[Timed] = []

    def add(self, events: list[AuditEvent]) -> None:
        for one in self._timeline.timed(events):
            if len(self._heap) < self._count:
                heapq.heappush(self._heap, one)
            elif self._count:
                heapq.heappushpop(self._heap, one)

    def events(self) -> list[AuditEvent]:
        """The kept events, earliest first."""
        return [event for _, _, event in sorted(self._heap)]


# ---- one request --------------------------------------------------------------------------------------

OUTCOMES: dict[EventKind, str] = {
    "execution_completed": "completed",
    "delivered": "delivered",
    "dead_letter": "dead_letter",
    "cancelled": "cancelled",
    "expired": "expired",
    "quarantined": "quarantined",
    "deleted": "deleted",
}
OPEN = "open"
FAILED: frozenset[EventKind] = frozenset(("execution_failed", "lease_lapsed", "rejected"))
"""Kinds of events that end an attempt without success."""
DELAYED: frozenset[EventKind] = frozenset(("retry_scheduled", "created"))
"""Kinds of events whose `delay_s` may say when the message is due."""
MICROS_PER_S = 1_000_000


class FailedAttempt(msgspec.Struct, frozen=True):
    """An attempt that failed."""

    attempt: int
    ts_us: int
    offset_us: int
    """The same time, relative to the start of the request."""
    error_type: str
    error: str


class Span(msgspec.Struct, frozen=True):
    """One message of a request."""

    message_id: str
    parent_message_id: str
    depth: int
    """The number of messages between it and the root, plus one; 0 for the root."""
    type: str
    queue: str
    start_us: int
    """The time of its first event, UTC."""
    offset_us: int
    """The same time, relative to the start of the request."""
    wait_us: int | None
    """From its enqueue to its first delivery; None when it was never delivered."""
    total_us: int
    """From its first event to its last."""
    attempts: int
    outcome: str
    error: str
    """The last error."""
    failures: list[FailedAttempt]
    due_us: int | None
    """When the next attempt is due, while the message waits for it; UTC."""
    events: list[AuditEvent]


def related(events: Iterable[AuditEvent], known: set[str]) -> set[str]:
    """The ids of messages, parents and traces in these events that are not yet known."""
    found = set()
    for event in events:
        found |= {event.message_id, event.parent_message_id, event.trace_id}
    return found - known - {""}


def spans(events: Iterable[AuditEvent]) -> list[Span]:
    """The messages of a request, each after its parent, siblings in the order of their start."""
    by_message = _by_message(events)
    parents = {name: _first(own, "parent_message_id") for name, own in by_message.items()}
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent if parent in by_message else "", []).append(name)
    start_us = min((own[0].ts_us for own in by_message.values()), default=0)
    ordered: dict[str, Span] = {}
    # Messages that form a cycle of parents have no root: the earliest one serves as root.
    for root in [
        *_by_start(children.get("", []), by_message)[::-1],
        *_by_start([*by_message], by_message)[::-1],
    ]:
        waiting = [(root, 0)]  # no recursion: a chain of messages can be deeper than Python's stack
        while waiting:
            name, depth = waiting.pop()
            if name not in ordered:
                ordered[name] = _span(by_message[name], parents[name], depth, start_us)
                waiting += [(child, depth + 1) for child in _by_start(children.get(name, []), by_message)]
    return list(ordered.values())


def _by_message(events: Iterable[AuditEvent]) -> dict[str, list[AuditEvent]]:
    """The events of each message in order, without repeated ones."""
    unique = {event.event_id: event for event in events if event.message_id}
    by_message: dict[str, list[AuditEvent]] = {}
    for event in sorted(unique.values(), key=lambda event: (event.ts_us, event.source, event.seq)):
        by_message.setdefault(event.message_id, []).append(event)
    return by_message


def _by_start(names: list[str], by_message: dict[str, list[AuditEvent]]) -> list[str]:
    """Sorted latest first, because the caller pops from the end."""
    return sorted(names, key=lambda name: (by_message[name][0].ts_us, name), reverse=True)


def _first(events: list[AuditEvent], field: str) -> str:
    return next((value for event in events if (value := getattr(event, field))), "")


def _span(events: list[AuditEvent], parent: str, depth: int, start_us: int) -> Span:
    first, last = events[0], events[-1]
    failures = [
        FailedAttempt(
            event.attempt,
            event.ts_us,
            event.ts_us - start_us,
            event.error_type or ("LeaseLapsed" if event.kind == "lease_lapsed" else ""),
            event.error,
        )
        for event in events
        if event.kind in FAILED
    ]
    enqueued = next((event.ts_us for event in events if event.kind == "enqueued"), first.ts_us)
    dequeued = next((event.ts_us for event in events if event.kind in ("dequeued", "delivered")), None)
    return Span(
        message_id=first.message_id,
        parent_message_id=parent,
        depth=depth,
        type=_first(events, "type"),
        queue=_first(events, "queue"),
        start_us=first.ts_us,
        offset_us=first.ts_us - start_us,
        wait_us=None if dequeued is None else dequeued - enqueued,
        total_us=last.ts_us - first.ts_us,
        attempts=max(event.attempt for event in events),
        outcome=_outcome(events),
        error=next((event.error for event in reversed(events) if event.error), ""),
        failures=failures,
        due_us=_due_us(events),
        events=events,
    )


def _due_us(events: list[AuditEvent]) -> int | None:
    """The end of a delay that is still running: the last event is the one that started it."""
    last = events[-1]
    delay_s = last.detail.get("delay_s") if last.kind in DELAYED else None
    if isinstance(delay_s, bool) or not isinstance(delay_s, (int, float)) or not 0 <= delay_s <= SECONDS_MAX:
        return None
    return last.ts_us + round(delay_s * MICROS_PER_S)


def _outcome(events: list[AuditEvent]) -> str:
    """The last outcome, unless a replay or a retry reopened the message."""
    outcome = OPEN
    for event in events:
        if event.kind in ("replayed", "retry_scheduled", "enqueued"):
            outcome = OPEN
        outcome = OUTCOMES.get(event.kind, outcome)
    return outcome
