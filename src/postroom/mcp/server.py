"""The MCP server itself, made with the official library: lists and calls of tools, resources and prompts."""

from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import mcp_types as types
import msgspec
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from postroom.core.door import leaving
from postroom.errors import NotAllowed, PostroomError
from postroom.mcp import resources
from postroom.mcp.backend import Backend
from postroom.mcp.excerpts import fitted, in_lines
from postroom.mcp.handshake import INSTRUCTIONS
from postroom.mcp.hints import explained
from postroom.mcp.presence import Presence
from postroom.mcp.tools import TOOLS, Tool, checked_arguments, description_of, schema_of, tools_of

Context = ServerRequestContext[Any, Any]


def create_server(backend_of: Callable[[Context], Backend], presence: Presence) -> "Server[Any]":
    """The server. `backend_of` gives the caller of a request. Raises `NoEntry`."""
    resources.check_entries()

    async def list_tools(ctx: Context, _params: Any) -> types.ListToolsResult:
        backend = backend_of(ctx)
        if backend.is_member:  # known to its team before its first call
            presence.note(backend)
        return types.ListToolsResult(tools=[_described(tool) for tool in tools_of(backend)])

    async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        backend = backend_of(ctx)
        try:
            backend.begin()
            return await _called(backend, params.name, params.arguments or {}, presence)
        except PostroomError as error:
            backend.refused(f"tool {_named(params.name)}", error)
            return _error(explained(error))

    async def read_resource(
        ctx: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        backend, uri = backend_of(ctx), str(params.uri)
        try:
            backend.begin()
            text = await resources.read(backend, uri)
        except PostroomError as error:
            backend.refused("a resource", error)
            raise MCPError(types.INVALID_PARAMS, explained(error)) from None
        content = types.TextResourceContents(uri=uri, mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[content])

    return Server(
        "postroom",
        version=version("postroom"),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=_list_resources,
        on_list_resource_templates=_list_templates,
        on_read_resource=read_resource,
        on_list_prompts=_list_prompts,
        on_get_prompt=_get_prompt,
    )


async def _list_resources(_ctx: Context, _params: Any) -> types.ListResourcesResult:
    return types.ListResourcesResult(resources=[])


async def _list_templates(_ctx: Context, _params: Any) -> types.ListResourceTemplatesResult:
    return types.ListResourceTemplatesResult(
        resource_templates=[
            types.ResourceTemplate(
                name=one.name,
                uri_template=one.uri,
                description=one.description,
                mime_type="application/json",
            )
            for one in resources.TEMPLATES
        ]
    )


async def _list_prompts(_ctx: Context, _params: Any) -> types.ListPromptsResult:
    return types.ListPromptsResult(
        prompts=[
            types.Prompt(
                name=one.name,
                description=one.description,
                arguments=[
                    types.PromptArgument(name=name, description=text, required=False)
                    for name, text in one.arguments
                ],
            )
            for one in resources.PROMPTS
        ]
    )


async def _get_prompt(_ctx: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    try:
        description, text = resources.prompt_text(params.name, dict(params.arguments or {}))
    except PostroomError as error:
        raise MCPError(types.INVALID_PARAMS, leaving(str(error))) from None
    message = types.PromptMessage(role="user", content=types.TextContent(type="text", text=text))
    return types.GetPromptResult(description=description, messages=[message])


def _described(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        description=description_of(tool),
        input_schema=schema_of(tool),
        annotations=types.ToolAnnotations(
            read_only_hint=tool.is_read_only, destructive_hint=False, open_world_hint=False
        ),
    )


async def _called(
    backend: Backend, name: str, given: dict[str, Any], presence: Presence
) -> types.CallToolResult:
    tool = next((one for one in TOOLS if one.name == name), None)
    if tool is None:
        known = ", ".join(one.name for one in tools_of(backend))
        raise NotAllowed(HTTPStatus.FORBIDDEN, f"there is no tool {name!r}: this token has {known}")
    backend.check(tool.entry)
    arguments = checked_arguments(tool, given)
    if tool.is_team and (backend.is_member or not tool.is_read_only):
        presence.note(backend)
    text = in_lines(fitted(await backend.attended(tool.run(backend, arguments))))
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], structured_content=msgspec.json.decode(text)
    )


def _named(tool: str) -> str:
    """The name of a tool. A name that no tool has is text of the caller, and left out."""
    return tool if any(one.name == tool for one in TOOLS) else "of an unknown name"


def _error(sentence: str) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=leaving(sentence))], is_error=True
    )
