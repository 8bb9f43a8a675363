"""`postroom mcp`: the MCP server of one caller over stdin and stdout."""

import asyncio
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mcp.server.stdio import stdio_server

from postroom.calls.fields import Role
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.names import checked_name
from postroom.errors import NotAllowed, PostroomError
from postroom.goals.engine import Engine
from postroom.mcp.backend import ORG_DEFAULT, Backend, LocalBackend, RemoteBackend
from postroom.mcp.presence import Presence, beat
from postroom.mcp.server import create_server
from postroom.server.access.registry import Agents, Identity
from postroom.server.app import TasksApp, create_app
from postroom.server.telemetry.export import exporting
from postroom.server.telemetry.server_log import ServerLog

LOCAL_AGENT = "local"
SERVICE = "postroom-mcp"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise


def serve_url(url: str, token: str, agent: str, org: str) -> None:
    """Serve the routes of a server until stdin ends."""
    asyncio.run(_serve(RemoteBackend(url, token, agent, org)))


def serve_folder(
    data: Path, token: str, agent: str, org: str, owner: Identity, store: str | None = None
) -> None:
    """Serve an existing data folder until stdin ends. Without a token, the caller is `owner`.

    The messages are in `store`, or in the file queue.db of the folder.
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
        asyncio.run(_serve_app(app, LocalBackend(served, identity, agent, org, token)))


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


async def _serve_app(app: TasksApp, backend: LocalBackend) -> None:
    async with app.router.lifespan_context(app):
        await _serve(backend)


async def _serve(backend: Backend) -> None:
    presence = Presence(math.inf)  # until this process ends
    server = create_server(lambda _ctx: backend, presence)
    if backend.role == "agent":
        with suppress(PostroomError):  # an agent without an organization has no team
            await beat(backend)
            presence.note(backend)
    try:
        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())
    finally:
        await presence.close()
