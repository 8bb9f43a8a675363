"""What one transaction writes into a store file: numbers, new records, events and counters.

Rule 1: counters are kept in memory. A commit writes its changes of the counters with its events. The counters
        themselves are written after every `FOLD_EVENTS` events.
Rule 2: similar new records are collected and written by one statement, before anything else reads or writes
        records.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import apsw
import msgspec

from postroom.message import Envelope, Record, org_of
from postroom.stores.base import FOREVER_NS, LANE_COUNTS, Counted
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    IMPLIED_MAX,
    Implied,
    NewRun,
    OnesRun,
    Part,
    implied_runs,
    pack,
    traits,
)
from postroom.stores.sqlite.known import SqliteKnown
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import ENGINE_LINES, ENGINE_QUEUES, LINE_DELAYED, LINES_PER_QUEUE, ask
from postroom.stores.sqlite.values import NO_TEXTS, checksums, start_of

FOLD_EVENTS = 10_000  # events between two writes of the counters
ALIKE_ROWS_MAX = 1_000  # new records in one statement
ALIKE_PAYLOAD_BYTES_MAX = 16 * 1024  # of each record: SQLite holds the payloads of a statement at once

_record_from: Callable[..., Record] = Record  # columns are in the order of the fields
_encode = msgspec.json.Encoder().encode


def carray_of(numbers: Sequence[int]) -> "apsw.CArrayBinding":
    """Numbers for `carray(?)`, which takes no empty array; no record has number 0."""
    return apsw.carray(array("q", numbers or [0]))


def line_of(queue: int, lane: int) -> int:
    """The line of QUEUED records. A lane of all organizations is one range of lines."""
    return LINES_PER_QUEUE * queue + lane if queue < ENGINE_QUEUES else ENGINE_LINES * (lane + 1) + queue


def alike_runs(envelopes: Sequence[Envelope]) -> list[Sequence[Envelope]]:
    """Neighbours that one statement can insert, in order. Long payloads are inserted one by one."""
    runs: list[Sequence[Envelope]] = []
    for _, neighbours in groupby(envelopes, traits):
        alike = list(neighbours)
        size = ALIKE_ROWS_MAX
        if max([len(e.payload) for e in alike]) > ALIKE_PAYLOAD_BYTES_MAX:
            size = 1
        runs += [alike[first : first + size] for first in range(0, len(alike), size)]
    return runs


class SqliteLedger:
    """What the parts of one transaction share."""

    changes = 0
    new_queues: Mapping[str, int] = MappingProxyType({})
    """Queues that this transaction created. They are not remembered elsewhere: it may be rolled back."""
    _new_traits: tuple[Any, ...] | None = None
    is_implied = False
    """Whether the transaction only inserted one record, which implies its events."""

    def __init__(self, known: SqliteKnown, cursor: apsw.Cursor, steady_ns: int, wall_us: int) -> None:
        self.known = known
        self.codec = known.codec
        self.raw_cursor = cursor
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        self.number = known.newest + 1
        """The next number to give."""
        self.parts: list[Part] = []
        """The events, in order."""
        self.new: list[Envelope] = []
        """New records that are not written yet. They differ only in payload and have the last numbers."""
        self.counts: dict[tuple[int, Counted], int] = {}
        """By how much the transaction changed each counter. After a rollback the store reads them again."""

    @property
    def cursor(self) -> apsw.Cursor:
        """The cursor, after new records are written."""
        if self.new:
            self.write_new()
        return self.raw_cursor

    # ---- queues and counters -------------------------------------------------------------------

    def queue(self, name: str) -> int:
        """The number of a queue; 0 when there is no such queue."""
        number = self.known.numbers.get(name) or self.new_queues.get(name)
        if number is None:
            rows = ask(self.cursor, "SELECT queue FROM queues WHERE name = ?", (name,))
            if not rows:
                return 0
            number = self.known.numbers[name] = int(rows[0][0])
        return number

    def make_queue(self, name: str) -> int:
        """The number of a queue, which is created when it is new."""
        number = self.queue(name)
        if not number:
            self.changes += 1
            query = sql.NEW_ENGINE_QUEUE if org_of(name) else sql.NEW_QUEUE
            self.cursor.execute(query, (name,))
            number = self.raw_cursor.connection.last_insert_rowid()
            self.new_queues = {**self.new_queues, name: number}
        return number

    def name(self, queue: int) -> str:
        """The name of a queue."""
        if self.new_queues:
            for name, number in self.new_queues.items():
                if number == queue:
                    return name
        return self.known.names.get(queue) or self.known.name_of(queue, self.cursor)

    def count(self, queue: int, what: Counted, change: int) -> None:
        """Change a counter."""
        key = queue, what
        self.known.add(queue, what, change)
        self.counts[key] = self.counts.get(key, 0) + change

    def counters(self) -> SqliteKnown:
        """The counters, changes of this transaction included."""
        return self.known

    # ---- records -------------------------------------------------------------------------------

    def record(self, row: tuple[Any, ...]) -> Record:
        """A record from a row of `RECORD_COLUMNS`."""
        seq, state, turn, queue = row[0], row[3], row[14], self.name(row[2])
        return _record_from(
            seq,
            row[1] or self.known.new(queue, seq, row[18]),
            queue,
            *row[3:14],
            turn if state == "PROCESSING" else 0,
            turn if state in ("SCHEDULED", "RETRYING") else 0,
            *row[15:22],
            row[22] or "",
        )

    def ends_at(self, deadline_ns: int) -> int:
        """Remember the deadline of a record."""
        self.known.deadline_ns = min(self.known.deadline_ns, deadline_ns)
        return deadline_ns

    def has_overdue(self) -> bool:
        """Whether a lease or delay is over."""
        known, now = self.known, self.steady_ns
        if now < known.deadline_ns:
            return False
        [ends] = ask(self.cursor, sql.FIRST_DEADLINES)
        known.deadline_ns = min((end for end in ends if end is not None), default=FOREVER_NS)
        return known.deadline_ns <= now

    def update(self, numbers: list[int], one: str, row: str, many: str, values: tuple[Any, ...]) -> None:
        """Make the same change to records.

        The query is `one` for one record, `row` for every second number of a range, and `many` otherwise.
        """
        if len(numbers) == 1:
            self.raw_cursor.execute(one, (*values, numbers[0]))
        elif numbers == [*range(numbers[0], numbers[-1] + 1, EVENTS_PER_NEW)]:
            self.raw_cursor.execute(row, (*values, numbers[0], numbers[-1]))
        else:
            self.raw_cursor.execute(many, (*values, carray_of(numbers)))

    # ---- new records -----------------------------------------------------------------------------

    def take_numbers(self, count: int) -> int:
        """The first of `count` consecutive numbers."""
        if count:
            self.changes += 1
            if self.new:
                self.write_new()  # their numbers are the last ones
        first = self.number
        self.number = first + count
        return first

    def add(self, run: Sequence[Envelope]) -> range:
        """Number and count new records that differ only in their payloads; returns their numbers.

        They are written later, together with similar records that follow: one statement takes a third of the
        time of many.
        """
        e, first = run[0], self.number
        queue = self.known.numbers.get(e.queue) or self.make_queue(e.queue)
        if self.new and not self._is_like_new(run):
            self.write_new()
        self.new += run
        self.changes += 1
        if e.delay_ns:
            step = 1
            self.count(queue, "SCHEDULED", len(run))
        else:
            step = EVENTS_PER_NEW
            self.count(queue, LANE_COUNTS[e.priority], len(run))
        self.number = first + step * len(run)
        return range(first, self.number, step)

    def _is_like_new(self, run: Sequence[Envelope]) -> bool:
        """Whether one statement can insert a run together with the new records."""
        if self._new_traits is None:
            self._new_traits = traits(self.new[0])
        return (
            len(self.new) + len(run) <= ALIKE_ROWS_MAX
            and len(self.new[-1].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(run[-1].payload)
            and self._new_traits == traits(run[0])
        )

    def write_new(self) -> None:
        """Write the rows of new records, and keep their events."""
        run, first = self.new, self._write_rows()
        e, sizes = run[0], [len(envelope.payload) for envelope in run]
        facts = [envelope.facts for envelope in run] if e.facts else ()
        self.parts.append(
            NewRun(
                first, self.wall_us, e.queue, e.priority, e.type, e.parent_message_id, e.delay_ns, sizes,
                facts,
            )
        )  # fmt: skip

    def _write_rows(self) -> int:
        """Write the rows of new records; returns the number of the first."""
        run, self.new, self._new_traits = self.new, [], None
        e, now, delay_ns = run[0], self.steady_ns, run[0].delay_ns
        queue = self.known.numbers.get(e.queue) or self.queue(e.queue)
        if delay_ns:
            step, state, due, line = 1, "SCHEDULED", self.ends_at(now + delay_ns), LINE_DELAYED
        else:
            step, state, due, line = EVENTS_PER_NEW, "QUEUED", None, line_of(queue, e.priority)
        first = self.number - step * len(run)
        values = (
            first, queue, state, e.priority, e.max_retries, due, now, now + e.ttl_ns if e.ttl_ns else 0,
            e.durability, self.wall_us, line, e.type, e.parent_message_id, delay_ns, e.ttl_ns,
        )  # fmt: skip
        given = start_of(e.type, e.parent_message_id, "", "") if e.type or e.parent_message_id else NO_TEXTS
        if len(run) == 1:
            payload = self.codec.seal("payload", first, e.payload)
            self.raw_cursor.execute(sql.INSERT_PLAIN, (*values, payload, zlib.crc32(payload, given)))
        else:
            payloads = self.codec.seal_payloads(first, step, [envelope.payload for envelope in run])
            crcs = checksums(payloads, given)
            self.raw_cursor.execute(sql.INSERT_ALIKE, (*values, apsw.carray(tuple(payloads)), crcs, step))
        return first

    # ---- events --------------------------------------------------------------------------------

    def append(self, *parts: Part) -> None:
        """Keep events for the commit."""
        if self.new:
            self.write_new()
        self.parts += parts

    def implied_runs(self, after: int, last: int) -> Iterator[OnesRun]:
        """The events that records without a row of events imply."""
        query = sql.IMPLIED if self.codec.is_plain else sql.IMPLIED_SEALED
        return implied_runs(Implied(*row) for row in ask(self.cursor, query, (after, last)))

    def flush(self) -> None:
        """Write what is left: new records, the events, and after `FOLD_EVENTS` events the counters."""
        new, known, last = self.new, self.known, self.number - 1
        is_fold_due = last - known.folded >= FOLD_EVENTS
        is_lone = len(new) == 1 and not self.parts and not new[0].delay_ns and not new[0].facts
        if is_lone and not is_fold_due and last - known.stored < EVENTS_PER_NEW * IMPLIED_MAX:
            self._write_rows()  # the only new record implies its events
            self.is_implied = True
            return
        if new:
            self.write_new()
        if self.parts or self.counts:
            self._write_events(last)
            if is_fold_due or not self.parts:
                self._fold(last)

    def _write_events(self, last: int) -> None:
        """Write a row of events, with the implied events of earlier commits."""
        known = self.known
        counts = [(queue, what, n) for (queue, what), n in self.counts.items() if n]
        if known.implied:
            self.parts[:0] = self.implied_runs(known.stored, known.newest)
            counts += [(queue, what, n) for (queue, what), n in known.implied.items()]
        if self.parts:
            batch, counted = self.codec.seal_batch(last, pack(self.parts)), _encode(counts)
            crc = zlib.crc32(counted, zlib.crc32(batch))
            stored = batch.decode() if self.codec.is_plain else batch
            self.raw_cursor.execute(sql.NEW_EVENTS, (last, self.wall_us, counted.decode(), stored, crc))

    def _fold(self, last: int) -> None:
        """Write the counters, so that they can be read without the events up to the last one."""
        known = self.known
        for queue in known.unfolded:
            counts = {what: n for what, n in known.depths[queue].items() if n}
            self.raw_cursor.execute(sql.SET_DEPTHS, (_encode(counts).decode(), queue))
        self.raw_cursor.execute(sql.SET_FACT, ("counted", last))
        known.folded, known.unfolded = last, set()

    def committed(self) -> None:
        """Remember what was committed."""
        known = self.known
        if self.new_queues:
            known.numbers |= self.new_queues
            known.names |= {number: name for name, number in self.new_queues.items()}
        known.newest = self.number - 1
        if self.parts:
            known.stored, known.implied = known.newest, {}
        elif self.is_implied:
            for key, n in self.counts.items():
                known.implied[key] = known.implied.get(key, 0) + n


class SqliteReading(SqliteLedger):
    """One state of the file, through a reading connection."""

    def __init__(
        self,
        known: SqliteKnown,
        cursor: apsw.Cursor,
        steady_ns: int,
        wall_us: int,
        read_before: MutableMapping[apsw.Connection, SqliteKnown] | None = None,
    ) -> None:
        """`read_before` has the counters as each connection read them last: only newer commits are added."""
        super().__init__(known, cursor, steady_ns, wall_us)
        self._counters: SqliteKnown | None = None
        self._read_before = {} if read_before is None else read_before

    def counters(self) -> SqliteKnown:
        if self._counters is None:
            connection = self.raw_cursor.connection
            read = self._read_before.pop(connection, None) or SqliteKnown()
            read.catch_up(self.raw_cursor, from_start=not read.stored)
            self._read_before[connection] = self._counters = read
        return self._counters
