"""What the messages of an organization take up in the store, and its limits.

Rule 1: the number of messages is the sum of the counters of the queue, so a small message costs nothing more.
Rule 2: bytes are counted piece by piece, and only pieces above `COUNTED_BYTES`: payloads, results, stored
        parts of answers, outcomes of effects. The number of messages limits the rest.
Rule 3: only a submit is refused. What a running message produces is stored and counted.
"""

from postroom.contracts.tasks.task_storage import COUNTED_BYTES, at_limit
from postroom.engine.rules.cells import MESSAGE_BYTES, STORED_BYTES, Kind
from postroom.engine.rules.policy import Organization
from postroom.message import ENGINE_PREFIX
from postroom.stores.transaction import Transaction


def check(transaction: Transaction, org_id: str, rules: Organization, count: int) -> None:
    """Refuse `count` further messages of an organization that is at a limit."""
    counts = transaction.lanes.depth(ENGINE_PREFIX + org_id)
    stored = sum(counts.values()) - counts.get("LAPSES", 0)
    if stored + count > rules.max_stored_messages:
        raise at_limit(org_id, f"{stored:,}", f"{rules.max_stored_messages:,} messages")
    used = STORED_BYTES.get(transaction, org_id) or 0
    if used >= rules.max_stored_bytes:
        raise at_limit(org_id, f"{used:,}", f"{rules.max_stored_bytes:,} bytes of messages")


def add(transaction: Transaction, org_id: str, message_id: str, size: int) -> None:
    """Count a piece that was stored for a message."""
    if org_id and size > COUNTED_BYTES:
        _change(transaction, MESSAGE_BYTES, message_id, size)
        _change(transaction, STORED_BYTES, org_id, size)


def forget(transaction: Transaction, org_id: str, message_id: str) -> None:
    """Give back the bytes of a message that is forgotten."""
    size = MESSAGE_BYTES.get(transaction, message_id)
    if size:
        MESSAGE_BYTES.put(transaction, None, message_id)
        _change(transaction, STORED_BYTES, org_id, -size)


def _change(transaction: Transaction, kind: Kind[int], key: str, by: int) -> None:
    size = (kind.get(transaction, key) or 0) + by
    kind.put(transaction, size if size > 0 else None, key)
