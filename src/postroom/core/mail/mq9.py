"""Parses the subjects, headers and bodies of all mq9 dialects.

Rule 1: the subject alone determines the dialect of a call. Only CREATE is shared.
Rule 2: no error text holds a mailbox's id.
"""

import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from postroom.core.formats.jsoninput import is_nested_deeper
from postroom.core.mail.mailbox import EVERY_RANK, RANKS, Deliver, Priority
from postroom.core.names import look_alike_fault
from postroom.core.times import SECONDS_MAX
from postroom.errors import PostroomError

PREFIX = "$mq9."
ROOT = "$mq9.AI."
SEND = "$mq9.AI.MAILBOX.MSG."
DELETE = "$mq9.AI.MAILBOX.DELETE."
PUBLIC_LIST = "$mq9.AI.PUBLIC.LIST"

SUBJECTS_CACHED = 4_096
NAME_CHARS_MAX = 128
DESC_CHARS_MAX = 4_096
KEY_CHARS_MAX = 1_024
TAGS_MAX = 64
QUERY_MAX = 100
FETCH_MAX = 1_000
DISCOVER_MAX = 100
DEFAULT_TTL_S = 86_400
DEFAULT_FETCH = 100
DEFAULT_WAIT_MS = 500
WAIT_MS_MAX = 300_000  # timeout of a FETCH that finds nothing
JSON_BYTES_MAX = 128 << 10  # of the body of a call that is not a message
JSON_DEPTH_MAX = 64  # levels of nested lists and objects in such a body

Verb = Literal[
    "create", "send", "list", "delete", "extend", "send3", "fetch", "ack", "query", "delete3",
    "register", "unregister", "report", "discover",
]  # fmt: skip

_VERBS: dict[tuple[str, str], Verb] = {
    ("MAILBOX", "CREATE"): "create",
    ("MAILBOX", "MSG"): "send",
    ("MAILBOX", "LIST"): "list",
    ("MAILBOX", "DELETE"): "delete",
    ("MAILBOX", "EXTEND"): "extend",
    ("MSG", "SEND"): "send3",
    ("MSG", "FETCH"): "fetch",
    ("MSG", "ACK"): "ack",
    ("MSG", "QUERY"): "query",
    ("MSG", "DELETE"): "delete3",
    ("AGENT", "REGISTER"): "register",
    ("AGENT", "UNREGISTER"): "unregister",
    ("AGENT", "REPORT"): "report",
    ("AGENT", "DISCOVER"): "discover",
}
NEWEST: frozenset[Verb] = frozenset(verb for (area, _), verb in _VERBS.items() if area != "MAILBOX")
"""The verbs of the newest dialect."""

_WITHOUT_MAILBOX: frozenset[Verb] = frozenset(["create", "register", "unregister", "report", "discover"])
_PART = r"[^\s.*>\x00-\x1f\x7f]+"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
_PREFIX_NAME = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)*")
_NUMBER = re.compile(r"[0-9]{1,18}")


class Mq9Error(PostroomError):
    """Answers a call with an error text and a code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class MailCall(NamedTuple):
    """The call of a subject. `detail` is the priority of a send, or the message id of a delete."""

    verb: Verb
    mail_id: str = ""
    detail: str = ""


# ---- subjects --------------------------------------------------------------------------------------


def address(rest: str) -> tuple[str, Priority]:
    """Split the part after `MSG.` into the mailbox and the priority, which is normal by default."""
    mail_id, dot, last = rest.rpartition(".")
    if dot and last in RANKS:
        return mail_id, cast("Priority", last)
    return rest, "normal"


@lru_cache(maxsize=SUBJECTS_CACHED)
def parse(subject: str) -> MailCall:
    """The call that a published subject stands for."""
    area, _, rest = subject.removeprefix(ROOT).partition(".")
    word, dot, rest = rest.partition(".")
    verb = _VERBS.get((area, word))
    if subject == PUBLIC_LIST:
        raise Mq9Error(403, "the public list is written by the server alone")
    if verb is None or (verb in _WITHOUT_MAILBOX) == bool(dot):
        raise Mq9Error(400, "unrecognized mq9 subject")
    if verb == "send":
        return MailCall(verb, *address(rest))
    if verb in ("delete", "delete3"):
        mail_id, _, msg_id = rest.rpartition(".")
        return MailCall(verb, mail_id, msg_id)
    return MailCall(verb, rest)


def subscription(subject: str) -> tuple[str, int]:
    """The mailbox and the ranks, as bits, of a subscription."""
    if not subject.startswith(SEND):
        raise Mq9Error(403, "only mailboxes and the public list can be subscribed to")
    rest = subject[len(SEND) :]
    if rest.endswith(".*"):
        mail_id, ranks = rest[:-2], EVERY_RANK
    else:
        mail_id, priority = address(rest)
        ranks = 1 << RANKS[priority]
    if not _NAME.fullmatch(mail_id):
        raise Mq9Error(403, "a wildcard in place of a mailbox is not allowed")
    return mail_id, ranks


def checked_name(name: str, *, known: bool = False) -> str:
    """A valid name of a public mailbox. An existing name may look like another."""
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise Mq9Error(
            400,
            f"a mailbox name has 1 to {NAME_CHARS_MAX} characters, no blanks, no wildcards and no empty part",
        )
    if name.rpartition(".")[2] in RANKS:
        raise Mq9Error(400, f"a mailbox name cannot end in one of the words {', '.join(RANKS)}")
    if not known and (fault := look_alike_fault(name)):
        raise Mq9Error(400, f"the mailbox name {fault}")
    return name


def checked_agent_name(name: str) -> str:
    """A valid name of a new agent or of its mailbox."""
    if fault := look_alike_fault(name):
        raise Mq9Error(400, f"the agent's name {fault}")
    return name


def checked_prefix(prefix: str) -> str:
    """A valid prefix of a private id."""
    if len(prefix) > NAME_CHARS_MAX or not _PREFIX_NAME.fullmatch(prefix):
        raise Mq9Error(400, "a prefix has lower-case letters, digits and single dots")
    return prefix


def number(text: str) -> int:
    """A message id in a subject."""
    if not _NUMBER.fullmatch(text):
        raise Mq9Error(400, "msg_id must be a number")
    return int(text)


# ---- bodies ----------------------------------------------------------------------------------------


class Creation(msgspec.Struct, frozen=True):
    """The body of CREATE. Unknown keys are ignored."""

    ttl: float | None = None
    public: bool | None = None
    name: str | None = None
    desc: str | None = None
    prefix: str | None = None

    @property
    def is_public(self) -> bool:
        """A name is enough: the newest dialect has no `public`."""
        return bool(self.name) if self.public is None else self.public


class ListOptions(msgspec.Struct, frozen=True):
    """The body of LIST."""

    payload: bool = True
    """Whether the list includes the payloads."""


class Extension(msgspec.Struct, frozen=True):
    """The body of EXTEND: the lifetime in seconds from now on."""

    ttl: float


class FetchConfig(msgspec.Struct, frozen=True):
    """How many messages a FETCH wants, and how long it waits for the first."""

    num_msgs: int | None = None
    max_wait_ms: int | None = None


class Fetch(msgspec.Struct, frozen=True):
    """The body of FETCH."""

    group_name: str | None = None
    deliver: Deliver = "latest"
    from_time: float | None = None
    from_id: int | None = None
    force_deliver: bool | None = None
    config: FetchConfig | None = None

    @property
    def limit(self) -> int:
        asked = self.config.num_msgs if self.config else None
        return min(FETCH_MAX, max(1, DEFAULT_FETCH if asked is None else asked))

    @property
    def wait_ms(self) -> int:
        asked = self.config.max_wait_ms if self.config else None
        return max(0, DEFAULT_WAIT_MS if asked is None else min(asked, WAIT_MS_MAX))

    @property
    def bound(self) -> int:
        """Where it starts: an instant in microseconds, or a message id."""
        if self.deliver == "from_time":
            return int(max(0, min(self.from_time or 0, SECONDS_MAX)) * 1_000_000)
        return self.from_id or 0


class Acknowledgement(msgspec.Struct, frozen=True):
    """The body of ACK."""

    group_name: str
    msg_id: int


class Query(msgspec.Struct, frozen=True):
    """The body of QUERY."""

    key: str | None = None
    tags: str | list[str] | None = None
    since: float | None = None
    limit: int | None = None

    @property
    def wanted_tags(self) -> frozenset[str]:
        return frozenset(_tags(self.tags if isinstance(self.tags, str) else ",".join(self.tags or ())))

    @property
    def wanted(self) -> int:
        return min(QUERY_MAX, max(1, QUERY_MAX if self.limit is None else self.limit))


class Discover(msgspec.Struct, frozen=True):
    """The body of DISCOVER."""

    text: str | None = None
    semantic: str | None = None
    limit: int | None = None
    page: int | None = None


_Body = TypeVar("_Body", bound=msgspec.Struct)
_NOTHING = (b"", b"{}", b'""', b"null")


def checked_json(payload: bytes) -> bytes:
    """Refuse JSON that is too long or too deeply nested, before it is decoded."""
    if len(payload) > JSON_BYTES_MAX:
        raise Mq9Error(400, f"the body of this call has at most {JSON_BYTES_MAX} bytes")
    if is_nested_deeper(payload, JSON_DEPTH_MAX):
        raise Mq9Error(400, f"the body is nested too deeply: at most {JSON_DEPTH_MAX} levels")
    return payload


def body(payload: bytes, kind: type[_Body]) -> _Body:
    """Decode the JSON body of a call. An empty body is an empty object."""
    checked_json(payload)
    try:
        return msgspec.json.decode(b"{}" if payload.strip() in _NOTHING else payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Mq9Error(400, f"the body does not fit this call: {error}") from error


def card(payload: bytes) -> dict[str, Any]:
    """Decode the card or report of an agent: any JSON object that names it."""
    checked_json(payload)
    try:
        found = msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Mq9Error(400, f"the body is not a JSON object: {error}") from error
    if not agent_names(found):
        raise Mq9Error(400, "an agent needs a name or a mailbox")
    return found


def agent_names(found: dict[str, Any]) -> list[str]:
    """The names of an agent: its name first, then its mailbox."""
    named = (found.get("name"), found.get("mailbox"))
    return [name for name in named if isinstance(name, str) and name]


def checked_ttl_s(ttl: float | None) -> float:
    """A valid lifetime of a mailbox in seconds. Zero is unlimited."""
    if ttl is None:
        return DEFAULT_TTL_S
    if not 0 <= ttl <= SECONDS_MAX:
        raise Mq9Error(400, f"ttl is a number of seconds from 0 (unlimited) to {SECONDS_MAX}")
    return ttl


# ---- headers ---------------------------------------------------------------------------------------


class SendOptions(NamedTuple):
    """The options in the headers of a send."""

    priority: Priority = "normal"
    key: str = ""
    delay_s: float = 0.0
    ttl_s: float = 0.0
    tags: tuple[str, ...] = ()


PLAIN = SendOptions()


def send_options(headers: bytes) -> SendOptions:
    """Read the `mq9-` headers of a send. Returns `PLAIN` when there are none."""
    if not headers:
        return PLAIN
    found: dict[str, str] = {}
    for line in headers.decode("utf-8", "replace").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name[:4].lower() == "mq9-":
            found[name.strip().lower()] = value.strip()
    if not found:
        return PLAIN
    priority = found.get("mq9-priority", "normal").lower()
    if priority not in RANKS:
        raise Mq9Error(400, f"mq9-priority must be one of {', '.join(RANKS)}")
    key = found.get("mq9-key", "")
    if len(key) > KEY_CHARS_MAX:
        raise Mq9Error(400, f"mq9-key has at most {KEY_CHARS_MAX} characters")
    return SendOptions(
        cast("Priority", priority),
        key,
        _seconds(found, "mq9-delay"),
        _seconds(found, "mq9-ttl"),
        _tags(found.get("mq9-tags", "")),
    )


def _seconds(found: dict[str, str], name: str) -> float:
    text = found.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= SECONDS_MAX:
        raise Mq9Error(400, f"{name} is a number of seconds")
    return seconds


def _tags(text: str) -> tuple[str, ...]:
    tags = tuple(tag.strip() for tag in text.split(",") if tag.strip())
    if len(tags) > TAGS_MAX:
        raise Mq9Error(400, f"a message has at most {TAGS_MAX} tags")
    return tags
