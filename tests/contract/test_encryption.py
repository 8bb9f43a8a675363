"""Encryption at rest: the store contract holds, and no stored byte shows what a message says."""

from pathlib import Path

from postroom.stores.sqlite import SqliteStore
from postroom.stores.store import Store
from postroom.system.encryption import Encryption
from postroom.system.key_file import add_key
from postroom.testing import ManualClock, StoreContract


def keyed(folder: Path) -> Encryption:
    """The encryption of a folder with the key file `keys`, which is made when it is missing."""
    path = folder / "keys"
    if not path.exists():
        add_key(path, "first")
    return Encryption(path)


class TestEncryptedSqlite(StoreContract):
    def open(self, folder: Path, clock: ManualClock) -> Store:
        return SqliteStore(folder / "queue.db", clock=clock, encryption=keyed(folder))
