"""The MCP server of a task server and of `postroom mcp`, and the official client."""

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from postroom.server.access.tokens import Permissions, TokenRegistry
from tests.integration.commandline import finish, start
from tests.waiting import HANG_GUARD_S

WAIT_S = 30.0  # the longest that a tool waits

SOURCES = str(Path(__file__).resolve().parents[2] / "src")


class Serving(NamedTuple):
    """A task server, and a token for each name."""

    url: str
    data: Path
    tokens: dict[str, str]


@contextmanager
def serving(data: Path) -> Iterator[Serving]:
    """A task server with five agents and an operator of one organization, and an admin."""
    data.mkdir()
    tokens = TokenRegistry(data)
    made = {
        name: tokens.create(
            "agent", "acme", name, permissions=Permissions(may_send_to=("builder", "reviewer"))
        ).token
        for name in ("planner", "builder", "reviewer", "alice", "bob")
    }
    made["admin"] = tokens.create("admin").token
    made["operator"] = tokens.create("operator", "acme").token
    process = start("postroom", "tasks", "serve", "--data", data, "--port", 0)
    try:
        assert process.stdout is not None
        yield Serving(json.loads(process.stdout.readline())["url"], data, made)
    finally:
        process.terminate()
        finish(process)


@asynccontextmanager
async def over_http(server: Serving, name: str) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {server.tokens[name]}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=HANG_GUARD_S) as http_client,
        Client(streamable_http_client(f"{server.url}/mcp", http_client=http_client)) as client,
    ):
        yield client


def over_stdio(
    *options: object, pid_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Client:
    command = [sys.executable, "-m", "postroom.cli.main", "mcp", *map(str, options)]
    if pid_file is not None:
        command = ["sh", "-c", f"echo $$ > {pid_file}; exec {shlex.join(command)}"]
    env = {"PYTHONPATH": SOURCES, **(environ or {})}
    return Client(StdioServerParameters(command=command[0], args=command[1:], env=env))


def of_server(server: Serving, name: str, pid_file: Path | None = None) -> Client:
    return over_stdio("--url", server.url, "--token", server.tokens[name], pid_file=pid_file)


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    found: dict[str, Any] = answer.structured_content
    assert json.loads(answer.content[0].text) == found  # type: ignore[union-attr]
    return found


async def awaited(client: Client, tool: str, key: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a tool that waits, once it has found something under `key`."""
    async with asyncio.timeout(HANG_GUARD_S):
        while not (found := await call(client, tool, wait_s=WAIT_S, **arguments))[key]:
            pass
    return found


async def answered(client: Client, to: str, question: str) -> dict[str, Any]:
    """The answer to a question, however often it has to be waited for."""
    async with asyncio.timeout(HANG_GUARD_S):
        found = await call(client, "ask", to=to, question=question, wait_s=WAIT_S)
        while found["status"] == "waiting":
            found = await call(client, "wait_for", id=found["question_id"], wait_s=WAIT_S)
    return found


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    return str(answer.content[0].text)  # type: ignore[union-attr]


async def names(client: Client) -> set[str]:
    return {tool.name for tool in (await client.list_tools()).tools}
