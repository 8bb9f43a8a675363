"""The client side of mq9: builds subjects and headers, and reads messages and answers.

Rule 1: no argument of a caller can change the meaning of a protocol line.
Rule 2: a message is understood in every form in which servers deliver it.
"""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec

from postroom.core.mail import mq9
from postroom.core.mail.mailbox import RANKS
from postroom.core.nats import natswire as wire
from postroom.errors import InvalidMessage, MailRefused, MailUnavailable, reason

CREATE = b"$mq9.AI.MAILBOX.CREATE"
LIST = "$mq9.AI.MAILBOX.LIST."
WITHOUT_PAYLOADS = b'{"payload":false}'  # the body of LIST; servers that do not know it send payloads
NO_RESPONDERS = b"NATS/1.0 503"
REPLY_TO = "Mq9-Reply-To"  # a header with the mailbox that waits for an answer
LATER = (429, 503)  # error codes after which the same call can succeed later


class MailMessage(NamedTuple):
    """One message of a mailbox."""

    mail_id: str
    msg_id: int
    """0 when the server does not send it."""
    priority: str
    payload: bytes
    headers: dict[str, str]

    @property
    def reply_to(self) -> str:
        """The mailbox that waits for an answer to this message; empty when none does."""
        return next((value for name, value in self.headers.items() if name.lower() == REPLY_TO.lower()), "")

    @property
    def text(self) -> str:
        return self.payload.decode("utf-8", "replace")

    def json(self) -> Any:
        """Decode the payload as JSON."""
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidMessage(f"the payload is not JSON: {reason(error)}") from None


class Listed(NamedTuple):
    """One message in a list, without its payload."""

    msg_id: int
    priority: str
    created_s: int
    """Unix time in seconds."""


class PublicMailbox(NamedTuple):
    """One public mailbox."""

    mail_id: str
    desc: str
    ttl_s: float


class Created(NamedTuple):
    """The answer to a create."""

    mail_id: str
    is_new: bool | None
    """False when the mailbox existed and is unchanged; None when the server does not say."""


Priority = Literal["critical", "urgent", "high", "normal", "low"]
Payload = bytes | bytearray | memoryview | str | Mapping[str, Any] | list[Any]


def checked_text(name: str, value: object) -> str:
    """An argument that is text and can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{name} holds lone surrogates, which are not Unicode text") from None
    return value


def checked_number(msg_id: object) -> int:
    """A valid message id, as a send or a list returns it."""
    if isinstance(msg_id, bool) or not isinstance(msg_id, int) or msg_id < 0:
        raise InvalidMessage(f"msg_id must be the number of a message, not {msg_id!r}")
    return msg_id


def address(mail_id: str, *, what: str = mq9.SEND, after: str = "") -> bytes:
    """The subject of a call to a mailbox. Characters that would change the protocol line are refused."""
    if not isinstance(mail_id, str):
        raise InvalidMessage(f"mail_id must be text, not {type(mail_id).__name__}")
    if not mail_id or any(char in mail_id for char in " \t\r\n*>") or not mail_id.isprintable():
        raise InvalidMessage("mail_id must not be empty, or contain blanks or wildcards")
    return f"{what}{mail_id}{after}".encode()


def suffix(priority: str) -> str:
    if not isinstance(priority, str) or priority not in RANKS:
        raise InvalidMessage(f"priority must be one of {', '.join(RANKS)}, not {priority!r}")
    return "" if priority == "normal" else f".{priority}"


def wanted_suffix(priority: str) -> str:
    """The suffix of a subscription: one priority, or `*` for all."""
    if priority == "*":
        return ".*"
    if not isinstance(priority, str) or priority not in RANKS:
        raise InvalidMessage(f"priority must be one of {', '.join(RANKS)}, or * for all, not {priority!r}")
    return suffix(priority)


def as_bytes(payload: Payload) -> bytes:
    if isinstance(payload, bytes):
        return payload
    try:
        if isinstance(payload, str):
            return payload.encode("utf-8", "surrogateescape")
        if isinstance(payload, bytearray | memoryview):
            return bytes(payload)
        return msgspec.json.encode(payload)
    except UnicodeEncodeError:
        raise InvalidMessage("payload holds lone surrogates, which are not Unicode text") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        fault = f"payload must be bytes, text, or what JSON can hold, not {type(payload).__name__}"
        raise InvalidMessage(f"{fault}: {reason(error)}") from None


def header_block(headers: Mapping[str, str]) -> bytes:
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a dict of text, not {type(headers).__name__}")
    if not headers:
        return b""
    for name, value in headers.items():
        checked_text("the name of a header", name)
        checked_text("the value of a header", value)
        if not name or ":" in name or any(char in name + value for char in "\r\n"):
            raise InvalidMessage("a header must have a name without a colon, and no line breaks")
    return "".join(
        ["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"]
    ).encode()


def _headers_of(block: bytes) -> dict[str, str]:
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


class _Envelope(msgspec.Struct):
    """The JSON envelope in which a server delivers to the published SDK."""

    msg_id: int | str
    priority: str
    payload: str


def message_of(mail_id: str, head: wire.ControlLine, body: bytes) -> MailMessage:
    """A delivered message: raw with its id in a header, in an envelope, or raw without an id."""
    cut = max(head.header_bytes, 0)
    headers, payload = _headers_of(body[:cut]) if cut else {}, body[cut:]
    priority = head.subject.decode("utf-8", "replace").removeprefix(mq9.SEND + mail_id).removeprefix(".")
    number = next((value for name, value in headers.items() if name.lower() == "mq9-msg-id"), None)
    if number is None and payload.startswith(b"{"):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, NotBase64, ValueError):
            found = msgspec.json.decode(payload, type=_Envelope)
            content = b64decode(found.payload)
            return MailMessage(mail_id, int(found.msg_id), found.priority, content, headers)
    msg_id = int(number) if number is not None and number.isdecimal() else 0
    return MailMessage(mail_id, msg_id, priority or "normal", payload, headers)


class Reply(msgspec.Struct):
    """An answer of any server, with the fields of all calls."""

    error: str | None = None
    code: int = 0
    mail_id: str = ""
    mail_address: str = ""
    msg_id: int | str | None = None
    deleted: bool | None = None
    is_new: bool | None = None
    messages: list[dict[str, Any]] = []


def checked(answer: wire.Messages) -> Reply:
    """Decode an answer, or raise its error."""
    cut = max(answer.head.header_bytes, 0)
    body = answer.bodies[0]
    if body[:cut].startswith(NO_RESPONDERS):
        raise MailUnavailable("the server has no mailboxes: it may be a plain NATS server")
    try:
        reply = msgspec.json.decode(body[cut:], type=Reply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise MailUnavailable("the server's answer is not that of a mail server") from None
    if not reply.error:
        return reply
    if reply.code in LATER:
        raise MailUnavailable(reply.error)
    raise MailRefused(reply.code, reply.error)


def listed(reply: Reply) -> list[Listed]:
    """The messages of a list. Fields that a server leaves out have defaults."""
    return [
        Listed(int(each.get("msg_id", 0)), str(each.get("priority", "normal")), int(each.get("ts") or 0))
        for each in reply.messages
    ]
