"""The views of agents and tasks: agents, their queues, the newest tasks of one, and one task with its life.

Rule 1: a caller sees the tasks that its token reads over HTTP, and no others.
Rule 2: the ids of private mailboxes are never shown.
Rule 3: figures of a queue are counters. A list reads a bounded number of records, however many are stored.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from postroom.calls.fields import Cursor, Text
from postroom.contracts.tasks.task_views import TaskInfo
from postroom.core.gate import permit, visible_org
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import unscoped
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations
from postroom.engine.inspection import SEARCHED_BYTES_MAX, accepted_at, newest_first
from postroom.message import Event, Record, State, Stored
from postroom.page.messages import (
    LINES_DEFAULT,
    PageSize,
    read,
    shown_error,
    shown_event,
)
from postroom.page.redaction import shown_by, shown_json, shown_name, shown_text, shown_texts
from postroom.server.access.task_names import cursor_of, place_of, readable_queues, shown_id, shown_task
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.nats.mail_status import read_status
from postroom.server.routes.agent_handlers import shown_to
from postroom.server.routes.task_handlers import read_queue, readable_task
from postroom.stores.base import by_state, ready
from postroom.stores.own_ids import OwnIds
from postroom.stores.transaction import Transaction

AGENTS_LISTED_MAX: Final = 1_000
REGISTERED_LISTED_MAX: Final = 1_000
QUEUES_DEFAULT: Final = 100
MICROS_PER_S: Final = 1_000_000
ERROR_CHARS_SHOWN: Final = 200
"""How much of an error a line of the list has. The view of the task has all of it."""
PLAIN_FIELDS: Final = (
    "task_id", "agent", "state", "attempt", "retry_count", "max_retries", "sender", "created_at",
    "claimed_at", "last_heartbeat", "lease_ends_at", "completed_at",
)  # fmt: skip
"""Fields of a task that are addresses, or that postroom writes itself."""

_encode = msgspec.json.Encoder().encode


class TaskQueuesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/tasks`: `after` is the name of the last agent of the previous page."""

    after: Text = ""
    limit: PageSize = QUEUES_DEFAULT


class TasksQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/agents/{agent}/tasks`: the newest first. `cursor` is that of the previous page."""

    state: State | UnsetType = UNSET
    cursor: Cursor = ""
    limit: PageSize = LINES_DEFAULT


class QueueRow(msgspec.Struct, frozen=True):
    """The tasks of one agent in numbers."""

    agent: str
    states: dict[str, int]
    lapses: int
    """Leases that ran out since the queue was created."""
    oldest_age_s: float | None
    """How long the next task has been ready; None when none is."""


class TaskRow(msgspec.Struct, frozen=True):
    """A task in the list of its agent."""

    task_id: str
    state: str
    type: str
    age_s: float
    """Since it was enqueued."""
    created_at: datetime
    worker: str
    """Who holds the lease; empty when nobody does."""
    attempt: int
    error_type: str
    error: str
    """The beginning of the last error."""


class TaskRows(msgspec.Struct, frozen=True):
    """A page of the list."""

    tasks: list[TaskRow]
    cursor: str
    """Cursor of the next page; empty on the last page."""
    reached: datetime | None = None
    """The time up to which the list was searched; None at its end."""


# ---- agents ----------------------------------------------------------------------------------------


async def agents(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The agents that the caller sees. Operators of all organizations also see mailboxes and tokens."""
    identity, policy = request.identity, server.engine.policy
    scope = visible_org(identity)
    found: list[AgentInfo] = []
    if scope != "":
        found = await read(
            server,
            request,
            lambda operations: AgentOperations(operations.transaction, policy).list(scope),
        )
    answer: dict[str, Any] = {
        "agents": [shown_to(identity, info) for info in found[:AGENTS_LISTED_MAX]],
        "mail": None,
        "registered": [],
    }
    if permit(identity, "server.measure"):
        mail = await asyncio.to_thread(read_status, server.agents.data / "mail")
        answer["mail"] = await server.read_for(
            request, lambda: shown_texts(request, msgspec.to_builtins(mail))
        )
        answer["registered"] = [
            {"name": one.name, "role": one.role, "org_id": one.org}
            for one in server.agents.list()[:REGISTERED_LISTED_MAX]
        ]
    return HttpReply(200, _encode(answer))


# ---- the queues ------------------------------------------------------------------------------------


async def queues(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The queues that the caller reads, by name. `after` is the last name of the previous page."""
    query: TaskQueuesQuery = request.call
    identity = request.identity

    def work(transaction: Transaction) -> tuple[list[QueueRow], str]:
        stored = {
            unscoped(identity.org, queue): queue
            for queue in readable_queues(transaction, server.agents, identity)
        }
        names = sorted(stored)
        start = bisect_right(names, query.after)
        page = names[start : start + query.limit]
        is_last = start + query.limit >= len(names)
        rows = []
        for name in page:
            counts = transaction.lanes.depth(stored[name])
            states: dict[str, int] = {what: n for what, n in by_state(counts).items() if what != "LAPSES"}
            oldest_ns = transaction.oldest_ns(stored[name]) if ready(counts) else None
            oldest_s = None if oldest_ns is None else round(oldest_ns / NANOS_PER_S, 1)
            rows.append(QueueRow(name, states, counts.get("LAPSES", 0), oldest_s))
        return rows, "" if is_last else page[-1]

    found, after = await server.read_for(request, lambda: server.tasks.store.read(work))
    return HttpReply(200, _encode({"queues": found, "after": after}))


# ---- the tasks of one agent ------------------------------------------------------------------------


async def find(server: TaskServer, request: HttpRequest) -> HttpReply:
    query: TasksQuery = request.call
    begin = place_of(server.ids, query.cursor)
    queue = await read_queue(server, request, request.path_param("agent"))

    def work(transaction: Transaction) -> tuple[list[tuple[Stored, float]], int, datetime | None]:
        return newest_tasks(transaction, queue, query, begin)

    found, before, reached = await server.read_for(request, lambda: server.tasks.store.read(work))

    def shown() -> TaskRows:
        lines = [_shown_line(request, server.ids, stored, age_s) for stored, age_s in found]
        return TaskRows(lines, cursor_of(server.ids, before), reached)

    return await shown_by(server, request, shown)


def newest_tasks(
    transaction: Transaction, queue: str, query: TasksQuery, before: int
) -> tuple[list[tuple[Stored, float]], int, datetime | None]:
    """The newest tasks of a queue with their ages, the number where the next page begins, and the time.

    Payloads are left out, and the list ends once `SEARCHED_BYTES_MAX` of them were read.
    """
    state: State | None = None if query.state is UNSET else query.state
    found: list[tuple[Stored, float]] = []
    last: Record | None = None
    size = 0
    for record in newest_first(transaction, queue, state, before, query.limit):
        if isinstance(record, int):  # the numbers that one call may walk are used up
            return found, record, None if last is None else accepted_at(last)
        last = record
        stored = transaction.records.load(record.message_id)
        if stored is not None:
            size += len(stored.envelope.payload)
            age_s = (transaction.wall_us - record.created_us) / MICROS_PER_S
            found.append((replace(stored, envelope=replace(stored.envelope, payload=b"")), age_s))
        if len(found) == query.limit or size >= SEARCHED_BYTES_MAX:
            return found, record.seq, accepted_at(record)
    return found, 0, None


def _shown_line(request: HttpRequest, ids: OwnIds, stored: Stored, age_s: float) -> TaskRow:
    record = stored.record
    failures = _failures(stored.history)
    error_type, error = (failures[-1].error_type, failures[-1].error) if failures else ("", "")
    text = shown_text(request, error)
    return TaskRow(
        task_id=shown_id(ids, request.identity.org, record.message_id),
        state=record.state,
        type=shown_name(request, stored.envelope.type),
        age_s=round(max(0.0, age_s), 1),
        created_at=accepted_at(record),
        worker=shown_name(request, record.worker_id) if record.state == "PROCESSING" else "",
        attempt=record.attempt,
        error_type=shown_name(request, error_type),
        error=text if len(text) <= ERROR_CHARS_SHOWN else text[:ERROR_CHARS_SHOWN] + "…",
    )


def _failures(history: Sequence[Event]) -> list[Event]:
    """The events with an error. A dead letter repeats the error before it."""
    return [event for event in history if event.error and event.kind != "dead_letter"]


# ---- one task --------------------------------------------------------------------------------------


async def show(server: TaskServer, request: HttpRequest) -> HttpReply:
    task = shown_task(server.ids, request.identity, await readable_task(server, request))
    return await shown_by(server, request, lambda: _shown(request, task))


def _shown(request: HttpRequest, task: TaskInfo) -> dict[str, Any]:
    """A task for the page: everything that others wrote is redacted text."""
    return {
        **{name: getattr(task, name) for name in PLAIN_FIELDS},
        "worker": shown_name(request, task.worker),
        "type": shown_name(request, task.type),
        "parent": shown_name(request, task.parent),
        "idempotency_key": shown_text(request, task.idempotency_key),
        "payload": shown_json(request, task.payload),
        "result": None if task.result is None else shown_json(request, task.result),
        "history": [shown_event(request, event) for event in task.history],
        "errors": [
            shown_error(request, event.attempt, event.error_type, event.error)
            for event in _failures(task.history)
        ],
    }
