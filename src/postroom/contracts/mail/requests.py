"""Calls of clients and their answers.

Rule 1: a call is answered when what it changed is stored. A plain publish is never answered.
Rule 2: an answer to a refused call names no mailbox.
"""

import msgspec

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes, hashed
from postroom.contracts.mail.options import Storage
from postroom.contracts.mail.refusals import Refusals
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mq9 import MailCall, Mq9Error
from postroom.system.log import library_log

_log = library_log("postroom.mail")


class Request(msgspec.Struct, frozen=True, gc=False):
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


class Responder:
    """Answers and refuses calls."""

    def __init__(self, mailboxes: Mailboxes, refusals: Refusals) -> None:
        self._mailboxes = mailboxes
        self._refusals = refusals

    def answer_when_stored(self, request: Request, storage: Storage, payload: bytes) -> None:
        """Answer when everything appended so far is stored."""
        self._mailboxes.journal.after(storage, self._answer, request, payload, fail=self._fail)

    def _answer(self, request: Request, payload: bytes) -> None:
        request.answer(payload)

    def _fail(self, request: Request, _: bytes, why: str) -> None:
        self.refuse_unwritten(request, why)

    def refuse_unwritten(self, request: Request, why: str) -> None:
        """Refuse a call at once because the log cannot be written."""
        self.refuse(request, Mq9Error(503, why))

    def refuse(self, request: Request, error: Mq9Error) -> None:
        mail_id = request.call.mail_id
        request.answer(replies.refused(error))
        label = self._label(mail_id, request.link) if mail_id else ""
        self._refusals.record(request.link, error, request.call.verb, label)

    def refuse_subject(self, link: Link, reply: str, error: Mq9Error, call: str = "") -> None:
        """Refuse a message without a look at its content. Without `call`, its subject is no call."""
        if reply:
            link.answer(reply, replies.refused(error))
        self._refusals.record(link, error, call)

    def _label(self, mail_id: str, link: Link) -> str:
        box = self._mailboxes.visible(mail_id, link)
        return box.label if box is not None else hashed(mail_id)
