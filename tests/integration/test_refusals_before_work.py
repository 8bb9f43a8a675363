"""A refused call reads neither its body nor the object, and does not say whether the object exists."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, Tasks
from postroom.core.redaction import Redactor
from postroom.mcp.mount import mount as mcp
from postroom.page.mount import mount
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import Permissions
from postroom.server.app import TasksApp, create_app
from postroom.server.folder.buses import Buses
from postroom.server.routes.table import ROUTES
from tests.postgresserver import database, postgres, store_url

__all__ = ["database", "postgres"]  # fixtures

LARGE = "x" * 1_000_000
MESSAGE_PATHS = (
    ("GET", "/engine/messages/{}"),
    ("GET", "/engine/messages/{}/explain"),
    ("GET", "/engine/messages/{}/receipts"),
    ("GET", "/engine/messages/{}/stream"),
    ("POST", "/engine/messages/{}/cancel"),
    ("GET", "/engine/dlq/{}"),
    ("GET", "/page/messages/{}"),
    ("POST", "/page/messages/{}/cancel"),
    ("POST", "/page/messages/{}/retry"),
)
TASK_PATHS = (("GET", "/tasks/{}"), ("GET", "/page/tasks/{}"))


class Place:
    """An application in this process, whose reads of contents are counted."""

    def __init__(self, app: TasksApp, data: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app, self.tasks = app, tasks
        self.loads: list[str] = []
        self.received = 0
        tokens = Agents(data).tokens
        limited = Permissions(only_buses=("team",))
        self.tokens = {
            "ada": tokens.create("agent", "acme", "ada").token,
            "zoe": tokens.create("agent", "zeta", "zoe").token,
            "foreign": tokens.create("admin", "zeta").token,
            "boss": tokens.create("admin").token,
            "reader": tokens.create(
                "agent", "acme", "reader", permissions=Permissions(is_read_only=True)
            ).token,
            "limited": tokens.create("agent", "acme", "limited", permissions=limited).token,
        }
        kind: Any = tasks.store.read(lambda transaction: type(transaction.records))
        for place in (kind, type(tasks.store)):
            for name in ("load", "heads", "payloads"):
                if hasattr(place, name):
                    self._count(place, name, monkeypatch)

    def _count(self, place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(place, name)

        def counted(*given: Any) -> Any:
            self.loads.append(name)
            return original(*given)

        monkeypatch.setattr(place, name, counted)

    async def call(self, caller: str, method: str, path: str, body: bytes = b"{}") -> tuple[int, str]:
        path, _, query = path.partition("?")
        accept = b"application/json, text/event-stream" if path == "/mcp" else b"*/*"
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "scheme": "http",
            "query_string": query.encode(), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "headers": [
                (b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"accept", accept),
                (b"authorization", f"Bearer {self.tokens[caller]}".encode()),
            ],
        }  # fmt: skip
        status, answer, received = 0, b"", self.received
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            self.received += 1
            if self.received > received + 1:  # the caller leaves when it has the whole answer
                await ended.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.set()

        await self.app(scope, receive, send)
        return status, answer.decode()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tasks]:
    with Tasks.open(store_url(request, tmp_path)) as opened:
        yield opened


@asynccontextmanager
async def opened(tasks: Tasks, data: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    app = create_app(data, tasks, engine=Engine(tasks.store), page=mount(Redactor), mounted=mcp)
    async with app.router.lifespan_context(app):
        yield Place(app, data, tasks, monkeypatch)


def test_object_of_another_organization_is_answered_as_unknown(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with opened(tasks, tmp_path, monkeypatch) as place:
            given = json.dumps({"type": "tool_call", "payload": {"text": LARGE}}).encode()
            status, answer = await place.call("ada", "POST", "/engine/messages", given)
            assert status == 202, answer
            message_id = json.loads(answer)["message_id"]
            task_id = tasks.enqueue(agent="@acme:ada", payload=LARGE, task_id="large")
            for paths, own in ((MESSAGE_PATHS, message_id), (TASK_PATHS, task_id)):
                absent = own[:-4] + ("0000" if own[-4:] != "0000" else "1111")
                for method, path in paths:
                    for caller in ("zoe", "foreign"):
                        place.loads.clear()
                        found = await place.call(caller, method, path.format(own))
                        missing = await place.call(caller, method, path.format(absent))
                        assert found == (missing[0], missing[1].replace(absent, own)), path
                        assert found[0] in (403, 404), (path, found)
                        assert place.loads == [], path

    asyncio.run(run())


def test_a_search_by_id_reads_no_message_of_another_organization(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with opened(tasks, tmp_path, monkeypatch) as place:
            given = json.dumps({"type": "tool_call", "payload": {"text": LARGE}}).encode()
            message_id = json.loads((await place.call("ada", "POST", "/engine/messages", given))[1])[
                "message_id"
            ]
            place.loads.clear()
            status, answer = await place.call("zoe", "GET", f"/page/messages?text={message_id}")
            assert (status, json.loads(answer)["messages"], place.loads) == (200, [], [])
            status, answer = await place.call("zoe", "GET", f"/engine/dlq?after={message_id}")
            assert (status, place.loads) == (404, [])

    asyncio.run(run())


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_bus_of_another_organization_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Over HTTP, the page and MCP: the same answer as for a bus that does not exist."""

    async def run() -> None:
        with Tasks.open("memory://") as tasks:
            async with opened(tasks, tmp_path, monkeypatch) as place:
                note = json.dumps({"type": "note", "project_id": "p", "body": "x" * size}).encode()
                assert (await place.call("ada", "POST", "/bus/secret/messages", note))[0] == 201
                files: list[str] = []
                monkeypatch.setattr(Buses, "_bus", lambda *_: files.append("opened"))
                for caller in ("zoe", "foreign", "limited"):
                    for method, path in (
                        ("GET", "/bus/{}/messages"), ("GET", "/page/buses/{}"), ("POST", "/bus/{}/remove"),
                    ):  # fmt: skip
                        found = await place.call(caller, method, path.format("secret"))
                        missing = await place.call(caller, method, path.format("absent"))
                        assert found == (missing[0], missing[1].replace("absent", "secret"))
                    assert await _tool(place, caller, "secret") == await _tool(place, caller, "absent")
                    assert "secret" not in (await place.call(caller, "GET", "/bus"))[1]
                assert files == []

    asyncio.run(run())


async def _tool(place: Place, caller: str, bus: str) -> str:
    """What the tool `read_bus` answers."""
    call = {"name": "read_bus", "arguments": {"bus": bus}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}).encode()
    status, answer = await place.call(caller, "POST", "/mcp", body)
    assert status == 200, answer
    return answer.replace(bus, "NAME")


def test_no_body_of_a_call_that_the_token_may_not_make_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with Tasks.open("memory://") as tasks:
            async with opened(tasks, tmp_path, monkeypatch) as place:
                for served in ROUTES:
                    route = served.route
                    path = route.path.replace("{id}", "none").replace("{name}", "none")
                    if route.method == "POST":
                        assert (await place.call("reader", "POST", path))[0] == 403, path
                for method, path, caller in (
                    ("POST", "/bus/none/messages", "limited"),
                    ("GET", "/bus/none/messages", "limited"),
                    ("POST", "/tasks/none/cancel", "foreign"),
                    ("POST", "/engine/pause", "zoe"),
                    ("POST", "/tokens", "zoe"),
                    ("POST", "/engine/agents/zoe/messages", "ada"),
                    ("POST", "/engine/agents/boss/messages", "boss"),
                ):
                    status, answer = await place.call(caller, method, path, LARGE.encode())
                    assert status in (403, 404), answer
                assert place.received == 0

    asyncio.run(run())


def test_a_message_that_is_visible_is_still_read(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter counts."""

    async def run() -> None:
        async with opened(tasks, tmp_path, monkeypatch) as place:
            given = json.dumps({"type": "tool_call", "payload": {"text": "hello"}}).encode()
            message_id = json.loads((await place.call("ada", "POST", "/engine/messages", given))[1])[
                "message_id"
            ]
            task_id = tasks.enqueue(agent="@acme:ada", payload="hello", task_id="greeting")
            for path in (f"/engine/messages/{message_id}", f"/tasks/{task_id}"):
                place.loads.clear()
                status, answer = await place.call("ada", "GET", path)
                assert (status, "hello" in answer, len(place.loads) > 0) == (200, True, True), path

    asyncio.run(run())
