"""The views of goals: decisions that wait for a person, checkpoints, branches, rollbacks and conflicts."""

from collections import Counter
from typing import Any, Final

import msgspec

from postroom.contracts.engine.cells import SEPARATOR
from postroom.contracts.engine.operations import Operations
from postroom.contracts.goals import branches
from postroom.contracts.goals import decisions as decision_cells
from postroom.contracts.goals.cells import CHECKPOINTS, OPEN, STATES, Checkpoint, Decision
from postroom.contracts.goals.goals import GoalStatus, status_of
from postroom.contracts.goals.progress import CHECKPOINTS_MAX
from postroom.contracts.goals.rollback import checkpoint_of, goal_of, is_undone, later_effects
from postroom.errors import UnknownCheckpoint, UnknownGoal
from postroom.page.live import scope_of
from postroom.page.messages import read
from postroom.page.redaction import shown_json
from postroom.page.schemas import RollbackBody
from postroom.runtime.agents import Identity
from postroom.runtime.goal_handlers import answered
from postroom.runtime.http_messages import HttpReply, HttpRequest
from postroom.runtime.task_server import TaskServer
from postroom.stores.transaction import Transaction

STAGED_SHOWN_MAX: Final = 100
GOALS_SHOWN_MAX: Final = 500

_encode = msgspec.json.Encoder().encode


def _is_seen(identity: Identity, org_id: str) -> bool:
    return scope_of(identity) in (None, org_id)


# ---- decisions -------------------------------------------------------------------------------------


async def decisions(server: TaskServer, request: HttpRequest) -> HttpReply:
    found = await read(server, request, lambda operations: decision_cells.waiting(operations.transaction))
    seen = [_shown(request, one) for one in found if _is_seen(request.identity, one.org_id)]
    return HttpReply(200, _encode({"decisions": seen}))


def _shown(request: HttpRequest, decision: Decision) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(decision)
    question = decision.question
    return {
        **fields,
        "state": decision.state,
        "options": list(question.options),
        "default": question.default,
        "question": shown_json(request, question.facts),
        "subject": {name: str(value) for name, value in decision.subject.items()},
    }


async def answer(server: TaskServer, request: HttpRequest) -> HttpReply:
    return HttpReply(200, _encode(_shown(request, await answered(server, request, request.body))))


# ---- goals -----------------------------------------------------------------------------------------


class GoalLine(msgspec.Struct, frozen=True):
    """A goal in the list."""

    goal_id: str
    org_id: str
    state: str
    open_messages: int
    checkpoints: int
    effects: int
    decisions: int
    """Decisions that the goal waits for."""
    created_us: int


def goal_lines(transaction: Transaction, org_id: str | None) -> list[GoalLine]:
    """The goals of one organization or of all: those that have not ended first, then the newest first."""
    waiting = Counter(one.subject.get("goal_id") for one in decision_cells.waiting(transaction))
    found = [(key, goal) for key, goal in STATES.all(transaction) if org_id in (None, goal.org_id)]
    found.sort(key=lambda one: (one[1].ended_us > 0, -one[1].created_us))
    return [
        GoalLine(
            goal_id=key,
            org_id=goal.org_id,
            state=goal.state,
            open_messages=len(OPEN.under(transaction, key)),
            checkpoints=goal.checkpoints,
            effects=goal.effects,
            decisions=waiting[key],
            created_us=goal.created_us,
        )
        for key, goal in found[:GOALS_SHOWN_MAX]
    ]


async def goals(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The goals, and the operations that hold each other up."""
    scope = scope_of(request.identity)
    found = await read(server, request, lambda operations: goal_lines(operations.transaction, scope))
    active = await server.engine.conflicts.active(scope)
    conflicts = {"active": active, "waiting": await server.engine.conflicts.waiting(scope)}
    return HttpReply(200, _encode({"goals": found, "conflicts": conflicts}))


async def goal(server: TaskServer, request: HttpRequest) -> HttpReply:
    goal_id = request.path_param("id")

    def work(operations: Operations) -> tuple[GoalStatus, list[Checkpoint]]:
        transaction = operations.transaction
        _check_seen(transaction, request.identity, goal_id)
        found = CHECKPOINTS.under(transaction, goal_id, limit=CHECKPOINTS_MAX)
        return status_of(transaction, goal_id), [one for _, one in found]

    status, checkpoints = await read(server, request, work)
    context, _ = await server.engine.goals.context(goal_id)
    answer = {
        "goal": status,
        "checkpoints": checkpoints,
        "context": shown_json(request, context),
        "branch": await _branch(server, request, goal_id),
    }
    return HttpReply(200, _encode(answer))


def _check_seen(transaction: Transaction, identity: Identity, goal_id: str) -> None:
    if not _is_seen(identity, goal_of(transaction, goal_id).org_id):
        raise UnknownGoal(goal_id)


async def _branch(server: TaskServer, request: HttpRequest, goal_id: str) -> list[dict[str, Any]]:
    """The changes of a goal that main does not have yet; none when the branch is gone or lies elsewhere."""

    def work(operations: Operations) -> list[tuple[str, branches.Staged]]:
        return branches.STAGED.under(operations.transaction, goal_id, limit=STAGED_SHOWN_MAX)

    staged = await read(server, request, work)
    return [
        {
            "node_id": key.partition(SEPARATOR)[2],
            "changes": shown_json(request, {name: value for name, (_, value) in one.changes.items()}),
            "edges": len(one.edges),
        }
        for key, one in staged
    ]


async def rollback(server: TaskServer, request: HttpRequest) -> HttpReply:
    """Preview or do a rollback."""
    body: RollbackBody = request.body
    goal_id = request.path_param("id")

    def work(operations: Operations) -> dict[str, Any]:
        transaction = operations.transaction
        _check_seen(transaction, request.identity, goal_id)
        checkpoint = checkpoint_of(transaction, body.checkpoint_id)
        if checkpoint.goal_id != goal_id:
            raise UnknownCheckpoint(body.checkpoint_id)
        effects = [effect for _, effect in later_effects(transaction, checkpoint)]
        return {
            "checkpoint": checkpoint,
            "open_messages": status_of(transaction, goal_id).open_messages,
            "undone": [effect.key for effect in effects if is_undone(effect)],
            "irreversible": list(dict.fromkeys(effect.key for effect in effects if not is_undone(effect))),
        }

    seen = await read(server, request, work)
    if body.is_preview:
        return HttpReply(200, _encode(seen))
    status = await server.engine.goals.rollback(
        body.checkpoint_id, accept_irreversible=body.accept_irreversible
    )
    server.server_log.write("rolled_back", checkpoint=body.checkpoint_id, agent=request.identity.name)
    return HttpReply(200, _encode({**seen, "goal": status}))
