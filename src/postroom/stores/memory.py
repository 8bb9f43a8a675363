"""A store in memory: for tests and tools, and as the shortest complete backend.

Rule 1: a transaction writes at once and keeps an undo log. Work that raises is undone.
Rule 2: each index is a sorted list of (number, seq, message id).
"""

import os
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Event, Record, Stored, org_of
from postroom.stores.base import (
    LANE_COUNTS,
    NEWEST,
    ByIds,
    Cells,
    Change,
    Counted,
    Ending,
    Events,
    Head,
    Lanes,
    Listing,
    Pick,
    Records,
    count_changes,
    counted_as,
    in_order,
)
from postroom.stores.own_ids import OwnIds, first_rule
from postroom.stores.store import Capabilities, Store
from postroom.stores.transaction import LimitsCache, Transaction, lazily
from postroom.system.clock import Clock, SystemClock
from postroom.system.handles import reset_after_fork

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

EVENTS_KEPT_MAX = 1_000_000  # older events are forgotten, shipped or not

_Index = tuple[str, str | int]


class _Data:
    """The data of a store. The history of a row is its trail: see `lifecycle.trail`."""

    def __init__(self) -> None:
        self.rows: dict[str, Stored] = {}
        self.indexes: dict[_Index, list[tuple[int, int, str]]] = {}
        self.counts: dict[str, dict[Counted, int]] = {}
        self.total: dict[Counted, int] = {}
        """The counters of all organizations together."""
        self.ready: dict[str, int] = {}
        """The QUEUED records of each organization that has some."""
        self.cells: dict[str, dict[str, bytes]] = {}
        self.events: list[Event] = []
        self.number = 1


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
    capabilities = Capabilities(survives_kills=False)

    def __init__(self, *, clock: Clock | None = None, store_id: str | None = None) -> None:
        self._ids = OwnIds(store_id or f"t{os.urandom(4).hex()}", first_rule(store_id, 0, 0))
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
                transaction.ledger.undo()
                raise
            transaction.ledger.commit()
        if self.on_commit is not None:
            self.on_commit(transaction)
        return result

    def read(self, work: Callable[[Transaction], T]) -> T:
        with self._mutex:
            return work(self._begin())

    def _begin(self) -> "MemoryTransaction":
        clock = self._clock
        return MemoryTransaction(self._ids, self._limits, self._data, clock.boot_ns(), clock.wall_us())

    def identity(self) -> str:
        return self._ids.store_id

    def close(self) -> None:
        """Nothing to release: the data lives as long as the object."""

    def after_fork(self) -> None:
        """A forked child has its own copy of the data."""
        self._mutex = threading.RLock()


class UndoJournal:
    """The data as one transaction changes it, with the steps that undo the changes."""

    def __init__(self, data: _Data) -> None:
        self.data = data
        self.number = data.number
        self.events: list[Event] = []
        self.changes = 0
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Undo all changes, the last one first. Each undo appends to the log, so a copy is read."""
        for step in self._undo[::-1]:
            step()

    def commit(self) -> None:
        """Append the events."""
        self.data.events += self.events
        self.data.number = self.number
        if len(self.data.events) > EVENTS_KEPT_MAX:
            del self.data.events[: len(self.data.events) - EVENTS_KEPT_MAX]

    def undo_by(self, step: Callable[[], object]) -> None:
        """Note how a change is undone."""
        self.changes += 1
        self._undo.append(step)

    def put_row(self, message_id: str, row: Stored | None) -> None:
        """Set or remove a row with its index entries."""
        data = self.data
        before = data.rows.pop(message_id, None)
        if before is not None:
            for index, entry in _entries(before.record):
                entries = data.indexes[index]
                del entries[bisect_left(entries, entry)]
        if row is not None:
            data.rows[message_id] = row
            for index, entry in _entries(row.record):
                insort(data.indexes.setdefault(index, []), entry)
        self.undo_by(lambda: self.put_row(message_id, before))

    def put(self, values: dict[K, V], key: K, value: V | None) -> None:
        """Set or remove a value."""
        before = values.pop(key, None)
        if value is not None:
            values[key] = value
        self.undo_by(lambda: self.put(values, key, before))

    def count(self, queue: str, what: Counted, change: int) -> None:
        """Change a counter."""
        counts, total, waiting = self.data.counts.setdefault(queue, {}), self.data.total, self.data.ready
        self.put(counts, what, counts.get(what, 0) + change)
        if org_of(queue):
            self.put(total, what, total.get(what, 0) + change)
            if what in LANE_COUNTS:
                self.put(waiting, queue, waiting.get(queue, 0) + change or None)


class MemoryRecords(Records):
    """The records of one transaction."""

    def __init__(self, journal: UndoJournal) -> None:
        self._journal = journal
        self._data = journal.data

    def find(self, pick: Pick) -> list[Record]:
        match pick:
            case ByIds(message_ids):
                return in_order(self.get_many(message_ids), message_ids)
            case Ending(deadline, until_ns, limit):
                entries = self._data.indexes.get(("ending", deadline), [])
                return self._found(entries[: bisect_left(entries, (until_ns + 1,))][:limit])
            case Listing(queue, state, after, limit, before):
                index = ("all", "") if state is None else ("state", state)
                entries = self._data.indexes.get(index, [])
                end = bisect_left(entries, (before,)) if before else len(entries)
                later = self._found(entries[bisect_left(entries, (after + 1,)) : end])
                if before:
                    later.reverse()
                return [record for record in later if queue in (None, record.queue)][:limit]

    def _found(self, entries: Sequence[tuple[int, int, str]]) -> list[Record]:
        return [self._data.rows[message_id].record for _, _, message_id in entries]

    def get_many(self, message_ids: Sequence[str]) -> dict[str, Record]:
        rows = self._data.rows
        return {message_id: rows[message_id].record for message_id in message_ids if message_id in rows}

    def load(self, message_id: str) -> Stored | None:
        row = self._data.rows.get(message_id)
        if row is None:
            return None
        history = lifecycle.history(row.record, row.history[0], row.history[1:])
        return msgspec.structs.replace(row, history=history)

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        journal = self._journal
        for change in changes:
            step, message_id = change.step, change.step.record.message_id
            if change.envelope is not None:
                envelope = msgspec.structs.replace(change.envelope, message_id=message_id)
                journal.put_row(message_id, Stored(step.record, envelope, None, [*step.events[:1]]))
            elif change.before is not None:
                known = self._data.rows[message_id]
                result = known.result if step.result is None else step.result
                trail = [*known.history, *lifecycle.trail(change.before, step)]
                journal.put_row(message_id, Stored(step.record, known.envelope, result, trail))
        for (queue, what), n in count_changes(changes, events).items():
            journal.count(queue, what, n)
        journal.changes += 1
        journal.events += events

    def forget(self, records: Sequence[Record]) -> None:
        for record in records:
            self._journal.put_row(record.message_id, None)
            self._journal.count(record.queue, counted_as(record), -1)


class MemoryEvents(Events):
    """The events of the store."""

    def __init__(self, journal: UndoJournal) -> None:
        self._journal = journal

    def take_numbers(self, count: int) -> int:
        first = self._journal.number
        self._journal.changes += count
        self._journal.number += count
        return first

    def read(self, after: int, limit: int) -> list[Event]:
        events = self._journal.data.events
        if after == NEWEST:
            return events[-1:]
        start = max(0, after + 1 - events[0].seq) if events else 0
        return events[start : start + limit]

    def forget(self, up_to: int) -> None:
        events = self._journal.data.events
        gone = max(0, min(up_to - events[0].seq + 1, len(events) - 1)) if events else 0
        removed = events[:gone]
        del events[:gone]
        self._journal.undo_by(lambda: events.__setitem__(slice(0, 0), removed))


class MemoryCells(Cells):
    """The cells of the store."""

    def __init__(self, journal: UndoJournal) -> None:
        self._journal = journal
        self._kinds = journal.data.cells

    def get(self, kind: str, key: str) -> bytes | None:
        return self._kinds.get(kind, {}).get(key)

    def put(self, kind: str, key: str, value: bytes | None) -> None:
        self._journal.put(self._kinds.setdefault(kind, {}), key, value)

    def page(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        found = self._kinds.get(kind, {})
        return [(key, found[key]) for key in sorted(found) if key > after][:limit]


class MemoryLanes(Lanes):
    """The counters and indexes of the store."""

    def __init__(self, journal: UndoJournal) -> None:
        self._data = journal.data

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        rows = [self._data.rows[entry[2]] for entry in self._data.indexes.get((queue, lane), [])[:limit]]
        parts = attrgetter("payload", "type", "parent_message_id")
        return [Head(row.record, *parts(row.envelope)) for row in rows]

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return {what: n for what, n in self._data.counts.get(queue, {}).items() if n}

    def queues(self, prefix: str = "") -> list[str]:
        used = (queue for queue, counts in self._data.counts.items() if any(counts.values()))
        return sorted(queue for queue in used if queue.startswith(prefix))

    def total(self) -> dict[Counted, int]:
        return {what: n for what, n in self._data.total.items() if n}

    def count_active(self) -> int:
        return len(self._data.ready)

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        return {queue: self.depth(queue) for queue in self._data.ready}


class MemoryTransaction(Transaction):
    """Changes the data at once and remembers how to undo the changes."""

    records: Records = lazily(MemoryRecords)
    events: Events = lazily(MemoryEvents)
    cells: Cells = lazily(MemoryCells)
    lanes: Lanes = lazily(MemoryLanes)

    def __init__(self, ids: OwnIds, limits: LimitsCache, data: _Data, steady_ns: int, wall_us: int) -> None:
        super().__init__(ids, limits, steady_ns, wall_us)
        self.ledger = UndoJournal(data)

    @property
    def changes(self) -> int:
        return self.ledger.changes
