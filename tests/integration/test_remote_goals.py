"""Goals, their contexts and the knowledge graph over the network: HTTP, the client, commands and MCP."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from postroom.calls.fields import GOAL_BYTES_MAX
from postroom.client import EngineClient
from postroom.errors import (
    ContextChanged,
    GoalEnded,
    InvalidMessage,
    NotAllowed,
    RollbackRefused,
    UnknownCheckpoint,
    UnknownGoal,
    UnknownNode,
)
from postroom.goals.graph.branches import NODE_BYTES_MAX
from tests.integration.commandline import Result, isolate, postroom
from tests.integration.mcpclients import Serving, call, names, over_http, refused, serving
from tests.integration.test_goals_outside import waiting_goal


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("goals") / "run") as running:
        yield running


def client_of(server: Serving, name: str) -> EngineClient:
    return EngineClient(server.url, server.tokens[name])


@pytest.fixture(scope="module")
def acme(server: Serving) -> Iterator[EngineClient]:
    """A client of an operator of acme."""
    with client_of(server, "operator") as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: Serving) -> Iterator[EngineClient]:
    """A client of an admin of all organizations."""
    with client_of(server, "admin") as client:
        yield client


def test_goal_lives_over_the_network(acme: EngineClient) -> None:
    goals = acme.goals
    assert goals.start(goal_id="trip", context={"to": "Rome"}) == "trip"
    assert goals.start("acme", "trip") == "trip"  # changes nothing
    assert goals.context("trip") == ({"to": "Rome"}, 1)
    assert goals.set_context("trip", {"to": "Oslo"}, 1) == 2
    with pytest.raises(ContextChanged, match="has version 2, not 1"):
        goals.set_context("trip", {"to": "Bonn"}, 1)
    branch = acme.graph.branch("trip")
    assert branch.save("hotel", {"stars": 3, "pool": True}, [("in", "oslo")])["version"] == 1
    assert branch.update("hotel", {"pool": None}, edges=[("near", "fjord")])["properties"] == {"stars": 3}
    assert branch.neighbours("hotel") == [("in", "oslo"), ("near", "fjord")]
    assert acme.graph.main().get("hotel") is None
    taken = goals.checkpoint("trip", "booked")
    assert [one["reason"] for one in goals.checkpoints("trip")] == ["start", "booked"]
    branch.save("hotel", {"stars": 1})
    assert goals.rollback(taken["checkpoint_id"])["state"] == "ACTIVE"
    found = branch.get("hotel")
    assert found is not None
    assert found["properties"] == {"stars": 3}
    assert goals.complete("trip")["state"] == "COMPLETED"
    merged = acme.graph.main().get("hotel")
    assert merged is not None
    assert (merged["org_id"], merged["properties"]) == ("acme", {"stars": 3})
    with pytest.raises(GoalEnded, match="cannot fail goal 'trip': it is COMPLETED"):
        goals.fail("trip")
    second = goals.start()
    assert goals.fail(second, "no flight")["state"] == goals.status(second)["state"] == "FAILED"
    assert {"trip", second} <= {one["goal_id"] for one in goals.list()}


def test_organizations_do_not_reach_each_others_goals(
    server: Serving, acme: EngineClient, admin: EngineClient
) -> None:
    admin.goals.start("bolt", "secret", context={"code": 1})
    admin.graph.branch("secret").save("vault", {"code": 1})
    admin.graph.main("bolt").save("vault", {"code": 2})
    calls: list[Any] = [
        acme.goals.status,
        acme.goals.checkpoints,
        acme.goals.checkpoint,
        acme.goals.complete,
        acme.goals.fail,
        acme.goals.context,
        lambda goal_id: acme.goals.set_context(goal_id, {}, 1),
        lambda goal_id: acme.goals.rollback(f"{goal_id}#1"),
        lambda goal_id: acme.graph.branch(goal_id).get("vault"),
        lambda goal_id: acme.graph.branch(goal_id).save("vault", {}),
        lambda goal_id: acme.graph.branch(goal_id).update("vault", {}),
    ]
    for run in calls:
        for goal_id in ("secret", "nothing"):  # answered alike
            with pytest.raises(UnknownGoal, match=f"there is no goal '{goal_id}'"):
                run(goal_id)
    assert acme.graph.main().get("vault") is None
    with pytest.raises(UnknownNode):
        acme.graph.main().update("vault", {"code": 3})
    for refused_call in (
        lambda: acme.goals.start("bolt"),
        lambda: acme.graph.main("bolt").get("vault"),
        lambda: acme.graph.main("bolt").save("vault", {}),
    ):
        with pytest.raises(NotAllowed):
            refused_call()
    with pytest.raises(InvalidMessage, match="is taken: choose another one"):
        acme.goals.start(goal_id="secret")
    assert "secret" not in {one["goal_id"] for one in acme.goals.list()}
    assert admin.goals.context("secret") == ({"code": 1}, 1)
    assert (admin.graph.main("bolt").get("vault") or {})["properties"] == {"code": 2}
    with client_of(server, "alice") as agent:
        for run in (agent.goals.start, agent.goals.list, lambda: agent.graph.main().get("vault")):
            with pytest.raises(NotAllowed, match="only an operator"):
                run()


def test_bad_calls_of_goals_are_refused_in_one_sentence(acme: EngineClient, admin: EngineClient) -> None:
    with pytest.raises(InvalidMessage, match="has to name that of a goal: org_id"):
        admin.goals.start()
    for goal_id in ("a/b", "a#1", ""):
        with pytest.raises(InvalidMessage):
            acme.goals.start(goal_id=goal_id)
    acme.goals.start(goal_id="odd")
    with pytest.raises(UnknownCheckpoint):
        acme.goals.rollback("odd#9")
    with pytest.raises(InvalidMessage, match="the context has"):
        acme.goals.set_context("odd", {"text": "x" * 70_000}, 1)
    with pytest.raises(InvalidMessage):
        acme.goals.set_context("odd", {"text": "x" * GOAL_BYTES_MAX}, 1)
    with pytest.raises(InvalidMessage):
        acme.graph.branch("odd").save("node", {"text": "x" * NODE_BYTES_MAX})
    with pytest.raises(InvalidMessage):
        acme.graph.branch("odd").save("node", {}, scope="FOREVER")
    other = acme.request("POST", "/engine/goals/odd/checkpoints", {})["checkpoint_id"]
    acme.goals.start(goal_id="even")
    with pytest.raises(UnknownCheckpoint):
        acme.request("POST", "/engine/goals/even/rollback", {"checkpoint_id": other})
    assert acme.goals.context("odd") == ({}, 1)


@pytest.fixture
def command(server: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    isolate(monkeypatch, tmp_path)

    def run(*arguments: object) -> Result:
        token = server.tokens["admin"]
        return postroom("engine", *arguments, "--url", server.url, "--token", token)

    return run


def test_commands_of_goals_work_through_a_server(command: Any) -> None:
    assert command("goals", "start", "acme", "--goal", "shell").line == {"goal_id": "shell"}
    assert command("goals", "context", "shell", '{"to": "Rome"}', "--version", 1).line["version"] == 2
    assert command("goals", "context", "shell").line == {"context": {"to": "Rome"}, "version": 2}
    assert command("goals", "context", "shell", "{}", "--version", 1).code == 1
    assert command("goals", "context", "shell", "{}").code == 2
    assert command("goals", "context", "shell", "{", "--version", 2).code == 2
    taken = command("goals", "checkpoint", "shell", "--reason", "now").line["checkpoint_id"]
    saved = command("graph", "save", "inn", '{"beds": 2}', "--edge", "in", "rome", "--goal", "shell")
    assert saved.line == {"node_id": "inn", "version": 1}
    assert command("graph", "update", "inn", '{"beds": 3}', "--goal", "shell").line["version"] == 2
    shown = command("graph", "get", "inn", "--goal", "shell").line
    assert (shown["properties"], shown["edges"]) == ({"beds": 3}, [["in", "rome"]])
    assert command("goals", "rollback", taken).line["state"] == "ACTIVE"
    assert command("graph", "get", "inn", "--goal", "shell").code == 1
    assert command("goals", "complete", "shell").line["state"] == "COMPLETED"
    assert command("goals", "start", "acme", "--goal", "lost").code == 0
    assert command("goals", "fail", "lost", "--reason", "no").line["state"] == "FAILED"
    assert command("graph", "save", "sun", '{"is": "hot"}').line["version"] == 1
    assert command("graph", "get", "sun").line["org_id"] == ""


def test_goal_tools_exist_for_operators_alone(server: Serving) -> None:
    async def main() -> None:
        async with over_http(server, "alice") as agent:
            assert "goals" not in await names(agent)
            assert "only an operator may do that" in await refused(agent, "goals")
        async with over_http(server, "operator") as client:
            started = await call(client, "start_goal", goal_id="tools", context={"n": 1})
            assert (started["goal_id"], started["untrusted"]) == ("tools", True)
            read = await call(client, "goal_context", id="tools")
            assert (read["context"], read["version"]) == ({"n": 1}, 1)
            changed = {"id": "tools", "context": {"n": 2}, "expect_version": 1}
            assert (await call(client, "set_goal_context", **changed))["version"] == 2
            assert "Call goal_context" in await refused(client, "set_goal_context", **changed)
            node = {"node_id": "tool", "goal_id": "tools"}
            await call(client, "save_node", **node, properties={"a": 1}, edges=[["of", "box"]])
            await call(client, "update_node", **node, changes={"a": 2})
            seen = await call(client, "read_node", **node)
            assert (seen["properties"], seen["edges"]) == ({"a": 2}, [["of", "box"]])
            taken = await call(client, "take_checkpoint", id="tools", reason="now")
            listed = await call(client, "checkpoints", id="tools")
            assert [one["reason"] for one in listed["checkpoints"]] == ["start", "now"]
            back = await call(client, "roll_back_goal", id="tools", checkpoint_id=taken["checkpoint_id"])
            assert back["state"] == "ACTIVE"
            assert (await call(client, "complete_goal", id="tools"))["state"] == "COMPLETED"
            assert (await call(client, "goal", id="tools"))["state"] == "COMPLETED"
            assert "tools" in {one["goal_id"] for one in (await call(client, "goals"))["goals"]}
            assert "goals lists" in await refused(client, "fail_goal", id="nothing")

    asyncio.run(main())


def test_effects_that_cannot_be_undone_have_to_be_accepted(tmp_path: Any) -> None:
    with serving(tmp_path / "run") as other, client_of(other, "operator") as acme:
        waiting_goal(f"sqlite:///{other.data / 'queue.db'}")
        with pytest.raises(RollbackRefused, match="cannot be undone: mail"):
            acme.goals.rollback("trip#1")
        assert acme.goals.status("trip")["failure"]["error"] == "never"
        assert acme.goals.rollback("trip#1", accept_irreversible=["mail"])["state"] == "ACTIVE"
        context, _ = acme.goals.context("trip")
        assert json.dumps(context["previous_failure"])
