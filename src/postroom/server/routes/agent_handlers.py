"""Handlers of the HTTP routes for agents: registration, requests, event streams, inboxes and bounces.

Rule 1: the token alone decides which agent a call is for. Another agent is answered like an unknown one.
Rule 2: a call without a session uses the newest registration of the agent, and registers an agent that is
        unknown or dead. A call with an older session is refused.
Rule 3: every call is a heartbeat. A call that stays open sends more of them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from postroom.calls.agents import (
    Ack,
    AgentAnswer,
    AgentQuery,
    BeatAnswer,
    BouncesDone,
    BouncesDoneAnswer,
    InboxAnswer,
    InboxDone,
    InboxLine,
    ListAgents,
    ListBounces,
    ReadInbox,
    Register,
    RegisteredAnswer,
    Send,
)
from postroom.calls.messages import MessageAnswer, MessagesAnswer, ReadReceipts, Request, RequestAnswer
from postroom.contracts.tasks.task_input import checked_id
from postroom.contracts.tasks.task_operations import TaskOperations
from postroom.core.gate import Owner, of_organization, permit, visible_org
from postroom.core.lifecycle import lifecycle
from postroom.core.names import scoped, unscoped
from postroom.engine.agents.agent import Agent
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations, Asked
from postroom.engine.agents.answer_parts import Position, whole_answer
from postroom.engine.agents.bounces import BouncedAnswer, listed, removed
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.messages import error_history
from postroom.engine.rules.cells import joined
from postroom.engine.rules.operations import Operations
from postroom.errors import (
    AgentReplaced,
    GuardTripped,
    MessageFailed,
    Overloaded,
    PostroomError,
)
from postroom.server.access.registry import Identity
from postroom.server.http.endpoint import send_reply
from postroom.server.http.exchange import HttpReply, HttpRequest, Refusal, check_allowed
from postroom.server.http.task_server import TaskServer
from postroom.server.http.writer import TASK_BYTES
from postroom.server.routes.agent_presence import heard
from postroom.server.routes.answers import AgentsAnswer, BouncesAnswer
from postroom.server.routes.engine_handlers import (
    attributed,
    check_attribution,
    given_fields,
    prepared_if_long,
    visible,
)
from postroom.server.routes.event_streams import STREAM_PAGE_BYTES_MAX, EventStream, sse
from postroom.server.routes.task_handlers import poll_share

T = TypeVar("T")

PARTS_POLL_S = 0.1

_encode = msgspec.json.Encoder().encode


# ---- who acts --------------------------------------------------------------------------------------


def _own(request: HttpRequest) -> tuple[str, str]:
    """The organization and the agent of the token. The path names the same agent."""
    return request.identity.org, request.identity.name


def _session(request: HttpRequest) -> int | None:
    call: AgentQuery = request.call
    return None if call.session is msgspec.UNSET else call.session


async def _agent(server: TaskServer, org_id: str, agent_id: str, session: int | None) -> Agent:
    """An agent under its newest registration; it is heard of by this."""
    coordinator = await server.coordinator()

    def adopt(agents: AgentOperations) -> int:
        entry = agents.entry(org_id, agent_id)
        if session is not None and (entry is None or entry.session != session):
            raise AgentReplaced(agent_id)
        if entry is None:
            entry = agents.register(org_id, agent_id, coordinator.id, is_local=False)
        else:
            agents.beat(org_id, agent_id, entry.session, coordinator.id)
        return entry.session

    known = coordinator.served(org_id, agent_id)
    is_known = known is not None and session in (None, known.session) and not server.is_beat_due(known)
    # Without a session the newest registration counts, which may have been made at another server.
    if known is not None and is_known:
        is_newest = session is not None or await coordinator.read(
            lambda agents: agents.is_held(known.org_id, known.agent_id, known.session)
        )
        if is_newest:
            return known
    found = await coordinator.write(adopt)
    agent = await coordinator.attach(agent_id, org_id, found)
    server.note_beat(agent)
    return agent


async def register(server: TaskServer, request: HttpRequest) -> RegisteredAnswer:
    call: Register = request.call
    identity = request.identity
    if call.agent_id not in (None, identity.name):
        raise Refusal(403, "Forbidden", f"the token of {identity.name} cannot register another agent")
    coordinator = await server.coordinator()
    agent = await coordinator.register(identity.name, identity.org, is_local=False)
    server.note_beat(agent)
    server.server_log.write("registered", agent=identity.name, org=identity.org)
    return RegisteredAnswer(agent.org_id, agent.agent_id, agent.session, coordinator.epoch)


# ---- requests --------------------------------------------------------------------------------------


async def request_answer(server: TaskServer, request: HttpRequest) -> None:
    """Store a request and wait for its answer. The reply is sent before the answer is acknowledged."""
    call: Request = request.call
    [fields] = await server.decode_for(request.identity, partial(given_fields, call), request.raw)
    for name in ("timeout_s", "session"):
        fields.pop(name, None)
    message = attributed(request.identity, fields)
    server.tasks.check_backlog()
    identity, agent = request.identity, None
    if not identity.is_operator:
        agent = await _agent(server, identity.org, identity.name, call.session)
        message["agent_id"] = agent.agent_id
    message_id = await _submit(server, request, message, agent)
    if call.timeout_s:
        async with poll_share(server, request) as left:
            with heard(server, identity):
                await server.result_polls.wait(message_id, call.timeout_s, left)
    answer = await server.read_for(request, lambda: _read(server, partial(_answer, message_id)))
    if answer is None:
        shown = unscoped(identity.org, message_id)
        await send_reply(request.send, HttpReply(202, _encode(MessageAnswer(shown))))
        return
    if agent is not None:
        answer = msgspec.structs.replace(answer, epoch=agent.coordinator.epoch)
    answer = msgspec.structs.replace(answer, message_id=unscoped(identity.org, message_id))
    await send_reply(request.send, HttpReply(200, _encode(answer)))
    if agent is not None:
        with suppress(PostroomError):
            await _acknowledge(agent, [message_id])


async def _submit(
    server: TaskServer, request: HttpRequest, message: dict[str, Any], agent: Agent | None
) -> str:
    core = server.engine.core
    prepared = await prepared_if_long(server, request, [message])

    def work(task_operations: TaskOperations) -> str:
        transaction = task_operations.transaction
        prepared[:] = prepared or [core.registry.prepare(message, core.policy, transaction.wall_us)]
        check_attribution(request.identity, prepared[0])
        if agent is None:
            return Operations(transaction, core.policy).submit(prepared)[0].message_id
        agents = AgentOperations(transaction, core.policy)
        return agents.request(agent.agent_id, agent.session, prepared[0])[0]

    try:
        size = TASK_BYTES + request.size
        message_id: str = await server.writer.submit(work, request.identity, size)
    except (Overloaded, GuardTripped) as error:
        await core.submits.note_refusal(prepared[0], error)
        raise
    return message_id


def _answer(message_id: str, operations: Operations) -> RequestAnswer | None:
    """The whole answer to a message; None before its end."""
    stored = operations.loaded(message_id)
    if stored.record.state not in lifecycle.ENDED:
        return None
    try:
        result = whole_answer(operations, message_id)
    except MessageFailed:
        result = None
    return RequestAnswer(message_id, stored.record.state, result, error_history(stored))


async def _acknowledge(agent: Agent, message_ids: list[str]) -> list[str]:
    return await agent.coordinator.write(
        lambda agents: agents.acknowledge(agent.org_id, agent.agent_id, agent.session, message_ids)
    )


async def acknowledge(server: TaskServer, request: HttpRequest) -> MessagesAnswer:
    call: Ack = request.call
    agent = await _agent(server, *_own(request), call.session)
    org, named = agent.org_id, call.message_ids
    closed = await _acknowledge(agent, [*named, *(scoped(org, message_id) for message_id in named)])
    return MessagesAnswer([unscoped(org, message_id) for message_id in closed])


# ---- looking ---------------------------------------------------------------------------------------


async def agents(server: TaskServer, request: HttpRequest) -> AgentsAnswer:
    call: ListAgents = request.call
    identity = request.identity
    org_id = _organization(identity, "agent.list", None if call.org_id is msgspec.UNSET else call.org_id)
    found = await server.read_for(request, lambda: _read_agents(server, lambda one: one.list(org_id)))
    return AgentsAnswer([shown_to(identity, info) for info in found])


def shown_to(identity: Identity, info: AgentInfo) -> AgentInfo:
    """An agent sees what it waits for itself, and the health of the others."""
    if permit(identity, "agent.watch", Owner(info.org_id, info.agent_id)):
        return info
    return msgspec.structs.replace(info, waits_for=[], waited_for_by=[])


# ---- the stream of an agent --------------------------------------------------------------------------


class Reached(msgspec.Struct, frozen=True):
    """How far a stream has come in each open request."""

    is_begun: bool = False
    positions: tuple[tuple[str, Position], ...] = ()


async def stream(server: TaskServer, request: HttpRequest) -> None:
    """The parts of all open requests of an agent as they come.

    The first event, `open`, names the open requests. `closed` names one that ended without a part for this
    stream: it was acknowledged elsewhere, or it bounced.
    """
    agent = await _agent(server, *_own(request), _session(request))
    epoch = agent.coordinator.epoch

    def page(reached: Reached) -> tuple[bytes, Reached | None]:
        return _read_agents(server, lambda one: _stream_page(one, agent, reached, epoch))

    with heard(server, request.identity):
        run = partial(server.read_for, request)
        await EventStream(server, request, page, run, poll_s=PARTS_POLL_S).send(Reached())


def _stream_page(
    agents: AgentOperations, agent: Agent, reached: Reached, epoch: int
) -> tuple[bytes, Reached | None]:
    if not agents.is_held(agent.org_id, agent.agent_id, agent.session):
        return sse("", "replaced", _encode({"agent_id": agent.agent_id})), None
    open_requests = agents.open_requests(agent.org_id, agent.agent_id)
    data, before = bytearray(), dict(reached.positions)
    if not reached.is_begun:
        shown = [unscoped(agent.org_id, message_id) for message_id in open_requests]
        data += sse("", "open", _encode({"request_ids": shown}))
    for message_id in before.keys() - set(open_requests):
        if not before[message_id].is_end:
            data += sse("", "closed", _encode({"request_id": unscoped(agent.org_id, message_id)}))
    after = dict.fromkeys(open_requests, Position()) | {
        message_id: before[message_id] for message_id in open_requests if message_id in before
    }
    for message_id, position in after.items():
        if position.is_end or len(data) >= STREAM_PAGE_BYTES_MAX:
            continue
        asked = Asked(agent.org_id, agent.agent_id, agent.session, message_id, position)
        for at, part in agents.answers([asked])[0].parts:
            request_id = unscoped(agent.org_id, message_id)
            stamped = _encode(msgspec.structs.replace(part, epoch=epoch, request_id=request_id))
            data += sse(f"{request_id}/{at.text}", part.type, stamped)
            after[message_id] = at
    return bytes(data), Reached(is_begun=True, positions=tuple(after.items()))


async def beat(server: TaskServer, request: HttpRequest) -> BeatAnswer:
    """A heartbeat. It registers an agent that is unknown, and revives a dead one."""
    own = _own(request)
    coordinator = await server.coordinator()
    is_new = await coordinator.read(lambda agents: agents.entry(*own) is None)
    agent = await _agent(server, *own, _session(request))
    return BeatAnswer(agent.org_id, agent.agent_id, agent.session, is_new)


async def leave(server: TaskServer, request: HttpRequest) -> AgentAnswer:
    agent = await _agent(server, *_own(request), _session(request))
    await agent.leave()
    server.server_log.write("left", agent=agent.agent_id, org=agent.org_id)
    return AgentAnswer(agent.org_id, agent.agent_id)


# ---- messages between agents -------------------------------------------------------------------------


async def send(server: TaskServer, request: HttpRequest) -> MessageAnswer:
    call: Send = request.call
    check_allowed(request.identity, "agent.send", Owner(*_own(request)), call.to)
    agent = await _agent(server, *_own(request), call.session)
    fields: dict[str, Any] = {"priority": call.priority}
    if call.message_id is not None:
        fields["message_id"] = call.message_id
    sent = await agent.send(to=call.to, payload=call.payload, **fields)
    server.server_log.write("sent", agent=agent.agent_id, task_id=sent.message_id)
    return MessageAnswer(unscoped(agent.org_id, sent.message_id))


async def inbox(server: TaskServer, request: HttpRequest) -> InboxAnswer:
    """A page of the inbox. Its messages count as fetched, unless this is a peek."""
    call: ReadInbox = request.call
    agent = await _agent(server, *_own(request), _session(request))
    org = agent.org_id
    after = "" if call.after is msgspec.UNSET else call.after
    found = await agent.inbox().page(after, limit=call.limit, peek=call.peek)
    lines = [
        InboxLine(
            one.number, unscoped(org, one.message_id), one.sender, one.payload, one.is_bounce, one.reason
        )
        for one in found
    ]
    return InboxAnswer(lines)


async def inbox_done(server: TaskServer, request: HttpRequest) -> MessagesAnswer:
    call: InboxDone = request.call
    agent = await _agent(server, *_own(request), call.session)
    keys = [joined(agent.org_id, agent.agent_id, int(key)) for key in call.keys]
    await agent.coordinator.write(
        lambda one: Inboxes(one).note_receipt(agent.org_id, agent.agent_id, agent.session, keys, "acted_on")
    )
    return MessagesAnswer(call.keys)


async def receipts(server: TaskServer, request: HttpRequest) -> dict[str, int]:
    call: ReadReceipts = request.call
    message_id = checked_id(call.message_id)

    def read(operations: Operations) -> dict[str, int]:
        record = visible(operations, message_id, request.identity)
        inboxes = Inboxes(AgentOperations(operations.transaction, server.engine.policy))
        return {str(name): at for name, at in inboxes.receipts(record.message_id).items()}

    return await server.read_for(request, lambda: _read(server, read))


# ---- bounces -----------------------------------------------------------------------------------------


async def bounces(server: TaskServer, request: HttpRequest) -> BouncesAnswer:
    call: ListBounces = request.call
    asked = None if call.org_id is msgspec.UNSET else call.org_id
    org_id = _organization(request.identity, "bounce.list", asked)
    after = "" if call.after is msgspec.UNSET else call.after

    def read(operations: Operations) -> list[BouncedAnswer]:
        return listed(
            operations.transaction, org_id, created_by=call.created_by, after=after, limit=call.limit
        )

    found = await server.read_for(request, lambda: _read(server, read))
    org = request.identity.org
    shown = [msgspec.structs.replace(one, message_id=unscoped(org, one.message_id)) for one in found]
    return BouncesAnswer(shown)


async def bounces_done(server: TaskServer, request: HttpRequest) -> BouncesDoneAnswer:
    call: BouncesDone = request.call
    org_id = _organization(request.identity, "bounce.remove", None)
    gone = await server.writer.submit(
        lambda operations: removed(operations.transaction, call.keys, org_id),
        request.identity,
        makes_room=True,
    )
    return BouncesDoneAnswer(gone)


def _organization(identity: Identity, action: str, asked: str | None) -> str | None:
    """The organization that the caller may look at; None for an operator who asks for all."""
    org_id = visible_org(identity) if asked is None else asked
    check_allowed(identity, action, of_organization(org_id or ""))
    return org_id


# ---- reading -----------------------------------------------------------------------------------------


def _read(server: TaskServer, work: Callable[[Operations], T]) -> T:
    policy = server.engine.policy
    return server.engine.store.read(lambda transaction: work(Operations(transaction, policy)))


def _read_agents(server: TaskServer, work: Callable[[AgentOperations], T]) -> T:
    policy = server.engine.policy
    return server.engine.store.read(lambda transaction: work(AgentOperations(transaction, policy)))
