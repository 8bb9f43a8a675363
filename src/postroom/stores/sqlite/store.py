"""A store in one SQLite file (WAL), for any number of processes of one machine.

Rule 1: each process writes through one connection and takes a fair file lock for each commit. So SQLite's
        "database is locked" does not occur.
Rule 2: callers share commits (`group_commit`).
Rule 3: work that makes room (complete, cancel, purge) also succeeds on a full disk: it uses a disk reserve.
        Orders of operators have a second one.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import apsw
import msgspec

from postroom.core.formats.ids import IdRule
from postroom.errors import (
    HandleDead,
    LockTimeout,
    PostroomError,
    StoreDamaged,
    StoreMoved,
    StoreUnwritable,
    WriteFailed,
)
from postroom.stores.codec import codec_of
from postroom.stores.conversion import PROGRESS_FACT, Progress, Values, progress_of, wiped, without_key
from postroom.stores.disk_reserve import DiskReserve
from postroom.stores.group_commit import GroupCommit, Job
from postroom.stores.own_ids import IDS_FACT, first_rule
from postroom.stores.sqlite.checkpoints import CheckpointLimits, Checkpoints
from postroom.stores.sqlite.file import (
    BUSY_TIMEOUT_S,
    check_kind,
    check_library,
    check_pages,
    connect,
    migrate,
    refused_access,
)
from postroom.stores.sqlite.file import transaction as sql_transaction
from postroom.stores.sqlite.known import SqliteKnown
from postroom.stores.sqlite.ledger import SqliteLedger, SqliteReading
from postroom.stores.sqlite.readers import SqliteReaders
from postroom.stores.sqlite.sql.queries import (
    FACT,
    LINE_DELAYED,
    LINE_LEASED,
    NEWEST_EVENT,
    SET_FACT,
    Reading,
    ask,
)
from postroom.stores.sqlite.transaction import SqliteTransaction
from postroom.stores.sqlite.values import sqlite_values
from postroom.stores.store import Capabilities, Store
from postroom.stores.transaction import Transaction
from postroom.system.atomic import PRIVATE_FILE_MODE, make_folder, open_safely, sync_folder
from postroom.system.clock import Clock, SystemClock
from postroom.system.crypto.encryption import KEYS_FACT, Encryption, KeysInUse, check_noted
from postroom.system.handles import leak, reset_after_fork
from postroom.system.lock import FairLock
from postroom.system.log import library_log

T = TypeVar("T")

LOCK_TIMEOUT_S = 30.0
FORK_WAIT_S = 10.0  # wait for a commit of another thread
FILE_LOOK_S = 0.1  # a moved or removed file is noticed after this time
RESERVE_BYTES = 4 * 1024 * 1024
MOVED = "moved_to"  # the fact that a store was moved

_log = library_log("postroom.store")


class SqliteStore(Store):
    """Records in the file `path`. Beside the file are a lock, a disk reserve and SQLite's WAL files."""

    fatal_errors = (apsw.Error,)
    capabilities = Capabilities(is_encryptable=True, is_movable=True)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        reserve_bytes: int = RESERVE_BYTES,
        store_id: str | None = None,
        encryption: Encryption | None = None,
        checkpoints: CheckpointLimits | None = None,
    ) -> None:
        check_library()
        self.path = Path.cwd() / path
        self.folder = self.path.parent
        self.encryption = encryption
        self.url = f"sqlite:///{self.path}"
        self._clock = SystemClock() if clock is None else clock
        self._store_id = store_id
        self._lock = FairLock(self.path, lock_timeout_s)
        self._reserve = DiskReserve(self.path.with_name(self.path.name + ".ballast"), reserve_bytes)
        self._checkpoints = Checkpoints(self.path, self._alone, checkpoints or CheckpointLimits())
        self._known = SqliteKnown()
        self._writer: apsw.Connection | None = None
        self._cursor: apsw.Cursor | None = None
        self._readers = SqliteReaders(self.path)
        self._offset_ns = 0
        self._version = -1
        """SQLite's data version after our last commit. It differs when another process has written since."""
        self._settled = False
        """Whether `_known` matches the file, apart from commits of other processes."""
        self._moved_to = ""
        """The address of the store that replaced this one."""
        self._keys = ""
        """The keys in use, as the file notes them; empty without encryption."""
        self._look_at_keys = 0.0
        self._transaction: SqliteTransaction | None = None
        self._wal_fd = -1
        self._look_at_wal = 0
        self._dead = False
        self._suspect = False
        """Whether the pages of the file must be checked before it is used again."""
        self._file = (0, 0)
        self._look_at_file = 0.0
        self._held: list[threading.Lock | SqliteReaders] = []
        self._fresh_threads()
        reset_after_fork(self)

    def _fresh_threads(self) -> None:
        self._group = GroupCommit(
            self._commit_group, lambda error: WriteFailed(self.path, error, rolled_back=False)
        )
        self._readers.fresh()
        self._checkpoints.fresh()

    # ---- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        group = self._group
        if not group.pending and not group.leading.locked():
            with group.leading:
                cursor = self._cursor
                if cursor is not None and not group.pending and self._reserve.whole and not self._dead:
                    try:  # no other caller waits, and the handle is healthy
                        return self._write_alone(work, cursor)
                    except apsw.FullError:  # nothing was committed; `_commit_group` can free the reserve
                        pass
        return group.submit(Job(work, makes_room))

    def _write_alone(self, work: Callable[[Transaction], T], cursor: apsw.Cursor) -> T:
        """The commit of a single caller, without a job."""
        try:
            self._lock.acquire()
            transaction = self._begin(cursor)
            result = work(transaction)
            self._commit(transaction, cursor)
        except (apsw.Error, OSError) as error:
            self._translate(error)
        finally:
            self._let_go()
        self._announce(transaction)
        if self._group.pending:
            self._group.wake_next()
        return result

    def _begin(self, cursor: apsw.Cursor) -> SqliteTransaction:
        connection, clock, now = cursor.connection, self._clock, time.monotonic()
        if connection.in_transaction:  # an interrupt came before the end of the last one
            self._settled = False
            cursor.execute("ROLLBACK")
        cursor.execute("BEGIN IMMEDIATE")
        if now >= self._look_at_file:
            self._check_file(now)
        if not self._settled or connection.data_version() != self._version:
            self._catch_up(cursor)
        if self._moved_to:
            raise StoreMoved(self.url, self._moved_to)
        now_ns = self._offset_ns + clock.boot_ns()
        ledger = SqliteLedger(self._known, cursor, now_ns, clock.wall_us())
        self._transaction = transaction = SqliteTransaction(ledger)
        return transaction

    def _check_file(self, now: float) -> None:
        """Check that the path still names the open file: writes to a removed file would be lost."""
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

    def _catch_up(self, cursor: apsw.Cursor) -> None:
        """Count what other processes committed."""
        with self._translated():
            from_start = not self._settled
            self._settled = False  # until the end: after an interrupt, the next call counts from the start
            self._known.catch_up(cursor, from_start=from_start)
            moved = ask(cursor, FACT, (MOVED,))
            self._moved_to = str(moved[0][0]) if moved else ""
            self._check_keys(cursor)
            self._settled = True

    def _check_keys(self, connection: Reading) -> None:
        """Refuse a file whose keys this handle does not have. Another process may have added a key."""
        found = ask(connection, FACT, (KEYS_FACT,))
        noted = str(found[0][0]) if found else ""
        if noted != self._keys:
            check_noted(self.encryption, self.url, noted)
            self._keys = noted

    def _note_keys(self, connection: apsw.Connection) -> None:
        """Note the current key when the file is opened. The first key turns encryption on."""
        self._keys = ""
        if self.encryption is None or not self.notes_keys:
            self._check_keys(connection)
            return
        found = ask(connection, FACT, (KEYS_FACT,))
        noted = KeysInUse.decode(found[0][0]) if found else None
        in_use = self.encryption.check(self.url, noted)
        if in_use != noted:
            connection.execute(SET_FACT, (KEYS_FACT, in_use.encode()))
        self._keys = in_use.encode()

    def _commit(self, transaction: SqliteTransaction, cursor: apsw.Cursor) -> None:
        ledger = transaction.ledger
        ledger.flush()
        self._settled = False
        cursor.execute("COMMIT")
        ledger.committed()
        connection, newest = cursor.connection, self._known.newest
        self._version = connection.data_version()
        self._settled = True
        if newest >= self._look_at_wal or not ledger.counts:
            self._look_at_wal = newest + self._checkpoints.limits.look_events
            self._checkpoints.look(connection)

    def _commit_group(self, jobs: list[Job[Any]]) -> bool:
        """Commit jobs in one transaction. On a full disk, jobs that make room are tried once more."""
        try:
            return self._attempt(jobs)
        except apsw.FullError:
            if not any(job.makes_room for job in jobs) or not self._reserve.free():
                raise self._disk_full() from None
        _log.warning(
            "%s: the disk is full; the disk reserve is freed so that tasks can be completed", self.path
        )
        for job in jobs:
            if not job.makes_room:
                job.finish(self._disk_full())
        try:
            return self._attempt([job for job in jobs if not job.finished], refill=False)
        except apsw.FullError:
            raise self._disk_full() from None

    def _disk_full(self) -> WriteFailed:
        return WriteFailed(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _attempt(self, jobs: list[Job[Any]], *, refill: bool = True) -> bool:
        if self._dead:
            raise HandleDead(self.path)
        if self._cursor is None:
            try:
                check_kind(self.path)  # before creating files next to another program's file
            except (apsw.Error, OSError) as error:
                self._translate(error)
        if refill and not self._reserve.whole:
            self._refill_reserve(jobs)
        try:
            self._lock.acquire()
            transaction = self._run(jobs)
        except (apsw.Error, OSError) as error:
            self._translate(error)
        finally:
            self._let_go()
        if transaction is None:
            return False
        self._announce(transaction)
        for job in jobs:
            job.finish()
        return True

    def _run(self, jobs: list[Job[Any]]) -> SqliteTransaction | None:
        """Run and commit jobs; None when they must be rolled back."""
        cursor = self._cursor or self._open()
        transaction = self._begin(cursor)
        for job in jobs:
            if not job.finished and not job.run(transaction, self.fatal_errors):
                job.finish()
                return None
        for job in jobs:
            job.sealed = True
        try:
            self._commit(transaction, cursor)
        except apsw.Error:
            for job in jobs:
                job.sealed = False
            raise
        return transaction

    def _refill_reserve(self, jobs: list[Job[Any]]) -> None:
        """Allocate the reserve. Without space for it, only jobs that make room continue."""
        make_folder(self.path.parent, "os")
        try:
            self._reserve.fill()
        except WriteFailed as error:
            if not self.path.exists() or not any(job.makes_room for job in jobs):
                raise WriteFailed(self.path, OSError(error.errno, os.strerror(error.errno or 0))) from error
            for job in jobs:
                if not job.makes_room:
                    job.finish(self._disk_full())

    def _announce(self, transaction: SqliteTransaction) -> None:
        """Sync if the durability class requires it, then call `on_commit`."""
        if transaction.synced:
            self._sync()
        if self.on_commit is not None:
            self.on_commit(transaction)

    def _sync(self) -> None:
        """Sync the WAL. The database file needs no sync here: checkpoints sync it."""
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
        """Roll back a transaction that is still open, and release the lock."""
        try:
            if self._writer is not None and self._writer.in_transaction:
                if self._transaction is None or self._transaction.changes:
                    self._settled = False  # `_known` includes the changes that are rolled back
                self._writer.execute("ROLLBACK")
        except apsw.Error:  # the connection cannot be used any more
            self._drop()
        finally:
            self._lock.release()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except apsw.FullError as error:
            raise self._disk_full() from error
        except apsw.Error as error:
            try:
                self._translate(error)
            except apsw.FullError:
                raise self._disk_full() from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if isinstance(error, PostroomError):
                raise
            # A column holds an unexpected value.
            raise StoreDamaged(f"{self.path} is damaged: {error}") from error

    def _translate(self, error: apsw.Error | OSError) -> NoReturn:
        """Raise our error for an error of SQLite or the system. `FullError` stays for `_commit_group`."""
        if isinstance(error, apsw.FullError | PostroomError):
            raise error
        if isinstance(error, OSError):
            raise WriteFailed(self.path, error, rolled_back=self._settled) from error
        if isinstance(error, apsw.CorruptError | apsw.NotADBError):
            raise StoreDamaged(f"{self.path} is damaged: {error}") from error
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            raise LockTimeout(self.path, BUSY_TIMEOUT_S) from error
        self._drop()
        if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError):
            refused = refused_access(self.path)
            if refused is not None:
                raise StoreUnwritable(self.path, refused) from error
        has_no_space = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE
        if has_no_space:  # for the index of the WAL
            raise apsw.FullError(str(error)) from error
        raise WriteFailed(self.path, OSError(errno.EIO, str(error))) from error

    # ---- reading -------------------------------------------------------------------------------

    def read(self, work: Callable[[Transaction], T]) -> T:
        if self._writer is None:
            self._open_file()
            if self._moved_to:
                _log.warning(
                    "%s was moved to %s: what is read here is older than what is there",
                    self.path,
                    self._moved_to,
                )
        with self._translated(), self._readers.one() as reader:
            cursor, clock = reader.cursor(), self._clock
            now_ns = self._offset_ns + clock.boot_ns()
            with sql_transaction(reader, "DEFERRED"):
                if self.encryption is None and (now := time.monotonic()) >= self._look_at_keys:
                    self._check_keys(cursor)
                    self._look_at_keys = now + FILE_LOOK_S
                reading = SqliteReading(self._known, cursor, now_ns, clock.wall_us(), self._readers.counts)
                return work(SqliteTransaction(reading))

    def wall_us(self) -> int:
        return self._clock.wall_us()

    def identity(self) -> str:
        if not self._known.store_id:
            self._open_file()
        return self._known.store_id

    def _open_file(self) -> None:
        """Create or migrate the file, set the clock, and read the identity."""
        with suppress(StoreMoved):
            self.control(lambda _: None)  # a server starts on a full disk, too

    def set_moved(self, to: str) -> None:
        self._open_file()
        with self._alone() as connection:
            if connection is None:
                raise HandleDead(self.path)
            with sql_transaction(connection):
                connection.execute("DELETE FROM facts WHERE name = ?", (MOVED,))
                if to:
                    connection.execute(SET_FACT, (MOVED, to))
            self._settled = False

    # ---- encryption ----------------------------------------------------------------------------

    def keys_in_use(self) -> KeysInUse | None:
        self._open_file()
        return KeysInUse.decode(self._keys) if self._keys else None

    @contextmanager
    def _converting(self) -> Iterator[tuple[apsw.Connection, Values]]:
        """A transaction of the writing connection, for work on stored values."""
        self._open_file()
        if self.encryption is None:
            raise self._not_encrypted()
        with self._translated(), self._alone() as connection:
            if connection is None:
                raise HandleDead(self.path)
            with sql_transaction(connection):
                self._check_keys(connection)
                yield connection, sqlite_values(self._known.store_id, self.encryption)

    def convert(self) -> Progress:
        with self._converting() as (connection, values):
            assert self.encryption is not None  # noqa: S101 - for the type checker: just checked
            connection.execute("PRAGMA secure_delete = ON")
            found = ask(connection, FACT, (PROGRESS_FACT,))
            before = progress_of(str(found[0][0]) if found else None, self.encryption)
            after = values.convert(partial(ask, connection), connection.execute, before)
            connection.execute(SET_FACT, (PROGRESS_FACT, msgspec.json.encode(after).decode()))
        return after

    def count_keys(self) -> dict[str, int]:
        self._open_file()
        if self.encryption is None:
            raise self._not_encrypted()
        values = sqlite_values(self._known.store_id, self.encryption)
        with self._translated(), self._readers.one() as reader, sql_transaction(reader, "DEFERRED"):
            return values.count(partial(ask, reader))

    def retire_key(self, fingerprint: str) -> None:
        """As in `Store`. Writers need not wait for the count: no commit uses a key that is not current."""
        noted = self.keys_in_use()
        if noted is None:
            raise self._not_encrypted()
        without_key(self.url, noted, fingerprint, {})
        counts = self.count_keys()
        with self._converting() as (connection, _):
            kept = without_key(self.url, KeysInUse.decode(self._keys), fingerprint, counts).encode()
            connection.execute(SET_FACT, (KEYS_FACT, kept))
        self._keys = kept

    def wipe(self) -> bool:
        """Rewrite the file and empty its WAL. Writers wait; a long reader keeps the WAL."""
        self._open_file()
        with self._translated(), self._alone() as connection:
            if connection is None:
                raise HandleDead(self.path)
            connection.execute("VACUUM")
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.BusyError:
                return False
            for (text,) in ask(connection, FACT, (PROGRESS_FACT,)):
                connection.execute(SET_FACT, (PROGRESS_FACT, wiped(str(text))))
        return True

    def sync(self) -> None:
        """Sync the WAL. SQLite syncs the database before it reuses the WAL.

        The database file is not opened here: closing its descriptor would release this process's locks on it.
        """
        path = self.path.with_name(self.path.name + "-wal")
        with suppress(FileNotFoundError):  # without a WAL, the database holds everything
            fd = open_safely(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            except OSError as error:
                raise WriteFailed(path, error, rolled_back=False) from error
            finally:
                os.close(fd)

    # ---- connections ---------------------------------------------------------------------------

    def _open(self) -> apsw.Cursor:
        """Open the writing connection. The caller holds the file lock."""
        if not self.path.exists():
            os.close(open_safely(self.path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE))
        connection = connect(self.path)
        if self._suspect:
            check_pages(connection, self.path)
            self._suspect = False
        migrate(connection, self.path)
        with sql_transaction(connection):
            self._offset_ns = _continue_clock(connection, self._clock)
            store_id = _fact(connection, "store_id", lambda: self._store_id or f"t{os.urandom(4).hex()}")
            [(newest,)] = ask(connection, NEWEST_EVENT)
            first = first_rule(self._store_id, newest, self._clock.wall_us())
            rule = _fact(connection, IDS_FACT, lambda: first.text)
            self._note_keys(connection)
        self._known = SqliteKnown(store_id, IdRule.of(rule), codec_of(store_id, self.encryption))
        info = self.path.stat()
        self._file, self._look_at_file = (info.st_dev, info.st_ino), 0.0
        connection.wal_autocheckpoint(0)
        self._writer, self._cursor, self._settled = connection, connection.cursor(), False
        return self._cursor

    @contextmanager
    def _alone(self) -> Iterator[apsw.Connection | None]:
        """Keep all other threads and processes from writing. Yields None when the store is closed."""
        with self._group.leading:
            if self._writer is None:
                yield None
                return
            try:
                self._lock.acquire()
                yield self._writer
            finally:
                self._lock.release()
        self._group.wake_next()

    def reopen(self) -> None:
        with self._group.leading, self._readers, self._checkpoints.under_way:
            self._drop()
            self._suspect = self._suspect or self._dead
            self._dead, self.trouble = False, ""

    def close(self) -> None:
        with self._group.leading, self._readers, self._checkpoints.under_way:
            self._drop()
            self._lock.forget()

    def _drop(self) -> None:
        writer, self._writer, self._cursor = self._writer, None, None
        fd, self._wal_fd = self._wal_fd, -1
        if fd >= 0:
            os.close(fd)
        self._readers.close()
        if writer is not None:
            with suppress(apsw.Error):
                writer.close(True)  # noqa: FBT003 - the API has no name for it

    # ---- fork ----------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close the connections: SQLite keeps its locks in memory, and a child would trust the copy."""
        locks = (self._group.leading, self._readers, self._checkpoints.under_way)
        self._held = [lock for lock in locks if lock.acquire(timeout=FORK_WAIT_S)]
        if len(self._held) == len(locks):  # else another thread is still at work
            self._drop()

    def after_fork_in_parent(self) -> None:
        """Release the locks. The next call opens the connections again."""
        for lock in self._held:
            lock.release()

    def after_fork(self) -> None:
        """Drop the connections of the parent: a child must neither use nor close them."""
        for thing in (self._writer, self._cursor):
            if thing is not None:
                leak(thing)
        self._writer = self._cursor = None
        if self._wal_fd >= 0:
            os.close(self._wal_fd)
        self._wal_fd = -1
        self._lock.forget()
        self._fresh_threads()


def _fact(connection: apsw.Connection, name: str, new: Callable[[], str]) -> str:
    """A fact of the file, which is made when it is unknown."""
    found = ask(connection, FACT, (name,))
    if found:
        return str(found[0][0])
    value = new()
    connection.execute(SET_FACT, (name, value))
    return value


def _continue_clock(connection: apsw.Connection, clock: Clock) -> int:
    """By how much the clock of the store differs. After a reboot, every lease runs its whole length again."""
    facts = dict(ask(connection, "SELECT name, value FROM facts WHERE name LIKE 'clock%'"))
    if facts.get("clock_boot_id") == clock.boot_id():
        return int(facts["clock_offset_ns"])
    newest = connection.execute(
        "SELECT max(coalesce((SELECT ready_at FROM records ORDER BY seq DESC LIMIT 1), 0), "
        f"coalesce((SELECT max(turn - lease_ns) FROM records WHERE line = {LINE_LEASED}), 0), "
        f"coalesce((SELECT max(ready_at) FROM records WHERE line = {LINE_DELAYED}), 0))"
    ).get
    offset_ns = int(newest) - clock.boot_ns()
    connection.execute(f"UPDATE records SET turn = ? + lease_ns WHERE line = {LINE_LEASED}", (newest,))
    connection.execute(SET_FACT, ("clock_boot_id", clock.boot_id()))
    connection.execute(SET_FACT, ("clock_offset_ns", offset_ns))
    return offset_ns
