"""The keys of a PostgreSQL store: which ones its values need, and the conversion to the newest one.

Rule 1: the keys in use are a fact of the database. Every handle looks at it within `KEYS_LOOK_S`. So a
        process that lacks a key stops writing, and all others write with the new key.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from postroom.stores.codec import PLAIN_CELLS, cell_place
from postroom.stores.conversion import (
    PROGRESS_FACT,
    Progress,
    TableScan,
    Value,
    Values,
    event_values,
    progress_of,
    record_values,
    without_key,
)
from postroom.stores.postgres.connection import ON_DISK, Address
from postroom.stores.postgres.known import PostgresKnown
from postroom.stores.postgres.rows import from_sql
from postroom.stores.postgres.trips import Connection
from postroom.stores.store import Store
from postroom.system.crypto.encryption import KEYS_FACT, Encryption, KeysInUse, check_noted

T = TypeVar("T")

KEYS_LOOK_S = 1.0  # a handle notices a new key within this time


class PostgresKeys(Store):
    """The part of a PostgreSQL store that manages its keys."""

    encryption: Encryption | None = None
    address: Address
    writing: dict[str, str]
    _keys = ""
    """The keys in use, as the database notes them; empty without encryption."""
    _look_at_keys = 0.0
    _converts_to = ""

    @abstractmethod
    def _persist(self, attempt: Callable[[Connection], T]) -> T:
        """Run an attempt until it works, or the server is away for too long."""

    @abstractmethod
    def _opened(self) -> PostgresKnown:
        """Facts about the store that the handle keeps once it is open."""

    def _check_keys(self, found: Sequence[Sequence[Any]]) -> None:
        """Refuse a database whose keys this handle does not have, given the fact of its keys."""
        noted = str(found[0][0]) if found else ""
        if noted != self._keys:
            check_noted(self.encryption, self.url, noted)
            self._keys = noted
        self._look_at_keys = time.monotonic() + KEYS_LOOK_S

    def _note_keys(self, connection: Connection) -> None:
        """Note the current key when the store is opened. The first key turns encryption on."""
        self._keys = ""
        found = connection.execute(self.writing["fact"], [KEYS_FACT]).fetchall()  # type: ignore[arg-type, unused-ignore]
        if self.encryption is None or not self.notes_keys:
            self._check_keys(found)
            return
        noted = KeysInUse.decode(found[0][0]) if found else None
        in_use = self.encryption.check(self.url, noted)
        if in_use != noted:
            connection.execute(self.writing["set_fact"], [KEYS_FACT, in_use.encode()])  # type: ignore[arg-type, unused-ignore]
        self._keys = in_use.encode()

    def keys_in_use(self) -> KeysInUse | None:
        self.identity()
        return KeysInUse.decode(self._keys) if self._keys else None

    def _on_values(self, work: Callable[[Connection, Values], T]) -> T:
        """Run work on stored values in a transaction of its own."""
        encryption = self.encryption
        if encryption is None:
            raise self._not_encrypted()

        def attempt(connection: Connection) -> T:
            with connection.transaction():
                connection.execute(f"SELECT {ON_DISK}")
                values = postgres_values(self.writing, self._opened().store_id, encryption)
                return work(connection, values)

        return self._persist(attempt)

    def convert(self) -> Progress:
        self.identity()
        encryption = self.encryption
        if encryption is None:
            raise self._not_encrypted()
        if self._converts_to != encryption.current:
            time.sleep(2 * KEYS_LOOK_S)  # other processes use the new key by then
            self._converts_to = encryption.current

        def convert_some(connection: Connection, values: Values) -> Progress:
            found = connection.execute(self.writing["fact"], [PROGRESS_FACT]).fetchall()  # type: ignore[arg-type, unused-ignore]
            before = progress_of(str(found[0][0]) if found else None, encryption)
            after = values.convert(_asking(connection), connection.execute, before)  # type: ignore[arg-type, unused-ignore]
            noted = msgspec.json.encode(after).decode()
            connection.execute(self.writing["set_fact"], [PROGRESS_FACT, noted])  # type: ignore[arg-type, unused-ignore]
            return after

        return self._on_values(convert_some)

    def count_keys(self) -> dict[str, int]:
        self.identity()
        return self._on_values(lambda connection, values: values.count(_asking(connection)))

    def unreadable_values(self, limit: int) -> list[str]:
        """Why values cannot be decrypted, at most `limit` of them. Without encryption, none."""
        self.identity()
        if self.encryption is None:
            return []
        return self._on_values(
            lambda connection, values: [
                str(error) for error in islice(values.unreadable(_asking(connection)), limit)
            ]
        )

    def retire_key(self, fingerprint: str) -> None:
        noted = self.keys_in_use()
        if noted is None:
            raise self._not_encrypted()
        self._change_keys(lambda now: without_key(self.url, now, fingerprint, {}))
        time.sleep(2 * KEYS_LOOK_S)  # no process uses the key from now on
        try:
            without_key(self.url, noted, fingerprint, self.count_keys())
        except BaseException:
            name = noted.keys.get(fingerprint, "")
            self._change_keys(lambda now: KeysInUse({**now.keys, fingerprint: name}, now.current))
            raise

    def _change_keys(self, change: Callable[[KeysInUse], KeysInUse]) -> None:
        """Change the keys in use, one process at a time."""

        def change_fact(connection: Connection, _: Values) -> str:
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 3)", [self.address.schema])
            [(text,)] = connection.execute(self.writing["fact"], [KEYS_FACT]).fetchall()  # type: ignore[arg-type, unused-ignore]
            changed = change(KeysInUse.decode(text)).encode()
            connection.execute(self.writing["set_fact"], [KEYS_FACT, changed])  # type: ignore[arg-type, unused-ignore]
            return changed

        self._keys = self._on_values(change_fact)


def _asking(connection: Connection) -> Callable[[str, tuple[Any, ...]], list[Any]]:
    return lambda query, values: connection.execute(query, values).fetchall()  # type: ignore[arg-type, unused-ignore]


def _cell_values(row: Sequence[Any], store_id: str) -> Iterator[Value]:
    kind, key = from_sql(row[0]), from_sql(row[1])
    if kind not in PLAIN_CELLS:
        yield Value("set_cell", (row[0], row[1]), cell_place(store_id, kind, key), bytes(row[2]))


def postgres_values(queries: Mapping[str, str], store_id: str, encryption: Encryption) -> Values:
    """The values of a store."""
    tables = (
        TableScan(queries["values_of_records"], (0,), 1, record_values),
        TableScan(queries["values_of_events"], (0,), 1, event_values),
        TableScan(queries["values_of_cells"], ("", ""), 2, _cell_values),
    )
    updates = {name: queries[f"set_{name}"] for name in ("payload", "result", "trail", "batch")}
    return Values(tables, {**updates, "set_cell": queries["set_cell"]}, store_id, encryption)
