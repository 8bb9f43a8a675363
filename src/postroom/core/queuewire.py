"""The queue's line format: one JSON object a line, checked when it carries our checksum.

Rule 1: a line of ours ends in `,"crc":"xxxxxxxx"}`, the CRC-32 of everything before that suffix.
Rule 2: a line without a `crc` key is foreign and taken as it is; one with that key anywhere else, or with a
        checksum that does not fit, is unreadable.
Rule 3: a body stands in a side file only when it is exactly `@file:` and the line's own id: no text that
        anybody sends can make a reader open a file.
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
_CRC_KEY = b'"crc":'  # never part of a text: a quote inside one is written with a backslash
_SEED_KEYS = 8
_NANOS_PER_S = 1_000_000_000


class Line(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"sender": "from"}):
    """A message on its way to disk. The order of the fields is the order of the keys."""

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
    """A complete line that is no message."""


_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(QueueMessage).decode


def encode_line(line: Line) -> bytes:
    """The bytes of one line, with its checksum and newline."""
    try:
        text = _encode_json(line)[:-1]
    except UnicodeEncodeError:
        msg = "the message holds lone surrogates, which are not Unicode text"
        raise InvalidMessage(msg) from None
    return b'%b,"crc":"%08x"}\n' % (text, crc32(text))


def decode_line(line: bytes) -> QueueMessage:
    """A line without its newline; `UnreadableLine` says why it is no message."""
    if line[-_SUFFIX_BYTES:] != b',"crc":"%08x"}' % crc32(line[:-_SUFFIX_BYTES]) and _CRC_KEY in line:
        raise UnreadableLine("the checksum does not fit, or does not stand where we write it")
    try:
        message = _decode_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableLine(f"not a message: {reason(error)}") from None
    # The keys that may be missing and those that only we may say: eight of both are not the eight.
    if len(message) == _SEED_KEYS and "to" in message and "in_reply_to" in message and "ttl_s" in message:
        return message
    return _completed(message)


def readable(line: bytes) -> QueueMessage | None:
    """As `decode_line`, with None for what is no message."""
    try:
        return decode_line(line)
    except UnreadableLine:
        return None


def _completed(message: QueueMessage) -> QueueMessage:
    """A line that left out what may be left out, or says what only we may say."""
    message.setdefault("to", None)
    message.setdefault("in_reply_to", None)
    message.setdefault("ttl_s", None)
    message.pop("_body_source", None)
    message.pop("_body_error", None)
    if not in_side_file(message):
        message.pop("body_bytes", None)
        message.pop("body_crc", None)
    return message


def side_file_mark(msg_id: str) -> str:
    """What the line carries instead of a body that lies in a side file."""
    return f"{SIDE_FILE_MARK}{msg_id}.txt"


def in_side_file(message: QueueMessage) -> bool:
    """Whether the body lies in the side file of this very message."""
    body = message["body"]
    if not body.startswith(SIDE_FILE_MARK) or body != side_file_mark(message["msg_id"]):
        return False
    try:
        checked_name("message id", message["msg_id"])
    except InvalidName:
        return False
    return True


def body_fault(message: QueueMessage, body: bytes) -> str:
    """What is wrong with a side file's bytes; empty when nothing is."""
    if len(body) != message.get("body_bytes", len(body)):
        return f"the side file has {len(body)} bytes instead of {message['body_bytes']}"
    if message.get("body_crc", "") not in ("", body_checksum(body)):
        return "the side file's checksum does not fit"
    return ""


def body_checksum(body: bytes) -> str:
    """The checksum that a line keeps of its side file."""
    return f"{crc32(body):08x}"


def is_expired(message: QueueMessage, now_ns: int) -> bool:
    """Whether now >= ts + ttl_s. A line whose time cannot be read never expires."""
    ttl_s = message["ttl_s"]
    if ttl_s is None:
        return False
    try:
        sent_ns = epoch_ns_of(parse_utc(message["ts"]))
    except InvalidMessage:
        return False
    # Whole nanoseconds: a float of them at today's size is only good to a quarter of a microsecond.
    return now_ns >= sent_ns + round(min(max(ttl_s, 0), SECONDS_MAX) * _NANOS_PER_S)


def is_for(message: QueueMessage, agent_id: str) -> bool:
    """Whether this agent is addressed."""
    to = message["to"]
    return to is None or to == agent_id or to in EVERYONE


# ---- what callers may say ----------------------------------------------------------------------------


def checked_topics(topics: str | Iterable[str] | None) -> frozenset[str] | None:
    """A topic filter, None for all."""
    if topics is None:
        return None
    try:
        chosen = [topics] if isinstance(topics, str) else list(topics)
    except TypeError:
        msg = f"topics must be a topic or a list of topics, not {type(topics).__name__}"
        raise TopicError(msg) from None
    if not chosen:
        msg = "the topic filter is empty: leave it out to get every topic"
        raise TopicError(msg)
    for topic in chosen:
        checked_topic(topic)
    return frozenset(chosen)


def checked_topic(topic: object) -> str:
    """A member of the closed set."""
    if not isinstance(topic, str) or topic not in TOPICS:
        msg = f"topic {topic!r} is not one of {', '.join(sorted(TOPICS))}"
        raise TopicError(msg)
    return plain(topic)


def checked_ttl(ttl_s: Any) -> float | int | None:
    """None for never, or a finite number of seconds that is not negative."""
    if ttl_s is None:
        return None
    return checked_seconds("ttl_s", ttl_s)


def checked_reply_to(reply_to: object) -> str | None:
    """An earlier message id, of any writer."""
    if reply_to is None:
        return None
    if not isinstance(reply_to, str) or not 0 < len(reply_to) <= REPLY_TO_CHARS_MAX:
        msg = f"reply_to must be a message id of 1 to {REPLY_TO_CHARS_MAX} characters"
        raise InvalidMessage(msg)
    return plain(reply_to)
