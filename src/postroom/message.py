"""The data types: the messages of each contract, and the records and events of a store.

Rule 1: every object here is immutable. A changed record is a new object.
Rule 2: a message does not contain delivery state. Positions, leases and attempts are in cursors and records.
"""

from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

Durability = Literal["os", "group", "fsync"]
"""When a write is acknowledged: in the page cache, after a shared fsync, or after its own fsync."""


DEFAULT_BODY_THRESHOLD = 3584  # a queue line with its other keys stays below one 4096-byte page


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
    """Header keys unknown to this version. conductor-loop writes some."""


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
"""One message of a `Queue`. A delivered message always has the first eight keys. `body_bytes` and `body_crc`
are only on disk, for a body in a side file. Keys with an underscore are only in delivered messages."""


class Damage(msgspec.Struct, frozen=True, gc=False):
    """A range of bytes in a log that is not a message. Readers skip it, and it stays in the file."""

    offset: int
    length: int
    reason: str


ENGINE_PREFIX = "org:"
"""The queue of an organization is named by this prefix and its id. No agent has such a name."""


def queue_of(org_id: str) -> str:
    """The queue of an organization; empty for all of them."""
    return ENGINE_PREFIX + org_id if org_id else ""


def org_of(queue: str) -> str:
    """The organization that a queue belongs to; empty for the queue of an agent."""
    return queue.removeprefix(ENGINE_PREFIX) if queue.startswith(ENGINE_PREFIX) else ""


# ---- records and events of a store -----------------------------------------------------------------

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
"""The states of a record. `FAILED` is transient: it leads to another state and is never stored."""

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
    "tokens_refused",
    "tokens_borrowed",
    "tokens_rebalanced",
    "agent_health",
    "receipt",
    "bounced",
    "alert",
    "alert_sent",
]
"""The kinds of events, for every contract."""


class Envelope(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message as it is passed to a store."""

    queue: str
    payload: bytes
    message_id: str = ""
    """Empty: the store chooses an id."""
    type: str = ""
    parent_message_id: str = ""
    key: str = ""
    """The idempotency key, unique within its queue. A second message with it is dropped. Empty: none."""
    priority: int = 2
    max_retries: int = 3
    delay_ns: int = 0
    ttl_ns: int = 0
    """How long the message may wait for its first delivery; 0 for no limit."""
    durability: Durability = "os"
    sender: str = ""
    """The agent that sent it; empty when an operator or the library did."""
    facts: dict[str, Any] = {}
    """What the first event says about the message, for the audit stream. It is not stored with the record."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """The delivery state of one message in a store.

    `lease_until`, `due`, `ready_at` and `expires` are nanoseconds of the store's own clock, which never
    steps. Fields that end in `_us` are microseconds of UTC, for people.
    """

    seq: int
    """Unique, never reused, and increasing in the order of acceptance."""
    message_id: str
    queue: str
    state: State
    priority: int
    """The priority at acceptance. It never changes."""
    lane: int
    """The lane in which it waits: its priority, unless a retry demoted it or a replay chose another lane."""
    place: int
    """The position in the lane: the lowest is delivered first. It is the number of the event that put the
    record there; of a completed record, it is the number of the completion event."""
    attempt: int
    """The number of deliveries."""
    retries: int
    """Failures and lapsed leases since it was accepted or replayed."""
    crashes: int
    """Whether it runs alone, and how often its own process died, as in `core.lifecycle.poison`."""
    max_retries: int
    lease: int
    """The fencing token, larger than every earlier one. It stays after the lease holder's last call, so that
    this call can be repeated. It is negative after a release, and 0 when something else ended the lease."""
    worker_id: str
    lease_ns: int
    lease_until: int
    due: int
    """The end of its delay; 0 without a delay."""
    ready_at: int
    """The time from which it can be claimed, or at which its delay began."""
    expires: int
    durability: Durability
    created_us: int
    claimed_us: int
    heartbeat_us: int
    ended_us: int
    """The time of its end; 0 before that."""
    sender: str = ""
    """As in `Envelope`."""


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One thing that happened to one message. `seq` has no gaps within a store."""

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


class Noted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event that changes no record, before it has a number."""

    kind: EventKind
    queue: str = ""
    message_id: str = ""
    state: State = "DONE"
    attempt: int = 0
    priority: int = 2
    lease: int = 0
    detail: dict[str, Any] = {}

    def event(self, seq: int, ts_us: int) -> Event:
        """The event with its number and time."""
        return Event(
            seq, ts_us, self.kind, self.queue, self.message_id, self.state, self.attempt, self.priority,
            self.lease, detail=self.detail,
        )  # fmt: skip


class Step(msgspec.Struct, frozen=True, gc=False):
    """A decision as data: the record after it, and its events. A store commits both or neither."""

    record: Record
    events: tuple[Event, ...]
    result: bytes | None = None


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The facts of a decision that are not in the record."""

    number: int
    """The sequence number of its first event."""
    steady_ns: int
    """The store's own clock, which never steps."""
    wall_us: int
    """UTC, for people."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What a person is told of: events of level alert with one name, of one organization. Times are UTC."""

    name: str
    org_id: str = ""
    place: str = ""
    """The server whose condition it is; empty for an event of the store."""
    text: str
    first_us: int
    last_us: int
    count: int = 1
    """How often it was raised since it began."""
    resolved_us: int = 0
    """When it was over; 0 while it goes on."""
    told_us: int = 0
    """When the newest notice was made."""
    notice: int = 1
    """The number of the newest notice."""
    sent: dict[str, int] = {}
    """The number of the notice that each sink accepted last."""
    tries: int = 0
    next_us: int = 0
    """When the newest notice is sent again."""
    error: str = ""
    """Why a sink did not accept it."""


class Stored(msgspec.Struct, frozen=True):
    """Everything that a store has about one message."""

    record: Record
    envelope: Envelope
    result: bytes | None
    history: list[Event]
    """Its events without starts of handlers and heartbeats."""
