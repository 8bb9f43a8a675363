"""The queue's line format: one JSON object per line, verified when it carries a checksum.

Rule 1: a line written by postroom ends in `,"crc":"xxxxxxxx"}`: the CRC-32 of everything before that suffix.
Rule 2: a line without a `crc` key is foreign and accepted as it is. A line with that key anywhere else, or
        with a wrong checksum, is unreadable.
Rule 3: a body is read from a side file only when it is exactly `@file:`, the line's own id and `.txt`. No
        text that a sender chooses can make a reader open another file.
"""

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import msgspec

from postroom.core.names import checked_name, plain
from postroom.core.times import SECONDS_MAX, checked_seconds, epoch_ns_of, parse_utc
from postroom.errors import InvalidMessage, InvalidName, TopicError, reason
from postroom.message import QueueMessage

TOPICS = frozenset({"ask", "answer", "broadcast", "spawn-request", "status"})
EVERYONE = (None, "all", "broadcast")
LINE_BYTES_MAX = 4095  # a longer line, newline included, has its body moved to a side file
BODY_BYTES_MAX = 64 * 1024 * 1024
REPLY_TO_CHARS_MAX = 256
SIDE_FILE_MARK = "@file:"

_SUFFIX_BYTES = 18  # ,"crc":"xxxxxxxx"}
_CRC_KEY = b'"crc":'  # never inside a JSON string: there a quote is escaped with a backslash
_SEED_KEYS = 8
_NANOS_PER_S = 1_000_000_000


class QueueLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"sender": "from"}):
    """A message to be written. The order of the fields is the order of the JSON keys."""

    msg_id: str
    ts: str
    sender: str
    to: str | None
    topic: str
    body: str
    in_reply_to: str | None
    ttl_s: float | int | None
    body_bytes: int = -1
    body_crc: str = ""


class UnreadableLine(Exception):
    """A complete line that is not a message."""


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(QueueMessage).decode


def encode_line(line: QueueLine) -> bytes:
    """The bytes of one line, including its checksum and newline."""
    try:
        text = _encode_json(line)[:-1]
    except UnicodeEncodeError:
        raise InvalidMessage("the message holds lone surrogates, which are not Unicode text") from None
    return b'%b,"crc":"%08x"}\n' % (text, crc32(text))


def decode_line(line: bytes) -> QueueMessage:
    """The message in a line without its newline; raises `UnreadableLine` with the reason."""
    if line[-_SUFFIX_BYTES:] != b',"crc":"%08x"}' % crc32(line[:-_SUFFIX_BYTES]) and _CRC_KEY in line:
        raise UnreadableLine("the checksum does not match, or is not at the end of the line")
    try:
        message = _decode_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableLine(f"not a message: {reason(error)}") from None
    # Exactly the eight standard keys: no optional key is missing, and no reserved key is present.
    if len(message) == _SEED_KEYS and "to" in message and "in_reply_to" in message and "ttl_s" in message:
        return message
    message.setdefault("to", None)
    message.setdefault("in_reply_to", None)
    message.setdefault("ttl_s", None)
    message.pop("_body_source", None)  # these are only for postroom to set
    message.pop("_body_error", None)
    if not in_side_file(message):
        message.pop("body_bytes", None)
        message.pop("body_crc", None)
    return message


def readable(line: bytes) -> QueueMessage | None:
    """As `decode_line`, but None for an unreadable line."""
    try:
        return decode_line(line)
    except UnreadableLine:
        return None


def side_file_mark(msg_id: str) -> str:
    """The body that a line carries when its real body is in a side file."""
    return f"{SIDE_FILE_MARK}{msg_id}.txt"


def in_side_file(message: QueueMessage) -> bool:
    """Whether the body is in the side file of this message."""
    body = message["body"]
    if not body.startswith(SIDE_FILE_MARK) or body != side_file_mark(message["msg_id"]):
        return False
    try:
        checked_name("message id", message["msg_id"])
    except InvalidName:
        return False
    return True


def body_fault(message: QueueMessage, body: bytes) -> str:
    """Why the bytes of a side file are not the message's body; empty when they are."""
    if len(body) != message.get("body_bytes", len(body)):
        return f"the side file has {len(body)} bytes instead of {message['body_bytes']}"
    if message.get("body_crc", "") not in ("", body_checksum(body)):
        return "the side file's checksum does not match"
    return ""


def body_checksum(body: bytes) -> str:
    """The side file's checksum, as the line stores it."""
    return f"{crc32(body):08x}"


def is_expired(message: QueueMessage, now_ns: int) -> bool:
    """Whether now >= ts + ttl_s. A line with an unreadable `ts` never expires."""
    ttl_s = message["ttl_s"]
    if ttl_s is None:
        return False
    try:
        sent_ns = epoch_ns_of(parse_utc(message["ts"]))
    except InvalidMessage:
        return False
    # In whole nanoseconds: as a float, today's time is only exact to a quarter of a microsecond.
    return now_ns >= sent_ns + round(min(max(ttl_s, 0), SECONDS_MAX) * _NANOS_PER_S)


def is_for(message: QueueMessage, agent_id: str) -> bool:
    """Whether the message is addressed to this agent, or to everyone."""
    to = message["to"]
    return to is None or to == agent_id or to in EVERYONE


# ---- checks of callers' arguments --------------------------------------------------------------------


def checked_topics(topics: str | Iterable[str] | None) -> frozenset[str] | None:
    """A topic filter; None stands for all topics."""
    if topics is None:
        return None
    try:
        chosen = [topics] if isinstance(topics, str) else list(topics)
    except TypeError:
        raise TopicError(f"topics must be a topic or a list of topics, not {type(topics).__name__}") from None
    if not chosen:
        raise TopicError("the topic filter is empty: leave it out to get every topic")
    for topic in chosen:
        checked_topic(topic)
    return frozenset(chosen)


def checked_topic(topic: object) -> str:
    """The topic itself when it is one of `TOPICS`, else `TopicError`."""
    if not isinstance(topic, str) or topic not in TOPICS:
        raise TopicError(f"topic {topic!r} is not one of {', '.join(sorted(TOPICS))}")
    return plain(topic)


def checked_ttl(ttl_s: Any) -> float | int | None:
    """A finite number of seconds of 0 or more; None stands for no expiry."""
    if ttl_s is None:
        return None
    return checked_seconds("ttl_s", ttl_s)


def checked_reply_to(reply_to: object) -> str | None:
    """The id of an earlier message, written by any program."""
    if reply_to is None:
        return None
    if not isinstance(reply_to, str) or not 0 < len(reply_to) <= REPLY_TO_CHARS_MAX:
        raise InvalidMessage(f"reply_to must be a message id of 1 to {REPLY_TO_CHARS_MAX} characters")
    return plain(reply_to)
