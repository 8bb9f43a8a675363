"""Mailboxes and letters as log records, and the contents of a log at a restart."""

from collections.abc import Sequence
from typing import TypeAlias

from postroom.core.mail.mailbox import RANKS, Account, Letter, Mailbox, cost_of, key_of
from postroom.logs.mail_records import (
    ROW_BYTES_MAX,
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
from postroom.system.clock import Clock

NANOS_PER_US = 1_000

AgentKey: TypeAlias = tuple[str, str]
"""The organization and the name of an agent."""


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
        box.account.client,
        box.org,
    )


def put_record(box: Mailbox, letter: Letter, clock: Clock) -> Put:
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
        letter.account.client,
    )


def row_records(box: Mailbox, letters: list[Letter], nbytes: int) -> Sequence[Put | PutRow]:
    """The records of a batch of letters: a single record when they are short enough."""
    first, payloads = letters[0], [letter.payload for letter in letters]
    row = PutRow(box.serial, first.number, first.priority, first.created_us, payloads, first.account.client)
    return (row,) if nbytes <= ROW_BYTES_MAX else row.puts()


def letter_of(put: Put, account: Account, now_ns: int, now_us: int) -> Letter:
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
