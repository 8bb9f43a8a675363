"""The live page as a part of the task server: its routes, its files, its headers and who may call it.

Rule 1: the page loads nothing from another address and runs no inline code. Its policy forbids both.
Rule 2: a caller is identified by the session in its cookie, or by a bearer token like every other caller. A
        change by a session needs the secret against forged requests.
Rule 3: a caller sees and does what the HTTP API allows its token, and nothing else.
"""

import hashlib
from collections.abc import Callable
from functools import cache, partial
from html import escape
from importlib import resources
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from postroom.calls.fields import Text
from postroom.calls.goals import Answer
from postroom.calls.verb import EVENT_STREAM, TEXT, Route
from postroom.core.gate import of_organization, permit, visible_org
from postroom.page import buses, flames, goals, letters, messages, tasks
from postroom.page.live import Live
from postroom.page.redaction import REDACTOR
from postroom.page.reports import Reports
from postroom.page.sessions import Sessions, cookie, cookie_name, csrf_of, is_csrf_of, secret_in
from postroom.server.access.registry import Identity
from postroom.server.access.tokens import digest_of
from postroom.server.app import TasksApp, not_served, routes_of
from postroom.server.http.endpoint import Endpoint, Handler, NoFields, ServedRoute, identified
from postroom.server.http.exchange import JSON_TYPE, HttpReply, HttpRequest, Refusal
from postroom.server.http.listener import CONNECTION
from postroom.server.http.task_server import TaskServer
from postroom.server.routes import event_streams, goal_handlers

if TYPE_CHECKING:
    from postroom.core.redaction import Redactor

PREFIX: Final = "/page/"
STATIC: Final = "/page/static/"
IMAGE: Final = "image/svg+xml"
CSRF_HEADER: Final = b"x-csrf-token"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
CONTENT_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
NO_SESSION: Final = b'name="session" content=""'
FOREVER: Final = b"public, max-age=31536000, immutable"
SAFE_METHODS: Final = ("GET", "HEAD")
OWN_SITES: Final = ("", "same-origin", "none")
"""What a browser says in Sec-Fetch-Site about a request of the page itself."""

_encode = msgspec.json.Encoder().encode


class SignInBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/sign-in`."""

    token: Annotated[str, Meta(max_length=256)]


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/stream`: `after` is the last event that the page has, where a header cannot say it."""

    after: Text = ""


def mount(redactor: "Callable[[], Redactor]") -> Callable[[TasksApp], "PageMount"]:
    """The live page of a task server. `redactor` makes what hides secrets in payloads, when it is needed."""
    return lambda app: PageMount(app, redactor)


class PageMount:
    """An ASGI application for `/` and everything below `/page/`."""

    def __init__(self, app: TasksApp, redactor: "Callable[[], Redactor]") -> None:
        self._app = app
        self._redactor = cache(redactor)
        self._known_sessions: Sessions | None = None
        self._live: Live | None = None
        self._reports = Reports()
        endpoints = [Endpoint(app.running_server, served, self._identify) for served in self.routes()]
        self._router = Router(routes_of(endpoints))
        self._router.redirect_slashes = False

    def serves(self, path: str) -> bool:
        """Whether a path belongs to the page."""
        return path == "/" or path.startswith(PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = dict(message["headers"])
                own = [header for header in HEADERS if header[0] not in given]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        scope[REDACTOR], scope["app"] = self._redactor, self._app
        try:
            await self._router(scope, receive, send_with_headers)
        except HTTPException as error:  # no such path, or another method
            response = await not_served(Request(scope, receive), error)
            await response(scope, receive, send_with_headers)

    async def close(self) -> None:
        """End the reader of live events, and the process that writes a report."""
        if self._live is not None:
            await self._live.close()
        await self._reports.close()

    # ---- callers -------------------------------------------------------------------------------

    def _sessions(self, server: TaskServer) -> Sessions:
        if self._known_sessions is None:
            self._known_sessions = Sessions(server.agents.data)
        return self._known_sessions

    def _identify(self, server: TaskServer, request: HttpRequest) -> Identity:
        secret = _secret(request)
        if request.header(b"authorization") or not secret:
            return identified(server, request)
        identity = self._session_identity(server, secret)
        if identity is None:
            raise Refusal(401, "Unauthorized", "this session has ended: sign in again")
        request.identity = identity
        server.rates.check(identity)
        if request.scope["method"] not in SAFE_METHODS:
            _check_site(request)
            if not is_csrf_of(secret, request.header(CSRF_HEADER)):
                raise Refusal(403, "Forbidden", "the header X-CSRF-Token of this session is missing or wrong")
        connection = request.scope.get(CONNECTION)
        if connection is not None:
            connection.identify(identity)
        return identity

    def _session_identity(self, server: TaskServer, secret: str) -> Identity | None:
        digest = self._sessions(server).token_of(secret)
        return None if digest is None else server.agents.identify_digest(digest)

    async def _sign_in(self, server: TaskServer, request: HttpRequest) -> HttpReply:
        body: SignInBody = request.call
        _check_site(request)
        token = body.token.strip()
        identity = server.agents.identify(token)
        if identity is None:
            raise Refusal(401, "Unauthorized", "this token is unknown, expired or revoked")
        request.identity, request.token = identity, token
        server.rates.check(identity)
        secret = await server.on_tokens(
            request, lambda: self._sessions(server).begin(digest_of(token), identity.org)
        )
        server.server_log.write("signed_in", agent=identity.name)
        name, is_tls = _cookie_of(request)
        set_cookie = (b"set-cookie", cookie(name, secret, is_tls=is_tls).encode())
        return HttpReply(200, _encode(_caller(server, identity, secret)), (JSON_TYPE, set_cookie))

    async def _sign_out(self, server: TaskServer, request: HttpRequest) -> HttpReply:
        """End the session. The route is open, because a token that may only read may sign out."""
        self._identify(server, request)
        await server.on_tokens(request, lambda: self._sessions(server).end(_secret(request)))
        server.server_log.write("signed_out", agent=request.identity.name)
        name, is_tls = _cookie_of(request)
        return HttpReply(204, b"", ((b"set-cookie", cookie(name, "", is_tls=is_tls).encode()),))

    async def _session(self, server: TaskServer, request: HttpRequest) -> HttpReply:
        """Who is signed in. Without a session, the names are empty."""
        return HttpReply(200, _encode(self._known_caller(server, request)))

    async def _index(self, server: TaskServer, request: HttpRequest) -> HttpReply:
        """The page. It says who is signed in, so that the first view needs no call for that."""
        data, kind = _files().by_name["index.html"]
        known = self._known_caller(server, request)
        if known["name"]:
            self._running_live(server).expect_page()
        caller = escape(_encode(known).decode(), quote=True)
        page = data.replace(NO_SESSION, NO_SESSION.replace(b'""', f'"{caller}"'.encode()))
        return HttpReply(200, page, ((b"content-type", kind),))

    def _known_caller(self, server: TaskServer, request: HttpRequest) -> dict[str, Any]:
        secret = _secret(request)
        identity = self._session_identity(server, secret) if secret else None
        return _caller(server, identity, secret)

    # ---- what is live --------------------------------------------------------------------------

    def _running_live(self, server: TaskServer) -> Live:
        if self._live is None:
            self._live = Live(server, self._redactor)
        return self._live

    async def _overview(self, server: TaskServer, request: HttpRequest) -> HttpReply:
        return HttpReply(200, await self._running_live(server).overview(visible_org(request.identity)))

    async def _stream(self, server: TaskServer, request: HttpRequest) -> None:
        await self._running_live(server).stream(request, self._is_allowed(server, request))

    async def _stream_bus(self, server: TaskServer, request: HttpRequest) -> None:
        await buses.stream(server, request, self._is_allowed(server, request))

    def _is_allowed(self, server: TaskServer, request: HttpRequest) -> Callable[[], bool]:
        """Whether the session or token of a stream is still valid."""
        secret = _secret(request)
        if request.token or not secret:
            return lambda: server.agents.identify(request.token) is not None
        return lambda: self._session_identity(server, secret) is not None

    # ---- routes --------------------------------------------------------------------------------

    def routes(self) -> list[ServedRoute]:
        """All routes of the page."""
        return [
            _read("/", self._index),
            _read(f"{STATIC}{{tag}}/{{name}}", _static),
            _change("/page/sign-in", self._sign_in, kind=SignInBody),
            _change("/page/sign-out", self._sign_out),
            _read("/page/session", self._session),
            _read("/page/overview", self._overview, "engine.read"),
            _read("/page/stream", self._stream, "engine.read", StreamQuery, answers=EVENT_STREAM),
            _read("/page/messages", messages.find, "message.list", messages.MessagesViewQuery),
            _read("/page/messages/{id}", messages.show, "message.read"),
            _read("/page/messages/{id}/flame.svg", flames.of_message, "message.read", answers=IMAGE),
            _change("/page/messages/{id}/cancel", messages.cancel, "message.cancel"),
            _change("/page/messages/{id}/retry", messages.retry, "letter.replay"),
            _read("/page/dead-letters", letters.find, "letter.list", letters.LettersViewQuery),
            _change("/page/replay", letters.replay, "letter.replay", letters.LettersReplay),
            _read("/page/decisions", goals.decisions, "decision.read"),
            _change("/page/decisions/{id}", goals.answer, "decision.answer", Answer),
            _change("/page/rules/{id}/forget", goal_handlers.forget_rule, "decision.answer"),
            _read("/page/goals", goals.goals, "goal.read"),
            _read("/page/goals/{id}", goals.goal, "goal.read"),
            _read("/page/goals/{id}/flame.svg", flames.of_goal, "goal.read", answers=IMAGE),
            _change("/page/goals/{id}/rollback", goals.rollback, "goal.rollback", goals.RollbackBody),
            _read("/page/agents", tasks.agents, "agent.list"),
            _read("/page/agents/{agent}/tasks", tasks.find, "task.list", tasks.TasksQuery),
            _read("/page/tasks", tasks.queues, "task.list", tasks.TaskQueuesQuery),
            _read("/page/tasks/{id}", tasks.show, "task.read"),
            _read("/page/buses", event_streams.find_buses, "bus.list"),
            _read("/page/buses/{name}", buses.read, "bus.read", buses.BusViewQuery),
            _read(
                "/page/buses/{name}/stream",
                self._stream_bus,
                "bus.read",
                buses.BusViewQuery,
                answers=EVENT_STREAM,
            ),
            _read("/page/report", self._reports.state, "server.measure"),
            _read("/page/report.html", self._reports.page, "server.measure", answers=TEXT),
        ]


def _route(
    method: str,
    path: str,
    handler: Handler,
    entry: str = "server.look",
    kind: type[msgspec.Struct] = NoFields,
    *,
    answers: Any = (dict[str, Any],),
) -> ServedRoute:
    """A route. Without an entry of the permissions, everybody may call it."""
    return ServedRoute(Route(method, path, entry, {200: answers}), handler, (kind,))


_read, _change = partial(_route, "GET"), partial(_route, "POST")


# ---- requests --------------------------------------------------------------------------------------


def _cookie_of(request: HttpRequest) -> tuple[str, bool]:
    """The name of the cookie of a request, and whether it came over TLS."""
    is_tls = request.scope.get("scheme") == "https"
    server = request.scope.get("server") or ("", 0)
    return cookie_name(server[1] or 0, is_tls=is_tls), is_tls


def _secret(request: HttpRequest) -> str:
    return secret_in(request.header(b"cookie"), _cookie_of(request)[0])


def _check_site(request: HttpRequest) -> None:
    """Refuse a request that another site made."""
    if request.header(b"sec-fetch-site") not in OWN_SITES:
        raise Refusal(403, "Forbidden", "only the page itself may send this request")


def _caller(server: TaskServer, identity: Identity | None, secret: str) -> dict[str, Any]:
    if identity is None:
        return {"name": "", "csrf": ""}
    return {
        "name": identity.name,
        "role": identity.role,
        "org_id": identity.org,
        "is_operator": identity.is_operator,
        "operates": permit(identity, "letter.replay", of_organization(identity.org)),
        "csrf": csrf_of(secret),
        "version": version("postroom"),
        "data": server.agents.data.name,
    }


# ---- files -----------------------------------------------------------------------------------------


class _Files(NamedTuple):
    """The files of the page by name, with their types, and a tag that changes with any of them."""

    by_name: dict[str, tuple[bytes, bytes]]
    tag: str


@cache
def _files() -> _Files:
    found: dict[str, tuple[bytes, bytes]] = {}
    for file in resources.files("postroom.page").joinpath("static").iterdir():
        kind = CONTENT_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = file.read_bytes(), kind
    content = b"".join(name.encode() + data for name, (data, _) in sorted(found.items()))
    tag = hashlib.sha256(content).hexdigest()[:16]
    page, kind = found["index.html"]
    found["index.html"] = page.replace(STATIC.encode(), f"{STATIC}{tag}/".encode()), kind
    return _Files(found, tag)


async def _static(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - needs no server
    """A file. Its address has the tag of this version, so a browser may keep it for good."""
    files = _files()
    found = files.by_name.get(request.path_param("name"))
    if found is None or request.path_param("tag") != files.tag:
        raise Refusal(404, "NotFound", "the page has no such file: load the page again")
    data, kind = found
    return HttpReply(200, data, ((b"content-type", kind), (b"cache-control", FOREVER)))
