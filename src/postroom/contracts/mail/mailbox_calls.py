"""The calls about mailboxes and their messages: CREATE, EXTEND, SEND, LIST and DELETE.

Rule 1: a single message is a batch of one. A batch goes one way: admitted by the quotas, written to the log,
        put into its mailbox, and then handed to subscriptions and fetches by one callback.
Rule 2: the messages of a batch share one mailbox, priority and sender. Only a batch of one has headers.
"""

from typing import cast

from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes, owner_of
from postroom.contracts.mail.options import Storage
from postroom.contracts.mail.requests import MailRequest, Responder
from postroom.contracts.mail.subscriptions import Subscriptions
from postroom.core.gate import permit
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import (
    EVERY_RANK,
    MESSAGE_COST_BYTES,
    RANKS,
    Letter,
    Mailbox,
    Priority,
    cost_of,
)
from postroom.core.mail.mq9 import Creation, Mq9Error, SendOptions
from postroom.core.times import NANOS_PER_S

DELAYED_ID = -1  # the message id in the answer to a delayed send: the final one is given when it is due
_EXPIRED = replies.refused(Mq9Error(410, "the mailbox has expired"))


class MailboxCalls:
    """Creates, extends and lists mailboxes, and stores and deletes messages."""

    def __init__(self, mailboxes: Mailboxes, subscriptions: Subscriptions, responder: Responder) -> None:
        self._mailboxes = mailboxes
        self._journal = mailboxes.journal
        self._subscriptions = subscriptions
        self._responder = responder
        self._on_stored, self._on_unwritten = self._stored, self._unwritten  # bound once, for every send

    def create(self, request: MailRequest) -> None:
        body = mq9.body(request.payload, Creation)
        if body.is_public and not body.name:
            raise Mq9Error(400, "a public mailbox needs a name")
        if body.name and not body.is_public:
            raise Mq9Error(
                400, "a private mailbox has no name: a name can be guessed, so the server makes its id"
            )
        if body.desc and len(body.desc) > mq9.DESC_CHARS_MAX:
            raise Mq9Error(400, f"a description has at most {mq9.DESC_CHARS_MAX} characters")
        mailboxes = self._mailboxes
        ttl_s = mailboxes.options.default_ttl_s if body.ttl is None else mq9.checked_ttl_s(body.ttl)
        self._journal.check("group")
        name = body.name or ""
        if name and self._is_duplicate(
            request, mq9.checked_name(name, known=mailboxes.own(name, request.link.org) is not None)
        ):
            return
        box = mailboxes.open(
            name or mailboxes.private_id(mq9.checked_prefix(body.prefix) if body.prefix else ""),
            ttl_s,
            public=body.is_public,
            named=bool(name),
            desc=body.desc or "",
            creator=request.link.user,
            client=request.link.client,
            org=request.link.org,
        )
        box.creator_link = request.link.number
        self._journal.after("group", self._created, box, request, fail=self._uncreated)

    def _is_duplicate(self, request: MailRequest, name: str) -> bool:
        """Answer the call if a public mailbox of this name exists; returns whether it does.

        A client of all organizations creates mailboxes for all: those of one organization do not count.
        """
        box = self._mailboxes.own(name, request.link.org)
        if box is None or not self._mailboxes.is_live(box):
            return False
        if not box.public:
            raise Mq9Error(409, "the name belongs to a mailbox that is not public")
        self._mailboxes.emit_event("duplicate", queue=box.label, type="mailbox", sender=request.link.user)
        storage: Storage = "memory" if box.is_stored else "group"
        self._responder.answer_when_stored(request, storage, replies.created(name, is_new=False))
        return True

    def _created(self, box: Mailbox, request: MailRequest) -> None:
        box.is_stored = True
        if not box.has_expired:
            self._subscriptions.announce_created(box)
        request.answer(replies.created(box.mail_id, is_new=True))

    def _uncreated(self, box: Mailbox, request: MailRequest, why: str) -> None:
        """End a mailbox that could not be written to the log, and refuse the call."""
        if not box.has_expired:
            self._mailboxes.expire(box)
        self._responder.refuse_unwritten(request, why)

    def extend(self, request: MailRequest) -> None:
        if not self._mailboxes.options.extend:
            raise Mq9Error(403, "this server does not extend lifetimes")
        ttl_s = mq9.checked_ttl_s(mq9.body(request.payload, mq9.Extension).ttl)
        link = request.link
        box = self._mailboxes.find(request.call.mail_id, link)
        if not _is_made_by(box, link):
            raise Mq9Error(403, "only the creator of a mailbox can extend its lifetime")
        self._journal.check("group")
        self._mailboxes.extend(box, ttl_s)
        self._responder.answer_when_stored(request, "group", replies.extended(box.mail_id, ttl_s))

    def send(self, request: MailRequest) -> None:
        """Store a batch. `Mq9Error` when not all of it fits: then no message of it is stored."""
        mailboxes, journal = self._mailboxes, self._journal
        call, headers, payloads = request.call, request.headers, request.payloads
        box, link = mailboxes.find_reachable(call.mail_id, request.link, "mailbox.send"), request.link
        options = mq9.send_options(headers) if headers else mq9.PLAIN
        priority = cast("Priority", call.detail) if call.verb == "send" else options.priority
        rank = RANKS[priority]
        storage = journal.storage(rank)
        durable = storage != "memory"
        if durable:
            journal.check(storage)
        account, overhead = mailboxes.quotas.accounts[link.client], len(headers) + MESSAGE_COST_BYTES
        if options is not mq9.PLAIN:
            overhead = cost_of(len(headers), options.key, options.tags)
        count = len(payloads)
        nbytes = overhead + len(payloads[0]) if count == 1 else overhead * count + sum(map(len, payloads))
        mailboxes.quotas.admit_letters(box, account, count, nbytes)
        first, now_us = journal.next_numbers(count), mailboxes.clock.wall_us()
        if count == 1:  # the most frequent case, in which a comprehension costs twice as much
            letters = [Letter(first, priority, rank, nbytes, payloads[0], headers, now_us, durable, account)]
        else:
            letters = [
                Letter(number, priority, rank, overhead + len(each), each, headers, now_us, durable, account)
                for number, each in enumerate(payloads, first)
            ]
        if options is not mq9.PLAIN:
            letters = [self._with_options(letter, options) for letter in letters]
        # Without a reply subject the sender cannot be refused later: the letters wait for a working log.
        mailboxes.write(box, letters, nbytes, droppable=bool(request.reply))
        fail = self._on_unwritten if request.reply else None
        journal.after_letters(box, storage, self._on_stored, box, letters, nbytes, request, fail=fail)

    def _with_options(self, letter: Letter, options: SendOptions) -> Letter:
        now_ns = self._mailboxes.now_ns()
        delay_ns = round(options.delay_s * NANOS_PER_S)
        ttl_ns = round(options.ttl_s * NANOS_PER_S)
        return replace(
            letter,
            expires_ns=now_ns + ttl_ns if ttl_ns else 0,
            due_ns=now_ns + delay_ns if delay_ns else 0,
            key=options.key,
            tags=options.tags,
        )

    def _stored(self, box: Mailbox, letters: list[Letter], nbytes: int, request: MailRequest) -> None:
        is_stored = self._mailboxes.commit(box, letters, nbytes, request.link.user)
        if not request.reply:
            return
        for letter in letters:
            msg_id = DELAYED_ID if letter.due_ns else letter.number
            request.answer(replies.stored(request.call.verb, msg_id) if is_stored else _EXPIRED)

    def _unwritten(
        self, box: Mailbox, letters: list[Letter], nbytes: int, request: MailRequest, why: str
    ) -> None:
        self._mailboxes.give_up(box, letters, nbytes)
        self._responder.refuse_unwritten(request, why)

    def list(self, request: MailRequest) -> None:
        box = self._mailboxes.find(request.call.mail_id, request.link)
        payloads = mq9.body(request.payload, mq9.ListOptions).payload
        sdk = replies.is_enveloped(self._mailboxes.options.envelope, request.link.name)
        letters = box.replay(EVERY_RANK, self._mailboxes.now_ns())
        request.answer(replies.listed(box.mail_id, letters, sdk=sdk, payloads=payloads))

    def delete(self, request: MailRequest) -> None:
        call = request.call
        number = mq9.number(call.detail)
        box = self._mailboxes.find_reachable(call.mail_id, request.link, "mailbox.delete")
        letter = box.letters.get(number)
        if letter is None:
            self._journal.check("group")  # an earlier removal may not have been written yet
            request.answer(replies.deleted(call.verb, found=False))
            return
        storage: Storage = self._journal.storage(letter.rank) if letter.durable else "memory"
        self._journal.check(storage)
        self._subscriptions.deleted(box, number)
        self._mailboxes.remove(box, number)
        message_id = f"{box.label}/{number}"
        self._mailboxes.emit_event(
            "deleted", queue=box.label, message_id=message_id, worker_id=request.link.user
        )
        self._responder.answer_when_stored(request, storage, replies.deleted(call.verb, found=True))


def _is_made_by(box: Mailbox, link: Link) -> bool:
    """Whether a client created a mailbox. Clients without a login are identified by their connections."""
    if link.identity is not None:
        return permit(link.identity, "mailbox.extend", owner_of(box))
    return box.creator == link.user and (link.user != "" or box.creator_link == link.number)
