"""Operations on tasks inside one transaction, for `Tasks` and for servers.

Rule 1: an operation raises before it writes, so several operations can share a commit.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Required, TypedDict

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import DELAY_S_MAX, NUMBER_MAX
from postroom.contracts.tasks import task_storage
from postroom.contracts.tasks.task_input import (
    check_durability,
    checked_id,
    checked_key,
    checked_retries,
    checked_text,
    checked_token,
    encoded,
)
from postroom.core.formats.jsoninput import ReadValue, decoded_value
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.core.names import checked_scoped_name, scoped, split_scoped
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownTask
from postroom.message import ENGINE_PREFIX, Durability, Envelope, Moment, Record, Step
from postroom.stores.base import ByIds, Limits
from postroom.stores.transaction import Claim, Decide, Delivery, Transaction

LEASE_S = 300.0  # from the last heartbeat
DECISIONS = "harness.decisions"
"""The queue of decisions: results that the harness has to execute. Those of an organization have its own."""
MESSAGE_ID_CHARS = 36  # of a UUID, with which the id of every message ends; few tasks have so long a one


class LeasedTask(msgspec.Struct, frozen=True):
    """A claimed task. `lease` is the token that every later call about it must carry."""

    task_id: str
    payload: Any
    lease: int
    attempt: int
    agent: str
    type: str = ""
    parent: str = ""
    lease_s: float = LEASE_S


class TaskFields(TypedDict, total=False):
    """The keywords of `Tasks.enqueue`."""

    agent: Required[str]
    payload: Required[Any]
    task_id: str | None
    delay_s: float
    idempotency_key: str | None
    type: str
    parent: str
    max_retries: int | None
    durability: Durability | None
    sender: str


class NewTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keywords of `Tasks.enqueue`, not checked yet."""

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


class Rules(msgspec.Struct, frozen=True):
    """The defaults of tasks that name no values of their own."""

    retry: RetryPolicy
    durability: Durability


def holds_decisions(queue: str) -> bool:
    """Whether a queue is that of the decisions of an organization, or of none."""
    return split_scoped(queue)[1] == DECISIONS


class TaskOperations:
    """Operations on the tasks of one transaction."""

    def __init__(self, transaction: Transaction, rules: Rules) -> None:
        self.transaction = transaction
        self._rules = rules

    # ---- senders -------------------------------------------------------------------------------

    def enqueue(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks and return their ids. A known `task_id` or `idempotency_key` stores nothing new."""
        if not tasks:
            return []
        envelopes = [self._envelope(tasks[0])]
        for previous, new in pairwise(tasks):
            if _differ_in_payload_alone(new, previous):
                envelopes.append(replace(envelopes[-1], payload=encoded("the payload", new.payload)))
            else:
                envelopes.append(self._envelope(new))
        return [accepted.message_id for accepted in task_storage.insert(self.transaction, envelopes)]

    def _envelope(self, new: NewTask) -> Envelope:
        queue = checked_scoped_name("agent", new.agent)
        if holds_decisions(queue):
            raise InvalidMessage(f"only the harness adds tasks to {DECISIONS}")
        if new.delay_s != 0:
            checked_seconds("delay_s", new.delay_s, DELAY_S_MAX)
        rules, durability = self._rules, new.durability
        if durability is None:
            durability = self.transaction.limits(queue).durability or rules.durability
        else:
            check_durability(durability)
        sender = new.sender if new.sender == "" else checked_scoped_name("sender", new.sender)
        return Envelope(
            queue=queue,
            payload=encoded("the payload", new.payload),
            message_id="" if new.task_id is None else checked_scoped_name("task id", new.task_id),
            type=new.type if new.type == "" else checked_text("type", new.type),
            parent_message_id=new.parent if new.parent == "" else checked_text("parent", new.parent),
            key="" if new.idempotency_key is None else checked_key(new.idempotency_key, sender),
            max_retries=rules.retry.max_retries
            if new.max_retries is None
            else checked_retries(new.max_retries),
            delay_ns=round(new.delay_s * NANOS_PER_S) if new.delay_s else 0,
            durability=durability,
            sender=sender,
        )

    # ---- lease holders -------------------------------------------------------------------------

    def claim(self, terms: Claim, read_value: ReadValue = decoded_value) -> list[LeasedTask]:
        """Lease ready tasks, oldest first. `read_value` reads their payloads."""
        return [_task(delivery, read_value) for delivery in self.transaction.claim(terms)]

    def heartbeat(self, task_id: str, lease: int) -> None:
        """Renew a lease: it runs its full length from now."""
        token = checked_token(lease)
        self._apply(task_id, lambda record, moment: lifecycle.renew(record, moment, token))

    def complete(
        self,
        results: Mapping[str, tuple[int, bytes]],
        claim_next: int = 0,
        read_value: ReadValue = decoded_value,
    ) -> list[LeasedTask]:
        """Complete tasks (id to token and result). Then claim more with the same worker and lease length."""
        if not results:
            return []
        for task_id in results:
            if len(task_id) >= MESSAGE_ID_CHARS:
                self.record(task_id)
        for task_id in self.transaction.complete(results):
            task_storage.add(self.transaction, task_id, len(results[task_id][1]))
        if not claim_next:
            return []
        record = self.record(next(iter(results)))
        return self.claim(Claim(record.queue, record.worker_id, claim_next, record.lease_ns), read_value)

    def fail(
        self, task_id: str, lease: int, error: str, retry_in_s: float | None = None, *, error_type: str = ""
    ) -> None:
        """Report a failure: the task is retried after a pause, or becomes a dead letter."""
        if retry_in_s is not None:
            checked_seconds("retry_in_s", retry_in_s, DELAY_S_MAX)
        token, text = checked_token(lease), checked_text("error", error, limit=None)
        kind, retry = checked_text("error_type", error_type), self._rules.retry

        def decide(record: Record, moment: Moment) -> Step | None:
            delay_ns = retry.delay_ns(record.retries, retry_in_s)
            return lifecycle.fail(record, moment, token, text, error_type=kind, delay_ns=delay_ns)

        self._apply(task_id, decide)

    def release(self, task_id: str, lease: int) -> None:
        """Return a task unprocessed. It keeps its position, and the attempt does not count as a retry."""
        token = checked_token(lease)
        self._apply(task_id, lambda record, moment: lifecycle.release(record, moment, token))

    # ---- operators -----------------------------------------------------------------------------

    def cancel(self, task_id: str) -> None:
        """End a task without a result. Raises `WrongState` when it has already ended."""
        self._apply(task_id, lifecycle.cancel)

    def retry(self, task_id: str) -> None:
        """Queue a dead, cancelled or expired task again, with its full number of retries."""
        self._apply(task_id, lifecycle.replay)

    def set_limits(self, agent: str, limits: Limits) -> None:
        """Change the limits of an agent's queue."""
        queue = checked_scoped_name("agent", agent)
        self.transaction.set_limits(queue, replace(limits, org=self.transaction.limits(queue).org))

    def sweep(self, limit: int) -> int:
        """Requeue overdue tasks of every queue. Returns how many."""
        return self.transaction.sweep(limit)

    # ---- the harness ---------------------------------------------------------------------------

    def open_decision(self, task_id: str) -> str | None:
        """Turn the result of a completed task into a decision. Returns None if that was done before."""
        stored = self.transaction.records.load(checked_id(task_id))
        if stored is None or stored.record.queue.startswith(ENGINE_PREFIX):
            raise UnknownTask(task_id)
        if stored.record.state != "COMPLETED" or stored.result is None:
            return None
        envelope = Envelope(
            queue=self._decisions_of(stored.record.queue),
            payload=stored.result,
            key=task_id,
            type="decision",
            parent_message_id=task_id,
            max_retries=self._rules.retry.max_retries,
            durability=stored.record.durability,
        )
        decision_id = task_storage.insert_decision(self.transaction, envelope)
        self._apply(task_id, lambda record, moment: lifecycle.hand_over(record, moment, decision_id))
        return decision_id

    def _decisions_of(self, queue: str) -> str:
        """The queue of the decisions for the tasks of a queue. It takes all: their results are stored."""
        decisions = scoped(task_storage.owner_of(self.transaction, queue), DECISIONS)
        limits = self.transaction.limits(decisions)
        if limits.max_depth < NUMBER_MAX:
            self.transaction.set_limits(decisions, replace(limits, max_depth=NUMBER_MAX))
        return decisions

    def settle(self, decision_id: str, lease: int) -> None:
        """Mark a decision as executed: it completes, and its task is done."""
        self.transaction.complete({checked_id(decision_id): (checked_token(lease), b"null")})
        decision = self.transaction.records.load(decision_id)
        with suppress(UnknownTask):  # the task was purged while the decision was executed
            if decision is not None and self.record(decision.envelope.parent_message_id).state == "EXECUTING":
                self._apply(decision.envelope.parent_message_id, lifecycle.settle)

    # ---- reading -------------------------------------------------------------------------------

    def record(self, task_id: str) -> Record:
        """The delivery state of a task. Raises `UnknownTask`, also for a message of an organization."""
        [record] = self.transaction.records.find(ByIds((checked_id(task_id),)))
        if record.queue.startswith(ENGINE_PREFIX):
            raise UnknownTask(task_id)
        return record

    def _apply(self, task_id: str, decide: Decide) -> None:
        def decide_for_task(record: Record, moment: Moment) -> Step | None:
            if record.queue.startswith(ENGINE_PREFIX):
                raise UnknownTask(task_id)
            return decide(record, moment)

        self.transaction.apply(ByIds((checked_id(task_id),)), decide_for_task)


TaskCall = Callable[[TaskOperations], Any]
"""Work on tasks that runs inside a transaction."""


def _differ_in_payload_alone(one: NewTask, other: NewTask) -> bool:
    """Whether all other fields are the same objects. Equal objects could still differ in type."""
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


def _task(delivery: Delivery, read_value: ReadValue) -> LeasedTask:
    return LeasedTask(
        delivery.message_id,
        read_value(delivery.payload),
        delivery.lease,
        delivery.attempt,
        delivery.queue,
        delivery.type,
        delivery.parent_message_id,
        delivery.lease_ns / NANOS_PER_S,
    )
