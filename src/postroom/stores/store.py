"""The interface of a store for its users: write transactions and consistent reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from postroom.errors import InvalidMessage, InvalidSetting
from postroom.message import Event, Record, Stored
from postroom.stores.base import Counted, Pick, by_state
from postroom.stores.conversion import Progress
from postroom.stores.disk_reserve import with_control_reserve
from postroom.stores.transaction import Transaction
from postroom.system.crypto.encryption import KeysInUse

T = TypeVar("T")


class _ChangedAndFailedError(Exception):
    """The work of one caller failed after a change, so the shared commit must be rolled back."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store can do besides the contract of all stores. It refuses everything else with an error."""

    is_shared: bool = False
    """Processes of several hosts can use it."""
    is_concurrent: bool = False
    """Calls of `write_many` in several threads commit concurrently."""
    is_ordered: bool = True
    """Workers that claim at the same time get the messages of a lane in its order."""
    keeps_all: bool = True
    """Every accepted message is in the ledger, so that it can be read, and outlives a crash in its class."""
    survives_kills: bool = True
    """Records of the durability class `os` survive kill -9 of every process of the store."""
    is_encryptable: bool = False
    """A key file encrypts what is stored."""
    is_movable: bool = False
    """`postroom move` can take it to another address."""


class Store(ABC):
    """A place for records. Threads may share a store, and a forked child may keep using it."""

    url: str
    trouble: str = ""
    """Why the store cannot write at present; empty when it can."""
    broker_trouble: str = ""
    """Why the ledger's broker cannot be used at present. Meanwhile the ledger delivers."""
    capabilities = Capabilities()
    notes_keys = True
    """Whether opening an encrypted store notes the newest key. The first key turns encryption on, so a handle
    that only looks must not note it."""
    on_commit: Callable[[Transaction], None] | None = None
    """Called with the transaction after each commit. Contracts use `add_commit_listener`."""
    folder: Path | None = None
    """Where the files of the store are; None without any."""
    fatal_errors: tuple[type[Exception], ...] = ()
    """Errors of the backend itself. They end the whole commit, not only the work that raised them."""

    def add_commit_listener(self, listener: Callable[[Transaction], None]) -> None:
        """Also call `listener` after each commit. Several contracts can share a store."""
        previous = self.on_commit

        def call_both(transaction: Transaction) -> None:
            if previous is not None:
                previous(transaction)
            listener(transaction)

        self.on_commit = listener if previous is None else call_both

    @abstractmethod
    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        """Run `work` in a transaction, perhaps with the work of other callers, and return after the commit.

        `makes_room` marks work that must also succeed on a full disk.
        """

    def control(self, work: Callable[[Transaction], T]) -> T:
        """As `write`, for the order of an operator: on a full disk it gets the space kept for such orders."""
        if self.folder is None:
            return self.write(work, makes_room=True)
        return with_control_reserve(self.folder, lambda: self.write(work, makes_room=True))

    def write_many(
        self, works: Sequence[Callable[[Transaction], Any]], *, makes_room: bool = False
    ) -> list[Any]:
        """Run the work of many callers, if possible in one commit.

        Returns the result of each caller's work, or the error that it raised. Work that fails does not affect
        the others: when it fails after a change, the commit is rolled back, and the work of each caller is
        committed alone.
        """

        def run_all(transaction: Transaction) -> list[Any]:
            return [self._run_one(work, transaction) for work in works]

        try:
            return self._write_group(run_all, makes_room=makes_room)
        except _ChangedAndFailedError:
            return [self._outcome(work, makes_room) for work in works]
        except Exception as error:  # noqa: BLE001 - the commit failed for all
            return [error] * len(works)

    def _write_group(self, work: Callable[[Transaction], T], *, makes_room: bool) -> T:
        """Commit work that already combines the work of many callers."""
        return self.write(work, makes_room=makes_room)

    def _run_one(self, work: Callable[[Transaction], Any], transaction: Transaction) -> Any:
        changes = transaction.changes
        try:
            return work(transaction)
        except self.fatal_errors:
            raise
        except Exception as error:
            if transaction.changes != changes:
                raise _ChangedAndFailedError from error
            return error

    def _outcome(self, work: Callable[[Transaction], Any], makes_room: bool) -> Any:
        try:
            return self.write(work, makes_room=makes_room)
        except Exception as error:  # noqa: BLE001 - each caller gets its own
            return error

    @abstractmethod
    def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent committed state. `work` must not write."""

    @contextmanager
    def receiving(self, wake: Callable[[], None]) -> Iterator[None]:  # noqa: ARG002 - for a broker
        """A worker claims during the block. `wake` is called, from any thread, when a broker delivers."""
        yield

    def known_deadline_ns(self) -> int | None:
        """As `Transaction.next_deadline_ns`, when the store knows it without asking a server; else None."""
        return None

    def wall_us(self) -> int:
        """UTC, as transactions of this store see it."""
        return self.read(lambda transaction: transaction.wall_us)

    @abstractmethod
    def identity(self) -> str:
        """A unique name, which stays the same for the life of the store."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. The next call opens them again."""

    def set_moved(self, to: str) -> None:  # noqa: ARG002
        """Refuse every write of every process from now on with `StoreMoved`; an empty `to` ends that."""
        raise InvalidMessage(f"{self.url} cannot be moved: only stores in SQLite files can")

    def keys_in_use(self) -> KeysInUse | None:
        """The keys that encrypted values of the store may need; None without encryption."""
        return None

    def convert(self) -> Progress:
        """Encrypt some more values with the current key, in one short transaction."""
        raise self._not_encrypted()

    def count_keys(self) -> dict[str, int]:
        """How many values need each key, by fingerprint; "" for values that are not encrypted."""
        raise self._not_encrypted()

    def retire_key(self, fingerprint: str) -> None:  # noqa: ARG002 - for a store with encryption
        """Record that no value of the store needs a key. Raises while a value needs it."""
        raise self._not_encrypted()

    def wipe(self) -> bool:
        """Remove the remains of deleted and replaced values from the store's files; whether that worked."""
        return False

    def _not_encrypted(self) -> InvalidSetting:
        return InvalidSetting(f"{self.url} is not encrypted: name a key file")

    def nudge_channel(self) -> tuple[Callable[[], Any], str] | None:
        """How wake-ups reach other machines: a function that connects to the database, and a channel name."""
        return None

    def reopen(self) -> None:  # noqa: B027 - only for a backend with a disk
        """Use the store again after a disk error."""

    def sync(self) -> None:  # noqa: B027 - as above
        """Return when everything committed so far survives a power cut."""

    # ---- reading -------------------------------------------------------------------------------

    def load(self, message_id: str) -> Stored | None:
        """Everything about one message; None when it is unknown."""
        return self.read(lambda transaction: transaction.records.load(message_id))

    def find(self, pick: Pick) -> list[Record]:
        """The picked records."""
        return self.read(lambda transaction: transaction.records.find(pick))

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        """Events with a `seq` above `after`, in order."""
        return self.read(lambda transaction: transaction.events.read(after, limit))

    def newest_event(self) -> int:
        """The position of the last event; 0 before the first one."""
        return self.read(lambda transaction: transaction.events.newest())

    def depths(self) -> dict[str, Mapping[Counted, int]]:
        """The counters of every queue."""
        return self.read(lambda transaction: transaction.lanes.depths())

    def count(self) -> dict[str, dict[Counted, int]]:
        """How many records each queue has in each state."""
        return {queue: by_state(counts) for queue, counts in self.depths().items()}

    def steady_ns(self) -> int:
        """The time of the store's own clock, which never steps."""
        return self.read(lambda transaction: transaction.steady_ns)

    def next_work_ns(self, queue: str) -> int | None:
        """The time until a claim may find work: see `Transaction.next_work_ns`."""
        return self.read(lambda transaction: transaction.next_work_ns(queue))
