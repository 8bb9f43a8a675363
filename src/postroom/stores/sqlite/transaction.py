"""A transaction of a store file: its parts, and faster forms of the hot verbs in SQL.

Rule 1: a faster form covers the common case. Everything else goes to the verb of `Transaction`.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice, repeat
from operator import itemgetter
from typing import Any

from postroom.core.lifecycle import lifecycle
from postroom.errors import UnreadableValue
from postroom.message import Envelope, Noted, Record, org_of
from postroom.stores.base import (
    LANE_COUNTS,
    Cells,
    Events,
    Head,
    Lanes,
    Limits,
    Records,
    waiting,
    within_bytes,
)
from postroom.stores.event_runs import (
    CompletedRun,
    LeasedRun,
    NotedRun,
    StartedRun,
    leased_run,
    queue_and_lane,
)
from postroom.stores.sqlite.ledger import SqliteLedger, alike_runs, carray_of, line_of
from postroom.stores.sqlite.parts import SqliteCells, SqliteEvents, SqliteLanes, SqliteRecords
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import ENGINE_QUEUES, ask
from postroom.stores.transaction import NO_DETAILS, NO_STARTS, Accepted, Claim, Delivery, Transaction, lazily

_PAYLOAD = 8  # the column of a row of HEADS
_lane = itemgetter(1)  # of a row of HEADS
_holder = itemgetter(2, 3, 4)  # of a row of LEASED: queue, lane and worker


def _holder_of_start(begun: tuple[Any, str]) -> Any:
    return _holder(begun[0])


class SqliteTransaction(Transaction):
    """One transaction of the writing connection, or one state that a reading connection sees."""

    records: Records = lazily(SqliteRecords)
    events: Events = lazily(SqliteEvents)
    cells: Cells = lazily(SqliteCells)
    lanes: Lanes = lazily(SqliteLanes)

    def __init__(self, ledger: SqliteLedger) -> None:
        # As in `Transaction.__init__`, without the call: this runs for every commit.
        known = ledger.known
        self.ledger = ledger
        self.ids = known
        self.codec = known.codec
        self.steady_ns = ledger.steady_ns
        self.wall_us = ledger.wall_us
        self.ready: set[str] = set()
        self.limits_known = known.limits
        self._limits: dict[str, Limits] = {}

    @property
    def changes(self) -> int:
        return self.ledger.changes

    def note(self, noted: Sequence[Noted]) -> None:
        if noted:
            ledger = self.ledger
            ledger.append(NotedRun(ledger.take_numbers(len(noted)), self.wall_us, noted))

    # ---- insert --------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        runs = [envelopes] if len(envelopes) == 1 else alike_runs(envelopes)
        for run in runs:
            if not self._is_plain(run, len(envelopes)):
                return super().insert(envelopes)  # ids and keys of callers, or a limit is reached
        accepted: list[Accepted] = []
        add = self.ledger.add
        for run in runs:
            e, numbers = run[0], add(run)
            if not e.delay_ns:
                self.ready.add(e.queue)
            if e.durability != "os":
                self.synced = True
            if org_of(e.queue):
                new, now_us = self.ids.messages.new, self.wall_us
                accepted += [Accepted(new(number, now_us), False) for number in numbers]  # noqa: FBT003
            else:
                prefix = self.ids.prefix
                accepted += [Accepted(f"{prefix}{number!s}", False) for number in numbers]  # noqa: FBT003
        return accepted

    def _is_plain(self, run: Sequence[Envelope], count: int) -> bool:
        e = run[0]
        if e.message_id or e.key or e.sender:
            return False
        limits, ledger = self._limits.get(e.queue) or self.limits(e.queue), self.ledger
        longest = len(e.payload) if len(run) == 1 else max([len(each.payload) for each in run])
        known = ledger.known
        depth = waiting(known.depths[known.numbers.get(e.queue) or ledger.queue(e.queue)])
        return longest <= limits.max_payload_bytes and depth + count <= limits.max_depth

    # ---- claim ---------------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        ledger, now = self.ledger, self.steady_ns
        if ledger.has_overdue():
            return super().claim(terms)
        queue, cursor, limit = ledger.queue(terms.queue), ledger.cursor, terms.limit
        depths = ledger.known.depths[queue]
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
                [found] = ask(self.ledger.cursor, f"{sql.RECORD} WHERE seq = ?", (row[0],))
                unreadable.append((self.ledger.record(found), error))
            else:
                opened.append((*row[:_PAYLOAD], payload, *row[_PAYLOAD + 1 :]))
        return opened, unreadable

    def _lease_rows(self, queue: int, rows: list[Any], terms: Claim) -> list[Delivery]:
        ledger = self.ledger
        until_ns = ledger.ends_at(self.steady_ns + terms.lease_ns)
        values = (ledger.number, terms.worker_id, terms.lease_ns, until_ns, self.wall_us)
        ledger.changes += 1
        ledger.update([row[0] for row in rows], sql.LEASE_ONE, sql.LEASE_ROW, sql.LEASE_MANY, values)
        ledger.count(queue, "PROCESSING", len(rows))
        deliveries: list[Delivery] = []
        for lane_rows in _groups(rows, _lane):
            deliveries += self._note_leased(queue, lane_rows, terms)
        return deliveries

    def _note_leased(self, queue: int, rows: list[Any], terms: Claim) -> Iterator[Delivery]:
        """Count leased records of one lane, and keep their events."""
        seqs, lanes, _, ready_at, _, names, attempts, durabilities, payloads, types, parents = zip(
            *rows, strict=True
        )
        ledger, now, prefix = self.ledger, self.steady_ns, self.ids.prefix
        first, ledger.number = ledger.number, ledger.number + len(rows)
        ledger.count(queue, LANE_COUNTS[lanes[0]], -len(rows))
        which = [name or seq for name, seq in zip(names, seqs, strict=True)] if any(names) else seqs
        waited_us = [(now - ready) // 1000 for ready in ready_at]
        ledger.parts.append(
            LeasedRun(
                first, self.wall_us, terms.queue, lanes[0], terms.worker_id, which, attempts, waited_us
            )
        )  # fmt: skip
        if durabilities.count("os") != len(rows):
            self.synced = True
        ids = [each if isinstance(each, str) else f"{prefix}{each!s}" for each in which]
        leases = range(first, ledger.number)
        return map(
            Delivery, ids, repeat(terms.queue), payloads, types, parents, attempts, leases,
            repeat(terms.lease_ns),
        )  # fmt: skip

    def lease(self, heads: Sequence[tuple[Head, int]], worker_id: str, lease_ns: int) -> list[Record]:
        if [head for head, lane in heads if lane != head.record.lane]:
            return super().lease(heads, worker_id, lease_ns)
        ledger, now = self.ledger, self.steady_ns
        if ledger.new:
            ledger.write_new()  # their numbers come first
        first = ledger.number
        leased = [
            lifecycle.lease(head.record, self._moment(number), worker_id, lease_ns).record
            for number, (head, _) in enumerate(heads, first)
        ]
        values = (first, worker_id, lease_ns, ledger.ends_at(now + lease_ns), self.wall_us)
        ledger.changes += 1
        ledger.update([one.seq for one in leased], sql.LEASE_ONE, sql.LEASE_ROW, sql.LEASE_MANY, values)
        for group in _groups(leased, queue_and_lane):
            one, queue = group[0], ledger.queue(group[0].queue)
            ledger.count(queue, LANE_COUNTS[one.lane], -len(group))
            ledger.count(queue, "PROCESSING", len(group))
            ledger.parts.append(leased_run(ledger.number, self.wall_us, group, now))
            ledger.number += len(group)
        if any(one.durability != "os" for one in leased):
            self.synced = True
        return leased

    # ---- complete ------------------------------------------------------------------------------

    def complete(
        self,
        results: Mapping[str, tuple[int, bytes]],
        details: Mapping[str, dict[str, Any]] = NO_DETAILS,
        started: Mapping[str, int] = NO_STARTS,
    ) -> Sequence[str]:
        ledger, own_number = self.ledger, self.ids.own_number
        numbers = [own_number(message_id) for message_id in results]
        if len(numbers) == 1:
            rows = ask(ledger.cursor, sql.LEASED_ONE, (numbers[0], self.steady_ns))
        else:
            rows = ask(ledger.cursor, sql.LEASED_MANY, (carray_of(numbers), self.steady_ns))
        tokens, values = zip(*results.values(), strict=True) if results else ((), ())
        if [row[1] for row in rows] != [*tokens]:
            return super().complete(results, details, started)  # ids of callers, repeats, stale leases
        if started:
            begun = [(row, one) for row, one in zip(rows, results, strict=True) if one in started]
            self._note_started(begun, started)
        ledger.changes += 1
        self._write_results(numbers, self.codec.seal_results(numbers, values))
        ids = iter(results)
        for holder_rows in _groups(rows, _holder):
            self._note_completed(holder_rows, [*islice(ids, len(holder_rows))], details)
        return [*results]

    def _note_started(self, begun: list[tuple[Any, str]], started: Mapping[str, int]) -> None:
        """Keep the events that handlers began."""
        ledger = self.ledger
        for each in _groups(begun, _holder_of_start):
            rows, message_ids = zip(*each, strict=True)
            seqs, leases, queues, lanes, workers, attempts, *_ = zip(*rows, strict=True)
            names = message_ids if queues[0] >= ENGINE_QUEUES else seqs
            ledger.append(
                StartedRun(
                    ledger.take_numbers(len(rows)), ledger.name(queues[0]), lanes[0], workers[0], names,
                    attempts, leases, [started[one] for one in message_ids],
                )
            )  # fmt: skip

    def _write_results(self, numbers: list[int], results: Sequence[bytes]) -> None:
        ledger, first = self.ledger, self.ledger.number
        if len(set(results)) == 1:  # most often they are all null
            values = (first, results[0], self.wall_us, zlib.crc32(results[0]))
            ledger.update(numbers, sql.COMPLETE_ONE, sql.COMPLETE_ROW, sql.COMPLETE_MANY, values)
        else:
            places = range(first, first + len(numbers))
            rows = zip(places, results, repeat(self.wall_us), map(zlib.crc32, results), numbers)
            ledger.raw_cursor.executemany(sql.COMPLETE_ONE, rows)

    def _note_completed(
        self, rows: list[Any], message_ids: list[str], details: Mapping[str, dict[str, Any]]
    ) -> None:
        """Count completed records of one queue, lane and worker, and keep their events."""
        seqs, leases, queues, lanes, workers, attempts, begins, durabilities = zip(*rows, strict=True)
        ledger, now, queue = self.ledger, self.steady_ns, queues[0]
        first, ledger.number = ledger.number, ledger.number + len(rows)
        worked_us = [(now - begin) // 1000 for begin in begins]
        names = message_ids if queue >= ENGINE_QUEUES else seqs
        ledger.parts.append(
            CompletedRun(
                first, self.wall_us, ledger.name(queue), lanes[0], workers[0], names, attempts, leases,
                worked_us, [details.get(each, {}) for each in message_ids] if details else (),
            )
        )  # fmt: skip
        ledger.count(queue, "PROCESSING", -len(rows))
        ledger.count(queue, "COMPLETED", len(rows))
        self.ended = True
        if durabilities.count("os") != len(rows):
            self.synced = True


def _payload_bytes(row: Any) -> int:
    return len(row[_PAYLOAD])


def _groups(rows: list[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Neighbours with the same key."""
    if len(rows) == 1 or len(set(map(key, rows))) == 1:
        return [rows]
    return [list(group) for _, group in groupby(rows, key)]


def _is_any_promoted(rows: list[Any], now_ns: int, ages_ns: tuple[int, ...]) -> bool:
    return any(0 < row[1] <= len(ages_ns) and now_ns - row[3] >= ages_ns[row[1] - 1] for row in rows)
