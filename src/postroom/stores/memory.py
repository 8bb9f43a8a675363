"""A store in memory: for tests and tools, and as the shortest complete backend.

Rule 1: a transaction writes at once and keeps an undo log. Work that raises is undone.
Rule 2: each index is a sorted list of (number, seq, message id).
"""

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from postroom.core import lifecycle
from postroom.message import Envelope, Event, Record, Stored
from postroom.stores.base import (
    NEWEST,
    ByIds,
    Change,
    Counted,
    Ending,
    Head,
    Listing,
    Pick,
    count_changes,
    counted_as,
    unknown,
)
from postroom.stores.store import Store
from postroom.stores.transaction import LimitsCache, Transaction
from postroom.system.clock import Clock, SystemClock
from postroom.system.handles import reset_after_fork

T = TypeVar("T")

EVENTS_KEPT_MAX = 1_000_000  # older events are forgotten, shipped or not

_Index = tuple[str, str | int]


class _Row(msgspec.Struct, frozen=True):
    record: Record
    envelope: Envelope
    result: bytes | None
    trail: tuple[Event, ...]


class _Data:
    """The data of a store."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.indexes: dict[_Index, list[tuple[int, int, str]]] = {}
        self.counts: dict[str, dict[Counted, int]] = {}
        self.cells: dict[str, dict[str, bytes]] = {}
        self.cell_keys: dict[str, list[str]] = {}
        """The keys of each kind, sorted."""
        self.events: list[Event] = []
        self.number = 1

    def put(self, message_id: str, row: _Row | None) -> _Row | None:
        """Set or remove a row with its index entries; returns the previous row."""
        before = self.rows.pop(message_id, None)
        if before is not None:
            for index, entry in _entries(before.record):
                entries = self.indexes[index]
                del entries[bisect_left(entries, entry)]
        if row is not None:
            self.rows[message_id] = row
            for index, entry in _entries(row.record):
                insort(self.indexes.setdefault(index, []), entry)
        return before

    def put_cell(self, kind: str, key: str, value: bytes | None) -> bytes | None:
        """Set or remove a cell; returns the previous value."""
        cells = self.cells.setdefault(kind, {})
        keys = self.cell_keys.setdefault(kind, [])
        before = cells.pop(key, None)
        if value is not None:
            cells[key] = value
        if before is None and value is not None:
            insort(keys, key)
        elif before is not None and value is None:
            del keys[bisect_left(keys, key)]
        return before

    def count(self, counts: Mapping[tuple[str, Counted], int], sign: int = 1) -> None:
        """Change the counters."""
        for (queue, what), change in counts.items():
            of_queue = self.counts.setdefault(queue, {})
            of_queue[what] = of_queue.get(what, 0) + sign * change


def _entries(record: Record) -> list[tuple[_Index, tuple[int, int, str]]]:
    """The index entries of a record."""
    found: list[tuple[_Index, int]] = [(("all", ""), record.seq), (("state", record.state), record.seq)]
    if record.state == "QUEUED":
        found.append(((record.queue, record.lane), record.place))
    if record.lease_until:
        found.append((("ending", "lease"), record.lease_until))
    if record.due:
        found.append((("ending", "delay"), record.due))
    if record.expires and record.state in lifecycle.WAITING:
        found.append((("ending", "expiry"), record.expires))
    return [(index, (number, record.seq, record.message_id)) for index, number in found]


class MemoryStore(Store):
    """Records in a dictionary, guarded by one lock."""

    url = "memory://"

    def __init__(self, *, clock: Clock | None = None, store_id: str | None = None) -> None:
        self.store_id = f"t{os.urandom(4).hex()}" if store_id is None else store_id
        self._clock = SystemClock() if clock is None else clock
        self._mutex = threading.RLock()
        self._data = _Data()
        self._limits = LimitsCache()
        reset_after_fork(self)

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:  # noqa: ARG002
        with self._mutex:
            transaction = self._begin()
            try:
                result = work(transaction)
            except BaseException:
                transaction.undo()
                raise
            transaction.commit()
        if self.on_commit is not None:
            self.on_commit(transaction)
        return result

    def read(self, work: Callable[[Transaction], T]) -> T:
        with self._mutex:
            return work(self._begin())

    def _begin(self) -> "MemoryTransaction":
        clock = self._clock
        return MemoryTransaction(self.store_id, self._limits, self._data, clock.boot_ns(), clock.wall_us())

    def wall_us(self) -> int:
        return self._clock.wall_us()

    def identity(self) -> str:
        return self.store_id

    def close(self) -> None:
        """Nothing to release: the data lives as long as the object."""

    def after_fork(self) -> None:
        """A forked child has its own copy of the data."""
        self._mutex = threading.RLock()


class MemoryTransaction(Transaction):
    """Changes the data at once and remembers how to undo the changes."""

    def __init__(self, store_id: str, limits: LimitsCache, data: _Data, steady_ns: int, wall_us: int) -> None:
        super().__init__(store_id, limits, steady_ns, wall_us)
        self._data = data
        self._number = data.number
        self._events: list[Event] = []
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        for step in reversed(self._undo):
            step()

    def commit(self) -> None:
        """Append the events."""
        self._data.events += self._events
        self._data.number = self._number
        if len(self._data.events) > EVENTS_KEPT_MAX:
            del self._data.events[: len(self._data.events) - EVENTS_KEPT_MAX]

    def _undo_by(self, step: Callable[[], object]) -> None:
        self.changes += 1
        self._undo.append(step)

    # ---- records and events --------------------------------------------------------------------

    def take_numbers(self, count: int) -> int:
        first = self._number
        self.changes += count
        self._number += count
        return first

    def find(self, pick: Pick) -> list[Record]:
        match pick:
            case ByIds(message_ids):
                for message_id in message_ids:
                    if message_id not in self._data.rows:
                        raise unknown(message_id)
                return [self._data.rows[message_id].record for message_id in message_ids]
            case Ending(deadline, until_ns, limit):
                entries = self._data.indexes.get(("ending", deadline), [])
                return self._records(entries[: bisect_left(entries, (until_ns + 1,))][:limit])
            case Listing(queue, state, after, limit):
                index = ("all", "") if state is None else ("state", state)
                entries = self._data.indexes.get(index, [])
                later = self._records(entries[bisect_left(entries, (after + 1,)) :])
                return list(islice((r for r in later if queue in (None, r.queue)), limit))

    def _records(self, entries: Sequence[tuple[int, int, str]]) -> list[Record]:
        return [self._data.rows[message_id].record for _, _, message_id in entries]

    def load(self, message_id: str) -> Stored | None:
        row = self._data.rows.get(message_id)
        if row is None:
            return None
        first, *later = row.trail
        return Stored(row.record, row.envelope, row.result, lifecycle.history(row.record, first, later))

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        for change in changes:
            step, message_id = change.step, change.step.record.message_id
            if change.envelope is not None:
                envelope = msgspec.structs.replace(change.envelope, message_id=message_id)
                row = _Row(step.record, envelope, None, step.events[:1])
            else:
                known = self._data.rows[message_id]
                result = known.result if step.result is None else step.result
                assert change.before is not None  # noqa: S101 - for the type checker
                row = _Row(
                    step.record, known.envelope, result, (*known.trail, *lifecycle.trail(change.before, step))
                )
            self._put(message_id, row)
        self._count(count_changes(changes, events))
        self.changes += 1
        self._events += events

    def _put(self, message_id: str, row: _Row | None) -> None:
        before = self._data.put(message_id, row)
        self._undo_by(lambda: self._data.put(message_id, before))

    def _count(self, counts: Mapping[tuple[str, Counted], int]) -> None:
        self._data.count(counts)
        self._undo_by(lambda: self._data.count(counts, -1))

    def events(self, after: int, limit: int) -> list[Event]:
        events = self._data.events
        if after == NEWEST:
            return events[-1:]
        start = max(0, after + 1 - events[0].seq) if events else 0
        return events[start : start + limit]

    def forget(self, records: Sequence[Record], events_up_to: int = 0) -> None:
        for record in records:
            self._put(record.message_id, None)
            self._count({(record.queue, counted_as(record)): -1})
        events = self._data.events
        gone = max(0, min(events_up_to - events[0].seq + 1, len(events) - 1)) if events else 0
        removed = events[:gone]
        del events[:gone]
        self._undo_by(lambda: events.__setitem__(slice(0, 0), removed))

    # ---- cells ---------------------------------------------------------------------------------

    def cell(self, kind: str, key: str) -> bytes | None:
        return self._data.cells.get(kind, {}).get(key)

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        before = self._data.put_cell(kind, key, value)
        self._undo_by(lambda: self._data.put_cell(kind, key, before))

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        keys, cells = self._data.cell_keys.get(kind, []), self._data.cells.get(kind, {})
        start = bisect_right(keys, after)
        return [(key, cells[key]) for key in keys[start : start + limit]]

    # ---- lanes ---------------------------------------------------------------------------------

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        found = [self._data.rows[entry[2]] for entry in self._data.indexes.get((queue, lane), [])[:limit]]
        return [
            Head(row.record, row.envelope.payload, row.envelope.type, row.envelope.parent_message_id)
            for row in found
        ]

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return {what: n for what, n in self._data.counts.get(queue, {}).items() if n}

    def queues(self) -> list[str]:
        return sorted(queue for queue, counts in self._data.counts.items() if any(counts.values()))
