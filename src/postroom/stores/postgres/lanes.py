"""The lanes of a PostgreSQL transaction: which records can be claimed next.

Rule 1: claims and sweeps skip records that other transactions have locked.
Rule 2: what a worker will probably ask for next is read in the same trip.
"""

from collections.abc import Sequence
from typing import Any

from postroom.message import Record
from postroom.stores.base import Head
from postroom.stores.postgres.known import DEADLINES_KNOWN_NS
from postroom.stores.postgres.ledger import NUMBERS_AT_ONCE, ActiveLanes, PostgresLedger
from postroom.stores.postgres.rows import from_sql, to_sql

ACTIVE_MAX = 100  # lanes of organizations that are read together, as in `all_active`
HEADS_PEEKED_MAX = 8  # first records of a queue and lane that are read with the lanes, as in `all_heads`


class PostgresLanes(PostgresLedger):
    """The lanes of one transaction, above its ledger."""

    # ---- read ahead -----------------------------------------------------------------------------------

    def look_ahead(
        self,
        cells: Sequence[tuple[str, int]] = (),
        *,
        lanes: bool = False,
        heads: bool = True,
    ) -> None:
        scans = [(kind, "", limit) for kind, limit in cells if (kind, "", limit) not in self._scans]
        self._known.scans.update(dict.fromkeys(scans))
        asked: list[tuple[str, Any]] = [("cells", (to_sql(kind), "", limit)) for kind, _, limit in scans]
        asks_total = lanes and not heads and self._total is None
        asked += [("total", ())] if asks_total else []
        reads_lanes = lanes and self._lanes is None
        answers = iter(self._ask_lanes(asked, heads=heads) if reads_lanes else self._ask_all(asked))
        for scan in scans:
            self._scans[scan] = next(answers)
        if asks_total:
            self._set_total(next(answers))

    def _ask_lanes(self, asked: Sequence[tuple[str, Any]], *, heads: bool) -> list[list[Any]]:
        """Read the lanes of all organizations, in one trip with other queries; returns the rows of those.

        While a worker keeps up, the first records of all queues are read and locked, too: the worker will
        probably pull no others. Numbers are taken after the locks.
        """
        known = self._known
        peeks = heads and known.keeps_up and known.usual > 0 and not self.is_reading
        asked = [*asked, ("all_oldest", ()), ("all_heads" if peeks else "all_active", ())]
        if peeks:
            asked.append(("take_numbers", (NUMBERS_AT_ONCE, *self._spare())))
        unsent = self._unsent()
        answers = [answer.rows for answer in self._trip(unsent, asked)]
        self._has_locked = True
        if peeks:
            [(first,)] = answers.pop()
            self._took(first, NUMBERS_AT_ONCE)
        else:
            self._has_fresh_numbers = False
        rows = answers.pop()
        oldest = {record.lane: record for record in map(self._record, answers.pop())}
        if not peeks:
            active = [(lane, from_sql(queue)) for lane, queue in rows]
        else:
            found = [self._head(row) for row in rows]
            active = [*dict.fromkeys((head.record.lane, head.record.queue) for head in found)]
            self._peeked = {(queue, lane): [] for lane, queue in active}
            for head in found:
                self._peeked[head.record.queue, head.record.lane].append(head)
            known.keeps_up = all(len(few) < HEADS_PEEKED_MAX for few in self._peeked.values())
        queues: dict[int, list[str]] = {}
        for lane, queue in active:
            queues.setdefault(lane, []).append(queue)
        self._lanes = ActiveLanes(len(active) < ACTIVE_MAX, queues, oldest)
        return answers

    def look_ahead_pulls(self, pulls: Sequence[tuple[str, int, int]]) -> None:
        if all(self._has_peeked(*pull) for pull in pulls):
            return
        names, lanes, limits = zip(
            *((to_sql(queue), lane, limit) for queue, lane, limit in pulls), strict=True
        )
        rows = self._ask_to_change("pull_many", ([*names], [*lanes], [*limits]), sum(limits))
        found: dict[tuple[str, int], list[Head]] = {pull[:2]: [] for pull in pulls}
        for row in rows:
            head = self._head(row)
            found[head.record.queue, head.record.lane].append(head)
        self._pulled = {(queue, lane, limit): found[queue, lane] for queue, lane, limit in pulls}
        self._known.keeps_up = len(rows) < sum(limits)

    # ---- lanes ----------------------------------------------------------------------------------------

    def _has_peeked(self, queue: str, lane: int, limit: int) -> bool:
        """Whether a pull needs no query."""
        few = self._peeked.get((queue, lane), ())
        return bool(few) and (len(few) < HEADS_PEEKED_MAX or limit <= HEADS_PEEKED_MAX)

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        heads = self._pull(queue, lane, limit)
        if self.is_reading:  # for ages and depths, which need no payload
            return heads
        opened, unreadable = self.codec.open_heads(heads)
        if not unreadable:
            return opened
        self.quarantine(unreadable)
        return self.pull(queue, lane, limit)

    def _pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        if self._has_peeked(queue, lane, limit):
            return self._peeked[queue, lane][:limit]
        pulled = self._pulled.pop((queue, lane, limit), None)
        if pulled is not None:
            return pulled
        values = lane, to_sql(queue), limit
        asked = (
            self._ask_records("pull", values)
            if self.is_reading
            else self._ask_to_change("pull", values, limit)
        )
        self._known.keeps_up = len(asked) < limit
        return [self._head(row) for row in asked]

    def _head(self, row: Sequence[Any]) -> Head:
        return Head(self._record(row[:24]), row[24], from_sql(row[25]), from_sql(row[26]))

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        numbers = [self._known.own_number(message_id) for message_id in message_ids]
        if not all(numbers):
            return super().heads(message_ids)
        rows = self._ask_records("heads_by_seq", (numbers,))
        found = {row[0]: self._head(row) for row in rows}
        wanted = set(message_ids)
        heads = [found[number] for number in numbers if number in found]
        opened, unreadable = self.codec.open_heads([one for one in heads if one.record.message_id in wanted])
        if not self.is_reading:
            self.quarantine([one for one in unreadable if one[0].state == "QUEUED"])
        return opened

    def filled(self) -> list[int]:
        return sorted(self._all_lanes().active)

    def is_alone(self, queue: str, lane: int) -> bool:
        lanes = self._all_lanes()
        return lanes.has_all and lanes.active.get(lane) == [queue]

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        if self._lanes is not None and self._lanes.has_all:
            return [queue for queue in self._lanes.active.get(lane, ()) if queue > after][:limit]
        values = {"lane": lane, "after": to_sql(after), "limit": limit}
        return [from_sql(queue) for (queue,) in self._ask_records("active", values)]

    def oldest(self, lane: int) -> Record | None:
        return self._all_lanes().oldest.get(lane)

    def _all_lanes(self) -> ActiveLanes:
        if self._lanes is None:
            self._ask_lanes((), heads=True)
        assert self._lanes is not None  # noqa: S101 - for the type checker: just read
        return self._lanes

    # ---- deadlines ------------------------------------------------------------------------------------

    def put_back(self, limit: int) -> int:
        return super().put_back(limit) if self.has_overdue() else 0

    def has_overdue(self) -> bool:
        """Whether a lease or delay is over, by deadlines that may be `DEADLINES_KNOWN_NS` old."""
        first_ns, read_ns = self._known.deadlines
        now = self.steady_ns
        if first_ns <= now or not read_ns <= now < read_ns + DEADLINES_KNOWN_NS:
            self._known.set_deadlines(self._ask_records("first_deadlines", ())[0], now)
            first_ns, _ = self._known.deadlines
        return first_ns <= now
