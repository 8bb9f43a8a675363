"""A small MCP server for tests: tools that fail, report progress, are repeated, hang, or end the process."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

CALLS = Path(sys.argv[1])
server = MCPServer("test")


def note(line: str) -> None:
    with CALLS.open("a") as file:
        file.write(line + "\n")


def is_noted(line: str) -> bool:
    return CALLS.exists() and line in CALLS.read_text().splitlines()


@server.tool(annotations=types.ToolAnnotations(read_only_hint=True))
async def count(steps: int, ctx: Context[Any, Any]) -> str:
    for step in range(steps):
        await ctx.report_progress(step + 1, steps, f"step {step + 1}")
    return f"counted to {steps}"


@server.tool(annotations=types.ToolAnnotations(destructive_hint=True))
async def delete(name: str, ctx: Context[Any, Any]) -> str:
    meta: dict[str, Any] = dict(ctx.request_context.meta or {})
    note(f"delete {name} {meta.get('postroom/idempotency-key')}")
    if name == "crash":
        os._exit(1)
    if name == "missing":
        raise ToolError("there is no such thing")
    return f"deleted {name}"


@server.tool(annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False))
async def check(name: str) -> str:
    raise ToolError(f"{name} is not well-formed")


@server.tool(annotations=types.ToolAnnotations(destructive_hint=False))
async def add(name: str) -> str:
    return f"added {name}"


@server.tool()
async def create_note(text: str) -> str:
    note(f"create_note {text}")
    return "note-7"


@server.tool(annotations=types.ToolAnnotations(destructive_hint=True))
async def delete_note(note_id: str) -> str:
    note(f"delete_note {note_id}")
    return "gone"


@server.tool(annotations=types.ToolAnnotations(idempotent_hint=True))
async def put(name: str) -> str:
    """Ends the process when it is called first."""
    is_first = not is_noted(f"put {name}")
    note(f"put {name}")
    if is_first:
        os._exit(1)
    return f"put {name}"


@server.tool(annotations=types.ToolAnnotations(destructive_hint=True))
async def report(size: int) -> str:
    note(f"report {size}")
    return "x" * size


@server.tool()
async def write(name: str) -> str:
    return f"wrote {name}"


@server.tool(annotations=types.ToolAnnotations(read_only_hint=True))
async def hang() -> str:
    note("hang begins")
    try:
        await asyncio.sleep(60)
    except BaseException:
        note("hang cancelled")
        raise
    return "done"


server.run("stdio")
