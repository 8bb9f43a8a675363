r"""The NATS protocol as bytes and commands: no sockets, both directions, any chunking.

Rule 1: a stream consists of control lines and bodies. The length in the control line delimits the body,
        whatever the body contains.
Rule 2: verbs are case-insensitive, any number of blanks and tabs separates, and `\n` alone ends a line too.
Rule 3: at most one frame of the allowed size is buffered. The first frame that breaks the protocol yields a
        `ProtocolFault`, and nothing is read after it.
Rule 4: consecutive frames that differ in their bodies only become one command with many bodies. Frames of one
        length are verified column by column, which is much cheaper than frame by frame. Frames of several
        lengths are split at the line ends, and accepted as far as each length fits its body.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from struct import iter_unpack
from typing import Any, ClassVar

import msgspec

from postroom.core.door import leaving

CONTROL_LINE_BYTES_MAX = 4096
CONNECT_BYTES_MAX = 64 * 1024  # CONNECT and INFO carry JSON: tokens, certificates, lists of servers
PAYLOAD_BYTES_MAX = 1024 * 1024  # the default, and what clients assume
HEADS_KEPT_MAX = 2048  # parsed control lines: the same subject and size often repeat
RUN_FRAMES_FIRST = 16  # frames in the first attempt at a run of equal frames,
RUN_GROWTH = 4  # and the factor for the following attempts
MIXED_FRAMES_MAX = 512  # frames of several sizes that are split at a time
ANY_SIZE = -1

CRLF = b"\r\n"
PING, PONG, OK = b"PING\r\n", b"PONG\r\n", b"+OK\r\n"
NO_RESPONDERS = b"NATS/1.0 503\r\nNats-Subject: %b\r\n\r\n"

UNKNOWN_OPERATION = "Unknown Protocol Operation"
PAYLOAD_TOO_LARGE = "Maximum Payload Violation"
LINE_TOO_LONG = "maximum control line exceeded"

_SIZE = re.compile(rb"[0-9]{1,9}")


class ControlLine(msgspec.Struct, frozen=True, gc=False):
    """The control line of a frame with a body."""

    subject: bytes
    reply: bytes
    header_bytes: int
    """Bytes of headers at the start of the body; -1 for PUB and MSG, which have none."""
    size: int
    """`ANY_SIZE` for bodies of several sizes."""
    sid: bytes = b""
    """The subscription, in lines of a server."""
    before_sid: bytes = b""
    after_sid: bytes = b""
    """In lines of a client: the parts around the sid of the MSG or HMSG line for its subscribers. With
    `ANY_SIZE` the size is missing."""


class Messages(msgspec.Struct, frozen=True, gc=False):
    """PUB and HPUB of a client, MSG and HMSG of a server. Each body begins with its headers."""

    head: ControlLine
    bodies: list[bytes]


class Ping(msgspec.Struct, frozen=True, gc=False):
    """PING."""


class Pong(msgspec.Struct, frozen=True, gc=False):
    """PONG."""


class Okay(msgspec.Struct, frozen=True, gc=False):
    """+OK."""


class Connect(msgspec.Struct, frozen=True, gc=False):
    """CONNECT, with its JSON undecoded."""

    options: bytes


class Info(msgspec.Struct, frozen=True, gc=False):
    """INFO, with its JSON undecoded."""

    options: bytes


class Error(msgspec.Struct, frozen=True, gc=False):
    """-ERR of a server, without its quotes."""

    text: str


class Subscribe(msgspec.Struct, frozen=True, gc=False):
    """SUB."""

    subject: bytes
    group: bytes
    sid: bytes


class Unsubscribe(msgspec.Struct, frozen=True, gc=False):
    """UNSUB. `after` is the number of messages since SUB after which it ends; 0 is at once."""

    sid: bytes
    after: int


class ProtocolFault(msgspec.Struct, frozen=True, gc=False):
    """The peer broke the protocol. `text` is sent to it before the connection ends."""

    text: str


Command = Messages | Ping | Pong | Okay | Connect | Info | Error | Subscribe | Unsubscribe | ProtocolFault


class ProtocolBroken(Exception):
    """A line breaks the protocol. The first argument is sent to the peer."""


class ConnectOptions(msgspec.Struct, frozen=True, rename={"password": "pass"}):
    """The options of CONNECT. Missing options have the defaults of nats-server."""

    verbose: bool = True
    echo: bool = True
    headers: bool = False
    no_responders: bool = False
    name: str = ""
    user: str = ""
    password: str = ""
    auth_token: str = ""


_decode_options = msgspec.json.Decoder(ConnectOptions).decode
_encode_json = msgspec.json.Encoder().encode


def connect_options(options: bytes) -> ConnectOptions:
    """Decode the JSON of a CONNECT. Raises `ProtocolBroken` when it is invalid."""
    try:
        return _decode_options(options)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProtocolBroken(UNKNOWN_OPERATION) from None


# ---- reading -----------------------------------------------------------------------------------------


class _Reader:
    """Splits a stream into commands. The subclasses parse the lines of clients and of servers."""

    __slots__ = ("_broken", "_held", "_payload_bytes_max", "_wanted", "has_more")

    _head: Callable[[bytes], ControlLine | None]
    """Parses a control line; None when no body follows it."""
    _heads: ClassVar[dict[bytes, ControlLine]]
    """Recently parsed control lines, shared by all readers of this kind. Such lines hold no secrets."""
    _mixable: ClassVar[dict[bytes, tuple[int, ControlLine]]]
    """The same by the line without its line end: the size, and the control line for any size."""
    _rows: ClassVar[dict[tuple[bytes, bytes], ControlLine]]
    """The control lines for any size."""
    _other: Callable[[bytes], Command]
    """Parses every other line."""

    def __init__(self, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._held = bytearray()
        """The start of an incomplete frame."""
        self._wanted = 0
        """Bytes needed before it is worth parsing again; 0 when no frame is incomplete."""
        self._broken = False
        self.has_more = False
        """Whether the buffered bytes may hold complete commands."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are buffered: of the incomplete frame, and others while `has_more`."""
        return len(self._held)

    def keep(self, data: bytes) -> None:
        """Buffer bytes for the next `feed`."""
        if not self._broken:
            self._held += data
            self.has_more = True

    def feed(self, data: bytes = b"", commands_max: int = sys.maxsize) -> list[Command]:
        """The commands that are complete with these bytes; none after a `ProtocolFault`.

        After `commands_max` commands, or a few more, the rest waits for the next call.
        """
        if self._broken:
            return []
        self.has_more = False
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return []
            data = bytes(self._held)
            self._held.clear()
            self._wanted = 0
        commands: list[Command] = []
        try:
            done = self._read(data, commands, commands_max)
        except ProtocolBroken as error:
            self._broken = True
            commands.append(ProtocolFault(error.args[0]))
            return commands
        if done < len(data):
            self._held += data[done:]
            if len(commands) >= commands_max:
                self.has_more, self._wanted = True, 0
        return commands

    def _read(self, data: bytes, commands: list[Command], commands_max: int) -> int:
        """Append the commands in `data`. Returns the offset of the first frame that is not among them."""
        position, end = 0, len(data)
        heads, find = self._heads, data.find
        head: ControlLine | None = None
        bodies: list[bytes] = []
        mixed = True
        while position < end and len(commands) < commands_max:
            after_line = find(b"\n", position, position + CONTROL_LINE_BYTES_MAX) + 1
            line = data[position:after_line]
            found = heads.get(line) or self._new_head(line)
            if found is None:
                after_line = self._read_other(data, position, after_line, commands)
                if not after_line:
                    break
                position, head = after_line, None
                continue
            after_body = after_line + found.size
            after_frame = after_body + 2
            if after_frame > end or after_body > after_line + self._payload_bytes_max:
                if found.size > self._payload_bytes_max:
                    raise ProtocolBroken(PAYLOAD_TOO_LARGE)
                self._wanted = after_frame - position
                break
            if data[after_body:after_frame] != CRLF:
                raise ProtocolBroken(UNKNOWN_OPERATION)
            body = data[after_line:after_body]
            if found is head:
                bodies.append(body)
                position = _read_run(data, after_frame, line, found.size, bodies)
                continue
            if mixed and head is not None and end - position >= RUN_FRAMES_FIRST * (after_frame - position):
                taken = self._read_mixed(data, position, commands)
                mixed = taken > after_frame  # when one attempt gained nothing, do not try again
                position, head = taken, None
                continue
            head, bodies = found, [body]
            commands.append(Messages(head, bodies))
            position = after_frame
        return position

    def _read_mixed(self, data: bytes, position: int, commands: list[Command]) -> int:
        """Append frames whose control lines were all parsed recently. Returns the offset of their end."""
        parts = data[position:].split(CRLF, 2 * MIXED_FRAMES_MAX)
        parts.pop()  # the bytes after the last line end
        known, most = self._mixable.get, self._payload_bytes_max
        row: ControlLine | None = None
        bodies: list[bytes] = []
        for line, body in zip(parts[::2], parts[1::2], strict=False):
            size, any_size = known(line, _UNKNOWN)
            if size != len(body) or size > most:
                break
            if any_size is row:
                bodies.append(body)
            else:
                row, bodies = any_size, [body]
                commands.append(Messages(any_size, bodies))
            position += len(line) + size + 2 * len(CRLF)
        return position

    def _new_head(self, line: bytes) -> ControlLine | None:
        """Parse and remember a control line; None when no body follows it."""
        head = self._head(line) if line else None
        if head is None:
            return None
        if len(self._heads) >= HEADS_KEPT_MAX:
            for kept in (self._heads, self._mixable, self._rows):
                kept.clear()
        self._heads[line] = head
        # Not with a reply subject, which differs each time, nor with headers, which contain line ends.
        if line.endswith(CRLF) and not head.reply and head.header_bytes < 0:
            self._mixable[line.removesuffix(CRLF)] = head.size, self._any_size(head)
        return head

    def _any_size(self, head: ControlLine) -> ControlLine:
        """The control line for bodies of any size: the same object for all lines that differ in size only."""
        after_sid = head.after_sid[: head.after_sid.rfind(b" ") + 1]
        made = ControlLine(head.subject, b"", -1, ANY_SIZE, head.sid, head.before_sid, after_sid)
        return self._rows.setdefault((head.subject, head.sid), made)

    def _read_other(self, data: bytes, start: int, after_line: int, commands: list[Command]) -> int:
        """Append a command without a body. Returns the offset of its end; 0 when it is incomplete."""
        if not after_line:
            longest = CONNECT_BYTES_MAX if data[start] in b"CcIi" else CONTROL_LINE_BYTES_MAX
            after_line = data.find(b"\n", start, start + longest) + 1
            if not after_line:
                if len(data) - start >= longest:
                    raise ProtocolBroken(LINE_TOO_LONG)
                self._wanted = len(data) - start + 1
                return 0
        commands.append(self._other(data[start:after_line]))
        return after_line


_UNKNOWN = -1, ControlLine(b"", b"", -1, ANY_SIZE)  # a size that no body has


def _read_run(data: bytes, position: int, line: bytes, size: int, bodies: list[bytes]) -> int:
    """Append frames with the same line and size, in growing pieces. Returns the offset of their end."""
    stride = len(line) + size + len(CRLF)
    frames = RUN_FRAMES_FIRST
    while (whole := (len(data) - position) // stride) >= RUN_FRAMES_FIRST:
        frames = min(frames, whole)
        end = position + frames * stride
        # The last frame is checked first: that rules out most sequences that are not a run.
        if not (data.startswith(line, end - stride) and _is_run(data[position:end], line, stride, frames)):
            break
        layout = f"{len(line)}x{size}s{len(CRLF)}x"
        bodies += chain.from_iterable(iter_unpack(layout, memoryview(data)[position:end]))
        position = end
        frames *= RUN_GROWTH
    return position


def _is_run(piece: bytes, line: bytes, stride: int, frames: int) -> bool:
    """Whether each frame has this line and a line end after its body, checked column by column."""
    ends = zip(range(stride - len(CRLF), stride), CRLF, strict=True)
    return all(
        piece[column::stride].count(letter) == frames for column, letter in chain(enumerate(line), ends)
    )


def _words(line: bytes, fewest: int, most: int) -> list[bytes]:
    words = line.split()
    if not fewest <= len(words) <= most:
        raise ProtocolBroken(UNKNOWN_OPERATION)
    return words


def _number(word: bytes) -> int:
    if not _SIZE.fullmatch(word):
        raise ProtocolBroken(UNKNOWN_OPERATION)
    return int(word)


def _client_head(line: bytes) -> ControlLine | None:
    """PUB subject [reply] size, HPUB subject [reply] header-size size."""
    found = _head_words(line, b"PUB", b"HPUB", 2)
    if found is None:
        return None
    (_, subject), reply, header_bytes, size = found
    before, after = message_line(subject, reply, header_bytes, size)
    return ControlLine(subject, reply, header_bytes, size, b"", before, after)


def _server_head(line: bytes) -> ControlLine | None:
    """MSG subject sid [reply] size, HMSG subject sid [reply] header-size size."""
    found = _head_words(line, b"MSG", b"HMSG", 3)
    if found is None:
        return None
    (_, subject, sid), reply, header_bytes, size = found
    return ControlLine(subject, reply, header_bytes, size, sid)


def _head_words(
    line: bytes, plain: bytes, headed: bytes, first: int
) -> tuple[list[bytes], bytes, int, int] | None:
    """The first words of a line with a body, the reply, the size of the headers, and the total size."""
    verb, _ = _verb(line)
    if verb not in (plain, headed):
        return None
    sizes = 1 if verb == plain else 2
    words = _words(line, first + sizes, first + 1 + sizes)
    size = _number(words[-1])
    header_bytes = _number(words[-2]) if verb == headed else -1
    if header_bytes > size:
        raise ProtocolBroken(UNKNOWN_OPERATION)
    return words[:first], b"".join(words[first:-sizes]), header_bytes, size


def _client_other(line: bytes) -> Command:
    verb, rest = _verb(line)
    if verb == b"SUB":
        words = _words(rest, 2, 3)
        return Subscribe(words[0], words[1] if len(words) == 3 else b"", words[-1])  # noqa: PLR2004
    if verb == b"UNSUB":
        words = _words(rest, 1, 2)  # as nats-server: without a valid number it ends at once
        return Unsubscribe(words[0], int(words[1]) if len(words) == 2 and _SIZE.fullmatch(words[1]) else 0)  # noqa: PLR2004
    return Connect(rest) if verb == b"CONNECT" else _either_other(verb, rest)


def _server_other(line: bytes) -> Command:
    verb, rest = _verb(line)
    is_error = verb == b"-ERR"
    return Error(rest.decode("utf-8", "replace").strip("'")) if is_error else _either_other(verb, rest)


def _either_other(verb: bytes, rest: bytes) -> Command:
    match verb:
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"+OK":
            return Okay()
        case b"INFO":
            return Info(rest)
    raise ProtocolBroken(UNKNOWN_OPERATION)


def _verb(line: bytes) -> tuple[bytes, bytes]:
    parts = line.split(None, 1)
    if not parts or line[:1].isspace():
        raise ProtocolBroken(UNKNOWN_OPERATION)
    return parts[0].upper(), parts[1].strip() if len(parts) > 1 else b""


class ClientReader(_Reader):
    """Reads what a client sends."""

    __slots__ = ()
    _head = staticmethod(_client_head)
    _heads: ClassVar[dict[bytes, ControlLine]] = {}
    _mixable: ClassVar[dict[bytes, tuple[int, ControlLine]]] = {}
    _rows: ClassVar[dict[tuple[bytes, bytes], ControlLine]] = {}
    _other = staticmethod(_client_other)


class ServerReader(_Reader):
    """Reads what a server sends."""

    __slots__ = ()
    _head = staticmethod(_server_head)
    _heads: ClassVar[dict[bytes, ControlLine]] = {}
    _mixable: ClassVar[dict[bytes, tuple[int, ControlLine]]] = {}
    _rows: ClassVar[dict[tuple[bytes, bytes], ControlLine]] = {}
    _other = staticmethod(_server_other)


# ---- writing -----------------------------------------------------------------------------------------


def info(options: Mapping[str, Any]) -> bytes:
    return b"INFO %b \r\n" % _encode_json(options)


def connect(options: Mapping[str, Any]) -> bytes:
    return b"CONNECT %b\r\n" % _encode_json(options)


def subscribe(subject: bytes, sid: bytes, group: bytes = b"") -> bytes:
    return b"SUB %b %b %b\r\n" % (subject, group, sid) if group else b"SUB %b %b\r\n" % (subject, sid)


def unsubscribe(sid: bytes, after: int = 0) -> bytes:
    return b"UNSUB %b %d\r\n" % (sid, after) if after else b"UNSUB %b\r\n" % sid


def publish(subject: bytes, payload: bytes, *, reply: bytes = b"", headers: bytes = b"") -> bytes:
    """PUB, or HPUB with headers, which begin with `NATS/1.0` and end with an empty line."""
    address = b"%b %b" % (subject, reply) if reply else subject
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (address, len(payload), payload)
    size = len(headers) + len(payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (address, len(headers), size, headers, payload)


def message_line(subject: bytes, reply: bytes, header_bytes: int, size: int) -> tuple[bytes, bytes]:
    """The control line of a MSG, or of an HMSG if `header_bytes` > 0: the parts before and after the sid."""
    if reply:
        reply += b" "
    if header_bytes > 0:
        return b"HMSG %b " % subject, b" %b%d %d\r\n" % (reply, header_bytes, size)
    return b"MSG %b " % subject, b" %b%d\r\n" % (reply, size)


def forwarded(head: ControlLine, bodies: list[bytes], sid: bytes, *, with_headers: bool) -> bytes:
    """The frames that a subscription gets of published bodies, of which there is at least one."""
    before, after = head.before_sid, head.after_sid
    cut = head.header_bytes
    if cut > 0 and not with_headers:
        bodies = [body[cut:] for body in bodies]
        before, after = message_line(head.subject, head.reply, -1, head.size - cut)
    line = b"".join((before, sid, after))
    if head.size == ANY_SIZE:
        return b"".join([b"%b%d\r\n%b\r\n" % (line, len(body), body) for body in bodies])
    if len(bodies) == 1:
        return b"".join((line, bodies[0], CRLF))
    return b"".join((line, (CRLF + line).join(bodies), CRLF))


def messages(subject: bytes, sid: bytes, reply: bytes, bodies: Iterable[tuple[bytes, bytes]]) -> bytes:
    """MSG for each payload without headers, HMSG for the others."""
    pieces: list[bytes] = []
    line, made_for = b"", (-1, -1)
    for headers, payload in bodies:
        sizes = len(headers), len(payload)
        if sizes != made_for:  # most are as long as the previous one
            before, after = message_line(subject, reply, sizes[0], sum(sizes))
            line, made_for = b"".join((before, sid, after)), sizes
        pieces += (line, headers, payload, CRLF)
    return b"".join(pieces)


def error(text: str) -> bytes:
    """-ERR. Most clients close the connection; see `permissions_violation`."""
    return b"-ERR '%b'\r\n" % leaving(text).replace("'", "").encode("utf-8", "replace")


def permissions_violation(what: str, subject: bytes, why: str = "") -> bytes:
    """The only -ERR after which every client keeps the connection. `what` is Subscription or Publish."""
    more = f": {why}".replace("'", "").encode("utf-8", "replace") if why else b""
    return b"-ERR 'Permissions Violation for %b to \"%b\"%b'\r\n" % (what.encode(), subject, more)
