"""The verbs of messages: submit, read, cancel, dead letters, and the state of the queue."""

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import (
    ENQUEUE_BYTES_MAX,
    ENQUEUE_MANY_MAX,
    FORMAT_VERSION,
    LETTERS_MAX,
    NUMBER_MAX,
    PAGE_DEFAULT,
    TOKENS_MAX,
    WAIT_S_MAX,
    Cursor,
    Delay,
    Id,
    Key,
    Name,
    Page,
    Priority,
    Retries,
    Scope,
    Session,
    Text,
    Wait,
)
from postroom.calls.submit import AttemptError
from postroom.calls.verb import EVENT_STREAM, REFUSED, Route, Verb, get, post
from postroom.message import Durability, State

_NEW_REFUSED = (400, 401, 403, 409, 410, 413, 429, 503)


class MessageAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message that the request was about. `duplicate`: an earlier submit has stored it."""

    message_id: str
    duplicate: bool = False


class MessagesAnswer(msgspec.Struct, frozen=True):
    """The messages that the request was about."""

    message_ids: list[str]


# ---- submitting --------------------------------------------------------------------------------------


class Creator(msgspec.Struct, frozen=True):
    """Who created a message. An agent's token creates as this agent only."""

    type: Literal["user", "agent", "system"]
    id: Text


class Submit(Verb, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Submit one message or several.

    The fields are the keywords of `Engine.submit`. An agent's token gives `org_id`. A newer minor version of
    the format may add fields; the contract checks every field.
    """

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
    delay_s: Delay = 0.0
    max_retries: Retries | None = None
    version: str = FORMAT_VERSION
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

    route: ClassVar[Route] = post(
        "/engine/messages",
        "message.submit",
        MessageAnswer,
        MessagesAnswer,
        refusals=_NEW_REFUSED,
        bytes_max=ENQUEUE_BYTES_MAX,
    )


class SubmitMany(Verb, frozen=True, kw_only=True):
    """Submit several messages, all or none."""

    messages: Annotated[list[Submit], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]

    route: ClassVar[Route] = Submit.route


class RequestAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. A streamed answer is joined."""

    message_id: str
    state: str
    result: Any
    errors: list[AttemptError]
    epoch: int = 0
    """The coordinator that hands the answer over; 0 for an operator."""


class Request(Submit, frozen=True, kw_only=True):
    """Submit a message and wait for its answer; 202 when it has not ended in time.

    With a `message_id` the request can be repeated: it waits for the same message again.
    """

    timeout_s: Wait = WAIT_S_MAX
    session: Session | None = None

    route: ClassVar[Route] = post(
        "/engine/request",
        "message.submit",
        RequestAnswer,
        status=200,
        others={202: (MessageAnswer,)},
        refusals=_NEW_REFUSED,
        bytes_max=ENQUEUE_BYTES_MAX,
    )


# ---- one message -------------------------------------------------------------------------------------


class MessageLine(msgspec.Struct, frozen=True):
    """A message in a list."""

    message_id: str
    org_id: str
    state: str
    type: str
    goal_id: str
    agent_id: str
    priority: int
    attempt: int
    created_at: datetime
    error_type: str
    """That of the last error."""


class MessageList(msgspec.Struct, frozen=True):
    """A page of messages. It may be short, or empty: a call looks at a bounded number of messages."""

    messages: list[MessageLine]
    cursor: str = ""
    """Cursor of the next page; empty on the last page."""
    reached: datetime | None = None
    """When the last message was accepted that was looked at; None at the end."""


class ListFields(TypedDict, total=False):
    """The keywords of `Engine.list`, as in `FindMessages`. None means any."""

    org_id: str | None
    state: State | None
    type: str
    goal_id: str
    agent_id: str
    since: datetime | str | None
    text: str
    cursor: str
    limit: int


class FindMessages(Verb, frozen=True, kw_only=True):
    """Messages of an organization or of all, the newest first.

    `text` is an id, or searched in the message and its error. `cursor` is that of the previous page.
    """

    org_id: Name | UnsetType = UNSET  # not None: a query has no null
    state: State | UnsetType = UNSET
    type: Text = ""
    goal_id: Text = ""
    agent_id: Text = ""
    since: str | UnsetType = UNSET
    """Only messages that were accepted since this time."""
    text: Text = ""
    cursor: Cursor = ""
    limit: Page = PAGE_DEFAULT

    route: ClassVar[Route] = get("/engine/messages", "message.list", MessageList, engine="list")


class _OfMessage(Verb, frozen=True, kw_only=True):
    message_id: Id = msgspec.field(name="id")


class ShowMessage(_OfMessage, frozen=True, kw_only=True):
    """A message and its history, now or after its end.

    `wait_s` delays the answer until the message has ended, at most that long.
    """

    wait_s: Wait = 0.0

    route: ClassVar[Route] = get("/engine/messages/{id}", "message.read")


class StreamMessage(_OfMessage, frozen=True, kw_only=True):
    """The parts of the answer as they come, to the last one."""

    route: ClassVar[Route] = get(
        "/engine/messages/{id}/stream", "message.read", others={200: EVENT_STREAM, 204: None}
    )


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Which rule holds a message, and what would release it."""

    message_id: str
    explanation: str


class Explain(_OfMessage, frozen=True, kw_only=True):
    """Why a message does not move."""

    route: ClassVar[Route] = get("/engine/messages/{id}/explain", "message.read", ExplainAnswer)


class Cancel(_OfMessage, frozen=True, kw_only=True):
    """End a message without a result."""

    route: ClassVar[Route] = post("/engine/messages/{id}/cancel", "message.cancel", MessageAnswer)


class ReadReceipts(_OfMessage, frozen=True, kw_only=True):
    """What the recipient of a message has done with it: times in microseconds."""

    route: ClassVar[Route] = get("/engine/messages/{id}/receipts", "message.read", dict[str, int])


# ---- dead letters ------------------------------------------------------------------------------------


class _LetterFilters(Verb, frozen=True, kw_only=True):
    """Which dead letters."""

    org_id: Name | UnsetType = UNSET  # not None: a query has no null
    type: Text | UnsetType = UNSET
    error_type: Text | UnsetType = UNSET
    goal_id: Text | UnsetType = UNSET
    agent_id: Text | UnsetType = UNSET
    service: Text | UnsetType = UNSET
    """The service that the last attempt called, or that the message names."""
    failure: Text | UnsetType = UNSET
    """Text in the failure reason, in upper or lower case."""
    since: str | UnsetType = UNSET
    until: str | UnsetType = UNSET
    after: Id | UnsetType = UNSET
    """The last dead letter of an earlier answer: only later ones."""

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that the caller set."""
        fields = msgspec.structs.asdict(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not UNSET and name not in ("message_ids", "dry_run", "priority")
        }


class ListLetters(_LetterFilters, frozen=True, kw_only=True):
    """Dead letters in the order of acceptance.

    `after` is the id of the last dead letter of the previous page.
    """

    limit: Annotated[int, Meta(ge=1, le=LETTERS_MAX)] = PAGE_DEFAULT

    route: ClassVar[Route] = get("/engine/dlq", "letter.list")


class ShowLetter(_OfMessage, frozen=True, kw_only=True):
    """A dead letter and its errors."""

    route: ClassVar[Route] = get(
        "/engine/dlq/{id}", "letter.read", refusals=(400, 401, 403, 404, 413, 429, 503, 409)
    )


class _ChooseLetters(_LetterFilters, frozen=True, kw_only=True):
    """Which dead letters: by ids, or by filters. All that match, unless there is a `limit`."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=LETTERS_MAX)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=NUMBER_MAX)] | UnsetType = UNSET
    dry_run: bool = False
    """Change nothing, and reply with what would be done."""


class Replayed(msgspec.Struct, frozen=True):
    """What a replay did, or would do with `dry_run`."""

    replayed: int
    """How many dead letters were queued again."""
    refused: int
    """How many match and cannot run again."""
    left: int
    """How many match and were not reached: beyond the limit, or after a commit that failed."""
    reasons: dict[str, int]
    """Why dead letters were refused or left, and how many for each reason."""
    message_ids: list[str]
    """The first `REPLAYED_NAMED_MAX` of those that were queued again."""


class Replay(_ChooseLetters, frozen=True, kw_only=True):
    """Queue dead letters again."""

    priority: Priority | None = None

    route: ClassVar[Route] = post("/engine/dlq/replay", "letter.replay", Replayed)


class Purge(_ChooseLetters, frozen=True, kw_only=True):
    """Forget dead letters."""

    route: ClassVar[Route] = post("/engine/dlq/purge", "letter.purge", MessagesAnswer)


# ---- the queue ---------------------------------------------------------------------------------------


class ReadEngineStatus(Verb, frozen=True, kw_only=True):
    """The state of the global queue."""

    route: ClassVar[Route] = get("/engine/status", "engine.read")


class ReadTokenBudgets(Verb, frozen=True, kw_only=True):
    """The token budgets of models."""

    route: ClassVar[Route] = get("/engine/tokens", "engine.read")


class ScopeAnswer(msgspec.Struct, frozen=True):
    """What was paused or resumed."""

    org_id: str
    type: str


class Resume(Verb, frozen=True, kw_only=True):
    """End a pause.

    An empty `org_id` or `type` means all of them.
    """

    org_id: Scope = ""
    type: Scope = ""

    route: ClassVar[Route] = post("/engine/resume", "engine.pause", ScopeAnswer, refusals=REFUSED)


class Pause(Resume, frozen=True, kw_only=True):
    """Stop deliveries of an organization or a type.

    `kill` also refuses submits and cancels running handlers.
    """

    kill: bool = False

    route: ClassVar[Route] = post("/engine/pause", "engine.pause", ScopeAnswer, refusals=REFUSED)
