"""The tools of MCP servers as handlers of `tool_call`.

Rule 1: a tool that may change something runs as an effect, so a retry does not repeat it and a goal knows of
        it. Only an idempotent tool is called again when it is not known whether it has run.
Rule 2: one connection to a server for each event loop, opened with the first call and kept.
Rule 3: the MCP library is imported with the first call.
Rule 4: a tool that calls nothing outside of its server (`openWorldHint` is false) fails by the fault of the
        caller. Any other `isError` may be a failure of the service, and counts for its breaker.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from postroom.calls.fields import RESULT_BYTES_MAX
from postroom.core.names import is_name
from postroom.errors import InvalidSetting, ToolFailed, Unavailable, ValidationError, shown

if TYPE_CHECKING:
    from postroom.engine.messages import Message
    from postroom.engine.work.context import Context

IDEMPOTENCY_KEY = "postroom/idempotency-key"
"""The key in `_meta` of a call that carries the idempotency key of the message."""
TOOLS_LISTED_MAX = 1_000
CONNECT_S = 30.0
ANSWER_S = 300.0  # of silence, while a tool runs
HEAD_BYTES_MAX = 64 * 1024  # what is kept of a result above the limit


class ToolCall(msgspec.Struct, frozen=True):
    """The payload of a `tool_call` for an MCP server."""

    tool: str
    arguments: dict[str, Any] = {}


class McpServer:
    """One MCP server: a command that speaks MCP over its stdin and stdout, or an address."""

    def __init__(
        self, name: str, command: Sequence[str], url: str, headers: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        self.name = name
        self._command = command
        self._url = url
        self._headers = headers
        self._env = env
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._tools: dict[str, Any] = {}

    # ---- the connection ------------------------------------------------------------------------

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop or self._task is None or self._task.done():
            self._loop, self._client = loop, loop.create_future()
            self._task = asyncio.create_task(self._run(self._client))
        return await asyncio.shield(self._client)

    async def _run(self, ready: "asyncio.Future[Any]") -> None:
        """Keep a connection open until this task is cancelled. The library wants one task for it."""
        try:
            async with self._opened() as client:
                self._tools = await _listed(client)
                ready.set_result(client)
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ready.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the library raises anything
            if not ready.done():
                ready.set_exception(Unavailable(f"MCP server {self.name} cannot be reached: {_first(error)}"))

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        import httpx2  # noqa: PLC0415 - rule 3
        from mcp import Client, StdioServerParameters  # noqa: PLC0415 - rule 3
        from mcp.client.stdio import stdio_client  # noqa: PLC0415 - rule 3
        from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415 - rule 3

        if self._command:
            command, *args = self._command
            parameters = StdioServerParameters(command=command, args=args, env=dict(self._env))
            # The default of the library is what `sys.stderr` was at its import, perhaps a stream of a program
            # without a descriptor.
            errors = sys.__stderr__ or sys.stderr
            async with Client(stdio_client(parameters, errors)) as client:
                yield client
            return
        timeout = httpx2.Timeout(CONNECT_S, read=ANSWER_S)
        async with (
            httpx2.AsyncClient(headers=dict(self._headers), timeout=timeout) as http_client,
            Client(streamable_http_client(self._url, http_client=http_client)) as client,
        ):
            yield client

    def _drop(self) -> None:
        """Close a connection that failed. The next call opens another one."""
        if self._task is not None:
            self._task.cancel()
        self._client = None

    async def tools(self) -> dict[str, Any]:
        """The tools of the server by name, as its last connection listed them. Raises `Unavailable`."""
        if not self._tools:
            await self._connected()
        return self._tools

    async def close(self) -> None:
        """Close the connection; a command ends with it."""
        task, self._task, self._client = self._task, None, None
        if task is not None and self._loop is asyncio.get_running_loop():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    # ---- calls ---------------------------------------------------------------------------------

    async def handle(self, message: "Message", context: "Context") -> Any:
        """Call the tool that a message names. Raises `ToolFailed` when the tool says `isError`."""
        if message.service not in ("", self.name):  # the only handler of a type gets all its messages
            raise ValidationError(
                f"service must be an MCP server ({self.name}), not {shown(message.service)}"
            )
        try:
            given = msgspec.convert(message.payload, ToolCall)
        except msgspec.ValidationError as error:
            raise ValidationError(
                f"the payload of a tool_call has tool, a text, and arguments, an object: {error}"
            ) from None
        client = await self._connected()
        tool = self._tools.get(given.tool)
        if tool is None:
            known = ", ".join(self._tools)
            raise ValidationError(f"MCP server {self.name} has no tool {shown(given.tool)}, but {known}")
        hints = tool.annotations

        async def run() -> Any:
            return await self._call(client, given, message, context)

        if hints is not None and hints.read_only_hint:
            return await run()
        return await context.effect(
            f"mcp/{self.name}/{given.tool}",
            run,
            reversal_class=_reversal_class(hints),
            on_unknown="run" if hints is not None and hints.idempotent_hint else "raise",
        )

    async def _call(self, client: Any, given: ToolCall, message: "Message", context: "Context") -> Any:
        async def progress(done: float, total: float | None, text: str | None) -> None:
            share = min(1.0, max(0.0, done / total)) if total else 0.0
            await context.progress(share, text or "")

        meta = {IDEMPOTENCY_KEY: message.idempotency_key or message.message_id}
        try:
            answer = await client.call_tool(
                given.tool, given.arguments, progress_callback=progress, meta=meta
            )  # fmt: skip
        except Exception as error:  # the library raises anything
            if _is_refusal(error):
                wrong = _is_wrong_call(error)
                raise ToolFailed(self.name, given.tool, _first(error), is_callers_fault=wrong) from None
            self._drop()
            # As a lost connection: whether the tool has run is not known.
            raise ConnectionError(
                f"the connection to MCP server {self.name} was lost: {_first(error)}"
            ) from error
        if answer.is_error:
            hints, reason = self._tools[given.tool].annotations, _text(answer) or "the tool gave no reason"
            is_closed = hints is not None and hints.open_world_hint is False
            raise ToolFailed(self.name, given.tool, reason, is_callers_fault=is_closed)
        return kept(_result(answer))


def kept(result: Any) -> Any:
    """The result of a tool as it is stored. One above the limit is cut, because the tool has run."""
    data = msgspec.json.encode(result)
    if len(data) <= RESULT_BYTES_MAX:
        return result
    text = result.encode() if isinstance(result, str) else data
    head = text[:HEAD_BYTES_MAX].decode(errors="ignore")
    return {"cut_at": RESULT_BYTES_MAX, "bytes": len(data), "head": head}


def _reversal_class(hints: Any) -> Literal["COMPENSATABLE", "IRREVERSIBLE"] | None:
    """Without a hint the rules decide, and a rollback may find a tool that undoes the call."""
    if hints is None or hints.destructive_hint is None:
        return None
    return "IRREVERSIBLE" if hints.destructive_hint else "COMPENSATABLE"


async def _listed(client: Any) -> dict[str, Any]:
    """All tools of a server, by name."""
    tools: dict[str, Any] = {}
    cursor: str | None = None
    while len(tools) < TOOLS_LISTED_MAX:
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _is_refusal(error: BaseException) -> bool:
    """Whether the server has answered with an error, so the connection is fine."""
    from mcp.shared.exceptions import MCPError  # noqa: PLC0415 - rule 3
    from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT  # noqa: PLC0415 - rule 3

    return isinstance(error, MCPError) and error.error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT)


def _is_wrong_call(error: Any) -> bool:
    """Whether the server says that the call itself is wrong, such as its parameters."""
    from mcp_types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND  # noqa: PLC0415 - rule 3

    return error.error.code in (INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND)


def _result(answer: Any) -> Any:
    """The structured content of an answer, or else its text, or else all of its content."""
    if answer.structured_content is not None:
        return answer.structured_content
    if all(part.type == "text" for part in answer.content):
        return _text(answer)
    return [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in answer.content]


def _text(answer: Any) -> str:
    return "\n".join(part.text for part in answer.content if part.type == "text")


def _first(error: BaseException) -> str:
    """The text of an error, or of the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class McpServers:
    """The MCP servers of an engine."""

    def __init__(self) -> None:
        self.by_name: dict[str, McpServer] = {}

    def add(
        self,
        name: str,
        command: Sequence[str] | None,
        url: str | None,
        headers: Mapping[str, str] | None,
        env: Mapping[str, str] | None,
    ) -> McpServer:
        """Note a server. Its `handle` is the handler of its tools."""
        if not isinstance(name, str) or not is_name(name):
            raise InvalidSetting(f"the name of an MCP server must be a name, not {shown(name)}")
        if name in self.by_name:
            raise InvalidSetting(f"there is an MCP server {name} already")
        if (command is None) == (url is None) or isinstance(command, str) or command == []:
            raise InvalidSetting("an MCP server has a command, a list of texts, or a url: one of them")
        _check_installed()
        server = McpServer(name, list(command or ()), url or "", headers or {}, env or {})
        self.by_name[name] = server
        return server

    async def close(self) -> None:
        """Close all connections."""
        for server in self.by_name.values():
            await server.close()


def _check_installed() -> None:
    from importlib.util import find_spec  # noqa: PLC0415 - needed once

    if find_spec("mcp") is None:
        raise InvalidSetting("tools of MCP servers need a library: pip install 'postroom[mcp]'")
