"""Counters and histograms of the events of a store, for `/metrics`.

Rule 1: nothing is counted while messages move. From the first scrape on, the events of the store since the
        start of the server are read.
Rule 2: every label has a limit. What is beyond it is counted under `other`.
"""

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias, get_args

from postroom.message import Event, EventKind, org_of
from postroom.stores.store import Store

BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0)
ORGANIZATIONS_MAX: Final = 30  # with labels of their own
TYPES_AN_ORGANIZATION_MAX: Final = 12
ERRORS_MAX: Final = 100
MODELS_MAX: Final = 50
MESSAGES_MAX: Final = 100_000  # under way, whose type and time of acceptance are known
EVENTS_A_READ: Final = 5_000
READS_A_LOOK_MAX: Final = 200  # then the next look goes on
OTHER: Final = "other"
UNKNOWN: Final = "unknown"
MICROS_PER_S: Final = 1_000_000

Labels: TypeAlias = tuple[str, ...]
Time: TypeAlias = Literal["wait", "run", "total"]
"""`wait`: until a delivery. `run`: from the delivery to its end. `total`: from the acceptance to the end."""
_ENDS: Final = frozenset({"execution_completed", "dead_letter", "cancelled", "expired", "quarantined"})
_TOKENS: Final = frozenset({"tokens_reserved", "tokens_returned", "tokens_borrowed", "tokens_refused"})


class Histogram:
    """How many observations lie at or below each bound, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One observation."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulated counts, as the text format has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class EventCounts:
    """What the events of one store add up to since this server began."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._position = store.newest_event()
        self.mutex = threading.Lock()
        """Held while events are added, and by a reader of the counts."""
        self.kinds: Counter[str] = Counter(dict.fromkeys(get_args(EventKind), 0))
        self.errors: Counter[str] = Counter()
        self.lapses: Counter[str] = Counter()
        self.promoted: Counter[Labels] = Counter()
        """By organization and the class that a message was promoted to."""
        self.tokens: Counter[Labels] = Counter()
        """By model and what was done with them."""
        self.times: dict[Time, dict[Labels, Histogram]] = {time: {} for time in get_args(Time)}
        """By organization, type and class."""
        self._types: dict[str, set[str]] = {}
        self._accepted: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def read(self) -> None:
        """Add the events that are new."""
        with self.mutex:
            for _ in range(READS_A_LOOK_MAX):
                events = self._store.events(self._position, EVENTS_A_READ)
                if not events:
                    return
                self._position = events[-1].seq
                self.add(events)

    def add(self, events: Iterable[Event]) -> None:
        """Add events."""
        for event in events:
            self.kinds[event.kind] += 1
            if event.error_type and event.kind in ("execution_failed", "lease_lapsed"):
                self.errors[_bounded(event.error_type, self.errors, ERRORS_MAX)] += 1
            org_id = org_of(event.queue)
            if org_id:
                self._add_message(event, org_id)

    def _add_message(self, event: Event, org_id: str) -> None:
        """An event of an organization."""
        kind = event.kind
        if kind == "created":
            self._accepted[event.message_id] = event.type, event.ts_us
            if len(self._accepted) > MESSAGES_MAX:
                self._accepted.popitem(last=False)
        elif kind == "dequeued":
            self._observe("wait", event, org_id, event.duration_us)
        elif kind in ("execution_completed", "execution_failed"):
            self._observe("run", event, org_id, event.duration_us)
        elif kind == "lease_lapsed":
            self.lapses[self._organization(org_id)] += 1
        elif kind == "promoted":
            self.promoted[self._organization(org_id), f"P{event.priority}"] += 1
        elif kind in _TOKENS:
            model = str(event.detail.get("model", UNKNOWN))
            models = {name for name, _ in self.tokens}
            label = _bounded(model, models, MODELS_MAX), kind.removeprefix("tokens_")
            self.tokens[label] += int(event.detail.get("tokens", 0))
        if kind in _ENDS:
            _, accepted_us = self._accepted.get(event.message_id, ("", 0))
            if accepted_us:
                self._observe("total", event, org_id, event.ts_us - accepted_us)
                del self._accepted[event.message_id]

    def _observe(self, time: Time, event: Event, org_id: str, us: int) -> None:
        type_name, _ = self._accepted.get(event.message_id, (UNKNOWN, 0))
        organization = self._organization(org_id)
        types = self._types[organization]
        type_name = _bounded(type_name, types, TYPES_AN_ORGANIZATION_MAX)
        types.add(type_name)
        labels = organization, type_name, f"P{event.priority}"
        histogram = self.times[time].get(labels)
        if histogram is None:
            histogram = self.times[time][labels] = Histogram()
        histogram.add(max(0, us) / MICROS_PER_S)

    def _organization(self, org_id: str) -> str:
        organization = _bounded(org_id, self._types, ORGANIZATIONS_MAX)
        self._types.setdefault(organization, set())
        return organization


def _bounded(name: str, known: "Iterable[str]", most: int) -> str:
    """The name as a label, or `other` when there are enough of them."""
    names = known if isinstance(known, set | dict) else set(known)
    return name if name in names or len(names) < most else OTHER
