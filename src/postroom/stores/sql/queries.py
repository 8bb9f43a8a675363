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
NEW = (
    f"INSERT INTO records ({RECORD_COLUMNS}, type, parent_message_id, key, delay_ns, ttl_ns, "
    "first_priority, payload, room)"
)
INSERT = (
    f"{NEW.removesuffix(')')}, sender) VALUES ({', '.join('?' * 28)}, zeroblob({ROOM_BYTES}), ?) "
    "ON CONFLICT DO NOTHING"
)
# Without a name, a key and a sender. What every new record has is no parameter: each one costs time.
NEW_VALUES = (
    "{seq}, NULL, ?2, ?3, ?4, {seq}, 0, 0, ?5, 0, '', 0, ?6, ifnull(?7, {seq}), ?8, ?9, ?10, ?11, 0, 0, 0, "
    f"?12, ?13, '', ?14, ?15, ?4, {{payload}}, zeroblob({ROOM_BYTES})"
)
INSERT_PLAIN = f"{NEW} VALUES ({NEW_VALUES.format(seq='?1', payload='?16')})"
# Many that differ in number and payload alone, in one statement: a third of the time of one for each. The
# array counts its rows from 1.
INSERT_ALIKE = (
    f"{NEW} SELECT {NEW_VALUES.format(seq='?1 + ?17 * (rowid - 1)', payload='value')} FROM carray(?16)"
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
REST = "type, parent_message_id, key, delay_ns, ttl_ns, first_priority, payload, result, trail, sender"
STORED = f"SELECT {REST} FROM records WHERE seq = ?"
HEAD = "SELECT ready_at FROM records WHERE queue = ? AND lane = ? ORDER BY turn LIMIT 1"
TOLD_TO = "SELECT coalesce(max(seq), 0) FROM events"
# A record behind the newest row of events has two events that stand in no row.
NEWEST_EVENT = (
    "SELECT iif(newest > told, newest + 1, told) FROM (SELECT coalesce((SELECT max(seq) FROM events), 0) "
    "AS told, coalesce((SELECT max(seq) FROM records), 0) AS newest)"
)
UNTOLD = (
    "SELECT seq, queue, first_priority, type, parent_message_id, created_us, length(payload) FROM records "
    "WHERE seq > ? AND seq < ? ORDER BY seq"
)
UNTOLD_COUNTS = "SELECT queue, count(*), max(seq) FROM records WHERE seq > ? GROUP BY queue"
BATCHES = "SELECT batch FROM events WHERE seq > ? ORDER BY seq"
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
SENDER = "SELECT sender FROM records WHERE seq = ?"
PAYLOADS = "SELECT seq, payload FROM records WHERE seq > ? AND seq <= ?"
COUNTED = "SELECT value FROM facts WHERE name = 'counted'"
HEADS = (
    "SELECT seq, expires, message_id, attempt, ready_at, durability, payload, type, parent_message_id, "
    f"(SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_DELAYED}), "
    f"(SELECT min(turn) FROM records WHERE queue = ?1 AND lane = {LANE_LEASED}) "
    "FROM records WHERE queue = ?1 AND lane = ?2 ORDER BY turn LIMIT ?3"
)
LEASE = (
    "UPDATE records SET state = 'PROCESSING', attempt = attempt + 1, lease = {lease}, worker_id = ?2, "
    f"lease_ns = ?3, lane = {LANE_LEASED}, turn = ?4, claimed_us = ?5, heartbeat_us = ?5, room = NULL "
    "{which}"
)
LEASE_ONE = LEASE.format(lease="?1", which="WHERE seq = ?6")
LEASE_MANY = LEASE.format(
    lease="?1 + given.rowid - 1", which="FROM carray(?6) AS given WHERE seq = given.value"
)
# Records that were accepted together: every second number, as each had two events. Searched as a range, they
# are changed on the way; those of an array are gathered first, which takes longer.
IN_A_ROW = "WHERE seq BETWEEN {first} AND {last} AND (seq - {first}) % 2 = 0"
LEASE_ROW = LEASE.format(lease="?1 + (seq - ?6) / 2", which=IN_A_ROW.format(first="?6", last="?7"))
LEASED = (
    "SELECT seq, lease, queue, priority, attempt, worker_id, "
    "turn - lease_ns - 1000 * max(0, heartbeat_us - claimed_us), durability, turn FROM {which} "
    f"AND lane = {LANE_LEASED} AND message_id IS NULL"
)
LEASED_ONE = LEASED.format(which="records WHERE seq = ?")
LEASED_ROW = LEASED.format(which=f"records {IN_A_ROW.format(first='?1', last='?2')}")
LEASED_MANY = LEASED.format(which="carray(?) CROSS JOIN records WHERE seq = value")  # in the array's order
COMPLETE = (
    "UPDATE records SET state = 'COMPLETED', place = {place}, lane = NULL, result = ?2, ended_us = ?3 {which}"
)
COMPLETE_ONE = COMPLETE.format(place="?1", which="WHERE seq = ?4")
COMPLETE_ROW = COMPLETE.format(place="?1 + (seq - ?4) / 2", which=IN_A_ROW.format(first="?4", last="?5"))
COMPLETE_ALIKE = COMPLETE.format(
    place="?1 + given.rowid - 1", which="FROM carray(?4) AS given WHERE seq = given.value"
)
SET_FACT = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"

Reading = apsw.Connection | apsw.Cursor
"""What can be asked. A cursor that is there already answers faster."""


record_from: Callable[..., Record] = Record  # a row has its columns in the order of the fields


def ask(connection: Reading, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return connection.execute(query, values).fetchall()
