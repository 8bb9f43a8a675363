"""The mailroom: every call of every dialect of mq9, on the shelves.

Rule 1: a call is answered when what it changed is stored as its class says. A plain publish is never
        answered, and one that is refused is dropped and told as an event.
Rule 2: an answer to an unknown caller names no mailbox.
Rule 3: events call a private mailbox by the hash of its id.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.agents import Agents
from postroom.contracts.mail.fetch import Fetches
from postroom.contracts.mail.mailboxes import Emit, Mailboxes, hashed
from postroom.contracts.mail.options import MailOptions, Storage
from postroom.contracts.mail.refusals import Refusals
from postroom.contracts.mail.subscriptions import Subscriptions
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import (
    EVERY_RANK,
    MESSAGE_COST_BYTES,
    RANKS,
    Box,
    Letter,
    Word,
    cost_of,
)
from postroom.core.mq9 import Call, Mq9Error, Verb, Wishes
from postroom.core.times import NANOS_PER_S
from postroom.system.clock import Clock, SystemClock

_log = logging.getLogger("postroom.mail")
DEAD_SUFFIX = ".dead"
SENDS: frozenset[Verb] = frozenset(["send", "send3"])
READS: frozenset[Verb] = frozenset(["list", "delete", "fetch", "query", "delete3"])
"""Calls that see what was sent before them, also by somebody who waited for no answer."""


_GONE = replies.refused(Mq9Error(410, "the mailbox has expired"))


class _Request(msgspec.Struct, frozen=True, gc=False):
    """One call. Only sends come in batches; every other call has one payload."""

    link: Link
    reply: str
    call: Call
    headers: bytes
    payloads: list[bytes]

    @property
    def payload(self) -> bytes:
        return self.payloads[0]

    def answer(self, payload: bytes) -> None:
        if self.reply:
            self.link.answer(self.reply, payload)


def _refusal(error: Exception) -> Mq9Error:
    """What a caller is answered when its call raised."""
    if isinstance(error, Mq9Error):
        return error
    _log.error("a call to the mail server failed", exc_info=error)
    return Mq9Error(500, "the server could not carry out this call")


class MailService:
    """The one `Room`. Without a folder nothing outlives it."""

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
        """`emit_stored` is a quicker way to tell the most frequent event: mailbox, letters, sender."""
        self._shelves = Mailboxes(folder, run_soon, options or MailOptions(), clock or SystemClock(), emit)
        self._emit_stored = emit_stored
        self._listening = Subscriptions(self._shelves, run_soon)
        self._pulling = Fetches(self._shelves, run_soon)
        self._agents = Agents(self._shelves)
        self._refusals = Refusals(self._shelves)
        self._listening.failed = self._pulling.failed = self._delivery_failed
        self._shelves.watch(self)
        self._on_arrived, self._on_unsent = self._arrived, self._unsent  # bound once, for every send
        self._on_created, self._on_uncreated = self._created, self._uncreated
        self._relief: asyncio.Future[None] | None = None
        self._trouble = ""
        self._verbs: dict[Verb, Callable[[_Request], None]] = {
            "create": self._create,
            "send": self._send,
            "send3": self._send,
            "list": self._list,
            "delete": self._delete,
            "delete3": self._delete,
            "extend": self._extend,
            "fetch": self._fetch,
            "ack": self._acknowledge,
            "query": self._query,
            "register": self._register,
            "unregister": self._register,
            "report": self._register,
            "discover": self._discover,
        }

    # ---- the seam ------------------------------------------------------------------------------

    def owns(self, subject: str) -> bool:
        return subject.startswith(mq9.PREFIX)

    def published(self, link: Link, subject: str, reply: str, header_bytes: int, bodies: list[bytes]) -> None:
        try:
            call = mq9.parse(subject)
        except Mq9Error as error:
            for _ in bodies:
                self._refuse(link, reply, None, error)
            return
        if not header_bytes and call.verb in SENDS:
            self._carry_out(_Request(link, reply, call, b"", bodies))
            return
        for body in bodies:
            request = _Request(link, reply, call, body[:header_bytes], [body[header_bytes:]])
            if call.verb not in READS or not self._is_early(request):
                self._carry_out(request)

    def _is_early(self, request: _Request) -> bool:
        """Whether a call has to wait for what was sent before it. If so, it is carried out later."""
        return self._shelves.after_earlier(
            request.call.mail_id, self._carry_out, request, fail=self._refuse_unwritten
        )

    def _refuse_unwritten(self, request: _Request, why: str) -> None:
        """The log cannot be written: the caller is told at once."""
        self._refuse(request.link, request.reply, request.call, Mq9Error(503, why))

    def _answer(self, request: _Request, payload: bytes) -> None:
        request.answer(payload)

    def _unanswered(self, request: _Request, _: bytes, why: str) -> None:
        self._refuse_unwritten(request, why)

    def _carry_out(self, request: _Request) -> None:
        try:
            self._verbs[request.call.verb](request)
        except Mq9Error as error:
            if len(request.payloads) == 1:
                self._refuse(request.link, request.reply, request.call, error)
                return
            for payload in request.payloads:  # nothing of the batch is stored: as many as fit are taken
                self._carry_out(replace(request, payloads=[payload]))
        except Exception as error:  # noqa: BLE001 - one client's call must not end another's turn
            self._refuse(request.link, request.reply, request.call, _refusal(error))

    def _refuse(self, link: Link, reply: str, call: Call | None, error: Mq9Error) -> None:
        if reply:
            link.answer(reply, replies.refused(error))
        queue = self._label(call.mail_id) if call and call.mail_id else ""
        self._refusals.tell(link, error, call.verb if call else "", queue)

    def _label(self, mail_id: str) -> str:
        box = self._shelves.boxes.get(mail_id)
        return box.label if box is not None else hashed(mail_id)

    def subscribed(self, link: Link, sid: str, subject: str, group: str) -> str | None:
        try:
            self._listening.subscribe(link, sid, subject, group)
        except Exception as failed:  # noqa: BLE001 - the same
            error = _refusal(failed)
            self._refusals.tell(link, error, "subscribe")
            return f"{error} ({error.code})"
        self.flush()
        return None

    def unsubscribed(self, link: Link, sid: str) -> None:
        self._listening.unsubscribe(link, sid)

    def closed(self, link: Link) -> None:
        self._listening.close(link)
        self._pulling.close(link)
        self._agents.close(link)
        self.flush()

    def drained(self, link: Link) -> None:
        self._listening.drained(link)

    def flush(self) -> Awaitable[None] | None:
        log = self._shelves.log
        if log is None:
            return None
        log.flush()
        if not log.overloaded or log.trouble:
            return None
        if self._relief is None or self._relief.done():
            self._relief = asyncio.get_running_loop().create_future()
        log.after_sync(self._relieve)
        log.flush()
        return self._relief

    def _relieve(self) -> None:
        if self._relief is not None and not self._relief.done():
            self._relief.set_result(None)

    def tick(self) -> None:
        self._shelves.tick()
        self._listening.tick()
        self._refusals.tick()
        log = self._shelves.log
        if log is None or log.trouble == self._trouble:
            return
        self._trouble = log.trouble
        if log.trouble:
            self._relieve()
            self._shelves.tell("alert", type="mail-log", error=log.trouble)

    def close(self) -> None:
        self._relieve()
        self._refusals.close()
        if self._shelves.log is not None:
            self._shelves.log.close()

    def stats(self) -> dict[str, int]:
        """Counts, and nothing that names a mailbox."""
        shelves, options = self._shelves, self._shelves.options
        return {
            "mailboxes": len(shelves.boxes),
            "messages": shelves.letters,
            "bytes": shelves.stored_bytes,
            "agents": len(shelves.agents),
            "clients": len(shelves.accounts),
            "stored_bytes_max": options.stored_bytes_max,
            "quota_messages": options.quota_messages,
            "quota_bytes": options.quota_bytes,
            "client_quota_bytes": options.client_quota_bytes,
            "client_quota_mailboxes": options.client_quota_mailboxes,
            "client_quota_agents": options.client_quota_agents,
        }

    @property
    def trouble(self) -> str:
        """Why nothing durable is taken at present; empty when all is well."""
        return self._shelves.log.trouble if self._shelves.log is not None else ""

    # ---- what the shelves tell -----------------------------------------------------------------

    def gone(self, box: Box) -> None:
        self._listening.gone(box)
        self._pulling.gone(box)

    def _tell_stored(self, box: Box, letters: list[Letter], sender: str) -> None:
        if self._emit_stored is not None:
            self._emit_stored(box.label, letters, sender)
            return
        for letter in letters if self._shelves.emit is not None else ():
            self._shelves.tell(
                "created",
                queue=box.label,
                message_id=f"{box.label}/{letter.number}",
                priority=letter.rank,
                sender=sender,
                body_bytes=len(letter.payload),
            )

    def stored(self, box: Box, letters: list[Letter], sender: str) -> None:
        self._tell_stored(box, letters, sender)
        self._listening.push(box, letters)
        self._pulling.stored(box)

    def removed(self, box: Box, number: int) -> None:
        self._listening.removed(box, number)

    def waited(self, serial: int, number: int) -> None:
        self._pulling.waited(serial, number)

    def is_waiting(self, serial: int, number: int) -> bool:
        return self._pulling.is_waiting(serial, number)

    # ---- mailboxes -----------------------------------------------------------------------------

    def _create(self, request: _Request) -> None:
        body = mq9.body(request.payload, mq9.Creation)
        ttl_s = self._shelves.options.default_ttl_s if body.ttl is None else mq9.checked_ttl_s(body.ttl)
        name, desc, public = body.name or "", body.desc or "", bool(body.public)
        if public and not name:
            raise Mq9Error(400, "a public mailbox needs a name")
        if name and not public:
            raise Mq9Error(
                400, "a private mailbox has no name: anybody could guess it; the server makes its id"
            )
        if len(desc) > mq9.DESC_CHARS_MAX:
            raise Mq9Error(400, f"a description has at most {mq9.DESC_CHARS_MAX} characters")
        self._shelves.check_log("group")
        if name and self._is_known(request, mq9.checked_name(name, known=name in self._shelves.boxes)):
            return
        mail_id = name or self._shelves.private_id(mq9.checked_prefix(body.prefix) if body.prefix else "")
        box = self._shelves.open(
            mail_id,
            ttl_s,
            public=public,
            named=bool(name),
            desc=desc,
            creator=request.link.user,
            client=request.link.client,
        )
        box.creator_link = request.link.number
        self._shelves.commit("group", self._on_created, box, request, fail=self._on_uncreated)

    def _is_known(self, request: _Request, name: str) -> bool:
        """Whether a living public mailbox has this name; if so, the caller has its answer."""
        try:
            box = self._shelves.find(name)
        except Mq9Error:
            return False
        if not box.public:
            raise Mq9Error(409, "the name belongs to a mailbox that is not public")
        self._shelves.tell("duplicate", queue=box.label, type="mailbox", sender=request.link.user)
        answer = replies.created(name, is_new=False)
        storage: Storage = "memory" if box.safe else "group"
        self._shelves.commit(storage, self._answer, request, answer, fail=self._unanswered)
        return True

    def _uncreated(self, box: Box, request: _Request, why: str) -> None:
        """A mailbox that could not be written down ends: its caller is told that there is none."""
        if not box.gone:
            self._shelves.expire(box)
        self._refuse_unwritten(request, why)

    def _created(self, box: Box, request: _Request) -> None:
        box.safe = True
        if not box.gone:
            self._listening.announce_created(box)
        request.answer(replies.created(box.mail_id, is_new=True))

    def _extend(self, request: _Request) -> None:
        if not self._shelves.options.extend:
            raise Mq9Error(403, "this server does not extend lifetimes")
        ttl_s = mq9.checked_ttl_s(mq9.body(request.payload, mq9.Extension).ttl)
        box = self._shelves.find(request.call.mail_id)
        link = request.link
        if box.creator != link.user or (not link.user and box.creator_link != link.number):
            raise Mq9Error(403, "only who created a mailbox can extend its lifetime")
        self._shelves.check_log("group")
        self._shelves.extend(box, ttl_s)
        answer = replies.extended(box.mail_id, ttl_s)
        self._shelves.commit("group", self._answer, request, answer, fail=self._unanswered)

    # ---- messages ------------------------------------------------------------------------------

    def _send(self, request: _Request) -> None:
        """Store a batch of messages. `Mq9Error` when they do not all fit: then none of them is stored."""
        call, headers, payloads = request.call, request.headers, request.payloads
        shelves = self._shelves
        box = shelves.find(call.mail_id)
        wishes = mq9.wishes(headers) if headers else mq9.PLAIN
        word = cast("Word", call.detail) if call.verb == "send" else wishes.word
        storage = shelves.storage(RANKS[word])
        if storage != "memory":
            shelves.check_log(storage)
        account, overhead = shelves.accounts[request.link.client], len(headers) + MESSAGE_COST_BYTES
        if wishes is not mq9.PLAIN:
            overhead = cost_of(len(headers), wishes.key, wishes.tags)
        count = len(payloads)
        nbytes = overhead + len(payloads[0]) if count == 1 else overhead * count + sum(map(len, payloads))
        shelves.admit(box, account, count, nbytes)
        first, rank, now_us = shelves.next_numbers(count), RANKS[word], shelves.clock.wall_us()
        durable = storage != "memory"
        if count == 1:  # the most frequent case, in which a comprehension costs twice as much
            letters = [Letter(first, word, rank, nbytes, payloads[0], headers, now_us, durable, account)]
        else:
            letters = [
                Letter(
                    number, word, rank, len(payload) + overhead, payload, headers, now_us, durable, account
                )
                for number, payload in enumerate(payloads, first)
            ]
        if wishes is not mq9.PLAIN:
            letters = [self._wished(letter, wishes) for letter in letters]
        # Without a reply subject nobody can be told of a failure: the letters wait until they can be written.
        shelves.write(box, letters, nbytes, droppable=bool(request.reply))
        fail = self._on_unsent if request.reply else None
        shelves.commit_letters(box, storage, self._on_arrived, box, letters, nbytes, request, fail=fail)

    def _wished(self, letter: Letter, wishes: Wishes) -> Letter:
        now_ns = self._shelves.now_ns()
        delay_ns = round(wishes.delay_s * NANOS_PER_S)
        ttl_ns = round(wishes.ttl_s * NANOS_PER_S)
        return replace(
            letter,
            expires_ns=now_ns + ttl_ns if ttl_ns else 0,
            due_ns=now_ns + delay_ns if delay_ns else 0,
            key=wishes.key,
            tags=wishes.tags,
        )

    def _unsent(self, box: Box, letters: list[Letter], nbytes: int, request: _Request, why: str) -> None:
        self._shelves.forgo(box, letters, nbytes)
        self._refuse_unwritten(request, why)

    def _arrived(self, box: Box, letters: list[Letter], nbytes: int, request: _Request) -> None:
        is_stored = self._shelves.arrived(box, letters, nbytes, request.link.user)
        if not request.reply:
            return
        for letter in letters:
            # A delayed message has no number yet that anybody could use.
            number = -1 if letter.due_ns else letter.number
            request.answer(replies.stored(request.call.verb, number) if is_stored else _GONE)

    def _list(self, request: _Request) -> None:
        box = self._shelves.find(request.call.mail_id)
        payloads = mq9.body(request.payload, mq9.Listing).payload
        sdk = replies.is_enveloped(self._shelves.options.envelope, request.link.name)
        letters = box.replay(EVERY_RANK, self._shelves.now_ns())
        request.answer(replies.listed(box.mail_id, letters, sdk=sdk, payloads=payloads))

    def _delete(self, request: _Request) -> None:
        call, shelves = request.call, self._shelves
        number = mq9.number(call.detail)
        box = shelves.find(call.mail_id)
        letter = box.letters.get(number)
        if letter is None:
            shelves.check_log("group")  # its removal may be one that could not be written
            request.answer(replies.deleted(call.verb, found=False))
            return
        storage = shelves.storage(letter.rank) if letter.durable else "memory"
        shelves.check_log(storage)
        self._listening.deleting(box, number)
        shelves.remove(box, number)
        shelves.tell(
            "deleted", queue=box.label, message_id=f"{box.label}/{number}", worker_id=request.link.user
        )
        answer = replies.deleted(call.verb, found=True)
        shelves.commit(storage, self._answer, request, answer, fail=self._unanswered)

    # ---- the newest dialect --------------------------------------------------------------------

    def _fetch(self, request: _Request) -> None:
        self._pulling.fetch(request.link, request.reply, request.call.mail_id, request.payload)

    def _acknowledge(self, request: _Request) -> None:
        self._pulling.acknowledge(request.link, request.reply, request.call.mail_id, request.payload)

    def _query(self, request: _Request) -> None:
        self._pulling.query(request.link, request.reply, request.call.mail_id, request.payload)

    def _register(self, request: _Request) -> None:
        self._shelves.check_log("group")
        changes = {
            "register": self._agents.register,
            "unregister": self._agents.unregister,
            "report": self._agents.report,
        }
        facts = changes[request.call.verb](request.link, request.payload)
        answer = replies.done(**facts)
        self._shelves.commit("group", self._answer, request, answer, fail=self._unanswered)

    def _discover(self, request: _Request) -> None:
        request.answer(replies.done(agents=self._agents.discover(request.payload)))

    # ---- dead letters --------------------------------------------------------------------------

    def _delivery_failed(self, box: Box, letter: Letter) -> bool:
        """Count a delivery that came to nothing. True when the letter is on its way to the dead ones."""
        limit = self._shelves.options.dead_letter_after
        if not limit or box.mail_id.endswith(DEAD_SUFFIX):
            return False
        failures = box.failures.get(letter.number, 0) + 1
        box.failures[letter.number] = failures
        if failures < limit or self.trouble:
            return False
        self._move_to_dead(box, letter, failures)
        return True

    def _move_to_dead(self, box: Box, letter: Letter, failures: int) -> None:
        shelves = self._shelves
        dead = shelves.boxes.get(box.mail_id + DEAD_SUFFIX) or self._open_dead(box)
        said = b"NATS/1.0\r\nMq9-Dead-Msg-Id: %d\r\nMq9-Dead-Deliveries: %d\r\n" % (letter.number, failures)
        rest = letter.headers[letter.headers.find(b"\r\n") + 2 :] if letter.headers else b"\r\n"
        moved = replace(
            letter,
            number=shelves.next_numbers(1),
            headers=said + rest,
            cost=cost_of(len(letter.payload) + len(said) + len(rest), "", letter.tags),
            expires_ns=0,
            key="",
        )
        shelves.write(dead, [moved], moved.cost)
        shelves.tell(
            "dead_letter", queue=box.label, message_id=f"{box.label}/{letter.number}", attempt=failures
        )
        storage = shelves.storage(letter.rank) if letter.durable else "memory"
        shelves.commit_letters(dead, storage, self._moved, box, letter, dead, moved)

    def _open_dead(self, box: Box) -> Box:
        """It ends with its mailbox."""
        left_s = max(1.0, (box.expires_ns - self._shelves.now_ns()) / NANOS_PER_S) if box.expires_ns else 0.0
        dead = self._shelves.open(
            box.mail_id + DEAD_SUFFIX,
            left_s,
            public=box.public,
            named=True,
            desc="dead letters",
            creator=box.creator,
            client=box.account.client,
        )
        dead.safe = True
        return dead

    def _moved(self, box: Box, letter: Letter, dead: Box, moved: Letter) -> None:
        if self._shelves.arrived(dead, [moved], moved.cost) and not box.gone:
            self._shelves.remove(box, letter.number)
