"""`client.goals`, `client.graph` and `client.decisions`: what operators do with goals."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from msgspec import UNSET

from postroom.calls import goals
from postroom.calls.goals import ContextAnswer, GoalAnswer
from postroom.client.calls import CHANGE_TIMEOUT_S, HttpClient
from postroom.errors import UnknownNode

Ids: TypeAlias = list[str]
Rows: TypeAlias = list[dict[str, Any]]
Edges: TypeAlias = Iterable[tuple[str, str]]


class GoalCalls:
    """`client.goals`, as `engine.goals`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def start(
        self,
        org_id: str | None = None,
        goal_id: str | None = None,
        *,
        context: Mapping[str, Any] | None = None,
    ) -> str:
        """Start a goal, by default of the token's organization; returns its id."""
        verb = goals.StartGoal(
            org_id=UNSET if org_id is None else org_id,
            goal_id=UNSET if goal_id is None else goal_id,
            context=UNSET if context is None else dict(context),
        )
        retries = 0 if goal_id is None else None  # a repeated start without an id is another goal
        return self._client.converted(self._client.call(verb, retries=retries), GoalAnswer).goal_id

    def complete(self, goal_id: str) -> dict[str, Any]:
        """Merge the branch into main and end the goal; returns its status."""
        return dict(self._client.call(goals.CompleteGoal(goal_id=goal_id), timeout_s=CHANGE_TIMEOUT_S))

    def fail(self, goal_id: str, reason: str = "") -> dict[str, Any]:
        """End a goal without a merge; returns its status."""
        return dict(self._client.call(goals.FailGoal(goal_id=goal_id, reason=reason)))

    def rollback(
        self, checkpoint_id: str, preserve_learning: bool = True, accept_irreversible: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Roll a goal back to a checkpoint; returns its status. Calling it again resumes the rollback."""
        verb = goals.RollBackGoal(
            goal_id=checkpoint_id.rpartition("#")[0],
            checkpoint_id=checkpoint_id,
            preserve_learning=preserve_learning,
            accept_irreversible=tuple(accept_irreversible),
        )
        return dict(self._client.call(verb, timeout_s=CHANGE_TIMEOUT_S))

    def list(self) -> Rows:
        """Goals and their states."""
        return list(self._client.call(goals.ListGoals())["goals"])

    def status(self, goal_id: str) -> dict[str, Any]:
        """The status of a goal."""
        return dict(self._client.call(goals.ShowGoal(goal_id=goal_id)))

    def checkpoints(self, goal_id: str) -> Rows:
        """The checkpoints of a goal."""
        return list(self._client.call(goals.ListCheckpoints(goal_id=goal_id))["checkpoints"])

    def effects(self, goal_id: str) -> Rows:
        """The effects of a goal, the oldest first, and what undoes each of them."""
        return list(self._client.call(goals.ListEffects(goal_id=goal_id))["effects"])

    def checkpoint(self, goal_id: str, reason: str = "manual") -> dict[str, Any]:
        """Take a checkpoint now."""
        return dict(self._client.call(goals.TakeCheckpoint(goal_id=goal_id, reason=reason), retries=0))

    def context(self, goal_id: str) -> tuple[dict[str, Any], int]:
        """The context of a goal, and its version."""
        found = self._client.call(goals.ReadContext(goal_id=goal_id))
        answer = self._client.converted(found, ContextAnswer)
        return answer.context, answer.version

    def set_context(self, goal_id: str, value: Mapping[str, Any], expect_version: int) -> int:
        """Replace the context by compare-and-set on its version. Returns the new version.

        Raises `ContextChanged`. An answer that is lost is not asked for again, because a repeated change
        would be refused.
        """
        verb = goals.SetContext(goal_id=goal_id, context=dict(value), expect_version=expect_version)
        return int(self._client.call(verb, retries=0)["version"])


class GraphView:
    """What a goal or an organization sees of the graph, as a view of `engine.graph`. Nodes are dicts."""

    def __init__(self, client: HttpClient, goal_id: str | None, org_id: str | None) -> None:
        self._client = client
        self._seen_by = {
            name: value for name, value in (("goal_id", goal_id), ("org_id", org_id)) if value is not None
        }

    def get(self, node_id: str) -> dict[str, Any] | None:
        """A node with `properties`, `edges` and `version`; None when there is none."""
        try:
            return dict(self._client.call(goals.ReadNode(node_id=node_id, **self._seen_by)))
        except UnknownNode:
            return None

    def neighbours(self, node_id: str) -> list[tuple[str, str]]:
        """The edges that leave a node, as pairs of a label and a node id."""
        node = self.get(node_id) or {}
        return [(label, to) for label, to in node.get("edges", [])]

    def save(
        self, node_id: str, properties: Mapping[str, Any], edges: Edges = (), scope: Any = "STAGED"
    ) -> dict[str, Any]:
        """Save a node: these properties replace those it had, and these edges are added."""
        verb = goals.SaveNode(
            node_id=node_id, properties=dict(properties), edges=tuple(edges), scope=scope, **self._seen_by
        )
        return dict(self._client.call(verb))

    def update(
        self, node_id: str, changes: Mapping[str, Any], scope: Any = "STAGED", edges: Edges = ()
    ) -> dict[str, Any]:
        """Change some properties of a node; None removes one. Raises `UnknownNode`."""
        verb = goals.UpdateNode(
            node_id=node_id, changes=dict(changes), edges=tuple(edges), scope=scope, **self._seen_by
        )
        return dict(self._client.call(verb))


class GraphCalls:
    """`client.graph`, as `engine.graph`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def branch(self, goal_id: str, org_id: str | None = None) -> GraphView:
        """The branch of a goal."""
        return GraphView(self._client, goal_id, org_id)

    def main(self, org_id: str | None = None) -> GraphView:
        """Main as an organization sees it, by default that of the token."""
        return GraphView(self._client, None, org_id)


class DecisionCalls:
    """`client.decisions`: for operators."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def list(self) -> Rows:
        """Decisions that wait for a person."""
        return list(self._client.call(goals.ListDecisions())["decisions"])

    def show(self, decision_id: str) -> dict[str, Any]:
        """A decision and its question."""
        return dict(self._client.call(goals.ShowDecision(decision_id=decision_id)))

    def answer(self, decision_id: str, choice: str) -> dict[str, Any]:
        """Take a decision."""
        return dict(self._client.call(goals.Answer(decision_id=decision_id, choice=choice)))

    def rules(self) -> Rows:
        """The rules that are in force, each with the number of messages that it holds."""
        return list(self._client.call(goals.ListRules())["rules"])

    def held(self, rule_id: str) -> Ids:
        """The ids of the messages that a rule holds, the oldest first."""
        return list(self._client.call(goals.ListHeld(rule_id=rule_id))["message_ids"])

    def forget(self, rule_id: str) -> None:
        """Remove a rule. A worker queues the messages that it held."""
        self._client.call(goals.ForgetRule(rule_id=rule_id))
