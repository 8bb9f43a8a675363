"""The keywords of `submit`, typed: a type checker finds a misspelt one in the program of a user.

Rule 1: the types are declared here, once. `message_input` checks the values, because callers may be untyped.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, Required, TypeAlias, TypedDict

import msgspec

Payload: TypeAlias = dict[str, Any] | msgspec.Struct
CreatorType: TypeAlias = Literal["user", "agent", "system"]


class CreatedBy(msgspec.Struct, frozen=True):
    """Who created a message."""

    type: CreatorType
    id: str


class ResourceLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one attempt may use."""

    time: float | None = None
    """Seconds."""
    memory: str | None = None
    """Bytes with a unit, such as 1GB."""


class MessageOptions(TypedDict, total=False):
    """The keywords of a message whose type, payload and sender are given otherwise."""

    priority: int
    """From 0, the most urgent, to 3. The default is 2."""
    message_id: str | None
    """A UUID. A second submit under the same id stores nothing new."""
    goal_id: str | None
    task_id: str | None
    parent_message_id: str
    created_by: CreatedBy | Mapping[str, str] | None
    user_id: str
    expires_at: datetime | str | None
    """From then on the message is not delivered."""
    delay_s: float
    """How long the message waits before it is delivered."""
    max_retries: int | None
    version: str | None
    """The version of the format of the message."""
    context: dict[str, Any] | None
    metadata: dict[str, Any] | None
    resource_limits: ResourceLimits | Mapping[str, object] | None
    token_needs: dict[str, Any] | None
    model_preferences: list[str] | tuple[str, ...] | None
    tokens: int
    """Tokens that are reserved when the message is claimed."""
    models: list[str] | tuple[str, ...] | None
    """The models that it may use, the preferred one first. None allows any."""
    service: str
    idempotency_key: str | None
    """A second submit under the same key stores nothing new."""
    ordering_key: str | None
    """Messages of one key are handled one after the other."""
    on_dead: Literal["continue", "stop"]
    """Whether a dead letter stops the messages of its ordering key."""
    traceparent: str
    tracestate: str
    durability: Literal["os", "group", "fsync"] | None
    hop: int
    """How long the chain of parents is."""
    operation: Mapping[str, object] | msgspec.Struct | None
    """What the message works on while its handler runs."""


class ChildFields(MessageOptions, total=False):
    """The keywords of a message that a handler submits."""

    org_id: str
    agent_id: str


class SubmitFields(MessageOptions, total=False):
    """The keywords of `submit`."""

    type: Required[str]
    org_id: Required[str]
    payload: Required[Payload]
    agent_id: str


class AttemptError(TypedDict):
    """What went wrong in one attempt."""

    attempt: int
    error_type: str
    error: str
    timestamp: str
    worker_id: str
