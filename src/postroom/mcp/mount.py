"""MCP over streamable HTTP, mounted in the task server.

Rule 1: the MCP library is imported with the first call, because most servers have no MCP clients.
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


def mount(app: TasksApp) -> "McpMount":
    """The MCP endpoint of a task server. Raises `NoEntry`."""
    check_entries()
    return McpMount(app)


class McpMount:
    """An ASGI application. The library runs in a task of its own, which starts with the first request."""

    path = PATH

    def __init__(self, app: TasksApp) -> None:
        self._app = app
        self._manager: Any = None
        self._starting = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._presence = Presence()

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
            await manager.handle_request(scope, _again(body, receive), send)
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
        return LocalBackend(self._app, scope[IDENTITY], token=scope[TOKEN], client=scope.get("client"))

    async def close(self) -> None:
        """End the library's tasks and the heartbeats."""
        self._stopping.set()
        await self._presence.close()
        if self._task is not None:
            with suppress(Exception):
                await self._task


def _check(body: bytes) -> None:
    check_json("the body", body, BODY_DEPTH_MAX, ELEMENTS_MAX)


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that begins with a body that was read."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again
