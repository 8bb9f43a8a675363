"""What the tasks of an organization take up in the store, and its limits.

Rule 1: a queue `@ORG:NAME` is one of the organization, whoever adds to it.
Rule 2: tasks are counted one by one, until they are purged. Bytes are counted piece by piece, and only pieces
        above `COUNTED_BYTES`: payloads, results and decisions. The number of tasks limits the rest.
Rule 3: only a new task is refused. What a stored task produces is stored and counted.
Rule 4: the bytes of a task are stored under the number of its record. A purge looks at records in the order
        of their numbers, so it reads the bytes of a whole batch at once.
Rule 5: an organization without a count, as in a store of an earlier version, is counted once, by the counters
        of its queues.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from postroom.core.names import is_scoped, scoped, split_scoped
from postroom.errors import Overloaded
from postroom.message import Envelope, Record
from postroom.stores.base import PURGE_BATCH_MAX
from postroom.stores.transaction import Accepted, Transaction

STORED_TASKS_MAX: Final = 5_000_000
STORED_BYTES_MAX: Final = 8 * 1024**3
COUNTED_BYTES: Final = 4 * 1024
RETRY_AFTER_S: Final = 60.0
STORED, SIZE = "tasks.stored", "tasks.size"  # kinds of cells: by organization, by the number of a record


class StoredTasks(msgspec.Struct, frozen=True, array_like=True):
    """What the tasks of an organization take up."""

    tasks: int
    size: int = 0


def insert(transaction: Transaction, envelopes: Sequence[Envelope]) -> list[Accepted]:
    """Store new tasks, all or none. Raises `Overloaded` when an organization has no room for its tasks."""
    orgs = [split_scoped(each.queue)[0] if is_scoped(each.queue) else "" for each in envelopes]
    if not any(orgs):
        return transaction.insert(envelopes)
    before = {org: stored_tasks(transaction, org) for org in {*orgs} - {""}}
    for org, stored in before.items():
        own = [each for each, owner in zip(envelopes, orgs, strict=True) if owner == org]
        _check(transaction, org, stored, own)
    accepted = transaction.insert(envelopes)
    for org, stored in before.items():
        new = sum(owner == org and not one.duplicate for owner, one in zip(orgs, accepted, strict=True))
        _put(transaction, org, stored.tasks + new, stored.size)
    for envelope, org, one in zip(envelopes, orgs, accepted, strict=True):
        if org and not one.duplicate and len(envelope.payload) > COUNTED_BYTES:
            add(transaction, one.message_id, len(envelope.payload))
    return accepted


def add(transaction: Transaction, task_id: str, size: int) -> None:
    """Count a piece that was stored for a task."""
    if size <= COUNTED_BYTES or (record := transaction.record(task_id)) is None:
        return
    org = split_scoped(record.queue)[0]
    if org:
        key, stored = _key(record.seq), stored_tasks(transaction, org)
        before = int(transaction.cell(SIZE, key) or b"0")
        transaction.put_cell(SIZE, key, str(before + size).encode())
        _put(transaction, org, stored.tasks, stored.size + size)


def forget(transaction: Transaction, records: Sequence[Record]) -> None:
    """Give back what purged tasks took up. They are in the order of their numbers."""
    own = [record for record in records if is_scoped(record.queue)]
    if not own:
        return
    sizes = dict(transaction.cells(SIZE, _key(own[0].seq - 1), PURGE_BATCH_MAX))
    for org in {split_scoped(record.queue)[0] for record in own}:
        keys = [_key(record.seq) for record in own if split_scoped(record.queue)[0] == org]
        value = transaction.cell(STORED, org)
        if value is not None:  # else the counters do not have them any more
            stored = msgspec.json.decode(value, type=StoredTasks)
            size = sum(int(sizes.get(key, b"0")) for key in keys)
            _put(transaction, org, stored.tasks - len(keys), stored.size - size)
        for key in keys:
            if key in sizes:
                transaction.put_cell(SIZE, key, None)


def stored_tasks(transaction: Transaction, org: str) -> StoredTasks:
    """What the tasks of an organization take up now."""
    value = transaction.cell(STORED, org)
    if value is not None:
        return msgspec.json.decode(value, type=StoredTasks)
    own = [transaction.depth(queue) for queue in transaction.queues() if queue.startswith(scoped(org, ""))]
    return StoredTasks(sum(sum(counts.values()) - counts.get("LAPSES", 0) for counts in own))


def at_limit(org_id: str, stored: str, most: str) -> Overloaded:
    """The error for an organization that stores as much as it may."""
    return Overloaded(
        f"organization {org_id} stores {stored} of at most {most}; ended ones leave after their retention",
        RETRY_AFTER_S,
    )


def _check(transaction: Transaction, org: str, stored: StoredTasks, envelopes: Sequence[Envelope]) -> None:
    """Refuse new tasks of an organization that has no room. Duplicates are dropped, so they need none."""
    size = stored.size + sum(len(each.payload) for each in envelopes if len(each.payload) > COUNTED_BYTES)
    is_full = stored.tasks + len(envelopes) > STORED_TASKS_MAX
    if not is_full and size <= STORED_BYTES_MAX:
        return
    new = [each for each in envelopes if not transaction.is_known(each)]
    if new != envelopes:
        if new:
            _check(transaction, org, stored, new)
    elif is_full:
        raise at_limit(org, f"{stored.tasks:,}", f"{STORED_TASKS_MAX:,} tasks")
    else:
        raise at_limit(org, f"{stored.size:,}", f"{STORED_BYTES_MAX:,} bytes of tasks")


def _put(transaction: Transaction, org: str, tasks: int, size: int) -> None:
    transaction.put_cell(STORED, org, msgspec.json.encode(StoredTasks(tasks, size)))


def _key(number: int) -> str:
    """The key of the bytes of a record. Keys are in the order of the numbers."""
    return f"{number:019}"
