"""The bodies, queries and replies of the routes of the global queue.

Rule 1: a new message may have fields that are not listed here, because a newer minor version of the format
        may add some. The contract checks every field.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.contracts.tasks.task_input import DELAY_S_MAX, KEY_CHARS_MAX, RETRIES_MAX
from postroom.core.lifecycle.versions import CURRENT_VERSION
from postroom.core.tokens.token_rules import TOKENS_MAX
from postroom.engine.agents.agent_operations import OPEN_REQUESTS_MAX, AgentInfo
from postroom.engine.agents.bounces import BOUNCES_A_READ_MAX, BouncedAnswer
from postroom.engine.dlq import LETTERS_MAX, DeadLetter
from postroom.goals.goal_cells import Active, Checkpoint, Decision, Waiting
from postroom.goals.goals import GoalStatus
from postroom.message import Durability, State
from postroom.server.routes.task_schemas import (
    ENQUEUE_MANY_MAX,
    WAIT_S_MAX,
    Id,
    Name,
    Number,
    Page,
    Scope,
    Text,
)

LETTERS_DEFAULT = 100

Key = Annotated[str, Meta(min_length=1, max_length=KEY_CHARS_MAX)]
Priority = Annotated[int, Meta(ge=0, le=3)]
BounceKey = Annotated[str, Meta(max_length=160, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]{1,18}$")]
InboxKey = Annotated[str, Meta(pattern="^[0-9]{1,18}$")]


class Creator(msgspec.Struct, frozen=True):
    """Who created a message. An agent's token creates as this agent only."""

    type: Literal["user", "agent", "system"]
    id: Text


class NewMessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /engine/messages`: the keywords of `Engine.submit`. An agent's token gives `org_id`."""

    type: Text
    payload: dict[str, Any]
    org_id: Name | None = None
    priority: Priority = 2
    message_id: Text | None = None
    goal_id: Text | None = None
    task_id: Text | None = None
    parent_message_id: Text = ""
    created_by: Creator | None = None
    user_id: Text = ""
    agent_id: Text = ""
    expires_at: str | None = None
    delay_s: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] = 0.0
    max_retries: Annotated[int, Meta(ge=0, le=RETRIES_MAX)] | None = None
    version: str = CURRENT_VERSION
    context: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    resource_limits: dict[str, Any] | None = None
    token_needs: dict[str, Any] | None = None
    model_preferences: list[str] | None = None
    tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0
    models: list[str] | None = None
    service: Text = ""
    idempotency_key: Key | None = None
    ordering_key: Key | None = None
    on_dead: Literal["continue", "stop"] = "continue"
    traceparent: Text = ""
    tracestate: str = ""
    durability: Durability | None = None
    operation: dict[str, Any] | None = None


class NewMessagesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/messages`: several messages, all or none."""

    messages: Annotated[list[NewMessageBody], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]


Session = Annotated[int, Meta(ge=1)]


class RequestBody(NewMessageBody, frozen=True, kw_only=True):
    """`POST /engine/request`: a message, and how long to wait for its answer.

    With a `message_id` the request can be repeated: it waits for the same message again.
    """

    timeout_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = WAIT_S_MAX
    session: Session | None = None


class RegisterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/agents`: the token names the agent and its organization."""

    agent_id: Name | None = None


class AckBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/agents/{id}/ack`: the agent has the last parts of these answers."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=OPEN_REQUESTS_MAX)]
    session: Session | None = None


class SendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/agents/{id}/messages`: a message to another agent of the organization."""

    to: Name
    payload: Any
    message_id: Text | None = None
    priority: Priority = 2
    session: Session | None = None


class InboxDoneBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/agents/{id}/inbox/done`: the agent has acted on these messages."""

    keys: Annotated[list[InboxKey], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]
    session: Session | None = None


class AgentsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /engine/agents`."""

    org_id: Name | UnsetType = UNSET


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call for an agent. `session` is that of its registration; without it, the newest one is used."""

    session: Session | UnsetType = UNSET


class InboxQuery(SessionQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of an inbox: messages behind the one with the key `after`."""

    after: InboxKey | UnsetType = UNSET


class BouncesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of bounces: those behind the key `after`, of a creator such as `user:ada`."""

    org_id: Name | UnsetType = UNSET
    created_by: Annotated[Text, Meta(pattern="^(user|system|agent):")] | None = None
    after: BounceKey | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=BOUNCES_A_READ_MAX)] = BOUNCES_A_READ_MAX


class BouncesDoneBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/bounces/done`: the creator has these bounces."""

    keys: Annotated[list[BounceKey], Meta(min_length=1, max_length=BOUNCES_A_READ_MAX)]


class BouncesAnswer(msgspec.Struct, frozen=True):
    """Answers that no agent fetched, for the users and systems that created the messages."""

    bounces: list[BouncedAnswer]


class BouncesDoneAnswer(msgspec.Struct, frozen=True):
    """The bounces that were there and are removed now."""

    keys: list[str]


class RegisteredAnswer(msgspec.Struct, frozen=True):
    """A registration. Earlier registrations of the agent are no longer valid."""

    org_id: str
    agent_id: str
    session: int
    epoch: int


class AgentAnswer(msgspec.Struct, frozen=True):
    """The agent that the request was about."""

    org_id: str
    agent_id: str


class RequestAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. A streamed answer is joined."""

    message_id: str
    state: str
    result: Any
    errors: list[dict[str, Any]]
    epoch: int = 0
    """The coordinator that hands the answer over; 0 for an operator."""


class AgentsAnswer(msgspec.Struct, frozen=True):
    """The registered agents of an organization, or of all."""

    agents: list[AgentInfo]


class InboxLine(msgspec.Struct, frozen=True):
    """A message in an inbox. `key` is for `inbox/done`."""

    key: str
    message_id: str
    sender: str
    payload: Any
    is_bounce: bool
    reason: str


class InboxAnswer(msgspec.Struct, frozen=True):
    """The messages that an agent has not acted on."""

    messages: list[InboxLine]


class _Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters: by ids, or by filters."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=LETTERS_MAX)] | None = None
    org_id: Name | None = None
    type: Text | None = None
    error_type: Text | None = None
    since: str | None = None
    until: str | None = None
    limit: Annotated[int, Meta(ge=1, le=LETTERS_MAX)] = LETTERS_DEFAULT
    dry_run: bool = False
    """Change nothing, and reply with the ids only."""

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of the contract."""
        names = ("org_id", "type", "error_type", "since", "until", "limit")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class ReplayBody(_Choice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/dlq/replay`."""

    priority: Priority | None = None


class PurgeBody(_Choice, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/dlq/purge`."""


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/resume`. An empty `org_id` or `type` means all of them."""

    org_id: Scope = ""
    type: Scope = ""


class PauseBody(ResumeBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/pause`. `kill` also refuses submits and cancels running handlers."""

    kill: bool = False


class LettersQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /engine/dlq`. `after` is the id of the last dead letter of the previous page."""

    org_id: Name | UnsetType = UNSET  # not None: a query has no null
    type: Text | UnsetType = UNSET
    error_type: Text | UnsetType = UNSET
    since: str | UnsetType = UNSET
    until: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=LETTERS_MAX)] = LETTERS_DEFAULT
    after: Id | UnsetType = UNSET

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of the contract."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not UNSET}


class MessagesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /engine/messages`: an operator names the organization. `text` is searched in the message."""

    org_id: Name | UnsetType = UNSET
    state: State | UnsetType = UNSET
    type: Text = ""
    text: Text = ""
    after: Number = 0
    limit: Page = LETTERS_DEFAULT


class MessageLine(msgspec.Struct, frozen=True):
    """A message in a list."""

    seq: int
    message_id: str
    state: str
    type: str
    agent_id: str
    attempt: int
    created_at: datetime


class FoundAnswer(msgspec.Struct, frozen=True):
    """A page of messages. The next page begins after `next_after`, which is 0 at the end."""

    messages: list[MessageLine]
    next_after: int


class MessageAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message that the request was about. `duplicate`: an earlier submit has stored it."""

    message_id: str
    duplicate: bool = False


class MessagesAnswer(msgspec.Struct, frozen=True):
    """The messages that the request was about."""

    message_ids: list[str]


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Which rule holds a message, and what would release it."""

    message_id: str
    explanation: str


class LettersAnswer(msgspec.Struct, frozen=True):
    """A page of dead letters."""

    letters: list[DeadLetter]


class ScopeAnswer(msgspec.Struct, frozen=True):
    """What was paused or resumed."""

    org_id: str
    type: str


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /engine/decisions/{id}/answer`: one of the options of the decision."""

    choice: Text


class DecisionsAnswer(msgspec.Struct, frozen=True):
    """Decisions that nobody has taken yet."""

    decisions: list[Decision]


class GoalsAnswer(msgspec.Struct, frozen=True):
    """Goals and how they stand."""

    goals: list[GoalStatus]


class CheckpointsAnswer(msgspec.Struct, frozen=True):
    """The checkpoints of a goal."""

    checkpoints: list[Checkpoint]


class ConflictsAnswer(msgspec.Struct, frozen=True):
    """Operations that are under way, and messages that wait for them."""

    active: list[Active]
    waiting: list[Waiting]
