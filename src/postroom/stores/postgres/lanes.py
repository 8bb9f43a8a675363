"""The lanes of a PostgreSQL transaction: the counters, and which records can be claimed next.

Rule 1: claims and sweeps skip records that other transactions have locked.
Rule 2: what a worker will probably ask for next is read in the same trip.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from postroom.message import Record, org_of
from postroom.stores.base import Counted, Head, Lanes, ready, waiting
from postroom.stores.postgres.known import DEADLINES_KNOWN_NS
from postroom.stores.postgres.ledger import NUMBERS_AT_ONCE, PostgresLedger
from postroom.stores.postgres.rows import from_sql, to_sql

ACTIVE_MAX = 100  # lanes of organizations that are read together, as in `all_active`
HEADS_PEEKED_MAX = 8  # first records of a queue and lane that are read with the lanes, as in `all_heads`
DEPTH_KNOWN_NS = 100_000_000  # for how long a handle trusts the depth of a queue that is far from its limit
FAR_FROM_FULL = 0.5  # the share of its limit below which a queue is far from it
DEPTHS_TOGETHER_MAX = 16  # queues whose depths are read in one query
ALL = ""  # the key of the depth of all organizations together


class ActiveLanes(NamedTuple):
    """The lanes of all organizations, as they were read together."""

    has_all: bool
    """Whether `active` has every queue; otherwise there are too many."""
    active: dict[int, list[str]]
    """The queues that have QUEUED records in a lane, in order."""
    oldest: dict[int, Record]
    """The record that has waited longest in a lane."""


class PostgresLanes(Lanes):
    """The counters and the lanes of one transaction."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger
        self.counts: dict[tuple[str, Counted], int] = {}
        """By how much the transaction changed each counter."""
        self._depths: dict[str, dict[Counted, int]] = {}
        self._has_all_depths = False
        self._total: dict[Counted, int] | None = None
        self._active: int | None = None
        self._lanes: ActiveLanes | None = None
        self._pulled: dict[tuple[str, int, int], list[Head]] = {}
        """Heads that were read ahead, by queue, lane and limit."""
        self._peeked: dict[tuple[str, int], list[Head]] = {}
        """The first heads of queues, by queue and lane: up to `HEADS_PEEKED_MAX` of each."""

    # ---- read ahead -----------------------------------------------------------------------------------

    def read_ahead(self, asked: Sequence[tuple[str, Any]], *, lanes: bool, heads: bool) -> list[list[Any]]:
        """Answer queries of others, and read the lanes or the counters of all organizations in the trip."""
        asks_total = lanes and not heads and self._total is None
        asked = [*asked, ("total", ())] if asks_total else asked
        reads_lanes = lanes and self._lanes is None
        answers = self._ask_lanes(asked, heads=heads) if reads_lanes else self._ledger.ask_all(asked)
        if asks_total:
            self._set_total(answers.pop())
        return answers

    def _ask_lanes(self, asked: Sequence[tuple[str, Any]], *, heads: bool) -> list[list[Any]]:
        """Read the lanes of all organizations, in one trip with other queries; returns the rows of those.

        While a worker keeps up, the first records of all queues are read and locked, too: the worker will
        probably pull no others. Numbers are taken after the locks.
        """
        known = self._ledger.known
        peeks = heads and known.keeps_up and known.usual > 0 and not self._ledger.is_reading
        asked = [*asked, ("all_oldest", ()), ("all_heads" if peeks else "all_active", ())]
        if peeks:
            asked.append(("take_numbers", (NUMBERS_AT_ONCE, *self._ledger.spare())))
        unsent = self._ledger.unsent()
        answers = [answer.rows for answer in self._ledger.trip(unsent, asked)]
        self._ledger.note_locks()
        if peeks:
            [(first,)] = answers.pop()
            self._ledger.took(first, NUMBERS_AT_ONCE)
        rows = answers.pop()
        oldest = {record.lane: record for record in map(self._ledger.record, answers.pop())}
        if not peeks:
            active = [(lane, from_sql(queue)) for lane, queue in rows]
        else:
            found = [self._ledger.head(row) for row in rows]
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

    def read_pulls_ahead(self, pulls: Sequence[tuple[str, int, int]]) -> None:
        """Read the records of several pulls in one trip."""
        if all(self._has_peeked(*pull) for pull in pulls):
            return
        names, lanes, limits = zip(
            *((to_sql(queue), lane, limit) for queue, lane, limit in pulls), strict=True
        )
        rows = self._ledger.ask_to_change("pull_many", ([*names], [*lanes], [*limits]), sum(limits))
        found: dict[tuple[str, int], list[Head]] = {pull[:2]: [] for pull in pulls}
        for row in rows:
            head = self._ledger.head(row)
            found[head.record.queue, head.record.lane].append(head)
        self._pulled = {(queue, lane, limit): found[queue, lane] for queue, lane, limit in pulls}
        self._ledger.known.keeps_up = len(rows) < sum(limits)

    # ---- lanes ----------------------------------------------------------------------------------------

    def _has_peeked(self, queue: str, lane: int, limit: int) -> bool:
        """Whether a pull needs no query."""
        few = self._peeked.get((queue, lane), ())
        return bool(few) and (len(few) < HEADS_PEEKED_MAX or limit <= HEADS_PEEKED_MAX)

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        if self._has_peeked(queue, lane, limit):
            return self._peeked[queue, lane][:limit]
        pulled = self._pulled.pop((queue, lane, limit), None)
        if pulled is not None:
            return pulled
        values = lane, to_sql(queue), limit
        asked = (
            self._ledger.ask_records("pull", values)
            if self._ledger.is_reading
            else self._ledger.ask_to_change("pull", values, limit)
        )
        self._ledger.known.keeps_up = len(asked) < limit
        return [self._ledger.head(row) for row in asked]

    def filled(self) -> list[int]:
        return sorted(self._all_lanes().active)

    def is_alone(self, queue: str, lane: int) -> bool:
        lanes = self._all_lanes()
        return lanes.has_all and lanes.active.get(lane) == [queue]

    def active(self, lane: int, after: str, limit: int) -> list[str]:
        if self._lanes is not None and self._lanes.has_all:
            return [queue for queue in self._lanes.active.get(lane, ()) if queue > after][:limit]
        values = {"lane": lane, "after": to_sql(after), "limit": limit}
        return [from_sql(queue) for (queue,) in self._ledger.ask_records("active", values)]

    def oldest(self, lane: int) -> Record | None:
        return self._all_lanes().oldest.get(lane)

    def _all_lanes(self) -> ActiveLanes:
        if self._lanes is None:
            self._ask_lanes((), heads=True)
        assert self._lanes is not None  # noqa: S101 - for the type checker: just read
        return self._lanes

    # ---- deadlines ------------------------------------------------------------------------------------

    def has_overdue(self) -> bool:
        """Whether a lease or delay is over, by deadlines that may be `DEADLINES_KNOWN_NS` old."""
        first_ns, read_ns = self._ledger.known.deadlines
        now = self._ledger.steady_ns
        if first_ns <= now or not read_ns <= now < read_ns + DEADLINES_KNOWN_NS:
            self._ledger.known.set_deadlines(self._ledger.ask_records("first_deadlines", ())[0], now)
            first_ns, _ = self._ledger.known.deadlines
        return first_ns <= now

    # ---- counters -------------------------------------------------------------------------------------

    def count(self, queue: str, what: Counted, change: int) -> None:
        """Change a counter."""
        self._lanes, self._pulled, self._peeked = None, {}, {}  # they show the records before this change
        self.counts[queue, what] = self.counts.get((queue, what), 0) + change
        if queue in self._depths or self._has_all_depths:
            counts = self._depths.setdefault(queue, {})
            counts[what] = counts.get(what, 0) + change
        if self._total is not None and org_of(queue):
            self._total[what] = self._total.get(what, 0) + change

    def depth(self, queue: str) -> Mapping[Counted, int]:
        if queue not in self._depths:
            self._read_depths(queue)
        return {what: n for what, n in self._depths[queue].items() if n}

    def forget_depths(self) -> None:
        """From now on, what is read is current."""
        self._depths, self._has_all_depths = {}, False

    def _read_depths(self, queue: str) -> None:
        """Read the counters of a queue, and of queues that this handle read last, in one trip."""
        known = self._ledger.known.depths
        last = [name for name in [*known][-DEPTHS_TOGETHER_MAX:] if name not in self._depths]
        names = [*dict.fromkeys([queue, *last])]
        asked: list[tuple[str, Any]] = [("depths_of", {"queues": [to_sql(name) for name in names]})]
        if org_of(queue) and self._total is None:
            asked.append(("total", ()))
        rows, *totals = self._ledger.ask_all(asked)
        found: dict[str, dict[Counted, int]] = {name: {} for name in names if name != ALL}
        for name, what, n in [(from_sql(name), what, n) for name, what, n in rows if name != ALL]:
            found[name][what] = n
        for (name, what), change in self.counts.items():
            if name in found:
                found[name][what] = found[name].get(what, 0) + change
        for name, counts in found.items():
            known.pop(name, None)  # the queue that was read last is at the end
            known[name] = waiting(counts), self._ledger.steady_ns
        self._depths.update(found)
        for total in totals:
            self._set_total(total)

    def total(self) -> dict[Counted, int]:
        if self._total is None:
            self._set_total(self._ledger.ask("total"))
        return {what: n for what, n in (self._total or {}).items() if n}

    def count_active(self) -> int:
        """Without what this transaction has changed."""
        if self._active is None:
            self._active = int(self._ledger.ask("count_active")[0][0])
        return self._active

    def _set_total(self, rows: list[Any]) -> None:
        self._total = dict(rows)
        for (name, what), change in self.counts.items():
            if org_of(name):
                self._total[what] = self._total.get(what, 0) + change
        self._ledger.known.depths[ALL] = waiting(self._total), self._ledger.steady_ns

    def recent_depth(self, queue: str) -> int | None:
        """How many records waited in a queue a moment ago, with those that this handle added since."""
        depth, read_ns = self._ledger.known.depths.get(queue, (0, -DEPTH_KNOWN_NS))
        return depth if read_ns <= self._ledger.steady_ns < read_ns + DEPTH_KNOWN_NS else None

    def is_quiet(self, queue: str, most: int) -> bool:
        recent = [self.recent_depth(queue), self.recent_depth(ALL)]
        is_far = all(depth is not None and depth <= most * FAR_FROM_FULL for depth in recent)
        return is_far or super().is_quiet(queue, most)

    def queues(self, prefix: str = "") -> list[str]:
        if not self._has_all_depths:
            self._depths |= self._depths_from(prefix)
            self._has_all_depths = not prefix
        used = (queue for queue, counts in self._depths.items() if any(counts.values()))
        return sorted(queue for queue in used if queue.startswith(prefix))

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        return {
            queue: {what: n for what, n in counts.items() if n}
            for queue, counts in self._depths_from("").items()
        }

    def active_depths(self) -> dict[str, Mapping[Counted, int]]:
        if self.counts:  # they may make a queue active whose other counters would not be read
            return super().active_depths()
        found: dict[str, dict[Counted, int]] = {}
        for queue, what, n in self._ledger.ask("active_depths"):
            found.setdefault(from_sql(queue), {})[what] = n
        return {queue: counts for queue, counts in found.items() if ready(counts) > 0}

    def _depths_from(self, prefix: str) -> dict[str, dict[Counted, int]]:
        """The counters of all queues whose names begin with a prefix."""
        found: dict[str, dict[Counted, int]] = {}
        for queue, what, n in self._ledger.ask("depths", {"prefix": to_sql(prefix)}):
            found.setdefault(from_sql(queue), {})[what] = n
        for (queue, what), change in self.counts.items():
            if queue.startswith(prefix):
                counts = found.setdefault(queue, {})
                counts[what] = counts.get(what, 0) + change
        return found
