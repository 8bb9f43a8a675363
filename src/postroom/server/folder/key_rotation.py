"""Keys of a data folder or a store: convert values to the newest key, count them by key, retire a key.

Rule 1: a key is removed from its file only when no value of any part needs it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from postroom.errors import KeyInUse, KeyMissing
from postroom.logs.mail_log import count_keys as count_mail_keys
from postroom.server.folder.layout import AUDIT_FOLDER, DATABASE, MAIL_FOLDER, upgrade_copies
from postroom.stores.conversion import Progress
from postroom.stores.open import SQLITE, open_store
from postroom.stores.store import Store
from postroom.system.crypto.encryption import PLAIN, Encryption
from postroom.system.crypto.key_file import check_outside, fingerprint, read_keys, remove_key
from postroom.system.log import library_log

SEGMENT_BLOCK_BYTES = 1 << 20

_log = library_log("postroom.keys")


class KeyUse(msgspec.Struct, frozen=True):
    """A key of the key file, or one that values need."""

    name: str
    fingerprint: str
    is_current: bool
    values: int | None = None
    """How many values need it; None when nothing was counted."""


class EncryptedData:
    """The parts of a data folder, or a store alone, that one key file encrypts."""

    def __init__(self, encryption: Encryption, folder: Path | None, store_url: str | None) -> None:
        self.encryption = encryption
        self._folder = folder
        if folder is not None:
            check_outside(encryption.path, folder)
        if store_url is None and folder is not None and (folder / DATABASE).exists():
            store_url = f"{SQLITE}{folder / DATABASE}"
        self._store_url = store_url

    @contextmanager
    def _store(self, *, notes_keys: bool = False) -> Iterator[Store | None]:
        if self._store_url is None:
            yield None
            return
        opened = open_store(self._store_url, key_file=self.encryption.path, notes_keys=notes_keys)
        with closing(opened) as store:
            yield store

    def check(self) -> None:
        """Raise when the key file lacks a key of the data. Call it before another key encrypts anything."""
        with self._store() as store:
            if store is not None:
                store.identity()
                return
        missing = {key: "" for key in self._mail_counts() if key not in (PLAIN, *self.encryption.names)}
        if missing:
            raise self.encryption.lacks(f"the mail log of {self._folder}", missing)

    def convert(self, report: Callable[[Progress], None]) -> Progress | None:
        """Encrypt every value of the store with the newest key. None without a store."""
        with self._store(notes_keys=True) as store:
            if store is None:
                return None
            while not (progress := store.convert()).is_done:
                report(progress)
            if progress.was_plain and not store.wipe():
                _log.warning(
                    "free pages of %s may still hold values that were not encrypted: run `postroom keys "
                    "encrypt` again when no long read uses it",
                    store.url,
                )
        self.encryption.reload_if_changed()  # another rotation may have added a newer key
        return progress

    def plain_copies(self) -> list[str]:
        """Copies of the store that upgrades have left. They stay as they are."""
        return [] if self._folder is None else upgrade_copies(self._folder)

    def waiting_mail(self) -> int:
        """Records of Mail's log that the newest key did not encrypt. A running mail server converts them."""
        counts = self._mail_counts()
        return sum(n for key, n in counts.items() if key != self.encryption.current)

    def _mail_counts(self) -> dict[str, int]:
        folder = None if self._folder is None else self._folder / MAIL_FOLDER
        return count_mail_keys(folder) if folder is not None and folder.is_dir() else {}

    def uses(self) -> list[KeyUse]:
        """The keys of the file and those that values need, each with the number of values."""
        counts: Counter[str] = Counter(self._mail_counts())
        with self._store() as store:
            if store is not None:
                counts.update(store.count_keys())
        names, current = self.encryption.names, self.encryption.current
        ordered = [*names, *(key for key in sorted(counts) if key not in names)]
        shown = {PLAIN: "", **names}
        return [KeyUse(shown.get(key, "?"), key, key == current, counts[key]) for key in ordered]

    def retire(self, name: str) -> None:
        """Remove a key that no value needs from the key file."""
        keys = read_keys(self.encryption.path)
        if name not in keys:
            raise KeyMissing(
                f"key file {self.encryption.path} has no key {name!r}: its keys are {', '.join(keys)}"
            )
        key = fingerprint(keys[name]).hex()
        if key == self.encryption.current:
            raise KeyInUse(f"{name!r} encrypts new values: rotate to another key first")
        mail = self._mail_counts().get(key, 0)
        if mail:
            raise KeyInUse(
                f"{mail} records of Mail are encrypted with the key {name!r}: a mail server converts them "
                "within a minute of its start"
            )
        mark = f"enc:1:{name}:".encode()  # the audit stream may share the key file
        segments = [] if self._folder is None else (self._folder / AUDIT_FOLDER).rglob("*.jsonl")
        if any(_holds(path, mark) for path in segments if path.is_file()):
            raise KeyInUse(f"the audit stream has payloads that are encrypted with the key {name!r}")
        with self._store() as store:
            if store is not None:
                store.retire_key(key)
        remove_key(self.encryption.path, name)


def _holds(path: Path, mark: bytes) -> bool:
    rest = b""
    with path.open("rb") as file:
        while block := file.read(SEGMENT_BLOCK_BYTES):
            if mark in rest + block:
                return True
            rest = block[-len(mark) :]
    return False


def key_uses(path: Path) -> list[KeyUse]:
    """The keys of a file, newest first."""
    keys = read_keys(path)
    if not keys:
        raise KeyMissing(f"key file {path} has no key")
    first = next(iter(keys))
    return [KeyUse(name, fingerprint(key).hex(), name == first) for name, key in keys.items()]
