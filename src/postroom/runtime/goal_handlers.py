"""The handlers of the routes of goals, decisions and conflicts. All of them are for operators.

Rule 1: an operator of one organization sees and decides only what belongs to it. Everything else is unknown.
"""

import msgspec

from postroom.contracts.goals.cells import Decision
from postroom.contracts.goals.goals import GoalStatus
from postroom.errors import UnknownDecision, UnknownGoal
from postroom.runtime.engine_schemas import AnswerBody
from postroom.runtime.http_messages import HttpReply, HttpRequest
from postroom.runtime.task_server import TaskServer

_encode = msgspec.json.Encoder().encode


# ---- decisions -------------------------------------------------------------------------------------


async def decisions(server: TaskServer, request: HttpRequest) -> HttpReply:
    found = await server.engine.decisions.list()
    visible = [one for one in found if request.identity.operates(one.org_id)]
    return HttpReply(200, _encode({"decisions": visible}))


async def decision(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(200, _encode(await _decision(server, request)))


async def answer(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(202, _encode(await answered(server, request, request.body)))


async def answered(server: TaskServer, request: HttpRequest, body: AnswerBody) -> Decision:
    """Take the decision of a route, as a person."""
    asked = await _decision(server, request)
    taken = await server.engine.decisions.answer(asked.decision_id, body.choice)
    server.server_log.write(
        "decided", decision=asked.decision_id, choice=body.choice, agent=request.identity.name
    )
    return taken


async def _decision(server: TaskServer, request: HttpRequest) -> Decision:
    decision_id = request.path_param("id")
    found = await server.engine.decisions.show(decision_id)
    if not request.identity.operates(found.org_id):
        raise UnknownDecision(decision_id)
    return found


# ---- goals and conflicts ---------------------------------------------------------------------------


async def goals(server: TaskServer, request: HttpRequest) -> HttpReply:
    found = await server.engine.goals.list(request.identity.org or None)
    return HttpReply(200, _encode({"goals": found}))


async def goal(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(200, _encode(await _goal(server, request)))


async def checkpoints(server: TaskServer, request: HttpRequest) -> HttpReply:
    found = await server.engine.goals.checkpoints((await _goal(server, request)).goal_id)
    return HttpReply(200, _encode({"checkpoints": found}))


async def _goal(server: TaskServer, request: HttpRequest) -> GoalStatus:
    goal_id = request.path_param("id")
    found = await server.engine.goals.status(goal_id)
    if not request.identity.operates(found.org_id):
        raise UnknownGoal(goal_id)
    return found


async def conflicts(server: TaskServer, request: HttpRequest) -> HttpReply:
    org_id = request.identity.org or None
    active = await server.engine.conflicts.active(org_id)
    waiting = await server.engine.conflicts.waiting(org_id)
    return HttpReply(200, _encode({"active": active, "waiting": waiting}))
