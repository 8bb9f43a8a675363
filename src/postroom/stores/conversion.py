"""Encrypts the stored values of a ledger with the current key: after a new key, and when encryption begins.

Rule 1: a conversion is many short transactions, so workers continue meanwhile. Each transaction stores its
        position, so that a conversion that was killed continues from there.
Rule 2: values that are written meanwhile use the current key. So no value that the conversion has passed
        gets an older key again.
Rule 3: a value that cannot be decrypted stays as it is, and is counted.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from postroom.errors import KeyInUse, KeyMissing, UnreadableValue
from postroom.stores.codec import PLAIN_CELLS, batch_place, cell_place, record_place
from postroom.system.crypto.encryption import HEAD_BYTES, LINE_MARK, PLAIN, Encryption, KeysInUse, key_of

CONVERSION_ROWS_MAX = 200  # rows that one transaction looks at
CONVERSION_BYTES_MAX = 1 << 20  # bytes of values after which a transaction ends earlier
PROGRESS_FACT = "keys.progress"

Ask: TypeAlias = Callable[[str, tuple[Any, ...]], Sequence[Sequence[Any]]]
Tell: TypeAlias = Callable[[str, tuple[Any, ...]], object]


class Progress(msgspec.Struct, frozen=True):
    """How far a conversion came."""

    key: str
    """The fingerprint of the key that values are converted to."""
    part: int = 0
    """The index of the current table; the number of tables when everything is converted."""
    after: list[Any] = []
    """The last row that was looked at; empty before the first."""
    rows: int = 0
    converted: int = 0
    """Values that had another key, or none."""
    was_plain: int = 0
    """How many of them were not encrypted. Until the store is wiped, its files may still hold their text."""
    unreadable: int = 0
    is_done: bool = False
    is_wiped: bool = False
    """Whether `Store.wipe` has run to its end since."""


class Value(NamedTuple):
    """A stored value that is, or should be, encrypted."""

    update: str
    """The name of the statement that stores another form of it."""
    row: tuple[Any, ...]
    place: str
    stored: bytes | str
    is_lines: bool = False
    """Whether it is text of which each line is encrypted by itself."""


class TableScan(NamedTuple):
    """How the values of one table are read: the query has the position of the last row and a limit."""

    query: str
    start: tuple[Any, ...]
    key_columns: int
    values: Callable[[Sequence[Any], str], Iterator[Value]]


def record_values(row: Sequence[Any], store_id: str) -> Iterator[Value]:
    """The values of a row with seq, payload, result and trail."""
    seq, payload, result, trail = row
    for field, stored in (("payload", payload), ("result", result), ("trail", trail)):
        if stored is not None:
            yield Value(field, (seq,), record_place(store_id, field, seq), stored, field == "trail")


def event_values(row: Sequence[Any], store_id: str) -> Iterator[Value]:
    """The value of a row with its number and its batch of events."""
    yield Value("batch", (row[0],), batch_place(store_id, row[0]), row[1])


def cell_values(update: str) -> Callable[[Sequence[Any], str], Iterator[Value]]:
    """The value of a row with kind, key and value."""

    def values(row: Sequence[Any], store_id: str) -> Iterator[Value]:
        kind, key, stored = row
        if kind not in PLAIN_CELLS:
            yield Value(update, (kind, key), cell_place(store_id, kind, key), stored)

    return values


class Values:
    """The stored values of one ledger. `ask` and `tell` run a statement in a transaction."""

    def __init__(
        self,
        tables: Sequence[TableScan],
        updates: Mapping[str, str],
        store_id: str,
        encryption: Encryption,
    ) -> None:
        self._tables = tables
        self._updates = updates
        self._store_id = store_id
        self._encryption = encryption

    def convert(self, ask: Ask, tell: Tell, progress: Progress) -> Progress:
        """Convert some rows; returns how far it came."""
        if progress.part >= len(self._tables):
            return msgspec.structs.replace(progress, is_done=True)
        table = self._tables[progress.part]
        after: Sequence[Any] = progress.after or table.start
        rows = ask(table.query, (*after, CONVERSION_ROWS_MAX))
        counts = {"rows": 0, "converted": 0, "was_plain": 0, "unreadable": 0}
        nbytes = 0
        for row in rows:
            for value in table.values(row, self._store_id):
                nbytes += len(value.stored)
                self._convert(value, tell, counts)
            counts["rows"] += 1
            after = row[: table.key_columns]
            if nbytes >= CONVERSION_BYTES_MAX:
                break
        totals = {name: getattr(progress, name) + n for name, n in counts.items()}
        if counts["rows"] < CONVERSION_ROWS_MAX and counts["rows"] == len(rows):
            return msgspec.structs.replace(progress, part=progress.part + 1, after=[], **totals)
        return msgspec.structs.replace(progress, after=[*after], **totals)

    def _convert(self, value: Value, tell: Tell, counts: dict[str, int]) -> None:
        keys = keys_of(value)
        if keys == {self._encryption.current}:
            return
        try:
            plain = self._plain(value)
        except (UnreadableValue, KeyMissing, UnicodeDecodeError):
            counts["unreadable"] += 1
            return
        counts["converted"] += 1
        counts["was_plain"] += PLAIN in keys
        tell(self._updates[value.update], (self._sealed(value, plain), *value.row))

    def _plain(self, value: Value) -> bytes:
        if value.is_lines:
            return self._encryption.open_lines(_text(value.stored), value.place).encode()
        stored = value.stored.encode() if isinstance(value.stored, str) else bytes(value.stored)
        return self._encryption.open(stored, value.place)

    def _sealed(self, value: Value, plain: bytes) -> bytes | str:
        if not value.is_lines:
            return self._encryption.seal(plain, value.place)
        line = self._encryption.seal_line(plain.decode(), value.place) + "\n"
        return line if isinstance(value.stored, str) else line.encode()

    def all(self, ask: Ask) -> Iterator[Value]:
        """Every value."""
        for table in self._tables:
            after: Sequence[Any] = table.start
            while rows := ask(table.query, (*after, CONVERSION_ROWS_MAX)):
                for row in rows:
                    yield from table.values(row, self._store_id)
                after = rows[-1][: table.key_columns]

    def count(self, ask: Ask) -> dict[str, int]:
        """How many values need each key, by fingerprint; `PLAIN` for those that need none."""
        counts: dict[str, int] = {}
        for value in self.all(ask):
            for key in keys_of(value):
                counts[key] = counts.get(key, 0) + 1
        return counts

    def unreadable(self, ask: Ask) -> Iterator[UnreadableValue | KeyMissing]:
        """Why values cannot be decrypted."""
        for value in self.all(ask):
            try:
                self._plain(value)
            except (UnreadableValue, KeyMissing) as error:
                yield error


def keys_of(value: Value) -> set[str]:
    """The fingerprints of the keys that encrypted a value; `PLAIN` where none did."""
    if not value.is_lines:
        stored = value.stored
        return {key_of(bytes(stored[:HEAD_BYTES])) if not isinstance(stored, str) else PLAIN}
    return {_key_of_line(line) for line in _text(value.stored).splitlines() if line}


def _key_of_line(line: str) -> str:
    if not line.startswith(LINE_MARK):
        return PLAIN
    try:
        return key_of(base64.urlsafe_b64decode(line[len(LINE_MARK) :][: HEAD_BYTES // 3 * 4]))
    except ValueError:
        return PLAIN


def _text(stored: bytes | str) -> str:
    return stored if isinstance(stored, str) else bytes(stored).decode()


def progress_of(text: str | None, encryption: Encryption) -> Progress:
    """The stored progress of the conversion to the current key, or the start of a new conversion.

    A conversion whose store was not wiped, because of a kill or a full disk, leaves that to the next one.
    """
    noted = Progress("", is_wiped=True) if not text else msgspec.json.decode(text, type=Progress)
    if noted.key == encryption.current and not noted.is_done:
        return noted
    return Progress(encryption.current, was_plain=0 if noted.is_wiped else noted.was_plain)


def wiped(text: str) -> str:
    """The fact of a store after it was wiped."""
    noted = msgspec.json.decode(text, type=Progress)
    return msgspec.json.encode(msgspec.structs.replace(noted, is_wiped=True)).decode()


def without_key(where: str, noted: KeysInUse, key: str, counts: Mapping[str, int]) -> KeysInUse:
    """The keys in use without `key`. Raises when `key` is current or a value needs it."""
    if key == noted.current:
        raise KeyInUse(f"{where} encrypts with this key: rotate to another one first")
    if counts.get(key):
        raise KeyInUse(
            f"{counts[key]} values in {where} are encrypted with this key: run `postroom keys encrypt` first"
        )
    return KeysInUse({each: name for each, name in noted.keys.items() if each != key}, noted.current)
