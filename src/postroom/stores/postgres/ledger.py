"""What one PostgreSQL transaction shares with its parts: the connection, numbers, and statements to send.

Rule 1: a writing transaction locks every record that it decides about.
Rule 2: writes are kept until the commit or until a query needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from postroom.message import Envelope, Record
from postroom.stores.base import Head
from postroom.stores.event_runs import EVENTS_PER_NEW, NewRun, Part, traits
from postroom.stores.postgres.known import PostgresKnown
from postroom.stores.postgres.rows import from_sql, to_sql
from postroom.stores.postgres.trips import Connection, Statement, StatementResult

NUMBERS_AT_ONCE = 16  # taken with the first number of a transaction
ALIKE_ROWS_MAX = 1_000  # new records in one statement
ALIKE_PAYLOAD_BYTES_MAX = 64 * 1024

_record_from: Callable[..., Record] = Record  # columns are in the order of the fields


class PostgresLedger:
    """What the parts of one transaction share."""

    changes = 0

    def __init__(
        self,
        known: PostgresKnown,
        connection: Connection,
        queries: Mapping[str, str],
        now: tuple[int, int],
        taken: tuple[int, int] | None = None,
        *,
        is_reading: bool = False,
    ) -> None:
        """`now` is the time by the steady and by the wall clock, `taken` the first and the last number."""
        self.known = known
        self.codec = known.codec
        self.connection = connection
        self.queries = queries
        self.steady_ns, self.wall_us = now
        self.is_reading = is_reading
        self.number, self._number_end = taken or (1, 0)
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
        self.new: list[Envelope] = []
        """New records that are not written yet. They differ only in payload and have consecutive numbers."""
        self._new_first = 0
        self.pending: list[Statement] = []
        """Statements about records that are not sent yet."""
        self.inserts: list[tuple[Any, ...]] = []
        self.updates: list[tuple[Any, ...]] = []
        self.saved: set[int] = set()
        """The numbers of the records in `inserts` and `updates`."""

    # ---- queries --------------------------------------------------------------------------------------

    def ask(self, name: str, values: Any = ()) -> list[Any]:
        """The rows of a query that reads no records."""
        return self.connection.trip([(self.queries[name], values)])[0].rows

    def ask_records(self, name: str, values: Any) -> list[Any]:
        """The rows of a query that reads records, with the changes of this transaction."""
        self.note_locks()
        return self.trip(self.unsent(), [(name, values)])[0].rows

    def tell(self, name: str, values: Any) -> int:
        """Run a statement; returns how many rows it changed."""
        return self.connection.trip([(self.queries[name], values)])[0].changed

    def ask_all(self, asked: Sequence[tuple[str, Any]]) -> list[list[Any]]:
        """The rows of several queries, in one trip."""
        return [answer.rows for answer in self.trip([], asked)] if asked else []

    def trip(self, unsent: list[Statement], asked: Sequence[tuple[str, Any]]) -> list[StatementResult]:
        """Send statements and named queries in one trip, and return the answers of the queries."""
        statements = [*unsent, *((self.queries[name], values) for name, values in asked)]
        return self.connection.trip(statements)[len(unsent) :]

    # ---- numbers --------------------------------------------------------------------------------------

    def note_locks(self) -> None:
        """A query may lock records that have changed meanwhile: earlier numbers are too old for them."""
        self._has_fresh_numbers, self._has_locked = False, True

    def take_numbers(self, count: int) -> int:
        """The first of `count` consecutive numbers."""
        self.reserve(max(count, 1))
        first = self.number
        if count:
            self.changes += 1
            self.number = first + count
            if not self._has_locked:
                self._early += count
        return first

    def reserve(self, count: int) -> None:
        """Have at least `count` consecutive numbers to give that were taken after the last lock."""
        if self._has_fresh_numbers and self._number_end - self.number + 1 >= count:
            return
        wanted = max(count, NUMBERS_AT_ONCE)
        [(first,)] = self.ask("take_numbers", (wanted, *self.spare()))
        self.took(first, wanted)

    def spare(self) -> tuple[int, int]:
        """Numbers to give back with the next ones that are taken: the first and the last."""
        return (self.number, self._number_end) if self._first_number else self.known.take_spare()

    def took(self, first: int, count: int) -> None:
        """Give these numbers from now on."""
        if first != self.number or not self._first_number:
            self._first_number = first
        self.number, self._number_end = first, first + count - 1
        self._has_fresh_numbers = True

    def ask_to_change(self, name: str, values: Any, numbers: int) -> list[Any]:
        """The rows of a query that locks records, and numbers for their changes.

        Both are read in one trip, the numbers after the locks. A handle that changed nothing lately asks for
        the rows alone, so that an idle worker writes nothing.
        """
        if not self.known.usual:
            return self.ask_records(name, values)
        wanted = max(numbers, NUMBERS_AT_ONCE)
        asked = [(name, values), ("take_numbers", (wanted, *self.spare()))]
        found, numbered = self.trip(self.unsent(), asked)
        self.note_locks()
        self.took(numbered.rows[0][0], wanted)
        return found.rows

    def spare_numbers(self, *, committed: bool) -> None:
        """Remember, for the next transaction, how many numbers were used, and the unused ones."""
        self.known.habits.early = self._early if committed else 0
        self.known.usual = self.number - self._first_number if committed and self._first_number else 0
        first = self.number if committed else self._first_number
        if self._first_number and first <= self._number_end:
            self.known.keep_spare(first, self._number_end)

    # ---- records --------------------------------------------------------------------------------------

    def record(self, row: Sequence[Any]) -> Record:
        """A record from a row of `RECORD_COLUMNS`."""
        seq, name, queue = row[0], row[1], from_sql(row[2])
        message_id = self.known.new(queue, seq, row[19]) if name is None else from_sql(name)
        return _record_from(
            seq, message_id, queue, *row[3:12], from_sql(row[12]), *row[13:23], from_sql(row[23])
        )

    def head(self, row: Sequence[Any]) -> Head:
        """A record from a row of `pull`, with its stored payload."""
        return Head(self.record(row[:24]), row[24], from_sql(row[25]), from_sql(row[26]))

    def ends_at(self, deadline_ns: int) -> int:
        """Remember the deadline of a record."""
        self.known.note_deadline(deadline_ns, self.steady_ns)
        return deadline_ns

    def add(self, run: list[Envelope], step: int) -> range:
        """Number new records that differ only in their payloads; returns their numbers. Written later."""
        self.reserve(step * len(run))
        new = self.new
        if new and not (
            self.number == self._new_first + step * len(new)
            and len(new) + len(run) <= ALIKE_ROWS_MAX
            and len(run[0].payload) <= ALIKE_PAYLOAD_BYTES_MAX >= len(new[-1].payload)
            and traits(new[0]) == traits(run[0])
        ):
            self.write_new()
        if not self.new:
            self._new_first = self.number
        self.new += run
        first = self.take_numbers(step * len(run))
        return range(first, first + step * len(run), step)

    def append(self, parts: Sequence[Part], count: int) -> None:
        """Keep events for the commit."""
        if self.new:
            self.write_new()  # their numbers come first
        self.parts += parts
        self.event_count += count

    def queue_records(self) -> None:
        """Append the statements of changed records to the pending ones."""
        if self.new:
            self.write_new()
        if self.saved:
            inserts, updates = self.inserts, self.updates
            self.inserts, self.updates, self.saved = [], [], set()
            if inserts:
                self.pending += [(self.queries["insert"], values) for values in inserts]
            if updates:
                self.pending += [(self.queries["update"], values) for values in updates]

    def write_records(self) -> None:
        """Send the changed records that are kept."""
        if unsent := self.unsent():
            self.connection.trip(unsent)

    def unsent(self) -> list[Statement]:
        """The statements about records that are not sent yet. The caller sends them."""
        self.queue_records()
        pending, self.pending = self.pending, []
        return pending

    def write_new(self) -> None:
        """Send new records, and keep their events."""
        run, first, self.new = self.new, self._new_first, []
        e, now = run[0], self.steady_ns
        step = 1 if e.delay_ns else EVENTS_PER_NEW
        values = {
            "first": first, "step": step, "queue": to_sql(e.queue),
            "state": "SCHEDULED" if e.delay_ns else "QUEUED", "priority": e.priority,
            "max_retries": e.max_retries, "due": self.ends_at(now + e.delay_ns) if e.delay_ns else 0,
            "now": now, "expires": now + e.ttl_ns if e.ttl_ns else 0, "durability": e.durability,
            "wall_us": self.wall_us, "sender": to_sql(e.sender), "type": to_sql(e.type),
            "parent": to_sql(e.parent_message_id), "delay_ns": e.delay_ns, "ttl_ns": e.ttl_ns,
            "payloads": self.codec.seal_payloads(first, step, [each.payload for each in run]),
        }  # fmt: skip
        self.pending.append((self.queries["insert_alike"], values))
        sizes = [len(each.payload) for each in run]
        facts = [each.facts for each in run] if any(each.facts for each in run) else ()
        self.parts.append(
            NewRun(
                first, self.wall_us, e.queue, e.priority, e.type, e.parent_message_id, e.delay_ns, sizes,
                facts,
            )
        )  # fmt: skip
        self.event_count += len(run) * step

    @property
    def last_number(self) -> int:
        """The last number that was used: greater than those of all commits that this one has seen."""
        return self.number - 1
