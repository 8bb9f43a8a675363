"""A transaction's verbs in SQL: the primitives that `Transaction` asks for, and the hot ones as a whole."""

import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import apsw
import msgspec

from postroom.core import lifecycle
from postroom.message import Durability, Envelope, Event, Record, Step
from postroom.stores import batches
from postroom.stores.base import (
    LIVE_EVENTS,
    Accepted,
    Claim,
    Counted,
    Delivery,
    Head,
    Limits,
    Outbox,
    Pick,
    Transaction,
)
from postroom.stores.eventruns import (
    EVENTS_OF_ONE,
    UNTOLD_MAX,
    CompletedRun,
    LeasedRun,
    NewRun,
    Told,
    packed,
    runs_of,
)
from postroom.stores.sql.queries import (
    COMPLETE_ALIKE,
    COMPLETE_ONE,
    COMPLETE_ROW,
    COUNTED,
    FIRST_PAST,
    HEADS,
    INSERT,
    INSERT_ALIKE,
    INSERT_PLAIN,
    LANE_DELAYED,
    LANE_LEASED,
    LEASE_MANY,
    LEASE_ONE,
    LEASE_ROW,
    LEASED_MANY,
    LEASED_ONE,
    LEASED_ROW,
    QUEUE,
    READY,
    SENDER,
    SET_FACT,
    UPDATE_PLAIN,
    UPDATE_RESULT,
    UPDATE_TRAIL,
    ask,
)

if TYPE_CHECKING:
    from postroom.stores.sqlite import SqliteStore

LIMITS_KNOWN_S = 1.0  # how long a queue's limits hold here after another process changed them
FOLD_EVENTS = 10_000  # after so many, the depths are written down; until then they follow from the events

Depths = dict[int, dict[Counted, int]]
"""How many records each queue has in each state."""

NO_COUNTS: dict[Counted, int] = {}
_HOLDER = itemgetter(2, 3, 5)  # of a leased row: queue, priority, worker

encode = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(Event).decode
decode_counts = msgspec.json.Decoder(list[tuple[int, Counted, int]]).decode
decode_depths = msgspec.json.Decoder(dict[Counted, int]).decode


def _numbers(numbers: list[int]) -> "apsw.CArrayBinding":
    """Numbers for `carray(?)`."""
    return apsw.carray(array("q", numbers))


def _in_a_row(numbers: list[int]) -> bool:
    """Whether they are those of records that were accepted one behind the other."""
    return numbers == list(range(numbers[0], numbers[-1] + 1, EVENTS_OF_ONE))


def _leased(cursor: apsw.Cursor, numbers: list[int]) -> list[Any]:
    """What has a live lease of these records, and a name of ours; in their order."""
    if len(numbers) == 1:
        return ask(cursor, LEASED_ONE, (numbers[0],))
    if _in_a_row(numbers):
        return ask(cursor, LEASED_ROW, (numbers[0], numbers[-1]))
    return ask(cursor, LEASED_MANY, (_numbers(numbers),))


def add_counts(depths: Depths, changes: Iterable[tuple[int, Counted, int]]) -> None:
    for queue, state, change in changes:
        counts = depths.setdefault(queue, {})
        counts[state] = counts.get(state, 0) + change


def counted_depths(connection: apsw.Connection) -> tuple[Depths, int]:
    """The depths that are written down, and the event up to which they count."""
    rows = ask(connection, "SELECT queue, depths FROM queues")
    counted = connection.execute(COUNTED).get
    return {queue: decode_depths(depths) for queue, depths in rows}, counted or 0


def store_id_of(connection: apsw.Connection, new: str) -> str:
    """What every name that the store gives begins with; a new file gets the new one."""
    found = connection.execute("SELECT value FROM facts WHERE name = 'store_id'").get
    if found is None:
        connection.execute(SET_FACT, ("store_id", new))
    return str(found or new)


def cast_to_sqlite(transaction: Transaction) -> "SqliteTransaction":
    """The transaction that this store hands to work."""
    if not isinstance(transaction, SqliteTransaction):
        raise TypeError(transaction)
    return transaction


class SqliteTransaction(Transaction):
    """The primitives in SQL."""

    synced = False  # in the class, as what every commit sets costs every commit
    ended = False
    notable: Sequence[Event] = ()
    changes = 0
    _new_end = 0

    def __init__(self, store: "SqliteStore", cursor: apsw.Cursor, steady_ns: int, wall_us: int) -> None:
        # `Transaction.__init__`, spelled out: every commit comes by.
        self.store_id = store.store_id
        self.number = store.seen + 1
        self.steady_ns = steady_ns
        self.wall_us = wall_us
        self.ready: set[str] = set()
        self.counts: dict[tuple[str, Counted], int] = {}
        self._store = store
        self._cursor_held = cursor
        self._new: list[Envelope] = []
        """Accepted and not yet written: neighbours that are alike, whose numbers end before `_new_end`."""
        self._queues: dict[str, tuple[int, Limits]] = {}
        self.new_queues: dict[str, int] = {}
        self.told: list[Told] = []
        """The events, in order."""
        self.changed: list[tuple[int, Counted, int]] = []
        self.counted = store.counted

    @property
    def _cursor(self) -> apsw.Cursor:
        """What was accepted is written before anything else is asked or said."""
        if self._new:
            self._write_new()
        return self._cursor_held

    # ---- queues --------------------------------------------------------------------------------

    def _queue(self, name: str) -> tuple[int, Limits]:
        """A queue's number and limits."""
        found = self._queues.get(name)
        if found is None:
            until, found = self._store.queue_rows.get(name, (0.0, None))
            if found is None or time.monotonic() >= until:
                found = self._load_queue(name)
                if name not in self.new_queues:  # else it may be rolled back
                    self._store.queue_rows[name] = (time.monotonic() + LIMITS_KNOWN_S, found)
            self._queues[name] = found
        return found

    def _number(self, name: str) -> int:
        """A queue's number, without its limits where they are not known yet."""
        found = self._queues.get(name)  # first: the store may not learn of a queue that is new in here
        number = self._store.number_of(name, self._cursor) if found is None else found[0]
        return self._queue(name)[0] if number is None else number

    def _load_queue(self, name: str) -> tuple[int, Limits]:
        rows = ask(self._cursor, QUEUE, (name,))
        if not rows:
            self.changes += 1
            self._cursor.execute("INSERT INTO queues (name) VALUES (?)", (name,))
            rows = ask(self._cursor, QUEUE, (name,))
            self.new_queues[name] = rows[0][0]
        return rows[0][0], limits_of(*rows[0][1:])

    def set_limits(self, queue: str, limits: Limits) -> None:
        """What a queue may hold."""
        self.changes += 1
        self._cursor.execute(
            "UPDATE queues SET max_depth = ?, max_payload_bytes = ?, durability = ? WHERE queue = ?",
            (limits.max_depth, limits.max_payload_bytes, limits.durability, self._queue(queue)[0]),
        )
        del self._queues[queue]
        self._store.queue_rows.pop(queue, None)

    def limits(self, queue: str) -> Limits:
        return self._queue(queue)[1]

    def depth(self, queue: str) -> int:
        return self._waiting(queue, self._queue(queue)[0])

    def _waiting(self, queue: str, number: int) -> int:
        # `lifecycle.WAITING`, spelled out: every new message comes by.
        counts = self._store.depths.get(number, NO_COUNTS)
        depth = counts.get("QUEUED", 0) + counts.get("SCHEDULED", 0) + counts.get("RETRYING", 0)
        changes = self.counts
        if changes:
            depth += changes.get((queue, "QUEUED"), 0) + changes.get((queue, "SCHEDULED"), 0)
            depth += changes.get((queue, "RETRYING"), 0)
        return depth

    def is_past(self, queue: str) -> bool:
        number = self._store.number_of(queue, self._cursor)
        if number is None:
            return False
        now = self.steady_ns
        [(delayed, leased)] = ask(self._cursor, FIRST_PAST, (number,))
        return (delayed is not None and delayed <= now) or (leased is not None and leased <= now)

    # ---- finding -------------------------------------------------------------------------------

    def find(self, pick: Pick) -> list[Record]:
        return self._store.found(pick, self._cursor, self.steady_ns)

    def ready_in(self, queue: str, priority: int, limit: int) -> list[Head]:
        number = self._store.number_of(queue, self._cursor)
        rows = [] if number is None else ask(self._cursor, READY, (number, priority, limit))
        return [Head(self._store.record_of(row, self._cursor), *row[21:]) for row in rows]

    def known_by_key(self, queue: str, key: str) -> str | None:
        number = self._queue(queue)[0]
        query = "SELECT message_id FROM keys WHERE queue = ? AND key = ?"
        rows = ask(self._cursor, query, (number, key))
        return str(rows[0][0]) if rows else None

    def sender_of(self, record: Record) -> str:
        return str(ask(self._cursor, SENDER, (record.seq,))[0][0] or "")

    # ---- the hot verbs, in as few words of SQL as they need ----------------------------------------
    # They do what `Transaction` does by way of `lifecycle`, without a Python object for each step on the way.

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        if len(envelopes) == 1:
            return self._insert_one(envelopes)
        runs = batches.runs(envelopes)
        room: dict[str, int] = {}
        for run in runs:
            first = run[0]
            queue = first.queue
            number, limits = self._queue(queue)
            left = room[queue] if queue in room else limits.max_depth - self._waiting(queue, number)
            room[queue] = left - len(run)
            longest = max([len(envelope.payload) for envelope in run])
            given = first.message_id or first.key or first.sender
            if left < len(run) or given or longest > limits.max_payload_bytes:
                return super().insert(envelopes)  # names and keys of callers, and saying what is wrong
        if len(runs) == 1:
            return self._insert_alike(runs[0])
        return [accepted for run in runs for accepted in self._insert_alike(run)]

    def _insert_one(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        """The same for a single one, which has nobody to share the work with."""
        [e] = envelopes
        number, limits = self._queues.get(e.queue) or self._queue(e.queue)
        if (
            e.message_id
            or e.key
            or e.sender
            or len(e.payload) > limits.max_payload_bytes
            or self._waiting(e.queue, number) >= limits.max_depth
        ):
            return super().insert(envelopes)
        return [Accepted(f"{self.store_id}-{self._gather(envelopes)!s}", False)]  # noqa: FBT003

    def _insert_alike(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        """New records that differ in their payloads alone."""
        first = self._gather(envelopes)
        prefix, events = f"{self.store_id}-", (self.number - first) // len(envelopes)
        return [
            Accepted(f"{prefix}{number!s}", False)  # noqa: FBT003 - faster by position
            for number in range(first, self.number, events)
        ]

    def _gather(self, envelopes: Sequence[Envelope]) -> int:
        """Take them to what is written last; gives the number of the first."""
        self.changes += 1
        first, e = self.number, envelopes[0]
        if not self._new:
            self._new = list(envelopes)
        elif self._new_end == first and batches.are_alike(self._new, envelopes):
            self._new += envelopes
        else:
            self._write_new()
            self._new = list(envelopes)
        if e.delay_ns:
            self.number = first + len(envelopes)
            self._count(e.queue, "SCHEDULED", len(envelopes))
        else:
            self.number = first + EVENTS_OF_ONE * len(envelopes)
            self._count(e.queue, "QUEUED", len(envelopes))
            self.ready.add(e.queue)
        self._new_end = self.number
        if e.durability != "os":
            self.synced = True
        return first

    def _write_new(self) -> None:
        """As late as possible: what several callers of one commit bring is one statement."""
        new, self._new = self._new, []
        e, first = new[0], self._insert_new(new)
        sizes = [len(envelope.payload) for envelope in new]
        self.told.append(
            NewRun(first, self.wall_us, e.queue, e.priority, e.type, e.parent_message_id, e.delay_ns, sizes)
        )

    def _insert_new(self, new: list[Envelope]) -> int:
        """The rows of new records that are alike; gives the number of the first."""
        e, now, delay_ns = new[0], self.steady_ns, new[0].delay_ns
        events = 1 if delay_ns else EVENTS_OF_ONE
        first = self._new_end - events * len(new)
        values = (
            first, self._queues[e.queue][0], "SCHEDULED" if delay_ns else "QUEUED",
            e.priority, e.max_retries, LANE_DELAYED if delay_ns else e.priority,
            now + delay_ns if delay_ns else None, now, now + e.ttl_ns if e.ttl_ns else 0, e.durability,
            self.wall_us, e.type, e.parent_message_id, delay_ns, e.ttl_ns,
        )  # fmt: skip
        if len(new) == 1:
            self._cursor_held.execute(INSERT_PLAIN, (*values, e.payload))
        else:
            payloads = apsw.carray(tuple([envelope.payload for envelope in new]))
            self._cursor_held.execute(INSERT_ALIKE, (*values, payloads, events))
        return first

    def claim(self, terms: Claim) -> list[Delivery]:
        cursor = self._cursor
        queue_number = self._store.number_of(terms.queue, cursor)
        if terms.promote_after_ns or len(terms.priorities) != 1 or queue_number is None:
            return super().claim(terms)
        lane = terms.priorities[0]
        rows = ask(cursor, HEADS, (queue_number, lane, terms.limit))
        if not rows:
            return super().claim(terms) if self.is_past(terms.queue) else []
        now = self.steady_ns
        *_, delayed, leased = rows[0]
        if (
            (delayed is not None and delayed <= now)
            or (leased is not None and leased <= now)
            or [row for row in rows if row[1]]  # some can expire; a generator takes longer for one
        ):
            return super().claim(terms)
        return self._lease_rows(rows, terms, lane)

    def _lease_rows(self, rows: list[Any], terms: Claim, priority: int) -> list[Delivery]:
        number, wall_us, now = self.number, self.wall_us, self.steady_ns
        queue, lease_ns = terms.queue, terms.lease_ns
        values = (number, terms.worker_id, lease_ns, now + lease_ns, wall_us)
        self.changes += 1
        numbers = [row[0] for row in rows]
        if len(rows) == 1:
            self._cursor_held.execute(LEASE_ONE, (*values, numbers[0]))
        elif _in_a_row(numbers):
            self._cursor_held.execute(LEASE_ROW, (*values, numbers[0], numbers[-1]))
        else:
            self._cursor_held.execute(LEASE_MANY, (*values, _numbers(numbers)))
        seqs, _, names, attempts, ready_at, durabilities, payloads, kinds, parents, *_ = zip(
            *rows, strict=True
        )
        which = [name or seq for seq, name in zip(seqs, names, strict=True)]
        numbered = [attempt + 1 for attempt in attempts]
        waited_us = [(now - ready) // 1000 for ready in ready_at]
        self.told.append(
            LeasedRun(number, wall_us, queue, priority, terms.worker_id, which, numbered, waited_us)
        )
        self.number = number + len(rows)
        if durabilities.count("os") != len(rows):
            self.synced = True
        self._count(queue, "QUEUED", -len(rows))
        self._count(queue, "PROCESSING", len(rows))
        prefix = f"{self.store_id}-"
        return [
            Delivery(name or f"{prefix}{seq!s}", queue, payload, kind, parent, attempt, lease, lease_ns)
            for name, seq, payload, kind, parent, attempt, lease in zip(
                names, seqs, payloads, kinds, parents, numbered, range(number, self.number), strict=True
            )
        ]

    def complete(self, words: dict[str, tuple[int, bytes]]) -> None:
        if not words:
            return
        own_number, now = self._store.own_number, self.steady_ns
        numbers = [own_number(message_id) for message_id in words]
        rows = _leased(self._cursor, numbers)
        if len(rows) != len(numbers) or [
            row
            for number, word, row in zip(numbers, words.values(), rows, strict=True)
            if row[0] != number or row[1] != word[0] or row[8] <= now
        ]:
            super().complete(words)  # names that callers gave, repeated words, stale leases
            return
        self._write_results([result for _, result in words.values()], numbers)
        for _, alike in groupby(rows, _HOLDER):
            self._tell_completed(list(alike))

    def _tell_completed(self, rows: list[Any]) -> None:
        """Neighbours of one queue, one priority and one holder."""
        queue_number, priority, worker_id = _HOLDER(rows[0])
        queue = self._store.queue_name(queue_number, self._cursor_held)
        seqs, leases, _, _, attempts, _, began, durabilities, _ = map(list, zip(*rows, strict=True))
        worked_us = [(self.steady_ns - begin) // 1000 for begin in began]
        self.told.append(
            CompletedRun(
                self.number, self.wall_us, queue, priority, worker_id, seqs, attempts, leases, worked_us
            )
        )
        self.number += len(rows)
        if durabilities.count("os") != len(rows):
            self.synced = True
        self._count(queue, "PROCESSING", -len(rows))
        self._count(queue, "COMPLETED", len(rows))
        self.ended = True

    def _write_results(self, results: list[bytes], numbers: list[int]) -> None:
        first, wall_us = self.number, self.wall_us
        self.changes += 1
        if len(numbers) == 1:
            self._cursor_held.execute(COMPLETE_ONE, (first, results[0], wall_us, numbers[0]))
        elif results.count(results[0]) == len(results):  # most often none
            result = results[0]
            if _in_a_row(numbers):
                bounds = numbers[0], numbers[-1]
                self._cursor_held.execute(COMPLETE_ROW, (first, result, wall_us, *bounds))
            else:
                self._cursor_held.execute(COMPLETE_ALIKE, (first, result, wall_us, _numbers(numbers)))
        else:
            changes = zip(range(first, first + len(results)), results, repeat(wall_us), numbers)
            self._cursor_held.executemany(COMPLETE_ONE, changes)

    # ---- writing -------------------------------------------------------------------------------

    def put_new(self, step: Step, envelope: Envelope) -> bool:
        number = self._queue(step.record.queue)[0]
        self._cursor.execute(INSERT, _new_row(step.record, number, envelope))
        if not self._cursor_held.connection.changes():
            return False
        self.changes += 1
        if envelope.key:
            row = (number, envelope.key, step.record.message_id, self.wall_us)
            self._cursor.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", row)
        return True

    def put_all_new(self, steps: Sequence[Step], envelopes: Sequence[Envelope]) -> None:
        self.changes += 1
        self._cursor.executemany(
            INSERT,
            [
                _new_row(step.record, self._queue(envelope.queue)[0], envelope)
                for step, envelope in zip(steps, envelopes, strict=True)
            ],
        )

    def put_all(self, before: Sequence[Record], steps: Sequence[Step]) -> None:
        self.changes += 1
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for record, step in zip(before, steps, strict=True):
            told = lifecycle.trail(record, step)
            values = _changed_values(step.record)
            if told:
                lines = "".join(f"{encode(event).decode()}\n" for event in told)
                rows.setdefault(UPDATE_TRAIL, []).append((*values, lines, record.seq))
            elif step.result is not None:
                rows.setdefault(UPDATE_RESULT, []).append((*values, step.result, record.seq))
            else:
                rows.setdefault(UPDATE_PLAIN, []).append((*values, record.seq))
        for query, bindings in rows.items():
            self._cursor.executemany(query, bindings)

    def remove(self, records: Iterable[Record]) -> None:
        self.changes += 1
        self._cursor.executemany("DELETE FROM records WHERE seq = ?", [(record.seq,) for record in records])

    def purge_keys(self, before_us: int, limit: int) -> int:
        """Forget idempotency keys that were seen before a time."""
        self.changes += 1
        self._cursor.execute(
            "DELETE FROM keys WHERE (queue, key) IN "
            "(SELECT queue, key FROM keys WHERE seen_us < ? ORDER BY seen_us LIMIT ?)",
            (before_us, limit),
        )
        return int(self._cursor_held.connection.changes())

    def purge_events(self, up_to: int, before_us: int, limit: int) -> None:
        """None that the depths still follow from, and never the newest."""
        self.changes += 1
        self._cursor.execute(
            "DELETE FROM events WHERE seq IN (SELECT seq FROM events ORDER BY seq LIMIT ?) "
            "AND seq <= ? AND ts_us < ? AND seq < (SELECT max(seq) FROM events) "
            "AND seq <= ifnull((SELECT value ->> 'shipped' FROM facts WHERE name = 'outbox'), seq)",
            (limit, min(up_to, self.counted), before_us),
        )

    def set_outbox(self, outbox: Outbox | None) -> None:
        """What was shipped goes with it, in the same commit: the file stays small without a further one."""
        self.changes += 1
        if outbox is None:
            self._cursor.execute("DELETE FROM facts WHERE name = 'outbox'")
            return
        self._cursor.execute(SET_FACT, ("outbox", encode(outbox).decode()))
        self._cursor.execute(
            "DELETE FROM events WHERE seq <= ?", (min(outbox.shipped - LIVE_EVENTS, self.counted),)
        )

    def keep(self, events: Iterable[Event]) -> None:
        if self._new:
            self._write_new()
        self.told += events

    def flush(self) -> None:
        """Write what was gathered on the way: new records, events, and what they did to the depths."""
        if self._tells_itself():
            self._insert_new(self._new)
        elif self._new:
            self._write_new()
        for (queue, state), change in self.counts.items():
            if change:
                known = self._queues.get(queue)
                self.changed.append((self._number(queue) if known is None else known[0], state, change))
        if self.told:
            self._tell()

    def _tells_itself(self) -> bool:
        """Whether one new record is all there is: its events follow from its row (stores/eventruns.py)."""
        return (
            len(self._new) == 1
            and not self.told
            and not self._new[0].delay_ns
            and self.number - self._store.told_to < EVENTS_OF_ONE * UNTOLD_MAX
            and self.number - self.counted <= FOLD_EVENTS
        )

    def _tell(self) -> None:
        """Write the events down, behind those that nobody has told yet."""
        counts, store = self.changed, self._store
        if store.untold:
            rows = store.untold_rows(self._cursor_held, store.told_to, store.seen + 1)
            self.told[:0] = runs_of(rows)
            counts = [*counts, *((queue, "QUEUED", n) for queue, n in store.untold.items())]
        values = (self.number - 1, self.wall_us, encode(counts).decode(), packed(self.told))
        self._cursor_held.execute("INSERT INTO events VALUES (?, ?, ?, ?)", values)
        if self.number - self.counted > FOLD_EVENTS:
            self._fold()

    def _fold(self) -> None:
        """Write the depths down, so that nobody has to read all events."""
        depths = {queue: dict(counts) for queue, counts in self._store.depths.items()}
        add_counts(depths, self.changed)
        for queue, counts in depths.items():
            known = {state: n for state, n in counts.items() if n}
            self._cursor.execute(
                "UPDATE queues SET depths = ? WHERE queue = ?", (encode(known).decode(), queue)
            )
        self.counted = self.number - 1
        self._cursor.execute(SET_FACT, ("counted", self.counted))


def _new_row(record: Record, queue: int, envelope: Envelope) -> tuple[Any, ...]:
    delayed = record.state == "SCHEDULED"
    return (
        record.seq, envelope.message_id or None, queue, record.state, record.priority, record.place, 0, 0,
        record.max_retries, 0, "", 0, LANE_DELAYED if delayed else record.priority,
        record.due if delayed else record.place, record.ready_at, record.expires, record.durability,
        record.created_us, 0, 0, 0, envelope.type, envelope.parent_message_id, envelope.key,
        envelope.delay_ns, envelope.ttl_ns, envelope.priority, envelope.payload, envelope.sender or None,
    )  # fmt: skip


def _changed_values(r: Record) -> tuple[Any, ...]:
    """The columns that a step can change."""
    return (
        r.state, r.priority, r.place, r.attempt, r.retries, r.lease, r.worker_id, r.lease_ns,
        *_lane_and_turn(r), r.ready_at, r.expires, r.claimed_us, r.heartbeat_us, r.ended_us,
    )  # fmt: skip


def _lane_and_turn(record: Record) -> tuple[int | None, int]:
    """Where a record stands in the index of turns."""
    match record.state:
        case "QUEUED":
            return record.priority, record.place
        case "PROCESSING":
            return LANE_LEASED, record.lease_until
        case "SCHEDULED" | "RETRYING":
            return LANE_DELAYED, record.due
        case _:
            return None, 0


DEFAULT_LIMITS = Limits()


def limits_of(max_depth: int | None, max_payload_bytes: int, durability: Durability | None) -> Limits:
    return DEFAULT_LIMITS if max_depth is None else Limits(max_depth, max_payload_bytes, durability)
