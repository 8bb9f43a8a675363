"""`open_store`: a store by its address."""

import re

from postroom.errors import InvalidMessage
from postroom.stores.store import Store
from postroom.system.clock import Clock

SQLITE = "sqlite:///"
MEMORY = "memory://"
AMQP = ("amqp://", "amqps://")
POSTGRES = ("postgres://", "postgresql://")


_PASSWORD = re.compile(r"(://[^/@:?]*):[^/@]*@")


def shown_address(url: str) -> str:
    """The address of a store without its password and its options."""
    address, _, options = url.partition("?")
    return _PASSWORD.sub(r"\1@", address) + ("?…" if options else "")


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """The store at `url`: `sqlite:///relative.db`, `sqlite:////absolute.db`, `memory://` or `postgres://`."""
    if url == MEMORY:
        from postroom.stores.memory import MemoryStore

        return MemoryStore(clock=clock)
    if url.startswith(AMQP):
        from postroom.stores.rabbitmq import RabbitStore, parse_address

        address = parse_address(url)
        return RabbitStore(address, open_store(address.ledger, clock=clock))
    if url.startswith(POSTGRES):
        from postroom.stores.postgres import PostgresStore

        return PostgresStore(url, clock=clock)
    path = url.removeprefix(SQLITE)
    if path == url or not path or "\0" in path:
        raise InvalidMessage(
            f"{shown_address(url)!r} is not a store: use sqlite:///path/to/queue.db, "
            "postgres://user@host/db, amqp://user@host/?ledger=URL or memory://"
        )
    from postroom.stores.sqlite import SqliteStore

    return SqliteStore(path, clock=clock)
