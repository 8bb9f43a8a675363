"""Views of tasks and queues, as `Tasks` returns them. Nothing here writes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from postroom.contracts.tasks.task_input import checked_id
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import EPOCH, MICROSECOND
from postroom.errors import UnknownTask
from postroom.message import ENGINE_PREFIX, Event, Record, State, Stored
from postroom.stores.base import Counted, Listing, by_state, ready, waiting
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

HOLDERS_MAX = 10_000  # leases that a status reads to count them by holder

Status = Literal["pending", "claimed", "completed", "done", "failed", "cancelled", "expired", "quarantined"]

STATUS: dict[State, Status] = {
    "SCHEDULED": "pending",
    "QUEUED": "pending",
    "RETRYING": "pending",
    "PROCESSING": "claimed",
    "FAILED": "failed",
    "COMPLETED": "completed",
    "EXECUTING": "completed",
    "DONE": "done",
    "DEAD_LETTER": "failed",
    "CANCELLED": "cancelled",
    "EXPIRED": "expired",
    "QUARANTINED": "quarantined",
}
"""The status of each state, in the words of foreman's table."""


class TaskInfo(msgspec.Struct, frozen=True):
    """Everything about a task. The columns of foreman's table come first."""

    task_id: str
    agent: str
    status: Status
    payload: Any
    created_at: datetime
    claimed_at: datetime | None
    completed_at: datetime | None
    result: Any
    retry_count: int
    last_heartbeat: datetime | None
    state: State
    attempt: int
    max_retries: int
    worker: str
    type: str
    parent: str
    idempotency_key: str
    sender: str
    """The agent that sent the task; empty when an operator or the library did."""
    lease_ends_at: datetime | None
    """When the lease runs out without a further heartbeat; None without a lease."""
    errors: list[str]
    history: list[Event]

    @property
    def ended(self) -> bool:
        """Whether no worker will get the task again: it has a result, or it failed for good."""
        return self.state in lifecycle.ENDED


class TaskLine(msgspec.Struct, frozen=True):
    """A task in a list."""

    seq: int
    task_id: str
    agent: str
    status: Status
    state: State
    attempt: int
    created_at: datetime
    ended_at: datetime | None


class AgentStatus(msgspec.Struct, frozen=True):
    """The state of one agent's queue."""

    depth: int
    """Tasks that wait, delayed ones included."""
    oldest_age_s: float | None
    """How long the next task has been ready."""
    in_flight: int
    holders: dict[str, int]
    """Leases by worker."""
    lapses: int
    """Leases that ran out since the queue was created."""
    states: dict[State, int]
    max_depth: int


class TasksStatus(msgspec.Struct, frozen=True):
    """The state of all queues."""

    agents: dict[str, AgentStatus]
    totals: dict[Status, int]
    events_waiting: int | None = None
    """Events that the audit stream does not hold yet; None when no shipper is attached."""
    held_up: int = 0
    """Enqueues of this process that were delayed or refused because of that backlog."""


def stored_task(store: Store, task_id: str, read_value: ReadValue = decoded_value) -> TaskInfo:
    """Read a task as `task_info`. Raises `UnknownTask`, also for a message of an organization."""
    return task_info(_task(store.load(checked_id(task_id)), task_id), read_value)


def loaded_task(transaction: Transaction, task_id: str) -> Stored:
    """A task with its payload, result and history. Raises `UnknownTask`, also for a message of `Engine`."""
    return _task(transaction.records.load(task_id), task_id)


def _task(stored: Stored | None, task_id: str) -> Stored:
    if stored is None or stored.record.queue.startswith(ENGINE_PREFIX):
        raise UnknownTask(task_id)
    return stored


def task_info(stored: Stored, read_value: ReadValue = decoded_value) -> TaskInfo:
    """Return everything about a stored task. `read_value` reads its payload and its result."""
    record, envelope = stored.record, stored.envelope
    return TaskInfo(
        task_id=record.message_id,
        agent=record.queue,
        status=STATUS[record.state],
        payload=read_value(envelope.payload),
        created_at=_time_of(record.created_us),
        claimed_at=_time_or_none(record.claimed_us),
        completed_at=_time_or_none(record.ended_us),
        result=None if stored.result is None else read_value(stored.result),
        retry_count=record.retries,
        last_heartbeat=_time_or_none(record.heartbeat_us),
        state=record.state,
        attempt=record.attempt,
        max_retries=record.max_retries,
        worker=record.worker_id,
        type=envelope.type,
        parent=envelope.parent_message_id,
        idempotency_key=envelope.key,
        sender=envelope.sender,
        lease_ends_at=_lease_ends_at(record),
        errors=[event.error for event in stored.history if event.error and event.kind != "dead_letter"],
        history=stored.history,
    )


def task_line(record: Record) -> TaskLine:
    """Return a task as a line of a list."""
    return TaskLine(
        seq=record.seq,
        task_id=record.message_id,
        agent=record.queue,
        status=STATUS[record.state],
        state=record.state,
        attempt=record.attempt,
        created_at=_time_of(record.created_us),
        ended_at=_time_or_none(record.ended_us),
    )


def agents_status(transaction: Transaction, queues: Iterable[str] | None = None) -> dict[str, AgentStatus]:
    """Return the state of queues, or all of them, by agent. Leases are counted up to `HOLDERS_MAX` in all."""
    found: dict[str, AgentStatus] = {}
    left = HOLDERS_MAX
    for queue in queues_of_agents(transaction) if queues is None else queues:
        counts, holders = transaction.lanes.depth(queue), Counter[str]()
        if counts.get("PROCESSING") and left:
            leased = transaction.records.find(Listing(queue, "PROCESSING", limit=left))
            holders.update(record.worker_id for record in leased)
            left -= len(leased)
        found[queue] = _agent_status(transaction, queue, counts, dict(holders))
    return found


def find_tasks(transaction: Transaction, pick: Listing) -> list[Record]:
    """The picked tasks. Messages of organizations, which may be far more, are not read."""
    agents = queues_of_agents(transaction)
    if pick.queue is not None or len(agents) == len(transaction.lanes.queues()):
        return transaction.records.find(pick)
    found = [record for agent in agents for record in transaction.records.find(replace(pick, queue=agent))]
    return sorted(found, key=lambda record: record.seq)[: pick.limit]


def queues_of_agents(transaction: Transaction) -> list[str]:
    """The queues of agents. The other ones hold the messages of organizations."""
    return [queue for queue in transaction.lanes.queues() if not queue.startswith(ENGINE_PREFIX)]


def _agent_status(
    transaction: Transaction, agent: str, counts: Mapping[Counted, int], holders: dict[str, int]
) -> AgentStatus:
    oldest_ns = transaction.oldest_ns(agent) if ready(counts) else None
    return AgentStatus(
        depth=waiting(counts),
        oldest_age_s=None if oldest_ns is None else oldest_ns / NANOS_PER_S,
        in_flight=counts.get("PROCESSING", 0),
        holders=holders,
        lapses=counts.get("LAPSES", 0),
        states=_states(counts),
        max_depth=transaction.limits(agent).max_depth,
    )


def _states(counts: Mapping[Counted, int]) -> dict[State, int]:
    return {state: n for state, n in by_state(counts).items() if state in STATUS}


def totals(agents: Iterable[AgentStatus]) -> dict[Status, int]:
    """Count the tasks of several queues by foreman's status."""
    counts: dict[Status, int] = {}
    for agent in agents:
        for state, n in agent.states.items():
            counts[STATUS[state]] = counts.get(STATUS[state], 0) + n
    return counts


def _time_of(us: int) -> datetime:
    return EPOCH + us * MICROSECOND


def _time_or_none(us: int) -> datetime | None:
    return _time_of(us) if us else None


def _lease_ends_at(record: Record) -> datetime | None:
    """In wall-clock time, for people. The store's own clock decides when the lease ends."""
    if record.state != "PROCESSING":
        return None
    return _time_of(record.heartbeat_us + record.lease_ns // 1000)
