"""Requests and replies as the handlers see them."""

from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from postroom.core.gate import Owner, refused
from postroom.server.access.registry import Identity

JSON_TYPE = (b"content-type", b"application/json")
IDENTITY = "postroom.identity"
"""The key of the caller in the scope of a request that a part of this process makes for it."""
TOKEN = "postroom.token"  # noqa: S105 - a key, and no token
"""The key of the caller's token in such a scope, and in that of a request to a mounted application."""

ANONYMOUS = Identity("", "agent")


class Refusal(Exception):
    """A reply that is neither a success nor an error of a contract."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


def check_allowed(identity: Identity, action: str, owner: Owner | None = None, name: str = "") -> None:
    """Refuse a caller that may not do this with an object of this owner, as the table of `core.gate` says."""
    why = refused(identity, action, owner, name)
    if why:
        raise Refusal(403, "Forbidden", why)


class StreamRefused(Refusal):
    """A stream whose token or session ended. Its reply is complete, so no second one is sent."""

    def __init__(self) -> None:
        super().__init__(401, "Unauthorized", "the token or session of an open stream has ended")


class ClientDisconnected(Exception):
    """The client closed its connection: no reply can be sent."""


class HttpReply(NamedTuple):
    """A complete reply."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)


NO_CONTENT = HttpReply(204, b"", ())


class HttpRequest:
    """One request: the caller, and the decoded call."""

    __slots__ = (
        "body_bytes_held",
        "call",
        "identity",
        "raw",
        "receive",
        "scope",
        "send",
        "size",
        "token",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.token = ""
        self.identity: Identity = ANONYMOUS
        self.call: Any = None
        """The decoded body or query, with the names of the path: the struct of the route's call."""
        self.raw = b""
        """The body before it was decoded."""
        self.size = 0
        """Bytes of the body."""
        self.body_bytes_held = 0
        """Bytes counted in the caller's share; 0 for a body that arrived in one piece."""

    def header(self, name: bytes) -> str:
        """The value of a header, or an empty string."""
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value, "latin-1")
        return ""

    def path_param(self, name: str) -> str:
        """The value of a path parameter."""
        return str(self.scope["path_params"][name])


async def disconnection(request: HttpRequest) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
