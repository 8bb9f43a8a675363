"""Attacks on the routes of goals, decisions and conflicts: one sentence refuses each, and nothing changes."""

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from postroom.calls.fields import SMALL_BODY_BYTES_MAX
from postroom.client import EngineClient
from postroom.engine.rules import holds
from postroom.engine.rules.cells import Likeness
from tests.integration.commandline import postroom
from tests.pageworld import PageWorld, page_world
from tests.waiting import HANG_GUARD_S

CALLERS = 8
READS = ("/engine/goals", "/engine/goals/launch", "/engine/goals/launch/checkpoints", "/engine/decisions",
         "/engine/conflicts", "/engine/goals/launch/effects", "/page/goals",
         "/page/goals/launch", "/page/decisions")  # fmt: skip
BAD_IDS = (
    "nothing",
    "launch%231",
    "launch%23",
    "%00",
    "a%1Fb",
    "%0A",
    "%ED%A0%80",
    "..%2f..",
    "x" * 4_000,
    "%F0%9F%92%A3",
)


class Answer(NamedTuple):
    status: int
    body: Any


class Site:
    """The server, and a token for each caller."""

    def __init__(self, world: PageWorld) -> None:
        self.world = world
        create = world.agents.tokens.create
        self.tokens = {
            "nobody": "",
            "forged": "0" * 43,
            "agent": create("agent", org="acme", agent="ada").token,
            "acme": create("operator", org="acme").token,
            "bolt": create("operator", org="bolt").token,
            "boss": world.token,
        }
        self._netloc = urlsplit(world.url).netloc

    def send(self, who: str, method: str, path: str, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection(self._netloc, timeout=HANG_GUARD_S)
        headers = {"Authorization": f"Bearer {self.tokens[who]}"} if self.tokens[who] else {}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, json.loads(answer.read()))
        finally:
            connection.close()

    def get(self, who: str, path: str) -> Answer:
        return self.send(who, "GET", path)

    def post(self, who: str, path: str, **body: Any) -> Answer:
        return self.send(who, "POST", path, json.dumps(body).encode())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with page_world(tmp_path_factory.mktemp("data")) as world:
        world._seed_goals()
        yield Site(world)


@pytest.fixture
def decision(site: Site) -> str:
    """The path of a decision of acme that waits for a person."""
    [found] = site.get("boss", "/engine/decisions").body["decisions"]
    return f"/engine/decisions/{found['decision_id']}"


def refused(answer: Answer, *statuses: int) -> str:
    """The sentence of a refusal."""
    assert answer.status in statuses, answer
    sentence: str = answer.body["message"]
    assert sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert "internal error" not in sentence
    return sentence


def state(site: Site) -> list[Any]:
    return [site.get("boss", path).body for path in READS[:5]]


@pytest.mark.statement("auth-organization")
def test_callers_without_the_right_see_and_change_nothing(site: Site, decision: str) -> None:
    before = state(site)
    for path in (*READS, decision):
        for who, status in (("nobody", 401), ("forged", 401), ("agent", 403)):
            refused(site.get(who, path), status)
    for who, statuses in (("nobody", [401]), ("forged", [401]), ("agent", [403]), ("bolt", [404])):
        refused(site.post(who, f"{decision}/answer", choice="main"), *statuses)
        refused(site.post(who, f"/page/{decision.removeprefix('/engine/')}", choice="main"), *statuses)
        rollback = {
            "checkpoint_id": "launch#1",
            "accept_irreversible": ["send-newsletter"],
            "is_preview": False,
        }
        refused(site.post(who, "/page/goals/launch/rollback", **rollback), *statuses)
    assert state(site) == before


def test_an_operator_of_one_organization_sees_only_its_goals(site: Site, decision: str) -> None:
    assert site.get("acme", "/engine/goals").body == site.get("boss", "/engine/goals").body
    assert site.get("acme", decision).body["state"] == "waiting"
    assert site.get("acme", "/engine/goals/launch").body["org_id"] == "acme"
    assert site.get("bolt", "/engine/goals").body == {"goals": []}
    assert site.get("bolt", "/engine/decisions").body == {"decisions": []}
    assert site.get("bolt", "/engine/conflicts").body == {"active": [], "waiting": []}
    for path in (*(path for path in READS if "launch" in path), decision):
        known, unknown = site.get("bolt", path), site.get("bolt", path.replace("launch", "nothing"))
        assert refused(known, 404).replace("launch", "nothing") == refused(unknown, 404)


def test_the_effects_of_a_goal_are_shown_with_what_undoes_them(site: Site) -> None:
    [effect] = site.get("acme", "/engine/goals/launch/effects").body["effects"]
    assert (effect["key"], effect["reversal_class"]) == ("send-newsletter", "IRREVERSIBLE")
    with EngineClient(site.world.url, site.tokens["acme"]) as client:
        assert client.goals.effects("launch") == [effect]
    where = ("--url", site.world.url, "--token", site.tokens["acme"])
    assert postroom("engine", "goals", "effects", "launch", *where).line == effect


def test_a_rule_is_shown_to_its_organization_and_can_be_removed(site: Site) -> None:
    """Over HTTP, by the thin client, on the page and by the command."""
    store = site.world.engine.store

    def rule(rule_id: str) -> str:
        likeness = Likeness(rule_id, "ValueError", payload={"n": 1})
        store.write(lambda transaction: holds.begin(transaction, "acme", "tool_call", likeness))
        return f"/engine/rules/{rule_id}"

    first = rule("first")
    [seen] = site.get("acme", "/engine/rules").body["rules"]
    assert (seen["choice"], seen["payload"], seen["held"]) == ("hold", {"n": 1}, 0)
    assert site.get("acme", f"{first}/held").body == {"message_ids": []}
    assert site.get("bolt", "/engine/rules").body == {"rules": []}
    for who, status in (("nobody", 401), ("agent", 403), ("bolt", 404)):
        refused(site.post(who, f"{first}/forget"), status)
        refused(site.post(who, "/page/rules/first/forget"), status)
        refused(site.get(who, f"{first}/held"), status)
    assert site.post("acme", f"{first}/forget").body == {"rule_id": "first"}
    refused(site.post("acme", f"{first}/forget"), 404)

    rule("second")
    with EngineClient(site.world.url, site.tokens["acme"]) as client:
        assert [one["rule_id"] for one in client.decisions.rules()] == ["second"]
        assert client.decisions.held("second") == []
        client.decisions.forget("second")
    rule("third")
    assert [one["rule_id"] for one in site.get("acme", "/page/decisions").body["rules"]] == ["third"]
    where = ("--url", site.world.url, "--token", site.tokens["acme"])
    assert postroom("engine", "decisions", "rules", *where).line["pattern"] == "tool_call ValueError"
    assert postroom("engine", "decisions", "held", "third", *where).lines == []
    assert postroom("engine", "decisions", "forget", "third", *where).line == {"rule_id": "third"}
    assert site.get("boss", "/engine/rules").body == {"rules": []}


def test_bad_ids_are_unknown(site: Site) -> None:
    before = state(site)
    for bad in BAD_IDS:
        for path in (f"/engine/goals/{bad}", f"/engine/goals/{bad}/checkpoints", f"/engine/decisions/{bad}"):
            refused(site.get("boss", path), 400, 404)
        refused(site.post("boss", f"/engine/decisions/{bad}/answer", choice="main"), 400, 404)
        refused(site.post("boss", f"/page/goals/{bad}/rollback", checkpoint_id=f"{bad}#1"), 400, 404)
    assert state(site) == before


def test_bad_bodies_are_refused(site: Site, decision: str) -> None:
    before = state(site)
    deep = b'{"choice": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    bodies = [
        b"", b"[]", b"null", b'"main"', b"{", b'{"choice": NaN}', b'{"choice": 1e999}', b'{"choice": null}',
        b'{"choice": ["main"]}', b'{"choice": "main", "by": "rule"}', b'{"choice": "\\ud800"}', b"\xff\xfe",
        b'{"choice": "main\\u0000"}', b'{"choice": "jump"}', b'{"choice": ""}', b'{"choice": "person"}', deep,
    ]  # fmt: skip
    for body in bodies:
        refused(site.send("boss", "POST", f"{decision}/answer", body), 400)
    huge = b'{"choice": "' + b"x" * SMALL_BODY_BYTES_MAX + b'"}'
    refused(site.send("boss", "POST", f"{decision}/answer", huge), 413)
    for wrong in (
        {}, {"checkpoint_id": 7}, {"checkpoint_id": "launch#1", "accept_irreversible": "mail"},
        {"checkpoint_id": "launch#1", "accept_irreversible": [None]},
        {"checkpoint_id": "launch#1", "force": 1},
    ):  # fmt: skip
        refused(site.post("boss", "/page/goals/launch/rollback", **wrong), 400)
    assert state(site) == before


def test_a_rollback_accepts_only_its_own_irreversible_effects(site: Site) -> None:
    world, path = site.world, "/page/goals/launch/rollback"
    before = state(site)
    foreign = [["pay"], ["launch#1"], ["SEND-NEWSLETTER"], ["send-newsletter "], ["e"] * 1_000, []]
    for keys in foreign:
        answer = site.post("acme", path, checkpoint_id="launch#1", accept_irreversible=keys, is_preview=False)
        assert "send-newsletter" in refused(answer, 409)
    for checkpoint_id in ("launch#99", "pricing#1", "nothing#1", "#", "launch#1\0"):
        refused(site.post("boss", path, checkpoint_id=checkpoint_id, is_preview=False), 400, 404)
    assert state(site) == before
    body = {"checkpoint_id": "launch#1", "accept_irreversible": ["send-newsletter"], "is_preview": False}
    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(lambda _: site.post("acme", path, **body), range(CALLERS)))
    assert {answer.status for answer in answers} == {200}, answers
    status = world.wait(world.engine.goals.status("launch"))
    assert (status.state, status.undoing) == ("ACTIVE", [])
    assert world.wait(world.engine.graph.branch("launch").get("plan")) is None
    world.wait(world.engine.goals.complete("launch"))
    ended = state(site)
    refused(site.post("boss", path, **body), 404, 409)
    assert state(site) == ended


def test_of_many_answers_one_counts(site: Site, decision: str) -> None:
    def answer(number: int) -> Answer:
        return site.post("acme", f"{decision}/answer", choice=("branch", "main")[number % 2])

    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(answer, range(CALLERS)))
    assert Counter(one.status for one in answers) == {202: 1, 409: CALLERS - 1}
    [taken] = [one.body for one in answers if one.status == 202]
    for one in answers:
        if one.status == 409:
            assert taken["choice"] in refused(one, 409)
    assert site.get("acme", decision).body["choice"] == taken["choice"]
    assert site.get("boss", "/engine/decisions").body == {"decisions": []}
    world = site.world
    assert world.wait(world.engine.goals.complete("pricing")).state == "COMPLETED"
    node = world.wait(world.engine.graph.main().get("price"))
    assert node is not None
    assert node.properties == {"amount": {"branch": 2, "main": 3}[taken["choice"]]}


def test_memory_over_http_and_mcp_stays_within_the_organization(site: Site) -> None:
    """An agent of bolt names a node and a goal of acme."""
    world = site.world
    world.wait(world.engine.graph.main("acme").save("vault", {"code": 1}))
    site.tokens["eve"] = world.agents.tokens.create("agent", org="bolt", agent="eve").token
    refused(site.post("eve", "/engine/messages", type="memory_retrieve", org_id="acme", payload={}), 403)
    save = {"node_id": "vault", "properties": {"code": 2}}
    assert results(site, "memory_retrieve", {"node_id": "vault"}) == [{"node": None}] * 2
    assert results(site, "memory_retrieve", {"query": "vault"}) == [{"nodes": []}] * 2
    saved = results(site, "memory_save", save)
    assert sorted((node["version"], node["org_id"]) for node in saved) == [(1, "bolt"), (2, "bolt")]
    kept = world.wait(world.engine.graph.main("acme").get("vault"))
    assert kept is not None
    assert kept.properties == {"code": 1}


def results(site: Site, kind: str, payload: dict[str, Any]) -> list[Any]:
    """The results of a message of eve that is sent over MCP and over HTTP."""
    over_mcp = asyncio.run(submit_over_mcp(site, kind, payload))
    over_http = site.post("eve", "/engine/messages", type=kind, payload=payload, goal_id="launch")
    for _ in range(2):  # a save waits for another one of the same node
        site.world.run({})
    ids = (over_mcp, over_http.body["message_id"])
    return [site.get("eve", f"/engine/messages/{quote(one)}").body["result"] for one in ids]


async def submit_over_mcp(site: Site, kind: str, payload: dict[str, Any]) -> str:
    headers = {"Authorization": f"Bearer {site.tokens['eve']}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=HANG_GUARD_S) as http_client,
        Client(streamable_http_client(f"{site.world.url}/mcp", http_client=http_client)) as client,
    ):
        answer = await client.call_tool("submit", {"type": kind, "payload": payload})
        assert answer.structured_content is not None
        return str(answer.structured_content["message_id"])
