"""The queries of a store file, by name.

The column `line` says where a record is found: the line of its queue and lane while it is QUEUED, the line of
its state otherwise. `turn` is its position in that line.
"""

from typing import Any

import apsw

from postroom.message import State
from postroom.system.crypto.encryption import MARK, OVERHEAD_BYTES

TRAIL_CHARS_MAX = 256 * 1024  # of one record; later events are only in the audit stream
ROOM_BYTES = 96  # what a claim and a short result add to a row
LINE_DELAYED = 8
LINE_LEASED = 9
LINES_OF_STATES: dict[State, int] = {
    "SCHEDULED": LINE_DELAYED,
    "RETRYING": LINE_DELAYED,
    "PROCESSING": LINE_LEASED,
    "EXECUTING": 10,
    "DEAD_LETTER": 11,
    "CANCELLED": 12,
    "EXPIRED": 13,
    "QUARANTINED": 14,
}
"""Lines that all queues share. COMPLETED and DONE records, which are most records of a file, have no line."""
LINES_PER_QUEUE = 16  # a QUEUED record of an agent is in line 16 * queue + lane
ENGINE_QUEUES = 1 << 30  # queues of organizations have larger numbers
ENGINE_LINES = 1 << 40  # QUEUED records of organizations have larger lines: the same lane of all is one range

Reading = apsw.Connection | apsw.Cursor
"""What a query can be sent to. An existing cursor answers faster than its connection."""


def ask(connection: Reading, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    """All rows of a query."""
    return connection.execute(query, values).fetchall()


# ---- records ---------------------------------------------------------------------------------------

RECORD_COLUMNS = (
    "seq, message_id, queue, state, priority, lane, place, attempt, retries, crashes, max_retries, lease, "
    "worker_id, lease_ns, turn, ready_at, expires, durability, created_us, claimed_us, heartbeat_us, "
    "ended_us, sender"
)
RECORD = f"SELECT {RECORD_COLUMNS} FROM records"
BY_NAME = f"{RECORD} WHERE message_id = ?"
BY_SEQ = f"{RECORD} WHERE seq = ? AND message_id IS NULL"
BY_SEQS = f"{RECORD} WHERE seq IN (SELECT value FROM carray(?)) AND message_id IS NULL"
ENDING = f"{RECORD} WHERE line = ? AND turn <= ? ORDER BY turn, seq LIMIT ?"
EXPIRING = (
    f"{RECORD} WHERE expires > 0 AND (line = {LINE_DELAYED} OR line >= {LINES_PER_QUEUE}) AND expires <= ? "
    "ORDER BY expires LIMIT ?"
)
PULL = (
    f"SELECT {RECORD_COLUMNS}, payload, type, parent_message_id FROM records "
    "WHERE line = ? ORDER BY turn LIMIT ?"
)
HEADS_BY_SEQ = (
    f"SELECT {RECORD_COLUMNS}, payload, type, parent_message_id FROM records "
    "WHERE seq IN (SELECT value FROM carray(?)) AND message_id IS NULL"
)
NEXT_LINES = (
    "WITH RECURSIVE found(line) AS (SELECT min(line) FROM records WHERE line > ?1 AND line < ?2 UNION ALL "
    "SELECT (SELECT min(line) FROM records WHERE line > found.line AND line < ?2) FROM found "
    "WHERE found.line IS NOT NULL) SELECT line FROM found WHERE line IS NOT NULL LIMIT ?3"
)
OLDEST = f"{RECORD} WHERE lane = ? AND line > {ENGINE_LINES} ORDER BY ready_at LIMIT 1"
NEW_QUEUE = (
    f"INSERT INTO queues (queue, name) SELECT coalesce(max(queue), 0) + 1, ? FROM queues "
    f"WHERE queue < {ENGINE_QUEUES}"
)
NEW_ENGINE_QUEUE = (
    f"INSERT INTO queues (queue, name) SELECT coalesce(max(queue), {ENGINE_QUEUES}) + 1, ? FROM queues "
    f"WHERE queue > {ENGINE_QUEUES}"
)
STORED = (
    "SELECT type, parent_message_id, key, delay_ns, ttl_ns, payload, result, trail FROM records WHERE seq = ?"
)
PAYLOADS = "SELECT seq, payload FROM records WHERE seq IN (SELECT value FROM carray(?))"
RESULTS = (
    "SELECT seq, result FROM records WHERE seq IN (SELECT value FROM carray(?)) AND message_id IS NULL "
    "AND result IS NOT NULL"
)

NEW = (
    f"INSERT INTO records ({RECORD_COLUMNS}, line, type, parent_message_id, key, delay_ns, ttl_ns, payload, "
    "room, payload_crc) "
)
INSERT = f"{NEW} VALUES ({', '.join('?' * 30)}, zeroblob({ROOM_BYTES}), ?)"
# A record without a name, a key and a sender. Values that all such records share are literals, because each
# parameter takes time.
_PLAIN = (
    "{seq}, NULL, ?2, ?3, ?4, ?4, {seq}, 0, 0, 0, ?5, 0, '', 0, ifnull(?6, {seq}), ?7, ?8, ?9, ?10, 0, 0, 0, "
    f"NULL, ?11, ?12, ?13, '', ?14, ?15, {{payload}}, zeroblob({ROOM_BYTES}), {{crc}}"
)
INSERT_PLAIN = f"{NEW} VALUES ({_PLAIN.format(seq='?1', payload='?16', crc='?17')})"
# Records that differ in number and payload only. The rows of an array are numbered from 1.
_ALIKE = _PLAIN.format(seq="?1 + ?18 * (rowid - 1)", payload="value", crc="substr(?17, 4 * rowid - 3, 4)")
INSERT_ALIKE = f"{NEW} SELECT {_ALIKE} FROM carray(?16)"
_UPDATE = (
    "UPDATE records SET state = ?, lane = ?, place = ?, attempt = ?, retries = ?, crashes = ?, lease = ?, "
    "worker_id = ?, lease_ns = ?, turn = ?, ready_at = ?, expires = ?, claimed_us = ?, heartbeat_us = ?, "
    "ended_us = ?, line = ?"
)
UPDATE = f"{_UPDATE} WHERE seq = ?"
UPDATE_RESULT = f"{_UPDATE}, result = ?, result_crc = ? WHERE seq = ?"
UPDATE_TRAIL = (
    f"{_UPDATE}, trail = CASE WHEN length(trail) > {TRAIL_CHARS_MAX} THEN trail "
    "ELSE coalesce(trail, '') || ? END, "
    f"trail_crc = CASE WHEN length(trail) > {TRAIL_CHARS_MAX} THEN trail_crc "
    "ELSE CAST(coalesce(trail_crc, x'') || ? AS BLOB) END WHERE seq = ?"
)
FORGET = "DELETE FROM records WHERE seq = ?"

# ---- the native verbs ------------------------------------------------------------------------------

FIRST_DEADLINES = (
    f"SELECT (SELECT min(turn) FROM records WHERE line = {LINE_DELAYED}), "
    f"(SELECT min(turn) FROM records WHERE line = {LINE_LEASED})"
)
HEADS = (
    "SELECT seq, lane, turn, ready_at, expires, message_id, attempt + 1, durability, payload, type, "
    "parent_message_id FROM records WHERE line = ? ORDER BY turn LIMIT ?"
)
# Records that were inserted one after the other have every second number. SQLite changes a range while it
# walks it; the records of an array are collected first, which takes longer.
_IN_A_ROW = "WHERE seq BETWEEN {first} AND {last} AND (seq - {first}) % 2 = 0"
_GIVEN = "FROM carray({array}) AS given WHERE seq = given.value"
_LEASE = (
    "UPDATE records SET state = 'PROCESSING', attempt = attempt + 1, lease = ?1 + {index}, worker_id = ?2, "
    f"lease_ns = ?3, line = {LINE_LEASED}, turn = ?4, claimed_us = ?5, heartbeat_us = ?5, room = NULL "
    "{which}"
)
LEASE_ONE = _LEASE.format(index="0", which="WHERE seq = ?6")
LEASE_ROW = _LEASE.format(index="(seq - ?6) / 2", which=_IN_A_ROW.format(first="?6", last="?7"))
LEASE_MANY = _LEASE.format(index="given.rowid - 1", which=_GIVEN.format(array="?6"))
_LEASED = (
    "SELECT seq, lease, queue, lane, worker_id, attempt, "
    "turn - lease_ns - 1000 * max(0, heartbeat_us - claimed_us), durability FROM {which} "
    f"AND line = {LINE_LEASED} AND turn > ?2 AND message_id IS NULL"
)
LEASED_ONE = _LEASED.format(which="records WHERE seq = ?1")
LEASED_MANY = _LEASED.format(which="carray(?1) CROSS JOIN records WHERE seq = value")  # in the array's order
_COMPLETE = (
    "UPDATE records SET state = 'COMPLETED', place = ?1 + {index}, line = NULL, result = ?2, ended_us = ?3, "
    "result_crc = ?4 {which}"
)
COMPLETE_ONE = _COMPLETE.format(index="0", which="WHERE seq = ?5")
COMPLETE_ROW = _COMPLETE.format(index="(seq - ?5) / 2", which=_IN_A_ROW.format(first="?5", last="?6"))
COMPLETE_MANY = _COMPLETE.format(index="given.rowid - 1", which=_GIVEN.format(array="?5"))

# ---- events and counters ---------------------------------------------------------------------------

NEW_EVENTS = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
# As bytes, because damaged text may not be UTF-8.
STORED_EVENTS = "SELECT seq, CAST(batch AS BLOB) FROM events WHERE seq > ? ORDER BY seq"
STORED_ROW = (
    "SELECT ts_us, CAST(batch AS BLOB), (SELECT max(seq) FROM events older WHERE older.seq < events.seq) "
    "FROM events WHERE seq = ?"
)
LAST_STORED = "SELECT coalesce(max(seq), 0) FROM events"
COUNTS_AFTER = "SELECT seq, counts FROM events WHERE seq > ? ORDER BY seq"
# Records after the last row of events imply their own two events.
IMPLIED = (
    "SELECT seq, name, priority, type, parent_message_id, created_us, length(payload) "
    "FROM records CROSS JOIN queues USING (queue) WHERE seq > ? AND seq <= ? ORDER BY seq"
)
IMPLIED_SEALED = IMPLIED.replace(
    "length(payload)",
    f"length(payload) - iif(substr(payload, 1, {len(MARK)}) = x'{MARK.hex()}', {OVERHEAD_BYTES}, 0)",
)
NEWEST_EVENT = (
    "SELECT coalesce((SELECT max(seq) + 1 FROM records WHERE seq > stored.last), stored.last) "
    "FROM (SELECT coalesce(max(seq), 0) AS last FROM events) stored"
)
IMPLIED_COUNTS = "SELECT queue, lane, count(*), max(seq) FROM records WHERE seq > ? GROUP BY queue, lane"
FORGET_EVENTS = "DELETE FROM events WHERE seq <= ? AND seq < (SELECT max(seq) FROM events)"
FACT = "SELECT value FROM facts WHERE name = ?"
SET_FACT = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
QUEUES = "SELECT name FROM queues WHERE name >= ? AND name < ? ORDER BY name"
SET_DEPTHS = "UPDATE queues SET depths = ? WHERE queue = ?"

# ---- cells -----------------------------------------------------------------------------------------

CELL = "SELECT value FROM cells WHERE kind = ? AND key = ?"
PUT_CELL = (
    "INSERT INTO cells VALUES (?, ?, ?, ?) ON CONFLICT (kind, key) "
    "DO UPDATE SET value = excluded.value, crc = excluded.crc"
)
DROP_CELL = "DELETE FROM cells WHERE kind = ? AND key = ?"
# Cells of one kind, in a table of their own: streamed answers are many and large.
CHUNK, PUT_CHUNK, DROP_CHUNK = (text.replace("cells", "chunks") for text in (CELL, PUT_CELL, DROP_CELL))
CELLS = "SELECT key, value FROM cells WHERE kind = ? AND key > ? ORDER BY key LIMIT ?"
CHUNKS = CELLS.replace("cells", "chunks")
