"""A rollback: later messages are cancelled, the branch and the context restored, and effects undone.

Rule 1: a rollback is a sequence of commits, each of which can be repeated. So the same call resumes a
        rollback that a crash has interrupted, with the same result.
Rule 2: effects are undone in reverse order, one after the other, by ordinary messages.
Rule 3: nothing is changed when a later effect cannot be undone and the caller has not accepted that.
"""

from collections.abc import Collection
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.times import utc_text
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.messages import body_of, new_id
from postroom.engine.rules import bodies, ordering
from postroom.engine.rules.cells import EFFECTS as OUTCOMES
from postroom.engine.rules.cells import PARTS, SEPARATOR, Part, joined
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.errors import GoalEnded, RollbackRefused, UnknownCheckpoint, UnknownGoal
from postroom.goals import internal
from postroom.goals.goal_cells import (
    CHECKPOINTS,
    CONTEXTS,
    EFFECTS,
    GOAL_OF,
    MESSAGES,
    NOTIFIED,
    OPEN,
    ROLLBACKS,
    STATES,
    UNDOES,
    Checkpoint,
    Goal,
    GoalContext,
    GoalEffect,
    Rollback,
    join_goal,
)
from postroom.goals.graph import branches
from postroom.message import Record, Stored, org_of
from postroom.stores.base import ByIds
from postroom.stores.transaction import Transaction

CANCELLED_A_COMMIT_MAX: Final = 200
AVOIDED_MAX: Final = 20
PARTS_MAX: Final = 100_000  # cells with parts of one attempt


def checkpoint_of(transaction: Transaction, checkpoint_id: object) -> Checkpoint:
    """A checkpoint by its id. Raises `UnknownCheckpoint`."""
    goal_id, _, number = checkpoint_id.rpartition("#") if isinstance(checkpoint_id, str) else ("", "", "")
    is_key = goal_id.isprintable() and number.isascii() and number.isdecimal()
    found = CHECKPOINTS.get(transaction, goal_id, int(number)) if is_key else None
    if found is None or found.checkpoint_id != checkpoint_id:
        raise UnknownCheckpoint(checkpoint_id)
    return found


def goal_id_of(checkpoint_id: object) -> str:
    """The goal that the id of a checkpoint names."""
    return str(checkpoint_id).rpartition("#")[0]


def _kept_checkpoint(transaction: Transaction, checkpoint_id: str) -> Checkpoint:
    """As `checkpoint_of`. Raises `GoalEnded` for a checkpoint that was removed at the end of its goal."""
    try:
        return checkpoint_of(transaction, checkpoint_id)
    except UnknownCheckpoint:
        goal_id = goal_id_of(checkpoint_id)
        goal = STATES.get(transaction, goal_id) if goal_id.isprintable() else None
        if goal is not None and goal.ended_us:
            raise GoalEnded(goal_id, goal.state, "roll back") from None
        raise


def goal_of(transaction: Transaction, goal_id: object) -> Goal:
    """A goal by its id. Raises `UnknownGoal`."""
    goal = None
    if isinstance(goal_id, str) and goal_id.isprintable():
        goal = STATES.get(transaction, goal_id)
    if goal is None:
        raise UnknownGoal(goal_id)
    return goal


def later_effects(transaction: Transaction, checkpoint: Checkpoint) -> list[tuple[int, GoalEffect]]:
    """Effects of a goal after a checkpoint, the newest first."""
    return effects_of(transaction, checkpoint.goal_id, checkpoint.effects)


def effects_of(transaction: Transaction, goal_id: str, number: int = 0) -> list[tuple[int, GoalEffect]]:
    """Effects of a goal after a number, the newest first."""
    prefix, after = goal_id + SEPARATOR, joined(goal_id, number)
    found: list[tuple[int, GoalEffect]] = []
    while more := [one for one in EFFECTS.scan(transaction, after) if one[0].startswith(prefix)]:
        found += [(int(key.rpartition(SEPARATOR)[2]), effect) for key, effect in more]
        after = more[-1][0]
    return found[::-1]


def is_undone(effect: GoalEffect) -> bool:
    """Whether a rollback can undo an effect."""
    return effect.reversal is not None and effect.reversal_class not in ("IRREVERSIBLE", "")


# ---- the steps -------------------------------------------------------------------------------------


def begin(
    transaction: Transaction,
    checkpoint_id: str,
    *,
    preserve_learning: bool,
    accepted: Collection[str],
    plan: Rollback | None = None,
) -> Checkpoint:
    """Begin a rollback, or find the one that is under way. Raises `RollbackRefused`."""
    checkpoint = _kept_checkpoint(transaction, checkpoint_id)
    goal_id = checkpoint.goal_id
    goal = goal_of(transaction, goal_id)
    under_way = ROLLBACKS.get(transaction, goal_id)
    if under_way is not None and under_way.checkpoint_id == checkpoint_id:
        return checkpoint
    if goal.state != "ACTIVE":
        raise GoalEnded(goal_id, goal.state, "roll back")
    left = [
        effect.key
        for _, effect in reversed(later_effects(transaction, checkpoint))
        if not is_undone(effect) and effect.key not in accepted
    ]
    if left:
        raise RollbackRefused(goal_id, dict.fromkeys(left))
    begun = replace(
        plan or Rollback(checkpoint_id, preserve_learning),
        checkpoint_id=checkpoint_id,
        preserve_learning=preserve_learning,
        accepted=sorted(accepted),
    )
    ROLLBACKS.put(transaction, begun, goal_id)
    STATES.put(transaction, replace(goal, state="ROLLING_BACK", rollbacks=goal.rollbacks + 1), goal_id)
    return checkpoint


def cancel_some(
    transaction: Transaction, policy: Policy, checkpoint: Checkpoint, after: str = ""
) -> str | None:
    """Cancel later messages of the goal that have not ended, and notify all agents concerned.

    The answer of a cancelled message gets a `progress` part before its end. Every registered agent with a
    message in the goal gets a part in its inbox. Returns the key to continue from; None at the end.
    """
    goal_id = checkpoint.goal_id
    prefix = goal_id + SEPARATOR
    seen = MESSAGES.scan(transaction, after or prefix, CANCELLED_A_COMMIT_MAX)
    own = [(key, message_id) for key, message_id in seen if key.startswith(prefix)]
    said = f"goal {goal_id} is rolled back to checkpoint {checkpoint.checkpoint_id}"
    for key, message_id in own:
        stored = transaction.records.load(message_id)
        if stored is None:
            continue
        _notify_agent(transaction, policy, goal_id, stored, said)
        is_later = int(key.rpartition(SEPARATOR)[2]) >= checkpoint.at
        if is_later and stored.record.state not in lifecycle.ENDED:
            _notify_readers(transaction, stored.record, said)
            cancel(transaction, policy, stored.record)
    return own[-1][0] if len(own) == CANCELLED_A_COMMIT_MAX else None


def cancel(transaction: Transaction, policy: Policy, record: Record) -> None:
    """Cancel a message of a goal."""
    Operations(transaction, policy).cancel(record.message_id)


def _notify_agent(transaction: Transaction, policy: Policy, goal_id: str, stored: Stored, text: str) -> None:
    """Put a part into the inbox of the agent of a message, once for each rollback."""
    body = body_of(stored.envelope.payload)
    agent_id = "" if body is None else body.agent_id
    if not agent_id.isprintable() or not agent_id or NOTIFIED.get(transaction, goal_id, agent_id):
        return
    NOTIFIED.put(transaction, True, goal_id, agent_id)  # noqa: FBT003
    part = _progress(transaction, stored.record, text)
    Inboxes(AgentOperations(transaction, policy)).notify(org_of(stored.record.queue), agent_id, part)


def _progress(transaction: Transaction, record: Record, text: str) -> Part:
    now = utc_text(transaction.wall_us * 1000)
    return Part(record.message_id, "progress", now, attempt=record.attempt, message=text)


def _notify_readers(transaction: Transaction, record: Record, text: str) -> None:
    """Add a part to the answer of a message that is about to be cancelled."""
    part = _progress(transaction, record, text)
    known = PARTS.under(transaction, record.message_id, record.attempt, limit=PARTS_MAX)
    last = int(known[-1][0].rpartition(SEPARATOR)[2]) if known else -1
    PARTS.put(transaction, [part], record.message_id, record.attempt, last + 1)


def restore(transaction: Transaction, policy: Policy, checkpoint: Checkpoint) -> None:
    """Restore the branch and the context, and send the compensations."""
    goal_id = checkpoint.goal_id
    plan, goal = ROLLBACKS.get(transaction, goal_id), goal_of(transaction, goal_id)
    if plan is None or plan.begun:
        return
    if branches.BRANCHES.get(transaction, goal_id) is not None:
        branches.undo_to(transaction, goal_id, checkpoint.graph_version)
    goal = _restored_context(transaction, checkpoint, goal, learns=plan.preserve_learning)
    goal = replace(goal, graph_version=checkpoint.graph_version)
    undoing = _send_compensations(transaction, policy, checkpoint, goal)
    STATES.put(transaction, goal, goal_id)
    ROLLBACKS.put(transaction, replace(plan, begun=True, undoing=undoing), goal_id)
    if not undoing:
        finish(transaction, policy, goal_id)


def _restored_context(transaction: Transaction, checkpoint: Checkpoint, goal: Goal, *, learns: bool) -> Goal:
    goal_id = checkpoint.goal_id
    before = CONTEXTS.get(transaction, goal_id, checkpoint.context_version)
    value: dict[str, Any] = {} if before is None else dict(before.value)
    if learns:
        current = CONTEXTS.get(transaction, goal_id, goal.context_version)
        avoided = [] if current is None else list(current.value.get("avoid_approaches", []))
        if goal.failure:
            avoided.append(goal.failure["approach"])
        value["previous_failure"] = goal.failure or {"checkpoint_id": checkpoint.checkpoint_id}
        value["avoid_approaches"] = list(dict.fromkeys(avoided))[-AVOIDED_MAX:]
    version = goal.context_version + 1
    CONTEXTS.put(transaction, GoalContext(value), goal_id, version)
    return replace(goal, context_version=version)


def _send_compensations(
    transaction: Transaction, policy: Policy, checkpoint: Checkpoint, goal: Goal
) -> list[str]:
    """One message for each effect that is undone, in reverse order; returns their ids."""
    sent: list[str] = []
    goal_id, ordering_key = checkpoint.goal_id, f"undo {new_id()}"
    for number, effect in later_effects(transaction, checkpoint):
        if not is_undone(effect) or effect.reversal is None:
            continue
        outcome = OUTCOMES.get(transaction, effect.message_id, effect.key)
        fields = {
            "type": effect.reversal["type"],
            "org_id": goal.org_id,
            "payload": effect.reversal["payload"],
            "service": effect.reversal.get("service", ""),
            "priority": 1,
            "goal_id": goal_id,
            "parent_message_id": effect.message_id,
            "ordering_key": ordering_key,
            "on_dead": "stop",
            "metadata": {
                "undoes": effect.key,
                "reversal_class": effect.reversal_class,
                "outcome": None if outcome is None else outcome.outcome,  # a long one does not fit
            },
        }
        message_id = internal.insert(transaction, policy, fields, ignores_guard=True)
        UNDOES.put(transaction, goal_id, message_id)
        EFFECTS.put(transaction, None, goal_id, number)
        if outcome is not None:
            bodies.drop(transaction, outcome.outcome_ref, effect.message_id)
        OUTCOMES.put(transaction, None, effect.message_id, effect.key)  # the step may do it again
        sent.append(message_id)
    return sent


def undone(transaction: Transaction, policy: Policy, goal_id: str, message_id: str) -> None:
    """A compensation was completed or given up. The last one ends the rollback."""
    UNDOES.put(transaction, None, message_id)
    plan = ROLLBACKS.get(transaction, goal_id)
    if plan is None or message_id not in plan.undoing:
        return
    left = [one for one in plan.undoing if one != message_id]
    ROLLBACKS.put(transaction, replace(plan, undoing=left), goal_id)
    if not left and plan.begun:
        finish(transaction, policy, goal_id)


def resume(transaction: Transaction, policy: Policy, goal_id: str, accepted: Collection[str]) -> None:
    """Replay compensations that have failed.

    The compensation of an accepted effect, and one that an operator has purged, is given up instead.
    """
    plan = ROLLBACKS.get(transaction, goal_id)
    for message_id in [] if plan is None else plan.undoing:
        stored = transaction.records.load(message_id)
        if stored is None:
            undone(transaction, policy, goal_id, message_id)
        elif stored.record.state in ("DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED"):
            body = body_of(stored.envelope.payload)
            if body is not None and body.metadata.get("undoes") in accepted:
                ordering.leave(transaction, stored.record)
                undone(transaction, policy, goal_id, message_id)
            else:
                replay(transaction, message_id)


def replay(transaction: Transaction, message_id: str) -> None:
    """Queue an ended message again, as a new attempt with all its retries."""
    stored = transaction.records.load(message_id)
    if stored is None:
        return
    [step] = transaction.apply(ByIds((message_id,)), lifecycle.replay)
    body = body_of(stored.envelope.payload)
    if body is not None and body.ordering_key:
        org_id = step.record.queue.partition(":")[2]
        stops = body.on_dead == "stop"
        ordering.rejoin(transaction, step.record, org_id, body.ordering_key, stops=stops)
    line = GOAL_OF.get(transaction, message_id)
    if line is not None:
        OPEN.put(transaction, True, line, message_id)  # noqa: FBT003


def finish(transaction: Transaction, policy: Policy, goal_id: str) -> None:
    """Everything is undone: the goal is ACTIVE again."""
    plan, goal = ROLLBACKS.get(transaction, goal_id), goal_of(transaction, goal_id)
    ROLLBACKS.put(transaction, None, goal_id)
    NOTIFIED.drop_under(transaction, goal_id)
    active = replace(goal, state="ACTIVE")
    STATES.put(transaction, active, goal_id)
    if plan is None:
        return
    said = f"goal {goal_id} was rolled back to checkpoint {plan.checkpoint_id}"
    transaction.emit(
        "alert", f"org:{goal.org_id}", error_type="RolledBack", error=said, detail={"goal_id": goal_id}
    )
    for message_id in plan.resumes:
        record = transaction.records.get(message_id)
        if record is not None and record.state in ("DEAD_LETTER", "QUARANTINED"):
            replay(transaction, message_id)
    for message_id in plan.resubmits:
        _submit_again(transaction, policy, message_id, goal, plan)


def _submit_again(
    transaction: Transaction, policy: Policy, message_id: str, goal: Goal, plan: Rollback
) -> None:
    """Submit a root message of a restarted goal as a new message."""
    stored = transaction.records.load(message_id)
    body = None if stored is None else body_of(stored.envelope.payload)
    if stored is None or body is None:
        return
    payload = msgspec.json.decode(bodies.payload_of(transaction, body))
    context = bodies.context_of(transaction, body)
    fields = {
        "type": stored.envelope.type,
        "org_id": goal.org_id,
        "payload": {**payload, **plan.modifications},
        "priority": stored.record.priority,
        "goal_id": body.goal_id,
        "task_id": body.task_id,
        "agent_id": body.agent_id,
        "user_id": body.user_id,
        "created_by": body.created_by,
        "service": body.service,
        "context": body.context if context is None else msgspec.json.decode(context),
        "metadata": body.metadata,
        "max_retries": stored.record.max_retries,
    }
    new = internal.insert(transaction, policy, fields)
    join_goal(transaction, goal.org_id, body, new)
