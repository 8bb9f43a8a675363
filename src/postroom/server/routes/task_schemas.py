"""The bodies, queries and replies of every route, and their limits.

Rule 1: the server decodes with these structs, and the OpenAPI document is generated from them.
Rule 2: an unknown field is refused, because its sender expects an effect.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.contracts.tasks.task_input import (
    DELAY_S_MAX,
    JSON_DEPTH_MAX,
    KEY_CHARS_MAX,
    LEASE_S_MAX,
    RESULT_BYTES_MAX,
    RETRIES_MAX,
    TEXT_CHARS_MAX,
)
from postroom.contracts.tasks.tasks import LEASE_S, AgentStatus, Status, TaskLine
from postroom.core.health.health import Verdict
from postroom.core.names import NAME_CHARS_MAX, SCOPED_CHARS_MAX
from postroom.message import BusMessage, Durability, State
from postroom.server.access.tokens import EXPIRES_S_MAX, NAMES_MAX, Permissions, Role
from postroom.server.harness.harness import HarnessStatus
from postroom.settings import RATE_MAX
from postroom.stores.base import CLAIM_MAX

WAIT_S_MAX = 30.0
SMALL_BODY_BYTES_MAX = 64 * 1024  # a body without a payload
BODY_DEPTH_MAX = JSON_DEPTH_MAX + 3  # a payload in a task in a list of a body
COMPLETE_BYTES_MAX = RESULT_BYTES_MAX + SMALL_BODY_BYTES_MAX
ENQUEUE_BYTES_MAX = 16 * 1024 * 1024
ENQUEUE_MANY_MAX = 1_000
BUS_POST_BYTES_MAX = 4 * 1024 * 1024
BUS_ANSWER_BYTES_MAX = 8 * 1024 * 1024  # of message bodies; a reply has at least one message
STREAM_PAGE_BYTES_MAX = 1024 * 1024  # of message bodies in one write to an event stream
PAGE_DEFAULT = 100
PAGE_MAX = 1_000
NUMBER_MAX = 2**63 - 1
URL_QUERY_FIELDS_MAX = 16

Name = Annotated[
    str, Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")
]  # fmt: skip
Scope = Annotated[str, Meta(max_length=NAME_CHARS_MAX, pattern="^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Agent = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=SCOPED_CHARS_MAX,
        pattern="^(@[A-Za-z0-9][A-Za-z0-9._-]*:)?[A-Za-z0-9][A-Za-z0-9._-]*$",
    ),
]
"""An agent whose tasks are meant. Only callers of no organization name one of an organization."""
Names = Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)]
Id = Annotated[str, Meta(min_length=1, max_length=SCOPED_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Page = Annotated[int, Meta(ge=1, le=PAGE_MAX)]


class _AgentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The token identifies the caller. An agent may name itself; an operator names the agent it acts for."""

    agent: Agent | None = None
    agent_url: Annotated[str, Meta(max_length=2_048)] | None = None


class NextBody(_AgentBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /queue/next`."""

    limit: Annotated[int, Meta(ge=1, le=CLAIM_MAX)] = 1
    lease_s: Annotated[float, Meta(gt=0, le=LEASE_S_MAX)] = LEASE_S
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = 0.0
    worker: Text | None = None


class HolderBody(_AgentBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /queue/heartbeat` and `POST /queue/release`."""

    task_id: Id
    lease: Number


class CompleteBody(HolderBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /queue/complete`."""

    decision: Any
    claim_next: Annotated[int, Meta(ge=0, le=CLAIM_MAX)] = 0
    """How many further tasks to claim in the same commit, for the same worker and lease length."""


class FailBody(HolderBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /queue/fail`."""

    error: str
    retry_in_s: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] | None = None


class ResultBody(_AgentBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /harness/result`."""

    task_id: Id


class EnqueueBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /queue/enqueue`: the keywords of `Tasks.enqueue`."""

    agent: Agent
    payload: Any
    task_id: Name | None = None
    delay_s: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] = 0.0
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=KEY_CHARS_MAX)] | None = None
    type: Text = ""
    parent: Text = ""
    max_retries: Annotated[int, Meta(ge=0, le=RETRIES_MAX)] | None = None
    durability: Durability | None = None


class EnqueueManyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /queue/enqueue`: several tasks, all or none."""

    tasks: Annotated[list[EnqueueBody], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]


class NewBusMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bus/{name}/messages`: the keywords of `Bus.append`.

    An operator of all organizations may name one as `org_id`, here and below.
    """

    type: Annotated[str, Meta(min_length=1)]
    project_id: Annotated[str, Meta(min_length=1)]
    task_id: str = ""
    run_id: str = ""
    parents: list[str] = []
    attachment: str | None = None
    body: str = ""
    ts: str | None = None
    org_id: Scope = ""


class ShowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /tasks/{id}`: `wait_s` delays the reply until the task has ended, at most that long."""

    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class FindQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /tasks`."""

    agent: Agent | UnsetType = UNSET  # not None: a query has no null
    state: State | UnsetType = UNSET
    after: Number = 0
    limit: Page = PAGE_DEFAULT


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /events`."""

    after: Number = 0


class BusQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /bus/{name}/messages`."""

    since: str = ""
    limit: Page = PAGE_DEFAULT
    org_id: Scope = ""


class BusOfQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bus/{name}/remove`."""

    org_id: Scope = ""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route without a query."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: str
    message: str


class TaskAnswer(msgspec.Struct, frozen=True):
    """The task that the request was about."""

    task_id: str


class CompletedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The completed task, and the tasks claimed next."""

    task_id: str
    tasks: "list[ClaimedTask]" = []


class NewTaskAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The id of a new task, and a warning for its sender."""

    task_id: str
    warning: str = ""


class NewTasksAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ids of several new tasks, and a warning for their sender."""

    task_ids: list[str]
    warning: str = ""


class ClaimedTask(msgspec.Struct, frozen=True):
    """A claimed task. Every later call about it has to carry `lease`."""

    task_id: str
    payload: Any
    lease: int
    attempt: int
    lease_s: float
    type: str
    parent: str


class ClaimedTasks(msgspec.Struct, frozen=True):
    """The reply to a `limit` above 1."""

    tasks: list[ClaimedTask]


class LinesAnswer(msgspec.Struct, frozen=True):
    """A page of tasks. The next page begins after the last `seq`."""

    tasks: list[TaskLine]


class StatusAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of the queues. An operator also sees the loops."""

    agents: dict[str, AgentStatus]
    totals: dict[Status, int]
    harness: HarnessStatus | None = None


class CallerAnswer(msgspec.Struct, frozen=True):
    """The owner of the token. An empty `org` means all organizations for an operator or an admin."""

    name: str
    role: str
    org: str


class TokenLine(msgspec.Struct, frozen=True):
    """A token without its text. An empty `org` means all organizations."""

    token_id: str
    role: Role
    org: str
    agent: str
    created: datetime
    expires: datetime | None
    valid: bool
    rate: float
    may_send_to: tuple[str, ...]
    may_claim: tuple[str, ...]
    may_read: tuple[str, ...]
    only_message: tuple[str, ...]
    only_buses: tuple[str, ...]
    read_only: bool


class TokensAnswer(msgspec.Struct, frozen=True):
    """The tokens that the admin may change, in the order in which they were made."""

    tokens: list[TokenLine]


class NewTokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokens`. Without `org`, the token is for the organization of the admin, or for all."""

    role: Role
    org: Name | None = None
    agent: Name | None = None
    expires_s: Annotated[float, Meta(ge=1, le=EXPIRES_S_MAX)] | None = None
    rate: Annotated[float, Meta(ge=0, le=RATE_MAX)] = 0.0
    may_send_to: Names = ()
    may_claim: Names = ()
    may_read: Names = ()
    only_message: Names = ()
    only_buses: Names = ()
    read_only: bool = False


def permissions_of(given: NewTokenBody | TokenLine) -> Permissions:
    return Permissions(
        may_send_to=given.may_send_to,
        may_claim=given.may_claim,
        may_read=given.may_read,
        only_message=given.only_message,
        only_buses=given.only_buses,
        is_read_only=given.read_only,
    )


class RotateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokens/{id}/rotate`. The old token stays valid for `overlap_s` more seconds."""

    overlap_s: Annotated[float, Meta(ge=0, le=EXPIRES_S_MAX)] = 0.0


class MadeTokenAnswer(msgspec.Struct, frozen=True):
    """A new token, which is never answered again, and the id that names it."""

    token: str
    token_id: str


class RevokedAnswer(msgspec.Struct, frozen=True):
    """The id of a token that is refused from now on."""

    token_id: str


class HealthAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ok`, or `degraded` when messages do not flow as they should, or a part does not work.

    `parts` has the state of each part of `postroom up`, or why it does not work. `verdict` has the
    reasons for `degraded`.
    """

    status: Literal["ok", "degraded"]
    parts: dict[str, str] = {}
    verdict: Verdict | None = None


class BusesAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The buses that the caller may read, by name.

    An operator of all organizations also sees those of each organization.
    """

    buses: list[str]
    organizations: dict[str, list[str]] = {}


class BusAnswer(msgspec.Struct, frozen=True):
    """A page of a bus. The next page begins after the last `msg_id`."""

    messages: list[BusMessage]


class ResetNotice(msgspec.Struct, frozen=True):
    """The event `reset` of a bus stream: `since` was removed, and the oldest message comes next."""

    since: str


class RemovedNotice(msgspec.Struct, frozen=True):
    """The event `removed` of a bus stream, which is its last."""

    message: str


class RemovedBusAnswer(msgspec.Struct, frozen=True):
    """The bus that was removed, and its organization."""

    bus: str
    org_id: str


class BusIdAnswer(msgspec.Struct, frozen=True):
    """The id of the appended message."""

    msg_id: str
