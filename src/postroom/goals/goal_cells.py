"""The named values that goals keep in the store of their engine, by kind."""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from postroom.core.goals.advice import Question, QuestionKind, ReversalClass, Tally
from postroom.core.goals.conflicts import Operation
from postroom.engine.messages import Body
from postroom.engine.rules.cells import Kind, joined
from postroom.stores.transaction import Transaction

GoalStateName: TypeAlias = Literal["ACTIVE", "MERGING", "COMPLETED", "FAILED", "ROLLING_BACK"]
DecisionState: TypeAlias = Literal["asked", "waiting", "decided"]
DecidedBy: TypeAlias = Literal["", "rule", "learned", "adviser", "person", "timeout"]


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A goal that was started."""

    org_id: str
    created_us: int
    state: GoalStateName = "ACTIVE"
    ended_us: int = 0
    context_version: int = 0
    checkpoints: int = 0
    """The number of the last checkpoint."""
    effects: int = 0
    """The number of the last effect."""
    graph_version: int = 0
    """How many changes its branch has in a graph outside the ledger."""
    tried: list[str] = []
    """The recovery tools that were used, in order."""
    rollbacks: int = 0
    failure: dict[str, Any] = {}
    """The last step that ended in the dead letters."""
    restarts: int = 0


class GoalContext(msgspec.Struct, frozen=True):
    """One version of the context of a goal."""

    value: dict[str, Any]


class Checkpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A point that a goal can be rolled back to."""

    checkpoint_id: str
    goal_id: str
    reason: str
    created_us: int
    at: int = 0
    """Messages with a number from here on are later."""
    effects: int = 0
    """Effects with a larger number are later."""
    graph_version: int = 0
    context_version: int = 0
    message_id: str = ""


class GoalEffect(msgspec.Struct, frozen=True, omit_defaults=True):
    """An effect of a message of a goal."""

    message_id: str
    key: str
    reversal_class: ReversalClass | Literal[""]
    """Empty until the adviser is asked, which is when a rollback needs to know."""
    reversal: dict[str, Any] | None = None
    is_open: bool = False
    """Whether its handler gave no class, so that a reversal may be looked for."""
    decision_id: str = ""
    """The decision about its reversal."""


class Rollback(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rollback that is under way."""

    checkpoint_id: str
    preserve_learning: bool
    accepted: list[str] = []
    undoing: list[str] = []
    """Compensations that have not completed yet."""
    resumes: list[str] = []
    """Messages that are replayed when the rollback is done."""
    resubmits: list[str] = []
    """Root messages that are submitted again when the rollback is done: the goal is restarted."""
    modifications: dict[str, Any] = {}
    """Changes of their payloads."""
    begun: bool = False
    """Whether everything before the compensations is done."""


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """A question with its answer."""

    decision_id: str
    kind: QuestionKind
    question: Question
    org_id: str
    created_us: int
    state: DecisionState = "asked"
    choice: str = ""
    confidence: float = 0.0
    reasoning: str = ""
    by: DecidedBy = ""
    decided_us: int = 0
    deadline_us: int = 0
    subject: dict[str, Any] = {}
    """What the decision is about: goal_id, message_id, node_id, ..."""
    arguments: dict[str, Any] = {}
    proposed: str = ""
    """What the adviser or the rules propose to a person."""


class LearnedRule(msgspec.Struct, frozen=True):
    """A rule that is in force: a decision that is taken without asking, or messages that are held."""

    rule_id: str
    org_id: str
    kind: QuestionKind
    pattern: str
    choice: str
    learned_us: int
    service: str = ""
    """The service of the messages that are held; empty for any."""
    payload: dict[str, Any] = {}
    """What the payloads of held messages have in common."""
    held: int = 0
    """How many messages it holds."""


class Look(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the look at new dead letters is."""

    due_us: int = 0
    """When workers look again."""
    since_us: int = 0
    until_us: int = 0
    """The times of dead letters that this round counts; 0 between two rounds."""
    place: int = 0
    """The number of the last dead letter that this round has looked at."""


class SeenPattern(msgspec.Struct, frozen=True, omit_defaults=True):
    """Dead letters of one type and error type."""

    count: int = 0
    """Since the last question."""
    last_us: int = 0
    message_ids: list[str] = []
    asked_us: int = 0


class Active(msgspec.Struct, frozen=True):
    """An operation that is under way, as long as its lease lives."""

    message_id: str
    org_id: str
    lease: int
    operation: Operation
    since_us: int
    is_effect: bool = False
    """Whether it is an effect on a named target, and ends with it."""


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that waits for the operation of another one."""

    message_id: str
    other: str
    kind: str
    what: str
    merges: bool = False
    """Whether it takes over the result of the other one."""
    asked: bool = False
    """Whether nobody has decided yet what happens to it."""
    decision_id: str = ""
    """The question that is open then."""


STATES: Final = Kind("goal.state", Goal)
IMPLICIT: Final = Kind("goal.implicit", bool)
"""Organization, goal -> True: a save started the goal, until it ends or somebody starts it."""
CONTEXTS: Final = Kind("goal.context", GoalContext)
"""Goal, version -> context."""
CHECKPOINTS: Final = Kind("goal.checkpoint", Checkpoint)
"""Goal, number -> checkpoint."""
MESSAGES: Final = Kind("goal.message", str)
"""Goal, number of the message -> message id."""
GOAL_OF: Final = Kind("goal.of", str)
"""Message id -> goal."""
OPEN: Final = Kind("goal.open", bool)
"""Goal, task, message id -> True, until the message ends."""
EFFECTS: Final = Kind("goal.effect", GoalEffect)
"""Goal, number -> effect."""
ROLLBACKS: Final = Kind("goal.rollback", Rollback)
NOTIFIED: Final = Kind("goal.told", bool)
"""Goal, agent -> True: the agent was notified of the rollback that is under way."""
UNDOES: Final = Kind("goal.undoes", str)
"""Message id of a compensation -> goal."""
USED: Final = Kind("goal.used", bool)
"""Goal, decision or agent -> True: the recovery tool was used, or the alternative agent spawned."""
PROMPTS: Final = Kind("goal.prompt", list[str])
"""Organization, agent -> additions to its prompt."""
DECISIONS: Final = Kind("goal.decision", Decision)
PENDING: Final = Kind("goal.pending", bool)
"""Decision -> True, until it is decided."""
CHOICES: Final = Kind("goal.choice", str)
"""Goal, node, property -> the side that a merge takes."""
TALLIES: Final = Kind("goal.tally", Tally)
"""Organization, kind, pattern -> how often the same choice was made in a row."""
RULES: Final = Kind("goal.rule", LearnedRule)
"""Organization, kind, pattern -> learned rule."""
LOOKS: Final = Kind("goal.look", Look)
PATTERNS: Final = Kind("goal.pattern", SeenPattern)
"""Organization, type, error type -> dead letters."""
ACTIVE: Final = Kind("conflict.active", Active)
"""Message id, and the target of an effect -> operation."""
ACTIVE_ON: Final = Kind("conflict.on", bool)
"""Organization, what it works on, the key of the operation in `ACTIVE` -> True."""
WAITING: Final = Kind("conflict.waiting", Waiting)
"""Message id -> what it waits for."""
WAITERS: Final = Kind("conflict.waiter", str)
"""Message id of an active operation, message id of a waiter -> message id of the waiter."""
RULINGS: Final = Kind("conflict.ruling", str)
"""Message id, message id of the other operation -> the choice for the first message."""


def join_goal(transaction: Transaction, org_id: str, body: Body, message_id: str) -> None:
    """Count a message that names a goal as one of the goal, when that was started."""
    goal = STATES.get(transaction, body.goal_id)
    if goal is None or goal.org_id != org_id or goal.ended_us:
        return
    record = transaction.records.get(message_id)
    if record is None:
        return
    MESSAGES.put(transaction, message_id, body.goal_id, record.seq)
    GOAL_OF.put(transaction, joined(body.goal_id, body.task_id), message_id)
    OPEN.put(transaction, True, body.goal_id, body.task_id, message_id)  # noqa: FBT003
