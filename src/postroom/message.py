"""The nouns: what a message of each contract is, and what a store knows about its delivery.

Rule 1: nothing here changes after it was made; a changed record is a new one.
Rule 2: a message says nothing about its delivery; positions and leases live elsewhere.
"""

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

Durability = Literal["os", "group", "fsync"]
"""When an append counts as stored: in the page cache, after a shared fsync, after its own fsync."""


DEFAULT_BODY_THRESHOLD = 3584  # a queue's line with its other keys stays below one 4096-byte page


class BusMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a `Bus`."""

    msg_id: str
    ts: datetime
    type: str
    project_id: str
    task_id: str
    run_id: str
    parents: list[str]
    attachment_path: str
    body: str
    extra: dict[str, Any] = {}
    """Header keys that this version does not know; the original program writes some."""


QueueMessage = TypedDict(
    "QueueMessage",
    {
        "msg_id": str,
        "ts": str,
        "from": str,
        "to": NotRequired[str | None],
        "topic": str,
        "body": str,
        "in_reply_to": NotRequired[str | None],
        "ttl_s": NotRequired[float | int | None],
        "body_bytes": NotRequired[int],
        "body_crc": NotRequired[str],
        "_body_source": NotRequired[str],
        "_body_error": NotRequired[str],
    },
)
"""One message of a `Queue`. Delivered, it always has the first eight keys; `body_bytes` and `body_crc` stand
only on disk, beside the name of a side file, and those with an underscore only in what is delivered."""


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a log that is not a message. It is skipped and kept."""

    offset: int
    length: int
    reason: str


ENGINE_PREFIX = "org:"
"""The queue of an organization is named by its id behind this prefix. No agent has such a name."""


def org_of(queue: str) -> str:
    """The organization that a queue belongs to; empty for the queue of an agent."""
    return queue.removeprefix(ENGINE_PREFIX) if queue.startswith(ENGINE_PREFIX) else ""


# ---- the leased half -------------------------------------------------------------------------------

State = Literal[
    "SCHEDULED",
    "QUEUED",
    "PROCESSING",
    "FAILED",
    "RETRYING",
    "COMPLETED",
    "EXECUTING",
    "DONE",
    "DEAD_LETTER",
    "CANCELLED",
    "EXPIRED",
    "QUARANTINED",
]
"""Where a record can be. `FAILED` is a moment on the way to `RETRYING` or `DEAD_LETTER`, never at rest."""

EventKind = Literal[
    "created",
    "enqueued",
    "promoted",
    "dequeued",
    "conflict_detected",
    "conflict_resolved",
    "conflict_resolution_failed",
    "execution_started",
    "execution_completed",
    "execution_failed",
    "retry_scheduled",
    "deferred",
    "dead_letter",
    "heartbeat",
    "lease_lapsed",
    "released",
    "cancelled",
    "expired",
    "quarantined",
    "replayed",
    "duplicate",
    "rejected",
    "delivered",
    "deleted",
    "breaker_opened",
    "breaker_closed",
    "tokens_reserved",
    "tokens_returned",
    "alert",
]
"""Everything that can happen to a message, in any contract."""


class Envelope(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message as it is handed to a store. It never changes."""

    queue: str
    payload: bytes
    message_id: str = ""
    """Empty when the store shall name it."""
    type: str = ""
    parent_message_id: str = ""
    key: str = ""
    """What makes a second enqueue the same one; unique within its queue, empty for none."""
    priority: int = 2
    max_retries: int = 3
    delay_ns: int = 0
    ttl_ns: int = 0
    """How long it may wait for its first delivery; 0 for ever."""
    durability: Durability = "os"
    sender: str = ""
    """The agent that sent it; empty when an operator or the library did."""
    facts: dict[str, Any] = {}
    """What the first event says about the message, for the audit stream. It is not stored with the record."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """The delivery state of one message in a store: the only thing that changes.

    Deadlines (`lease_until`, `due`, `ready_at`, `expires`) are nanoseconds of the store's own clock, which
    never steps; the others are microseconds of UTC, for people.
    """

    seq: int
    """Unique and increasing with acceptance, never used again."""
    message_id: str
    queue: str
    state: State
    priority: int
    """The priority it was accepted with. Nothing changes it."""
    lane: int
    """The lane it waits in: its priority, unless a retry demoted it or a replay chose another one."""
    place: int
    """Its position in the lane: the lowest is delivered first. It is the number of the event that put the
    record there, and the number of the completion event once it is completed."""
    attempt: int
    """Deliveries so far."""
    retries: int
    """Failures and lapsed leases since it was accepted or replayed."""
    crashes: int
    """Lapsed leases since it was accepted or replayed: the holder crashed, or hung."""
    max_retries: int
    lease: int
    """The fencing token, larger than every earlier one. It stays after the holder's last call, so that the
    call can be repeated; it is negative when that call was a release, and 0 when the lease was taken away."""
    worker_id: str
    lease_ns: int
    lease_until: int
    due: int
    """When its delay ends; 0 without a delay."""
    ready_at: int
    """Since when it can be claimed, or since when its delay runs."""
    expires: int
    durability: Durability
    created_us: int
    claimed_us: int
    heartbeat_us: int
    ended_us: int
    """When it ended; 0 before that."""
    sender: str = ""
    """The agent that sent it; empty when an operator or the library did."""


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What happened to one message, once. `seq` is gap-free within a store."""

    seq: int
    ts_us: int
    kind: EventKind
    queue: str
    message_id: str
    state: State
    attempt: int = 0
    priority: int = 2
    lease: int = 0
    worker_id: str = ""
    duration_us: int = 0
    error_type: str = ""
    error: str = ""
    type: str = ""
    parent_message_id: str = ""
    body_bytes: int = 0
    detail: dict[str, Any] = {}
    prior: State | None = None
    """The previous state, for kinds that can follow several states: an end, a replay, a deferral."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """A decision, as data: the record after it, and what happened. A store commits both or neither."""

    record: Record
    events: tuple[Event, ...]
    result: bytes | None = None


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The facts of a decision that the record does not know."""

    number: int
    """The sequence number that its first event gets."""
    steady_ns: int
    """The store's own clock, which never steps."""
    wall_us: int
    """UTC, for people."""


class Stored(msgspec.Struct, frozen=True):
    """Everything that a store knows about one message."""

    record: Record
    envelope: Envelope
    result: bytes | None
    history: list[Event]
    """Its events, heartbeats left out."""
