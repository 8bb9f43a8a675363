"""The bus file format: YAML documents that a person can read and that no message body can forge.

Rule 1: a record starts at a separator line `---` that is followed by a header. The header begins with
        `msg_id: ` (as conductor-loop and postroom write it), or with another YAML key before `msg_id:`.
Rule 2: a separator directly after a checksum line closes a header and never starts a record, even when the
        body begins like a header. Separator lines in bodies are escaped, so no body can forge a record.
Rule 3: postroom writes both `body_bytes` and `crc` into every record. A record with only one of them, or with
        a wrong checksum, is damaged: it is reported, skipped and left in place.
Rule 4: a record with neither is foreign (written by conductor-loop): its body extends to the next record.
Rule 5: an incomplete record at the end of the data is not reported as damage: its writer may still be active.
"""

import json
import operator
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, groupby, repeat
from typing import Any

import msgspec

from postroom.core.formats.foreign_bus import (
    HEADER_BYTES_MAX,
    PLAIN_LAYOUT,
    DamagedRecord,
    foreign_message,
    legacy_message,
    plain_message,
    plain_pattern,
)
from postroom.core.formats.ids import SEQUENCE_DIGITS, SEQUENCE_MODULUS, bus_id, second_stems
from postroom.core.names import plain
from postroom.core.times import NANOS_PER_S
from postroom.errors import InvalidMessage
from postroom.message import BusMessage, Damage

FIELDS_BYTES_MAX = HEADER_BYTES_MAX - 256  # the rest holds the id, the time, the length and the checksum
BODY_BYTES_MAX = 64 * 1024 * 1024
RECORD_BYTES_MAX = HEADER_BYTES_MAX + BODY_BYTES_MAX

_COMMON_BYTES_MAX = 512  # longer type, project, task and run lines are not cached

START = b"---\nmsg_id: "
MARKER = b"\n" + START
CHECKSUM_LINE_BYTES = len(b"\ncrc: 01234567")
OPENING_BYTES = 256  # identify a record that does not begin with `START` and its id
_ACCEPTED_AFTER_BODY = b"\n-"  # a dash: the newline is missing and the next record's separator follows
_SEPARATOR = b"---\n"
_ID_KEY = b"msg_id: "
_CHECKSUM_LINE = re.compile(rb"(?:\A|\n)crc: [0-9a-f]{8}")

# A separator line, the first line of a header, and the keys that identify a header.
_SEPARATOR_LINE = re.compile(rb"---\r?\n")
_NEXT_SEPARATOR = re.compile(rb"\n---\r?\n")
_NEXT_OPENING = re.compile(rb"""\n---\r?\n(?=[A-Za-z_"'{#%])""")
_FIRST_LINE = re.compile(rb"""["']?[A-Za-z_][\w-]*["']?[ \t]*:(?=[ \t\r\n])|[{#%]""")
_ID_CLAIM = re.compile(rb"""(?m)^[ \t{?]*["']?msg_id["']?[ \t]*:""")
_FIELD_CLAIM = re.compile(rb"(?m)^(ts|type|project_id):[ \t]")
_FIELDS_CLAIMED_MIN = 2
_DAMAGED_ID_LINE = re.compile(rb"(?m)^msg_id: ")  # matches even when the separator line before it is damaged

# A body line that looks like a separator, and the same line after escaping.
_BARE_SEPARATOR = re.compile(rb"(?m)^---\r*$")
_SEPARATOR_LIKE = re.compile(rb"(?m)^---(?= *\r*$)")
_ESCAPED = re.compile(rb"(?m)^--- (?= *\r*$)")
_ESCAPE_LINE = "body_escape: dash-space\n"

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
_YAML_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_NEEDS_ESCAPE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_EVERYDAY_HEADER = ("type", "project_id", "task_id", "run_id")
_EVERYDAY_KEYWORDS = (*_EVERYDAY_HEADER, "body")
_everyday_header = operator.itemgetter(*_EVERYDAY_HEADER)
_ID_START = len("msg_id: ")
_ID_END = len("msg_id: MSG-20260205-143052-000123456-PID12345-0042")
_UTF8_BYTES_MAX = 4  # per character
_NEWLINE = 0x0A

_OUR_LAYOUT = (
    rb"---\nmsg_id: ([^\n]+)\nts: ([^\n]+)\n"
    rb"(type: [^\n]+\nproject_id: [^\n]+\ntask_id: [^\n]+\nrun_id: [^\n]+\n)"
    rb"(?:parents:\n((?:  - [^\n]+\n)+))?(?:attachment_path: ([^\n]+)\n)?(body_escape: dash-space\n)?"
    rb"body_bytes: (\d{1,9})\ncrc: ([0-9a-f]{8})\n---\n"
)
_OURS = re.compile(_OUR_LAYOUT)
_OURS_NEXT = re.compile(b"\n" + _OUR_LAYOUT)  # after another record: a blank line separates the two
_MSG_ID, _CRC = 1, 8  # group numbers in both patterns


# ---- writing ---------------------------------------------------------------------------------


Draft = tuple[str, bytes, str]
"""A validated message: its header lines, its stored body, and the timestamp set by the caller, or "".

The id and the default timestamp are assigned later, under the file lock."""


def draft(
    kind: str,
    project_id: str,
    task_id: str,
    run_id: str,
    parents: Iterable[str],
    attachment_path: str,
    body: str,
    preset_ts: str = "",
) -> Draft:
    """Validate a message and encode everything except its id and timestamp."""
    try:
        stored = body.encode()
    except (UnicodeEncodeError, AttributeError):
        stored = _encode_unusual(body)
    try:
        fields = _common_fields(kind, project_id, task_id, run_id)
    except TypeError:  # an unhashable argument is not text: the uncached call names it in its error
        fields = _common_fields.__wrapped__(kind, project_id, task_id, run_id)
    if parents or attachment_path:
        fields += _parents_field(parents) if parents else ""
        fields += f"attachment_path: {_scalar('attachment', attachment_path)}\n" if attachment_path else ""
        _checked_size(fields)
    if "---" in body and _SEPARATOR_LIKE.search(stored):  # `in` is faster on text than on bytes
        stored = _SEPARATOR_LIKE.sub(b"--- ", stored)
        fields += _ESCAPE_LINE
    if len(stored) > BODY_BYTES_MAX:
        raise InvalidMessage(f"the body is longer than {BODY_BYTES_MAX} bytes: attach a file instead")
    return fields, stored, preset_ts


def encode(message: Draft, msg_id: str, ts: str, before: bytes = b"") -> bytes:
    """The bytes of one record, after `before`, which separates it from the previous record."""
    fields, body, preset_ts = message
    head = f"msg_id: {msg_id}\nts: {preset_ts or ts}\n{fields}body_bytes: {len(body)}\n".encode()
    end = b"" if body and body[-1] == _NEWLINE else b"\n"
    return b"%b---\n%bcrc: %08x\n---\n%b%b" % (before, head, zlib.crc32(head + body), body, end)


def encode_next(
    message: Draft, epoch_ns: int, process: str, sequence: int, last: str, before: bytes = b""
) -> tuple[str, bytes]:
    """The next id and its record: `bus_id` and `encode` merged into one pass, for the speed of appends."""
    fields, body, preset_ts = message
    in_id, in_ts = second_stems(epoch_ns // NANOS_PER_S)
    digits = str(epoch_ns)
    head = (
        f"msg_id: {in_id}{digits[-9:]}-{process}{str(SEQUENCE_MODULUS + sequence)[-SEQUENCE_DIGITS:]}\n"
        f"ts: {in_ts}{digits[-9:-3]}Z\n{fields}body_bytes: {len(body)}\n"
    )
    msg_id = head[_ID_START:_ID_END]
    if preset_ts or msg_id <= last or epoch_ns < NANOS_PER_S:
        msg_id, ts = bus_id(epoch_ns, process, sequence, last)
        return msg_id, encode(message, msg_id, ts, before)
    raw = head.encode()
    end = b"" if body and body[-1] == _NEWLINE else b"\n"
    return msg_id, b"%b---\n%bcrc: %08x\n---\n%b%b" % (before, raw, zlib.crc32(raw + body), body, end)


class DraftBatch(msgspec.Struct, frozen=True):
    """Drafts stored by column: processing a whole column at once is much faster than message by message."""

    runs: list[tuple[str, str, int]]
    """Header lines, preset timestamp, and the number of consecutive messages that share them."""
    bodies: list[bytes]


def batch(drafts: Iterable[Draft]) -> DraftBatch:
    runs, bodies = [], []
    for fields, body, preset_ts in drafts:
        runs.append((fields, preset_ts, 1))
        bodies.append(body)
    return DraftBatch(runs, bodies)


def everyday_batch(messages: list[Mapping[str, Any]]) -> DraftBatch | None:
    """A batch of messages that all have the usual keywords and a body without `---`; None for any other.

    Such a batch is validated as a whole, which takes half the time. Otherwise the caller uses `draft`.
    """
    try:
        if set(map(len, messages)) != {len(_EVERYDAY_KEYWORDS)}:
            return None
        texts = [message["body"] for message in messages]
        text = "\n".join(texts)
        if "---" in text or len(text) > BODY_BYTES_MAX // _UTF8_BYTES_MAX:
            return None
        runs = [
            (_common_fields(*header), "", len(list(run)))
            for header, run in groupby(map(_everyday_header, messages))
        ]
        return DraftBatch(runs, [text.encode() for text in texts])
    except (KeyError, TypeError, UnicodeEncodeError):
        return None


def encode_batch(messages: DraftBatch, msg_ids: list[str], ts: str, before: bytes = b"") -> bytes:
    """The bytes of several records, each as `encode` writes it, separated by blank lines."""
    bodies = messages.bodies
    middles = chain.from_iterable(
        repeat(f"\nts: {preset_ts or ts}\n{fields}body_bytes: ", count)
        for fields, preset_ts, count in messages.runs
    )
    heads = [
        f"msg_id: {msg_id}{middle}{len(body)}\n".encode()
        for msg_id, middle, body in zip(msg_ids, middles, bodies, strict=True)
    ]
    crcs = map(zlib.crc32, map(operator.add, heads, bodies))
    crc_digits = struct.pack(f">{len(bodies)}I", *crcs).hex("|", 4)
    crc_lines = ("crc: " + crc_digits.replace("|", "\n---\n|crc: ") + "\n---\n").encode().split(b"|")
    # Each end also holds the separator of the next record; the last one has no next record.
    ends = [b"\n---\n" if body and body[-1] == _NEWLINE else b"\n\n---\n" for body in bodies]
    ends[-1] = ends[-1][: -len(b"\n---\n")]
    pieces = zip(heads, crc_lines, bodies, ends, strict=True)
    return b"".join((before, b"---\n", *chain.from_iterable(pieces)))


def _encode_unusual(body: str) -> bytes:
    """Encode a body with surrogate escapes, which stand for bytes that are not UTF-8, as in file names."""
    if not isinstance(body, str):
        raise InvalidMessage(f"the body must be text, not {type(body).__name__}")
    try:
        raw = body.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raw = b""
    if raw.decode("utf-8", "surrogateescape") != body:
        raise InvalidMessage("the body holds lone surrogates, which are not Unicode text")
    return raw


@lru_cache(maxsize=1024)
def _common_fields(kind: str, project_id: str, task_id: str, run_id: str) -> str:
    return _checked_size(
        f"type: {_scalar('type', kind, required=True)}\n"
        f"project_id: {_scalar('project_id', project_id, required=True)}\n"
        f"task_id: {_scalar('task_id', task_id)}\n"
        f"run_id: {_scalar('run_id', run_id)}\n"
    )


def _checked_size(fields: str) -> str:
    if len(fields.encode()) > FIELDS_BYTES_MAX:
        raise InvalidMessage(
            f"the header is longer than {FIELDS_BYTES_MAX} bytes: put long text into the body"
        )
    return fields


def _parents_field(parents: Iterable[str]) -> str:
    if isinstance(parents, str):
        raise InvalidMessage("parents must be a list of message ids, not a single text")
    try:
        items = [f"  - {_scalar('parent', parent, required=True)}\n" for parent in parents]
    except TypeError:
        raise InvalidMessage(f"parents must be a list of message ids, not {type(parents).__name__}") from None
    # An empty iterator is only noticed here. A `parents:` key without items would read as damage.
    return "parents:\n" + "".join(items) if items else ""


def _scalar(field: str, text: str, *, required: bool = False) -> str:
    """One YAML scalar on one line, quoted unless every YAML reader returns it unchanged."""
    if not isinstance(text, str):
        raise InvalidMessage(f"{field} must be text, not {type(text).__name__}")
    if required and not text.strip():
        raise InvalidMessage(f"{field} is empty")
    text = plain(text)
    if _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{field} holds lone surrogates, which are not Unicode text") from None
    return _NEEDS_ESCAPE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(text, ensure_ascii=False))


# ---- reading ---------------------------------------------------------------------------------


class Decoded(msgspec.Struct):
    """The decoded content of one part of a bus file."""

    messages: list[BusMessage] = []
    damaged: list[Damage] = []
    consumed: int = 0
    """Number of bytes that are fully decoded. The caller passes the rest again, with more data."""
    starts: list[int] = []
    """File offset of each message."""
    last_opening: bytes = b""
    """The first bytes of the last record, unless they are `START` and its id."""
    legacy_line: int | None = None
    """Number of lines read before the first record; None once the first record was found."""
    unchecked: int = 0
    """Number of messages without a checksum."""
    held_back: bool = False
    """The data ends with a foreign record that may still grow; see `settled_tail`."""


class _Unfinished(Exception):
    """The data ends inside the record."""


class _UnendedForeign(_Unfinished):
    """The data ends inside a foreign record. Its length is unknown, so it may still grow."""


def decode(
    data: bytes,
    *,
    offset: int = 0,
    legacy_line: int | None = None,
    at_file_end: bool = True,
    settled_tail: bool = True,
) -> Decoded:
    """Decode `data`, which starts at a record, or at the start of the file when `legacy_line` is 0.

    `settled_tail`: no writer is active, so a foreign record at the end of the file is complete.
    """
    out = Decoded(legacy_line=legacy_line)
    position = 0
    if legacy_line is not None:
        position = _decode_legacy(data, offset, out, at_file_end=at_file_end)
    while position < len(data):
        position = _decode_ours(data, position, offset, out)
        start = _next_start(data, position, at_file_end)
        if start < 0:
            break
        if start - position > 1 and data[position:start].strip():
            out.damaged.append(Damage(offset + position, start - position, "not a record"))
        out.consumed = start
        position = _decode_any(data, start, offset, out, at_file_end, settled_tail)
        if position < 0:
            break
        out.consumed = position
    if not at_file_end and len(data) - out.consumed > RECORD_BYTES_MAX:  # so that memory stays bounded
        end = len(data) - len(MARKER)
        out.damaged.append(Damage(offset + out.consumed, end - out.consumed, "no record start found"))
        out.consumed = end
    return out


def _decode_any(
    data: bytes, start: int, offset: int, out: Decoded, at_file_end: bool, settled_tail: bool
) -> int:
    """Decode or skip the record at `start`; returns its end, or -1 when more data is needed.

    Consecutive plain foreign records are decoded together.
    """
    try:
        return _decode_record(data, start, offset, out, at_file_end, settled_tail)
    except _UnendedForeign:
        return -1
    except _Unfinished:
        if _start_after(data, start, at_file_end) < 0:
            return -1
        reason = "cut short"
    except DamagedRecord as error:
        reason = str(error)
    following = _start_after(data, start, at_file_end)
    if following < 0 and not (at_file_end and data.endswith(b"\n")):
        return -1
    end = following if following >= 0 else len(data)
    out.damaged.append(Damage(offset + start, end - start, reason))
    return end


def _decode_ours(data: bytes, position: int, offset: int, out: Decoded) -> int:
    """Decode consecutive complete records written by postroom: the fast path for most files.

    Returns the end of the last one. `_decode_any` handles what follows.
    """
    messages, starts = out.messages, out.starts
    while match := _OURS_NEXT.match(data, position):
        try:
            message, end = _ours(data, match)
        except (_Unfinished, DamagedRecord):
            break
        messages.append(message)
        starts.append(offset + position + 1)
        position = end
    if position > out.consumed:
        out.consumed = position
        out.last_opening = b""
    return position


def _next_start(data: bytes, position: int, at_file_end: bool, floor: int | None = None) -> int:
    """Offset of the first record start at or after `position`; -1 when there is none, or none yet.

    Bytes before `floor` (default: `position`) belong to an earlier record and are not examined.
    """
    if floor is None:
        if data.startswith(START, position):
            return position  # directly after a complete record, even when the newline between them is lost
        floor = position
        if not position and _SEPARATOR_LINE.match(data) and _opens_record(data, 0, at_file_end):
            return 0
    search_from = max(position - 1, 0)
    while found := _NEXT_OPENING.search(data, search_from):
        marker = search_from = found.start()
        search_from += 1
        if marker - CHECKSUM_LINE_BYTES >= floor and closes_header(data, marker):
            continue
        opens = _opens_record(data, marker + 1, at_file_end)
        if opens is None:
            return -1
        if opens:
            return marker + 1
    return -1


def _start_after(data: bytes, start: int, at_file_end: bool) -> int:
    """Offset of the record after the unreadable record at `start`; -1 when there is none."""
    try:
        body_start = _header_closing(data, start, at_file_end).end()
    except (_Unfinished, DamagedRecord):
        return _next_start(data, start + len(_SEPARATOR), at_file_end, start)
    return _next_start(data, body_start, at_file_end, body_start)


def _opens_record(data: bytes, start: int, at_file_end: bool) -> bool | None:
    """Whether a header follows the separator line at `start`; None when the data ends too early.

    An unreadable header counts as one: it is reported as damage, not added to the previous body.
    """
    begin = data.index(b"\n", start) + 1
    if data.startswith(_ID_KEY, begin):
        return True
    closing = _NEXT_SEPARATOR.search(data, begin - 1, begin + HEADER_BYTES_MAX)
    if closing is None and not at_file_end and len(data) - begin < HEADER_BYTES_MAX:
        return None
    header = data[begin : closing.start() + 1 if closing is not None else begin + HEADER_BYTES_MAX]
    if not _FIRST_LINE.match(header):
        return False
    if _ID_CLAIM.search(header):
        return True
    return closing is not None and len(set(_FIELD_CLAIM.findall(header))) >= _FIELDS_CLAIMED_MIN


def opens_like_bus(data: bytes) -> bool:
    """Whether a file with these first bytes starts with a record."""
    return _SEPARATOR_LINE.match(data) is not None and bool(_opens_record(data, 0, at_file_end=True))


def may_be_bus(data: bytes) -> bool:
    """Whether a file with these first bytes can be a bus file rather than some other file.

    True for blank bytes, the start of a record (even torn or damaged), or a legacy line.
    """
    begun = data.lstrip()
    return (
        begun.startswith(b"\0")  # a power cut can leave NUL bytes in place of a record
        or may_grow_into_record(begun)
        or _DAMAGED_ID_LINE.search(begun) is not None
        or any(legacy_message(line, 0) is not None for line in begun.split(b"\n"))
    )


def may_grow_into_record(rest: bytes) -> bool:
    """Whether these last bytes of a file are blank or the beginning of a record."""
    begun = rest.lstrip(b"\r\n")
    return START.startswith(begun[: len(START)]) or (
        _SEPARATOR_LINE.match(begun) is not None and bool(_opens_record(begun, 0, at_file_end=True))
    )


def closes_header(data: bytes, marker: int) -> bool:
    """Whether the separator at `marker` closes a header of postroom: a checksum line precedes it."""
    end = marker - data.endswith(b"\r", 0, marker)
    if data.endswith(b"\n", 0, end):
        return False  # postroom writes a blank line before every record
    return _CHECKSUM_LINE.fullmatch(data, max(0, end - CHECKSUM_LINE_BYTES), end) is not None


def _decode_record(
    data: bytes, start: int, offset: int, out: Decoded, at_file_end: bool, settled_tail: bool
) -> int:
    match = _OURS.match(data, start)
    if match is not None:
        message, end = _ours(data, match)
    elif (plain_end := decode_plain(data, start, offset, out)) > start:
        return plain_end
    else:
        message, end, checked = _foreign(data, start, at_file_end)
        if end == len(data) and not settled_tail and not checked:
            out.held_back = True
            raise _UnendedForeign
        out.unchecked += not checked
    out.messages.append(message)
    out.starts.append(offset + start)
    out.last_opening = b"" if data.startswith(START, start) else data[start : start + OPENING_BYTES]
    return end


def _ours(data: bytes, match: re.Match[bytes]) -> tuple[BusMessage, int]:
    msg_id, ts, fields, parents, attachment, escaped, size, crc = match.groups()
    body_start = match.end()
    body_end = body_start + int(size)
    if body_end - body_start > BODY_BYTES_MAX:
        raise DamagedRecord(f"the body length is over {BODY_BYTES_MAX} bytes")
    body = data[body_start:body_end]
    end = body_end if body.endswith(b"\n") else body_end + 1
    if end > len(data):
        raise _Unfinished
    if end > body_end and data[body_end] not in _ACCEPTED_AFTER_BODY:
        end = body_end  # the message is complete; the byte after it is separate damage
    head = data[match.start(_MSG_ID) - len(b"msg_id: ") : match.start(_CRC) - len(b"crc: ")]
    if zlib.crc32(head + body) != int(crc, 16):
        # A body never holds a record start. One inside means that its writer was killed and others appended.
        inside = _next_start(data[:end], body_start, at_file_end=True, floor=body_start)
        raise DamagedRecord("cut short" if 0 <= inside < end else "the checksum does not match")
    if b"---" in body and _BARE_SEPARATOR.search(body):
        # Postroom escapes these lines. This record was forged, so that a backward reader finds a false start.
        raise DamagedRecord("a record starts inside it")
    if escaped is not None:
        body = _ESCAPED.sub(b"---", body)
    try:
        return BusMessage(
            _text(msg_id),
            _moment(ts),
            *(_common_texts(fields) if len(fields) <= _COMMON_BYTES_MAX else _texts(fields)),
            [_text(line[4:]) for line in parents.splitlines()] if parents is not None else [],
            _text(attachment) if attachment is not None else "",
            body.decode("utf-8", "surrogateescape"),
        ), end
    except (ValueError, InvalidMessage) as error:
        raise DamagedRecord(f"a header line cannot be read: {error}") from error


def _texts(fields: bytes) -> tuple[str, str, str, str]:
    """The values of `type`, `project_id`, `task_id` and `run_id`."""
    kind, project, task, run = (_text(line.partition(b": ")[2]) for line in fields[:-1].split(b"\n"))
    return kind, project, task, run


# Few tasks write many messages, so the same four lines repeat.
_common_texts = lru_cache(maxsize=1024)(_texts)


def _text(raw: bytes) -> str:
    if raw[:1] != b'"':
        return raw.decode()
    value = json.loads(raw)
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _moment(raw: bytes) -> datetime:
    moment = datetime.fromisoformat(raw.decode())
    if moment.tzinfo is not UTC:
        raise ValueError("not a UTC time")
    return moment


# ---- foreign records: written by conductor-loop ----------------------------------------------------


def decode_plain(data: bytes, start: int, offset: int, out: Decoded) -> int:
    """Decode consecutive records in conductor-loop's plain layout without a YAML parser.

    Returns the start of the first record with another layout, or of the last record in the data.
    """
    messages, starts = out.messages, out.starts
    before, layout = len(messages), plain_pattern(PLAIN_LAYOUT)
    while match := layout.match(data, start, start + HEADER_BYTES_MAX):
        body_start = match.end()
        if body_start - start > HEADER_BYTES_MAX - len(_ID_KEY):
            break  # the pattern could not examine the start of the body
        marker = data.find(b"\n---", body_start - 1)
        if not data.startswith(b"\nmsg_id: ", marker + 4) or marker < 0:
            break
        if data.startswith(b"\ncrc: ", max(0, marker - CHECKSUM_LINE_BYTES)):
            break
        message = plain_message(match, data[body_start:marker].removesuffix(b"\n"))
        if message is None:
            break
        messages.append(message)
        starts.append(offset + start)
        start = marker + 1
    if start > out.consumed:
        out.unchecked += len(messages) - before
        out.consumed = start
        out.last_opening = b""
    return start


def _foreign(data: bytes, start: int, at_file_end: bool) -> tuple[BusMessage, int, bool]:
    """The message of a foreign record, its end, and whether it has a valid checksum."""
    closing = _header_closing(data, start, at_file_end)
    following = _next_start(data, closing.end(), at_file_end, closing.end())
    if following < 0 and not (at_file_end and data.endswith(b"\n")):
        raise _UnendedForeign
    end = following if following >= 0 else len(data)
    if data.startswith(b"---\r", start):
        message, checked = _converted(data[start:end], followed=following >= 0)
        return message, end, checked
    header = data[start + len(_SEPARATOR) : closing.start() + 1]
    body = data[closing.end() : end]
    if following >= 0:
        converted = data.startswith(b"---\r", following) and (body.endswith(b"\n\r\n") or body == b"\r\n")
        body = body.removesuffix(b"\r\n" if converted else b"\n")  # the blank line before the next record
    return foreign_message(header, body.removesuffix(b"\n")), end, False


def _header_closing(data: bytes, start: int, at_file_end: bool) -> re.Match[bytes]:
    """The separator line that closes the header of the record at `start`."""
    closing = _NEXT_SEPARATOR.search(data, data.index(b"\n", start))
    if closing is None and len(data) - start <= HEADER_BYTES_MAX:
        raise _Unfinished
    if closing is None:
        raise DamagedRecord("the header has no end")
    marker = closing.start()
    if data.startswith(_ID_KEY, closing.end()) and not closes_header(data, marker):
        raise DamagedRecord("the header has no end")
    if data.endswith((b"\n", b"\n\r"), start, marker):  # a blank line: writers put one before each record
        opens = _opens_record(data, marker + 1, at_file_end)
        if opens is None:
            raise _Unfinished
        if opens:
            raise DamagedRecord("the header has no end")
    return closing


def _converted(record: bytes, *, followed: bool) -> tuple[BusMessage, bool]:
    """A record whose lines end in CRLF because another program converted the line ends of the file.

    The conversion is undone before decoding; a record of postroom must then match its checksum.
    """
    record = record.replace(b"\r\n", b"\n")
    match = _OURS.match(record)
    if match is not None:
        message, end = _ours(record, match)
        if record[end:].strip():
            raise DamagedRecord("text that is not a record follows it")
        return message, True
    closing = _NEXT_SEPARATOR.search(record)
    if closing is None:
        raise DamagedRecord("the header has no end")
    body = record[closing.end() :]
    if followed:
        body = body.removesuffix(b"\n")
    return foreign_message(record[len(_SEPARATOR) : closing.start() + 1], body.removesuffix(b"\n")), False


# ---- legacy lines: `[2026-02-05 14:30:52] TYPE: text` before the first record --------------------------


def _decode_legacy(data: bytes, offset: int, out: Decoded, *, at_file_end: bool) -> int:
    """Decode the lines before the first record; returns the offset at which they end."""
    position = 0
    while out.legacy_line is not None:
        end = data.find(b"\n", position) + 1
        if end == 0:
            break
        line = data[position:end]
        if line.rstrip(b"\r\n") == b"---":
            if at_file_end and len(data) - position < len(START):
                break  # possibly the first bytes of a record
            out.legacy_line = None
            break
        if _CHECKSUM_LINE.fullmatch(line.rstrip(b"\n")):
            if len(data) - end < len(_SEPARATOR) and _SEPARATOR.startswith(data[end:]):
                break  # possibly the end of a header; the next line decides
            if data.startswith(_SEPARATOR, end):
                # A record whose first line is damaged: its body must not be read as legacy lines.
                out.damaged.append(Damage(offset + position, len(line) + len(_SEPARATOR), "not a record"))
                position = end + len(_SEPARATOR)
                out.legacy_line = None
                break
        out.legacy_line += 1
        message = legacy_message(line, out.legacy_line)
        if message is not None:
            out.messages.append(message)
            out.starts.append(offset + position)
            out.unchecked += 1
        elif line.strip():
            out.damaged.append(Damage(offset + position, len(line), "text before the first record"))
        position = end
    out.consumed = position
    return position
