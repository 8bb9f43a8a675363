"""Where the calls of tools go: to the routes of this process, or to a server over HTTP.

Rule 1: both raise the same errors for the same refusal.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from http import HTTPStatus
from http.client import HTTPMessage
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import quote

import msgspec
from starlette.types import Message

from postroom.calls.fields import Role
from postroom.calls.server import CallerAnswer, ReadCaller
from postroom.calls.verb import Verb
from postroom.client.calls import TIMEOUT_S, HttpClient
from postroom.client.connections import Call, LongPolls, refusal
from postroom.core.gate import GATE, refused
from postroom.errors import InvalidMessage, NotAllowed, PostroomError, shown
from postroom.server.access.registry import Identity
from postroom.server.app import TasksApp
from postroom.server.http.endpoint import note_refusal
from postroom.server.http.exchange import IDENTITY, TOKEN

ORG_DEFAULT = "default"
"""The organization in which an operator of all organizations acts as an agent."""
_SUCCESS_BELOW = 300

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ToolCaller:
    """Whether the caller of a tool is still there."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.polls = LongPolls()

    def leave(self) -> None:
        """End what is done for the caller."""
        self.left.set()
        self.polls.abort()


class Backend(ABC):
    """The routes as one caller reaches them."""

    _left: ClassVar[set[asyncio.Future[None]]] = set()
    """Calls whose caller has left. A reference keeps them from being collected."""

    def __init__(self, identity: Identity, agent: str, org: str) -> None:
        self.role = identity.role
        self.is_operator = identity.is_operator
        """Whether the caller operates all organizations."""
        self.org = identity.org or org or ORG_DEFAULT
        """The organization that the agent belongs to."""
        self.agent = (agent if self.is_operator else "") or identity.name
        """The agent that the caller is, or that an operator acts as."""
        self._identity = identity
        self._acting = identity.acting_as(self.agent, self.org) if self.is_operator else identity
        self.is_member = (identity.role == "agent" or bool(agent)) and not self.refuses("agent.join")
        """Whether the caller is an agent of the team. An operator without `--agent` may only look."""

    def refuses(self, action: str) -> str:
        """Why the token does not allow an action of the table of `core.gate`; empty when it does."""
        return refused(self._acting if GATE[action].who == "member" else self._identity, action)

    def check(self, action: str) -> None:
        """Raises `NotAllowed` for an action that the token does not allow."""
        why = self.refuses(action)
        if why:
            raise NotAllowed(HTTPStatus.FORBIDDEN, why)

    async def ask(
        self,
        verb: Verb,
        *,
        as_agent: bool = False,
        wait_s: float = 0.0,
        put_back: Callable[[Any], Verb] | None = None,
    ) -> Any:
        """The decoded answer to a verb; None for an empty one. Raises a `PostroomError` for a refusal.

        `as_agent` makes an operator act as its agent. `wait_s` is how long the route may wait. `put_back` is
        the verb that undoes the call; it is called with an answer that comes after the caller has left.
        """
        caller = ToolCaller()
        answering = asyncio.ensure_future(self._call(verb, caller, as_agent, wait_s))
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            caller.leave()
            late = asyncio.ensure_future(self._late(answering, as_agent, put_back))
            self._left.add(late)
            late.add_done_callback(self._left.discard)
            raise

    async def _late(
        self, answering: "asyncio.Future[Any]", as_agent: bool, put_back: Callable[[Any], Verb] | None
    ) -> None:
        with suppress(PostroomError):
            answer = await answering
            if answer is not None and put_back is not None:
                await self.ask(put_back(answer), as_agent=as_agent)

    @abstractmethod
    async def _call(self, verb: Verb, caller: ToolCaller, as_agent: bool, wait_s: float) -> Any:
        """Send a verb. See `ask`."""

    async def attended(self, running: Coroutine[Any, Any, T]) -> T:
        """The outcome of a tool, which ends early when its caller has left."""
        return await running

    async def close(self) -> None:
        """Wait until the calls whose caller has left are over."""
        while self._left:
            await asyncio.wait(self._left)

    def waiting(self) -> AbstractContextManager[None]:
        """Count a tool that asks again and again as an event stream of the caller, while it waits."""
        return nullcontext()  # a server at the other end of a connection has its own limits

    def begin(self) -> None:  # noqa: B027 - a server at the other end of a connection does it itself
        """Count a call of the client, and check its token again. Raises a `PostroomError` for a refusal."""

    def check_token(self) -> None:  # noqa: B027 - the same
        """Raises `NotAllowed` when the token has expired or was revoked."""

    def refused(self, what: str, error: PostroomError) -> None:  # noqa: B027 - the same
        """Make an event of a call of the client that was refused."""


class LocalBackend(Backend):
    """The routes of an application in this process, for a caller whose token was checked.

    `token` is checked again with each call of the client; empty for a caller that needs none. `client` is
    where the calls come from. `gone` is set when the caller has closed its request.
    """

    def __init__(
        self,
        app: TasksApp,
        identity: Identity,
        agent: str = "",
        org: str = "",
        token: str = "",
        client: tuple[str, int] | None = None,
        gone: asyncio.Event | None = None,
    ) -> None:
        self._app = app
        self._gone = gone
        self._token = token
        self._client = client
        super().__init__(identity, agent, org)

    async def attended(self, running: Coroutine[Any, Any, T]) -> T:
        if self._gone is None:
            return await running
        tool, gone = asyncio.ensure_future(running), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((tool, gone), return_when=asyncio.FIRST_COMPLETED)
            if not tool.done():
                raise InvalidMessage("the caller has closed its request")
            return tool.result()
        finally:
            tool.cancel()
            gone.cancel()

    def begin(self) -> None:
        self.check_token()
        if self._app.server is not None:
            self._app.server.rates.check(self._identity)

    def check_token(self) -> None:
        server = self._app.server
        if self._token and server is not None and server.agents.identify(self._token) is None:
            raise NotAllowed(HTTPStatus.UNAUTHORIZED, "the token has expired or was revoked")

    def refused(self, what: str, error: PostroomError) -> None:
        if self._app.server is not None:
            note_refusal(
                self._app.server, what, error, self._identity, self._client, token=self._token, via="mcp"
            )

    async def _call(self, verb: Verb, caller: ToolCaller, as_agent: bool, wait_s: float) -> Any:
        self.check_token()  # again: a tool that waits makes many calls
        method, (path, body) = verb.route.method, verb.target(lambda _, value: quoted(value))
        path, _, query = path.partition("?")
        data = b"" if body is None else _encode(body)
        exchange = _Exchange(data, caller)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [],
            IDENTITY: self._acting if as_agent else self._identity,
            TOKEN: self._token,  # a call that waits ends with its token
        }
        await self._app(scope, exchange.receive, exchange.send)
        if exchange.status >= _SUCCESS_BELOW:
            raise refusal(
                Call(method, path, data, {}, wait_s), exchange.status, exchange.headers, exchange.reply
            )  # fmt: skip
        if not exchange.reply:
            return None
        return await self._app.running_server().decode_for(self._identity, _decode, exchange.reply)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        share = self._app.running_server().stream_share
        share.take(self._identity)
        try:
            yield
        finally:
            share.give_back(self._identity)


class _Exchange:
    """One request to an ASGI application, and its reply."""

    def __init__(self, body: bytes, caller: ToolCaller) -> None:
        self._body: bytes | None = body
        self._caller = caller
        self.status = 0
        self.headers = HTTPMessage()
        self.reply = b""

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._caller.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message["headers"]:
                self.headers[name.decode("latin-1")] = value.decode("latin-1")
        else:
            self.reply += message.get("body", b"")


class RemoteBackend(Backend):
    """The routes of a server over HTTP."""

    def __init__(self, url: str, token: str, agent: str = "", org: str = "") -> None:
        self._own = HttpClient(url, token)
        found = self._own.call(ReadCaller())
        caller = msgspec.convert(found, CallerAnswer)
        super().__init__(Identity(caller.name, cast("Role", caller.role), org=caller.org), agent, org)
        acting = {"postroom-agent": f"{self.org}/{self.agent}"} if self.is_operator else {}
        self._as_agent = HttpClient(url, token, headers=acting)

    async def _call(self, verb: Verb, caller: ToolCaller, as_agent: bool, wait_s: float) -> Any:
        verb.target(lambda _, value: quoted(value))  # refuses names with a slash
        client, polls = self._as_agent if as_agent else self._own, caller.polls if wait_s else None
        return await asyncio.to_thread(client.call, verb, timeout_s=TIMEOUT_S + wait_s, long_polls=polls)


def quoted(text: str) -> str:
    """An id or a name as one part of a path."""
    if "/" in text:  # a server decodes it, and would take the rest as another part of the path
        raise InvalidMessage(f"an id or a name has no slash, and this one has: {shown(text)}")
    return quote(text, safe="")
