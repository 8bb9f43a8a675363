"""Records of conductor-loop, the other writer of bus files: YAML headers, and lines of its oldest format.

Rule 1: a plain header, which conductor-loop writes, is read without a YAML parser, and exactly as by one.
Rule 2: every scalar of a header is text. There are no implicit types, no aliases and no deep nesting.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from postroom.core.times import parse_utc
from postroom.errors import InvalidMessage
from postroom.message import BusMessage

if TYPE_CHECKING:
    import yaml

HEADER_BYTES_MAX = 64 * 1024
YAML_DEPTH_MAX = 16  # conductor-loop nests three levels
_COMMON_BYTES_MAX = 512  # longer type, project, task and run lines are not cached
LEGACY_PREFIX = "LEGACY-LINE-"

_OUR_KEYS = re.compile(rb"(?m)^(?:body_bytes|crc):")
_ID_LINE = re.compile(rb"(?m)^msg_id:.*$")
_LEGACY_TYPE = re.compile(r"[A-Za-z0-9_/-]+", re.ASCII)
_LEGACY_TIME_CHARS_MAX = 64
_KNOWN_KEYS = frozenset(
    {"msg_id", "ts", "type", "project_id", "task_id", "run_id", "parents", "attachment_path"}
)

# The plain header that conductor-loop writes. YAML returns each of its keys and values unchanged: they are
# words of letters and digits, or quoted strings without escapes.
_PLAIN_KEY = rb"(?>[A-Za-z_][A-Za-z0-9_-]*|\"[ !#-\[\]-~]*\")"
_PLAIN_WORDS = rb"[A-Za-z0-9](?:(?:[A-Za-z0-9_./ -]|:(?=[A-Za-z0-9/]))*[A-Za-z0-9_./-])?"
PLAIN_VALUE = rb"(?>" + _PLAIN_WORDS + rb"|\"[ !#-\[\]-~]*\"|'[ -&(-~]*')"
_PLAIN_LIST = rb"((?:    - (?:K: V\n(?:      K: V\n)*|V\n))+)"
PLAIN_LAYOUT = (
    rb"---\nmsg_id: ([A-Za-z0-9][A-Za-z0-9_.-]*)\nts: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z)\n"
    rb"(type: V\nproject_id: V\ntask_id: V\nrun_id: V\n)(?:issue_id: (V)\n)?"
    rb"(?:parents:\nLIST)?(?:links:\nLIST)?(?:meta:\n((?:    K: V\n)+))?---\n(?!msg_id: )"
)
_PLAIN_LINE = rb"    (- |  )?(?:(K): )?(V)\n"  # one line of a list or of a mapping


class DamagedRecord(Exception):
    """A record that cannot be read, and why."""


@cache  # compiled with the first record of another writer: it takes 10 ms
def plain_pattern(layout: bytes) -> re.Pattern[bytes]:
    return re.compile(
        layout.replace(b"LIST", _PLAIN_LIST).replace(b"K", _PLAIN_KEY).replace(b"V", PLAIN_VALUE)
    )


def plain_message(match: re.Match[bytes], body: bytes) -> BusMessage | None:
    """The message with a plain header; None when its timestamp is invalid or a parent has no id."""
    msg_id, ts, fields, issue_id, parents, links, meta = match.groups()
    ids: list[str] = []
    extra: dict[str, Any] = {}
    try:
        moment = datetime.fromisoformat(ts.decode())
        if parents is not None:
            items = _plain_items(parents)
            ids, detailed = _parents(items)
            if detailed:
                extra["parents"] = items
    except (ValueError, KeyError, TypeError):
        return None
    if issue_id is not None:
        extra["issue_id"] = _plain_text(issue_id)
    if links is not None:
        extra["links"] = _plain_items(links)
    if meta is not None:
        lines = plain_pattern(_PLAIN_LINE).findall(meta)
        extra["meta"] = {_plain_text(key): _plain_text(value) for _, key, value in lines}
    return BusMessage(
        msg_id.decode(),
        moment,
        *(_common_plain_texts(fields) if len(fields) <= _COMMON_BYTES_MAX else _plain_texts(fields)),
        ids,
        "",
        body.decode("utf-8", "surrogateescape"),
        extra,
    )


def _plain_texts(fields: bytes) -> tuple[str, str, str, str]:
    kind, project, task, run = (_plain_text(line.partition(b": ")[2]) for line in fields[:-1].split(b"\n"))
    return kind, project, task, run


# Few tasks write many messages, so the same four lines repeat.
_common_plain_texts = lru_cache(maxsize=1024)(_plain_texts)


def _plain_text(raw: bytes) -> str:
    return (raw[1:-1] if raw[:1] in (b'"', b"'") else raw).decode()


def _plain_items(lines: bytes) -> list[Any]:
    """The items of a YAML list: strings, and mappings that span several lines."""
    items: list[Any] = []
    for mark, key, value in plain_pattern(_PLAIN_LINE).findall(lines):
        if not key:
            items.append(_plain_text(value))
        elif mark == b"- ":
            items.append({_plain_text(key): _plain_text(value)})
        else:
            items[-1][_plain_text(key)] = _plain_text(value)
    return items


def foreign_message(header: bytes, body: bytes) -> BusMessage:
    if _OUR_KEYS.search(header):
        raise DamagedRecord("the length and the checksum are not in their places")
    fields = yaml_header(header)
    try:
        parents, detailed = _parents(fields.get("parents"))
        extra = {key: value for key, value in fields.items() if key not in _KNOWN_KEYS}
        if detailed:
            extra["parents"] = fields["parents"]
        message = BusMessage(
            _as_text(fields["msg_id"]),
            parse_utc(_as_text(fields["ts"])),
            _as_text(fields.get("type")),
            _as_text(fields.get("project_id")),
            _as_text(fields.get("task_id")),
            _as_text(fields.get("run_id")),
            parents,
            _as_text(fields.get("attachment_path")),
            body.decode("utf-8", "surrogateescape"),
            extra,
        )
    except (KeyError, TypeError, InvalidMessage) as error:
        raise DamagedRecord(f"a header field is missing or malformed: {error}") from error
    if _ID_LINE.findall(header) != [b"msg_id: " + message.msg_id.encode("utf-8", "surrogateescape")]:
        raise DamagedRecord("the id is not written plainly, so no reader could continue from it")
    return message


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("text expected")
    return value


def _parents(value: Any) -> tuple[list[str], bool]:
    """Parent ids, from a list of ids or of objects with `msg_id`; and whether any is an object."""
    if value is None or value == "":
        return [], False
    if not isinstance(value, list):
        raise TypeError("parents is not a list")
    detailed = any(isinstance(item, dict) for item in value)
    ids = (item["msg_id"] if isinstance(item, dict) else item for item in value)
    return [_as_text(item) for item in ids if item], detailed


def yaml_header(header: bytes) -> dict[str, Any]:
    """A YAML mapping in which every scalar is text: no implicit types, aliases or deep nesting."""
    import yaml  # noqa: PLC0415 - takes 30 ms, and only records of other writers need it

    if len(header) > HEADER_BYTES_MAX:
        raise DamagedRecord(f"the header is longer than {HEADER_BYTES_MAX} bytes")
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # PyYAML can be built without its C extension
    try:
        fields = _document(yaml.parse(header, Loader=loader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedRecord("the header is not YAML") from error
    if not isinstance(fields, dict):
        raise DamagedRecord("the header is not a mapping")
    return fields


def _document(events: "Iterable[yaml.Event]") -> Any:
    """The only document of a YAML stream, built iteratively to limit its depth, with every scalar as text."""
    import yaml  # noqa: PLC0415 - see `yaml_header`

    documents: list[Any] = []
    stack: list[tuple[list[Any], bool]] = [(documents, False)]
    for event in events:
        if isinstance(event, yaml.ScalarEvent):
            stack[-1][0].append(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(stack) > YAML_DEPTH_MAX:
                raise DamagedRecord("the header is nested too deeply")
            stack.append(([], isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            items, is_mapping = stack.pop()
            stack[-1][0].append(_mapping(items) if is_mapping else items)
        elif isinstance(event, yaml.AliasEvent):
            raise DamagedRecord("the header uses aliases")
    if len(documents) > 1:
        raise DamagedRecord("the header is not YAML")
    return documents[0] if documents else None


def _mapping(items: list[Any]) -> dict[str, Any]:
    """Build a mapping from a list of key, value, key, value; a repeated key keeps its last value."""
    if not all(isinstance(key, str) for key in items[::2]):
        raise DamagedRecord("the header is not YAML")
    return dict(zip(items[::2], items[1::2], strict=True))


# ---- legacy lines: `[2026-02-05 14:30:52] TYPE: text` before the first record --------------------------


def legacy_message(raw: bytes, line_number: int) -> BusMessage | None:
    line = raw.decode("utf-8", "surrogateescape").strip()
    closing = line.find("]", 0, _LEGACY_TIME_CHARS_MAX)
    moment = _legacy_moment(line[1:closing].strip()) if line.startswith("[") and closing > 0 else None
    body = line[closing + 1 :].strip()
    if moment is None or not body:
        return None
    kind = "INFO"
    word, colon, rest = body.partition(":")
    if colon and rest.strip() and _LEGACY_TYPE.fullmatch(word.strip()):
        kind, body = word.strip().upper(), rest.strip()
    return BusMessage(f"{LEGACY_PREFIX}{line_number:09d}", moment, kind, "", "", "", [], "", body)


def _legacy_moment(text: str) -> datetime | None:
    for candidate in (text, f"{text}Z"):
        try:
            return parse_utc(candidate)
        except InvalidMessage:
            continue
    return None
