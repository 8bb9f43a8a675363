"""`open_store`: a store by its address."""

from postroom.errors import InvalidMessage
from postroom.stores.store import Store
from postroom.system.clock import Clock

SQLITE = "sqlite:///"
MEMORY = "memory://"
AMQP = ("amqp://", "amqps://")


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """The store at `url`: `sqlite:///relative.db`, `sqlite:////absolute.db` or `memory://`."""
    if url == MEMORY:
        from postroom.stores.memory import MemoryStore

        return MemoryStore(clock=clock)
    if url.startswith(AMQP):
        from postroom.stores.rabbitmq import RabbitStore, parse_address

        address = parse_address(url)
        return RabbitStore(address, open_store(address.ledger, clock=clock))
    path = url.removeprefix(SQLITE)
    if path == url or not path or "\0" in path:
        raise InvalidMessage(f"{url!r} is not a store: use sqlite:///path/to/queue.db or memory://")
    from postroom.stores.sqlite import SqliteStore

    return SqliteStore(path, clock=clock)
