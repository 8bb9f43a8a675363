"""Records and text as rows of PostgreSQL."""

from typing import Any

from postroom.message import Envelope, Record

RECORD_COLUMNS = (
    "seq, name, queue, state, priority, lane, place, attempt, retries, crashes, max_retries, lease, "
    "worker_id, lease_ns, lease_until, due, ready_at, expires, durability, created_us, claimed_us, "
    "heartbeat_us, ended_us, sender"
)
TRAIL_BYTES_MAX = 256 * 1024  # of one record; later events are only in the audit stream
ESCAPE = "\x1a"


def to_sql(text: str) -> str:
    """Text in a form that PostgreSQL can store: NUL is escaped."""
    if "\0" in text or ESCAPE in text:
        return text.replace(ESCAPE, f"{ESCAPE}1").replace("\0", f"{ESCAPE}0")
    return text


def from_sql(text: str) -> str:
    """The inverse of `to_sql`."""
    if ESCAPE in text:
        return text.replace(f"{ESCAPE}0", "\0").replace(f"{ESCAPE}1", ESCAPE)
    return text


def new_row(r: Record, e: Envelope, payload: bytes) -> tuple[Any, ...]:
    """The values of `insert`, with the stored form of the payload."""
    return (
        r.seq, to_sql(e.message_id) if e.message_id else None, to_sql(r.queue), r.state, r.priority, r.lane,
        r.place, r.attempt, r.retries, r.crashes, r.max_retries, r.lease, r.worker_id, r.lease_ns,
        r.lease_until, r.due, r.ready_at, r.expires, r.durability, r.created_us, r.claimed_us,
        r.heartbeat_us, r.ended_us,
        to_sql(r.sender), to_sql(e.type), to_sql(e.parent_message_id), to_sql(e.key), e.delay_ns, e.ttl_ns,
        payload,
    )  # fmt: skip


def changed_row(r: Record, result: bytes | None, trail: bytes | None) -> tuple[Any, ...]:
    """The values of `update`."""
    return (
        r.state, r.lane, r.place, r.attempt, r.retries, r.crashes, r.lease, to_sql(r.worker_id), r.lease_ns,
        r.lease_until, r.due, r.ready_at, r.expires, r.claimed_us, r.heartbeat_us, r.ended_us, result, trail,
        trail, r.seq,
    )  # fmt: skip
