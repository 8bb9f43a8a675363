"""A store in one SQLite file (WAL), for any number of processes of one machine.

Rule 1: one connection writes, and whoever writes holds the file's own lock, for which processes queue up. So
        SQLite's "database is locked" has no way to happen.
Rule 2: many callers, one commit. Whoever comes while a commit is under way waits for the next one, which
        takes everybody's work.
Rule 3: what makes room (complete, cancel, purge) also works on a full disk: a ballast is given up for it.
"""

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import apsw
import msgspec

from postroom.core import lifecycle
from postroom.errors import HandleDead, LockTimeout, PostroomError, StoreDamaged, UnknownTask, WriteFailed
from postroom.message import Envelope, Event, Record, State, Stored
from postroom.stores import checkpoints
from postroom.stores.ballast import Ballast
from postroom.stores.base import (
    PRIORITIES,
    ByIds,
    Counted,
    Due,
    Expired,
    InState,
    Leased,
    Limits,
    Outbox,
    Overdue,
    Pick,
    Transaction,
    unknown,
)
from postroom.stores.checkpoints import Checkpoints
from postroom.stores.eventruns import EVENTS_OF_ONE, Untold, runs_of, told_by, unpacked
from postroom.stores.sql.queries import (
    BY_NAME,
    BY_SEQ,
    BY_SEQS,
    COUNTED,
    DUE,
    EXPIRED,
    FOR_EVER,
    HEAD,
    LANE_DELAYED,
    LANE_LEASED,
    NEW_EVENTS,
    NEWEST_EVENT,
    NEXT_WORK,
    NUMBER_DIGITS_MAX,
    PAYLOADS,
    QUEUE,
    RECORD,
    SET_FACT,
    STORED,
    TOLD_TO,
    UNTOLD,
    UNTOLD_COUNTS,
    Reading,
    ask,
    record_from,
)
from postroom.stores.sqliteverbs import (
    DEFAULT_LIMITS,
    LIMITS_KNOWN_S,
    Depths,
    SqliteTransaction,
    add_counts,
    cast_to_sqlite,
    counted_depths,
    decode_counts,
    decode_event,
    encode,
    limits_of,
    store_id_of,
)
from postroom.system.atomic import PRIVATE_FILE_MODE, make_folder, open_safely, sync_folder
from postroom.system.clock import Clock, SystemClock
from postroom.system.fairlock import FairLock
from postroom.system.handles import leak, reset_after_fork

T = TypeVar("T")

SQLITE_OLDEST = (3, 51, 3)  # before it, several processes could damage a WAL
LOCK_TIMEOUT_S = 30.0
BUSY_TIMEOUT_S = 10.0  # for programs that open the file without our lock
FORK_WAIT_S = 10.0  # for a commit that is under way in another thread
FILE_LOOK_S = 0.1  # how long a file that was moved or removed may still be written to
LOOK_AGAIN_S = 0.05  # what a caller waits at most for a wake-up that never comes
GROUP_MAX = 256  # callers whose work goes into one commit
WAL_BYTES_MAX = 64 * 1024 * 1024  # the file is cut to this after it was moved
CACHE_KIB = 64 * 1024
BALLAST_BYTES = 4 * 1024 * 1024

OUR_TABLES = {"facts", "queues", "records", "keys", "events"}

_log = logging.getLogger("postroom.store")


class _Job(Generic[T]):
    """One caller's work, and what became of it."""

    __slots__ = ("error", "finished", "makes_room", "result", "sealed", "wake", "work")

    def __init__(self, work: Callable[[Transaction], T], makes_room: bool) -> None:
        self.work = work
        self.makes_room = makes_room
        self.sealed = False
        """Whether its commit has begun: from then on nobody may do it again."""
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.wake = threading.Lock()
        """Taken while there is nothing to wake up for."""
        self.wake.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """Nobody may be left without an answer."""
        if not self.finished:
            self.error = error or self.error
            self.finished = True
        self.look()

    def look(self) -> None:
        """Have the caller look what became of it."""
        with suppress(RuntimeError):  # it has not looked since the last time
            self.wake.release()

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[no-any-return]


class SqliteStore:
    """Records in `path`. Besides it lie a lock, a ballast, and SQLite's own WAL files."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        ballast_bytes: int = BALLAST_BYTES,
        store_id: str | None = None,
    ) -> None:
        if _library_version() < SQLITE_OLDEST:
            raise StoreDamaged(
                f"SQLite {apsw.sqlite_lib_version()} can damage a database that several processes write: "
                f"install apsw with SQLite {'.'.join(map(str, SQLITE_OLDEST))} or newer"
            )
        if not hasattr(apsw, "carray"):
            raise StoreDamaged(
                "this apsw was built without SQLite's arrays (carray): install its wheel from PyPI"
            )
        self.path = Path.cwd() / path
        self.url = f"sqlite:///{self.path}"
        self._clock = SystemClock() if clock is None else clock
        self._lock = FairLock(self.path, lock_timeout_s)
        self._ballast = Ballast(self.path.with_name(self.path.name + ".ballast"), ballast_bytes)
        self._checkpoints = Checkpoints(self.path, self._alone)
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._offset_ns = 0
        self.store_id = self.prefix = ""
        self._new_store_id = f"t{os.urandom(4).hex()}" if store_id is None else store_id
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self.depths: Depths = {}
        self.seen = 0
        self.told_to = 0
        """The newest row of events."""
        self.untold: dict[int, int] = {}
        """How many new records behind it each queue has."""
        self.counted = 0
        self._cursor: apsw.Cursor | None = None
        self._version = -1
        """The connection's data version after our last commit: another one means that others have written."""
        self._settled = False
        """Whether what we remember is what the file says, others' commits aside."""
        self._wal_fd = -1
        self._look_at_wal = 0
        self._dead = False
        self._suspect = False
        """Whether the file has to be looked through before it is trusted again."""
        self.on_ready: Callable[[set[str]], None] | None = None
        self.on_ended: Callable[[], None] | None = None
        self.on_notable: Callable[[Sequence[Event]], None] | None = None
        self.queue_rows: dict[str, tuple[float, tuple[int, Limits]]] = {}
        self._resting: list[threading.Lock] = []
        self._file = (0, 0)
        self._look_at_file = 0.0
        self.trouble = ""
        """Why nothing is written at present; empty when all is well."""
        self._fresh_threads()
        reset_after_fork(self)

    def _fresh_threads(self) -> None:
        self._leading = threading.Lock()
        self._reading = threading.Lock()
        self._pending: deque[_Job[Any]] = deque()
        self._checkpoints.fresh()

    # ---- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        if not self._pending and not self._leading.locked():
            with self._leading:
                cursor = self._cursor
                if cursor is not None and not self._pending and self._ballast.whole and not self._dead:
                    try:  # nobody else wants anything, and everything is as it should be
                        return self._write_alone(work, cursor)
                    except apsw.FullError:  # nothing is kept: below is who knows what to do then
                        pass
        return self._write_together(work, makes_room)

    def _write_alone(self, work: Callable[[Transaction], T], cursor: apsw.Cursor) -> T:
        """What `_write_together` does, for one caller: no list, no waiting."""
        try:
            self._lock.acquire()
            transaction = self._begin(cursor)
            result = work(transaction)
            transaction.flush()
            self._settled = False
            cursor.execute("COMMIT")
            self._settle(transaction)
        except (apsw.Error, OSError) as error:
            self._translate(error)
        finally:
            self._let_go()
        self._announce(transaction)
        if self._pending:
            self._wake_next()
        return result

    def _begin(self, cursor: apsw.Cursor) -> SqliteTransaction:
        connection = cursor.connection
        if connection.in_transaction:  # an interrupt was faster than the end of the last one
            self._names.clear()
            self._numbers.clear()
            cursor.execute("ROLLBACK")
        cursor.execute("BEGIN IMMEDIATE")
        now = time.monotonic()
        if now >= self._look_at_file:
            self._check_file(now)
        if not self._settled or connection.data_version() != self._version:
            self._catch_up(cursor)
        steady_ns = self._offset_ns + self._clock.boot_ns()
        return SqliteTransaction(self, cursor, steady_ns, self._clock.wall_us())

    def _check_file(self, now: float) -> None:
        """Whether the name still means the file that is open: what is written elsewhere would be lost."""
        try:
            info = self.path.stat()
            same = (info.st_dev, info.st_ino) == self._file
        except FileNotFoundError:
            same = False
        if not same:
            self._dead = True
            self.trouble = f"{self.path} was moved or removed while it was in use"
            raise StoreDamaged(self.trouble)
        self._look_at_file = now + FILE_LOOK_S

    def _write_together(self, work: Callable[[Transaction], T], makes_room: bool) -> T:
        job: _Job[T] = _Job(work, makes_room)
        self._pending.append(job)
        try:
            while not job.finished:
                if self._leading.locked():
                    job.wake.acquire(timeout=LOOK_AGAIN_S)
                    continue
                with self._leading:
                    if not job.finished:
                        self._lead()
                self._wake_next()
        finally:
            job.finished = True  # an interrupt ends the wait, and nobody else may do the work
        return job.outcome()

    def _wake_next(self) -> None:
        """One of those who came meanwhile goes on for all of them."""
        with suppress(IndexError):
            self._pending[0].look()

    def _lead(self) -> None:
        """Commit what everybody who waits wants, in one transaction."""
        jobs: list[_Job[Any]] = []
        while self._pending and len(jobs) < GROUP_MAX:
            job = self._pending.popleft()
            if not job.finished:
                jobs.append(job)
        try:
            if not self._run(jobs):
                for job in jobs:  # one of them failed half way and took the others with it: each alone
                    if not job.finished:
                        self._run([job])
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for job in jobs:
                job.end(error)
        except BaseException:
            self._give_back(jobs)
            raise

    def _give_back(self, jobs: list[_Job[Any]]) -> None:
        """We were interrupted, and the others were not: somebody else does their work, if nobody has."""
        self._pending.extendleft(job for job in reversed(jobs) if not job.sealed)
        cut_short = InterruptedError(errno.EINTR, "interrupted")
        for job in jobs:
            if job.sealed:
                job.end(WriteFailed(self.path, cut_short, rolled_back=False))

    def _run(self, jobs: list[_Job[Any]]) -> bool:
        """Run the jobs in one transaction; False when it was rolled back and the others have to run again."""
        try:
            return self._attempt(jobs)
        except apsw.FullError:
            if not any(job.makes_room for job in jobs) or not self._ballast.give_up():
                raise self._disk_full() from None
        _log.warning("%s: the disk is full; the ballast is given up so that work can end", self.path)
        for job in jobs:
            if not job.makes_room:
                job.end(self._disk_full())
        try:
            return self._attempt([job for job in jobs if not job.finished], refill=False)
        except apsw.FullError:
            raise self._disk_full() from None

    def _disk_full(self) -> WriteFailed:
        return WriteFailed(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _attempt(self, jobs: list[_Job[Any]], *, refill: bool = True) -> bool:
        if self._dead:
            raise HandleDead(self.path)
        if self._cursor is None:
            try:
                _check_kind(self.path)  # before anything is put beside a file that is not ours
            except (apsw.Error, OSError) as error:
                self._translate(error)
        if refill and not self._ballast.whole:
            self._refill_ballast(jobs)
        try:
            self._lock.acquire()
            transaction = self._commit(jobs)
        except (apsw.Error, OSError) as error:
            self._translate(error)
        finally:
            self._let_go()
        if transaction is None:
            return False
        self._announce(transaction)
        for job in jobs:
            job.end()
        return True

    def _commit(self, jobs: list[_Job[Any]]) -> SqliteTransaction | None:
        """Everybody's work in one transaction; None when it had to be rolled back."""
        cursor = self._cursor or self._open()
        transaction = self._begin(cursor)
        if not self._work(jobs, transaction):
            return None
        transaction.flush()
        self._settled = False
        for job in jobs:
            job.sealed = True
        try:
            cursor.execute("COMMIT")
        except apsw.Error:
            for job in jobs:
                job.sealed = False
            raise
        self._settle(transaction)
        return transaction

    def _catch_up(self, cursor: apsw.Cursor) -> None:
        """Learn what other processes did to the depths meanwhile."""
        with self._translated():
            self._count_anew(cursor)

    def _count_anew(self, cursor: apsw.Cursor) -> None:
        written_down = ask(cursor, COUNTED)
        if not self._settled or (written_down and written_down[0][0] > self.told_to):
            # A commit of ours was cut short, or what lies between may be purged: begin with what was written
            # down.
            self._count_from(cursor.connection)
        self._settled = False  # an interrupt below would have a row counted twice
        add_counts(self.depths, ((queue, "QUEUED", -n) for queue, n in self.untold.items()))
        self.untold = {}
        for seq, counts in ask(cursor, NEW_EVENTS, (self.told_to,)):
            add_counts(self.depths, decode_counts(counts))
            self.told_to = seq
        self.seen = self.told_to
        for queue, n, newest in ask(cursor, UNTOLD_COUNTS, (self.told_to,)):
            add_counts(self.depths, [(queue, "QUEUED", n)])
            self.untold[queue] = n
            self.seen = max(self.seen, newest + EVENTS_OF_ONE - 1)
        self._settled = True

    def _count_from(self, connection: apsw.Connection) -> None:
        """Begin with the depths that are written down."""
        self.depths, self.counted = counted_depths(connection)
        self.told_to, self.untold = self.counted, {}

    def _refill_ballast(self, jobs: list[_Job[Any]]) -> None:
        """As long as there is no space for it, what comes free belongs to those who end work."""
        make_folder(self.path.parent, "os")
        try:
            self._ballast.fill()
        except WriteFailed:
            if not self.path.exists() or not any(job.makes_room for job in jobs):
                raise
            for job in jobs:
                if not job.makes_room:
                    job.end(self._disk_full())

    def _work(self, jobs: list[_Job[Any]], transaction: SqliteTransaction) -> bool:
        for job in jobs:
            if job.finished:
                continue
            changes, number = transaction.changes, transaction.number
            job.error = None
            try:
                job.result = job.work(transaction)
            except apsw.Error:
                raise
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                job.error = error
                if transaction.changes != changes or transaction.number != number:
                    job.end()
                    return False
        return True

    def _settle(self, transaction: SqliteTransaction) -> None:
        """Remember what was committed. Until the end of it, the file knows better than we do."""
        if transaction.new_queues:
            for name, number in transaction.new_queues.items():
                self._numbers[name], self._names[number] = number, name
        add_counts(self.depths, transaction.changed)
        self.seen = transaction.number - 1
        if transaction.told:
            self.told_to = self.seen
            if self.untold:
                self.untold = {}
        else:
            for queue, _, n in transaction.changed:  # one new record, which tells itself
                self.untold[queue] = self.untold.get(queue, 0) + n
        self.counted = transaction.counted
        writer = self._writer
        if writer is not None:
            self._version = writer.data_version()
        self._settled = True
        if writer is not None and (self.seen >= self._look_at_wal or not transaction.changed):
            self._look_at_wal = self.seen + checkpoints.LOOK_EVENTS
            self._checkpoints.look(writer)

    def _announce(self, transaction: SqliteTransaction) -> None:
        """Make it durable as its class says, then wake who waits for work, and who waits for a result."""
        if transaction.synced:
            self._sync()
        if transaction.ready and self.on_ready is not None:
            self.on_ready(transaction.ready)
        if transaction.ended and self.on_ended is not None:
            self.on_ended()
        if transaction.notable and self.on_notable is not None:
            self.on_notable(transaction.notable)

    def _sync(self) -> None:
        """Make the commit durable. The WAL is all that has to be: a checkpoint syncs for itself."""
        try:
            if self._wal_fd < 0:
                self._wal_fd = open_safely(f"{self.path}-wal", os.O_RDWR)
                sync_folder(self.path.parent)
            os.fsync(self._wal_fd)
        except OSError as error:
            self._dead = True
            self.trouble = f"an fsync of {self.path} failed: {error.strerror}"
            _log.error("%s", self.trouble)
            raise WriteFailed(self.path, error, rolled_back=False) from error

    def _let_go(self) -> None:
        """Whatever happened: no transaction stays open, and the next one may have the lock."""
        try:
            if self._writer is not None and self._writer.in_transaction:
                # A queue that was new in it never was, and its number will be another's.
                self._names.clear()
                self._numbers.clear()
                self._writer.execute("ROLLBACK")
        except apsw.Error:  # the connection is of no use any more
            self._drop()
        finally:
            self._lock.release()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PostroomError:
            raise
        except apsw.FullError as error:
            raise self._disk_full() from error
        except apsw.Error as error:
            self._translate(error)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # A column holds what we did not write, such as a value that is nested too deeply.
            raise StoreDamaged(f"{self.path} is damaged: {error}") from error

    def _translate(self, error: apsw.Error | OSError) -> NoReturn:
        """SQLite's and the system's errors as ours. A full disk is left to who can do something about it."""
        if isinstance(error, apsw.FullError | PostroomError):
            raise error
        if isinstance(error, OSError):
            raise WriteFailed(self.path, error, rolled_back=self._settled) from error
        if isinstance(error, apsw.CorruptError | apsw.NotADBError):
            raise StoreDamaged(f"{self.path} is damaged: {error}") from error
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            raise LockTimeout(self.path, BUSY_TIMEOUT_S) from error
        self._drop()
        if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:  # no room for the WAL's index
            raise apsw.FullError(str(error)) from error
        raise WriteFailed(self.path, OSError(errno.EIO, str(error))) from error

    # ---- connections ---------------------------------------------------------------------------

    def _open(self) -> apsw.Cursor:
        """The writing connection, by its cursor; the file's lock is held."""
        if not self.path.exists():
            os.close(open_safely(self.path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE))
        connection = _connect(self.path)
        if self._suspect:
            _check_pages(connection, self.path)
            self._suspect = False
        _migrate(connection, self.path)
        with _transaction(connection):
            self._set_clock(connection)
            self.store_id = store_id_of(connection, self._new_store_id)
            self.prefix = f"{self.store_id}-"
        self._count_from(connection)
        for number, name in connection.execute("SELECT queue, name FROM queues"):
            self._names[number], self._numbers[name] = name, number
        info = self.path.stat()
        self._file, self._look_at_file = (info.st_dev, info.st_ino), 0.0
        connection.wal_autocheckpoint(0)
        self._writer, self._cursor, self._settled = connection, connection.cursor(), False
        return self._cursor

    def _set_clock(self, connection: apsw.Connection) -> None:
        """Go on counting where the store's time stood. In another boot, every lease runs its length anew."""
        facts = dict(ask(connection, "SELECT name, value FROM facts WHERE name LIKE 'clock%'"))
        if facts.get("clock_boot_id") == self._clock.boot_id():
            self._offset_ns = int(facts["clock_offset_ns"])
            return
        newest = connection.execute(
            "SELECT max(coalesce((SELECT ready_at FROM records ORDER BY seq DESC LIMIT 1), 0), "
            f"coalesce((SELECT max(turn - lease_ns) FROM records WHERE lane = {LANE_LEASED}), 0), "
            f"coalesce((SELECT max(ready_at) FROM records WHERE lane = {LANE_DELAYED}), 0))"
        ).get
        self._offset_ns = newest - self._clock.boot_ns()
        connection.execute(f"UPDATE records SET turn = ? + lease_ns WHERE lane = {LANE_LEASED}", (newest,))
        connection.execute(SET_FACT, ("clock_boot_id", self._clock.boot_id()))
        connection.execute(SET_FACT, ("clock_offset_ns", self._offset_ns))

    @contextmanager
    def _alone(self) -> Iterator[apsw.Connection | None]:
        """Nobody writes: neither a thread nor another process. None when the file is closed."""
        with self._leading:
            if self._writer is None:
                yield None
                return
            try:
                self._lock.acquire()
                yield self._writer
            finally:
                self._lock.release()
        self._wake_next()

    @contextmanager
    def _snapshot(self) -> Iterator[apsw.Connection]:
        """A connection to read with: it sees what is committed and stops nobody."""
        if self._writer is None and self._reader is None:
            # Makes the file, and whatever it lacks. Not below: work that reads as it writes would wait.
            self.write(lambda _: None, makes_room=True)
        with self._reading, self._translated():
            if self._reader is None:
                self._reader = _connect(self.path)
            yield self._reader

    def queue_name(self, number: int, connection: Reading) -> str:
        name = self._names.get(number)
        if name is None:
            name = str(ask(connection, "SELECT name FROM queues WHERE queue = ?", (number,))[0][0])
            self._names[number] = name
        return name

    def number_of(self, name: str, connection: Reading) -> int | None:
        """A queue's number; None when it has none yet."""
        number = self._numbers.get(name)
        if number is None:
            rows = ask(connection, "SELECT queue FROM queues WHERE name = ?", (name,))
            if rows:
                number = self._numbers[name] = rows[0][0]
        return number

    # ---- looking -------------------------------------------------------------------------------

    def read(self, message_id: str) -> Stored | None:
        with self._snapshot() as connection, _frozen(connection):
            try:
                record = self._by_id(message_id, connection)
            except UnknownTask:
                return None
            row = ask(connection, STORED, (record.seq,))[0]
        kind, parent, key, delay_ns, ttl_ns, priority, payload, result, trail, sender = row
        envelope = Envelope(
            message_id=message_id,
            queue=record.queue,
            payload=payload,
            type=kind,
            parent_message_id=parent,
            key=key,
            priority=priority,
            max_retries=record.max_retries,
            delay_ns=delay_ns,
            ttl_ns=ttl_ns,
            durability=record.durability,
            sender=sender or "",
        )
        first = lifecycle.created(envelope, message_id, record.seq, record.created_us)
        with self._translated():
            told = [decode_event(line) for line in (trail or "").split("\n") if line]
        return Stored(record, envelope, result, lifecycle.history(record, first, told))

    def record_of(self, row: tuple[Any, ...], connection: Reading) -> Record:
        """A record from its columns."""
        lane, turn = row[12], row[13]
        return record_from(
            row[0],
            row[1] or f"{self.store_id}-{row[0]}",
            self._names.get(row[2]) or self.queue_name(row[2], connection),
            *row[3:12],
            turn if lane == LANE_LEASED else 0,
            turn if lane == LANE_DELAYED else 0,
            *row[14:21],
        )

    def find(self, pick: Pick) -> list[Record]:
        now = self.steady_ns()
        with self._snapshot() as connection:
            return self.found(pick, connection, now)

    def found(self, pick: Pick, connection: Reading, now: int) -> list[Record]:
        """The records of a pick, through any connection."""
        rows: list[Any] = []
        match pick:
            case ByIds(message_ids):
                return self._by_ids(message_ids, connection)
            case Overdue(queue, limit):
                rows = self._past(LANE_LEASED, queue, connection, now, limit)
            case Leased(queue, limit):
                rows = self._past(LANE_LEASED, queue, connection, FOR_EVER, limit)
            case Due(queue, limit):
                rows = self._past(LANE_DELAYED, queue, connection, now, limit)
            case Expired(limit):
                rows = ask(connection, EXPIRED, (now, limit))
            case InState(queue, state, after, limit):
                rows = self._in_state(queue, state, after, limit, connection)
        return [self.record_of(row, connection) for row in rows]

    def _by_id(self, message_id: str, connection: Reading) -> Record:
        return self._by_ids((message_id,), connection)[0]

    def _by_ids(self, message_ids: tuple[str, ...], connection: Reading) -> list[Record]:
        """Those that the store named are looked up by number, in one query; others by name, one by one."""
        numbers = [self.own_number(message_id) for message_id in message_ids]
        own = [number for number in numbers if number]
        rows: list[Any] = []
        if len(own) == 1:
            rows = ask(connection, BY_SEQ, (own[0],))
        elif own:
            rows = ask(connection, BY_SEQS, (encode(own).decode(),))
        found = {row[0]: row for row in rows}
        records = []
        for message_id, number in zip(message_ids, numbers, strict=True):
            row = found.get(number) if number else self._named(message_id, connection)
            if row is None:
                raise unknown(message_id)
            records.append(self.record_of(row, connection))
        return records

    def own_number(self, message_id: str) -> int:
        """The number in a name that the store gave; 0 for any other name."""
        prefix = self.prefix
        if message_id.startswith(prefix):
            number = message_id[len(prefix) :]
            if (
                number.isascii()
                and number.isdigit()
                and number[0] != "0"
                and len(number) <= NUMBER_DIGITS_MAX
            ):
                return int(number)
        return 0

    def _named(self, message_id: str, connection: Reading) -> Any:
        rows = ask(connection, BY_NAME, (message_id,))
        return rows[0] if rows else None

    def _past(self, lane: int, queue: str | None, connection: Reading, now: int, limit: int) -> list[Any]:
        if queue is not None:
            number = self.number_of(queue, connection)
            return [] if number is None else ask(connection, DUE, (number, lane, now, limit))
        rows: list[Any] = []
        for (number,) in ask(connection, "SELECT queue FROM queues ORDER BY queue"):
            rows += ask(connection, DUE, (number, lane, now, limit))
        rows.sort(key=lambda row: (row[13], row[0]))  # by turn, then by acceptance
        return rows[:limit]

    def _in_state(
        self, queue: str | None, state: State | None, after: int, limit: int, connection: Reading
    ) -> list[Any]:
        conditions: list[str] = ["seq > ?"]
        values: list[int | str] = [after]
        if queue is not None:
            conditions.append("queue = ?")
            values.append(self.number_of(queue, connection) or 0)
        if state is not None:
            conditions.append("state = ?")
            values.append(state)
        query = f"{RECORD} WHERE {' AND '.join(conditions)} ORDER BY seq LIMIT ?"
        return ask(connection, query, (*values, limit))

    def count(self) -> dict[str, dict[Counted, int]]:
        with self._snapshot() as connection, _frozen(connection):
            depths, counted = counted_depths(connection)
            for _, counts in connection.execute(NEW_EVENTS, (counted,)):
                add_counts(depths, decode_counts(counts))
            for queue, n, _ in ask(connection, UNTOLD_COUNTS, ask(connection, TOLD_TO)[0]):
                add_counts(depths, [(queue, "QUEUED", n)])
            names = ask(connection, "SELECT queue, name FROM queues ORDER BY name")
        return {
            name: {state: n for state, n in depths.get(number, {}).items() if n} for number, name in names
        }

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        with (
            self._snapshot() as connection,
            _frozen(connection),
            closing(self._told(after, connection)) as told,
        ):
            return list(islice((event for event in told if event.seq > after), limit))

    def _told(self, after: int, connection: apsw.Connection) -> Generator[Event, None, None]:
        """The events of every row that can hold one behind `after`, then those that no row tells."""
        with closing(
            connection.execute("SELECT batch FROM events WHERE seq > ? ORDER BY seq", (after,))
        ) as rows:
            for (batch,) in rows:
                yield from unpacked(batch, self.store_id)
        told_to = ask(connection, TOLD_TO)[0][0]
        for run in runs_of(self.untold_rows(connection, told_to)):
            yield from told_by(run, self.store_id)

    def untold_rows(self, connection: Reading, told_to: int, before: int = FOR_EVER) -> Iterator[Untold]:
        """The new records behind the newest row of events, and before a number."""
        for seq, queue, *rest in ask(connection, UNTOLD, (told_to, before)):
            yield Untold(seq, self._names.get(queue) or self.queue_name(queue, connection), *rest)

    def payloads(self, after: int, up_to: int) -> dict[int, bytes]:
        with self._snapshot() as connection:
            return dict(ask(connection, PAYLOADS, (after, up_to)))

    def newest_event(self) -> int:
        with self._snapshot() as connection:
            return int(ask(connection, NEWEST_EVENT)[0][0])

    def next_work_ns(self, queue: str) -> int | None:
        with self._snapshot() as connection:
            number = self.number_of(queue, connection)
            if number is None:
                return None
            ready, due, lapses = ask(connection, NEXT_WORK, (number,))[0]
        if ready:
            return 0
        starts = [start for start in (due, lapses) if start is not None]
        return max(0, min(starts) - self.steady_ns()) if starts else None

    def limits(self, queue: str) -> Limits:
        until, known = self.queue_rows.get(queue, (0.0, None))
        if known is not None and time.monotonic() < until:
            return known[1]
        with self._snapshot() as connection:
            rows = ask(connection, QUEUE, (queue,))
        if not rows:
            return DEFAULT_LIMITS
        known = rows[0][0], limits_of(*rows[0][1:])
        self.queue_rows[queue] = (time.monotonic() + LIMITS_KNOWN_S, known)
        return known[1]

    def set_limits(self, queue: str, limits: Limits) -> None:
        def work(transaction: Transaction) -> None:
            cast_to_sqlite(transaction).set_limits(queue, limits)

        self.write(work)

    def purge_events(self, *, up_to: int, before_us: int, limit: int) -> None:
        def work(transaction: Transaction) -> None:
            cast_to_sqlite(transaction).purge_events(up_to, before_us, limit)

        self.write(work, makes_room=True)

    def identity(self) -> str:
        if not self.store_id:
            self.write(lambda _: None, makes_room=True)  # it stands in the file
        return self.store_id

    def sync(self) -> None:
        """The log alone: SQLite syncs the file itself before it gives up what the log holds.

        And it must be the log alone: closing a descriptor of the file would end this process's locks on it.
        """
        path = self.path.with_name(self.path.name + "-wal")
        with suppress(FileNotFoundError):  # without a log everything stands in the file
            fd = open_safely(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            except OSError as error:
                raise WriteFailed(path, error, rolled_back=False) from error
            finally:
                os.close(fd)

    def outbox(self) -> Outbox | None:
        with self._snapshot() as connection:
            rows = ask(connection, "SELECT value FROM facts WHERE name = 'outbox'")
        return msgspec.json.decode(rows[0][0], type=Outbox) if rows else None

    def set_outbox(self, outbox: Outbox | None) -> None:
        def work(transaction: Transaction) -> None:
            cast_to_sqlite(transaction).set_outbox(outbox)

        self.write(work, makes_room=True)

    def purge_keys(self, before_us: int, limit: int) -> None:
        def work(transaction: Transaction) -> None:
            cast_to_sqlite(transaction).purge_keys(before_us, limit)

        self.write(work, makes_room=True)

    def oldest_ns(self, queue: str) -> int | None:
        now = self.steady_ns()
        with self._snapshot() as connection:
            number = self.number_of(queue, connection)
            heads = [ask(connection, HEAD, (number, priority)) for priority in range(PRIORITIES) if number]
        oldest = [rows[0][0] for rows in heads if rows]
        return max(0, now - min(oldest)) if oldest else None

    def steady_ns(self) -> int:
        if self._writer is None:
            self.write(lambda _: None, makes_room=True)  # the store's time stands in the file
        return self._offset_ns + self._clock.boot_ns()

    def wall_us(self) -> int:
        """UTC."""
        return self._clock.wall_us()

    # ---- life ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        with self._leading, self._reading, self._checkpoints.under_way:
            self._drop()
            self._suspect = self._suspect or self._dead
            self._dead, self.trouble = False, ""

    def close(self) -> None:
        with self._leading, self._reading, self._checkpoints.under_way:
            self._drop()
            self._lock.forget()

    def _drop(self) -> None:
        self.queue_rows.clear()
        writer, self._writer, self._cursor = self._writer, None, None
        reader, self._reader = self._reader, None
        fd, self._wal_fd = self._wal_fd, -1
        if fd >= 0:
            os.close(fd)
        for connection in (reader, writer):
            if connection is not None:
                with suppress(apsw.Error):
                    connection.close(True)  # noqa: FBT003 - the API has no name for it

    def before_fork(self) -> None:
        """Close everything: SQLite keeps its locks in memory, and a child would believe the copy."""
        locks = (self._leading, self._reading, self._checkpoints.under_way)
        self._resting = [lock for lock in locks if lock.acquire(timeout=FORK_WAIT_S)]
        if len(self._resting) == len(locks):  # else it is forked in the middle of work
            self._drop()

    def after_fork_in_parent(self) -> None:
        """Open again when there is something to do."""
        for lock in self._resting:
            lock.release()

    def after_fork(self) -> None:
        """A child must neither use nor close what its parent has open."""
        for thing in (self._writer, self._reader, self._cursor):
            if thing is not None:
                leak(thing)
        self._writer = self._reader = self._cursor = None
        if self._wal_fd >= 0:
            os.close(self._wal_fd)
        self._wal_fd = -1
        self._lock.forget()
        self._fresh_threads()


@contextmanager
def _frozen(connection: apsw.Connection) -> Iterator[None]:
    """Several queries, one state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


# ---- the file --------------------------------------------------------------------------------------


def _library_version() -> tuple[int, ...]:
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


def _check_kind(path: Path) -> None:
    """Refuse a file that another program wrote, before a byte of it changes.

    SQLite itself has to read it: closing a descriptor of ours would end this process's locks on the file.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise StoreDamaged(f"{path} is not a file, so it cannot be a store of tasks")
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(round(BUSY_TIMEOUT_S * 1000))
    try:
        tables = {name for (name,) in ask(connection, "SELECT name FROM sqlite_schema WHERE type = 'table'")}
    except apsw.NotADBError:
        raise StoreDamaged(
            f"{path} is not a store of tasks: it is no SQLite database, or its beginning is damaged"
        ) from None
    finally:
        connection.close()
    if tables and not tables.issuperset(OUR_TABLES):
        raise StoreDamaged(f"{path} is not a store of tasks: it is the database of another program")


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(round(BUSY_TIMEOUT_S * 1000))
    # Else a statement that a partial index serves is planned anew each time its values change.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = NORMAL",
        f"journal_size_limit = {WAL_BYTES_MAX}",
        f"cache_size = -{CACHE_KIB}",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


@contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _migrations() -> dict[int, str]:
    """The scripts in `sql/`, by their number."""
    scripts = {}
    for file in resources.files("postroom.stores.sql").iterdir():
        number = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if number:
            scripts[int(number[1])] = file.read_text()
    return dict(sorted(scripts.items()))


def _check_pages(connection: apsw.Connection, path: Path) -> None:
    """After a failed fsync nobody knows which pages reached the disk."""
    [(found,)] = ask(connection, "PRAGMA quick_check(1)")
    if found != "ok":
        raise StoreDamaged(f"{path} is damaged: {found}")


def _migrate(connection: apsw.Connection, path: Path) -> None:
    """Bring the file to this version, a whole step at a time."""
    version = connection.pragma("user_version")
    scripts = _migrations()
    if version > max(scripts):
        raise StoreDamaged(
            f"{path} was written by a newer postroom (its version {version}): upgrade this one"
        )
    for number, script in scripts.items():
        if number > version:
            with _transaction(connection):
                connection.execute(script)
                connection.execute(f"PRAGMA user_version = {number}")
