"""The parts of a transaction in a store file: its records, events, cells and lanes."""

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Event, Record
from postroom.stores.base import (
    CHUNKS,
    FOREVER_NS,
    LANES,
    NEWEST,
    ByIds,
    Cells,
    Change,
    Counted,
    Ending,
    Events,
    Head,
    Kept,
    Lanes,
    Listing,
    Pick,
    count_changes,
    counted_as,
    in_order,
)
from postroom.stores.event_runs import INCOMPLETE, READ_ERRORS, StoredRow, alerts_for, unpack
from postroom.stores.numbered_records import NumberedRecords
from postroom.stores.sqlite.ledger import SqliteLedger, carray_of, line_of
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
from postroom.stores.sqlite.values import checksums, start_of

CELLS_KEPT_MAX = 64  # cells that a transaction keeps after it has read them

_kept_from: Callable[..., Kept] = Kept  # columns are in the order of the fields
_encode = msgspec.json.Encoder().encode


class SqliteRecords(NumberedRecords[SqliteLedger]):
    """The records of one transaction."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger

    def find(self, pick: Pick) -> list[Record]:
        rows: list[Any]
        match pick:
            case ByIds(message_ids):
                return in_order(self.get_many(message_ids), message_ids)
            case Ending("expiry", until_ns, limit):
                rows = ask(self._ledger.cursor, sql.EXPIRING, (until_ns, limit))
            case Ending(deadline, until_ns, limit):
                line = LINE_LEASED if deadline == "lease" else LINE_DELAYED
                rows = ask(self._ledger.cursor, sql.ENDING, (line, until_ns, limit))
            case Listing(queue=name):
                queue = 0 if name is None else self._ledger.queue(name)
                if name is not None and not queue:
                    return []
                rows = ask(self._ledger.cursor, *listing_query(pick, queue))
            case _:
                raise TypeError(pick)
        return [self._ledger.record(row) for row in rows]

    def get_many(self, message_ids: Sequence[str]) -> dict[str, Record]:
        """Own ids are looked up by number in one query, others by name."""
        numbers = {message_id: self._ledger.known.own_number(message_id) for message_id in message_ids}
        own = [number for number in numbers.values() if number]
        if len(own) == 1:
            rows = ask(self._ledger.cursor, sql.BY_SEQ, (own[0],))
        else:
            rows = ask(self._ledger.cursor, sql.BY_SEQS, (carray_of(own),)) if own else []
        by_number = {row[0]: self._ledger.record(row) for row in rows}
        found = {}
        for message_id, number in numbers.items():
            record = by_number.get(number)
            if record is None or record.message_id != message_id:
                named = ask(self._ledger.cursor, sql.BY_NAME, (message_id,))
                if not named:
                    continue
                record = self._ledger.record(named[0])
            found[message_id] = record
        return found

    def kept(self, record: Record) -> Kept:
        codec, seq = self._ledger.codec, record.seq
        *facts, payload, result, trail = ask(self._ledger.cursor, sql.STORED, (seq,))[0]
        return _kept_from(
            *facts,
            codec.open("payload", seq, payload),
            None if result is None else codec.open("result", seq, result),
            codec.open_lines(seq, trail or "").encode(),
        )

    def sealed_payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return dict(ask(self._ledger.cursor, sql.PAYLOADS, (carray_of(numbers),)))

    def sealed_results(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return dict(ask(self._ledger.cursor, sql.RESULTS, (carray_of(numbers),)))

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self._ledger.changes += 1
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for change in changes:
            query, values = self._row(change)
            rows.setdefault(query, []).append(values)
        for query, bindings in rows.items():
            self._ledger.cursor.executemany(query, bindings)
        for (queue, what), n in count_changes(changes, events).items():
            self._ledger.count(self._ledger.make_queue(queue), what, n)
        self._ledger.append(*events)

    def _row(self, change: Change) -> tuple[str, tuple[Any, ...]]:
        """A query and its values that write a changed record, with checksums of what is stored."""
        step, r, codec = change.step, change.step.record, self._ledger.codec
        queue = self._ledger.make_queue(r.queue)
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
        return LINES_OF_STATES.get(record.state), self._ledger.ends_at(deadline_ns) if deadline_ns else 0

    def numbered_heads(self, numbers: Sequence[int]) -> dict[int, Head]:
        rows = ask(self._ledger.cursor, sql.HEADS_BY_SEQ, (carray_of(numbers),))
        return {row[0]: Head(self._ledger.record(row), *row[23:]) for row in rows}

    def forget(self, records: Sequence[Record]) -> None:
        self._ledger.changes += 1
        self._ledger.cursor.executemany(sql.FORGET, [(record.seq,) for record in records])
        for record in records:
            self._ledger.count(self._ledger.queue(record.queue), counted_as(record), -1)


class SqliteEvents(Events):
    """The events of one transaction, and those of the file."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger

    def take_numbers(self, count: int) -> int:
        return self._ledger.take_numbers(count)

    def read(self, after: int, limit: int) -> list[Event]:
        if after != NEWEST:
            return list(islice((event for event in self._events(after) if event.seq > after), limit))
        [(stored,)] = ask(self._ledger.cursor, sql.LAST_STORED)
        return list(self._events(max(0, stored - 1)))[-1:]

    def forget(self, up_to: int) -> None:
        self._ledger.changes += 1
        # Events that are not folded into the counters stay.
        self._ledger.cursor.execute(sql.FORGET_EVENTS, (min(up_to, self._ledger.known.folded),))

    def newest(self) -> int:
        """Read from the indexes: the last row of events may be a run of thousands."""
        [(newest,)] = ask(self._ledger.cursor, sql.NEWEST_EVENT)
        return int(newest)

    def _events(self, after: int) -> Iterator[Event]:
        """Stored events of every row that may hold one after `after`, then events implied by records."""
        for last, batch in self._ledger.cursor.connection.cursor().execute(sql.STORED_EVENTS, (after,)):
            reached, fault = 0, ""
            try:
                for event in unpack(self._ledger.codec.open_batch(last, batch), self._ledger.known):
                    yield event
                    reached = event.seq
            except READ_ERRORS as error:
                fault = str(error)
            if reached != last:
                yield from alerts_for(self._damaged_row(last, after), reached, fault or INCOMPLETE)
        [(stored,)] = ask(self._ledger.cursor, sql.LAST_STORED)
        for run in self._ledger.implied_runs(stored, FOREVER_NS):
            yield from run.events(self._ledger.known)

    def _damaged_row(self, last: int, after: int) -> StoredRow:
        """A row that a reader of the events after `after` cannot read."""
        [(ts_us, batch, before)] = ask(self._ledger.cursor.connection.cursor(), sql.STORED_ROW, (last,))
        known = after if before is None else before  # rows before the first one are purged
        return StoredRow(last, known + 1 if known else last, last, ts_us, batch)

    def row(self, number: int) -> bytes:
        return self._damaged_row(number, 0).batch


class SqliteCells(Cells):
    """The cells of one transaction.

    Cells do not depend on records, so these methods do not write the new records first: more of them then
    share one statement. Cells are cached, because the calls of one commit read the same few of them and each
    statement lets another thread run.
    """

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self._read: dict[tuple[str, str], bytes | None] = {}
        self._empty: set[str] = set()
        """Kinds of which the store holds no cell, so that no cell of them is looked up."""

    def get(self, kind: str, key: str) -> bytes | None:
        read = self._read
        if (kind, key) in read:
            return read[kind, key]
        rows = ask(self._ledger.raw_cursor, sql.CHUNK if kind == CHUNKS else sql.CELL, (kind, key))
        value = self._ledger.codec.open_cell(kind, key, bytes(rows[0][0])) if rows else None
        if len(read) < CELLS_KEPT_MAX and kind != CHUNKS:
            read[kind, key] = value
        return value

    def put(self, kind: str, key: str, value: bytes | None) -> None:
        self._ledger.changes += 1
        if (kind, key) in self._read:
            self._read[kind, key] = value
        self._empty.discard(kind)
        if value is None:
            self._ledger.raw_cursor.execute(sql.DROP_CHUNK if kind == CHUNKS else sql.DROP_CELL, (kind, key))
        else:
            stored = self._ledger.codec.seal_cell(kind, key, value)
            crc = zlib.crc32(stored, start_of(kind, key))
            query = sql.PUT_CHUNK if kind == CHUNKS else sql.PUT_CELL
            self._ledger.raw_cursor.execute(query, (kind, key, stored, crc))

    def page(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        if kind in self._empty:
            return []
        found = ask(
            self._ledger.raw_cursor, sql.CHUNKS if kind == CHUNKS else sql.CELLS, (kind, after, limit)
        )
        if not found and not after:
            self._empty.add(kind)
        return self._ledger.codec.open_cells(kind, found)

    def kinds(self) -> list[str]:
        return [kind for (kind,) in ask(self._ledger.cursor, "SELECT DISTINCT kind FROM cells ORDER BY kind")]


class SqliteLanes(Lanes):
    """The lanes and the counters of one transaction."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        rows = ask(self._ledger.cursor, sql.PULL, (line_of(self._ledger.queue(queue), lane), limit))
        return [Head(self._ledger.record(row), *row[23:]) for row in rows]

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return {what: n for what, n in self._ledger.counters().depths[self._ledger.queue(queue)].items() if n}

    def total(self) -> dict[Counted, int]:
        return {what: n for what, n in self._ledger.counters().total.items() if n}

    def count_active(self) -> int:
        return len(self._ledger.counters().ready)

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        return {name: self.depth(name) for name in map(self._ledger.name, [*self._ledger.counters().ready])}

    def queues(self, prefix: str = "") -> list[str]:
        names = ask(self._ledger.cursor, sql.QUEUES, (prefix, prefix + chr(sys.maxunicode)))
        return [name for (name,) in names]

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        counts = self._ledger.counters().depths
        names = ask(self._ledger.cursor, "SELECT name, queue FROM queues ORDER BY name")
        return {name: {what: n for what, n in counts[queue].items() if n} for name, queue in names}

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        lanes_before = ENGINE_LINES * (lane + 1)
        first = lanes_before + (self._ledger.queue(after) if after else ENGINE_QUEUES)
        rows = ask(self._ledger.cursor, sql.NEXT_LINES, (first, lanes_before + ENGINE_LINES, limit))
        return [self._ledger.name(line - lanes_before) for (line,) in rows]

    def oldest(self, lane: int) -> Record | None:
        rows = ask(self._ledger.cursor, sql.OLDEST, (lane,))
        return self._ledger.record(rows[0]) if rows else None

    def has_overdue(self) -> bool:
        return self._ledger.has_overdue()


def listing_query(pick: Listing, queue: int) -> tuple[str, tuple[int, ...]]:
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
