"""The journal of the mailboxes: message ids, records in the log, and when something counts as stored.

Rule 1: without a folder there is no log, and everything is stored in memory.
Rule 2: the letters of a mailbox are stored in the order in which they were accepted, whatever their storage
        classes: a letter that needs no fsync waits for an earlier one that does.
Rule 3: nothing else in this room calls the log. The other modules only make records.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from postroom.contracts.mail.options import MailOptions, Storage
from postroom.core.mail.mailbox import RANKS, AgentKey, Letter, MailAccount, Mailbox, cost_of, key_of
from postroom.core.mail.mq9 import Mq9Error
from postroom.core.times import NANOS_PER_S
from postroom.logs.mail_log import Fail, SegmentLog
from postroom.logs.mail_records import (
    AgentRecord,
    Extended,
    MailboxExpired,
    Opened,
    Pulled,
    Put,
    PutRow,
    Record,
    Removed,
    Started,
)
from postroom.message import Damage
from postroom.system.clock import Clock
from postroom.system.crypto.encryption import key_file_encryption

NUMBER_BITS = 32  # of a message id below the count of starts; together they stay exact in a JSON number
CLAIM_AHEAD = 1 << 20  # messages before the end of a block of ids at which the next block is claimed
NANOS_PER_US = 1_000


class Journal:
    """The log of one server, if it has a folder."""

    def __init__(
        self,
        folder: Path | None,
        run_soon: Callable[[Callable[[], None]], object],
        options: MailOptions,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._row_bytes_max = options.limits.row_bytes_max
        self.log = None
        if folder is not None:
            self.log = SegmentLog(folder, run_soon, key_file_encryption(options.key_file), options.limits.log)
        self._storages: tuple[Storage, ...] = (
            options.critical,
            options.urgent,
            options.normal,
            options.normal,
        )
        self._number = 0
        self._relief: asyncio.Future[None] | None = None
        """Done when the disk has caught up."""
        self._on_synced, self._on_unsynced = self._synced, self._unsynced  # bound once, for every letter

    def begin(self, restore: Callable[["LogContents"], None]) -> None:
        """Hand what the log holds to `restore`, and open the first segment of this start of the server.

        Ids are above those of all earlier starts.
        """
        log = self.log
        if log is None:
            return
        try:
            contents = LogContents()
            for record in log.read():
                contents.add(record)
            contents.damage = log.damage
            restore(contents)
            if contents.removed or contents.expired:
                log.note_garbage()
            log.begin(Started(contents.start + 1))
            self._number = (contents.start + 1) << NUMBER_BITS
        except BaseException:
            log.close()  # releases the lock of the folder: the caller may try again
            raise

    def close(self) -> None:
        self._relieve()
        if self.log is not None:
            self.log.close()

    @property
    def trouble(self) -> str:
        """Why nothing durable is accepted at present; empty when the log works."""
        return self.log.trouble if self.log is not None else ""

    def next_numbers(self, count: int) -> int:
        """The first of `count` consecutive message ids, above every id that was ever given."""
        before = self._number
        self._number = before + count
        block = (self._number + CLAIM_AHEAD) >> NUMBER_BITS
        if self.log is not None and block != (before + CLAIM_AHEAD) >> NUMBER_BITS:
            self.log.claim(Started(block))
        return before + 1

    def storage(self, rank: int) -> Storage:
        """The storage class of a rank."""
        return self._storages[rank] if self.log is not None else "memory"

    def check(self, storage: Storage) -> None:
        """Raise when nothing can be stored in this class at present."""
        if storage != "memory" and self.log is not None and self.log.trouble:
            raise Mq9Error(503, self.log.trouble)

    def append(self, record: Record, *, droppable: bool = False) -> None:
        if self.log is not None:
            self.log.append(record, droppable=droppable)

    def put(self, box: Mailbox, letters: list[Letter], nbytes: int, *, droppable: bool) -> None:
        """Append durable letters of one rank and sender: in a single record when they are short enough.

        A letter of a larger batch has no key, lifetime, delay or headers.
        """
        assert self.log is not None  # noqa: S101 - for the types: without a log, no letter is durable
        first = letters[0]
        if len(letters) == 1:
            self.log.append(_put_record(box, first, self._clock), droppable=droppable)
            return
        payloads = [letter.payload for letter in letters]
        row = PutRow(box.serial, first.number, first.priority, first.created_us, payloads, first.account.name)
        for record in (row,) if nbytes <= self._row_bytes_max else row.puts():
            self.log.append(record, droppable=droppable)

    def supersede(self, record: Record) -> None:
        """Append a record that makes an earlier one garbage."""
        if self.log is not None:
            self.log.supersede(record)

    def after(
        self, storage: Storage, call: Callable[..., object], *facts: object, fail: Fail | None = None
    ) -> None:
        """Run `call` when everything appended so far is stored, or `fail` when it cannot be written."""
        if self.log is None or storage == "memory":
            call(*facts)
        elif storage == "os":
            self.log.after_write(call, *facts, fail=fail)
        else:
            self.log.after_sync(call, *facts, fail=fail)

    def after_letters(
        self,
        box: Mailbox,
        storage: Storage,
        call: Callable[..., object],
        *facts: object,
        fail: Fail | None = None,
    ) -> None:
        """As `after`, but not before the letters that the same mailbox accepted earlier."""
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
        self, box: Mailbox, call: Callable[..., object], facts: tuple[object, ...], _: Fail | None
    ) -> None:
        box.syncing -= 1
        call(*facts)

    def _unsynced(self, box: Mailbox, _: object, facts: tuple[object, ...], fail: Fail, why: str) -> None:
        box.syncing -= 1
        fail(*facts, why)

    def after_earlier(
        self, box: Mailbox | None, call: Callable[..., object], *facts: object, fail: Fail | None = None
    ) -> bool:
        """Run `call` when everything that a mailbox has accepted is stored.

        Returns False, and does not run it, when nothing is pending or the log does not work.
        """
        if box is None or not box.reserved or self.log is None or self.log.trouble:
            return False
        self.after("group" if box.syncing else "os", call, *facts, fail=fail)
        return True

    # ---- time ----------------------------------------------------------------------------------

    def flush(self) -> None:
        if self.log is not None:
            self.log.flush()

    def catch_up(self) -> Awaitable[None] | None:
        """Flush. Returns an awaitable when the disk lags so far that nothing more should be accepted yet."""
        log = self.log
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

    def tick(self, live_bytes: int, agents: dict[AgentKey, AgentRecord], boxes: dict[str, Mailbox]) -> None:
        """Retry what failed, and start or continue a compaction. The live records have about `live_bytes`."""
        log, now_s = self.log, self._clock.boot_ns() / NANOS_PER_S
        if log is None:
            return
        if log.wants_copy(live_bytes, now_s):
            log.copy(self.live_records(agents, boxes), now_s)
        log.tick()
        if log.trouble:
            self._relieve()  # a log that cannot be written does not catch up

    def live_records(
        self, agents: dict[AgentKey, AgentRecord], boxes: dict[str, Mailbox]
    ) -> Iterator[Record]:
        """Every record that the log has to keep. Mailboxes may change while the iterator is used."""
        yield from list(agents.values())
        for box in list(boxes.values()):
            if box.has_expired:
                continue
            yield opened_record(box)
            for name, group in list(box.groups.items()):
                through, done, client = list(group.through), sorted(group.done), group.account.name
                yield Pulled(box.serial, name, group.turn, through, done, client)
            for number, letter in [*box.letters.items(), *box.delayed.items()]:
                is_live = number in box.letters or number in box.delayed
                if letter.durable and is_live and not box.has_expired:
                    yield _put_record(box, letter, self._clock)


def opened_record(box: Mailbox) -> Opened:
    return Opened(
        box.serial,
        box.mail_id,
        box.public,
        box.named,
        box.desc,
        box.ttl_s,
        box.created_us,
        box.expires_us,
        box.creator,
        box.account.name,
        box.org,
    )


def _put_record(box: Mailbox, letter: Letter, clock: Clock) -> Put:
    """The log record of a letter. Its deadlines use the wall clock, which survives a reboot."""
    expires_us = due_us = 0
    if letter.expires_ns or letter.due_ns:
        shift_us = clock.wall_us() - clock.boot_ns() // NANOS_PER_US
        expires_us = letter.expires_ns // NANOS_PER_US + shift_us if letter.expires_ns else 0
        due_us = letter.due_ns // NANOS_PER_US + shift_us if letter.due_ns else 0
    return Put(
        box.serial,
        letter.number,
        letter.priority,
        letter.payload,
        letter.headers,
        letter.created_us,
        expires_us,
        due_us,
        letter.key,
        letter.tags,
        letter.account.name,
    )


def letter_of(put: Put, account: MailAccount, now_ns: int, now_us: int) -> Letter:
    def monotonic(instant_us: int) -> int:
        return max(1, now_ns + (instant_us - now_us) * NANOS_PER_US) if instant_us else 0

    return Letter(
        put.number,
        put.priority,
        RANKS[put.priority],
        cost_of(len(put.payload) + len(put.headers), put.key, put.tags),
        put.payload,
        put.headers,
        put.created_us,
        durable=True,
        account=account,
        expires_ns=monotonic(put.expires_us),
        due_ns=monotonic(put.due_us),
        key=put.key,
        tags=put.tags,
    )


class LogContents:
    """The state that the records of a log describe, in whatever order they are read."""

    def __init__(self) -> None:
        self.start = -1
        self.opened: dict[int, Opened] = {}
        self.extended: dict[int, Extended] = {}
        self.expired: set[int] = set()
        self.puts: dict[int, dict[int, Put]] = {}
        self.removed: dict[int, set[int]] = {}
        self.pulled: dict[int, dict[str, Pulled]] = {}
        self.agents: dict[AgentKey, AgentRecord] = {}
        self.damage: Sequence[tuple[str, Damage]] = ()
        """Stretches of segments that could not be read, by the name of the segment."""

    def add(self, record: Record) -> None:
        match record:
            case Put():
                self.puts.setdefault(record.serial, {})[record.number] = record
            case PutRow():
                letters = self.puts.setdefault(record.serial, {})
                letters.update((put.number, put) for put in record.puts())
            case Removed():
                self.removed.setdefault(record.serial, set()).update(record.numbers)
            case Opened():
                self.opened[record.serial] = record
            case MailboxExpired():
                self.expired.add(record.serial)
                self.puts.pop(record.serial, None)
            case Extended():
                self._extend(record)
            case Pulled():
                self._pull(record)
            case AgentRecord():
                key = record.org, record.name
                known = self.agents.get(key, record)
                self.agents[key] = max(known, record, key=lambda agent: agent.stamp)
            case Started():
                self.start = max(self.start, record.start)

    def _extend(self, record: Extended) -> None:
        known = self.extended.get(record.serial)
        if known is None or not record.expires_us or 0 < known.expires_us < record.expires_us:
            self.extended[record.serial] = record

    def _pull(self, record: Pulled) -> None:
        groups = self.pulled.setdefault(record.serial, {})
        known = groups.get(record.group)
        if known is None or known.turn < record.turn:
            groups[record.group] = record
        elif known.turn == record.turn:
            through = [max(pair) for pair in zip(known.through, record.through, strict=True)]
            known.done.extend(record.done)
            client = known.client or record.client
            groups[record.group] = Pulled(
                record.serial, record.group, record.turn, through, known.done, client
            )

    def last_serial(self) -> int:
        """The highest serial in any record: the `Opened` record of that mailbox may be compacted away."""
        seen = (self.opened, self.expired, self.puts, self.removed, self.extended, self.pulled)
        return max((max(serials) for serials in seen if serials), default=0)

    def live_mailboxes(self) -> list[Opened]:
        """The mailboxes that have not expired: the newest one of each name in each organization."""
        newest: dict[str, Opened] = {}
        for serial in sorted(self.opened):
            if serial not in self.expired:
                opened = self.opened[serial]
                newest[key_of(opened.org, opened.mail_id)] = opened
        return list(newest.values())

    def live_letters(self, serial: int) -> list[Put]:
        """The letters of a mailbox that were not removed, in the order of their numbers."""
        removed = self.removed.get(serial, set())
        puts = self.puts.get(serial, {})
        return [puts[number] for number in sorted(puts) if number not in removed]
