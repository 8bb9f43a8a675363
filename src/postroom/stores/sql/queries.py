"""What is asked of a store file, and what is said to it. Every query by its name."""

from collections.abc import Callable
from typing import Any

import apsw

from postroom.message import Record

TRAIL_CHARS_MAX = 256 * 1024  # of one record; what comes later is only in the stream
FOR_EVER = 2**63 - 1
ROOM_BYTES = 96  # what a claim and a short result add to a row
USUAL_PRIORITY = 2  # events leave it out, as `Event` does
NUMBER_DIGITS_MAX = 18
LANE_DELAYED = 8
LANE_LEASED = 9

RECORD_COLUMNS = (
    "seq, message_id, queue, state, priority, place, attempt, retries, max_retries, lease, worker_id, "
    "lease_ns, lane, turn, ready_at, expires, durability, created_us, claimed_us, heartbeat_us, ended_us"
)
RECORD = f"SELECT {RECORD_COLUMNS} FROM records"
BY_NAME = f"{RECORD} WHERE message_id = ?"
BY_SEQ = f"{RECORD} WHERE seq = ? AND message_id IS NULL"
BY_SEQS = f"{RECORD} WHERE seq IN (SELECT value FROM json_each(?)) AND message_id IS NULL"
READY = (
    f"SELECT {RECORD_COLUMNS}, payload, type, parent_message_id FROM records "
    "WHERE queue = ? AND lane = ? ORDER BY turn LIMIT ?"
)
DUE = f"{RECORD} WHERE queue = ? AND lane = ? AND turn <= ? ORDER BY turn LIMIT ?"
EXPIRED = f"{RECORD} WHERE expires > 0 AND lane < 9 AND expires <= ? ORDER BY expires LIMIT ?"
INSERT = (
    f"INSERT INTO records ({RECORD_COLUMNS}, type, parent_message_id, key, delay_ns, ttl_ns, "
    f"first_priority, payload, room) VALUES ({', '.join('?' * 28)}, zeroblob({ROOM_BYTES})) "
    "ON CONFLICT DO NOTHING"
)
UPDATE = (
    "UPDATE records SET state = ?, priority = ?, place = ?, attempt = ?, retries = ?, lease = ?, "
    "worker_id = ?, lease_ns = ?, lane = ?, turn = ?, ready_at = ?, expires = ?, claimed_us = ?, "
    "heartbeat_us = ?, ended_us = ?"
)
UPDATE_PLAIN = f"{UPDATE} WHERE seq = ?"
UPDATE_RESULT = f"{UPDATE}, result = ? WHERE seq = ?"
UPDATE_TRAIL = (
    f"{UPDATE}, trail = CASE WHEN length(trail) > {TRAIL_CHARS_MAX} THEN trail "
    "ELSE coalesce(trail, '') || ? END WHERE seq = ?"
)
REST = "type, parent_message_id, key, delay_ns, ttl_ns, first_priority, payload, result, trail"
STORED = f"SELECT {REST} FROM records WHERE seq = ?"
HEAD = "SELECT ready_at FROM records WHERE queue = ? AND lane = ? ORDER BY turn LIMIT 1"
NEWEST_EVENT = "SELECT coalesce(max(seq), 0) FROM events"
NEW_EVENTS = "SELECT seq, counts FROM events WHERE seq > ? ORDER BY seq"
QUEUE = "SELECT queue, max_depth, max_payload_bytes, durability FROM queues WHERE name = ?"
NEXT_WORK = (
    "SELECT EXISTS (SELECT 1 FROM records WHERE queue = ?1 AND lane < 8), "
    f"(SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_DELAYED}), "
    f"(SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_LEASED})"
)
FIRST_PAST = (
    f"SELECT (SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_DELAYED}), "
    f"(SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_LEASED})"
)
COUNTED = "SELECT value FROM facts WHERE name = 'counted'"
HEADS = (
    "SELECT seq, expires, message_id, attempt, ready_at, durability, payload, type, parent_message_id "
    "FROM records WHERE queue = ? AND lane = ? ORDER BY turn LIMIT ?"
)
LEASE = (
    "UPDATE records SET state = 'PROCESSING', attempt = ?, lease = ?, worker_id = ?, lease_ns = ?, lane = ?, "
    "turn = ?, claimed_us = ?, heartbeat_us = ?, room = NULL WHERE seq = ?"
)
LEASED = (
    "SELECT seq, lease, queue, priority, attempt, worker_id, "
    "turn - lease_ns - 1000 * max(0, heartbeat_us - claimed_us), durability, turn FROM records "
    f"WHERE {{}} AND lane = {LANE_LEASED} AND message_id IS NULL"
)
LEASED_ONE = LEASED.format("seq = ?")
LEASED_MANY = LEASED.format("seq IN (SELECT value FROM json_each(?))")
COMPLETE = (
    "UPDATE records SET state = 'COMPLETED', place = ?, lane = NULL, result = ?, ended_us = ? WHERE seq = ?"
)
SET_FACT = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"

Reading = apsw.Connection | apsw.Cursor
"""What can be asked. A cursor that is there already answers faster."""


record_from: Callable[..., Record] = Record  # a row has its columns in the order of the fields


def ask(connection: Reading, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return connection.execute(query, values).fetchall()
