"""The verbs of agents: registration, answers, messages between agents, and bounces."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import (
    BOUNCES_A_READ_MAX,
    ENQUEUE_BYTES_MAX,
    ENQUEUE_MANY_MAX,
    LETTERS_A_READ_MAX,
    OPEN_REQUESTS_MAX,
    BounceKey,
    Id,
    InboxKey,
    Name,
    Priority,
    Session,
    Text,
)
from postroom.calls.messages import MessageAnswer, MessagesAnswer
from postroom.calls.verb import EVENT_STREAM, READ_REFUSED, REFUSED, Route, Verb, get, post


class ListAgents(Verb, frozen=True, kw_only=True):
    """Agents: their health, open requests and unhandled messages."""

    org_id: Name | UnsetType = UNSET

    route: ClassVar[Route] = get("/engine/agents", "agent.list")


class RegisteredAnswer(msgspec.Struct, frozen=True):
    """A registration. Earlier registrations of the agent are no longer valid."""

    org_id: str
    agent_id: str
    session: int
    epoch: int


class Register(Verb, frozen=True, kw_only=True):
    """Register the agent of the token.

    The token names the agent and its organization.
    """

    agent_id: Name | None = None

    route: ClassVar[Route] = post(
        "/engine/agents", "agent.join", RegisteredAnswer, status=201, refusals=REFUSED
    )


# ---- calls of one agent ------------------------------------------------------------------------------


class AgentAnswer(msgspec.Struct, frozen=True):
    """The agent that the request was about."""

    org_id: str
    agent_id: str


class AgentQuery(Verb, frozen=True, kw_only=True):
    """A call for an agent. `session` is that of its registration; without it, the newest one is used."""

    agent_id: Id = msgspec.field(name="id")
    session: Session | UnsetType = UNSET


class AgentChange(Verb, frozen=True, kw_only=True):
    """A change for an agent. `session` is that of its registration; without it, the newest one is used."""

    agent_id: Id = msgspec.field(name="id")
    session: Session | None = None


class StreamAgent(AgentQuery, frozen=True, kw_only=True):
    """The parts of all open requests of an agent as they come."""

    route: ClassVar[Route] = get(
        "/engine/agents/{id}/stream",
        "agent.inbox",
        others={200: EVENT_STREAM},
        refusals=(*READ_REFUSED, 409),
    )


class BeatAnswer(msgspec.Struct, frozen=True):
    """A heartbeat. `is_new` says that it registered the agent."""

    org_id: str
    agent_id: str
    session: int
    is_new: bool


class Beat(AgentQuery, frozen=True, kw_only=True):
    """Note the agent of the token as alive."""

    route: ClassVar[Route] = post("/engine/agents/{id}/beat", "agent.join", BeatAnswer, in_query=True)


class Leave(AgentQuery, frozen=True, kw_only=True):
    """End the registration of the agent."""

    route: ClassVar[Route] = post("/engine/agents/{id}/leave", "agent.join", AgentAnswer, in_query=True)


class Ack(AgentChange, frozen=True, kw_only=True):
    """Acknowledge answers that the agent has."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=OPEN_REQUESTS_MAX)]

    route: ClassVar[Route] = post("/engine/agents/{id}/ack", "agent.inbox", MessagesAnswer)


class Send(AgentChange, frozen=True, kw_only=True):
    """Send a message to another agent.

    The agent belongs to the same organization.
    """

    to: Name
    payload: Any
    message_id: Text | None = None
    priority: Priority = 2

    route: ClassVar[Route] = post(
        "/engine/agents/{id}/messages", "agent.send", MessageAnswer, bytes_max=ENQUEUE_BYTES_MAX
    )


class InboxLine(msgspec.Struct, frozen=True):
    """A message in an inbox. Acknowledge it by its `key` with `inbox/done`."""

    key: str
    message_id: str
    sender: str
    payload: Any
    is_bounce: bool
    reason: str


class InboxAnswer(msgspec.Struct, frozen=True):
    """The messages that an agent has not acted on."""

    messages: list[InboxLine]


class ReadInbox(AgentQuery, frozen=True, kw_only=True):
    """Messages that the agent has not acted on. They count as fetched.

    A page begins after the message with the key `after`. `peek` leaves no trace.
    """

    after: InboxKey | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=LETTERS_A_READ_MAX)] = LETTERS_A_READ_MAX
    peek: bool = False

    route: ClassVar[Route] = get(
        "/engine/agents/{id}/inbox", "agent.inbox", InboxAnswer, refusals=(*READ_REFUSED, 409)
    )


class InboxDone(AgentChange, frozen=True, kw_only=True):
    """The agent has acted on messages."""

    keys: Annotated[list[InboxKey], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]

    route: ClassVar[Route] = post("/engine/agents/{id}/inbox/done", "agent.inbox", MessagesAnswer)


# ---- bounces -----------------------------------------------------------------------------------------


class ListBounces(Verb, frozen=True, kw_only=True):
    """Answers that no agent fetched, for users and systems.

    A page begins after the key `after`. `created_by` is a creator such as `user:ada`.
    """

    org_id: Name | UnsetType = UNSET
    created_by: Annotated[Text, Meta(pattern="^(user|system|agent):")] | None = None
    after: BounceKey | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=BOUNCES_A_READ_MAX)] = BOUNCES_A_READ_MAX

    route: ClassVar[Route] = get("/engine/bounces", "bounce.list")


class BouncesDoneAnswer(msgspec.Struct, frozen=True):
    """The bounces that were there and are removed now."""

    keys: list[str]


class BouncesDone(Verb, frozen=True, kw_only=True):
    """Remove bounces that their creator has."""

    keys: Annotated[list[BounceKey], Meta(min_length=1, max_length=BOUNCES_A_READ_MAX)]

    route: ClassVar[Route] = post("/engine/bounces/done", "bounce.remove", BouncesDoneAnswer)
