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
from postroom.errors import InvalidSetting, LockTimeout, Unavailable
from postroom.runtime.natsserver import RunSoon, ServerOptions
from postroom.runtime.natsserver import serve as serve_nats
from postroom.system.atomic import open_safely

EVENTS_WAITING_BYTES_MAX = 8 << 20  # of lines that could not be written yet

_log = logging.getLogger("postroom.mail")
_encode_lines = msgspec.json.Encoder().encode_lines


class FolderTaken(Unavailable):
    """Another server works on this data folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} belongs to a mail server that is running")


class _Stored(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The event of a message. There are many of them, and the collector need not look at any."""

    kind: str
    ts_us: int
    queue: str
    message_id: str
    priority: int
    body_bytes: int
    sender: str = ""


class EventLog:
    """The file of a room's events, which only grows. What is told before `open` is written after it."""

    def __init__(self, path: Path, run_soon: RunSoon) -> None:
        self._path = path
        self._run_soon = run_soon
        self._fd = -1
        self._events: list[dict[str, object] | _Stored] = []
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
        self._events.append(fields)
        if len(self._events) == 1:
            self._run_soon(self.write)

    def stored(self, label: str, letters: list[Letter], sender: str) -> None:
        """The events of messages that were stored, as the room would tell them."""
        if not self._events:
            self._run_soon(self.write)
        self._events += [
            _Stored(
                "created",
                letter.created_us,
                label,
                f"{label}/{letter.number}",
                letter.rank,
                len(letter.payload),
                sender,
            )
            for letter in letters
        ]

    def write(self) -> None:
        """Write what this turn has told. Nothing is raised: what it tells has happened."""
        events, self._events = self._events, []
        data = self._unwritten + _encode_lines(events)
        try:
            self._unwritten = data[os.write(self._fd, data) :]
        except OSError as error:
            self._keep(data, len(events), error)
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
            if self._unwritten or self._events:
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
        raise InvalidSetting(f"cannot read the users in {path}: {error}") from None
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
