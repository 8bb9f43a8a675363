"""`Tasks`: a task queue that its harness owns, with leases, heartbeats and fencing.

Who remembers what was done: the store. A claimed task is leased, and only who holds the lease can renew,
finish or give it back. What is not heard of in time goes to somebody else: at least once.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec.structs import replace

from postroom.contracts.backlog import Backlog
from postroom.core import lifecycle
from postroom.core.fieldfaults import field_fault, unencodable
from postroom.core.lifecycle import NANOS_PER_S
from postroom.core.names import checked_name
from postroom.core.retry import RetryPolicy
from postroom.core.times import EPOCH, MICROSECOND, checked_seconds
from postroom.errors import InvalidMessage, PostroomError, UnknownTask
from postroom.message import Durability, Envelope, Event, Moment, Record, State, Step
from postroom.nudges.bell import QUIET_S, Bell
from postroom.stores.base import (
    CLAIM_MAX,
    PURGE_BATCH_MAX,
    Accepted,
    ByIds,
    Claim,
    Counted,
    Decide,
    Delivery,
    InState,
    Leased,
    Limits,
    Store,
    Transaction,
)
from postroom.stores.opening import open_store
from postroom.system.clock import Clock
from postroom.system.handles import Closing

T = TypeVar("T")

LEASE_S = 300.0  # from the last heartbeat
LEASE_S_MIN = 0.001
LEASE_S_MAX = 30 * 86_400.0
DELAY_S_MAX = 366 * 86_400.0
RESULT_BYTES_MAX = 1024 * 1024
NO_RESULT = b"null"
LOOK_AGAIN_S = 1.0  # what a lost ring costs
LOOK_AGAIN_DEAF_S = 0.05  # the same where no ring of another process is heard
HOLDERS_MAX = 1_000  # of leases that a status looks at, for each queue
TIDY_EVERY_CALLS = 1_000
TIDY_EVERY_S = 60.0
KEEP_FINISHED_S = 7 * 86_400.0
KEEP_DEAD_S = 90 * 86_400.0
KEEP_KEYS_S = 30 * 86_400.0
ENDED_BELL = ".ended"  # no agent has a name that begins with a dot
"""The bell that is rung when a task has come to its end."""
DECISIONS = "harness.decisions"
"""The queue of results that the harness has to act on."""

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


class Task(msgspec.Struct, frozen=True):
    """A claimed task. `lease` is the token that every later word about it must show."""

    task_id: str
    payload: Any
    lease: int
    attempt: int
    agent: str
    type: str = ""
    parent: str = ""
    lease_s: float = LEASE_S


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


class _NewTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `enqueue`."""

    agent: Any
    payload: Any
    task_id: Any = None
    delay_s: Any = 0.0
    idempotency_key: Any = None
    type: Any = ""
    parent: Any = ""
    max_retries: Any = None
    durability: Any = None
    sender: Any = ""


def _differ_in_payload_alone(one: _NewTask, other: _NewTask) -> bool:
    """Whether they hold the very same objects: what is equal can still be of another type."""
    return (
        one.agent is other.agent
        and one.task_id is other.task_id
        and one.delay_s is other.delay_s
        and one.idempotency_key is other.idempotency_key
        and one.type is other.type
        and one.parent is other.parent
        and one.max_retries is other.max_retries
        and one.durability is other.durability
        and one.sender is other.sender
    )


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
        _check_durability(durability)
        self.store = store
        self._retry = RetryPolicy() if retry is None else retry
        self._retention = Retention() if retention is None else retention
        self._durability: Durability = durability
        self.bell = Bell(_bell_folder(store.url))
        store.on_ready = self._ring
        store.on_ended = self._ring_ended
        self._calls = 0
        self._tidied = time.monotonic()
        self._purged_to = 0
        self._backlog = Backlog(store)
        self._may_sleep = True

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
        envelope = self._envelope(
            agent, payload, task_id, delay_s, idempotency_key, type, parent, max_retries, durability, sender
        )
        return self._insert([envelope])[0].message_id

    def enqueue_many(self, tasks: Iterable[dict[str, Any]]) -> list[str]:
        """As `enqueue`, for each of the keyword sets, in one commit: all or none."""
        try:
            all_new = msgspec.convert(list(tasks), list[_NewTask])
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"not a task: {field_fault(error, 'the list')}") from None
        envelopes: list[Envelope] = []
        last = None
        for new in all_new:
            if last is not None and _differ_in_payload_alone(new, last):
                payload = encoded("the payload", new.payload)
                envelopes.append(replace(envelopes[-1], payload=payload))  # the rest is checked
                continue
            envelopes.append(
                self._envelope(
                    new.agent, new.payload, new.task_id, new.delay_s, new.idempotency_key, new.type,
                    new.parent, new.max_retries, new.durability, new.sender,
                )
            )  # fmt: skip
            last = new
        return [accepted.message_id for accepted in self._insert(envelopes)] if envelopes else []

    def _envelope(
        self,
        agent: str,
        payload: Any,
        task_id: str | None,
        delay_s: float,
        key: str | None,
        kind: str,
        parent: str,
        max_retries: int | None,
        durability: Durability | None,
        sender: str,
    ) -> Envelope:
        if delay_s != 0:
            checked_seconds("delay_s", delay_s, DELAY_S_MAX)
        if max_retries is not None and (type(max_retries) is not int or not 0 <= max_retries <= RETRIES_MAX):
            raise InvalidMessage(f"max_retries must be from 0 to {RETRIES_MAX}, not {max_retries!r}")
        queue = checked_name("agent", agent)
        if queue == DECISIONS:
            raise InvalidMessage(f"{DECISIONS} is filled by the harness alone")
        if durability is None:
            durability = self.store.limits(queue).durability or self._durability
        else:
            _check_durability(durability)
        return Envelope(
            queue=queue,
            payload=encoded("the payload", payload),
            message_id="" if task_id is None else checked_name("task id", task_id),
            type=kind if kind == "" else _text("type", kind),
            parent_message_id=parent if parent == "" else _text("parent", parent),
            key="" if key is None else _key(key, sender),
            max_retries=self._retry.max_retries if max_retries is None else max_retries,
            delay_ns=round(delay_s * NANOS_PER_S) if delay_s else 0,
            durability=durability,
            sender=sender if sender == "" else checked_name("sender", sender),
        )

    def _insert(self, envelopes: Sequence[Envelope]) -> list[Accepted]:
        backlog = self._backlog
        if backlog.behind is not None or time.monotonic() >= backlog.look_at:  # most enqueues have no reason
            backlog.hold_up(may_sleep=self._may_sleep)
        return self.store.write(lambda transaction: transaction.insert(envelopes))

    def _ring(self, queues: set[str]) -> None:
        for queue in queues:
            self.bell.ring(queue)

    def _ring_ended(self) -> None:
        self.bell.ring_seldom_heard(ENDED_BELL)

    def run_many(self, calls: Sequence[Callable[["Tasks"], Any]], *, makes_room: bool = True) -> list[Any]:
        """Run calls on these tasks in one commit; gives each one's result, or the error that it raised.

        For a server that speaks for many: `tasks.run_many([lambda tasks: tasks.complete(...), ...])`.
        `makes_room` marks calls that must also work on a full disk.
        """
        self._tidy(len(calls))
        self._backlog.look()

        def work(transaction: Transaction) -> list[Any]:
            inside = Tasks.__new__(Tasks)
            store = _InTransaction(self.store, transaction)
            # Tidying is not for inside: it is made of commits, and would wait for the one that is under way.
            inside.__dict__ = {
                **self.__dict__, "store": store, "_may_sleep": False, "_tidy": lambda _: None
            }  # fmt: skip
            return [_outcome(call, inside, transaction) for call in calls]

        try:
            return self.store.write(work, makes_room=makes_room)
        except _HalfDone:
            return [_alone(call, self) for call in calls]

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
        terms = self.terms(agent, limit, lease_s, worker)
        if not checked_seconds("wait_s", wait_s):
            return self.claim_now(terms)
        deadline = time.monotonic() + wait_s
        woken = threading.Event()
        with self.bell.heard_by(agent, woken.set):
            while True:
                woken.clear()
                tasks = self.claim_now(terms) if self.store.next_work_ns(agent) == 0 else []
                left_s = deadline - time.monotonic()
                if tasks or left_s <= 0:
                    return tasks
                woken.wait(min(left_s, self.pause_s(agent)))

    def terms(self, agent: str, limit: int, lease_s: float, worker: str | None) -> Claim:
        """A claim, checked."""
        checked_name("agent", agent)
        if type(limit) is not int or not 1 <= limit <= CLAIM_MAX:
            raise InvalidMessage(f"limit must be from 1 to {CLAIM_MAX}, not {limit!r}")
        checked_seconds("lease_s", lease_s, LEASE_S_MAX, shortest_s=LEASE_S_MIN)
        holder = agent if worker is None else _text("worker", worker)
        return Claim(agent, holder, limit, round(lease_s * NANOS_PER_S))

    def claim_now(self, terms: Claim) -> list[Task]:
        """What can be leased at once."""
        self._tidy(terms.limit)
        deliveries = self.store.write(lambda transaction: transaction.claim(terms))
        return [_task(delivery) for delivery in deliveries]

    def pause_s(self, agent: str) -> float:
        """How long one may wait without missing anything, rings aside."""
        longest = LOOK_AGAIN_S if self.bell.reaches_others else LOOK_AGAIN_DEAF_S
        starts_ns = self.store.next_work_ns(agent)
        return longest if starts_ns is None else min(longest, starts_ns / NANOS_PER_S)

    # ---- what a holder says --------------------------------------------------------------------

    def heartbeat(self, task_id: str, lease: int) -> None:
        """The lease runs its length from now. Raises `StaleLease` when it is over."""
        token = _token(lease)
        self._say(task_id, lambda record, moment: lifecycle.renew(record, moment, token))

    def complete(self, task_id: str, lease: int, result: Any = None) -> None:
        """The task is done. Repeating the word under the same lease changes nothing."""
        self.complete_many([(task_id, lease, result)])

    def complete_many(self, finished: Iterable[tuple[str, int, Any]]) -> None:
        """As `complete`, for each (task_id, lease, result), in one commit: all or none."""
        words: dict[str, tuple[int, bytes]] = {}
        for word in finished:
            try:
                task_id, lease, result = word
            except (TypeError, ValueError):
                raise InvalidMessage(f"a finished task is (task_id, lease, result), not {word!r}") from None
            if type(task_id) is not str or not task_id.isascii() or type(lease) is not int:  # else two calls
                task_id, lease = _id(task_id), _token(lease)
            if task_id in words:
                raise InvalidMessage("a task stands in the list twice: it can be completed once")
            words[task_id] = lease, NO_RESULT if result is None else _result(result)
        self.store.write(lambda transaction: transaction.complete(words), makes_room=True)
        self._calls += len(words)

    def fail(
        self, task_id: str, lease: int, error: str, retry_in_s: float | None = None, *, error_type: str = ""
    ) -> None:
        """The task failed: it is tried again after a pause, or becomes a dead letter."""
        if retry_in_s is not None:
            checked_seconds("retry_in_s", retry_in_s, DELAY_S_MAX)
        token, text, kind = _token(lease), _text("error", error, limit=None), _text("error_type", error_type)

        def decide(record: Record, moment: Moment) -> Step | None:
            delay_ns = self._retry.delay_ns(record.retries, retry_in_s)
            return lifecycle.fail(record, moment, token, text, error_type=kind, delay_ns=delay_ns)

        self._say(task_id, decide)

    def release(self, task_id: str, lease: int) -> None:
        """Give the task back untouched: it keeps its place, and nothing is counted."""
        token = _token(lease)
        self._say(task_id, lambda record, moment: lifecycle.release(record, moment, token))

    def _say(self, task_id: str, decide: Decide) -> None:
        pick = ByIds((_id(task_id),))
        self.store.write(lambda transaction: transaction.apply(pick, decide), makes_room=True)

    # ---- what an operator says -----------------------------------------------------------------

    def cancel(self, task_id: str) -> None:
        """Nobody shall work on it any more. Raises `WrongState` when it is over already."""
        pick = ByIds((_id(task_id),))
        self.store.write(lambda transaction: transaction.apply(pick, lifecycle.cancel), makes_room=True)

    def retry(self, task_id: str) -> None:
        """Try a dead, cancelled or expired task again, with all its retries."""
        pick = ByIds((_id(task_id),))
        self.store.write(lambda transaction: transaction.apply(pick, lifecycle.replay))

    def limit_queue(
        self,
        agent: str,
        *,
        max_depth: int | None = None,
        max_payload_bytes: int | None = None,
        durability: Durability | None = None,
    ) -> None:
        """What an agent's queue may hold from now on, and the class of its tasks that name none."""
        usual = Limits()
        for name, value in (("max_depth", max_depth), ("max_payload_bytes", max_payload_bytes)):
            if value is not None and (type(value) is not int or not 1 <= value <= NUMBER_MAX):
                raise InvalidMessage(f"{name} must be a whole number from 1 to {NUMBER_MAX}, not {value!r}")
        _check_durability(durability)
        limits = Limits(
            max_depth or usual.max_depth, max_payload_bytes or usual.max_payload_bytes, durability
        )  # fmt: skip
        self.store.set_limits(checked_name("agent", agent), limits)

    # ---- what a harness does -------------------------------------------------------------------

    def open_decision(self, task_id: str) -> str | None:
        """Make a completed task's result a message of its own, to be executed; None when that is so."""

        def work(transaction: Transaction) -> str | None:
            [record] = transaction.find(ByIds((_id(task_id),)))
            stored = self.store.read(task_id)
            # Also what is committed: a result of this very commit cannot be read yet, and waits for the next.
            if record.state != "COMPLETED" or stored is None or stored.result is None:
                return None
            envelope = Envelope(
                queue=DECISIONS,
                payload=stored.result,
                key=task_id,
                type="decision",
                parent_message_id=task_id,
                max_retries=self._retry.max_retries,
                durability=record.durability,
            )
            decision_id = transaction.insert([envelope])[0].message_id
            transaction.apply(
                ByIds((task_id,)), lambda found, moment: lifecycle.hand_over(found, moment, decision_id)
            )
            return decision_id

        return self.store.write(work)

    def settle(self, decision: Task) -> None:
        """The decision was executed: it is complete, and the task it came from is done, in one commit."""

        def work(transaction: Transaction) -> None:
            transaction.apply(
                ByIds((decision.task_id,)),
                lambda record, moment: lifecycle.complete(record, moment, decision.lease, b"null"),
            )
            with suppress(UnknownTask):  # it was kept for its time, and executing took longer
                [parent] = transaction.find(ByIds((decision.parent,)))
                if parent.state == "EXECUTING":
                    transaction.apply(ByIds((decision.parent,)), lifecycle.settle)

        self.store.write(work, makes_room=True)

    def sweep(self, limit: int = PURGE_BATCH_MAX) -> int:
        """Put back what has run out in any queue, as claims do for theirs; how many tasks that were."""
        _check_page(0, limit)
        return self.store.write(lambda transaction: transaction.sweep(limit), makes_room=True)

    # ---- looking -------------------------------------------------------------------------------

    def get(self, task_id: str) -> TaskInfo:
        """Everything about a task, with its whole history. Raises `UnknownTask`."""
        stored = self.store.read(_id(task_id))
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
        with self.bell.heard_by(ENDED_BELL, woken.set):
            pause_s = 2 * QUIET_S  # another process may not have seen yet that somebody waits
            while not self.ended([task_id]) and (left_s := deadline - time.monotonic()) > 0:
                woken.wait(min(left_s, pause_s))
                woken.clear()
                pause_s = LOOK_AGAIN_S if self.bell.reaches_others else LOOK_AGAIN_DEAF_S

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
        _check_page(after, limit)
        records = self.store.find(InState(agent, state, after, limit))
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
        counts = self.store.count()
        totals: dict[Status, int] = {}
        for queue in counts.values():
            for state, n in queue.items():
                if state != "LAPSES":
                    totals[STATUS[state]] = totals.get(STATUS[state], 0) + n
        self._backlog.look()
        return TasksStatus(
            {agent: self._agent_status(agent, queue) for agent, queue in counts.items()},
            totals,
            self._backlog.waiting,
            self._backlog.held_up,
        )

    def _agent_status(self, agent: str, counts: dict[Counted, int]) -> AgentStatus:
        oldest_ns = self.store.oldest_ns(agent)
        holders: dict[str, int] = {}
        for record in self.store.find(Leased(agent, HOLDERS_MAX)):
            holders[record.worker_id] = holders.get(record.worker_id, 0) + 1
        return AgentStatus(
            depth=sum(counts.get(state, 0) for state in lifecycle.WAITING),
            oldest_age_s=None if oldest_ns is None else oldest_ns / NANOS_PER_S,
            in_flight=counts.get("PROCESSING", 0),
            holders=holders,
            lapses=counts.get("LAPSES", 0),
            states={state: n for state, n in counts.items() if state != "LAPSES"},
            max_depth=self.store.limits(agent).max_depth,
        )

    def events(self, after: int = 0, limit: int = 1_000) -> list[Event]:
        """What happened after the event of that number, in order."""
        _check_page(after, limit)
        return self.store.events(after, limit)

    # ---- keeping -------------------------------------------------------------------------------

    def _tidy(self, calls: int) -> None:
        """Now and then, forget a little of what is over."""
        self._calls += calls
        now = time.monotonic()
        if self._calls < TIDY_EVERY_CALLS and now < self._tidied + TIDY_EVERY_S:
            return
        looks = now >= self._tidied + TIDY_EVERY_S or self._is_over(
            self.store.find(InState(None, None, 0, 1))
        )
        self._calls, self._tidied = 0, now
        if looks:
            self.purge()

    def _is_over(self, oldest: list[Record]) -> bool:
        """Whether the oldest record can be forgotten; then there may be more of them."""
        long_ago_us = self.store.wall_us() - round(self._retention.finished_s * 1e6)
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
        now_us = self.store.wall_us()
        self.store.purge_keys(now_us - round(keep.keys_s * 1e6), PURGE_BATCH_MAX)
        before_us = now_us - round(keep.events_s * 1e6)
        self.store.purge_events(up_to=NUMBER_MAX, before_us=before_us, limit=PURGE_BATCH_MAX)

    def forget_events(self, up_to: int) -> None:
        """The events up to this number are kept elsewhere."""
        if type(up_to) is not int or not 0 <= up_to <= NUMBER_MAX:
            raise InvalidMessage(f"up_to must be the number of an event, not {up_to!r}")
        self.store.purge_events(up_to=up_to, before_us=NUMBER_MAX, limit=PURGE_BATCH_MAX)

    # ---- life ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Start afresh after an error of the disk."""
        self.store.reopen()

    def close(self) -> None:
        """Close every file. The queue can be used again; it opens them anew."""
        self.bell.close()
        self.store.close()


class _HalfDone(Exception):
    """A call failed after it had changed something: the whole commit is void."""


class _InTransaction:
    """A store as one of several calls in a commit sees it."""

    def __init__(self, store: Store, transaction: Transaction) -> None:
        self._store = store
        self._transaction = transaction
        self.limits = store.limits  # every enqueue asks

    def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:  # noqa: ARG002
        return work(self._transaction)

    def __getattr__(self, name: str) -> Any:
        if name in _COMMITS_OF_THEIR_OWN:
            raise InvalidMessage(f"{name} is a commit of its own, and cannot be one of several calls")
        return getattr(self._store, name)


_COMMITS_OF_THEIR_OWN = frozenset(
    {"set_limits", "set_outbox", "purge_events", "purge_keys", "reopen", "close"}
)


def _outcome(call: Callable[[Tasks], Any], tasks: Tasks, transaction: Transaction) -> Any:
    before = transaction.number, transaction.changes
    try:
        return call(tasks)
    except PostroomError as error:
        if (transaction.number, transaction.changes) != before:
            raise _HalfDone from error
        return error


def _alone(call: Callable[[Tasks], Any], tasks: Tasks) -> Any:
    try:
        return call(tasks)
    except PostroomError as error:
        return error


RETRIES_MAX = 1_000
JSON_DEPTH_MAX = 200  # deeper values could be stored, and then not be read by whoever stands deep in a stack
SURELY_FLAT_BYTES = 2 * JSON_DEPTH_MAX  # each level opens and closes
PAGE_MAX = 100_000
NUMBER_MAX = 2**63 - 1
TEXT_CHARS_MAX = 256
KEY_CHARS_MAX = 512

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def encoded(what: str, value: Any) -> bytes:
    """JSON of something that a caller handed in."""
    try:
        data = _encode(value)
        if len(data) > SURELY_FLAT_BYTES and data.count(b"[") + data.count(b"{") > JSON_DEPTH_MAX:
            _check_depth(what, _decode(data))
        # What an encoder makes of a number that is none; `find` takes half the time of `in`.
        if data.find(b"null") >= 0 and value is not None:
            _check_numbers(what, msgspec.to_builtins(value))
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidMessage(f"{what} cannot be written as JSON: {unencodable(error)}") from None
    return data


def _check_depth(what: str, value: Any) -> None:
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InvalidMessage(f"{what} is nested more than {JSON_DEPTH_MAX} levels deep")


def _check_numbers(what: str, value: Any) -> None:
    level = [value]
    while level:
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise InvalidMessage(f"{what} holds a number that is infinite or none, which JSON cannot hold")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def _check_durability(durability: object) -> None:
    if durability not in (None, "os", "group", "fsync"):
        raise InvalidMessage(f"durability must be one of os, group, fsync, not {durability!r}")


def _result(value: Any) -> bytes:
    data = encoded("the result", value)
    if len(data) > RESULT_BYTES_MAX:
        raise InvalidMessage(f"the result has {len(data)} bytes, and at most {RESULT_BYTES_MAX} are kept")
    return data


def _id(task_id: object) -> str:
    """Something that can be an id; every id that is given is ASCII."""
    if not isinstance(task_id, str) or not task_id.isascii():
        raise UnknownTask(task_id)  # type: ignore[arg-type]
    return task_id


def _check_page(after: object, limit: object) -> None:
    if type(after) is not int or not 0 <= after <= NUMBER_MAX:
        raise InvalidMessage(f"after must be the number of the last one seen, or 0, not {after!r}")
    if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
        raise InvalidMessage(f"limit must be from 1 to {PAGE_MAX}, not {limit!r}")


def _token(lease: object) -> int:
    if type(lease) is not int:
        raise InvalidMessage(f"lease must be the number that claim gave, not {lease!r}")
    return lease


def _text(name: str, value: object, *, limit: int | None = TEXT_CHARS_MAX) -> str:
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} must be text, not {type(value).__name__}")
    if limit is not None and len(value) > limit:
        raise InvalidMessage(f"{name} has {len(value)} characters, and at most {limit} are kept")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{name} holds lone surrogates, which are not Unicode text") from None
    return value


def _key(key: object, sender: str) -> str:
    """Each sender has keys of its own: the same key of two senders is two tasks.

    A key without a sender is kept as it is, unless it looks like one with a sender.
    """
    text = _text("idempotency_key", key, limit=KEY_CHARS_MAX)
    if not text:
        raise InvalidMessage("idempotency_key is empty: leave it out instead")
    return f"@{sender}:{text}" if sender or text.startswith("@") else text


def _task(delivery: Delivery) -> Task:
    return Task(
        delivery.message_id,
        _decode(delivery.payload),
        delivery.lease,
        delivery.attempt,
        delivery.queue,
        delivery.type,
        delivery.parent_message_id,
        delivery.lease_ns / NANOS_PER_S,
    )


def _moment(us: int) -> datetime:
    return EPOCH + us * MICROSECOND


def _lease_ends_at(record: Record) -> datetime | None:
    """By the clock for people; whether the lease is over is decided by the store's own clock."""
    if record.state != "PROCESSING":
        return None
    return _moment(record.heartbeat_us + record.lease_ns // 1000)


def _bell_folder(url: str) -> Path | None:
    """Beside the database; a store in memory is heard in its own process alone."""
    path = url.removeprefix("sqlite:///")
    return None if path == url else Path(f"{path}.bells")
