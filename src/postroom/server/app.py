"""The task server as an ASGI application, and as a process.

Rule 1: every route but `/health`, `/ready` and the sign-in of the live page needs a token.
Rule 2: every body, request head, queue of requests and stream has a limit. One token cannot use up a
        limit that others share.
"""

import asyncio
import errno
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Message, Receive, Scope, Send

from postroom.calls.fields import LEASE_S_MAX
from postroom.calls.server import ErrorAnswer
from postroom.contracts.tasks.task_input import LEASE_S_MIN
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.times import checked_seconds
from postroom.errors import PostroomError, Unavailable
from postroom.goals.engine import Engine
from postroom.message import Durability
from postroom.server.access.refusal_events import RefusedCall
from postroom.server.access.registry import Agents
from postroom.server.folder.bus_owners import take_over
from postroom.server.folder.buses import BUS_BYTES_MAX, Buses
from postroom.server.harness.harness import DRAIN_EVERY_S, SWEEP_EVERY_S, Execute, Harness
from postroom.server.http.endpoint import Endpoint, identified, note_refusal, refuse
from postroom.server.http.exchange import IDENTITY, TOKEN, HttpRequest, Refusal
from postroom.server.http.hosts import Hosts
from postroom.server.http.listener import HttpServer, listener_config
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.table import ROUTES, openapi
from postroom.server.telemetry.alert_sinks import NO_SINKS, SendNotice
from postroom.server.telemetry.alerts import Alerter
from postroom.server.telemetry.export import exporting
from postroom.server.telemetry.server_log import ServerLog, ServerLogHandler
from postroom.system.atomic import make_folder
from postroom.system.heartbeat import BEAT_EVERY_S, HEARTBEAT

if TYPE_CHECKING:
    from postroom.server.telemetry.engine_spans import TaskSpans

HOST = "127.0.0.1"
SERVICE = "postroom-http"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise
PORT = 8800
SOCKET_BACKLOG = 2_048
REFUSALS = range(400, 500)  # status codes of calls that are refused because of the caller
LIBRARY_LOGS = ("uvicorn.error", "asyncio", "postroom")


class MountedApp(Protocol):
    """A mounted ASGI application. The caller is in the scope under `IDENTITY`."""

    path: str

    def start(self) -> None:
        """Prepare for calls when the server starts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """End what it has started."""


class PageApp(Protocol):
    """An ASGI application that identifies its callers itself."""

    def serves(self, path: str) -> bool:
        """Whether a path is one of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """End what it has started."""


Mount = Callable[["TasksApp"], MountedApp]
"""Makes the application that is mounted, for an application that answers its calls."""


# ---- the application -------------------------------------------------------------------------------


class TasksApp(Starlette):
    """All routes. Paths without parameters are looked up in a dict, because they are the hot ones."""

    def __init__(
        self,
        lifespan: Callable[["TasksApp"], Any],
        mounted: Mount | None = None,
        page: "Callable[[TasksApp], PageApp] | None" = None,
        hosts: Iterable[str] = (),
    ) -> None:
        self._hosts = Hosts(hosts)
        self.server: TaskServer | None = None
        """None before the start."""
        self.task_spans: TaskSpans | None = None
        """Given to the server when it starts."""
        self.mounted = None if mounted is None else mounted(self)
        """Serves paths of its own, to callers with a token."""
        self.page = None if page is None else page(self)
        """The live page, which identifies its callers itself."""
        endpoints = [Endpoint(self.running_server, served) for served in ROUTES]
        self._direct = {
            (endpoint.route.method, endpoint.route.path): endpoint
            for endpoint in endpoints
            if "{" not in endpoint.route.path
        }
        super().__init__(
            routes=routes_of(endpoints),
            lifespan=lifespan,
            exception_handlers={HTTPException: not_served},
        )
        self.router.redirect_slashes = False  # a path with an extra slash is unknown

    def running_server(self) -> TaskServer:
        """The server. Raises `Unavailable` before the start."""
        if self.server is None:
            raise Unavailable("the server has not started")
        return self.server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._direct.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
            if self.mounted is not None and scope["path"] == self.mounted.path:
                await self._serve_mounted(self.mounted, scope, receive, send)
                return
            if self.page is not None and self.page.serves(scope["path"]):
                await self._serve_page(self.page, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _serve_page(self, page: "PageApp", scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            self._hosts.check(request)
        except Refusal as error:
            await refuse(send, error)
            call = f"{scope['method']} of the page"
            note_refusal(self.running_server(), call, error, request.identity, scope.get("client"))
        else:
            await page(scope, receive, send)

    async def _serve_mounted(self, mounted: "MountedApp", scope: Scope, receive: Receive, send: Send) -> None:
        server, request = self.running_server(), HttpRequest(scope, receive, send)
        try:
            self._hosts.check(request)
            scope[IDENTITY] = identified(server, request, is_counted=False)
            scope[TOKEN] = request.token
        except (Refusal, PostroomError) as error:
            await refuse(send, error)
            call = f"{scope['method']} {mounted.path}"
            note_refusal(server, call, error, request.identity, scope.get("client"), token=request.token)
        else:
            await mounted(scope, receive, _noting(server, request, send, f"{scope['method']} {mounted.path}"))

    def note_refused(self, refused: RefusedCall) -> None:
        """Make an event of a call that was refused before it had a route."""
        if self.server is not None:
            self.server.refusals.note(refused)

    def end_waits(self) -> None:
        """End all long polls and streams, so that the server can stop."""
        if self.server is not None:
            self.server.end_waits()


def routes_of(endpoints: Iterable[Endpoint]) -> list[StarletteRoute]:
    """One route for each path."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.route.path, {})[endpoint.route.method] = endpoint
    return [
        StarletteRoute(path, _ByMethod(by_method), methods=[*by_method])
        for path, by_method in by_path.items()
    ]


class _ByMethod:
    """An ASGI application for all methods of one path."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is a GET whose body uvicorn leaves out.
        endpoint = self._endpoints["GET" if scope["method"] == "HEAD" else scope["method"]]
        await endpoint(scope, receive, send)


def _noting(server: TaskServer, request: HttpRequest, send: Send, call: str) -> Send:
    """A `send` that also makes an event of a refusal by the mounted application itself."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in REFUSALS:
            error = Refusal(message["status"], "NotServed", HTTPStatus(message["status"]).phrase)
            note_refusal(
                server, call, error, request.identity, request.scope.get("client"), token=request.token
            )  # fmt: skip
        await send(message)

    return noting


async def not_served(request: Request, error: Exception) -> Response:
    """The reply to a request for which there is no route. It is an event, too."""
    app: TasksApp = request.app
    if app.server is not None:
        call = f"{request.method} of an unknown path"
        asked = HttpRequest(request.scope, request.receive, _send_nothing)
        with suppress(Refusal, PostroomError):  # a caller without a token is not identified
            identified(app.server, asked, is_counted=False)
        note_refusal(
            app.server, call, error, asked.identity, request.scope.get("client"), token=asked.token
        )  # fmt: skip
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    phrase = HTTPStatus(status).phrase
    body = msgspec.json.encode(ErrorAnswer(phrase.replace(" ", ""), f"{phrase}: see /openapi.json"))
    return Response(body, status, dict(headers or {}), "application/json")


async def _send_nothing(message: Message) -> None:
    """The `send` of a request whose caller is only looked up."""


@cache
def _openapi_json() -> bytes:
    return msgspec.json.encode(openapi())


def create_app(
    data: Path,
    tasks: Tasks,
    *,
    agents: Agents | None = None,
    harness: Harness | None = None,
    engine: Engine | None = None,
    server_log: ServerLog | None = None,
    bus_durability: Durability = "os",
    bus_max_bytes: int = BUS_BYTES_MAX,
    lease_s_max: float = LEASE_S_MAX,
    token_rate: float = 0.0,
    mounted: Mount | None = None,
    page: Callable[[TasksApp], PageApp] | None = None,
    hosts: Iterable[str] = (),
) -> TasksApp:
    """The server of a data folder as an ASGI application. The harness runs from its start to its end.

    The caller closes `tasks`. `engine` has to use the same store; without one, the global queue has the
    default rules and types.
    """
    engine = Engine(tasks.store) if engine is None else engine
    agents = Agents(data) if agents is None else agents
    server_log = ServerLog() if server_log is None else server_log
    if harness is None:
        harness = Harness(tasks, agents=agents, server_log=server_log)

    @asynccontextmanager
    async def lifespan(app: TasksApp) -> AsyncIterator[None]:
        unreadable = await asyncio.to_thread(_taken_over, data, tasks, agents)
        buses = Buses(data, tasks.store, bus_durability, bus_max_bytes, unreadable)
        server = app.server = TaskServer(tasks, agents, harness, buses, server_log, engine, token_rate)
        server.openapi_json = _openapi_json
        server.task_spans = app.task_spans
        server.lease_s_max = lease_s_max
        harness.start()
        beats = asyncio.create_task(_beat())
        if app.mounted is not None:
            app.mounted.start()
        try:
            yield
        finally:
            beats.cancel()
            for beside in (app.mounted, app.page):
                if beside is not None:
                    await beside.close()
            await server.stop_coordinator()
            await server.refusals.close()
            await asyncio.to_thread(harness.stop)
            await asyncio.to_thread(server.close)

    return TasksApp(lifespan, mounted, page, hosts)


def _taken_over(data: Path, tasks: Tasks, agents: Agents) -> Unavailable | None:
    """Take over the owners of buses of an earlier version. Returns why they cannot be read; else None."""
    try:
        take_over(data, tasks.store, agents.knows)
    except Unavailable as error:
        return error
    return None


async def _beat() -> None:
    """Tell the supervisor that the event loop goes on."""
    while True:
        HEARTBEAT.beat()
        await asyncio.sleep(BEAT_EVERY_S)


# ---- the process -----------------------------------------------------------------------------------


def serve(
    data: Path,
    *,
    store: str | None = None,
    host: str = HOST,
    port: int = PORT,
    overlap: bool = False,
    execute: Execute | None = None,
    allowed_nudge_hosts: Iterable[str] = (),
    durability: Durability = "group",
    bus_max_bytes: int = BUS_BYTES_MAX,
    drain_every_s: float = DRAIN_EVERY_S,
    sweep_every_s: float = SWEEP_EVERY_S,
    lease_s_max: float = LEASE_S_MAX,
    token_rate: float = 0.0,
    concurrency: int = 1,
    in_order: bool = False,
    app_engine: Engine | None = None,
    server_log: ServerLog | None = None,
    ready: Callable[[int], None] | None = None,
    beside: AbstractContextManager[object] | None = None,
    tls: tuple[Path, Path | None] | None = None,
    mounted: Mount | None = None,
    page: Callable[[TasksApp], PageApp] | None = None,
    hosts: Iterable[str] = (),
    sinks: Mapping[str, SendNotice] = NO_SINKS,
) -> None:
    """Serve the data folder until SIGTERM or SIGINT. `ready` is called with the port.

    The tasks are in `store`, or in the file queue.db of the folder.

    `beside` is entered once the server has its port and its folder. A server that cannot start removes the
    folders that it made. No lease is longer than `lease_s_max`. `concurrency` decisions are executed at the
    same time; with `in_order`, those of one agent one after the other. The global queue has the rules and
    types of `app_engine`, but not its store. A token without a rate of its own may make `token_rate` calls a
    second; 0 means no limit. `tls` is a certificate and its key. `hosts` are further names that the page and
    MCP answer for. `sinks` are told of alerts. With `overlap`, another server with `overlap` may listen on
    the same port: during an upgrade the new one starts before the old one ends.
    """
    checked_seconds("lease_s_max", lease_s_max, LEASE_S_MAX, shortest_s=LEASE_S_MIN)
    server_log = ServerLog() if server_log is None else server_log
    with (
        _listen(host, port, overlap=overlap) as listening,
        _folder(data),
        beside or nullcontext(),
        Tasks.open(store or f"sqlite:///{data / 'queue.db'}", durability=durability) as tasks,
        _library_logs(server_log),
        exporting(SERVICE) as telemetry,
    ):
        tasks.store.identity()  # a store that does not answer is one error here, and not one of each thread
        agents = Agents(data)
        engine = Engine(tasks.store) if app_engine is None else app_engine.on(tasks.store)
        place, certificate = f"{socket.gethostname()}:{data}", None if tls is None else tls[0]
        alerter = Alerter(tasks.store, engine.policy, data, sinks, place=place, certificate=certificate)
        harness = Harness(
            tasks,
            agents=agents,
            execute=execute,
            alerts=alerter.look,
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
            engine=engine,
            server_log=server_log,
            bus_durability=durability,
            bus_max_bytes=bus_max_bytes,
            lease_s_max=lease_s_max,
            token_rate=token_rate,
            mounted=mounted,
            page=page,
            hosts=(host, *hosts),
        )

        served = app if telemetry is None else telemetry.serving(app, engine, server_log)
        _run(served, listening, server_log, ready, tls)
    server_log.close()


def _run(
    app: TasksApp,
    listening: socket.socket,
    server_log: ServerLog,
    ready: Callable[[int], None] | None,
    tls: tuple[Path, Path | None] | None,
) -> None:
    """Serve until a signal, with a log line at the start and at the end."""
    host, port = listening.getsockname()[:2]

    def started() -> None:
        server_log.write("serving", host=host, port=port)
        if ready is not None:
            ready(port)

    config = listener_config(app, app.note_refused, tls)
    HttpServer(config, end_waits=app.end_waits, started=started).run(sockets=[listening])
    server_log.write("stopped")


@contextmanager
def _folder(data: Path) -> Iterator[None]:
    """Make the data folder. If the server fails while the folder is still empty, remove it again."""
    made = list(itertools.takewhile(lambda folder: not folder.exists(), (data, *data.parents)))
    try:
        make_folder(data, "os")
        yield
    except BaseException:
        with suppress(OSError):  # a folder that is not empty stays
            for folder in made:
                folder.rmdir()
        raise


def _listen(host: str, port: int, *, overlap: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=SOCKET_BACKLOG, reuse_port=overlap)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = "another program listens there, so choose another port" if in_use else error.strerror
        raise Unavailable(f"cannot listen on {host} port {port}: {why}") from error


@contextmanager
def _library_logs(server_log: ServerLog) -> Iterator[None]:
    """Write the logs of libraries to the server log."""
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
