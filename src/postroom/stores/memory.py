"""A store in memory: the model that the others are compared with, and enough for one process.

It keeps what SQLite keeps, in sorted lists instead of indexes. Nothing survives the process.
"""

import os
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import TypeVar

import msgspec

from postroom.core.lifecycle import WAITING, history, trail
from postroom.message import Envelope, Event, Record, Step, Stored
from postroom.stores.base import (
    LIVE_EVENTS,
    MAX_DEPTH_DEFAULT,
    PRIORITIES,
    PURGE_BATCH_MAX,
    ByIds,
    Counted,
    Due,
    Expired,
    Head,
    InState,
    Leased,
    Limits,
    Outbox,
    Overdue,
    Pick,
    Transaction,
    unknown,
)
from postroom.system.clock import Clock, SystemClock
from postroom.system.handles import reset_after_fork

T = TypeVar("T")

EVENTS_KEPT_MAX = 1_000_000  # older ones are forgotten, shipped or not: memory has an end


class _Row(msgspec.Struct, frozen=True):
    record: Record
    envelope: Envelope
    result: bytes | None
    history: tuple[Event, ...]


class _Sorted:
    """Message ids by a number, and by acceptance where that is the same."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, str]] = []

    def add(self, number: int, record: Record) -> None:
        insort(self._entries, (number, record.seq, record.message_id))

    def discard(self, number: int, record: Record) -> None:
        index = bisect_left(self._entries, (number, record.seq, record.message_id))
        del self._entries[index]

    def first(self, limit: int) -> list[str]:
        return [message_id for _, _, message_id in self._entries[:limit]]

    def up_to(self, number: int, limit: int) -> list[str]:
        end = bisect_left(self._entries, (number + 1, 0, ""))
        return [message_id for _, _, message_id in self._entries[: min(end, limit)]]

    def lowest(self) -> int | None:
        return self._entries[0][0] if self._entries else None


class MemoryStore:
    """Records in a dictionary, one lock around them."""

    url = "memory://"
    trouble = ""

    def __init__(self, *, clock: Clock | None = None, store_id: str | None = None) -> None:
        self.store_id = f"t{os.urandom(4).hex()}" if store_id is None else store_id
        self._clock = SystemClock() if clock is None else clock
        self._mutex = threading.RLock()
        self.rows: dict[str, _Row] = {}
        self.keys: dict[tuple[str, str], tuple[str, int]] = {}
        self._indexes: dict[tuple[str, str | int], _Sorted] = {}
        self._counts: dict[str, dict[Counted, int]] = {}
        self._limits: dict[str, Limits] = {}
        self._events: list[Event] = []
        self._number = 1
        self._outbox: Outbox | None = None
        self.on_ready: Callable[[set[str]], None] | None = None
        self.on_ended: Callable[[], None] | None = None
        self.on_notable: Callable[[Sequence[Event]], None] | None = None
        reset_after_fork(self)

    # ---- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:  # noqa: ARG002
        with self._mutex:
            transaction = MemoryTransaction(self, self._number, self.steady_ns(), self._clock.wall_us())
            try:
                result = work(transaction)
            except BaseException:
                transaction.undo()
                raise
            self._commit(transaction)
        if transaction.ready and self.on_ready is not None:
            self.on_ready(transaction.ready)
        if transaction.ended and self.on_ended is not None:
            self.on_ended()
        if transaction.notable and self.on_notable is not None:
            self.on_notable(transaction.notable)
        return result

    def _commit(self, transaction: "MemoryTransaction") -> None:
        self._events += transaction.events
        self._number = transaction.number
        if len(self._events) > EVENTS_KEPT_MAX:
            del self._events[: len(self._events) - EVENTS_KEPT_MAX]
        for (queue, state), change in transaction.counts.items():
            counts = self._counts.setdefault(queue, {})
            counts[state] = counts.get(state, 0) + change

    def put(self, message_id: str, row: _Row | None) -> _Row | None:
        """Set or remove a row and keep the indexes true; gives the row that was there."""
        before = self.rows.pop(message_id, None)
        if before is not None:
            for index, number in _entries(before.record):
                self._indexes[index].discard(number, before.record)
        if row is not None:
            self.rows[message_id] = row
            for index, number in _entries(row.record):
                self._indexes.setdefault(index, _Sorted()).add(number, row.record)
        return before

    # ---- looking -------------------------------------------------------------------------------

    def read(self, message_id: str) -> Stored | None:
        with self._mutex:
            row = self.rows.get(message_id)
            if row is None:
                return None
            first, *later = row.history
            return Stored(row.record, row.envelope, row.result, history(row.record, first, later))

    def find(self, pick: Pick) -> list[Record]:
        return self.found(pick, self.steady_ns())

    def found(self, pick: Pick, now: int) -> list[Record]:
        """The records of a pick at an instant."""
        with self._mutex:
            return [self.rows[message_id].record for message_id in self._ids(pick, now)]

    def _ids(self, pick: Pick, now: int) -> list[str]:
        match pick:
            case ByIds(message_ids):
                for message_id in message_ids:
                    if message_id not in self.rows:
                        raise unknown(message_id)
                return list(message_ids)
            case Overdue(queue, limit):
                return self._up_to(_index("leased", queue), now, limit)
            case Leased(queue, limit):
                found = self._indexes.get(_index("leased", queue))
                return [] if found is None else found.first(limit)
            case Due(queue, limit):
                return self._up_to(_index("waiting", queue), now, limit)
            case Expired(limit):
                return self._up_to(("expiring", ""), now, limit)
            case InState(queue, state, after, limit):
                records = (
                    row.record
                    for row in self.rows.values()
                    if queue in (None, row.record.queue) and state in (None, row.record.state)
                )
                later = sorted((record.seq, record.message_id) for record in records if record.seq > after)
                return [message_id for _, message_id in later[:limit]]

    def _up_to(self, index: tuple[str, str | int], number: int, limit: int) -> list[str]:
        found = self._indexes.get(index)
        return [] if found is None else found.up_to(number, limit)

    def first_ready(self, queue: str, priority: int, limit: int) -> list[str]:
        """The ids at the head of a lane."""
        found = self._indexes.get((queue, priority))
        return [] if found is None else found.first(limit)

    def count(self) -> dict[str, dict[Counted, int]]:
        with self._mutex:
            return {
                queue: {state: n for state, n in counts.items() if n}
                for queue, counts in self._counts.items()
            }

    def waiting(self, queue: str) -> int:
        """How many wait in a queue."""
        counts = self._counts.get(queue, {})
        return sum(counts.get(state, 0) for state in WAITING)

    def limits(self, queue: str) -> Limits:
        """What a queue may hold."""
        return self._limits.get(queue, _DEFAULT_LIMITS)

    def set_limits(self, queue: str, limits: Limits) -> None:
        with self._mutex:
            self._limits[queue] = limits

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        with self._mutex:
            first = self._events[0].seq if self._events else 1
            start = max(0, after + 1 - first)
            return list(islice(self._events, start, start + limit))

    def purge_events(self, *, up_to: int, before_us: int, limit: int) -> None:
        with self._mutex:
            if self._outbox is not None:
                up_to = min(up_to, self._outbox.shipped)
            old = (event.seq <= up_to and event.ts_us < before_us for event in islice(self._events, limit))
            del self._events[: sum(takewhile(bool, old))]

    def identity(self) -> str:
        return self.store_id

    def sync(self) -> None:
        """Memory does not survive a power cut, and nobody thinks so."""

    def outbox(self) -> Outbox | None:
        return self._outbox

    def set_outbox(self, outbox: Outbox | None) -> None:
        with self._mutex:
            self._outbox = outbox
            if outbox is not None:
                self.purge_events(
                    up_to=outbox.shipped - LIVE_EVENTS, before_us=1 << 62, limit=PURGE_BATCH_MAX
                )

    def purge_keys(self, before_us: int, limit: int) -> None:
        with self._mutex:
            old = sorted((seen_us, key) for key, (_, seen_us) in self.keys.items() if seen_us < before_us)
            for _, key in old[:limit]:
                del self.keys[key]

    def oldest_ns(self, queue: str) -> int | None:
        with self._mutex:
            heads = [
                self.rows[message_id].record.ready_at
                for priority in range(PRIORITIES)
                for message_id in self.first_ready(queue, priority, 1)
            ]
            return max(0, self.steady_ns() - min(heads)) if heads else None

    def payloads(self, after: int, up_to: int) -> dict[int, bytes]:
        with self._mutex:
            found = (self.rows.get(event.message_id) for event in self.events(after, up_to - after))
            return {
                row.record.seq: row.envelope.payload
                for row in found
                if row and after < row.record.seq <= up_to
            }

    def newest_event(self) -> int:
        return self._number - 1

    def next_work_ns(self, queue: str) -> int | None:
        with self._mutex:
            if self._counts.get(queue, {}).get("QUEUED", 0):
                return 0
            starts = [
                lowest
                for kind in ("waiting", "leased")
                if (found := self._indexes.get(_index(kind, queue)))
                and (lowest := found.lowest()) is not None
            ]
            return max(0, min(starts) - self.steady_ns()) if starts else None

    def steady_ns(self) -> int:
        return self._clock.boot_ns()

    def wall_us(self) -> int:
        return self._clock.wall_us()

    # ---- life ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """There is nothing that could have failed."""

    def close(self) -> None:
        """What is in memory stays until the store is forgotten."""

    def after_fork(self) -> None:
        """A child has a copy of its own."""
        self._mutex = threading.RLock()


_DEFAULT_LIMITS = Limits(max_depth=MAX_DEPTH_DEFAULT)


def _index(kind: str, queue: str | None) -> tuple[str, str]:
    """The leases or delays of one queue, or of all."""
    return (f"{kind} of all", "") if queue is None else (kind, queue)


def _entries(record: Record) -> list[tuple[tuple[str, str | int], int]]:
    """Where a record stands in the indexes."""
    found: list[tuple[tuple[str, str | int], int]] = []
    if record.state == "QUEUED":
        found.append(((record.queue, record.priority), record.place))
    if record.lease_until:
        found += [(_index("leased", queue), record.lease_until) for queue in (record.queue, None)]
    if record.due:
        found += [(_index("waiting", queue), record.due) for queue in (record.queue, None)]
    if record.expires and record.state in WAITING:
        found.append((("expiring", ""), record.expires))
    return found


class MemoryTransaction(Transaction):
    """Writes at once and remembers how to take it back."""

    def __init__(self, store: MemoryStore, number: int, steady_ns: int, wall_us: int) -> None:
        super().__init__(store.store_id, number, steady_ns, wall_us)
        self._store = store
        self._before: list[tuple[str, _Row | None]] = []
        self._new_keys: list[tuple[str, str]] = []
        self.events: list[Event] = []

    def undo(self) -> None:
        """Put everything back."""
        for message_id, row in reversed(self._before):
            self._store.put(message_id, row)
        for key in self._new_keys:
            del self._store.keys[key]

    def keep(self, events: Iterable[Event]) -> None:
        self.events += events

    def find(self, pick: Pick) -> list[Record]:
        return self._store.found(pick, self.steady_ns)

    def ready_in(self, queue: str, priority: int, limit: int) -> list[Head]:
        rows = [self._store.rows[found] for found in self._store.first_ready(queue, priority, limit)]
        return [
            Head(row.record, row.envelope.payload, row.envelope.type, row.envelope.parent_message_id)
            for row in rows
        ]

    def known_by_key(self, queue: str, key: str) -> str | None:
        found = self._store.keys.get((queue, key))
        return found[0] if found else None

    def sender_of(self, record: Record) -> str:
        return self._store.rows[record.message_id].envelope.sender

    def is_past(self, queue: str) -> bool:
        return bool(self.find(Overdue(queue, 1)) or self.find(Due(queue, 1)))

    def depth(self, queue: str) -> int:
        changed = sum(self.counts.get((queue, state), 0) for state in WAITING)
        return self._store.waiting(queue) + changed

    def limits(self, queue: str) -> Limits:
        return self._store.limits(queue)

    def put_new(self, step: Step, envelope: Envelope) -> bool:
        message_id = step.record.message_id
        if message_id in self._store.rows:
            return False
        if envelope.key:
            self._new_keys.append((envelope.queue, envelope.key))
            self._store.keys[envelope.queue, envelope.key] = (message_id, self.wall_us)
        named = msgspec.structs.replace(envelope, message_id=message_id)
        self._set(message_id, _Row(step.record, named, None, step.events[:1]))
        return True

    def put_all_new(self, steps: Sequence[Step], envelopes: Sequence[Envelope]) -> None:
        for step, envelope in zip(steps, envelopes, strict=True):
            self.put_new(step, envelope)

    def put_all(self, before: Sequence[Record], steps: Sequence[Step]) -> None:
        for record, step in zip(before, steps, strict=True):
            self._put_one(record, step)

    def _put_one(self, before: Record, step: Step) -> None:
        row = self._store.rows[before.message_id]
        result = row.result if step.result is None else step.result
        told = (*row.history, *trail(before, step))
        self._set(before.message_id, _Row(step.record, row.envelope, result, told))

    def remove(self, records: Iterable[Record]) -> None:
        for record in records:
            self._set(record.message_id, None)

    def _set(self, message_id: str, row: _Row | None) -> None:
        self._before.append((message_id, self._store.put(message_id, row)))
