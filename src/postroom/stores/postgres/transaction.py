"""A transaction of PostgreSQL: its parts, and faster forms of the hot verbs.

Rule 1: a faster form covers the common case. Everything else goes to the verb of `Transaction`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope, Record, Step, org_of
from postroom.stores.base import (
    LANE_COUNTS,
    ByIds,
    Counted,
    Head,
    Listing,
    Parts,
    Pick,
    waiting,
    within_bytes,
)
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    CompletedRun,
    StartedRun,
    leased_run,
    pack,
    queue_and_lane,
    traits,
)
from postroom.stores.postgres.lanes import ALL, DEPTH_KNOWN_NS, FAR_FROM_FULL, PostgresLanes
from postroom.stores.postgres.ledger import ALIKE_ROWS_MAX, PostgresLedger
from postroom.stores.postgres.parts import PostgresCells, PostgresEvents, PostgresRecords
from postroom.stores.postgres.rows import from_sql, to_sql
from postroom.stores.transaction import (
    NO_DETAILS,
    NO_STARTS,
    Accepted,
    Claim,
    Decide,
    Delivery,
    Transaction,
    delivery_of,
    payload_bytes,
)

EVENTS_A_STEP_MAX = 4  # events of one decision
DEPTH_KNOWN_MIN = 10_000  # a queue with a smaller limit is always counted
NO_SCANS: Mapping[tuple[str, str, int], list[Any]] = {}


class PostgresTransaction(Transaction):
    """One transaction of a connection, or one state of the database."""

    cells: PostgresCells
    lanes: PostgresLanes

    def __init__(
        self, ledger: PostgresLedger, scans: Mapping[tuple[str, str, int], list[Any]] = NO_SCANS
    ) -> None:
        """`scans` are pages of cells that were read when the transaction began."""
        known, self.ledger = ledger.known, ledger
        self.codec = known.codec
        lanes, cells = PostgresLanes(ledger), PostgresCells(ledger, scans)
        parts = Parts(PostgresRecords(ledger, lanes), PostgresEvents(ledger), cells, lanes)
        super().__init__(known, known.limits, ledger.steady_ns, ledger.wall_us, parts)

    @property
    def changes(self) -> int:
        return self.ledger.changes

    # ---- other transactions ---------------------------------------------------------------------------

    def exclusive(self, name: str) -> None:
        if self.ledger.is_reading:
            self.cells.scans.clear()
        else:
            self.cells.forget_read()
            self.ledger.ask("lock_name", (to_sql(name),))

    def look_ahead(
        self, cells: Sequence[tuple[str, int]] = (), *, lanes: bool = False, heads: bool = True
    ) -> None:
        known = self.cells.scans
        scans = [(kind, "", limit) for kind, limit in cells if (kind, "", limit) not in known]
        self.ledger.known.scans.update(dict.fromkeys(scans))
        asked = [("cells", (to_sql(kind), "", limit)) for kind, _, limit in scans]
        answers = self.lanes.read_ahead(asked, lanes=lanes, heads=heads)
        known.update(zip(scans, answers, strict=True))

    def look_ahead_pulls(self, pulls: Sequence[tuple[str, int, int]]) -> None:
        self.lanes.read_pulls_ahead(pulls)

    def flush(self) -> None:
        """Send the cells, which can meet a conflict, after the records."""
        self.ledger.queue_records()
        self.cells.write()

    def commit(self, writer: int) -> None:
        """Send the rest, and commit, in one trip to the server. `writer` marks the commit."""
        ledger = self.ledger
        changes = [(to_sql(queue), what, n) for (queue, what), n in self.lanes.counts.items() if n]
        statements, last = ledger.unsent(), ledger.last_number
        batch = pack(ledger.parts)
        if ledger.parts:  # a commit of cells alone has no number
            batch = self.codec.seal_batch(last, batch)
        if changes:
            statements.append((ledger.queries["count"], tuple(map(list, zip(*changes, strict=True)))))
        statements.append((ledger.queries["append_events"], (last, writer, ledger.event_count, batch)))
        if not self.synced:
            statements.append(("SET LOCAL synchronous_commit = off", ()))
        ledger.connection.trip([*statements, ("COMMIT", ())])

    # ---- insert ---------------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        for envelope in envelopes:
            limits = self.limits(envelope.queue)
            if envelope.message_id or envelope.key or len(envelope.payload) > limits.max_payload_bytes:
                return super().insert(envelopes)
        self.check_depths(envelopes)
        accepted: list[Accepted] = []
        for _, neighbours in groupby(envelopes, traits):
            run = list(neighbours)
            for first in range(0, len(run), ALIKE_ROWS_MAX):
                accepted += self._insert_alike(run[first : first + ALIKE_ROWS_MAX])
        return accepted

    def _insert_alike(self, run: list[Envelope]) -> list[Accepted]:
        """Number and count new records that differ only in their payloads. They are written later."""
        e = run[0]
        numbers = self.ledger.add(run, 1 if e.delay_ns else EVENTS_PER_NEW)
        what: Counted = "SCHEDULED" if e.delay_ns else LANE_COUNTS[e.priority]
        self.lanes.count(e.queue, what, len(run))
        if not e.delay_ns:
            self.ready.add(e.queue)
        if e.durability != "os":
            self.synced = True
        return [Accepted(self.ids.new(e.queue, n, self.wall_us), duplicate=False) for n in numbers]

    def check_depths(self, envelopes: Sequence[Envelope]) -> None:
        """As in `Transaction`. Transactions that insert into a queue near its limit take turns."""
        depths = self.ledger.known.depths
        for queue, count in Counter(envelope.queue for envelope in envelopes).items():
            most, depth = self.limits(queue).max_depth, self.lanes.recent_depth(queue)
            if depth is None:
                depth = waiting(self.lanes.depth(queue))
            if depth + count > most * FAR_FROM_FULL or most < DEPTH_KNOWN_MIN:
                self.exclusive(f"depth {queue}")
                self.lanes.forget_depths()
                super().check_depths([each for each in envelopes if each.queue == queue])
            for name in (queue, ALL) if org_of(queue) else (queue,):
                depth, read_ns = depths.get(name, (0, -DEPTH_KNOWN_NS))
                depths[name] = depth + count, read_ns

    # ---- lease and complete ---------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        if terms.promote_after_ns or self.lanes.has_overdue():
            return super().claim(terms)
        heads: list[Head] = []
        for lane in sorted(terms.lanes):
            if len(heads) < terms.limit:
                heads += self.pull(terms.queue, lane, terms.limit - len(heads))
        if any(head.record.expires for head in heads):
            return super().claim(terms)
        if not heads:
            return []
        heads = within_bytes(heads, payload_bytes)
        leased = self.lease([(head, head.record.lane) for head in heads], terms.worker_id, terms.lease_ns)
        return [delivery_of(head, record) for head, record in zip(heads, leased, strict=True)]

    def lease(self, heads: Sequence[tuple[Head, int]], worker_id: str, lease_ns: int) -> list[Record]:
        if not heads or any(lane != head.record.lane for head, lane in heads):
            return super().lease(heads, worker_id, lease_ns)
        self.ledger.queue_records()
        first, now = self.ledger.take_numbers(len(heads)), self.steady_ns
        leased = [
            lifecycle.lease(head.record, self._moment(number), worker_id, lease_ns).record
            for number, (head, _) in enumerate(heads, first)
        ]
        values = {
            "first": first, "worker": to_sql(worker_id), "lease_ns": lease_ns,
            "until": self.ledger.ends_at(now + lease_ns), "wall_us": self.wall_us,
            "seqs": [one.seq for one in leased],
        }  # fmt: skip
        self.ledger.pending.append((self.ledger.queries["lease_many"], values))
        for _, neighbours in groupby(leased, queue_and_lane):
            self._note_leased(list(neighbours))
        return leased

    def _note_leased(self, leased: list[Record]) -> None:
        """Count leased records of one queue and lane, and keep their events."""
        one = leased[0]
        self.lanes.count(one.queue, LANE_COUNTS[one.lane], -len(leased))
        self.lanes.count(one.queue, "PROCESSING", len(leased))
        self.ledger.append([leased_run(one.lease, self.wall_us, leased, self.steady_ns)], len(leased))
        if any(each.durability != "os" for each in leased):
            self.synced = True

    def complete(
        self,
        results: Mapping[str, tuple[int, bytes]],
        details: Mapping[str, dict[str, Any]] = NO_DETAILS,
        started: Mapping[str, int] = NO_STARTS,
    ) -> Sequence[str]:
        numbers = {self.ledger.known.own_number(message_id): message_id for message_id in results}
        if 0 in numbers:
            return super().complete(results, details, started)  # ids of callers
        values = [*numbers], self.steady_ns
        rows = {
            row[0]: row for row in self.ledger.ask_to_change("leased", values, len(numbers) + len(started))
        }
        if len(rows) < len(results) or any(
            rows[number][1] != results[message_id][0] for number, message_id in numbers.items()
        ):
            return super().complete(results, details, started)  # repeated calls, stale leases
        ordered = [rows[number] for number in numbers]
        if started:
            self._note_started(
                [(row, numbers[row[0]]) for row in ordered if numbers[row[0]] in started], started
            )
        first = self.ledger.take_numbers(len(numbers))
        self._send_results(numbers, results, first)
        place = first
        for _, neighbours in groupby(ordered, itemgetter(2, 3, 4)):
            same = list(neighbours)
            self._note_completed(place, same, [numbers[row[0]] for row in same], details)
            place += len(same)
        self.ended = True
        return [*results]

    def _note_started(self, begun: list[tuple[Any, str]], started: Mapping[str, int]) -> None:
        for _, neighbours in groupby(begun, lambda one: one[0][2:5]):
            rows, message_ids = zip(*neighbours, strict=True)
            _, leases, queues, lanes, workers, attempts, *_ = zip(*rows, strict=True)
            first = self.ledger.take_numbers(len(rows))
            run = StartedRun(
                first, from_sql(queues[0]), lanes[0], from_sql(workers[0]), message_ids, attempts, leases,
                [started[each] for each in message_ids],
            )  # fmt: skip
            self.ledger.append([run], len(rows))

    def _send_results(
        self, numbers: Mapping[int, str], results: Mapping[str, tuple[int, bytes]], first: int
    ) -> None:
        values: dict[str, Any] = {
            "wall_us": self.wall_us, "seqs": [*numbers], "places": [*range(first, first + len(numbers))]
        }  # fmt: skip
        contents = self.codec.seal_results(
            [*numbers], [results[message_id][1] for message_id in numbers.values()]
        )
        if len(set(contents)) == 1:  # most often they are all null
            self.ledger.pending.append(
                (self.ledger.queries["complete_alike"], {**values, "result": contents[0]})
            )
        else:
            self.ledger.pending.append(
                (self.ledger.queries["complete_many"], {**values, "results": contents})
            )

    def _note_completed(
        self, first: int, rows: list[Any], message_ids: list[str], details: Mapping[str, dict[str, Any]]
    ) -> None:
        """Count completed records of one queue, lane and worker, and keep their events."""
        _, leases, queues, lanes, workers, attempts, begins, durabilities = zip(*rows, strict=True)
        queue, now = from_sql(queues[0]), self.steady_ns
        run = CompletedRun(
            first, self.wall_us, queue, lanes[0], from_sql(workers[0]), message_ids, attempts, leases,
            [(now - begin) // 1000 for begin in begins],
            [details.get(each, {}) for each in message_ids] if details else (),
        )  # fmt: skip
        self.ledger.append([run], len(rows))
        self.lanes.count(queue, "PROCESSING", -len(rows))
        self.lanes.count(queue, "COMPLETED", len(rows))
        if any(durability != "os" for durability in durabilities):
            self.synced = True

    # ---- everything else ------------------------------------------------------------------------------

    def apply(self, pick: Pick, decide: Decide) -> list[Step]:
        """As in `Transaction`, but numbers are taken only when there are records."""
        records = self._found_to_change(pick)
        if not records:
            return []
        self.ledger.reserve(EVENTS_A_STEP_MAX * len(records))
        first = self.ledger.number
        changes, number = self._decided(records, decide, first)
        if number > first:
            self.ledger.take_numbers(number - first)
        self._save(changes)
        return [change.step for change in changes]

    def _found_to_change(self, pick: Pick) -> list[Record]:
        """The picked records, locked."""
        records = self.records.find(pick)
        if isinstance(pick, Listing) and records:
            by_id = ByIds(tuple(record.message_id for record in records))
            records = [one for one in self.records.find(by_id) if pick.state in (None, one.state)]
        return records
