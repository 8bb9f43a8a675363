"""The event of the audit stream: one closed schema for the events of every contract.

Rule 1: `seq` has no gap within a `source`, and `event_id` consists of both, so reading a log again gives the
        same ids.
Rule 2: a line omits fields that have their default value. The first seven fields are always present.
Rule 3: fields may be added with a default, but never removed, renamed or given another meaning. A change that
        breaks this needs a new `schema`.
"""

from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import msgspec

from postroom.core.formats.jsoninput import TOO_DEEP, guarded, is_deep
from postroom.message import Event, EventKind, State, org_of

SCHEMA = 1
TS_US_MAX: Final = (1 << 53) - 1  # the year 2255; a larger JSON number is not exact in every reader

Contract: TypeAlias = Literal["bus", "queue", "mail", "tasks", "engine", "audit"]
"""The contract that emits an event; "audit" is the stream itself."""


OPERATIONS: dict[Contract, dict[str, tuple[EventKind, ...]]] = {
    "bus": {
        "append, append_many": ("created",),
    },
    "queue": {
        "send, ask": ("created",),
        "poll": ("delivered",),
        "expire": ("expired",),
        "a poll or an expire that finds nothing": ("heartbeat",),
        "an unreadable line of the audit log": ("alert",),
    },
    "mail": {
        "create": ("created",),
        "create of an existing mailbox": ("duplicate",),
        "send": ("created",),
        "a push or a fetch, with receipts": ("delivered",),
        "delete": ("deleted",),
        "the end of a time to live": ("expired",),
        "a call that is refused": ("rejected",),
        "too many deliveries": ("dead_letter", "created"),
        "damage in the log": ("quarantined",),
        "a log or a file of events that cannot be written": ("alert",),
    },
    "tasks": {
        "enqueue": ("created", "enqueued"),
        "enqueue of a known id or key": ("duplicate",),
        "claim": ("dequeued",),
        "heartbeat": ("heartbeat",),
        "complete": ("execution_completed",),
        "fail": ("execution_failed", "retry_scheduled", "enqueued", "dead_letter"),
        "release": ("released",),
        "claim, sweep: a delay is over": ("enqueued",),
        "claim, sweep: a lease ran out": ("lease_lapsed", "enqueued", "dead_letter"),
        "cancel": ("cancelled",),
        "retry": ("replayed", "enqueued"),
        "open_decision": ("execution_started", "created", "enqueued"),
        "settle": ("execution_completed", "delivered"),
        "purge": ("deleted",),
        "enqueue while the stream is too far behind": ("alert",),
        "a call over HTTP or MCP that is refused": ("rejected",),
        "the removal of a bus of the server": ("deleted",),
    },
    "engine": {
        "submit": ("created", "enqueued"),
        "submit of a known key": ("duplicate",),
        "submit that backpressure or a guard refuses": ("rejected",),
        "claim of a paused type, an open breaker, a key that is held": ("deferred",),
        "promotion by age": ("promoted",),
        "claim": ("dequeued",),
        "a conflict with another operation": (
            "conflict_detected",
            "conflict_resolved",
            "conflict_resolution_failed",
        ),
        "start": ("execution_started",),
        "heartbeat": ("heartbeat",),
        "complete": ("execution_completed",),
        "fail": ("execution_failed", "retry_scheduled", "dead_letter"),
        "release": ("released",),
        "a delay is over": ("enqueued",),
        "pause, resume, a stage of backpressure": ("alert",),
        "a lease ran out": ("lease_lapsed", "enqueued"),
        "cancel": ("cancelled",),
        "the end of a time to live": ("expired",),
        "too many crashes": ("quarantined", "alert"),
        "replay": ("replayed", "enqueued"),
        "a breaker": ("breaker_opened", "breaker_closed"),
        "claim of a message with tokens": ("tokens_reserved", "tokens_borrowed", "tokens_refused"),
        "the end of its lease": ("tokens_returned",),
        "the beginning of a window of a model": ("tokens_rebalanced",),
        "a response that its agent has": ("delivered",),
        "an agent registers, is heard of, is late, is dead or leaves": ("agent_health",),
        "a message between agents": ("receipt",),
        "a message or a response that nobody fetches": ("bounced",),
        "a notice of an alert that a person got": ("alert_sent",),
        "retention": ("deleted",),
    },
    "audit": {},
}
"""The kinds of events that each contract's operations emit."""


class AuditEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One thing that happened, in any contract."""

    event_id: str
    seq: int
    ts_us: int
    """Microseconds of UTC, for display and time ranges. The order within a source is given by `seq`."""
    kind: EventKind
    contract: Contract
    source: str
    schema: int
    queue: str = ""
    org_id: str = ""
    user_id: str = ""
    agent_id: str = ""
    message_id: str = ""
    goal_id: str = ""
    task_id: str = ""
    parent_message_id: str = ""
    type: str = ""
    priority: int | None = None
    state: State | None = None
    attempt: int = 0
    worker_id: str = ""
    trace_id: str = ""
    span_id: str = ""
    duration_us: int = 0
    error_type: str = ""
    error: str = ""
    model: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: Decimal | None = None
    """An exact amount: written as a JSON number and never converted to a float."""
    body_bytes: int = 0
    payload: str = ""
    """The body or the result as redacted text, or encrypted when it begins with `enc:`."""
    sender: str = ""
    recipient: str = ""
    service: str = ""
    lease: int = 0
    prior: State | None = None
    """The state before the event, for kinds that can follow several states: ends and replays."""
    detail: dict[str, Any] = {}
    """Further facts, depending on the kind of event."""


_encoder = msgspec.json.Encoder(decimal_format="number")
_decoder = msgspec.json.Decoder(AuditEvent)
encode_lines = _encoder.encode_lines
"""Encodes many lines of a segment at once, in half the time."""


from_line = guarded(_decoder.decode, lambda event: event.detail)
"""The event in a line; `msgspec.DecodeError` for any other line."""
_FLAT = frozenset((str, int, float, bool, type(None)))
_decode_lines = guarded(_decoder.decode_lines)


def decode_lines(block: bytes) -> list[AuditEvent]:
    """The events of complete lines; `msgspec.DecodeError` when one of them cannot be decoded."""
    events = _decode_lines(block)
    for event in events:
        detail = event.detail
        if detail and not _FLAT.issuperset(map(type, detail.values())) and is_deep(detail):
            raise msgspec.DecodeError(TOO_DEEP)
    return events


def event_id(source: str, seq: int) -> str:
    """The id of an event: the same for every reader of the source."""
    return f"{source}#{seq}"


def to_line(event: AuditEvent) -> bytes:
    """One line of a segment, including its newline."""
    return _encoder.encode(event) + b"\n"


COST_DECIMALS: Final = 9
COST_USD_BELOW: Final = 10**9
"""The pipeline refuses lines whose cost has more digits. A sum of floats has more: 0.1 + 0.2."""

_LIFTED: Final = frozenset(
    (
        "goal_id", "task_id", "user_id", "agent_id", "trace_id", "span_id", "sender", "recipient",
        "service", "model", "tokens_in", "tokens_out", "cost_usd",
    )
)  # fmt: skip
"""Facts in the detail of an engine's event that have a field of their own in the stream."""


def _cost(reported: Any) -> Decimal | None:
    """The cost that a handler reported; None for a value that is not an amount, such as NaN."""
    if not isinstance(reported, int | float) or not abs(reported) < COST_USD_BELOW:
        return None
    return round(Decimal(str(reported)), COST_DECIMALS)


def of_store(event: Event, source: str, contract: Contract, payload: str = "") -> AuditEvent:
    """An event of a store, in the stream.

    The queue of an agent belongs to `contract`. Organizations, breakers and budgets belong to the engine.
    """
    org_id = org_of(event.queue)
    detail = event.detail
    if org_id or event.kind in ("breaker_opened", "breaker_closed", "tokens_rebalanced"):
        contract = "engine"
        names = {name: value for name, value in detail.items() if name in _LIFTED}
        if "cost_usd" in names:
            names["cost_usd"] = _cost(names["cost_usd"])
        detail = {name: value for name, value in detail.items() if name not in _LIFTED}
    else:
        names = {"agent_id": event.queue, "task_id": event.message_id}
    return AuditEvent(
        event_id=event_id(source, event.seq),
        seq=event.seq,
        ts_us=event.ts_us,
        kind=event.kind,
        contract=contract,
        source=source,
        schema=SCHEMA,
        queue=event.queue,
        org_id=org_id,
        message_id=event.message_id,
        parent_message_id=event.parent_message_id,
        type=event.type,
        priority=event.priority if event.message_id else None,
        state=event.state if event.message_id else None,
        attempt=event.attempt,
        worker_id=event.worker_id,
        duration_us=event.duration_us,
        error_type=event.error_type,
        error=event.error,
        body_bytes=event.body_bytes,
        payload=payload,
        lease=event.lease,
        detail=detail,
        prior=event.prior,
        **names,
    )
