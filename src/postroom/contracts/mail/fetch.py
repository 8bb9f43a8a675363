"""FETCH, ACK and QUERY: reading by asking.

Rule 1: a group gets a letter again until it is acknowledged, and never after. One acknowledgement covers
        what the same connection was handed before it, as the newest dialect says, and not what comes
        behind it in order: that may have been fetched earlier and not be done.
Rule 2: what one living connection of a group holds, no other gets.
Rule 3: a fetch that finds nothing waits, and is answered by the first letter or by the end of its time. It
        ends with its connection.
Rule 4: one turn of the loop looks at a bounded number of letters for queries. Connections take turns.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.subscriptions import Failed
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import Account, Box, Letter, PullGroup
from postroom.core.mq9 import Mq9Error
from postroom.logs.mail_records import Pulled
from postroom.system.callbacks import attempt

WAITS_MAX = 100_000
CLIENT_WAITS_MAX = WAITS_MAX // 2  # of one client
GROUPS_MAX = 1_000  # of one mailbox
CLIENT_GROUPS_MAX = 10_000  # that one client has made, in all mailboxes
CLIENT_REMEMBERED_MAX = 1_000_000  # letters that these hold, or know to be acknowledged, one by one
QUERY_SCAN_MAX = 1_000  # letters that a query looks at in one turn of the loop
QUERIES_MAX = 64  # of one connection that are not done after their first turn
NANOS_PER_MS = 1_000_000
MICROS_PER_S = 1_000_000


class _Wait(NamedTuple):
    link: Link
    client: str
    reply: str
    box: Box
    group: str
    limit: int
    through: list[int]


class _Search:
    """A query under way: what it has found, and how far it has looked."""

    __slots__ = (
        "_box",
        "_found",
        "_key",
        "_limit",
        "_rank",
        "_since_us",
        "_tags",
        "_through",
        "link",
        "reply",
    )

    def __init__(self, link: Link, reply: str, box: Box, asked: mq9.Query) -> None:
        self.link = link
        self.reply = reply
        self._box = box
        self._key, self._tags, self._limit = asked.key, asked.wanted_tags, asked.wanted
        self._since_us = (asked.since or 0) * MICROS_PER_S
        self._found: list[Letter] = []
        self._rank = self._through = 0

    def go_on(self, now_ns: int) -> bool:
        """Look at some more letters, in the order of delivery. Whether there is no more to look at."""
        left, lanes, letters = QUERY_SCAN_MAX, self._box.lanes, self._box.letters
        while self._rank < len(lanes) and left > 0:
            numbers = lanes[self._rank].next(self._through, left)
            for number in numbers:
                letter = letters.get(number)
                if letter is not None and self._wants(letter, now_ns):
                    self._found.append(letter)
                    if len(self._found) == self._limit:
                        return True
            left -= len(numbers)
            if numbers:
                self._through = numbers[-1]
            else:
                self._rank, self._through = self._rank + 1, 0
        return self._rank == len(lanes)

    def _wants(self, letter: Letter, now_ns: int) -> bool:
        return (
            letter.created_us >= self._since_us
            and (self._key is None or letter.key == self._key)
            and self._tags.issubset(letter.tags)
            and not 0 < letter.expires_ns <= now_ns
        )

    def answer(self) -> bytes:
        if self._box.gone:
            return replies.refused(Mq9Error(410, "the mailbox has expired"))
        alive = [letter for letter in self._found if letter.number in self._box.letters]
        return replies.fetched(replies.fitting(alive, self._limit))


def _answer(link: Link, reply: str, payload: bytes) -> None:
    if reply:
        link.answer(reply, payload)


def _refuse(link: Link, reply: str, why: str) -> None:
    _answer(link, reply, replies.refused(Mq9Error(503, why)))


class Fetches:
    """Groups that fetch, and those who wait."""

    def __init__(self, shelves: Mailboxes, run_soon: Callable[[Callable[[], None]], object]) -> None:
        self.failed: Failed = lambda _box, _letter: False
        self._shelves = shelves
        self._run_soon = run_soon
        self._waits: dict[int, dict[int, _Wait]] = {}
        self._last_wait = self._wait_count = 0
        self._client_waits: Counter[str] = Counter()
        self._link_waits: dict[int, set[tuple[int, int]]] = {}
        """Connection to its waits, by mailbox and number."""
        self._holding: dict[int, set[tuple[int, str]]] = {}
        """Connection to the groups, by mailbox and name, of which it holds something."""
        self._searches: dict[int, deque[_Search]] = {}
        """Connection to its queries under way. The first connection has the next turn."""
        self._is_searching = False

    # ---- fetch ---------------------------------------------------------------------------------

    def fetch(self, link: Link, reply: str, mail_id: str, payload: bytes) -> None:
        if not reply:
            return  # it would be handed out to nobody
        asked = mq9.body(payload, mq9.Fetch)
        box = self._shelves.find(mail_id)
        name = asked.group_name or ""
        if len(name) > mq9.NAME_CHARS_MAX:
            raise Mq9Error(400, f"the name of a group has at most {mq9.NAME_CHARS_MAX} characters")
        if not name:
            through = box.position(asked.deliver, asked.bound)
            wait = _Wait(link, link.client, reply, box, "", asked.limit, through)
            self._answer_or_wait(wait, asked.wait_ms)
            return
        if len(box.groups) >= GROUPS_MAX and name not in box.groups:
            raise Mq9Error(429, f"a mailbox has at most {GROUPS_MAX} groups")
        self._shelves.check_log("group")
        account = self._admit(box, name, link.client)
        is_new = name not in box.groups
        group, begins = box.group(name, asked.deliver, asked.bound, anew=bool(asked.force_deliver))
        if is_new:
            self._shelves.charge_group(name, group, account)
        wait = _Wait(link, link.client, reply, box, name, asked.limit, [])
        if begins and self._shelves.log is not None:
            # A start that a crash forgets would be chosen anew, and could skip what came meanwhile.
            record = Pulled(box.serial, name, group.turn, list(group.through), [], group.account.client)
            self._shelves.log.append(record)
            commit = self._shelves.commit
            commit("group", self._answer_or_wait, wait, asked.wait_ms, fail=self._refuse_wait)
        else:
            self._answer_or_wait(wait, asked.wait_ms)

    def _admit(self, box: Box, name: str, client: str) -> Account:
        """The account of the client that made a group. Refuses a new group when it has no room."""
        if name in box.groups:
            account = box.groups[name].account
        else:
            account = self._shelves.accounts[client]
            if account.groups >= CLIENT_GROUPS_MAX:
                raise Mq9Error(429, f"a client makes at most {CLIENT_GROUPS_MAX} groups")
            self._shelves.admit_group(account, name)
        self._check_remembered(account)
        return account

    @staticmethod
    def _check_remembered(account: Account) -> None:
        if account.remembered >= CLIENT_REMEMBERED_MAX:
            most = f"{CLIENT_REMEMBERED_MAX} messages singly"
            raise Mq9Error(
                429, f"the groups of this client remember {most}: acknowledge what was fetched first"
            )

    def _refuse_wait(self, wait: _Wait, _: int, why: str) -> None:
        _refuse(wait.link, wait.reply, why)

    def _answer_or_wait(self, wait: _Wait, wait_ms: int) -> None:
        link = wait.link
        if wait.box.gone or link.is_closing or self._try(wait):
            return
        is_full = self._wait_count >= WAITS_MAX or self._client_waits[wait.client] >= CLIENT_WAITS_MAX
        if not wait_ms or is_full:
            _answer(link, wait.reply, replies.fetched(()))
            return
        self._last_wait += 1
        self._wait_count += 1
        self._client_waits[wait.client] += 1
        self._link_waits.setdefault(link.number, set()).add((wait.box.serial, self._last_wait))
        self._waits.setdefault(wait.box.serial, {})[self._last_wait] = wait
        due_ns = self._shelves.now_ns() + wait_ms * NANOS_PER_MS
        self._shelves.wake_at(due_ns, wait.box.serial, self._last_wait)

    def _try(self, wait: _Wait) -> bool:
        """Answer with what there is; False when there is nothing."""
        letters = self._find(wait)
        if not letters:
            return False
        if wait.group:
            group = wait.box.groups[wait.group]
            group.hand(letters, wait.link.number)
            self._holding.setdefault(wait.link.number, set()).add((wait.box.serial, wait.group))
        _answer(wait.link, wait.reply, replies.fetched(letters))
        if self._shelves.options.receipts:
            self._tell_fetched(wait, letters)
        return True

    def _find(self, wait: _Wait) -> list[Letter]:
        box, limit = wait.box, wait.limit
        reader = box.groups.get(wait.group) if wait.group else None
        if reader is not None:
            limit = min(limit, max(0, CLIENT_REMEMBERED_MAX - reader.account.remembered))
        else:
            reader = PullGroup(box.letters)
            reader.through = wait.through or [0] * len(box.lanes)
        found = reader.next(box.lanes, wait.link.number, limit, self._shelves.now_ns())
        return replies.fitting(found, limit)

    def _tell_fetched(self, wait: _Wait, letters: list[Letter]) -> None:
        for letter in letters:
            self._shelves.tell(
                "delivered",
                queue=wait.box.label,
                message_id=f"{wait.box.label}/{letter.number}",
                recipient=wait.group or wait.link.user or f"link-{wait.link.number}",
                priority=letter.rank,
            )

    def stored(self, box: Box) -> None:
        """A letter has come: whoever waits for it, in order."""
        if box.serial not in self._waits:
            return
        for number, wait in list(self._waits[box.serial].items()):
            attempt(self._try_waiting, wait, number)

    def _try_waiting(self, wait: _Wait, number: int) -> None:
        if self._try(wait):
            self._end(wait.box.serial, number)

    def waited(self, serial: int, number: int) -> None:
        """A wait is over."""
        wait = self._end(serial, number)
        if wait is not None:
            _answer(wait.link, wait.reply, replies.fetched(()))

    def _end(self, serial: int, number: int) -> _Wait | None:
        waits = self._waits.get(serial)
        wait = waits.pop(number, None) if waits is not None else None
        if not waits:
            self._waits.pop(serial, None)
        if wait is not None:
            self._give_back(wait, serial, number)
        return wait

    def _give_back(self, wait: _Wait, serial: int, number: int) -> None:
        self._wait_count -= 1
        self._client_waits[wait.client] -= 1
        if not self._client_waits[wait.client]:
            del self._client_waits[wait.client]
        of_link = self._link_waits[wait.link.number]
        of_link.discard((serial, number))
        if not of_link:
            del self._link_waits[wait.link.number]

    def is_waiting(self, serial: int, number: int) -> bool:
        return number in self._waits.get(serial, ())

    def gone(self, box: Box) -> None:
        for number in list(self._waits.get(box.serial, ())):
            attempt(self.waited, box.serial, number)

    def close(self, link: Link) -> None:
        """A connection is lost: what it held can be fetched by others, who may be waiting."""
        for serial, number in list(self._link_waits.get(link.number, ())):
            self._end(serial, number)
        self._searches.pop(link.number, None)
        for serial, name in sorted(self._holding.pop(link.number, ())):
            box = self._shelves.by_serial.get(serial)
            if box is None or name not in box.groups:
                continue
            for number in box.groups[name].lose(link.number):
                letter = box.letters.get(number)
                if letter is not None:
                    self.failed(box, letter)
            self.stored(box)

    # ---- the other verbs -----------------------------------------------------------------------

    def acknowledge(self, link: Link, reply: str, mail_id: str, payload: bytes) -> None:
        asked = mq9.body(payload, mq9.Ack)
        box = self._shelves.find(mail_id)
        group = box.groups.get(asked.group_name)
        if group is None:
            raise Mq9Error(404, "the group has fetched nothing from this mailbox")
        self._shelves.check_log("group")
        if asked.msg_id not in group.handed:  # otherwise it is remembered already
            self._check_remembered(group.account)
        fresh = group.acknowledge(asked.msg_id)
        durable = [number for number in fresh if number in box.letters and box.letters[number].durable]
        if durable and self._shelves.log is not None:
            record = Pulled(box.serial, asked.group_name, group.turn, list(group.through), durable)
            self._shelves.log.append(record, droppable=bool(reply))
            fail = self._unacknowledged if reply else None  # nobody can be told: it waits
            self._shelves.commit("group", self._acknowledged, link, reply, box, group, fresh, fail=fail)
        else:
            self._acknowledged(link, reply, box, group, fresh)

    def _acknowledged(self, link: Link, reply: str, box: Box, group: PullGroup, _: list[int]) -> None:
        group.advance(box.lanes)
        _answer(link, reply, replies.done())

    def _unacknowledged(
        self, link: Link, reply: str, _: Box, group: PullGroup, fresh: list[int], why: str
    ) -> None:
        """An acknowledgement that could not be written is none: the group gets these letters again."""
        group.unsettle(fresh)
        _refuse(link, reply, why)

    # ---- query ---------------------------------------------------------------------------------

    def query(self, link: Link, reply: str, mail_id: str, payload: bytes) -> None:
        """Look without taking: by key, by tags, since a time; the first ones when there are too many."""
        asked = mq9.body(payload, mq9.Query)
        search = _Search(link, reply, self._shelves.find(mail_id), asked)
        if not reply:
            return
        if search.go_on(self._shelves.now_ns()):
            _answer(link, reply, search.answer())
            return
        if len(self._searches.get(link.number, ())) >= QUERIES_MAX:
            raise Mq9Error(429, f"a connection has at most {QUERIES_MAX} long queries at a time")
        self._searches.setdefault(link.number, deque()).append(search)
        self._search_soon()

    def _search_soon(self) -> None:
        if self._searches and not self._is_searching:
            self._is_searching = True
            self._run_soon(self._search)

    def _search(self) -> None:
        """Go on with one query, of the connection whose turn it is."""
        self._is_searching = False
        number = next(iter(self._searches), None)
        if number is None:  # the connections of all queries are lost
            return
        searches = self._searches.pop(number)
        attempt(self._search_some, searches)
        if searches:
            self._searches[number] = searches
        self._search_soon()

    def _search_some(self, searches: "deque[_Search]") -> None:
        search = searches.popleft()
        if search.go_on(self._shelves.now_ns()):
            _answer(search.link, search.reply, search.answer())
        else:
            searches.appendleft(search)
