"""The handlers of the task routes.

Rule 1: the token alone decides which agent a request acts for. A body that names another agent is refused.
Rule 2: a task of another agent is answered like a task that does not exist.
Rule 3: writes go to the writer thread, reads to reader threads. No handler blocks the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import msgspec
from msgspec.structs import replace

from postroom.calls.tasks import (
    ClaimedTask,
    ClaimedTasks,
    Complete,
    CompletedAnswer,
    Enqueue,
    EnqueueMany,
    Fail,
    FindTasks,
    Holder,
    NewTaskAnswer,
    NewTasksAnswer,
    Next,
    Result,
    ShowTask,
    TaskAnswer,
)
from postroom.contracts.tasks import task_operations, task_storage
from postroom.contracts.tasks.task_input import checked_id, checked_results
from postroom.contracts.tasks.task_operations import DECISIONS, LeasedTask, TaskOperations, holds_decisions
from postroom.contracts.tasks.task_views import (
    AgentStatus,
    TaskInfo,
    agents_status,
    loaded_task,
    task_info,
    totals,
)
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.formats.jsoninput import raw_value
from postroom.core.gate import Owner, permit
from postroom.core.lifecycle import lifecycle
from postroom.core.names import split_scoped, unscoped
from postroom.errors import InvalidMessage, PostroomError, StaleLease, UnknownTask
from postroom.message import ENGINE_PREFIX, Record, State, Stored
from postroom.server.access.task_names import (
    is_lease,
    known_target,
    new_tasks,
    own_queue,
    queue_owner,
    readable_queues,
    shown_id,
    shown_line,
    shown_task,
    stored_id,
    stored_place,
    target_of,
)
from postroom.server.http.exchange import (
    NO_CONTENT,
    ClientDisconnected,
    HttpReply,
    HttpRequest,
    Refusal,
    check_allowed,
    disconnection,
)
from postroom.server.http.task_server import TaskServer
from postroom.server.http.writer import TASK_BYTES
from postroom.server.routes.answers import LinesAnswer, StatusAnswer
from postroom.stores.transaction import Claim, Transaction

SETTLED = ("failed", "released")  # events of calls that end a delivery
SEVERAL = "several agents"  # the destination of a batch, in telemetry

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_COMPLETED: frozenset[State] = frozenset({"COMPLETED", "EXECUTING", "DONE"})


# ---- lease holders ---------------------------------------------------------------------------------


async def claim(server: TaskServer, request: HttpRequest) -> ClaimedTask | ClaimedTasks | HttpReply:
    call: Next = request.call
    agent = await _named_queue(server, request)
    if agent is None:
        raise InvalidMessage("an operator has to name the agent whose tasks it claims")
    lease_s = min(call.lease_s, server.lease_s_max)
    terms = server.claim_terms(agent, call.limit, lease_s, call.worker)
    started_ns = time.time_ns()
    if call.wait_s:
        claimed = await _long_poll(server, request, terms, call.wait_s)
    else:
        claimed = await server.writer.submit(terms, request.identity)
    if not claimed:
        return NO_CONTENT
    server.wake_streams()
    _log_claims(server, claimed)
    if server.task_spans is not None:
        server.task_spans.note("receive", agent, [task.task_id for task in claimed], started_ns)
    answers = [_claimed_task(server, request, task) for task in claimed]
    return answers[0] if call.limit == 1 else ClaimedTasks(answers)


async def _long_poll(
    server: TaskServer, request: HttpRequest, terms: Claim, wait_s: float
) -> list[LeasedTask]:
    """Wait for tasks. Tasks claimed for a client that has left, or for an ended token, are released."""
    async with poll_share(server, request) as left:
        claimed = await server.long_polls.claim(terms, request.identity, wait_s, left)
        if left.done() or not is_valid(server, request):
            for task in claimed:
                release = partial(TaskOperations.release, task_id=task.task_id, lease=task.lease)
                with suppress(PostroomError):
                    await server.writer.submit(release, request.identity, makes_room=True)
        return claimed


@asynccontextmanager
async def poll_share(server: TaskServer, request: HttpRequest) -> AsyncIterator["asyncio.Future[None]"]:
    """Count a long poll in the caller's share. Gives a future that is done when its client has left.

    So it is when its token has ended, which is refused.
    """
    server.poll_share.take(request.identity)
    disconnected = asyncio.ensure_future(disconnection(request))
    try:
        with server.open_calls.joined(lambda: is_valid(server, request)) as left:
            disconnected.add_done_callback(lambda _: None if left.done() else left.set_result(None))
            yield left
        if disconnected.done():
            raise ClientDisconnected
        if not is_valid(server, request):
            raise Refusal(401, "Unauthorized", "the token has expired or was revoked")
    finally:
        server.poll_share.give_back(request.identity)
        disconnected.cancel()


def is_valid(server: TaskServer, request: HttpRequest) -> bool:
    """Whether the token of a request is still valid. A call of a part of this process has no token."""
    return not request.token or server.agents.identify(request.token) is not None


def _log_claims(server: TaskServer, claimed: list[LeasedTask]) -> None:
    if claimed:  # all leases of a claim have the same length
        server.harness.lease_given(claimed[0].lease_s)
    for task in claimed:
        server.server_log.write("claimed", task_id=task.task_id, agent=task.agent, attempt=task.attempt)


def _claimed_task(server: TaskServer, request: HttpRequest, task: LeasedTask) -> ClaimedTask:
    ids, org = server.ids, request.identity.org
    lease = ids.fence(task.attempt, task.lease)
    task_id, parent = shown_id(ids, org, task.task_id), shown_id(ids, org, task.parent)
    return ClaimedTask(task_id, task.payload, lease, task.attempt, task.lease_s, task.type, parent)


async def complete(server: TaskServer, request: HttpRequest) -> CompletedAnswer:
    call: Complete = request.call
    owners, org = await _owners(server, request), request.identity.org

    def work(operations: TaskOperations) -> tuple[str, bool, list[LeasedTask]]:
        """The id in the store, whether the task was completed before, and the tasks claimed next."""
        with _under_lease(operations, call, owners, org) as (record, lease):
            if holds_decisions(record.queue):
                operations.settle(record.message_id, lease)
                return record.message_id, False, []
            results = checked_results([(record.message_id, lease, call.decision)])
            is_repeated = record.lease == lease and record.state in _COMPLETED
            # A repeated call claims nothing: if it is refused below, its tasks would reach no worker.
            claimed = operations.complete(results, 0 if is_repeated else call.claim_next, raw_value)
            return record.message_id, is_repeated, claimed

    size = TASK_BYTES * (1 + call.claim_next) + request.size
    started_ns = time.time_ns()
    task_id, is_repeated, claimed = await server.writer.submit(work, request.identity, size, makes_room=True)
    if is_repeated:  # the first result may be part of the same commit, so it is read after the commit
        await server.read_for(request, lambda: _check_same_decision(server.tasks, task_id, call))
    server.harness.wake()
    _log_claims(server, claimed)
    _log_change(server, request, "completed", task_id)
    if server.task_spans is not None:
        server.task_spans.note("settle", request.identity.name, [task_id], started_ns)
    return CompletedAnswer(call.task_id, [_claimed_task(server, request, task) for task in claimed])


def _check_same_decision(tasks: Tasks, task_id: str, body: Complete) -> None:
    """Accept a repeated `complete` with the same decision, and refuse one with another decision."""
    try:
        info = tasks.get(task_id)
    except UnknownTask:  # it was purged meanwhile
        raise UnknownTask(body.task_id) from None
    if _encode_sorted(info.result) != _encode_sorted(body.decision):
        raise Refusal(409, "WrongState", f"task {body.task_id!r} was completed before with another decision")


async def heartbeat(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    return await _holder_call(server, request, "heartbeat", TaskOperations.heartbeat)


async def fail(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    call: Fail = request.call
    return await _holder_call(
        server,
        request,
        "failed",
        lambda operations, task_id, lease: operations.fail(task_id, lease, call.error, call.retry_in_s),
    )


async def release(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    return await _holder_call(server, request, "released", TaskOperations.release)


async def _holder_call(
    server: TaskServer, request: HttpRequest, event: str, change: Callable[[TaskOperations, str, int], None]
) -> TaskAnswer:
    """Change a task that has to belong to the caller's agent."""
    body, owners, org = request.call, await _owners(server, request), request.identity.org

    def work(operations: TaskOperations) -> str:
        with _under_lease(operations, body, owners, org) as (record, lease):
            change(operations, record.message_id, lease)
            return record.message_id

    return await _commit(server, request, event, body.task_id, work, makes_room=True)


@contextmanager
def _under_lease(
    operations: TaskOperations, body: Holder, owners: Sequence[str] | None, org: str
) -> Iterator[tuple[Record, int]]:
    """The record of a task that the caller holds, and its lease as the store knows it."""
    record = operations.transaction.records.get(
        stored_id(operations.transaction, org, checked_id(body.task_id))
    )
    if record is None or not _is_own_task(record, owners):
        raise UnknownTask(body.task_id)
    if not is_lease(operations.transaction.ids, org, record, body.lease):
        raise lifecycle.stale(record, body.lease)
    try:
        yield record, abs(record.lease)
    except StaleLease:
        raise lifecycle.stale(record, body.lease) from None


async def _commit(
    server: TaskServer,
    request: HttpRequest,
    event: str,
    task_id: str,
    work: Callable[[TaskOperations], str | None],
    *,
    makes_room: bool,
) -> TaskAnswer:
    """Commit a change of a task. `work` may return the id that the store has it under."""
    size = TASK_BYTES + request.size
    started_ns = time.time_ns()
    stored = await server.writer.submit(work, request.identity, size, makes_room=makes_room) or task_id
    _log_change(server, request, event, stored)
    if server.task_spans is not None and event in SETTLED:
        server.task_spans.note("settle", request.identity.name, [stored], started_ns)
    return TaskAnswer(task_id)


def _log_change(server: TaskServer, request: HttpRequest, event: str, task_id: str) -> None:
    server.wake_streams()
    server.server_log.write(event, task_id=task_id, agent=request.identity.name)


async def result(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    """Wake the harness, which looks for the result itself."""
    call: Result = request.call
    owners, org = await _owners(server, request), request.identity.org
    await server.read_for(request, lambda: _check_owner(server.tasks, call.task_id, owners, org))
    server.harness.wake()
    return TaskAnswer(call.task_id)


# ---- senders and operators -------------------------------------------------------------------------


async def enqueue(server: TaskServer, request: HttpRequest) -> NewTaskAnswer | NewTasksAnswer:
    is_batch = isinstance(request.call, EnqueueMany)
    new: list[Enqueue] = request.call.tasks if is_batch else [request.call]
    identity, agents = request.identity, {task.agent for task in new}
    sender = own_queue(server.agents, identity) or ""
    if sender:
        for agent in sorted(agents):
            check_allowed(identity, "task.enqueue", Owner(identity.org, agent))
    queues = await _targets(server, request, agents)
    warning = _unknown_warning(server, {queues[agent] for agent in agents} - {sender})
    server.tasks.check_backlog()
    tasks = [
        task_operations.NewTask(
            **{**msgspec.structs.asdict(task), "agent": queues[task.agent]}, sender=sender
        )
        for task in new
    ]
    started_ns = time.time_ns()

    def work(operations: TaskOperations) -> list[str]:
        for queue in queues.values():
            if owner := server.agents.owner_of(queue):
                task_storage.own(operations.transaction, queue, owner)
        named = new_tasks(operations.transaction, server.agents, identity, tasks)
        return operations.enqueue(named)

    size = TASK_BYTES * len(new) + request.size
    task_ids: list[str] = await server.writer.submit(work, request.identity, size)
    server.wake_streams()
    for added, task_id in zip(tasks, task_ids, strict=True):
        server.server_log.write("enqueued", task_id=task_id, agent=added.agent)
    if server.task_spans is not None:
        queue = tasks[0].agent if len(agents) == 1 else SEVERAL
        server.task_spans.note("send", queue, task_ids, started_ns)
    task_ids = [shown_id(server.ids, request.identity.org, task_id) for task_id in task_ids]
    return NewTasksAnswer(task_ids, warning) if is_batch else NewTaskAnswer(task_ids[0], warning)


async def _targets(server: TaskServer, request: HttpRequest, agents: set[str]) -> dict[str, str]:
    """The queues that get the tasks for these agents."""
    identity = request.identity

    known = {agent: known_target(server.agents, identity, agent) for agent in agents}
    found = {agent: queue for agent, queue in known.items() if queue is not None}
    left = known.keys() - found.keys()

    def work(transaction: Transaction) -> dict[str, str]:
        return {agent: target_of(transaction, server.agents, identity, agent) for agent in left}

    if left:
        found |= await server.read_for(request, lambda: server.tasks.store.read(work))
    return found


def _unknown_warning(server: TaskServer, queues: set[str]) -> str:
    """A warning that names agents without a token, which cannot claim their tasks here; else empty."""
    missing = sorted(split_scoped(queue)[1] for queue in queues if not server.agents.knows(queue))
    return f"no token is for the agent {', '.join(map(repr, missing))}: check the name" if missing else ""


async def cancel(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    task_id = server.ids.uncover_id(request.call.task_id)
    return await _commit(
        server, request, "cancelled", task_id, lambda operations: operations.cancel(task_id), makes_room=True
    )


async def retry(server: TaskServer, request: HttpRequest) -> TaskAnswer:
    task_id = server.ids.uncover_id(request.call.task_id)
    return await _commit(
        server, request, "retried", task_id, lambda operations: operations.retry(task_id), makes_room=False
    )


# ---- reads -----------------------------------------------------------------------------------------


async def show(server: TaskServer, request: HttpRequest) -> TaskInfo:
    call: ShowTask = request.call
    info = await readable_task(server, request)
    if call.wait_s and not info.ended:
        async with poll_share(server, request) as left:
            await server.result_polls.wait(info.task_id, call.wait_s, left)
        info = await readable_task(server, request)
    return shown_task(server.ids, request.identity, info)


async def readable_task(server: TaskServer, request: HttpRequest) -> TaskInfo:
    """Read a task for its agent, its sender or an operator. It is unknown to other callers.

    Its names are those in the store. Its payload and its result stay JSON.
    """
    asked, identity = checked_id(request.path_param("id")), request.identity

    def work(transaction: Transaction) -> Stored:
        task_id = stored_id(transaction, identity.org, asked)
        record = transaction.records.get(task_id)
        if record is None or record.queue.startswith(ENGINE_PREFIX):
            raise UnknownTask(asked)
        if not permit(
            identity, "task.read", queue_owner(server.agents, identity, record.queue, record.sender)
        ):
            raise UnknownTask(asked)
        return loaded_task(transaction, task_id)

    info = await server.read_for(request, lambda: task_info(server.tasks.store.read(work), raw_value))
    return replace(info, history=[*map(server.ids.shown, info.history)])


async def find(server: TaskServer, request: HttpRequest) -> LinesAnswer:
    call: FindTasks = request.call
    agent = call.agent or (None if request.identity.is_operator else request.identity.name)
    if agent is not None:
        agent = await read_queue(server, request, agent)
    state, after = call.state or None, stored_place(server.ids, request.identity.org, call.after)
    lines = await server.read_for(
        request, lambda: server.tasks.find(agent=agent, state=state, after=after, limit=call.limit)
    )
    shown = [shown_line(server.ids, request.identity, line) for line in lines]
    return LinesAnswer(shown)


async def status(server: TaskServer, request: HttpRequest) -> StatusAnswer:
    identity = request.identity
    if identity.is_operator:
        found = await server.read_for(request, server.tasks.status)
        return StatusAnswer(found.agents, found.totals, server.harness.status())

    def read(transaction: Transaction) -> dict[str, AgentStatus]:
        found = agents_status(transaction, readable_queues(transaction, server.agents, identity))
        return {unscoped(identity.org, queue): status for queue, status in found.items()}

    own = await server.read_for(request, lambda: server.tasks.store.read(read))
    return StatusAnswer(own, totals(own.values()))


# ---- ownership -------------------------------------------------------------------------------------


async def read_queue(server: TaskServer, request: HttpRequest, agent: str) -> str:
    """The queue of an agent whose tasks the caller may read."""
    check_allowed(request.identity, "task.list", Owner(request.identity.org, agent))
    return await _queue(server, request, agent)


async def _queue(server: TaskServer, request: HttpRequest, agent: str) -> str:
    """The queue that the caller means by the name of an agent."""
    if request.identity.org:
        return server.agents.queue_of(request.identity.org, agent)
    return (await _targets(server, request, {agent}))[agent] if request.identity.is_operator else agent


def _named_agent(request: HttpRequest) -> str | None:
    """The agent that a request acts for, which the token decides. An operator may name one, or mean any."""
    identity, body = request.identity, request.call
    if identity.is_operator:
        return str(body.agent) if body.agent is not None else None
    agent = identity.name if body.agent is None else str(body.agent)
    if agent == DECISIONS:
        raise InvalidMessage(f"only the harness and operators of all organizations claim from {DECISIONS}")
    check_allowed(identity, "task.claim", Owner(identity.org, agent))
    if body.agent_url not in (None, identity.name, identity.url):
        raise Refusal(
            403, "Forbidden", f"this is the token of {identity.name}, which does not act for {agent!r}"
        )
    return agent


async def _named_queue(server: TaskServer, request: HttpRequest) -> str | None:
    """The queue of the agent that a request acts for; None when an operator names none."""
    agent = _named_agent(request)
    return None if agent is None else await _queue(server, request, agent)


async def _owners(server: TaskServer, request: HttpRequest) -> Sequence[str] | None:
    """The queues whose tasks a request may end; None for all."""
    identity, named = request.identity, await _named_queue(server, request)
    if request.call.agent is None and not identity.is_operator:
        names = (identity.name, *identity.permissions.may_claim)
        return [server.agents.queue_of(identity.org, name) for name in names]
    return None if named is None else (named,)


def _check_owner(tasks: Tasks, task_id: str, owners: Sequence[str] | None, org: str) -> None:
    def work(transaction: Transaction) -> bool:
        record = transaction.records.get(stored_id(transaction, org, checked_id(task_id)))
        return record is not None and _is_own_task(record, owners)

    if not tasks.store.read(work):
        raise UnknownTask(task_id)


def _is_own_task(record: Record, owners: Sequence[str] | None) -> bool:
    return not record.queue.startswith(ENGINE_PREFIX) and (owners is None or record.queue in owners)
