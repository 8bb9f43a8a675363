"""The progress of a goal through its messages: open tasks, checkpoints, effects, failed steps.

Rule 1: a checkpoint is taken in the transaction of its cause: the completion of a message that ran longer
        than `LONG_S`, the end of the last open message of a task, or the intent of an irreversible effect.
Rule 2: only goals that were started are tracked. A message whose goal was not named costs nothing here.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec.structs import replace

from postroom.core.goals import advice
from postroom.core.goals.advice import ReversalClass, checked_reversal
from postroom.engine.message_input import Prepared
from postroom.engine.messages import Body, body_of
from postroom.engine.rules.cells import REASSIGNED, SEPARATOR, Effect
from postroom.engine.rules.policy import Policy
from postroom.errors import GoalEnded, GuardTripped
from postroom.goals import internal, rollback
from postroom.goals.goal_cells import (
    CHECKPOINTS,
    EFFECTS,
    GOAL_OF,
    MESSAGES,
    OPEN,
    STATES,
    UNDOES,
    Checkpoint,
    Goal,
    GoalEffect,
    join_goal,
)
from postroom.goals.graph import branches
from postroom.message import Record, Stored
from postroom.stores.transaction import Transaction

LONG_S: Final = 10.0
CHECKPOINTS_MAX: Final = 1_000
ERROR_CHARS_MAX: Final = 1_000
MICROS_PER_S: Final = 1_000_000
DEAD: Final = ("DEAD_LETTER", "QUARANTINED")


# ---- messages --------------------------------------------------------------------------------------


def check(transaction: Transaction, messages: Sequence[Prepared]) -> None:
    """Refuse new messages of a goal that is being rolled back. Another organization may use the same id."""
    for goal_id, org_id in {(one.body.goal_id, one.org_id) for one in messages if one.body.in_goal}:
        goal = STATES.get(transaction, goal_id)
        if goal is not None and goal.org_id == org_id and goal.state == "ROLLING_BACK":
            raise GoalEnded(goal_id, goal.state, "submit to")


def accepted(transaction: Transaction, message: Prepared, message_id: str) -> None:
    """A message was accepted."""
    if message.body.in_goal:
        join_goal(transaction, message.org_id, message.body, message_id)


def completed(transaction: Transaction, policy: Policy, message_id: str, body: Body, _result: bytes) -> None:
    """A message was completed."""
    if body.in_goal:
        step_completed(transaction, policy, message_id)


def step_completed(transaction: Transaction, policy: Policy, message_id: str) -> None:
    """A message of a goal, or a compensation, was completed."""
    undone = UNDOES.get(transaction, message_id)
    if undone is not None:
        rollback.undone(transaction, policy, undone, message_id)
    line = GOAL_OF.get(transaction, message_id)
    record = None if line is None else transaction.records.get(message_id)
    if line is None or record is None:
        return
    took_us = record.ended_us - record.claimed_us
    reason = "operation" if took_us > LONG_S * MICROS_PER_S else ""
    _close(transaction, line, message_id, reason)


def ended(transaction: Transaction, policy: Policy, record: Record) -> None:
    """A message of a goal, or a compensation, ended without a result."""
    undone = UNDOES.get(transaction, record.message_id)
    if undone is not None and record.state in DEAD:
        said = f"compensation {record.message_id} of goal {undone} failed: the rollback waits for a resume"
        transaction.alert("CompensationFailed", said, record.queue)
    line = GOAL_OF.get(transaction, record.message_id)
    if line is None:
        return
    _close(transaction, line, record.message_id, "")
    goal_id = line.partition(SEPARATOR)[0]
    goal = STATES.get(transaction, goal_id)
    if record.state in DEAD and goal is not None and goal.state == "ACTIVE":
        failure = _failure(transaction.records.load(record.message_id))
        STATES.put(transaction, replace(goal, failure=failure), goal_id)
        if failure.get("error_type") != GuardTripped.__name__:  # every recovery tool would spend more
            internal.go_on(
                transaction, policy, goal.org_id, "failed_step", goal_id=goal_id, message_id=record.message_id
            )


def reopened(transaction: Transaction, message_id: str) -> None:
    """A message of a goal is replayed."""
    line = GOAL_OF.get(transaction, message_id)
    if line is not None:
        OPEN.put(transaction, True, line, message_id)  # noqa: FBT003


def forgotten(transaction: Transaction, record: Record) -> None:
    """A message is no longer kept."""
    line = GOAL_OF.get(transaction, record.message_id)
    if line is not None:
        MESSAGES.put(transaction, None, line.partition(SEPARATOR)[0], record.seq)
        OPEN.put(transaction, None, line, record.message_id)
        GOAL_OF.put(transaction, None, record.message_id)
        REASSIGNED.put(transaction, None, record.message_id)


def _close(transaction: Transaction, line: str, message_id: str, reason: str) -> None:
    """A message is no longer open. The last one of its task is a task boundary."""
    goal_id, _, task_id = line.partition(SEPARATOR)
    was_open = OPEN.get(transaction, line, message_id)
    OPEN.put(transaction, None, line, message_id)
    if was_open and not OPEN.under(transaction, goal_id, task_id, limit=1):
        reason = reason or "task"
    if reason:
        goal = STATES.get(transaction, goal_id)
        if goal is not None and goal.state == "ACTIVE":
            take(transaction, goal_id, goal, reason, message_id)


def _failure(stored: Stored | None) -> dict[str, Any]:
    """What is known about a step that failed for good."""
    if stored is None:
        return {}
    errors = [event for event in stored.history if event.error]
    last = errors[-1] if errors else None
    body = body_of(stored.envelope.payload)
    approach = "" if body is None else body.metadata.get("approach", "")
    said = f"{stored.envelope.type}: {last.error if last else stored.record.state}"
    return {
        "message_id": stored.record.message_id,
        "type": stored.envelope.type,
        "task_id": "" if body is None else body.task_id,
        "agent_id": "" if body is None else body.agent_id,
        "error_type": last.error_type if last else stored.record.state,
        "error": last.error[:ERROR_CHARS_MAX] if last else "",
        "attempts": stored.record.attempt,
        "approach": (str(approach) or said)[:ERROR_CHARS_MAX],
    }


# ---- checkpoints -----------------------------------------------------------------------------------


def take(transaction: Transaction, goal_id: str, goal: Goal, reason: str, message_id: str = "") -> Checkpoint:
    """Take a checkpoint of a goal, and note it in the graph."""
    number = goal.checkpoints + 1
    branch = branches.BRANCHES.get(transaction, goal_id)
    checkpoint = Checkpoint(
        checkpoint_id=f"{goal_id}#{number}",
        goal_id=goal_id,
        reason=reason,
        created_us=transaction.wall_us,
        at=transaction.events.take_numbers(0),
        effects=goal.effects,
        graph_version=goal.graph_version if branch is None else branch.version,
        context_version=goal.context_version,
        message_id=message_id,
    )
    CHECKPOINTS.put(transaction, checkpoint, goal_id, number)
    if number > CHECKPOINTS_MAX:  # the first one stays: it is the start of the goal
        CHECKPOINTS.put(transaction, None, goal_id, number - CHECKPOINTS_MAX + 1)
    STATES.put(transaction, replace(goal, checkpoints=number), goal_id)
    if branch is not None:
        note(transaction, goal_id, goal, checkpoint=checkpoint.checkpoint_id, reason=reason)
    return checkpoint


def note(transaction: Transaction, goal_id: str, goal: Goal, **facts: Any) -> None:
    """Write the state of a goal into the graph in the ledger, as the node `goal:<goal_id>`.

    This begins no version of main: every branch sees the current state, and old states are not kept.
    """
    node_id = f"goal:{goal_id}"
    before = branches.MAIN.get(transaction, goal.org_id, node_id)
    known = before or branches.Node(node_id, org_id=goal.org_id)
    properties = {**known.properties, "state": goal.state, **facts}
    node = replace(known, properties=properties, version=known.version + 1)
    branches.put_node(transaction, node, is_new=before is None)


# ---- effects ---------------------------------------------------------------------------------------


def effect_begun(
    transaction: Transaction,
    policy: Policy,
    message_id: str,
    key: str,
    intent: Effect,
    reversal_class: ReversalClass | None,
) -> Effect:
    """An effect of a message begins. It gets a number when the message has a live goal.

    Without a class, a model is asked about an effect with a reversal, once a rollback needs to know.
    """
    line = GOAL_OF.get(transaction, message_id)
    goal_id = "" if line is None else line.partition(SEPARATOR)[0]
    goal = STATES.get(transaction, goal_id) if goal_id else None
    if goal is None or goal.ended_us:
        return intent
    undo = checked_reversal(intent.reversal)
    given: ReversalClass | Literal[""] = reversal_class or ""
    if not given and not (policy.has_model and undo is not None):
        asked = advice.question("reversal_class", {"key": key, "has_reversal": undo is not None})
        given = advice.advise(asked).choice  # type: ignore[assignment]
    if given in ("IRREVERSIBLE", ""):
        take(transaction, goal_id, goal, "irreversible", message_id)
        goal = STATES.get(transaction, goal_id) or goal
    number = goal.effects + 1
    STATES.put(transaction, replace(goal, effects=number), goal_id)
    effect = GoalEffect(message_id, key, given, undo, is_open=reversal_class is None)
    EFFECTS.put(transaction, effect, goal_id, number)
    return replace(intent, number=number)


def effect_dropped(transaction: Transaction, message_id: str, effect: Effect) -> None:
    """An effect did not happen."""
    line = GOAL_OF.get(transaction, message_id)
    if line is not None and effect.number:
        EFFECTS.put(transaction, None, line.partition(SEPARATOR)[0], effect.number)
