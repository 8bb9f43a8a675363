"""A transaction's verbs in SQL: the primitives that `Transaction` asks for, and the hot ones as a whole."""

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import apsw
import msgspec

from postroom.core import lifecycle
from postroom.message import Durability, Envelope, Event, Record, State, Step
from postroom.stores.base import (
    Accepted,
    Claim,
    Counted,
    Delivery,
    Head,
    Limits,
    Pick,
    Transaction,
)
from postroom.stores.sql.queries import (
    COMPLETE,
    COUNTED,
    FIRST_PAST,
    HEADS,
    INSERT,
    LANE_DELAYED,
    LANE_LEASED,
    LEASE,
    LEASED_MANY,
    LEASED_ONE,
    QUEUE,
    READY,
    SET_FACT,
    UPDATE_PLAIN,
    UPDATE_RESULT,
    UPDATE_TRAIL,
    USUAL_PRIORITY,
    ask,
)

if TYPE_CHECKING:
    from postroom.stores.sqlite import SqliteStore

LIMITS_KNOWN_S = 1.0  # how long a queue's limits hold here after another process changed them
FOLD_EVENTS = 10_000  # after so many, the depths are written down; until then they follow from the events

Depths = dict[int, dict[Counted, int]]
"""How many records each queue has in each state."""

encode = msgspec.json.Encoder().encode
decode_events = msgspec.json.Decoder(list[Event]).decode
decode_event = msgspec.json.Decoder(Event).decode
decode_counts = msgspec.json.Decoder(list[tuple[int, Counted, int]]).decode
decode_depths = msgspec.json.Decoder(dict[Counted, int]).decode


def _json(text: str) -> str:
    return encode(text).decode()


_quoted = lru_cache(maxsize=1024)(_json)  # the names of queues, which every event holds


def _lane_text(priority: int) -> str:
    """A part of an event. What is as usual is left out, as `Event` does."""
    return "" if priority == USUAL_PRIORITY else f',"priority":{priority}'


def _origin_text(envelope: Envelope) -> str:
    """A part of the first event."""
    if not envelope.type and not envelope.parent_message_id:
        return ""
    kind = f',"type":{_json(envelope.type)}' if envelope.type else ""
    parent = envelope.parent_message_id
    return f'{kind},"parent_message_id":{_json(parent)}' if parent else kind


def leased_rows(numbers: list[int]) -> tuple[str, tuple[Any, ...]]:
    """The query for live leases of these records."""
    if len(numbers) == 1:
        return LEASED_ONE, (numbers[0],)
    return LEASED_MANY, (encode(numbers).decode(),)


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

    def __init__(self, store: "SqliteStore", cursor: apsw.Cursor) -> None:
        # `Transaction.__init__`, spelled out: every commit comes by.
        self.store_id = store.store_id
        self.number = store.seen + 1
        self.steady_ns, self.wall_us = store.now()
        self.ready: set[str] = set()
        self.counts: dict[tuple[str, Counted], int] = {}
        self.synced = False
        self._store = store
        self._cursor = cursor
        self._connection = cursor.connection
        self._queues: dict[str, tuple[int, Limits]] = {}
        self.new_queues: dict[str, int] = {}
        self.texts: list[str] = []
        """The events, as JSON, in order."""
        self.changes = 0
        self.changed: list[tuple[int, Counted, int]] = []
        self.counted = store.counted

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
        counts = self._store.depths.get(self._queue(queue)[0], {})
        depth = counts.get("QUEUED", 0) + counts.get("SCHEDULED", 0) + counts.get("RETRYING", 0)
        if self.counts:
            depth += sum(self.counts.get((queue, state), 0) for state in lifecycle.WAITING)
        return depth

    def is_past(self, queue: str) -> bool:
        number = self._store.number_of(queue, self._connection)
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

    # ---- the hot verbs, in as few words of SQL as they need ----------------------------------------
    # They do what `Transaction` does by way of `lifecycle`, without a Python object for each step on the way.

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        number, wall_us, now, store_id = self.number, self.wall_us, self.steady_ns, self.store_id
        rows: list[tuple[Any, ...]] = []
        texts: list[str] = []
        accepted: list[Accepted] = []
        room: dict[str, int] = {}
        counts: dict[tuple[str, Counted], int] = {}
        for e in envelopes:
            if e.message_id or e.key:
                return super().insert(envelopes)
            queue, payload, delay_ns, priority = e.queue, e.payload, e.delay_ns, e.priority
            queue_number, limits = self._queue(queue)
            if queue not in room:
                room[queue] = limits.max_depth - self.depth(queue)
            room[queue] -= 1
            if room[queue] < 0 or len(payload) > limits.max_payload_bytes:
                return super().insert(envelopes)  # which says what is wrong
            state: State = "SCHEDULED" if delay_ns else "QUEUED"
            message_id = f"{store_id}-{number}"
            accepted.append(Accepted(message_id, False))  # noqa: FBT003 - by position, as everything here
            rows.append(
                (
                    number, None, queue_number, state, priority, number, 0, 0, e.max_retries, 0, "", 0,
                    LANE_DELAYED if delay_ns else priority, now + delay_ns if delay_ns else number, now,
                    now + e.ttl_ns if e.ttl_ns else 0, e.durability, wall_us, 0, 0, 0,
                    e.type, e.parent_message_id, "", delay_ns, e.ttl_ns, priority, payload,
                )
            )  # fmt: skip
            lane = _lane_text(priority)
            about = f'"queue":{_quoted(queue)},"message_id":"{message_id}","state":"{state}"{lane}'
            texts.append(
                f'{{"seq":{number},"ts_us":{wall_us},"kind":"created",{about}{_origin_text(e)}'
                f',"body_bytes":{len(payload)}}}'
            )
            number += 1
            if not delay_ns:
                texts.append(f'{{"seq":{number},"ts_us":{wall_us},"kind":"enqueued",{about}}}')
                number += 1
                self.ready.add(queue)
            if e.durability != "os":
                self.synced = True
            counts[queue, state] = counts.get((queue, state), 0) + 1
        self._write_new(rows)
        self.number = number
        self.texts += texts
        for (queue, counted), n in counts.items():
            self._count(queue, counted, n)
        return accepted

    def _write_new(self, rows: list[tuple[Any, ...]]) -> None:
        self.changes += 1
        if len(rows) == 1:
            self._cursor.execute(INSERT, rows[0])
        else:
            self._cursor.executemany(INSERT, rows)

    def claim(self, terms: Claim) -> list[Delivery]:
        queue = terms.queue
        queue_number = self._store.number_of(queue, self._cursor)
        if (
            terms.promote_after_ns
            or len(terms.priorities) != 1
            or queue_number is None
            or self.is_past(queue)
        ):
            return super().claim(terms)
        lane, limit = terms.priorities[0], terms.limit
        rows = self._cursor.execute(HEADS, (queue_number, lane, limit)).fetchall()
        if any(row[1] for row in rows):  # some can expire
            return super().claim(terms)
        return self._lease_rows(rows, terms, lane)

    def _lease_rows(self, rows: list[Any], terms: Claim, priority: int) -> list[Delivery]:
        number, wall_us, steady_ns, store_id = self.number, self.wall_us, self.steady_ns, self.store_id
        queue, lease_ns, until = terms.queue, terms.lease_ns, steady_ns + terms.lease_ns
        worker = f',"worker_id":{_json(terms.worker_id)}' if terms.worker_id else ""
        lane = _lane_text(priority)
        changes, deliveries = [], []
        for seq, _, name, attempt, ready_at, durability, payload, kind, parent in rows:
            message_id = name or f"{store_id}-{seq}"
            changes.append(
                (attempt + 1, number, terms.worker_id, lease_ns, LANE_LEASED, until, wall_us, wall_us, seq)
            )
            deliveries.append(
                Delivery(message_id, queue, payload, kind, parent, attempt + 1, number, lease_ns)
            )  # fmt: skip
            waited_us = (steady_ns - ready_at) // 1000
            waited = f',"duration_us":{waited_us}' if waited_us else ""
            named = _json(name) if name else f'"{message_id}"'
            self.texts.append(
                f'{{"seq":{number},"ts_us":{wall_us},"kind":"dequeued","queue":{_quoted(queue)},'
                f'"message_id":{named},'
                f'"state":"PROCESSING","attempt":{attempt + 1}{lane},"lease":{number}{worker}{waited}}}'
            )
            number += 1
            if durability != "os":
                self.synced = True
        if rows:
            self.number = number
            self.changes += 1
            self._cursor.executemany(LEASE, changes)
            self._count(queue, "QUEUED", -len(rows))
            self._count(queue, "PROCESSING", len(rows))
        return deliveries

    def complete(self, words: dict[str, tuple[int, bytes]]) -> None:
        own = {self._store.own_number(message_id): message_id for message_id in words}
        rows = ask(self._cursor, *leased_rows(list(own)))
        now = self.steady_ns
        if (
            0 in own
            or len(rows) != len(words)
            or any(words[own[row[0]]][0] != row[1] or row[8] <= now for row in rows)
        ):
            super().complete(words)  # names that callers gave, repeated words, stale leases
            return
        number, wall_us, steady_ns = self.number, self.wall_us, self.steady_ns
        found = {own[row[0]]: row for row in rows}
        changes: list[tuple[Any, ...]] = []
        counts: dict[str, int] = {}
        for message_id, (lease, result) in words.items():
            seq, _, queue_number, priority, attempt, worker_id, began, durability, _ = found[message_id]
            changes.append((number, result, wall_us, seq))
            queue = self._store.queue_name(queue_number, self._cursor)
            worker = f',"worker_id":{_json(worker_id)}' if worker_id else ""
            lane = _lane_text(priority)
            worked_us = (steady_ns - began) // 1000
            worked = f',"duration_us":{worked_us}' if worked_us else ""
            self.texts.append(
                f'{{"seq":{number},"ts_us":{wall_us},"kind":"execution_completed","queue":{_quoted(queue)},'
                f'"message_id":"{message_id}","state":"COMPLETED","attempt":{attempt}{lane},"lease":{lease}'
                f"{worker}{worked}}}"
            )
            number += 1
            counts[queue] = counts.get(queue, 0) + 1
            if durability != "os":
                self.synced = True
        self.number = number
        self.changes += 1
        self._cursor.executemany(COMPLETE, changes)
        for queue, n in counts.items():
            self._count(queue, "PROCESSING", -n)
            self._count(queue, "COMPLETED", n)

    # ---- writing -------------------------------------------------------------------------------

    def put_new(self, step: Step, envelope: Envelope) -> bool:
        number = self._queue(step.record.queue)[0]
        self._cursor.execute(INSERT, _new_row(step.record, number, envelope))
        if not self._connection.changes():
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
        return int(self._connection.changes())

    def purge_events(self, up_to: int, before_us: int, limit: int) -> None:
        """None that the depths still follow from, and never the newest."""
        self.changes += 1
        self._cursor.execute(
            "DELETE FROM events WHERE seq IN (SELECT seq FROM events ORDER BY seq LIMIT ?) "
            "AND seq <= ? AND ts_us < ? AND seq < (SELECT max(seq) FROM events)",
            (limit, min(up_to, self.counted), before_us),
        )

    def keep(self, events: Iterable[Event]) -> None:
        self.texts += [encode(event).decode() for event in events]

    def flush(self) -> None:
        """Write what was gathered on the way: events, and what they did to the depths."""
        self.changed = [
            (self._queue(queue)[0], state, change) for (queue, state), change in self.counts.items() if change
        ]
        if self.texts:
            values = (
                self.number - 1,
                self.wall_us,
                encode(self.changed).decode(),
                f"[{','.join(self.texts)}]",
            )
            self._cursor.execute("INSERT INTO events VALUES (?, ?, ?, ?)", values)
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
        envelope.delay_ns, envelope.ttl_ns, envelope.priority, envelope.payload,
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
