"""Calls of clients, their answers, and the events of refused calls.

Rule 1: a call is answered when what it changed is stored. A plain publish is never answered.
Rule 2: an answer to a refused call names no mailbox. Its event holds a bounded part of what the client sent.
Rule 3: at most `REFUSAL_EVENTS_MAX` refusals of a client and `REFUSAL_EVENTS_ALL_MAX` of all clients in a
        second are emitted one by one. The others of each client are summed up in one event, and those of
        clients beyond `REFUSAL_CLIENTS_MAX` in a shared one. So a flood cannot fill the disk.
Rule 4: one organization gets at most half of both, so its refusals do not hide those of others.
"""

from typing import NamedTuple

import msgspec

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes, hashed
from postroom.contracts.mail.options import Storage
from postroom.core.call_limits import RefusalWindow
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mq9 import MailCall, Mq9Error
from postroom.core.times import NANOS_PER_S
from postroom.system.log import library_log

EVENT_TEXT_CHARS_MAX = 200  # of a client's name, and of the error
REFUSAL_EVENTS_MAX = 20  # of one client in a second, one event each
REFUSAL_EVENTS_ALL_MAX = 100  # of all clients in a second, one event each
REFUSAL_CLIENTS_MAX = 100  # clients whose further refusals are summed up apart

_log = library_log("postroom.mail")


class MailRequest(msgspec.Struct, frozen=True, gc=False):
    """One call of a client. Only sends come in batches; every other call has one payload."""

    link: Link
    reply: str
    call: MailCall
    headers: bytes
    payloads: list[bytes]

    @property
    def payload(self) -> bytes:
        return self.payloads[0]

    def answer(self, payload: bytes) -> None:
        if self.reply:
            self.link.answer(self.reply, payload)


def as_refusal(error: Exception) -> Mq9Error:
    """The error with which a failed call is answered. An unexpected exception is also logged."""
    if isinstance(error, Mq9Error):
        return error
    _log.error("a call to the mail server failed", exc_info=error)
    return Mq9Error(500, "the server could not carry out this call")


class _Refused(NamedTuple):
    """The caller of a refused call."""

    user: str
    detail: dict[str, object]


class Responder:
    """Answers and refuses calls, and emits the refusals."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._window: RefusalWindow[_Refused] = RefusalWindow(
            each_max=REFUSAL_EVENTS_MAX, all_max=REFUSAL_EVENTS_ALL_MAX, clients_max=REFUSAL_CLIENTS_MAX
        )
        self._window_ends_ns = 0
        """0 while there was no refusal since the last window."""

    def answer_when_stored(self, request: MailRequest, storage: Storage, payload: bytes) -> None:
        """Answer when everything appended so far is stored."""
        self._mailboxes.journal.after(storage, MailRequest.answer, request, payload, fail=self._fail)

    def _fail(self, request: MailRequest, _: bytes, why: str) -> None:
        self.refuse_unwritten(request, why)

    def refuse_unwritten(self, request: MailRequest, why: str) -> None:
        """Refuse a call at once because the log cannot be written."""
        self.refuse(request, Mq9Error(503, why))

    def refuse(self, request: MailRequest, error: Mq9Error) -> None:
        mail_id = request.call.mail_id
        request.answer(replies.refused(error))
        box = self._mailboxes.visible(mail_id, request.link) if mail_id else None
        label = box.label if box is not None else hashed(mail_id) if mail_id else ""
        self.record(request.link, error, request.call.verb, label)

    def refuse_subject(self, link: Link, reply: str, error: Mq9Error, call: str = "") -> None:
        """Refuse a message without a look at its content. Without `call`, its subject is not a call."""
        if reply:
            link.answer(reply, replies.refused(error))
        self.record(link, error, call)

    def record(self, link: Link, error: Mq9Error, kind: str, queue: str = "") -> None:
        """Emit a refusal, or count it."""
        if not self._window_ends_ns:
            self._window_ends_ns = self._mailboxes.now_ns() + NANOS_PER_S
        refused = _Refused(link.user, {"client": link.name[:EVENT_TEXT_CHARS_MAX], "address": link.address})
        # A client of no organization shares with nobody.
        if not self._window.add(link.org or link.client, link.client, refused):
            return
        self._mailboxes.emit_event(
            "rejected",
            queue=queue,
            type=kind,
            sender=link.user,
            **({"org_id": link.org} if link.org else {}),
            error_type=str(error.code),
            error=str(error)[:EVENT_TEXT_CHARS_MAX],
            detail=refused.detail,
        )

    def tick(self) -> None:
        """Emit the sums of a window that has ended."""
        if 0 < self._window_ends_ns <= self._mailboxes.now_ns():
            self.end_window()

    def end_window(self) -> None:
        self._window_ends_ns = 0
        for (user, detail), calls, is_shared in self._window.end():
            whose = "further clients" if is_shared else "this client"
            self._mailboxes.emit_event(
                "rejected",
                sender="" if is_shared else user,
                error=f"{calls} more calls of {whose} were refused",
                detail={**detail, "refused": calls},
            )
