"""Move a store to another address while its users wait: `postroom move FROM TO`.

Rule 1: the source refuses writes from the moment of the copy, in every process. It is never written again,
        unless the move fails: then it takes writes again.
Rule 2: the move is over when every record, cell and counter of the target was compared with the source.
"""

from postroom.errors import InvalidMessage, StoreDamaged
from postroom.stores.open import POSTGRES, SQLITE, open_store
from postroom.stores.postgres import PostgresStore
from postroom.stores.postgres_import import differences, import_store
from postroom.stores.store import Store


def move_store(source_url: str, target_url: str) -> dict[str, int]:
    """Move all records, leases, keys, dead letters, events and cells. Returns what was copied.

    Raises `StoreMoved` for a store that was moved before.
    """
    if not source_url.startswith(SQLITE) or not target_url.startswith(POSTGRES):
        raise InvalidMessage("a store is moved from sqlite:///path to postgres://user@host/db")
    source, target = open_store(source_url), PostgresStore(target_url)
    try:
        source.write(lambda _: None)  # `StoreMoved` here: a failure below must not undo an earlier move
        target.identity()  # before the source stops: the target must answer
        source.set_moved(target.url)
        try:
            copied = import_store(target, source)
            _compare(source, target)
        except BaseException:
            source.set_moved("")
            raise
    finally:
        source.close()
        target.close()
    return copied


def _compare(source: Store, target: Store) -> None:
    found = differences(source, target)
    if found:
        raise StoreDamaged(f"the copy differs from {source.url}: {found[0]}")


def end_move(source_url: str) -> None:
    """Let a store take writes again after a move that was killed half-way."""
    source = open_store(source_url)
    source.set_moved("")
    source.close()
