"""All routes of the task server."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from postroom.contracts.engine.dlq import DeadLetter
from postroom.contracts.engine.inspection import EngineStatus, MessageInfo
from postroom.contracts.engine.token_status import TokenStatus
from postroom.contracts.goals.cells import Decision
from postroom.contracts.goals.goals import GoalStatus
from postroom.contracts.task_views import TaskInfo
from postroom.runtime import (
    agent_handlers,
    engine_handlers,
    event_streams,
    goal_handlers,
    handlers,
    monitoring,
    token_handlers,
)
from postroom.runtime.endpoint import ServedRoute
from postroom.runtime.engine_schemas import (
    AckBody,
    AgentAnswer,
    AgentsAnswer,
    AgentsQuery,
    AnswerBody,
    BouncesAnswer,
    BouncesDoneAnswer,
    BouncesDoneBody,
    BouncesQuery,
    CheckpointsAnswer,
    ConflictsAnswer,
    DecisionsAnswer,
    ExplainAnswer,
    FoundAnswer,
    GoalsAnswer,
    InboxAnswer,
    InboxDoneBody,
    InboxQuery,
    LettersAnswer,
    LettersQuery,
    MessageAnswer,
    MessagesAnswer,
    MessagesQuery,
    NewMessageBody,
    NewMessagesBody,
    PauseBody,
    PurgeBody,
    RegisterBody,
    RegisteredAnswer,
    ReplayBody,
    RequestAnswer,
    RequestBody,
    ResumeBody,
    ScopeAnswer,
    SendBody,
    SessionQuery,
)
from postroom.runtime.openapi import EVENT_STREAM, TEXT, Route, document
from postroom.runtime.schemas import (
    BUS_POST_BYTES_MAX,
    COMPLETE_BYTES_MAX,
    ENQUEUE_BYTES_MAX,
    BusAnswer,
    BusesAnswer,
    BusIdAnswer,
    BusOfQuery,
    BusQuery,
    CallerAnswer,
    ClaimedTask,
    ClaimedTasks,
    CompleteBody,
    CompletedAnswer,
    EnqueueBody,
    EnqueueManyBody,
    EventsQuery,
    FailBody,
    FindQuery,
    HealthAnswer,
    HolderBody,
    LinesAnswer,
    MadeTokenAnswer,
    NewBusMessage,
    NewTaskAnswer,
    NewTasksAnswer,
    NewTokenBody,
    NextBody,
    RemovedBusAnswer,
    ResultBody,
    RevokedAnswer,
    RotateBody,
    ShowQuery,
    StatusAnswer,
    TaskAnswer,
    TokensAnswer,
)

# Refusals of routes that change a task, and of routes that read.
_CHANGE = (400, 401, 403, 404, 409, 413, 429, 503)
_READ = (400, 401, 403, 404, 413, 429, 503)

ROUTES: Sequence[ServedRoute] = (
    ServedRoute(
        Route(
            "POST",
            "/queue/next",
            "Lease the next task, or wait for one",
            {200: (ClaimedTask, ClaimedTasks), 204: None},
            (400, 401, 403, 413, 429, 503),
            (NextBody,),
        ),
        handlers.claim,
    ),
    ServedRoute(
        Route(
            "POST", "/queue/complete", "Complete a task", {202: (CompletedAnswer,)}, _CHANGE, (CompleteBody,)
        ),
        handlers.complete,
        COMPLETE_BYTES_MAX,
    ),
    ServedRoute(
        Route("POST", "/queue/heartbeat", "Renew a lease", {202: (TaskAnswer,)}, _CHANGE, (HolderBody,)),
        handlers.heartbeat,
    ),
    ServedRoute(
        Route("POST", "/queue/fail", "Report a failure", {202: (TaskAnswer,)}, _CHANGE, (FailBody,)),
        handlers.fail,
    ),
    ServedRoute(
        Route(
            "POST",
            "/queue/release",
            "Return a task unprocessed",
            {202: (TaskAnswer,)},
            _CHANGE,
            (HolderBody,),
        ),
        handlers.release,
    ),
    ServedRoute(
        Route(
            "POST",
            "/queue/enqueue",
            "Store one task or several",
            {201: (NewTaskAnswer, NewTasksAnswer)},
            (400, 401, 403, 413, 429, 503),
            (EnqueueBody, EnqueueManyBody),
        ),
        handlers.enqueue,
        ENQUEUE_BYTES_MAX,
    ),
    ServedRoute(
        Route(
            "POST",
            "/harness/result",
            "Wake the harness for a result",
            {202: (TaskAnswer,)},
            _CHANGE,
            (ResultBody,),
        ),
        handlers.result,
    ),
    ServedRoute(
        Route(
            "POST",
            "/result",
            "Wake the harness (foreman's path)",
            {202: (TaskAnswer,)},
            _CHANGE,
            (ResultBody,),
        ),
        handlers.result,
    ),
    ServedRoute(
        Route("POST", "/tasks/{id}/cancel", "End a task without a result", {202: (TaskAnswer,)}, _CHANGE),
        handlers.cancel,
        operators_only=True,
    ),
    ServedRoute(
        Route("POST", "/tasks/{id}/retry", "Queue a dead task again", {202: (TaskAnswer,)}, _CHANGE),
        handlers.retry,
        operators_only=True,
    ),
    ServedRoute(
        Route(
            "GET",
            "/tasks/{id}",
            "A task and its history, now or after its end",
            {200: (TaskInfo,)},
            _READ,
            query=ShowQuery,
        ),
        handlers.show,
    ),
    ServedRoute(
        Route(
            "GET", "/tasks", "Tasks in the order of acceptance", {200: (LinesAnswer,)}, _READ, query=FindQuery
        ),
        handlers.find,
    ),
    ServedRoute(
        Route("GET", "/queue/status", "The state of the queues", {200: (StatusAnswer,)}, _READ),
        handlers.status,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/messages",
            "Submit one message or several",
            {202: (MessageAnswer, MessagesAnswer)},
            (400, 401, 403, 409, 410, 413, 429, 503),
            (NewMessageBody, NewMessagesBody),
        ),
        engine_handlers.submit,
        ENQUEUE_BYTES_MAX,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/messages",
            "Messages of an organization in the order of acceptance",
            {200: (FoundAnswer,)},
            _READ,
            query=MessagesQuery,
        ),
        engine_handlers.find,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/messages/{id}",
            "A message and its history, now or after its end",
            {200: (MessageInfo,)},
            _READ,
            query=ShowQuery,
        ),
        engine_handlers.show,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/messages/{id}/stream",
            "The parts of the answer as they come, to the last one",
            {200: EVENT_STREAM, 204: None},
            _READ,
        ),
        engine_handlers.stream,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/messages/{id}/explain",
            "Why a message does not move",
            {200: (ExplainAnswer,)},
            _READ,
        ),
        engine_handlers.explain,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/messages/{id}/cancel",
            "End a message without a result",
            {202: (MessageAnswer,)},
            _CHANGE,
        ),
        engine_handlers.cancel,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/request",
            "Submit a message and wait for its answer; 202 when it has not ended in time",
            {200: (RequestAnswer,), 202: (MessageAnswer,)},
            (400, 401, 403, 409, 410, 413, 429, 503),
            (RequestBody,),
        ),
        agent_handlers.request_answer,
        ENQUEUE_BYTES_MAX,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/agents",
            "Agents: their health, and what waits for what",
            {200: (AgentsAnswer,)},
            _READ,
            query=AgentsQuery,
        ),
        agent_handlers.agents,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents",
            "Register the agent of the token",
            {201: (RegisteredAnswer,)},
            (400, 401, 403, 413, 429, 503),
            (RegisterBody,),
        ),
        agent_handlers.register,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/agents/{id}/stream",
            "The parts of all open requests of an agent as they come",
            {200: EVENT_STREAM},
            (*_READ, 409),
            query=SessionQuery,
        ),
        agent_handlers.stream,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents/{id}/beat",
            "Note the agent of the token as alive",
            {202: (AgentAnswer,)},
            _CHANGE,
            query=SessionQuery,
        ),
        agent_handlers.beat,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents/{id}/leave",
            "End the registration of the agent",
            {202: (AgentAnswer,)},
            _CHANGE,
            query=SessionQuery,
        ),
        agent_handlers.leave,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents/{id}/ack",
            "Acknowledge answers that the agent has",
            {202: (MessagesAnswer,)},
            _CHANGE,
            (AckBody,),
        ),
        agent_handlers.acknowledge,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents/{id}/messages",
            "Send a message to another agent",
            {202: (MessageAnswer,)},
            _CHANGE,
            (SendBody,),
        ),
        agent_handlers.send,
        ENQUEUE_BYTES_MAX,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/agents/{id}/inbox",
            "Messages that the agent has not acted on",
            {200: (InboxAnswer,)},
            (*_READ, 409),
            query=InboxQuery,
        ),
        agent_handlers.inbox,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/agents/{id}/inbox/done",
            "The agent has acted on messages",
            {202: (MessagesAnswer,)},
            _CHANGE,
            (InboxDoneBody,),
        ),
        agent_handlers.inbox_done,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/bounces",
            "Answers that no agent fetched, for users and systems",
            {200: (BouncesAnswer,)},
            _READ,
            query=BouncesQuery,
        ),
        agent_handlers.bounces,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/bounces/done",
            "Remove bounces that their creator has",
            {202: (BouncesDoneAnswer,)},
            _CHANGE,
            (BouncesDoneBody,),
        ),
        agent_handlers.bounces_done,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/messages/{id}/receipts",
            "What the recipient of a message has done with it: times in microseconds",
            {200: (dict[str, int],)},
            _READ,
        ),
        agent_handlers.receipts,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/dlq",
            "Dead letters in the order of acceptance",
            {200: (LettersAnswer,)},
            _READ,
            query=LettersQuery,
        ),
        engine_handlers.dead_letters,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/dlq/replay",
            "Queue dead letters again",
            {202: (MessagesAnswer,)},
            _CHANGE,
            (ReplayBody,),
        ),
        engine_handlers.replay,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/dlq/purge",
            "Forget dead letters",
            {202: (MessagesAnswer,)},
            _CHANGE,
            (PurgeBody,),
        ),
        engine_handlers.purge,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/engine/dlq/{id}", "A dead letter and its errors", {200: (DeadLetter,)}, (*_READ, 409)),
        engine_handlers.dead_letter,
    ),
    ServedRoute(
        Route("GET", "/engine/status", "The state of the global queue", {200: (EngineStatus,)}, _READ),
        engine_handlers.status,
    ),
    ServedRoute(
        Route("GET", "/engine/tokens", "The token budgets of models", {200: (TokenStatus,)}, _READ),
        engine_handlers.tokens,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/pause",
            "Stop deliveries of an organization or a type",
            {202: (ScopeAnswer,)},
            (400, 401, 403, 413, 429, 503),
            (PauseBody,),
        ),
        engine_handlers.pause,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/resume",
            "End a pause",
            {202: (ScopeAnswer,)},
            (400, 401, 403, 413, 429, 503),
            (ResumeBody,),
        ),
        engine_handlers.resume,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/engine/goals", "Goals and their states", {200: (GoalsAnswer,)}, _READ),
        goal_handlers.goals,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/engine/goals/{id}", "How a goal stands", {200: (GoalStatus,)}, _READ),
        goal_handlers.goal,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route(
            "GET",
            "/engine/goals/{id}/checkpoints",
            "The checkpoints of a goal",
            {200: (CheckpointsAnswer,)},
            _READ,
        ),
        goal_handlers.checkpoints,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route(
            "GET", "/engine/decisions", "Decisions that wait for a person", {200: (DecisionsAnswer,)}, _READ
        ),
        goal_handlers.decisions,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/engine/decisions/{id}", "A decision and its question", {200: (Decision,)}, _READ),
        goal_handlers.decision,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route(
            "POST",
            "/engine/decisions/{id}/answer",
            "Take a decision",
            {202: (Decision,)},
            _CHANGE,
            (AnswerBody,),
        ),
        goal_handlers.answer,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/engine/conflicts", "Operations that are under way", {200: (ConflictsAnswer,)}, _READ),
        goal_handlers.conflicts,
        operators_only=True,
        within_org=True,
    ),
    ServedRoute(
        Route("GET", "/tokens", "Tokens, without their texts", {200: (TokensAnswer,)}, _READ),
        token_handlers.tokens,
        admins_only=True,
    ),
    ServedRoute(
        Route(
            "POST",
            "/tokens",
            "Make a token, which is answered only now",
            {201: (MadeTokenAnswer,)},
            (400, 401, 403, 413, 429, 503),
            (NewTokenBody,),
        ),
        token_handlers.create,
        admins_only=True,
    ),
    ServedRoute(
        Route("POST", "/tokens/{id}/revoke", "Revoke a token", {202: (RevokedAnswer,)}, _CHANGE),
        token_handlers.revoke,
        admins_only=True,
    ),
    ServedRoute(
        Route(
            "POST",
            "/tokens/{id}/rotate",
            "Replace a token by one with the same rights",
            {201: (MadeTokenAnswer,)},
            _CHANGE,
            (RotateBody,),
        ),
        token_handlers.rotate,
        admins_only=True,
    ),
    ServedRoute(
        Route("GET", "/events", "Events as they happen", {200: EVENT_STREAM}, _READ, query=EventsQuery),
        event_streams.events,
    ),
    ServedRoute(
        Route("GET", "/metrics", "Metrics for Prometheus", {200: TEXT}, _READ),
        monitoring.metrics,
        operators_only=True,
    ),
    ServedRoute(
        Route("GET", "/whoami", "The owner of the token", {200: (CallerAnswer,)}, _READ), monitoring.caller
    ),
    ServedRoute(
        Route(
            "GET", "/health", "Whether the server runs", {200: (HealthAnswer,)}, (400, 413, 503), is_open=True
        ),
        monitoring.health,
    ),
    ServedRoute(
        Route(
            "GET", "/ready", "Whether all parts run", {200: (HealthAnswer,)}, (400, 413, 503), is_open=True
        ),
        monitoring.ready,
    ),
    ServedRoute(
        Route("GET", "/bus", "Buses by name", {200: (BusesAnswer,)}, _READ), event_streams.find_buses
    ),
    ServedRoute(
        Route(
            "GET",
            "/bus/{name}/messages",
            "Messages of a bus",
            {200: (BusAnswer,)},
            _READ,
            query=BusQuery,
            streams=True,
        ),
        event_streams.read_bus,
    ),
    ServedRoute(
        Route(
            "POST",
            "/bus/{name}/messages",
            "Append to a bus",
            {201: (BusIdAnswer,)},
            (400, 401, 403, 413, 429, 503, 507),
            (NewBusMessage,),
        ),
        event_streams.append_bus,
        BUS_POST_BYTES_MAX,
    ),
    ServedRoute(
        Route(
            "POST",
            "/bus/{name}/remove",
            "Remove a bus with its archives",
            {202: (RemovedBusAnswer,)},
            _CHANGE,
            query=BusOfQuery,
        ),
        event_streams.remove_bus,
    ),
    ServedRoute(
        Route("GET", "/openapi.json", "This document", {200: (dict[str, Any],)}, (400, 401, 413, 429, 503)),
        monitoring.openapi,
    ),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    return document([served.route for served in ROUTES], version("postroom"))
