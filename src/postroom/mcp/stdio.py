"""`postroom mcp`: the MCP server of one caller over stdin and stdout."""

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from postroom.calls.fields import Role
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.names import checked_name
from postroom.errors import NotAllowed, PostroomError
from postroom.goals.engine import Engine
from postroom.mcp.backend import ORG_DEFAULT, Backend, LocalBackend, RemoteBackend
from postroom.mcp.presence import Presence
from postroom.mcp.server import create_server
from postroom.server.access.registry import Agents, Identity
from postroom.server.app import TasksApp, create_app
from postroom.server.telemetry.export import exporting
from postroom.server.telemetry.server_log import ServerLog

LOCAL_AGENT = "local"
SERVICE = "postroom-mcp"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise


class Greeted:
    """The messages of a client, of which the first was read before the library was imported."""

    def __init__(self, line: bytes, stream: Any) -> None:
        self._first = [line] if line.strip() else []
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        if not self._first:
            message: SessionMessage | Exception = await anext(self._stream)
            return message
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(self._first.pop(), by_name=False))
        except ValueError as error:
            return error

    async def receive(self) -> SessionMessage | Exception:
        return await anext(self)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


class Silenced:
    """The answers of the library, of which the first was given before."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_first = True

    async def send(self, message: SessionMessage) -> None:
        if self._is_first:
            self._is_first = False
        else:
            await self._stream.send(message)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


def serve_url(url: str, token: str, agent: str, org: str, first: tuple[bytes, bool]) -> None:
    """Serve the routes of a server until stdin ends. `first` is what `greet` returned."""
    asyncio.run(_serve(RemoteBackend(url, token, agent, org), first))


def serve_folder(
    data: Path,
    token: str,
    agent: str,
    org: str,
    owner: Identity,
    first: tuple[bytes, bool],
    store: str | None = None,
) -> None:
    """Serve an existing data folder until stdin ends. Without a token, the caller is `owner`.

    The messages are in `store`, or in the file queue.db of the folder. `first` is what `greet` returned.
    """
    agents = Agents(data)
    identity = _identified(agents, token) if token else owner
    with (
        Tasks.open(store or f"sqlite:///{data / 'queue.db'}", durability="group") as tasks,
        Path(os.devnull).open("w") as nowhere,  # agent programs show stderr as errors
        exporting(SERVICE) as telemetry,
    ):
        engine, server_log = Engine(tasks.store), ServerLog(nowhere)
        app = create_app(data, tasks, agents=agents, engine=engine, server_log=server_log)
        served = app if telemetry is None else telemetry.serving(app, engine, server_log)
        asyncio.run(_serve_app(app, LocalBackend(served, identity, agent, org, token), first))


def owner_identity(agent: str, org: str, role: Role, may_send_to: Sequence[str] = ()) -> Identity:
    """The caller without a token: write access to the folder is enough. An agent has an organization."""
    name = checked_name("agent", agent or LOCAL_AGENT)
    org = checked_name("organization", org or ORG_DEFAULT) if org or role == "agent" else ""
    return Identity(name, role, may_send_to=(name, *may_send_to), org=org)


def _identified(agents: Agents, token: str) -> Identity:
    identity = agents.identify(token)
    if identity is None:
        raise NotAllowed(401, "the token is not one of this data folder, or has expired")
    return identity


async def _serve_app(app: TasksApp, backend: LocalBackend, first: tuple[bytes, bool]) -> None:
    async with app.router.lifespan_context(app):
        await _serve(backend, first)


async def _serve(backend: Backend, first: tuple[bytes, bool]) -> None:
    presence = Presence(math.inf)  # until this process ends
    server = create_server(lambda _ctx: backend, presence)
    line, is_greeted = first
    if backend.role == "agent":
        with suppress(PostroomError):  # an agent without an organization has no team
            await presence.beat(backend)
            presence.note(backend)
    try:
        async with stdio_server() as (read_stream, write_stream):
            answers: Any = Silenced(write_stream) if is_greeted else write_stream
            messages: Any = Greeted(line, read_stream)
            await server.run(messages, answers, server.create_initialization_options())
    finally:
        await backend.close()
        await presence.leave()
