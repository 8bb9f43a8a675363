"""The verbs of goals, decisions and conflicts. All of them are for operators."""

from typing import ClassVar

import msgspec

from postroom.calls.fields import Id, Text
from postroom.calls.verb import Route, Verb, get, post


class ListGoals(Verb, frozen=True, kw_only=True):
    """Goals and their states."""

    route: ClassVar[Route] = get("/engine/goals", "goal.read")


class ShowGoal(Verb, frozen=True, kw_only=True):
    """Show the status of a goal."""

    goal_id: Id = msgspec.field(name="id")

    route: ClassVar[Route] = get("/engine/goals/{id}", "goal.read")


class ListCheckpoints(ShowGoal, frozen=True, kw_only=True):
    """The checkpoints of a goal."""

    route: ClassVar[Route] = get("/engine/goals/{id}/checkpoints", "goal.read")


class ListDecisions(Verb, frozen=True, kw_only=True):
    """Decisions that wait for a person."""

    route: ClassVar[Route] = get("/engine/decisions", "decision.read")


class ShowDecision(Verb, frozen=True, kw_only=True):
    """A decision and its question."""

    decision_id: Id = msgspec.field(name="id")

    route: ClassVar[Route] = get("/engine/decisions/{id}", "decision.read")


class Answer(ShowDecision, frozen=True, kw_only=True):
    """Take a decision.

    `choice` is one of the options of the decision.
    """

    choice: Text

    route: ClassVar[Route] = post("/engine/decisions/{id}/answer", "decision.answer")


class ListRules(Verb, frozen=True, kw_only=True):
    """Rules that are in force: those learned from decisions, and those that hold messages."""

    route: ClassVar[Route] = get("/engine/rules", "decision.read")


class ListHeld(Verb, frozen=True, kw_only=True):
    """The messages that a rule holds."""

    rule_id: Id = msgspec.field(name="id")

    route: ClassVar[Route] = get("/engine/rules/{id}/held", "decision.read")


class ForgetRule(ListHeld, frozen=True, kw_only=True):
    """Remove a rule. A worker queues the messages that it held."""

    route: ClassVar[Route] = post("/engine/rules/{id}/forget", "decision.answer")


class ListConflicts(Verb, frozen=True, kw_only=True):
    """Operations that are under way."""

    route: ClassVar[Route] = get("/engine/conflicts", "goal.read")
