"""What happened lately: rates and waiting times, computed from the newest events of a store.

Rule 1: nothing here reads a clock or a store. Times and events are arguments.
Rule 2: memory is bounded. When more events come than are read, counts are scaled up by the share that was
        read.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from postroom.message import Event, EventKind, org_of
from postroom.server.up.engine_load import TARGETS_MS
from postroom.stores.base import LANES

HISTORY_S: Final = 60
RATE_S: Final = 10
"""The seconds that a rate is the mean of."""
WAITS_KEPT_MAX: Final = 2_000  # waiting times kept for one priority
MICROS_PER_S: Final = 1_000_000

Counted: TypeAlias = Literal["submitted", "completed", "failed"]

COUNTED: Final[dict[EventKind, Counted]] = {
    "created": "submitted",
    "execution_completed": "completed",
    "execution_failed": "failed",
    "lease_lapsed": "failed",
}


class Throughput(msgspec.Struct, frozen=True):
    """Messages a second, as the mean of the last `RATE_S` seconds."""

    submitted: float = 0.0
    completed: float = 0.0
    failed: float = 0.0


class Second(msgspec.Struct, frozen=True):
    """What happened in one second."""

    ago_s: int
    submitted: int = 0
    completed: int = 0
    failed: int = 0


class PriorityWait(msgspec.Struct, frozen=True):
    """How long the messages of a priority waited for their delivery in the last `HISTORY_S` seconds."""

    priority: int
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    target_ms: float
    """What 99 of 100 messages should stay within."""
    is_within_target: bool


class Activity:
    """The events of the last `HISTORY_S` seconds, as counts and waiting times."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[tuple[str, Counted], float]] = {}
        self._waits: list[deque[tuple[int, str, int]]] = [deque(maxlen=WAITS_KEPT_MAX) for _ in range(LANES)]
        """Of each priority: time, organization and microseconds waited."""

    def add(self, events: Sequence[Event], share: float = 1.0) -> None:
        """Count events, which are this share of all that happened."""
        for event in events:
            org_id = org_of(event.queue)
            if not org_id:
                continue
            counted = COUNTED.get(event.kind)
            if counted is not None:
                counts = self._seconds.setdefault(event.ts_us // MICROS_PER_S, {})
                counts[org_id, counted] = counts.get((org_id, counted), 0.0) + 1 / share
            elif event.kind == "dequeued" and 0 <= event.priority < LANES:
                self._waits[event.priority].append((event.ts_us, org_id, event.duration_us))

    def forget(self, now_us: int) -> None:
        """Drop what is older than `HISTORY_S`."""
        oldest = now_us // MICROS_PER_S - HISTORY_S
        for second in [second for second in self._seconds if second < oldest]:
            del self._seconds[second]
        for waits in self._waits:
            while waits and waits[0][0] < oldest * MICROS_PER_S:
                waits.popleft()

    def rates(self, now_us: int, org_id: str | None = None) -> Throughput:
        """The rates of one organization, or of all."""
        now_s = now_us // MICROS_PER_S
        totals = self._totals(range(now_s - RATE_S, now_s), org_id)  # the current second is not over
        return Throughput(**{counted: round(count / RATE_S, 1) for counted, count in totals.items()})

    def history(self, now_us: int, org_id: str | None = None) -> list[Second]:
        """The last `HISTORY_S` whole seconds, the oldest first."""
        now_s = now_us // MICROS_PER_S
        totals = {ago_s: self._totals([now_s - ago_s], org_id) for ago_s in range(HISTORY_S, 0, -1)}
        return [
            Second(ago_s, **{counted: round(count) for counted, count in counts.items()})
            for ago_s, counts in totals.items()
        ]

    def _totals(self, seconds: Iterable[int], org_id: str | None) -> dict[Counted, float]:
        totals: dict[Counted, float] = {}
        for second in seconds:
            for (org, counted), count in self._seconds.get(second, {}).items():
                if org_id in (None, org):
                    totals[counted] = totals.get(counted, 0.0) + count
        return totals

    def waits(self, org_id: str | None = None) -> list[PriorityWait]:
        """The waiting times of each priority, P0 first."""
        found = []
        for priority, waits in enumerate(self._waits):
            waits_us = sorted(wait_us for _, org, wait_us in waits if org_id in (None, org))
            count = len(waits_us)
            p50, p90, p99 = (
                round(waits_us[int(count * share)] / 1000, 1) if waits_us else 0.0
                for share in (0.5, 0.9, 0.99)
            )
            target_ms = TARGETS_MS[priority]
            found.append(PriorityWait(priority, count, p50, p90, p99, target_ms, p99 <= target_ms))
        return found
