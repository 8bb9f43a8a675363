"""FETCH, ACK and QUERY: clients that poll.

Rule 1: a group gets a letter again until it is acknowledged, and never after. One acknowledgement covers the
        letters that the same connection fetched before it, as in the newest dialect. It does not cover
        letters after it in the order of delivery: they may have been fetched earlier and not be processed.
Rule 2: a letter that a connected member of a group holds is given to no other connection.
Rule 3: a fetch that finds nothing waits for the first letter or its timeout. It ends with its connection.
Rule 4: queries scan a bounded number of letters in one turn of the loop. Connections take turns.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.requests import MailRequest
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.clientshares import ClientShares
from postroom.core.mail.mailbox import Letter, MailAccount, Mailbox, PullGroup
from postroom.core.mail.mq9 import Mq9Error
from postroom.logs.mail_records import Pulled
from postroom.system.callbacks import attempt

GROUPS_MAX = 1_000  # of one mailbox
NANOS_PER_MS = 1_000_000
MICROS_PER_S = 1_000_000


class _Wait(NamedTuple):
    """A fetch that has not been answered."""

    link: Link
    client: str
    reply: str
    box: Mailbox
    group: str
    limit: int
    through: list[int]


class _RunningQuery:
    """A query in progress: what it has found, and its position."""

    __slots__ = (
        *("_box", "_found", "_key", "_limit", "_rank", "_since_us", "_tags", "_through"),
        *("link", "reply"),
    )

    def __init__(self, link: Link, reply: str, box: Mailbox, body: mq9.Query) -> None:
        self.link = link
        self.reply = reply
        self._box = box
        self._key, self._tags, self._limit = body.key, body.wanted_tags, body.wanted
        self._since_us = (body.since or 0) * MICROS_PER_S
        self._found: list[Letter] = []
        self._rank = self._through = 0

    def scan(self, left: int, now_ns: int) -> bool:
        """Scan `left` more letters, in the order of delivery. Returns whether the query is complete."""
        lanes, letters = self._box.lanes, self._box.letters
        while self._rank < len(lanes) and left > 0:
            numbers = lanes[self._rank].next(self._through, left)
            for number in numbers:
                letter = letters.get(number)
                if (
                    letter is not None
                    and letter.created_us >= self._since_us
                    and (self._key is None or letter.key == self._key)
                    and self._tags.issubset(letter.tags)
                    and not 0 < letter.expires_ns <= now_ns
                ):
                    self._found.append(letter)
                    if len(self._found) == self._limit:
                        return True
            left -= len(numbers)
            if numbers:
                self._through = numbers[-1]
            else:
                self._rank, self._through = self._rank + 1, 0
        return self._rank == len(lanes)

    def answer(self) -> bytes:
        if self._box.has_expired:
            return replies.refused(Mq9Error(410, "the mailbox has expired"))
        alive = [letter for letter in self._found if letter.number in self._box.letters]
        return replies.fetched(replies.fitting(alive, self._limit))


def _answer(link: Link, reply: str, payload: bytes) -> None:
    if reply:
        link.answer(reply, payload)


def _refuse(link: Link, reply: str, why: str) -> None:
    _answer(link, reply, replies.refused(Mq9Error(503, why)))


class Fetches:
    """Fetches, acknowledgements and queries of one server."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        run_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._mailboxes = mailboxes
        self._limits = limits = mailboxes.options.limits
        self._run_soon = run_soon
        self._waits: dict[int, dict[int, _Wait]] = {}
        self._last_wait = self._wait_count = 0
        self._client_waits = ClientShares(limits.client_waits_max, limits.client_waits_max)
        self._link_waits: dict[int, set[tuple[int, int]]] = {}
        """The waits of each connection, by mailbox and number."""
        self._holding: dict[int, set[tuple[int, str]]] = {}
        """The groups, by mailbox and name, of which each connection holds letters."""
        self._queries: dict[int, deque[_RunningQuery]] = {}
        """The running queries of each connection. The first connection is next."""
        self._is_scheduled = False

    # ---- fetch ---------------------------------------------------------------------------------

    def fetch(self, request: MailRequest) -> None:
        link, reply = request.link, request.reply
        if not reply:
            return  # the reply, and the letters in it, would be lost
        body = mq9.body(request.payload, mq9.Fetch)
        box = self._mailboxes.find(request.call.mail_id, link)
        name = body.group_name or ""
        if len(name) > mq9.NAME_CHARS_MAX:
            raise Mq9Error(400, f"the name of a group has at most {mq9.NAME_CHARS_MAX} characters")
        if not name:
            through = box.position(body.deliver, body.bound)
            wait = _Wait(link, link.client, reply, box, "", body.limit, through)
            self._answer_or_wait(wait, body.wait_ms)
            return
        if len(box.groups) >= GROUPS_MAX and name not in box.groups:
            raise Mq9Error(429, f"a mailbox has at most {GROUPS_MAX} groups")
        journal = self._mailboxes.journal
        journal.check("group")
        account = self._admit(box, name, link.client)
        is_new = name not in box.groups
        group, is_started = box.group(name, body.deliver, body.bound, restart=bool(body.force_deliver))
        if is_new:
            self._mailboxes.quotas.add_group(name, group, account)
        wait = _Wait(link, link.client, reply, box, name, body.limit, [])
        if is_started and journal.log is not None:
            # A start position that is lost in a crash would be chosen again, and could skip letters.
            record = Pulled(box.serial, name, group.turn, list(group.through), [], group.account.name)
            journal.append(record)
            journal.after("group", self._answer_or_wait, wait, body.wait_ms, fail=self._refuse_wait)
        else:
            self._answer_or_wait(wait, body.wait_ms)

    def _admit(self, box: Mailbox, name: str, client: str) -> MailAccount:
        """The account of the client that created a group. Refuses a new group above its quota."""
        if name in box.groups:
            account = box.groups[name].account
        else:
            account = self._mailboxes.quotas.accounts[client]
            if account.groups >= self._limits.client_groups_max:
                raise Mq9Error(429, f"a client creates at most {self._limits.client_groups_max} groups")
            self._mailboxes.quotas.admit_group(account, name)
        self._check_remembered(account)
        return account

    def _left_to_remember(self, account: MailAccount) -> int:
        """How many more messages a server may remember as fetched by the groups of a client."""
        left = self._limits.client_remembered_max - account.remembered
        org = account.organization
        return left if org is None else min(left, self._limits.organization_remembered_max - org.remembered)

    def _check_remembered(self, account: MailAccount) -> None:
        if account.remembered >= self._limits.client_remembered_max:
            limit = f"{self._limits.client_remembered_max} messages, which is the limit"
            raise Mq9Error(429, f"the groups of this client hold {limit}: acknowledge fetched messages first")
        if self._left_to_remember(account) <= 0:
            limit = f"{self._limits.organization_remembered_max} messages, which is the limit"
            raise Mq9Error(429, f"the groups of this organization hold {limit}: acknowledge them first")

    def _refuse_wait(self, wait: _Wait, _: int, why: str) -> None:
        _refuse(wait.link, wait.reply, why)

    def _answer_or_wait(self, wait: _Wait, wait_ms: int) -> None:
        link = wait.link
        if wait.box.has_expired or link.is_closing or self._try(wait):
            return
        is_full = self._wait_count >= self._limits.waits_max or not self._client_waits.fits(wait.client, 1)
        if not wait_ms or is_full:
            _answer(link, wait.reply, replies.fetched(()))
            return
        self._last_wait += 1
        self._wait_count += 1
        self._client_waits.add(wait.client, 1)
        self._link_waits.setdefault(link.number, set()).add((wait.box.serial, self._last_wait))
        self._waits.setdefault(wait.box.serial, {})[self._last_wait] = wait
        due_ns = self._mailboxes.now_ns() + wait_ms * NANOS_PER_MS
        self._mailboxes.deadlines.add_wait(due_ns, wait.box.serial, self._last_wait)

    def _try(self, wait: _Wait) -> bool:
        """Answer with the available letters; False when there is none."""
        box, limit = wait.box, wait.limit
        group = box.groups.get(wait.group) if wait.group else None
        if group is not None:
            reader, limit = group, min(limit, max(0, self._left_to_remember(group.account)))
        else:
            reader = PullGroup(box.letters)
            reader.through = wait.through or [0] * len(box.lanes)
        found = reader.next(box.lanes, wait.link.number, limit, self._mailboxes.now_ns())
        letters = replies.fitting(found, limit)
        if not letters:
            return False
        if wait.group:
            reader.hand(letters, wait.link.number)
            self._holding.setdefault(wait.link.number, set()).add((wait.box.serial, wait.group))
        _answer(wait.link, wait.reply, replies.fetched(letters))
        recipient = wait.group or wait.link.user or f"link-{wait.link.number}"
        self._mailboxes.emit_delivered(wait.box, letters, recipient)
        return True

    def stored(self, box: Mailbox) -> None:
        """Answer waiting fetches after letters were stored, in the order in which they began to wait."""
        if box.serial not in self._waits:
            return
        for number, wait in list(self._waits[box.serial].items()):
            attempt(self._try_waiting, wait, number)

    def _try_waiting(self, wait: _Wait, number: int) -> None:
        if self._try(wait):
            self._end(wait.box.serial, number)

    def wait_expired(self, serial: int, number: int) -> None:
        """Answer a fetch whose timeout is over."""
        wait = self._end(serial, number)
        if wait is not None:
            _answer(wait.link, wait.reply, replies.fetched(()))

    def _end(self, serial: int, number: int) -> _Wait | None:
        waits = self._waits.get(serial)
        wait = waits.pop(number, None) if waits is not None else None
        if not waits:
            self._waits.pop(serial, None)
        if wait is not None:
            self._wait_count -= 1
            self._client_waits.add(wait.client, -1)
            of_link = self._link_waits[wait.link.number]
            of_link.discard((serial, number))
            if not of_link:
                del self._link_waits[wait.link.number]
        return wait

    def is_waiting(self, serial: int, number: int) -> bool:
        return number in self._waits.get(serial, ())

    def expired(self, box: Mailbox) -> None:
        for number in list(self._waits.get(box.serial, ())):
            attempt(self.wait_expired, box.serial, number)

    def close(self, link: Link) -> None:
        """Release what a lost connection held. Waiting fetches of others may get it."""
        for serial, number in list(self._link_waits.get(link.number, ())):
            self._end(serial, number)
        self._queries.pop(link.number, None)
        for serial, name in sorted(self._holding.pop(link.number, ())):
            box = self._mailboxes.by_serial.get(serial)
            if box is None or name not in box.groups:
                continue
            for number in box.groups[name].lose(link.number):
                letter = box.letters.get(number)
                if letter is not None:
                    self._mailboxes.delivery_failed(box, letter)
            self.stored(box)

    # ---- acknowledge ---------------------------------------------------------------------------

    def acknowledge(self, request: MailRequest) -> None:
        link, reply = request.link, request.reply
        body = mq9.body(request.payload, mq9.Acknowledgement)
        box = self._mailboxes.find(request.call.mail_id, link)
        group = box.groups.get(body.group_name)
        if group is None:
            raise Mq9Error(404, "the group has fetched nothing from this mailbox")
        journal = self._mailboxes.journal
        journal.check("group")
        if body.msg_id not in group.handed:  # otherwise it is counted already
            self._check_remembered(group.account)
        fresh = group.acknowledge(body.msg_id)
        durable = [number for number in fresh if number in box.letters and box.letters[number].durable]
        if durable:
            record = Pulled(box.serial, body.group_name, group.turn, list(group.through), durable)
            journal.append(record, droppable=bool(reply))
            # Without a reply subject the caller cannot be refused: the record waits for a working log.
            fail = self._unacknowledged if reply else None
            journal.after("group", self._acknowledged, link, reply, box, group, fresh, fail=fail)
        else:
            self._acknowledged(link, reply, box, group, fresh)

    def _acknowledged(self, link: Link, reply: str, box: Mailbox, group: PullGroup, _: list[int]) -> None:
        group.advance(box.lanes)
        _answer(link, reply, replies.done())

    def _unacknowledged(
        self, link: Link, reply: str, _: Mailbox, group: PullGroup, fresh: list[int], why: str
    ) -> None:
        """Take back an acknowledgement that could not be written: the group gets these letters again."""
        group.unsettle(fresh)
        _refuse(link, reply, why)

    # ---- query ---------------------------------------------------------------------------------

    def query(self, request: MailRequest) -> None:
        """Find letters by key, by tags or since a time, without fetching them."""
        link, reply = request.link, request.reply
        body = mq9.body(request.payload, mq9.Query)
        query = _RunningQuery(link, reply, self._mailboxes.find(request.call.mail_id, link), body)
        if not reply:
            return
        if query.scan(self._limits.query_scan_max, self._mailboxes.now_ns()):
            _answer(link, reply, query.answer())
            return
        if len(self._queries.get(link.number, ())) >= self._limits.queries_max:
            raise Mq9Error(429, f"a connection has at most {self._limits.queries_max} long queries at a time")
        self._queries.setdefault(link.number, deque()).append(query)
        self._schedule_queries()

    def _schedule_queries(self) -> None:
        if self._queries and not self._is_scheduled:
            self._is_scheduled = True
            self._run_soon(self._run_queries)

    def _run_queries(self) -> None:
        """Continue one query, of the connection that is next."""
        self._is_scheduled = False
        number = next(iter(self._queries), None)
        if number is None:  # the connections of all queries have ended
            return
        queries = self._queries.pop(number)
        attempt(self._run_some, queries)
        if queries:
            self._queries[number] = queries
        self._schedule_queries()

    def _run_some(self, queries: "deque[_RunningQuery]") -> None:
        query = queries.popleft()
        if query.scan(self._limits.query_scan_max, self._mailboxes.now_ns()):
            _answer(query.link, query.reply, query.answer())
        else:
            queries.appendleft(query)
