"""Builds the deliveries and replies of mq9, for each dialect.

Rule 1: a successful reply of the older dialects has no `error` key: their published client takes an empty one
        for a failure. The newest dialect always has the key. The reply to CREATE suits all.
Rule 2: each dialect has its own priorities: the published SDK knows high, normal and low, the newest dialect
        critical, urgent and normal.
Rule 3: no error holds a mailbox's id, and no reply holds an id that the caller did not send or create.
"""

import base64
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from postroom.core.mail.mailbox import Letter, Priority
from postroom.core.mail.mq9 import DELETE, NEWEST, SEND, Mq9Error, Verb

ENVELOPE_CLIENT = "robustmq"  # the default client name of the published SDK
LIST_MAX = 1_000  # messages in the reply to one LIST
REPLY_BYTES_MAX = 1 << 20  # of messages in one reply; the rest comes with the next call

Envelope = Literal["auto", "always", "never"]

_SDK_PRIORITIES: dict[Priority, Priority] = {
    "critical": "high",
    "urgent": "high",
    "high": "high",
    "normal": "normal",
    "low": "low",
}
_NEWEST_PRIORITIES: dict[Priority, Priority] = {
    "critical": "critical",
    "urgent": "urgent",
    "high": "urgent",
    "normal": "normal",
    "low": "normal",
}
_MSG_ID_LINE = re.compile(rb"\r\n[Mm][Qq]9-[Mm][Ss][Gg]-[Ii][Dd][^\r\n]*")

# ---- deliveries ------------------------------------------------------------------------------------


def is_enveloped(mode: Envelope, client_name: str) -> bool:
    """Whether a connection gets envelopes: the published SDK needs them, every other client the raw bytes."""
    if mode == "auto":
        return client_name.startswith(ENVELOPE_CLIENT)
    return mode == "always"


class DeliveryBatch(NamedTuple):
    """Messages of one subject: the headers and the payload of each."""

    subject: str
    messages: list[tuple[bytes, bytes]]


def raw(mail_id: str, letters: list[Letter]) -> DeliveryBatch:
    """The sender's own bytes, with the message id in a header. All letters have one priority."""
    subject = raw_subject(mail_id, letters[0].priority)
    return DeliveryBatch(subject, [(numbered(letter), letter.payload) for letter in letters])


def raw_subject(mail_id: str, priority: Priority) -> str:
    """The subject on which messages of this priority are delivered."""
    return f"{SEND}{mail_id}" if priority == "normal" else f"{SEND}{mail_id}.{priority}"


def delete_subject(mail_id: str, number: int) -> str:
    """The subject that deletes a message. It ends in the message id."""
    return f"{DELETE}{mail_id}.{number}"


def numbered(letter: Letter) -> bytes:
    """The sender's headers after the message id. A message id that the sender wrote is removed."""
    if not letter.headers:
        return b"NATS/1.0\r\nMq9-Msg-Id: %d\r\n\r\n" % letter.number
    rest = _MSG_ID_LINE.sub(b"", letter.headers)
    return b"NATS/1.0\r\nMq9-Msg-Id: %d\r\n%b" % (letter.number, rest[rest.find(b"\r\n") + 2 :])


def enveloped(mail_id: str, letters: list[Letter]) -> DeliveryBatch:
    """The form that the published SDK reads: priority in the subject, the rest in a JSON envelope."""
    priority = _SDK_PRIORITIES[letters[0].priority]
    messages = [(letter.headers, _envelope(mail_id, letter, priority)) for letter in letters]
    return DeliveryBatch(f"{SEND}{mail_id}.{priority}", messages)


def _envelope(mail_id: str, letter: Letter, priority: Priority) -> bytes:
    return encode(
        {
            "msg_id": str(letter.number),
            "mail_id": mail_id,
            "priority": priority,
            # The SDK takes an empty payload for a missing one; a blank decodes to an empty payload.
            "payload": base64.b64encode(letter.payload).decode("ascii") or " ",
            "ts": letter.created_us // 1_000_000,
        }
    )


def announcement(event: Literal["created", "expired"], mail_id: str, desc: str, ttl_s: float) -> bytes:
    """One entry of the public list."""
    if event == "expired":
        return encode({"event": event, "mail_id": mail_id})
    return encode({"event": event, "mail_id": mail_id, "desc": desc, "ttl": _whole(ttl_s)})


# ---- replies ---------------------------------------------------------------------------------------

encode = msgspec.json.Encoder().encode


def created(mail_id: str, *, is_new: bool) -> bytes:
    return encode({"mail_id": mail_id, "mail_address": mail_id, "is_new": is_new})


def stored(verb: Verb, msg_id: int) -> bytes:
    return b'{"error":"","msg_id":%d}' % msg_id if verb in NEWEST else b'{"msg_id":%d}' % msg_id


def deleted(verb: Verb, *, found: bool) -> bytes:
    reply: dict[str, Any] = {"error": ""} if verb in NEWEST else {}
    return encode({**reply, "deleted": found})


def extended(mail_id: str, ttl_s: float) -> bytes:
    return encode({"mail_id": mail_id, "ttl": _whole(ttl_s)})


def done(**facts: Any) -> bytes:
    """A successful reply of the newest dialect."""
    return encode({"error": "", **facts})


def refused(error: Mq9Error) -> bytes:
    return encode({"error": str(error), "code": error.code})


def listed(mail_id: str, letters: Iterable[Letter], *, sdk: bool, payloads: bool) -> bytes:
    """The reply to LIST: the keys of all dialects, with the priorities of the caller's dialect."""
    whole = payloads and not sdk  # the published SDK reads neither payloads nor headers here
    found = _bounded(letters, LIST_MAX) if whole else islice(letters, LIST_MAX)
    messages = [_listed(letter, sdk=sdk) | (_content(letter) if whole else {}) for letter in found]
    return encode({"mail_id": mail_id, "mail_address": mail_id, "messages": messages})


def _listed(letter: Letter, *, sdk: bool) -> dict[str, Any]:
    created_s = letter.created_us // 1_000_000
    return {
        "msg_id": str(letter.number) if sdk else letter.number,
        "priority": _SDK_PRIORITIES[letter.priority] if sdk else letter.priority,
        "ts": created_s,
        "create_time": created_s,
    }


def _content(letter: Letter) -> dict[str, Any]:
    return {"payload": letter.payload.decode("utf-8", "replace"), "header": list(letter.headers) or None}


def fetched(letters: Iterable[Letter]) -> bytes:
    """The reply to FETCH and QUERY."""
    return done(messages=[_fetched(letter) for letter in letters])


def _fetched(letter: Letter) -> dict[str, Any]:
    return {
        "msg_id": letter.number,
        "payload": base64.b64encode(letter.payload).decode("ascii"),
        "priority": _NEWEST_PRIORITIES[letter.priority],
        "header": list(letter.headers) or None,
        "create_time": letter.created_us // 1_000_000,
    }


def _bounded(letters: Iterable[Letter], limit: int) -> Iterator[Letter]:
    """The first letters that fit one reply; at least one."""
    size = 0
    for count, letter in enumerate(letters, 1):
        size += len(letter.payload) + len(letter.headers)
        if count > limit or (size > REPLY_BYTES_MAX and count > 1):
            return
        yield letter


def fitting(letters: Iterable[Letter], limit: int) -> list[Letter]:
    """At most `limit` letters, as many as fit one reply."""
    return list(_bounded(letters, limit))


def _whole(seconds: float) -> float:
    """Whole seconds as an integer, which clients expect."""
    return int(seconds) if seconds == int(seconds) else seconds
