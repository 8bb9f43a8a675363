"""Sending messages. A single message is a batch of one.

Rule 1: a batch goes one way: admitted by the quotas, written to the log, put into its mailbox, and then
        handed to subscriptions and fetches by one callback.
Rule 2: the messages of a batch share one mailbox, priority and sender. Only a batch of one has headers.
"""

from typing import cast

from msgspec.structs import replace

from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.requests import Request, Responder
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import MESSAGE_COST_BYTES, RANKS, Letter, Mailbox, Priority, cost_of
from postroom.core.mail.mq9 import Mq9Error, SendOptions
from postroom.core.times import NANOS_PER_S

DELAYED_ID = -1  # the message id in the answer to a delayed send: the final one is given when it is due
_EXPIRED = replies.refused(Mq9Error(410, "the mailbox has expired"))


class Sends:
    """Stores messages, and answers their senders."""

    def __init__(self, mailboxes: Mailboxes, responder: Responder) -> None:
        self._mailboxes = mailboxes
        self._quotas = mailboxes.quotas
        self._journal = mailboxes.journal
        self._responder = responder
        self._on_stored, self._on_unwritten = self._stored, self._unwritten  # bound once, for every send

    def send(self, request: Request) -> None:
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
        account, overhead = self._quotas.accounts[link.client], len(headers) + MESSAGE_COST_BYTES
        if options is not mq9.PLAIN:
            overhead = cost_of(len(headers), options.key, options.tags)
        count = len(payloads)
        nbytes = overhead + len(payloads[0]) if count == 1 else overhead * count + sum(map(len, payloads))
        self._quotas.admit_letters(box, account, count, nbytes)
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

    def _stored(self, box: Mailbox, letters: list[Letter], nbytes: int, request: Request) -> None:
        is_stored = self._mailboxes.commit(box, letters, nbytes, request.link.user)
        if not request.reply:
            return
        for letter in letters:
            msg_id = DELAYED_ID if letter.due_ns else letter.number
            request.answer(replies.stored(request.call.verb, msg_id) if is_stored else _EXPIRED)

    def _unwritten(
        self, box: Mailbox, letters: list[Letter], nbytes: int, request: Request, why: str
    ) -> None:
        self._mailboxes.give_up(box, letters, nbytes)
        self._responder.refuse_unwritten(request, why)
