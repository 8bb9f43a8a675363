"""Ordering the events of several sources by time.

Shippers write source by source, so the order of writing says nothing about events of different sources.
"""

import heapq
from collections.abc import Iterable
from typing import TypeAlias

from postroom.core.formats.events import AuditEvent

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
