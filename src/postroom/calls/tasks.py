"""The verbs of tasks: of lease holders, senders and operators."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import (
    CLAIM_MAX,
    COMPLETE_BYTES_MAX,
    ENQUEUE_BYTES_MAX,
    ENQUEUE_MANY_MAX,
    LEASE_S,
    LEASE_S_MAX,
    PAGE_DEFAULT,
    Agent,
    Delay,
    Id,
    Key,
    Name,
    Number,
    Page,
    Retries,
    Text,
    Wait,
)
from postroom.calls.verb import REFUSED, Route, Verb, get, post
from postroom.message import Durability, State


class TaskAnswer(msgspec.Struct, frozen=True):
    """The task that the request was about."""

    task_id: str


# ---- lease holders -----------------------------------------------------------------------------------


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


class CompletedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The completed task, and the tasks claimed next."""

    task_id: str
    tasks: list[ClaimedTask] = []


class _AgentCall(Verb, frozen=True, kw_only=True):
    """The token identifies the caller. An agent may name itself; an operator names the agent it acts for."""

    agent: Agent | None = None
    agent_url: Annotated[str, Meta(max_length=2_048)] | None = None


class Next(_AgentCall, frozen=True, kw_only=True):
    """Lease the next task, or wait for one."""

    limit: Annotated[int, Meta(ge=1, le=CLAIM_MAX)] = 1
    lease_s: Annotated[float, Meta(gt=0, le=LEASE_S_MAX)] = LEASE_S
    wait_s: Wait = 0.0
    worker: Text | None = None

    route: ClassVar[Route] = post(
        "/queue/next",
        "task.claim",
        ClaimedTask,
        ClaimedTasks,
        status=200,
        others={204: None},
        refusals=REFUSED,
    )


class Holder(_AgentCall, frozen=True, kw_only=True):
    """A call under a lease."""

    task_id: Id
    lease: Number


class Complete(Holder, frozen=True, kw_only=True, omit_defaults=True):
    """Complete a task."""

    decision: Any
    claim_next: Annotated[int, Meta(ge=0, le=CLAIM_MAX)] = 0
    """How many further tasks to claim in the same commit, for the same worker and lease length."""

    route: ClassVar[Route] = post(
        "/queue/complete", "task.settle", CompletedAnswer, bytes_max=COMPLETE_BYTES_MAX
    )


class Heartbeat(Holder, frozen=True, kw_only=True):
    """Renew a lease."""

    route: ClassVar[Route] = post("/queue/heartbeat", "task.settle", TaskAnswer)


class Fail(Holder, frozen=True, kw_only=True):
    """Report a failure."""

    error: str
    retry_in_s: Delay | None = None

    route: ClassVar[Route] = post("/queue/fail", "task.settle", TaskAnswer)


class Release(Holder, frozen=True, kw_only=True):
    """Return a task unprocessed."""

    route: ClassVar[Route] = post("/queue/release", "task.settle", TaskAnswer)


class Result(_AgentCall, frozen=True, kw_only=True):
    """Wake the harness for a result."""

    task_id: Id

    route: ClassVar[Route] = post("/harness/result", "task.settle", TaskAnswer)


class ForemanResult(Result, frozen=True, kw_only=True):
    """Wake the harness (foreman's path)."""

    route: ClassVar[Route] = post("/result", "task.settle", TaskAnswer)


# ---- senders and operators ---------------------------------------------------------------------------


class NewTaskAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The id of a new task, and a warning for its sender."""

    task_id: str
    warning: str = ""


class NewTasksAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ids of several new tasks, and a warning for their sender."""

    task_ids: list[str]
    warning: str = ""


class Enqueue(Verb, frozen=True, kw_only=True):
    """Store one task or several.

    The fields are the keywords of `Tasks.enqueue`.
    """

    agent: Agent
    payload: Any
    task_id: Name | None = None
    delay_s: Delay = 0.0
    idempotency_key: Key | None = None
    type: Text = ""
    parent: Text = ""
    max_retries: Retries | None = None
    durability: Durability | None = None

    route: ClassVar[Route] = post(
        "/queue/enqueue",
        "task.enqueue",
        NewTaskAnswer,
        NewTasksAnswer,
        status=201,
        refusals=REFUSED,
        bytes_max=ENQUEUE_BYTES_MAX,
    )


class EnqueueMany(Verb, frozen=True, kw_only=True):
    """Store several tasks, all or none."""

    tasks: Annotated[list[Enqueue], Meta(min_length=1, max_length=ENQUEUE_MANY_MAX)]

    route: ClassVar[Route] = Enqueue.route


class _OfTask(Verb, frozen=True, kw_only=True):
    task_id: Id = msgspec.field(name="id")


class CancelTask(_OfTask, frozen=True, kw_only=True):
    """End a task without a result."""

    route: ClassVar[Route] = post("/tasks/{id}/cancel", "task.cancel", TaskAnswer)


class RetryTask(_OfTask, frozen=True, kw_only=True):
    """Queue a dead task again."""

    route: ClassVar[Route] = post("/tasks/{id}/retry", "task.retry", TaskAnswer)


class ShowTask(_OfTask, frozen=True, kw_only=True):
    """A task and its history, now or after its end.

    `wait_s` delays the answer until the task has ended, at most that long.
    """

    wait_s: Wait = 0.0

    route: ClassVar[Route] = get("/tasks/{id}", "task.read")


class FindTasks(Verb, frozen=True, kw_only=True):
    """Tasks in the order of acceptance."""

    agent: Agent | UnsetType = UNSET  # not None: a query has no null
    state: State | UnsetType = UNSET
    after: Number = 0
    limit: Page = PAGE_DEFAULT

    route: ClassVar[Route] = get("/tasks", "task.list")


class ReadTaskStatus(Verb, frozen=True, kw_only=True):
    """The state of the queues."""

    route: ClassVar[Route] = get("/queue/status", "task.list")
