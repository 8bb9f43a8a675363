"""The handlers of the routes of goals, the graph, decisions and conflicts. All of them are for operators.

Rule 1: an operator of one organization sees and decides only what belongs to it. Everything else is unknown.
"""

from msgspec import UNSET

from postroom.calls.goals import (
    Answer,
    ContextAnswer,
    ContextVersion,
    GoalAnswer,
    OfNode,
    ReadNode,
    RollBackGoal,
    SaveNode,
    SetContext,
    StartGoal,
    UpdateNode,
)
from postroom.core.gate import of_organization, permit, visible_org
from postroom.errors import InvalidMessage, UnknownCheckpoint, UnknownDecision, UnknownGoal, UnknownNode
from postroom.goals.goal_cells import Checkpoint, Decision, LearnedRule
from postroom.goals.goals import GoalStatus
from postroom.goals.graph.branches import Node
from postroom.goals.graph.graph import View
from postroom.goals.rollback import goal_of
from postroom.server.access.registry import Identity
from postroom.server.http.exchange import HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.answers import (
    CheckpointsAnswer,
    ConflictsAnswer,
    DecisionsAnswer,
    EffectsAnswer,
    GoalsAnswer,
    HeldAnswer,
    RuleAnswer,
    RulesAnswer,
)
from postroom.server.routes.engine_handlers import operated_org
from postroom.stores.transaction import Transaction

# ---- decisions -------------------------------------------------------------------------------------


async def decisions(server: TaskServer, request: HttpRequest) -> DecisionsAnswer:
    return DecisionsAnswer(await server.engine.decisions.list(org_id=visible_org(request.identity)))


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


# ---- goals -----------------------------------------------------------------------------------------


async def goals(server: TaskServer, request: HttpRequest) -> GoalsAnswer:
    found = await server.engine.goals.list(visible_org(request.identity))
    return GoalsAnswer(found)


async def start(server: TaskServer, request: HttpRequest) -> GoalAnswer:
    call: StartGoal = request.call
    org_id = operated_org(request.identity, "goal.change", call.org_id or "")
    if not org_id:
        raise InvalidMessage("an operator of all organizations has to name that of a goal: org_id")
    goal_id = await server.engine.goals.start(org_id, call.goal_id or None, context=call.context or None)
    _log(server, request, "goal_started", goal_id)
    return GoalAnswer(goal_id)


async def goal(server: TaskServer, request: HttpRequest) -> GoalStatus:
    return await server.engine.goals.status(await _visible_goal(server, request))


async def checkpoints(server: TaskServer, request: HttpRequest) -> CheckpointsAnswer:
    goal_id = await _visible_goal(server, request)
    return CheckpointsAnswer(await server.engine.goals.checkpoints(goal_id))


async def effects(server: TaskServer, request: HttpRequest) -> EffectsAnswer:
    goal_id = await _visible_goal(server, request)
    return EffectsAnswer(await server.engine.goals.effects(goal_id))


async def checkpoint(server: TaskServer, request: HttpRequest) -> Checkpoint:
    goal_id = await _visible_goal(server, request)
    return await server.engine.goals.checkpoint(goal_id, request.call.reason)


async def complete(server: TaskServer, request: HttpRequest) -> GoalStatus:
    status = await server.engine.goals.complete(await _visible_goal(server, request))
    _log(server, request, "goal_completed", status.goal_id)
    return status


async def fail(server: TaskServer, request: HttpRequest) -> GoalStatus:
    status = await server.engine.goals.fail(await _visible_goal(server, request), request.call.reason)
    _log(server, request, "goal_failed", status.goal_id)
    return status


async def roll_back(server: TaskServer, request: HttpRequest) -> GoalStatus:
    call: RollBackGoal = request.call
    goal_id = await _visible_goal(server, request)
    if call.checkpoint_id.rpartition("#")[0] != goal_id:
        raise UnknownCheckpoint(call.checkpoint_id)
    status = await server.engine.goals.rollback(
        call.checkpoint_id, call.preserve_learning, call.accept_irreversible
    )
    server.server_log.write("rolled_back", checkpoint=call.checkpoint_id, agent=request.identity.name)
    return status


async def context(server: TaskServer, request: HttpRequest) -> ContextAnswer:
    return ContextAnswer(*await server.engine.goals.context(await _visible_goal(server, request)))


async def set_context(server: TaskServer, request: HttpRequest) -> ContextVersion:
    call: SetContext = request.call
    goal_id = await _visible_goal(server, request)
    return ContextVersion(await server.engine.goals.set_context(goal_id, call.context, call.expect_version))


def _log(server: TaskServer, request: HttpRequest, event: str, goal_id: str) -> None:
    server.server_log.write(event, goal=goal_id, agent=request.identity.name)


async def _visible_goal(server: TaskServer, request: HttpRequest) -> str:
    """The goal of the path, of which nothing but its record is read. Its organization never changes."""
    goal_id = request.path_param("id")
    await _check_visible(server, request, goal_id)
    return goal_id


async def _check_visible(server: TaskServer, request: HttpRequest, goal_id: str) -> None:
    identity, store = request.identity, server.engine.store
    await server.read_for(
        request, lambda: store.read(lambda transaction: check_goal(transaction, identity, goal_id))
    )


def check_goal(transaction: Transaction, identity: Identity, goal_id: str) -> None:
    """Raises `UnknownGoal` for a goal that the caller may not see."""
    if not permit(identity, "goal.read", of_organization(goal_of(transaction, goal_id).org_id)):
        raise UnknownGoal(goal_id)


# ---- the knowledge graph ---------------------------------------------------------------------------


async def node(server: TaskServer, request: HttpRequest) -> Node:
    call: ReadNode = request.call
    found = await (await _view(server, request)).get(call.node_id)
    if found is None:
        raise UnknownNode(call.node_id)
    return found


async def save_node(server: TaskServer, request: HttpRequest) -> Node:
    call: SaveNode = request.call
    view = await _view(server, request)
    return await view.save(call.node_id, call.properties, call.edges, call.scope)


async def update_node(server: TaskServer, request: HttpRequest) -> Node:
    call: UpdateNode = request.call
    view = await _view(server, request)
    return await view.update(call.node_id, call.changes, call.scope, call.edges)


async def _view(server: TaskServer, request: HttpRequest) -> View:
    """The graph as the goal of a call sees it, else as the organization of the caller does."""
    call: OfNode = request.call
    org_id: str | None = operated_org(request.identity, call.route.permission, call.org_id or "")
    if not org_id:  # the caller operates all organizations
        org_id = None if call.org_id is UNSET else ""
    if not call.goal_id:
        return server.engine.graph.main(org_id)
    await _check_visible(server, request, call.goal_id)
    return server.engine.graph.branch(call.goal_id, org_id or None)


# ---- conflicts -------------------------------------------------------------------------------------


async def conflicts(server: TaskServer, request: HttpRequest) -> ConflictsAnswer:
    org_id = visible_org(request.identity)
    active = await server.engine.conflicts.active(org_id)
    waiting = await server.engine.conflicts.waiting(org_id)
    return ConflictsAnswer(active, waiting)
