"""What clients of mq9 get: deliveries and replies, to each dialect in its own words.

Rule 1: a success of the older dialects has no `error` key: their published client takes an empty one for a
        failure. The newest dialect always has it. The reply to CREATE suits all.
Rule 2: each client reads its own words: the published SDK knows high, normal and low, the newest critical,
        urgent and normal.
Rule 3: no error holds a mailbox's id, and no reply holds one that the caller did not name or create.
"""

import base64
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from postroom.core.mailbox import Letter, Word
from postroom.core.mq9 import DELETE, NEWEST, SEND, Mq9Error, Verb

ENVELOPE_CLIENT = "robustmq"  # how the published SDK calls itself, unless its user says otherwise
LIST_MAX = 1_000  # messages in one LIST
REPLY_BYTES_MAX = 1 << 20  # of payloads in one reply; what is left over comes with the next call

Envelope = Literal["auto", "always", "never"]

_SDK_WORDS: dict[Word, Word] = {
    "critical": "high",
    "urgent": "high",
    "high": "high",
    "normal": "normal",
    "low": "low",
}
_NEWEST_WORDS: dict[Word, Word] = {
    "critical": "critical",
    "urgent": "urgent",
    "high": "urgent",
    "normal": "normal",
    "low": "normal",
}
_MSG_ID_LINE = re.compile(rb"\r\n[Mm][Qq]9-[Mm][Ss][Gg]-[Ii][Dd][^\r\n]*")

# ---- deliveries ------------------------------------------------------------------------------------


def is_enveloped(mode: Envelope, client_name: str) -> bool:
    """Whether a connection gets envelopes: the published SDK needs them, and all others the raw bytes."""
    if mode == "auto":
        return client_name.startswith(ENVELOPE_CLIENT)
    return mode == "always"


class Batch(NamedTuple):
    """Messages as they go out on one subject: the headers and the payload of each."""

    subject: str
    messages: list[tuple[bytes, bytes]]


def raw(mail_id: str, letters: list[Letter]) -> Batch:
    """The sender's own bytes, with the message id in a header. The letters are of one word."""
    subject = raw_subject(mail_id, letters[0].word)
    return Batch(subject, [(numbered(letter), letter.payload) for letter in letters])


def raw_subject(mail_id: str, word: Word) -> str:
    """On which subject a message of this priority goes out."""
    return f"{SEND}{mail_id}" if word == "normal" else f"{SEND}{mail_id}.{word}"


def delete_subject(mail_id: str, number: int) -> str:
    """The subject that deletes a message. It ends in the message id."""
    return f"{DELETE}{mail_id}.{number}"


def numbered(letter: Letter) -> bytes:
    """The sender's headers, behind a message id that only the server can write."""
    if not letter.headers:
        return b"NATS/1.0\r\nMq9-Msg-Id: %d\r\n\r\n" % letter.number
    rest = _MSG_ID_LINE.sub(b"", letter.headers)
    return b"NATS/1.0\r\nMq9-Msg-Id: %d\r\n%b" % (letter.number, rest[rest.find(b"\r\n") + 2 :])


def enveloped(mail_id: str, letters: list[Letter]) -> Batch:
    """What the published SDK reads: the priority from the subject, the rest from the envelope."""
    word = _SDK_WORDS[letters[0].word]
    messages = [(letter.headers, _envelope(mail_id, letter, word)) for letter in letters]
    return Batch(f"{SEND}{mail_id}.{word}", messages)


def _envelope(mail_id: str, letter: Letter, word: Word) -> bytes:
    return encode(
        {
            "msg_id": str(letter.number),
            "mail_id": mail_id,
            "priority": word,
            # An empty payload would be taken for none; a blank decodes to nothing.
            "payload": base64.b64encode(letter.payload).decode("ascii") or " ",
            "ts": letter.created_us // 1_000_000,
        }
    )


def announcement(event: Literal["created", "expired"], mail_id: str, desc: str, ttl_s: float) -> bytes:
    """One line of the public list."""
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
    """A success of the newest dialect."""
    return encode({"error": "", **facts})


def refused(error: Mq9Error) -> bytes:
    return encode({"error": str(error), "code": error.code})


def listed(mail_id: str, letters: Iterable[Letter], *, sdk: bool, payloads: bool) -> bytes:
    """The reply to LIST: what every dialect looks for, in the words of the one who asks."""
    whole = payloads and not sdk  # the published SDK reads neither payloads nor headers here
    found = _bounded(letters, LIST_MAX) if whole else islice(letters, LIST_MAX)
    messages = [_listed(letter, sdk=sdk) | (_content(letter) if whole else {}) for letter in found]
    return encode({"mail_id": mail_id, "mail_address": mail_id, "messages": messages})


def _listed(letter: Letter, *, sdk: bool) -> dict[str, Any]:
    created_s = letter.created_us // 1_000_000
    return {
        "msg_id": str(letter.number) if sdk else letter.number,
        "priority": _SDK_WORDS[letter.word] if sdk else letter.word,
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
        "priority": _NEWEST_WORDS[letter.word],
        "header": list(letter.headers) or None,
        "create_time": letter.created_us // 1_000_000,
    }


def _bounded(letters: Iterable[Letter], limit: int) -> Iterator[Letter]:
    """The first of them that fit one reply; at least one."""
    size = 0
    for count, letter in enumerate(letters, 1):
        size += len(letter.payload) + len(letter.headers)
        if count > limit or (size > REPLY_BYTES_MAX and count > 1):
            return
        yield letter


def fitting(letters: Iterable[Letter], limit: int) -> list[Letter]:
    """The first of them that fit one reply."""
    return list(_bounded(letters, limit))


def _whole(seconds: float) -> float:
    """Clients read whole seconds as whole numbers."""
    return int(seconds) if seconds == int(seconds) else seconds
