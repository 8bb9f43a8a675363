"""The ledger of a PostgreSQL transaction: numbers, records, counters, cells, events and the commit.

Rule 1: a writing transaction locks every record that it decides about.
Rule 2: writes are kept until the commit or until a query needs them. A cell that was read and then written is
        compared with the value that was read: when another transaction changed it meanwhile, the whole
        transaction is retried.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope, Event, Record, Stored, org_of
from postroom.stores.base import (
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
    ready,
    unknown,
    waiting,
)
from postroom.stores.event_runs import (
    EVENTS_PER_NEW,
    INCOMPLETE,
    READ_ERRORS,
    NewRun,
    Part,
    StoredRow,
    alerts_for,
    pack,
    unpack,
)
from postroom.stores.postgres.known import ConflictError, Known
from postroom.stores.postgres.rows import changed_row, from_sql, new_row, to_sql
from postroom.stores.postgres.trips import Answer, Connection, Statement
from postroom.stores.stored_message import stored_message
from postroom.stores.transaction import Transaction

NUMBERS_AT_ONCE = 16  # taken with the first number of a transaction
EVENT_ROWS_A_READ = 256
PLACED_A_READ_MAX = 10_000  # commits whose events get their positions in one call
DEPTH_KNOWN_NS = 100_000_000  # for how long a handle trusts the depth of a queue that is far from its limit
FAR_FROM_FULL = 0.5  # the share of its limit below which a queue is far from it
DEPTHS_TOGETHER_MAX = 16  # queues whose depths are read in one query
ALL = ""  # the key of the depth of all organizations together

NO_SCANS: Mapping[tuple[str, str, int], list[Any]] = {}

_STATES_WITH_INDEX = frozenset({"EXECUTING", "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED"})
_encode = msgspec.json.Encoder().encode
_record_from: Callable[..., Record] = Record  # columns are in the order of the fields


class ActiveLanes(NamedTuple):
    """The lanes of all organizations, as they were read together."""

    has_all: bool
    """Whether `active` has every queue; otherwise there are too many."""
    active: dict[int, list[str]]
    """The queues that have QUEUED records in a lane, in order."""
    oldest: dict[int, Record]
    """The record that has waited longest in a lane."""


class PostgresLedger(Transaction):
    """The ledger of one transaction."""

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
        super().__init__(known, known.limits, *now)
        self._known = known
        self.codec = known.codec
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
        self._active: int | None = None
        self._new: list[Envelope] = []
        """New records that are not written yet. They differ only in payload and have consecutive numbers."""
        self._new_first = 0
        self._pending: list[Statement] = []
        """Statements about records that are not sent yet."""
        self._inserts: list[tuple[Any, ...]] = []
        self._updates: list[tuple[Any, ...]] = []
        self._cells: dict[tuple[str, str], bytes | None] = {}
        """Changed cells in their stored form, as are those that were read."""
        self._cells_read: dict[tuple[str, str], bytes | None] = {}
        self._scans: dict[tuple[str, str, int], list[Any]] = {**scans}
        """Cells that were read together: kind, after and limit -> rows."""
        self._lanes: ActiveLanes | None = None
        self._pulled: dict[tuple[str, int, int], list[Head]] = {}
        """Heads that were read ahead, by queue, lane and limit."""
        self._peeked: dict[tuple[str, int], list[Head]] = {}
        """The first heads of queues, by queue and lane: up to `HEADS_PEEKED_MAX` of each."""
        self._saved: set[int] = set()

    # ---- queries --------------------------------------------------------------------------------------

    def _ask(self, name: str, values: Any = ()) -> list[Any]:
        """The rows of a query that reads no records."""
        return self._connection.trip([(self._queries[name], values)])[0].rows

    def _ask_records(self, name: str, values: Any) -> list[Any]:
        """The rows of a query that reads records, with the changes of this transaction."""
        self._has_fresh_numbers = False  # the query may lock records that have changed meanwhile
        self._has_locked = True
        return self._trip(self._unsent(), [(name, values)])[0].rows

    def _tell(self, name: str, values: Any) -> int:
        """Run a statement; returns how many rows it changed."""
        return self._connection.trip([(self._queries[name], values)])[0].changed

    def _ask_all(self, asked: Sequence[tuple[str, Any]]) -> list[list[Any]]:
        """The rows of several queries, in one trip."""
        return [answer.rows for answer in self._trip([], asked)] if asked else []

    def _trip(self, unsent: list[Statement], asked: Sequence[tuple[str, Any]]) -> list[Answer]:
        """Send statements and named queries in one trip, and return the answers of the queries."""
        statements = [*unsent, *((self._queries[name], values) for name, values in asked)]
        return self._connection.trip(statements)[len(unsent) :]

    # ---- numbers --------------------------------------------------------------------------------------

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
        """Have at least `count` consecutive numbers to give that were taken after the last lock."""
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
        """Remember, for the next transaction, how many numbers were used, and the unused ones."""
        self._known.habits.early = self._early if committed else 0
        self._known.usual = self._number - self._first_number if committed and self._first_number else 0
        first = self._number if committed else self._first_number
        if self._first_number and first <= self._number_end:
            self._known.keep_spare(first, self._number_end)

    # ---- records --------------------------------------------------------------------------------------

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
        found = self.records(message_ids)
        for message_id in message_ids:
            if message_id not in found:
                raise unknown(message_id)
        return [found[message_id] for message_id in message_ids]

    def records(self, message_ids: Sequence[str]) -> dict[str, Record]:
        numbers = [self._known.own_number(message_id) for message_id in message_ids]
        own = [number for number in numbers if number]
        rows = self._ask_records("by_seqs", (own,)) if own else []
        names = [to_sql(each) for each, number in zip(message_ids, numbers, strict=True) if not number]
        if names:
            rows += self._ask_records("by_names", (names,))
        found = {record.message_id: record for record in map(self._record, rows)}
        if own and (missing := [to_sql(each) for each in message_ids if each not in found]):
            named = map(self._record, self._ask_records("by_names", (missing,)))
            found |= {record.message_id: record for record in named}
        return found

    def _record(self, row: Sequence[Any]) -> Record:
        seq, name, queue = row[0], row[1], from_sql(row[2])
        message_id = self.ids.new(queue, seq, row[19]) if name is None else from_sql(name)
        return _record_from(
            seq, message_id, queue, *row[3:12], from_sql(row[12]), *row[13:23], from_sql(row[23])
        )

    def load(self, message_id: str) -> Stored | None:
        record = self.record(message_id)
        return None if record is None else stored_message(record, self.kept(record))

    def kept(self, record: Record) -> Kept:
        codec, seq = self.codec, record.seq
        [(kind, parent, key, delay_ns, ttl_ns, payload, result, trail)] = self._ask("stored", (seq,))
        return Kept(
            from_sql(kind), from_sql(parent), from_sql(key), delay_ns, ttl_ns,
            codec.open("payload", seq, payload),
            None if result is None else codec.open("result", seq, result),
            codec.open_lines(seq, (trail or b"").decode()).encode(),
        )  # fmt: skip

    def kinds(self) -> list[str]:
        return [from_sql(kind) for (kind,) in self._ask("kinds")]

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        own = {number: each for each in message_ids if (number := self._known.own_number(each))}
        stored = dict(self._ask_records("payloads", ([*own],)))
        found = {own[seq]: payload for seq, payload in self.codec.open_payloads(stored).items()}
        return found | super().payloads([each for each in message_ids if each not in found])

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self.changes += 1
        for change in changes:
            step, r = change.step, change.step.record
            if (e := change.envelope) is not None:
                self._saved.add(r.seq)
                if r.due:
                    self._ends_at(r.due)
                self._inserts.append(new_row(r, e, self.codec.seal("payload", r.seq, e.payload)))
                continue
            if r.seq in self._saved:  # an earlier change of the record must reach the table first
                self._write_records()
            self._saved.add(r.seq)
            trail = [] if change.before is None else lifecycle.trail(change.before, step)
            if deadline_ns := r.lease_until or r.due:
                self._ends_at(deadline_ns)
            result = None if step.result is None else self.codec.seal("result", r.seq, step.result)
            lines = "".join(f"{_encode(event).decode()}\n" for event in trail)
            stored = self.codec.seal_lines(r.seq, lines).encode() if lines else None
            self._updates.append(changed_row(r, result, stored))
        for (queue, what), n in count_changes(changes, events).items():
            self._count(queue, what, n)
        self._append(events, len(events))

    def _append(self, parts: Sequence[Part], count: int) -> None:
        if self._new:
            self._write_new()  # their numbers come first
        self.parts += parts
        self.event_count += count

    def _queue_records(self) -> None:
        """Append the statements of changed records to the pending ones."""
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

    def _write_new(self) -> None:
        """Send new records, and keep their events."""
        run, first, self._new = self._new, self._new_first, []
        e, now = run[0], self.steady_ns
        step = 1 if e.delay_ns else EVENTS_PER_NEW
        values = {
            "first": first, "step": step, "queue": to_sql(e.queue),
            "state": "SCHEDULED" if e.delay_ns else "QUEUED", "priority": e.priority,
            "max_retries": e.max_retries, "due": self._ends_at(now + e.delay_ns) if e.delay_ns else 0,
            "now": now, "expires": now + e.ttl_ns if e.ttl_ns else 0, "durability": e.durability,
            "wall_us": self.wall_us, "sender": to_sql(e.sender), "type": to_sql(e.type),
            "parent": to_sql(e.parent_message_id), "delay_ns": e.delay_ns, "ttl_ns": e.ttl_ns,
            "payloads": self.codec.seal_payloads(first, step, [each.payload for each in run]),
        }  # fmt: skip
        self._pending.append((self._queries["insert_alike"], values))
        sizes = [len(each.payload) for each in run]
        facts = [each.facts for each in run] if any(each.facts for each in run) else ()
        self.parts.append(
            NewRun(
                first, self.wall_us, e.queue, e.priority, e.type, e.parent_message_id, e.delay_ns, sizes,
                facts,
            )
        )  # fmt: skip
        self.event_count += len(run) * step

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

    def _ends_at(self, deadline_ns: int) -> int:
        self._known.note_deadline(deadline_ns, self.steady_ns)
        return deadline_ns

    # ---- counters -------------------------------------------------------------------------------------

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
            known.pop(name, None)  # the queue that was read last is at the end
            known[name] = waiting(counts), self.steady_ns
        self._depths.update(found)
        for total in totals:
            self._set_total(total)

    def total(self) -> dict[Counted, int]:
        if self._total is None:
            self._set_total(self._ask("total"))
        return {what: n for what, n in (self._total or {}).items() if n}

    def count_active(self) -> int:
        """Without what this transaction has changed."""
        if self._active is None:
            self._active = int(self._ask("count_active")[0][0])
        return self._active

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
        for queue, what, n in self._ask("active_depths"):
            found.setdefault(from_sql(queue), {})[what] = n
        return {queue: counts for queue, counts in found.items() if ready(counts) > 0}

    def _depths_from(self, prefix: str) -> dict[str, dict[Counted, int]]:
        """The counters of all queues whose names begin with a prefix."""
        found: dict[str, dict[Counted, int]] = {}
        for queue, what, n in self._ask("depths", {"prefix": to_sql(prefix)}):
            found.setdefault(from_sql(queue), {})[what] = n
        for (queue, what), change in self.counts.items():
            if queue.startswith(prefix):
                counts = found.setdefault(queue, {})
                counts[what] = counts.get(what, 0) + change
        return found

    # ---- cells ----------------------------------------------------------------------------------------

    def cell(self, kind: str, key: str) -> bytes | None:
        name = kind, key
        if name in self._cells:
            stored = self._cells[name]
        elif name in self._cells_read:
            stored = self._cells_read[name]
        else:
            rows = self._ask("cell", (to_sql(kind), to_sql(key)))
            stored = self._cells_read[name] = bytes(rows[0][0]) if rows else None
        return None if stored is None else self.codec.open_cell(kind, key, stored)

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        self.changes += 1
        self._cells[kind, key] = None if value is None else self.codec.seal_cell(kind, key, value)

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        start = to_sql(after)
        written = {to_sql(key): value for (name, key), value in self._cells.items() if name == kind}
        mine = {key: value for key, value in written.items() if key > start}
        more = sum(value is None for value in mine.values())  # removed here, perhaps still in the table
        scan = kind, after, limit + more
        rows = self._scans.get(scan)
        if rows is None:
            rows = self._scans[scan] = self._ask("cells", (to_sql(kind), start, limit + more))
        found: dict[str, bytes] = {}
        """By the stored form of the key, whose order is the order of the pages."""
        for key, value in rows:
            self._cells_read.setdefault((kind, from_sql(key)), bytes(value))
            found[key] = bytes(value)
        last = rows[-1][0] if len(rows) == limit + more else None
        for key, own in mine.items():
            if own is None:
                found.pop(key, None)
            elif last is None or key <= last:
                found[key] = own
        page = [(from_sql(key), stored) for key, stored in sorted(found.items())[:limit]]
        return self.codec.open_cells(kind, page)

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

    def exclusive(self, name: str) -> None:
        self._scans.clear()  # what is read from now on is current
        if not self.is_reading:
            self._cells_read = {
                name: value for name, value in self._cells_read.items() if name in self._cells
            }
            self._ask("lock_name", (to_sql(name),))

    # ---- events ---------------------------------------------------------------------------------------

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

    def _unpacked(self, row: tuple[int, int, int, bytes]) -> Iterator[Event]:
        """The events of a commit, with their positions as numbers."""
        position, count, number, batch = row
        first, fault = position - count + 1, ""
        seq = first - 1
        try:
            for seq, event in enumerate(unpack(self.codec.open_batch(number, bytes(batch)), self.ids), first):
                yield event if event.seq == seq else msgspec.structs.replace(event, seq=seq)
        except READ_ERRORS as error:
            fault = str(error)
        if seq != position:
            yield from alerts_for(self._damaged_row(*row), seq, fault or INCOMPLETE)

    def _damaged_row(self, position: int, count: int, number: int, batch: bytes) -> StoredRow:
        [(ts_us, _)] = self._ask("event_row", (number,))
        return StoredRow(number, position - count + 1, position, ts_us, bytes(batch))

    def stored_row(self, number: int) -> bytes:
        [(_, batch)] = self._ask("event_row", (number,))
        return bytes(batch)

    # ---- the commit -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the cells, which can meet a conflict, after the records."""
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
        statements = self._unsent()
        batch = pack(self.parts)
        if self.parts:  # a commit of cells alone has no number
            batch = self.codec.seal_batch(self.last_number, batch)
        if changes:
            statements.append((self._queries["count"], tuple(map(list, zip(*changes, strict=True)))))
        values = self.last_number, writer, self.event_count, batch
        statements.append((self._queries["append_events"], values))
        if not self.synced:
            statements.append(("SET LOCAL synchronous_commit = off", ()))
        self._connection.trip([*statements, ("COMMIT", ())])
