"""The handlers of the routes of goals, decisions and conflicts. All of them are for operators."""

import msgspec

from postroom.runtime.engine_schemas import AnswerBody
from postroom.runtime.http_messages import HttpReply, HttpRequest
from postroom.runtime.task_server import TaskServer

_encode = msgspec.json.Encoder().encode


async def decisions(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - as every handler
    return HttpReply(200, _encode({"decisions": await server.engine.decisions.list()}))


async def decision(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(200, _encode(await server.engine.decisions.show(request.path_param("id"))))


async def answer(server: TaskServer, request: HttpRequest) -> HttpReply:
    body: AnswerBody = request.body
    decision_id = request.path_param("id")
    taken = await server.engine.decisions.answer(decision_id, body.choice)
    server.server_log.write("decided", decision=decision_id, choice=body.choice, agent=request.identity.name)
    return HttpReply(202, _encode(taken))


async def goals(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - as every handler
    return HttpReply(200, _encode({"goals": await server.engine.goals.list()}))


async def goal(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(200, _encode(await server.engine.goals.status(request.path_param("id"))))


async def checkpoints(server: TaskServer, request: HttpRequest) -> HttpReply:
    found = await server.engine.goals.checkpoints(request.path_param("id"))
    return HttpReply(200, _encode({"checkpoints": found}))


async def conflicts(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - as every handler
    active = await server.engine.conflicts.active()
    waiting = await server.engine.conflicts.waiting()
    return HttpReply(200, _encode({"active": active, "waiting": waiting}))
