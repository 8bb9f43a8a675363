"""The verbs of goals, the knowledge graph, decisions and conflicts. All of them are for operators."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import GOAL_BYTES_MAX, Id, Name, Number, Scope, Text
from postroom.calls.verb import Route, Verb, get, post, put

GoalId = Annotated[Id, Meta(description="The id of the goal.")]
NewGoalId = Annotated[
    Text, Meta(pattern="^[^/#]+$", description="The id of the goal; without it, a new one is made.")
]
OrgId = Annotated[Name, Meta(description="Operators of all organizations only: the organization.")]
CheckpointId = Annotated[Text, Meta(description="The checkpoint, as the list of checkpoints shows it.")]
Keys = Annotated[
    tuple[Text, ...], Meta(description="Keys of effects that cannot be undone, and that stay as they are.")
]
GoalContext = Annotated[
    dict[str, Any], Meta(description="A JSON object that the messages of the goal share.")
]
NodeId = Annotated[Text, Meta(min_length=1, description="The id of the node.")]
ViewGoal = Annotated[Text, Meta(description="The goal whose branch is meant. Without it, main is.")]
ViewOrg = Annotated[
    Scope, Meta(description="Operators of all organizations only: whose node. Empty means a shared one.")
]
Edges = Annotated[
    tuple[tuple[Text, Text], ...], Meta(description="Edges to add: pairs of a label and the id of a node.")
]
MemoryScope = Annotated[
    Literal["GOAL_LOCAL", "STAGED", "IMMEDIATE"],
    Meta(
        description="For a branch. STAGED: main gets it when the goal completes. GOAL_LOCAL: it is dropped "
        "with the goal. IMMEDIATE: main gets it now."
    ),
]

# ---- goals -----------------------------------------------------------------------------------------


class ListGoals(Verb, frozen=True, kw_only=True):
    """Goals and their states."""

    route: ClassVar[Route] = get("/engine/goals", "goal.read")


class GoalAnswer(msgspec.Struct, frozen=True):
    """The goal that was started."""

    goal_id: str


class StartGoal(Verb, frozen=True, kw_only=True):
    """Start a goal, and create its graph branch, its context and its first checkpoint.

    Starting the same goal of the same organization again changes nothing.
    """

    org_id: OrgId | UnsetType = UNSET
    goal_id: NewGoalId | UnsetType = UNSET
    context: GoalContext | UnsetType = UNSET

    route: ClassVar[Route] = post("/engine/goals", "goal.change", GoalAnswer, bytes_max=GOAL_BYTES_MAX)


class OfGoal(Verb, frozen=True, kw_only=True):
    """The base of the verbs about one goal."""

    goal_id: GoalId = msgspec.field(name="id")


class ShowGoal(OfGoal, frozen=True, kw_only=True):
    """Show the status of a goal."""

    route: ClassVar[Route] = get("/engine/goals/{id}", "goal.read")


class ListCheckpoints(OfGoal, frozen=True, kw_only=True):
    """The checkpoints of a goal."""

    route: ClassVar[Route] = get("/engine/goals/{id}/checkpoints", "goal.read")


class ListEffects(OfGoal, frozen=True, kw_only=True):
    """The effects of a goal, and what undoes each of them."""

    route: ClassVar[Route] = get("/engine/goals/{id}/effects", "goal.read")


class TakeCheckpoint(OfGoal, frozen=True, kw_only=True):
    """Take a checkpoint of a goal now."""

    reason: Annotated[Text, Meta(description="Why it is taken.")] = "manual"

    route: ClassVar[Route] = post("/engine/goals/{id}/checkpoints", "goal.change")


class CompleteGoal(OfGoal, frozen=True, kw_only=True):
    """Complete a goal: merge its branch into main, and end it.

    The goal is MERGING while a person has to decide a conflict. Then it completes by itself.
    """

    route: ClassVar[Route] = post("/engine/goals/{id}/complete", "goal.change")


class FailGoal(OfGoal, frozen=True, kw_only=True):
    """End a goal as failed: drop its branch, and cancel its open messages."""

    reason: Annotated[Text, Meta(description="Why it failed.")] = ""

    route: ClassVar[Route] = post("/engine/goals/{id}/fail", "goal.change")


class RollBackGoal(OfGoal, frozen=True, kw_only=True):
    """Roll a goal back to a checkpoint, or resume a rollback that was interrupted.

    Workers undo the effects. The goal is ROLLING_BACK until they have.
    """

    checkpoint_id: CheckpointId
    preserve_learning: Annotated[
        bool, Meta(description="Whether the context of the goal keeps what failed.")
    ] = True
    accept_irreversible: Keys = ()

    route: ClassVar[Route] = post("/engine/goals/{id}/rollback", "goal.rollback")


class ContextAnswer(msgspec.Struct, frozen=True):
    """The context of a goal. The next change names this version."""

    context: dict[str, Any]
    version: int


class ReadContext(OfGoal, frozen=True, kw_only=True):
    """The context of a goal, and its version."""

    route: ClassVar[Route] = get("/engine/goals/{id}/context", "goal.read", ContextAnswer)


class ContextVersion(msgspec.Struct, frozen=True):
    """The version of a context that was stored."""

    version: int


class SetContext(OfGoal, frozen=True, kw_only=True):
    """Replace the context of a goal by compare-and-set on its version. Returns the new version."""

    context: GoalContext
    expect_version: Annotated[Number, Meta(description="The version that was read.")]

    route: ClassVar[Route] = put(
        "/engine/goals/{id}/context", "goal.change", ContextVersion, bytes_max=GOAL_BYTES_MAX
    )


# ---- the knowledge graph ---------------------------------------------------------------------------


class OfNode(Verb, frozen=True, kw_only=True):
    """The base of the verbs about one node, as a goal, an organization or the application sees it."""

    node_id: NodeId
    goal_id: ViewGoal | UnsetType = UNSET
    org_id: ViewOrg | UnsetType = UNSET


class ReadNode(OfNode, frozen=True, kw_only=True):
    """A node of the knowledge graph with its properties, edges and version."""

    route: ClassVar[Route] = get("/engine/graph/node", "goal.read")


class SaveNode(OfNode, frozen=True, kw_only=True):
    """Save a node: these properties replace those it had, and these edges are added."""

    properties: Annotated[dict[str, Any], Meta(description="All properties of the node.")]
    edges: Edges = ()
    scope: MemoryScope = "STAGED"

    route: ClassVar[Route] = post("/engine/graph/node", "goal.change", bytes_max=GOAL_BYTES_MAX)


class UpdateNode(OfNode, frozen=True, kw_only=True):
    """Change some properties of a node."""

    changes: Annotated[dict[str, Any], Meta(description="Properties to change. null removes one.")]
    edges: Edges = ()
    scope: MemoryScope = "STAGED"

    route: ClassVar[Route] = post("/engine/graph/node/update", "goal.change", bytes_max=GOAL_BYTES_MAX)


# ---- decisions and conflicts -----------------------------------------------------------------------


class ListDecisions(Verb, frozen=True, kw_only=True):
    """Decisions that wait for a person."""

    route: ClassVar[Route] = get("/engine/decisions", "decision.read")


class ShowDecision(Verb, frozen=True, kw_only=True):
    """A decision and its question."""

    decision_id: Annotated[Id, Meta(description="The id of the decision.")] = msgspec.field(name="id")

    route: ClassVar[Route] = get("/engine/decisions/{id}", "decision.read")


class Answer(ShowDecision, frozen=True, kw_only=True):
    """Take a decision in the place of a person. It cannot be taken back."""

    choice: Annotated[Text, Meta(description="One of the options of the decision.")]

    route: ClassVar[Route] = post("/engine/decisions/{id}/answer", "decision.answer")


class ListRules(Verb, frozen=True, kw_only=True):
    """Rules that are in force: those learned from decisions, and those that hold messages."""

    route: ClassVar[Route] = get("/engine/rules", "decision.read")


class ListHeld(Verb, frozen=True, kw_only=True):
    """The messages that a rule holds."""

    rule_id: Annotated[Id, Meta(description="The id of the rule.")] = msgspec.field(name="id")

    route: ClassVar[Route] = get("/engine/rules/{id}/held", "decision.read")


class ForgetRule(ListHeld, frozen=True, kw_only=True):
    """Remove a rule. A worker queues the messages that it held."""

    route: ClassVar[Route] = post("/engine/rules/{id}/forget", "decision.answer")


class ListConflicts(Verb, frozen=True, kw_only=True):
    """Operations that are under way."""

    route: ClassVar[Route] = get("/engine/conflicts", "goal.read")
