"""The mail server: a mailroom behind a NATS server, and its events in a file.

Rule 1: a data folder belongs to one server.
Rule 2: events are lines that are finished when they are written, one write for each turn of the loop. They
        are with the operating system then: a kill loses at most those of the turn that it ended.
Rule 3: what cannot be written waits, up to a limit; what was lost beyond it is counted and told.
"""

import gc
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from time import time_ns

import msgspec

from postroom.contracts.feeds import MAIL_EVENTS
from postroom.contracts.mail.options import MailOptions
from postroom.contracts.mail.room import Mailroom
from postroom.core.mailbox import Letter
from postroom.errors import InvalidSetting, LockTimeout, Unavailable, reason
from postroom.runtime.natsoptions import ServerOptions
from postroom.runtime.natsserver import RunSoon
from postroom.runtime.natsserver import serve as serve_nats
from postroom.system.atomic import open_safely

EVENTS_WAITING_BYTES_MAX = 8 << 20  # of lines that could not be written yet

_log = logging.getLogger("postroom.mail")
_encode = msgspec.json.Encoder().encode


class FolderTaken(Unavailable):
    """Another server works on this data folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} belongs to a mail server that is running")


class EventLog:
    """The file of a room's events, which only grows. What is told before `open` is written after it."""

    def __init__(self, path: Path, run_soon: RunSoon) -> None:
        self._path = path
        self._run_soon = run_soon
        self._fd = -1
        self._lines: list[bytes] = []
        self._told = 0  # events in these lines
        self._unwritten = b""
        self._lost = 0
        self._failing = False

    def open(self) -> None:
        self._fd = open_safely(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._fd).st_size
        if size > 0 and os.pread(self._fd, 1, size - 1) != b"\n":
            self._unwritten = b"\n"  # a line that a crash cut short

    def __call__(self, kind: str, /, **fields: object) -> None:
        """One event of the room."""
        fields["kind"] = kind
        fields["ts_us"] = time_ns() // 1000
        self._add(_encode(fields) + b"\n", 1)

    def stored(self, label: str, letters: list[Letter], sender: str) -> None:
        """The events of messages that were stored, as the room would tell them.

        There are many of them, and most differ from the one before in the number alone.
        """
        name = _encode(label)[1:-1]
        last = b',"sender":%b}\n' % _encode(sender) if sender else b"}\n"
        pieces: list[bytes] = []
        before, after, made_for = b"", b"", (-1, -1, -1)
        for letter in letters:
            facts = letter.created_us, letter.rank, len(letter.payload)
            if facts != made_for:
                first = b'{"kind":"created","ts_us":%d,"queue":"%b"' % (facts[0], name)
                before = b'%b,"message_id":"%b/' % (first, name)
                after = b'","priority":%d,"body_bytes":%d%b' % (*facts[1:], last)
                made_for = facts
            pieces += (before, b"%d" % letter.number, after)
        self._add(b"".join(pieces), len(letters))

    def _add(self, lines: bytes, count: int) -> None:
        if not self._lines:
            self._run_soon(self.write)
        self._lines.append(lines)
        self._told += count

    def write(self) -> None:
        """Write what this turn has told. Nothing is raised: what it tells has happened."""
        data, told = b"".join([self._unwritten, *self._lines]), self._told
        self._lines, self._told = [], 0
        try:
            self._unwritten = data[os.write(self._fd, data) :]
        except OSError as error:
            self._keep(data, told, error)
        else:
            self._failing = False
            self._tell_lost()

    def _keep(self, data: bytes, count: int, error: OSError) -> None:
        if not self._failing:
            self._failing = True
            _log.warning("%s: events wait to be written: %s", self._path, error.strerror)
        if len(data) <= EVENTS_WAITING_BYTES_MAX:
            self._unwritten = data
        else:
            self._lost += count

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            self("alert", type="mail-events", error=f"{lost} events are missing: they could not be written")

    def close(self) -> None:
        """Write the last of them, and end."""
        if self._fd >= 0:
            self.write()
            if self._unwritten or self._lines:
                self.write()
            os.close(self._fd)
            self._fd = -1


def serve(data: Path, server: ServerOptions, mail: MailOptions, *, ready: Callable[[int], None]) -> None:
    """Serve a data folder until SIGTERM or SIGINT. `ready` is told the port."""
    opened: list[EventLog] = []

    def open_room(run_soon: RunSoon) -> Mailroom:
        events = EventLog(data / MAIL_EVENTS, run_soon)
        try:
            room = Mailroom(data, run_soon, options=mail, emit=events, emit_stored=events.stored)
        except LockTimeout:
            raise FolderTaken(data) from None
        try:
            events.open()
        except BaseException:
            room.close()
            raise
        opened.append(events)
        return room

    def listening(port: int) -> None:
        # What was restored lives as long as its mailboxes: looking through it again and again finds nothing.
        gc.collect()
        gc.freeze()
        ready(port)

    try:
        serve_nats(server, make_room=open_room, ready=listening)
    finally:
        for events in opened:  # after the room, which still has something to tell
            events.close()


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """What a server shows to its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or type(error).__name__
        raise InvalidSetting(f"cannot use the certificate {certificate} with its key: {why}") from None
    return context


def read_users(path: Path) -> dict[str, str]:
    """Passwords by user, from a file with lines such as `ada:secret`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"cannot read the users in {path}: {reason(error)}") from None
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        user, colon, password = line.strip().partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not (user and colon and password):
            raise InvalidSetting(f"line {number} of {path} is not user:password")
        users[user] = password
    if not users:
        raise InvalidSetting(f"there is no user in {path}")
    return users
