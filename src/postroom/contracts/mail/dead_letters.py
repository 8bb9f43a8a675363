"""Dead letters: a letter whose delivery fails too often moves to the mailbox `ID.dead`."""

from msgspec.structs import replace

from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.options import Storage
from postroom.core.mail.mailbox import Letter, Mailbox, cost_of
from postroom.core.times import NANOS_PER_S

DEAD_SUFFIX = ".dead"


class DeadLetters:
    """Counts failed deliveries, and moves letters."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._journal = mailboxes.journal

    def delivery_failed(self, box: Mailbox, letter: Letter) -> bool:
        """Count a failed delivery. True when the letter is being moved to the dead letters."""
        limit = self._mailboxes.options.dead_letter_after
        if not limit or box.mail_id.endswith(DEAD_SUFFIX):
            return False
        failures = box.failures.get(letter.number, 0) + 1
        box.failures[letter.number] = failures
        if failures < limit or self._journal.trouble:
            return False
        self._move(box, letter, failures)
        return True

    def _move(self, box: Mailbox, letter: Letter, failures: int) -> None:
        mailboxes = self._mailboxes
        dead = mailboxes.by_key.get(box.key + DEAD_SUFFIX) or self._open(box)
        added = b"NATS/1.0\r\nMq9-Dead-Msg-Id: %d\r\nMq9-Dead-Deliveries: %d\r\n" % (letter.number, failures)
        rest = letter.headers[letter.headers.find(b"\r\n") + 2 :] if letter.headers else b"\r\n"
        moved = replace(
            letter,
            number=self._journal.next_numbers(1),
            headers=added + rest,
            cost=cost_of(len(letter.payload) + len(added) + len(rest), "", letter.tags),
            expires_ns=0,
            key="",
        )
        mailboxes.write(dead, [moved], moved.cost)
        message_id = f"{box.label}/{letter.number}"
        mailboxes.emit_event("dead_letter", queue=box.label, message_id=message_id, attempt=failures)
        storage: Storage = self._journal.storage(letter.rank) if letter.durable else "memory"
        self._journal.after_letters(dead, storage, self._moved, box, letter, dead, moved)

    def _open(self, box: Mailbox) -> Mailbox:
        """Open the mailbox of the dead letters, which expires together with the mailbox."""
        mailboxes = self._mailboxes
        left_s = max(1.0, (box.expires_ns - mailboxes.now_ns()) / NANOS_PER_S) if box.expires_ns else 0.0
        dead = mailboxes.open(
            box.mail_id + DEAD_SUFFIX,
            left_s,
            public=box.public,
            named=True,
            desc="dead letters",
            creator=box.creator,
            client=box.account.client,
            org=box.org,
        )
        dead.is_stored = True
        return dead

    def _moved(self, box: Mailbox, letter: Letter, dead: Mailbox, moved: Letter) -> None:
        if self._mailboxes.commit(dead, [moved], moved.cost) and not box.has_expired:
            self._mailboxes.remove(box, letter.number)
