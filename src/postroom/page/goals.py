"""The views of goals: decisions that wait for a person, checkpoints, branches, rollbacks and conflicts."""

from collections import Counter
from typing import Any, Final

import msgspec

from postroom.calls.fields import Text
from postroom.core.gate import visible_org
from postroom.engine.rules.cells import SEPARATOR
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, RollbackRefused, UnknownCheckpoint
from postroom.goals import decisions as decision_cells
from postroom.goals.goal_cells import CHECKPOINTS, OPEN, STATES, Checkpoint, Decision, GoalEffect, LearnedRule
from postroom.goals.goals import GoalStatus, status_of
from postroom.goals.graph import branches
from postroom.goals.progress import CHECKPOINTS_MAX
from postroom.goals.rollback import checkpoint_of, is_undone, later_effects
from postroom.page.messages import read
from postroom.page.redaction import (
    REDACTED_CHARS_MAX,
    begin_view,
    shown_by,
    shown_json,
    shown_name,
    shown_text,
    shown_texts,
)
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.goal_handlers import answered, check_goal, visible_rules
from postroom.stores.transaction import Transaction

STAGED_SHOWN_MAX: Final = 100
EFFECTS_SHOWN_MAX: Final = 100
GOALS_SHOWN_MAX: Final = 500
STATUS_FIELDS: Final = (
    "goal_id", "org_id", "state", "open_messages", "effects", "created_us", "ended_us", "undoing"
)  # fmt: skip


class RollbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/goals/{id}/rollback`. A preview changes nothing."""

    checkpoint_id: Text
    accept_irreversible: list[Text] = []
    is_preview: bool = True


# ---- decisions -------------------------------------------------------------------------------------


async def decisions(server: TaskServer, request: HttpRequest) -> HttpReply:
    org_id = visible_org(request.identity)
    seen = await read(
        server, request, lambda operations: decision_cells.waiting(operations.transaction, org_id)
    )
    rules = await visible_rules(server, request)

    def shown() -> dict[str, Any]:
        return {
            "decisions": [_shown(request, one) for one in seen],
            "rules": [_shown_rule(request, one) for one in rules],
        }

    return await shown_by(server, request, shown)


def _shown(request: HttpRequest, decision: Decision) -> dict[str, Any]:
    question = decision.question
    subject = {name: str(value) for name, value in decision.subject.items()}
    return {
        "decision_id": decision.decision_id,
        "kind": decision.kind,
        "org_id": decision.org_id,
        "state": decision.state,
        "deadline_us": decision.deadline_us,
        "options": list(question.options),
        "default": question.default,
        "question": shown_json(request, question.facts),
        "proposed": decision.proposed,
        "reasoning": shown_text(request, decision.reasoning),
        "subject": shown_texts(request, subject),
    }


def _shown_rule(request: HttpRequest, rule: LearnedRule) -> dict[str, Any]:
    return {
        "rule_id": rule.rule_id,
        "org_id": rule.org_id,
        "kind": rule.kind,
        "choice": rule.choice,
        "held": rule.held,
        "pattern": shown_text(request, rule.pattern),
        "payload": shown_json(request, rule.payload),
    }


async def answer(server: TaskServer, request: HttpRequest) -> HttpReply:
    taken = await answered(server, request, request.call)
    return await shown_by(server, request, lambda: _shown(request, taken))


# ---- goals -----------------------------------------------------------------------------------------


class GoalRow(msgspec.Struct, frozen=True):
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


def goal_lines(transaction: Transaction, org_id: str | None) -> list[GoalRow]:
    """The goals of one organization or of all: those that have not ended first, then the newest first."""
    waiting = Counter(one.subject.get("goal_id") for one in decision_cells.waiting(transaction, org_id))
    found = [(key, goal) for key, goal in STATES.all(transaction) if org_id in (None, goal.org_id)]
    found.sort(key=lambda one: (one[1].ended_us > 0, -one[1].created_us))
    return [
        GoalRow(
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
    scope = visible_org(request.identity)
    found = await read(server, request, lambda operations: goal_lines(operations.transaction, scope))
    active = await server.engine.conflicts.active(scope)
    waiting = await server.engine.conflicts.waiting(scope)
    conflicts = msgspec.to_builtins({"active": active, "waiting": waiting})
    return await shown_by(
        server, request, lambda: {"goals": found, "conflicts": shown_texts(request, conflicts)}
    )


async def goal(server: TaskServer, request: HttpRequest) -> HttpReply:
    goal_id = request.path_param("id")

    def work(operations: Operations) -> tuple[GoalStatus, list[Checkpoint]]:
        transaction = operations.transaction
        check_goal(transaction, request.identity, goal_id)
        found = CHECKPOINTS.under(transaction, goal_id, limit=CHECKPOINTS_MAX)
        return status_of(transaction, goal_id), [one for _, one in found]

    status, checkpoints = await read(server, request, work)
    context, _ = await server.engine.goals.context(goal_id)
    effects = await server.engine.goals.effects(goal_id)
    # What main does not have yet; nothing when the branch is gone or lies elsewhere.
    staged = await read(
        server,
        request,
        lambda operations: branches.STAGED.under(operations.transaction, goal_id, limit=STAGED_SHOWN_MAX),
    )

    def shown() -> dict[str, Any]:
        return {
            "goal": {
                **{name: getattr(status, name) for name in STATUS_FIELDS},
                "tried": shown_texts(request, status.tried),
            },
            "checkpoints": [
                {
                    "checkpoint_id": one.checkpoint_id,
                    "created_us": one.created_us,
                    "effects": one.effects,
                    "reason": shown_text(request, one.reason),
                }
                for one in checkpoints
            ],
            "effects": [
                {
                    "key": shown_name(request, one.key),
                    "reversal_class": one.reversal_class,
                    "reversal": "" if one.reversal is None else shown_json(request, one.reversal),
                }
                for one in effects[:EFFECTS_SHOWN_MAX]
            ],
            "context": shown_json(request, context),
            "branch": [
                {
                    "node_id": shown_name(request, key.partition(SEPARATOR)[2]),
                    "changes": shown_json(request, {name: new for name, (_, new) in one.changes.items()}),
                    "edges": len(one.edges),
                }
                for key, one in staged
            ],
        }

    return await shown_by(server, request, shown)


async def rollback(server: TaskServer, request: HttpRequest) -> HttpReply:
    """Preview or do a rollback. A person accepts effects by their keys as the page shows them."""
    body: RollbackBody = request.call
    goal_id = request.path_param("id")

    def work(operations: Operations) -> tuple[int, list[GoalEffect]]:
        transaction = operations.transaction
        check_goal(transaction, request.identity, goal_id)
        checkpoint = checkpoint_of(transaction, body.checkpoint_id)
        if checkpoint.goal_id != goal_id:
            raise UnknownCheckpoint(body.checkpoint_id)
        effects = [effect for _, effect in later_effects(transaction, checkpoint)]
        return status_of(transaction, goal_id).open_messages, effects

    open_messages, effects = await read(server, request, work)
    if sum(len(effect.key) for effect in effects) > REDACTED_CHARS_MAX:  # a person accepts what is shown
        raise InvalidMessage(
            "this rollback undoes more effects than the page shows: use `postroom engine goal`"
        )
    if not body.is_preview:
        await _roll_back(server, request, effects)

    def shown() -> dict[str, Any]:
        undone = [shown_name(request, effect.key) for effect in effects if is_undone(effect)]
        left = dict.fromkeys(shown_name(request, effect.key) for effect in effects if not is_undone(effect))
        return {"open_messages": open_messages, "undone": undone, "irreversible": list(left)}

    return await shown_by(server, request, shown)


async def _roll_back(server: TaskServer, request: HttpRequest, effects: list[GoalEffect]) -> None:
    body: RollbackBody = request.call
    chosen = set(body.accept_irreversible)
    accepted = await server.read_for(
        request, lambda: [effect.key for effect in effects if shown_name(request, effect.key) in chosen]
    )
    begin_view(request)
    try:
        await server.engine.goals.rollback(body.checkpoint_id, accept_irreversible=accepted)
    except RollbackRefused as error:
        keys = [shown_name(request, key) for key in error.irreversible]
        raise RollbackRefused(error.goal_id, dict.fromkeys(keys)) from None
    server.server_log.write("rolled_back", checkpoint=body.checkpoint_id, agent=request.identity.name)
