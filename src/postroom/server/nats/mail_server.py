"""The mail server: a NATS server with the mail service as its handler, and its events in files.

Rule 1: a data folder belongs to one server.
Rule 2: events are whole lines, with one write for each turn of the loop. The operating system has them then:
        a kill loses at most the events of the current turn.
Rule 3: events that cannot be written wait, up to a limit; lost ones are counted and reported.
Rule 4: the files of events are bounded. Shipped files are removed first; events that are removed before they
        were shipped are counted and reported.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from time import time_ns
from typing import Any

import msgspec

from postroom.contracts.mail.options import MailOptions
from postroom.contracts.mail.service import MailService
from postroom.core.mail.mailbox import Letter
from postroom.errors import InvalidSetting, LockTimeout, Unavailable, UnsafePath, reason
from postroom.logs import eventfiles
from postroom.server.nats.mail_status import StatusFile
from postroom.server.nats.options import ServerOptions
from postroom.server.nats.server import RunSoon
from postroom.server.nats.server import serve as serve_nats
from postroom.system.atomic import open_safely
from postroom.system.heartbeat import HEARTBEAT
from postroom.system.log import library_log

_log = library_log("postroom.mail")
_encode = msgspec.json.Encoder().encode


class FolderTaken(Unavailable):
    """Another server uses this data folder."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"{folder} belongs to a mail server that is running{holder}")


class EventFileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    file_bytes_max: int = 64 << 20  # at which the growing file is full
    shipped_bytes_max: int = 128 << 20  # of the shipped files that are kept
    total_bytes_max: int = 1 << 30  # of all full files, shipped or not
    waiting_bytes_max: int = 8 << 20  # of events that could not be written yet


class EventLog:
    """The files of the service's events (`eventfiles`). Events before `open` are written after it."""

    limits = EventFileLimits()

    def __init__(self, path: Path, run_soon: RunSoon) -> None:
        self._path = path
        self._run_soon = run_soon
        self._fd = -1
        self._lines: list[bytes] = []
        self._line_count = 0  # the number of events in them
        self._unwritten = b""
        self._lost = 0
        self._failing = False
        self._size = 0
        self._full_at = self.limits.file_bytes_max
        self._removed = 0
        self._removing = False

    def open(self) -> None:
        self._open_growing()
        if self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n":
            self._unwritten = b"\n"  # ends a line that a crash cut short
        self._remove_old_files()

    def _open_growing(self) -> None:
        self._fd = open_safely(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._fd).st_size
        self._full_at = self.limits.file_bytes_max

    def stats(self) -> dict[str, int]:
        """Counts since the start of this server, and the size of its files."""
        full = eventfiles.full_files(self._path.parent)
        return {
            "event_files": len(full) + 1,
            "event_bytes": sum(file.size for file in full) + self._size,
            "events_removed": self._removed,
            "events_lost": self._lost,
        }

    def __call__(self, kind: str, /, **fields: object) -> None:
        """Emit one event."""
        fields["kind"] = kind
        fields["ts_us"] = time_ns() // 1000
        self._add(_encode(fields) + b"\n", 1)

    def stored(self, label: str, letters: list[Letter], sender: str) -> None:
        """Emit the events of stored messages, in the form of `__call__`.

        There are many of them, and most differ from the previous one only in the number.
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
        self._line_count += count

    def write(self) -> None:
        """Write the events of this turn. Errors are not raised: the events have happened already."""
        data, count = b"".join([self._unwritten, *self._lines]), self._line_count
        self._lines, self._line_count = [], 0
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if not self._failing:
                self._failing = True
                _log.warning("%s: events wait to be written: %s", self._path, error.strerror)
            if len(data) <= self.limits.waiting_bytes_max:
                self._unwritten = data
            else:
                self._lost += count
            return
        self._unwritten = data[written:]
        self._size += written
        self._failing = False
        lost, self._lost = self._lost, 0
        if lost:
            self("alert", type="mail-events", error=f"{lost} events are missing: they could not be written")
        if self._size >= self._full_at and not (self._unwritten or self._removing):
            self._rotate()

    def _rotate(self) -> None:
        """Begin a new file, or continue the current one when it cannot be renamed."""
        full = self._fd
        try:
            eventfiles.end_growing(self._path.parent)
            self._open_growing()
        except (OSError, UnsafePath) as error:
            self._full_at = self._size + self.limits.file_bytes_max
            _log.warning("%s: no new file of events: %s", self._path, error)
            return
        os.close(full)
        self._remove_old_files()

    def _remove_old_files(self) -> None:
        """Remove full files above their limits. The removal of an unshipped file is reported first."""
        full = eventfiles.full_files(self._path.parent)
        self._removing = True  # an alert about a removal must not begin another file
        limits = self.limits
        for file in eventfiles.superfluous(full, limits.shipped_bytes_max, limits.total_bytes_max):
            try:
                if not file.is_shipped:
                    self._report_removed(file)
                file.path.unlink(missing_ok=True)
            except (OSError, UnsafePath) as error:
                _log.warning("%s: it cannot be removed: %s", file.path, error)
        self._removing = False

    def _report_removed(self, file: eventfiles.FullFile) -> None:
        events = eventfiles.lines_in(file.path)
        self._removed += events
        text = (
            f"{file.path.name} is removed with {events} events that were not all shipped: more than "
            f"{self.limits.total_bytes_max} bytes of events waited for a shipper"
        )
        _log.warning("%s", text)
        self("alert", type="mail-events", error_type="EventsRemoved", error=text, detail={"events": events})
        self.write()

    def close(self) -> None:
        """Write the remaining events, and end."""
        if self._fd >= 0:
            self.write()
            if self._unwritten or self._lines:
                self.write()
            os.close(self._fd)
            self._fd = -1


class _Service(MailService):
    """A mail service that writes its state into its folder."""

    def __init__(self, folder: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self._status = StatusFile(folder)

    def tick(self) -> None:
        HEARTBEAT.beat()
        super().tick()
        self._status.write(self)


def serve(data: Path, server: ServerOptions, mail: MailOptions, *, ready: Callable[[int], None]) -> None:
    """Serve a data folder until SIGTERM or SIGINT. `ready` is called with the port."""
    opened: list[EventLog] = []

    def open_service(run_soon: RunSoon) -> MailService:
        events = EventLog(data / eventfiles.GROWING, run_soon)
        try:
            service = _Service(data, run_soon, options=mail, emit=events, emit_stored=events.stored)
        except LockTimeout as error:
            raise FolderTaken(data, error.holder) from None
        try:
            events.open()
        except BaseException:
            service.close()
            raise
        opened.append(events)
        return service

    def announce(port: int) -> None:
        # Restored objects live as long as their mailboxes: the garbage collector need not scan them.
        gc.collect()
        gc.freeze()
        ready(port)

    try:
        serve_nats(server, make_handler=open_service, ready=announce)
    finally:
        for events in opened:  # after the service, which emits events while it closes
            events.close()


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
