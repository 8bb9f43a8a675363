"""The mailboxes and what they hold: stored, counted, written down, expired.

Rule 1: a letter is in its mailbox only after its class's commit point; until then nobody sees it.
Rule 2: the letters of a mailbox arrive in the order in which they were taken, whatever their classes.
Rule 3: a mailbox whose time is over is gone for everybody who asks, also before the next tick.
Rule 4: one tick does a bounded piece of work; the rest follows in the next turns of the loop.
"""

import hashlib
import math
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Literal, Protocol

from msgspec.structs import replace

from postroom.contracts.mail.options import MailOptions, Storage
from postroom.contracts.mail.recovery import (
    NANOS_PER_US,
    Found,
    letter_of,
    opened_record,
    put_record,
    row_records,
)
from postroom.core.mailbox import (
    MESSAGE_COST_BYTES,
    NOBODY,
    Account,
    Box,
    Lane,
    Letter,
    PullGroup,
    group_cost,
    mailbox_cost,
)
from postroom.core.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S
from postroom.logs import mail_records
from postroom.logs.mail_log import Fail, SegmentLog
from postroom.system.callbacks import attempt, report
from postroom.system.clock import Clock

NUMBER_BITS = 32  # of a message id below the count of starts; together they stay exact in a JSON number
CLAIM_AHEAD = 1 << 20  # messages before a block of numbers ends at which the next block is claimed
EXPIRED_KEPT_MAX = 10_000  # mailboxes of which is remembered that they have expired
DEADLINES_A_TURN_MAX = 200
GRAVES_A_TURN_MAX = 20_000  # letters of expired mailboxes that are let go in one turn
ACCOUNTS_TIDIED_FROM = 1_024  # of so many clients those are forgotten that have stored nothing
WAKES_TIDIED_FROM = 1_024  # of so many deadlines of waits those are dropped whose wait has ended
LABEL_CHARS = 16
RECORD_BYTES = 100  # about what a letter costs in the log besides its own bytes
MEMORY_ONLY_BYTES = MESSAGE_COST_BYTES - RECORD_BYTES  # of the cost of a letter: what the log does not have
MICROS_PER_S = 1_000_000

Ripe = Literal["box", "letter", "delayed", "wait"]


class Emit(Protocol):
    """Where events go."""

    def __call__(self, kind: str, /, **fields: object) -> object: ...


class Watcher(Protocol):
    """Who wants to know what happens on the shelves."""

    def gone(self, box: Box) -> None: ...

    def stored(self, box: Box, letters: list[Letter], sender: str) -> None: ...

    def removed(self, box: Box, number: int) -> None: ...

    def waited(self, serial: int, number: int) -> None: ...

    def is_waiting(self, serial: int, number: int) -> bool: ...


def hashed(mail_id: str) -> str:
    """How a private mailbox is called wherever its id must not stand."""
    return hashlib.sha256(mail_id.encode()).hexdigest()[:LABEL_CHARS]


class Accounts(dict[str, Account]):
    """Clients to what they have stored. Reconnecting changes nothing of what a client has used.

    An account is good for one call: an empty one may be dropped at any later one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tidy_at = ACCOUNTS_TIDIED_FROM

    def __missing__(self, client: str) -> Account:
        if len(self) >= self._tidy_at:
            self._tidy()
        account = self[client] = Account(client)
        return account

    def _tidy(self) -> None:
        for account in [each for each in self.values() if each.empty]:
            del self[account.client]
        self._tidy_at = max(ACCOUNTS_TIDIED_FROM, 2 * len(self))


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
        self.boxes: dict[str, Box] = {}
        self.by_serial: dict[int, Box] = {}
        self.public = Lane()
        """The serials of the public mailboxes."""
        self.agents: dict[str, mail_records.Agent] = {}
        self.accounts = Accounts()
        self.stored_bytes = self.letters = 0
        self._durable_bytes = 0  # about what everything alive takes up in the log
        self._run_soon = run_soon
        self._watcher: Watcher | None = None
        self._serial = 0
        self._deadlines: list[tuple[int, Ripe, int, int]] = []
        self._wakes: list[tuple[int, Ripe, int, int]] = []
        """The deadlines of waits. They are apart because most waits end before."""
        self._wakes_tidied_at = WAKES_TIDIED_FROM
        self._graves: deque[dict[int, Letter]] = deque()
        self._expired: dict[str, None] = {}
        self._digging = False
        self._storages: tuple[Storage, ...] = (
            options.critical,
            options.urgent,
            options.normal,
            options.normal,
        )
        self._box_messages_max = options.quota_messages or math.inf
        self._box_bytes_max = options.quota_bytes or math.inf
        self._client_bytes_max = options.client_quota_bytes or math.inf
        self._bytes_max = options.stored_bytes_max
        self._on_synced, self._on_unsynced = self._synced, self._unsynced  # bound once, for every letter
        self.log = SegmentLog(folder, run_soon) if folder is not None else None
        self._number = 0
        if self.log is not None:
            self._begin(self.log)

    def _begin(self, log: SegmentLog) -> None:
        try:
            start = self._restore(log)
            log.begin(mail_records.Started(start))
        except BaseException:
            log.close()  # and the lock with it: whoever tries again must not wait for itself
            raise
        self._number = start << NUMBER_BITS

    def watch(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def now_ns(self) -> int:
        return self.clock.boot_ns()

    # ---- what was there before -----------------------------------------------------------------

    def _restore(self, log: SegmentLog) -> int:
        """Put the log back on the shelves. Gives the count of this start."""
        found = Found()
        for record in log.read():
            found.take(record)
        self._serial = found.last_serial()
        for opened in found.alive():
            self._restore_box(opened, found)
        self.agents = {name: agent for name, agent in found.agents.items() if agent.card}
        self._durable_bytes += sum(len(agent.card) + RECORD_BYTES for agent in self.agents.values())
        if found.removed or found.gone:
            log.note_garbage()
        for name, damage in log.damage:
            self.tell("quarantined", detail={"file": name, "offset": damage.offset, "bytes": damage.length})
        return found.start + 1

    def _restore_box(self, opened: mail_records.Opened, found: Found) -> None:
        now_us, now_ns = self.clock.wall_us(), self.now_ns()
        end = found.extended.get(opened.serial) or opened
        box = self._make(opened.serial, opened.mail_id, public=opened.public, named=opened.named)
        box.desc, box.creator, box.created_us = opened.desc, opened.creator, opened.created_us
        box.safe = True
        self._charge(box, self.accounts[opened.client])
        # A clock that was set back meanwhile must not give a mailbox more than it had.
        left_us = min(end.expires_us - now_us, round(end.ttl_s * MICROS_PER_S))
        expires_ns = max(1, now_ns + left_us * NANOS_PER_US) if end.expires_us else 0
        self._set_end(box, end.ttl_s, end.expires_us, expires_ns)
        for put in found.letters(opened.serial):
            letter = letter_of(put, self.accounts[put.client], now_ns, now_us)
            self._count(letter, 1, letter.cost)
            self._place(box, [letter], letter.cost)
        for pulled in found.pulled.get(opened.serial, {}).values():
            group = PullGroup(box.letters, pulled.turn)
            group.through = list(pulled.through)
            group.done = {number for number in pulled.done if number in box.letters}
            box.groups[pulled.group] = group
            maker = self.accounts[pulled.client] if pulled.client else box.account
            self.charge_group(pulled.group, group, maker)

    # ---- mailboxes -----------------------------------------------------------------------------

    def _make(self, serial: int, mail_id: str, *, public: bool, named: bool) -> Box:
        label = mail_id if public else hashed(mail_id)
        box = Box(serial, mail_id, public=public, named=named, label=label)
        self.boxes[mail_id] = self.by_serial[serial] = box
        if public:
            self.public.add(serial)
        return box

    def _set_end(self, box: Box, ttl_s: float, expires_us: int, expires_ns: int) -> None:
        box.ttl_s, box.expires_us, box.expires_ns = ttl_s, expires_us, expires_ns
        if expires_ns:
            heappush(self._deadlines, (expires_ns, "box", box.serial, 0))

    def private_id(self, prefix: str) -> str:
        """A random UUID (version 4), which nobody guesses: it has 122 random bits."""
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
    ) -> Box:
        """A new mailbox. It counts as created after `commit`."""
        account = self.accounts[client]
        self._admit_box(account, mailbox_cost(mail_id, desc))
        self._serial += 1
        box = self._make(self._serial, mail_id, public=public, named=named)
        box.desc, box.creator, box.created_us = desc, creator, self.clock.wall_us()
        self._charge(box, account)
        if ttl_s:
            ends_us = box.created_us + round(ttl_s * MICROS_PER_S)
            self._set_end(box, ttl_s, ends_us, self.now_ns() + round(ttl_s * NANOS_PER_S))
        if named:  # nobody draws a private id twice
            self._expired.pop(hashed(mail_id), None)
        if self.log is not None:
            self.log.append(opened_record(box))
        self.tell("created", queue=box.label, type="mailbox", sender=creator, detail={"ttl_s": ttl_s})
        return box

    def _admit_box(self, account: Account, cost: int) -> None:
        options = self.options
        if len(self.boxes) >= options.mailboxes_max:
            raise Mq9Error(429, f"there are {options.mailboxes_max} mailboxes, which is the limit")
        if account.mailboxes >= (options.client_quota_mailboxes or math.inf):
            raise Mq9Error(429, f"this client has {options.client_quota_mailboxes} mailboxes, its quota")
        self._admit_cost(account, cost)

    def _admit_cost(self, account: Account, cost: int) -> None:
        if account.bytes + cost > self._client_bytes_max:
            quota = self.options.client_quota_bytes
            raise Mq9Error(429, f"this client may store {quota} bytes, which is its quota")
        if self.stored_bytes + cost > self._bytes_max:
            raise Mq9Error(429, f"the server stores {self._bytes_max} bytes, which is its limit")

    def _charge(self, box: Box, account: Account) -> None:
        """Count a mailbox against who created it."""
        box.account = account
        account.mailboxes += 1
        self._add_cost(box, mailbox_cost(box.mail_id, box.desc))

    def _add_cost(self, box: Box, cost: int) -> None:
        box.cost += cost
        box.account.bytes += cost
        self.stored_bytes += cost

    def admit_group(self, account: Account, name: str) -> None:
        """Refuse a pull group for which its maker has no room."""
        self._admit_cost(account, group_cost(name))

    def charge_group(self, name: str, group: PullGroup, account: Account) -> None:
        """Count a pull group against who made it."""
        group.account = account
        group.count()
        self._count_group(account, 1, group_cost(name))

    def _end_group(self, name: str, group: PullGroup) -> None:
        group.forget_all()
        self._count_group(group.account, -1, -group_cost(name))
        group.account = NOBODY  # an acknowledgement may still be on its way to the disk

    def _count_group(self, account: Account, change: int, cost: int) -> None:
        account.groups += change
        account.bytes += cost
        self.stored_bytes += cost

    def extend(self, box: Box, ttl_s: float) -> None:
        """Give a mailbox so long from now on, if that is more than it has."""
        now_us = self.clock.wall_us()
        expires_us = now_us + round(ttl_s * MICROS_PER_S) if ttl_s else 0
        if not box.expires_us or (expires_us and expires_us <= box.expires_us):
            raise Mq9Error(400, "a lifetime can only become longer")
        self._set_end(box, ttl_s, expires_us, self.now_ns() + round(ttl_s * NANOS_PER_S) if ttl_s else 0)
        if self.log is not None:
            self.log.append(mail_records.Extended(box.serial, ttl_s, expires_us))

    def find(self, mail_id: str) -> Box:
        """A living mailbox, or the reason why there is none."""
        box = self.boxes.get(mail_id)
        if box is not None:
            if box.expires_ns == 0 or box.expires_ns > self.now_ns():
                return box
            self.expire(box)
        if "*" in mail_id or ">" in mail_id:
            raise Mq9Error(403, "a wildcard in place of a mailbox is not allowed")
        if hashed(mail_id) in self._expired:
            raise Mq9Error(410, "the mailbox has expired")
        raise Mq9Error(404, "the mailbox does not exist")

    def expire(self, box: Box) -> None:
        """End a mailbox. Its letters are let go a bounded number at a time."""
        box.gone = True
        del self.boxes[box.mail_id], self.by_serial[box.serial]
        if box.public:
            self.public.lost(self.by_serial)
        box.account.mailboxes -= 1
        self._add_cost(box, -box.cost)
        for name, group in box.groups.items():
            self._end_group(name, group)
        self._expired[hashed(box.mail_id)] = None
        if len(self._expired) > EXPIRED_KEPT_MAX:
            del self._expired[next(iter(self._expired))]
        self._graves.append(box.letters)
        if box.delayed:
            self._graves.append(box.delayed)
        if self.log is not None:
            self.log.supersede(mail_records.Gone(box.serial))
        self.tell("expired", queue=box.label, type="mailbox")
        if self._watcher is not None:
            self._watcher.gone(box)

    # ---- letters -------------------------------------------------------------------------------

    def next_numbers(self, count: int) -> int:
        """The first of `count` message ids in a row, above every id that was ever given."""
        before = self._number
        self._number = before + count
        block = (self._number + CLAIM_AHEAD) >> NUMBER_BITS
        if self.log is not None and block != (before + CLAIM_AHEAD) >> NUMBER_BITS:
            self.log.claim(mail_records.Started(block))
        return before + 1

    def storage(self, rank: int) -> Storage:
        """How a rank is stored."""
        return self._storages[rank] if self.log is not None else "memory"

    def admit(self, box: Box, account: Account, count: int, cost: int) -> None:
        """Refuse letters that do not fit all together."""
        if len(box.letters) + len(box.delayed) + box.reserved + count > self._box_messages_max:
            quota = self.options.quota_messages
            raise Mq9Error(429, f"the mailbox holds {quota} messages, which is its quota")
        if box.bytes + box.reserved_bytes + cost > self._box_bytes_max:
            quota = self.options.quota_bytes
            raise Mq9Error(429, f"the mailbox may hold {quota} bytes, which is its quota")
        if account.bytes + cost > self._client_bytes_max or self.stored_bytes + cost > self._bytes_max:
            self._admit_cost(account, cost)

    def write(self, box: Box, letters: list[Letter], nbytes: int, *, droppable: bool = False) -> None:
        """Reserve room for letters of one sender and rank, and append them to the log if they are durable.

        Letters that come with others have no key, lifetime, delay or headers. The log gives droppable
        letters up when it cannot be written; `forgo` is to be called then.
        """
        count, first = len(letters), letters[0]
        box.reserved += count
        box.reserved_bytes += nbytes
        self._count(first, count, nbytes)
        if not first.durable or self.log is None:
            return
        if count == 1:
            self.log.append(put_record(box, first, self.clock), droppable=droppable)
            return
        for record in row_records(box, letters, nbytes):
            self.log.append(record, droppable=droppable)

    def forgo(self, box: Box, letters: list[Letter], nbytes: int) -> None:
        """Give up letters that could not be written, or whose mailbox has gone meanwhile."""
        box.reserved -= len(letters)
        box.reserved_bytes -= nbytes
        self._count(letters[0], -len(letters), -nbytes)

    def commit(
        self, storage: Storage, call: Callable[..., object], *facts: object, fail: Fail | None = None
    ) -> None:
        """Do something when what was appended so far counts as stored; `fail` when it cannot be written."""
        if self.log is None or storage == "memory":
            call(*facts)
        elif storage == "os":
            self.log.after_write(call, *facts, fail=fail)
        else:
            self.log.after_sync(call, *facts, fail=fail)

    def commit_letters(
        self,
        box: Box,
        storage: Storage,
        call: Callable[..., object],
        *facts: object,
        fail: Fail | None = None,
    ) -> None:
        """As `commit`, and not before what the same mailbox took earlier: its letters arrive in order."""
        log = self.log
        if log is not None and (storage == "group" or (box.syncing and not log.trouble)):
            box.syncing += 1
            unsynced = self._on_unsynced if fail is not None else None
            log.after_sync(self._on_synced, box, call, facts, fail, fail=unsynced)
        elif log is not None and storage == "os":
            log.after_write(call, *facts, fail=fail)
        else:
            call(*facts)

    def _synced(
        self, box: Box, call: Callable[..., object], facts: tuple[object, ...], _: Fail | None
    ) -> None:
        box.syncing -= 1
        call(*facts)

    def _unsynced(self, box: Box, _: object, facts: tuple[object, ...], fail: Fail, why: str) -> None:
        box.syncing -= 1
        fail(*facts, why)

    def after_earlier(
        self, mail_id: str, call: Callable[..., object], *facts: object, fail: Fail | None = None
    ) -> bool:
        """Do something when all that a mailbox has taken so far is stored. False when it is already."""
        box = self.boxes.get(mail_id)
        if box is None or not box.reserved or self.log is None or self.log.trouble:
            return False
        self.commit("group" if box.syncing else "os", call, *facts, fail=fail)
        return True

    def check_log(self, storage: Storage) -> None:
        """Refuse what could not be stored at present."""
        if storage != "memory" and self.log is not None and self.log.trouble:
            raise Mq9Error(503, self.log.trouble)

    def arrived(self, box: Box, letters: list[Letter], nbytes: int, sender: str = "") -> bool:
        """Letters that were reserved are stored. False when their mailbox has gone meanwhile."""
        if box.gone:
            self.forgo(box, letters, nbytes)
            return False
        box.reserved -= len(letters)
        box.reserved_bytes -= nbytes
        if self._place(box, letters, nbytes) and self._watcher is not None:
            try:
                self._watcher.stored(box, letters, sender)
            except Exception:  # noqa: BLE001 - no failure of their sender: the letters are stored
                report(self._watcher.stored)
        return True

    def _place(self, box: Box, letters: list[Letter], nbytes: int) -> bool:
        """Put letters into their mailbox; False for a letter that is delayed, which nobody sees yet."""
        first = letters[0]
        if first.due_ns:
            box.delayed[first.number] = first
            heappush(self._deadlines, (first.due_ns, "delayed", box.serial, first.number))
            return False
        replaced = box.add(letters, nbytes)
        if replaced is not None:
            self._let_go(box, replaced)
        if first.expires_ns:
            heappush(self._deadlines, (first.expires_ns, "letter", box.serial, first.number))
        return True

    def remove(self, box: Box, number: int) -> Letter | None:
        """Take a letter away; None when there is none."""
        letter = box.remove(number)
        if letter is not None:
            self._let_go(box, letter)
        return letter

    def _let_go(self, box: Box, letter: Letter) -> None:
        self._count(letter, -1, -letter.cost)
        if letter.durable and self.log is not None:
            self.log.supersede(mail_records.Removed(box.serial, [letter.number]))
        if self._watcher is not None:
            self._watcher.removed(box, letter.number)

    def _count(self, letter: Letter, count: int, nbytes: int) -> None:
        """Add `count` letters like this one, which cost `nbytes` together, to all totals."""
        self.letters += count
        self.stored_bytes += nbytes
        letter.account.bytes += nbytes
        if letter.durable:
            self._durable_bytes += nbytes - MEMORY_ONLY_BYTES * count

    # ---- time ----------------------------------------------------------------------------------

    def wake_at(self, due_ns: int, serial: int, number: int) -> None:
        """Tell the watcher when a wait is over."""
        if len(self._wakes) >= self._wakes_tidied_at:
            self._tidy_wakes()
        heappush(self._wakes, (due_ns, "wait", serial, number))

    def _tidy_wakes(self) -> None:
        """Drop the deadlines of waits that have ended."""
        watcher = self._watcher
        self._wakes = [wake for wake in self._wakes if watcher is not None and watcher.is_waiting(*wake[2:])]
        heapify(self._wakes)
        self._wakes_tidied_at = max(WAKES_TIDIED_FROM, 2 * len(self._wakes))

    def tick(self) -> None:
        """Do what is due, some of it now and the rest in the next turns."""
        if not self._digging:
            self._dig()
        if self.log is not None:
            now_s = self.now_ns() / NANOS_PER_S
            if self.log.wants_copy(self._durable_bytes + RECORD_BYTES * len(self.boxes), now_s):
                self.log.copy(self._alive(), now_s)
            self.log.tick()

    def _dig(self) -> None:
        now_ns = self.now_ns()
        self._digging = False
        for _ in range(DEADLINES_A_TURN_MAX):
            due = self._due(now_ns)
            if due is None:
                break
            _, what, serial, number = heappop(due)
            attempt(self._ripe, what, serial, number, now_ns)
        self._bury()
        if self._graves or self._due(now_ns) is not None:
            self._digging = True
            self._run_soon(self._dig)
        elif self.log is not None:
            self.log.flush()

    def _due(self, now_ns: int) -> list[tuple[int, Ripe, int, int]] | None:
        """The heap with the next deadline that is over."""
        found: list[tuple[int, Ripe, int, int]] | None = None
        for heap in (self._deadlines, self._wakes):
            if heap and heap[0][0] <= now_ns and (found is None or heap[0] < found[0]):
                found = heap
        return found

    def _bury(self) -> None:
        left = GRAVES_A_TURN_MAX
        while self._graves and left:
            grave = self._graves[0]
            while grave and left:
                letter = grave.popitem()[1]
                self._count(letter, -1, -letter.cost)
                left -= 1
            if not grave:
                self._graves.popleft()

    def _ripe(self, what: Ripe, serial: int, number: int, now_ns: int) -> None:
        box = self.by_serial.get(serial)
        if what == "wait":
            if self._watcher is not None:
                self._watcher.waited(serial, number)
        elif box is None:
            return
        elif what == "box":
            if 0 < box.expires_ns <= now_ns:  # otherwise it was given more time
                self.expire(box)
        elif what == "letter":
            if self.remove(box, number) is not None:
                self.tell("expired", queue=box.label, message_id=f"{box.label}/{number}")
        else:
            self._release(box, number)

    def _release(self, box: Box, number: int) -> None:
        """A delayed letter is due: it gets a number of now, and its place behind all that came before."""
        waiting = box.delayed.pop(number, None)
        if waiting is None:
            return
        letter = replace(waiting, number=self.next_numbers(1), due_ns=0)
        self._count(letter, -1, -letter.cost)
        self.write(box, [letter], letter.cost)
        if letter.durable and self.log is not None:
            self.log.supersede(mail_records.Removed(box.serial, [number]))
        self.commit_letters(box, self.storage(letter.rank), self.arrived, box, [letter], letter.cost)

    # ---- compaction ----------------------------------------------------------------------------

    def _alive(self) -> Iterator[mail_records.Record]:
        """Everything that has to stand in the log, a record at a time."""
        yield from list(self.agents.values())
        for box in list(self.boxes.values()):
            if box.gone:
                continue
            yield opened_record(box)
            for name, group in list(box.groups.items()):
                through, done, client = list(group.through), sorted(group.done), group.account.client
                yield mail_records.Pulled(box.serial, name, group.turn, through, done, client)
            for number, letter in [*box.letters.items(), *box.delayed.items()]:
                if letter.durable and not box.gone and (number in box.letters or number in box.delayed):
                    yield put_record(box, letter, self.clock)

    # ---- agents --------------------------------------------------------------------------------

    def keep_agent(self, agent: mail_records.Agent) -> None:
        """Write down what is known of an agent now; without a card it is gone."""
        known = self.agents.pop(agent.name, None)
        if known is not None:
            self._durable_bytes -= len(known.card) + RECORD_BYTES
        if agent.card:
            self.agents[agent.name] = agent
            self._durable_bytes += len(agent.card) + RECORD_BYTES
        if self.log is not None:
            self.log.supersede(agent)

    # ---- events --------------------------------------------------------------------------------

    def tell(self, kind: str, **fields: object) -> None:
        """One event of the stream."""
        if self.emit is not None:
            self.emit(kind, **fields)
