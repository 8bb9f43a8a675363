"""`open_store`: a store by its address."""

import os

from postroom.errors import InvalidMessage, InvalidSetting, shown_address
from postroom.stores.store import Store
from postroom.system.clock import Clock
from postroom.system.crypto.encryption import key_file_encryption

SQLITE = "sqlite:///"
MEMORY = "memory://"
AMQP = ("amqp://", "amqps://")
POSTGRES = ("postgres://", "postgresql://")
SERVERS = (*POSTGRES, *AMQP)
"""The schemes of stores that several hosts can share. Their workers claim concurrently."""


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    key_file: str | os.PathLike[str] | None = None,
    notes_keys: bool = True,
) -> Store:
    """The store at `url`: `sqlite:///path`, `postgres://user@host/db`, `amqp://host/?ledger=URL`, `memory://`.

    `key_file` encrypts what is stored; None means the file that the environment names. A store in memory is
    never encrypted. `notes_keys` is that of the store.
    """
    if url == MEMORY:
        from postroom.stores.memory import MemoryStore

        return MemoryStore(clock=clock)
    if url.startswith(AMQP):
        from postroom.stores.rabbitmq.store import RabbitStore, parse_address

        address = parse_address(url)
        if address.is_broker_only and key_file_encryption(key_file) is not None:
            raise InvalidSetting(
                "p0=broker-only keeps P0 in the broker, which encrypts nothing: leave it out, or the key file"
            )
        ledger = open_store(address.ledger, clock=clock, key_file=key_file, notes_keys=notes_keys)
        return RabbitStore(address, ledger)
    if url.startswith(POSTGRES):
        from postroom.stores.postgres.store import PostgresStore

        store: Store = PostgresStore(url, clock=clock, encryption=key_file_encryption(key_file))
        store.notes_keys = notes_keys
        return store
    path = url.removeprefix(SQLITE)
    if path == url or not path or "\0" in path:
        raise InvalidMessage(
            f"{shown_address(url)!r} is not a store: use sqlite:///path/to/queue.db, "
            "postgres://user@host/db, amqp://host/?ledger=URL or memory://"
        )
    from postroom.stores.sqlite.store import SqliteStore

    store = SqliteStore(path, clock=clock, encryption=key_file_encryption(key_file))
    store.notes_keys = notes_keys
    return store
