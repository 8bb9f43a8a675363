"""The ledger of a transaction in SQL: records, counters, cells, lanes and events.

Rule 1: counters are kept in memory. A commit writes its changes of the counters with its events. The counters
        themselves are written after every `FOLD_EVENTS` events.
Rule 2: similar new records are collected and written by one statement, before anything else reads or writes
        records.
"""

import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import apsw
import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope, Event, Noted, Record, Stored, org_of
from postroom.stores.base import (
    CHUNKS,
    FOREVER_NS,
    LANES,
    NEWEST,
    ByIds,
    Change,
    Counted,
    Ending,
    Head,
    Kept,
    Limits,
    Listing,
    Pick,
    count_changes,
    counted_as,
    unknown,
)
from postroom.stores.checksums import NO_TEXTS, checksums, start_of
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    IMPLIED_MAX,
    INCOMPLETE,
    READ_ERRORS,
    Implied,
    NewRun,
    NotedRun,
    OnesRun,
    Part,
    StoredRow,
    alerts_for,
    implied_runs,
    pack,
    unpack,
)
from postroom.stores.own_ids import OwnIds
from postroom.stores.sqlite.known import Known
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import (
    ENGINE_LINES,
    ENGINE_QUEUES,
    LINE_DELAYED,
    LINE_LEASED,
    LINES_OF_STATES,
    LINES_PER_QUEUE,
    ask,
)
from postroom.stores.stored_message import stored_message
from postroom.stores.transaction import Transaction

FOLD_EVENTS = 10_000  # events between two writes of the counters
CELLS_KEPT_MAX = 64  # cells that a transaction keeps after it has read them

_record_from: Callable[..., Record] = Record  # columns are in the order of the fields
_kept_from: Callable[..., Kept] = Kept
_encode = msgspec.json.Encoder().encode


def carray_of(numbers: Sequence[int]) -> "apsw.CArrayBinding":
    """Numbers for `carray(?)`, which takes no empty array; no record has number 0."""
    return apsw.carray(array("q", numbers or [0]))


def line_of(queue: int, lane: int) -> int:
    """The line of QUEUED records. A lane of all organizations is one range of lines."""
    return LINES_PER_QUEUE * queue + lane if queue < ENGINE_QUEUES else ENGINE_LINES * (lane + 1) + queue


class SqliteLedger(Transaction):
    """Records, events, cells and lanes of one transaction."""

    is_implied = False
    """Whether the transaction only inserted one record, which implies its events."""
    is_reading = False

    def __init__(self, known: Known, cursor: apsw.Cursor, steady_ns: int, wall_us: int) -> None:
        # As in `Transaction.__init__`, without the call: this runs for every commit.
        self.ids: OwnIds = known
        self.store_id = known.store_id
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        self.ready: set[str] = set()
        self._limits_known = known.limits
        self._limits: dict[str, Limits] = {}
        self._known = known
        self.codec = known.codec
        self._raw_cursor = cursor
        self._number = known.newest + 1
        self.new_queues: dict[str, int] = {}
        self.parts: list[Part] = []
        """The events, in order."""
        self._new: list[Envelope] = []
        """New records that are not written yet. They differ only in payload and have the last numbers."""
        self._new_traits: tuple[Any, ...] | None = None
        self._cells_read: dict[tuple[str, str], bytes | None] = {}
        self._no_cells: set[str] = set()
        """Kinds of which the store holds no cell, so that no cell of them is looked up."""
        self.counts: dict[tuple[int, Counted], int] = {}
        """What the transaction did to the counters. After a rollback the store reads them again."""

    @property
    def _cursor(self) -> apsw.Cursor:
        """The cursor, after new records are written."""
        if self._new:
            self._write_new()
        return self._raw_cursor

    # ---- queues and counters -------------------------------------------------------------------

    def _queue(self, name: str) -> int:
        """The number of a queue; 0 when there is no such queue."""
        number = self._known.numbers.get(name) or self.new_queues.get(name)
        if number is None:
            rows = ask(self._cursor, "SELECT queue FROM queues WHERE name = ?", (name,))
            if not rows:
                return 0
            number = self._known.numbers[name] = int(rows[0][0])
        return number

    def _make_queue(self, name: str) -> int:
        """The number of a queue, which is created when it is new."""
        number = self._queue(name)
        if not number:
            self.changes += 1
            query = sql.NEW_ENGINE_QUEUE if org_of(name) else sql.NEW_QUEUE
            self._cursor.execute(query, (name,))
            number = self.new_queues[name] = self._raw_cursor.connection.last_insert_rowid()
        return number

    def _name(self, queue: int) -> str:
        for name, number in self.new_queues.items():  # not remembered elsewhere: it may be rolled back
            if number == queue:
                return name
        return self._known.names.get(queue) or self._known.name_of(queue, self._cursor)

    def _count(self, queue: int, what: Counted, change: int) -> None:
        key = queue, what
        self._known.add(queue, what, change)
        self.counts[key] = self.counts.get(key, 0) + change

    def _known_counts(self) -> Known:
        return self._known

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return {what: n for what, n in self._known_counts().depths[self._queue(queue)].items() if n}

    def total(self) -> dict[Counted, int]:
        return {what: n for what, n in self._known_counts().total.items() if n}

    def count_active(self) -> int:
        return len(self._known_counts().ready)

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        return {name: self.depth(name) for name in map(self._name, [*self._known_counts().ready])}

    def queues(self, prefix: str = "") -> list[str]:
        names = ask(self._cursor, sql.QUEUES, (prefix, prefix + chr(sys.maxunicode)))
        return [name for (name,) in names]

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        counts = self._known_counts().depths
        names = ask(self._cursor, "SELECT name, queue FROM queues ORDER BY name")
        return {name: {what: n for what, n in counts[queue].items() if n} for name, queue in names}

    # ---- records -------------------------------------------------------------------------------

    def take_numbers(self, count: int) -> int:
        if count:
            self.changes += 1
            if self._new:
                self._write_new()  # their numbers are the last ones
        first = self._number
        self._number = first + count
        return first

    def find(self, pick: Pick) -> list[Record]:
        rows: list[Any]
        match pick:
            case ByIds(message_ids):
                return self._by_ids(message_ids)
            case Ending("expiry", until_ns, limit):
                rows = ask(self._cursor, sql.EXPIRING, (until_ns, limit))
            case Ending(deadline, until_ns, limit):
                line = LINE_LEASED if deadline == "lease" else LINE_DELAYED
                rows = ask(self._cursor, sql.ENDING, (line, until_ns, limit))
            case Listing(queue=name):
                queue = 0 if name is None else self._queue(name)
                rows = [] if name is not None and not queue else ask(self._cursor, *_listing(pick, queue))
            case _:
                raise TypeError(pick)
        return [self._record(row) for row in rows]

    def _by_ids(self, message_ids: Sequence[str]) -> list[Record]:
        found = self.records(message_ids)
        for message_id in message_ids:
            if message_id not in found:
                raise unknown(message_id)
        return [found[message_id] for message_id in message_ids]

    def records(self, message_ids: Sequence[str]) -> dict[str, Record]:
        """Own ids are looked up by number in one query, others by name."""
        numbers = {message_id: self._known.own_number(message_id) for message_id in message_ids}
        own = [number for number in numbers.values() if number]
        if len(own) == 1:
            rows = ask(self._cursor, sql.BY_SEQ, (own[0],))
        else:
            rows = ask(self._cursor, sql.BY_SEQS, (carray_of(own),)) if own else []
        by_number = {row[0]: self._record(row) for row in rows}
        found = {}
        for message_id, number in numbers.items():
            record = by_number.get(number)
            if record is None or record.message_id != message_id:
                named = ask(self._cursor, sql.BY_NAME, (message_id,))
                if not named:
                    continue
                record = self._record(named[0])
            found[message_id] = record
        return found

    def _record(self, row: tuple[Any, ...]) -> Record:
        seq, state, turn, queue = row[0], row[3], row[14], self._name(row[2])
        return _record_from(
            seq,
            row[1] or self.ids.new(queue, seq, row[18]),
            queue,
            *row[3:14],
            turn if state == "PROCESSING" else 0,
            turn if state in ("SCHEDULED", "RETRYING") else 0,
            *row[15:22],
            row[22] or "",
        )

    def load(self, message_id: str) -> Stored | None:
        record = self.record(message_id)
        return None if record is None else stored_message(record, self.kept(record))

    def kept(self, record: Record) -> Kept:
        codec, seq = self.codec, record.seq
        *facts, payload, result, trail = ask(self._cursor, sql.STORED, (seq,))[0]
        return _kept_from(
            *facts,
            codec.open("payload", seq, payload),
            None if result is None else codec.open("result", seq, result),
            codec.open_lines(seq, trail or "").encode(),
        )

    def kinds(self) -> list[str]:
        return [kind for (kind,) in ask(self._cursor, "SELECT DISTINCT kind FROM cells ORDER BY kind")]

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._known.own_number(each))}
        stored = dict(ask(self._cursor, sql.PAYLOADS, (carray_of([*own]),)))
        found = {own[seq]: payload for seq, payload in self.codec.open_payloads(stored).items()}
        return found | super().payloads([each for each in message_ids if each not in found])

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self.changes += 1
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for change in changes:
            query, values = self._row(change)
            rows.setdefault(query, []).append(values)
        for query, bindings in rows.items():
            self._cursor.executemany(query, bindings)
        for (queue, what), n in count_changes(changes, events).items():
            self._count(self._make_queue(queue), what, n)
        self._append(*events)

    def _row(self, change: Change) -> tuple[str, tuple[Any, ...]]:
        """A query and its values that write a changed record, with checksums of what is stored."""
        step, r, codec = change.step, change.step.record, self.codec
        queue = self._make_queue(r.queue)
        line, turn = self._line_and_turn(queue, r)
        if (e := change.envelope) is not None:
            payload = codec.seal("payload", r.seq, e.payload)
            crc = zlib.crc32(payload, start_of(e.type, e.parent_message_id, e.key, r.sender or ""))
            return sql.INSERT, (
                r.seq, e.message_id or None, queue, r.state, r.priority, r.lane, r.place, 0, 0, 0,
                r.max_retries, 0, "", 0, turn, r.ready_at, r.expires, r.durability, r.created_us, 0, 0, 0,
                r.sender or None, line, e.type, e.parent_message_id, e.key, e.delay_ns, e.ttl_ns, payload,
                crc,
            )  # fmt: skip
        values = (
            r.state, r.lane, r.place, r.attempt, r.retries, r.crashes, r.lease, r.worker_id, r.lease_ns,
            turn, r.ready_at, r.expires, r.claimed_us, r.heartbeat_us, r.ended_us, line,
        )  # fmt: skip
        trail = [] if change.before is None else lifecycle.trail(change.before, step)
        if trail:
            lines = codec.seal_lines(r.seq, "".join(f"{_encode(event).decode()}\n" for event in trail))
            crcs = checksums(lines.encode().split(b"\n")[:-1], 0)
            return sql.UPDATE_TRAIL, (*values, lines, crcs, r.seq)
        if step.result is not None:
            result = codec.seal("result", r.seq, step.result)
            return sql.UPDATE_RESULT, (*values, result, zlib.crc32(result), r.seq)
        return sql.UPDATE, (*values, r.seq)

    def _line_and_turn(self, queue: int, record: Record) -> tuple[int | None, int]:
        if record.state == "QUEUED":
            return line_of(queue, record.lane), record.place
        deadline_ns = record.lease_until or record.due
        return LINES_OF_STATES.get(record.state), self._ends_at(deadline_ns) if deadline_ns else 0

    def _ends_at(self, deadline_ns: int) -> int:
        self._known.deadline_ns = min(self._known.deadline_ns, deadline_ns)
        return deadline_ns

    def _write_new(self) -> None:
        """Write the rows of new records, and keep their events."""
        run, first = self._new, self._write_rows()
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
        run, self._new, self._new_traits = self._new, [], None
        e, now, delay_ns = run[0], self.steady_ns, run[0].delay_ns
        queue = self._known.numbers.get(e.queue) or self._queue(e.queue)
        if delay_ns:
            step, state, due, line = 1, "SCHEDULED", self._ends_at(now + delay_ns), LINE_DELAYED
        else:
            step, state, due, line = EVENTS_PER_NEW, "QUEUED", None, line_of(queue, e.priority)
        first = self._number - step * len(run)
        values = (
            first, queue, state, e.priority, e.max_retries, due, now, now + e.ttl_ns if e.ttl_ns else 0,
            e.durability, self.wall_us, line, e.type, e.parent_message_id, delay_ns, e.ttl_ns,
        )  # fmt: skip
        given = start_of(e.type, e.parent_message_id, "", "") if e.type or e.parent_message_id else NO_TEXTS
        payloads = self.codec.seal_payloads(first, step, [envelope.payload for envelope in run])
        if len(run) == 1:
            crc = zlib.crc32(payloads[0], given)
            self._raw_cursor.execute(sql.INSERT_PLAIN, (*values, payloads[0], crc))
        else:
            crcs = checksums(payloads, given)
            self._raw_cursor.execute(sql.INSERT_ALIKE, (*values, apsw.carray(tuple(payloads)), crcs, step))
        return first

    def forget(self, records: Sequence[Record], events_up_to: int = 0) -> None:
        self.changes += 1
        self._cursor.executemany(sql.FORGET, [(record.seq,) for record in records])
        for record in records:
            self._count(self._queue(record.queue), counted_as(record), -1)
        # Events that are not folded into the counters stay.
        self._cursor.execute(sql.FORGET_EVENTS, (min(events_up_to, self._known.folded),))

    # ---- cells ---------------------------------------------------------------------------------

    # Cells do not depend on records, so these methods do not write the new records first: more of them then
    # share one statement. Cells are cached, because the calls of one commit read the same few of them and
    # each statement lets another thread run.

    def cell(self, kind: str, key: str) -> bytes | None:
        read = self._cells_read
        if (kind, key) in read:
            return read[kind, key]
        rows = ask(self._raw_cursor, sql.CHUNK if kind == CHUNKS else sql.CELL, (kind, key))
        value = self.codec.open_cell(kind, key, bytes(rows[0][0])) if rows else None
        if len(read) < CELLS_KEPT_MAX and kind != CHUNKS:
            read[kind, key] = value
        return value

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        self.changes += 1
        if (kind, key) in self._cells_read:
            self._cells_read[kind, key] = value
        self._no_cells.discard(kind)
        if value is None:
            self._raw_cursor.execute(sql.DROP_CHUNK if kind == CHUNKS else sql.DROP_CELL, (kind, key))
        else:
            stored = self.codec.seal_cell(kind, key, value)
            crc = zlib.crc32(stored, start_of(kind, key))
            query = sql.PUT_CHUNK if kind == CHUNKS else sql.PUT_CELL
            self._raw_cursor.execute(query, (kind, key, stored, crc))

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        if kind in self._no_cells:
            return []
        found = ask(self._raw_cursor, sql.CHUNKS if kind == CHUNKS else sql.CELLS, (kind, after, limit))
        if not found and not after:
            self._no_cells.add(kind)
        return self.codec.open_cells(kind, found)

    # ---- lanes ---------------------------------------------------------------------------------

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        rows = ask(self._cursor, sql.PULL, (line_of(self._queue(queue), lane), limit))
        heads = [Head(self._record(row), *row[23:]) for row in rows]
        if self.is_reading:  # for ages and depths, which need no payload
            return heads
        opened, unreadable = self.codec.open_heads(heads)
        if not unreadable:
            return opened
        self.quarantine(unreadable)
        return self.pull(queue, lane, limit)

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        numbers = [self._known.own_number(message_id) for message_id in message_ids]
        if not all(numbers):
            return super().heads(message_ids)
        found = {row[0]: row for row in ask(self._cursor, sql.HEADS_BY_SEQ, (carray_of(numbers),))}
        rows = [found[number] for number in numbers if number in found]
        heads = [Head(self._record(row), *row[23:]) for row in rows]
        wanted = set(message_ids)
        opened, unreadable = self.codec.open_heads([one for one in heads if one.record.message_id in wanted])
        if not self.is_reading:
            self.quarantine([one for one in unreadable if one[0].state == "QUEUED"])
        return opened

    def put_back(self, limit: int) -> int:
        return super().put_back(limit) if self.has_overdue() else 0

    def has_overdue(self) -> bool:
        return self.steady_ns >= self._known.deadline_ns and self._first_deadline() <= self.steady_ns

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        lanes_before = ENGINE_LINES * (lane + 1)
        first = lanes_before + (self._queue(after) if after else ENGINE_QUEUES)
        rows = ask(self._cursor, sql.NEXT_LINES, (first, lanes_before + ENGINE_LINES, limit))
        return [self._name(line - lanes_before) for (line,) in rows]

    def oldest(self, lane: int) -> Record | None:
        rows = ask(self._cursor, sql.OLDEST, (lane,))
        return self._record(rows[0]) if rows else None

    def _first_deadline(self) -> int:
        """When the first lease or delay ends."""
        [ends] = ask(self._cursor, sql.FIRST_DEADLINES)
        self._known.deadline_ns = min((end for end in ends if end is not None), default=FOREVER_NS)
        return self._known.deadline_ns

    # ---- events --------------------------------------------------------------------------------

    def events(self, after: int, limit: int) -> list[Event]:
        if after != NEWEST:
            return list(islice((event for event in self._events(after) if event.seq > after), limit))
        [(stored,)] = ask(self._cursor, sql.LAST_STORED)
        return list(self._events(max(0, stored - 1)))[-1:]

    def newest_event(self) -> int:
        """Read from the indexes: the last row of events may be a run of thousands."""
        [(newest,)] = ask(self._cursor, sql.NEWEST_EVENT)
        return int(newest)

    def _events(self, after: int) -> Iterator[Event]:
        """The events of every row that can hold one behind `after`, then the implied ones."""
        for last, batch in self._cursor.connection.cursor().execute(sql.STORED_EVENTS, (after,)):
            reached, fault = 0, ""
            try:
                for event in unpack(self.codec.open_batch(last, batch), self.ids):
                    yield event
                    reached = event.seq
            except READ_ERRORS as error:
                fault = str(error)
            if reached != last:
                yield from alerts_for(self._damaged_row(last, after), reached, fault or INCOMPLETE)
        [(stored,)] = ask(self._cursor, sql.LAST_STORED)
        for run in self._implied_runs(stored, FOREVER_NS):
            yield from run.events(self.ids)

    def _damaged_row(self, last: int, after: int) -> StoredRow:
        """A row that a reader of the events behind `after` cannot read."""
        [(ts_us, batch, before)] = ask(self._cursor.connection.cursor(), sql.STORED_ROW, (last,))
        known = after if before is None else before  # rows before the first one are purged
        return StoredRow(last, known + 1 if known else last, last, ts_us, batch)

    def stored_row(self, number: int) -> bytes:
        return self._damaged_row(number, 0).batch

    def _implied_runs(self, after: int, last: int) -> Iterator[OnesRun]:
        query = sql.IMPLIED if self.codec.is_plain else sql.IMPLIED_SEALED
        return implied_runs(Implied(*row) for row in ask(self._cursor, query, (after, last)))

    def _append(self, *parts: Part) -> None:
        if self._new:
            self._write_new()
        self.parts += parts

    def note(self, noted: Sequence[Noted]) -> None:
        if noted:
            self._append(NotedRun(self.take_numbers(len(noted)), self.wall_us, noted))

    def flush(self) -> None:
        """Write what is left: new records, the events, and after `FOLD_EVENTS` events the counters."""
        new, known, last = self._new, self._known, self._number - 1
        is_fold_due = last - known.folded >= FOLD_EVENTS
        is_lone = len(new) == 1 and not self.parts and not new[0].delay_ns and not new[0].facts
        if is_lone and not is_fold_due and last - known.stored < EVENTS_PER_NEW * IMPLIED_MAX:
            self._write_rows()  # the only new record implies its events
            self.is_implied = True
            return
        if new:
            self._write_new()
        if self.parts or self.counts:
            self._write_events(last)
            if is_fold_due or not self.parts:
                self._fold(last)

    def _write_events(self, last: int) -> None:
        """Write a row of events, with the implied events of earlier commits."""
        known = self._known
        counts = [(queue, what, n) for (queue, what), n in self.counts.items() if n]
        if known.implied:
            self.parts[:0] = self._implied_runs(known.stored, known.newest)
            counts += [(queue, what, n) for (queue, what), n in known.implied.items()]
        if self.parts:
            batch, counted = self.codec.seal_batch(last, pack(self.parts)), _encode(counts)
            crc = zlib.crc32(counted, zlib.crc32(batch))
            stored = batch.decode() if self.codec.is_plain else batch
            self._raw_cursor.execute(sql.NEW_EVENTS, (last, self.wall_us, counted.decode(), stored, crc))

    def _fold(self, last: int) -> None:
        """Write the counters, so that they can be read without the events up to the last one."""
        known = self._known
        for queue in known.unfolded:
            counts = {what: n for what, n in known.depths[queue].items() if n}
            self._raw_cursor.execute(sql.SET_DEPTHS, (_encode(counts).decode(), queue))
        self._raw_cursor.execute(sql.SET_FACT, ("counted", last))
        known.folded, known.unfolded = last, set()

    def committed(self) -> None:
        """Remember what was committed."""
        known = self._known
        for name, number in self.new_queues.items():
            known.numbers[name], known.names[number] = number, name
        known.newest = self._number - 1
        if self.parts:
            known.stored, known.implied = known.newest, {}
        elif self.is_implied:
            for key, n in self.counts.items():
                known.implied[key] = known.implied.get(key, 0) + n


def _listing(pick: Listing, queue: int) -> tuple[str, tuple[int, ...]]:
    """A query and its values; queue 0 means any. States with a line are found by it, others by number.

    The lines of waiting records are in the order of delivery, so the newest of them are found by number.
    """
    where = "TRUE"
    values: list[int] = []
    line = None if pick.state is None else LINES_OF_STATES.get(pick.state)
    if pick.state == "QUEUED" and not pick.before:
        if queue:
            where = "line IN (?, ?, ?, ?)"
            values += (line_of(queue, lane) for lane in range(LANES))
        else:
            where = f"line >= {LINES_PER_QUEUE}"
    elif pick.state is not None:
        where = f"state = '{pick.state}'"
    if line is not None and not (line == LINE_DELAYED and pick.before):
        where += f" AND line = {line}"
        if line > LINE_LEASED:
            where += " AND turn = 0"  # so that the index has them in order of their numbers
    if queue:
        where += " AND queue = ?"
        values.append(queue)
    where += " AND seq > ?"
    values.append(pick.after)
    order = "seq"
    if pick.before:
        where += " AND seq < ?"
        values.append(pick.before)
        order = "seq DESC"
    return f"{sql.RECORD} WHERE {where} ORDER BY {order} LIMIT ?", (*values, pick.limit)
