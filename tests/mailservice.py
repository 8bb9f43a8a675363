"""The mail service without a server: links that record what they got, and an event loop run by hand."""

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from postroom.contracts.mail.options import MailOptions
from postroom.contracts.mail.service import MailService
from postroom.core.gate import Caller
from postroom.testing import ManualClock
from tests.waiting import HANG_GUARD_S

CREATE = "$mq9.AI.MAILBOX.CREATE"
MSG = "$mq9.AI.MAILBOX.MSG."


class Got(NamedTuple):
    sid: str
    subject: str
    headers: bytes
    payload: bytes
    reply: str = ""

    @property
    def msg_id(self) -> int:
        for line in self.headers.split(b"\r\n"):
            if line.startswith(b"Mq9-Msg-Id: "):
                return int(line.partition(b": ")[2])
        return int(json.loads(self.payload)["msg_id"])


class FakeLink:
    """A connection that records everything. A closed one takes nothing more."""

    last_number = 0

    def __init__(
        self,
        name: str = "",
        user: str = "",
        address: str = "192.0.2.1",
        *,
        headers: bool = True,
        org: str = "",
        sees_all: bool = True,
    ) -> None:
        FakeLink.last_number += 1
        self.number = FakeLink.last_number
        self.name = name
        self.user = user
        self.client = f"user:{user}" if user else f"address:{address}"
        self.org, self.sees_all = org, sees_all and not org
        self.identity: Caller | None = None
        self.headers = headers
        self.address = f"{address}:{self.number}"
        self.pending_bytes = 0
        self.is_asked_to_notify = False
        self.got: list[Got] = []
        self.answers: list[tuple[str, bytes]] = []
        self.open = True

    @property
    def is_closing(self) -> bool:
        return not self.open

    def deliver(self, sid: str, subject: str, reply: str, messages: list[tuple[bytes, bytes]]) -> None:
        assert (reply == "") == self.headers  # the server has answered the sender itself
        for headers, payload in messages if self.open else ():
            self.got.append(Got(sid, subject, headers if self.headers else b"", payload, reply))

    def notify_when_drained(self) -> None:
        self.is_asked_to_notify = True

    def answer(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        assert reply
        assert headers == b""
        if self.open:
            self.answers.append((reply, payload))

    def payloads(self) -> list[bytes]:
        return [got.payload for got in self.got]

    def take(self) -> list[bytes]:
        """The payloads since the last call."""
        payloads = self.payloads()
        self.got.clear()
        return payloads


class Harness:
    """A service that can be closed and opened again, with its loop, its clock and its events."""

    alive: ClassVar[list["Harness"]] = []

    def __init__(self, folder: Path | None, **options: Any) -> None:
        Harness.alive.append(self)
        self.folder = folder
        self.options = MailOptions(**options)
        self.clock = ManualClock()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.soon: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.inboxes = 0
        self.service = self.opened()

    def opened(self) -> MailService:
        return MailService(self.folder, self.soon.put, options=self.options, clock=self.clock, emit=self.emit)

    @classmethod
    def close_all(cls) -> None:
        while cls.alive:
            cls.alive.pop().service.close()

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def settle(self) -> None:
        """Run the loop until it is idle."""
        self.service.flush()
        log = self.service._mailboxes.journal.log
        while not self.soon.empty() or (log is not None and log._jobs_pending):
            self.soon.get(timeout=HANG_GUARD_S)()
            self.service.flush()

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.service.tick()
        self.settle()

    def reopen(self) -> None:
        self.service.close()
        self.soon = queue.SimpleQueue()
        self.service = self.opened()

    def limit(self, **limits: Any) -> None:
        """Open the service again with other limits."""
        limited = msgspec.structs.replace(self.options.limits, **limits)
        self.options = msgspec.structs.replace(self.options, limits=limited)
        self.reopen()

    def publish(self, link: FakeLink, subject: str, payload: bytes = b"", headers: bytes = b"") -> None:
        self.service.published(link, subject, "", len(headers), [headers + payload])
        self.settle()

    def request(self, link: FakeLink, subject: str, payload: bytes = b"", headers: bytes = b"") -> Any:
        """Send a request, and run the loop; None when there is no answer yet."""
        self.inboxes += 1
        inbox = f"_INBOX.{self.inboxes}"
        self.service.published(link, subject, inbox, len(headers), [headers + payload])
        self.settle()
        return self.answer_of(link, inbox)

    def answer_of(self, link: FakeLink, inbox: str) -> Any:
        found = [payload for reply, payload in link.answers if reply == inbox]
        assert len(found) <= 1, "answered twice"
        return json.loads(found[0]) if found else None

    def create(self, link: FakeLink, **body: Any) -> str:
        reply = self.request(link, CREATE, json.dumps(body).encode())
        assert "error" not in reply, reply
        mail_id = reply["mail_id"]
        assert isinstance(mail_id, str)
        return mail_id

    def send(self, link: FakeLink, mail_id: str, payload: bytes, word: str = "") -> int:
        reply = self.request(link, f"{MSG}{mail_id}{'.' * bool(word)}{word}", payload)
        assert "error" not in reply, reply
        msg_id = reply["msg_id"]
        assert isinstance(msg_id, int)
        return msg_id

    def subscribe(self, link: FakeLink, rest: str, group: str = "", sid: str = "1") -> str | None:
        refusal = self.service.subscribed(link, sid, MSG + rest, group)
        self.settle()
        return refusal

    def close_link(self, link: FakeLink) -> None:
        link.open = False
        self.service.closed(link)
        self.settle()
