"""What the tasks of an organization take up in the store, and its limits.

Rule 1: a queue `@ORG:NAME` is one of the organization, whoever adds to it. So is a plain one that a server
        has noted as its own.
Rule 2: tasks and decisions are counted one by one, until they are purged. Bytes are counted piece by piece,
        and only pieces above `COUNTED_BYTES`: payloads, results and decisions. The number of tasks limits the
        rest.
Rule 3: only a new task is refused. What a stored task produces is stored and counted.
Rule 4: the bytes of a task are stored under the number of its record. A purge looks at records in the order
        of their numbers, so it reads the bytes of a whole batch at once.
Rule 5: a queue counts while it holds tasks. One that a decision makes is not refused.
Rule 6: an organization without a count, as in a store of an earlier version, is counted once, by the counters
        of its queues.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.core.names import scoped, split_scoped
from postroom.errors import Overloaded
from postroom.message import Envelope, Record
from postroom.stores.base import DEFAULT_LIMITS, LIMITS, PURGE_BATCH_MAX, Counted, Limits
from postroom.stores.transaction import Accepted, Transaction

STORED_TASKS_MAX: Final = 5_000_000
STORED_BYTES_MAX: Final = 8 * 1024**3
QUEUES_MAX: Final = 5_000
COUNTED_BYTES: Final = 4 * 1024
RETRY_AFTER_S: Final = 60.0
STORED, SIZE = "tasks.stored", "tasks.size"  # kinds of cells: by organization, by the number of a record


class StoredTasks(msgspec.Struct, frozen=True, array_like=True):
    """What the tasks of an organization take up."""

    tasks: int
    size: int = 0
    queues: int = 0


def owner_of(transaction: Transaction, queue: str) -> str:
    """The organization in whose share the tasks of a queue count; empty for none."""
    return split_scoped(queue)[0] or transaction.limits(queue).org


def own(transaction: Transaction, queue: str, org: str) -> None:
    """Count a plain queue in the share of its organization from now on, and the tasks that it holds."""
    if transaction.limits(queue).org:
        return
    transaction.exclusive(f"own {queue}")
    known = transaction.cells.get(LIMITS, queue)
    limits = DEFAULT_LIMITS if known is None else msgspec.json.decode(known, type=Limits)
    if not limits.org:
        before, held = stored_tasks(transaction, org), _held(transaction.lanes.depth(queue))
        _put(transaction, org, before.tasks + held, before.size, before.queues + (held > 0))
    transaction.set_limits(queue, replace(limits, org=org))


def insert(transaction: Transaction, envelopes: Sequence[Envelope]) -> list[Accepted]:
    """Store new tasks, all or none. Raises `Overloaded` when an organization has no room for its tasks."""
    owners: dict[str, str] = {}
    for envelope in envelopes:
        if envelope.queue not in owners:
            owners[envelope.queue] = owner_of(transaction, envelope.queue)
    if not any(owners.values()):
        return transaction.insert(envelopes)
    return _insert_owned(transaction, envelopes, owners)


def _insert_owned(
    transaction: Transaction, envelopes: Sequence[Envelope], owners: Mapping[str, str]
) -> list[Accepted]:
    """As `insert`, for tasks of which some belong to an organization. `owners` has it for each queue."""
    shares: dict[str, list[Envelope]] = {}
    for envelope in envelopes:
        if org := owners[envelope.queue]:
            shares.setdefault(org, []).append(envelope)
    unused = _unused(transaction, [queue for queue, org in owners.items() if org])
    stored = {org: _with_room(transaction, org, new, unused) for org, new in shares.items()}
    accepted = transaction.insert(envelopes)
    added: dict[str, list[str]] = {org: [] for org in shares}
    for envelope, one in zip(envelopes, accepted, strict=True):
        if not one.duplicate and (org := owners[envelope.queue]):
            added[org].append(envelope.queue)
    for org, queues in added.items():
        if queues:
            before, begun = stored[org], unused.intersection(queues)
            _put(transaction, org, before.tasks + len(queues), before.size, before.queues + len(begun))
    for envelope, one in zip(envelopes, accepted, strict=True):
        if not one.duplicate:
            add(transaction, one.message_id, len(envelope.payload))
    return accepted


def insert_decision(transaction: Transaction, envelope: Envelope) -> str:
    """Store and count the decision of a task. Returns its id."""
    org = split_scoped(envelope.queue)[0]
    before = stored_tasks(transaction, org) if org else None
    unused = _unused(transaction, [envelope.queue]) if org else ()
    [decision] = transaction.insert([envelope])
    if before is not None and not decision.duplicate:
        _put(transaction, org, before.tasks + 1, before.size, before.queues + len(unused))
        add(transaction, decision.message_id, len(envelope.payload))
    return decision.message_id


def add(transaction: Transaction, task_id: str, size: int) -> None:
    """Count a piece that was stored for a task."""
    if size <= COUNTED_BYTES or (record := transaction.records.get(task_id)) is None:
        return
    org = owner_of(transaction, record.queue)
    if org:
        key, stored = _key(record.seq), stored_tasks(transaction, org)
        before = int(transaction.cells.get(SIZE, key) or b"0")
        transaction.cells.put(SIZE, key, str(before + size).encode())
        _put(transaction, org, stored.tasks, stored.size + size, stored.queues)


def forget(transaction: Transaction, records: Sequence[Record]) -> None:
    """Give back what purged tasks took up. They are in the order of their numbers."""
    shares: dict[str, list[Record]] = {}
    for record in records:
        if org := owner_of(transaction, record.queue):
            shares.setdefault(org, []).append(record)
    if not shares:
        return
    sizes = dict(transaction.cells.page(SIZE, _key(records[0].seq - 1), PURGE_BATCH_MAX))
    for org, gone in shares.items():
        keys = [_key(record.seq) for record in gone]
        value = transaction.cells.get(STORED, org)
        if value is not None:  # else the counters do not have them any more
            stored = msgspec.json.decode(value, type=StoredTasks)
            size = sum(int(sizes.get(key, b"0")) for key in keys)
            unused = _unused(transaction, {record.queue for record in gone})
            _put(transaction, org, stored.tasks - len(keys), stored.size - size, stored.queues - len(unused))
        for key in keys:
            if key in sizes:
                transaction.cells.put(SIZE, key, None)


def stored_tasks(transaction: Transaction, org: str) -> StoredTasks:
    """What the tasks of an organization take up now."""
    value = transaction.cells.get(STORED, org)
    if value is not None:
        return msgspec.json.decode(value, type=StoredTasks)
    held = [_held(transaction.lanes.depth(queue)) for queue in transaction.lanes.queues(scoped(org, ""))]
    return StoredTasks(sum(held), queues=sum(count > 0 for count in held))


def at_limit(org_id: str, stored: str, most: str) -> Overloaded:
    """The error for an organization that stores as much as it may."""
    return Overloaded(
        f"organization {org_id} stores {stored} of at most {most}; ended ones leave after their retention",
        RETRY_AFTER_S,
    )


def _with_room(
    transaction: Transaction, org: str, envelopes: Sequence[Envelope], unused: Collection[str]
) -> StoredTasks:
    """What the tasks of an organization take up, which has room for new ones. Duplicates need none."""
    stored = stored_tasks(transaction, org)
    size = stored.size
    for envelope in envelopes:
        if len(envelope.payload) > COUNTED_BYTES:
            size += len(envelope.payload)
    queues = stored.queues
    if unused:
        queues += len({envelope.queue for envelope in envelopes}.intersection(unused))
    is_full = stored.tasks + len(envelopes) > STORED_TASKS_MAX
    is_wide = queues > max(QUEUES_MAX, stored.queues)
    if is_full or is_wide or size > STORED_BYTES_MAX:
        new = [each for each in envelopes if not transaction.is_known(each)]
        if len(new) < len(envelopes):
            return _with_room(transaction, org, new, unused) if new else stored
        if is_full:
            raise at_limit(org, f"{stored.tasks:,}", f"{STORED_TASKS_MAX:,} tasks")
        if is_wide:
            raise at_limit(org, f"tasks of {stored.queues:,}", f"{QUEUES_MAX:,} agents")
        raise at_limit(org, f"{stored.size:,}", f"{STORED_BYTES_MAX:,} bytes of tasks")
    return stored


def _unused(transaction: Transaction, queues: Collection[str]) -> set[str]:
    return {queue for queue in queues if not _held(transaction.lanes.depth(queue))}


def _held(counts: Mapping[Counted, int]) -> int:
    """How many tasks a queue holds."""
    return sum(counts.values()) - counts.get("LAPSES", 0)


def _put(transaction: Transaction, org: str, tasks: int, size: int, queues: int) -> None:
    # A process that had not read yet whose queue it is did not count what it added to it.
    stored = StoredTasks(max(0, tasks), max(0, size), max(0, queues))
    transaction.cells.put(STORED, org, msgspec.json.encode(stored))


def _key(number: int) -> str:
    """The key of the bytes of a record. Keys are in the order of the numbers."""
    return f"{number:019}"
