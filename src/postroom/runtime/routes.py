"""All routes of the task server."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from postroom.contracts.task_views import TaskInfo
from postroom.runtime import event_streams, handlers, monitoring
from postroom.runtime.endpoint import ServedRoute
from postroom.runtime.openapi import EVENT_STREAM, TEXT, Route, document
from postroom.runtime.schemas import (
    BUS_POST_BYTES_MAX,
    COMPLETE_BYTES_MAX,
    ENQUEUE_BYTES_MAX,
    BusAnswer,
    BusIdAnswer,
    BusQuery,
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
    NewBusMessage,
    NewTaskAnswer,
    NewTasksAnswer,
    NextBody,
    ResultBody,
    ShowQuery,
    StatusAnswer,
    TaskAnswer,
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
        Route("GET", "/events", "Events as they happen", {200: EVENT_STREAM}, _READ, query=EventsQuery),
        event_streams.events,
    ),
    ServedRoute(
        Route("GET", "/metrics", "Metrics for Prometheus", {200: TEXT}, _READ),
        monitoring.metrics,
        operators_only=True,
    ),
    ServedRoute(
        Route(
            "GET", "/health", "Whether the server runs", {200: (HealthAnswer,)}, (400, 413, 503), is_open=True
        ),
        monitoring.health,
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
            (400, 401, 413, 429, 503, 507),
            (NewBusMessage,),
        ),
        event_streams.append_bus,
        BUS_POST_BYTES_MAX,
    ),
    ServedRoute(
        Route("GET", "/openapi.json", "This document", {200: (dict[str, Any],)}, (400, 401, 413, 429, 503)),
        monitoring.openapi,
    ),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    return document([served.route for served in ROUTES], version("postroom"))
