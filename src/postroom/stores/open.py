"""`open_store`: a store by its address."""

from postroom.errors import InvalidMessage
from postroom.stores.store import Store
from postroom.system.clock import Clock

SQLITE = "sqlite:///"
MEMORY = "memory://"
AMQP = ("amqp://", "amqps://")
POSTGRES = ("postgres://", "postgresql://")


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
            f"{url!r} is not a store: use sqlite:///path/to/queue.db, postgres://user@host/db or memory://"
        )
    from postroom.stores.sqlite import SqliteStore

    return SqliteStore(path, clock=clock)
