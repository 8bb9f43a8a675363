"""One committed state of a store's file, read without changing the file.

Rule 1: the file is opened read-only. Nothing is created, migrated or repaired, and no lock of the store is
        taken, so a server may write meanwhile.
Rule 2: every call sees the state of the moment at which the snapshot was opened.
"""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import apsw

from postroom.core.formats.ids import IdRule
from postroom.errors import StoreDamaged, StoreUnwritable, UnsafePath
from postroom.message import Event, State, Stored
from postroom.stores.base import LANE_COUNTS, Counted
from postroom.stores.codec import PLAIN, Codec, codec_of
from postroom.stores.event_quarantine import is_unreadable
from postroom.stores.own_ids import EARLIER_RULE, IDS_FACT
from postroom.stores.sqlite.file import (
    BUSY_TIMEOUT_S,
    OUR_TABLES,
    check_library,
    copy_database,
    migrations,
    refused_access,
)
from postroom.stores.sqlite.known import SqliteKnown
from postroom.stores.sqlite.ledger import SqliteReading
from postroom.stores.sqlite.sql.queries import CELL, FACT, NEWEST_EVENT, ask
from postroom.stores.sqlite.transaction import SqliteTransaction
from postroom.stores.sqlite.values import changed_values, sqlite_values
from postroom.stores.transaction import Transaction
from postroom.system.clock import Clock, SystemClock
from postroom.system.crypto.encryption import KEYS_FACT, Encryption, check_noted, key_file_encryption

T = TypeVar("T")

FAULTS_SHOWN_MAX = 20  # of one file
EVENTS_PAGE = 10_000

_COUNT = "SELECT queue, state, lane, count(*) FROM records GROUP BY queue, state, lane"


class SqliteSnapshot:
    """The state of a store file. A context manager.

    With `at_rest`, the file is read without SQLite's own lock files. The caller guarantees that no process
    writes to it.
    """

    def __init__(self, path: Path, *, at_rest: bool = False, clock: Clock | None = None) -> None:
        check_library()
        self.path = path
        self._clock = SystemClock() if clock is None else clock
        if path.is_symlink() or not path.is_file():
            raise UnsafePath(f"{path} is not a regular file, so it cannot be a store")
        option = "?immutable=1" if at_rest else ""
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        try:
            self._connection = apsw.Connection(
                f"file:{quote(os.fspath(path.absolute()))}{option}", flags=flags
            )
        except apsw.Error as error:
            self._check_access(error)
            raise StoreDamaged(f"{path} cannot be opened: {error}") from error
        try:
            self._pin()
        except BaseException:
            self.close()
            raise

    def _pin(self) -> None:
        """Begin the transaction in which everything is read."""
        self._connection.set_busy_timeout(round(BUSY_TIMEOUT_S * 1000))
        try:
            self._connection.execute("BEGIN")
            tables = {row[0] for row in ask(self._connection, "SELECT name FROM sqlite_schema")}
            self.version = int(self._connection.pragma("user_version"))
        except apsw.Error as error:
            self._check_access(error)
            raise StoreDamaged(f"{self.path} is damaged: {error}") from error
        if not tables.issuperset(OUR_TABLES):
            raise StoreDamaged(f"{self.path} is not a store of tasks: it is the database of another program")

    def _check_access(self, error: apsw.Error) -> None:
        """Raise `StoreUnwritable` for an error that has no other cause."""
        refused = None
        if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError):
            refused = refused_access(self.path)
        if refused is not None:
            raise StoreUnwritable(self.path, refused) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the snapshot."""
        self._connection.close(True)  # noqa: FBT003 - the API has no name for it

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the file has the format of this version. Only then `read` can be used."""
        return self.version == newest_version()

    @property
    def is_newer(self) -> bool:
        """Whether a newer postroom has written the file."""
        return self.version > newest_version()

    def identity(self) -> str:
        """The name of the store."""
        return self.fact("store_id")

    def _known(self, codec: Codec = PLAIN) -> SqliteKnown:
        rule = self.fact(IDS_FACT)
        return SqliteKnown(self.identity(), IdRule.of(rule) if rule else EARLIER_RULE, codec)

    def fact(self, name: str) -> str:
        """A fact of the file; empty when it is unknown."""
        found = ask(self._connection, FACT, (name,))
        return str(found[0][0]) if found else ""

    def newest_event(self) -> int:
        """The number of the newest event."""
        [(newest,)] = ask(self._connection, NEWEST_EVENT)
        return int(newest)

    def plain_cell(self, kind: str) -> str:
        """The value of a cell without a key that is never encrypted; empty when there is none."""
        found = ask(self._connection, CELL, (kind, ""))
        return bytes(found[0][0]).decode() if found else ""

    @property
    def moved_to(self) -> str:
        """The address that the store was moved to; empty when it was not."""
        return self.fact("moved_to")

    @property
    def is_encrypted(self) -> bool:
        """Whether reading values needs a key file."""
        return bool(self.fact(KEYS_FACT))

    @property
    def has_clock(self) -> bool:
        """Whether the store's clock runs: it stands still from a reboot to the next start of a server."""
        return self.fact("clock_boot_id") == self._clock.boot_id()

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on the state. It must not write."""
        offset_ns = int(self.fact("clock_offset_ns") or 0) if self.has_clock else 0
        now_ns = offset_ns + self._clock.boot_ns()
        known = self._known(codec_of(self.identity(), self._encryption()))
        reading = SqliteReading(known, self._connection.cursor(), now_ns, self._clock.wall_us())
        return work(SqliteTransaction(reading))

    def _encryption(self) -> Encryption | None:
        """The encryption by the key file of the environment, when the file needs one."""
        noted = self.fact(KEYS_FACT)
        if not noted:
            return None
        encryption = key_file_encryption(None)
        check_noted(encryption, str(self.path), noted)
        return encryption

    def events(self, after: int, limit: int) -> list[Event]:
        """Committed events after a position."""
        return self.read(lambda transaction: transaction.events.read(after, limit))

    def load(self, message_id: str) -> Stored | None:
        """Everything about one message; None when it is unknown."""
        return self.read(lambda transaction: transaction.records.load(message_id))

    # ---- checks --------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """The faults of the file: wrong pages, indexes, values and counters, and missing events."""
        faults: list[str] = []
        try:
            faults += self.page_faults()
            if not faults and self.is_current:
                faults += islice(changed_values(self._connection, self.identity()), FAULTS_SHOWN_MAX)
                wrong = [*self._wrong_counters(), *self._unreadable_values()]
                faults += wrong or self._missing_events()
        except apsw.Error as error:
            faults.append(str(error))
        except (ValueError, IndexError) as error:  # a column holds an unexpected value
            faults.append(f"a row cannot be read: {error}")
        return faults[:FAULTS_SHOWN_MAX]

    def page_faults(self) -> list[str]:
        """Damaged pages and wrong indexes."""
        found = ask(self._connection, f"PRAGMA integrity_check({FAULTS_SHOWN_MAX})")
        return [str(row[0]) for row in found if row[0] != "ok"]

    def _wrong_counters(self) -> list[str]:
        known = self._known()
        known.catch_up(self._connection, from_start=True)
        held: dict[tuple[int, Counted], int] = {}
        for queue, state, lane, n in ask(self._connection, _COUNT):
            what = _counter(state, lane)
            held[queue, what] = held.get((queue, what), 0) + n
        counted: dict[tuple[int, Counted], int] = {
            (queue, what): n
            for queue, counters in known.depths.items()
            for what, n in counters.items()
            if n and what != "LAPSES"
        }
        return [
            f"the queue {known.name_of(queue, self._connection)} counts {counted.get((queue, what), 0)} "
            f"records as {what}, and holds {held.get((queue, what), 0)}"
            for queue, what in sorted({*counted, *held})
            if counted.get((queue, what), 0) != held.get((queue, what), 0)
        ]

    def count_keys(self, encryption: Encryption) -> dict[str, int]:
        """How many values need each key, by fingerprint; "" for values that are not encrypted."""
        values = sqlite_values(self.identity(), encryption)
        return values.count(lambda query, bound: ask(self._connection, query, bound))

    def _unreadable_values(self) -> list[str]:
        """Encrypted values that were changed, or belong to another record. Without encryption, none."""
        encryption = self._encryption()
        if encryption is None:
            return []
        values = sqlite_values(self.identity(), encryption)
        found = values.unreadable(lambda query, bound: ask(self._connection, query, bound))
        return [str(error) for error in islice(found, FAULTS_SHOWN_MAX)]

    def _missing_events(self) -> list[str]:
        """Event numbers have no gap, apart from the removed ones at the beginning, and all can be read."""
        after, faults = 0, []
        while events := self.events(after, EVENTS_PAGE):
            for event in events:
                if after and event.seq != after + 1:
                    faults.append(f"events {after + 1} to {event.seq - 1} are missing")
                if is_unreadable(event):
                    faults.append(f"event {event.seq}: {event.error}")
                after = event.seq
        return faults

    # ---- copies --------------------------------------------------------------------------------------

    def copy_to(self, path: Path, report: Callable[[int, int], None] | None = None) -> None:
        """Copy the state into a new database file. `report` gets the copied bytes and all bytes."""
        copy_database(self._connection, path, report)


def _counter(state: State, lane: int) -> Counted:
    return LANE_COUNTS[lane] if state == "QUEUED" else state


def newest_version() -> int:
    """The format of store files that this version writes."""
    return max(migrations())


def address_after_move(path: Path) -> str:
    """The address that the store in a file was moved to; empty when it was not, or there is no file."""
    return read_at_rest_or_live(path, lambda snapshot: snapshot.moved_to) if path.exists() else ""


def read_at_rest_or_live(path: Path, work: Callable[[SqliteSnapshot], T]) -> T:
    """Run `work` on a snapshot, without creating files next to a store that no process uses.

    Without a WAL no process has the store open. When a WAL appears during `work`, `work` runs again.
    """
    wal = path.with_name(path.name + "-wal")
    at_rest = not wal.exists()
    if at_rest:
        with SqliteSnapshot(path, at_rest=True) as snapshot:
            result = work(snapshot)
        if not wal.exists():
            return result
    with SqliteSnapshot(path) as snapshot:
        return work(snapshot)
