"""Goals, decisions and conflicts on the command line and over HTTP."""

import asyncio
import json
from typing import Any

import pytest

from postroom import Advice, Adviser, Engine, Policy, Retry
from postroom.engine.work.worker import Worker
from postroom.errors import ValidationError
from tests.integration.commandline import Result, isolate, postroom
from tests.integration.servers import serving


class Unsure(Adviser):
    """Never sure."""

    async def advise(self, question: Any) -> Any:
        return Advice(question.options[0], 0.1, "perhaps")


def waiting_goal(url: Any) -> None:
    """A goal whose failed step waits for a person, and two operations of which one waits."""
    policy = Policy(retries={"tool_call": Retry(max_retries=0)})
    with Engine.open(url, policy, adviser=Unsure()) as engine:

        @engine.handler("tool_call")
        async def step(message: Any, ctx: Any) -> None:
            await ctx.effect("mail", lambda: 1, reversal_class="IRREVERSIBLE")
            raise ValidationError("never")

        async def story() -> None:
            await engine.goals.start("acme", "trip")
            await engine.graph.branch("trip").save("paris", {"x": 1})
            fields: Any = {"type": "tool_call", "org_id": "acme", "payload": {}}
            await engine.submit(**fields, goal_id="trip")
            worker = Worker(engine.core, worker_id="w", slots=1)
            while await worker.step():
                pass
            for _ in range(2):
                await engine.submit(**fields, operation={"target": "t"})

        asyncio.run(story())


@pytest.fixture(autouse=True)
def folder(monkeypatch: Any, tmp_path: Any) -> Any:
    isolate(monkeypatch, tmp_path)
    return tmp_path


def engine(*arguments: Any) -> Result:
    return postroom("engine", *arguments, "--data", "run")


def test_a_goal_on_the_command_line(folder: Any) -> None:
    (folder / "run").mkdir()
    waiting_goal("sqlite:///run/queue.db")
    [goal] = engine("goals", "list").lines
    assert (goal["goal_id"], goal["state"]) == ("trip", "ACTIVE")
    assert engine("goals", "show", "trip").line["failure"]["error"] == "never"
    reasons = [one["reason"] for one in engine("goals", "checkpoints", "trip").lines]
    assert reasons == ["start", "irreversible", "task"]
    assert engine("graph", "get", "paris", "--goal", "trip").line["properties"] == {"x": 1}
    assert engine("graph", "get", "paris").code == 1
    refused = engine("goals", "rollback", "trip#1")
    assert (refused.code, "accept_irreversible" in refused.errors) == (1, True)
    rolled = engine("goals", "rollback", "trip#1", "--accept-irreversible", "mail")
    assert rolled.line["state"] == "ACTIVE"
    assert engine("goals", "complete", "trip").line["state"] == "COMPLETED"
    assert engine("goals", "start", "acme", "--goal", "next").line == {"goal_id": "next"}
    assert engine("goals", "fail", "next", "--reason", "no").line["state"] == "FAILED"
    assert engine("goals", "show", "nothing").code == 1
    saved = engine("graph", "save", "rome", '{"x": 1}', "--edge", "in", "italy")
    assert saved.line == {"node_id": "rome", "version": 1}
    assert engine("graph", "get", "rome").line["edges"] == [["in", "italy"]]
    assert engine("graph", "save", "rome", "{").code == 2
    for org_id in ("acme", "bolt"):
        assert engine("graph", "save", "plan", f'{{"of": "{org_id}"}}', "--org", org_id).code == 0
        found = engine("graph", "get", "plan", "--org", org_id).line
        assert (found["org_id"], found["properties"], found["version"]) == (org_id, {"of": org_id}, 1)
    refused = engine("graph", "get", "plan")
    assert (refused.code, "name the organization" in refused.errors) == (2, True)
    assert engine("graph", "get", "plan", "--goal", "trip").line["org_id"] == "acme"
    assert engine("graph", "get", "plan", "--goal", "trip", "--org", "bolt").code == 1
    assert engine("graph", "save", "plan", "{}").line["version"] == 1  # of a shared node
    assert engine("graph", "get", "plan").line["org_id"] == ""
    assert engine("graph", "get", "plan", "--org", "a/b").code == 2


def test_decisions_and_conflicts_on_the_command_line(folder: Any) -> None:
    (folder / "run").mkdir()
    waiting_goal("sqlite:///run/queue.db")
    [decision] = engine("decisions", "list").lines
    shown = engine("decisions", "show", decision["decision_id"]).line
    assert (shown["kind"], shown["state"]) == ("recovery", "waiting")
    assert engine("decisions", "answer", decision["decision_id"], "jump").code == 2
    assert engine("decisions", "answer", decision["decision_id"], "person").code == 0
    assert engine("decisions", "list").lines == []
    assert engine("decisions", "rules").lines == []
    assert engine("decisions", "forget", "x").code == 1
    assert engine("conflicts").line == {"active": [], "waiting": []}


def test_goals_decisions_and_conflicts_over_http(tmp_path: Any) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    waiting_goal(f"sqlite:///{data}/queue.db")
    with serving(data) as server:
        server.tokens["caller"] = server.agents.add("caller", org="acme")
        for path in ("/engine/goals", "/engine/decisions", "/engine/conflicts", "/engine/goals/trip"):
            assert server.get("caller", path).status == 403
            assert server.get("boss", path).status == 200
        [goal] = server.get("boss", "/engine/goals").json["goals"]
        assert goal["goal_id"] == "trip"
        assert server.get("boss", "/engine/goals/x").status == 404
        found = server.get("boss", "/engine/goals/trip/checkpoints").json["checkpoints"]
        assert [one["reason"] for one in found] == ["start", "irreversible", "task"]
        [decision] = server.get("boss", "/engine/decisions").json["decisions"]
        path = f"/engine/decisions/{decision['decision_id']}"
        assert server.get("boss", path).json["state"] == "waiting"
        assert server.post("boss", f"{path}/answer", choice="jump").status == 400
        answer = server.post("boss", f"{path}/answer", choice="person")
        assert (answer.status, answer.json["by"]) == (202, "person")
        assert server.post("boss", f"{path}/answer", choice="person").status == 409
        assert server.get("boss", "/engine/decisions/x").status == 404
        message = {"type": "tool_call", "payload": {}, "operation": {"target": "t"}}
        assert server.post("caller", "/engine/messages", **message).status == 202
        wrong = server.post("caller", "/engine/messages", **{**message, "operation": {"mode": "odd"}})
        assert (wrong.status, wrong.json["error"]) == (400, "InvalidMessage")
        remote = ("--url", f"http://127.0.0.1:{server.port}", "--token", server.tokens["boss"])
        assert postroom("engine", "goals", "show", "trip", *remote).line["state"] == "ACTIVE"
        assert postroom("engine", "decisions", "list", *remote).lines == []
        assert json.dumps(postroom("engine", "conflicts", *remote).line)
