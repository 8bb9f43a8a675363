"""A store in a PostgreSQL database, for any number of processes on any number of machines.

Rule 1: callers of one process share commits (`group_commit`); callers that bring a whole group
        (`write_many`) commit concurrently. Transactions do not wait for each other: they lock only
        the records that they decide about.
Rule 2: a transaction that meets a deadlock, a conflict or a lost connection is retried from its beginning.
Rule 3: the outcome of every commit is known before it is answered. After a lost connection the store looks
        whether the commit happened; when it cannot find out, the error says so.
Rule 4: the clock is that of the database, so that leases mean the same on every machine.
"""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import psycopg
from psycopg import errors as sql_errors

from postroom.core.formats.ids import IdRule
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import PostroomError, StoreDamaged, StoreRefused, Unavailable, WriteFailed
from postroom.message import Event
from postroom.stores.codec import codec_of
from postroom.stores.group_commit import GroupCommit, Job
from postroom.stores.own_ids import IDS_FACT, first_rule
from postroom.stores.postgres.connection import (
    ON_DISK,
    POOLED_IDLE_TIMEOUT_S,
    Address,
    Pool,
    migrate,
    queries,
    unreachable,
)
from postroom.stores.postgres.keys import PostgresKeys
from postroom.stores.postgres.known import DEADLINES_KNOWN_NS, ConflictError, PostgresKnown
from postroom.stores.postgres.ledger import NUMBERS_AT_ONCE, PostgresLedger
from postroom.stores.postgres.parts import PLACED_A_READ_MAX
from postroom.stores.postgres.rows import RECORD_COLUMNS, TRAIL_BYTES_MAX, to_sql
from postroom.stores.postgres.transaction import PostgresTransaction
from postroom.stores.postgres.trips import Connection, Statement
from postroom.stores.postgres.watchdog import WaitLimits
from postroom.stores.store import Capabilities
from postroom.stores.transaction import Transaction
from postroom.system.clock import Clock, SystemClock
from postroom.system.crypto.encryption import KEYS_FACT, Encryption
from postroom.system.handles import reset_after_fork
from postroom.system.log import library_log

T = TypeVar("T")

RECONNECT_S = 15.0  # how long a call retries while the server does not answer
RECONNECT_PAUSE_S = 0.1
CONFLICTS_MAX = 50  # retries of a commit because of conflicts with other transactions
CONFLICT_PAUSE_S = 0.002
FOLD_COMMITS = 100  # commits of a handle between two folds of the counters
CLOCK_KEPT_S = 60.0  # how long the time is calculated from the last answer of the server
NANOS_PER_US = 1_000
OFFSET = "offset_ns"  # the fact by how much the steady clock differs from the database's clock

_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LIMIT_IDLE = f"SET LOCAL idle_in_transaction_session_timeout = {round(POOLED_IDLE_TIMEOUT_S * 1000)}"
_log = library_log("postroom.store")

_CONFLICTS = (
    ConflictError,
    sql_errors.SerializationFailure,
    sql_errors.DeadlockDetected,
    sql_errors.UniqueViolation,
    sql_errors.LockNotAvailable,
)
_LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    sql_errors.ReadOnlySqlTransaction,
)
"""The server stopped, does not answer or has become a standby: another try can reach the new primary."""


class _Outage(NamedTuple):
    """A time in which the server does not answer."""

    since: float
    last: float
    """The last failed attempt."""
    error: str


class PostgresStore(PostgresKeys):
    """Records in the tables of one schema. Opening it connects to nothing; the first call does."""

    fatal_errors = (psycopg.Error, ConflictError)
    capabilities = Capabilities(
        is_shared=True, is_concurrent=True, is_ordered=False, survives_kills=False, is_encryptable=True
    )

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        store_id: str | None = None,
        reconnect_s: float = RECONNECT_S,
        encryption: Encryption | None = None,
        waits: WaitLimits | None = None,
    ) -> None:
        self.address = Address(url, waits)
        self.encryption = encryption
        self.url = self.address.url
        self._clock = clock
        self._store_id = store_id
        self._reconnect_s = reconnect_s
        self._pool = Pool(self.address)
        self._known: PostgresKnown | None = None
        self._offset_ns = 0
        self._newest_ns = 0
        self._uptime = SystemClock()
        self._heard: tuple[int, int] | None = None
        """The server's clock in its last answer, and the uptime of this machine then."""
        self._commits = 0
        self._random = random.SystemRandom()
        self._outage: _Outage | None = None
        """None while the server answers."""
        self.writing, self._read_only = _both_forms(self.address.schema)
        self._fresh_threads()
        reset_after_fork(self)

    def _fresh_threads(self) -> None:
        self._opening = threading.Lock()
        self._group = GroupCommit(
            self._commit_group, lambda error: unreachable(self.address, error, rolled_back=False)
        )

    # ---- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        return self._group.submit(Job(work, makes_room))

    def _write_group(self, work: Callable[[Transaction], T], *, makes_room: bool) -> T:
        job = Job(work, makes_room)
        self._commit_group([job])
        return job.outcome()

    def _commit_group(self, jobs: list[Job[Any]]) -> bool:
        """Commit jobs in one transaction, with retries."""

        def attempt(connection: Connection) -> PostgresTransaction | None:
            return self._run(connection, jobs)

        transaction = self._persist(attempt)
        if transaction is None:
            return False
        if self.on_commit is not None:
            self.on_commit(transaction)
        for job in jobs:
            job.finish()
        self._fold_if_due()
        return True

    def _persist(self, attempt: Callable[[Connection], T]) -> T:
        """Retry until success, more than `CONFLICTS_MAX` conflicts, or the end of the reconnect time."""
        conflicts, deadline = 0, self._deadline()
        while True:
            try:
                result = self._with_connection(attempt)
            except _CONFLICTS as error:
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise self._translated(error) from error
                time.sleep(CONFLICT_PAUSE_S * min(conflicts, 10) * self._random.random())
            except _LOST as error:
                self._note_outage(error)
                if isinstance(error, sql_errors.DiskFull) or time.monotonic() >= deadline:
                    raise self._translated(error) from error
                time.sleep(RECONNECT_PAUSE_S)
            except psycopg.Error as error:
                raise self._translated(error) from error
            else:
                self._outage = None
                return result

    def _deadline(self) -> float:
        """Until when a call may retry.

        All callers share the reconnect time of one outage: a later caller waits only for the rest of it. So a
        call that waited for the commit of another caller does not wait for the whole time again.
        """
        return self._outage_since(time.monotonic()) + self._reconnect_s

    def _outage_since(self, now: float) -> float:
        outage = self._outage
        return outage.since if outage is not None and now - outage.last < self._reconnect_s else now

    def _note_outage(self, error: Exception) -> None:
        self._pool.close()
        now = time.monotonic()
        self._outage = _Outage(self._outage_since(now), now, str(error))

    def _with_connection(self, attempt: Callable[[Connection], T]) -> T:
        self._open()
        connection = self._pool.take()
        try:
            with self._pool.watchdog.watching(connection):
                outcome = self._attempted(attempt, connection)
                connection.lock_number = 0
        except BaseException:
            self._pool.drop(connection)
            raise
        self._pool.give_back(connection)
        return outcome()

    def _attempted(self, attempt: Callable[[Connection], T], connection: Connection) -> Callable[[], T]:
        """The outcome of an attempt: its result, or a conflict after which the connection can be used."""
        try:
            result = attempt(connection)
        except _CONFLICTS as error:
            connection.run("ROLLBACK")
            return partial(_raise, error)
        return lambda: result

    def _run(self, connection: Connection, jobs: list[Job[Any]]) -> PostgresTransaction | None:
        """Run and commit jobs; None when they must be rolled back."""
        writer = self._random.getrandbits(63)
        transaction = self._begin(connection, writer)
        for job in jobs:
            if not job.finished and not job.run(transaction, self.fatal_errors):
                transaction.ledger.spare_numbers(committed=False)
                connection.run_unchecked("ROLLBACK")
                job.finish()
                return None
        if not transaction.changes:
            transaction.ledger.spare_numbers(committed=False)
            connection.run_unchecked("ROLLBACK")
            return transaction
        transaction.flush()
        for job in jobs:
            job.sealed = True
        try:
            self._commit(connection, transaction, writer)
        except BaseException:
            for job in jobs:
                job.sealed = False
            raise
        transaction.ledger.spare_numbers(committed=True)
        return transaction

    def _commit(self, connection: Connection, transaction: PostgresTransaction, writer: int) -> None:
        try:
            transaction.commit(writer)
        except _LOST as error:
            _log.warning("%s: the connection was lost during a commit; looking whether it happened", self.url)
            self._pool.drop(connection)
            if not self._was_committed((transaction.ledger.last_number, writer), error):
                raise

    def _was_committed(self, mark: tuple[int, int], error: Exception) -> bool:
        """Whether a commit happened whose answer was lost. Raises when that cannot be found out.

        Every transaction holds an advisory lock of its own, which stays taken while the server still works on
        the transaction. When the lock is free, the row of events tells whether the transaction was committed.
        """
        deadline = time.monotonic() + self._reconnect_s
        while time.monotonic() < deadline:
            try:
                with self._connected() as connection:
                    if connection.execute("SELECT pg_try_advisory_xact_lock(%s)", [mark[1]]).fetchone() == (
                        True,
                    ):
                        found = connection.execute(self.writing["was_committed"], mark)  # type: ignore[arg-type, unused-ignore]
                        return found.fetchone() == (True,)
            except (*_LOST, StoreRefused) as lost:
                _log.debug("%s: the outcome of a commit is not known yet: %s", self.url, type(lost).__name__)
            time.sleep(RECONNECT_PAUSE_S)
        raise unreachable(self.address, error, rolled_back=False) from error

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection of its own, for long work that is not a transaction of a caller."""
        try:
            connection = self.address.connect()
            try:
                yield connection
            finally:
                self._pool.drop(connection)
        except psycopg.Error as error:
            raise self._translated(error) from error

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A connection of its own that has to answer in time. Raises the errors of psycopg."""
        connection = self.address.connect()
        try:
            with self._pool.watchdog.watching(connection):
                yield connection
        finally:
            self._pool.drop(connection)

    def _begin(self, connection: Connection, writer: int) -> PostgresTransaction:
        """Begin a transaction, lock its mark, take numbers and read the usual cells, in one trip.

        Numbers are taken when the last transaction of this thread needed some before it locked records. A
        transaction without numbers may be a claim, so it reads the first deadlines.
        """
        known, queries = self._opened(), self.writing
        early, scans = known.habits.early, [*known.scans]
        wanted = max(NUMBERS_AT_ONCE, early) if early else 0
        begin: Statement = (queries["begin"], (writer,))
        if wanted:
            begin = (queries["begin_with_numbers"], (writer, wanted, *known.take_spare()))
        reads: list[Statement] = [
            (queries["cells"], (to_sql(kind), after, limit)) for kind, after, limit in scans
        ]
        opening: list[Statement] = [("BEGIN", ())]
        if not connection.mark:
            opening.append((_LIMIT_IDLE, ()))
        connection.lock_number = writer
        reads_deadlines = not early and known.wants_deadlines
        if reads_deadlines:
            reads.append((queries["first_deadlines"], ()))
        reads_keys = time.monotonic() >= self._look_at_keys
        if reads_keys:
            reads.append((queries["fact"], (KEYS_FACT,)))
        begun, *answers = connection.trip([*opening, begin, *reads])[len(opening) :]
        if reads_keys:
            self._check_keys(answers.pop().rows)
        database_us, _, _, *numbers = begun.rows[0]
        now = self._time(database_us)
        if reads_deadlines:
            known.set_deadlines(answers.pop().rows[0], now[0])
        taken = (numbers[0], numbers[0] + wanted - 1) if numbers else None
        read = {scan: answer.rows for scan, answer in zip(scans, answers, strict=True)}
        return PostgresTransaction(PostgresLedger(known, connection, queries, now, taken), read)

    def _time(self, database_us: int) -> tuple[int, int]:
        """The time by the steady clock and by the wall clock."""
        if self._clock is not None:
            return self._offset_ns + self._clock.boot_ns(), self._clock.wall_us()
        self._heard = database_us, self._uptime.boot_ns()
        now_ns = database_us * NANOS_PER_US + self._offset_ns
        self._newest_ns = max(self._newest_ns, now_ns)  # it never steps back
        return self._newest_ns, database_us

    def wall_us(self) -> int:
        """The server's clock. After a recent answer it is calculated, so that no event loop has to wait."""
        if self._clock is not None:
            return self._clock.wall_us()
        calculated_us = self._calculated_us()
        return super().wall_us() if calculated_us is None else calculated_us

    def _calculated_us(self) -> int | None:
        """The server's clock, calculated from its last answer; None when the answer is too old."""
        if self._heard is None:
            return None
        database_us, then_ns = self._heard
        passed_ns = self._uptime.boot_ns() - then_ns
        return database_us + passed_ns // NANOS_PER_US if passed_ns < CLOCK_KEPT_S * NANOS_PER_S else None

    def known_deadline_ns(self) -> int | None:
        """The cycle before a pause has most often read the deadlines, so that no trip is needed."""
        known, calculated_us = self._known, self._calculated_us()
        if self._clock is not None or known is None or calculated_us is None:
            return None
        first_ns, read_ns = known.deadlines
        now_ns = calculated_us * NANOS_PER_US + self._offset_ns
        return max(0, first_ns - now_ns) if read_ns <= now_ns < read_ns + DEADLINES_KNOWN_NS else None

    def _fold_if_due(self) -> None:
        """Fold the counters every `FOLD_COMMITS` commits. A failed fold is made up by the next one."""
        self._commits += 1
        if self._commits % FOLD_COMMITS == 0:
            with suppress(psycopg.Error, PostroomError):
                self._with_connection(self._fold)

    def _fold(self, connection: Connection) -> None:
        connection.run(self.writing["make_partitions"])
        for part in ("BEGIN", "SET LOCAL synchronous_commit = off", self.writing["fold_counts"], "COMMIT"):
            connection.run(part)

    # ---- reading -------------------------------------------------------------------------------

    def read(self, work: Callable[[Transaction], T]) -> T:
        def attempt(connection: Connection) -> T:
            found = connection.run(self._begin_reading(connection))
            now = self._time(int(found.get_value(0, 0) or 0))
            known, queries = self._opened(), self._read_only
            if self.encryption is None and time.monotonic() >= self._look_at_keys:
                self._check_keys(connection.trip([(queries["fact"], (KEYS_FACT,))])[0].rows)
            ledger = PostgresLedger(known, connection, queries, now, is_reading=True)
            try:
                return work(PostgresTransaction(ledger))
            finally:
                connection.run_unchecked("ROLLBACK")

        return self._persist(attempt)

    def _begin_reading(self, connection: Connection) -> str:
        """Begins a reading. Behind a pooler it takes a lock, so that its session can be looked up."""
        if connection.mark:
            return f"{_BEGIN_READING}; SELECT {_NOW}"
        number = connection.lock_number = self._random.getrandbits(63)
        return f"{_BEGIN_READING}; {_LIMIT_IDLE}; SELECT {_NOW}, pg_advisory_xact_lock({number})"

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        self._place_events()
        return super().events(after, limit)

    def newest_event(self) -> int:
        self._place_events()
        return super().newest_event()

    def _place_events(self) -> None:
        """Give positions to the events that were committed since the last call."""

        def attempt(connection: Connection) -> None:
            connection.execute(self.writing["place_events"], [PLACED_A_READ_MAX])  # type: ignore[arg-type, unused-ignore]

        self._persist(attempt)

    def identity(self) -> str:
        return self._persist(lambda _: self._opened().store_id)

    def nudge_channel(self) -> tuple[Callable[[], Any], str] | None:
        return (self.address.connect, f"{self.address.schema}_nudge") if self.address.listens else None

    # ---- life ----------------------------------------------------------------------------------

    def _opened(self) -> PostgresKnown:
        assert self._known is not None  # noqa: S101 - for the type checker: a connection was taken
        return self._known

    def _open(self) -> None:
        """Create or migrate the schema, and read the identity and the clock of the store.

        One caller does it, and the others wait. When it fails, it fails for all of them: if each of them
        tried in turn, the last one would wait for the sum of all timeouts.
        """
        if self._known is not None:
            return
        began = time.monotonic()
        with self._opening:
            if self._known is not None:
                return
            if self._outage is not None and self._outage.last >= began:
                raise psycopg.OperationalError(self._outage.error)
            try:
                with self._connected() as connection:
                    self._known = self._set_up(connection)
            except _LOST as error:
                self._note_outage(error)
                raise

    def _set_up(self, connection: Connection) -> PostgresKnown:
        """Migrate the schema, and read the facts that every transaction needs."""
        migrate(connection, self.address)
        connection.execute(self.writing["make_partitions"])  # type: ignore[arg-type, unused-ignore]
        with connection.transaction():
            connection.execute(f"SELECT {ON_DISK}")
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 3)", [self.address.schema])
            store_id = self._fact(connection, "store_id", self._store_id or f"t{os.urandom(4).hex()}")
            [(newest,)] = connection.execute(self.writing["newest_number"]).fetchall()  # type: ignore[arg-type, unused-ignore]
            rule = self._fact(
                connection, IDS_FACT, first_rule(self._store_id, newest, self._uptime.wall_us()).text
            )
            if self._clock is None:
                self._offset_ns = int(self._fact(connection, OFFSET, "0"))
            else:
                self._set_clock(connection, self._clock)
            self._note_keys(connection)
        return PostgresKnown(store_id, IdRule.of(rule), codec_of(store_id, self.encryption))

    def _fact(self, connection: Connection, name: str, default: str) -> str:
        """A fact, which is set when it is unknown."""
        connection.execute(self.writing["add_fact"], [name, default])  # type: ignore[arg-type, unused-ignore]
        [(value,)] = connection.execute(self.writing["fact"], [name]).fetchall()  # type: ignore[arg-type, unused-ignore]
        return str(value)

    def _set_clock(self, connection: Connection, clock: Clock) -> None:
        """Continue the clock of the store. After a reboot, every lease runs its whole length again."""
        if self._fact(connection, "clock_boot_id", "") == clock.boot_id():
            self._offset_ns = int(self._fact(connection, "clock_offset_ns", "0"))
            return
        [(newest,)] = connection.execute(self.writing["newest_time"]).fetchall()  # type: ignore[arg-type, unused-ignore]
        self._offset_ns = newest - clock.boot_ns()
        connection.execute(self.writing["restart_leases"], [newest])  # type: ignore[arg-type, unused-ignore]
        for name, value in (("clock_boot_id", clock.boot_id()), ("clock_offset_ns", str(self._offset_ns))):
            connection.execute(self.writing["set_fact"], [name, value])  # type: ignore[arg-type, unused-ignore]

    def close(self) -> None:
        with self._group.leading:
            known = self._known
            if known is not None and known.has_spare and self._outage is None:
                # Give back the numbers that were taken and not used. When that fails, they stay unused.
                given = [0, *known.take_spare()]
                with suppress(psycopg.Error, PostroomError):
                    self._with_connection(lambda one: one.execute(self.writing["take_numbers"], given))  # type: ignore[arg-type, unused-ignore]
            self._pool.close()
            self._known = None

    def reopen(self) -> None:
        self.close()

    def after_fork(self) -> None:
        """A child opens its own connections."""
        self._pool.after_fork()
        self._known = None
        self._fresh_threads()

    # ---- errors --------------------------------------------------------------------------------

    def _translated(self, error: Exception) -> PostroomError:
        """The error of postroom for an error of the database."""
        text = self.address.hidden(error)
        if isinstance(error, sql_errors.DiskFull):
            return WriteFailed(self.url, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        if isinstance(error, sql_errors.InsufficientPrivilege):
            return StoreRefused(self.url, f"its role lacks a privilege: {text}")
        if isinstance(error, _CONFLICTS):
            return Unavailable(f"{self.url}: too many other transactions change the same records: {text}")
        if isinstance(error, _LOST):
            return unreachable(self.address, text, rolled_back=True)
        return StoreDamaged(f"{self.url} does not hold what postroom wrote: {text}")


def _raise(error: Exception) -> NoReturn:
    raise error


def _both_forms(schema: str) -> tuple[dict[str, str], dict[str, str]]:
    """The queries of a writing transaction, which lock what they find, and those of a reading."""
    texts = queries(schema)
    facts = {"record": RECORD_COLUMNS, "trail_max": str(TRAIL_BYTES_MAX), "on_disk": ON_DISK}

    def form(lock: str) -> dict[str, str]:
        words = {**facts, "lock": lock, "skip": f"{lock} SKIP LOCKED" if lock else ""}
        return {name: _filled(text, words) for name, text in texts.items()}

    return form("FOR NO KEY UPDATE"), form("")


def _filled(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return text
