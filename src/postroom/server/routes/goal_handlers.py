"""The handlers of the routes of goals, decisions and conflicts. All of them are for operators.

Rule 1: an operator of one organization sees and decides only what belongs to it. Everything else is unknown.
"""

from postroom.calls.goals import Answer
from postroom.core.gate import of_organization, permit, visible_org
from postroom.errors import UnknownDecision, UnknownGoal
from postroom.goals.goal_cells import Decision, LearnedRule
from postroom.goals.goals import GoalStatus
from postroom.goals.rollback import goal_of
from postroom.server.access.registry import Identity
from postroom.server.http.exchange import HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.answers import (
    CheckpointsAnswer,
    ConflictsAnswer,
    DecisionsAnswer,
    GoalsAnswer,
    HeldAnswer,
    RuleAnswer,
    RulesAnswer,
)
from postroom.stores.transaction import Transaction

# ---- decisions -------------------------------------------------------------------------------------


async def decisions(server: TaskServer, request: HttpRequest) -> DecisionsAnswer:
    found = await server.engine.decisions.list()
    identity = request.identity
    visible = [one for one in found if permit(identity, "decision.read", of_organization(one.org_id))]
    return DecisionsAnswer(visible)


async def decision(server: TaskServer, request: HttpRequest) -> Decision:
    return await _decision(server, request)


async def answer(server: TaskServer, request: HttpRequest) -> Decision:
    return await answered(server, request, request.call)


async def answered(server: TaskServer, request: HttpRequest, body: Answer) -> Decision:
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
    if not permit(request.identity, "decision.read", of_organization(found.org_id)):
        raise UnknownDecision(decision_id)
    return found


# ---- rules -----------------------------------------------------------------------------------------


async def rules(server: TaskServer, request: HttpRequest) -> RulesAnswer:
    return RulesAnswer(await visible_rules(server, request))


async def held(server: TaskServer, request: HttpRequest) -> HeldAnswer:
    rule = await _rule(server, request)
    return HeldAnswer(await server.engine.decisions.held(rule.rule_id))


async def forget_rule(server: TaskServer, request: HttpRequest) -> RuleAnswer:
    rule = await _rule(server, request)
    await server.engine.decisions.forget(rule.rule_id)
    server.server_log.write("rule_removed", rule=rule.rule_id, agent=request.identity.name)
    return RuleAnswer(rule.rule_id)


async def visible_rules(server: TaskServer, request: HttpRequest) -> list[LearnedRule]:
    """The rules that the caller may see."""
    found, identity = await server.engine.decisions.rules(), request.identity
    return [one for one in found if permit(identity, "decision.read", of_organization(one.org_id))]


async def _rule(server: TaskServer, request: HttpRequest) -> LearnedRule:
    rule_id = request.path_param("id")
    found = [one for one in await visible_rules(server, request) if one.rule_id == rule_id]
    if not found:
        raise UnknownDecision(rule_id, "rule")
    return found[0]


# ---- goals and conflicts ---------------------------------------------------------------------------


async def goals(server: TaskServer, request: HttpRequest) -> GoalsAnswer:
    found = await server.engine.goals.list(visible_org(request.identity))
    return GoalsAnswer(found)


async def goal(server: TaskServer, request: HttpRequest) -> GoalStatus:
    goal_id = await _visible_goal(server, request)
    return await server.engine.goals.status(goal_id)


async def checkpoints(server: TaskServer, request: HttpRequest) -> CheckpointsAnswer:
    goal_id = await _visible_goal(server, request)
    return CheckpointsAnswer(await server.engine.goals.checkpoints(goal_id))


async def _visible_goal(server: TaskServer, request: HttpRequest) -> str:
    """The goal of the path, of which nothing but its record is read. Its organization never changes."""
    goal_id, store = request.path_param("id"), server.engine.store
    await server.read_for(
        request, lambda: store.read(lambda transaction: check_goal(transaction, request.identity, goal_id))
    )
    return goal_id


def check_goal(transaction: Transaction, identity: Identity, goal_id: str) -> None:
    """Raises `UnknownGoal` for a goal that the caller may not see."""
    if not permit(identity, "goal.read", of_organization(goal_of(transaction, goal_id).org_id)):
        raise UnknownGoal(goal_id)


async def conflicts(server: TaskServer, request: HttpRequest) -> ConflictsAnswer:
    org_id = visible_org(request.identity)
    active = await server.engine.conflicts.active(org_id)
    waiting = await server.engine.conflicts.waiting(org_id)
    return ConflictsAnswer(active, waiting)
