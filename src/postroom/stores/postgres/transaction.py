"""A transaction of PostgreSQL: faster forms of the hot verbs, above its ledger and its lanes.

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
    Pick,
    waiting,
    within_bytes,
)
from postroom.stores.event_runs import EVENTS_PER_NEW, CompletedRun, leased_run, queue_and_lane, traits
from postroom.stores.postgres.lanes import PostgresLanes
from postroom.stores.postgres.ledger import ALL, DEPTH_KNOWN_NS, FAR_FROM_FULL
from postroom.stores.postgres.rows import from_sql, to_sql
from postroom.stores.transaction import (
    NO_DETAILS,
    Accepted,
    Claim,
    Decide,
    Delivery,
    delivery_of,
    payload_bytes,
)

EVENTS_A_STEP_MAX = 4  # events of one decision
ALIKE_ROWS_MAX = 1_000
ALIKE_PAYLOAD_BYTES_MAX = 64 * 1024
DEPTH_KNOWN_MIN = 10_000  # a queue with a smaller limit is always counted


class PostgresTransaction(PostgresLanes):
    """One transaction of a connection."""

    # ---- insert ---------------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        for envelope in envelopes:
            limits = self.limits(envelope.queue)
            if envelope.message_id or envelope.key or len(envelope.payload) > limits.max_payload_bytes:
                return super().insert(envelopes)
        self._check_depths(envelopes)
        accepted: list[Accepted] = []
        for _, neighbours in groupby(envelopes, traits):
            run = list(neighbours)
            for first in range(0, len(run), ALIKE_ROWS_MAX):
                accepted += self._insert_alike(run[first : first + ALIKE_ROWS_MAX])
        return accepted

    def _insert_alike(self, run: list[Envelope]) -> list[Accepted]:
        """Number and count new records that differ only in their payloads. They are written later."""
        e = run[0]
        step = 1 if e.delay_ns else EVENTS_PER_NEW
        self._reserve(step * len(run))
        if self._new and not self._is_next_of_new(run, step):
            self._write_new()
        if not self._new:
            self._new_first = self._number
        self._new += run
        first = self.take_numbers(step * len(run))
        what: Counted = "SCHEDULED" if e.delay_ns else LANE_COUNTS[e.priority]
        self._count(e.queue, what, len(run))
        if not e.delay_ns:
            self.ready.add(e.queue)
        if e.durability != "os":
            self.synced = True
        numbers = range(first, first + step * len(run), step)
        return [Accepted(self.ids.new(e.queue, n, self.wall_us), duplicate=False) for n in numbers]

    def _is_next_of_new(self, run: list[Envelope], step: int) -> bool:
        new = self._new
        return (
            self._number == self._new_first + step * len(new)
            and len(new) + len(run) <= ALIKE_ROWS_MAX
            and len(run[0].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(new[-1].payload)
            and traits(new[0]) == traits(run[0])
        )

    def _check_depths(self, envelopes: Sequence[Envelope]) -> None:
        """As in `Transaction`. Transactions that insert into a queue near its limit take turns."""
        for queue, count in Counter(envelope.queue for envelope in envelopes).items():
            most, depth = self.limits(queue).max_depth, self._recent_depth(queue)
            if depth is None:
                depth = waiting(self.depth(queue))
            if depth + count > most * FAR_FROM_FULL or most < DEPTH_KNOWN_MIN:
                self.exclusive(f"depth {queue}")
                self._depths, self._has_all_depths = {}, False
                super()._check_depths([each for each in envelopes if each.queue == queue])
            for name in (queue, ALL) if org_of(queue) else (queue,):
                depth, read_ns = self._known.depths.get(name, (0, -DEPTH_KNOWN_NS))
                self._known.depths[name] = depth + count, read_ns

    # ---- lease and complete ---------------------------------------------------------------------------

    def claim(self, terms: Claim) -> list[Delivery]:
        if terms.promote_after_ns or self.has_overdue():
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
        self._queue_records()
        first, now = self.take_numbers(len(heads)), self.steady_ns
        leased = [
            lifecycle.lease(head.record, self._moment(number), worker_id, lease_ns).record
            for number, (head, _) in enumerate(heads, first)
        ]
        values = {
            "first": first, "worker": to_sql(worker_id), "lease_ns": lease_ns,
            "until": self._ends_at(now + lease_ns), "wall_us": self.wall_us,
            "seqs": [one.seq for one in leased],
        }  # fmt: skip
        self._pending.append((self._queries["lease_many"], values))
        for _, neighbours in groupby(leased, queue_and_lane):
            self._note_leased(list(neighbours))
        return leased

    def _note_leased(self, leased: list[Record]) -> None:
        """Count leased records of one queue and lane, and keep their events."""
        one = leased[0]
        self._count(one.queue, LANE_COUNTS[one.lane], -len(leased))
        self._count(one.queue, "PROCESSING", len(leased))
        self._append([leased_run(one.lease, self.wall_us, leased, self.steady_ns)], len(leased))
        if any(each.durability != "os" for each in leased):
            self.synced = True

    def complete(
        self, results: Mapping[str, tuple[int, bytes]], details: Mapping[str, dict[str, Any]] = NO_DETAILS
    ) -> Sequence[str]:
        numbers = {self._known.own_number(message_id): message_id for message_id in results}
        if 0 in numbers:
            return super().complete(results, details)  # ids of callers
        values = [*numbers], self.steady_ns
        rows = {row[0]: row for row in self._ask_to_change("leased", values, len(numbers))}
        if len(rows) < len(results) or any(
            rows[number][1] != results[message_id][0] for number, message_id in numbers.items()
        ):
            return super().complete(results, details)  # repeated calls, stale leases
        first = self.take_numbers(len(numbers))
        self._send_results(numbers, results, first)
        ordered = [rows[number] for number in numbers]
        place = first
        for _, neighbours in groupby(ordered, itemgetter(2, 3, 4)):
            same = list(neighbours)
            self._note_completed(place, same, [numbers[row[0]] for row in same], details)
            place += len(same)
        self.ended = True
        return [*results]

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
            self._pending.append((self._queries["complete_alike"], {**values, "result": contents[0]}))
        else:
            self._pending.append((self._queries["complete_many"], {**values, "results": contents}))

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
        self._append([run], len(rows))
        self._count(queue, "PROCESSING", -len(rows))
        self._count(queue, "COMPLETED", len(rows))
        if any(durability != "os" for durability in durabilities):
            self.synced = True

    # ---- everything else ------------------------------------------------------------------------------

    def apply(self, pick: Pick, decide: Decide) -> list[Step]:
        """As in `Transaction`, but numbers are taken only when there are records."""
        records = self._found_to_change(pick)
        if not records:
            return []
        self._reserve(EVENTS_A_STEP_MAX * len(records))
        first = self._number
        changes, number = self._decided(records, decide, first)
        if number > first:
            self.take_numbers(number - first)
        self._save(changes)
        return [change.step for change in changes]

    def _found_to_change(self, pick: Pick) -> list[Record]:
        """The picked records, locked."""
        records = self.find(pick)
        if isinstance(pick, Listing) and records:
            by_id = ByIds(tuple(record.message_id for record in records))
            records = [one for one in self.find(by_id) if pick.state in (None, one.state)]
        return records


class PostgresReading(PostgresTransaction):
    """One state of the database."""

    is_reading = True
