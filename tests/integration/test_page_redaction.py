"""A secret in any text that an outsider can write reaches no answer of the live page, and no stream."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.client.mail import Mail
from postroom.core.redaction import Redactor
from postroom.page.mount import PageMount
from postroom.server.app import TasksApp
from tests.pageworld import PageWorld, Unsure, page_world
from tests.waiting import HANG_GUARD_S, until

HOST = "outsider.example"
SECRET = re.compile(rf"(\w+)@{HOST}|sk-(\w+)-x7Q2m9Lr4Tz8Vb1Nc6Kd3Wf5Hg")
OPEN = {"/page/static/{tag}/{name}", "/page/sign-in", "/page/sign-out", "/page/session"}
BUS_MESSAGE = {"type": "INFO", "project_id": "p"}


NEVER_SENT = {"chunk", "outcome", "progress"}
"""No view shows them."""
places: set[str] = set()


def secret(place: str) -> str:
    """A text with an address and a key that name the place where they are planted."""
    places.add(place)
    return f"ask {place}@{HOST} with api_key=sk-{place}-x7Q2m9Lr4Tz8Vb1Nc6Kd3Wf5Hg"


def leaks(text: str) -> set[str]:
    return {first or second for first, second in SECRET.findall(text)}


class Planted:
    """A server with a secret in every text that programs outside can write."""

    def __init__(self, world: PageWorld) -> None:
        self.world = world
        self._register_handler()
        self.ended, self.dead, self.held = world.wait(self._run())
        until(lambda: bool(world.wait(world.engine.conflicts.waiting())))
        self._goals()
        self._bus_and_mail()
        self._tasks()

    def _register_handler(self) -> None:
        world = self.world

        @world.engine.handler("agent_message")
        async def work(message: Any, ctx: Any) -> Any:
            await ctx.progress(0.5, secret("progress"))
            await ctx.stream(secret("chunk"))
            await ctx.effect(secret("effect"), lambda: secret("outcome"))
            if message.payload.get("fails"):
                raise type(secret("error_type"), (Exception,), {})(secret("error"))
            if message.payload.get("holds"):
                await world.released.wait()
            return {"text": secret("result")}

    async def _run(self) -> tuple[str, str, str]:
        engine, payload = self.world.engine, {"text": secret("payload"), secret("payload_name"): 1}
        texts = {name: secret(name) for name in ("user_id", "agent_id", "service", "ordering_key", "task_id")}
        message: Any = {
            "type": "agent_message",
            "org_id": "acme",
            "payload": payload,
            "created_by": {"type": "user", "id": secret("creator")},
            "context": {"text": secret("context")},
            "metadata": {"text": secret("metadata")},
            "idempotency_key": secret("idempotency_key"),
            **texts,
        }
        operation = {"target": secret("target"), "resources": {secret("resource"): 1.0}}
        await engine.goals.start("acme", "goal", context={"text": secret("goal_context")})
        ended = await engine.submit(**message, goal_id="goal")
        dead = await engine.submit(
            type="agent_message", org_id="acme", payload={**payload, "fails": True}, max_retries=0
        )
        holding: Any = {"type": "agent_message", "org_id": "acme", "payload": {"holds": True}}
        held = await engine.submit(**holding, operation=operation)
        await engine.submit(**holding, operation=operation, parent_message_id=secret("parent"))
        await ended.result(timeout_s=HANG_GUARD_S)
        with pytest.raises(Exception, match="error"):
            await dead.result(timeout_s=HANG_GUARD_S)
        return ended.message_id, dead.message_id, held.message_id

    def _goals(self) -> None:
        async def story() -> None:
            goals, graph = self.world.engine.goals, self.world.engine.graph
            node, name = secret("node"), secret("property")
            await graph.main().save(node, {name: secret("base")})
            await goals.start("acme", "merging")
            await graph.branch("merging").update(node, {name: secret("branch")})
            await graph.main().update(node, {name: secret("main")})
            await goals.complete("merging")
            await graph.branch("goal").save(secret("own_node"), {"text": secret("change")})
            await goals.checkpoint("goal", secret("reason"))

        self.world.wait(story())

    def _bus_and_mail(self) -> None:
        world = self.world
        fields = {name: secret(f"bus_{name}") for name in ("body", "project_id", "task_id", "run_id")}
        world.post("/bus/team/messages", {"type": secret("bus_type"), **fields})
        with Mail(world.nats, token=world.token) as mail:
            mail.create("news", public=True, desc=secret("mailbox"))
        status = world.data / "mail" / "status.json"  # Mail writes it once a second
        until(lambda: status.is_file() and bool(json.loads(status.read_text())["public"]))

    def _tasks(self) -> None:
        """A task that is done, one that has failed, and one that is held. Their events are on the stream."""
        world = self.world
        self.tasks: list[str] = []
        texts = {"type": secret("task_type"), "parent": secret("task_parent")}
        for verb, fields in (
            ("complete", {"decision": secret("task_result")}),
            ("fail", {"error": secret("task_error")}),
            ("heartbeat", {}),
        ):
            key = {"idempotency_key": f"{verb} {secret('task_key')}"}
            self.tasks.append(world.enqueue("ada", secret("task_payload"), max_retries=0, **texts, **key))
            world.post(f"/queue/{verb}", {**world.claim("ada", secret("task_worker")), **fields})

    # ---- what the page sends -------------------------------------------------------------------

    def answers(self) -> dict[str, str]:
        """The answers of every route that reads, by path."""
        paths = [path for path in _paths("GET") if path not in OPEN and not path.endswith("/stream")]
        filled = {path: [path] for path in paths}
        filled["/page/messages/{id}"] = [
            f"/page/messages/{one}" for one in (self.ended, self.dead, self.held)
        ]
        filled["/page/goals/{id}"] = ["/page/goals/goal", "/page/goals/merging"]
        for one in ("/page/messages/{id}", "/page/goals/{id}"):
            filled[f"{one}/flame.svg"] = [f"{path}/flame.svg" for path in filled[one]]
        filled["/page/agents/{agent}/tasks"] = ["/page/agents/ada/tasks"]
        filled["/page/tasks/{id}"] = [f"/page/tasks/{one}" for one in self.tasks]
        filled["/page/buses/{name}"] = ["/page/buses/team"]
        filled["/page/report.html"] = []  # a file of the operator
        found = {one: self._get(one) for ones in filled.values() for one in ones}
        for stream in ("/page/stream?after=0", "/page/buses/team/stream"):
            found[stream] = self._stream(stream)
        return found

    def changes(self) -> dict[str, str]:
        """The answers of the routes that change something, and of their previews."""
        checkpoint = {"checkpoint_id": "goal#1"}
        waiting = json.loads(self._get("/page/decisions"))["decisions"]
        [decision] = [one["decision_id"] for one in waiting if one["kind"] == "merge"]
        bodies: dict[str, list[dict[str, Any]]] = {
            "/page/replay": [{}, {"is_preview": False}],
            "/page/goals/{id}/rollback": [checkpoint, {**checkpoint, "is_preview": False}],
            "/page/decisions/{id}": [{"choice": "main"}],
            "/page/messages/{id}/cancel": [{}],
            "/page/messages/{id}/retry": [{}],
            "/page/rules/{id}/forget": [{}],
        }
        assert bodies.keys() | OPEN >= set(_paths("POST"))
        names = {"/page/goals/{id}/rollback": "goal", "/page/decisions/{id}": decision}
        return {
            f"{path} {body}": self._post(path.replace("{id}", names.get(path, self.held)), body)
            for path, given in bodies.items()
            for body in given
        }

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._request(path), timeout=HANG_GUARD_S) as answer:  # noqa: S310 - our own server
            return str(answer.read().decode())

    def _post(self, path: str, body: dict[str, Any]) -> str:
        try:
            return json.dumps(self.world.post(path, body))
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def _stream(self, path: str) -> str:
        """The events of a stream up to one that is submitted while it is open."""
        with urllib.request.urlopen(self._request(path), timeout=HANG_GUARD_S) as answer:  # noqa: S310
            if path.startswith("/page/buses"):
                last = self.world.post("/bus/team/messages", {**BUS_MESSAGE, "body": "the last"})["msg_id"]
            else:
                last = self.world.submit()
            lines: list[str] = []
            while not (lines and last in lines[-1]):
                lines.append(answer.readline().decode())
            return "".join(lines)

    def _request(self, path: str) -> urllib.request.Request:
        headers = {"authorization": f"Bearer {self.world.token}"}
        return urllib.request.Request(self.world.url + path, headers=headers)  # noqa: S310 - our own server


def _paths(method: str) -> list[str]:
    routes = PageMount(TasksApp(lambda _: None), Redactor).routes()
    return [
        served.route.path for served in routes if served.route.method == method and served.route.path != "/"
    ]


@pytest.fixture(params=["medium", "full", "none"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Planted]]:
    variables = {"POSTROOM_PAGE_REDACTION": request.param}
    adviser = Unsure(secret("reasoning"))
    with (
        page_world(tmp_path / "run", adviser=adviser, variables=variables) as world,
        world.working(secret("worker")),
    ):
        yield request.param, Planted(world)


def test_no_secret_of_an_outsider_reaches_a_page(planted: tuple[str, Planted]) -> None:
    level, site = planted
    found = {where: leaks(text) for where, text in (site.answers() | site.changes()).items()}
    if level == "none":  # the texts are there, so the other levels have something to hide
        assert set().union(*found.values()) == places - NEVER_SENT
    else:
        assert {where: names for where, names in found.items() if names} == {}
