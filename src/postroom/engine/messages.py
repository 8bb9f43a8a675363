"""Messages of an engine: what is stored, and what a handler gets.

Rule 1: the record holds the state of delivery; the body holds the rest. No fact is stored twice.
"""

import hashlib
import os
from collections import deque
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from postroom.calls.submit import AttemptError, CreatedBy, ResourceLimits
from postroom.core.goals.conflicts import Operation
from postroom.core.lifecycle import versions
from postroom.core.times import EPOCH, MICROSECOND, utc_text
from postroom.errors import UnknownTask, failure_of, shown
from postroom.message import ENGINE_PREFIX, Record, Stored

NO_PAYLOAD: Final = msgspec.Raw(b"null")
ID_BYTES: Final = 16
IDS_A_READ: Final = 64  # ids whose random bytes are read at a time


class Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is stored of a message besides its record."""

    payload: msgspec.Raw = NO_PAYLOAD
    payload_ref: str = ""
    """The digest of a payload that is stored apart."""
    version: str = versions.CURRENT_VERSION
    goal_id: str
    task_id: str
    created_by: CreatedBy
    user_id: str = ""
    agent_id: str = ""
    expires_us: int = 0
    context: dict[str, Any] = {}
    context_ref: str = ""
    """The digest of a context that is too large for the record; empty for one that is in it."""
    metadata: dict[str, Any] = {}
    resource_limits: ResourceLimits | None = None
    token_needs: dict[str, Any] = {}
    model_preferences: list[str] = []
    tokens: int = 0
    """Tokens that are reserved when it is claimed."""
    models: list[str] = []
    """The models that it may use, the preferred one first; empty for any."""
    service: str = ""
    idempotency_key: str = ""
    ordering_key: str = ""
    on_dead: str = "continue"
    traceparent: str = ""
    tracestate: str = ""
    hop: int = 0
    """How long the chain of parents is: 0 for a message that no handler submitted."""
    in_goal: bool = False
    """Whether the sender named the goal, which may have been started."""
    operation: Operation | None = None
    """What the message works on while its handler runs."""
    ignores_guard: bool = False
    """Whether it runs although its goal has used up its budget: it undoes an effect of the goal."""
    extra: dict[str, Any] = {}
    """Fields of a newer minor version."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as its handler gets it."""

    message_id: str
    type: str
    payload: Any
    org_id: str
    goal_id: str
    task_id: str
    created_by: CreatedBy
    priority: int
    accepted_priority: int
    created_at: datetime
    expires_at: datetime | None
    retry_count: int
    max_retries: int
    version: str
    parent_message_id: str = ""
    user_id: str = ""
    agent_id: str = ""
    context: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    resource_limits: ResourceLimits | None = None
    token_needs: dict[str, Any] = {}
    model_preferences: list[str] = []
    tokens: int = 0
    models: list[str] = []
    service: str = ""
    idempotency_key: str = ""
    ordering_key: str = ""
    on_dead: str = "continue"
    traceparent: str = ""
    tracestate: str = ""
    hop: int = 0
    operation: Operation | None = None
    extra: dict[str, Any] = {}


def unknown_message(message_id: object) -> UnknownTask:
    """The error for an id that no message has, or none that the caller may see."""
    return UnknownTask(message_id, f"there is no message {shown(message_id)}")  # type: ignore[arg-type]


def checked_message_id(message_id: object) -> str:
    """The id of a message. Raises `UnknownTask` for text that is not ASCII, because every id is."""
    if not isinstance(message_id, str) or not message_id.isascii():
        raise unknown_message(message_id)
    return message_id


_random: deque[bytes] = deque()
os.register_at_fork(after_in_child=_random.clear)


def _random_bytes() -> bytes:
    """Bytes of one id. They are read for many ids at a time: a read lets another thread run first."""
    with suppress(IndexError):  # none is left
        return _random.popleft()
    read = os.urandom(ID_BYTES * IDS_A_READ)
    pieces = [read[start : start + ID_BYTES] for start in range(0, len(read), ID_BYTES)]
    _random.extend(pieces[1:])
    return pieces[0]


def new_id() -> str:
    """A random UUID, for goals and tasks that the caller does not name."""
    digits = _random_bytes().hex()  # `uuid.uuid4` takes four times as long
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def digest_of(type_name: str, payload: bytes) -> str:
    """Tells a repeated submit from another message."""
    return hashlib.blake2b(type_name.encode() + b"\0" + payload, digest_size=16).hexdigest()


encode_body = msgspec.json.Encoder().encode
decode_body = msgspec.json.Decoder(Body).decode


def body_of(raw: bytes) -> Body | None:
    """The body in the bytes of a stored message; None when they cannot be decoded."""
    try:
        return decode_body(raw)
    except msgspec.DecodeError:
        return None


def message_of(
    record: Record, type_name: str, parent: str, body: Body, payload: Any, context: Any = None
) -> Message:
    """A stored message as its handler gets it. `context` is the one that is stored apart."""
    return Message(
        message_id=record.message_id,
        type=type_name,
        payload=payload,
        org_id=record.queue[len(ENGINE_PREFIX) :],
        goal_id=body.goal_id,
        task_id=body.task_id,
        created_by=body.created_by,
        priority=record.lane,
        accepted_priority=record.priority,
        created_at=EPOCH + record.created_us * MICROSECOND,
        expires_at=EPOCH + body.expires_us * MICROSECOND if body.expires_us else None,
        retry_count=record.retries,
        max_retries=record.max_retries,
        version=body.version,
        parent_message_id=parent,
        user_id=body.user_id,
        agent_id=body.agent_id,
        context=body.context if context is None else context,
        metadata=body.metadata,
        resource_limits=body.resource_limits,
        token_needs=body.token_needs,
        model_preferences=body.model_preferences,
        tokens=body.tokens,
        models=body.models,
        service=body.service,
        idempotency_key=body.idempotency_key,
        ordering_key=body.ordering_key,
        on_dead=body.on_dead,
        traceparent=body.traceparent,
        tracestate=body.tracestate,
        hop=body.hop,
        operation=body.operation,
        extra=body.extra,
    )


def fields_of(message: Message) -> dict[str, Any]:
    """A message as the keywords of a submit. A submit of them repeats the message."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(msgspec.Raw,))
    fields |= fields.pop("extra")
    fields["priority"] = fields.pop("accepted_priority")
    for name in ("idempotency_key", "ordering_key"):
        fields[name] = fields[name] or None
    if not fields["hop"]:
        del fields["hop"]  # only the engine counts hops, so a call over HTTP cannot have one
    return fields


def result_of(stored: Stored) -> Any:
    """The result of a message that has ended."""
    if stored.record.state in ("COMPLETED", "EXECUTING", "DONE"):
        return None if stored.result is None else msgspec.json.decode(stored.result)
    raise failure_of(stored.record.message_id, stored.record.state, error_history(stored))


def error_history(stored: Stored) -> list[AttemptError]:
    """What went wrong, attempt by attempt."""
    return [
        {
            "attempt": event.attempt,
            "error_type": event.error_type,
            "error": event.error,
            "timestamp": utc_text(event.ts_us * 1000),
            "worker_id": event.worker_id,
        }
        for event in stored.history
        if event.error and event.kind in ("execution_failed", "lease_lapsed", "quarantined")
    ]
