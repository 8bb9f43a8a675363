"""The views of tasks: the queues of agents, the newest tasks of one agent, and one task with its life.

Rule 1: a caller sees the tasks that its token reads over HTTP, and no others.
Rule 2: figures of a queue are counters. A list reads a bounded number of records, however many are stored.
"""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from postroom.contracts.tasks.task_views import TaskInfo
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import unscoped
from postroom.message import Event, Record, State, Stored
from postroom.page.messages import accepted_at, newest_first, place_of, shown_event, shown_place
from postroom.page.redaction import shown_by, shown_json, shown_name, shown_text
from postroom.page.schemas import TaskQueuesQuery, TasksQuery
from postroom.server.access.task_names import readable_queues, shown_id, shown_task
from postroom.server.http.messages import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.engine_handlers import SEARCHED_BYTES_MAX
from postroom.server.routes.task_handlers import read_queue, readable_task
from postroom.stores.base import by_state, ready
from postroom.stores.own_ids import OwnIds
from postroom.stores.transaction import Transaction

MICROS_PER_S: Final = 1_000_000
ERROR_CHARS_SHOWN: Final = 200
"""How much of an error a line of the list has. The view of the task has all of it."""
PLAIN_FIELDS: Final = (
    "task_id", "agent", "state", "attempt", "retry_count", "max_retries", "sender", "created_at",
    "claimed_at", "last_heartbeat", "lease_ends_at", "completed_at",
)  # fmt: skip
"""Fields of a task that are addresses, or that postroom writes itself."""

_encode = msgspec.json.Encoder().encode


class QueueLine(msgspec.Struct, frozen=True):
    """The tasks of one agent in numbers."""

    agent: str
    states: dict[str, int]
    lapses: int
    """Leases that ran out since the queue was created."""
    oldest_age_s: float | None
    """How long the next task has been ready; None when none is."""


class Line(msgspec.Struct, frozen=True):
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


class Lines(msgspec.Struct, frozen=True):
    """A page of the list. `before` is the cursor of the next page; 0 at the end."""

    tasks: list[Line]
    before: int
    reached: datetime | None = None
    """The time up to which the list was searched; None at its end."""


# ---- the queues ------------------------------------------------------------------------------------


async def queues(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The queues that the caller reads, by name. `after` is the last name of the previous page."""
    query: TaskQueuesQuery = request.call
    identity = request.identity

    def work(transaction: Transaction) -> tuple[list[QueueLine], str]:
        stored = {
            unscoped(identity.org, queue): queue
            for queue in readable_queues(transaction, server.agents, identity)
        }
        names = sorted(stored)
        start = bisect_right(names, query.after)
        page = names[start : start + query.limit]
        is_last = start + query.limit >= len(names)
        return [_queue_line(transaction, name, stored[name]) for name in page], "" if is_last else page[-1]

    found, after = await server.read_for(request, lambda: server.tasks.store.read(work))
    return HttpReply(200, _encode({"queues": found, "after": after}))


def _queue_line(transaction: Transaction, agent: str, queue: str) -> QueueLine:
    counts = transaction.depth(queue)
    states: dict[str, int] = {what: n for what, n in by_state(counts).items() if what != "LAPSES"}
    oldest_ns = transaction.oldest_ns(queue) if ready(counts) else None
    oldest_s = None if oldest_ns is None else round(oldest_ns / NANOS_PER_S, 1)
    return QueueLine(agent, states, counts.get("LAPSES", 0), oldest_s)


# ---- the tasks of one agent ------------------------------------------------------------------------


async def find(server: TaskServer, request: HttpRequest) -> HttpReply:
    query: TasksQuery = replace(request.call, before=place_of(server.ids, request.call.before))
    queue = await read_queue(server, request, request.path_param("agent"))

    def work(transaction: Transaction) -> tuple[list[tuple[Stored, float]], int, datetime | None]:
        return newest_tasks(transaction, queue, query)

    found, before, reached = await server.read_for(request, lambda: server.tasks.store.read(work))

    def shown() -> Lines:
        lines = [_shown_line(request, server.ids, stored, age_s) for stored, age_s in found]
        return Lines(lines, shown_place(server.ids, before), reached)

    return await shown_by(server, request, shown)


def newest_tasks(
    transaction: Transaction, queue: str, query: TasksQuery
) -> tuple[list[tuple[Stored, float]], int, datetime | None]:
    """The newest tasks of a queue with their ages, the cursor behind them, and the time it has reached.

    They are without their payloads. The list ends after `SEARCHED_BYTES_MAX` of these.
    """
    state: State | None = None if query.state is UNSET else query.state
    found: list[tuple[Stored, float]] = []
    last: Record | None = None
    size = 0
    for record in newest_first(transaction, queue, state, query.before, query.limit):
        if isinstance(record, int):  # the numbers that one call may walk are used up
            return found, record, None if last is None else accepted_at(last)
        last = record
        stored = transaction.load(record.message_id)
        if stored is not None:
            size += len(stored.envelope.payload)
            age_s = (transaction.wall_us - record.created_us) / MICROS_PER_S
            found.append((replace(stored, envelope=replace(stored.envelope, payload=b"")), age_s))
        if len(found) == query.limit or size >= SEARCHED_BYTES_MAX:
            return found, record.seq, accepted_at(record)
    return found, 0, None


def _shown_line(request: HttpRequest, ids: OwnIds, stored: Stored, age_s: float) -> Line:
    record = stored.record
    failures = _failures(stored.history)
    error_type, error = (failures[-1].error_type, failures[-1].error) if failures else ("", "")
    return Line(
        task_id=shown_id(ids, request.identity.org, record.message_id),
        state=record.state,
        type=shown_name(request, stored.envelope.type),
        age_s=round(max(0.0, age_s), 1),
        created_at=accepted_at(record),
        worker=shown_name(request, record.worker_id) if record.state == "PROCESSING" else "",
        attempt=record.attempt,
        error_type=shown_name(request, error_type),
        error=_beginning(shown_text(request, error)),
    )


def _failures(history: Sequence[Event]) -> list[Event]:
    """The events with an error. A dead letter repeats the error before it."""
    return [event for event in history if event.error and event.kind != "dead_letter"]


def _beginning(text: str) -> str:
    return text if len(text) <= ERROR_CHARS_SHOWN else text[:ERROR_CHARS_SHOWN] + "…"


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
            {
                "attempt": event.attempt,
                "error_type": shown_name(request, event.error_type),
                "error": shown_text(request, event.error),
            }
            for event in _failures(task.history)
        ],
    }
