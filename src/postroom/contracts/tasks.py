"""`Tasks`: a task queue that its harness owns, with leases, heartbeats and fencing.

Who remembers what was done: the store. A claimed task is leased, and only who holds the lease can renew,
finish or give it back. What is not heard of in time goes to somebody else: at least once.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec

from postroom.contracts.backlog import Backlog
from postroom.contracts.task_input import (
    NUMBER_MAX,
    check_claim_limit,
    check_durability,
    check_page,
    checked_id,
    checked_results,
    checked_terms,
)
from postroom.contracts.task_operations import (
    DECISIONS,
    LEASE_S,
    NewTask,
    Rules,
    Task,
    TaskCall,
    TaskOperations,
)
from postroom.core import lifecycle
from postroom.core.fieldfaults import field_fault
from postroom.core.lifecycle import NANOS_PER_S
from postroom.core.names import checked_name
from postroom.core.retry import RetryPolicy
from postroom.core.times import EPOCH, MICROSECOND, checked_seconds
from postroom.errors import InvalidMessage, UnknownTask
from postroom.message import Durability, Event, Record, State
from postroom.nudges.notifier import QUIET_S, Notifier
from postroom.stores.base import PURGE_BATCH_MAX, ByIds, Counted, Limits, Listing, by_state, ready, waiting
from postroom.stores.open import open_store
from postroom.stores.store import Store
from postroom.stores.transaction import Claim, Transaction
from postroom.system.clock import Clock
from postroom.system.handles import Closing

__all__ = [
    "DECISIONS",
    "LEASE_S",
    "AgentStatus",
    "Retention",
    "Task",
    "TaskInfo",
    "TaskLine",
    "Tasks",
    "TasksStatus",
]

T = TypeVar("T")

LOOK_AGAIN_S = 1.0  # what a lost ring costs
LOOK_AGAIN_DEAF_S = 0.05  # the same where no ring of another process is heard
HOLDERS_MAX = 10_000  # leases that a status looks at to tell who holds how many
TIDY_EVERY_CALLS = 1_000
TIDY_EVERY_S = 60.0
KEEP_FINISHED_S = 7 * 86_400.0
KEEP_DEAD_S = 90 * 86_400.0
KEEP_KEYS_S = 30 * 86_400.0
TASK_ENDED = ".ended"  # no agent has a name that begins with a dot
"""The bell that is rung when a task has come to its end."""
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
"""Foreman's words for our states."""


class TaskInfo(msgspec.Struct, frozen=True):
    """Everything about a task: foreman's columns first, then ours."""

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
    """The agent that sent it; empty when an operator or the library did."""
    lease_ends_at: datetime | None
    """When its holder loses it without a further heartbeat; None when nobody holds it."""
    errors: list[str]
    history: list[Event]

    @property
    def ended(self) -> bool:
        """Whether nobody will work on it any more: it has a result, or it failed for good."""
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
    """How one agent's queue stands."""

    depth: int
    """Tasks that wait, delayed ones included."""
    oldest_age_s: float | None
    """For how long the next one has been ready."""
    in_flight: int
    holders: dict[str, int]
    """Who holds how many leases."""
    lapses: int
    """Leases that ran out, ever."""
    states: dict[State, int]
    max_depth: int


class TasksStatus(msgspec.Struct, frozen=True):
    """How all queues stand."""

    agents: dict[str, AgentStatus]
    totals: dict[Status, int]
    events_waiting: int | None = None
    """Events that the audit stream does not hold yet; None when nobody ships them."""
    held_up: int = 0
    """Enqueues of this process that were slowed down or refused for that."""


class Retention(msgspec.Struct, frozen=True):
    """How long what is over is kept."""

    finished_s: float = KEEP_FINISHED_S
    dead_s: float = KEEP_DEAD_S
    events_s: float = KEEP_FINISHED_S
    """Of events that nobody has taken elsewhere."""
    keys_s: float = KEEP_KEYS_S


class Tasks(Closing):
    """The task queues of one store, a queue for each agent.

    `durability` is the class of a task that names none: "os" survives the end of any process, "group" and
    "fsync" also a power cut. Safe to share between threads, and across fork.
    """

    def __init__(
        self,
        store: Store,
        *,
        retry: RetryPolicy | None = None,
        retention: Retention | None = None,
        durability: Durability = "os",
    ) -> None:
        check_durability(durability)
        self.store = store
        self.rules = Rules(RetryPolicy() if retry is None else retry, durability)
        self._retention = Retention() if retention is None else retention
        self.notifier = Notifier(_notifier_folder(store.url))
        self.on_notable: Callable[[Sequence[Event]], None] | None = None
        """Called after each commit with those of its events that a person may have to know."""
        store.on_commit = self._committed
        self._calls = 0
        self._tidied = time.monotonic()
        self._purged_to = 0
        self._keys_purged_to = ""
        self._backlog = Backlog(store)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        retention: Retention | None = None,
        durability: Durability = "os",
    ) -> Self:
        """The tasks in `sqlite:///dir/queue.db`, or in `memory://`."""
        if not isinstance(url, str):
            raise InvalidMessage(f"a store is named by text such as sqlite:///queue.db, not {url!r}")
        return cls(open_store(url, clock=clock), retry=retry, retention=retention, durability=durability)

    # ---- in ------------------------------------------------------------------------------------

    def enqueue(
        self,
        *,
        agent: str,
        payload: Any,
        task_id: str | None = None,
        delay_s: float = 0.0,
        idempotency_key: str | None = None,
        type: str = "",  # noqa: A002 - foreman's word
        parent: str = "",
        max_retries: int | None = None,
        durability: Durability | None = None,
        sender: str = "",
    ) -> str:
        """Store one task and return its id. The same `task_id` or `idempotency_key` stores one task."""
        new = NewTask(
            agent, payload, task_id, delay_s, idempotency_key, type, parent, max_retries, durability, sender
        )  # fmt: skip
        return self._enqueue([new])[0]

    def enqueue_many(self, tasks: Iterable[dict[str, Any]]) -> list[str]:
        """As `enqueue`, for each of the keyword sets, in one commit: all or none."""
        try:
            new = msgspec.convert(list(tasks), list[NewTask])
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"not a task: {field_fault(error, 'the list')}") from None
        return self._enqueue(new) if new else []

    def _enqueue(self, new: Sequence[NewTask]) -> list[str]:
        backlog = self._backlog
        if backlog.behind is not None or time.monotonic() >= backlog.look_at:  # most enqueues have no reason
            backlog.hold_up()
        rules = self.rules
        return self.store.write(lambda transaction: TaskOperations(transaction, rules).enqueue(new))

    def check_backlog(self) -> None:
        """Refuse new tasks while the audit shipper is too far behind; for servers, which must not sleep."""
        self._backlog.hold_up(may_sleep=False)

    def _committed(self, transaction: Transaction) -> None:
        for queue in transaction.ready:
            self.notifier.notify(queue)
        if transaction.ended:
            self.notifier.notify_rarely_awaited(TASK_ENDED)
        if transaction.notable and self.on_notable is not None:
            self.on_notable(transaction.notable)

    def _write(self, call: Callable[[TaskOperations], T], *, makes_room: bool = False) -> T:
        rules = self.rules
        return self.store.write(
            lambda transaction: call(TaskOperations(transaction, rules)), makes_room=makes_room
        )

    def run_many(self, calls: Sequence[TaskCall], *, makes_room: bool = True) -> list[Any]:
        """Run calls of many clients in one commit; gives the result of each, or the error that it raised.

        For a server: `tasks.run_many([lambda operations: operations.release(task_id, lease), ...])`.
        `makes_room` marks calls that must also work on a full disk.
        """
        self._tidy(len(calls))
        self._backlog.look()
        rules = self.rules

        def bound(call: TaskCall) -> Callable[[Transaction], Any]:
            return lambda transaction: call(TaskOperations(transaction, rules))

        return self.store.write_many([bound(call) for call in calls], makes_room=makes_room)

    # ---- out -----------------------------------------------------------------------------------

    def claim(
        self,
        *,
        agent: str,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
        worker: str | None = None,
    ) -> list[Task]:
        """Lease up to `limit` tasks of an agent, the oldest first. `wait_s` waits for the first one."""
        terms = checked_terms(agent, limit, lease_s, worker)
        if not checked_seconds("wait_s", wait_s):
            return self.claim_now(terms)
        deadline = time.monotonic() + wait_s
        woken = threading.Event()
        with self.notifier.subscribed(agent, woken.set):
            while True:
                woken.clear()
                tasks = self.claim_now(terms) if self.store.next_work_ns(agent) == 0 else []
                left_s = deadline - time.monotonic()
                if tasks or left_s <= 0:
                    return tasks
                woken.wait(min(left_s, self.pause_s(agent)))

    def claim_now(self, terms: Claim) -> list[Task]:
        """Lease what can be leased at once."""
        self._tidy(terms.limit)
        return self._write(lambda operations: operations.claim(terms))

    def pause_s(self, agent: str) -> float:
        """How long one may wait without missing anything, rings aside."""
        longest = LOOK_AGAIN_S if self.notifier.hears_other_processes else LOOK_AGAIN_DEAF_S
        starts_ns = self.store.next_work_ns(agent)
        return longest if starts_ns is None else min(longest, starts_ns / NANOS_PER_S)

    # ---- holders of leases ---------------------------------------------------------------------

    def heartbeat(self, task_id: str, lease: int) -> None:
        """Renew a lease: it runs its whole length from now. Raises `StaleLease` when it is over."""
        self._write(lambda operations: operations.heartbeat(task_id, lease), makes_room=True)

    def complete(self, task_id: str, lease: int, result: Any = None, *, claim_next: int = 0) -> list[Task]:
        """Complete a task. Repeating the call under the same lease changes nothing.

        `claim_next` claims up to that many further tasks in the same commit, for the same worker and as long.
        """
        return self.complete_many([(task_id, lease, result)], claim_next=claim_next)

    def complete_many(self, finished: Iterable[tuple[str, int, Any]], *, claim_next: int = 0) -> list[Task]:
        """As `complete`, for each (task_id, lease, result), in one commit: all or none."""
        check_claim_limit(claim_next, "claim_next", 0)
        results = checked_results(finished)
        if claim_next:
            self._tidy(claim_next)
        claimed = self._write(lambda operations: operations.complete(results, claim_next), makes_room=True)
        self._calls += len(results)
        return claimed

    def fail(
        self, task_id: str, lease: int, error: str, retry_in_s: float | None = None, *, error_type: str = ""
    ) -> None:
        """Report a failure: the task is retried after a pause, or becomes a dead letter."""
        self._write(
            lambda operations: operations.fail(task_id, lease, error, retry_in_s, error_type=error_type),
            makes_room=True,
        )

    def release(self, task_id: str, lease: int) -> None:
        """Give the task back untouched: it keeps its position, and nothing is counted."""
        self._write(lambda operations: operations.release(task_id, lease), makes_room=True)

    # ---- operators -----------------------------------------------------------------------------

    def cancel(self, task_id: str) -> None:
        """End a task that nobody needs any more. Raises `WrongState` when it has ended."""
        self._write(lambda operations: operations.cancel(task_id), makes_room=True)

    def retry(self, task_id: str) -> None:
        """Queue a dead, cancelled or expired task again, with all its retries."""
        self._write(lambda operations: operations.retry(task_id))

    def limit_queue(
        self,
        agent: str,
        *,
        max_depth: int | None = None,
        max_payload_bytes: int | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Change what an agent's queue may hold, and the durability class of its tasks that name none."""
        usual = Limits()
        for name, value in (("max_depth", max_depth), ("max_payload_bytes", max_payload_bytes)):
            if value is not None and (type(value) is not int or not 1 <= value <= NUMBER_MAX):
                raise InvalidMessage(f"{name} must be a whole number from 1 to {NUMBER_MAX}, not {value!r}")
        check_durability(durability)
        limits = Limits(
            max_depth or usual.max_depth, max_payload_bytes or usual.max_payload_bytes, durability
        )  # fmt: skip
        self._write(lambda operations: operations.set_limits(agent, limits))

    # ---- the harness ---------------------------------------------------------------------------

    def open_decision(self, task_id: str) -> str | None:
        """Make the result of a completed task a message of its own; None when that has happened already."""
        return self._write(lambda operations: operations.open_decision(task_id))

    def settle(self, decision: Task) -> None:
        """Note that a decision was executed: it is complete, and its task is done, in one commit."""
        self._write(lambda operations: operations.settle(decision.task_id, decision.lease), makes_room=True)

    def sweep(self, limit: int = PURGE_BATCH_MAX) -> int:
        """Put back what is overdue in any queue, as claims do; how many tasks."""
        check_page(0, limit)
        return self._write(lambda operations: operations.sweep(limit), makes_room=True)

    # ---- looking -------------------------------------------------------------------------------

    def get(self, task_id: str) -> TaskInfo:
        """Everything about a task, with its whole history. Raises `UnknownTask`."""
        stored = self.store.load(checked_id(task_id))
        if stored is None:
            raise UnknownTask(task_id)
        record, envelope = stored.record, stored.envelope
        return TaskInfo(
            task_id=record.message_id,
            agent=record.queue,
            status=STATUS[record.state],
            payload=msgspec.json.decode(envelope.payload),
            created_at=_moment(record.created_us),
            claimed_at=_moment(record.claimed_us) if record.claimed_us else None,
            completed_at=_moment(record.ended_us) if record.ended_us else None,
            result=None if stored.result is None else msgspec.json.decode(stored.result),
            retry_count=record.retries,
            last_heartbeat=_moment(record.heartbeat_us) if record.heartbeat_us else None,
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

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskInfo:
        """Return the task when it has come to its end, or as it is when `timeout_s` has passed."""
        deadline = math.inf if timeout_s is None else checked_seconds("timeout_s", timeout_s)
        deadline += time.monotonic()
        if not self.get(task_id).ended and time.monotonic() < deadline:
            self._wait_for_end(task_id, deadline)
        return self.get(task_id)

    def _wait_for_end(self, task_id: str, deadline: float) -> None:
        woken = threading.Event()
        with self.notifier.subscribed(TASK_ENDED, woken.set):
            pause_s = 2 * QUIET_S  # another process may not have seen yet that somebody waits
            while not self.ended([task_id]) and (left_s := deadline - time.monotonic()) > 0:
                woken.wait(min(left_s, pause_s))
                woken.clear()
                pause_s = LOOK_AGAIN_S if self.notifier.hears_other_processes else LOOK_AGAIN_DEAF_S

    def ended(self, task_ids: Sequence[str]) -> set[str]:
        """Which of these tasks have come to their end. One that is not kept any more counts as ended."""
        try:
            records = self.store.find(ByIds(tuple(task_ids)))
        except UnknownTask:
            if len(task_ids) == 1:
                return set(task_ids)
            return {task_id for task_id in task_ids if self.ended([task_id])}
        return {record.message_id for record in records if record.state in lifecycle.ENDED}

    def find(
        self, *, agent: str | None = None, state: State | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskLine]:
        """Tasks by acceptance; `after` is the `seq` of the last one seen."""
        if agent is not None:
            checked_name("agent", agent)
        if state is not None and state not in STATUS:
            raise InvalidMessage(f"state must be one of {', '.join(STATUS)}, not {state!r}")
        check_page(after, limit)
        records = self.store.find(Listing(agent, state, after, limit))
        return [
            TaskLine(
                record.seq, record.message_id, record.queue, STATUS[record.state], record.state,
                record.attempt, _moment(record.created_us),
                _moment(record.ended_us) if record.ended_us else None,
            )
            for record in records
        ]  # fmt: skip

    def status(self) -> TasksStatus:
        """How every queue stands."""
        agents = self.store.read(_agents)
        totals: dict[Status, int] = {}
        for agent in agents.values():
            for state, n in agent.states.items():
                totals[STATUS[state]] = totals.get(STATUS[state], 0) + n
        self._backlog.look()
        return TasksStatus(agents, totals, self._backlog.waiting, self._backlog.held_up)

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        """What happened after the event of that number, in order."""
        check_page(after, limit)
        return self.store.events(after, limit)

    # ---- keeping -------------------------------------------------------------------------------

    def _tidy(self, calls: int) -> None:
        """Now and then, forget a little of what is over."""
        self._calls += calls
        now = time.monotonic()
        if self._calls < TIDY_EVERY_CALLS and now < self._tidied + TIDY_EVERY_S:
            return
        looks = now >= self._tidied + TIDY_EVERY_S or self._is_over(self.store.find(Listing(limit=1)))
        self._calls, self._tidied = 0, now
        if looks:
            self.purge()

    def _is_over(self, oldest: list[Record]) -> bool:
        """Whether the oldest record can be forgotten; then there may be more of them."""
        long_ago_us = self.store.read(lambda transaction: transaction.wall_us) - round(
            self._retention.finished_s * 1e6
        )
        return any(record.ended_us and record.ended_us < long_ago_us for record in oldest)

    def purge(self, rounds: int = 4) -> None:
        """Forget what ended longer ago than it is kept, in small batches."""
        keep = self._retention
        kept_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, round(keep.finished_s * 1e6))
        kept_us["DEAD_LETTER"] = kept_us["QUARANTINED"] = round(keep.dead_s * 1e6)

        def work(transaction: Transaction) -> int:
            return transaction.purge(self._purged_to, kept_us, PURGE_BATCH_MAX)

        for _ in range(rounds):
            self._purged_to = self.store.write(work, makes_room=True)
            if self._purged_to == 0:
                break
        self._keys_purged_to = self.store.write(self._purge_keys_and_events, makes_room=True)

    def _purge_keys_and_events(self, transaction: Transaction) -> str:
        keep, now_us = self._retention, transaction.wall_us
        transaction.purge_events(NUMBER_MAX, now_us - round(keep.events_s * 1e6), PURGE_BATCH_MAX)
        keys_before_us = now_us - round(keep.keys_s * 1e6)
        return transaction.purge_keys(self._keys_purged_to, keys_before_us, PURGE_BATCH_MAX)

    def forget_events(self, up_to: int) -> None:
        """Forget events up to this number, which are kept elsewhere."""
        if type(up_to) is not int or not 0 <= up_to <= NUMBER_MAX:
            raise InvalidMessage(f"up_to must be the number of an event, not {up_to!r}")
        self.store.write(
            lambda transaction: transaction.purge_events(up_to, NUMBER_MAX, PURGE_BATCH_MAX), makes_room=True
        )

    # ---- life ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Start afresh after an error of the disk."""
        self.store.reopen()

    def close(self) -> None:
        """Close every file. The queue can be used again; it opens them anew."""
        self.notifier.close()
        self.store.close()


def _agents(transaction: Transaction) -> dict[str, AgentStatus]:
    holders: dict[str, dict[str, int]] = {}
    for record in transaction.find(Listing(state="PROCESSING", limit=HOLDERS_MAX)):
        of_queue = holders.setdefault(record.queue, {})
        of_queue[record.worker_id] = of_queue.get(record.worker_id, 0) + 1
    return {
        queue: _agent_status(transaction, queue, holders.get(queue, {})) for queue in transaction.queues()
    }


def _agent_status(transaction: Transaction, agent: str, holders: dict[str, int]) -> AgentStatus:
    counts = transaction.depth(agent)
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


def _moment(us: int) -> datetime:
    return EPOCH + us * MICROSECOND


def _lease_ends_at(record: Record) -> datetime | None:
    """By the clock for people; whether the lease is over is decided by the store's own clock."""
    if record.state != "PROCESSING":
        return None
    return _moment(record.heartbeat_us + record.lease_ns // 1000)


def _notifier_folder(url: str) -> Path | None:
    """Beside the database; a store in memory is heard in its own process alone."""
    path = url.removeprefix("sqlite:///")
    return None if path == url else Path(f"{path}.bells")
