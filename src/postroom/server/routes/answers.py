"""Answers that hold records of the contracts, which the calls do not know."""

from typing import Literal

import msgspec

from postroom.contracts.tasks.tasks import AgentStatus, Status, TaskLine
from postroom.core.health.health import Verdict
from postroom.engine.agents.agent_operations import AgentInfo
from postroom.engine.agents.bounces import BouncedAnswer
from postroom.engine.dlq import DeadLetter
from postroom.goals.goal_cells import Active, Checkpoint, Decision, GoalEffect, LearnedRule, Waiting
from postroom.goals.goals import GoalStatus
from postroom.server.harness.harness import HarnessStatus


class LinesAnswer(msgspec.Struct, frozen=True):
    """A page of tasks. The next page begins after the last `seq`."""

    tasks: list[TaskLine]


class StatusAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of the queues. An operator also sees the loops."""

    agents: dict[str, AgentStatus]
    totals: dict[Status, int]
    harness: HarnessStatus | None = None


class HealthAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ok`, or `degraded` when messages do not flow as they should, or a part does not work.

    `parts` has the state of each part of `postroom up`, or why it does not work. `verdict` has the
    reasons for `degraded`.
    """

    status: Literal["ok", "degraded"]
    parts: dict[str, str] = {}
    verdict: Verdict | None = None


class AgentsAnswer(msgspec.Struct, frozen=True):
    """The registered agents of an organization, or of all."""

    agents: list[AgentInfo]


class BouncesAnswer(msgspec.Struct, frozen=True):
    """Answers that no agent fetched, for the users and systems that created the messages."""

    bounces: list[BouncedAnswer]


class LettersAnswer(msgspec.Struct, frozen=True):
    """A page of dead letters."""

    letters: list[DeadLetter]


class DecisionsAnswer(msgspec.Struct, frozen=True):
    """Decisions that nobody has taken yet."""

    decisions: list[Decision]


class RulesAnswer(msgspec.Struct, frozen=True):
    """Rules that are in force."""

    rules: list[LearnedRule]


class RuleAnswer(msgspec.Struct, frozen=True):
    """The rule that was removed."""

    rule_id: str


class HeldAnswer(msgspec.Struct, frozen=True):
    """The ids of messages that a rule holds."""

    message_ids: list[str]


class GoalsAnswer(msgspec.Struct, frozen=True):
    """Goals and how they stand."""

    goals: list[GoalStatus]


class CheckpointsAnswer(msgspec.Struct, frozen=True):
    """The checkpoints of a goal."""

    checkpoints: list[Checkpoint]


class EffectsAnswer(msgspec.Struct, frozen=True):
    """The effects of a goal."""

    effects: list[GoalEffect]


class ConflictsAnswer(msgspec.Struct, frozen=True):
    """Operations that are under way, and messages that wait for them."""

    active: list[Active]
    waiting: list[Waiting]
