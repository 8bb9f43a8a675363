"""The mailboxes of one server and their letters: creation, storing, removal, expiry.

Rule 1: a letter is in its mailbox only after its storage class's commit point; until then no client sees it.
Rule 2: the letters of a mailbox arrive in the order in which they were accepted, whatever their classes.
Rule 3: an expired mailbox is gone for every caller, also before the next tick.
Rule 4: a mailbox belongs to the organization of its creator, and a name is one within it. A client sees the
        mailboxes of its organization and those of no organization; to it, others do not exist.
Rule 5: one tick does a bounded amount of work; the rest follows in the next turns of the loop.
"""

import hashlib
import sys
import uuid
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.journal import NANOS_PER_US, Journal, LogContents, letter_of, opened_record
from postroom.contracts.mail.options import MailOptions, Storage
from postroom.contracts.mail.quotas import RECORD_BYTES, Quotas
from postroom.core.gate import Owner, permit
from postroom.core.mail.mailbox import (
    AgentKey,
    Letter,
    Mailbox,
    PullGroup,
    SortedNumbers,
    cost_of,
    key_of,
    mailbox_cost,
)
from postroom.core.mail.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S
from postroom.logs import mail_records
from postroom.system.callbacks import attempt, report
from postroom.system.clock import Clock

EXPIRED_KEPT_MAX = 10_000  # expired mailboxes that are remembered, to answer 410 instead of 404
DEADLINES_A_TURN_MAX = 200
EXPIRED_LETTERS_A_TURN_MAX = 20_000  # letters of expired mailboxes that are released in one turn
LABEL_CHARS = 16
DEAD_SUFFIX = ".dead"  # of the mailbox with the letters of another one that could not be delivered
WAITS_TIDIED_FROM = 1_024  # number of wait deadlines from which those of ended waits are dropped
MICROS_PER_S = 1_000_000


Kind = Literal["box", "letter", "delayed", "wait"]


class Deadline(NamedTuple):
    """`number` is that of a letter or of a wait."""

    due_ns: int
    kind: Kind
    serial: int
    number: int


class Deadlines:
    """Two heaps. Waits have their own, because most of them end before their deadline."""

    def __init__(self) -> None:
        self.is_waiting: Callable[[int, int], bool] = lambda _serial, _number: True
        """Whether a wait, by mailbox and number, has not ended."""
        self._deadlines: list[Deadline] = []
        self._waits: list[Deadline] = []
        self._tidy_at = WAITS_TIDIED_FROM

    def add(self, due_ns: int, kind: Kind, serial: int, number: int = 0) -> None:
        heappush(self._deadlines, Deadline(due_ns, kind, serial, number))

    def add_wait(self, due_ns: int, serial: int, number: int) -> None:
        if len(self._waits) >= self._tidy_at:
            self._waits = [wait for wait in self._waits if self.is_waiting(wait.serial, wait.number)]
            heapify(self._waits)
            self._tidy_at = max(WAITS_TIDIED_FROM, 2 * len(self._waits))
        heappush(self._waits, Deadline(due_ns, "wait", serial, number))

    def is_due(self, now_ns: int) -> bool:
        return self._due_heap(now_ns) is not None

    def pop_due(self, now_ns: int) -> Deadline | None:
        heap = self._due_heap(now_ns)
        return heappop(heap) if heap is not None else None

    def _due_heap(self, now_ns: int) -> list[Deadline] | None:
        """The heap with the earliest deadline that is over."""
        found: list[Deadline] | None = None
        for heap in (self._deadlines, self._waits):
            if heap and heap[0].due_ns <= now_ns and (found is None or heap[0] < found[0]):
                found = heap
        return found


class Emit(Protocol):
    """The destination of events."""

    def __call__(self, kind: str, /, **fields: object) -> object: ...


class Observer(Protocol):
    """Is called when mailboxes and letters change."""

    def expired(self, box: Mailbox) -> None: ...

    def stored(self, box: Mailbox, letters: list[Letter], sender: str) -> None:
        """Called when the letters of one send are stored."""

    def removed(self, box: Mailbox, number: int) -> None: ...

    def wait_expired(self, serial: int, number: int) -> None: ...

    def is_waiting(self, serial: int, number: int) -> bool: ...


def hashed(mail_id: str) -> str:
    """The label of a private mailbox wherever its id must not appear."""
    return hashlib.sha256(mail_id.encode()).hexdigest()[:LABEL_CHARS]


class Mailboxes:
    """All mailboxes of one server."""

    def __init__(
        self,
        folder: Path | None,
        run_soon: Callable[[Callable[[], None]], object],
        options: MailOptions,
        clock: Clock,
        emit: Emit | None,
    ) -> None:
        self.options = options
        self.clock = clock
        self.emit = emit
        self.quotas = Quotas(options)
        self.deadlines = Deadlines()
        self.by_key: dict[str, Mailbox] = {}
        """By id, and those of an organization by `key_of`."""
        self._of_orgs: dict[str, tuple[Mailbox, ...]] = {}
        """The mailboxes of organizations by id, for clients that see all of them."""
        self.by_serial: dict[int, Mailbox] = {}
        self.public = SortedNumbers()
        """The serials of the public mailboxes."""
        self.agents: dict[AgentKey, mail_records.AgentRecord] = {}
        """By organization and name."""
        self._run_soon = run_soon
        self._observer: Observer | None = None
        self._serial = 0
        self._released: deque[dict[int, Letter]] = deque()
        """Letters of expired mailboxes, which still count against their senders."""
        self._expired: dict[str, None] = {}
        self._is_scheduled = False
        self.journal = Journal(folder, run_soon, options, clock)
        self.journal.begin(self._restore)

    def observe(self, observer: Observer) -> None:
        self._observer = observer
        self.deadlines.is_waiting = observer.is_waiting

    def now_ns(self) -> int:
        return self.clock.boot_ns()

    def emit_event(self, kind: str, **fields: object) -> None:
        if self.emit is not None:
            self.emit(kind, **fields)

    def emit_delivered(self, box: Mailbox, letters: list[Letter], recipient: str) -> None:
        """Emit each delivery, if the options ask for receipts."""
        if self.options.receipts:
            for letter in letters:
                self.emit_event(
                    "delivered",
                    queue=box.label,
                    message_id=f"{box.label}/{letter.number}",
                    recipient=recipient,
                    priority=letter.rank,
                )

    # ---- recovery ------------------------------------------------------------------------------

    def _restore(self, contents: LogContents) -> None:
        """Rebuild everything from the log."""
        self._serial = contents.last_serial()
        for opened in contents.live_mailboxes():
            self._restore_mailbox(opened, contents)
        self.agents = {key: agent for key, agent in contents.agents.items() if agent.card}
        for agent in self.agents.values():
            self.quotas.count_agent(agent.card, 1)
        for name, damage in contents.damage:
            detail = {"file": name, "offset": damage.offset, "bytes": damage.length}
            self.emit_event("quarantined", detail=detail)

    def _restore_mailbox(self, opened: mail_records.Opened, contents: LogContents) -> None:
        now_us, now_ns = self.clock.wall_us(), self.now_ns()
        accounts = self.quotas.accounts
        end = contents.extended.get(opened.serial) or opened
        org, public, named = sys.intern(opened.org), opened.public, opened.named
        box = self._make(opened.serial, opened.mail_id, org, public=public, named=named)
        box.desc, box.creator, box.created_us = opened.desc, opened.creator, opened.created_us
        box.is_stored = True
        self.quotas.add_mailbox(box, accounts[opened.client])
        # A wall clock that was set back must not give a mailbox more than its lifetime.
        left_us = min(end.expires_us - now_us, round(end.ttl_s * MICROS_PER_S))
        expires_ns = max(1, now_ns + left_us * NANOS_PER_US) if end.expires_us else 0
        self._set_end(box, end.ttl_s, end.expires_us, expires_ns)
        for put in contents.live_letters(opened.serial):
            letter = letter_of(put, accounts[put.client], now_ns, now_us)
            self.quotas.count(letter, 1, letter.cost)
            self._place(box, [letter], letter.cost)
        for pulled in contents.pulled.get(opened.serial, {}).values():
            group = PullGroup(box.letters, pulled.turn)
            group.through = list(pulled.through)
            group.done = {number for number in pulled.done if number in box.letters}
            box.groups[pulled.group] = group
            creator = accounts[pulled.client] if pulled.client else box.account
            self.quotas.add_group(pulled.group, group, creator)

    # ---- mailboxes -----------------------------------------------------------------------------

    def _make(self, serial: int, mail_id: str, org: str, *, public: bool, named: bool) -> Mailbox:
        label = mail_id if public else hashed(mail_id)
        box = Mailbox(serial, mail_id, public=public, named=named, label=label, org=org)
        self.by_key[box.key] = self.by_serial[serial] = box
        if org:
            self._of_orgs[mail_id] = (*self._of_orgs.get(mail_id, ()), box)
        if public:
            self.public.add(serial)
        return box

    def _set_end(self, box: Mailbox, ttl_s: float, expires_us: int, expires_ns: int) -> None:
        box.ttl_s, box.expires_us, box.expires_ns = ttl_s, expires_us, expires_ns
        if expires_ns:
            self.deadlines.add(expires_ns, "box", box.serial)

    def private_id(self, prefix: str) -> str:
        """A random UUID (version 4), which cannot be guessed: it has 122 random bits."""
        made = str(uuid.uuid4())
        return f"{prefix}.{made}" if prefix else made

    def open(
        self,
        mail_id: str,
        ttl_s: float,
        *,
        public: bool,
        named: bool,
        desc: str,
        creator: str,
        client: str,
        org: str,
    ) -> Mailbox:
        """Create a mailbox. It counts as created when the journal has stored it."""
        account = self.quotas.accounts[client]
        self.quotas.admit_mailbox(account, mailbox_cost(mail_id, desc, org), len(self.by_key))
        self._serial += 1
        box = self._make(self._serial, mail_id, org, public=public, named=named)
        box.desc, box.creator, box.created_us = desc, creator, self.clock.wall_us()
        self.quotas.add_mailbox(box, account)
        if ttl_s:
            ends_us = box.created_us + round(ttl_s * MICROS_PER_S)
            self._set_end(box, ttl_s, ends_us, self.now_ns() + round(ttl_s * NANOS_PER_S))
        if named:  # a private id is never drawn twice
            self._expired.pop(hashed(box.key), None)
        self.journal.append(opened_record(box))
        facts = {"org_id": org} if org else {}
        self.emit_event(
            "created", queue=box.label, type="mailbox", sender=creator, detail={"ttl_s": ttl_s}, **facts
        )
        return box

    def extend(self, box: Mailbox, ttl_s: float) -> None:
        """Let a mailbox end `ttl_s` from now; 0 is never. Refused when that is not later than its end."""
        now_us = self.clock.wall_us()
        expires_us = now_us + round(ttl_s * MICROS_PER_S) if ttl_s else 0
        if not box.expires_us or (expires_us and expires_us <= box.expires_us):
            raise Mq9Error(400, "a lifetime can only become longer")
        self._set_end(box, ttl_s, expires_us, self.now_ns() + round(ttl_s * NANOS_PER_S) if ttl_s else 0)
        self.journal.append(mail_records.Extended(box.serial, ttl_s, expires_us))

    def own(self, mail_id: str, org: str) -> Mailbox | None:
        """The mailbox that an id means in an organization: its own, else that of no organization."""
        if org and (box := self.by_key.get(key_of(org, mail_id))) is not None:
            return box
        return self.by_key.get(mail_id)

    def visible(self, mail_id: str, link: Link) -> Mailbox | None:
        """The mailbox that an id means to a client. None when there is none, or several."""
        box = self.own(mail_id, link.org)
        if box is None and link.sees_all:
            of_orgs = self._of_orgs.get(mail_id, ())
            return of_orgs[0] if len(of_orgs) == 1 else None
        return box

    def is_live(self, box: Mailbox) -> bool:
        """Whether a mailbox can still be used. If its time is over, it is removed now."""
        if box.expires_ns == 0 or box.expires_ns > self.now_ns():
            return True
        self.expire(box)
        return False

    def find(self, mail_id: str, link: Link) -> Mailbox:
        """A live mailbox that the client sees. Raises `Mq9Error` with the reason when there is none."""
        box = self.visible(mail_id, link)
        if box is not None and self.is_live(box):
            return box
        if link.sees_all and len(self._of_orgs.get(mail_id, ())) > 1:
            raise Mq9Error(409, "several organizations have a mailbox of this name: use a token of one")
        if "*" in mail_id or ">" in mail_id:
            raise Mq9Error(403, "a wildcard in place of a mailbox is not allowed")
        if any(hashed(key) in self._expired for key in {mail_id, key_of(link.org, mail_id)}):
            raise Mq9Error(410, "the mailbox has expired")
        raise Mq9Error(404, "the mailbox does not exist")

    def find_reachable(self, mail_id: str, link: Link, action: str) -> Mailbox:
        """As `find`, a mailbox whose messages the client may add to or delete."""
        box, identity = self.find(mail_id, link), link.identity
        if identity is not None and identity.permissions.only_message:
            owner = owner_of(box)
            if not permit(identity, action, owner, owner.agent):
                raise Mq9Error(403, "the token may not send to the creator of this mailbox")
        return box

    def expire(self, box: Mailbox) -> None:
        """End a mailbox. Its letters are released a bounded number at a time."""
        box.has_expired = True
        del self.by_key[box.key], self.by_serial[box.serial]
        if others := tuple(each for each in self._of_orgs.pop(box.mail_id, ()) if each is not box):
            self._of_orgs[box.mail_id] = others
        if box.public:
            self.public.lost(self.by_serial)
        self.quotas.remove_mailbox(box)
        self._expired[hashed(box.key)] = None
        if len(self._expired) > EXPIRED_KEPT_MAX:
            del self._expired[next(iter(self._expired))]
        self._released.append(box.letters)
        if box.delayed:
            self._released.append(box.delayed)
        self.journal.supersede(mail_records.MailboxExpired(box.serial))
        self.emit_event("expired", queue=box.label, type="mailbox")
        if self._observer is not None:
            self._observer.expired(box)

    # ---- letters -------------------------------------------------------------------------------

    def write(self, box: Mailbox, letters: list[Letter], nbytes: int, *, droppable: bool = False) -> None:
        """Reserve room for letters of one sender and rank, and append durable ones to the log.

        When the log cannot be written, droppable letters are dropped, and the caller has to call `give_up`
        for them.
        """
        count, first = len(letters), letters[0]
        box.reserved += count
        box.reserved_bytes += nbytes
        self.quotas.count(first, count, nbytes)
        if first.durable:
            self.journal.put(box, letters, nbytes, droppable=droppable)

    def give_up(self, box: Mailbox, letters: list[Letter], nbytes: int) -> None:
        """Release reserved letters that could not be written, or whose mailbox has expired."""
        box.reserved -= len(letters)
        box.reserved_bytes -= nbytes
        self.quotas.count(letters[0], -len(letters), -nbytes)

    def commit(self, box: Mailbox, letters: list[Letter], nbytes: int, sender: str = "") -> bool:
        """Put reserved letters into their mailbox. False when it has expired since `write`."""
        if box.has_expired:
            self.give_up(box, letters, nbytes)
            return False
        box.reserved -= len(letters)
        box.reserved_bytes -= nbytes
        if self._place(box, letters, nbytes) and self._observer is not None:
            try:
                self._observer.stored(box, letters, sender)
            except Exception:  # noqa: BLE001 - the letters are stored: their sender is not refused
                report(self._observer.stored)
        return True

    def _place(self, box: Mailbox, letters: list[Letter], nbytes: int) -> bool:
        """Put letters into their mailbox. False for a delayed letter, which is not visible yet."""
        first = letters[0]
        if first.due_ns:
            box.delayed[first.number] = first
            self.deadlines.add(first.due_ns, "delayed", box.serial, first.number)
            return False
        replaced = box.add(letters, nbytes)
        if replaced is not None:
            self._release(box, replaced)
        if first.expires_ns:
            self.deadlines.add(first.expires_ns, "letter", box.serial, first.number)
        return True

    def remove(self, box: Mailbox, number: int) -> Letter | None:
        """Remove a letter; None when there is none with this number."""
        letter = box.remove(number)
        if letter is not None:
            self._release(box, letter)
        return letter

    def _release(self, box: Mailbox, letter: Letter) -> None:
        """Stop counting a removed letter, in memory and in the log."""
        self.quotas.count(letter, -1, -letter.cost)
        if letter.durable:
            self.journal.supersede(mail_records.Removed(box.serial, [letter.number]))
        if self._observer is not None:
            self._observer.removed(box, letter.number)

    # ---- dead letters --------------------------------------------------------------------------

    def delivery_failed(self, box: Mailbox, letter: Letter) -> bool:
        """Count a failed delivery. True when the letter is being moved to the dead letters."""
        limit = self.options.dead_letter_after
        if not limit or box.mail_id.endswith(DEAD_SUFFIX):
            return False
        failures = box.failures.get(letter.number, 0) + 1
        box.failures[letter.number] = failures
        if failures < limit or self.journal.trouble:
            return False
        dead = self.by_key.get(box.key + DEAD_SUFFIX) or self._open_dead(box)
        added = b"NATS/1.0\r\nMq9-Dead-Msg-Id: %d\r\nMq9-Dead-Deliveries: %d\r\n" % (letter.number, failures)
        rest = letter.headers[letter.headers.find(b"\r\n") + 2 :] if letter.headers else b"\r\n"
        moved = replace(
            letter,
            number=self.journal.next_numbers(1),
            headers=added + rest,
            cost=cost_of(len(letter.payload) + len(added) + len(rest), "", letter.tags),
            expires_ns=0,
            key="",
        )
        self.write(dead, [moved], moved.cost)
        message_id = f"{box.label}/{letter.number}"
        self.emit_event("dead_letter", queue=box.label, message_id=message_id, attempt=failures)
        storage: Storage = self.journal.storage(letter.rank) if letter.durable else "memory"
        self.journal.after_letters(dead, storage, self._moved_to_dead, box, letter, dead, moved)
        return True

    def _open_dead(self, box: Mailbox) -> Mailbox:
        """Open the mailbox of the dead letters, which expires together with the mailbox."""
        left_s = max(1.0, (box.expires_ns - self.now_ns()) / NANOS_PER_S) if box.expires_ns else 0.0
        dead = self.open(
            box.mail_id + DEAD_SUFFIX,
            left_s,
            public=box.public,
            named=True,
            desc="dead letters",
            creator=box.creator,
            client=box.account.name,
            org=box.org,
        )
        dead.is_stored = True
        return dead

    def _moved_to_dead(self, box: Mailbox, letter: Letter, dead: Mailbox, moved: Letter) -> None:
        if self.commit(dead, [moved], moved.cost) and not box.has_expired:
            self.remove(box, letter.number)

    # ---- time ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Handle deadlines that are over: a bounded number now, the rest in the next turns."""
        if not self._is_scheduled:
            self._handle_due()
        live_bytes = self.quotas.log_bytes + RECORD_BYTES * len(self.by_key)
        self.journal.tick(live_bytes, self.agents, self.by_key)

    def _handle_due(self) -> None:
        now_ns = self.now_ns()
        self._is_scheduled = False
        for _ in range(DEADLINES_A_TURN_MAX):
            deadline = self.deadlines.pop_due(now_ns)
            if deadline is None:
                break
            attempt(self._handle, deadline, now_ns)
        self._release_expired()
        if self._released or self.deadlines.is_due(now_ns):
            self._is_scheduled = True
            self._run_soon(self._handle_due)
        else:
            self.journal.flush()

    def _release_expired(self) -> None:
        left = EXPIRED_LETTERS_A_TURN_MAX
        while self._released and left:
            letters = self._released[0]
            while letters and left:
                letter = letters.popitem()[1]
                self.quotas.count(letter, -1, -letter.cost)
                left -= 1
            if not letters:
                self._released.popleft()

    def _handle(self, deadline: Deadline, now_ns: int) -> None:
        _, kind, serial, number = deadline
        box = self.by_serial.get(serial)
        if kind == "wait":
            if self._observer is not None:
                self._observer.wait_expired(serial, number)
        elif box is None:
            return
        elif kind == "box":
            if 0 < box.expires_ns <= now_ns:  # otherwise its lifetime was extended
                self.expire(box)
        elif kind == "letter":
            if self.remove(box, number) is not None:
                self.emit_event("expired", queue=box.label, message_id=f"{box.label}/{number}")
        else:
            self._deliver_delayed(box, number)

    def _deliver_delayed(self, box: Mailbox, number: int) -> None:
        """Give a delayed letter that is due a new number, after everything accepted before."""
        delayed = box.delayed.pop(number, None)
        if delayed is None:
            return
        letter = replace(delayed, number=self.journal.next_numbers(1), due_ns=0)
        self.quotas.count(letter, -1, -letter.cost)
        self.write(box, [letter], letter.cost)
        if letter.durable:
            self.journal.supersede(mail_records.Removed(box.serial, [number]))
        storage = self.journal.storage(letter.rank)
        self.journal.after_letters(box, storage, self.commit, box, [letter], letter.cost)

    # ---- agents --------------------------------------------------------------------------------

    def keep_agent(self, agent: mail_records.AgentRecord) -> None:
        """Replace the record of an agent; without a card the agent is removed."""
        key = agent.org, agent.name
        known = self.agents.pop(key, None)
        if known is not None:
            self.quotas.count_agent(known.card, -1)
        if agent.card:
            self.agents[key] = agent
            self.quotas.count_agent(agent.card, 1)
        self.journal.supersede(agent)


def owner_of(box: Mailbox) -> Owner:
    """The owner of a mailbox. Users of an organization are named `ORGANIZATION/AGENT`."""
    return Owner(box.org, box.creator.removeprefix(f"{box.org}/") if box.org else box.creator)
