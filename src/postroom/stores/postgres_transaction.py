"""A transaction of PostgreSQL: the methods of `Ledger` and `Lanes`, and faster forms of the hot verbs.

Rule 1: a writing transaction locks every record that it decides about. Claims and sweeps skip records that
        other transactions have locked.
Rule 2: writes are kept until the commit or until a query needs them. A cell that was read and then written is
        compared with what was read: when another transaction changed it meanwhile, all of this one's work is
        done again.
Rule 3: a faster form covers the common case. Everything else goes to the verb of `Transaction`.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from postroom.core import lifecycle
from postroom.core.ids import new_id, number_in_uuid, store_tag
from postroom.message import Envelope, Event, Record, Step, Stored, org_of
from postroom.stores.base import (
    FOREVER_NS,
    LANE_COUNTS,
    NEWEST,
    ByIds,
    Change,
    Counted,
    Ending,
    Head,
    Kept,
    Listing,
    Pick,
    count_changes,
    counted_as,
    unknown,
    waiting,
)
from postroom.stores.event_runs import EVENTS_PER_NEW, CompletedRun, LeasedRun, NewRun, Part, pack, unpack
from postroom.stores.postgres_trips import Answer, Connection, Statement
from postroom.stores.transaction import (
    NO_DETAILS,
    Accepted,
    Claim,
    Decide,
    Delivery,
    LimitsCache,
    Transaction,
)

RECORD_COLUMNS = (
    "seq, name, queue, state, priority, lane, place, attempt, retries, crashes, max_retries, lease, "
    "worker_id, lease_ns, lease_until, due, ready_at, expires, durability, created_us, claimed_us, "
    "heartbeat_us, ended_us, sender"
)
TRAIL_BYTES_MAX = 256 * 1024  # of one record; later events are only in the audit stream
EVENTS_A_STEP_MAX = 4
NUMBERS_AT_ONCE = 16  # taken with the first number of a transaction
ALIKE_ROWS_MAX = 1_000
ALIKE_PAYLOAD_BYTES_MAX = 64 * 1024
EVENT_ROWS_A_READ = 256
PLACED_A_READ_MAX = 10_000  # commits whose events get their positions in one call
ACTIVE_MAX = 100  # lanes of organizations that are read together, as in `all_active`
DEADLINES_KNOWN_NS = 50_000_000  # for how long a handle trusts the first deadline that it read
DEPTH_KNOWN_NS = 100_000_000  # for how long a handle trusts the depth of a queue that is far from its limit
FAR_FROM_FULL = 0.5
DEPTHS_TOGETHER_MAX = 16
HEADS_PEEKED_MAX = 8  # first records of a queue and lane that are read with the lanes, as in `all_heads`
ALL = ""  # the key of the depth of all organizations together
DEPTH_KNOWN_MIN = 10_000  # a queue with a smaller limit is always counted
NUMBER_DIGITS_MAX = 18
UUID_CHARS = 36
ESCAPE = "\x1a"

NO_SCANS: Mapping[tuple[str, str, int], list[Any]] = {}

_STATES_WITH_INDEX = frozenset({"EXECUTING", "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED"})
_decode_event = msgspec.json.Decoder(Event).decode
_encode = msgspec.json.Encoder().encode
_record_from: Callable[..., Record] = Record  # columns are in the order of the fields
_kept_from: Callable[..., Kept] = Kept
_traits = attrgetter(
    "queue", "message_id", "key", "type", "parent_message_id", "priority", "max_retries", "delay_ns",
    "ttl_ns", "durability", "sender",
)  # fmt: skip
_queue_and_lane = attrgetter("queue", "lane")


class ConflictError(Exception):
    """Another transaction changed what this one has read: its work must be done again."""


def to_sql(text: str) -> str:
    """Text as PostgreSQL can hold it, which knows no NUL."""
    if "\0" in text or ESCAPE in text:
        return text.replace(ESCAPE, f"{ESCAPE}1").replace("\0", f"{ESCAPE}0")
    return text


def from_sql(text: str) -> str:
    """The inverse of `to_sql`."""
    if ESCAPE in text:
        return text.replace(f"{ESCAPE}0", "\0").replace(f"{ESCAPE}1", ESCAPE)
    return text


class _Habits(threading.local):
    """What transactions of one thread do: a thread of submits and a thread of claims differ."""

    early = 0
    """How many numbers the last transaction used before it locked records: the next one begins with some."""


class Known:
    """What a handle knows between two transactions."""

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id
        self.prefix = f"{store_id}-"
        self.limits = LimitsCache()
        self._spare: deque[tuple[int, int]] = deque(maxlen=1)
        """Numbers that were taken and not used: the first and the last."""
        self.usual = 0
        """How many numbers the last transaction used."""
        self.habits = _Habits()
        self.deadlines: tuple[int, int] = (0, 0)
        """The first lease or delay that ends, and when it was read."""
        self.depths: dict[str, tuple[int, int]] = {}
        """How many records waited in a queue, and when that was read."""
        self.scans: dict[tuple[str, str, int], None] = {}
        """Cells that transactions read together: they are read when the next one begins."""
        self.keeps_up = True
        """Whether the last claim found less than it asked for."""

    @property
    def has_spare(self) -> bool:
        """Whether there are numbers that were taken and not used."""
        return bool(self._spare)

    def take_spare(self) -> tuple[int, int]:
        """Numbers that were taken and not used. Of several threads, one gets them; the others get none."""
        with suppress(IndexError):
            return self._spare.pop()
        return (1, 0)

    def keep_spare(self, first: int, last: int) -> None:
        """Keep numbers that were not used for the next transaction."""
        self._spare.append((first, last))

    def own_number(self, message_id: str) -> int:
        """The number in an id that the store gave; 0 for any other id."""
        number = message_id.removeprefix(self.prefix)
        if len(number) == UUID_CHARS:
            return number_in_uuid(number, store_tag(self.store_id))
        is_own = (
            len(number) != len(message_id)
            and number.isdigit()
            and number.isascii()
            and number[0] != "0"
            and len(number) <= NUMBER_DIGITS_MAX
        )
        return int(number) if is_own else 0


class _Lanes(NamedTuple):
    """The lanes of all organizations, as they were read together."""

    has_all: bool
    """Whether `active` has every queue; otherwise there are too many."""
    active: dict[int, list[str]]
    """The queues that have QUEUED records in a lane, in order."""
    oldest: dict[int, Record]
    """The record that has waited longest in a lane."""


class PostgresTransaction(Transaction):
    """One transaction of a connection."""

    is_reading = False

    def __init__(
        self,
        known: Known,
        connection: Connection,
        queries: Mapping[str, str],
        now: tuple[int, int],
        taken: tuple[int, int] | None = None,
        scans: Mapping[tuple[str, str, int], list[Any]] = NO_SCANS,
    ) -> None:
        """`now` is the time by the steady and by the wall clock, `taken` the first and the last number.

        `scans` are cells that were read when the transaction began.
        """
        super().__init__(known.store_id, known.limits, *now)
        self._known = known
        self._connection = connection
        self._queries = queries
        self._number, self._number_end = taken or (1, 0)
        """The next number to give, and the last one that was taken."""
        self._first_number = taken[0] if taken else 0
        self._has_fresh_numbers = True
        """Whether no record was locked since the numbers were taken. The tokens of a record grow, and its
        events are placed in the order of their numbers, because numbers are taken after its lock."""
        self._has_locked = False
        self._early = 0
        """How many numbers were used before records were locked."""
        self.parts: list[Part] = []
        """The events, in order."""
        self.event_count = 0
        self.counts: dict[tuple[str, Counted], int] = {}
        """What the transaction did to the counters."""
        self._depths: dict[str, dict[Counted, int]] = {}
        self._has_all_depths = False
        self._total: dict[Counted, int] | None = None
        self._new: list[Envelope] = []
        """New records that are not written yet: alike but for their payloads, with consecutive numbers."""
        self._new_first = 0
        self._pending: list[Statement] = []
        """Statements about records that are not sent yet."""
        self._inserts: list[tuple[Any, ...]] = []
        self._updates: list[tuple[Any, ...]] = []
        self._cells: dict[tuple[str, str], bytes | None] = {}
        self._cells_read: dict[tuple[str, str], bytes | None] = {}
        self._scans: dict[tuple[str, str, int], list[Any]] = {**scans}
        """Cells that were read together: kind, after and limit -> rows."""
        self._lanes: _Lanes | None = None
        self._pulled: dict[tuple[str, int, int], list[Head]] = {}
        """Heads that were read ahead, by queue, lane and limit."""
        self._peeked: dict[tuple[str, int], list[Head]] = {}
        """The first heads of queues, by queue and lane: up to `HEADS_PEEKED_MAX` of each."""
        self._saved: set[int] = set()

    # ---- queries -------------------------------------------------------------------------------

    def _ask(self, name: str, values: Any = ()) -> list[Any]:
        """All rows of a query about something else than records."""
        return self._connection.trip([(self._queries[name], values)])[0].rows

    def _ask_records(self, name: str, values: Any) -> list[Any]:
        """All rows of a query about records, changes of this transaction included."""
        self._has_fresh_numbers = False  # the query may lock records that have changed meanwhile
        self._has_locked = True
        return self._trip(self._unsent(), [(name, values)])[0].rows

    def _tell(self, name: str, values: Any) -> int:
        """Run a statement; how many rows it changed."""
        return self._connection.trip([(self._queries[name], values)])[0].changed

    def _ask_all(self, asked: Sequence[tuple[str, Any]]) -> list[list[Any]]:
        """The rows of several queries, in one trip."""
        return [answer.rows for answer in self._trip([], asked)] if asked else []

    def _trip(self, unsent: list[Statement], asked: Sequence[tuple[str, Any]]) -> list[Answer]:
        """Send statements and named queries in one trip, and return the answers of the queries."""
        statements = [*unsent, *((self._queries[name], values) for name, values in asked)]
        return self._connection.trip(statements)[len(unsent) :]

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
        """Read the lanes of all organizations, in one trip with other questions, which are answered.

        While a worker keeps up, the first records of all queues are read and locked, too: they are probably
        all that it will pull. Numbers are taken after the locks.
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
        self._lanes = _Lanes(len(active) < ACTIVE_MAX, queues, oldest)
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

    def exclusive(self, name: str) -> None:
        self._scans.clear()  # what is read from now on is current
        if not self.is_reading:
            self._cells_read = {
                name: value for name, value in self._cells_read.items() if name in self._cells
            }
            self._ask("lock_name", (to_sql(name),))

    # ---- numbers -------------------------------------------------------------------------------

    def take_numbers(self, count: int) -> int:
        self._reserve(max(count, 1))
        first = self._number
        if count:
            self.changes += 1
            self._number = first + count
            if not self._has_locked:
                self._early += count
        return first

    def _reserve(self, count: int) -> None:
        """Have at least `count` consecutive numbers at hand that were taken after the last lock."""
        if self._has_fresh_numbers and self._number_end - self._number + 1 >= count:
            return
        wanted = max(count, NUMBERS_AT_ONCE)
        [(first,)] = self._ask("take_numbers", (wanted, *self._spare()))
        self._took(first, wanted)

    def _spare(self) -> tuple[int, int]:
        return (self._number, self._number_end) if self._first_number else self._known.take_spare()

    def _took(self, first: int, count: int) -> None:
        if first != self._number or not self._first_number:
            self._first_number = first
        self._number, self._number_end = first, first + count - 1
        self._has_fresh_numbers = True

    def _ask_to_change(self, name: str, values: Any, numbers: int) -> list[Any]:
        """The rows of a query that locks records, and numbers for their changes.

        Both are read in one trip, the numbers after the locks. A handle that changed nothing lately asks for
        the rows alone, so that an idle worker writes nothing.
        """
        if not self._known.usual:
            return self._ask_records(name, values)
        wanted = max(numbers, NUMBERS_AT_ONCE)
        asked = [(name, values), ("take_numbers", (wanted, *self._spare()))]
        found, numbered = self._trip(self._unsent(), asked)
        self._has_locked = True
        self._took(numbered.rows[0][0], wanted)
        return found.rows

    def spare_numbers(self, *, committed: bool) -> None:
        """Remember how many numbers were used, and those that were not, for the next transaction."""
        self._known.habits.early = self._early if committed else 0
        self._known.usual = self._number - self._first_number if committed and self._first_number else 0
        first = self._number if committed else self._first_number
        if self._first_number and first <= self._number_end:
            self._known.keep_spare(first, self._number_end)

    # ---- records -------------------------------------------------------------------------------

    def find(self, pick: Pick) -> list[Record]:
        match pick:
            case ByIds(message_ids):
                return self._by_ids(message_ids)
            case Ending(deadline, until_ns, limit):
                rows = self._ask_records(f"ending_{deadline}", (until_ns, limit))
            case Listing(queue, state, after, limit, before):
                name = "listing"
                if state in _STATES_WITH_INDEX:
                    name = "listing_of_state"
                elif state == "PROCESSING":
                    name = "listing_leased"
                queue = None if queue is None else to_sql(queue)
                values = {"queue": queue, "state": state, "after": after, "limit": limit}
                if before:
                    name, values = f"{name}_newest_first", {**values, "before": before}
                rows = self._ask_records(name, values)
            case _:
                raise TypeError(pick)
        return [self._record(row) for row in rows]

    def _by_ids(self, message_ids: Sequence[str]) -> list[Record]:
        numbers = [self._known.own_number(message_id) for message_id in message_ids]
        own = [number for number in numbers if number]
        rows = self._ask_records("by_seqs", (own,)) if own else []
        names = [to_sql(each) for each, number in zip(message_ids, numbers, strict=True) if not number]
        if names:
            rows += self._ask_records("by_names", (names,))
        found = {record.message_id: record for record in map(self._record, rows)}
        for message_id in message_ids:
            if message_id not in found:
                raise unknown(message_id)
        return [found[message_id] for message_id in message_ids]

    def _record(self, row: Sequence[Any]) -> Record:
        seq, name, queue = row[0], row[1], from_sql(row[2])
        message_id = new_id(self.store_id, queue, seq, row[19]) if name is None else from_sql(name)
        return _record_from(
            seq, message_id, queue, *row[3:12], from_sql(row[12]), *row[13:23], from_sql(row[23])
        )

    def load(self, message_id: str) -> Stored | None:
        record = self.record(message_id)
        if record is None:
            return None
        kind, parent, key, delay_ns, ttl_ns, payload, result, trail = self._ask("stored", (record.seq,))[0]
        envelope = Envelope(
            message_id=message_id,
            queue=record.queue,
            payload=payload,
            type=from_sql(kind),
            parent_message_id=from_sql(parent),
            key=from_sql(key),
            priority=record.priority,
            max_retries=record.max_retries,
            delay_ns=delay_ns,
            ttl_ns=ttl_ns,
            durability=record.durability,
            sender=record.sender,
        )
        first = lifecycle.created(envelope, message_id, record.seq, record.created_us)
        later = [_decode_event(line) for line in (trail or b"").split(b"\n") if line]
        return Stored(record, envelope, result, lifecycle.history(record, first, later))

    def kept(self, record: Record) -> Kept:
        kind, parent, key, *facts, trail = self._ask("stored", (record.seq,))[0]
        return _kept_from(from_sql(kind), from_sql(parent), from_sql(key), *facts, trail or b"")

    def kinds(self) -> list[str]:
        return [from_sql(kind) for (kind,) in self._ask("kinds")]

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._known.own_number(each))}
        found = {own[seq]: payload for seq, payload in self._ask_records("payloads", ([*own],))}
        return found | super().payloads([each for each in message_ids if not self._known.own_number(each)])

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self.changes += 1
        for change in changes:
            step, r = change.step, change.step.record
            if (e := change.envelope) is not None:
                self._saved.add(r.seq)
                if r.due:
                    self._ends_at(r.due)
                self._inserts.append(_new_row(r, e))
                continue
            if r.seq in self._saved:  # an earlier change of the record must reach the table first
                self._write_records()
            self._saved.add(r.seq)
            trail = [] if change.before is None else lifecycle.trail(change.before, step)
            if deadline_ns := r.lease_until or r.due:
                self._ends_at(deadline_ns)
            lines = b"".join(_encode(event) + b"\n" for event in trail) or None
            self._updates.append(_changed_row(r, step.result, lines))
        for (queue, what), n in count_changes(changes, events).items():
            self._count(queue, what, n)
        self._append(events, len(events))

    def _append(self, parts: Sequence[Part], count: int) -> None:
        if self._new:
            self._write_new()  # their numbers come first
        self.parts += parts
        self.event_count += count

    def _queue_records(self) -> None:
        """Put changed records into the line of statements."""
        if self._new:
            self._write_new()
        if self._saved:
            inserts, updates = self._inserts, self._updates
            self._inserts, self._updates, self._saved = [], [], set()
            if inserts:
                self._pending += [(self._queries["insert"], values) for values in inserts]
            if updates:
                self._pending += [(self._queries["update"], values) for values in updates]

    def _write_records(self) -> None:
        """Send the changed records that are kept."""
        if unsent := self._unsent():
            self._connection.trip(unsent)

    def _unsent(self) -> list[Statement]:
        """The statements about records that are not sent yet. The caller sends them."""
        self._queue_records()
        pending, self._pending = self._pending, []
        return pending

    # ---- insert --------------------------------------------------------------------------------

    def insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        for envelope in envelopes:
            limits = self.limits(envelope.queue)
            if envelope.message_id or envelope.key or len(envelope.payload) > limits.max_payload_bytes:
                return super().insert(envelopes)
        self._check_depths(envelopes)
        accepted: list[Accepted] = []
        for _, neighbours in groupby(envelopes, _traits):
            run = list(neighbours)
            for first in range(0, len(run), ALIKE_ROWS_MAX):
                accepted += self._insert_alike(run[first : first + ALIKE_ROWS_MAX])
        return accepted

    def _insert_alike(self, run: list[Envelope]) -> list[Accepted]:
        """Number and count new records that differ in their payloads only. They are written with the next."""
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
        return [Accepted(new_id(self.store_id, e.queue, n, self.wall_us), duplicate=False) for n in numbers]

    def _is_next_of_new(self, run: list[Envelope], step: int) -> bool:
        new = self._new
        return (
            self._number == self._new_first + step * len(new)
            and len(new) + len(run) <= ALIKE_ROWS_MAX
            and len(run[0].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(new[-1].payload)
            and _traits(new[0]) == _traits(run[0])
        )

    def _write_new(self) -> None:
        """Send new records, and keep their events."""
        run, first, self._new = self._new, self._new_first, []
        e, now = run[0], self.steady_ns
        values = {
            "first": first, "step": 1 if e.delay_ns else EVENTS_PER_NEW, "queue": to_sql(e.queue),
            "state": "SCHEDULED" if e.delay_ns else "QUEUED", "priority": e.priority,
            "max_retries": e.max_retries, "due": self._ends_at(now + e.delay_ns) if e.delay_ns else 0,
            "now": now, "expires": now + e.ttl_ns if e.ttl_ns else 0, "durability": e.durability,
            "wall_us": self.wall_us, "sender": to_sql(e.sender), "type": to_sql(e.type),
            "parent": to_sql(e.parent_message_id), "delay_ns": e.delay_ns, "ttl_ns": e.ttl_ns,
            "payloads": [each.payload for each in run],
        }  # fmt: skip
        self._pending.append((self._queries["insert_alike"], values))
        sizes = [len(each.payload) for each in run]
        facts = [each.facts for each in run] if any(each.facts for each in run) else ()
        self.parts.append(
            NewRun(
                first,
                self.wall_us,
                e.queue,
                e.priority,
                e.type,
                e.parent_message_id,
                e.delay_ns,
                sizes,
                facts,
            )
        )
        self.event_count += len(run) * (1 if e.delay_ns else EVENTS_PER_NEW)

    # ---- lease and complete --------------------------------------------------------------------

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
        leased = self.lease([(head, head.record.lane) for head in heads], terms.worker_id, terms.lease_ns)
        return [
            Delivery(
                record.message_id, record.queue, head.payload, head.type, head.parent_message_id,
                record.attempt, record.lease, record.lease_ns,
            )
            for head, record in zip(heads, leased, strict=True)
        ]  # fmt: skip

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
        for _, neighbours in groupby(leased, _queue_and_lane):
            self._note_leased(list(neighbours))
        return leased

    def _note_leased(self, leased: list[Record]) -> None:
        """Count leased records of one queue and lane, and keep their events."""
        one, now = leased[0], self.steady_ns
        self._count(one.queue, LANE_COUNTS[one.lane], -len(leased))
        self._count(one.queue, "PROCESSING", len(leased))
        names = [each.message_id for each in leased]
        run = LeasedRun(
            one.lease, self.wall_us, one.queue, one.lane, one.worker_id, names,
            [each.attempt for each in leased], [(now - each.ready_at) // 1000 for each in leased],
        )  # fmt: skip
        self._append([run], len(leased))
        if any(each.durability != "os" for each in leased):
            self.synced = True

    def complete(
        self, results: Mapping[str, tuple[int, bytes]], details: Mapping[str, dict[str, Any]] = NO_DETAILS
    ) -> Sequence[str]:
        numbers = {self._known.own_number(message_id): message_id for message_id in results}
        if 0 in numbers:
            return super().complete(results, details)  # ids that callers gave
        values = [*numbers], self.steady_ns
        rows = {row[0]: row for row in self._ask_to_change("leased", values, len(numbers))}
        if len(rows) < len(results) or any(
            rows[number][1] != results[message_id][0] for number, message_id in numbers.items()
        ):
            return super().complete(results, details)  # repeats, stale leases
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
        contents = [results[message_id][1] for message_id in numbers.values()]
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

    def forget(self, records: Sequence[Record], events_up_to: int = 0) -> None:
        self.changes += 1
        self._write_records()
        if records:
            seen = [(record.seq, record.place, record.state) for record in records]
            if self._tell("forget", tuple(map(list, zip(*seen, strict=True)))) != len(records):
                raise ConflictError
        for record in records:
            self._count(record.queue, counted_as(record), -1)
        if events_up_to:
            self._ask("drop_partitions", (events_up_to,))
            self._tell("forget_events", (events_up_to,))

    def apply(self, pick: Pick, decide: Decide) -> list[Step]:
        """As in `Transaction`: the numbers are taken once it is known that there are records."""
        records = self._found_to_change(pick)
        if not records:
            return []
        self._reserve(EVENTS_A_STEP_MAX * len(records))
        number = first = self._number
        changes: list[Change] = []
        for record in records:
            step = decide(record, self._moment(number))
            if step is not None:
                number += len(step.events)
                changes.append(Change(record, step))
            elif record.durability != "os":
                self.synced = True  # a repeated call is acknowledged like the first call
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

    # ---- counters ------------------------------------------------------------------------------

    def _count(self, queue: str, what: Counted, change: int) -> None:
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

    def _read_depths(self, queue: str) -> None:
        """Read the counters of a queue, and of queues that this handle read last, in one trip."""
        known = self._known.depths
        last = [name for name in [*known][-DEPTHS_TOGETHER_MAX:] if name not in self._depths]
        names = [*dict.fromkeys([queue, *last])]
        asked: list[tuple[str, Any]] = [("depths_of", {"queues": [to_sql(name) for name in names]})]
        if org_of(queue) and self._total is None:
            asked.append(("total", ()))
        rows, *totals = self._ask_all(asked)
        found: dict[str, dict[Counted, int]] = {name: {} for name in names if name != ALL}
        for name, what, n in [(from_sql(name), what, n) for name, what, n in rows if name != ALL]:
            found[name][what] = n
        for (name, what), change in self.counts.items():
            if name in found:
                found[name][what] = found[name].get(what, 0) + change
        for name, counts in found.items():
            known.pop(name, None)  # the last one that was read stands at the end
            known[name] = waiting(counts), self.steady_ns
        self._depths.update(found)
        for total in totals:
            self._set_total(total)

    def total(self) -> dict[Counted, int]:
        if self._total is None:
            self._set_total(self._ask("total"))
        return {what: n for what, n in (self._total or {}).items() if n}

    def _set_total(self, rows: list[Any]) -> None:
        self._total = dict(rows)
        for (name, what), change in self.counts.items():
            if org_of(name):
                self._total[what] = self._total.get(what, 0) + change
        self._known.depths[ALL] = waiting(self._total), self.steady_ns

    def _recent_depth(self, queue: str) -> int | None:
        """How many records waited in a queue a moment ago, with those that this handle added since."""
        depth, read_ns = self._known.depths.get(queue, (0, -DEPTH_KNOWN_NS))
        return depth if read_ns <= self.steady_ns < read_ns + DEPTH_KNOWN_NS else None

    def is_quiet(self, queue: str, most: int) -> bool:
        recent = [self._recent_depth(queue), self._recent_depth(ALL)]
        is_far = all(depth is not None and depth <= most * FAR_FROM_FULL for depth in recent)
        return is_far or super().is_quiet(queue, most)

    def queues(self) -> list[str]:
        if not self._has_all_depths:
            self._depths, self._has_all_depths = self.depths(), True
        return sorted(queue for queue, counts in self._depths.items() if any(counts.values()))

    def depths(self) -> dict[str, dict[Counted, int]]:
        """The counters of every queue."""
        found: dict[str, dict[Counted, int]] = {}
        for queue, what, n in self._ask("depths"):
            found.setdefault(from_sql(queue), {})[what] = n
        for (queue, what), change in self.counts.items():
            counts = found.setdefault(queue, {})
            counts[what] = counts.get(what, 0) + change
        return {queue: {what: n for what, n in counts.items() if n} for queue, counts in found.items()}

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

    # ---- cells ---------------------------------------------------------------------------------

    def cell(self, kind: str, key: str) -> bytes | None:
        name = kind, key
        if name in self._cells:
            return self._cells[name]
        if name in self._cells_read:
            return self._cells_read[name]
        rows = self._ask("cell", (to_sql(kind), to_sql(key)))
        value = bytes(rows[0][0]) if rows else None
        self._cells_read[name] = value
        return value

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        self.changes += 1
        self._cells[kind, key] = value

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        mine = {key: value for (name, key), value in self._cells.items() if name == kind and key > after}
        more = sum(value is None for value in mine.values())  # removed here, and perhaps in the table
        scan = kind, after, limit + more
        rows = self._scans.get(scan)
        if rows is None:
            rows = self._scans[scan] = self._ask("cells", (to_sql(kind), to_sql(after), limit + more))
        found: dict[str, bytes] = {}
        for sql_key, value in rows:
            key = from_sql(sql_key)
            self._cells_read.setdefault((kind, key), bytes(value))
            found[key] = bytes(value)
        last = from_sql(rows[-1][0]) if len(rows) == limit + more else None
        for key, own in mine.items():
            if own is None:
                found.pop(key, None)
            elif last is None or key <= last:
                found[key] = own
        return sorted(found.items())[:limit]

    def _write_cells(self) -> None:
        """Send the changed cells, in the order of their keys. Raises `ConflictError`."""
        groups: dict[str, list[tuple[Any, ...]]] = {}
        for name in sorted(self._cells):
            value, key = self._cells[name], tuple(map(to_sql, name))
            before = self._cells_read.get(name)
            if name not in self._cells_read:
                query, row = ("drop_cells", key) if value is None else ("put_cells", (*key, value))
            elif before is None:
                query, row = ("drop_cells", key) if value is None else ("add_cells", (*key, value))
            elif value is None:
                query, row = "drop_known_cells", (*key, before)
            else:
                query, row = "change_cells", (*key, value, before)
            groups.setdefault(query, []).append(row)
        for query, rows in groups.items():
            changed = self._tell(query, tuple(map(list, zip(*rows, strict=True))))
            if query not in ("put_cells", "drop_cells") and changed != len(rows):
                raise ConflictError
        self._cells = {}

    # ---- lanes ---------------------------------------------------------------------------------

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
        found = {
            row[0]: Head(self._record(row[:24]), row[24], from_sql(row[25]), from_sql(row[26]))
            for row in rows
        }
        wanted = set(message_ids)
        heads = [found[number] for number in numbers if number in found]
        return [head for head in heads if head.record.message_id in wanted]

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

    def _all_lanes(self) -> "_Lanes":
        if self._lanes is None:
            self._ask_lanes((), heads=True)
        assert self._lanes is not None  # noqa: S101 - for the type checker: just read
        return self._lanes

    def put_back(self, limit: int) -> int:
        return super().put_back(limit) if self.has_overdue() else 0

    def has_overdue(self) -> bool:
        """Whether a lease or delay is over, as far as was known a moment ago."""
        first_ns, read_ns = self._known.deadlines
        now = self.steady_ns
        if first_ns <= now or not read_ns <= now < read_ns + DEADLINES_KNOWN_NS:
            ends = self._ask_records("first_deadlines", ())[0]
            first_ns = min((end for end in ends if end is not None), default=FOREVER_NS)
            self._known.deadlines = first_ns, now
        return first_ns <= now

    def _ends_at(self, deadline_ns: int) -> int:
        first_ns, read_ns = self._known.deadlines
        self._known.deadlines = min(first_ns, deadline_ns), read_ns
        return deadline_ns

    # ---- events --------------------------------------------------------------------------------

    def events(self, after: int, limit: int) -> list[Event]:
        if not self.is_reading:  # a purge; readings place events before they begin
            self._ask("place_events", (PLACED_A_READ_MAX,))
        if after == NEWEST:
            return [event for row in self._ask("newest_events") for event in self._unpacked(row)][-1:]
        found: list[Event] = []
        at = after
        while len(found) < limit:
            rows = self._ask("events_after", (at, min(limit, EVENT_ROWS_A_READ)))
            if not rows:
                break
            at = rows[-1][0]
            found += [event for row in rows for event in self._unpacked(row) if event.seq > after]
        return found[:limit]

    def _unpacked(self, row: tuple[int, int, bytes]) -> Iterator[Event]:
        """The events of a commit, with their positions as numbers."""
        position, count, batch = row
        for seq, event in enumerate(unpack(bytes(batch).decode(), self.store_id), position - count + 1):
            yield event if event.seq == seq else msgspec.structs.replace(event, seq=seq)

    def flush(self) -> None:
        """Send what can meet a conflict: the cells, after the records."""
        self._queue_records()
        if self._cells:
            self._write_records()
            self._write_cells()

    @property
    def last_number(self) -> int:
        """The last number that was used: greater than those of all commits that this one has seen."""
        return self._number - 1

    def commit(self, writer: int) -> None:
        """Send the rest, and commit, in one trip to the server. `writer` marks the commit."""
        changes = [(to_sql(queue), what, n) for (queue, what), n in self.counts.items() if n]
        batch = pack(self.parts).encode()
        statements = self._unsent()
        if changes:
            statements.append((self._queries["count"], tuple(map(list, zip(*changes, strict=True)))))
        values = self.last_number, writer, self.event_count, batch
        statements.append((self._queries["append_events"], values))
        if not self.synced:
            statements.append(("SET LOCAL synchronous_commit = off", ()))
        self._connection.trip([*statements, ("COMMIT", ())])


class PostgresReading(PostgresTransaction):
    """One state of the database."""

    is_reading = True


def _new_row(r: Record, e: Envelope) -> tuple[Any, ...]:
    return (
        r.seq, to_sql(e.message_id) if e.message_id else None, to_sql(r.queue), r.state, r.priority, r.lane,
        r.place, r.attempt, r.retries, r.crashes, r.max_retries, r.lease, r.worker_id, r.lease_ns,
        r.lease_until, r.due, r.ready_at, r.expires, r.durability, r.created_us, r.claimed_us,
        r.heartbeat_us, r.ended_us,
        to_sql(r.sender), to_sql(e.type), to_sql(e.parent_message_id), to_sql(e.key), e.delay_ns, e.ttl_ns,
        e.payload,
    )  # fmt: skip


def _changed_row(r: Record, result: bytes | None, trail: bytes | None) -> tuple[Any, ...]:
    return (
        r.state, r.lane, r.place, r.attempt, r.retries, r.crashes, r.lease, to_sql(r.worker_id), r.lease_ns,
        r.lease_until, r.due, r.ready_at, r.expires, r.claimed_us, r.heartbeat_us, r.ended_us, result, trail,
        trail, r.seq,
    )  # fmt: skip
