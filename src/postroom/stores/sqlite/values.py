"""The stored values of a file: their checksums, which `verify` compares, and their conversion to another key.

Rule 1: a checksum covers the stored form, so encrypted values are checked without a key. Deliveries do not
        read them.
Rule 2: a value without a checksum is one of an earlier version, or was converted to another key: an encrypted
        value is authenticated anyway.
Rule 3: a checksum is a number, the CRC-32 of `zlib`. A statement that writes many records gives 4 bytes for
        each instead.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from postroom.stores.codec import batch_place, cell_place, record_place
from postroom.stores.conversion import TableScan, Values, cell_values, event_values, record_values
from postroom.stores.sqlite.sql.queries import Reading
from postroom.system.crypto.encryption import Encryption

CRC_BYTES = 4

_RECORDS = "SELECT seq, payload, result, trail FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
_EVENTS = "SELECT seq, CAST(batch AS BLOB) FROM events WHERE seq > ? ORDER BY seq LIMIT ?"
_CELLS = "SELECT kind, key, value FROM cells WHERE (kind, key) > (?, ?) ORDER BY kind, key LIMIT ?"

_TABLES = (
    TableScan(_RECORDS, (0,), 1, record_values),
    TableScan(_EVENTS, (0,), 1, event_values),
    TableScan(_CELLS, ("", ""), 2, cell_values("cell")),
    TableScan(_CELLS.replace("cells", "chunks"), ("", ""), 2, cell_values("chunk")),
)
_UPDATES = {
    "payload": "UPDATE records SET payload = ?, payload_crc = NULL WHERE seq = ?",
    "result": "UPDATE records SET result = ?, result_crc = NULL WHERE seq = ?",
    "trail": "UPDATE records SET trail = ?, trail_crc = NULL WHERE seq = ?",
    "batch": "UPDATE events SET batch = ?, crc = NULL WHERE seq = ?",
    "cell": "UPDATE cells SET value = ?, crc = NULL WHERE kind = ? AND key = ?",
    "chunk": "UPDATE chunks SET value = ?, crc = NULL WHERE kind = ? AND key = ?",
}
_RECORD_SUMS = (
    "SELECT seq, type, parent_message_id, key, sender, payload, payload_crc, result, result_crc, "
    "CAST(trail AS BLOB), trail_crc FROM records"
)
_EVENT_SUMS = "SELECT seq, CAST(counts AS BLOB), CAST(batch AS BLOB), crc FROM events WHERE crc NOT NULL"
_CELL_SUMS = "SELECT kind, key, value, crc FROM cells WHERE crc NOT NULL"
_CHUNK_SUMS = _CELL_SUMS.replace("cells", "chunks")


def checksums(values: Sequence[bytes], start: int) -> bytes:
    """The checksums of several values, one after the other."""
    return struct.pack(f"<{len(values)}I", *map(zlib.crc32, values, repeat(start)))


def start_of(*texts: str) -> int:
    """The checksum of texts that are stored next to a value."""
    return zlib.crc32("\x1f".join(texts).encode())


NO_TEXTS = start_of("", "", "", "")
"""Of most tasks."""


def changed_values(connection: Reading, store_id: str) -> Iterator[str]:
    """The values that were changed since they were written."""
    for place in _changed_places(connection, store_id):
        yield f"{place}: the checksum does not match"


def _changed_places(connection: Reading, store_id: str) -> Iterator[str]:
    for seq, *texts, payload, payload_crc, result, result_crc, trail, trail_crc in connection.execute(
        _RECORD_SUMS
    ):
        given = _start_of(*(text or "" for text in texts))
        if not _fits(payload, payload_crc, given):
            yield record_place(store_id, "payload", seq)
        if not _fits(result, result_crc):
            yield record_place(store_id, "result", seq)
        if trail_crc is not None and not _lines_fit(trail, trail_crc):
            yield record_place(store_id, "trail", seq)
    for seq, counts, batch, crc in connection.execute(_EVENT_SUMS):
        if not _fits(counts, crc, zlib.crc32(batch)):
            yield batch_place(store_id, seq)
    for query in (_CELL_SUMS, _CHUNK_SUMS):
        for kind, key, value, crc in connection.execute(query):
            if not _fits(value, crc, _start_of(kind, key)):
                yield cell_place(store_id, kind, key)


def _start_of(*texts: Any) -> int:
    """The checksum of texts as they were found. In a damaged row, one may be of another type."""
    return start_of(*map(str, texts))


def _fits(value: Any, crc: Any, start: int = 0) -> bool:
    """Whether a value is the written one. A damaged row may have a value of another type."""
    if crc is None:
        return True
    if isinstance(crc, bytes):
        crc = int.from_bytes(crc, "little")
    return isinstance(value, bytes) and zlib.crc32(value, start) == crc


def _lines_fit(trail: Any, crc: Any) -> bool:
    """Whether the newest lines of a trail match their checksum."""
    if not isinstance(trail, bytes) or not isinstance(crc, bytes):
        return False
    lines = trail.split(b"\n")[:-1]
    return checksums(lines[-(len(crc) // CRC_BYTES) :], 0) == crc


def sqlite_values(store_id: str, encryption: Encryption) -> Values:
    """The values of a store file."""
    return Values(_TABLES, _UPDATES, store_id, encryption)
