r"""The NATS protocol as bytes and commands: no sockets, both directions, any chunking.

Rule 1: what a peer sends is cut into control lines and bodies; a length rules over whatever a body contains.
Rule 2: a verb is read in any case, blanks and tabs separate in any number, and `\n` alone ends a line too.
Rule 3: nothing is kept beyond one frame of the allowed size. The first frame that breaks a rule yields a
        `Fault`, and after it nothing is read any more.
Rule 4: many frames in a row that differ in their bodies alone come as one command with many bodies. Of one
        length, they are checked column by column, which costs a fraction of looking at each. Of several,
        they are cut at the line ends, and believed as far as each length fits what lies between.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from struct import iter_unpack
from typing import Any, ClassVar

import msgspec

CONTROL_LINE_BYTES_MAX = 4096
CONNECT_BYTES_MAX = 64 * 1024  # CONNECT and INFO carry JSON: tokens, certificates, lists of servers
PAYLOAD_BYTES_MAX = 1024 * 1024  # the default, and what clients assume
HEADS_KEPT_MAX = 2048  # control lines repeat: the same subject, the same size
RUN_FRAMES_FIRST = 16  # a burst is tried on so many frames,
RUN_GROWTH = 4  # and then on so many times more
MIXED_FRAMES_MAX = 512  # of several sizes that are cut apart at a time
ANY_SIZE = -1

CRLF = b"\r\n"
PING, PONG, OK = b"PING\r\n", b"PONG\r\n", b"+OK\r\n"
HEADER_VERSION = b"NATS/1.0"
NO_RESPONDERS = b"NATS/1.0 503\r\nNats-Subject: %b\r\n\r\n"

UNKNOWN_OPERATION = "Unknown Protocol Operation"
PAYLOAD_TOO_LARGE = "Maximum Payload Violation"
LINE_TOO_LONG = "maximum control line exceeded"

_SIZE = re.compile(rb"[0-9]{1,9}")


class Head(msgspec.Struct, frozen=True, gc=False):
    """The control line of a frame with a body."""

    subject: bytes
    reply: bytes
    header_bytes: int
    """How much of the body is headers. -1 where there can be none (PUB, MSG)."""
    size: int
    """`ANY_SIZE` for bodies of several sizes."""
    sid: bytes = b""
    """Whose it is, in what a server sends."""
    before_sid: bytes = b""
    after_sid: bytes = b""
    """In what a client sends: the control line with which it is passed on, but for the sid and `ANY_SIZE`."""


class Messages(msgspec.Struct, frozen=True, gc=False):
    """PUB and HPUB from a client, MSG and HMSG from a server: bodies, headers in front, in their order."""

    head: Head
    bodies: list[bytes]


class Ping(msgspec.Struct, frozen=True, gc=False):
    """PING."""


class Pong(msgspec.Struct, frozen=True, gc=False):
    """PONG."""


class Okay(msgspec.Struct, frozen=True, gc=False):
    """+OK."""


class Connect(msgspec.Struct, frozen=True, gc=False):
    """CONNECT: JSON, not looked into yet."""

    options: bytes


class Info(msgspec.Struct, frozen=True, gc=False):
    """INFO: JSON, not looked into yet."""

    options: bytes


class Error(msgspec.Struct, frozen=True, gc=False):
    """-ERR from a server, without its quotes."""

    text: str


class Subscribe(msgspec.Struct, frozen=True, gc=False):
    """SUB."""

    subject: bytes
    group: bytes
    sid: bytes


class Unsubscribe(msgspec.Struct, frozen=True, gc=False):
    """UNSUB. `after` is how many messages since SUB are the last one; 0 is at once."""

    sid: bytes
    after: int


class Fault(msgspec.Struct, frozen=True, gc=False):
    """The peer broke a rule. `text` is what it is told before the connection ends."""

    text: str


Command = Messages | Ping | Pong | Okay | Connect | Info | Error | Subscribe | Unsubscribe | Fault


class Broken(Exception):
    """A line that breaks the protocol. The first argument is what the peer is told."""


class ConnectOptions(msgspec.Struct, frozen=True, rename={"password": "pass"}):
    """What a client says about itself. What is missing means what it means to nats-server."""

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
    """The JSON of a CONNECT; `Broken` when it is none."""
    try:
        return _decode_options(options)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Broken(UNKNOWN_OPERATION) from None


# ---- reading -----------------------------------------------------------------------------------------


class _Reader:
    """Cuts a stream into commands. What a line means is up to the two kinds below."""

    __slots__ = ("_broken", "_held", "_payload_bytes_max", "_wanted")

    _head: Callable[[bytes], Head | None]
    """Reads a control line; None when no body follows it."""
    _heads: ClassVar[dict[bytes, Head]]
    """Those read lately, by any reader of this kind. Nothing secret is in such a line."""
    _mixable: ClassVar[dict[bytes, tuple[int, Head]]]
    """The same by the line without its end: the size, and the head for any size."""
    _rows: ClassVar[dict[tuple[bytes, bytes], Head]]
    """The heads for any size."""
    _other: Callable[[bytes], Command]
    """Reads every other line."""

    def __init__(self, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._held = bytearray()
        """The beginning of a frame whose rest has not come."""
        self._wanted = 0
        """How much of it there must be before looking again is worthwhile."""
        self._broken = False

    @property
    def held_bytes(self) -> int:
        """What has come of a frame that is not complete."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Command]:
        """What is complete with these bytes. After a `Fault`, nothing."""
        if self._broken:
            return []
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return []
            data = bytes(self._held)
            self._held.clear()
        commands: list[Command] = []
        try:
            done = self._read(data, commands)
        except Broken as error:
            self._broken = True
            commands.append(Fault(error.args[0]))
            return commands
        if done < len(data):
            self._held += data[done:]
        return commands

    def _read(self, data: bytes, commands: list[Command]) -> int:
        """Append the commands in `data`; gives where the first incomplete frame begins."""
        position, end = 0, len(data)
        heads, find = self._heads, data.find
        head: Head | None = None
        bodies: list[bytes] = []
        mixed = True
        while position < end:
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
                self._check_size(found)
                self._wanted = after_frame - position
                break
            if data[after_body:after_frame] != CRLF:
                raise Broken(UNKNOWN_OPERATION)
            body = data[after_line:after_body]
            if found is head:
                bodies.append(body)
                position = _read_run(data, after_frame, line, found.size, bodies)
                continue
            if mixed and head is not None and end - position >= RUN_FRAMES_FIRST * (after_frame - position):
                taken = self._read_mixed(data, position, commands)
                mixed = taken > after_frame  # where it does not help once, it would only cost
                position, head = taken, None
                continue
            head, bodies = found, [body]
            commands.append(Messages(head, bodies))
            position = after_frame
        return position

    def _read_mixed(self, data: bytes, position: int, commands: list[Command]) -> int:
        """Take frames whose lines were all seen lately; gives where they end."""
        parts = data[position:].split(CRLF, 2 * MIXED_FRAMES_MAX)
        parts.pop()  # behind the last line end: a beginning, or nothing
        known, most = self._mixable.get, self._payload_bytes_max
        row: Head | None = None
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

    def _new_head(self, line: bytes) -> Head | None:
        """What a line says that was not seen lately; None when no body follows it."""
        head = self._head(line) if line else None
        if head is None:
            return None
        if len(self._heads) >= HEADS_KEPT_MAX:
            for kept in (self._heads, self._mixable, self._rows):
                kept.clear()
        self._heads[line] = head
        # Replies differ, and headers have line ends in them: neither makes rows.
        if line.endswith(CRLF) and not head.reply and head.header_bytes < 0:
            self._mixable[line.removesuffix(CRLF)] = head.size, self._any_size(head)
        return head

    def _any_size(self, head: Head) -> Head:
        """The same for bodies of any size: one and the same for all heads that differ in nothing else."""
        after_sid = head.after_sid[: head.after_sid.rfind(b" ") + 1]
        made = Head(head.subject, b"", -1, ANY_SIZE, head.sid, head.before_sid, after_sid)
        return self._rows.setdefault((head.subject, head.sid), made)

    def _read_other(self, data: bytes, start: int, after_line: int, commands: list[Command]) -> int:
        """A line without a body; gives where it ends, 0 when it has not come."""
        if not after_line:
            longest = CONNECT_BYTES_MAX if data[start] in b"CcIi" else CONTROL_LINE_BYTES_MAX
            after_line = data.find(b"\n", start, start + longest) + 1
            if not after_line:
                if len(data) - start >= longest:
                    raise Broken(LINE_TOO_LONG)
                self._wanted = len(data) - start + 1
                return 0
        commands.append(self._other(data[start:after_line]))
        return after_line

    def _check_size(self, head: Head) -> None:
        if head.size > self._payload_bytes_max:
            raise Broken(PAYLOAD_TOO_LARGE)


_UNKNOWN = -1, Head(b"", b"", -1, ANY_SIZE)  # no body is that short


def _read_run(data: bytes, position: int, line: bytes, size: int, bodies: list[bytes]) -> int:
    """Take the frames that begin with the same line, in ever larger pieces; gives where they end."""
    stride = len(line) + size + len(CRLF)
    frames = RUN_FRAMES_FIRST
    while (whole := (len(data) - position) // stride) >= RUN_FRAMES_FIRST:
        frames = min(frames, whole)
        end = position + frames * stride
        # The last one is looked at first: it tells most of what is no run apart without further ado.
        if not (data.startswith(line, end - stride) and _is_run(data[position:end], line, stride, frames)):
            break
        layout = f"{len(line)}x{size}s{len(CRLF)}x"
        bodies += chain.from_iterable(iter_unpack(layout, memoryview(data)[position:end]))
        position = end
        frames *= RUN_GROWTH
    return position


def _is_run(piece: bytes, line: bytes, stride: int, frames: int) -> bool:
    """Whether each of these frames has this very line and the end of a body, by columns instead of rows."""
    ends = zip(range(stride - len(CRLF), stride), CRLF, strict=True)
    return all(
        piece[column::stride].count(letter) == frames for column, letter in chain(enumerate(line), ends)
    )


def _words(line: bytes, fewest: int, most: int) -> list[bytes]:
    words = line.split()
    if not fewest <= len(words) <= most:
        raise Broken(UNKNOWN_OPERATION)
    return words


def _number(word: bytes) -> int:
    if not _SIZE.fullmatch(word):
        raise Broken(UNKNOWN_OPERATION)
    return int(word)


def _client_head(line: bytes) -> Head | None:
    """PUB subject [reply] size, HPUB subject [reply] header-size size."""
    found = _head_words(line, b"PUB", b"HPUB", 2)
    if found is None:
        return None
    (_, subject), reply, header_bytes, size = found
    before, after = message_line(subject, reply, header_bytes, size)
    return Head(subject, reply, header_bytes, size, b"", before, after)


def _server_head(line: bytes) -> Head | None:
    """MSG subject sid [reply] size, HMSG subject sid [reply] header-size size."""
    found = _head_words(line, b"MSG", b"HMSG", 3)
    if found is None:
        return None
    (_, subject, sid), reply, header_bytes, size = found
    return Head(subject, reply, header_bytes, size, sid)


def _head_words(
    line: bytes, plain: bytes, headed: bytes, first: int
) -> tuple[list[bytes], bytes, int, int] | None:
    """The first words of a line with a body, the reply, the size of the headers and the size of all."""
    verb, _ = _verb(line)
    if verb not in (plain, headed):
        return None
    sizes = 1 if verb == plain else 2
    words = _words(line, first + sizes, first + 1 + sizes)
    size = _number(words[-1])
    header_bytes = _number(words[-2]) if verb == headed else -1
    if header_bytes > size:
        raise Broken(UNKNOWN_OPERATION)
    return words[:first], b"".join(words[first:-sizes]), header_bytes, size


def _client_other(line: bytes) -> Command:
    verb, rest = _verb(line)
    if verb == b"SUB":
        words = _words(rest, 2, 3)
        return Subscribe(words[0], words[1] if len(words) == 3 else b"", words[-1])  # noqa: PLR2004
    if verb == b"UNSUB":
        words = _words(rest, 1, 2)
        return Unsubscribe(words[0], _count(words[1]) if len(words) == 2 else 0)  # noqa: PLR2004
    if verb == b"CONNECT":
        return Connect(rest)
    if verb == b"+OK":
        return Okay()
    if verb == b"INFO":
        return Info(rest)
    return _beat(verb)


def _server_other(line: bytes) -> Command:
    verb, rest = _verb(line)
    if verb == b"+OK":
        return Okay()
    if verb == b"-ERR":
        return Error(rest.decode("utf-8", "replace").strip("'"))
    if verb == b"INFO":
        return Info(rest)
    return _beat(verb)


def _beat(verb: bytes) -> Ping | Pong:
    if verb == b"PING":
        return Ping()
    if verb == b"PONG":
        return Pong()
    raise Broken(UNKNOWN_OPERATION)


def _verb(line: bytes) -> tuple[bytes, bytes]:
    parts = line.split(None, 1)
    if not parts or line[:1].isspace():
        raise Broken(UNKNOWN_OPERATION)
    return parts[0].upper(), parts[1].strip() if len(parts) > 1 else b""


def _count(word: bytes) -> int:
    """As nats-server reads it: what is no number is no limit, so the subscription ends at once."""
    return int(word) if _SIZE.fullmatch(word) else 0


class ClientReader(_Reader):
    """What a client sends, as its server reads it."""

    __slots__ = ()
    _head = staticmethod(_client_head)
    _heads: ClassVar[dict[bytes, Head]] = {}
    _mixable: ClassVar[dict[bytes, tuple[int, Head]]] = {}
    _rows: ClassVar[dict[tuple[bytes, bytes], Head]] = {}
    _other = staticmethod(_client_other)


class ServerReader(_Reader):
    """What a server sends, as its client reads it."""

    __slots__ = ()
    _head = staticmethod(_server_head)
    _heads: ClassVar[dict[bytes, Head]] = {}
    _mixable: ClassVar[dict[bytes, tuple[int, Head]]] = {}
    _rows: ClassVar[dict[tuple[bytes, bytes], Head]] = {}
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
    """The control line of a MSG, or of an HMSG when header_bytes is above 0: before the sid, and after it."""
    if reply:
        reply += b" "
    if header_bytes > 0:
        return b"HMSG %b " % subject, b" %b%d %d\r\n" % (reply, header_bytes, size)
    return b"MSG %b " % subject, b" %b%d\r\n" % (reply, size)


def passed_on(head: Head, bodies: list[bytes], sid: bytes, *, with_headers: bool) -> bytes:
    """What a subscription gets of what was published, which is at least one body."""
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
    """-ERR, which most clients take as the end; see `permissions_violation`."""
    return b"-ERR '%b'\r\n" % text.replace("'", "").encode("utf-8", "replace")


def permissions_violation(what: str, subject: bytes) -> bytes:
    """The one -ERR that every client survives. `what` is Subscription or Publish."""
    return b"-ERR 'Permissions Violation for %b to \"%b\"'\r\n" % (what.encode(), subject)
