"""The state of a mail server in a file of its folder, for other processes of the same machine.

Rule 1: private mailboxes are counted and never named: who knows the id of a mailbox may read it.
Rule 2: the file is written at most every `WRITE_EVERY_S`, and only after a change.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from postroom.errors import UnsafePath
from postroom.system.atomic import read_file, replace_file
from postroom.system.log import library_log

if TYPE_CHECKING:  # the task server reads the status, and needs nothing else of Mail
    from postroom.contracts.mail.service import MailService

FILE_NAME: Final = "status.json"
WRITE_EVERY_S: Final = 1.0
PUBLIC_LISTED_MAX: Final = 500

_log = library_log("postroom.mail")
_encode = msgspec.json.Encoder().encode


class ShownMailbox(msgspec.Struct, frozen=True):
    """A public mailbox."""

    mail_id: str
    desc: str
    messages: int
    ttl_s: float
    created_us: int
    org_id: str = ""
    """Empty for a mailbox of all organizations."""


class MailStatus(msgspec.Struct, frozen=True):
    """The file."""

    mailboxes: int
    private: int
    messages: int
    bytes: int
    agents: int
    public: list[ShownMailbox]


class StatusFile:
    """Writes the state of a mail server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._written: MailStatus | None = None
        self._due = 0.0

    def write(self, service: "MailService") -> None:
        """Write the state, when it is time and something has changed. An error is logged."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + WRITE_EVERY_S
        status = status_of(service)
        if status == self._written:
            return
        self._written = status
        try:
            replace_file(self._path, _encode(status), "os")
        except (OSError, UnsafePath) as error:
            _log.warning("%s: the state of the server cannot be written: %s", self._path, error)


def status_of(service: "MailService") -> MailStatus:
    """The state of a mail server."""
    stats, public = service.stats(), service.public_mailboxes(PUBLIC_LISTED_MAX)
    boxes = [
        ShownMailbox(box.mail_id, box.desc, len(box.letters), box.ttl_s, box.created_us, box.org)
        for box in public
    ]
    private = stats["mailboxes"] - service.public_count
    return MailStatus(stats["mailboxes"], private, stats["messages"], stats["bytes"], stats["agents"], boxes)


def read_status(folder: Path) -> MailStatus | None:
    """The state that a mail server wrote last; None when there is none."""
    try:
        return msgspec.json.decode(read_file(folder / FILE_NAME), type=MailStatus)
    except (OSError, msgspec.MsgspecError):
        return None


def mail_gauges(folder: Path) -> dict[str, Callable[[], float | None]]:
    """What telemetry exports about a mail server, by the names of the metrics."""

    def read(name: str) -> float | None:
        status = read_status(folder)
        return None if status is None else float(getattr(status, name))

    return {f"postroom.mail.{name}": partial(read, name) for name in ("mailboxes", "messages", "bytes")}
