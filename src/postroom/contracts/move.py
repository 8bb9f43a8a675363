"""Move a store to another address while its users wait: `postroom move FROM TO`.

Rule 1: the source refuses writes from the moment of the copy, in every process. It takes writes again only
        when the move failed and the target is known to be empty: two stores would deliver the same messages.
Rule 2: the move is over when every record, event, cell and counter of the target was compared with those of
        the source.
"""

from contextlib import closing, suppress

import psycopg

from postroom.errors import InvalidMessage, PostroomError, StoreDamaged
from postroom.stores.open import POSTGRES, SQLITE, open_store
from postroom.stores.postgres.importer import differences, import_store, is_empty
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.store import Store
from postroom.system.crypto.encryption import key_file_encryption
from postroom.system.log import library_log

_log = library_log("postroom.store")


def move_store(source_url: str, target_url: str) -> dict[str, int]:
    """Move all records, leases, keys, dead letters, events and cells. Returns what was copied.

    Raises `StoreMoved` for a store that was moved before.
    """
    if not source_url.startswith(SQLITE) or not target_url.startswith(POSTGRES):
        raise InvalidMessage("a store is moved from sqlite:///path to postgres://user@host/db")
    with (
        closing(open_store(source_url)) as source,
        closing(PostgresStore(target_url, encryption=key_file_encryption(None))) as target,
    ):
        source.write(lambda _: None)  # `StoreMoved` here: a failure below must not undo an earlier move
        if not is_empty(target):  # before the source stops
            raise InvalidMessage(f"{target.url} is not empty: move into an empty store")
        source.set_moved(target.url)
        try:
            copied = import_store(target, source)
            _compare(source, target)
        except BaseException:
            _reopen_if_empty(source, target)
            raise
    return copied


def _reopen_if_empty(source: Store, target: PostgresStore) -> None:
    """Let the source of a failed move take writes again, unless the target holds what was copied."""
    with suppress(PostroomError, psycopg.Error):
        if is_empty(target):
            source.set_moved("")
            return
    _log.error(
        "%s still refuses writes: %s is not known to be empty. Empty it, then: postroom move --undo FROM TO",
        source.url,
        target.url,
    )


def _compare(source: Store, target: Store) -> None:
    if found := differences(source, target):
        raise StoreDamaged(f"the copy differs from {source.url}: {found[0]}")


def end_move(source_url: str, target_url: str | None) -> None:
    """Let a store take writes again after a move that was killed half-way.

    The target has to be empty. None skips that check.
    """
    if target_url is not None:
        with closing(PostgresStore(target_url, encryption=key_file_encryption(None))) as target:
            if not is_empty(target):
                raise InvalidMessage(
                    f"{target.url} holds messages, which both stores would deliver: use it, or drop its "
                    "schema first, or give --force"
                )
    with closing(open_store(source_url)) as source:
        source.set_moved("")
