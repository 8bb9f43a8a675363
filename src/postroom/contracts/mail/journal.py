"""The journal of the mailboxes: message ids, the log, and when something counts as stored.

Rule 1: without a folder there is no log, and everything is stored in memory.
Rule 2: the letters of a mailbox are stored in the order in which they were accepted, whatever their storage
        classes: a letter that needs no fsync waits for an earlier one that does.
"""

from collections.abc import Callable
from pathlib import Path

from postroom.contracts.mail.options import MailOptions, Storage
from postroom.core.mail.mailbox import Mailbox
from postroom.core.mail.mq9 import Mq9Error
from postroom.logs.mail_log import Fail, SegmentLog
from postroom.logs.mail_records import Record, Started
from postroom.system.crypto.encryption import key_file_encryption

NUMBER_BITS = 32  # of a message id below the count of starts; together they stay exact in a JSON number
CLAIM_AHEAD = 1 << 20  # messages before the end of a block of ids at which the next block is claimed


class Journal:
    """The log of one server, if it has a folder."""

    def __init__(
        self,
        folder: Path | None,
        run_soon: Callable[[Callable[[], None]], object],
        options: MailOptions,
    ) -> None:
        self.log = None
        if folder is not None:
            self.log = SegmentLog(folder, run_soon, key_file_encryption(options.key_file))
        self._storages: tuple[Storage, ...] = (
            options.critical,
            options.urgent,
            options.normal,
            options.normal,
        )
        self._number = 0
        self._on_synced, self._on_unsynced = self._synced, self._unsynced  # bound once, for every letter

    def begin(self, start: int) -> None:
        """Open the first segment of this start of the server. Ids are above those of all earlier starts."""
        if self.log is not None:
            self.log.begin(Started(start))
            self._number = start << NUMBER_BITS

    def close(self) -> None:
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
