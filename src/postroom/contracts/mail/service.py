"""The mail service: every call of every mq9 dialect.

Rule 1: a call is answered when what it changed is stored as its storage class says. A plain publish is never
        answered; a refused one is dropped and recorded as an event.
Rule 2: an exception in one client's call affects no other call.
Rule 3: events name a private mailbox by the hash of its id.
"""

from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.cards.card_registry import AgentRegistry
from postroom.contracts.mail.fetch import Fetches
from postroom.contracts.mail.mailbox_calls import MailboxCalls
from postroom.contracts.mail.mailboxes import Emit, Mailboxes
from postroom.contracts.mail.options import MailOptions
from postroom.contracts.mail.requests import MailRequest, Responder, as_refusal
from postroom.contracts.mail.subscriptions import Subscriptions
from postroom.core.gate import entry_of
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import Letter, Mailbox
from postroom.core.mail.mq9 import Mq9Error, Verb
from postroom.system.clock import Clock, SystemClock

SENDS: frozenset[Verb] = frozenset(["send", "send3"])
READS: frozenset[Verb] = frozenset(["list", "delete", "fetch", "query", "delete3"])
"""Calls that see every message sent before them, also those whose senders waited for no answer."""
ENTRIES: Mapping[str, str] = {
    "create": "mailbox.create",
    "send": "mailbox.send",
    "send3": "mailbox.send",
    "list": "mailbox.read",
    "fetch": "mailbox.read",
    "ack": "mailbox.read",
    "query": "mailbox.read",
    "subscribe": "mailbox.read",
    "delete": "mailbox.delete",
    "delete3": "mailbox.delete",
    "extend": "mailbox.extend",
    "register": "card.change",
    "unregister": "card.change",
    "report": "card.change",
    "discover": "card.list",
}
"""By call: who may make it, its entry in the table of `core.gate`. A read-only token has no connection."""


class MailService:
    """The `SubjectHandler` of mq9. Without a folder everything is lost at its end."""

    def __init__(
        self,
        folder: Path | None,
        run_soon: Callable[[Callable[[], None]], object],
        *,
        options: MailOptions | None = None,
        clock: Clock | None = None,
        emit: Emit | None = None,
        emit_stored: Callable[[str, list[Letter], str], object] | None = None,
    ) -> None:
        """`emit_stored` is a faster way to emit the most frequent event: mailbox, letters, sender.

        Raises `NoEntry`.
        """
        mailboxes = Mailboxes(folder, run_soon, options or MailOptions(), clock or SystemClock(), emit)
        self._mailboxes = mailboxes
        self._emit_stored = emit_stored
        self._responder = Responder(mailboxes)
        self._subscriptions = Subscriptions(mailboxes, run_soon)
        self._fetches = Fetches(mailboxes, run_soon)
        self._agents = AgentRegistry(mailboxes)
        self.unsubscribed, self.drained = self._subscriptions.unsubscribe, self._subscriptions.drained
        self.removed = self._subscriptions.removed
        self.wait_expired, self.is_waiting = self._fetches.wait_expired, self._fetches.is_waiting
        mailboxes.observe(self)
        self._trouble = ""
        calls = MailboxCalls(mailboxes, self._subscriptions, self._responder)
        self._verbs: dict[Verb, Callable[[MailRequest], None]] = {
            "create": calls.create,
            "send": calls.send,
            "send3": calls.send,
            "list": calls.list,
            "delete": calls.delete,
            "delete3": calls.delete,
            "extend": calls.extend,
            "fetch": self._fetches.fetch,
            "ack": self._fetches.acknowledge,
            "query": self._fetches.query,
            "register": self._change_agent,
            "unregister": self._change_agent,
            "report": self._change_agent,
            "discover": self._discover,
        }
        for verb in (*self._verbs, "subscribe"):
            entry_of(ENTRIES.get(verb, ""), f"the call {verb} of Mail")

    # ---- calls ---------------------------------------------------------------------------------

    def owns(self, subject: str) -> bool:
        return subject.startswith(mq9.PREFIX)

    def published(self, link: Link, subject: str, reply: str, header_bytes: int, bodies: list[bytes]) -> None:
        try:
            call = mq9.parse(subject)
        except Mq9Error as error:
            for _ in bodies:
                self._responder.refuse_subject(link, reply, error)
            return
        if not header_bytes and call.verb in SENDS:
            self._carry_out(MailRequest(link, reply, call, b"", bodies))
            return
        for body in bodies:
            request = MailRequest(link, reply, call, body[:header_bytes], [body[header_bytes:]])
            if call.verb not in READS or not self._waits_for_sends(request):
                self._carry_out(request)

    def _waits_for_sends(self, request: MailRequest) -> bool:
        """Whether a call waits until earlier sends to its mailbox are stored. It is carried out then."""
        box = self._mailboxes.visible(request.call.mail_id, request.link)
        fail = self._responder.refuse_unwritten
        return self._mailboxes.journal.after_earlier(box, self._carry_out, request, fail=fail)

    def _carry_out(self, request: MailRequest) -> None:
        try:
            self._verbs[request.call.verb](request)
        except Mq9Error as error:
            if len(request.payloads) == 1:
                self._responder.refuse(request, error)
                return
            for payload in request.payloads:  # nothing of the batch is stored: accept as many as fit
                self._carry_out(replace(request, payloads=[payload]))
        except Exception as error:  # noqa: BLE001 - rule 2
            self._responder.refuse(request, as_refusal(error))

    def _change_agent(self, request: MailRequest) -> None:
        self._mailboxes.journal.check("group")
        changes = {
            "register": self._agents.register,
            "unregister": self._agents.unregister,
            "report": self._agents.report,
        }
        facts = changes[request.call.verb](request.link, request.payload)
        self._responder.answer_when_stored(request, "group", replies.done(**facts))

    def _discover(self, request: MailRequest) -> None:
        request.answer(replies.done(agents=self._agents.discover(request.link, request.payload)))

    # ---- subscriptions and connections ---------------------------------------------------------

    def subscribed(self, link: Link, sid: str, subject: str, group: str) -> str | None:
        try:
            self._subscriptions.subscribe(link, sid, subject, group)
        except Exception as raised:  # noqa: BLE001 - rule 2
            error = as_refusal(raised)
            self._responder.record(link, error, "subscribe")
            return f"{error} ({error.code})"
        self.flush()
        return None

    def refused(self, link: Link, call: str, reply: str, code: int, text: str) -> None:
        self._responder.refuse_subject(link, reply, Mq9Error(code, text), call)

    def closed(self, link: Link) -> None:
        self._subscriptions.close(link)
        self._fetches.close(link)
        self._agents.close(link)
        self.flush()

    # ---- the log and time ----------------------------------------------------------------------

    def flush(self) -> Awaitable[None] | None:
        return self._mailboxes.journal.catch_up()

    def tick(self) -> None:
        self._mailboxes.tick()
        self._subscriptions.tick()
        self._responder.tick()
        trouble = self._mailboxes.journal.trouble
        if trouble and trouble != self._trouble:
            self._mailboxes.emit_event("alert", type="mail-log", error=trouble)
        self._trouble = trouble

    def close(self) -> None:
        self._responder.end_window()
        self._mailboxes.journal.close()

    @property
    def trouble(self) -> str:
        """Why nothing durable is accepted at present; empty when the log works."""
        return self._mailboxes.journal.trouble

    def stats(self) -> dict[str, int]:
        """Totals and limits. They name no mailbox."""
        mailboxes, quotas, options = self._mailboxes, self._mailboxes.quotas, self._mailboxes.options
        return {
            "mailboxes": len(mailboxes.by_key),
            "messages": quotas.messages,
            "bytes": quotas.stored_bytes,
            "agents": len(mailboxes.agents),
            "clients": len(quotas.accounts),
            "stored_bytes_max": options.stored_bytes_max,
            "quota_messages": options.quota_messages,
            "quota_bytes": options.quota_bytes,
            "client_quota_bytes": options.client_quota_bytes,
            "client_quota_mailboxes": options.client_quota_mailboxes,
            "client_quota_agents": options.client_quota_agents,
        }

    @property
    def public_count(self) -> int:
        """How many public mailboxes there are."""
        return len(self._mailboxes.public)

    def public_mailboxes(self, limit: int) -> list[Mailbox]:
        """The oldest public mailboxes."""
        mailboxes = self._mailboxes
        found = (mailboxes.by_serial.get(serial) for serial in mailboxes.public.above(0))
        return [*islice((box for box in found if box is not None and box.is_stored), limit)]

    # ---- the observer of the mailboxes ---------------------------------------------------------

    def stored(self, box: Mailbox, letters: list[Letter], sender: str) -> None:
        if self._emit_stored is not None:
            self._emit_stored(box.label, letters, sender)
        elif self._mailboxes.emit is not None:
            for letter in letters:
                self._mailboxes.emit_event(
                    "created",
                    queue=box.label,
                    message_id=f"{box.label}/{letter.number}",
                    priority=letter.rank,
                    sender=sender,
                    body_bytes=len(letter.payload),
                )
        self._subscriptions.push(box, letters)
        self._fetches.stored(box)

    def expired(self, box: Mailbox) -> None:
        self._subscriptions.expired(box)
        self._fetches.expired(box)
