"""A transaction in SQL: faster forms of the hot verbs, above its ledger.

Rule 1: a faster form covers the common case. Everything else goes to the verb of `Transaction`.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby, islice, repeat
from operator import itemgetter
from typing import Any

import apsw

from postroom.core.lifecycle import lifecycle
from postroom.errors import UnreadableValue
from postroom.message import Envelope, Record, org_of
from postroom.stores.base import LANE_COUNTS, Counted, Head, waiting, within_bytes
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    CompletedRun,
    LeasedRun,
    leased_run,
    queue_and_lane,
    traits,
)
from postroom.stores.sqlite.known import Known
from postroom.stores.sqlite.ledger import SqliteLedger, carray_of, line_of
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import ENGINE_QUEUES, ask
from postroom.stores.transaction import NO_DETAILS, Accepted, Claim, Delivery

ALIKE_ROWS_MAX = 1_000  # new records in one statement
ALIKE_PAYLOAD_BYTES_MAX = 16 * 1024  # of each record: SQLite holds the payloads of a statement at once

_PAYLOAD = 8  # the column of a row of HEADS
_lane = itemgetter(1)  # of a row of HEADS
_holder = itemgetter(2, 3, 4)  # of a row of LEASED: queue, lane and worker


class SqliteTransaction(SqliteLedger):
    """One transaction of the writing connection."""

    # ---- insert --------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        runs = [envelopes] if len(envelopes) == 1 else _alike(envelopes)
        for run in runs:
            if not self._is_plain(run, len(envelopes)):
                return super().insert(envelopes)  # ids and keys of callers, or a limit is reached
        accepted: list[Accepted] = []
        for run in runs:
            queue, numbers = run[0].queue, self._gather(run)
            if org_of(queue):
                new, now_us = self.ids.messages.new, self.wall_us
                accepted += [Accepted(new(number, now_us), False) for number in numbers]  # noqa: FBT003
            else:
                prefix = self._known.prefix
                accepted += [Accepted(f"{prefix}{number!s}", False) for number in numbers]  # noqa: FBT003
        return accepted

    def _is_plain(self, run: Sequence[Envelope], count: int) -> bool:
        e = run[0]
        if e.message_id or e.key or e.sender:
            return False
        limits = self._limits.get(e.queue) or self.limits(e.queue)
        longest = len(e.payload) if len(run) == 1 else max([len(each.payload) for each in run])
        queue = self._known.numbers.get(e.queue) or self._queue(e.queue)
        depth = waiting(self._known.depths[queue])
        return longest <= limits.max_payload_bytes and depth + count <= limits.max_depth

    def _gather(self, run: Sequence[Envelope]) -> range:
        """Number and count new records that differ only in their payloads; returns their numbers.

        They are written later, together with similar records that follow: one statement takes a third of the
        time of many.
        """
        e, first = run[0], self._number
        queue = self._known.numbers.get(e.queue) or self._make_queue(e.queue)
        if self._new and not self._is_like_new(run):
            self._write_new()
        self._new += run
        self.changes += 1
        what: Counted
        if e.delay_ns:
            step, what = 1, "SCHEDULED"
        else:
            step, what = EVENTS_PER_NEW, LANE_COUNTS[e.priority]
            self.ready.add(e.queue)
        self._number = first + step * len(run)
        self._count(queue, what, len(run))
        if e.durability != "os":
            self.synced = True
        return range(first, self._number, step)

    def _is_like_new(self, run: Sequence[Envelope]) -> bool:
        """Whether one statement can insert a run together with the new records."""
        if self._new_traits is None:
            self._new_traits = traits(self._new[0])
        return (
            len(self._new) + len(run) <= ALIKE_ROWS_MAX
            and len(self._new[-1].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(run[-1].payload)
            and self._new_traits == traits(run[0])
        )

    def _update(self, numbers: list[int], one: str, row: str, many: str, values: tuple[Any, ...]) -> None:
        """Make the same change to records.

        The query is `one` for one record, `row` for every second number of a range, and `many` otherwise.
        """
        if len(numbers) == 1:
            self._raw_cursor.execute(one, (*values, numbers[0]))
        elif numbers == [*range(numbers[0], numbers[-1] + 1, EVENTS_PER_NEW)]:
            self._raw_cursor.execute(row, (*values, numbers[0], numbers[-1]))
        else:
            self._raw_cursor.execute(many, (*values, carray_of(numbers)))

    # ---- claim ---------------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        now = self.steady_ns
        if now >= self._known.deadline_ns and self._first_deadline() <= now:
            return super().claim(terms)
        queue, cursor, limit = self._queue(terms.queue), self._cursor, terms.limit
        depths = self._known.depths[queue]
        ages = terms.promote_after_ns
        rows: list[Any] = []
        for lane in sorted(terms.lanes):
            if depths.get(LANE_COUNTS[lane]) and (ages or len(rows) < limit):
                rows += within_bytes(cursor.execute(sql.HEADS, (line_of(queue, lane), limit)), _payload_bytes)
        if [row for row in rows if row[4]] or (ages and _is_any_promoted(rows, now, ages)):
            return super().claim(terms)  # a record can expire, or is promoted
        rows = within_bytes(rows[:limit], _payload_bytes)
        if not self.codec.is_plain:
            rows, unreadable = self._opened(rows)
            if unreadable:
                self.quarantine(unreadable)
                return self.claim(terms)
        return self._lease_rows(queue, rows, terms) if rows else []

    def _opened(self, rows: list[Any]) -> tuple[list[Any], list[tuple[Record, UnreadableValue]]]:
        """Rows of HEADS with their payloads, and the records whose payloads cannot be read."""
        opened: list[Any] = []
        unreadable: list[tuple[Record, UnreadableValue]] = []
        for row in rows:
            try:
                payload = self.codec.open("payload", row[0], row[_PAYLOAD])
            except UnreadableValue as error:
                [found] = ask(self._cursor, f"{sql.RECORD} WHERE seq = ?", (row[0],))
                unreadable.append((self._record(found), error))
            else:
                opened.append((*row[:_PAYLOAD], payload, *row[_PAYLOAD + 1 :]))
        return opened, unreadable

    def _lease_rows(self, queue: int, rows: list[Any], terms: Claim) -> list[Delivery]:
        first, until_ns = self._number, self._ends_at(self.steady_ns + terms.lease_ns)
        values = (first, terms.worker_id, terms.lease_ns, until_ns, self.wall_us)
        self.changes += 1
        self._update([row[0] for row in rows], sql.LEASE_ONE, sql.LEASE_ROW, sql.LEASE_MANY, values)
        self._count(queue, "PROCESSING", len(rows))
        deliveries: list[Delivery] = []
        for lane_rows in _groups(rows, _lane):
            deliveries += self._note_leased(queue, lane_rows, terms)
        return deliveries

    def _note_leased(self, queue: int, rows: list[Any], terms: Claim) -> Iterator[Delivery]:
        """Count leased records of one lane, and keep their events."""
        seqs, lanes, _, ready_at, _, names, attempts, durabilities, payloads, types, parents = zip(
            *rows, strict=True
        )
        first, now, prefix = self._number, self.steady_ns, self._known.prefix
        self._number = first + len(rows)
        self._count(queue, LANE_COUNTS[lanes[0]], -len(rows))
        which = [name or seq for name, seq in zip(names, seqs, strict=True)] if any(names) else seqs
        waited_us = [(now - ready) // 1000 for ready in ready_at]
        self.parts.append(
            LeasedRun(
                first, self.wall_us, terms.queue, lanes[0], terms.worker_id, which, attempts, waited_us
            )
        )  # fmt: skip
        if durabilities.count("os") != len(rows):
            self.synced = True
        ids = [each if isinstance(each, str) else f"{prefix}{each!s}" for each in which]
        leases = range(first, self._number)
        return map(
            Delivery, ids, repeat(terms.queue), payloads, types, parents, attempts, leases,
            repeat(terms.lease_ns),
        )  # fmt: skip

    def lease(self, heads: Sequence[tuple[Head, int]], worker_id: str, lease_ns: int) -> list[Record]:
        if [head for head, lane in heads if lane != head.record.lane]:
            return super().lease(heads, worker_id, lease_ns)
        if self._new:
            self._write_new()  # their numbers come first
        first = self._number
        leased = [
            lifecycle.lease(head.record, self._moment(number), worker_id, lease_ns).record
            for number, (head, _) in enumerate(heads, first)
        ]
        values = (first, worker_id, lease_ns, self._ends_at(self.steady_ns + lease_ns), self.wall_us)
        self.changes += 1
        self._update([one.seq for one in leased], sql.LEASE_ONE, sql.LEASE_ROW, sql.LEASE_MANY, values)
        for group in _groups(leased, queue_and_lane):
            self._note_engine_lease(group)
        return leased

    def _note_engine_lease(self, leased: list[Record]) -> None:
        """Count leased records of one queue and lane, and keep their events."""
        one, queue, now = leased[0], self._queue(leased[0].queue), self.steady_ns
        first, self._number = self._number, self._number + len(leased)
        self._count(queue, LANE_COUNTS[one.lane], -len(leased))
        self._count(queue, "PROCESSING", len(leased))
        self.parts.append(leased_run(first, self.wall_us, leased, now))
        if any(each.durability != "os" for each in leased):
            self.synced = True

    # ---- complete ------------------------------------------------------------------------------

    def complete(
        self, results: Mapping[str, tuple[int, bytes]], details: Mapping[str, dict[str, Any]] = NO_DETAILS
    ) -> Sequence[str]:
        numbers = [self._known.own_number(message_id) for message_id in results]
        if len(numbers) == 1:
            rows = ask(self._cursor, sql.LEASED_ONE, (numbers[0], self.steady_ns))
        else:
            rows = ask(self._cursor, sql.LEASED_MANY, (carray_of(numbers), self.steady_ns))
        tokens, values = zip(*results.values(), strict=True) if results else ((), ())
        if [row[1] for row in rows] != [*tokens]:
            return super().complete(results, details)  # ids of callers, repeated calls, stale leases
        self.changes += 1
        self._write_results(numbers, values)
        ids = iter(results)
        for holder_rows in _groups(rows, _holder):
            self._note_completed(holder_rows, [*islice(ids, len(holder_rows))], details)
        return [*results]

    def _write_results(self, numbers: list[int], results: Sequence[bytes]) -> None:
        first, results = self._number, self.codec.seal_results(numbers, results)
        if len(set(results)) == 1:  # most often they are all null
            values = (first, results[0], self.wall_us, zlib.crc32(results[0]))
            self._update(numbers, sql.COMPLETE_ONE, sql.COMPLETE_ROW, sql.COMPLETE_MANY, values)
        else:
            places = range(first, first + len(numbers))
            rows = zip(places, results, repeat(self.wall_us), map(zlib.crc32, results), numbers)
            self._raw_cursor.executemany(sql.COMPLETE_ONE, rows)

    def _note_completed(
        self, rows: list[Any], message_ids: list[str], details: Mapping[str, dict[str, Any]]
    ) -> None:
        """Count completed records of one queue, lane and worker, and keep their events."""
        seqs, leases, queues, lanes, workers, attempts, begins, durabilities = zip(*rows, strict=True)
        first, now, queue = self._number, self.steady_ns, queues[0]
        self._number = first + len(rows)
        worked_us = [(now - begin) // 1000 for begin in begins]
        names = message_ids if queue >= ENGINE_QUEUES else seqs
        self.parts.append(
            CompletedRun(
                first, self.wall_us, self._name(queue), lanes[0], workers[0], names, attempts, leases,
                worked_us, [details.get(each, {}) for each in message_ids] if details else (),
            )
        )  # fmt: skip
        self._count(queue, "PROCESSING", -len(rows))
        self._count(queue, "COMPLETED", len(rows))
        self.ended = True
        if durabilities.count("os") != len(rows):
            self.synced = True


class SqliteReading(SqliteTransaction):
    """One state of the file, through a reading connection."""

    is_reading = True
    _read: Known | None = None
    read_before: MutableMapping[apsw.Connection, Known] | None = None
    """The counters as each connection read them last: the next read adds what was committed since."""

    def _known_counts(self) -> Known:
        if self._read is None:
            connection, before = self._cursor.connection, self.read_before
            read = (None if before is None else before.pop(connection, None)) or Known()
            read.catch_up(self._cursor, from_start=not read.stored)
            if before is not None:
                before[connection] = read
            self._read = read
        return self._read


def _payload_bytes(row: Any) -> int:
    return len(row[_PAYLOAD])


def _groups(rows: list[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Neighbours with the same key."""
    if len(rows) == 1 or len(set(map(key, rows))) == 1:
        return [rows]
    return [list(group) for _, group in groupby(rows, key)]


def _is_any_promoted(rows: list[Any], now_ns: int, ages_ns: tuple[int, ...]) -> bool:
    return any(0 < row[1] <= len(ages_ns) and now_ns - row[3] >= ages_ns[row[1] - 1] for row in rows)


def _alike(envelopes: Sequence[Envelope]) -> list[Sequence[Envelope]]:
    """Neighbours that one statement can insert, in order. Long payloads are inserted one by one."""
    runs: list[Sequence[Envelope]] = []
    for _, neighbours in groupby(envelopes, traits):
        alike = list(neighbours)
        size = ALIKE_ROWS_MAX
        if max([len(e.payload) for e in alike]) > ALIKE_PAYLOAD_BYTES_MAX:
            size = 1
        runs += [alike[first : first + size] for first in range(0, len(alike), size)]
    return runs
