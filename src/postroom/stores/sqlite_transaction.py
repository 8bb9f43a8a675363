"""A transaction in SQL: the methods of `Ledger` and `Lanes`, and faster forms of insert, claim and complete.

Rule 1: a faster form covers the common case. Everything else goes to the verb of `Transaction`.
Rule 2: counters are kept in memory. A commit writes what it changed with its events, and after
        `FOLD_EVENTS` events the counters themselves.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice, repeat
from operator import attrgetter, itemgetter
from typing import Any

import apsw
import msgspec

from postroom.core import lifecycle
from postroom.message import Envelope, Event, Record, Stored
from postroom.stores.base import (
    FOREVER_NS,
    LANE_COUNTS,
    LANES,
    NEWEST,
    ByIds,
    Change,
    Counted,
    Ending,
    Head,
    Limits,
    Listing,
    Pick,
    count_changes,
    counted_as,
    unknown,
    waiting,
)
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    IMPLIED_MAX,
    CompletedRun,
    Implied,
    LeasedRun,
    NewRun,
    Part,
    expand,
    implied_runs,
    pack,
    unpack,
)
from postroom.stores.sql import queries as sql
from postroom.stores.sql.queries import LINE_DELAYED, LINE_LEASED, LINES_PER_QUEUE, Reading, ask
from postroom.stores.transaction import Accepted, Claim, Delivery, LimitsCache, Transaction

FOLD_EVENTS = 10_000  # events between two writes of the counters
ALIKE_ROWS_MAX = 1_000  # new records in one statement
ALIKE_PAYLOAD_BYTES_MAX = 16 * 1024  # of each of them: SQLite holds them all at once
NUMBER_DIGITS_MAX = 18

Depths = dict[int, dict[Counted, int]]
"""The counters, by the number of the queue."""

_NOTHING: Mapping[Counted, int] = {}
_record_from: Callable[..., Record] = Record  # columns are in the order of the fields
_holder = itemgetter(2, 3, 4)  # of a leased row: queue, lane, worker
_traits = attrgetter(
    "queue", "message_id", "key", "type", "parent_message_id", "priority", "max_retries", "delay_ns",
    "ttl_ns", "durability", "sender",
)  # fmt: skip
"""What new records have in common that one statement can insert."""

encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_counts = msgspec.json.Decoder(list[tuple[int, Counted, int]]).decode
_decode_depths = msgspec.json.Decoder(dict[Counted, int]).decode


def _numbers(numbers: Sequence[int]) -> "apsw.CArrayBinding":
    """Numbers for `carray(?)`, which takes no empty array; no record has number 0."""
    return apsw.carray(array("q", numbers or [0]))


def _line(queue: int, lane: int) -> int:
    return LINES_PER_QUEUE * queue + lane


class Known:
    """What a handle knows about the file between two commits."""

    def __init__(self) -> None:
        self.store_id = ""
        self.names: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.limits = LimitsCache()
        self.depths: Depths = {}
        self.newest = 0
        """The number of the last event."""
        self.stored = 0
        """The number of the last event that stands in a row of events. Records behind it imply theirs."""
        self.implied: dict[tuple[int, int], int] = {}
        """How many of those records each queue and lane has."""
        self.folded = 0
        """The counters in the file include the events up to this number."""
        self.deadline_ns = 0
        """No lease and no delay ends before this time."""

    def name_of(self, queue: int, connection: Reading) -> str:
        """The name of a queue."""
        name = self.names.get(queue)
        if name is None:
            name = self.names[queue] = str(
                ask(connection, "SELECT name FROM queues WHERE queue = ?", (queue,))[0][0]
            )
        return name

    def start_again(self, connection: Reading) -> None:
        """Begin with the counters that are in the file."""
        rows = ask(connection, "SELECT queue, depths FROM queues")
        self.depths = {queue: _decode_depths(depths) for queue, depths in rows}
        folded = ask(connection, sql.FACT, ("counted",))
        self.folded = self.stored = folded[0][0] if folded else 0
        self.implied = {}

    def catch_up(self, connection: Reading) -> None:
        """Add what was committed since: by rows of events, then by records that imply theirs."""
        for (queue, lane), n in self.implied.items():
            _add(self.depths, queue, LANE_COUNTS[lane], -n)
        self.implied = {}
        for seq, counts in ask(connection, sql.COUNTS_AFTER, (self.stored,)):
            for change in _decode_counts(counts):
                _add(self.depths, *change)
            self.stored = seq
        self.newest = self.stored
        for queue, lane, n, newest in ask(connection, sql.IMPLIED_COUNTS, (self.stored,)):
            _add(self.depths, queue, LANE_COUNTS[lane], n)
            self.implied[queue, lane] = n
            self.newest = max(self.newest, newest + EVENTS_PER_NEW - 1)
        self.deadline_ns = 0

    def must_start_again(self, connection: Reading) -> bool:
        """Whether rows of events that are not counted here may be purged already."""
        folded = ask(connection, sql.FACT, ("counted",))
        return bool(folded and folded[0][0] > self.stored)

    def own_number(self, message_id: str) -> int:
        """The number in an id that the store gave; 0 for any other id."""
        prefix, _, number = message_id.rpartition("-")
        is_own = (
            prefix == self.store_id
            and number.isascii()
            and number.isdigit()
            and number[0] != "0"
            and len(number) <= NUMBER_DIGITS_MAX
        )
        return int(number) if is_own else 0


def _add(depths: Depths, queue: int, what: Counted, change: int) -> None:
    counts = depths.setdefault(queue, {})
    counts[what] = counts.get(what, 0) + change


class SqliteTransaction(Transaction):
    """One transaction of the writing connection."""

    def __init__(self, known: Known, cursor: apsw.Cursor, steady_ns: int, wall_us: int) -> None:
        # As in `Transaction.__init__`, without the call: this runs for every commit.
        self.store_id = known.store_id
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        self.ready: set[str] = set()
        self._limits_known = known.limits
        self._limits: dict[str, Limits] = {}
        self._known = known
        self._raw_cursor = cursor
        self._number = known.newest + 1
        self.new_queues: dict[str, int] = {}
        self.parts: list[Part] = []
        """The events, in order."""
        self._new: list[Envelope] = []
        """New records that are not written yet: alike but for their payloads, with the last numbers."""
        self._new_queue = 0
        self.implied: Envelope | None = None
        """The only new record, when nothing else happened. Its events are not written."""
        self.counts: Depths = {}
        """What the transaction does to the counters."""
        self.folded = known.folded

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
            self._cursor.execute("INSERT INTO queues (name) VALUES (?)", (name,))
            number = self.new_queues[name] = self._raw_cursor.connection.last_insert_rowid()
        return number

    def _name(self, queue: int) -> str:
        for name, number in self.new_queues.items():  # not remembered elsewhere: it may be rolled back
            if number == queue:
                return name
        return self._known.names.get(queue) or self._known.name_of(queue, self._cursor)

    def _counts_of(self, queue: int) -> Mapping[Counted, int]:
        before, changes = self._depths().get(queue, _NOTHING), self.counts.get(queue)
        if changes is None:
            return before
        return {what: before.get(what, 0) + changes.get(what, 0) for what in {**before, **changes}}

    def _depths(self) -> Depths:
        return self._known.depths

    def depth(self, queue: str) -> Mapping[Counted, int]:
        return {what: n for what, n in self._counts_of(self._queue(queue)).items() if n}

    def queues(self) -> list[str]:
        return [name for (name,) in ask(self._cursor, "SELECT name FROM queues ORDER BY name")]

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
        """Own ids are looked up by number in one query, others by name."""
        numbers = [self._known.own_number(message_id) for message_id in message_ids]
        own = [number for number in numbers if number]
        if len(own) == 1:
            rows = ask(self._cursor, sql.BY_SEQ, (own[0],))
        else:
            rows = ask(self._cursor, sql.BY_SEQS, (_numbers(own),)) if own else []
        found = {row[0]: row for row in rows}
        records = []
        for message_id, number in zip(message_ids, numbers, strict=True):
            row = (
                found.get(number)
                if number
                else next(iter(ask(self._cursor, sql.BY_NAME, (message_id,))), None)
            )
            if row is None:
                raise unknown(message_id)
            records.append(self._record(row))
        return records

    def _record(self, row: tuple[Any, ...]) -> Record:
        seq, message_id, queue, state, turn = row[0], row[1], row[2], row[3], row[14]
        return _record_from(
            seq,
            message_id or f"{self.store_id}-{seq}",
            self._name(queue),
            *row[3:14],
            turn if state == "PROCESSING" else 0,
            turn if state in ("SCHEDULED", "RETRYING") else 0,
            *row[15:22],
            row[22] or "",
        )

    def load(self, message_id: str) -> Stored | None:
        record = self.record(message_id)
        if record is None:
            return None
        kind, parent, key, delay_ns, ttl_ns, payload, result, trail = ask(
            self._cursor, sql.STORED, (record.seq,)
        )[0]
        envelope = Envelope(
            message_id=message_id,
            queue=record.queue,
            payload=payload,
            type=kind,
            parent_message_id=parent,
            key=key,
            priority=record.priority,
            max_retries=record.max_retries,
            delay_ns=delay_ns,
            ttl_ns=ttl_ns,
            durability=record.durability,
            sender=record.sender,
        )
        first = lifecycle.created(envelope, message_id, record.seq, record.created_us)
        later = [_decode_event(line) for line in (trail or "").split("\n") if line]
        return Stored(record, envelope, result, lifecycle.history(record, first, later))

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._known.own_number(each))}
        found = {own[seq]: payload for seq, payload in ask(self._cursor, sql.PAYLOADS, (_numbers([*own]),))}
        return found | super().payloads([each for each in message_ids if not self._known.own_number(each)])

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self.changes += 1
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for change in changes:
            query, values = self._row(change)
            rows.setdefault(query, []).append(values)
        for query, bindings in rows.items():
            self._cursor.executemany(query, bindings)
        for (queue, what), n in count_changes(changes, events).items():
            _add(self.counts, self._make_queue(queue), what, n)
        self._append(*events)

    def _row(self, change: Change) -> tuple[str, tuple[Any, ...]]:
        """A query and its values that write a changed record."""
        step, r = change.step, change.step.record
        queue = self._make_queue(r.queue)
        line, turn = self._line_and_turn(queue, r)
        if (e := change.envelope) is not None:
            return sql.INSERT, (
                r.seq, e.message_id or None, queue, r.state, r.priority, r.lane, r.place, 0, 0, 0,
                r.max_retries, 0, "", 0, turn, r.ready_at, r.expires, r.durability, r.created_us, 0, 0, 0,
                r.sender or None, line, e.type, e.parent_message_id, e.key, e.delay_ns, e.ttl_ns, e.payload,
            )  # fmt: skip
        values = (
            r.state, r.lane, r.place, r.attempt, r.retries, r.crashes, r.lease, r.worker_id, r.lease_ns,
            turn, r.ready_at, r.expires, r.claimed_us, r.heartbeat_us, r.ended_us, line,
        )  # fmt: skip
        trail = [] if change.before is None else lifecycle.trail(change.before, step)
        if trail:
            return sql.UPDATE_TRAIL, (
                *values,
                "".join(f"{encode(event).decode()}\n" for event in trail),
                r.seq,
            )
        if step.result is not None:
            return sql.UPDATE_RESULT, (*values, step.result, r.seq)
        return sql.UPDATE, (*values, r.seq)

    def _line_and_turn(self, queue: int, record: Record) -> tuple[int | None, int]:
        match record.state:
            case "QUEUED":
                return _line(queue, record.lane), record.place
            case "PROCESSING":
                return LINE_LEASED, self._ends_at(record.lease_until)
            case "SCHEDULED" | "RETRYING":
                return LINE_DELAYED, self._ends_at(record.due)
            case _:
                return None, 0

    def _ends_at(self, deadline_ns: int) -> int:
        self._known.deadline_ns = min(self._known.deadline_ns, deadline_ns)
        return deadline_ns

    def forget(self, records: Sequence[Record], events_up_to: int = 0) -> None:
        self.changes += 1
        self._cursor.executemany(sql.FORGET, [(record.seq,) for record in records])
        for record in records:
            _add(self.counts, self._queue(record.queue), counted_as(record), -1)
        # Events that are not folded into the counters stay.
        self._cursor.execute(sql.FORGET_EVENTS, (min(events_up_to, self.folded),))

    # ---- cells and lanes -----------------------------------------------------------------------

    def cell(self, kind: str, key: str) -> bytes | None:
        rows = ask(self._cursor, sql.CELL, (kind, key))
        return bytes(rows[0][0]) if rows else None

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        self.changes += 1
        if value is None:
            self._cursor.execute(sql.DROP_CELL, (kind, key))
        else:
            self._cursor.execute(sql.PUT_CELL, (kind, key, value))

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        return ask(self._cursor, sql.CELLS, (kind, after, limit))

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        rows = ask(self._cursor, sql.PULL, (_line(self._queue(queue), lane), limit))
        return [Head(self._record(row), *row[23:]) for row in rows]

    # ---- events --------------------------------------------------------------------------------

    def events(self, after: int, limit: int) -> list[Event]:
        if after != NEWEST:
            return list(islice((event for event in self._events(after) if event.seq > after), limit))
        [(stored,)] = ask(self._cursor, sql.LAST_STORED)
        return list(self._events(max(0, stored - 1)))[-1:]

    def _events(self, after: int) -> Iterator[Event]:
        """The events of every row that can hold one behind `after`, then the implied ones."""
        for (batch,) in self._cursor.connection.cursor().execute(sql.STORED_EVENTS, (after,)):
            yield from unpack(batch, self.store_id)
        [(stored,)] = ask(self._cursor, sql.LAST_STORED)
        for run in implied_runs(self._implied_records(stored, FOREVER_NS)):
            yield from expand(run, self.store_id)

    def _implied_records(self, after: int, before: int) -> Iterator[Implied]:
        for seq, queue, *rest in ask(self._cursor, sql.IMPLIED, (after, before)):
            yield Implied(seq, self._name(queue), *rest)

    def _append(self, *parts: Part) -> None:
        if self._new:
            self._write_new()
        self.parts += parts

    def flush(self) -> None:
        """Write what is left: new records, and the events of the transaction."""
        new, known = self._new, self._known
        if (
            len(new) == 1
            and not self.parts
            and not new[0].delay_ns
            and self._number - known.stored < EVENTS_PER_NEW * IMPLIED_MAX
            and self._number - known.folded <= FOLD_EVENTS
        ):
            self.implied = new[0]
            self._write_rows()
            return
        if new:
            self._write_new()
        if self.parts or self.counts:
            self._write_events()

    def _is_fold_due(self) -> bool:
        return self._number - self._known.folded > FOLD_EVENTS

    def _write_events(self) -> None:
        """Write a row of events behind the implied ones of earlier commits."""
        known, counts = (
            self._known,
            [(q, what, n) for q, of in self.counts.items() for what, n in of.items() if n],
        )
        if known.implied:
            self.parts[:0] = implied_runs(self._implied_records(known.stored, known.newest + 1))
            counts += [(queue, LANE_COUNTS[lane], n) for (queue, lane), n in known.implied.items()]
        if self.parts:
            values = (self._number - 1, self.wall_us, encode(counts).decode(), pack(self.parts))
            self._cursor.execute(sql.NEW_EVENTS, values)
        if self._is_fold_due() or not self.parts:
            self._fold()

    def _fold(self) -> None:
        """Write the counters, so that they can be read without all events."""
        for queue in {*self._known.depths, *self.counts}:
            counts = {what: n for what, n in self._counts_of(queue).items() if n}
            self._cursor.execute(sql.SET_DEPTHS, (encode(counts).decode(), queue))
        self.folded = self._number - 1
        self._cursor.execute(sql.SET_FACT, ("counted", self.folded))

    def committed(self) -> None:
        """Remember what was committed."""
        known = self._known
        for name, number in self.new_queues.items():
            known.numbers[name], known.names[number] = number, name
        for queue, counts in self.counts.items():
            for what, n in counts.items():
                _add(known.depths, queue, what, n)
        known.newest, known.folded = self._number - 1, self.folded
        if self.parts:
            known.stored, known.implied = known.newest, {}
        elif self.implied is not None:
            place = known.numbers[self.implied.queue], self.implied.priority
            known.implied[place] = known.implied.get(place, 0) + 1

    # ---- insert --------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        runs = [envelopes] if len(envelopes) == 1 else _alike(envelopes)
        for run in runs:
            e = run[0]
            limits = self._limits.get(e.queue) or self.limits(e.queue)
            longest = len(e.payload) if len(run) == 1 else max([len(each.payload) for each in run])
            if (
                e.message_id
                or e.key
                or e.sender
                or longest > limits.max_payload_bytes
                or waiting(self._counts_of(self._queue(e.queue))) + len(envelopes) > limits.max_depth
            ):
                return super().insert(envelopes)  # ids and keys that callers gave, and what has no room
        if len(envelopes) == 1:
            return [Accepted(f"{self.store_id}-{self._gather(envelopes)!s}", False)]  # noqa: FBT003
        prefix, accepted = f"{self.store_id}-", []
        for run in runs:
            first = self._gather(run)
            numbers = range(first, self._number, (self._number - first) // len(run))
            accepted += [Accepted(f"{prefix}{number!s}", False) for number in numbers]  # noqa: FBT003
        return accepted

    def _gather(self, run: Sequence[Envelope]) -> int:
        """Number and count new records that differ in their payloads only; returns the first number.

        They are written with what follows, if that is alike: one statement takes a third of the time of many.
        """
        e, first = run[0], self._number
        queue = self._queue(e.queue) or self._make_queue(e.queue)
        if not self._new:
            self._new, self._new_queue = list(run), queue
        elif _are_alike(self._new, run):
            self._new += run
        else:
            self._write_new()
            self._new, self._new_queue = list(run), queue
        self.changes += 1
        if e.delay_ns:
            self._number = first + len(run)
            _add(self.counts, queue, "SCHEDULED", len(run))
        else:
            self._number = first + EVENTS_PER_NEW * len(run)
            _add(self.counts, queue, LANE_COUNTS[e.priority], len(run))
            self.ready.add(e.queue)
        if e.durability != "os":
            self.synced = True
        return first

    def _write_new(self) -> None:
        run, first = self._new, self._write_rows()
        e, sizes = run[0], [len(envelope.payload) for envelope in run]
        self.parts.append(
            NewRun(first, self.wall_us, e.queue, e.priority, e.type, e.parent_message_id, e.delay_ns, sizes)
        )

    def _write_rows(self) -> int:
        """Write the rows of new records; returns the number of the first."""
        run, self._new = self._new, []
        e, now, delay_ns = run[0], self.steady_ns, run[0].delay_ns
        queue, per_record = self._new_queue, 1 if delay_ns else EVENTS_PER_NEW
        first = self._number - per_record * len(run)
        values = (
            first, queue, "SCHEDULED" if delay_ns else "QUEUED", e.priority, e.max_retries,
            self._ends_at(now + delay_ns) if delay_ns else None, now, now + e.ttl_ns if e.ttl_ns else 0,
            e.durability, self.wall_us, LINE_DELAYED if delay_ns else LINES_PER_QUEUE * queue + e.priority,
            e.type, e.parent_message_id, delay_ns, e.ttl_ns,
        )  # fmt: skip
        if len(run) == 1:
            self._raw_cursor.execute(sql.INSERT_PLAIN, (*values, e.payload))
        else:
            payloads = apsw.carray(tuple([envelope.payload for envelope in run]))
            self._raw_cursor.execute(sql.INSERT_ALIKE, (*values, payloads, per_record))
        return first

    # ---- claim ---------------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        queue, now = self._queue(terms.queue), self.steady_ns
        if now >= self._known.deadline_ns and self._first_deadline() <= now:
            return super().claim(terms)
        counts = self._counts_of(queue)
        rows: list[Any] = []
        lanes = [lane for lane in terms.lanes if counts.get(LANE_COUNTS[lane])]
        for lane in lanes:
            rows += ask(self._cursor, sql.HEADS, (_line(queue, lane), terms.limit))
        ages = terms.promote_after_ns
        if [row for row in rows if row[4] or (0 < row[1] <= len(ages) and now - row[3] >= ages[row[1] - 1])]:
            return super().claim(terms)  # a record can expire, or is promoted
        if len(lanes) > 1:
            rows.sort(key=itemgetter(1, 2))
            del rows[terms.limit :]
        return self._lease_rows(rows, terms) if rows else []

    def _first_deadline(self) -> int:
        """When the first lease or delay ends."""
        [ends] = ask(self._cursor, sql.FIRST_DEADLINES)
        self._known.deadline_ns = min((end for end in ends if end is not None), default=FOREVER_NS)
        return self._known.deadline_ns

    def _lease_rows(self, rows: list[Any], terms: Claim) -> list[Delivery]:
        first, now, wall_us = self._number, self.steady_ns, self.wall_us
        values = (first, terms.worker_id, terms.lease_ns, self._ends_at(now + terms.lease_ns), wall_us)
        self.changes += 1
        if len(rows) == 1:
            self._cursor.execute(sql.LEASE_ONE, (*values, rows[0][0]))
        else:
            self._cursor.execute(sql.LEASE_MANY, (*values, _numbers([row[0] for row in rows])))
        self._number = first + len(rows)
        queue, number = self._queue(terms.queue), first
        deliveries: list[Delivery] = []
        for lane, neighbours in groupby(rows, itemgetter(1)):
            part = list(neighbours)
            seqs, _, _, ready_at, _, names, tries, durabilities, payloads, kinds, parents = zip(
                *part, strict=True
            )
            which = [name or seq for name, seq in zip(names, seqs, strict=True)]
            attempts = [attempt + 1 for attempt in tries]
            waited_us = [(now - ready) // 1000 for ready in ready_at]
            self._append(
                LeasedRun(number, wall_us, terms.queue, lane, terms.worker_id, which, attempts, waited_us)
            )
            _add(self.counts, queue, LANE_COUNTS[lane], -len(part))
            if durabilities.count("os") != len(part):
                self.synced = True
            ids = [name or f"{self.store_id}-{seq!s}" for name, seq in zip(names, seqs, strict=True)]
            leases = range(number, number + len(part))
            deliveries += map(
                Delivery,
                ids,
                repeat(terms.queue),
                payloads,
                kinds,
                parents,
                attempts,
                leases,
                repeat(terms.lease_ns),
            )
            number += len(part)
        _add(self.counts, queue, "PROCESSING", len(rows))
        return deliveries

    # ---- complete ------------------------------------------------------------------------------

    def complete(self, results: Mapping[str, tuple[int, bytes]]) -> None:
        numbers = [self._known.own_number(message_id) for message_id in results]
        if len(numbers) == 1:
            rows = ask(self._cursor, sql.LEASED_ONE, (numbers[0],))
        else:
            rows = ask(self._cursor, sql.LEASED_MANY, (_numbers(numbers),))
        if len(rows) != len(numbers) or [
            row
            for number, (token, _), row in zip(numbers, results.values(), rows, strict=True)
            if row[0] != number or row[1] != token or row[8] <= self.steady_ns
        ]:
            super().complete(results)  # ids that callers gave, repeated calls, stale leases
            return
        self.changes += 1
        first, values = self._number, [result for _, result in results.values()]
        if len(set(values)) == 1 != len(values):  # most often they are all null
            self._cursor.execute(sql.COMPLETE_ALIKE, (first, values[0], self.wall_us, _numbers(numbers)))
        else:
            self._cursor.executemany(
                sql.COMPLETE, zip(range(first, first + len(values)), values, repeat(self.wall_us), numbers)
            )
        for holder, neighbours in groupby(rows, _holder):
            self._note_completed(holder, list(neighbours))

    def _note_completed(self, holder: tuple[int, int, str], rows: list[Any]) -> None:
        """Count completed records of one queue, lane and worker, and keep their events."""
        queue, lane, worker_id = holder
        seqs, leases, _, _, _, attempts, began, durabilities, _ = map(list, zip(*rows, strict=True))
        worked_us = [(self.steady_ns - begin) // 1000 for begin in began]
        number = self.take_numbers(len(rows))
        self._append(
            CompletedRun(
                number, self.wall_us, self._name(queue), lane, worker_id, seqs, attempts, leases, worked_us
            )
        )
        _add(self.counts, queue, "PROCESSING", -len(rows))
        _add(self.counts, queue, "COMPLETED", len(rows))
        self.ended = True
        if durabilities.count("os") != len(rows):
            self.synced = True


class SqliteReading(SqliteTransaction):
    """One state of the file, through a reading connection."""

    _read: Known | None = None

    def _depths(self) -> Depths:
        if self._read is None:
            self._read = Known()
            self._read.start_again(self._cursor)
            self._read.catch_up(self._cursor)
        return self._read.depths


def _are_alike(some: Sequence[Envelope], more: Sequence[Envelope]) -> bool:
    """Whether one statement can insert both runs."""
    return (
        len(some) + len(more) <= ALIKE_ROWS_MAX
        and len(some[-1].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(more[-1].payload)
        and _traits(some[0]) == _traits(more[0])
    )


def _alike(envelopes: Sequence[Envelope]) -> list[Sequence[Envelope]]:
    """Neighbours that one statement can insert, in order. A long one stands alone."""
    runs: list[Sequence[Envelope]] = []
    for _, neighbours in groupby(envelopes, _traits):
        alike = list(neighbours)
        size = ALIKE_ROWS_MAX
        if max([len(e.payload) for e in alike]) > ALIKE_PAYLOAD_BYTES_MAX:
            size = 1
        runs += [alike[first : first + size] for first in range(0, len(alike), size)]
    return runs


def _listing(pick: Listing, queue: int) -> tuple[str, tuple[int, ...]]:
    """A query and its values; queue 0 means any. QUEUED and PROCESSING records are found by their lines."""
    first, last = (_line(queue, 0), _line(queue, LANES)) if queue else (LINES_PER_QUEUE, FOREVER_NS)
    of_queue: tuple[int, ...] = (queue,) if queue else ()
    and_queue = " AND queue = ?" if queue else ""
    match pick.state:
        case None:
            where, values = f"TRUE{and_queue}", of_queue
        case "QUEUED":
            where, values = "line >= ? AND line < ?", (first, last)
        case "PROCESSING":
            where, values = f"line = {LINE_LEASED}{and_queue}", of_queue
        case state:
            where, values = f"state = '{state}' AND {sql.HAS_STATE_INDEX}{and_queue}", of_queue
    return f"{sql.RECORD} WHERE {where} AND seq > ? ORDER BY seq LIMIT ?", (*values, pick.after, pick.limit)
