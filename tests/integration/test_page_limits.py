"""What one view of the live page redacts: a limited number of characters, and never in the event loop."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks
from postroom.core.redaction import Redactor
from postroom.page.mount import mount
from postroom.page.redaction import REDACTED_CHARS_MAX
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import TokenRegistry
from postroom.server.app import TasksApp, create_app
from tests.waiting import HANG_GUARD_S, eventually

LONG = "x " * (REDACTED_CHARS_MAX // 5)


class Counting(Redactor):
    """A redactor that counts what it reads, by thread."""

    def __init__(self) -> None:
        super().__init__("medium")
        self.by_thread: dict[threading.Thread, int] = {}

    def payload(self, text: str) -> str:
        self._count(text)
        return super().payload(text)

    def text(self, text: str) -> str:
        self._count(text)
        return super().text(text)

    def _count(self, text: str) -> None:
        thread = threading.current_thread()
        self.by_thread[thread] = self.by_thread.get(thread, 0) + len(text)


class Page:
    """A server with the page, in the event loop of the test."""

    def __init__(self, data: Path) -> None:
        data.mkdir()
        self.agents = Agents(data)
        self.token = self.agents.add("boss", role="operator")
        self.agents.add("ada", org="acme")
        self.tasks = Tasks.open(f"sqlite:///{data / 'queue.db'}")
        self.redactor = Counting()
        self.app: TasksApp = create_app(
            data, self.tasks, agents=self.agents, page=mount(lambda: self.redactor)
        )

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        asked: list[Any] = [b"" if body is None else json.dumps(body).encode()]
        sent: list[Any] = []

        async def receive() -> Any:
            if asked:
                return {"type": "http.request", "body": asked.pop(), "more_body": False}
            return await asyncio.Future[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {self.token}".encode())]
        await self.app(self._scope(method, path, headers), receive, send)
        assert sent[0]["status"] < 300, sent
        return json.loads(b"".join(message.get("body", b"") for message in sent))

    async def stream(self, path: str, token: str) -> None:
        """Read a stream to its end."""

        async def receive() -> Any:
            if asked:
                return {"type": "http.request", "body": asked.pop(), "more_body": False}
            return await asyncio.Future[Any]()

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        asked = [b""]
        headers = [(b"authorization", f"Bearer {token}".encode()), (b"accept", b"text/event-stream")]
        await self.app(self._scope("GET", path, headers), receive, send)

    @staticmethod
    def _scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        path, _, query = path.partition("?")
        return {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": [(b"host", b"localhost"), *headers],
        }  # fmt: skip

    async def show(self, path: str) -> str:
        """A view as text. Checks what it cost."""
        self.redactor.by_thread.clear()
        found = await self.call("GET", path)
        assert threading.main_thread() not in self.redactor.by_thread
        assert 0 < sum(self.redactor.by_thread.values()) <= REDACTED_CHARS_MAX
        return json.dumps(found)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path / "run")
    yield made
    made.tasks.close()


@pytest.mark.parametrize("is_revoked", [True, False])
@pytest.mark.parametrize("path", ["/page/stream", "/page/buses/team/stream", "/events", "/bus/team/messages"])
def test_a_stream_ends_with_its_token_and_gives_its_share_back(
    page: Page, path: str, *, is_revoked: bool
) -> None:
    """The token is revoked by another process, or expires."""

    async def story() -> None:
        async with page.app.router.lifespan_context(page.app):
            server = page.app.running_server()
            body = {"type": "note", "project_id": "p", "body": "news"}
            await page.call("POST", "/bus/team/messages", body)
            tokens = TokenRegistry(server.agents.data)
            made = tokens.create("agent", "acme", "ada", expires_s=None if is_revoked else 2.0)
            stream = asyncio.ensure_future(page.stream(path, made.token))

            def used() -> int:
                live = page.app.page._live  # type: ignore[union-attr]
                return server.stream_share.used + (0 if live is None else live._share.used)

            await eventually(lambda: used() == 1)
            if is_revoked:
                tokens.revoke(made.token_id)
            await asyncio.wait_for(stream, HANG_GUARD_S)
            assert used() == 0

    asyncio.run(story())


def test_a_view_redacts_in_a_thread_and_a_limited_number_of_characters(page: Page) -> None:
    async def story() -> None:
        async with page.app.router.lifespan_context(page.app):
            for number in range(4):
                body = {"type": "note", "project_id": "p", "body": f"{number} {LONG}"}
                await page.call("POST", "/bus/team/messages", body)
            shown = await page.show("/page/buses/team")
            assert "3 x x" in shown
            assert "0 x x" not in shown
            assert "Not shown" in shown
            message = {"type": "tool_call", "org_id": "acme", "payload": {"text": LONG * 2, "all": LONG * 2}}
            message_id = (await page.call("POST", "/engine/messages", message))["message_id"]
            assert "Not shown" in await page.show(f"/page/messages/{message_id}")
            await page.show("/page/messages")
            for _ in range(150):
                task = {"agent": "ada", "payload": 1, "max_retries": 0}
                await page.call("POST", "/queue/enqueue", task)
                claimed = await page.call("POST", "/queue/next", {"agent": "ada"})
                lease = {"task_id": claimed["task_id"], "lease": claimed["lease"]}
                await page.call("POST", "/queue/fail", {**lease, "error": LONG[:4_000]})
            await page.show("/page/agents/ada/tasks")
            task = {"agent": "ada", "payload": "x" * 1_000_000}
            sent = [(await page.call("POST", "/queue/enqueue", task))["task_id"] for _ in range(10)]
            listed = await page.call("GET", "/page/agents/ada/tasks")
            assert 5 < len(listed["tasks"]) < 10
            older = await page.call("GET", f"/page/agents/ada/tasks?cursor={listed['cursor']}")
            found = [one["task_id"] for one in [*listed["tasks"], *older["tasks"]]]
            assert found[:10] == sent[::-1]

    asyncio.run(story())
