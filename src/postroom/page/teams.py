"""The view of agents and mailboxes. The ids of private mailboxes are never shown."""

import asyncio
from typing import Any, Final

import msgspec

from postroom.core.gate import permit, visible_org
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations
from postroom.page.messages import read
from postroom.page.redaction import shown_texts
from postroom.server.http.messages import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.nats.mail_status import read_status
from postroom.server.routes.agent_handlers import shown_to

AGENTS_LISTED_MAX: Final = 1_000
REGISTERED_LISTED_MAX: Final = 1_000

_encode = msgspec.json.Encoder().encode


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
