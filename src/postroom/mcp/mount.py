"""MCP over streamable HTTP, mounted in the task server.

Rule 1: the MCP library is imported in a thread: `postroom up` does it at its start, others at the first call.
Rule 2: there are no sessions. Every request carries its token, so a server that restarts loses nothing.
Rule 3: the library gets a body that has arrived in full and whose JSON can be decoded quickly.
"""

import asyncio
import importlib.util
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from postroom.calls.fields import BODY_DEPTH_MAX
from postroom.core.formats.jsoninput import check_json
from postroom.errors import PostroomError
from postroom.mcp.backend import LocalBackend
from postroom.mcp.presence import Presence
from postroom.mcp.resources import check_entries
from postroom.server.app import TasksApp
from postroom.server.http.endpoint import read_body, refuse
from postroom.server.http.exchange import IDENTITY, TOKEN, ClientDisconnected, HttpRequest, Refusal

PATH = "/mcp"
BODY_BYTES_MAX = 1024 * 1024  # the library decodes bodies in the event loop
ELEMENTS_MAX = 50_000
GONE = "postroom.gone"  # the event of a request that its caller has closed


def mount(app: TasksApp, *, is_early: bool = False) -> "McpMount":
    """The MCP endpoint of a task server. Raises `NoEntry`.

    `is_early` imports the library when the server starts, and not with the first call.
    """
    check_entries()
    return McpMount(app, is_early)


class McpMount:
    """An ASGI application. The library runs in a task of its own."""

    path = PATH

    def __init__(self, app: TasksApp, is_early: bool) -> None:
        self._app = app
        self._is_early = is_early
        self._early: asyncio.Task[Any] | None = None
        self._manager: Any = None
        self._starting = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._presence = Presence()

    def start(self) -> None:
        """Import the library, if that is wanted now."""
        if self._is_early and importlib.util.find_spec("mcp") is not None:
            self._early = asyncio.create_task(self._started())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if importlib.util.find_spec("mcp") is None:
            missing = "MCP is not installed on this server: pip install 'postroom[mcp]'"
            await refuse(send, Refusal(501, "NotImplemented", missing))
        elif scope["method"] == "GET":  # no notification is ever sent outside of a call
            await refuse(send, Refusal(405, "MethodNotAllowed", "this server opens no stream: use POST"))
        else:
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, request = self._app.running_server(), HttpRequest(scope, receive, send)
        request.identity = scope[IDENTITY]
        try:
            body = await read_body(server, request, BODY_BYTES_MAX)
            await server.decode_for(request.identity, _check, body)
            manager = await self._started()
            gone = scope[GONE] = asyncio.Event()
            await manager.handle_request(scope, _again(body, receive, gone), send)
        except ClientDisconnected:
            return
        except (Refusal, PostroomError) as error:
            await refuse(send, error)
        finally:
            if request.body_bytes_held:
                server.body_share.give_back(request.identity, request.body_bytes_held)

    async def _started(self) -> Any:
        async with self._starting:
            if self._manager is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._run(ready))
                self._manager = await ready
        return self._manager

    async def _run(self, ready: "asyncio.Future[Any]") -> None:
        try:
            manager = await asyncio.to_thread(self._create)
        except BaseException as error:
            ready.set_exception(error)
            raise
        async with manager.run():
            ready.set_result(manager)
            await self._stopping.wait()

    def _create(self) -> Any:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager  # noqa: PLC0415 - rule 1

        from postroom.mcp.server import create_server  # noqa: PLC0415 - rule 1

        return StreamableHTTPSessionManager(
            create_server(self._backend, self._presence), stateless=True, max_request_body_size=BODY_BYTES_MAX
        )

    def _backend(self, context: Any) -> LocalBackend:
        scope = context.request.scope
        return LocalBackend(
            self._app,
            scope[IDENTITY],
            token=scope[TOKEN],
            client=scope.get("client"),
            gone=scope[GONE],
        )

    async def close(self) -> None:
        """End the library's tasks and the heartbeats."""
        self._stopping.set()
        if self._early is not None:
            with suppress(Exception):  # a broken library: every call said so
                await self._early
        await self._presence.close()
        if self._task is not None:
            with suppress(Exception):
                await self._task


def _check(body: bytes) -> None:
    check_json("the body", body, BODY_DEPTH_MAX, ELEMENTS_MAX)


def _again(body: bytes, receive: Receive, gone: asyncio.Event) -> Receive:
    """A `receive` that begins with a body that was read. `gone` is set when the caller closes the request."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        if unread:
            return unread.pop()
        message = await receive()
        if message["type"] == "http.disconnect":
            gone.set()
        return message

    return receive_again
