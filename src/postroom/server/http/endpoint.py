"""One route as an ASGI application: checks the token, decodes the body or query, calls the handler, replies.

Rule 1: every request gets a reply. An error is one line, without server paths and payloads.
Rule 2: the table of `core.gate` decides who may send a request before its body is read.
Rule 3: a body with too many bytes is refused before it is kept, and one with too many JSON elements before it
        is decoded.
"""

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from postroom.calls.fields import BODY_DEPTH_MAX
from postroom.calls.server import ErrorAnswer
from postroom.calls.verb import Route, Verb, has_body, sent_type, summary_of
from postroom.core.door import leaving
from postroom.core.fieldfaults import field_fault
from postroom.core.formats.jsoninput import check_json
from postroom.core.gate import entry_of
from postroom.core.names import unscoped_text
from postroom.errors import (
    AgentReplaced,
    AuditBehind,
    Bounced,
    BusFull,
    ContextChanged,
    GoalEnded,
    GuardTripped,
    HandleDead,
    InvalidMessage,
    InvalidPriority,
    KeyReused,
    LockTimeout,
    Overloaded,
    PostroomError,
    QueueFull,
    RateExceeded,
    Rejected,
    ResultGone,
    RollbackRefused,
    SinceIdNotFound,
    StaleLease,
    StoreUnreachable,
    TooMany,
    Unavailable,
    UnknownAgent,
    UnknownBus,
    UnknownCheckpoint,
    UnknownDecision,
    UnknownGoal,
    UnknownNode,
    UnknownTask,
    UnknownToken,
    UnsafePath,
    WriteFailed,
    WrongState,
    reason,
)
from postroom.server.access.refusal_events import RefusedCall
from postroom.server.access.registry import Identity
from postroom.server.access.task_names import shown_id
from postroom.server.http.exchange import (
    ANONYMOUS,
    IDENTITY,
    JSON_TYPE,
    NO_CONTENT,
    TOKEN,
    ClientDisconnected,
    HttpReply,
    HttpRequest,
    Refusal,
    StreamRefused,
    check_allowed,
)
from postroom.server.http.listener import CONNECTION
from postroom.server.http.task_server import TaskServer
from postroom.server.telemetry.server_log import error_location
from postroom.stores.own_ids import OwnIds

RETRY_AFTER_S = 1
URL_QUERY_FIELDS_MAX = 16
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_NAMES: Final[Mapping[str, str]] = {}  # in the path of a route
ACTING_AS = b"postroom-agent"  # the header that names the agent an operator acts for: ORGANIZATION/AGENT

STATUS_OF: dict[type[BaseException], int] = {
    StaleLease: 409,
    WrongState: 409,
    KeyReused: 409,
    GuardTripped: 409,
    Bounced: 409,
    AgentReplaced: 409,
    ResultGone: 410,
    UnknownTask: 404,
    UnknownGoal: 404,
    UnknownNode: 404,
    UnknownCheckpoint: 404,
    UnknownDecision: 404,
    GoalEnded: 409,
    ContextChanged: 409,
    RollbackRefused: 409,
    UnknownAgent: 404,
    UnknownBus: 404,
    UnknownToken: 404,
    SinceIdNotFound: 404,
    Rejected: 400,
    QueueFull: 429,
    TooMany: 429,
    RateExceeded: 429,
    Overloaded: 429,
    BusFull: 507,
    Unavailable: 503,
    PostroomError: 500,
}
"""The HTTP status of an error. The nearest base class in this table decides."""

_EXTRA_HEADERS: dict[int, tuple[tuple[bytes, bytes], ...]] = {
    401: ((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
    413: ((b"connection", b"close"),),
}

_WHY: dict[type[BaseException], str] = {
    WriteFailed: "the disk of the server fails",
    HandleDead: "the disk of the server fails",
    StoreUnreachable: "the database of the server does not answer",
    LockTimeout: "another process uses the store",
}
"""What a caller is told about errors whose own sentence has a path or an address."""

_encode = msgspec.json.Encoder().encode
_PRIORITY = re.compile(r"(\S+\.)?priority\b")  # the field that a fault begins with

Handler = Callable[[TaskServer, HttpRequest], Awaitable[Any]]
"""Handles a request. Returns its answer, a whole reply, or None when it has sent the reply itself."""
Identify = Callable[[TaskServer, HttpRequest], Identity]
"""Finds the caller of a request. Raises a `Refusal` when there is none."""


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request without a body and without a query."""


class ServedRoute(NamedTuple):
    """A route, its handler, and the structs that requests are decoded into, as the first that fits."""

    route: Route
    handler: Handler
    kinds: tuple[type[msgspec.Struct], ...] = (NoFields,)

    @property
    def sent(self) -> tuple[type[msgspec.Struct], ...]:
        """The structs without what is in the path."""
        return tuple(sent_type(kind, self.route.names) for kind in self.kinds)

    @property
    def bodies(self) -> tuple[type[msgspec.Struct], ...]:
        """The structs of the body."""
        return self.sent if has_body(self.route, self.sent[0]) else ()

    @property
    def query(self) -> type[msgspec.Struct]:
        """The struct of the query."""
        return NoFields if self.bodies else self.sent[0]

    @property
    def summary(self) -> str:
        """What the route does."""
        return summary_of(self.kinds[0])


def serve(call: type[Verb], handler: Handler, *answer: type, many: type[Verb] | None = None) -> ServedRoute:
    """Serve a call. `answer` is the struct of an answer with a record; `many` is the call for several."""
    route = call.route
    if answer:
        [status] = (status for status in route.answers if not route.answers[status])
        route = route._replace(answers={**route.answers, status: answer})
    return ServedRoute(route, handler, (call,) if many is None else (call, many))


class Endpoint:
    """An ASGI application for one method of one path."""

    def __init__(
        self, server: Callable[[], TaskServer], served: ServedRoute, identify: "Identify | None" = None
    ) -> None:
        self.route = route = served.route
        self._entry = entry_of(route.permission, f"{route.method} {route.path}")
        self._server = server
        self._identified = identify or identified
        self._served = served
        self._bodies = served.bodies
        self._decoders: list[msgspec.json.Decoder[Any]] = [*map(msgspec.json.Decoder, served.bodies)]
        self._query = served.query
        self._in_path = {
            field.name: field.encode_name
            for field in msgspec.structs.fields(served.kinds[0])
            if field.encode_name in route.names
        }
        self._status = min(route.answers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server()
        request = HttpRequest(scope, receive, send)
        try:
            reply = await self._reply(server, request)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            reply = _error_reply(503, "Unavailable", "the server is stopping: try again soon")
        except BaseException as error:  # noqa: BLE001 - see rule 1
            refusal = _error_to_reply(error, request.identity, server.ids)
            self._log_refusal(server, request, refusal.status, error)
            if IDENTITY not in request.scope:  # a part of this process notes the refusal of its own call
                call, client = f"{self.route.method} {self.route.path}", request.scope.get("client")
                note_refusal(server, call, error, request.identity, client, token=request.token)
            reply = None if isinstance(error, StreamRefused) else refusal
        finally:
            if request.body_bytes_held:
                server.body_share.give_back(request.identity, request.body_bytes_held)
        server.requests[self.route.path, 200 if reply is None else reply.status] += 1
        if reply is not None:
            await send_reply(send, reply)

    async def _reply(self, server: TaskServer, request: HttpRequest) -> HttpReply | None:
        if self._entry.who != "anybody":
            self._identify(server, request)
        body = await read_body(server, request, self.route.bytes_max)
        request.size = len(body)
        if self._decoders:
            request.raw = body
            request.call = await server.decode_for(request.identity, self._decode, body)
        else:
            request.call = _decode_query(request.scope["query_string"], self._query)
        if self._in_path:
            named = {field: request.path_param(name) for field, name in self._in_path.items()}
            request.call = self._served.kinds[0](**named, **msgspec.structs.asdict(request.call))
        answer = await self._served.handler(server, request)
        if answer is None or isinstance(answer, HttpReply):
            return answer
        return HttpReply(self._status, _encode(answer))

    def _identify(self, server: TaskServer, request: HttpRequest) -> None:
        identity = request.scope.get(IDENTITY)
        if identity is None:
            identity = self._identified(server, request)
        else:
            request.token = request.scope.get(TOKEN, "")
        request.identity = identity
        named = request.scope.get("path_params", NO_NAMES)
        check_allowed(identity, self.route.permission, name=named.get("name", ""))
        if self._entry.who == "member" and named.get("id", identity.name) != identity.name:
            raise UnknownAgent(named["id"])

    def _decode(self, body: bytes) -> Any:
        """Decode the body as the first of the route's structs that it fits."""
        check_json("the body", body, BODY_DEPTH_MAX)
        for decoder in self._decoders[:-1]:
            with suppress(msgspec.ValidationError):
                return _decoded(decoder, body)
        try:
            return _decoded(self._decoders[-1], body)
        except msgspec.ValidationError as error:
            fault = self._fault(body, error)
            raise (InvalidPriority if _PRIORITY.match(fault) else InvalidMessage)(fault) from None

    def _fault(self, body: bytes, error: msgspec.ValidationError) -> str:
        """Describe the fault by the first struct, unless the body was meant as the last (a batch)."""
        if len(self._decoders) > 1 and not _has_field_of(body, self._bodies[-1]):
            try:
                self._decoders[0].decode(body)
            except msgspec.ValidationError as first:
                return field_fault(first, "the body", self._bodies[0])
        return field_fault(error, "the body", self._bodies[-1])

    def _log_refusal(
        self, server: TaskServer, request: HttpRequest, status: int, error: BaseException
    ) -> None:
        name = error.error if isinstance(error, Refusal) else type(error).__name__
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            name = error_location(error)
        facts = {"route": self.route.path, "status": status, "error": name}
        if status == HTTPStatus.UNAUTHORIZED:
            server.server_log.write_rarely("refused", **facts)  # callers without a token can flood the log
            return
        task_id = getattr(request.call, "task_id", None) or ""
        server.server_log.write("refused", task_id=task_id, agent=request.identity.name, **facts)


def identified(server: TaskServer, request: HttpRequest, *, is_counted: bool = True) -> Identity:
    """The caller that the token of a request names, or the agent that an operator acts for.

    Without `is_counted`, the request does not count in the rate of its token.
    """
    scheme, _, token = request.header(b"authorization").partition(" ")
    request.token = token.strip()
    identity = server.agents.identify(request.token) if scheme.lower() == "bearer" else None
    if identity is None:
        raise Refusal(401, "Unauthorized", _token_fault(scheme, request.token))
    request.identity = identity
    if is_counted:
        server.rates.check(identity)
    connection = request.scope.get(CONNECTION)
    if connection is not None:  # the first request with a token on this connection
        connection.identify(identity)
    acting_as = request.header(ACTING_AS)
    if not acting_as:
        return identity
    check_allowed(identity, "agent.impersonate")
    org, _, agent = acting_as.partition("/")
    return identity.acting_as(agent, org)


def note_refusal(
    server: TaskServer,
    call: str,
    error: BaseException,
    identity: Identity,
    client: tuple[str, int] | None,
    *,
    token: str = "",
    via: str = "http",
) -> None:
    """Make an event of a call that is refused because of the caller. An error of the server is none.

    `client` is the address of the caller. `token` is removed from the sentence of the error.
    """
    status, error_type, message = _refusal_facts(error)
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        address = f"{client[0]}:{client[1]}" if client else ""
        why = message.replace(token, "TOKEN") if token else message
        server.refusals.note(RefusedCall(identity, address, via, call, status, error_type, why))


async def refuse(send: Send, error: BaseException) -> None:
    """Send the refusal of an error."""
    await send_reply(send, _error_to_reply(error))


def _token_fault(scheme: str, token: str) -> str:
    if scheme.lower() != "bearer" or not token:
        return "a bearer token of this server is needed: send the header 'Authorization: Bearer TOKEN'"
    return "a bearer token of this server is needed, and this one is unknown, expired or revoked"


def _decoded(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    if not body:
        raise InvalidMessage("the body is empty, and has to be a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"the body is not JSON: {reason(error)}") from None


def _has_field_of(body: bytes, struct: type) -> bool:
    """Whether an object has a field of a struct."""
    with suppress(msgspec.DecodeError):
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return not fields.keys().isdisjoint(field.encode_name for field in msgspec.structs.fields(struct))
    return False


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


async def read_body(server: TaskServer, request: HttpRequest, bytes_max: int) -> bytes:
    """Read the whole body, also where none is expected: a request is handled when it has arrived in full."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > bytes_max:
            raise Refusal(413, "TooLong", f"the body of this route may have at most {bytes_max} bytes")
        if not message.get("more_body", False):
            return b"".join([*pieces, piece]) if pieces else piece  # most bodies come in one piece
        server.body_share.take(request.identity, len(piece))
        request.body_bytes_held = size
        pieces.append(piece)


def _error_to_reply(
    error: BaseException, caller: Identity = ANONYMOUS, ids: OwnIds | None = None
) -> HttpReply:
    """The reply to a failed call, with names as its organization uses them.

    Only an id that the error took from a record is covered: the covered form of one that a caller sent would
    tell whether it guessed right.
    """
    status, error_type, message = _refusal_facts(error)
    if ids is not None and isinstance(error, StaleLease | WrongState):
        message = message.replace(error.task_id, shown_id(ids, caller.org, error.task_id))
    message = unscoped_text(caller.org, message)
    return _error_reply(status, error_type, message, getattr(error, "retry_after_s", RETRY_AFTER_S))


def _refusal_facts(error: BaseException) -> tuple[int, str, str]:
    """The status of a refusal, the name of its error and its sentence."""
    if isinstance(error, Refusal):
        return error.status, error.error, str(error)
    if isinstance(error, HTTPException):  # of the router
        return error.status_code, "NotServed", error.detail
    status = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)
    status = getattr(error, "http_status", 0) or status
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return status, "InternalError", "internal error: the server has logged it"
    return status, type(error).__name__, _public_message(error)


def _public_message(error: BaseException) -> str:
    """The message of an error, without paths of the server."""
    match error:
        case SinceIdNotFound():
            return f"there is no message {error.since_id!r} in this bus"
        case UnsafePath():
            return "the attachment has to be in the folder of the bus"
        case WriteFailed() if error.errno in NO_SPACE:
            rest = "nothing was stored" if error.rolled_back else "the data may or may not be stored"
            return f"the disk of the server is full: {rest}. Try again when an operator has made room"
        case Unavailable() if type(error) not in (
            Unavailable,
            AuditBehind,
            QueueFull,
            TooMany,
            RateExceeded,
            Overloaded,
            BusFull,
        ):
            return f"{_WHY.get(type(error), 'the store cannot be used now')}: try again soon"
        case _:
            return str(error)


def _error_reply(status: int, error: str, message: str, retry_after_s: float = RETRY_AFTER_S) -> HttpReply:
    body = _encode(ErrorAnswer(error, leaving(message).encode("utf-8", "replace").decode()))
    headers = (JSON_TYPE, *_EXTRA_HEADERS.get(status, ()))
    if status in (429, 503, 507):
        headers += ((b"retry-after", str(max(1, round(retry_after_s))).encode()),)
    return HttpReply(status, body, headers)


async def send_reply(send: Send, reply: HttpReply) -> None:
    """Send a whole reply."""
    headers = [*reply.headers]
    if reply.status != NO_CONTENT.status:
        headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
