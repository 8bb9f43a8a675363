"""A server with everything that the live page shows: for the tests in a browser, and for the screenshots."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from postroom import Engine
from postroom.client.mail import Mail
from postroom.core.goals.advice import Advice, Question
from postroom.errors import ValidationError
from postroom.goals.advisers.adviser import Adviser
from postroom.server.access.registry import Agents
from tests import warmpython
from tests.pagereport import report
from tests.waiting import HANG_GUARD_S

HOSTILE = {
    "html": "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">",
    "control": "bell \x07 escape \x1b[31m",
    "rtl": "before \u202etxt.exe\u202c after",
}
PRIVATE_NOTE = "a private mailbox"


class Unsure(Adviser):
    """Leaves everything to a person."""

    def __init__(self, reasoning: str = "this adviser is never sure") -> None:
        self.reasoning = reasoning

    async def advise(self, question: Question) -> Advice:
        return Advice(question.default or question.options[0], 0.1, self.reasoning)


class PageWorld:
    """A running server, and an engine with a worker on the same store."""

    def __init__(self, data: Path, facts: dict[str, Any], adviser: Adviser) -> None:
        self.data = data
        self.url: str = facts["http"]
        self.nats: str = facts["nats"]
        self.token: str = facts["token"]
        self.agents = Agents(data)
        self.engine = Engine.open(f"sqlite:///{data / 'queue.db'}", adviser=adviser)
        self.wait = self.engine.blocking.wait
        self.released = asyncio.Event()
        """Handlers that hold their message wait for it."""
        self.private_id = ""
        self.parent_id = ""
        self.hostile_id = ""
        self._register_handlers()

    def _register_handlers(self) -> None:
        @self.engine.handler("tool_call")
        async def call(message: Any, ctx: Any) -> Any:
            if message.payload.get("fail"):
                raise ValidationError(message.payload["fail"])
            if message.payload.get("effect"):
                await ctx.effect(message.payload["effect"], lambda: "done")
            if message.payload.get("hold"):
                await self.released.wait()
            for number in range(message.payload.get("children", 0)):
                await ctx.submit(type="model_call", payload={"child": number})
            return {"ok": True}

        @self.engine.handler("model_call")
        async def read(message: Any, ctx: Any) -> Any:
            return {"read": message.payload}

    # ---- traffic -------------------------------------------------------------------------------

    def post(self, path: str, body: Any, token: str | None = None) -> Any:
        headers = {"authorization": f"Bearer {token or self.token}", "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310 - our own server
            return json.loads(answer.read())

    def submit(self, **fields: Any) -> str:
        """Submit over HTTP, as a program outside does."""
        message = {"type": "agent_message", "org_id": "acme", "payload": {}, **fields}
        return str(self.post("/engine/messages", message)["message_id"])

    def run(self, *messages: dict[str, Any]) -> list[str]:
        """Submit messages and have a worker end them. Returns their ids."""
        return list(self.wait(self._run(messages)))

    async def _run(self, messages: tuple[dict[str, Any], ...]) -> list[str]:
        handles = [
            await self.engine.submit(**{"type": "tool_call", "org_id": "acme", "payload": {}, **message})
            for message in messages
        ]
        worker = asyncio.create_task(self.engine.run(worker_id="worker-1"))
        for handle in handles:
            with suppress(Exception):  # a dead letter
                await handle.result(timeout_s=HANG_GUARD_S)
        await self.engine.stop()
        await worker
        return [handle.message_id for handle in handles]

    @contextmanager
    def working(self, worker_id: str) -> Iterator[None]:
        """A worker runs meanwhile."""

        async def start() -> "asyncio.Task[None]":
            self.released.clear()
            return asyncio.create_task(self.engine.run(worker_id=worker_id))

        async def stop(worker: "asyncio.Task[None]") -> None:
            self.released.set()
            await self.engine.stop()
            await worker

        worker = self.wait(start())
        try:
            yield
        finally:
            self.wait(stop(worker))

    # ---- the story -----------------------------------------------------------------------------

    def seed(self) -> None:
        """Something for every view."""
        self._seed_goals()
        [self.parent_id, *_] = self.run(
            {"payload": {"children": 3, "task": "collect the reviews"}, "priority": 1},
            {"payload": {"fail": "the invoice has no address"}, "max_retries": 0},
            {"payload": {"fail": "the invoice has no address"}, "max_retries": 0},
            {"org_id": "beta", "payload": {"fail": "the customer is unknown"}, "max_retries": 0},
            *(
                {"org_id": "acme" if n % 3 else "beta", "priority": n % 4, "payload": {"n": n}}
                for n in range(12)
            ),
        )
        self.hostile_id = self.submit(payload={"body": HOSTILE})
        for number in range(6):
            self.submit(
                org_id="beta" if number % 2 else "acme", priority=number % 4, payload={"body": number}
            )
        self._seed_team()
        self._seed_tasks()
        (self.data / "report.html").write_text(report())

    def _seed_goals(self) -> None:
        async def story() -> None:
            goals, main = self.engine.goals, self.engine.graph.main()
            await goals.start("acme", "launch", context={"audience": "engineers"})
            await self.engine.graph.branch("launch").save("plan", {"title": "Launch", "status": "draft"})
            await main.save("price", {"amount": 1})
            await goals.start("acme", "pricing")
            await self.engine.graph.branch("pricing").update("price", {"amount": 2})
            await main.update("price", {"amount": 3})
            await goals.complete("pricing")  # a conflict, which waits for a person

        self.wait(story())
        self.run({"goal_id": "launch", "payload": {"effect": "send-newsletter"}})

    def _seed_team(self) -> None:
        for name in ("ada", "grace"):
            token = self.agents.tokens.create("agent", org="acme", agent=name).token
            self.post("/engine/agents", {}, token)
        first = self.post(
            "/bus/team/messages", {"type": "FACT", "project_id": "p", "body": "The build is green."}
        )
        reply = {
            "type": "QUESTION",
            "project_id": "p",
            "body": "Shall we ship?",
            "parents": [first["msg_id"]],
        }
        self.post("/bus/team/messages", reply)
        self.post("/bus/team/messages", {"type": "INFO", "project_id": "p", "body": "<b>A second thread</b>"})
        with Mail(self.nats, token=self.token) as mail:
            mail.create("news", public=True, desc="What everybody may read")
            self.private_id = mail.create(desc=PRIVATE_NOTE)

    def enqueue(self, agent: str, payload: Any, **fields: Any) -> str:
        """Enqueue a task over HTTP."""
        task = {"agent": agent, "payload": payload, **fields}
        return str(self.post("/queue/enqueue", task)["task_id"])

    def claim(self, agent: str, worker: str) -> dict[str, Any]:
        """Claim the oldest task of an agent. Returns what every later call about it has to say."""
        claimed = self.post("/queue/next", {"agent": agent, "worker": worker})
        return {"agent": agent, "task_id": claimed["task_id"], "lease": claimed["lease"]}

    def _seed_tasks(self) -> None:
        """Tasks of ada: one that is done, failed, held and waiting each. The last payload is hostile."""
        for number in range(3):
            task = {"document": f"manual-{number}.md", "into": "German"}
            self.enqueue("ada", task, task_id=f"translate-{number}", type="translate", max_retries=0)
        self.post("/queue/complete", {**self.claim("ada", "ada-1"), "decision": {"words": 420}})
        self.post("/queue/fail", {**self.claim("ada", "ada-1"), "error": HOSTILE["html"]})
        self.claim("ada", "ada-2")
        self.enqueue("ada", HOSTILE, task_id="hostile")
        self.enqueue("grace", {"review": "translate-0"}, type="review")


@contextmanager
def page_world(
    data: Path, *, adviser: Adviser | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[PageWorld]:
    """Start `postroom up` in a folder, without seeds. `variables` are added to its environment."""
    words = ["up", "--data", str(data), "--http-port", "0", "--nats-port", "0", "--no-audit"]
    process = warmpython.popen(
        [sys.executable, "-m", "postroom.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=None if variables is None else {**os.environ, **variables},
    )
    try:
        assert process.stdout is not None
        world = PageWorld(data, json.loads(process.stdout.readline()), adviser or Unsure())
        try:
            yield world
        finally:
            world.engine.close()
    finally:
        process.terminate()
        process.communicate(timeout=HANG_GUARD_S)
