"""The encrypted values of a SQLite store: converting, counting and checking them.

Rule 1: a converted value has no checksum any more: it is authenticated with its key.
"""

from postroom.stores.conversion import Table, Values, cell_values, event_values, record_values
from postroom.system.crypto.encryption import Encryption

_RECORDS = "SELECT seq, payload, result, trail FROM records WHERE seq > ? ORDER BY seq LIMIT ?"
_EVENTS = "SELECT seq, CAST(batch AS BLOB) FROM events WHERE seq > ? ORDER BY seq LIMIT ?"
_CELLS = "SELECT kind, key, value FROM cells WHERE (kind, key) > (?, ?) ORDER BY kind, key LIMIT ?"

_TABLES = (
    Table(_RECORDS, (0,), 1, record_values),
    Table(_EVENTS, (0,), 1, event_values),
    Table(_CELLS, ("", ""), 2, cell_values("cell")),
    Table(_CELLS.replace("cells", "chunks"), ("", ""), 2, cell_values("chunk")),
)
_UPDATES = {
    "payload": "UPDATE records SET payload = ?, payload_crc = NULL WHERE seq = ?",
    "result": "UPDATE records SET result = ?, result_crc = NULL WHERE seq = ?",
    "trail": "UPDATE records SET trail = ?, trail_crc = NULL WHERE seq = ?",
    "batch": "UPDATE events SET batch = ?, crc = NULL WHERE seq = ?",
    "cell": "UPDATE cells SET value = ?, crc = NULL WHERE kind = ? AND key = ?",
    "chunk": "UPDATE chunks SET value = ?, crc = NULL WHERE kind = ? AND key = ?",
}


def sqlite_values(store_id: str, encryption: Encryption) -> Values:
    """The values of a store file."""
    return Values(_TABLES, _UPDATES, store_id, encryption)
