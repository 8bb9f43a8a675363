"""The task server: every word of `Tasks` over HTTP, for agents and operators.

Rule 1: every route but `/health` wants a bearer token.
Rule 2: every body, head, line and stream has a limit, and what is over it is refused before it is kept.
        One token cannot use up a limit that others share.
Rule 3: every request gets an answer, and an error is one sentence without a path or a payload of ours.
"""

import asyncio
import errno
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from postroom.contracts.task_input import LEASE_S_MAX, LEASE_S_MIN
from postroom.contracts.tasks import TaskInfo, Tasks
from postroom.core.fieldfaults import field_fault
from postroom.core.times import checked_seconds
from postroom.errors import (
    BusFull,
    InvalidMessage,
    PostroomError,
    QueueFull,
    Rejected,
    SinceIdNotFound,
    StaleLease,
    TooMany,
    Unavailable,
    UnknownTask,
    UnsafePath,
    WrongState,
    reason,
)
from postroom.message import Durability
from postroom.runtime.agents import Agents
from postroom.runtime.buses import BUS_BYTES_MAX, Buses
from postroom.runtime.handlers import (
    JSON_TYPE,
    NOTHING,
    OPERATORS_ONLY,
    ClientDisconnected,
    Handler,
    HttpReply,
    HttpRequest,
    Refusal,
    TaskHandlers,
)
from postroom.runtime.harness import DRAIN_EVERY_S, SWEEP_EVERY_S, Execute, Harness
from postroom.runtime.listener import CONNECTION, HttpServer, listener_config
from postroom.runtime.openapi import EVENT_STREAM, TEXT, Route, document
from postroom.runtime.schemas import (
    BUS_POST_BYTES_MAX,
    COMPLETE_BYTES_MAX,
    ENQUEUE_BYTES_MAX,
    URL_QUERY_FIELDS_MAX,
    WORD_BYTES_MAX,
    BusAnswer,
    BusIdAnswer,
    BusQuery,
    ClaimedTask,
    ClaimedTasks,
    CompleteBody,
    CompletedAnswer,
    EnqueueBody,
    EnqueueManyBody,
    ErrorAnswer,
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
from postroom.runtime.server_log import ServerLog, ServerLogHandler, error_location
from postroom.system.atomic import make_folder

HOST = "127.0.0.1"
PORT = 8800
RETRY_AFTER_S = 1
LIBRARY_LOGS = ("uvicorn.error", "asyncio", "postroom")

STATUS_OF: dict[type[BaseException], int] = {
    StaleLease: 409,
    WrongState: 409,
    UnknownTask: 404,
    SinceIdNotFound: 404,
    Rejected: 400,
    QueueFull: 429,
    TooMany: 429,
    BusFull: 507,
    Unavailable: 503,
    PostroomError: 500,
}
"""The first class in an error's family that is named here decides."""

_encode = msgspec.json.Encoder().encode


# ---- one route -------------------------------------------------------------------------------------


class Endpoint:
    """An ASGI application for one method of one path: token in, body in, answer out."""

    def __init__(
        self,
        app: "TasksApp",
        route: Route,
        handler: str,
        *,
        operators_only: bool,
        body_bytes_max: int,
    ) -> None:
        self.route = route
        self._app = app
        self._handler = handler
        self._operators_only = operators_only
        self._body_bytes_max = body_bytes_max
        self._decoders: list[msgspec.json.Decoder[Any]] = [
            msgspec.json.Decoder(body) for body in route.bodies
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handlers = self._app.handlers
        request = HttpRequest(scope, receive, send)
        try:
            reply = await self._answer(handlers, request)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            reply = _error_reply(503, "Unavailable", "the server ends now: try again soon")
        except BaseException as error:  # noqa: BLE001 - every request gets an answer
            reply = self._refuse(handlers, request, error)
        finally:
            if request.body_bytes_held:
                handlers.body_bytes.give_back(request.identity, request.body_bytes_held)
        if reply is None:
            handlers.requests[self.route.path, 200] += 1
            return
        handlers.requests[self.route.path, reply.status] += 1
        await _send(send, reply)

    async def _answer(self, handlers: TaskHandlers, request: HttpRequest) -> HttpReply | None:
        if not self.route.is_open:
            self._identify(handlers, request)
        body = await _read_body(handlers, request, self._body_bytes_max)
        request.size = len(body)
        if self._decoders:
            request.body = self._decode(body)
        else:
            request.query = _decode_query(request.scope["query_string"], self.route.query)
        handler: Handler = getattr(handlers, self._handler)
        return await handler(request)

    def _identify(self, handlers: TaskHandlers, request: HttpRequest) -> None:
        scheme, _, token = request.header(b"authorization").partition(" ")
        request.token = token.strip()
        identity = handlers.agents.identify(request.token) if scheme.lower() == "bearer" else None
        if identity is None:
            raise Refusal(401, "Unauthorized", "a bearer token of this server is needed")
        request.identity = identity
        connection = request.scope.get(CONNECTION)
        if connection is not None:  # the first request with a token on it
            connection.identify(identity)
        if self._operators_only and not identity.is_operator:
            raise Refusal(403, "Forbidden", OPERATORS_ONLY)

    def _decode(self, body: bytes) -> Any:
        """The body as the first of the route's structs that it fits."""
        for decoder in self._decoders[:-1]:
            with suppress(msgspec.ValidationError):
                return _decoded(decoder, body)
        try:
            return _decoded(self._decoders[-1], body)
        except msgspec.ValidationError as error:
            raise InvalidMessage(self._why(body, error)) from None

    def _why(self, body: bytes, error: msgspec.ValidationError) -> str:
        """The first struct's complaint, unless the body is meant as the last."""
        if len(self._decoders) > 1 and b'"tasks"' not in body:
            try:
                self._decoders[0].decode(body)
            except msgspec.ValidationError as first:
                return field_fault(first, "the body", self.route.bodies[0])
        return field_fault(error, "the body", self.route.bodies[-1])

    def _refuse(self, handlers: TaskHandlers, request: HttpRequest, error: BaseException) -> HttpReply:
        reply = _refusal(error)
        facts = {
            "route": self.route.path,
            "status": reply.status,
            "error": error.error if isinstance(error, Refusal) else type(error).__name__,
        }
        if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            facts["error"] = error_location(error)
        task_id = getattr(request.body, "task_id", None) or ""
        if reply.status == HTTPStatus.UNAUTHORIZED:
            handlers.server_log.write_rarely(
                "refused", **facts
            )  # anybody can cause it, as often as they like
        else:
            handlers.server_log.write("refused", task_id=task_id, agent=request.identity.name, **facts)
        return reply


def _decoded(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"the body is not JSON: {reason(error)}") from None


def _decode_query(query: bytes, kind: type) -> Any:
    try:
        pairs = parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=URL_QUERY_FIELDS_MAX
        )  # fmt: skip
    except ValueError:
        raise InvalidMessage(f"the query has more than {URL_QUERY_FIELDS_MAX} fields") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidMessage("the query names a field twice")
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidMessage(field_fault(error, "the query", kind)) from None


async def _read_body(handlers: TaskHandlers, request: HttpRequest, bytes_max: int) -> bytes:
    """The whole body. Also where none is wanted: a request is acted on when it has arrived in full."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > bytes_max:
            raise Refusal(413, "TooLong", f"a body of at most {bytes_max} bytes is taken here")
        if not message.get("more_body", False):
            return b"".join([*pieces, piece]) if pieces else piece  # most bodies come in one piece
        handlers.body_bytes.take(request.identity, len(piece))
        request.body_bytes_held = size
        pieces.append(piece)


def _refusal(error: BaseException) -> HttpReply:
    """The answer to whatever went wrong."""
    if isinstance(error, Refusal):
        return _error_reply(error.status, error.error, str(error))
    status = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return _error_reply(status, "InternalError", "the server made a mistake, and has written it down")
    message = _public(error)
    retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
    return _error_reply(status, type(error).__name__, message, retry_after_s)


def _public(error: BaseException) -> str:
    """An error's sentence; where things lie on the server's disk is nobody's business."""
    match error:
        case SinceIdNotFound():
            return f"there is no message {error.since_id!r} in this bus"
        case UnsafePath():
            return "the attachment has to lie in the folder of the bus"
        case Unavailable() if type(error) not in (Unavailable, QueueFull, TooMany, BusFull):
            return "the store cannot be used now: try again soon"
        case _:
            return str(error)


_EXTRA: dict[int, tuple[tuple[bytes, bytes], ...]] = {
    401: ((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
    413: ((b"connection", b"close"),),
}


def _error_reply(status: int, error: str, message: str, retry_after_s: float = RETRY_AFTER_S) -> HttpReply:
    body = _encode(ErrorAnswer(error, message.encode("utf-8", "replace").decode()))
    headers = (JSON_TYPE, *_EXTRA.get(status, ()))
    if status in (429, 503, 507):
        headers += ((b"retry-after", str(max(1, round(retry_after_s))).encode()),)
    return HttpReply(status, body, headers)


async def _send(send: Send, reply: HttpReply) -> None:
    headers = [*reply.headers]
    if reply.status != NOTHING.status:
        headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


# ---- all routes ------------------------------------------------------------------------------------

_WORD = (400, 401, 403, 404, 409, 413, 429, 503)
_OPERATOR = (400, 401, 403, 404, 409, 413, 429, 503)
_LOOK = (400, 401, 403, 404, 413, 429, 503)


class _Served(NamedTuple):
    """A route, who answers it, and on which terms."""

    route: Route
    handler: str
    body_bytes_max: int = WORD_BYTES_MAX
    operators_only: bool = False


ROUTES: Sequence[_Served] = (
    _Served(
        Route(
            "POST",
            "/queue/next",
            "Lease the next task, or wait for one",
            {200: (ClaimedTask, ClaimedTasks), 204: None},
            (400, 401, 403, 413, 429, 503),
            (NextBody,),
        ),
        "next",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route(
            "POST", "/queue/complete", "The task is done", {202: (CompletedAnswer,)}, _WORD, (CompleteBody,)
        ),
        "complete",
        COMPLETE_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/queue/heartbeat", "Keep the lease", {202: (TaskAnswer,)}, _WORD, (HolderBody,)),
        "heartbeat",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/queue/fail", "The task failed", {202: (TaskAnswer,)}, _WORD, (FailBody,)),
        "fail",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/queue/release", "Give the task back", {202: (TaskAnswer,)}, _WORD, (HolderBody,)),
        "release",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route(
            "POST",
            "/queue/enqueue",
            "Store one task, or several",
            {201: (NewTaskAnswer, NewTasksAnswer)},
            (400, 401, 403, 413, 429, 503),
            (EnqueueBody, EnqueueManyBody),
        ),
        "enqueue",
        ENQUEUE_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/harness/result", "A result may be there", {202: (TaskAnswer,)}, _WORD, (ResultBody,)),
        "result",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/result", "The same, by foreman's name", {202: (TaskAnswer,)}, _WORD, (ResultBody,)),
        "result",
        WORD_BYTES_MAX,
    ),
    _Served(
        Route("POST", "/tasks/{id}/cancel", "Nobody shall work on it", {202: (TaskAnswer,)}, _OPERATOR),
        "cancel",
        operators_only=True,
    ),
    _Served(
        Route("POST", "/tasks/{id}/retry", "Try a dead task again", {202: (TaskAnswer,)}, _OPERATOR),
        "retry",
        operators_only=True,
    ),
    _Served(
        Route(
            "GET",
            "/tasks/{id}",
            "A task and its history, at once or when it has ended",
            {200: (TaskInfo,)},
            _LOOK,
            query=ShowQuery,
        ),
        "show",
    ),
    _Served(
        Route("GET", "/tasks", "Tasks by acceptance", {200: (LinesAnswer,)}, _LOOK, query=FindQuery), "find"
    ),
    _Served(Route("GET", "/queue/status", "How the queues stand", {200: (StatusAnswer,)}, _LOOK), "status"),
    _Served(
        Route("GET", "/events", "What happens, as it happens", {200: EVENT_STREAM}, _LOOK, query=EventsQuery),
        "events",
    ),
    _Served(Route("GET", "/metrics", "Prometheus text", {200: TEXT}, _LOOK), "metrics", operators_only=True),
    _Served(
        Route(
            "GET", "/health", "Whether the server runs", {200: (HealthAnswer,)}, (400, 413, 503), is_open=True
        ),
        "health",
    ),
    _Served(
        Route(
            "GET",
            "/bus/{name}/messages",
            "Messages of a bus",
            {200: (BusAnswer,)},
            _LOOK,
            query=BusQuery,
            streams=True,
        ),
        "read_bus",
    ),
    _Served(
        Route(
            "POST",
            "/bus/{name}/messages",
            "Append to a bus",
            {201: (BusIdAnswer,)},
            (400, 401, 413, 429, 503, 507),
            (NewBusMessage,),
        ),
        "append_bus",
        BUS_POST_BYTES_MAX,
    ),
)


OPENAPI = Route("GET", "/openapi.json", "This document", {200: (dict[str, Any],)}, (400, 401, 413, 429, 503))


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    return document([*(served.route for served in ROUTES), OPENAPI], version("postroom"))


# ---- the application -------------------------------------------------------------------------------


class ByMethod:
    """An ASGI application for all methods of one path."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is a GET whose body the server leaves out.
        endpoint = self._endpoints["GET" if scope["method"] == "HEAD" else scope["method"]]
        await endpoint(scope, receive, send)


class TasksApp(Starlette):
    """All routes. Those that are called thousands of times a second are found without a search."""

    def __init__(self, opened: Callable[["TasksApp"], Any]) -> None:
        self._handlers: TaskHandlers | None = None
        served = [(entry.route, self._endpoint(entry)) for entry in ROUTES]
        served.append((OPENAPI, self._endpoint(_Served(OPENAPI, "openapi"))))
        self._direct = {
            (route.method, route.path): endpoint for route, endpoint in served if "{" not in route.path
        }
        by_path: dict[str, dict[str, Endpoint]] = {}
        for route, endpoint in served:
            by_path.setdefault(route.path, {})[route.method] = endpoint
        super().__init__(
            routes=[
                StarletteRoute(path, ByMethod(endpoints), methods=[*endpoints])
                for path, endpoints in by_path.items()
            ],
            lifespan=opened,
            exception_handlers={HTTPException: _not_served},
        )
        self.router.redirect_slashes = False  # a path with a slash too many is unknown
        self.openapi_json = msgspec.json.encode(openapi())

    def _endpoint(self, served: _Served) -> Endpoint:
        return Endpoint(
            self,
            served.route,
            served.handler,
            operators_only=served.operators_only,
            body_bytes_max=served.body_bytes_max,
        )

    @property
    def handlers(self) -> TaskHandlers:
        """What the routes share; there is none before the start."""
        if self._handlers is None:
            raise Unavailable("the server has not started")
        return self._handlers

    @handlers.setter
    def handlers(self, handlers: TaskHandlers | None) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._direct.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def end_waits(self) -> None:
        """Send home whoever waits, so that the server can end."""
        if self._handlers is not None:
            self._handlers.end_waits()


async def _not_served(request: Request, error: Exception) -> Response:  # noqa: ARG001 - as Starlette calls it
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    phrase = HTTPStatus(status).phrase
    body = msgspec.json.encode(ErrorAnswer(phrase.replace(" ", ""), f"{phrase}: see /openapi.json"))
    return Response(body, status, dict(headers or {}), "application/json")


def create_app(
    data: Path,
    tasks: Tasks,
    *,
    execute: Execute | None = None,
    agents: Agents | None = None,
    harness: Harness | None = None,
    server_log: ServerLog | None = None,
    allowed_nudge_hosts: Iterable[str] = (),
    bus_durability: Durability = "os",
    bus_max_bytes: int = BUS_BYTES_MAX,
    lease_s_max: float = LEASE_S_MAX,
) -> TasksApp:
    """The server of a data folder as an ASGI application; its loops run from its start to its end.

    `tasks` stays the caller's, who closes it.
    """
    agents = Agents(data) if agents is None else agents
    server_log = ServerLog() if server_log is None else server_log
    if harness is None:
        harness = Harness(
            tasks,
            agents=agents,
            execute=execute,
            allowed_nudge_hosts=allowed_nudge_hosts,
            server_log=server_log,
        )

    @asynccontextmanager
    async def opened(app: TasksApp) -> AsyncIterator[None]:
        handlers = app.handlers = TaskHandlers(
            tasks, agents, harness, Buses(data, bus_durability, bus_max_bytes), server_log
        )
        handlers.openapi_json = app.openapi_json
        handlers.lease_s_max = lease_s_max
        harness.start()
        try:
            yield
        finally:
            await asyncio.to_thread(harness.stop)
            await asyncio.to_thread(handlers.close)

    return TasksApp(opened)


# ---- the process -----------------------------------------------------------------------------------


def serve(
    data: Path,
    *,
    host: str = HOST,
    port: int = PORT,
    execute: Execute | None = None,
    allowed_nudge_hosts: Iterable[str] = (),
    durability: Durability = "group",
    bus_max_bytes: int = BUS_BYTES_MAX,
    drain_every_s: float = DRAIN_EVERY_S,
    sweep_every_s: float = SWEEP_EVERY_S,
    lease_s_max: float = LEASE_S_MAX,
    concurrency: int = 1,
    in_order: bool = False,
    server_log: ServerLog | None = None,
    ready: Callable[[int], None] | None = None,
    beside: AbstractContextManager[object] | None = None,
) -> None:
    """Serve the data folder until SIGTERM or SIGINT. `ready` is called with the port that is listened to.

    `beside` is entered once the server has its port and its folder. When the server cannot start, no folder
    is left that was not there before. No lease is longer than `lease_s_max`. `concurrency` decisions are
    executed at the same time; with `in_order`, those of one agent one after the other.
    """
    checked_seconds("lease_s_max", lease_s_max, LEASE_S_MAX, shortest_s=LEASE_S_MIN)
    server_log = ServerLog() if server_log is None else server_log
    with (
        _listen(host, port) as listening,
        _folder(data),
        beside or nullcontext(),
        Tasks.open(f"sqlite:///{data / 'queue.db'}", durability=durability) as tasks,
        _as_lines(server_log),
    ):
        agents = Agents(data)
        harness = Harness(
            tasks,
            agents=agents,
            execute=execute,
            drain_every_s=drain_every_s,
            sweep_every_s=sweep_every_s,
            allowed_nudge_hosts=allowed_nudge_hosts,
            concurrency=concurrency,
            in_order=in_order,
            server_log=server_log,
        )
        app = create_app(
            data,
            tasks,
            agents=agents,
            harness=harness,
            server_log=server_log,
            bus_durability=durability,
            bus_max_bytes=bus_max_bytes,
            lease_s_max=lease_s_max,
        )

        def started() -> None:
            port = int(listening.getsockname()[1])
            server_log.write("serving", host=host, port=port)
            if ready is not None:
                ready(port)

        HttpServer(listener_config(app), end_waits=app.end_waits, started=started).run(sockets=[listening])
        server_log.write("stopped")
    server_log.close()


@contextmanager
def _folder(data: Path) -> Iterator[None]:
    """The data folder. If the server fails before anything is in it, the folders made for it are removed."""
    made = list(itertools.takewhile(lambda folder: not folder.exists(), (data, *data.parents)))
    try:
        make_folder(data, "os")
        yield
    except BaseException:
        with suppress(OSError):  # something is in it by now
            for folder in made:
                folder.rmdir()
        raise


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2_048)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "another program listens there, so choose another port" if in_use else error.strerror
        raise Unavailable(f"cannot listen on {host} port {port}: {why}") from error


@contextmanager
def _as_lines(server_log: ServerLog) -> Iterator[None]:
    """What libraries log becomes lines of the server_log."""
    handler = ServerLogHandler(server_log)
    loggers = [logging.getLogger(name) for name in LIBRARY_LOGS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
