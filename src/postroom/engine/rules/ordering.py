"""Strict order of the messages that share an ordering key.

Rule 1: the messages of a key form a line. Only its head is in a lane; the others are SCHEDULED without an
        end.
Rule 2: a message leaves its line when it ends. A dead head that says so stops the key until it is replayed
        or purged.
Rule 3: a claim that meets a message after the head parks it: its own delay may have ended, or an older
        message was replayed.
"""

from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.engine.rules.cells import LINE_OF, LINES, SEPARATOR, KeyEntry
from postroom.message import Record
from postroom.stores.base import FOREVER_NS, ByIds
from postroom.stores.transaction import Transaction

PARKED_NS = FOREVER_NS // 2  # a delay without an end
BEHIND = "it waits for the message before it of the same ordering key"


def is_parked(record: Record, steady_ns: int) -> bool:
    """Whether a delay is one without an end."""
    return record.state == "SCHEDULED" and record.due - steady_ns > PARKED_NS // 2


def join(transaction: Transaction, record: Record, org_id: str, key: str, *, stops: bool) -> None:
    """Put a new message at the end of the line of its key."""
    _take_turn(transaction, org_id, key)
    is_head = not LINES.under(transaction, org_id, key, limit=1)
    entry = KeyEntry(record.message_id, record.due, stops)
    LINES.put(transaction, entry, org_id, key, record.seq)
    LINE_OF.put(transaction, SEPARATOR.join((org_id, key)), record.message_id)
    if not is_head and record.state == "QUEUED":
        park(transaction, record.message_id, BEHIND)


def _take_turn(transaction: Transaction, org_id: str, key: str) -> None:
    """Let one transaction at a time decide about a line: the end of one message wakes the next."""
    transaction.exclusive(SEPARATOR.join(("line", org_id, key)))


def _line_of(transaction: Transaction, record: Record) -> tuple[str, str] | None:
    """The organization and the key of a message, once it is this transaction's turn; None without a key."""
    line = LINE_OF.get(transaction, record.message_id)
    if line is None:
        return None
    org_id, _, key = line.partition(SEPARATOR)
    _take_turn(transaction, org_id, key)
    return org_id, key


def park(transaction: Transaction, message_id: str, reason: str) -> None:
    """Take a QUEUED message out of its lane until `wake`."""
    transaction.apply(
        ByIds((message_id,)), lambda record, moment: lifecycle.defer(record, moment, PARKED_NS, reason)
    )


def wake(transaction: Transaction, message_id: str, due_ns: int = 0) -> None:
    """Put a parked message into its lane, or have it wait for the end of its own delay."""
    record = transaction.records.get(message_id)
    if record is None or not is_parked(record, transaction.steady_ns):
        return
    transaction.apply(ByIds((message_id,)), lifecycle.wake)
    if due_ns > transaction.steady_ns:
        delay_ns = due_ns - transaction.steady_ns
        transaction.apply(
            ByIds((message_id,)), lambda one, moment: lifecycle.defer(one, moment, delay_ns, "its delay")
        )


def ended(transaction: Transaction, record: Record) -> None:
    """A message has ended: the next one of its key moves up."""
    line = _line_of(transaction, record)
    if line is None:
        return
    org_id, key = line
    entry = LINES.get(transaction, org_id, key, record.seq)
    if entry is not None and entry.stops and record.state in ("DEAD_LETTER", "QUARANTINED"):
        LINES.put(transaction, replace(entry, is_dead=True), org_id, key, record.seq)
        _wake_head(transaction, org_id, key)  # an older message may have been replayed
        return
    leave(transaction, record)


def leave(transaction: Transaction, record: Record) -> None:
    """Take a message out of the line of its key."""
    line = _line_of(transaction, record)
    if line is None:
        return
    org_id, key = line
    LINES.put(transaction, None, org_id, key, record.seq)
    LINE_OF.put(transaction, None, record.message_id)
    _wake_head(transaction, org_id, key)


def _wake_head(transaction: Transaction, org_id: str, key: str) -> None:
    for _, head in LINES.under(transaction, org_id, key, limit=1):
        if not head.is_dead:
            wake(transaction, head.message_id, head.due_ns)


def rejoin(transaction: Transaction, record: Record, org_id: str, key: str, *, stops: bool) -> None:
    """A message is replayed: it takes its old position in the line, in front of everything younger."""
    _take_turn(transaction, org_id, key)
    LINES.put(transaction, KeyEntry(record.message_id, 0, stops), org_id, key, record.seq)
    LINE_OF.put(transaction, SEPARATOR.join((org_id, key)), record.message_id)
    [(_, head)] = LINES.under(transaction, org_id, key, limit=1)
    if head.message_id != record.message_id or _is_running(transaction, org_id, key):
        park(transaction, record.message_id, BEHIND)


def is_next(transaction: Transaction, record: Record) -> bool:
    """Whether a message that is about to be leased is the head of its line, or in none.

    A message after the head is parked. A parked head is woken, unless a younger message runs: the head was
    replayed meanwhile, and is woken when that one ends or comes by here.
    """
    line = _line_of(transaction, record)
    if line is None:
        return True
    org_id, key = line
    [(_, head)] = LINES.under(transaction, org_id, key, limit=1)
    if head.message_id == record.message_id:
        return True
    park(transaction, record.message_id, BEHIND)
    oldest = transaction.records.get(head.message_id)
    waits = oldest is not None and is_parked(oldest, transaction.steady_ns)
    if waits and not _is_running(transaction, org_id, key):
        _wake_head(transaction, org_id, key)
    return False


def _is_running(transaction: Transaction, org_id: str, key: str) -> bool:
    """Whether a message of a line is leased. Only replayed messages can be before a leased one."""
    for _, entry in LINES.under(transaction, org_id, key):
        record = transaction.records.get(entry.message_id)
        if record is not None and record.state == "PROCESSING":
            return True
    return False


def head_of(transaction: Transaction, message_id: str) -> KeyEntry | None:
    """The head of the line that a message stands in; None when it has no ordering key."""
    line = LINE_OF.get(transaction, message_id)
    if line is None:
        return None
    return next((entry for _, entry in LINES.under(transaction, *line.split(SEPARATOR), limit=1)), None)
