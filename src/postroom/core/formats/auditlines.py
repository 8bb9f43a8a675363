"""Conversion of queue audit lines, mail event lines and bus messages into events of the audit stream.

An unreadable line becomes an `alert` event, because a gap in the sequence numbers would look like a loss.
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from postroom.core.formats.events import SCHEMA, AuditEvent, Contract, event_id
from postroom.core.formats.jsoninput import guarded
from postroom.core.times import epoch_ns_of, parse_utc
from postroom.errors import InvalidMessage
from postroom.message import BusMessage, EventKind

TS_US_MAX = 253_402_300_799_999_999  # the last microsecond of the year 9999, which a datetime can hold
Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A 64-bit integer, which every reader of the stream can represent."""


class AuditLine(msgspec.Struct, rename={"sender": "from"}):
    """A line of a queue's audit log, for any operation."""

    ts: str
    op: str
    session: str
    msg_id: str = ""
    topic: str = ""
    to: str | None = None
    sender: str = ""
    body_bytes: Whole = 0
    externalized: bool = False
    ttl_s: float | None = None
    unknown_recipient: bool = False
    agent_id: str = ""
    topics: list[str] | None = None
    matched: Whole = 0
    cursor_from: Whole = 0
    cursor_to: Whole = 0
    dropped: Whole = 0
    epoch: Whole = 0


class MailLine(msgspec.Struct):
    """A line of a mail server's event file. A private mailbox is named by its hash."""

    kind: EventKind
    ts_us: Annotated[int, msgspec.Meta(ge=0, le=TS_US_MAX)]
    queue: str = ""
    message_id: str = ""
    type: str = ""
    priority: Whole | None = None
    attempt: Whole = 0
    worker_id: str = ""
    error_type: str = ""
    error: str = ""
    body_bytes: Whole = 0
    sender: str = ""
    recipient: str = ""
    detail: dict[str, Any] = {}


_FACTS = {
    "send": ("externalized", "ttl_s", "unknown_recipient"),
    "poll": ("topics", "matched", "cursor_from", "cursor_to"),
    "expire": ("dropped", "epoch"),
}
_KINDS: dict[str, EventKind] = {"send": "created", "poll": "delivered", "expire": "expired"}
_decode_line = guarded(msgspec.json.Decoder(AuditLine).decode)
_decode_mail_line = guarded(msgspec.json.Decoder(MailLine).decode, lambda line: line.detail)


def of_audit_line(line: bytes, source: str, seq: int) -> AuditEvent:
    """The event for a line of a queue's audit log."""
    try:
        entry = _decode_line(line)
        ts_us = epoch_ns_of(parse_utc(entry.ts)) // 1000
    except (msgspec.DecodeError, InvalidMessage) as error:
        return _unreadable(line, source, seq, str(error))
    kind = _KINDS.get(entry.op)
    if kind is None:
        return _unreadable(line, source, seq, f"a queue has no operation {entry.op!r}")
    if kind != "created" and not (entry.matched or entry.dropped):
        kind = "heartbeat"  # a poll or expire that found nothing
    facts = {name: getattr(entry, name) for name in _FACTS[entry.op]}
    return AuditEvent(
        event_id=event_id(source, seq),
        seq=seq,
        ts_us=ts_us,
        kind=kind,
        contract="queue",
        source=source,
        schema=SCHEMA,
        queue=entry.session,
        agent_id=entry.sender or entry.agent_id,
        message_id=entry.msg_id,
        type=entry.topic,
        body_bytes=entry.body_bytes,
        sender=entry.sender,
        recipient=entry.to or entry.agent_id,
        detail={name: value for name, value in facts.items() if value not in (None, False)},
    )


def of_mail_line(line: bytes, source: str, seq: int) -> AuditEvent:
    """The event for a line of a mail server's event file."""
    try:
        entry = _decode_mail_line(line)
    except msgspec.DecodeError as error:
        return _unreadable(line, source, seq, str(error), "mail")
    fields = msgspec.structs.asdict(entry)
    return AuditEvent(
        event_id=event_id(source, seq), seq=seq, contract="mail", source=source, schema=SCHEMA,
        agent_id=entry.sender, **fields,
    )  # fmt: skip


def _unreadable(line: bytes, source: str, seq: int, reason: str, contract: Contract = "queue") -> AuditEvent:
    """The alert for an unreadable line, which stays in its file. The time is unknown, so it is 0."""
    return AuditEvent(
        event_id=event_id(source, seq), seq=seq, ts_us=0, kind="alert", contract=contract, source=source,
        schema=SCHEMA, error_type="UnreadableLine", error=reason, body_bytes=len(line),
    )  # fmt: skip


def of_bus_message(message: BusMessage, bus: str, source: str, seq: int) -> AuditEvent:
    """The event for a bus message. Parents after the first are in `detail`."""
    facts = {
        "project_id": message.project_id,
        "run_id": message.run_id,
        "parents": message.parents[1:],
        "attachment_path": message.attachment_path,
    }
    return AuditEvent(
        event_id=event_id(source, seq),
        seq=seq,
        ts_us=epoch_ns_of(message.ts) // 1000,
        kind="created",
        contract="bus",
        source=source,
        schema=SCHEMA,
        queue=bus,
        agent_id=message.run_id,
        message_id=message.msg_id,
        task_id=message.task_id,
        parent_message_id=message.parents[0] if message.parents else "",
        type=message.type,
        body_bytes=len(message.body.encode()),
        payload=message.body,
        detail={name: value for name, value in facts.items() if value},
    )
