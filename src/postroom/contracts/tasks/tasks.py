"""`Tasks`: a task queue for each agent, with leases, heartbeats and fencing.

The store holds the position. A claimed task is leased, and only the lease holder can renew, finish or release
it. A task whose lease runs out goes to another worker: delivery is at least once.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from postroom.calls.fields import NUMBER_MAX
from postroom.contracts.backlog import Backlog
from postroom.contracts.tasks import task_storage
from postroom.contracts.tasks.task_input import (
    check_claim_limit,
    check_durability,
    check_page,
    checked_results,
    checked_terms,
)
from postroom.contracts.tasks.task_operations import (
    DECISIONS,
    LEASE_S,
    LeasedTask,
    NewTask,
    Rules,
    TaskCall,
    TaskFields,
    TaskOperations,
    holds_decisions,
)
from postroom.contracts.tasks.task_views import (
    STATUS,
    AgentStatus,
    Status,
    TaskInfo,
    TaskLine,
    TasksStatus,
    agents_status,
    find_tasks,
    stored_task,
    task_line,
    totals,
)
from postroom.core.fieldfaults import field_fault
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.core.names import checked_scoped_name
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownTask
from postroom.message import ENGINE_PREFIX, Durability, Event, Record, State
from postroom.nudges.database_notifier import DatabaseNotifier
from postroom.nudges.notifier import QUIET_S, Notifier
from postroom.stores.base import PURGE_BATCH_MAX, ByIds, Limits, Listing
from postroom.stores.open import open_store
from postroom.stores.purge import purge_events, purge_keys, purge_tasks
from postroom.stores.store import Store
from postroom.stores.transaction import Claim, Transaction
from postroom.system.clock import Clock
from postroom.system.handles import Closing

__all__ = [
    "DECISIONS",
    "LEASE_S",
    "STATUS",
    "AgentStatus",
    "LeasedTask",
    "Retention",
    "Status",
    "TaskInfo",
    "TaskLine",
    "Tasks",
    "TasksStatus",
]

T = TypeVar("T")

LOOK_AGAIN_S = 1.0  # the delay that a lost wake-up causes
LOOK_AGAIN_DEAF_S = 0.05  # the poll interval where wake-ups of other processes do not arrive
TASK_ENDED = ".ended"
"""The wake-up for ended tasks. No agent's name begins with a dot."""


KEEP_FINISHED_S = 7 * 86_400.0
KEEP_DEAD_S = 90 * 86_400.0
KEEP_KEYS_S = 30 * 86_400.0


class Retention(msgspec.Struct, frozen=True):
    """How long ended tasks, events and idempotency keys are kept."""

    finished_s: float = KEEP_FINISHED_S
    dead_s: float = KEEP_DEAD_S
    events_s: float = KEEP_FINISHED_S
    """Of events that no shipper has taken."""
    keys_s: float = KEEP_KEYS_S


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals that users do not set."""

    look_again_s: float = LOOK_AGAIN_S
    look_again_deaf_s: float = LOOK_AGAIN_DEAF_S
    purge_every_calls: int = 1_000
    purge_every_s: float = 60.0


class TaskPurge:
    """Removes what has passed its retention from one store."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention
        self._calls = 0
        self._last = time.monotonic()
        self._tasks_after = 0
        self._keys_after = ""

    def count(self, calls: int) -> None:
        """Count calls that bring the next purge nearer."""
        self._calls += calls

    def run_if_due(self, calls: int, limits: TaskLimits) -> None:
        """Count `calls`, and purge after `purge_every_calls` of them or `purge_every_s`."""
        self._calls += calls
        now = time.monotonic()
        is_late = now >= self._last + limits.purge_every_s
        if self._calls < limits.purge_every_calls and not is_late:
            return
        # Many calls alone are not a reason: a purge is worth it when the oldest task has expired.
        is_worth_it = is_late or self._has_expired(self._store.find(Listing(limit=1)))
        self._calls, self._last = 0, now
        if is_worth_it:
            self.run()

    def _has_expired(self, oldest: list[Record]) -> bool:
        now_us = self._store.read(lambda transaction: transaction.wall_us)
        expired_us = now_us - round(self._retention.finished_s * 1e6)
        return any(record.ended_us and record.ended_us < expired_us for record in oldest)

    def run(self, rounds: int = 4) -> None:
        """Remove at most `rounds` batches of tasks, and one batch of events and of keys."""
        keep = self._retention
        kept_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, round(keep.finished_s * 1e6))
        kept_us["DEAD_LETTER"] = kept_us["QUARANTINED"] = round(keep.dead_s * 1e6)

        def purge_some(transaction: Transaction) -> int:
            gone, after = purge_tasks(transaction, self._tasks_after, kept_us, PURGE_BATCH_MAX)
            task_storage.forget(transaction, gone)
            return after

        for _ in range(rounds):
            self._tasks_after = self._store.write(purge_some, makes_room=True)
            if self._tasks_after == 0:
                break
        self._keys_after = self._store.write(self._purge_keys_and_events, makes_room=True)

    def _purge_keys_and_events(self, transaction: Transaction) -> str:
        keep, now_us = self._retention, transaction.wall_us
        purge_events(transaction, NUMBER_MAX, now_us - round(keep.events_s * 1e6), PURGE_BATCH_MAX)
        keys_before_us = now_us - round(keep.keys_s * 1e6)
        return purge_keys(transaction, self._keys_after, keys_before_us, PURGE_BATCH_MAX)


class Tasks(Closing):
    """The task queues of one store, a queue for each agent.

    `durability` applies to tasks that name none: "os" survives the end of any process, "group" and
    "fsync" also a power cut. Safe to share between threads, and across fork.
    """

    limits = TaskLimits()

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
        self.notifier = notifier_of(store)
        self.on_notable: Callable[[Sequence[Event]], None] | None = None
        """Called after each commit with its notable events: lapses, retries, dead letters, duplicates."""
        store.add_commit_listener(self._committed)
        self._purge = TaskPurge(store, Retention() if retention is None else retention)
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
        key_file: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Open the store `sqlite:///dir/queue.db`, `postgres://user@host/db` or `memory://`.

        `key_file` encrypts what is stored: payloads, results and events.
        """
        if not isinstance(url, str):
            raise InvalidMessage(f"a store is named by text such as sqlite:///queue.db, not {url!r}")
        store = open_store(url, clock=clock, key_file=key_file)
        return cls(store, retry=retry, retention=retention, durability=durability)

    # ---- senders -------------------------------------------------------------------------------

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

    def enqueue_many(self, tasks: Iterable[TaskFields]) -> list[str]:
        """Store several tasks, each given by the keywords of `enqueue`, in one commit: all or none."""
        try:
            new = msgspec.convert(list(tasks), list[NewTask])
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"not a task: {field_fault(error, 'the list')}") from None
        return self._enqueue(new) if new else []

    def _enqueue(self, new: Sequence[NewTask]) -> list[str]:
        backlog = self._backlog
        if backlog.behind is not None or time.monotonic() >= backlog.look_at:  # else skip the call
            backlog.hold_up()
        rules = self.rules
        return self.store.write(lambda transaction: TaskOperations(transaction, rules).enqueue(new))

    def check_backlog(self) -> None:
        """Raise `AuditBehind` while the audit shipper is behind. For servers, which must not sleep."""
        self._backlog.hold_up(may_sleep=False)

    def _committed(self, transaction: Transaction) -> None:
        for queue in transaction.ready:
            if not queue.startswith(ENGINE_PREFIX):
                self.notifier.notify(DECISIONS if holds_decisions(queue) else queue)
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
        """Run calls of many clients in one commit. Returns the result of each call, or its error.

        For a server: `tasks.run_many([lambda operations: operations.release(task_id, lease), ...])`.
        `makes_room` marks calls that must also succeed on a full disk.
        """
        self._purge.run_if_due(len(calls), self.limits)
        self._backlog.look()
        rules = self.rules

        def bound(call: TaskCall) -> Callable[[Transaction], Any]:
            return lambda transaction: call(TaskOperations(transaction, rules))

        return self.store.write_many([bound(call) for call in calls], makes_room=makes_room)

    # ---- claims --------------------------------------------------------------------------------

    def claim(
        self,
        *,
        agent: str,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
        worker: str | None = None,
    ) -> list[LeasedTask]:
        """Lease up to `limit` tasks of an agent, oldest first. With `wait_s`, wait for the first task."""
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

    def claim_now(self, terms: Claim) -> list[LeasedTask]:
        """Lease the tasks that are ready now."""
        self._purge.run_if_due(terms.limit, self.limits)
        return self._write(lambda operations: operations.claim(terms))

    def pause_s(self, agent: str) -> float:
        """How long a claim may wait for a wake-up before it has to look again."""
        longest = self._longest_pause_s()
        starts_ns = self.store.next_work_ns(agent)
        return longest if starts_ns is None else min(longest, starts_ns / NANOS_PER_S)

    def _longest_pause_s(self) -> float:
        hears = self.notifier.hears_other_processes
        return self.limits.look_again_s if hears else self.limits.look_again_deaf_s

    # ---- lease holders -------------------------------------------------------------------------

    def heartbeat(self, task_id: str, lease: int) -> None:
        """Renew a lease: it runs its full length from now. Raises `StaleLease` when it is over."""
        self._write(lambda operations: operations.heartbeat(task_id, lease), makes_room=True)

    def complete(
        self, task_id: str, lease: int, result: Any = None, *, claim_next: int = 0
    ) -> list[LeasedTask]:
        """Complete a task. Repeating the call under the same lease changes nothing.

        `claim_next` claims up to that many further tasks in the same commit, with the same worker and lease
        length.
        """
        return self.complete_many([(task_id, lease, result)], claim_next=claim_next)

    def complete_many(
        self, finished: Iterable[tuple[str, int, Any]], *, claim_next: int = 0
    ) -> list[LeasedTask]:
        """Complete each (task_id, lease, result) in one commit: all or none."""
        check_claim_limit(claim_next, "claim_next", 0)
        results = checked_results(finished)
        if claim_next:
            self._purge.run_if_due(claim_next, self.limits)
        claimed = self._write(lambda operations: operations.complete(results, claim_next), makes_room=True)
        self._purge.count(len(results))
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
        """Return a task unprocessed. It keeps its position, and the attempt does not count as a retry."""
        self._write(lambda operations: operations.release(task_id, lease), makes_room=True)

    # ---- operators -----------------------------------------------------------------------------

    def cancel(self, task_id: str) -> None:
        """End a task without a result. Raises `WrongState` when it has already ended."""
        self._write(lambda operations: operations.cancel(task_id), makes_room=True)

    def retry(self, task_id: str) -> None:
        """Queue a dead, cancelled or expired task again, with its full number of retries."""
        self._write(lambda operations: operations.retry(task_id))

    def limit_queue(
        self,
        agent: str,
        *,
        max_depth: int | None = None,
        max_payload_bytes: int | None = None,
        durability: Durability | None = None,
    ) -> None:
        """Change the limits of an agent's queue, and the durability class of tasks that name none."""
        default = Limits()
        for name, value in (("max_depth", max_depth), ("max_payload_bytes", max_payload_bytes)):
            if value is not None and (type(value) is not int or not 1 <= value <= NUMBER_MAX):
                raise InvalidMessage(f"{name} must be a whole number from 1 to {NUMBER_MAX}, not {value!r}")
        check_durability(durability)
        limits = Limits(
            max_depth or default.max_depth, max_payload_bytes or default.max_payload_bytes, durability
        )  # fmt: skip
        self._write(lambda operations: operations.set_limits(agent, limits))

    # ---- the harness ---------------------------------------------------------------------------

    def open_decision(self, task_id: str) -> str | None:
        """Turn the result of a completed task into a decision. Returns None if that was done before."""
        return self._write(lambda operations: operations.open_decision(task_id))

    def settle(self, decision: LeasedTask) -> None:
        """Mark a decision as executed: it completes, and its task is done, in one commit."""
        self._write(lambda operations: operations.settle(decision.task_id, decision.lease), makes_room=True)

    def sweep(self, limit: int = PURGE_BATCH_MAX) -> int:
        """Requeue overdue tasks of every queue, as claims do. Returns how many."""
        check_page(0, limit)
        return self._write(lambda operations: operations.sweep(limit), makes_room=True)

    # ---- reads ---------------------------------------------------------------------------------

    def get(self, task_id: str) -> TaskInfo:
        """Return everything about a task, with its history. Raises `UnknownTask`."""
        return stored_task(self.store, task_id)

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskInfo:
        """Wait until the task has ended, at most `timeout_s`, and return it as it is then."""
        deadline = math.inf if timeout_s is None else checked_seconds("timeout_s", timeout_s)
        deadline += time.monotonic()
        if not self.get(task_id).ended and time.monotonic() < deadline:
            self._wait_for_end(task_id, deadline)
        return self.get(task_id)

    def _wait_for_end(self, task_id: str, deadline: float) -> None:
        woken = threading.Event()
        with self.notifier.subscribed(TASK_ENDED, woken.set):
            pause_s = 2 * QUIET_S  # another process may not see this waiter before
            while not self.ended([task_id]) and (left_s := deadline - time.monotonic()) > 0:
                woken.wait(min(left_s, pause_s))
                woken.clear()
                pause_s = self._longest_pause_s()

    def ended(self, task_ids: Sequence[str]) -> set[str]:
        """Return those of these tasks that have ended. A purged task counts as ended."""
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
        """List tasks in the order of acceptance. `after` is the `seq` of the last task seen."""
        if agent is not None:
            checked_scoped_name("agent", agent)
        if state is not None and state not in STATUS:
            raise InvalidMessage(f"state must be one of {', '.join(STATUS)}, not {state!r}")
        check_page(after, limit)
        pick = Listing(agent, state, after, limit)
        return [task_line(record) for record in self.store.read(lambda found: find_tasks(found, pick))]

    def status(self) -> TasksStatus:
        """Return the state of every queue."""
        agents = self.store.read(agents_status)
        self._backlog.look()
        return TasksStatus(agents, totals(agents.values()), self._backlog.waiting, self._backlog.held_up)

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        """Return the events after that number, in order."""
        check_page(after, limit)
        return self.store.events(after, limit)

    # ---- retention -----------------------------------------------------------------------------

    def purge(self, rounds: int = 4) -> None:
        """Remove what has passed its retention, in at most `rounds` small batches."""
        self._purge.run(rounds)

    def forget_events(self, up_to: int) -> None:
        """Remove the events up to this number, because they are kept elsewhere."""
        if type(up_to) is not int or not 0 <= up_to <= NUMBER_MAX:
            raise InvalidMessage(f"up_to must be the number of an event, not {up_to!r}")
        self.store.write(
            lambda transaction: purge_events(transaction, up_to, NUMBER_MAX, PURGE_BATCH_MAX), makes_room=True
        )

    # ---- files ---------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Reopen the store after a failed fsync."""
        self.store.reopen()

    def close(self) -> None:
        """Close every file. The next call opens them again."""
        self.notifier.close()
        self.store.close()


def notifier_of(store: Store) -> Notifier:
    """The wake-ups of a store: through its database, or through files next to it."""
    channel = store.nudge_channel()
    return Notifier(notifier_folder(store.url)) if channel is None else DatabaseNotifier(*channel)


def notifier_folder(url: str) -> Path | None:
    """The folder next to the database; None for a store that has no file."""
    ledger = url.partition("ledger=")[2] or url
    path = ledger.removeprefix("sqlite:///")
    return None if path == ledger else Path(f"{path}.bells")
