"""Where the calls of tools go: to the routes of this process, or to a server over HTTP.

Rule 1: both raise the same errors for the same refusal.
"""

import asyncio
from abc import ABC, abstractmethod
from http.client import HTTPMessage
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from postroom.client.calls import TIMEOUT_S, HttpClient
from postroom.client.connections import Call, refusal
from postroom.runtime.agents import Identity
from postroom.runtime.http_messages import IDENTITY
from postroom.runtime.schemas import CallerAnswer

ORG_DEFAULT = "default"
"""The organization in which an operator of all organizations acts as an agent."""
_SUCCESS_BELOW = 300

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Backend(ABC):
    """The routes as one caller reaches them."""

    role: str
    org: str
    """The organization that the agent belongs to."""
    agent: str
    """The agent that the caller is, or that an operator acts as."""
    is_operator: bool
    """Whether the caller operates all organizations."""

    @abstractmethod
    async def call(
        self, method: str, path: str, body: Any = None, *, as_agent: bool = False, wait_s: float = 0.0
    ) -> Any:
        """The decoded answer of a route; None for an empty one. Raises a `PostroomError` for a refusal.

        `as_agent` makes an operator act as its agent. `wait_s` is how long the route may wait.
        """


class LocalBackend(Backend):
    """The routes of an application in this process, for a caller whose token was checked."""

    def __init__(self, app: ASGIApp, identity: Identity, agent: str = "", org: str = "") -> None:
        self._app = app
        self._identity = identity
        self.role = identity.role
        self.is_operator = identity.is_operator
        self.org = identity.org or org or ORG_DEFAULT
        self.agent = (agent if self.is_operator else "") or identity.name
        self._acting = identity.acting_as(self.agent, self.org) if self.is_operator else identity

    async def call(
        self, method: str, path: str, body: Any = None, *, as_agent: bool = False, wait_s: float = 0.0
    ) -> Any:
        path, _, query = path.partition("?")
        data = b"" if body is None else _encode(body)
        exchange = _Exchange(data)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [],
            IDENTITY: self._acting if as_agent else self._identity,
        }
        await self._app(scope, exchange.receive, exchange.send)
        if exchange.status >= _SUCCESS_BELOW:
            raise refusal(
                Call(method, path, data, {}, wait_s), exchange.status, exchange.headers, exchange.reply
            )  # fmt: skip
        return _decode(exchange.reply) if exchange.reply else None


class _Exchange:
    """One request to an ASGI application, and its reply."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.headers = HTTPMessage()
        self.reply = b""

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:  # the caller is still there
            await asyncio.Future[None]()
        return {"type": "http.request", "body": body, "more_body": False}

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
        found = self._own.request("GET", "/whoami")
        caller = msgspec.convert(found, CallerAnswer)
        self.role = caller.role
        self.is_operator = caller.role != "agent" and not caller.org
        self.org = caller.org or org or ORG_DEFAULT
        self.agent = (agent if self.is_operator else "") or caller.name
        acting = {"postroom-agent": f"{self.org}/{self.agent}"} if self.is_operator else {}
        self._acting = HttpClient(url, token, headers=acting)

    async def call(
        self, method: str, path: str, body: Any = None, *, as_agent: bool = False, wait_s: float = 0.0
    ) -> Any:
        client = self._acting if as_agent else self._own
        return await asyncio.to_thread(client.request, method, path, body, timeout_s=TIMEOUT_S + wait_s)
