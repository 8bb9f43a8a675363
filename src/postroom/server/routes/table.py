"""All routes of the task server."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from postroom.contracts.tasks.task_views import TaskInfo
from postroom.core.gate import GATE
from postroom.engine.dlq import DeadLetter
from postroom.engine.inspection import EngineStatus, MessageInfo
from postroom.engine.token_status import TokenStatus
from postroom.goals.goal_cells import Decision
from postroom.goals.goals import GoalStatus
from postroom.server.http.endpoint import ServedRoute
from postroom.server.http.openapi import EVENT_STREAM, TEXT, Route, document
from postroom.server.routes import (
    agent_handlers,
    engine_handlers,
    event_streams,
    goal_handlers,
    monitoring,
    task_handlers,
    token_handlers,
)
from postroom.server.routes.engine_schemas import (
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
from postroom.server.routes.task_schemas import (
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
        task_handlers.claim,
        "task.claim",
    ),
    ServedRoute(
        Route(
            "POST", "/queue/complete", "Complete a task", {202: (CompletedAnswer,)}, _CHANGE, (CompleteBody,)
        ),
        task_handlers.complete,
        "task.settle",
        COMPLETE_BYTES_MAX,
    ),
    ServedRoute(
        Route("POST", "/queue/heartbeat", "Renew a lease", {202: (TaskAnswer,)}, _CHANGE, (HolderBody,)),
        task_handlers.heartbeat,
        "task.settle",
    ),
    ServedRoute(
        Route("POST", "/queue/fail", "Report a failure", {202: (TaskAnswer,)}, _CHANGE, (FailBody,)),
        task_handlers.fail,
        "task.settle",
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
        task_handlers.release,
        "task.settle",
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
        task_handlers.enqueue,
        "task.enqueue",
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
        task_handlers.result,
        "task.settle",
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
        task_handlers.result,
        "task.settle",
    ),
    ServedRoute(
        Route("POST", "/tasks/{id}/cancel", "End a task without a result", {202: (TaskAnswer,)}, _CHANGE),
        task_handlers.cancel,
        "task.cancel",
    ),
    ServedRoute(
        Route("POST", "/tasks/{id}/retry", "Queue a dead task again", {202: (TaskAnswer,)}, _CHANGE),
        task_handlers.retry,
        "task.retry",
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
        task_handlers.show,
        "task.read",
    ),
    ServedRoute(
        Route(
            "GET", "/tasks", "Tasks in the order of acceptance", {200: (LinesAnswer,)}, _READ, query=FindQuery
        ),
        task_handlers.find,
        "task.list",
    ),
    ServedRoute(
        Route("GET", "/queue/status", "The state of the queues", {200: (StatusAnswer,)}, _READ),
        task_handlers.status,
        "task.list",
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
        "message.submit",
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
        "message.list",
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
        "message.read",
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
        "message.read",
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
        "message.read",
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
        "message.cancel",
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
        "message.submit",
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
        "agent.list",
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
        "agent.join",
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
        "agent.inbox",
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
        "agent.join",
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
        "agent.join",
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
        "agent.inbox",
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
        "agent.send",
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
        "agent.inbox",
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
        "agent.inbox",
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
        "bounce.list",
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
        "bounce.remove",
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
        "message.read",
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
        "letter.list",
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
        "letter.replay",
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
        "letter.purge",
    ),
    ServedRoute(
        Route("GET", "/engine/dlq/{id}", "A dead letter and its errors", {200: (DeadLetter,)}, (*_READ, 409)),
        engine_handlers.dead_letter,
        "letter.read",
    ),
    ServedRoute(
        Route("GET", "/engine/status", "The state of the global queue", {200: (EngineStatus,)}, _READ),
        engine_handlers.status,
        "engine.read",
    ),
    ServedRoute(
        Route("GET", "/engine/tokens", "The token budgets of models", {200: (TokenStatus,)}, _READ),
        engine_handlers.tokens,
        "engine.read",
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
        "engine.pause",
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
        "engine.pause",
    ),
    ServedRoute(
        Route("GET", "/engine/goals", "Goals and their states", {200: (GoalsAnswer,)}, _READ),
        goal_handlers.goals,
        "goal.read",
    ),
    ServedRoute(
        Route("GET", "/engine/goals/{id}", "How a goal stands", {200: (GoalStatus,)}, _READ),
        goal_handlers.goal,
        "goal.read",
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
        "goal.read",
    ),
    ServedRoute(
        Route(
            "GET", "/engine/decisions", "Decisions that wait for a person", {200: (DecisionsAnswer,)}, _READ
        ),
        goal_handlers.decisions,
        "decision.read",
    ),
    ServedRoute(
        Route("GET", "/engine/decisions/{id}", "A decision and its question", {200: (Decision,)}, _READ),
        goal_handlers.decision,
        "decision.read",
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
        "decision.answer",
    ),
    ServedRoute(
        Route("GET", "/engine/conflicts", "Operations that are under way", {200: (ConflictsAnswer,)}, _READ),
        goal_handlers.conflicts,
        "goal.read",
    ),
    ServedRoute(
        Route("GET", "/tokens", "Tokens, without their texts", {200: (TokensAnswer,)}, _READ),
        token_handlers.tokens,
        "token.list",
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
        "token.create",
    ),
    ServedRoute(
        Route("POST", "/tokens/{id}/revoke", "Revoke a token", {202: (RevokedAnswer,)}, _CHANGE),
        token_handlers.revoke,
        "token.end",
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
        "token.end",
    ),
    ServedRoute(
        Route("GET", "/events", "Events as they happen", {200: EVENT_STREAM}, _READ, query=EventsQuery),
        event_streams.events,
        "task.list",
    ),
    ServedRoute(
        Route("GET", "/metrics", "Metrics for Prometheus", {200: TEXT}, _READ),
        monitoring.metrics,
        "server.measure",
    ),
    ServedRoute(
        Route("GET", "/whoami", "The owner of the token", {200: (CallerAnswer,)}, _READ),
        monitoring.caller,
        "server.read",
    ),
    ServedRoute(
        Route("GET", "/health", "Whether the server runs", {200: (HealthAnswer,)}, (400, 413, 503)),
        monitoring.health,
        "server.look",
    ),
    ServedRoute(
        Route("GET", "/ready", "Whether all parts run", {200: (HealthAnswer,)}, (400, 413, 503)),
        monitoring.ready,
        "server.look",
    ),
    ServedRoute(
        Route("GET", "/bus", "Buses by name", {200: (BusesAnswer,)}, _READ),
        event_streams.find_buses,
        "bus.list",
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
        "bus.read",
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
        "bus.post",
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
        "bus.remove",
    ),
    ServedRoute(
        Route("GET", "/openapi.json", "This document", {200: (dict[str, Any],)}, (400, 401, 413, 429, 503)),
        monitoring.openapi,
        "server.read",
    ),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    open_paths = [served.route.path for served in ROUTES if GATE[served.entry].who == "anybody"]
    return document([served.route for served in ROUTES], version("postroom"), open_paths)
